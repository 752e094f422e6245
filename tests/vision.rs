//! `strata vision` as a user runs it.

use std::path::PathBuf;
use std::process::{Command, Output};

fn golden(name: &str) -> String {
    format!("{}/tests/golden/{name}", env!("CARGO_MANIFEST_DIR"))
}

fn vision(picture: &str, args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_strata"))
        .args(["vision", picture, "--mmproj", &golden("tiny-mmproj.gguf"), "--threads", "2"])
        .args(args)
        .output()
        .unwrap()
}

fn picture(name: &str) -> String {
    golden(&format!("vision/pictures/{name}"))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn reports_sizes_grid_and_notes_as_json() {
    let output = vision(&picture("moving.gif"), &["--json", "--vision-min-tokens", "4"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["source_size"], serde_json::json!([60, 44]));
    assert_eq!(report["size"], serde_json::json!([96, 64]));
    assert_eq!(report["grid"], serde_json::json!([2, 3]));
    assert_eq!(report["tokens"], 6);
    assert!(report["notes"][0].as_str().unwrap().contains("first frame"));
    assert!(report["milliseconds"]["attention"].as_f64().is_some());
}

#[test]
fn vision_tokens_bounds_the_rows() {
    for (most, expected) in [("64", 54), ("12", 8), ("4", 2)] {
        let output = vision(&picture("large.png"), &["--json", "--vision-tokens", most, "--vision-min-tokens", "1"]);
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["tokens"], expected, "at most {most}");
    }
}

#[test]
fn written_rows_compare_equal_to_themselves_and_not_to_another_picture() {
    let dir = tempfile::tempdir().unwrap();
    let rows = dir.path().join("rows.safetensors").display().to_string();
    assert!(vision(&picture("palette.png"), &["--out", &rows]).status.success());
    let same = vision(&picture("palette.png"), &["--compare", &rows, "--tolerance", "0", "--json"]);
    assert_eq!(same.status.code(), Some(0), "{}", stderr(&same));
    let report: serde_json::Value = serde_json::from_slice(&same.stdout).unwrap();
    assert_eq!(report["compare"]["largest"], 0.0);
    let other = vision(&picture("palette-transparent.png"), &["--compare", &rows]);
    assert_eq!(other.status.code(), Some(3), "another picture of the same size is beyond the threshold");
    let shape = vision(&picture("large.png"), &["--compare", &rows]);
    assert!(!shape.status.success() && stderr(&shape).contains("shape"), "{}", stderr(&shape));
}

#[test]
fn render_writes_what_the_encoder_sees() {
    let dir = tempfile::tempdir().unwrap();
    let png = dir.path().join("seen.png").display().to_string();
    let least = ["--vision-min-tokens", "4"];
    assert!(vision(&picture("rgb.png"), &[&least[..], &["--render", &png]].concat()).status.success());
    let seen = vision(&png, &[&least[..], &["--json"]].concat());
    let report: serde_json::Value = serde_json::from_slice(&seen.stdout).unwrap();
    assert_eq!(report["source_size"], report["size"], "what was rendered needs no resizing");
    assert_eq!(report["size"], serde_json::json!([96, 64]));
}

#[test]
fn a_pinned_checksum_is_checked() {
    let wrong = vision(&picture("rgb.png"), &["--mmproj-sha256", &"0".repeat(64)]);
    assert!(!wrong.status.success());
    assert!(stderr(&wrong).contains("SHA-256") && stderr(&wrong).contains(&"0".repeat(64)), "{}", stderr(&wrong));

    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("mmproj.gguf");
    std::fs::copy(golden("tiny-mmproj.gguf"), &copy).unwrap();
    std::fs::write(dir.path().join("mmproj.gguf.sha256"), format!("{}  mmproj.gguf\n", "1".repeat(64))).unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_strata"))
        .args(["vision", &picture("rgb.png"), "--mmproj", &copy.display().to_string()])
        .output()
        .unwrap();
    assert!(!output.status.success() && stderr(&output).contains("mmproj.gguf.sha256"), "{}", stderr(&output));
}

#[test]
fn a_broken_picture_or_encoder_is_bad_input_with_one_line_that_says_why() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, bytes: &[u8]| {
        let path: PathBuf = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.display().to_string()
    };
    let text = vision(&file("notes.png", b"not a picture"), &[]);
    assert_eq!(text.status.code(), Some(2), "{}", stderr(&text));
    assert!(stderr(&text).contains("notes.png") && stderr(&text).contains("not a picture"), "{}", stderr(&text));

    let encoder = file("mmproj.gguf", b"GGUF but not really");
    let output = Command::new(env!("CARGO_BIN_EXE_strata"))
        .args(["vision", &picture("rgb.png"), "--mmproj", &encoder])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(stderr(&output).contains("mmproj.gguf"), "{}", stderr(&output));

    let wrong = Command::new(env!("CARGO_BIN_EXE_strata"))
        .args(["vision", &picture("rgb.png"), "--mmproj", &golden("tiny.gguf")])
        .output()
        .unwrap();
    assert_eq!(wrong.status.code(), Some(2));
    assert!(stderr(&wrong).contains("general.architecture"), "a text model is not an encoder: {}", stderr(&wrong));
}

