//! Measuring llama.cpp beside strata: its `llama-bench`, or its server.

use super::ours::Sample;
use super::plan::{Kind, Test};
use crate::cli::failure::BadInput;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};
use strata_core::engine::MtpSetting;

/// `--against`: which program, and where it is.
#[derive(Clone, Debug, PartialEq)]
pub enum Against {
    /// `llama-bench=PATH`
    LlamaBench(PathBuf),
    /// `llama-server=PATH`
    LlamaServer(PathBuf),
    /// `llama-server=URL`
    ServerAt(String),
}

impl FromStr for Against {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        let place = |s: &str| if s.starts_with("http://") { Some(s.trim_end_matches('/').to_string()) } else { None };
        match s.split_once('=') {
            Some((_, "")) | None => Err("expected llama-bench=PATH, llama-server=PATH or llama-server=URL".into()),
            Some(("llama-bench", path)) => Ok(Against::LlamaBench(path.into())),
            Some(("llama-server", at)) => {
                Ok(place(at).map_or_else(|| Against::LlamaServer(at.into()), Against::ServerAt))
            }
            Some((other, _)) => Err(format!("unknown peer '{other}'; known are llama-bench and llama-server")),
        }
    }
}

impl Against {
    /// The name in the result.
    pub fn name(&self) -> &'static str {
        match self {
            Against::LlamaBench(_) => "llama-bench",
            Against::LlamaServer(_) | Against::ServerAt(_) => "llama-server",
        }
    }
}

/// What the peer runs on.
pub struct Setup<'a> {
    /// The model file (the first part of a split one).
    pub model: &'a Path,
    /// Threads.
    pub threads: usize,
    /// Rows per request.
    pub ctx: usize,
    /// Further arguments for the peer.
    pub arguments: &'a [String],
}

/// A peer, ready for the tests of one combination of parallel requests and drafts.
pub enum Peer<'a> {
    /// Runs once per sample.
    Bench { path: &'a Path, setup: &'a Setup<'a> },
    /// A server of our own or of somebody else.
    Server { url: String, _process: Option<Process> },
}

/// A child process that ends with its owner.
pub struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended by itself; both calls are then without effect.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// How long a server may take to load a model.
const LOAD_TIME: Duration = Duration::from_secs(900);

