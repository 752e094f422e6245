//! What is measured: tests from the lists on the command line, and the prompts they read.

use anyhow::Result;
use std::fmt;
use std::str::FromStr;
use strata_core::engine::{MAX_MTP_DEPTH, MtpSetting};
use strata_core::text::{Specials, Tokenizer};

use crate::cli::failure::BadInput;

/// What a test measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Reading a prompt.
    Prompt,
    /// Generating token by token.
    Decode,
}

/// One line of the result.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Test {
    /// Reading or generating.
    pub kind: Kind,
    /// Rows read or tokens generated per request.
    pub tokens: usize,
    /// Rows each slot holds before.
    pub depth: usize,
    /// Requests at the same time.
    pub parallel: usize,
    /// Draft setting.
    pub mtp: Mtp,
}

impl Test {
    /// Rows a slot needs for the test.
    pub fn context(&self) -> usize {
        self.depth + self.tokens + 2
    }

    /// `pp512` or `tg128`.
    pub fn name(&self) -> String {
        match self.kind {
            Kind::Prompt => format!("pp{}", self.tokens),
            Kind::Decode => format!("tg{}", self.tokens),
        }
    }
}

/// A draft setting, as `--mtp` takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mtp(pub MtpSetting);

impl FromStr for Mtp {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match (s, s.parse::<usize>()) {
            ("off" | "0", _) => Ok(Mtp(MtpSetting::Off)),
            ("auto", _) => Ok(Mtp(MtpSetting::Auto)),
            (_, Ok(n)) if n <= MAX_MTP_DEPTH => Ok(Mtp(MtpSetting::Depth(n))),
            _ => Err(format!("expected off, auto or 1 to {MAX_MTP_DEPTH}")),
        }
    }
}

impl fmt::Display for Mtp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            MtpSetting::Off => f.write_str("off"),
            MtpSetting::Auto => f.write_str("auto"),
            MtpSetting::Depth(n) => write!(f, "{n}"),
        }
    }
}

/// All combinations; tests that can share an engine (same parallel and draft setting) come one after the other. Drafts
/// do not change how a prompt is read, so prompts are measured once, without them.
pub fn tests(pp: &[usize], tg: &[usize], depth: &[usize], parallel: &[usize], mtp: &[Mtp]) -> Vec<Test> {
    let mut all = Vec::new();
    for &parallel in parallel {
        for (i, &mtp) in mtp.iter().enumerate() {
            for &depth in depth {
                if i == 0 {
                    let test = |&tokens| Test { kind: Kind::Prompt, tokens, depth, parallel, mtp };
                    all.extend(pp.iter().filter(|n| **n > 0).map(test));
                }
                let test = |&tokens| Test { kind: Kind::Decode, tokens, depth, parallel, mtp };
                all.extend(tg.iter().filter(|n| **n > 0).map(test));
            }
        }
    }
    all
}

/// The text that prompts are cut from.
pub struct Text(Vec<u32>);

/// Prompts start this many tokens apart, so that no two share their beginning.
const STRIDE: usize = 37;

impl Text {
    /// Tokenizes the text; the built-in one where `own` is absent.
    pub fn new(tokenizer: &Tokenizer, own: Option<&str>) -> Result<Text> {
        let ids = tokenizer.encode(own.unwrap_or(include_str!("prompt.txt")), Specials::AsText)?;
        if ids.len() < 2 * STRIDE {
            return Err(BadInput::new(format!(
                "the prompt file has {} tokens, expected at least {}",
                ids.len(),
                2 * STRIDE
            ))
            .into());
        }
        Ok(Text(ids))
    }

    /// `tokens` tokens for the `number`th prompt: the text from another place on, again and again.
    pub fn prompt(&self, number: usize, tokens: usize) -> Vec<u32> {
        (0..tokens).map(|i| self.0[(number * STRIDE + i) % self.0.len()]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_are_measured_once_and_decoding_with_every_draft_setting() {
        let mtp = [Mtp(MtpSetting::Off), Mtp(MtpSetting::Depth(2))];
        let tests = tests(&[512], &[64, 0], &[0, 100], &[1, 4], &mtp);
        let count = |kind| tests.iter().filter(|t| t.kind == kind).count();
        assert_eq!((count(Kind::Prompt), count(Kind::Decode)), (4, 8));
        let groups = tests.chunk_by(|a, b| (a.parallel, a.mtp) == (b.parallel, b.mtp)).count();
        assert_eq!(groups, 4, "each engine is started once");
    }

    #[test]
    fn draft_settings_are_read_and_written() {
        for s in ["off", "auto", "1", "6"] {
            assert_eq!(s.parse::<Mtp>().unwrap().to_string(), s);
        }
        assert!("7".parse::<Mtp>().is_err() && "many".parse::<Mtp>().is_err());
    }
}
