//! Names of split files: `NAME-00001-of-00005.gguf`.

use std::path::{Path, PathBuf};

/// The most parts a split file may have (the name has five digits).
pub(super) const MAX_PARTS: usize = 99_999;

/// The name of part `part` (from 0) of `count`: `prefix` + `-00001-of-00005.gguf`.
pub fn split_name(prefix: &Path, part: usize, count: usize) -> PathBuf {
    let mut name = prefix.as_os_str().to_os_string();
    name.push(format!("-{:05}-of-{:05}.gguf", part + 1, count));
    name.into()
}

/// Takes the name of a part apart: the prefix, which part it is (from 0) and how many there are.
pub fn split_parts(path: &Path) -> Option<(PathBuf, usize, usize)> {
    let name = path.file_name()?.to_str()?;
    let stem = name.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, part) = rest.rsplit_once('-')?;
    let number = |s: &str| (s.len() == 5 && s.bytes().all(|b| b.is_ascii_digit())).then(|| s.parse::<usize>().ok())?;
    let (part, count) = (number(part)?, number(count)?);
    (part >= 1 && part <= count).then(|| (path.with_file_name(prefix), part - 1, count))
}
