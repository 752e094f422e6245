//! Pictures in requests: the same answer in every dialect, in batches, with held state, and clear refusals.

use super::api::both;
use super::client::{Server, said, user};
use super::hostile_pictures;
use base64::Engine as _;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";

/// An uncompressed 24-bit BMP: a square of one colour on another.
fn bmp(side: u32, background: [u8; 3], square: [u8; 3]) -> Vec<u8> {
    let row = (side * 3).div_ceil(4) * 4;
    let mut file = Vec::new();
    file.extend(b"BM");
    file.extend((54 + row * side).to_le_bytes());
    file.extend([0; 4]);
    file.extend(54u32.to_le_bytes());
    file.extend(40u32.to_le_bytes());
    file.extend(side.to_le_bytes());
    file.extend(side.to_le_bytes());
    file.extend([1, 0, 24, 0]);
    file.extend([0; 24]);
    for y in 0..side {
        let inside = |v: u32| (side / 4..side * 3 / 4).contains(&v);
        for x in 0..side {
            file.extend(if inside(x) && inside(y) { square } else { background });
        }
        file.extend(vec![0; (row - side * 3) as usize]);
    }
    file
}

fn base64(bytes: &[u8]) -> String {
    base64::engine::general_purpose::STANDARD.encode(bytes)
}

fn with_picture(picture: &[u8], text: &str) -> Value {
    let url = format!("data:image/bmp;base64,{}", base64(picture));
    json!([{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]}])
}

fn body(messages: &Value) -> Value {
    json!({"messages": messages, "max_tokens": 24, "temperature": 0, "enable_thinking": false,
        "logprobs": true, "top_logprobs": 1})
}

#[test]
fn every_dialect_sees_the_same_picture() {
    let server = Server::start(&["--parallel", "2", "-q"]);
    let red = bmp(96, [255, 255, 255], [30, 30, 220]);
    let chat = body(&with_picture(&red, "What colour is the square?"));
    let want = both(&server, &chat);
    let other = both(&server, &body(&with_picture(&bmp(96, [0, 0, 0], [220, 30, 30]), "What colour is the square?")));
    assert_ne!(want.logprobs, other.logprobs, "the pixels change nothing");
    let bare = server.ask(CHAT, &body(&user("What colour is the square?")));
    let whole = server.ask(CHAT, &chat);
    let rows = |reply: &Value| reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(rows(&whole) > rows(&bare) + 8, "{whole}");

    let source = json!({"type": "base64", "media_type": "image/bmp", "data": base64(&red)});
    let messages = json!({"max_tokens": 24, "temperature": 0, "messages": [{"role": "user", "content": [
        {"type": "image", "source": source}, {"type": "text", "text": "What colour is the square?"}]}]});
    assert_eq!(server.ask("/v1/messages", &messages)["content"][0]["text"], want.text);
    let url = format!("data:image/bmp;base64,{}", base64(&red));
    let responses = json!({"max_output_tokens": 24, "temperature": 0, "reasoning": {"effort": "none"}, "input": [
        {"role": "user", "content": [{"type": "input_image", "image_url": url},
            {"type": "input_text", "text": "What colour is the square?"}]}]});
    assert_eq!(server.ask("/v1/responses", &responses)["output"][0]["content"][0]["text"], want.text);
}

#[test]
fn picture_requests_in_a_crowd_equal_themselves_alone_and_are_held() {
    let server = Server::start(&["--parallel", "4", "-q", "--prefill", "16", "--mtp", "2"]);
    let colours = [[30, 30, 220], [30, 200, 30], [220, 60, 30], [0, 200, 230]];
    let bodies: Vec<Value> = colours
        .iter()
        .map(|&c| body(&with_picture(&bmp(96, [250, 250, 250], c), "What is this?")))
        .chain([body(&user("What is this?"))])
        .collect();
    let alone = |b: &Value| {
        let mut b = b.clone();
        b["cache_prompt"] = json!(false);
        b["speculative"] = json!(false);
        said(&server.ask(CHAT, &b), 0)
    };
    let want: Vec<_> = bodies.iter().map(alone).collect();
    for _ in 0..2 {
        std::thread::scope(|scope| {
            for (body, want) in bodies.iter().zip(&want) {
                let server = &server;
                scope.spawn(move || assert_eq!(&said(&server.ask(CHAT, body), 0), want));
            }
        });
    }
    let again = server.ask(CHAT, &bodies[0]);
    let usage = &again["usage"];
    let held = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    assert!(held > 8, "the picture's rows were read again: {usage}");
    assert_eq!(server.metric("strata:picture_cache_pictures"), 4.0);
}

