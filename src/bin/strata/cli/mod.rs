//! What the subcommands share: finding and opening models, error messages and exit codes, progress bars, interrupts.

pub mod comparison;
pub mod failure;
pub mod interrupt;
pub mod model;
pub mod progress;
pub mod settings;
