//! What can be wrong with a checkpoint.

use std::path::{Path, PathBuf};

/// An error of reading a checkpoint. The message names the file and the field, what was expected and what was found.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused to open, read or map a file.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The content of a file is not valid.
    #[error("{}: {field}: expected {expected}, found {found}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The field, e.g. `tensor 'lm_head.weight': data_offsets`.
        field: String,
        /// What a valid file has there.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// A folder without safetensors.
    #[error("{}: no safetensors in this folder (expected {} or *.safetensors)", path.display(), super::INDEX_NAME)]
    NoShards {
        /// The folder.
        path: PathBuf,
    },
}

impl CheckpointError {
    pub(super) fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        CheckpointError::Io { path: path.to_path_buf(), action, source }
    }

    pub(super) fn malformed(path: &Path, field: String, expected: String, found: String) -> Self {
        CheckpointError::Malformed { path: path.to_path_buf(), field, expected, found }
    }
}
