//! One line on stderr per request.

use super::answer::Finish;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;
use strata_core::engine::FinishReason;

/// What the choices of a request have come to so far, counted as their events come: true also when the client leaves.
#[derive(Debug, Default)]
pub struct Counts {
    /// Rows of the prompts.
    pub prompt: AtomicUsize,
    /// Prompt rows that were already held.
    pub reused: AtomicUsize,
    /// Tokens generated.
    pub generated: AtomicUsize,
}

/// Collects what a generating request's line says; written when dropped, also when the client went away.
pub struct RequestLog {
    route: &'static str,
    start: Instant,
    quiet: bool,
    open: usize,
    counts: Arc<Counts>,
    finishes: Vec<Finish>,
    failure: Option<String>,
}

impl RequestLog {
    /// A line for a request to `route` with so many choices.
    pub fn new(route: &'static str, choices: usize, quiet: bool) -> RequestLog {
        let counts = Arc::default();
        RequestLog { route, start: Instant::now(), quiet, open: choices, counts, finishes: Vec::new(), failure: None }
    }

    /// The counts that the request's choices add to.
    pub fn counts(&self) -> Arc<Counts> {
        self.counts.clone()
    }

    /// A choice is complete.
    pub fn finished(&mut self, finish: &Finish) {
        self.open = self.open.saturating_sub(1);
        self.finishes.push(finish.clone());
    }

    /// A choice failed.
    pub fn failed(&mut self, message: &str) {
        self.open = self.open.saturating_sub(1);
        self.failure = Some(message.to_owned());
    }

    fn line(&self) -> String {
        let sum = |f: fn(&Finish) -> usize| self.finishes.iter().map(f).sum::<usize>();
        let count = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        let (prompt, reused) = (count(&self.counts.prompt), count(&self.counts.reused));
        let tokens = count(&self.counts.generated);
        let (drafted, accepted) = (sum(|f| f.stats.drafted), sum(|f| f.stats.accepted));
        let decode_s: f64 = self.finishes.iter().map(|f| f.stats.decode_s).fold(0.0, f64::max);
        let end = match (&self.failure, self.finishes.last()) {
            (Some(message), _) => format!("failed: {message}"),
            (None, _) if self.open > 0 => "client gone".to_owned(),
            (None, Some(finish)) => ending(&finish.reason).to_owned(),
            (None, None) => "done".to_owned(),
        };
        let mut line = format!(
            "{} {:.2} s: prompt {prompt} ({reused} held), answer {tokens}",
            self.route,
            self.start.elapsed().as_secs_f64()
        );
        if decode_s > 0.0 && tokens > 1 {
            line += &format!(" at {:.1} tok/s", (tokens - 1) as f64 / decode_s);
        }
        if drafted > 0 {
            line += &format!(", drafts {accepted}/{drafted}");
        }
        format!("{line}, {end}")
    }
}

/// How an answer ended, in words.
fn ending(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::EndToken(_) => "ended",
        FinishReason::StopString(_) => "stop string",
        FinishReason::GrammarEnd => "form complete",
        FinishReason::Length => "token limit",
        FinishReason::ContextFull => "context full",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Stopping => "server stopped",
    }
}

impl Drop for RequestLog {
    fn drop(&mut self) {
        if !self.quiet {
            crate::errln!("{}", self.line());
        }
    }
}
