//! The CPU device: scalar reference of every op, with AVX2 and AVX-512 versions picked at run time.

mod pool;

pub use pool::{Pool, SharedSlice};
