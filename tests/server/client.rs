//! Starts a server on a free port and talks to it.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

/// Longest time a server may take to load, or a reply to come.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// A running `strata serve`; killed when dropped.
pub struct Server {
    child: Child,
    /// Lines of its stderr.
    lines: Mutex<Receiver<String>>,
    /// `127.0.0.1:PORT`
    pub address: String,
    agent: ureq::Agent,
}

/// A reply.
#[derive(Debug)]
pub struct Reply {
    /// HTTP status.
    pub status: u16,
    /// Headers, names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body as text.
    pub text: String,
}

impl Reply {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|e| panic!("{e}: {}", self.text))
    }

    /// A header's value.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(k, _)| k == name).map(|(_, v)| v.as_str())
    }
}

impl Server {
    /// Starts one with the bundled model and waits until it is ready.
    pub fn start(args: &[&str]) -> Server {
        let server = Server::spawn(args);
        server.wait_for("ready on");
        server
    }

    /// Starts one and waits only until it listens.
    pub fn spawn(args: &[&str]) -> Server {
        let mut child = Command::new(env!("CARGO_BIN_EXE_strata"))
            .args(["serve", "--port", "0"])
            .args(args)
            .env_remove("STRATA_MODEL")
            .env_remove("STRATA_API_KEY")
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let stderr = child.stderr.take().expect("stderr is piped");
        let (send, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        let config =
            ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE)).proxy(None);
        let mut server =
            Server { child, lines: Mutex::new(lines), address: String::new(), agent: config.build().into() };
        let line = server.wait_for("listening on http://");
        let address = line.split("http://").nth(1).and_then(|s| s.split_whitespace().next());
        server.address = address.expect("an address").to_owned();
        server
    }

    /// The next line of stderr with `text` in it.
    pub fn wait_for(&self, text: &str) -> String {
        let deadline = Instant::now() + PATIENCE;
        let mut seen = Vec::new();
        let lines = self.lines.lock().expect("one reader at a time");
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match lines.recv_timeout(left) {
                Ok(line) if line.contains(text) => return line,
                Ok(line) => seen.push(line),
                Err(error) => panic!("no {text:?} on stderr ({error}); seen: {seen:#?}"),
            }
        }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// `POST` of a JSON value.
    pub fn post(&self, path: &str, body: &Value) -> Reply {
        self.post_text(path, &body.to_string(), &[])
    }

    /// `POST` of any text with further headers.
    pub fn post_text(&self, path: &str, body: &str, headers: &[(&str, &str)]) -> Reply {
        let mut request = self.agent.post(self.url(path)).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        reply(request.send(body).expect("a reply"))
    }

    /// `GET`
    pub fn get(&self, path: &str) -> Reply {
        self.get_with(path, &[])
    }

    /// `GET` with headers.
    pub fn get_with(&self, path: &str, headers: &[(&str, &str)]) -> Reply {
        let mut request = self.agent.get(self.url(path));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        reply(request.call().expect("a reply"))
    }

    /// `POST` that must be answered with 200.
    pub fn ask(&self, path: &str, body: &Value) -> Value {
        let reply = self.post(path, body);
        assert_eq!(reply.status, 200, "{body}: {}", reply.text);
        reply.json()
    }

    /// `POST` with `stream: true`; all events until the end: (name, data).
    pub fn stream(&self, path: &str, body: &Value) -> Vec<(String, String)> {
        let mut body = body.clone();
        body["stream"] = true.into();
        let request = self.agent.post(self.url(path)).header("content-type", "application/json");
        let response = request.send(&body.to_string()).expect("a reply");
        assert_eq!(response.status().as_u16(), 200);
        let mut events = Vec::new();
        let mut name = String::new();
        for line in BufReader::new(response.into_body().into_reader()).lines() {
            let line = line.expect("UTF-8 lines");
            if let Some(value) = line.strip_prefix("event: ") {
                name = value.to_owned();
            } else if let Some(data) = line.strip_prefix("data: ") {
                events.push((std::mem::take(&mut name), data.to_owned()));
            }
        }
        events
    }

    /// A request on a socket of its own, to be read slowly or dropped.
    pub fn open(&self, path: &str, body: &Value) -> TcpStream {
        let body = body.to_string();
        let mut socket = TcpStream::connect(&self.address).expect("a connection");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        let head = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all(head.as_bytes()).and_then(|()| socket.write_all(body.as_bytes())).expect("a request");
        socket
    }

    /// A Prometheus value.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text;
        let line = text.lines().find(|l| l.starts_with(name) && l[name.len()..].starts_with(['{', ' ']));
        line.and_then(|l| l.rsplit(' ').next()?.parse().ok()).unwrap_or_else(|| panic!("no {name} in\n{text}"))
    }

    /// Waits until a metric has a value.
    pub fn wait_metric(&self, name: &str, value: f64, longest: Duration) {
        let deadline = Instant::now() + longest;
        while self.metric(name) != value {
            assert!(Instant::now() < deadline, "{name} is {}, not {value}, after {longest:?}", self.metric(name));
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The most memory the process ever had resident, in bytes; 0 where the system does not tell.
    pub fn peak_memory(&self) -> f64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap_or_default();
        let peak =
            status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
        peak.map_or(0.0, |kib: f64| kib * 1024.0)
    }

    /// Sends a signal.
    pub fn signal(&self, name: &str) {
        let done = Command::new("kill").args([&format!("-{name}"), &self.child.id().to_string()]).status();
        assert!(done.expect("kill runs").success());
    }

    /// Waits for the process to end; its exit code.
    pub fn wait_exit(&mut self, longest: Duration) -> Option<i32> {
        let deadline = Instant::now() + longest;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return status.code();
            }
            assert!(Instant::now() < deadline, "the server is still there after {longest:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn reply(mut response: ureq::http::Response<ureq::Body>) -> Reply {
    let headers = response.headers().iter();
    let headers = headers.map(|(k, v)| (k.to_string(), v.to_str().unwrap_or_default().to_owned())).collect();
    let mut text = String::new();
    response.body_mut().as_reader().read_to_string(&mut text).expect("a body in UTF-8");
    Reply { status: response.status().as_u16(), headers, text }
}

/// A user's message.
pub fn user(text: &str) -> Value {
    serde_json::json!([{"role": "user", "content": text}])
}

/// What a chat answer says: text, reasoning, calls, end.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Said {
    /// Text for the user.
    pub text: String,
    /// Reasoning.
    pub reasoning: String,
    /// (function, arguments)
    pub calls: Vec<(String, String)>,
    /// Why it ended.
    pub finish: String,
    /// Token reports.
    pub logprobs: Vec<Value>,
}

