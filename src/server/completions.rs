//! OpenAI's `/v1/completions`: raw prompts, as text or token ids, without a template.

use super::answer::{Answer, Choice, Collected, Output, Reading, TokenReport, timings};
use super::app::{App, Service, new_id, unix_time};
use super::chat::{finish_reason, usage_json};
use super::error::{ApiError, Dialect, kind_of};
use super::form::{Field, Fields, Form, Kind, Nested, field};
use super::params::{GENERATION_FIELDS, Generation, MAX_CHOICES, SAMPLING_FIELDS, check_slot, token_id};
use super::prompt::{choices, compile, request, text_error};
use super::sse::{Frame, stream_answer};
use super::work;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use strata_core::engine::{Prompt, Request};
use strata_core::text::Specials;
use strata_core::text::output::Piece;

const FIELDS: &[Field] = &[
    field("model", Kind::Text, "Ignored: the server has one model"),
    field("prompt", Kind::Any, "A string, token ids, or an array of either"),
    field("n", Kind::Integer(1, MAX_CHOICES as i64), "Answers per prompt"),
    field("best_of", Kind::Integer(1, MAX_CHOICES as i64), "Must equal n"),
    field("echo", Kind::Flag, "Put the prompt before the answer"),
    field("suffix", Kind::Text, "Refused: this model does not fill in the middle"),
    field(
        "logprobs",
        Kind::Integer(0, 20),
        "Report log-probabilities of the answer's tokens with so many alternatives each; offsets count an echoed prompt",
    ),
    field("stream", Kind::Flag, "Send server-sent events"),
    field("stream_options", Kind::Object, "{\"include_usage\": true} adds a last chunk with token counts"),
    field("special_tokens", Kind::Flag, "false reads special tokens in a text prompt as plain text (default true)"),
];

/// The request body.
pub const FORM: Form =
    Form { name: "CompletionRequest", groups: &[FIELDS, SAMPLING_FIELDS, GENERATION_FIELDS], required: &["prompt"] };

/// A prompt as the client sent it.
#[derive(Clone, Debug, PartialEq)]
enum RawPrompt {
    Text(String),
    Tokens(Vec<u32>),
}

fn read_prompts(value: &Value) -> Result<Vec<RawPrompt>, ApiError> {
    let tokens = |path: &str, ids: &[Value]| -> Result<RawPrompt, ApiError> {
        let ids = ids.iter().enumerate().map(|(i, id)| token_id(&format!("{path}[{i}]"), id));
        Ok(RawPrompt::Tokens(ids.collect::<Result<_, _>>()?))
    };
    let prompts = match value {
        Value::String(text) => vec![RawPrompt::Text(text.clone())],
        Value::Array(entries) if entries.first().is_some_and(Value::is_number) => vec![tokens("prompt", entries)?],
        Value::Array(entries) => entries
            .iter()
            .enumerate()
            .map(|(i, entry)| match entry {
                Value::String(text) => Ok(RawPrompt::Text(text.clone())),
                Value::Array(ids) => tokens(&format!("prompt[{i}]"), ids),
                other => Err(ApiError::field(
                    format!("prompt[{i}]"),
                    format!("expected a string or an array of token ids, found {}", kind_of(other)),
                )),
            })
            .collect::<Result<_, _>>()?,
        other => {
            let problem = format!("expected a string, token ids or an array of either, found {}", kind_of(other));
            return Err(ApiError::field("prompt", problem));
        }
    };
    if prompts.is_empty() || prompts.contains(&RawPrompt::Tokens(Vec::new())) {
        return Err(ApiError::field("prompt", "a prompt must not be empty"));
    }
    Ok(prompts)
}

/// What a body asks for.
struct Completion {
    prompts: Vec<RawPrompt>,
    generation: Generation,
    echo: bool,
    parse_specials: bool,
}

