//! The tokenizer of a Hugging Face folder as GGUF metadata: vocabulary, merges, token types, special tokens, the name
//! of the pre-tokenizer and the chat template.

use super::ConvertError;
use crate::gguf::{Array, Metadata, Value};
use serde_json::Value as Json;
use std::collections::HashMap;
use std::path::Path;

/// `tokenizer.ggml.token_type` of an ordinary token.
const NORMAL: i32 = 1;
/// A special token, e.g. `<|im_start|>`.
const CONTROL: i32 = 3;
/// An added token that is text, e.g. `<tool_call>`.
const USER_DEFINED: i32 = 4;
/// A number of the vocabulary no token has.
const UNUSED: i32 = 5;

/// The splitting expressions known, with llama.cpp's names for them.
const PRE_TOKENIZERS: [(&str, &str); 2] = [
    (
        "qwen35",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    (
        "qwen2",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
];

/// The kinds of special tokens a GGUF knows, in the order llama.cpp's converter writes them, and their keys.
const SPECIAL: [(&str, &str); 5] = [
    ("bos", "tokenizer.ggml.bos_token_id"),
    ("eos", "tokenizer.ggml.eos_token_id"),
    ("unk", "tokenizer.ggml.unknown_token_id"),
    ("sep", "tokenizer.ggml.seperator_token_id"),
    ("pad", "tokenizer.ggml.padding_token_id"),
];

/// Adds the tokenizer keys. `config` is the folder's `config.json`, `vocab` the number of entries the embedding has.
///
/// # Errors
/// When `tokenizer.json` is missing, is no byte-level BPE, has an unknown splitting expression, or more tokens than the
/// embedding.
pub fn add_tokenizer(metadata: &mut Metadata, folder: &Path, config: &Json, vocab: u64) -> Result<(), ConvertError> {
    let path = folder.join("tokenizer.json");
    let file = path.display().to_string();
    let wrong = |reason: String| ConvertError::Tokenizer { file: file.clone(), reason };
    let Some(json) = read_json(&path)? else {
        return Err(wrong("it is not there; the vocabulary is read from it".into()));
    };
    let settings = read_json(&folder.join("tokenizer_config.json"))?.unwrap_or(Json::Null);
    let model = &json["model"];
    if model["type"].as_str().is_some_and(|t| t != "BPE") || !model["vocab"].is_object() {
        return Err(wrong("'model' is no BPE with a vocabulary".into()));
    }
    let added: Vec<&Json> = json["added_tokens"].as_array().into_iter().flatten().collect();
    let (tokens, types) = tokens(&wrong, model, &added, vocab)?;
    metadata.set("tokenizer.ggml.model", Value::String("gpt2".into()));
    metadata.set("tokenizer.ggml.pre", Value::String(pre_tokenizer(&json).map_err(&wrong)?.into()));
    metadata.set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)));
    metadata.set("tokenizer.ggml.token_type", Value::Array(Array::I32(types)));
    metadata.set("tokenizer.ggml.merges", Value::Array(Array::String(merges(&wrong, model)?)));

    let mut special: Vec<(&str, u64)> = Vec::new();
    let id_of = |content: &str| added.iter().find(|t| t["content"].as_str() == Some(content))?["id"].as_u64();
    for (kind, _) in SPECIAL {
        let entry = &settings[format!("{kind}_token")];
        let content = entry.as_str().or(entry["content"].as_str());
        if let Some(id) = content.and_then(id_of) {
            special.push((kind, id));
        }
    }
    for (kind, _) in SPECIAL {
        let key = format!("{kind}_token_id");
        let id = config[&key].as_u64().or(config["text_config"][&key].as_u64());
        if let Some(id) = id.filter(|_| special.iter().all(|(k, _)| *k != kind)) {
            special.push((kind, id));
        }
    }
    for (kind, id) in special {
        let id = u32::try_from(id)
            .ok()
            .filter(|id| u64::from(*id) < vocab)
            .ok_or_else(|| wrong(format!("the {kind} token has the number {id}, of {vocab} tokens")))?;
        if let Some((_, key)) = SPECIAL.iter().find(|(k, _)| *k == kind) {
            metadata.set(*key, Value::U32(id));
        }
    }
    // A byte-level post-processor adds neither token, whatever the settings say.
    let byte_level = has_byte_level_post_processor(&json);
    for kind in ["bos", "eos"] {
        let asked = settings[format!("add_{kind}_token")].as_bool();
        if let Some(add) = if byte_level { Some(false) } else { asked } {
            metadata.set(format!("tokenizer.ggml.add_{kind}_token"), Value::Bool(add));
        }
    }
    add_chat_template(metadata, folder, &settings)
}

/// Text and type of every entry of the vocabulary.
fn tokens(
    wrong: &dyn Fn(String) -> ConvertError,
    model: &Json,
    added: &[&Json],
    vocab: u64,
) -> Result<(Vec<String>, Vec<i32>), ConvertError> {
    let vocab = vocab as usize;
    let mut tokens: Vec<Option<(String, i32)>> = vec![None; vocab];
    let mut place = |id: Option<u64>, text: &str, kind: i32| {
        let id = id.ok_or_else(|| wrong(format!("token '{text}' has no number")))?;
        let slot = tokens.get_mut(id as usize).ok_or_else(|| {
            wrong(format!("token '{text}' has the number {id}, but the embedding has only {vocab} rows"))
        })?;
        if let Some((other, _)) = slot.as_ref().filter(|(other, _)| other != text) {
            return Err(wrong(format!("tokens '{other}' and '{text}' both have the number {id}")));
        }
        *slot = Some((text.to_string(), kind));
        Ok(())
    };
    for (text, id) in model["vocab"].as_object().into_iter().flatten() {
        place(id.as_u64(), text, NORMAL)?;
    }
    for token in added {
        let text = token["content"].as_str().ok_or_else(|| wrong(format!("an added token has no content: {token}")))?;
        let control = token["special"].as_bool() == Some(true) || looks_special(text);
        place(token["id"].as_u64(), text, if control { CONTROL } else { USER_DEFINED })?;
    }
    Ok(tokens
        .into_iter()
        .enumerate()
        .map(|(id, token)| token.unwrap_or_else(|| (format!("[PAD{id}]"), UNUSED)))
        .unzip())
}

