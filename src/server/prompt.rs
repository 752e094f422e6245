//! From a translated chat request to engine requests: pictures are read, the template rendered, text encoded, the
//! grammar compiled. Blocking work; routes run it off the async threads.

use super::answer::Reading;
use super::app::{App, Service};
use super::conversation::{Conversation, Tool, ToolChoice};
use super::error::ApiError;
use super::params::Generation;
use super::random;
use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use strata_core::engine::{CachePrompt, MtpSetting, Prompt, PromptItem, Request, Sampling};
use strata_core::text::grammar::GrammarSpec;
use strata_core::text::output::{OutputMode, ToolSchemas};
use strata_core::text::{Grammar, Specials, TemplateInput, TextError, encode_chat_up_to};

/// A chat request of any dialect.
#[derive(Clone, Debug)]
pub struct ChatRequest {
    /// The messages.
    pub conversation: Conversation,
    /// Functions the model may call.
    pub tools: Vec<Tool>,
    /// Whether it may or must.
    pub tool_choice: ToolChoice,
    /// Whether it may make several calls at once.
    pub parallel_tool_calls: bool,
    /// Thinking on or off; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Further variables for the template.
    pub template_args: Map<String, Value>,
    /// Report reasoning apart from the text.
    pub split_reasoning: bool,
    /// How to generate.
    pub generation: Generation,
    /// Send pieces as they come.
    pub stream: bool,
}

impl ChatRequest {
    /// A request with the server's defaults and an empty conversation.
    pub fn new(app: &App, generation: Generation) -> ChatRequest {
        let budget = generation.thinking_budget.or(app.settings.thinking_budget);
        ChatRequest {
            conversation: Conversation::default(),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_tool_calls: true,
            enable_thinking: app.settings.thinking,
            template_args: Map::new(),
            split_reasoning: true,
            generation: Generation { thinking_budget: budget, ..generation },
            stream: false,
        }
    }

    /// Tools as the template shows them; `None` when the model must not see any.
    fn template_tools(&self) -> Option<Value> {
        if self.tools.is_empty() || self.tool_choice == ToolChoice::None {
            return None;
        }
        Some(self.tools.iter().map(tool_json).collect())
    }
}

/// A prompt ready for the engine.
pub struct ReadyPrompt {
    /// Rows to read.
    pub prompt: Prompt,
    /// The text of the prompt.
    pub text: String,
    /// The answer starts inside a reasoning block.
    pub starts_in_reasoning: bool,
}

/// Renders and encodes a chat's prompt of at most `limit` tokens of text.
pub fn chat_prompt(app: &App, service: &Service, chat: &ChatRequest, limit: usize) -> Result<ReadyPrompt, ApiError> {
    let Some(template) = &service.template else {
        return Err(ApiError::bad_request("this model file has no chat template; use /v1/completions"));
    };
    let mut conversation = chat.conversation.clone();
    let prefill = conversation.take_prefill();
    if prefill.is_some() && conversation.messages().is_empty() {
        return Err(ApiError::field("messages", "an assistant message to go on from needs a message before it"));
    }
    // Text to go on from is text for the user, so thinking is over.
    let enable_thinking = if prefill.is_some() { Some(false) } else { chat.enable_thinking };
    let input = TemplateInput {
        messages: Value::Array(conversation.messages().to_vec()),
        tools: chat.template_tools(),
        add_generation_prompt: true,
        enable_thinking,
        extra: chat.template_args.clone(),
    };
    let encoded = encode_chat_up_to(template, &service.tokenizer, &input, limit).map_err(text_error)?;
    let pictures = read_pictures(app, service, conversation.pictures())?;
    let mut prompt = Prompt::from_chat(&encoded, &pictures)
        .map_err(|index| ApiError::internal(format!("the template placed picture {index} of {}", pictures.len())))?;
    let mut text = encoded.text;
    if let Some(prefill) = prefill.filter(|p| !p.is_empty()) {
        let ids = service.tokenizer.encode_up_to(&prefill, Specials::AsText, limit).map_err(text_error)?;
        prompt.pieces.push(PromptItem::Tokens(ids));
        text.push_str(&prefill);
    }
    Ok(ReadyPrompt { prompt, text, starts_in_reasoning: encoded.starts_in_reasoning })
}

fn read_pictures(
    app: &App,
    service: &Service,
    pictures: &[(String, super::pictures::PictureSource)],
) -> Result<Vec<Arc<strata_core::vision::PictureRows>>, ApiError> {
    pictures
        .iter()
        .map(|(path, source)| {
            let Some(reader) = &service.pictures else {
                return Err(ApiError::field(
                    path,
                    "this server has no vision encoder: start it with --mmproj FILE (the mmproj GGUF of the model)",
                )
                .with_code("no_vision"));
            };
            let bytes = source.load(path, &app.settings.pictures)?;
            let read = reader.read(&bytes).map_err(|e| ApiError::field(path, e.to_string()))?;
            read.notes.iter().for_each(|note| crate::errln!("picture {path}: {note}"));
            Ok(read.rows)
        })
        .collect()
}

