//! Everything the model remembers of one slot: KV caches, delta-net states, the MTP head's cache and the last hidden row.

use super::Model;
use super::config::LayerKind;
use super::error::ModelError;
use super::forward::Core;
use std::hash::Hasher;
use std::io::{Read, Write};
use std::sync::Arc;
use strata_kernels::Device;
use strata_kernels::cpu::CpuDevice;

/// State of one trunk layer.
pub(super) enum LayerState<D: Device> {
    Attention(D::KvCache),
    DeltaNet(D::DeltaState),
}

/// What the model remembers of one slot. Made by [`Model::new_state`](super::Model::new_state); only for that model.
pub struct SlotState<D: Device = CpuDevice> {
    pub(super) core: Arc<Core<D>>,
    pub(super) ctx_rows: usize,
    pub(super) rows: usize,
    pub(super) mtp_rows: usize,
    pub(super) layers: Vec<LayerState<D>>,
    pub(super) mtp: Option<D::KvCache>,
    /// `[hidden]` after the last norm, of the last row held; zeros before the first.
    pub(super) last_hidden: Vec<f32>,
    /// Rows of a verify window that wait for their commit.
    pub(super) verifying: usize,
    /// `verifying x hidden`
    pub(super) verify_hidden: Vec<f32>,
}

/// A saved copy of a slot's recurrent state; see [`SlotState::checkpoint`]. Cloning it is cheap.
pub struct StateCheckpoint<D: Device = CpuDevice> {
    saved: Arc<Saved<D>>,
}

struct Saved<D: Device> {
    rows: usize,
    last_hidden: Vec<f32>,
    delta: Vec<D::DeltaState>,
    bytes: u64,
}

impl<D: Device> Clone for StateCheckpoint<D> {
    fn clone(&self) -> Self {
        StateCheckpoint { saved: self.saved.clone() }
    }
}

impl<D: Device> StateCheckpoint<D> {
    /// Rows the slot held when the copy was taken.
    pub fn rows(&self) -> usize {
        self.saved.rows
    }

    /// Memory the copy takes.
    pub fn bytes(&self) -> u64 {
        self.saved.bytes
    }
}

const MAGIC: &[u8; 8] = b"STRATAS1";

impl<D: Device> SlotState<D> {
    pub(super) fn new(core: Arc<Core<D>>, ctx_rows: usize) -> Self {
        let device = &core.device;
        let layers = core.config.layer_kinds.iter().map(|kind| match kind {
            LayerKind::Attention => LayerState::Attention(device.kv_cache(&core.attention, core.kv_type)),
            LayerKind::DeltaNet => LayerState::DeltaNet(device.delta_state(core.delta_shape())),
        });
        let layers = layers.collect();
        let mtp = core.has_mtp.then(|| device.kv_cache(&core.attention, core.kv_type));
        let last_hidden = vec![0.0; core.config.hidden];
        SlotState {
            core,
            ctx_rows,
            rows: 0,
            mtp_rows: 0,
            layers,
            mtp,
            last_hidden,
            verifying: 0,
            verify_hidden: Vec::new(),
        }
    }

    /// Rows held: the cache index of the next row. Rows of an uncommitted verify window do not count.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Rows the MTP head has read: the cache index of its next row.
    pub fn mtp_rows(&self) -> usize {
        self.mtp_rows
    }

    /// Rows the slot may hold.
    pub fn ctx_rows(&self) -> usize {
        self.ctx_rows
    }

    /// The trunk's hidden row after the last norm, of the last row held (zeros when none is): what the MTP head needs with
    /// the next token.
    pub fn last_hidden(&self) -> &[f32] {
        &self.last_hidden
    }

    /// Back to a fresh state; memory of the caches is kept.
    pub fn reset(&mut self) {
        self.rows = 0;
        self.mtp_rows = 0;
        self.verifying = 0;
        self.last_hidden.fill(0.0);
        for layer in &mut self.layers {
            if let LayerState::DeltaNet(state) = layer {
                self.core.device.delta_reset(state);
            }
        }
    }

    /// Copies the recurrent part. With it the slot can go back to these rows while its KV caches still hold them.
    pub fn checkpoint(&self) -> StateCheckpoint<D> {
        let core = &self.core;
        let mut delta = Vec::new();
        for layer in &self.layers {
            if let LayerState::DeltaNet(state) = layer {
                let mut copy = core.device.delta_state(core.delta_shape());
                core.device.delta_copy(state, &mut copy);
                delta.push(copy);
            }
        }
        let one = core.delta.as_ref().map_or(0, |shape| core.device.delta_state_bytes(shape, 0));
        let bytes = one * delta.len() as u64 + 4 * core.config.hidden as u64;
        let saved = Saved { rows: self.rows, last_hidden: self.last_hidden.clone(), delta, bytes };
        StateCheckpoint { saved: Arc::new(saved) }
    }

