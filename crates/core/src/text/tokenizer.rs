//! The tokenizer of a GGUF file: NFC, the `qwen2` / `qwen35` split into words, byte-level BPE (crate `tokenizers`), and
//! special tokens that are only ever found where the caller asks for them.

use std::collections::HashMap;

use aho_corasick::{AhoCorasick, MatchKind};
use tokenizers::Model as _;
use tokenizers::models::bpe::{BPE, Vocab};
use unicode_normalization_alignments::{IsNormalized, UnicodeNormalization, is_nfc_quick};

use super::{PreTokenizer, TextError};
use crate::gguf::Metadata;

/// What happens to the spelling of a special token, such as `<|im_start|>`, inside a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// It becomes that token: for text that strata or a template wrote.
    Parse,
    /// It is text like any other: for everything that came from a user.
    AsText,
}

/// What the metadata says a token is (`tokenizer.ggml.token_type`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenKind {
    /// A piece of text, reachable by BPE.
    Normal,
    /// The unknown token; Qwen files have none.
    Unknown,
    /// A control token: never shown, such as `<|im_end|>`.
    Control,
    /// A special token whose text is shown, such as `<think>`.
    UserDefined,
    /// Padding of the vocabulary.
    Unused,
    /// A raw byte token of other tokenizer families.
    Byte,
}

impl TokenKind {
    fn from_ggml(kind: i32) -> Option<Self> {
        Some(match kind {
            1 => Self::Normal,
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => return None,
        })
    }
}

/// A tokenizer as the metadata holds it, before it is checked.
#[derive(Debug, Clone)]
pub struct TokenizerParts<'a> {
    /// `tokenizer.ggml.tokens`: the piece of every id, in the byte-level alphabet for normal tokens.
    pub tokens: &'a [String],
    /// `tokenizer.ggml.token_type`, one per token; empty where the file has none (all normal).
    pub kinds: &'a [i32],
    /// `tokenizer.ggml.merges`: `left right`, best first.
    pub merges: &'a [String],
    /// `tokenizer.ggml.pre`
    pub pre: &'a str,
    /// `tokenizer.ggml.eos_token_id`, `.eot_token_id`, `.eom_token_id`: ids that end a turn.
    pub ends: Vec<u32>,
    /// `tokenizer.ggml.bos_token_id`
    pub bos: Option<u32>,
    /// `tokenizer.ggml.add_bos_token`
    pub add_bos: bool,
}

/// Tokens that end a turn whatever the metadata names: the spellings llama.cpp treats so.
const END_PIECES: [&str; 5] = ["<|im_end|>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"];

/// Longest text given to the BPE model in one piece, in bytes. An endless word without a blank would otherwise
/// need working memory of a hundred times its size; no real word comes near this.
const LONGEST_WORD: usize = 1024 * 1024;

/// Text to token ids and back. Immutable, so one is shared by all threads.
pub struct Tokenizer {
    bpe: BPE,
    pre: PreTokenizer,
    /// Bytes of all tokens one after the other; token `i` is `bytes[starts[i]..starts[i + 1]]`.
    bytes: Vec<u8>,
    starts: Vec<u32>,
    kinds: Vec<TokenKind>,
    /// Control and user-defined tokens, matched leftmost-longest; pattern `i` is `special_ids[i]`.
    special_matcher: Option<AhoCorasick>,
    special_ids: Vec<u32>,
    special_by_piece: HashMap<String, u32>,
    ends: Vec<u32>,
    bos: Option<u32>,
    add_bos: bool,
    /// Character of the byte-level alphabet for each byte.
    alphabet: [char; 256],
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("pre", &self.pre)
            .finish_non_exhaustive()
    }
}

