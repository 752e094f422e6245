//! Encodes a rendered conversation. The template's special tokens become tokens; the same spelling inside anything a
//! user, a tool or an earlier answer said stays text.
//!
//! Before rendering, the first character of every special token (`<`) is replaced in all strings of the conversation by
//! a private-use character that occurs nowhere else. The template then puts its own, real, special tokens around them.
//! The rendered text is cut at the special tokens, and the characters are put back in the text between. Since each
//! such character is hidden, not only whole spellings, two strings that a template joins cannot spell one together.

use serde_json::{Map, Value as Json};

use super::{ChatTemplate, TemplateInput};
use crate::text::{Specials, TextError, TokenKind, Tokenizer};

/// A part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptPiece {
    /// Text and special tokens.
    Tokens(Vec<u32>),
    /// The rows of the n-th picture of the conversation stand here, in place of the template's `<|image_pad|>`.
    Picture(usize),
}

/// A conversation as the model reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatPrompt {
    /// The prompt from left to right.
    pub pieces: Vec<PromptPiece>,
    /// Where turns start: the index of each `<|im_start|>`, a picture counted as one token.
    pub turn_starts: Vec<usize>,
    /// Whether the prompt ends inside an open `<think>`, so that the answer starts with reasoning.
    pub starts_in_reasoning: bool,
    /// The rendered prompt, a picture as its `<|image_pad|>`.
    pub text: String,
}

impl ChatPrompt {
    /// The number of pictures.
    pub fn pictures(&self) -> usize {
        self.pieces.iter().filter(|piece| matches!(piece, PromptPiece::Picture(_))).count()
    }

    /// [`ChatPrompt::turn_starts`] as row indices, given the number of rows of each picture.
    pub fn turn_rows(&self, picture_rows: &[usize]) -> Vec<usize> {
        let mut starts = self.turn_starts.iter().copied().peekable();
        let (mut token, mut row) = (0, 0);
        let mut rows = Vec::with_capacity(self.turn_starts.len());
        for piece in &self.pieces {
            let (tokens, piece_rows) = match piece {
                PromptPiece::Tokens(ids) => (ids.len(), ids.len()),
                PromptPiece::Picture(n) => (1, picture_rows.get(*n).copied().unwrap_or(1)),
            };
            while let Some(start) = starts.next_if(|&start| start < token + tokens) {
                rows.push(row + (start - token));
            }
            token += tokens;
            row += piece_rows;
        }
        rows
    }
}

/// Renders and encodes a conversation; see the module's doc for what becomes a special token.
///
/// # Errors
/// [`TextError::Messages`] for a conversation of another shape, [`TextError::Template`] from the template.
pub fn encode_chat(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    input: &TemplateInput,
) -> Result<ChatPrompt, TextError> {
    let mut input = input.clone();
    input.messages = normalize_messages(&input.messages)?;
    let pictures = count_pictures(&input.messages);
    let mask = Mask::new(tokenizer, &input, template.source());

    let plain = template.render(&input)?;
    // A template may look for a spelling in the conversation, as Qwen's do for `</think>` and `<tool_response>`, and
    // must come to the same prompt then: where it does not, those spellings (never control tokens) are left visible, in
    // the assistant's own messages first.
    let mut masked = String::new();
    let mut text = String::new();
    for keep in [Keep::Nothing, Keep::AssistantTags, Keep::AllTags] {
        masked = template.render(&mask.input(&input, keep))?;
        text = mask.unmask(&masked);
        if text == plain {
            break;
        }
    }

    let image_pad = tokenizer.id_of("<|image_pad|>");
    let turn_start = tokenizer.id_of("<|im_start|>");
    let (think, end_think) = (tokenizer.id_of("<think>"), tokenizer.id_of("</think>"));
    let mut pieces = Vec::new();
    let mut tokens = Vec::new();
    let mut turn_starts = Vec::new();
    let mut starts_in_reasoning = false;
    let (mut index, mut placed, mut from) = (0, 0, 0);
    let text_until = |to: usize, from: usize, tokens: &mut Vec<u32>, index: &mut usize| -> Result<(), TextError> {
        let ids = tokenizer.encode(&mask.unmask(&masked[from..to]), Specials::AsText)?;
        *index += ids.len();
        tokens.extend(ids);
        Ok(())
    };
    for (range, id) in tokenizer.find_specials(&masked) {
        text_until(range.start, from, &mut tokens, &mut index)?;
        from = range.end;
        if Some(id) == turn_start {
            turn_starts.push(index);
            starts_in_reasoning = false;
        } else if Some(id) == think {
            starts_in_reasoning = true;
        } else if Some(id) == end_think {
            starts_in_reasoning = false;
        }
        if Some(id) == image_pad {
            if !tokens.is_empty() {
                pieces.push(PromptPiece::Tokens(std::mem::take(&mut tokens)));
            }
            pieces.push(PromptPiece::Picture(placed));
            placed += 1;
        } else {
            tokens.push(id);
        }
        index += 1;
    }
    text_until(masked.len(), from, &mut tokens, &mut index)?;
    if !tokens.is_empty() {
        pieces.push(PromptPiece::Tokens(tokens));
    }
    if placed != pictures {
        return Err(TextError::Messages {
            field: "messages".into(),
            problem: format!("{pictures} pictures, but the chat template made room for {placed}"),
        });
    }
    let starts_in_reasoning = starts_in_reasoning && input.add_generation_prompt;
    Ok(ChatPrompt { pieces, turn_starts, starts_in_reasoning, text })
}

