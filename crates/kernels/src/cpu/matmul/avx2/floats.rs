//! F32, F16 and BF16 weights: two weight rows by up to three activation rows in registers, sixteen columns at a time.

use crate::cpu::matmul::job::WeightRows;
use crate::cpu::matmul::prefetch::Prefetch;
use crate::cpu::matmul::scalar::{Bf16Weight, F16Weight, F32Weight, FloatDot};
use std::arch::x86_64::*;

/// Weight rows worked on side by side.
pub(in crate::cpu::matmul) const OUTPUTS: usize = 2;

/// A format with a kernel here.
pub(in crate::cpu::matmul) trait Floats: FloatDot {
    /// Eight weights.
    ///
    /// # Safety
    /// The CPU has the features of [`crate::cpu::Simd::Avx2`]; eight weights are readable at `p`.
    unsafe fn load(p: *const Self) -> __m256;
}

impl Floats for F32Weight {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const Self) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(p.cast()) }
    }
}

impl Floats for F16Weight {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const Self) -> __m256 {
        // SAFETY: the caller's promise.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(p.cast()) })
    }
}

impl Floats for Bf16Weight {
    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(p: *const Self) -> __m256 {
        // SAFETY: the caller's promise.
        let halves = unsafe { _mm_loadu_si128(p.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(halves)))
    }
}

/// `out[r][o]` = weight row `o` times activation row `r`. Where there is one weight row only it stands in for the other.
/// `ahead` is moved on by what was read.
///
/// # Safety
/// The CPU has the features of [`crate::cpu::Simd::Avx2`], and every activation row has the weights' columns.
#[target_feature(enable = "avx2,fma,f16c")]
pub(in crate::cpu::matmul) unsafe fn multiply<T: Floats, const N: usize>(
    w: &WeightRows<'_, T>,
    x: &[&[f32]; N],
    ahead: &mut Prefetch,
    out: &mut [[f32; OUTPUTS]; N],
) {
    let rows: [*const T; OUTPUTS] = std::array::from_fn(|o| w.row(o).cast());
    // Lanes 0..8 and 8..16.
    let mut lanes = [[[_mm256_setzero_ps(); 2]; OUTPUTS]; N];
    let whole = w.blocks & !15;
    for column in (0..whole).step_by(16) {
        ahead.advance(OUTPUTS * 16 * size_of::<T>());
        for half in 0..2 {
            // SAFETY: 16 columns from `column` on are below `w.blocks`, the columns of every row.
            unsafe {
                let weights = rows.map(|row| T::load(row.add(column + 8 * half)));
                for r in 0..N {
                    let values = _mm256_loadu_ps(x[r].as_ptr().add(column + 8 * half));
                    for o in 0..OUTPUTS {
                        lanes[r][o][half] = _mm256_fmadd_ps(weights[o], values, lanes[r][o][half]);
                    }
                }
            }
        }
    }
    if whole < w.blocks {
        // The last columns, padded with zeros.
        let rest = w.blocks - whole;
        let mut weights = [[0.0f32; 16]; OUTPUTS];
        for o in 0..OUTPUTS {
            for i in 0..rest {
                // SAFETY: column `whole + i` is below `w.blocks`; the weight may lie at any address.
                weights[o][i] = unsafe { rows[o].add(whole + i).read_unaligned() }.widen();
            }
        }
        for r in 0..N {
            let mut values = [0.0f32; 16];
            values[..rest].copy_from_slice(&x[r][whole..]);
            for half in 0..2 {
                // SAFETY: arrays of 16.
                unsafe {
                    let values = _mm256_loadu_ps(values.as_ptr().add(8 * half));
                    for o in 0..OUTPUTS {
                        let weights = _mm256_loadu_ps(weights[o].as_ptr().add(8 * half));
                        lanes[r][o][half] = _mm256_fmadd_ps(weights, values, lanes[r][o][half]);
                    }
                }
            }
        }
    }
    for r in 0..N {
        for o in 0..OUTPUTS {
            // Lanes 8 apart, then 4, then 2, then 1.
            let eight = _mm256_add_ps(lanes[r][o][0], lanes[r][o][1]);
            let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            out[r][o] = _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps::<1>(two, two)));
        }
    }
}
