//! AVX2 kernels: [`few_rows`] for the block formats, [`floats`] for plain number formats.
//!
//! Lanes hold different output rows wherever floats are added, as in the AVX-512 kernels.

pub(super) mod few_rows;
pub(super) mod floats;
pub(super) mod job;

use std::arch::x86_64::*;

/// Adds up the 8 lanes of each register: lane `i` of the result is the sum of register `i`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn sum_lanes_of_4(v: [__m256i; 4]) -> __m128i {
    let all = _mm256_hadd_epi32(_mm256_hadd_epi32(v[0], v[1]), _mm256_hadd_epi32(v[2], v[3]));
    _mm_add_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256::<1>(all))
}
