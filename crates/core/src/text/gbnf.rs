//! GBNF, the grammar notation of llama.cpp, rewritten as the Lark dialect `llguidance` reads.
//!
//! Every character becomes a terminal of its own. A lexer with longer terminals would commit to the longest one, and
//! GBNF has no lexer: `"a" "bc" | "ab" "d"` must take `abc`.

use std::collections::HashMap;
use std::fmt::Write as _;

/// How deep parentheses may nest.
const MAX_DEPTH: usize = 64;
/// Largest count in `{m,n}`.
const MAX_REPEAT: u32 = 2000;

/// The Lark grammar for a GBNF grammar, whose start is `root`.
///
/// # Errors
/// A message with the line, for what is not GBNF and for rules that do not exist.
pub(super) fn to_lark(source: &str) -> Result<String, String> {
    let mut parser = Parser { rest: source, source, rules: HashMap::new(), depth: 0 };
    let mut lark = String::new();
    let mut defined = Vec::new();
    parser.blanks(true);
    while !parser.rest.is_empty() {
        let name = parser.name().ok_or_else(|| parser.error("expected the name of a rule"))?;
        parser.blanks(false);
        if !parser.take("::=") {
            return Err(parser.error("expected ::="));
        }
        let rule = parser.rule(name);
        if defined.contains(&rule) {
            return Err(parser.error(&format!("rule {name} is defined twice")));
        }
        defined.push(rule);
        parser.blanks(true);
        let body = parser.alternatives(false)?;
        // Writing to a String does not fail.
        let _ = writeln!(lark, "g{rule}: {body}");
        parser.blanks(true);
    }
    if let Some((name, _)) = parser.rules.iter().find(|(_, rule)| !defined.contains(rule)) {
        return Err(format!("rule {name} is not defined"));
    }
    let root = parser.rules.get("root").ok_or("there is no rule named root")?;
    Ok(format!("start: g{root}\n{lark}"))
}

struct Parser<'s> {
    rest: &'s str,
    source: &'s str,
    /// Names in the order they appear.
    rules: HashMap<&'s str, usize>,
    depth: usize,
}

impl<'s> Parser<'s> {
    fn error(&self, problem: &str) -> String {
        let read = &self.source[..self.source.len() - self.rest.len()];
        format!("line {}: {problem}", read.matches('\n').count() + 1)
    }

    fn take(&mut self, token: &str) -> bool {
        let rest = self.rest.strip_prefix(token);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn blanks(&mut self, newlines: bool) {
        loop {
            self.rest =
                self.rest.trim_start_matches(|c| c == ' ' || c == '\t' || (newlines && (c == '\n' || c == '\r')));
            if !self.rest.starts_with('#') {
                return;
            }
            self.rest = self.rest.find('\n').map_or("", |at| &self.rest[at..]);
        }
    }

    fn name(&mut self) -> Option<&'s str> {
        let end =
            self.rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '-' && c != '_').unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    fn rule(&mut self, name: &'s str) -> usize {
        let next = self.rules.len();
        *self.rules.entry(name).or_insert(next)
    }

