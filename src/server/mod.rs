//! The HTTP server: routes, API dialects, streaming, metrics, the page. It knows the engine only through its handle.
//!
//! A request goes: [`guard`] (who may talk) -> a route's [`form`] (fields checked by table) -> one internal
//! [`prompt::ChatRequest`] whatever the dialect -> engine requests -> one [`answer::Answer`] of pieces -> the route's
//! renderer, as JSON or server-sent events.

pub mod answer;
pub mod app;
pub mod blocks;
pub mod chat;
pub mod completions;
pub mod connections;
pub mod conversation;
pub mod error;
pub mod form;
pub mod guard;
pub mod info;
pub mod log;
pub mod messages;
pub mod metrics;
pub mod openapi;
pub mod page;
pub mod params;
pub mod pictures;
pub mod prompt;
pub mod responses;
pub mod sse;
pub mod tool_schema;
pub mod work;

pub use app::{App, Service, Settings};
pub use connections::serve;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Arc;

/// All routes.
pub fn router(app: Arc<App>) -> Router {
    let limit = app.settings.max_body;
    Router::new()
        .route("/v1/chat/completions", post(chat::completions))
        .route("/chat/completions", post(chat::completions))
        .route("/v1/completions", post(completions::completions))
        .route("/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/messages", post(messages::messages))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/embeddings", post(info::embeddings))
        .route("/v1/models", get(info::models))
        .route("/models", get(info::models))
        .route("/v1/models/{*name}", get(info::model))
        .route("/tokenize", post(info::tokenize))
        .route("/detokenize", post(info::detokenize))
        .route("/apply-template", post(info::apply_template))
        .route("/health", get(info::health))
        .route("/v1/health", get(info::health))
        .route("/metrics", get(info::metrics))
        .route("/slots", get(info::slots))
        .route("/props", get(info::props))
        .route("/openapi.json", get(openapi::openapi))
        .route("/", get(page::index))
        .route("/page/{name}", get(page::file))
        .layer(DefaultBodyLimit::max(limit))
        .layer(from_fn_with_state(app.clone(), guard::guard))
        .with_state(app)
}

/// 64 bits nobody can guess: the standard library keys its hash maps from the system's randomness.
fn random() -> u64 {
    RandomState::new().build_hasher().finish()
}
