//! Prompts: many activation rows, bound by arithmetic.
//!
//! Sixteen weight rows make a tile, one register lane each: the tile's weights are unpacked once into bytes ordered
//! `[4 columns][weight row][byte]`, so that one dot instruction multiplies 4 columns of 16 weight rows with 4 broadcast
//! activations. The activation rows are copied into panels of up to [`MAX_ROWS`] rows, step by step in the order the
//! kernel reads them. All accumulators stay in registers for a whole superblock.

use super::{broadcast, halves, scales_and_minima, transpose};
use crate::cpu::matmul::activations::{QuantizedRow, SuperblockSums};
use crate::cpu::matmul::scalar::QuantizedDot;
use crate::format::blocks::{BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0};
use std::arch::x86_64::*;

/// Weight rows per tile.
pub(in crate::cpu::matmul) const OUTPUTS: usize = 16;
/// Activation rows per panel at most: two accumulators each, in 32 registers.
pub(in crate::cpu::matmul) const MAX_ROWS: usize = 12;

/// A format with a tile kernel. A step is the weights under one block scale: a block or superblock.
pub(in crate::cpu::matmul) trait Tile: QuantizedDot {
    /// A step of a tile, unpacked.
    type Weights;
    /// A step of an activation row besides its values and scale.
    type Sums: Copy;
    /// Columns per step.
    const STEP: usize;

    /// Unpacks one block of each of the tile's weight rows.
    ///
    /// # Safety
    /// The CPU has the features of [`crate::cpu::Simd::Avx512`], a block is readable `at` bytes after each pointer, `to` is
    /// writable.
    unsafe fn unpack(rows: &[*const u8; OUTPUTS], at: usize, to: *mut Self::Weights);

