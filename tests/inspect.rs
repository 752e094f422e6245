//! `strata inspect`: what it says about good files, files without a complete head, and files held against each other.

use serde_json::Value as Json;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use strata_core::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, Value, WriterOptions};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn inspect(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_strata")).arg("inspect").args(args).output().unwrap()
}

fn json(args: &[&str]) -> Json {
    let out = inspect(&[args, &["--json"]].concat());
    serde_json::from_slice(&out.stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&out.stderr)))
}

fn text(args: &[&str]) -> String {
    let out = inspect(args);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    assert!(out.stderr.is_empty(), "nothing on stderr when it is a pipe");
    String::from_utf8(out.stdout).unwrap()
}

/// Writes a copy of the bundled model: `keep` chooses and renames tensors, `change` edits the metadata.
fn copy_of_tiny(
    path: &Path,
    keep: impl Fn(&str) -> Option<String>,
    change: impl Fn(&mut Metadata),
    options: &WriterOptions,
) -> Vec<PathBuf> {
    let file = GgufFile::open(&golden("tiny.gguf")).unwrap();
    let mut metadata = file.metadata().clone();
    change(&mut metadata);
    let kept: Vec<_> = file.tensors().iter().filter_map(|t| Some((keep(&t.name)?, t))).collect();
    let declare = |(name, t): &(String, &strata_core::gguf::TensorInfo)| TensorDecl {
        name: name.clone(),
        dims: t.dims.clone(),
        ty: t.ty,
    };
    let mut w = GgufWriter::create(path, &metadata, kept.iter().map(declare).collect(), options).unwrap();
    for (name, t) in &kept {
        w.write(name, &file.data(t)).unwrap();
    }
    w.finish().unwrap()
}

fn same(name: &str) -> Option<String> {
    Some(name.to_string())
}

fn without_head(name: &str) -> Option<String> {
    (!name.starts_with("blk.4.")).then(|| name.to_string())
}

/// The bundled model as public converters leave it: no head, and nothing that says there ever was one.
fn headless(path: &Path) {
    let change = |m: &mut Metadata| {
        m.set("qwen35moe.block_count", Value::U32(4));
        m.remove("qwen35moe.nextn_predict_layers");
    };
    copy_of_tiny(path, without_head, change, &WriterOptions::default());
}

#[test]
fn the_bundled_model_is_described() {
    let tiny = golden("tiny.gguf");
    let tiny = tiny.to_str().unwrap();
    let r = json(&[tiny]);
    assert_eq!(r["model"]["architecture"], "qwen35moe");
    assert_eq!(r["geometry"]["trunk_layers"], 4);
    assert_eq!(r["geometry"]["attention_layers"], 1);
    assert_eq!(r["geometry"]["experts"], 8);
    assert_eq!(r["mtp"]["state"], "complete");
    assert_eq!(r["mtp"]["tensors"], 20);
    assert_eq!(r["runs"]["can_run"], true);
    let bytes: u64 = r["types"].as_array().unwrap().iter().map(|t| t["bytes"].as_u64().unwrap()).sum();
    let file = GgufFile::open(&golden("tiny.gguf")).unwrap();
    assert_eq!(bytes, file.tensors().iter().map(|t| t.size).sum::<u64>());

    let text = text(&[tiny]);
    for expected in
        ["4 trunk (3 delta net, 1 attention) + 1 MTP", "complete: 20 tensors in blk.4", "strata run -m", "qwen35"]
    {
        assert!(text.contains(expected), "{expected} is not in\n{text}");
    }
}