/// Added tokens in the form of special ones are, whatever their flag says.
fn looks_special(text: &str) -> bool {
    text.starts_with("<|") && text.ends_with("|>")
}

/// `left right` per merge. Spaces within a part are written as the byte-level alphabet has them.
fn merges(wrong: &dyn Fn(String) -> ConvertError, model: &Json) -> Result<Vec<String>, ConvertError> {
    let list = model["merges"].as_array().ok_or_else(|| wrong("'model' has no merges".into()))?;
    list.iter()
        .map(|merge| match merge {
            Json::String(text) => Ok(text.clone()),
            Json::Array(pair) => match pair.as_slice() {
                [Json::String(a), Json::String(b)] => {
                    Ok(format!("{} {}", a.replace(' ', "\u{120}"), b.replace(' ', "\u{120}")))
                }
                _ => Err(wrong(format!("a merge is no pair of strings: {merge}"))),
            },
            _ => Err(wrong(format!("a merge is no pair of strings: {merge}"))),
        })
        .collect()
}

/// llama.cpp's name for the splitting expression.
fn pre_tokenizer(json: &Json) -> Result<&'static str, String> {
    let pre = &json["pre_tokenizer"];
    let steps: Vec<&Json> = match pre["pretokenizers"].as_array() {
        Some(list) => list.iter().collect(),
        None => vec![pre],
    };
    let splits: Vec<&str> = steps
        .iter()
        .filter(|s| s["type"].as_str() == Some("Split"))
        .filter_map(|s| s["pattern"]["Regex"].as_str().or(s["pattern"]["String"].as_str()))
        .collect();
    if !steps.iter().any(|s| s["type"].as_str() == Some("ByteLevel")) {
        return Err("the pre-tokenizer has no ByteLevel step; only byte-level BPE is known".into());
    }
    match splits.as_slice() {
        [expression] => PRE_TOKENIZERS
            .iter()
            .find(|(_, known)| known == expression)
            .map(|(name, _)| *name)
            .ok_or_else(|| format!("no GGUF name is known for the splitting expression {expression}")),
        _ => Err(format!("the pre-tokenizer has {} splitting expressions where one is expected", splits.len())),
    }
}

fn has_byte_level_post_processor(json: &Json) -> bool {
    let post = &json["post_processor"];
    let is = |p: &Json| p["type"].as_str() == Some("ByteLevel");
    is(post) || post["processors"].as_array().is_some_and(|list| list.iter().any(is))
}

/// The chat template: of `tokenizer_config.json`, or of a file of its own.
fn add_chat_template(metadata: &mut Metadata, folder: &Path, settings: &Json) -> Result<(), ConvertError> {
    let key = "tokenizer.chat_template";
    let own = match read_text(&folder.join("chat_template.jinja"))? {
        Some(text) => Some(Json::String(text)),
        None => read_json(&folder.join("chat_template.json"))?.map(|j| j["chat_template"].clone()),
    };
    let template =
        if settings["chat_template"].is_null() { own.unwrap_or(Json::Null) } else { settings["chat_template"].clone() };
    match template {
        Json::String(text) => metadata.set(key, Value::String(text)),
        Json::Array(named) => {
            let mut names = Vec::new();
            let mut templates = HashMap::new();
            for entry in &named {
                if let (Some(name), Some(text)) = (entry["name"].as_str(), entry["template"].as_str()) {
                    names.push(name.to_string());
                    templates.insert(name.to_string(), text.to_string());
                }
            }
            names.retain(|n| n != "default");
            if let Some(default) = templates.remove("default") {
                metadata.set(key, Value::String(default));
            }
            for name in &names {
                if let Some(text) = templates.remove(name) {
                    metadata.set(format!("{key}.{name}"), Value::String(text));
                }
            }
            if !names.is_empty() {
                metadata.set("tokenizer.chat_templates", Value::Array(Array::String(names)));
            }
        }
        _ => {}
    }
    Ok(())
}

/// Largest text file read from a folder: vocabularies have some ten megabytes.
const TEXT_LIMIT: u64 = 256 << 20;

/// A text file of the folder; `None` when it is not there.
pub(super) fn read_text(path: &Path) -> Result<Option<String>, ConvertError> {
    let io = |source| ConvertError::Io { path: path.to_path_buf(), action: "read it", source };
    match std::fs::metadata(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(io(e)),
        Ok(meta) if !meta.is_file() => return Err(io(std::io::Error::other("it is not a file"))),
        Ok(meta) if meta.len() > TEXT_LIMIT => return Err(io(std::io::Error::other("it is too large for what it is"))),
        Ok(_) => {}
    }
    std::fs::read_to_string(path).map(Some).map_err(io)
}

/// A JSON file of the folder; `None` when it is not there.
pub(super) fn read_json(path: &Path) -> Result<Option<Json>, ConvertError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|e| ConvertError::Json { file: path.display().to_string(), reason: e.to_string() })
}
