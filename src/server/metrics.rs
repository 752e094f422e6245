//! `/metrics` in Prometheus' text format. Where the same thing is measured, names are vLLM's, so that dashboards made for
//! it work; what it does not have is under `strata:`.

use super::app::Service;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use strata_core::engine::{FinishReason, RequestStats};

/// Upper bounds in seconds for waiting times.
const SECONDS: &[f64] = &[0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0];
/// Upper bounds in seconds per token.
const TOKEN_SECONDS: &[f64] = &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0];
/// Upper bounds in tokens.
const TOKENS: &[f64] = &[1.0, 10.0, 50.0, 100.0, 250.0, 500.0, 1e3, 2.5e3, 5e3, 1e4, 2.5e4, 5e4, 1e5, 2.5e5];

/// A histogram with fixed bounds.
struct Histogram {
    name: &'static str,
    help: &'static str,
    bounds: &'static [f64],
    counts: Vec<u64>,
    sum: f64,
    count: u64,
}

impl Histogram {
    fn new(name: &'static str, help: &'static str, bounds: &'static [f64]) -> Histogram {
        Histogram { name, help, bounds, counts: vec![0; bounds.len()], sum: 0.0, count: 0 }
    }

    fn add(&mut self, value: f64) {
        if let Some(i) = self.bounds.iter().position(|&b| value <= b) {
            self.counts[i] += 1;
        }
        self.sum += value;
        self.count += 1;
    }

    fn write(&self, out: &mut String, labels: &str) {
        let name = self.name;
        let _ = writeln!(out, "# HELP {name} {}\n# TYPE {name} histogram", self.help);
        let mut below = 0;
        for (bound, count) in self.bounds.iter().zip(&self.counts) {
            below += count;
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {below}");
        }
        let _ = writeln!(out, "{name}_bucket{{{labels},le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "{name}_sum{{{labels}}} {}\n{name}_count{{{labels}}} {}", self.sum, self.count);
    }
}

/// How many requests ended how, in vLLM's words.
const REASONS: [&str; 3] = ["stop", "length", "abort"];

struct Requests {
    by_reason: [u64; REASONS.len()],
    accepted_per_position: Vec<u64>,
    histograms: Vec<Histogram>,
}

/// What the server counts itself; the rest comes from the engine's status.
pub struct Metrics {
    requests: Mutex<Requests>,
    failures: AtomicU64,
    http: Mutex<std::collections::BTreeMap<u16, u64>>,
}

impl Default for Metrics {
    fn default() -> Self {
        let h = Histogram::new;
        Metrics {
            requests: Mutex::new(Requests {
                by_reason: [0; REASONS.len()],
                accepted_per_position: Vec::new(),
                histograms: vec![
                    h("vllm:time_to_first_token_seconds", "From submission to the first token", SECONDS),
                    h("vllm:request_time_per_output_token_seconds", "Mean time between tokens", TOKEN_SECONDS),
                    h("vllm:e2e_request_latency_seconds", "From submission to the last token", SECONDS),
                    h("vllm:request_queue_time_seconds", "Waiting for a slot", SECONDS),
                    h("vllm:request_prefill_time_seconds", "Reading the prompt", SECONDS),
                    h("vllm:request_decode_time_seconds", "From the first token to the last", SECONDS),
                    h("vllm:request_prompt_tokens", "Rows of the prompt", TOKENS),
                    h("vllm:request_generation_tokens", "Tokens generated", TOKENS),
                ],
            }),
            failures: AtomicU64::new(0),
            http: Mutex::new(Default::default()),
        }
    }
}

impl Metrics {
    /// A choice is complete.
    pub fn finished(&self, reason: &FinishReason, stats: &RequestStats) {
        let Ok(mut all) = self.requests.lock() else { return };
        let reason = match reason {
            FinishReason::Length | FinishReason::ContextFull => 1,
            FinishReason::Cancelled | FinishReason::Stopping => 2,
            _ => 0,
        };
        all.by_reason[reason] += 1;
        for (i, &(_, accepted)) in stats.accepted_per_position.iter().enumerate() {
            if all.accepted_per_position.len() <= i {
                all.accepted_per_position.push(0);
            }
            all.accepted_per_position[i] += u64::from(accepted);
        }
        let between = stats.generated.saturating_sub(1);
        let values = [
            Some(stats.ttft_s),
            (between > 0).then(|| stats.decode_s / between as f64),
            Some(stats.ttft_s + stats.decode_s),
            Some(stats.queue_s),
            Some(stats.prompt_s),
            Some(stats.decode_s),
            Some(stats.prompt_rows as f64),
            Some(stats.generated as f64),
        ];
        for (histogram, value) in all.histograms.iter_mut().zip(values) {
            if let Some(value) = value {
                histogram.add(value);
            }
        }
    }

    /// A choice failed.
    pub fn failed(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }

    /// A response left with this status.
    pub fn responded(&self, status: u16) {
        if let Ok(mut all) = self.http.lock() {
            *all.entry(status).or_default() += 1;
        }
    }

