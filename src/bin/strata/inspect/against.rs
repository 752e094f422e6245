//! `--against`: what one file has and another lacks, in the words of the model. Reads headers only.

use super::print;
use super::schema::{self, Expected, Held};
use crate::cli::wording::{agreeing, counted};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fmt::Write;
use strata_core::checkpoint::Checkpoint;
use strata_core::convert::names::{self, Part};
use strata_core::convert::{HfConfig, Mixer};
use strata_core::gguf::{GgufFile, TensorInfo, Value};
use strata_core::model::{ARCHITECTURE, ModelConfig};

/// The differences between a file and what it is held against.
#[derive(Serialize, Default)]
pub struct Comparison {
    /// The file.
    pub file: String,
    /// What it is held against.
    pub against: String,
    /// Findings in words, the gravest first.
    pub findings: Vec<String>,
    /// Whether the file lacks something the model needs.
    pub lacks_something: bool,
    /// Tensors only the other side has.
    pub missing: Vec<String>,
    /// Tensors only the file has.
    pub extra: Vec<String>,
    /// The same tensor under another name: in the file, on the other side.
    pub renamed: Vec<(String, String)>,
    /// Tensors of another shape.
    pub shapes: Vec<String>,
    /// How many tensors changed from one type to another: other side, file, tensors.
    pub types: Vec<(String, String, usize)>,
    /// Metadata keys only the other side has.
    pub metadata_missing: Vec<String>,
    /// Metadata keys only the file has.
    pub metadata_extra: Vec<String>,
    /// Metadata keys with other values: key, other side, file.
    pub metadata_different: Vec<(String, String, String)>,
}

/// What a GGUF file holds.
fn kind(file: &GgufFile) -> &'static str {
    match file.metadata().str("general.architecture") {
        Ok("clip") => "a vision encoder",
        _ => "a text model",
    }
}

/// Compares two GGUF files. `Err` in words when they are of different kinds.
pub fn two_ggufs(a: &GgufFile, b: &GgufFile) -> Result<Comparison, String> {
    if kind(a) != kind(b) {
        return Err(format!(
            "different kinds of file cannot be compared: {} is {}, {} is {}",
            a.name(),
            kind(a),
            b.name(),
            kind(b)
        ));
    }
    let mut c = Comparison { file: a.name().into(), against: b.name().into(), ..Default::default() };
    let mut types = BTreeMap::new();
    for t in b.tensors() {
        match a.tensor(&t.name) {
            Some(own) => {
                if schema::trimmed(&own.dims) != schema::trimmed(&t.dims) {
                    c.shapes.push(format!("{}: {} there, {} here", t.name, t.shape(), own.shape()));
                }
                *types.entry((t.ty.name().to_string(), own.ty.name().to_string())).or_insert(0) += 1;
            }
            None if same_in_other_form(a, t) => {
                c.findings
                    .push(format!("{}: gate and up experts are fused on one side and split on the other", t.name));
            }
            None => c.missing.push(t.name.clone()),
        }
    }
    let only_here = |t: &&TensorInfo| b.tensor(&t.name).is_none() && !same_in_other_form(b, t);
    c.extra = a.tensors().iter().filter(only_here).map(|t| t.name.clone()).collect();
    find_renamed(&mut c, a, b);
    c.types = types.into_iter().filter(|((x, y), _)| x != y).map(|((x, y), n)| (x, y, n)).collect();
    compare_metadata(&mut c, a, b);

    let needed = needed_names(b);
    let mtp_blocks: HashSet<u64> =
        b.tensors().iter().filter(|t| t.name.contains(".nextn.")).filter_map(|t| names::layer_of(&t.name)).collect();
    let (mut mtp, mut trunk) = (0, 0);
    for name in c.missing.iter().chain(c.renamed.iter().map(|(_, there)| there)) {
        if names::layer_of(name).is_some_and(|l| mtp_blocks.contains(&l)) {
            mtp += 1;
        } else if needed.as_ref().is_none_or(|n| n.contains(name)) {
            trunk += 1;
        }
    }
    if mtp > 0 {
        let all = b.tensors().iter().filter(|t| names::layer_of(&t.name).is_some_and(|l| mtp_blocks.contains(&l)));
        let (all, other) = (all.count(), b.name());
        let restore = format!("restore it with `strata convert {} --mtp-from {other} -o WITH_HEAD.gguf`", a.name());
        c.findings.insert(0, mtp_finding(&format!("{other} has {all} tensors of it"), mtp, all, &restore));
    }
    finish(&mut c, trunk, mtp);
    Ok(c)
}

