//! Operations on one row or one element: LayerNorm, GELU, softmax weights, rotation, addition.
//!
//! Each is written once as plain loops over slices and compiled for every SIMD level; the loops are shaped so that the
//! compiler vectorises them, and every multiply-add is an explicit fused one, so the levels agree bit for bit.

use crate::cpu::{Pool, SharedSlice, Simd};

/// Lanes of every sum over a row.
const LANES: usize = 16;

/// Compiles `$body` for every level under the name `$name`.
macro_rules! for_levels {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($level:ident; $($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $body:ident) => {
        $(#[$doc])*
        $vis fn $name($level: Simd, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    $body($($arg),*)
                }
                match $level {
                    // SAFETY: a level is only ever one the machine has (`Simd::detect`).
                    Simd::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Simd::Avx2 => return unsafe { avx2($($arg),*) },
                    Simd::Scalar => {}
                }
            }
            let _ = $level;
            $body($($arg),*)
        }
    };
}

/// e^x for x in -87..=87 (values outside are taken as the nearest bound), relative error under 2e-7.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer held in the low mantissa bits
    const LN2_HIGH: f32 = 0.693_359_4; // 355 / 512, exact in few bits, so n * LN2_HIGH is exact
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let x = x.clamp(-87.0, 87.0);
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    let r = (-n).mul_add(LN2_LOW, (-n).mul_add(LN2_HIGH, x));
    // The Taylor series of e^r; |r| <= ln2 / 2, so the first term left out is below 6e-9.
    let mut p = 1.0 / 5040.0;
    p = r.mul_add(p, 1.0 / 720.0);
    p = r.mul_add(p, 1.0 / 120.0);
    p = r.mul_add(p, 1.0 / 24.0);
    p = r.mul_add(p, 1.0 / 6.0);
    p = r.mul_add(p, 0.5);
    p = r.mul_add(p, 1.0);
    p = r.mul_add(p, 1.0);
    let scale = f32::from_bits(shifted.to_bits().wrapping_add(127) << 23);
    p * scale
}

/// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`, written with the logistic function.
#[inline(always)]
fn gelu_tanh_of(x: f32) -> f32 {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;
    let inner = TWO_SQRT_2_OVER_PI * (x * x * x).mul_add(0.044_715, x);
    x / (1.0 + exp(-inner))
}

/// `0.5 x (1 + erf(x / sqrt 2))`.
#[inline(always)]
fn gelu_erf_of(x: f32) -> f32 {
    let half_erfc = half_erfc_scaled(x.abs() * std::f32::consts::FRAC_1_SQRT_2);
    // For x >= 0 the result is x - x * erfc / 2, for x < 0 it is x * erfc / 2.
    let tail = x * half_erfc;
    if x < 0.0 { tail } else { x - tail }
}

/// `erfc(x) / 2` for x >= 0: `e^(-x^2)` times a polynomial in `t = 2 / (2 + x)`, fitted by Chebyshev interpolation of
/// `erfc(x) e^(x^2) / 2` on x in 0..=9.
#[inline(always)]
fn half_erfc_scaled(x: f32) -> f32 {
    let t = 2.0 / (2.0 + x);
    let mut p = ERFC_COEFFICIENTS[ERFC_COEFFICIENTS.len() - 1];
    for i in (0..ERFC_COEFFICIENTS.len() - 1).rev() {
        p = p.mul_add(t, ERFC_COEFFICIENTS[i]);
    }
    exp(-x * x) * p
}

/// Coefficients of [`half_erfc_scaled`], lowest power first; relative error 2e-8 before rounding.
#[allow(clippy::excessive_precision)]
const ERFC_COEFFICIENTS: [f32; 11] = [
    8.79492109e-06,
    0.140813872,
    0.143765435,
    0.105128258,
    0.167004675,
    -0.185562983,
    0.43978402,
    -0.58945787,
    0.393617272,
    -0.134023428,
    0.0189219434,
];

