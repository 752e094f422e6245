//! The journal: one JSON line per run of the benchmark, with everything needed to know what was measured where.

use super::figures::Row;
use crate::cli::failure::BadInput;
use anyhow::Result;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};
use strata_core::output::{OutputError, check_append};
use strata_kernels::cpu::Simd;

/// Where the journal is kept unless told otherwise.
pub fn default_path() -> Option<PathBuf> {
    let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|p| p.is_absolute());
    let state = state.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state")))?;
    Some(state.join("strata/bench.jsonl"))
}

/// The machine, as far as it matters for speed.
pub fn machine(bandwidth: f64) -> Value {
    let first_of = |file: &str, key: &str| {
        let text = std::fs::read_to_string(file).ok()?;
        let line = text.lines().find(|l| l.starts_with(key))?;
        Some(line.split_once(':')?.1.trim().to_string())
    };
    json!({
        "cpu": first_of("/proc/cpuinfo", "model name"),
        "cores": std::thread::available_parallelism().map_or(1, usize::from),
        "memory": first_of("/proc/meminfo", "MemTotal"),
        "simd": format!("{:?}", Simd::detect()).to_lowercase(),
        "read_gb_s": (bandwidth / 1e7).round() / 100.0,
        "os": std::fs::read_to_string("/proc/sys/kernel/osrelease").ok().map(|s| s.trim().to_string()),
        "arch": std::env::consts::ARCH,
    })
}

/// The program that measured.
pub fn build() -> Value {
    json!({
        "strata": env!("CARGO_PKG_VERSION"),
        "profile": if cfg!(debug_assertions) { "debug" } else { "release" },
    })
}

/// How many processes want to run, on average over the last minute.
pub fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

/// Refuses a journal that cannot be appended to, before anything is measured: an input, a device, a file that is none.
pub fn check(path: &Path, inputs: &[Option<&Path>]) -> Result<()> {
    let inputs: Vec<&Path> = inputs.iter().flatten().copied().collect();
    check_append(path, &inputs)?;
    let mut first = [0];
    let read = std::fs::File::open(path).and_then(|mut file| file.read(&mut first));
    if read.is_ok_and(|n| n > 0) && first != *b"{" {
        let what = format!("{}: a file is there that is no journal (JSON lines)", path.display());
        return Err(BadInput::new(what).hint("name another one with --journal FILE").into());
    }
    Ok(())
}

/// Appends one entry.
pub fn append(path: &Path, machine: &Value, model: &Value, settings: &Value, rows: &[Row]) -> Result<()> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let entry = json!({
        "unix_time": seconds,
        "machine": machine,
        "build": build(),
        "model": model,
        "settings": settings,
        "results": rows.iter().map(Row::json).collect::<Vec<_>>(),
    });
    let write = || {
        let mut file = std::fs::File::options().create(true).append(true).open(path)?;
        // One call, so that two benchmarks at the same time do not mix their lines.
        file.write_all(format!("{entry}\n").as_bytes())
    };
    write().map_err(|source| OutputError::Io { path: path.to_path_buf(), action: "append to it", source })?;
    Ok(())
}
