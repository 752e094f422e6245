//! `model.safetensors.index.json` (which shard holds which tensor) and `config.json`.

use super::CheckpointError;
use super::shard::UniqueMap;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Larger JSON files than this are not what they claim to be.
const MAX_JSON_BYTES: u64 = 256 << 20;

/// Reads `config.json` of a folder, where there is one.
pub(super) fn read_config(folder: &Path) -> Result<Option<serde_json::Value>, CheckpointError> {
    let path = folder.join("config.json");
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    let text = read_text(&path)?;
    match serde_json::from_str(&text) {
        Ok(v @ serde_json::Value::Object(_)) => Ok(Some(v)),
        Ok(_) => Err(malformed(&path, "content", "a JSON object", "another JSON value")),
        Err(e) => Err(malformed(&path, "content", "JSON", &e.to_string())),
    }
}

/// Reads an index: tensor name to file name, and the bytes it says all tensors have. Every file name is a plain name within the
/// folder.
pub(super) fn read_index(path: &Path) -> Result<(BTreeMap<String, String>, Option<u64>), CheckpointError> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: UniqueMap<String>,
        #[serde(default)]
        metadata: serde_json::Value,
    }
    let text = read_text(path)?;
    let index: Index = serde_json::from_str(&text).map_err(|e| {
        malformed(path, "content", "a JSON object with a 'weight_map' of unique tensor names", &e.to_string())
    })?;
    if index.weight_map.0.is_empty() {
        return Err(malformed(path, "weight_map", "at least one tensor", "none"));
    }
    for (name, file) in &index.weight_map.0 {
        let plain = Path::new(file).file_name().is_some_and(|f| f == file.as_str())
            && !file.contains(['/', '\\', '\0', ':'])
            && file.ends_with(".safetensors");
        if !plain {
            let field = format!("weight_map entry '{}'", name.escape_debug());
            let found = format!("'{}'", file.escape_debug());
            return Err(malformed(path, &field, "the name of a .safetensors file in the same folder", &found));
        }
    }
    let bytes = index.metadata.get("total_size").and_then(serde_json::Value::as_u64);
    Ok((index.weight_map.0.into_iter().collect(), bytes))
}

fn read_text(path: &Path) -> Result<String, CheckpointError> {
    let meta = std::fs::metadata(path).map_err(|e| CheckpointError::io(path, "open it", e))?;
    if !meta.is_file() {
        return Err(malformed(path, "file", "a regular file", "something else"));
    }
    if meta.len() > MAX_JSON_BYTES {
        return Err(malformed(path, "size", &format!("at most {MAX_JSON_BYTES} bytes"), &meta.len().to_string()));
    }
    std::fs::read_to_string(path).map_err(|e| CheckpointError::io(path, "read it as text", e))
}

fn malformed(path: &Path, field: &str, expected: &str, found: &str) -> CheckpointError {
    CheckpointError::Malformed {
        path: PathBuf::from(path),
        field: field.into(),
        expected: expected.into(),
        found: found.into(),
    }
}
