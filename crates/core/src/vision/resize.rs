//! The size a picture is brought to, and the resampling.
//!
//! Both follow the reference: the size rule is that of transformers' Qwen2-VL image processor (Python's `round`, so
//! half goes to even), the resampling is Pillow's antialiased bicubic filter, byte for byte.

use super::VisionError;
use std::borrow::Cow;

/// Largest ratio of the sides.
pub const MAX_ASPECT: f64 = 200.0;

/// The size `width x height` is brought to: both sides multiples of `factor`, the area within
/// `min_pixels..=max_pixels` as far as that allows, the aspect ratio kept as well as possible.
///
/// As in the reference, a picture so thin that a side cannot shrink further may stay above `max_pixels`.
///
/// # Errors
/// When one side is more than [`MAX_ASPECT`] times the other.
pub fn target_size(
    width: u32,
    height: u32,
    factor: usize,
    min_pixels: u64,
    max_pixels: u64,
) -> Result<(u32, u32), VisionError> {
    let (w, h, f) = (f64::from(width), f64::from(height), factor as f64);
    let ratio = w.max(h) / w.min(h);
    if ratio.is_nan() || ratio > MAX_ASPECT {
        return Err(VisionError::Aspect { width, height, ratio });
    }
    let mut to_h = (h / f).round_ties_even() * f;
    let mut to_w = (w / f).round_ties_even() * f;
    if to_h * to_w > max_pixels as f64 {
        let beta = (h * w / max_pixels as f64).sqrt();
        to_h = f.max((h / beta / f).floor() * f);
        to_w = f.max((w / beta / f).floor() * f);
    } else if to_h * to_w < min_pixels as f64 {
        let beta = (min_pixels as f64 / (h * w)).sqrt();
        to_h = (h * beta / f).ceil() * f;
        to_w = (w * beta / f).ceil() * f;
    }
    Ok((to_w as u32, to_h as u32))
}

/// Bits after the point of the filter's weights: 8-bit pixels and a few bits for overshoot fit beside them in an i32.
const PRECISION: u32 = 22;

/// The Keys cubic with a = -0.5.
fn cubic(x: f64) -> f64 {
    const A: f64 = -0.5;
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}

/// For one output coordinate: the first source coordinate and the weights from there on.
struct Taps {
    first: usize,
    weights: Vec<i32>,
}

/// The filter of a line of `from` pixels brought to `to`. When shrinking, the filter widens with the scale
/// (antialiasing).
fn taps(from: usize, to: usize) -> Vec<Taps> {
    let scale = from as f64 / to as f64;
    let widen = scale.max(1.0);
    let support = 2.0 * widen;
    (0..to)
        .map(|at| {
            let center = (at as f64 + 0.5) * scale;
            let first = (center - support + 0.5).max(0.0) as usize;
            let last = ((center + support + 0.5) as usize).min(from);
            let raw: Vec<f64> = (first..last).map(|i| cubic((i as f64 - center + 0.5) * (1.0 / widen))).collect();
            let total: f64 = raw.iter().sum();
            let fixed = |w: &f64| {
                let w = if total == 0.0 { *w } else { w / total } * f64::from(1u32 << PRECISION);
                // Rounds half away from zero: the cast cuts towards zero.
                (if w < 0.0 { w - 0.5 } else { w + 0.5 }) as i32
            };
            Taps { first, weights: raw.iter().map(fixed).collect() }
        })
        .collect()
}

/// A sum of weighted bytes back to a byte.
fn to_byte(sum: i32) -> u8 {
    (sum >> PRECISION).clamp(0, 255) as u8
}

const HALF: i32 = 1 << (PRECISION - 1);

