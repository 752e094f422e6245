//! What an answer cost: the line on stderr and the `timings` of `--json`.

use super::answer::Answer;
use std::sync::OnceLock;
use strata_core::model::Model;
use strata_kernels::cpu::{Pool, bandwidth};

/// Figures of one answer, computed once for both forms.
struct Figures {
    prompt_read: usize,
    prompt_rate: Option<f64>,
    decode_rate: Option<f64>,
    gigabytes_per_s: Option<f64>,
    bandwidth_share: Option<f64>,
}

fn figures(answer: &Answer, model: &Model) -> Figures {
    static BANDWIDTH: OnceLock<f64> = OnceLock::new();
    let stats = &answer.stats;
    let rate = |n: usize, seconds: f64| (n > 0 && seconds > 0.0).then(|| n as f64 / seconds);
    let prompt_read = stats.prompt_rows.saturating_sub(stats.reused_rows);
    // Every decode window streams the weights of one row once; rows beyond the first share most of them.
    let gigabytes_per_s =
        rate(stats.windows, stats.decode_s).map(|windows| windows * model.weight_bytes_per_token() as f64 / 1e9);
    Figures {
        prompt_read,
        prompt_rate: rate(prompt_read, stats.prompt_s),
        decode_rate: rate(stats.generated.saturating_sub(1), stats.decode_s),
        gigabytes_per_s,
        bandwidth_share: gigabytes_per_s
            .map(|rate| rate * 1e9 / BANDWIDTH.get_or_init(|| bandwidth::measure(&Pool::new(model.threads())))),
    }
}

/// The timing line.
pub fn line(answer: &Answer, model: &Model) -> String {
    if answer.interrupted {
        return "[interrupted]".to_owned();
    }
    let stats = &answer.stats;
    let f = figures(answer, model);
    let per_second = |rate: Option<f64>| rate.map_or(String::new(), |rate| format!(" ({rate:.1} tok/s)"));
    let mut line = format!("[prompt {} tokens{}", f.prompt_read, per_second(f.prompt_rate));
    if stats.reused_rows > 0 {
        line += &format!(" + {} held", stats.reused_rows);
    }
    line += &format!(
        "; first token {:.0} ms; answer {} tokens{}",
        stats.ttft_s * 1e3,
        stats.generated,
        per_second(f.decode_rate)
    );
    if let (Some(rate), Some(share)) = (f.gigabytes_per_s, f.bandwidth_share) {
        // More than memory gives comes from the caches of the processor: the weights are that small.
        let of_memory = match share {
            share if share > 1.0 => "from cache (more than the memory bandwidth)".to_owned(),
            share => format!("{:.0}% of memory bandwidth", share * 100.0),
        };
        line += &format!("; {rate:.2} GB/s, {of_memory}");
    }
    if let Some(acceptance) = stats.acceptance() {
        line += &format!(
            "; drafts {} of {} accepted ({:.0}%), {:.2} tokens per window",
            stats.accepted,
            stats.drafted,
            acceptance * 100.0,
            stats.tokens_per_window()
        );
    }
    line.push(']');
    if let Some(warning) = &stats.draft_warning {
        line += &format!("\nwarning: {warning}");
    }
    line
}

/// The same figures as JSON.
pub fn json(answer: &Answer, model: &Model) -> serde_json::Value {
    let stats = &answer.stats;
    let f = figures(answer, model);
    serde_json::json!({
        "prompt_tokens": stats.prompt_rows,
        "reused_tokens": stats.reused_rows,
        "prompt_seconds": stats.prompt_s,
        "prompt_tokens_per_second": f.prompt_rate,
        "first_token_seconds": stats.ttft_s,
        "generated_tokens": stats.generated,
        "decode_seconds": stats.decode_s,
        "decode_tokens_per_second": f.decode_rate,
        "gigabytes_per_second": f.gigabytes_per_s,
        "bandwidth_share": f.bandwidth_share,
        "windows": stats.windows,
        "tokens_per_window": stats.tokens_per_window(),
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "drafted_and_accepted_per_position": stats.accepted_per_position,
        "phase_seconds": {
            "draft": stats.phases.draft.as_secs_f64(),
            "verify": stats.phases.verify.as_secs_f64(),
            "commit": stats.phases.commit.as_secs_f64(),
            "sample": stats.phases.sample.as_secs_f64(),
        },
        "draft_warning": stats.draft_warning,
    })
}
