//! Settings of an engine.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Most draft tokens the MTP head proposes in a row.
pub const MAX_MTP_DEPTH: usize = 6;
/// Rows of a decode window unless set otherwise.
pub const MAX_WINDOW: usize = 8;

/// How the MTP head is used for drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MtpSetting {
    /// Not at all.
    Off,
    /// Always this many draft tokens (1..=6), as far as the window has room.
    Depth(usize),
    /// As many as pay on this machine, from measured costs and acceptance; none while they do not pay.
    #[default]
    Auto,
}

/// Settings of the n-gram drafter, which looks up the latest tokens in what the slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramOptions {
    /// Tokens that must match before anything is proposed.
    pub min_match: usize,
    /// A match this long goes before the MTP head.
    pub long_match: usize,
    /// Most tokens to propose.
    pub max_draft: usize,
}

impl Default for NgramOptions {
    fn default() -> Self {
        NgramOptions { min_match: 3, long_match: 6, max_draft: 7 }
    }
}

/// A drafter given from outside. Verification makes every answer independent of what it proposes.
pub trait CustomDrafter: Send + Sync {
    /// Proposes up to `room` tokens that may follow `tokens` (the slot's rows so far; pictures count as `u32::MAX`).
    fn propose(&self, tokens: &[u32], room: usize, out: &mut Vec<u32>);
}

/// What drafting costs, as shares of the time of a window of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DraftCosts {
    /// One more row in a window.
    pub row: f64,
    /// One draft step over the whole vocabulary.
    pub step: f64,
}

/// Called after every decode window with (slot, token ids held, hash of the slot's state).
pub type StateAudit = Arc<dyn Fn(usize, &[u32], u64) + Send + Sync>;

/// Settings of an engine.
#[derive(Clone)]
pub struct EngineOptions {
    /// Conversations open at the same time.
    pub slots: usize,
    /// Context of each slot in rows: what one request really gets.
    pub ctx: usize,
    /// Most rows of a decode window.
    pub max_window: usize,
    /// Rows of a prompt chunk.
    pub prompt_chunk: usize,
    /// Decode windows between two prompt chunks.
    pub read_windows: usize,
    /// Drafts by the MTP head. Ignored if the model has none.
    pub mtp: MtpSetting,
    /// Drafts by n-gram lookup.
    pub ngram: Option<NgramOptions>,
    /// Slots draft also while several decode together.
    pub batch_mtp: bool,
    /// A chain of MTP drafts ends before a token less likely than this; 0 never ends one.
    pub draft_p_min: f32,
    /// Draft with the first N rows of the head only. `None`: all of them with a fixed depth, and with `MtpSetting::Auto` as many
    /// as pay.
    pub draft_vocab: Option<usize>,
    /// Costs that `MtpSetting::Auto` bets on in place of measured ones, so that what it drafts does not depend on the machine.
    pub draft_costs: Option<DraftCosts>,
    /// Measure windows and draft steps before the first request, where that takes a few milliseconds.
    pub warm_up: bool,
    /// Bytes of evicted slot states kept in memory; 0 keeps none.
    pub cache_ram_bytes: u64,
    /// Folder for evicted slot states that outlive the process.
    pub cache_dir: Option<PathBuf>,
    /// Most bytes used in `cache_dir`; the least recently used states go first.
    pub cache_dir_bytes: u64,
    /// Identifies the model file in the disk cache (its SHA-256 or a hash of its metadata and tensor table).
    pub model_id: [u8; 32],
    /// Recurrent checkpoints kept per slot.
    pub checkpoints: usize,
    /// Requests that may wait.
    pub queue_limit: usize,
    /// Events a reader may fall behind before its slot pauses.
    pub event_buffer: usize,
    /// A reader that stays behind this long loses its request.
    pub slow_reader: Duration,
    /// A drafter that replaces the others.
    pub custom_drafter: Option<Arc<dyn CustomDrafter>>,
    /// Observes slot states.
    pub state_audit: Option<StateAudit>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            slots: 1,
            ctx: 4096,
            max_window: MAX_WINDOW,
            prompt_chunk: 512,
            read_windows: 1,
            mtp: MtpSetting::Auto,
            ngram: None,
            batch_mtp: true,
            draft_p_min: 0.0,
            draft_vocab: None,
            draft_costs: None,
            warm_up: true,
            cache_ram_bytes: 0,
            cache_dir: None,
            cache_dir_bytes: 8 << 30,
            model_id: [0; 32],
            checkpoints: 8,
            queue_limit: 256,
            event_buffer: 1024,
            slow_reader: Duration::from_secs(60),
            custom_drafter: None,
            state_audit: None,
        }
    }
}

impl EngineOptions {
    /// Checks every setting against its range and returns the first that is out of it.
    pub fn check(&self) -> Result<(), EngineError> {
        let bad = |name: &'static str, found: String, expected: &'static str| {
            Err(EngineError::Option { name, found, expected })
        };
        if self.slots == 0 || self.slots > 1024 {
            return bad("--parallel", self.slots.to_string(), "1 to 1024");
        }
        if self.ctx < 2 {
            return bad("--ctx-size", self.ctx.to_string(), "at least 2 tokens");
        }
        if self.max_window == 0 || self.max_window > 256 {
            return bad("max_window", self.max_window.to_string(), "1 to 256 rows");
        }
        if self.prompt_chunk == 0 {
            return bad("--prefill", self.prompt_chunk.to_string(), "at least 1 row");
        }
        if self.read_windows == 0 {
            return bad("--read-windows", self.read_windows.to_string(), "at least 1 window");
        }
        if let MtpSetting::Depth(depth) = self.mtp
            && (depth == 0 || depth > MAX_MTP_DEPTH)
        {
            return bad("--mtp", depth.to_string(), "1 to 6 (use off for 0)");
        }
        if !(0.0..=1.0).contains(&self.draft_p_min) {
            return bad("--draft-p-min", self.draft_p_min.to_string(), "0 to 1");
        }
        if self.draft_vocab == Some(0) {
            return bad("--draft-vocab", "0".into(), "at least 1 token");
        }
        if let Some(ngram) = &self.ngram
            && (ngram.min_match == 0 || ngram.max_draft == 0)
        {
            return bad("--draft", format!("{ngram:?}"), "a match of at least 1 token and at least 1 draft");
        }
        if self.event_buffer == 0 {
            return bad("event_buffer", "0".into(), "at least 1 event");
        }
        Ok(())
    }
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A setting is out of its range.
    #[error("{name} is {found}, expected {expected}")]
    Option {
        /// Name of the option: its flag on the command line, where there is one.
        name: &'static str,
        /// Its value.
        found: String,
        /// Its range.
        expected: &'static str,
    },
    /// A longer context than the model was trained for.
    #[error("the context (--ctx-size) is {found} tokens, but the model was trained for {most}")]
    Context {
        /// What was asked for.
        found: usize,
        /// What the model has.
        most: usize,
    },
    /// The model could not make the slots' states.
    #[error("slot {slot}: {cause}")]
    State {
        /// Slot index.
        slot: usize,
        /// What the model said.
        cause: String,
    },
    /// The cache folder cannot be used.
    #[error("cache folder {path}: {cause}")]
    CacheFolder {
        /// The folder.
        path: String,
        /// What went wrong.
        cause: std::io::Error,
    },
    /// The engine thread could not be started.
    #[error("cannot start the engine thread: {0}")]
    Thread(std::io::Error),
}
