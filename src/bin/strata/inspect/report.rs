//! What a person wants to know about a model file, as one value that the table and `--json` both print.

use super::print;
use super::schema::{self, Held};
use crate::cli::wording::{agreeing, counted};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::PathBuf;
use strata_core::checkpoint::Checkpoint;
use strata_core::convert::{HfConfig, Mixer, names};
use strata_core::gguf::{GgufFile, Value};
use strata_core::model::{ARCHITECTURE, LayerKind, ModelConfig, ModelError};
use strata_kernels::format::TensorType;

/// Everything `strata inspect` says about a file.
#[derive(Serialize)]
pub struct Report {
    /// The path as given.
    pub file: String,
    /// `GGUF v3` or `safetensors`.
    pub format: String,
    /// The files it consists of.
    pub parts: Vec<PathBuf>,
    /// Bytes of all files.
    pub bytes: u64,
    /// Tensors in all files.
    pub tensors: usize,
    /// What belongs to the checkpoint and is not counted here, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub not_opened: Option<String>,
    /// Weights in all tensors.
    pub weights: u64,
    /// Bits per weight over all tensors.
    pub bits_per_weight: f64,
    /// Keys of metadata (GGUF).
    pub metadata_keys: Option<usize>,
    /// Alignment of the tensor data in bytes (GGUF).
    pub alignment: Option<u64>,
    /// What kind of model it is.
    pub model: Identity,
    /// Layers, widths, experts, where the architecture is strata's.
    pub geometry: Option<Geometry>,
    /// The encoder's geometry, for an mmproj file or a checkpoint that holds one.
    pub vision: Option<VisionGeometry>,
    /// Vocabulary and template.
    pub text: Option<Text>,
    /// Bytes per tensor type, largest first.
    pub types: Vec<TypeShare>,
    /// The MTP head, where the architecture has one.
    pub mtp: Option<MtpReport>,
    /// Whether strata can run it.
    pub runs: Runs,
    /// SHA-256 of each part, where asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<Vec<FileHash>>,
}

/// Names of the model.
#[derive(Serialize, Default)]
pub struct Identity {
    /// `general.architecture`.
    pub architecture: String,
    /// `general.name`.
    pub name: Option<String>,
    /// `general.size_label`, e.g. `35B-A3B`.
    pub size_label: Option<String>,
    /// `general.file_type` in words, e.g. `Q4_K_M`, or the mix that the types of the tensors show.
    pub file_type: Option<String>,
    /// Who quantized it.
    pub quantized_by: Option<String>,
    /// The importance matrix it was quantized with.
    pub imatrix: Option<String>,
}

/// Geometry of the language model.
#[derive(Serialize)]
pub struct Geometry {
    /// Trunk layers.
    pub trunk_layers: usize,
    /// Trunk layers that are delta nets.
    pub delta_net_layers: usize,
    /// Trunk layers with softmax attention.
    pub attention_layers: usize,
    /// MTP layers in the file.
    pub mtp_layers: usize,
    /// Width of a row.
    pub hidden: u64,
    /// Query heads.
    pub heads: u64,
    /// Key and value heads.
    pub kv_heads: u64,
    /// Width of an attention head.
    pub head_dim: u64,
    /// Delta net: key heads.
    pub key_heads: Option<u64>,
    /// Delta net: value heads.
    pub value_heads: Option<u64>,
    /// Experts per layer.
    pub experts: u64,
    /// Experts used per row.
    pub experts_used: u64,
    /// Width of an expert.
    pub expert_ff: u64,
    /// Width of the shared expert.
    pub shared_expert_ff: u64,
    /// Tokens the model was made for.
    pub context: u64,
    /// Rows of the embedding table.
    pub vocab: u64,
}

/// Geometry of a vision encoder.
#[derive(Serialize)]
pub struct VisionGeometry {
    /// `clip.projector_type`.
    pub projector: String,
    /// Layers.
    pub layers: u64,
    /// Width.
    pub hidden: u64,
    /// Attention heads.
    pub heads: u64,
    /// Side of a patch in pixels.
    pub patch: u64,
    /// Patches merged per side.
    pub merge: u64,
    /// Width of the rows it hands to the language model.
    pub out: u64,
}

