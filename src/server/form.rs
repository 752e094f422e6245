//! Request bodies: one table per route says which fields it takes, of which type and range.
//!
//! The same table checks a body (so a bad field is refused by name, before anything else happens) and describes the
//! route in `/openapi.json` (so the description cannot drift from what is accepted). Fields not in the table are
//! ignored; `null` is the same as absent.

use super::error::{ApiError, kind_of};
use serde_json::{Map, Value, json};

/// The type and range of a field.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// `true` or `false`
    Flag,
    /// A whole number in `min..=max`.
    Integer(i64, i64),
    /// A number in `min..=max`.
    Number(f64, f64),
    /// Any string.
    Text,
    /// One of these strings.
    Choice(&'static [&'static str]),
    /// A string, or an array of at most so many strings.
    TextOrTexts(usize),
    /// An object whose contents the route checks itself.
    Object,
    /// An array whose contents the route checks itself; at most so many entries.
    List(usize),
    /// The same, with the entries described by a schema of `/openapi.json`.
    ListOf(usize, &'static str),
    /// Several types are possible; the route checks them itself.
    Any,
}

/// One field of a request body.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Its key.
    pub name: &'static str,
    /// Its type and range.
    pub kind: Kind,
    /// What it does, for the API description.
    pub about: &'static str,
}

/// Shorthand for the tables.
pub const fn field(name: &'static str, kind: Kind, about: &'static str) -> Field {
    Field { name, kind, about }
}

/// The fields of one route's request body.
#[derive(Clone, Copy, Debug)]
pub struct Form {
    /// Name of the schema in the API description.
    pub name: &'static str,
    /// Fields, in groups so that routes can share them.
    pub groups: &'static [&'static [Field]],
    /// Fields that must be there.
    pub required: &'static [&'static str],
}

impl Form {
    /// All fields of the form.
    pub fn fields(&self) -> impl Iterator<Item = &'static Field> {
        self.groups.iter().flat_map(|group| group.iter())
    }

    /// Parses and checks a body. Errors name the field.
    pub fn read(&self, body: &[u8]) -> Result<Fields, ApiError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|e| ApiError::bad_request(format!("the body is not valid JSON: {e}")).with_code("invalid_json"))?;
        let Value::Object(map) = value else {
            return Err(ApiError::bad_request(format!("the body must be a JSON object, found {}", kind_of(&value))));
        };
        let fields = Fields { map };
        for f in self.fields() {
            if let Some(value) = fields.value(f.name) {
                check(f.name, f.kind, value)?;
            }
        }
        match self.required.iter().find(|name| fields.value(name).is_none()) {
            Some(name) => Err(ApiError::field(*name, "this field is required")),
            None => Ok(fields),
        }
    }

    /// The JSON schema of the body.
    pub fn schema(&self) -> Value {
        let properties: Map<String, Value> = self
            .fields()
            .map(|f| {
                let mut schema = f.kind.schema();
                schema["description"] = json!(f.about);
                (f.name.to_owned(), schema)
            })
            .collect();
        json!({"type": "object", "properties": properties, "required": self.required})
    }
}

/// Every JSON type.
pub const ANY: [&str; 7] = ["string", "number", "integer", "boolean", "array", "object", "null"];

impl Kind {
    fn schema(self) -> Value {
        match self {
            Kind::Flag => json!({"type": ["boolean", "null"]}),
            Kind::Integer(min, max) => json!({"type": ["integer", "null"], "minimum": min, "maximum": max}),
            Kind::Number(min, max) => json!({"type": ["number", "null"], "minimum": min, "maximum": max}),
            Kind::Text => json!({"type": ["string", "null"]}),
            Kind::Choice(names) => {
                let names: Vec<Value> = names.iter().map(|n| json!(n)).chain([Value::Null]).collect();
                json!({"type": ["string", "null"], "enum": names})
            }
            Kind::TextOrTexts(max) => json!({"anyOf": [
                {"type": ["string", "null"]},
                {"type": "array", "items": {"type": "string"}, "maxItems": max},
            ]}),
            Kind::Object => json!({"type": ["object", "null"]}),
            Kind::List(max) => json!({"type": ["array", "null"], "maxItems": max}),
            Kind::ListOf(max, name) => json!({"type": ["array", "null"], "maxItems": max,
                "items": {"$ref": format!("#/components/schemas/{name}")}}),
            Kind::Any => json!({"type": ANY}),
        }
    }
}

