//! Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, over the same [`ChatRequest`] as the OpenAI routes.

use super::answer::{Answer, Block, Choice, Finish, Output};
use super::app::{App, new_id};
use super::blocks::{BlockKind, BlockSteps, Step};
use super::conversation::{
    MAX_MESSAGES, MAX_TOOLS, Part, ToolCall, ToolChoice, check_choice, need_messages, read_arguments, read_content,
    read_tool, read_tool_name, read_tools,
};
use super::error::{ApiError, Dialect};
use super::form::{Field, Fields, Form, Kind, Nested, field};
use super::params::Generation;
use super::prompt::{ChatRequest, chat_prompt};
use super::sse::{Frame, stream_answer};
use super::work;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;
use strata_core::engine::FinishReason;

/// Fields that shape the prompt; all of `count_tokens`.
const PROMPT_FIELDS: &[Field] = &[
    field("model", Kind::Text, "Ignored: the server has one model"),
    field("messages", Kind::ListOf(MAX_MESSAGES, "Message"), "The conversation"),
    field("system", Kind::Any, "The system prompt: a string or text blocks"),
    field("tools", Kind::ListOf(MAX_TOOLS, "MessageTool"), "Functions the model may call"),
    field("tool_choice", Kind::Object, "{\"type\": \"auto\" | \"any\" | \"tool\" | \"none\"}"),
    field(
        "thinking",
        Kind::Object,
        "{\"type\": \"enabled\", \"budget_tokens\": N}, \"adaptive\" or \"disabled\" (the default)",
    ),
];

/// Fields that shape the answer.
const ANSWER_FIELDS: &[Field] = &[
    field("max_tokens", Kind::Integer(1, 1 << 40), "Longest answer in tokens, thinking included"),
    field("stop_sequences", Kind::TextOrTexts(32), "Strings that end the answer"),
    field("temperature", Kind::Number(0.0, 2.0), "0 takes the most likely token"),
    field("top_k", Kind::Integer(0, 1 << 30), "Keep only the k most likely tokens"),
    field("top_p", Kind::Number(0.0, 1.0), "Keep the most likely tokens up to this total probability"),
    field("seed", Kind::Integer(i64::MIN, i64::MAX), "Makes sampling repeatable"),
    field("stream", Kind::Flag, "Send server-sent events"),
    field("output_config", Kind::Object, "{\"format\": {\"type\": \"json_schema\", \"schema\": ...}}"),
    field("metadata", Kind::Object, "Ignored"),
];

/// The body of `/v1/messages`.
pub const FORM: Form =
    Form { name: "MessagesRequest", groups: &[PROMPT_FIELDS, ANSWER_FIELDS], required: &["messages", "max_tokens"] };
/// The body of `/v1/messages/count_tokens`.
pub const COUNT_FORM: Form = Form { name: "CountTokensRequest", groups: &[PROMPT_FIELDS], required: &["messages"] };

