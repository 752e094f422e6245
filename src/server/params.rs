//! How an answer is generated: sampling, limits, stops, constraints. One set of fields for every route.

use super::app::App;
use super::error::{ApiError, kind_of};
use super::form::{Field, Fields, Kind, Nested, check, field};
use serde_json::Value;
use strata_core::engine::MAX_MTP_DEPTH;
use strata_core::text::grammar::GrammarSpec;

/// Most answers one request may ask for (`n`, or prompts of a completion request times `n`).
pub const MAX_CHOICES: usize = 16;
/// Most stop strings of a request.
const MAX_STOPS: usize = 32;
/// Most entries of `logit_bias`.
const MAX_BIASES: usize = 4096;
/// Most alternatives reported per token.
const MAX_TOP_LOGPROBS: i64 = 20;
/// Upper end of token limits; anything larger than the context ends at the context.
const MAX_TOKENS: i64 = 1 << 40;

/// Sampling fields, named as OpenAI, vLLM and llama-server name them.
pub const SAMPLING_FIELDS: &[Field] = &[
    field("temperature", Kind::Number(0.0, 100.0), "0 takes the most likely token; higher is more random"),
    field("top_k", Kind::Integer(-1, 1 << 30), "Keep only the k most likely tokens; 0 or -1 keeps all"),
    field("top_p", Kind::Number(0.0, 1.0), "Keep the most likely tokens up to this total probability"),
    field("min_p", Kind::Number(0.0, 1.0), "Keep tokens at least this likely relative to the most likely"),
    field("presence_penalty", Kind::Number(-2.0, 2.0), "Subtracted once from tokens that already occurred"),
    field("frequency_penalty", Kind::Number(-2.0, 2.0), "Subtracted per occurrence from tokens that already occurred"),
    field("repeat_penalty", Kind::Number(0.01, 100.0), "Divides the logits of tokens that occurred lately; 1 is off"),
    field("repetition_penalty", Kind::Number(0.01, 100.0), "The same as repeat_penalty"),
    field(
        "repeat_last_n",
        Kind::Integer(-1, 1 << 30),
        "How many tokens back penalties look; 0 is off, -1 is the whole context",
    ),
    field("logit_bias", Kind::Any, "Added to the logits of tokens: an object or an array of [token, bias] pairs"),
    field("seed", Kind::Integer(i64::MIN, i64::MAX), "Makes sampling repeatable; absent or -1 picks one"),
];

/// Limits and options of generation beyond sampling.
pub const GENERATION_FIELDS: &[Field] = &[
    field("max_tokens", Kind::Integer(-1, MAX_TOKENS), "Longest answer in tokens; -1 is up to the context"),
    field("n_predict", Kind::Integer(-1, MAX_TOKENS), "The same as max_tokens"),
    field("stop", Kind::TextOrTexts(MAX_STOPS), "Strings that end the answer"),
    field("stop_token_ids", Kind::List(MAX_STOPS), "Token ids that end the answer"),
    field("ignore_eos", Kind::Flag, "Go on past the end-of-answer token"),
    field("grammar", Kind::Text, "A grammar the answer must follow: GBNF, or Lark in the dialect of llguidance"),
    field("json_schema", Kind::Any, "A JSON schema the answer must follow"),
    field("response_format", Kind::Object, "{\"type\": \"text\" | \"json_object\" | \"json_schema\"}"),
    field("cache_prompt", Kind::Flag, "Go on from held state of an earlier request (default true)"),
    field("speculative", Kind::Flag, "false generates without drafts; the text is the same"),
    field(
        "mtp",
        Kind::Integer(0, MAX_MTP_DEPTH as i64),
        "Drafts of the MTP head per window; 0 is none; the text is the same",
    ),
    field(
        "id_slot",
        Kind::Integer(-1, 1 << 20),
        "A slot of the server, or -1; otherwise ignored: the slot that holds the longest start is taken",
    ),
    field("user", Kind::Text, "Ignored"),
];

/// What the answer must look like.
#[derive(Clone, Debug, PartialEq)]
pub enum Constraint {
    /// Any JSON object.
    JsonObject,
    /// JSON valid under a schema.
    JsonSchema(Value),
    /// A GBNF or Lark grammar.
    Grammar(String),
}