/// The byte-level alphabet of GPT-2: printable Latin-1 bytes stand for themselves, the others follow from U+0100.
fn byte_alphabet() -> [char; 256] {
    let mut next = 0x100;
    std::array::from_fn(|byte| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => byte as u8 as char,
        _ => {
            let c = char::from_u32(next).unwrap_or(char::REPLACEMENT_CHARACTER);
            next += 1;
            c
        }
    })
}

fn invalid(field: &'static str, problem: String) -> TextError {
    TextError::Tokenizer { field, problem }
}

const TOKENS: &str = "tokenizer.ggml.tokens";
const KINDS: &str = "tokenizer.ggml.token_type";
const MERGES: &str = "tokenizer.ggml.merges";
const PRE: &str = "tokenizer.ggml.pre";

impl Tokenizer {
    /// The tokenizer of a GGUF file's metadata.
    ///
    /// # Errors
    /// A missing or mistyped key, an unknown model or pre-tokenizer, or parts that contradict each other.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TextError> {
        let model = metadata.str("tokenizer.ggml.model")?;
        if model != "gpt2" {
            return Err(invalid("tokenizer.ggml.model", format!("expected gpt2 (byte-level BPE), found {model:?}")));
        }
        let kinds = if metadata.get(KINDS).is_some() { metadata.i32_array(KINDS)? } else { Vec::new() };
        let mut ends = Vec::new();
        for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id"] {
            ends.extend(metadata.u32_opt(key)?);
        }
        Self::from_parts(&TokenizerParts {
            tokens: metadata.strings(TOKENS)?,
            kinds: &kinds,
            merges: metadata.strings(MERGES)?,
            pre: metadata.str(PRE)?,
            ends,
            bos: metadata.u32_opt("tokenizer.ggml.bos_token_id")?,
            add_bos: metadata.bool_opt("tokenizer.ggml.add_bos_token")?.unwrap_or(false),
        })
    }

    /// The tokenizer made of `parts`.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] naming the key: an unknown pre-tokenizer or token type, a piece that occurs twice, a
    /// byte without a token, a merge that is not two pieces of the vocabulary whose concatenation is one too, an id
    /// outside the vocabulary.
    pub fn from_parts(parts: &TokenizerParts<'_>) -> Result<Self, TextError> {
        let pre = PreTokenizer::from_name(parts.pre)
            .ok_or_else(|| invalid(PRE, format!("expected qwen2 or qwen35, found {:?}", parts.pre)))?;
        let count = parts.tokens.len();
        if count == 0 || u32::try_from(count).is_err() {
            return Err(invalid(TOKENS, format!("{count} tokens is no usable vocabulary")));
        }
        if !parts.kinds.is_empty() && parts.kinds.len() != count {
            return Err(invalid(
                KINDS,
                format!("expected {count} entries, one per token, found {}", parts.kinds.len()),
            ));
        }
        let kinds = if parts.kinds.is_empty() {
            vec![TokenKind::Normal; count]
        } else {
            let kind = |(id, &kind): (usize, &i32)| {
                TokenKind::from_ggml(kind)
                    .ok_or_else(|| invalid(KINDS, format!("token {id}: expected a type from 1 to 6, found {kind}")))
            };
            parts.kinds.iter().enumerate().map(kind).collect::<Result<_, _>>()?
        };

        let alphabet = byte_alphabet();
        let byte_of: HashMap<char, u8> = alphabet.iter().enumerate().map(|(b, &c)| (c, b as u8)).collect();
        let mut vocab = Vocab::with_capacity(count);
        let mut bytes = Vec::with_capacity(parts.tokens.iter().map(String::len).sum());
        let mut starts = Vec::with_capacity(count + 1);
        let mut special_by_piece = HashMap::new();
        let mut special_pieces = Vec::new();
        let mut special_ids = Vec::new();
        starts.push(0u32);
        for (id, (piece, &kind)) in parts.tokens.iter().zip(&kinds).enumerate() {
            let duplicate = |other: u32| invalid(TOKENS, format!("tokens {other} and {id} are both {}", shown(piece)));
            match kind {
                TokenKind::Normal => {
                    if let Some(other) = vocab.insert(piece.clone(), id as u32) {
                        return Err(duplicate(other));
                    }
                    for c in piece.chars() {
                        match byte_of.get(&c) {
                            Some(&byte) => bytes.push(byte),
                            None => bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                        }
                    }
                }
                TokenKind::Control | TokenKind::UserDefined => {
                    if piece.is_empty() {
                        return Err(invalid(TOKENS, format!("special token {id} is empty")));
                    }
                    if let Some(other) = special_by_piece.insert(piece.clone(), id as u32) {
                        return Err(duplicate(other));
                    }
                    special_pieces.push(piece.as_str());
                    special_ids.push(id as u32);
                    bytes.extend_from_slice(piece.as_bytes());
                }
                TokenKind::Unknown | TokenKind::Unused | TokenKind::Byte => bytes.extend_from_slice(piece.as_bytes()),
            }
            let end = u32::try_from(bytes.len())
                .map_err(|_| invalid(TOKENS, "the pieces are longer than 4 GiB together".into()))?;
            starts.push(end);
        }
        for (byte, c) in alphabet.iter().enumerate() {
            if !vocab.contains_key(c.encode_utf8(&mut [0; 4])) {
                return Err(invalid(
                    TOKENS,
                    format!("no token for byte 0x{byte:02x} ({c:?} in the byte-level alphabet)"),
                ));
            }
        }
        let merges = Self::checked_merges(parts.merges, &vocab)?;
        let bpe = BPE::builder()
            .vocab_and_merges(vocab, merges)
            .build()
            .map_err(|error| invalid(MERGES, error.to_string()))?;
        let special_matcher = (!special_pieces.is_empty())
            .then(|| AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).build(&special_pieces))
            .transpose()
            .map_err(|error| invalid(TOKENS, format!("special tokens: {error}")))?;

        let mut ends = parts.ends.clone();
        for &id in ends.iter().chain(&parts.bos) {
            if id as usize >= count {
                return Err(invalid(
                    "tokenizer.ggml.eos_token_id",
                    format!("id {id} is outside the vocabulary of {count} tokens"),
                ));
            }
        }
        ends.extend(END_PIECES.iter().filter_map(|&piece| special_by_piece.get(piece)));
        let mut seen = std::collections::HashSet::new();
        ends.retain(|&id| seen.insert(id));
        Ok(Self {
            bpe,
            pre,
            bytes,
            starts,
            kinds,
            special_matcher,
            special_ids,
            special_by_piece,
            ends,
            bos: parts.bos,
            add_bos: parts.add_bos,
            alphabet,
        })
    }

    /// The merges as pairs. The `tokenizers` crate panics on some merges whose result is not in the vocabulary.
    fn checked_merges(merges: &[String], vocab: &Vocab) -> Result<Vec<(String, String)>, TextError> {
        let mut merged = String::new();
        let pair = |(rank, merge): (usize, &String)| {
            let bad = |problem: String| invalid(MERGES, format!("merge {rank} ({}): {problem}", shown(merge)));
            let split = merge.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(at, _)| at);
            let (left, right) = split
                .map(|at| (&merge[..at], &merge[at + 1..]))
                .filter(|(_, right)| !right.is_empty())
                .ok_or_else(|| bad("expected two pieces with a blank between them".into()))?;
            merged.clear();
            merged.push_str(left);
            merged.push_str(right);
            for piece in [left, right, merged.as_str()] {
                if !vocab.contains_key(piece) {
                    return Err(bad(format!("{} is not in the vocabulary", shown(piece))));
                }
            }
            Ok((left.to_owned(), right.to_owned()))
        };
        merges.iter().enumerate().map(pair).collect()
    }

    /// The ids of `text`.
    ///
    /// The text is brought to NFC first, as the model was trained: that of the `tokenizers` library, which knows Unicode 9.
    /// The bytes of the ids are exactly the NFC text.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`] if the BPE model fails, which a checked vocabulary gives no occasion for.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>, TextError> {
        self.encode_up_to(text, specials, usize::MAX)
    }

    /// As [`Tokenizer::encode`], for at most `limit` ids: a text of more costs no more than its first `limit` ids do.
    ///
    /// # Errors
    /// As [`Tokenizer::encode`], and [`TextError::TooLong`].
    pub fn encode_up_to(&self, text: &str, specials: Specials, limit: usize) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::with_capacity((text.len() / 4 + 1).min(limit));
        match (&self.special_matcher, specials) {
            (Some(matcher), Specials::Parse) => {
                let mut from = 0;
                for found in matcher.find_iter(text) {
                    self.encode_text(&text[from..found.start()], limit, &mut ids)?;
                    ids.push(self.special_ids[found.pattern().as_usize()]);
                    if ids.len() > limit {
                        return Err(TextError::TooLong { limit });
                    }
                    from = found.end();
                }
                self.encode_text(&text[from..], limit, &mut ids)?;
            }
            _ => self.encode_text(text, limit, &mut ids)?,
        }
        Ok(ids)
    }

    fn encode_text(&self, text: &str, limit: usize, ids: &mut Vec<u32>) -> Result<(), TextError> {
        if is_nfc_quick(text.chars()) == IsNormalized::Yes {
            return self.encode_nfc(text, limit, ids);
        }
        self.encode_nfc(&text.nfc().map(|(char, _)| char).collect::<String>(), limit, ids)
    }

    fn encode_nfc(&self, mut text: &str, limit: usize, ids: &mut Vec<u32>) -> Result<(), TextError> {
        let mut mapped = String::new();
        while !text.is_empty() {
            let (word, rest) = text.split_at(self.pre.first_word(text));
            text = rest;
            for part in word.as_bytes().chunks(LONGEST_WORD) {
                mapped.clear();
                mapped.extend(part.iter().map(|&byte| self.alphabet[byte as usize]));
                let tokens =
                    self.bpe.tokenize(&mapped).map_err(|error| invalid(MERGES, format!("encoding failed: {error}")))?;
                ids.extend(tokens.iter().map(|token| token.id));
            }
            if ids.len() > limit {
                return Err(TextError::TooLong { limit });
            }
        }
        Ok(())
    }

    /// The bytes token `id` stands for; empty for an id outside the vocabulary. A special token's are its spelling.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id + 1)) {
            (Some(&from), Some(&to)) => &self.bytes[from as usize..to as usize],
            _ => &[],
        }
    }

    /// The text of `ids`, special tokens spelled out; bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect();
        String::from_utf8(bytes).unwrap_or_else(|error| String::from_utf8_lossy(error.as_bytes()).into_owned())
    }

    /// Number of ids, padding of the vocabulary included.
    pub fn vocab_size(&self) -> usize {
        self.kinds.len()
    }

    /// What token `id` is; `None` outside the vocabulary.
    pub fn kind(&self, id: u32) -> Option<TokenKind> {
        self.kinds.get(id as usize).copied()
    }

    /// Whether `id` is a control token, whose text is not for the reader.
    pub fn is_control(&self, id: u32) -> bool {
        matches!(self.kind(id), Some(TokenKind::Control | TokenKind::Unknown))
    }

    /// Whether `id` is a control or user-defined token: one that no text turns into unless asked.
    pub fn is_special(&self, id: u32) -> bool {
        matches!(self.kind(id), Some(TokenKind::Control | TokenKind::UserDefined))
    }

    /// The ids that end a turn; never empty for a Qwen file.
    pub fn eos_ids(&self) -> &[u32] {
        &self.ends
    }

    /// `tokenizer.ggml.bos_token_id`
    pub fn bos_id(&self) -> Option<u32> {
        self.bos
    }

    /// Whether a text starts with the BOS token (`tokenizer.ggml.add_bos_token`); false for the Qwen family.
    pub fn add_bos(&self) -> bool {
        self.add_bos
    }

    /// The id of a special token by its spelling, or of a normal piece in the byte-level alphabet.
    pub fn id_of(&self, piece: &str) -> Option<u32> {
        self.special_by_piece.get(piece).copied().or_else(|| self.bpe.token_to_id(piece))
    }

    /// Special tokens: their spelling and id, in no particular order.
    pub fn specials(&self) -> impl Iterator<Item = (&str, u32)> {
        self.special_by_piece.iter().map(|(piece, &id)| (piece.as_str(), id))
    }

    /// Where special tokens are spelled out in `text`: byte range and id, from left to right.
    pub(crate) fn find_specials<'t>(
        &'t self,
        text: &'t str,
    ) -> impl Iterator<Item = (std::ops::Range<usize>, u32)> + 't {
        self.special_matcher
            .iter()
            .flat_map(move |matcher| matcher.find_iter(text))
            .map(|found| (found.range(), self.special_ids[found.pattern().as_usize()]))
    }
}

