//! The metadata of a converted file: the same keys, in the same order, as llama.cpp's own converter writes.

use super::ConvertError;
use super::config::{HfConfig, Mixer, VisionConfig};
use super::tokenizer::{add_tokenizer, read_json};
use super::transform::Planned;
use crate::gguf::{Array, Metadata, Value};
use serde_json::Value as Json;
use std::path::Path;

/// Prefix of the text model's keys.
pub const ARCHITECTURE: &str = "qwen35moe";

/// Key of the number of layers.
pub const BLOCK_COUNT: &str = "qwen35moe.block_count";
/// Key of the size in words.
pub const SIZE_LABEL: &str = "general.size_label";
/// Key of the number of MTP layers.
pub const NEXTN_LAYERS: &str = "qwen35moe.nextn_predict_layers";

/// Sampling defaults: key in `generation_config.json`, key in the GGUF, whether it is an integer.
const SAMPLING: [(&str, &str, bool); 5] = [
    ("top_k", "general.sampling.top_k", true),
    ("top_p", "general.sampling.top_p", false),
    ("min_p", "general.sampling.min_p", false),
    ("temperature", "general.sampling.temp", false),
    ("repetition_penalty", "general.sampling.penalty_repeat", false),
];

/// Metadata of the text model, tokenizer included. `config_json` is the whole `config.json`.
///
/// # Errors
/// When the tokenizer cannot be carried over or a file of the folder is not readable.
pub fn text_model(
    folder: &Path,
    config_json: &Json,
    config: &HfConfig,
    tensors: &[Planned],
    mtp_layers: u64,
    file_type: u32,
    name: &str,
) -> Result<Metadata, ConvertError> {
    let mut m = Metadata::new(&folder.display().to_string());
    general(&mut m, folder, ARCHITECTURE, "model", name, tensors)?;
    text_parameters(&mut m, config, mtp_layers, file_type);
    m.set("general.quantization_version", Value::U32(2));
    add_tokenizer(&mut m, folder, config_json, config.vocab)?;
    Ok(m)
}

fn general(
    m: &mut Metadata,
    folder: &Path,
    architecture: &str,
    kind: &str,
    name: &str,
    tensors: &[Planned],
) -> Result<(), ConvertError> {
    m.set("general.architecture", Value::String(architecture.into()));
    m.set("general.type", Value::String(kind.into()));
    let generation = read_json(&folder.join("generation_config.json"))?.unwrap_or(Json::Null);
    for (from, to, integer) in SAMPLING {
        if let Some(number) = generation[from].as_f64() {
            m.set(to, if integer { Value::I32(number as i32) } else { Value::F32(number as f32) });
        }
    }
    m.set("general.name", Value::String(name.into()));
    let label = size_label(tensors.iter().map(|t| (t.name.as_str(), t.dims.as_slice())));
    m.set(SIZE_LABEL, Value::String(label));
    Ok(())
}