fn read(app: &App, fields: &Fields) -> Result<Completion, ApiError> {
    let mut generation = Generation::read(fields, &app.settings.defaults)?;
    check_slot(fields, app)?;
    if fields.text("suffix").is_some_and(|s| !s.is_empty()) {
        return Err(ApiError::field("suffix", "this server does not fill in the middle"));
    }
    generation.n = fields.integer("n").unwrap_or(1) as usize;
    if fields.integer("best_of").is_some_and(|b| b as usize != generation.n) {
        return Err(ApiError::field("best_of", "must equal `n`"));
    }
    generation.logprobs = fields.integer("logprobs").map(|n| n as u8);
    let prompts = fields.value("prompt").map(read_prompts).transpose()?.unwrap_or_default();
    if prompts.len() * generation.n > MAX_CHOICES {
        let problem = format!("{} prompts times n = {} is more than {MAX_CHOICES}", prompts.len(), generation.n);
        return Err(ApiError::field("prompt", problem));
    }
    Ok(Completion {
        prompts,
        generation,
        echo: fields.flag("echo").unwrap_or(false),
        parse_specials: fields.flag("special_tokens").unwrap_or(true),
    })
}

fn requests(service: &Service, asked: &Completion) -> Result<Vec<(Request, Reading)>, ApiError> {
    let grammar = asked.generation.constraint.as_ref().map(|c| compile(service, &c.spec(), false)).transpose()?;
    let specials = if asked.parse_specials { Specials::Parse } else { Specials::AsText };
    let mut all = Vec::new();
    for prompt in &asked.prompts {
        let ids = match prompt {
            RawPrompt::Text(text) => {
                service.tokenizer.encode_up_to(text, specials, service.engine.ctx()).map_err(text_error)?
            }
            RawPrompt::Tokens(ids) => {
                let size = service.tokenizer.vocab_size();
                if let Some(id) = ids.iter().find(|&&id| id as usize >= size) {
                    let problem = format!("token id {id} is outside the vocabulary of {size} tokens");
                    return Err(ApiError::field("prompt", problem));
                }
                ids.clone()
            }
        };
        let echo = asked.echo.then(|| match prompt {
            RawPrompt::Text(text) => text.clone(),
            RawPrompt::Tokens(ids) => service.tokenizer.decode(ids),
        });
        let reading = Reading { mode: None, split_reasoning: false, single_call: false, echo };
        let first = request(&asked.generation, Prompt::tokens(ids), grammar.clone());
        all.extend(choices(first, reading, asked.generation.n));
    }
    Ok(all)
}

struct Rendering {
    id: String,
    created: u64,
    model: String,
    n: usize,
    include_usage: bool,
    logprobs: bool,
    /// Characters put before the answers of each prompt (0 without `echo`).
    echoed: Vec<usize>,
}

impl Rendering {
    fn object(&self, choices: Vec<Value>) -> Value {
        json!({
            "id": self.id, "object": "text_completion", "created": self.created, "model": self.model,
            "choices": choices,
        })
    }

    fn logprobs(&self, tokens: &[TokenReport], offset: &mut usize) -> Value {
        if !self.logprobs {
            return Value::Null;
        }
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let mut offsets = Vec::with_capacity(tokens.len());
        for token in tokens {
            offsets.push(*offset);
            *offset += text(&token.bytes).chars().count();
        }
        let top = |token: &TokenReport| {
            let entries = token.top.iter().map(|(b, p)| (text(b), json!(p.max(-9999.0))));
            Value::Object(entries.collect::<Map<_, _>>())
        };
        json!({
            "tokens": tokens.iter().map(|t| text(&t.bytes)).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|t| t.logprob.max(-9999.0)).collect::<Vec<_>>(),
            "top_logprobs": tokens.iter().map(top).collect::<Vec<_>>(),
            "text_offset": offsets,
        })
    }

    fn choice(&self, index: usize, text: &str, logprobs: Value, reason: Option<&str>) -> Value {
        json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason})
    }

    fn whole(&self, all: &Collected) -> Value {
        let choice = |(index, c): (usize, &Choice)| {
            let mut offset = self.echoed.get(index / self.n).copied().unwrap_or(0);
            let logprobs = self.logprobs(&c.tokens, &mut offset);
            self.choice(index, &c.text(), logprobs, c.finish.as_ref().map(finish_reason))
        };
        let mut object = self.object(all.choices.iter().enumerate().map(choice).collect());
        object["usage"] = usage_json(&all.usage(self.n));
        object["timings"] = json!(all.choices[0].finish.as_ref().map(|f| timings(&f.stats)));
        object
    }
}

