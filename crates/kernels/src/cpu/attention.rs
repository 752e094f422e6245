//! Gated attention over a cache.
//!
//! A row's softmax is taken page by page: every page of [`PAGE_ROWS`] cache rows gives a partial result (its largest score,
//! the sum of its weights, the weighted values), and partial results are folded in the order of the pages. Pages are
//! aligned to absolute cache indices, so the sums of a row depend on nothing but its own history.
//!
//! Scores of sixteen cache rows are computed in lanes: the product of query and key is summed dim after dim in one chain
//! per score. Weighted values are summed row after row in one chain per dim.

use super::kv_cache::{CpuKvCache, PAGE_ROWS, Page};
use super::lanes::{Kernel, LANES, Lanes, dispatch, exp, vectors, vectors_mut};
use super::norm::{rms_scale, scale_by};
use super::{Pool, SharedSlice, Simd};
use crate::device::{AttentionShape, SlotRows};
use std::cell::RefCell;

/// Query heads of one kv head whose scores share the loads of a page.
const HEADS_AT_ONCE: usize = 8;

thread_local! {
    /// Scores, partial values and folded values of the kv head a thread works on.
    static WORK: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Host rows of one call, see [`crate::Device::attention`].
pub(crate) struct Rows<'a> {
    pub q: &'a [f32],
    pub k: &'a [f32],
    pub v: &'a [f32],
    pub rope: &'a [f32],
}

/// Norm and rope of one head: NEOX pairing, dim `i` with `i + rotary/2`.
#[inline(always)]
fn norm_and_rope<L: Lanes>(lanes: L, x: &[f32], weight: &[f32], eps: f32, rope: &[f32], scale: f32, out: &mut [f32]) {
    scale_by(lanes, x, rms_scale(lanes, x, eps), weight, out);
    let pairs = rope.len() / 2;
    let (cos, sin) = rope.split_at(pairs);
    for pair in 0..pairs {
        let (a, b) = (out[pair], out[pair + pairs]);
        out[pair] = a.mul_add(cos[pair], -(b * sin[pair]));
        out[pair + pairs] = b.mul_add(cos[pair], a * sin[pair]);
    }
    if scale != 1.0 {
        out.iter_mut().for_each(|value| *value *= scale);
    }
}

struct Prepare<'a> {
    shape: &'a AttentionShape,
    q_norm: &'a [f32],
    k_norm: &'a [f32],
    q: &'a [f32],
    k: &'a [f32],
    rope: &'a [f32],
    q_out: &'a mut [f32],
    k_out: &'a mut [f32],
}

impl Kernel for Prepare<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let head_dim = self.shape.head_dim;
        let eps = self.shape.norm_eps;
        let scale = 1.0 / (head_dim as f32).sqrt();
        for (q, out) in self.q.chunks_exact(2 * head_dim).zip(self.q_out.chunks_exact_mut(head_dim)) {
            norm_and_rope(lanes, &q[..head_dim], self.q_norm, eps, self.rope, scale, out);
        }
        for (k, out) in self.k.chunks_exact(head_dim).zip(self.k_out.chunks_exact_mut(head_dim)) {
            norm_and_rope(lanes, k, self.k_norm, eps, self.rope, 1.0, out);
        }
    }
}

/// One row's queries of one kv head against its cache.
struct Attend<'a> {
    head_dim: usize,
    /// `group x head_dim`, scaled.
    q: &'a [f32],
    /// `group x [query | gate]`
    gated: &'a [f32],
    cache: &'a CpuKvCache,
    kv_head: usize,
    /// Cache rows to attend to.
    rows: usize,
    /// Scores `group x PAGE_ROWS`, partial values and folded values `group x head_dim`, largest and sum `group` each.
    work: &'a mut [f32],
    /// `group x head_dim`
    out: &'a mut [f32],
}

fn work_len(group: usize, head_dim: usize) -> usize {
    group * (PAGE_ROWS + 2 * head_dim + 2)
}

/// One value type of a page.
trait Element: Copy {
    fn load<L: Lanes>(lanes: L, x: &[Self; LANES]) -> L::V;
    fn one(self) -> f32;
}

impl Element for u16 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[u16; LANES]) -> L::V {
        lanes.load_f16(x)
    }
    #[inline(always)]
    fn one(self) -> f32 {
        half::f16::from_bits(self).to_f32()
    }
}

impl Element for f32 {
    #[inline(always)]
    fn load<L: Lanes>(lanes: L, x: &[f32; LANES]) -> L::V {
        lanes.load(x)
    }
    #[inline(always)]
    fn one(self) -> f32 {
        self
    }
}