/// Compares a GGUF with the checkpoint it may come from. `Err` in words when the two cannot be compared.
pub fn with_checkpoint(a: &GgufFile, path: &str, b: &Checkpoint) -> Result<Comparison, String> {
    let mut c = Comparison { file: a.name().into(), against: path.into(), ..Default::default() };
    let architecture = a.metadata().str("general.architecture").unwrap_or("none");
    let is_encoder = architecture == "clip";
    if architecture != ARCHITECTURE && !is_encoder {
        return Err(format!(
            "{}: the architecture is '{architecture}'; names of checkpoints are known for '{ARCHITECTURE}' only",
            a.name()
        ));
    }
    let own = if is_encoder { None } else { Some(ModelConfig::from_gguf(a).map_err(|e| e.to_string())?) };
    let config = match (b.config(), &own) {
        (Some(json), _) => {
            let name = b.folder().join("config.json").display().to_string();
            HfConfig::from_json(&name, json).map_err(|e| e.to_string())?
        }
        (None, Some(own)) => schema::rules_config(own, a.tensor("output.weight").is_none()),
        (None, None) => {
            return Err(format!("{path}: comparing a vision encoder needs config.json beside the checkpoint"));
        }
    };
    let trunk_layers = config.layers.len() as u64;
    let absent: HashMap<&str, &str> = b.absent_tensors().collect();
    let all_names = || b.tensors().map(|t| t.name.as_str()).chain(absent.keys().copied());
    let mtp_names: Vec<&str> = all_names().filter(|n| names::part_of_hf(n) == Part::Mtp).collect();

    let mut expected = Vec::new();
    if is_encoder {
        expected = schema::vision(&config);
    } else {
        expected.extend(schema::trunk(&config));
        let head_here = own.as_ref().is_some_and(|o| o.mtp_layers > 0);
        if !mtp_names.is_empty() || head_here {
            expected.extend(schema::mtp(&config, trunk_layers, config.mtp_layers.unwrap_or(1).max(1)));
        }
    }
    let mut types = BTreeMap::new();
    let (mut trunk, mut mtp) = (0, 0);
    let mut known_there = HashSet::new();
    let mut known_here = HashSet::new();
    for e in &expected {
        let there = e
            .hf_names
            .iter()
            .chain(&e.hf_first_expert)
            .find(|n| b.tensor(n).is_some() || absent.contains_key(n.as_str()));
        if let Some(name) = there {
            mark_known(name, e, &mut known_there);
        }
        let held = schema::held(a, e);
        if let Held::AsExpected(t) | Held::Fused(t) | Held::WrongShape(t) = &held {
            known_here.insert(t.name.as_str());
        }
        match (there, held) {
            (Some(name), Held::Missing) => {
                c.missing.push(format!("{} (there: {name})", e.name));
                if e.part == Part::Mtp { mtp += 1 } else { trunk += 1 }
            }
            (None, Held::Missing) if !e.optional => {
                c.missing.push(format!("{} (on neither side)", e.name));
                if e.part == Part::Mtp { mtp += 1 } else { trunk += 1 }
            }
            (_, Held::WrongShape(t)) => c.shapes.push(format!("{}: {:?} expected, {:?} here", t.name, e.dims, t.dims)),
            (None, Held::AsExpected(t) | Held::Fused(t)) => {
                c.extra.push(format!("{} (no source in the checkpoint)", t.name))
            }
            (Some(name), Held::AsExpected(t) | Held::Fused(t)) => {
                if let Some(source) = b.tensor(name) {
                    *types.entry((source.dtype.name().to_string(), t.ty.name().to_string())).or_insert(0) += 1;
                    if let Some(found) = wrong_source_shape(e, name, &source.shape) {
                        c.shapes.push(found);
                    }
                }
            }
            (None, Held::Missing) => {}
        }
    }
    c.types = types.into_iter().map(|((x, y), n)| (x, y, n)).collect();
    c.extra.extend(a.tensors().iter().filter(|t| !known_here.contains(t.name.as_str())).map(|t| t.name.clone()));
    let wanted = |part: Part| if is_encoder { part == Part::Vision } else { part != Part::Vision };
    let unknown: BTreeSet<&str> = all_names()
        .filter(|n| wanted(names::part_of_hf(n)) && !known_there.contains(*n))
        .filter(|n| !names::COMPUTED.iter().any(|end| n.ends_with(end)))
        .collect();
    if !unknown.is_empty() {
        let first = unknown.iter().next().unwrap_or(&"");
        c.findings.push(format!(
            "{} of the checkpoint {} no place in a GGUF, e.g. {first}",
            counted(unknown.len(), "tensor"),
            agreeing(unknown.len(), "has", "have")
        ));
    }
    let vision = all_names().filter(|n| names::part_of_hf(n) == Part::Vision).count();
    if vision > 0 && !is_encoder {
        c.findings.push(format!(
            "the checkpoint's {} of the vision encoder {} in an mmproj file of its own",
            counted(vision, "tensor"),
            agreeing(vision, "belongs", "belong")
        ));
    }
    if mtp > 0 {
        let holding: BTreeSet<String> = mtp_names
            .iter()
            .filter_map(|n| absent.get(n).map(|s| s.to_string()).or_else(|| shard_name(b, n)))
            .collect();
        let shards = holding.into_iter().collect::<Vec<_>>().join(", ");
        let restore = format!(
            "restore it with `strata convert {} --mtp-from {path} -o WITH_HEAD.gguf` (the tensors are in {shards})",
            a.name()
        );
        let there = format!("the checkpoint has {} `mtp.*` tensors", mtp_names.len());
        let all = expected.iter().filter(|e| e.part == Part::Mtp && !e.optional).count();
        c.findings.insert(0, mtp_finding(&there, mtp, all, &restore));
    }
    if config.layers.iter().all(|l| *l == Mixer::Attention) {
        c.findings.push("the configuration has no delta net layers, which is unusual for this family".into());
    }
    finish(&mut c, trunk, mtp);
    Ok(c)
}

