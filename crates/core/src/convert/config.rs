//! The geometry of a Hugging Face folder: `config.json` of the mixture-of-experts family, typed and checked.

use super::ConvertError;
use super::metadata::ARCHITECTURE;
use crate::gguf::GgufFile;
use serde_json::{Map, Value};

/// Which mixer a trunk layer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mixer {
    /// Gated delta net (`linear_attention`).
    DeltaNet,
    /// Softmax attention (`full_attention`).
    Attention,
}

/// What a conversion needs of `config.json` (of its `text_config` where there is one).
#[derive(Clone, Debug)]
pub struct HfConfig {
    /// Width of a row.
    pub hidden: u64,
    /// Mixer of every trunk layer.
    pub layers: Vec<Mixer>,
    /// The full-attention interval.
    pub full_attention_interval: u64,
    /// Number of MTP layers the config promises; `None` where it does not say.
    pub mtp_layers: Option<u64>,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads of the attention layers.
    pub kv_heads: u64,
    /// Width of an attention head.
    pub head_dim: u64,
    /// Delta net: key heads.
    pub key_heads: u64,
    /// Delta net: value heads, a multiple of the key heads.
    pub value_heads: u64,
    /// Delta net: width of a key head.
    pub key_head_dim: u64,
    /// Delta net: width of a value head.
    pub value_head_dim: u64,
    /// Delta net: width of the convolution.
    pub conv_kernel: u64,
    /// Experts per layer.
    pub experts: u64,
    /// Experts used per row.
    pub experts_used: u64,
    /// Hidden width of an expert.
    pub expert_ff: u64,
    /// Hidden width of the shared expert.
    pub shared_expert_ff: u64,
    /// Vocabulary entries, with padding.
    pub vocab: u64,
    /// Whether the head shares the token embedding.
    pub tied_head: bool,
    /// Longest context the model was made for.
    pub context: u64,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// Base of the rope frequencies.
    pub rope_base: f32,
    /// Rotated dimensions per head.
    pub rope_dim: u64,
    /// Frequency pairs per position axis, padded to four.
    pub rope_sections: [i32; 4],
    /// Rope scaling as `(kind, factor, original context)` where the config asks for it.
    pub rope_scaling: Option<RopeScaling>,
    /// The vision part, where the folder has one.
    pub vision: Option<VisionConfig>,
}

/// Context extension by rope scaling.
#[derive(Clone, Debug)]
pub struct RopeScaling {
    /// `linear` or `yarn`.
    pub kind: String,
    /// How far the context is stretched.
    pub factor: f32,
    /// The context before stretching (yarn).
    pub original_context: Option<u64>,
}

/// What a conversion needs of `vision_config`.
#[derive(Clone, Debug)]
pub struct VisionConfig {
    /// Width of a patch row.
    pub hidden: u64,
    /// Hidden width of the feed-forward part.
    pub ff: u64,
    /// Blocks.
    pub blocks: u64,
    /// Attention heads.
    pub heads: u64,
    /// Side of a patch in pixels.
    pub patch: u64,
    /// Patches merged per side.
    pub merge: u64,
    /// Learned positions (a square).
    pub positions: u64,
    /// Colour channels.
    pub channels: u64,
    /// Frames per patch; the file format knows two.
    pub temporal_patch: u64,
    /// Width of a row handed to the text model.
    pub out_hidden: u64,
}

const ARCHITECTURES: [&str; 2] = ["Qwen3_5MoeForConditionalGeneration", "Qwen3_5MoeForCausalLM"];

