//! The model's geometry, read from the file's metadata and checked before a tensor is touched.
//!
//! Nothing is assumed about layer counts, expert counts or head widths: the tiny model, Qwen3.6-35B-A3B and its larger
//! relatives differ in all of them. Tensor shapes are checked against this in [`super::weights`].

use super::ModelError;
use super::weights::names;
use crate::gguf::{GgufFile, Value};
use std::collections::BTreeSet;

/// The only architecture this crate runs.
pub const ARCHITECTURE: &str = "qwen35moe";
/// Key of the MTP layer count, without the architecture prefix.
const NEXTN: &str = "nextn_predict_layers";
/// More rows than this make no sense and would overflow cache indices.
const MAX_CONTEXT: usize = 1 << 26;

/// How a trunk layer mixes rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Gated softmax attention over a KV cache.
    Attention,
    /// Gated delta net over a recurrent state.
    DeltaNet,
}

/// Geometry of the gated attention layers (trunk and MTP head).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionConfig {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Rotary positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RopeConfig {
    /// Leading dims of a head that are turned.
    pub dims: usize,
    /// Base of the frequencies.
    pub base: f32,
    /// Interleaved M-RoPE sections: frequency pairs driven by t, h, w (and an unused fourth).
    pub sections: [u32; 4],
}

/// Geometry of the delta-net layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaConfig {
    /// Key heads.
    pub key_heads: usize,
    /// Value heads, a multiple of `key_heads`.
    pub value_heads: usize,
    /// Width of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_width: usize,
}

/// Geometry of the mixture of experts of every layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeConfig {
    /// Experts per layer.
    pub experts: usize,
    /// Experts chosen per row.
    pub used: usize,
    /// Inner width of an expert.
    pub ff: usize,
    /// Inner width of the shared expert.
    pub shared_ff: usize,
}

/// Everything the metadata says about the shape of the model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// `general.name`, or the file's name.
    pub name: String,
    /// Trunk layers.
    pub trunk_layers: usize,
    /// MTP layers whose tensors are in the file (blocks `trunk_layers ..`).
    pub mtp_layers: usize,
    /// MTP layers the metadata promises; more than `mtp_layers` when a converter lost the head.
    pub mtp_layers_promised: usize,
    /// Kind of every trunk layer.
    pub layer_kinds: Vec<LayerKind>,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Rows of the embedding table and of the head.
    pub vocab: usize,
    /// Rows the model was trained for.
    pub context: usize,
    /// Epsilon of every norm.
    pub norm_eps: f32,
    /// Attention layers.
    pub attention: AttentionConfig,
    /// Rotary positions.
    pub rope: RopeConfig,
    /// Delta-net layers; `None` when the model has none.
    pub delta: Option<DeltaConfig>,
    /// Mixture of experts.
    pub moe: MoeConfig,
}

/// Reads keys of one architecture and turns disagreements into errors that name them.
struct Reader<'a> {
    file: &'a GgufFile,
}

impl Reader<'_> {
    fn key(&self, name: &str) -> String {
        format!("{ARCHITECTURE}.{name}")
    }

    fn wrong(&self, name: &str, expected: impl Into<String>, found: impl ToString) -> ModelError {
        ModelError::Geometry {
            file: self.file.name().to_string(),
            key: self.key(name),
            expected: expected.into(),
            found: found.to_string(),
        }
    }

    /// A count in `1..=max`.
    fn count(&self, name: &str, max: usize) -> Result<usize, ModelError> {
        let value = self.file.metadata().u32(&self.key(name))? as usize;
        self.check_count(name, value, max)
    }

    fn check_count(&self, name: &str, value: usize, max: usize) -> Result<usize, ModelError> {
        if value == 0 || value > max {
            return Err(self.wrong(name, format!("1 to {max}"), value));
        }
        Ok(value)
    }

    /// A count that some converters write per layer: every layer that has one must have the same.
    fn count_or_per_layer(&self, name: &str, max: usize) -> Result<usize, ModelError> {
        let metadata = self.file.metadata();
        let key = self.key(name);
        if !matches!(metadata.get(&key), Some(Value::Array(_))) {
            return self.count(name, max);
        }
        let values = metadata.u32_array(&key)?;
        let mut set = values.iter().copied().filter(|&value| value > 0);
        let first = set.next().ok_or_else(|| self.wrong(name, "one count above 0", "no such count"))?;
        if let Some(other) = set.find(|&value| value != first) {
            return Err(self.wrong(name, "the same count for every layer", format!("{first} and {other}")));
        }
        self.check_count(name, first as usize, max)
    }

    fn finite_above_zero(&self, name: &str, value: f32) -> Result<f32, ModelError> {
        if value.is_finite() && value > 0.0 {
            Ok(value)
        } else {
            Err(self.wrong(name, "a finite number above 0", value))
        }
    }
}

