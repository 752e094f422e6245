//! Finding and opening what a command computes with: the model file, the text side of it, the vision encoder.

use super::failure::BadInput;
use anyhow::{Context, Result};
use clap::ValueEnum;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use strata::bundled;
use strata_core::gguf::GgufFile;
use strata_core::model::{KvType, LoadOptions, Model};
use strata_core::text::{ChatTemplate, Tokenizer};
use strata_core::vision::checksum::{self, Checksum};
use strata_core::vision::{PictureReader, PreprocessOptions, VisionEncoder};

/// Bytes of encoded pictures kept for reuse.
const PICTURE_CACHE_BYTES: usize = 256 << 20;
/// Most rows a picture may take when the encoder runs on the CPU, unless set.
const CPU_PICTURE_TOKENS: usize = 300;

/// Which model, and how it is computed.
#[derive(clap::Args, Clone, Debug)]
pub struct ModelArgs {
    /// Model file (GGUF; the first part of a split file) [default: the bundled tiny model]
    #[arg(short, long, value_name = "FILE", env = "STRATA_MODEL")]
    pub model: Option<PathBuf>,
    /// Threads [default: one per core]
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Type of the attention cache
    #[arg(long, value_name = "TYPE", default_value = "f16", alias = "cache-type-k")]
    pub kv_type: KvTypeArg,
}

/// Which vision encoder, and how pictures are read.
#[derive(clap::Args, Clone, Debug)]
pub struct VisionArgs {
    /// Vision encoder (mmproj GGUF) [default: the .gguf with "mmproj" in its name beside the model]
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<PathBuf>,
    /// Expected SHA-256 of the encoder's file [default: the one in FILE.sha256, where that exists]
    #[arg(long, value_name = "HEX", requires = "mmproj")]
    pub mmproj_sha256: Option<String>,
    /// Whether pictures are read, and where the encoder runs
    #[arg(long, value_name = "WHERE", default_value = "yes")]
    pub vision: VisionArg,
    /// Most rows (tokens) a picture may take [default: 300 on the CPU, 1024 in `strata vision`]
    #[arg(long, value_name = "N", value_parser = super::settings::positive)]
    pub vision_tokens: Option<usize>,
    /// Fewest rows (tokens) a picture may take: smaller pictures are enlarged [default: set by the encoder]
    #[arg(long, value_name = "N", value_parser = super::settings::positive)]
    pub vision_min_tokens: Option<usize>,
}

impl VisionArgs {
    /// Refuses a place where this build cannot run the encoder.
    pub fn check_place(&self) -> Result<()> {
        match self.vision {
            VisionArg::Gpu => {
                Err(BadInput::new("--vision gpu: this build computes on the CPU only").hint("use --vision cpu").into())
            }
            VisionArg::Yes | VisionArg::No | VisionArg::Cpu => Ok(()),
        }
    }

    /// How pictures are brought to size for `encoder`; `most` is the largest number of rows unless set.
    pub fn preprocess_options(&self, encoder: &VisionEncoder, most: usize) -> Result<PreprocessOptions> {
        let max_tokens = self.vision_tokens.unwrap_or(most);
        let min_tokens = self.vision_min_tokens.unwrap_or(encoder.default_min_tokens().min(max_tokens));
        let options = PreprocessOptions { max_tokens, min_tokens };
        options.validate()?;
        Ok(options)
    }
}

/// `--kv-type`
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvTypeArg {
    /// Half precision
    F16,
    /// Single precision
    F32,
}

/// `--vision`
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum VisionArg {
    /// Read pictures if there is an encoder
    Yes,
    /// No encoder is opened
    No,
    /// Encode on the CPU
    Cpu,
    /// Encode on a GPU
    Gpu,
}

impl ModelArgs {
    /// Threads to compute with.
    pub fn threads(&self) -> usize {
        self.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), |n| n as usize)
    }

    /// Opens the model file, or the bundled model with one line on stderr saying so.
    pub fn open(&self) -> Result<GgufFile> {
        if let Some(path) = &self.model {
            return open_gguf(path);
        }
        let data = bundled::model().ok_or_else(|| {
            BadInput::new("no model given, and this build has none bundled")
                .hint("give one with -m FILE or $STRATA_MODEL")
        })?;
        strata::errln!("strata: using {} (choose another with -m FILE)", bundled::NAME);
        Ok(GgufFile::from_bytes(bundled::NAME, data)?)
    }

    /// How the model shall be loaded.
    pub fn load_options(&self) -> LoadOptions {
        LoadOptions {
            threads: self.threads(),
            kv_type: match self.kv_type {
                KvTypeArg::F16 => KvType::F16,
                KvTypeArg::F32 => KvType::F32,
            },
            ..LoadOptions::default()
        }
    }
}

/// Opens a GGUF file named by the user as a language model.
pub fn open_gguf(path: &Path) -> Result<GgufFile> {
    let extension = path.extension().unwrap_or_default();
    if path.is_dir() || extension == "safetensors" || extension == "json" {
        return Err(BadInput::new(format!("{}: expected a GGUF file, found a checkpoint or folder", path.display()))
            .hint("make a GGUF of a Hugging Face folder: strata convert FOLDER -o MODEL.gguf")
            .into());
    }
    let file = GgufFile::open(path)?;
    if file.metadata().str_opt("general.architecture").ok().flatten() == Some("clip") {
        return Err(BadInput::new(format!("{}: this is a vision encoder, not a language model", path.display()))
            .hint("give the language model with -m FILE and the encoder with --mmproj FILE")
            .into());
    }
    Ok(file)
}

