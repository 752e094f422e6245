//! Types of other modules that requests carry.

pub use crate::text::Grammar;
pub use crate::vision::PictureRows;
