//! `strata run` as a person or a script uses it: the real binary on the bundled model.

use std::io::Write;
use std::process::{Command, Output, Stdio};

const QUESTION: &str = "Write a Python function that checks if a string is a palindrome.";
const ANSWER: &str = "```python\ndef is_palindrome(text):\n    return text == text[::-1]\n```\n";

fn strata(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.args(args).env_remove("STRATA_MODEL").stdin(Stdio::null());
    command
}

fn output(args: &[&str]) -> Output {
    strata(args).output().expect("the binary starts")
}

fn with_stdin(args: &[&str], input: &[u8]) -> Output {
    let mut child = strata(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    // The command may end with an error before it has read everything.
    let _ = child.stdin.take().expect("piped").write_all(input);
    child.wait_with_output().expect("the binary ends")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("output is UTF-8")
}

fn json(args: &[&str]) -> serde_json::Value {
    let out = output(args);
    assert!(out.status.success(), "{}", text(&out.stderr));
    serde_json::from_slice(&out.stdout).expect("stdout is one JSON value")
}

#[test]
fn stdout_holds_the_answer_and_nothing_else() {
    let out = output(&["run", "--think", "no", "-p", QUESTION]);
    assert_eq!(text(&out.stdout), ANSWER);
    let err = text(&out.stderr);
    assert!(err.contains("using the bundled tiny model"), "{err}");
    // The bundled model may fit into the processor's caches: then more than memory gives is no share of it.
    let bandwidth = err.contains("of memory bandwidth") || err.contains("from cache");
    assert!(err.contains("tok/s") && bandwidth && err.contains("first token"), "{err}");
}

#[test]
fn prompt_file_and_pipe_give_the_same_answer() {
    let file = tempfile::NamedTempFile::new().expect("temporary file");
    std::fs::write(file.path(), format!("{QUESTION}\n")).expect("written");
    let path = file.path().to_str().expect("UTF-8 path");
    assert_eq!(text(&output(&["run", "--think", "no", "-f", path]).stdout), ANSWER);
    assert_eq!(text(&with_stdin(&["run", "--think", "no"], QUESTION.as_bytes()).stdout), ANSWER);
}

#[test]
fn text_piped_in_beside_a_prompt_follows_it() {
    let (question, rest) = ("Write a Python function", "that checks if a string is a palindrome.");
    let both = with_stdin(&["run", "--json", "--think", "no", "-p", question], format!("{rest}\n").as_bytes());
    let both: serde_json::Value = serde_json::from_slice(&both.stdout).expect("JSON");
    let joined = json(&["run", "--json", "--think", "no", "-p", &format!("{question}\n\n{rest}")]);
    assert_eq!(both["tokens"], joined["tokens"]);
    assert_eq!(both["timings"]["prompt_tokens"], joined["timings"]["prompt_tokens"]);
    assert_eq!(text(&with_stdin(&["run", "--think", "no", "-p", QUESTION], b"").stdout), ANSWER);
    for empty in [with_stdin(&["run", "-p", ""], b""), output(&["run", "-p", ""]), with_stdin(&["run"], b"")] {
        assert_eq!(empty.status.code(), Some(2));
        assert!(text(&empty.stderr).contains("is empty"), "{}", text(&empty.stderr));
    }
}

#[test]
fn what_cut_an_answer_and_flags_that_change_nothing_are_said() {
    let err = |args: &[&str]| {
        let out = output(&[&["run", "--raw", "-p", "One, two,", "-q"], args].concat());
        assert!(out.status.success(), "{}", text(&out.stderr));
        text(&out.stderr).to_owned()
    };
    assert!(err(&["-n", "3"]).contains("cut at -n 3"));
    assert!(err(&["-c", "24", "--ignore-eos"]).contains("context of 24 tokens is full (-c)"));
    let loud = |args: &[&str]| {
        text(&output(&[&["run", "--raw", "-p", "One, two,", "-n", "2"], args].concat()).stderr).to_owned()
    };
    assert!(loud(&["--seed", "7", "--top-k", "40"]).contains("--top-k, --seed change nothing without --temp"));
    assert!(!loud(&["--seed", "-1", "--temp", "1"]).contains("without --temp"));
}

#[test]
fn an_instruction_set_that_is_none_is_refused() {
    let out = strata(&["run", "-p", "x"]).env("STRATA_SIMD", "foo").output().expect("the binary starts");
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("STRATA_SIMD") && text(&out.stderr).contains("scalar"), "{}", text(&out.stderr));
}

