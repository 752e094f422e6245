//! The engine thread: takes requests in, gives them slots, and alternates prompt chunks with decode windows.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cache::{Source as StartSource, StateStore, wanted};
use super::draft::{DraftPolicy, DraftVocabulary, Level, MtpFeed, NgramIndex};
use super::handle::{DraftStatus, EngineShared, EngineTotals, Queued, SlotStatus};
use super::held::{Held, PromptRows};
use super::job::Job;
use super::options::{EngineError, EngineOptions, MtpSetting};
use super::request::{CachePrompt, Event, FinishReason, Request};
use super::slot::Slot;
use super::target::Target;
use crate::model::{StepOutput, Window};
use crate::text::Tokenizer;

/// The engine's own side of everything.
pub(crate) struct Core<T: Target> {
    pub(crate) target: Arc<T>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) options: EngineOptions,
    pub(crate) shared: Arc<EngineShared>,
    pub(crate) slots: Vec<Slot<T>>,
    pub(crate) store: StateStore,
    pub(crate) policy: DraftPolicy,
    pub(crate) totals: EngineTotals,
    /// Buffers kept from step to step.
    pub(crate) window: Window,
    pub(crate) out: StepOutput,
    pub(crate) draft_out: StepOutput,
    pub(crate) drafts: Vec<Vec<u32>>,
    /// How sure the head is of each, where it was asked.
    pub(crate) confidences: Vec<Vec<Level>>,
    pub(crate) depths: Vec<usize>,
    /// Chains of drafts that ended before their depth because the head was unsure.
    pub(crate) ended_unsure: u64,
    /// Slot from which the next decode window is filled.
    pub(crate) next_slot: usize,
    /// Decode windows since the last prompt chunk.
    windows_since_chunk: usize,
    admissions: u64,
    status_at: Option<Instant>,
    status_stale: bool,
}

/// Latest tokens of a prompt that tell which tokens its answer will use.
const PROMPT_SAMPLE: usize = 256;
/// Seating that takes longer than this, because states are copied, stored or loaded for it, is work like a prompt chunk: the slots
/// that decode get their windows before the next.
const LIGHT_SEATING: Duration = Duration::from_millis(2);
/// How often a busy engine publishes its status.
const STATUS_EVERY: Duration = Duration::from_millis(20);
/// How long an engine with nothing to do sleeps when nothing wakes it.
const IDLE: Duration = Duration::from_secs(5);
/// How long it sleeps when all its requests wait for their readers.
const PAUSED: Duration = Duration::from_millis(50);

impl<T: Target> Core<T> {
    pub(crate) fn new(
        target: Arc<T>,
        tokenizer: Arc<Tokenizer>,
        mut options: EngineOptions,
        shared: Arc<EngineShared>,
    ) -> Result<Self, EngineError> {
        options.check()?;
        if !target.has_mtp() {
            options.mtp = MtpSetting::Off;
        }
        let uses_mtp = options.mtp != MtpSetting::Off && options.custom_drafter.is_none();
        let mut slots = Vec::with_capacity(options.slots);
        for index in 0..options.slots {
            slots.push(Slot {
                index,
                state: target.new_state(options.ctx).map_err(|cause| EngineError::State { slot: index, cause })?,
                held: Held::default(),
                checkpoints: super::cache::Checkpoints::new(options.checkpoints),
                feed: uses_mtp.then(|| MtpFeed::new(target.hidden())),
                ngrams: options.ngram.map(NgramIndex::new),
                job: None,
                used: 0,
            });
        }
        Ok(Core {
            store: StateStore::open(&options)?,
            policy: DraftPolicy::new(
                options.max_window,
                DraftVocabulary::new(target.vocab(), target.draft_head_share()),
            )
            .assuming(options.draft_costs),
            target,
            tokenizer,
            shared,
            slots,
            totals: EngineTotals::default(),
            window: Window::default(),
            out: StepOutput::default(),
            draft_out: StepOutput::default(),
            drafts: Vec::new(),
            confidences: Vec::new(),
            depths: Vec::new(),
            ended_unsure: 0,
            next_slot: 0,
            windows_since_chunk: 0,
            admissions: 0,
            status_at: None,
            status_stale: true,
            options,
        })
    }

