//! Decode windows: 1 to 4 activation rows against a stream of weights.
//!
//! A few weight rows are walked side by side, block by block. Each block is unpacked once and multiplied with every
//! activation row while it is in registers; the integer sums of the weight rows are then transposed into the lanes of one
//! register. What the rows share (unpacking, scales, minima) is most of the work, so a second row costs little.

use super::{load_table, sum_lanes_of_4, sum_lanes_of_8};
use crate::cpu::matmul::activations::{QuantizedRow, SuperblockSums};
use crate::cpu::matmul::job::WeightRows;
use crate::cpu::matmul::prefetch::Prefetch;
use crate::cpu::matmul::scalar::QuantizedDot;
use crate::format::blocks::{BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0};
use std::arch::x86_64::*;

/// Weight rows a kernel call works on at most.
pub(in crate::cpu::matmul) const MAX_OUTPUTS: usize = 8;

/// A format with a few-rows kernel.
pub(in crate::cpu::matmul) trait FewRows: QuantizedDot {
    /// Weight rows worked on side by side, at most [`MAX_OUTPUTS`].
    const OUTPUTS: usize;
    /// From so many activation rows on (5 at most) unpacking a tile pays, measured on Zen 4.
    const TILE_ROWS: usize;

    /// `out[r][o]` = weight row `o` times activation row `r`, for `o` in `0..OUTPUTS`. Where there are fewer weight rows
    /// the last one stands in for the missing ones. `ahead` is moved on by what was read.
    ///
    /// # Safety
    /// The CPU has the features of [`crate::cpu::Simd::Avx512`], and every activation row has the weights' columns.
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; MAX_OUTPUTS]; N],
    );
}

