//! Pictures under the numerics contract, on the bundled model and encoder, bit for bit: chunks that cut a picture anywhere, drafts,
//! other slots and held state change nothing, and another picture of the same size is another prompt.

mod common;

use common::*;
use std::sync::{Arc, OnceLock};
use strata_core::engine::*;
use strata_core::vision::{PictureReader, PictureRows, PreprocessOptions, VisionEncoder};

fn encoder() -> Arc<VisionEncoder> {
    static ENCODER: OnceLock<Arc<VisionEncoder>> = OnceLock::new();
    ENCODER
        .get_or_init(|| {
            Arc::new(VisionEncoder::open(&golden("tiny-mmproj.gguf"), 2).expect("the bundled encoder opens"))
        })
        .clone()
}

/// A golden picture as at least `least` rows.
fn picture(name: &str, least: usize) -> Arc<PictureRows> {
    let options = PreprocessOptions { min_tokens: least, max_tokens: 2048 };
    let bytes = std::fs::read(golden("vision/pictures").join(name)).expect("the golden is there");
    PictureReader::new(encoder(), options, 0).read(&bytes).expect("the golden is a picture").rows
}

/// A user's message of pictures and text, and its turn borders.
fn message(pictures: &[Arc<PictureRows>], text: &str) -> Prompt {
    let mut pieces = vec![PromptItem::Tokens(tokens("<|im_start|>user\n"))];
    for picture in pictures {
        pieces.push(PromptItem::Tokens(tokens("<|vision_start|>")));
        pieces.push(PromptItem::Picture(picture.clone()));
        pieces.push(PromptItem::Tokens(tokens("<|vision_end|>")));
    }
    let end = tokens(&format!("{text}<|im_end|>\n"));
    let rows = pictures.iter().map(|p| p.rows() + 2).sum::<usize>() + tokens("<|im_start|>user\n").len() + end.len();
    pieces.push(PromptItem::Tokens(end));
    pieces.push(PromptItem::Tokens(tokens("<|im_start|>assistant\n")));
    Prompt { pieces, turn_starts: vec![0, rows] }
}

fn request(prompt: Prompt) -> Request {
    Request { prompt, max_tokens: Some(16), logprobs: Some(2), ..Request::default() }
}

/// One picture, two, and one of over 100 rows; with and without text before.
fn requests() -> Vec<Request> {
    let (small, other, large) = (picture("rgb.png", 4), picture("grey.png", 4), picture("large.png", 100));
    assert!(large.rows() > 100);
    let mut late = message(std::slice::from_ref(&other), "What is this?");
    late.pieces.insert(0, PromptItem::Tokens(tokens("<|im_start|>system\nYou answer briefly.<|im_end|>\n")));
    late.turn_starts = vec![];
    vec![
        request(message(std::slice::from_ref(&small), "What colour is this?")),
        request(message(&[small, other], "Which is larger?")),
        request(message(&[large], "What do you see?")),
        request(late),
        text_request(&chat("What is the capital of France?"), 16),
    ]
}

fn alone() -> &'static [Answer] {
    static ALONE: OnceLock<Vec<Answer>> = OnceLock::new();
    ALONE.get_or_init(|| requests().iter().map(|request| ask(&start(1, plain()), request).0).collect())
}

fn assert_alone(found: &[(Answer, RequestStats)], case: &str) {
    for (n, ((answer, _), expected)) in found.iter().zip(alone()).enumerate() {
        assert_eq!(answer, expected, "request {n}, {case}");
    }
}

#[test]
fn chunks_that_cut_a_picture_anywhere_change_no_bit() {
    for (prompt_chunk, threads) in [(1, 2), (5, 1), (16, 2), (512, 2)] {
        let engine = start(threads, EngineOptions { prompt_chunk, ..plain() });
        let found: Vec<_> = requests().iter().map(|request| ask(&engine, request)).collect();
        assert_alone(&found, &format!("chunks of {prompt_chunk}, {threads} threads"));
    }
}

