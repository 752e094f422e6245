//! The model: geometry from the file's metadata, weights used in place, and the one forward pass of the code base.
//!
//! [`Model::forward`] takes a [`Window`] of rows from any mix of slots and gives logits and hidden rows; a [`SlotState`]
//! holds everything the model remembers of one slot. A row's bits depend only on its slot's history: not on the other rows
//! of the window, on how a prompt was cut into windows, or on the number of threads.
//! Sampling, scheduling and drafting policy live in the engine; storage formats and kernels in `strata-kernels`.

mod config;
mod counters;
mod error;
mod forward;
mod mtp;
mod rope;
mod state;
mod weights;
mod window;

pub use config::{ARCHITECTURE, AttentionConfig, DeltaConfig, LayerKind, ModelConfig, MoeConfig, RopeConfig};
pub use counters::PerfCounters;
pub use error::ModelError;
pub use state::{SlotState, StateCheckpoint};
pub use strata_kernels::device::KvType;
pub use weights::{WeightSizes, names};
pub use window::{MtpRow, Row, RowInput, StepOutput, Window};

use crate::gguf::GgufFile;
use counters::Phase;
use forward::{Core, Network};
use state::{LayerState, StateHash};
use std::hash::Hasher;
use std::sync::Arc;
use strata_kernels::Device;
use strata_kernels::cpu::CpuDevice;
use strata_kernels::device::{AttentionShape, DeltaShape, MoeShape};
use weights::Weights;

/// How to load a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadOptions {
    /// Threads that compute, the caller's included.
    pub threads: usize,
    /// How keys and values are cached.
    pub kv_type: KvType,
    /// Whether to load the MTP head where the file has one.
    pub use_mtp: bool,
}

impl Default for LoadOptions {
    /// All cores, f16 cache, with the MTP head.
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        LoadOptions { threads, kv_type: KvType::F16, use_mtp: true }
    }
}

/// A loaded model. Calls from several threads take turns.
pub struct Model<D: Device = CpuDevice> {
    core: Arc<Core<D>>,
    network: Network<D>,
}

impl Model {
    /// Loads a model for the CPU. Weights stay where the file's bytes are; opening costs no copy of them.
    pub fn load(file: &GgufFile, options: &LoadOptions) -> Result<Model, ModelError> {
        Model::load_on(CpuDevice::new(options.threads), file, options)
    }

    /// Threads that compute.
    pub fn threads(&self) -> usize {
        self.core.device.pool().threads()
    }
}

impl<D: Device> Model<D> {
    /// Loads a model for a device.
    pub fn load_on(device: D, file: &GgufFile, options: &LoadOptions) -> Result<Model<D>, ModelError> {
        let config = ModelConfig::from_gguf(file)?;
        let weights = Weights::load(file, &device, &config, options.use_mtp)?;
        let attention = AttentionShape {
            heads: config.attention.heads,
            kv_heads: config.attention.kv_heads,
            head_dim: config.attention.head_dim,
            rotary_dims: config.rope.dims,
            norm_eps: config.norm_eps,
        };
        let delta = config.delta.map(|delta| DeltaShape {
            key_heads: delta.key_heads,
            value_heads: delta.value_heads,
            key_dim: delta.key_dim,
            value_dim: delta.value_dim,
            conv_width: delta.conv_width,
            norm_eps: config.norm_eps,
        });
        let moe = MoeShape {
            hidden: config.hidden,
            experts: config.moe.experts,
            used: config.moe.used,
            ff: config.moe.ff,
            shared_ff: config.moe.shared_ff,
        };
        let network = Network::new(&device, &config, weights);
        let has_mtp = network.weights.mtp.is_some();
        let fingerprint = fingerprint(file, &config, options, has_mtp);
        let kv_type = options.kv_type;
        let core = Arc::new(Core { device, config, attention, delta, moe, kv_type, has_mtp, fingerprint });
        Ok(Model { core, network })
    }

    /// The geometry.
    pub fn config(&self) -> &ModelConfig {
        &self.core.config
    }

    /// Whether [`Model::mtp_forward`] works.
    pub fn has_mtp(&self) -> bool {
        self.core.has_mtp
    }

    /// Tells models, cache types and heads apart: states saved under another number cannot be loaded.
    pub fn fingerprint(&self) -> u64 {
        self.core.fingerprint
    }

    /// A fresh state for at most `ctx_rows` rows. Its KV caches grow with the rows held.
    ///
    /// Errors when `ctx_rows` is 0 or more than the model was trained for.
    pub fn new_state(&self, ctx_rows: usize) -> Result<SlotState<D>, ModelError> {
        let most = self.core.config.context;
        if ctx_rows == 0 || ctx_rows > most {
            return Err(ModelError::Window(format!("a context of {ctx_rows} rows, expected 1 to {most}")));
        }
        Ok(SlotState::new(self.core.clone(), ctx_rows))
    }

