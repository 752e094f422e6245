//! Gated delta net: causal convolution, SiLU, key and query norms, the recurrence, gated output norm.
//!
//! Per value head the state is a matrix `S [key_dim x value_dim]`. A row does
//! `S *= decay; d = (v - S^T k) * beta; S += k d^T; o = S^T q`. Columns of `S` do not depend on each other, so the kernel takes
//! a block of columns through all rows of a call while it stays in the first cache level; every sum over key dims is one
//! chain in their order. How many columns a block has therefore changes no bit.

use super::lanes::{Kernel, LANES, Lanes, dispatch, exp, vectors, vectors_mut};
use super::norm::{rms_scale, sum_of_squares};
use super::{Pool, SharedSlice, Simd};
use crate::device::{DeltaShape, MAX_CONV_WIDTH, SlotRows};
use std::borrow::Cow;

/// Epsilon of the query and key norms (`x * rsqrt(sum(x^2) + eps)`).
const L2_EPS: f32 = 1e-6;

/// State of one delta-net layer of one slot.
///
/// After a verify window of which only the first rows were accepted, the matrix state lags behind: those rows are done again
/// at the start of the next call, while the state is in the cache anyway, and not in a pass of their own.
pub struct CpuDeltaState {
    shape: DeltaShape,
    /// `[conv_width - 1 x conv_channels]`, oldest row first.
    pub(crate) conv: Vec<f32>,
    /// `[value_heads x key_dim x value_dim]` before the rows of `accepted`.
    matrix: Vec<f32>,
    /// Rows the state has read that `matrix` has not taken in yet.
    accepted: Remembered,
    /// The matrix after the rows of an uncommitted verify window; empty until the first.
    ahead: Vec<f32>,
    /// The rows of an uncommitted verify window.
    pending: Remembered,
}

/// What a verify window did, enough to do its first rows again.
#[derive(Default)]
struct Remembered {
    rows: usize,
    /// `rows x conv_channels` before the convolution.
    raw: Vec<f32>,
    /// `rows x conv_channels`: normed queries and keys, and values.
    mixed: Vec<f32>,
    /// `rows x value_heads`
    beta: Vec<f32>,
    /// `rows x value_heads`, `exp(g)`.
    decay: Vec<f32>,
}

impl Remembered {
    fn recurrence<'a>(&'a self, shape: &'a DeltaShape) -> Recurrence<'a> {
        Recurrence {
            shape,
            mixed: &self.mixed[..self.rows * shape.conv_channels()],
            beta: &self.beta[..self.rows * shape.value_heads],
            decay: &self.decay[..self.rows * shape.value_heads],
        }
    }
}

impl CpuDeltaState {
    pub(crate) fn new(shape: &DeltaShape) -> CpuDeltaState {
        CpuDeltaState {
            shape: *shape,
            conv: vec![0.0; shape.conv_len()],
            matrix: vec![0.0; shape.state_len()],
            accepted: Remembered::default(),
            ahead: Vec::new(),
            pending: Remembered::default(),
        }
    }

    pub(crate) fn bytes(shape: &DeltaShape, verify_rows: usize) -> u64 {
        let ahead = if verify_rows > 0 { shape.state_len() } else { 0 };
        let row = 2 * shape.conv_channels() + 2 * shape.value_heads;
        (4 * (shape.conv_len() + shape.state_len() + ahead + 2 * verify_rows * row)) as u64
    }

    pub(crate) fn reset(&mut self) {
        self.conv.fill(0.0);
        self.matrix.fill(0.0);
        self.accepted.rows = 0;
        self.pending.rows = 0;
    }

