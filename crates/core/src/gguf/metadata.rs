//! The key/value section of a GGUF, in file order, with getters that check types.

use super::{Array, GgufError, Value};
use std::collections::HashMap;
use std::sync::Arc;

/// Metadata of one file, in file order. The typed getters accept any integer width that holds the value (writers differ
/// in the width they choose) and name file, key, expected and found type when they fail.
#[derive(Clone, Debug, Default)]
pub struct Metadata {
    file: Arc<str>,
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

impl Metadata {
    /// Empty metadata; `file` is the name used in error messages.
    pub fn new(file: &str) -> Self {
        Metadata { file: file.into(), ..Default::default() }
    }

    /// The file name used in error messages.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Sets a key: in its place where it exists, otherwise at the end.
    pub fn set(&mut self, key: impl Into<String>, value: Value) {
        let key = key.into();
        match self.index.get(&key) {
            Some(&i) => self.entries[i].1 = value,
            None => {
                self.index.insert(key.clone(), self.entries.len());
                self.entries.push((key, value));
            }
        }
    }

    /// Removes a key; the order of the others stays.
    pub fn remove(&mut self, key: &str) -> Option<Value> {
        let at = self.index.remove(key)?;
        let (_, value) = self.entries.remove(at);
        for i in self.index.values_mut() {
            *i -= (*i > at) as usize;
        }
        Some(value)
    }

    /// The number of keys.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are no keys.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Keys and values in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(k, v)| (k.as_str(), v))
    }

    /// The value of a key as the file has it.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    fn wrong(&self, key: &str, expected: &'static str, found: String) -> GgufError {
        GgufError::WrongType { file: self.file.to_string(), key: key.to_string(), expected, found }
    }

    fn missing(&self, key: &str, expected: &'static str) -> GgufError {
        GgufError::MissingKey { file: self.file.to_string(), key: key.to_string(), expected }
    }

    fn opt<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        take: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, GgufError> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => take(v).map(Some).ok_or_else(|| self.wrong(key, expected, v.describe())),
        }
    }

    fn need<'a, T>(
        &'a self,
        key: &str,
        expected: &'static str,
        take: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, GgufError> {
        self.opt(key, expected, take)?.ok_or_else(|| self.missing(key, expected))
    }

    /// An integer that fits u32.
    pub fn u32(&self, key: &str) -> Result<u32, GgufError> {
        self.need(key, "an integer (u32)", |v| v.integer()?.try_into().ok())
    }

    /// An integer that fits u32, where the key exists.
    pub fn u32_opt(&self, key: &str) -> Result<Option<u32>, GgufError> {
        self.opt(key, "an integer (u32)", |v| v.integer()?.try_into().ok())
    }

    /// An integer that fits u64.
    pub fn u64(&self, key: &str) -> Result<u64, GgufError> {
        self.need(key, "an integer (u64)", |v| v.integer()?.try_into().ok())
    }

    /// An integer that fits u64, where the key exists.
    pub fn u64_opt(&self, key: &str) -> Result<Option<u64>, GgufError> {
        self.opt(key, "an integer (u64)", |v| v.integer()?.try_into().ok())
    }

    /// A float.
    pub fn f32(&self, key: &str) -> Result<f32, GgufError> {
        self.need(key, "a number (f32)", |v| v.number().map(|v| v as f32))
    }

    /// A float, where the key exists.
    pub fn f32_opt(&self, key: &str) -> Result<Option<f32>, GgufError> {
        self.opt(key, "a number (f32)", |v| v.number().map(|v| v as f32))
    }

    /// A bool, where the key exists.
    pub fn bool_opt(&self, key: &str) -> Result<Option<bool>, GgufError> {
        self.opt(key, "a bool", |v| if let Value::Bool(b) = v { Some(*b) } else { None })
    }

    /// A string.
    pub fn str(&self, key: &str) -> Result<&str, GgufError> {
        self.need(key, "a string", |v| if let Value::String(s) = v { Some(s.as_str()) } else { None })
    }

    /// A string, where the key exists.
    pub fn str_opt(&self, key: &str) -> Result<Option<&str>, GgufError> {
        self.opt(key, "a string", |v| if let Value::String(s) = v { Some(s.as_str()) } else { None })
    }

    /// An array of strings.
    pub fn strings(&self, key: &str) -> Result<&[String], GgufError> {
        self.need(key, "an array of strings", |v| match v {
            Value::Array(Array::String(s)) => Some(s.as_slice()),
            _ => None,
        })
    }

    /// An array of strings, where the key exists.
    pub fn strings_opt(&self, key: &str) -> Result<Option<&[String]>, GgufError> {
        self.opt(key, "an array of strings", |v| match v {
            Value::Array(Array::String(s)) => Some(s.as_slice()),
            _ => None,
        })
    }

    /// An array of integers that fit u32.
    pub fn u32_array(&self, key: &str) -> Result<Vec<u32>, GgufError> {
        self.need(key, "an array of integers (u32)", integers)
    }

    /// An array of integers that fit u32, where the key exists.
    pub fn u32_array_opt(&self, key: &str) -> Result<Option<Vec<u32>>, GgufError> {
        self.opt(key, "an array of integers (u32)", integers)
    }

    /// An array of integers that fit i32.
    pub fn i32_array(&self, key: &str) -> Result<Vec<i32>, GgufError> {
        self.need(key, "an array of integers (i32)", integers)
    }

    /// An array of integers that fit i32, where the key exists.
    pub fn i32_array_opt(&self, key: &str) -> Result<Option<Vec<i32>>, GgufError> {
        self.opt(key, "an array of integers (i32)", integers)
    }

    /// An array of numbers as f32.
    pub fn f32_array(&self, key: &str) -> Result<Vec<f32>, GgufError> {
        self.need(key, "an array of numbers (f32)", floats)
    }

    /// An array of numbers as f32, where the key exists.
    pub fn f32_array_opt(&self, key: &str) -> Result<Option<Vec<f32>>, GgufError> {
        self.opt(key, "an array of numbers (f32)", floats)
    }

    /// An array of bools (integers 0 and 1 are taken too), where the key exists.
    pub fn bool_array_opt(&self, key: &str) -> Result<Option<Vec<bool>>, GgufError> {
        self.opt(key, "an array of bools", |v| match v {
            Value::Array(Array::Bool(b)) => Some(b.clone()),
            Value::Array(a) => a.integers()?.into_iter().map(|v| [false, true].get(v as usize).copied()).collect(),
            _ => None,
        })
    }
}

fn integers<T: TryFrom<i128>>(v: &Value) -> Option<Vec<T>> {
    let Value::Array(a) = v else { return None };
    a.integers()?.into_iter().map(|v| T::try_from(v).ok()).collect()
}

fn floats(v: &Value) -> Option<Vec<f32>> {
    let Value::Array(a) = v else { return None };
    if let Array::F32(v) = a {
        return Some(v.clone());
    }
    a.iter().map(|v| v.number().map(|v| v as f32)).collect()
}
