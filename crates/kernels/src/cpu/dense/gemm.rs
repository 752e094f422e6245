//! Linear layers over many rows: `out[r] = activation(w . x[r] + bias)`, weights unpacked tile by tile.
//!
//! A task owns a band of outputs. It walks the inner dimension in chunks small enough that the band's unpacked weights
//! stay in the second-level cache and eight rows of x in the first, unpacks the chunk's weights once, and sends every
//! row of x through them. The chunk borders do not change the sums: a chain goes on from where the chunk before left it.

use super::pointwise::{gelu_erf, gelu_tanh};
use super::scratch::with_scratch;
use super::tile::{Block, LANES, block, rows_of};
use crate::Matrix;
use crate::cpu::{Pool, SharedSlice, Simd};
use crate::format::{TensorType, dequantize};

/// Vectors of a panel of outputs.
const PANEL_VECTORS: usize = 3;
/// Outputs of a panel.
const PANEL: usize = PANEL_VECTORS * LANES;
/// Rows of x that go through a panel together.
const ROWS: usize = rows_of(PANEL_VECTORS);
/// Most panels of a task: 4 panels of 576 inputs take 432 KiB.
const MAX_PANELS: usize = 4;
/// Longest chunk of the inner dimension: 8 rows of 576 take 18 KiB. A multiple of every block size in use.
const MAX_CHUNK: usize = 576;
/// Weights are unpacked in pieces of this many inputs.
const PIECE: usize = 32;

/// What is applied to the outputs of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    None,
    /// GELU, tanh form.
    GeluTanh,
    /// GELU, erf form.
    GeluErf,
}

/// A linear layer.
#[derive(Clone)]
pub struct Linear {
    /// `[outputs, inputs]`, F32, F16, BF16 or Q8_0, inputs a multiple of the type's block.
    pub weight: Matrix,
    /// `[outputs]`.
    pub bias: Vec<f32>,
}

/// Runs `layer` over the rows of `x`: `x` is `[rows, inputs]`, `out` `[rows, outputs]`.
///
/// # Panics
/// When the lengths do not fit the layer, or the weight's type has no dequantizer.
pub fn linear(pool: &Pool, level: Simd, layer: &Linear, activation: Activation, x: &[f32], out: &mut [f32]) {
    let (outputs, inputs) = (layer.weight.rows, layer.weight.cols);
    assert!(inputs > 0 && outputs > 0 && x.len().is_multiple_of(inputs), "x is not rows of {inputs}");
    let rows = x.len() / inputs;
    assert!(out.len() == rows * outputs && layer.bias.len() == outputs, "outputs are not {rows} rows of {outputs}");
    assert!(layer.weight.ty.block_size() <= PIECE, "{} weights in a dense product", layer.weight.ty.name());
    let panels = outputs.div_ceil(PANEL);
    // At least three tasks a thread, so that the last ones to end do not leave the others idle for long.
    let per_task = panels.div_ceil(3 * pool.threads()).clamp(1, MAX_PANELS);
    let bands = panels.div_ceil(per_task);
    let shared = SharedSlice::new(out);
    pool.run(bands, &|band| {
        let first = band * per_task;
        let band = Band { layer, activation, x, out: &shared, first, panels: per_task.min(panels - first), level };
        band.run();
    });
}

/// The part of a linear layer that one task computes.
struct Band<'a> {
    layer: &'a Linear,
    activation: Activation,
    x: &'a [f32],
    out: &'a SharedSlice<'a, f32>,
    /// First panel.
    first: usize,
    panels: usize,
    level: Simd,
}

