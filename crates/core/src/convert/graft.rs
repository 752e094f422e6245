//! Moving the MTP head: into a GGUF that lacks it (from a checkpoint or from another GGUF), or out of one.
//!
//! Everything that is not the head is carried over byte for byte. After writing, the finished file is opened and every
//! carried tensor is hashed on both sides; the result says so.

use super::ConvertError;
use super::config::{HfConfig, Mixer};
use super::folder::{self, TensorReport};
use super::metadata::{ARCHITECTURE, BLOCK_COUNT, NEXTN_LAYERS, SIZE_LABEL, size_label};
use super::names::{self, Part, Rule};
use super::output::{self, Content, Output, Progress};
use super::plan::{self, PlanOptions};
use super::recipe::{Override, Recipe, TypeChooser};
use super::verify::{self, Verification};
use crate::checkpoint::Checkpoint;
use crate::gguf::{Array, GgufFile, Metadata, TensorDecl, Value, WriterOptions};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use strata_kernels::format::TensorType;

/// How a head is grafted.
#[derive(Clone, Debug)]
pub struct GraftOptions {
    /// Type or recipe of the head's matrices; never below Q8_0 unless `mtp_type` or an override says so.
    pub recipe: Recipe,
    /// Type of the head's matrices.
    pub mtp_type: Option<TensorType>,
    /// Overrides per tensor.
    pub overrides: Vec<Override>,
    /// What may be taken for granted.
    pub plan: PlanOptions,
    /// How the file is written.
    pub writer: WriterOptions,
    /// Compares the head with its source after writing.
    pub verify: bool,
}

/// What a graft did.
#[derive(Debug)]
pub struct GraftReport {
    /// The files written.
    pub files: Vec<PathBuf>,
    /// Tensors added, or empty when the head was dropped.
    pub added: Vec<TensorReport>,
    /// Tensors dropped.
    pub dropped: Vec<String>,
    /// Tensors carried over.
    pub carried: usize,
    /// Bytes of the tensors carried over.
    pub carried_bytes: u64,
    /// SHA-256 over the names and hashes of the carried tensors, equal on both sides.
    pub carried_hash: String,
    /// Metadata keys that were changed, with what was done.
    pub changed_keys: Vec<String>,
    /// Remarks.
    pub notes: Vec<String>,
    /// The comparison of the head with its source.
    pub verification: Option<Verification>,
}

/// Writes `base` with the MTP head of `donor` (a folder, an index, a shard, or another GGUF) to `out`.
///
/// # Errors
/// When the base has a head, the donor has none, or the two are not of the same model.
pub fn graft_head(
    base: &Path,
    donor: &Path,
    out: &Path,
    options: &GraftOptions,
    progress: Progress,
) -> Result<GraftReport, ConvertError> {
    let base_file = open_text_model(base)?;
    let (trunk, head) = layers_of(&base_file)?;
    if head > 0 || base_file.tensors().iter().any(|t| names::layer_of(&t.name).is_some_and(|l| l >= trunk)) {
        return Err(ConvertError::Refused {
            file: base_file.name().to_string(),
            reason: "it has an MTP head already (drop it first with --drop-mtp)".to_string(),
        });
    }
    let config = HfConfig::from_gguf(&base_file)?;
    let is_gguf = donor.is_file() && donor.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    let graft = if is_gguf {
        head_of_gguf(&base_file, donor, trunk, &config)?
    } else {
        head_of_checkpoint(donor, trunk, &config, options)?
    };
    let mut keys = base_file.metadata().clone();
    let mut changed_keys = change_layers(&mut keys, trunk, trunk + graft.layers, &config.layers)?;
    let mut outputs = carried(&base_file, |_| true);
    outputs.extend(graft.outputs);
    changed_keys.extend(change_size_label(&mut keys, &base_file, &outputs));
    let files = output::write(out, &keys, &outputs, &options.writer, progress)?;
    drop(outputs);

    let written = GgufFile::open(&files[0])?;
    let mut report = prove(&base_file, &written, |_| true)?;
    if let (true, Some((checkpoint, planned))) = (options.verify, &graft.source) {
        let verified = verify::verify_head(&written, checkpoint, planned, progress);
        report.verification = Some(verified.map_err(|error| error.after_writing(&files))?);
    }
    Ok(GraftReport { files, added: graft.reports, changed_keys, notes: graft.notes, ..report })
}

