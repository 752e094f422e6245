//! Files a command writes: checked before its work begins, removed when it is interrupted.

use super::interrupt;
use anyhow::Result;
use std::path::{Path, PathBuf};
use strata_core::output::{self, Existing};

/// Checks the outputs that were named against each other and against the inputs, and sees to it that an interrupt leaves
/// no half-written file.
pub fn check(outputs: &[Option<&Path>], inputs: &[Option<&Path>]) -> Result<()> {
    let outputs: Vec<&Path> = outputs.iter().flatten().copied().collect();
    // What `-` reads may be a file, too.
    let file_of =
        |path: &'_ Path| if path == Path::new("-") { Path::new("/dev/stdin").to_path_buf() } else { path.into() };
    let inputs: Vec<PathBuf> = inputs.iter().flatten().map(|path| file_of(path)).collect();
    let inputs: Vec<&Path> = inputs.iter().map(PathBuf::as_path).collect();
    // First, because the check tries whether the folders can be written.
    interrupt::end_on_signal();
    output::check(&outputs, &inputs, Existing::Replace)?;
    Ok(())
}