/// Vocabulary and chat template.
#[derive(Serialize)]
pub struct Text {
    /// Tokens in the vocabulary.
    pub tokens: Option<usize>,
    /// BPE merges.
    pub merges: Option<usize>,
    /// The pre-tokenizer, e.g. `qwen35`.
    pub pre_tokenizer: Option<String>,
    /// Characters of the chat template; absent when there is none.
    pub chat_template_chars: Option<usize>,
    /// Whether the template knows tools, thinking and pictures.
    pub chat_template_knows: Vec<&'static str>,
}

/// The tensors of one type.
#[derive(Serialize)]
pub struct TypeShare {
    /// The type.
    #[serde(rename = "type")]
    pub name: String,
    /// How many tensors.
    pub tensors: usize,
    /// Their weights.
    pub weights: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Their share of all tensor bytes.
    pub share: f64,
    /// Whether strata can compute with the type; `null` for checkpoints, which are converted first.
    pub computable: Option<bool>,
}

/// State of the MTP head.
#[derive(Serialize, Clone, Copy, PartialEq, Eq, Debug)]
#[serde(rename_all = "snake_case")]
pub enum MtpState {
    /// Every tensor is there.
    Complete,
    /// Some tensors are missing or have the wrong shape.
    Incomplete,
    /// No tensor is there, and the metadata promises none.
    Absent,
    /// No tensor is there, although the metadata promises a head.
    Lost,
    /// No tensor is there, but files that belong to the checkpoint were not opened.
    NotOpened,
}

/// The MTP head.
#[derive(Serialize)]
pub struct MtpReport {
    /// Its state.
    pub state: MtpState,
    /// MTP layers.
    pub layers: u64,
    /// The first block it occupies, or would occupy (GGUF).
    pub block: Option<u64>,
    /// Tensors it has.
    pub tensors: usize,
    /// Bytes of these.
    pub bytes: u64,
    /// The types of its tensors.
    pub types: Vec<String>,
    /// Tensors that are not there.
    pub missing: Vec<String>,
    /// Tensors whose shape does not fit: name, expected, found.
    pub wrong_shape: Vec<String>,
    /// How to get it back, when it is not complete.
    pub restore: Option<String>,
}

/// Whether strata can run the file.
#[derive(Serialize)]
pub struct Runs {
    /// The verdict.
    pub can_run: bool,
    /// In words: what works.
    pub can: Vec<String>,
    /// In words: what does not, and why.
    pub cannot: Vec<String>,
}

/// A file's hash.
#[derive(Serialize)]
pub struct FileHash {
    /// The file.
    pub file: PathBuf,
    /// SHA-256 in hexadecimal.
    pub sha256: String,
}

/// A report, and the error that makes the file useless although it could be read.
pub struct Inspected {
    /// The report.
    pub report: Report,
    /// Geometry that does not add up, or a trunk tensor that is missing.
    pub broken: Option<anyhow::Error>,
}

/// Inspects a GGUF.
pub fn of_gguf(file: &GgufFile) -> anyhow::Result<Inspected> {
    let m = file.metadata();
    let architecture = m.str("general.architecture")?.to_string();
    let identity = Identity {
        name: m.str_opt("general.name")?.map(str::to_string),
        size_label: m.str_opt("general.size_label")?.map(str::to_string),
        file_type: m.u32_opt("general.file_type")?.map(|id| mix_name(file, id)),
        quantized_by: m.str_opt("general.quantized_by")?.map(str::to_string),
        imatrix: m.str_opt("quantize.imatrix.file")?.map(str::to_string),
        architecture,
    };
    let bytes: u64 = file.tensors().iter().map(|t| t.size).sum();
    let weights: u64 = file.tensors().iter().map(|t| t.weights()).sum();
    let types = type_shares(file.tensors().iter().map(|t| (t.ty.name(), Some(t.ty.computable()), t.weights(), t.size)));
    let mut report = Report {
        file: file.name().to_string(),
        format: format!("GGUF v{}", file.version()),
        parts: file.paths().to_vec(),
        bytes: file.total_bytes(),
        tensors: file.tensors().len(),
        not_opened: None,
        weights,
        bits_per_weight: if weights == 0 { 0.0 } else { bytes as f64 * 8.0 / weights as f64 },
        metadata_keys: Some(m.len()),
        alignment: Some(file.alignment()),
        model: identity,
        geometry: None,
        vision: None,
        text: text_of(file)?,
        types,
        mtp: None,
        runs: Runs { can_run: false, can: Vec::new(), cannot: Vec::new() },
        sha256: None,
    };
    let broken = match report.model.architecture.as_str() {
        ARCHITECTURE => language_model(file, &mut report),
        "clip" => vision_encoder(file, &mut report)?,
        other => {
            report.runs.cannot.push(format!("the architecture is '{other}'; strata runs '{ARCHITECTURE}' only"));
            None
        }
    };
    Ok(Inspected { report, broken })
}