/// Translates a body of either route.
pub fn read(app: &App, fields: &Fields) -> Result<ChatRequest, ApiError> {
    let mut generation = Generation::new(&app.settings.defaults);
    let s = &mut generation.sampling;
    s.temperature = fields.number("temperature").unwrap_or(s.temperature);
    s.top_p = fields.number("top_p").unwrap_or(s.top_p);
    s.top_k = fields.integer("top_k").map_or(s.top_k, |k| k as u32);
    s.seed = fields.integer("seed").map_or(s.seed, |seed| Some(seed as u64));
    s.max_tokens = fields.integer("max_tokens").map_or(s.max_tokens, |n| Some(n as usize));
    generation.stop = fields.texts("stop_sequences");
    if generation.stop.iter().any(String::is_empty) {
        return Err(ApiError::field("stop_sequences", "a stop sequence must not be empty"));
    }
    if let Some(config) = fields.value("output_config")
        && let Some(format) = Nested::new("output_config", config)?.object("format")?
    {
        generation.constraint = super::params::read_format(&format, "json_schema")?;
    }
    let mut thinking_on = false;
    if let Some(thinking) = fields.value("thinking") {
        let thinking = Nested::new("thinking", thinking)?;
        thinking_on = match thinking.need_text("type")? {
            "enabled" => {
                let budget = thinking.checked("budget_tokens", Kind::Integer(0, 1 << 40))?;
                generation.thinking_budget = budget.and_then(Value::as_u64).map(|n| n as usize);
                true
            }
            "adaptive" => true,
            "disabled" => false,
            other => {
                let problem = format!("expected \"enabled\", \"adaptive\" or \"disabled\", found {other:?}");
                return Err(ApiError::field("thinking.type", problem));
            }
        };
    }
    let mut chat = ChatRequest::new(app, generation);
    chat.enable_thinking = Some(thinking_on);
    chat.stream = fields.flag("stream").unwrap_or(false);
    chat.tools = read_tools(fields.list("tools"), |tool| match tool.text("type")? {
        None | Some("custom") => read_tool(&tool, "input_schema"),
        Some(other) => {
            Err(ApiError::field(tool.at("type"), format!("this server runs no tools of its own, such as {other:?}")))
        }
    })?;
    if let Some(choice) = fields.value("tool_choice") {
        let choice = Nested::new("tool_choice", choice)?;
        chat.tool_choice = match choice.need_text("type")? {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "any" => ToolChoice::Required,
            "tool" => ToolChoice::Named(choice.need_text("name")?.to_owned()),
            other => {
                let problem = format!("expected \"auto\", \"any\", \"tool\" or \"none\", found {other:?}");
                return Err(ApiError::field("tool_choice.type", problem));
            }
        };
        let single = choice.checked("disable_parallel_tool_use", Kind::Flag)?;
        chat.parallel_tool_calls = single != Some(&Value::Bool(true));
    }
    check_choice(&chat.tool_choice, &chat.tools)?;
    if fields.value("system").is_some() {
        chat.conversation.system(joined(read_content("system", fields.value("system"))?));
    }
    need_messages("messages", fields.list("messages"))?;
    for (i, message) in fields.list("messages").into_iter().flatten().enumerate() {
        read_message(&mut chat, &Nested::new(format!("messages[{i}]"), message)?)?;
    }
    Ok(chat)
}

/// Blocks of a system prompt are paragraphs of it.
fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut out = Vec::with_capacity(parts.len() * 2);
    for part in parts {
        if !out.is_empty() {
            out.push(Part::Text("\n\n".into()));
        }
        out.push(part);
    }
    out
}

fn read_message(chat: &mut ChatRequest, message: &Nested) -> Result<(), ApiError> {
    let content = message.need("content")?;
    let path = message.at("content");
    match message.need_text("role")? {
        "system" => chat.conversation.system(read_content(&path, Some(content))?),
        "user" => {
            let Value::Array(blocks) = content else {
                chat.conversation.user(read_content(&path, Some(content))?);
                return Ok(());
            };
            // Results come first: they answer the calls of the message before.
            let mut others = Vec::new();
            for (i, value) in blocks.iter().enumerate() {
                let at = format!("{path}[{i}]");
                let block = Nested::new(&at, value)?;
                if block.need_text("type")? == "tool_result" {
                    let parts = read_content(&block.at("content"), block.value("content"))?;
                    chat.conversation.tool(Some(block.need_text("tool_use_id")?), parts);
                } else {
                    others.extend(read_content(&path, Some(&json!([value]))).map_err(|e| moved(e, &path, i))?);
                }
            }
            if !others.is_empty() || blocks.is_empty() {
                chat.conversation.user(others);
            }
        }
        "assistant" => {
            let Value::Array(blocks) = content else {
                chat.conversation.assistant(read_content(&path, Some(content))?, None, Vec::new());
                return Ok(());
            };
            for (i, value) in blocks.iter().enumerate() {
                let block = Nested::new(format!("{path}[{i}]"), value)?;
                match block.need_text("type")? {
                    "tool_use" => {
                        let call = ToolCall {
                            id: block.text("id")?.unwrap_or_default().to_owned(),
                            name: read_tool_name(&block.at("name"), block.need_text("name")?)?,
                            arguments: read_arguments(&block.at("input"), block.value("input"))?,
                        };
                        chat.conversation.assistant(Vec::new(), None, vec![call]);
                    }
                    "thinking" => chat.conversation.assistant(Vec::new(), block.text("thinking")?, Vec::new()),
                    _ => {
                        let parts = read_content(&path, Some(&json!([value]))).map_err(|e| moved(e, &path, i))?;
                        chat.conversation.assistant(parts, None, Vec::new());
                    }
                }
            }
        }
        other => {
            let problem = format!("expected \"user\" or \"assistant\", found {other:?}");
            return Err(ApiError::field(message.at("role"), problem));
        }
    }
    Ok(())
}

