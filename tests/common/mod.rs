//! The bundled model for tests that run the engine on it.
#![allow(dead_code)]

use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

use strata_core::engine::*;
use strata_core::gguf::GgufFile;
use strata_core::model::{LoadOptions, Model};
use strata_core::text::{Specials, Tokenizer};

pub fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn file() -> &'static GgufFile {
    static FILE: OnceLock<GgufFile> = OnceLock::new();
    FILE.get_or_init(|| GgufFile::open(&golden("tiny.gguf")).expect("the bundled model opens"))
}

/// The bundled model, with 1 or 2 threads.
pub fn model(threads: usize) -> Arc<Model> {
    static MODELS: [OnceLock<Arc<Model>>; 2] = [OnceLock::new(), OnceLock::new()];
    let load = || {
        Arc::new(
            Model::load(file(), &LoadOptions { threads, ..LoadOptions::default() }).expect("the bundled model loads"),
        )
    };
    MODELS[threads - 1].get_or_init(load).clone()
}

pub fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    TOKENIZER.get_or_init(|| Arc::new(Tokenizer::from_gguf(file().metadata()).expect("its tokenizer loads"))).clone()
}

pub fn tokens(text: &str) -> Vec<u32> {
    tokenizer().encode(text, Specials::Parse).expect("text encodes")
}

pub fn chat(question: &str) -> String {
    format!("<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")
}

pub fn text_request(text: &str, max_tokens: usize) -> Request {
    Request {
        prompt: Prompt::tokens(tokens(text)),
        max_tokens: Some(max_tokens),
        logprobs: Some(2),
        ..Request::default()
    }
}

/// Plain decoding: no drafts, one slot.
pub fn plain() -> EngineOptions {
    EngineOptions { ctx: 2048, mtp: MtpSetting::Off, ..EngineOptions::default() }
}

pub fn start(threads: usize, options: EngineOptions) -> EngineHandle {
    Engine::start(model(threads), tokenizer(), options).expect("the engine starts")
}

/// What a request heard. Log-probabilities are compared as bits.
#[derive(Debug, PartialEq, Clone)]
pub struct Answer {
    pub ids: Vec<u32>,
    pub text: String,
    pub logprobs: Vec<Vec<(u32, u32)>>,
    pub reason: FinishReason,
}

pub fn collect(stream: RequestStream) -> (Answer, RequestStats) {
    let mut answer = Answer { ids: vec![], text: String::new(), logprobs: vec![], reason: FinishReason::Cancelled };
    for event in stream {
        match event {
            Event::Started { .. } => {}
            Event::Token { id, text, logprobs } => {
                answer.ids.push(id);
                answer.text.push_str(&text);
                if let Some(logprobs) = logprobs {
                    let of = |(id, logprob): (u32, f32)| (id, logprob.to_bits());
                    answer.logprobs.push([(id, logprobs.logprob)].into_iter().chain(logprobs.top).map(of).collect());
                }
            }
            Event::Finished { reason, text, stats } => {
                answer.text.push_str(&text);
                answer.reason = reason;
                return (answer, stats);
            }
            Event::Failed(message) => panic!("{message}"),
        }
    }
    panic!("the stream ended without an end");
}

pub fn ask(engine: &EngineHandle, request: &Request) -> (Answer, RequestStats) {
    collect(engine.submit(request.clone()).expect("the request is taken"))
}

/// All at once.
pub fn ask_together(engine: &EngineHandle, requests: &[Request]) -> Vec<(Answer, RequestStats)> {
    let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).expect("taken")).collect();
    streams.into_iter().map(collect).collect()
}

/// Requests of different kinds, lengths and settings.
pub fn varied() -> Vec<Request> {
    let greedy = |text: &str| text_request(text, 32);
    let sampled = |text: &str, seed| {
        let mut request = text_request(text, 32);
        request.sampling = Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, seed, ..Sampling::default() };
        request
    };
    let mut penalised = greedy(&chat("List some words."));
    penalised.sampling = Sampling {
        repeat_penalty: 1.2,
        presence_penalty: 0.5,
        frequency_penalty: 0.1,
        logit_bias: vec![(220, 1.5), (198, -2.0)],
        ..Sampling::default()
    };
    let mut hot = sampled("fn main() {\n    let x = ", 5);
    hot.sampling = Sampling { temperature: 1.3, min_p: 0.02, repeat_penalty: 1.1, seed: 77, ..Sampling::default() };
    hot.ignore_eos = true;
    let mut stopping = greedy("One, two, three, four, five, six, seven,");
    stopping.stop = vec![", ".into(), "\n\n".into()];
    stopping.max_tokens = Some(40);
    vec![
        greedy(&chat("What is the capital of France?")),
        sampled(&chat("Tell me a story about a dog."), 1),
        penalised,
        hot,
        stopping,
        greedy("Der schnelle braune Fuchs springt über den faulen Hund. Der schnelle braune Fuchs springt"),
        sampled("The", 2),
        greedy(&(0..60).map(|i| format!("{i} squared is {}. ", i * i)).collect::<String>()),
    ]
}

/// What varied requests must answer: each alone in a fresh engine without drafts.
pub fn expected() -> &'static [Answer] {
    static EXPECTED: OnceLock<Vec<Answer>> = OnceLock::new();
    EXPECTED.get_or_init(|| varied().iter().map(|request| ask(&start(1, plain()), request).0).collect())
}
