//! The numerics contract on the bundled model, bit for bit: an answer and its log-probabilities depend on the request alone, not on
//! slots, other requests, chunk sizes, threads, or what was held before.

mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use common::*;
use strata_core::engine::*;

fn assert_answers(found: &[(Answer, RequestStats)], case: &str) {
    for (n, ((answer, _), expected)) in found.iter().zip(expected()).enumerate() {
        assert_eq!(answer, expected, "request {n}, {case}");
    }
}

#[test]
fn batched_equals_alone_in_1_2_4_and_8_slots() {
    for slots in [1, 2, 4, 8] {
        let engine = start(2, EngineOptions { slots, ..plain() });
        assert_answers(&ask_together(&engine, &varied()), &format!("{slots} slots"));
        // Slots used before equal fresh ones; what they hold equals reading again.
        assert_answers(&ask_together(&engine, &varied()), &format!("{slots} slots, again"));
    }
}

#[test]
fn chunk_sizes_and_threads_change_no_bit() {
    for prompt_chunk in [1, 7, 32, 512] {
        for threads in [1, 2] {
            let engine = start(threads, EngineOptions { slots: 2, prompt_chunk, ..plain() });
            assert_answers(&ask_together(&engine, &varied()), &format!("chunks of {prompt_chunk}, {threads} threads"));
        }
    }
}

#[test]
fn states_are_equal_whatever_the_window() {
    let long = &varied()[7];
    let mut known: HashMap<Vec<u32>, u64> = HashMap::new();
    for (slots, prompt_chunk, max_window) in [(1, 512, 8), (3, 7, 8), (2, 32, 1)] {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = seen.clone();
        let state_audit: StateAudit =
            Arc::new(move |_, tokens, hash| sink.lock().unwrap().push((tokens.to_vec(), hash)));
        let engine =
            start(2, EngineOptions { slots, prompt_chunk, max_window, state_audit: Some(state_audit), ..plain() });
        ask_together(&engine, &vec![long.clone(); slots]);
        for (tokens, hash) in seen.lock().unwrap().drain(..) {
            assert_eq!(*known.entry(tokens).or_insert(hash), hash, "{slots} slots, chunks of {prompt_chunk}");
        }
    }
    assert_eq!(known.len(), 31);
}

fn turns(questions: &[&str], answers: &[&str]) -> Request {
    let mut ids = tokens("<|im_start|>system\nYou are a helpful assistant who answers briefly.<|im_end|>\n");
    let mut turn_starts = vec![0];
    for (n, question) in questions.iter().enumerate() {
        turn_starts.push(ids.len());
        ids.extend(tokens(&format!("<|im_start|>user\n{question}<|im_end|>\n")));
        turn_starts.push(ids.len());
        ids.extend(tokens("<|im_start|>assistant\n"));
        if let Some(answer) = answers.get(n) {
            ids.extend(tokens(&format!("{answer}<|im_end|>\n")));
        }
    }
    let prompt = Prompt { pieces: vec![PromptItem::Tokens(ids)], turn_starts };
    Request { prompt, max_tokens: Some(24), logprobs: Some(2), ..Request::default() }
}

#[test]
fn held_state_and_checkpoints_equal_reading_again() {
    let folder = tempfile::tempdir().unwrap();
    let engine = start(
        2,
        EngineOptions { slots: 2, cache_ram_bytes: 64 << 20, cache_dir: Some(folder.path().into()), ..plain() },
    );
    let mut reused = Vec::new();
    let mut check = |request: &Request| {
        let (answer, stats) = ask(&engine, request);
        assert_eq!(answer, ask(&start(1, plain()), request).0);
        reused.push(stats.reused_rows);
        stats
    };
    let first = turns(&["What is a cat?"], &[]);
    let rows = first.prompt.rows();
    let starts = first.prompt.turn_starts.clone();
    check(&first);
    assert_eq!(check(&first).reused_rows, rows, "the same again");
    let second = turns(&["What is a cat?", "And a dog?"], &["A cat is a small animal."]);
    assert!(check(&second).reused_rows >= starts[2], "continued");
    let edited_last = turns(&["What is a cat?", "And a horse?"], &["A cat is a small animal."]);
    assert!(check(&edited_last).reused_rows >= second.prompt.turn_starts[3], "last turn edited");
    assert!(check(&turns(&["What is a tree?"], &[])).reused_rows >= starts[1], "first turn edited");
    assert!(check(&first).reused_rows >= starts[1], "back again");
    // Other conversations push everything out of the slots.
    for n in 0..4 {
        check(&text_request(
            &format!("{n} is a number and here is quite another text than any of those before. ").repeat(3),
            4,
        ));
    }
    assert_eq!(check(&edited_last).reused_rows, edited_last.prompt.rows(), "from memory");
    engine.stop(std::time::Duration::ZERO);
    let again = start(2, EngineOptions { cache_dir: Some(folder.path().into()), ..plain() });
    let (answer, stats) = ask(&again, &second);
    assert_eq!(answer, ask(&start(1, plain()), &second).0);
    assert!(stats.reused_rows >= starts[1] && again.status().cache.disk_hits == 1, "from disk: {stats:?}");
}

#[test]
fn a_long_prompt_read_beside_them_changes_nothing() {
    let engine = start(2, EngineOptions { slots: 4, ctx: 3000, prompt_chunk: 64, ..plain() });
    let long = text_request(&"The quick brown fox jumps over the lazy dog, again and again. ".repeat(150), 8);
    let requests: Vec<_> = varied().into_iter().take(3).collect();
    let beside = engine.submit(long.clone()).unwrap();
    assert_answers(&ask_together(&engine, &requests), "beside a long prompt");
    let (answer, stats) = collect(beside);
    assert!(stats.prompt_rows > 1200);
    assert_eq!(answer, ask(&start(1, EngineOptions { ctx: 3000, ..plain() }), &long).0);
}