impl HfConfig {
    /// Reads `config.json`; `file` names it in errors.
    ///
    /// # Errors
    /// When the architecture is not of this family, a key is missing or has the wrong type, or two keys disagree.
    pub fn from_json(file: &str, config: &Value) -> Result<HfConfig, ConvertError> {
        check_architecture(file, config)?;
        let text = Section::new(file, "text_config", config, config.get("text_config"))?;
        let layer_count = text.up_to("num_hidden_layers", COUNT_LIMIT)?;
        let interval = text.u64_or("full_attention_interval", 4)?;
        let layers = layer_kinds(&text, layer_count, interval)?;
        if text.get("attention_bias") == Some(&Value::Bool(true)) {
            return Err(text.wrong("attention_bias", "false (this family has no attention biases)", "true".into()));
        }
        let (hidden, heads) = (text.u64("hidden_size")?, text.u64("num_attention_heads")?);
        let head_dim = text.u64_or("head_dim", hidden / heads)?;
        let (key_heads, value_heads) = (text.u64("linear_num_key_heads")?, text.u64("linear_num_value_heads")?);
        if value_heads % key_heads != 0 {
            let expected = format!("a multiple of linear_num_key_heads ({key_heads})");
            return Err(text.wrong("linear_num_value_heads", &expected, value_heads.to_string()));
        }
        let rope = text.get("rope_parameters").or(text.get("rope_scaling")).cloned().unwrap_or(Value::Null);
        let rope_number = |key: &str| rope.get(key).or(text.get(key)).and_then(Value::as_f64);
        let partial = rope_number("partial_rotary_factor").unwrap_or(0.25);
        let mut rope_sections = [11, 11, 10, 0];
        if let Some(sections) = rope.get("mrope_section") {
            let values: Option<Vec<i32>> = sections
                .as_array()
                .map(|list| list.iter().filter_map(|v| v.as_i64().and_then(|v| i32::try_from(v).ok())).collect());
            match values.filter(|v| (3..=4).contains(&v.len()) && sections.as_array().map(Vec::len) == Some(v.len())) {
                Some(values) => {
                    rope_sections = [0; 4];
                    rope_sections[..values.len()].copy_from_slice(&values);
                }
                None => {
                    return Err(text.wrong("rope_parameters.mrope_section", "3 or 4 integers", sections.to_string()));
                }
            }
        }
        let mtp_layers = match text.get("mtp_num_hidden_layers").or(text.get("num_nextn_predict_layers")) {
            None | Some(Value::Null) => None,
            Some(v) => Some(
                v.as_u64()
                    .filter(|n| *n <= 64)
                    .ok_or_else(|| text.wrong("mtp_num_hidden_layers", "a small integer", v.to_string()))?,
            ),
        };
        let tied = config.get("tie_word_embeddings").or(text.get("tie_word_embeddings"));
        Ok(HfConfig {
            hidden,
            layers,
            full_attention_interval: interval,
            mtp_layers,
            heads,
            kv_heads: text.u64("num_key_value_heads")?,
            head_dim,
            key_heads,
            value_heads,
            key_head_dim: text.u64("linear_key_head_dim")?,
            value_head_dim: text.u64("linear_value_head_dim")?,
            conv_kernel: text.u64("linear_conv_kernel_dim")?,
            experts: text.up_to("num_experts", COUNT_LIMIT)?,
            experts_used: text.u64("num_experts_per_tok")?,
            expert_ff: text.u64("moe_intermediate_size")?,
            shared_expert_ff: text.u64("shared_expert_intermediate_size")?,
            vocab: text.u64("vocab_size")?,
            tied_head: tied.and_then(Value::as_bool).unwrap_or(false),
            context: text.u64("max_position_embeddings")?,
            norm_eps: text.f64("rms_norm_eps")? as f32,
            rope_base: rope_number("rope_theta")
                .ok_or_else(|| text.wrong("rope_parameters.rope_theta", "a number", "nothing".into()))?
                as f32,
            rope_dim: (head_dim as f64 * partial) as u64,
            rope_sections,
            rope_scaling: rope_scaling(&text, &rope)?,
            vision: vision_config(file, config)?,
        })
    }

