//! The callers' side of an engine: submitting requests, asking for its status, stopping it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::request::{PhaseTimes, Prompt, Request, SubmitError};
use super::stream::{self, EventSender, RequestStream};

/// What one slot is doing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SlotStatus {
    /// Slot index.
    pub index: usize,
    /// Request served, if any.
    pub request: Option<u64>,
    /// `idle`, `reading`, `decoding` or `paused` (its reader is behind).
    pub state: &'static str,
    /// Rows held.
    pub held_rows: usize,
    /// Rows of the request's prompt.
    pub prompt_rows: usize,
    /// Prompt rows read so far, the reused ones included.
    pub read_rows: usize,
    /// Tokens generated.
    pub generated: usize,
    /// Recurrent checkpoints kept.
    pub checkpoints: usize,
}

/// Sums over all requests since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineTotals {
    /// Requests that got a slot.
    pub started: u64,
    /// Requests that finished by themselves.
    pub finished: u64,
    /// Requests cancelled.
    pub cancelled: u64,
    /// Requests failed.
    pub failed: u64,
    /// Rows of all prompts.
    pub prompt_rows: u64,
    /// Prompt rows reused.
    pub reused_rows: u64,
    /// Tokens generated.
    pub generated: u64,
    /// Prompt chunks read.
    pub chunks: u64,
    /// Decode windows run.
    pub windows: u64,
    /// Rows of all decode windows.
    pub window_rows: u64,
    /// Draft tokens verified.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Seconds spent reading prompts.
    pub prompt_s: f64,
    /// Seconds spent in decode windows.
    pub decode_s: f64,
    /// Decode time by phase.
    pub phases: PhaseTimes,
    /// Longest time between two windows of a decoding slot.
    pub longest_pause_s: f64,
}

/// State of the conversation cache outside the slots.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CacheStatus {
    /// States in memory.
    pub ram_entries: usize,
    /// Their bytes.
    pub ram_bytes: u64,
    /// States on disk.
    pub disk_entries: usize,
    /// Their bytes.
    pub disk_bytes: u64,
    /// Starts served from a slot's own or another slot's state.
    pub slot_hits: u64,
    /// Starts served from memory.
    pub ram_hits: u64,
    /// Starts served from disk.
    pub disk_hits: u64,
    /// Disk files refused: damaged or of another model.
    pub disk_refused: u64,
}

/// A snapshot of the engine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct EngineStatus {
    /// Context of each slot in rows.
    pub ctx: usize,
    /// Every slot.
    pub slots: Vec<SlotStatus>,
    /// Requests waiting for a slot.
    pub queued: usize,
    /// Requests being served.
    pub running: usize,
    /// Sums since the start.
    pub totals: EngineTotals,
    /// The conversation cache.
    pub cache: CacheStatus,
    /// What the draft policy has measured.
    pub drafts: DraftStatus,
    /// The engine takes no more requests.
    pub stopping: bool,
}

/// What the draft policy has measured so far.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DraftStatus {
    /// Deepest draft of the latest decode window.
    pub depth: usize,
    /// Measured seconds of a decode window of n + 1 rows; 0 where unknown.
    pub window_s: Vec<f64>,
    /// Measured seconds of one MTP draft step; 0 if unknown.
    pub draft_step_s: f64,
    /// Acceptance per MTP draft position, given that the ones before were accepted.
    pub acceptance: Vec<f64>,
    /// Tokens of the vocabulary that drafts of `MtpSetting::Auto` look at; `None`: all.
    pub vocabulary: Option<usize>,
    /// Chains of drafts that ended before their depth because the head was unsure.
    pub ended_unsure: u64,
}

/// A request on its way to a slot.
pub(crate) struct Queued {
    pub(crate) id: u64,
    pub(crate) request: Request,
    pub(crate) sender: EventSender,
    pub(crate) submitted: Instant,
}

#[derive(Default)]
pub(crate) struct Inbox {
    pub(crate) queue: VecDeque<Queued>,
    pub(crate) next_id: u64,
    /// Set once; running requests may go on until this time.
    pub(crate) stop_at: Option<Instant>,
    /// Something happened that a sleeping engine should look at.
    pub(crate) nudged: bool,
    pub(crate) status: EngineStatus,
    /// The engine has warmed up and takes requests from now on.
    pub(crate) ready: bool,
    /// The engine thread is gone.
    pub(crate) ended: bool,
}

