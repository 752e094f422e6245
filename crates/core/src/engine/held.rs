//! What a slot's state contains, row by row: token ids, and the keys of pictures. Finds how much of a prompt is held already,
//! and knows every row's rope position (after a picture, positions and cache indices differ).

use std::sync::Arc;

use super::request::{Prompt, PromptItem};
use crate::model::RowInput;
use crate::vision::PictureRows;
use crate::vision::splice::{block_position, position_span};

/// Stands for a picture row in the list of tokens.
pub(crate) const PICTURE: u32 = u32::MAX;

/// A picture among the rows.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Span {
    /// First row of the picture.
    pub(crate) start: usize,
    /// Merged rows and columns.
    pub(crate) grid: (u32, u32),
    /// The picture's key.
    pub(crate) key: [u8; 32],
    /// Rope position of the picture's first row.
    position: u32,
}

impl Span {
    fn rows(&self) -> usize {
        self.grid.0 as usize * self.grid.1 as usize
    }

    fn end(&self) -> usize {
        self.start + self.rows()
    }

    /// How far the rope position of the text after the picture lies behind its cache index.
    fn lag_after(&self) -> u32 {
        self.end() as u32 - (self.position + position_span(self.grid))
    }
}

/// Rows in order. Tokens and pictures of a prompt, or of a slot's state.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Held {
    tokens: Vec<u32>,
    spans: Vec<Span>,
}

impl Held {
    /// The rows of a prompt.
    pub(crate) fn of_prompt(prompt: &Prompt) -> Held {
        let mut held = Held::default();
        for piece in &prompt.pieces {
            match piece {
                PromptItem::Tokens(ids) => held.tokens.extend_from_slice(ids),
                PromptItem::Picture(picture) => held.push_span(picture.grid, picture.key),
            }
        }
        held
    }

    /// Adds a picture's rows.
    pub(crate) fn push_span(&mut self, grid: (u32, u32), key: [u8; 32]) {
        let start = self.tokens.len();
        let position = self.position(start)[0];
        let span = Span { start, grid, key, position };
        self.tokens.resize(span.end(), PICTURE);
        self.spans.push(span);
    }

    pub(crate) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Token ids; [`PICTURE`] for picture rows.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans
    }

    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
    }

    /// Calls `look` with the tokens and one more.
    pub(crate) fn with_next(&mut self, next: u32, look: impl FnOnce(&[u32])) {
        self.tokens.push(next);
        look(&self.tokens);
        self.tokens.pop();
    }

    pub(crate) fn clear(&mut self) {
        self.truncate(0);
    }

    /// Keeps the first `rows` rows. A cut inside a picture keeps the picture's first rows.
    pub(crate) fn truncate(&mut self, rows: usize) {
        self.tokens.truncate(rows);
        self.spans.retain(|span| span.start < rows);
    }

    /// Appends `other`'s rows from this one's length up to `rows`; the rows before must be the same.
    pub(crate) fn extend_from(&mut self, other: &Held, rows: usize) {
        let from = self.len();
        self.tokens.extend_from_slice(&other.tokens[from..rows]);
        self.spans.extend(other.spans.iter().filter(|span| span.start >= from && span.start < rows).cloned());
    }

    /// How many first rows are the same in both.
    pub(crate) fn common_start(&self, other: &Held) -> usize {
        let mut rows = self.tokens.iter().zip(&other.tokens).take_while(|(a, b)| a == b).count();
        let mut others = other.spans.iter();
        for span in &self.spans {
            if span.start >= rows {
                break;
            }
            match others.next() {
                Some(twin) if twin.start == span.start && twin.key == span.key && twin.grid == span.grid => {}
                _ => {
                    rows = rows.min(span.start);
                    break;
                }
            }
        }
        rows
    }

    /// Rope position (t, h, w) of row `row`, which may be the next one.
    pub(crate) fn position(&self, row: usize) -> [u32; 3] {
        let Some(span) = self.spans.iter().rev().find(|span| span.start <= row) else {
            return [row as u32; 3];
        };
        if row < span.end() {
            return block_position(span.grid, span.position, (row - span.start) as u32);
        }
        [row as u32 - span.lag_after(); 3]
    }
}

/// The rows of a prompt with what they feed to the model.
pub(crate) struct PromptRows {
    /// Tokens, pictures and positions.
    pub(crate) rows: Held,
    pictures: Vec<Arc<PictureRows>>,
}

impl PromptRows {
    pub(crate) fn new(prompt: &Prompt) -> Self {
        let pictures = prompt
            .pieces
            .iter()
            .filter_map(|piece| match piece {
                PromptItem::Picture(picture) => Some(picture.clone()),
                PromptItem::Tokens(_) => None,
            })
            .collect();
        PromptRows { rows: Held::of_prompt(prompt), pictures }
    }

    /// What row `row` feeds to the first layer.
    pub(crate) fn input(&self, row: usize) -> RowInput {
        let token = self.rows.tokens[row];
        if token != PICTURE {
            return RowInput::Token(token);
        }
        let index = self.rows.spans.partition_point(|span| span.start <= row) - 1;
        let picture = &self.pictures[index];
        RowInput::Embedding { data: picture.data.clone(), start: (row - self.rows.spans[index].start) * picture.width }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn picture(key: u8, grid: (u32, u32)) -> PromptItem {
        let cells = (grid.0 * grid.1) as usize;
        PromptItem::Picture(Arc::new(PictureRows { key: [key; 32], grid, width: 2, data: vec![0.0; cells * 2].into() }))
    }

    fn held(pieces: Vec<PromptItem>) -> Held {
        Held::of_prompt(&Prompt { pieces, turn_starts: vec![] })
    }

    #[test]
    fn text_after_a_picture_goes_on_at_the_longer_side() {
        let held = held(vec![PromptItem::Tokens(vec![1, 2]), picture(1, (2, 3)), PromptItem::Tokens(vec![3])]);
        assert_eq!(held.position(1), [1, 1, 1]);
        assert_eq!(held.position(2), [2, 2, 2]);
        assert_eq!(held.position(4), [2, 2, 4]);
        assert_eq!(held.position(5), [2, 3, 2]);
        assert_eq!(held.position(8), [5, 5, 5]);
        assert_eq!(held.position(9), [6, 6, 6]);
    }

    #[test]
    fn another_picture_at_the_same_place_is_another_start() {
        let tokens = |ids: &[u32]| PromptItem::Tokens(ids.to_vec());
        let first = held(vec![tokens(&[1]), picture(1, (1, 2)), tokens(&[2]), picture(2, (1, 1))]);
        assert_eq!(first.common_start(&first), 5);
        let second_differs = held(vec![tokens(&[1]), picture(1, (1, 2)), tokens(&[2]), picture(3, (1, 1))]);
        assert_eq!(first.common_start(&second_differs), 4);
        let first_differs = held(vec![tokens(&[1]), picture(3, (1, 2)), tokens(&[2]), picture(2, (1, 1))]);
        assert_eq!(first.common_start(&first_differs), 1);
        let mut cut = first.clone();
        cut.truncate(2);
        assert_eq!(first.common_start(&cut), 2);
        assert_eq!(cut.common_start(&first), 2);
        assert_eq!(first.common_start(&held(vec![tokens(&[1])])), 1);
        cut.extend_from(&first, 5);
        assert_eq!(cut, first);
    }
}