/// The error of a block read on its own, as if read in its place in the list.
fn moved(error: ApiError, path: &str, i: usize) -> ApiError {
    let (from, to) = (format!("{path}[0]"), format!("{path}[{i}]"));
    ApiError { message: error.message.replace(&from, &to), param: error.param.map(|p| p.replace(&from, &to)), ..error }
}

/// `POST /v1/messages/count_tokens`
pub async fn count_tokens(State(app): State<Arc<App>>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let chat = read(&app, &COUNT_FORM.read(&body)?)?;
    let rows =
        work::blocking(&app, move |app, service| Ok(chat_prompt(app, service, &chat, usize::MAX)?.prompt.rows()))
            .await?;
    Ok(Json(json!({"input_tokens": rows})))
}

/// `POST /v1/messages`
pub async fn messages(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    let chat = read(&app, &FORM.read(&body)?)?;
    let stream = chat.stream;
    let id = new_id("msg_");
    let model = app.settings.model_name.clone();
    let answer = work::chat(&app, chat, "messages").await?;
    if stream {
        return Ok(stream_events(id, model, answer));
    }
    let all = answer.collect().await;
    work::check_failure(&all)?;
    Ok(Json(whole(&id, &model, &all.choices[0])).into_response())
}

fn stop_reason(finish: &Finish) -> (&'static str, Option<&str>) {
    match &finish.reason {
        FinishReason::Length | FinishReason::ContextFull | FinishReason::Cancelled | FinishReason::Stopping => {
            ("max_tokens", None)
        }
        _ if finish.called_tool => ("tool_use", None),
        FinishReason::StopString(text) => ("stop_sequence", Some(text)),
        FinishReason::EndToken(_) | FinishReason::GrammarEnd => ("end_turn", None),
    }
}

fn usage(prompt: usize, reused: usize, generated: usize) -> Value {
    json!({
        "input_tokens": prompt.saturating_sub(reused),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reused,
        "output_tokens": generated,
    })
}

