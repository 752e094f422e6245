//! f32 rows to blocks.
//!
//! The plain types round to nearest; `Q8_0` takes its scale from the largest weight and rounds to the scale as stored;
//! the K formats search ([`super::quantize_asymmetric`], [`super::quantize_symmetric`]). The same input gives the same
//! bytes on every machine: the SIMD versions are the same code compiled for wider registers, without fused
//! multiply-add, and no sum runs across lanes.

use super::blocks::{BLOCK, BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0, SUPERBLOCK};
use super::quantize_asymmetric::Asymmetric;
use super::quantize_fit::{self, finite_half, larger, round, smaller};
use super::quantize_symmetric::Symmetric;
use super::{FormatError, TensorType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// Writes rows of `cols` weights as blocks of `ty`.
///
/// `importance` (one value >= 0 per column, any scale) weights the squared error the K formats make smallest; the other
/// types have nothing to choose and ignore it. Among the superblocks of one call the largest error is also pulled down
/// as far as it goes, so which rows share a call can change a few blocks: callers that promise reproducible files cut
/// tensors at fixed places.
///
/// # Errors
/// When `ty` is not [`TensorType::computable`], `cols` is not whole blocks, the buffers do not belong together, or a
/// weight is not finite (quantized types) or does not fit (`F16`).
pub fn quantize(
    ty: TensorType,
    src: &[f32],
    importance: Option<&[f32]>,
    cols: usize,
    dst: &mut [u8],
) -> Result<(), FormatError> {
    if !ty.computable() {
        return Err(FormatError::NotComputable(ty));
    }
    if cols == 0 || !src.len().is_multiple_of(cols) || ty.row_bytes(cols).is_none() {
        return Err(FormatError::NotWholeBlocks { ty, found: cols });
    }
    let expected = ty.row_bytes(src.len()).ok_or(FormatError::NotWholeBlocks { ty, found: src.len() })?;
    if expected != dst.len() {
        return Err(FormatError::Length { ty, weights: src.len(), expected, found: dst.len() });
    }
    if let Some(importance) = importance.filter(|w| w.len() != cols) {
        return Err(FormatError::Importance { expected: cols, found: importance.len() });
    }
    let limit = if ty == TensorType::F16 { 65520.0 } else { f32::INFINITY };
    if !matches!(ty, TensorType::F32 | TensorType::BF16) && !all_below(src, limit) {
        let index = src.iter().position(|x| x.abs() >= limit || x.is_nan()).unwrap_or(0);
        return Err(FormatError::NotRepresentable { ty, index, value: src[index].to_string() });
    }
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f")
            && std::is_x86_feature_detected!("avx512vl")
            && std::is_x86_feature_detected!("avx512bw")
            && std::is_x86_feature_detected!("avx512dq")
        {
            // SAFETY: the features the function is compiled for were just found on this CPU.
            unsafe { quantize_avx512(ty, src, importance, cols, dst) };
            return Ok(());
        }
        if std::is_x86_feature_detected!("avx2") {
            // SAFETY: the features the function is compiled for were just found on this CPU.
            unsafe { quantize_avx2(ty, src, importance, cols, dst) };
            return Ok(());
        }
    }
    quantize_any(ty, src, importance, cols, dst);
    Ok(())
}

/// [`quantize_any`] compiled for AVX-512.
///
/// # Safety
/// The CPU must have the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512vl,avx512bw,avx512dq")]
unsafe fn quantize_avx512(ty: TensorType, src: &[f32], importance: Option<&[f32]>, cols: usize, dst: &mut [u8]) {
    quantize_any(ty, src, importance, cols, dst);
}

/// [`quantize_any`] compiled for AVX2.
///
/// # Safety
/// The CPU must have the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn quantize_avx2(ty: TensorType, src: &[f32], importance: Option<&[f32]>, cols: usize, dst: &mut [u8]) {
    quantize_any(ty, src, importance, cols, dst);
}

