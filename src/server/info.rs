//! Routes that generate nothing: health, models, props, slots, metrics, tokens, templates.

use super::app::App;
use super::chat;
use super::error::ApiError;
use super::form::{Form, Kind, check, field};
use super::params::token_id;
use super::prompt::{chat_prompt, text_error};
use super::work;
use axum::Json;
use axum::body::Bytes;
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;
use strata_core::text::Specials;

/// The body of `/tokenize`.
pub const TOKENIZE: Form = Form {
    name: "TokenizeRequest",
    groups: &[&[
        field("content", Kind::Text, "The text"),
        field("parse_special", Kind::Flag, "Special tokens in the text are tokens (default true)"),
        field("with_pieces", Kind::Flag, "Report each token's text too"),
    ]],
    required: &["content"],
};

/// The body of `/detokenize`.
pub const DETOKENIZE: Form = Form {
    name: "DetokenizeRequest",
    groups: &[&[field("tokens", Kind::List(1 << 24), "Token ids")]],
    required: &["tokens"],
};

/// `GET /health`
pub async fn health(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    app.service()?;
    if app.is_stopping() {
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping").with_code("stopping"));
    }
    Ok(Json(json!({"status": "ok"})))
}

/// `GET /v1/models`
pub async fn models(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    Ok(Json(json!({"object": "list", "data": [model_json(&app)?]})))
}

/// `GET /v1/models/{name}`
pub async fn model(State(app): State<Arc<App>>, Path(name): Path<String>) -> Result<Json<Value>, ApiError> {
    match name == app.settings.model_name {
        true => Ok(Json(model_json(&app)?)),
        false => {
            Err(ApiError::new(StatusCode::NOT_FOUND, "this server has another model").with_code("model_not_found"))
        }
    }
}

fn model_json(app: &App) -> Result<Value, ApiError> {
    let service = app.service()?;
    Ok(json!({
        "id": app.settings.model_name,
        "object": "model",
        "created": app.started,
        "owned_by": "strata",
        "max_model_len": service.engine.ctx(),
        "meta": service.about,
    }))
}

/// `GET /props`
pub async fn props(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let service = app.service()?;
    let status = service.engine.status();
    let d = &app.settings.defaults;
    Ok(Json(json!({
        "model_alias": app.settings.model_name,
        "total_slots": status.slots.len(),
        "n_ctx": status.ctx,
        "modalities": {"vision": service.pictures.is_some(), "audio": false},
        "chat_template": service.template.is_some(),
        "default_generation_settings": {
            "temperature": d.temperature, "top_k": d.top_k, "top_p": d.top_p, "min_p": d.min_p,
            "repeat_penalty": d.repeat_penalty, "repeat_last_n": d.repeat_last_n,
            "presence_penalty": d.presence_penalty, "frequency_penalty": d.frequency_penalty,
            "max_tokens": d.max_tokens, "seed": d.seed,
        },
        "model": service.about,
        "build_info": concat!("strata ", env!("CARGO_PKG_VERSION")),
    })))
}

/// `GET /slots`
pub async fn slots(State(app): State<Arc<App>>) -> Result<Json<Value>, ApiError> {
    let service = app.service()?;
    let status = service.engine.status();
    let slots: Vec<Value> = status
        .slots
        .iter()
        .map(|slot| {
            json!({
                "id": slot.index,
                "n_ctx": status.ctx,
                "state": slot.state,
                "is_processing": slot.request.is_some(),
                "request": slot.request,
                "held_rows": slot.held_rows,
                "prompt_rows": slot.prompt_rows,
                "read_rows": slot.read_rows,
                "n_decoded": slot.generated,
                "checkpoints": slot.checkpoints,
            })
        })
        .collect();
    Ok(Json(json!(slots)))
}

/// `GET /metrics`
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    let text = app.metrics.render(&app.settings.model_name, app.service().ok());
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

/// `POST /v1/embeddings`
pub async fn embeddings() -> ApiError {
    ApiError::bad_request("embeddings are not supported: this server generates text").with_code("not_supported")
}

/// `POST /tokenize`
pub async fn tokenize(State(app): State<Arc<App>>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let fields = TOKENIZE.read(&body)?;
    let parse = fields.flag("parse_special").unwrap_or(true);
    work::blocking(&app, move |_, service| {
        let specials = if parse { Specials::Parse } else { Specials::AsText };
        let ids = service.tokenizer.encode(fields.text("content").unwrap_or_default(), specials).map_err(text_error)?;
        let tokens: Vec<Value> = if fields.flag("with_pieces").unwrap_or(false) {
            let piece = |id: u32| match std::str::from_utf8(service.tokenizer.token_bytes(id)) {
                Ok(text) => json!(text),
                Err(_) => json!(service.tokenizer.token_bytes(id)),
            };
            ids.iter().map(|&id| json!({"id": id, "piece": piece(id)})).collect()
        } else {
            ids.iter().map(|id| json!(id)).collect()
        };
        Ok(Json(json!({"tokens": tokens})))
    })
    .await
}

/// `POST /detokenize`
pub async fn detokenize(State(app): State<Arc<App>>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let fields = DETOKENIZE.read(&body)?;
    let service = app.service()?;
    let mut ids = Vec::new();
    for (i, value) in fields.list("tokens").into_iter().flatten().enumerate() {
        let path = format!("tokens[{i}]");
        let id = token_id(&path, value)?;
        check(&path, Kind::Integer(0, service.tokenizer.vocab_size() as i64 - 1), value)?;
        ids.push(id);
    }
    Ok(Json(json!({"content": service.tokenizer.decode(&ids)})))
}

/// `POST /apply-template`
pub async fn apply_template(State(app): State<Arc<App>>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let request = chat::read(&app, &chat::FORM.read(&body)?)?;
    work::blocking(&app, move |app, service| {
        let ready = chat_prompt(app, service, &request, usize::MAX)?;
        Ok(Json(json!({"prompt": ready.text, "tokens": ready.prompt.rows()})))
    })
    .await
}
