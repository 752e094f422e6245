//! Starting an engine: checks the options, makes the slots' states, and starts the thread.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::core::Core;
use super::handle::{EngineHandle, EngineShared};
use super::options::{EngineError, EngineOptions};
use super::target::Target;
use crate::model::Model;
use crate::text::Tokenizer;

/// The engine of a model.
pub struct Engine;

impl Engine {
    /// Starts an engine: makes the slots and starts its thread.
    ///
    /// # Errors
    /// Options out of range, slots the model cannot make, a cache folder that cannot be used.
    pub fn start(
        model: Arc<Model>,
        tokenizer: Arc<Tokenizer>,
        options: EngineOptions,
    ) -> Result<EngineHandle, EngineError> {
        start_on(model, tokenizer, options)
    }
}

/// Starts an engine over any target.
pub(crate) fn start_on<T: Target>(
    target: Arc<T>,
    tokenizer: Arc<Tokenizer>,
    options: EngineOptions,
) -> Result<EngineHandle, EngineError> {
    let shared =
        EngineShared::new(options.ctx, target.vocab(), target.hidden(), options.queue_limit, options.event_buffer);
    let shared = Arc::new(shared);
    let mut core = Core::new(target, tokenizer, options, shared.clone())?;
    core.publish_now();
    let ended = shared.clone();
    let body = move || {
        // Whatever a fault in the engine itself leaves behind, callers are told instead of waiting for ever.
        let outcome = catch_unwind(AssertUnwindSafe(|| core.run()));
        let queue = {
            let mut inbox = ended.lock();
            inbox.ended = true;
            inbox.status.stopping = true;
            std::mem::take(&mut inbox.queue)
        };
        ended.wake_all();
        drop(queue);
        drop(core);
        if let Err(payload) = outcome {
            std::panic::resume_unwind(payload);
        }
    };
    let thread = std::thread::Builder::new().name("strata-engine".into()).spawn(body).map_err(EngineError::Thread)?;
    shared.set_thread(thread);
    Ok(EngineHandle::new(shared))
}
