//! Starting generations: blocking preparation off the async threads, submission, the engine's refusals as HTTP errors.

use super::answer::{Answer, CUT_BY_STOPPING, Collected, Reading};
use super::app::{App, Service};
use super::error::ApiError;
use super::log::RequestLog;
use super::prompt::{ChatRequest, chat_requests};
use axum::http::StatusCode;
use std::sync::Arc;
use strata_core::engine::{NOTHING_ALLOWED, Request, SubmitError};

/// Runs blocking work that needs the service. A panic in it is a 500 of this request.
pub async fn blocking<T: Send + 'static>(
    app: &Arc<App>,
    job: impl FnOnce(&App, &Service) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    app.service()?;
    let app = app.clone();
    tokio::task::spawn_blocking(move || job(&app, app.service()?))
        .await
        .map_err(|_| ApiError::internal("a fault in the server ended this request"))?
}

/// Starts a chat.
pub async fn chat(app: &Arc<App>, chat: ChatRequest, route: &'static str) -> Result<Answer, ApiError> {
    refuse_when_stopping(app)?;
    let requests = blocking(app, move |app, service| chat_requests(app, service, &chat)).await?;
    submit(app, requests, route)
}

/// Hands prepared requests to the engine; all are taken or none.
pub fn submit(app: &Arc<App>, requests: Vec<(Request, Reading)>, route: &'static str) -> Result<Answer, ApiError> {
    refuse_when_stopping(app)?;
    let service = app.service()?;
    let mut streams = Vec::with_capacity(requests.len());
    for (request, reading) in requests {
        // Dropping the streams taken so far cancels them.
        streams.push((service.engine.submit(request).map_err(refused)?, reading));
    }
    let log = RequestLog::new(route, streams.len(), app.settings.quiet);
    Ok(Answer::new(app.clone(), &service.tokenizer, streams, log))
}

fn refuse_when_stopping(app: &App) -> Result<(), ApiError> {
    if app.is_stopping() { Err(refused(SubmitError::Stopping)) } else { Ok(()) }
}

fn refused(error: SubmitError) -> ApiError {
    let message = error.to_string();
    match error {
        SubmitError::QueueFull { .. } => ApiError {
            retry_after: Some(2),
            code: Some("queue_full"),
            ..ApiError::new(StatusCode::TOO_MANY_REQUESTS, message)
        },
        SubmitError::Stopping => ApiError {
            retry_after: Some(5),
            code: Some("stopping"),
            ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the server is stopping")
        },
        SubmitError::PromptTooLong { .. } => ApiError::bad_request(message).with_code("context_length_exceeded"),
        SubmitError::Invalid(problem) => {
            // The engine says "field: problem".
            match problem.split_once(": ") {
                Some((field, problem)) if !field.contains(' ') => ApiError::field(field, problem),
                _ => ApiError::bad_request(problem),
            }
        }
    }
}

/// An answer of which a choice failed is an error as a whole.
pub fn check_failure(all: &Collected) -> Result<(), ApiError> {
    match all.failure() {
        Some(message) => Err(failed(message)),
        None => Ok(()),
    }
}

/// A failure within the engine as an HTTP error: a request whose own rules leave no token is at fault itself.
pub fn failed(message: &str) -> ApiError {
    match message {
        CUT_BY_STOPPING => ApiError {
            retry_after: Some(5),
            code: Some("stopping"),
            ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message)
        },
        NOTHING_ALLOWED => ApiError::field("logit_bias", message),
        _ => ApiError::internal(message),
    }
}
