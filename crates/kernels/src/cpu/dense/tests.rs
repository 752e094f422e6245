//! Dense operations against plain loops in f64, and SIMD levels and thread counts against each other.

use super::*;
use crate::Matrix;
use crate::cpu::{Pool, Simd};
use crate::format::{TensorType, quantize};

/// Bound of a dot product in f32 against f64: each of k steps rounds once, errors add up as a random walk; 4 sigma of
/// half a unit of the last place on sums of magnitude about sqrt(k).
fn bound(k: usize) -> f64 {
    4.0 * 0.5 * f64::from(f32::EPSILON) * k as f64
}

fn noise(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

fn layer(ty: TensorType, outputs: usize, inputs: usize) -> (Linear, Vec<f32>) {
    let values = noise(outputs * inputs, 7);
    let mut data = vec![0; ty.row_bytes(inputs).unwrap() * outputs];
    quantize(ty, &values, None, inputs, &mut data).unwrap();
    let mut exact = vec![0.0; values.len()];
    crate::format::dequantize(ty, &data, &mut exact).unwrap();
    (Linear { weight: Matrix { ty, rows: outputs, cols: inputs, data: data.into() }, bias: noise(outputs, 3) }, exact)
}

#[test]
fn linear_follows_double_precision_and_no_level_or_thread_count_changes_a_bit() {
    let cases = [
        (TensorType::F32, 1, 50, 33),
        (TensorType::F32, 9, 48, 768),
        (TensorType::F16, 17, 200, 1184),
        (TensorType::BF16, 8, 97, 64),
        (TensorType::Q8_0, 13, 144, 1216),
        (TensorType::F16, 3, 7, 5),
    ];
    for (ty, rows, outputs, inputs) in cases {
        let (layer, exact) = layer(ty, outputs, inputs);
        let x = noise(rows * inputs, 11);
        let run = |level, threads, activation| {
            let mut out = vec![f32::NAN; rows * outputs];
            linear(&Pool::new(threads), level, &layer, activation, &x, &mut out);
            out
        };
        let reference = run(Simd::Scalar, 1, Activation::None);
        for r in 0..rows {
            for o in 0..outputs {
                let sum: f64 =
                    (0..inputs).map(|k| f64::from(x[r * inputs + k]) * f64::from(exact[o * inputs + k])).sum::<f64>()
                        + f64::from(layer.bias[o]);
                let error = (f64::from(reference[r * outputs + o]) - sum).abs();
                assert!(error <= bound(inputs), "{ty:?} {rows}x{outputs}x{inputs}: [{r}][{o}] is off by {error}");
            }
        }
        for activation in [Activation::None, Activation::GeluTanh, Activation::GeluErf] {
            let expected = run(Simd::Scalar, 1, activation);
            for level in Simd::available() {
                for threads in [1, 3] {
                    let found = run(level, threads, activation);
                    let same = found.iter().zip(&expected).all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{ty:?} {rows}x{outputs}x{inputs} {activation:?} {level:?}, {threads} threads");
                }
            }
        }
    }
}

#[test]
fn attention_follows_double_precision_and_no_level_or_thread_count_changes_a_bit() {
    for (rows, heads, head) in
        [(1, 2, 32), (50, 2, 72), (97, 1, 32), (49, 3, 48), (52, 1, 64), (53, 1, 128), (20, 1, 6)]
    {
        let shape = AttentionShape { rows, heads, head };
        let width = heads * head;
        let qkv = noise(rows * 3 * width, 5);
        let run = |level, threads| {
            let mut out = vec![f32::NAN; rows * width];
            attention(&Pool::new(threads), level, shape, &qkv, &mut out);
            out
        };
        let reference = run(Simd::Scalar, 1);
        let at =
            |r: usize, part: usize, h: usize, d: usize| f64::from(qkv[r * 3 * width + part * width + h * head + d]);
        for h in 0..heads {
            for r in 0..rows {
                let scores: Vec<f64> = (0..rows)
                    .map(|s| (0..head).map(|d| at(r, 0, h, d) * at(s, 1, h, d)).sum::<f64>() / (head as f64).sqrt())
                    .collect();
                let max = scores.iter().copied().fold(f64::MIN, f64::max);
                let total: f64 = scores.iter().map(|s| (s - max).exp()).sum();
                for d in 0..head {
                    let sum: f64 = (0..rows).map(|s| (scores[s] - max).exp() / total * at(s, 2, h, d)).sum();
                    let error = (f64::from(reference[r * width + h * head + d]) - sum).abs();
                    assert!(error <= bound(rows + head), "{shape:?}: head {h} row {r} is off by {error}");
                }
            }
        }
        for level in Simd::available() {
            for threads in [1, 3] {
                let found = run(level, threads);
                let same = found.iter().zip(&reference).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{shape:?} {level:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn rotation_turns_pairs_half_a_head_apart() {
    let mut x = vec![1.0, 2.0, 3.0, 4.0, 9.0, 0.5, 0.0, -1.0, 2.0, 9.0];
    let (cos, sin) = ([0.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, -1.0]);
    rotate_pairs(&Pool::new(2), Simd::current(), &mut x, 5, 4, 2, &cos, &sin);
    assert_eq!(x, [-3.0, 2.0, 1.0, 4.0, 9.0, 0.5, 2.0, -1.0, -0.0, 9.0]);
}
