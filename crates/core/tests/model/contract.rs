//! The numerics contract: a row's bits depend only on its slot's history.

use super::{golden, load, read, read_mtp, rows, sample_tokens, tiny};
use strata_core::gguf::GgufFile;
use strata_core::model::{Model, SlotState, StepOutput, Window};
use strata_kernels::cpu::Simd;

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn state(model: &Model) -> SlotState {
    model.new_state(1024).expect("a state")
}

#[test]
fn chunk_sizes_and_threads_change_no_bit() {
    let tokens = sample_tokens(300);
    let file = GgufFile::open(&golden("tiny.gguf")).expect("opens");
    let mut reference = None;
    for threads in [1, 2, 3] {
        let model = load(&file, threads);
        for chunk in [512, 1, 7, 32] {
            let mut state = state(&model);
            let (logits, hidden) = read(&model, &mut state, &tokens, chunk);
            let (mtp_logits, mtp_hidden) = read_mtp(&model, &mut state, &tokens, &hidden, chunk);
            let found = (bits(&logits), bits(&hidden), bits(&mtp_logits), bits(&mtp_hidden), state.hash());
            let expected = reference.get_or_insert_with(|| found.clone());
            assert!(found == *expected, "chunks of {chunk} on {threads} threads differ");
        }
    }
}

/// Set in the processes of [`every_instruction_set_gives_the_same_bits`] that compute, one per level.
const COMPUTES: &str = "STRATA_TEST_COMPUTES_BITS";

#[test]
fn every_instruction_set_gives_the_same_bits() {
    const NAME: &str = "contract::every_instruction_set_gives_the_same_bits";
    if std::env::var_os(COMPUTES).is_some() {
        let tokens = sample_tokens(120);
        let mut state = state(tiny());
        let (mut logits, mut hidden) = read(tiny(), &mut state, &tokens[..100], 512);
        let (more_logits, more_hidden) = read(tiny(), &mut state, &tokens[100..], 1);
        logits.extend(more_logits);
        hidden.extend(more_hidden);
        let (mtp_logits, _) = read_mtp(tiny(), &mut state, &tokens, &hidden, 64);
        let fold = |values: &[f32]| {
            bits(values).iter().fold(0u64, |hash, &word| (hash ^ u64::from(word)).wrapping_mul(0x0100_0000_01b3))
        };
        println!("level {:?}", Simd::current());
        println!("bits {:x} {:x} {:x} {:?}", fold(&logits), fold(&hidden), fold(&mtp_logits), state.hash());
        return;
    }
    // The level is read once per process.
    let computed = |level: &str, simd: Simd| {
        let mut command = std::process::Command::new(std::env::current_exe().expect("this test"));
        command.args([NAME, "--exact", "--nocapture"]).env(COMPUTES, "1").env("STRATA_SIMD", level);
        let out = command.output().expect("runs");
        let out = String::from_utf8(out.stdout).expect("text");
        assert!(out.contains(&format!("level {simd:?}\n")), "{level}: {out}");
        let found = out.lines().find_map(|line| line.split_once("bits ")).unwrap_or_else(|| panic!("{level}: {out}"));
        found.1.to_owned()
    };
    let scalar = computed("scalar", Simd::Scalar);
    for (level, simd) in [("avx2", Simd::Avx2), ("avx512", Simd::Avx512)] {
        // A machine that lacks a level takes its best one.
        assert_eq!(computed(level, simd.min(Simd::detect())), scalar, "{level}");
    }
}

