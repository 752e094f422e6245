//! What can be wrong with a model file or with a call.

use crate::gguf::GgufError;
use strata_kernels::DeviceError;

/// Why a model cannot be built from a file, or a call cannot be answered.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// The metadata could not be read: a key is missing or has the wrong type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// The file holds another architecture.
    #[error("{file}: architecture `{found}` cannot be run, only `qwen35moe`")]
    Architecture {
        /// The file's name.
        file: String,
        /// `general.architecture`.
        found: String,
    },
    /// A metadata value makes no sense, alone or together with another.
    #[error("{file}: metadata `{key}` is {found}, expected {expected}")]
    Geometry {
        /// The file's name.
        file: String,
        /// The metadata key.
        key: String,
        /// What would have been right.
        expected: String,
        /// What the file says.
        found: String,
    },
    /// A tensor the metadata asks for is not in the file.
    #[error("{file}: tensor `{tensor}` is missing ({needed_by})")]
    MissingTensor {
        /// The file's name.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Which part of the model needs it.
        needed_by: String,
    },
    /// A tensor has other dimensions than the metadata asks for.
    #[error("{file}: tensor `{tensor}` has dimensions {found:?}, expected {expected:?}")]
    TensorShape {
        /// The file's name.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Dimensions that follow from the metadata, fastest first.
        expected: Vec<u64>,
        /// Dimensions in the file, fastest first.
        found: Vec<u64>,
    },
    /// A tensor is stored in a format that strata cannot compute with here.
    #[error("{file}: tensor `{tensor}` is stored as {found}, expected {expected}")]
    TensorType {
        /// The file's name.
        file: String,
        /// The tensor's name.
        tensor: String,
        /// Formats that would do.
        expected: &'static str,
        /// The tensor's format.
        found: &'static str,
    },
    /// The device refused a weight.
    #[error("tensor `{tensor}`: {source}")]
    Weight {
        /// The tensor's name.
        tensor: String,
        /// Why.
        source: DeviceError,
    },
    /// A forward call that does not fit the model or the states.
    #[error("{0}")]
    Window(String),
    /// A saved state that belongs to another model or is damaged.
    #[error("saved state: {0}")]
    SavedState(String),
    /// Reading or writing a saved state.
    #[error("saved state: {0}")]
    Io(#[from] std::io::Error),
}
