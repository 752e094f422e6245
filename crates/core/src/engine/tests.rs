//! The engine on the toy model: what every answer must be is known, and any row read wrongly shows.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::options::CustomDrafter;
use super::request::PromptItem;
use super::start::start_on;
use super::toy::{POISON, Toy};
use super::*;
use crate::vision::PictureRows;

fn options(slots: usize) -> EngineOptions {
    // (The toy insists on the hidden rows of its own text.)
    let warm_up = false;
    EngineOptions { slots, ctx: 400, mtp: MtpSetting::Off, prompt_chunk: 16, warm_up, ..EngineOptions::default() }
}

fn start(toy: Toy, options: EngineOptions) -> EngineHandle {
    start_on(Arc::new(toy), Toy::tokenizer(), options).unwrap()
}

fn misses(head_misses: u64) -> Toy {
    Toy { head_misses, ..Toy::default() }
}

/// What a request heard.
#[derive(Debug, PartialEq)]
struct Answer {
    ids: Vec<u32>,
    text: String,
    logprobs: Vec<TokenLogprobs>,
    reason: FinishReason,
}

fn collect(stream: RequestStream) -> (Answer, RequestStats) {
    let mut answer = Answer { ids: vec![], text: String::new(), logprobs: vec![], reason: FinishReason::Cancelled };
    for event in stream {
        match event {
            Event::Started { .. } => {}
            Event::Token { id, text, logprobs } => {
                answer.ids.push(id);
                answer.text.push_str(&text);
                answer.logprobs.extend(logprobs);
            }
            Event::Finished { reason, text, stats } => {
                answer.text.push_str(&text);
                answer.reason = reason;
                return (answer, stats);
            }
            Event::Failed(message) => panic!("{message}"),
        }
    }
    panic!("a stream without an end");
}

fn ask(engine: &EngineHandle, request: Request) -> (Answer, RequestStats) {
    collect(engine.submit(request).unwrap())
}

fn prompt(n: u32, rows: usize) -> Vec<u32> {
    (0..rows as u32).map(|i| (n * 31 + i * (7 + n) + i * i) % 250).collect()
}

fn request(n: u32, rows: usize) -> Request {
    Request { prompt: Prompt::tokens(prompt(n, rows)), max_tokens: Some(60), ..Request::default() }
}

/// Requests of every kind of setting.
fn varied(n: u32) -> Request {
    let mut request = request(n, 3 + (n as usize * 17) % 70);
    match n % 6 {
        0 => {}
        1 => request.sampling = Sampling { temperature: 0.9, seed: u64::from(n), ..Sampling::default() },
        2 => {
            request.sampling = Sampling {
                repeat_penalty: 1.3,
                presence_penalty: 0.4,
                frequency_penalty: 0.2,
                logit_bias: vec![(65, 3.0), (66, f32::NEG_INFINITY)],
                ..Sampling::default()
            };
            request.logprobs = Some(3);
        }
        3 => {
            request.sampling =
                Sampling { temperature: 1.2, top_k: 9, top_p: 0.9, min_p: 0.02, seed: 9, ..Sampling::default() };
            request.logprobs = Some(0);
            request.ignore_eos = true;
        }
        4 => request.stop_token_ids = (100..110).collect(),
        _ => request.max_tokens = None,
    }
    request
}

fn plain_answers(requests: &[Request]) -> Vec<Answer> {
    let alone = start(Toy::default(), options(1));
    requests.iter().map(|request| ask(&alone, request.clone()).0).collect()
}

fn draft_settings() -> Vec<EngineOptions> {
    let mut settings: Vec<EngineOptions> = Vec::new();
    for mtp in [
        MtpSetting::Off,
        MtpSetting::Auto,
        MtpSetting::Depth(1),
        MtpSetting::Depth(2),
        MtpSetting::Depth(3),
        MtpSetting::Depth(4),
    ] {
        for ngram in [None, Some(NgramOptions { min_match: 1, long_match: 3, max_draft: 5 })] {
            settings.push(EngineOptions { mtp, ngram, ..options(1) });
        }
    }
    settings.push(EngineOptions { mtp: MtpSetting::Depth(6), max_window: 3, batch_mtp: false, ..options(1) });
    settings.push(EngineOptions { mtp: MtpSetting::Depth(3), draft_p_min: 0.02, ..options(1) });
    settings
}

