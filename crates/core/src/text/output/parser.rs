//! The state machine behind [`OutputParser`].

use serde_json::Value as Json;

use super::{OutputMode, Piece};

const THINK: &str = "<think>";
const END_THINK: &str = "</think>";
const CALL: &str = "<tool_call>";
const END_CALL: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const END_FUNCTION: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const END_PARAMETER: &str = "</parameter>";
/// Longest name of a function or parameter; what is longer is no call.
const LONGEST_NAME: usize = 256;

/// Where in the answer the text not yet read begins.
#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// At the very start: a `<think>` may open.
    Start,
    /// Inside `<think>`, before its first word.
    ReasoningStart,
    Reasoning,
    /// Reasoning that comes out as it is, up to its closing tag.
    RawReasoning,
    /// After reasoning or a call: blanks before the next text are not part of it.
    ContentStart,
    Content,
    /// Behind `<tool_call>`; the function's name is still to come.
    Call,
    /// Inside a function, between parameters.
    Function,
    /// Inside a parameter's value, before its first character.
    ValueStart,
    Value,
    /// Behind `</function>`.
    FunctionEnd,
}

/// What a step made of the text.
enum Step {
    /// Something was read; go on.
    Go,
    /// The rest may mean different things, depending on what follows.
    Wait,
}

/// Whether a text starts with something, when more may follow.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Match {
    Yes,
    No,
    /// The text ends inside it.
    Partly,
}

fn starts(text: &str, tag: &str) -> Match {
    if text.starts_with(tag) {
        Match::Yes
    } else if tag.starts_with(text) {
        Match::Partly
    } else {
        Match::No
    }
}

/// Reads an answer as it arrives; see the module's doc.
#[derive(Debug, Clone)]
pub struct OutputParser {
    mode: OutputMode,
    state: State,
    /// Text not yet read.
    buffer: String,
    pieces: Vec<Piece>,
    calls: usize,
    function: String,
    parameter: String,
    /// Parameters of the current call written so far.
    parameters: usize,
    /// The value so far of a parameter that is not streamed.
    value: String,
    /// Blanks before a `<tool_call>` that may turn out to be text.
    gap: String,
}

impl OutputParser {
    /// A parser at the start of an answer.
    pub fn new(mode: OutputMode) -> Self {
        let (state, pieces) = match (mode.starts_in_reasoning, mode.keep_reasoning_tags) {
            // The prompt holds the opening tag, as the template writes it.
            (true, true) => (State::RawReasoning, vec![Piece::Reasoning(format!("{THINK}\n"))]),
            (true, false) => (State::ReasoningStart, Vec::new()),
            (false, _) => (State::Start, Vec::new()),
        };
        Self {
            mode,
            state,
            buffer: String::new(),
            pieces,
            calls: 0,
            function: String::new(),
            parameter: String::new(),
            parameters: 0,
            value: String::new(),
            gap: String::new(),
        }
    }

