//! `strata serve` with the bundled model, over real sockets.

mod api;
mod batch;
mod client;
mod errors;
#[path = "../common/hostile_pictures.rs"]
mod hostile_pictures;
mod pictures;
mod soak;
mod tools;
mod trouble;