/// Opens a vision encoder after checking its file against `pinned` or the checksum file beside it.
pub fn open_encoder(path: &Path, pinned: Option<&str>, threads: usize) -> Result<(VisionEncoder, Checksum)> {
    let checksum = checksum::verify(path, pinned)?;
    Ok((VisionEncoder::open(path, threads)?, checksum))
}

/// A model ready to compute, with its text side.
pub struct LoadedModel {
    /// The file.
    pub file: GgufFile,
    /// The model.
    pub model: Arc<Model>,
    /// Its tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// Its chat template, if the file has one.
    pub template: Option<ChatTemplate>,
}

impl LoadedModel {
    /// Loads everything the model file holds.
    pub fn load(args: &ModelArgs) -> Result<Self> {
        Self::from_file(args.open()?, &args.load_options())
    }

    /// Loads everything an opened file holds.
    pub fn from_file(file: GgufFile, options: &LoadOptions) -> Result<Self> {
        let in_file = || format!("cannot use {}", file.name());
        let tokenizer = Arc::new(Tokenizer::from_gguf(file.metadata()).with_context(in_file)?);
        let template = ChatTemplate::from_gguf(file.metadata()).with_context(in_file)?;
        let model = Arc::new(Model::load(&file, options).with_context(in_file)?);
        if tokenizer.vocab_size() > model.config().vocab {
            return Err(BadInput::new(format!(
                "{}: the tokenizer has {} tokens, but the model's embedding has {} rows",
                file.name(),
                tokenizer.vocab_size(),
                model.config().vocab
            ))
            .into());
        }
        Ok(LoadedModel { file, model, tokenizer, template })
    }

    /// Opens the vision encoder that `args` name or that lies beside the model; `None` where there is none or `--vision no`.
    /// What lies beside the model and does not fit, or several of them, is an error if there is a `picture` to read already;
    /// else a warning, and `None`.
    pub fn picture_reader(&self, args: &VisionArgs, threads: usize, picture: bool) -> Result<Option<PictureReader>> {
        let may_lack = !picture && args.mmproj.is_none();
        let encoder = match self.encoder(args, threads) {
            Err(error) if may_lack && error.is::<SeveralEncoders>() => {
                strata::errln!("strata: warning: no pictures: {error} (choose one with --mmproj FILE)");
                return Ok(None);
            }
            Err(error) if error.is::<SeveralEncoders>() => {
                return Err(BadInput::new(error.to_string()).hint("choose one with --mmproj FILE").into());
            }
            found => found?,
        };
        let Some(encoder) = encoder else { return Ok(None) };
        let width = self.model.config().hidden;
        if encoder.width() != width {
            let problem = format!(
                "the vision encoder gives rows of {} values, but the model's rows are {width} wide: it belongs to another model",
                encoder.width()
            );
            if may_lack {
                strata::errln!("strata: warning: no pictures: {problem} (give the right one with --mmproj FILE)");
                return Ok(None);
            }
            return Err(BadInput::new(problem).into());
        }
        let options = args.preprocess_options(&encoder, CPU_PICTURE_TOKENS)?;
        Ok(Some(PictureReader::new(Arc::new(encoder), options, PICTURE_CACHE_BYTES)))
    }

    fn encoder(&self, args: &VisionArgs, threads: usize) -> Result<Option<VisionEncoder>> {
        args.check_place()?;
        if args.vision == VisionArg::No {
            return Ok(None);
        }
        if let Some(path) = &args.mmproj {
            return Ok(Some(open_encoder(path, args.mmproj_sha256.as_deref(), threads)?.0));
        }
        let Some(model) = self.file.paths().first() else {
            let Some(data) = bundled::encoder() else { return Ok(None) };
            return Ok(Some(VisionEncoder::from_bytes("the bundled vision encoder", data, threads)?));
        };
        match encoders_beside(model).as_slice() {
            [] => Ok(None),
            [path] => {
                let encoder = open_encoder(path, None, threads)?.0;
                strata::errln!("strata: pictures are read with {} (choose another with --mmproj FILE)", path.display());
                Ok(Some(encoder))
            }
            several => {
                let names: Vec<_> = several.iter().map(|path| path.display().to_string()).collect();
                Err(SeveralEncoders(names.join(", ")).into())
            }
        }
    }
}

/// More than one vision encoder lies beside the model, and none was chosen.
#[derive(Debug, thiserror::Error)]
#[error("several vision encoders lie beside the model: {0}")]
struct SeveralEncoders(String);

/// The GGUF files in the model's folder whose names contain "mmproj", sorted by name.
fn encoders_beside(model: &Path) -> Vec<PathBuf> {
    let folder = model.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
            name.ends_with(".gguf") && name.contains("mmproj")
        })
        .collect();
    found.sort();
    found
}
