//! `strata bench`: its figures in every form, its journal, and peers that take turns with it. The peers here are stand-ins
//! that answer with fixed times; no test looks at a speed of this machine.

use serde_json::Value as Json;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};

fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tiny.gguf")
}

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_strata")).arg("bench").args(args).env_remove("STRATA_MODEL").output().unwrap()
}

fn json(args: &[&str]) -> Json {
    let out = bench(&[args, &["--json"]].concat());
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
fn reading_and_generating_are_measured_with_their_phases() {
    let args =
        ["--pp", "24", "--tg", "6", "--depth", "0,20", "--parallel", "1,2", "-r", "2", "-t", "1", "--no-journal"];
    let all = json(&args);
    let rows = all["results"].as_array().unwrap();
    let names: Vec<_> = rows.iter().map(|r| format!("{} d{} x{}", r["test"], r["depth"], r["parallel"])).collect();
    assert_eq!(rows.len(), 8, "{names:?}");
    for row in rows {
        let number = |name: &str| row[name].as_f64().unwrap_or_else(|| panic!("{name} in {row}"));
        assert_eq!(number("samples"), 2.0);
        assert!(
            number("tok_s_min") > 0.0
                && number("tok_s_min") <= number("tok_s")
                && number("tok_s") <= number("tok_s_max")
        );
        let shares: f64 = ["embed", "attention", "delta_net", "experts", "head", "mtp", "commit", "other"]
            .map(|p| number(&format!("{p}_percent")))
            .iter()
            .sum();
        assert!((shares - 100.0).abs() < 5.0, "medians of shares add up to about 100: {row}");
        assert_eq!(row["gb_s"].is_null(), row["test"] == "pp24", "weights per token count while generating");
    }
    assert!(all["machine"]["read_gb_s"].as_f64().unwrap() > 0.0);
    assert!(all["model"]["bytes_per_token"].as_u64().unwrap() > 0);
}

#[test]
fn drafts_are_reported_with_their_acceptance() {
    let all = json(&["--pp", "0", "--tg", "24", "--mtp", "off,2", "-r", "1", "-t", "1", "--no-journal"]);
    let rows = all["results"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    assert!(rows[0]["acceptance_percent"].is_null());
    assert_eq!(rows[0]["tokens_per_window"], 1.0);
    assert_eq!(rows[1]["mtp"], "2");
    assert!(rows[1]["acceptance_percent"].as_f64().unwrap() > 0.0, "the bundled model's head is trained: {}", rows[1]);
    assert!(rows[1]["tokens_per_window"].as_f64().unwrap() > 1.0);
}

#[test]
fn csv_has_the_columns_of_the_json_and_the_journal_keeps_both_runs() {
    let dir = tempfile::tempdir().unwrap();
    let journal = dir.path().join("new/journal.jsonl");
    let args = ["--pp", "8", "--tg", "3", "-r", "1", "-t", "1", "--journal", journal.to_str().unwrap()];
    let all = json(&args);
    let out = bench(&[&args[..], &["--csv"]].concat());
    let csv = String::from_utf8(out.stdout).unwrap();
    let columns: Vec<&str> = csv.lines().next().unwrap().split(',').collect();
    let keys: Vec<&str> = all["results"][0].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(columns, keys);
    assert_eq!(csv.lines().count(), 3);

    let entries: Vec<Json> =
        std::fs::read_to_string(&journal).unwrap().lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(entries.len(), 2);
    for key in ["machine", "build", "model", "settings", "results"] {
        assert!(!entries[1][key].is_null(), "{key}");
    }
    assert_eq!(entries[0]["results"], all["results"], "the journal has the figures that were printed");
    assert_eq!(entries[0]["model"]["hash"], entries[1]["model"]["hash"]);
}

#[test]
fn llama_bench_takes_turns_and_gets_the_same_test() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("llama-bench");
    let log = dir.path().join("calls");
    let script = format!("#!/bin/sh\necho \"$@\" >> {}\necho '[{{\"avg_ts\": 8.0}}]'\n", log.display());
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let model = tiny();
    let peer = format!("llama-bench={}", program.display());
    let args = [
        "-m",
        model.to_str().unwrap(),
        "--pp",
        "8",
        "--tg",
        "3",
        "--depth",
        "5",
        "--parallel",
        "1,2",
        "-r",
        "2",
        "-t",
        "1",
        "--no-journal",
        "--against",
        &peer,
        "--against-arg=-rtr",
        "--against-arg=1",
    ];
    let all = json(&args);
    let rows = all["results"].as_array().unwrap();
    let ratio = rows[0]["tok_s"].as_f64().unwrap() / 8.0;
    assert_eq!(rows[0]["peer_tok_s"], 8.0);
    assert_eq!(rows[0]["peer_spread_percent"], 0.0);
    assert!((rows[0]["ratio"].as_f64().unwrap() - ratio).abs() < 0.002 * ratio.max(1.0));
    assert!(rows[2]["ratio"].is_null(), "llama-bench cannot run two requests at once");
    let calls = std::fs::read_to_string(&log).unwrap();
    assert_eq!(calls.lines().count(), 6, "two tests, each 1 + 2 times: {calls}");
    assert!(calls.lines().all(|c| c.contains("-d 5") && c.ends_with("-rtr 1") && c.contains("-t 1")), "{calls}");
    assert!(calls.contains("-p 8 -n 0") && calls.contains("-p 0 -n 3"), "{calls}");
}

/// Answers like a llama.cpp server, with fixed times. Returns its URL and the requests it got.
fn stand_in_server() -> (String, Arc<Mutex<Vec<Json>>>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let requests = Arc::new(Mutex::new(Vec::new()));
    let seen = requests.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut reader = BufReader::new(stream.try_clone().unwrap());
            let (mut length, mut line) = (0, String::new());
            while reader.read_line(&mut line).unwrap_or(0) > 2 {
                if let Some((name, value)) = line.split_once(':')
                    && name.eq_ignore_ascii_case("content-length")
                {
                    length = value.trim().parse().unwrap();
                }
                line.clear();
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let text = match serde_json::from_slice::<Json>(&body) {
                Err(_) => serde_json::json!({"status": "ok"}),
                Ok(request) if request["stream"] == true => {
                    let pieces = request["max_tokens"].as_u64().unwrap();
                    let piece = "data: {\"choices\": [{\"text\": \"x\"}]}\n\n".repeat(pieces as usize);
                    let usage =
                        format!("data: {{\"choices\": [], \"usage\": {{\"completion_tokens\": {pieces}}}}}\n\n");
                    answer(&mut stream, &(piece + &usage + "data: [DONE]\n\n"));
                    continue;
                }
                Ok(request) => {
                    let rows = request["prompt"].as_array().unwrap().len();
                    let n = request["n_predict"].as_u64().unwrap();
                    seen.lock().unwrap().push(request);
                    serde_json::json!({"timings": {"prompt_n": rows, "prompt_ms": 100.0, "predicted_n": n,
                        "predicted_ms": 500.0, "draft_n": 10, "draft_n_accepted": 6}})
                }
            }
            .to_string();
            answer(&mut stream, &text);
        }
    });
    (url, requests)
}

