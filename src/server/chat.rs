//! OpenAI's `/v1/chat/completions`: its fields into a [`ChatRequest`], the answer's pieces into its JSON and SSE.

use super::answer::{Answer, Choice, Collected, Finish, Output, TokenReport, Usage, timings};
use super::app::{App, new_id, unix_time};
use super::conversation::{
    Conversation, MAX_MESSAGES, MAX_TOOLS, ToolCall, ToolChoice, check_choice, need_messages, read_arguments,
    read_content, read_tool, read_tool_name, read_tools,
};
use super::error::{ApiError, Dialect, kind_of};
use super::form::{Field, Fields, Form, Kind, Nested, field};
use super::params::{
    GENERATION_FIELDS, Generation, MAX_CHOICES, SAMPLING_FIELDS, TOP_LOGPROBS, check_slot, set_max_tokens,
};
use super::prompt::ChatRequest;
use super::sse::{Frame, stream_answer};
use super::work;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use strata_core::engine::FinishReason;
use strata_core::text::output::Piece;

/// Fields of chat requests beyond sampling and generation.
const CHAT_FIELDS: &[Field] = &[
    field("model", Kind::Text, "Ignored: the server has one model"),
    field("messages", Kind::ListOf(MAX_MESSAGES, "ChatMessage"), "The conversation"),
    field("tools", Kind::ListOf(MAX_TOOLS, "ChatTool"), "Functions the model may call"),
    field("tool_choice", Kind::Any, "\"none\", \"auto\", \"required\", or a function by name"),
    field("parallel_tool_calls", Kind::Flag, "false reports one call at most"),
    field("n", Kind::Integer(1, MAX_CHOICES as i64), "Answers to generate"),
    field("stream", Kind::Flag, "Send server-sent events"),
    field("stream_options", Kind::Object, "{\"include_usage\": true} adds a last chunk with token counts"),
    field("logprobs", Kind::Flag, "Report log-probabilities of the answer's tokens"),
    TOP_LOGPROBS,
    field("max_completion_tokens", Kind::Integer(-1, 1 << 40), "The same as max_tokens, thinking included"),
    field("enable_thinking", Kind::Flag, "Thinking on or off"),
    field(
        "reasoning_effort",
        Kind::Choice(&["none", "minimal", "low", "medium", "high", "xhigh"]),
        "\"none\" turns thinking off",
    ),
    field("thinking_budget", Kind::Integer(0, 1 << 40), "Most tokens of thinking"),
    field("reasoning_budget", Kind::Integer(-1, 1 << 40), "The same as thinking_budget; -1 is no limit"),
    field(
        "reasoning_format",
        Kind::Choice(&["none", "auto", "deepseek", "deepseek-legacy"]),
        "\"none\" leaves thinking in the content",
    ),
    field("chat_template_kwargs", Kind::Object, "Further variables for the chat template"),
];

/// The request body.
pub const FORM: Form = Form {
    name: "ChatCompletionRequest",
    groups: &[CHAT_FIELDS, SAMPLING_FIELDS, GENERATION_FIELDS],
    required: &["messages"],
};

/// What only this dialect needs to know when it renders.
struct Rendering {
    id: String,
    created: u64,
    model: String,
    include_usage: bool,
    logprobs: bool,
}

/// Translates a body.
pub fn read(app: &App, fields: &Fields) -> Result<ChatRequest, ApiError> {
    let mut generation = Generation::read(fields, &app.settings.defaults)?;
    check_slot(fields, app)?;
    generation.read_chat_logprobs(fields)?;
    generation.n = fields.integer("n").unwrap_or(1) as usize;
    if let Some(n) = fields.integer("max_completion_tokens") {
        set_max_tokens(&mut generation.sampling, "max_completion_tokens", n)?;
    }
    let budget = fields.integer("thinking_budget").or(fields.integer("reasoning_budget"));
    generation.thinking_budget = budget.and_then(|n| usize::try_from(n).ok());
    let mut chat = ChatRequest::new(app, generation);
    if budget == Some(-1) {
        chat.generation.thinking_budget = None;
    }
    read_thinking(fields, &mut chat)?;
    chat.tools = read_tools(fields.list("tools"), |tool| match tool.text("type")?.unwrap_or("function") {
        "function" => read_tool(&Nested::new(tool.at("function"), tool.need("function")?)?, "parameters"),
        other => Err(ApiError::field(tool.at("type"), format!("expected \"function\", found {other:?}"))),
    })?;
    chat.tool_choice = read_choice(fields.value("tool_choice"))?;
    check_choice(&chat.tool_choice, &chat.tools)?;
    chat.parallel_tool_calls = fields.flag("parallel_tool_calls").unwrap_or(true);
    chat.stream = fields.flag("stream").unwrap_or(false);
    need_messages("messages", fields.list("messages"))?;
    for (i, message) in fields.list("messages").into_iter().flatten().enumerate() {
        read_message(&mut chat.conversation, &Nested::new(format!("messages[{i}]"), message)?)?;
    }
    Ok(chat)
}