/// Scores of `G` queries with the `T` tiles of sixteen keys that start at `keys`.
#[inline(always)]
fn scores<L: Lanes, E: Element, const G: usize, const T: usize>(
    lanes: L,
    q: &[f32],
    keys: &[E],
    head_dim: usize,
    out: &mut [f32],
) {
    let (keys, _) = vectors(&keys[..T * head_dim * LANES]);
    let queries: [&[f32]; G] = std::array::from_fn(|head| &q[head * head_dim..(head + 1) * head_dim]);
    let mut sums = [[lanes.splat(0.0); T]; G];
    for dim in 0..head_dim {
        let keys: [L::V; T] = std::array::from_fn(|tile| E::load(lanes, &keys[tile * head_dim + dim]));
        for head in 0..G {
            let query = lanes.splat(queries[head][dim]);
            for tile in 0..T {
                sums[head][tile] = lanes.fma(query, keys[tile], sums[head][tile]);
            }
        }
    }
    for head in 0..G {
        let (out, _) = vectors_mut(&mut out[head * PAGE_ROWS..][..T * LANES]);
        for tile in 0..T {
            lanes.store(sums[head][tile], &mut out[tile]);
        }
    }
}

/// Scores of a page: all heads of the group, `tiles` tiles.
#[inline(always)]
fn page_scores<L: Lanes, E: Element>(
    lanes: L,
    q: &[f32],
    keys: &[E],
    head_dim: usize,
    tiles: usize,
    group: usize,
    out: &mut [f32],
) {
    let mut head = 0;
    while head < group {
        let q = &q[head * head_dim..];
        let out = &mut out[head * PAGE_ROWS..];
        let left = group - head;
        let mut tile = 0;
        while tile < tiles {
            let keys = &keys[tile * head_dim * LANES..];
            let out = &mut out[tile * LANES..];
            let left_tiles = tiles - tile;
            // More tiles at once where there are fewer heads, to keep about eight sums in flight.
            tile += match (left, left_tiles) {
                (HEADS_AT_ONCE.., _) => {
                    scores::<L, E, HEADS_AT_ONCE, 1>(lanes, q, keys, head_dim, out);
                    1
                }
                (4.., 2..) => {
                    scores::<L, E, 4, 2>(lanes, q, keys, head_dim, out);
                    2
                }
                (4.., _) => {
                    scores::<L, E, 4, 1>(lanes, q, keys, head_dim, out);
                    1
                }
                (2.., 4..) => {
                    scores::<L, E, 2, 4>(lanes, q, keys, head_dim, out);
                    4
                }
                (2.., _) => {
                    scores::<L, E, 2, 1>(lanes, q, keys, head_dim, out);
                    1
                }
                (_, 4..) => {
                    scores::<L, E, 1, 4>(lanes, q, keys, head_dim, out);
                    4
                }
                _ => {
                    scores::<L, E, 1, 1>(lanes, q, keys, head_dim, out);
                    1
                }
            };
        }
        head += match left {
            HEADS_AT_ONCE.. => HEADS_AT_ONCE,
            4.. => 4,
            2.. => 2,
            _ => 1,
        };
    }
}

/// `out[head] = sum over rows of weights[head][row] * values[row]` for `G` heads.
#[inline(always)]
fn weighted_values<L: Lanes, E: Element, const G: usize>(
    lanes: L,
    weights: &[f32],
    values: &[E],
    head_dim: usize,
    rows: usize,
    out: &mut [f32],
) {
    let weights: [&[f32]; G] = std::array::from_fn(|head| &weights[head * PAGE_ROWS..][..rows]);
    let mut dim = 0;
    while dim + 2 * LANES <= head_dim {
        let mut sums = [[lanes.splat(0.0); 2]; G];
        for row in 0..rows {
            let (value, _) = vectors(&values[row * head_dim + dim..][..2 * LANES]);
            let value = [E::load(lanes, &value[0]), E::load(lanes, &value[1])];
            for head in 0..G {
                let weight = lanes.splat(weights[head][row]);
                sums[head][0] = lanes.fma(weight, value[0], sums[head][0]);
                sums[head][1] = lanes.fma(weight, value[1], sums[head][1]);
            }
        }
        for head in 0..G {
            let (out, _) = vectors_mut(&mut out[head * head_dim + dim..][..2 * LANES]);
            lanes.store(sums[head][0], &mut out[0]);
            lanes.store(sums[head][1], &mut out[1]);
        }
        dim += 2 * LANES;
    }
    for dim in dim..head_dim {
        for head in 0..G {
            let mut sum = 0.0f32;
            for row in 0..rows {
                sum = weights[head][row].mul_add(values[row * head_dim + dim].one(), sum);
            }
            out[head * head_dim + dim] = sum;
        }
    }
}