    /// Bytes one slot takes when it holds `ctx_rows` rows: caches, recurrent state, and the copies a verify window of
    /// `verify_rows` rows needs (0 when there are none).
    pub fn state_bytes(&self, ctx_rows: usize, verify_rows: usize) -> u64 {
        let core = &*self.core;
        let attention_layers = core.config.layers_of(LayerKind::Attention) + usize::from(core.has_mtp);
        let kv = core.device.kv_cache_bytes(&core.attention, core.kv_type, ctx_rows) * attention_layers as u64;
        let delta_layers = core.config.layers_of(LayerKind::DeltaNet) as u64;
        let delta = core.delta.as_ref().map_or(0, |shape| core.device.delta_state_bytes(shape, verify_rows));
        kv + delta * delta_layers + 4 * ((1 + verify_rows) * core.config.hidden) as u64
    }

    /// Bytes of one recurrent checkpoint.
    pub fn checkpoint_bytes(&self) -> u64 {
        let core = &*self.core;
        let delta = core.delta.as_ref().map_or(0, |shape| core.device.delta_state_bytes(shape, 0));
        delta * core.config.layers_of(LayerKind::DeltaNet) as u64 + 4 * core.config.hidden as u64
    }

    /// Bytes of work buffers for windows of up to `rows` rows, of which `logits_rows` want logits.
    pub fn work_bytes(&self, rows: usize, logits_rows: usize) -> u64 {
        let config = &self.core.config;
        4 * (forward::work_values_per_row(config) * rows as u64 + 2 * (config.vocab * logits_rows) as u64)
    }

    /// Bytes of weights by use.
    pub fn weight_sizes(&self) -> WeightSizes {
        self.network.weights.sizes
    }

    /// Bytes of weights that one decode row of the trunk reads.
    pub fn weight_bytes_per_token(&self) -> u64 {
        self.network.weights.sizes.per_token
    }

    /// Runs the rows of a window through the trunk, layer by layer.
    ///
    /// Rows of one slot must be consecutive and in order; they go on from what the slot's state holds. A slot in
    /// `window.verify` keeps its state as it was until [`Model::commit`]; the others hold the rows afterwards.
    /// On an error no state has changed.
    pub fn forward(
        &self,
        window: &Window,
        states: &mut [&mut SlotState<D>],
        out: &mut StepOutput,
    ) -> Result<(), ModelError> {
        self.network.forward(&self.core, window, states, out)
    }

    /// After a verify window: the state becomes what it would be had it read only the first `accepted_rows` of the rows
    /// (0 to all of them), bit for bit.
    pub fn commit(&self, state: &mut SlotState<D>, accepted_rows: usize) {
        let mut clock = self.network.clock.start();
        let all = std::mem::take(&mut state.verifying);
        let accepted = accepted_rows.min(all);
        for layer in &mut state.layers {
            if let LayerState::DeltaNet(delta) = layer {
                self.core.device.delta_commit(delta, accepted);
            }
        }
        if accepted > 0 {
            let hidden = self.core.config.hidden;
            state.last_hidden.copy_from_slice(&state.verify_hidden[(accepted - 1) * hidden..accepted * hidden]);
            state.rows += accepted;
        }
        clock.lap(Phase::Commit);
    }

    /// Runs the MTP head over rows: row by row the token of position p with the trunk's hidden row of p - 1 (zeros for the
    /// first), at cache index [`SlotState::mtp_rows`]. `out.logits` gets the rows that want logits (which predict the token
    /// after the row's), over the first `head_limit` tokens of the vocabulary where given; `out.hidden` gets every row's
    /// post-norm hidden, which feeds the next draft of a chain.
    ///
    /// Rows of drafts that turn out wrong are taken back with [`SlotState::truncate_mtp`].
    pub fn mtp_forward(
        &self,
        rows: &[MtpRow<'_>],
        states: &mut [&mut SlotState<D>],
        out: &mut StepOutput,
        head_limit: Option<usize>,
    ) -> Result<(), ModelError> {
        self.network.mtp_forward(&self.core, rows, states, out, head_limit)
    }

    /// Time per phase since the start or the last reset.
    pub fn counters(&self) -> PerfCounters {
        self.network.clock.read()
    }

    /// Sets all times to zero.
    pub fn reset_counters(&self) {
        self.network.clock.reset();
    }
}

/// Hash of geometry, cache type, every tensor's name, type and shape, and the bytes of the norm after the last layer (which
/// differ between any two trained models).
fn fingerprint(file: &GgufFile, config: &ModelConfig, options: &LoadOptions, has_mtp: bool) -> u64 {
    let mut hash = StateHash::default();
    hash.write(format!("{config:?} {:?} {has_mtp}", options.kv_type).as_bytes());
    for tensor in file.tensors() {
        hash.write(format!("{} {} {:?}", tensor.name, tensor.ty.name(), tensor.dims).as_bytes());
    }
    if let Some(norm) = file.tensor(names::OUTPUT_NORM) {
        hash.write(&file.data(norm));
    }
    hash.finish()
}
