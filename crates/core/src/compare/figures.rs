//! The figures a comparison reports. Each is rounded once, here, so that table, JSON and CSV show the same number.

use serde_json::{Map, Value as Json};

/// Digits a figure keeps.
const DIGITS: usize = 6;

/// One reported number.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// The key in JSON and CSV.
    pub name: &'static str,
    /// What it is, for the table.
    pub label: &'static str,
    /// The value, rounded to six significant digits.
    pub value: f64,
    /// `%`, `nats`, ... or nothing.
    pub unit: &'static str,
}

/// Figures in the order they are shown.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Figures {
    figures: Vec<Figure>,
}

/// `value` with six significant digits.
pub(super) fn rounded(value: f64) -> f64 {
    // Adding zero makes a negative zero positive.
    format!("{value:.*e}", DIGITS - 1).parse().unwrap_or(value) + 0.0
}

/// A rounded value as it is written everywhere.
fn shown(value: f64) -> String {
    match serde_json::Number::from_f64(value) {
        Some(_) if value.fract() == 0.0 && value.abs() < 1e15 => format!("{value:.0}"),
        Some(number) => number.to_string(),
        None => "null".to_owned(),
    }
}

impl Figures {
    /// Appends a figure.
    pub fn add(&mut self, name: &'static str, label: &'static str, value: f64, unit: &'static str) {
        self.figures.push(Figure { name, label, value: rounded(value), unit });
    }

    /// All figures.
    pub fn iter(&self) -> impl Iterator<Item = &Figure> {
        self.figures.iter()
    }

    /// The figure of that name.
    pub fn get(&self, name: &str) -> Option<f64> {
        self.figures.iter().find(|figure| figure.name == name).map(|figure| figure.value)
    }

    /// One line per figure: label, value, unit.
    pub fn table(&self) -> String {
        let width = self.figures.iter().map(|figure| figure.label.chars().count()).max().unwrap_or(0);
        let line = |figure: &Figure| {
            format!("{:width$}  {} {}", figure.label, shown(figure.value), figure.unit).trim_end().to_owned() + "\n"
        };
        self.figures.iter().map(line).collect()
    }

    /// `{name: value}`; a value that is no number (0 / 0) is `null`.
    pub fn json(&self) -> Map<String, Json> {
        let value = |value: f64| match shown(value).parse::<serde_json::Number>() {
            Ok(number) => Json::Number(number),
            Err(_) => Json::Null,
        };
        self.figures.iter().map(|figure| (figure.name.to_owned(), value(figure.value))).collect()
    }

    /// `name,value` lines under a header.
    pub fn csv(&self) -> String {
        let lines = self.figures.iter().map(|figure| format!("{},{}\n", figure.name, shown(figure.value)));
        "figure,value\n".to_owned() + &lines.collect::<String>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_the_same_number_everywhere() {
        let mut figures = Figures::default();
        for value in [0.0, 1.0, 1.0 / 3.0, 123_456_789.0, 1e-9 / 7.0, -2.5, 12.345_678_9, f64::NAN] {
            figures.add("x", "an x", value, "nats");
            let last = figures.iter().last().unwrap().clone();
            let only = Figures { figures: vec![last] };
            let table = only.table();
            let in_table = table.split_whitespace().nth(2).unwrap();
            let csv = only.csv();
            assert_eq!(only.json()["x"].to_string(), in_table);
            assert_eq!(csv.lines().nth(1).unwrap(), format!("x,{in_table}"));
        }
    }
}
