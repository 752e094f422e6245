//! `strata parity`: whether two runs say the same, token by token, and if not, where they part.

use crate::cli::comparison::{self, AgainstArgs, ReportArgs};
use crate::cli::failure::{BEYOND_THRESHOLD, BadInput};
use crate::cli::model::{LoadedModel, ModelArgs};
use crate::cli::wording::{counted, quoted};
use crate::cli::{output, progress, settings};
use anyhow::{Context, Result};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;
use strata_core::compare::{
    Candidate, CaseReport, Difference, ParityReport, PromptSource, Reference, ReferenceCase, TraceReport, compare,
    record, trace,
};
use strata_core::output::write_whole;
use strata_core::text::{PromptPiece, Specials, TemplateInput, Tokenizer, encode_chat};

/// Candidates kept per token of a recorded run.
const KEPT: usize = 10;
/// Most tokens of a case that are traced layer by layer.
const TRACED: usize = 256;
/// Differences shown per case.
const SHOWN: usize = 3;

/// Prompts compared where none are given: an answer, code, counting, other scripts, thinking aloud.
const PROMPTS: [&str; 6] = [
    "Tell me a story about a cow and a knife.",
    "Write a Python function that removes duplicates from a list.",
    "List the numbers from 18 to 26.",
    "What is 67 + 18?",
    "Größe und Café: 你好 🙂 नमस्ते",
    "Who are you, and what can you do?",
];