    /// Goes back to a checkpoint of the same conversation: the first [`StateCheckpoint::rows`] rows of this slot must be the
    /// rows the checkpoint was taken after. KV caches are kept and cut to those rows.
    ///
    /// Errors when the slot holds fewer rows or the checkpoint is of another model.
    pub fn restore(&mut self, checkpoint: &StateCheckpoint<D>) -> Result<(), ModelError> {
        let saved = &checkpoint.saved;
        if saved.rows > self.rows {
            return Err(ModelError::SavedState(format!(
                "a checkpoint of {} rows needs a slot that holds them, found {} rows",
                saved.rows, self.rows
            )));
        }
        let states: Vec<&mut D::DeltaState> = self
            .layers
            .iter_mut()
            .filter_map(|layer| match layer {
                LayerState::DeltaNet(state) => Some(state),
                LayerState::Attention(_) => None,
            })
            .collect();
        if states.len() != saved.delta.len() || self.last_hidden.len() != saved.last_hidden.len() {
            return Err(ModelError::SavedState("the checkpoint is of another model".to_string()));
        }
        for (state, from) in states.into_iter().zip(&saved.delta) {
            self.core.device.delta_copy(from, state);
        }
        self.last_hidden.copy_from_slice(&saved.last_hidden);
        self.verifying = 0;
        self.rows = saved.rows;
        self.mtp_rows = self.mtp_rows.min(saved.rows);
        Ok(())
    }

    /// Forgets the MTP head's rows from `rows` on.
    pub fn truncate_mtp(&mut self, rows: usize) {
        self.mtp_rows = self.mtp_rows.min(rows);
    }

    /// Becomes a copy of another slot of the same model; an uncommitted verify window of it is left out.
    pub fn copy_from(&mut self, from: &SlotState<D>) {
        let device = &self.core.device;
        for (to, from_layer) in self.layers.iter_mut().zip(&from.layers) {
            match (to, from_layer) {
                (LayerState::Attention(to), LayerState::Attention(cache)) => device.kv_copy(cache, from.rows, to),
                (LayerState::DeltaNet(to), LayerState::DeltaNet(state)) => device.delta_copy(state, to),
                _ => unreachable!("slots of one model have the same layers"),
            }
        }
        if let (Some(to), Some(cache)) = (&mut self.mtp, &from.mtp) {
            device.kv_copy(cache, from.mtp_rows, to);
        }
        self.last_hidden.copy_from_slice(&from.last_hidden);
        self.rows = from.rows;
        self.mtp_rows = from.mtp_rows;
        self.verifying = 0;
    }

    fn export_trunk(&self, sink: strata_kernels::device::Sink<'_>) -> std::io::Result<()> {
        let device = &self.core.device;
        sink(bytemuck::cast_slice(&self.last_hidden))?;
        for layer in &self.layers {
            match layer {
                LayerState::Attention(cache) => device.kv_export(cache, self.rows, sink)?,
                LayerState::DeltaNet(state) => device.delta_export(state, sink)?,
            }
        }
        Ok(())
    }

    fn export(&self, sink: strata_kernels::device::Sink<'_>) -> std::io::Result<()> {
        self.export_trunk(sink)?;
        match &self.mtp {
            Some(cache) => self.core.device.kv_export(cache, self.mtp_rows, sink),
            None => Ok(()),
        }
    }

    /// A hash of everything that can influence later rows: rows held, caches up to them, recurrent states, the MTP cache.
    pub fn hash(&self) -> u64 {
        let mut hash = StateHash::default();
        hash.write(&(self.rows as u64).to_le_bytes());
        hash.write(&(self.mtp_rows as u64).to_le_bytes());
        self.export(&mut |bytes| {
            hash.write(bytes);
            Ok(())
        })
        .expect("hashing cannot fail");
        hash.finish()
    }

    /// A hash of everything that can influence later rows of the trunk: as [`SlotState::hash`], without the MTP cache, whose
    /// contents change what is drafted and nothing else.
    pub fn trunk_hash(&self) -> u64 {
        let mut hash = StateHash::default();
        hash.write(&(self.rows as u64).to_le_bytes());
        let mut sink = |bytes: &[u8]| {
            hash.write(bytes);
            Ok(())
        };
        self.export_trunk(&mut sink).expect("hashing cannot fail");
        hash.finish()
    }

    /// Writes the state with a header and a checksum. Reuse of the file by another model, geometry or cache type is refused
    /// by [`SlotState::load`].
    pub fn save(&self, out: &mut impl Write) -> Result<(), ModelError> {
        out.write_all(MAGIC)?;
        out.write_all(&self.core.fingerprint.to_le_bytes())?;
        out.write_all(&(self.rows as u64).to_le_bytes())?;
        out.write_all(&(self.mtp_rows as u64).to_le_bytes())?;
        self.export(&mut |bytes| out.write_all(bytes))?;
        out.write_all(&self.hash().to_le_bytes())?;
        Ok(())
    }

