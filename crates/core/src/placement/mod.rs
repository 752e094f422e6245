//! What everything takes in memory, computed before anything is allocated: weights, slots, work buffers and a reserve, against
//! what the machine has free.

mod free;
mod plan;

pub use free::{FreeMemory, free_memory};
pub use plan::{MemoryPlan, PlanError};
