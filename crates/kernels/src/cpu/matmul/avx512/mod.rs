//! AVX-512 kernels: [`few_rows`] for decode windows (bound by memory), [`tile`] for prompts (bound by arithmetic),
//! [`floats`] for plain number formats.
//!
//! In the kernels of block formats a register lane is a weight row, so that the one accumulator per output element that the
//! reference prescribes costs no sums across lanes.

pub(super) mod few_rows;
pub(super) mod floats;
pub(super) mod job;
pub(super) mod tile;

use std::arch::x86_64::*;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn load_table(table: &[u8; 64]) -> __m512i {
    // SAFETY: 64 bytes.
    unsafe { _mm512_loadu_si512(table.as_ptr().cast()) }
}

/// The four bytes at `p` in every lane.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn broadcast<T>(p: *const T) -> __m512i {
    // SAFETY: the caller's promise.
    _mm512_set1_epi32(unsafe { p.cast::<i32>().read_unaligned() })
}

/// 16 bytes from each of 16 rows, transposed: register `i` holds dword `i` of every row.
///
/// # Safety
/// 16 bytes are readable `at` bytes after each pointer.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn transpose(rows: &[*const u8; 16], at: usize) -> [__m512i; 4] {
    let four_rows = |j: usize| {
        // SAFETY: the caller's promise.
        let [a, b, c, d] = [0, 4, 8, 12].map(|k| unsafe { _mm_loadu_si128(rows[j + k].add(at).cast()) });
        let low = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(a), b);
        let high = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(c), d);
        _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high)
    };
    let h = [four_rows(0), four_rows(1), four_rows(2), four_rows(3)];
    let (t0, t1) = (_mm512_unpacklo_epi32(h[0], h[1]), _mm512_unpacklo_epi32(h[2], h[3]));
    let (t2, t3) = (_mm512_unpackhi_epi32(h[0], h[1]), _mm512_unpackhi_epi32(h[2], h[3]));
    [
        _mm512_unpacklo_epi64(t0, t1),
        _mm512_unpackhi_epi64(t0, t1),
        _mm512_unpacklo_epi64(t2, t3),
        _mm512_unpackhi_epi64(t2, t3),
    ]
}

/// The f16 in each of 16 rows, as floats.
///
/// # Safety
/// 2 bytes are readable `at` bytes after each pointer.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn halves(rows: &[*const u8; 16], at: usize) -> __m512 {
    let mut words = [_mm_setzero_si128(); 2];
    for (words, rows) in words.iter_mut().zip(rows.as_chunks::<8>().0) {
        // SAFETY: the caller's promise.
        let h = rows.map(|row| unsafe { row.add(at).cast::<u16>().read_unaligned() } as i32);
        *words = _mm_insert_epi16::<1>(_mm_cvtsi32_si128(h[0]), h[1]);
        *words = _mm_insert_epi16::<3>(_mm_insert_epi16::<2>(*words, h[2]), h[3]);
        *words = _mm_insert_epi16::<5>(_mm_insert_epi16::<4>(*words, h[4]), h[5]);
        *words = _mm_insert_epi16::<7>(_mm_insert_epi16::<6>(*words, h[6]), h[7]);
    }
    _mm512_cvtph_ps(_mm256_set_m128i(words[1], words[0]))
}

/// Scales and minima of 16 superblocks of `Q4_K` or `Q5_K`, one lane per weight row.
struct Scales {
    d: __m512,
    dmin: __m512,
    /// The scales of sub-blocks 0..4 and 4..8, a byte each.
    scales: [__m512i; 2],
    /// The minima of sub-blocks 0 and 1, 2 and 3, ... as pairs of words.
    mins: [__m512i; 4],
}

impl Scales {
    /// The scale of sub-block `s`, as i32.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
    fn scale(&self, s: usize) -> __m512i {
        let byte = _mm512_srl_epi32(self.scales[s / 4], _mm_cvtsi64_si128(8 * (s as i64 % 4)));
        _mm512_and_si512(byte, _mm512_set1_epi32(0xff))
    }
}

/// Bytes 0 and 1, or 2 and 3, of each dword as two words.
const MIN_BYTES: [[u8; 64]; 2] = {
    let mut table = [[0x80; 64]; 2];
    let mut i = 0;
    while i < 2 * 16 {
        let (part, lane) = (i / 16, i % 16);
        table[part][4 * lane] = (4 * (lane % 4) + 2 * part) as u8;
        table[part][4 * lane + 2] = (4 * (lane % 4) + 2 * part + 1) as u8;
        i += 1;
    }
    table
};

/// Unpacks the 16 bytes `d, dmin, scales` at the start of each row's superblock.
///
/// # Safety
/// 16 bytes are readable `at` bytes after each pointer.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn scales_and_minima(rows: &[*const u8; 16], at: usize) -> Scales {
    // SAFETY: the caller's promise.
    let [halves, a, b, c] = unsafe { transpose(rows, at) };
    let (six, four, top) = (_mm512_set1_epi8(0x3f), _mm512_set1_epi8(0x0f), _mm512_set1_epi8(0x30));
    // The six-bit fields, see `unpack_scales`.
    let upper =
        |nibbles, x| _mm512_or_si512(_mm512_and_si512(nibbles, four), _mm512_and_si512(_mm512_srli_epi32::<2>(x), top));
    let mins = [_mm512_and_si512(b, six), upper(_mm512_srli_epi32::<4>(c), b)];
    Scales {
        d: _mm512_cvtph_ps(_mm512_cvtepi32_epi16(halves)),
        dmin: _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(halves))),
        scales: [_mm512_and_si512(a, six), upper(c, a)],
        mins: std::array::from_fn(|p| _mm512_shuffle_epi8(mins[p / 2], load_table(&MIN_BYTES[p % 2]))),
    }
}