    /// Step `step` of an activation row's sums.
    ///
    /// # Safety
    /// The row has that many steps.
    unsafe fn sums(x: &QuantizedRow<'_>, step: usize) -> Self::Sums;

    /// `out[r][o]` = weight row `o` times activation row `r`.
    ///
    /// # Safety
    /// The CPU has the features of [`crate::cpu::Simd::Avx512`]; `weights` is `steps` steps, `panel` was made by
    /// [`fill_panel`] with the same `N` and as many steps.
    unsafe fn multiply<const N: usize>(
        weights: *const Self::Weights,
        panel: *const u8,
        steps: usize,
        out: &mut [[f32; OUTPUTS]; MAX_ROWS],
    );
}

/// One step of a panel. `W` is the columns per step, `S` the sums.
#[repr(C, align(64))]
struct PanelStep<S, const W: usize, const N: usize> {
    q: [[i8; W]; N],
    d: [f32; N],
    sums: [S; N],
}

/// Bytes of a panel of any number of rows.
pub(in crate::cpu::matmul) fn panel_bytes<T: Tile>(steps: usize) -> usize {
    steps * (MAX_ROWS * (T::STEP + 4 + size_of::<T::Sums>())).next_multiple_of(64)
}

/// Copies `N` activation rows into a panel.
///
/// # Safety
/// `W` is `T::STEP`, the rows have `steps` steps, and [`panel_bytes`] bytes are writable at `panel`, aligned to 64.
pub(in crate::cpu::matmul) unsafe fn fill_panel<T: Tile, const W: usize, const N: usize>(
    x: &[QuantizedRow<'_>; N],
    steps: usize,
    panel: *mut u8,
) {
    let panel = panel.cast::<PanelStep<T::Sums, W, N>>();
    for step in 0..steps {
        for r in 0..N {
            // SAFETY: the rows have `steps` steps of W values; the panel's steps lie in the caller's buffer.
            unsafe {
                let to = panel.add(step);
                let from = x[r].q.as_ptr().add(step * W);
                std::ptr::copy_nonoverlapping(from, (&raw mut (*to).q[r]).cast(), W);
                (&raw mut (*to).d[r]).write(*x[r].d.get_unchecked(step));
                (&raw mut (*to).sums[r]).write(T::sums(&x[r], step));
            }
        }
    }
}

/// A step of a `Q8_0` tile.
#[repr(C, align(64))]
pub(in crate::cpu::matmul) struct WeightsOf32 {
    /// Weights plus 128.
    q: [__m512i; 8],
    d: __m512,
}

impl Tile for BlockQ8_0 {
    type Weights = WeightsOf32;
    /// -128 times the sum.
    type Sums = i32;
    const STEP: usize = 32;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unpack(rows: &[*const u8; OUTPUTS], at: usize, to: *mut Self::Weights) {
        let flip = _mm512_set1_epi8(-128);
        // SAFETY: 2 bytes of scale and 32 of weights at each pointer (the caller's promise).
        unsafe {
            (&raw mut (*to).d).write(halves(rows, at));
            for chunk in 0..2 {
                for (i, dword) in transpose(rows, at + 2 + 16 * chunk).into_iter().enumerate() {
                    (&raw mut (*to).q[4 * chunk + i]).write(_mm512_xor_si512(dword, flip));
                }
            }
        }
    }

    unsafe fn sums(x: &QuantizedRow<'_>, step: usize) -> i32 {
        // SAFETY: one i32 per block, aligned; the caller's promise.
        unsafe { x.sums.as_ptr().cast::<i32>().add(step).read() }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        weights: *const Self::Weights,
        panel: *const u8,
        steps: usize,
        out: &mut [[f32; OUTPUTS]; MAX_ROWS],
    ) {
        let panel = panel.cast::<PanelStep<i32, 32, N>>();
        let mut sums = [_mm512_setzero_ps(); N];
        for step in 0..steps {
            // SAFETY: `step` is below the steps of both (the caller's promise).
            let (w, x) = unsafe { (&*weights.add(step), &*panel.add(step)) };
            // Starting from -128 times the sum of the activations takes the weights' 128 back.
            let mut dots: [__m512i; N] = std::array::from_fn(|r| _mm512_set1_epi32(x.sums[r]));
            for k in 0..8 {
                for r in 0..N {
                    // SAFETY: dword `k` of 8.
                    dots[r] = _mm512_dpbusd_epi32(dots[r], w.q[k], unsafe { broadcast(x.q[r].as_ptr().add(4 * k)) });
                }
            }
            for r in 0..N {
                let scale = _mm512_mul_ps(w.d, _mm512_set1_ps(x.d[r]));
                sums[r] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots[r]), sums[r]);
            }
        }
        for r in 0..N {
            // SAFETY: 16 floats.
            unsafe { _mm512_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
        }
    }
}

/// A step of a `Q4_K` or `Q5_K` tile.
#[repr(C, align(64))]
pub(in crate::cpu::matmul) struct WeightsWithMinima {
    q: [__m512i; 64],
    /// Of the 8 sub-blocks, as i32.
    scales: [__m512i; 8],
    /// Of sub-blocks 0 and 1, 2 and 3, ... as pairs of words.
    mins: [__m512i; 4],
    d: __m512,
    dmin: __m512,
}

/// Unpacks the 16 bytes `d, dmin, scales` of each block.
///
/// # Safety
/// As [`Tile::unpack`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack_headers(rows: &[*const u8; OUTPUTS], at: usize, to: *mut WeightsWithMinima) {
    // SAFETY: a block starts with these 16 bytes, and `to` is writable (the caller's promise).
    unsafe {
        let header = scales_and_minima(rows, at);
        (&raw mut (*to).d).write(header.d);
        (&raw mut (*to).dmin).write(header.dmin);
        (&raw mut (*to).mins).write(header.mins);
        for s in 0..8 {
            (&raw mut (*to).scales[s]).write(header.scale(s));
        }
    }
}

/// # Safety
/// As [`Tile::multiply`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply_with_minima<const N: usize>(
    weights: *const WeightsWithMinima,
    panel: *const u8,
    steps: usize,
    out: &mut [[f32; OUTPUTS]; MAX_ROWS],
) {
    let panel = panel.cast::<PanelStep<[i32; 4], 256, N>>();
    for r in 0..N {
        out[r] = [0.0; OUTPUTS];
    }
    for step in 0..steps {
        // SAFETY: `step` is below the steps of both (the caller's promise).
        let (w, x) = unsafe { (&*weights.add(step), &*panel.add(step)) };
        let mut scaled = [_mm512_setzero_si512(); N];
        for s in 0..8 {
            let mut dots = [_mm512_setzero_si512(); N];
            for k in 8 * s..8 * s + 8 {
                for r in 0..N {
                    // SAFETY: dword `k` of 64.
                    dots[r] = _mm512_dpbusd_epi32(dots[r], w.q[k], unsafe { broadcast(x.q[r].as_ptr().add(4 * k)) });
                }
            }
            for r in 0..N {
                scaled[r] = _mm512_add_epi32(scaled[r], _mm512_mullo_epi32(dots[r], w.scales[s]));
            }
        }
        for r in 0..N {
            let mut offset = _mm512_setzero_si512();
            for p in 0..4 {
                offset = _mm512_dpwssd_epi32(offset, w.mins[p], _mm512_set1_epi32(x.sums[r][p]));
            }
            let x_d = _mm512_set1_ps(x.d[r]);
            // SAFETY: 16 floats.
            unsafe {
                let sum = _mm512_loadu_ps(out[r].as_ptr());
                let sum = _mm512_fmadd_ps(_mm512_mul_ps(w.d, x_d), _mm512_cvtepi32_ps(scaled[r]), sum);
                let sum = _mm512_fnmadd_ps(_mm512_mul_ps(w.dmin, x_d), _mm512_cvtepi32_ps(offset), sum);
                _mm512_storeu_ps(out[r].as_mut_ptr(), sum);
            }
        }
    }
}

