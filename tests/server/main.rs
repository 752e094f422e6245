//! `strata serve` with the bundled model, over real sockets.

mod api;
mod batch;
mod client;
mod errors;
mod tools;
mod trouble;
