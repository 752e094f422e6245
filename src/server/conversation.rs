//! A conversation in the one form that the chat template reads; every chat dialect is translated into it.
//!
//! Message content is a string, or a list of `{"type": "text"}` and `{"type": "image"}` parts when pictures are in it;
//! tool-call arguments are objects; leading system messages are joined into one.

use super::error::{ApiError, kind_of};
use super::form::{Kind, Nested};
use super::pictures::PictureSource;
use super::tool_schema::check_parameters;
use serde_json::{Map, Value, json};

/// Most messages of a conversation.
pub const MAX_MESSAGES: usize = 20_000;
/// Most tools of a request.
pub const MAX_TOOLS: usize = 1_000;

/// A piece of a message.
#[derive(Clone, Debug)]
pub enum Part {
    /// Plain text; special tokens in it are text.
    Text(String),
    /// A picture, and the field it came from (for errors).
    Picture(String, PictureSource),
}

/// A function call of an assistant message.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    /// The client's id of the call.
    pub id: String,
    /// The function.
    pub name: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
}

/// A function the model may call.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// JSON schema of its arguments.
    pub parameters: Value,
}

/// Whether the model may or must call a tool.
#[derive(Clone, Debug, PartialEq, Default)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No calls; the tools are not shown to the model.
    None,
    /// At least one call.
    Required,
    /// A call of this function.
    Named(String),
}

/// Messages and pictures in template form.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    messages: Vec<Value>,
    pictures: Vec<(String, PictureSource)>,
}

impl Conversation {
    /// Messages as the template reads them.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// Pictures in message order, each with the field it came from.
    pub fn pictures(&self) -> &[(String, PictureSource)] {
        &self.pictures
    }

    /// Adds a system message; joins it to the one at the very front if nothing else came since.
    pub fn system(&mut self, parts: Vec<Part>) {
        let content = self.content(parts);
        if let [only] = self.messages.as_mut_slice()
            && only["role"] == "system"
            && let (Some(a), Some(b)) = (only["content"].as_str(), content.as_str())
        {
            only["content"] = json!(format!("{a}\n\n{b}"));
            return;
        }
        self.messages.push(json!({"role": "system", "content": content}));
    }

    /// Adds a user message.
    pub fn user(&mut self, parts: Vec<Part>) {
        let content = self.content(parts);
        self.messages.push(json!({"role": "user", "content": content}));
    }

