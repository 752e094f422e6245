//! Files a command writes: checked before its work begins, removed when it is interrupted.

use super::interrupt;
use anyhow::Result;
use std::path::Path;
use strata_core::output::{self, Existing};

/// Checks the outputs that were named against each other and against the inputs, and sees to it that an interrupt leaves
/// no half-written file.
pub fn check(outputs: &[Option<&Path>], inputs: &[Option<&Path>]) -> Result<()> {
    let outputs: Vec<&Path> = outputs.iter().flatten().copied().collect();
    let inputs: Vec<&Path> = inputs.iter().flatten().copied().collect();
    output::check(&outputs, &inputs, Existing::Replace)?;
    interrupt::end_on_signal();
    Ok(())
}
