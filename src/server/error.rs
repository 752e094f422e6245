//! What a request can be refused with, and how a refusal looks in each API dialect.
//!
//! Handlers return [`ApiError`]; the bytes are written once, by the outermost middleware, in the shape of the API the
//! path belongs to (OpenAI's everywhere, Anthropic's under `/v1/messages`).

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::borrow::Cow;

/// Which client family a path speaks to; decides the shape of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// `{"error": {"message", "type", "param", "code"}}`
    OpenAi,
    /// `{"type": "error", "error": {"type", "message"}}`
    Anthropic,
}

impl Dialect {
    /// The dialect of a request path.
    pub fn of(path: &str) -> Dialect {
        if path == "/v1/messages" || path.starts_with("/v1/messages/") { Dialect::Anthropic } else { Dialect::OpenAi }
    }
}

/// A request that gets no answer but this.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    /// The HTTP status.
    pub status: StatusCode,
    /// One sentence: what was expected, what was found.
    pub message: String,
    /// The field at fault, as a path such as `messages[2].content`.
    pub param: Option<String>,
    /// A machine-readable reason, e.g. `context_length_exceeded`; null in OpenAI's shape where there is none.
    pub code: Option<&'static str>,
    /// Seconds after which trying again makes sense (`Retry-After`).
    pub retry_after: Option<u32>,
}

impl ApiError {
    /// An error with a status and a message only.
    pub fn new(status: StatusCode, message: impl Into<String>) -> ApiError {
        ApiError { status, message: message.into(), param: None, code: None, retry_after: None }
    }

    /// 400 for a field: the message is prefixed with the field's path.
    pub fn field(path: impl Into<String>, problem: impl AsRef<str>) -> ApiError {
        let path = path.into();
        let message = format!("`{path}`: {}", problem.as_ref());
        ApiError { param: Some(path), ..ApiError::new(StatusCode::BAD_REQUEST, message) }
    }

    /// 400 that no single field is to blame for.
    pub fn bad_request(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, message)
    }

    /// 500: a fault of the server itself.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// 503 while the model is being loaded.
    pub fn loading() -> ApiError {
        ApiError {
            code: Some("loading"),
            retry_after: Some(1),
            ..ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the model is still loading")
        }
    }

    /// The same error with a machine-readable reason.
    pub fn with_code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// OpenAI's name for this kind of error.
    fn openai_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            503 => "unavailable_error",
            400..=499 => "invalid_request_error",
            _ => "server_error",
        }
    }

    /// Anthropic's name for this kind of error.
    fn anthropic_type(&self) -> &'static str {
        match self.status.as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            400..=499 => "invalid_request_error",
            _ => "api_error",
        }
    }

    /// The JSON body in a dialect.
    pub fn body(&self, dialect: Dialect) -> Value {
        match dialect {
            Dialect::OpenAi => json!({"error": {
                "message": self.message,
                "type": self.openai_type(),
                "param": self.param,
                "code": self.code,
            }}),
            Dialect::Anthropic => {
                json!({"type": "error", "error": {"type": self.anthropic_type(), "message": self.message}})
            }
        }
    }

    /// The whole response in a dialect.
    pub fn render(&self, dialect: Dialect) -> Response {
        let mut response = (self.status, Json(self.body(dialect))).into_response();
        response.extensions_mut().insert(Reason(self.message.clone()));
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Why a response is a refusal, for the log.
#[derive(Clone, Debug)]
pub struct Reason(pub String);

impl IntoResponse for ApiError {
    /// Only carries the error to the outermost middleware, which knows the path and so the dialect.
    fn into_response(self) -> Response {
        let mut response = self.status.into_response();
        response.extensions_mut().insert(self);
        response
    }
}

/// What a JSON value is, for messages ("expected a string, found an array").
pub fn kind_of(value: &Value) -> Cow<'static, str> {
    match value {
        Value::Null => "null".into(),
        Value::Bool(b) => b.to_string().into(),
        Value::Number(n) => format!("the number {n}").into(),
        Value::String(s) if s.chars().count() <= 40 => format!("the string {s:?}").into(),
        Value::String(_) => "a string".into(),
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_error_names_the_field_in_both_shapes() {
        let error = ApiError::field("messages[1].role", "expected a string, found null");
        let openai = error.body(Dialect::OpenAi);
        assert_eq!(openai["error"]["param"], "messages[1].role");
        assert_eq!(openai["error"]["type"], "invalid_request_error");
        assert_eq!(openai["error"]["code"], Value::Null);
        let coded = ApiError::bad_request("x").with_code("queue_full").body(Dialect::OpenAi);
        assert_eq!(coded["error"]["code"], "queue_full");
        let anthropic = error.body(Dialect::Anthropic);
        assert_eq!(anthropic["type"], "error");
        assert!(anthropic["error"]["message"].as_str().unwrap().contains("`messages[1].role`"));
    }

    #[test]
    fn only_the_messages_routes_speak_anthropic() {
        assert_eq!(Dialect::of("/v1/messages"), Dialect::Anthropic);
        assert_eq!(Dialect::of("/v1/messages/count_tokens"), Dialect::Anthropic);
        assert_eq!(Dialect::of("/v1/messagesx"), Dialect::OpenAi);
        assert_eq!(Dialect::of("/v1/chat/completions"), Dialect::OpenAi);
    }
}
