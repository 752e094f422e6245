//! One answer: its events, shown as they come and collected.

use crate::cli::interrupt::Interrupt;
use crate::cli::model::LoadedModel;
use anyhow::{Result, bail};
use std::io::Write;
use std::time::Duration;
use strata_core::engine::{Event, FinishReason, RequestStats, RequestStream};
use strata_core::text::output::{OutputMode, OutputParser, Piece};

/// How often a waiting answer looks for Ctrl-C.
const POLL: Duration = Duration::from_millis(50);

/// What of an answer goes to stdout while it comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Nothing; it is printed in another form later.
    Nothing,
    /// The text.
    Text,
    /// Reasoning and text.
    WithReasoning {
        /// Reasoning in a terminal's dim style.
        dimmed: bool,
    },
}

/// A complete answer.
pub struct Answer {
    /// The text after the reasoning.
    pub text: String,
    /// The reasoning, empty where there was none.
    pub reasoning: String,
    /// Generated token ids.
    pub ids: Vec<u32>,
    /// Why it ended.
    pub reason: FinishReason,
    /// Numbers of the request.
    pub stats: RequestStats,
    /// The user stopped it.
    pub interrupted: bool,
}

impl Answer {
    /// The JSON form of `strata run --json`.
    pub fn json(&self, loaded: &LoadedModel) -> serde_json::Value {
        serde_json::json!({
            "model": loaded.model.config().name,
            "text": self.text,
            "reasoning": self.reasoning,
            "tokens": self.ids,
            "finish_reason": reason_name(&self.reason),
            "timings": super::summary::json(self, &loaded.model),
        })
    }
}

/// The word for a finish reason in `--json`.
fn reason_name(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::EndToken(_) | FinishReason::StopString(_) | FinishReason::GrammarEnd => "stop",
        FinishReason::Length => "length",
        FinishReason::ContextFull => "context",
        FinishReason::Cancelled | FinishReason::Stopping => "cancelled",
    }
}

/// Reads the stream to its end. In raw mode nothing is parsed: all text is the answer.
pub fn collect(
    mut stream: RequestStream,
    starts_in_reasoning: bool,
    raw: bool,
    shown: Shown,
    interrupt: &Interrupt,
) -> Result<Answer> {
    let mut printer = Printer { shown, part: Part::Nothing, at_line_start: true };
    let mut parser = (!raw).then(|| OutputParser::new(OutputMode { starts_in_reasoning, ..OutputMode::default() }));
    let (mut text, mut reasoning, mut ids) = (String::new(), String::new(), Vec::new());
    let mut take = |pieces: Vec<Piece>, printer: &mut Printer| -> Result<()> {
        for piece in pieces {
            match piece {
                Piece::Reasoning(part) => {
                    printer.reasoning(&part)?;
                    reasoning.push_str(&part);
                }
                Piece::Content(part) => {
                    printer.text(&part)?;
                    text.push_str(&part);
                }
                Piece::ToolCallStart { .. } | Piece::ToolCallArguments { .. } | Piece::ToolCallEnd { .. } => {}
            }
        }
        Ok(())
    };
    let parse = |parser: &mut Option<OutputParser>, part: &str| match parser {
        Some(parser) => parser.push(part),
        None => vec![Piece::Content(part.to_owned())],
    };
    let (reason, stats, interrupted) = loop {
        if interrupt.pending() {
            // Dropping the stream frees the slot; what came so far stays on the screen.
            break (FinishReason::Cancelled, RequestStats::default(), true);
        }
        match stream.recv_timeout(POLL) {
            Err(()) | Ok(Some(Event::Started { .. })) => {}
            Ok(Some(Event::Token { id, text, .. })) => {
                ids.push(id);
                take(parse(&mut parser, &text), &mut printer)?;
            }
            Ok(Some(Event::Finished { reason, text, stats })) => {
                take(parse(&mut parser, &text), &mut printer)?;
                break (reason, stats, false);
            }
            Ok(Some(Event::Failed(problem))) => bail!("the request failed: {problem}"),
            Ok(None) => bail!("the engine ended before the answer did"),
        }
    };
    if let Some(parser) = &mut parser {
        take(parser.finish(), &mut printer)?;
    }
    printer.end()?;
    Ok(Answer { text, reasoning, ids, reason, stats, interrupted })
}

/// Which part of an answer was printed last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Nothing,
    Reasoning,
    Text,
}

/// Writes the parts of an answer to stdout. Reasoning is dim on a terminal and between `<think>` and `</think>` elsewhere.
struct Printer {
    shown: Shown,
    part: Part,
    at_line_start: bool,
}

impl Printer {
    fn reasoning(&mut self, part: &str) -> Result<()> {
        let Shown::WithReasoning { dimmed } = self.shown else { return Ok(()) };
        if self.part != Part::Reasoning {
            self.part = Part::Reasoning;
            self.write(if dimmed { "\x1b[2m" } else { "<think>\n" })?;
        }
        self.write(part)
    }

    fn text(&mut self, part: &str) -> Result<()> {
        if self.shown == Shown::Nothing {
            return Ok(());
        }
        self.end_reasoning(true)?;
        self.part = Part::Text;
        self.write(part)
    }

    /// Closes reasoning that was shown; `text_follows` after a blank line.
    fn end_reasoning(&mut self, text_follows: bool) -> Result<()> {
        let Shown::WithReasoning { dimmed } = self.shown else { return Ok(()) };
        if self.part != Part::Reasoning {
            return Ok(());
        }
        self.part = Part::Nothing;
        if !self.at_line_start {
            self.write("\n")?;
        }
        self.write(if dimmed { "\x1b[0m" } else { "</think>\n" })?;
        if text_follows { self.write("\n") } else { Ok(()) }
    }

    fn write(&mut self, part: &str) -> Result<()> {
        let mut out = std::io::stdout().lock();
        out.write_all(part.as_bytes())?;
        out.flush()?;
        if !part.is_empty() && !part.starts_with('\x1b') {
            self.at_line_start = part.ends_with('\n');
        }
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.end_reasoning(false)?;
        if self.shown != Shown::Nothing && !self.at_line_start {
            self.write("\n")?;
        }
        Ok(())
    }
}
