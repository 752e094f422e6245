//! The inner kernel of every dense product: a small block of outputs held in registers while the inner dimension goes by.
//!
//! `c[r][j] = c[r][j] + sum over k of x[r][k] * w[k][j]`, summed from the first k to the last by fused multiply-adds.
//! The block is [`rows_of`]`(nv)` rows by `16 * nv` columns, sized so that the accumulators fill the 32 registers of
//! AVX-512; AVX2 and the scalar code walk the same block in smaller pieces.

use crate::cpu::Simd;

/// Columns of one vector.
pub const LANES: usize = 16;
/// The widest block, in vectors.
pub const MAX_VECTORS: usize = 5;

/// Rows of a block that is `nv` vectors wide.
pub const fn rows_of(nv: usize) -> usize {
    match nv {
        1 | 2 => 12,
        3 => 8,
        4 => 6,
        _ => 5,
    }
}

/// Where the operands of a block lie. `x[r][k]` is `x[r * x_row + k]`, `w[k][j]` is `w[k * w_row + j]`, `c[r][j]` is
/// `c[r * c_row + j]`.
#[derive(Clone, Copy)]
pub struct Block {
    /// Inner dimension.
    pub k: usize,
    /// First element of x.
    pub x: *const f32,
    /// Distance between rows of x.
    pub x_row: usize,
    /// First element of w.
    pub w: *const f32,
    /// Distance between rows of w.
    pub w_row: usize,
    /// First output.
    pub c: *mut f32,
    /// Distance between rows of c.
    pub c_row: usize,
    /// Null: the chains go on from what is in c. Otherwise they start from this row of `16 * nv` values.
    pub start: *const f32,
}

/// Computes a block `nv` vectors wide (1..=[`MAX_VECTORS`]).
///
/// # Safety
/// All of x (`rows_of(nv)` rows of k), w (k rows of `16 * nv`), c (`rows_of(nv)` rows of `16 * nv`) and, if not null,
/// start (`16 * nv`) must be readable, c writable and disjoint from the others; the machine must have `level`.
#[inline]
pub unsafe fn block(level: Simd, nv: usize, b: &Block) {
    debug_assert!((1..=MAX_VECTORS).contains(&nv));
    // SAFETY: the caller's promise is the callees'.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => match nv {
                1 => x86::block_avx512::<12, 1>(b),
                2 => x86::block_avx512::<12, 2>(b),
                3 => x86::block_avx512::<8, 3>(b),
                4 => x86::block_avx512::<6, 4>(b),
                _ => x86::block_avx512::<5, 5>(b),
            },
            #[cfg(target_arch = "x86_64")]
            Simd::Avx2 => x86::block_avx2(b, rows_of(nv), nv),
            _ => block_scalar(b, rows_of(nv), nv),
        }
    }
}

/// The reference.
///
/// # Safety
/// As [`block`].
unsafe fn block_scalar(b: &Block, rows: usize, nv: usize) {
    for r in 0..rows {
        for j in 0..LANES * nv {
            // SAFETY: r, j and k are inside the extents the caller vouches for.
            unsafe {
                let c = b.c.add(r * b.c_row + j);
                let mut sum = if b.start.is_null() { *c } else { *b.start.add(j) };
                for k in 0..b.k {
                    sum = (*b.x.add(r * b.x_row + k)).mul_add(*b.w.add(k * b.w_row + j), sum);
                }
                *c = sum;
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{Block, LANES};
    use std::arch::x86_64::*;

    /// # Safety
    /// As [`super::block`], on a machine with AVX-512F.
    #[target_feature(enable = "avx512f")]
    pub unsafe fn block_avx512<const ROWS: usize, const NV: usize>(b: &Block) {
        // SAFETY: all offsets stay inside the extents the caller vouches for.
        unsafe {
            let mut sums = [[_mm512_setzero_ps(); NV]; ROWS];
            for r in 0..ROWS {
                for v in 0..NV {
                    let from = if b.start.is_null() { b.c.add(r * b.c_row).cast_const() } else { b.start };
                    sums[r][v] = _mm512_loadu_ps(from.add(v * LANES));
                }
            }
            let (mut x, mut w) = (b.x, b.w);
            for _ in 0..b.k {
                let mut weights = [_mm512_setzero_ps(); NV];
                for v in 0..NV {
                    weights[v] = _mm512_loadu_ps(w.add(v * LANES));
                }
                for r in 0..ROWS {
                    let value = _mm512_set1_ps(*x.add(r * b.x_row));
                    for v in 0..NV {
                        sums[r][v] = _mm512_fmadd_ps(value, weights[v], sums[r][v]);
                    }
                }
                x = x.add(1);
                w = w.add(b.w_row);
            }
            for r in 0..ROWS {
                for v in 0..NV {
                    _mm512_storeu_ps(b.c.add(r * b.c_row + v * LANES), sums[r][v]);
                }
            }
        }
    }

    /// # Safety
    /// As [`super::block`], on a machine with AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    pub unsafe fn block_avx2(b: &Block, rows: usize, nv: usize) {
        for v in 0..nv {
            let mut r = 0;
            while r < rows {
                // SAFETY: the piece lies inside the caller's block.
                unsafe {
                    let piece = Block {
                        x: b.x.add(r * b.x_row),
                        w: b.w.add(v * LANES),
                        c: b.c.add(r * b.c_row + v * LANES),
                        start: if b.start.is_null() { b.start } else { b.start.add(v * LANES) },
                        ..*b
                    };
                    r += match rows - r {
                        4 | 8 => piece_avx2::<4>(&piece),
                        5 => piece_avx2::<5>(&piece),
                        _ => piece_avx2::<6>(&piece),
                    };
                }
            }
        }
    }

    /// `ROWS` rows of one vector of sixteen columns; returns `ROWS`.
    ///
    /// # Safety
    /// As [`super::block`], on a machine with AVX2 and FMA.
    #[target_feature(enable = "avx2,fma")]
    unsafe fn piece_avx2<const ROWS: usize>(b: &Block) -> usize {
        // SAFETY: all offsets stay inside the extents the caller vouches for.
        unsafe {
            let mut sums = [[_mm256_setzero_ps(); 2]; ROWS];
            for r in 0..ROWS {
                for v in 0..2 {
                    let from = if b.start.is_null() { b.c.add(r * b.c_row).cast_const() } else { b.start };
                    sums[r][v] = _mm256_loadu_ps(from.add(v * 8));
                }
            }
            let (mut x, mut w) = (b.x, b.w);
            for _ in 0..b.k {
                let weights = [_mm256_loadu_ps(w), _mm256_loadu_ps(w.add(8))];
                for r in 0..ROWS {
                    let value = _mm256_set1_ps(*x.add(r * b.x_row));
                    for v in 0..2 {
                        sums[r][v] = _mm256_fmadd_ps(value, weights[v], sums[r][v]);
                    }
                }
                x = x.add(1);
                w = w.add(b.w_row);
            }
            for r in 0..ROWS {
                for v in 0..2 {
                    _mm256_storeu_ps(b.c.add(r * b.c_row + v * 8), sums[r][v]);
                }
            }
        }
        ROWS
    }
}
