//! Which AVX-512 kernel does which rows of a task.

use super::few_rows::{self, FewRows};
use super::floats;
use super::tile::{self, Tile};
use crate::cpu::matmul::activations::{Line, QuantizedRow};
use crate::cpu::matmul::job::{Job, WeightRows};
use crate::cpu::matmul::prefetch::Prefetch;
use std::cell::RefCell;
use std::ops::Range;

/// Rows per pass of the few-rows kernels at most, as the registers allow.
const ROWS_PER_PASS: usize = 8;
/// Up to so many activation rows, unpacking the weights again for each pass costs no more than unpacking to memory.
const FEW_ROWS: usize = 3 * ROWS_PER_PASS;
/// Bytes of unpacked tiles that are used together: they stay in the second-level cache while all rows pass.
const TILES_IN_CACHE: usize = 512 << 10;

thread_local! {
    /// Unpacked tiles, and one panel of activations.
    static SCRATCH: RefCell<(Vec<Line>, Vec<Line>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Computes `outputs` of all rows of a quantized job; `BLOCK` is the columns of a block, `x(row)` the job's row.
///
/// # Safety
/// The CPU has the features of [`crate::cpu::Simd::Avx512`], and the activations have the weights' columns.
pub(in crate::cpu::matmul) unsafe fn quantized<'a, T: FewRows + Tile, const BLOCK: usize>(
    job: &Job<'_>,
    outputs: Range<usize>,
    x: impl Fn(usize) -> QuantizedRow<'a>,
) {
    let n = job.from.len();
    if n > FEW_ROWS {
        // SAFETY: the caller's promise.
        return SCRATCH.with_borrow_mut(|(tiles, panel)| unsafe {
            tiled::<T, BLOCK>(job, outputs, x, tiles, panel);
        });
    }
    // Passes of equal size, so that none is nearly empty.
    let passes = n.div_ceil(ROWS_PER_PASS);
    let size = n.div_ceil(passes.max(1));
    let ahead = &mut Prefetch::new(job.bytes(outputs.clone()), few_rows::OUTPUTS * job.row_bytes(), passes);
    // Where one pass has room for all rows it goes over all outputs with them; else the passes follow each other closely.
    let together = if passes == 1 { outputs.len() } else { few_rows::OUTPUTS };
    for first in outputs.clone().step_by(together.max(1)) {
        let outputs = first..outputs.end.min(first + together);
        let mut row = 0;
        while row < n {
            let outputs = outputs.clone();
            // SAFETY: the caller's promise.
            row += unsafe {
                match size.min(n - row) {
                    1 => pass::<T, 1>(job, outputs, row, &x, ahead),
                    2 => pass::<T, 2>(job, outputs, row, &x, ahead),
                    3 => pass::<T, 3>(job, outputs, row, &x, ahead),
                    4 => pass::<T, 4>(job, outputs, row, &x, ahead),
                    5 => pass::<T, 5>(job, outputs, row, &x, ahead),
                    6 => pass::<T, 6>(job, outputs, row, &x, ahead),
                    7 => pass::<T, 7>(job, outputs, row, &x, ahead),
                    _ => pass::<T, ROWS_PER_PASS>(job, outputs, row, &x, ahead),
                }
            };
        }
    }
}

/// `outputs` of rows `row..row + N`; returns `N`.
///
/// # Safety
/// As [`quantized`].
unsafe fn pass<'a, T: FewRows, const N: usize>(
    job: &Job<'_>,
    outputs: Range<usize>,
    row: usize,
    x: impl Fn(usize) -> QuantizedRow<'a>,
    ahead: &mut Prefetch,
) -> usize {
    let x = std::array::from_fn(|r| x(row + r));
    for output in outputs.clone().step_by(few_rows::OUTPUTS) {
        let w: WeightRows<'_, T> = job.weight_rows(output, few_rows::OUTPUTS, outputs.end);
        let mut out = [[0.0; few_rows::OUTPUTS]; N];
        // SAFETY: the caller's promise.
        unsafe { T::multiply(&w, &x, ahead, &mut out) };
        for r in 0..N {
            job.store(row + r, output, &out[r][..w.count]);
        }
    }
    N
}

