//! OpenAI's `/v1/responses`, stateless: everything the model should know is in the request, nothing is stored.

use super::answer::{Answer, Block, Choice, Collected, Output, TokenReport, Usage};
use super::app::{App, new_id, unix_time};
use super::blocks::{BlockKind, BlockSteps, Step};
use super::chat::{logprobs_json, read_choice};
use super::conversation::{
    MAX_MESSAGES, MAX_TOOLS, Part, ToolCall, check_choice, read_arguments, read_content, read_tool, read_tool_name,
    read_tools,
};
use super::error::{ApiError, kind_of};
use super::form::{Field, Fields, Form, Kind, Nested, field};
use super::params::{Generation, SAMPLING_FIELDS, TOP_LOGPROBS, read_format, set_max_tokens};
use super::prompt::ChatRequest;
use super::sse::{Frame, stream_answer};
use super::work;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;
use strata_core::engine::FinishReason;

const FIELDS: &[Field] = &[
    field("model", Kind::Text, "Ignored: the server has one model"),
    field("input", Kind::Any, "A string, or the items of the conversation"),
    field("instructions", Kind::Text, "The system prompt"),
    field("tools", Kind::List(MAX_TOOLS), "Functions the model may call"),
    field("tool_choice", Kind::Any, "\"none\", \"auto\", \"required\", or a function by name"),
    field("parallel_tool_calls", Kind::Flag, "false reports one call at most"),
    field("max_output_tokens", Kind::Integer(-1, 1 << 40), "Longest answer in tokens, thinking included"),
    field("text", Kind::Object, "{\"format\": {\"type\": \"text\" | \"json_object\" | \"json_schema\"}}"),
    field("reasoning", Kind::Object, "{\"effort\": \"none\" | \"minimal\" | \"low\" | \"medium\" | \"high\"}"),
    field("stream", Kind::Flag, "Send server-sent events"),
    field("store", Kind::Flag, "Ignored: nothing is stored"),
    field("include", Kind::List(32), "\"message.output_text.logprobs\" reports log-probabilities"),
    TOP_LOGPROBS,
    field("previous_response_id", Kind::Text, "Refused: send the whole conversation"),
    field("conversation", Kind::Any, "Refused: send the whole conversation"),
    field("background", Kind::Flag, "Refused when true"),
    field("metadata", Kind::Object, "Returned as it is"),
    field("user", Kind::Text, "Ignored"),
];

/// The request body.
pub const FORM: Form = Form { name: "ResponsesRequest", groups: &[FIELDS, SAMPLING_FIELDS], required: &["input"] };

/// Translates a body.
pub fn read(app: &App, fields: &Fields) -> Result<ChatRequest, ApiError> {
    for name in ["previous_response_id", "conversation"] {
        if fields.value(name).is_some() {
            return Err(ApiError::field(name, "this server stores nothing; send the whole conversation as `input`"));
        }
    }
    if fields.flag("background") == Some(true) {
        return Err(ApiError::field("background", "this server answers in the foreground only"));
    }
    let mut generation = Generation::read(fields, &app.settings.defaults)?;
    if let Some(n) = fields.integer("max_output_tokens") {
        set_max_tokens(&mut generation.sampling, "max_output_tokens", n)?;
    }
    let asked = fields.list("include").is_some_and(|list| list.iter().any(|v| v == "message.output_text.logprobs"));
    if asked || fields.integer("top_logprobs").is_some_and(|n| n > 0) {
        generation.logprobs = Some(fields.integer("top_logprobs").unwrap_or(0) as u8);
    }
    if let Some(text) = fields.value("text")
        && let Some(format) = Nested::new("text", text)?.object("format")?
    {
        generation.constraint = read_format(&format, "json_schema")?;
    }
    let mut chat = ChatRequest::new(app, generation);
    if let Some(reasoning) = fields.value("reasoning") {
        let reasoning = Nested::new("reasoning", reasoning)?;
        let efforts = Kind::Choice(&["none", "minimal", "low", "medium", "high", "xhigh"]);
        if let Some(effort) = reasoning.checked("effort", efforts)? {
            chat.enable_thinking = Some(effort != "none");
            chat.template_args.insert("reasoning_effort".into(), effort.clone());
        }
    }
    chat.tools = read_tools(fields.list("tools"), |tool| match tool.need_text("type")? {
        "function" => read_tool(&tool, "parameters"),
        other => {
            Err(ApiError::field(tool.at("type"), format!("this server runs no tools of its own, such as {other:?}")))
        }
    })?;
    chat.tool_choice = read_choice(fields.value("tool_choice"))?;
    check_choice(&chat.tool_choice, &chat.tools)?;
    chat.parallel_tool_calls = fields.flag("parallel_tool_calls").unwrap_or(true);
    chat.stream = fields.flag("stream").unwrap_or(false);
    if let Some(instructions) = fields.text("instructions") {
        chat.conversation.system(vec![Part::Text(instructions.to_owned())]);
    }
    match fields.value("input") {
        Some(Value::String(text)) => chat.conversation.user(vec![Part::Text(text.clone())]),
        Some(Value::Array(items)) if items.is_empty() => {
            return Err(ApiError::field("input", "expected at least one item, found none"));
        }
        Some(Value::Array(items)) if items.len() > MAX_MESSAGES => {
            return Err(ApiError::field("input", format!("at most {MAX_MESSAGES} items, found {}", items.len())));
        }
        Some(Value::Array(items)) => {
            for (i, item) in items.iter().enumerate() {
                read_item(&mut chat, &Nested::new(format!("input[{i}]"), item)?)?;
            }
        }
        other => {
            let found = other.map_or("nothing".into(), kind_of);
            return Err(ApiError::field("input", format!("expected a string or an array of items, found {found}")));
        }
    }
    Ok(chat)
}

