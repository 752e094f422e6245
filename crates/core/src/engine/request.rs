//! What a caller asks of the engine and what it hears back: requests, sampling settings, events and the numbers of a finished request.

use std::sync::Arc;
use std::time::Duration;

use super::options::MtpSetting;
use crate::text::grammar::Grammar;
use crate::text::{ChatPrompt, PromptPiece};
use crate::vision::PictureRows;

/// One piece of a prompt.
#[derive(Clone, Debug)]
pub enum PromptItem {
    /// Token ids, one row each.
    Tokens(Vec<u32>),
    /// An encoded picture, one row per merged block. The vision start and end tokens belong to the neighbouring `Tokens`.
    Picture(Arc<PictureRows>),
}

/// What the model reads before it answers.
#[derive(Clone, Debug, Default)]
pub struct Prompt {
    /// Tokens and pictures in order.
    pub pieces: Vec<PromptItem>,
    /// Row index at which each turn starts (ascending). States are kept there, so that a conversation edited in its last turn
    /// is not read again from the beginning.
    pub turn_starts: Vec<usize>,
}

impl Prompt {
    /// A prompt of tokens alone, without turn borders.
    pub fn tokens(ids: Vec<u32>) -> Self {
        Prompt { pieces: vec![PromptItem::Tokens(ids)], turn_starts: Vec::new() }
    }

    /// The prompt of an encoded conversation: its pictures' rows stand where the template put them.
    ///
    /// # Errors
    /// The index of a picture that the conversation names but `pictures` lacks.
    pub fn from_chat(chat: &ChatPrompt, pictures: &[Arc<PictureRows>]) -> Result<Self, usize> {
        let rows: Vec<usize> = pictures.iter().map(|picture| picture.rows()).collect();
        let piece = |piece: &PromptPiece| match piece {
            PromptPiece::Tokens(ids) => Ok(PromptItem::Tokens(ids.clone())),
            PromptPiece::Picture(index) => pictures.get(*index).cloned().map(PromptItem::Picture).ok_or(*index),
        };
        Ok(Prompt {
            pieces: chat.pieces.iter().map(piece).collect::<Result<_, _>>()?,
            turn_starts: chat.turn_rows(&rows),
        })
    }

    /// Number of rows the prompt takes in the cache.
    pub fn rows(&self) -> usize {
        self.pieces
            .iter()
            .map(|piece| match piece {
                PromptItem::Tokens(ids) => ids.len(),
                PromptItem::Picture(picture) => picture.grid.0 as usize * picture.grid.1 as usize,
            })
            .sum()
    }
}

/// How the next token is chosen from the logits. The default is greedy with everything else neutral.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 picks the most likely token.
    pub temperature: f32,
    /// Keep the k most likely tokens; 0 keeps all.
    pub top_k: usize,
    /// Keep the most likely tokens whose probabilities reach this sum; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens less likely than this share of the most likely one; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens among the last `repeat_last_n` rows; 1 is neutral.
    pub repeat_penalty: f32,
    /// How many of the latest tokens (prompt and answer) the repetition penalty looks at; `usize::MAX` is all.
    pub repeat_last_n: usize,
    /// Subtracted once from the logit of every token already generated.
    pub presence_penalty: f32,
    /// Subtracted from the logit of a generated token for each time it was generated.
    pub frequency_penalty: f32,
    /// Added to the logits of these tokens; `f32::NEG_INFINITY` forbids a token.
    pub logit_bias: Vec<(u32, f32)>,
    /// Key of the counter-based generator. The draw for a token depends on the seed and the token's row index alone.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_last_n: 64,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
        }
    }
}

/// A request for one continuation.
#[derive(Clone, Debug, Default)]
pub struct Request {
    /// What to read first.
    pub prompt: Prompt,
    /// How to choose tokens.
    pub sampling: Sampling,
    /// Most tokens to generate; `None` goes on to the end of the context.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer; they are not part of it. Matched across token borders.
    pub stop: Vec<String>,
    /// Further token ids that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Do not end at the model's own end tokens.
    pub ignore_eos: bool,
    /// Report log-probabilities: of the chosen token and of this many most likely ones.
    pub logprobs: Option<u8>,
    /// Constrains the answer from its first token on.
    pub grammar: Option<Grammar>,
    /// The answer starts inside a reasoning block (the template opened it).
    pub starts_in_reasoning: bool,
    /// Most tokens of reasoning, after which the block is closed by force.
    pub thinking_budget: Option<usize>,
    /// Use what slots and caches hold, and keep this request's state for later ones. On by default.
    pub cache_prompt: CachePrompt,
    /// Overrides the engine's draft setting for this request. `Off` is always honoured; a depth is cut to what the engine allows.
    pub mtp: Option<MtpSetting>,
    /// Show control tokens in the text.
    pub show_specials: bool,
}

