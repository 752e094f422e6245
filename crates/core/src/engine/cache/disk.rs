//! Saved states on disk. A file is the model's id, the head, the body and a SHA-256 over all of it. It is written under a
//! temporary name and renamed, and read back only if every byte is as it was written.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::bytes::Cursor;
use super::saved::Head;
use crate::output::{Existing, OutputError, OutputFile, remove_leftovers};

const MAGIC: &[u8; 8] = b"STRATAK1";
const EXTENSION: &str = "strata-state";
const DIGEST: usize = 32;
/// Magic, model id, length of the head.
const PREFIX: usize = 8 + 32 + 8;

/// One file.
pub(crate) struct DiskEntry {
    pub(crate) head: Head,
    path: PathBuf,
    pub(crate) bytes: u64,
    /// For eviction, in the order of use.
    used: u64,
    /// The thread that still writes it.
    writer: Option<JoinHandle<Result<(), OutputError>>>,
    /// The thread that reads it for a waiting request.
    reader: Option<JoinHandle<Option<Vec<u8>>>>,
}

/// The states in one folder.
pub(crate) struct DiskCache {
    folder: PathBuf,
    model_id: [u8; 32],
    limit: u64,
    entries: Vec<DiskEntry>,
    /// Files that were given up while they were being written; deleted once they are complete.
    leaving: Vec<(JoinHandle<Result<(), OutputError>>, PathBuf)>,
    uses: u64,
    /// Files that were damaged or of another model.
    pub(crate) refused: u64,
}

impl DiskCache {
    /// Lists the folder's states; makes the folder if need be.
    pub(crate) fn open(folder: &Path, model_id: [u8; 32], limit: u64) -> io::Result<DiskCache> {
        fs::create_dir_all(folder)?;
        remove_leftovers(folder, None);
        let mut cache = DiskCache {
            folder: folder.to_path_buf(),
            model_id,
            limit,
            entries: Vec::new(),
            leaving: Vec::new(),
            uses: 0,
            refused: 0,
        };
        let mut found: Vec<(SystemTime, PathBuf)> = Vec::new();
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == EXTENSION) {
                let modified =
                    fs::metadata(&path).and_then(|metadata| metadata.modified()).unwrap_or(SystemTime::UNIX_EPOCH);
                found.push((modified, path));
            }
        }
        found.sort();
        for (_, path) in found {
            match read_head(&path, &model_id) {
                Some((head, bytes)) => {
                    cache.uses += 1;
                    cache.entries.push(DiskEntry { head, path, bytes, used: cache.uses, writer: None, reader: None });
                }
                None => cache.refused += 1,
            }
        }
        cache.make_room(0);
        Ok(cache)
    }

    pub(crate) fn entries(&self) -> &[DiskEntry] {
        &self.entries
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }

    /// Writes a state in the background. Errors of the disk are no errors of the engine: the state is just not kept.
    pub(crate) fn add(&mut self, head: Head, body: Arc<Vec<u8>>) {
        let mut start = MAGIC.to_vec();
        start.extend_from_slice(&self.model_id);
        let mut head_bytes = Vec::new();
        head.write(&mut head_bytes);
        start.extend_from_slice(&(head_bytes.len() as u64).to_le_bytes());
        start.append(&mut head_bytes);
        let bytes = (start.len() + body.len() + DIGEST) as u64;
        if bytes > self.limit {
            return;
        }
        for index in (0..self.entries.len()).rev() {
            if head.covers(&self.entries[index].head) {
                self.remove(index);
            }
        }
        self.make_room(bytes);
        self.clear_left();
        let name = Sha256::digest(&start).iter().take(16).map(|byte| format!("{byte:02x}")).collect::<String>();
        let path = self.folder.join(format!("{name}.{EXTENSION}"));
        if self.leaving.iter().any(|(_, leaving)| *leaving == path) {
            return;
        }
        let target = path.clone();
        let writer =
            std::thread::Builder::new().name("strata-cache".into()).spawn(move || write_file(&target, &start, &body));
        if let Ok(writer) = writer {
            self.uses += 1;
            self.entries.push(DiskEntry { head, path, bytes, used: self.uses, writer: Some(writer), reader: None });
        }
    }

    /// Reads a state in the background, once it is written; `true` when that is done.
    pub(crate) fn fetch(&mut self, index: usize) -> bool {
        let model_id = self.model_id;
        let Some(entry) = self.entries.get_mut(index) else { return true };
        if entry.writer.as_ref().is_some_and(|writer| !writer.is_finished()) {
            return false;
        }
        if let Some(reader) = &entry.reader {
            return reader.is_finished();
        }
        let path = entry.path.clone();
        let reader = std::thread::Builder::new().name("strata-cache".into());
        match reader.spawn(move || read_verified(&path, &model_id)) {
            Ok(reader) => entry.reader = Some(reader),
            // Without a thread it is read when it is needed.
            Err(_) => return true,
        }
        false
    }

    /// Lets go of what was fetched and not taken.
    pub(crate) fn forget_fetched(&mut self) {
        for entry in &mut self.entries {
            entry.reader = None;
        }
    }

    /// Reads a state's body, if every byte is as it was written; else forgets it.
    pub(crate) fn load(&mut self, index: usize) -> Option<(Head, Vec<u8>)> {
        self.uses += 1;
        let uses = self.uses;
        let model_id = self.model_id;
        let entry = self.entries.get_mut(index)?;
        entry.used = uses;
        let written = entry.writer.take().is_none_or(|writer| matches!(writer.join(), Ok(Ok(()))));
        let body = match entry.reader.take() {
            _ if !written => None,
            Some(reader) => reader.join().unwrap_or(None),
            None => read_verified(&entry.path, &model_id),
        };
        match body {
            Some(body) => {
                // The order of use outlives the process as the order of modification times.
                let touched = File::options().append(true).open(&entry.path);
                let _ = touched.and_then(|file| file.set_modified(SystemTime::now()));
                Some((entry.head.clone(), body))
            }
            None => {
                self.refuse(index);
                None
            }
        }
    }

    /// Forgets a damaged state.
    pub(crate) fn refuse(&mut self, index: usize) {
        self.refused += 1;
        self.remove(index);
    }

    /// Waits until everything is written.
    pub(crate) fn finish(&mut self) {
        for entry in &mut self.entries {
            if let Some(writer) = entry.writer.take() {
                let _ = writer.join();
            }
        }
        for (writer, path) in self.leaving.drain(..) {
            let _ = writer.join();
            let _ = fs::remove_file(path);
        }
    }

    /// Deletes the files that were given up before they were complete and are complete now.
    fn clear_left(&mut self) {
        for index in (0..self.leaving.len()).rev() {
            if self.leaving[index].0.is_finished() {
                let _ = fs::remove_file(self.leaving.swap_remove(index).1);
            }
        }
    }

    fn make_room(&mut self, bytes: u64) {
        while self.bytes() + bytes > self.limit {
            let Some(oldest) = (0..self.entries.len()).min_by_key(|&index| self.entries[index].used) else { return };
            self.remove(oldest);
        }
    }

    fn remove(&mut self, index: usize) {
        let entry = self.entries.remove(index);
        match entry.writer {
            Some(writer) if !writer.is_finished() => self.leaving.push((writer, entry.path)),
            _ => drop(fs::remove_file(&entry.path)),
        }
    }
}