/// The quantizers, for whatever instruction set the caller is compiled for. Lengths were checked by [`quantize`].
#[inline(always)]
fn quantize_any(ty: TensorType, src: &[f32], importance: Option<&[f32]>, cols: usize, dst: &mut [u8]) {
    match ty {
        TensorType::F32 => {
            for (out, x) in dst.as_chunks_mut::<4>().0.iter_mut().zip(src) {
                *out = x.to_le_bytes();
            }
        }
        TensorType::F16 => {
            // The slice conversion uses F16C where the CPU has it; `dst` may lie at an odd address.
            let mut halves = [f16::ZERO; 64];
            for (out, x) in dst.chunks_mut(128).zip(src.chunks(64)) {
                halves[..x.len()].convert_from_f32_slice(x);
                for (bytes, half) in out.as_chunks_mut::<2>().0.iter_mut().zip(&halves) {
                    *bytes = half.to_le_bytes();
                }
            }
        }
        TensorType::BF16 => {
            for (out, &x) in dst.as_chunks_mut::<2>().0.iter_mut().zip(src) {
                *out = bf16::from_f32(x).to_le_bytes();
            }
        }
        TensorType::Q8_0 => {
            let blocks: &mut [BlockQ8_0] = bytemuck::cast_slice_mut(dst);
            for (block, x) in blocks.iter_mut().zip(src.as_chunks::<BLOCK>().0) {
                *block = q8_0(x);
            }
        }
        TensorType::Q4_K => {
            let blocks: &mut [BlockQ4K] = bytemuck::cast_slice_mut(dst);
            quantize_fit::quantize::<Asymmetric<15>>(src, importance, cols, |index, fitted| {
                blocks[index] = BlockQ4K {
                    d: fitted.d,
                    dmin: fitted.dmin,
                    scales: pack_scales(&fitted.scales, &fitted.mins),
                    qs: pack_nibbles(&fitted.levels),
                };
            });
        }
        TensorType::Q5_K => {
            let blocks: &mut [BlockQ5K] = bytemuck::cast_slice_mut(dst);
            quantize_fit::quantize::<Asymmetric<31>>(src, importance, cols, |index, fitted| {
                let mut qh = [0; 32];
                for s in 0..8 {
                    for i in 0..32 {
                        qh[i] |= (fitted.levels[32 * s + i] >> 4) << s;
                    }
                }
                blocks[index] = BlockQ5K {
                    d: fitted.d,
                    dmin: fitted.dmin,
                    scales: pack_scales(&fitted.scales, &fitted.mins),
                    qh,
                    qs: pack_nibbles(&fitted.levels),
                };
            });
        }
        TensorType::Q6_K => {
            let blocks: &mut [BlockQ6K] = bytemuck::cast_slice_mut(dst);
            quantize_fit::quantize::<Symmetric>(src, importance, cols, |index, fitted| {
                let (ql, qh) = pack_six_bits(&fitted.levels);
                blocks[index] = BlockQ6K { ql, qh, scales: fitted.scales, d: fitted.d };
            });
        }
        // `quantize` refused every other type.
        _ => {}
    }
}

/// Whether every |x| is below `limit` (so none is NaN).
fn all_below(src: &[f32], limit: f32) -> bool {
    let mut lanes = [true; 16];
    let (chunks, rest) = src.as_chunks::<16>();
    for chunk in chunks {
        for (ok, x) in lanes.iter_mut().zip(chunk) {
            *ok &= x.abs() < limit;
        }
    }
    lanes.iter().all(|ok| *ok) && rest.iter().all(|x| x.abs() < limit)
}

/// One `Q8_0` block. Rounding to the stored half scale, not to the f32 one, keeps every error at most half a step of
/// what is decoded.
#[inline(always)]
fn q8_0(x: &[f32; BLOCK]) -> BlockQ8_0 {
    let mut largest = [0.0f32; 8];
    for chunk in x.as_chunks::<8>().0 {
        for (a, v) in largest.iter_mut().zip(chunk) {
            *a = larger(*a, v.abs());
        }
    }
    let d = finite_half(largest.iter().fold(0.0, |a: f32, &b| larger(a, b)) / 127.0);
    let inv = if d.to_f32() > 0.0 { 1.0 / d.to_f32() } else { 0.0 };
    let mut qs = [0i8; BLOCK];
    for (q, v) in qs.iter_mut().zip(x) {
        *q = smaller(larger(round(v * inv), -127.0), 127.0) as i8;
    }
    BlockQ8_0 { d, qs }
}

/// The inverse of [`super::blocks::unpack_scales`].
#[inline(always)]
fn pack_scales(scales: &[u8; 8], mins: &[u8; 8]) -> [u8; 12] {
    let mut out = [0; 12];
    for i in 0..4 {
        out[i] = scales[i] | (scales[i + 4] >> 4) << 6;
        out[i + 4] = mins[i] | (mins[i + 4] >> 4) << 6;
        out[i + 8] = (scales[i + 4] & 15) | (mins[i + 4] & 15) << 4;
    }
    out
}

/// Low nibbles of the levels: byte `32 * p + i` holds weight `i` of sub-blocks `2 * p` and `2 * p + 1`.
#[inline(always)]
fn pack_nibbles(levels: &[u8; SUPERBLOCK]) -> [u8; 128] {
    let mut qs = [0; 128];
    for p in 0..4 {
        for i in 0..32 {
            qs[32 * p + i] = (levels[64 * p + i] & 15) | (levels[64 * p + 32 + i] & 15) << 4;
        }
    }
    qs
}