/// `POST /v1/completions`
pub async fn completions(State(app): State<Arc<App>>, body: Bytes) -> Result<Response, ApiError> {
    let fields = FORM.read(&body)?;
    let asked = read(&app, &fields)?;
    let options = fields.value("stream_options").map(|o| Nested::new("stream_options", o)).transpose()?;
    let include_usage = match &options {
        Some(options) => options.checked("include_usage", Kind::Flag)?.is_some_and(|v| v == true),
        None => false,
    };
    let rendering = Rendering {
        id: new_id("cmpl-"),
        created: unix_time(),
        model: app.settings.model_name.clone(),
        n: asked.generation.n,
        include_usage,
        logprobs: asked.generation.logprobs.is_some(),
        echoed: Vec::new(),
    };
    let requests = work::blocking(&app, move |_, service| requests(service, &asked)).await?;
    let echoes = requests.iter().step_by(rendering.n).map(|(_, reading)| reading.echo.as_deref());
    let echoed = echoes.map(|echo| echo.map_or(0, |text| text.chars().count())).collect();
    let rendering = Rendering { echoed, ..rendering };
    let answer = work::submit(&app, requests, "completion")?;
    if fields.flag("stream").unwrap_or(false) {
        return Ok(stream_chunks(rendering, answer));
    }
    let all = answer.collect().await;
    work::check_failure(&all)?;
    Ok(Json(rendering.whole(&all)).into_response())
}

fn stream_chunks(rendering: Rendering, answer: Answer) -> Response {
    let count = answer.count;
    let mut all = Collected::new(count);
    let mut waiting: Vec<Vec<TokenReport>> = vec![Vec::new(); count];
    let mut offsets: Vec<usize> =
        (0..count).map(|index| rendering.echoed.get(index / rendering.n).copied().unwrap_or(0)).collect();
    stream_answer(answer, Vec::new(), move |event| {
        let Some((index, output)) = event else {
            let mut last = Vec::new();
            if rendering.include_usage {
                let mut object = rendering.object(Vec::new());
                object["usage"] = usage_json(&all.usage(rendering.n));
                last.push(Frame::data(object));
            }
            last.push(Frame::done());
            return last;
        };
        all.add(index, &output);
        let mut chunk = |text: &str, reason: Option<&str>| {
            let tokens = std::mem::take(&mut waiting[index]);
            let logprobs =
                if tokens.is_empty() { Value::Null } else { rendering.logprobs(&tokens, &mut offsets[index]) };
            rendering.object(vec![rendering.choice(index, text, logprobs, reason)])
        };
        match output {
            Output::Token(token) => {
                waiting[index].push(token);
                Vec::new()
            }
            Output::Piece(Piece::Content(text)) => vec![Frame::data(chunk(&text, None))],
            Output::Finished(finish) => {
                let mut last = chunk("", Some(finish_reason(&finish)));
                last["timings"] = timings(&finish.stats);
                vec![Frame::data(last)]
            }
            Output::Failed(message) => vec![Frame::data(work::failed(&message).body(Dialect::OpenAi))],
            Output::Started { .. } | Output::Piece(_) => Vec::new(),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_read_in_all_four_forms() {
        let text = |s: &str| RawPrompt::Text(s.into());
        assert_eq!(read_prompts(&json!("a")).unwrap(), [text("a")]);
        assert_eq!(read_prompts(&json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
        assert_eq!(read_prompts(&json!([1, 2])).unwrap(), [RawPrompt::Tokens(vec![1, 2])]);
        assert_eq!(read_prompts(&json!([[1], [2]])).unwrap().len(), 2);
        for (bad, path) in [
            (json!({}), "prompt"),
            (json!([]), "prompt"),
            (json!([[]]), "prompt"),
            (json!([1, "a"]), "prompt[1]"),
            (json!([[1], [-2]]), "prompt[1][0]"),
            (json!([true]), "prompt[0]"),
        ] {
            assert_eq!(read_prompts(&bad).unwrap_err().param.unwrap(), path, "{bad}");
        }
    }
}
