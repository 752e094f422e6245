//! Mixture of experts: router, grouping of rows by expert, experts, shared expert.

use super::lanes::{Kernel, Lanes, dispatch, exp, vectors, vectors_mut};
use super::matmul::{Activations, ExpertGroup, Product, Rows, matmul, multiply};
use super::norm::silu_mul;
use super::{Pool, SharedSlice, Simd};
use crate::Matrix;
use crate::device::MoeShape;

/// Gate and up projections, see [`crate::device::ExpertGateUp`].
pub(crate) enum GateUp<'a> {
    Split(&'a Matrix, &'a Matrix),
    Fused(&'a Matrix),
}

/// Weights on the host, see [`crate::device::MoeWeights`].
pub(crate) struct Weights<'a> {
    pub router: &'a Matrix,
    pub gate_up: GateUp<'a>,
    pub down: &'a Matrix,
    pub shared_router: &'a Matrix,
    pub shared_gate: &'a Matrix,
    pub shared_up: &'a Matrix,
    pub shared_down: &'a Matrix,
}

/// Work buffers kept from call to call. A *choice* is one expert of one row: choice `r * used + rank`.
#[derive(Default)]
pub(crate) struct Work {
    /// Quantized input of the experts' down projections, one row per choice.
    inner: Activations,
    /// Quantized input of the shared expert's down projection.
    shared_inner: Activations,
    /// `rows x experts`
    router: Vec<f32>,
    /// `rows`
    shared_router: Vec<f32>,
    /// `rows x used`, expert numbers by rank.
    chosen: Vec<u32>,
    /// `rows x used`
    weights: Vec<f32>,
    /// Choices sorted by expert, and the row of each.
    choices: Vec<u32>,
    choice_rows: Vec<u32>,
    /// First choice of each expert, one more than experts.
    starts: Vec<u32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    activated: Vec<f32>,
    /// `choices x hidden`
    down: Vec<f32>,
    shared_gate: Vec<f32>,
    shared_up: Vec<f32>,
    shared_activated: Vec<f32>,
    /// `rows x hidden`
    shared_down: Vec<f32>,
}

/// Softmax over the experts of one row, the best `used`, renormalised to sum 1.
struct Route<'a> {
    /// Router logits; probabilities afterwards.
    scores: &'a mut [f32],
    chosen: &'a mut [u32],
    weights: &'a mut [f32],
}

impl Kernel for Route<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let mut top = f32::NEG_INFINITY;
        for &score in &*self.scores {
            top = if score > top { score } else { top };
        }
        let (whole, rest) = vectors_mut(self.scores);
        let mut sums = lanes.splat(0.0);
        for chunk in whole {
            let value = lanes.exp(lanes.sub(lanes.load(chunk), lanes.splat(top)));
            lanes.store(value, chunk);
            sums = lanes.add(sums, value);
        }
        let mut sum = lanes.sum(sums);
        for score in rest {
            *score = exp(lanes, *score - top);
            sum += *score;
        }
        self.scores.iter_mut().for_each(|score| *score /= sum);
        let mut total = 0.0;
        for rank in 0..self.chosen.len() {
            let mut best = 0;
            let mut best_score = -1.0;
            for (expert, &score) in self.scores.iter().enumerate() {
                // Strictly greater: of equal experts the lower index wins. A NaN never wins.
                if score > best_score {
                    (best, best_score) = (expert, score);
                }
            }
            self.chosen[rank] = best as u32;
            self.weights[rank] = best_score.max(0.0);
            self.scores[best] = -1.0;
            total += self.weights[rank];
        }
        self.weights.iter_mut().for_each(|weight| *weight /= total);
    }
}

/// `residual += sum over ranks of weights[rank] * down[rank] + sigmoid(shared_gate) * shared`, one row.
struct Combine<'a> {
    residual: &'a mut [f32],
    weights: &'a [f32],
    down: &'a [f32],
    shared_gate: f32,
    shared: &'a [f32],
}

impl Kernel for Combine<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let hidden = self.residual.len();
        let shared_weight = 1.0 / (1.0 + exp(lanes, -self.shared_gate));
        let (residual, residual_rest) = vectors_mut(self.residual);
        let (shared, shared_rest) = vectors(self.shared);
        for (index, (residual, shared)) in residual.iter_mut().zip(shared).enumerate() {
            let mut sum = lanes.splat(0.0);
            for (&weight, down) in self.weights.iter().zip(self.down.chunks_exact(hidden)) {
                let (down, _) = vectors(down);
                sum = lanes.fma(lanes.splat(weight), lanes.load(&down[index]), sum);
            }
            sum = lanes.fma(lanes.splat(shared_weight), lanes.load(shared), sum);
            lanes.store(lanes.add(lanes.load(residual), sum), residual);
        }
        let start = hidden - residual_rest.len();
        for (index, (residual, shared)) in residual_rest.iter_mut().zip(shared_rest).enumerate() {
            let mut sum = 0.0f32;
            for (&weight, down) in self.weights.iter().zip(self.down.chunks_exact(hidden)) {
                sum = weight.mul_add(down[start + index], sum);
            }
            *residual += shared_weight.mul_add(*shared, sum);
        }
    }
}

