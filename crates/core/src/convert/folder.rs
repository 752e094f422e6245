//! A Hugging Face folder to GGUF: the text model with its MTP head, and the vision encoder.

use super::config::HfConfig;
use super::imatrix::Imatrix;
use super::names::Part;
use super::output::{self, Content, Output, Progress};
use super::plan::{self, LeftOut, Plan, PlanOptions};
use super::recipe::{Override, Recipe, TypeChooser};
use super::{ConvertError, metadata};
use crate::checkpoint::Checkpoint;
use crate::gguf::{Array, Metadata, TensorDecl, Value, WriterOptions};
use std::path::{Path, PathBuf};
use strata_kernels::format::TensorType;

/// How a folder is converted.
#[derive(Clone, Debug)]
pub struct ConvertOptions {
    /// Type or recipe of the matrices.
    pub recipe: Recipe,
    /// Overrides per tensor.
    pub overrides: Vec<Override>,
    /// Type of the MTP head's matrices; `None`: the recipe's, but never below Q8_0.
    pub mtp_type: Option<TensorType>,
    /// Importance matrix.
    pub imatrix: Option<PathBuf>,
    /// What may be left out.
    pub plan: PlanOptions,
    /// `general.name`; `None`: from the folder's name.
    pub name: Option<String>,
    /// How the file is written.
    pub writer: WriterOptions,
}

impl ConvertOptions {
    /// Everything as it comes, in one type or recipe.
    pub fn new(recipe: Recipe) -> ConvertOptions {
        ConvertOptions {
            recipe,
            overrides: Vec::new(),
            mtp_type: None,
            imatrix: None,
            plan: PlanOptions::default(),
            name: None,
            writer: WriterOptions::default(),
        }
    }

    /// Chooses types for a model of so many layers and experts.
    fn chooser(&self, layers: u64, experts: u64) -> TypeChooser {
        TypeChooser { recipe: self.recipe, overrides: self.overrides.clone(), mtp: self.mtp_type, layers, experts }
    }
}

/// What was done with one tensor.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct TensorReport {
    /// Name in the file written.
    pub name: String,
    /// Sizes, first varies fastest.
    pub dims: Vec<u64>,
    /// Type it is stored in.
    #[serde(rename = "type")]
    pub ty: String,
    /// Bytes in the file.
    pub bytes: u64,
    /// Part of the model: trunk, mtp or vision.
    pub part: &'static str,
    /// The tensors it was made from (the first one, where experts were stacked).
    pub source: String,
    /// What was done: copied, +1, split ...
    pub done: String,
    /// Anything out of the ordinary.
    pub remark: Option<String>,
}

/// What a conversion did.
#[derive(Clone, Debug)]
pub struct ConvertReport {
    /// The files written.
    pub files: Vec<PathBuf>,
    /// Bytes of source tensors read.
    pub read_bytes: u64,
    /// Bytes of tensor data written.
    pub written_bytes: u64,
    /// Tensor by tensor.
    pub tensors: Vec<TensorReport>,
    /// Tensors of the checkpoint that are not in the file.
    pub left_out: Vec<LeftOut>,
    /// Layers of the MTP head in the file.
    pub mtp_layers: u64,
    /// Remarks.
    pub notes: Vec<String>,
}

/// The folder's config, typed.
pub(super) fn config_of(checkpoint: &Checkpoint) -> Result<HfConfig, ConvertError> {
    let folder = checkpoint.folder().display().to_string();
    let json = checkpoint.config().ok_or_else(|| ConvertError::NoConfig { folder: folder.clone() })?;
    HfConfig::from_json(&checkpoint.folder().join("config.json").display().to_string(), json)
}

/// The checkpoint, its config, and the name the model gets.
fn open_source(source: &Path, options: &ConvertOptions) -> Result<(Checkpoint, HfConfig, String), ConvertError> {
    let checkpoint = Checkpoint::open(source)?;
    let config = config_of(&checkpoint)?;
    let name = options.name.clone().unwrap_or_else(|| metadata::name_of_folder(checkpoint.folder()));
    Ok((checkpoint, config, name))
}

/// Converts the text model of a folder, MTP head included.
///
/// # Errors
/// When the folder is not a whole checkpoint of this family, something does not fit the types asked for, or the disk
/// refuses. No file appears then.
pub fn convert_text_model(
    source: &Path,
    out: &Path,
    options: &ConvertOptions,
    progress: Progress,
) -> Result<ConvertReport, ConvertError> {
    let (checkpoint, config, name) = open_source(source, options)?;
    let plan = plan::text_model(&checkpoint, &config, &options.plan)?;
    let mut keys = metadata::text_model(
        checkpoint.folder(),
        checkpoint.config().unwrap_or(&serde_json::Value::Null),
        &config,
        &plan.tensors,
        plan.mtp_layers,
        options.recipe.file_type(),
        &name,
    )?;
    let imatrix = options.imatrix.as_deref().map(Imatrix::open).transpose()?;
    if let Some(imatrix) = &imatrix {
        add_imatrix_keys(&mut keys, imatrix);
    }
    let chooser = options.chooser(config.layers.len() as u64, config.experts);
    write_plan(&checkpoint, plan, keys, chooser, imatrix, out, options, progress)
}

