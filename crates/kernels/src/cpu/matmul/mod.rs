//! Multiplying weight matrices with rows of activations.
//!
//! Bits: every output element is the scalar reference's ([`scalar`]), whatever the number of rows, the tile it falls in,
//! the thread that computes it and the instruction set.
//!
//! Work is cut along output rows, so every weight is read once per call: a task streams its weight rows and uses each
//! decoded block for all activation rows.

mod activations;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;

pub use activations::Activations;

use self::activations::{Families, QuantizedRow};
use self::scalar::{Bf16Weight, F16Weight, F32Weight, FloatDot, QuantizedDot};
use super::simd::Simd;
use super::{Pool, SharedSlice};
use crate::Matrix;
use crate::format::TensorType;
use crate::format::blocks::{BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0};
use std::marker::PhantomData;
use std::ops::Range;

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
                    let rows = Rows { from: RowList::First(x.rows()), to: RowList::First(x.rows()) };
                    return Job { simd, w, first_row: 0, width: w.rows, rows, out, x, families }.run(outputs);
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
        let rows = Rows { from: RowList::Listed(group.rows), to: RowList::Listed(group.out_rows) };
        let first_row = group.expert as usize * rows_per_expert;
        Job { simd, w, first_row, width: rows_per_expert, rows, out, x, families }
            .run(start..rows_per_expert.min(start + step));
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

/// Which rows of a buffer, in the order of the job's rows.
#[derive(Clone, Copy)]
enum RowList<'a> {
    First(usize),
    Listed(&'a [u32]),
}

impl RowList<'_> {
    fn len(self) -> usize {
        match self {
            RowList::First(n) => n,
            RowList::Listed(rows) => rows.len(),
        }
    }

    fn at(self, i: usize) -> usize {
        match self {
            RowList::First(_) => i,
            RowList::Listed(rows) => rows[i] as usize,
        }
    }
}

#[derive(Clone, Copy)]
struct Rows<'a> {
    /// Rows of the activations.
    from: RowList<'a>,
    /// Rows of the output.
    to: RowList<'a>,
}

/// `width` weight rows from `first_row` on, times some activation rows.
struct Job<'a> {
    simd: Simd,
    w: &'a Matrix,
    first_row: usize,
    width: usize,
    rows: Rows<'a>,
    out: &'a SharedSlice<'a, f32>,
    x: &'a Activations,
    families: &'a Families,
}

