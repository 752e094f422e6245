//! Conversion of checkpoints to GGUF, restoring the MTP head, and the proof that nothing was lost.
//!
//! - [`names`] says what every tensor is called on both sides, `transform` what happens to its values, `plan` which
//!   tensors of a checkpoint become which of a GGUF, with every tensor accounted for;
//! - `recipe` and `imatrix` say in which type and with which weights they are stored;
//! - `metadata` and `tokenizer` write the keys, `output` the file;
//! - `folder` puts these together; `graft` moves MTP heads between files; `verify` compares a file with its source
//!   element by element.

mod config;
mod error;
mod folder;
mod graft;
mod imatrix;
mod metadata;
pub mod names;
mod output;
mod plan;
mod recipe;
mod tokenizer;
mod transform;
mod verify;

pub use config::{HfConfig, Mixer, VisionConfig};
pub use error::ConvertError;
pub use folder::{ConvertOptions, ConvertReport, TensorReport, convert_text_model, convert_vision};
pub use graft::{GraftOptions, GraftReport, drop_head, graft_head};
pub use metadata::ARCHITECTURE;
pub use output::Progress;
pub use plan::{AS_ASKED, LeftOut, PlanOptions};
pub use recipe::{Choice, Override, Pattern, Recipe, TypeChooser};
pub use verify::{TensorVerdict, Verdict, Verification, missing_head, verify};

#[cfg(test)]
mod tests;
