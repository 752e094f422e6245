//! Saved log-probabilities in the format of `llama-perplexity --kl-divergence-base`, read and written.
//!
//! Little-endian: the eight bytes `_logits_`; `n_ctx`, vocabulary size and number of chunks as 32-bit integers; the tokens of
//! all chunks as 32-bit integers; then for every scored position a row of 16-bit words: scale and lowest log-probability
//! as two 32-bit floats in the first four words, then one word `q` per token (padded to an even number), which stands
//! for `scale * q + lowest`. Nothing more than 16 below the best logit is kept apart from the lowest value.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use super::{ChunkedText, CompareError, LogProbs};
use crate::output::{Existing, OutputFile};

const MAGIC: &[u8; 8] = b"_logits_";
/// How far below the best logit values are told apart.
const DEPTH: f32 = 16.0;

/// Words per row.
fn row_words(vocab: usize) -> usize {
    4 + vocab.next_multiple_of(2)
}

/// Reads a file position by position.
#[derive(Debug)]
pub struct BaseReader {
    file: BufReader<File>,
    name: String,
    vocab: usize,
    text: ChunkedText,
    row: Vec<u8>,
    rows_read: usize,
}

impl BaseReader {
    /// Whether the file at `path` starts like one of these.
    pub fn recognizes(path: &Path) -> bool {
        let mut magic = [0; 8];
        File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && &magic == MAGIC
    }

    /// Opens a file, checks its header against its size and reads its tokens.
    ///
    /// # Errors
    /// [`CompareError::File`] naming what does not fit, [`CompareError::Io`].
    pub fn open(path: &Path) -> Result<Self, CompareError> {
        let name = path.display().to_string();
        let bad = |problem: String| CompareError::File { file: name.clone(), problem };
        let io = |source| CompareError::Io { file: name.clone(), source };
        let file = File::open(path).map_err(io)?;
        let size = file.metadata().map_err(io)?.len();
        let mut file = BufReader::with_capacity(1 << 20, file);
        let mut header = [0; 20];
        file.read_exact(&mut header)
            .ok()
            .filter(|()| header.starts_with(MAGIC))
            .ok_or_else(|| bad("not a file of saved log-probabilities (it does not start with _logits_)".into()))?;
        let number = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let (n_ctx, vocab, chunks) = (number(8) as u64, number(12) as u64, number(16) as u64);
        if !(4..=1 << 24).contains(&n_ctx) || !(1..=1 << 24).contains(&vocab) || !(1..=1 << 24).contains(&chunks) {
            return Err(bad(format!(
                "{chunks} chunks of {n_ctx} tokens over a vocabulary of {vocab} is no usable size"
            )));
        }
        let scored = n_ctx - 1 - n_ctx / 2;
        let expected =
            u128::from(20 + 4 * n_ctx * chunks) + u128::from(chunks * scored) * 2 * row_words(vocab as usize) as u128;
        if u128::from(size) < expected {
            return Err(bad(format!(
                "{size} bytes long, but {chunks} chunks of {n_ctx} tokens over a vocabulary of {vocab} take {expected}"
            )));
        }
        let mut bytes = vec![0; (4 * n_ctx * chunks) as usize];
        file.read_exact(&mut bytes).map_err(io)?;
        let tokens: Vec<u32> = bytes.chunks_exact(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        if let Some(token) = tokens.iter().find(|&&token| u64::from(token) >= vocab) {
            return Err(bad(format!("token {token} is outside the vocabulary of {vocab}")));
        }
        let text = ChunkedText { tokens, n_ctx: n_ctx as usize };
        let vocab = vocab as usize;
        Ok(Self { file, name, vocab, text, row: vec![0; 2 * row_words(vocab)], rows_read: 0 })
    }

    /// The text the file was made with.
    pub fn text(&self) -> &ChunkedText {
        &self.text
    }

    /// Tokens in the vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    pub(super) fn next(&mut self, out: &mut LogProbs) -> Result<(), CompareError> {
        self.file.read_exact(&mut self.row).map_err(|source| CompareError::Io { file: self.name.clone(), source })?;
        let float =
            |at: usize| f32::from_le_bytes([self.row[at], self.row[at + 1], self.row[at + 2], self.row[at + 3]]);
        let (scale, lowest) = (float(0), float(4));
        if !scale.is_finite() || scale < 0.0 || !lowest.is_finite() {
            return Err(CompareError::File {
                file: self.name.clone(),
                problem: format!("position {}: scale {scale} and lowest value {lowest}", self.rows_read),
            });
        }
        self.rows_read += 1;
        let words = self.row[8..].chunks_exact(2).take(self.vocab);
        out.values.clear();
        out.values.extend(words.map(|word| scale * f32::from(u16::from_le_bytes([word[0], word[1]])) + lowest));
        out.log_sum = 0.0;
        out.truncated = true;
        Ok(())
    }
}

/// Writes a file position by position; it appears under its name once it is complete.
pub struct BaseWriter {
    file: OutputFile,
    vocab: usize,
    rows_left: usize,
    row: Vec<u8>,
}

impl BaseWriter {
    /// Starts a file for `text`.
    ///
    /// # Errors
    /// [`CompareError::Output`]
    pub fn create(path: &Path, text: &ChunkedText, vocab: usize) -> Result<Self, CompareError> {
        let mut file = OutputFile::create(path)?;
        let mut header = MAGIC.to_vec();
        for number in [text.n_ctx, vocab, text.chunks()] {
            header.extend((number as u32).to_le_bytes());
        }
        header.extend(text.tokens.iter().flat_map(|token| token.to_le_bytes()));
        file.append(&header)?;
        let rows_left = text.chunks() * text.scored();
        Ok(Self { file, vocab, rows_left, row: Vec::new() })
    }

    /// Appends the next position.
    ///
    /// # Errors
    /// [`CompareError::Output`]
    pub fn write(&mut self, row: &LogProbs) -> Result<(), CompareError> {
        let max = row.values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let min = row.values.iter().copied().fold(f32::INFINITY, f32::min).max(max - DEPTH);
        let lowest = (f64::from(min) - row.log_sum) as f32;
        let scale = (max - min) / 65535.0;
        self.row.clear();
        self.row.extend(scale.to_le_bytes());
        self.row.extend(lowest.to_le_bytes());
        let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
        for &value in row.values.iter().take(self.vocab) {
            // The conversion of a float to an integer saturates, and `round_ties_even` is what llama.cpp's trick does.
            let word = if value > min { ((value - min) * inverse).round_ties_even() as u16 } else { 0 };
            self.row.extend(word.to_le_bytes());
        }
        self.row.resize(2 * row_words(self.vocab), 0);
        self.rows_left = self.rows_left.saturating_sub(1);
        Ok(self.file.append(&self.row)?)
    }

    /// Completes the file and gives it its name.
    ///
    /// # Errors
    /// [`CompareError::Input`] where positions are missing, [`CompareError::Output`].
    pub fn finish(self) -> Result<(), CompareError> {
        if self.rows_left > 0 {
            return Err(CompareError::Input(format!("{} positions were not written", self.rows_left)));
        }
        Ok(self.file.finish(Existing::Replace)?)
    }
}
