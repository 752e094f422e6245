//! A build without the bundled files.

use bytes::Bytes;

/// The text model (GGUF), if this build has one.
pub fn model() -> Option<Bytes> {
    None
}

/// The vision encoder that belongs to it (mmproj GGUF), if this build has one.
pub fn encoder() -> Option<Bytes> {
    None
}
