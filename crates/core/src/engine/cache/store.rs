//! States of conversations that lost their slot: in memory up to a number of bytes, and on disk if a folder is given.

use std::sync::Arc;

use super::super::handle::CacheStatus;
use super::super::held::Held;
use super::super::options::{EngineError, EngineOptions};
use super::super::slot::Slot;
use super::super::target::Target;
use super::disk::DiskCache;
use super::saved::{Head, read_body, write_body};

/// Where a prompt's start can be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Nothing,
    Slot(usize),
    Ram(usize),
    Disk(usize),
}

impl Source {
    /// Whether this is a slot that serves nobody.
    pub(crate) fn is_idle_slot<T: Target>(self, slots: &[Slot<T>]) -> bool {
        matches!(self, Source::Slot(index) if slots[index].is_idle())
    }
}

struct RamEntry {
    head: Head,
    body: Arc<Vec<u8>>,
}

/// States outside the slots.
pub(crate) struct StateStore {
    /// Oldest use first.
    ram: Vec<RamEntry>,
    ram_limit: u64,
    disk: Option<DiskCache>,
    /// Rows and checkpoints of a state that was too large to keep: none larger need be tried.
    too_large: Option<(usize, usize)>,
    pub(crate) status: CacheStatus,
}

/// Shorter conversations are read again as fast as they are loaded.
const FEWEST_ROWS: usize = 16;

impl StateStore {
    pub(crate) fn open(options: &EngineOptions) -> Result<StateStore, EngineError> {
        let disk = match &options.cache_dir {
            None => None,
            Some(folder) => {
                let opened = DiskCache::open(folder, options.model_id, options.cache_dir_bytes);
                Some(opened.map_err(|cause| EngineError::CacheFolder { path: folder.display().to_string(), cause })?)
            }
        };
        let mut store = StateStore {
            ram: Vec::new(),
            ram_limit: options.cache_ram_bytes,
            disk,
            too_large: None,
            status: CacheStatus::default(),
        };
        store.count();
        Ok(store)
    }

    /// The stored state that serves the most first rows of `prompt`.
    pub(crate) fn find(&self, prompt: &Held) -> Option<(usize, Source)> {
        let ram = self.ram.iter().enumerate().map(|(index, entry)| (entry.head.reusable(prompt), Source::Ram(index)));
        let disk = self.disk.iter().flat_map(|disk| disk.entries().iter().enumerate());
        let disk = disk.map(|(index, entry)| (entry.head.reusable(prompt), Source::Disk(index)));
        // Of equals the first: memory before disk.
        let best = ram.chain(disk).reduce(|best, next| if next.0 > best.0 { next } else { best })?;
        (best.0 >= FEWEST_ROWS).then_some(best)
    }

    pub(crate) fn has_disk_states(&self) -> bool {
        self.disk.as_ref().is_some_and(|disk| !disk.entries().is_empty())
    }

    /// Reads a state from disk in the background; `true` once it is there (or found to be damaged).
    pub(crate) fn fetch(&mut self, index: usize) -> bool {
        self.disk.as_mut().is_none_or(|disk| disk.fetch(index))
    }

    /// Lets go of states that were fetched for requests that are gone.
    pub(crate) fn forget_fetched(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.forget_fetched();
        }
    }

    /// Puts a slot's state into it. `false`: it could not be read; the slot must be reset.
    pub(crate) fn load<T: Target>(&mut self, source: Source, target: &T, slot: &mut Slot<T>) -> bool {
        let loaded = match source {
            Source::Ram(index) => {
                let entry = self.ram.remove(index);
                let loaded = read_body(target, &entry.head, &entry.body, slot).is_ok();
                if loaded {
                    self.ram.push(entry);
                    self.status.ram_hits += 1;
                }
                loaded
            }
            Source::Disk(index) => self.load_from_disk(index, target, slot),
            Source::Nothing | Source::Slot(_) => false,
        };
        self.count();
        loaded
    }

    fn load_from_disk<T: Target>(&mut self, index: usize, target: &T, slot: &mut Slot<T>) -> bool {
        let Some(disk) = &mut self.disk else { return false };
        let Some((head, body)) = disk.load(index) else { return false };
        if read_body(target, &head, &body, slot).is_err() {
            disk.refuse(index);
            return false;
        }
        self.status.disk_hits += 1;
        true
    }

    /// Keeps a slot's state in memory and on disk, as far as they are in use.
    pub(crate) fn save<T: Target>(&mut self, target: &T, slot: &Slot<T>) {
        if slot.held.len() < FEWEST_ROWS || (self.ram_limit == 0 && self.disk.is_none()) {
            return;
        }
        let head = Head::of(slot);
        let in_ram = self.ram_limit == 0 || self.ram.iter().any(|entry| entry.head.covers(&head));
        let on_disk = self.disk.as_ref().is_none_or(|disk| disk.entries().iter().any(|entry| entry.head.covers(&head)));
        let size = (slot.held.len(), slot.checkpoints.len());
        let too_large = self.too_large.is_some_and(|(rows, points)| size.0 >= rows && size.1 >= points);
        if (in_ram || too_large) && on_disk {
            return;
        }
        let Ok(body) = write_body(target, slot) else { return };
        let body = Arc::new(body);
        if body.len() as u64 > self.ram_limit {
            self.too_large = Some(size);
        }
        if !on_disk && let Some(disk) = &mut self.disk {
            disk.add(head.clone(), body.clone());
        }
        if !in_ram && body.len() as u64 <= self.ram_limit {
            self.ram.retain(|entry| !head.covers(&entry.head));
            self.ram.push(RamEntry { head, body });
            while self.ram_bytes() > self.ram_limit {
                self.ram.remove(0);
            }
        }
        self.count();
    }

    /// Keeps a slot's state on disk only: the process is about to end.
    pub(crate) fn save_to_disk<T: Target>(&mut self, target: &T, slot: &Slot<T>) {
        self.ram_limit = 0;
        self.save(target, slot);
        if let Some(disk) = &mut self.disk {
            disk.finish();
        }
    }

    fn ram_bytes(&self) -> u64 {
        self.ram.iter().map(|entry| entry.body.len() as u64).sum()
    }

    fn count(&mut self) {
        self.status.ram_entries = self.ram.len();
        self.status.ram_bytes = self.ram_bytes();
        if let Some(disk) = &self.disk {
            self.status.disk_entries = disk.entries().len();
            self.status.disk_bytes = disk.bytes();
            self.status.disk_refused = disk.refused;
        }
    }
}
