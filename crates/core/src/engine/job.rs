//! A request being served: from its logits to its events. Knows nothing of windows or of other requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::draft::{Acceptance, Source};
use super::handle::Queued;
use super::held::PromptRows;
use super::options::MtpSetting;
use super::request::{CachePrompt, Event, FinishReason, RequestStats, TokenLogprobs};
use super::sampler::{Constraint, Sampler};
use super::stop_strings::{Released, StopStrings};
use super::stream::EventSender;
use crate::model::RowInput;
use crate::text::{Detokenizer, Tokenizer};

/// A request that has a slot.
pub(crate) struct Job {
    pub(crate) id: u64,
    sender: EventSender,
    pub(crate) prompt: PromptRows,
    /// Tokens chosen so far. All but the last are in the slot's state while decoding.
    pub(crate) generated: Vec<u32>,
    sampler: Sampler,
    constraint: Constraint,
    detokenizer: Detokenizer,
    stops: StopStrings,
    /// Ids that end the answer.
    ends: Vec<u32>,
    /// Most tokens to generate.
    most: usize,
    /// Whether `most` comes from the context and not from the request.
    context_bound: bool,
    pub(crate) cache: CachePrompt,
    pub(crate) mtp: Option<MtpSetting>,
    /// Rows at which checkpoints are to be taken while the prompt is read, ascending.
    pub(crate) checkpoint_rows: Vec<usize>,
    /// Logits of the prompt's last row, where they were kept from an earlier answer.
    pub(crate) first_logits: Option<Arc<[f32]>>,
    pub(crate) stats: RequestStats,
    /// Acceptance of the head's and of the looked-up drafts in this request.
    pub(crate) seen_mtp: Acceptance,
    pub(crate) seen_lookup: Acceptance,
    /// When the reader was last woken, and whether something was posted since.
    told: Instant,
    untold: bool,
    submitted: Instant,
    admitted: Instant,
    first_token: Option<Instant>,
    /// When the last token came, for the pauses a reader sees.
    pub(crate) last_window: Option<Instant>,
    /// Since when the reader is behind.
    pub(crate) paused_since: Option<Instant>,
    /// The last window this request was in failed; it goes on alone until a window succeeds.
    pub(crate) suspect: bool,
    /// Chunks other prompts got while this one waited.
    pub(crate) passed_over: u32,
}

/// Why a request fails whose own rules contradict each other.
pub const NOTHING_ALLOWED: &str = "no token is allowed by the grammar and the logit bias together";

/// Observations of acceptance that count within a request.
const MEMORY: f64 = 40.0;
/// Windows shorter than this let a reader wait a little for several tokens at once, for at most the time after it.
const BRIEF_WINDOW: Duration = Duration::from_millis(2);
const READER_WAITS: Duration = Duration::from_millis(4);

impl Job {
    pub(crate) fn new(queued: Queued, slot: usize, ctx: usize, tokenizer: &Arc<Tokenizer>) -> Self {
        let Queued { id, request, sender, submitted } = queued;
        let prompt = PromptRows::new(&request.prompt);
        let admitted = Instant::now();
        let room = ctx - prompt.rows.len();
        let model_ends = tokenizer.eos_ids();
        let (mut ends, forbidden) =
            if request.ignore_eos { (Vec::new(), model_ends) } else { (model_ends.to_vec(), &[][..]) };
        ends.extend(&request.stop_token_ids);
        let stats = RequestStats {
            slot,
            prompt_rows: prompt.rows.len(),
            queue_s: (admitted - submitted).as_secs_f64(),
            ..RequestStats::default()
        };
        Job {
            id,
            sampler: Sampler::new(&request.sampling, request.logprobs, prompt.rows.tokens(), forbidden),
            constraint: Constraint::new(
                request.grammar,
                request.starts_in_reasoning,
                request.thinking_budget,
                tokenizer,
            ),
            detokenizer: Detokenizer::new(tokenizer.clone(), request.show_specials),
            stops: StopStrings::new(&request.stop),
            ends,
            most: request.max_tokens.map_or(room, |most| most.min(room)),
            context_bound: request.max_tokens.is_none_or(|most| most > room),
            cache: request.cache_prompt,
            mtp: request.mtp,
            checkpoint_rows: Vec::new(),
            first_logits: None,
            stats,
            seen_mtp: Acceptance::new(MEMORY),
            seen_lookup: Acceptance::new(MEMORY),
            told: admitted,
            untold: false,
            submitted,
            admitted,
            first_token: None,
            last_window: None,
            paused_since: None,
            suspect: false,
            passed_over: 0,
            generated: Vec::new(),
            prompt,
            sender,
        }
    }

    /// Tells the caller that the request has a slot.
    pub(crate) fn start(&mut self, reused_rows: usize) {
        self.stats.reused_rows = reused_rows;
        self.sender.send(Event::Started { prompt_rows: self.stats.prompt_rows, reused_rows });
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.sender.is_cancelled()
    }

    pub(crate) fn reader_is_behind(&self) -> bool {
        self.sender.is_full()
    }

    /// Rows the state must hold before the next token can be chosen or fed.
    pub(crate) fn rows_to_read(&self) -> usize {
        self.prompt.rows.len() + self.generated.len().saturating_sub(1)
    }

    /// What row `row` feeds to the first layer.
    pub(crate) fn input(&self, row: usize) -> RowInput {
        match row.checked_sub(self.prompt.rows.len()) {
            None => self.prompt.input(row),
            Some(index) => RowInput::Token(self.generated[index]),
        }
    }

    /// Rope position of row `row`.
    pub(crate) fn position(&self, row: usize) -> [u32; 3] {
        self.prompt.rows.position(row)
    }

