//! Proof that a GGUF holds what its source holds: every element of every tensor against `f(raw)`, never statistics.
//!
//! Stored floats must equal `f(raw)` rounded once to their type, bit for bit. Quantized tensors are decoded and held
//! against bounds that follow from the range of the raw weights, not from the quantizer that wrote them:
//! - no weight may be off by more than one step of a plain range fit of its block (half of that for `Q8_0`, whose
//!   scale is not searched),
//! - the root mean square over the tensor may not exceed [`RMS_SHARE`] of the root mean square step.
//!
//! Tensors are compared one after the other in the order of the source, each by all cores in runs of rows, so memory
//! stays bounded.

use super::folder::{config_of, part_name};
use super::names::{self, Part};
use super::output::{Progress, row_runs};
use super::plan::{self, Plan, PlanOptions};
use super::transform::{Float, Planned, RowMap, SourceTensor};
use super::{ConvertError, metadata};
use crate::checkpoint::Checkpoint;
use crate::gguf::{GgufFile, TensorInfo};
use half::{bf16, f16};
use rayon::prelude::*;
use std::collections::HashSet;
use std::path::Path;
use strata_kernels::format::{TensorType, dequantize};

/// Most the root mean square error may be, in steps. Even rounding to a grid gives 1 / sqrt(12) = 0.29 of a step; the
/// rest is for scales that are themselves rounded.
pub const RMS_SHARE: f64 = 0.40;

/// How a tensor came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Every element is what it should be, exactly.
    Exact,
    /// Quantized, within the bounds of its type.
    WithinBounds,
    /// Elements differ where they must not, or by too much.
    Off,
    /// Not in the file.
    Missing,
    /// In the file, but not made from anything in the source.
    Extra,
    /// Another shape than the source gives.
    WrongShape,
    /// Stored in a type strata cannot decode.
    NotComparable,
}

impl Verdict {
    /// Whether the tensor is as it should be.
    pub fn is_good(self) -> bool {
        matches!(self, Verdict::Exact | Verdict::WithinBounds)
    }

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Exact => "exact",
            Verdict::WithinBounds => "within bounds",
            Verdict::Off => "OFF",
            Verdict::Missing => "MISSING",
            Verdict::Extra => "EXTRA",
            Verdict::WrongShape => "WRONG SHAPE",
            Verdict::NotComparable => "NOT COMPARABLE",
        }
    }
}

/// One tensor of the comparison.
#[derive(Clone, Debug, serde::Serialize)]
pub struct TensorVerdict {
    /// Name in the GGUF.
    pub name: String,
    /// Type in the GGUF; empty when it is missing.
    #[serde(rename = "type")]
    pub ty: String,
    /// Part of the model: trunk, mtp or vision.
    pub part: &'static str,
    /// Elements compared.
    pub weights: u64,
    /// Largest `|converted - f(raw)|`.
    pub max_error: f64,
    /// Most that may be; 0 where nothing is quantized.
    pub max_bound: f64,
    /// Root mean square of `converted - f(raw)`.
    pub rmse: f64,
    /// Most that may be.
    pub rmse_bound: f64,
    /// How it came out.
    pub verdict: Verdict,
    /// What is wrong, where something is.
    pub reason: Option<String>,
}

/// The whole comparison.
#[derive(Clone, Debug)]
pub struct Verification {
    /// Tensor by tensor, in the order of the source; tensors of the file alone come last.
    pub tensors: Vec<TensorVerdict>,
    /// Keys of the metadata that are not what the source says.
    pub metadata: Vec<String>,
    /// Bytes of file and source compared.
    pub bytes: u64,
}

impl Verification {
    /// Whether all is as it should be.
    pub fn is_good(&self) -> bool {
        self.metadata.is_empty() && self.tensors.iter().all(|t| t.verdict.is_good())
    }
}