#[inline(always)]
fn gelu_tanh_body(x: &mut [f32]) {
    for v in x {
        *v = gelu_tanh_of(*v);
    }
}

#[inline(always)]
fn gelu_erf_body(x: &mut [f32]) {
    for v in x {
        *v = gelu_erf_of(*v);
    }
}

for_levels! {
    /// GELU in its tanh form, in place.
    pub(super) fn gelu_tanh(level; x: &mut [f32]) = gelu_tanh_body
}
for_levels! {
    /// GELU in its erf form, in place.
    pub(super) fn gelu_erf(level; x: &mut [f32]) = gelu_erf_body
}

/// Adds up lanes in a fixed tree.
#[inline(always)]
fn reduce(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

/// The sum of `term` over a row, element i going to lane i % 16.
#[inline(always)]
fn sum_by(x: &[f32], term: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for i in 0..LANES {
            lanes[i] += term(chunk[i]);
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(rest) {
        *lane += term(v);
    }
    reduce(lanes)
}

#[inline(always)]
fn layer_norm_body(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len() as f32;
    let mean = sum_by(x, |v| v) / n;
    let variance = sum_by(x, |v| (v - mean) * (v - mean)) / n;
    let scale = 1.0 / (variance + eps).sqrt();
    for (((o, &v), &w), &b) in out.iter_mut().zip(x).zip(weight).zip(bias) {
        *o = ((v - mean) * scale).mul_add(w, b);
    }
}

for_levels! {
    fn layer_norm_row(level; x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) = layer_norm_body
}

/// LayerNorm of every row: `out = (x - mean) / sqrt(variance + eps) * weight + bias`. `x` and `out` are
/// `[rows, weight.len()]`.
pub fn layer_norm(pool: &Pool, level: Simd, x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let cols = weight.len();
    assert!(cols > 0 && bias.len() == cols && x.len() == out.len() && x.len().is_multiple_of(cols));
    let shared = SharedSlice::new(out);
    pool.run_ranges(x.len() / cols, 4 * pool.threads(), 1, &|rows| {
        // SAFETY: ranges of rows do not overlap.
        let out = unsafe { shared.range(rows.start * cols..rows.end * cols) };
        for (x, out) in x[rows.start * cols..rows.end * cols].chunks_exact(cols).zip(out.chunks_exact_mut(cols)) {
            layer_norm_row(level, x, weight, bias, eps, out);
        }
    });
}

/// `x += y`, element by element.
pub fn add_rows(pool: &Pool, x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len());
    let len = x.len();
    let shared = SharedSlice::new(x);
    pool.run_ranges(len, 4 * pool.threads(), LANES, &|range| {
        // SAFETY: ranges do not overlap.
        let part = unsafe { shared.range(range.clone()) };
        for (a, &b) in part.iter_mut().zip(&y[range]) {
            *a += b;
        }
    });
}

#[inline(always)]
fn rotate_body(head: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = head.split_at_mut(cos.len());
    for (((a, b), &c), &s) in first.iter_mut().zip(second).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = (-y).mul_add(s, x * c);
        *b = x.mul_add(s, y * c);
    }
}

#[inline(always)]
fn rotate_row_body(row: &mut [f32], width: usize, cos: &[f32], sin: &[f32]) {
    for head in row.chunks_exact_mut(width) {
        rotate_body(head, cos, sin);
    }
}

for_levels! {
    fn rotate_row(level; row: &mut [f32], width: usize, cos: &[f32], sin: &[f32]) = rotate_row_body
}

