//! `strata convert` as people run it: exit codes, what it says, and what lies in the folder afterwards.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use strata_core::gguf::GgufFile;

/// The bundled tiny checkpoint.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/tiny-hf");

fn strata(args: &[&dyn AsRef<std::ffi::OsStr>]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
    command.arg("convert").args(args.iter().map(|a| a.as_ref())).stdin(Stdio::null());
    command.output().expect("the program starts")
}

/// Exit code, stdout, stderr.
fn said(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

/// The names in a folder, hidden ones included.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

#[test]
fn a_folder_is_converted_proved_and_summed_up() {
    let folder = Folder::new();
    let (model, encoder) = (folder.file("model.gguf"), folder.file("mmproj.gguf"));
    let (code, out, err) = said(&strata(&[&TINY, &"-o", &model, &"--type", &"Q4_K_M", &"--mmproj", &encoder]));
    assert_eq!(code, 0, "{out}{err}");
    assert!(out.contains("MTP head: 1 layer, 20 tensors"), "{out}");
    assert!(out.contains("left out: 57 tensors: belongs to the vision encoder"), "{out}");
    assert_eq!(out.matches(" 0 off, 0 metadata differences").count(), 2, "{out}");
    assert!(err.is_empty(), "nothing but results where no one watches: {err}");
    assert_eq!(names(folder.0.path()), ["mmproj.gguf", "model.gguf"]);
    assert_eq!(GgufFile::open(&model).unwrap().tensors().len(), 96);
    assert_eq!(GgufFile::open(&encoder).unwrap().tensors().len(), 58);
}

#[test]
fn an_existing_output_is_kept_without_force() {
    let folder = Folder::new();
    let out = folder.file("model.gguf");
    std::fs::write(&out, "precious").unwrap();
    let (code, _, err) = said(&strata(&[&TINY, &"-o", &out, &"--type", &"BF16"]));
    assert_eq!(code, 2, "{err}");
    assert!(err.contains("model.gguf") && err.contains("exist"), "{err}");
    assert_eq!(std::fs::read(&out).unwrap(), b"precious");
    assert_eq!(said(&strata(&[&TINY, &"-o", &out, &"--type", &"BF16", &"--force", &"--no-verify"])).0, 0);
    assert_eq!(names(folder.0.path()), ["model.gguf"]);
    assert_eq!(GgufFile::open(&out).unwrap().tensors().len(), 96);
}

#[test]
fn a_lost_head_is_noticed_and_put_back() {
    let folder = Folder::new();
    let (whole, headless, restored) =
        (folder.file("whole.gguf"), folder.file("headless.gguf"), folder.file("restored.gguf"));
    assert_eq!(said(&strata(&[&TINY, &"-o", &whole, &"--type", &"Q8_0", &"--no-verify"])).0, 0);
    let (code, out, err) = said(&strata(&[&whole, &"--drop-mtp", &"-o", &headless]));
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("dropped 20 tensors") && out.contains("carried over byte for byte: 76 tensors"), "{out}");

    let (code, out, _) = said(&strata(&[&"--verify", &headless, &"--source", &TINY]));
    assert_eq!(code, 3, "{out}");
    assert!(out.contains("the MTP head is missing (20 tensors); restore it with: strata convert"), "{out}");
    let line = out.lines().find(|line| line.contains("blk.4.nextn.eh_proj.weight")).unwrap();
    assert!(line.contains("MISSING") && !line.contains("0.000"), "no figures where nothing was compared: {line}");

    let (code, out, err) = said(&strata(&[&headless, &"--mtp-from", &TINY, &"-o", &restored, &"--json"]));
    assert_eq!(code, 0, "{err}");
    let report: serde_json::Value = serde_json::from_str(&out).expect("one JSON object");
    assert_eq!(report["added"].as_array().unwrap().len(), 20);
    assert_eq!(report["verification"]["good"], true);
    let (code, out, _) = said(&strata(&[&"--verify", &restored, &"--source", &TINY]));
    assert_eq!(code, 0, "{out}");
    let (a, b) = (GgufFile::open(&whole).unwrap(), GgufFile::open(&restored).unwrap());
    let never = folder.file("never.gguf");
    assert_eq!(said(&strata(&[&TINY, &"-o", &never, &"--type", &"Q8_0", &"--no-verify", &"--no-mtp"])).0, 0);
    let size = |file: &Path| GgufFile::open(file).unwrap().metadata().str("general.size_label").unwrap().to_string();
    assert_eq!((size(&headless), size(&restored)), (size(&never), size(&whole)));
    assert_ne!(size(&headless), size(&whole));
    assert!(a.tensors().iter().all(|t| a.data(t) == b.data(b.tensor(&t.name).unwrap())));
}

