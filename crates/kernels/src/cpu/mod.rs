//! The CPU device: scalar reference of every op, with AVX2 and AVX-512 versions picked at run time.

mod attention;
pub mod bandwidth;
mod delta_net;
pub mod dense;
mod device;
mod kv_cache;
mod lanes;
pub mod matmul;
mod moe;
mod norm;
#[cfg(test)]
mod op_tests;
mod pool;
mod simd;

pub use delta_net::CpuDeltaState;
pub use device::{CpuDevice, CpuScratch};
pub use kv_cache::CpuKvCache;
pub use matmul::{Activations, ExpertGroup, Product, Rows, matmul, multiply};
pub use pool::{Pool, SharedSlice};
pub use simd::Simd;