#[test]
fn answers_are_the_same_alone_and_together_with_and_without_drafts() {
    let requests: Vec<Request> = (0..18).map(varied).collect();
    let expected = plain_answers(&requests);
    for setting in draft_settings() {
        for slots in [1, 2, 4, 8] {
            let engine = start(misses(3), EngineOptions { slots, ..setting.clone() });
            let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
            for (n, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
                let (answer, _) = collect(stream);
                assert_eq!(&answer, expected, "request {n}, {slots} slots, {:?} {:?}", setting.mtp, setting.ngram);
            }
        }
    }
}

#[test]
fn stop_strings_inside_an_accepted_window_end_the_answer_at_the_same_place() {
    let mut base = request(4, 20);
    base.ignore_eos = true;
    let whole = plain_answers(std::slice::from_ref(&base)).remove(0).text;
    let chars: Vec<char> = whole.chars().collect();
    assert!(chars.len() > 20);
    for at in [3, 8, 13] {
        let stop: String = chars[at..at + 3].iter().collect();
        let request = Request { stop: vec![stop.clone(), "never".into()], ..base.clone() };
        let expected = plain_answers(std::slice::from_ref(&request)).remove(0);
        assert_eq!(expected.reason, FinishReason::StopString(stop.clone()));
        assert_eq!(expected.text, whole[..whole.find(&stop).unwrap()]);
        for depth in 1..=4 {
            let engine = start(Toy::default(), EngineOptions { mtp: MtpSetting::Depth(depth), ..options(2) });
            assert_eq!(ask(&engine, request.clone()).0, expected, "depth {depth}");
        }
    }
}

/// Proposes the right tokens up to a place in the window, then a wrong one.
struct WrongAt {
    answer: Vec<u32>,
    prompt: usize,
    place: usize,
    calls: AtomicUsize,
}

impl CustomDrafter for WrongAt {
    fn propose(&self, tokens: &[u32], room: usize, out: &mut Vec<u32>) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let known = self.answer.iter().skip(tokens.len() - self.prompt).take(room);
        out.extend(known.enumerate().map(|(i, &id)| if i == self.place { (id + 1) % 200 } else { id }));
    }
}

#[test]
fn a_rejection_at_any_place_leaves_no_trace() {
    let base = Request { ignore_eos: true, ..request(2, 11) };
    let expected = plain_answers(std::slice::from_ref(&base)).remove(0);
    let fresh = |tokens: &[u32]| {
        let mut state = super::toy::ToyState::default();
        let toy = Toy::default();
        let rows = tokens.iter().map(|&token| crate::model::Row {
            slot: 0,
            input: crate::model::RowInput::Token(token),
            position: [0; 3],
            want_logits: false,
            want_hidden: false,
        });
        let window = crate::model::Window { rows: rows.collect(), verify: vec![] };
        super::target::Target::forward(&toy, &window, &mut [&mut state], &mut Default::default()).unwrap();
        <Toy as super::target::Target>::hash(&state)
    };
    for place in 0..7 {
        let drafter = Arc::new(WrongAt { answer: expected.ids.clone(), prompt: 11, place, calls: AtomicUsize::new(0) });
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let audit = seen.clone();
        let engine = start(
            Toy::default(),
            EngineOptions {
                custom_drafter: Some(drafter.clone()),
                state_audit: Some(Arc::new(move |_, tokens, hash| audit.lock().unwrap().push((tokens.to_vec(), hash)))),
                ..options(1)
            },
        );
        let (answer, stats) = ask(&engine, base.clone());
        assert_eq!(answer, expected);
        assert_eq!(stats.windows, 59usize.div_ceil(place + 1), "place {place}");
        assert!(stats.accepted_per_position[..place].iter().all(|&(tried, right)| tried == right || tried > 0));
        for (tokens, hash) in seen.lock().unwrap().iter() {
            assert_eq!(fresh(tokens), *hash, "place {place}, {} rows", tokens.len());
        }
    }
}