    /// The matrix with every committed row taken in.
    pub(crate) fn settled_matrix(&self, simd: Simd, pool: &Pool) -> Cow<'_, [f32]> {
        if self.accepted.rows == 0 {
            return Cow::Borrowed(&self.matrix);
        }
        let mut settled = self.matrix.clone();
        let recurrence = self.accepted.recurrence(&self.shape);
        let head_len = self.shape.key_dim * self.shape.value_dim;
        let shared = SharedSlice::new(&mut settled);
        pool.run(self.shape.value_heads, &|head| {
            // SAFETY: every task has a head of its own.
            let state = unsafe { shared.range(head * head_len..(head + 1) * head_len) };
            dispatch(simd, Scan { rows: recurrence, head, before: None, state, out: None });
        });
        Cow::Owned(settled)
    }

    pub(crate) fn copy_from(&mut self, from: &CpuDeltaState, simd: Simd, pool: &Pool) {
        self.conv.clone_from(&from.conv);
        self.matrix.copy_from_slice(&from.settled_matrix(simd, pool));
        self.accepted.rows = 0;
        self.pending.rows = 0;
    }

    /// Replaces the state by exported parts.
    pub(crate) fn parts_mut(&mut self) -> (&mut [f32], &mut [f32]) {
        self.reset();
        (&mut self.conv, &mut self.matrix)
    }
}

/// Host rows of one call, see [`crate::Device::delta_net`].
pub(crate) struct Rows<'a> {
    pub qkv: &'a [f32],
    pub z: &'a [f32],
    pub beta: &'a [f32],
    pub alpha: &'a [f32],
}

/// Small tensors on the host.
pub(crate) struct Weights<'a> {
    pub conv: &'a [f32],
    pub dt_bias: &'a [f32],
    pub a: &'a [f32],
    pub norm: &'a [f32],
}

/// Work buffers kept from call to call.
#[derive(Default)]
pub(crate) struct Work {
    mixed: Vec<f32>,
    beta: Vec<f32>,
    decay: Vec<f32>,
}

/// Convolution, SiLU and the norms of one row.
struct Mix<'a> {
    shape: &'a DeltaShape,
    weights: &'a Weights<'a>,
    /// The row's inputs and those before it, oldest first.
    taps: &'a [&'a [f32]],
    beta_in: &'a [f32],
    alpha: &'a [f32],
    out: &'a mut [f32],
    beta: &'a mut [f32],
    decay: &'a mut [f32],
}

impl Kernel for Mix<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let channels = self.shape.conv_channels();
        let whole = channels / LANES;
        let (out, out_rest) = vectors_mut(self.out);
        for (index, out) in out.iter_mut().enumerate() {
            let mut sum = lanes.splat(0.0);
            for (x, weight) in self.taps.iter().zip(self.weights.conv.chunks_exact(channels)) {
                let ((x, _), (weight, _)) = (vectors(x), vectors(weight));
                sum = lanes.fma(lanes.load(&x[index]), lanes.load(&weight[index]), sum);
            }
            lanes.store(lanes.silu(sum), out);
        }
        if !out_rest.is_empty() {
            let mut sum = lanes.splat(0.0);
            for (x, weight) in self.taps.iter().zip(self.weights.conv.chunks_exact(channels)) {
                let (x, weight) = (&x[whole * LANES..], &weight[whole * LANES..]);
                sum = lanes.fma(lanes.load_part(x), lanes.load_part(weight), sum);
            }
            lanes.store_part(lanes.silu(sum), out_rest);
        }
        let key_dim = self.shape.key_dim;
        let query_scale = 1.0 / (key_dim as f32).sqrt();
        let norms = 2 * self.shape.key_heads;
        for (head, x) in self.out.chunks_exact_mut(key_dim).take(norms).enumerate() {
            let scale = 1.0 / (sum_of_squares(lanes, x) + L2_EPS).sqrt();
            let scale = if head < self.shape.key_heads { scale * query_scale } else { scale };
            x.iter_mut().for_each(|value| *value *= scale);
        }
        for head in 0..self.shape.value_heads {
            self.beta[head] = 1.0 / (1.0 + exp(lanes, -self.beta_in[head]));
            let x = self.alpha[head] + self.weights.dt_bias[head];
            // softplus, by the form that keeps small results exact
            let softplus = x.max(0.0) + (-x.abs()).exp().ln_1p();
            self.decay[head] = exp(lanes, self.weights.a[head] * softplus);
        }
    }
}

