//! What can be wrong with a GGUF file.

use crate::output::OutputError;
use std::path::PathBuf;

/// An error of reading or writing a GGUF file. The message names the file and the field, what was expected and what was
/// found.
#[derive(Debug, thiserror::Error)]
pub enum GgufError {
    /// The operating system refused to open, map, write or rename a file.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What was tried, as a verb phrase ("open the file").
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// The bytes of the file do not form a valid GGUF.
    #[error("{file}: {field} at byte {offset}: expected {expected}, found {found}")]
    Malformed {
        /// The file.
        file: String,
        /// The field, e.g. `metadata key 3 of 40` or `tensor 'blk.0.attn_q.weight': offset`.
        field: String,
        /// Where the field starts in the file.
        offset: u64,
        /// What a valid file has there.
        expected: String,
        /// What the file has.
        found: String,
    },
    /// A metadata key is absent.
    #[error("{file}: metadata key '{key}' is missing (expected {expected})")]
    MissingKey {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The type that was asked for.
        expected: &'static str,
    },
    /// A metadata key has another type, or a value out of range for the type that was asked for.
    #[error("{file}: metadata key '{key}': expected {expected}, found {found}")]
    WrongType {
        /// The file.
        file: String,
        /// The key.
        key: String,
        /// The type that was asked for.
        expected: &'static str,
        /// The type and, where short, the value the file has.
        found: String,
    },
    /// Files that belong together do not fit together.
    #[error("{file}: {field}: expected {expected}, found {found}")]
    Split {
        /// The part that does not fit.
        file: String,
        /// The field that disagrees.
        field: String,
        /// What the other parts say.
        expected: String,
        /// What this part says.
        found: String,
    },
    /// An output cannot be written where it was to go.
    #[error(transparent)]
    Output(#[from] OutputError),
    /// The disk is too full for the output.
    #[error("{}: not enough disk space: expected {needed} bytes free, found {free}", path.display())]
    NoSpace {
        /// The file.
        path: PathBuf,
        /// Bytes that would be written.
        needed: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// A file that cannot be written as asked.
    #[error("{}: cannot write this model: {what}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}
