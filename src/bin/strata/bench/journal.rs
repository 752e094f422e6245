//! The journal: one JSON line per run of the benchmark, with everything needed to know what was measured where.

use super::figures::Row;
use crate::cli::failure::BadInput;
use anyhow::Result;
use serde_json::{Value, json};
use std::io::{Read, Seek, SeekFrom, Write};
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

/// How every entry begins.
const ENTRY_START: &[u8; 12] = b"{\"unix_time\"";

/// Refuses a journal that cannot be appended to, before anything is measured: an input, a device, a file that is none.
pub fn check(path: &Path, inputs: &[Option<&Path>]) -> Result<()> {
    let inputs: Vec<&Path> = inputs.iter().flatten().copied().collect();
    check_append(path, &inputs)?;
    // Entries are one line each and begin with the time.
    let mut start = [0; ENTRY_START.len()];
    let read = std::fs::File::open(path).and_then(|mut file| file.read(&mut start));
    if read.is_ok_and(|n| n > 0) && start != *ENTRY_START {
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
        // An entry that a crash cut short keeps a line of its own.
        let ends_well = file.metadata()?.len() == 0 || {
            let mut last = [0];
            let mut reader = std::fs::File::open(path)?;
            reader.seek(SeekFrom::End(-1))?;
            reader.read_exact(&mut last)?;
            last == *b"\n"
        };
        let lead = if ends_well { "" } else { "\n" };
        file.write_all(format!("{lead}{entry}\n").as_bytes())
    };
    write().map_err(|source| OutputError::Io { path: path.to_path_buf(), action: "append to it", source })?;
    Ok(())
}