#[test]
fn a_perfect_head_fills_the_window_and_acceptance_is_counted_per_position() {
    let engine = start(Toy::default(), EngineOptions { mtp: MtpSetting::Depth(3), ..options(1) });
    // An end token must not come up: the head would propose it in vain.
    let base = Request { max_tokens: Some(41), ..request(6, 30) };
    let (_, stats) = ask(&engine, base);
    // The first token comes with the prompt, then four per window.
    assert_eq!((stats.generated, stats.windows, stats.drafted, stats.accepted), (41, 10, 30, 30));
    assert_eq!(stats.accepted_per_position, [(10, 10); 3]);
    assert!((stats.tokens_per_window() - 4.0).abs() < 1e-9);
}

#[test]
fn ngram_drafts_pay_on_a_periodic_text() {
    let toy = Toy { period: 9, ..Toy::default() };
    let ngram = Some(NgramOptions::default());
    let engine = start(toy, EngineOptions { ngram, ..options(1) });
    let (_, stats) = ask(&engine, Request { ignore_eos: true, max_tokens: Some(200), ..request(1, 9) });
    assert!(stats.accepted as f64 > 0.95 * stats.drafted as f64 && stats.windows < 50, "{stats:?}");
}

fn reuse(engine: &EngineHandle, tokens: &[u32], turn_starts: &[usize]) -> (Answer, usize) {
    let prompt = Prompt { pieces: vec![PromptItem::Tokens(tokens.to_vec())], turn_starts: turn_starts.to_vec() };
    let (answer, stats) = ask(engine, Request { prompt, max_tokens: Some(12), ignore_eos: true, ..Request::default() });
    (answer, stats.reused_rows)
}

fn fresh_answer(tokens: &[u32]) -> Answer {
    reuse(&start(Toy::default(), options(1)), tokens, &[]).0
}

#[test]
fn what_is_held_is_not_read_again_and_changes_nothing() {
    for mtp in [MtpSetting::Off, MtpSetting::Depth(2), MtpSetting::Auto] {
        for slots in [1, 3] {
            let engine = start(misses(4), EngineOptions { mtp, ..options(slots) });
            let check = |tokens: &[u32], turns: &[usize], expected_reuse: usize| {
                let (answer, reused) = reuse(&engine, tokens, turns);
                assert_eq!(answer, fresh_answer(tokens), "{mtp:?}, {slots} slots");
                assert_eq!(reused, expected_reuse, "{mtp:?}, {slots} slots, prompt of {}", tokens.len());
                answer.ids
            };
            let turns = [0, 20, 50, 90];
            let first = prompt(1, 100);
            let answer = check(&first, &turns, 0);
            // The same again needs no reading at all.
            check(&first, &turns, 100);
            // Continued with its own answer: everything but the last token is held.
            let mut continued = first.clone();
            continued.extend(&answer);
            continued.extend(prompt(2, 10));
            let (_, reused) = reuse(&engine, &continued, &[0, 20, 50, 90, 112]);
            assert!(reused >= 111, "{mtp:?}, {slots} slots: {reused}");
            // The last turn edited, then the one after the system prompt.
            let mut last = first.clone();
            last[95] ^= 1;
            check(&last, &turns, 90);
            let mut early = first.clone();
            early[30] ^= 1;
            check(&early, &turns, 20);
            // A prompt that is the start of a held one goes on from the last checkpoint inside it.
            check(&early[..60], &[0, 20, 50], 50);
            check(&prompt(9, 40), &[], 0);
        }
    }
}

#[test]
fn a_busy_slots_start_is_copied() {
    let toy = Toy { window_time: Duration::from_millis(2), ..Toy::default() };
    let engine = start(toy, EngineOptions { mtp: MtpSetting::Depth(2), ..options(2) });
    let tokens = prompt(3, 80);
    let long = Prompt { pieces: vec![PromptItem::Tokens(tokens.clone())], turn_starts: vec![0, 30, 70] };
    let mut busy = engine.submit(Request { prompt: long, ignore_eos: true, ..Request::default() }).unwrap();
    while !matches!(busy.recv(), Some(Event::Token { .. })) {}
    let mut other = tokens.clone();
    other[75] ^= 1;
    let (answer, reused) = reuse(&engine, &other, &[0, 30, 70]);
    assert_eq!((reused, answer), (70, fresh_answer(&other)));
    assert_eq!(engine.status().cache.slot_hits, 1);
}