pub(crate) struct EngineShared {
    inbox: Mutex<Inbox>,
    wake: Condvar,
    ctx: usize,
    vocab: usize,
    queue_limit: usize,
    event_buffer: usize,
    /// Width of a picture row, which must equal the model's hidden size.
    hidden: usize,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl EngineShared {
    pub(crate) fn new(ctx: usize, vocab: usize, hidden: usize, queue_limit: usize, event_buffer: usize) -> Self {
        EngineShared {
            inbox: Mutex::new(Inbox { status: EngineStatus { ctx, ..EngineStatus::default() }, ..Inbox::default() }),
            wake: Condvar::new(),
            ctx,
            vocab,
            hidden,
            queue_limit,
            event_buffer,
            thread: Mutex::new(None),
        }
    }

    pub(crate) fn set_thread(&self, thread: JoinHandle<()>) {
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes a sleeping engine.
    pub(crate) fn nudge(&self) {
        self.lock().nudged = true;
        self.wake.notify_all();
    }

    /// The engine has warmed up.
    pub(crate) fn set_ready(&self) {
        self.lock().ready = true;
        self.wake_all();
    }

    /// Wakes whoever waits for the engine to be ready or to end.
    pub(crate) fn wake_all(&self) {
        self.wake.notify_all();
    }

    /// Sleeps until nudged or until `timeout`.
    pub(crate) fn sleep(&self, timeout: Duration) {
        let mut inbox = self.lock();
        if !inbox.nudged {
            inbox = self.wake.wait_timeout(inbox, timeout).unwrap_or_else(PoisonError::into_inner).0;
        }
        inbox.nudged = false;
    }
}

/// The callers' side of an engine. Clones share it; the engine stops when the last clone is dropped.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<EngineShared>,
    _last: Arc<StopOnDrop>,
}

struct StopOnDrop(Arc<EngineShared>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        stop(&self.0, Duration::ZERO);
    }
}

fn stop(shared: &EngineShared, grace: Duration) {
    {
        let mut inbox = shared.lock();
        let at = Instant::now() + grace;
        inbox.stop_at = Some(inbox.stop_at.map_or(at, |earlier| earlier.min(at)));
        inbox.status.stopping = true;
    }
    shared.nudge();
    // Held while joining, so that a second caller waits as well.
    let mut thread = shared.thread.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(thread) = thread.take() {
        // A panic outside any request's handling has already ended every stream with an error.
        let _ = thread.join();
    }
}

impl EngineHandle {
    pub(crate) fn new(shared: Arc<EngineShared>) -> Self {
        EngineHandle { _last: Arc::new(StopOnDrop(shared.clone())), shared }
    }

    /// Context of one request in rows.
    pub fn ctx(&self) -> usize {
        self.shared.ctx
    }

