//! Checks that a tool's parameters are a JSON schema of an object, so that a mistake in it is refused by name and not
//! when the model's call is read.

use super::error::{ApiError, kind_of};
use super::form::Nested;
use serde_json::Value;

/// Types a schema can name.
const TYPES: &[&str] = &["string", "number", "integer", "boolean", "array", "object", "null"];
/// Deepest nesting of a schema.
const MAX_DEPTH: usize = 64;

/// Checks the schema of a tool's parameters, found at `path`.
///
/// # Errors
/// 400 naming the place within the schema.
pub fn check_parameters(path: &str, schema: &Value) -> Result<(), ApiError> {
    let types = schema.get("type");
    if types.is_some_and(|t| !t.is_null() && t != "object") {
        return Err(ApiError::field(format!("{path}.type"), "the parameters of a function are an object"));
    }
    check_schema(path, schema, 0)
}

fn check_schema(path: &str, schema: &Value, depth: usize) -> Result<(), ApiError> {
    if depth > MAX_DEPTH {
        return Err(ApiError::field(path, format!("nested more than {MAX_DEPTH} deep")));
    }
    if schema.is_boolean() {
        return Ok(());
    }
    let Value::Object(_) = schema else {
        let problem = format!("expected a JSON schema (an object, true or false), found {}", kind_of(schema));
        return Err(ApiError::field(path, problem));
    };
    let schema = Nested::new(path, schema)?;
    check_type(&schema)?;
    for name in ["properties", "$defs", "definitions"] {
        let Some(value) = schema.value(name) else { continue };
        let Value::Object(entries) = value else {
            return Err(ApiError::field(schema.at(name), format!("expected an object, found {}", kind_of(value))));
        };
        for (key, entry) in entries {
            check_schema(&format!("{}.{key}", schema.at(name)), entry, depth + 1)?;
        }
    }
    for name in ["items", "additionalProperties", "not"] {
        match schema.value(name) {
            None | Some(Value::Array(_)) => {}
            Some(value) => check_schema(&schema.at(name), value, depth + 1)?,
        }
    }
    for name in ["anyOf", "oneOf", "allOf"] {
        for (i, entry) in schema.list(name)?.into_iter().flatten().enumerate() {
            check_schema(&format!("{}[{i}]", schema.at(name)), entry, depth + 1)?;
        }
    }
    schema.list("enum")?;
    for (i, name) in schema.list("required")?.into_iter().flatten().enumerate() {
        if !name.is_string() {
            let problem = format!("expected the name of a property, found {}", kind_of(name));
            return Err(ApiError::field(format!("{}[{i}]", schema.at("required")), problem));
        }
    }
    schema.text("$ref")?;
    Ok(())
}

fn check_type(schema: &Nested) -> Result<(), ApiError> {
    let Some(value) = schema.value("type") else { return Ok(()) };
    let is_type = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
    let fits = match value {
        Value::Array(names) => !names.is_empty() && names.iter().all(is_type),
        name => is_type(name),
    };
    match fits {
        true => Ok(()),
        false => Err(ApiError::field(
            schema.at("type"),
            format!("expected one of {} or an array of them, found {}", TYPES.join(", "), kind_of(value)),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_mistake_in_a_schema_is_named_by_its_place() {
        for (schema, path) in [
            (json!({"type": "array"}), "p.type"),
            (json!({"properties": []}), "p.properties"),
            (json!({"properties": {"a": 5}}), "p.properties.a"),
            (json!({"properties": {"a": {"type": "text"}}}), "p.properties.a.type"),
            (json!({"properties": {"a": {"type": ["string", 5]}}}), "p.properties.a.type"),
            (json!({"properties": {"a": {"items": {"type": []}}}}), "p.properties.a.items.type"),
            (json!({"properties": {"a": {"anyOf": [{}, 3]}}}), "p.properties.a.anyOf[1]"),
            (json!({"properties": {"a": {"enum": "x"}}}), "p.properties.a.enum"),
            (json!({"required": "a"}), "p.required"),
            (json!({"required": [1]}), "p.required[0]"),
        ] {
            assert_eq!(check_parameters("p", &schema).unwrap_err().param.unwrap(), path, "{schema}");
        }
        let mut deep = json!({});
        for _ in 0..200 {
            deep = json!({"properties": {"a": deep}});
        }
        assert!(check_parameters("p", &deep).is_err());
    }

    #[test]
    fn schemas_in_use_pass() {
        for schema in [
            json!({}),
            json!({"type": "object", "properties": {}}),
            json!({"type": "object", "properties": {"a": {"type": ["string", "null"], "enum": ["x", null]}, "b": true,
                "c": {"type": "array", "items": {"$ref": "#/$defs/d"}}}, "required": ["a"],
                "additionalProperties": false, "$defs": {"d": {"oneOf": [{"type": "integer"}, {"const": 1.5}]}}}),
        ] {
            check_parameters("p", &schema).unwrap();
        }
    }
}
