//! `strata kl-compare`: how far a model's predictions lie from a reference's.

use crate::cli::comparison::{self, AgainstArgs, ReportArgs, TextArgs};
use crate::cli::failure::BadInput;
use crate::cli::model::{LoadedModel, ModelArgs};
use crate::cli::wording::counted;
use crate::cli::{output, progress, settings};
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use strata_core::compare::{BaseReader, BaseWriter, ChunkedText, Source, kl_plot, measure};
use strata_core::output::write_whole;

/// KL divergence of a model from a reference over a text: another GGUF, other settings, or saved log-probabilities
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// The reference: a GGUF file, or log-probabilities saved by strata or llama-perplexity
    #[arg(long, value_name = "FILE", visible_alias = "kl-divergence-base")]
    against: Option<PathBuf>,
    #[command(flatten)]
    against_settings: AgainstArgs,
    /// A second run of the reference (GGUF or saved), whose divergence from the first is the noise floor
    #[arg(long, value_name = "FILE", requires = "against")]
    noise: Option<PathBuf>,
    /// Only the perplexity of the model
    #[arg(long, conflicts_with_all = ["against", "noise", "plot", "threshold"])]
    perplexity_only: bool,
    /// Save the model's log-probabilities, in the format of llama-perplexity --kl-divergence-base
    #[arg(long, value_name = "FILE")]
    save: Option<PathBuf>,
    /// Draw the divergence over the text's positions (SVG)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    /// Exit with code 3 if the mean divergence (nats) is larger
    #[arg(long, value_name = "KL", allow_negative_numbers = true, value_parser = settings::bound)]
    threshold: Option<f64>,
    #[command(flatten)]
    report: ReportArgs,
}

/// A reference, opened.
enum Side {
    Model(Box<LoadedModel>),
    File(Box<BaseReader>),
}

impl Side {
    fn open(path: &Path, args: &Args) -> Result<Self> {
        if BaseReader::recognizes(path) {
            return Ok(Self::File(Box::new(BaseReader::open(path)?)));
        }
        Ok(Self::Model(Box::new(args.against_settings.load(path, &args.model)?)))
    }

    fn vocab(&self) -> usize {
        match self {
            Self::Model(loaded) => loaded.model.config().vocab,
            Self::File(reader) => reader.vocab(),
        }
    }

    /// As a source, after a check that it is about the same text.
    fn source<'a>(&'a self, path: &Path, text: &ChunkedText) -> Result<Source<'a>> {
        match self {
            Self::Model(loaded) => Ok(Source::model(&loaded.model, text.n_ctx, comparison::bos(&loaded.tokenizer))?),
            Self::File(reader) => {
                let saved = reader.text();
                if saved.n_ctx != text.n_ctx || !saved.tokens.starts_with(&text.tokens) {
                    return Err(
                        BadInput::new(format!("{}: saved for another text or other chunks", path.display())).into()
                    );
                }
                Ok(Source::File(Box::new(BaseReader::open(path)?)))
            }
        }
    }
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.against.is_none() && !args.perplexity_only && args.save.is_none() {
        return Err(BadInput::new("nothing to compare with")
            .hint("give a reference with --against FILE, or ask for --perplexity-only")
            .into());
    }
    let inputs = [&args.model.model, &args.text.file, &args.against, &args.noise].map(Option::as_deref);
    output::check(&[args.save.as_deref(), args.plot.as_deref()], &inputs)?;
    let loaded = LoadedModel::load(&args.model)?;
    let base = args.against.as_deref().map(|path| Side::open(path, &args)).transpose()?;
    let noise = args.noise.as_deref().map(|path| Side::open(path, &args)).transpose()?;
    // Saved log-probabilities bring their text with them.
    let text = match &base {
        Some(Side::File(reader)) if args.text.file.is_none() => {
            let saved = reader.text();
            ChunkedText::new(saved.tokens.clone(), saved.n_ctx, args.text.chunks.map(|n| n as usize))?
        }
        _ => args.text.chunked(&loaded.tokenizer)?,
    };
    let vocab = loaded.model.config().vocab;
    for (side, path) in [(&base, &args.against), (&noise, &args.noise)] {
        if let (Some(side), Some(path)) = (side, path)
            && side.vocab() != vocab
        {
            return Err(BadInput::new(format!(
                "{}: a vocabulary of {} tokens cannot be compared with the model's {vocab}",
                path.display(),
                side.vocab()
            ))
            .into());
        }
    }
    let mut tested = Source::model(&loaded.model, text.n_ctx, comparison::bos(&loaded.tokenizer))?;
    let mut base_source = match (&base, &args.against) {
        (Some(side), Some(path)) => Some(side.source(path, &text)?),
        _ => None,
    };
    let mut noise_source = match (&noise, &args.noise) {
        (Some(side), Some(path)) => Some(side.source(path, &text)?),
        _ => None,
    };
    let mut writer = args.save.as_deref().map(|path| BaseWriter::create(path, &text, vocab)).transpose()?;
    let bar = progress::count(text.chunks() as u64, "chunks");
    let result = measure(
        &text,
        &mut tested,
        base_source.as_mut(),
        noise_source.as_mut(),
        writer.as_mut(),
        &mut |done, so_far| {
            bar.set_position(done as u64);
            if !so_far.kl.is_empty() {
                bar.set_message(format!("KL {:.4}", so_far.mean_kl().0));
            }
        },
    )?;
    bar.finish_and_clear();
    if let Some(writer) = writer {
        writer.finish()?;
    }

    let reference = args.against.as_deref().map(|path| path.display().to_string());
    let chunks = counted(text.chunks(), "chunk");
    let headline = match &reference {
        Some(reference) => {
            format!("{} against {reference}: {chunks} of {} tokens", loaded.file.name(), text.n_ctx)
        }
        None => format!("{}: {chunks} of {} tokens", loaded.file.name(), text.n_ctx),
    };
    if let Some(path) = &args.plot {
        write_whole(path, kl_plot(&headline, &result.kl, &text).as_bytes())?;
    }
    let figures = result.figures();
    args.report.print(&headline, &figures, comparison::sides(loaded.file.name(), reference.as_deref()))?;
    Ok(comparison::verdict("mean KL divergence", figures.get("kl_mean").unwrap_or(0.0), args.threshold))
}
