//! F32, F16 and BF16 weights: four weight rows by up to six activation rows in registers, sixteen columns at a time.

use crate::cpu::matmul::job::WeightRows;
use crate::cpu::matmul::prefetch::Prefetch;
use crate::cpu::matmul::scalar::{Bf16Weight, F16Weight, F32Weight, FloatDot};
use std::arch::x86_64::*;

/// Weight rows worked on side by side.
pub(in crate::cpu::matmul) const OUTPUTS: usize = 4;

/// A format with a kernel here.
pub(in crate::cpu::matmul) trait Floats: FloatDot {
    /// The weights at `p` whose bit in `mask` is set, the others 0.
    ///
    /// # Safety
    /// The CPU has the features of [`crate::cpu::Simd::Avx512`]; the weights whose bits are set are readable.
    unsafe fn load(p: *const Self, mask: __mmask16) -> __m512;
}

impl Floats for F32Weight {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn load(p: *const Self, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_maskz_loadu_ps(mask, p.cast()) }
    }
}

impl Floats for F16Weight {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn load(p: *const Self, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, p.cast()) })
    }
}

impl Floats for Bf16Weight {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn load(p: *const Self, mask: __mmask16) -> __m512 {
        // SAFETY: the caller's promise.
        let halves = unsafe { _mm256_maskz_loadu_epi16(mask, p.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
    }
}

/// `out[r][o]` = weight row `o` times activation row `r`. Where there are fewer than four weight rows the last one stands
/// in for the missing ones. `ahead` is moved on by what was read.
///
/// # Safety
/// The CPU has the features of [`crate::cpu::Simd::Avx512`], and every activation row has the weights' columns.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(in crate::cpu::matmul) unsafe fn multiply<T: Floats, const N: usize>(
    w: &WeightRows<'_, T>,
    x: &[&[f32]; N],
    ahead: &mut Prefetch,
    out: &mut [[f32; OUTPUTS]; N],
) {
    let rows: [*const T; OUTPUTS] = std::array::from_fn(|o| w.row(o).cast());
    let mut lanes = [[_mm512_setzero_ps(); OUTPUTS]; N];
    let mut step = |column: usize, mask: __mmask16| {
        // SAFETY: `column` and the columns of the mask are below `w.blocks`, the columns of every row.
        unsafe {
            let weights: [__m512; OUTPUTS] = std::array::from_fn(|o| T::load(rows[o].add(column), mask));
            for r in 0..N {
                let values = _mm512_maskz_loadu_ps(mask, x[r].as_ptr().add(column));
                for o in 0..OUTPUTS {
                    lanes[r][o] = _mm512_fmadd_ps(weights[o], values, lanes[r][o]);
                }
            }
        }
    };
    let whole = w.blocks & !15;
    for column in (0..whole).step_by(16) {
        ahead.advance(OUTPUTS * 16 * size_of::<T>());
        step(column, 0xffff);
    }
    if whole < w.blocks {
        step(whole, (1 << (w.blocks - whole)) - 1);
    }
    for r in 0..N {
        // Lanes 8 apart, then 4, then 2, then 1; the last two steps for all four weight rows at once.
        let fours = lanes[r].map(|v| {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight))
        });
        let twos = |a, b| _mm_add_ps(_mm_movelh_ps(a, b), _mm_movehl_ps(b, a));
        let (ab, cd) = (twos(fours[0], fours[1]), twos(fours[2], fours[3]));
        let ones = _mm_add_ps(_mm_shuffle_ps::<0x88>(ab, cd), _mm_shuffle_ps::<0xdd>(ab, cd));
        // SAFETY: `out[r]` has room for 4 floats.
        unsafe { _mm_storeu_ps(out[r].as_mut_ptr(), ones) };
    }
}
