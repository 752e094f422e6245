//! Token-by-token comparison of a run with a reference, teacher-forced: both sides read the reference's tokens, so every
//! step is judged on its own.
//!
//! Where the most likely tokens differ, the step is a **near tie** if both sides hold the two candidates within a small
//! gap of each other, and a **mismatch** otherwise: two correct implementations round differently, but neither prefers
//! a clearly worse token.

use serde::{Deserialize, Serialize};

use super::chunks::read;
use super::figures::rounded;
use super::{CompareError, Figures, LogProbs};
use crate::model::{Model, SlotState, StepOutput};

/// Rows per window while reading given tokens.
const ROWS: usize = 16;

/// A recorded run. As JSON it is what `strata parity --save` writes, and what `scripts/make_greedy_goldens.py` makes of
/// llama.cpp's answers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Reference {
    /// One entry per prompt or text.
    pub cases: Vec<ReferenceCase>,
}

/// One prompt with the tokens that follow it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ReferenceCase {
    /// For the report.
    pub name: String,
    /// Token ids of the prompt.
    pub prompt: Vec<u32>,
    /// The token after the prompt and each one before it, chosen by the reference or given by a text.
    pub tokens: Vec<u32>,
    /// What the prompt was made of, so that the tested side can encode it for itself; `None` for prompts given as tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<PromptSource>,
    /// Per token of `tokens`: the candidates at that place, best first, with their log-probabilities.
    pub top: Vec<Vec<(u32, f64)>>,
}

/// A prompt before it is encoded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptSource {
    /// What the user says, or the whole text.
    pub text: String,
    /// Without the chat template.
    pub raw: bool,
}

/// A candidate for the next token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Candidate {
    /// Token id.
    pub id: u32,
    /// `ln p`
    pub log_prob: f64,
}

/// A step whose most likely token differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Difference {
    /// Index into the case's tokens.
    pub step: usize,
    /// By how much the reference prefers its token to the tested side's, in nats.
    pub reference_gap: f64,
    /// By how much the tested side prefers its token to the reference's, in nats.
    pub tested_gap: f64,
    /// Both gaps are within the limit.
    pub near_tie: bool,
    /// The reference's candidates, best first.
    pub reference: Vec<Candidate>,
    /// The tested side's candidates, best first.
    pub tested: Vec<Candidate>,
}

/// Prompts that are not even the same text: another tokenizer or chat template.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PromptDifference {
    /// Index of the first token that differs.
    pub position: usize,
    /// The reference's token there, if it has one.
    pub reference: Option<u32>,
    /// The tested side's token there, if it has one.
    pub tested: Option<u32>,
}

/// What a case showed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CaseReport {
    /// The case's name.
    pub name: String,
    /// Steps compared.
    pub steps: usize,
    /// Steps with another most likely token, near ties included, in order.
    pub differences: Vec<Difference>,
    /// Set where the prompts differ; nothing else is compared then.
    pub prompt: Option<PromptDifference>,
    /// Largest difference of log-probability over the reference's candidates, in nats.
    #[serde(serialize_with = "as_figure")]
    pub largest_difference: f64,
    /// Sum of those differences, for the mean.
    #[serde(skip)]
    difference_sum: f64,
    #[serde(skip)]
    candidates: usize,
}

fn as_figure<S: serde::Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(rounded(*value))
}

/// What all cases showed.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct ParityReport {
    /// One per case of the reference.
    pub cases: Vec<CaseReport>,
}

impl ParityReport {
    /// Steps whose most likely token differs clearly, and prompts that differ.
    pub fn mismatches(&self) -> usize {
        let clear = |case: &CaseReport| case.differences.iter().filter(|difference| !difference.near_tie).count();
        self.cases.iter().map(|case| clear(case) + usize::from(case.prompt.is_some())).sum()
    }

    /// Steps whose most likely token differs within the limit of a near tie.
    pub fn near_ties(&self) -> usize {
        self.cases.iter().flat_map(|case| &case.differences).filter(|difference| difference.near_tie).count()
    }

    /// Largest difference of log-probability, in nats.
    pub fn largest_difference(&self) -> f64 {
        self.cases.iter().map(|case| case.largest_difference).fold(0.0, f64::max)
    }