/// Compares two checkpoints by name, shape and type.
pub fn two_checkpoints(path_a: &str, a: &Checkpoint, path_b: &str, b: &Checkpoint) -> Comparison {
    let mut c = Comparison { file: path_a.into(), against: path_b.into(), ..Default::default() };
    let absent_here: HashSet<&str> = a.absent_tensors().map(|(n, _)| n).collect();
    let absent_there: HashSet<&str> = b.absent_tensors().map(|(n, _)| n).collect();
    let mut types = BTreeMap::new();
    for t in b.tensors() {
        match a.tensor(&t.name) {
            Some(own) => {
                if own.shape != t.shape {
                    c.shapes.push(format!("{}: {} there, {} here", t.name, t.shape_text(), own.shape_text()));
                }
                *types.entry((t.dtype.name().to_string(), own.dtype.name().to_string())).or_insert(0) += 1;
            }
            None if absent_here.contains(t.name.as_str()) => {}
            None => c.missing.push(t.name.clone()),
        }
    }
    let only_here = |name: &str| b.tensor(name).is_none() && !absent_there.contains(name);
    c.extra = a.tensors().map(|t| t.name.clone()).filter(|n| only_here(n)).collect();
    c.types = types.into_iter().filter(|((x, y), _)| x != y).map(|((x, y), n)| (x, y, n)).collect();
    let mtp = c.missing.iter().filter(|n| names::part_of_hf(n) == Part::Mtp).count();
    if mtp > 0 {
        c.findings.push(format!(
            "{} {} missing: a conversion of this checkpoint would have no complete MTP head",
            counted(mtp, "`mtp.*` tensor"),
            agreeing(mtp, "is", "are")
        ));
    }
    let rest = c.missing.len() - mtp;
    finish(&mut c, rest, mtp);
    c
}

