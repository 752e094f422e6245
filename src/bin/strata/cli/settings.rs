//! Sampling and draft flags, for every command that generates.

use super::failure::BadInput;
use anyhow::Result;
use clap::ValueEnum;
use std::hash::{BuildHasher, Hasher, RandomState};
use strata_core::engine::{MtpSetting, NgramOptions, Sampling};
use strata_core::model::Model;

/// `--think`
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Think {
    /// Reason first
    Yes,
    /// Answer at once
    No,
}

/// How tokens are chosen. Without any of these flags the most likely token is taken.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Sampling")]
pub struct SamplingArgs {
    /// Temperature; 0 takes the most likely token
    #[arg(long, visible_alias = "temperature", value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    temp: f32,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Keep the most likely tokens whose probabilities reach P
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_negative_numbers = true)]
    top_p: f32,
    /// Drop tokens less likely than this share of the most likely one
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    min_p: f32,
    /// Penalty for tokens among the latest; 1 is none
    #[arg(long, value_name = "X", default_value_t = 1.0, allow_negative_numbers = true)]
    repeat_penalty: f32,
    /// How many of the latest tokens --repeat-penalty looks at; -1 for all
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true)]
    repeat_last_n: i64,
    /// Penalty for every token already generated
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Penalty for a generated token for each time it was generated
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Add BIAS to the logit of token ID, as in 15043+1 or 15043-inf; may be repeated
    #[arg(long, value_name = "ID±BIAS", value_parser = logit_bias, allow_hyphen_values = true)]
    logit_bias: Vec<(u32, f32)>,
    /// Seed of the sampler; -1 takes a new one
    #[arg(short, long, value_name = "N", default_value = "0", value_parser = seed, allow_negative_numbers = true)]
    seed: Seed,
    /// End the answer at this text; may be repeated
    #[arg(short = 'r', long, visible_alias = "reverse-prompt", value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Go on past the model's end tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Most tokens of reasoning, after which it is closed
    #[arg(long, visible_alias = "thinking-budget", value_name = "N")]
    pub reasoning_budget: Option<usize>,
}

impl SamplingArgs {
    /// Checks ranges.
    pub fn check(&self) -> Result<()> {
        let bad = |flag: &str, found: f32, expected: &str| {
            Err(BadInput::new(format!("{flag} is {found}, expected {expected}")).into())
        };
        if !(self.temp >= 0.0 && self.temp.is_finite()) {
            return bad("--temp", self.temp, "0 or more");
        }
        if !(0.0..=1.0).contains(&self.top_p) {
            return bad("--top-p", self.top_p, "0 to 1");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return bad("--min-p", self.min_p, "0 to 1");
        }
        if !(self.repeat_penalty > 0.0 && self.repeat_penalty.is_finite()) {
            return bad("--repeat-penalty", self.repeat_penalty, "more than 0");
        }
        if self.stop.iter().any(String::is_empty) {
            return Err(BadInput::new("--stop is empty, expected a text").into());
        }
        Ok(())
    }

    /// The engine's form.
    pub fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: usize::try_from(self.repeat_last_n).unwrap_or(usize::MAX),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            logit_bias: self.logit_bias.clone(),
            seed: self.seed.number(),
        }
    }

    /// One line where flags were given that choose among likely tokens while the most likely one is always taken.
    pub fn warn_if_ignored(&self) {
        let set = [
            ("--top-k", self.top_k != 0),
            ("--top-p", self.top_p != 1.0),
            ("--min-p", self.min_p != 0.0),
            ("--seed", self.seed != Seed::Number(0)),
        ];
        let set: Vec<_> = set.iter().filter(|(_, given)| *given).map(|(flag, _)| *flag).collect();
        if self.temp == 0.0 && !set.is_empty() {
            let verb = if set.len() == 1 { "changes" } else { "change" };
            strata::errln!(
                "strata: warning: {} {verb} nothing without --temp: the most likely token is taken",
                set.join(", ")
            );
        }
    }
}

