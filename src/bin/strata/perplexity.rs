//! `strata perplexity`: how well a model predicts a text.

use crate::cli::comparison::{self, ReportArgs, TextArgs};
use crate::cli::model::{LoadedModel, ModelArgs};
use crate::cli::wording::counted;
use crate::cli::{output, progress};
use anyhow::Result;
use std::path::PathBuf;
use std::process::ExitCode;
use strata_core::compare::{BaseWriter, Source, measure};

/// Perplexity of a text, chunk by chunk as llama-perplexity reads it
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    text: TextArgs,
    /// Save all log-probabilities, in the format of llama-perplexity --kl-divergence-base
    #[arg(long, value_name = "FILE", visible_alias = "kl-divergence-base")]
    save: Option<PathBuf>,
    #[command(flatten)]
    report: ReportArgs,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    output::check(&[args.save.as_deref()], &[args.model.model.as_deref(), args.text.file.as_deref()])?;
    let loaded = LoadedModel::load(&args.model)?;
    let text = args.text.chunked(&loaded.tokenizer)?;
    let mut source = Source::model(&loaded.model, text.n_ctx, comparison::bos(&loaded.tokenizer))?;
    let vocab = loaded.model.config().vocab;
    let mut writer = args.save.as_deref().map(|path| BaseWriter::create(path, &text, vocab)).transpose()?;
    let bar = progress::count(text.chunks() as u64, "chunks");
    let result =
        measure(&text, &mut source, None, None, writer.as_mut(), &mut |done, _| bar.set_position(done as u64))?;
    bar.finish_and_clear();
    if let Some(writer) = writer {
        writer.finish()?;
    }
    let headline = format!("{}: {} of {} tokens", loaded.file.name(), counted(text.chunks(), "chunk"), text.n_ctx);
    args.report.print(&headline, &result.figures(), comparison::sides(loaded.file.name(), None))?;
    Ok(ExitCode::SUCCESS)
}
