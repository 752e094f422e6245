//! Drafts on the bundled model: whatever is proposed, answers, log-probabilities and states are those of plain decoding.

mod common;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock};

use common::*;
use strata_core::engine::*;
use strata_core::model::{Row, RowInput, StepOutput, Window};

/// Trunk hash of a state that read `tokens` in one window.
fn fresh_hash(tokens: &[u32]) -> u64 {
    static KNOWN: OnceLock<Mutex<HashMap<Vec<u32>, u64>>> = OnceLock::new();
    let known = KNOWN.get_or_init(Default::default);
    if let Some(hash) = known.lock().unwrap().get(tokens) {
        return *hash;
    }
    let model = model(2);
    let mut state = model.new_state(2048).unwrap();
    let rows = tokens.iter().enumerate().map(|(at, &token)| Row {
        slot: 0,
        input: RowInput::Token(token),
        position: [at as u32; 3],
        want_logits: false,
        want_hidden: false,
    });
    let window = Window { rows: rows.collect(), verify: vec![] };
    model.forward(&window, &mut [&mut state], &mut StepOutput::default()).unwrap();
    let hash = state.trunk_hash();
    known.lock().unwrap().insert(tokens.to_vec(), hash);
    hash
}

type Seen = Arc<Mutex<HashMap<Vec<u32>, u64>>>;

fn audited(options: EngineOptions) -> (EngineOptions, Seen) {
    let seen = Seen::default();
    let sink = seen.clone();
    let state_audit: StateAudit = Arc::new(move |_, tokens, hash| {
        let mut sink = sink.lock().unwrap();
        assert_eq!(*sink.entry(tokens.to_vec()).or_insert(hash), hash, "two states of the same {} rows", tokens.len());
    });
    (EngineOptions { state_audit: Some(state_audit), ..options }, seen)
}

fn assert_states(seen: &Seen, case: &str) {
    for (tokens, hash) in seen.lock().unwrap().iter() {
        assert_eq!(fresh_hash(tokens), *hash, "{} rows, {case}", tokens.len());
    }
}

#[test]
fn head_and_ngram_drafts_change_no_bit_in_1_to_8_slots() {
    let ngram = Some(NgramOptions { min_match: 2, long_match: 4, max_draft: 6 });
    let settings = [
        (MtpSetting::Depth(1), None),
        (MtpSetting::Depth(2), ngram),
        (MtpSetting::Depth(3), None),
        (MtpSetting::Depth(4), None),
        (MtpSetting::Off, ngram),
        (MtpSetting::Auto, ngram),
    ];
    for (mtp, ngram) in settings {
        for slots in [1, 3, 8] {
            let engine = start(2, EngineOptions { slots, mtp, ngram, ..plain() });
            let mut drafted = 0;
            for (n, ((answer, stats), expected)) in ask_together(&engine, &varied()).iter().zip(expected()).enumerate()
            {
                assert_eq!(answer, expected, "request {n}, {slots} slots, {mtp:?}, {ngram:?}");
                drafted += stats.drafted;
            }
            assert!(drafted > 0 || mtp == MtpSetting::Auto || slots == 8, "{slots} slots, {mtp:?}, {ngram:?}");
        }
    }
}

#[test]
fn a_short_vocabulary_and_a_least_probability_change_what_is_drafted_only() {
    let limits = [EngineOptions { draft_vocab: Some(500), ..plain() }, EngineOptions { draft_p_min: 0.6, ..plain() }];
    for options in limits {
        let engine = start(2, EngineOptions { mtp: MtpSetting::Depth(3), ..options });
        let requests = varied();
        for (request, expected) in requests.iter().zip(expected()).take(3) {
            assert_eq!(&ask(&engine, request).0, expected);
        }
    }
}

/// Proposes the right tokens up to a place in the window, then a wrong one.
struct WrongAt {
    answer: Vec<u32>,
    prompt_rows: usize,
    place: usize,
}

impl CustomDrafter for WrongAt {
    fn propose(&self, tokens: &[u32], room: usize, out: &mut Vec<u32>) {
        let right = self.answer.iter().skip(tokens.len() - self.prompt_rows).take(room);
        out.extend(right.enumerate().map(|(i, &id)| if i == self.place { (id + 1) % 1000 } else { id }));
    }
}

