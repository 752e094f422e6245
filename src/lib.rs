//! What the `strata` binary is made of besides its subcommands: the HTTP server and the bundled model.

pub mod bundled;
pub mod server;