fn mtp_finding(there: &str, missing: usize, all: usize, restore: &str) -> String {
    if missing >= all {
        format!("the MTP head is missing: {there}, the file has none; {restore}")
    } else {
        format!("the MTP head is incomplete: {missing} of its {all} tensors are missing; {restore}")
    }
}

fn finish(c: &mut Comparison, trunk: usize, mtp: usize) {
    if trunk > 0 {
        let (tensors, are) = (counted(trunk, "tensor"), agreeing(trunk, "is", "are"));
        c.findings.insert(0, format!("{tensors} that the model needs {are} missing"));
    }
    if !c.shapes.is_empty() {
        let n = c.shapes.len();
        c.findings.push(format!("{} {} another shape", counted(n, "tensor"), agreeing(n, "has", "have")));
    }
    c.lacks_something |= trunk > 0 || mtp > 0 || !c.shapes.is_empty();
}

/// Whether `file` holds the experts' gate and up matrices in the other of the two forms that `t` may have.
fn same_in_other_form(file: &GgufFile, t: &TensorInfo) -> bool {
    const FUSED: &str = "ffn_gate_up_exps.weight";
    const SPLIT: [&str; 2] = ["ffn_gate_exps.weight", "ffn_up_exps.weight"];
    if let Some(block) = t.name.strip_suffix(FUSED) {
        return SPLIT.iter().all(|half| file.tensor(&format!("{block}{half}")).is_some());
    }
    SPLIT
        .iter()
        .filter_map(|half| t.name.strip_suffix(half))
        .any(|block| file.tensor(&format!("{block}{FUSED}")).is_some())
}

/// Takes pairs out of missing and extra that can only be each other: same block, same shape, no other candidate.
fn find_renamed(c: &mut Comparison, a: &GgufFile, b: &GgufFile) {
    let key = |t: &TensorInfo| (names::layer_of(&t.name), schema::trimmed(&t.dims).to_vec());
    let group = |list: &[String], file: &GgufFile| {
        let mut groups: HashMap<_, Vec<String>> = HashMap::new();
        for t in list.iter().filter_map(|n| file.tensor(n)) {
            groups.entry(key(t)).or_default().push(t.name.clone());
        }
        groups
    };
    let (missing, extra) = (group(&c.missing, b), group(&c.extra, a));
    for (k, there) in missing {
        if let ([there], Some([here])) = (&there[..], extra.get(&k).map(Vec::as_slice)) {
            c.renamed.push((here.clone(), there.clone()));
        }
    }
    c.renamed.sort();
    c.missing.retain(|n| !c.renamed.iter().any(|(_, there)| there == n));
    c.extra.retain(|n| !c.renamed.iter().any(|(here, _)| here == n));
}

/// Names the trunk of `file` needs; `None` when its architecture is not known.
fn needed_names(file: &GgufFile) -> Option<HashSet<String>> {
    let config = ModelConfig::from_gguf(file).ok()?;
    let rules = schema::rules_config(&config, file.tensor("output.weight").is_none());
    let mut needed: HashSet<String> =
        schema::trunk(&rules).into_iter().filter(|e| !e.optional).map(|e| e.name).collect();
    // The fused form of what the rules call by its halves.
    let fused: Vec<String> = needed
        .iter()
        .filter_map(|n| n.strip_suffix("ffn_gate_exps.weight"))
        .map(|b| format!("{b}ffn_gate_up_exps.weight"))
        .collect();
    needed.extend(fused);
    Some(needed)
}

/// Metadata a model cannot do without.
const NEEDED_KEYS: [&str; 4] =
    ["tokenizer.ggml.model", "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.chat_template"];