impl Constraint {
    /// The same for the grammar compiler.
    pub fn spec(&self) -> GrammarSpec {
        match self {
            Constraint::JsonObject => GrammarSpec::JsonObject,
            Constraint::JsonSchema(schema) => GrammarSpec::JsonSchema(schema.clone()),
            Constraint::Grammar(text) if text.contains("::=") => GrammarSpec::Gbnf(text.clone()),
            Constraint::Grammar(text) => GrammarSpec::Lark(text.clone()),
        }
    }
}

/// Sampling defaults of the server (its command line); requests override them field by field.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// See [`SAMPLING_FIELDS`].
    pub temperature: f32,
    /// 0 keeps all tokens.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off.
    pub repeat_penalty: f32,
    /// `None`: the whole context.
    pub repeat_last_n: Option<u32>,
    /// 0 is off.
    pub presence_penalty: f32,
    /// 0 is off.
    pub frequency_penalty: f32,
    /// `None`: a new one per request.
    pub seed: Option<u64>,
    /// Longest answer where the request sets none.
    pub max_tokens: Option<usize>,
}

impl Default for SamplingDefaults {
    /// The sampling Qwen publishes for this model family, no penalties.
    fn default() -> Self {
        SamplingDefaults {
            temperature: 1.0,
            top_k: 20,
            top_p: 0.95,
            min_p: 0.0,
            repeat_penalty: 1.0,
            repeat_last_n: Some(64),
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            seed: None,
            max_tokens: None,
        }
    }
}

/// Everything about generating that does not depend on the route.
#[derive(Clone, Debug, PartialEq)]
pub struct Generation {
    /// Sampling values with the defaults filled in.
    pub sampling: SamplingDefaults,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Stop token ids.
    pub stop_token_ids: Vec<u32>,
    /// Go on past the end-of-answer token.
    pub ignore_eos: bool,
    /// Report log-probabilities, with so many alternatives per token.
    pub logprobs: Option<u8>,
    /// What the answer must look like.
    pub constraint: Option<Constraint>,
    /// Most tokens of thinking.
    pub thinking_budget: Option<usize>,
    /// Go on from held state.
    pub cache_prompt: bool,
    /// `Some(false)`: no drafts for this request.
    pub speculative: Option<bool>,
    /// Drafts of the MTP head per window.
    pub mtp: Option<usize>,
    /// Answers per prompt.
    pub n: usize,
}

impl Generation {
    /// What a route without any fields gets.
    pub fn new(defaults: &SamplingDefaults) -> Generation {
        Generation {
            sampling: defaults.clone(),
            logit_bias: Vec::new(),
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            constraint: None,
            thinking_budget: None,
            cache_prompt: true,
            speculative: None,
            mtp: None,
            n: 1,
        }
    }

    /// Reads [`SAMPLING_FIELDS`] and [`GENERATION_FIELDS`].
    pub fn read(fields: &Fields, defaults: &SamplingDefaults) -> Result<Generation, ApiError> {
        let mut generation = Generation::new(defaults);
        let s = &mut generation.sampling;
        let set = |slot: &mut f32, name: &str| *slot = fields.number(name).unwrap_or(*slot);
        set(&mut s.temperature, "temperature");
        set(&mut s.top_p, "top_p");
        set(&mut s.min_p, "min_p");
        set(&mut s.presence_penalty, "presence_penalty");
        set(&mut s.frequency_penalty, "frequency_penalty");
        set(&mut s.repeat_penalty, "repetition_penalty");
        set(&mut s.repeat_penalty, "repeat_penalty");
        if let Some(k) = fields.integer("top_k") {
            s.top_k = u32::try_from(k).unwrap_or(0);
        }
        if let Some(n) = fields.integer("repeat_last_n") {
            s.repeat_last_n = u32::try_from(n).ok();
        }
        if let Some(seed) = fields.integer("seed") {
            s.seed = if seed == -1 { None } else { Some(seed as u64) };
        }
        for name in ["n_predict", "max_tokens"] {
            if let Some(n) = fields.integer(name) {
                set_max_tokens(s, name, n)?;
            }
        }
        generation.logit_bias = logit_bias(fields)?;
        generation.stop = fields.texts("stop");
        if generation.stop.iter().any(String::is_empty) {
            return Err(ApiError::field("stop", "a stop string must not be empty"));
        }
        for (i, id) in fields.list("stop_token_ids").into_iter().flatten().enumerate() {
            generation.stop_token_ids.push(token_id(&format!("stop_token_ids[{i}]"), id)?);
        }
        generation.ignore_eos = fields.flag("ignore_eos").unwrap_or(false);
        generation.cache_prompt = fields.flag("cache_prompt").unwrap_or(true);
        generation.speculative = fields.flag("speculative");
        generation.mtp = fields.integer("mtp").map(|n| n as usize);
        generation.constraint = constraint(fields)?;
        Ok(generation)
    }