/// Compares a GGUF (text model or vision encoder) with the folder it was made from.
///
/// # Errors
/// When either cannot be read, or the folder is not a checkpoint of this family. Differences are no errors; they are in
/// the result.
pub fn verify(
    file: &GgufFile,
    source: &Path,
    options: &PlanOptions,
    progress: Progress,
) -> Result<Verification, ConvertError> {
    let checkpoint = Checkpoint::open(source)?;
    let config = config_of(&checkpoint)?;
    let architecture = file.metadata().str_opt("general.architecture")?.unwrap_or("nothing");
    let name = file.metadata().str_opt("general.name")?.unwrap_or("").to_string();
    let (plan, expected) = match architecture {
        metadata::ARCHITECTURE => {
            let mut plan = plan::text_model(&checkpoint, &config, options)?;
            use_fused_experts(&mut plan, file, config.expert_ff);
            let json = checkpoint.config().unwrap_or(&serde_json::Value::Null);
            let folder = checkpoint.folder();
            let keys = metadata::text_model(folder, json, &config, &plan.tensors, plan.mtp_layers, 0, &name)?;
            (plan, keys)
        }
        "clip" => {
            let plan = plan::vision(&checkpoint, &config, options)?;
            let vision = config.vision.as_ref().ok_or_else(|| ConvertError::NoVision {
                source_name: plan::label(&checkpoint),
                reason: "config.json has no vision_config".to_string(),
            })?;
            let keys = metadata::vision(checkpoint.folder(), &config, vision, &plan.tensors, 0, &name)?;
            (plan, keys)
        }
        other => {
            return Err(ConvertError::Refused {
                file: file.name().to_string(),
                reason: format!(
                    "general.architecture: expected '{}' or 'clip', found '{other}'",
                    metadata::ARCHITECTURE
                ),
            });
        }
    };
    let mut verification = compare(file, &checkpoint, &plan.tensors, progress)?;
    for (key, value) in expected.iter() {
        // Names and the type of the file are the writer's to choose.
        if key.starts_with("general.") && key != "general.architecture" {
            continue;
        }
        match file.metadata().get(key) {
            Some(found) if found == value || same_numbers(found, value) => {}
            Some(found) => verification.metadata.push(format!(
                "'{key}': expected {}, found {}",
                value.describe(),
                found.describe()
            )),
            None => verification.metadata.push(format!("'{key}': expected {}, found nothing", value.describe())),
        }
    }
    Ok(verification)
}

/// Compares the MTP head of a file with a checkpoint that may hold nothing else.
///
/// # Errors
/// As [`verify`].
pub(super) fn verify_head(
    file: &GgufFile,
    checkpoint: &Checkpoint,
    head: &[Planned],
    progress: Progress,
) -> Result<Verification, ConvertError> {
    let mut verification = compare(file, checkpoint, head, progress)?;
    // The rest of the file is not the head's business.
    verification.tensors.retain(|t| t.verdict != Verdict::Extra);
    Ok(verification)
}

/// Equal as numbers, whatever width the writer chose.
fn same_numbers(a: &crate::gguf::Value, b: &crate::gguf::Value) -> bool {
    use crate::gguf::Value;
    match (a, b) {
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| a == b || same_numbers(&a, &b))
        }
        _ => a.integer().is_some() && a.integer() == b.integer(),
    }
}

/// Where the file keeps the experts' gate and up matrices in one tensor, so does the plan.
fn use_fused_experts(plan: &mut Plan, file: &GgufFile, expert_ff: u64) {
    let tensors = std::mem::take(&mut plan.tensors);
    for mut t in tensors {
        let fused = t.name.replace(".ffn_gate_exps.", ".ffn_gate_up_exps.");
        if fused != t.name && file.tensor(&t.name).is_none() && file.tensor(&fused).is_some() {
            if let RowMap::Slices { .. } = t.transform.rows {
                t.transform.rows = RowMap::Same;
                t.dims[1] = 2 * expert_ff;
                t.name = fused;
            }
        } else if t.name.contains(".ffn_up_exps.")
            && file.tensor(&t.name).is_none()
            && file.tensor(&t.name.replace(".ffn_up_exps.", ".ffn_gate_up_exps.")).is_some()
            && matches!(t.transform.rows, RowMap::Slices { .. })
        {
            continue;
        }
        plan.tensors.push(t);
    }
}

