//! One task of a matmul: some output columns of one matrix, for all activation rows, at one SIMD level.

use super::activations::{Activations, Families, QuantizedRow};
use super::scalar::{Bf16Weight, F16Weight, F32Weight};
#[cfg(not(target_arch = "x86_64"))]
use super::scalar::{FloatDot, QuantizedDot};
#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::Matrix;
use crate::cpu::{SharedSlice, Simd};
use crate::format::TensorType;
use crate::format::blocks::{BLOCK, BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0, SUPERBLOCK};
use std::marker::PhantomData;
use std::ops::Range;

/// Which rows of a buffer, in the order of the job's rows.
#[derive(Clone, Copy)]
pub(super) enum RowList<'a> {
    /// The first so many.
    First(usize),
    /// These.
    Listed(&'a [u32]),
}

impl RowList<'_> {
    pub(super) fn len(self) -> usize {
        match self {
            RowList::First(n) => n,
            RowList::Listed(rows) => rows.len(),
        }
    }

    pub(super) fn at(self, i: usize) -> usize {
        match self {
            RowList::First(_) => i,
            RowList::Listed(rows) => rows[i] as usize,
        }
    }
}

/// `width` weight rows from `first_row` on, times some activation rows.
pub(super) struct Job<'a> {
    pub(super) simd: Simd,
    pub(super) w: &'a Matrix,
    pub(super) first_row: usize,
    pub(super) width: usize,
    /// Rows of the activations.
    pub(super) from: RowList<'a>,
    /// Rows of the output, as many.
    pub(super) to: RowList<'a>,
    pub(super) out: &'a SharedSlice<'a, f32>,
    pub(super) x: &'a Activations,
    pub(super) families: &'a Families,
}

/// A few consecutive weight rows, at least one, stored as blocks `T`.
pub(super) struct WeightRows<'a, T> {
    /// `count * row_bytes` bytes.
    data: &'a [u8],
    row_bytes: usize,
    /// How many rows.
    pub(super) count: usize,
    /// Blocks per row.
    pub(super) blocks: usize,
    format: PhantomData<T>,
}

impl<T> WeightRows<'_, T> {
    /// The start of row `o`, or of the last row when there are fewer. `blocks` blocks are readable from there.
    #[inline(always)]
    pub(super) fn row(&self, o: usize) -> *const u8 {
        self.data.as_ptr().wrapping_add(o.min(self.count - 1) * self.row_bytes)
    }
}

impl Job<'_> {
    /// Computes the given outputs (of `0..width`) of all rows.
    pub(super) fn run(&self, outputs: Range<usize>) {
        let families = self.families;
        match self.w.ty {
            TensorType::F32 => self.floats::<F32Weight>(outputs),
            TensorType::F16 => self.floats::<F16Weight>(outputs),
            TensorType::BF16 => self.floats::<Bf16Weight>(outputs),
            TensorType::Q8_0 => self.quantized::<BlockQ8_0, BLOCK>(outputs, |row| families.per_block.row(row)),
            TensorType::Q4_K => self.quantized::<BlockQ4K, SUPERBLOCK>(outputs, |row| families.per_superblock.row(row)),
            TensorType::Q5_K => self.quantized::<BlockQ5K, SUPERBLOCK>(outputs, |row| families.per_superblock.row(row)),
            TensorType::Q6_K => self.quantized::<BlockQ6K, SUPERBLOCK>(outputs, |row| families.per_superblock.row(row)),
            // `check` let only the types above through.
            _ => {}
        }
    }

    fn quantized<'a, T: Quantized, const BLOCK: usize>(
        &self,
        outputs: Range<usize>,
        x: impl Fn(usize) -> QuantizedRow<'a>,
    ) {
        let x = |row| x(self.from.at(row));
        match self.simd {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this level is only chosen when the CPU has it; `check` compared the columns.
            Simd::Avx512 => unsafe { avx512::job::quantized::<T, BLOCK>(self, outputs, x) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Simd::Avx2 => unsafe { avx2::job::quantized::<T>(self, outputs, x) },
            _ => {
                for output in outputs {
                    for row in 0..self.from.len() {
                        self.store(row, output, &[T::dot(self.weights(output), x(row))]);
                    }
                }
            }
        }
    }

    fn floats<T: Floats>(&self, outputs: Range<usize>) {
        match self.simd {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: this level is only chosen when the CPU has it; `check` compared the columns.
            Simd::Avx512 => unsafe { avx512::job::floats::<T>(self, outputs) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Simd::Avx2 => unsafe { avx2::job::floats::<T>(self, outputs) },
            _ => {
                for output in outputs {
                    for row in 0..self.from.len() {
                        self.store(row, output, &[T::dot(self.weights(output), self.values(row))]);
                    }
                }
            }
        }
    }

    /// The weight row that makes output `output`.
    fn weights<T: bytemuck::Pod>(&self, output: usize) -> &[T] {
        bytemuck::cast_slice(self.bytes(output..output + 1))
    }

    /// Bytes of one weight row.
    pub(super) fn row_bytes(&self) -> usize {
        self.w.data.len() / self.w.rows
    }

    /// The bytes of the weight rows that make these outputs.
    pub(super) fn bytes(&self, outputs: Range<usize>) -> &[u8] {
        let row_bytes = self.row_bytes();
        &self.w.data[(self.first_row + outputs.start) * row_bytes..(self.first_row + outputs.end) * row_bytes]
    }

    /// The weight rows of outputs `first..`, at most `count` and not past `end`.
    pub(super) fn weight_rows<T: bytemuck::Pod>(&self, first: usize, count: usize, end: usize) -> WeightRows<'_, T> {
        let row_bytes = self.row_bytes();
        let count = count.min(end - first);
        let data = self.bytes(first..first + count);
        WeightRows { data, row_bytes, count, blocks: row_bytes / size_of::<T>(), format: PhantomData }
    }

    /// The f32 activations of the job's row `row`.
    pub(super) fn values(&self, row: usize) -> &[f32] {
        let cols = self.x.cols();
        &self.x.values()[self.from.at(row) * cols..][..cols]
    }

    /// Stores the outputs from `first` on of one row.
    pub(super) fn store(&self, row: usize, first: usize, values: &[f32]) {
        let at = self.to.at(row) * self.width + first;
        // SAFETY: an output element belongs to one (row, output) pair of one job, and a job's outputs to one task.
        unsafe { self.out.range(at..at + values.len()) }.copy_from_slice(values);
    }
}

/// A block format with kernels at every level of this architecture.
#[cfg(target_arch = "x86_64")]
pub(super) trait Quantized: avx2::few_rows::FewRows + avx512::few_rows::FewRows + avx512::tile::Tile {}
#[cfg(target_arch = "x86_64")]
impl<T: avx2::few_rows::FewRows + avx512::few_rows::FewRows + avx512::tile::Tile> Quantized for T {}
/// A block format.
#[cfg(not(target_arch = "x86_64"))]
pub(super) trait Quantized: QuantizedDot {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: QuantizedDot> Quantized for T {}

/// A number format with kernels at every level of this architecture.
#[cfg(target_arch = "x86_64")]
pub(super) trait Floats: avx2::floats::Floats + avx512::floats::Floats {}
#[cfg(target_arch = "x86_64")]
impl<T: avx2::floats::Floats + avx512::floats::Floats> Floats for T {}
/// A number format.
#[cfg(not(target_arch = "x86_64"))]
pub(super) trait Floats: FloatDot {}
#[cfg(not(target_arch = "x86_64"))]
impl<T: FloatDot> Floats for T {}
