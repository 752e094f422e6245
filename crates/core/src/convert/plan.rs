//! Which tensors a GGUF gets from a checkpoint: every rule of [`super::names`] matched with the tensors that are there,
//! and every tensor accounted for.

use super::ConvertError;
use super::config::{HfConfig, Mixer};
use super::names::{self, Part, Rule};
use super::recipe::Pattern;
use super::transform::{Elementwise, Float, Planned, RowMap, SourceTensor};
use crate::checkpoint::{Checkpoint, Dtype, StTensor};
use std::collections::HashSet;

/// What a plan may leave out or take for granted.
#[derive(Clone, Debug, Default)]
pub struct PlanOptions {
    /// Leaves the MTP head out.
    pub no_mtp: bool,
    /// Checkpoint tensors to leave out although no rule is known for them.
    pub skip: Vec<Pattern>,
    /// Does not look whether the norms carry the +1 already.
    pub assume_zero_centred_norms: bool,
}

/// Why a tensor stays out that a pattern of [`PlanOptions::skip`] matches.
pub const AS_ASKED: &str = "left out as asked";

/// A tensor of the checkpoint that does not go into the GGUF, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct LeftOut {
    /// Its name in the checkpoint.
    pub name: String,
    /// Why it stays out.
    pub why: &'static str,
}

