//! Splits text into the words byte-level BPE works on, as the pre-tokenizers `qwen2` and `qwen35` define them.
//!
//! Both are given by a regular expression (`reference` in the tests). It is matched here by hand, in one pass without
//! backtracking: a regex engine gives up on very long runs of blanks (its backtrack limit), and the `tokenizers` crate
//! then drops the rest of the text silently. The tests hold this code to the expression.

use std::sync::LazyLock;

/// The rule by which text is cut into words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PreTokenizer {
    /// `tokenizer.ggml.pre` = `qwen2`: a combining mark is punctuation.
    Qwen2,
    /// `tokenizer.ggml.pre` = `qwen35`: a combining mark belongs to the word.
    Qwen35,
}

impl PreTokenizer {
    /// The rule named by `tokenizer.ggml.pre`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "qwen2" => Some(Self::Qwen2),
            "qwen35" => Some(Self::Qwen35),
            _ => None,
        }
    }

    fn is_word(self, class: Class) -> bool {
        class == Class::Letter || (class == Class::Mark && self == Self::Qwen35)
    }

    /// The length in bytes of the first word of `text`, which must not be empty.
    pub(crate) fn first_word(self, text: &str) -> usize {
        let mut chars = text.chars();
        let Some(first) = chars.next() else { return 0 };
        let first_len = first.len_utf8();
        if let Some(len) = contraction(text) {
            return len;
        }
        let class = Class::of(first);
        // [^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+
        let word_from = |start: usize| {
            text[start..]
                .char_indices()
                .find(|&(_, c)| !self.is_word(Class::of(c)))
                .map_or(text.len(), |(at, _)| start + at)
        };
        let may_lead = class != Class::Newline && class != Class::Letter && class != Class::Number;
        if may_lead && chars.next().is_some_and(|c| self.is_word(Class::of(c))) {
            return word_from(first_len);
        }
        if self.is_word(class) {
            return word_from(0);
        }
        if class == Class::Number {
            return first_len;
        }
        //  ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*
        let is_symbol = |c: char| {
            let class = Class::of(c);
            class == Class::Other || (class == Class::Mark && self == Self::Qwen2)
        };
        let symbols_start = usize::from(first == ' ');
        if text[symbols_start..].chars().next().is_some_and(is_symbol) {
            let rest = text[symbols_start..].trim_start_matches(is_symbol);
            let rest = rest.trim_start_matches(['\r', '\n']);
            return text.len() - rest.len();
        }
        // Only blanks are left: \s*[\r\n]+ | \s+(?!\S) | \s+
        let mut run = 0;
        let mut after_newline = 0;
        let mut last = 0;
        for c in text.chars() {
            match Class::of(c) {
                Class::Newline => after_newline = run + c.len_utf8(),
                Class::Blank => {}
                _ => break,
            }
            last = c.len_utf8();
            run += last;
        }
        if after_newline > 0 {
            after_newline
        } else if run == text.len() || run == last {
            run
        } else {
            run - last
        }
    }
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)`. Without regard to case `s` is also `ſ` (U+017F).
fn contraction(text: &str) -> Option<usize> {
    let rest = text.strip_prefix('\'')?;
    let mut chars = rest.chars();
    match chars.next()? {
        's' | 'S' | 't' | 'T' | 'm' | 'M' | 'd' | 'D' => Some(2),
        'ſ' => Some(1 + 'ſ'.len_utf8()),
        'r' | 'R' | 'v' | 'V' => matches!(chars.next()?, 'e' | 'E').then_some(3),
        'l' | 'L' => matches!(chars.next()?, 'l' | 'L').then_some(3),
        _ => None,
    }
}

/// What the expressions tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Class {
    /// Neither of the others: punctuation, symbols, controls, unassigned.
    Other,
    /// `\p{L}`
    Letter,
    /// `\p{M}`
    Mark,
    /// `\p{N}`
    Number,
    /// `\r` and `\n`
    Newline,
    /// Any other `\s`
    Blank,
}

impl Class {
    fn of(c: char) -> Self {
        static CLASSES: LazyLock<Vec<Class>> = LazyLock::new(Class::table);
        CLASSES.get(c as usize).copied().unwrap_or(Self::Other)
    }

    /// One entry per code point, from the tables of `regex-syntax`, which the regex engine of `tokenizers` reads too.
    fn table() -> Vec<Class> {
        let mut table = vec![Class::Other; char::MAX as usize + 1];
        for (class, name) in [
            (Class::Letter, r"\p{L}"),
            (Class::Mark, r"\p{M}"),
            (Class::Number, r"\p{N}"),
            (Class::Blank, r"\s"),
            (Class::Newline, r"[\r\n]"),
        ] {
            let hir = regex_syntax::parse(name).expect("the expression is constant and valid");
            let regex_syntax::hir::HirKind::Class(regex_syntax::hir::Class::Unicode(set)) = hir.kind() else {
                unreachable!("a class parses to a class of code points");
            };
            for range in set.ranges() {
                table[range.start() as usize..=range.end() as usize].fill(class);
            }
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::tokenizer::pattern::Pattern;
    use tokenizers::utils::SysRegex;

    fn reference(pre: PreTokenizer) -> SysRegex {
        SysRegex::new(match pre {
            PreTokenizer::Qwen2 => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            }
            PreTokenizer::Qwen35 => {
                r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            }
        })
        .unwrap()
    }

    fn words(pre: PreTokenizer, mut text: &str) -> Vec<&str> {
        let mut words = Vec::new();
        while !text.is_empty() {
            let (word, rest) = text.split_at(pre.first_word(text));
            words.push(word);
            text = rest;
        }
        words
    }

    fn reference_words<'t>(regex: &SysRegex, text: &'t str) -> Vec<&'t str> {
        (regex).find_matches(text).unwrap().into_iter().map(|((from, to), _)| &text[from..to]).collect()
    }

    /// Random strings over an alphabet with every class, every contraction letter and every kind of blank.
    #[test]
    fn equals_the_regular_expression_on_random_text() {
        let alphabet: Vec<char> =
            "   \t\r\n\n\u{a0}\u{3000}\u{85}aZé中ก\u{e33}\u{301}\u{94d}\u{640}१9½_.,;'''sSſtrReEvVmlLdD🙂\u{200d}\u{fe0f}\u{0}<|>-"
                .chars()
                .collect();
        let mut seed = 1u64;
        let mut next = |n: usize| {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (seed >> 33) as usize % n
        };
        for pre in [PreTokenizer::Qwen2, PreTokenizer::Qwen35] {
            let regex = reference(pre);
            for _ in 0..20_000 {
                let text: String = (0..1 + next(12)).map(|_| alphabet[next(alphabet.len())]).collect();
                assert_eq!(words(pre, &text), reference_words(&regex, &text), "{pre:?} {text:?}");
            }
        }
    }

    #[test]
    fn a_million_blanks_are_one_word_and_nothing_is_lost() {
        let text = format!("a{}b", " ".repeat(1_000_000));
        let words = words(PreTokenizer::Qwen35, &text);
        assert_eq!(words.iter().map(|w| w.len()).collect::<Vec<_>>(), [1, 999_999, 2]);
    }
}
