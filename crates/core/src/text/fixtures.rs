//! The bundled model's text parts, for the tests of this module.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use super::{ChatTemplate, GrammarEnv, Tokenizer};
use crate::gguf::GgufFile;

pub(crate) fn golden(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(path)
}

pub(crate) fn golden_json(path: &str) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(golden(path)).unwrap()).unwrap()
}

pub(crate) static MODEL: LazyLock<GgufFile> = LazyLock::new(|| GgufFile::open(&golden("tiny.gguf")).unwrap());
pub(crate) static TOKENIZER: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::from_gguf(MODEL.metadata()).unwrap()));
pub(crate) static TEMPLATE: LazyLock<ChatTemplate> =
    LazyLock::new(|| ChatTemplate::from_gguf(MODEL.metadata()).unwrap().unwrap());
pub(crate) static GRAMMAR: LazyLock<Arc<GrammarEnv>> = LazyLock::new(|| GrammarEnv::new(&TOKENIZER).unwrap());
