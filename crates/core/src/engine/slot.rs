//! A slot: one open conversation. Its state, what that state holds, its checkpoints, and the request being served.

use std::sync::Arc;

use super::cache::{Checkpoints, Kept, Point, reusable};
use super::draft::{MtpFeed, NgramIndex};
use super::held::Held;
use super::job::Job;
use super::target::Target;

/// One open conversation.
pub(crate) struct Slot<T: Target> {
    pub(crate) index: usize,
    pub(crate) state: T::State,
    /// The rows in `state`.
    pub(crate) held: Held,
    pub(crate) checkpoints: Checkpoints<T::Checkpoint>,
    /// Hidden rows for the MTP cache, if the head is in use.
    pub(crate) feed: Option<MtpFeed>,
    /// Index of the held tokens, if n-gram drafts are in use.
    pub(crate) ngrams: Option<NgramIndex>,
    pub(crate) job: Option<Job>,
    /// When the slot was last used, in admissions.
    pub(crate) used: u64,
}

impl<T: Target> Slot<T> {
    pub(crate) fn is_idle(&self) -> bool {
        self.job.is_none()
    }

    /// Forgets everything.
    pub(crate) fn reset(&mut self) {
        T::reset(&mut self.state);
        self.held.clear();
        self.checkpoints.clear();
        if let Some(feed) = &mut self.feed {
            feed.reset();
        }
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.truncate(0);
        }
    }

    /// Where the state can be gone back to. The state as it is counts only for a slot that is idle: a busy one moves on.
    pub(crate) fn points(&self) -> impl Iterator<Item = Point> + '_ {
        let live = self.is_idle().then_some(Point { rows: self.held.len(), has_logits: false });
        self.checkpoints.points().chain(live)
    }

    /// The most first rows of `prompt` that this slot's state serves.
    pub(crate) fn reusable(&self, prompt: &Held) -> usize {
        reusable(self.points(), self.held.common_start(prompt), prompt.len())
    }

    /// Takes over another slot's state.
    pub(crate) fn copy_from(&mut self, other: &Slot<T>) {
        T::copy_from(&mut self.state, &other.state);
        self.held = other.held.clone();
        self.checkpoints.set(other.checkpoints.list().to_vec());
        self.feed.clone_from(&other.feed);
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.truncate(0);
        }
    }

    /// Cuts the state to its first `rows` rows, one of the slot's points. A state that cannot be cut there is reset.
    pub(crate) fn go_back(&mut self, rows: usize) {
        if rows == 0 {
            self.reset();
            return;
        }
        if rows == self.held.len() {
            return;
        }
        let Some(kept) = self.checkpoints.at(rows) else {
            self.reset();
            return;
        };
        if T::restore(&mut self.state, &kept.state).is_err() {
            self.reset();
            return;
        }
        if let Some(feed) = &mut self.feed {
            let mtp_rows = feed.go_back(rows, &kept.hidden);
            T::truncate_mtp(&mut self.state, mtp_rows);
        }
        self.held.truncate(rows);
        self.checkpoints.cut(rows);
        if let Some(ngrams) = &mut self.ngrams {
            ngrams.truncate(rows);
        }
    }

    /// Keeps a copy of the recurrent state as it is.
    pub(crate) fn take_checkpoint(&mut self, at_turn: bool, logits: Option<Arc<[f32]>>) {
        let rows = self.held.len();
        if let Some(same) = self.checkpoints.at(rows)
            && (same.logits.is_some() || logits.is_none())
        {
            return;
        }
        let hidden = self.feed.as_ref().and_then(MtpFeed::newest).unwrap_or_default().into();
        self.checkpoints.add(Kept { rows, state: T::checkpoint(&self.state), hidden, logits, at_turn });
    }
}
