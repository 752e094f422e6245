//! Reading: a prompt chunk of one slot, with checkpoints on the way and the first token at the end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use super::core::Core;
use super::options::MtpSetting;
use super::request::CachePrompt;
use super::target::Target;
use crate::model::Row;

/// What a caught panic said.
pub(crate) fn panic_message(payload: &(dyn std::any::Any + Send)) -> String {
    let said =
        payload.downcast_ref::<&str>().map(ToString::to_string).or_else(|| payload.downcast_ref::<String>().cloned());
    format!("internal error: {}", said.unwrap_or_else(|| "a panic without a message".into()))
}

impl<T: Target> Core<T> {
    /// Reads one chunk of a slot's rows; chooses the first token where the prompt ends. Whatever goes wrong ends this request only.
    pub(crate) fn read_chunk(&mut self, index: usize) {
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.try_read_chunk(index)))
            .unwrap_or_else(|payload| Err(panic_message(payload.as_ref())));
        let took = started.elapsed().as_secs_f64();
        self.totals.chunks += 1;
        self.totals.prompt_s += took;
        if let Some(job) = &mut self.slots[index].job {
            job.stats.longest_chunk_s = job.stats.longest_chunk_s.max(took);
        }
        if let Err(message) = outcome {
            self.slots[index].reset();
            self.end(index, Err(message));
        }
    }

    fn try_read_chunk(&mut self, index: usize) -> Result<(), String> {
        let mut budget = self.options.prompt_chunk;
        loop {
            let slot = &mut self.slots[index];
            let Some(job) = &mut slot.job else { return Ok(()) };
            let (from, goal) = (slot.held.len(), job.rows_to_read());
            if from == goal {
                let answered = job.generated.is_empty();
                if answered {
                    return self.first_token(index);
                }
                return Ok(());
            }
            if budget == 0 {
                return Ok(());
            }
            job.checkpoint_rows.retain(|&row| row > from);
            let turn = job.checkpoint_rows.first().copied().filter(|&row| row <= goal);
            let to = (from + budget).min(goal).min(turn.unwrap_or(goal));
            budget -= to - from;
            let answers = to == goal && job.generated.is_empty();
            let wants_hidden = slot.feed.is_some();
            self.window.rows.clear();
            self.window.verify.clear();
            for row in from..to {
                self.window.rows.push(Row {
                    slot: 0,
                    input: job.input(row),
                    position: job.position(row),
                    want_logits: answers && row + 1 == to,
                    want_hidden: wants_hidden,
                });
            }
            self.target.forward(&self.window, &mut [&mut slot.state], &mut self.out)?;
            let known = to.min(job.prompt.rows.len());
            if slot.held.len() < known {
                slot.held.extend_from(&job.prompt.rows, known);
            }
            for row in slot.held.len()..to {
                slot.held.push(job.token(row));
            }
            if let Some(feed) = &mut slot.feed {
                let width = self.target.hidden();
                self.out.hidden[..(to - from) * width].chunks_exact(width).for_each(|hidden| feed.push(hidden));
            }
            let keeps = job.cache == CachePrompt::Yes;
            let mtp = job.mtp;
            if answers {
                let logits = &self.out.logits[..self.target.vocab()];
                job.first_logits = Some(logits.into());
                if keeps {
                    let logits = job.first_logits.clone();
                    slot.take_checkpoint(true, logits);
                }
            } else if keeps && to < goal {
                slot.take_checkpoint(turn == Some(to), None);
            }
            self.feed_prompt(index, mtp)?;
        }
    }

    /// Fills the MTP cache with what was just read, where drafts are certain or likely.
    fn feed_prompt(&mut self, index: usize, request: Option<MtpSetting>) -> Result<(), String> {
        let fill = match request.unwrap_or(self.options.mtp) {
            MtpSetting::Off => false,
            MtpSetting::Depth(_) => true,
            MtpSetting::Auto => self.policy.believes_in_mtp(),
        };
        if fill { self.catch_up(index) } else { Ok(()) }
    }

    fn first_token(&mut self, index: usize) -> Result<(), String> {
        let slot = &mut self.slots[index];
        let Some(job) = &mut slot.job else { return Ok(()) };
        let logits = job.first_logits.take().ok_or("the logits of the prompt's last row are missing")?;
        self.out.logits.clear();
        self.out.logits.extend_from_slice(&logits);
        job.last_window = Some(Instant::now());
        let finish = job.advance(&mut self.out.logits)?;
        job.tell(None);
        self.totals.generated += job.generated.len() as u64;
        if let Some(reason) = finish {
            self.end(index, Ok(reason));
        }
        Ok(())
    }
}