fn language_model(file: &GgufFile, report: &mut Report) -> Option<anyhow::Error> {
    let c = match ModelConfig::from_gguf(file) {
        Ok(c) => c,
        Err(e) => {
            report.runs.cannot.push("its geometry does not add up".into());
            return Some(e.into());
        }
    };
    report.geometry = Some(Geometry {
        trunk_layers: c.trunk_layers,
        delta_net_layers: c.layers_of(LayerKind::DeltaNet),
        attention_layers: c.layers_of(LayerKind::Attention),
        mtp_layers: c.mtp_layers,
        hidden: c.hidden as u64,
        heads: c.attention.heads as u64,
        kv_heads: c.attention.kv_heads as u64,
        head_dim: c.attention.head_dim as u64,
        key_heads: c.delta.as_ref().map(|d| d.key_heads as u64),
        value_heads: c.delta.as_ref().map(|d| d.value_heads as u64),
        experts: c.moe.experts as u64,
        experts_used: c.moe.used as u64,
        expert_ff: c.moe.ff as u64,
        shared_expert_ff: c.moe.shared_ff as u64,
        context: c.context as u64,
        vocab: c.vocab as u64,
    });
    let rules = schema::rules_config(&c, file.tensor("output.weight").is_none());
    let mtp = mtp_of_gguf(file, &c, &rules);

    let mut broken = None;
    for e in schema::trunk(&rules) {
        let error = match schema::held(file, &e) {
            Held::Missing if !e.optional => ModelError::MissingTensor {
                file: file.name().to_string(),
                tensor: e.name,
                needed_by: "the trunk".into(),
            },
            Held::WrongShape(t) => ModelError::TensorShape {
                file: file.name().to_string(),
                tensor: t.name.clone(),
                expected: e.dims,
                found: t.dims.clone(),
            },
            _ => continue,
        };
        broken.get_or_insert(error);
    }
    let unknown: Vec<_> = report.types.iter().filter(|t| t.computable == Some(false)).collect();
    for t in &unknown {
        report.runs.cannot.push(format!(
            "{} stored as {}, which strata cannot compute with",
            print::tensors(t.tensors),
            t.name
        ));
    }
    let has_vocabulary = report.text.as_ref().is_some_and(|t| t.tokens.is_some());
    if !has_vocabulary {
        report.runs.cannot.push("it has no vocabulary (tokenizer.ggml.tokens)".into());
    }
    report.runs.can_run = unknown.is_empty() && has_vocabulary && broken.is_none() && mtp.state != MtpState::Incomplete;
    if broken.is_some() {
        report.runs.cannot.push("tensors of the trunk are missing or have the wrong shape".into());
    } else if mtp.state == MtpState::Incomplete {
        let drop = format!("strata convert {} --drop-mtp -o WITHOUT_HEAD.gguf", file.name());
        report.runs.cannot.push(format!("running: the MTP head is incomplete; without it the file runs: {drop}"));
    }
    if report.runs.can_run {
        report.runs.can.push(format!("strata run -m {}", file.name()));
        match mtp.state {
            MtpState::Complete => report.runs.can.push("drafting with the MTP head".into()),
            _ => report.runs.cannot.push("drafting: the MTP head is not complete in this file".into()),
        }
        if report.text.as_ref().is_none_or(|t| t.chat_template_chars.is_none()) {
            report.runs.cannot.push("chat: there is no chat template; use --raw".into());
        }
    }
    report.mtp = Some(mtp);
    broken.map(Into::into)
}

