//! Prompt lookup: proposes what followed the latest tokens the last time they occurred in what the slot holds. The index grows
//! with the slot and is never built again; a cut (a conversation edited) leaves stale entries that the comparison of tokens rejects.

use std::collections::HashMap;

use super::super::options::NgramOptions;

/// Index of the places where runs of `min_match` tokens ended.
pub(crate) struct NgramIndex {
    options: NgramOptions,
    /// Hash of a run to the position after its last occurrence.
    places: HashMap<u64, u32>,
    /// Runs that end before this position are in the index.
    indexed: usize,
}

/// What a lookup found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Match {
    /// Position of the token that followed.
    pub(crate) at: usize,
    /// How many of the latest tokens match.
    pub(crate) length: usize,
}

/// A match is not measured beyond this.
const LONGEST: usize = 64;

impl NgramIndex {
    pub(crate) fn new(options: NgramOptions) -> Self {
        NgramIndex { options, places: HashMap::new(), indexed: 0 }
    }

    pub(crate) fn options(&self) -> &NgramOptions {
        &self.options
    }

    /// The slot was cut back to `rows`.
    pub(crate) fn truncate(&mut self, rows: usize) {
        self.indexed = self.indexed.min(rows);
        if rows == 0 {
            self.places.clear();
        }
    }

    /// Finds the latest earlier occurrence of the last tokens of `tokens`.
    pub(crate) fn find(&mut self, tokens: &[u32]) -> Option<Match> {
        let run = self.options.min_match;
        let end = tokens.len();
        if end <= run {
            return None;
        }
        for after in self.indexed.max(run)..end {
            self.places.insert(hash(&tokens[after - run..after]), after as u32);
        }
        self.indexed = end;
        let at = *self.places.get(&hash(&tokens[end - run..]))? as usize;
        if at >= end {
            return None;
        }
        let length = (1..=at.min(LONGEST)).take_while(|&back| tokens[at - back] == tokens[end - back]).count();
        (length >= run).then_some(Match { at, length })
    }
}

/// FNV-1a over the ids.
fn hash(tokens: &[u32]) -> u64 {
    tokens.iter().fold(0xcbf2_9ce4_8422_2325, |h, &token| (h ^ u64::from(token)).wrapping_mul(0x100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index() -> NgramIndex {
        NgramIndex::new(NgramOptions { min_match: 2, long_match: 4, max_draft: 4 })
    }

    #[test]
    fn the_latest_occurrence_wins_and_its_length_is_measured() {
        let tokens = [9, 1, 2, 3, 7, 1, 2, 4, 8, 1, 2];
        assert_eq!(index().find(&tokens), Some(Match { at: 7, length: 2 }));
        let tokens = [5, 1, 2, 3, 9, 5, 1, 2];
        assert_eq!(index().find(&tokens), Some(Match { at: 3, length: 3 }));
        assert_eq!(index().find(&[1, 2, 3, 4]), None);
        assert_eq!(index().find(&[1, 2]), None);
    }

    #[test]
    fn growing_step_by_step_equals_indexing_at_once_also_after_a_cut() {
        let text: Vec<u32> = (0..400u32).map(|i| (i * i / 7) % 11).collect();
        let mut grown = index();
        for end in 0..text.len() {
            assert_eq!(grown.find(&text[..end]), index().find(&text[..end]), "at {end}");
        }
        grown.truncate(100);
        let mut edited = text[..100].to_vec();
        edited.extend([3, 3, 4, 4, 3, 3]);
        let found = grown.find(&edited).unwrap();
        assert_eq!(edited[found.at - 2..found.at], [3, 3]);
        assert!(found.at < edited.len());
    }
}
