//! Metadata and tensor lists as bytes of a GGUF version 3 header.

use super::value::{Array, Value};
use super::{Metadata, TensorDecl};

/// The header of a file: everything before the padding that precedes the tensor data. `offsets` count from the start of
/// the data section.
pub(super) fn header(metadata: &Metadata, tensors: &[TensorDecl], offsets: &[u64]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((metadata.len() as u64).to_le_bytes());
    for (key, v) in metadata.iter() {
        string(&mut out, key);
        out.extend((v.value_type() as u32).to_le_bytes());
        value(&mut out, v);
    }
    for (t, offset) in tensors.iter().zip(offsets) {
        string(&mut out, &t.name);
        out.extend((t.dims.len() as u32).to_le_bytes());
        for d in &t.dims {
            out.extend(d.to_le_bytes());
        }
        out.extend(t.ty.ggml_id().to_le_bytes());
        out.extend(offset.to_le_bytes());
    }
    out
}

/// How many bytes a tensor takes in the list.
pub(super) fn tensor_entry_bytes(t: &TensorDecl) -> u64 {
    8 + t.name.len() as u64 + 4 + 8 * t.dims.len() as u64 + 4 + 8
}

fn string(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

fn value(out: &mut Vec<u8>, v: &Value) {
    match v {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.push(*v as u8),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push(*v as u8),
        Value::String(v) => string(out, v),
        Value::Array(v) => array(out, v),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
}

fn array(out: &mut Vec<u8>, a: &Array) {
    out.extend((a.element_type() as u32).to_le_bytes());
    out.extend((a.len() as u64).to_le_bytes());
    match a {
        Array::U8(v) => out.extend(v),
        Array::I8(v) => out.extend(v.iter().map(|v| *v as u8)),
        Array::U16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::I16(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::U32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::I32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::F32(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::Bool(v) => out.extend(v.iter().map(|v| *v as u8)),
        Array::String(v) => v.iter().for_each(|s| string(out, s)),
        Array::Array(v) => v.iter().for_each(|a| array(out, a)),
        Array::U64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::I64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
        Array::F64(v) => out.extend(v.iter().flat_map(|v| v.to_le_bytes())),
    }
}