/// Rows of one slot as the recurrence needs them.
#[derive(Clone, Copy)]
struct Recurrence<'a> {
    shape: &'a DeltaShape,
    /// `rows x conv_channels`
    mixed: &'a [f32],
    /// `rows x value_heads`
    beta: &'a [f32],
    /// `rows x value_heads`
    decay: &'a [f32],
}

/// One value head through the rows of its slot.
struct Scan<'a> {
    rows: Recurrence<'a>,
    head: usize,
    /// Where the state is read from by the first row; `None` for `state` itself.
    before: Option<&'a [f32]>,
    state: &'a mut [f32],
    /// Where the slot's outputs go and where they start there, `rows x value_heads x value_dim`; `None` when only the state
    /// is wanted.
    out: Option<(&'a SharedSlice<'a, f32>, usize)>,
}

/// Loads `N` vectors from a line; `WHOLE` false takes its `width` values through zero padding.
#[inline(always)]
fn load_columns<L: Lanes, const N: usize, const WHOLE: bool>(lanes: L, line: &[f32], width: usize) -> [L::V; N] {
    let mut columns = [lanes.splat(0.0); N];
    if WHOLE {
        let (line, _) = vectors(&line[..N * LANES]);
        for vector in 0..N {
            columns[vector] = lanes.load(&line[vector]);
        }
    } else {
        columns[0] = lanes.load_part(&line[..width]);
    }
    columns
}

#[inline(always)]
fn store_columns<L: Lanes, const N: usize, const WHOLE: bool>(
    lanes: L,
    columns: [L::V; N],
    line: &mut [f32],
    width: usize,
) {
    if WHOLE {
        let (line, _) = vectors_mut(&mut line[..N * LANES]);
        for vector in 0..N {
            lanes.store(columns[vector], &mut line[vector]);
        }
    } else {
        lanes.store_part(columns[0], &mut line[..width]);
    }
}

/// Lets `values`, one key dim's line of the state, decay, and adds what it remembers for `key`.
#[inline(always)]
fn recall<L: Lanes, const N: usize>(
    lanes: L,
    decay: L::V,
    key: f32,
    values: &mut [L::V; N],
    remembered: &mut [L::V; N],
) {
    let key = lanes.splat(key);
    for vector in 0..N {
        values[vector] = lanes.mul(values[vector], decay);
        remembered[vector] = lanes.fma(key, values[vector], remembered[vector]);
    }
}

