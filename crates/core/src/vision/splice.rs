//! The places and positions of tokens and pictures in a prompt.
//!
//! Every row has a position (t, h, w). A token at position p has (p, p, p). A picture that starts at position p gives
//! its merged block (r, c) the position (p, p + r, p + c), and what follows goes on at p + max(rows, columns): a picture
//! takes as many rows of context as it has blocks, but moves the positions on by its longer side only.

use super::PictureRows;
use std::ops::Range;

/// A stretch of a prompt, as far as positions are concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Span {
    /// This many tokens.
    Tokens(usize),
    /// A picture of so many merged blocks down and across.
    Picture(u32, u32),
}

impl Span {
    /// The span of a picture.
    pub fn of(picture: &PictureRows) -> Self {
        Span::Picture(picture.grid.0, picture.grid.1)
    }

    /// Rows of context it takes.
    pub fn rows(self) -> usize {
        match self {
            Span::Tokens(n) => n,
            Span::Picture(rows, cols) => rows as usize * cols as usize,
        }
    }

    /// How far it moves the position on.
    pub fn position_span(self) -> u32 {
        match self {
            Span::Tokens(n) => n as u32,
            Span::Picture(rows, cols) => rows.max(cols),
        }
    }

    /// The position of its row `index` when it starts at `start`.
    pub fn position(self, start: u32, index: usize) -> [u32; 3] {
        match self {
            Span::Tokens(_) => [start + index as u32; 3],
            Span::Picture(_, cols) => {
                let (r, c) = (index as u32 / cols, index as u32 % cols);
                [start, start + r, start + c]
            }
        }
    }
}

/// A row of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SplicedRow {
    /// Index of its span.
    pub span: usize,
    /// Row within the span: the n-th token, or the n-th merged block.
    pub index: usize,
    /// Position (t, h, w).
    pub position: [u32; 3],
}

/// A prompt laid out in rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PromptLayout {
    spans: Vec<Span>,
    /// First row and first position of every span, then those after the last.
    starts: Vec<(usize, u32)>,
}

impl PromptLayout {
    /// Lays out `spans` from row 0 and position 0.
    pub fn new(spans: impl IntoIterator<Item = Span>) -> Self {
        let spans: Vec<Span> = spans.into_iter().collect();
        let mut starts = vec![(0, 0)];
        let (mut row, mut position) = (0, 0);
        for span in &spans {
            row += span.rows();
            position += span.position_span();
            starts.push((row, position));
        }
        Self { spans, starts }
    }

    /// Rows of context the prompt takes.
    pub fn rows(&self) -> usize {
        self.starts.last().map_or(0, |s| s.0)
    }

    /// The position of the first row after the prompt.
    pub fn next_position(&self) -> u32 {
        self.starts.last().map_or(0, |s| s.1)
    }

    /// The rows in `range`, which may begin or end inside a picture.
    ///
    /// # Panics
    /// When `range` reaches past the prompt.
    pub fn slice(&self, range: Range<usize>) -> impl Iterator<Item = SplicedRow> + '_ {
        assert!(range.start <= range.end && range.end <= self.rows(), "rows {range:?} of {}", self.rows());
        let mut span = self.starts.partition_point(|s| s.0 <= range.start).saturating_sub(1);
        range.map(move |row| {
            while row >= self.starts[span + 1].0 {
                span += 1;
            }
            let (first, start) = self.starts[span];
            let index = row - first;
            SplicedRow { span, index, position: self.spans[span].position(start, index) }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_a_picture_between_tokens() {
        let layout = PromptLayout::new([Span::Tokens(2), Span::Picture(2, 3), Span::Tokens(1), Span::Picture(1, 1)]);
        assert_eq!((layout.rows(), layout.next_position()), (10, 7));
        let positions: Vec<[u32; 3]> = layout.slice(0..10).map(|r| r.position).collect();
        let expected = [
            [0, 0, 0],
            [1, 1, 1],
            [2, 2, 2],
            [2, 2, 3],
            [2, 2, 4],
            [2, 3, 2],
            [2, 3, 3],
            [2, 3, 4],
            [5, 5, 5],
            [6, 6, 6],
        ];
        assert_eq!(positions, expected);
    }

    #[test]
    fn a_cut_anywhere_gives_the_same_rows() {
        let layout = PromptLayout::new([Span::Picture(3, 2), Span::Tokens(0), Span::Tokens(3), Span::Picture(2, 4)]);
        let whole: Vec<SplicedRow> = layout.slice(0..layout.rows()).collect();
        for cut in 0..=layout.rows() {
            let parts: Vec<SplicedRow> = layout.slice(0..cut).chain(layout.slice(cut..layout.rows())).collect();
            assert_eq!(parts, whole, "cut at {cut}");
        }
        assert!(PromptLayout::new([]).slice(0..0).next().is_none());
    }
}
