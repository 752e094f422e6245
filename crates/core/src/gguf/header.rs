//! Parses the header of one GGUF file: magic, version, metadata, tensor list. Knows nothing of split files.

use super::cursor::{Cursor, Field};
use super::value::{Array, Value, ValueType};
use super::{GgufError, Metadata, TensorInfo};
use std::collections::HashMap;
use strata_kernels::format::TensorType;

/// Data alignment where `general.alignment` is absent.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Largest accepted alignment; nobody needs more than a huge page's.
const MAX_ALIGNMENT: i128 = 1 << 20;
/// Deepest accepted nesting of arrays. ggml itself writes none; the format allows them.
const MAX_NESTING: usize = 8;
/// Most dimensions of a tensor (ggml's limit).
pub(super) const MAX_DIMS: u32 = 4;
/// Longest accepted tensor name in bytes. ggml holds 63; longer ones are harmless to us, endless ones are a broken file.
const MAX_NAME: usize = 1024;
/// The largest metadata key the format allows.
const MAX_KEY: usize = 65_535;
/// The largest string and array of numbers a header may hold: vocabularies take a few MB, and a sparse file could
/// promise terabytes of zeros.
const MAX_VALUE_BYTES: usize = 64 << 20;
/// The most strings, or arrays, an array may hold; the largest vocabularies have a quarter of a million.
const MAX_ELEMENTS: usize = 4 << 20;
/// A tensor info takes at least this many bytes: name length, dimension count, one dimension, type, offset.
const MIN_TENSOR_BYTES: usize = 8 + 4 + 8 + 4 + 8;
/// A metadata entry takes at least this many bytes: key length, type, a one-byte value.
const MIN_ENTRY_BYTES: usize = 8 + 4 + 1;

/// The parsed header of one file.
pub(super) struct Header {
    pub version: u32,
    pub alignment: u64,
    pub metadata: Metadata,
    pub tensors: Vec<TensorInfo>,
}

/// Parses `data`, the whole file. Tensor offsets in the result count from the start of the file; each tensor is known to
/// lie inside the file and to overlap no other.
pub(super) fn parse(file: &str, data: &[u8], part: usize) -> Result<Header, GgufError> {
    let mut c = Cursor { file, data, at: 0 };
    let magic = c.bytes(4, &|| "not a GGUF file: magic".into())?;
    if magic != b"GGUF" {
        return Err(c.error(&|| "not a GGUF file: magic".into(), 0, "'GGUF'", format!("'{}'", magic.escape_ascii())));
    }
    let version = c.u32(&|| "version".into())?;
    if !(2..=3).contains(&version) {
        let found = match version {
            1 => "version 1 (obsolete: convert the model again)".to_string(),
            v if (1..=3).contains(&v.swap_bytes()) => format!("version {} in big-endian order", v.swap_bytes()),
            v => format!("version {v}"),
        };
        return Err(c.error(&|| "version".into(), 4, "version 2 or 3, little-endian", found));
    }
    let n_tensors = c.count(MIN_TENSOR_BYTES, &|| "tensor count".into())?;
    let n_entries = c.count(MIN_ENTRY_BYTES, &|| "metadata count".into())?;

    let mut metadata = Metadata::new(file);
    for i in 0..n_entries {
        let at = c.at;
        let key_field = || format!("metadata key {} of {n_entries}", i + 1);
        let key = c.string(MAX_KEY, &key_field)?;
        if key.is_empty() {
            return Err(c.error(&key_field, at, "a name", "an empty string"));
        }
        if metadata.get(key).is_some() {
            return Err(c.error(&|| format!("metadata key '{}'", key.escape_debug()), at, "each key once", "it twice"));
        }
        let value = value(&mut c, &|| format!("metadata value of '{}'", key.escape_debug()))?;
        metadata.set(key, value);
    }

    let alignment = alignment(&metadata)?;
    let mut tensors = Vec::new();
    let mut names: HashMap<&str, ()> = HashMap::new();
    let mut field_at = Vec::new();
    for i in 0..n_tensors {
        let at = c.at;
        let (info, name, offset_at) = tensor_info(&mut c, i, n_tensors, part)?;
        if names.insert(name, ()).is_some() {
            return Err(c.error(&|| format!("tensor '{}'", name.escape_debug()), at, "each tensor once", "it twice"));
        }
        tensors.push(info);
        field_at.push(offset_at);
    }

    let data_start = (c.at as u64).next_multiple_of(alignment);
    place(&c, &mut tensors, &field_at, data_start, alignment)?;
    Ok(Header { version, alignment, metadata, tensors })
}

/// The alignment of tensor data that the metadata asks for.
pub(super) fn alignment(metadata: &Metadata) -> Result<u64, GgufError> {
    let Some(v) = metadata.get("general.alignment") else { return Ok(DEFAULT_ALIGNMENT) };
    match v.integer() {
        Some(a) if a > 0 && a <= MAX_ALIGNMENT && ((a & (a - 1)) == 0 || a % 8 == 0) => Ok(a as u64),
        _ => Err(GgufError::WrongType {
            file: metadata.file().to_string(),
            key: "general.alignment".into(),
            expected: "a power of two or a multiple of 8, at most 2^20",
            found: v.describe(),
        }),
    }
}