impl FewRows for BlockQ8_0 {
    const OUTPUTS: usize = 8;
    const TILE_ROWS: usize = 5;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; MAX_OUTPUTS]; N],
    ) {
        let rows: [*const u8; 8] = std::array::from_fn(|o| w.row(o));
        let flip = _mm256_set1_epi8(-128);
        let mut sums = [_mm256_setzero_ps(); N];
        for b in 0..w.blocks {
            let at = b * size_of::<Self>();
            let mut d = [0u16; 8];
            let mut q = [flip; 8];
            for o in 0..8 {
                // SAFETY: block `b` of a row lies within the row: 2 bytes of scale, 32 of weights.
                unsafe {
                    d[o] = rows[o].add(at).cast::<u16>().read_unaligned();
                    // Weights plus 128 are unsigned, as the dot instruction wants them.
                    q[o] = _mm256_xor_si256(_mm256_loadu_si256(rows[o].add(at + 2).cast()), flip);
                }
            }
            ahead.advance(8 * size_of::<Self>());
            // SAFETY: `d` is 16 bytes.
            let d = _mm256_cvtph_ps(unsafe { _mm_loadu_si128(d.as_ptr().cast()) });
            for r in 0..N {
                // SAFETY: the activation rows have `blocks` blocks (the caller's promise).
                let (x_q, x_d, offset) = unsafe {
                    (
                        _mm256_loadu_si256(x[r].q.as_ptr().add(32 * b).cast()),
                        _mm256_set1_ps(*x[r].d.get_unchecked(b)),
                        _mm256_set1_epi32(x[r].sums.as_ptr().cast::<i32>().add(b).read()),
                    )
                };
                let dots = std::array::from_fn(|o| _mm256_dpbusd_epi32(_mm256_setzero_si256(), q[o], x_q));
                let dots = _mm256_cvtepi32_ps(_mm256_add_epi32(sum_lanes_of_8(dots), offset));
                sums[r] = _mm256_fmadd_ps(_mm256_mul_ps(d, x_d), dots, sums[r]);
            }
        }
        for r in 0..N {
            // SAFETY: `out[r]` has room for 8 floats.
            unsafe { _mm256_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
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
    /// For weight row `o`: the scales of sub-blocks 0..4 and 4..8, spread to match packed dot products.
    scales: [[__m512i; 2]; 4],
}

/// Where [`Header::scales`] takes its bytes from: in every 128-bit lane lie the 8 scales of two weight rows. Packing the
/// dots of weights 0..64 and 64..128 puts sub-blocks (0, 2) into lanes 0 and 1 and (1, 3) into lanes 2 and 3.
const SCALE_BYTES: [[[u8; 64]; 2]; 2] = {
    let mut table = [[[0x80; 64]; 2]; 2];
    let mut i = 0;
    while i < 2 * 2 * 32 {
        let (row, part, word) = (i / 64, i / 32 % 2, i % 32);
        let sub_block = 4 * part + (word / 16) + 2 * (word / 4 % 2);
        table[row][part][2 * word] = (8 * row + sub_block) as u8;
        i += 1;
    }
    table
};

/// Reads the 16 bytes `d, dmin, scales` at the start of four superblocks.
///
/// # Safety
/// 16 bytes are readable at each pointer.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
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
    let rows_01 = _mm512_broadcast_i32x4(_mm_unpacklo_epi32(scales_low, scales_high));
    let rows_23 = _mm512_broadcast_i32x4(_mm_unpackhi_epi32(scales_low, scales_high));
    let spread = |rows, row: usize| {
        [
            _mm512_shuffle_epi8(rows, load_table(&SCALE_BYTES[row][0])),
            _mm512_shuffle_epi8(rows, load_table(&SCALE_BYTES[row][1])),
        ]
    };
    Header {
        d: _mm_shuffle_ps::<0x88>(low, high),
        dmin: _mm_shuffle_ps::<0xdd>(low, high),
        mins: [
            _mm_shuffle_epi8(mins_low, first),
            _mm_shuffle_epi8(mins_low, second),
            _mm_shuffle_epi8(mins_high, first),
            _mm_shuffle_epi8(mins_high, second),
        ],
        scales: [spread(rows_01, 0), spread(rows_01, 1), spread(rows_23, 0), spread(rows_23, 1)],
    }
}

/// 16 partial sums of scale times dot product of one superblock; `q[p]` are weights `64*p..64*p+64`, all below 64.
///
/// The dots of four weights fit i16 (4 * 63 * 127), so two registers of them are packed into one and multiplied with
/// their scales by one instruction. `start` is what the sums begin with.
///
/// # Safety
/// 256 values are readable at `x`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn scaled_dots(q: &[__m512i; 4], scales: &[__m512i; 2], x: *const i8, start: __m512i) -> __m512i {
    let zero = _mm512_setzero_si512();
    let dot = |p: usize| {
        // SAFETY: the caller's promise.
        _mm512_dpbusd_epi32(zero, q[p], unsafe { _mm512_loadu_si512(x.add(64 * p).cast()) })
    };
    let first = _mm512_packs_epi32(dot(0), dot(1));
    let second = _mm512_packs_epi32(dot(2), dot(3));
    _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(start, first, scales[0]), second, scales[1])
}