impl ModelConfig {
    /// Reads and checks the geometry. Every error names the key, what was expected and what was found.
    pub fn from_gguf(file: &GgufFile) -> Result<ModelConfig, ModelError> {
        let metadata = file.metadata();
        let architecture = metadata.str("general.architecture")?;
        if architecture != ARCHITECTURE {
            return Err(ModelError::Architecture { file: file.name().to_string(), found: architecture.to_string() });
        }
        let reader = Reader { file };
        let name = metadata.str_opt("general.name")?.unwrap_or(file.name()).to_string();
        let blocks = reader.count("block_count", 4096)?;
        let (trunk_layers, mtp_layers, mtp_layers_promised) = count_layers(&reader, blocks)?;
        let layer_kinds = layer_kinds(&reader, trunk_layers)?;
        let hidden = reader.count("embedding_length", 1 << 16)?;
        let context = reader.count("context_length", MAX_CONTEXT)?;
        let norm_eps = reader.finite_above_zero(
            "attention.layer_norm_rms_epsilon",
            metadata.f32(&reader.key("attention.layer_norm_rms_epsilon"))?,
        )?;
        let attention = attention(&reader, hidden)?;
        let rope = rope(&reader, attention.head_dim)?;
        let delta = if layer_kinds.contains(&LayerKind::DeltaNet) { Some(delta(&reader)?) } else { None };
        let moe = moe(&reader)?;
        let embedding = names::EMBEDDING;
        let table = file.tensor(embedding).ok_or_else(|| ModelError::MissingTensor {
            file: file.name().to_string(),
            tensor: embedding.to_string(),
            needed_by: "token embeddings".to_string(),
        })?;
        let vocab = match table.dims[..] {
            [cols, rows] if cols == hidden as u64 && (1..=u64::from(u32::MAX)).contains(&rows) => rows as usize,
            _ => {
                return Err(ModelError::TensorShape {
                    file: file.name().to_string(),
                    tensor: embedding.to_string(),
                    expected: vec![hidden as u64, table.dims.get(1).copied().unwrap_or(1)],
                    found: table.dims.clone(),
                });
            }
        };
        Ok(ModelConfig {
            name,
            trunk_layers,
            mtp_layers,
            mtp_layers_promised,
            layer_kinds,
            hidden,
            vocab,
            context,
            norm_eps,
            attention,
            rope,
            delta,
            moe,
        })
    }

    /// Trunk layers of one kind.
    pub fn layers_of(&self, kind: LayerKind) -> usize {
        self.layer_kinds.iter().filter(|&&other| other == kind).count()
    }
}

/// Trunk layers, MTP layers present, MTP layers promised. `nextn_predict_layers` says how many blocks at the end are the head;
/// the head's own tensors (`nextn.*`) are the proof, because `block_count` counts the head in most files and not in some, the
/// key is missing in others, and some promise a head that a converter dropped.
fn count_layers(reader: &Reader<'_>, blocks: usize) -> Result<(usize, usize, usize), ModelError> {
    let file = reader.file;
    let promised = file.metadata().u32_opt(&reader.key(NEXTN))?.unwrap_or(0) as usize;
    if promised >= blocks {
        return Err(reader.wrong(NEXTN, format!("fewer than the {blocks} blocks"), promised));
    }
    let block_of_head = |name: &str| name.strip_prefix("blk.")?.split_once(".nextn.")?.0.parse::<usize>().ok();
    let heads: BTreeSet<usize> =
        file.tensors().iter().filter_map(|t| block_of_head(&t.name)).filter(|&block| block <= blocks).collect();
    let trunk = blocks - promised;
    if let Some(&first) = heads.first() {
        if first == 0 {
            return Err(reader.wrong("block_count", "trunk layers before the MTP layer", "an MTP layer in block 0"));
        }
        if promised > 0 && first < trunk {
            let found = format!("{promised}, and tensors of an MTP layer in block {first}");
            return Err(reader.wrong(NEXTN, format!("{} for {blocks} blocks", blocks - first), found));
        }
        let here = (first..).take_while(|block| heads.contains(block)).count();
        return Ok((first, here, promised.max(here)));
    }
    let has = |block: usize, tensor: &str| file.tensor(&names::block(block, tensor)).is_some();
    if promised == 0 || !has(trunk, names::ATTN_NORM) {
        return Ok((trunk, 0, promised));
    }
    // The promised blocks are there without any tensor that makes them a head. Either they are layers of the trunk, because
    // the converter that dropped the head took it out of `block_count`: then they are of the kinds the trunk has there. Or
    // they are what is left of the head.
    let kinds = layer_kinds(reader, blocks)?;
    let is_trunk = (trunk..blocks).all(|block| has(block, names::SSM_A) == (kinds[block] == LayerKind::DeltaNet));
    Ok(if is_trunk { (blocks, 0, promised) } else { (trunk, promised, promised) })
}