/// The low four and high two bits of `Q6_K` levels.
#[inline(always)]
fn pack_six_bits(levels: &[u8; SUPERBLOCK]) -> ([u8; 128], [u8; 64]) {
    let (mut ql, mut qh) = ([0; 128], [0; 64]);
    for half in 0..2 {
        for i in 0..32 {
            let q = |j: usize| levels[128 * half + 32 * j + i];
            ql[64 * half + i] = (q(0) & 15) | (q(2) & 15) << 4;
            ql[64 * half + 32 + i] = (q(1) & 15) | (q(3) & 15) << 4;
            qh[32 * half + i] = (q(0) >> 4) | (q(1) >> 4) << 2 | (q(2) >> 4) << 4 | (q(3) >> 4) << 6;
        }
    }
    (ql, qh)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::dequantize;

    /// Roughly normal weights with a few large ones, from a fixed generator.
    fn weights(count: usize, seed: u64) -> Vec<f32> {
        let mut state = seed;
        let mut uniform = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 24) as f32
        };
        (0..count)
            .map(|i| {
                let normal = (0..12).map(|_| uniform()).sum::<f32>() - 6.0;
                if i % 97 == 0 { 0.08 * normal } else { 0.02 * normal }
            })
            .collect()
    }

    fn round_trip(ty: TensorType, x: &[f32], importance: Option<&[f32]>, cols: usize) -> Vec<f32> {
        let mut bytes = vec![0; ty.row_bytes(x.len()).unwrap()];
        quantize(ty, x, importance, cols, &mut bytes).unwrap();
        let mut back = vec![0.0; x.len()];
        dequantize(ty, &bytes, &mut back).unwrap();
        back
    }

    /// (root mean squared error, largest error)
    fn errors(x: &[f32], y: &[f32]) -> (f64, f64) {
        let e = |(a, b): (&f32, &f32)| f64::from(a - b);
        let squared = x.iter().zip(y).map(e).map(|e| e * e).sum::<f64>() / x.len() as f64;
        (squared.sqrt(), x.iter().zip(y).map(e).fold(0.0, |a, e| e.abs().max(a)))
    }

    /// What a quantizer that only takes the range of each sub-block would do, with exact (unrounded) scales: a bound
    /// the search must beat in RMSE in spite of its rounded scales.
    fn plain(x: &[f32], sub: usize, levels: f32, symmetric: bool) -> Vec<f32> {
        x.chunks(sub)
            .flat_map(|sub| {
                let high = sub.iter().fold(0.0f32, |a, &b| a.max(if symmetric { b.abs() } else { b }));
                let low = if symmetric { -high } else { sub.iter().fold(0.0f32, |a, &b| a.min(b)) };
                let step = (high - low) / levels;
                sub.iter().map(move |v| ((v - low) / step).round() * step + low).collect::<Vec<_>>()
            })
            .collect()
    }

    #[test]
    fn the_search_beats_a_plain_range_fit_in_rmse_and_stays_near_it_in_largest_error() {
        let x = weights(64 * 512, 1);
        for (ty, sub, levels, symmetric) in [
            (TensorType::Q4_K, 32, 15.0, false),
            (TensorType::Q5_K, 32, 31.0, false),
            (TensorType::Q6_K, 16, 63.0, true),
        ] {
            let (rmse, largest) = errors(&x, &round_trip(ty, &x, None, 512));
            let (plain_rmse, plain_largest) = errors(&x, &plain(&x, sub, levels, symmetric));
            assert!(rmse < plain_rmse, "{}: rmse {rmse} against {plain_rmse}", ty.name());
            assert!(largest <= 1.02 * plain_largest, "{}: largest {largest} against {plain_largest}", ty.name());
        }
    }

    #[test]
    fn q8_0_errors_are_at_most_half_a_step() {
        let x = weights(4096, 2);
        let back = round_trip(TensorType::Q8_0, &x, None, 256);
        for (a, b) in x.chunks(32).zip(back.chunks(32)) {
            let step = a.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
            // The stored half scale may be 2^-11 off, which moves the largest weight by at most 127 * 2^-11 of half a step.
            assert!(errors(a, b).1 <= f64::from(step) * 0.5 * (1.0 + 127.0 / 1024.0), "{a:?} {b:?}");
        }
    }

    #[test]
    fn every_instruction_set_writes_the_same_bytes() {
        let x = weights(16 * 1024, 3);
        let importance: Vec<f32> = weights(1024, 4).iter().map(|v| v.abs()).collect();
        for ty in
            [TensorType::F16, TensorType::BF16, TensorType::Q8_0, TensorType::Q4_K, TensorType::Q5_K, TensorType::Q6_K]
        {
            for importance in [None, Some(importance.as_slice())] {
                let mut picked = vec![0; ty.row_bytes(x.len()).unwrap()];
                let mut scalar = picked.clone();
                quantize(ty, &x, importance, 1024, &mut picked).unwrap();
                quantize_any(ty, &x, importance, 1024, &mut scalar);
                assert!(picked == scalar, "{}", ty.name());
            }
        }
    }

    #[test]
    fn importance_lowers_the_error_where_it_is_high() {
        let x = weights(64 * 256, 5);
        let importance: Vec<f32> = (0..256).map(|c| if c % 8 == 0 { 50.0 } else { 0.5 }).collect();
        let important = |y: &[f32]| {
            let squared = |(i, (a, b)): (usize, (&f32, &f32))| if i % 8 == 0 { f64::from(a - b).powi(2) } else { 0.0 };
            x.iter().zip(y).enumerate().map(squared).sum::<f64>()
        };
        for ty in [TensorType::Q4_K, TensorType::Q5_K, TensorType::Q6_K] {
            let with = important(&round_trip(ty, &x, Some(&importance), 256));
            let without = important(&round_trip(ty, &x, None, 256));
            assert!(with < 0.9 * without, "{}: {with} against {without}", ty.name());
        }
    }

    #[test]
    fn constant_zero_and_one_sided_rows_survive() {
        let rows: [fn(usize) -> f32; 5] =
            [|_| 0.0, |_| 0.75, |_| -0.75, |i| 1.0 + (i % 16) as f32 / 16.0, |i| -1.0 - (i % 16) as f32 / 16.0];
        for row in rows {
            let x: Vec<f32> = (0..256).map(row).collect();
            for (ty, steps) in [(TensorType::Q4_K, 15.0), (TensorType::Q5_K, 31.0), (TensorType::Q6_K, 63.0)] {
                let back = round_trip(ty, &x, None, 256);
                let reach = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                // A symmetric type spends half of its levels on the empty side.
                let step = f64::from(reach) / if ty == TensorType::Q6_K { 31.0 } else { steps };
                assert!(errors(&x, &back).1 <= 0.55 * step, "{} {:?} {:?}", ty.name(), &x[..4], &back[..4]);
            }
        }
    }

    #[test]
    fn extreme_sizes_stay_finite() {
        for size in [1e-30f32, 1e-8, 1e6] {
            let x: Vec<f32> = weights(512, 6).iter().map(|v| v * size / 0.02).collect();
            for ty in [TensorType::Q8_0, TensorType::Q4_K, TensorType::Q5_K, TensorType::Q6_K] {
                assert!(round_trip(ty, &x, None, 256).iter().all(|v| v.is_finite()), "{} {size}", ty.name());
            }
        }
    }

    #[test]
    fn what_a_type_cannot_store_is_named() {
        let mut x = weights(256, 7);
        x[37] = f32::NAN;
        let mut dst = vec![0; TensorType::Q4_K.row_bytes(256).unwrap()];
        let error = quantize(TensorType::Q4_K, &x, None, 256, &mut dst).unwrap_err();
        assert_eq!(error.to_string(), "weight 37 is NaN, which Q4_K cannot store");
        x[37] = 70_000.0;
        let error = quantize(TensorType::F16, &x, None, 256, &mut [0; 512]).unwrap_err();
        assert_eq!(error.to_string(), "weight 37 is 70000, which F16 cannot store");
        assert!(quantize(TensorType::Q4_K, &x, None, 128, &mut dst).is_err());
        assert!(quantize(TensorType::Q4_K, &x, Some(&[1.0; 32]), 256, &mut dst).is_err());
        assert!(quantize(TensorType::Q4_K, &x, None, 256, &mut dst[1..]).is_err());
    }

    #[test]
    fn halves_round_to_nearest_even() {
        // 1 + 2^-11 lies between two halves, 1 + 2^-8 between two bfloats.
        let x = [1.0 + 2f32.powi(-11), 1.0 + 3.0 * 2f32.powi(-11), 1.0 + 2f32.powi(-8), 1.0 + 3.0 * 2f32.powi(-8)];
        assert_eq!(round_trip(TensorType::F16, &x[..2], None, 2), [1.0, 1.0 + 2f32.powi(-9)]);
        assert_eq!(round_trip(TensorType::BF16, &x[2..], None, 2), [1.0, 1.0 + 2f32.powi(-6)]);
    }
}
