//! The engine of strata: model files, conversion, text, the model itself, vision, scheduling and comparison.
//!
//! Dependencies between the modules point one way:
//! `gguf`, `checkpoint` <- `convert`; `gguf` <- `text`, `model`, `vision` <- `engine` <- `compare`.

pub mod checkpoint;
pub mod compare;
pub mod convert;
pub mod engine;
pub mod gguf;
pub mod model;
pub mod output;
pub mod placement;
pub mod text;
pub mod vision;
