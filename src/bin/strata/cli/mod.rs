//! What the subcommands share: finding and opening models, error messages and exit codes, outputs, progress bars,
//! interrupts.

pub mod allocator;
pub mod comparison;
pub mod failure;
pub mod input;
pub mod interrupt;
pub mod model;
pub mod output;
pub mod progress;
pub mod settings;
pub mod wording;

/// Prints a line to stdout. Unlike `println!` it gives an error where stdout cannot be written, and does not panic.
macro_rules! outln {
    ($($line:tt)*) => {{
        use std::io::Write;
        writeln!(std::io::stdout(), $($line)*)?
    }};
}
pub(crate) use outln;

/// Prints text to stdout as it stands; gives an error as [`outln`] does.
macro_rules! out {
    ($($text:tt)*) => {{
        use std::io::Write;
        write!(std::io::stdout(), $($text)*)?
    }};
}
pub(crate) use out;
