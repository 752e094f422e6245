//! Constrained generation: which tokens may come next under a JSON schema, a regular expression, a Lark grammar, a list
//! of choices, or the tool calls on offer. Compiled and run by `llguidance`; this module gives it the vocabulary and
//! writes the grammars that are particular to the Qwen family.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{ApproximateTokEnv, SimpleVob, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, panic_utils};
use serde_json::{Value as Json, json};

use super::{TextError, TokenKind, Tokenizer, gbnf};

/// Longest token the trie of `llguidance` takes; longer ones are never allowed under a grammar.
const LONGEST_TOKEN: usize = 1000;
/// Largest grammar or schema read, in bytes.
const MAX_SOURCE: usize = 1 << 20;
/// Most properties of an object in a schema, and most entries of its other lists. The compiler goes one call deeper per property.
const MAX_PROPERTIES: usize = 2000;
/// Deepest brackets of a Lark or GBNF grammar: one call each as well.
const MAX_NESTING: usize = 200;
/// Stack of the thread that compiles, far above what the bounds above let it need.
const COMPILER_STACK: usize = 256 << 20;
/// Items of a row of the parser: about four for each property that may come next.
const MAX_ROW_ITEMS: usize = 5 * MAX_PROPERTIES;
/// Items the parser may make for one mask.
const MAX_MASK_ITEMS: usize = 20 * MAX_ROW_ITEMS;
/// Blanks between two tokens of JSON: a few, or line breaks with indentation. Without a bound a model that likes blanks would write
/// nothing else up to its token limit.
const JSON_BLANKS: &str = r"[ \t]{1,20}|(\r?\n){1,2}[ \t]{0,20}";

/// The vocabulary as `llguidance` reads it. Built once per tokenizer (about a second for 248,320 tokens) and shared.
pub struct GrammarEnv {
    factory: ParserFactory,
    vocab_size: usize,
    ends: Arc<[u32]>,
    /// `</think>`
    think_end: Option<u32>,
    /// `<tool_call>` and `</tool_call>`
    tool_call: Option<(u32, u32)>,
    /// The token of each byte.
    byte_tokens: Box<[Option<u32>; 256]>,
}

impl std::fmt::Debug for GrammarEnv {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarEnv").field("vocab_size", &self.vocab_size).finish_non_exhaustive()
    }
}

impl GrammarEnv {
    /// The environment of a vocabulary.
    ///
    /// # Errors
    /// [`TextError::Grammar`] for a vocabulary without a token that ends a turn.
    pub fn new(tokenizer: &Tokenizer) -> Result<Arc<Self>, TextError> {
        let failed = |problem: String| TextError::Grammar { kind: "vocabulary", problem };
        let Some(&eos) = tokenizer.eos_ids().first() else {
            return Err(failed("no token ends a turn, so no grammar can be finished".into()));
        };
        let vocab_size = tokenizer.vocab_size();
        let words: Vec<Vec<u8>> = (0..vocab_size as u32)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                match tokenizer.kind(id) {
                    Some(TokenKind::Normal) if bytes.len() <= LONGEST_TOKEN => bytes.to_vec(),
                    Some(TokenKind::Control | TokenKind::UserDefined) if bytes.len() < LONGEST_TOKEN => {
                        [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat()
                    }
                    _ => Vec::new(),
                }
            })
            .collect();
        let factory = panic_utils::catch_unwind(AssertUnwindSafe(|| {
            let trie = TokTrie::from(&TokRxInfo::new(vocab_size as u32, eos), &words);
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie.with_eos_tokens(tokenizer.eos_ids())));
            let mut factory = ParserFactory::new_simple(&env)?;
            factory.quiet();
            let limits = factory.limits_mut();
            limits.verbose_errors = false;
            limits.max_items_in_row = MAX_ROW_ITEMS;
            limits.step_max_items = MAX_MASK_ITEMS;
            Ok(factory)
        }))
        .map_err(|error| failed(error.to_string()))?;
        let both = tokenizer.id_of("<tool_call>").zip(tokenizer.id_of("</tool_call>"));
        let ends = tokenizer.eos_ids().into();
        let mut byte_tokens = Box::new([None; 256]);
        for (id, word) in words.iter().enumerate() {
            if let &[byte] = word.as_slice() {
                byte_tokens[usize::from(byte)].get_or_insert(id as u32);
            }
        }
        Ok(Arc::new(Self {
            factory,
            vocab_size,
            ends,
            think_end: tokenizer.id_of("</think>"),
            tool_call: both,
            byte_tokens,
        }))
    }
}

