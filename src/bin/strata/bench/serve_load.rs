//! `strata bench --serve URL`: a load generator for OpenAI-style servers, with another server beside it for comparison.
//!
//! Both servers get the same prompts (token ids) in interleaved rounds. Counted is what the clients see: time to the
//! first piece, time between pieces, tokens per second of all clients together.

use super::figures::{self, Cell, Row, median};
use crate::cli::failure::BadInput;
use anyhow::{Context, Result, anyhow};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Longest time for one request.
const PATIENCE: Duration = Duration::from_secs(600);

/// What `strata bench --serve` needs.
#[derive(clap::Args, Clone, Debug)]
#[command(next_help_heading = "Load on a server (--serve)")]
pub struct ServeLoadArgs {
    /// Put load on the server at URL instead of measuring the engine
    #[arg(long, value_name = "URL")]
    pub serve: Option<String>,
    /// Clients at the same time
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', default_value = "1,2,4,8", requires = "serve")]
    clients: Vec<usize>,
    /// Requests of each client per round
    #[arg(long, value_name = "N", default_value_t = 1, requires = "serve")]
    requests: usize,
    /// Requests per second of all clients together, at random times; 0 sends the next one when the last is answered
    #[arg(long, value_name = "R", default_value_t = 0.0, requires = "serve")]
    rate: f64,
    /// Tokens of each prompt
    #[arg(long, value_name = "N", default_value_t = 32, requires = "serve")]
    prompt_tokens: usize,
    /// Tokens of each answer
    #[arg(long, value_name = "N", default_value_t = 128, requires = "serve")]
    answer_tokens: usize,
    /// Rounds; sides take turns within each
    #[arg(long, value_name = "N", default_value_t = 3, requires = "serve")]
    rounds: usize,
    /// Largest token id in prompts
    #[arg(long, value_name = "ID", default_value_t = 5000, requires = "serve")]
    vocab: u32,
    /// Key for the servers
    #[arg(long, value_name = "KEY", env = "STRATA_API_KEY", hide_env_values = true, requires = "serve")]
    api_key: Option<String>,
}

/// What one client saw of one answer.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// Seconds from sending to the first piece.
    first_s: f64,
    /// Seconds between pieces.
    gaps_s: Vec<f64>,
    /// Tokens generated, as the server counts.
    tokens: usize,
    drafted: u64,
    accepted: u64,
    first_at: f64,
    last_at: f64,
}

/// One side at one number of clients in one round.
#[derive(Clone, Debug)]
struct Round {
    /// Tokens per second from the first request sent to the last answer's end.
    total_rate: f64,
    /// Tokens per second from the first piece anyone saw to the last, first tokens not counted.
    decode_rate: f64,
    seen: Vec<Seen>,
}

/// A small generator, so that both sides get the same prompts (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in 0..1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

impl ServeLoadArgs {
    fn check(&self) -> Result<()> {
        let bad = |flag: &str| Err(BadInput::new(format!("{flag} must be at least 1")).into());
        if self.clients.is_empty() || self.clients.contains(&0) {
            return bad("--clients");
        }
        for (flag, n) in [
            ("--requests", self.requests),
            ("--prompt-tokens", self.prompt_tokens),
            ("--answer-tokens", self.answer_tokens),
            ("--rounds", self.rounds),
        ] {
            if n == 0 {
                return bad(flag);
            }
        }
        if !(self.rate >= 0.0 && self.rate.is_finite()) || self.vocab < 2 {
            return Err(BadInput::new("--rate must be 0 or more, --vocab at least 2").into());
        }
        Ok(())
    }

    fn body(&self, seed: u64) -> Value {
        let mut random = Random(seed);
        let prompt: Vec<u64> = (0..self.prompt_tokens).map(|_| 1 + random.next() % u64::from(self.vocab - 1)).collect();
        json!({
            "prompt": prompt, "max_tokens": self.answer_tokens, "temperature": 0, "ignore_eos": true, "stream": true,
            "stream_options": {"include_usage": true}, "cache_prompt": false,
        })
    }

