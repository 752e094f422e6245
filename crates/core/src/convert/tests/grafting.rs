//! Heads dropped, put back and moved, on the tiny checkpoint.

use super::{convert, tiny};
use crate::convert::{ConvertError, GraftOptions, PlanOptions, Progress, Recipe, drop_head, graft_head};
use crate::gguf::{Array, GgufFile, GgufWriter, Metadata, TensorDecl, Value, WriterOptions};
use std::path::{Path, PathBuf};

fn options(recipe: &str) -> GraftOptions {
    GraftOptions {
        recipe: Recipe::from_name(recipe).unwrap(),
        mtp_type: None,
        overrides: Vec::new(),
        plan: PlanOptions::default(),
        writer: WriterOptions::default(),
        verify: true,
    }
}

/// A converted file with its head and the same file without it.
struct Pair {
    folder: tempfile::TempDir,
    direct: GgufFile,
    headless: PathBuf,
}

fn pair(recipe: &str) -> Pair {
    let (folder, direct, _) = convert(recipe, |_| {});
    let headless = folder.path().join("headless.gguf");
    let report =
        drop_head(&folder.path().join("out.gguf"), &headless, &WriterOptions::default(), Progress::SILENT).unwrap();
    assert_eq!((report.dropped.len(), report.carried), (20, 76));
    Pair { folder, direct, headless }
}

/// Every tensor of `a` is in `b`, byte for byte, and the other way round; the metadata says the same.
fn assert_same_model(a: &GgufFile, b: &GgufFile) {
    assert_eq!(a.tensors().len(), b.tensors().len());
    for t in a.tensors() {
        let other = b.tensor(&t.name).unwrap_or_else(|| panic!("{} is missing", t.name));
        assert_eq!((&t.dims, t.ty), (&other.dims, other.ty), "{}", t.name);
        assert!(a.data(t) == b.data(other), "{}", t.name);
    }
    assert_eq!(a.metadata().len(), b.metadata().len());
    for (key, value) in a.metadata().iter() {
        assert_eq!(b.metadata().get(key), Some(value), "{key}");
    }
}

/// The shards that hold the head, with the index, in a folder of their own.
fn shards_of_the_head(to: &Path) {
    for name in ["model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors", "model.safetensors.index.json"]
    {
        std::os::unix::fs::symlink(tiny().canonicalize().unwrap().join(name), to.join(name)).unwrap();
    }
}

#[test]
fn a_dropped_head_comes_back_byte_for_byte_from_the_folder() {
    for recipe in ["BF16", "Q4_K_M"] {
        let p = pair(recipe);
        let headless = GgufFile::open(&p.headless).unwrap();
        assert_eq!(headless.metadata().u32("qwen35moe.block_count").unwrap(), 4);
        assert_eq!(
            headless.metadata().bool_array_opt("qwen35moe.attention.recurrent_layers").unwrap().unwrap().len(),
            4
        );
        assert!(headless.metadata().get("qwen35moe.nextn_predict_layers").is_none());
        let out = p.folder.path().join("grafted.gguf");
        let report = graft_head(&p.headless, &tiny(), &out, &options(recipe), Progress::SILENT).unwrap();
        assert_eq!((report.added.len(), report.carried), (20, 76));
        assert!(report.verification.unwrap().is_good());
        assert_same_model(&p.direct, &GgufFile::open(&out).unwrap());
    }
}

#[test]
fn the_shards_that_hold_the_head_are_enough() {
    let p = pair("Q8_0");
    let shards = tempfile::tempdir().unwrap();
    shards_of_the_head(shards.path());
    for (i, donor) in
        [shards.path().to_path_buf(), shards.path().join("model.safetensors.index.json")].iter().enumerate()
    {
        let out = p.folder.path().join(format!("grafted{i}.gguf"));
        graft_head(&p.headless, donor, &out, &options("Q8_0"), Progress::SILENT).unwrap();
        assert_same_model(&p.direct, &GgufFile::open(&out).unwrap());
    }
    // One of the two shards holds only a part of the head.
    let out = p.folder.path().join("partial.gguf");
    let donor = shards.path().join("model-00002-of-00003.safetensors");
    let error = graft_head(&p.headless, &donor, &out, &options("Q8_0"), Progress::SILENT).unwrap_err();
    assert!(matches!(error, ConvertError::MissingTensors { .. }), "{error}");
    assert!(!out.exists());
}

