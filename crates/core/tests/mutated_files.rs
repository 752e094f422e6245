//! Thousands of random mutations of small good files: each is either read, with every tensor inside the file, or refused
//! with an error that names the file. `STRATA_MUTATIONS=20000000` makes it a long run; `fuzz/` holds the same properties
//! as coverage-guided targets.

use bytes::Bytes;
use std::path::{Path, PathBuf};
use strata_core::checkpoint::Checkpoint;
use strata_core::gguf::GgufFile;
use strata_core::model::ModelConfig;

/// A small generator of repeatable random numbers (xorshift64*).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Numbers at which length and offset checks go wrong.
const EDGES: [u64; 12] =
    [0, 1, 31, 32, 255, 1 << 16, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 63, u64::MAX - 31, u64::MAX];

fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        let at = random.below(bytes.len());
        let end = (at + 1 + random.below(40)).min(bytes.len());
        match random.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << random.below(8),
            1 if !bytes.is_empty() => bytes[at] = random.next() as u8,
            2 if bytes.len() >= at + 8 => {
                let edge = EDGES[random.below(EDGES.len())];
                let width = [1, 2, 4, 8][random.below(4)];
                bytes[at..at + width].copy_from_slice(&edge.to_le_bytes()[..width]);
            }
            3 => drop(bytes.drain(at..end)),
            4 => {
                let copy = bytes[at..end].to_vec();
                bytes.splice(at..at, copy);
            }
            5 => bytes.truncate(at),
            _ => {
                let digits = ["0", "1", "9", "-", "[", "]", "{", "}", "\"", ",", "1e99", "null"];
                bytes.splice(at..at, digits[random.below(digits.len())].bytes());
            }
        }
    }
}

fn seed(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds").join(name)).unwrap()
}

/// How many mutations to try: `STRATA_MUTATIONS`, or `usual`.
fn mutations(usual: u64) -> u64 {
    std::env::var("STRATA_MUTATIONS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

#[test]
fn mutated_ggufs_are_read_or_refused() {
    let seed = seed("gguf/small.gguf");
    assert!(GgufFile::from_bytes("mutated.gguf", seed.clone().into()).is_ok());
    let mut random = Random(0x5eed);
    let mut read = 0;
    for _ in 0..mutations(30_000) {
        let mut bytes = seed.clone();
        mutate(&mut bytes, &mut random);
        match GgufFile::from_bytes("mutated.gguf", Bytes::from(bytes)) {
            Ok(file) => {
                read += 1;
                for t in file.tensors() {
                    assert_eq!(file.data(t).len() as u64, t.size);
                }
                let _ = ModelConfig::from_gguf(&file);
            }
            Err(e) => assert!(e.to_string().starts_with("mutated.gguf: "), "{e}"),
        }
    }
    assert!(read > 0, "some mutations are harmless");
}

#[test]
fn mutated_shards_are_read_or_refused() {
    let seed = seed("safetensors/small.safetensors");
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("mutated.safetensors");
    let mut random = Random(0x5eed);
    let mut read = 0;
    for _ in 0..mutations(3_000) {
        let mut bytes = seed.clone();
        mutate(&mut bytes, &mut random);
        std::fs::write(&path, bytes).unwrap();
        match Checkpoint::open(&path) {
            Ok(checkpoint) => {
                read += 1;
                for t in checkpoint.tensors() {
                    assert_eq!(checkpoint.data(t).unwrap().len() * 8, t.elements() * t.dtype.bits());
                }
            }
            Err(e) => assert!(e.to_string().contains("mutated.safetensors: "), "{e}"),
        }
    }
    assert!(read > 0, "some mutations are harmless");
}
