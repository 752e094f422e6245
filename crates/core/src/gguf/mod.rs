//! GGUF model files: a memory-mapped reader, a streaming writer and typed metadata.
//!
//! The crate `gguf-rs` does not serve here: version 0.1.8 has wrong sizes for BF16, IQ4_NL, MXFP4 and I32, panics on
//! NVFP4, copies the file in its mmap mode (6 GB: 22 s and 12 GB of memory), loses the integer types of metadata values
//! and knows no split files. So reader and writer are our own; a test checks the reader against `gguf-rs` on what it can
//! read.
//!
//! Every length and count read from a file is checked against the bytes that are left before anything is allocated, so
//! no file can make the reader panic or ask for more memory than a small multiple of its own header.

mod cursor;
mod encode;
mod error;
mod file;
mod header;
mod metadata;
mod split;
mod value;
mod writer;

pub use error::GgufError;
pub use file::{GgufFile, TensorInfo};
pub use metadata::Metadata;
pub use split::{split_name, split_parts};
pub use value::{Array, Value, ValueType};
pub use writer::{GgufWriter, TensorDecl, WriterOptions};

#[cfg(test)]
mod tests;
