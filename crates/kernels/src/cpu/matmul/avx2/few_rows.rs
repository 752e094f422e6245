//! Block formats: four weight rows walked side by side, each block unpacked once for up to four activation rows.

use super::sum_lanes_of_4;
use crate::cpu::matmul::activations::{QuantizedRow, SuperblockSums};
use crate::cpu::matmul::job::WeightRows;
use crate::cpu::matmul::prefetch::Prefetch;
use crate::cpu::matmul::scalar::QuantizedDot;
use crate::format::blocks::{BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0};
use std::arch::x86_64::*;

/// Weight rows worked on side by side.
pub(in crate::cpu::matmul) const OUTPUTS: usize = 4;

/// A format with a kernel here.
pub(in crate::cpu::matmul) trait FewRows: QuantizedDot {
    /// `out[r][o]` = weight row `o` times activation row `r`. Where there are fewer than four weight rows the last one
    /// stands in for the missing ones. `ahead` is moved on by what was read.
    ///
    /// # Safety
    /// The CPU has the features of [`crate::cpu::Simd::Avx2`], and every activation row has the weights' columns.
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    );
}

/// # Safety
/// 32 bytes are readable at `p`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn load<T>(p: *const T) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(p.cast()) }
}

/// Four halves as floats.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn widen(halves: [u16; 4]) -> __m128 {
    _mm_cvtph_ps(_mm_cvtsi64_si128(i64::from_ne_bytes(bytemuck::cast(halves))))
}

impl FewRows for BlockQ8_0 {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    ) {
        let rows: [*const u8; OUTPUTS] = std::array::from_fn(|o| w.row(o));
        let ones = _mm256_set1_epi16(1);
        let mut sums = [_mm_setzero_ps(); N];
        for b in 0..w.blocks {
            let mut d = [0u16; OUTPUTS];
            let mut dots = [[_mm256_setzero_si256(); OUTPUTS]; N];
            for o in 0..OUTPUTS {
                // SAFETY: block `b` of a row lies within the row; the activation rows have as many blocks.
                unsafe {
                    let block = rows[o].add(b * size_of::<Self>());
                    d[o] = block.cast::<u16>().read_unaligned();
                    let q = load(block.add(2));
                    // The first factor must be unsigned: the weight's sign goes to the activation, which has no -128.
                    let magnitude = _mm256_sign_epi8(q, q);
                    for r in 0..N {
                        let x = _mm256_sign_epi8(load(x[r].q.as_ptr().add(32 * b)), q);
                        dots[r][o] = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, x), ones);
                    }
                }
            }
            ahead.advance(OUTPUTS * size_of::<Self>());
            let d = widen(d);
            for r in 0..N {
                // SAFETY: as above.
                let scale = _mm_mul_ps(d, _mm_set1_ps(unsafe { *x[r].d.get_unchecked(b) }));
                sums[r] = _mm_fmadd_ps(scale, _mm_cvtepi32_ps(sum_lanes_of_4(dots[r])), sums[r]);
            }
        }
        for r in 0..N {
            // SAFETY: 4 floats.
            unsafe { _mm_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
        }
    }
}

/// Scales and minima of four superblocks of `Q4_K` or `Q5_K`.
struct Header {
    /// Superblock scales, one lane per weight row.
    d: __m128,
    dmin: __m128,
    /// Pairs of minima as words, one lane per weight row: sub-blocks 0 and 1, 2 and 3, ...
    mins: [__m128i; 4],
    /// For weight row `o`: the scales of the 8 sub-blocks as words.
    scales: [__m128i; 4],
}

/// Reads the 16 bytes `d, dmin, scales` at the start of four superblocks.
///
/// # Safety
/// 16 bytes are readable at each pointer.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn read_headers(blocks: [*const u8; 4]) -> Header {
    // SAFETY: the caller's promise.
    let h = blocks.map(|p| unsafe { _mm_loadu_si128(p.cast()) });
    // Transpose: one register per dword of the header, one lane per weight row.
    let (t0, t1) = (_mm_unpacklo_epi32(h[0], h[1]), _mm_unpacklo_epi32(h[2], h[3]));
    let (t2, t3) = (_mm_unpackhi_epi32(h[0], h[1]), _mm_unpackhi_epi32(h[2], h[3]));
    let (halves, a) = (_mm_unpacklo_epi64(t0, t1), _mm_unpackhi_epi64(t0, t1));
    let (b, c) = (_mm_unpacklo_epi64(t2, t3), _mm_unpackhi_epi64(t2, t3));
    let d_dmin = _mm256_cvtph_ps(halves);
    let (low, high) = (_mm256_castps256_ps128(d_dmin), _mm256_extractf128_ps::<1>(d_dmin));
    // The six-bit fields, see `unpack_scales`.
    let (six, four, top) = (_mm_set1_epi8(0x3f), _mm_set1_epi8(0x0f), _mm_set1_epi8(0x30));
    let upper = |nibbles, x| _mm_or_si128(_mm_and_si128(nibbles, four), _mm_and_si128(_mm_srli_epi32::<2>(x), top));
    let (scales_low, mins_low) = (_mm_and_si128(a, six), _mm_and_si128(b, six));
    let (scales_high, mins_high) = (upper(c, a), upper(_mm_srli_epi32::<4>(c), b));
    let first = _mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1);
    let second = _mm_setr_epi8(2, -1, 3, -1, 6, -1, 7, -1, 10, -1, 11, -1, 14, -1, 15, -1);
    let rows_01 = _mm_unpacklo_epi32(scales_low, scales_high);
    let rows_23 = _mm_unpackhi_epi32(scales_low, scales_high);
    let zero = _mm_setzero_si128();
    Header {
        d: _mm_shuffle_ps::<0x88>(low, high),
        dmin: _mm_shuffle_ps::<0xdd>(low, high),
        mins: [
            _mm_shuffle_epi8(mins_low, first),
            _mm_shuffle_epi8(mins_low, second),
            _mm_shuffle_epi8(mins_high, first),
            _mm_shuffle_epi8(mins_high, second),
        ],
        scales: [
            _mm_unpacklo_epi8(rows_01, zero),
            _mm_unpackhi_epi8(rows_01, zero),
            _mm_unpacklo_epi8(rows_23, zero),
            _mm_unpackhi_epi8(rows_23, zero),
        ],
    }
}