fn read_item(chat: &mut ChatRequest, item: &Nested) -> Result<(), ApiError> {
    let conversation = &mut chat.conversation;
    match item.text("type")?.unwrap_or("message") {
        "message" => {
            let parts = read_content(&item.at("content"), item.value("content"))?;
            match item.need_text("role")? {
                "system" | "developer" => conversation.system(parts),
                "user" => conversation.user(parts),
                "assistant" => conversation.assistant(parts, None, Vec::new()),
                other => {
                    let problem =
                        format!("expected \"system\", \"developer\", \"user\" or \"assistant\", found {other:?}");
                    return Err(ApiError::field(item.at("role"), problem));
                }
            }
        }
        "function_call" => {
            let call = ToolCall {
                id: item.text("call_id")?.unwrap_or_default().to_owned(),
                name: read_tool_name(&item.at("name"), item.need_text("name")?)?,
                arguments: read_arguments(&item.at("arguments"), item.value("arguments"))?,
            };
            conversation.assistant(Vec::new(), None, vec![call]);
        }
        "function_call_output" => {
            let parts = read_content(&item.at("output"), Some(item.need("output")?))?;
            conversation.tool(Some(item.need_text("call_id")?), parts);
        }
        "reasoning" => {
            let mut text = String::new();
            for (i, part) in item.list("content")?.into_iter().flatten().enumerate() {
                let part = Nested::new(format!("{}[{i}]", item.at("content")), part)?;
                text.push_str(part.text("text")?.unwrap_or_default());
            }
            if !text.is_empty() {
                conversation.assistant(Vec::new(), Some(&text), Vec::new());
            }
        }
        other => return Err(ApiError::field(item.at("type"), format!("this server does not read {other:?} items"))),
    }
    Ok(())
}

/// What the response object repeats of the request.
struct Rendering {
    id: String,
    created: u64,
    model: String,
    asked: Value,
    logprobs: bool,
}

impl Rendering {
    fn new(app: &App, fields: &Fields, chat: &ChatRequest) -> Rendering {
        let sampling = &chat.generation.sampling;
        let or = |name: &str, default: Value| fields.value(name).cloned().unwrap_or(default);
        Rendering {
            id: new_id("resp_"),
            created: unix_time(),
            model: app.settings.model_name.clone(),
            logprobs: chat.generation.logprobs.is_some(),
            asked: json!({
                "instructions": or("instructions", Value::Null),
                "max_output_tokens": sampling.max_tokens,
                "metadata": or("metadata", json!({})),
                "parallel_tool_calls": chat.parallel_tool_calls,
                "previous_response_id": null,
                "reasoning": or("reasoning", json!({"effort": null, "summary": null})),
                "store": false,
                "temperature": sampling.temperature,
                "text": or("text", json!({"format": {"type": "text"}})),
                "tool_choice": or("tool_choice", json!("auto")),
                "tools": or("tools", json!([])),
                "top_logprobs": chat.generation.logprobs.unwrap_or(0),
                "top_p": sampling.top_p,
                "truncation": "disabled",
            }),
        }
    }

    /// The id of an output item. Stable, so that every event of an item names the same.
    fn item_id(&self, index: usize) -> String {
        format!("item_{}_{index}", self.id.trim_start_matches("resp_"))
    }