/// Writes `base` without its MTP head to `out`.
///
/// # Errors
/// When it has none.
pub fn drop_head(
    base: &Path,
    out: &Path,
    writer: &WriterOptions,
    progress: Progress,
) -> Result<GraftReport, ConvertError> {
    let base_file = open_text_model(base)?;
    let (trunk, head) = layers_of(&base_file)?;
    if head == 0 {
        return Err(ConvertError::Refused {
            file: base_file.name().to_string(),
            reason: format!("it has no MTP head to drop ({NEXTN_LAYERS} is absent or 0)"),
        });
    }
    let stays = |name: &str| names::layer_of(name).is_none_or(|l| l < trunk);
    let mut keys = base_file.metadata().clone();
    let mut changed_keys = change_layers(&mut keys, trunk + head, trunk, &[])?;
    let outputs = carried(&base_file, stays);
    changed_keys.extend(change_size_label(&mut keys, &base_file, &outputs));
    let files = output::write(out, &keys, &outputs, writer, progress)?;
    drop(outputs);
    let written = GgufFile::open(&files[0])?;
    let dropped = base_file.tensors().iter().filter(|t| !stays(&t.name)).map(|t| t.name.clone()).collect();
    Ok(GraftReport { files, dropped, changed_keys, ..prove(&base_file, &written, stays)? })
}

/// A head ready to be written.
struct Head {
    layers: u64,
    outputs: Vec<Output>,
    reports: Vec<TensorReport>,
    notes: Vec<String>,
    /// Where it came from, when it was a checkpoint.
    source: Option<(Checkpoint, Vec<super::transform::Planned>)>,
}

fn head_of_checkpoint(
    donor: &Path,
    trunk: u64,
    config: &HfConfig,
    options: &GraftOptions,
) -> Result<Head, ConvertError> {
    let checkpoint = Checkpoint::open(donor)?;
    let mut config = config.clone();
    // The folder's own promise, where it comes with a config.
    config.mtp_layers = match checkpoint.config() {
        Some(_) => folder::config_of(&checkpoint)?.mtp_layers,
        None => None,
    };
    let plan = plan::mtp_head(&checkpoint, &config, trunk, &options.plan)?;
    let chooser = TypeChooser {
        recipe: options.recipe,
        overrides: options.overrides.clone(),
        mtp: options.mtp_type,
        layers: trunk,
        experts: config.experts,
    };
    let mut head = Head {
        layers: plan.mtp_layers,
        outputs: Vec::new(),
        reports: Vec::new(),
        notes: if checkpoint.config().is_some() { plan.notes } else { Vec::new() },
        source: None,
    };
    for planned in &plan.tensors {
        let (output, report) = folder::prepare(&checkpoint, planned.clone(), &chooser, None)?;
        head.outputs.push(output);
        head.reports.push(report);
    }
    head.source = Some((checkpoint, plan.tensors));
    Ok(head)
}

/// Keys that must agree between two files of one model.
const SCHEMA: [&str; 14] = [
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.dimension_sections",
    "rope.freq_base",
    "attention.layer_norm_rms_epsilon",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "full_attention_interval",
];

