//! Batched = alone, bit for bit: every answer, with its log-probabilities, equals the one the request gets on an idle
//! server without drafts and without held state.

use super::client::{Said, Server, said, said_streamed, user};
use serde_json::{Value, json};
use std::sync::Barrier;

const CHAT: &str = "/v1/chat/completions";

/// Eight requests that differ in everything sampling knows.
pub fn requests() -> Vec<Value> {
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["name", "age"], "properties": {
        "name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}}});
    let tools = json!([{"type": "function", "function": {"name": "look_up", "parameters": {
        "type": "object", "properties": {"word": {"type": "string", "maxLength": 12}}, "required": ["word"]}}}]);
    let text = "The old house by the river was quiet, and the fox came every night to look at the moon. ".repeat(6);
    vec![
        json!({"messages": user("Tell me a story about a fox."), "temperature": 0, "max_tokens": 40}),
        json!({"messages": user("Write a function that adds two numbers."), "temperature": 0.8, "seed": 11, "max_tokens": 48}),
        json!({"messages": user("List three colours."), "temperature": 1.2, "seed": 12, "top_k": 50, "min_p": 0.01,
            "repeat_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2, "max_tokens": 40}),
        json!({"messages": user("Go on."), "temperature": 0.9, "seed": 13, "stop": ["the", "e "], "max_tokens": 60}),
        json!({"messages": user("Who?"), "temperature": 0.7, "seed": 14, "enable_thinking": false, "max_tokens": 90,
            "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}}),
        json!({"messages": user("Look it up."), "temperature": 0.7, "seed": 15, "tools": tools,
            "tool_choice": "required", "enable_thinking": false, "max_tokens": 60}),
        json!({"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text},
            {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And then?"}],
            "temperature": 1.0, "seed": 16, "logit_bias": {"300": 1.5, "301": -4}, "max_tokens": 36}),
        json!({"messages": user("東京と🦊"), "temperature": 1.0, "seed": 17, "thinking_budget": 6, "max_tokens": 40}),
    ]
    .into_iter()
    .map(|mut body| {
        body["logprobs"] = json!(true);
        body["top_logprobs"] = json!(2);
        body
    })
    .collect()
}

/// The answer on an idle server without drafts and without held state.
pub fn alone(server: &Server, body: &Value) -> Said {
    let mut body = body.clone();
    body["cache_prompt"] = json!(false);
    body["speculative"] = json!(false);
    let answer = said(&server.ask(CHAT, &body), 0);
    assert!(!answer.logprobs.is_empty(), "{answer:?}");
    answer
}

/// Sends all at the same time and compares with the solo answers.
fn all_at_once(server: &Server, bodies: &[Value], want: &[Said], streamed: bool) {
    let start = Barrier::new(bodies.len());
    std::thread::scope(|scope| {
        for (body, want) in bodies.iter().zip(want) {
            let start = &start;
            scope.spawn(move || {
                start.wait();
                let got = if streamed {
                    said_streamed(&server.stream(CHAT, body), 0)
                } else {
                    said(&server.ask(CHAT, body), 0)
                };
                assert_eq!(&got, want, "{body}");
            });
        }
    });
}

#[test]
fn eight_at_once_beside_a_long_prompt_equal_themselves_alone() {
    for mtp in ["0", "2", "auto"] {
        let server = Server::start(&["--parallel", "9", "--ctx-size", "4096", "--mtp", mtp, "--prefill", "128", "-q"]);
        let bodies = requests();
        let want: Vec<Said> = bodies.iter().map(|b| alone(&server, b)).collect();
        std::thread::scope(|scope| {
            let long = scope.spawn(|| {
                let ids: Vec<u32> = (0..2500u32).map(|i| 300 + (i * 7) % 1000).collect();
                let body = json!({"prompt": ids, "max_tokens": 2, "temperature": 0, "cache_prompt": false});
                server.ask("/v1/completions", &body)["choices"][0]["text"].clone()
            });
            all_at_once(&server, &bodies, &want, false);
            long.join().expect("the long prompt is answered");
        });
        // Slots now hold these conversations: waves go on from held state, streamed.
        all_at_once(&server, &bodies, &want, true);
    }
}

#[test]
fn waves_over_few_slots_with_evictions_equal_themselves_alone() {
    let server = Server::start(&["--parallel", "3", "--ctx-size", "2048", "--mtp", "3", "--draft", "ngram", "-q"]);
    let bodies = requests();
    let want: Vec<Said> = bodies.iter().map(|b| alone(&server, b)).collect();
    for streamed in [false, true, false] {
        all_at_once(&server, &bodies, &want, streamed);
    }
    let reused = server.metric("vllm:prefix_cache_hits_total");
    assert!(reused > 0.0, "eight conversations over three slots found nothing held");
}