#[test]
fn lists_and_hash_are_those_of_the_file() {
    let path = golden("tiny.gguf");
    let tiny = path.to_str().unwrap();
    let list = json(&[tiny, "--tensors", "^blk.4.*norm"]);
    let names: Vec<_> = list["tensors"].as_array().unwrap().iter().map(|t| t["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"blk.4.nextn.enorm.weight") && names.iter().all(|n| n.starts_with("blk.4.")), "{names:?}");
    assert_eq!(json(&[tiny, "--tensors"])["tensors"].as_array().unwrap().len(), 96);
    assert!(text(&[tiny, "--tensors", "eh_proj"]).contains("blk.4.nextn.eh_proj.weight  512 x 256  Q8_0  139,264"));

    let metadata = &json(&[tiny, "--metadata"])["metadata"];
    assert_eq!(metadata["qwen35moe.block_count"], 5);
    assert_eq!(metadata["tokenizer.ggml.tokens"].as_array().unwrap().len(), 6144);
    assert!(text(&[tiny, "--metadata"]).contains("qwen35moe.rope.dimension_sections"));

    use sha2::{Digest, Sha256};
    let hash: String = Sha256::digest(std::fs::read(&path).unwrap()).iter().map(|b| format!("{b:02x}")).collect();
    assert_eq!(json(&[tiny, "--sha256"])["sha256"][0]["sha256"], hash);
    assert!(text(&[tiny, "--metadata", "--sha256"]).contains(&hash));
    assert_eq!(json(&[tiny, "--tensors", "--sha256"])["sha256"][0]["sha256"], hash);
}

#[test]
fn a_file_after_tensors_is_no_pattern() {
    let tiny = golden("tiny.gguf");
    let tiny = tiny.to_str().unwrap();
    assert_eq!(json(&["--tensors", tiny])["tensors"].as_array().unwrap().len(), 96);
    let list = json(&["--tensors", tiny, "eh_proj"]);
    assert_eq!(list["tensors"][0]["name"], "blk.4.nextn.eh_proj.weight");
    let out = inspect(&["--tensors", "eh_proj"]);
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("no FILE given"));
}

#[test]
fn parts_of_a_checkpoint_are_not_taken_for_all_of_it() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, at) = (golden("tiny-hf"), |name: &str| dir.path().join(name));
    // An index and nothing else.
    std::fs::copy(folder.join("model.safetensors.index.json"), at("model.safetensors.index.json")).unwrap();
    let index = at("model.safetensors.index.json");
    let shown = text(&[index.to_str().unwrap()]);
    assert!(shown.contains("no config.json") && shown.contains("further tensors in"), "{shown}");
    // One shard of several, with the config: the head may be in another one.
    std::fs::copy(folder.join("config.json"), at("config.json")).unwrap();
    let shards: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|f| f.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    let without_head = shards.iter().find(|path| {
        let list = json(&[path.to_str().unwrap(), "--tensors", "mtp."]);
        list["tensors"].as_array().unwrap().is_empty()
    });
    let shard = at("model-00001-of-00002.safetensors");
    std::fs::copy(without_head.expect("a shard without the head"), &shard).unwrap();
    let r = json(&[shard.to_str().unwrap()]);
    assert_eq!(r["mtp"]["state"], "not_opened", "{r}");
    assert!(text(&[shard.to_str().unwrap()]).contains("one shard of several"));
    assert_eq!(json(&[index.to_str().unwrap()])["mtp"]["state"], "not_opened");
}

#[test]
fn a_mix_with_dense_parts_in_q8_0_is_told_from_the_plain_one() {
    let dir = tempfile::tempdir().unwrap();
    for (recipe, expected) in [("UD-Q4_K_XL", "UD-Q4_K_XL (marked as Q4_K_M)"), ("Q4_K_M", "Q4_K_M")] {
        let path = dir.path().join(format!("{recipe}.gguf"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_strata"));
        command.arg("convert").arg(golden("tiny-hf")).args(["--no-verify", "--type", recipe, "-o"]).arg(&path);
        assert!(command.output().unwrap().status.success());
        assert_eq!(json(&[path.to_str().unwrap()])["model"]["file_type"], expected);
    }
}

#[test]
fn a_vision_encoder_and_a_checkpoint_are_described() {
    let r = json(&[golden("tiny-mmproj.gguf").to_str().unwrap()]);
    assert_eq!(r["vision"]["projector"], "qwen3vl_merger");
    assert_eq!(r["runs"]["can_run"], true);

    let folder = golden("tiny-hf");
    let r = json(&[folder.to_str().unwrap()]);
    assert_eq!(r["format"], "safetensors");
    assert_eq!(r["mtp"]["state"], "complete");
    assert_eq!(r["mtp"]["tensors"], 19);
    assert_eq!(r["geometry"]["trunk_layers"], 4);
    assert_eq!(r["runs"]["can_run"], false);
    assert!(text(&[folder.to_str().unwrap()]).contains("strata convert"));
}

#[test]
fn a_file_without_a_head_says_so_and_how_to_restore_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("headless.gguf");
    headless(&path);
    let r = json(&[path.to_str().unwrap()]);
    assert_eq!(r["mtp"]["state"], "absent");
    assert_eq!(r["runs"]["can_run"], true, "the trunk runs without a head");
    let text = text(&[path.to_str().unwrap()]);
    assert!(text.contains("not in this file") && text.contains("--mtp-from"), "{text}");
}

#[test]
fn a_head_that_was_lost_in_conversion_is_called_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lost.gguf");
    copy_of_tiny(&path, without_head, |_| {}, &WriterOptions::default());
    let r = json(&[path.to_str().unwrap()]);
    assert_eq!(r["mtp"]["state"], "lost");
    assert_eq!(r["geometry"]["trunk_layers"], 4);
}

