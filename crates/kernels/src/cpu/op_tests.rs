//! The ops of the CPU device against plain f64 arithmetic, and every instruction set against the scalar reference bit for
//! bit.

use super::attention::{self, attention};
use super::delta_net::{self, CpuDeltaState, delta_net};
use super::kv_cache::CpuKvCache;
use super::lanes::{Kernel, LANES, Lanes, dispatch, exp};
use super::moe::{self, GateUp, moe};
use super::{Activations, Pool, Simd, norm};
use crate::Matrix;
use crate::device::{AttentionShape, DeltaShape, KvType, MoeShape, SlotRows};
use crate::format::TensorType;

/// Reproducible values in -1 ..= 1.
fn values(seed: u64, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn assert_close(found: &[f32], expected: &[f64], bound: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (index, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(found) - expected).abs() <= bound, "{what}[{index}]: {found}, expected {expected}");
    }
}

/// Runs `compute` on every level and checks that all give the bits of the scalar reference, which it returns.
fn same_on_all_levels(what: &str, compute: impl Fn(Simd) -> Vec<f32>) -> Vec<f32> {
    let reference = compute(Simd::Scalar);
    for simd in Simd::available() {
        assert!(bits(&compute(simd)) == bits(&reference), "{what}: {simd:?} differs from scalar");
    }
    reference
}

fn one_slot(count: usize, held: usize, verify: bool) -> SlotRows {
    SlotRows { slot: 0, first: 0, count, held, verify }
}

struct EveryFunction<'a>(&'a [f32]);

impl Kernel for EveryFunction<'_> {
    type Output = Vec<f32>;
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> Vec<f32> {
        let mut out = Vec::new();
        let mut chunk = [0.0; LANES];
        for part in self.0.chunks(LANES) {
            let x = lanes.load_part(part);
            for y in [lanes.exp(x), lanes.sigmoid(x), lanes.silu(x)] {
                lanes.store(y, &mut chunk);
                out.extend_from_slice(&chunk[..part.len()]);
            }
            out.extend([lanes.sum(x), lanes.largest(x), exp(lanes, part[0])]);
        }
        out
    }
}

#[test]
fn exponentials_are_accurate_and_the_same_everywhere() {
    let mut inputs: Vec<f32> = (-1400..1400).map(|step| step as f32 / 16.0).collect();
    inputs.extend(values(3, 500));
    inputs.extend([0.0, -0.0, 1e-30, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE]);
    let found = same_on_all_levels("functions", |simd| dispatch(simd, EveryFunction(&inputs)));
    let mut at = 0;
    for part in inputs.chunks(LANES) {
        for (lane, &x) in part.iter().enumerate() {
            let exact = f64::from(x.clamp(-86.0, 88.0)).exp();
            let relative = (f64::from(found[at + lane]) / exact - 1.0).abs();
            assert!(relative < 2.5e-7, "exp({x}): off by {relative}");
            let sigmoid = 1.0 / (1.0 + (-f64::from(x)).exp());
            assert!((f64::from(found[at + part.len() + lane]) - sigmoid).abs() < 2e-7, "sigmoid({x})");
        }
        at += 3 * part.len() + 3;
    }
}

#[test]
fn norms_of_any_width() {
    for width in [1, 7, 16, 31, 64, 250, 256, 2048] {
        let (x, weight) = (values(width as u64, 3 * width), values(9, width));
        let found = same_on_all_levels("rms_norm", |simd| {
            let mut out = vec![0.0; x.len()];
            norm::rms_norm(simd, &x, &weight, 1e-6, &mut out);
            norm::add(simd, &mut out, &x);
            let mut gated = vec![0.0; x.len()];
            norm::silu_mul(simd, &out, &x, &mut gated);
            [out, gated].concat()
        });
        let expected: Vec<f64> = x
            .chunks(width)
            .flat_map(|x| {
                let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / width as f64;
                let scale = 1.0 / (mean + 1e-6).sqrt();
                x.iter().zip(&weight).map(move |(&x, &weight)| f64::from(x) * scale * f64::from(weight) + f64::from(x))
            })
            .collect();
        assert_close(&found[..x.len()], &expected, 1e-5, "rms_norm");
    }
}