    /// The geometry of a GGUF's text model, as far as its MTP head depends on it. Its own head is not counted.
    ///
    /// # Errors
    /// When a key is missing or has the wrong type.
    pub fn from_gguf(file: &GgufFile) -> Result<HfConfig, ConvertError> {
        let keys = file.metadata();
        let key = |name: &str| format!("{ARCHITECTURE}.{name}");
        let u64 = |name: &str| keys.u64(&key(name)).map(|n| n.min(SIZE_LIMIT));
        // Per-layer arrays have 0 at the delta net's layers.
        let per_layer = |name: &str| match keys.u32_array_opt(&key(name)) {
            Ok(Some(values)) => Ok(u64::from(values.into_iter().max().unwrap_or(0))),
            _ => u64(name),
        };
        let head = keys.u64_opt(&key("nextn_predict_layers"))?.unwrap_or(0);
        let trunk = u64("block_count")?.saturating_sub(head);
        let interval = keys.u64_opt(&key("full_attention_interval"))?.unwrap_or(4).max(1);
        let mut layers: Vec<Mixer> = (1..=trunk.min(COUNT_LIMIT))
            .map(|n| if n % interval == 0 { Mixer::Attention } else { Mixer::DeltaNet })
            .collect();
        if let Some(recurrent) = keys.bool_array_opt(&key("attention.recurrent_layers"))? {
            for (layer, recurrent) in layers.iter_mut().zip(recurrent) {
                *layer = if recurrent { Mixer::DeltaNet } else { Mixer::Attention };
            }
        }
        let key_heads = u64("ssm.group_count")?;
        let value_heads = u64("ssm.time_step_rank")?;
        let hidden = u64("embedding_length")?;
        let vocab = match file.tensor("token_embd.weight") {
            Some(t) => t.rows(),
            None => keys.strings("tokenizer.ggml.tokens")?.len() as u64,
        };
        Ok(HfConfig {
            hidden,
            layers,
            full_attention_interval: interval,
            mtp_layers: None,
            heads: per_layer("attention.head_count")?,
            kv_heads: per_layer("attention.head_count_kv")?,
            head_dim: u64("attention.key_length")?,
            key_heads,
            value_heads,
            key_head_dim: u64("ssm.state_size")?,
            value_head_dim: u64("ssm.inner_size")? / value_heads.max(1),
            conv_kernel: u64("ssm.conv_kernel")?,
            experts: u64("expert_count")?,
            experts_used: u64("expert_used_count")?,
            expert_ff: u64("expert_feed_forward_length")?,
            shared_expert_ff: u64("expert_shared_feed_forward_length")?,
            vocab,
            tied_head: file.tensor("output.weight").is_none(),
            context: u64("context_length")?,
            norm_eps: keys.f32(&key("attention.layer_norm_rms_epsilon"))?,
            rope_base: keys.f32(&key("rope.freq_base"))?,
            rope_dim: u64("rope.dimension_count")?,
            rope_sections: [0; 4],
            rope_scaling: None,
            vision: None,
        })
    }

    /// Channels of the delta net's key part (queries and keys together are twice this).
    pub fn key_dim(&self) -> u64 {
        self.key_heads * self.key_head_dim
    }

    /// Channels of the delta net's value part.
    pub fn value_dim(&self) -> u64 {
        self.value_heads * self.value_head_dim
    }
}

/// Only the mixture-of-experts family is taken.
fn check_architecture(file: &str, config: &Value) -> Result<(), ConvertError> {
    let named = config.get("architectures").and_then(Value::as_array);
    let names: Vec<&str> = named.into_iter().flatten().filter_map(Value::as_str).collect();
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("nothing");
    if names.iter().any(|n| ARCHITECTURES.contains(n))
        || (names.is_empty() && matches!(model_type, "qwen3_5_moe" | "qwen3_5_moe_text"))
    {
        return Ok(());
    }
    let found = if names.is_empty() { format!("model_type {model_type}") } else { names.join(", ") };
    let dense = names.iter().any(|n| n.starts_with("Qwen3_5For")) || model_type == "qwen3_5";
    Err(ConvertError::Architecture { file: file.to_string(), found, dense })
}

/// The mixer of every layer, from `layer_types` or the interval.
fn layer_kinds(text: &Section, count: u64, interval: u64) -> Result<Vec<Mixer>, ConvertError> {
    let Some(types) = text.get("layer_types") else {
        return Ok((1..=count).map(|n| if n % interval == 0 { Mixer::Attention } else { Mixer::DeltaNet }).collect());
    };
    let kinds: Option<Vec<Mixer>> = types.as_array().and_then(|list| {
        list.iter()
            .map(|v| match v.as_str()? {
                "linear_attention" => Some(Mixer::DeltaNet),
                "full_attention" => Some(Mixer::Attention),
                _ => None,
            })
            .collect()
    });
    let kinds = kinds.ok_or_else(|| {
        text.wrong("layer_types", "a list of 'linear_attention' and 'full_attention'", types.to_string())
    })?;
    if kinds.len() as u64 != count {
        let expected = format!("{count} entries (num_hidden_layers)");
        return Err(text.wrong("layer_types", &expected, kinds.len().to_string()));
    }
    Ok(kinds)
}

