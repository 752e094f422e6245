//! Attention of every row to every row (no mask), head by head, in tiles of queries.
//!
//! The keys and values of all heads are first laid out for the block kernel: keys in panels of 48 rows, transposed;
//! values with their width padded to whole vectors. A task then takes a tile of queries of one head: all its scores, the
//! softmax weights in place, and the weighted sum of the values, divided at the end.

use super::pointwise::softmax_weights;
use super::scratch::with_scratch;
use super::tile::{Block, LANES, MAX_VECTORS, block, rows_of};
use crate::cpu::{Pool, SharedSlice, Simd};

/// Keys of a panel: three vectors.
const PANEL: usize = 3 * LANES;
/// Queries that meet a panel together.
const SCORE_ROWS: usize = rows_of(3);
/// Keys whose values are gone through before the next rows of the tile: 64 rows of 80 floats take 20 KiB.
const VALUE_CHUNK: usize = 64;

/// The sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionShape {
    /// Rows.
    pub rows: usize,
    /// Heads of queries, keys and values alike.
    pub heads: usize,
    /// Width of a head.
    pub head: usize,
}

impl AttentionShape {
    fn width(&self) -> usize {
        self.heads * self.head
    }

    /// Rows padded to whole panels of keys.
    fn padded_rows(&self) -> usize {
        self.rows.next_multiple_of(PANEL)
    }

    /// Head width padded to whole vectors.
    fn padded_head(&self) -> usize {
        self.head.next_multiple_of(LANES)
    }

    /// Queries of a tile: whole blocks of the score kernel and of every value kernel in use.
    fn tile(&self) -> usize {
        let vectors = self.padded_head() / LANES;
        if vectors <= MAX_VECTORS && rows_of(vectors) == 5 { 40 } else { 48 }
    }
}

/// `out[r] = sum over s of softmax(q[r] . k[s] / sqrt(head)) * v[s]` for every head. `qkv` is `[rows, 3 * heads * head]`,
/// queries first, then keys, then values; `out` is `[rows, heads * head]`.
///
/// # Panics
/// When the lengths do not fit the shape.
pub fn attention(pool: &Pool, level: Simd, shape: AttentionShape, qkv: &[f32], out: &mut [f32]) {
    let AttentionShape { rows, heads, head } = shape;
    let width = shape.width();
    assert!(qkv.len() == rows * 3 * width && out.len() == rows * width, "attention of {shape:?}");
    let (padded_rows, padded_head) = (shape.padded_rows(), shape.padded_head());
    let mut keys = vec![0.0f32; heads * padded_rows * head];
    let mut values = vec![0.0f32; heads * rows * padded_head];
    let (shared_keys, shared_values) = (SharedSlice::new(&mut keys), SharedSlice::new(&mut values));
    pool.run(heads, &|h| {
        // SAFETY: a head's part belongs to this task alone.
        let keys = unsafe { shared_keys.range(h * padded_rows * head..(h + 1) * padded_rows * head) };
        // SAFETY: as above.
        let values = unsafe { shared_values.range(h * rows * padded_head..(h + 1) * rows * padded_head) };
        for (r, row) in qkv.chunks_exact(3 * width).enumerate() {
            let (panel, lane) = (r / PANEL, r % PANEL);
            let panel = &mut keys[panel * PANEL * head..(panel + 1) * PANEL * head];
            for (d, &k) in row[width + h * head..][..head].iter().enumerate() {
                panel[d * PANEL + lane] = k;
            }
            values[r * padded_head..][..head].copy_from_slice(&row[2 * width + h * head..][..head]);
        }
    });
    let tile = shape.tile();
    let tiles = rows.div_ceil(tile);
    let shared = SharedSlice::new(out);
    pool.run(heads * tiles, &|task| {
        let (h, first) = (task / tiles, task % tiles * tile);
        let keys = &keys[h * padded_rows * head..(h + 1) * padded_rows * head];
        let values = &values[h * rows * padded_head..(h + 1) * rows * padded_head];
        with_scratch(tile * (padded_rows + padded_head + head + 1), |scratch| {
            let (scores, rest) = scratch.split_at_mut(tile * padded_rows);
            let (sums, rest) = rest.split_at_mut(tile * padded_head);
            let (queries, totals) = rest.split_at_mut(tile * head);
            let count = tile.min(rows - first);
            queries.fill(0.0);
            for r in 0..count {
                queries[r * head..(r + 1) * head].copy_from_slice(&qkv[(first + r) * 3 * width + h * head..][..head]);
            }
            score(level, &shape, queries, keys, scores);
            let scale = 1.0 / (head as f32).sqrt();
            for (total, row) in totals.iter_mut().zip(scores.chunks_exact_mut(padded_rows)) {
                *total = softmax_weights(level, &mut row[..rows], scale);
            }
            weigh(level, &shape, scores, values, sums);
            for r in 0..count {
                let at = (first + r) * width + h * head;
                // SAFETY: this head of this row belongs to this task alone.
                let out = unsafe { shared.range(at..at + head) };
                let share = 1.0 / totals[r];
                for (o, &s) in out.iter_mut().zip(&sums[r * padded_head..]) {
                    *o = s * share;
                }
            }
        });
    });
}

