//! Broken safetensors files and folders: each gives one clear error that names the file, exit code 2, quickly, in little
//! memory, without a panic and without an output file.

mod limits;

use limits::Limited;
use std::path::Path;

/// A shard: header length field (by default the header's length), header text, data.
struct Shard {
    length: Option<u64>,
    header: Vec<u8>,
    data: Vec<u8>,
}

fn shard(header: impl Into<Vec<u8>>, data: usize) -> Shard {
    Shard { length: None, header: header.into(), data: vec![0; data] }
}

fn with_length(length: u64, header: &str, data: usize) -> Shard {
    Shard { length: Some(length), ..shard(header, data) }
}

/// One F32 tensor `x` of two elements with this header entry.
fn x(dtype: &str, shape: &str, offsets: &str) -> Shard {
    shard(format!(r#"{{"x":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#), 8)
}

/// Two F32 tensors with these offsets and 16 bytes of data.
fn two(a: &str, b: &str) -> Shard {
    let t = |offsets: &str| format!(r#"{{"dtype":"F32","shape":[2],"data_offsets":{offsets}}}"#);
    shard(format!(r#"{{"a":{},"b":{}}}"#, t(a), t(b)), 16)
}

impl Shard {
    fn write(&self, path: &Path) {
        let length = self.length.unwrap_or(self.header.len() as u64).to_le_bytes();
        std::fs::write(path, [&length[..], &self.header, &self.data].concat()).unwrap();
    }
}

/// What is broken, what the error must say, and the shard.
fn hostile_shards() -> Vec<(&'static str, &'static str, Shard)> {
    let nested = format!(r#"{{"x":{}1{}}}"#, "[".repeat(100_000), "]".repeat(100_000));
    vec![
        ("header length 0", "header length", with_length(0, "{}", 0)),
        ("header length 1", "header length", with_length(1, "{}", 0)),
        ("header length 2^64 - 1", "header length", with_length(u64::MAX, "{}", 0)),
        ("header length 2^63", "header length", with_length(1 << 63, "{}", 0)),
        ("header length past the end", "header length", with_length(1000, "{}", 8)),
        ("header length one past the end", "header length", with_length(3, "{}", 0)),
        ("header cut short", "header", with_length(20, r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 8)),
        ("header not JSON", "header", shard("not JSON at all", 8)),
        ("header an array", "header", shard("[1, 2]", 0)),
        ("header a number", "header", shard("12345678", 0)),
        ("header that starts with a blank", "header", shard(" {}", 0)),
        ("header no UTF-8", "UTF-8", shard(vec![b'{', 0xff, 0xfe, b'}'], 0)),
        ("header with text after it", "header", shard("{} {}", 0)),
        ("header with an open brace", "header", shard(r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#, 8)),
        ("JSON nested 100,000 deep", "header", shard(nested, 0)),
        ("duplicate tensor", "'x' twice", {
            let t = r#""x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#;
            shard(format!("{{{t},{t}}}"), 8)
        }),
        ("duplicate field", "duplicate field", {
            shard(r#"{"x":{"dtype":"F32","dtype":"F16","shape":[2],"data_offsets":[0,8]}}"#, 8)
        }),
        ("duplicate metadata", "twice", shard(r#"{"__metadata__":{"a":"1","a":"2"}}"#, 0)),
        ("metadata twice", "'__metadata__' twice", shard(r#"{"__metadata__":{},"__metadata__":{}}"#, 0)),
        ("metadata with a number", "__metadata__", shard(r#"{"__metadata__":{"a":1}}"#, 0)),
        ("tensor without dtype", "dtype", shard(r#"{"x":{"shape":[2],"data_offsets":[0,8]}}"#, 8)),
        ("tensor without shape", "shape", shard(r#"{"x":{"dtype":"F32","data_offsets":[0,8]}}"#, 8)),
        ("tensor without offsets", "data_offsets", shard(r#"{"x":{"dtype":"F32","shape":[2]}}"#, 8)),
        ("tensor that is a string", "'x'", shard(r#"{"x":"F32"}"#, 8)),
        ("unknown dtype", "'Q4_K'", x("Q4_K", "[2]", "[0,8]")),
        ("dtype in lower case", "'f32'", x("f32", "[2]", "[0,8]")),
        ("dtype a number", "'x'", shard(r#"{"x":{"dtype":7,"shape":[2],"data_offsets":[0,8]}}"#, 8)),
        ("negative dimension", "'x'", x("F32", "[-2]", "[0,8]")),
        ("fractional dimension", "'x'", x("F32", "[2.5]", "[0,8]")),
        ("dimension of 1e400", "'x'", x("F32", "[1e400]", "[0,8]")),
        ("shape product overflows", "shape", x("F32", "[4294967296, 4294967296, 4294967296]", "[0,8]")),
        ("shape of 2^64 - 1", "shape", x("F32", "[18446744073709551615]", "[0,8]")),
        ("shape product that wraps to the right size", "shape", x("F32", "[9223372036854775808, 2, 2]", "[0,8]")),
        ("half a byte", "whole number of bytes", x("F4", "[3]", "[0,8]")),
        ("size larger than the offsets", "data_offsets", x("F32", "[3]", "[0,8]")),
        ("size smaller than the offsets", "data_offsets", x("F32", "[1]", "[0,8]")),
        ("reversed offsets", "data_offsets", x("F32", "[2]", "[8,0]")),
        ("offsets past the end", "data_offsets", x("F32", "[4]", "[0,16]")),
        ("offsets of 2^64 - 1", "data_offsets", x("F32", "[2]", "[18446744073709551607,18446744073709551615]")),
        ("offsets beyond u64", "'x'", x("F32", "[2]", "[0,18446744073709551616]")),
        ("negative offset", "'x'", x("F32", "[2]", "[-8,0]")),
        ("one offset", "'x'", x("F32", "[2]", "[0]")),
        ("three offsets", "'x'", x("F32", "[2]", "[0,8,8]")),
        ("same offsets twice", "overlap", two("[0,8]", "[0,8]")),
        ("overlapping offsets", "overlap", two("[0,8]", "[4,12]")),
        ("gap between tensors", "gap", {
            let t = |offsets: &str| format!(r#"{{"dtype":"F32","shape":[1],"data_offsets":{offsets}}}"#);
            shard(format!(r#"{{"a":{},"b":{}}}"#, t("[0,4]"), t("[8,12]")), 12)
        }),
        ("gap before the first tensor", "gap", {
            shard(r#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#, 8)
        }),
        ("trailing bytes", "end of file", { shard(r#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#, 9) }),
        ("data without tensors", "end of file", shard("{}", 100)),
        ("empty file", "header length", Shard { length: None, header: vec![], data: vec![] }),
    ]
}

/// Checks how a command fails on `path`, and that it leaves no file but those that were there.
fn fails_well(args: &[&str], folder: &Path, file: &str, field: &str, what: &str) {
    let before = std::fs::read_dir(folder).unwrap().count();
    let out = Limited::strata(args);
    assert_eq!(out.code, Some(2), "{what}: {args:?} ended with {:?}: {}", out.code, out.stderr);
    let errors: Vec<_> = out.stderr.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{what}: one error, not {:?}", out.stderr);
    assert!(out.stderr.contains(file), "{what}: the file is not named: {}", out.stderr);
    assert!(out.stderr.contains(field), "{what}: '{field}' is not named: {}", out.stderr);
    assert!(!out.stderr.contains("panicked"), "{what}: {}", out.stderr);
    assert_eq!(std::fs::read_dir(folder).unwrap().count(), before, "{what}: an output file was left");
    out.assert_small_and_quick(what);
}

#[test]
fn hostile_shards_are_refused() {
    let cases = hostile_shards();
    assert!(cases.len() >= 40);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.safetensors");
    for (what, field, mut shard) in cases {
        if what == "empty file" {
            std::fs::write(&path, []).unwrap();
        } else {
            shard.data.truncate(1 << 20);
            shard.write(&path);
        }
        fails_well(&["inspect", path.to_str().unwrap()], dir.path(), "model.safetensors", field, what);
        fails_well(&["inspect", dir.path().to_str().unwrap()], dir.path(), "model.safetensors", field, what);
        let (folder, out) = (dir.path().to_str().unwrap(), dir.path().join("out.gguf"));
        let convert = ["convert", folder, "-o", out.to_str().unwrap(), "--type", "F32"];
        fails_well(&convert, dir.path(), "model.safetensors", field, what);
    }
}

#[test]
fn hostile_indexes_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let outside = dir.path().join("outside.safetensors");
    let folder = dir.path().join("model");
    std::fs::create_dir(&folder).unwrap();
    x("F32", "[2]", "[0,8]").write(&outside);
    x("F32", "[2]", "[0,8]").write(&folder.join("a.safetensors"));
    two("[0,8]", "[8,16]").write(&folder.join("two.safetensors"));
    let absolute = outside.to_str().unwrap().to_string();
    let map = |file: &str| format!(r#"{{"weight_map":{{"x":{}}}}}"#, serde_json::json!(file));
    let two_shards = r#"{"weight_map":{"x":"a.safetensors","y":"a.safetensors"}}"#.to_string();
    let cases = [
        ("shard outside the folder", "weight_map entry 'x'", map("../outside.safetensors")),
        ("shard by an absolute path", "weight_map entry 'x'", map(&absolute)),
        ("shard in a folder below", "weight_map entry 'x'", map("sub/a.safetensors")),
        ("shard with backslashes", "weight_map entry 'x'", map("..\\outside.safetensors")),
        ("shard that is the folder", "weight_map entry 'x'", map(".")),
        ("shard that is no safetensors", "weight_map entry 'x'", map("config.json")),
        ("shard without a name", "weight_map entry 'x'", map("")),
        ("tensor that is not in the shard", "'y'", two_shards),
        ("tensor that the index does not list", "'b'", r#"{"weight_map":{"a":"two.safetensors"}}"#.into()),
        ("duplicate tensor", "'x' twice", r#"{"weight_map":{"x":"a.safetensors","x":"b.safetensors"}}"#.into()),
        ("no weight map", "weight_map", r#"{"metadata":{}}"#.into()),
        ("empty weight map", "weight_map", r#"{"weight_map":{}}"#.into()),
        ("weight map a list", "content", r#"{"weight_map":["x"]}"#.into()),
        ("shard a number", "'x'", r#"{"weight_map":{"x":1}}"#.into()),
        ("not JSON", "content", "weights".into()),
        ("empty", "content", String::new()),
    ];
    let index = folder.join("model.safetensors.index.json");
    for (what, field, text) in cases {
        std::fs::write(&index, text).unwrap();
        let args = ["inspect", folder.to_str().unwrap()];
        // A tensor that the index does not list is reported for the shard that has it.
        let file = if what.contains("does not list") { "two.safetensors" } else { "index.json" };
        fails_well(&args, &folder, file, field, what);
        let out = folder.join("out.gguf");
        let convert = ["convert", folder.to_str().unwrap(), "-o", out.to_str().unwrap()];
        fails_well(&convert, &folder, file, field, what);
    }
    std::fs::remove_file(&index).unwrap();
    std::fs::write(folder.join("config.json"), "[1]").unwrap();
    fails_well(&["inspect", folder.to_str().unwrap()], &folder, "config.json", "object", "config.json that is a list");
    std::fs::write(folder.join("config.json"), "{").unwrap();
    fails_well(&["inspect", folder.to_str().unwrap()], &folder, "config.json", "JSON", "config.json cut short");
}

#[test]
fn a_shard_that_is_not_there_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let index = r#"{"weight_map":{"x":"a.safetensors","y":"b.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
    x("F32", "[2]", "[0,8]").write(&dir.path().join("a.safetensors"));
    let out = std::process::Command::new(env!("CARGO_BIN_EXE_strata")).arg("inspect").arg(dir.path()).output().unwrap();
    assert!(out.status.success());
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.contains("names 1 further tensor in 1 shard not here"), "{text}");
    assert!(text.contains("shard b.safetensors with 1 tensor is not there"), "{text}");
}

#[test]
fn a_checkpoint_with_a_shard_missing_is_not_converted() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tiny-hf");
    for entry in std::fs::read_dir(whole).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_owned();
        if name != "model-00002-of-00003.safetensors" {
            std::os::unix::fs::symlink(&path, dir.path().join(name)).unwrap();
        }
    }
    let out = dir.path().join("out.gguf");
    let args = ["convert", dir.path().to_str().unwrap(), "-o", out.to_str().unwrap()];
    fails_well(&args, dir.path(), dir.path().to_str().unwrap(), "model-00002-of-00003.safetensors", "a missing shard");
}

#[test]
fn a_folder_without_safetensors_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().file_name().unwrap().to_str().unwrap();
    fails_well(&["inspect", dir.path().to_str().unwrap()], dir.path(), name, "no safetensors", "an empty folder");
}