fn layer_kinds(reader: &Reader<'_>, trunk_layers: usize) -> Result<Vec<LayerKind>, ModelError> {
    let metadata = reader.file.metadata();
    let kind = |recurrent: bool| if recurrent { LayerKind::DeltaNet } else { LayerKind::Attention };
    const ARRAY: &str = "attention.recurrent_layers";
    if let Some(recurrent) = metadata.bool_array_opt(&reader.key(ARRAY))? {
        if recurrent.len() < trunk_layers {
            return Err(reader.wrong(ARRAY, format!("{trunk_layers} entries, one per trunk layer"), recurrent.len()));
        }
        return Ok(recurrent[..trunk_layers].iter().map(|&recurrent| kind(recurrent)).collect());
    }
    const INTERVAL: &str = "full_attention_interval";
    let interval = reader.check_count(
        INTERVAL,
        metadata.u32_opt(&reader.key(INTERVAL))?.unwrap_or(4) as usize,
        u32::MAX as usize,
    )?;
    Ok((0..trunk_layers).map(|layer| kind(!(layer + 1).is_multiple_of(interval))).collect())
}

fn attention(reader: &Reader<'_>, hidden: usize) -> Result<AttentionConfig, ModelError> {
    let metadata = reader.file.metadata();
    let heads = reader.count_or_per_layer("attention.head_count", 1 << 12)?;
    let kv_heads = reader.count_or_per_layer("attention.head_count_kv", 1 << 12)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(reader.wrong("attention.head_count_kv", format!("a divisor of the {heads} query heads"), kv_heads));
    }
    let head_dim = match metadata.u32_opt(&reader.key("attention.key_length"))? {
        Some(length) => reader.check_count("attention.key_length", length as usize, 1 << 12)?,
        None if hidden.is_multiple_of(heads) => hidden / heads,
        None => {
            return Err(reader.wrong(
                "attention.key_length",
                format!("a head width ({hidden} / {heads})"),
                "no such key",
            ));
        }
    };
    let value_length =
        metadata.u32_opt(&reader.key("attention.value_length"))?.map_or(head_dim, |value| value as usize);
    if value_length != head_dim {
        return Err(reader.wrong(
            "attention.value_length",
            format!("{head_dim}, as attention.key_length"),
            value_length,
        ));
    }
    Ok(AttentionConfig { heads, kv_heads, head_dim })
}

fn rope(reader: &Reader<'_>, head_dim: usize) -> Result<RopeConfig, ModelError> {
    let metadata = reader.file.metadata();
    let dims = match metadata.u32_opt(&reader.key("rope.dimension_count"))? {
        Some(dims) => dims as usize,
        None => head_dim,
    };
    if dims == 0 || dims > head_dim || !dims.is_multiple_of(2) {
        return Err(reader.wrong(
            "rope.dimension_count",
            format!("an even number up to the head width {head_dim}"),
            dims,
        ));
    }
    let base = reader.finite_above_zero("rope.freq_base", metadata.f32(&reader.key("rope.freq_base"))?)?;
    const SECTIONS: &str = "rope.dimension_sections";
    let list = metadata.u32_array(&reader.key(SECTIONS))?;
    if !(3..=4).contains(&list.len()) {
        return Err(reader.wrong(SECTIONS, "3 or 4 numbers", format!("{} numbers", list.len())));
    }
    let mut sections = [0; 4];
    sections[..list.len()].copy_from_slice(&list);
    let sum: u64 = list.iter().map(|&section| u64::from(section)).sum();
    if sum != dims as u64 / 2 {
        return Err(reader.wrong(SECTIONS, format!("sections that sum to {} pairs", dims / 2), format!("{list:?}")));
    }
    Ok(RopeConfig { dims, base, sections })
}

fn delta(reader: &Reader<'_>) -> Result<DeltaConfig, ModelError> {
    let key_heads = reader.count("ssm.group_count", 1 << 12)?;
    let value_heads = reader.count("ssm.time_step_rank", 1 << 12)?;
    if !value_heads.is_multiple_of(key_heads) {
        let expected = format!("a multiple of the {key_heads} key heads");
        return Err(reader.wrong("ssm.time_step_rank", expected, value_heads));
    }
    let key_dim = reader.count("ssm.state_size", 1 << 12)?;
    let inner = reader.count("ssm.inner_size", 1 << 20)?;
    if !inner.is_multiple_of(value_heads) {
        return Err(reader.wrong("ssm.inner_size", format!("a multiple of the {value_heads} value heads"), inner));
    }
    let value_dim = inner / value_heads;
    if value_dim > 1 << 12 {
        return Err(reader.wrong("ssm.inner_size", format!("at most 4096 for each of {value_heads} heads"), inner));
    }
    let conv_width = reader.count("ssm.conv_kernel", 64)?;
    if conv_width < 2 {
        return Err(reader.wrong("ssm.conv_kernel", "2 to 64", conv_width));
    }
    Ok(DeltaConfig { key_heads, value_heads, key_dim, value_dim, conv_width })
}

fn moe(reader: &Reader<'_>) -> Result<MoeConfig, ModelError> {
    let experts = reader.count("expert_count", 1 << 16)?;
    let used = reader.count("expert_used_count", 1 << 10)?;
    if used > experts {
        return Err(reader.wrong("expert_used_count", format!("at most the {experts} experts"), used));
    }
    let ff = reader.count_or_per_layer("expert_feed_forward_length", 1 << 20)?;
    let shared_ff = reader.count_or_per_layer("expert_shared_feed_forward_length", 1 << 20)?;
    Ok(MoeConfig { experts, used, ff, shared_ff })
}