/// The tensors of a GGUF to be.
#[derive(Clone, Debug)]
pub struct Plan {
    /// In the order of the file.
    pub tensors: Vec<Planned>,
    /// MTP layers among them.
    pub mtp_layers: u64,
    /// What stays out.
    pub left_out: Vec<LeftOut>,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

/// Opens the sources of a planned tensor.
///
/// # Errors
/// When a source is not a plain float tensor.
pub fn sources(checkpoint: &Checkpoint, planned: &Planned) -> Result<Vec<SourceTensor>, ConvertError> {
    planned
        .sources
        .iter()
        .map(|name| {
            let missing = || ConvertError::MissingTensors { source_name: label(checkpoint), names: vec![name.clone()] };
            let tensor = checkpoint.tensor(name).ok_or_else(missing)?;
            Ok(SourceTensor { float: float_of(checkpoint, tensor)?, data: checkpoint.data(tensor)? })
        })
        .collect()
}

/// The plain float type of a tensor.
fn float_of(checkpoint: &Checkpoint, tensor: &StTensor) -> Result<Float, ConvertError> {
    match tensor.dtype {
        Dtype::F32 => Ok(Float::F32),
        Dtype::F16 => Ok(Float::F16),
        Dtype::BF16 => Ok(Float::BF16),
        other => Err(ConvertError::Dtype {
            source_name: label(checkpoint),
            tensor: tensor.name.clone(),
            found: other.name().to_string(),
        }),
    }
}

/// The name of a checkpoint in messages.
pub fn label(checkpoint: &Checkpoint) -> String {
    checkpoint.path().display().to_string()
}

/// Plans the text model: trunk and MTP head.
///
/// # Errors
/// When tensors are missing, unknown, of another shape or type, when the head is promised and not there, or when the
/// norms carry the +1 already.
pub fn text_model(checkpoint: &Checkpoint, config: &HfConfig, options: &PlanOptions) -> Result<Plan, ConvertError> {
    let mut matcher = Matcher::new(checkpoint);
    let mut tensors = Vec::new();
    let prefix = names::TRUNK_PREFIXES
        .iter()
        .find(|p| checkpoint.tensor(&format!("{p}embed_tokens.weight")).is_some())
        .unwrap_or(&names::TRUNK_PREFIXES[0]);
    let mut globals = Vec::new();
    for rule in names::trunk_globals(config) {
        let prefixes: &[&str] = if rule.gguf == "output.weight" { &names::HEAD_PREFIXES } else { &[prefix] };
        matcher.take(prefixes, &rule, rule.gguf.clone(), Part::Trunk, config.experts, &mut globals)?;
    }
    for (i, mixer) in config.layers.iter().enumerate() {
        let layer_prefix = format!("{prefix}layers.{i}.");
        for rule in names::layer(config, *mixer) {
            let name = format!("blk.{i}.{}", rule.gguf);
            matcher.take(&[&layer_prefix], &rule, name, Part::Trunk, config.experts, &mut tensors)?;
        }
    }
    let mut notes = Vec::new();
    let mut mtp_layers = 0;
    if !options.no_mtp {
        mtp_layers = mtp_layers_of(checkpoint, config.mtp_layers, &mut notes)?;
        let trunk = config.layers.len() as u64;
        matcher.take_mtp(config, trunk, mtp_layers, &mut tensors)?;
    }
    // Embedding first, then the layers, then what comes after them.
    globals.sort_by_key(|t: &Planned| t.name != "token_embd.weight");
    let rest = if globals.is_empty() { Vec::new() } else { globals.split_off(1) };
    globals.append(&mut tensors);
    globals.extend(rest);
    let tensors = globals;

    matcher.refuse_missing()?;
    if !options.assume_zero_centred_norms {
        check_norms(checkpoint, &tensors, Part::Trunk)?;
        check_norms(checkpoint, &tensors, Part::Mtp)?;
    }
    let left_out = matcher.account_for_rest(Part::Vision, "belongs to the vision encoder", options)?;
    Ok(Plan { tensors, mtp_layers, left_out, notes })
}

/// Plans the vision encoder.
///
/// # Errors
/// When the folder has none, or its tensors are missing, unknown or of another shape or type.
pub fn vision(checkpoint: &Checkpoint, config: &HfConfig, options: &PlanOptions) -> Result<Plan, ConvertError> {
    let no_vision =
        |reason: &str| ConvertError::NoVision { source_name: label(checkpoint), reason: reason.to_string() };
    let vision = config.vision.as_ref().ok_or_else(|| no_vision("config.json has no vision_config"))?;
    if vision.temporal_patch != 2 {
        return Err(no_vision("vision_config.temporal_patch_size is not 2, the only one the file format knows"));
    }
    let mut matcher = Matcher::new(checkpoint);
    let mut tensors = Vec::new();
    for rule in names::vision(vision) {
        matcher.take(&names::VISION_PREFIXES, &rule, rule.gguf.clone(), Part::Vision, 0, &mut tensors)?;
    }
    if tensors.is_empty() {
        return Err(no_vision("the checkpoint has no 'visual.*' tensor"));
    }
    matcher.refuse_missing()?;
    // Text tensors are the business of the other file.
    let mut left_out = Vec::new();
    let mut unknown = Vec::new();
    for t in checkpoint.tensors().filter(|t| !matcher.used.contains(t.name.as_str())) {
        match names::part_of_hf(&t.name) {
            Part::Vision if options.skip.iter().any(|p| p.matches(&t.name)) => {
                left_out.push(LeftOut { name: t.name.clone(), why: AS_ASKED });
            }
            Part::Vision => unknown.push(t.name.clone()),
            _ => left_out.push(LeftOut { name: t.name.clone(), why: "belongs to the text model" }),
        }
    }
    if !unknown.is_empty() {
        return Err(ConvertError::UnknownTensors { source_name: label(checkpoint), names: unknown });
    }
    Ok(Plan { tensors, mtp_layers: 0, left_out, notes: Vec::new() })
}

/// Plans the MTP head alone, as layers `trunk ..` of a GGUF. `config` gives the geometry; the checkpoint may be the
/// shards that hold the head and nothing else.
///
/// # Errors
/// As [`text_model`]; also when there is no head.
pub fn mtp_head(
    checkpoint: &Checkpoint,
    config: &HfConfig,
    trunk: u64,
    options: &PlanOptions,
) -> Result<Plan, ConvertError> {
    let mut notes = Vec::new();
    let absent: Vec<String> = checkpoint
        .absent_tensors()
        .filter(|(name, _)| names::part_of_hf(name) == Part::Mtp)
        .map(|(name, shard)| format!("{name} (in {shard}, which is not there)"))
        .collect();
    if !absent.is_empty() {
        return Err(ConvertError::MissingTensors { source_name: label(checkpoint), names: absent });
    }
    let mtp_layers = mtp_layers_of(checkpoint, config.mtp_layers, &mut notes)?;
    if mtp_layers == 0 {
        let names = vec!["mtp.* (all of them)".to_string()];
        return Err(ConvertError::MissingTensors { source_name: label(checkpoint), names });
    }
    let mut matcher = Matcher::new(checkpoint);
    let mut tensors = Vec::new();
    matcher.take_mtp(config, trunk, mtp_layers, &mut tensors)?;
    matcher.refuse_missing()?;
    if !options.assume_zero_centred_norms {
        check_norms(checkpoint, &tensors, Part::Mtp)?;
    }
    let unknown: Vec<String> = matcher
        .unused()
        .filter(|name| names::part_of_hf(name) == Part::Mtp && !options.skip.iter().any(|p| p.matches(name)))
        .collect();
    if !unknown.is_empty() {
        return Err(ConvertError::UnknownTensors { source_name: label(checkpoint), names: unknown });
    }
    Ok(Plan { tensors, mtp_layers, left_out: Vec::new(), notes })
}

/// How many MTP layers the checkpoint has, checked against what the config promises.
fn mtp_layers_of(checkpoint: &Checkpoint, promised: Option<u64>, notes: &mut Vec<String>) -> Result<u64, ConvertError> {
    let mut found = 0;
    let mut any = false;
    for t in checkpoint.tensors() {
        if let Some(rest) = names::MTP_PREFIXES.iter().find_map(|p| t.name.strip_prefix(p)) {
            any = true;
            let layer = rest.strip_prefix("layers.").and_then(|r| r.split('.').next()?.parse::<u64>().ok());
            // The largest number of layers any config may promise.
            found = found.max(layer.filter(|n| *n < 64).map_or(0, |n| n + 1));
        }
    }
    match promised {
        Some(promised) if promised > 0 && !any => {
            Err(ConvertError::PromisedHeadMissing { source_name: label(checkpoint), promised })
        }
        Some(promised) if promised > 0 && promised != found => {
            Err(ConvertError::MtpLayers { source_name: label(checkpoint), promised, found })
        }
        Some(0) | None if any => {
            let layers = found.max(1);
            notes.push(format!(
                "config.json does not promise an MTP head, but the checkpoint has 'mtp.*' tensors: kept {layers} layer{}",
                if layers == 1 { "" } else { "s" }
            ));
            Ok(layers)
        }
        _ => Ok(found),
    }
}

/// Matches rules with the tensors of a checkpoint and remembers what was used and what was missed.
struct Matcher<'a> {
    checkpoint: &'a Checkpoint,
    used: HashSet<String>,
    missing: Vec<String>,
}

