//! Encoded pictures kept in memory, so that a conversation resent with the same pictures does not encode them again.

use super::PictureRows;
use std::collections::HashMap;
use std::sync::Arc;

/// The most recently used encoded pictures, up to a number of bytes.
pub struct PictureCache {
    limit: usize,
    held: usize,
    clock: u64,
    entries: HashMap<[u8; 32], Entry>,
}

struct Entry {
    rows: Arc<PictureRows>,
    bytes: usize,
    used: u64,
}

impl PictureCache {
    /// An empty cache that holds at most `limit` bytes of rows.
    pub fn new(limit: usize) -> Self {
        Self { limit, held: 0, clock: 0, entries: HashMap::new() }
    }

    /// The rows kept under `key`, now the most recently used.
    pub fn get(&mut self, key: &[u8; 32]) -> Option<Arc<PictureRows>> {
        self.clock += 1;
        let entry = self.entries.get_mut(key)?;
        entry.used = self.clock;
        Some(entry.rows.clone())
    }

    /// Keeps `rows`, dropping the longest unused others until it fits. Rows larger than the whole cache are not kept.
    pub fn insert(&mut self, rows: Arc<PictureRows>) {
        let bytes = size_of_val::<[f32]>(&rows.data);
        if bytes > self.limit {
            return;
        }
        self.clock += 1;
        let entry = Entry { bytes, used: self.clock, rows };
        if let Some(old) = self.entries.insert(entry.rows.key, entry) {
            self.held -= old.bytes;
        }
        self.held += bytes;
        while self.held > self.limit {
            let Some(oldest) = self.entries.iter().min_by_key(|(_, e)| e.used).map(|(k, _)| *k) else { break };
            if let Some(gone) = self.entries.remove(&oldest) {
                self.held -= gone.bytes;
            }
        }
    }

    /// Pictures held.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Bytes of rows held, at most the limit.
    pub fn bytes(&self) -> usize {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(id: u8, rows: u32) -> Arc<PictureRows> {
        let data = vec![f32::from(id); rows as usize * 4].into();
        Arc::new(PictureRows { key: [id; 32], grid: (rows, 1), width: 4, data })
    }

    #[test]
    fn the_longest_unused_picture_goes_first_and_the_bound_holds() {
        let mut cache = PictureCache::new(64);
        cache.insert(picture(1, 2));
        cache.insert(picture(2, 2));
        assert!(cache.get(&[1; 32]).is_some());
        cache.insert(picture(3, 2));
        assert!(cache.get(&[2; 32]).is_none(), "2 was the longest unused");
        assert!(cache.get(&[1; 32]).is_some() && cache.get(&[3; 32]).is_some());
        assert_eq!(cache.bytes(), 64);
    }

    #[test]
    fn inserting_again_does_not_count_twice_and_a_giant_is_not_kept() {
        let mut cache = PictureCache::new(64);
        cache.insert(picture(1, 2));
        cache.insert(picture(1, 2));
        assert_eq!((cache.len(), cache.bytes()), (1, 32));
        cache.insert(picture(9, 5));
        assert!(cache.get(&[9; 32]).is_none());
        assert_eq!(cache.len(), 1);
    }
}
