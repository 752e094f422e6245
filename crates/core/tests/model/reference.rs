//! The F32 model against transformers in f32 (`scripts/make_reference_logits.py`).

use super::{golden, read, read_mtp};
use safetensors::SafeTensors;
use strata_core::convert::{ConvertOptions, Progress, Recipe, convert_text_model};
use strata_core::gguf::GgufFile;
use strata_core::model::{KvType, LoadOptions, Model};

/// Largest difference of a log-probability that float rounding explains; measured 1e-5.
const MAX_DIFFERENCE: f64 = 1e-3;

fn ints(tensors: &SafeTensors<'_>, name: &str) -> Vec<usize> {
    let view = tensors.tensor(name).expect(name);
    view.data().as_chunks::<4>().0.iter().map(|value| i32::from_le_bytes(*value) as usize).collect()
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let view = tensors.tensor(name).expect(name);
    view.data().as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
}

fn log_probability(logits: &[f32], id: usize) -> f64 {
    let top = logits.iter().copied().fold(f32::MIN, f32::max);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit - top).exp()).sum();
    f64::from(logits[id] - top) - sum.ln()
}

/// Largest difference over rows of `width` reference values.
fn largest_difference(logits: &[f32], vocab: usize, ids: &[usize], expected: &[f32]) -> f64 {
    let width = ids.len() / (logits.len() / vocab);
    let rows = logits.chunks_exact(vocab).zip(ids.chunks_exact(width).zip(expected.chunks_exact(width)));
    rows.flat_map(|(logits, (ids, expected))| {
        ids.iter().zip(expected).map(|(&id, &expected)| (log_probability(logits, id) - f64::from(expected)).abs())
    })
    .fold(0.0, f64::max)
}

#[test]
fn logits_of_the_f32_model_follow_transformers() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tiny-f32.gguf");
    let f32_recipe = ConvertOptions::new(Recipe::from_name("F32").expect("a recipe"));
    convert_text_model(&golden("tiny-hf"), &path, &f32_recipe, Progress::SILENT).expect("the checkpoint converts");
    let bytes = std::fs::read(golden("reference_f32.safetensors")).expect("the golden is there");
    let tensors = SafeTensors::deserialize(&bytes).expect("the golden reads");
    let file = GgufFile::open(&path).expect("opens");
    let options = LoadOptions { threads: 2, kv_type: KvType::F32, ..LoadOptions::default() };
    let model = Model::load(&file, &options).expect("the model loads");
    let vocab = model.config().vocab;
    let tokens: Vec<u32> = ints(&tensors, "tokens").into_iter().map(|id| id as u32).collect();
    assert!(tokens.len() >= 500);
    let (trunk_ids, trunk) = (ints(&tensors, "trunk_ids"), floats(&tensors, "trunk_logprobs"));
    let (mtp_ids, mtp) = (ints(&tensors, "mtp_ids"), floats(&tensors, "mtp_logprobs"));
    let mut start = 0;
    let (mut worst_trunk, mut worst_mtp) = (0.0f64, 0.0f64);
    for length in ints(&tensors, "lengths") {
        let range = start..start + length;
        let of = |width: usize| range.start * width..range.end * width;
        let mut state = model.new_state(1024).expect("a state");
        let (logits, hidden) = read(&model, &mut state, &tokens[range.clone()], 64);
        worst_trunk = worst_trunk.max(largest_difference(&logits, vocab, &trunk_ids[of(16)], &trunk[of(16)]));
        let (logits, _) = read_mtp(&model, &mut state, &tokens[range.clone()], &hidden, 64);
        worst_mtp = worst_mtp.max(largest_difference(&logits, vocab, &mtp_ids[of(8)], &mtp[of(8)]));
        start += length;
    }
    println!("largest difference: trunk {worst_trunk:.2e}, MTP head {worst_mtp:.2e} over {start} positions");
    assert!(worst_trunk < MAX_DIFFERENCE, "trunk: {worst_trunk}");
    assert!(worst_mtp < MAX_DIFFERENCE, "MTP head: {worst_mtp}");
}
