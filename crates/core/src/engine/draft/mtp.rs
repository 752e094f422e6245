//! What the MTP cache of a slot still has to read. Row p of that cache belongs to the token at row p and the trunk's hidden row
//! of p - 1 (zeros for the first). The hidden rows wait here until drafts are wanted, and are then read in batches.

/// Hidden rows waiting to be read into a slot's MTP cache.
#[derive(Clone, Debug, Default)]
pub(crate) struct MtpFeed {
    width: usize,
    /// Cache row that the first waiting hidden row belongs to: equal to the rows of the MTP cache.
    first: usize,
    /// Hidden rows of the trunk at `first - 1`, `first`, ..., the last one that of the slot's last row.
    waiting: Vec<f32>,
    /// Rows were given up because too many waited. No drafts until the slot goes back to a row the cache has.
    lost: bool,
}

/// Rows that may wait: 32 MiB at a width of 2048.
const MOST_WAITING: usize = 4096;

impl MtpFeed {
    pub(crate) fn new(width: usize) -> Self {
        let mut feed = MtpFeed { width, ..MtpFeed::default() };
        feed.reset();
        feed
    }

    /// What a saved state needs to know of a feed: the cache rows read, and the hidden rows waiting (none: given up).
    pub(crate) fn parts(&self) -> (usize, &[f32]) {
        (self.first, &self.waiting)
    }

    /// The feed of a saved state.
    pub(crate) fn from_parts(width: usize, first: usize, waiting: Vec<f32>) -> Self {
        let lost = waiting.is_empty() || !waiting.len().is_multiple_of(width);
        MtpFeed { width, first, waiting: if lost { Vec::new() } else { waiting }, lost }
    }

    /// Nothing is held.
    pub(crate) fn reset(&mut self) {
        self.first = 0;
        self.waiting.clear();
        self.waiting.resize(self.width, 0.0);
        self.lost = false;
    }

    /// Adds the trunk's hidden row of the slot's newest row.
    pub(crate) fn push(&mut self, hidden: &[f32]) {
        if self.lost {
            return;
        }
        if self.waiting.len() >= MOST_WAITING * self.width {
            self.lost = true;
            self.waiting = Vec::new();
            return;
        }
        self.waiting.extend_from_slice(hidden);
    }

    /// Cache rows that can be read now, the one of the slot's next token included. 0 when rows were given up.
    pub(crate) fn ready(&self) -> usize {
        if self.lost { 0 } else { self.waiting.len() / self.width }
    }

    /// Cache row of the first one waiting.
    pub(crate) fn first(&self) -> usize {
        self.first
    }

    pub(crate) fn hidden(&self, index: usize) -> &[f32] {
        &self.waiting[index * self.width..(index + 1) * self.width]
    }

    /// The first `rows` were read.
    pub(crate) fn consumed(&mut self, rows: usize) {
        self.waiting.drain(..rows * self.width);
        self.first += rows;
    }

    /// The newest hidden row, if the slot holds rows.
    pub(crate) fn newest(&self) -> Option<&[f32]> {
        let at = self.waiting.len().checked_sub(self.width)?;
        Some(&self.waiting[at..])
    }

    /// The slot went back to `rows` rows, whose last hidden row is `last`; returns how many rows of the MTP cache stay.
    pub(crate) fn go_back(&mut self, rows: usize, last: &[f32]) -> usize {
        if self.first > rows {
            self.first = rows;
            self.waiting.clear();
            self.waiting.extend_from_slice(last);
            // A checkpoint that was taken without the head in use has no hidden row.
            self.lost = last.len() != self.width;
        } else if !self.lost {
            self.waiting.truncate((rows - self.first + 1) * self.width);
        }
        self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_wait_in_order_and_going_back_restores_what_the_cache_needs() {
        let mut feed = MtpFeed::new(1);
        assert_eq!((feed.ready(), feed.hidden(0)), (1, &[0.0][..]));
        for row in 1..=5 {
            feed.push(&[row as f32]);
        }
        // Rows 0..=4 are held, row 5 is the next token.
        assert_eq!(feed.ready(), 6);
        feed.consumed(4);
        assert_eq!((feed.first(), feed.ready(), feed.hidden(0)), (4, 2, &[4.0][..]));
        let mut near = feed.clone();
        assert_eq!(near.go_back(4, &[4.0]), 4);
        assert_eq!((near.ready(), near.hidden(0)), (1, &[4.0][..]));
        assert_eq!(feed.go_back(2, &[2.0]), 2);
        assert_eq!((feed.ready(), feed.hidden(0)), (1, &[2.0][..]));
    }

    #[test]
    fn a_feed_that_gave_up_recovers_when_the_slot_goes_back_far_enough() {
        let mut feed = MtpFeed::new(1);
        feed.consumed(1);
        for _ in 0..=MOST_WAITING {
            feed.push(&[1.0]);
        }
        assert_eq!(feed.ready(), 0);
        assert_eq!(feed.go_back(1000, &[1.0]), 1);
        assert_eq!(feed.ready(), 0);
        assert_eq!(feed.go_back(0, &[0.0]), 0);
        assert_eq!(feed.ready(), 1);
    }
}