/// Compares planned tensors with a file's, in the order of the source.
fn compare(
    file: &GgufFile,
    checkpoint: &Checkpoint,
    planned: &[Planned],
    progress: Progress,
) -> Result<Verification, ConvertError> {
    let mut order: Vec<&Planned> = planned.iter().collect();
    let shard = |p: &Planned| p.sources.first().and_then(|s| checkpoint.tensor(s)).map(|t| t.shard);
    order.sort_by_key(|p| shard(p));
    let mut result = Verification { tensors: Vec::new(), metadata: Vec::new(), bytes: 0 };
    for p in order {
        if (progress.stopped)() {
            return Err(ConvertError::Interrupted { written: Vec::new() });
        }
        let sources = plan::sources(checkpoint, p)?;
        let Some(tensor) = file.tensor(&p.name) else {
            let why = format!("the source has it as '{}'", p.sources.first().map_or("", String::as_str));
            result.tensors.push(verdict(&p.name, "", p.part, Verdict::Missing, Some(why)));
            continue;
        };
        result.bytes += tensor.size + p.weights() * sources.first().map_or(0, |s| s.float.bytes() as u64);
        result.tensors.push(compare_tensor(file, tensor, p, &sources));
        (progress.advance)(tensor.size);
    }
    let known: HashSet<&str> = planned.iter().map(|p| p.name.as_str()).collect();
    for t in file.tensors().iter().filter(|t| !known.contains(t.name.as_str())) {
        let part = if t.name.contains(".nextn.") { Part::Mtp } else { Part::Trunk };
        let why = "nothing in the source becomes this tensor".to_string();
        result.tensors.push(verdict(&t.name, t.ty.name(), part, Verdict::Extra, Some(why)));
    }
    Ok(result)
}

fn verdict(name: &str, ty: &str, part: Part, verdict: Verdict, reason: Option<String>) -> TensorVerdict {
    TensorVerdict {
        name: name.to_string(),
        ty: ty.to_string(),
        part: part_name(part),
        weights: 0,
        max_error: 0.0,
        max_bound: 0.0,
        rmse: 0.0,
        rmse_bound: 0.0,
        verdict,
        reason,
    }
}

/// What a run of rows adds up to.
#[derive(Clone, Copy, Default)]
struct Sums {
    max_error: f64,
    squared: f64,
    /// Largest error in steps of its block.
    max_share: f64,
    /// Largest bound of any block.
    max_bound: f64,
    squared_steps: f64,
    /// First element that is not what it must be.
    first_bad: Option<u64>,
}

impl Sums {
    fn join(self, other: Sums) -> Sums {
        Sums {
            max_error: self.max_error.max(other.max_error),
            squared: self.squared + other.squared,
            max_share: self.max_share.max(other.max_share),
            max_bound: self.max_bound.max(other.max_bound),
            squared_steps: self.squared_steps + other.squared_steps,
            first_bad: match (self.first_bad, other.first_bad) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            },
        }
    }
}