/// One entry of the tensor list; its offset still counts from the start of the data section. Also gives the name as it
/// lies in the file, and where its offset field is.
fn tensor_info<'a>(
    c: &mut Cursor<'a>,
    i: usize,
    n_tensors: usize,
    part: usize,
) -> Result<(TensorInfo, &'a str, usize), GgufError> {
    let at = c.at;
    let name_field = || format!("name of tensor {} of {n_tensors}", i + 1);
    let name = c.string(MAX_NAME, &name_field)?;
    if name.is_empty() {
        return Err(c.error(&name_field, at, "a name", "an empty string"));
    }
    let shown = name.escape_debug();
    let dims_at = c.at;
    let n_dims = c.u32(&|| format!("tensor '{shown}': number of dimensions"))?;
    if n_dims == 0 || n_dims > MAX_DIMS {
        let field = || format!("tensor '{shown}': number of dimensions");
        return Err(c.error(&field, dims_at, format!("1 to {MAX_DIMS}"), n_dims.to_string()));
    }
    let mut dims = Vec::with_capacity(n_dims as usize);
    let mut weights = 1u64;
    for d in 0..n_dims {
        let at = c.at;
        let field = || format!("tensor '{shown}': dimension {d}");
        let n = c.u64(&field)?;
        if n == 0 {
            return Err(c.error(&field, at, "at least 1", "0"));
        }
        weights = match weights.checked_mul(n) {
            Some(w) if w <= i64::MAX as u64 => w,
            _ => {
                let expected = "a number of weights below 2^63";
                return Err(c.error(&field, at, expected, format!("{n}, which makes it overflow")));
            }
        };
        dims.push(n);
    }
    let type_at = c.at;
    let id = c.u32(&|| format!("tensor '{shown}': type"))?;
    let Some(ty) = TensorType::from_ggml_id(id) else {
        let field = || format!("tensor '{shown}': type");
        return Err(c.error(&field, type_at, "a tensor type known to ggml", format!("type number {id}")));
    };
    let block = ty.block_size() as u64;
    if dims[0] % block != 0 {
        let field = || format!("tensor '{shown}': dimension 0");
        let expected = format!("a multiple of {block}, the block size of {}", ty.name());
        return Err(c.error(&field, dims_at + 4, expected, dims[0].to_string()));
    }
    let Some(size) = (weights / block).checked_mul(ty.block_bytes() as u64) else {
        let field = || format!("tensor '{shown}': size");
        return Err(c.error(&field, dims_at + 4, "a size below 2^64 bytes", format!("{weights} weights")));
    };
    let offset_at = c.at;
    let offset = c.u64(&|| format!("tensor '{shown}': offset"))?;
    Ok((TensorInfo { name: name.to_string(), dims, ty, part, offset, size }, name, offset_at))
}

/// Turns offsets within the data section into offsets within the file, and checks that each tensor is aligned, inside the
/// file and apart from all others.
fn place(
    c: &Cursor,
    tensors: &mut [TensorInfo],
    field_at: &[usize],
    data_start: u64,
    alignment: u64,
) -> Result<(), GgufError> {
    let file_size = c.data.len() as u64;
    for (t, &at) in tensors.iter_mut().zip(field_at) {
        let field = || format!("tensor '{}': offset", t.name.escape_debug());
        if t.offset % alignment != 0 {
            return Err(c.error(&field, at, format!("a multiple of the alignment {alignment}"), t.offset.to_string()));
        }
        let end = data_start.checked_add(t.offset).and_then(|o| o.checked_add(t.size));
        if end.is_none_or(|end| end > file_size) {
            let room = file_size.saturating_sub(data_start);
            let expected = format!("its {} bytes to lie within the {room} bytes of tensor data", t.size);
            let found = format!("offset {} (the file is cut short or the offset is wrong)", t.offset);
            return Err(c.error(&field, at, expected, found));
        }
        t.offset += data_start;
    }
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (tensors[i].offset, i));
    for pair in order.windows(2) {
        let (a, b) = (&tensors[pair[0]], &tensors[pair[1]]);
        if a.offset + a.size > b.offset {
            let field = || format!("tensor '{}': offset", b.name.escape_debug());
            let expected = format!("it to start after tensor '{}' (byte {})", a.name.escape_debug(), a.offset + a.size);
            return Err(c.error(&field, field_at[pair[1]], expected, format!("an overlap (byte {})", b.offset)));
        }
    }
    Ok(())
}

fn value_type(c: &mut Cursor, field: Field) -> Result<ValueType, GgufError> {
    let at = c.at;
    let id = c.u32(&|| format!("type of {}", field()))?;
    ValueType::from_id(id).ok_or_else(|| c.error(&|| format!("type of {}", field()), at, "0 to 12", id.to_string()))
}

