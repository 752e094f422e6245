//! `strata serve`: the HTTP server. Binds first, so that clients see "loading" instead of nothing, then loads the model.

use crate::cli::allocator;
use crate::cli::failure::BadInput;
use crate::cli::model::{LoadedModel, ModelArgs, VisionArgs};
use crate::cli::settings::{DraftArgs, Seed, Think, positive, seed};
use anyhow::{Context, Result};
use sha2::{Digest, Sha256};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use strata::server::params::SamplingDefaults;
use strata::server::pictures::PicturePolicy;
use strata::server::{App, Service, Settings, serve};
use strata_core::engine::{Engine, EngineHandle, EngineOptions};
use strata_core::gguf::GgufFile;
use strata_core::placement::MemoryPlan;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

/// Slots where the command line says nothing and memory allows it.
const DEFAULT_SLOTS: usize = 4;
/// Context where the command line says nothing and the model was trained for as much.
const DEFAULT_CONTEXT: usize = 8192;
/// How much longer than the engine the connections may take to close.
const CLOSING: Duration = Duration::from_secs(2);

/// Serve the model over HTTP: OpenAI's and Anthropic's APIs, llama-server's extras, and a chat page at /
#[derive(clap::Args, Debug)]
pub struct Args {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    vision: VisionArgs,
    /// Files below this folder may be named in image_url
    #[arg(long, value_name = "DIR")]
    image_dir: Option<PathBuf>,
    /// Fetch http(s) pictures that requests name (never from private addresses)
    #[arg(long)]
    allow_remote_images: bool,
    /// No line per request
    #[arg(short, long, visible_alias = "log-disable")]
    quiet: bool,
    // Options of their own headings come last: what follows one would stand under it.
    #[command(flatten)]
    network: NetworkArgs,
    #[command(flatten)]
    slots: SlotArgs,
    #[command(flatten)]
    defaults: DefaultArgs,
    #[command(flatten)]
    drafts: DraftArgs,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Network")]
struct NetworkArgs {
    /// Address to listen on
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", env = "STRATA_HOST", value_parser = host)]
    host: IpAddr,
    /// Port to listen on; 0 takes a free one
    #[arg(long, value_name = "N", default_value_t = 8080, env = "STRATA_PORT")]
    port: u16,
    /// Name the model is served under [default: the name in the file]
    #[arg(short, long, value_name = "NAME")]
    alias: Option<String>,
    /// Key that clients must send; may be repeated
    #[arg(long, value_name = "KEY", env = "STRATA_API_KEY", hide_env_values = true, value_delimiter = ',')]
    api_key: Vec<String>,
    /// File with one key per line
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Web origin whose pages may call the server (`*`: any); may be repeated
    #[arg(long, value_name = "ORIGIN")]
    cors_origin: Vec<String>,
    /// Host name the server answers to besides localhost while it listens on the loopback address; may be repeated
    #[arg(long, value_name = "NAME")]
    allowed_host: Vec<String>,
    /// Largest request body
    #[arg(long, value_name = "MIB", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    max_body: u32,
    /// Longest time for the head of a request to arrive, and for its body to stop or trickle
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    read_timeout: u32,
    /// How long running requests may take to finish when the server is stopped
    #[arg(long, visible_alias = "timeout", value_name = "SECONDS", default_value_t = 30)]
    grace: u32,
}

#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Slots and cache")]
struct SlotArgs {
    /// Requests served at the same time [default: 4, or as many as fit]
    #[arg(long, visible_aliases = ["np", "batch"], value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    parallel: Option<u32>,
    /// Context of each request in tokens; 0 takes what the model was trained for [default: 8192, or less if trained for less]
    #[arg(short, long, value_name = "N")]
    ctx_size: Option<usize>,
    /// Rows of a prompt chunk
    #[arg(long, visible_aliases = ["ubatch-size", "ub"], value_name = "N", default_value_t = 256, value_parser = positive)]
    prefill: usize,
    /// Decode windows of the other requests between two prompt chunks
    #[arg(long, value_name = "K", default_value_t = 1, value_parser = positive)]
    read_windows: usize,
    /// Draft also while several requests decode
    #[arg(long, value_name = "yes|no", default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
        default_missing_value = "yes", value_parser = yes_or_no, hide_possible_values = true)]
    batch_mtp: bool,
    /// Memory for conversations that lost their slot
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    cache_ram: u64,
    /// Folder for conversations that lost their slot; survives a restart
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,
    /// Requests that may wait for a slot
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,
}

