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

/// Matrices whose tasks share one parallel region; more are run in several.
const MATRICES_PER_REGION: usize = 8;
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

/// Multiplies several matrices with the same activations in one parallel region.
///
/// For every `(w, out)`: `out[r * w.rows + o] = sum over c of w[o][c] * x[r][c]`.
///
/// # Panics
/// When a matrix is of a type that is not [`TensorType::computable`], does not hold `rows * cols` weights, has other
/// columns than `x`, or `out` is not `x.rows() * w.rows` long.
pub fn matmul(pool: &Pool, ws: &mut [(&Matrix, &mut [f32])], x: &Activations) {
    matmul_with(Simd::current(), pool, ws, x);
}

/// Multiplies each group's rows with its expert's weights: for row `i` of a group,
/// `out[out_rows[i] * rows_per_expert + o] = sum over c of w[expert * rows_per_expert + o][c] * x[rows[i]][c]`.
///
/// Each expert's weights are read once for all rows of its group; output rows no group names are left as they were.
///
/// # Panics
/// As [`matmul`]; also when an expert, a row or an output row is out of range or an output row is named twice.
pub fn matmul_experts(
    pool: &Pool,
    w: &Matrix,
    rows_per_expert: usize,
    groups: &[ExpertGroup<'_>],
    x: &Activations,
    out: &mut [f32],
) {
    matmul_experts_with(Simd::current(), pool, w, rows_per_expert, groups, x, out);
}

fn matmul_with(simd: Simd, pool: &Pool, ws: &mut [(&Matrix, &mut [f32])], x: &Activations) {
    let mut families = x.families();
    for (w, out) in ws.iter() {
        check(w, x);
        assert_eq!(out.len(), x.rows() * w.rows, "matmul output: {} rows of {}", x.rows(), w.rows);
        ensure(&mut families, pool, simd, w.ty, x);
    }
    let families = &*families;
    for ws in ws.chunks_mut(MATRICES_PER_REGION) {
        let work: usize = ws.iter().map(|(w, _)| w.rows * w.cols * x.rows()).sum();
        let total_rows: usize = ws.iter().map(|(w, _)| w.rows).sum();
        let step = rows_per_task(pool, work, total_rows);
        let mut jobs: [Option<(&Matrix, SharedSlice<'_, f32>)>; MATRICES_PER_REGION] = Default::default();
        for (job, (w, out)) in jobs.iter_mut().zip(ws) {
            *job = Some((w, SharedSlice::new(out)));
        }
        let jobs = &jobs;
        let tasks = jobs.iter().flatten().map(|(w, _)| w.rows.div_ceil(step)).sum();
        pool.run(tasks, &|mut task| {
            for (w, out) in jobs.iter().flatten() {
                let tasks = w.rows.div_ceil(step);
                if task < tasks {
                    let outputs = task * step..w.rows.min((task + 1) * step);
                    let rows = RowList::First(x.rows());
                    let job = Job { simd, w, first_row: 0, width: w.rows, from: rows, to: rows, out, x, families };
                    return job.run(outputs);
                }
                task -= tasks;
            }
        });
    }
}

fn matmul_experts_with(
    simd: Simd,
    pool: &Pool,
    w: &Matrix,
    rows_per_expert: usize,
    groups: &[ExpertGroup<'_>],
    x: &Activations,
    out: &mut [f32],
) {
    check(w, x);
    let mut named = 0;
    if rows_per_expert == 0 {
        return;
    }
    let mut seen = vec![0u64; (out.len() / rows_per_expert).div_ceil(64)];
    for group in groups {
        assert_eq!(group.rows.len(), group.out_rows.len(), "expert {}: rows and output rows", group.expert);
        assert!((group.expert as usize + 1) * rows_per_expert <= w.rows, "expert {} of {}", group.expert, w.rows);
        assert!(group.rows.iter().all(|&row| (row as usize) < x.rows()), "activation row out of range");
        for &row in group.out_rows {
            assert!((row as usize + 1) * rows_per_expert <= out.len(), "output row {row} out of range");
            let (word, bit) = (row as usize / 64, 1 << (row % 64));
            assert!(seen[word] & bit == 0, "output row {row} is named twice");
            seen[word] |= bit;
        }
        named += group.rows.len();
    }
    if named == 0 {
        return;
    }
    let mut families = x.families();
    ensure(&mut families, pool, simd, w.ty, x);
    let families = &*families;
    let step = rows_per_task(pool, named * rows_per_expert * w.cols, groups.len() * rows_per_expert);
    let tasks_per_group = rows_per_expert.div_ceil(step);
    let out = &SharedSlice::new(out);
    pool.run(groups.len() * tasks_per_group, &|task| {
        let group = &groups[task / tasks_per_group];
        let start = task % tasks_per_group * step;
        let (from, to) = (RowList::Listed(group.rows), RowList::Listed(group.out_rows));
        let first_row = group.expert as usize * rows_per_expert;
        let job = Job { simd, w, first_row, width: rows_per_expert, from, to, out, x, families };
        job.run(start..rows_per_expert.min(start + step));
    });
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
