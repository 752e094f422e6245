//! Any bytes are either a safetensors shard whose tensors all lie within them, or an error that names the file.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::path::PathBuf;
use std::sync::LazyLock;
use strata_core::checkpoint::Checkpoint;

static FOLDER: LazyLock<tempfile::TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

fuzz_target!(|data: &[u8]| {
    let path: PathBuf = FOLDER.path().join("fuzz.safetensors");
    std::fs::write(&path, data).expect("a file can be written");
    match Checkpoint::open(&path) {
        Ok(checkpoint) => {
            for t in checkpoint.tensors() {
                let bytes = checkpoint.data(t).expect("a tensor of this checkpoint");
                assert_eq!(bytes.len() * 8, t.elements() * t.dtype.bits());
            }
        }
        Err(e) => assert!(e.to_string().contains("fuzz.safetensors: ")),
    }
});