/// Token-by-token comparison of two runs: two files, two settings, or a saved reference
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// The reference: another GGUF file
    #[arg(long, value_name = "FILE", conflicts_with = "reference", required_unless_present_any = ["reference", "save"])]
    against: Option<PathBuf>,
    #[command(flatten)]
    against_settings: AgainstArgs,
    /// The reference: a run saved with --save, or made of llama.cpp by scripts/make_greedy_goldens.py
    #[arg(long, value_name = "FILE")]
    reference: Option<PathBuf>,
    /// Record the model's own run as a reference for later
    #[arg(long, value_name = "FILE", conflicts_with_all = ["against", "reference"])]
    save: Option<PathBuf>,
    /// Prompt; may be given several times [default: a few of different kinds]
    #[arg(short, long, value_name = "TEXT")]
    prompt: Vec<String>,
    /// Compare along the tokens of a text instead of generating
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,
    /// Prompts are text as it stands, without the chat template
    #[arg(long)]
    raw: bool,
    /// Tokens per prompt, if the answer does not end before, or at most so many of the text
    #[arg(short, long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    n_predict: u32,
    /// Two candidates within so many nats of each other on both sides are a near tie
    #[arg(long, value_name = "NATS", default_value_t = 0.1, allow_negative_numbers = true, value_parser = settings::bound)]
    near_tie: f64,
    /// Exit with code 3 also if a log-probability differs by more nats
    #[arg(long, value_name = "NATS", allow_negative_numbers = true, value_parser = settings::bound)]
    max_difference: Option<f64>,
    /// Compare the hidden state after every layer, and the tensors of the first layer that differs
    #[arg(long, requires = "against")]
    trace: bool,
    /// Relative difference from which a layer counts as different
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, requires = "trace", allow_negative_numbers = true, value_parser = settings::bound)]
    trace_tolerance: f64,
    #[command(flatten)]
    report: ReportArgs,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    output::check(&[args.save.as_deref()], &[args.model.model.as_deref(), args.file.as_deref()])?;
    let tested = LoadedModel::load(&args.model)?;
    if let Some(path) = &args.save {
        let reference = record_all(&args, &tested)?;
        write_whole(path, (serde_json::to_string(&reference)? + "\n").as_bytes())?;
        strata::errln!("strata: {} recorded in {}", counted(reference.cases.len(), "case"), path.display());
        return Ok(ExitCode::SUCCESS);
    }
    let against = args.against.as_deref().map(|path| args.against_settings.load(path, &args.model)).transpose()?;
    let reference = match (&against, &args.reference) {
        (Some(loaded), _) => record_all(&args, loaded)?,
        (None, Some(path)) => {
            let text = crate::cli::input::read_text(path)?;
            serde_json::from_str(&text)
                .map_err(|error| BadInput::new(format!("{}: not a saved reference: {error}", path.display())))?
        }
        (None, None) => return Err(BadInput::new("nothing to compare with").into()),
    };

    let bar = progress::count(reference.cases.len() as u64, "prompts");
    let mut report = ParityReport::default();
    for case in &reference.cases {
        let prompt = case.source.as_ref().map(|source| encode(&tested, source)).transpose()?;
        report.cases.push(compare(&tested.model, case, prompt.as_deref(), args.near_tie, tested.tokenizer.eos_ids())?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let traced = match &against {
        Some(loaded) if args.trace => Some(run_trace(&args, loaded, &tested, &reference, &report)?),
        _ => None,
    };
    print(&args, &tested, &reference, &report, traced.as_ref())?;
    if report.mismatches() > 0 {
        strata::errln!("strata: the runs differ clearly in {}", counted(report.mismatches(), "place"));
        return Ok(ExitCode::from(BEYOND_THRESHOLD));
    }
    let largest = report.figures().get("largest_difference").unwrap_or(0.0);
    Ok(comparison::verdict("the largest difference of a log-probability,", largest, args.max_difference))
}

/// The prompt's tokens as `side` encodes them.
fn encode(side: &LoadedModel, source: &PromptSource) -> Result<Vec<u32>> {
    if source.raw {
        let mut tokens: Vec<u32> = comparison::bos(&side.tokenizer).into_iter().collect();
        tokens.extend(side.tokenizer.encode(&source.text, Specials::AsText)?);
        return Ok(tokens);
    }
    let template = side.template.as_ref().ok_or_else(|| {
        BadInput::new(format!("{} has no chat template", side.file.name())).hint("compare without one: --raw")
    })?;
    let input = TemplateInput {
        messages: json!([{"role": "user", "content": source.text}]),
        add_generation_prompt: true,
        enable_thinking: Some(false),
        ..TemplateInput::default()
    };
    let prompt = encode_chat(template, &side.tokenizer, &input)?;
    let tokens = prompt.pieces.into_iter().filter_map(|piece| match piece {
        PromptPiece::Tokens(ids) => Some(ids),
        PromptPiece::Picture(_) => None,
    });
    Ok(tokens.flatten().collect())
}

fn record_all(args: &Args, side: &LoadedModel) -> Result<Reference> {
    if let Some(path) = &args.file {
        let text = comparison::read_text(path)?;
        let source = PromptSource { text, raw: true };
        let mut tokens = encode(side, &source)?;
        let most = side.model.config().context.min(args.n_predict as usize + 1);
        tokens.truncate(most);
        let Some((first, rest)) = tokens.split_first() else { return Err(BadInput::new("the text is empty").into()) };
        let name = path.display().to_string();
        return Ok(Reference { cases: vec![record(&side.model, &name, &[*first], Some(rest), 0, &[], KEPT)?] });
    }
    let texts: Vec<&str> = match args.prompt.as_slice() {
        [] => PROMPTS.to_vec(),
        given => given.iter().map(String::as_str).collect(),
    };
    let bar = progress::count(texts.len() as u64, "reference");
    let mut cases = Vec::new();
    for text in texts {
        let source = PromptSource { text: text.to_owned(), raw: args.raw };
        let prompt = encode(side, &source)?;
        let mut case =
            record(&side.model, text, &prompt, None, args.n_predict as usize, side.tokenizer.eos_ids(), KEPT)?;
        case.source = Some(source);
        cases.push(case);
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(Reference { cases })
}

/// Traces the first case that differs, up to its first difference; the first case where none does.
fn run_trace(
    args: &Args,
    against: &LoadedModel,
    tested: &LoadedModel,
    reference: &Reference,
    report: &ParityReport,
) -> Result<TraceReport> {
    let differs = |case: &CaseReport| case.prompt.is_some() || !case.differences.is_empty();
    let index = report.cases.iter().position(differs).unwrap_or(0);
    let case = reference.cases.get(index).context("the reference has no case")?;
    let steps = report.cases[index].differences.first().map_or(case.tokens.len(), |difference| difference.step);
    let mut tokens: Vec<u32> = case.prompt.iter().chain(&case.tokens[..steps]).copied().collect();
    tokens.truncate(TRACED);
    Ok(trace(&against.model, &tested.model, &tokens, args.trace_tolerance, Some((&against.file, &tested.file)))?)
}

fn print(
    args: &Args,
    tested: &LoadedModel,
    reference: &Reference,
    report: &ParityReport,
    traced: Option<&TraceReport>,
) -> Result<()> {
    let other = args.against.as_ref().or(args.reference.as_ref()).map(|path| path.display().to_string());
    let headline = format!("{} against {}", tested.file.name(), other.as_deref().unwrap_or_default());
    let mut details = comparison::sides(tested.file.name(), other.as_deref());
    details.insert("cases".into(), serde_json::to_value(&report.cases)?);
    if let Some(traced) = traced {
        details.insert("trace".into(), serde_json::to_value(traced)?);
    }
    args.report.print(&headline, &report.figures(), details)?;
    if args.report.json || args.report.csv {
        return Ok(());
    }
    for (case, recorded) in report.cases.iter().zip(&reference.cases) {
        print_case(case, recorded, &tested.tokenizer)?;
    }
    if let Some(traced) = traced {
        print_trace(traced)?;
    } else if report.mismatches() > 0 && args.against.is_some() {
        crate::cli::outln!("\nWhere in the network they part: --trace");
    }
    Ok(())
}

fn print_case(case: &CaseReport, recorded: &ReferenceCase, tokenizer: &Tokenizer) -> Result<()> {
    let name = quoted(&case.name);
    let piece = |id: u32| quoted(&tokenizer.decode(&[id]));
    if let Some(prompt) = &case.prompt {
        let side = |id: Option<u32>| id.map_or_else(|| "the end".to_owned(), piece);
        crate::cli::outln!(
            "\n{name}: the prompts differ at token {}: {} in the reference, {} here (another chat template or tokenizer)",
            prompt.position,
            side(prompt.reference),
            side(prompt.tested)
        );
        let from = prompt.position.saturating_sub(8);
        crate::cli::outln!(
            "  after {}",
            quoted(&tokenizer.decode(&recorded.prompt[from..prompt.position.min(recorded.prompt.len())]))
        );
    }
    for difference in case.differences.iter().take(SHOWN) {
        let Difference { step, reference_gap, tested_gap, near_tie, .. } = difference;
        let kind = if *near_tie { "near tie" } else { "mismatch" };
        crate::cli::outln!(
            "\n{name}: {kind} at token {step}: gap {reference_gap} nats in the reference, {tested_gap} here"
        );
        let from = step.saturating_sub(8);
        crate::cli::outln!("  after     {}", quoted(&tokenizer.decode(&recorded.tokens[from..*step])));
        for (side, candidates) in [("reference", &difference.reference), ("here", &difference.tested)] {
            let list: Vec<String> =
                candidates.iter().map(|Candidate { id, log_prob }| format!("{} {log_prob}", piece(*id))).collect();
            crate::cli::outln!("  {side:9} {}", list.join("  "));
        }
    }
    if case.differences.len() > SHOWN {
        crate::cli::outln!("  and {}", counted(case.differences.len() - SHOWN, "further difference"));
    }
    Ok(())
}

fn print_trace(traced: &TraceReport) -> Result<()> {
    crate::cli::outln!("\nHidden state after every layer, {}:", counted(traced.rows, "row"));
    crate::cli::outln!("  {:32} {:>14} {:>14}  first row", "stage", "relative", "largest");
    for stage in &traced.stages {
        let row = stage.first_row.map_or_else(|| "-".to_owned(), |row| row.to_string());
        crate::cli::outln!("  {:32} {:>14} {:>14}  {row}", stage.name, stage.relative, stage.largest);
    }
    match traced.first.map(|first| &traced.stages[first]) {
        None => crate::cli::outln!("No difference."),
        Some(stage) => {
            crate::cli::outln!("The first difference appears in: {}", stage.name);
            if traced.tensors.is_empty() {
                crate::cli::outln!(
                    "  its tensors are the same in both files: a setting, a kernel or the metadata differs"
                );
            }
            for tensor in traced.tensors.iter().take(8) {
                crate::cli::outln!("  {tensor}");
            }
        }
    }
    Ok(())
}
