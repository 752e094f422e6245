//! `strata serve` with the bundled model, over real sockets.

mod api;
mod batch;
mod client;
mod errors;
mod pictures;
mod soak;
mod tools;
mod trouble;