    fn part(&self, text: &str, tokens: &[TokenReport]) -> Value {
        let logprobs = logprobs_json(self.logprobs, tokens);
        let logprobs = logprobs.get("content").cloned().unwrap_or_else(|| json!([]));
        json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
    }

    fn item(&self, index: usize, block: &Block, status: &str, tokens: &[TokenReport]) -> Value {
        let id = self.item_id(index);
        match block {
            Block::Reasoning(text) => json!({"type": "reasoning", "id": id, "summary": [], "status": status,
                "content": [{"type": "reasoning_text", "text": text}]}),
            Block::Text(text) => json!({"type": "message", "id": id, "role": "assistant", "status": status,
                "content": [self.part(text, tokens)]}),
            Block::Call { id: call_id, name, arguments } => json!({"type": "function_call", "id": id, "status": status,
                "call_id": call_id, "name": name, "arguments": arguments}),
        }
    }

    fn response(&self, status: &str, choice: &Choice, usage: Option<Usage>) -> Value {
        let cut = status == "incomplete";
        let last = choice.blocks.len().saturating_sub(1);
        let output: Vec<Value> = choice
            .blocks
            .iter()
            .enumerate()
            .map(|(i, block)| {
                self.item(i, block, if cut && i == last { "incomplete" } else { "completed" }, &choice.tokens)
            })
            .collect();
        let mut response = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": false,
            "error": choice.failure.as_ref().map(|m| json!({"code": "server_error", "message": m})),
            "incomplete_details": if cut { json!({"reason": "max_output_tokens"}) } else { Value::Null },
            "model": self.model,
            "output": output,
            "usage": usage.map(|u| json!({
                "input_tokens": u.prompt,
                "input_tokens_details": {"cached_tokens": u.cached},
                "output_tokens": u.generated,
                "output_tokens_details": {"reasoning_tokens": u.reasoning},
                "total_tokens": u.prompt + u.generated,
            })),
        });
        if let (Some(all), Some(asked)) = (response.as_object_mut(), self.asked.as_object()) {
            all.extend(asked.clone());
        }
        response
    }

    fn final_status(choice: &Choice) -> &'static str {
        match choice.finish.as_ref().map(|f| &f.reason) {
            None => "failed",
            Some(
                FinishReason::Length | FinishReason::ContextFull | FinishReason::Cancelled | FinishReason::Stopping,
            ) => "incomplete",
            Some(_) => "completed",
        }
    }

    fn whole(&self, all: &Collected) -> Value {
        let choice = &all.choices[0];
        self.response(Rendering::final_status(choice), choice, Some(all.usage(1)))
    }
}

/// `POST /v1/responses`
pub async fn responses(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    let fields = FORM.read(&body)?;
    let chat = read(&app, &fields)?;
    let rendering = Rendering::new(&app, &fields, &chat);
    let stream = chat.stream;
    let answer = work::chat(&app, chat, "responses").await?;
    if stream {
        return Ok(stream_events(rendering, answer));
    }
    let all = answer.collect().await;
    work::check_failure(&all)?;
    Ok(Json(rendering.whole(&all)).into_response())
}

/// Numbers events as they are made.
struct Numbered {
    next: u64,
    frames: Vec<Frame>,
}

impl Numbered {
    fn push(&mut self, mut event: Value) {
        event["sequence_number"] = json!(self.next);
        self.next += 1;
        self.frames.push(Frame::typed(event));
    }
}

fn stream_events(rendering: Rendering, answer: Answer) -> Response {
    let mut all = Collected::new(1);
    let mut steps = BlockSteps::default();
    let mut events = Numbered { next: 0, frames: Vec::new() };
    let empty = rendering.response("in_progress", &Choice::default(), None);
    events.push(json!({"type": "response.created", "response": empty}));
    events.push(json!({"type": "response.in_progress", "response": empty}));
    let opening = std::mem::take(&mut events.frames);
    stream_answer(answer, opening, move |event| {
        let Some((choice, output)) = event else { return Vec::new() };
        all.add(choice, &output);
        match output {
            Output::Started { .. } | Output::Token(_) => {}
            Output::Piece(piece) => {
                steps.piece(&piece).iter().for_each(|step| step_events(&rendering, &mut events, step, &[]));
            }
            Output::Finished(_) => {
                if let Some(step) = steps.finish() {
                    step_events(&rendering, &mut events, &step, &all.choices[0].tokens);
                }
                let whole = rendering.whole(&all);
                let status = Rendering::final_status(&all.choices[0]);
                events.push(json!({"type": format!("response.{status}"), "response": whole}));
            }
            Output::Failed(_) => {
                let failed = rendering.response("failed", &all.choices[0], None);
                events.push(json!({"type": "response.failed", "response": failed}));
            }
        }
        std::mem::take(&mut events.frames)
    })
}

