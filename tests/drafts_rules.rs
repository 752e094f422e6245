//! What a request may ask for besides its prompt (sampling, grammars, a thinking budget, places to end) with every kind of draft, on
//! the bundled model: ids, text, reason and every log-probability are those of plain decoding, alone and in a batch.

mod common;

use std::sync::{Arc, OnceLock};

use common::*;
use serde_json::json;
use strata_core::engine::*;
use strata_core::text::grammar::GrammarSpec;
use strata_core::text::output::{Output, OutputMode};
use strata_core::text::{Grammar, GrammarEnv};

const NGRAM: NgramOptions = NgramOptions { min_match: 1, long_match: 3, max_draft: 6 };

/// Auto drafts that bet whatever machine runs the test.
fn sure_of(row: f64, step: f64) -> EngineOptions {
    let draft_costs = Some(DraftCosts { row, step });
    EngineOptions { mtp: MtpSetting::Auto, max_window: 20, draft_costs, ..plain() }
}

/// Every way to draft, with room for it in a batch of four.
fn draft_settings() -> Vec<EngineOptions> {
    let with = |mtp, ngram| EngineOptions { mtp, ngram, max_window: 20, ..plain() };
    vec![
        with(MtpSetting::Depth(1), None),
        with(MtpSetting::Depth(2), Some(NGRAM)),
        with(MtpSetting::Depth(3), None),
        with(MtpSetting::Depth(4), None),
        with(MtpSetting::Off, Some(NGRAM)),
        with(MtpSetting::Auto, None),
        with(MtpSetting::Auto, Some(NGRAM)),
        EngineOptions { draft_vocab: Some(400), draft_p_min: 0.3, ..with(MtpSetting::Depth(4), None) },
        EngineOptions { draft_vocab: Some(400), draft_p_min: 0.3, ..with(MtpSetting::Auto, Some(NGRAM)) },
        sure_of(0.02, 0.02),
    ]
}

fn plain_answers(requests: &[Request]) -> Vec<Answer> {
    requests.iter().map(|request| ask(&start(1, plain()), request).0).collect()
}

/// Asks one after the other and in a batch of four with every kind of draft, and gives the plain answers.
fn assert_drafts_change_nothing(requests: &[Request]) -> Vec<Answer> {
    let expected = plain_answers(requests);
    for options in draft_settings() {
        let mut drafted = 0;
        for slots in [1, 4] {
            let engine = start(2, EngineOptions { slots, ..options.clone() });
            for (n, (answer, stats)) in ask_together(&engine, requests).into_iter().enumerate() {
                let (mtp, ngram, vocab) = (options.mtp, options.ngram.is_some(), options.draft_vocab);
                let case = format!("request {n}, {slots} slots, {mtp:?}, n-gram {ngram}, draft vocabulary {vocab:?}");
                assert_eq!(answer, expected[n], "{case}");
                drafted += stats.drafted;
            }
        }
        let measures = options.mtp == MtpSetting::Auto && options.draft_costs.is_none();
        assert!(drafted > 0 || measures, "{:?} drafted nothing", options.mtp);
    }
    expected
}

fn sampled(text: &str, sampling: Sampling) -> Request {
    Request { sampling, logprobs: Some(5), ignore_eos: true, ..text_request(text, 36) }
}

#[test]
fn seeds_filters_penalties_and_bias() {
    let story = chat("Tell me a story about a dog.");
    let list = chat("List some words.");
    let neutral = Sampling::default();
    let requests = [
        sampled(&story, Sampling { temperature: 0.7, top_k: 40, top_p: 0.95, seed: 11, ..neutral.clone() }),
        sampled(&story, Sampling { temperature: 0.9, top_p: 0.9, min_p: 0.05, seed: 12, ..neutral.clone() }),
        sampled(&list, Sampling { temperature: 1.0, seed: 13, ..neutral.clone() }),
        sampled(
            &list,
            Sampling {
                temperature: 1.2,
                top_k: 20,
                min_p: 0.02,
                repeat_penalty: 1.15,
                presence_penalty: 0.3,
                frequency_penalty: 0.2,
                logit_bias: vec![(220, 2.0), (198, f32::NEG_INFINITY)],
                seed: 14,
                ..neutral.clone()
            },
        ),
        sampled(&list, Sampling { repeat_penalty: 1.3, repeat_last_n: usize::MAX, ..neutral.clone() }),
        sampled(&list, Sampling { repeat_penalty: 1.1, repeat_last_n: 4, frequency_penalty: 0.7, ..neutral.clone() }),
        sampled("One, two, three, one, two, three, one,", Sampling { presence_penalty: 1.0, ..neutral.clone() }),
        sampled("One, two, three, one, two, three, one,", Sampling { logit_bias: vec![(11, -3.0)], ..neutral }),
    ];
    let answers = assert_drafts_change_nothing(&requests);
    assert!(answers.iter().all(|answer| answer.ids.len() == 36 && answer.logprobs.iter().all(|row| row.len() == 6)));
}

