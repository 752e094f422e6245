//! The forward pass: the only one of the code base.
//!
//! Reads from top to bottom: embed, then per layer `x += mixer(norm(x)); x += moe(norm(x))`, then the last norm and the head on
//! the rows that want logits. Shapes stand as comments on the work buffers.

use super::config::ModelConfig;
use super::counters::{Phase, PhaseClock};
use super::error::ModelError;
use super::rope::RopeTable;
use super::state::{LayerState, SlotState};
use super::weights::{AttentionLayer, DeltaLayer, Layer, Mixer, Weights};
use super::window::{RowInput, StepOutput, Window};
use std::sync::{Mutex, MutexGuard, PoisonError};
use strata_kernels::Device;
use strata_kernels::device::{
    AttentionInput, AttentionShape, DeltaInput, DeltaShape, EmbedRow, KvType, MoeShape, SlotRows,
};

/// What states and forward pass share.
pub(super) struct Core<D: Device> {
    pub(super) device: D,
    pub(super) config: ModelConfig,
    pub(super) attention: AttentionShape,
    pub(super) delta: Option<DeltaShape>,
    pub(super) moe: MoeShape,
    pub(super) kv_type: KvType,
    pub(super) has_mtp: bool,
    /// Tells saved states of different models apart.
    pub(super) fingerprint: u64,
}

impl<D: Device> Core<D> {
    pub(super) fn delta_shape(&self) -> &DeltaShape {
        self.delta.as_ref().expect("a model with delta-net layers has their geometry")
    }
}

/// Buffers of one forward pass, kept from call to call. `rows` is the number of rows of the window.
pub(super) struct Work<D: Device> {
    pub(super) scratch: D::Scratch,
    /// `rows x hidden`: the residual stream.
    pub(super) x: D::Buffer,
    /// `rows x hidden`: normed input of a mixer, of the experts or of the MTP projection.
    pub(super) normed: D::Buffer,
    /// `rows x hidden`: what a mixer adds.
    mixed: D::Buffer,
    /// `rows x heads x [query | gate]`
    q: D::Buffer,
    /// `rows x kv_heads x head_dim`
    k: D::Buffer,
    /// `rows x kv_heads x head_dim`
    v: D::Buffer,
    /// `rows x heads x head_dim`, or `rows x value_heads x value_dim`
    heads: D::Buffer,
    /// `rows x conv_channels`
    qkv: D::Buffer,
    /// `rows x value_heads x value_dim`
    z: D::Buffer,
    /// `rows x value_heads`
    beta: D::Buffer,
    /// `rows x value_heads`
    alpha: D::Buffer,
    /// `rows x [cos | sin]`
    rope: D::Buffer,
    /// `kept rows x hidden`
    kept: D::Buffer,
    /// `kept rows x hidden`: after the last norm.
    pub(super) hidden: D::Buffer,
    /// `wanted rows x vocab`
    logits: D::Buffer,
    /// `rows x 2 hidden`: the MTP projection's input.
    pub(super) pair: D::Buffer,
    /// `kept rows x hidden` on the host.
    pub(super) host_hidden: Vec<f32>,
    /// `rows x [cos | sin]` on the host.
    host_rope: Vec<f32>,
    pub(super) slots: Vec<SlotRows>,
}

impl<D: Device> Work<D> {
    pub(super) fn new(device: &D) -> Self {
        Work {
            scratch: device.scratch(),
            x: D::Buffer::default(),
            normed: D::Buffer::default(),
            mixed: D::Buffer::default(),
            q: D::Buffer::default(),
            k: D::Buffer::default(),
            v: D::Buffer::default(),
            heads: D::Buffer::default(),
            qkv: D::Buffer::default(),
            z: D::Buffer::default(),
            beta: D::Buffer::default(),
            alpha: D::Buffer::default(),
            rope: D::Buffer::default(),
            kept: D::Buffer::default(),
            hidden: D::Buffer::default(),
            logits: D::Buffer::default(),
            pair: D::Buffer::default(),
            host_hidden: Vec::new(),
            host_rope: Vec::new(),
            slots: Vec::new(),
        }
    }
}