impl Job<'_> {
    /// Computes the given outputs (of `0..width`) of all rows.
    fn run(&self, outputs: Range<usize>) {
        let families = self.families;
        match self.w.ty {
            TensorType::F32 => self.floats::<F32Weight>(outputs),
            TensorType::F16 => self.floats::<F16Weight>(outputs),
            TensorType::BF16 => self.floats::<Bf16Weight>(outputs),
            TensorType::Q8_0 => self.quantized::<BlockQ8_0>(outputs, |row| families.per_block.row(row)),
            TensorType::Q4_K => self.quantized::<BlockQ4K>(outputs, |row| families.per_superblock.row(row)),
            TensorType::Q5_K => self.quantized::<BlockQ5K>(outputs, |row| families.per_superblock.row(row)),
            TensorType::Q6_K => self.quantized::<BlockQ6K>(outputs, |row| families.per_superblock.row(row)),
            // `check` let only the types above through.
            _ => {}
        }
    }

    /// The weight row that makes output `output`.
    fn weights<T: bytemuck::Pod>(&self, output: usize) -> &[T] {
        let row_bytes = self.w.data.len() / self.w.rows;
        bytemuck::cast_slice(&self.w.data[(self.first_row + output) * row_bytes..][..row_bytes])
    }

    /// The weight rows of outputs `first..`, at most `count` and not past `end`.
    fn weight_rows<T: bytemuck::Pod>(&self, first: usize, count: usize, end: usize) -> WeightRows<'_, T> {
        let row_bytes = self.w.data.len() / self.w.rows;
        let count = count.min(end - first);
        WeightRows {
            data: &self.w.data[(self.first_row + first) * row_bytes..][..count * row_bytes],
            row_bytes,
            count,
            blocks: row_bytes / size_of::<T>(),
            format: PhantomData,
        }
    }

    /// Stores the outputs from `first` on of one row.
    fn store(&self, row: usize, first: usize, values: &[f32]) {
        let at = self.rows.to.at(row) * self.width + first;
        // SAFETY: an output element belongs to one (row, output) pair of one job, and a job's outputs to one task.
        unsafe { self.out.range(at..at + values.len()) }.copy_from_slice(values);
    }

    fn quantized<'a, T: Quantized>(&self, outputs: Range<usize>, x: impl Fn(usize) -> QuantizedRow<'a>) {
        match self.simd {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => {
                for output in outputs.clone().step_by(T::OUTPUTS) {
                    let w = self.weight_rows(output, T::OUTPUTS, outputs.end);
                    let mut row = 0;
                    while row < self.rows.from.len() {
                        row += match self.rows.from.len() - row {
                            1 => self.few_rows_avx512::<T, 1>(&w, output, row, &x),
                            2 => self.few_rows_avx512::<T, 2>(&w, output, row, &x),
                            3 => self.few_rows_avx512::<T, 3>(&w, output, row, &x),
                            _ => self.few_rows_avx512::<T, 4>(&w, output, row, &x),
                        };
                    }
                }
            }
            _ => {
                for output in outputs {
                    for row in 0..self.rows.from.len() {
                        self.store(row, output, &[T::dot(self.weights(output), x(self.rows.from.at(row)))]);
                    }
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn few_rows_avx512<'a, T: Quantized, const N: usize>(
        &self,
        w: &WeightRows<'_, T>,
        output: usize,
        row: usize,
        x: impl Fn(usize) -> QuantizedRow<'a>,
    ) -> usize {
        let x = std::array::from_fn(|r| x(self.rows.from.at(row + r)));
        let mut out = [[0.0; avx512::few_rows::MAX_OUTPUTS]; N];
        // SAFETY: this level is only chosen when the CPU has it; `check` compared the columns.
        unsafe { T::multiply(w, &x, &mut out) };
        for r in 0..N {
            self.store(row + r, output, &out[r][..w.count]);
        }
        N
    }

    fn floats<T: Floats>(&self, outputs: Range<usize>) {
        match self.simd {
            #[cfg(target_arch = "x86_64")]
            Simd::Avx512 => {
                for output in outputs.clone().step_by(avx512::floats::OUTPUTS) {
                    let w = self.weight_rows(output, avx512::floats::OUTPUTS, outputs.end);
                    let mut row = 0;
                    while row < self.rows.from.len() {
                        row += match self.rows.from.len() - row {
                            1 => self.floats_avx512::<T, 1>(&w, output, row),
                            2 => self.floats_avx512::<T, 2>(&w, output, row),
                            3 => self.floats_avx512::<T, 3>(&w, output, row),
                            4 | 5 => self.floats_avx512::<T, 4>(&w, output, row),
                            _ => self.floats_avx512::<T, 6>(&w, output, row),
                        };
                    }
                }
            }
            _ => {
                for output in outputs {
                    for row in 0..self.rows.from.len() {
                        self.store(row, output, &[T::dot(self.weights(output), self.values(row))]);
                    }
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn floats_avx512<T: Floats, const N: usize>(&self, w: &WeightRows<'_, T>, output: usize, row: usize) -> usize {
        let x = std::array::from_fn(|r| self.values(row + r));
        let mut out = [[0.0; avx512::floats::OUTPUTS]; N];
        // SAFETY: this level is only chosen when the CPU has it; `check` compared the columns.
        unsafe { avx512::floats::multiply::<T, N>(w, &x, &mut out) };
        for r in 0..N {
            self.store(row + r, output, &out[r][..w.count]);
        }
        N
    }

    /// The f32 activations of the job's row `row`.
    fn values(&self, row: usize) -> &[f32] {
        let cols = self.x.cols();
        &self.x.values()[self.rows.from.at(row) * cols..][..cols]
    }
}

/// A block format with kernels at every level of this architecture.
#[cfg(target_arch = "x86_64")]
trait Quantized: QuantizedDot + avx512::few_rows::FewRows {}
#[cfg(target_arch = "x86_64")]
impl<T: QuantizedDot + avx512::few_rows::FewRows> Quantized for T {}
#[cfg(not(target_arch = "x86_64"))]
trait Quantized: QuantizedDot {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: QuantizedDot> Quantized for T {}

/// A number format with kernels at every level of this architecture.
#[cfg(target_arch = "x86_64")]
trait Floats: FloatDot + avx512::floats::Floats {}
#[cfg(target_arch = "x86_64")]
impl<T: FloatDot + avx512::floats::Floats> Floats for T {}
#[cfg(not(target_arch = "x86_64"))]
trait Floats: FloatDot {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: FloatDot> Floats for T {}

/// A few consecutive weight rows, at least one, stored as blocks `T`.
struct WeightRows<'a, T> {
    /// `count * row_bytes` bytes.
    data: &'a [u8],
    row_bytes: usize,
    count: usize,
    /// Blocks per row.
    blocks: usize,
    format: PhantomData<T>,
}

impl<T> WeightRows<'_, T> {
    /// The start of row `o`, or of the last row when there are fewer. `blocks` blocks are readable from there.
    #[inline(always)]
    fn row(&self, o: usize) -> *const u8 {
        self.data[o.min(self.count - 1) * self.row_bytes..].as_ptr()
    }

    /// How far ahead of its loads a kernel that walks `rows` rows side by side prefetches: its next group of rows, but at
    /// least a page.
    #[inline(always)]
    fn prefetch_distance(&self, rows: usize) -> usize {
        (rows * self.row_bytes).max(4096)
    }
}

#[cfg(test)]
mod tests;
