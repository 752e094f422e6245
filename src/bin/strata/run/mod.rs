//! `strata run`: text from a prompt, a file, a pipe, or a conversation at the terminal.
//!
//! The answer goes to stdout and everything else to stderr, so that `strata run -p ... > file` holds the answer alone.

mod answer;
mod conversation;
mod summary;

use crate::cli::failure::BadInput;
use crate::cli::input;
use crate::cli::interrupt::Interrupt;
use crate::cli::model::{LoadedModel, ModelArgs, VisionArgs};
use crate::cli::settings::{self, DraftArgs, SamplingArgs};
use answer::{Answer, Shown};
use anyhow::{Context, Result, anyhow};
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use strata_core::engine::{Engine, EngineHandle, EngineOptions, FinishReason, Prompt, Request, SubmitError};
use strata_core::text::{Specials, TemplateInput, encode_chat};
use strata_core::vision::{PictureReader, PictureRows};

/// Rows of context unless told otherwise.
const DEFAULT_CONTEXT: usize = 4096;

/// How long to wait for a pipe's end without a word.
const SILENT_PIPE: Duration = Duration::from_secs(2);

/// Arguments of `strata run`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    vision: VisionArgs,
    /// Prompt; a user's message unless --raw is given. Text piped in follows it after a blank line
    #[arg(short, long, value_name = "TEXT", conflicts_with = "file")]
    prompt: Option<String>,
    /// Read the prompt from a file
    #[arg(short, long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Picture for the prompt (PNG, JPEG, WebP, GIF, BMP; `-` reads one from stdin); may be repeated
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
    /// System message
    #[arg(long, visible_alias = "system-prompt", value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,
    /// Continue the prompt as it stands: no chat template. Special tokens in it are read as such
    #[arg(long, conflicts_with_all = ["image", "interactive"])]
    raw: bool,
    /// Talk in turns at the terminal [default: when there is no prompt and stdin is a terminal]
    #[arg(short, long, conflicts_with = "json")]
    interactive: bool,
    /// Whether the model reasons before it answers [default: as the template has it]
    #[arg(long, value_name = "WHEN")]
    think: Option<settings::Think>,
    /// Show the reasoning also when stdout is no terminal
    #[arg(long)]
    show_thinking: bool,
    /// Most tokens to generate [default: up to the end of the context]
    #[arg(short, long, visible_alias = "predict", value_name = "N", allow_negative_numbers = true)]
    n_predict: Option<i64>,
    /// Context in tokens; 0 takes what the model was trained for [default: 4096, or that where it is less]
    #[arg(short, long, value_name = "N")]
    ctx_size: Option<usize>,
    /// Rows of a prompt chunk
    #[arg(long, visible_aliases = ["ubatch-size", "ub"], value_name = "N", default_value_t = 512, value_parser = settings::positive)]
    prefill: usize,
    /// Print one JSON object with text, reasoning, token ids and timings instead of the text
    #[arg(long)]
    json: bool,
    /// No timing line
    #[arg(short, long)]
    quiet: bool,
    // Options of their own headings come last: what follows one would stand under it.
    #[command(flatten)]
    sampling: SamplingArgs,
    #[command(flatten)]
    drafts: DraftArgs,
}

/// Everything a turn needs: the loaded model, its engine and the settings.
struct Session {
    loaded: LoadedModel,
    engine: EngineHandle,
    reader: Option<PictureReader>,
    interrupt: Interrupt,
    args: Args,
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    args.sampling.check()?;
    if !args.quiet {
        args.sampling.warn_if_ignored();
    }
    let interactive = args.interactive
        || (args.prompt.is_none()
            && args.file.is_none()
            && args.image.is_empty()
            && !args.raw
            && !args.json
            && std::io::stdin().is_terminal());
    // What can be wrong with the arguments is found before a large model is opened.
    let prompt = if interactive { None } else { Some(read_prompt(&args)?) };
    let pictures = read_picture_files(&args.image)?;
    let loaded = LoadedModel::load(&args.model)?;
    let reader = match pictures.is_empty() && !interactive {
        true => None,
        false => loaded.picture_reader(&args.vision, args.model.threads(), !pictures.is_empty())?,
    };
    args.drafts.check_head(&loaded.model, loaded.file.name())?;
    let trained = loaded.model.config().context;
    let ctx = match args.ctx_size {
        None => DEFAULT_CONTEXT.min(trained),
        Some(0) => trained,
        Some(n) => n,
    };
    let options = EngineOptions {
        slots: 1,
        ctx,
        prompt_chunk: args.prefill,
        mtp: args.drafts.mtp(),
        ngram: args.drafts.ngram()?,
        draft_p_min: args.drafts.draft_p_min,
        draft_vocab: args.drafts.draft_vocab,
        ..EngineOptions::default()
    };
    let plan = strata_core::placement::MemoryPlan::new(&loaded.model, &options)?;
    plan.check()?;
    if !args.quiet && !args.json {
        strata::errln!("{plan}");
    }
    let engine = Engine::start(loaded.model.clone(), loaded.tokenizer.clone(), options)?;
    let session = Session { loaded, engine, reader, interrupt: Interrupt::catch(), args };
    match prompt {
        None => conversation::talk(&session),
        Some(prompt) => session.answer_once(prompt, &pictures),
    }
}