impl<'a> Matcher<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        Matcher { checkpoint, used: HashSet::new(), missing: Vec::new() }
    }

    /// Finds the tensor or tensors of a rule and adds what they become.
    fn take(
        &mut self,
        prefixes: &[&str],
        rule: &Rule,
        gguf_name: String,
        part: Part,
        experts: u64,
        out: &mut Vec<Planned>,
    ) -> Result<(), ConvertError> {
        let mut planned =
            Planned { name: gguf_name, dims: rule.dims.clone(), sources: Vec::new(), transform: rule.transform, part };
        for prefix in prefixes {
            for hf in &rule.hf {
                let name = format!("{prefix}{hf}");
                if self.checkpoint.tensor(&name).is_some() {
                    self.check(&name, &rule.shape)?;
                    planned.sources.push(name);
                    out.push(planned);
                    return Ok(());
                }
            }
        }
        if let Some(pattern) = &rule.per_expert {
            let per_expert = |e: u64| format!("{}{}", prefixes[0], pattern.replace("{}", &e.to_string()));
            if self.checkpoint.tensor(&per_expert(0)).is_some() {
                for e in 0..experts {
                    let name = per_expert(e);
                    if self.checkpoint.tensor(&name).is_none() {
                        self.missing.push(name);
                        continue;
                    }
                    self.check(&name, &[rule.dims[1], rule.dims[0]])?;
                    planned.sources.push(name);
                }
                planned.transform.rows = RowMap::Stacked { rows: rule.dims[1] };
                out.push(planned);
                return Ok(());
            }
        }
        if !rule.optional {
            let first = format!("{}{}", prefixes[0], rule.hf[0]);
            let absent = self.checkpoint.absent_tensors().find(|(name, _)| *name == first);
            self.missing.push(match absent {
                Some((_, shard)) => format!("{first} (in {shard}, which is not there)"),
                None => first,
            });
        }
        Ok(())
    }

    /// The MTP layers, as layers `trunk ..`.
    fn take_mtp(
        &mut self,
        config: &HfConfig,
        trunk: u64,
        layers: u64,
        out: &mut Vec<Planned>,
    ) -> Result<(), ConvertError> {
        let has_prefix = |p: &&&str| self.checkpoint.tensors().any(|t| t.name.starts_with(**p));
        let prefix = *names::MTP_PREFIXES.iter().find(has_prefix).unwrap_or(&names::MTP_PREFIXES[0]);
        for m in 0..layers {
            let layer_prefix = format!("{prefix}layers.{m}.");
            for rule in names::layer(config, Mixer::Attention) {
                let name = format!("blk.{}.{}", trunk + m, rule.gguf);
                self.take(&[&layer_prefix], &rule, name, Part::Mtp, config.experts, out)?;
            }
        }
        if layers > 0 {
            for rule in names::mtp_extra(config) {
                let name = format!("blk.{trunk}.{}", rule.gguf);
                self.take(&[prefix], &rule, name, Part::Mtp, config.experts, out)?;
            }
        }
        Ok(())
    }

    /// Checks type and shape of a tensor (sizes of 1 do not count) and marks it used.
    fn check(&mut self, name: &str, expected: &[u64]) -> Result<(), ConvertError> {
        let Some(tensor) = self.checkpoint.tensor(name) else { return Ok(()) };
        float_of(self.checkpoint, tensor)?;
        let squeeze = |shape: &[u64]| shape.iter().copied().filter(|n| *n != 1).collect::<Vec<_>>();
        let found: Vec<u64> = tensor.shape.iter().map(|n| *n as u64).collect();
        if squeeze(&found) != squeeze(expected) {
            return Err(ConvertError::Shape {
                source_name: label(self.checkpoint),
                tensor: name.to_string(),
                expected: expected.to_vec(),
                found,
            });
        }
        self.used.insert(name.to_string());
        Ok(())
    }

    fn refuse_missing(&mut self) -> Result<(), ConvertError> {
        if self.missing.is_empty() {
            return Ok(());
        }
        let mut names = std::mem::take(&mut self.missing);
        // A fused tensor is the source of two.
        names.dedup();
        Err(ConvertError::MissingTensors { source_name: label(self.checkpoint), names })
    }

    fn unused(&self) -> impl Iterator<Item = String> {
        self.checkpoint.tensors().map(|t| t.name.clone()).filter(|name| !self.used.contains(name))
    }

    /// Says why every unused tensor stays out; refuses when one has no reason.
    fn account_for_rest(
        &self,
        elsewhere: Part,
        why_elsewhere: &'static str,
        options: &PlanOptions,
    ) -> Result<Vec<LeftOut>, ConvertError> {
        let mut left_out = Vec::new();
        let mut unknown = Vec::new();
        for name in self.unused() {
            let part = names::part_of_hf(&name);
            let why = if part == elsewhere {
                why_elsewhere
            } else if part == Part::Mtp && options.no_mtp {
                "MTP head, left out as asked"
            } else if names::COMPUTED.iter().any(|c| name.ends_with(c)) {
                "computed, not learned"
            } else if options.skip.iter().any(|p| p.matches(&name)) {
                AS_ASKED
            } else {
                unknown.push(name);
                continue;
            };
            left_out.push(LeftOut { name, why });
        }
        if unknown.is_empty() {
            Ok(left_out)
        } else {
            Err(ConvertError::UnknownTensors { source_name: label(self.checkpoint), names: unknown })
        }
    }
}