/// Rotates the heads in the first `rotated` columns of every row: within a head of `2 * half` values, pair i is
/// (i, i + half) and turns by the angle whose cosine and sine are `cos[row][i]` and `sin[row][i]`.
/// `x` is `[rows, row_width]`, the tables are `[rows, half]`.
pub fn rotate_pairs(
    pool: &Pool,
    level: Simd,
    x: &mut [f32],
    row_width: usize,
    rotated: usize,
    half: usize,
    cos: &[f32],
    sin: &[f32],
) {
    assert!(half > 0 && rotated <= row_width && rotated.is_multiple_of(2 * half) && x.len().is_multiple_of(row_width));
    let rows = x.len() / row_width;
    assert!(cos.len() == rows * half && sin.len() == rows * half);
    let shared = SharedSlice::new(x);
    pool.run_ranges(rows, 4 * pool.threads(), 1, &|range| {
        for r in range {
            // SAFETY: ranges of rows do not overlap.
            let row = unsafe { shared.range(r * row_width..r * row_width + rotated) };
            rotate_row(level, row, 2 * half, &cos[r * half..(r + 1) * half], &sin[r * half..(r + 1) * half]);
        }
    });
}

#[inline(always)]
fn softmax_body(x: &mut [f32], scale: f32) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (whole, rest) = x.as_chunks::<LANES>();
    for chunk in whole {
        for i in 0..LANES {
            lanes[i] = if chunk[i] > lanes[i] { chunk[i] } else { lanes[i] };
        }
    }
    for (lane, &v) in lanes.iter_mut().zip(rest) {
        *lane = if v > *lane { v } else { *lane };
    }
    let max = lanes.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    for v in x.iter_mut() {
        *v = exp((*v - max) * scale);
    }
    sum_by(x, |v| v)
}

for_levels! {
    /// Replaces scores by `e^(scale * (score - max))` and returns their sum: softmax but for the division.
    pub(super) fn softmax_weights(level; x: &mut [f32], scale: f32) -> f32 = softmax_body
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two roundings of the result and the polynomial's own error.
    const EXP_ERROR: f64 = 2e-7;

    #[test]
    fn exp_is_right_to_rounding() {
        for i in -86_999..=86_999 {
            let x = i as f32 * 1e-3;
            let (found, expected) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((found / expected - 1.0).abs() < EXP_ERROR, "exp({x}) = {found}, expected {expected}");
        }
    }

    #[test]
    fn gelu_forms_are_right_to_rounding() {
        // (x, tanh form, erf form) in double precision.
        let cases: [(f32, f64, f64); 7] = [
            (-6.0, -8.43964897967453e-11, -5.919525869479969e-09),
            (-2.5, -0.015084266089998577, -0.015524163314440398),
            (-0.3, -0.1146290796485276, -0.11462657653421583),
            (0.001, 0.0005003989660002051, 0.0005003989660005341),
            (0.7, 0.5305701230660317, 0.5306254318017016),
            (3.0, 2.996362607918227, 2.99595030590511),
            (8.0, 8.0, 7.999999999999995),
        ];
        for (x, tanh, erf) in cases {
            let bound = 3e-7 * f64::from(x.abs()).max(0.1);
            assert!((f64::from(gelu_tanh_of(x)) - tanh).abs() < bound, "tanh form at {x}: {}", gelu_tanh_of(x));
            assert!((f64::from(gelu_erf_of(x)) - erf).abs() < bound, "erf form at {x}: {}", gelu_erf_of(x));
        }
    }

    #[test]
    fn levels_agree_bit_for_bit() {
        let x: Vec<f32> = (0..1003).map(|i| ((i * 7919) % 2003) as f32 / 97.0 - 10.0).collect();
        let weight: Vec<f32> = x.iter().map(|v| v * 0.1 + 1.0).collect();
        let run = |level| {
            let (mut a, mut b, mut c, mut d) = (x.clone(), x.clone(), x.clone(), vec![0.0; x.len()]);
            gelu_tanh(level, &mut a);
            gelu_erf(level, &mut b);
            let sum = softmax_weights(level, &mut c, 0.3);
            layer_norm_row(level, &x, &weight, &x, 1e-6, &mut d);
            let all: Vec<u32> = a.iter().chain(&b).chain(&c).chain(&d).chain([&sum]).map(|v| v.to_bits()).collect();
            all
        };
        for level in Simd::available() {
            assert!(run(level) == run(Simd::Scalar), "{level:?} differs from the scalar code");
        }
    }
}
