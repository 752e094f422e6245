//! Block formats and device operations of strata.
//!
//! This crate knows how weights are stored ([`format`]) and how to compute with them on a device ([`Device`], [`cpu`]).
//! It knows nothing of models, files or requests.

pub mod cpu;
pub mod device;
pub mod format;
mod matrix;

pub use device::{Device, DeviceError};
pub use matrix::Matrix;
