//! The figures of a benchmark: computed and rounded once, so that table, JSON and CSV show the same numbers.

use super::ours::Sample;
use super::plan::{Kind, Test};
use serde_json::{Map, Value};

/// A value of a column.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// A name.
    Text(String),
    /// Rounded to this many decimals.
    Number(f64, usize),
    /// Not measured, or no number.
    None,
}

impl Cell {
    /// `value` rounded to `decimals`.
    pub fn number(value: f64, decimals: usize) -> Cell {
        if !value.is_finite() {
            return Cell::None;
        }
        let scale = 10f64.powi(decimals as i32);
        Cell::Number((value * scale).round() / scale, decimals)
    }

    /// As [`Cell::number`], where there is one.
    pub fn maybe(value: Option<f64>, decimals: usize) -> Cell {
        value.map_or(Cell::None, |v| Cell::number(v, decimals))
    }

    /// As it is printed.
    pub fn text(&self) -> String {
        match self {
            Cell::Text(s) => s.clone(),
            Cell::Number(v, decimals) => format!("{v:.decimals$}"),
            Cell::None => String::new(),
        }
    }

    fn json(&self) -> Value {
        match self {
            Cell::Text(s) => Value::from(s.as_str()),
            Cell::Number(v, 0) => Value::from(*v as i64),
            Cell::Number(v, _) => Value::from(*v),
            Cell::None => Value::Null,
        }
    }
}

/// One test with all its figures, as named columns.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    columns: Vec<(String, Cell)>,
    /// The largest spread on either side in percent.
    pub spread: f64,
}

/// Median, least and largest of some values.
struct Summary {
    median: f64,
    min: f64,
    max: f64,
}

impl Summary {
    fn of(mut values: Vec<f64>) -> Summary {
        values.sort_by(f64::total_cmp);
        let n = values.len();
        if n == 0 {
            return Summary { median: f64::NAN, min: f64::NAN, max: f64::NAN };
        }
        let median = (values[n / 2] + values[(n - 1) / 2]) / 2.0;
        Summary { median, min: values[0], max: values[n - 1] }
    }

    /// From the least to the largest, as a percentage of the median.
    fn spread(&self) -> f64 {
        (self.max - self.min) / self.median * 100.0
    }
}

/// The middle value, or the mean of the two in the middle; NaN for none.
pub fn median(values: impl Iterator<Item = f64>) -> f64 {
    Summary::of(values.collect()).median
}

impl Row {
    /// A row of such columns.
    pub fn of(columns: Vec<(&str, Cell)>) -> Row {
        Row { columns: columns.into_iter().map(|(name, cell)| (name.to_string(), cell)).collect(), spread: 0.0 }
    }

    /// Sums up the samples of a test. `peer` has the peer's name and its samples, pair by pair with `ours`; `bandwidth`
    /// is the machine's in bytes per second.
    pub fn new(test: &Test, ours: &[Sample], peer: Option<(&str, &[Sample])>, bandwidth: f64) -> Row {
        let mut columns = Vec::new();
        let mut add = |name: &str, cell: Cell| columns.push((name.to_string(), cell));
        let speed = Summary::of(ours.iter().map(|s| s.rate).collect());
        add("test", Cell::Text(test.name()));
        add("depth", Cell::Number(test.depth as f64, 0));
        add("parallel", Cell::Number(test.parallel as f64, 0));
        add("mtp", if test.kind == Kind::Decode { Cell::Text(test.mtp.to_string()) } else { Cell::None });
        add("samples", Cell::Number(ours.len() as f64, 0));
        add("tok_s", Cell::number(speed.median, 2));
        add("tok_s_min", Cell::number(speed.min, 2));
        add("tok_s_max", Cell::number(speed.max, 2));
        add("spread_percent", Cell::number(speed.spread(), 1));
        let bytes = ours.iter().map(|s| s.bytes_per_s).collect::<Option<Vec<_>>>().map(|b| median(b.into_iter()));
        add("gb_s", Cell::maybe(bytes.map(|b| b / 1e9), 2));
        add("bandwidth_percent", Cell::maybe(bytes.map(|b| b / bandwidth * 100.0), 1));
        add("acceptance_percent", acceptance(ours));
        let per_window = ours.iter().map(|s| s.tokens_per_window).collect::<Option<Vec<_>>>();
        add("tokens_per_window", Cell::maybe(per_window.map(|w| median(w.into_iter())), 2));
        let phases = ours.first().map(|s| s.phases.as_slice()).unwrap_or_default();
        for (i, (name, _)) in phases.iter().enumerate() {
            let share = median(ours.iter().filter_map(|s| Some(s.phases.get(i)?.1)));
            add(&format!("{name}_percent"), Cell::number(share * 100.0, 1));
        }
        let mut spread = speed.spread();
        if let Some((name, samples)) = peer {
            let theirs = Summary::of(samples.iter().map(|s| s.rate).collect());
            add("peer", Cell::Text(name.to_string()));
            add("peer_tok_s", Cell::number(theirs.median, 2));
            add("peer_tok_s_min", Cell::number(theirs.min, 2));
            add("peer_tok_s_max", Cell::number(theirs.max, 2));
            add("peer_spread_percent", Cell::number(theirs.spread(), 1));
            add("peer_acceptance_percent", acceptance(samples));
            let pairs = ours.iter().zip(samples).map(|(a, b)| a.rate / b.rate);
            add("ratio", Cell::number(median(pairs), 3));
            if !samples.is_empty() {
                spread = spread.max(theirs.spread());
            }
        }
        Row { columns, spread }
    }

