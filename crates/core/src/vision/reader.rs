//! The one call from picture bytes to rows: decode, look in the cache, encode.

use super::{PictureCache, PictureRows, PreprocessOptions, VisionEncoder, VisionError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// An encoder with its settings and a cache of what it has encoded. Shared between threads; pictures are encoded one
/// at a time, on the encoder's own threads, so a text model running beside it is never waited for.
pub struct PictureReader {
    encoder: Arc<VisionEncoder>,
    options: PreprocessOptions,
    cache: Mutex<PictureCache>,
    encoding: Mutex<()>,
}

/// A picture that was read.
pub struct ReadPicture {
    /// Its rows.
    pub rows: Arc<PictureRows>,
    /// Whether the rows came from the cache.
    pub cached: bool,
    /// What the caller should be told, such as that only the first frame of an animation was read.
    pub notes: Vec<String>,
    /// Time to decode and resize.
    pub preprocess_time: Duration,
    /// Time to encode; zero when the rows were cached.
    pub encode_time: Duration,
}

impl PictureReader {
    /// A reader whose cache holds at most `cache_bytes` of rows.
    pub fn new(encoder: Arc<VisionEncoder>, options: PreprocessOptions, cache_bytes: usize) -> Self {
        Self { encoder, options, cache: Mutex::new(PictureCache::new(cache_bytes)), encoding: Mutex::new(()) }
    }

    /// The encoder.
    pub fn encoder(&self) -> &Arc<VisionEncoder> {
        &self.encoder
    }

    /// The settings every picture is read with.
    pub fn options(&self) -> &PreprocessOptions {
        &self.options
    }

    /// Pictures and bytes held in the cache.
    pub fn cached(&self) -> (usize, usize) {
        let cache = lock(&self.cache);
        (cache.len(), cache.bytes())
    }

    /// Reads the picture in `bytes` (the contents of a PNG, JPEG, WebP, GIF or BMP file).
    pub fn read(&self, bytes: &[u8]) -> Result<ReadPicture, VisionError> {
        let start = Instant::now();
        let picture = self.encoder.preprocess(bytes, &self.options)?;
        let preprocess_time = start.elapsed();
        let cached =
            |rows, notes| ReadPicture { rows, cached: true, notes, preprocess_time, encode_time: Duration::ZERO };
        if let Some(rows) = lock(&self.cache).get(&picture.key) {
            return Ok(cached(rows, picture.notes));
        }
        let _one_at_a_time = lock(&self.encoding);
        // Another thread may have encoded the same picture while this one waited.
        if let Some(rows) = lock(&self.cache).get(&picture.key) {
            return Ok(cached(rows, picture.notes));
        }
        let start = Instant::now();
        let rows = Arc::new(self.encoder.encode(&picture));
        let encode_time = start.elapsed();
        lock(&self.cache).insert(rows.clone());
        Ok(ReadPicture { rows, cached: false, notes: picture.notes, preprocess_time, encode_time })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