/// Compares one tensor by all cores.
fn compare_tensor(file: &GgufFile, tensor: &TensorInfo, planned: &Planned, sources: &[SourceTensor]) -> TensorVerdict {
    let squeeze = |dims: &[u64]| dims.iter().copied().filter(|d| *d != 1).collect::<Vec<_>>();
    let mut out = verdict(&planned.name, tensor.ty.name(), planned.part, Verdict::Exact, None);
    if squeeze(&tensor.dims) != squeeze(&planned.dims) {
        out.verdict = Verdict::WrongShape;
        out.reason = Some(format!("expected {:?}, found {:?}", planned.dims, tensor.dims));
        return out;
    }
    let cols = planned.cols();
    let row_bytes = tensor.ty.row_bytes(cols);
    let (true, Some(row_bytes)) = (tensor.ty.computable(), row_bytes) else {
        out.verdict = Verdict::NotComparable;
        out.reason = Some(format!("strata does not decode {}", tensor.ty.name()));
        return out;
    };
    let data = file.data(tensor);
    let float = Float::of(tensor.ty).filter(|f| planned.is_byte_copy(*f, sources));
    let per_matrix = planned.dims.get(1).map_or(1, |d| *d as usize);
    let runs: Vec<_> = row_runs(planned.rows(), per_matrix, cols).collect();
    let sums = runs
        .par_iter()
        .map(|&(first, rows)| {
            if float
                .is_some_and(|f| same_bytes(planned, sources, f, first, &data[first * row_bytes..][..rows * row_bytes]))
            {
                return Sums::default();
            }
            let mut raw = vec![0.0; rows * cols];
            planned.read_rows(sources, first, &mut raw);
            let mut found = vec![0.0; rows * cols];
            let bytes = &data[first * row_bytes..(first + rows) * row_bytes];
            if dequantize(tensor.ty, bytes, &mut found).is_err() {
                // Lengths were made to fit; nothing to compare would be a fault of its own.
                return Sums { first_bad: Some((first * cols) as u64), ..Sums::default() };
            }
            let mut sums = if tensor.ty.block_size() == 1 {
                compare_floats(tensor.ty, &raw, &found)
            } else {
                compare_blocks(tensor.ty, &raw, &found)
            };
            sums.first_bad = sums.first_bad.map(|i| i + (first * cols) as u64);
            sums
        })
        .reduce(Sums::default, Sums::join);
    let count = planned.weights().max(1) as f64;
    out.weights = planned.weights();
    out.max_error = sums.max_error;
    out.rmse = (sums.squared / count).sqrt();
    let exact = tensor.ty.block_size() == 1;
    if !exact {
        out.max_bound = sums.max_bound;
        out.rmse_bound = RMS_SHARE * (sums.squared_steps / count).sqrt();
        out.verdict = Verdict::WithinBounds;
    }
    if let Some(at) = sums.first_bad {
        out.verdict = Verdict::Off;
        out.reason = Some(if exact {
            format!("element {at} is not the source's")
        } else {
            format!("element {at} is off by more than its block allows ({:.2} steps at worst)", sums.max_share)
        });
    } else if !exact && out.rmse > out.rmse_bound {
        out.verdict = Verdict::Off;
        out.reason =
            Some(format!("the errors are too large on the whole: {:.3e}, at most {:.3e}", out.rmse, out.rmse_bound));
    }
    out
}

/// Stored floats must be `f(raw)` rounded to their type.
fn compare_floats(ty: TensorType, raw: &[f32], found: &[f32]) -> Sums {
    let mut sums = Sums::default();
    // The usual case at the speed of memory: nothing differs at all.
    if raw.iter().zip(found).fold(true, |same, (a, b)| same & (a.to_bits() == b.to_bits())) {
        return sums;
    }
    for (i, (&raw, &found)) in raw.iter().zip(found).enumerate() {
        let expected = match ty {
            TensorType::F16 => f16::from_f32(raw).to_f32(),
            TensorType::BF16 => bf16::from_f32(raw).to_f32(),
            _ => raw,
        };
        if expected.to_bits() != found.to_bits() && !(expected.is_nan() && found.is_nan()) {
            sums.first_bad.get_or_insert(i as u64);
        }
        let error = f64::from(found) - f64::from(raw);
        sums.max_error = sums.max_error.max(error.abs());
        sums.squared += error * error;
    }
    sums
}

/// Levels of a plain range fit, and weights that share a range, per type.
fn grid_of(ty: TensorType) -> (usize, usize, f64, bool) {
    // (weights per block, weights per sub-block, levels, symmetric around 0)
    match ty {
        TensorType::Q4_K => (256, 32, 15.0, false),
        TensorType::Q5_K => (256, 32, 31.0, false),
        TensorType::Q6_K => (256, 16, 63.0, true),
        _ => (32, 32, 254.0, true),
    }
}