    /// Reads what [`SlotState::save`] wrote. On an error the state is reset.
    pub fn load(&mut self, source: &mut impl Read) -> Result<(), ModelError> {
        let result = self.read_saved(source);
        if result.is_err() {
            self.reset();
        }
        result
    }

    fn read_saved(&mut self, source: &mut impl Read) -> Result<(), ModelError> {
        self.reset();
        let wrong = |what: String| Err(ModelError::SavedState(what));
        let mut magic = [0; 8];
        source.read_exact(&mut magic)?;
        if magic != *MAGIC {
            return wrong(format!("starts with {magic:02x?}, expected {MAGIC:02x?}"));
        }
        let mut number = || {
            let mut bytes = [0; 8];
            source.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes))
        };
        let (fingerprint, rows, mtp_rows) = (number()?, number()?, number()?);
        if fingerprint != self.core.fingerprint {
            return wrong("written for another model or cache type".to_string());
        }
        let limit = self.ctx_rows as u64;
        if rows > limit || mtp_rows > limit || (self.mtp.is_none() && mtp_rows > 0) {
            return wrong(format!("holds {rows} rows and {mtp_rows} MTP rows, this slot has room for {limit}"));
        }
        let (rows, mtp_rows) = (rows as usize, mtp_rows as usize);
        let device = &self.core.device;
        source.read_exact(bytemuck::cast_slice_mut(&mut self.last_hidden))?;
        for layer in &mut self.layers {
            match layer {
                LayerState::Attention(cache) => device.kv_import(cache, rows, source)?,
                LayerState::DeltaNet(state) => device.delta_import(state, source)?,
            }
        }
        if let Some(cache) = &mut self.mtp {
            device.kv_import(cache, mtp_rows, source)?;
        }
        let mut hash = [0; 8];
        source.read_exact(&mut hash)?;
        (self.rows, self.mtp_rows) = (rows, mtp_rows);
        if u64::from_le_bytes(hash) != self.hash() {
            return wrong("its checksum does not match its contents".to_string());
        }
        Ok(())
    }
}

impl<D: Device> Model<D> {
    /// Writes a checkpoint; [`Model::load_checkpoint`] reads it. Integrity is the caller's matter.
    pub fn save_checkpoint(&self, checkpoint: &StateCheckpoint<D>, out: &mut dyn Write) -> Result<(), ModelError> {
        out.write_all(&self.core.fingerprint.to_le_bytes())?;
        out.write_all(&(checkpoint.saved.rows as u64).to_le_bytes())?;
        out.write_all(bytemuck::cast_slice(&checkpoint.saved.last_hidden))?;
        for state in &checkpoint.saved.delta {
            self.core.device.delta_export(state, &mut |bytes| out.write_all(bytes))?;
        }
        Ok(())
    }

    /// Reads what [`Model::save_checkpoint`] wrote for the same model.
    pub fn load_checkpoint(&self, source: &mut dyn Read) -> Result<StateCheckpoint<D>, ModelError> {
        let core = &self.core;
        let mut number = [0; 8];
        source.read_exact(&mut number)?;
        if u64::from_le_bytes(number) != core.fingerprint {
            return Err(ModelError::SavedState("written for another model or cache type".to_string()));
        }
        source.read_exact(&mut number)?;
        let rows = usize::try_from(u64::from_le_bytes(number))
            .map_err(|_| ModelError::SavedState("its number of rows is out of range".to_string()))?;
        let mut last_hidden = vec![0.0; core.config.hidden];
        source.read_exact(bytemuck::cast_slice_mut(&mut last_hidden))?;
        let mut delta = Vec::new();
        for _ in 0..core.config.layers_of(LayerKind::DeltaNet) {
            let mut state = core.device.delta_state(core.delta_shape());
            core.device.delta_import(&mut state, source)?;
            delta.push(state);
        }
        let saved = Saved { rows, last_hidden, delta, bytes: self.checkpoint_bytes() };
        Ok(StateCheckpoint { saved: Arc::new(saved) })
    }
}

/// A fast 64-bit hash of bytes, eight at a time; the same on every machine and in every run. Not for untrusted keys.
#[derive(Default)]
pub(super) struct StateHash {
    state: u64,
}

impl Hasher for StateHash {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        let words = words.iter().chain(std::iter::once(&last)).map(|word| u64::from_le_bytes(*word));
        // Length first, so that zero bytes count.
        for word in std::iter::once(bytes.len() as u64).chain(words) {
            // Multiplier: 2^64 / golden ratio, odd.
            let mixed = (self.state ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            self.state = mixed ^ (mixed >> 29);
        }
    }

    fn finish(&self) -> u64 {
        self.state
    }
}