fn compare_metadata(c: &mut Comparison, a: &GgufFile, b: &GgufFile) {
    for (key, there) in b.metadata().iter() {
        match a.metadata().get(key) {
            None => c.metadata_missing.push(key.to_string()),
            Some(here) if here != there => {
                c.metadata_different.push((key.to_string(), short(there), short(here)));
            }
            Some(_) => {}
        }
    }
    let here = a.metadata().iter().map(|(k, _)| k);
    c.metadata_extra = here.filter(|k| b.metadata().get(k).is_none()).map(str::to_string).collect();
    for key in NEEDED_KEYS.iter().filter(|k| c.metadata_missing.iter().any(|m| m == *k)) {
        c.findings.push(format!("the metadata key {key} is missing"));
        c.lacks_something = true;
    }
}

fn short(v: &Value) -> String {
    match v {
        Value::Array(a) if a.len() <= 8 => v.to_string(),
        Value::String(s) if s.chars().count() <= 40 => format!("'{}'", s.escape_debug()),
        Value::Array(_) | Value::String(_) => v.describe(),
        v => v.to_string(),
    }
}

fn shard_name(b: &Checkpoint, tensor: &str) -> Option<String> {
    let shard = b.tensor(tensor)?.shard;
    Some(b.shard_path(shard).file_name()?.to_string_lossy().into_owned())
}

/// Marks a tensor of the checkpoint as having a place; of experts kept one by one, all of them.
fn mark_known(name: &str, e: &Expected, known: &mut HashSet<String>) {
    if e.hf_first_expert.iter().any(|first| first == name)
        && let Some((before, after)) = name.split_once(".experts.0.")
    {
        known.extend(
            (0..e.dims.get(2).copied().unwrap_or(0).min(1 << 16)).map(|i| format!("{before}.experts.{i}.{after}")),
        );
    }
    known.insert(name.to_string());
}

/// What is wrong with the shape of a source tensor, if anything. Sizes of 1 do not count; an expert's own tensor has one
/// dimension less.
fn wrong_source_shape(e: &Expected, name: &str, shape: &[usize]) -> Option<String> {
    let squeeze = |s: &mut dyn Iterator<Item = u64>| s.filter(|d| *d != 1).collect::<Vec<_>>();
    let found = squeeze(&mut shape.iter().map(|d| *d as u64));
    let one_expert = e.hf_first_expert.iter().any(|first| first == name);
    let expected = if one_expert {
        squeeze(&mut [e.dims[1], e.dims[0]].into_iter())
    } else {
        squeeze(&mut e.hf_shape.iter().copied())
    };
    (found != expected).then(|| format!("{name}: {expected:?} expected, {found:?} in the checkpoint"))
}

/// Lines of one list shown in the text form.
const SHOWN: usize = 20;

/// The comparison as text.
pub fn text(c: &Comparison) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "{}\n  against {}\n", c.file, c.against);
    let verdict = match c.lacks_something {
        true => "the file lacks something the model needs",
        false => "nothing the model needs is missing",
    };
    let _ = writeln!(out, "  {verdict}\n");
    for f in &c.findings {
        let _ = writeln!(out, "  * {f}");
    }
    let mut list = |title: &str, lines: Vec<String>| {
        if lines.is_empty() {
            return;
        }
        let _ = writeln!(out, "\n  {title}: {}", lines.len());
        for line in lines.iter().take(SHOWN) {
            let _ = writeln!(out, "    {line}");
        }
        if lines.len() > SHOWN {
            let _ = writeln!(out, "    ... and {} more (--json lists all)", lines.len() - SHOWN);
        }
    };
    list("missing tensors", c.missing.clone());
    list("tensors under another name (here <- there)", c.renamed.iter().map(|(h, t)| format!("{h} <- {t}")).collect());
    list("tensors of another shape", c.shapes.clone());
    list("tensors only here", c.extra.clone());
    let rows: Vec<String> = c.types.iter().map(|(t, h, n)| format!("{t} -> {h}: {}", print::tensors(*n))).collect();
    list("types (there -> here)", rows);
    list("missing metadata", c.metadata_missing.clone());
    list("metadata only here", c.metadata_extra.clone());
    let different = c.metadata_different.iter().map(|(k, t, h)| format!("{k}: {t} there, {h} here"));
    list("different metadata", different.collect());
    out
}