/// The scores of a tile of queries against all keys: `scores` is `[tile, padded_rows]`.
fn score(level: Simd, shape: &AttentionShape, queries: &[f32], keys: &[f32], scores: &mut [f32]) {
    let (tile, padded_rows, head) = (shape.tile(), shape.padded_rows(), shape.head);
    let zeros = [0.0f32; PANEL];
    assert!(queries.len() == tile * head && keys.len() == padded_rows * head && scores.len() == tile * padded_rows);
    for panel in 0..padded_rows / PANEL {
        for r in (0..tile).step_by(SCORE_ROWS) {
            // SAFETY: a tile is whole blocks of rows and the padded rows whole panels, by the check above.
            unsafe {
                let b = Block {
                    k: head,
                    x: queries.as_ptr().add(r * head),
                    x_row: head,
                    w: keys.as_ptr().add(panel * PANEL * head),
                    w_row: PANEL,
                    c: scores.as_mut_ptr().add(r * padded_rows + panel * PANEL),
                    c_row: padded_rows,
                    start: zeros.as_ptr(),
                };
                block(level, 3, &b);
            }
        }
    }
}

/// `sums[r] = sum over s of weights[r][s] * values[s]`: `weights` is `[tile, padded_rows]`, `sums` `[tile, padded_head]`.
fn weigh(level: Simd, shape: &AttentionShape, weights: &[f32], values: &[f32], sums: &mut [f32]) {
    let (tile, rows, padded_rows, padded_head) = (shape.tile(), shape.rows, shape.padded_rows(), shape.padded_head());
    assert!(weights.len() == tile * padded_rows && values.len() == rows * padded_head);
    assert!(sums.len() == tile * padded_head);
    sums.fill(0.0);
    let vectors = padded_head / LANES;
    for from in (0..rows).step_by(VALUE_CHUNK) {
        let k = VALUE_CHUNK.min(rows - from);
        let mut v = 0;
        while v < vectors {
            let nv = if vectors - v <= MAX_VECTORS { vectors - v } else { 4 };
            debug_assert!(tile.is_multiple_of(rows_of(nv)));
            for r in (0..tile).step_by(rows_of(nv)) {
                // SAFETY: the tile is whole blocks of rows, the columns lie inside the padded head.
                unsafe {
                    let b = Block {
                        k,
                        x: weights.as_ptr().add(r * padded_rows + from),
                        x_row: padded_rows,
                        w: values.as_ptr().add(from * padded_head + v * LANES),
                        w_row: padded_head,
                        c: sums.as_mut_ptr().add(r * padded_head + v * LANES),
                        c_row: padded_head,
                        start: std::ptr::null(),
                    };
                    block(level, nv, &b);
                }
            }
            v += nv;
        }
    }
}
