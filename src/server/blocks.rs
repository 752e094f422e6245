//! Answers as a row of blocks that open, grow and close: the shape in which the messages and responses APIs stream.

use super::answer::{Block, Choice};
use strata_core::text::output::Piece;

/// What happens to a block.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Block `0` starts; it is empty so far.
    Open(usize, Block),
    /// Text is added to a block.
    Grow(usize, BlockKind, String),
    /// The block is complete.
    Close(usize, Block),
}

/// What a block holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// Thinking.
    Reasoning,
    /// Text for the user.
    Text,
    /// A tool call; what grows are its arguments.
    Call,
}

/// Follows one choice.
#[derive(Default)]
pub struct BlockSteps {
    choice: Choice,
}

impl BlockSteps {
    /// The steps a piece makes.
    pub fn piece(&mut self, piece: &Piece) -> Vec<Step> {
        let before = self.choice.blocks.len();
        self.choice.add_piece(piece);
        let after = self.choice.blocks.len();
        let mut steps = Vec::new();
        if after > before {
            steps.extend(self.close(before));
            let opened = match &self.choice.blocks[after - 1] {
                Block::Reasoning(_) => Block::Reasoning(String::new()),
                Block::Text(_) => Block::Text(String::new()),
                Block::Call { id, name, .. } => {
                    Block::Call { id: id.clone(), name: name.clone(), arguments: String::new() }
                }
            };
            steps.push(Step::Open(after - 1, opened));
        }
        let (kind, text) = match piece {
            Piece::Reasoning(text) => (BlockKind::Reasoning, text),
            Piece::Content(text) => (BlockKind::Text, text),
            Piece::ToolCallArguments { delta, .. } => (BlockKind::Call, delta),
            Piece::ToolCallStart { .. } | Piece::ToolCallEnd { .. } => return steps,
        };
        if after > 0 && !text.is_empty() {
            steps.push(Step::Grow(after - 1, kind, text.clone()));
        }
        steps
    }

    /// The step that ends the answer.
    pub fn finish(&self) -> Option<Step> {
        self.close(self.choice.blocks.len())
    }

    /// The answer so far.
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    fn close(&self, count: usize) -> Option<Step> {
        let last = count.checked_sub(1)?;
        Some(Step::Close(last, self.choice.blocks[last].clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_open_grow_and_close_in_order() {
        let mut blocks = BlockSteps::default();
        let pieces = [
            Piece::Reasoning("a".into()),
            Piece::Reasoning("b".into()),
            Piece::Content("c".into()),
            Piece::ToolCallStart { index: 0, id: "i".into(), name: "f".into() },
            Piece::ToolCallArguments { index: 0, delta: "{}".into() },
            Piece::ToolCallEnd { index: 0 },
        ];
        let mut steps: Vec<Step> = pieces.iter().flat_map(|p| blocks.piece(p)).collect();
        steps.extend(blocks.finish());
        let call = |arguments: &str| Block::Call { id: "i".into(), name: "f".into(), arguments: arguments.into() };
        assert_eq!(
            steps,
            [
                Step::Open(0, Block::Reasoning(String::new())),
                Step::Grow(0, BlockKind::Reasoning, "a".into()),
                Step::Grow(0, BlockKind::Reasoning, "b".into()),
                Step::Close(0, Block::Reasoning("ab".into())),
                Step::Open(1, Block::Text(String::new())),
                Step::Grow(1, BlockKind::Text, "c".into()),
                Step::Close(1, Block::Text("c".into())),
                Step::Open(2, call("")),
                Step::Grow(2, BlockKind::Call, "{}".into()),
                Step::Close(2, call("{}")),
            ]
        );
    }
}