    /// Runs until the engine is stopped.
    pub(crate) fn run(&mut self) {
        self.warm_up();
        self.shared.set_ready();
        loop {
            self.drop_cancelled();
            self.admit();
            self.publish();
            if self.ended() {
                break;
            }
            let reading = self.next_to_read();
            let decodes = self.decodes();
            match reading {
                Some(index) if !decodes || self.windows_since_chunk >= self.options.read_windows => {
                    self.windows_since_chunk = 0;
                    self.tell_readers();
                    self.pass_over(index);
                    self.read_chunk(index);
                }
                _ if decodes => {
                    self.windows_since_chunk += 1;
                    self.decode_window();
                }
                _ => {
                    let waits = self.slots.iter().any(|slot| !slot.is_idle());
                    self.tell_readers();
                    self.publish_now();
                    self.shared.sleep(if waits { PAUSED } else { IDLE });
                }
            }
        }
        self.close();
    }

    /// Wakes every reader who has something to read, before work that takes longer than a window.
    fn tell_readers(&mut self) {
        self.slots.iter_mut().filter_map(|slot| slot.job.as_mut()).for_each(|job| job.tell(None));
    }

    /// A slot whose next token can be fed to the model now.
    pub(crate) fn may_decode(&self, slot: &Slot<T>) -> bool {
        slot.job.as_ref().is_some_and(|job| {
            job.paused_since.is_none() && !job.generated.is_empty() && slot.held.len() == job.rows_to_read()
        })
    }

    fn decodes(&self) -> bool {
        self.slots.iter().any(|slot| self.may_decode(slot))
    }

    fn is_reading(slot: &Slot<T>) -> bool {
        slot.job.as_ref().is_some_and(|job| job.generated.is_empty() || slot.held.len() < job.rows_to_read())
    }

    /// The reading slot whose prompt gets the next chunk: the one with the least left to read, so that a long prompt gives way
    /// to short ones, but none is passed over more than three times in a row.
    fn next_to_read(&self) -> Option<usize> {
        const PATIENCE: u32 = 3;
        let order = |slot: &&Slot<T>| {
            let job = slot.job.as_ref();
            let left = job.map_or(0, |job| job.rows_to_read() - slot.held.len());
            (job.is_none_or(|job| job.passed_over < PATIENCE), left, slot.index)
        };
        self.slots.iter().filter(|slot| Self::is_reading(slot)).min_by_key(order).map(|slot| slot.index)
    }

    /// Counts a chunk against the other reading slots.
    fn pass_over(&mut self, chosen: usize) {
        for slot in &mut self.slots {
            let waits = slot.index != chosen && Self::is_reading(slot);
            if let Some(job) = &mut slot.job {
                job.passed_over = if waits { job.passed_over + 1 } else { 0 };
            }
        }
    }

    /// Frees the slots of callers that are gone or stopped reading, and notes who is behind.
    fn drop_cancelled(&mut self) {
        let patience = self.options.slow_reader;
        for index in 0..self.slots.len() {
            let Some(job) = &mut self.slots[index].job else { continue };
            job.paused_since = job.reader_is_behind().then(|| job.paused_since.unwrap_or_else(Instant::now));
            let gave_up = job.paused_since.is_some_and(|since| since.elapsed() > patience);
            if job.is_cancelled() || gave_up {
                self.end(index, Ok(FinishReason::Cancelled));
            }
        }
    }

    /// Gives waiting requests free slots, first come first served; one whose start is still being read from disk lets others pass.
    /// While slots decode, this takes turns with their windows as prompt chunks do.
    fn admit(&mut self) {
        loop {
            let decodes = self.decodes();
            let in_turn = !decodes || self.windows_since_chunk >= self.options.read_windows;
            let has_room = self.slots.iter().any(Slot::is_idle);
            let queued = {
                let shared = self.shared.clone();
                let mut inbox = shared.lock();
                let before = inbox.queue.len();
                inbox.queue.retain(|queued| !queued.sender.is_cancelled());
                self.totals.cancelled += (before - inbox.queue.len()) as u64;
                if inbox.queue.is_empty() {
                    self.store.forget_fetched();
                }
                if !has_room || !in_turn {
                    return;
                }
                let next = inbox.queue.iter().position(|queued| !decodes || self.start_is_at_hand(&queued.request));
                let Some(queued) = next.and_then(|index| inbox.queue.remove(index)) else { return };
                inbox.status.running += 1;
                queued
            };
            self.status_stale = true;
            let started = Instant::now();
            self.seat(queued);
            if decodes && started.elapsed() > LIGHT_SEATING {
                self.windows_since_chunk = 0;
                return;
            }
        }
    }

