//! The chat template of a model file: Jinja2 as Hugging Face runs it, rendered by `minijinja` within bounds that a
//! hostile template cannot leave.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};
use serde_json::{Map, Value as Json};

use super::python;
use crate::gguf::Metadata;
use crate::text::TextError;

/// Longest template read, in bytes. Real ones have 3 to 30 kB.
const MAX_SOURCE: usize = 128 << 10;
/// Stack for compiling: the compiler calls itself for every operator of a chain, so a template of nothing but minus signs takes a
/// few hundred bytes for each of its own. Only what is used of it is ever real memory.
const COMPILER_STACK: usize = 512 << 20;
/// Longest prompt a template may write, in bytes: beyond any context.
const MAX_RENDERED: usize = 64 << 20;
/// Steps a template may take apart from those its input accounts for: about a second.
const BASE_FUEL: u64 = 20_000_000;
/// Further steps per byte of the conversation.
const FUEL_PER_BYTE: u64 = 4;
/// How deep macros and loops may nest.
const MAX_RECURSION: usize = 64;

/// What a template is given.
#[derive(Debug, Clone, Default)]
pub struct TemplateInput {
    /// The conversation: a list of messages in OpenAI's form.
    pub messages: Json,
    /// The tools on offer: a list of `{"type": "function", "function": {...}}`.
    pub tools: Option<Json>,
    /// Whether the prompt ends with the start of the assistant's turn.
    pub add_generation_prompt: bool,
    /// `Some(false)` asks for an answer without reasoning; `None` leaves it to the template.
    pub enable_thinking: Option<bool>,
    /// Further variables (`chat_template_kwargs`).
    pub extra: Map<String, Json>,
}

/// A parsed chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos: String,
    eos: String,
}

const NAME: &str = "chat";

impl ChatTemplate {
    /// The template of a GGUF file (`tokenizer.chat_template`), `None` where the file has none.
    ///
    /// # Errors
    /// A key of another type, or a template that does not parse.
    pub fn from_gguf(metadata: &Metadata) -> Result<Option<Self>, TextError> {
        let Some(source) = metadata.str_opt("tokenizer.chat_template")? else { return Ok(None) };
        let tokens = metadata.strings_opt("tokenizer.ggml.tokens")?.unwrap_or_default();
        let piece = |key: &str| -> Result<String, TextError> {
            let id = metadata.u32_opt(key)?;
            Ok(id.and_then(|id| tokens.get(id as usize)).cloned().unwrap_or_default())
        };
        let (bos, eos) = (piece("tokenizer.ggml.bos_token_id")?, piece("tokenizer.ggml.eos_token_id")?);
        Self::new(source, &bos, &eos).map(Some)
    }

