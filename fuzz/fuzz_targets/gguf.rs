//! Any bytes are either a GGUF whose tensors all lie within them, or an error that names the file.
#![no_main]

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use strata_core::gguf::GgufFile;
use strata_core::model::ModelConfig;

fuzz_target!(|data: &[u8]| {
    match GgufFile::from_bytes("fuzz.gguf", Bytes::copy_from_slice(data)) {
        Ok(file) => {
            for t in file.tensors() {
                assert_eq!(file.data(t).len() as u64, t.size);
            }
            for (_, value) in file.metadata().iter() {
                let _ = value.describe();
            }
            let _ = ModelConfig::from_gguf(&file);
        }
        Err(e) => assert!(e.to_string().starts_with("fuzz.gguf: ")),
    }
});