impl Band<'_> {
    fn run(&self) {
        let inputs = self.layer.weight.cols;
        let chunks = inputs.div_ceil(MAX_CHUNK);
        let chunk = inputs.div_ceil(chunks).next_multiple_of(PIECE);
        let weights = self.panels * chunk * PANEL;
        // Packed weights, then the padded bias, a block of outputs for ragged edges, and rows of x for the last rows.
        let len = weights + self.panels * PANEL + ROWS * PANEL + ROWS * chunk + PANEL * PIECE;
        with_scratch(len, |scratch| {
            let (packed, rest) = scratch.split_at_mut(weights);
            let (bias, rest) = rest.split_at_mut(self.panels * PANEL);
            let (edge, rest) = rest.split_at_mut(ROWS * PANEL);
            let (last_rows, piece) = rest.split_at_mut(ROWS * chunk);
            bias.fill(0.0);
            let outputs = self.outputs();
            bias[..outputs.len()].copy_from_slice(&self.layer.bias[outputs]);
            for from in (0..inputs).step_by(chunk) {
                let to = inputs.min(from + chunk);
                for p in 0..self.panels {
                    let target = &mut packed[p * chunk * PANEL..][..(to - from) * PANEL];
                    unpack(self.level, &self.layer.weight, (self.first + p) * PANEL, from, target, piece);
                }
                self.chunk(from, to, chunk, packed, bias, edge, last_rows);
            }
        });
    }

    /// The outputs the band computes.
    fn outputs(&self) -> std::ops::Range<usize> {
        self.first * PANEL..self.layer.weight.rows.min((self.first + self.panels) * PANEL)
    }

    /// Adds inputs `from..to` to all outputs of the band.
    fn chunk(
        &self,
        from: usize,
        to: usize,
        chunk: usize,
        packed: &[f32],
        bias: &[f32],
        edge: &mut [f32],
        last_rows: &mut [f32],
    ) {
        let (inputs, width) = (self.layer.weight.cols, self.layer.weight.rows);
        let rows = self.x.len() / inputs;
        let k = to - from;
        for row in (0..rows).step_by(ROWS) {
            let count = ROWS.min(rows - row);
            let (x, x_row) = if count == ROWS {
                (self.x[row * inputs + from..].as_ptr(), inputs)
            } else {
                last_rows.fill(0.0);
                for r in 0..count {
                    last_rows[r * k..(r + 1) * k].copy_from_slice(&self.x[(row + r) * inputs + from..][..k]);
                }
                (last_rows.as_ptr(), k)
            };
            for p in 0..self.panels {
                let column = (self.first + p) * PANEL;
                let columns = PANEL.min(width - column);
                let start = if from == 0 { bias[p * PANEL..].as_ptr() } else { std::ptr::null() };
                let w = packed[p * chunk * PANEL..][..k * PANEL].as_ptr();
                let whole = count == ROWS && columns == PANEL;
                if !whole && from > 0 {
                    for r in 0..count {
                        // SAFETY: only this task touches the band's columns.
                        let c =
                            unsafe { self.out.range((row + r) * width + column..(row + r) * width + column + columns) };
                        edge[r * PANEL..][..columns].copy_from_slice(c);
                    }
                }
                let (c, c_row) = if whole {
                    // SAFETY: row `row` and `column` are inside the outputs.
                    (unsafe { self.out.as_ptr().add(row * width + column) }, width)
                } else {
                    (edge.as_mut_ptr(), PANEL)
                };
                // SAFETY: x has ROWS rows (padded at the end), w k rows of a panel, start a panel; c is a whole block,
                // either of the edge or of the band's columns, which only this task touches.
                unsafe {
                    block(self.level, PANEL_VECTORS, &Block { k, x, x_row, w, w_row: PANEL, c, c_row, start });
                }
                if !whole {
                    for r in 0..count {
                        // SAFETY: only this task touches the band's columns.
                        let c =
                            unsafe { self.out.range((row + r) * width + column..(row + r) * width + column + columns) };
                        c.copy_from_slice(&edge[r * PANEL..][..columns]);
                    }
                }
            }
            if to == inputs && self.activation != Activation::None {
                let outputs = self.outputs();
                for r in row..row + count {
                    // SAFETY: only this task touches the band's columns.
                    let c = unsafe { self.out.range(r * width + outputs.start..r * width + outputs.end) };
                    match self.activation {
                        Activation::GeluTanh => gelu_tanh(self.level, c),
                        _ => gelu_erf(self.level, c),
                    }
                }
            }
        }
    }
}