    fn one(&self, agent: &ureq::Agent, url: &str, seed: u64, origin: Instant) -> Result<Seen> {
        let mut request = agent.post(format!("{}/v1/completions", url.trim_end_matches('/')));
        request = request.header("content-type", "application/json");
        if let Some(key) = &self.api_key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        let sent = Instant::now();
        let mut response =
            request.send(self.body(seed).to_string()).with_context(|| format!("no answer from {url}"))?;
        if response.status() != 200 {
            let text = response.body_mut().read_to_string().unwrap_or_default();
            return Err(anyhow!("{url} answered {}: {text}", response.status()));
        }
        let mut seen = Seen::default();
        let mut last: Option<Instant> = None;
        for line in BufReader::new(response.into_body().into_reader()).lines() {
            let line = line.with_context(|| format!("{url} broke off"))?;
            let Some(data) = line.strip_prefix("data: {") else { continue };
            let now = Instant::now();
            let event: Value = serde_json::from_str(&format!("{{{data}")).context("an event is not JSON")?;
            if let Some(n) = event["usage"]["completion_tokens"].as_u64() {
                seen.tokens = n as usize;
            }
            if let Some(n) = event["timings"]["draft_n"].as_u64() {
                seen.drafted = n;
                seen.accepted = event["timings"]["draft_n_accepted"].as_u64().unwrap_or(0);
            }
            if event["choices"][0]["text"].as_str().is_none_or(str::is_empty) {
                continue;
            }
            match last {
                None => {
                    seen.first_s = (now - sent).as_secs_f64();
                    seen.first_at = (now - origin).as_secs_f64();
                }
                Some(last) => seen.gaps_s.push((now - last).as_secs_f64()),
            }
            last = Some(now);
            seen.last_at = (now - origin).as_secs_f64();
        }
        if seen.tokens == 0 {
            return Err(anyhow!("{url} sent no usage: it is not an OpenAI-style server with stream_options"));
        }
        Ok(seen)
    }

    fn round(&self, agent: &ureq::Agent, url: &str, clients: usize, round: usize) -> Result<Round> {
        let start = Barrier::new(clients);
        let origin = Instant::now();
        let seen: Vec<Result<Vec<Seen>>> = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..clients)
                .map(|client| {
                    let start = &start;
                    scope.spawn(move || {
                        // Both sides and every number of clients get the same prompts in the same round.
                        let mut random = Random((round * 1000 + client) as u64);
                        start.wait();
                        (0..self.requests)
                            .map(|_| {
                                if self.rate > 0.0 {
                                    let wait = -(1.0 - random.unit()).ln() * clients as f64 / self.rate;
                                    std::thread::sleep(Duration::from_secs_f64(wait.min(3600.0)));
                                }
                                self.one(agent, url, random.next(), origin)
                            })
                            .collect()
                    })
                })
                .collect();
            let joined =
                workers.into_iter().map(|worker| worker.join().unwrap_or_else(|_| Err(anyhow!("a client failed"))));
            joined.collect()
        });
        let seen: Vec<Seen> = seen.into_iter().collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
        let tokens: usize = seen.iter().map(|s| s.tokens).sum();
        let first = seen.iter().map(|s| s.first_at).fold(f64::INFINITY, f64::min);
        let last = seen.iter().map(|s| s.last_at).fold(0.0, f64::max);
        Ok(Round {
            total_rate: tokens as f64 / last.max(1e-9),
            decode_rate: (tokens - seen.len()) as f64 / (last - first).max(1e-9),
            seen,
        })
    }
}

/// The value below which a share of sorted values lies; NaN for none.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    match sorted.len() {
        0 => f64::NAN,
        n => sorted[((n - 1) as f64 * share).round() as usize],
    }
}

/// Decode speed of one side over the other's: the median of the rounds, which go pair by pair.
fn ratio(a: &[Round], b: &[Round]) -> f64 {
    median(a.iter().zip(b).map(|(a, b)| a.decode_rate / b.decode_rate))
}

/// The figures of one side at one number of clients. `ratio` is that of the first side to the second, in the first's row.
fn row(clients: usize, url: &str, rounds: &[Round], ratio: Option<f64>) -> Row {
    let sorted = |values: &mut dyn Iterator<Item = f64>| {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        values
    };
    let seen = || rounds.iter().flat_map(|r| &r.seen);
    let decode = sorted(&mut rounds.iter().map(|r| r.decode_rate));
    let first = sorted(&mut seen().map(|s| s.first_s * 1e3));
    let gaps = sorted(&mut seen().flat_map(|s| s.gaps_s.iter().map(|gap| gap * 1e3)));
    let middle = |values: &[f64], decimals| Cell::number(median(values.iter().copied()), decimals);
    let at = |values: &[f64], share, decimals| Cell::number(percentile(values, share), decimals);
    let count = |n: u64| Cell::Number(n as f64, 0);
    Row::of(vec![
        ("clients", count(clients as u64)),
        ("url", Cell::Text(url.to_string())),
        ("rounds", count(rounds.len() as u64)),
        ("tok_s", middle(&decode, 2)),
        ("tok_s_min", at(&decode, 0.0, 2)),
        ("tok_s_max", at(&decode, 1.0, 2)),
        ("with_prompts_tok_s", Cell::number(median(rounds.iter().map(|r| r.total_rate)), 2)),
        ("first_ms", middle(&first, 2)),
        ("first_p95_ms", at(&first, 0.95, 2)),
        // Of small models microseconds, and of pieces that come in one packet no time at all.
        ("between_ms", middle(&gaps, 3)),
        ("between_p95_ms", at(&gaps, 0.95, 3)),
        ("between_p99_ms", at(&gaps, 0.99, 3)),
        ("between_max_ms", at(&gaps, 1.0, 3)),
        ("drafted", count(seen().map(|s| s.drafted).sum())),
        ("accepted", count(seen().map(|s| s.accepted).sum())),
        ("ratio", Cell::maybe(ratio, 3)),
    ])
}