/// Word `index` of `words` in every word.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn spread_word(words: __m256i, index: usize) -> __m256i {
    _mm256_shuffle_epi8(words, _mm256_set1_epi16((2 * index as i16) | ((2 * index as i16 + 1) << 8)))
}

/// `Q4_K` and `Q5_K`, which differ in how sub-blocks `2p` and `2p + 1` are unpacked: `unpack(block, p)`.
///
/// # Safety
/// As [`FewRows::multiply`]; `unpack` gets a pointer to a whole superblock of format `B`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn multiply_with_minima<B: QuantizedDot, const N: usize>(
    w: &WeightRows<'_, B>,
    x: &[QuantizedRow<'_>; N],
    ahead: &mut Prefetch,
    out: &mut [[f32; OUTPUTS]; N],
    unpack: impl Fn(*const u8, usize) -> [__m256i; 2],
) {
    let rows: [*const u8; OUTPUTS] = std::array::from_fn(|o| w.row(o));
    let mut sums = [_mm_setzero_ps(); N];
    for b in 0..w.blocks {
        let blocks = rows.map(|row| row.wrapping_add(b * size_of::<B>()));
        // SAFETY: block `b` of each row lies within the row.
        let header = unsafe { read_headers(blocks) };
        let mut dots = [[_mm256_setzero_si256(); OUTPUTS]; N];
        for o in 0..OUTPUTS {
            ahead.advance(size_of::<B>());
            let scales = _mm256_broadcastsi128_si256(header.scales[o]);
            let mut acc = [_mm256_setzero_si256(); N];
            for p in 0..4 {
                let q = unpack(blocks[o], p);
                let scale = [spread_word(scales, 2 * p), spread_word(scales, 2 * p + 1)];
                for r in 0..N {
                    for i in 0..2 {
                        // SAFETY: the activation rows have `blocks` superblocks (the caller's promise).
                        let x = unsafe { load(x[r].q.as_ptr().add(256 * b + 64 * p + 32 * i)) };
                        let dot = _mm256_madd_epi16(_mm256_maddubs_epi16(q[i], x), scale[i]);
                        acc[r] = _mm256_add_epi32(acc[r], dot);
                    }
                }
            }
            for r in 0..N {
                dots[r][o] = acc[r];
            }
        }
        for r in 0..N {
            // SAFETY: as above.
            let (x_d, of_32) = unsafe {
                let sums = &*x[r].sums.as_ptr().cast::<SuperblockSums>().add(b);
                (_mm_set1_ps(*x[r].d.get_unchecked(b)), sums.of_32.as_ptr().cast::<i32>())
            };
            let mut offset = _mm_setzero_si128();
            for p in 0..4 {
                // SAFETY: `of_32` is four pairs of words.
                let pair = _mm_set1_epi32(unsafe { of_32.add(p).read() });
                offset = _mm_add_epi32(offset, _mm_madd_epi16(header.mins[p], pair));
            }
            let scaled = _mm_cvtepi32_ps(sum_lanes_of_4(dots[r]));
            sums[r] = _mm_fmadd_ps(_mm_mul_ps(header.d, x_d), scaled, sums[r]);
            sums[r] = _mm_fnmadd_ps(_mm_mul_ps(header.dmin, x_d), _mm_cvtepi32_ps(offset), sums[r]);
        }
    }
    for r in 0..N {
        // SAFETY: 4 floats.
        unsafe { _mm_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
    }
}

impl FewRows for BlockQ4K {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    ) {
        let nibble = _mm256_set1_epi8(15);
        // SAFETY: the caller's promise; the closure reads the 128 bytes of `qs` after the 16 bytes of header.
        unsafe {
            multiply_with_minima(w, x, ahead, out, |block, p| {
                let q = load(block.add(16 + 32 * p));
                [_mm256_and_si256(q, nibble), _mm256_and_si256(_mm256_srli_epi16::<4>(q), nibble)]
            });
        }
    }
}

