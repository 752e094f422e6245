//! Dense float operations over many rows, as encoders need them: matrix products with f32 activations, non-causal
//! attention, LayerNorm, GELU, rotation by tables.
//!
//! Unlike [`crate::cpu::matmul`], which reads quantized weights for a few rows, these operations unpack a tile of
//! weights once and use it for hundreds of rows, so they are bound by the multiply-add units and not by memory.
//!
//! Numerics: an output element of a product is one chain of fused multiply-adds over the inner dimension, from first to
//! last; sums over a row go through sixteen lanes added up in a fixed tree. Both are the same on every SIMD level, for
//! any number of threads and any tiling, so results are equal bit for bit.

mod attention;
mod gemm;
mod pointwise;
mod scratch;
mod tile;

#[cfg(test)]
mod tests;

pub use attention::{AttentionShape, attention};
pub use gemm::{Activation, Linear, linear};
pub use pointwise::{add_rows, layer_norm, rotate_pairs};
