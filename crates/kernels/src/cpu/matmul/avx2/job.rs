//! Which AVX2 kernel does which rows of a task.

use super::few_rows::{self, FewRows};
use super::floats;
use crate::cpu::matmul::activations::QuantizedRow;
use crate::cpu::matmul::job::{Job, WeightRows};
use crate::cpu::matmul::prefetch::Prefetch;
use std::ops::Range;

/// Computes `outputs` of all rows of a quantized job; `x(row)` is the job's row.
///
/// # Safety
/// The CPU has the features of [`crate::cpu::Simd::Avx2`], and the activations have the weights' columns.
pub(in crate::cpu::matmul) unsafe fn quantized<'a, T: FewRows>(
    job: &Job<'_>,
    outputs: Range<usize>,
    x: impl Fn(usize) -> QuantizedRow<'a>,
) {
    let ahead =
        &mut Prefetch::new(job.bytes(outputs.clone()), few_rows::OUTPUTS * job.row_bytes(), job.from.len().div_ceil(4));
    for output in outputs.clone().step_by(few_rows::OUTPUTS) {
        let w = job.weight_rows(output, few_rows::OUTPUTS, outputs.end);
        let mut row = 0;
        while row < job.from.len() {
            // SAFETY: the caller's promise.
            row += unsafe {
                match job.from.len() - row {
                    1 => rows::<T, 1>(job, &w, output, row, &x, ahead),
                    2 => rows::<T, 2>(job, &w, output, row, &x, ahead),
                    3 => rows::<T, 3>(job, &w, output, row, &x, ahead),
                    _ => rows::<T, 4>(job, &w, output, row, &x, ahead),
                }
            };
        }
    }
}

/// # Safety
/// As [`quantized`].
unsafe fn rows<'a, T: FewRows, const N: usize>(
    job: &Job<'_>,
    w: &WeightRows<'_, T>,
    output: usize,
    row: usize,
    x: impl Fn(usize) -> QuantizedRow<'a>,
    ahead: &mut Prefetch,
) -> usize {
    let mut out = [[0.0; few_rows::OUTPUTS]; N];
    // SAFETY: the caller's promise.
    unsafe { T::multiply(w, &std::array::from_fn(|r| x(row + r)), ahead, &mut out) };
    for r in 0..N {
        job.store(row + r, output, &out[r][..w.count]);
    }
    N
}

/// Computes `outputs` of all rows of a job with plain numbers.
///
/// # Safety
/// As [`quantized`].
pub(in crate::cpu::matmul) unsafe fn floats<T: floats::Floats>(job: &Job<'_>, outputs: Range<usize>) {
    let ahead =
        &mut Prefetch::new(job.bytes(outputs.clone()), floats::OUTPUTS * job.row_bytes(), job.from.len().div_ceil(3));
    for output in outputs.clone().step_by(floats::OUTPUTS) {
        let w = job.weight_rows(output, floats::OUTPUTS, outputs.end);
        let mut row = 0;
        while row < job.from.len() {
            // SAFETY: the caller's promise.
            row += unsafe {
                match job.from.len() - row {
                    1 => float_rows::<T, 1>(job, &w, output, row, ahead),
                    2 => float_rows::<T, 2>(job, &w, output, row, ahead),
                    _ => float_rows::<T, 3>(job, &w, output, row, ahead),
                }
            };
        }
    }
}

/// # Safety
/// As [`quantized`].
unsafe fn float_rows<T: floats::Floats, const N: usize>(
    job: &Job<'_>,
    w: &WeightRows<'_, T>,
    output: usize,
    row: usize,
    ahead: &mut Prefetch,
) -> usize {
    let mut out = [[0.0; floats::OUTPUTS]; N];
    // SAFETY: the caller's promise.
    unsafe { floats::multiply::<T, N>(w, &std::array::from_fn(|r| job.values(row + r)), ahead, &mut out) };
    for r in 0..N {
        job.store(row + r, output, &out[r][..w.count]);
    }
    N
}