#[test]
fn split_files_hold_the_same_model() {
    let folder = Folder::new();
    let (whole, split) = (folder.file("whole.gguf"), folder.file("split.gguf"));
    assert_eq!(said(&strata(&[&TINY, &"-o", &whole, &"--type", &"UD-Q4_K_XL", &"--no-verify"])).0, 0);
    let (code, out, err) = said(&strata(&[&TINY, &"-o", &split, &"--split-max-size", &"4M"]));
    assert_eq!(code, 0, "{out}{err}");
    let first = std::fs::read_dir(folder.0.path()).unwrap().map(|f| f.unwrap().path());
    let mut parts: Vec<PathBuf> = first.filter(|p| p.to_string_lossy().contains("split-")).collect();
    parts.sort();
    assert!(parts.len() >= 3, "{parts:?}");
    let (a, b) = (GgufFile::open(&whole).unwrap(), GgufFile::open(&parts[0]).unwrap());
    assert!(a.tensors().iter().all(|t| a.data(t) == b.data(b.tensor(&t.name).unwrap())));
}

#[test]
fn an_interrupt_leaves_no_half_file() {
    let folder = Folder::new();
    let out = folder.file("model.gguf");
    let mut child = Command::new(env!("CARGO_BIN_EXE_strata"))
        .args(["convert", TINY, "--type", "Q4_K", "-t", "1", "-o"])
        .arg(&out)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(60));
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let code = child.wait().unwrap().code();
    // Whether the signal came before the work was done is a matter of the machine; half a file is never there.
    let found = names(folder.0.path());
    match code {
        Some(0) => assert_eq!(found, ["model.gguf"]),
        _ => {
            assert!(found.is_empty() || found == ["model.gguf"] && GgufFile::open(&out).is_ok(), "{code:?}: {found:?}")
        }
    }
}

#[test]
fn bad_input_is_one_line_and_exit_code_2() {
    let folder = Folder::new();
    let out = folder.file("model.gguf");
    let missing = folder.file("nowhere");
    let prose = folder.file("prose.txt");
    std::fs::write(&prose, "What is written here is no model.\n").unwrap();
    let cases: [(&[&dyn AsRef<std::ffi::OsStr>], &str); 12] = [
        (&[&prose, &"-o", &out], "prose.txt: not a safetensors file: header length"),
        (&[&prose, &"--drop-mtp", &"-o", &out], "prose.txt: not a GGUF file: magic"),
        (&[&TINY, &"--source", &TINY, &"-o", &out], "--source"),
        (&[&missing, &"-o", &out], "nowhere"),
        (&[&folder.0.path(), &"-o", &out], "no safetensors in this folder"),
        (&[&TINY], "no output named"),
        (&[&TINY, &"-o", &out, &"--type", &"Q3_K"], "unknown type 'Q3_K'"),
        (&[&TINY, &"-o", &out, &"--tensor-type", &"attn_q"], "PATTERN=TYPE"),
        (&[&TINY, &"-o", &out, &"--split-max-size", &"lots"], "lots"),
        (&[&TINY, &"-o", &out, &"--split-max-size", &"5"], "M or G"),
        (&[&TINY, &"-o", &out, &"--split-max-size", &"0.5M"], "at least 1M"),
        (&[&"--verify", &out], "--source"),
    ];
    for (args, expected) in cases {
        let (code, _, err) = said(&strata(args));
        assert_eq!(code, 2, "{err}");
        assert!(err.contains(expected), "{expected}: {err}");
        assert!(!err.contains("panicked"), "{err}");
    }
    assert_eq!(names(folder.0.path()), ["prose.txt"]);
}

#[test]
fn patterns_that_match_nothing_are_named() {
    let folder = Folder::new();
    let out = folder.file("model.gguf");
    let args: [&dyn AsRef<std::ffi::OsStr>; 11] = [
        &TINY,
        &"-o",
        &out,
        &"--no-verify",
        &"--tensor-type",
        &"ffn_dwon=Q8_0",
        &"--tensor-type",
        &"attn_q.weight=Q8_0",
        &"--skip",
        &"no_such_tensor",
        &"--json",
    ];
    let (code, out, err) = said(&strata(&args));
    assert_eq!(code, 0, "{err}");
    assert!(err.contains("--tensor-type ffn_dwon=Q8_0: no tensor matches"), "{err}");
    assert!(!out.contains("ffn_dwon"), "said once: {out}");
    assert!(err.contains("--skip no_such_tensor left out no tensor"), "{err}");
    assert!(!err.contains("attn_q.weight"), "{err}");
}
