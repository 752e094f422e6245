//! The bundled files, from `tests/golden/`.

use bytes::Bytes;

/// The text model (GGUF), if this build has one.
pub fn model() -> Option<Bytes> {
    Some(Bytes::from_static(include_bytes!("../../tests/golden/tiny.gguf")))
}

/// The vision encoder that belongs to it (mmproj GGUF), if this build has one.
pub fn encoder() -> Option<Bytes> {
    Some(Bytes::from_static(include_bytes!("../../tests/golden/tiny-mmproj.gguf")))
}