fn read_thinking(fields: &Fields, chat: &mut ChatRequest) -> Result<(), ApiError> {
    if let Some(kwargs) = fields.object("chat_template_kwargs") {
        for (name, value) in kwargs {
            match (name.as_str(), value) {
                ("enable_thinking", Value::Bool(on)) => chat.enable_thinking = Some(*on),
                ("enable_thinking", other) => {
                    let problem = format!("expected true or false, found {}", kind_of(other));
                    return Err(ApiError::field("chat_template_kwargs.enable_thinking", problem));
                }
                ("messages" | "tools" | "add_generation_prompt", _) => {
                    return Err(ApiError::field(format!("chat_template_kwargs.{name}"), "cannot be set this way"));
                }
                _ => drop(chat.template_args.insert(name.clone(), value.clone())),
            }
        }
    }
    if let Some(effort) = fields.text("reasoning_effort") {
        chat.enable_thinking = Some(effort != "none");
        chat.template_args.insert("reasoning_effort".into(), json!(effort));
    }
    if let Some(on) = fields.flag("enable_thinking") {
        chat.enable_thinking = Some(on);
    }
    chat.split_reasoning = fields.text("reasoning_format") != Some("none");
    Ok(())
}

/// `tool_choice` as the chat and responses routes spell it.
pub fn read_choice(value: Option<&Value>) -> Result<ToolChoice, ApiError> {
    let Some(value) = value else { return Ok(ToolChoice::Auto) };
    match value {
        Value::String(word) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" | "any" => Ok(ToolChoice::Required),
            other => Err(ApiError::field(
                "tool_choice",
                format!("expected \"none\", \"auto\", \"required\" or an object, found {other:?}"),
            )),
        },
        object => {
            let choice = Nested::new("tool_choice", object)?;
            if choice.need_text("type")? != "function" {
                return Err(ApiError::field("tool_choice.type", "expected \"function\""));
            }
            let name = match choice.object("function")? {
                Some(function) => function.need_text("name")?,
                None => choice.need_text("name")?,
            };
            Ok(ToolChoice::Named(name.to_owned()))
        }
    }
}

fn read_message(conversation: &mut Conversation, message: &Nested) -> Result<(), ApiError> {
    let parts = read_content(&message.at("content"), message.value("content"))?;
    match message.need_text("role")? {
        "system" | "developer" => conversation.system(parts),
        "user" => conversation.user(parts),
        "assistant" => {
            let calls = message.list("tool_calls")?.into_iter().flatten().enumerate();
            let calls = calls.map(|(i, call)| read_call(&format!("{}[{i}]", message.at("tool_calls")), call));
            let calls = calls.collect::<Result<Vec<_>, _>>()?;
            let reasoning = match message.text("reasoning_content")? {
                Some(text) => Some(text),
                None => message.text("reasoning")?,
            };
            conversation.assistant(parts, reasoning, calls);
        }
        "tool" | "function" => conversation.tool(message.text("tool_call_id")?, parts),
        other => {
            return Err(ApiError::field(
                message.at("role"),
                format!("expected \"system\", \"user\", \"assistant\" or \"tool\", found {other:?}"),
            ));
        }
    }
    Ok(())
}

fn read_call(path: &str, value: &Value) -> Result<ToolCall, ApiError> {
    let call = Nested::new(path, value)?;
    let function = Nested::new(call.at("function"), call.need("function")?)?;
    Ok(ToolCall {
        id: call.text("id")?.unwrap_or_default().to_owned(),
        name: read_tool_name(&function.at("name"), function.need_text("name")?)?,
        arguments: read_arguments(&function.at("arguments"), function.value("arguments"))?,
    })
}

/// `POST /v1/chat/completions`
pub async fn completions(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    let fields = FORM.read(&body)?;
    let chat = read(&app, &fields)?;
    let options = fields.value("stream_options").map(|o| Nested::new("stream_options", o)).transpose()?;
    let include_usage = match &options {
        Some(options) => options.checked("include_usage", Kind::Flag)?.is_some_and(|v| v == true),
        None => false,
    };
    let rendering = Rendering {
        id: new_id("chatcmpl-"),
        created: unix_time(),
        model: app.settings.model_name.clone(),
        include_usage,
        logprobs: chat.generation.logprobs.is_some(),
    };
    let stream = chat.stream;
    let answer = work::chat(&app, chat, "chat").await?;
    if stream {
        return Ok(stream_chunks(rendering, answer));
    }
    let all = answer.collect().await;
    work::check_failure(&all)?;
    Ok(Json(whole(&rendering, &all)).into_response())
}