    /// Reads further text; gives what is certain by now.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.buffer.push_str(text);
        self.run(false)
    }

    /// Reads to the end: nothing follows.
    pub fn finish(&mut self) -> Vec<Piece> {
        self.run(true)
    }

    /// Whether the text read so far ends inside reasoning.
    pub fn in_reasoning(&self) -> bool {
        matches!(self.state, State::ReasoningStart | State::Reasoning | State::RawReasoning)
    }

    fn run(&mut self, last: bool) -> Vec<Piece> {
        while !self.buffer.is_empty() || (last && self.state == State::FunctionEnd) {
            match self.step(last) {
                Step::Go => {}
                Step::Wait => break,
            }
        }
        std::mem::take(&mut self.pieces)
    }

    fn step(&mut self, last: bool) -> Step {
        match self.state {
            State::Start if self.mode.keep_reasoning_tags => self.raw_opening(last),
            State::Start => self.opening(THINK, State::ReasoningStart, State::Content, true, last),
            State::ReasoningStart => self.opening(THINK, State::ReasoningStart, State::Reasoning, false, last),
            State::Reasoning => self.reasoning(last),
            State::RawReasoning => self.raw_reasoning(last),
            State::ContentStart => self.opening("", State::Content, State::Content, false, last),
            State::Content => self.content(last),
            State::Call => self.call(last),
            State::Function => self.in_function(last),
            State::ValueStart => {
                if self.buffer.starts_with('\n') {
                    self.buffer.drain(..1);
                }
                self.state = State::Value;
                Step::Go
            }
            State::Value => self.in_value(last),
            State::FunctionEnd => self.function_end(last),
        }
    }

    /// Skips blanks, then a `tag` into state `inside`, or goes to `otherwise`; there the blanks count if `keep`.
    fn opening(&mut self, tag: &str, inside: State, otherwise: State, keep: bool, last: bool) -> Step {
        let rest = self.buffer.trim_start();
        let blanks = self.buffer.len() - rest.len();
        match starts(rest, tag) {
            _ if tag.is_empty() && rest.is_empty() => {
                self.buffer.clear();
                Step::Go
            }
            Match::Yes if !tag.is_empty() => {
                self.buffer.drain(..blanks + tag.len());
                self.state = inside;
                Step::Go
            }
            Match::Partly if !last => Step::Wait,
            _ => {
                if !keep {
                    self.buffer.drain(..blanks);
                }
                self.state = otherwise;
                Step::Go
            }
        }
    }

    /// As [`OutputParser::opening`] at the very start, where an opening tag is shown as it stands.
    fn raw_opening(&mut self, last: bool) -> Step {
        let rest = self.buffer.trim_start();
        match starts(rest, THINK) {
            Match::Partly if !last => return Step::Wait,
            Match::Yes => {
                let end = self.buffer.len() - rest.len() + THINK.len();
                self.pieces.push(Piece::Reasoning(self.buffer.drain(..end).collect()));
                self.state = State::RawReasoning;
            }
            _ => self.state = State::Content,
        }
        Step::Go
    }

    fn raw_reasoning(&mut self, last: bool) -> Step {
        let found = self.buffer.find(END_THINK);
        let end = match found {
            Some(at) => at + END_THINK.len(),
            None if last => self.buffer.len(),
            None => self.buffer.len() - partial_tag(&self.buffer, END_THINK),
        };
        if found.is_some() {
            self.state = State::Content;
        }
        if end == 0 {
            return Step::Wait;
        }
        self.pieces.push(Piece::Reasoning(self.buffer.drain(..end).collect()));
        Step::Go
    }

    /// Text up to `tag`; the blanks before the tag are dropped. Gives `true` once the tag was read.
    fn text_until(&mut self, tag: &str, last: bool, piece: fn(String) -> Piece) -> Option<bool> {
        let found = self.buffer.find(tag);
        let end = match found {
            Some(at) => at,
            None if last => self.buffer.len(),
            None => self.buffer.len() - partial_tag(&self.buffer, tag),
        };
        let shown = match (found, last) {
            (None, true) => end,
            _ => self.buffer[..end].trim_end().len(),
        };
        let text = self.buffer[..shown].to_owned();
        if found.is_some() {
            self.gap = self.buffer[shown..end].to_owned();
        }
        self.buffer.drain(..if found.is_some() { end + tag.len() } else { shown });
        let any = !text.is_empty();
        if any {
            self.pieces.push(piece(text));
        }
        match (found.is_some(), any) {
            (true, _) => Some(true),
            (false, true) => Some(false),
            (false, false) => None,
        }
    }

    fn reasoning(&mut self, last: bool) -> Step {
        if last && !self.buffer.contains(END_THINK) {
            // Cut off inside the reasoning: its last blanks mean nothing.
            let text = std::mem::take(&mut self.buffer);
            let text = text.trim_end();
            if !text.is_empty() {
                self.pieces.push(Piece::Reasoning(text.to_owned()));
            }
            return Step::Go;
        }
        match self.text_until(END_THINK, last, Piece::Reasoning) {
            Some(true) => {
                self.state = State::ContentStart;
                Step::Go
            }
            Some(false) => Step::Go,
            None => Step::Wait,
        }
    }

    fn content(&mut self, last: bool) -> Step {
        if self.mode.tools.is_none() {
            self.pieces.push(Piece::Content(std::mem::take(&mut self.buffer)));
            return Step::Go;
        }
        match self.text_until(CALL, last, Piece::Content) {
            Some(true) => {
                self.state = State::Call;
                Step::Go
            }
            Some(false) => Step::Go,
            None => Step::Wait,
        }
    }

    fn call(&mut self, last: bool) -> Step {
        let rest = self.buffer.trim_start();
        let blanks = self.buffer.len() - rest.len();
        let name = match starts(rest, FUNCTION) {
            Match::Yes => name_of(&rest[FUNCTION.len()..]),
            Match::Partly => Name::Partial,
            Match::No => Name::None,
        };
        match name {
            Name::Is(name) => {
                let name = name.to_owned();
                self.buffer.drain(..blanks + FUNCTION.len() + name.len() + 1);
                let index = self.calls;
                self.calls += 1;
                self.parameters = 0;
                let id = format!("call_{}_{index}", self.mode.id_prefix);
                self.pieces.push(Piece::ToolCallStart { index, id, name: name.clone() });
                self.function = name;
                self.state = State::Function;
                Step::Go
            }
            Name::Partial if !last => Step::Wait,
            _ => {
                // No call after all: text that mentions the tag.
                let text = std::mem::take(&mut self.gap) + CALL;
                self.pieces.push(Piece::Content(text));
                self.state = State::Content;
                Step::Go
            }
        }
    }

    fn in_function(&mut self, last: bool) -> Step {
        let rest = self.buffer.trim_start();
        let blanks = self.buffer.len() - rest.len();
        match starts(rest, END_FUNCTION) {
            Match::Yes => {
                self.buffer.drain(..blanks + END_FUNCTION.len());
                self.state = State::FunctionEnd;
                return Step::Go;
            }
            Match::Partly if !last => return Step::Wait,
            _ => {}
        }
        if starts(rest, END_CALL) == Match::Yes {
            self.buffer.drain(..blanks);
            self.state = State::FunctionEnd;
            return Step::Go;
        }
        let name = match starts(rest, PARAMETER) {
            Match::Yes => name_of(&rest[PARAMETER.len()..]),
            Match::Partly => Name::Partial,
            Match::No if starts(rest, END_CALL) == Match::Partly => Name::Partial,
            Match::No => Name::None,
        };
        match name {
            Name::Is(name) => {
                let name = name.to_owned();
                self.buffer.drain(..blanks + PARAMETER.len() + name.len() + 1);
                self.parameter = name;
                self.value.clear();
                self.state = State::ValueStart;
                if self.streams() {
                    let opening = self.parameter_opening();
                    self.arguments(opening + "\"");
                }
                Step::Go
            }
            Name::Partial if !last => Step::Wait,
            _ => {
                // Neither a parameter nor an end: skip to where one may begin.
                let from = blanks + rest.chars().next().map_or(0, char::len_utf8);
                let skip = self.buffer[from..].find('<').map_or(self.buffer.len(), |at| from + at);
                self.buffer.drain(..skip);
                Step::Go
            }
        }
    }

    fn in_value(&mut self, last: bool) -> Step {
        let mut from = 0;
        let mut certain = None;
        // The first end tag that really ends the value, or that may.
        let end = loop {
            let Some(at) = self.buffer[from..].find(END_PARAMETER).map(|at| from + at) else { break None };
            match ends_value(&self.buffer[at + END_PARAMETER.len()..], last) {
                Match::Yes => break Some(at),
                Match::No => from = at + END_PARAMETER.len(),
                Match::Partly => {
                    certain = Some(at);
                    break None;
                }
            }
        };
        if let Some(at) = end {
            let value = self.buffer[..at].strip_suffix('\n').unwrap_or(&self.buffer[..at]).to_owned();
            self.buffer.drain(..at + END_PARAMETER.len());
            self.value_text(&value);
            self.close_value();
            self.state = State::Function;
            return Step::Go;
        }
        if last {
            // Cut off: a value that is streamed shows what there is of it.
            let mut rest = std::mem::take(&mut self.buffer);
            rest.truncate(rest.len() - partial_tag(&rest, END_PARAMETER));
            self.value_text(rest.strip_suffix('\n').unwrap_or(&rest));
            return Step::Go;
        }
        let certain = certain.unwrap_or_else(|| self.buffer.len() - partial_tag(&self.buffer, END_PARAMETER));
        let certain = self.buffer[..certain].strip_suffix('\n').map_or(certain, str::len);
        if certain == 0 {
            return Step::Wait;
        }
        let value: String = self.buffer.drain(..certain).collect();
        self.value_text(&value);
        Step::Wait
    }

    fn function_end(&mut self, last: bool) -> Step {
        let rest = self.buffer.trim_start();
        let blanks = self.buffer.len() - rest.len();
        match (starts(rest, END_CALL), starts(rest, FUNCTION)) {
            (Match::Yes, _) => {
                self.buffer.drain(..blanks + END_CALL.len());
                self.close_call();
                self.state = State::ContentStart;
            }
            (_, Match::Yes) => {
                self.close_call();
                self.state = State::Call;
            }
            (Match::Partly, _) | (_, Match::Partly) if !last => return Step::Wait,
            _ => {
                self.buffer.drain(..blanks);
                if last && !self.buffer.is_empty() && END_CALL.starts_with(self.buffer.as_str()) {
                    self.buffer.clear();
                }
                self.close_call();
                self.state = State::ContentStart;
            }
        }
        Step::Go
    }

    /// Only a string can be passed on before its end is known.
    fn streams(&self) -> bool {
        self.types().is_string_only()
    }

    fn types(&self) -> super::ParameterTypes {
        match &self.mode.tools {
            Some(schemas) => schemas.types(&self.function, &self.parameter),
            None => super::ToolSchemas::default().types("", ""),
        }
    }

    fn parameter_opening(&mut self) -> String {
        let separator = if self.parameters == 0 { '{' } else { ',' };
        self.parameters += 1;
        format!("{separator}{}:", Json::from(self.parameter.as_str()))
    }

    fn value_text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        if self.streams() {
            let quoted = Json::from(text).to_string();
            self.arguments(quoted[1..quoted.len() - 1].to_owned());
        } else {
            self.value.push_str(text);
        }
    }

    fn close_value(&mut self) {
        if self.streams() {
            self.arguments("\"".into());
        } else {
            let value = self.types().to_json(&self.value);
            let opening = self.parameter_opening();
            self.arguments(opening + &value);
        }
    }

    fn close_call(&mut self) {
        self.arguments(if self.parameters == 0 { "{}" } else { "}" }.into());
        self.pieces.push(Piece::ToolCallEnd { index: self.calls - 1 });
    }

    fn arguments(&mut self, delta: String) {
        self.pieces.push(Piece::ToolCallArguments { index: self.calls - 1, delta });
    }
}