fn mtp_of_gguf(file: &GgufFile, c: &ModelConfig, rules: &HfConfig) -> MtpReport {
    let layers = c.mtp_layers.max(c.mtp_layers_promised).max(1) as u64;
    let block = c.trunk_layers as u64;
    let in_head = |name: &str| names::layer_of(name).is_some_and(|l| l >= block && l < block + layers);
    let there: Vec<_> = file.tensors().iter().filter(|t| in_head(&t.name)).collect();
    let (mut missing, mut wrong_shape) = (Vec::new(), Vec::new());
    for e in schema::mtp(rules, block, layers) {
        match schema::held(file, &e) {
            Held::Missing if !e.optional => missing.push(e.name),
            Held::WrongShape(t) => {
                wrong_shape.push(format!("{}: expected {:?}, found {:?}", t.name, e.dims, t.dims));
            }
            _ => {}
        }
    }
    let state = match (there.is_empty(), missing.is_empty() && wrong_shape.is_empty()) {
        (true, _) if c.mtp_layers_promised > 0 => MtpState::Lost,
        (true, _) => MtpState::Absent,
        (false, true) => MtpState::Complete,
        (false, false) => MtpState::Incomplete,
    };
    let restore = (state != MtpState::Complete)
        .then(|| format!("strata convert {} --mtp-from ORIGINAL_SAFETENSORS_FOLDER -o WITH_HEAD.gguf", file.name()));
    MtpReport {
        state,
        layers: if there.is_empty() { 0 } else { layers },
        block: Some(block),
        tensors: there.len(),
        bytes: there.iter().map(|t| t.size).sum(),
        types: type_shares(there.iter().map(|t| (t.ty.name(), None, t.weights(), t.size)))
            .into_iter()
            .map(|t| t.name)
            .collect(),
        missing,
        wrong_shape,
        restore,
    }
}

fn vision_encoder(file: &GgufFile, report: &mut Report) -> anyhow::Result<Option<anyhow::Error>> {
    let m = file.metadata();
    let projector = m.str_opt("clip.projector_type")?.unwrap_or("unknown").to_string();
    if projector != "qwen3vl_merger" {
        report.runs.cannot.push(format!("the projector is '{projector}'; strata knows 'qwen3vl_merger' only"));
        return Ok(None);
    }
    let key = |k: &str| m.u64(&format!("clip.vision.{k}"));
    report.vision = Some(VisionGeometry {
        projector,
        layers: key("block_count")?,
        hidden: key("embedding_length")?,
        heads: key("attention.head_count")?,
        patch: key("patch_size")?,
        merge: m.u64_opt("clip.vision.spatial_merge_size")?.unwrap_or(2),
        out: key("projection_dim")?,
    });
    match strata_core::vision::VisionEncoder::open(std::path::Path::new(file.name()), 1) {
        Ok(_) => {
            report.runs.can_run = true;
            report.runs.can.push(format!("strata run -m MODEL.gguf --mmproj {} --image PICTURE", file.name()));
            Ok(None)
        }
        Err(e) => {
            report.runs.cannot.push("the encoder cannot be used".into());
            Ok(Some(e.into()))
        }
    }
}

fn text_of(file: &GgufFile) -> anyhow::Result<Option<Text>> {
    let m = file.metadata();
    let length = |key: &str| match m.get(key) {
        Some(Value::Array(a)) => Some(a.len()),
        _ => None,
    };
    let template = m.str_opt("tokenizer.chat_template")?;
    if m.get("tokenizer.ggml.tokens").is_none() && template.is_none() {
        return Ok(None);
    }
    Ok(Some(Text {
        tokens: length("tokenizer.ggml.tokens"),
        merges: length("tokenizer.ggml.merges"),
        pre_tokenizer: m.str_opt("tokenizer.ggml.pre")?.map(str::to_string),
        chat_template_chars: template.map(|t| t.chars().count()),
        chat_template_knows: template.map(template_knows).unwrap_or_default(),
    }))
}

fn template_knows(template: &str) -> Vec<&'static str> {
    let signs = [("tools", "tools"), ("enable_thinking", "thinking on and off"), ("<|vision_start|>", "pictures")];
    signs.into_iter().filter(|(sign, _)| template.contains(sign)).map(|(_, what)| what).collect()
}

