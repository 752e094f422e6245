//! What the quantizers of the K formats share: superblocks laid out for SIMD, the two passes over a call, and arithmetic
//! that gives the same bits on every instruction set.
//!
//! The sub-blocks of a superblock are fitted side by side, one per lane, so every sum runs down the lanes and never across
//! them.

use super::blocks::{Half, SUPERBLOCK};
use std::collections::BinaryHeap;

/// The weights of a superblock, transposed: `[i][s]` is weight `i` of sub-block `s`.
pub(super) type Columns<const LANES: usize, const SUB: usize> = [[f32; LANES]; SUB];

/// One superblock to be fitted.
pub(super) trait Superblock: Sized {
    /// Scales (and minima) before the levels are assigned.
    type Grid;
    /// What is stored.
    type Block;
    /// The largest error of a call is pulled down to this share of half a step of a plain fit of the sub-block that
    /// reaches farthest.
    const ENOUGH: f32;
    /// Steps that span [`Superblock::reach`] in a plain fit.
    const STEPS: f32;

    /// `importance` has a value per weight.
    fn new(weights: &[f32; SUPERBLOCK], importance: Option<&[f32]>) -> Self;
    /// What the levels of its widest sub-block must span.
    fn reach(&self) -> f32;
    /// The grid with the smallest squared error.
    fn fit(&self) -> Self::Grid;
    /// The largest error on a grid.
    fn largest_error(&self, grid: &Self::Grid) -> f32;
    /// A grid whose largest error is below `error`, or the same `error` when none was found. Stops at `enough`.
    fn tighten(&self, error: f32, enough: f32) -> (Self::Grid, f32);
    /// The levels on a grid.
    fn assign(&self, grid: &Self::Grid) -> Self::Block;
}

/// Quantizes rows of whole superblocks; `write(index, block)` receives every superblock at least once (again when its
/// largest error was pulled down). `importance` has one value per column, `cols` in all.
#[inline(always)]
pub(super) fn quantize<S: Superblock>(
    src: &[f32],
    importance: Option<&[f32]>,
    cols: usize,
    mut write: impl FnMut(usize, &S::Block),
) {
    let mut errors = Vec::with_capacity(src.len() / SUPERBLOCK);
    let per_row = cols / SUPERBLOCK;
    let weights = |index: usize| importance.map(|w| &w[(index % per_row) * SUPERBLOCK..][..SUPERBLOCK]);
    let mut widest = 0.0;
    for (index, x) in src.as_chunks::<SUPERBLOCK>().0.iter().enumerate() {
        let superblock = S::new(x, weights(index));
        let grid = superblock.fit();
        widest = larger(widest, superblock.reach());
        errors.push(superblock.largest_error(&grid));
        write(index, &superblock.assign(&grid));
    }
    let enough = S::ENOUGH * widest / (2.0 * S::STEPS);
    pull_down(&errors, enough, |index, error| {
        let superblock = S::new(&src.as_chunks::<SUPERBLOCK>().0[index], weights(index));
        let (grid, tightened) = superblock.tighten(error, enough);
        if tightened < error {
            write(index, &superblock.assign(&grid));
        }
        tightened
    });
}

/// Pulls the largest error of a call down to `enough`, as far as that goes: hands the superblock with the largest error
/// to `improve(index, error)`, which returns its new largest error, until the worst one is good enough or was already
/// improved.
#[inline(always)]
fn pull_down(errors: &[f32], enough: f32, mut improve: impl FnMut(usize, f32) -> f32) {
    // Errors are not negative, so their bits are ordered as they are.
    let mut worst_first: BinaryHeap<(u32, usize, bool)> =
        errors.iter().enumerate().map(|(index, error)| (error.to_bits(), index, false)).collect();
    while let Some((error, index, done)) = worst_first.pop() {
        if done || f32::from_bits(error) <= enough {
            return;
        }
        worst_first.push((improve(index, f32::from_bits(error)).to_bits(), index, true));
    }
}

/// Lays a superblock out in columns.
#[inline(always)]
pub(super) fn columns<const LANES: usize, const SUB: usize>(weights: &[f32; SUPERBLOCK]) -> Columns<LANES, SUB> {
    let mut x = [[0.0; LANES]; SUB];
    for i in 0..SUB {
        for s in 0..LANES {
            x[i][s] = weights[SUB * s + i];
        }
    }
    x
}

/// The importance of a superblock's weights in columns, at most 1 (all ones without an importance matrix).
#[inline(always)]
pub(super) fn importance_columns<const LANES: usize, const SUB: usize>(
    importance: Option<&[f32]>,
) -> Columns<LANES, SUB> {
    let mut w = [[1.0; LANES]; SUB];
    if let Some(importance) = importance {
        for (s, sub) in importance.chunks_exact(SUB).enumerate() {
            let scale = inverse(sub.iter().fold(0.0, |a, &b| larger(a, b)));
            for (i, &value) in sub.iter().enumerate() {
                // A sub-block without data counts evenly; a column never seen still counts a little.
                w[i][s] = if scale > 0.0 { larger(value * scale, 1e-4) } else { 1.0 };
            }
        }
    }
    w
}

/// What a sub-block of `sub` weights costs when the largest error is pulled down: its squared error where its largest
/// error is small enough, and more than that, the worse the larger, where it is not.
#[inline(always)]
pub(super) fn cost<const LANES: usize>(
    sub: usize,
    squared: &[f32; LANES],
    largest: &[f32; LANES],
    enough: f32,
) -> [f32; LANES] {
    let mut out = [0.0; LANES];
    for s in 0..LANES {
        // Squared errors, weighted by 1 at most, cannot reach the first factor while the largest error is small enough.
        let over = 1000.0 * sub as f32 * largest[s] * largest[s];
        out[s] = if largest[s] <= enough { squared[s] } else { over };
    }
    out
}

/// The largest lane, at least 0.
#[inline(always)]
pub(super) fn larger_lane<const LANES: usize>(x: &[f32; LANES]) -> f32 {
    x.iter().fold(0.0, |a, &b| larger(a, b))
}

/// The lane of the largest value.
#[inline(always)]
pub(super) fn worst_lane<const LANES: usize>(x: &[f32; LANES]) -> usize {
    (0..LANES).fold(0, |a, s| if x[s] > x[a] { s } else { a })
}

/// Rounds to the nearest integer, ties to even, for |x| < 2^22 (vectorizes on every instruction set).
#[inline(always)]
pub(super) fn round(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC) - MAGIC
}

/// The larger; one instruction, unlike `f32::max`, which orders NaN. Inputs are finite.
#[inline(always)]
pub(super) fn larger(a: f32, b: f32) -> f32 {
    if a > b { a } else { b }
}

/// The smaller.
#[inline(always)]
pub(super) fn smaller(a: f32, b: f32) -> f32 {
    if a < b { a } else { b }
}

/// `x` held within `low..=high`.
#[inline(always)]
pub(super) fn clamp(x: f32, low: f32, high: f32) -> f32 {
    smaller(larger(x, low), high)
}

/// The half nearest to `x`, at most the largest finite one.
#[inline(always)]
pub(super) fn finite_half(x: f32) -> Half {
    Half::from_f32(larger(smaller(x, 65504.0), -65504.0))
}

/// `1 / x`, or 0 where `x` is 0 or its reciprocal is not finite.
#[inline(always)]
pub(super) fn inverse(x: f32) -> f32 {
    let inv = 1.0 / x;
    if x != 0.0 && inv.abs() < f32::INFINITY { inv } else { 0.0 }
}
