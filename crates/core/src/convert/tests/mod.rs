//! Conversion of the tiny checkpoint and of small synthetic ones.

mod grafting;
mod importance;
mod refusals;
mod round_trip;
mod synthetic;
mod verification;

use super::*;
use crate::gguf::GgufFile;
use std::path::{Path, PathBuf};

/// The bundled tiny checkpoint.
fn tiny() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny-hf")
}

fn convert(recipe: &str, change: impl FnOnce(&mut ConvertOptions)) -> (tempfile::TempDir, GgufFile, ConvertReport) {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out.gguf");
    let mut options = ConvertOptions::new(Recipe::from_name(recipe).unwrap());
    change(&mut options);
    let report = convert_text_model(&tiny(), &out, &options, Progress::SILENT).unwrap();
    (folder, GgufFile::open(&out).unwrap(), report)
}

#[test]
fn the_file_has_the_head_and_every_tensor_is_reported() {
    let (_folder, file, report) = convert("BF16", |_| {});
    assert_eq!(file.tensors().len(), 96);
    assert_eq!(report.tensors.len(), 96);
    assert_eq!(file.metadata().u32("qwen35moe.block_count").unwrap(), 5);
    assert_eq!(file.metadata().u32("qwen35moe.nextn_predict_layers").unwrap(), 1);
    assert_eq!(file.tensors().iter().filter(|t| t.name.starts_with("blk.4.")).count(), 20);
    assert_eq!(report.left_out.iter().filter(|l| l.why.contains("vision")).count(), report.left_out.len());
    // The last byte written is the last of the file: nothing is cut, nothing is padded beyond the alignment.
    assert!(file.total_bytes() - report.written_bytes < 300_000);
}

#[test]
fn the_number_of_threads_changes_no_byte() {
    let whole = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let (folder, _, _) = convert("Q4_K_M", |_| {});
            std::fs::read(folder.path().join("out.gguf")).unwrap()
        })
    };
    assert!(whole(1) == whole(3));
}

#[test]
fn leaving_the_head_out_is_possible_and_said() {
    let (_folder, file, report) = convert("F16", |o| o.plan.no_mtp = true);
    assert_eq!(file.tensors().len(), 76);
    assert_eq!(file.metadata().u32("qwen35moe.block_count").unwrap(), 4);
    assert!(file.metadata().get("qwen35moe.nextn_predict_layers").is_none());
    assert_eq!(report.left_out.iter().filter(|l| l.why.contains("MTP head")).count(), 19);
}

#[test]
fn the_encoder_gets_a_file_of_its_own() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("mmproj.gguf");
    let options = ConvertOptions::new(Recipe::from_name("F16").unwrap());
    let report = convert_vision(&tiny(), &out, &options, Progress::SILENT).unwrap();
    let file = GgufFile::open(&out).unwrap();
    assert_eq!(file.tensors().len(), 58);
    assert_eq!(file.metadata().str("clip.projector_type").unwrap(), "qwen3vl_merger");
    assert_eq!(file.tensor("v.patch_embd.weight.1").unwrap().dims, [16, 16, 3, 128]);
    assert!(report.left_out.iter().all(|l| l.why == "belongs to the text model"));
}
