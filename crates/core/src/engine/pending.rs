//! Stand-ins for types whose owners have not landed yet; replaced by `crate::vision` and `crate::text`.

use std::sync::Arc;

/// An encoded picture.
#[derive(Clone, Debug)]
pub struct PictureRows {
    /// SHA-256 of the picture and its settings.
    pub key: [u8; 32],
    /// Merged rows and columns.
    pub grid: (u32, u32),
    /// Width of a row.
    pub width: usize,
    /// rows * cols x width.
    pub data: Arc<[f32]>,
}

/// A grammar.
#[derive(Clone, Debug)]
pub struct Grammar;