/// `N` vectors of columns from `column` on through all rows; `WHOLE` false: one vector of which `width` columns exist.
///
/// The loops are written without closures: a closure would not inherit the instruction set.
#[inline(always)]
fn scan_columns<L: Lanes, const N: usize, const WHOLE: bool>(
    lanes: L,
    scan: &mut Scan<'_>,
    column: usize,
    width: usize,
) {
    let Recurrence { shape, mixed, beta, decay } = scan.rows;
    let (key_dim, value_dim, channels) = (shape.key_dim, shape.value_dim, shape.conv_channels());
    let key_head = scan.head % shape.key_heads;
    let value_start = 2 * shape.key_heads * key_dim + scan.head * value_dim + column;
    for (row, mixed) in mixed.chunks_exact(channels).enumerate() {
        let query = &mixed[key_head * key_dim..][..key_dim];
        let key = &mixed[(shape.key_heads + key_head) * key_dim..][..key_dim];
        let decay = lanes.splat(decay[row * shape.value_heads + scan.head]);
        let beta = lanes.splat(beta[row * shape.value_heads + scan.head]);
        let state = &mut scan.state[..key_dim * value_dim];
        let mut remembered = [lanes.splat(0.0); N];
        match scan.before.filter(|_| row == 0) {
            None => {
                for (&key, line) in key.iter().zip(state.chunks_exact_mut(value_dim)) {
                    let mut values = load_columns::<L, N, WHOLE>(lanes, &line[column..], width);
                    recall::<L, N>(lanes, decay, key, &mut values, &mut remembered);
                    store_columns::<L, N, WHOLE>(lanes, values, &mut line[column..], width);
                }
            }
            Some(before) => {
                let lines = before.chunks_exact(value_dim).zip(state.chunks_exact_mut(value_dim));
                for (&key, (before, line)) in key.iter().zip(lines) {
                    let mut values = load_columns::<L, N, WHOLE>(lanes, &before[column..], width);
                    recall::<L, N>(lanes, decay, key, &mut values, &mut remembered);
                    store_columns::<L, N, WHOLE>(lanes, values, &mut line[column..], width);
                }
            }
        }
        let mut delta = load_columns::<L, N, WHOLE>(lanes, &mixed[value_start..], width);
        for vector in 0..N {
            delta[vector] = lanes.mul(lanes.sub(delta[vector], remembered[vector]), beta);
        }
        let mut output = [lanes.splat(0.0); N];
        for ((&key, &query), line) in key.iter().zip(query).zip(state.chunks_exact_mut(value_dim)) {
            let (key, query) = (lanes.splat(key), lanes.splat(query));
            let mut values = load_columns::<L, N, WHOLE>(lanes, &line[column..], width);
            for vector in 0..N {
                values[vector] = lanes.fma(key, delta[vector], values[vector]);
                output[vector] = lanes.fma(query, values[vector], output[vector]);
            }
            store_columns::<L, N, WHOLE>(lanes, values, &mut line[column..], width);
        }
        if let Some((out, start)) = scan.out {
            let at = start + (row * shape.value_heads + scan.head) * value_dim + column;
            // SAFETY: this task alone writes this head's columns.
            store_columns::<L, N, WHOLE>(lanes, output, unsafe { out.range(at..at + width) }, width);
        }
    }
}

impl Kernel for Scan<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(mut self, lanes: L) {
        let value_dim = self.rows.shape.value_dim;
        let mut column = 0;
        while column < value_dim {
            let left = value_dim - column;
            column += if L::MANY_REGISTERS && left >= 4 * LANES {
                scan_columns::<L, 4, true>(lanes, &mut self, column, 4 * LANES);
                4 * LANES
            } else if left >= 2 * LANES {
                scan_columns::<L, 2, true>(lanes, &mut self, column, 2 * LANES);
                2 * LANES
            } else if left >= LANES {
                scan_columns::<L, 1, true>(lanes, &mut self, column, LANES);
                LANES
            } else {
                scan_columns::<L, 1, false>(lanes, &mut self, column, left);
                left
            };
        }
    }
}

/// Norm and gate of one head's output: `rmsnorm(o, weight) * silu(z)`.
struct GatedNorm<'a> {
    weight: &'a [f32],
    eps: f32,
    z: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for GatedNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let scale = lanes.splat(rms_scale(lanes, self.out, self.eps));
        let ((z, z_rest), (weight, weight_rest)) = (vectors(self.z), vectors(self.weight));
        let (out, out_rest) = vectors_mut(self.out);
        for ((z, weight), out) in z.iter().zip(weight).zip(out) {
            let normed = lanes.mul(lanes.mul(lanes.load(out), scale), lanes.load(weight));
            lanes.store(lanes.mul(normed, lanes.silu(lanes.load(z))), out);
        }
        if !z_rest.is_empty() {
            let normed = lanes.mul(lanes.mul(lanes.load_part(out_rest), scale), lanes.load_part(weight_rest));
            lanes.store_part(lanes.mul(normed, lanes.silu(lanes.load_part(z_rest))), out_rest);
        }
    }
}