/// How many bytes at the end of `text` may be the beginning of `tag`.
fn partial_tag(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|&len| text.ends_with(&tag[..len])).unwrap_or(0)
}

enum Name<'t> {
    Is(&'t str),
    /// It may still become one.
    Partial,
    None,
}

/// The name before `>`.
fn name_of(text: &str) -> Name<'_> {
    match text.find(['>', '<', '\n']) {
        Some(0) => Name::None,
        Some(at) if at <= LONGEST_NAME && text[at..].starts_with('>') => Name::Is(&text[..at]),
        None if text.len() <= LONGEST_NAME => Name::Partial,
        _ => Name::None,
    }
}

/// Whether what follows `</parameter>` shows that the value ends there: the next parameter, or the end of the function
/// and of the call. A value may well hold the tag itself, in a text about tool calls.
fn ends_value(after: &str, last: bool) -> Match {
    let certain = |found: Match| if found == Match::Partly && last { Match::Yes } else { found };
    let rest = after.trim_start();
    match starts(rest, PARAMETER) {
        Match::Yes => {
            return match name_of(&rest[PARAMETER.len()..]) {
                Name::Is(_) => Match::Yes,
                Name::Partial => certain(Match::Partly),
                Name::None => Match::No,
            };
        }
        Match::Partly => return certain(Match::Partly),
        Match::No => {}
    }
    match starts(rest, END_FUNCTION) {
        Match::Yes => {
            let rest = rest[END_FUNCTION.len()..].trim_start();
            match (starts(rest, END_CALL), starts(rest, FUNCTION)) {
                (Match::Yes, _) | (_, Match::Yes) => Match::Yes,
                (Match::Partly, _) | (_, Match::Partly) => certain(Match::Partly),
                _ => Match::No,
            }
        }
        Match::Partly => certain(Match::Partly),
        Match::No if starts(rest, END_CALL) == Match::Yes => Match::Yes,
        Match::No => certain(starts(rest, END_CALL)),
    }
}