    /// The value of a column; none where there is no such column.
    pub fn cell(&self, name: &str) -> &Cell {
        self.columns.iter().find(|(n, _)| n == name).map_or(&Cell::None, |(_, c)| c)
    }

    /// The row as a JSON object.
    pub fn json(&self) -> Value {
        Value::Object(self.columns.iter().map(|(n, c)| (n.clone(), c.json())).collect::<Map<_, _>>())
    }
}

fn acceptance(samples: &[Sample]) -> Cell {
    let drafted: usize = samples.iter().map(|s| s.drafted).sum();
    let accepted: usize = samples.iter().map(|s| s.accepted).sum();
    if drafted == 0 { Cell::None } else { Cell::number(accepted as f64 / drafted as f64 * 100.0, 1) }
}

/// Rows as an indented JSON object, `results` beside what else there is to say.
pub fn json<const N: usize>(rows: &[Row], others: [(&str, &Value); N]) -> String {
    let mut all: Map<_, _> = others.into_iter().map(|(name, value)| (name.to_string(), value.clone())).collect();
    all.insert("results".to_string(), rows.iter().map(Row::json).collect());
    format!("{:#}", Value::Object(all))
}

/// Rows as CSV with a header line.
pub fn csv(rows: &[Row]) -> String {
    let Some(first) = rows.first() else { return String::new() };
    let line = |cells: Vec<String>| cells.join(",") + "\n";
    let mut out = line(first.columns.iter().map(|(n, _)| n.clone()).collect());
    for row in rows {
        out += &line(first.columns.iter().map(|(n, _)| row.cell(n).text()).collect());
    }
    out
}

/// Columns of the table: heading, where the value comes from, what follows it.
const SHOWN: [(&str, &str, &str); 13] = [
    ("test", "test", ""),
    ("depth", "depth", ""),
    ("parallel", "parallel", ""),
    ("mtp", "mtp", ""),
    ("tok/s", "tok_s", ""),
    ("spread", "spread_percent", " %"),
    ("GB/s", "gb_s", ""),
    ("of memory", "bandwidth_percent", " %"),
    ("accepted", "acceptance_percent", " %"),
    ("tok/window", "tokens_per_window", ""),
    ("peer tok/s", "peer_tok_s", ""),
    ("spread", "peer_spread_percent", " %"),
    ("ratio", "ratio", " x"),
];