/// Engine requests of a chat, one per choice, and how to read their text.
pub fn chat_requests(app: &App, service: &Service, chat: &ChatRequest) -> Result<Vec<(Request, Reading)>, ApiError> {
    let ready = chat_prompt(app, service, chat, service.engine.ctx())?;
    let tools = chat.template_tools();
    let forced =
        |tools: &[Tool], parallel| GrammarSpec::ToolCalls { tools: tools.iter().map(tool_json).collect(), parallel };
    let spec = match (&chat.generation.constraint, &chat.tool_choice) {
        (Some(_), _) if tools.is_some() => {
            let problem = "cannot be combined with tools (set `tool_choice` to \"none\")";
            return Err(ApiError::field("response_format", problem));
        }
        (Some(constraint), _) => Some(constraint.spec()),
        (None, ToolChoice::Required) => Some(forced(&chat.tools, chat.parallel_tool_calls)),
        (None, ToolChoice::Named(name)) => {
            let named: Vec<Tool> = chat.tools.iter().filter(|t| &t.name == name).cloned().collect();
            Some(forced(&named, false))
        }
        (None, _) => None,
    };
    let grammar = spec.map(|spec| compile(service, &spec, ready.starts_in_reasoning)).transpose()?;
    let schemas = tools.as_ref().map(ToolSchemas::new);
    let reading = Reading {
        mode: Some(OutputMode {
            starts_in_reasoning: ready.starts_in_reasoning,
            tools: schemas,
            keep_reasoning_tags: !chat.split_reasoning,
            id_prefix: String::new(),
        }),
        split_reasoning: chat.split_reasoning,
        single_call: !chat.parallel_tool_calls || matches!(chat.tool_choice, ToolChoice::Named(_)),
        echo: None,
    };
    let starts_in_reasoning = ready.starts_in_reasoning;
    let first = Request { starts_in_reasoning, ..request(&chat.generation, ready.prompt, grammar) };
    Ok(choices(first, reading, chat.generation.n))
}

/// The same request with consecutive seeds.
pub fn choices(first: Request, reading: Reading, n: usize) -> Vec<(Request, Reading)> {
    (0..n)
        .map(|i| {
            let (mut request, mut reading) = (first.clone(), reading.clone());
            request.sampling.seed = request.sampling.seed.wrapping_add(i as u64);
            if let Some(mode) = &mut reading.mode {
                mode.id_prefix = format!("{:016x}", random());
            }
            (request, reading)
        })
        .collect()
}

/// An engine request for a prompt.
pub fn request(generation: &Generation, prompt: Prompt, grammar: Option<Grammar>) -> Request {
    let s = &generation.sampling;
    Request {
        prompt,
        sampling: Sampling {
            temperature: s.temperature,
            top_k: s.top_k as usize,
            top_p: s.top_p,
            min_p: s.min_p,
            repeat_penalty: s.repeat_penalty,
            repeat_last_n: s.repeat_last_n.map_or(usize::MAX, |n| n as usize),
            presence_penalty: s.presence_penalty,
            frequency_penalty: s.frequency_penalty,
            logit_bias: generation.logit_bias.clone(),
            seed: s.seed.unwrap_or_else(random),
        },
        max_tokens: s.max_tokens,
        stop: generation.stop.clone(),
        stop_token_ids: generation.stop_token_ids.clone(),
        ignore_eos: generation.ignore_eos,
        logprobs: generation.logprobs,
        grammar,
        thinking_budget: generation.thinking_budget,
        cache_prompt: if generation.cache_prompt { CachePrompt::Yes } else { CachePrompt::No },
        mtp: match (generation.speculative, generation.mtp) {
            (Some(false), _) | (_, Some(0)) => Some(MtpSetting::Off),
            (_, Some(depth)) => Some(MtpSetting::Depth(depth)),
            (_, None) => None,
        },
        ..Request::default()
    }
}

/// Compiles what an answer must be.
pub fn compile(service: &Service, spec: &GrammarSpec, after_reasoning: bool) -> Result<Grammar, ApiError> {
    let field = match spec {
        GrammarSpec::JsonObject | GrammarSpec::JsonSchema(_) => "response_format",
        GrammarSpec::ToolCalls { .. } => "tools",
        _ => "grammar",
    };
    Grammar::new(service.grammars()?, spec, after_reasoning).map_err(|e| ApiError::field(field, e.to_string()))
}

/// A tool as the template and the grammar read it.
fn tool_json(tool: &Tool) -> Value {
    let mut function = Map::new();
    function.insert("name".into(), json!(tool.name));
    if let Some(description) = &tool.description {
        function.insert("description".into(), json!(description));
    }
    function.insert("parameters".into(), tool.parameters.clone());
    json!({"type": "function", "function": function})
}

/// A text error as an answer to the client: its conversation, grammar or text is at fault.
pub fn text_error(error: TextError) -> ApiError {
    match error {
        TextError::Messages { field, problem } => ApiError::field(field, problem),
        TextError::Template(_) => {
            ApiError { param: Some("messages".into()), ..ApiError::bad_request(error.to_string()) }
        }
        TextError::TooLong { limit } => ApiError::bad_request(format!(
            "the prompt is longer than the context of {limit} tokens (stopped counting there)"
        ))
        .with_code("context_length_exceeded"),
        TextError::UnknownToken { .. } => ApiError::bad_request(error.to_string()),
        other => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, other.to_string()),
    }
}
