//! Values printed as Python prints them: chat templates are written for Jinja2, where `{{ true }}` gives `True` and
//! `tojson` is `json.dumps(x, ensure_ascii=False)`. The model was trained on that text, so it is matched byte for byte.

use std::fmt::Write as _;

use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Deepest nesting printed; a template can build deeper values than the stack would take.
const MAX_DEPTH: usize = 128;

/// `str(value)`; undefined gives nothing, as Jinja2's default undefined does.
pub(super) fn to_str(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::String => Ok(value.as_str().unwrap_or_default().to_owned()),
        _ => {
            let mut out = String::new();
            repr(&mut out, value, 0)?;
            Ok(out)
        }
    }
}

fn too_deep() -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("a value is nested more than {MAX_DEPTH} levels deep"))
}

fn is_float(value: &Value) -> bool {
    value.kind() == ValueKind::Number && !value.is_integer()
}

fn repr(out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if is_float(value) => out.push_str(&float(value)),
        ValueKind::String => repr_string(out, value.as_str().unwrap_or_default()),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (i, item) in value.try_iter()?.enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                repr(out, &item, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.enumerate() {
                out.push_str(if i == 0 { "" } else { ", " });
                repr(out, &key, depth + 1)?;
                out.push_str(": ");
                repr(out, &value.get_item(&key)?, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

fn repr_string(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => {
                out.push('\\');
                out.push(c);
            }
            c if (c as u32) < 0x20 || (0x7f..0xa1).contains(&(c as u32)) || c == '\u{ad}' => {
                // Writing to a String does not fail.
                let _ = write!(out, "\\x{:02x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// `repr(float)`: the shortest digits that read back the same, an exponent below 1e-4 and from 1e16 on.
fn float(value: &Value) -> String {
    let Ok(x) = f64::try_from(value.clone()) else { return value.to_string() };
    if x.is_nan() {
        return "nan".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let fixed = format!("{x}");
        if fixed.contains('.') { fixed } else { fixed + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{mantissa}e{sign}{:02}", exponent.abs())
    }
}

/// What `json.dumps` can be told in a template.
pub(super) struct JsonStyle {
    /// Blanks per level; `None` is all on one line.
    pub indent: Option<usize>,
    pub item_separator: String,
    pub key_separator: String,
    pub ensure_ascii: bool,
    pub sort_keys: bool,
}

/// `json.dumps(value)`.
pub(super) fn to_json(value: &Value, style: &JsonStyle) -> Result<String, Error> {
    let mut out = String::new();
    json(&mut out, value, style, 0)?;
    Ok(out)
}

fn json(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH {
        return Err(too_deep());
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number if is_float(value) => out.push_str(match float(value).as_str() {
            "nan" => "NaN",
            "inf" => "Infinity",
            "-inf" => "-Infinity",
            finite => finite,
        }),
        ValueKind::Number => out.push_str(&value.to_string()),
        ValueKind::String => json_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            let mut any = false;
            for item in value.try_iter()? {
                json_item(out, style, depth, any);
                any = true;
                json(out, &item, style, depth + 1)?;
            }
            json_close(out, style, depth, any, ']');
        }
        ValueKind::Map => {
            out.push('{');
            let mut entries = Vec::new();
            for key in value.try_iter()? {
                let text = match key.kind() {
                    ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
                    _ => to_json(&key, style)?,
                };
                entries.push((text, value.get_item(&key)?));
            }
            if style.sort_keys {
                entries.sort_by(|a, b| a.0.cmp(&b.0));
            }
            for (i, (key, item)) in entries.iter().enumerate() {
                json_item(out, style, depth, i > 0);
                json_string(out, key, style.ensure_ascii);
                out.push_str(&style.key_separator);
                json(out, item, style, depth + 1)?;
            }
            json_close(out, style, depth, !entries.is_empty(), '}');
        }
        kind => {
            return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson cannot write a value of type {kind}")));
        }
    }
    Ok(())
}

fn json_item(out: &mut String, style: &JsonStyle, depth: usize, follows: bool) {
    if follows {
        out.push_str(&style.item_separator);
    }
    json_newline(out, style, depth + 1);
}

fn json_close(out: &mut String, style: &JsonStyle, depth: usize, any: bool, bracket: char) {
    if any {
        json_newline(out, style, depth);
    }
    out.push(bracket);
}

fn json_newline(out: &mut String, style: &JsonStyle, depth: usize) {
    if let Some(indent) = style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(' ', indent * depth));
    }
}

fn json_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    // Writing to a String does not fail.
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}