impl Attend<'_> {
    #[inline(always)]
    fn page<L: Lanes, E: Element>(&mut self, lanes: L, keys: &[E], values: &[E], rows: usize) {
        let head_dim = self.head_dim;
        let group = self.q.len() / head_dim;
        let (scores, rest) = self.work.split_at_mut(group * PAGE_ROWS);
        let (partial, rest) = rest.split_at_mut(group * head_dim);
        let (folded, rest) = rest.split_at_mut(group * head_dim);
        let (largest, sums) = rest.split_at_mut(group);
        let tiles = rows.div_ceil(LANES);
        page_scores(lanes, self.q, keys, head_dim, tiles, group, scores);
        let mut page_largest = [0.0f32; HEADS_AT_ONCE];
        let mut page_sum = [0.0f32; HEADS_AT_ONCE];
        let mut head = 0;
        while head < group {
            let count = (group - head).min(HEADS_AT_ONCE);
            for index in 0..count {
                let scores = &mut scores[(head + index) * PAGE_ROWS..][..tiles * LANES];
                scores[rows..].fill(f32::NEG_INFINITY);
                let (lane_scores, _) = vectors_mut(scores);
                let mut top = lanes.load(&lane_scores[0]);
                for chunk in &lane_scores[1..] {
                    top = lanes.max(lanes.load(chunk), top);
                }
                let top = lanes.largest(top);
                for chunk in lane_scores.iter_mut() {
                    lanes.store(lanes.exp(lanes.sub(lanes.load(chunk), lanes.splat(top))), chunk);
                }
                scores[rows..].fill(0.0);
                let (lane_scores, _) = vectors(scores);
                let mut sum = lanes.load(&lane_scores[0]);
                for chunk in &lane_scores[1..] {
                    sum = lanes.add(sum, lanes.load(chunk));
                }
                page_largest[index] = top;
                page_sum[index] = lanes.sum(sum);
            }
            let mut done = 0;
            while done < count {
                let weights = &scores[(head + done) * PAGE_ROWS..];
                let out = &mut partial[(head + done) * head_dim..];
                done += match count - done {
                    4.. => {
                        weighted_values::<L, E, 4>(lanes, weights, values, head_dim, rows, out);
                        4
                    }
                    2.. => {
                        weighted_values::<L, E, 2>(lanes, weights, values, head_dim, rows, out);
                        2
                    }
                    _ => {
                        weighted_values::<L, E, 1>(lanes, weights, values, head_dim, rows, out);
                        1
                    }
                };
            }
            for index in 0..count {
                let one = head + index;
                let before = largest[one];
                let top = if page_largest[index] > before { page_largest[index] } else { before };
                let keep = exp(lanes, before - top);
                let take = exp(lanes, page_largest[index] - top);
                largest[one] = top;
                sums[one] = sums[one].mul_add(keep, page_sum[index] * take);
                fold(
                    lanes,
                    &mut folded[one * head_dim..][..head_dim],
                    keep,
                    &partial[one * head_dim..][..head_dim],
                    take,
                );
            }
            head += count;
        }
    }
}

/// `x = x * keep + y * take`
#[inline(always)]
fn fold<L: Lanes>(lanes: L, x: &mut [f32], keep: f32, y: &[f32], take: f32) {
    let ((x, x_rest), (y, y_rest)) = (vectors_mut(x), vectors(y));
    let (keep_lanes, take_lanes) = (lanes.splat(keep), lanes.splat(take));
    for (x, y) in x.iter_mut().zip(y) {
        lanes.store(lanes.fma(lanes.load(x), keep_lanes, lanes.mul(lanes.load(y), take_lanes)), x);
    }
    for (x, y) in x_rest.iter_mut().zip(y_rest) {
        *x = x.mul_add(keep, y * take);
    }
}

impl Kernel for Attend<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let head_dim = self.head_dim;
        let group = self.q.len() / head_dim;
        let state = group * (PAGE_ROWS + head_dim);
        self.work[state..].fill(0.0);
        let largest = state + group * head_dim;
        self.work[largest..largest + group].fill(f32::MIN);
        let (key_start, value_start) = self.cache.head_start(self.kv_head);
        let len = PAGE_ROWS * head_dim;
        let cache = self.cache;
        for page in 0..self.rows.div_ceil(PAGE_ROWS) {
            let rows = (self.rows - page * PAGE_ROWS).min(PAGE_ROWS);
            match cache.page(page) {
                Page::F16(data) => {
                    self.page(lanes, &data[key_start..][..len], &data[value_start..][..len], rows);
                }
                Page::F32(data) => {
                    self.page(lanes, &data[key_start..][..len], &data[value_start..][..len], rows);
                }
            }
        }
        let folded = &self.work[state..largest];
        let sums = &self.work[largest + group..];
        for head in 0..group {
            let gate = &self.gated[head * 2 * head_dim + head_dim..][..head_dim];
            let folded = &folded[head * head_dim..][..head_dim];
            let out = &mut self.out[head * head_dim..][..head_dim];
            finish(lanes, folded, 1.0 / sums[head], gate, out);
        }
    }
}