/// Values per row of all buffers of a forward pass, work space of the ops included; for the memory plan.
pub(super) fn work_values_per_row(config: &ModelConfig) -> u64 {
    let (attention, moe) = (config.attention, config.moe);
    let queries = attention.heads * attention.head_dim;
    let keys = attention.kv_heads * attention.head_dim;
    let mut values = 8 * config.hidden + config.rope.dims * 2;
    let mut mixer = 2 * queries + 2 * keys + queries + queries + keys;
    if let Some(delta) = config.delta {
        let inner = delta.value_heads * delta.value_dim;
        let channels = 2 * delta.key_heads * delta.key_dim + inner;
        mixer += 2 * channels + 2 * inner + 4 * delta.value_heads;
    }
    values += mixer;
    values += moe.experts + moe.used * (4 * moe.ff + 2) + 5 * moe.shared_ff + (moe.used + 1) * config.hidden;
    // Inputs of the matmuls are held once more as f32 and in two 8-bit forms.
    let widest = (2 * config.hidden).max(queries) + moe.used * moe.ff + moe.shared_ff;
    (values + 2 * widest) as u64
}

/// The model's weights on a device, the forward pass and its buffers.
pub(super) struct Network<D: Device> {
    pub(super) weights: Weights<D>,
    pub(super) rope: RopeTable,
    work: Mutex<Work<D>>,
    pub(super) clock: PhaseClock,
}

/// One row as [`Network::begin`] needs it.
pub(super) struct RowHead<'a> {
    pub(super) slot: u32,
    pub(super) input: &'a RowInput,
    pub(super) position: [u32; 3],
}

/// Whose caches a layer uses.
#[derive(Clone, Copy)]
pub(super) enum Caches {
    Trunk(usize),
    Mtp,
}

