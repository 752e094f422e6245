//! What can go wrong in a conversion.

use crate::checkpoint::CheckpointError;
use crate::gguf::GgufError;
use std::path::PathBuf;
use strata_kernels::format::FormatError;

/// Why a conversion, graft or verification could not be done.
#[derive(Debug, thiserror::Error)]
pub enum ConvertError {
    /// The checkpoint could not be read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A GGUF could not be read or written.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A file of the folder could not be read.
    #[error("{}: cannot {action}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// A JSON file of the folder is not what it should be.
    #[error("{file}: not valid JSON: {reason}")]
    Json {
        /// The file.
        file: String,
        /// What the parser says.
        reason: String,
    },
    /// The folder has no config.
    #[error("{folder}: no config.json; the geometry of the model is needed to convert it")]
    NoConfig {
        /// The folder.
        folder: String,
    },
    /// A key of a JSON file is missing or wrong.
    #[error("{file}: '{key}': expected {expected}, found {found}")]
    Config {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// Another architecture.
    #[error("{file}: the architecture is {found}; strata converts Qwen3_5MoeForConditionalGeneration{}",
        if *.dense { " (this is the dense sibling: llama.cpp's convert_hf_to_gguf.py takes it)" } else { "" })]
    Architecture {
        /// The config.
        file: String,
        /// What it names.
        found: String,
        /// Whether it is the dense sibling.
        dense: bool,
    },
    /// Tensors the model needs are not in the checkpoint.
    #[error("{source_name}: {} of the tensors the config promises {} missing: {}", .names.len(),
        if .names.len() == 1 { "is" } else { "are" }, list(.names))]
    MissingTensors {
        /// The checkpoint.
        source_name: String,
        /// Their names.
        names: Vec<String>,
    },
    /// The checkpoint has tensors nobody knows what to do with.
    #[error("{source_name}: no rule for {} of the tensors: {}", .names.len(), list(.names))]
    UnknownTensors {
        /// The checkpoint.
        source_name: String,
        /// Their names.
        names: Vec<String>,
    },
    /// A tensor has another shape than the config gives it.
    #[error("{source_name}: tensor '{tensor}': expected the shape {expected:?}, found {found:?}")]
    Shape {
        /// The checkpoint.
        source_name: String,
        /// The tensor.
        tensor: String,
        /// By the config.
        expected: Vec<u64>,
        /// In the checkpoint.
        found: Vec<u64>,
    },
    /// A tensor is stored in a type that is not a plain float.
    #[error("{source_name}: tensor '{tensor}': expected F32, F16 or BF16, found {found}")]
    Dtype {
        /// The checkpoint.
        source_name: String,
        /// The tensor.
        tensor: String,
        /// Its type.
        found: String,
    },
    /// The config promises an MTP head that is not there.
    #[error(
        "{source_name}: the config promises {} (mtp_num_hidden_layers), the checkpoint has no 'mtp.*' tensor",
        mtp_layers(*.promised)
    )]
    PromisedHeadMissing {
        /// The checkpoint.
        source_name: String,
        /// Layers promised.
        promised: u64,
    },
    /// The MTP head has another number of layers than promised.
    #[error(
        "{source_name}: the config promises {} (mtp_num_hidden_layers), the checkpoint has {found}",
        mtp_layers(*.promised)
    )]
    MtpLayers {
        /// The checkpoint.
        source_name: String,
        /// Layers promised.
        promised: u64,
        /// Layers found.
        found: u64,
    },
    /// The norms were converted before.
    #[error(
        "{source_name}: the {part} norms seem to carry the +1 already, which this conversion would add again: {evidence}"
    )]
    NormsNotZeroCentred {
        /// The checkpoint.
        source_name: String,
        /// Which norms.
        part: &'static str,
        /// What gave it away.
        evidence: String,
    },
    /// The tokenizer is not one strata can carry over.
    #[error("{file}: {reason}")]
    Tokenizer {
        /// The file.
        file: String,
        /// What is wrong.
        reason: String,
    },
    /// The folder has no vision encoder.
    #[error("{source_name}: no vision encoder to write: {reason}")]
    NoVision {
        /// The checkpoint.
        source_name: String,
        /// What is missing.
        reason: String,
    },
    /// A weight does not fit the type chosen for its tensor.
    #[error("tensor '{tensor}' to {ty}: {source}")]
    Format {
        /// The tensor.
        tensor: String,
        /// The type.
        ty: &'static str,
        /// What does not fit.
        source: FormatError,
    },
    /// A type or recipe name nobody knows, or a pattern that cannot be read.
    #[error("{0}")]
    BadType(String),
    /// An importance matrix that does not fit the model.
    #[error("{file}: {reason}")]
    Imatrix {
        /// The file.
        file: String,
        /// What does not fit.
        reason: String,
    },
    /// Two files that cannot be put together.
    #[error("{base} and {donor} do not fit together: {reason}")]
    Graft {
        /// The file to change.
        base: String,
        /// Where the head comes from.
        donor: String,
        /// What does not fit.
        reason: String,
    },
    /// The file does not allow what was asked.
    #[error("{file}: {reason}")]
    Refused {
        /// The file.
        file: String,
        /// Why.
        reason: String,
    },
    /// The caller asked to stop.
    #[error("interrupted; {}", left(.written))]
    Interrupted {
        /// Files that were complete by then.
        written: Vec<PathBuf>,
    },
}

impl ConvertError {
    /// Of an interrupt: that `files` had been written before.
    pub fn after_writing(self, files: &[PathBuf]) -> ConvertError {
        match self {
            ConvertError::Interrupted { written } => {
                ConvertError::Interrupted { written: files.iter().cloned().chain(written).collect() }
            }
            other => other,
        }
    }

    /// Whether the input is at fault (as against the machine).
    pub fn is_bad_input(&self) -> bool {
        match self {
            ConvertError::Io { source, .. } => source.kind() == std::io::ErrorKind::NotFound,
            ConvertError::Interrupted { .. } => false,
            _ => true,
        }
    }
}

/// What an interrupted command leaves.
fn left(written: &[PathBuf]) -> String {
    if written.is_empty() {
        return "nothing was written".to_string();
    }
    let names: Vec<_> = written.iter().map(|path| path.display().to_string()).collect();
    format!("written before that: {}", names.join(", "))
}

/// `1 MTP layer`, `2 MTP layers`.
fn mtp_layers(n: u64) -> String {
    format!("{n} MTP layer{}", if n == 1 { "" } else { "s" })
}

/// The first few names of a long list.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 6;
    let mut text = names.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text += &format!(" and {} more", names.len() - SHOWN);
    }
    text
}
