//! Multiplying weight matrices with rows of activations.
//!
//! Bits: every output element is the scalar reference's ([`scalar`]), whatever the number of rows, the tile it falls in,
//! the thread that computes it and the instruction set.
//!
//! Work is cut along output rows, so every weight is read once per call: a task streams its weight rows and uses each
//! decoded block for all activation rows.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod job;
#[cfg(target_arch = "x86_64")]
mod prefetch;
mod scalar;

pub use activations::Activations;

use self::activations::Families;
use self::job::{Job, RowList};
use super::simd::Simd;
use super::{Pool, SharedSlice};
use crate::Matrix;
use crate::format::TensorType;
use std::sync::MutexGuard;

/// Multiplications that make a task worth handing to another thread.
const WORK_PER_TASK: usize = 1 << 15;
/// Tasks per thread at most: enough to even out a thread that was interrupted.
const TASKS_PER_THREAD: usize = 8;
/// Task borders fall on multiples of this many output rows.
const OUTPUT_UNIT: usize = 16;

/// The activation rows one expert has to process.
#[derive(Clone, Copy, Debug)]
pub struct ExpertGroup<'a> {
    /// Which expert's weights.
    pub expert: u32,
    /// Which rows of the activations.
    pub rows: &'a [u32],
    /// Where each of those rows goes: output rows, each named at most once in all groups of a call.
    pub out_rows: &'a [u32],
}

/// Which rows of the activations a matrix is multiplied with, and where the results go.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// All rows with the whole matrix: `out[r * w.rows + o] = sum over c of w[o][c] * x[r][c]`.
    All,
    /// The matrix holds experts of `width` rows each. For row `i` of a group,
    /// `out[out_rows[i] * width + o] = sum over c of w[expert * width + o][c] * x[rows[i]][c]`. Each expert's weights are read once
    /// for all rows of its group; output rows no group names are left as they were.
    Experts {
        /// Weight rows of an expert, and values of an output row.
        width: usize,
        /// Who processes what.
        groups: &'a [ExpertGroup<'a>],
    },
}

/// A matrix and the activations it is multiplied with.
pub struct Product<'a> {
    /// `[w.rows x w.cols]`
    pub w: &'a Matrix,
    /// Rows of `w.cols` values.
    pub x: &'a Activations,
    /// Which of them.
    pub rows: Rows<'a>,
    /// Rows of `w.rows` values, or of the experts' width.
    pub out: &'a mut [f32],
}