    /// Token id of row `row`.
    pub(crate) fn token(&self, row: usize) -> u32 {
        match row.checked_sub(self.prompt.rows.len()) {
            None => self.prompt.rows.tokens()[row],
            Some(index) => self.generated[index],
        }
    }

    /// Tokens that may still be generated.
    pub(crate) fn left(&self) -> usize {
        self.most - self.generated.len().min(self.most)
    }

    /// Chooses the next token from a row of logits and tells the caller. `Some` when the answer is complete. The logits are
    /// left as they were.
    pub(crate) fn advance(&mut self, logits: &mut [f32]) -> Result<Option<FinishReason>, String> {
        if self.left() == 0 {
            return Ok(Some(self.length_reason()));
        }
        let position = self.prompt.rows.len() + self.generated.len();
        let forced = self.constraint.forced();
        let (id, logprobs) = match forced {
            Some(id) => (id, self.sampler.logprobs().map(|rivals| self.sampler.report(logits, id, rivals))),
            None => {
                let forbidden = self.constraint.forbidden();
                let mask = self.constraint.mask()?;
                let choice = match (mask, forbidden) {
                    (None, None) => self.sampler.choose(logits, position, None),
                    (None, Some(never)) => self.sampler.choose(logits, position, Some(&|id| id != never)),
                    (Some(mask), _) => self.sampler.choose(logits, position, Some(&|id| mask.allows(id))),
                };
                let choice = choice.ok_or_else(|| match logits.iter().any(|logit| logit.is_finite()) {
                    true => NOTHING_ALLOWED.to_owned(),
                    false => "the model's logits are not finite: a weight in the file is damaged".to_owned(),
                })?;
                (choice.id, choice.logprobs)
            }
        };
        self.sampler.accept(id);
        let is_end = self.ends.contains(&id);
        if !is_end {
            self.constraint.accept(id)?;
        }
        Ok(self.emit(id, is_end, logprobs))
    }

    /// The token this request would choose from the draft head's logits, for the draft at `level` of a chain: with its own bias,
    /// penalties and draw, so that head and trunk agree as often as they can.
    pub(crate) fn guess(&mut self, logits: &mut [f32], level: usize) -> Option<u32> {
        self.sampler.pick_from(logits, self.prompt.rows.len() + self.generated.len() + level, None)
    }

    fn emit(&mut self, id: u32, is_end: bool, logprobs: Option<TokenLogprobs>) -> Option<FinishReason> {
        self.generated.push(id);
        self.stats.generated += 1;
        if self.first_token.is_none() {
            let now = Instant::now();
            self.first_token = Some(now);
            self.stats.ttft_s = (now - self.submitted).as_secs_f64();
            self.stats.prompt_s = (now - self.admitted).as_secs_f64();
        }
        let mut finish = is_end.then_some(FinishReason::EndToken(id));
        let text = match self.stops.push(self.detokenizer.push(id)) {
            Released::Text(text) => text,
            Released::Stopped(text, stop) => {
                finish.get_or_insert(FinishReason::StopString(stop));
                text
            }
        };
        self.sender.post(Event::Token { id, text, logprobs });
        self.untold = true;
        if finish.is_none() && self.constraint.is_complete() {
            finish = Some(FinishReason::GrammarEnd);
        }
        if finish.is_none() && self.left() == 0 {
            finish = Some(self.length_reason());
        }
        finish
    }

    /// Wakes the reader for the tokens of the last windows, unless the next will come at once: a thread that wakes takes its core
    /// from the computation, and with tiny models for longer than a token takes. `window` is how long the last window took;
    /// `None` when it may be a while until the next.
    pub(crate) fn tell(&mut self, window: Option<Duration>) {
        if !self.untold {
            return;
        }
        let now = Instant::now();
        if window.is_none_or(|window| window > BRIEF_WINDOW) || now - self.told > READER_WAITS {
            self.told = now;
            self.untold = false;
            self.sender.wake();
        }
    }

    fn length_reason(&self) -> FinishReason {
        if self.context_bound { FinishReason::ContextFull } else { FinishReason::Length }
    }

    /// Takes note of a window's drafts from `source`: `accepted` of `drafted`.
    pub(crate) fn note_drafts(&mut self, source: Source, drafted: usize, accepted: usize) {
        let stats = &mut self.stats;
        stats.drafted += drafted;
        stats.accepted += accepted;
        if stats.accepted_per_position.len() < drafted {
            stats.accepted_per_position.resize(drafted, (0, 0));
        }
        for (position, (tried, right)) in stats.accepted_per_position.iter_mut().take(drafted).enumerate() {
            *tried += 1;
            *right += u32::from(position < accepted);
        }
        match source {
            Source::Mtp => self.seen_mtp.observe(drafted, accepted),
            Source::Ngram | Source::Custom => {
                stats.drafted_ngram += drafted;
                stats.accepted_ngram += accepted;
                self.seen_lookup.observe(drafted, accepted);
            }
        }
    }

    /// Ends the request with its answer.
    pub(crate) fn finish(mut self, reason: FinishReason) {
        let mut text = String::new();
        let mut reason = reason;
        if !matches!(reason, FinishReason::StopString(_)) {
            match self.stops.push(self.detokenizer.finish()) {
                Released::Text(rest) => text = rest + &self.stops.finish(),
                Released::Stopped(rest, stop) => {
                    text = rest;
                    reason = FinishReason::StopString(stop);
                }
            }
        }
        if let Some(first) = self.first_token {
            self.stats.decode_s = first.elapsed().as_secs_f64();
        }
        self.sender.send(Event::Finished { reason, text, stats: self.stats });
    }

    /// Ends the request with an error.
    pub(crate) fn fail(self, message: String) {
        self.sender.send(Event::Failed(message));
    }
}
