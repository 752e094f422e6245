//! What commands write: never over an input, a device or a folder, never half a file, refused before the work and with
//! exit code 2.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

struct Folder(tempfile::TempDir);

impl Folder {
    /// A folder with a copy of everything the commands read.
    fn new() -> Folder {
        let folder = Folder(tempfile::tempdir().unwrap());
        for (name, source) in [
            ("model.gguf", "tiny.gguf"),
            ("mmproj.gguf", "tiny-mmproj.gguf"),
            ("text.txt", "compare/text.txt"),
            ("x.png", "vision/pictures/rgb.png"),
        ] {
            std::fs::copy(golden(source), folder.at(name)).unwrap();
        }
        folder
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn at(&self, name: &str) -> PathBuf {
        self.path().join(name)
    }

    fn names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.path()).unwrap();
        let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
        command.args(args).current_dir(self.path()).env_remove("STRATA_MODEL").env("XDG_STATE_HOME", self.at("state"));
        command.stdin(Stdio::null());
        command
    }

    fn strata(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

const HF: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tiny-hf");

/// Every command that writes, as far as its output.
const WRITING: [&[&str]; 9] = [
    &["perplexity", "-m", "model.gguf", "-f", "text.txt", "--save"],
    &["kl-compare", "-m", "model.gguf", "-f", "text.txt", "--save"],
    &["kl-compare", "-m", "model.gguf", "--against", "model.gguf", "-f", "text.txt", "--plot"],
    &["parity", "-m", "model.gguf", "--save"],
    &["vision", "x.png", "--mmproj", "mmproj.gguf", "--render"],
    &["vision", "x.png", "--mmproj", "mmproj.gguf", "--out"],
    &["bench", "-m", "model.gguf", "--journal"],
    &["convert", HF, "--force", "-o"],
    &["convert", HF, "--force", "--mmproj"],
];

#[test]
fn outputs_that_cannot_be_written_are_refused_at_once() {
    let folder = Folder::new();
    let before = folder.names();
    std::os::unix::fs::symlink("nothing", folder.at("dangling")).unwrap();
    for command in WRITING {
        for (target, why) in [
            (".", "a folder"),
            ("/dev/null", "a device"),
            ("/dev/full", "a device"),
            ("nowhere/out", "nowhere/out"),
            ("dangling", "link"),
        ] {
            // A journal's folder is made.
            if command[0] == "bench" && ["nowhere/out", "dangling"].contains(&target) {
                continue;
            }
            let output = folder.strata(&[command, &[target]].concat());
            let said = stderr(&output);
            assert_eq!(output.status.code(), Some(2), "{command:?} {target}: {said}");
            assert!(said.contains(why) && !said.contains("partial") && output.stdout.is_empty(), "{target}: {said}");
        }
    }
    std::fs::remove_file(folder.at("dangling")).unwrap();
    assert_eq!(folder.names(), before, "nothing was left behind");
}

#[test]
fn no_output_replaces_an_input_whatever_it_is_called() {
    let folder = Folder::new();
    std::os::unix::fs::symlink("model.gguf", folder.at("link.gguf")).unwrap();
    std::fs::hard_link(folder.at("x.png"), folder.at("hard.png")).unwrap();
    std::fs::copy(folder.at("model.gguf"), folder.at("base.gguf")).unwrap();
    std::fs::create_dir(folder.at("hf")).unwrap();
    for file in std::fs::read_dir(HF).unwrap().map(Result::unwrap) {
        std::fs::copy(file.path(), folder.at("hf").join(file.file_name())).unwrap();
    }
    let content = |name: &str| std::fs::read(folder.at(name)).unwrap();
    let kept =
        ["model.gguf", "mmproj.gguf", "text.txt", "x.png", "base.gguf", "hf/config.json"].map(|n| (n, content(n)));
    let cases: [(&[&str], &str); 16] = [
        (WRITING[0], "model.gguf"),
        (WRITING[0], "link.gguf"),
        (WRITING[0], "./text.txt"),
        (WRITING[1], "model.gguf"),
        (&["kl-compare", "-m", "model.gguf", "--against", "base.gguf", "-f", "text.txt", "--plot"], "base.gguf"),
        (WRITING[3], "model.gguf"),
        (&["parity", "-f", "text.txt", "--save"], "text.txt"),
        (WRITING[4], "x.png"),
        (WRITING[4], "hard.png"),
        (WRITING[5], "mmproj.gguf"),
        (WRITING[6], "model.gguf"),
        (WRITING[6], "link.gguf"),
        (&["convert", "hf", "--force", "-o"], "hf/config.json"),
        (&["convert", "hf/config.json", "--force", "-o"], "hf/config.json"),
        (&["convert", "model.gguf", "--drop-mtp", "--force", "-o"], "link.gguf"),
        (&["convert", "model.gguf", "--mtp-from", "base.gguf", "--force", "-o"], "base.gguf"),
    ];
    for (command, target) in cases {
        let output = folder.strata(&[command, &[target]].concat());
        let said = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{command:?} {target}: {said}");
        assert!(said.contains("also an input"), "{command:?} {target}: {said}");
    }
    for (name, bytes) in kept {
        assert!(std::fs::read(folder.at(name)).unwrap() == bytes, "{name} changed");
    }
}

#[test]
fn two_outputs_of_one_command_are_two_files() {
    let folder = Folder::new();
    let cases: [&[&str]; 3] = [
        &["convert", HF, "-o", "out.gguf", "--mmproj", "./out.gguf"],
        &["vision", "x.png", "--mmproj", "mmproj.gguf", "--out", "new", "--render", "new"],
        &["kl-compare", "-m", "model.gguf", "--against", "model.gguf", "-f", "text.txt", "--save", "n", "--plot", "n"],
    ];
    for args in cases {
        let output = folder.strata(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains("same file as another one"), "{}", stderr(&output));
    }
    assert_eq!(folder.names(), Folder::new().names());
}

#[test]
fn an_existing_encoder_file_is_noticed_before_the_text_model_is_converted() {
    let folder = Folder::new();
    let output = folder.strata(&["convert", HF, "-o", "out.gguf", "--mmproj", "mmproj.gguf"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("mmproj.gguf: the file exists already"), "{}", stderr(&output));
    assert!(!folder.at("out.gguf").exists());
}

#[test]
fn a_journal_is_appended_to_journals_only() {
    let folder = Folder::new();
    let args = ["bench", "--pp", "4", "--tg", "0", "-r", "1", "-t", "1", "--journal", "text.txt"];
    let output = folder.strata(&args);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr(&output).contains("no journal"), "{}", stderr(&output));
    // One that is kept without being asked for is no reason to fail.
    std::fs::write(folder.at("state"), "not a folder").unwrap();
    let output = folder.strata(&args[..args.len() - 2]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(stderr(&output).contains("no journal is kept"), "{}", stderr(&output));
}

/// Starts a long perplexity run and waits for its unfinished file.
fn saving(folder: &Folder) -> std::process::Child {
    std::fs::write(folder.at("long.txt"), "All work and no play makes Jack a dull boy. ".repeat(6_000)).unwrap();
    let args = ["perplexity", "-m", "model.gguf", "-f", "long.txt", "--save", "out.bin", "-t", "1"];
    let child = folder.command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(120);
    while !folder.names().iter().any(|name| name.ends_with(&format!(".{}.1.partial", child.id()))) {
        assert!(Instant::now() < end, "no unfinished file: {:?}", folder.names());
        std::thread::sleep(Duration::from_millis(10));
    }
    child
}

fn signal(child: &std::process::Child, name: &str) {
    assert!(Command::new("kill").args([name, &child.id().to_string()]).status().unwrap().success());
}

#[test]
fn an_interrupt_removes_the_unfinished_file() {
    let folder = Folder::new();
    let child = saving(&folder);
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130));
    assert!(stderr(&output).contains("interrupted; unfinished files were removed"), "{}", stderr(&output));
    assert!(!folder.names().iter().any(|name| name.contains("out.bin")), "{:?}", folder.names());
}