/// Converts the vision encoder of a folder to the file llama.cpp calls `mmproj`.
///
/// # Errors
/// As [`convert_text_model`]; also when the folder has no encoder.
pub fn convert_vision(
    source: &Path,
    out: &Path,
    options: &ConvertOptions,
    progress: Progress,
) -> Result<ConvertReport, ConvertError> {
    let (checkpoint, config, name) = open_source(source, options)?;
    let plan = plan::vision(&checkpoint, &config, &options.plan)?;
    let vision = config.vision.as_ref().ok_or_else(|| ConvertError::NoVision {
        source_name: plan::label(&checkpoint),
        reason: "config.json has no vision_config".to_string(),
    })?;
    let keys =
        metadata::vision(checkpoint.folder(), &config, vision, &plan.tensors, options.recipe.file_type(), &name)?;
    write_plan(&checkpoint, plan, keys, options.chooser(vision.blocks, 0), None, out, options, progress)
}

/// The keys llama.cpp's quantizer leaves about the importance matrix.
fn add_imatrix_keys(keys: &mut Metadata, imatrix: &Imatrix) {
    let name = Path::new(imatrix.file()).file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    keys.set("quantize.imatrix.file", Value::String(name));
    if !imatrix.datasets.is_empty() {
        keys.set("quantize.imatrix.datasets", Value::Array(Array::String(imatrix.datasets.clone())));
    }
    keys.set("quantize.imatrix.entries_count", Value::U32(imatrix.entries() as u32));
    keys.set("quantize.imatrix.chunks_count", Value::U32(imatrix.chunks));
}

/// Chooses types, writes the file and reports.
fn write_plan(
    checkpoint: &Checkpoint,
    plan: Plan,
    keys: Metadata,
    chooser: TypeChooser,
    imatrix: Option<Imatrix>,
    out: &Path,
    options: &ConvertOptions,
    progress: Progress,
) -> Result<ConvertReport, ConvertError> {
    let mut report = ConvertReport {
        files: Vec::new(),
        read_bytes: 0,
        written_bytes: 0,
        tensors: Vec::new(),
        left_out: plan.left_out,
        mtp_layers: plan.mtp_layers,
        notes: plan.notes,
    };
    let mut outputs = Vec::new();
    let mut without_data = 0;
    for planned in plan.tensors {
        let (output, tensor_report) = prepare(checkpoint, planned, &chooser, imatrix.as_ref())?;
        if imatrix.is_some() && tensor_report.remark.as_deref().is_some_and(|r| r.contains("importance")) {
            without_data += 1;
        }
        report.written_bytes += tensor_report.bytes;
        if let Content::Convert { planned, sources, .. } = &output.content {
            report.read_bytes += planned.weights() * sources[0].float.bytes() as u64;
        }
        report.tensors.push(tensor_report);
        outputs.push(output);
    }
    if let Some(imatrix) = &imatrix {
        report.notes.push(format!(
            "importance matrix {}: {} entries; {without_data} quantized tensors have no or incomplete data and are weighted evenly there",
            imatrix.file(),
            imatrix.entries()
        ));
    }
    report.files = output::write(out, &keys, &outputs, &options.writer, progress)?;
    Ok(report)
}

/// One tensor with its type, sources and importance, and what there is to say about it.
pub(super) fn prepare(
    checkpoint: &Checkpoint,
    planned: super::transform::Planned,
    chooser: &TypeChooser,
    imatrix: Option<&Imatrix>,
) -> Result<(Output, TensorReport), ConvertError> {
    let choice = chooser.choose(&planned.name, &planned.dims, planned.part);
    let decl = TensorDecl { name: planned.name.clone(), dims: planned.dims.clone(), ty: choice.ty };
    let mut remark = choice.remark;
    let mut importance = None;
    let searched = choice.ty.block_size() == 256;
    if let Some(imatrix) = imatrix.filter(|_| searched) {
        let matrices = planned.dims.get(2).copied().unwrap_or(1) as usize;
        importance = imatrix.importance(&planned.name, planned.cols(), matrices)?;
        let blind = importance.as_ref().map_or(matrices, |m| m.iter().filter(|w| w.is_none()).count());
        if blind > 0 {
            let missing = match (matrices, &importance) {
                (_, None) => "no importance data".to_string(),
                (matrices, Some(_)) => format!("no importance data for {blind} of {matrices} matrices"),
            };
            remark = Some(remark.map_or(missing.clone(), |r| format!("{r}; {missing}")));
        }
    }
    let sources = plan::sources(checkpoint, &planned)?;
    let report = TensorReport {
        name: decl.name.clone(),
        dims: decl.dims.clone(),
        ty: decl.ty.name().to_string(),
        bytes: decl.size().unwrap_or(0),
        part: part_name(planned.part),
        source: planned.sources.first().cloned().unwrap_or_default(),
        done: planned.transform.describe(),
        remark,
    };
    Ok((Output { decl, content: Content::Convert { planned, sources, importance } }, report))
}

/// How a part is called in reports.
pub(super) fn part_name(part: Part) -> &'static str {
    match part {
        Part::Trunk => "trunk",
        Part::Mtp => "mtp",
        Part::Vision => "vision",
    }
}
