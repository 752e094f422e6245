//! What a tool's schema says about its parameters: enough to turn the text of a tool call into JSON of the right type.

use std::collections::HashMap;

use serde_json::Value as Json;

/// The JSON types a parameter may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ParameterTypes {
    /// Text is taken as it stands.
    pub string: bool,
    /// Integers and numbers.
    pub number: bool,
    /// `true` and `false`.
    pub boolean: bool,
    /// `null`.
    pub null: bool,
    /// Lists.
    pub array: bool,
    /// Objects.
    pub object: bool,
}

impl ParameterTypes {
    const STRING: Self = Self { string: true, number: false, boolean: false, null: false, array: false, object: false };
    const ANY: Self = Self { string: true, number: true, boolean: true, null: true, array: true, object: true };

    /// Only a string will do.
    pub fn is_string_only(self) -> bool {
        self == Self::STRING
    }

    fn add(&mut self, name: &str) {
        match name {
            "string" => self.string = true,
            "integer" | "number" => self.number = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "array" => self.array = true,
            "object" => self.object = true,
            _ => *self = Self::ANY,
        }
    }

    fn add_value(&mut self, value: &Json) {
        self.add(match value {
            Json::String(_) => "string",
            Json::Number(_) => "number",
            Json::Bool(_) => "boolean",
            Json::Null => "null",
            Json::Array(_) => "array",
            Json::Object(_) => "object",
        });
    }

    fn allows(self, value: &Json) -> bool {
        match value {
            Json::String(_) => self.string,
            Json::Number(_) => self.number,
            Json::Bool(_) => self.boolean,
            Json::Null => self.null,
            Json::Array(_) => self.array,
            Json::Object(_) => self.object,
        }
    }

    /// The types `schema` allows; `root` is where its `$ref`s point into.
    pub fn of(schema: &Json, root: &Json) -> Self {
        let mut types = Self::default();
        types.collect(schema, root, 0);
        if types == Self::default() { Self::ANY } else { types }
    }

    fn collect(&mut self, schema: &Json, root: &Json, depth: usize) {
        // References may form a ring.
        if depth > 16 {
            *self = Self::ANY;
            return;
        }
        let Json::Object(map) = schema else {
            *self = Self::ANY;
            return;
        };
        if let Some(reference) = map.get("$ref").and_then(Json::as_str) {
            match reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer)) {
                Some(target) => self.collect(target, root, depth + 1),
                None => *self = Self::ANY,
            }
            return;
        }
        match map.get("type") {
            Some(Json::String(name)) => return self.add(name),
            Some(Json::Array(names)) => {
                return names.iter().filter_map(Json::as_str).for_each(|name| self.add(name));
            }
            _ => {}
        }
        if let Some(value) = map.get("const") {
            return self.add_value(value);
        }
        if let Some(Json::Array(values)) = map.get("enum") {
            return values.iter().for_each(|value| self.add_value(value));
        }
        for key in ["anyOf", "oneOf", "allOf"] {
            if let Some(Json::Array(options)) = map.get(key) {
                return options.iter().for_each(|option| self.collect(option, root, depth + 1));
            }
        }
        if map.contains_key("properties") {
            self.object = true;
        } else if map.contains_key("items") {
            self.array = true;
        } else {
            *self = Self::ANY;
        }
    }

    /// The text of a value as JSON. Text of no allowed type becomes a string: a call that is slightly wrong is still
    /// worth more to the caller than none.
    pub fn to_json(self, text: &str) -> String {
        let trimmed = text.trim();
        if !self.is_string_only() {
            if let Ok(value) = serde_json::from_str::<Json>(trimmed)
                && !value.is_string()
                && self.allows(&value)
            {
                return trimmed.to_owned();
            }
            match trimmed {
                "True" | "TRUE" if self.boolean && !self.string => return "true".into(),
                "False" | "FALSE" if self.boolean && !self.string => return "false".into(),
                "None" if self.null && !self.string => return "null".into(),
                _ => {}
            }
        }
        Json::from(text).to_string()
    }
}

/// The parameters of the tools of one request.
#[derive(Debug, Clone, Default)]
pub struct ToolSchemas {
    functions: HashMap<String, HashMap<String, ParameterTypes>>,
}

impl ToolSchemas {
    /// From `tools` as the API takes them; what is not of that shape adds nothing.
    pub fn new(tools: &Json) -> Self {
        let mut functions = HashMap::new();
        for tool in tools.as_array().into_iter().flatten() {
            let function = tool.get("function").unwrap_or(tool);
            let Some(name) = function.get("name").and_then(Json::as_str) else { continue };
            let root = function.get("parameters").or_else(|| function.get("input_schema")).unwrap_or(&Json::Null);
            let properties = root.get("properties").and_then(Json::as_object);
            let types = properties
                .into_iter()
                .flatten()
                .map(|(name, schema)| (name.clone(), ParameterTypes::of(schema, root)))
                .collect();
            functions.insert(name.to_owned(), types);
        }
        Self { functions }
    }

    /// The types of a parameter. One that no schema mentions is taken as a string, as the Qwen family's own parsers do.
    pub fn types(&self, function: &str, parameter: &str) -> ParameterTypes {
        let known = self.functions.get(function).and_then(|parameters| parameters.get(parameter));
        known.copied().unwrap_or(ParameterTypes::STRING)
    }
}