#[test]
fn a_rejection_at_any_place_leaves_the_state_of_reading_the_accepted_tokens() {
    for n in [0, 3] {
        let request = Request { ignore_eos: true, ..varied()[n].clone() };
        let expected = ask(&start(1, plain()), &request).0;
        for place in 0..7 {
            let drafter = WrongAt { answer: expected.ids.clone(), prompt_rows: request.prompt.rows(), place };
            let (options, seen) = audited(EngineOptions { custom_drafter: Some(Arc::new(drafter)), ..plain() });
            let (answer, stats) = ask(&start(2, options), &request);
            assert_eq!(answer, expected, "wrong at {place}");
            assert!(stats.accepted > 0 || place == 0);
            assert_states(&seen, &format!("wrong at {place}"));
        }
    }
}

/// Proposes up to `most` tokens of whichever answer it knows goes on here, with a wrong one at a place of every window.
struct WrongInEach {
    answers: Vec<(usize, Vec<u32>)>,
    most: usize,
    place: usize,
}

impl CustomDrafter for WrongInEach {
    fn propose(&self, tokens: &[u32], room: usize, out: &mut Vec<u32>) {
        let known =
            self.answers.iter().find(|(prompt_rows, whole)| tokens.len() >= *prompt_rows && whole.starts_with(tokens));
        let Some((_, whole)) = known else { return };
        let right = whole[tokens.len()..].iter().take(room.min(self.most));
        out.extend(right.enumerate().map(|(i, &id)| if i == self.place { (id + 1) % 1000 } else { id }));
    }
}

#[test]
fn a_rejection_at_every_place_of_windows_of_every_depth_leaves_no_trace_in_1_and_8_slots() {
    let requests: Vec<Request> = varied()
        .into_iter()
        .map(|request| Request { ignore_eos: true, stop: vec![], max_tokens: Some(16), ..request })
        .collect();
    let expected: Vec<Answer> = requests.iter().map(|request| ask(&start(1, plain()), request).0).collect();
    let whole = |(request, answer): (&Request, &Answer)| {
        let prompt = match &request.prompt.pieces[..] {
            [PromptItem::Tokens(ids)] => ids.clone(),
            _ => panic!("one piece of tokens"),
        };
        (prompt.len(), [prompt, answer.ids.clone()].concat())
    };
    let answers: Vec<_> = requests.iter().zip(&expected).map(whole).collect();
    for most in 1..=4 {
        // (At `most` nothing is wrong.)
        for place in 0..=most {
            for slots in [1, 8] {
                let drafter = Arc::new(WrongInEach { answers: answers.clone(), most, place });
                let (options, seen) = audited(EngineOptions {
                    slots,
                    max_window: 8 * (most + 1),
                    custom_drafter: Some(drafter),
                    ..plain()
                });
                let case = format!("depth {most}, wrong at {place}, {slots} slots");
                let requests = if slots == 1 { &requests[..2] } else { &requests[..] };
                for (n, (answer, stats)) in ask_together(&start(2, options), requests).into_iter().enumerate() {
                    assert_eq!(answer, expected[n], "request {n}, {case}");
                    let per_place = &stats.accepted_per_position;
                    assert!(per_place.iter().take(place).all(|(tried, right)| tried == right), "{case}: {per_place:?}");
                    assert!(per_place.get(place).is_none_or(|(_, right)| *right == 0), "{case}: {per_place:?}");
                    assert_eq!(per_place.len(), most, "{case}");
                }
                assert_states(&seen, &case);
            }
        }
    }
}

#[test]
fn head_and_ngram_drafts_in_8_slots_with_room_for_all_leave_the_states_of_reading_afresh() {
    let ngram = Some(NgramOptions { min_match: 1, long_match: 3, max_draft: 6 });
    for (mtp, ngram) in [(MtpSetting::Depth(4), None), (MtpSetting::Depth(2), ngram), (MtpSetting::Off, ngram)] {
        let (options, seen) = audited(EngineOptions { slots: 8, max_window: 40, mtp, ngram, ..plain() });
        let found = ask_together(&start(2, options), &varied());
        for (n, ((answer, _), expected)) in found.iter().zip(expected()).enumerate() {
            assert_eq!(answer, expected, "request {n}, {mtp:?}, {ngram:?}");
        }
        let drafting = found.iter().filter(|(_, stats)| stats.drafted > 0).count();
        assert!(drafting == 8 || mtp == MtpSetting::Off && drafting > 1, "{drafting} slots draft, {mtp:?}");
        assert_states(&seen, &format!("{mtp:?}, {ngram:?}"));
    }
}

