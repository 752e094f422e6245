//! A long text as `llama-perplexity` reads it: chunks of `n_ctx` tokens, each from an empty state, the first half read and
//! the second half scored.

use super::{BaseReader, CompareError};
use crate::model::{Model, Row, RowInput, SlotState, StepOutput, Window};

/// Rows per window where no logits are wanted.
const READ_ROWS: usize = 128;

/// A text cut into chunks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkedText {
    /// `chunks x n_ctx` tokens.
    pub tokens: Vec<u32>,
    /// Tokens per chunk.
    pub n_ctx: usize,
}

impl ChunkedText {
    /// Cuts `tokens` into as many whole chunks as there are, at most `limit`. What is left over is not read.
    ///
    /// # Errors
    /// [`CompareError::Input`] for a chunk of fewer than 4 tokens, or a text shorter than a chunk.
    pub fn new(mut tokens: Vec<u32>, n_ctx: usize, limit: Option<usize>) -> Result<Self, CompareError> {
        if n_ctx < 4 {
            return Err(CompareError::Input(format!("chunks of {n_ctx} tokens, expected at least 4")));
        }
        let chunks = (tokens.len() / n_ctx).min(limit.unwrap_or(usize::MAX));
        if chunks == 0 {
            return Err(CompareError::Input(format!(
                "the text has {} tokens, a chunk needs {n_ctx} (choose smaller chunks with -c)",
                tokens.len()
            )));
        }
        tokens.truncate(chunks * n_ctx);
        Ok(Self { tokens, n_ctx })
    }

    /// The number of chunks.
    pub fn chunks(&self) -> usize {
        self.tokens.len() / self.n_ctx
    }

    /// The first position of a chunk whose prediction is scored.
    pub fn first(&self) -> usize {
        self.n_ctx / 2
    }

    /// Scored positions per chunk. The last position predicts a token outside the chunk and is left out.
    pub fn scored(&self) -> usize {
        self.n_ctx - 1 - self.first()
    }

    /// The tokens of chunk `index`.
    pub fn chunk(&self, index: usize) -> &[u32] {
        &self.tokens[index * self.n_ctx..(index + 1) * self.n_ctx]
    }
}

/// Log-probabilities of one position over the vocabulary.
#[derive(Debug, Clone, Default)]
pub struct LogProbs {
    /// Logits, or log-probabilities where `log_sum` is 0.
    pub(super) values: Vec<f32>,
    /// `ln(sum(exp(values)))`
    pub(super) log_sum: f64,
    /// The values come from a file that holds nothing below about 1e-7: those entries carry no information.
    pub(super) truncated: bool,
}

impl LogProbs {
    /// From logits.
    pub fn from_logits(logits: &[f32]) -> Self {
        let mut this = Self::default();
        this.set_logits(logits);
        this
    }

    fn set_logits(&mut self, logits: &[f32]) {
        self.values.clear();
        self.values.extend_from_slice(logits);
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit - max).exp()).sum();
        self.log_sum = f64::from(max) + sum.ln();
        self.truncated = false;
    }

    /// `ln p(id)`
    pub fn log_prob(&self, id: u32) -> f64 {
        self.values.get(id as usize).map_or(f64::NEG_INFINITY, |&value| f64::from(value) - self.log_sum)
    }

    /// The most likely token; of equals the one with the lowest id.
    pub fn top(&self) -> u32 {
        let mut top = 0;
        for (id, value) in self.values.iter().enumerate() {
            if *value > self.values[top] {
                top = id;
            }
        }
        top as u32
    }

    /// The `n` most likely tokens with their log-probabilities, best first.
    pub fn best(&self, n: usize) -> Vec<(u32, f64)> {
        let mut ids: Vec<u32> = (0..self.values.len() as u32).collect();
        let order = |&a: &u32, &b: &u32| self.values[b as usize].total_cmp(&self.values[a as usize]).then(a.cmp(&b));
        let n = n.min(ids.len());
        if n < ids.len() {
            ids.select_nth_unstable_by(n, order);
            ids.truncate(n);
        }
        ids.sort_by(order);
        ids.into_iter().map(|id| (id, self.log_prob(id))).collect()
    }
}

/// Where log-probabilities come from.
pub enum Source<'a> {
    /// A model that reads the chunks now.
    Model {
        /// The model.
        model: &'a Model,
        /// Its slot.
        state: Box<SlotState>,
        /// Replaces the first token of every chunk, for models that want it.
        bos: Option<u32>,
        /// Reused from step to step.
        output: Box<StepOutput>,
    },
    /// Log-probabilities saved before.
    File(Box<BaseReader>),
}

impl<'a> Source<'a> {
    /// A model, with room for chunks of `n_ctx` tokens.
    ///
    /// # Errors
    /// [`CompareError::Model`] for a context the model does not have.
    pub fn model(model: &'a Model, n_ctx: usize, bos: Option<u32>) -> Result<Self, CompareError> {
        let state = Box::new(model.new_state(n_ctx)?);
        Ok(Self::Model { model, state, bos, output: Box::default() })
    }

    /// Starts chunk `index`, from an empty state: nothing leaks from the chunk before.
    pub(super) fn begin(&mut self, text: &ChunkedText, index: usize) -> Result<(), CompareError> {
        match self {
            Self::File(_) => Ok(()),
            Self::Model { model, state, bos, output } => {
                state.reset();
                let mut tokens = text.chunk(index)[..text.first()].to_vec();
                if let (Some(bos), Some(first)) = (bos, tokens.first_mut()) {
                    *first = *bos;
                }
                for part in tokens.chunks(READ_ROWS) {
                    read(model, state, output, part, false)?;
                }
                Ok(())
            }
        }
    }

    /// The log-probabilities of the next `tokens.len()` positions of the chunk, which hold `tokens`.
    pub(super) fn next(&mut self, tokens: &[u32], rows: &mut Vec<LogProbs>) -> Result<(), CompareError> {
        rows.resize_with(tokens.len(), LogProbs::default);
        match self {
            Self::File(reader) => rows.iter_mut().try_for_each(|row| reader.next(row)),
            Self::Model { model, state, output, .. } => {
                read(model, state, output, tokens, true)?;
                let vocab = output.logits.len() / tokens.len().max(1);
                for (row, logits) in rows.iter_mut().zip(output.logits.chunks_exact(vocab.max(1))) {
                    row.set_logits(logits);
                }
                Ok(())
            }
        }
    }
}

/// Reads text tokens into a slot, which goes on from what it holds.
pub(super) fn read(
    model: &Model,
    state: &mut SlotState,
    output: &mut StepOutput,
    tokens: &[u32],
    want_logits: bool,
) -> Result<(), CompareError> {
    let held = state.rows();
    let row = |(i, &token): (usize, &u32)| Row {
        slot: 0,
        input: RowInput::Token(token),
        position: [(held + i) as u32; 3],
        want_logits,
        want_hidden: false,
    };
    let window = Window { rows: tokens.iter().enumerate().map(row).collect(), verify: Vec::new() };
    Ok(model.forward(&window, &mut [state], output)?)
}