#[test]
fn what_a_killed_process_left_is_removed_by_the_next() {
    let folder = Folder::new();
    let mut child = saving(&folder);
    signal(&child, "-KILL");
    child.wait().unwrap();
    assert!(folder.names().iter().any(|name| name.ends_with(".partial")));
    let next = ["perplexity", "-m", "model.gguf", "-f", "text.txt", "-c", "16", "--chunks", "1", "--save", "out.bin"];
    let output = folder.strata(&next);
    assert!(output.status.success(), "{}", stderr(&output));
    let left: Vec<_> = folder.names().into_iter().filter(|name| name.contains("out.bin")).collect();
    assert_eq!(left, ["out.bin"]);
}

#[test]
fn an_interrupted_conversion_says_what_it_left() {
    let folder = Folder::new();
    let args = ["convert", HF, "--type", "Q4_K", "-t", "1", "-o", "out.gguf", "--mmproj", "enc.gguf"];
    let child = folder.command(&args).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let end = Instant::now() + Duration::from_secs(120);
    while !folder.names().iter().any(|name| name == "out.gguf") {
        assert!(Instant::now() < end);
        std::thread::sleep(Duration::from_millis(1));
    }
    signal(&child, "-INT");
    let output = child.wait_with_output().unwrap();
    let said = stderr(&output);
    match output.status.code() {
        // The machine was faster than the signal.
        Some(0) => assert!(folder.at("enc.gguf").exists()),
        code => {
            assert_eq!(code, Some(130), "{said}");
            assert!(said.contains("written before that:") && said.contains("out.gguf"), "{said}");
            assert_eq!(said.contains("enc.gguf"), folder.at("enc.gguf").exists(), "{said}");
        }
    }
    assert!(!folder.names().iter().any(|name| name.ends_with(".partial")));
}

