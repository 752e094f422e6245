//! Pictures: from the bytes of a PNG, JPEG, WebP, GIF or BMP file to rows of the text model.
//!
//! The way of a picture: [`decode`] reads the file into RGB under limits, [`resize`] chooses the size the encoder sees
//! and resamples, [`preprocess`] puts both together, [`VisionEncoder`] turns the pixels into one row per merged
//! 2x2 block of patches, [`PictureCache`] keeps the rows, [`PictureReader`] is the one call that does all of it,
//! and [`splice`] gives the rows their positions in a prompt.
//!
//! This module knows nothing of requests, URLs or slots: it is given bytes and hands back rows.

mod cache;
pub mod checksum;
pub mod decode;
pub mod dump;
mod encoder;
mod error;
#[cfg(test)]
mod golden_tests;
#[cfg(test)]
mod hostile_tests;
pub mod preprocess;
mod reader;
pub mod resize;
pub mod splice;
mod weights;

pub use cache::PictureCache;
pub use encoder::{EncodeTimes, VisionEncoder};
pub use error::VisionError;
pub use preprocess::{PictureGeometry, PreprocessOptions, Preprocessed};
pub use reader::{PictureReader, ReadPicture};
pub use weights::EncoderShape;

use std::sync::Arc;

/// The rows a picture becomes in the prompt: one per merged block of patches, row by row from the top left.
#[derive(Clone)]
pub struct PictureRows {
    /// SHA-256 over the decoded pixels, the preprocessing settings and the encoder's identity: equal keys mean equal
    /// rows.
    pub key: [u8; 32],
    /// Merged blocks down and across; the picture has `grid.0 * grid.1` rows.
    pub grid: (u32, u32),
    /// Width of a row: the text model's hidden size.
    pub width: usize,
    /// `[grid.0 * grid.1, width]`.
    pub data: Arc<[f32]>,
}

impl PictureRows {
    /// How many rows of context the picture takes.
    pub fn rows(&self) -> usize {
        self.grid.0 as usize * self.grid.1 as usize
    }

    /// The embedding of merged block `index`, counted row by row.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.data[index * self.width..(index + 1) * self.width]
    }

    /// How far the text after the picture moves on in position: `max(rows, columns)` of the grid.
    pub fn position_span(&self) -> u32 {
        self.grid.0.max(self.grid.1)
    }
}

impl std::fmt::Debug for PictureRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PictureRows({}x{} of {})", self.grid.0, self.grid.1, self.width)
    }
}
