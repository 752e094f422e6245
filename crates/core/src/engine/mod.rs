//! The engine: slots that hold conversations, the scheduler that fills windows from them, drafts, sampling and the
//! conversation cache. One thread runs it; callers talk to it through an [`EngineHandle`].

mod cache;
mod core;
mod decoding;
mod draft;
mod drafting;
mod handle;
mod held;
mod job;
mod options;
mod reading;
mod request;
mod sampler;
mod slot;
mod start;
mod stop_strings;
mod stream;
mod target;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod toy;
mod warm_up;

pub use handle::{CacheStatus, DraftStatus, EngineHandle, EngineStatus, EngineTotals, SlotStatus};
pub use job::NOTHING_ALLOWED;
pub use options::{
    CustomDrafter, DraftCosts, EngineError, EngineOptions, MAX_MTP_DEPTH, MAX_WINDOW, MtpSetting, NgramOptions,
    StateAudit,
};
pub use request::{
    CachePrompt, Event, FinishReason, PhaseTimes, Prompt, PromptItem, Request, RequestStats, Sampling, SubmitError,
    TokenLogprobs,
};
pub use start::Engine;
pub use stream::{RecvEvent, RequestStream};