    /// The whole page.
    pub fn render(&self, model_name: &str, service: Option<&Service>) -> String {
        let mut out = String::new();
        let model = model_name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', " ");
        let labels = format!("model_name=\"{model}\"");
        let mut one = |name: &str, kind: &str, help: &str, value: f64| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} {kind}\n{name}{{{labels}}} {value}");
        };
        one("strata:ready", "gauge", "1 once the model is loaded", f64::from(u8::from(service.is_some())));
        if let Some(resident) = resident_bytes() {
            one("process_resident_memory_bytes", "gauge", "Resident memory", resident as f64);
        }
        one(
            "strata:request_failures_total",
            "counter",
            "Requests that failed inside the engine",
            self.failures.load(Ordering::Relaxed) as f64,
        );
        if let Some(service) = service {
            let status = service.engine.status();
            let held: usize = status.slots.iter().map(|s| s.held_rows).sum();
            let room = (status.ctx * status.slots.len()).max(1);
            let t = &status.totals;
            let c = &status.cache;
            one("vllm:num_requests_running", "gauge", "Requests being served", status.running as f64);
            one("vllm:num_requests_waiting", "gauge", "Requests waiting for a slot", status.queued as f64);
            one(
                "vllm:kv_cache_usage_perc",
                "gauge",
                "Share of the slots' rows that is held, 0 to 1",
                held as f64 / room as f64,
            );
            one("vllm:prompt_tokens_total", "counter", "Rows of all prompts", t.prompt_rows as f64);
            one("vllm:generation_tokens_total", "counter", "Tokens generated", t.generated as f64);
            one(
                "vllm:prefix_cache_queries_total",
                "counter",
                "Prompt rows looked up in held state",
                t.prompt_rows as f64,
            );
            one("vllm:prefix_cache_hits_total", "counter", "Prompt rows found in held state", t.reused_rows as f64);
            one("vllm:spec_decode_num_draft_tokens_total", "counter", "Draft tokens verified", t.drafted as f64);
            one("vllm:spec_decode_num_accepted_tokens_total", "counter", "Draft tokens accepted", t.accepted as f64);
            one("strata:slots", "gauge", "Slots", status.slots.len() as f64);
            one("strata:context_rows", "gauge", "Rows of each slot", status.ctx as f64);
            one("strata:held_rows", "gauge", "Rows held in all slots", held as f64);
            one("strata:prompt_chunks_total", "counter", "Prompt chunks read", t.chunks as f64);
            one("strata:decode_windows_total", "counter", "Decode windows run", t.windows as f64);
            one("strata:decode_window_rows_total", "counter", "Rows of all decode windows", t.window_rows as f64);
            one("strata:prompt_seconds_total", "counter", "Time spent reading prompts", t.prompt_s);
            one("strata:decode_seconds_total", "counter", "Time spent in decode windows", t.decode_s);
            one(
                "strata:longest_pause_seconds",
                "gauge",
                "Longest time between two windows of a decoding slot",
                t.longest_pause_s,
            );
            one("strata:requests_cancelled_total", "counter", "Requests whose client went away", t.cancelled as f64);
            one(
                "strata:draft_depth",
                "gauge",
                "Drafts per window the policy would use for a lone request",
                status.drafts.depth as f64,
            );
            one("strata:cache_ram_states", "gauge", "Evicted states in memory", c.ram_entries as f64);
            one("strata:cache_ram_bytes", "gauge", "Bytes of evicted states in memory", c.ram_bytes as f64);
            one("strata:cache_disk_states", "gauge", "Evicted states on disk", c.disk_entries as f64);
            one("strata:cache_disk_bytes", "gauge", "Bytes of evicted states on disk", c.disk_bytes as f64);
            one("strata:cache_slot_hits_total", "counter", "Starts from a slot's state", c.slot_hits as f64);
            one("strata:cache_ram_hits_total", "counter", "Starts from a state in memory", c.ram_hits as f64);
            one("strata:cache_disk_hits_total", "counter", "Starts from a state on disk", c.disk_hits as f64);
            if let Some(pictures) = &service.pictures {
                let (count, bytes) = pictures.cached();
                one("strata:picture_cache_pictures", "gauge", "Encoded pictures kept", count as f64);
                one("strata:picture_cache_bytes", "gauge", "Their bytes", bytes as f64);
            }
        }
        if let Ok(all) = self.requests.lock() {
            let name = "vllm:request_success_total";
            let _ = writeln!(out, "# HELP {name} Finished requests\n# TYPE {name} counter");
            for (reason, count) in REASONS.iter().zip(all.by_reason) {
                let _ = writeln!(out, "{name}{{{labels},finished_reason=\"{reason}\"}} {count}");
            }
            let name = "vllm:spec_decode_num_accepted_tokens_per_pos_total";
            let _ = writeln!(out, "# HELP {name} Accepted draft tokens by position\n# TYPE {name} counter");
            for (position, count) in all.accepted_per_position.iter().enumerate() {
                let _ = writeln!(out, "{name}{{{labels},position=\"{position}\"}} {count}");
            }
            all.histograms.iter().for_each(|h| h.write(&mut out, &labels));
        }
        if let Ok(all) = self.http.lock() {
            let name = "strata:http_responses_total";
            let _ = writeln!(out, "# HELP {name} Responses by status\n# TYPE {name} counter");
            for (status, count) in all.iter() {
                let _ = writeln!(out, "{name}{{status=\"{status}\"}} {count}");
            }
        }
        out
    }
}

/// Resident memory of this process, where the system tells.
pub fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches("kB").trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn histograms_are_cumulative() {
        let metrics = Metrics::default();
        for ttft_s in [0.004, 0.3, 1000.0] {
            metrics.finished(
                &FinishReason::Length,
                &RequestStats { ttft_s, generated: 5, decode_s: 1.0, ..Default::default() },
            );
        }
        let text = metrics.render("m\"x", None);
        let labels = r#"model_name="m\"x""#;
        let has = |line: &str| assert!(text.lines().any(|l| l == line), "missing {line} in\n{text}");
        has(&format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"0.005\"}} 1"));
        has(&format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"0.5\"}} 2"));
        has(&format!("vllm:time_to_first_token_seconds_bucket{{{labels},le=\"+Inf\"}} 3"));
        has(&format!("vllm:request_success_total{{{labels},finished_reason=\"length\"}} 3"));
        has(&format!("vllm:request_time_per_output_token_seconds_sum{{{labels}}} 0.75"));
    }
}
