//! `strata bench`: speed of reading and generating, with spread, bandwidth share and phases, side by side with llama.cpp.
//!
//! Every test is repeated; the first repetition after an engine has started is thrown away. With a peer, strata and the
//! peer take turns, so that both see the same machine. Figures are for people to read: nothing fails on a slow result.

mod figures;
mod journal;
mod ours;
mod peer;
mod plan;
mod serve_load;

use crate::cli::failure::BadInput;
use crate::cli::model::{LoadedModel, ModelArgs};
use crate::cli::progress;
use anyhow::Result;
use figures::Row;
use ours::Ours;
use peer::{Against, Peer, Setup};
use plan::{Mtp, Test, Text};
use serde_json::json;
use serve_load::{Form, ServeLoadArgs};
use std::path::PathBuf;
use std::process::ExitCode;
use strata_kernels::cpu::{Pool, bandwidth};

/// Parses a number of rows, far below where sums of them could overflow.
fn rows(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n <= 1 << 24).ok_or_else(|| format!("expected a number from 0 to {}", 1 << 24))
}

/// Arguments of `strata bench`.
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Rows to read, several separated by commas; 0 leaves reading out
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "512", aliases = ["n-prompt", "prefill"], value_parser = rows)]
    pp: Vec<usize>,
    /// Tokens to generate; 0 leaves generating out
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "64", alias = "n-gen", value_parser = rows)]
    tg: Vec<usize>,
    /// Rows each slot holds before
    #[arg(short, long, value_name = "N,...", value_delimiter = ',', default_value = "0", alias = "n-depth", value_parser = rows)]
    depth: Vec<usize>,
    /// Requests at the same time
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1", visible_alias = "batch")]
    parallel: Vec<usize>,
    /// Drafts by the MTP head: off, auto or 1 to 6
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "off")]
    mtp: Vec<Mtp>,
    /// Repetitions of each test, after one that is thrown away
    #[arg(short, long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    repetitions: u32,
    /// Text that prompts are cut from [default: a built-in mix of prose, figures and code]
    #[arg(long, value_name = "FILE")]
    prompt_file: Option<PathBuf>,
    /// Run a peer on the same file and take turns: llama-bench=PATH, llama-server=PATH or llama-server=URL
    #[arg(long, value_name = "PEER")]
    against: Option<Against>,
    /// A further argument for the peer (can be repeated)
    #[arg(long, value_name = "ARG", requires = "against", allow_hyphen_values = true)]
    against_arg: Vec<String>,
    /// Append the result to this file [default: bench.jsonl in the user's state folder]
    #[arg(long, value_name = "FILE", conflicts_with = "no_journal")]
    journal: Option<PathBuf>,
    /// Keep no journal
    #[arg(long)]
    no_journal: bool,
    /// Print JSON
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Print CSV
    #[arg(long)]
    csv: bool,
    #[command(flatten)]
    load: ServeLoadArgs,
}

/// A spread above this many percent means that something else moves the numbers.
const NOISY_PERCENT: f64 = 10.0;