/// Reads choice `index` of a whole chat or completion answer.
pub fn said(reply: &Value, index: usize) -> Said {
    let choice = &reply["choices"][index];
    let text = |v: &Value| v.as_str().unwrap_or_default().to_owned();
    let message = &choice["message"];
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    Said {
        text: text(&message["content"]) + &text(&choice["text"]),
        reasoning: text(&message["reasoning_content"]),
        calls: calls.map(|c| (text(&c["function"]["name"]), text(&c["function"]["arguments"]))).collect(),
        finish: text(&choice["finish_reason"]),
        logprobs: choice["logprobs"]["content"].as_array().cloned().unwrap_or_default(),
    }
}

/// Puts the events of a streamed chat or completion answer together.
pub fn said_streamed(events: &[(String, String)], index: usize) -> Said {
    let mut all = Said::default();
    assert_eq!(events.last().map(|e| e.1.as_str()), Some("[DONE]"));
    for (_, data) in &events[..events.len() - 1] {
        let event: Value = serde_json::from_str(data).expect("JSON events");
        assert!(event.get("error").is_none(), "{event}");
        for choice in event["choices"].as_array().expect("choices").iter().filter(|c| c["index"] == index) {
            let delta = &choice["delta"];
            all.text += delta["content"].as_str().or(choice["text"].as_str()).unwrap_or_default();
            all.reasoning += delta["reasoning_content"].as_str().unwrap_or_default();
            for call in delta["tool_calls"].as_array().into_iter().flatten() {
                if let Some(name) = call["function"]["name"].as_str() {
                    assert_eq!(call["index"], all.calls.len());
                    all.calls.push((name.to_owned(), String::new()));
                }
                let at = call["index"].as_u64().expect("an index") as usize;
                all.calls[at].1 += call["function"]["arguments"].as_str().unwrap_or_default();
            }
            if let Some(reason) = choice["finish_reason"].as_str() {
                assert_eq!(all.finish, "", "two ends");
                all.finish = reason.to_owned();
            }
            all.logprobs.extend(choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
        }
    }
    all
}
