//! Normalisation and elementwise f32 kernels.

use super::Simd;
use super::lanes::{Kernel, Lanes, dispatch, vectors, vectors_mut};

/// Sum of squares in sixteen lanes, then over the lanes.
#[inline(always)]
pub(crate) fn sum_of_squares<L: Lanes>(lanes: L, x: &[f32]) -> f32 {
    let (whole, rest) = vectors(x);
    let mut sum = lanes.splat(0.0);
    for chunk in whole {
        let chunk = lanes.load(chunk);
        sum = lanes.fma(chunk, chunk, sum);
    }
    if !rest.is_empty() {
        let chunk = lanes.load_part(rest);
        sum = lanes.fma(chunk, chunk, sum);
    }
    lanes.sum(sum)
}

/// `out = x * scale * weight`
#[inline(always)]
pub(crate) fn scale_by<L: Lanes>(lanes: L, x: &[f32], scale: f32, weight: &[f32], out: &mut [f32]) {
    let scale = lanes.splat(scale);
    let ((x, x_rest), (w, w_rest)) = (vectors(x), vectors(weight));
    let (out, out_rest) = vectors_mut(out);
    for ((x, w), out) in x.iter().zip(w).zip(out) {
        lanes.store(lanes.mul(lanes.mul(lanes.load(x), scale), lanes.load(w)), out);
    }
    if !x_rest.is_empty() {
        let value = lanes.mul(lanes.mul(lanes.load_part(x_rest), scale), lanes.load_part(w_rest));
        lanes.store_part(value, out_rest);
    }
}

/// `1 / sqrt(mean(x^2) + eps)`
#[inline(always)]
pub(crate) fn rms_scale<L: Lanes>(lanes: L, x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(lanes, x) / x.len() as f32 + eps).sqrt()
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let width = self.weight.len();
        for (x, out) in self.x.chunks_exact(width).zip(self.out.chunks_exact_mut(width)) {
            scale_by(lanes, x, rms_scale(lanes, x, self.eps), self.weight, out);
        }
    }
}

/// RMSNorm of every row of `weight.len()` values.
pub(crate) fn rms_norm(simd: Simd, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    dispatch(simd, RmsNorm { x, weight, eps, out });
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let ((x, x_rest), (y, y_rest)) = (vectors_mut(self.x), vectors(self.y));
        for (x, y) in x.iter_mut().zip(y) {
            lanes.store(lanes.add(lanes.load(x), lanes.load(y)), x);
        }
        for (x, y) in x_rest.iter_mut().zip(y_rest) {
            *x += y;
        }
    }
}

/// `x += y`
pub(crate) fn add(simd: Simd, x: &mut [f32], y: &[f32]) {
    dispatch(simd, Add { x, y });
}

struct SiluMul<'a> {
    gate: &'a [f32],
    up: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let ((gate, gate_rest), (up, up_rest)) = (vectors(self.gate), vectors(self.up));
        let (out, out_rest) = vectors_mut(self.out);
        for ((gate, up), out) in gate.iter().zip(up).zip(out) {
            lanes.store(lanes.mul(lanes.silu(lanes.load(gate)), lanes.load(up)), out);
        }
        if !gate_rest.is_empty() {
            let value = lanes.mul(lanes.silu(lanes.load_part(gate_rest)), lanes.load_part(up_rest));
            lanes.store_part(value, out_rest);
        }
    }
}

/// `out = silu(gate) * up`
pub(crate) fn silu_mul(simd: Simd, gate: &[f32], up: &[f32], out: &mut [f32]) {
    dispatch(simd, SiluMul { gate, up, out });
}