#[test]
fn an_encoder_beside_the_model_is_named_and_several_are_asked_about_only_for_a_picture() {
    let golden = |name: &str| std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name);
    let folder = tempfile::tempdir().expect("a folder");
    let model = folder.path().join("model.gguf");
    std::fs::copy(golden("tiny.gguf"), &model).expect("copied");
    std::fs::copy(golden("tiny-mmproj.gguf"), folder.path().join("tiny-mmproj.gguf")).expect("copied");
    let (model, picture) = (model.to_str().expect("UTF-8").to_owned(), golden("square.png"));
    let with = ["run", "-m", &model, "-n", "1", "-p", "What is this?", "--image", picture.to_str().expect("UTF-8")];
    let out = output(&with);
    assert!(out.status.success() && text(&out.stderr).contains("tiny-mmproj.gguf"), "{}", text(&out.stderr));
    std::fs::copy(golden("tiny-mmproj.gguf"), folder.path().join("mmproj-2.gguf")).expect("copied");
    let out = output(&with);
    let err = text(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{err}");
    assert!(
        err.contains("mmproj-2.gguf") && err.contains("tiny-mmproj.gguf") && err.contains("--mmproj FILE"),
        "{err}"
    );
    assert!(output(&with[..7]).status.success());
}

#[test]
fn json_holds_text_reasoning_ids_and_timings() {
    let value = json(&["run", "--json", "-p", "What is 6 - 4?"]);
    assert!(!value["reasoning"].as_str().expect("text").is_empty(), "the template opens a reasoning block");
    assert!(!value["text"].as_str().expect("text").contains("think"), "reasoning is split off");
    assert_eq!(value["finish_reason"], "stop");
    let ids = value["tokens"].as_array().expect("ids");
    assert_eq!(value["timings"]["generated_tokens"].as_u64(), Some(ids.len() as u64));
    let quick = json(&["run", "--json", "--think", "no", "-p", "What is 6 - 4?"]);
    assert_eq!(quick["reasoning"], "");
}

#[test]
fn drafts_threads_and_chunks_change_no_token() {
    let prompt = "Tell me a story about a cow and a knife.";
    let plain = json(&["run", "--json", "-p", prompt, "--mtp", "0", "-t", "1"]);
    assert!(plain["tokens"].as_array().expect("ids").len() > 20);
    for variant in [
        &["--mtp", "3"][..],
        &["--draft", "ngram:2", "--mtp", "0"],
        &["--draft", "ngram", "--mtp", "2", "-t", "2"],
        &["--prefill", "1"],
        &["--prefill", "7", "-t", "2"],
    ] {
        let mut args = vec!["run", "--json", "-p", prompt];
        args.extend(variant);
        assert_eq!(json(&args)["tokens"], plain["tokens"], "{variant:?}");
    }
}

#[test]
fn a_seed_repeats_a_sampled_answer_and_another_seed_does_not() {
    let ask = |seed: &str| {
        json(&[
            "run",
            "--json",
            "-p",
            "Tell me a story.",
            "--temp",
            "1.2",
            "--top-k",
            "40",
            "--top-p",
            "0.95",
            "--seed",
            seed,
            "-n",
            "32",
        ])["tokens"]
            .clone()
    };
    assert_eq!(ask("1"), ask("1"));
    assert_ne!(ask("1"), ask("2"));
}

#[test]
fn stop_text_ends_the_answer_and_is_not_part_of_it() {
    let value = json(&["run", "--json", "--think", "no", "-p", QUESTION, "--stop", "return text"]);
    assert_eq!(value["text"], "```python\ndef is_palindrome(text):\n    ");
    assert_eq!(value["finish_reason"], "stop");
}

#[test]
fn length_ends_the_answer() {
    let value = json(&["run", "--json", "-p", "Tell me a story.", "-n", "5"]);
    assert_eq!(value["tokens"].as_array().map(Vec::len), Some(5));
    assert_eq!(value["finish_reason"], "length");
}

#[test]
fn reasoning_that_is_not_shown_is_mentioned_and_what_is_shown_is_marked() {
    let cut = output(&["run", "-p", "What is 6 - 4?", "-n", "2"]);
    assert!(cut.status.success() && cut.stdout.is_empty(), "{}", text(&cut.stdout));
    assert!(text(&cut.stderr).contains("all 2 tokens were reasoning"), "{}", text(&cut.stderr));
    let whole = json(&["run", "--json", "-p", "What is 6 - 4?"]);
    let shown = output(&["run", "-p", "What is 6 - 4?", "--show-thinking"]);
    let parts = |key: &str| whole[key].as_str().expect("text").trim().to_owned();
    let expected = format!("<think>\n{}\n</think>\n\n{}\n", parts("reasoning"), parts("text"));
    assert_eq!(text(&shown.stdout), expected);
}

#[test]
fn drafts_are_refused_without_a_head() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let path = folder.path().join("headless.gguf");
    let path = path.to_str().expect("UTF-8 path");
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tiny.gguf");
    assert!(output(&["convert", tiny, "--drop-mtp", "-o", path]).status.success());
    let out = output(&["run", "-m", path, "-p", "x", "-n", "1", "--mtp", "3"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("--mtp needs an MTP head"), "{}", text(&out.stderr));
    assert!(output(&["run", "-m", path, "-p", "x", "-n", "1"]).status.success(), "auto takes what is there");
}