/// Unpacks inputs `from..` of outputs `first..first + PANEL` into `target`, `[inputs, PANEL]`; outputs past the matrix
/// are zeros. `piece` is work memory of `PANEL * PIECE`.
fn unpack(level: Simd, weight: &Matrix, first: usize, from: usize, target: &mut [f32], piece: &mut [f32]) {
    let inputs = target.len() / PANEL;
    let row_bytes = weight.data.len() / weight.rows;
    let (block, block_bytes) = (weight.ty.block_size(), weight.ty.block_bytes());
    for at in (0..inputs).step_by(PIECE) {
        let len = PIECE.min(inputs - at);
        for o in 0..PANEL {
            let values = &mut piece[o * PIECE..o * PIECE + len];
            if first + o < weight.rows {
                let start = (first + o) * row_bytes + (from + at) / block * block_bytes;
                let bytes = &weight.data[start..start + len / block * block_bytes];
                to_f32(level, weight.ty, bytes, values);
            } else {
                values.fill(0.0);
            }
        }
        transpose(level, piece, len, &mut target[at * PANEL..(at + len) * PANEL]);
    }
}

/// Weights to f32.
fn to_f32(level: Simd, ty: TensorType, bytes: &[u8], values: &mut [f32]) {
    #[cfg(target_arch = "x86_64")]
    if ty == TensorType::F16 && level >= Simd::Avx2 && values.len().is_multiple_of(8) {
        assert!(bytes.len() >= 2 * values.len());
        // SAFETY: the level has F16C, and the bytes are there.
        unsafe { x86::halves_to_f32(bytes, values) };
        return;
    }
    let _ = level;
    // `linear` takes only matrices of whole blocks whose type can be dequantized.
    dequantize(ty, bytes, values).unwrap_or_else(|e| panic!("{e}"));
}

/// Turns `[PANEL, PIECE]` (the first `len` of each row) into `[len, PANEL]`.
fn transpose(level: Simd, piece: &[f32], len: usize, target: &mut [f32]) {
    assert!(piece.len() == PANEL * PIECE && target.len() == len * PANEL && len <= PIECE);
    #[cfg(target_arch = "x86_64")]
    if level >= Simd::Avx2 && len.is_multiple_of(4) {
        // SAFETY: SSE is part of x86-64 and the extents are checked above.
        unsafe { x86::transpose(piece, len, target) };
        return;
    }
    let _ = level;
    for (k, row) in target.chunks_exact_mut(PANEL).enumerate() {
        for (o, value) in row.iter_mut().enumerate() {
            *value = piece[o * PIECE + k];
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{PANEL, PIECE};
    use std::arch::x86_64::*;

    /// # Safety
    /// The machine has F16C; `bytes` holds `values.len()` halves, a multiple of eight.
    #[target_feature(enable = "f16c,avx")]
    pub unsafe fn halves_to_f32(bytes: &[u8], values: &mut [f32]) {
        for i in (0..values.len()).step_by(8) {
            // SAFETY: eight values and their sixteen bytes are inside the slices.
            unsafe {
                let halves = _mm_loadu_si128(bytes.as_ptr().add(2 * i).cast());
                _mm256_storeu_ps(values.as_mut_ptr().add(i), _mm256_cvtph_ps(halves));
            }
        }
    }

    /// # Safety
    /// `piece` is `PANEL` rows of `PIECE`, `target` `len` rows of `PANEL`, `len` a multiple of four and at most `PIECE`.
    pub unsafe fn transpose(piece: &[f32], len: usize, target: &mut [f32]) {
        for k in (0..len).step_by(4) {
            for o in (0..PANEL).step_by(4) {
                // SAFETY: rows o..o+4 and columns k..k+4 exist.
                unsafe {
                    let source = piece.as_ptr().add(o * PIECE + k);
                    let mut r0 = _mm_loadu_ps(source);
                    let mut r1 = _mm_loadu_ps(source.add(PIECE));
                    let mut r2 = _mm_loadu_ps(source.add(2 * PIECE));
                    let mut r3 = _mm_loadu_ps(source.add(3 * PIECE));
                    _MM_TRANSPOSE4_PS(&mut r0, &mut r1, &mut r2, &mut r3);
                    let to = target.as_mut_ptr().add(k * PANEL + o);
                    _mm_storeu_ps(to, r0);
                    _mm_storeu_ps(to.add(PANEL), r1);
                    _mm_storeu_ps(to.add(2 * PANEL), r2);
                    _mm_storeu_ps(to.add(3 * PANEL), r3);
                }
            }
        }
    }
}
