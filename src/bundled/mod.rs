//! The tiny model that is compiled into the binary (feature `bundled-model`), so that an installed strata can show what it does anywhere.

#[cfg(not(feature = "bundled-model"))]
mod disabled;
#[cfg(feature = "bundled-model")]
mod enabled;

#[cfg(not(feature = "bundled-model"))]
pub use disabled::{encoder, model};
#[cfg(feature = "bundled-model")]
pub use enabled::{encoder, model};

/// What the bundled model is called in messages.
pub const NAME: &str = "the bundled tiny model";