/// How the figures are printed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Lines for people, as soon as they are measured.
    Text,
    /// One object.
    Json,
    /// A header and a line per side and number of clients.
    Csv,
}

/// Puts load on `serve`, and on `against` in turns with it; prints the figures of every side.
pub fn run(args: &ServeLoadArgs, serve: &str, against: Option<&str>, form: Form) -> Result<()> {
    args.check()?;
    let sides: Vec<&str> = std::iter::once(serve).chain(against).collect();
    let config = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(Some(PATIENCE)).proxy(None);
    let agent: ureq::Agent = config.build().into();
    let mut rows = Vec::new();
    for &clients in &args.clients {
        for url in &sides {
            // Fills caches and wakes threads; not counted.
            args.round(&agent, url, 1, usize::MAX / 2000)?;
        }
        let mut rounds: Vec<Vec<Round>> = vec![Vec::new(); sides.len()];
        for round in 0..args.rounds {
            for turn in 0..sides.len() {
                // The side that goes first changes, so that drift of the machine hits both.
                let side = (turn + round) % sides.len();
                rounds[side].push(args.round(&agent, sides[side], clients, round)?);
            }
        }
        for (side, url) in sides.iter().enumerate() {
            let other = rounds.get(1).filter(|_| side == 0);
            let row = row(clients, url, &rounds[side], other.map(|other| ratio(&rounds[0], other)));
            if form == Form::Text {
                crate::cli::outln!("{}", line(&row));
            }
            rows.push(row);
        }
    }
    let settings = json!({
        "prompt_tokens": args.prompt_tokens, "answer_tokens": args.answer_tokens, "rounds": args.rounds,
        "requests": args.requests, "rate": args.rate,
    });
    match form {
        Form::Text => {}
        Form::Json => crate::cli::outln!("{}", figures::json(&rows, [("settings", &settings)])),
        Form::Csv => crate::cli::out!("{}", figures::csv(&rows)),
    }
    Ok(())
}

/// A row for people.
fn line(row: &Row) -> String {
    let text = |name: &str| row.cell(name).text();
    let clients = text("clients");
    let mut line = format!(
        "{clients} client{} {}: decode {} tok/s ({} to {}), with prompts {}; first token {} ms (p95 {}); between {} ms (p95 {}, \
         p99 {})",
        if clients == "1" { "" } else { "s" },
        text("url"),
        text("tok_s"),
        text("tok_s_min"),
        text("tok_s_max"),
        text("with_prompts_tok_s"),
        text("first_ms"),
        text("first_p95_ms"),
        text("between_ms"),
        text("between_p95_ms"),
        text("between_p99_ms"),
    );
    if text("drafted") != "0" {
        line += &format!("; drafts {}/{}", text("accepted"), text("drafted"));
    }
    if *row.cell("ratio") != Cell::None {
        line += &format!("; {} x the other", text("ratio"));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_taken_from_sorted_values() {
        let values = [1.0, 2.0, 3.0, 4.0, 100.0];
        assert_eq!(percentile(&values, 0.5), 3.0);
        assert_eq!(percentile(&values, 0.99), 100.0);
        assert!(percentile(&[], 0.5).is_nan());
    }

    #[test]
    fn medians_of_even_counts_are_the_mean_of_the_middle_and_ratios_go_pair_by_pair() {
        let rounds = |rates: [f64; 4]| {
            rates.map(|rate| Round {
                total_rate: rate / 2.0,
                decode_rate: rate,
                seen: vec![Seen { first_s: rate / 1e3, gaps_s: vec![rate / 1e6], tokens: 2, ..Seen::default() }],
            })
        };
        let (ours, theirs) = (rounds([40.0, 10.0, 20.0, 30.0]), rounds([20.0, 10.0, 5.0, 30.0]));
        let row = row(2, "http://a", &ours, Some(ratio(&ours, &theirs)));
        let shown =
            ["tok_s", "with_prompts_tok_s", "first_ms", "between_ms", "ratio"].map(|name| row.cell(name).text());
        assert_eq!(shown, ["25.00", "12.50", "25.00", "0.025", "1.500"]);
        assert!(line(&row).contains("2 clients http://a: decode 25.00 tok/s (10.00 to 40.00)"), "{}", line(&row));
    }

    #[test]
    fn the_generator_is_uniform_enough_for_arrival_times() {
        let mut random = Random(1);
        let mean: f64 = (0..10_000).map(|_| random.unit()).sum::<f64>() / 10_000.0;
        // The mean of 10,000 uniform values has a standard deviation of 0.0029.
        assert!((mean - 0.5).abs() < 0.015, "{mean}");
    }
}
