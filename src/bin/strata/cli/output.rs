//! Files a command writes: checked before its work begins, removed when it is interrupted.

use super::interrupt;
use anyhow::Result;
use std::path::Path;
use strata_core::output::{self, Existing};

/// Checks the outputs that were named against each other and against the inputs, and sees to it that an interrupt leaves
/// no half-written file.
pub fn check(outputs: &[Option<&Path>], inputs: &[Option<&Path>]) -> Result<()> {
    let outputs: Vec<&Path> = outputs.iter().flatten().copied().collect();
    // What `-` reads may be a file, too.
    let named = |path: &&'static str| Path::new(*path);
    let stdin = ["/dev/stdin"].iter().filter(|path| cfg!(unix) && Path::new(path).exists()).map(named).next();
    let inputs = inputs.iter().flatten().copied();
    let inputs: Vec<&Path> =
        inputs.filter_map(|path| if path == Path::new("-") { stdin } else { Some(path) }).collect();
    // First, because the check tries whether the folders can be written.
    interrupt::end_on_signal();
    output::check(&outputs, &inputs, Existing::Replace)?;
    Ok(())
}