fn head_of_gguf(base: &GgufFile, donor: &Path, trunk: u64, config: &HfConfig) -> Result<Head, ConvertError> {
    let file = open_text_model(donor)?;
    let wrong =
        |reason: String| ConvertError::Graft { base: base.name().to_string(), donor: file.name().to_string(), reason };
    let (donor_trunk, layers) = layers_of(&file)?;
    if layers == 0 {
        return Err(wrong(format!("the donor has no MTP head ({NEXTN_LAYERS} is absent or 0)")));
    }
    for key in SCHEMA.iter().map(|k| format!("{ARCHITECTURE}.{k}")) {
        let (ours, theirs) = (base.metadata().get(&key), file.metadata().get(&key));
        // A per-layer array on one side says the same as a number on the other, or it is not one of this family.
        if ours != theirs && !matches!((ours, theirs), (Some(Value::Array(_)), _) | (_, Some(Value::Array(_)))) {
            let say = |v: Option<&Value>| v.map_or("nothing".to_string(), Value::describe);
            return Err(wrong(format!("'{key}' is {} in the one and {} in the other", say(ours), say(theirs))));
        }
    }
    let tokens = "tokenizer.ggml.tokens";
    if base.metadata().get(tokens) != file.metadata().get(tokens) {
        return Err(wrong("they have different vocabularies".to_string()));
    }
    let mut head = Head { layers, outputs: Vec::new(), reports: Vec::new(), notes: Vec::new(), source: None };
    let mut rules: Vec<Rule> = Vec::new();
    for m in 0..layers {
        let mut of_layer = names::layer(config, Mixer::Attention);
        if m == 0 {
            of_layer.extend(names::mtp_extra(config));
        }
        for rule in &mut of_layer {
            rule.gguf = format!("blk.{}.{}", donor_trunk + m, rule.gguf);
        }
        rules.append(&mut of_layer);
    }
    let squeeze = |dims: &[u64]| dims.iter().copied().filter(|d| *d != 1).collect::<Vec<_>>();
    for t in file.tensors() {
        let Some(layer) = names::layer_of(&t.name).filter(|l| *l >= donor_trunk) else { continue };
        let Some(rule) = rules.iter().find(|r| r.gguf == t.name) else {
            return Err(wrong(format!("no rule for the donor's tensor '{}'", t.name)));
        };
        if squeeze(&rule.dims) != squeeze(&t.dims) {
            return Err(wrong(format!("'{}': expected the shape {:?}, found {:?}", t.name, rule.dims, t.dims)));
        }
        let rest = t.name.splitn(3, '.').nth(2).unwrap_or_default();
        let decl =
            TensorDecl { name: format!("blk.{}.{rest}", trunk + layer - donor_trunk), dims: t.dims.clone(), ty: t.ty };
        head.reports.push(TensorReport {
            name: decl.name.clone(),
            dims: t.dims.clone(),
            ty: t.ty.name().to_string(),
            bytes: t.size,
            part: folder::part_name(Part::Mtp),
            source: t.name.clone(),
            done: "copied".to_string(),
            remark: None,
        });
        head.outputs.push(Output { decl, content: Content::Bytes(file.data(t)) });
    }
    let there = |r: &&Rule| !r.optional && file.tensor(&r.gguf).is_none();
    let missing: Vec<String> = rules.iter().filter(there).map(|r| r.gguf.clone()).collect();
    if !missing.is_empty() {
        return Err(ConvertError::MissingTensors { source_name: file.name().to_string(), names: missing });
    }
    Ok(head)
}

/// Opens a GGUF and checks that it is a text model of this family.
fn open_text_model(path: &Path) -> Result<GgufFile, ConvertError> {
    let file = GgufFile::open(path)?;
    let architecture = file.metadata().str_opt("general.architecture")?.unwrap_or("nothing");
    if architecture != ARCHITECTURE {
        return Err(ConvertError::Refused {
            file: file.name().to_string(),
            reason: format!("general.architecture: expected '{ARCHITECTURE}', found '{architecture}'"),
        });
    }
    Ok(file)
}

/// Trunk and MTP layers of a file.
fn layers_of(file: &GgufFile) -> Result<(u64, u64), ConvertError> {
    let blocks = file.metadata().u64(BLOCK_COUNT)?;
    let head = file.metadata().u64_opt(NEXTN_LAYERS)?.unwrap_or(0);
    match blocks.checked_sub(head) {
        Some(trunk) if trunk > 0 => Ok((trunk, head)),
        _ => Err(ConvertError::Refused {
            file: file.name().to_string(),
            reason: format!("{NEXTN_LAYERS} is {head}, of {blocks} layers in all"),
        }),
    }
}

/// The tensors that stay, as they are.
fn carried(file: &GgufFile, stays: impl Fn(&str) -> bool) -> Vec<Output> {
    file.tensors()
        .iter()
        .filter(|t| stays(&t.name))
        .map(|t| Output {
            decl: TensorDecl { name: t.name.clone(), dims: t.dims.clone(), ty: t.ty },
            content: Content::Bytes(file.data(t)),
        })
        .collect()
}