    /// Adds an assistant message, or goes on with the one just added: APIs that list reasoning, text and calls as
    /// separate items mean one turn.
    pub fn assistant(&mut self, parts: Vec<Part>, reasoning: Option<&str>, calls: Vec<ToolCall>) {
        let content = self.content(parts);
        if self.messages.last().is_none_or(|m| m["role"] != "assistant") {
            self.messages.push(json!({"role": "assistant", "content": ""}));
        }
        let Some(message) = self.messages.last_mut() else { return };
        if let Some(reasoning) = reasoning.filter(|r| !r.is_empty()) {
            let before = message["reasoning_content"].as_str().unwrap_or_default();
            message["reasoning_content"] = json!(format!("{before}{reasoning}"));
        }
        match (message["content"].as_str(), content.as_str()) {
            (Some(a), Some(b)) => message["content"] = json!(format!("{a}{b}")),
            _ => message["content"] = content,
        }
        if !calls.is_empty() {
            let calls = calls.into_iter().map(
                |c| json!({"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}),
            );
            let mut all = message["tool_calls"].as_array().cloned().unwrap_or_default();
            all.extend(calls);
            message["tool_calls"] = Value::Array(all);
        }
    }

    /// Adds the result of a tool call.
    pub fn tool(&mut self, id: Option<&str>, parts: Vec<Part>) {
        let content = self.content(parts);
        let mut message = json!({"role": "tool", "content": content});
        if let Some(id) = id {
            message["tool_call_id"] = json!(id);
        }
        self.messages.push(message);
    }

    /// Takes off a closing assistant message whose text the answer must go on from.
    pub fn take_prefill(&mut self) -> Option<String> {
        let last = self.messages.last()?;
        if last["role"] != "assistant" || last.get("tool_calls").is_some() {
            return None;
        }
        let text = last["content"].as_str()?.to_owned();
        self.messages.pop();
        Some(text)
    }

    fn content(&mut self, parts: Vec<Part>) -> Value {
        if parts.iter().all(|p| matches!(p, Part::Text(_))) {
            return json!(parts.into_iter().fold(String::new(), |all, part| match part {
                Part::Text(text) => all + &text,
                Part::Picture(..) => all,
            }));
        }
        parts
            .into_iter()
            .map(|part| match part {
                Part::Text(text) => json!({"type": "text", "text": text}),
                Part::Picture(path, source) => {
                    self.pictures.push((path, source));
                    json!({"type": "image"})
                }
            })
            .collect()
    }
}

/// Reads message content: a string, null, or a list of parts (OpenAI chat and responses names, and Anthropic's).
pub fn read_content(path: &str, value: Option<&Value>) -> Result<Vec<Part>, ApiError> {
    match value {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![Part::Text(text.clone())]),
        Some(Value::Array(parts)) => parts
            .iter()
            .enumerate()
            .filter_map(|(i, part)| read_part(&format!("{path}[{i}]"), part).transpose())
            .collect(),
        Some(other) => Err(ApiError::field(
            path,
            format!("expected a string, an array of parts or null, found {}", kind_of(other)),
        )),
    }
}

/// Reads one content part; `None` for parts that carry nothing for the model (`cache_control` markers and the like).
fn read_part(path: &str, value: &Value) -> Result<Option<Part>, ApiError> {
    if let Value::String(text) = value {
        return Ok(Some(Part::Text(text.clone())));
    }
    let part = Nested::new(path, value)?;
    Ok(Some(match part.need_text("type")? {
        "text" | "input_text" | "output_text" => Part::Text(part.need_text("text")?.to_owned()),
        "refusal" => Part::Text(part.need_text("refusal")?.to_owned()),
        "image_url" => {
            let url = match part.need("image_url")? {
                Value::String(url) => (part.at("image_url"), url.as_str()),
                object => {
                    let object = Nested::new(part.at("image_url"), object)?;
                    (object.at("url"), object.need_text("url")?)
                }
            };
            Part::Picture(url.0.clone(), PictureSource::from_url(&url.0, url.1)?)
        }
        "input_image" => {
            let url = part.need_text("image_url")?;
            Part::Picture(part.at("image_url"), PictureSource::from_url(&part.at("image_url"), url)?)
        }
        "image" => {
            let source = Nested::new(part.at("source"), part.need("source")?)?;
            let picture = match source.need_text("type")? {
                "base64" => PictureSource::from_base64(&source.at("data"), source.need_text("data")?)?,
                "url" => PictureSource::from_url(&source.at("url"), source.need_text("url")?)?,
                other => {
                    return Err(ApiError::field(
                        source.at("type"),
                        format!("expected \"base64\" or \"url\", found {other:?}"),
                    ));
                }
            };
            Part::Picture(part.at("source"), picture)
        }
        "thinking" | "redacted_thinking" => return Ok(None),
        other => {
            return Err(ApiError::field(
                part.at("type"),
                format!("this server reads text and image parts, found {other:?}"),
            ));
        }
    }))
}

/// Tool-call arguments: an object, or a string that holds one.
pub fn read_arguments(path: &str, value: Option<&Value>) -> Result<Map<String, Value>, ApiError> {
    let parsed = match value {
        None | Some(Value::Null) => return Ok(Map::new()),
        Some(Value::String(text)) if text.trim().is_empty() => return Ok(Map::new()),
        Some(Value::String(text)) => serde_json::from_str(text)
            .map_err(|e| ApiError::field(path, format!("expected an object as JSON text: {e}")))?,
        Some(other) => other.clone(),
    };
    match parsed {
        Value::Object(map) => Ok(map),
        other => Err(ApiError::field(path, format!("expected an object, found {}", kind_of(&other)))),
    }
}

/// Checks a function's name: it must survive the tool-call markup.
pub fn read_tool_name(path: &str, name: &str) -> Result<String, ApiError> {
    let bad = |c: char| c.is_whitespace() || c.is_control() || "<>=\"".contains(c);
    if name.is_empty() || name.len() > 256 || name.contains(bad) {
        return Err(ApiError::field(
            path,
            "a function name is 1 to 256 bytes without spaces, quotes, `<`, `>` and `=`",
        ));
    }
    Ok(name.to_owned())
}

/// Reads a tool whose name, description and schema sit in one object; `schema` names the schema's key.
pub fn read_tool(tool: &Nested, schema: &str) -> Result<Tool, ApiError> {
    let name = read_tool_name(&tool.at("name"), tool.need_text("name")?)?;
    let description = tool.text("description")?.map(str::to_owned);
    let parameters = match tool.checked(schema, Kind::Object)? {
        Some(found) => {
            check_parameters(&tool.at(schema), found)?;
            found.clone()
        }
        None => json!({"type": "object", "properties": {}}),
    };
    Ok(Tool { name, description, parameters })
}

/// Reads a list of tools, each by `read`.
pub fn read_tools<'a>(
    list: Option<&'a Vec<Value>>,
    read: impl Fn(Nested<'a>) -> Result<Tool, ApiError>,
) -> Result<Vec<Tool>, ApiError> {
    let mut tools: Vec<Tool> = Vec::new();
    for (i, value) in list.into_iter().flatten().enumerate() {
        let path = format!("tools[{i}]");
        let tool = read(Nested::new(&path, value)?)?;
        if tools.iter().any(|t| t.name == tool.name) {
            return Err(ApiError::field(path, format!("a second tool named {:?}", tool.name)));
        }
        tools.push(tool);
    }
    Ok(tools)
}

/// Checks that a choice can be met by the tools given.
pub fn check_choice(choice: &ToolChoice, tools: &[Tool]) -> Result<(), ApiError> {
    match choice {
        ToolChoice::Named(name) if !tools.iter().any(|t| &t.name == name) => {
            Err(ApiError::field("tool_choice", format!("no tool is named {name:?}")))
        }
        ToolChoice::Required if tools.is_empty() => Err(ApiError::field("tool_choice", "needs `tools`")),
        _ => Ok(()),
    }
}

/// Checks that a list has an entry at all.
pub fn need_messages(path: &str, value: Option<&Vec<Value>>) -> Result<(), ApiError> {
    match value {
        Some(list) if list.is_empty() => Err(ApiError::field(path, "expected at least one message, found none")),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(s: &str) -> Vec<Part> {
        vec![Part::Text(s.into())]
    }

    #[test]
    fn leading_system_messages_become_one() {
        let mut c = Conversation::default();
        c.system(text("a"));
        c.system(text("b"));
        c.user(text("u"));
        assert_eq!(c.messages()[0], json!({"role": "system", "content": "a\n\nb"}));
        assert_eq!(c.messages().len(), 2);
    }

    #[test]
    fn items_of_one_assistant_turn_become_one_message() {
        let mut c = Conversation::default();
        c.user(text("u"));
        c.assistant(vec![], Some("hm"), vec![]);
        c.assistant(text("so"), None, vec![]);
        let call = ToolCall { id: "1".into(), name: "f".into(), arguments: Map::new() };
        c.assistant(vec![], None, vec![call]);
        assert_eq!(c.messages().len(), 2);
        let m = &c.messages()[1];
        assert_eq!((m["reasoning_content"].as_str(), m["content"].as_str()), (Some("hm"), Some("so")));
        assert_eq!(m["tool_calls"][0]["function"]["name"], "f");
        assert_eq!(c.clone().take_prefill(), None, "a turn that ends in calls is not a prefill");
    }

    #[test]
    fn content_may_be_a_string_parts_or_null() {
        let read = |v: Value| {
            let mut c = Conversation::default();
            read_content("content", Some(&v)).map(|parts| {
                c.user(parts);
                c.messages()[0]["content"].clone()
            })
        };
        assert_eq!(read(json!("x")).unwrap(), json!("x"));
        assert_eq!(read(json!(null)).unwrap(), json!(""));
        assert_eq!(read(json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])).unwrap(), json!("ab"));
        let error = read(json!([{"type": "text", "text": "a"}, {"type": "input_audio"}])).unwrap_err();
        assert_eq!(error.param.unwrap(), "content[1].type");
        assert_eq!(read(json!(5)).unwrap_err().param.unwrap(), "content");
    }

    #[test]
    fn arguments_may_be_text_or_an_object() {
        let want: Map<String, Value> = serde_json::from_str(r#"{"a":1}"#).unwrap();
        assert_eq!(read_arguments("p", Some(&json!("{\"a\":1}"))).unwrap(), want);
        assert_eq!(read_arguments("p", Some(&json!({"a": 1}))).unwrap(), want);
        assert_eq!(read_arguments("p", Some(&json!(""))).unwrap(), Map::new());
        assert!(read_arguments("p", Some(&json!("[1]"))).is_err());
        assert!(read_arguments("p", Some(&json!("{"))).is_err());
    }
}