#[test]
fn auto_drafts_cut_short_by_doubt_and_over_part_of_the_vocabulary() {
    let requests: Vec<Request> = ["Tell me a story about a dog.", "List some words.", "What is the capital of France?"]
        .iter()
        .flat_map(|question| [0.0, 0.8].map(|heat| (question, heat)))
        .map(|(question, temperature)| Request {
            sampling: Sampling { temperature, seed: 31, ..Sampling::default() },
            ignore_eos: true,
            ..text_request(&chat(question), 120)
        })
        .collect();
    let expected = plain_answers(&requests);
    let mut seen = Vec::new();
    for (row, step) in [(0.02, 0.02), (0.1, 0.3)] {
        let engine = start(2, sure_of(row, step));
        let mut drafted = 0;
        for (request, expected) in requests.iter().zip(&expected) {
            let (answer, stats) = ask(&engine, request);
            assert_eq!(&answer, expected, "row {row}, step {step}");
            drafted += stats.drafted;
        }
        let drafts = engine.status().drafts;
        assert!(drafted > 100, "row {row}, step {step}: {drafted} drafted, {drafts:?}");
        seen.push((drafts.ended_unsure, drafts.vocabulary));
    }
    assert!(seen.iter().any(|(ended_unsure, _)| *ended_unsure > 20), "chains ended by doubt: {seen:?}");
    assert!(seen.iter().any(|(_, vocabulary)| vocabulary.is_some()), "a part of the vocabulary: {seen:?}");
}

fn grammar(spec: &GrammarSpec, after_reasoning: bool) -> Option<Grammar> {
    static ENV: OnceLock<Arc<GrammarEnv>> = OnceLock::new();
    let env = ENV.get_or_init(|| GrammarEnv::new(&tokenizer()).expect("the vocabulary has an end"));
    Some(Grammar::new(env, spec, after_reasoning).expect("the grammar compiles"))
}

/// `spaced` lets the model put blanks where it likes, which the bundled one does without end.
fn person(spaced: bool) -> GrammarSpec {
    GrammarSpec::JsonSchema(json!({
        "x-guidance": {"whitespace_flexible": spaced},
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 1, "maximum": 99},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": false,
    }))
}

fn constrained() -> Vec<Request> {
    let lark = "start: item (\", \" item){4} \".\"\nitem: \"one\" | \"two\" | \"three\" | NUMBER\nNUMBER: /[0-9]{1,3}/";
    let with = |spec: &GrammarSpec, temperature: f32, seed: u64| Request {
        grammar: grammar(spec, false),
        sampling: Sampling { temperature, seed, ..Sampling::default() },
        ..text_request(&chat("Give me an example."), 60)
    };
    let mut requests: Vec<Request> = vec![
        with(&person(false), 0.0, 0),
        with(&person(true), 1.0, 3),
        with(&GrammarSpec::Lark(lark.into()), 0.0, 0),
        with(&GrammarSpec::Lark(lark.into()), 0.8, 5),
        with(&GrammarSpec::Regex("([a-z]{2,6} ){5}[a-z]{2,6}\\.".into()), 0.7, 9),
    ];
    requests.push(Request {
        grammar: grammar(&person(false), true),
        starts_in_reasoning: true,
        thinking_budget: Some(9),
        show_specials: true,
        ..text_request(&format!("{}<think>\n", chat("Give me an example.")), 80)
    });
    requests
}