/// Runs `strata bench`.
pub fn run(args: Args) -> Result<ExitCode> {
    if let Some(serve) = &args.load.serve {
        let against = match &args.against {
            None => None,
            Some(Against::ServerAt(url)) => Some(url.as_str()),
            Some(_) => {
                return Err(BadInput::new("--serve is measured against a running server")
                    .hint("--against llama-server=URL")
                    .into());
            }
        };
        let form = match (args.json, args.csv) {
            (true, _) => Form::Json,
            (false, true) => Form::Csv,
            (false, false) => Form::Text,
        };
        serve_load::run(&args.load, serve, against, form)?;
        return Ok(ExitCode::SUCCESS);
    }
    let journal = match (&args.journal, args.no_journal) {
        (_, true) => None,
        (Some(path), _) => {
            journal::check(path, &[args.model.model.as_deref(), args.prompt_file.as_deref()])?;
            Some(path.clone())
        }
        (None, _) => journal::default_path().filter(|path| match journal::check(path, &[]) {
            Ok(()) => true,
            Err(error) => {
                strata::errln!("warning: no journal is kept: {error}");
                false
            }
        }),
    };
    let own_text = match &args.prompt_file {
        None => None,
        Some(path) => Some(crate::cli::input::read_text(path)?),
    };
    let load_before = journal::load();
    let loaded = LoadedModel::load(&args.model)?;
    let text = Text::new(&loaded.tokenizer, own_text.as_deref())?;
    let tests = tests(&args, &loaded)?;
    let threads = args.model.threads();
    let read_bandwidth = bandwidth::measure(&Pool::new(threads));
    let file = loaded.file.paths().first().cloned();
    if args.against.is_some() && file.is_none() {
        return Err(BadInput::new("a peer needs a model file").hint("give one with -m FILE").into());
    }

    let rounds = args.repetitions as u64 + 1;
    let bar = progress::count(tests.len() as u64 * rounds, "measuring");
    let mut rows = Vec::new();
    let mut prompts_used = 0;
    for group in tests.chunk_by(|a, b| (a.parallel, a.mtp) == (b.parallel, b.mtp)) {
        let ctx = group.iter().map(Test::context).max().unwrap_or(2);
        let ours = Ours::start(loaded.model.clone(), loaded.tokenizer.clone(), &group[0], ctx)?;
        let setup = file.as_deref().map(|model| Setup { model, threads, ctx, arguments: &args.against_arg });
        let peer = match (&args.against, &setup) {
            (Some(against), Some(setup)) => Peer::start(against, setup, &group[0])?,
            _ => None,
        };
        for test in group {
            let (mut mine, mut theirs) = (Vec::new(), Vec::new());
            for round in 0..rounds {
                // New text for every request, so that nothing is held from the one before.
                let numbers = prompts_used..prompts_used + test.parallel;
                let prompts: Vec<_> = numbers.map(|n| text.prompt(n, test.context())).collect();
                prompts_used += test.parallel;
                // Whoever comes second finds warmer or colder caches: take turns in that too.
                let ours_first = round % 2 == 0;
                let mut sample = |first: bool| -> Result<()> {
                    if first == ours_first {
                        mine.push(ours.sample(test, &prompts)?);
                    } else if let Some(peer) = &peer {
                        theirs.push(peer.sample(test, &prompts)?);
                    }
                    Ok(())
                };
                sample(true)?;
                sample(false)?;
                bar.inc(1);
            }
            let name = args.against.as_ref().map(Against::name);
            let measured = name.map(|n| (n, theirs.get(1..).unwrap_or_default()));
            rows.push(Row::new(test, &mine[1..], measured, read_bandwidth));
        }
    }
    bar.finish_and_clear();

    let machine = journal::machine(read_bandwidth);
    let model = json!({
        "name": loaded.file.name(),
        "bytes": loaded.file.total_bytes(),
        "hash": format!("{:016x}", loaded.model.fingerprint()),
        "bytes_per_token": loaded.model.weight_bytes_per_token(),
    });
    let settings = json!({
        "threads": threads,
        "repetitions": args.repetitions,
        "prompt_file": args.prompt_file,
        "peer": args.against.as_ref().map(|a| format!("{a:?}")),
        "peer_arguments": args.against_arg,
        "load_before": load_before,
    });
    report(&args, &rows, &machine, &model, &settings)?;
    warn_of_noise(&rows, load_before);
    if let Some(path) = journal {
        journal::append(&path, &machine, &model, &settings, &rows)?;
        strata::errln!("strata: the result was added to {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// The tests that were asked for, each checked against the model.
fn tests(args: &Args, loaded: &LoadedModel) -> Result<Vec<Test>> {
    let tests = plan::tests(&args.pp, &args.tg, &args.depth, &args.parallel, &args.mtp);
    if tests.is_empty() {
        return Err(BadInput::new("nothing to measure: --pp and --tg are both 0").into());
    }
    if args.parallel.contains(&0) {
        return Err(BadInput::new("--parallel: expected at least 1, found 0").into());
    }
    let most = loaded.model.config().context;
    if let Some(test) = tests.iter().find(|t| t.context() > most) {
        let (name, rows) = (test.name(), test.context());
        let what = format!("{name} at depth {} needs a context of {rows} rows, the model has {most}", test.depth);
        return Err(BadInput::new(what).into());
    }
    if !loaded.model.has_mtp() && args.mtp.iter().any(|m| m.to_string() != "off") {
        let what = format!("{}: --mtp needs an MTP head, and this file has none", loaded.file.name());
        return Err(BadInput::new(what).hint("see how to restore it with `strata inspect`").into());
    }
    Ok(tests)
}

fn report(
    args: &Args,
    rows: &[Row],
    machine: &serde_json::Value,
    model: &serde_json::Value,
    settings: &serde_json::Value,
) -> Result<()> {
    if args.csv {
        crate::cli::out!("{}", figures::csv(rows));
    } else if args.json {
        let build = journal::build();
        let others = [("machine", machine), ("build", &build), ("model", model), ("settings", settings)];
        crate::cli::outln!("{}", figures::json(rows, others));
    } else {
        let text = |v: &serde_json::Value| v.as_str().unwrap_or("unknown").to_string();
        crate::cli::outln!(
            "{} · {} threads · {} · reads {} GB/s\n",
            text(&model["name"]),
            settings["threads"],
            text(&machine["cpu"]),
            machine["read_gb_s"]
        );
        crate::cli::out!("{}", figures::table(rows));
    }
    Ok(())
}

fn warn_of_noise(rows: &[Row], load_before: Option<f64>) {
    let noisy: Vec<_> = rows.iter().filter(|r| r.spread > NOISY_PERCENT).collect();
    if !noisy.is_empty() {
        let most = noisy.iter().map(|r| r.spread).fold(0.0, f64::max);
        strata::errln!(
            "warning: {} of {} tests spread by more than {NOISY_PERCENT} % (up to {most:.0} %): the machine is noisy, measure again when it is quiet",
            noisy.len(),
            rows.len()
        );
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    if let Some(load) = load_before.filter(|l| *l > cores * 0.5) {
        strata::errln!("warning: the machine was busy before the measurement began (load {load:.1} on {cores} cores)");
    }
}
