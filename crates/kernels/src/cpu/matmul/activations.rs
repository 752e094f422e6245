//! The rows that go into a matmul, quantized once for each family of weight formats that reads them.
//!
//! The two 8-bit forms follow what llama.cpp does on x86, so that both engines see the same integers:
//! - per 32 for `Q8_0` weights: scale `amax / 127` rounded to f16 (kept as f32 where a half would be subnormal or
//!   infinite, because there rounding it costs more than the 8 bits do), values rounded to nearest even;
//! - per 256 for the K formats: scale `1 / (127 / amax)` in f32.
//!
//! Values lie in -127..=127: the AVX2 kernels move a weight's sign onto the activation, which -128 has no room for.

use crate::cpu::simd::Simd;
use crate::cpu::{Pool, SharedSlice};
use std::sync::Mutex;

/// Bytes after each row of 8-bit values, so that the same column of consecutive rows does not fall into one cache set
/// when the row length is a power of two.
const ROW_PADDING: usize = 64;
/// Values per task when a quantization is worth sharing between threads.
const VALUES_PER_TASK: usize = 1 << 15;

/// The input rows of a matmul.
///
/// Set once, then used by any number of matmuls: each family of weight formats quantizes the rows at its first use.
/// Buffers are kept, so reuse allocates nothing once they have grown.
#[derive(Default)]
pub struct Activations {
    rows: usize,
    cols: usize,
    values: Vec<f32>,
    families: Mutex<Families>,
}

#[derive(Default)]
pub(super) struct Families {
    pub(super) per_block: Quantized<32>,
    pub(super) per_superblock: Quantized<256>,
}

impl Activations {
    /// No rows yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes over `rows` rows of `cols` values, row by row in `x`.
    ///
    /// # Panics
    /// When `x` does not hold `rows * cols` values.
    pub fn set(&mut self, x: &[f32], rows: usize, cols: usize) {
        assert_eq!(x.len(), rows * cols, "activations: {rows} rows of {cols}");
        self.rows = rows;
        self.cols = cols;
        self.values.clear();
        self.values.extend_from_slice(x);
        let families = self.families.get_mut().unwrap_or_else(|poisoned| poisoned.into_inner());
        families.per_block.valid = false;
        families.per_superblock.valid = false;
    }

    /// Number of rows held.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Values per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The rows as they were set.
    pub fn values(&self) -> &[f32] {
        &self.values
    }

    pub(super) fn families(&self) -> std::sync::MutexGuard<'_, Families> {
        self.families.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }
}

/// Rows of 8-bit values with one scale per `N` values, and the sums the kernels need.
#[derive(Default)]
pub(super) struct Quantized<const N: usize> {
    valid: bool,
    cols: usize,
    q: Vec<Line>,
    /// Scales, `rows x cols / N`.
    d: Vec<f32>,
    sums: Vec<Line>,
}

/// Storage in whole cache lines.
#[repr(C, align(64))]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Line([u8; 64]);

impl Line {
    pub(super) const ZERO: Line = Line([0; 64]);
}

/// One quantized row.
#[derive(Clone, Copy)]
pub(super) struct QuantizedRow<'a> {
    /// `cols` values.
    pub(super) q: &'a [i8],
    /// A scale per `N` values.
    pub(super) d: &'a [f32],
    /// For `N = 32`: `-128 * sum` of each block, as i32. For `N = 256`: see [`SuperblockSums`].
    pub(super) sums: &'a [u8],
}

/// What the K formats need to know of 256 activations besides the values: two cache lines.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct SuperblockSums {
    /// Sums of 32 (for the minima of `Q4_K`, `Q5_K`).
    pub(super) of_32: [i16; 8],
    /// Sums of 16 times -16 (for the offset 32 of `Q6_K`, together with doubled scales; fits i16).
    pub(super) of_16_times_minus_16: [i16; 16],
    /// Sums of 16 times -32.
    pub(super) of_16_times_minus_32: [i32; 16],
    unused: [u8; 16],
}
const _: () = assert!(size_of::<SuperblockSums>() == 128);

impl<const N: usize> Quantized<N> {
    const SUM_BYTES: usize = if N == 32 { 4 } else { size_of::<SuperblockSums>() };

    fn stride(cols: usize) -> usize {
        cols.next_multiple_of(64) + ROW_PADDING
    }

    fn sums_stride(cols: usize) -> usize {
        (cols / N * Self::SUM_BYTES).next_multiple_of(64)
    }

