//! `--tensors` and `--metadata`: the lists behind the report.

use super::print;
use crate::cli::wording::{counted, on_one_line, quoted};
use serde_json::json;
use strata_core::checkpoint::Checkpoint;
use strata_core::convert::Pattern;
use strata_core::gguf::{Array, GgufFile, Value};

/// One line of the tensor list.
pub struct TensorLine {
    name: String,
    shape: String,
    dims: Vec<u64>,
    ty: &'static str,
    bytes: u64,
    part: usize,
}

/// The tensors of a GGUF whose names match.
pub fn of_gguf(file: &GgufFile, pattern: &Option<Pattern>) -> Vec<TensorLine> {
    let matching = file.tensors().iter().filter(|t| pattern.as_ref().is_none_or(|p| p.matches(&t.name)));
    matching
        .map(|t| TensorLine {
            name: t.name.clone(),
            shape: t.shape(),
            dims: t.dims.clone(),
            ty: t.ty.name(),
            bytes: t.size,
            part: t.part,
        })
        .collect()
}

/// The tensors of a checkpoint whose names match.
pub fn of_checkpoint(checkpoint: &Checkpoint, pattern: &Option<Pattern>) -> Vec<TensorLine> {
    let matching = checkpoint.tensors().filter(|t| pattern.as_ref().is_none_or(|p| p.matches(&t.name)));
    matching
        .map(|t| TensorLine {
            name: t.name.clone(),
            shape: t.shape_text(),
            dims: t.shape.iter().map(|d| *d as u64).collect(),
            ty: t.dtype.name(),
            bytes: t.bytes() as u64,
            part: t.shard,
        })
        .collect()
}

/// The list as a table.
pub fn tensor_table(tensors: &[TensorLine]) -> String {
    let several_parts = tensors.iter().any(|t| t.part > 0);
    let mut rows =
        vec![["tensor", "shape", "type", "bytes", if several_parts { "part" } else { "" }].map(str::to_string)];
    for t in tensors {
        let part = if several_parts { (t.part + 1).to_string() } else { String::new() };
        rows.push([t.name.clone(), t.shape.clone(), t.ty.to_string(), print::grouped(t.bytes), part]);
    }
    let total = tensors.iter().map(|t| t.bytes).sum();
    rows.push([counted(tensors.len(), "tensor"), String::new(), String::new(), print::grouped(total), String::new()]);
    print::table(&rows, &[false, true, false, true, true])
}

/// The list as JSON.
pub fn tensor_json(tensors: &[TensorLine]) -> serde_json::Value {
    tensors
        .iter()
        .map(|t| json!({"name": t.name, "shape": t.dims, "type": t.ty, "bytes": t.bytes, "part": t.part}))
        .collect()
}

/// Longest value shown on a line of the metadata table.
const SHOWN_CHARS: usize = 90;
/// Elements of an array shown on a line of the metadata table.
const SHOWN_ELEMENTS: usize = 6;

/// All metadata as a table; long values are shortened.
pub fn metadata_table(file: &GgufFile) -> String {
    let rows: Vec<[String; 3]> = file
        .metadata()
        .iter()
        .map(|(key, value)| {
            let (ty, text) = match value {
                Value::Array(a) => (format!("{} x {}", a.len(), a.element_type().name()), shortened(&array_text(a))),
                Value::String(s) => ("string".to_string(), shortened(s)),
                v => (v.value_type().name().to_string(), v.to_string()),
            };
            [on_one_line(key), ty, text]
        })
        .collect();
    print::table(&rows, &[false, false, false])
}

fn array_text(a: &Array) -> String {
    let shown: Vec<String> = (0..a.len().min(SHOWN_ELEMENTS))
        .filter_map(|i| a.get(i))
        .map(|v| match v {
            Value::String(s) => quoted(&s),
            v => v.to_string(),
        })
        .collect();
    let more = if a.len() > SHOWN_ELEMENTS { ", ..." } else { "" };
    format!("[{}{more}]", shown.join(", "))
}

/// The text on one line; of a long one the beginning and how many characters it has in the file.
fn shortened(text: &str) -> String {
    let (chars, line) = (text.chars().count(), on_one_line(text));
    if line.chars().count() <= SHOWN_CHARS {
        return line;
    }
    format!("{}... ({chars} characters)", line.chars().take(SHOWN_CHARS).collect::<String>())
}

/// All metadata as JSON, in full, in file order. Numbers that JSON does not know (NaN, infinity) become `null`.
pub fn metadata_json(file: &GgufFile) -> serde_json::Value {
    let entries = file.metadata().iter().map(|(k, v)| (k.to_string(), value_json(v)));
    serde_json::Value::Object(entries.collect())
}

fn value_json(v: &Value) -> serde_json::Value {
    match v {
        Value::U64(v) => json!(v),
        Value::F32(v) => json!(v),
        Value::F64(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::String(v) => json!(v),
        Value::Array(a) => a.iter().map(|v| value_json(&v)).collect(),
        other => other.integer().map_or(serde_json::Value::Null, |v| json!(v as i64)),
    }
}
