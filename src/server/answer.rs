//! One stream of answer pieces, whatever the API: engine events go through the reasoning and tool-call parser and come
//! out as [`Output`]s. Every route renders these; no route generates by itself.

use super::app::App;
use super::log::{Counts, RequestLog};
use futures::Stream;
use futures::stream::{SelectAll, StreamExt};
use serde_json::{Value, json};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use strata_core::engine::{Event, FinishReason, RequestStats, RequestStream, TokenLogprobs};
use strata_core::text::Tokenizer;
use strata_core::text::output::{OutputMode, OutputParser, Piece};

/// Why a choice failed that was not complete when the server's time to stop had come.
pub const CUT_BY_STOPPING: &str = "the server is stopping, and the answer was not complete";

/// A token's log-probability with its rivals, ready for any API.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenReport {
    /// The token's bytes (not always whole characters).
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The most likely tokens with theirs.
    pub top: Vec<(Vec<u8>, f32)>,
}

/// How a choice ended.
#[derive(Clone, Debug)]
pub struct Finish {
    /// Why.
    pub reason: FinishReason,
    /// The engine's numbers.
    pub stats: RequestStats,
    /// Generated tokens that were reasoning.
    pub reasoning_tokens: usize,
    /// A call was completed.
    pub called_tool: bool,
}

/// What a route hears about one choice.
#[derive(Clone, Debug)]
pub enum Output {
    /// The choice has a slot.
    Started {
        /// Rows of the prompt.
        prompt_rows: usize,
        /// Rows that were already held.
        reused_rows: usize,
    },
    /// Text, reasoning or part of a tool call.
    Piece(Piece),
    /// A token's log-probabilities, before the text it belongs to.
    Token(TokenReport),
    /// The choice is complete.
    Finished(Box<Finish>),
    /// The choice failed inside the engine.
    Failed(String),
}

/// How the text of a choice is read.
#[derive(Clone)]
pub struct Reading {
    /// Parse reasoning and tool calls; `None` passes the text through.
    pub mode: Option<OutputMode>,
    /// Reasoning is reported apart; otherwise it stays in the text.
    pub split_reasoning: bool,
    /// Report only the first tool call.
    pub single_call: bool,
    /// Text put before the answer's own (completions' `echo`).
    pub echo: Option<String>,
}

/// One choice: a request's events through the parser.
struct ChoiceStream {
    index: usize,
    events: RequestStream,
    tokenizer: Arc<Tokenizer>,
    reading: Reading,
    parser: Option<OutputParser>,
    ready: std::collections::VecDeque<Output>,
    in_reasoning: bool,
    reasoning_tokens: usize,
    called_tool: bool,
    done: bool,
    tokens: usize,
    counts: Arc<Counts>,
}

impl ChoiceStream {
    fn take(&mut self, event: Event) {
        match event {
            Event::Started { prompt_rows, reused_rows } => {
                self.counts.prompt.fetch_add(prompt_rows, Ordering::Relaxed);
                self.counts.reused.fetch_add(reused_rows, Ordering::Relaxed);
                self.ready.push_back(Output::Started { prompt_rows, reused_rows });
                if let Some(text) = self.reading.echo.take() {
                    self.ready.push_back(Output::Piece(Piece::Content(text)));
                }
            }
            Event::Token { id, text, logprobs } => {
                self.tokens += 1;
                self.counts.generated.fetch_add(1, Ordering::Relaxed);
                if self.in_reasoning {
                    self.reasoning_tokens += 1;
                }
                if let Some(found) = logprobs {
                    self.ready.push_back(Output::Token(report(&self.tokenizer, id, &found)));
                }
                self.read(&text);
            }
            Event::Finished { reason, text, stats } => {
                // The token that ended the answer has no event of its own.
                self.counts.generated.fetch_add(stats.generated.saturating_sub(self.tokens), Ordering::Relaxed);
                self.read(&text);
                if let Some(mut parser) = self.parser.take() {
                    parser.finish().into_iter().for_each(|piece| self.piece(piece));
                }
                // No API has a word for this: as a finished answer it would look complete, or cut by the request's own limit.
                self.ready.push_back(match reason {
                    FinishReason::Stopping => Output::Failed(CUT_BY_STOPPING.to_owned()),
                    reason => Output::Finished(Box::new(Finish {
                        reason,
                        stats,
                        reasoning_tokens: self.reasoning_tokens,
                        called_tool: self.called_tool,
                    })),
                });
                self.done = true;
            }
            Event::Failed(message) => {
                self.ready.push_back(Output::Failed(message));
                self.done = true;
            }
        }
    }