#[test]
fn the_missing_tensors_of_an_incomplete_head_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("incomplete.gguf");
    let gone = ["blk.4.nextn.hnorm.weight", "blk.4.ffn_up_exps.weight"];
    copy_of_tiny(&path, |n| (!gone.contains(&n)).then(|| n.to_string()), |_| {}, &WriterOptions::default());
    let r = json(&[path.to_str().unwrap()]);
    assert_eq!(r["mtp"]["state"], "incomplete");
    assert_eq!(r["runs"]["can_run"], false, "loading it is refused, too");
    let missing: Vec<_> = r["mtp"]["missing"].as_array().unwrap().iter().map(|m| m.as_str().unwrap()).collect();
    assert_eq!(missing.len(), 2);
    assert!(gone.iter().all(|g| missing.contains(g)), "{missing:?}");
    let text = text(&[path.to_str().unwrap()]);
    assert!(text.contains("INCOMPLETE") && text.contains("missing  blk.4.nextn.hnorm.weight"), "{text}");
}

#[test]
fn a_split_model_is_described_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let options = WriterOptions { split_max_size: Some(4_000_000), ..Default::default() };
    let parts = copy_of_tiny(&dir.path().join("tiny.gguf"), same, |_| {}, &options);
    assert!(parts.len() >= 3);
    assert!(parts.iter().all(|p| p.metadata().unwrap().len() <= 4_000_000));
    let r = json(&[parts[1].to_str().unwrap()]);
    assert_eq!(r["tensors"], 96);
    assert_eq!(r["parts"].as_array().unwrap().len(), parts.len());
    let same = inspect(&[parts[0].to_str().unwrap(), "--against", golden("tiny.gguf").to_str().unwrap()]);
    assert_eq!(same.status.code(), Some(0));
}

#[test]
fn another_architecture_is_described_but_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("llama.gguf");
    let change = |m: &mut Metadata| m.set("general.architecture", Value::String("llama".into()));
    copy_of_tiny(&path, |n| n.starts_with("blk.0.").then(|| n.to_string()), change, &WriterOptions::default());
    let r = json(&[path.to_str().unwrap()]);
    assert_eq!(r["runs"]["can_run"], false);
    assert!(r["runs"]["cannot"][0].as_str().unwrap().contains("'llama'"), "{r}");
}

#[test]
fn against_the_checkpoint_it_came_from_nothing_is_missing() {
    for (file, tensors) in [("tiny.gguf", 96), ("tiny-mmproj.gguf", 58)] {
        let (file, folder) = (golden(file), golden("tiny-hf"));
        for other in [folder.clone(), folder.join("model.safetensors.index.json")] {
            let args = [file.to_str().unwrap(), "--against", other.to_str().unwrap()];
            assert_eq!(inspect(&args).status.code(), Some(0));
            let c = json(&args);
            assert_eq!(c["lacks_something"], false);
            assert_eq!(c["extra"].as_array().unwrap().len(), 0, "{c}");
            let matched: u64 = c["types"].as_array().unwrap().iter().map(|t| t[2].as_u64().unwrap()).sum();
            assert_eq!(matched, tensors);
        }
    }
}

