//! A toy language model for tests of the engine itself: the next token is a function of a hash over everything read, so any row
//! read twice, left out, or read after the wrong ones changes all that follows. Its MTP head checks what it is fed.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use super::target::Target;
use crate::model::{MtpRow, RowInput, StepOutput, Window};
use crate::text::{Tokenizer, TokenizerParts};

pub(crate) const VOCAB: usize = 300;
/// Ends an answer.
pub(crate) const END: u32 = 256;
/// Makes every window that holds it panic, when [`Toy::poisoned`].
pub(crate) const POISON: u32 = 299;

/// The model.
#[derive(Default)]
pub(crate) struct Toy {
    pub(crate) poisoned: bool,
    /// Time a window and a draft step take.
    pub(crate) window_time: Duration,
    pub(crate) draft_time: Duration,
    /// The head is right unless the hash is a multiple of this; 0: always right.
    pub(crate) head_misses: u64,
    /// Tokens go round in circles of this length, for n-gram drafts; 0: they do not.
    pub(crate) period: u64,
}

/// What a row adds.
fn key(input: &RowInput) -> u64 {
    match input {
        RowInput::Token(token) => u64::from(*token),
        RowInput::Embedding { data, start } => (1 << 40) | u64::from(data[*start].to_bits()),
    }
}

