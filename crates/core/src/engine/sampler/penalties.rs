//! Counts of what was read and generated, for the repetition, presence and frequency penalties.

use std::collections::HashMap;

use super::super::held::PICTURE;
use super::super::request::Sampling;

/// Counts kept token by token, so that a penalty costs a look at the tokens concerned and not at the vocabulary.
pub(crate) struct Penalties {
    repeat: f32,
    last_n: usize,
    presence: f32,
    frequency: f32,
    /// Tokens among the last `last_n` rows, with their counts. Unused while `repeat` is neutral.
    recent: HashMap<u32, u32>,
    /// The last `last_n` rows in order, as a ring; empty while all rows count.
    ring: Vec<u32>,
    ring_at: usize,
    /// Generated tokens with their counts. Unused while both penalties are 0.
    generated: HashMap<u32, u32>,
}

impl Penalties {
    pub(crate) fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let mut penalties = Penalties {
            repeat: sampling.repeat_penalty,
            last_n: sampling.repeat_last_n,
            presence: sampling.presence_penalty,
            frequency: sampling.frequency_penalty,
            recent: HashMap::new(),
            ring: Vec::new(),
            ring_at: 0,
            generated: HashMap::new(),
        };
        if penalties.looks_back() {
            let from = prompt.len().saturating_sub(penalties.last_n);
            for &token in &prompt[from..] {
                penalties.push_recent(token);
            }
        }
        penalties
    }

    fn looks_back(&self) -> bool {
        self.repeat != 1.0 && self.last_n > 0
    }

    fn counts_generated(&self) -> bool {
        self.presence != 0.0 || self.frequency != 0.0
    }

    /// Takes note of a generated token.
    pub(crate) fn accept(&mut self, token: u32) {
        if self.looks_back() {
            self.push_recent(token);
        }
        if self.counts_generated() {
            *self.generated.entry(token).or_default() += 1;
        }
    }

    fn push_recent(&mut self, token: u32) {
        if token != PICTURE {
            *self.recent.entry(token).or_default() += 1;
        }
        if self.last_n == usize::MAX {
            return;
        }
        if self.ring.len() < self.last_n {
            self.ring.push(token);
            return;
        }
        let oldest = std::mem::replace(&mut self.ring[self.ring_at], token);
        self.ring_at = (self.ring_at + 1) % self.last_n;
        if let Some(count) = self.recent.get_mut(&oldest) {
            *count -= 1;
            if *count == 0 {
                self.recent.remove(&oldest);
            }
        }
    }

    /// Changes the logits of the tokens concerned; `undo` gets what they were.
    pub(crate) fn apply(&self, logits: &mut [f32], undo: &mut Vec<(u32, f32)>) {
        for &token in self.recent.keys() {
            if let Some(logit) = logits.get_mut(token as usize) {
                undo.push((token, *logit));
                *logit = if *logit > 0.0 { *logit / self.repeat } else { *logit * self.repeat };
            }
        }
        for (&token, &count) in &self.generated {
            if let Some(logit) = logits.get_mut(token as usize) {
                undo.push((token, *logit));
                *logit -= self.presence + self.frequency * count as f32;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(penalties: &Penalties, logits: &[f32]) -> Vec<f32> {
        let mut logits = logits.to_vec();
        penalties.apply(&mut logits, &mut Vec::new());
        logits
    }

    #[test]
    fn repetition_looks_at_the_last_rows_and_the_others_at_the_answer() {
        let sampling = Sampling {
            repeat_penalty: 2.0,
            repeat_last_n: 2,
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            ..Sampling::default()
        };
        let mut penalties = Penalties::new(&sampling, &[0, 1, 2]);
        assert_eq!(applied(&penalties, &[1.0, 1.0, -1.0, 1.0]), [1.0, 0.5, -2.0, 1.0]);
        penalties.accept(3);
        penalties.accept(3);
        assert_eq!(applied(&penalties, &[1.0, 1.0, -1.0, 1.0]), [1.0, 1.0, -1.0, 0.5 - 1.0]);
    }

    #[test]
    fn neutral_settings_keep_no_counts() {
        let mut penalties = Penalties::new(&Sampling::default(), &[1, 2, 3]);
        penalties.accept(1);
        assert!(penalties.recent.is_empty() && penalties.generated.is_empty());
    }
}