/// `Q4_K` and `Q5_K`, which differ in how the weights are unpacked.
///
/// # Safety
/// As [`FewRows::multiply`]; `unpack` gets a pointer to a whole superblock of format `B`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn multiply_with_minima<B: QuantizedDot, const N: usize>(
    w: &WeightRows<'_, B>,
    x: &[QuantizedRow<'_>; N],
    ahead: &mut Prefetch,
    out: &mut [[f32; MAX_OUTPUTS]; N],
    unpack: impl Fn(*const u8) -> [__m512i; 4],
) {
    let rows: [*const u8; 4] = std::array::from_fn(|o| w.row(o));
    let mut sums = [_mm_setzero_ps(); N];
    for b in 0..w.blocks {
        let blocks = rows.map(|row| row.wrapping_add(b * size_of::<B>()));
        // SAFETY: block `b` of each row lies within the row.
        let header = unsafe { read_headers(blocks) };
        let mut dots = [[_mm512_setzero_si512(); 4]; N];
        for o in 0..4 {
            ahead.advance(size_of::<B>());
            let q = unpack(blocks[o]);
            for r in 0..N {
                // SAFETY: the activation rows have `blocks` superblocks (the caller's promise).
                dots[r][o] =
                    unsafe { scaled_dots(&q, &header.scales[o], x[r].q.as_ptr().add(256 * b), _mm512_setzero_si512()) };
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
                offset = _mm_dpwssd_epi32(offset, header.mins[p], _mm_set1_epi32(unsafe { of_32.add(p).read() }));
            }
            let scaled = _mm_cvtepi32_ps(sum_lanes_of_4(dots[r]));
            sums[r] = _mm_fmadd_ps(_mm_mul_ps(header.d, x_d), scaled, sums[r]);
            sums[r] = _mm_fnmadd_ps(_mm_mul_ps(header.dmin, x_d), _mm_cvtepi32_ps(offset), sums[r]);
        }
    }
    for r in 0..N {
        // SAFETY: `out[r]` has room for 4 floats.
        unsafe { _mm_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
    }
}

/// Per-word shift counts: `low` in the lower half of the register, `high` in the upper.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn shifts(low: i16, high: i16) -> __m512i {
    _mm512_inserti64x4::<1>(_mm512_set1_epi16(low), _mm256_set1_epi16(high))
}

/// 32 bytes in both halves of a register.
///
/// # Safety
/// 32 bytes are readable at `p`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn load_twice(p: *const u8) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(p.cast()) })
}

impl FewRows for BlockQ4K {
    const OUTPUTS: usize = 4;
    const TILE_ROWS: usize = 4;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; MAX_OUTPUTS]; N],
    ) {
        let nibble = _mm512_set1_epi8(15);
        let counts = shifts(0, 4);
        // SAFETY: the caller's promise; the closure reads the 128 bytes of `qs` after the 16 bytes of header.
        unsafe {
            multiply_with_minima(w, x, ahead, out, |block| {
                std::array::from_fn(|p| {
                    _mm512_and_si512(_mm512_srlv_epi16(load_twice(block.add(16 + 32 * p)), counts), nibble)
                })
            });
        }
    }
}

impl FewRows for BlockQ5K {
    const OUTPUTS: usize = 4;
    const TILE_ROWS: usize = 4;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; MAX_OUTPUTS]; N],
    ) {
        let nibble = _mm512_set1_epi8(15);
        let fifth = _mm512_set1_epi8(16);
        let counts = shifts(0, 4);
        // SAFETY: the caller's promise; the closure reads `qh` (32 bytes after the header) and `qs` (128 bytes after it).
        unsafe {
            multiply_with_minima(w, x, ahead, out, |block| {
                let high = load_twice(block.add(16));
                // Bit s of `high` belongs to sub-block s: bring bits 2p and 2p+1 to bit 4.
                let high = [
                    _mm512_sllv_epi16(high, shifts(4, 3)),
                    _mm512_sllv_epi16(high, shifts(2, 1)),
                    _mm512_srlv_epi16(high, shifts(0, 1)),
                    _mm512_srlv_epi16(high, shifts(2, 3)),
                ];
                std::array::from_fn(|p| {
                    let low = _mm512_and_si512(_mm512_srlv_epi16(load_twice(block.add(48 + 32 * p)), counts), nibble);
                    // (high & fifth) | low
                    _mm512_ternarylogic_epi32::<0xf8>(low, high[p], fifth)
                })
            });
        }
    }
}

/// Where the scales of `Q6_K` go, into the upper byte of each word: packing the dots of weights 0..64 and 64..128 puts
/// sub-blocks `l` and `4 + l` into lane `l`.
const Q6_K_SCALE_BYTES: [[u8; 64]; 2] = {
    let mut table = [[0x80; 64]; 2];
    let mut i = 0;
    while i < 2 * 32 {
        let (part, word) = (i / 32, i % 32);
        table[part][2 * word + 1] = (8 * part + word / 8 + 4 * (word / 4 % 2)) as u8;
        i += 1;
    }
    table
};