    /// Whether a request can be seated without waiting for the disk. If not, reading from the disk is under way.
    fn start_is_at_hand(&mut self, request: &Request) -> bool {
        if request.cache_prompt == CachePrompt::No || !self.store.has_disk_states() {
            return true;
        }
        let prompt = Held::of_prompt(&request.prompt);
        let in_slots = self.slots.iter().map(|slot| slot.reusable(&prompt)).max().unwrap_or(0);
        match self.store.find(&prompt) {
            Some((rows, StartSource::Disk(index))) if rows > in_slots => self.store.fetch(index),
            _ => true,
        }
    }

    /// Gives a request the slot where the most of its prompt is held.
    fn seat(&mut self, queued: Queued) {
        let rows = PromptRows::new(&queued.request.prompt).rows;
        let cached = queued.request.cache_prompt == CachePrompt::Yes;
        let turn_starts = queued.request.prompt.turn_starts.clone();
        let (index, reused) = self.choose_start(&rows, cached);
        self.admissions += 1;
        self.policy.vocabulary.note(rows.tokens().iter().rev().take(PROMPT_SAMPLE).copied());
        let slot = &mut self.slots[index];
        slot.used = self.admissions;
        let mut job = Job::new(queued, index, self.options.ctx, &self.tokenizer);
        if cached {
            job.checkpoint_rows = wanted(&turn_starts, reused, rows.len(), self.options.checkpoints);
        }
        if reused == rows.len() {
            job.first_logits = slot.checkpoints.at(reused).and_then(|kept| kept.logits.clone());
        }
        job.start(reused);
        self.totals.started += 1;
        self.totals.prompt_rows += rows.len() as u64;
        self.totals.reused_rows += reused as u64;
        slot.job = Some(job);
    }

    /// Chooses a slot for a prompt and brings its state to the longest start of the prompt that can be had. Returns the slot and
    /// the rows it holds.
    fn choose_start(&mut self, prompt: &Held, cached: bool) -> (usize, usize) {
        let (mut rows, mut source) = (0, StartSource::Nothing);
        if cached {
            for slot in &self.slots {
                let found = slot.reusable(prompt);
                // Of equals, one that need not be copied.
                let better =
                    found > rows || (found == rows && found > 0 && slot.is_idle() && !source.is_idle_slot(&self.slots));
                if better {
                    (rows, source) = (found, StartSource::Slot(slot.index));
                }
            }
            if let Some((found, stored)) = self.store.find(prompt)
                && found > rows
            {
                (rows, source) = (found, stored);
            }
        }
        if let StartSource::Slot(index) = source {
            let slot = &self.slots[index];
            // A conversation that only shares its beginning stays, if another slot is there to be overwritten.
            let keeps_most = rows * 2 >= slot.held.len();
            if slot.is_idle() && (keeps_most || self.emptiest() == index) {
                if !keeps_most {
                    self.keep(index);
                }
                self.slots[index].go_back(rows);
                if self.slots[index].held.len() == rows {
                    self.store.status.slot_hits += 1;
                    return (index, rows);
                }
                return (index, 0);
            }
        }
        let index = self.emptiest();
        self.keep(index);
        if matches!(source, StartSource::Ram(_) | StartSource::Disk(_)) {
            // Keeping the slot's old state moved what is stored, and may have pushed the choice out.
            (rows, source) = self.store.find(prompt).unwrap_or((0, StartSource::Nothing));
        }
        let arrived = match source {
            StartSource::Nothing => {
                self.slots[index].reset();
                return (index, 0);
            }
            StartSource::Slot(from) => {
                if let Ok([to, from]) = self.slots.get_disjoint_mut([index, from]) {
                    to.copy_from(from);
                }
                self.store.status.slot_hits += 1;
                true
            }
            stored => self.store.load(stored, self.target.as_ref(), &mut self.slots[index]),
        };
        let slot = &mut self.slots[index];
        if !arrived {
            slot.reset();
            return (index, 0);
        }
        slot.go_back(rows);
        // A state that turned out not to have the point starts again.
        let held = slot.held.len();
        if held != rows {
            slot.reset();
            return (index, 0);
        }
        (index, rows)
    }