#[test]
fn slots_in_one_window_do_not_see_each_other() {
    let model = tiny();
    let tokens = sample_tokens(240);
    // Slot s reads its own part of the text, after a start of its own length.
    let start = |slot: usize| &tokens[slot * 10..slot * 20 + 5];
    let next = |slot: usize, step: usize| tokens[100 + slot * 7 + step];
    let mut alone = Vec::new();
    for slot in 0..8 {
        let mut state = state(model);
        read(model, &mut state, start(slot), 64);
        let steps: Vec<u32> = (0..5).map(|step| next(slot, step)).collect();
        let (logits, _) = read(model, &mut state, &steps, 1);
        alone.push((bits(&logits), state.hash()));
    }
    for count in [2, 4, 8] {
        let mut states: Vec<SlotState> = (0..count).map(|_| state(model)).collect();
        for (slot, state) in states.iter_mut().enumerate() {
            read(model, state, start(slot), 3);
        }
        let mut logits = vec![Vec::new(); count];
        let mut out = StepOutput::default();
        for step in 0..5 {
            let mut window = Window::default();
            // Slots in another order every step.
            let order: Vec<usize> = (0..count).map(|index| (index * 3 + step) % count).collect();
            let order = if count % 3 == 0 { (0..count).collect() } else { order };
            for &slot in &order {
                window.rows.extend(rows(slot as u32, &[next(slot, step)], states[slot].rows(), true));
            }
            model.forward(&window, &mut states.iter_mut().collect::<Vec<_>>(), &mut out).expect("runs");
            for (&slot, row) in order.iter().zip(out.logits.chunks_exact(model.config().vocab)) {
                logits[slot].extend(bits(row));
            }
        }
        for slot in 0..count {
            assert!(logits[slot] == alone[slot].0, "slot {slot} of {count} differs from alone");
            assert_eq!(states[slot].hash(), alone[slot].1, "state of slot {slot} of {count}");
        }
    }
}

#[test]
fn a_verify_window_commits_exactly_the_accepted_rows() {
    let model = tiny();
    let tokens = sample_tokens(120);
    let (start, draft, rest) = (&tokens[..70], &tokens[70..77], &tokens[90..95]);
    for accepted in 0..=draft.len() {
        let mut plain = state(model);
        read(model, &mut plain, start, 32);
        let (expected_draft, _) = read(model, &mut plain.clone_for_test(model), draft, 1);
        if accepted > 0 {
            read(model, &mut plain, &draft[..accepted], 1);
        }
        let mut verified = state(model);
        read(model, &mut verified, start, 32);
        let before = verified.hash();
        let window = Window { rows: rows(0, draft, verified.rows(), true), verify: vec![true] };
        let mut out = StepOutput::default();
        model.forward(&window, &mut [&mut verified], &mut out).expect("runs");
        assert!(bits(&out.logits) == bits(&expected_draft), "logits of a verify window are those of plain reading");
        assert_eq!(verified.hash(), before, "an uncommitted window changes nothing");
        model.commit(&mut verified, accepted);
        assert_eq!(verified.rows(), plain.rows());
        assert_eq!(bits(verified.last_hidden()), bits(plain.last_hidden()), "{accepted} accepted: last hidden row");
        assert_eq!(verified.hash(), plain.hash(), "{accepted} accepted: state");
        let (after_verify, _) = read(model, &mut verified, rest, 2);
        let (after_plain, _) = read(model, &mut plain, rest, 5);
        assert!(bits(&after_verify) == bits(&after_plain), "{accepted} accepted: rows read afterwards");
    }
}

/// A copy of a state through [`SlotState::copy_from`].
trait CloneForTest {
    fn clone_for_test(&self, model: &Model) -> SlotState;
}

impl CloneForTest for SlotState {
    fn clone_for_test(&self, model: &Model) -> SlotState {
        let mut copy = state(model);
        copy.copy_from(self);
        copy
    }
}

#[test]
fn verify_and_plain_slots_share_a_window() {
    let model = tiny();
    let tokens = sample_tokens(200);
    let mut expected: Vec<SlotState> = (0..3).map(|_| state(model)).collect();
    let mut states: Vec<SlotState> = (0..3).map(|_| state(model)).collect();
    for slot in 0..3 {
        read(model, &mut expected[slot], &tokens[slot * 20..slot * 20 + 15], 64);
        states[slot].copy_from(&expected[slot]);
    }
    let mut window = Window { rows: Vec::new(), verify: vec![true, false, true] };
    let accepted = [2, 3, 0];
    for slot in 0..3 {
        let drafts = &tokens[100 + slot * 10..103 + slot * 10];
        window.rows.extend(rows(slot as u32, drafts, 15, true));
        if accepted[slot] > 0 {
            read(model, &mut expected[slot], &drafts[..accepted[slot]], 1);
        }
    }
    let mut out = StepOutput::default();
    model.forward(&window, &mut states.iter_mut().collect::<Vec<_>>(), &mut out).expect("runs");
    model.commit(&mut states[0], accepted[0]);
    model.commit(&mut states[2], accepted[2]);
    for slot in 0..3 {
        assert_eq!(states[slot].hash(), expected[slot].hash(), "slot {slot}");
    }
}