/// What an answer must be.
#[derive(Debug, Clone, PartialEq)]
pub enum GrammarSpec {
    /// Any JSON object.
    JsonObject,
    /// JSON that a schema allows.
    JsonSchema(Json),
    /// Text that a regular expression matches as a whole (the syntax of the `regex` crate, without look-around).
    Regex(String),
    /// A Lark grammar in the dialect of `llguidance`.
    Lark(String),
    /// A grammar in llama.cpp's notation.
    Gbnf(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// One or, if `parallel`, several calls of `tools` (as the API takes them) in the XML form of the Qwen family.
    ToolCalls {
        /// The tools on offer; a single one for a named `tool_choice`.
        tools: Vec<Json>,
        /// Whether several calls may follow each other.
        parallel: bool,
    },
}

impl GrammarSpec {
    fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject | Self::JsonSchema(_) => "JSON schema",
            Self::Regex(_) => "regex",
            Self::Lark(_) => "Lark grammar",
            Self::Gbnf(_) => "GBNF grammar",
            Self::Choice(_) => "choice",
            Self::ToolCalls { .. } => "tools",
        }
    }
}

/// A grammar at some point of an answer. A clone goes on from there on its own.
#[derive(Clone)]
pub struct Grammar {
    matcher: Matcher,
    ends: Arc<[u32]>,
    mask: TokenMask,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar").field("stopped", &self.is_stopped()).finish_non_exhaustive()
    }
}

/// Which tokens are allowed: one bit per id.
#[derive(Debug, Clone)]
pub struct TokenMask {
    bits: SimpleVob,
}

impl TokenMask {
    /// Whether `id` may come next; false outside the vocabulary.
    pub fn allows(&self, id: u32) -> bool {
        (id as usize) < self.bits.len() && self.bits.is_allowed(id)
    }

    /// 32 ids per word, the lowest id in the lowest bit.
    pub fn words(&self) -> &[u32] {
        self.bits.as_slice()
    }

    /// How many tokens are allowed.
    pub fn count(&self) -> usize {
        self.bits.num_set()
    }
}

impl Grammar {
    /// Compiles `spec`. With `after_reasoning` the answer starts inside `<think>`: anything goes up to `</think>`, and
    /// the grammar holds from there.
    ///
    /// # Errors
    /// [`TextError::Grammar`] with the compiler's message.
    pub fn new(env: &GrammarEnv, spec: &GrammarSpec, after_reasoning: bool) -> Result<Self, TextError> {
        std::thread::scope(|scope| {
            let compiler = std::thread::Builder::new().name("strata-grammar".into()).stack_size(COMPILER_STACK);
            let compiled = compiler.spawn_scoped(scope, || Self::compile(env, spec, after_reasoning));
            compiled
                .map_err(|error| error.to_string())
                .and_then(|thread| thread.join().map_err(|_| "the compiler failed on it".to_owned()))
        })
        .unwrap_or_else(|problem| Err(TextError::Grammar { kind: spec.kind(), problem }))
    }