impl Session {
    fn answer_once(&self, prompt: String, pictures: &[(String, Vec<u8>)]) -> Result<ExitCode> {
        let pictures = self.read_pictures(pictures)?;
        let (prompt, starts_in_reasoning) = if self.args.raw {
            (Prompt::tokens(self.loaded.tokenizer.encode(&prompt, Specials::Parse)?), false)
        } else {
            self.chat_prompt(&self.first_messages(&prompt, pictures.len()), &pictures)?
        };
        let shown = if self.args.json { Shown::Nothing } else { self.shown() };
        let answer = self.ask(prompt, starts_in_reasoning, shown)?;
        if self.args.json {
            println_json(&answer.json(&self.loaded))?;
        } else if !self.args.quiet {
            strata::errln!("{}", summary::line(&answer, &self.loaded.model));
        }
        self.note_cut(&answer);
        if shown == Shown::Text && answer.text.is_empty() && !answer.reasoning.is_empty() && !answer.interrupted {
            strata::errln!(
                "strata: all {} tokens were reasoning, which is not shown here (--show-thinking shows it, --think no answers at once)",
                answer.ids.len()
            );
        }
        Ok(if answer.interrupted { ExitCode::from(crate::cli::failure::INTERRUPTED) } else { ExitCode::SUCCESS })
    }

    /// Says where an answer was cut: it looks like a complete one.
    fn note_cut(&self, answer: &Answer) {
        match (&answer.reason, self.args.n_predict) {
            (FinishReason::Length, Some(n)) => strata::errln!("strata: the answer was cut at -n {n}"),
            (FinishReason::ContextFull, _) => {
                strata::errln!("strata: the answer was cut: the context of {} tokens is full (-c)", self.engine.ctx());
            }
            _ => {}
        }
    }

    fn first_messages(&self, prompt: &str, pictures: usize) -> Vec<serde_json::Value> {
        let mut messages = Vec::new();
        if let Some(system) = &self.args.system {
            messages.push(serde_json::json!({"role": "system", "content": system}));
        }
        messages.push(user_message(prompt, pictures));
        messages
    }

    /// Renders and encodes a conversation. Returns the prompt and whether the answer starts inside a reasoning block.
    fn chat_prompt(&self, messages: &[serde_json::Value], pictures: &[Arc<PictureRows>]) -> Result<(Prompt, bool)> {
        let template = self.loaded.template.as_ref().ok_or_else(|| {
            BadInput::new(format!("{} has no chat template", self.loaded.file.name()))
                .hint("use --raw to continue the prompt as it stands")
        })?;
        let input = TemplateInput {
            messages: serde_json::Value::Array(messages.to_vec()),
            add_generation_prompt: true,
            enable_thinking: self.args.think.map(|think| think == settings::Think::Yes),
            ..TemplateInput::default()
        };
        let chat = encode_chat(template, &self.loaded.tokenizer, &input)?;
        let prompt = Prompt::from_chat(&chat, pictures)
            .map_err(|index| anyhow!("the template asks for picture {index}, but {} were given", pictures.len()))?;
        Ok((prompt, chat.starts_in_reasoning))
    }

    /// Encodes pictures given as (name, file contents).
    fn read_pictures(&self, pictures: &[(String, Vec<u8>)]) -> Result<Vec<Arc<PictureRows>>> {
        if pictures.is_empty() {
            return Ok(Vec::new());
        }
        let reader = self.reader.as_ref().ok_or_else(|| {
            BadInput::new("a picture was given, but no vision encoder is open")
                .hint("give one with --mmproj FILE (make it with `strata convert HF_DIR --mmproj FILE`), and do not use --vision no")
        })?;
        pictures
            .iter()
            .map(|(name, bytes)| {
                let picture = reader.read(bytes).with_context(|| format!("cannot use picture {name}"))?;
                for note in &picture.notes {
                    strata::errln!("strata: {name}: {note}");
                }
                Ok(picture.rows)
            })
            .collect()
    }

    /// Runs one request, showing its text as it comes.
    fn ask(&self, prompt: Prompt, starts_in_reasoning: bool, shown: Shown) -> Result<Answer> {
        let args = &self.args;
        let request = Request {
            prompt,
            sampling: args.sampling.sampling(),
            max_tokens: args.n_predict.and_then(|n| usize::try_from(n).ok()),
            stop: args.sampling.stop.clone(),
            ignore_eos: args.sampling.ignore_eos,
            starts_in_reasoning,
            thinking_budget: args.sampling.reasoning_budget,
            show_specials: args.raw,
            ..Request::default()
        };
        self.engine.wait_ready();
        let stream = self.engine.submit(request).map_err(named_by_flag)?;
        answer::collect(stream, starts_in_reasoning, args.raw, shown, &self.interrupt)
    }

