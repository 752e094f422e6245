//! Importance matrices: they change what is written where they have data, and say where they have none.

use super::{convert, tiny};
use crate::convert::{ConvertError, ConvertOptions, Progress, Recipe, convert_text_model};
use crate::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, Value, WriterOptions};
use std::path::{Path, PathBuf};
use strata_kernels::format::{TensorType, dequantize};

const TARGET: &str = "blk.1.ffn_up_exps.weight";
const COLS: usize = 256;
const EXPERTS: usize = 8;

/// Every eighth column of every expert but the last matters a hundred times as much; the last expert was never used.
fn write_imatrix(path: &Path, name: &str, kind: &str) {
    let mut keys = Metadata::new("imatrix");
    keys.set("general.type", Value::String(kind.into()));
    keys.set("imatrix.chunk_count", Value::U32(7));
    let decl = |suffix: &str, cols: u64| TensorDecl {
        name: format!("{name}.{suffix}"),
        dims: vec![cols, EXPERTS as u64],
        ty: TensorType::F32,
    };
    let decls = vec![decl("in_sum2", COLS as u64), decl("counts", 1)];
    let bytes = |values: Vec<f32>| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
    let used = |e: usize| e + 1 < EXPERTS;
    let sum = |e: usize, c: usize| if used(e) { 64.0 * if c.is_multiple_of(8) { 1.0 } else { 0.01 } } else { 0.0 };
    let sums = bytes((0..EXPERTS * COLS).map(|i| sum(i / COLS, i % COLS)).collect());
    let counts = bytes((0..EXPERTS).map(|e| if used(e) { 64.0 } else { 0.0 }).collect());
    let mut writer = GgufWriter::create(path, &keys, decls.clone(), &WriterOptions::default()).unwrap();
    writer.write(&decls[0].name, &sums).unwrap();
    writer.write(&decls[1].name, &counts).unwrap();
    writer.finish().unwrap();
}

fn values(file: &GgufFile, name: &str) -> Vec<f32> {
    let t = file.tensor(name).unwrap();
    let mut out = vec![0.0; t.weights() as usize];
    dequantize(t.ty, &file.data(t), &mut out).unwrap();
    out
}

#[test]
fn columns_that_matter_come_out_better_and_blind_spots_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let imatrix: PathBuf = folder.path().join("imatrix.gguf");
    write_imatrix(&imatrix, TARGET, "imatrix");
    let (_a, exact, _) = convert("F32", |_| {});
    let (_b, even, _) = convert("Q4_K", |_| {});
    let (_c, weighted, report) = convert("Q4_K", |o| o.imatrix = Some(imatrix));
    let raw = values(&exact, TARGET);
    let important = |file: &GgufFile| {
        let found = values(file, TARGET);
        let seen = &raw[..(EXPERTS - 1) * COLS * COLS];
        seen.iter().zip(&found).step_by(8).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>()
    };
    assert!(important(&weighted) < 0.9 * important(&even), "{} and {}", important(&weighted), important(&even));
    // The expert without data, and tensors the matrix does not know, are as without it.
    let last = |file: &GgufFile| file.data(file.tensor(TARGET).unwrap()).split_off(7 * 256 * 144);
    assert!(last(&even) == last(&weighted));
    let other = "blk.1.ffn_gate_exps.weight";
    assert!(even.data(even.tensor(other).unwrap()) == weighted.data(weighted.tensor(other).unwrap()));
    let remark = |name: &str| report.tensors.iter().find(|t| t.name == name).unwrap().remark.clone();
    assert_eq!(remark(TARGET).as_deref(), Some("no importance data for 1 of 8 matrices"));
    assert_eq!(remark(other).as_deref(), Some("no importance data"));
    assert_eq!(weighted.metadata().u32("quantize.imatrix.chunks_count").unwrap(), 7);
    assert!(report.notes.iter().any(|n| n.contains("importance matrix")), "{:?}", report.notes);
}

#[test]
fn a_matrix_that_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let refuse = |name: &str, kind: &str, file: &str| {
        let path = folder.path().join(file);
        write_imatrix(&path, name, kind);
        let mut options = ConvertOptions::new(Recipe::from_name("Q4_K").unwrap());
        options.imatrix = Some(path);
        convert_text_model(&tiny(), &folder.path().join("out.gguf"), &options, Progress::SILENT).unwrap_err()
    };
    let error = refuse("blk.0.attn_qkv.weight", "imatrix", "a.gguf");
    assert!(matches!(error, ConvertError::Imatrix { .. }), "{error}");
    assert!(error.to_string().contains("'blk.0.attn_qkv.weight': 2048 values"), "{error}");
    let error = refuse(TARGET, "model", "b.gguf").to_string();
    assert!(error.contains("expected 'imatrix', found 'model'"), "{error}");
}
