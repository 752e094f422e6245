//! Where the time of forward passes goes: `cargo run --release -p strata-core --example model_speed -- FILE.gguf [THREADS [ROWS...]]`.
//!
//! Prints time per prompt chunk, per decode window of 1, 2, 3, 4 and 8 rows (or of ROWS) and per draft step, with the share of
//! each phase.

use std::time::{Duration, Instant};
use strata_core::gguf::GgufFile;
use strata_core::model::{LoadOptions, Model, MtpRow, PerfCounters, Row, RowInput, StepOutput, Window};

/// CPU time of all threads; on a busy machine and one thread it says more than the clock.
fn cpu_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn rows(first: usize, count: usize, logits: bool) -> Vec<Row> {
    let row = |index: usize| Row {
        slot: 0,
        input: RowInput::Token(((first + index) * 37 % 5000) as u32),
        position: [(first + index) as u32; 3],
        want_logits: logits || index + 1 == count,
        want_hidden: false,
    };
    (0..count).map(row).collect()
}

fn report(
    name: &str,
    count: usize,
    steps: usize,
    (spent, cpu): (Duration, Duration),
    counters: &PerfCounters,
    bytes: u64,
) {
    let step = spent.as_secs_f64() / steps as f64;
    let share = |part: Duration| 100.0 * part.as_secs_f64() / spent.as_secs_f64();
    println!(
        "{name:<12} {:9.3} ms (cpu {:9.3})  {:9.1} rows/s  {:6.2} GB/s  attention {:4.1}%  delta net {:4.1}%  moe {:4.1}%  head {:4.1}%  mtp {:4.1}%",
        1e3 * step,
        1e3 * cpu.as_secs_f64() / steps as f64,
        count as f64 / step,
        bytes as f64 / step / 1e9,
        share(counters.attention),
        share(counters.delta_net),
        share(counters.moe),
        share(counters.head),
        share(counters.mtp),
    );
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let path = args.next().ok_or("usage: model_speed FILE.gguf [THREADS]")?;
    let threads = args.next().map_or(Ok(2), |threads| threads.parse())?;
    let mut counts: Vec<usize> = args.map(|count| count.parse()).collect::<Result<_, _>>()?;
    if counts.is_empty() {
        counts.extend([1, 2, 3, 4, 8]);
    }
    let start = Instant::now();
    let file = GgufFile::open(path.as_ref())?;
    let model = Model::load(&file, &LoadOptions { threads, ..LoadOptions::default() })?;
    let sizes = model.weight_sizes();
    println!(
        "opened in {:.1} ms; {:.1} MB per decode row",
        start.elapsed().as_secs_f64() * 1e3,
        sizes.per_token as f64 / 1e6
    );
    let mut state = model.new_state(model.config().context.min(4096))?;
    let mut out = StepOutput::default();
    let steps = if sizes.per_token > 100_000_000 { 6 } else { 2000 };
    for chunk in [512, 128] {
        for timed in [false, true] {
            state.reset();
            model.reset_counters();
            let (start, cpu) = (Instant::now(), cpu_time());
            model.forward(&Window { rows: rows(0, chunk, false), verify: vec![] }, &mut [&mut state], &mut out)?;
            if timed {
                report(&format!("prompt {chunk}"), chunk, 1, (start.elapsed(), cpu_time() - cpu), &model.counters(), 0);
            }
        }
    }
    for count in counts {
        for timed in [false, true] {
            model.reset_counters();
            let (start, cpu) = (Instant::now(), cpu_time());
            for _ in 0..steps {
                let window = Window { rows: rows(state.rows(), count, true), verify: vec![true] };
                model.forward(&window, &mut [&mut state], &mut out)?;
                model.commit(&mut state, 0);
            }
            if timed {
                report(
                    &format!("decode {count}"),
                    count,
                    steps,
                    (start.elapsed(), cpu_time() - cpu),
                    &model.counters(),
                    sizes.per_token,
                );
            }
        }
    }
    if model.has_mtp() {
        model.reset_counters();
        let hidden = state.last_hidden().to_vec();
        let (start, cpu) = (Instant::now(), cpu_time());
        for step in 0..steps {
            let row = MtpRow {
                slot: 0,
                input: RowInput::Token(step as u32),
                hidden: &hidden,
                position: [step as u32; 3],
                want_logits: true,
            };
            model.mtp_forward(&[row], &mut [&mut state], &mut out, None)?;
        }
        report("draft step", 1, steps, (start.elapsed(), cpu_time() - cpu), &model.counters(), sizes.per_draft);
    }
    let anonymous = std::fs::read_to_string("/proc/self/status")?;
    let anonymous = anonymous.lines().find(|line| line.starts_with("RssAnon")).unwrap_or("RssAnon: unknown");
    let planned = sizes.small + model.state_bytes(state.rows() + 8, 8) + model.work_bytes(512, 8);
    println!("{anonymous}; small weights, one slot and work buffers are planned as {} kB", planned / 1000);
    Ok(())
}