    fn compile(env: &GrammarEnv, spec: &GrammarSpec, after_reasoning: bool) -> Result<Self, TextError> {
        let failed = |problem: String| TextError::Grammar { kind: spec.kind(), problem };
        if after_reasoning {
            // What cannot even start is refused here, not when the reasoning is over.
            Self::compile(env, spec, false)?;
        }
        match spec {
            GrammarSpec::JsonSchema(schema) => check_schema(schema).map_err(failed)?,
            GrammarSpec::ToolCalls { tools, .. } => tools.iter().try_for_each(check_schema).map_err(failed)?,
            GrammarSpec::Lark(text) | GrammarSpec::Gbnf(text) => check_nesting(text).map_err(failed)?,
            GrammarSpec::JsonObject | GrammarSpec::Regex(_) | GrammarSpec::Choice(_) => {}
        }
        let mut body = match spec {
            GrammarSpec::JsonObject => GrammarWithLexer::from_json_schema(bound_blanks(json!({"type": "object"}))),
            GrammarSpec::JsonSchema(schema) => GrammarWithLexer::from_json_schema(bound_blanks(schema.clone())),
            GrammarSpec::Regex(regex) => GrammarWithLexer::from_regex(regex),
            GrammarSpec::Lark(lark) => GrammarWithLexer::from_lark(lark.clone()),
            GrammarSpec::Gbnf(gbnf) if gbnf.len() > MAX_SOURCE => {
                return Err(failed(format!("{} bytes long, at most {MAX_SOURCE} are read", gbnf.len())));
            }
            GrammarSpec::Gbnf(gbnf) => GrammarWithLexer::from_lark(gbnf::to_lark(gbnf).map_err(failed)?),
            GrammarSpec::Choice(options) => GrammarWithLexer::from_lark(choice(options).map_err(failed)?),
            GrammarSpec::ToolCalls { tools, parallel } => {
                GrammarWithLexer::from_lark(tool_calls(env, tools, *parallel).map_err(failed)?)
            }
        };
        let size = body.lark_grammar.as_ref().map_or(0, String::len)
            + body.json_schema.as_ref().map_or(0, |schema| schema.to_string().len());
        if size > MAX_SOURCE {
            return Err(failed(format!("{size} bytes long, at most {MAX_SOURCE} are read")));
        }
        let mut grammars = Vec::new();
        if after_reasoning {
            let end = env.think_end.ok_or_else(|| failed("the vocabulary has no </think> to wait for".into()))?;
            body.name = Some("answer".into());
            let lark = format!("start: thought <[{end}]> blank @answer\nthought: /(?s:.*)/\nblank: /\\n*/\n");
            grammars.push(GrammarWithLexer::from_lark(lark));
        }
        grammars.push(body);
        let grammar = TopLevelGrammar { grammars, max_tokens: None };
        let parser = panic_utils::catch_unwind(AssertUnwindSafe(|| env.factory.create_parser(grammar)));
        let matcher = Matcher::new(parser);
        if let Some(problem) = matcher.get_error() {
            return Err(failed(problem));
        }
        probe(env, &matcher).map_err(failed)?;
        Ok(Self { matcher, ends: env.ends.clone(), mask: TokenMask { bits: SimpleVob::alloc(env.vocab_size) } })
    }

    /// JSON that `schema` allows.
    ///
    /// # Errors
    /// See [`Grammar::new`].
    pub fn json_schema(env: &GrammarEnv, schema: &Json) -> Result<Self, TextError> {
        Self::new(env, &GrammarSpec::JsonSchema(schema.clone()), false)
    }

    /// Any JSON object.
    ///
    /// # Errors
    /// See [`Grammar::new`].
    pub fn json_object(env: &GrammarEnv) -> Result<Self, TextError> {
        Self::new(env, &GrammarSpec::JsonObject, false)
    }

    /// Which tokens may come next; only those that end the turn once the grammar is finished.
    ///
    /// # Errors
    /// [`TextError::Grammar`] where the grammar takes more work than its limits allow.
    pub fn mask(&mut self) -> Result<&TokenMask, TextError> {
        self.mask.bits = self.matcher.compute_mask_or_eos().map_err(failed_step)?;
        Ok(&self.mask)
    }

    /// Goes on by one token, which the mask must allow.
    ///
    /// # Errors
    /// [`TextError::Grammar`] for a token that is not allowed here; the grammar is of no use from then on.
    pub fn accept(&mut self, id: u32) -> Result<(), TextError> {
        if self.is_stopped() && !self.matcher.is_error() && self.ends.contains(&id) {
            return Ok(());
        }
        self.matcher.consume_token(id).map_err(failed_step)
    }

