//! Where output may go: a new file or the place of a regular one.

use std::io::{Error, ErrorKind};
use std::path::Path;

/// Refuses a target that a finished file must not be renamed over: a folder, a device, a pipe.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] naming what is there.
pub fn check_target(path: &Path) -> Result<(), Error> {
    match std::fs::metadata(path) {
        Ok(meta) if !meta.is_file() => {
            let what = if meta.is_dir() { "a folder" } else { "a device or pipe" };
            Err(Error::new(ErrorKind::InvalidInput, format!("{what} is there, expected a file or nothing")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_new_names_are_fine_and_everything_else_is_not() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let file = folder.path().join("file");
        assert!(check_target(&file).is_ok(), "nothing there yet");
        std::fs::write(&file, "x").expect("written");
        assert!(check_target(&file).is_ok());
        assert!(check_target(folder.path()).is_err());
        #[cfg(unix)]
        assert!(check_target(Path::new("/dev/null")).is_err());
    }
}