fn answer(stream: &mut std::net::TcpStream, body: &str) {
    let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    let _ = stream.write_all((head + body).as_bytes());
}

#[test]
fn load_on_a_server_has_the_same_figures_in_every_form() {
    let (url, _) = stand_in_server();
    let peer = format!("llama-server={url}");
    let args = ["--serve", &url, "--against", &peer, "--clients", "1,2", "--answer-tokens", "4", "--rounds", "2"];
    let all = json(&args);
    let rows = all["results"].as_array().unwrap();
    assert_eq!(rows.len(), 4, "2 sides with 1 and 2 clients");
    assert!(rows[0]["ratio"].as_f64().unwrap() > 0.0 && rows[1]["ratio"].is_null(), "{rows:?}");
    assert_eq!(all["settings"]["rounds"], 2);
    let csv = bench(&[&args[..], &["--csv"]].concat());
    let csv = String::from_utf8(csv.stdout).unwrap();
    let keys: Vec<&str> = rows[0].as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(csv.lines().next().unwrap(), keys.join(","));
    assert_eq!(csv.lines().count(), 5);
    let text = String::from_utf8(bench(&args).stdout).unwrap();
    assert_eq!((text.lines().count(), text.matches(" x the other").count()), (4, 2), "{text}");
}

#[test]
fn a_llama_server_gets_the_same_prompts() {
    let (url, requests) = stand_in_server();
    let model = tiny();
    let peer = format!("llama-server={url}");
    let args = [
        "-m",
        model.to_str().unwrap(),
        "--pp",
        "8",
        "--tg",
        "3",
        "--parallel",
        "2",
        "--mtp",
        "1",
        "-r",
        "1",
        "-t",
        "1",
        "--no-journal",
        "--against",
        &peer,
    ];
    let all = json(&args);
    let rows = all["results"].as_array().unwrap();
    assert_eq!(rows[0]["peer_tok_s"], 160.0, "2 prompts of 8 rows in 100 ms");
    assert_eq!(rows[1]["peer_tok_s"], 12.0, "2 x 3 timed tokens in 500 ms");
    assert_eq!(rows[1]["peer_acceptance_percent"], 60.0);
    let requests = requests.lock().unwrap();
    assert_eq!(requests.len(), 8, "2 tests, 1 + 1 rounds, 2 requests each");
    let prompts = requests.iter().map(|r| r["prompt"].to_string()).filter(|p| p.contains(','));
    let different: std::collections::HashSet<String> = prompts.collect();
    assert_eq!(different.len(), 4, "no prompt can be answered from the one before");
    assert!(requests.iter().all(|r| r["ignore_eos"] == true && r["temperature"] == 0.0));
}

#[test]
fn what_cannot_be_measured_is_refused_with_the_numbers() {
    let model = tiny();
    let model = model.to_str().unwrap();
    for (args, expected) in [
        (&["--pp", "0", "--tg", "0"][..], "nothing to measure"),
        (&["-m", model, "--pp", "5000"], "needs a context of 5002 rows, the model has 4096"),
        (&["--parallel", "0"], "--parallel"),
        (&["--mtp", "9"], "1 to 6"),
        (&["--against", "llama-bench=x"], "a peer needs a model file"),
        (&["-m", model, "--against", "llama-bench=/nowhere/llama-bench", "-r", "1"], "cannot run /nowhere/llama-bench"),
        (&["-m", model, "--against", "vllm=x"], "unknown peer 'vllm'"),
        (&["--prompt-file", "/nowhere/text"], "/nowhere/text"),
    ] {
        let out = bench(&[args, &["--no-journal"]].concat());
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(expected), "{args:?}: {said}");
    }
}