/// The sums of 32 of a superblock, two to an i32.
///
/// # Safety
/// The row has that many superblocks.
unsafe fn pairs_of_32(x: &QuantizedRow<'_>, step: usize) -> [i32; 4] {
    // SAFETY: the caller's promise.
    bytemuck::cast(unsafe { (*x.sums.as_ptr().cast::<SuperblockSums>().add(step)).of_32 })
}

impl Tile for BlockQ4K {
    type Weights = WeightsWithMinima;
    type Sums = [i32; 4];
    const STEP: usize = 256;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unpack(rows: &[*const u8; OUTPUTS], at: usize, to: *mut Self::Weights) {
        let nibble = _mm512_set1_epi8(15);
        // SAFETY: the caller's promise; `qs` are 128 bytes after the 16 of the header.
        unsafe {
            unpack_headers(rows, at, to);
            for chunk in 0..8 {
                let k = 16 * (chunk / 2) + 4 * (chunk % 2);
                for (i, dword) in transpose(rows, at + 16 + 16 * chunk).into_iter().enumerate() {
                    (&raw mut (*to).q[k + i]).write(_mm512_and_si512(dword, nibble));
                    (&raw mut (*to).q[k + 8 + i]).write(_mm512_and_si512(_mm512_srli_epi32::<4>(dword), nibble));
                }
            }
        }
    }

    unsafe fn sums(x: &QuantizedRow<'_>, step: usize) -> [i32; 4] {
        // SAFETY: the caller's promise.
        unsafe { pairs_of_32(x, step) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        weights: *const Self::Weights,
        panel: *const u8,
        steps: usize,
        out: &mut [[f32; OUTPUTS]; MAX_ROWS],
    ) {
        // SAFETY: the caller's promise.
        unsafe { multiply_with_minima::<N>(weights, panel, steps, out) }
    }
}

impl Tile for BlockQ5K {
    type Weights = WeightsWithMinima;
    type Sums = [i32; 4];
    const STEP: usize = 256;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unpack(rows: &[*const u8; OUTPUTS], at: usize, to: *mut Self::Weights) {
        let nibble = _mm512_set1_epi8(15);
        let fifth = _mm512_set1_epi8(16);
        // SAFETY: the caller's promise; `qh` are 32 bytes after the header, `qs` 128 bytes after them.
        unsafe {
            unpack_headers(rows, at, to);
            let high = [transpose(rows, at + 16), transpose(rows, at + 32)];
            for chunk in 0..8 {
                let (p, k) = (chunk / 2, 16 * (chunk / 2) + 4 * (chunk % 2));
                // Rotations that bring bits 2p and 2p + 1 of a byte to bit 4 of the same byte.
                let turn = |bit: usize| _mm512_set1_epi32((bit as i32 + 28) % 32);
                for (i, dword) in transpose(rows, at + 48 + 16 * chunk).into_iter().enumerate() {
                    let high = high[chunk % 2][i];
                    for (sub, low) in [dword, _mm512_srli_epi32::<4>(dword)].into_iter().enumerate() {
                        let bit = _mm512_rorv_epi32(high, turn(2 * p + sub));
                        // (bit & fifth) | low
                        let q = _mm512_ternarylogic_epi32::<0xf8>(_mm512_and_si512(low, nibble), bit, fifth);
                        (&raw mut (*to).q[k + 8 * sub + i]).write(q);
                    }
                }
            }
        }
    }

