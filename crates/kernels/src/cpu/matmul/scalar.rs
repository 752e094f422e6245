//! The scalar reference of every format: these few lines define the bits that all other kernels must produce.
//!
//! Quantized formats: the integer dot product of a block (`Q8_0`) or superblock (K formats) is exact in i32, whatever the
//! order; it enters one f32 accumulator per output element by one fused multiply-add per block, blocks in order.
//!
//! Float formats: sixteen f32 accumulators, accumulator `i` taking columns `i`, `i + 16`, ... by fused multiply-add
//! (the last columns padded with zeros to a multiple of 16), added up by halves: 8 to 8, 4 to 4, 2 to 2, 1 to 1.

use super::activations::{QuantizedRow, SuperblockSums};
use crate::format::blocks::{BlockQ4K, BlockQ5K, BlockQ6K, BlockQ8_0, unpack_scales};
use half::{bf16, f16};

/// A block format that is multiplied with 8-bit activations.
pub(super) trait QuantizedDot: bytemuck::Pod {
    /// The dot product of a row of blocks with a row of activations.
    fn dot(weights: &[Self], x: QuantizedRow<'_>) -> f32;
}

impl QuantizedDot for BlockQ8_0 {
    fn dot(weights: &[Self], x: QuantizedRow<'_>) -> f32 {
        let mut sum = 0.0f32;
        for ((block, q), d) in weights.iter().zip(x.q.as_chunks::<32>().0).zip(x.d) {
            let dot: i32 = block.qs.iter().zip(q).map(|(&w, &x)| i32::from(w) * i32::from(x)).sum();
            sum = (block.d.to_f32() * d).mul_add(dot as f32, sum);
        }
        sum
    }
}

/// Scales times dots, and minima times sums, of a superblock with eight sub-blocks of 32 weights `weight(s, i)`.
#[inline(always)]
fn superblock_of_32(
    scales: &[u8; 12],
    weight: impl Fn(usize, usize) -> u8,
    q: &[i8; 256],
    sums: &SuperblockSums,
) -> (i32, i32) {
    let (scales, mins) = unpack_scales(scales);
    let (mut scaled, mut offset) = (0, 0);
    for s in 0..8 {
        let dot: i32 = (0..32).map(|i| i32::from(weight(s, i)) * i32::from(q[32 * s + i])).sum();
        scaled += i32::from(scales[s]) * dot;
        offset += i32::from(mins[s]) * i32::from(sums.of_32[s]);
    }
    (scaled, offset)
}

impl QuantizedDot for BlockQ4K {
    fn dot(weights: &[Self], x: QuantizedRow<'_>) -> f32 {
        let mut sum = 0.0f32;
        let sums: &[SuperblockSums] = bytemuck::cast_slice(x.sums);
        for (((block, q), d), sums) in weights.iter().zip(x.q.as_chunks::<256>().0).zip(x.d).zip(sums) {
            let weight = |s: usize, i: usize| (block.qs[32 * (s / 2) + i] >> (4 * (s % 2))) & 15;
            let (scaled, offset) = superblock_of_32(&block.scales, weight, q, sums);
            sum = (block.d.to_f32() * d).mul_add(scaled as f32, sum);
            sum = (-(block.dmin.to_f32() * d)).mul_add(offset as f32, sum);
        }
        sum
    }
}

impl QuantizedDot for BlockQ5K {
    fn dot(weights: &[Self], x: QuantizedRow<'_>) -> f32 {
        let mut sum = 0.0f32;
        let sums: &[SuperblockSums] = bytemuck::cast_slice(x.sums);
        for (((block, q), d), sums) in weights.iter().zip(x.q.as_chunks::<256>().0).zip(x.d).zip(sums) {
            let weight = |s: usize, i: usize| {
                ((block.qs[32 * (s / 2) + i] >> (4 * (s % 2))) & 15) | (((block.qh[i] >> s) & 1) << 4)
            };
            let (scaled, offset) = superblock_of_32(&block.scales, weight, q, sums);
            sum = (block.d.to_f32() * d).mul_add(scaled as f32, sum);
            sum = (-(block.dmin.to_f32() * d)).mul_add(offset as f32, sum);
        }
        sum
    }
}

impl QuantizedDot for BlockQ6K {
    fn dot(weights: &[Self], x: QuantizedRow<'_>) -> f32 {
        let mut sum = 0.0f32;
        for ((block, q), d) in weights.iter().zip(x.q.as_chunks::<256>().0).zip(x.d) {
            let mut scaled = 0;
            for (s, q) in q.as_chunks::<16>().0.iter().enumerate() {
                let (half, j) = (s / 8, s % 8 / 2);
                let dot: i32 = (0..16)
                    .map(|i| {
                        let at = 16 * (s % 2) + i;
                        let low = (block.ql[64 * half + 32 * (j % 2) + at] >> (4 * (j / 2))) & 15;
                        let high = (block.qh[32 * half + at] >> (2 * j)) & 3;
                        (i32::from(low | (high << 4)) - 32) * i32::from(q[i])
                    })
                    .sum();
                scaled += i32::from(block.scales[s]) * dot;
            }
            sum = (block.d.to_f32() * d).mul_add(scaled as f32, sum);
        }
        sum
    }
}

/// A plain number format: weights are widened to f32 and multiplied with the f32 activations.
pub(super) trait FloatDot: bytemuck::Pod {
    /// The weight, exactly.
    fn widen(self) -> f32;

    /// The dot product of a row of weights with a row of activations.
    fn dot(weights: &[Self], x: &[f32]) -> f32 {
        let mut lanes = [0.0f32; 16];
        for (w, x) in weights.chunks(16).zip(x.chunks(16)) {
            for (i, lane) in lanes.iter_mut().enumerate() {
                let (w, x) = if i < w.len() { (w[i].widen(), x[i]) } else { (0.0, 0.0) };
                *lane = w.mul_add(x, *lane);
            }
        }
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        lanes[0]
    }
}

/// An f32 as it lies in a file.
#[repr(transparent)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct F32Weight([u8; 4]);
/// An f16 as it lies in a file.
#[repr(transparent)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct F16Weight([u8; 2]);
/// A bf16 as it lies in a file.
#[repr(transparent)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
pub(super) struct Bf16Weight([u8; 2]);

impl FloatDot for F32Weight {
    #[inline(always)]
    fn widen(self) -> f32 {
        f32::from_le_bytes(self.0)
    }
}

impl FloatDot for F16Weight {
    #[inline(always)]
    fn widen(self) -> f32 {
        f16::from_le_bytes(self.0).to_f32()
    }
}

impl FloatDot for Bf16Weight {
    #[inline(always)]
    fn widen(self) -> f32 {
        bf16::from_le_bytes(self.0).to_f32()
    }
}
