//! AVX-512 kernels: [`few_rows`] for decode windows (bound by memory), [`tile`] for prompts (bound by arithmetic),
//! [`floats`] for plain number formats.
//!
//! Register lanes hold different output rows wherever floats are added, so the one accumulator per output element that
//! the reference prescribes costs no horizontal float additions: only exact integers are added across lanes.

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

/// Adds up the 16 lanes of each register: lane `i` of the result is the sum of register `i`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn sum_lanes_of_4(v: [__m512i; 4]) -> __m128i {
    let pair = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (ab, cd) = (pair(v[0], v[1]), pair(v[2], v[3]));
    let all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64::<1>(all));
    _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256::<1>(half))
}

/// Adds up the 8 lanes of each register: lane `i` of the result is the sum of register `i`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn sum_lanes_of_8(v: [__m256i; 8]) -> __m256i {
    let pair = |a, b| _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
    let four = |ab, cd| _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
    let low = four(pair(v[0], v[1]), pair(v[2], v[3]));
    let high = four(pair(v[4], v[5]), pair(v[6], v[7]));
    _mm256_add_epi32(_mm256_permute2x128_si256::<0x20>(low, high), _mm256_permute2x128_si256::<0x31>(low, high))
}