#[test]
fn without_the_cache_nothing_is_reused_or_kept() {
    let engine = start(Toy::default(), options(1));
    let private = Request { cache_prompt: CachePrompt::No, ..request(1, 50) };
    ask(&engine, private.clone());
    assert_eq!(engine.status().slots[0].held_rows, 0);
    assert_eq!(ask(&engine, request(1, 50)).1.reused_rows, 0);
    assert_eq!(ask(&engine, private).1.reused_rows, 0);
}

#[test]
fn evicted_conversations_come_back_from_memory() {
    for mtp in [MtpSetting::Off, MtpSetting::Depth(2)] {
        let engine = start(misses(4), EngineOptions { cache_ram_bytes: 1 << 20, mtp, ..options(1) });
        let (a, b) = (prompt(1, 60), prompt(2, 60));
        reuse(&engine, &a, &[0, 25]);
        reuse(&engine, &b, &[0, 25]);
        assert_eq!(reuse(&engine, &a, &[0, 25]), (fresh_answer(&a), 60));
        assert_eq!(engine.status().cache.ram_hits, 1);
        let mut edited = b.clone();
        edited[30] ^= 1;
        assert_eq!(reuse(&engine, &edited, &[0, 25]), (fresh_answer(&edited), 25));
        // Memory is bounded.
        for n in 10..40 {
            reuse(&engine, &prompt(n, 300), &[]);
        }
        let cache = engine.status().cache;
        assert!(cache.ram_bytes <= 1 << 20 && cache.ram_entries > 0, "{cache:?}");
    }
}

#[test]
fn a_state_moved_by_keeping_another_is_still_the_right_one() {
    // Memory for a few states only: keeping the slot's state drops and moves the ones before it.
    for ram in [4_000, 10_000, 30_000, 1 << 20] {
        let folder = tempfile::tempdir().unwrap();
        for cache_dir in [None, Some(folder.path().to_path_buf())] {
            let with = EngineOptions { cache_ram_bytes: ram, cache_dir, cache_dir_bytes: 20_000, ..options(1) };
            let engine = start(Toy::default(), with);
            for step in 0..60 {
                let mut tokens = prompt((step * 7 % 9) as u32, 40 + step % 3 * 20);
                tokens.extend(prompt(100 + step as u32 % 2, 5));
                assert_eq!(reuse(&engine, &tokens, &[0, 20]).0, fresh_answer(&tokens), "step {step}, {ram} bytes");
            }
        }
    }
}

#[test]
fn the_disk_cache_survives_a_restart_and_refuses_damage_and_other_models() {
    let folder = tempfile::tempdir().unwrap();
    let with = |model: u8| EngineOptions {
        cache_dir: Some(folder.path().to_path_buf()),
        model_id: [model; 32],
        mtp: MtpSetting::Depth(2),
        ..options(1)
    };
    let tokens = prompt(5, 70);
    let first = start(misses(4), with(1));
    let answer = reuse(&first, &tokens, &[0, 40]).0;
    first.stop(Duration::ZERO);
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();

    let again = start(misses(4), with(1));
    assert_eq!(reuse(&again, &tokens, &[0, 40]), (answer, 70));
    assert_eq!(again.status().cache.disk_hits, 1);
    drop(again);

    let other = start(Toy::default(), with(2));
    assert_eq!(reuse(&other, &tokens, &[]).1, 0);
    assert_eq!(other.status().cache.disk_refused, 1);
    drop(other);

    let whole = std::fs::read(&file).unwrap();
    for at in (0..whole.len()).step_by(whole.len() / 23) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        std::fs::write(&file, &damaged).unwrap();
        let engine = start(misses(4), with(1));
        assert_eq!(reuse(&engine, &tokens, &[]), (fresh_answer(&tokens), 0), "byte {at}");
        assert!(engine.status().cache.disk_refused >= 1, "byte {at}");
        drop(engine);
        std::fs::read_dir(folder.path())
            .unwrap()
            .for_each(|entry| std::fs::remove_file(entry.unwrap().path()).unwrap());
    }
}

