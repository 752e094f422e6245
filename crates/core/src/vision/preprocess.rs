//! From picture bytes to the pixels the encoder reads: decode, choose the size, resample.

use super::VisionError;

/// What the encoder's file says about the pixels it wants.
#[derive(Clone, Debug, PartialEq)]
pub struct PictureGeometry {
    /// Pixels on a side of a patch.
    pub patch: usize,
    /// Patches on a side of a merged block.
    pub merge: usize,
    /// Mean of each channel, on pixels scaled to 0..1.
    pub mean: [f32; 3],
    /// Standard deviation of each channel, on pixels scaled to 0..1.
    pub std: [f32; 3],
}

impl PictureGeometry {
    /// Pixels on a side of a merged block: both sides of a resized picture are multiples of it.
    pub fn factor(&self) -> usize {
        self.patch * self.merge
    }
}

/// How many rows a picture may become.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PreprocessOptions {
    /// Most merged blocks: a larger picture is made smaller.
    pub max_tokens: usize,
    /// Fewest merged blocks: a smaller picture is made larger.
    pub min_tokens: usize,
}

impl Default for PreprocessOptions {
    fn default() -> Self {
        Self { max_tokens: 1024, min_tokens: 4 }
    }
}

/// A picture ready for the encoder.
#[derive(Clone)]
pub struct Preprocessed {
    /// SHA-256 over the decoded pixels and the settings.
    pub key: [u8; 32],
    /// Pixels of the decoded picture, across and down.
    pub source_size: (u32, u32),
    /// Pixels of the resized picture, across and down.
    pub size: (u32, u32),
    /// Merged blocks down and across.
    pub grid: (u32, u32),
    /// The resized picture, `[size.1, size.0, 3]` RGB bytes.
    pub rgb: Vec<u8>,
    /// What the caller should be told, such as that only the first frame of an animation was read.
    pub notes: Vec<String>,
}

/// Decodes `bytes` and brings the picture to the size the encoder reads.
pub fn preprocess(
    bytes: &[u8],
    geometry: &PictureGeometry,
    options: &PreprocessOptions,
) -> Result<Preprocessed, VisionError> {
    let _ = (bytes, geometry, options);
    todo!()
}