/// Inspects a checkpoint.
pub fn of_checkpoint(path: &str, checkpoint: &Checkpoint) -> anyhow::Result<Inspected> {
    let weights: u64 = checkpoint.tensors().map(|t| t.elements() as u64).sum();
    let bytes: u64 = checkpoint.tensors().map(|t| t.bytes() as u64).sum();
    let types =
        type_shares(checkpoint.tensors().map(|t| (t.dtype.name(), None, t.elements() as u64, t.bytes() as u64)));
    let config = checkpoint.config();
    let first = |key: &str| config.and_then(|c| c.get(key)).and_then(|v| v.get(0).or(Some(v))).and_then(|v| v.as_str());
    let mut report = Report {
        file: path.to_string(),
        format: "safetensors".into(),
        parts: (0..checkpoint.shard_count()).map(|s| checkpoint.shard_path(s).to_path_buf()).collect(),
        bytes: checkpoint.total_bytes(),
        tensors: checkpoint.tensors().len(),
        not_opened: not_opened(checkpoint),
        weights,
        bits_per_weight: if weights == 0 { 0.0 } else { bytes as f64 * 8.0 / weights as f64 },
        metadata_keys: None,
        alignment: None,
        model: Identity {
            architecture: first("architectures")
                .or(first("model_type"))
                .unwrap_or("architecture not known (no config.json)")
                .to_string(),
            name: checkpoint.folder().file_name().map(|n| n.to_string_lossy().into_owned()),
            ..Identity::default()
        },
        geometry: None,
        vision: None,
        text: None,
        types,
        mtp: None,
        runs: Runs { can_run: false, can: Vec::new(), cannot: Vec::new() },
        sha256: None,
    };
    report.runs.cannot.push("safetensors are the source of a model file, strata runs GGUF".into());
    for (shard, tensors) in checkpoint.missing_shards() {
        report.runs.cannot.push(format!("shard {shard} with {} is not there", print::tensors(tensors)));
    }
    if checkpoint.one_of_several() {
        report.runs.cannot.push("converting: this is one shard of several; give the folder or its index".into());
    }
    let Some(config) = config else {
        report.runs.cannot.push("converting: there is no config.json".into());
        return Ok(Inspected { report, broken: None });
    };
    let name = checkpoint.folder().join("config.json").display().to_string();
    let hf = match HfConfig::from_json(&name, config) {
        Ok(hf) => hf,
        Err(e) => {
            report.runs.cannot.push(format!("converting: {e}"));
            return Ok(Inspected { report, broken: None });
        }
    };
    let attention = hf.layers.iter().filter(|l| **l == Mixer::Attention).count();
    let mtp = mtp_of_checkpoint(checkpoint, &hf);
    report.geometry = Some(Geometry {
        trunk_layers: hf.layers.len(),
        delta_net_layers: hf.layers.len() - attention,
        attention_layers: attention,
        mtp_layers: mtp.layers as usize,
        hidden: hf.hidden,
        heads: hf.heads,
        kv_heads: hf.kv_heads,
        head_dim: hf.head_dim,
        key_heads: Some(hf.key_heads),
        value_heads: Some(hf.value_heads),
        experts: hf.experts,
        experts_used: hf.experts_used,
        expert_ff: hf.expert_ff,
        shared_expert_ff: hf.shared_expert_ff,
        context: hf.context,
        vocab: hf.vocab,
    });
    report.vision = hf.vision.as_ref().map(|v| VisionGeometry {
        projector: "qwen3vl_merger".into(),
        layers: v.blocks,
        hidden: v.hidden,
        heads: v.heads,
        patch: v.patch,
        merge: v.merge,
        out: v.out_hidden,
    });
    report.mtp = Some(mtp);
    if report.not_opened.is_none() {
        report.runs.can.push(format!("strata convert {path} -o MODEL.gguf"));
    }
    Ok(Inspected { report, broken: None })
}

fn mtp_of_checkpoint(checkpoint: &Checkpoint, hf: &HfConfig) -> MtpReport {
    let is_mtp = |name: &str| names::part_of_hf(name) == names::Part::Mtp;
    let there: Vec<_> = checkpoint.tensors().filter(|t| is_mtp(&t.name)).collect();
    let absent = checkpoint.absent_tensors().filter(|(n, _)| is_mtp(n)).count();
    let layers = hf.mtp_layers.unwrap_or(0).max((!there.is_empty() || absent > 0) as u64);
    let mut missing = Vec::new();
    for e in schema::mtp(hf, hf.layers.len() as u64, layers.max(1)) {
        let found = e.hf_names.iter().chain(&e.hf_first_expert).any(|n| checkpoint.tensor(n).is_some());
        if !found && !e.optional && !missing.contains(&e.hf_names[0]) {
            missing.push(e.hf_names[0].clone());
        }
    }
    let elsewhere = absent > 0 || checkpoint.one_of_several();
    let state = match (there.is_empty(), missing.is_empty()) {
        (_, false) if elsewhere => MtpState::NotOpened,
        (true, _) if layers > 0 => MtpState::Lost,
        (true, _) => MtpState::Absent,
        (false, true) => MtpState::Complete,
        (false, false) => MtpState::Incomplete,
    };
    MtpReport {
        state,
        layers: if there.is_empty() { 0 } else { layers },
        block: None,
        tensors: there.len(),
        bytes: there.iter().map(|t| t.bytes() as u64).sum(),
        types: type_shares(there.iter().map(|t| (t.dtype.name(), None, t.elements() as u64, t.bytes() as u64)))
            .into_iter()
            .map(|t| t.name)
            .collect(),
        missing,
        wrong_shape: Vec::new(),
        restore: (state != MtpState::Complete && !checkpoint.one_of_several())
            .then(|| "get the shards that the original model.safetensors.index.json names for 'mtp.*'".into()),
    }
}