/// The rows before row `row` of a slot and itself, oldest first: from the state, then from the call.
fn taps<'a>(shape: &DeltaShape, conv: &'a [f32], rows: &'a [f32], row: usize) -> [&'a [f32]; MAX_CONV_WIDTH] {
    let (channels, history) = (shape.conv_channels(), shape.conv_width - 1);
    let mut taps: [&[f32]; MAX_CONV_WIDTH] = [&[]; MAX_CONV_WIDTH];
    for (tap, values) in taps[..shape.conv_width].iter_mut().enumerate() {
        let at = row + tap;
        *values = if at < history {
            &conv[at * channels..(at + 1) * channels]
        } else {
            &rows[(at - history) * channels..(at - history + 1) * channels]
        };
    }
    taps
}

/// Moves the convolution state past `rows`.
fn advance_conv(shape: &DeltaShape, conv: &mut [f32], rows: &[f32]) {
    let keep = conv.len().saturating_sub(rows.len());
    conv.copy_within(conv.len() - keep.., 0);
    let tail = conv.len() - keep;
    conv[keep..].copy_from_slice(&rows[rows.len() - tail..]);
    debug_assert_eq!(conv.len(), shape.conv_len());
}

/// The whole op; see [`crate::Device::delta_net`].
pub(crate) fn delta_net(
    simd: Simd,
    pool: &Pool,
    shape: &DeltaShape,
    weights: &Weights<'_>,
    rows: &Rows<'_>,
    slots: &[SlotRows],
    states: &mut [&mut CpuDeltaState],
    work: &mut Work,
    out: &mut Vec<f32>,
) {
    let (channels, heads, value_dim) = (shape.conv_channels(), shape.value_heads, shape.value_dim);
    let n_rows = rows.qkv.len() / channels;
    work.mixed.resize(n_rows * channels, 0.0);
    work.beta.resize(n_rows * heads, 0.0);
    work.decay.resize(n_rows * heads, 0.0);
    out.resize(n_rows * heads * value_dim, 0.0);
    let slot_of = |row: usize| slots.iter().find(|slot| row < slot.first + slot.count).expect("every row has a slot");
    {
        let states: &[&mut CpuDeltaState] = states;
        let (mixed, beta) = (SharedSlice::new(&mut work.mixed), SharedSlice::new(&mut work.beta));
        let decay = SharedSlice::new(&mut work.decay);
        pool.run(n_rows, &|row| {
            let slot = slot_of(row);
            let of_slot = &rows.qkv[slot.first * channels..(slot.first + slot.count) * channels];
            let taps = taps(shape, &states[slot.slot].conv, of_slot, row - slot.first);
            let per_head = row * heads..(row + 1) * heads;
            // SAFETY: every task has a row of its own.
            let (out, beta, decay) = unsafe {
                (
                    mixed.range(row * channels..(row + 1) * channels),
                    beta.range(per_head.clone()),
                    decay.range(per_head.clone()),
                )
            };
            dispatch(
                simd,
                Mix {
                    shape,
                    weights,
                    taps: &taps[..shape.conv_width],
                    beta_in: &rows.beta[per_head.clone()],
                    alpha: &rows.alpha[per_head],
                    out,
                    beta,
                    decay,
                },
            );
        });
    }
    for slot in slots {
        let state = &mut *states[slot.slot];
        let of_slot = &rows.qkv[slot.first * channels..(slot.first + slot.count) * channels];
        let per_head = slot.first * heads..(slot.first + slot.count) * heads;
        state.pending.rows = 0;
        if slot.verify {
            let pending = &mut state.pending;
            pending.rows = slot.count;
            replace(&mut pending.raw, of_slot);
            replace(&mut pending.mixed, &work.mixed[slot.first * channels..(slot.first + slot.count) * channels]);
            replace(&mut pending.beta, &work.beta[per_head.clone()]);
            replace(&mut pending.decay, &work.decay[per_head]);
            state.ahead.resize(shape.state_len(), 0.0);
        } else {
            advance_conv(shape, &mut state.conv, of_slot);
        }
    }
    let targets: Vec<Target<'_>> = slots_in_order(slots, states)
        .map(|(slot, state)| Target {
            matrix: SharedSlice::new(&mut state.matrix),
            ahead: slot.verify.then(|| SharedSlice::new(&mut state.ahead)),
            accepted: &state.accepted,
        })
        .collect();
    let out = SharedSlice::new(out);
    let work: &Work = work;
    let head_len = shape.key_dim * value_dim;
    pool.run(slots.len() * heads, &|task| {
        let (index, head) = (task / heads, task % heads);
        let slot = &slots[index];
        let target = &targets[index];
        let range = head * head_len..(head + 1) * head_len;
        // SAFETY: every task has a slot and head of its own.
        let matrix = unsafe { target.matrix.range(range.clone()) };
        if target.accepted.rows > 0 {
            let rows = target.accepted.recurrence(shape);
            dispatch(simd, Scan { rows, head, before: None, state: matrix, out: None });
        }
        let (before, state) = match &target.ahead {
            None => (None, matrix),
            // SAFETY: as above.
            Some(ahead) => (Some(&*matrix), unsafe { ahead.range(range) }),
        };
        let last = slot.first + slot.count;
        let start = slot.first * heads * value_dim;
        let recurrence = Recurrence {
            shape,
            mixed: &work.mixed[slot.first * channels..last * channels],
            beta: &work.beta[slot.first * heads..last * heads],
            decay: &work.decay[slot.first * heads..last * heads],
        };
        dispatch(simd, Scan { rows: recurrence, head, before, state, out: Some((&out, start)) });
        for row in 0..slot.count {
            let at = start + (row * heads + head) * value_dim;
            // SAFETY: this task alone touches this head's values, and the scan has ended.
            let out = unsafe { out.range(at..at + value_dim) };
            let z = &rows.z[at..at + value_dim];
            dispatch(simd, GatedNorm { weight: weights.norm, eps: shape.norm_eps, z, out });
        }
    });
    drop(targets);
    slots.iter().for_each(|slot| states[slot.slot].accepted.rows = 0);
}