    /// The idle slot that holds nothing, or else the one used longest ago.
    fn emptiest(&self) -> usize {
        let idle = self.slots.iter().filter(|slot| slot.is_idle());
        idle.min_by_key(|slot| (slot.held.len() > 0, slot.used)).map_or(0, |slot| slot.index)
    }

    /// Puts a slot's state away before it is overwritten.
    fn keep(&mut self, index: usize) {
        self.store.save(self.target.as_ref(), &self.slots[index]);
    }

    /// Ends the request of a slot.
    pub(crate) fn end(&mut self, index: usize, result: Result<FinishReason, String>) {
        let slot = &mut self.slots[index];
        let Some(mut job) = slot.job.take() else { return };
        let forget = job.cache == CachePrompt::No;
        job.stats.draft_warning = self.draft_warning(&job);
        match result {
            Ok(FinishReason::Cancelled) => {
                self.totals.cancelled += 1;
                job.finish(FinishReason::Cancelled);
            }
            Ok(reason) => {
                self.totals.finished += 1;
                job.finish(reason);
            }
            Err(message) => {
                self.totals.failed += 1;
                job.fail(message);
            }
        }
        if forget {
            self.slots[index].reset();
        }
        self.shared.lock().status.running -= 1;
        self.status_stale = true;
    }

    /// Whether it is time to go: asked to stop, and everything done or the grace used up.
    fn ended(&mut self) -> bool {
        let (stop_at, waiting) = {
            let inbox = self.shared.lock();
            (inbox.stop_at, inbox.queue.len())
        };
        let Some(stop_at) = stop_at else { return false };
        let busy = waiting > 0 || self.slots.iter().any(|slot| !slot.is_idle());
        !busy || Instant::now() >= stop_at
    }

    fn close(&mut self) {
        for index in 0..self.slots.len() {
            self.end(index, Ok(FinishReason::Stopping));
        }
        let waiting = std::mem::take(&mut self.shared.lock().queue);
        for queued in waiting {
            let stats =
                super::request::RequestStats { prompt_rows: queued.request.prompt.rows(), ..Default::default() };
            queued.sender.send(Event::Finished { reason: FinishReason::Stopping, text: String::new(), stats });
        }
        for index in 0..self.slots.len() {
            self.store.save_to_disk(self.target.as_ref(), &self.slots[index]);
        }
        self.publish_now();
    }

    /// Publishes a snapshot.
    pub(crate) fn publish_now(&mut self) {
        self.status_stale = true;
        self.publish();
    }

    /// Publishes a snapshot, when something changed that a caller would wait for, else now and then.
    fn publish(&mut self) {
        let now = Instant::now();
        if !self.status_stale && self.status_at.is_some_and(|at| now - at < STATUS_EVERY) {
            return;
        }
        self.status_at = Some(now);
        self.status_stale = false;
        let slots = self.slots.iter().map(Self::slot_status).collect();
        let (_, step) = self.policy.measured();
        let drafts = DraftStatus {
            depth: self.depths.iter().copied().max().unwrap_or(0),
            window_s: self.policy.window_seconds(),
            draft_step_s: step.unwrap_or(0.0),
            acceptance: self.policy.acceptance(),
            vocabulary: self.policy.vocabulary.limit(),
            ended_unsure: self.ended_unsure,
        };
        let mut inbox = self.shared.lock();
        inbox.status.slots = slots;
        inbox.status.totals = self.totals.clone();
        inbox.status.cache = self.store.status.clone();
        inbox.status.drafts = drafts;
    }

    fn slot_status(slot: &Slot<T>) -> SlotStatus {
        let state = match &slot.job {
            None => "idle",
            Some(job) if job.paused_since.is_some() => "paused",
            Some(_) if Self::is_reading(slot) => "reading",
            Some(_) => "decoding",
        };
        SlotStatus {
            index: slot.index,
            request: slot.job.as_ref().map(|job| job.id),
            state,
            held_rows: slot.held.len(),
            prompt_rows: slot.job.as_ref().map_or(0, |job| job.prompt.rows.len()),
            read_rows: slot.job.as_ref().map_or(0, |job| slot.held.len().min(job.prompt.rows.len())),
            generated: slot.job.as_ref().map_or(0, |job| job.generated.len()),
            checkpoints: slot.checkpoints.len(),
        }
    }
}