fn rope_scaling(text: &Section, rope: &Value) -> Result<Option<RopeScaling>, ConvertError> {
    let kind = rope.get("rope_type").or(rope.get("type")).and_then(Value::as_str).unwrap_or("default");
    match (kind, rope.get("factor").and_then(Value::as_f64)) {
        ("default" | "mrope", _) => Ok(None),
        ("linear" | "yarn", Some(factor)) => Ok(Some(RopeScaling {
            kind: kind.to_string(),
            factor: factor as f32,
            original_context: rope.get("original_max_position_embeddings").and_then(Value::as_u64),
        })),
        _ => Err(text.wrong(
            "rope_parameters.rope_type",
            "'default', 'linear' or 'yarn' with a factor",
            rope.to_string(),
        )),
    }
}

fn vision_config(file: &str, config: &Value) -> Result<Option<VisionConfig>, ConvertError> {
    let Some(section) = config.get("vision_config").filter(|v| !v.is_null()) else { return Ok(None) };
    let vision = Section::new(file, "vision_config", config, Some(section))?;
    if let Some(deep) = vision.get("deepstack_visual_indexes").filter(|v| v.as_array().is_none_or(|l| !l.is_empty())) {
        return Err(vision.wrong("deepstack_visual_indexes", "an empty list (this family has none)", deep.to_string()));
    }
    Ok(Some(VisionConfig {
        hidden: vision.u64("hidden_size")?,
        ff: vision.u64("intermediate_size")?,
        blocks: vision.up_to("depth", COUNT_LIMIT)?,
        heads: vision.u64("num_heads")?,
        patch: vision.u64_or("patch_size", 16)?.min(COUNT_LIMIT),
        merge: vision.u64_or("spatial_merge_size", 2)?.min(COUNT_LIMIT),
        positions: vision.u64_or("num_position_embeddings", 2304)?,
        channels: vision.u64_or("in_channels", 3)?,
        temporal_patch: vision.u64_or("temporal_patch_size", 2)?,
        out_hidden: vision.u64("out_hidden_size")?,
    }))
}

/// One object of the config, with getters that say what was wrong.
struct Section<'a> {
    file: &'a str,
    name: &'a str,
    map: &'a Map<String, Value>,
}

/// No size in a config is this large; keeps products of a few of them within u64.
const SIZE_LIMIT: u64 = 1 << 28;
/// No model has this many layers, experts, or sides of a patch; keeps loops over them short.
const COUNT_LIMIT: u64 = 1 << 12;

impl<'a> Section<'a> {
    /// The section, or the whole config where it has none (text-only folders).
    fn new(file: &'a str, name: &'a str, whole: &'a Value, part: Option<&'a Value>) -> Result<Self, ConvertError> {
        match part.unwrap_or(whole).as_object() {
            Some(map) => Ok(Section { file, name, map }),
            None => Err(ConvertError::Config {
                file: file.to_string(),
                key: name.to_string(),
                expected: "an object".to_string(),
                found: part.unwrap_or(whole).to_string().chars().take(60).collect(),
            }),
        }
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key)
    }

    fn wrong(&self, key: &str, expected: &str, found: String) -> ConvertError {
        ConvertError::Config {
            file: self.file.to_string(),
            key: format!("{}.{key}", self.name),
            expected: expected.to_string(),
            found: found.chars().take(80).collect(),
        }
    }

    fn u64(&self, key: &str) -> Result<u64, ConvertError> {
        self.up_to(key, SIZE_LIMIT)
    }

    /// A positive integer of at most `limit`.
    fn up_to(&self, key: &str, limit: u64) -> Result<u64, ConvertError> {
        let value = self.get(key).unwrap_or(&Value::Null);
        match value.as_u64() {
            Some(n) if (1..=limit).contains(&n) => Ok(n),
            _ if value.is_null() => Err(self.wrong(key, "a positive integer", "nothing".into())),
            _ => Err(self.wrong(key, &format!("an integer from 1 to {limit}"), value.to_string())),
        }
    }

    fn u64_or(&self, key: &str, default: u64) -> Result<u64, ConvertError> {
        if self.get(key).is_none_or(Value::is_null) { Ok(default) } else { self.u64(key) }
    }

    fn f64(&self, key: &str) -> Result<f64, ConvertError> {
        let value = self.get(key).unwrap_or(&Value::Null);
        value.as_f64().ok_or_else(|| self.wrong(key, "a number", value.to_string()))
    }
}