/// A piece for an error message: quoted, and cut where it is long.
fn shown(piece: &str) -> String {
    let cut: String = piece.chars().take(40).collect();
    if cut.len() < piece.len() { format!("{cut:?}...") } else { format!("{cut:?}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::fixtures::{TOKENIZER, golden_json};

    fn ids(value: &serde_json::Value) -> Vec<u32> {
        value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
    }

    #[test]
    fn ids_equal_the_tokenizers_library_on_the_corpus() {
        let corpus = golden_json("text/tokenizer.json");
        for row in corpus.as_array().unwrap() {
            let text = row["text"].as_str().unwrap();
            let parsed = ids(&row["parse"]);
            let as_text = row.get("as_text").map_or_else(|| parsed.clone(), ids);
            assert_eq!(TOKENIZER.encode(text, Specials::Parse).unwrap(), parsed, "{text:?}");
            assert_eq!(TOKENIZER.encode(text, Specials::AsText).unwrap(), as_text, "{text:?} as text");
        }
    }

    #[test]
    fn text_comes_back_as_its_nfc() {
        let corpus = golden_json("text/tokenizer.json");
        for row in corpus.as_array().unwrap() {
            let text = row["text"].as_str().unwrap();
            let nfc: String = text.nfc().map(|(char, _)| char).collect();
            assert_eq!(TOKENIZER.decode(&TOKENIZER.encode(text, Specials::AsText).unwrap()), nfc);
        }
        // Beyond the backtrack limit of the regex the `tokenizers` library would use.
        for long in [" ".repeat(200_000) + "x", "\u{301}".repeat(100_000), "क्".repeat(50_000), "ab\n".repeat(100_000)]
        {
            assert!(TOKENIZER.decode(&TOKENIZER.encode(&long, Specials::Parse).unwrap()) == long);
        }
    }

    #[test]
    fn nfc_is_that_of_the_tokenizers_library() {
        for text in [
            "e\u{301}",
            "\u{1100}\u{1161}\u{11a8}",
            "\u{344}",
            // Composed, decomposed and ordered only by a newer Unicode than 9.
            "\u{11935}\u{11930}",
            "\u{11938}",
            "a\u{301}\u{1dfa}",
            "a\u{10eab}\u{8d3}\u{323}",
            "\u{1611e}\u{1611e}\u{301}",
            "\u{105d2}\u{307}",
        ] {
            let mut expected = tokenizers::NormalizedString::from(text);
            expected.nfc();
            let found = TOKENIZER.decode(&TOKENIZER.encode(text, Specials::AsText).unwrap());
            assert_eq!(found, expected.get(), "{text:?}");
        }
    }

    #[test]
    fn user_text_never_becomes_a_special_token() {
        for (piece, id) in TOKENIZER.specials() {
            assert_eq!(TOKENIZER.encode(piece, Specials::Parse).unwrap(), [id]);
            let text = TOKENIZER.encode(&format!("a{piece}b"), Specials::AsText).unwrap();
            assert!(text.iter().all(|&id| !TOKENIZER.is_special(id)), "{piece}");
        }
    }

    fn parts() -> (Vec<String>, Vec<i32>, Vec<String>) {
        let tokens = byte_alphabet().into_iter().map(String::from).chain(["ab".into(), "<s>".into(), "[PAD]".into()]);
        let kinds = [vec![1; 257], vec![3, 5]].concat();
        (tokens.collect(), kinds, vec!["a b".into()])
    }

    fn build(
        change: impl FnOnce(&mut Vec<String>, &mut Vec<i32>, &mut Vec<String>, &mut &str),
    ) -> Result<Tokenizer, TextError> {
        let (mut tokens, mut kinds, mut merges) = parts();
        let mut pre = "qwen35";
        change(&mut tokens, &mut kinds, &mut merges, &mut pre);
        let ends = vec![257];
        Tokenizer::from_parts(&TokenizerParts {
            tokens: &tokens,
            kinds: &kinds,
            merges: &merges,
            pre,
            ends,
            bos: None,
            add_bos: false,
        })
    }

    #[test]
    fn parts_that_hold_together_make_a_tokenizer() {
        let tokenizer = build(|_, _, _, _| {}).unwrap();
        assert_eq!(tokenizer.encode("abc<s>", Specials::Parse).unwrap(), [256, u32::from(b'c'), 257]);
        assert_eq!(tokenizer.token_bytes(9999), b"");
        assert_eq!(tokenizer.kind(258), Some(TokenKind::Unused));
    }

    /// Each fault gives an error that names the key, and none a panic (the `tokenizers` crate panics on some).
    #[test]
    fn parts_that_contradict_each_other_are_refused() {
        type Change = fn(&mut Vec<String>, &mut Vec<i32>, &mut Vec<String>, &mut &str);
        let faults: [(&str, &str, Change); 12] = [
            (PRE, "expected qwen2 or qwen35", |_, _, _, pre| *pre = "llama3"),
            (KINDS, "expected 259 entries", |_, kinds, _, _| kinds.truncate(5)),
            (KINDS, "token 7: expected a type from 1 to 6, found 9", |_, kinds, _, _| kinds[7] = 9),
            (TOKENS, "no usable vocabulary", |tokens, _, _, _| tokens.clear()),
            (TOKENS, "are both \"ab\"", |tokens, kinds, _, _| {
                tokens.push("ab".into());
                kinds.push(1);
            }),
            (TOKENS, "are both \"<s>\"", |tokens, kinds, _, _| {
                tokens.push("<s>".into());
                kinds.push(4);
            }),
            (TOKENS, "special token 257 is empty", |tokens, _, _, _| tokens[257].clear()),
            (TOKENS, "no token for byte 0x41", |tokens, _, _, _| tokens[0x41] = "AA".into()),
            (MERGES, "merge 1 (\"a\")", |_, _, merges, _| merges.push("a".into())),
            (MERGES, "\"zz\" is not in the vocabulary", |_, _, merges, _| merges.push("zz a".into())),
            (MERGES, "\"ba\" is not in the vocabulary", |_, _, merges, _| merges.push("b a".into())),
            (MERGES, "\"<s>\" is not in the vocabulary", |_, _, merges, _| merges.push("<s> a".into())),
        ];
        for (key, problem, change) in faults {
            match build(change) {
                Err(TextError::Tokenizer { field, problem: found }) => {
                    assert_eq!(field, key);
                    assert!(found.contains(problem), "expected {problem:?} in {found:?}");
                }
                other => panic!("{key} {problem}: {other:?}"),
            }
        }
    }
}