    /// How many of `ids` are allowed one after the other from here; nothing is consumed.
    ///
    /// # Errors
    /// [`TextError::Grammar`] where the grammar is of no use any more.
    pub fn allowed_start(&mut self, ids: &[u32]) -> Result<usize, TextError> {
        self.matcher.validate_tokens(ids).map_err(failed_step)
    }

    /// Whether the answer may end here.
    ///
    /// # Errors
    /// [`TextError::Grammar`] where the grammar is of no use any more.
    pub fn is_accepting(&mut self) -> Result<bool, TextError> {
        if self.is_stopped() {
            return Ok(!self.matcher.is_error());
        }
        self.matcher.is_accepting().map_err(failed_step)
    }

    /// Whether the grammar is finished: nothing but the end of the turn can follow.
    pub fn is_stopped(&self) -> bool {
        self.matcher.is_stopped()
    }
}

/// Refuses lists that the compiler cannot go through.
fn check_schema(schema: &Json) -> Result<(), String> {
    match schema {
        Json::Object(map) => {
            for (key, value) in map {
                let count = match (key.as_str(), value) {
                    ("properties" | "patternProperties" | "$defs" | "definitions", Json::Object(entries)) => {
                        entries.len()
                    }
                    ("anyOf" | "oneOf" | "allOf" | "items" | "prefixItems" | "required", Json::Array(list)) => {
                        list.len()
                    }
                    _ => 0,
                };
                if count > MAX_PROPERTIES {
                    return Err(format!("`{key}` has {count} entries, at most {MAX_PROPERTIES} are supported"));
                }
                check_schema(value)?;
            }
            Ok(())
        }
        Json::Array(list) => list.iter().try_for_each(check_schema),
        _ => Ok(()),
    }
}

fn check_nesting(grammar: &str) -> Result<(), String> {
    let mut depth = 0usize;
    for line in grammar.lines() {
        // Brackets in strings, expressions and classes need not close; where a rule begins none is open.
        let name = |c: char| c.is_alphanumeric() || "_-.?!".contains(c);
        if line.trim_start_matches(name).trim_start().starts_with(':') {
            depth = 0;
        }
        for c in line.chars() {
            match c {
                '(' | '[' | '{' => depth += 1,
                ')' | ']' | '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth > MAX_NESTING {
                return Err(format!("brackets nest too deep: more than {MAX_NESTING}"));
            }
        }
    }
    Ok(())
}

/// The schema with [`JSON_BLANKS`], unless it says itself where blanks may stand.
fn bound_blanks(schema: Json) -> Json {
    let Json::Object(mut map) = schema else {
        return if schema == true { bound_blanks(json!({})) } else { schema };
    };
    let options = map.entry("x-guidance").or_insert_with(|| json!({}));
    if let Json::Object(options) = options
        && !options.contains_key("whitespace_flexible")
        && !options.contains_key("whitespace_pattern")
    {
        options.insert("whitespace_pattern".into(), JSON_BLANKS.into());
    }
    Json::Object(map)
}

/// Goes a few bytes into what the grammar allows. The compiler accepts more than its parser can work through (objects of
/// thousands of optional properties, for one), and that shows at the first braces.
fn probe(env: &GrammarEnv, matcher: &Matcher) -> Result<(), String> {
    let mut ahead = matcher.deep_clone();
    for &byte in [b'{', b'"', b'a'].iter() {
        let mask = ahead.compute_mask_or_eos().map_err(|error| error.to_string())?;
        let next = env.byte_tokens[usize::from(byte)].filter(|&id| mask.is_allowed(id));
        let Some(id) = next else { return Ok(()) };
        ahead.consume_token(id).map_err(|error| error.to_string())?;
    }
    ahead.compute_mask_or_eos().map(drop).map_err(|error| error.to_string())
}

fn failed_step(error: impl std::fmt::Display) -> TextError {
    TextError::Grammar { kind: "constrained generation", problem: error.to_string() }
}

/// A Lark literal.
fn literal(text: &str) -> String {
    Json::from(text).to_string()
}

