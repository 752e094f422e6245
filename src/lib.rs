//! The HTTP server of strata (the `strata` binary's `serve` command).

pub mod server;
