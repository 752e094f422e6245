//! What the comparing commands share: the text they read, the reference side, and how a report is printed.

use super::failure::{BEYOND_THRESHOLD, BadInput};
use super::model::{KvTypeArg, LoadedModel, ModelArgs};
use anyhow::Result;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use strata_core::compare::{ChunkedText, Figures};
use strata_core::text::{Specials, Tokenizer};

/// The text to read, and in what pieces.
#[derive(clap::Args, Clone, Debug)]
pub struct TextArgs {
    /// Text file to read
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Tokens per chunk; the second half of each is scored
    #[arg(short, long, value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(4..))]
    pub ctx_size: u32,
    /// Read at most so many chunks
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub chunks: Option<u32>,
}

impl TextArgs {
    /// The file's text in chunks of tokens, as llama-perplexity makes them: one line end at the end is dropped, special
    /// tokens are text, and the text starts with BOS for models that want it.
    pub fn chunked(&self, tokenizer: &Tokenizer) -> Result<ChunkedText> {
        let path =
            self.file.as_deref().ok_or_else(|| BadInput::new("no text given").hint("name a text file with -f FILE"))?;
        let text = read_text(path)?;
        let mut tokens = Vec::new();
        tokens.extend(bos(tokenizer));
        tokens.extend(tokenizer.encode(&text, Specials::AsText)?);
        let chunks = self.chunks.map(|n| n as usize);
        ChunkedText::new(tokens, self.ctx_size as usize, chunks)
            .map_err(|error| BadInput::new(error.to_string()).into())
    }
}

/// A text file without the line end at its end.
pub fn read_text(path: &Path) -> Result<String> {
    let bytes = super::input::read(path)?;
    let mut text = String::from_utf8(bytes).map_err(|error| {
        BadInput::new(format!("{}: not UTF-8 at byte {}", path.display(), error.utf8_error().valid_up_to()))
    })?;
    if text.ends_with('\n') {
        text.pop();
    }
    Ok(text)
}

/// The token every text starts with, for models that want one.
pub fn bos(tokenizer: &Tokenizer) -> Option<u32> {
    tokenizer.bos_id().filter(|_| tokenizer.add_bos())
}

/// How the reference model is computed where not as the tested one.
#[derive(clap::Args, Clone, Debug)]
pub struct AgainstArgs {
    /// Threads of the reference [default: as the tested model]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub against_threads: Option<u32>,
    /// Type of the reference's attention cache [default: as the tested model]
    #[arg(long, value_name = "TYPE")]
    pub against_kv_type: Option<KvTypeArg>,
}

impl AgainstArgs {
    /// Loads the reference from `path`.
    pub fn load(&self, path: &Path, tested: &ModelArgs) -> Result<LoadedModel> {
        LoadedModel::load(&ModelArgs {
            model: Some(path.to_owned()),
            threads: self.against_threads.or(tested.threads),
            kv_type: self.against_kv_type.unwrap_or(tested.kv_type),
        })
    }
}

/// How a report is printed.
#[derive(clap::Args, Clone, Debug)]
pub struct ReportArgs {
    /// Print the report as JSON
    #[arg(long, conflicts_with = "csv")]
    pub json: bool,
    /// Print the figures as CSV
    #[arg(long)]
    pub csv: bool,
}

impl ReportArgs {
    /// Prints `figures` under a headline, or as JSON with `details` beside them, or as CSV.
    pub fn print(&self, headline: &str, figures: &Figures, details: Map<String, Value>) -> Result<()> {
        if self.json {
            let mut report = details;
            report.insert("figures".into(), Value::Object(figures.json()));
            crate::cli::outln!("{}", serde_json::to_string_pretty(&report)?);
        } else if self.csv {
            crate::cli::out!("{}", figures.csv());
        } else {
            crate::cli::outln!("{headline}");
            crate::cli::out!("{}", figures.table());
        }
        Ok(())
    }
}

/// The names of both sides, for the report.
pub fn sides(tested: &str, reference: Option<&str>) -> Map<String, Value> {
    let mut map = Map::new();
    map.insert("model".into(), json!(tested));
    if let Some(reference) = reference {
        map.insert("against".into(), json!(reference));
    }
    map
}

/// Exit code 3 with a line on stderr if `value` went past `threshold`.
pub fn verdict(what: &str, value: f64, threshold: Option<f64>) -> ExitCode {
    match threshold {
        Some(threshold) if value > threshold || value.is_nan() => {
            strata::errln!("strata: {what} {value} is beyond the threshold of {threshold}");
            ExitCode::from(BEYOND_THRESHOLD)
        }
        _ => ExitCode::SUCCESS,
    }
}
