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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Specials;
    use crate::text::fixtures::{TOKENIZER, golden_json};

    fn stream(ids: &[u32], show_specials: bool) -> (Vec<String>, String) {
        let mut detokenizer = Detokenizer::new(TOKENIZER.clone(), show_specials);
        let pieces: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
        (pieces, detokenizer.finish())
    }

    #[test]
    fn pieces_together_are_the_text() {
        for row in golden_json("text/tokenizer.json").as_array().unwrap() {
            let ids = TOKENIZER.encode(row["text"].as_str().unwrap(), Specials::Parse).unwrap();
            let (pieces, rest) = stream(&ids, true);
            assert_eq!(pieces.concat() + &rest, TOKENIZER.decode(&ids));
        }
    }

    #[test]
    fn a_character_comes_with_its_last_byte_and_a_broken_one_is_replaced() {
        let byte = |b: u8| (0..256).find(|&id| TOKENIZER.token_bytes(id) == [b]).unwrap();
        let ids: Vec<u32> = "a🙂b".bytes().map(byte).collect();
        assert_eq!(stream(&ids, false), (["a", "", "", "", "🙂", "b"].map(String::from).to_vec(), String::new()));
        let broken: Vec<u32> = [0xf0, 0x9f, b'x', 0xff, 0xe4, 0xbd].map(byte).to_vec();
        let (pieces, rest) = stream(&broken, false);
        assert_eq!(pieces.concat(), "\u{fffd}x\u{fffd}");
        assert_eq!(rest, "\u{fffd}");
    }

    #[test]
    fn control_tokens_show_only_when_asked_for() {
        let ids = TOKENIZER.encode("a<|im_end|><think>", Specials::Parse).unwrap();
        assert_eq!(stream(&ids, false).0.concat(), "a<think>");
        assert_eq!(stream(&ids, true).0.concat(), "a<|im_end|><think>");
    }
}