/// Checks one value against a kind. `path` names it in the error.
pub fn check(path: &str, kind: Kind, value: &Value) -> Result<(), ApiError> {
    let refuse =
        |expected: String| Err(ApiError::field(path, format!("expected {expected}, found {}", kind_of(value))));
    match kind {
        Kind::Flag if !value.is_boolean() => refuse("true or false".into()),
        Kind::Integer(min, max) => match value.as_i64() {
            Some(n) if (min..=max).contains(&n) => Ok(()),
            _ => refuse(format!("a whole number from {min} to {max}")),
        },
        Kind::Number(min, max) => match value.as_f64() {
            Some(x) if x >= min && x <= max => Ok(()),
            _ => refuse(format!("a number from {min} to {max}")),
        },
        Kind::Text if !value.is_string() => refuse("a string".into()),
        Kind::Choice(names) => match value.as_str() {
            Some(s) if names.contains(&s) => Ok(()),
            _ => refuse(format!("one of {}", names.iter().map(|n| format!("{n:?}")).collect::<Vec<_>>().join(", "))),
        },
        Kind::TextOrTexts(max) => match value {
            Value::String(_) => Ok(()),
            Value::Array(entries) if entries.len() > max => {
                refuse(format!("at most {max} strings ({} given)", entries.len()))
            }
            Value::Array(entries) => match entries.iter().position(|e| !e.is_string()) {
                Some(i) => check(&format!("{path}[{i}]"), Kind::Text, &entries[i]),
                None => Ok(()),
            },
            _ => refuse("a string or an array of strings".into()),
        },
        Kind::Object if !value.is_object() => refuse("an object".into()),
        Kind::List(max) | Kind::ListOf(max, _) => match value.as_array() {
            Some(entries) if entries.len() <= max => Ok(()),
            Some(entries) => refuse(format!("at most {max} entries ({} given)", entries.len())),
            None => refuse("an array".into()),
        },
        _ => Ok(()),
    }
}

/// A checked request body.
#[derive(Clone, Debug, Default)]
pub struct Fields {
    map: Map<String, Value>,
}

impl Fields {
    /// The value of a field; `None` when absent or null.
    pub fn value(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// A [`Kind::Flag`] field.
    pub fn flag(&self, name: &str) -> Option<bool> {
        self.value(name)?.as_bool()
    }

    /// A [`Kind::Integer`] field.
    pub fn integer(&self, name: &str) -> Option<i64> {
        self.value(name)?.as_i64()
    }

    /// A [`Kind::Number`] field.
    pub fn number(&self, name: &str) -> Option<f32> {
        self.value(name)?.as_f64().map(|x| x as f32)
    }

    /// A [`Kind::Text`] or [`Kind::Choice`] field.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.value(name)?.as_str()
    }

    /// A [`Kind::TextOrTexts`] field; empty when absent.
    pub fn texts(&self, name: &str) -> Vec<String> {
        match self.value(name) {
            Some(Value::String(s)) => vec![s.clone()],
            Some(Value::Array(entries)) => entries.iter().filter_map(|e| e.as_str().map(str::to_owned)).collect(),
            _ => Vec::new(),
        }
    }

    /// A [`Kind::Object`] field.
    pub fn object(&self, name: &str) -> Option<&Map<String, Value>> {
        self.value(name)?.as_object()
    }

    /// A [`Kind::List`] field.
    pub fn list(&self, name: &str) -> Option<&Vec<Value>> {
        self.value(name)?.as_array()
    }
}