/// Whether rows of a copied tensor are the source's, byte for byte.
fn same_bytes(planned: &Planned, sources: &[SourceTensor], float: Float, first: usize, found: &[u8]) -> bool {
    let row = planned.cols() * float.bytes();
    found.chunks(row).enumerate().all(|(i, bytes)| planned.row_bytes(sources, first + i).1 == bytes)
}

/// Lanes of the sums over a block, so that they run in SIMD registers.
const LANES: usize = 8;

/// Lowest and highest of a sub-block and 0.
fn low_and_high(x: &[f32]) -> (f32, f32) {
    let (mut low, mut high) = ([0.0f32; LANES], [0.0f32; LANES]);
    for chunk in x.as_chunks::<LANES>().0 {
        for lane in 0..LANES {
            low[lane] = if chunk[lane] < low[lane] { chunk[lane] } else { low[lane] };
            high[lane] = if chunk[lane] > high[lane] { chunk[lane] } else { high[lane] };
        }
    }
    (low.iter().fold(0.0, |a, b| a.min(*b)), high.iter().fold(0.0, |a, b| a.max(*b)))
}

/// Largest error and sum of squared errors of a block. An error that is NaN shows in the sum only.
fn block_errors(raw: &[f32], found: &[f32]) -> (f32, f32) {
    let (mut largest, mut squared) = ([0.0f32; LANES], [0.0f32; LANES]);
    for (r, f) in raw.as_chunks::<LANES>().0.iter().zip(found.as_chunks::<LANES>().0) {
        for lane in 0..LANES {
            let error = (f[lane] - r[lane]).abs();
            largest[lane] = if error > largest[lane] { error } else { largest[lane] };
            squared[lane] += error * error;
        }
    }
    (largest.iter().fold(0.0, |a, b| a.max(*b)), squared.iter().sum())
}

/// Quantized weights must lie within a step of the widest sub-block of their block.
fn compare_blocks(ty: TensorType, raw: &[f32], found: &[f32]) -> Sums {
    let (block, sub, levels, symmetric) = grid_of(ty);
    // The stored half of a Q8_0 scale is off by 2^-11 at most, which moves the outermost level by 127 * 2^-11 steps.
    let allowed = if block == 32 { 0.5 + 127.0 / 2048.0 } else { 1.0 };
    let mut sums = Sums::default();
    for (b, (raw, found)) in raw.chunks(block).zip(found.chunks(block)).enumerate() {
        let range = |x: &[f32]| {
            let (low, high) = low_and_high(x);
            f64::from(if symmetric { 2.0 * high.max(-low) } else { high - low })
        };
        let step = raw.chunks(sub).map(range).fold(0.0, f64::max) / levels;
        // Below this, halves of the scales run out of bits; no weight of that size matters.
        let step = step.max(1e-7);
        let (largest, squared) = block_errors(raw, found);
        sums.max_error = sums.max_error.max(f64::from(largest));
        sums.squared += f64::from(squared);
        sums.max_share = sums.max_share.max(f64::from(largest) / step);
        if f64::from(largest) > allowed * step || !squared.is_finite() {
            let bad = |(r, f): (&f32, &f32)| f64::from((f - r).abs()) > allowed * step || !(f - r).is_finite();
            let at = raw.iter().zip(found).position(bad).unwrap_or(0);
            sums.first_bad.get_or_insert((b * block + at) as u64);
        }
        sums.max_bound = sums.max_bound.max(allowed * step);
        sums.squared_steps += step * step * raw.len() as f64;
    }
    sums
}

/// Tensors of the source's MTP head that a file lacks, as names in the GGUF.
pub fn missing_head(verification: &Verification) -> usize {
    verification
        .tensors
        .iter()
        .filter(|t| t.verdict == Verdict::Missing && t.part == part_name(Part::Mtp))
        .filter(|t| names::layer_of(&t.name).is_some())
        .count()
}
