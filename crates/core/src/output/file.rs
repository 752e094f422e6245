//! One output file, from its temporary name to its final one.

use super::leftovers::{remove_leftovers, temporary_name};
use super::{Existing, OutputError, target_of};
use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Large enough that small pieces are gathered, small enough to stay in the cache.
const BUFFER_BYTES: usize = 1 << 20;

/// Temporary files that exist at the moment.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn registry() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes every temporary file this process is writing and says how many there were. For a program that is about to end
/// because of a signal; files that are finished after this fail.
pub fn remove_unfinished_files() -> usize {
    let files = std::mem::take(&mut *registry());
    for path in &files {
        // Nothing more can be done about a file that cannot be removed; the next one may still work.
        let _ = std::fs::remove_file(path);
    }
    files.len()
}

/// Whether this process is writing a temporary file of this name, which is unique in the process.
pub(super) fn is_unfinished(name: &OsStr) -> bool {
    registry().iter().any(|unfinished| unfinished.file_name() == Some(name))
}

/// The folder a path lies in.
pub(super) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file that appears under its name when it is complete, and not at all when it is dropped before. See the
/// [module](super).
#[derive(Debug)]
pub struct OutputFile {
    /// `None` once everything is on disk.
    out: Option<BufWriter<File>>,
    temporary: PathBuf,
    /// Where it goes.
    target: PathBuf,
    /// How it was named, for messages.
    named: PathBuf,
}

impl OutputFile {
    /// Opens a temporary file for `path`. Leftovers of killed processes that wrote to the same name are removed.
    ///
    /// # Errors
    /// When `path` is a folder or a device, or its folder is missing or cannot be written.
    pub fn create(path: &Path) -> Result<OutputFile, OutputError> {
        let target = target_of(path)?;
        let name = target.file_name().ok_or_else(|| OutputError::NoName { path: path.to_path_buf() })?;
        let folder = folder_of(&target);
        remove_leftovers(folder, Some(name));
        let temporary = folder.join(temporary_name(name));
        let mut files = registry();
        // A leftover of a killed process that had the same id is ours to replace.
        let file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .open(&temporary)
            .map_err(OutputError::io(path, "create a file in its folder"))?;
        files.push(temporary.clone());
        drop(files);
        // Shows other processes that somebody writes it. Not every file system has locks.
        let _ = file.try_lock();
        if let Ok(replaced) = std::fs::metadata(&target) {
            // Who may read the file stays as it was; a file system without permissions is no reason to fail.
            let _ = file.set_permissions(replaced.permissions());
        }
        let out = Some(BufWriter::with_capacity(BUFFER_BYTES, file));
        Ok(OutputFile { out, temporary, target, named: path.to_path_buf() })
    }

    /// Appends bytes.
    ///
    /// # Errors
    /// When the disk refuses them.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), OutputError> {
        self.write_all(bytes).map_err(OutputError::io(&self.named, "write to it"))
    }

    /// Brings everything to disk and closes the file, which keeps its temporary name until [`OutputFile::finish`].
    ///
    /// # Errors
    /// When the disk refuses.
    pub fn seal(&mut self) -> Result<(), OutputError> {
        let Some(out) = self.out.take() else { return Ok(()) };
        let written = out.into_inner().map_err(|error| error.into_error()).and_then(|file| file.sync_all());
        written.map_err(OutputError::io(&self.named, "write it to disk"))
    }

    /// Gives the file its final name, after its bytes are on disk.
    ///
    /// # Errors
    /// When the disk refuses, or with [`Existing::Keep`] when a file has appeared under that name.
    pub fn finish(mut self, existing: Existing) -> Result<(), OutputError> {
        self.seal()?;
        let rename = || {
            std::fs::rename(&self.temporary, &self.target)
                .map_err(OutputError::io(&self.named, "give the finished file its name"))
        };
        let mut files = registry();
        match existing {
            Existing::Replace => rename()?,
            // A hard link never replaces an existing file; rename does.
            Existing::Keep => match std::fs::hard_link(&self.temporary, &self.target) {
                Ok(()) => std::fs::remove_file(&self.temporary)
                    .map_err(OutputError::io(&self.named, "remove its temporary name"))?,
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    return Err(OutputError::Exists { path: self.named.clone() });
                }
                // The temporary file is gone: an interrupt removed it.
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return Err(OutputError::io(&self.named, "give the finished file its name")(error));
                }
                // Some file systems have no hard links.
                Err(_) => rename()?,
            },
        }
        files.retain(|path| *path != self.temporary);
        drop(files);
        if let Ok(folder) = File::open(folder_of(&self.target)) {
            // Makes the new name itself durable where the file system supports it.
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match &mut self.out {
            Some(out) => out.write(bytes),
            None => Err(ErrorKind::BrokenPipe.into()),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.out.as_mut().map_or(Ok(()), Write::flush)
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let Some(out) = self.out.take() {
            // Without writing what is still in the buffer: the file goes away.
            drop(out.into_parts());
        }
        let mut files = registry();
        if let Some(at) = files.iter().position(|path| *path == self.temporary) {
            files.remove(at);
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a file in one go; one that is there is replaced.
///
/// # Errors
/// When it cannot be written.
pub fn write_whole(path: &Path, contents: &[u8]) -> Result<(), OutputError> {
    let mut file = OutputFile::create(path)?;
    file.append(contents)?;
    file.finish(Existing::Replace)
}
