//! SHA-256 of whole files, with a progress bar.

use super::report::FileHash;
use crate::cli::progress;
use anyhow::Context;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

/// Hashes each file. `total` is the size of all of them.
pub fn files(paths: &[PathBuf], total: u64) -> anyhow::Result<Vec<FileHash>> {
    let bar = progress::bytes(total, "sha256");
    let mut buffer = vec![0; 1 << 20];
    let mut hashes = Vec::new();
    for path in paths {
        let read = || format!("{}: cannot read it", path.display());
        let mut file = File::open(path).with_context(read)?;
        let mut hash = Sha256::new();
        loop {
            let n = file.read(&mut buffer).with_context(read)?;
            if n == 0 {
                break;
            }
            hash.update(&buffer[..n]);
            bar.inc(n as u64);
        }
        let sha256 = hash.finalize().iter().map(|b| format!("{b:02x}")).collect();
        hashes.push(FileHash { file: path.clone(), sha256 });
    }
    bar.finish_and_clear();
    Ok(hashes)
}