impl Drop for DiskCache {
    fn drop(&mut self) {
        self.finish();
    }
}

fn write_file(path: &Path, start: &[u8], body: &[u8]) -> Result<(), OutputError> {
    let mut file = OutputFile::create(path)?;
    file.append(start)?;
    file.append(body)?;
    file.append(&Sha256::new().chain_update(start).chain_update(body).finalize())?;
    file.finish(Existing::Replace)
}

/// The head of a file of this model, and the file's size.
fn read_head(path: &Path, model_id: &[u8; 32]) -> Option<(Head, u64)> {
    let mut file = File::open(path).ok()?;
    let size = file.metadata().ok()?.len();
    let mut prefix = [0; PREFIX];
    file.read_exact(&mut prefix).ok()?;
    let length = head_length(&prefix, model_id)?;
    if length as u64 > size.saturating_sub((PREFIX + DIGEST) as u64) {
        return None;
    }
    let mut head = vec![0; length];
    file.read_exact(&mut head).ok()?;
    Some((Head::read(&mut Cursor::new(&head)).ok()?, size))
}

fn head_length(prefix: &[u8], model_id: &[u8; 32]) -> Option<usize> {
    let mut from = Cursor::new(prefix);
    let fits = from.take(8).ok()? == MAGIC && from.take(32).ok()? == model_id;
    if fits { from.number().ok() } else { None }
}

fn read_verified(path: &Path, model_id: &[u8; 32]) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let at = bytes.len().checked_sub(DIGEST)?;
    let intact = Sha256::digest(&bytes[..at]).as_slice() == &bytes[at..];
    if !intact || at < PREFIX {
        return None;
    }
    let head = head_length(&bytes[..PREFIX], model_id)?;
    let from = PREFIX.checked_add(head).filter(|&from| from <= at)?;
    bytes.truncate(at);
    bytes.drain(..from);
    Some(bytes)
}