/// Computes several products in one parallel region.
///
/// # Panics
/// When a matrix is of a type that is not [`TensorType::computable`], does not hold `rows * cols` weights or has other columns
/// than its activations; when `out` is not of the products' length; when an expert, a row or an output row is out of range or an
/// output row is named twice.
pub fn multiply(pool: &Pool, products: &mut [Product<'_>]) {
    multiply_with(Simd::current(), pool, products);
}

/// Multiplies several matrices with the same activations in one parallel region, see [`multiply`] and [`Rows::All`].
///
/// # Panics
/// As [`multiply`].
pub fn matmul(pool: &Pool, ws: &mut [(&Matrix, &mut [f32])], x: &Activations) {
    let products = ws.iter_mut().map(|(w, out)| Product { w, x, rows: Rows::All, out });
    multiply(pool, &mut products.collect::<Vec<_>>());
}

fn multiply_with(simd: Simd, pool: &Pool, products: &mut [Product<'_>]) {
    let mut families: Vec<(&Activations, MutexGuard<'_, Families>)> = Vec::with_capacity(2);
    let (mut work, mut total_rows) = (0, 0);
    for Product { w, x, rows, out } in &*products {
        check(w, x);
        let named = match rows {
            Rows::All => {
                assert_eq!(out.len(), x.rows() * w.rows, "matmul output: {} rows of {}", x.rows(), w.rows);
                total_rows += w.rows;
                x.rows() * w.rows
            }
            Rows::Experts { width, groups } => {
                total_rows += groups.len() * width;
                check_groups(w, x, *width, groups, out.len()) * width
            }
        };
        if named == 0 {
            continue;
        }
        work += named * w.cols;
        let known = families.iter().position(|(other, _)| std::ptr::eq(*other, *x));
        let at = known.unwrap_or_else(|| {
            families.push((x, x.families()));
            families.len() - 1
        });
        ensure(&mut families[at].1, pool, simd, w.ty, x);
    }
    if work == 0 {
        return;
    }
    let families = |x| &*families.iter().find(|(other, _)| std::ptr::eq(*other, x)).expect("taken above").1;
    let step = rows_per_task(pool, work, total_rows);
    let parts: Vec<(&Matrix, &Activations, Rows<'_>, SharedSlice<'_, f32>)> =
        products.iter_mut().map(|Product { w, x, rows, out }| (*w, *x, *rows, SharedSlice::new(out))).collect();
    // Jobs with the number of tasks up to and with each.
    let mut jobs: Vec<(usize, Job<'_>)> = Vec::new();
    let mut tasks = 0;
    for (w, x, rows, out) in &parts {
        let whole = [ExpertGroup { expert: 0, rows: &[], out_rows: &[] }];
        let (width, groups) = match rows {
            Rows::All => (w.rows, &whole[..]),
            Rows::Experts { width, groups } => (*width, *groups),
        };
        for group in groups {
            let (from, to) = match rows {
                Rows::All => (RowList::First(x.rows()), RowList::First(x.rows())),
                Rows::Experts { .. } => (RowList::Listed(group.rows), RowList::Listed(group.out_rows)),
            };
            if from.len() > 0 && width > 0 {
                tasks += width.div_ceil(step);
                let first_row = group.expert as usize * width;
                jobs.push((tasks, Job { simd, w, first_row, width, from, to, out, x, families: families(*x) }));
            }
        }
    }
    let jobs = &jobs;
    pool.run(tasks, &|task| {
        let (end, job) = &jobs[jobs.partition_point(|(end, _)| *end <= task)];
        let start = (task + job.width.div_ceil(step) - end) * step;
        job.run(start..job.width.min(start + step));
    });
}

/// Checks the groups of a product over experts; returns the rows named.
fn check_groups(w: &Matrix, x: &Activations, width: usize, groups: &[ExpertGroup<'_>], out_len: usize) -> usize {
    if width == 0 {
        return 0;
    }
    let mut seen = vec![0u64; (out_len / width).div_ceil(64)];
    for group in groups {
        assert_eq!(group.rows.len(), group.out_rows.len(), "expert {}: rows and output rows", group.expert);
        assert!((group.expert as usize + 1) * width <= w.rows, "expert {} of {}", group.expert, w.rows);
        assert!(group.rows.iter().all(|&row| (row as usize) < x.rows()), "activation row out of range");
        for &row in group.out_rows {
            assert!((row as usize + 1) * width <= out_len, "output row {row} out of range");
            let (word, bit) = (row as usize / 64, 1 << (row % 64));
            assert!(seen[word] & bit == 0, "output row {row} is named twice");
            seen[word] |= bit;
        }
    }
    groups.iter().map(|group| group.rows.len()).sum()
}

fn check(w: &Matrix, x: &Activations) {
    assert!(w.ty.computable(), "{} matrices cannot be multiplied", w.ty);
    assert_eq!(w.cols, x.cols(), "matmul: columns of the weights and of the activations");
    let bytes = w.ty.row_bytes(w.cols).and_then(|row| row.checked_mul(w.rows));
    assert_eq!(Some(w.data.len()), bytes, "bytes of a {} matrix of {} x {}", w.ty, w.rows, w.cols);
}

fn ensure(families: &mut Families, pool: &Pool, simd: Simd, ty: TensorType, x: &Activations) {
    match ty {
        TensorType::Q8_0 => families.per_block.ensure(pool, simd, x.values(), x.rows(), x.cols()),
        TensorType::Q4_K | TensorType::Q5_K | TensorType::Q6_K => {
            families.per_superblock.ensure(pool, simd, x.values(), x.rows(), x.cols());
        }
        _ => {}
    }
}

/// Output rows per task, a multiple of [`OUTPUT_UNIT`], for `work` multiplications over `rows` output rows.
fn rows_per_task(pool: &Pool, work: usize, rows: usize) -> usize {
    let tasks = (work / WORK_PER_TASK).clamp(1, pool.threads() * TASKS_PER_THREAD);
    rows.div_ceil(tasks).next_multiple_of(OUTPUT_UNIT).max(OUTPUT_UNIT)
}

#[cfg(test)]
mod tests;
