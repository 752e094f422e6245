//! The memory plan of an engine: what its slots, checkpoints and buffers take, whether that fits, and how many slots would.

use std::fmt;

use super::free::{FreeMemory, free_memory};
use crate::engine::{EngineError, EngineOptions};
use crate::model::Model;

/// Left free for everything else in the process and the machine.
const RESERVE: u64 = 256 << 20;

/// What an engine takes in memory, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Weights in the mapped file. They are pages of a file: the system drops and reads them again as it needs, so a lack of memory
    /// makes them slow and not impossible.
    pub mapped_weights: u64,
    /// Small weights held in memory.
    pub held_weights: u64,
    /// Slots planned.
    pub slots: usize,
    /// Context of each slot in rows.
    pub ctx: usize,
    /// One slot's caches and states when its context is full.
    pub slot: u64,
    /// One slot's checkpoints when it has all of them.
    pub checkpoints: u64,
    /// Work buffers of the largest window.
    pub work: u64,
    /// The conversation cache in memory.
    pub cache: u64,
    /// Kept free.
    pub reserve: u64,
    /// What the machine has, if it says.
    pub memory: Option<FreeMemory>,
}

/// A plan that does not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{slots} slot{} of {ctx} rows need{} {} and {} are available; {}",
    if *.slots == 1 { "" } else { "s" }, if *.slots == 1 { "s" } else { "" }, size(*.needed), size(*.available), advice(*.slots_that_fit, *.ctx_that_fits)
)]
pub struct PlanError {
    /// Slots asked for.
    pub slots: usize,
    /// Context of each.
    pub ctx: usize,
    /// Bytes needed, the reserve and weights that fit included.
    pub needed: u64,
    /// Bytes available.
    pub available: u64,
    /// How many slots of this context would fit.
    pub slots_that_fit: usize,
    /// What context one slot could have, where not even one of this context fits.
    pub ctx_that_fits: usize,
}

fn advice(slots: usize, ctx: usize) -> String {
    match (slots, ctx) {
        (0, 0) => "not even a small context fits; free some memory".into(),
        (0, ctx) => format!("one slot with a context of {ctx} rows would fit"),
        (1, _) => "1 slot would fit".into(),
        (slots, _) => format!("{slots} slots would fit"),
    }
}

impl MemoryPlan {
    /// Plans an engine with these options for a model on this machine.
    ///
    /// # Errors
    /// When an option is out of its range, or the context is longer than the model was trained for.
    pub fn new(model: &Model, options: &EngineOptions) -> Result<MemoryPlan, EngineError> {
        options.check()?;
        let most = model.config().context;
        if options.ctx > most {
            return Err(EngineError::Context { found: options.ctx, most });
        }
        let slot = |ctx| model.state_bytes(ctx, options.max_window);
        Ok(MemoryPlan::from_sizes(
            &Sizes {
                mapped_weights: model.weight_sizes().mapped,
                held_weights: model.weight_sizes().small,
                slot: slot(options.ctx),
                checkpoint: model.checkpoint_bytes(),
                logits: 4 * model.config().vocab as u64,
                work: model.work_bytes(options.prompt_chunk.max(options.max_window), options.max_window),
                memory: free_memory(),
            },
            options,
        ))
    }

    fn from_sizes(sizes: &Sizes, options: &EngineOptions) -> MemoryPlan {
        MemoryPlan {
            mapped_weights: sizes.mapped_weights,
            held_weights: sizes.held_weights,
            slots: options.slots,
            ctx: options.ctx,
            slot: sizes.slot,
            checkpoints: sizes.checkpoint * options.checkpoints as u64 + sizes.logits,
            work: sizes.work,
            cache: options.cache_ram_bytes,
            reserve: RESERVE,
            memory: sizes.memory,
        }
    }

    /// Bytes besides the mapped weights, without the reserve.
    pub fn over_weights(&self) -> u64 {
        self.fixed() + self.per_slot() * self.slots as u64
    }

    /// Bytes of one slot with its checkpoints.
    pub fn per_slot(&self) -> u64 {
        self.slot + self.checkpoints
    }

    fn fixed(&self) -> u64 {
        self.held_weights + self.work + self.cache
    }

    /// Bytes that weights take of what is available: all of them where they fit. Where they do not, they are read from the file
    /// again and again, and what else is allocated does not change that.
    fn resident_weights(&self) -> u64 {
        let fits = self.memory.is_some_and(|memory| self.mapped_weights <= memory.available);
        if fits { self.mapped_weights } else { 0 }
    }

    /// Whether the weights stay in memory once read.
    pub fn weights_fit(&self) -> bool {
        self.memory.is_none_or(|memory| self.mapped_weights <= memory.available)
    }

