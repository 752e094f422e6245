//! The vision transformer: pixels to rows of the text model's width.

use super::{PictureRows, PreprocessOptions, Preprocessed, VisionError};
use bytes::Bytes;
use std::path::Path;

/// A vision encoder opened from a llama.cpp `mmproj` GGUF.
pub struct VisionEncoder {
    identity: [u8; 32],
}

impl VisionEncoder {
    /// Opens the encoder in `path`; `threads` work on each picture.
    pub fn open(path: &Path, threads: usize) -> Result<Self, VisionError> {
        let _ = (path, threads);
        todo!()
    }

    /// Opens an encoder held in memory; `name` stands for it in errors.
    pub fn from_bytes(name: &str, data: Bytes, threads: usize) -> Result<Self, VisionError> {
        let _ = (name, data, threads);
        todo!()
    }

    /// Width of the rows it makes: must be the text model's hidden size.
    pub fn width(&self) -> usize {
        todo!()
    }

    /// What tells this encoder's rows from another's: part of every picture's key.
    pub fn identity(&self) -> &[u8; 32] {
        &self.identity
    }

    /// Decodes and resizes a picture for this encoder.
    pub fn preprocess(&self, bytes: &[u8], options: &PreprocessOptions) -> Result<Preprocessed, VisionError> {
        let _ = (bytes, options);
        todo!()
    }

    /// Runs the encoder.
    pub fn encode(&self, picture: &Preprocessed) -> PictureRows {
        let _ = picture;
        todo!()
    }
}
