//! What the `strata` binary is made of besides its subcommands: the HTTP server and the bundled model.

#![warn(clippy::print_stdout, clippy::print_stderr)]

/// Prints a line to stderr. Unlike `eprintln!` it does not panic where stderr cannot be written (a full disk, a closed
/// pipe): what is said there is by the way, and no reason to fail.
#[macro_export]
macro_rules! errln {
    ($($line:tt)*) => {{
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), $($line)*);
    }};
}

pub mod bundled;
pub mod server;
