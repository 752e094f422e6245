//! Checking an encoder's file against a pinned SHA-256.

use super::VisionError;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// What a file was checked against.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// Nothing was pinned.
    Unpinned,
    /// The file's SHA-256, hex, equal to the pinned one.
    Verified {
        /// The sum.
        sha256: String,
        /// What pinned it.
        pinned_by: String,
    },
}

/// Where the hash of the encoder at `path` is looked for when none is given.
pub fn pin_beside(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".sha256");
    PathBuf::from(name)
}

/// Checks the file at `path` against `pinned`, or else against the first word of `<path>.sha256` where that exists.
///
/// # Errors
/// When the sums differ, the pinned one is not 64 hex digits, or a file cannot be read.
pub fn verify(path: &Path, pinned: Option<&str>) -> Result<Checksum, VisionError> {
    let beside = pin_beside(path);
    let (expected, pinned_by) = match pinned {
        Some(pinned) => (pinned.to_string(), "given as an option".to_string()),
        None if beside.exists() => {
            let text =
                std::fs::read_to_string(&beside).map_err(|source| VisionError::Io { path: beside.clone(), source })?;
            (text.split_whitespace().next().unwrap_or_default().to_string(), beside.display().to_string())
        }
        None => return Ok(Checksum::Unpinned),
    };
    let expected = expected.trim().to_ascii_lowercase();
    if expected.len() != 64 || !expected.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Err(VisionError::Options(format!(
            "{expected:?} ({pinned_by}) is not a SHA-256: expected 64 hex digits"
        )));
    }
    let found = sha256(path)?;
    if found != expected {
        return Err(VisionError::Checksum { path: path.to_path_buf(), expected, found, pinned_by });
    }
    Ok(Checksum::Verified { sha256: found, pinned_by })
}

/// The SHA-256 of a file, hex.
fn sha256(path: &Path) -> Result<String, VisionError> {
    let failed = |source| VisionError::Io { path: path.to_path_buf(), source };
    let mut file = File::open(path).map_err(failed)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(failed)? {
            0 => break,
            n => hash.update(&buffer[..n]),
        }
    }
    Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn an_option_comes_before_the_file_beside_and_a_mismatch_names_both_sums() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mmproj.gguf");
        std::fs::write(&path, "abc").unwrap();
        assert_eq!(verify(&path, None).unwrap(), Checksum::Unpinned);
        assert!(matches!(verify(&path, Some(&OF_ABC.to_uppercase())).unwrap(), Checksum::Verified { .. }));

        std::fs::write(dir.path().join("mmproj.gguf.sha256"), format!("{OF_ABC}  mmproj.gguf\n")).unwrap();
        assert!(matches!(verify(&path, None).unwrap(), Checksum::Verified { .. }));
        let wrong = "0".repeat(64);
        let error = verify(&path, Some(&wrong)).unwrap_err().to_string();
        assert!(error.contains(OF_ABC) && error.contains(&wrong), "{error}");

        std::fs::write(&path, "abd").unwrap();
        assert!(verify(&path, None).unwrap_err().to_string().contains("mmproj.gguf.sha256"));
        assert!(verify(&path, Some("12ab")).unwrap_err().to_string().contains("64 hex digits"));
    }
}
