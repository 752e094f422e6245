//! Clients that vanish, read slowly or come in crowds; stopping under load. The others never notice.

use super::client::{PATIENCE, Server, said, user};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::time::{Duration, Instant};

const CHAT: &str = "/v1/chat/completions";
/// A window of the tiny model takes milliseconds; this leaves room for a loaded machine.
const SOON: Duration = Duration::from_secs(10);

fn endless(seed: u64) -> Value {
    json!({"messages": user("Never stop."), "max_tokens": 3000, "ignore_eos": true, "seed": seed, "stream": true})
}

#[test]
fn clients_that_vanish_free_their_slots_and_change_nothing_for_others() {
    let server = Server::start(&["--parallel", "2", "--ctx-size", "4096", "--prefill", "64", "-q"]);
    let body = json!({"messages": user("Tell me a story."), "max_tokens": 120, "seed": 9, "ignore_eos": true});
    let mut alone = body.clone();
    alone["cache_prompt"] = json!(false);
    let want = said(&server.ask(CHAT, &alone), 0);
    std::thread::scope(|scope| {
        let watched = scope.spawn(|| said(&server.ask(CHAT, &body), 0));
        // In the middle of the prompt.
        let ids: Vec<u32> = (0..3000u32).map(|i| 300 + (i * 11) % 900).collect();
        let prompt = json!({"prompt": ids, "max_tokens": 5, "cache_prompt": false});
        drop(server.open("/v1/completions", &prompt));
        let socket = server.open("/v1/completions", &prompt);
        std::thread::sleep(Duration::from_millis(60));
        drop(socket);
        // In the middle of the answer, streamed and not.
        let mut socket = server.open(CHAT, &endless(1));
        socket.read_exact(&mut [0; 600]).expect("some events");
        drop(socket);
        let mut whole = endless(2);
        whole["stream"] = json!(false);
        let socket = server.open(CHAT, &whole);
        std::thread::sleep(Duration::from_millis(60));
        drop(socket);
        assert_eq!(watched.join().expect("an answer"), want);
    });
    server.wait_metric("vllm:num_requests_running", 0.0, SOON);
    server.wait_metric("vllm:num_requests_waiting", 0.0, SOON);
    assert_eq!(said(&server.ask(CHAT, &body), 0), want);
}

#[test]
fn a_full_queue_is_refused_with_a_time_to_come_back_and_waiting_requests_can_leave() {
    let server = Server::start(&["--parallel", "1", "--ctx-size", "4096", "--queue", "2", "-q"]);
    let running = server.open(CHAT, &endless(1));
    server.wait_metric("vllm:num_requests_running", 1.0, SOON);
    let waiting = [server.open(CHAT, &endless(2)), server.open(CHAT, &endless(3))];
    server.wait_metric("vllm:num_requests_waiting", 2.0, SOON);
    let refused = server.post(CHAT, &json!({"messages": user("x"), "max_tokens": 1}));
    assert_eq!(refused.status, 429, "{}", refused.text);
    assert!(refused.header("retry-after").is_some());
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    drop(waiting);
    server.wait_metric("vllm:num_requests_waiting", 0.0, SOON);
    drop(running);
    server.wait_metric("vllm:num_requests_running", 0.0, SOON);
    assert_eq!(server.post(CHAT, &json!({"messages": user("x"), "max_tokens": 1})).status, 200);
}

#[test]
fn a_reader_that_never_reads_does_not_hold_up_another() {
    let server = Server::start(&["--parallel", "2", "--ctx-size", "4096", "-q"]);
    let mut stuck = endless(1);
    stuck["logprobs"] = json!(true);
    stuck["top_logprobs"] = json!(20);
    stuck["max_tokens"] = json!(3800);
    let socket = server.open(CHAT, &stuck);
    server.wait_metric("vllm:num_requests_running", 1.0, SOON);
    for seed in 0..3 {
        let start = Instant::now();
        server.ask(CHAT, &json!({"messages": user("x"), "max_tokens": 50, "seed": seed}));
        assert!(start.elapsed() < PATIENCE / 4, "the other request took {:?}", start.elapsed());
    }
    drop(socket);
    server.wait_metric("vllm:num_requests_running", 0.0, SOON);
}