    /// Reads chat's `logprobs` (a flag) and `top_logprobs` (a count).
    pub fn read_chat_logprobs(&mut self, fields: &Fields) -> Result<(), ApiError> {
        let top = fields.integer("top_logprobs");
        match (fields.flag("logprobs").unwrap_or(false), top) {
            (true, top) => self.logprobs = Some(top.unwrap_or(0) as u8),
            (false, Some(top)) if top > 0 => {
                return Err(ApiError::field("top_logprobs", "needs `logprobs` to be true"));
            }
            _ => {}
        }
        Ok(())
    }
}

/// `top_logprobs` of the chat routes.
pub const TOP_LOGPROBS: Field =
    field("top_logprobs", Kind::Integer(0, MAX_TOP_LOGPROBS), "How many alternatives to report per token");

/// Refuses an `id_slot` that the server does not have. While the model is loading there are none to compare with, and the request
/// is refused for that.
pub fn check_slot(fields: &Fields, app: &App) -> Result<(), ApiError> {
    let (Some(slot), Ok(service)) = (fields.integer("id_slot"), app.service()) else { return Ok(()) };
    let slots = service.engine.status().slots.len();
    if slot < slots as i64 {
        return Ok(());
    }
    Err(ApiError::field("id_slot", format!("expected -1 to {}, found {slot}", slots as i64 - 1)))
}

/// Sets the answer's limit from a request field that may be -1.
pub fn set_max_tokens(sampling: &mut SamplingDefaults, name: &str, n: i64) -> Result<(), ApiError> {
    sampling.max_tokens = match n {
        -1 => None,
        0 => return Err(ApiError::field(name, "expected at least 1 (or -1 for no limit), found 0")),
        n => usize::try_from(n).ok(),
    };
    Ok(())
}

/// A token id within a body.
pub fn token_id(path: &str, value: &Value) -> Result<u32, ApiError> {
    check(path, Kind::Integer(0, i64::from(u32::MAX)), value)?;
    Ok(value.as_u64().unwrap_or_default() as u32)
}

fn logit_bias(fields: &Fields) -> Result<Vec<(u32, f32)>, ApiError> {
    let bias = |path: String, value: &Value| -> Result<f32, ApiError> {
        if value == &Value::Bool(false) {
            return Ok(f32::NEG_INFINITY);
        }
        check(&path, Kind::Number(-1e30, 1e30), value)?;
        Ok(value.as_f64().unwrap_or_default() as f32)
    };
    let Some(value) = fields.value("logit_bias") else { return Ok(Vec::new()) };
    let mut biases = Vec::new();
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let path = format!("logit_bias.{key}");
                let id = key.parse().map_err(|_| ApiError::field(&path, "the key must be a token id"))?;
                biases.push((id, bias(path, value)?));
            }
        }
        Value::Array(pairs) => {
            for (i, pair) in pairs.iter().enumerate() {
                let path = format!("logit_bias[{i}]");
                match pair.as_array().map(Vec::as_slice) {
                    Some([id, value]) => biases.push((token_id(&path, id)?, bias(path, value)?)),
                    _ => return Err(ApiError::field(path, "expected a pair [token id, bias]")),
                }
            }
        }
        other => return Err(ApiError::field("logit_bias", format!("expected an object, found {}", kind_of(other)))),
    }
    if biases.len() > MAX_BIASES {
        return Err(ApiError::field("logit_bias", format!("at most {MAX_BIASES} entries, found {}", biases.len())));
    }
    Ok(biases)
}

