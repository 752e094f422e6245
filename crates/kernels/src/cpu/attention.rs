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

/// Rows of a slot that go through the pages of a cache together, so that a page is read from memory once for all of them.
const ROWS_AT_ONCE: usize = 8;
/// A page range worth a task of its own when there are fewer rows than threads.
const PAGES_PER_PART: usize = 4;

thread_local! {
    /// Scores, partial results and folded results of the rows a thread works on.
    static WORK: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Work buffers kept from call to call.
#[derive(Default)]
pub(crate) struct Work {
    /// `rows x heads x head_dim`, normed, turned and scaled.
    queries: Vec<f32>,
    /// `rows x kv_heads x head_dim`, normed and turned.
    keys: Vec<f32>,
    /// Partial results of pages, when pages are shared out between threads.
    partial: Vec<f32>,
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

/// The query heads of one kv head of a few rows, against the cache of their slot.
struct Heads<'a> {
    head_dim: usize,
    /// Query heads per kv head.
    group: usize,
    /// Query heads in all: the distance between rows.
    heads: usize,
    kv_head: usize,
    /// `rows x heads x head_dim`, scaled.
    q: &'a [f32],
    cache: &'a CpuKvCache,
}

impl Heads<'_> {
    /// Values of a partial or folded result: `group x head_dim` values, then the largest score and the sum per head.
    fn result_len(&self) -> usize {
        self.group * (self.head_dim + 2)
    }

    fn query(&self, row: usize) -> &[f32] {
        let width = self.group * self.head_dim;
        &self.q[row * self.heads * self.head_dim + self.kv_head * width..][..width]
    }

    /// Partial result of one row and page, of which `rows` cache rows count. `scores` is `group x PAGE_ROWS`.
    #[inline(always)]
    fn page<L: Lanes>(&self, lanes: L, row: usize, page: usize, rows: usize, scores: &mut [f32], out: &mut [f32]) {
        let (key_start, value_start) = self.cache.head_start(self.kv_head);
        let len = PAGE_ROWS * self.head_dim;
        let query = self.query(row);
        match self.cache.page(page) {
            Page::F16(data) => {
                let (keys, values) = (&data[key_start..][..len], &data[value_start..][..len]);
                page_result(lanes, query, keys, values, self.head_dim, rows, scores, out);
            }
            Page::F32(data) => {
                let (keys, values) = (&data[key_start..][..len], &data[value_start..][..len]);
                page_result(lanes, query, keys, values, self.head_dim, rows, scores, out);
            }
        }
    }
}

/// A page of one row alone.
struct OnePage<'a> {
    heads: Heads<'a>,
    row: usize,
    pages: std::ops::Range<usize>,
    /// Cache rows the row attends to.
    visible: usize,
    work: &'a mut Vec<f32>,
    /// One partial result per page.
    out: &'a mut [f32],
}

impl Kernel for OnePage<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let heads = &self.heads;
        self.work.resize(heads.group * PAGE_ROWS, 0.0);
        for (page, out) in self.pages.zip(self.out.chunks_exact_mut(heads.result_len())) {
            let rows = (self.visible - page * PAGE_ROWS).min(PAGE_ROWS);
            heads.page(lanes, self.row, page, rows, self.work, out);
        }
    }
}

/// Folds partial results in the order of the pages and gates the outcome.
struct Finish<'a> {
    head_dim: usize,
    group: usize,
    partial: &'a [f32],
    /// `group x [query | gate]`
    gated: &'a [f32],
    work: &'a mut Vec<f32>,
    /// `group x head_dim`
    out: &'a mut [f32],
}

impl Kernel for Finish<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let len = self.group * (self.head_dim + 2);
        self.work.resize(len, 0.0);
        start_folding(self.group, self.work);
        for partial in self.partial.chunks_exact(len) {
            fold_result(lanes, self.group, self.work, partial);
        }
        gate_result(lanes, self.group, self.work, self.gated, self.out);
    }
}