#[test]
fn a_start_on_disk_is_fetched_while_another_slot_decodes() {
    let folder = tempfile::tempdir().unwrap();
    let with = || EngineOptions { cache_dir: Some(folder.path().to_path_buf()), ctx: 4000, ..options(2) };
    let tokens = prompt(5, 70);
    let first = start(Toy::default(), with());
    reuse(&first, &tokens, &[0, 40]);
    first.stop(Duration::ZERO);
    let file = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    let whole = std::fs::read(&file).unwrap();
    for damaged in [false, true] {
        std::fs::write(&file, if damaged { &whole[..whole.len() - 1] } else { &whole[..] }).unwrap();
        let engine = start(Toy { window_time: Duration::from_micros(200), ..Toy::default() }, with());
        let endless = Request { ignore_eos: true, max_tokens: Some(3000), ..request(1, 20) };
        let busy = engine.submit(endless).unwrap();
        while engine.status().totals.windows < 3 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let held = if damaged { 0 } else { 70 };
        assert_eq!(reuse(&engine, &tokens, &[0, 40]), (fresh_answer(&tokens), held));
        assert!(engine.status().slots.iter().any(|slot| slot.state == "decoding"), "the other slot had ended");
        drop(busy);
        engine.stop(Duration::ZERO);
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            std::fs::remove_file(entry.unwrap().path()).unwrap();
        }
    }
}

#[test]
fn pictures_are_told_apart_by_key_and_read_at_their_place() {
    let picture = |key: u8| {
        let data: Vec<f32> = (0..6 * 4).map(|i| f32::from(key) + i as f32).collect();
        Arc::new(PictureRows { key: [key; 32], grid: (2, 3), width: 4, data: data.into() })
    };
    let asked = |key: u8| Request {
        prompt: Prompt {
            pieces: vec![
                PromptItem::Tokens(prompt(1, 10)),
                PromptItem::Picture(picture(key)),
                PromptItem::Tokens(prompt(2, 8)),
            ],
            turn_starts: vec![0],
        },
        max_tokens: Some(9),
        ignore_eos: true,
        ..Request::default()
    };
    let alone = |key| ask(&start(Toy::default(), options(1)), asked(key)).0;
    let engine = start(Toy::default(), EngineOptions { mtp: MtpSetting::Depth(2), prompt_chunk: 5, ..options(1) });
    let (first, _) = ask(&engine, asked(1));
    assert_eq!(first, alone(1));
    let (second, stats) = ask(&engine, asked(2));
    assert_eq!((second, stats.reused_rows), (alone(2), 10));
    assert_ne!(alone(1), alone(2));
    assert_eq!(ask(&engine, asked(2)).1.reused_rows, 24);
}

#[test]
fn dropping_a_stream_frees_its_slot_and_leaves_the_others_alone() {
    let toy = Toy { window_time: Duration::from_micros(300), ..misses(3) };
    let engine = start(toy, EngineOptions { mtp: MtpSetting::Depth(2), ..options(2) });
    let expected = plain_answers(&[request(1, 30)]).remove(0);
    let mut going = engine.submit(Request { ignore_eos: true, max_tokens: None, ..request(7, 20) }).unwrap();
    while !matches!(going.recv(), Some(Event::Token { .. })) {}
    let mid_prompt = engine.submit(request(8, 390)).unwrap();
    let other = engine.submit(request(1, 30)).unwrap();
    let queued = engine.submit(request(9, 10)).unwrap();
    drop(queued);
    drop(mid_prompt);
    drop(going);
    assert_eq!(collect(other).0, expected);
    let status = wait_idle(&engine);
    assert_eq!((status.totals.cancelled, status.totals.finished, status.queued), (3, 1, 0));
}