#[test]
fn grammars() {
    let requests = constrained();
    let answers = assert_drafts_change_nothing(&requests);
    let parsed: serde_json::Value = serde_json::from_str(&answers[0].text).expect("the answer is JSON");
    assert!(parsed["tags"].as_array().is_some_and(|tags| tags.len() >= 2));
    let behind = answers[5].text.split_once("</think>").expect("the reasoning is closed").1;
    serde_json::from_str::<serde_json::Value>(behind.trim()).expect("the answer behind the reasoning is JSON");
}

fn thinking(budget: usize, temperature: f32) -> Request {
    Request {
        starts_in_reasoning: true,
        thinking_budget: Some(budget),
        show_specials: true,
        ignore_eos: true,
        sampling: Sampling { temperature, seed: 21, ..Sampling::default() },
        ..text_request(&format!("{}<think>\n", chat("What is the capital of France?")), budget + 24)
    }
}

fn split(answer: &Answer) -> (String, String) {
    let parsed = Output::parse(&answer.text, OutputMode { starts_in_reasoning: true, ..OutputMode::default() });
    (parsed.reasoning, parsed.content)
}

#[test]
fn a_thinking_budget() {
    let requests: Vec<Request> =
        [(0, 0.0), (1, 0.0), (6, 0.0), (7, 0.9), (11, 1.1)].map(|(budget, heat)| thinking(budget, heat)).to_vec();
    for answer in assert_drafts_change_nothing(&requests) {
        let (reasoning, content) = split(&answer);
        assert!(answer.text.contains("</think>") && !content.is_empty(), "{reasoning:?} {content:?}");
    }
}

/// Proposes up to `most` tokens of the answers it was told, the one at `wrong_at` of every window falsified.
struct Told {
    answers: Vec<(Vec<u32>, Vec<u32>)>,
    most: usize,
    wrong_at: Option<usize>,
}

impl CustomDrafter for Told {
    fn propose(&self, tokens: &[u32], room: usize, out: &mut Vec<u32>) {
        let known = |(prompt, answer): &&(Vec<u32>, Vec<u32>)| {
            tokens.strip_prefix(&prompt[..]).is_some_and(|made| answer.starts_with(made))
        };
        let Some((prompt, answer)) = self.answers.iter().find(known) else { return };
        let rest = answer[tokens.len() - prompt.len()..].iter().take(room.min(self.most));
        out.extend(rest.enumerate().map(|(at, &id)| if Some(at) == self.wrong_at { (id + 1) % 1000 } else { id }));
    }
}

fn prompt_ids(request: &Request) -> Vec<u32> {
    let of = |piece: &PromptItem| match piece {
        PromptItem::Tokens(ids) => ids.clone(),
        PromptItem::Picture(_) => panic!("a picture"),
    };
    request.prompt.pieces.iter().flat_map(of).collect()
}

/// Asks with windows of `known` answers, alone and in a batch, twice: the second time from what the slots hold.
fn assert_told_windows_change_nothing(requests: &[Request], known: &[Answer], expected: &[Answer]) -> RequestStats {
    let answers: Vec<_> =
        requests.iter().zip(known).map(|(request, answer)| (prompt_ids(request), answer.ids.clone())).collect();
    let mut sum = RequestStats::default();
    for (most, wrong_at) in [(2, None), (4, Some(2)), (7, None), (7, Some(5))] {
        let drafter = Arc::new(Told { answers: answers.clone(), most, wrong_at });
        for slots in [1, 4] {
            let options =
                EngineOptions { slots, max_window: 8 * slots, custom_drafter: Some(drafter.clone()), ..plain() };
            let engine = start(2, options);
            for round in 0..2 {
                for (n, (answer, stats)) in ask_together(&engine, requests).into_iter().enumerate() {
                    let case =
                        format!("request {n}, {most} drafts, wrong at {wrong_at:?}, {slots} slots, round {round}");
                    assert_eq!(answer, expected[n], "{case}");
                    if wrong_at.is_none() {
                        sum.drafted += stats.drafted;
                        sum.accepted += stats.accepted;
                    }
                }
            }
        }
    }
    sum
}

