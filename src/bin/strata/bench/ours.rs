//! Measuring strata itself, through the engine that serves every other command.

use super::plan::{Kind, Test};
use anyhow::{Result, bail};
use std::sync::Arc;
use std::time::{Duration, Instant};
use strata_core::engine::{Engine, EngineHandle, EngineOptions, Event, Prompt, Request, RequestStats, RequestStream};
use strata_core::model::{Model, PerfCounters};
use strata_core::text::Tokenizer;

/// What one repetition measured, of strata or of a peer.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// Tokens per second of all requests together.
    pub rate: f64,
    /// Weight bytes read per second, at least.
    pub bytes_per_s: Option<f64>,
    /// Draft tokens verified.
    pub drafted: usize,
    /// Draft tokens accepted.
    pub accepted: usize,
    /// Tokens per decode window and request.
    pub tokens_per_window: Option<f64>,
    /// Where the time went, as shares of the whole.
    pub phases: Vec<(&'static str, f64)>,
}

/// An engine for one combination of parallel requests and drafts.
pub struct Ours {
    engine: EngineHandle,
    model: Arc<Model>,
}

impl Ours {
    /// Starts the engine.
    pub fn start(model: Arc<Model>, tokenizer: Arc<Tokenizer>, test: &Test, ctx: usize) -> Result<Ours> {
        let options = EngineOptions { slots: test.parallel, ctx, mtp: test.mtp.0, ..EngineOptions::default() };
        let engine = Engine::start(model.clone(), tokenizer, options)?;
        Ok(Ours { engine, model })
    }

    /// Runs a test once. `prompts` has one prompt per parallel request, of `test.context()` tokens.
    pub fn sample(&self, test: &Test, prompts: &[Vec<u32>]) -> Result<Sample> {
        if test.depth > 0 {
            self.all(prompts.iter().map(|p| request(&p[..test.depth], 1)).collect())?;
        }
        self.model.reset_counters();
        let start = Instant::now();
        let stats = match test.kind {
            Kind::Prompt => self.all(prompts.iter().map(|p| request(&p[..test.depth + test.tokens], 1)).collect())?,
            // One token more than is timed: the first one belongs to the prompt.
            Kind::Decode => {
                self.all(prompts.iter().map(|p| request(&p[..test.depth + 1], test.tokens + 1)).collect())?
            }
        };
        let whole = start.elapsed();
        let longest = |f: fn(&RequestStats) -> f64| stats.iter().map(f).fold(0.0, f64::max);
        let (tokens, seconds) = match test.kind {
            Kind::Prompt => (stats.iter().map(|s| s.prompt_rows - s.reused_rows).sum(), longest(|s| s.prompt_s)),
            Kind::Decode => {
                (stats.iter().map(|s| s.generated.saturating_sub(1)).sum::<usize>(), longest(|s| s.decode_s))
            }
        };
        let mut sample = Sample {
            rate: tokens as f64 / seconds,
            drafted: stats.iter().map(|s| s.drafted).sum(),
            accepted: stats.iter().map(|s| s.accepted).sum(),
            phases: phases(&self.model.counters(), whole),
            ..Sample::default()
        };
        if test.kind == Kind::Decode {
            // A window of several rows reads more experts than this; it is the least it can have read.
            let windows = stats.iter().map(|s| s.windows).max().unwrap_or(0);
            sample.bytes_per_s = Some(windows as f64 * self.model.weight_bytes_per_token() as f64 / seconds);
            let each = stats.iter().map(RequestStats::tokens_per_window).sum::<f64>();
            sample.tokens_per_window = Some(each / stats.len() as f64);
        }
        Ok(sample)
    }

    /// Submits all requests at once and waits for them.
    fn all(&self, requests: Vec<Request>) -> Result<Vec<RequestStats>> {
        let streams = requests.into_iter().map(|r| self.engine.submit(r)).collect::<Result<Vec<_>, _>>()?;
        streams.into_iter().map(finished).collect()
    }
}

fn request(tokens: &[u32], max_tokens: usize) -> Request {
    Request {
        prompt: Prompt::tokens(tokens.to_vec()),
        max_tokens: Some(max_tokens),
        ignore_eos: true,
        ..Request::default()
    }
}

fn finished(stream: RequestStream) -> Result<RequestStats> {
    for event in stream {
        match event {
            Event::Finished { stats, .. } => return Ok(stats),
            Event::Failed(why) => bail!("a request failed: {why}"),
            Event::Started { .. } | Event::Token { .. } => {}
        }
    }
    bail!("the engine ended before the request did")
}

/// The model's phases as shares of the whole time; `other` is sampling, scheduling and waiting.
fn phases(c: &PerfCounters, whole: Duration) -> Vec<(&'static str, f64)> {
    let parts = [
        ("embed", c.embed),
        ("attention", c.attention),
        ("delta_net", c.delta_net),
        ("experts", c.moe),
        ("head", c.head),
        ("mtp", c.mtp),
        ("commit", c.commit),
    ];
    let known: Duration = parts.iter().map(|p| p.1).sum();
    let share = |d: Duration| d.as_secs_f64() / whole.as_secs_f64().max(known.as_secs_f64());
    let mut shares: Vec<_> = parts.iter().map(|(name, d)| (*name, share(*d))).collect();
    shares.push(("other", share(whole.saturating_sub(known))));
    shares
}
