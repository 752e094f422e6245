//! Reads what the model says while it arrives: reasoning (`<think>`), text for the user, and tool calls in the XML form
//! of the Qwen family.
//!
//! ```text
//! <tool_call>
//! <function=NAME>
//! <parameter=PARAMETER>
//! value
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//! What comes out depends on the text alone, not on how it was cut into pieces: whatever a tag could still turn into
//! another reading is held back until it is decided.

mod parser;
mod schema;
#[cfg(test)]
mod tests;

pub use parser::OutputParser;
pub use schema::{ParameterTypes, ToolSchemas};

/// How to read an answer.
#[derive(Debug, Clone, Default)]
pub struct OutputMode {
    /// The prompt ended inside `<think>`, so the answer starts with reasoning.
    pub starts_in_reasoning: bool,
    /// Tools on offer; `None` leaves tags of tool calls in the text.
    pub tools: Option<ToolSchemas>,
    /// Reasoning comes out as it was said, with its tags and the blanks around them: for whoever shows all in one text.
    pub keep_reasoning_tags: bool,
    /// Starts the ids of tool calls, so that they are unique across answers: `call_<prefix>_<index>`.
    pub id_prefix: String,
}

/// A piece of an answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Further reasoning.
    Reasoning(String),
    /// Further text for the user.
    Content(String),
    /// A tool call begins.
    ToolCallStart {
        /// Counts the calls of an answer from 0.
        index: usize,
        /// Unique id.
        id: String,
        /// The function's name.
        name: String,
    },
    /// Further arguments of a call, as JSON text; all of a call's together are one object.
    ToolCallArguments {
        /// Which call.
        index: usize,
        /// What comes after the arguments so far.
        delta: String,
    },
    /// The call is complete. A call cut off by the token limit has no such piece, and its arguments are cut off too.
    ToolCallEnd {
        /// Which call.
        index: usize,
    },
}

/// A tool call of a whole answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ToolCall {
    /// Unique id.
    pub id: String,
    /// The function's name.
    pub name: String,
    /// A JSON object as text; cut off where the answer was.
    pub arguments: String,
    /// Whether the call was closed.
    pub complete: bool,
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Output {
    /// All reasoning.
    pub reasoning: String,
    /// All text for the user.
    pub content: String,
    /// The calls in order.
    pub tool_calls: Vec<ToolCall>,
}

impl Output {
    /// Puts pieces together.
    pub fn extend(&mut self, pieces: impl IntoIterator<Item = Piece>) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => self.reasoning.push_str(&text),
                Piece::Content(text) => self.content.push_str(&text),
                Piece::ToolCallStart { id, name, .. } => {
                    self.tool_calls.push(ToolCall { id, name, ..Default::default() });
                }
                Piece::ToolCallArguments { index, delta } => {
                    if let Some(call) = self.tool_calls.get_mut(index) {
                        call.arguments.push_str(&delta);
                    }
                }
                Piece::ToolCallEnd { index } => {
                    if let Some(call) = self.tool_calls.get_mut(index) {
                        call.complete = true;
                    }
                }
            }
        }
    }

    /// Reads a whole answer at once.
    pub fn parse(text: &str, mode: OutputMode) -> Self {
        let mut output = Self::default();
        let mut parser = OutputParser::new(mode);
        output.extend(parser.push(text));
        output.extend(parser.finish());
        output
    }
}