    /// Quantizes `rows x cols` values, unless that was done since they were set.
    pub(super) fn ensure(&mut self, pool: &Pool, simd: Simd, values: &[f32], rows: usize, cols: usize) {
        if self.valid {
            return;
        }
        assert_eq!(cols % N, 0, "rows of {cols} values cannot be quantized in blocks of {N}");
        let (stride, sums_stride) = (Self::stride(cols), Self::sums_stride(cols));
        grow(&mut self.q, rows * stride / 64);
        grow(&mut self.sums, rows * sums_stride / 64);
        if self.d.len() < rows * (cols / N) {
            self.d.resize(rows * (cols / N), 0.0);
        }
        self.cols = cols;
        if cols > 0 && rows > 0 {
            let blocks = cols / N;
            let q = SharedSlice::new(bytemuck::cast_slice_mut::<_, i8>(&mut self.q));
            let sums = SharedSlice::new(bytemuck::cast_slice_mut::<_, u8>(&mut self.sums));
            let d = SharedSlice::new(&mut self.d);
            let parts = (rows * cols / VALUES_PER_TASK).clamp(1, 8 * pool.threads());
            pool.run_ranges(rows, parts, 1, &|range| {
                for row in range {
                    // SAFETY: every row belongs to one task, and the rows' parts of the three buffers do not overlap.
                    let (q, sums, d) = unsafe {
                        (
                            q.range(row * stride..row * stride + cols),
                            sums.range(row * sums_stride..(row + 1) * sums_stride),
                            d.range(row * blocks..(row + 1) * blocks),
                        )
                    };
                    quantize_row_at::<N>(simd, &values[row * cols..(row + 1) * cols], q, sums, d);
                }
            });
        }
        self.valid = true;
    }

    pub(super) fn row(&self, row: usize) -> QuantizedRow<'_> {
        let (stride, sums_stride, blocks) = (Self::stride(self.cols), Self::sums_stride(self.cols), self.cols / N);
        let q: &[i8] = bytemuck::cast_slice(&self.q);
        let sums: &[u8] = bytemuck::cast_slice(&self.sums);
        QuantizedRow {
            q: &q[row * stride..][..self.cols],
            d: &self.d[row * blocks..][..blocks],
            sums: &sums[row * sums_stride..][..blocks * Self::SUM_BYTES],
        }
    }
}

fn grow(lines: &mut Vec<Line>, len: usize) {
    if lines.len() < len {
        lines.resize(len, Line::ZERO);
    }
}

fn quantize_row_at<const N: usize>(simd: Simd, values: &[f32], q: &mut [i8], sums: &mut [u8], d: &mut [f32]) {
    match simd {
        Simd::Scalar => quantize_row::<N>(values, q, sums, d),
        #[cfg(target_arch = "x86_64")]
        // SAFETY: these levels are only chosen when the CPU has AVX2, FMA and F16C.
        Simd::Avx2 | Simd::Avx512 => unsafe { quantize_row_avx2::<N>(values, q, sums, d) },
        #[cfg(not(target_arch = "x86_64"))]
        Simd::Avx2 | Simd::Avx512 => quantize_row::<N>(values, q, sums, d),
    }
}

/// The same code as [`quantize_row`], compiled for AVX2: nothing in it depends on the order of operations.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn quantize_row_avx2<const N: usize>(values: &[f32], q: &mut [i8], sums: &mut [u8], d: &mut [f32]) {
    quantize_row::<N>(values, q, sums, d);
}

/// One row. Largest magnitudes are compared as integers, which orders NaN above infinity above every number: a block that
/// holds either gets the scale NaN, so that it shows in every output instead of vanishing in a maximum.
#[inline(always)]
fn quantize_row<const N: usize>(values: &[f32], q: &mut [i8], sums: &mut [u8], d: &mut [f32]) {
    for (b, ((x, q), d)) in values.as_chunks::<N>().0.iter().zip(q.as_chunks_mut::<N>().0).zip(d.iter_mut()).enumerate()
    {
        let amax = f32::from_bits(x.iter().fold(0, |m: i32, v| m.max((v.to_bits() & 0x7fff_ffff) as i32)) as u32);
        let inverse = 127.0 / amax;
        let scale = if N == 32 { round_to_half(amax / 127.0) } else { 1.0 / inverse };
        if !amax.is_finite() {
            *d = f32::NAN;
            q.fill(0);
        } else if !inverse.is_finite() {
            *d = 0.0;
            q.fill(0);
        } else {
            *d = scale;
            for (q, x) in q.iter_mut().zip(x) {
                // Adding and taking away 1.5 * 2^23 rounds to nearest even; the low bits then hold the integer.
                const ROUND: f32 = 12_582_912.0;
                *q = ((x * inverse + ROUND).to_bits() as i32 - ROUND.to_bits() as i32).clamp(-127, 127) as i8;
            }
        }
        if N == 32 {
            let sum: i32 = q.iter().map(|&v| i32::from(v)).sum();
            sums[4 * b..4 * b + 4].copy_from_slice(&(-128 * sum).to_ne_bytes());
        } else {
            let mut of_16 = [0i16; 16];
            for (sum, q) in of_16.iter_mut().zip(q.as_chunks::<16>().0) {
                *sum = q.iter().map(|&v| i16::from(v)).sum();
            }
            let out = SuperblockSums {
                of_32: std::array::from_fn(|s| of_16[2 * s] + of_16[2 * s + 1]),
                of_16_times_minus_16: of_16.map(|sum| -16 * sum),
                of_16_times_minus_32: of_16.map(|sum| -32 * i32::from(sum)),
                unused: [0; 16],
            };
            sums[128 * b..128 * b + 128].copy_from_slice(bytemuck::bytes_of(&out));
        }
    }
}

#[inline(always)]
fn round_to_half(value: f32) -> f32 {
    const SMALLEST_NORMAL_HALF: f32 = 6.103_515_6e-5;
    let rounded = half::f16::from_f32(value).to_f32();
    if rounded.is_finite() && value >= SMALLEST_NORMAL_HALF { rounded } else { value }
}