fn choice(options: &[String]) -> Result<String, String> {
    if options.is_empty() || options.iter().any(String::is_empty) {
        return Err("expected a list of texts, none of them empty".into());
    }
    let options: Vec<_> = options.iter().map(|option| literal(option)).collect();
    Ok(format!("start: {}\n", options.join(" | ")))
}

/// The tool calls as a Lark grammar. Parameters come in the schema's order, optional ones may be left out. Strings run to
/// the closing tag as they are; everything else is JSON.
fn tool_calls(env: &GrammarEnv, tools: &[Json], parallel: bool) -> Result<String, String> {
    use std::fmt::Write as _;

    if tools.is_empty() {
        return Err("expected at least one tool".into());
    }
    let (open, close) = match env.tool_call {
        Some((open, close)) => (format!("<[{open}]>"), format!("<[{close}]>")),
        None => (literal("<tool_call>"), literal("</tool_call>")),
    };
    let mut lark = format!(
        "start: call{}\ncall: {open} \"\\n\" function \"\\n\" {close}\n",
        if parallel { " (\"\\n\" call)*" } else { "" }
    );
    let mut functions = Vec::new();
    let mut rules = String::new();
    // Writing to a String does not fail.
    for (t, tool) in tools.iter().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        let name = function.get("name").and_then(Json::as_str).ok_or_else(|| format!("tools[{t}]: no name"))?;
        if name.is_empty() || name.contains(['<', '>', '\n']) {
            return Err(format!("tools[{t}]: {name:?} is no usable name"));
        }
        let root = function.get("parameters").or_else(|| function.get("input_schema")).unwrap_or(&Json::Null);
        let required: Vec<&str> =
            root.get("required").and_then(Json::as_array).into_iter().flatten().filter_map(Json::as_str).collect();
        let properties = root.get("properties").and_then(Json::as_object);
        let mut line = format!("f{t}: {}", literal(&format!("<function={name}>\n")));
        for (p, (parameter, schema)) in properties.into_iter().flatten().enumerate() {
            if parameter.is_empty() || parameter.contains(['<', '>', '\n']) {
                return Err(format!("tools[{t}]: {parameter:?} is no usable parameter name"));
            }
            let optional = if required.contains(&parameter.as_str()) { "" } else { "?" };
            let _ = write!(line, " p{t}_{p}{optional}");
            let opening = literal(&format!("<parameter={parameter}>\n"));
            let _ = writeln!(rules, "p{t}_{p}: {opening} v{t}_{p}");
            rules.push_str(&value_rule(&format!("v{t}_{p}"), schema, root));
        }
        let _ = writeln!(rules, "{line} \"</function>\"");
        functions.push(format!("f{t}"));
    }
    let _ = writeln!(lark, "function: {}", functions.join(" | "));
    Ok(lark + &rules)
}

const VALUE_END: &str = "\n</parameter>\n";