    /// Waits until the engine has warmed up (see `EngineOptions::warm_up`), so that this does not count as a request's own time.
    pub fn wait_ready(&self) {
        let mut inbox = self.shared.lock();
        while !inbox.ready && !inbox.ended {
            inbox = self.shared.wake.wait(inbox).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Queues a request.
    ///
    /// # Errors
    /// A full queue, a prompt that leaves no room, settings out of range, or an engine that is stopping.
    pub fn submit(&self, request: Request) -> Result<RequestStream, SubmitError> {
        self.check(&request)?;
        let mut inbox = self.shared.lock();
        if inbox.stop_at.is_some() || inbox.ended {
            return Err(SubmitError::Stopping);
        }
        let free = inbox.status.slots.len().saturating_sub(inbox.status.running);
        if inbox.queue.len() >= self.shared.queue_limit + free {
            return Err(SubmitError::QueueFull { queued: inbox.queue.len(), limit: self.shared.queue_limit });
        }
        inbox.next_id += 1;
        let id = inbox.next_id;
        let weak = Arc::downgrade(&self.shared);
        let on_change = Box::new(move || {
            if let Some(shared) = weak.upgrade() {
                shared.nudge();
            }
        });
        let (sender, stream) = stream::channel(id, self.shared.event_buffer, on_change);
        inbox.queue.push_back(Queued { id, request, sender, submitted: Instant::now() });
        inbox.nudged = true;
        drop(inbox);
        self.shared.wake.notify_all();
        Ok(stream)
    }

    /// A snapshot, at most one window old.
    pub fn status(&self) -> EngineStatus {
        let inbox = self.shared.lock();
        EngineStatus { queued: inbox.queue.len(), ..inbox.status.clone() }
    }

    /// Takes no more requests, lets running and queued ones finish for up to `grace`, then ends them. Returns when the engine
    /// has ended.
    pub fn stop(&self, grace: Duration) {
        stop(&self.shared, grace);
    }

    fn check(&self, request: &Request) -> Result<(), SubmitError> {
        let invalid = |text: String| Err(SubmitError::Invalid(text));
        let rows = request.prompt.rows();
        if rows == 0 {
            return invalid("prompt: it is empty; at least one token is needed".into());
        }
        if rows >= self.shared.ctx {
            return Err(SubmitError::PromptTooLong { rows, ctx: self.shared.ctx });
        }
        check_prompt(&request.prompt, rows, self.shared.vocab, self.shared.hidden)?;
        check_sampling(request, self.shared.vocab)
    }
}

fn check_prompt(prompt: &Prompt, rows: usize, vocab: usize, hidden: usize) -> Result<(), SubmitError> {
    use super::request::PromptItem;
    for piece in &prompt.pieces {
        match piece {
            PromptItem::Tokens(ids) => {
                if let Some(id) = ids.iter().find(|&&id| id as usize >= vocab) {
                    return Err(SubmitError::Invalid(format!(
                        "prompt: token id {id} is outside the vocabulary of {vocab}"
                    )));
                }
            }
            PromptItem::Picture(picture) => {
                let cells = picture.grid.0 as usize * picture.grid.1 as usize;
                if picture.width != hidden || picture.data.len() != cells * hidden || cells == 0 {
                    return Err(SubmitError::Invalid(format!(
                        "prompt: a picture of {} x {} rows of width {} ({} values) does not fit a model of width {hidden}",
                        picture.grid.0,
                        picture.grid.1,
                        picture.width,
                        picture.data.len(),
                    )));
                }
            }
        }
    }
    if !prompt.turn_starts.is_sorted() || prompt.turn_starts.last().is_some_and(|&last| last > rows) {
        return Err(SubmitError::Invalid(format!("prompt: turn starts must ascend and lie within its {rows} rows")));
    }
    Ok(())
}

fn check_sampling(request: &Request, vocab: usize) -> Result<(), SubmitError> {
    let sampling = &request.sampling;
    let ranges: [(&str, f32, std::ops::RangeInclusive<f32>); 6] = [
        ("temperature", sampling.temperature, 0.0..=100.0),
        ("top_p", sampling.top_p, 0.0..=1.0),
        ("min_p", sampling.min_p, 0.0..=1.0),
        ("repeat_penalty", sampling.repeat_penalty, 0.01..=100.0),
        ("presence_penalty", sampling.presence_penalty, -100.0..=100.0),
        ("frequency_penalty", sampling.frequency_penalty, -100.0..=100.0),
    ];
    for (name, value, range) in ranges {
        if !range.contains(&value) {
            return Err(SubmitError::Invalid(format!(
                "{name}: {value} is outside {} to {}",
                range.start(),
                range.end()
            )));
        }
    }
    for &(id, bias) in &sampling.logit_bias {
        if id as usize >= vocab {
            return Err(SubmitError::Invalid(format!(
                "logit_bias: token id {id} is outside the vocabulary of {vocab}"
            )));
        }
        if bias.is_nan() || bias == f32::INFINITY {
            return Err(SubmitError::Invalid(format!(
                "logit_bias: the bias of token {id} is {bias}, expected a number"
            )));
        }
    }
    if request.stop.iter().any(String::is_empty) {
        return Err(SubmitError::Invalid("stop: an empty stop string would end every answer at once".into()));
    }
    Ok(())
}
