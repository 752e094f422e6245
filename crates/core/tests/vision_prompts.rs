//! Picture prompts against llama.cpp's mtmd on the f32 tiny model and encoder: the same answers, and distributions as close to its
//! as its own runs are to each other. How the goldens were made: `scripts/make_picture_prompt_goldens.py`.

use serde::Deserialize;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use strata_core::convert::{ConvertOptions, Progress, Recipe, convert_text_model, convert_vision};
use strata_core::gguf::GgufFile;
use strata_core::model::{KvType, LoadOptions, Model, Row, RowInput, StepOutput, Window};
use strata_core::text::{Specials, Tokenizer};
use strata_core::vision::splice::{block_position, position_span};
use strata_core::vision::{PictureRows, PreprocessOptions, VisionEncoder};

/// What f32 rounding adds to llama.cpp's own floor: log-probabilities agree to about 1e-4, and a KL divergence is of the
/// order of their squares.
const FLOAT_NOISE: f64 = 1e-6;

#[derive(Deserialize)]
struct Goldens {
    floor: f64,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    pictures: Vec<String>,
    question: String,
    prompt_rows: usize,
    ids: Vec<u32>,
    top: Vec<Vec<(u32, f64)>>,
}

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden").join(name)
}

enum Piece {
    Tokens(Vec<u32>),
    Picture(PictureRows),
}

/// All rows of a prompt and the tokens after it.
fn rows(pieces: &[Piece]) -> Vec<Row> {
    let row = |input, position| Row { slot: 0, input, position, want_logits: true, want_hidden: false };
    let (mut rows, mut start) = (Vec::new(), 0);
    for piece in pieces {
        match piece {
            Piece::Tokens(ids) => {
                rows.extend(ids.iter().zip(start..).map(|(&id, at)| row(RowInput::Token(id), [at; 3])));
                start += ids.len() as u32;
            }
            Piece::Picture(picture) => {
                rows.extend((0..picture.rows()).map(|index| {
                    let input = RowInput::Embedding { data: picture.data.clone(), start: index * picture.width };
                    row(input, block_position(picture.grid, start, index as u32))
                }));
                start += position_span(picture.grid);
            }
        }
    }
    rows
}

/// Log-probabilities after each of the last `wanted` rows, read in chunks of `chunk`.
fn log_probabilities(model: &Model, mut rows: Vec<Row>, wanted: usize, chunk: usize) -> Vec<Vec<f64>> {
    let skip = rows.len() - wanted;
    for row in &mut rows[..skip] {
        row.want_logits = false;
    }
    let mut state = model.new_state(rows.len()).expect("a state");
    let (mut out, mut found) = (StepOutput::default(), Vec::new());
    for part in rows.chunks(chunk) {
        let window = Window { rows: part.to_vec(), verify: Vec::new() };
        model.forward(&window, &mut [&mut state], &mut out).expect("a step");
        for logits in out.logits.chunks_exact(model.config().vocab) {
            let top = logits.iter().copied().fold(f32::MIN, f32::max);
            let sum: f64 = logits.iter().map(|&l| f64::from(l - top).exp()).sum();
            found.push(logits.iter().map(|&l| f64::from(l - top) - sum.ln()).collect());
        }
    }
    found
}

/// KL divergence from the listed tokens and, as one more, all others.
fn divergence(listed: &[(u32, f64)], found: &[f64]) -> f64 {
    let (mut kl, mut p_rest, mut q_rest) = (0.0, 1.0, 1.0);
    for &(id, log_p) in listed {
        let log_q = found[id as usize];
        kl += log_p.exp() * (log_p - log_q);
        p_rest -= log_p.exp();
        q_rest -= log_q.exp();
    }
    let (p, q) = (f64::max(p_rest, 1e-12), f64::max(q_rest, 1e-12));
    kl + p * (p / q).ln()
}

#[test]
fn picture_prompts_follow_llama_cpp() {
    let folder = tempfile::tempdir().expect("a folder");
    let options = ConvertOptions::new(Recipe::from_name("F32").expect("a recipe"));
    let (text_path, vision_path) = (folder.path().join("tiny.gguf"), folder.path().join("mmproj.gguf"));
    convert_text_model(&golden("tiny-hf"), &text_path, &options, Progress::SILENT).expect("the text model converts");
    convert_vision(&golden("tiny-hf"), &vision_path, &options, Progress::SILENT).expect("the encoder converts");
    let file = GgufFile::open(&text_path).expect("opens");
    let tokenizer = Tokenizer::from_gguf(file.metadata()).expect("the tokenizer loads");
    let load = LoadOptions { threads: 2, kv_type: KvType::F32, ..LoadOptions::default() };
    let model = Model::load(&file, &load).expect("the model loads");
    let encoder = VisionEncoder::open(&vision_path, 2).expect("the encoder opens");

    let goldens: Goldens =
        serde_json::from_slice(&std::fs::read(golden("vision/prompts/llama_cpp.json")).expect("the golden is there"))
            .expect("the golden reads");
    let tokens = |text: &str| tokenizer.encode(text, Specials::Parse).expect("text encodes");
    let mut encoded: HashMap<&str, PictureRows> = HashMap::new();
    let options = PreprocessOptions { min_tokens: 4, max_tokens: 2048 };
    for name in goldens.cases.iter().flat_map(|case| &case.pictures) {
        let bytes = std::fs::read(golden("vision/prompts").join(name)).expect("the picture is there");
        let picture = encoder.preprocess(&bytes, &options).expect("the picture reads");
        assert_eq!(picture.size, picture.source_size, "{name} is not resampled, so both see the same pixels");
        encoded.insert(name, encoder.encode(&picture));
    }
    let mut longest = 0;
    for case in &goldens.cases {
        let mut pieces = vec![Piece::Tokens(tokens("<|im_start|>user\n"))];
        for name in &case.pictures {
            pieces.push(Piece::Tokens(tokens("<|vision_start|>")));
            pieces.push(Piece::Picture(encoded[name.as_str()].clone()));
            pieces.push(Piece::Tokens(tokens("<|vision_end|>")));
        }
        let end = format!("{}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", case.question);
        pieces.push(Piece::Tokens(tokens(&end)));
        let prompt_rows = rows(&pieces).len();
        assert_eq!(prompt_rows, case.prompt_rows, "{:?}", case.pictures);
        longest = longest.max(prompt_rows);
        let (last, forced) = (case.ids.len(), &case.ids[..case.ids.len() - 1]);
        pieces.push(Piece::Tokens(forced.to_vec()));
        let whole = log_probabilities(&model, rows(&pieces), last, 512);
        for chunk in [16, prompt_rows.div_ceil(3)] {
            assert!(log_probabilities(&model, rows(&pieces), last, chunk) == whole, "chunks of {chunk}");
        }
        let mut total = 0.0;
        for ((id, listed), found) in case.ids.iter().zip(&case.top).zip(&whole) {
            let best = found.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1)).map(|(id, _)| id as u32);
            assert_eq!(best, Some(*id), "{:?}: another answer", case.pictures);
            total += divergence(listed, found);
        }
        let mean = total / case.ids.len() as f64;
        println!("{:?}: mean KL {mean:.2e}, llama.cpp's own floor {:.2e}", case.pictures, goldens.floor);
        assert!(mean <= goldens.floor + FLOAT_NOISE, "{:?}: mean KL {mean}", case.pictures);
    }
    assert!(longest > 1024, "one picture is of over 1,000 rows");
    assert!(goldens.cases.iter().any(|case| case.pictures.len() == 2));
}
