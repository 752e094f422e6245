//! `/openapi.json`: made from the same field tables that check the requests.

use super::form::{ANY, Form};
use super::{chat, completions, info, messages, responses};
use axum::Json;
use serde_json::{Map, Value, json};

/// Routes without a body: path, what it does.
const GETS: &[(&str, &str)] = &[
    ("/health", "503 while loading or stopping, 200 when ready"),
    ("/v1/models", "The model this server has"),
    ("/props", "Settings and facts of the server"),
    ("/slots", "What each slot is doing"),
    ("/metrics", "Counters in Prometheus' text format"),
    ("/openapi.json", "This description"),
];

/// Routes with a JSON body: path, its form, what it does.
const POSTS: &[(&str, &Form, &str)] = &[
    ("/v1/chat/completions", &chat::FORM, "Answer a conversation (OpenAI)"),
    ("/v1/completions", &completions::FORM, "Continue a raw prompt (OpenAI)"),
    ("/v1/responses", &responses::FORM, "Answer a conversation, stateless (OpenAI)"),
    ("/v1/messages", &messages::FORM, "Answer a conversation (Anthropic)"),
    ("/v1/messages/count_tokens", &messages::COUNT_FORM, "Count a conversation's tokens (Anthropic)"),
    ("/tokenize", &info::TOKENIZE, "Text to token ids"),
    ("/detokenize", &info::DETOKENIZE, "Token ids to text"),
    ("/apply-template", &chat::FORM, "The prompt a chat request becomes"),
];

fn responses_of(errors: &[(&str, &str)], content: &str) -> Value {
    let mut all = Map::new();
    all.insert("200".into(), json!({"description": "The answer", "content": {content: {"schema": {"type": ANY}}}}));
    for (status, about) in errors {
        let error = json!({"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}});
        all.insert((*status).into(), json!({"description": about, "content": error}));
    }
    Value::Object(all)
}

/// Entries of the lists that form tables refer to.
fn entry_schemas(schemas: &mut Map<String, Value>) {
    let part = json!({"type": "object", "required": ["type", "text"], "properties": {
        "type": {"type": "string", "enum": ["text"]}, "text": {"type": "string"}}});
    let content = json!({"anyOf": [{"type": "string"}, {"type": "array", "items": part}]});
    let message = |roles: &[&str]| {
        json!({"type": "object", "required": ["role", "content"], "properties": {
            "role": {"type": "string", "enum": roles}, "content": content}})
    };
    let function = |schema: &str| {
        json!({"type": "object", "required": ["name"], "properties": {
            "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
            "description": {"type": "string"}, schema: {"type": "object"}}})
    };
    let tool = json!({"type": "object", "required": ["type", "function"], "properties": {
        "type": {"type": "string", "enum": ["function"]}, "function": function("parameters")}});
    schemas.insert("ChatMessage".into(), message(&["system", "developer", "user", "assistant"]));
    schemas.insert("Message".into(), message(&["user", "assistant"]));
    schemas.insert("ChatTool".into(), tool);
    schemas.insert("MessageTool".into(), function("input_schema"));
}

/// The description.
pub fn description() -> Value {
    let mut paths = Map::new();
    let mut schemas = Map::new();
    schemas.insert(
        "Error".into(),
        json!({"type": "object", "required": ["error"], "properties": {
        "error": {"type": "object", "required": ["message", "type"], "properties": {
            "message": {"type": "string"}, "type": {"type": "string"}}}}}),
    );
    entry_schemas(&mut schemas);
    let key = ("401", "No valid API key");
    let loading = ("503", "Loading or stopping");
    for (path, about) in GETS {
        let content = if *path == "/metrics" { "text/plain" } else { "application/json" };
        let get = json!({"summary": about, "responses": responses_of(&[key, loading], content)});
        paths.insert((*path).into(), json!({"get": get}));
    }
    for (path, form, about) in POSTS {
        schemas.insert(form.name.into(), form.schema());
        let body = json!({"required": true, "content": {
            "application/json": {"schema": {"$ref": format!("#/components/schemas/{}", form.name)}}}});
        let errors = [
            ("400", "A field is wrong; the message names it"),
            key,
            ("413", "The body is too large"),
            ("429", "The queue is full; see Retry-After"),
            loading,
        ];
        let post =
            json!({"summary": about, "requestBody": body, "responses": responses_of(&errors, "application/json")});
        paths.insert((*path).into(), json!({"post": post}));
    }
    json!({
        "openapi": "3.1.0",
        "info": {"title": "strata", "version": env!("CARGO_PKG_VERSION"),
            "description": "One Qwen3.5/3.6 model behind the APIs of OpenAI, Anthropic and llama-server"},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    })
}

/// `GET /openapi.json`
pub async fn openapi() -> Json<Value> {
    Json(description())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_route_with_a_body_describes_its_fields() {
        let text = description();
        for (path, form, _) in POSTS {
            let reference =
                &text["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"];
            let name = reference.as_str().unwrap().rsplit('/').next().unwrap();
            let schema = &text["components"]["schemas"][name];
            assert_eq!(
                schema["properties"].as_object().unwrap().len(),
                form.fields().count(),
                "{path}: a field twice?"
            );
        }
    }

    #[test]
    fn another_implementation_reads_the_description() {
        let read: utoipa::openapi::OpenApi = serde_json::from_value(description()).unwrap();
        assert_eq!(read.paths.paths.len(), GETS.len() + POSTS.len());
    }
}
