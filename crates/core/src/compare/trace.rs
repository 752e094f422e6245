//! Where in the network two runs first part: the residual stream after every layer, compared row by row.

use serde::Serialize;

use super::figures::rounded;
use super::{CompareError, LogProbs, TensorDifference, compare_tensors};
use crate::gguf::GgufFile;
use crate::model::{LayerKind, Model, Row, RowInput, StepOutput, Window};

/// How two runs differ after a layer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct LayerDifference {
    /// `embedding`, `layer 3 (attention)`, ..., `logits`.
    pub name: String,
    /// What tensors of this stage are called: the start of their names.
    pub tensors: String,
    /// Root mean square of the difference over that of the reference, all rows.
    pub relative: f64,
    /// Largest difference of a value.
    pub largest: f64,
    /// The first row that differs.
    pub first_row: Option<usize>,
}

/// The stages of the network from the embedding to the logits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TraceReport {
    /// Tokens read.
    pub rows: usize,
    /// In the order they are computed.
    pub stages: Vec<LayerDifference>,
    /// Index of the first stage that differs by more than the tolerance.
    pub first: Option<usize>,
    /// The tensors of that stage that differ between the two files, where both were given.
    pub tensors: Vec<TensorDifference>,
}

/// Runs `tokens` through both models and compares the residual stream after every layer. A stage counts as different
/// beyond a relative difference of `tolerance` (0: any bit). `files` are the models' files, reference first; the tensors
/// of the first stage that differs are then compared too.
///
/// # Errors
/// [`CompareError::Input`] for models of different shape, [`CompareError::Model`].
pub fn trace(
    reference: &Model,
    tested: &Model,
    tokens: &[u32],
    tolerance: f64,
    files: Option<(&GgufFile, &GgufFile)>,
) -> Result<TraceReport, CompareError> {
    let (a, b) = (reference.config(), tested.config());
    if a.layer_kinds != b.layer_kinds || a.hidden != b.hidden || a.vocab != b.vocab {
        return Err(CompareError::Input(format!(
            "the models differ in shape: {} and {} layers, {} and {} wide, vocabularies of {} and {}",
            a.layer_kinds.len(),
            b.layer_kinds.len(),
            a.hidden,
            b.hidden,
            a.vocab,
            b.vocab
        )));
    }
    let (left, right) = (run(reference, tokens)?, run(tested, tokens)?);
    let mut stages = Vec::new();
    for (i, (l, r)) in left.trace.iter().flatten().zip(right.trace.iter().flatten()).enumerate() {
        let (name, tensors) = match i.checked_sub(1).map(|layer| (layer, a.layer_kinds.get(layer))) {
            Some((layer, kind)) => {
                let kind = match kind {
                    Some(LayerKind::Attention) => "attention",
                    _ => "delta net",
                };
                (format!("layer {layer} ({kind} + experts)"), format!("blk.{layer}."))
            }
            None => ("embedding".to_owned(), "token_embd".to_owned()),
        };
        stages.push(stage(name, tensors, l, r, a.hidden));
    }
    let probabilities = |output: &StepOutput| -> Vec<f32> {
        output
            .logits
            .chunks_exact(a.vocab)
            .flat_map(|row| {
                let row = LogProbs::from_logits(row);
                (0..a.vocab as u32).map(move |id| row.log_prob(id) as f32)
            })
            .collect()
    };
    stages.push(stage("logits".into(), "output".into(), &probabilities(&left), &probabilities(&right), a.vocab));
    let beyond = |stage: &LayerDifference| stage.relative > tolerance || stage.relative.is_nan();
    let first = stages.iter().position(|stage| stage.first_row.is_some() && beyond(stage));
    let tensors = match (first, files) {
        (Some(first), Some((reference, tested))) => compare_tensors(reference, tested, &stages[first].tensors)?,
        _ => Vec::new(),
    };
    Ok(TraceReport { rows: tokens.len(), stages, first, tensors })
}

fn run(model: &Model, tokens: &[u32]) -> Result<StepOutput, CompareError> {
    if tokens.is_empty() {
        return Err(CompareError::Input("a prompt without a token".into()));
    }
    let mut state = model.new_state(tokens.len())?;
    let row = |(i, &token): (usize, &u32)| Row {
        slot: 0,
        input: RowInput::Token(token),
        position: [i as u32; 3],
        want_logits: i + 1 == tokens.len(),
        want_hidden: false,
    };
    let window = Window { rows: tokens.iter().enumerate().map(row).collect(), verify: Vec::new() };
    let mut output = StepOutput { trace: Some(Vec::new()), ..StepOutput::default() };
    model.forward(&window, &mut [&mut state], &mut output)?;
    Ok(output)
}

fn stage(name: String, tensors: String, reference: &[f32], tested: &[f32], width: usize) -> LayerDifference {
    let mut difference = 0.0;
    let mut size = 0.0;
    let mut largest: f64 = 0.0;
    let mut first_row = None;
    for (i, (&a, &b)) in reference.iter().zip(tested).enumerate() {
        let by = f64::from(b) - f64::from(a);
        if by != 0.0 {
            first_row.get_or_insert(i / width.max(1));
        }
        difference += by * by;
        size += f64::from(a) * f64::from(a);
        largest = largest.max(by.abs());
    }
    let relative = (difference / f64::max(size, f64::MIN_POSITIVE)).sqrt();
    LayerDifference { name, tensors, relative: rounded(relative), largest: rounded(largest), first_row }
}