fn value(c: &mut Cursor, field: Field) -> Result<Value, GgufError> {
    Ok(match value_type(c, field)? {
        ValueType::Array => Value::Array(array(c, 1, field)?),
        ValueType::Bool => match c.bytes(1, field)?[0] {
            b @ 0..=1 => Value::Bool(b == 1),
            b => return Err(c.error(field, c.at - 1, "a bool (0 or 1)", b.to_string())),
        },
        ValueType::String => Value::String(c.string(MAX_VALUE_BYTES, field)?.to_string()),
        ValueType::U8 => Value::U8(c.bytes(1, field)?[0]),
        ValueType::I8 => Value::I8(c.bytes(1, field)?[0] as i8),
        ValueType::U16 => Value::U16(numbers(c, 1, u16::from_le_bytes, field)?[0]),
        ValueType::I16 => Value::I16(numbers(c, 1, i16::from_le_bytes, field)?[0]),
        ValueType::U32 => Value::U32(numbers(c, 1, u32::from_le_bytes, field)?[0]),
        ValueType::I32 => Value::I32(numbers(c, 1, i32::from_le_bytes, field)?[0]),
        ValueType::F32 => Value::F32(numbers(c, 1, f32::from_le_bytes, field)?[0]),
        ValueType::U64 => Value::U64(numbers(c, 1, u64::from_le_bytes, field)?[0]),
        ValueType::I64 => Value::I64(numbers(c, 1, i64::from_le_bytes, field)?[0]),
        ValueType::F64 => Value::F64(numbers(c, 1, f64::from_le_bytes, field)?[0]),
    })
}

fn array(c: &mut Cursor, depth: usize, field: Field) -> Result<Array, GgufError> {
    let at = c.at;
    if depth > MAX_NESTING {
        return Err(c.error(field, at, format!("arrays nested at most {MAX_NESTING} deep"), "deeper nesting"));
    }
    let ty = value_type(c, field)?;
    let length_at = c.at;
    let n = c.count(ty.min_bytes(), &|| format!("length of {}", field()))?;
    let most = match ty {
        ValueType::String | ValueType::Array => MAX_ELEMENTS,
        number => MAX_VALUE_BYTES / number.min_bytes(),
    };
    if n > most {
        let expected = format!("at most {most} elements");
        return Err(c.error(&|| format!("length of {}", field()), length_at, expected, n.to_string()));
    }
    Ok(match ty {
        ValueType::U8 => Array::U8(c.bytes(n, field)?.to_vec()),
        ValueType::I8 => Array::I8(c.bytes(n, field)?.iter().map(|&b| b as i8).collect()),
        ValueType::U16 => Array::U16(numbers(c, n, u16::from_le_bytes, field)?),
        ValueType::I16 => Array::I16(numbers(c, n, i16::from_le_bytes, field)?),
        ValueType::U32 => Array::U32(numbers(c, n, u32::from_le_bytes, field)?),
        ValueType::I32 => Array::I32(numbers(c, n, i32::from_le_bytes, field)?),
        ValueType::F32 => Array::F32(numbers(c, n, f32::from_le_bytes, field)?),
        ValueType::U64 => Array::U64(numbers(c, n, u64::from_le_bytes, field)?),
        ValueType::I64 => Array::I64(numbers(c, n, i64::from_le_bytes, field)?),
        ValueType::F64 => Array::F64(numbers(c, n, f64::from_le_bytes, field)?),
        ValueType::Bool => {
            let at = c.at;
            let bytes = c.bytes(n, field)?;
            let bools = bytes.iter().enumerate().map(|(i, &b)| match b {
                0 | 1 => Ok(b == 1),
                b => Err(c.error(&|| format!("element {i} of {}", field()), at + i, "a bool (0 or 1)", b.to_string())),
            });
            Array::Bool(bools.collect::<Result<_, _>>()?)
        }
        ValueType::String => {
            let mut strings = Vec::new();
            for i in 0..n {
                strings.push(c.string(MAX_VALUE_BYTES, &|| format!("element {i} of {}", field()))?.to_string());
            }
            Array::String(strings)
        }
        ValueType::Array => {
            let mut arrays = Vec::new();
            for i in 0..n {
                arrays.push(array(c, depth + 1, &|| format!("element {i} of {}", field()))?);
            }
            Array::Array(arrays)
        }
    })
}

/// `n` little-endian numbers of `W` bytes; `n` has been checked against the file by [`Cursor::count`].
fn numbers<T, const W: usize>(
    c: &mut Cursor,
    n: usize,
    read: fn([u8; W]) -> T,
    field: Field,
) -> Result<Vec<T>, GgufError> {
    let bytes = c.bytes(n * W, field)?;
    let (chunks, _) = bytes.as_chunks::<W>();
    Ok(chunks.iter().map(|b| read(*b)).collect())
}