/// Sampling where a request says nothing.
#[derive(clap::Args, Debug)]
#[command(next_help_heading = "Defaults for requests")]
struct DefaultArgs {
    /// Temperature; 0 takes the most likely token
    #[arg(long, visible_alias = "temperature", value_name = "T", default_value_t = 1.0)]
    temp: f32,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(long, value_name = "K", default_value_t = 20)]
    top_k: u32,
    /// Keep the most likely tokens whose probabilities reach P
    #[arg(long, value_name = "P", default_value_t = 0.95)]
    top_p: f32,
    /// Drop tokens less likely than this share of the most likely one
    #[arg(long, value_name = "P", default_value_t = 0.0)]
    min_p: f32,
    /// Penalty for tokens among the latest; 1 is none
    #[arg(long, value_name = "X", default_value_t = 1.0)]
    repeat_penalty: f32,
    /// How many of the latest tokens --repeat-penalty looks at; -1 for all
    #[arg(long, value_name = "N", default_value_t = 64, allow_negative_numbers = true)]
    repeat_last_n: i64,
    /// Penalty for every token already generated
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    presence_penalty: f32,
    /// Penalty for a generated token for each time it was generated
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    frequency_penalty: f32,
    /// Seed of the sampler; -1 takes a new one per request [default: -1]
    #[arg(short, long, value_name = "N", value_parser = seed, allow_negative_numbers = true)]
    seed: Option<Seed>,
    /// Most tokens to generate [default: up to the end of the context]
    #[arg(short, long, visible_alias = "predict", value_name = "N", allow_negative_numbers = true)]
    n_predict: Option<i64>,
    /// Whether the model reasons before it answers [default: as the template has it]
    #[arg(long, value_name = "WHEN")]
    think: Option<Think>,
    /// Most tokens of reasoning, after which it is closed
    #[arg(long, visible_alias = "thinking-budget", value_name = "N")]
    reasoning_budget: Option<usize>,
}

fn yes_or_no(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "yes" | "y" | "true" | "on" | "1" => Ok(true),
        "no" | "n" | "false" | "off" | "0" => Ok(false),
        _ => Err("expected yes or no".to_owned()),
    }
}

fn host(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(IpAddr::from([127, 0, 0, 1])),
        text => text.parse().map_err(|_| "expected an IP address or localhost".to_owned()),
    }
}

impl DefaultArgs {
    fn sampling(&self) -> Result<SamplingDefaults> {
        let check = |flag: &str, value: f32, low: f32, high: f32| match (low..=high).contains(&value) {
            true => Ok(()),
            false => Err(BadInput::new(format!("{flag} is {value}, expected {low} to {high}"))),
        };
        check("--temp", self.temp, 0.0, 100.0)?;
        check("--top-p", self.top_p, 0.0, 1.0)?;
        check("--min-p", self.min_p, 0.0, 1.0)?;
        check("--repeat-penalty", self.repeat_penalty, 0.01, 100.0)?;
        check("--presence-penalty", self.presence_penalty, -2.0, 2.0)?;
        check("--frequency-penalty", self.frequency_penalty, -2.0, 2.0)?;
        Ok(SamplingDefaults {
            temperature: self.temp,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repeat_penalty: self.repeat_penalty,
            repeat_last_n: u32::try_from(self.repeat_last_n).ok(),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: match self.seed {
                Some(Seed::Number(seed)) => Some(seed),
                Some(Seed::Random) | None => None,
            },
            max_tokens: self.n_predict.and_then(|n| usize::try_from(n).ok()).filter(|&n| n > 0),
        })
    }
}