#[test]
fn pictures_that_cannot_be_read_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let red = bmp(64, [255, 255, 255], [30, 30, 220]);
    std::fs::write(folder.path().join("red.bmp"), &red).unwrap();
    let server = Server::start(&["--parallel", "1", "-q", "--image-dir", folder.path().to_str().unwrap()]);
    let ask = |url: &str| {
        let content = json!([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "?"}]);
        server.post(CHAT, &json!({"messages": [{"role": "user", "content": content}], "max_tokens": 1}))
    };
    assert_eq!(ask("red.bmp").status, 200);
    let data = |bytes: &[u8]| format!("data:image/png;base64,{}", base64(bytes));
    let cut = &red[..60];
    for url in [
        data(b""),
        data(b"not a picture"),
        data(cut),
        "../red.bmp".into(),
        "/etc/hostname".into(),
        "http://127.0.0.1:1/x.png".into(),
        "https://example.org/x.png".into(),
        "data:image/png;base64,****".into(),
    ] {
        let reply = ask(&url);
        assert_eq!(reply.status, 400, "{url}: {}", reply.text);
        assert_eq!(reply.json()["error"]["param"], "messages[0].content[0].image_url.url", "{url}");
    }
    assert_eq!(ask("red.bmp").status, 200);

    let blind = Server::start(&["--parallel", "1", "-q", "--vision", "no"]);
    let reply = blind.post(CHAT, &body(&with_picture(&red, "?")));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (400, &json!("no_vision")));
    assert!(reply.text.contains("--mmproj"));
    // A request without pictures does not notice whether there is an encoder.
    let plain = body(&user("Tell me a story."));
    assert_eq!(said(&blind.ask(CHAT, &plain), 0), said(&server.ask(CHAT, &plain), 0));
}

/// Far above what a refusal takes, far below what an unbounded decoder would take.
const REFUSAL_TIME: Duration = Duration::from_secs(20);
/// Most memory that all the hostile pictures together may have needed at any time, in bytes: a few times the largest picture
/// that is decoded at all.
const REFUSAL_MEMORY: f64 = 512.0 * 1024.0 * 1024.0;

#[test]
fn hostile_pictures_are_refused_in_every_dialect_and_the_server_goes_on() {
    let server = Server::start(&["--parallel", "2", "-q"]);
    let good = body(&with_picture(&bmp(96, [255, 255, 255], [30, 30, 220]), "What colour is the square?"));
    let want = said(&server.ask(CHAT, &good), 0);
    let before = server.peak_memory();
    let cases = hostile_pictures::refused();
    assert!(cases.len() >= 30);
    for (name, bytes, _) in cases {
        let data = base64(&bytes);
        let url = format!("data:image/png;base64,{data}");
        let openai = json!({"max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": url}}]}]});
        let source = json!({"type": "base64", "media_type": "image/png", "data": data});
        let anthropic = json!({"max_tokens": 1, "messages": [{"role": "user", "content": [
            {"type": "image", "source": source}]}]});
        let start = Instant::now();
        for (path, body, field) in [
            (CHAT, openai, "messages[0].content[0].image_url.url"),
            ("/v1/messages", anthropic, "messages[0].content[0].source"),
        ] {
            let reply = server.post(path, &body);
            let error = reply.json();
            assert_eq!(reply.status, 400, "{name}: {error}");
            let message = error["error"]["message"].as_str().unwrap_or_default();
            assert!(message.contains(field) && !message.contains("panic"), "{name}: {message}");
        }
        assert!(start.elapsed() < REFUSAL_TIME, "{name} took {:?}", start.elapsed());
    }
    let needed = server.peak_memory() - before;
    assert!(needed < REFUSAL_MEMORY, "{} MiB", needed / 1048576.0);
    assert_eq!(said(&server.ask(CHAT, &good), 0), want);
}