/// Resamples RGB bytes `[height, width, 3]` to `to_width x to_height`: one direction first, then the other, bytes in
/// between. Rows go first, unless the height loses more than twice the pixels the width does: the order of Pillow 13,
/// which shows in the result, since what overshoots is cut off in between.
pub fn bicubic(rgb: &[u8], width: u32, height: u32, to_width: u32, to_height: u32) -> Vec<u8> {
    let lost = (i64::from(width) - i64::from(to_width), i64::from(height) - i64::from(to_height));
    let columns_first = lost.1 > 0 && lost.1 > 2 * lost.0;
    let (width, height) = (width as usize, height as usize);
    let (to_width, to_height) = (to_width as usize, to_height as usize);
    assert_eq!(rgb.len(), width * height * 3, "RGB bytes of a {width}x{height} picture");
    if columns_first {
        rows(&columns(rgb, width, height, to_height), width, to_height, to_width).into_owned()
    } else {
        columns(&rows(rgb, width, height, to_width), to_width, height, to_height).into_owned()
    }
}

/// Brings every row to `to_width` pixels.
fn rows(rgb: &[u8], width: usize, height: usize, to_width: usize) -> Cow<'_, [u8]> {
    if to_width == width {
        return rgb.into();
    }
    let taps = taps(width, to_width);
    let mut out = vec![0; height * to_width * 3];
    for (row, out) in rgb.chunks_exact(width * 3).zip(out.chunks_exact_mut(to_width * 3)) {
        for (tap, out) in taps.iter().zip(out.as_chunks_mut::<3>().0) {
            let mut sums = [HALF; 3];
            for (pixel, &w) in row[tap.first * 3..].as_chunks::<3>().0.iter().zip(&tap.weights) {
                for c in 0..3 {
                    sums[c] = sums[c].wrapping_add(i32::from(pixel[c]).wrapping_mul(w));
                }
            }
            *out = sums.map(to_byte);
        }
    }
    out.into()
}

/// Brings every column to `to_height` pixels.
fn columns(rgb: &[u8], width: usize, height: usize, to_height: usize) -> Cow<'_, [u8]> {
    if to_height == height {
        return rgb.into();
    }
    let stride = width * 3;
    let mut out = vec![0; to_height * stride];
    let mut sums = vec![0i32; stride];
    for (tap, out) in taps(height, to_height).iter().zip(out.chunks_exact_mut(stride)) {
        sums.fill(HALF);
        for (row, &w) in rgb[tap.first * stride..].chunks_exact(stride).zip(&tap.weights) {
            for (sum, &byte) in sums.iter_mut().zip(row) {
                *sum = sum.wrapping_add(i32::from(byte).wrapping_mul(w));
            }
        }
        for (out, &sum) in out.iter_mut().zip(&sums) {
            *out = to_byte(sum);
        }
    }
    out.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_goes_to_even() {
        // 48 / 32 = 1.5 goes to 2, 80 / 32 = 2.5 goes to 2, 112 / 32 = 3.5 goes to 4.
        assert_eq!(target_size(48, 80, 32, 1, u64::MAX).unwrap(), (64, 64));
        assert_eq!(target_size(112, 80, 32, 1, u64::MAX).unwrap(), (128, 64));
    }

    #[test]
    fn ratio_of_exactly_200_passes_and_more_is_refused() {
        assert!(target_size(2000, 10, 32, 4096, 1 << 20).is_ok());
        assert!(matches!(target_size(2001, 10, 32, 4096, 1 << 20), Err(VisionError::Aspect { .. })));
        assert!(matches!(target_size(1, 5000, 32, 4096, 1 << 20), Err(VisionError::Aspect { .. })));
    }

    #[test]
    fn a_flat_picture_stays_flat_at_any_size() {
        let rgb = [10, 200, 255].repeat(37 * 23);
        for (w, h) in [(1, 1), (64, 64), (5, 300), (300, 5)] {
            let out = bicubic(&rgb, 37, 23, w, h);
            assert_eq!(out, [10, 200, 255].repeat((w * h) as usize), "{w}x{h}");
        }
    }
}