impl Args {
    fn api_keys(&self) -> Result<Vec<String>> {
        let mut keys = self.network.api_key.clone();
        if let Some(path) = &self.network.api_key_file {
            let text = std::fs::read_to_string(path)
                .map_err(|e| BadInput::new(format!("--api-key-file {}: {e}", path.display())))?;
            keys.extend(
                text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')).map(str::to_owned),
            );
            if keys.is_empty() {
                let problem = format!("--api-key-file {} holds no key", path.display());
                return Err(BadInput::new(problem).hint("one key per line").into());
            }
        }
        if keys.iter().any(String::is_empty) {
            return Err(BadInput::new("--api-key is empty").into());
        }
        Ok(keys)
    }

    fn settings(&self, model_name: String) -> Result<Settings> {
        if let Some(folder) = &self.image_dir
            && !folder.is_dir()
        {
            return Err(BadInput::new(format!("--image-dir {} is no folder", folder.display())).into());
        }
        Ok(Settings {
            model_name,
            api_keys: self.api_keys()?,
            cors_origins: self.network.cors_origin.clone(),
            allowed_hosts: self.network.allowed_host.clone(),
            loopback: self.network.host.is_loopback(),
            max_body: (self.network.max_body as usize) << 20,
            read_timeout: Duration::from_secs(u64::from(self.network.read_timeout)),
            defaults: self.defaults.sampling()?,
            pictures: PicturePolicy { allow_remote: self.allow_remote_images, folder: self.image_dir.clone() },
            thinking: self.defaults.think.map(|think| think == Think::Yes),
            thinking_budget: self.defaults.reasoning_budget,
            quiet: self.quiet,
        })
    }

    fn engine_options(&self, file: &GgufFile, trained_context: usize) -> Result<EngineOptions> {
        let slots = &self.slots;
        Ok(EngineOptions {
            slots: slots.parallel.map_or(DEFAULT_SLOTS, |n| n as usize),
            ctx: match slots.ctx_size {
                None => DEFAULT_CONTEXT.min(trained_context),
                Some(0) => trained_context,
                Some(n) => n,
            },
            prompt_chunk: slots.prefill,
            read_windows: slots.read_windows,
            mtp: self.drafts.mtp(),
            ngram: self.drafts.ngram()?,
            batch_mtp: slots.batch_mtp,
            draft_p_min: self.drafts.draft_p_min,
            draft_vocab: self.drafts.draft_vocab,
            cache_ram_bytes: slots.cache_ram << 20,
            cache_dir: slots.cache_dir.clone(),
            model_id: model_id(file),
            queue_limit: slots.queue,
            ..EngineOptions::default()
        })
    }

    /// Loads the model and starts the engine. Blocking.
    fn load(&self, file: GgufFile) -> Result<Service> {
        let loaded = LoadedModel::from_file(file, &self.model.load_options())?;
        let pictures = loaded.picture_reader(&self.vision, self.model.threads(), false)?;
        let config = loaded.model.config();
        let mut options = self.engine_options(&loaded.file, config.context)?;
        let mut plan = MemoryPlan::new(&loaded.model, &options)?;
        // Only a count that nobody asked for is made smaller; one that was asked for is refused with the numbers.
        if self.slots.parallel.is_none()
            && let Some(fits @ 1..) = plan.slots_that_fit()
            && fits < options.slots
        {
            options.slots = fits;
            plan = MemoryPlan::new(&loaded.model, &options)?;
        }
        plan.check()?;
        strata::errln!("{plan}");
        let about = serde_json::json!({
            "name": config.name,
            "n_vocab": config.vocab,
            "n_ctx_train": config.context,
            "n_embd": config.hidden,
            "layers": config.trunk_layers,
            "mtp_layers": config.mtp_layers,
            "size": loaded.file.total_bytes(),
        });
        let engine = Engine::start(loaded.model.clone(), loaded.tokenizer.clone(), options)?;
        Ok(Service::new(engine, loaded.tokenizer, loaded.template, pictures, about))
    }
}