    fn alternatives(&mut self, nested: bool) -> Result<String, String> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.error("parentheses nest too deep"));
        }
        let mut all = vec![self.sequence(nested)?];
        loop {
            let before = self.rest;
            self.blanks(true);
            if !self.take("|") {
                if !nested {
                    self.rest = before;
                }
                break;
            }
            self.blanks(true);
            all.push(self.sequence(nested)?);
        }
        self.depth -= 1;
        Ok(all.join(" | "))
    }

    fn sequence(&mut self, nested: bool) -> Result<String, String> {
        let mut items = Vec::new();
        loop {
            self.blanks(nested);
            let mut item = match self.rest.chars().next() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.rest = &self.rest[1..];
                    "/(?s:.)/".to_owned()
                }
                Some('(') => {
                    self.rest = &self.rest[1..];
                    self.blanks(true);
                    let inner = self.alternatives(true)?;
                    if !self.take(")") {
                        return Err(self.error("expected )"));
                    }
                    format!("({inner})")
                }
                Some(c) if c.is_ascii_alphanumeric() || c == '_' || c == '-' => {
                    let name = self.name().unwrap_or_default();
                    format!("g{}", self.rule(name))
                }
                _ => break,
            };
            while let Some(repeat) = self.repetition()? {
                item = format!("({item}){repeat}");
            }
            items.push(item);
        }
        Ok(if items.is_empty() { "\"\"".to_owned() } else { items.join(" ") })
    }

    fn repetition(&mut self) -> Result<Option<String>, String> {
        for sign in ["*", "+", "?"] {
            if self.take(sign) {
                return Ok(Some(sign.to_owned()));
            }
        }
        let Some(rest) = self.rest.strip_prefix('{') else { return Ok(None) };
        let (inner, rest) = rest.split_once('}').ok_or_else(|| self.error("expected }"))?;
        let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&n| n <= MAX_REPEAT);
        let counts = match inner.split_once(',') {
            None => number(inner).map(|n| (n, Some(n))),
            Some((low, "")) => number(low).map(|low| (low, None)),
            Some((low, high)) => number(low).zip(number(high)).map(|(low, high)| (low, Some(high))),
        };
        let problem =
            || self.error(&format!("expected {{m}}, {{m,}} or {{m,n}} up to {MAX_REPEAT}, found {{{inner}}}"));
        let (low, high) = counts.filter(|&(low, high)| high.is_none_or(|high| high >= low)).ok_or_else(problem)?;
        self.rest = rest;
        Ok(Some(match high {
            Some(high) => format!("{{{low},{high}}}"),
            None => format!("{{{low},}}"),
        }))
    }

    fn literal(&mut self) -> Result<String, String> {
        self.rest = &self.rest[1..];
        let mut out = Vec::new();
        while !self.take("\"") {
            let c = self.character()?;
            out.push(format!("/\\x{{{:x}}}/", c as u32));
        }
        Ok(if out.is_empty() { "\"\"".to_owned() } else { format!("({})", out.join(" ")) })
    }

    fn class(&mut self) -> Result<String, String> {
        self.rest = &self.rest[1..];
        let mut out = String::from(if self.take("^") { "/[^" } else { "/[" });
        let mut any = false;
        while !self.take("]") {
            let from = self.character()?;
            let to = match self.rest.strip_prefix('-') {
                Some(rest) if !rest.starts_with(']') => {
                    self.rest = rest;
                    self.character()?
                }
                _ => from,
            };
            if to < from {
                return Err(self.error(&format!("the range {from:?}-{to:?} is empty")));
            }
            // Writing to a String does not fail.
            let _ = write!(out, "\\x{{{:x}}}-\\x{{{:x}}}", from as u32, to as u32);
            any = true;
        }
        if !any {
            return Err(self.error("an empty character class"));
        }
        out.push_str("]/");
        Ok(out)
    }

    /// A character of a literal or class, escapes resolved.
    fn character(&mut self) -> Result<char, String> {
        let mut chars = self.rest.chars();
        let c = chars.next().filter(|&c| c != '\n').ok_or_else(|| self.error("the literal or class is not closed"))?;
        if c != '\\' {
            self.rest = chars.as_str();
            return Ok(c);
        }
        let kind = chars.next().ok_or_else(|| self.error("\\ at the end"))?;
        self.rest = chars.as_str();
        let digits = match kind {
            'n' => return Ok('\n'),
            't' => return Ok('\t'),
            'r' => return Ok('\r'),
            '\\' | '"' | '[' | ']' | '-' | '^' | '/' => return Ok(kind),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => return Err(self.error(&format!("unknown escape \\{other}"))),
        };
        let code = self.rest.get(..digits).and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        let c = code.ok_or_else(|| self.error(&format!("expected {digits} hexadecimal digits of a character")))?;
        self.rest = &self.rest[digits..];
        Ok(c)
    }
}
