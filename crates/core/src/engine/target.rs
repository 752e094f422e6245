//! What the engine needs of a model: forward passes over slot states. [`Model`](crate::model::Model) is the one
//! implementation that computes; the scheduler's tests use a toy language model instead, whose answers are known.

use std::io::{Read, Write};

use strata_kernels::Device;

use crate::model::{Model, ModelError, MtpRow, SlotState, StateCheckpoint, StepOutput, Window};

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

    /// Bytes of weights that one decode row reads.
    fn bytes_per_row(&self) -> u64;
    /// Share of a draft step's work that the vocabulary head is, 0 to 1.
    fn draft_head_share(&self) -> f64;

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

impl<D: Device> Target for Model<D>
where
    Model<D>: Send + Sync + 'static,
    SlotState<D>: Send + 'static,
    StateCheckpoint<D>: Send + 'static,
{
    type State = SlotState<D>;
    type Checkpoint = StateCheckpoint<D>;

    fn vocab(&self) -> usize {
        self.config().vocab
    }

    fn hidden(&self) -> usize {
        self.config().hidden
    }

    fn has_mtp(&self) -> bool {
        Model::has_mtp(self)
    }

    fn bytes_per_row(&self) -> u64 {
        self.weight_sizes().per_token
    }

    fn draft_head_share(&self) -> f64 {
        let sizes = self.weight_sizes();
        sizes.draft_head as f64 / sizes.per_draft.max(1) as f64
    }

    fn new_state(&self, ctx: usize) -> Result<SlotState<D>, String> {
        Model::new_state(self, ctx).map_err(said)
    }

    fn forward(&self, window: &Window, states: &mut [&mut SlotState<D>], out: &mut StepOutput) -> Result<(), String> {
        Model::forward(self, window, states, out).map_err(said)
    }

    fn commit(&self, state: &mut SlotState<D>, rows: usize) {
        Model::commit(self, state, rows);
    }

    fn mtp_forward(
        &self,
        rows: &[MtpRow<'_>],
        states: &mut [&mut SlotState<D>],
        out: &mut StepOutput,
        head_limit: Option<usize>,
    ) -> Result<(), String> {
        Model::mtp_forward(self, rows, states, out, head_limit).map_err(said)
    }

    fn rows(state: &SlotState<D>) -> usize {
        state.rows()
    }

    fn mtp_rows(state: &SlotState<D>) -> usize {
        state.mtp_rows()
    }

    fn truncate_mtp(state: &mut SlotState<D>, rows: usize) {
        state.truncate_mtp(rows);
    }

    fn reset(state: &mut SlotState<D>) {
        state.reset();
    }

    fn checkpoint(state: &SlotState<D>) -> StateCheckpoint<D> {
        state.checkpoint()
    }

    fn restore(state: &mut SlotState<D>, checkpoint: &StateCheckpoint<D>) -> Result<(), String> {
        state.restore(checkpoint).map_err(said)
    }

    fn copy_from(state: &mut SlotState<D>, other: &SlotState<D>) {
        state.copy_from(other);
    }

    fn hash(state: &SlotState<D>) -> u64 {
        state.trunk_hash()
    }

    fn save(&self, state: &SlotState<D>, mut to: &mut dyn Write) -> std::io::Result<()> {
        state.save(&mut to).map_err(std::io::Error::other)
    }

    fn load(&self, state: &mut SlotState<D>, mut from: &mut dyn Read) -> Result<(), String> {
        state.load(&mut from).map_err(said)
    }

    fn save_checkpoint(&self, checkpoint: &StateCheckpoint<D>, to: &mut dyn Write) -> std::io::Result<()> {
        Model::save_checkpoint(self, checkpoint, to).map_err(std::io::Error::other)
    }

    fn load_checkpoint(&self, from: &mut dyn Read) -> Result<StateCheckpoint<D>, String> {
        Model::load_checkpoint(self, from).map_err(said)
    }
}

fn said(error: ModelError) -> String {
    error.to_string()
}