    fn read(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match &mut self.parser {
            Some(parser) => parser.push(text).into_iter().for_each(|piece| self.piece(piece)),
            None => self.ready.push_back(Output::Piece(Piece::Content(text.to_owned()))),
        }
    }

    fn piece(&mut self, piece: Piece) {
        match &piece {
            Piece::Reasoning(text) if !self.reading.split_reasoning => {
                self.ready.push_back(Output::Piece(Piece::Content(text.clone())));
                return;
            }
            Piece::Reasoning(_) => {}
            Piece::Content(_) => self.in_reasoning = false,
            Piece::ToolCallStart { index, .. } | Piece::ToolCallArguments { index, .. } => {
                self.in_reasoning = false;
                if *index > 0 && self.reading.single_call {
                    return;
                }
            }
            Piece::ToolCallEnd { index } => {
                if *index > 0 && self.reading.single_call {
                    return;
                }
                self.called_tool = true;
            }
        }
        self.ready.push_back(Output::Piece(piece));
    }
}

impl Stream for ChoiceStream {
    type Item = (usize, Output);

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<(usize, Output)>> {
        let this = self.get_mut();
        loop {
            if let Some(output) = this.ready.pop_front() {
                return Poll::Ready(Some((this.index, output)));
            }
            if this.done {
                return Poll::Ready(None);
            }
            match this.events.poll_recv(context) {
                Poll::Ready(Some(event)) => this.take(event),
                Poll::Ready(None) => {
                    this.done = true;
                    return Poll::Ready(Some((this.index, Output::Failed("the engine ended the request".into()))));
                }
                Poll::Pending => return Poll::Pending,
            }
        }
    }
}

fn report(tokenizer: &Tokenizer, id: u32, found: &TokenLogprobs) -> TokenReport {
    TokenReport {
        bytes: tokenizer.token_bytes(id).to_vec(),
        logprob: found.logprob,
        top: found.top.iter().map(|&(id, p)| (tokenizer.token_bytes(id).to_vec(), p)).collect(),
    }
}

/// All choices of one request, merged in the order their events come. Dropping it cancels what still runs.
pub struct Answer {
    choices: SelectAll<ChoiceStream>,
    app: Arc<App>,
    log: RequestLog,
    /// Number of choices.
    pub count: usize,
}

impl Answer {
    /// Merges the event streams of a request's choices.
    pub fn new(
        app: Arc<App>,
        tokenizer: &Arc<Tokenizer>,
        streams: Vec<(RequestStream, Reading)>,
        log: RequestLog,
    ) -> Answer {
        let count = streams.len();
        let choices = streams.into_iter().enumerate().map(|(index, (events, reading))| ChoiceStream {
            index,
            events,
            tokenizer: tokenizer.clone(),
            parser: reading.mode.clone().map(OutputParser::new),
            in_reasoning: reading.mode.as_ref().is_some_and(|m| m.starts_in_reasoning),
            reading,
            ready: Default::default(),
            reasoning_tokens: 0,
            called_tool: false,
            done: false,
            tokens: 0,
            counts: log.counts(),
        });
        Answer { choices: choices.collect(), app, log, count }
    }

    /// Reads everything.
    pub async fn collect(mut self) -> Collected {
        let mut all = Collected::new(self.count);
        while let Some((choice, output)) = self.next().await {
            all.add(choice, &output);
        }
        all
    }
}

impl Stream for Answer {
    type Item = (usize, Output);

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<(usize, Output)>> {
        let this = self.get_mut();
        let next = this.choices.poll_next_unpin(context);
        if let Poll::Ready(Some((_, output))) = &next {
            match output {
                Output::Finished(finish) => {
                    this.app.metrics.finished(&finish.reason, &finish.stats);
                    this.log.finished(finish);
                }
                Output::Failed(message) => {
                    this.app.metrics.failed();
                    this.log.failed(message);
                }
                _ => {}
            }
        }
        next
    }
}

/// A stretch of an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Block {
    /// Thinking.
    Reasoning(String),
    /// Text for the user.
    Text(String),
    /// A tool call; its arguments are JSON text.
    Call {
        /// Id of the call.
        id: String,
        /// The function.
        name: String,
        /// JSON text of the arguments.
        arguments: String,
    },
}

/// A whole choice.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Its stretches in order; neighbours differ in kind, except calls.
    pub blocks: Vec<Block>,
    /// Token reports, if asked for.
    pub tokens: Vec<TokenReport>,
    /// How it ended.
    pub finish: Option<Finish>,
    /// Why it failed.
    pub failure: Option<String>,
}

