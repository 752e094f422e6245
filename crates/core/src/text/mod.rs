//! Text in and out of the model: tokenizer, incremental detokenizer, chat template, the parser of reasoning and tool
//! calls, and grammars that constrain what may be generated. Knows token ids and strings, never the model itself.

pub mod chat;
pub mod detokenizer;
#[cfg(test)]
mod fixtures;
mod gbnf;
pub mod grammar;
pub mod output;
mod split;
pub mod tokenizer;

pub use chat::{ChatPrompt, ChatTemplate, PromptPiece, TemplateInput, encode_chat, encode_chat_up_to};
pub use detokenizer::Detokenizer;
pub use grammar::{Grammar, GrammarEnv, TokenMask};
pub use split::PreTokenizer;
pub use tokenizer::{Specials, TokenKind, Tokenizer, TokenizerParts};

/// What can go wrong with text: a tokenizer that does not hold together, a template that fails, a grammar that cannot
/// be compiled.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The metadata lacks a tokenizer key or holds another type there.
    #[error(transparent)]
    Gguf(#[from] crate::gguf::GgufError),
    /// The tokenizer's parts contradict each other.
    #[error("tokenizer: {field}: {problem}")]
    Tokenizer {
        /// The metadata key at fault.
        field: &'static str,
        /// What was expected and what was found.
        problem: String,
    },
    /// A text of more tokens than there is room for.
    #[error("more than {limit} tokens")]
    TooLong {
        /// The most tokens allowed.
        limit: usize,
    },
    /// A token id outside the vocabulary.
    #[error("token id {id} is outside the vocabulary of {vocab_size} tokens")]
    UnknownToken {
        /// The id asked for.
        id: u32,
        /// Ids run from 0 to this, exclusive.
        vocab_size: usize,
    },
    /// The chat template cannot be parsed.
    #[error("chat template does not parse: {0}")]
    TemplateSyntax(String),
    /// The chat template refused the conversation (`raise_exception`) or failed while rendering.
    #[error("chat template: {0}")]
    Template(String),
    /// The conversation is not of the shape a chat request has.
    #[error("{field}: {problem}")]
    Messages {
        /// Path of the field at fault, such as `messages[2].content[0]`.
        field: String,
        /// What was expected and what was found.
        problem: String,
    },
    /// A grammar, schema, regular expression or choice list that cannot be compiled.
    #[error("{kind}: {problem}")]
    Grammar {
        /// `JSON schema`, `regex`, `lark grammar`, ...
        kind: &'static str,
        /// The compiler's message.
        problem: String,
    },
}