impl FewRows for BlockQ6K {
    const OUTPUTS: usize = 4;
    const TILE_ROWS: usize = 5;

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    unsafe fn multiply<const N: usize>(
        w: &WeightRows<'_, Self>,
        x: &[QuantizedRow<'_>; N],
        ahead: &mut Prefetch,
        out: &mut [[f32; MAX_OUTPUTS]; N],
    ) {
        let rows: [*const u8; 4] = std::array::from_fn(|o| w.row(o));
        let nibble = _mm512_set1_epi8(0x0f);
        let top = _mm512_set1_epi8(0x30);
        let (left, right) = (shifts(4, 2), shifts(0, 2));
        let tables = [load_table(&Q6_K_SCALE_BYTES[0]), load_table(&Q6_K_SCALE_BYTES[1])];
        let mut sums = [_mm_setzero_ps(); N];
        for b in 0..w.blocks {
            let mut dots = [[_mm512_setzero_si512(); 4]; N];
            let mut d = [0u16; 8];
            for o in 0..4 {
                let block = rows[o].wrapping_add(b * size_of::<Self>());
                ahead.advance(size_of::<Self>());
                // SAFETY: the fields of block `b`, which lies within its row: ql 128 bytes, qh 64, scales 16, d 2.
                let (ql, qh, scales) = unsafe {
                    d[o] = block.add(208).cast::<u16>().read_unaligned();
                    (
                        [_mm512_loadu_si512(block.cast()), _mm512_loadu_si512(block.add(64).cast())],
                        [load_twice(block.add(128)), load_twice(block.add(160))],
                        _mm_loadu_si128(block.add(192).cast()),
                    )
                };
                let q: [__m512i; 4] = std::array::from_fn(|p| {
                    let (low, high) = if p % 2 == 0 {
                        (ql[p / 2], _mm512_sllv_epi16(qh[p / 2], left))
                    } else {
                        (_mm512_srli_epi16::<4>(ql[p / 2]), _mm512_srlv_epi16(qh[p / 2], right))
                    };
                    // (high & top) | low
                    _mm512_ternarylogic_epi32::<0xf8>(_mm512_and_si512(low, nibble), high, top)
                });
                let words = _mm256_cvtepi8_epi16(scales);
                let doubled = _mm256_add_epi16(words, words);
                let everywhere = _mm512_broadcast_i32x4(scales);
                let spread = tables.map(|table| _mm512_srai_epi16::<8>(_mm512_shuffle_epi8(everywhere, table)));
                for r in 0..N {
                    // SAFETY: the activation rows have `blocks` superblocks (the caller's promise).
                    dots[r][o] = unsafe {
                        let sums = &*x[r].sums.as_ptr().cast::<SuperblockSums>().add(b);
                        // The offset 32 of the weights: 2 * scale times -16 * sum.
                        let offset = _mm256_loadu_si256(sums.of_16_times_minus_16.as_ptr().cast());
                        let start = _mm512_zextsi256_si512(_mm256_madd_epi16(doubled, offset));
                        scaled_dots(&q, &spread, x[r].q.as_ptr().add(256 * b), start)
                    };
                }
            }
            // SAFETY: `d` is 16 bytes.
            let d = _mm_cvtph_ps(unsafe { _mm_loadu_si128(d.as_ptr().cast()) });
            for r in 0..N {
                // SAFETY: as above.
                let x_d = _mm_set1_ps(unsafe { *x[r].d.get_unchecked(b) });
                sums[r] = _mm_fmadd_ps(_mm_mul_ps(d, x_d), _mm_cvtepi32_ps(sum_lanes_of_4(dots[r])), sums[r]);
            }
        }
        for r in 0..N {
            // SAFETY: `out[r]` has room for 4 floats.
            unsafe { _mm_storeu_ps(out[r].as_mut_ptr(), sums[r]) };
        }
    }
}