fn mix(hash: u64, key: u64) -> u64 {
    let x = (hash ^ key.wrapping_add(0x1234_5678)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (x >> 32)
}

/// A hash as four exact floats, and back.
fn to_hidden(hash: u64) -> [f32; 4] {
    [0, 16, 32, 48].map(|shift| ((hash >> shift) & 0xffff) as f32)
}

fn of_hidden(hidden: &[f32]) -> u64 {
    hidden.iter().enumerate().map(|(i, &x)| (x as u64) << (16 * i)).sum()
}

/// State of a slot: the "KV cache" (a key per row, never cut by reading on) and the "recurrent" hash.
#[derive(Clone, Default)]
pub(crate) struct ToyState {
    rows: Vec<u64>,
    hash: u64,
    verifying: Vec<u64>,
    /// Hash after each row, for the head's checks.
    hashes: Vec<u64>,
    mtp: Vec<u64>,
}

impl ToyState {
    fn read(&mut self, key: u64) {
        let refolded = self.rows.iter().fold(0, |hash, &key| mix(hash, key));
        assert_eq!(refolded, self.hash, "the recurrent state does not belong to the rows in the cache");
        self.hash = mix(self.hash, key);
        self.rows.push(key);
        self.hashes.push(self.hash);
    }
}

impl Toy {
    fn logits(&self, hash: u64, rows: usize, out: &mut Vec<f32>) {
        let seed = if self.period > 0 { mix(7, rows as u64 % self.period) } else { hash };
        let from = out.len();
        out.extend((0..VOCAB as u64).map(|id| (mix(seed, id) % 1000) as f32 * 0.01));
        out[from + POISON as usize] = f32::NEG_INFINITY;
        out[from + END as usize] = if seed % 61 == 0 { 20.0 } else { -20.0 };
    }

    /// A tokenizer of the 256 bytes, an end token and fillers.
    pub(crate) fn tokenizer() -> Arc<Tokenizer> {
        let printable = |b: u32| (0x21..=0x7e).contains(&b) || (0xa1..=0xac).contains(&b) || (0xae..=0xff).contains(&b);
        let mut next = 256;
        let mut tokens: Vec<String> = (0..256u32)
            .map(|byte| {
                let code = if printable(byte) { byte } else { (next, next += 1).0 };
                char::from_u32(code).unwrap().to_string()
            })
            .collect();
        tokens.extend((256..VOCAB).map(|id| format!("<{id}>")));
        let kinds: Vec<i32> = (0..VOCAB).map(|id| if id < 256 { 1 } else { 3 }).collect();
        let parts = TokenizerParts {
            tokens: &tokens,
            kinds: &kinds,
            merges: &[],
            pre: "qwen2",
            ends: vec![END],
            bos: None,
            add_bos: false,
        };
        Arc::new(Tokenizer::from_parts(&parts).unwrap())
    }
}

impl Target for Toy {
    type State = ToyState;
    type Checkpoint = (usize, u64);

    fn vocab(&self) -> usize {
        VOCAB
    }

    fn hidden(&self) -> usize {
        4
    }

    fn bytes_per_row(&self) -> u64 {
        0
    }

    fn draft_head_share(&self) -> f64 {
        0.5
    }

    fn has_mtp(&self) -> bool {
        true
    }

    fn new_state(&self, _ctx: usize) -> Result<ToyState, String> {
        Ok(ToyState::default())
    }

    fn forward(&self, window: &Window, states: &mut [&mut ToyState], out: &mut StepOutput) -> Result<(), String> {
        spin(self.window_time);
        out.logits.clear();
        out.hidden.clear();
        let mut befores: Vec<Option<ToyState>> = vec![None; states.len()];
        for row in &window.rows {
            let slot = row.slot as usize;
            let state = &mut *states[slot];
            if window.verify.get(slot) == Some(&true) && befores[slot].is_none() {
                befores[slot] = Some(state.clone());
            }
            assert!(state.verifying.is_empty(), "a verify window was not committed");
            let key = key(&row.input);
            assert!(!(self.poisoned && key == u64::from(POISON)), "poison");
            let picture = matches!(row.input, RowInput::Embedding { .. });
            assert!(picture || row.position[0] as usize <= state.rows.len(), "position {:?}", row.position);
            state.read(key);
            if row.want_logits {
                self.logits(state.hash, state.rows.len(), &mut out.logits);
            }
            if row.want_hidden {
                out.hidden.extend(to_hidden(state.hash));
            }
        }
        for (state, before) in states.iter_mut().zip(befores) {
            if let Some(before) = before {
                let verifying = state.rows[before.rows.len()..].to_vec();
                **state = ToyState { verifying, ..before };
            }
        }
        Ok(())
    }

    fn commit(&self, state: &mut ToyState, rows: usize) {
        let keys = std::mem::take(&mut state.verifying);
        keys[..rows].iter().for_each(|&key| state.read(key));
    }

    fn mtp_forward(
        &self,
        rows: &[MtpRow<'_>],
        states: &mut [&mut ToyState],
        out: &mut StepOutput,
        _head_limit: Option<usize>,
    ) -> Result<(), String> {
        spin(self.draft_time);
        out.logits.clear();
        out.hidden.clear();
        for row in rows {
            let state = &mut *states[row.slot as usize];
            let at = state.mtp.len();
            let before = of_hidden(row.hidden);
            let expected = if at == 0 { Some(0) } else { state.hashes.get(at - 1).copied() };
            if at <= state.rows.len() {
                assert_eq!(Some(before), expected, "row {at} of the head has another row's hidden");
            }
            if let Some(&held) = state.rows.get(at) {
                assert_eq!(held, key(&row.input), "row {at} of the head has another row's token");
            }
            let hash = mix(before, key(&row.input));
            state.mtp.push(hash);
            if row.want_logits {
                self.logits(hash, at + 1, &mut out.logits);
                if self.head_misses > 0 && hash.is_multiple_of(self.head_misses) {
                    let from = out.logits.len() - VOCAB;
                    out.logits[from + 5] = 100.0;
                }
            }
            out.hidden.extend(to_hidden(hash));
        }
        Ok(())
    }

    fn rows(state: &ToyState) -> usize {
        state.rows.len()
    }

    fn mtp_rows(state: &ToyState) -> usize {
        state.mtp.len()
    }

    fn truncate_mtp(state: &mut ToyState, rows: usize) {
        state.mtp.truncate(rows);
    }

    fn reset(state: &mut ToyState) {
        *state = ToyState::default();
    }

    fn checkpoint(state: &ToyState) -> (usize, u64) {
        (state.rows.len(), state.hash)
    }

    fn restore(state: &mut ToyState, checkpoint: &(usize, u64)) -> Result<(), String> {
        assert!(checkpoint.0 <= state.rows.len());
        state.rows.truncate(checkpoint.0);
        state.hashes.truncate(checkpoint.0);
        state.mtp.truncate(checkpoint.0);
        state.hash = checkpoint.1;
        state.verifying.clear();
        Ok(())
    }

    fn copy_from(state: &mut ToyState, other: &ToyState) {
        *state = other.clone();
    }

    fn hash(state: &ToyState) -> u64 {
        state.hash
    }

    fn save(&self, state: &ToyState, to: &mut dyn Write) -> std::io::Result<()> {
        for list in [&state.rows, &state.mtp] {
            to.write_all(&(list.len() as u64).to_le_bytes())?;
            list.iter().try_for_each(|key| to.write_all(&key.to_le_bytes()))?;
        }
        Ok(())
    }

    fn load(&self, state: &mut ToyState, from: &mut dyn Read) -> Result<(), String> {
        let mut number = || {
            let mut bytes = [0; 8];
            from.read_exact(&mut bytes).map(|()| u64::from_le_bytes(bytes)).map_err(|error| error.to_string())
        };
        *state = ToyState::default();
        for _ in 0..number()? {
            state.read(number()?);
        }
        for _ in 0..number()? {
            state.mtp.push(number()?);
        }
        Ok(())
    }

    fn save_checkpoint(&self, checkpoint: &(usize, u64), to: &mut dyn Write) -> std::io::Result<()> {
        to.write_all(&(checkpoint.0 as u64).to_le_bytes())?;
        to.write_all(&checkpoint.1.to_le_bytes())
    }

    fn load_checkpoint(&self, from: &mut dyn Read) -> Result<(usize, u64), String> {
        let mut bytes = [0; 16];
        from.read_exact(&mut bytes).map_err(|error| error.to_string())?;
        let (rows, hash) = bytes.split_at(8);
        Ok((u64::from_le_bytes(rows.try_into().unwrap()) as usize, u64::from_le_bytes(hash.try_into().unwrap())))
    }
}

/// Takes time without sleeping, whose granularity is too coarse.
fn spin(time: Duration) {
    let started = std::time::Instant::now();
    while started.elapsed() < time {
        std::hint::spin_loop();
    }
}