fn value_rule(name: &str, schema: &Json, root: &Json) -> String {
    let types = super::output::ParameterTypes::of(schema, root);
    let end = literal(VALUE_END);
    if types.is_string_only() {
        let options = schema.get("enum").and_then(Json::as_array).map(Vec::as_slice);
        let options: Vec<_> = options.unwrap_or_default().iter().filter_map(Json::as_str).map(literal).collect();
        if !options.is_empty() {
            return format!("{name}: ({}) {end}\n", options.join(" | "));
        }
        return format!("{name}[suffix={end}]: /(?s:.*)/\n");
    }
    let mut schema = schema.clone();
    if let Json::Object(map) = &mut schema {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = root.get(key) {
                map.entry(key).or_insert_with(|| definitions.clone());
            }
        }
    }
    if types.string {
        // A string among other types is written raw, like any string.
        return format!("{name}[suffix={end}]: /(?s:.*)/\n");
    }
    format!("{name}: %json {} {end}\n", bound_blanks(schema))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Specials;
    use crate::text::fixtures::{GRAMMAR, TOKENIZER};

    fn grammar(spec: &GrammarSpec) -> Grammar {
        Grammar::new(&GRAMMAR, spec, false).unwrap()
    }

    /// How far the grammar lets `text` come, in tokens, checking each token against the mask; and whether it may end there.
    fn follow(grammar: &mut Grammar, text: &str) -> (String, bool) {
        let mut read = Vec::new();
        for id in TOKENIZER.encode(text, Specials::Parse).unwrap() {
            if !grammar.mask().unwrap().allows(id) {
                assert_eq!(grammar.clone().allowed_start(&[id]).unwrap(), 0);
                break;
            }
            assert_eq!(grammar.allowed_start(&[id]).unwrap(), 1);
            grammar.accept(id).unwrap();
            read.push(id);
        }
        (TOKENIZER.decode(&read), grammar.is_accepting().unwrap())
    }

    fn accepts(spec: &GrammarSpec, text: &str) -> bool {
        follow(&mut grammar(spec), text) == (text.to_owned(), true)
    }

    #[test]
    fn schemas_expressions_and_choices_accept_what_they_describe() {
        let schema = GrammarSpec::JsonSchema(json!({
            "type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
            "required": ["name", "n"], "additionalProperties": false
        }));
        let lark = GrammarSpec::Lark("start: \"<\" NUMBER (\",\" NUMBER)* \">\"\nNUMBER: /[0-9]+/\n".into());
        let choice = GrammarSpec::Choice(vec!["yes".into(), "no".into(), "not \"sure\"\n".into()]);
        for (spec, text, expected) in [
            (&schema, r#"{"name": "जॉन 🙂 \"x\"", "n": -3}"#, true),
            (&schema, r#"{"name": "x", "n": 1, "tags": ["a", "b"]}"#, true),
            (&schema, r#"{"name": "x"}"#, false),
            (&schema, r#"{"name": "x", "n": 1.5}"#, false),
            (&schema, r#"{"name": "x", "n": 1, "tags": ["c"]}"#, false),
            (&GrammarSpec::JsonObject, r#"{"any": [1, null, {"x": true}]}"#, true),
            (&GrammarSpec::JsonObject, "[1]", false),
            (&GrammarSpec::Regex("[a-c]{2,3}|x+".into()), "abc", true),
            (&GrammarSpec::Regex("[a-c]{2,3}|x+".into()), "abcx", false),
            (&lark, "<12,3>", true),
            (&lark, "<12,>", false),
            (&choice, "not \"sure\"\n", true),
            (&choice, "not", false),
            (&choice, "maybe", false),
        ] {
            assert_eq!(accepts(spec, text), expected, "{spec:?} {text}");
        }
    }

    #[test]
    fn a_schema_of_hundreds_of_optional_properties_works_and_one_too_large_is_refused_at_once() {
        let object = |count: usize| {
            let properties: serde_json::Map<_, _> =
                (0..count).map(|i| (format!("property_{i}"), json!({"type": "string"}))).collect();
            GrammarSpec::JsonSchema(json!({"type": "object", "properties": properties, "additionalProperties": false}))
        };
        for count in [600, MAX_PROPERTIES] {
            let text = format!("{{\"property_50\": \"x\", \"property_{}\": \"y\"}}", count - 1);
            assert!(accepts(&object(count), &text), "{count}");
        }
        for count in [MAX_PROPERTIES + 1, 20_000] {
            let problem = Grammar::new(&GRAMMAR, &object(count), false).unwrap_err().to_string();
            assert!(problem.contains(&format!("{count} entries")), "{problem}");
        }
    }

    #[test]
    fn grammars_nested_without_end_are_refused() {
        let deep = |open: &str, close: &str| format!("{}\"a\"{}", open.repeat(30_000), close.repeat(30_000));
        for (open, close) in [("(", ")"), ("[", "]"), ("(\n", ")")] {
            for spec in [
                GrammarSpec::Lark(format!("start: {}\n", deep(open, close))),
                GrammarSpec::Gbnf(format!("root ::= {}\n", deep(open, close))),
                GrammarSpec::Regex(deep(open, close)),
            ] {
                assert!(Grammar::new(&GRAMMAR, &spec, false).is_err(), "{open:?} {}", spec.kind());
            }
        }
    }

    #[test]
    fn blanks_between_the_tokens_of_json_are_bounded() {
        let tool = json!({"function": {"name": "f", "parameters": {"properties": {"a": {"type": "array"}}, "required": ["a"]}}});
        let call = |json: &str| {
            format!("<tool_call>\n<function=f>\n<parameter=a>\n{json}\n</parameter>\n</function>\n</tool_call>")
        };
        let calls = GrammarSpec::ToolCalls { tools: vec![tool], parallel: false };
        for spec in [GrammarSpec::JsonObject, GrammarSpec::JsonSchema(json!({})), GrammarSpec::JsonSchema(json!(true))]
        {
            assert!(accepts(&spec, "{\n  \"a\": [\n    1,\n\t2\n  ]\r\n}"), "{spec:?}");
            assert!(!accepts(&spec, &format!("{{{}}}", " ".repeat(200))), "{spec:?}");
            assert!(!accepts(&spec, &format!("{{{}}}", "\n".repeat(200))), "{spec:?}");
        }
        assert!(accepts(&calls, &call("[1, 2]")));
        assert!(!accepts(&calls, &call(&format!("[{}1]", " ".repeat(200)))));
    }

    #[test]
    fn gbnf_grammars_mean_what_they_mean_in_llama_cpp() {
        let list = "root ::= item (\", \" item)* # a list\nitem ::= [a-c\\-]{2,3} | \"\\u00e9\\n\" |\n  nothing \"x\"?\nnothing ::= \"(\" root? \")\" | [^a-z(), é]\n";
        let prefix = r#"root ::= "a" "bc" | "ab" "d" | . "z""#;
        let json = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [1-9] [0-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"#;
        for (gbnf, text, expected) in [
            (list, "ab, c-a, (), (é\n)x, 7", true),
            (list, "ab,c", false),
            (list, "abca", false),
            (prefix, "abc", true),
            (prefix, "abd", true),
            (prefix, "abcd", false),
            (prefix, "🙂z", true),
            (json, "{\"a\": [1, -2.5e3, {\"é\": null}], \"b\": \"x\\n\"}", true),
            (json, "{\"a\": tru}", false),
        ] {
            assert_eq!(accepts(&GrammarSpec::Gbnf(gbnf.into()), text), expected, "{gbnf} {text}");
        }
        for (gbnf, problem) in [
            ("root = x", "line 1: expected ::="),
            ("root ::= a\nb ::= \"x\"", "rule a is not defined"),
            ("a ::= \"x\"", "no rule named root"),
            ("root ::= \"x\"\nroot ::= \"y\"", "line 2: rule root is defined twice"),
            ("root ::= (\"x\"", "line 1: expected )"),
            ("root ::= \"x", "not closed"),
            ("root ::= []", "empty character class"),
            ("root ::= [b-a]", "is empty"),
            ("root ::= \"\\q\"", "unknown escape"),
            ("root ::= \"x\"{3,1}", "expected {m}"),
            (&format!("root ::= {}", "(".repeat(1000)), "nest too deep"),
        ] {
            match Grammar::new(&GRAMMAR, &GrammarSpec::Gbnf(gbnf.into()), false) {
                Err(TextError::Grammar { problem: found, .. }) => assert!(found.contains(problem), "{found}"),
                other => panic!("{gbnf}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_finished_grammar_allows_the_end_of_the_turn_alone() {
        let mut g = grammar(&GrammarSpec::Choice(vec!["yes".into()]));
        let end = TOKENIZER.id_of("<|im_end|>").unwrap();
        assert!(!g.mask().unwrap().allows(end));
        assert_eq!(follow(&mut g, "yes"), ("yes".into(), true));
        assert!(g.mask().unwrap().allows(end));
        assert_eq!(g.mask().unwrap().count(), TOKENIZER.eos_ids().len());
        g.accept(end).unwrap();
        assert!(g.is_stopped());
    }

    #[test]
    fn a_clone_goes_its_own_way_and_a_wrong_token_is_an_error() {
        let mut g = grammar(&GrammarSpec::Choice(vec!["yes".into(), "no".into()]));
        let mut other = g.clone();
        assert_eq!(follow(&mut g, "yes").0, "yes");
        assert_eq!(follow(&mut other, "no").0, "no");
        let mut wrong = grammar(&GrammarSpec::JsonObject);
        let id = TOKENIZER.id_of("x").unwrap();
        assert!(wrong.accept(id).is_err());
        assert!(wrong.mask().is_err());
        assert!(!g.mask().unwrap().allows(u32::MAX));
    }

    #[test]
    fn what_does_not_compile_is_an_error() {
        for spec in [
            GrammarSpec::Regex("(".into()),
            GrammarSpec::Regex("a(?=b)".into()),
            GrammarSpec::Lark("start: missing".into()),
            GrammarSpec::JsonSchema(json!({"type": "nonsense"})),
            GrammarSpec::JsonSchema(json!({"$ref": "#/nowhere"})),
            GrammarSpec::Choice(vec![]),
            GrammarSpec::ToolCalls { tools: vec![], parallel: false },
            GrammarSpec::ToolCalls { tools: vec![json!({"function": {}})], parallel: false },
            GrammarSpec::ToolCalls { tools: vec![json!({"name": "a>b"})], parallel: false },
            GrammarSpec::Lark("start: \"".to_owned() + &"x".repeat(2 << 20) + "\""),
        ] {
            assert!(matches!(Grammar::new(&GRAMMAR, &spec, false), Err(TextError::Grammar { .. })), "{spec:.80?}");
        }
    }

    fn tools() -> Vec<Json> {
        vec![
            json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
                "city": {"type": "string"}, "unit": {"type": "string", "enum": ["C", "F"]}, "days": {"type": "integer"},
                "where": {"$ref": "#/$defs/point"}}, "required": ["city"],
                "$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"], "additionalProperties": false}}}}}),
            json!({"name": "now"}),
        ]
    }

    #[test]
    fn tool_calls_follow_the_schemas() {
        let call = |body: &str| format!("<tool_call>\n<function={body}</function>\n</tool_call>");
        let city = "<parameter=city>\nSão </parameter> <b>\n</parameter>\n";
        let one = GrammarSpec::ToolCalls { tools: tools(), parallel: false };
        let many = GrammarSpec::ToolCalls { tools: tools(), parallel: true };
        for (spec, text, expected) in [
            (&one, call("now>\n"), true),
            (&one, call(&format!("get_weather>\n{city}")), true),
            (
                &one,
                call(&format!(
                    "get_weather>\n{city}<parameter=unit>\nC\n</parameter>\n<parameter=days>\n12\n</parameter>\n"
                )),
                true,
            ),
            (&one, call(&format!("get_weather>\n{city}<parameter=where>\n{{\"x\": 1.5}}\n</parameter>\n")), true),
            (&one, call(&format!("get_weather>\n{city}<parameter=unit>\nK\n</parameter>\n")), false),
            (&one, call(&format!("get_weather>\n{city}<parameter=days>\n1.5\n</parameter>\n")), false),
            (&one, call("get_weather>\n"), false),
            (&one, call("other>\n"), false),
            (&one, format!("{}\n{}", call("now>\n"), call("now>\n")), false),
            (&many, format!("{}\n{}", call("now>\n"), call("now>\n")), true),
            (&one, "Hello".into(), false),
        ] {
            assert_eq!(accepts(spec, &text), expected, "{text}");
        }
    }

    #[test]
    fn after_reasoning_the_grammar_waits_for_the_end_of_thought() {
        let spec = GrammarSpec::Choice(vec!["yes".into(), "no".into()]);
        let mut g = Grammar::new(&GRAMMAR, &spec, true).unwrap();
        let text = "Well, is it {\"?\n\nHm.\n</think>\n\nno";
        assert_eq!(follow(&mut g, text), (text.into(), true));
        let mut g = Grammar::new(&GRAMMAR, &spec, true).unwrap();
        assert_eq!(follow(&mut g, "a</think>maybe"), ("a</think>".into(), false));
        let mut g = Grammar::new(&GRAMMAR, &spec, true).unwrap();
        assert!(!follow(&mut g, "only thoughts").1);
    }
}