/// Rows as a table for people, and the phases of each below it. Columns that are empty throughout are left out.
pub fn table(rows: &[Row]) -> String {
    let used: Vec<_> = SHOWN.iter().filter(|(_, name, _)| rows.iter().any(|r| *r.cell(name) != Cell::None)).collect();
    let mut lines = vec![used.iter().map(|(heading, _, _)| heading.to_string()).collect::<Vec<_>>()];
    for row in rows {
        let show = |(_, name, unit): &&(&str, &str, &str)| match row.cell(name) {
            Cell::None => String::new(),
            // More than memory gives: the weights are so small that they stay in the processor's caches.
            Cell::Number(percent, _) if *name == "bandwidth_percent" && *percent > 100.0 => "from cache".to_string(),
            cell => cell.text() + unit,
        };
        lines.push(used.iter().map(show).collect());
    }
    let width = |c: usize| lines.iter().map(|l| l[c].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..used.len()).map(width).collect();
    let mut out = String::new();
    for line in &lines {
        let cells: Vec<String> = line.iter().zip(&widths).map(|(text, width)| format!("{text:>width$}")).collect();
        out += &format!("  {}\n", cells.join("  ").trim_end());
    }
    out += "\n  where the time goes\n";
    for row in rows {
        let mut shares: Vec<(&str, f64, String)> = Vec::new();
        for (name, cell) in &row.columns {
            if let (Some(phase), Cell::Number(v, _)) = (name.strip_suffix("_percent"), cell)
                && PHASES.contains(&phase)
                && *v >= 0.05
            {
                shares.push((phase, *v, cell.text()));
            }
        }
        shares.sort_by(|a, b| b.1.total_cmp(&a.1));
        let shares: Vec<String> = shares.iter().map(|(phase, _, text)| format!("{phase} {text} %")).collect();
        let place = |name: &str| row.cell(name).text();
        let label = format!("{} d{} x{} {}", place("test"), place("depth"), place("parallel"), place("mtp"));
        out += &format!("  {:<20} {}\n", label.trim_end(), shares.join(", "));
    }
    out
}

/// Names of the phases; see `ours::phases`.
const PHASES: [&str; 8] = ["embed", "attention", "delta_net", "experts", "head", "mtp", "commit", "other"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::plan::Mtp;
    use strata_core::engine::MtpSetting;

    fn sample(rate: f64) -> Sample {
        Sample {
            rate,
            bytes_per_s: Some(rate * 1e9),
            drafted: 10,
            accepted: 7,
            tokens_per_window: Some(1.7),
            phases: vec![("experts", 0.61234), ("other", 0.38766)],
        }
    }

    fn rows() -> Vec<Row> {
        let test = |kind, mtp| Test { kind, tokens: 64, depth: 0, parallel: 1, mtp: Mtp(mtp) };
        let ours = [sample(10.126), sample(12.0), sample(11.0)];
        let theirs = [sample(5.0), sample(6.0), sample(5.6)];
        vec![
            Row::new(&test(Kind::Prompt, MtpSetting::Off), &ours, Some(("llama-bench", &theirs)), 20e9),
            Row::new(&test(Kind::Decode, MtpSetting::Depth(2)), &ours[..1], Some(("llama-bench", &[])), 20e9),
        ]
    }

    #[test]
    fn medians_spread_and_ratio_are_those_of_the_samples() {
        let r = &rows()[0];
        assert_eq!(r.cell("tok_s").text(), "11.00");
        assert_eq!(r.cell("spread_percent").text(), "17.0");
        assert_eq!(r.cell("bandwidth_percent").text(), "55.0");
        assert_eq!(r.cell("ratio").text(), "2.000", "the median of the pairs 2.025, 2 and 1.964");
        assert_eq!(r.cell("acceptance_percent").text(), "70.0");
        assert!((r.spread - 17.85).abs() < 0.1, "the peer's spread is the larger one");
    }

    #[test]
    fn table_json_and_csv_show_the_same_numbers() {
        let rows = rows();
        let (table, csv) = (table(&rows), csv(&rows));
        let mut lines = csv.lines();
        let header: Vec<&str> = lines.next().unwrap().split(',').collect();
        for (row, line) in rows.iter().zip(lines) {
            let json = row.json();
            let cells: Vec<&str> = line.split(',').collect();
            assert_eq!(cells.len(), header.len());
            for (name, cell) in header.iter().zip(&cells) {
                match &json[name] {
                    Value::Number(n) => assert_eq!(n.as_f64().unwrap(), cell.parse::<f64>().unwrap(), "{name}"),
                    Value::String(s) => assert_eq!(s, cell),
                    other => assert!(other.is_null() && cell.is_empty(), "{name}: {other} and '{cell}'"),
                }
            }
            for name in ["tok_s", "spread_percent", "gb_s", "acceptance_percent", "experts_percent"] {
                assert!(table.contains(&row.cell(name).text()), "{name} in\n{table}");
            }
        }
    }

    #[test]
    fn a_peer_that_cannot_do_a_test_leaves_its_columns_empty() {
        let r = &rows()[1];
        assert_eq!((r.cell("peer_tok_s"), r.cell("ratio")), (&Cell::None, &Cell::None));
        assert_eq!(r.spread, 0.0);
    }
}
