//! Reading what the user names: files and standard input, whole, with a limit on their size.

use super::failure::BadInput;
use anyhow::Result;
use std::io::Read;
use std::path::Path;

/// Largest prompt, text or picture that is read.
const MAX_INPUT_BYTES: u64 = 256 << 20;

/// The bytes of a file, or of stdin for `-`.
pub fn read(path: &Path) -> Result<Vec<u8>> {
    if path.as_os_str() == "-" {
        return read_from(&mut std::io::stdin().lock(), "stdin");
    }
    let name = path.display().to_string();
    let cannot = |problem: String| BadInput::new(format!("cannot read {name}: {problem}"));
    let mut file = std::fs::File::open(path).map_err(|error| cannot(error.to_string()))?;
    if file.metadata().is_ok_and(|meta| meta.is_dir()) {
        return Err(cannot("it is a folder".to_owned()).into());
    }
    read_from(&mut file, &name)
}

/// The text of a file; it must be UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    text(&path.display().to_string(), read(path)?)
}

/// Everything `from` gives; `name` is for messages.
pub fn read_from(from: &mut impl Read, name: &str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    from.take(MAX_INPUT_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| BadInput::new(format!("cannot read {name}: {error}")))?;
    if bytes.len() as u64 > MAX_INPUT_BYTES {
        return Err(BadInput::new(format!("{name} is larger than {} MiB", MAX_INPUT_BYTES >> 20)).into());
    }
    Ok(bytes)
}

/// `bytes` as text.
pub fn text(name: &str, bytes: Vec<u8>) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| {
        BadInput::new(format!("{name} is not UTF-8 text (byte {})", error.utf8_error().valid_up_to())).into()
    })
}
