//! Output files that are not complete yet, so that an interrupted program can remove them.

use super::GgufError;
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Temporary files that exist at the moment.
static UNFINISHED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

fn registry() -> MutexGuard<'static, Vec<PathBuf>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes every temporary file this process is writing. For a program that is about to end because of a signal; writers
/// that go on after this fail when they finish.
pub fn remove_unfinished_files() {
    for path in registry().drain(..) {
        // Nothing more can be done about a file that cannot be removed; the next one may still work.
        let _ = std::fs::remove_file(path);
    }
}

/// A file that is written under a temporary name in the folder of its final name, and removed when dropped unfinished.
pub(super) struct UnfinishedFile {
    pub file: File,
    temporary: PathBuf,
    target: PathBuf,
}

impl UnfinishedFile {
    /// Creates the temporary file for `target`.
    pub fn create(target: &Path) -> Result<Self, GgufError> {
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let temporary = target.with_file_name(format!(".{name}.{}.partial", std::process::id()));
        crate::output::check_target(target).map_err(|source| GgufError::Io {
            path: target.to_path_buf(),
            action: "write there",
            source,
        })?;
        let mut files = registry();
        // A leftover of a killed process that had the same id is ours to replace.
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(&temporary).map_err(|source| {
            GgufError::Io { path: target.to_path_buf(), action: "create a file in its folder", source }
        })?;
        files.push(temporary.clone());
        Ok(UnfinishedFile { file, temporary, target: target.to_path_buf() })
    }

    /// Gives the file its final name, after its bytes are on disk. Without `replace`, a file that appeared there in the
    /// meantime is kept and an error given.
    pub fn finish(self, replace: bool) -> Result<(), GgufError> {
        let target = &self.target;
        let io = |action| move |source| GgufError::Io { path: target.clone(), action, source };
        self.file.sync_all().map_err(io("write it to disk"))?;
        let mut files = registry();
        if replace {
            std::fs::rename(&self.temporary, &self.target).map_err(io("give the finished file its name"))?;
        } else {
            // A hard link never replaces an existing file; rename does.
            match std::fs::hard_link(&self.temporary, &self.target) {
                Ok(()) => std::fs::remove_file(&self.temporary).map_err(io("remove the temporary name"))?,
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {
                    return Err(GgufError::Exists { path: self.target.clone() });
                }
                // Some file systems have no hard links.
                Err(_) => {
                    std::fs::rename(&self.temporary, &self.target).map_err(io("give the finished file its name"))?
                }
            }
        }
        files.retain(|p| *p != self.temporary);
        drop(files);
        if let Some(folder) = self.target.parent()
            && let Ok(folder) = File::open(if folder.as_os_str().is_empty() { Path::new(".") } else { folder })
        {
            // Makes the new name itself durable where the file system supports it.
            let _ = folder.sync_all();
        }
        Ok(())
    }
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        let mut files = registry();
        if let Some(at) = files.iter().position(|p| *p == self.temporary) {
            files.remove(at);
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}