#[test]
fn a_head_moves_from_one_gguf_to_another() {
    let p = pair("Q4_K_M");
    let (_donor_folder, _, _) = convert("Q8_0", |_| {});
    let out = p.folder.path().join("moved.gguf");
    let donor = p.folder.path().join("out.gguf");
    graft_head(&p.headless, &donor, &out, &options("Q8_0"), Progress::SILENT).unwrap();
    assert_same_model(&p.direct, &GgufFile::open(&out).unwrap());
}

#[test]
fn heads_are_not_put_where_they_do_not_belong() {
    let p = pair("Q8_0");
    let out = p.folder.path().join("refused.gguf");
    let with_head = p.folder.path().join("out.gguf");
    let error = graft_head(&with_head, &tiny(), &out, &options("Q8_0"), Progress::SILENT).unwrap_err().to_string();
    assert!(error.contains("has an MTP head already"), "{error}");
    let error = graft_head(&p.headless, &p.headless, &out, &options("Q8_0"), Progress::SILENT).unwrap_err().to_string();
    assert!(error.contains("the donor has no MTP head"), "{error}");
    let error = drop_head(&p.headless, &out, &WriterOptions::default(), Progress::SILENT).unwrap_err().to_string();
    assert!(error.contains("no MTP head to drop"), "{error}");

    // A donor of another geometry, and one of another vocabulary.
    let change = |key: &str, value: Value| {
        let mut keys = p.direct.metadata().clone();
        keys.set(key, value);
        let path = p.folder.path().join("changed.gguf");
        copy_with(&p.direct, &keys, &path);
        graft_head(&p.headless, &path, &out, &options("Q8_0"), Progress::SILENT).unwrap_err().to_string()
    };
    let error = change("qwen35moe.expert_used_count", Value::U32(4));
    assert!(error.contains("'qwen35moe.expert_used_count' is u32 2 in the one and u32 4 in the other"), "{error}");
    let mut tokens = p.direct.metadata().strings("tokenizer.ggml.tokens").unwrap().to_vec();
    tokens[7] = "another".to_string();
    let error = change("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
    assert!(error.contains("different vocabularies"), "{error}");
    assert!(!out.exists());
}

/// The same tensors under other metadata.
fn copy_with(file: &GgufFile, keys: &Metadata, path: &Path) {
    let decls =
        file.tensors().iter().map(|t| TensorDecl { name: t.name.clone(), dims: t.dims.clone(), ty: t.ty }).collect();
    let options = WriterOptions { force: true, ..WriterOptions::default() };
    let mut writer = GgufWriter::create(path, keys, decls, &options).unwrap();
    for t in file.tensors() {
        writer.write(&t.name, &file.data(t)).unwrap();
    }
    writer.finish().unwrap();
}

#[test]
fn per_layer_arrays_grow_like_the_last_attention_layer() {
    let p = pair("Q8_0");
    let headless = GgufFile::open(&p.headless).unwrap();
    let mut keys = headless.metadata().clone();
    keys.set("qwen35moe.attention.head_count_kv", Value::Array(Array::U32(vec![0, 0, 0, 2])));
    let base = p.folder.path().join("arrays.gguf");
    copy_with(&headless, &keys, &base);
    let out = p.folder.path().join("grafted-arrays.gguf");
    graft_head(&base, &tiny(), &out, &options("Q8_0"), Progress::SILENT).unwrap();
    let file = GgufFile::open(&out).unwrap();
    assert_eq!(file.metadata().u32_array("qwen35moe.attention.head_count_kv").unwrap(), [0, 0, 0, 2, 2]);
    assert_eq!(
        file.metadata().bool_array_opt("qwen35moe.attention.recurrent_layers").unwrap().unwrap(),
        [true, true, true, false, false]
    );
    // Four numbers per head, whatever the number of layers.
    assert_eq!(file.metadata().i32_array("qwen35moe.rope.dimension_sections").unwrap(), [3, 3, 2, 0]);
}