/// A few rows of one slot and kv head through all their pages.
struct RowBlock<'a> {
    heads: Heads<'a>,
    rows: std::ops::Range<usize>,
    /// Cache rows the first of the rows attends to; each next one sees one more.
    visible: usize,
    /// `rows x heads x [query | gate]`
    gated: &'a [f32],
    work: &'a mut Vec<f32>,
    /// `rows x heads x head_dim`; this task writes its rows' and kv head's part.
    out: &'a SharedSlice<'a, f32>,
}

impl Kernel for RowBlock<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let heads = &self.heads;
        let (group, len) = (heads.group, heads.result_len());
        self.work.resize(group * PAGE_ROWS + (self.rows.len() + 1) * len, 0.0);
        let (scores, results) = self.work.split_at_mut(group * PAGE_ROWS);
        let (partial, folded) = results.split_at_mut(len);
        folded.chunks_exact_mut(len).for_each(|folded| start_folding(group, folded));
        let most_visible = self.visible + self.rows.len() - 1;
        for page in 0..most_visible.div_ceil(PAGE_ROWS) {
            for (index, folded) in folded.chunks_exact_mut(len).enumerate() {
                let rows = (self.visible + index).saturating_sub(page * PAGE_ROWS).min(PAGE_ROWS);
                if rows > 0 {
                    heads.page(lanes, self.rows.start + index, page, rows, scores, partial);
                    fold_result(lanes, group, folded, partial);
                }
            }
        }
        let width = group * heads.head_dim;
        for (row, folded) in self.rows.clone().zip(folded.chunks_exact(len)) {
            let at = row * heads.heads * heads.head_dim + heads.kv_head * width;
            // SAFETY: no other task has this row and kv head.
            let out = unsafe { self.out.range(at..at + width) };
            gate_result(lanes, group, folded, &self.gated[2 * at..2 * (at + width)], out);
        }
    }
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
        let mut key = [lanes.splat(0.0); T];
        for tile in 0..T {
            key[tile] = E::load(lanes, &keys[tile * head_dim + dim]);
        }
        for head in 0..G {
            let query = lanes.splat(queries[head][dim]);
            for tile in 0..T {
                sums[head][tile] = lanes.fma(query, key[tile], sums[head][tile]);
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

/// Softmax over one page for all heads of the group: `out` is a partial result, see [`Heads::result_len`].
#[inline(always)]
fn page_result<L: Lanes, E: Element>(
    lanes: L,
    q: &[f32],
    keys: &[E],
    values: &[E],
    head_dim: usize,
    rows: usize,
    scores: &mut [f32],
    out: &mut [f32],
) {
    let group = q.len() / head_dim;
    let (mixed, numbers) = out.split_at_mut(group * head_dim);
    let (largest, sums) = numbers.split_at_mut(group);
    let tiles = rows.div_ceil(LANES);
    page_scores(lanes, q, keys, head_dim, tiles, group, scores);
    for head in 0..group {
        let scores = &mut scores[head * PAGE_ROWS..][..tiles * LANES];
        scores[rows..].fill(f32::NEG_INFINITY);
        let (chunks, _) = vectors_mut(scores);
        let mut top = lanes.load(&chunks[0]);
        for chunk in &chunks[1..] {
            top = lanes.max(lanes.load(chunk), top);
        }
        let top = lanes.largest(top);
        for chunk in chunks.iter_mut() {
            lanes.store(lanes.exp(lanes.sub(lanes.load(chunk), lanes.splat(top))), chunk);
        }
        scores[rows..].fill(0.0);
        let (chunks, _) = vectors(scores);
        let mut sum = lanes.load(&chunks[0]);
        for chunk in &chunks[1..] {
            sum = lanes.add(sum, lanes.load(chunk));
        }
        largest[head] = top;
        sums[head] = lanes.sum(sum);
    }
    let mut head = 0;
    while head < group {
        let weights = &scores[head * PAGE_ROWS..];
        let out = &mut mixed[head * head_dim..];
        head += match group - head {
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
}

/// A folded result of no pages.
#[inline(always)]
fn start_folding(group: usize, folded: &mut [f32]) {
    folded.fill(0.0);
    let largest = folded.len() - 2 * group;
    folded[largest..largest + group].fill(f32::MIN);
}

/// Takes the next page into a folded result.
#[inline(always)]
fn fold_result<L: Lanes>(lanes: L, group: usize, folded: &mut [f32], partial: &[f32]) {
    let values = folded.len() - 2 * group;
    let head_dim = values / group;
    for head in 0..group {
        let (before, page_top) = (folded[values + head], partial[values + head]);
        let top = if page_top > before { page_top } else { before };
        let (keep, take) = (exp(lanes, before - top), exp(lanes, page_top - top));
        folded[values + head] = top;
        let sum = &mut folded[values + group + head];
        *sum = sum.mul_add(keep, partial[values + group + head] * take);
        let range = head * head_dim..(head + 1) * head_dim;
        fold(lanes, &mut folded[range.clone()], keep, &partial[range], take);
    }
}

/// `out = folded / sum * sigmoid(gate)` per head.
#[inline(always)]
fn gate_result<L: Lanes>(lanes: L, group: usize, folded: &[f32], gated: &[f32], out: &mut [f32]) {
    let values = folded.len() - 2 * group;
    let head_dim = values / group;
    for head in 0..group {
        let gate = &gated[head * 2 * head_dim + head_dim..][..head_dim];
        let range = head * head_dim..(head + 1) * head_dim;
        finish(lanes, &folded[range.clone()], 1.0 / folded[values + group + head], gate, &mut out[range]);
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

/// `out = x * scale * sigmoid(gate)`
#[inline(always)]
fn finish<L: Lanes>(lanes: L, x: &[f32], scale: f32, gate: &[f32], out: &mut [f32]) {
    let ((x, x_rest), (gate, gate_rest)) = (vectors(x), vectors(gate));
    let (out, out_rest) = vectors_mut(out);
    let scale = lanes.splat(scale);
    for ((x, gate), out) in x.iter().zip(gate).zip(out) {
        lanes.store(lanes.mul(lanes.mul(lanes.load(x), scale), lanes.sigmoid(lanes.load(gate))), out);
    }
    if !x_rest.is_empty() {
        let gate = lanes.sigmoid(lanes.load_part(gate_rest));
        lanes.store_part(lanes.mul(lanes.mul(lanes.load_part(x_rest), scale), gate), out_rest);
    }
}

/// The whole op; see [`crate::Device::attention`].
pub(crate) fn attention(
    simd: Simd,
    pool: &Pool,
    shape: &AttentionShape,
    norms: (&[f32], &[f32]),
    rows: &Rows<'_>,
    slots: &[SlotRows],
    caches: &mut [&mut CpuKvCache],
    work: &mut Work,
    out: &mut Vec<f32>,
) {
    let (head_dim, kv_heads) = (shape.head_dim, shape.kv_heads);
    let (q_width, kv_width) = (shape.heads * head_dim, kv_heads * head_dim);
    let n_rows = rows.k.len() / kv_width;
    let Work { queries, keys, partial } = work;
    queries.resize(n_rows * q_width, 0.0);
    keys.resize(n_rows * kv_width, 0.0);
    out.resize(n_rows * q_width, 0.0);
    prepare_rows(simd, pool, shape, norms, rows, queries, keys);
    for slot in slots {
        let cache = &mut caches[slot.slot];
        cache.reserve(slot.held, slot.held + slot.count);
        for index in 0..slot.count {
            let at = (slot.first + index) * kv_width;
            cache.write(slot.held + index, &keys[at..at + kv_width], &rows.v[at..at + kv_width]);
        }
    }
    let caches: &[&mut CpuKvCache] = caches;
    let group = shape.heads / kv_heads;
    let queries: &[f32] = queries;
    let out = SharedSlice::new(out);
    let heads_of = |slot: &SlotRows, kv_head| Heads {
        head_dim,
        group,
        heads: shape.heads,
        kv_head,
        q: queries,
        cache: &*caches[slot.slot],
    };
    let slot_of = |row: usize| slots.iter().find(|slot| row < slot.first + slot.count).expect("every row has a slot");
    let most_pages = slots.iter().map(|slot| (slot.held + slot.count).div_ceil(PAGE_ROWS)).max().unwrap_or(0);
    if n_rows * kv_heads < 2 * pool.threads() && most_pages >= 2 * PAGES_PER_PART && pool.threads() > kv_heads {
        // Few rows and a long cache: share out the pages, then fold. The fold is the same, so the bits are.
        let len = group * (head_dim + 2);
        let parts = most_pages.div_ceil(PAGES_PER_PART);
        partial.resize(n_rows * kv_heads * most_pages * len, 0.0);
        let shared = SharedSlice::new(partial);
        let visible_of = |row: usize| (slot_of(row).held + row - slot_of(row).first) + 1;
        pool.run(n_rows * kv_heads * parts, &|task| {
            let (at, part) = (task / parts, task % parts);
            let (row, kv_head) = (at / kv_heads, at % kv_heads);
            let last = visible_of(row).div_ceil(PAGE_ROWS).min((part + 1) * PAGES_PER_PART);
            let pages = part * PAGES_PER_PART..last;
            if !pages.is_empty() {
                let start = at * most_pages;
                // SAFETY: every task has pages of its own.
                let out = unsafe { shared.range((start + pages.start) * len..(start + pages.end) * len) };
                let (heads, visible) = (heads_of(slot_of(row), kv_head), visible_of(row));
                WORK.with_borrow_mut(|work| dispatch(simd, OnePage { heads, row, pages, visible, work, out }));
            }
        });
        let partial: &[f32] = partial;
        pool.run(n_rows * kv_heads, &|at| {
            let pages = visible_of(at / kv_heads).div_ceil(PAGE_ROWS);
            let partial = &partial[at * most_pages * len..][..pages * len];
            let first = at * group * head_dim;
            // SAFETY: every task has a row and kv head of its own.
            let out = unsafe { out.range(first..first + group * head_dim) };
            let gated = &rows.q[2 * first..2 * (first + group * head_dim)];
            WORK.with_borrow_mut(|work| dispatch(simd, Finish { head_dim, group, partial, gated, work, out }));
        });
        return;
    }
    let block = if n_rows * kv_heads >= 2 * ROWS_AT_ONCE * pool.threads() { ROWS_AT_ONCE } else { 1 };
    let blocks_of = |slot: &SlotRows| slot.count.div_ceil(block);
    let blocks: usize = slots.iter().map(blocks_of).sum();
    pool.run(blocks * kv_heads, &|task| {
        // Blocks of one kv head follow each other, so that its pages stay in the cache; long ones first.
        let (kv_head, mut index) = (task / blocks, blocks - 1 - task % blocks);
        for slot in slots {
            if index < blocks_of(slot) {
                let first = slot.first + index * block;
                let last = (slot.first + slot.count).min(first + block);
                let visible = slot.held + (first - slot.first) + 1;
                let heads = heads_of(slot, kv_head);
                let (gated, out) = (rows.q, &out);
                return WORK.with_borrow_mut(|work| {
                    dispatch(simd, RowBlock { heads, rows: first..last, visible, gated, work, out });
                });
            }
            index -= blocks_of(slot);
        }
    });
}

/// Norms, rope and scale of all rows.
fn prepare_rows(
    simd: Simd,
    pool: &Pool,
    shape: &AttentionShape,
    (q_norm, k_norm): (&[f32], &[f32]),
    rows: &Rows<'_>,
    queries: &mut [f32],
    keys: &mut [f32],
) {
    let (q_width, kv_width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    let n_rows = keys.len() / kv_width;
    let (q_out, k_out) = (SharedSlice::new(queries), SharedSlice::new(keys));
    pool.run(n_rows, &|row| {
        let (q_range, k_range) = (row * q_width..(row + 1) * q_width, row * kv_width..(row + 1) * kv_width);
        // SAFETY: every task has a row of its own.
        let (q_out, k_out) = unsafe { (q_out.range(q_range.clone()), k_out.range(k_range.clone())) };
        let q = &rows.q[2 * q_range.start..2 * q_range.end];
        let rope = &rows.rope[row * shape.rotary_dims..(row + 1) * shape.rotary_dims];
        dispatch(simd, Prepare { shape, q_norm, k_norm, q, k: &rows.k[k_range], rope, q_out, k_out });
    });
}
