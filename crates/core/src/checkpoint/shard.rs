//! One safetensors file: 8 bytes header length, a JSON header, then the data of the tensors without gaps.

use super::{CheckpointError, Dtype, StTensor};
use bytes::Bytes;
use memmap2::Mmap;
use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};
use std::collections::HashSet;
use std::fs::File;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};

/// The longest header the format allows.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// A mapped shard.
#[derive(Debug)]
pub(super) struct Shard {
    pub path: PathBuf,
    pub data: Bytes,
}

/// A tensor as the header describes it.
#[derive(serde::Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// A JSON object whose keys are unique, in order. `serde_json` itself would keep the last of two.
pub(super) struct UniqueMap<T>(pub Vec<(String, T)>);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for UniqueMap<T> {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Unique<T>(PhantomData<T>);
        impl<'de, T: Deserialize<'de>> Visitor<'de> for Unique<T> {
            type Value = UniqueMap<T>;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut seen = HashSet::new();
                let mut entries = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("'{}' twice", key.escape_debug())));
                    }
                    let value =
                        map.next_value().map_err(|e| A::Error::custom(format!("'{}': {e}", key.escape_debug())))?;
                    entries.push((key, value));
                }
                Ok(UniqueMap(entries))
            }
        }
        d.deserialize_map(Unique(PhantomData))
    }
}

/// An entry of a header: a tensor, or `__metadata__`, which says nothing we need.
enum HeaderValue {
    Tensor(Entry),
    Metadata,
}

/// The header object: like [`UniqueMap`], but `__metadata__` has another type than the rest.
struct HeaderMap(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for HeaderMap {
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        struct Header;
        impl<'de> Visitor<'de> for Header {
            type Value = HeaderMap;
            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
                let mut seen = HashSet::new();
                let mut entries = Vec::new();
                while let Some(key) = map.next_key::<String>()? {
                    let shown = key.escape_debug().to_string();
                    if !seen.insert(key.clone()) {
                        return Err(A::Error::custom(format!("'{shown}' twice")));
                    }
                    let value = if key == "__metadata__" {
                        map.next_value::<UniqueMap<String>>().map(|_| HeaderValue::Metadata)
                    } else {
                        map.next_value().map(HeaderValue::Tensor)
                    };
                    match value.map_err(|e| A::Error::custom(format!("'{shown}': {e}")))? {
                        HeaderValue::Tensor(entry) => entries.push((key, entry)),
                        HeaderValue::Metadata => {}
                    }
                }
                Ok(HeaderMap(entries))
            }
        }
        d.deserialize_map(Header)
    }
}

impl Shard {
    /// Maps a shard and reads its header. The tensors come in the order of their data.
    pub fn open(path: &Path, number: usize) -> Result<(Shard, Vec<StTensor>), CheckpointError> {
        let data = map(path)?;
        let tensors = parse(path, &data, number)?;
        Ok((Shard { path: path.to_path_buf(), data }, tensors))
    }
}

/// The `.safetensors` files of a folder without an index, by name.
pub(super) fn files_in(folder: &Path) -> Result<Vec<PathBuf>, CheckpointError> {
    let entries = std::fs::read_dir(folder).map_err(|e| CheckpointError::io(folder, "list it", e))?;
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| CheckpointError::io(folder, "list it", e))?.path();
        if path.extension().is_some_and(|e| e == "safetensors") {
            files.push(path);
        }
    }
    files.sort();
    if files.is_empty() {
        return Err(CheckpointError::NoShards { path: folder.to_path_buf() });
    }
    Ok(files)
}

fn map(path: &Path) -> Result<Bytes, CheckpointError> {
    // Asked before opening: opening a pipe would wait for its writer.
    let meta = std::fs::metadata(path).map_err(|e| CheckpointError::io(path, "open the shard", e))?;
    if !meta.is_file() {
        let found = if meta.is_dir() { "a folder" } else { "something else" };
        return Err(CheckpointError::malformed(path, "file".into(), "a regular file".into(), found.into()));
    }
    if meta.len() == 0 {
        return Ok(Bytes::new());
    }
    let file = File::open(path).map_err(|e| CheckpointError::io(path, "open the shard", e))?;
    // SAFETY: the map is read-only and private to the returned Bytes. As with every memory-mapped file, another process
    // that cuts the file short while it is open makes reads fail (SIGBUS); `Checkpoint::open` documents that.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| CheckpointError::io(path, "map the shard into memory", e))?;
    Ok(Bytes::from_owner(map))
}