fn constraint(fields: &Fields) -> Result<Option<Constraint>, ApiError> {
    let mut found = Vec::new();
    if let Some(grammar) = fields.text("grammar").filter(|g| !g.is_empty()) {
        found.push(("grammar", Constraint::Grammar(grammar.to_owned())));
    }
    if let Some(schema) = fields.value("json_schema") {
        found.push(("json_schema", Constraint::JsonSchema(json_schema("json_schema", schema)?)));
    }
    if let Some(format) = fields.value("response_format") {
        let format = Nested::new("response_format", format)?;
        if let Some(constraint) = read_format(&format, "json_schema")? {
            found.push(("response_format", constraint));
        }
    }
    match found.len() {
        0 | 1 => Ok(found.pop().map(|(_, c)| c)),
        _ => Err(ApiError::field(found[1].0, format!("cannot be combined with `{}`", found[0].0))),
    }
}

/// An output format object: `{"type": "json_schema", ...}`. The schema is under `wrapper` (OpenAI chat), beside the type
/// (the responses API), or under `schema` (llama-server).
pub fn read_format(format: &Nested, wrapper: &str) -> Result<Option<Constraint>, ApiError> {
    let schema_of = |holder: &Nested| -> Result<Constraint, ApiError> {
        let schema = holder.need("schema")?;
        Ok(Constraint::JsonSchema(json_schema(&holder.at("schema"), schema)?))
    };
    match format.need_text("type")? {
        "text" => Ok(None),
        "json_object" => match format.value("schema") {
            Some(_) => schema_of(format).map(Some),
            None => Ok(Some(Constraint::JsonObject)),
        },
        "json_schema" => match format.object(wrapper)? {
            Some(holder) => schema_of(&holder).map(Some),
            None if format.value("schema").is_some() => schema_of(format).map(Some),
            None => Err(ApiError::field(format.at(wrapper), "this field is required")),
        },
        "grammar" => Ok(Some(Constraint::Grammar(format.need_text("grammar")?.to_owned()))),
        other => Err(ApiError::field(
            format.at("type"),
            format!("expected \"text\", \"json_object\" or \"json_schema\", found {other:?}"),
        )),
    }
}

fn json_schema(path: &str, value: &Value) -> Result<Value, ApiError> {
    match value {
        Value::Object(_) | Value::Bool(_) => Ok(value.clone()),
        other => Err(ApiError::field(path, format!("expected a JSON schema (an object), found {}", kind_of(other)))),
    }
}

#[cfg(test)]
mod tests {
    use super::super::form::Form;
    use super::*;
    use serde_json::json;

    const FORM: Form = Form { name: "Test", groups: &[SAMPLING_FIELDS, GENERATION_FIELDS], required: &[] };

    fn read(body: Value) -> Result<Generation, ApiError> {
        Generation::read(&FORM.read(body.to_string().as_bytes())?, &SamplingDefaults::default())
    }

    #[test]
    fn fields_of_a_request_override_the_defaults_one_by_one() {
        let g = read(json!({"temperature": 0, "top_k": -1, "seed": 7, "max_tokens": -1})).unwrap();
        assert_eq!((g.sampling.temperature, g.sampling.top_k, g.sampling.top_p), (0.0, 0, 0.95));
        assert_eq!((g.sampling.seed, g.sampling.max_tokens), (Some(7), None));
    }

    #[test]
    fn logit_bias_is_read_as_object_pairs_and_false() {
        assert_eq!(read(json!({"logit_bias": {"5": -100}})).unwrap().logit_bias, [(5, -100.0)]);
        let g = read(json!({"logit_bias": [[7, false], [8, 1.5]]})).unwrap();
        assert_eq!(g.logit_bias, [(7, f32::NEG_INFINITY), (8, 1.5)]);
        assert_eq!(read(json!({"logit_bias": {"x": 1}})).unwrap_err().param.unwrap(), "logit_bias.x");
        assert_eq!(read(json!({"logit_bias": "x"})).unwrap_err().param.unwrap(), "logit_bias");
    }

    #[test]
    fn every_spelling_of_a_schema_is_the_same_constraint() {
        let schema = json!({"type": "object"});
        for body in [
            json!({"json_schema": schema}),
            json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}),
            json!({"response_format": {"type": "json_schema", "schema": schema}}),
            json!({"response_format": {"type": "json_object", "schema": schema}}),
        ] {
            assert_eq!(read(body).unwrap().constraint, Some(Constraint::JsonSchema(schema.clone())));
        }
        let both = read(json!({"grammar": "start: \"a\"", "json_schema": schema})).unwrap_err();
        assert_eq!(both.param.unwrap(), "json_schema");
    }
}
