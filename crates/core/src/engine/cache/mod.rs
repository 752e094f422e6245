//! The conversation cache: checkpoints within slots, and states of evicted conversations in memory and on disk.

mod bytes;
mod checkpoints;
mod disk;
mod saved;
mod store;

pub(crate) use checkpoints::{Checkpoints, Kept, Point, reusable, wanted};
pub(crate) use store::{Source, StateStore};