fn wait_idle(engine: &EngineHandle) -> EngineStatus {
    let started = Instant::now();
    loop {
        let status = engine.status();
        if status.running == 0 && status.queued == 0 && status.slots.iter().all(|slot| slot.state == "idle") {
            return status;
        }
        assert!(started.elapsed() < Duration::from_secs(10), "{status:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_slow_reader_pauses_alone_and_loses_its_request_in_the_end() {
    let patience = Duration::from_millis(300);
    let options = EngineOptions { event_buffer: 8, slow_reader: patience, ..options(2) };
    let engine = start(Toy::default(), options);
    let mut slow = engine.submit(Request { ignore_eos: true, ..request(3, 10) }).unwrap();
    let expected = plain_answers(&[Request { ignore_eos: true, ..request(1, 30) }]).remove(0);
    assert_eq!(ask(&engine, Request { ignore_eos: true, ..request(1, 30) }).0, expected);
    std::thread::sleep(Duration::from_millis(20));
    assert!(engine.status().slots.iter().any(|slot| slot.state == "paused"), "{:?}", engine.status());
    // Reading on goes on.
    for _ in 0..20 {
        assert!(slow.recv().is_some());
    }
    std::thread::sleep(patience * 3);
    let status = wait_idle(&engine);
    assert_eq!(status.totals.cancelled, 1);
}

#[test]
fn the_queue_has_a_limit_and_requests_are_checked() {
    let toy = Toy { window_time: Duration::from_millis(1), ..Toy::default() };
    let engine = start(toy, EngineOptions { queue_limit: 2, ..options(1) });
    let endless = || Request { ignore_eos: true, max_tokens: None, ..request(1, 10) };
    let mut first = engine.submit(endless()).unwrap();
    while !matches!(first.recv(), Some(Event::Token { .. })) {}
    let _second = engine.submit(endless()).unwrap();
    let _third = engine.submit(endless()).unwrap();
    assert_eq!(engine.submit(endless()).err(), Some(SubmitError::QueueFull { queued: 2, limit: 2 }));

    let invalid = |request: Request, word: &str| {
        let error = engine.submit(request).err().unwrap().to_string();
        assert!(error.contains(word), "{error}");
    };
    invalid(Request { prompt: Prompt::tokens(vec![]), ..endless() }, "prompt");
    invalid(Request { prompt: Prompt::tokens(vec![1, 300]), ..endless() }, "300");
    invalid(request(1, 400), "400");
    invalid(Request { stop: vec![String::new()], ..endless() }, "stop");
    let sampling = |sampling| Request { sampling, ..endless() };
    invalid(sampling(Sampling { temperature: f32::NAN, ..Sampling::default() }), "temperature");
    invalid(sampling(Sampling { temperature: -1.0, ..Sampling::default() }), "temperature");
    invalid(sampling(Sampling { top_p: 1.5, ..Sampling::default() }), "top_p");
    invalid(sampling(Sampling { logit_bias: vec![(300, 1.0)], ..Sampling::default() }), "logit_bias");
    let mut backwards = endless();
    backwards.prompt.turn_starts = vec![5, 2];
    invalid(backwards, "turn starts");
}

#[test]
fn the_context_is_what_was_promised() {
    let engine = start(Toy::default(), EngineOptions { mtp: MtpSetting::Depth(4), ..options(1) });
    for rows in [1, 390, 395, 398, 399] {
        let (answer, _) = ask(&engine, Request { ignore_eos: true, max_tokens: None, ..request(1, rows) });
        assert_eq!((answer.ids.len(), answer.reason), (400 - rows, FinishReason::ContextFull));
    }
    let (answer, _) = ask(&engine, Request { max_tokens: Some(0), ..request(1, 10) });
    assert_eq!((answer.ids.len(), answer.reason), (0, FinishReason::Length));
}

#[test]
fn a_fault_ends_the_request_that_causes_it_and_no_other() {
    let bias = |n: u32| {
        // Chooses the poison token as its 5th or so: the window that feeds it panics.
        let mut request = request(n, 20);
        request.stop_token_ids = vec![];
        request.ignore_eos = true;
        request
    };
    let requests: Vec<Request> = (1..4).map(bias).collect();
    let expected = plain_answers(&requests);
    let toy = Toy { poisoned: true, window_time: Duration::from_micros(200), ..misses(3) };
    let engine = start(toy, EngineOptions { mtp: MtpSetting::Depth(2), ..options(4) });
    let mut streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    while !matches!(streams[0].recv(), Some(Event::Token { .. })) {}
    let mut poisoned = request(9, 10);
    poisoned.prompt.pieces.push(PromptItem::Tokens(vec![POISON, 1, 2]));
    let failure = engine.submit(poisoned).unwrap().last();
    assert!(matches!(failure, Some(Event::Failed(message)) if message.contains("poison")));
    let mut in_window = request(9, 10);
    // Its own logit is minus infinity; only force brings it out.
    in_window.stop_token_ids = vec![];
    for (n, (stream, expected)) in streams.into_iter().zip(&expected).enumerate() {
        let answer = collect(stream).0;
        assert!(answer.ids.ends_with(&expected.ids[expected.ids.len() - 40..]), "request {n}");
    }
    assert_eq!(engine.status().totals.failed, 1);
}

/// Proposes the poison token after some tokens: the window that verifies it fails.
struct Poisoner {
    at: usize,
}

impl CustomDrafter for Poisoner {
    fn propose(&self, tokens: &[u32], _room: usize, out: &mut Vec<u32>) {
        if tokens.len() == self.at {
            out.push(POISON);
        }
    }
}

#[test]
fn a_failed_window_is_done_again_slot_by_slot() {
    let requests: Vec<Request> =
        (1..5).map(|n| Request { ignore_eos: true, ..request(n, 10 + n as usize * 3) }).collect();
    let expected = plain_answers(&requests);
    let toy = Toy { poisoned: true, ..Toy::default() };
    let drafter = Some(Arc::new(Poisoner { at: 40 }) as Arc<dyn CustomDrafter>);
    let engine = start(toy, EngineOptions { custom_drafter: drafter, ..options(4) });
    let streams: Vec<_> = requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    for (stream, expected) in streams.into_iter().zip(&expected) {
        assert_eq!(&collect(stream).0, expected);
    }
    assert_eq!(engine.status().totals.failed, 0);
}

#[test]
fn stopping_lets_running_requests_finish_within_the_grace() {
    let toy = || Toy { window_time: Duration::from_millis(1), ..Toy::default() };
    let engine = start(toy(), options(1));
    let running = engine.submit(request(2, 10)).unwrap();
    let waiting = engine.submit(request(3, 10)).unwrap();
    engine.stop(Duration::from_secs(20));
    let expected = plain_answers(&[request(2, 10), request(3, 10)]);
    assert_eq!([collect(running).0, collect(waiting).0], expected[..]);
    assert_eq!(engine.submit(request(1, 5)).err(), Some(SubmitError::Stopping));

    let engine = start(toy(), options(1));
    let running = engine.submit(Request { ignore_eos: true, max_tokens: None, ..request(2, 10) }).unwrap();
    let waiting = engine.submit(request(3, 10)).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    engine.stop(Duration::ZERO);
    assert_eq!(collect(running).0.reason, FinishReason::Stopping);
    assert_eq!(collect(waiting).0.reason, FinishReason::Stopping);
}

#[test]
fn a_head_that_is_the_whole_model_is_told() {
    let slow = Duration::from_micros(300);
    let disguised = Toy { window_time: slow, draft_time: slow, ..Toy::default() };
    let ask_with = |toy: Toy| {
        let engine = start(toy, EngineOptions { mtp: MtpSetting::Depth(2), ..options(1) });
        ask(&engine, Request { ignore_eos: true, max_tokens: Some(150), ..request(1, 10) }).1
    };
    assert!(ask_with(disguised).draft_warning.is_some());
    let honest = Toy { window_time: slow, draft_time: slow / 20, ..Toy::default() };
    assert_eq!(ask_with(honest).draft_warning, None);
}

#[test]
fn a_short_prompt_overtakes_a_long_one_and_decoding_goes_on_between_chunks() {
    let toy = Toy { window_time: Duration::from_millis(1), ..Toy::default() };
    let engine = start(toy, EngineOptions { prompt_chunk: 1, ..options(3) });
    let mut decoding = engine.submit(Request { ignore_eos: true, max_tokens: None, ..request(1, 5) }).unwrap();
    while !matches!(decoding.recv(), Some(Event::Token { .. })) {}
    let long = engine.submit(request(2, 350)).unwrap();
    let short = engine.submit(Request { max_tokens: Some(1), ..request(3, 12) }).unwrap();
    collect(short);
    assert!(engine.status().slots.iter().any(|slot| slot.state == "reading" && slot.read_rows < 350));
    collect(long);
    // A window after each of the 350 chunks and of the 12.
    let made = std::iter::from_fn(|| decoding.recv_timeout(Duration::ZERO).ok().flatten()).count();
    assert!(made >= 361, "{made}");
}