struct AttentionCase {
    shape: AttentionShape,
    rows: usize,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    rope: Vec<f32>,
    q_norm: Vec<f32>,
    k_norm: Vec<f32>,
}

impl AttentionCase {
    fn new(shape: AttentionShape, rows: usize) -> Self {
        let width = shape.kv_heads * shape.head_dim;
        let angles = values(8, rows * shape.rotary_dims / 2);
        let rope = angles
            .chunks(shape.rotary_dims / 2)
            .flat_map(|angles| angles.iter().map(|a| a.cos()).chain(angles.iter().map(|a| a.sin())).collect::<Vec<_>>())
            .collect();
        let mut q = values(1, rows * 2 * shape.heads * shape.head_dim);
        q.iter_mut().for_each(|q| *q *= 3.0);
        AttentionCase {
            shape,
            rows,
            q,
            k: values(2, rows * width),
            v: values(3, rows * width),
            rope,
            q_norm: values(4, shape.head_dim).iter().map(|x| 1.5 + x).collect(),
            k_norm: values(5, shape.head_dim).iter().map(|x| 1.5 + x).collect(),
        }
    }

    /// Reads the rows in windows of `chunk`.
    fn run(&self, simd: Simd, threads: usize, kv_type: KvType, chunk: usize) -> Vec<f32> {
        let shape = &self.shape;
        let pool = Pool::new(threads);
        let mut cache = CpuKvCache::new(shape, kv_type);
        let mut all = Vec::new();
        let (q_width, kv_width) = (2 * shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
        for first in (0..self.rows).step_by(chunk) {
            let last = self.rows.min(first + chunk);
            let rows = attention::Rows {
                q: &self.q[first * q_width..last * q_width],
                k: &self.k[first * kv_width..last * kv_width],
                v: &self.v[first * kv_width..last * kv_width],
                rope: &self.rope[first * shape.rotary_dims..last * shape.rotary_dims],
            };
            let mut out = Vec::new();
            attention(
                simd,
                &pool,
                shape,
                (&self.q_norm, &self.k_norm),
                &rows,
                &[one_slot(last - first, first, false)],
                &mut [&mut cache],
                &mut attention::Work::default(),
                &mut out,
            );
            all.extend(out);
        }
        all
    }

    fn expected(&self) -> Vec<f64> {
        let AttentionShape { heads, kv_heads, head_dim, rotary_dims, .. } = self.shape;
        let turn = |x: &[f32], weight: &[f32], row: usize| -> Vec<f64> {
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / head_dim as f64;
            let scale = 1.0 / (mean + f64::from(self.shape.norm_eps)).sqrt();
            let x: Vec<f64> = x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * scale * f64::from(w)).collect();
            let mut out = x.clone();
            let half = rotary_dims / 2;
            for pair in 0..half {
                let at = row * rotary_dims + pair;
                let (cos, sin) = (f64::from(self.rope[at]), f64::from(self.rope[at + half]));
                out[pair] = x[pair] * cos - x[pair + half] * sin;
                out[pair + half] = x[pair + half] * cos + x[pair] * sin;
            }
            out
        };
        let keys: Vec<Vec<f64>> =
            self.k.chunks(head_dim).enumerate().map(|(i, k)| turn(k, &self.k_norm, i / kv_heads)).collect();
        let mut out = Vec::new();
        for row in 0..self.rows {
            for head in 0..heads {
                let start = (row * heads + head) * 2 * head_dim;
                let q = turn(&self.q[start..start + head_dim], &self.q_norm, row);
                let kv_head = head / (heads / kv_heads);
                let scores: Vec<f64> = (0..=row)
                    .map(|other| {
                        let key = &keys[other * kv_heads + kv_head];
                        q.iter().zip(key).map(|(q, k)| q * k).sum::<f64>() / (head_dim as f64).sqrt()
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::MIN, f64::max);
                let sum: f64 = scores.iter().map(|score| (score - top).exp()).sum();
                for dim in 0..head_dim {
                    let value = |other: usize| f64::from(self.v[(other * kv_heads + kv_head) * head_dim + dim]);
                    let mixed: f64 = (0..=row).map(|other| (scores[other] - top).exp() / sum * value(other)).sum();
                    let gate = f64::from(self.q[start + head_dim + dim]);
                    out.push(mixed / (1.0 + (-gate).exp()));
                }
            }
        }
        out
    }
}

#[test]
fn attention_follows_its_formula_in_any_geometry() {
    let shapes = [(4, 2, 64, 16), (8, 1, 32, 32), (3, 3, 20, 6), (12, 1, 16, 4), (10, 2, 48, 8)];
    for (heads, kv_heads, head_dim, rotary_dims) in shapes {
        let shape = AttentionShape { heads, kv_heads, head_dim, rotary_dims, norm_eps: 1e-6 };
        let case = AttentionCase::new(shape, 150);
        let expected = case.expected();
        for (kv_type, bound) in [(KvType::F32, 1e-5), (KvType::F16, 4e-3)] {
            let found = same_on_all_levels("attention", |simd| case.run(simd, 2, kv_type, 150));
            assert_close(&found, &expected, bound, "attention");
            for (threads, chunk) in [(1, 1), (3, 7), (2, 64), (1, 100), (4, 1)] {
                let other = case.run(Simd::current(), threads, kv_type, chunk);
                assert!(bits(&other) == bits(&found), "{shape:?}: {threads} threads, chunks of {chunk}");
            }
        }
    }
}

struct DeltaCase {
    shape: DeltaShape,
    rows: usize,
    qkv: Vec<f32>,
    z: Vec<f32>,
    beta: Vec<f32>,
    alpha: Vec<f32>,
    conv: Vec<f32>,
    dt_bias: Vec<f32>,
    a: Vec<f32>,
    norm: Vec<f32>,
}

impl DeltaCase {
    fn new(shape: DeltaShape, rows: usize) -> Self {
        let heads = shape.value_heads;
        DeltaCase {
            shape,
            rows,
            qkv: values(1, rows * shape.conv_channels()),
            z: values(2, rows * heads * shape.value_dim),
            beta: values(3, rows * heads),
            alpha: values(4, rows * heads),
            conv: values(5, shape.conv_width * shape.conv_channels()),
            dt_bias: values(6, heads),
            a: values(7, heads).iter().map(|x| -0.2 - x.abs()).collect(),
            norm: values(8, shape.value_dim),
        }
    }