/// The messages in the form templates expect: tool-call arguments as objects (clients send them as JSON text),
/// `developer` as `system`, `reasoning` as `reasoning_content`.
///
/// # Errors
/// [`TextError::Messages`] where there is no list of messages with a role.
pub fn normalize_messages(messages: &Json) -> Result<Json, TextError> {
    let bad = |field: String, problem: &str| TextError::Messages { field, problem: problem.to_owned() };
    let Json::Array(list) = messages else {
        return Err(bad("messages".into(), "expected a list of messages"));
    };
    let mut out = Vec::with_capacity(list.len());
    for (i, message) in list.iter().enumerate() {
        let Json::Object(message) = message else {
            return Err(bad(format!("messages[{i}]"), "expected an object"));
        };
        let mut message = message.clone();
        match message.get("role").and_then(Json::as_str) {
            Some("developer") => {
                message.insert("role".into(), "system".into());
            }
            Some(_) => {}
            None => return Err(bad(format!("messages[{i}].role"), "expected a string")),
        }
        match message.get("content") {
            None | Some(Json::Null | Json::String(_)) => {}
            Some(Json::Array(parts)) => {
                for (j, part) in parts.iter().enumerate() {
                    if !part.is_object() {
                        return Err(bad(format!("messages[{i}].content[{j}]"), "expected an object"));
                    }
                }
            }
            Some(_) => return Err(bad(format!("messages[{i}].content"), "expected a string, a list of parts or null")),
        }
        if !message.contains_key("reasoning_content")
            && let Some(reasoning @ Json::String(_)) = message.get("reasoning")
        {
            let reasoning = reasoning.clone();
            message.insert("reasoning_content".into(), reasoning);
        }
        match message.get_mut("tool_calls") {
            None | Some(Json::Null) => {}
            Some(Json::Array(calls)) => {
                for (j, call) in calls.iter_mut().enumerate() {
                    normalize_call(call, &format!("messages[{i}].tool_calls[{j}]"))?;
                }
            }
            Some(_) => return Err(bad(format!("messages[{i}].tool_calls"), "expected a list")),
        }
        out.push(Json::Object(message));
    }
    Ok(Json::Array(out))
}

fn normalize_call(call: &mut Json, path: &str) -> Result<(), TextError> {
    let bad = |field: &str, problem: String| TextError::Messages { field: format!("{path}{field}"), problem };
    let function = match call.get_mut("function") {
        Some(function) => function,
        None => call,
    };
    let Json::Object(function) = function else { return Err(bad("", "expected an object".into())) };
    if !function.get("name").is_some_and(Json::is_string) {
        return Err(bad(".function.name", "expected a string".into()));
    }
    let arguments = match function.get("arguments") {
        None | Some(Json::Null) => Json::Object(Map::new()),
        Some(Json::String(text)) if text.trim().is_empty() => Json::Object(Map::new()),
        Some(Json::String(text)) => serde_json::from_str(text)
            .map_err(|error| bad(".function.arguments", format!("expected a JSON object as text: {error}")))?,
        Some(other) => other.clone(),
    };
    if !arguments.is_object() {
        return Err(bad(".function.arguments", "expected a JSON object".into()));
    }
    function.insert("arguments".into(), arguments);
    Ok(())
}

fn count_pictures(messages: &Json) -> usize {
    let parts = messages.as_array().into_iter().flatten().filter_map(|message| message.get("content"));
    let parts = parts.filter_map(Json::as_array).flatten();
    parts.filter(|part| matches!(part.get("type").and_then(Json::as_str), Some("image" | "image_url"))).count()
}

