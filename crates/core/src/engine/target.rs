//! What the engine needs of a model: forward passes over slot states. [`Model`](crate::model::Model) is the one
//! implementation that computes; the scheduler's tests use a toy language model instead, whose answers are known.

use std::io::{Read, Write};

use crate::model::{MtpRow, StepOutput, Window};

/// A model as the engine sees it.
pub(crate) trait Target: Send + Sync + 'static {
    /// Everything the model remembers of one slot.
    type State: Send + 'static;
    /// A copy of the part of a state that cannot be cut back.
    type Checkpoint: Clone + Send + 'static;

    /// Logits per row.
    fn vocab(&self) -> usize;
    /// Width of a hidden row.
    fn hidden(&self) -> usize;
    /// Whether there is an MTP head to draft with.
    fn has_mtp(&self) -> bool;

    fn new_state(&self, ctx: usize) -> Result<Self::State, String>;
    fn forward(&self, window: &Window, states: &mut [&mut Self::State], out: &mut StepOutput) -> Result<(), String>;
    /// Keeps the first `rows` rows of the last verify window.
    fn commit(&self, state: &mut Self::State, rows: usize);
    fn mtp_forward(
        &self,
        rows: &[MtpRow<'_>],
        states: &mut [&mut Self::State],
        out: &mut StepOutput,
        head_limit: Option<usize>,
    ) -> Result<(), String>;

    /// Rows held.
    fn rows(state: &Self::State) -> usize;
    /// Rows of the MTP cache.
    fn mtp_rows(state: &Self::State) -> usize;
    fn truncate_mtp(state: &mut Self::State, rows: usize);
    fn reset(state: &mut Self::State);
    fn checkpoint(state: &Self::State) -> Self::Checkpoint;
    /// Goes back to a checkpoint taken of this state, or of the one it was copied from.
    fn restore(state: &mut Self::State, checkpoint: &Self::Checkpoint) -> Result<(), String>;
    fn copy_from(state: &mut Self::State, other: &Self::State);
    /// Hash of everything that influences the trunk's future.
    fn hash(state: &Self::State) -> u64;
    fn save(&self, state: &Self::State, to: &mut dyn Write) -> std::io::Result<()>;
    fn load(&self, state: &mut Self::State, from: &mut dyn Read) -> Result<(), String>;
    fn save_checkpoint(&self, checkpoint: &Self::Checkpoint, to: &mut dyn Write) -> std::io::Result<()>;
    fn load_checkpoint(&self, from: &mut dyn Read) -> Result<Self::Checkpoint, String>;
}
