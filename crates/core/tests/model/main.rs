//! The model against references and against itself, on the bundled model and files made from it.

mod contract;
mod edited;
mod geometry;
mod greedy;
mod reference;

use std::path::PathBuf;
use std::sync::OnceLock;
use strata_core::gguf::GgufFile;
use strata_core::model::{LoadOptions, Model, MtpRow, Row, RowInput, SlotState, StepOutput, Window};

/// A file of `tests/golden`.
fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

fn load(file: &GgufFile, threads: usize) -> Model {
    Model::load(file, &LoadOptions { threads, ..LoadOptions::default() }).expect("the model loads")
}

/// The bundled model on two threads, loaded once.
fn tiny() -> &'static Model {
    static TINY: OnceLock<Model> = OnceLock::new();
    TINY.get_or_init(|| load(&GgufFile::open(&golden("tiny.gguf")).expect("the bundled model opens"), 2))
}

/// Token rows of slot `slot` from position `first` on; all want hidden rows, the last (or all) wants logits.
fn rows(slot: u32, tokens: &[u32], first: usize, all_logits: bool) -> Vec<Row> {
    let row = |(index, &token): (usize, &u32)| Row {
        slot,
        input: RowInput::Token(token),
        position: [(first + index) as u32; 3],
        want_logits: all_logits || index + 1 == tokens.len(),
        want_hidden: true,
    };
    tokens.iter().enumerate().map(row).collect()
}

/// Reads `tokens` into one slot in windows of `chunk` rows. Gives logits and hidden of every row.
fn read(model: &Model, state: &mut SlotState, tokens: &[u32], chunk: usize) -> (Vec<f32>, Vec<f32>) {
    let (mut logits, mut hidden) = (Vec::new(), Vec::new());
    let mut out = StepOutput::default();
    for part in tokens.chunks(chunk) {
        let window = Window { rows: rows(0, part, state.rows(), true), verify: vec![] };
        model.forward(&window, &mut [state], &mut out).expect("the window runs");
        logits.extend_from_slice(&out.logits);
        hidden.extend_from_slice(&out.hidden);
    }
    (logits, hidden)
}

/// Reads the MTP head over `tokens`, whose trunk hidden rows are `hidden`, in windows of `chunk` rows.
fn read_mtp(
    model: &Model,
    state: &mut SlotState,
    tokens: &[u32],
    hidden: &[f32],
    chunk: usize,
) -> (Vec<f32>, Vec<f32>) {
    let width = model.config().hidden;
    let mut before = vec![0.0; width];
    before.extend_from_slice(hidden);
    let (mut logits, mut after) = (Vec::new(), Vec::new());
    let mut out = StepOutput::default();
    let all: Vec<usize> = (0..tokens.len()).collect();
    for part in all.chunks(chunk) {
        let rows: Vec<MtpRow<'_>> = part
            .iter()
            .map(|&index| MtpRow {
                slot: 0,
                input: RowInput::Token(tokens[index]),
                hidden: &before[index * width..(index + 1) * width],
                position: [index as u32; 3],
                want_logits: true,
            })
            .collect();
        model.mtp_forward(&rows, &mut [state], &mut out, None).expect("the head runs");
        logits.extend_from_slice(&out.logits);
        after.extend_from_slice(&out.hidden);
    }
    (logits, after)
}

/// Some text of the kind the model was trained on, as ids.
fn sample_tokens(count: usize) -> Vec<u32> {
    let bytes = std::fs::read(golden("reference_f32.safetensors")).expect("the golden is there");
    let tensors = safetensors::SafeTensors::deserialize(&bytes).expect("the golden reads");
    let tokens = tensors.tensor("tokens").expect("tokens");
    let ids = tokens.data().as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id));
    let ids: Vec<u32> = ids.take(count).collect();
    assert_eq!(ids.len(), count);
    ids
}