    /// The template `source`, which sees `bos` and `eos` as `bos_token` and `eos_token`.
    ///
    /// # Errors
    /// [`TextError::TemplateSyntax`] with the line.
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TextError> {
        if source.len() > MAX_SOURCE {
            return Err(TextError::TemplateSyntax(format!(
                "{} bytes long, at most {MAX_SOURCE} are read",
                source.len()
            )));
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(|error| TextError::TemplateSyntax(error_text(&error)))?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_undefined_behavior(UndefinedBehavior::Lenient);
        environment.set_recursion_limit(MAX_RECURSION);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.set_formatter(|out, _, value| Ok(out.write_str(&python::to_str(value)?)?));
        environment.add_filter("tojson", tojson);
        environment.add_filter("string", |value: &Value| python::to_str(value));
        environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
        });
        environment.add_function("strftime_now", |format: String| strftime(&format, now()));
        let environment = compiled(environment, without_generation_tags(source))
            .map_err(|error| TextError::TemplateSyntax(error_text(&error)))?;
        Ok(Self { environment, source: source.to_owned(), bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt of `input`, byte for byte what Hugging Face's `apply_chat_template` gives.
    ///
    /// # Errors
    /// [`TextError::Template`] with the template's own message (`raise_exception`) or what went wrong where; also for a
    /// template that runs, nests or writes without end.
    pub fn render(&self, input: &TemplateInput) -> Result<String, TextError> {
        let template_error = |error: Error| TextError::Template(error_text(&error));
        let mut variables = Map::new();
        variables.insert("bos_token".into(), Json::String(self.bos.clone()));
        variables.insert("eos_token".into(), Json::String(self.eos.clone()));
        variables.insert("tools".into(), input.tools.clone().unwrap_or(Json::Null));
        variables.insert("add_generation_prompt".into(), Json::Bool(input.add_generation_prompt));
        variables.extend(input.extra.iter().map(|(name, value)| (name.clone(), value.clone())));
        if let Some(enable) = input.enable_thinking {
            variables.insert("enable_thinking".into(), Json::Bool(enable));
        }
        variables.insert("messages".into(), input.messages.clone());
        let size: usize = variables.values().map(json_size).sum();

        let mut environment = self.environment.clone();
        environment.set_fuel(Some(BASE_FUEL + size as u64 * FUEL_PER_BYTE));
        let template = environment.get_template(NAME).map_err(template_error)?;
        let mut out = Bounded { bytes: Vec::new() };
        template.render_captured_to(object(&variables), &mut out).map_err(template_error)?;
        String::from_utf8(out.bytes).map_err(|error| TextError::Template(error.to_string()))
    }
}

/// Marks the messages of `raise_exception`, which are shown without minijinja's own words.
const RAISED: char = '\u{1}';

/// The environment with the template in it, compiled on a stack that no template of [`MAX_SOURCE`] bytes can use up.
fn compiled(mut environment: Environment<'static>, source: String) -> Result<Environment<'static>, Error> {
    let failed = |what: &str| Error::new(ErrorKind::InvalidOperation, what.to_owned());
    let compiler = std::thread::Builder::new().name("strata-template".into()).stack_size(COMPILER_STACK);
    let compile = move || environment.add_template_owned(NAME, source).map(|()| environment);
    let thread = compiler.spawn(compile).map_err(|error| failed(&format!("no thread to compile it: {error}")))?;
    thread.join().unwrap_or_else(|_| Err(failed("the compiler failed")))
}

fn error_text(error: &Error) -> String {
    let detail = error.detail().unwrap_or_default();
    if let Some(raised) = detail.strip_prefix(RAISED) {
        return raised.to_owned();
    }
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

/// JSON as a template sees it. Not by way of serde: with serde_json's `arbitrary_precision`, which any crate of a build
/// can turn on, a number would arrive as a map.
fn value(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(is) => Value::from(*is),
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => items.iter().map(value).collect(),
        Json::Object(map) => object(map),
        Json::Number(number) => match (number.as_i64(), number.as_u64(), number.to_string().parse::<i128>()) {
            (Some(n), ..) => Value::from(n),
            (_, Some(n), _) => Value::from(n),
            (_, _, Ok(n)) => Value::from(n),
            _ => Value::from(number.as_f64().unwrap_or(f64::NAN)),
        },
    }
}

fn object(map: &Map<String, Json>) -> Value {
    Value::from_pairs(map.iter().map(|(key, item)| (key.as_str(), value(item))))
}

/// Bytes of text in a value, to see how long its rendering may take.
fn json_size(value: &Json) -> usize {
    match value {
        Json::String(text) => text.len() + 8,
        Json::Array(items) => 8 + items.iter().map(json_size).sum::<usize>(),
        Json::Object(map) => 8 + map.iter().map(|(key, value)| key.len() + json_size(value)).sum::<usize>(),
        _ => 8,
    }
}

struct Bounded {
    bytes: Vec<u8>,
}

impl Write for Bounded {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + buf.len() > MAX_RENDERED {
            return Err(std::io::Error::other(format!("the prompt is longer than {MAX_RENDERED} bytes")));
        }
        self.bytes.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// `{% generation %}` blocks mark the assistant's text for training and change nothing in the output; minijinja does
/// not know them, so they become blocks that are always taken.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let Some(end) = rest[at..].find("%}").map(|end| at + end + 2) else { break };
        out.push_str(&rest[..at]);
        let tag = &rest[at..end];
        let inner = tag[2..tag.len() - 2].trim_matches(['-', '+']).trim();
        match inner {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

fn tojson(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = match indent.filter(|value| !value.is_none() && !value.is_undefined()) {
        None => None,
        Some(indent) => Some(
            usize::try_from(indent)
                .ok()
                .filter(|&indent| indent <= 64)
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "tojson: indent must be from 0 to 64"))?,
        ),
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings")),
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
    };
    let style = python::JsonStyle {
        indent,
        item_separator,
        key_separator,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    python::to_json(value, &style)
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// `strftime` of a time in UTC, with the directives that dates in prompts use.
fn strftime(format: &str, seconds: u64) -> Result<String, Error> {
    const DAYS: [&str; 7] = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"];
    const MONTHS: [&str; 12] = [
        "January",
        "February",
        "March",
        "April",
        "May",
        "June",
        "July",
        "August",
        "September",
        "October",
        "November",
        "December",
    ];
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    let weekday = DAYS[((days + 3) % 7) as usize];
    let (mut year, mut day_of_year) = (1970, days);
    let is_leap = |year: u64| (year.is_multiple_of(4) && !year.is_multiple_of(100)) || year.is_multiple_of(400);
    while day_of_year >= 365 + u64::from(is_leap(year)) {
        day_of_year -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let (mut month, mut day) = (0, day_of_year);
    while day >= lengths[month] {
        day -= lengths[month];
        month += 1;
    }
    let (name, day) = (MONTHS[month], day + 1);
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut directive = chars.next();
        // `%-d`: without the leading zero.
        let plain = directive == Some('-');
        if plain {
            directive = chars.next();
        }
        let two = |n: u64| if plain { n.to_string() } else { format!("{n:02}") };
        out.push_str(&match directive {
            Some('Y') => year.to_string(),
            Some('y') => two(year % 100),
            Some('m') => two(month as u64 + 1),
            Some('d') => two(day),
            Some('e') => format!("{day:2}"),
            Some('j') => format!("{:03}", day_of_year + 1),
            Some('H') => two(hour),
            Some('I') => two(hour12),
            Some('M') => two(minute),
            Some('S') => two(second),
            Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
            Some('B') => name.to_owned(),
            Some('b' | 'h') => name[..3].to_owned(),
            Some('A') => weekday.to_owned(),
            Some('a') => weekday[..3].to_owned(),
            Some('F') => format!("{year}-{:02}-{day:02}", month + 1),
            Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
            Some('Z') => "UTC".to_owned(),
            Some('z') => "+0000".to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let name = other.map_or_else(|| "end of text".to_owned(), |c| format!("%{c}"));
                return Err(Error::new(ErrorKind::InvalidOperation, format!("strftime_now: unknown directive {name}")));
            }
        });
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn render(source: &str, messages: Json) -> Result<String, TextError> {
        ChatTemplate::new(source, "<b>", "<e>")?.render(&TemplateInput { messages, ..Default::default() })
    }

    #[test]
    fn values_print_as_python_prints_them() {
        let messages =
            json!([true, null, 1, 1.0, 1e16, 1.5e-7, 123456789.25, "a'b", ["x", {"k": false}], {"b": 1, "a": [2.5]}]);
        assert_eq!(
            render("{% for m in messages %}{{ m }}|{% endfor %}", messages.clone()).unwrap(),
            "True|None|1|1.0|1e+16|1.5e-07|123456789.25|a'b|['x', {'k': False}]|{'b': 1, 'a': [2.5]}|"
        );
        assert_eq!(
            render("{{ messages|tojson }}", messages).unwrap(),
            r#"[true, null, 1, 1.0, 1e+16, 1.5e-07, 123456789.25, "a'b", ["x", {"k": false}], {"b": 1, "a": [2.5]}]"#
        );
        assert_eq!(
            render("{{ messages|tojson(indent=2) }}", json!({"z": [1, {}], "a": "<é\u{1}\n\">", "e": []})).unwrap(),
            "{\n  \"z\": [\n    1,\n    {}\n  ],\n  \"a\": \"<é\\u0001\\n\\\">\",\n  \"e\": []\n}"
        );
        assert_eq!(
            render("{{ messages|tojson(ensure_ascii=true, sort_keys=true) }}", json!({"b": "é🙂", "a": 0})).unwrap(),
            r#"{"a": 0, "b": "\u00e9\ud83d\ude42"}"#
        );
    }

    #[test]
    fn raised_messages_come_through_alone() {
        match render("{{ raise_exception('no ' ~ messages) }}", json!("way")) {
            Err(TextError::Template(message)) => assert_eq!(message, "no way"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn generation_tags_change_nothing() {
        let text = render("a{%- generation -%} {{ messages }} {%- endgeneration %}\nb", json!("x"));
        assert_eq!(text.unwrap(), "axb");
    }

    /// Each would run, nest or write without end; each must give an error soon.
    #[test]
    fn hostile_templates_end() {
        for source in [
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "{{ 'x' * 99999999999 }}",
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
            "{% set ns = namespace(v=[]) %}{% for i in range(5000) %}{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v|tojson }}",
            "{% set ns = namespace(v=[]) %}{% for i in range(5000) %}{% set ns.v = [ns.v] %}{% endfor %}{{ ns.v }}",
            &"(".repeat(100_000),
        ] {
            let result = render(source, json!([]));
            assert!(result.is_err() || source.starts_with('('), "{source:.60}: {result:?}");
        }
    }

    /// They may be refused or rendered: what counts is that compiling them does not use up the stack.
    #[test]
    fn long_chains_of_operators_end() {
        for source in [
            &format!("{{{{ {}1 }}}}", "-".repeat(100_000)),
            &format!("{{{{ 'a'{} }}}}", "|trim".repeat(20_000)),
            &format!("{{{{ 1{} }}}}", "+1".repeat(50_000)),
            &format!("{{{{ x{} }}}}", ".a".repeat(60_000)),
            &format!("{{{{ {}1 }}}}", "not ".repeat(30_000)),
            &format!("{{{{ {} }}}}", "(".repeat(100_000)),
        ] {
            let _ = render(source, json!([]));
        }
    }

    /// Rendered by transformers' own Jinja2 environment: `scripts/make_chat_goldens.py`.
    #[test]
    fn renders_as_transformers_does() {
        for row in crate::text::fixtures::golden_json("text/chat.json").as_array().unwrap() {
            let source = std::fs::read_to_string(crate::text::fixtures::golden(row["template"].as_str().unwrap()));
            let template = ChatTemplate::new(&source.unwrap(), "<|endoftext|>", "<|im_end|>").unwrap();
            let mut extra = row["input"].as_object().unwrap().clone();
            let input = TemplateInput {
                messages: extra.remove("messages").unwrap(),
                tools: extra.remove("tools"),
                add_generation_prompt: extra.remove("add_generation_prompt").is_none_or(|add| add == true),
                enable_thinking: extra.remove("enable_thinking").and_then(|enable| enable.as_bool()),
                extra,
            };
            match (template.render(&input), row.get("text")) {
                (Ok(text), Some(expected)) => assert_eq!(text, expected.as_str().unwrap(), "{}", row["input"]),
                (Err(TextError::Template(message)), None) => assert_eq!(message, row["error"].as_str().unwrap()),
                (result, _) => panic!("{}: {result:?}", row["input"]),
            }
        }
    }

    #[test]
    fn dates_are_written_as_strftime_writes_them() {
        let leap_day = 1_709_214_302;
        assert_eq!(
            strftime("%Y-%m-%d %H:%M:%S %A %d %B %-d %b %j %I %p %y %%", leap_day).unwrap(),
            "2024-02-29 13:45:02 Thursday 29 February 29 Feb 060 01 PM 24 %"
        );
        assert!(strftime("%Q", 0).is_err());
    }
}