    unsafe fn sums(x: &QuantizedRow<'_>, step: usize) -> [i32; 4] {
        // SAFETY: the caller's promise.
        unsafe { pairs_of_32(x, step) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        weights: *const Self::Weights,
        panel: *const u8,
        steps: usize,
        out: &mut [[f32; OUTPUTS]; MAX_ROWS],
    ) {
        // SAFETY: the caller's promise.
        unsafe { multiply_with_minima::<N>(weights, panel, steps, out) }
    }
}

/// A step of a `Q6_K` tile.
#[repr(C, align(64))]
pub(in crate::cpu::matmul) struct WeightsOf16 {
    /// Weights plus 32.
    q: [__m512i; 64],
    /// Of the 16 sub-blocks, as i32.
    scales: [__m512i; 16],
    d: __m512,
}

impl Tile for BlockQ6K {
    type Weights = WeightsOf16;
    /// -32 times the sums of 16.
    type Sums = [i32; 16];
    const STEP: usize = 256;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn unpack(rows: &[*const u8; OUTPUTS], at: usize, to: *mut Self::Weights) {
        let nibble = _mm512_set1_epi8(15);
        let top = _mm512_set1_epi8(0x30);
        // SAFETY: the caller's promise; ql 128 bytes, qh 64, scales 16, d 2.
        unsafe {
            (&raw mut (*to).d).write(halves(rows, at + 208));
            for (i, dword) in transpose(rows, at + 192).into_iter().enumerate() {
                for byte in 0..4 {
                    let shifted = _mm512_sllv_epi32(dword, _mm512_set1_epi32(24 - 8 * byte as i32));
                    (&raw mut (*to).scales[4 * i + byte]).write(_mm512_srai_epi32::<24>(shifted));
                }
            }
            for half in 0..2 {
                for part in 0..2 {
                    let high = transpose(rows, at + 128 + 32 * half + 16 * part);
                    for pair in 0..2 {
                        // Low nibbles are weights 32 * pair .. of this half, high nibbles 32 * (pair + 2) ..
                        let low = transpose(rows, at + 64 * half + 32 * pair + 16 * part);
                        for i in 0..4 {
                            let k = 32 * half + 8 * pair + 4 * part + i;
                            let left = _mm512_set1_epi32(4 - 2 * pair as i32);
                            let right = _mm512_set1_epi32(2 * pair as i32);
                            // (high & top) | low
                            let first = _mm512_ternarylogic_epi32::<0xf8>(
                                _mm512_and_si512(low[i], nibble),
                                _mm512_sllv_epi32(high[i], left),
                                top,
                            );
                            let second = _mm512_ternarylogic_epi32::<0xf8>(
                                _mm512_and_si512(_mm512_srli_epi32::<4>(low[i]), nibble),
                                _mm512_srlv_epi32(high[i], right),
                                top,
                            );
                            (&raw mut (*to).q[k]).write(first);
                            (&raw mut (*to).q[k + 16]).write(second);
                        }
                    }
                }
            }
        }
    }

    unsafe fn sums(x: &QuantizedRow<'_>, step: usize) -> [i32; 16] {
        // SAFETY: the caller's promise.
        unsafe { (*x.sums.as_ptr().cast::<SuperblockSums>().add(step)).of_16_times_minus_32 }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        weights: *const Self::Weights,
        panel: *const u8,
        steps: usize,
        out: &mut [[f32; OUTPUTS]; MAX_ROWS],
    ) {
        let panel = panel.cast::<PanelStep<[i32; 16], 256, N>>();
        for r in 0..N {
            out[r] = [0.0; OUTPUTS];
        }
        for step in 0..steps {
            // SAFETY: `step` is below the steps of both (the caller's promise).
            let (w, x) = unsafe { (&*weights.add(step), &*panel.add(step)) };
            let mut scaled = [_mm512_setzero_si512(); N];
            for s in 0..16 {
                // Starting from -32 times the sum of the activations takes the weights' 32 back.
                let mut dots: [__m512i; N] = std::array::from_fn(|r| _mm512_set1_epi32(x.sums[r][s]));
                for k in 4 * s..4 * s + 4 {
                    for r in 0..N {
                        // SAFETY: dword `k` of 64.
                        let x = unsafe { broadcast(x.q[r].as_ptr().add(4 * k)) };
                        dots[r] = _mm512_dpbusd_epi32(dots[r], w.q[k], x);
                    }
                }
                for r in 0..N {
                    scaled[r] = _mm512_add_epi32(scaled[r], _mm512_mullo_epi32(dots[r], w.scales[s]));
                }
            }
            for r in 0..N {
                // SAFETY: 16 floats.
                unsafe {
                    let scale = _mm512_mul_ps(w.d, _mm512_set1_ps(x.d[r]));
                    let sum = _mm512_loadu_ps(out[r].as_ptr());
                    let sum = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(scaled[r]), sum);
                    _mm512_storeu_ps(out[r].as_mut_ptr(), sum);
                }
            }
        }
    }
}