#[test]
fn half_sent_requests_hold_nothing() {
    let server = Server::start(&["--parallel", "1", "-q"]);
    let mut sockets: Vec<_> =
        (0..20).map(|_| std::net::TcpStream::connect(&server.address).expect("a connection")).collect();
    for (i, socket) in sockets.iter_mut().enumerate() {
        let head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{\"messages\"";
        socket.write_all(&head.as_bytes()[..(i * 7).min(head.len())]).expect("a few bytes");
    }
    assert_eq!(server.post(CHAT, &json!({"messages": user("x"), "max_tokens": 1})).status, 200);
}

#[test]
fn a_client_that_does_not_send_its_request_is_let_go() {
    let server = Server::start(&["--parallel", "1", "--read-timeout", "1", "--max-body", "1", "-q"]);
    let talk = |head: &str| {
        let mut socket = std::net::TcpStream::connect(&server.address).expect("a connection");
        socket.set_read_timeout(Some(SOON)).expect("a timeout");
        socket.write_all(head.as_bytes()).expect("a few bytes");
        let mut reply = String::new();
        socket.read_to_string(&mut reply).expect("the server ends the connection");
        reply
    };
    let post = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    assert!(!talk("").contains("200"));
    assert!(!talk("POST /v1/chat/comp").contains("200"));
    let stalled = talk(&format!("{post}content-length: 500\r\n\r\n{{\"messages\""));
    assert!(stalled.starts_with("HTTP/1.1 408"), "{stalled}");
    // Refused by what it announces.
    let start = Instant::now();
    let huge = talk(&format!("{post}content-length: 99999999999999\r\n\r\n"));
    assert!(huge.starts_with("HTTP/1.1 413") && start.elapsed() < Duration::from_millis(900), "{huge}");
    // Neither an answer nor a pause between requests is taken for a slow request.
    let long = json!({"messages": user("x"), "max_tokens": 900, "ignore_eos": true});
    assert_eq!(server.post(CHAT, &long).status, 200);
}

#[test]
fn stopping_lets_running_requests_finish() {
    let mut server = Server::start(&["--parallel", "2", "--grace", "60", "-q"]);
    let body = json!({"messages": user("x"), "max_tokens": 300, "ignore_eos": true, "seed": 1, "stream": true});
    let mut socket = server.open(CHAT, &body);
    socket.read_exact(&mut [0; 300]).expect("a first event");
    server.signal("TERM");
    server.wait_for("stopping");
    let mut rest = String::new();
    socket.read_to_string(&mut rest).expect("the rest");
    assert!(rest.contains("\"finish_reason\":\"length\"") && rest.contains("[DONE]"), "cut off: {rest:.300}");
    assert_eq!(server.wait_exit(SOON), Some(0));
}

#[test]
fn stopping_cuts_off_what_takes_too_long() {
    // One thread and twenty rivals of every token: some seconds of work on any machine.
    let settings = ["--parallel", "1", "--grace", "1", "--ctx-size", "4096", "--mtp", "0", "-t", "1", "-q"];
    let mut server = Server::start(&settings);
    let mut body = endless(1);
    body["max_tokens"] = json!(4000);
    body["logprobs"] = json!(true);
    body["top_logprobs"] = json!(20);
    let mut socket = server.open(CHAT, &body);
    socket.read_exact(&mut [0; 300]).expect("a first event");
    let reader = std::thread::spawn(move || {
        let mut rest = String::new();
        socket.read_to_string(&mut rest).expect("the rest");
        rest
    });
    server.signal("INT");
    let start = Instant::now();
    assert_eq!(server.wait_exit(SOON), Some(0));
    assert!(start.elapsed() >= Duration::from_millis(900), "{:?}", start.elapsed());
    let rest = reader.join().unwrap();
    assert!(rest.contains("\"code\":\"stopping\""), "an error says so: {rest:.300}");
    assert!(!rest.contains("\"finish_reason\":\"length\""), "not as if the answer had reached its limit");
}

#[test]
fn the_log_says_what_a_client_that_left_had_got_and_why_a_request_was_refused() {
    let server = Server::start(&["--parallel", "1", "--ctx-size", "4096"]);
    let mut body = endless(1);
    body["max_tokens"] = json!(3000);
    let mut socket = server.open(CHAT, &body);
    socket.read_exact(&mut [0; 3000]).expect("some events");
    drop(socket);
    let line = server.wait_for("client gone");
    assert!(!line.contains("prompt 0 ") && !line.contains("answer 0,"), "{line}");
    assert_eq!(server.post(CHAT, &json!({"messages": user("x"), "top_p": 2})).status, 400);
    let line = server.wait_for(" 400");
    assert!(line.contains("`top_p`"), "{line}");
}

#[test]
fn two_servers_cannot_share_a_port() {
    let server = Server::start(&["--parallel", "1", "-q"]);
    let port = server.address.rsplit(':').next().expect("a port");
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_strata"))
        .args(["serve", "--port", port])
        .output()
        .expect("runs");
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    assert!(stderr.contains(&format!("127.0.0.1:{port}")), "{stderr}");
}
