//! The report as text for people.

use super::report::{MtpReport, MtpState, Report};
use crate::cli::wording::agreeing;
use std::fmt::Write;

/// Lays the report out: one line per fact, then the table of types, then the verdict.
pub fn report(r: &Report) -> String {
    let mut out = String::new();
    let title = r.model.name.as_deref().filter(|n| !n.is_empty()).unwrap_or(&r.file);
    let files = match r.parts.len() {
        0 => "in memory".to_string(),
        1 => "1 file".to_string(),
        n => format!("{n} files"),
    };
    let _ = writeln!(out, "{title}   {} · {} · {} · {files}\n", r.model.architecture, r.format, bytes(r.bytes));

    let mut line = |label: &str, text: String| {
        let _ = writeln!(out, "  {label:<11} {text}");
    };
    let size: Vec<String> = [
        r.model.size_label.clone(),
        Some(format!("{} weights in {}", count(r.weights), tensors(r.tensors))),
        Some(format!("{:.2} bits per weight", r.bits_per_weight)),
        r.model.file_type.clone(),
    ]
    .into_iter()
    .flatten()
    .collect();
    line("size", size.join(" · "));
    if let Some(rest) = &r.not_opened {
        line("not here", rest.clone());
    }
    if let Some(imatrix) = &r.model.imatrix {
        line("quantized", format!("with the importance matrix {imatrix}"));
    }
    if let Some(g) = &r.geometry {
        let mtp = if g.mtp_layers == 0 { String::new() } else { format!(" + {} MTP", g.mtp_layers) };
        let kinds = format!("{} delta net, {} attention", g.delta_net_layers, g.attention_layers);
        line("layers", format!("{} trunk ({kinds}){mtp}", g.trunk_layers));
        line("width", format!("{}", g.hidden));
        line("attention", format!("{} query heads and {} KV heads of {}", g.heads, g.kv_heads, g.head_dim));
        if let (Some(k), Some(v)) = (g.key_heads, g.value_heads) {
            line("delta net", format!("{k} key heads and {v} value heads"));
        }
        let shared = format!("1 shared of width {}", g.shared_expert_ff);
        line("experts", format!("{} of width {}, {} per token, {shared}", g.experts, g.expert_ff, g.experts_used));
        line("context", format!("{} tokens", grouped(g.context)));
        if r.text.as_ref().is_none_or(|t| t.tokens.is_none()) {
            line("vocabulary", format!("{} rows in the embedding table", grouped(g.vocab)));
        }
    }
    if let Some(v) = &r.vision {
        line("encoder", format!("{} layers of width {}, {} heads", v.layers, v.hidden, v.heads));
        let side = v.patch * v.merge;
        line("pictures", format!("one row of width {} per {side} x {side} pixels · {}", v.out, v.projector));
    }
    if let Some(t) = &r.text {
        if let Some(tokens) = t.tokens {
            let merges = t.merges.map(|m| format!(", {} merges", grouped(m as u64))).unwrap_or_default();
            let pre = t.pre_tokenizer.as_deref().unwrap_or("not named");
            line("vocabulary", format!("{} tokens{merges}, pre-tokenizer {pre}", grouped(tokens as u64)));
        }
        line(
            "template",
            match t.chat_template_chars {
                None => "none".to_string(),
                Some(n) if t.chat_template_knows.is_empty() => format!("present, {} characters", grouped(n as u64)),
                Some(n) => {
                    format!("present, {} characters; knows {}", grouped(n as u64), t.chat_template_knows.join(", "))
                }
            },
        );
    }
    if let Some(m) = &r.mtp {
        mtp(m, &mut line);
    }
    if let Some(hashes) = &r.sha256 {
        for h in hashes {
            let name = h.file.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
            line("sha256", format!("{}  {name}", h.sha256));
        }
    }
    out.push('\n');
    out.push_str(&types(r));
    out.push('\n');
    for can in &r.runs.can {
        let _ = writeln!(out, "  can:    {can}");
    }
    for cannot in &r.runs.cannot {
        let _ = writeln!(out, "  cannot: {cannot}");
    }
    out
}