    /// How many slots of this context fit; `None` where the system does not say what it has.
    pub fn slots_that_fit(&self) -> Option<usize> {
        let left = self.memory?.available.saturating_sub(self.reserve + self.fixed() + self.resident_weights());
        Some(usize::try_from(left / self.per_slot().max(1)).unwrap_or(usize::MAX))
    }

    /// Refuses a plan that does not fit into what is available.
    ///
    /// # Errors
    /// The numbers, and the count that would fit.
    pub fn check(&self) -> Result<(), PlanError> {
        let (Some(memory), Some(fits)) = (self.memory, self.slots_that_fit()) else { return Ok(()) };
        if fits >= self.slots {
            return Ok(());
        }
        let ctx_that_fits = if fits > 0 {
            self.ctx
        } else {
            // Caches grow with the context, checkpoints do not.
            let left = memory
                .available
                .saturating_sub(self.reserve + self.fixed() + self.resident_weights() + self.checkpoints);
            let rows = (u128::from(left) * self.ctx as u128 / u128::from(self.slot.max(1))) as usize;
            if rows < 256 { 0 } else { rows / 256 * 256 }
        };
        Err(PlanError {
            slots: self.slots,
            ctx: self.ctx,
            needed: self.over_weights() + self.resident_weights() + self.reserve,
            available: memory.available,
            slots_that_fit: fits,
            ctx_that_fits,
        })
    }
}

struct Sizes {
    mapped_weights: u64,
    held_weights: u64,
    slot: u64,
    checkpoint: u64,
    logits: u64,
    work: u64,
    memory: Option<FreeMemory>,
}

impl fmt::Display for MemoryPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "memory: weights {} (mapped file), {} slot{} x {} rows = {} ({} each, {} of it checkpoints), buffers {}, cache {}: {} over the file",
            size(self.mapped_weights),
            self.slots,
            if self.slots == 1 { "" } else { "s" },
            self.ctx,
            size(self.per_slot() * self.slots as u64),
            size(self.per_slot()),
            size(self.checkpoints),
            size(self.work + self.held_weights),
            size(self.cache),
            size(self.over_weights()),
        )?;
        if let Some(memory) = self.memory {
            write!(f, "; {} of {} available", size(memory.available), size(memory.total))?;
        }
        if self.weights_fit() {
            Ok(())
        } else {
            write!(f, "; the weights do not fit and will be read from the file again and again")
        }
    }
}

/// Bytes for people.
fn size(bytes: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
    match UNITS.iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes as f64 / *unit as f64),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn plan(slots: usize, slot: u64, available: u64) -> MemoryPlan {
        let sizes = Sizes {
            mapped_weights: 40 * GIB,
            held_weights: GIB / 8,
            slot,
            checkpoint: GIB / 16,
            logits: 0,
            work: GIB / 8,
            memory: Some(FreeMemory { total: 32 * GIB, available }),
        };
        let options = EngineOptions { slots, ctx: 8192, checkpoints: 8, ..EngineOptions::default() };
        MemoryPlan::from_sizes(&sizes, &options)
    }

    #[test]
    fn what_fits_is_accepted_and_what_does_not_is_refused_with_the_count_that_would() {
        // Half a GiB for buffers and reserve, half per slot for checkpoints.
        assert_eq!(plan(4, GIB / 2, GIB * 9 / 2).check(), Ok(()));
        let error = plan(8, GIB / 2, GIB * 9 / 2).check().unwrap_err();
        assert_eq!((error.slots_that_fit, error.needed), (4, GIB * 17 / 2));
        assert_eq!(error.to_string(), "8 slots of 8192 rows need 8.5 GiB and 4.5 GiB are available; 4 slots would fit");
        let error = plan(1, 2 * GIB, 2 * GIB).check().unwrap_err();
        assert_eq!((error.slots_that_fit, error.ctx_that_fits), (0, 4096));
        assert_eq!(plan(1, 2 * GIB, GIB / 4).check().unwrap_err().ctx_that_fits, 0);
    }

    #[test]
    fn weights_that_fit_are_counted() {
        let plan = MemoryPlan { mapped_weights: 2 * GIB, ..plan(4, GIB / 2, GIB * 9 / 2) };
        assert_eq!(plan.check().unwrap_err().slots_that_fit, 2);
    }

    #[test]
    fn the_plan_says_what_goes_where() {
        let text = plan(4, GIB / 2, 8 * GIB).to_string();
        for part in
            ["40.0 GiB", "4 slots x 8192 rows = 4.0 GiB", "1.0 GiB each", "8.0 GiB of 32.0 GiB available", "do not fit"]
        {
            assert!(text.contains(part), "{text}");
        }
    }
}