#[test]
fn a_state_reused_restored_copied_or_loaded_goes_on_as_a_fresh_one() {
    let model = tiny();
    let tokens = sample_tokens(260);
    let (start, rest) = (&tokens[..130], &tokens[130..150]);
    let mut fresh = state(model);
    let (_, hidden) = read(model, &mut fresh, start, 64);
    read_mtp(model, &mut fresh, start, &hidden, 64);
    let at_start = fresh.hash();
    let checkpoint = fresh.checkpoint();
    let mut saved = Vec::new();
    fresh.save(&mut saved).expect("saves");
    let mut copy = fresh.clone_for_test(model);
    let (expected, _) = read(model, &mut fresh, rest, 1);
    let expected = bits(&expected);
    let at_end = fresh.hash();

    // Copies share pages: what the original wrote since must not show.
    assert_eq!(copy.hash(), at_start);
    assert!(bits(&read(model, &mut copy, rest, 7).0) == expected);
    assert_eq!(copy.hash(), at_end);

    // Back to the checkpoint after reading something else.
    fresh.restore(&checkpoint).expect("restores");
    assert_eq!(fresh.hash(), at_start);
    read(model, &mut fresh, &tokens[200..233], 8);
    fresh.restore(&checkpoint).expect("restores");
    assert_eq!(fresh.hash(), at_start);
    assert!(bits(&read(model, &mut fresh, rest, 3).0) == expected);
    assert_eq!(fresh.hash(), at_end);

    // A slot that held another conversation.
    fresh.reset();
    let (_, hidden) = read(model, &mut fresh, start, 32);
    read_mtp(model, &mut fresh, start, &hidden, 9);
    assert_eq!(fresh.hash(), at_start);

    let mut loaded = state(model);
    read(model, &mut loaded, &tokens[..3], 8);
    loaded.load(&mut &saved[..]).expect("loads");
    assert_eq!(loaded.hash(), at_start);
    assert!(bits(&read(model, &mut loaded, rest, 1).0) == expected);
}

#[test]
fn damaged_saved_states_are_refused_and_leave_a_fresh_state() {
    let model = tiny();
    let mut full = state(model);
    read(model, &mut full, &sample_tokens(70), 64);
    let mut saved = Vec::new();
    full.save(&mut saved).expect("saves");
    let fresh = state(model).hash();
    let mut other = state(model);
    let mut refuse = |bytes: &[u8], what: &str| {
        assert!(other.load(&mut &bytes[..]).is_err(), "{what}");
        assert_eq!(other.hash(), fresh, "{what}");
    };
    for cut in [0, 5, 20, 100, saved.len() / 2, saved.len() - 1] {
        refuse(&saved[..cut], "cut short");
    }
    for at in [0, 9, 17, 25, 40, saved.len() / 2, saved.len() - 3] {
        let mut broken = saved.clone();
        broken[at] ^= 0x40;
        refuse(&broken, "one bit turned");
    }
    let small = model.new_state(64).expect("a state").load(&mut &saved[..]);
    assert!(small.is_err(), "70 rows do not fit into 64");
}

#[test]
fn windows_that_make_no_sense_are_refused() {
    let model = tiny();
    let mut one = model.new_state(4).expect("a state");
    let mut out = StepOutput::default();
    let mut refuse = |window: Window, state: &mut SlotState, part: &str| {
        let before = state.hash();
        let error = model.forward(&window, &mut [state], &mut out).expect_err(part).to_string();
        assert!(error.contains(part), "{error}");
        assert_eq!(state.hash(), before);
    };
    refuse(Window::default(), &mut one, "without rows");
    refuse(Window { rows: rows(1, &[1], 0, true), verify: vec![] }, &mut one, "slot 1");
    refuse(Window { rows: rows(0, &[6144], 0, true), verify: vec![] }, &mut one, "token 6144");
    refuse(Window { rows: rows(0, &[1, 2, 3, 4, 5], 0, true), verify: vec![] }, &mut one, "5 more do not fit");
    let verify = Window { rows: rows(0, &[1, 2], 0, true), verify: vec![true] };
    model.forward(&verify, &mut [&mut one], &mut StepOutput::default()).expect("runs");
    refuse(verify, &mut one, "not committed");
    assert!(model.new_state(0).is_err() && model.new_state(1 << 20).is_err());
}