/// Sets the layer counts and brings per-layer arrays to the new length; says what was changed.
fn change_layers(keys: &mut Metadata, from: u64, to: u64, trunk: &[Mixer]) -> Result<Vec<String>, ConvertError> {
    let mut changed = vec![format!("{BLOCK_COUNT}: {from} to {to}")];
    let count = |old: Option<&Value>, n: u64| match old {
        // The width the file has.
        Some(Value::U64(_)) => Value::U64(n),
        Some(Value::I32(_)) => Value::I32(n as i32),
        Some(Value::I64(_)) => Value::I64(n as i64),
        _ => Value::U32(n as u32),
    };
    let blocks = count(keys.get(BLOCK_COUNT), to);
    keys.set(BLOCK_COUNT, blocks);
    if to > from {
        let head = count(keys.get(NEXTN_LAYERS), to - from);
        keys.set(NEXTN_LAYERS, head);
        changed.push(format!("{NEXTN_LAYERS}: {}", to - from));
    } else {
        keys.remove(NEXTN_LAYERS);
        changed.push(format!("{NEXTN_LAYERS}: removed"));
    }
    let per_layer: Vec<String> = keys
        .iter()
        .filter(|(key, value)| {
            key.starts_with(ARCHITECTURE) && matches!(value, Value::Array(a) if a.len() as u64 == from)
        })
        // Four numbers whatever the number of layers.
        .filter(|(key, _)| !key.ends_with("rope.dimension_sections"))
        .map(|(key, _)| key.to_string())
        .collect();
    // An MTP layer is like the last attention layer of the trunk.
    let like = trunk.iter().rposition(|m| *m == Mixer::Attention).unwrap_or(trunk.len().saturating_sub(1));
    for key in per_layer {
        let Some(Value::Array(mut array)) = keys.get(&key).cloned() else { continue };
        resize(&mut array, to as usize, like);
        keys.set(key.as_str(), Value::Array(array));
        changed.push(format!("{key}: {from} to {to} entries"));
    }
    Ok(changed)
}

/// Sets the size label to what it is with these tensors; says what was changed. A label that was not counted from the
/// tensors (`35B-A3B`) is a name, and stays.
fn change_size_label(keys: &mut Metadata, base: &GgufFile, outputs: &[Output]) -> Option<String> {
    let old = size_label(base.tensors().iter().map(|t| (t.name.as_str(), t.dims.as_slice())));
    let new = size_label(outputs.iter().map(|o| (o.decl.name.as_str(), o.decl.dims.as_slice())));
    if new == old || keys.get(SIZE_LABEL) != Some(&Value::String(old.clone())) {
        return None;
    }
    let change = format!("{SIZE_LABEL}: {old} to {new}");
    keys.set(SIZE_LABEL, Value::String(new));
    Some(change)
}

/// Cuts an array, or lengthens it with copies of entry `like`.
fn resize(array: &mut Array, len: usize, like: usize) {
    fn of<T: Clone>(v: &mut Vec<T>, len: usize, like: usize) {
        match v.get(like).cloned() {
            Some(value) => v.resize(len, value),
            None => v.truncate(len),
        }
    }
    match array {
        Array::U8(v) => of(v, len, like),
        Array::I8(v) => of(v, len, like),
        Array::U16(v) => of(v, len, like),
        Array::I16(v) => of(v, len, like),
        Array::U32(v) => of(v, len, like),
        Array::I32(v) => of(v, len, like),
        Array::F32(v) => of(v, len, like),
        Array::Bool(v) => of(v, len, like),
        Array::String(v) => of(v, len, like),
        Array::Array(v) => of(v, len, like),
        Array::U64(v) => of(v, len, like),
        Array::I64(v) => of(v, len, like),
        Array::F64(v) => of(v, len, like),
    }
}

/// Hashes every carried tensor in both files; refuses when one differs.
fn prove(base: &GgufFile, written: &GgufFile, stays: impl Fn(&str) -> bool) -> Result<GraftReport, ConvertError> {
    let kept: Vec<_> = base.tensors().iter().filter(|t| stays(&t.name)).collect();
    let hashes: Vec<_> = kept
        .par_iter()
        .map(|t| {
            let theirs = written.tensor(&t.name).filter(|w| w.dims == t.dims && w.ty == t.ty);
            let ours: [u8; 32] = Sha256::digest(base.data(t)).into();
            (ours, theirs.map(|w| <[u8; 32]>::from(Sha256::digest(written.data(w)))))
        })
        .collect();
    let mut all = Sha256::new();
    let mut bytes = 0;
    for (t, (ours, theirs)) in kept.iter().zip(&hashes) {
        if theirs.as_ref() != Some(ours) {
            return Err(ConvertError::Graft {
                base: base.name().to_string(),
                donor: written.name().to_string(),
                reason: format!("tensor '{}' was not carried over byte for byte", t.name),
            });
        }
        all.update(t.name.as_bytes());
        all.update(ours);
        bytes += t.size;
    }
    Ok(GraftReport {
        files: Vec::new(),
        added: Vec::new(),
        dropped: Vec::new(),
        carried: kept.len(),
        carried_bytes: bytes,
        carried_hash: all.finalize().iter().map(|b| format!("{b:02x}")).collect(),
        changed_keys: Vec::new(),
        notes: Vec::new(),
        verification: None,
    })
}