    fn shown(&self) -> Shown {
        let terminal = std::io::stdout().is_terminal();
        if terminal || self.args.show_thinking { Shown::WithReasoning { dimmed: terminal } } else { Shown::Text }
    }
}

/// The engine's refusal of a field ("top_p: ...") with the flag the user typed.
fn named_by_flag(error: SubmitError) -> anyhow::Error {
    let SubmitError::Invalid(problem) = &error else { return error.into() };
    match problem.split_once(": ") {
        Some((field, problem)) if !field.contains(' ') => {
            let flag = if field == "temperature" { "temp".to_owned() } else { field.replace('_', "-") };
            BadInput::new(format!("--{flag}: {problem}")).into()
        }
        _ => error.into(),
    }
}

/// A user's message in the template's form: text after its pictures.
fn user_message(text: &str, pictures: usize) -> serde_json::Value {
    if pictures == 0 {
        return serde_json::json!({"role": "user", "content": text});
    }
    let mut parts = vec![serde_json::json!({"type": "image"}); pictures];
    parts.push(serde_json::json!({"type": "text", "text": text}));
    serde_json::json!({"role": "user", "content": parts})
}

/// The prompt: -p, a file or stdin; and where text is piped in beside -p, both with a blank line between them.
fn read_prompt(args: &Args) -> Result<String> {
    let text = match (&args.prompt, &args.file) {
        (Some(prompt), _) if piped_text(args) => match read_piped(args)? {
            piped if piped.is_empty() => prompt.clone(),
            piped if prompt.is_empty() => piped,
            piped => format!("{prompt}\n\n{piped}"),
        },
        (Some(prompt), _) => prompt.clone(),
        (None, Some(path)) => read_text(args, path)?,
        (None, None) if args.image.iter().any(|path| path.as_os_str() == "-") => {
            return Err(BadInput::new("stdin holds the picture, so the prompt must come with -p or -f").into());
        }
        (None, None) if std::io::stdin().is_terminal() => {
            return Err(BadInput::new("no prompt").hint("give one with -p TEXT, -f FILE or on stdin").into());
        }
        (None, None) => read_text(args, Path::new("-"))?,
    };
    if text.is_empty() {
        let from = match (&args.prompt, &args.file) {
            (Some(_), _) => "-p".to_owned(),
            (None, Some(path)) => path.display().to_string(),
            (None, None) => "stdin".to_owned(),
        };
        return Err(BadInput::new(format!("the prompt from {from} is empty")).into());
    }
    Ok(text)
}

/// Text of a file or of stdin. The last line break ends the line and does not belong to a message.
fn read_text(args: &Args, path: &Path) -> Result<String> {
    let name = if path.as_os_str() == "-" { "stdin".to_owned() } else { path.display().to_string() };
    let mut text = input::text(&name, input::read(path)?)?;
    if !args.raw && text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    Ok(text)
}

/// The text piped in beside -p. Programs that start others may leave a pipe open for ever: a line says what is waited for.
fn read_piped(args: &Args) -> Result<String> {
    let (done, waits) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        if waits.recv_timeout(SILENT_PIPE) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
            strata::errln!(
                "strata: waiting for the end of stdin, which follows the prompt (`< /dev/null` keeps it out)"
            );
        }
    });
    let text = read_text(args, Path::new("-"));
    drop(done);
    text
}

/// Whether stdin is a pipe or a file with text for the prompt; not where it holds a picture, and not a terminal or a device.
fn piped_text(args: &Args) -> bool {
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().map(std::fs::File::from);
    let kind = stdin.and_then(|file| file.metadata()).map(|meta| meta.file_type());
    !args.image.iter().any(|path| path.as_os_str() == "-") && kind.is_ok_and(|kind| kind.is_fifo() || kind.is_file())
}

fn read_picture_files(paths: &[PathBuf]) -> Result<Vec<(String, Vec<u8>)>> {
    let stdin = paths.iter().filter(|path| path.as_os_str() == "-").count();
    if stdin > 1 {
        return Err(BadInput::new("--image - can be given once: stdin holds one picture").into());
    }
    paths.iter().map(|path| read_picture_file(path)).collect()
}

fn read_picture_file(path: &Path) -> Result<(String, Vec<u8>)> {
    let name = if path.as_os_str() == "-" { "stdin".to_owned() } else { path.display().to_string() };
    Ok((name, input::read(path)?))
}

fn println_json(value: &serde_json::Value) -> Result<()> {
    use std::io::Write;
    let mut out = std::io::stdout().lock();
    serde_json::to_writer_pretty(&mut out, value)?;
    writeln!(out)?;
    Ok(())
}