/// The whole op; see [`crate::Device::moe`]. `x` holds the normed input rows.
pub(crate) fn moe(
    simd: Simd,
    pool: &Pool,
    shape: &MoeShape,
    weights: &Weights<'_>,
    x: &Activations,
    rows: usize,
    work: &mut Work,
    residual: &mut [f32],
) {
    let MoeShape { hidden, experts, used, ff, shared_ff } = *shape;
    let choices = rows * used;
    resize(&mut work.router, rows * experts);
    resize(&mut work.shared_router, rows);
    resize(&mut work.shared_gate, rows * shared_ff);
    resize(&mut work.shared_up, rows * shared_ff);
    matmul(
        pool,
        &mut [
            (weights.router, &mut work.router),
            (weights.shared_router, &mut work.shared_router),
            (weights.shared_gate, &mut work.shared_gate),
            (weights.shared_up, &mut work.shared_up),
        ],
        x,
    );
    work.chosen.resize(choices, 0);
    resize(&mut work.weights, choices);
    let routed = work.router.chunks_exact_mut(experts);
    let routed = routed.zip(work.chosen.chunks_exact_mut(used)).zip(work.weights.chunks_exact_mut(used));
    for ((scores, chosen), weights) in routed {
        dispatch(simd, Route { scores, chosen, weights });
    }
    sort_by_expert(work, experts, used);
    let groups: Vec<ExpertGroup<'_>> = (0..experts)
        .filter_map(|expert| {
            let range = work.starts[expert] as usize..work.starts[expert + 1] as usize;
            (!range.is_empty()).then(|| ExpertGroup {
                expert: expert as u32,
                rows: &work.choice_rows[range.clone()],
                out_rows: &work.choices[range],
            })
        })
        .collect();
    resize(&mut work.activated, choices * ff);
    match weights.gate_up {
        GateUp::Split(gate, up) => {
            resize(&mut work.gate, choices * ff);
            resize(&mut work.up, choices * ff);
            let rows = Rows::Experts { width: ff, groups: &groups };
            multiply(
                pool,
                &mut [Product { w: gate, x, rows, out: &mut work.gate }, Product { w: up, x, rows, out: &mut work.up }],
            );
            activate(simd, pool, &work.gate, &work.up, ff, ff, &mut work.activated);
        }
        GateUp::Fused(gate_up) => {
            resize(&mut work.gate, choices * 2 * ff);
            let experts = Rows::Experts { width: 2 * ff, groups: &groups };
            multiply(pool, &mut [Product { w: gate_up, x, rows: experts, out: &mut work.gate }]);
            activate(simd, pool, &work.gate, &work.gate[ff..], ff, 2 * ff, &mut work.activated);
        }
    }
    work.inner.set(&work.activated, choices, ff);
    resize(&mut work.shared_activated, rows * shared_ff);
    activate(simd, pool, &work.shared_gate, &work.shared_up, shared_ff, shared_ff, &mut work.shared_activated);
    work.shared_inner.set(&work.shared_activated, rows, shared_ff);
    let groups: Vec<ExpertGroup<'_>> =
        groups.into_iter().map(|group| ExpertGroup { rows: group.out_rows, ..group }).collect();
    resize(&mut work.down, choices * hidden);
    resize(&mut work.shared_down, rows * hidden);
    let experts = Rows::Experts { width: hidden, groups: &groups };
    multiply(
        pool,
        &mut [
            Product { w: weights.down, x: &work.inner, rows: experts, out: &mut work.down },
            Product { w: weights.shared_down, x: &work.shared_inner, rows: Rows::All, out: &mut work.shared_down },
        ],
    );

    let residual = SharedSlice::new(residual);
    let work: &Work = work;
    pool.run(rows, &|row| {
        // SAFETY: every task has a row of its own.
        let residual = unsafe { residual.range(row * hidden..(row + 1) * hidden) };
        dispatch(
            simd,
            Combine {
                residual,
                weights: &work.weights[row * used..(row + 1) * used],
                down: &work.down[row * used * hidden..(row + 1) * used * hidden],
                shared_gate: work.shared_router[row],
                shared: &work.shared_down[row * hidden..(row + 1) * hidden],
            },
        );
    });
}

fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.resize(len, 0.0);
}

/// Counting sort of the choices by expert, in row order within an expert.
fn sort_by_expert(work: &mut Work, experts: usize, used: usize) {
    work.starts.clear();
    work.starts.resize(experts + 1, 0);
    for &expert in &work.chosen {
        work.starts[expert as usize + 1] += 1;
    }
    for expert in 0..experts {
        work.starts[expert + 1] += work.starts[expert];
    }
    work.choices.resize(work.chosen.len(), 0);
    work.choice_rows.resize(work.chosen.len(), 0);
    for (choice, &expert) in work.chosen.iter().enumerate() {
        let at = work.starts[expert as usize] as usize;
        work.starts[expert as usize] += 1;
        work.choices[at] = choice as u32;
        work.choice_rows[at] = (choice / used) as u32;
    }
    // Every start has moved to the next expert's: move them back.
    work.starts.copy_within(0..experts, 1);
    work.starts[0] = 0;
}

/// `out = silu(gate) * up` for rows of `ff` values that lie `stride` apart in `gate` and `up`.
fn activate(simd: Simd, pool: &Pool, gate: &[f32], up: &[f32], ff: usize, stride: usize, out: &mut [f32]) {
    let rows = out.len() / ff;
    let out = SharedSlice::new(out);
    let parts = if rows < 32 { 1 } else { 4 * pool.threads() };
    pool.run_ranges(rows, parts, 1, &|range| {
        for row in range {
            // SAFETY: every row is in one range.
            let out = unsafe { out.range(row * ff..(row + 1) * ff) };
            silu_mul(simd, &gate[row * stride..][..ff], &up[row * stride..][..ff], out);
        }
    });
}