    /// All figures, for a report.
    pub fn figures(&self) -> Figures {
        let mut figures = Figures::default();
        let steps: usize = self.cases.iter().map(|case| case.steps).sum();
        let candidates: usize = self.cases.iter().map(|case| case.candidates).sum();
        let sum: f64 = self.cases.iter().map(|case| case.difference_sum).sum();
        figures.add("cases", "prompts", self.cases.len() as f64, "");
        figures.add("steps", "tokens compared", steps as f64, "");
        figures.add("mismatches", "clear mismatches", self.mismatches() as f64, "");
        figures.add("near_ties", "near ties", self.near_ties() as f64, "");
        figures.add("largest_difference", "largest difference of a log-probability", self.largest_difference(), "nats");
        figures.add("mean_difference", "mean difference", sum / candidates.max(1) as f64, "nats");
        figures
    }
}

/// Log-probabilities of `model` after the prompt and after each of `tokens` but the last: one row per token.
///
/// # Errors
/// [`CompareError::Model`], such as for a prompt longer than the context.
pub fn score(
    model: &Model,
    prompt: &[u32],
    tokens: &[u32],
    each: &mut dyn FnMut(usize, &LogProbs) -> Result<(), CompareError>,
) -> Result<(), CompareError> {
    let Some((&last, before)) = prompt.split_last() else {
        return Err(CompareError::Input("a prompt without a token".into()));
    };
    let mut state = model.new_state((prompt.len() + tokens.len()).max(1))?;
    let mut output = StepOutput::default();
    for part in before.chunks(128) {
        read(model, &mut state, &mut output, part, false)?;
    }
    let given: Vec<u32> =
        std::iter::once(last).chain(tokens.iter().copied().take(tokens.len().saturating_sub(1))).collect();
    for (block, part) in given.chunks(ROWS).enumerate() {
        read(model, &mut state, &mut output, part, true)?;
        let vocab = output.logits.len() / part.len();
        for (i, logits) in output.logits.chunks_exact(vocab).enumerate() {
            each(block * ROWS + i, &LogProbs::from_logits(logits))?;
        }
    }
    Ok(())
}

/// Records how `model` goes on from `prompt`: greedily for `steps` tokens, or up to one of the tokens `ends` that end an
/// answer; or along `given` tokens. Keeps `keep` candidates per step.
///
/// # Errors
/// [`CompareError::Model`]
pub fn record(
    model: &Model,
    name: &str,
    prompt: &[u32],
    given: Option<&[u32]>,
    steps: usize,
    ends: &[u32],
    keep: usize,
) -> Result<ReferenceCase, CompareError> {
    let mut case = ReferenceCase { name: name.to_owned(), prompt: prompt.to_vec(), ..Default::default() };
    if let Some(given) = given {
        case.tokens = given.to_vec();
        score(model, prompt, given, &mut |_, row| {
            case.top.push(row.best(keep));
            Ok(())
        })?;
        return Ok(case);
    }
    if prompt.is_empty() {
        return Err(CompareError::Input("a prompt without a token".into()));
    }
    let mut state: SlotState = model.new_state(prompt.len() + steps)?;
    let mut output = StepOutput::default();
    let (last, before) = (&prompt[prompt.len() - 1..], &prompt[..prompt.len() - 1]);
    for part in before.chunks(128) {
        read(model, &mut state, &mut output, part, false)?;
    }
    let mut next = last.to_vec();
    for _ in 0..steps {
        read(model, &mut state, &mut output, &next, true)?;
        let row = LogProbs::from_logits(&output.logits);
        next[0] = row.top();
        case.tokens.push(next[0]);
        case.top.push(row.best(keep));
        if ends.contains(&next[0]) {
            break;
        }
    }
    Ok(case)
}

