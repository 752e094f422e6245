//! How counts and foreign text are worded in what commands say.

/// A count with its noun: `1 tensor`, `2 tensors`.
pub fn counted(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

/// What follows such a count: `is` or `are`, `has` or `have`.
pub fn agreeing(n: usize, one: &'static str, many: &'static str) -> &'static str {
    if n == 1 { one } else { many }
}

/// The text as it is, with control characters escaped.
pub fn on_one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_debug().to_string() } else { c.to_string() }).collect()
}

/// The text between quotes, readable in every script.
pub fn quoted(text: &str) -> String {
    format!("\"{}\"", on_one_line(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_control_characters_are_escaped() {
        assert_eq!(quoted("नमस्ते\n🙂\u{1b}[2J"), "\"नमस्ते\\n🙂\\u{1b}[2J\"");
        assert_eq!((counted(1, "place"), counted(0, "place")), ("1 place".into(), "0 places".into()));
    }
}