/// `out = x * scale * sigmoid(gate)`
#[inline(always)]
fn finish<L: Lanes>(lanes: L, x: &[f32], scale: f32, gate: &[f32], out: &mut [f32]) {
    let ((x, x_rest), (gate, gate_rest)) = (vectors(x), vectors(gate));
    let (out, out_rest) = vectors_mut(out);
    let one = |x, gate| lanes.mul(lanes.mul(x, lanes.splat(scale)), lanes.sigmoid(gate));
    for ((x, gate), out) in x.iter().zip(gate).zip(out) {
        lanes.store(one(lanes.load(x), lanes.load(gate)), out);
    }
    if !x_rest.is_empty() {
        lanes.store_part(one(lanes.load_part(x_rest), lanes.load_part(gate_rest)), out_rest);
    }
}

/// The whole op; see [`crate::Device::attention`]. `q_work` and `k_work` are work buffers.
pub(crate) fn attention(
    simd: Simd,
    pool: &Pool,
    shape: &AttentionShape,
    norms: (&[f32], &[f32]),
    rows: &Rows<'_>,
    slots: &[SlotRows],
    caches: &mut [&mut CpuKvCache],
    (q_work, k_work): (&mut Vec<f32>, &mut Vec<f32>),
    out: &mut Vec<f32>,
) {
    let head_dim = shape.head_dim;
    let (q_width, kv_width) = (shape.heads * head_dim, shape.kv_heads * head_dim);
    let n_rows = rows.k.len() / kv_width;
    q_work.resize(n_rows * q_width, 0.0);
    k_work.resize(n_rows * kv_width, 0.0);
    out.resize(n_rows * q_width, 0.0);
    let rope_width = shape.rotary_dims;
    {
        let (q_out, k_out) = (SharedSlice::new(q_work), SharedSlice::new(k_work));
        pool.run(n_rows, &|row| {
            // SAFETY: every task has a row of its own.
            let (q_out, k_out) = unsafe {
                (q_out.range(row * q_width..(row + 1) * q_width), k_out.range(row * kv_width..(row + 1) * kv_width))
            };
            dispatch(
                simd,
                Prepare {
                    shape,
                    q_norm: norms.0,
                    k_norm: norms.1,
                    q: &rows.q[row * 2 * q_width..(row + 1) * 2 * q_width],
                    k: &rows.k[row * kv_width..(row + 1) * kv_width],
                    rope: &rows.rope[row * rope_width..(row + 1) * rope_width],
                    q_out,
                    k_out,
                },
            );
        });
    }
    for slot in slots {
        let cache = &mut caches[slot.slot];
        cache.reserve(slot.held, slot.held + slot.count);
        for index in 0..slot.count {
            let at = (slot.first + index) * kv_width;
            cache.write(slot.held + index, &k_work[at..at + kv_width], &rows.v[at..at + kv_width]);
        }
    }
    let caches: &[&mut CpuKvCache] = caches;
    let group = shape.heads / shape.kv_heads;
    let width = group * head_dim;
    let q_work: &[f32] = q_work;
    let shared_out = SharedSlice::new(out);
    let slot_of = |row: usize| slots.iter().find(|slot| row < slot.first + slot.count).expect("every row has a slot");
    pool.run(n_rows * shape.kv_heads, &|task| {
        let (row, kv_head) = (task / shape.kv_heads, task % shape.kv_heads);
        let slot = slot_of(row);
        let at = row * q_width + kv_head * width;
        // SAFETY: every task has a row and kv head of its own.
        let out = unsafe { shared_out.range(at..at + width) };
        WORK.with_borrow_mut(|work| {
            work.resize(work_len(group, head_dim), 0.0);
            dispatch(
                simd,
                Attend {
                    head_dim,
                    q: &q_work[at..at + width],
                    gated: &rows.q[2 * at..2 * (at + width)],
                    cache: &*caches[slot.slot],
                    kv_head,
                    rows: slot.held + (row - slot.first) + 1,
                    work,
                    out,
                },
            );
        });
    });
}