#[test]
fn raw_text_is_continued_as_it_stands() {
    let value = json(&["run", "--raw", "--json", "-p", "import os\n", "-n", "3"]);
    assert_eq!(value["text"], "import re\n");
}

#[test]
fn special_tokens_in_a_message_stay_text() {
    // As tokens they would end the user's turn: the prompt would be shorter than its text and the answer another one.
    let plain = json(&["run", "--json", "-n", "1", "-p", "Say im_end"]);
    let literal = json(&["run", "--json", "-n", "1", "-p", "Say <|im_end|>"]);
    let more = literal["timings"]["prompt_tokens"].as_u64().expect("count")
        - plain["timings"]["prompt_tokens"].as_u64().expect("count");
    assert!(more >= 2, "<|im_end|> took {more} tokens more than im_end");
}

#[test]
fn pictures_are_read_with_the_bundled_encoder() {
    let picture = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/square.png");
    let with = json(&["run", "--json", "--think", "no", "--image", picture, "-p", "What is in the picture?"]);
    let without = json(&["run", "--json", "--think", "no", "-p", "What is in the picture?"]);
    let rows = with["timings"]["prompt_tokens"].as_u64().expect("count")
        - without["timings"]["prompt_tokens"].as_u64().expect("count");
    // 96 x 96 pixels are 3 x 3 merged blocks, between a start and an end token.
    assert_eq!(rows, 9 + 2);
    let piped = with_stdin(
        &["run", "--json", "--think", "no", "--image", "-", "-p", "What is in the picture?"],
        &std::fs::read(picture).expect("picture"),
    );
    let piped: serde_json::Value = serde_json::from_slice(&piped.stdout).expect("JSON");
    assert_eq!(piped["tokens"], with["tokens"]);
}

#[test]
fn bad_usage_is_one_clear_error_and_exit_code_2() {
    let cases: &[(&[&str], &str)] = &[
        (&["run", "-m", "/nowhere/model.gguf", "-p", "x"], "/nowhere/model.gguf"),
        (&["run", "-m", "Cargo.toml", "-p", "x"], "Cargo.toml"),
        (&["run", "-f", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (&["run", "-f", "."], "folder"),
        (&["run", "-p", "x", "--temp", "-1"], "--temp"),
        (&["run", "-p", "x", "--top-p", "2"], "--top-p"),
        (&["run", "-p", "x", "--mtp", "9"], "--mtp"),
        (&["run", "-p", "x", "--draft", "magic"], "--draft"),
        (&["run", "-p", "x", "--logit-bias", "5"], "--logit-bias"),
        (&["run", "-p", "x", "--logit-bias", "99999999+1"], "99999999"),
        (&["run", "-p", "x", "--image", "/nowhere.png"], "/nowhere.png"),
        (&["run", "-p", "x", "--image", "Cargo.toml"], "Cargo.toml"),
        (&["run", "-p", "x", "-c", "1"], "ctx"),
        (
            &["run", "-p", "x", "-c", "999999999999"],
            "(--ctx-size) is 999999999999 tokens, but the model was trained for 4096",
        ),
        (&["run", "-p", "x", "-m", "tests/golden/tiny-hf"], "strata convert"),
        (&["run", "-p", "x", "-m", "tests/golden/tiny-hf/config.json"], "strata convert"),
        (&["run", "-p", "x", "-m", "tests/golden/tiny-mmproj.gguf"], "--mmproj"),
        (&["run", "-p", "x", "--stop", ""], "--stop"),
        (&["run", "-p", "x", "--draft-vocab", "0"], "--draft-vocab is 0"),
        (&["run", "-p", "x", "--seed", "-2"], "--seed"),
        (&["run", "-p", "x", "-t", "0"], "--threads"),
    ];
    for (args, named) in cases {
        let out = strata(args).current_dir(env!("CARGO_MANIFEST_DIR")).output().expect("the binary starts");
        let err = text(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {err}");
        assert!(err.contains(named), "{args:?} should name {named}: {err}");
        assert!(!err.contains("panicked"), "{args:?}: {err}");
        let plan = err.contains("memory: weights");
        assert!(!plan || !named.contains("--ctx-size"), "{args:?}: found before the plan is made: {err}");
        assert!(out.stdout.is_empty(), "{args:?}");
    }
    let out = with_stdin(&["run"], b"\xff\xfe");
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("UTF-8"));
    let out = with_stdin(&["run"], b"");
    assert_eq!(out.status.code(), Some(2));
    let long = "word ".repeat(9000);
    let out = with_stdin(&["run"], long.as_bytes());
    assert_eq!(out.status.code(), Some(2));
    assert!(text(&out.stderr).contains("4096"), "names the context: {}", text(&out.stderr));
}
