//! What goes into a forward pass and what comes out of it.

use std::sync::Arc;

/// What a row feeds to the first layer.
#[derive(Clone, Debug, PartialEq)]
pub enum RowInput {
    /// The embedding of a token id.
    Token(u32),
    /// One row of a picture: `hidden` values of `data` from `start` on.
    Embedding {
        /// The picture's rows, one after the other.
        data: Arc<[f32]>,
        /// Where this row starts in `data`.
        start: usize,
    },
}

/// One row of a window.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Which of the states given to [`Model::forward`](super::Model::forward) the row belongs to.
    pub slot: u32,
    /// Token or picture row.
    pub input: RowInput,
    /// Rope position (t, h, w). Text rows have three equal numbers. The cache index is not given: it is the number of rows
    /// the slot holds.
    pub position: [u32; 3],
    /// Whether [`StepOutput::logits`] gets a row.
    pub want_logits: bool,
    /// Whether [`StepOutput::hidden`] gets a row (the MTP head's input).
    pub want_hidden: bool,
}

/// The rows that go through the model together. Rows of one slot are consecutive and in order.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Window {
    /// At least one row.
    pub rows: Vec<Row>,
    /// Per slot (index into the states): whether its rows stay uncommitted until
    /// [`Model::commit`](super::Model::commit). Slots past the end of the list are committed at once.
    pub verify: Vec<bool>,
}

/// One row of the MTP head: the token at a position and the trunk's hidden row of the position before.
#[derive(Clone, Debug)]
pub struct MtpRow<'a> {
    /// Which of the states given to [`Model::mtp_forward`](super::Model::mtp_forward) the row belongs to.
    pub slot: u32,
    /// The token (or picture row) at this position.
    pub input: RowInput,
    /// `hidden` values: the trunk's post-norm hidden of the row before, or in a chain of drafts the head's own post-norm
    /// hidden. Zeros for the first row of a slot, as in training.
    pub hidden: &'a [f32],
    /// Rope position of this row.
    pub position: [u32; 3],
    /// Whether the logits (which predict the token after this row's) are wanted.
    pub want_logits: bool,
}

/// What a forward pass gives. Reuse one value from step to step: its buffers are kept.
#[derive(Clone, Debug, Default)]
pub struct StepOutput {
    /// `n_wanted x vocab` logits, in the order of the rows that asked for them.
    pub logits: Vec<f32>,
    /// `n_wanted x hidden` values after the last norm, in the order of the rows that asked for them (every row for the MTP
    /// head).
    pub hidden: Vec<f32>,
    /// Set to `Some` before the call to get the residual stream after every layer, `rows x hidden` each, the embedding
    /// first.
    pub trace: Option<Vec<Vec<f32>>>,
}
