//! From picture bytes to the pixels the encoder reads: decode, choose the size, resample.

use super::VisionError;
use super::decode::decode;
use super::resize::{bicubic, target_size};
use sha2::{Digest, Sha256};

/// Most rows a picture may be asked to become.
pub const MAX_TOKENS: usize = 16_384;

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

impl PreprocessOptions {
    /// Checks that the bounds are in order and within [`MAX_TOKENS`].
    ///
    /// # Errors
    /// When they are not.
    pub fn validate(&self) -> Result<(), VisionError> {
        let Self { min_tokens, max_tokens } = *self;
        if min_tokens == 0 || max_tokens < min_tokens || max_tokens > MAX_TOKENS {
            return Err(VisionError::Options(format!(
                "tokens per picture from {min_tokens} to {max_tokens}: expected 1 <= minimum <= maximum <= {MAX_TOKENS}"
            )));
        }
        Ok(())
    }
}

/// A picture ready for the encoder.
#[derive(Clone)]
pub struct Preprocessed {
    /// SHA-256 over the decoded pixels, the settings and the encoder's identity.
    pub key: [u8; 32],
    /// Name of the file format.
    pub format: &'static str,
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

/// Decodes `bytes` and brings the picture to a size that `geometry` and `options` allow. `identity` stands for the encoder
/// in the picture's key.
///
/// # Errors
/// When the options are out of range, the picture cannot be decoded, or it is too long and thin.
pub fn preprocess(
    bytes: &[u8],
    geometry: &PictureGeometry,
    options: &PreprocessOptions,
    identity: &[u8; 32],
) -> Result<Preprocessed, VisionError> {
    options.validate()?;
    let picture = decode(bytes)?;
    let factor = geometry.factor();
    let pixels = |tokens: usize| tokens as u64 * (factor * factor) as u64;
    let (min, max) = (pixels(options.min_tokens), pixels(options.max_tokens));
    let size = target_size(picture.width, picture.height, factor, min, max)?;
    let mut hash = Sha256::new();
    hash.update(b"strata picture 1");
    hash.update(identity);
    for number in [picture.width, picture.height, size.0, size.1] {
        hash.update(number.to_le_bytes());
    }
    hash.update(&picture.rgb);
    Ok(Preprocessed {
        key: hash.finalize().into(),
        format: picture.format,
        source_size: (picture.width, picture.height),
        size,
        grid: (size.1 / factor as u32, size.0 / factor as u32),
        rgb: bicubic(&picture.rgb, picture.width, picture.height, size.0, size.1),
        notes: picture.notes,
    })
}
