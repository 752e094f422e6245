//! Which file a path stands for, however it is named, and which files an input consists of.

use crate::gguf::{split_name, split_parts};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What a folder of a checkpoint holds that is read from it.
const CHECKPOINT_FILES: [&str; 5] = ["safetensors", "json", "txt", "jinja", "model"];

/// A file's identity: links of both kinds and different spellings of one path are the same place.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A file that exists, by device and inode.
    There(u64, u64),
    /// A name in a folder that nothing has yet.
    New { folder: (u64, u64), name: OsString },
}

impl Place {
    /// `None` where not even the folder exists.
    pub fn of(path: &Path) -> Option<Place> {
        if let Ok(meta) = std::fs::metadata(path) {
            return Some(Place::There(meta.dev(), meta.ino()));
        }
        let folder = std::fs::metadata(super::file::folder_of(path)).ok()?;
        Some(Place::New { folder: (folder.dev(), folder.ino()), name: path.file_name()?.to_os_string() })
    }
}

/// The files that inputs consist of: all parts of a split GGUF, the checkpoint's files in a folder.
pub(super) fn files_of<'a>(inputs: &'a [&'a Path]) -> impl Iterator<Item = PathBuf> + 'a {
    inputs.iter().flat_map(|&input| {
        if let Some((prefix, _, count)) = split_parts(input) {
            return (0..count).map(|part| split_name(&prefix, part, count)).collect();
        }
        match std::fs::read_dir(input) {
            Err(_) => vec![input.to_path_buf()],
            Ok(entries) => {
                let files = entries.filter_map(|entry| Some(entry.ok()?.path()));
                files
                    .filter(|path| path.extension().is_some_and(|e| CHECKPOINT_FILES.iter().any(|known| e == *known)))
                    .collect()
            }
        }
    })
}
