//! How a command fails: one line plus causes and a hint on stderr, and an exit code.

use std::process::ExitCode;
use strata_core::{checkpoint, compare, convert, engine, gguf, model, output, placement, text, vision};

/// Something was done and failed.
pub const FAILURE: u8 = 1;
/// What the caller gave cannot be used: a file, a flag, a prompt, a picture.
pub const BAD_INPUT: u8 = 2;
/// A comparison went past its threshold.
pub const BEYOND_THRESHOLD: u8 = 3;
/// Interrupted by a signal.
pub const INTERRUPTED: u8 = 130;

/// Bad input found by the command itself: what is wrong and, where there is one, what to do about it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct BadInput {
    message: String,
    hint: Option<String>,
}

impl BadInput {
    /// An error of exit code 2.
    pub fn new(message: impl Into<String>) -> Self {
        BadInput { message: message.into(), hint: None }
    }

    /// The same with a line of advice.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }
}

/// Prints `error` with its causes and hint and returns the exit code that fits it.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if is_broken_pipe(error) {
        return ExitCode::SUCCESS;
    }
    let mut shown = error.to_string();
    strata::errln!("error: {shown}");
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        // Wrapping errors often repeat their cause's text; say it once.
        if !shown.contains(&cause) {
            strata::errln!("  caused by: {cause}");
        }
        shown = cause;
    }
    if let Some(hint) =
        error.chain().find_map(|cause| cause.downcast_ref::<BadInput>().and_then(|bad| bad.hint.as_deref()))
    {
        strata::errln!("  hint: {hint}");
    }
    ExitCode::from(exit_code(error))
}

fn exit_code(error: &anyhow::Error) -> u8 {
    let bad_input = error.chain().any(|cause| {
        cause.is::<BadInput>()
            || cause.is::<gguf::GgufError>()
            || cause.is::<checkpoint::CheckpointError>()
            || cause.is::<convert::ConvertError>()
            || cause.is::<model::ModelError>()
            || cause.is::<text::TextError>()
            || cause.is::<vision::VisionError>()
            || cause.is::<engine::SubmitError>()
            || cause.is::<engine::EngineError>()
            || cause.is::<compare::CompareError>()
            || cause.is::<output::OutputError>()
            || cause.is::<placement::PlanError>()
    });
    if bad_input { BAD_INPUT } else { FAILURE }
}

/// The reader of our output went away (`strata ... | head`): not an error worth a word.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
