//! The checkpoints of one slot: copies of recurrent state at turn boundaries and chunk borders, bounded in number.

use std::sync::Arc;

/// A copy of a slot's recurrent state.
#[derive(Clone)]
pub(crate) struct Kept<C> {
    /// Rows the state had read.
    pub(crate) rows: usize,
    pub(crate) state: C,
    /// The trunk's hidden row of the last of them (empty without an MTP head in use).
    pub(crate) hidden: Arc<[f32]>,
    /// Logits of the last of them, where an answer began: the same prompt needs no reading at all.
    pub(crate) logits: Option<Arc<[f32]>>,
    /// Taken where a turn starts or an answer begins, and so likelier to be gone back to.
    pub(crate) at_turn: bool,
}

/// Where a state can be gone back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Point {
    pub(crate) rows: usize,
    pub(crate) has_logits: bool,
}

/// The most rows of a prompt of `prompt_rows` rows that a state with these points serves, of which the first `common` are held.
pub(crate) fn reusable(points: impl Iterator<Item = Point>, common: usize, prompt_rows: usize) -> usize {
    let fits = points.filter(|point| point.rows <= common && (point.rows < prompt_rows || point.has_logits));
    fits.map(|point| point.rows).max().unwrap_or(0)
}

/// Checkpoints in ascending order of rows.
pub(crate) struct Checkpoints<C> {
    list: Vec<Kept<C>>,
    limit: usize,
}

/// A checkpoint at a turn is worth this many times the gap it leaves.
const TURN_WEIGHT: usize = 4;

impl<C: Clone> Checkpoints<C> {
    pub(crate) fn new(limit: usize) -> Self {
        Checkpoints { list: Vec::new(), limit }
    }

    pub(crate) fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn list(&self) -> &[Kept<C>] {
        &self.list
    }

    pub(crate) fn set(&mut self, list: Vec<Kept<C>>) {
        self.list = list;
    }

    pub(crate) fn clear(&mut self) {
        self.list.clear();
    }

    pub(crate) fn at(&self, rows: usize) -> Option<&Kept<C>> {
        self.list.binary_search_by_key(&rows, |kept| kept.rows).ok().map(|index| &self.list[index])
    }

    /// Rows of the last one, or 0.
    pub(crate) fn last_rows(&self) -> usize {
        self.list.last().map_or(0, |kept| kept.rows)
    }

    pub(crate) fn points(&self) -> impl Iterator<Item = Point> + '_ {
        self.list.iter().map(|kept| Point { rows: kept.rows, has_logits: kept.logits.is_some() })
    }

    /// Forgets those beyond `rows`: what follows there will differ.
    pub(crate) fn cut(&mut self, rows: usize) {
        self.list.retain(|kept| kept.rows <= rows);
    }

    /// Adds one beyond all others, or replaces the last one at the same rows. Only the newest answer keeps its logits. Over the
    /// limit, the one goes that leaves the smallest gap; the first one (the end of a shared system prompt) and the last two
    /// (the latest turns) stay.
    pub(crate) fn add(&mut self, kept: Kept<C>) {
        if self.limit == 0 {
            return;
        }
        if self.last_rows() == kept.rows {
            self.list.pop();
        }
        if kept.logits.is_some() {
            self.list.iter_mut().for_each(|older| older.logits = None);
        }
        self.list.push(kept);
        while self.list.len() > self.limit {
            let last = self.list.len() - 1;
            let loss = |&at: &usize| {
                let gap = self.list[at + 1].rows - self.list[at - 1].rows;
                gap * if self.list[at].at_turn { TURN_WEIGHT } else { 1 }
            };
            let victim = (1..last.saturating_sub(1)).min_by_key(loss).unwrap_or(0);
            self.list.remove(victim);
        }
    }
}

/// Rows at which to take checkpoints while reading a prompt from `from` to `prompt_rows`: the first turn starts (a shared system
/// prompt), the last ones (edits), and some in between, `limit` at most. The end of the prompt is not among them.
pub(crate) fn wanted(turn_starts: &[usize], from: usize, prompt_rows: usize, limit: usize) -> Vec<usize> {
    let inside: Vec<usize> = turn_starts.iter().copied().filter(|&row| row > from && row < prompt_rows).collect();
    let room = limit.saturating_sub(1);
    if inside.len() <= room {
        return inside;
    }
    let latest = room.min(3);
    let (rest, newest) = inside.split_at(inside.len() - latest);
    let spread = room - latest;
    let mut rows: Vec<usize> = (0..spread).map(|i| rest[i * rest.len() / spread]).collect();
    rows.extend_from_slice(newest);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(rows: usize, at_turn: bool) -> Kept<usize> {
        Kept { rows, state: rows, hidden: [].into(), logits: None, at_turn }
    }

    fn rows(checkpoints: &Checkpoints<usize>) -> Vec<usize> {
        checkpoints.points().map(|point| point.rows).collect()
    }

    #[test]
    fn over_the_limit_the_smallest_gap_goes_and_the_first_and_last_stay() {
        let mut checkpoints = Checkpoints::new(4);
        for row in [10, 100, 110, 300] {
            checkpoints.add(kept(row, true));
        }
        checkpoints.add(kept(400, true));
        assert_eq!(rows(&checkpoints), [10, 110, 300, 400]);
        checkpoints.add(kept(410, false));
        checkpoints.add(kept(500, true));
        assert_eq!(rows(&checkpoints), [10, 300, 410, 500]);
        let mut one = Checkpoints::new(1);
        one.add(kept(5, true));
        one.add(kept(9, true));
        assert_eq!(rows(&one), [9]);
    }

    #[test]
    fn reuse_ends_at_the_last_point_that_still_leaves_logits_to_come() {
        let point = |rows, has_logits| Point { rows, has_logits };
        let points = [point(10, false), point(50, true), point(80, false)];
        assert_eq!(reusable(points.into_iter(), 60, 100), 50);
        assert_eq!(reusable(points.into_iter(), 50, 50), 50);
        assert_eq!(reusable(points.into_iter(), 80, 80), 50);
        assert_eq!(reusable(points.into_iter(), 9, 100), 0);
    }

    #[test]
    fn long_conversations_keep_the_first_turns_and_the_last() {
        let turns: Vec<usize> = (0..40).map(|i| i * 10).collect();
        let chosen = wanted(&turns, 0, 500, 8);
        assert_eq!(chosen.len(), 7);
        assert_eq!(chosen[0], 10);
        assert_eq!(chosen[4..], [370, 380, 390]);
        assert_eq!(wanted(&turns, 375, 500, 8), [380, 390]);
        assert_eq!(wanted(&turns, 0, 500, 0), [0usize; 0]);
    }
}
