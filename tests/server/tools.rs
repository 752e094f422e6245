//! Tool calls and constrained answers over HTTP.

use super::api::both;
use super::client::{Server, said, user};
use serde_json::{Value, json};

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "get_weather", "description": "Weather of a city", "parameters": {
        "type": "object", "required": ["city", "days"], "properties": {
            "city": {"type": "string", "maxLength": 16},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "where": {"type": "object", "properties": {"zip": {"type": "string", "maxLength": 5}}, "additionalProperties": false}}}}},
        {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}])
}

#[test]
fn a_required_call_is_made_and_its_round_trip_goes_on() {
    let server = Server::start(&["--parallel", "1"]);
    for (choice, thinking) in [
        (json!("required"), false),
        (json!("required"), true),
        (json!({"type": "function", "function": {"name": "get_time"}}), false),
    ] {
        let body = json!({"messages": user("What is the weather in Paris?"), "tools": weather(), "tool_choice": choice,
            "temperature": 0.8, "seed": 3, "max_tokens": 300, "enable_thinking": thinking, "thinking_budget": 8,
            "parallel_tool_calls": false});
        let answer = both(&server, &body);
        assert_eq!((answer.finish.as_str(), answer.calls.len()), ("tool_calls", 1), "{answer:?}");
        let (name, arguments) = &answer.calls[0];
        let arguments: Value = serde_json::from_str(arguments).expect("JSON arguments");
        if choice.is_object() {
            assert_eq!(name, "get_time");
        }
        if name == "get_weather" {
            assert!(arguments["city"].is_string() && arguments["days"].is_i64(), "{arguments}");
        }
        let reply = server.ask("/v1/chat/completions", &body);
        let mut history = user("What is the weather in Paris?");
        let messages = history.as_array_mut().unwrap();
        messages.push(reply["choices"][0]["message"].clone());
        messages.push(json!({"role": "tool", "tool_call_id": "x", "content": "rain"}));
        let next = json!({"messages": history, "tools": weather(), "max_tokens": 10, "enable_thinking": false});
        let next = server.ask("/v1/chat/completions", &next);
        assert!(next["usage"]["prompt_tokens"].as_u64() > reply["usage"]["prompt_tokens"].as_u64());
    }
}

#[test]
fn no_call_is_possible_when_the_choice_is_none() {
    let server = Server::start(&["--parallel", "1"]);
    let tokens = |choice: &str| {
        let body = json!({"messages": user("Hi"), "tools": weather(), "tool_choice": choice});
        server.ask("/apply-template", &body)["tokens"].as_u64().unwrap()
    };
    let bare = server.ask("/apply-template", &json!({"messages": user("Hi")}))["tokens"].as_u64().unwrap();
    assert_eq!(tokens("none"), bare);
    assert!(tokens("auto") > bare + 50);
}

#[test]
fn structured_answers_follow_their_schema_with_and_without_thinking_and_drafts() {
    let server = Server::start(&["--parallel", "2", "--mtp", "3"]);
    // Without blanks between tokens, of which a small model at temperature 1 writes thousands.
    let schema = json!({"x-guidance": {"whitespace_flexible": false}, "type": "object", "additionalProperties": false,
        "required": ["title", "tags", "score"], "properties": {
        "title": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "maxItems": 3, "items": {"enum": ["red", "green", "blue"]}},
        "score": {"type": "integer", "minimum": 0, "maximum": 10}}});
    for seed in 0..4 {
        let mut body = json!({"messages": user("Rate this."), "temperature": 1.0, "seed": seed, "max_tokens": 300,
            "enable_thinking": seed % 2 == 0, "thinking_budget": 8,
            "response_format": {"type": "json_schema", "json_schema": {"name": "rating", "schema": schema}}});
        let answer = both(&server, &body);
        let value: Value = serde_json::from_str(&answer.text).unwrap_or_else(|e| panic!("{e}: {answer:?}"));
        assert!(value["title"].as_str().is_some_and(|t| t.chars().count() <= 12), "{value}");
        assert!(value["score"].as_i64().is_some_and(|s| (0..=10).contains(&s)), "{value}");
        assert!(value["tags"].as_array().is_some_and(|t| t.len() <= 3), "{value}");
        assert_eq!(value.as_object().unwrap().len(), 3);
        body["speculative"] = json!(false);
        assert_eq!(said(&server.ask("/v1/chat/completions", &body), 0), answer, "drafts change nothing");
    }
    let object = json!({"messages": user("JSON please."), "temperature": 0.9, "seed": 1, "max_tokens": 200,
        "enable_thinking": false, "response_format": {"type": "json_object"}});
    let answer = both(&server, &object);
    if answer.finish == "stop" {
        assert!(serde_json::from_str::<Value>(&answer.text).is_ok_and(|v| v.is_object()), "{answer:?}");
    }
    assert!(answer.text.trim_start().starts_with('{'));
    for grammar in ["start: \"yes\" | \"no\"", "root ::= \"yes\" | \"no\""] {
        let body = json!({"prompt": "Yes or no?", "temperature": 1, "seed": 2, "max_tokens": 20, "grammar": grammar});
        let answer = server.ask("/v1/completions", &body);
        assert!(["yes", "no"].contains(&answer["choices"][0]["text"].as_str().unwrap()), "{answer}");
    }
}