fn step_events(rendering: &Rendering, events: &mut Numbered, step: &Step, tokens: &[TokenReport]) {
    match step {
        Step::Open(index, block) => {
            let mut item = rendering.item(*index, block, "in_progress", &[]);
            if !matches!(block, Block::Call { .. }) {
                item["content"] = json!([]);
            }
            events.push(json!({"type": "response.output_item.added", "output_index": index, "item": item}));
            let part = match block {
                Block::Text(_) => rendering.part("", &[]),
                Block::Reasoning(_) => json!({"type": "reasoning_text", "text": ""}),
                Block::Call { .. } => return,
            };
            events.push(json!({"type": "response.content_part.added", "output_index": index, "content_index": 0,
                "item_id": rendering.item_id(*index), "part": part}));
        }
        Step::Grow(index, kind, text) => {
            let id = rendering.item_id(*index);
            events.push(match kind {
                BlockKind::Text => json!({"type": "response.output_text.delta", "output_index": index,
                    "content_index": 0, "item_id": id, "delta": text, "logprobs": []}),
                BlockKind::Reasoning => json!({"type": "response.reasoning_text.delta", "output_index": index,
                    "content_index": 0, "item_id": id, "delta": text}),
                BlockKind::Call => json!({"type": "response.function_call_arguments.delta", "output_index": index,
                    "item_id": id, "delta": text}),
            });
        }
        Step::Close(index, block) => {
            let id = rendering.item_id(*index);
            let part = match block {
                Block::Text(text) => {
                    let part = rendering.part(text, tokens);
                    events.push(json!({"type": "response.output_text.done", "output_index": index, "content_index": 0,
                        "item_id": id, "text": text, "logprobs": part["logprobs"]}));
                    Some(part)
                }
                Block::Reasoning(text) => {
                    events.push(json!({"type": "response.reasoning_text.done", "output_index": index,
                        "content_index": 0, "item_id": id, "text": text}));
                    Some(json!({"type": "reasoning_text", "text": text}))
                }
                Block::Call { name, arguments, .. } => {
                    events.push(json!({"type": "response.function_call_arguments.done", "output_index": index,
                        "item_id": id, "name": name, "arguments": arguments}));
                    None
                }
            };
            if let Some(part) = part {
                events.push(json!({"type": "response.content_part.done", "output_index": index, "content_index": 0,
                    "item_id": id, "part": part}));
            }
            let item = rendering.item(*index, block, "completed", tokens);
            events.push(json!({"type": "response.output_item.done", "output_index": index, "item": item}));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::app::Settings;
    use super::*;

    fn translate(body: Value) -> Result<ChatRequest, ApiError> {
        read(&App::new(Settings::default()), &FORM.read(body.to_string().as_bytes())?)
    }

    #[test]
    fn items_become_the_templates_messages() {
        let chat = translate(json!({"instructions": "brief", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"a\":1}"},
            {"type": "function_call_output", "call_id": "c", "output": "ok"},
        ]}))
        .unwrap();
        let m = chat.conversation.messages();
        assert_eq!(m[0], json!({"role": "system", "content": "brief"}));
        assert_eq!(m[2]["reasoning_content"], "hm");
        assert_eq!(m[2]["tool_calls"][0]["function"]["arguments"]["a"], 1);
        assert_eq!(m[3]["role"], "tool");
    }

    #[test]
    fn bad_fields_are_named() {
        let cases = [
            (json!({}), "input"),
            (json!({"input": 4}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": "x", "previous_response_id": "r"}), "previous_response_id"),
            (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
            (json!({"input": [{"role": "x", "content": "y"}]}), "input[0].role"),
            (json!({"input": "x", "text": {"format": {"type": "json_schema"}}}), "text.format.json_schema"),
            (json!({"input": "x", "reasoning": {"effort": 3}}), "reasoning.effort"),
            (json!({"input": "x", "tools": [{"type": "web_search"}]}), "tools[0].type"),
        ];
        for (body, want) in cases {
            assert_eq!(translate(body.clone()).unwrap_err().param.unwrap(), want, "{body}");
        }
    }
}
