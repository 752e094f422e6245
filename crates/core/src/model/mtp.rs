//! The MTP head run as a head: one attention layer with its own cache, and the vocabulary head.
//!
//! The entry for position p is the token at p with the trunk's post-norm hidden row of p - 1, at p's own rope position and
//! cache index. A chain of drafts feeds the head's own post-norm hidden row and the drafted token back in.

use super::counters::Phase;
use super::error::ModelError;
use super::forward::{Caches, Core, Network, RowHead};
use super::state::SlotState;
use super::window::{MtpRow, StepOutput};
use strata_kernels::Device;

impl<D: Device> Network<D> {
    /// See [`Model::mtp_forward`](super::Model::mtp_forward).
    pub(super) fn mtp_forward(
        &self,
        core: &Core<D>,
        rows: &[MtpRow<'_>],
        states: &mut [&mut SlotState<D>],
        out: &mut StepOutput,
        head_limit: Option<usize>,
    ) -> Result<(), ModelError> {
        let Some(mtp) = &self.weights.mtp else {
            return Err(ModelError::Window("the model was loaded without an MTP head".to_string()));
        };
        let (device, config) = (&core.device, &core.config);
        let mut hidden = Vec::with_capacity(rows.len() * config.hidden);
        for (index, row) in rows.iter().enumerate() {
            if row.hidden.len() != config.hidden {
                let (found, expected) = (row.hidden.len(), config.hidden);
                return Err(ModelError::Window(format!("MTP row {index}: {found} hidden values, expected {expected}")));
            }
            hidden.extend_from_slice(row.hidden);
        }
        let work = &mut *self.lock();
        let mut clock = self.clock.start();
        self.begin(
            core,
            work,
            rows.iter().map(|row| RowHead { slot: row.slot, input: &row.input, position: row.position }),
            mtp.embedding.as_ref().unwrap_or(&self.weights.embedding),
            |slot| match states.get(slot) {
                None => Err(ModelError::Window(format!("slot {slot} of {} states", states.len()))),
                Some(state) => Ok((state.mtp_rows, false)),
            },
            |slot| states[slot].ctx_rows,
        )?;
        let eps = config.norm_eps;
        // x = eh_proj . [norm(embedding) | norm(hidden)]
        device.rms_norm(&work.x, &mtp.embedding_norm, eps, &mut work.normed);
        device.upload(&hidden, &mut work.x);
        device.rms_norm(&work.x, &mtp.hidden_norm, eps, &mut work.hidden);
        device.concat(&work.normed, &work.hidden, config.hidden, &mut work.pair);
        device.matmul(&mut work.scratch, &work.pair, rows.len(), &mut [(&mtp.eh_proj, &mut work.x)]);
        self.layer(core, &mtp.layer, Caches::Mtp, work, rows.len(), states, &mut clock);
        let head = mtp.head.as_ref().unwrap_or(&self.weights.output);
        let short =
            head_limit.filter(|&limit| limit < config.vocab).map(|limit| device.weight_rows(head, limit.max(1)));
        let head = short.as_ref().unwrap_or(head);
        let all: Vec<usize> = (0..rows.len()).collect();
        self.head(core, work, &all, |&index| rows[index].want_logits, &mtp.head_norm, head, out);
        out.hidden.clear();
        out.hidden.extend_from_slice(&work.host_hidden);
        for slot in &work.slots {
            states[slot.slot].mtp_rows += slot.count;
        }
        clock.lap(Phase::Mtp);
        Ok(())
    }
}
