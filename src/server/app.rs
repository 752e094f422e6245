//! What the routes share: settings, the model's service once it is loaded, counters.

use super::error::ApiError;
use super::metrics::Metrics;
use super::params::SamplingDefaults;
use super::pictures::PicturePolicy;
use super::random;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use strata_core::engine::EngineHandle;
use strata_core::text::{ChatTemplate, GrammarEnv, Tokenizer};
use strata_core::vision::PictureReader;

/// Settings that do not depend on the model.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name the model is served under (`--alias`).
    pub model_name: String,
    /// Keys of which a client must send one; empty: no keys.
    pub api_keys: Vec<String>,
    /// Web origins that may call from a browser; `*` is any.
    pub cors_origins: Vec<String>,
    /// Names besides localhost that a loopback server answers to.
    pub allowed_hosts: Vec<String>,
    /// The server listens on the loopback device only.
    pub loopback: bool,
    /// Largest request body in bytes.
    pub max_body: usize,
    /// Longest time for the head of a request, and for a body before its speed counts.
    pub read_timeout: Duration,
    /// Sampling where a request says nothing.
    pub defaults: SamplingDefaults,
    /// Where pictures may come from.
    pub pictures: PicturePolicy,
    /// Thinking where a request says nothing; `None` leaves it to the template.
    pub thinking: Option<bool>,
    /// Most tokens of thinking where a request says nothing.
    pub thinking_budget: Option<usize>,
    /// No line per request.
    pub quiet: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            model_name: "strata".into(),
            api_keys: Vec::new(),
            cors_origins: Vec::new(),
            allowed_hosts: Vec::new(),
            loopback: true,
            max_body: 64 << 20,
            read_timeout: Duration::from_secs(30),
            defaults: SamplingDefaults::default(),
            pictures: PicturePolicy::default(),
            thinking: None,
            thinking_budget: None,
            quiet: false,
        }
    }
}

/// A loaded model and what surrounds it.
pub struct Service {
    /// The engine.
    pub engine: EngineHandle,
    /// Text to tokens and back.
    pub tokenizer: Arc<Tokenizer>,
    /// The chat template, if the file has one.
    pub template: Option<ChatTemplate>,
    /// Reads pictures, if there is an encoder.
    pub pictures: Option<PictureReader>,
    /// Facts about the model for `/props` and `/v1/models`.
    pub about: Value,
    /// Set up at the first constrained request: it takes about a second with a large vocabulary.
    grammars: OnceLock<Arc<GrammarEnv>>,
}

impl Service {
    /// A service around a running engine.
    pub fn new(
        engine: EngineHandle,
        tokenizer: Arc<Tokenizer>,
        template: Option<ChatTemplate>,
        pictures: Option<PictureReader>,
        about: Value,
    ) -> Service {
        Service { engine, tokenizer, template, pictures, about, grammars: OnceLock::new() }
    }

    /// What grammars need of the tokenizer.
    pub fn grammars(&self) -> Result<&Arc<GrammarEnv>, ApiError> {
        if let Some(ready) = self.grammars.get() {
            return Ok(ready);
        }
        let made = GrammarEnv::new(&self.tokenizer).map_err(|e| ApiError::internal(format!("grammar set-up: {e}")))?;
        Ok(self.grammars.get_or_init(|| made))
    }
}

/// The state behind every route.
pub struct App {
    /// Settings of the command line.
    pub settings: Settings,
    /// Counters for `/metrics`.
    pub metrics: Metrics,
    /// When the server started, seconds since 1970.
    pub started: u64,
    /// The same on the monotonic clock.
    pub started_at: Instant,
    service: OnceLock<Service>,
    stopping: AtomicBool,
}

impl App {
    /// A server that is still loading.
    pub fn new(settings: Settings) -> Arc<App> {
        Arc::new(App {
            settings,
            metrics: Metrics::default(),
            started: unix_time(),
            started_at: Instant::now(),
            service: OnceLock::new(),
            stopping: AtomicBool::new(false),
        })
    }

    /// The model is there: requests are taken from now on.
    pub fn ready(&self, service: Service) {
        // A second model is never loaded, so an earlier value cannot be there.
        let _ = self.service.set(service);
    }

    /// The model's service, or 503 while it is loading or the server is stopping.
    pub fn service(&self) -> Result<&Service, ApiError> {
        self.service.get().ok_or_else(ApiError::loading)
    }

    /// Takes no more generating requests.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Whether [`App::stop`] was called.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A fresh id with a prefix, e.g. `chatcmpl-`.
pub fn new_id(prefix: &str) -> String {
    format!("{prefix}{:016x}{:08x}", random(), random() as u32)
}