/// OpenAI's word for how a choice ended.
pub fn finish_reason(finish: &Finish) -> &'static str {
    match finish.reason {
        FinishReason::Length | FinishReason::ContextFull => "length",
        FinishReason::Cancelled | FinishReason::Stopping => "length",
        _ if finish.called_tool => "tool_calls",
        FinishReason::EndToken(_) | FinishReason::StopString(_) | FinishReason::GrammarEnd => "stop",
    }
}

/// OpenAI's usage object.
pub fn usage_json(usage: &Usage) -> Value {
    json!({
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.generated,
        "total_tokens": usage.prompt + usage.generated,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    })
}

fn token_json(token: &TokenReport) -> Value {
    let one = |bytes: &[u8], logprob: f32| {
        let mut entry = Map::new();
        entry.insert("token".into(), json!(String::from_utf8_lossy(bytes)));
        // -inf has no JSON form; OpenAI sends -9999 for "impossible".
        entry.insert("logprob".into(), json!(logprob.max(-9999.0)));
        entry.insert("bytes".into(), json!(bytes));
        entry
    };
    let mut entry = one(&token.bytes, token.logprob);
    entry.insert("top_logprobs".into(), token.top.iter().map(|(b, p)| Value::Object(one(b, *p))).collect());
    Value::Object(entry)
}

/// `{"content": [...]}`, or null where log-probabilities were not asked for.
pub fn logprobs_json(asked: bool, tokens: &[TokenReport]) -> Value {
    if asked { json!({"content": tokens.iter().map(token_json).collect::<Vec<_>>()}) } else { Value::Null }
}

fn message_json(choice: &Choice) -> Value {
    let calls: Vec<Value> = choice.calls().map(|(id, name, arguments)| call_json(id, name, arguments)).collect();
    let (text, reasoning) = (choice.text(), choice.reasoning());
    let mut message = Map::new();
    message.insert("role".into(), json!("assistant"));
    message.insert("content".into(), if text.is_empty() && !calls.is_empty() { Value::Null } else { json!(text) });
    if !reasoning.is_empty() {
        message.insert("reasoning_content".into(), json!(reasoning));
    }
    if !calls.is_empty() {
        message.insert("tool_calls".into(), json!(calls));
    }
    Value::Object(message)
}

fn call_json(id: &str, name: &str, arguments: &str) -> Value {
    json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}})
}

fn whole(rendering: &Rendering, all: &Collected) -> Value {
    let choices: Vec<Value> = all
        .choices
        .iter()
        .enumerate()
        .map(|(index, choice)| {
            json!({
                "index": index,
                "message": message_json(choice),
                "logprobs": logprobs_json(rendering.logprobs, &choice.tokens),
                "finish_reason": choice.finish.as_ref().map(finish_reason),
            })
        })
        .collect();
    json!({
        "id": rendering.id,
        "object": "chat.completion",
        "created": rendering.created,
        "model": rendering.model,
        "choices": choices,
        "usage": usage_json(&all.usage(all.choices.len())),
        "timings": all.choices[0].finish.as_ref().map(|f| timings(&f.stats)),
    })
}

fn stream_chunks(rendering: Rendering, answer: Answer) -> Response {
    let count = answer.count;
    let mut all = Collected::new(count);
    // Token reports wait for the text they belong to.
    let mut waiting: Vec<Vec<TokenReport>> = vec![Vec::new(); count];
    let chunk = move |r: &Rendering, index: usize, delta: Value, tokens: &[TokenReport], reason: Option<&str>| {
        json!({
            "id": r.id,
            "object": "chat.completion.chunk",
            "created": r.created,
            "model": r.model,
            "choices": [{
                "index": index,
                "delta": delta,
                "logprobs": if tokens.is_empty() { Value::Null } else { logprobs_json(r.logprobs, tokens) },
                "finish_reason": reason,
            }],
        })
    };
    let opening =
        (0..count).map(|i| Frame::data(chunk(&rendering, i, json!({"role": "assistant", "content": ""}), &[], None)));
    let opening = opening.collect();
    stream_answer(answer, opening, move |event| {
        let Some((index, output)) = event else {
            let mut last = Vec::new();
            if rendering.include_usage {
                last.push(Frame::data(json!({
                    "id": rendering.id,
                    "object": "chat.completion.chunk",
                    "created": rendering.created,
                    "model": rendering.model,
                    "choices": [],
                    "usage": usage_json(&all.usage(count)),
                    "timings": all.choices[0].finish.as_ref().map(|f| timings(&f.stats)),
                })));
            }
            last.push(Frame::done());
            return last;
        };
        all.add(index, &output);
        let delta = match output {
            Output::Started { .. } => return vec![],
            Output::Token(token) => {
                waiting[index].push(token);
                return vec![];
            }
            Output::Piece(Piece::Content(text)) => json!({"content": text}),
            Output::Piece(Piece::Reasoning(text)) => json!({"reasoning_content": text}),
            Output::Piece(Piece::ToolCallStart { index, id, name }) => {
                let mut call = call_json(&id, &name, "");
                call["index"] = json!(index);
                json!({"tool_calls": [call]})
            }
            Output::Piece(Piece::ToolCallArguments { index, delta }) => {
                json!({"tool_calls": [{"index": index, "function": {"arguments": delta}}]})
            }
            Output::Piece(Piece::ToolCallEnd { .. }) => return vec![],
            Output::Finished(finish) => {
                let tokens = std::mem::take(&mut waiting[index]);
                let mut last = chunk(&rendering, index, json!({}), &tokens, Some(finish_reason(&finish)));
                last["timings"] = timings(&finish.stats);
                return vec![Frame::data(last)];
            }
            Output::Failed(message) => {
                return vec![Frame::data(work::failed(&message).body(Dialect::OpenAi))];
            }
        };
        let tokens = std::mem::take(&mut waiting[index]);
        vec![Frame::data(chunk(&rendering, index, delta, &tokens, None))]
    })
}