fn block_json(block: &Block) -> Value {
    match block {
        Block::Reasoning(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
        Block::Text(text) => json!({"type": "text", "text": text}),
        Block::Call { id, name, arguments } => {
            // A call cut off by the token limit has no complete arguments; its text is kept as it is.
            let input = serde_json::from_str(arguments).unwrap_or_else(|_| json!({"incomplete": arguments}));
            json!({"type": "tool_use", "id": id, "name": name, "input": input})
        }
    }
}

fn message_json(id: &str, model: &str, content: Vec<Value>, stop: Value, sequence: Value, usage: Value) -> Value {
    json!({
        "id": id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": stop,
        "stop_sequence": sequence,
        "usage": usage,
    })
}

fn whole(id: &str, model: &str, choice: &Choice) -> Value {
    let content = choice.blocks.iter().map(block_json).collect();
    let Some(finish) = &choice.finish else {
        return message_json(id, model, content, Value::Null, Value::Null, usage(0, 0, 0));
    };
    let (stop, sequence) = stop_reason(finish);
    let stats = &finish.stats;
    let usage = usage(stats.prompt_rows, stats.reused_rows, stats.generated);
    message_json(id, model, content, json!(stop), json!(sequence), usage)
}

fn stream_events(id: String, model: String, answer: Answer) -> Response {
    let mut steps = BlockSteps::default();
    stream_answer(answer, Vec::new(), move |event| match event {
        Some((_, Output::Started { prompt_rows, reused_rows })) => {
            let usage = usage(prompt_rows, reused_rows, 0);
            let message = message_json(&id, &model, Vec::new(), Value::Null, Value::Null, usage);
            vec![
                Frame::typed(json!({"type": "message_start", "message": message})),
                Frame::typed(json!({"type": "ping"})),
            ]
        }
        Some((_, Output::Piece(piece))) => steps.piece(&piece).iter().map(step_frame).collect(),
        Some((_, Output::Finished(finish))) => {
            let (stop, sequence) = stop_reason(&finish);
            let stats = &finish.stats;
            let mut frames: Vec<Frame> = steps.finish().iter().map(step_frame).collect();
            frames.push(Frame::typed(json!({
                "type": "message_delta",
                "delta": {"stop_reason": stop, "stop_sequence": sequence},
                "usage": usage(stats.prompt_rows, stats.reused_rows, stats.generated),
            })));
            frames.push(Frame::typed(json!({"type": "message_stop"})));
            frames
        }
        Some((_, Output::Failed(message))) => vec![Frame::typed(work::failed(&message).body(Dialect::Anthropic))],
        Some((_, Output::Token(_))) | None => Vec::new(),
    })
}

fn step_frame(step: &Step) -> Frame {
    Frame::typed(match step {
        Step::Open(index, block) => {
            let content = match block {
                Block::Call { id, name, .. } => json!({"type": "tool_use", "id": id, "name": name, "input": {}}),
                other => block_json(other),
            };
            json!({"type": "content_block_start", "index": index, "content_block": content})
        }
        Step::Grow(index, kind, text) => {
            let delta = match kind {
                BlockKind::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
                BlockKind::Text => json!({"type": "text_delta", "text": text}),
                BlockKind::Call => json!({"type": "input_json_delta", "partial_json": text}),
            };
            json!({"type": "content_block_delta", "index": index, "delta": delta})
        }
        Step::Close(index, _) => json!({"type": "content_block_stop", "index": index}),
    })
}

#[cfg(test)]
mod tests {
    use super::super::app::Settings;
    use super::*;

    fn translate(body: Value) -> Result<ChatRequest, ApiError> {
        read(&App::new(Settings::default()), &FORM.read(body.to_string().as_bytes())?)
    }

    #[test]
    fn a_tool_round_trip_becomes_the_templates_messages() {
        let chat = translate(json!({
            "max_tokens": 9, "system": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "thinking": {"type": "enabled", "budget_tokens": 77},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
            "messages": [
                {"role": "user", "content": "go"},
                {"role": "assistant", "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "calling"},
                    {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": [1]}}]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "42"}]},
                    {"type": "text", "text": "and?"}]},
            ],
        }))
        .unwrap();
        let m = chat.conversation.messages();
        assert_eq!(m[0]["content"], "a\n\nb");
        assert_eq!(m[2]["reasoning_content"], "hm");
        assert_eq!(m[2]["content"], "calling");
        assert_eq!(m[2]["tool_calls"][0]["function"]["arguments"]["x"][0], 1);
        assert_eq!((m[3]["role"].as_str(), m[3]["content"].as_str()), (Some("tool"), Some("42")));
        assert_eq!(m[4]["content"], "and?");
        assert_eq!(chat.tool_choice, ToolChoice::Required);
        assert_eq!((chat.enable_thinking, chat.generation.thinking_budget), (Some(true), Some(77)));
    }

    #[test]
    fn bad_fields_are_named() {
        let base = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]});
        let cases = [
            ("max_tokens", json!(null), "max_tokens"),
            ("max_tokens", json!(0), "max_tokens"),
            ("messages", json!([{"role": "user"}]), "messages[0].content"),
            ("messages", json!([{"role": "robot", "content": "x"}]), "messages[0].role"),
            (
                "messages",
                json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "what"}]}]),
                "messages[0].content[1].type",
            ),
            ("thinking", json!({"type": "maybe"}), "thinking.type"),
            ("tools", json!([{"type": "web_search_20250305", "name": "web"}]), "tools[0].type"),
            ("tool_choice", json!({"type": "tool", "name": "g"}), "tool_choice"),
            ("stop_sequences", json!([1]), "stop_sequences[0]"),
            ("system", json!(5), "system"),
        ];
        for (name, value, want) in cases {
            let mut body = base.clone();
            body[name] = value;
            assert_eq!(translate(body.clone()).unwrap_err().param.unwrap(), want, "{body}");
        }
    }
}
