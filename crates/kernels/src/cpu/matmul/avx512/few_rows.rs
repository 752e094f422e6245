//! Decode windows: 1 to 4 activation rows against a stream of weights.
//!
//! Sixteen weight rows are walked side by side, block by block, and transposed in registers so that each lane holds one
//! weight row: one dot instruction then multiplies 4 columns of 16 weight rows with 4 broadcast activations, no sum ever
//! crosses lanes, and scales and minima of 16 blocks are unpacked at once. The transposition is most of the work and is
//! shared by all activation rows, so a second row costs little.

use super::{Scales, broadcast, halves, scales_and_minima, transpose};
use crate::cpu::matmul::activations::{QuantizedRow, SuperblockSums};
use crate::cpu::matmul::job::WeightRows;
use crate::cpu::matmul::prefetch::Prefetch;
use crate::cpu::matmul::scalar::QuantizedDot;
use crate::format::blocks::{BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0};
use std::arch::x86_64::*;

/// Weight rows worked on side by side.
pub(in crate::cpu::matmul) const OUTPUTS: usize = 16;

/// A format with a few-rows kernel.
pub(in crate::cpu::matmul) trait FewRows: QuantizedDot {
    /// `out[r][o]` = weight row `o` times activation row `r`. Where there are fewer than sixteen weight rows the last one
    /// stands in for the missing ones. `ahead` is moved on by what was read.
    ///
    /// # Safety
    /// The CPU has the features of [`crate::cpu::Simd::Avx512`], and every activation row has the weights' columns.
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    );
}

/// Adds the products of one dword of every weight row with dword `at` of every activation row.
///
/// # Safety
/// Four values are readable `at` values after each pointer.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn add_dots<const N: usize>(dots: &mut [__m512i; N], w: __m512i, x: &[*const i8; N], at: usize) {
    for r in 0..N {
        // SAFETY: the caller's promise.
        dots[r] = _mm512_dpbusd_epi32(dots[r], w, unsafe { broadcast(x[r].add(at)) });
    }
}

/// # Safety
/// The CPU has AVX-512.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn store<const N: usize>(sums: &[__m512; N], out: &mut [[f32; OUTPUTS]; N]) {
    for r in 0..N {
        // SAFETY: 16 floats.
        unsafe { _mm512_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
    }
}

impl FewRows for BlockQ8_0 {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    ) {
        let rows: [*const u8; OUTPUTS] = std::array::from_fn(|o| w.row(o));
        let flip = _mm512_set1_epi8(-128);
        let q = x.map(|row| row.q.as_ptr());
        let mut sums = [_mm512_setzero_ps(); N];
        for b in 0..w.blocks {
            let at = b * size_of::<Self>();
            ahead.advance(OUTPUTS * size_of::<Self>());
            // SAFETY: block `b` of a row lies within the row (2 bytes of scale, 32 of weights), and the activation rows have
            // as many blocks (the caller's promise).
            unsafe {
                // Starting from -128 times the sum of the activations makes up for the 128 added to the weights.
                let mut dots = x.map(|row| broadcast(row.sums.as_ptr().add(4 * b)));
                for chunk in 0..2 {
                    for (i, dword) in transpose(&rows, at + 2 + 16 * chunk).into_iter().enumerate() {
                        add_dots(&mut dots, _mm512_xor_si512(dword, flip), &q, 32 * b + 16 * chunk + 4 * i);
                    }
                }
                let d = halves(&rows, at);
                for r in 0..N {
                    let scale = _mm512_mul_ps(d, _mm512_set1_ps(*x[r].d.get_unchecked(b)));
                    sums[r] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(dots[r]), sums[r]);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { store(&sums, out) };
    }
}

/// What the minima of `Q4_K` and `Q5_K` take away, and what the scales give: the last steps of a superblock.
///
/// # Safety
/// The CPU has AVX-512; the activation row has superblock `b`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn add_superblock(sum: __m512, scaled: __m512i, header: &Scales, x: &QuantizedRow<'_>, b: usize) -> __m512 {
    // SAFETY: the caller's promise; `of_32` is four pairs of words.
    unsafe {
        let of_32 = (*x.sums.as_ptr().cast::<SuperblockSums>().add(b)).of_32.as_ptr();
        let mut offset = _mm512_setzero_si512();
        for p in 0..4 {
            offset = _mm512_dpwssd_epi32(offset, header.mins[p], broadcast(of_32.add(2 * p)));
        }
        let x_d = _mm512_set1_ps(*x.d.get_unchecked(b));
        let sum = _mm512_fmadd_ps(_mm512_mul_ps(header.d, x_d), _mm512_cvtepi32_ps(scaled), sum);
        _mm512_fnmadd_ps(_mm512_mul_ps(header.dmin, x_d), _mm512_cvtepi32_ps(offset), sum)
    }
}

