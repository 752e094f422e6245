//! Stop strings across token borders: text that could be the beginning of one is held back until it is clear.

/// Watches one answer's text.
pub(crate) struct StopStrings {
    stops: Vec<String>,
    /// Text not yet given out.
    held: String,
}

/// What became of a piece of text.
#[derive(Debug, PartialEq)]
pub(crate) enum Released {
    /// This much is safe to give out.
    Text(String),
    /// The text up to a stop string, and that string. The answer ends here.
    Stopped(String, String),
}

impl StopStrings {
    pub(crate) fn new(stops: &[String]) -> Self {
        StopStrings { stops: stops.to_vec(), held: String::new() }
    }

    /// Takes the next piece of text.
    pub(crate) fn push(&mut self, text: String) -> Released {
        if self.stops.is_empty() {
            return Released::Text(text);
        }
        self.held.push_str(&text);
        // The stop string that is complete first, as if the text had come character by character; of those that end together,
        // the longest.
        let found = self.stops.iter().filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        let found = found.min_by_key(|(at, stop)| (at + stop.len(), *at));
        if let Some((at, stop)) = found {
            let stop = stop.clone();
            self.held.truncate(at);
            return Released::Stopped(std::mem::take(&mut self.held), stop);
        }
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = self.held.len().saturating_sub(longest - 1);
        let beginning = (from..self.held.len()).find(|&at| {
            self.held.is_char_boundary(at) && self.stops.iter().any(|stop| stop.starts_with(&self.held[at..]))
        });
        let kept = self.held.split_off(beginning.unwrap_or(self.held.len()));
        Released::Text(std::mem::replace(&mut self.held, kept))
    }

    /// What is still held back, at the end of the answer.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fed(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let stops: Vec<_> = stops.iter().map(|s| s.to_string()).collect();
        let mut watch = StopStrings::new(&stops);
        let mut out = String::new();
        for piece in pieces {
            match watch.push(piece.to_string()) {
                Released::Text(text) => out.push_str(&text),
                Released::Stopped(text, stop) => return (out + &text, Some(stop)),
            }
        }
        (out + &watch.finish(), None)
    }

    #[test]
    fn every_split_gives_the_same_answer() {
        let cases: [(&[&str], &str); 6] = [
            (&["\n\nUser:"], "Hello\n\nUser: more"),
            (&["aab"], "aaaabc"),
            (&["終わり", "🙂"], "これで終りです。終わり🙂"),
            (&["abc", "b"], "xxabc"),
            (&["never"], "nev nev never"),
            (&["zz"], "no stop here z"),
        ];
        for (stops, text) in cases {
            let whole = fed(stops, &[text]);
            let chars: Vec<_> = text.char_indices().map(|(at, c)| &text[at..at + c.len_utf8()]).collect();
            assert_eq!(fed(stops, &chars), whole, "{text}");
            for (at, _) in text.char_indices() {
                assert_eq!(fed(stops, &[&text[..at], &text[at..]]), whole, "{text} split at {at}");
            }
        }
        assert_eq!(fed(&["aab"], &["aaaabc"]), ("aa".into(), Some("aab".into())));
        assert_eq!(fed(&["zz"], &["a z"]), ("a z".into(), None));
    }

    #[test]
    fn text_that_cannot_be_a_stop_string_is_not_held_back() {
        let mut watch = StopStrings::new(&["END".to_string()]);
        assert_eq!(watch.push("an E".into()), Released::Text("an ".into()));
        assert_eq!(watch.push("gg".into()), Released::Text("Egg".into()));
    }
}
