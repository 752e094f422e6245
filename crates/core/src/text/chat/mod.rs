//! From a conversation to the rows of a prompt: rendering the file's own template, and encoding the result so that
//! special tokens come from the template alone.

mod encode;
mod python;
mod template;

pub use encode::{ChatPrompt, PromptPiece, encode_chat, encode_chat_up_to, normalize_messages};
pub use template::{ChatTemplate, TemplateInput};