#[test]
fn a_request_dropped_while_it_drafts_leaves_a_slot_like_a_fresh_one() {
    let ngram = Some(NgramOptions { min_match: 1, long_match: 3, max_draft: 6 });
    let long = Request { ignore_eos: true, max_tokens: Some(600), ..varied()[5].clone() };
    let prompt = match &long.prompt.pieces[0] {
        PromptItem::Tokens(ids) => ids.clone(),
        PromptItem::Picture(_) => panic!("a picture"),
    };
    let after = varied();
    for (mtp, ngram, slots) in [
        (MtpSetting::Depth(3), None, 1),
        (MtpSetting::Depth(2), ngram, 1),
        (MtpSetting::Depth(4), None, 2),
        (MtpSetting::Auto, ngram, 1),
    ] {
        let (options, seen) = audited(EngineOptions { slots, mtp, ngram, ..plain() });
        let engine = start(2, options);
        for (round, heard) in [1, 6, 13].into_iter().enumerate() {
            let case = format!("{mtp:?}, {ngram:?}, {slots} slots, dropped after {heard} tokens");
            let mut dropped = engine.submit(long.clone()).expect("taken");
            let mut ids = prompt.clone();
            while ids.len() < prompt.len() + heard {
                if let Some(Event::Token { id, .. }) = dropped.recv() {
                    ids.push(id);
                }
            }
            drop(dropped);
            // Going on from what was heard, which the slot holds, and something else.
            ids.extend(tokens(" And then?"));
            let next = Request { prompt: Prompt::tokens(ids), ..varied()[round + 1].clone() };
            assert_eq!(ask(&engine, &next).0, ask(&start(1, plain()), &next).0, "goes on, {case}");
            assert_eq!(ask(&engine, &after[round]).0, expected()[round], "{case}");
        }
        assert_eq!(engine.status().totals.cancelled, 3);
        assert_states(&seen, &format!("{mtp:?}, {ngram:?}, {slots} slots"));
    }
}

#[test]
fn states_after_head_drafts_are_those_of_reading_afresh() {
    for depth in 1..=4 {
        let (options, seen) = audited(EngineOptions { slots: 2, mtp: MtpSetting::Depth(depth), ..plain() });
        let requests: Vec<_> = varied().into_iter().take(2).collect();
        let engine = start(2, options);
        ask_together(&engine, &requests);
        // Continued from what is held, with drafts at once.
        ask_together(&engine, &requests);
        assert_states(&seen, &format!("depth {depth}"));
    }
}

#[test]
fn stop_strings_in_an_accepted_window_end_at_the_same_place_alone_and_in_a_batch() {
    let base = Request { ignore_eos: true, ..varied()[7].clone() };
    let whole = ask(&start(1, plain()), &base).0.text;
    let chars: Vec<char> = whole.chars().collect();
    let requests: Vec<Request> = [4, 9, 15, 22]
        .iter()
        .map(|&at| Request { stop: vec![chars[at..at + 4].iter().collect()], ..base.clone() })
        .collect();
    let plain_engine = start(1, plain());
    let expected: Vec<Answer> = requests.iter().map(|request| ask(&plain_engine, request).0).collect();
    assert!(expected.iter().all(|answer| matches!(answer.reason, FinishReason::StopString(_))));
    let ngram = Some(NgramOptions { min_match: 2, long_match: 3, max_draft: 6 });
    for slots in [1, 4] {
        let engine = start(2, EngineOptions { slots, ngram, mtp: MtpSetting::Depth(3), ..plain() });
        let found: Vec<Answer> = ask_together(&engine, &requests).into_iter().map(|found| found.0).collect();
        assert_eq!(found, expected, "{slots} slots");
    }
}