impl<'a> Peer<'a> {
    /// Prepares the peer. `None` when it cannot do this combination at all.
    pub fn start(against: &'a Against, setup: &'a Setup<'a>, test: &Test) -> Result<Option<Peer<'a>>> {
        match against {
            Against::LlamaBench(_) if test.parallel > 1 || test.mtp.0 != MtpSetting::Off => Ok(None),
            Against::LlamaBench(path) => Ok(Some(Peer::Bench { path, setup })),
            Against::LlamaServer(_) if test.mtp.0 == MtpSetting::Auto => Ok(None),
            Against::LlamaServer(path) => Ok(Some(start_server(path, setup, test)?)),
            Against::ServerAt(url) => {
                wait_until_ready(url, None, Instant::now() + Duration::from_secs(10))?;
                Ok(Some(Peer::Server { url: url.clone(), _process: None }))
            }
        }
    }

    /// Runs a test once.
    pub fn sample(&self, test: &Test, prompts: &[Vec<u32>]) -> Result<Sample> {
        match self {
            Peer::Bench { path, setup } => run_bench(path, setup, test),
            Peer::Server { url, .. } => ask_server(url, test, prompts),
        }
    }
}

fn run_bench(path: &Path, setup: &Setup, test: &Test) -> Result<Sample> {
    let (p, n) = match test.kind {
        Kind::Prompt => (test.tokens, 0),
        Kind::Decode => (0, test.tokens),
    };
    let mut command = Command::new(path);
    command.arg("-m").arg(setup.model).args(["-o", "json", "-r", "1"]);
    for (flag, value) in [("-p", p), ("-n", n), ("-t", setup.threads)] {
        command.arg(flag).arg(value.to_string());
    }
    if test.depth > 0 {
        command.arg("-d").arg(test.depth.to_string());
    }
    command.args(setup.arguments).stdin(Stdio::null()).stderr(Stdio::piped());
    let out = command.output().map_err(|e| cannot_run(path, &e))?;
    if !out.status.success() {
        let said = String::from_utf8_lossy(&out.stderr);
        bail!("{} failed: {}", path.display(), said.lines().last().unwrap_or("it said nothing"));
    }
    let results: Value =
        serde_json::from_slice(&out.stdout).with_context(|| format!("{} did not print JSON", path.display()))?;
    match results[0]["avg_ts"].as_f64() {
        Some(rate) => Ok(Sample { rate, ..Sample::default() }),
        None => bail!("{}: there is no 'avg_ts' in its result", path.display()),
    }
}

fn cannot_run(path: &Path, cause: &std::io::Error) -> BadInput {
    BadInput::new(format!("cannot run {}: {cause}", path.display()))
}

fn start_server<'a>(path: &Path, setup: &Setup, test: &Test) -> Result<Peer<'a>> {
    // The port is free again when the listener is gone; nobody else is likely to take it in between.
    let port = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).context("cannot find a free port")?.port();
    let mut command = Command::new(path);
    command.arg("-m").arg(setup.model).args(["--host", "127.0.0.1"]);
    for (flag, value) in
        [("--port", port as usize), ("-t", setup.threads), ("-np", test.parallel), ("-c", setup.ctx * test.parallel)]
    {
        command.arg(flag).arg(value.to_string());
    }
    if let MtpSetting::Depth(n) = test.mtp.0 {
        command.args(["--spec-type", "draft-mtp", "--spec-draft-n-max"]).arg(n.to_string());
    }
    command.args(setup.arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let child = command.spawn().map_err(|e| cannot_run(path, &e))?;
    let mut process = Process(child);
    let url = format!("http://127.0.0.1:{port}");
    wait_until_ready(&url, Some(&mut process), Instant::now() + LOAD_TIME)?;
    Ok(Peer::Server { url, _process: Some(process) })
}

fn wait_until_ready(url: &str, mut process: Option<&mut Process>, deadline: Instant) -> Result<()> {
    loop {
        if ureq::get(format!("{url}/health")).call().is_ok() {
            return Ok(());
        }
        if let Some(process) = process.as_mut()
            && let Ok(Some(status)) = process.0.try_wait()
        {
            bail!("the peer's server ended while it was loading ({status})");
        }
        if Instant::now() > deadline {
            bail!("{url}: the server does not answer");
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Rows, milliseconds and drafts of one answer of a llama.cpp server.
struct Timings {
    prompt_rows: f64,
    prompt_ms: f64,
    generated: f64,
    generate_ms: f64,
    drafted: usize,
    accepted: usize,
}

fn ask_server(url: &str, test: &Test, prompts: &[Vec<u32>]) -> Result<Sample> {
    if test.depth > 0 {
        all(url, prompts.iter().map(|p| &p[..test.depth]), 1)?;
    }
    let timings = match test.kind {
        Kind::Prompt => all(url, prompts.iter().map(|p| &p[..test.depth + test.tokens]), 1)?,
        Kind::Decode => all(url, prompts.iter().map(|p| &p[..test.depth + 1]), test.tokens + 1)?,
    };
    let longest = |f: fn(&Timings) -> f64| timings.iter().map(f).fold(0.0, f64::max);
    let (tokens, ms) = match test.kind {
        Kind::Prompt => (timings.iter().map(|t| t.prompt_rows).sum::<f64>(), longest(|t| t.prompt_ms)),
        // The first token comes out of the prompt and takes none of this time.
        Kind::Decode => (timings.iter().map(|t| t.generated - 1.0).sum(), longest(|t| t.generate_ms)),
    };
    Ok(Sample {
        rate: tokens / (ms / 1000.0),
        drafted: timings.iter().map(|t| t.drafted).sum(),
        accepted: timings.iter().map(|t| t.accepted).sum(),
        ..Sample::default()
    })
}

/// Asks for all answers at once.
fn all<'p>(url: &str, prompts: impl Iterator<Item = &'p [u32]>, n: usize) -> Result<Vec<Timings>> {
    std::thread::scope(|scope| {
        let asked: Vec<_> = prompts.enumerate().map(|(slot, p)| scope.spawn(move || ask(url, slot, p, n))).collect();
        asked.into_iter().map(|a| a.join().unwrap_or_else(|_| bail!("a thread that asked the server failed"))).collect()
    })
}

fn ask(url: &str, slot: usize, prompt: &[u32], n: usize) -> Result<Timings> {
    let body = json!({
        "prompt": prompt, "n_predict": n, "temperature": 0.0, "cache_prompt": true, "ignore_eos": true,
        "id_slot": slot, "stream": false,
    });
    let answer: Value = ureq::post(format!("{url}/completion"))
        .header("content-type", "application/json")
        .send(body.to_string())
        .and_then(|mut r| r.body_mut().with_config().limit(64 << 20).read_to_string())
        .with_context(|| format!("{url}/completion"))
        .and_then(|text| serde_json::from_str(&text).with_context(|| format!("{url}/completion: not JSON")))?;
    let number = |key: &str| answer["timings"][key].as_f64();
    let need = |key: &str| number(key).with_context(|| format!("{url}/completion: no 'timings.{key}' in the answer"));
    Ok(Timings {
        prompt_rows: need("prompt_n")?,
        prompt_ms: need("prompt_ms")?,
        generated: need("predicted_n")?,
        generate_ms: need("predicted_ms")?,
        drafted: number("draft_n").unwrap_or(0.0) as usize,
        accepted: number("draft_n_accepted").unwrap_or(0.0) as usize,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_read_from_the_command_line() {
        assert_eq!("llama-bench=/x/y".parse(), Ok(Against::LlamaBench("/x/y".into())));
        assert_eq!("llama-server=bin/s".parse(), Ok(Against::LlamaServer("bin/s".into())));
        assert_eq!("llama-server=http://h:1/".parse(), Ok(Against::ServerAt("http://h:1".into())));
        assert!("vllm=x".parse::<Against>().is_err());
        assert!("llama-bench".parse::<Against>().is_err());
        assert!("llama-bench=".parse::<Against>().is_err());
    }
}
