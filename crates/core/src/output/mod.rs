//! Writing files: the one way all of strata's outputs take.
//!
//! An [`OutputFile`] is written under a temporary name in the folder of its final name and renamed when complete, so that a
//! file under its final name is always whole. It is removed when it is dropped unfinished or the program is interrupted
//! ([`remove_unfinished_files`]); what a killed process left behind is removed by the next one that writes to the same
//! name. [`check`] refuses, before any work is done, outputs that cannot be written, that are devices or folders, or that
//! are inputs of the same command. Files that grow by a line at a time (a journal) are not replaced; [`check_append`] holds
//! them to the same rules.

mod file;
mod leftovers;
mod place;

pub use file::{OutputFile, remove_unfinished_files, write_whole};
pub use leftovers::remove_leftovers;

use place::Place;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// What happens to a file that is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It is replaced by the finished output.
    Replace,
    /// It is kept and the output refused.
    Keep,
}

/// Why an output cannot be written. Temporary names never show.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The output as it was named.
        path: PathBuf,
        /// What was tried, as a verb phrase.
        action: &'static str,
        /// The cause.
        source: std::io::Error,
    },
    /// Something is there that is no file.
    #[error("{}: cannot write there: {found} is there, expected a file or nothing", path.display())]
    NotAFile {
        /// The output as it was named.
        path: PathBuf,
        /// What is there.
        found: &'static str,
    },
    /// The path ends in no name a file could have.
    #[error("{}: cannot write there: expected a path that ends in a file name", path.display())]
    NoName {
        /// The output as it was named.
        path: PathBuf,
    },
    /// The output is a file the same command reads.
    #[error("{}: this output is also an input ({}); writing it would destroy the input", path.display(), input.display())]
    IsInput {
        /// The output as it was named.
        path: PathBuf,
        /// The input it is the same file as.
        input: PathBuf,
    },
    /// Two outputs of one command are the same file.
    #[error("{}: this output is the same file as another one ({})", path.display(), other.display())]
    Twice {
        /// The output as it was named.
        path: PathBuf,
        /// The other output.
        other: PathBuf,
    },
    /// A file is there already and was not to be replaced.
    #[error("{}: the file exists already (use --force to replace it)", path.display())]
    Exists {
        /// The output as it was named.
        path: PathBuf,
    },
}

impl OutputError {
    fn io(path: &Path, action: &'static str) -> impl FnOnce(std::io::Error) -> OutputError {
        move |source| OutputError::Io { path: path.to_path_buf(), action, source }
    }
}

/// Checks everything that can be known about `outputs` before the work that makes them: that each can be written, and that
/// none is one of the `inputs` or another output, under whatever name. Leftovers of killed processes are removed.
///
/// An input that is a folder stands for the files of a checkpoint in it, a part of a split GGUF for all its parts.
///
/// # Errors
/// Naming the output and what is in the way.
pub fn check(outputs: &[&Path], inputs: &[&Path], existing: Existing) -> Result<(), OutputError> {
    check_places(outputs, inputs)?;
    for &path in outputs {
        if existing == Existing::Keep && path.symlink_metadata().is_ok() {
            return Err(OutputError::Exists { path: path.to_path_buf() });
        }
        // Dropped at once: it shows that the folder is there and can be written.
        OutputFile::create(path)?;
    }
    Ok(())
}

/// The part of [`check`] that is about which files these are.
///
/// # Errors
/// As [`check`].
pub(crate) fn check_places(outputs: &[&Path], inputs: &[&Path]) -> Result<(), OutputError> {
    let mut others: Vec<(&Path, Place)> = Vec::new();
    for &path in outputs {
        let target = target_of(path)?;
        let Some(place) = Place::of(&target) else { continue };
        if let Some(input) = place::files_of(inputs).find(|input| Place::of(input).as_ref() == Some(&place)) {
            return Err(OutputError::IsInput { path: path.to_path_buf(), input });
        }
        if let Some((other, _)) = others.iter().find(|(_, other)| *other == place) {
            return Err(OutputError::Twice { path: path.to_path_buf(), other: other.to_path_buf() });
        }
        others.push((path, place));
    }
    Ok(())
}

/// Checks a file that lines will be appended to, and makes its folder: the rules of [`check`].
///
/// # Errors
/// As [`check`].
pub fn check_append(path: &Path, inputs: &[&Path]) -> Result<(), OutputError> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(OutputError::io(path, "make its folder"))?;
    }
    check_places(&[path], inputs)?;
    match std::fs::File::options().append(true).open(path) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotFound => OutputFile::create(path).map(drop),
        Err(error) => Err(OutputError::io(path, "append to it")(error)),
    }
}

/// Where an output named `path` goes: the file behind a link. Refuses what a finished file must not be renamed over.
fn target_of(path: &Path) -> Result<PathBuf, OutputError> {
    let target = match path.symlink_metadata() {
        Ok(meta) if meta.is_symlink() => {
            std::fs::canonicalize(path).map_err(OutputError::io(path, "follow the link that is there"))?
        }
        _ => path.to_path_buf(),
    };
    match std::fs::metadata(&target) {
        Ok(meta) if !meta.is_file() => {
            let found = if meta.is_dir() { "a folder" } else { "a device or pipe" };
            Err(OutputError::NotAFile { path: path.to_path_buf(), found })
        }
        Ok(meta) if meta.permissions().readonly() => {
            let source = std::io::Error::new(ErrorKind::PermissionDenied, "it is write-protected");
            Err(OutputError::io(path, "replace the file that is there")(source))
        }
        Err(_) if path.file_name().is_none() || path.as_os_str().as_encoded_bytes().ends_with(b"/") => {
            Err(OutputError::NoName { path: path.to_path_buf() })
        }
        _ => Ok(target),
    }
}

#[cfg(test)]
mod tests;