#[test]
fn the_place_of_the_encoder_is_no_idle_flag() {
    for (place, expected) in [("no", "nothing to do"), ("gpu", "CPU only")] {
        let output = vision(&picture("rgb.png"), &["--vision", place]);
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(expected), "{}", stderr(&output));
    }
    let help = Command::new(env!("CARGO_BIN_EXE_strata")).args(["vision", "--help"]).output().unwrap();
    assert!(String::from_utf8_lossy(&help.stdout).contains("1024 in `strata vision`"));
}

fn run(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_strata"))
        .args(["run", "--threads", "2", "--quiet", "-m", &golden("tiny.gguf")])
        .args(args)
        .output()
        .unwrap()
}

#[test]
fn text_without_pictures_is_the_same_with_and_without_an_encoder() {
    let prompt = ["-p", "What is the capital of France?", "-n", "24", "--temp", "0"];
    let with = run(&[&prompt[..], &["--mmproj", &golden("tiny-mmproj.gguf")]].concat());
    let without = run(&[&prompt[..], &["--vision", "no"]].concat());
    assert!(with.status.success() && without.status.success(), "{}{}", stderr(&with), stderr(&without));
    assert!(!with.stdout.is_empty());
    assert_eq!(with.stdout, without.stdout);
}

#[test]
fn run_reads_pictures_from_files_and_from_a_pipe() {
    let (mmproj, seen) = (golden("tiny-mmproj.gguf"), picture("large.png"));
    let ask = ["-p", "What is this?", "-n", "8", "--temp", "0", "--think", "no", "--mmproj", &mmproj, "--image"];
    let from_file = run(&[&ask[..], &[&seen]].concat());
    assert!(from_file.status.success(), "{}", stderr(&from_file));
    assert!(!from_file.stdout.is_empty());
    let from_pipe = Command::new(env!("CARGO_BIN_EXE_strata"))
        .args(["run", "--threads", "2", "--quiet", "-m", &golden("tiny.gguf")])
        .args(ask)
        .arg("-")
        .stdin(std::fs::File::open(&seen).unwrap())
        .output()
        .unwrap();
    assert_eq!(from_pipe.stdout, from_file.stdout, "{}", stderr(&from_pipe));

    let none = run(&["-p", "What is this?", "--vision", "no", "--image", &seen]);
    assert_eq!(none.status.code(), Some(2));
    assert!(stderr(&none).contains("--mmproj"), "says how to get an encoder: {}", stderr(&none));
    let animated = run(&[&ask[..], &[&picture("moving.gif")]].concat());
    assert!(stderr(&animated).contains("first frame"), "{}", stderr(&animated));
}

#[test]
fn files_of_the_wrong_kind_are_named_once_with_what_they_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let svg = dir.path().join("x.svg").display().to_string();
    std::fs::write(&svg, "<svg xmlns=\"http://www.w3.org/2000/svg\"/>").unwrap();
    let output = vision(&svg, &[]);
    assert_eq!(output.status.code(), Some(2));
    let first = stderr(&output).lines().next().unwrap().to_string();
    assert!(first.contains("x.svg: not a picture strata reads"), "{first}");
    let output = vision(&picture("palette.png"), &["--compare", &svg]);
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("not a safetensors file") && said.matches("x.svg").count() == 1, "{said}");
}