impl Choice {
    /// All reasoning.
    pub fn reasoning(&self) -> String {
        self.blocks.iter().filter_map(|b| if let Block::Reasoning(t) = b { Some(t.as_str()) } else { None }).collect()
    }

    /// All text.
    pub fn text(&self) -> String {
        self.blocks.iter().filter_map(|b| if let Block::Text(t) = b { Some(t.as_str()) } else { None }).collect()
    }

    /// All calls: (id, name, arguments).
    pub fn calls(&self) -> impl Iterator<Item = (&str, &str, &str)> {
        self.blocks.iter().filter_map(|b| match b {
            Block::Call { id, name, arguments } => Some((id.as_str(), name.as_str(), arguments.as_str())),
            _ => None,
        })
    }

    /// Appends a piece.
    pub fn add_piece(&mut self, piece: &Piece) {
        match (piece, self.blocks.last_mut()) {
            (Piece::Reasoning(text), Some(Block::Reasoning(all))) | (Piece::Content(text), Some(Block::Text(all))) => {
                all.push_str(text);
            }
            (Piece::Reasoning(text), _) => self.blocks.push(Block::Reasoning(text.clone())),
            (Piece::Content(text), _) => self.blocks.push(Block::Text(text.clone())),
            (Piece::ToolCallStart { id, name, .. }, _) => {
                self.blocks.push(Block::Call { id: id.clone(), name: name.clone(), arguments: String::new() });
            }
            (Piece::ToolCallArguments { delta, .. }, Some(Block::Call { arguments, .. })) => arguments.push_str(delta),
            (Piece::ToolCallArguments { .. } | Piece::ToolCallEnd { .. }, _) => {}
        }
    }
}

/// All choices of an answer.
#[derive(Clone, Debug)]
pub struct Collected {
    /// By index.
    pub choices: Vec<Choice>,
}

impl Collected {
    /// Room for so many choices.
    pub fn new(count: usize) -> Collected {
        Collected { choices: vec![Choice::default(); count] }
    }

    /// Takes one output.
    pub fn add(&mut self, choice: usize, output: &Output) {
        let choice = &mut self.choices[choice];
        match output {
            Output::Started { .. } => {}
            Output::Piece(piece) => choice.add_piece(piece),
            Output::Token(token) => choice.tokens.push(token.clone()),
            Output::Finished(finish) => choice.finish = Some(finish.as_ref().clone()),
            Output::Failed(message) => choice.failure = Some(message.clone()),
        }
    }

    /// The first failure, if any choice failed.
    pub fn failure(&self) -> Option<&str> {
        self.choices.iter().find_map(|c| c.failure.as_deref())
    }

    /// Token counts over all choices. Choices of one prompt share it: it is counted once per `choices_per_prompt`.
    pub fn usage(&self, choices_per_prompt: usize) -> Usage {
        let mut usage = Usage::default();
        for (i, choice) in self.choices.iter().enumerate() {
            let Some(finish) = &choice.finish else { continue };
            if i % choices_per_prompt.max(1) == 0 {
                usage.prompt += finish.stats.prompt_rows;
                usage.cached += finish.stats.reused_rows;
            }
            usage.generated += finish.stats.generated;
            usage.reasoning += finish.reasoning_tokens;
        }
        usage
    }
}

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Rows of the prompts.
    pub prompt: usize,
    /// Prompt rows that were already held.
    pub cached: usize,
    /// Tokens generated.
    pub generated: usize,
    /// Generated tokens that were reasoning.
    pub reasoning: usize,
}

/// llama-server's `timings` object.
pub fn timings(stats: &RequestStats) -> Value {
    let read = stats.prompt_rows.saturating_sub(stats.reused_rows);
    let per = |n: usize, s: f64| if n == 0 { 0.0 } else { s * 1e3 / n as f64 };
    let rate = |n: usize, s: f64| if s > 0.0 { n as f64 / s } else { 0.0 };
    json!({
        "cache_n": stats.reused_rows,
        "prompt_n": read,
        "prompt_ms": stats.prompt_s * 1e3,
        "prompt_per_token_ms": per(read, stats.prompt_s),
        "prompt_per_second": rate(read, stats.prompt_s),
        "predicted_n": stats.generated,
        "predicted_ms": stats.decode_s * 1e3,
        "predicted_per_token_ms": per(stats.generated, stats.decode_s),
        "predicted_per_second": rate(stats.generated.saturating_sub(1), stats.decode_s),
        "longest_chunk_ms": stats.longest_chunk_s * 1e3,
        "longest_pause_ms": stats.longest_pause_s * 1e3,
        "draft_n": stats.drafted,
        "draft_n_accepted": stats.accepted,
    })
}