    fn window(
        &self,
        simd: Simd,
        pool: &Pool,
        state: &mut CpuDeltaState,
        first: usize,
        last: usize,
        verify: bool,
    ) -> Vec<f32> {
        let (channels, heads) = (self.shape.conv_channels(), self.shape.value_heads);
        let inner = heads * self.shape.value_dim;
        let rows = delta_net::Rows {
            qkv: &self.qkv[first * channels..last * channels],
            z: &self.z[first * inner..last * inner],
            beta: &self.beta[first * heads..last * heads],
            alpha: &self.alpha[first * heads..last * heads],
        };
        let weights = delta_net::Weights { conv: &self.conv, dt_bias: &self.dt_bias, a: &self.a, norm: &self.norm };
        let mut out = Vec::new();
        delta_net(
            simd,
            pool,
            &self.shape,
            &weights,
            &rows,
            &[one_slot(last - first, first, verify)],
            &mut [state],
            &mut delta_net::Work::default(),
            &mut out,
        );
        out
    }

    fn run(&self, simd: Simd, threads: usize, chunk: usize) -> (Vec<f32>, Vec<f32>) {
        let pool = Pool::new(threads);
        let mut state = CpuDeltaState::new(&self.shape);
        let mut all = Vec::new();
        for first in (0..self.rows).step_by(chunk) {
            all.extend(self.window(simd, &pool, &mut state, first, self.rows.min(first + chunk), false));
        }
        let matrix = state.settled_matrix(simd, &pool).into_owned();
        (all, [state.conv, matrix].concat())
    }