/// Parses and checks the header of a shard.
fn parse(path: &Path, data: &[u8], shard: usize) -> Result<Vec<StTensor>, CheckpointError> {
    let bad = |field: &str, expected: String, found: String| {
        CheckpointError::malformed(path, field.to_string(), expected, found)
    };
    let Some((length, rest)) = data.split_first_chunk::<8>() else {
        return Err(bad(
            "not a safetensors file: header length",
            "8 bytes".into(),
            format!("a file of {} bytes", data.len()),
        ));
    };
    let length = u64::from_le_bytes(*length);
    let most = MAX_HEADER_BYTES.min(rest.len() as u64);
    if length < 2 || length > most {
        return Err(bad("not a safetensors file: header length", format!("2 to {most} bytes"), length.to_string()));
    }
    let (header, body) = rest.split_at(length as usize);
    let text = std::str::from_utf8(header)
        .map_err(|e| bad("header", "UTF-8 text".into(), format!("an invalid byte at place {}", e.valid_up_to())))?;
    if !text.starts_with('{') {
        let start: String = text.chars().take(8).collect();
        return Err(bad("header", "a JSON object that starts with '{'".into(), format!("'{}'", start.escape_debug())));
    }
    let HeaderMap(entries) = serde_json::from_str(text)
        .map_err(|e| bad("header", "a JSON object of unique tensors".into(), e.to_string()))?;

    let mut tensors = Vec::new();
    for (name, entry) in entries {
        let field = |what: &str| format!("tensor '{}': {what}", name.escape_debug());
        let Some(dtype) = Dtype::from_name(&entry.dtype) else {
            let found = format!("'{}'", entry.dtype.escape_debug());
            return Err(bad(&field("dtype"), "a dtype of the safetensors format".into(), found));
        };
        let bits = entry.shape.iter().try_fold(dtype.bits() as u64, |n, d| n.checked_mul(*d));
        let Some(bits) = bits.filter(|b| *b <= i64::MAX as u64) else {
            return Err(bad(
                &field("shape"),
                "a size below 2^63 bits".into(),
                format!("{:?}, which overflows", entry.shape),
            ));
        };
        if bits % 8 != 0 {
            return Err(bad(&field("shape"), "a whole number of bytes".into(), format!("{bits} bits")));
        }
        let (start, end) = entry.data_offsets;
        if start > end || end > body.len() as u64 {
            let expected = format!("start <= end <= {} (the bytes of data in the file)", body.len());
            return Err(bad(&field("data_offsets"), expected, format!("[{start}, {end}]")));
        }
        if end - start != bits / 8 {
            let expected = format!("{} bytes for shape {:?} of {}", bits / 8, entry.shape, dtype.name());
            return Err(bad(&field("data_offsets"), expected, format!("{} bytes ([{start}, {end}])", end - start)));
        }
        let data_at = data.len() - body.len();
        let range = (data_at + start as usize, data_at + end as usize);
        let shape = entry.shape.iter().map(|d| *d as usize).collect();
        tensors.push(StTensor { name, dtype, shape, shard, range });
    }
    tensors.sort_by(|a, b| (a.range, &a.name).cmp(&(b.range, &b.name)));
    let data_at = data.len() - body.len();
    let mut end = data_at;
    for t in &tensors {
        if t.range.0 != end {
            let what = if t.range.0 < end { "an overlap" } else { "a gap" };
            let expected = format!("it to start at {}, where the tensor before it ends", end - data_at);
            let found = format!("{what}: it starts at {}", t.range.0 - data_at);
            return Err(bad(&format!("tensor '{}': data_offsets", t.name.escape_debug()), expected, found));
        }
        end = t.range.1;
    }
    if end != data.len() {
        let found = format!("{} bytes after it", data.len() - end);
        return Err(bad("end of file", "the end of the last tensor".into(), found));
    }
    Ok(tensors)
}