impl FewRows for BlockQ5K {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    ) {
        let nibble = _mm256_set1_epi8(15);
        let fifth = _mm256_set1_epi8(16);
        // SAFETY: the caller's promise; the closure reads `qh` (32 bytes after the header) and `qs` (128 bytes after it).
        unsafe {
            multiply_with_minima(w, x, ahead, out, |block, p| {
                let q = load(block.add(48 + 32 * p));
                // Bit 2p, and then bit 2p + 1, moves to bit 4; what crosses byte borders is masked away.
                let high = _mm256_srl_epi64(load(block.add(16)), _mm_cvtsi64_si128(2 * p as i64));
                let bits = [_mm256_slli_epi64::<4>(high), _mm256_slli_epi64::<3>(high)];
                [
                    _mm256_or_si256(_mm256_and_si256(q, nibble), _mm256_and_si256(bits[0], fifth)),
                    _mm256_or_si256(
                        _mm256_and_si256(_mm256_srli_epi16::<4>(q), nibble),
                        _mm256_and_si256(bits[1], fifth),
                    ),
                ]
            });
        }
    }
}

impl FewRows for BlockQ6K {
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; OUTPUTS]; N],
    ) {
        let rows: [*const u8; OUTPUTS] = std::array::from_fn(|o| w.row(o));
        let nibble = _mm256_set1_epi8(0x0f);
        let top = _mm256_set1_epi8(0x30);
        let mut sums = [_mm_setzero_ps(); N];
        for b in 0..w.blocks {
            let mut d = [0u16; OUTPUTS];
            let mut dots = [[_mm256_setzero_si256(); OUTPUTS]; N];
            for o in 0..OUTPUTS {
                ahead.advance(size_of::<Self>());
                // SAFETY: the fields of block `b`, which lies within its row (ql 128 bytes, qh 64, scales 16, d 2); the
                // activation rows have as many superblocks.
                unsafe {
                    let block = rows[o].add(b * size_of::<Self>());
                    d[o] = block.add(208).cast::<u16>().read_unaligned();
                    let scales = _mm256_cvtepi8_epi16(_mm_loadu_si128(block.add(192).cast()));
                    // The offset 32 of the weights: 2 * scale times -16 * sum.
                    let doubled = _mm256_add_epi16(scales, scales);
                    let mut acc: [__m256i; N] = std::array::from_fn(|r| {
                        let sums = &*x[r].sums.as_ptr().cast::<SuperblockSums>().add(b);
                        _mm256_madd_epi16(doubled, load(sums.of_16_times_minus_16.as_ptr()))
                    });
                    // Scales 0..8 and 8..16, each in both halves.
                    let halves = [
                        _mm256_permute2x128_si256::<0x00>(scales, scales),
                        _mm256_permute2x128_si256::<0x11>(scales, scales),
                    ];
                    for half in 0..2 {
                        let high = load(block.add(128 + 32 * half));
                        for j in 0..4 {
                            let low = load(block.add(64 * half + 32 * (j % 2)));
                            let low = if j < 2 { low } else { _mm256_srli_epi16::<4>(low) };
                            let high = match j {
                                0 => _mm256_slli_epi16::<4>(high),
                                1 => _mm256_slli_epi16::<2>(high),
                                2 => high,
                                _ => _mm256_srli_epi16::<2>(high),
                            };
                            let q = _mm256_or_si256(_mm256_and_si256(low, nibble), _mm256_and_si256(high, top));
                            // Sub-block 2j of this half in the lower lane, 2j + 1 in the upper.
                            let scale = _mm256_blend_epi32::<0xf0>(
                                spread_word(halves[half], 2 * j),
                                spread_word(halves[half], 2 * j + 1),
                            );
                            for r in 0..N {
                                let x = load(x[r].q.as_ptr().add(256 * b + 128 * half + 32 * j));
                                let dot = _mm256_madd_epi16(_mm256_maddubs_epi16(q, x), scale);
                                acc[r] = _mm256_add_epi32(acc[r], dot);
                            }
                        }
                    }
                    for r in 0..N {
                        dots[r][o] = acc[r];
                    }
                }
            }
            let d = widen(d);
            for r in 0..N {
                // SAFETY: as above.
                let scale = _mm_mul_ps(d, _mm_set1_ps(unsafe { *x[r].d.get_unchecked(b) }));
                sums[r] = _mm_fmadd_ps(scale, _mm_cvtepi32_ps(sum_lanes_of_4(dots[r])), sums[r]);
            }
        }
        for r in 0..N {
            // SAFETY: 4 floats.
            unsafe { _mm_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
        }
    }
}