#[test]
fn what_comes_in_by_another_way_is_an_input_too() {
    let folder = Folder::new();
    let piped = |args: &[&str], file: &str| {
        folder.command(args).stdin(std::fs::File::open(folder.at(file)).unwrap()).output().unwrap()
    };
    let whole = |name: &str| std::fs::read(folder.at(name)).unwrap();
    std::fs::write(folder.at("mmproj.gguf.sha256"), "0").unwrap();
    std::fs::write(folder.at("settings.json"), "{\"a\": 1}").unwrap();
    let before = ["text.txt", "x.png", "mmproj.gguf.sha256", "settings.json"].map(whole);
    for (output, says) in [
        (piped(&["perplexity", "-m", "model.gguf", "-f", "-", "--save", "text.txt"], "text.txt"), "text.txt"),
        (piped(&["vision", "-", "--mmproj", "mmproj.gguf", "--render", "x.png"], "x.png"), "x.png"),
        // The hash that pins the encoder.
        (folder.strata(&["vision", "x.png", "--mmproj", "mmproj.gguf", "--out", "mmproj.gguf.sha256"]), "sha256"),
        // A part of the split output.
        (
            folder.strata(&[
                "convert",
                HF,
                "--force",
                "--split-max-size",
                "5M",
                "-o",
                "z.gguf",
                "--mmproj",
                "z-00002-of-00004.gguf",
            ]),
            "z-00002-of-00004.gguf",
        ),
        // JSON, but no journal.
        (folder.strata(&["bench", "-m", "model.gguf", "--journal", "settings.json"]), "settings.json"),
    ] {
        let told = stderr(&output);
        assert_eq!(output.status.code(), Some(2), "{told}");
        assert!(told.contains(says), "{told}");
    }
    assert_eq!(["text.txt", "x.png", "mmproj.gguf.sha256", "settings.json"].map(whole), before);
}

/// Runs a command whose stdout or stderr is a pipe that nobody reads any more; gives the exit code and what the other one got.
fn unread(folder: &Folder, args: &[&str], stdout: bool) -> (Option<i32>, String) {
    let mut command = folder.command(args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    if stdout {
        drop(child.stdout.take())
    } else {
        drop(child.stderr.take())
    }
    let output = child.wait_with_output().unwrap();
    let other = if stdout { output.stderr } else { output.stdout };
    (output.status.code(), String::from_utf8_lossy(&other).into_owned())
}

#[test]
fn a_reader_that_went_away_is_no_failure_and_no_panic() {
    let folder = Folder::new();
    let bench = ["bench", "--pp", "4", "--tg", "0", "-r", "1", "-t", "1", "--no-journal"];
    let parity = ["parity", "-m", "model.gguf", "--against", "model.gguf", "-p", "Hello", "-n", "2"];
    let perplexity = ["perplexity", "-m", "model.gguf", "-f", "text.txt", "-c", "16", "--chunks", "1"];
    for command in [&bench[..], &parity, &perplexity, &["inspect", "model.gguf"]] {
        for form in [&[][..], &["--csv"], &["--json"]] {
            if command[0] == "inspect" && form == ["--csv"] {
                continue;
            }
            let (code, said) = unread(&folder, &[command, form].concat(), true);
            assert_eq!(code, Some(0), "{command:?} {form:?}: {said}");
            assert!(!said.contains("panicked"), "{said}");
        }
    }
}

#[test]
fn what_cannot_be_said_on_stderr_is_left_unsaid() {
    let folder = Folder::new();
    let (code, answer) = unread(&folder, &["run", "-p", "Hello", "-n", "6", "-t", "1", "--think", "no"], false);
    assert_eq!(code, Some(0));
    assert!(!answer.is_empty(), "the answer came all the same");
    assert_eq!(unread(&folder, &["run", "-m", "nowhere.gguf", "-p", "Hello"], false).0, Some(2));
    assert_eq!(unread(&folder, &["parity", "-m", "model.gguf", "--save", "new.json", "-n", "1"], false).0, Some(0));
    assert!(folder.at("new.json").exists());
}