/// Identifies the model for the disk cache: its metadata, its tensor table, and the first bytes of every tensor.
fn model_id(file: &GgufFile) -> [u8; 32] {
    let mut hash = Sha256::new();
    hash.update(file.total_bytes().to_le_bytes());
    for (key, value) in file.metadata().iter() {
        hash.update(key);
        hash.update(format!("{value:?}"));
    }
    for tensor in file.tensors() {
        hash.update(&tensor.name);
        hash.update(format!("{:?} {:?}", tensor.dims, tensor.ty));
        let data = file.data(tensor);
        hash.update(&data[..data.len().min(4096)]);
    }
    hash.finalize().into()
}

/// Runs the command.
pub fn run(args: Args) -> Result<ExitCode> {
    allocator::settle();
    // What can be wrong with the arguments and the file's header is found before anything listens.
    let file = args.model.open()?;
    let name = args.network.alias.clone();
    let name = name.or_else(|| file.metadata().str_opt("general.name").ok().flatten().map(str::to_owned));
    let settings = args.settings(name.unwrap_or_else(|| "strata".to_owned()))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the server's threads")?;
    let code = runtime.block_on(listen(Arc::new(args), settings, file));
    // Blocking work that is still under way (a picture being encoded) must not hold the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    code
}

async fn listen(args: Arc<Args>, settings: Settings, file: GgufFile) -> Result<ExitCode> {
    let address = SocketAddr::new(args.network.host, args.network.port);
    let listener = TcpListener::bind(address)
        .await
        .map_err(|e| BadInput::new(format!("cannot listen on {address}: {e}")).hint("choose another with --port"))?;
    let bound = listener.local_addr().context("the listening socket has no address")?;
    if !settings.loopback && settings.api_keys.is_empty() {
        strata::errln!("strata: warning: anyone who can reach {bound} can use this server (set --api-key)");
    }
    strata::errln!("strata: listening on http://{bound} (loading)");
    let app = App::new(settings);
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = tokio::spawn(serve(app.clone(), listener, async {
        // A dropped sender stops the server too.
        let _ = stopped.await;
    }));
    let mut terminate = signal(SignalKind::terminate()).context("cannot catch SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot catch SIGINT")?;
    let grace = Duration::from_secs(u64::from(args.network.grace));
    let load = tokio::task::spawn_blocking(move || args.load(file));
    let service = tokio::select! {
        loaded = load => loaded.context("loading the model ended early")??,
        _ = terminate.recv() => return Ok(ExitCode::SUCCESS),
        _ = interrupt.recv() => return Ok(ExitCode::SUCCESS),
    };
    let engine = service.engine.clone();
    app.ready(service);
    strata::errln!("strata: ready on http://{bound}");
    tokio::select! {
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    strata::errln!("strata: stopping (up to {} s; a second signal stops at once)", grace.as_secs());
    app.stop();
    // Ends keep-alive connections and takes no new ones; open requests go on.
    drop(stop);
    tokio::select! {
        _ = finish(engine, grace, server) => {}
        _ = terminate.recv() => {}
        _ = interrupt.recv() => {}
    }
    Ok(ExitCode::SUCCESS)
}

/// Waits for the engine to finish what it has, then for the connections to close.
async fn finish(engine: EngineHandle, grace: Duration, server: tokio::task::JoinHandle<std::io::Result<()>>) {
    let stopping = tokio::task::spawn_blocking(move || engine.stop(grace));
    // Neither a panic of the engine's thread nor a slow connection changes that the process ends now.
    let _ = tokio::time::timeout(grace + CLOSING, stopping).await;
    let _ = tokio::time::timeout(CLOSING, server).await;
}