impl FewRows for BlockQ4K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    ) {
        let rows: [*const u8; OUTPUTS] = std::array::from_fn(|o| w.row(o));
        let (low, high) = (_mm512_set1_epi8(0x0f), _mm512_set1_epi8(0xf0_u8 as i8));
        let q = x.map(|row| row.q.as_ptr());
        let mut sums = [_mm512_setzero_ps(); N];
        for b in 0..w.blocks {
            let at = b * size_of::<Self>();
            // SAFETY: block `b` of a row lies within the row (16 bytes of header, 128 of weights), and the activation rows
            // have as many superblocks (the caller's promise).
            unsafe {
                let header = scales_and_minima(&rows, at);
                // High nibbles are used where they are, 16 times too large: the odd sub-blocks' sum is divided at the end.
                let mut even = [_mm512_setzero_si512(); N];
                let mut odd = [_mm512_setzero_si512(); N];
                for p in 0..4 {
                    ahead.advance(OUTPUTS * size_of::<Self>() / 4);
                    let mut dots = [[_mm512_setzero_si512(); N]; 2];
                    for chunk in 0..2 {
                        let dwords = transpose(&rows, at + 16 + 32 * p + 16 * chunk);
                        for (i, dword) in dwords.into_iter().enumerate() {
                            let at = 256 * b + 64 * p + 16 * chunk + 4 * i;
                            add_dots(&mut dots[0], _mm512_and_si512(dword, low), &q, at);
                            add_dots(&mut dots[1], _mm512_and_si512(dword, high), &q, at + 32);
                        }
                    }
                    let scales = [header.scale(2 * p), header.scale(2 * p + 1)];
                    for r in 0..N {
                        even[r] = _mm512_add_epi32(even[r], _mm512_mullo_epi32(dots[0][r], scales[0]));
                        odd[r] = _mm512_add_epi32(odd[r], _mm512_mullo_epi32(dots[1][r], scales[1]));
                    }
                }
                for r in 0..N {
                    let scaled = _mm512_add_epi32(even[r], _mm512_srai_epi32::<4>(odd[r]));
                    sums[r] = add_superblock(sums[r], scaled, &header, &x[r], b);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { store(&sums, out) };
    }
}

impl FewRows for BlockQ5K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    ) {
        let rows: [*const u8; OUTPUTS] = std::array::from_fn(|o| w.row(o));
        let (nibble, fifth) = (_mm512_set1_epi8(0x0f), _mm512_set1_epi8(0x10));
        let q = x.map(|row| row.q.as_ptr());
        let mut sums = [_mm512_setzero_ps(); N];
        for b in 0..w.blocks {
            let at = b * size_of::<Self>();
            // SAFETY: block `b` of a row lies within the row (16 bytes of header, 32 of fifth bits, 128 of low bits), and
            // the activation rows have as many superblocks (the caller's promise).
            unsafe {
                let header = scales_and_minima(&rows, at);
                let high = [transpose(&rows, at + 16), transpose(&rows, at + 32)];
                let mut scaled = [_mm512_setzero_si512(); N];
                for p in 0..4 {
                    ahead.advance(OUTPUTS * size_of::<Self>() / 4);
                    // Rotations that bring bits 2p and 2p + 1 of a byte to its bit 4.
                    let turns = [_mm512_set1_epi32(28 + 2 * p as i32), _mm512_set1_epi32(29 + 2 * p as i32)];
                    let mut dots = [[_mm512_setzero_si512(); N]; 2];
                    for chunk in 0..2 {
                        let dwords = transpose(&rows, at + 48 + 32 * p + 16 * chunk);
                        for (i, dword) in dwords.into_iter().enumerate() {
                            let at = 256 * b + 64 * p + 16 * chunk + 4 * i;
                            // (bits & fifth) | low four bits
                            let lower = _mm512_and_si512(dword, nibble);
                            let bits = _mm512_rorv_epi32(high[chunk][i], turns[0]);
                            let first = _mm512_ternarylogic_epi32::<0xf8>(lower, bits, fifth);
                            let upper = _mm512_and_si512(_mm512_srli_epi32::<4>(dword), nibble);
                            let bits = _mm512_rorv_epi32(high[chunk][i], turns[1]);
                            let second = _mm512_ternarylogic_epi32::<0xf8>(upper, bits, fifth);
                            add_dots(&mut dots[0], first, &q, at);
                            add_dots(&mut dots[1], second, &q, at + 32);
                        }
                    }
                    let scales = [header.scale(2 * p), header.scale(2 * p + 1)];
                    for r in 0..N {
                        scaled[r] = _mm512_add_epi32(scaled[r], _mm512_mullo_epi32(dots[0][r], scales[0]));
                        scaled[r] = _mm512_add_epi32(scaled[r], _mm512_mullo_epi32(dots[1][r], scales[1]));
                    }
                }
                for r in 0..N {
                    sums[r] = add_superblock(sums[r], scaled[r], &header, &x[r], b);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { store(&sums, out) };
    }
}

impl FewRows for BlockQ6K {
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    ) {
        let rows: [*const u8; OUTPUTS] = std::array::from_fn(|o| w.row(o));
        let (nibble, top) = (_mm512_set1_epi8(0x0f), _mm512_set1_epi8(0x30));
        let q = x.map(|row| row.q.as_ptr());
        let mut sums = [_mm512_setzero_ps(); N];
        for b in 0..w.blocks {
            let at = b * size_of::<Self>();
            // SAFETY: block `b` of a row lies within the row (ql 128 bytes, qh 64, scales 16, d 2), and the activation rows
            // have as many superblocks (the caller's promise).
            unsafe {
                let scales = transpose(&rows, at + 192);
                let mut x_sums = [std::ptr::null::<i32>(); N];
                for r in 0..N {
                    x_sums[r] = (*x[r].sums.as_ptr().cast::<SuperblockSums>().add(b)).of_16_times_minus_32.as_ptr();
                }
                let mut scaled = [_mm512_setzero_si512(); N];
                for half in 0..2 {
                    for part in 0..2 {
                        ahead.advance(OUTPUTS * size_of::<Self>() / 4);
                        let high = transpose(&rows, at + 128 + 32 * half + 16 * part);
                        for pair in 0..2 {
                            // Low nibbles are weights 32 * pair .. of this half, high nibbles 32 * (pair + 2) ..
                            let low = transpose(&rows, at + 64 * half + 32 * pair + 16 * part);
                            let (left, right) =
                                (_mm512_set1_epi32(4 - 2 * pair as i32), _mm512_set1_epi32(2 * pair as i32));
                            let s = 8 * half + 2 * pair + part;
                            let start = 256 * b + 16 * s;
                            // Starting from -32 times the sum of the activations makes up for the 32 in the weights.
                            let mut first = [_mm512_setzero_si512(); N];
                            let mut second = [_mm512_setzero_si512(); N];
                            for r in 0..N {
                                first[r] = broadcast(x_sums[r].add(s));
                                second[r] = broadcast(x_sums[r].add(s + 4));
                            }
                            for i in 0..4 {
                                // (bits & top) | low four bits
                                let lower = _mm512_and_si512(low[i], nibble);
                                let bits = _mm512_sllv_epi32(high[i], left);
                                let w = _mm512_ternarylogic_epi32::<0xf8>(lower, bits, top);
                                add_dots(&mut first, w, &q, start + 4 * i);
                                let upper = _mm512_and_si512(_mm512_srli_epi32::<4>(low[i]), nibble);
                                let bits = _mm512_srlv_epi32(high[i], right);
                                let w = _mm512_ternarylogic_epi32::<0xf8>(upper, bits, top);
                                add_dots(&mut second, w, &q, start + 64 + 4 * i);
                            }
                            let shift = _mm512_set1_epi32(24 - 8 * (2 * pair + part) as i32);
                            let scale = _mm512_srai_epi32::<24>(_mm512_sllv_epi32(scales[2 * half], shift));
                            let next = _mm512_srai_epi32::<24>(_mm512_sllv_epi32(scales[2 * half + 1], shift));
                            for r in 0..N {
                                scaled[r] = _mm512_add_epi32(scaled[r], _mm512_mullo_epi32(first[r], scale));
                                scaled[r] = _mm512_add_epi32(scaled[r], _mm512_mullo_epi32(second[r], next));
                            }
                        }
                    }
                }
                let d = halves(&rows, at + 208);
                for r in 0..N {
                    let scale = _mm512_mul_ps(d, _mm512_set1_ps(*x[r].d.get_unchecked(b)));
                    sums[r] = _mm512_fmadd_ps(scale, _mm512_cvtepi32_ps(scaled[r]), sums[r]);
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { store(&sums, out) };
    }
}