#[test]
fn tokens_forced_at_the_end_of_a_budget_inside_an_accepted_window() {
    let requests: Vec<Request> = [(0, 0.0), (5, 0.0), (6, 0.9), (8, 1.1)].map(|(n, heat)| thinking(n, heat)).to_vec();
    // One prompt each, so that the drafter knows which answer it is to tell.
    let requests: Vec<Request> = requests
        .into_iter()
        .enumerate()
        .map(|(n, request)| Request {
            prompt: Prompt::tokens(tokens(&format!("{}<think>\n", chat(&format!("What is {n} and {n}?"))))),
            ..request
        })
        .collect();
    let expected = plain_answers(&requests);
    assert!(expected.iter().all(|answer| answer.text.contains("</think>")));
    let told = assert_told_windows_change_nothing(&requests, &expected, &expected);
    assert_eq!(told.accepted, told.drafted, "every told token is accepted, the forced ones too");
    // What would have come without the budget is rejected where the budget ends.
    let free: Vec<Request> = requests.iter().map(|r| Request { thinking_budget: None, ..r.clone() }).collect();
    let told = assert_told_windows_change_nothing(&requests, &plain_answers(&free), &expected);
    assert!(told.accepted < told.drafted);
}

#[test]
fn grammars_inside_accepted_and_refused_windows() {
    let mut requests = constrained();
    for (n, request) in requests.iter_mut().enumerate().take(5) {
        request.prompt = Prompt::tokens(tokens(&chat(&format!("Give me example {n}."))));
    }
    let expected = plain_answers(&requests);
    let told = assert_told_windows_change_nothing(&requests, &expected, &expected);
    assert_eq!(told.accepted, told.drafted);
    // Tokens that the grammar forbids are proposed.
    let free: Vec<Request> = requests.iter().map(|r| Request { grammar: None, ..r.clone() }).collect();
    let told = assert_told_windows_change_nothing(&requests, &plain_answers(&free), &expected);
    assert!(told.accepted < told.drafted);
}

#[test]
fn an_answer_that_ends_in_the_middle_of_an_accepted_window() {
    let base = |n: usize| Request {
        sampling: Sampling { temperature: 0.8 * (n % 2) as f32, top_k: 40, seed: n as u64, ..Sampling::default() },
        ignore_eos: true,
        ..text_request(&format!("{n} squared is {}. ", n * n).repeat(4), 32)
    };
    let bases: Vec<Request> = (2..17).map(base).collect();
    let whole = plain_answers(&bases);
    let cut = |n: usize| {
        let (request, answer) = (bases[n].clone(), &whole[n]);
        let chars: Vec<char> = answer.text.chars().collect();
        let at = 3 + n;
        match n % 3 {
            // Windows of up to eight tokens: ends fall on every place of one.
            0 => Request { max_tokens: Some(1 + n), ..request },
            1 => Request { stop: vec![chars[at..(at + 3).min(chars.len())].iter().collect()], ..request },
            _ => Request { stop_token_ids: vec![answer.ids[1 + n]], ..request },
        }
    };
    let requests: Vec<Request> = (0..bases.len()).map(cut).collect();
    let expected = plain_answers(&requests);
    for (n, answer) in expected.iter().enumerate() {
        let as_asked = match n % 3 {
            0 => answer.reason == FinishReason::Length && answer.ids.len() == 1 + n,
            1 => matches!(answer.reason, FinishReason::StopString(_)),
            _ => matches!(answer.reason, FinishReason::EndToken(_)),
        };
        assert!(as_asked && whole[n].ids.starts_with(&answer.ids), "request {n}: {:?}", answer.reason);
    }
    assert_told_windows_change_nothing(&requests, &whole, &expected);
    assert_drafts_change_nothing(&requests[..9]);
}

#[test]
fn the_models_own_end_inside_a_window_and_an_answer_past_it() {
    let ended: Vec<Request> = ["Hello", "What is the capital of France?", "Say yes.", "Thanks!"]
        .iter()
        .map(|question| text_request(&chat(question), 200))
        .collect();
    let past: Vec<Request> =
        ended.iter().map(|request| Request { ignore_eos: true, max_tokens: Some(64), ..request.clone() }).collect();
    let (expected, expected_past) = (plain_answers(&ended), plain_answers(&past));
    assert!(expected.iter().any(|answer| matches!(answer.reason, FinishReason::EndToken(_))));
    assert!(expected_past.iter().all(|answer| answer.ids.len() == 64));
    // Told what comes after the end, too.
    assert_told_windows_change_nothing(&ended, &expected_past, &expected);
    assert_told_windows_change_nothing(&past, &expected_past, &expected_past);
    assert_drafts_change_nothing(&past);
}