#[cfg(test)]
mod tests {
    use super::super::app::Settings;
    use super::*;

    fn translate(body: Value) -> Result<ChatRequest, ApiError> {
        read(&App::new(Settings::default()), &FORM.read(body.to_string().as_bytes())?)
    }

    fn refused(body: Value) -> String {
        let error = translate(body).unwrap_err();
        assert_eq!(error.status, 400);
        error.param.unwrap_or_default()
    }

    fn user(extra: Value) -> Value {
        let mut body = json!({"messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    }

    #[test]
    fn bad_fields_are_named() {
        let cases = [
            (json!({}), "messages"),
            (json!({"messages": []}), "messages"),
            (json!({"messages": [3]}), "messages[0]"),
            (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "wizard", "content": "x"}]}), "messages[0].role"),
            (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
            (json!({"messages": [{"role": "user", "content": [{"type": "video"}]}]}), "messages[0].content[0].type"),
            (
                json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}),
                "messages[0].tool_calls[0].function.arguments",
            ),
            (user(json!({"max_completion_tokens": 0})), "max_completion_tokens"),
            (user(json!({"max_tokens": "many"})), "max_tokens"),
            (user(json!({"tools": [{"type": "function"}]})), "tools[0].function"),
            (user(json!({"tools": [{"type": "retrieval"}]})), "tools[0].type"),
            (user(json!({"tools": [{"type": "function", "function": {"name": "a b"}}]})), "tools[0].function.name"),
            (user(json!({"tool_choice": "required"})), "tool_choice"),
            (user(json!({"tool_choice": {"type": "function", "function": {"name": "f"}}})), "tool_choice"),
            (user(json!({"top_logprobs": 2})), "top_logprobs"),
            (user(json!({"n": 99})), "n"),
            (user(json!({"reasoning_effort": "extreme"})), "reasoning_effort"),
            (user(json!({"chat_template_kwargs": {"messages": []}})), "chat_template_kwargs.messages"),
            (user(json!({"response_format": {"type": "xml"}})), "response_format.type"),
            (user(json!({"response_format": {"type": "json_schema"}})), "response_format.json_schema"),
            (user(json!({"stop": ""})), "stop"),
        ];
        for (body, want) in cases {
            assert_eq!(refused(body.clone()), want, "{body}");
        }
    }

    #[test]
    fn thinking_is_switched_by_every_spelling() {
        let thinking = |extra| translate(user(extra)).unwrap().enable_thinking;
        assert_eq!(thinking(json!({})), None);
        assert_eq!(thinking(json!({"enable_thinking": false})), Some(false));
        assert_eq!(thinking(json!({"reasoning_effort": "none"})), Some(false));
        assert_eq!(thinking(json!({"reasoning_effort": "high"})), Some(true));
        assert_eq!(thinking(json!({"chat_template_kwargs": {"enable_thinking": false}})), Some(false));
    }

    #[test]
    fn history_with_calls_reaches_the_template_as_objects() {
        let chat = translate(json!({"messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
            {"role": "assistant", "content": null, "reasoning_content": "sum", "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{\"a\": 2, \"b\": 2}"}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "4"},
        ], "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]}))
        .unwrap();
        let m = chat.conversation.messages();
        assert_eq!(m[0]["role"], "system");
        assert_eq!(m[2]["tool_calls"][0]["function"]["arguments"]["a"], 2);
        assert_eq!(m[2]["reasoning_content"], "sum");
        assert_eq!(m[3]["tool_call_id"], "c1");
        assert_eq!(chat.tools[0].name, "add");
    }
}
