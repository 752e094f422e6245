//! The CPU device: scalar reference of every op, with AVX2 and AVX-512 versions picked at run time.

pub mod bandwidth;
pub mod matmul;
mod pool;
mod simd;

pub use matmul::{Activations, ExpertGroup, matmul, matmul_experts};
pub use pool::{Pool, SharedSlice};
pub use simd::Simd;
