//! Warming up: a few windows before the first request, so that what drafts cost is known when the first answer begins.
//!
//! The first window of each size touches fresh memory, which with a small model takes as long as several windows and would look
//! like the price of drafting. With large models that does not show beside the price of a window, and a window before the first
//! request would keep it waiting: there the policy measures while it answers.

use std::time::{Duration, Instant};

use super::core::Core;
use super::options::MtpSetting;
use super::target::Target;
use crate::model::{MtpRow, Row, RowInput};

/// Time to spend.
const BUDGET: Duration = Duration::from_millis(20);
/// Weights per row, in bytes, up to which a model counts as small.
const SMALL: u64 = 64 << 20;
/// Windows of one row up to this many.
const MOST_ROWS: usize = 5;
/// Times each size is run; the first is not counted.
const ROUNDS: usize = 4;

impl<T: Target> Core<T> {
    /// Measures windows and draft steps on the first slot's state, which is then as fresh as before. Does nothing unless the
    /// engine is to find out by itself how many drafts pay. Whatever fails here fails again, and is told, with the first request.
    pub(crate) fn warm_up(&mut self) {
        if !self.options.warm_up || self.options.mtp != MtpSetting::Auto || self.options.custom_drafter.is_some() {
            return;
        }
        if self.target.bytes_per_row() > SMALL {
            return;
        }
        let most = MOST_ROWS.min(self.options.max_window).min(self.options.ctx - 1);
        let started = Instant::now();
        'rounds: for round in 0..ROUNDS {
            for rows in 1..=most {
                let Some(seconds) = self.warm_window(rows) else { break 'rounds };
                if round > 0 {
                    self.policy.calibrate_window(rows, seconds);
                }
                if started.elapsed() > BUDGET {
                    break 'rounds;
                }
            }
            let Some(seconds) = self.warm_draft() else { break };
            if round > 0 {
                self.policy.observe_step(1, None, seconds);
            }
        }
        self.policy.choose_vocabulary();
        self.slots[0].reset();
    }

    fn warm_window(&mut self, rows: usize) -> Option<f64> {
        // Neighbouring ids would all go to the same experts.
        let token = |index: usize| RowInput::Token((index * 7919 % self.target.vocab()) as u32);
        let held = T::rows(&self.slots[0].state);
        self.window.rows.clear();
        self.window.verify.clear();
        self.window.verify.push(rows > 1);
        for index in 0..rows {
            let position = [(held + index) as u32; 3];
            let input = token(held + index + rows);
            self.window.rows.push(Row { slot: 0, input, position, want_logits: true, want_hidden: true });
        }
        let started = Instant::now();
        self.target.forward(&self.window, &mut [&mut self.slots[0].state], &mut self.out).ok()?;
        if rows > 1 {
            self.target.commit(&mut self.slots[0].state, 1);
        }
        Some(started.elapsed().as_secs_f64())
    }

    /// A draft step as after an accepted draft: two rows to read, one to draft from.
    fn warm_draft(&mut self) -> Option<f64> {
        let hidden = self.out.hidden.get(..self.target.hidden())?.to_vec();
        let held = T::mtp_rows(&self.slots[0].state);
        let rows: Vec<MtpRow<'_>> = (0..2)
            .map(|index| MtpRow {
                slot: 0,
                input: RowInput::Token(index as u32),
                hidden: &hidden,
                position: [(held + index) as u32; 3],
                want_logits: index == 1,
            })
            .collect();
        let started = Instant::now();
        self.target.mtp_forward(&rows, &mut [&mut self.slots[0].state], &mut self.draft_out, None).ok()?;
        Some(started.elapsed().as_secs_f64())
    }
}
