//! `strata inspect`: what is in a model file, what strata can do with it, and what it lacks compared with another.

mod against;
mod hash;
mod list;
mod print;
mod report;
mod schema;

use crate::cli::failure::{BEYOND_THRESHOLD, BadInput};
use anyhow::Result;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use strata_core::checkpoint::Checkpoint;
use strata_core::convert::Pattern;
use strata_core::gguf::GgufFile;

/// Arguments of `strata inspect`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// A GGUF (any part of a split one), a safetensors folder, index or shard
    #[arg(required_unless_present = "tensors")]
    file: Option<PathBuf>,
    /// List tensors, all or those whose names hold PATTERN (`*` stands for anything, `^` and `$` for the ends)
    #[arg(long, value_name = "PATTERN", num_args = 0..=1, default_missing_value = "")]
    tensors: Option<String>,
    /// List all metadata
    #[arg(long)]
    metadata: bool,
    /// Hash the whole file
    #[arg(long)]
    sha256: bool,
    /// Compare with another GGUF, safetensors folder or index; exit code 3 when FILE lacks something the model needs
    #[arg(long, value_name = "OTHER", conflicts_with_all = ["tensors", "metadata", "sha256"])]
    against: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What a path turned out to be.
enum Opened {
    Gguf(GgufFile),
    Checkpoint(Checkpoint),
}

fn open(path: &Path) -> Result<Opened> {
    let name = path.to_string_lossy();
    if path.is_dir() || name.ends_with(".safetensors") || name.ends_with(".json") {
        return Ok(Opened::Checkpoint(Checkpoint::open(path)?));
    }
    Ok(Opened::Gguf(GgufFile::open(path)?))
}

/// Runs `strata inspect`.
pub fn run(mut args: Args) -> Result<ExitCode> {
    let path = file_of(&mut args)?;
    let opened = open(&path)?;
    let shown = path.display().to_string();
    if let Some(other) = &args.against {
        return compare(&args, shown, &opened, other);
    }
    if args.tensors.is_some() || args.metadata {
        print(&lists(&args, &opened)?)?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut inspected = match &opened {
        Opened::Gguf(file) => report::of_gguf(file)?,
        Opened::Checkpoint(checkpoint) => report::of_checkpoint(&shown, checkpoint)?,
    };
    if args.sha256 {
        inspected.report.sha256 = Some(hash::files(&inspected.report.parts, inspected.report.bytes)?);
    }
    print(&if args.json { json(&inspected.report)? } else { print::report(&inspected.report) })?;
    inspected.broken.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// The file to inspect. `--tensors FILE` reads as if FILE were the pattern; a path that is there is no pattern.
fn file_of(args: &mut Args) -> Result<PathBuf> {
    let given = args.file.take().filter(|file| !file.as_os_str().is_empty());
    let is_path = |text: &str| Path::new(text).exists();
    match (given, args.tensors.take()) {
        (None, Some(file)) if is_path(&file) => {
            args.tensors = Some(String::new());
            Ok(file.into())
        }
        (Some(pattern), Some(file)) if is_path(&file) && !pattern.exists() => {
            args.tensors = Some(pattern.to_string_lossy().into_owned());
            Ok(file.into())
        }
        (Some(file), tensors) => {
            args.tensors = tensors;
            Ok(file)
        }
        (None, _) => Err(BadInput::new("no FILE given").hint("strata inspect FILE --tensors PATTERN").into()),
    }
}

/// The lists that were asked for, as text or as one JSON object.
fn lists(args: &Args, opened: &Opened) -> Result<String> {
    let pattern = match args.tensors.as_deref() {
        None | Some("") => None,
        Some(text) => Some(Pattern::new(text)?),
    };
    let mut text = String::new();
    let mut object = serde_json::Map::new();
    if args.metadata {
        match opened {
            Opened::Gguf(file) if args.json => drop(object.insert("metadata".into(), list::metadata_json(file))),
            Opened::Gguf(file) => text.push_str(&list::metadata_table(file)),
            Opened::Checkpoint(c) => {
                let config = c.config().cloned().unwrap_or_default();
                text.push_str(&format!("{config:#}\n"));
                object.insert("metadata".into(), config);
            }
        }
    }
    if args.tensors.is_some() {
        let tensors = match opened {
            Opened::Gguf(file) => list::of_gguf(file, &pattern),
            Opened::Checkpoint(checkpoint) => list::of_checkpoint(checkpoint, &pattern),
        };
        if args.json {
            object.insert("tensors".into(), list::tensor_json(&tensors));
        } else if let (true, Some(pattern)) = (tensors.is_empty(), &pattern) {
            text.push_str(&format!("no tensor matches '{}'\n", pattern.text()));
        } else {
            text.push_str(&list::tensor_table(&tensors));
        }
    }
    if args.sha256 {
        let (parts, bytes) = match opened {
            Opened::Gguf(file) => (file.paths().to_vec(), file.total_bytes()),
            Opened::Checkpoint(c) => {
                ((0..c.shard_count()).map(|s| c.shard_path(s).to_path_buf()).collect(), c.total_bytes())
            }
        };
        let hashes = hash::files(&parts, bytes)?;
        for hash in &hashes {
            text.push_str(&format!("sha256  {}  {}\n", hash.sha256, hash.file.display()));
        }
        object.insert("sha256".into(), serde_json::to_value(hashes)?);
    }
    if args.json { json(&object) } else { Ok(text) }
}

fn compare(args: &Args, a: String, opened: &Opened, other: &Path) -> Result<ExitCode> {
    let b = other.display().to_string();
    let comparison = match (opened, &open(other)?) {
        (Opened::Gguf(x), Opened::Gguf(y)) => against::two_ggufs(x, y).map_err(BadInput::new)?,
        (Opened::Gguf(x), Opened::Checkpoint(y)) => against::with_checkpoint(x, &b, y).map_err(BadInput::new)?,
        (Opened::Checkpoint(x), Opened::Checkpoint(y)) => against::two_checkpoints(&a, x, &b, y),
        (Opened::Checkpoint(_), Opened::Gguf(_)) => {
            return Err(BadInput::new("a checkpoint cannot be held against a GGUF")
                .hint(format!("turn them round: strata inspect {b} --against {a}"))
                .into());
        }
    };
    print(&if args.json { json(&comparison)? } else { against::text(&comparison) })?;
    Ok(if comparison.lacks_something { ExitCode::from(BEYOND_THRESHOLD) } else { ExitCode::SUCCESS })
}

fn json(value: &impl serde::Serialize) -> Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

fn print(text: &str) -> Result<()> {
    Ok(std::io::stdout().lock().write_all(text.as_bytes())?)
}
