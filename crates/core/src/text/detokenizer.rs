//! Token ids to text while they arrive: only whole, valid UTF-8 ever comes out.

use std::sync::Arc;

use super::Tokenizer;

/// Turns a stream of token ids into text. A character whose bytes are spread over several tokens comes out with the
/// last of them; bytes that can never become a character come out as U+FFFD.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    show_specials: bool,
    /// Bytes of a character not yet complete: at most 3.
    held: Vec<u8>,
}

impl Detokenizer {
    /// `show_specials`: whether control tokens such as `<|im_end|>` appear in the text.
    pub fn new(tokenizer: Arc<Tokenizer>, show_specials: bool) -> Self {
        Self { tokenizer, show_specials, held: Vec::new() }
    }

    /// The text that `id` completes. Ids outside the vocabulary and hidden control tokens give none.
    pub fn push(&mut self, id: u32) -> String {
        if self.show_specials || !self.tokenizer.is_control(id) {
            self.held.extend_from_slice(self.tokenizer.token_bytes(id));
        }
        self.take(false)
    }

    /// What is still held back, with U+FFFD for a character that was never completed.
    pub fn finish(&mut self) -> String {
        self.take(true)
    }

    fn take(&mut self, last: bool) -> String {
        let mut text = String::new();
        let mut rest = self.held.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    match error.error_len() {
                        Some(bad) => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &after[bad..];
                        }
                        None if last => {
                            text.push(char::REPLACEMENT_CHARACTER);
                            rest = &[];
                            break;
                        }
                        None => {
                            rest = after;
                            break;
                        }
                    }
                }
            }
        }
        let kept = rest.len();
        self.held.drain(..self.held.len() - kept);
        text
    }
}