/// Which special tokens stay visible to the template in a conversation's strings.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    Nothing,
    /// User-defined ones (`</think>`) in messages of the assistant.
    AssistantTags,
    /// User-defined ones in all messages.
    AllTags,
}

/// Hides the first characters of special tokens.
struct Mask<'a> {
    tokenizer: &'a Tokenizer,
    /// (first character of a special token, the private-use character that stands for it)
    pairs: Vec<(char, char)>,
}

impl<'a> Mask<'a> {
    fn new(tokenizer: &'a Tokenizer, input: &TemplateInput, template: &str) -> Self {
        let mut firsts: Vec<char> = tokenizer.specials().filter_map(|(piece, _)| piece.chars().next()).collect();
        firsts.sort_unstable();
        firsts.dedup();
        let mut used: std::collections::HashSet<char> = template.chars().filter(|&c| is_private(c)).collect();
        let mut note = |text: &str| used.extend(text.chars().filter(|&c| is_private(c)));
        for value in [Some(&input.messages), input.tools.as_ref()].into_iter().flatten() {
            each_string(value, &mut note);
        }
        for (name, value) in &input.extra {
            note(name);
            each_string(value, &mut note);
        }
        // Plane 16 is private use and has more characters than any vocabulary's first characters and any prompt's
        // private-use characters can fill together; what finds no character there stays visible.
        let mut free = ('\u{100000}'..='\u{10fffd}').filter(|c| !used.contains(c));
        let pairs = firsts.into_iter().map_while(|first| Some((first, free.next()?))).collect();
        Self { tokenizer, pairs }
    }

    fn input(&self, input: &TemplateInput, keep: Keep) -> TemplateInput {
        let everywhere = keep == Keep::AllTags;
        let message = |message: &Json| {
            let by_assistant = message.get("role").and_then(Json::as_str) == Some("assistant");
            self.value(message, everywhere || (by_assistant && keep == Keep::AssistantTags))
        };
        TemplateInput {
            messages: match &input.messages {
                Json::Array(list) => list.iter().map(message).collect(),
                other => self.value(other, everywhere),
            },
            tools: input.tools.as_ref().map(|tools| self.value(tools, false)),
            extra: input.extra.iter().map(|(name, value)| (name.clone(), self.value(value, false))).collect(),
            add_generation_prompt: input.add_generation_prompt,
            enable_thinking: input.enable_thinking,
        }
    }

    fn value(&self, value: &Json, keep_tags: bool) -> Json {
        match value {
            Json::String(text) => Json::String(self.string(text, keep_tags)),
            Json::Array(items) => items.iter().map(|item| self.value(item, keep_tags)).collect(),
            Json::Object(map) => Json::Object(
                map.iter().map(|(key, item)| (self.string(key, false), self.value(item, keep_tags))).collect(),
            ),
            other => other.clone(),
        }
    }

    fn string(&self, text: &str, keep_tags: bool) -> String {
        let mut out = String::with_capacity(text.len() + 16);
        let hide = |part: &str, out: &mut String| out.extend(part.chars().map(|c| self.hidden(c)));
        let mut from = 0;
        if keep_tags {
            for (range, id) in self.tokenizer.find_specials(text) {
                if self.tokenizer.kind(id) == Some(TokenKind::UserDefined) {
                    hide(&text[from..range.start], &mut out);
                    out.push_str(&text[range.clone()]);
                    from = range.end;
                }
            }
        }
        hide(&text[from..], &mut out);
        out
    }

    fn hidden(&self, c: char) -> char {
        self.pairs.iter().find(|pair| pair.0 == c).map_or(c, |pair| pair.1)
    }

    fn unmask(&self, text: &str) -> String {
        if !text.contains(is_private) {
            return text.to_owned();
        }
        let original = |c: char| self.pairs.iter().find(|pair| pair.1 == c).map_or(c, |pair| pair.0);
        text.chars().map(original).collect()
    }
}

fn is_private(c: char) -> bool {
    ('\u{100000}'..='\u{10fffd}').contains(&c)
}

fn each_string(value: &Json, note: &mut impl FnMut(&str)) {
    match value {
        Json::String(text) => note(text),
        Json::Array(items) => items.iter().for_each(|item| each_string(item, note)),
        Json::Object(map) => map.iter().for_each(|(key, item)| {
            note(key);
            each_string(item, note);
        }),
        _ => {}
    }
}