fn mtp(m: &MtpReport, line: &mut impl FnMut(&str, String)) {
    let place = m.block.map(|b| format!(" in blk.{b}")).unwrap_or_default();
    let held = format!("{}{place}, {}, {}", tensors(m.tensors), m.types.join(" "), bytes(m.bytes));
    match m.state {
        MtpState::Complete => line("MTP head", format!("complete: {held}")),
        MtpState::Absent => line("MTP head", "not in this file".into()),
        MtpState::NotOpened if m.tensors == 0 => line("MTP head", "not in the files that were opened".into()),
        MtpState::NotOpened => {
            line("MTP head", format!("in part: {held}; the rest is not in the files that were opened"))
        }
        MtpState::Lost => line("MTP head", "lost: the metadata promises it, but none of its tensors are there".into()),
        MtpState::Incomplete => {
            line("MTP head", format!("INCOMPLETE: {held}"));
            for name in &m.missing {
                line("", format!("missing  {name}"));
            }
            for what in &m.wrong_shape {
                line("", format!("shape    {what}"));
            }
        }
    }
    if let Some(restore) = &m.restore {
        line("", format!("restore it: {restore}"));
    }
}

fn types(r: &Report) -> String {
    let mut rows: Vec<[String; 6]> =
        vec![["type", "tensors", "weights", "bytes", "share", "strata"].map(str::to_string)];
    for t in &r.types {
        let runs = match t.computable {
            Some(true) => "computes",
            Some(false) => "CANNOT",
            None => "converts",
        };
        rows.push([
            t.name.clone(),
            grouped(t.tensors as u64),
            count(t.weights),
            bytes(t.bytes),
            format!("{:.1} %", t.share * 100.0),
            runs.into(),
        ]);
    }
    let all: u64 = r.types.iter().map(|t| t.bytes).sum();
    rows.push(["all".into(), grouped(r.tensors as u64), count(r.weights), bytes(all), "".into(), "".into()]);
    table(&rows, &[false, true, true, true, true, false])
}

/// Lines up columns; `right` says which are numbers.
pub fn table<const N: usize>(rows: &[[String; N]], right: &[bool; N]) -> String {
    let width: Vec<usize> = (0..N).map(|c| rows.iter().map(|r| r[c].chars().count()).max().unwrap_or(0)).collect();
    let mut out = String::new();
    for row in rows {
        let mut text = String::from(" ");
        for c in 0..N {
            let pad = " ".repeat(width[c] - row[c].chars().count());
            text.push(' ');
            text.push_str(&if right[c] { format!("{pad}{}", row[c]) } else { format!("{}{pad}", row[c]) });
            text.push(' ');
        }
        out.push_str(text.trim_end());
        out.push('\n');
    }
    out
}

/// Bytes in the unit people read: `21.3 GB` (powers of 1000, as disks are sold).
pub fn bytes(n: u64) -> String {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    match units.iter().find(|(size, _)| n as f64 >= *size) {
        Some((size, unit)) => format!("{} {unit}", three_digits(n as f64 / size)),
        None => format!("{n} B"),
    }
}

/// A count in short form: `34.7 B`.
pub fn count(n: u64) -> String {
    let units = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")];
    match units.iter().find(|(size, _)| n as f64 >= *size) {
        Some((size, unit)) => format!("{} {unit}", three_digits(n as f64 / size)),
        None => format!("{n}"),
    }
}

fn three_digits(v: f64) -> String {
    if v >= 99.95 {
        format!("{v:.0}")
    } else if v >= 9.995 {
        format!("{v:.1}")
    } else {
        format!("{v:.2}")
    }
}

/// `248,320`
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(d);
    }
    out
}

/// `1,024 tensors`
pub fn tensors(n: usize) -> String {
    format!("{} {}", grouped(n as u64), agreeing(n, "tensor", "tensors"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_readable() {
        assert_eq!(bytes(22_130_000_000), "22.1 GB");
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(1_000), "1.00 kB");
        assert_eq!(bytes(999_600_000), "1000 MB");
        assert_eq!(count(34_660_610_688), "34.7 B");
        assert_eq!(grouped(248_320), "248,320");
        assert_eq!(grouped(1_000_000), "1,000,000");
        assert_eq!(grouped(42), "42");
    }
}