/// Speculative decoding. It never changes the text.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Drafts (they change the speed, never the text)")]
pub struct DraftArgs {
    /// Tokens drafted by the MTP head: 0 to 6, or `auto` for as many as pay
    #[arg(long, value_name = "N", default_value = "auto", value_parser = mtp)]
    mtp: MtpSetting,
    /// Draft by looking up the latest tokens in the text so far: `ngram` or `ngram:N` (N tokens must match)
    #[arg(long, value_name = "KIND")]
    draft: Option<String>,
    /// End a chain of drafts before a token less likely than this
    #[arg(long, value_name = "P", default_value_t = 0.0, allow_negative_numbers = true)]
    pub draft_p_min: f32,
    /// Draft with the first N tokens of the vocabulary only; by default with all, and with `--mtp auto` with as many as pay
    #[arg(long, value_name = "N")]
    pub draft_vocab: Option<usize>,
}

impl DraftArgs {
    /// The MTP head's part.
    pub fn mtp(&self) -> MtpSetting {
        self.mtp
    }

    /// Refuses a number of MTP drafts for a model without an MTP head.
    pub fn check_head(&self, model: &Model, name: &str) -> Result<()> {
        if matches!(self.mtp, MtpSetting::Depth(_)) && !model.has_mtp() {
            return Err(BadInput::new(format!("{name}: --mtp needs an MTP head, and this file has none"))
                .hint("put it back with `strata convert FILE --mtp-from ORIGINAL -o NEW`, or leave --mtp out")
                .into());
        }
        Ok(())
    }

    /// The n-gram drafter's part.
    pub fn ngram(&self) -> Result<Option<NgramOptions>> {
        let Some(kind) = &self.draft else { return Ok(None) };
        let bad = || BadInput::new(format!("--draft is {kind:?}, expected ngram or ngram:N with N from 1 to 64"));
        let (name, min_match) = kind.split_once(':').map_or((kind.as_str(), None), |(name, n)| (name, Some(n)));
        if name != "ngram" {
            return Err(bad().into());
        }
        let mut options = NgramOptions::default();
        if let Some(n) = min_match {
            options.min_match = n.parse().ok().filter(|n| (1..=64).contains(n)).ok_or_else(bad)?;
            options.long_match = options.long_match.max(options.min_match);
        }
        Ok(Some(options))
    }
}

/// `--seed`
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seed {
    /// This one.
    Number(u64),
    /// A new one each time.
    Random,
}

impl Seed {
    fn number(self) -> u64 {
        match self {
            Seed::Number(seed) => seed,
            // The standard library seeds every hasher anew.
            Seed::Random => RandomState::new().build_hasher().finish(),
        }
    }
}

/// Parses a seed; -1 is a new one, as in llama.cpp.
pub fn seed(text: &str) -> Result<Seed, String> {
    match text {
        "-1" => Ok(Seed::Random),
        _ => text.parse().map(Seed::Number).map_err(|_| "expected a whole number of at least 0, or -1".to_owned()),
    }
}

/// Parses a number of at least 1.
pub fn positive(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n > 0).ok_or_else(|| "expected a number of at least 1".to_owned())
}

/// Parses a bound for a difference: a finite number of at least 0.
pub fn bound(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.parse().ok();
    number.filter(|n| n.is_finite() && *n >= 0.0).ok_or_else(|| "expected a finite number of at least 0".to_owned())
}

fn mtp(text: &str) -> Result<MtpSetting, String> {
    match text {
        "auto" => Ok(MtpSetting::Auto),
        "off" | "0" => Ok(MtpSetting::Off),
        _ => text
            .parse()
            .ok()
            .filter(|n| (1..=strata_core::engine::MAX_MTP_DEPTH).contains(n))
            .map(MtpSetting::Depth)
            .ok_or_else(|| "expected auto or 0 to 6".to_owned()),
    }
}

fn logit_bias(text: &str) -> Result<(u32, f32), String> {
    let at = text.find(['+', '-']).ok_or("expected ID+BIAS or ID-BIAS")?;
    let id = text[..at].parse().map_err(|_| "the part before the sign must be a token id".to_owned())?;
    let bias: f32 = text[at..].parse().map_err(|_| "the part after the id must be a number or -inf".to_owned())?;
    if bias.is_nan() || bias == f32::INFINITY {
        return Err("the bias must be a number or -inf".to_owned());
    }
    Ok((id, bias))
}