/// The geometry keys.
fn text_parameters(m: &mut Metadata, c: &HfConfig, mtp_layers: u64, file_type: u32) {
    let mut set = |key: &str, value: Value| m.set(format!("{ARCHITECTURE}.{key}"), value);
    let int = |n: u64| Value::U32(n as u32);
    set("block_count", int(c.layers.len() as u64 + mtp_layers));
    set("context_length", int(c.context));
    set("embedding_length", int(c.hidden));
    set("attention.head_count", int(c.heads));
    set("attention.head_count_kv", int(c.kv_heads));
    if let Some(scaling) = &c.rope_scaling {
        set("rope.scaling.type", Value::String(scaling.kind.clone()));
        set("rope.scaling.factor", Value::F32(scaling.factor));
        if let Some(original) = scaling.original_context {
            set("rope.scaling.original_context_length", int(original));
        }
    }
    set("rope.dimension_sections", Value::Array(Array::I32(c.rope_sections.to_vec())));
    set("rope.freq_base", Value::F32(c.rope_base));
    set("attention.layer_norm_rms_epsilon", Value::F32(c.norm_eps));
    set("expert_count", int(c.experts));
    set("expert_used_count", int(c.experts_used));
    set("attention.key_length", int(c.head_dim));
    set("attention.value_length", int(c.head_dim));
    m.set("general.file_type", Value::U32(file_type));
    let mut set = |key: &str, value: Value| m.set(format!("{ARCHITECTURE}.{key}"), value);
    set("expert_feed_forward_length", int(c.expert_ff));
    set("expert_shared_feed_forward_length", int(c.shared_expert_ff));
    if mtp_layers > 0 {
        set("nextn_predict_layers", int(mtp_layers));
    }
    set("ssm.conv_kernel", int(c.conv_kernel));
    set("ssm.state_size", int(c.key_head_dim));
    set("ssm.group_count", int(c.key_heads));
    set("ssm.time_step_rank", int(c.value_heads));
    set("ssm.inner_size", int(c.value_dim()));
    let mut recurrent: Vec<bool> = c.layers.iter().map(|l| *l == Mixer::DeltaNet).collect();
    recurrent.resize(recurrent.len() + mtp_layers as usize, false);
    set("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
    set("full_attention_interval", int(c.full_attention_interval));
    set("rope.dimension_count", int(c.rope_dim));
}

/// Metadata of the vision encoder's file.
///
/// # Errors
/// When `preprocessor_config.json` does not give mean and deviation of the colours.
pub fn vision(
    folder: &Path,
    config: &HfConfig,
    vision: &VisionConfig,
    tensors: &[Planned],
    file_type: u32,
    name: &str,
) -> Result<Metadata, ConvertError> {
    let mut m = Metadata::new(&folder.display().to_string());
    general(&mut m, folder, "clip", "mmproj", name, tensors)?;
    m.set("general.file_type", Value::U32(file_type));
    m.set("clip.has_vision_encoder", Value::Bool(true));
    let int = |n: u64| Value::U32(n as u32);
    m.set("clip.vision.projection_dim", int(config.hidden));
    m.set("clip.vision.image_size", int(vision.positions.isqrt() * vision.patch));
    m.set("clip.vision.patch_size", int(vision.patch));
    m.set("clip.vision.embedding_length", int(vision.hidden));
    m.set("clip.vision.feed_forward_length", int(vision.ff));
    m.set("clip.vision.block_count", int(vision.blocks));
    m.set("clip.vision.attention.head_count", int(vision.heads));
    let path = folder.join("preprocessor_config.json");
    let preprocessor = read_json(&path)?.unwrap_or(Json::Null);
    for key in ["image_mean", "image_std"] {
        let values: Vec<f32> =
            preprocessor[key].as_array().into_iter().flatten().filter_map(Json::as_f64).map(|v| v as f32).collect();
        if values.len() != 3 {
            return Err(ConvertError::Config {
                file: path.display().to_string(),
                key: key.to_string(),
                expected: "three numbers".to_string(),
                found: preprocessor[key].to_string(),
            });
        }
        m.set(format!("clip.vision.{key}"), Value::Array(Array::F32(values)));
    }
    m.set("clip.projector_type", Value::String("qwen3vl_merger".into()));
    m.set("clip.use_gelu", Value::Bool(true));
    m.set("clip.vision.spatial_merge_size", int(vision.merge));
    m.set("clip.vision.attention.layer_norm_epsilon", Value::F32(config.norm_eps));
    m.set("clip.vision.is_deepstack_layers", Value::Array(Array::Bool(vec![false; vision.blocks as usize])));
    m.set("general.quantization_version", Value::U32(2));
    Ok(m)
}

/// `experts x size` where size counts one expert, as model pages write it: `256x3.1B`. `tensors` are names and sizes.
pub(super) fn size_label<'a>(tensors: impl Iterator<Item = (&'a str, &'a [u64])>) -> String {
    let (mut size, mut experts) = (0u64, 0u64);
    for (name, dims) in tensors {
        let weights: u64 = dims.iter().product();
        if name.contains("_exps.") && dims.len() == 3 {
            experts = dims[2];
            size += weights / experts.max(1);
        } else {
            size += weights;
        }
    }
    let (scaled, unit) = match size {
        s if s > 1_000_000_000_000 => (s as f64 * 1e-12, "T"),
        s if s > 1_000_000_000 => (s as f64 * 1e-9, "B"),
        s if s > 1_000_000 => (s as f64 * 1e-6, "M"),
        s => (s as f64 * 1e-3, "K"),
    };
    // Two digits in all.
    let digits = match scaled.round() {
        s if s < 1.0 => 2,
        s if s < 10.0 => 1,
        _ => 0,
    };
    let size = format!("{scaled:.digits$}{unit}");
    if experts > 0 { format!("{experts}x{size}") } else { size }
}

/// A model name from the name of its folder: dashes and underscores as spaces, words capitalised.
pub fn name_of_folder(folder: &Path) -> String {
    let resolved = folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf());
    let raw = resolved.file_name().map_or_else(|| "model".to_string(), |n| n.to_string_lossy().into_owned());
    raw.split(['-', '_', ' '])
        .filter(|word| !word.is_empty())
        .map(|word| {
            let mut letters = word.chars();
            let first = letters.next().map(|c| c.to_uppercase().to_string()).unwrap_or_default();
            first + letters.as_str()
        })
        .collect::<Vec<_>>()
        .join(" ")
}