/// # Safety
/// As [`quantized`].
unsafe fn tiled<'a, T: Tile, const BLOCK: usize>(
    job: &Job<'_>,
    outputs: Range<usize>,
    x: impl Fn(usize) -> QuantizedRow<'a>,
    tiles: &mut Vec<Line>,
    panel: &mut Vec<Line>,
) {
    const { assert!(BLOCK == T::STEP) };
    let steps = job.x.cols() / BLOCK;
    let tile_bytes = steps * size_of::<T::Weights>();
    let tiles_per_pass = (TILES_IN_CACHE / tile_bytes.max(1)).max(1);
    grow(tiles, tiles_per_pass * tile_bytes);
    grow(panel, tile::panel_bytes::<T>(steps));
    let scratch = Scratch { tiles: tiles.as_mut_ptr().cast(), panel: panel.as_mut_ptr().cast(), steps };
    let n = job.from.len();
    let ahead = &mut Prefetch::new(job.bytes(outputs.clone()), tile::OUTPUTS * job.row_bytes(), 1);
    let x = &x;
    for first in outputs.clone().step_by(tiles_per_pass * tile::OUTPUTS) {
        let pass = first..outputs.end.min(first + tiles_per_pass * tile::OUTPUTS);
        for (i, output) in pass.clone().step_by(tile::OUTPUTS).enumerate() {
            // SAFETY: there is room for the tiles of a pass.
            unsafe { unpack::<T>(job, output, pass.end, i, ahead, scratch) };
        }
        let mut row = 0;
        while row < n {
            // Full panels, but the last two share what is left for them.
            let left = n - row;
            let size = if left >= 2 * tile::MAX_ROWS || left <= tile::MAX_ROWS { left } else { left.div_ceil(2) };
            let rows = row..row + size.min(tile::MAX_ROWS);
            row = rows.end;
            let tiles = pass.clone();
            // SAFETY: the tiles were unpacked above; the panel has room for any number of rows.
            unsafe {
                match rows.len() {
                    0..=6 => next_panel::<T, BLOCK, 6>(job, tiles, rows, x, scratch),
                    7..=8 => next_panel::<T, BLOCK, 8>(job, tiles, rows, x, scratch),
                    9..=10 => next_panel::<T, BLOCK, 10>(job, tiles, rows, x, scratch),
                    _ => next_panel::<T, BLOCK, 12>(job, tiles, rows, x, scratch),
                }
            }
        }
    }
}

/// Buffers of this thread: unpacked tiles of `steps` steps each, and room for a panel of any number of rows.
struct Scratch<W> {
    tiles: *mut W,
    panel: *mut u8,
    steps: usize,
}

impl<W> Clone for Scratch<W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for Scratch<W> {}

/// Unpacks the weights of outputs `output..`, not past `end`, into tile `i`.
///
/// # Safety
/// As [`quantized`]; there is room for tile `i`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<T: Tile>(
    job: &Job<'_>,
    output: usize,
    end: usize,
    i: usize,
    ahead: &mut Prefetch,
    scratch: Scratch<T::Weights>,
) {
    let w: WeightRows<'_, T> = job.weight_rows(output, tile::OUTPUTS, end);
    let rows: [*const u8; tile::OUTPUTS] = std::array::from_fn(|o| w.row(o));
    for step in 0..scratch.steps {
        ahead.advance(tile::OUTPUTS * size_of::<T>());
        // SAFETY: `step` is below the blocks of each row and the steps of the tile.
        unsafe { T::unpack(&rows, step * size_of::<T>(), scratch.tiles.add(i * scratch.steps + step)) };
    }
}

/// All unpacked tiles (outputs `pass`) times `rows`, at most `N` of them; the last row stands in for missing ones.
///
/// # Safety
/// As [`quantized`]; `scratch` holds the tiles of `pass`, and room for a panel.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn next_panel<'a, T: Tile, const BLOCK: usize, const N: usize>(
    job: &Job<'_>,
    pass: Range<usize>,
    rows: Range<usize>,
    x: impl Fn(usize) -> QuantizedRow<'a>,
    scratch: Scratch<T::Weights>,
) {
    let panel_x = std::array::from_fn(|r| x((rows.start + r).min(rows.end - 1)));
    // SAFETY: the caller's promise.
    unsafe { tile::fill_panel::<T, BLOCK, N>(&panel_x, scratch.steps, scratch.panel) };
    for (i, output) in pass.clone().step_by(tile::OUTPUTS).enumerate() {
        let mut out = [[0.0; tile::OUTPUTS]; tile::MAX_ROWS];
        // SAFETY: the caller's promise.
        unsafe {
            let tile = scratch.tiles.add(i * scratch.steps);
            T::multiply::<N>(tile, scratch.panel, scratch.steps, &mut out);
        }
        let count = tile::OUTPUTS.min(pass.end - output);
        for (r, row) in rows.clone().enumerate() {
            job.store(row, output, &out[r][..count]);
        }
    }
}

fn grow(lines: &mut Vec<Line>, bytes: usize) {
    let len = bytes.div_ceil(size_of::<Line>());
    if lines.len() < len {
        lines.resize(len, Line::ZERO);
    }
}

/// Computes `outputs` of all rows of a job with plain numbers.
///
/// # Safety
/// As [`quantized`].
pub(in crate::cpu::matmul) unsafe fn floats<T: floats::Floats>(job: &Job<'_>, outputs: Range<usize>) {
    // Passes of 6 rows, but the last may be smaller, and 5 are 4 and 1.
    let n = job.from.len();
    let ahead = &mut Prefetch::new(
        job.bytes(outputs.clone()),
        floats::OUTPUTS * job.row_bytes(),
        n / 6 + [0, 1, 1, 1, 1, 2][n % 6],
    );
    for output in outputs.clone().step_by(floats::OUTPUTS) {
        let w = job.weight_rows(output, floats::OUTPUTS, outputs.end);
        let mut row = 0;
        while row < n {
            // SAFETY: the caller's promise.
            row += unsafe {
                match n - row {
                    1 => float_rows::<T, 1>(job, &w, output, row, ahead),
                    2 => float_rows::<T, 2>(job, &w, output, row, ahead),
                    3 => float_rows::<T, 3>(job, &w, output, row, ahead),
                    4 | 5 => float_rows::<T, 4>(job, &w, output, row, ahead),
                    _ => float_rows::<T, 6>(job, &w, output, row, ahead),
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
