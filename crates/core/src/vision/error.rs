//! What can be wrong with a picture or with a vision encoder's file.

use std::path::PathBuf;

/// An error about a picture or an encoder file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum VisionError {
    /// The bytes are empty.
    #[error("the picture is empty (0 bytes)")]
    Empty,
    /// The bytes are in no format strata reads.
    #[error("not a picture strata reads (PNG, JPEG, WebP, GIF or BMP): {found}")]
    UnknownFormat {
        /// What the first bytes look like.
        found: String,
    },
    /// The file is damaged or cut short.
    #[error("cannot decode the {format} picture: {reason}")]
    Decode {
        /// The container format.
        format: &'static str,
        /// What the decoder says.
        reason: String,
    },
    /// More pixels, or a longer file, than strata is willing to decode.
    #[error("picture too large: {what} {found}, at most {limit} allowed")]
    TooLarge {
        /// What is over the limit.
        what: &'static str,
        /// How much there is.
        found: u64,
        /// How much is allowed.
        limit: u64,
    },
    /// One side is more than 200 times the other.
    #[error("picture of {width}x{height} pixels: the sides' ratio is {ratio:.1}, at most 200 allowed")]
    Aspect {
        /// Pixels across.
        width: u32,
        /// Pixels down.
        height: u32,
        /// The longer side over the shorter.
        ratio: f64,
    },
    /// The preprocessing options contradict each other or are out of range.
    #[error("vision options: {0}")]
    Options(String),
    /// The encoder's file cannot be read as GGUF, or lacks a key.
    #[error("vision encoder: {0}")]
    Gguf(#[source] crate::gguf::GgufError),
    /// A key or tensor of the encoder's file has a value or shape strata cannot use.
    #[error("vision encoder {file}: {item}: expected {expected}, found {found}")]
    Unsupported {
        /// The encoder's file.
        file: String,
        /// The key or tensor.
        item: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// The file's checksum is not the pinned one.
    #[error("{path}: SHA-256 is {found}, but {expected} was pinned ({pinned_by})", path = path.display())]
    Checksum {
        /// The file.
        path: PathBuf,
        /// The pinned sum, hex.
        expected: String,
        /// The file's sum, hex.
        found: String,
        /// Who pinned it: an option or a file beside the encoder.
        pinned_by: String,
    },
    /// A file of rows to compare with cannot be used.
    #[error("{path}: {reason}", path = path.display())]
    Dump {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A file of rows to compare with cannot be read.
    #[error(transparent)]
    Rows(#[from] crate::checkpoint::CheckpointError),
    /// An output cannot be written.
    #[error(transparent)]
    Output(#[from] crate::output::OutputError),
    /// Reading a file failed.
    #[error("{path}: {source}", path = path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
}