#[test]
fn against_says_in_words_that_the_head_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("headless.gguf");
    headless(&path);
    let headless = path.to_str().unwrap();
    let (folder, tiny) = (golden("tiny-hf"), golden("tiny.gguf"));
    let out = inspect(&[headless, "--against", folder.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(3));
    let text = String::from_utf8(out.stdout).unwrap();
    let expected = "the MTP head is missing: the checkpoint has 19 `mtp.*` tensors, the file has none; restore it with";
    assert!(text.contains(expected), "{text}");

    // An index alone, without any shard and without config.json beside it.
    let alone = dir.path().join("model.safetensors.index.json");
    std::fs::copy(folder.join("model.safetensors.index.json"), &alone).unwrap();
    let out = inspect(&[headless, "--against", alone.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(3));
    assert!(String::from_utf8(out.stdout).unwrap().contains(expected));

    let out = inspect(&[headless, "--against", tiny.to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(3));
    assert!(String::from_utf8(out.stdout).unwrap().contains("the MTP head is missing"));
    assert_eq!(inspect(&[tiny.to_str().unwrap(), "--against", headless]).status.code(), Some(0), "more is no lack");
}

#[test]
fn against_names_missing_renamed_and_reshaped_tensors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.gguf");
    let rename = |name: &str| match name {
        "blk.1.ffn_down_shexp.weight" => None,
        "blk.3.attn_output.weight" => Some("blk.3.attn_o.weight".into()),
        other => Some(other.into()),
    };
    let change = |m: &mut Metadata| {
        m.remove("tokenizer.chat_template");
        m.set("general.name", Value::String("odd".into()));
    };
    copy_of_tiny(&path, rename, change, &WriterOptions::default());
    let args = [path.to_str().unwrap(), "--against", golden("tiny.gguf").to_str().unwrap()].map(str::to_string);
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    assert_eq!(inspect(&args).status.code(), Some(3));
    let c = json(&args);
    assert_eq!(c["missing"], serde_json::json!(["blk.1.ffn_down_shexp.weight"]));
    assert_eq!(c["renamed"], serde_json::json!([["blk.3.attn_o.weight", "blk.3.attn_output.weight"]]));
    assert_eq!(c["metadata_missing"], serde_json::json!(["tokenizer.chat_template"]));
    assert_eq!(c["metadata_different"][0][0], "general.name");
    assert_eq!(c["lacks_something"], true);
}

#[test]
fn every_comparison_has_a_verdict_and_only_like_is_compared_with_like() {
    let [tiny, encoder, folder] = ["tiny.gguf", "tiny-mmproj.gguf", "tiny-hf"].map(golden);
    let [tiny, encoder, folder] = [&tiny, &encoder, &folder].map(|path| path.to_str().unwrap());
    for args in [[tiny, "--against", folder], [encoder, "--against", folder], [tiny, "--against", tiny]] {
        let said = text(&args);
        assert!(said.contains("nothing the model needs is missing"), "{said}");
    }
    for [a, b] in [[tiny, encoder], [encoder, tiny]] {
        let out = inspect(&[a, "--against", b]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{said}");
        assert!(said.contains("different kinds of file") && said.contains("is a vision encoder"), "{said}");
    }
}

#[test]
fn lists_say_what_they_hold() {
    let tiny = golden("tiny.gguf");
    let tiny = tiny.to_str().unwrap();
    assert_eq!(text(&[tiny, "--tensors", "nowhere"]), "no tensor matches 'nowhere'\n");
    assert!(
        text(&[tiny, "--tensors", "^output_norm"]).contains("1 tensor "),
        "{}",
        text(&[tiny, "--tensors", "^output_norm"])
    );
    // The template's length is that of the file, not of what is printed with its line ends escaped.
    let chars = json(&[tiny])["text"]["chat_template_chars"].as_u64().unwrap();
    assert!(text(&[tiny, "--metadata"]).contains(&format!("({chars} characters)")), "{chars}");
    let prose = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(prose.path(), "What is this?\n").unwrap();
    let out = inspect(&[prose.path().to_str().unwrap()]);
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("not a GGUF file: magic at byte 0"), "{out:?}");
}