/// What of a checkpoint was not opened.
fn not_opened(checkpoint: &Checkpoint) -> Option<String> {
    if checkpoint.one_of_several() {
        return Some("this is one shard of several: the others were not opened (inspect the folder)".into());
    }
    let absent = checkpoint.absent_tensors().count();
    let size = checkpoint.indexed_bytes().map(|n| format!(" of {}", print::bytes(n))).unwrap_or_default();
    let shards = checkpoint.missing_shards().len();
    (absent > 0).then(|| {
        format!(
            "the index{size} names {} further {} in {} not here",
            print::grouped(absent as u64),
            agreeing(absent, "tensor", "tensors"),
            counted(shards, "shard")
        )
    })
}

/// Sums tensors by type, most bytes first.
fn type_shares<'a>(tensors: impl Iterator<Item = (&'a str, Option<bool>, u64, u64)>) -> Vec<TypeShare> {
    let mut by_name: BTreeMap<&str, TypeShare> = BTreeMap::new();
    let mut total = 0;
    for (name, computable, weights, bytes) in tensors {
        let t = by_name.entry(name).or_insert_with(|| TypeShare {
            name: name.to_string(),
            tensors: 0,
            weights: 0,
            bytes: 0,
            share: 0.0,
            computable,
        });
        t.tensors += 1;
        t.weights += weights;
        t.bytes += bytes;
        total += bytes;
    }
    let mut shares: Vec<_> = by_name.into_values().collect();
    for t in &mut shares {
        t.share = if total == 0 { 0.0 } else { t.bytes as f64 / total as f64 };
    }
    shares.sort_by_key(|share| std::cmp::Reverse(share.bytes));
    shares
}

/// The name of the mix. There is no `general.file_type` for the UD mixes, which carry the number of the plain one they come
/// closest to; what tells them apart is that the dense parts are Q8_0 and only the experts have fewer bits.
fn mix_name(file: &GgufFile, id: u32) -> String {
    let name = file_type_name(id);
    let all = |part: &str, ty: TensorType| {
        let mut of_part = file.tensors().iter().filter(|t| t.name.ends_with(part)).map(|t| t.ty).peekable();
        of_part.peek().is_some() && of_part.all(|t| t == ty)
    };
    let dense = ["attn_qkv.weight", "attn_output.weight", "ssm_out.weight"];
    if name == "Q4_K_M" && dense.iter().all(|part| all(part, TensorType::Q8_0)) {
        return "UD-Q4_K_XL (marked as Q4_K_M)".to_string();
    }
    name
}

/// llama.cpp's names of `general.file_type`.
fn file_type_name(id: u32) -> String {
    let known = [
        (0, "F32"),
        (1, "F16"),
        (2, "Q4_0"),
        (3, "Q4_1"),
        (7, "Q8_0"),
        (8, "Q5_0"),
        (9, "Q5_1"),
        (10, "Q2_K"),
        (11, "Q3_K_S"),
        (12, "Q3_K_M"),
        (13, "Q3_K_L"),
        (14, "Q4_K_S"),
        (15, "Q4_K_M"),
        (16, "Q5_K_S"),
        (17, "Q5_K_M"),
        (18, "Q6_K"),
        (19, "IQ2_XXS"),
        (20, "IQ2_XS"),
        (21, "Q2_K_S"),
        (22, "IQ3_XS"),
        (23, "IQ3_XXS"),
        (24, "IQ1_S"),
        (25, "IQ4_NL"),
        (26, "IQ3_S"),
        (27, "IQ3_M"),
        (28, "IQ2_S"),
        (29, "IQ2_M"),
        (30, "IQ4_XS"),
        (31, "IQ1_M"),
        (32, "BF16"),
        (36, "TQ1_0"),
        (37, "TQ2_0"),
        (38, "MXFP4"),
    ];
    known.iter().find(|(n, _)| *n == id).map_or_else(|| format!("type {id}"), |(_, name)| name.to_string())
}
