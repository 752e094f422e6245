//! Decode windows: the next token of several slots and their drafts in one forward pass, then verification row by row.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use super::core::Core;
use super::draft::Source;
use super::reading::panic_message;
use super::request::FinishReason;
use super::target::Target;
use crate::model::{Row, RowInput};

/// A slot's part of a window.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Share {
    pub(crate) slot: usize,
    /// Where its drafts come from.
    pub(crate) source: Source,
    /// Row at which its next token goes.
    pub(crate) row: usize,
}

impl<T: Target> Core<T> {
    /// Runs one decode window. A failure of the forward pass sends the slots concerned back to reading, and from then on each goes
    /// alone until a window succeeds: the request that fails alone is ended, the others go on as if nothing had happened.
    pub(crate) fn decode_window(&mut self) {
        let mut shares = self.choose_slots();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.try_decode(&mut shares)))
            .unwrap_or_else(|payload| Err(panic_message(payload.as_ref())));
        let Err(message) = outcome else { return };
        let alone = shares.len() == 1;
        for share in &shares {
            let slot = &mut self.slots[share.slot];
            slot.reset();
            let Some(job) = &mut slot.job else { continue };
            if alone && job.suspect {
                self.end(share.slot, Err(message.clone()));
            } else {
                job.suspect = true;
            }
        }
    }

    /// Slots of the next window, in ascending order: all that decode if the window has room, else in turn. A slot under suspicion
    /// goes alone.
    fn choose_slots(&mut self) -> Vec<Share> {
        let count = self.slots.len();
        let decoding = |core: &Self, index: usize| core.may_decode(&core.slots[index]);
        let share = |slot| Share { slot, source: Source::Mtp, row: 0 };
        let is_suspect = |core: &Self, index: usize| core.slots[index].job.as_ref().is_some_and(|job| job.suspect);
        if let Some(suspect) = (0..count).find(|&index| decoding(self, index) && is_suspect(self, index)) {
            return vec![share(suspect)];
        }
        let from = self.next_slot;
        let turn = (0..count).map(|offset| (from + offset) % count).filter(|&index| decoding(self, index));
        let mut shares: Vec<Share> = turn.take(self.options.max_window).map(share).collect();
        self.next_slot = shares.last().map_or(0, |last| (last.slot + 1) % count);
        shares.sort_unstable_by_key(|share| share.slot);
        shares
    }

    fn try_decode(&mut self, shares: &mut [Share]) -> Result<(), String> {
        let started = Instant::now();
        self.propose(shares)?;
        let draft_time = started.elapsed();

        let verify_started = Instant::now();
        self.build_window(shares);
        self.forward_window(shares)?;
        let verify_time = verify_started.elapsed();

        // A request's first window finds the caches full of its prompt: no measure for the next, with drafts or without.
        let first =
            matches!(shares, [share] if self.slots[share.slot].job.as_ref().is_some_and(|job| job.stats.windows == 0));
        let vocab = self.target.vocab();
        let width = self.target.hidden();
        let mut sample_time = Duration::ZERO;
        let mut commit_time = Duration::ZERO;
        let mut tokens = 0;
        let mut at = 0;
        let mut ended: Vec<(usize, Result<FinishReason, String>)> = Vec::new();
        for ((share, drafts), confidences) in shares.iter().zip(&self.drafts).zip(&self.confidences) {
            let slot = &mut self.slots[share.slot];
            let Some(job) = &mut slot.job else { continue };
            let sample_started = Instant::now();
            let rows = &mut self.out.logits[at * vocab..(at + 1 + drafts.len()) * vocab];
            let before = job.generated.len();
            let mut accepted = 0;
            let mut verified = 0;
            // A fault in choosing (a grammar's, say) is this request's own.
            let result = catch_unwind(AssertUnwindSafe(|| {
                for (index, logits) in rows.chunks_exact_mut(vocab).enumerate() {
                    let finish = job.advance(logits)?;
                    let hit = drafts.get(index).is_some_and(|draft| job.generated.last() == Some(draft));
                    verified += usize::from(index < drafts.len());
                    accepted += usize::from(hit);
                    if finish.is_some() || !hit {
                        return Ok(finish);
                    }
                }
                Ok(None)
            }))
            .unwrap_or_else(|payload| Err(panic_message(payload.as_ref())));
            let commit_started = Instant::now();
            sample_time += commit_started - sample_started;

            // The token fed and the accepted drafts.
            let kept = 1 + accepted;
            // An answer that ends leaves the drafts after its end unjudged; a rejection judges all.
            let drafted = if matches!(result, Ok(None)) { drafts.len() } else { verified };
            if !drafts.is_empty() {
                self.target.commit(&mut slot.state, kept);
                job.note_drafts(share.source, drafted, accepted);
                self.policy.observe_drafts(share.source, drafted, accepted);
                self.policy.observe_confidence(&confidences[..confidences.len().min(drafted)], accepted);
                self.totals.drafted += drafted as u64;
                self.totals.accepted += accepted as u64;
            }
            for row in share.row..share.row + kept {
                slot.held.push(job.token(row));
            }
            if let Some(feed) = &mut slot.feed {
                self.out.hidden[at * width..(at + kept) * width]
                    .chunks_exact(width)
                    .for_each(|hidden| feed.push(hidden));
            }
            job.stats.windows += 1;
            job.suspect = false;
            let now = Instant::now();
            commit_time += now - commit_started;
            if let Some(last) = job.last_window.replace(now) {
                let pause = (now - last).as_secs_f64();
                job.stats.longest_pause_s = job.stats.longest_pause_s.max(pause);
                self.totals.longest_pause_s = self.totals.longest_pause_s.max(pause);
            }
            self.policy.vocabulary.note(job.generated[before..].iter().copied());
            tokens += job.generated.len() - before;
            at += 1 + drafts.len();
            match result {
                Ok(None) => {}
                Ok(Some(reason)) => ended.push((share.slot, Ok(reason))),
                Err(message) => ended.push((share.slot, Err(message))),
            }
        }
        if !first {
            self.policy.observe_window(
                shares.len(),
                at,
                tokens,
                draft_time.as_secs_f64(),
                (verify_time + commit_time).as_secs_f64(),
            );
        }
        let part = shares.len() as u32;
        let phases = [draft_time, verify_time, commit_time, sample_time];
        for share in shares.iter() {
            if let Some(job) = &mut self.slots[share.slot].job {
                add_phases(&mut job.stats.phases, phases.map(|time| time / part));
            }
        }
        add_phases(&mut self.totals.phases, phases);
        self.totals.windows += 1;
        self.totals.generated += tokens as u64;
        self.totals.window_rows += at as u64;
        let took = started.elapsed();
        self.totals.decode_s += took.as_secs_f64();
        self.after_window(shares);
        for share in shares.iter() {
            if let Some(job) = &mut self.slots[share.slot].job {
                job.tell(Some(took));
            }
        }
        for (index, result) in ended {
            self.end(index, result);
        }
        Ok(())
    }

    fn build_window(&mut self, shares: &[Share]) {
        let window = &mut self.window;
        window.rows.clear();
        window.verify.clear();
        for (part, (share, drafts)) in shares.iter().zip(&self.drafts).enumerate() {
            let slot = &self.slots[share.slot];
            let Some(job) = &slot.job else { continue };
            window.verify.push(!drafts.is_empty());
            let tokens = [job.token(share.row)].into_iter().chain(drafts.iter().copied());
            for (offset, token) in tokens.enumerate() {
                window.rows.push(Row {
                    slot: part as u32,
                    input: RowInput::Token(token),
                    position: job.position(share.row + offset),
                    want_logits: true,
                    want_hidden: slot.feed.is_some(),
                });
            }
        }
    }

    fn forward_window(&mut self, shares: &[Share]) -> Result<(), String> {
        let mut chosen = shares.iter().map(|share| share.slot).peekable();
        let mut states: Vec<&mut T::State> = Vec::with_capacity(shares.len());
        for slot in &mut self.slots {
            if chosen.next_if_eq(&slot.index).is_some() {
                states.push(&mut slot.state);
            }
        }
        self.target.forward(&self.window, &mut states, &mut self.out)
    }

    /// Checkpoints of long answers, and the audit.
    fn after_window(&mut self, shares: &[Share]) {
        let every = self.options.prompt_chunk.max(CHECKPOINT_EVERY);
        for share in shares {
            let slot = &mut self.slots[share.slot];
            let kept = slot.job.as_ref().is_some_and(|job| job.cache == super::request::CachePrompt::Yes);
            if kept && slot.held.len() >= slot.checkpoints.last_rows() + every {
                slot.take_checkpoint(false, None);
            }
            if let Some(audit) = &self.options.state_audit {
                audit(share.slot, slot.held.tokens(), T::hash(&slot.state));
            }
        }
    }
}

/// Rows of an answer between two checkpoints, at least.
const CHECKPOINT_EVERY: usize = 512;

fn add_phases(to: &mut super::request::PhaseTimes, [draft, verify, commit, sample]: [Duration; 4]) {
    to.draft += draft;
    to.verify += verify;
    to.commit += commit;
    to.sample += sample;
}
