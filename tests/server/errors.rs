//! Bad requests: a status of the 400s, the field by name, and the server goes on.

use super::client::{Server, user};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;

#[test]
fn every_bad_request_is_refused_by_name() {
    let server = Server::start(&["--parallel", "1", "--ctx-size", "512", "--max-body", "1"]);
    let with = |name: &str, value: Value| {
        let mut body = json!({"messages": user("x"), "max_tokens": 1});
        body[name] = value;
        body
    };
    let chat = "/v1/chat/completions";
    let huge_id = json!([[1u64 << 40, 1]]);
    let table: Vec<(&str, Value, &str)> = vec![
        (chat, with("temperature", json!("hot")), "temperature"),
        (chat, with("temperature", json!(-1)), "temperature"),
        (chat, with("top_p", json!(2)), "top_p"),
        (chat, with("seed", json!(1.5)), "seed"),
        (chat, with("n", json!(0)), "n"),
        (chat, with("id_slot", json!(99)), "id_slot"),
        (chat, with("stop", json!({})), "stop"),
        (chat, with("logit_bias", json!({"9999999": 1})), "logit_bias"),
        (chat, with("logit_bias", huge_id), "logit_bias[0]"),
        (chat, with("stream", json!("yes")), "stream"),
        (chat, with("messages", json!("hi")), "messages"),
        (chat, with("messages", json!([{"role": "user", "content": {"text": "x"}}])), "messages[0].content"),
        (chat, with("grammar", json!("not a grammar ::: ((")), "grammar"),
        (
            chat,
            with("response_format", json!({"type": "json_schema", "json_schema": {"schema": {"type": "what"}}})),
            "response_format",
        ),
        (
            chat,
            with(
                "messages",
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}]}]),
            ),
            "messages[0].content[0].image_url.url",
        ),
        (
            chat,
            with(
                "messages",
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}]),
            ),
            "messages[0].content[0].image_url",
        ),
        (chat, with("user", json!(5)), "user"),
        (chat, with("n_predict", json!("many")), "n_predict"),
        (chat, with("mtp", json!("yes")), "mtp"),
        (chat, with("id_slot", json!(1.5)), "id_slot"),
        (chat, with("reasoning_budget", json!(-2)), "reasoning_budget"),
        (
            chat,
            with(
                "tools",
                json!([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "text"}}}}}]),
            ),
            "tools[0].function.parameters.properties.a.type",
        ),
        ("/v1/completions", json!({"prompt": 5}), "prompt"),
        ("/v1/completions", json!({"prompt": [1u32 << 30]}), "prompt"),
        ("/v1/completions", json!({"prompt": "x", "best_of": 4}), "best_of"),
        ("/v1/responses", json!({"input": {"role": "user"}}), "input"),
        ("/tokenize", json!({"content": 1}), "content"),
        ("/detokenize", json!({"tokens": [-1]}), "tokens[0]"),
        ("/detokenize", json!({"tokens": [u32::MAX]}), "tokens[0]"),
    ];
    for (path, body, field) in table {
        let reply = server.post(path, &body);
        assert_eq!(reply.status, 400, "{path} {body}: {}", reply.text);
        let error = &reply.json()["error"];
        assert_eq!(error["param"], field, "{path} {body}: {error}");
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()));
    }
    let anthropic = server.post("/v1/messages", &json!({"messages": user("x")}));
    assert_eq!((anthropic.status, &anthropic.json()["error"]["type"]), (400, &json!("invalid_request_error")));
    assert!(anthropic.text.contains("max_tokens"));

    for body in
        ["", "{", "[1]", "nul", "{\"messages\":[{\"role\":\"user\",\"content\":\"\\ud800\"}]}", &"[".repeat(50_000)]
    {
        assert_eq!(server.post_text(chat, body, &[]).status, 400, "{body:.40}");
    }
    let invalid_utf8 = raw(&server, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 13\r\nconnection: close\r\n\r\n{\"prompt\":\"\xff\"");
    assert!(invalid_utf8.starts_with("HTTP/1.1 400"), "{invalid_utf8}");

    let long = server.post(chat, &json!({"messages": user(&"word ".repeat(2000))}));
    assert_eq!((long.status, &long.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    let longer = server.post("/v1/completions", &json!({"prompt": "word ".repeat(190_000)}));
    assert_eq!((longer.status, &longer.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    let no_code = server.post(chat, &json!({"messages": []}));
    assert_eq!((no_code.status, &no_code.json()["error"]["code"]), (400, &Value::Null));
    let large = server.post(chat, &json!({"messages": user(&"x".repeat(2 << 20))}));
    assert_eq!((large.status, large.json()["error"]["type"].as_str()), (413, Some("invalid_request_error")));
    assert_eq!(
        server.post("/v1/messages", &json!({"x": "x".repeat(2 << 20)})).json()["error"]["type"],
        "request_too_large"
    );

    let unknown = server.get("/v1/nothing");
    assert_eq!((unknown.status, &unknown.json()["error"]["type"]), (404, &json!("not_found_error")));
    let method = server.get(chat);
    assert_eq!((method.status, method.header("allow")), (405, Some("POST")));
    assert!(method.json()["error"]["message"].is_string());
    let embeddings = server.post("/v1/embeddings", &json!({"input": "x"}));
    assert_eq!((embeddings.status, &embeddings.json()["error"]["code"]), (400, &json!("not_supported")));

    // After all that it still answers.
    assert_eq!(server.post(chat, &json!({"messages": user("x"), "max_tokens": 1})).status, 200);
}

#[test]
fn unknown_fields_and_nulls_are_ignored() {
    let server = Server::start(&["--parallel", "1"]);
    let body = json!({"messages": user("x"), "max_tokens": 2, "temperature": null, "stop": null, "tools": null,
        "user": "me", "service_tier": "auto", "invented": {"a": [1]}});
    assert_eq!(server.post("/v1/chat/completions", &body).status, 200);
}

#[test]
fn keys_hosts_and_origins_are_checked() {
    let keys = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(keys.path(), "# keys\nsecond-key\n\n").unwrap();
    let file = keys.path().to_str().unwrap();
    let server = Server::start(&[
        "--parallel",
        "1",
        "--api-key",
        "first-key",
        "--api-key-file",
        file,
        "--cors-origin",
        "https://friend.example",
    ]);
    let body = json!({"messages": user("x"), "max_tokens": 1}).to_string();
    let post = |headers: &[(&str, &str)]| server.post_text("/v1/chat/completions", &body, headers).status;
    assert_eq!(post(&[]), 401);
    assert_eq!(post(&[("authorization", "Bearer wrong")]), 401);
    assert_eq!(post(&[("authorization", "Bearer first-key")]), 200);
    assert_eq!(post(&[("x-api-key", "second-key")]), 200);
    assert_eq!(post(&[("x-api-key", "# keys")]), 401);
    assert_eq!(server.get("/health").status, 200);
    assert_eq!(server.get("/metrics").status, 401);
    let anthropic = server.post("/v1/messages", &json!({}));
    assert_eq!((anthropic.status, &anthropic.json()["error"]["type"]), (401, &json!("authentication_error")));

    assert_eq!(server.get_with("/health", &[("host", "evil.example")]).status, 403);
    assert_eq!(server.get_with("/health", &[("origin", "https://evil.example")]).status, 403);
    for head in [
        "GET /health HTTP/1.1\r\n",
        "GET /health HTTP/1.0\r\n",
        "GET /health HTTP/1.1\r\nhost: \r\n",
        "GET /health HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n",
        "GET /health HTTP/1.1\r\nhost: [::1]evil.example\r\n",
        "GET /health HTTP/1.1\r\nhost: localhost:80:80\r\n",
        "GET http://evil.example/health HTTP/1.1\r\nhost: localhost\r\n",
    ] {
        let reply = raw(&server, format!("{head}connection: close\r\n\r\n").as_bytes());
        assert_eq!(reply.split(' ').nth(1), Some("400"), "{head}: {reply}");
    }
    let friend = server.get_with("/health", &[("origin", "https://friend.example")]);
    assert_eq!((friend.status, friend.header("access-control-allow-origin")), (200, Some("https://friend.example")));
    assert_eq!(server.get("/health").header("access-control-allow-origin"), None);
}

fn raw(server: &Server, bytes: &[u8]) -> String {
    let mut socket = TcpStream::connect(&server.address).unwrap();
    socket.set_read_timeout(Some(super::client::PATIENCE)).unwrap();
    socket.write_all(bytes).unwrap();
    let mut text = Vec::new();
    socket.read_to_end(&mut text).unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

#[test]
fn bad_arguments_end_the_command_with_code_2_and_a_reason() {
    let run = |args: &[&str]| {
        let out = std::process::Command::new(env!("CARGO_BIN_EXE_strata")).arg("serve").args(args).output().unwrap();
        (out.status.code(), String::from_utf8_lossy(&out.stderr).into_owned())
    };
    for (args, text) in [
        (vec!["--temp=-1"], "--temp"),
        (vec!["--parallel", "0"], "parallel"),
        (vec!["--host", "nowhere"], "host"),
        (vec!["--api-key-file", "/nonexistent"], "/nonexistent"),
        (vec!["--image-dir", "/nonexistent"], "/nonexistent"),
        (vec!["-m", "/nonexistent.gguf"], "/nonexistent.gguf"),
        (vec!["--port", "0", "--ctx-size", "100000000"], "trained for"),
        (vec!["--port", "0", "--cache-ram", "99999999"], "are available"),
    ] {
        let (code, stderr) = run(&args);
        assert_eq!(code, Some(2), "{args:?}: {stderr}");
        assert!(stderr.contains(text), "{args:?}: {stderr}");
    }
}