    fn expected(&self) -> Vec<f64> {
        let DeltaShape { key_heads, value_heads, key_dim, value_dim, conv_width, norm_eps } = self.shape;
        let channels = self.shape.conv_channels();
        let mut states = vec![vec![0.0f64; key_dim * value_dim]; value_heads];
        let mut out = Vec::new();
        for row in 0..self.rows {
            let mixed: Vec<f64> = (0..channels)
                .map(|channel| {
                    let sum: f64 = (0..conv_width)
                        .filter(|tap| row + tap + 1 >= conv_width)
                        .map(|tap| {
                            let input = self.qkv[(row + tap + 1 - conv_width) * channels + channel];
                            f64::from(input) * f64::from(self.conv[tap * channels + channel])
                        })
                        .sum();
                    sum / (1.0 + (-sum).exp())
                })
                .collect();
            let unit = |x: &[f64]| -> Vec<f64> {
                let scale = 1.0 / (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                x.iter().map(|x| x * scale).collect()
            };
            for head in 0..value_heads {
                let key_head = head % key_heads;
                let q: Vec<f64> = unit(&mixed[key_head * key_dim..][..key_dim]);
                let k = unit(&mixed[(key_heads + key_head) * key_dim..][..key_dim]);
                let v = &mixed[2 * key_heads * key_dim + head * value_dim..][..value_dim];
                let at = row * value_heads + head;
                let beta = 1.0 / (1.0 + (-f64::from(self.beta[at])).exp());
                let softplus = (f64::from(self.alpha[at]) + f64::from(self.dt_bias[head])).exp().ln_1p();
                let decay = (f64::from(self.a[head]) * softplus).exp();
                let state = &mut states[head];
                state.iter_mut().for_each(|s| *s *= decay);
                let mut o = vec![0.0; value_dim];
                for column in 0..value_dim {
                    let remembered: f64 = (0..key_dim).map(|dim| state[dim * value_dim + column] * k[dim]).sum();
                    let delta = (v[column] - remembered) * beta;
                    for dim in 0..key_dim {
                        state[dim * value_dim + column] += k[dim] * delta;
                        o[column] += state[dim * value_dim + column] * q[dim] / (key_dim as f64).sqrt();
                    }
                }
                let mean = o.iter().map(|o| o * o).sum::<f64>() / value_dim as f64;
                let scale = 1.0 / (mean + f64::from(norm_eps)).sqrt();
                for column in 0..value_dim {
                    let z = f64::from(self.z[at * value_dim + column]);
                    out.push(o[column] * scale * f64::from(self.norm[column]) * z / (1.0 + (-z).exp()));
                }
            }
        }
        out
    }
}

const DELTA_SHAPES: [(usize, usize, usize, usize, usize); 4] =
    [(4, 8, 64, 64, 4), (2, 2, 24, 40, 2), (1, 3, 10, 20, 3), (2, 4, 128, 128, 4)];

fn delta_cases() -> impl Iterator<Item = DeltaCase> {
    DELTA_SHAPES.into_iter().map(|(key_heads, value_heads, key_dim, value_dim, conv_width)| {
        DeltaCase::new(DeltaShape { key_heads, value_heads, key_dim, value_dim, conv_width, norm_eps: 1e-6 }, 33)
    })
}

#[test]
fn the_delta_net_follows_its_formula_in_any_geometry() {
    for case in delta_cases() {
        let found = same_on_all_levels("delta_net", |simd| {
            let (out, state) = case.run(simd, 2, 33);
            [out, state].concat()
        });
        let expected = case.expected();
        assert_close(&found[..expected.len()], &expected, 2e-4, "delta_net");
        for (threads, chunk) in [(1, 1), (2, 2), (3, 5), (1, 32)] {
            let (out, state) = case.run(Simd::current(), threads, chunk);
            assert!(bits(&[out, state].concat()) == bits(&found), "{threads} threads, chunks of {chunk}");
        }
    }
}

#[test]
fn committing_part_of_a_verify_window_equals_reading_that_part() {
    let pool = Pool::new(2);
    let simd = Simd::current();
    for case in delta_cases() {
        for accepted in 0..=6 {
            let mut plain = CpuDeltaState::new(&case.shape);
            case.window(simd, &pool, &mut plain, 0, 20, false);
            let mut verified = CpuDeltaState::new(&case.shape);
            verified.copy_from(&plain, simd, &pool);
            let expected = case.window(simd, &pool, &mut verified, 20, 26, true);
            let mut whole = CpuDeltaState::new(&case.shape);
            whole.copy_from(&plain, simd, &pool);
            assert!(bits(&case.window(simd, &pool, &mut whole, 20, 26, false)) == bits(&expected));
            delta_net::commit(&mut verified, accepted);
            if accepted > 0 {
                case.window(simd, &pool, &mut plain, 20, 20 + accepted, false);
            }
            let same = |verified: &CpuDeltaState, plain: &CpuDeltaState| {
                let (verified_matrix, plain_matrix) =
                    (verified.settled_matrix(simd, &pool), plain.settled_matrix(simd, &pool));
                bits(&verified_matrix) == bits(&plain_matrix) && bits(&verified.conv) == bits(&plain.conv)
            };
            assert!(same(&verified, &plain), "{accepted} accepted");
            let mut copy = CpuDeltaState::new(&case.shape);
            copy.copy_from(&verified, simd, &pool);
            assert!(same(&copy, &plain), "a copy, {accepted} accepted");
            // The next window, verified and rejected but for one row, then a plain one.
            let (a, b) = (20 + accepted, 27 + accepted);
            let expected = case.window(simd, &pool, &mut copy, a, b, false);
            assert!(bits(&case.window(simd, &pool, &mut verified, a, b, true)) == bits(&expected));
            delta_net::commit(&mut verified, 1);
            case.window(simd, &pool, &mut plain, a, a + 1, false);
            assert!(same(&verified, &plain), "{accepted} accepted, then one");
            let expected = case.window(simd, &pool, &mut plain, a + 1, b, false);
            assert!(bits(&case.window(simd, &pool, &mut verified, a + 1, b, false)) == bits(&expected));
            assert!(same(&verified, &plain), "{accepted} accepted, then one, then a plain window");
        }
    }
}

fn f32_matrix(seed: u64, rows: usize, cols: usize) -> Matrix {
    let data: Vec<u8> = values(seed, rows * cols).iter().flat_map(|value| value.to_le_bytes()).collect();
    Matrix { ty: TensorType::F32, rows, cols, data: data.into() }
}

fn weights_of(matrix: &Matrix) -> Vec<f64> {
    matrix.data.as_chunks::<4>().0.iter().map(|value| f64::from(f32::from_le_bytes(*value))).collect()
}

fn product(matrix: &Matrix, first: usize, rows: usize, x: &[f64]) -> Vec<f64> {
    let weights = weights_of(matrix);
    let row = |row: usize| &weights[(first + row) * matrix.cols..(first + row + 1) * matrix.cols];
    (0..rows).map(|index| row(index).iter().zip(x).map(|(w, x)| w * x).sum()).collect()
}

fn gated(gate: &[f64], up: &[f64]) -> Vec<f64> {
    gate.iter().zip(up).map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}

#[test]
fn the_mixture_of_experts_follows_its_formula_and_ties_go_to_the_lower_index() {
    let shape = MoeShape { hidden: 40, experts: 6, used: 3, ff: 24, shared_ff: 20 };
    let MoeShape { hidden, experts, used, ff, shared_ff } = shape;
    let mut router = f32_matrix(1, experts, hidden);
    // Experts 1 and 4 get the same score for every row.
    let mut bytes = router.data.to_vec();
    let line = 4 * hidden;
    let copy = bytes[line..2 * line].to_vec();
    bytes[4 * line..5 * line].copy_from_slice(&copy);
    router.data = bytes.into();
    let gate = f32_matrix(2, experts * ff, hidden);
    let up = f32_matrix(3, experts * ff, hidden);
    let fused: Vec<u8> = (0..experts)
        .flat_map(|expert| {
            let part = expert * ff * line..(expert + 1) * ff * line;
            [gate.data[part.clone()].to_vec(), up.data[part].to_vec()].concat()
        })
        .collect();
    let fused = Matrix { rows: 2 * experts * ff, data: fused.into(), ..gate.clone() };
    let down = f32_matrix(4, experts * hidden, ff);
    let shared = [f32_matrix(5, 1, hidden), f32_matrix(6, shared_ff, hidden), f32_matrix(7, shared_ff, hidden)];
    let shared_down = f32_matrix(8, hidden, shared_ff);
    let rows = 9;
    let x = values(10, rows * hidden);
    let start = values(11, rows * hidden);
    let run = |simd: Simd, threads: usize, gate_up: fn(&'static [Matrix; 3]) -> GateUp<'static>, parts: usize| {
        let matrices: &'static [Matrix; 3] = Box::leak(Box::new([gate.clone(), up.clone(), fused.clone()]));
        let weights = moe::Weights {
            router: &router,
            gate_up: gate_up(matrices),
            down: &down,
            shared_router: &shared[0],
            shared_gate: &shared[1],
            shared_up: &shared[2],
            shared_down: &shared_down,
        };
        let pool = Pool::new(threads);
        let mut residual = start.clone();
        for part in (0..rows).collect::<Vec<_>>().chunks(parts) {
            let range = part[0] * hidden..(part[0] + part.len()) * hidden;
            let mut input = Activations::new();
            input.set(&x[range.clone()], part.len(), hidden);
            let work = &mut moe::Work::default();
            moe(simd, &pool, &shape, &weights, &input, part.len(), work, &mut residual[range]);
        }
        residual
    };
    let split: fn(&'static [Matrix; 3]) -> GateUp<'static> = |m| GateUp::Split(&m[0], &m[1]);
    let found = same_on_all_levels("moe", |simd| run(simd, 2, split, rows));
    assert!(bits(&run(Simd::current(), 1, |m| GateUp::Fused(&m[2]), rows)) == bits(&found), "fused gate and up");
    assert!(bits(&run(Simd::current(), 3, split, 1)) == bits(&found), "row by row");
    let mut expected = Vec::new();
    let mut tie_inside = 0;
    for row in 0..rows {
        let x: Vec<f64> = x[row * hidden..(row + 1) * hidden].iter().map(|&x| f64::from(x)).collect();
        let scores = product(&router, 0, experts, &x);
        let mut order: Vec<usize> = (0..experts).collect();
        order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
        let chosen = &order[..used];
        tie_inside += usize::from(chosen.contains(&1) != chosen.contains(&4));
        let sum: f64 = chosen.iter().map(|&expert| (scores[expert] - scores[order[0]]).exp()).sum();
        let mut out: Vec<f64> = start[row * hidden..(row + 1) * hidden].iter().map(|&x| f64::from(x)).collect();
        for &expert in chosen {
            let inner = gated(&product(&gate, expert * ff, ff, &x), &product(&up, expert * ff, ff, &x));
            let weight = (scores[expert] - scores[order[0]]).exp() / sum;
            let result = product(&down, expert * hidden, hidden, &inner);
            out.iter_mut().zip(result).for_each(|(out, value)| *out += weight * value);
        }
        let inner = gated(&product(&shared[1], 0, shared_ff, &x), &product(&shared[2], 0, shared_ff, &x));
        let weight = 1.0 / (1.0 + (-product(&shared[0], 0, 1, &x)[0]).exp());
        let result = product(&shared_down, 0, hidden, &inner);
        out.iter_mut().zip(result).for_each(|(out, value)| *out += weight * value);
        expected.extend(out);
    }
    assert!(tie_inside > 0, "no row puts the tie at the border of the chosen experts");
    assert_close(&found, &expected, 2e-4, "moe");
}
