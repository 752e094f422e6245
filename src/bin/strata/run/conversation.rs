//! The conversation at the terminal: turns with history, pictures, and commands that start with a slash.

use super::{Session, read_picture_file, summary, user_message};
use anyhow::{Context, Result};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use strata_core::engine::{FinishReason, SubmitError};
use strata_core::vision::PictureRows;

const HELP: &str = "\
/image FILE   add a picture to the next message
/clear        start a new conversation
/system TEXT  set the system message and start a new conversation
/help         this list
/exit         leave (also Ctrl-D)
Ctrl-C stops an answer. A line that ends in \\ goes on in the next one.";

/// What was said so far.
struct Conversation {
    messages: Vec<serde_json::Value>,
    pictures: Vec<Arc<PictureRows>>,
    /// Pictures waiting for the next message.
    waiting: Vec<Arc<PictureRows>>,
}

impl Conversation {
    fn new(system: Option<&str>) -> Self {
        let messages = system.map(|text| serde_json::json!({"role": "system", "content": text})).into_iter().collect();
        Conversation { messages, pictures: Vec::new(), waiting: Vec::new() }
    }

    /// A new conversation, for which announced pictures still wait.
    fn restarted(self, system: Option<&str>) -> Self {
        Conversation { waiting: self.waiting, ..Conversation::new(system) }
    }

    /// What a new conversation still has of the old one.
    fn waiting_note(&self) -> String {
        match self.waiting.len() {
            0 => String::new(),
            1 => "; the picture still goes with your next message".to_owned(),
            n => format!("; the {n} pictures still go with your next message"),
        }
    }
}

/// Talks until the user leaves.
pub fn talk(session: &Session) -> Result<ExitCode> {
    let mut editor = DefaultEditor::new().context("cannot read from the terminal")?;
    let history = history_file();
    if let Some(path) = &history {
        // No history yet is the normal first start.
        let _ = editor.load_history(path);
    }
    let mut talk = Conversation::new(session.args.system.as_deref());
    if let Some(prompt) = &session.args.prompt {
        turn(session, &mut talk, prompt)?;
    }
    strata::errln!("Type a message, or /help.");
    while let Some(line) = read_message(&mut editor)? {
        let line = line.trim();
        if line.is_empty() {
            continue;
        }
        // A history that cannot be kept is no reason to end the conversation.
        let _ = editor.add_history_entry(line);
        match line.split_once(char::is_whitespace).unwrap_or((line, "")) {
            ("/exit" | "/quit", _) => break,
            ("/help", _) => strata::errln!("{HELP}"),
            ("/clear", _) => {
                talk = talk.restarted(session.args.system.as_deref());
                strata::errln!("a new conversation{}", talk.waiting_note());
            }
            ("/system", text) => {
                let text = text.trim();
                talk = talk.restarted((!text.is_empty()).then_some(text));
                let system = if text.is_empty() { "without a system message" } else { "with this system message" };
                strata::errln!("a new conversation {system}{}", talk.waiting_note());
            }
            ("/image", path) if path.trim().is_empty() => strata::errln!("usage: /image FILE"),
            ("/image", path) => match add_picture(session, Path::new(path.trim())) {
                Ok(picture) => talk.waiting.push(picture),
                Err(error) => strata::errln!("error: {error:#}"),
            },
            (command, _) if command.starts_with('/') => strata::errln!("unknown command {command}; /help lists them"),
            _ => {
                if let Err(error) = turn(session, &mut talk, line) {
                    strata::errln!("error: {error:#}");
                    if error
                        .chain()
                        .any(|cause| matches!(cause.downcast_ref(), Some(SubmitError::PromptTooLong { .. })))
                    {
                        strata::errln!(
                            "  hint: /clear starts a new conversation; start strata with a larger -c for longer ones"
                        );
                    }
                }
            }
        }
    }
    if let Some(path) = &history {
        let _ = path.parent().map(std::fs::create_dir_all);
        let _ = editor.save_history(path);
    }
    Ok(ExitCode::SUCCESS)
}

/// One message, over several lines where they end in a backslash. `None` at the end of input.
fn read_message(editor: &mut DefaultEditor) -> Result<Option<String>> {
    let mut message = String::new();
    loop {
        match editor.readline(if message.is_empty() { "> " } else { ". " }) {
            Ok(line) => match line.strip_suffix('\\') {
                Some(part) => {
                    message.push_str(part);
                    message.push('\n');
                }
                None => {
                    message.push_str(&line);
                    return Ok(Some(message));
                }
            },
            Err(ReadlineError::Interrupted) => return Ok(Some(String::new())),
            Err(ReadlineError::Eof) => return Ok(None),
            Err(error) => return Err(error).context("cannot read from the terminal"),
        }
    }
}

fn add_picture(session: &Session, path: &Path) -> Result<Arc<PictureRows>> {
    let picture = session.read_pictures(&[read_picture_file(path)?])?.remove(0);
    strata::errln!("picture of {} tokens; it goes with your next message", picture.rows());
    Ok(picture)
}

/// Asks and answers once. A turn that fails or was interrupted leaves the conversation as it was before.
fn turn(session: &Session, talk: &mut Conversation, text: &str) -> Result<()> {
    let mut messages = talk.messages.clone();
    messages.push(user_message(text, talk.waiting.len()));
    let pictures: Vec<_> = talk.pictures.iter().chain(&talk.waiting).cloned().collect();
    let (prompt, starts_in_reasoning) = session.chat_prompt(&messages, &pictures)?;
    session.interrupt.clear();
    let answer = session.ask(prompt, starts_in_reasoning, session.shown())?;
    if !session.args.quiet {
        strata::errln!("{}", summary::line(&answer, &session.loaded.model));
    }
    session.note_cut(&answer);
    if answer.reason == FinishReason::ContextFull {
        strata::errln!("strata: /clear starts a new conversation; start strata with a larger -c for longer ones");
    }
    session.interrupt.clear();
    if !answer.interrupted {
        messages.push(
            serde_json::json!({"role": "assistant", "content": answer.text, "reasoning_content": answer.reasoning}),
        );
        *talk = Conversation { messages, pictures, waiting: Vec::new() };
    }
    Ok(())
}

/// Where the lines typed so far are kept.
fn history_file() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
    let state = state.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state")))?;
    Some(state.join("strata/history"))
}