#[test]
fn a_picture_of_over_a_thousand_rows_read_in_chunks_of_16_and_512_gives_the_same_answer() {
    let request = request(message(&[picture("large.png", 1024)], "What do you see?"));
    assert!(request.prompt.rows() > 1024);
    let answers: Vec<Answer> =
        [16, 512].map(|prompt_chunk| ask(&start(2, EngineOptions { prompt_chunk, ..plain() }), &request).0).to_vec();
    assert_eq!(answers[0], answers[1]);
}

#[test]
fn drafts_change_no_bit_behind_a_picture_alone_and_in_a_batch() {
    let ngram = Some(NgramOptions { min_match: 1, long_match: 3, max_draft: 6 });
    let auto = MtpSetting::Auto;
    for (mtp, ngram) in [(MtpSetting::Depth(1), None), (MtpSetting::Depth(3), ngram), (auto, ngram)] {
        for slots in [1, 4] {
            let engine = start(2, EngineOptions { slots, max_window: 16, prompt_chunk: 32, mtp, ngram, ..plain() });
            // The second time the pictures are held.
            for _ in 0..2 {
                let found = ask_together(&engine, &requests());
                assert_alone(&found, &format!("{mtp:?}, {ngram:?}, {slots} slots"));
                assert!(found.iter().any(|(_, stats)| stats.drafted > 0) || mtp == auto, "drafts were made");
            }
        }
    }
}

#[test]
fn batched_equals_alone() {
    let engine = start(2, EngineOptions { slots: 4, prompt_chunk: 32, ..plain() });
    assert_alone(&ask_together(&engine, &requests()), "four slots");
    assert_alone(&ask_together(&engine, &requests()), "four slots, held");
}

#[test]
fn held_pictures_are_not_read_again_and_another_of_the_same_size_is() {
    let engine = start(2, plain());
    let (first, same_size) = (picture("palette.png", 4), picture("palette-transparent.png", 4));
    assert_eq!(first.grid, same_size.grid);
    assert_ne!(first.key, same_size.key);
    let one = request(message(std::slice::from_ref(&first), "What colour is this?"));
    let other = request(message(std::slice::from_ref(&same_size), "What colour is this?"));
    let (answer, _) = ask(&engine, &one);
    let (again, stats) = ask(&engine, &one);
    assert_eq!(answer, again);
    assert_eq!(stats.reused_rows, one.prompt.rows(), "the same picture again");

    let (answer, stats) = ask(&engine, &other);
    assert_eq!(answer, ask(&start(1, plain()), &other).0);
    let before_picture = tokens("<|im_start|>user\n").len() + 1;
    assert!(stats.reused_rows <= before_picture, "reuse stops at the picture: {}", stats.reused_rows);

    // The conversation goes on: the picture in its first turn is held.
    let mut next = message(std::slice::from_ref(&first), "What colour is this?");
    next.pieces.push(PromptItem::Tokens(tokens("It is red.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n")));
    let next = request(next);
    ask(&engine, &one);
    let (answer, stats) = ask(&engine, &next);
    assert!(stats.reused_rows > first.rows(), "only {} rows reused", stats.reused_rows);
    assert_eq!(answer, ask(&start(1, plain()), &next).0);
}

#[test]
fn the_reader_encodes_a_picture_once() {
    let options = PreprocessOptions { min_tokens: 4, max_tokens: 64 };
    let reader = PictureReader::new(encoder(), options, 1 << 20);
    let bytes = std::fs::read(golden("vision/pictures/rgb.png")).unwrap();
    let first = reader.read(&bytes).unwrap();
    let second = reader.read(&bytes).unwrap();
    assert!(!first.cached && second.cached);
    assert!(Arc::ptr_eq(&first.rows, &second.rows));
    assert_eq!(reader.cached().0, 1);
}