/// Compares `model` with a recorded case; `prompt` is the case's prompt as the tested side encodes it, where it does.
/// A difference is a near tie up to a gap of `near_tie` nats on both sides. The comparison ends with the first of the tokens
/// `ends`, which end an answer: what a model says after that means nothing.
///
/// # Errors
/// [`CompareError::Model`], and [`CompareError::Input`] for a case that does not hold together.
pub fn compare(
    model: &Model,
    case: &ReferenceCase,
    prompt: Option<&[u32]>,
    near_tie: f64,
    ends: &[u32],
) -> Result<CaseReport, CompareError> {
    let mut report = CaseReport {
        name: case.name.clone(),
        steps: 0,
        differences: Vec::new(),
        prompt: None,
        largest_difference: 0.0,
        difference_sum: 0.0,
        candidates: 0,
    };
    if case.top.len() != case.tokens.len() || case.top.iter().any(Vec::is_empty) {
        return Err(CompareError::Input(format!(
            "case {}: {} tokens but {} lists of candidates",
            case.name,
            case.tokens.len(),
            case.top.len()
        )));
    }
    let vocab = model.config().vocab as u32;
    if let Some(id) = case.prompt.iter().chain(&case.tokens).find(|&&id| id >= vocab) {
        return Err(CompareError::Input(format!(
            "case {}: token {id} is outside the vocabulary of {vocab}",
            case.name
        )));
    }
    if let Some(prompt) = prompt.filter(|prompt| *prompt != case.prompt) {
        let position = prompt.iter().zip(&case.prompt).take_while(|(a, b)| a == b).count();
        let (reference, tested) = (case.prompt.get(position).copied(), prompt.get(position).copied());
        report.prompt = Some(PromptDifference { position, reference, tested });
        return Ok(report);
    }
    let steps = case.tokens.iter().position(|id| ends.contains(id)).map_or(case.tokens.len(), |last| last + 1);
    score(model, &case.prompt, &case.tokens[..steps], &mut |step, row| {
        report.step(step, &case.top[step], row, near_tie);
        Ok(())
    })?;
    Ok(report)
}

impl CaseReport {
    fn step(&mut self, step: usize, reference: &[(u32, f64)], tested: &LogProbs, near_tie: f64) {
        self.steps += 1;
        for &(id, log_prob) in reference {
            // In single precision: reading JSON can change the last bit of a double.
            let difference = f64::from((tested.log_prob(id) as f32 - log_prob as f32).abs());
            self.largest_difference = self.largest_difference.max(difference);
            self.difference_sum += difference;
            self.candidates += 1;
        }
        let (best, best_log_prob) = reference[0];
        let top = tested.top();
        if top == best {
            return;
        }
        // A token that is not among the reference's candidates is at least as far off as the last of them.
        let listed = reference.iter().find(|&&(id, _)| id == top);
        let reference_gap = best_log_prob - listed.unwrap_or(&reference[reference.len() - 1]).1;
        let tested_gap = tested.log_prob(top) - tested.log_prob(best);
        let candidate = |&(id, log_prob): &(u32, f64)| Candidate { id, log_prob: rounded(log_prob) };
        self.differences.push(Difference {
            step,
            reference_gap: rounded(reference_gap),
            tested_gap: rounded(tested_gap),
            near_tie: listed.is_some() && reference_gap <= near_tie && tested_gap <= near_tie,
            reference: reference.iter().take(4).map(candidate).collect(),
            tested: tested.best(4).iter().map(candidate).collect(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(reference: &[(u32, f64)], logits: &[f32]) -> CaseReport {
        let mut report = CaseReport {
            name: String::new(),
            steps: 0,
            differences: Vec::new(),
            prompt: None,
            largest_difference: 0.0,
            difference_sum: 0.0,
            candidates: 0,
        };
        report.step(0, reference, &LogProbs::from_logits(logits), 0.1);
        report
    }

    #[test]
    fn a_near_tie_passes_and_a_clear_gap_does_not() {
        let reference = [(0, -0.70), (1, -0.72), (2, -4.0)];
        assert!(step(&reference, &[5.0, 4.9, 1.0]).differences.is_empty());
        let tie = &step(&reference, &[4.95, 5.0, 1.0]).differences[0];
        assert!(tie.near_tie);
        assert!((tie.reference_gap - 0.02).abs() < 1e-9 && (tie.tested_gap - 0.05).abs() < 1e-6);
        // The reference sees a tie, the tested side a clear winner: one of them is wrong.
        assert!(!step(&reference, &[3.0, 5.0, 1.0]).differences[0].near_tie);
        // The tested side sees a tie between tokens the reference tells apart.
        assert!(!step(&reference, &[4.99, 1.0, 5.0]).differences[0].near_tie);
        // A token the reference does not even list.
        assert!(!step(&[(0, -0.7), (1, -0.7)], &[5.0, 4.0, 5.01]).differences[0].near_tie);
    }
}
