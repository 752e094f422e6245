//! How much of the vocabulary head is worth computing for a draft.
//!
//! Tokens are numbered roughly by frequency (byte-pair merges come in the order they were learned), and the vocabulary head is
//! most of what a draft step reads. A draft that could only be one of the first tokens costs a fraction and is nearly as often
//! right; how often depends on the text, so the tokens of prompts and answers are counted by where their ids fall.

/// Parts the vocabulary is told apart in.
const PARTS: usize = 16;
/// Tokens that count; older ones fade.
const MEMORY: f64 = 1024.0;
/// Tokens that the expectation before any text weighs as much as.
const PRIOR_WEIGHT: f64 = 24.0;
/// A change must promise this much.
const WORTH_IT: f64 = 1.005;

/// Where token ids fall, and the part of the head in use.
#[derive(Clone, Debug)]
pub(crate) struct DraftVocabulary {
    vocab: usize,
    /// Share of a draft step that is the whole vocabulary head.
    head_share: f64,
    counts: [f64; PARTS],
    /// Parts of the head that drafts compute, 1 to [`PARTS`].
    used: usize,
}

impl DraftVocabulary {
    /// `head_share`: the share of a draft step's work that the whole vocabulary head is, 0 to 1.
    pub(crate) fn new(vocab: usize, head_share: f64) -> Self {
        DraftVocabulary { vocab, head_share, counts: [0.0; PARTS], used: PARTS }
    }

    /// Counts tokens of a text.
    pub(crate) fn note(&mut self, tokens: impl IntoIterator<Item = u32>) {
        for token in tokens {
            if let Some(count) = self.counts.get_mut(token as usize * PARTS / self.vocab.max(1)) {
                *count += 1.0;
            }
        }
        let total: f64 = self.counts.iter().sum();
        if total > MEMORY {
            self.counts.iter_mut().for_each(|count| *count *= MEMORY / total);
        }
    }

    /// Expected share of tokens among the first `parts` parts. Before any text: as if frequencies fell with the id as 1 / id.
    fn coverage(&self, parts: usize) -> f64 {
        let logarithm = |tokens: f64| (1.0 + tokens).ln();
        let prior = logarithm(self.vocab as f64 * parts as f64 / PARTS as f64) / logarithm(self.vocab as f64);
        let seen: f64 = self.counts[..parts].iter().sum();
        let all: f64 = self.counts.iter().sum();
        (seen + PRIOR_WEIGHT * prior) / (all + PRIOR_WEIGHT)
    }

    /// What a draft step that looks at the first `limit` tokens costs, as a share of one that looks at all.
    pub(crate) fn cost(&self, limit: Option<usize>) -> f64 {
        let part = limit.map_or(1.0, |limit| limit.min(self.vocab) as f64 / self.vocab.max(1) as f64);
        1.0 - self.head_share + self.head_share * part
    }

    /// Tokens a draft looks at; `None` for all.
    pub(crate) fn limit(&self) -> Option<usize> {
        // Whole groups of 64 rows, which every kernel likes.
        let limit = (self.vocab * self.used / PARTS).next_multiple_of(64);
        (limit < self.vocab).then_some(limit)
    }

    /// Chooses the part that makes most tokens per second: `acceptance` is that of a first draft with the part in use,
    /// `window_s` the seconds of a window with one draft and `step_s` those of a draft step over the whole vocabulary.
    pub(crate) fn choose(&mut self, acceptance: f64, window_s: f64, step_s: f64) {
        let whole = acceptance / self.coverage(self.used);
        let rate = |parts: usize| {
            let part = parts as f64 / PARTS as f64;
            let step = step_s * (1.0 - self.head_share + self.head_share * part);
            (1.0 + whole * self.coverage(parts)) / (window_s + step)
        };
        let best = (1..=PARTS).max_by(|&a, &b| rate(a).total_cmp(&rate(b))).unwrap_or(PARTS);
        if rate(best) > rate(self.used) * WORTH_IT {
            self.used = best;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_tokens_need_a_small_head_and_rare_ones_a_whole_one() {
        let mut vocabulary = DraftVocabulary::new(16_000, 0.8);
        vocabulary.note((0..500).map(|i| i % 900));
        vocabulary.choose(0.8, 1.0, 0.4);
        assert_eq!(vocabulary.limit(), Some(1024));
        assert!((vocabulary.cost(vocabulary.limit()) - (0.2 + 0.8 * 0.064)).abs() < 1e-9);
        vocabulary.note((0..2000).map(|i| 15_000 + i % 900));
        vocabulary.choose(0.8, 1.0, 0.4);
        assert_eq!(vocabulary.limit(), None);
        assert_eq!(vocabulary.cost(None), 1.0);
    }

    #[test]
    fn a_head_that_costs_nothing_is_used_whole() {
        let mut vocabulary = DraftVocabulary::new(6144, 0.0);
        vocabulary.note(0..100);
        vocabulary.choose(0.7, 1.0, 0.3);
        assert_eq!(vocabulary.limit(), None);
    }

    #[test]
    fn ids_past_the_vocabulary_are_left_out() {
        let mut vocabulary = DraftVocabulary::new(100, 0.5);
        vocabulary.note([99, 100, u32::MAX]);
        assert_eq!(vocabulary.counts.iter().sum::<f64>(), 1.0);
    }
}