impl<D: Device> Network<D> {
    pub(super) fn new(device: &D, config: &ModelConfig, weights: Weights<D>) -> Self {
        Network {
            weights,
            rope: RopeTable::new(&config.rope),
            work: Mutex::new(Work::new(device)),
            clock: PhaseClock::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Work<D>> {
        // Buffers are sized anew by every call, so those of a call that panicked do no harm.
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Checks the rows, groups them by slot, and puts their embeddings into `x` and their rope angles into `rope`.
    pub(super) fn begin<'a>(
        &self,
        core: &Core<D>,
        work: &mut Work<D>,
        rows: impl Iterator<Item = RowHead<'a>> + Clone,
        table: &D::Weight,
        held: impl Fn(usize) -> Result<(usize, bool), ModelError>,
        ctx_rows: impl Fn(usize) -> usize,
    ) -> Result<(), ModelError> {
        let config = &core.config;
        work.slots.clear();
        work.host_rope.clear();
        let mut embed = Vec::new();
        for (index, row) in rows.enumerate() {
            let slot = row.slot as usize;
            match work.slots.last_mut() {
                Some(last) if last.slot == slot => last.count += 1,
                _ => {
                    if work.slots.iter().any(|other| other.slot == slot) {
                        return Err(ModelError::Window(format!(
                            "row {index}: rows of slot {slot} are not consecutive"
                        )));
                    }
                    let (held, verify) = held(slot)?;
                    work.slots.push(SlotRows { slot, first: index, count: 1, held, verify });
                }
            }
            embed.push(match row.input {
                RowInput::Token(id) if (*id as usize) < config.vocab => EmbedRow::Token(*id),
                RowInput::Token(id) => {
                    return Err(ModelError::Window(format!(
                        "row {index}: token {id}, but the vocabulary ends at {}",
                        config.vocab
                    )));
                }
                RowInput::Embedding { data, start } => {
                    match data.get(*start..).and_then(|rest| rest.get(..config.hidden)) {
                        Some(values) => EmbedRow::Values(values),
                        None => {
                            return Err(ModelError::Window(format!(
                                "row {index}: {} values from {start} on, but a picture row has {}",
                                data.len(),
                                config.hidden
                            )));
                        }
                    }
                }
            });
            self.rope.append(row.position, &mut work.host_rope);
        }
        if embed.is_empty() {
            return Err(ModelError::Window("a window without rows".to_string()));
        }
        for rows in &work.slots {
            let room = ctx_rows(rows.slot);
            if rows.held + rows.count > room {
                return Err(ModelError::Window(format!(
                    "slot {} holds {} of {room} rows, {} more do not fit",
                    rows.slot, rows.held, rows.count
                )));
            }
        }
        core.device.embed(table, &embed, &mut work.x);
        core.device.upload(&work.host_rope, &mut work.rope);
        Ok(())
    }

    /// See [`Model::forward`](super::Model::forward).
    pub(super) fn forward(
        &self,
        core: &Core<D>,
        window: &Window,
        states: &mut [&mut SlotState<D>],
        out: &mut StepOutput,
    ) -> Result<(), ModelError> {
        let work = &mut *self.lock();
        let mut clock = self.clock.start();
        let rows = window.rows.len();
        let verify = |slot: usize| window.verify.get(slot).copied().unwrap_or(false);
        self.begin(
            core,
            work,
            window.rows.iter().map(|row| RowHead { slot: row.slot, input: &row.input, position: row.position }),
            &self.weights.embedding,
            |slot| match states.get(slot) {
                None => Err(ModelError::Window(format!("slot {slot} of {} states", states.len()))),
                Some(state) if state.verifying > 0 => {
                    Err(ModelError::Window(format!("slot {slot} has a verify window that was not committed")))
                }
                Some(state) => Ok((state.rows, verify(slot))),
            },
            |slot| states[slot].ctx_rows,
        )?;
        if let Some(trace) = &mut out.trace {
            trace.clear();
            trace.push(download(&core.device, &work.x));
        }
        clock.lap(Phase::Embed);
        for (index, layer) in self.weights.layers.iter().enumerate() {
            self.layer(core, layer, Caches::Trunk(index), work, rows, states, &mut clock);
            if let Some(trace) = &mut out.trace {
                trace.push(download(&core.device, &work.x));
            }
        }
        // Rows whose hidden row someone needs: those asked for, the last row of each slot, all rows of a verify window.
        let mut kept = Vec::new();
        for slot in &work.slots {
            let last = slot.first + slot.count - 1;
            kept.extend((slot.first..=last).filter(|&index| {
                let row = &window.rows[index];
                row.want_logits || row.want_hidden || slot.verify || index == last
            }));
        }
        let wants_logits = |&index: &usize| window.rows[index].want_logits;
        self.head(core, work, &kept, wants_logits, &self.weights.output_norm, &self.weights.output, out);
        out.hidden.clear();
        let hidden = core.config.hidden;
        let mut slots = work.slots.iter().peekable();
        for (&index, values) in kept.iter().zip(work.host_hidden.chunks_exact(hidden)) {
            if window.rows[index].want_hidden {
                out.hidden.extend_from_slice(values);
            }
            while slots.next_if(|slot| slot.first + slot.count <= index).is_some() {}
            let slot = slots.peek().expect("kept rows belong to slots");
            let state = &mut *states[slot.slot];
            if slot.verify {
                if index == slot.first {
                    state.verify_hidden.clear();
                }
                state.verify_hidden.extend_from_slice(values);
            } else if index + 1 == slot.first + slot.count {
                state.last_hidden.copy_from_slice(values);
            }
        }
        for slot in &work.slots {
            let state = &mut *states[slot.slot];
            if slot.verify {
                state.verifying = slot.count;
            } else {
                state.rows += slot.count;
            }
        }
        clock.lap(Phase::Head);
        Ok(())
    }

    /// `x += mixer(norm(x)); x += moe(norm(x))`
    pub(super) fn layer(
        &self,
        core: &Core<D>,
        layer: &Layer<D>,
        caches: Caches,
        work: &mut Work<D>,
        rows: usize,
        states: &mut [&mut SlotState<D>],
        clock: &mut super::counters::Lap<'_>,
    ) {
        let (device, eps) = (&core.device, core.config.norm_eps);
        device.rms_norm(&work.x, &layer.attn_norm, eps, &mut work.normed);
        match &layer.mixer {
            Mixer::Attention(attention) => {
                self.attention(core, attention, caches, work, rows, states);
                device.add(&mut work.x, &work.mixed);
                clock.lap(if matches!(caches, Caches::Mtp) { Phase::Mtp } else { Phase::Attention });
            }
            Mixer::DeltaNet(delta) => {
                self.delta_net(core, delta, caches, work, rows, states);
                device.add(&mut work.x, &work.mixed);
                clock.lap(Phase::DeltaNet);
            }
        }
        device.rms_norm(&work.x, &layer.post_norm, eps, &mut work.normed);
        device.moe(&mut work.scratch, &core.moe, &layer.moe, &work.normed, rows, &mut work.x);
        clock.lap(if matches!(caches, Caches::Mtp) { Phase::Mtp } else { Phase::Moe });
    }

    fn attention(
        &self,
        core: &Core<D>,
        layer: &AttentionLayer<D>,
        caches: Caches,
        work: &mut Work<D>,
        rows: usize,
        states: &mut [&mut SlotState<D>],
    ) {
        let device = &core.device;
        device.matmul(
            &mut work.scratch,
            &work.normed,
            rows,
            &mut [(&layer.q, &mut work.q), (&layer.k, &mut work.k), (&layer.v, &mut work.v)],
        );
        let mut caches: Vec<&mut D::KvCache> = states.iter_mut().map(|state| state.kv_cache(caches)).collect();
        device.attention(
            &mut work.scratch,
            &core.attention,
            &layer.small,
            AttentionInput { q: &work.q, k: &work.k, v: &work.v, rope: &work.rope },
            &work.slots,
            &mut caches,
            &mut work.heads,
        );
        device.matmul(&mut work.scratch, &work.heads, rows, &mut [(&layer.output, &mut work.mixed)]);
    }

    fn delta_net(
        &self,
        core: &Core<D>,
        layer: &DeltaLayer<D>,
        caches: Caches,
        work: &mut Work<D>,
        rows: usize,
        states: &mut [&mut SlotState<D>],
    ) {
        let device = &core.device;
        device.matmul(
            &mut work.scratch,
            &work.normed,
            rows,
            &mut [
                (&layer.qkv, &mut work.qkv),
                (&layer.gate, &mut work.z),
                (&layer.beta, &mut work.beta),
                (&layer.alpha, &mut work.alpha),
            ],
        );
        let mut states: Vec<&mut D::DeltaState> = states.iter_mut().map(|state| state.delta_state(caches)).collect();
        device.delta_net(
            &mut work.scratch,
            core.delta_shape(),
            &layer.small,
            DeltaInput { qkv: &work.qkv, z: &work.z, beta: &work.beta, alpha: &work.alpha },
            &work.slots,
            &mut states,
            &mut work.heads,
        );
        device.matmul(&mut work.scratch, &work.heads, rows, &mut [(&layer.output, &mut work.mixed)]);
    }

    /// The last norm of the kept rows (to `host_hidden`) and the logits of those that want them (to `out`).
    pub(super) fn head(
        &self,
        core: &Core<D>,
        work: &mut Work<D>,
        kept: &[usize],
        wants_logits: impl Fn(&usize) -> bool,
        norm: &D::Vector,
        head: &D::Weight,
        out: &mut StepOutput,
    ) {
        let (device, config) = (&core.device, &core.config);
        device.gather(&work.x, config.hidden, kept, &mut work.kept);
        device.rms_norm(&work.kept, norm, config.norm_eps, &mut work.hidden);
        work.host_hidden.clear();
        device.download(&work.hidden, &mut work.host_hidden);
        out.logits.clear();
        let wanted: Vec<usize> = (0..kept.len()).filter(|&index| wants_logits(&kept[index])).collect();
        if wanted.is_empty() {
            return;
        }
        device.gather(&work.hidden, config.hidden, &wanted, &mut work.kept);
        device.matmul(&mut work.scratch, &work.kept, wanted.len(), &mut [(head, &mut work.logits)]);
        device.download(&work.logits, &mut out.logits);
    }
}

fn download<D: Device>(device: &D, buffer: &D::Buffer) -> Vec<f32> {
    let mut values = Vec::new();
    device.download(buffer, &mut values);
    values
}

impl<D: Device> SlotState<D> {
    fn kv_cache(&mut self, caches: Caches) -> &mut D::KvCache {
        match caches {
            Caches::Mtp => self.mtp.as_mut().expect("states of a model with an MTP head have its cache"),
            Caches::Trunk(layer) => match &mut self.layers[layer] {
                LayerState::Attention(cache) => cache,
                LayerState::DeltaNet(_) => unreachable!("states are made from the same layer kinds as the weights"),
            },
        }
    }

    fn delta_state(&mut self, caches: Caches) -> &mut D::DeltaState {
        match caches {
            Caches::Trunk(layer) => match &mut self.layers[layer] {
                LayerState::DeltaNet(state) => state,
                LayerState::Attention(_) => unreachable!("states are made from the same layer kinds as the weights"),
            },
            Caches::Mtp => unreachable!("the MTP head is an attention layer"),
        }
    }
}