/// Whether a request may start from held state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CachePrompt {
    /// Reuse the longest held start and keep the state afterwards.
    #[default]
    Yes,
    /// Read everything again and forget it afterwards.
    No,
}

/// Log-probability of a chosen token and of its rivals (natural logarithm, after penalties and bias, before temperature and filters).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log-probability of the chosen token.
    pub logprob: f32,
    /// The most likely tokens, most likely first, with their log-probabilities.
    pub top: Vec<(u32, f32)>,
}

/// Why an answer ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token of the model or of the request.
    EndToken(u32),
    /// One of the request's stop strings.
    StopString(String),
    /// The grammar allows nothing more.
    GrammarEnd,
    /// `max_tokens` were generated.
    Length,
    /// The slot's context is full.
    ContextFull,
    /// The caller dropped the stream, or stopped reading it for too long.
    Cancelled,
    /// The engine is stopping.
    Stopping,
}

/// What a request hears, in this order: `Started`, any number of `Token`, then one `Finished` or `Failed`.
// One large `Finished` per request costs less than a box at every reader.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Debug)]
pub enum Event {
    /// The request has a slot.
    Started {
        /// Rows of the prompt.
        prompt_rows: usize,
        /// How many of them were already held.
        reused_rows: usize,
    },
    /// One more token. Its text may come with a later event: incomplete characters and possible stop strings are held back.
    Token {
        /// Token id.
        id: u32,
        /// Valid UTF-8, possibly empty.
        text: String,
        /// Present if asked for.
        logprobs: Option<TokenLogprobs>,
    },
    /// The answer is complete.
    Finished {
        /// Why it ended.
        reason: FinishReason,
        /// Text that was still held back.
        text: String,
        /// Numbers of this request.
        stats: RequestStats,
    },
    /// The request failed; the engine and other requests go on.
    Failed(String),
}

/// Time spent per phase of decoding, of this request's share of each window.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PhaseTimes {
    /// Proposing draft tokens.
    pub draft: Duration,
    /// Trunk forward of decode and verify windows.
    pub verify: Duration,
    /// Committing accepted rows.
    pub commit: Duration,
    /// Choosing tokens.
    pub sample: Duration,
}

/// Numbers of one request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestStats {
    /// Slot that served the request.
    pub slot: usize,
    /// Rows of the prompt.
    pub prompt_rows: usize,
    /// Prompt rows that were already held.
    pub reused_rows: usize,
    /// Tokens generated, the end token included.
    pub generated: usize,
    /// Seconds waited in the queue.
    pub queue_s: f64,
    /// Seconds from getting a slot to the first token's logits.
    pub prompt_s: f64,
    /// Seconds from the first token to the last.
    pub decode_s: f64,
    /// Seconds from submission to the first token.
    pub ttft_s: f64,
    /// Longest prompt chunk of this request, in seconds.
    pub longest_chunk_s: f64,
    /// Longest time between two windows of this request while it decoded, in seconds.
    pub longest_pause_s: f64,
    /// Decode windows this request took part in.
    pub windows: usize,
    /// Draft tokens verified.
    pub drafted: usize,
    /// Draft tokens accepted.
    pub accepted: usize,
    /// Per draft position: (drafted, accepted).
    pub accepted_per_position: Vec<(u32, u32)>,
    /// Draft tokens that came from the n-gram lookup.
    pub drafted_ngram: usize,
    /// Accepted draft tokens that came from the n-gram lookup.
    pub accepted_ngram: usize,
    /// Decode time by phase.
    pub phases: PhaseTimes,
    /// A warning about drafts, when their acceptance is implausible for what a draft step costs.
    pub draft_warning: Option<String>,
}

impl RequestStats {
    /// Mean tokens generated per decode window.
    pub fn tokens_per_window(&self) -> f64 {
        if self.windows == 0 { 0.0 } else { (self.generated.saturating_sub(1)) as f64 / self.windows as f64 }
    }

    /// Share of draft tokens accepted, if any were drafted.
    pub fn acceptance(&self) -> Option<f64> {
        (self.drafted > 0).then(|| self.accepted as f64 / self.drafted as f64)
    }
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// The queue is at its limit.
    #[error("the queue is full: {queued} requests are waiting and the limit is {limit}")]
    QueueFull {
        /// Requests waiting.
        queued: usize,
        /// Limit of the queue.
        limit: usize,
    },
    /// The prompt leaves no room for an answer.
    #[error(
        "the prompt has {rows} tokens, but the context of one request (-c, --ctx-size) is {ctx} and the answer needs at least one"
    )]
    PromptTooLong {
        /// Rows of the prompt.
        rows: usize,
        /// Context of one slot.
        ctx: usize,
    },
    /// The engine is stopping or has stopped.
    #[error("the engine is stopping")]
    Stopping,
    /// A setting of the request is out of its range.
    #[error("{0}")]
    Invalid(String),
}