/// Typed access to a nested object, with errors that carry its path.
#[derive(Clone, Debug)]
pub struct Nested<'a> {
    /// Where the object is in the body, e.g. `messages[0].content[1]`.
    pub path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Nested<'a> {
    /// The object at `path`, or a 400 when the value is something else.
    pub fn new(path: impl Into<String>, value: &'a Value) -> Result<Nested<'a>, ApiError> {
        let path = path.into();
        check(&path, Kind::Object, value)?;
        match value {
            Value::Object(map) => Ok(Nested { path, map }),
            _ => Err(ApiError::field(path, "expected an object")),
        }
    }

    /// The path of a key of this object.
    pub fn at(&self, name: &str) -> String {
        format!("{}.{name}", self.path)
    }

    /// The value of a key; `None` when absent or null.
    pub fn value(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// A string, if there.
    pub fn text(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        self.checked(name, Kind::Text).map(|v| v.and_then(Value::as_str))
    }

    /// A string that must be there.
    pub fn need_text(&self, name: &str) -> Result<&'a str, ApiError> {
        self.text(name)?.ok_or_else(|| ApiError::field(self.at(name), "this field is required"))
    }

    /// A value that must be there.
    pub fn need(&self, name: &str) -> Result<&'a Value, ApiError> {
        self.value(name).ok_or_else(|| ApiError::field(self.at(name), "this field is required"))
    }

    /// A nested object, if there.
    pub fn object(&self, name: &str) -> Result<Option<Nested<'a>>, ApiError> {
        self.value(name).map(|v| Nested::new(self.at(name), v)).transpose()
    }

    /// An array, if there.
    pub fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>, ApiError> {
        self.checked(name, Kind::List(usize::MAX)).map(|v| v.and_then(Value::as_array))
    }

    /// A value of a kind, if there.
    pub fn checked(&self, name: &str, kind: Kind) -> Result<Option<&'a Value>, ApiError> {
        match self.value(name) {
            Some(value) => check(&self.at(name), kind, value).map(|()| Some(value)),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORM: Form = Form {
        name: "Test",
        groups: &[&[
            field("temperature", Kind::Number(0.0, 2.0), ""),
            field("n", Kind::Integer(1, 8), ""),
            field("stop", Kind::TextOrTexts(2), ""),
            field("model", Kind::Text, ""),
        ]],
        required: &["model"],
    };

    fn param(body: &str) -> String {
        FORM.read(body.as_bytes()).unwrap_err().param.unwrap_or_default()
    }

    #[test]
    fn a_wrong_type_or_range_is_refused_by_name() {
        assert_eq!(param(r#"{"model":"m","temperature":"hot"}"#), "temperature");
        assert_eq!(param(r#"{"model":"m","temperature":2.5}"#), "temperature");
        assert_eq!(param(r#"{"model":"m","n":1.5}"#), "n");
        assert_eq!(param(r#"{"model":"m","n":0}"#), "n");
        assert_eq!(param(r#"{"model":"m","stop":["a",3]}"#), "stop[1]");
        assert_eq!(param(r#"{"model":"m","stop":["a","b","c"]}"#), "stop");
        assert_eq!(param(r#"{"model":null}"#), "model");
    }

    #[test]
    fn null_is_absent_and_unknown_fields_are_ignored() {
        let fields = FORM.read(br#"{"model":"m","n":null,"whatever":[1]}"#).unwrap();
        assert_eq!(fields.integer("n"), None);
        assert_eq!(fields.text("model"), Some("m"));
        assert!(fields.texts("stop").is_empty());
    }

    #[test]
    fn bodies_that_are_not_objects_are_refused() {
        for body in ["", "{", "[]", "3", "\"x\"", "{\"model\":\"\\ud800\"}", "{\"n\":1e999}"] {
            assert_eq!(FORM.read(body.as_bytes()).unwrap_err().status, 400, "{body}");
        }
        let deep = "[".repeat(100_000);
        assert_eq!(FORM.read(deep.as_bytes()).unwrap_err().status, 400);
    }
}