/// Share of negative weights below which norms are taken for converted ones, together with a mean above one half.
/// Zero-centred weights lie around 0, so a good part of them is negative; 1 + w is positive throughout.
const NEGATIVE_SHARE: f64 = 0.001;

/// Refuses norms that carry the +1 already.
fn check_norms(checkpoint: &Checkpoint, tensors: &[Planned], part: Part) -> Result<(), ConvertError> {
    let (mut count, mut negative, mut sum) = (0u64, 0u64, 0f64);
    let mut examples = Vec::new();
    for t in tensors.iter().filter(|t| t.part == part && t.transform.elementwise == Elementwise::PlusOne) {
        let sources = sources(checkpoint, t)?;
        let mut values = vec![0.0; t.cols()];
        sources[0].float.decode(&sources[0].data, &mut values);
        let tensor_sum: f64 = values.iter().map(|v| f64::from(*v)).sum();
        count += values.len() as u64;
        negative += values.iter().filter(|v| **v < 0.0).count() as u64;
        sum += tensor_sum;
        if examples.len() < 3 {
            let low = values.iter().fold(f32::INFINITY, |a, b| a.min(*b));
            examples.push(format!(
                "'{}' has mean {:.3} and minimum {low:.3}",
                t.sources[0],
                tensor_sum / t.cols() as f64
            ));
        }
    }
    if count > 0 && sum / count as f64 > 0.5 && negative as f64 <= NEGATIVE_SHARE * count as f64 {
        return Err(ConvertError::NormsNotZeroCentred {
            source_name: label(checkpoint),
            part: if part == Part::Mtp { "MTP" } else { "trunk" },
            evidence: format!(
                "of {count} norm weights {negative} are negative and the mean is {:.3}, where zero-centred ones lie around 0; {}",
                sum / count as f64,
                examples.join("; ")
            ),
        });
    }
    Ok(())
}