/// Where the scan of one slot works.
struct Target<'a> {
    matrix: SharedSlice<'a, f32>,
    /// Set in a verify window, which leaves `matrix` at the committed rows.
    ahead: Option<SharedSlice<'a, f32>>,
    accepted: &'a Remembered,
}

fn replace(to: &mut Vec<f32>, from: &[f32]) {
    to.clear();
    to.extend_from_slice(from);
}

/// The states the slots name, each borrowed once.
fn slots_in_order<'a>(
    slots: &'a [SlotRows],
    states: &'a mut [&mut CpuDeltaState],
) -> impl Iterator<Item = (&'a SlotRows, &'a mut CpuDeltaState)> {
    let mut states: Vec<Option<&mut CpuDeltaState>> = states.iter_mut().map(|state| Some(&mut **state)).collect();
    slots.iter().map(move |slot| (slot, states[slot.slot].take().expect("a slot has one run of rows per call")))
}

/// See [`crate::Device::delta_commit`].
pub(crate) fn commit(state: &mut CpuDeltaState, rows: usize) {
    let all = std::mem::take(&mut state.pending.rows);
    let rows = rows.min(all);
    if rows == 0 {
        return;
    }
    let channels = state.shape.conv_channels();
    advance_conv(&state.shape, &mut state.conv, &state.pending.raw[..rows * channels]);
    if rows == all {
        std::mem::swap(&mut state.matrix, &mut state.ahead);
    } else {
        std::mem::swap(&mut state.accepted, &mut state.pending);
        state.accepted.rows = rows;
        state.pending.rows = 0;
    }
}
