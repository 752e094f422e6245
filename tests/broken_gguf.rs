//! Broken GGUF files: each gives one clear error that names the file and the field, exit code 2, quickly, in little
//! memory and without a panic.
//!
//! Every case is the bundled model's header with one thing wrong, followed by as many zero bytes as the model has data (a
//! sparse file). The header is written by code of its own, so that it can be wrong in ways the writer refuses.

mod limits;

use limits::Limited;
use std::path::{Path, PathBuf};
use strata_core::gguf::{Array, GgufFile, Value};

const U8: u32 = 0;
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;

/// A header, field by field.
#[derive(Clone)]
struct Header {
    magic: Vec<u8>,
    version: u32,
    n_tensors: u64,
    n_keys: u64,
    keys: Vec<(Vec<u8>, u32, Vec<u8>)>,
    tensors: Vec<Tensor>,
    /// Bytes of tensor data behind the header.
    data: u64,
    /// Cuts the file to this many bytes.
    cut: Option<u64>,
}

#[derive(Clone)]
struct Tensor {
    name: Vec<u8>,
    n_dims: u32,
    dims: Vec<u64>,
    ty: u32,
    offset: u64,
}

fn bytes_of_string(s: &[u8]) -> Vec<u8> {
    [&(s.len() as u64).to_le_bytes()[..], s].concat()
}

fn array_of(ty: u32, n: u64, payload: &[u8]) -> Vec<u8> {
    [&ty.to_le_bytes()[..], &n.to_le_bytes(), payload].concat()
}

fn encode(value: &Value) -> (u32, Vec<u8>) {
    match value {
        Value::U32(v) => (U32, v.to_le_bytes().into()),
        Value::I32(v) => (I32, v.to_le_bytes().into()),
        Value::F32(v) => (F32, v.to_le_bytes().into()),
        Value::Bool(v) => (BOOL, vec![*v as u8]),
        Value::String(v) => (STRING, bytes_of_string(v.as_bytes())),
        Value::Array(Array::Bool(v)) => {
            (ARRAY, array_of(BOOL, v.len() as u64, &v.iter().map(|b| *b as u8).collect::<Vec<_>>()))
        }
        Value::Array(Array::I32(v)) => {
            (ARRAY, array_of(I32, v.len() as u64, &v.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>()))
        }
        Value::Array(Array::String(v)) => {
            let payload: Vec<u8> = v.iter().flat_map(|s| bytes_of_string(s.as_bytes())).collect();
            (ARRAY, array_of(STRING, v.len() as u64, &payload))
        }
        other => panic!("the bundled model has a {}, which this test cannot write yet", other.describe()),
    }
}

impl Header {
    fn of_the_bundled_model() -> Header {
        let file = GgufFile::open(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/tiny.gguf")).unwrap();
        let start = file.tensors().iter().map(|t| t.offset).min().unwrap();
        let tensors: Vec<Tensor> = file
            .tensors()
            .iter()
            .map(|t| Tensor {
                name: t.name.clone().into(),
                n_dims: t.dims.len() as u32,
                dims: t.dims.clone(),
                ty: t.ty.ggml_id(),
                offset: t.offset - start,
            })
            .collect();
        let key = |(k, v): (&str, &Value)| {
            let (ty, payload) = encode(v);
            (k.as_bytes().to_vec(), ty, payload)
        };
        let keys: Vec<_> = file.metadata().iter().map(key).collect();
        Header {
            magic: b"GGUF".to_vec(),
            version: 3,
            n_tensors: tensors.len() as u64,
            n_keys: keys.len() as u64,
            keys,
            tensors,
            data: file.total_bytes() - start,
            cut: None,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.clone();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.to_le_bytes());
        out.extend(self.n_keys.to_le_bytes());
        for (key, ty, payload) in &self.keys {
            out.extend(bytes_of_string(key));
            out.extend(ty.to_le_bytes());
            out.extend(payload);
        }
        for t in &self.tensors {
            out.extend(bytes_of_string(&t.name));
            out.extend(t.n_dims.to_le_bytes());
            out.extend(t.dims.iter().flat_map(|d| d.to_le_bytes()));
            out.extend(t.ty.to_le_bytes());
            out.extend(t.offset.to_le_bytes());
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out
    }

    fn write(&self, path: &Path) {
        let header = self.bytes();
        std::fs::write(path, &header).unwrap();
        let file = std::fs::File::options().write(true).open(path).unwrap();
        file.set_len(self.cut.unwrap_or(header.len() as u64 + self.data)).unwrap();
    }

    /// Appends a key.
    fn add(&mut self, key: &str, ty: u32, payload: Vec<u8>) {
        self.keys.push((key.into(), ty, payload));
        self.n_keys += 1;
    }

    /// Replaces the value of a key.
    fn set(&mut self, key: &str, ty: u32, payload: Vec<u8>) {
        let entry = self.keys.iter_mut().find(|k| k.0 == key.as_bytes()).unwrap();
        (entry.1, entry.2) = (ty, payload);
    }

    fn set_u32(&mut self, key: &str, value: u32) {
        self.set(&format!("qwen35moe.{key}"), U32, value.to_le_bytes().into());
    }

    fn remove(&mut self, key: &str) {
        let before = self.keys.len();
        self.keys.retain(|k| k.0 != key.as_bytes());
        assert_eq!(self.keys.len(), before - 1, "{key}");
        self.n_keys -= 1;
    }

    fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name.as_bytes()).unwrap()
    }

    fn remove_tensor(&mut self, name: &str) {
        let before = self.tensors.len();
        self.tensors.retain(|t| t.name != name.as_bytes());
        assert_eq!(self.tensors.len(), before - 1, "{name}");
        self.n_tensors -= 1;
    }
}

/// What is broken, what the error must name, and how it is broken.
type Case = (&'static str, &'static str, fn(&mut Header));

const Q: &str = "blk.3.attn_q.weight";

/// Files that are no valid GGUF.
const FORMAT: &[Case] = &[
    ("empty file", "magic", |h| h.cut = Some(0)),
    ("three bytes", "magic", |h| h.cut = Some(3)),
    ("another magic", "magic", |h| h.magic = b"GGML".to_vec()),
    ("version 0", "version", |h| h.version = 0),
    ("version 1", "version", |h| h.version = 1),
    ("version 4", "version", |h| h.version = 4),
    ("big-endian version", "big-endian", |h| h.version = 3u32.swap_bytes()),
    ("cut in the version", "version", |h| h.cut = Some(6)),
    ("cut in the tensor count", "tensor count", |h| h.cut = Some(12)),
    ("cut in the metadata count", "count", |h| h.cut = Some(20)),
    ("cut after the counts", "count", |h| h.cut = Some(24)),
    ("tensor count of 2^64 - 1", "tensor count", |h| h.n_tensors = u64::MAX),
    ("tensor count of 2^40", "tensor count", |h| h.n_tensors = 1 << 40),
    ("one tensor too many", "tensor", |h| h.n_tensors += 1),
    ("metadata count of 2^63", "metadata count", |h| h.n_keys = 1 << 63),
    ("metadata count of 2^33", "metadata count", |h| h.n_keys = 1 << 33),
    ("one key too many", "", |h| h.n_keys += 1),
    ("one key too few", "", |h| h.n_keys -= 1),
    ("key length of 2^64 - 1", "metadata key 1", |h| {
        h.keys.truncate(0);
        h.magic = [b"GGUF", &3u32.to_le_bytes()[..], &[0; 8], &1u64.to_le_bytes(), &[255; 8]].concat();
    }),
    ("empty key", "metadata key 44", |h| h.add("", U8, vec![1])),
    ("key that is no UTF-8", "metadata key 44", |h| {
        h.keys.push((vec![0xff, 0xfe], U8, vec![1]));
        h.n_keys += 1;
    }),
    ("duplicate key", "'general.name'", |h| h.add("general.name", STRING, bytes_of_string(b"again"))),
    ("value type 13", "'x'", |h| h.add("x", 13, vec![0; 8])),
    ("value type 2^32 - 1", "'x'", |h| h.add("x", u32::MAX, vec![0; 8])),
    ("bool of 7", "'x'", |h| h.add("x", BOOL, vec![7])),
    ("bool array with a 2", "'x'", |h| h.add("x", ARRAY, array_of(BOOL, 3, &[0, 1, 2]))),
    ("string length of 2^64 - 1", "'x'", |h| h.add("x", STRING, u64::MAX.to_le_bytes().into())),
    ("string longer than the file", "'x'", |h| h.add("x", STRING, (1u64 << 32).to_le_bytes().into())),
    ("string that is no UTF-8", "'x'", |h| h.add("x", STRING, bytes_of_string(&[b'a', 0x80]))),
    ("array of 2^61 u64", "'x'", |h| h.add("x", ARRAY, array_of(U64, 1 << 61, &[]))),
    ("array of 2^64 - 1 bytes", "'x'", |h| h.add("x", ARRAY, array_of(U8, u64::MAX, &[]))),
    ("array of 2^40 strings", "'x'", |h| h.add("x", ARRAY, array_of(STRING, 1 << 40, &[]))),
    ("array of an unknown type", "'x'", |h| h.add("x", ARRAY, array_of(99, 1, &[0; 8]))),
    ("string array with one length too large", "element 1", |h| {
        let payload = [bytes_of_string(b"ok"), (1u64 << 50).to_le_bytes().into()].concat();
        h.add("x", ARRAY, array_of(STRING, 2, &payload));
    }),
    ("arrays nested 10,000 deep", "nest", |h| {
        let payload = array_of(ARRAY, 1, &[]).repeat(10_000);
        h.add("x", ARRAY, payload);
    }),
    ("array of 2^50 arrays", "'x'", |h| h.add("x", ARRAY, array_of(ARRAY, 1 << 50, &[]))),
    ("alignment 0", "general.alignment", |h| h.add("general.alignment", U32, 0u32.to_le_bytes().into())),
    ("alignment 33", "general.alignment", |h| h.add("general.alignment", U32, 33u32.to_le_bytes().into())),
    ("alignment 2^31", "general.alignment", |h| h.add("general.alignment", U32, (1u32 << 31).to_le_bytes().into())),
    ("alignment as a string", "general.alignment", |h| h.add("general.alignment", STRING, bytes_of_string(b"32"))),
    ("tensor without a name", "name of tensor", |h| h.tensor(Q).name.clear()),
    ("tensor name that is no UTF-8", "name of tensor", |h| h.tensor(Q).name = vec![0xc0, 0x00]),
    ("tensor name of 5,000 bytes", "name of tensor", |h| h.tensor(Q).name = vec![b'a'; 5000]),
    ("duplicate tensor", Q, |h| h.tensor("blk.3.attn_k.weight").name = Q.into()),
    ("no dimensions", Q, |h| (h.tensor(Q).n_dims, h.tensor(Q).dims) = (0, vec![])),
    ("5 dimensions", Q, |h| (h.tensor(Q).n_dims, h.tensor(Q).dims) = (5, vec![1; 5])),
    ("2^32 - 1 dimensions", Q, |h| h.tensor(Q).n_dims = u32::MAX),
    ("dimension 0", Q, |h| h.tensor(Q).dims[1] = 0),
    ("dimensions whose product overflows", Q, |h| h.tensor(Q).dims = vec![1 << 40, 1 << 40]),
    ("dimension of 2^64 - 1", Q, |h| h.tensor(Q).dims[1] = u64::MAX),
    ("dimension that makes it larger than the file", Q, |h| h.tensor(Q).dims[1] = 1 << 30),
    ("row that is no multiple of the block", Q, |h| h.tensor(Q).dims[0] = 250),
    ("tensor type 200", Q, |h| h.tensor(Q).ty = 200),
    ("tensor type 4, which ggml removed", Q, |h| h.tensor(Q).ty = 4),
    ("offset that is not aligned", Q, |h| h.tensor(Q).offset += 1),
    ("offset of 2^64 - 32", Q, |h| h.tensor(Q).offset = u64::MAX - 31),
    ("offset past the end", Q, |h| h.tensor(Q).offset = 1 << 40),
    ("offset of another tensor", "overlap", |h| h.tensor(Q).offset = 0),
    ("no data", "offset", |h| h.data = 0),
    ("half of the data", "offset", |h| h.data /= 2),
    ("last byte of the data missing", "offset", |h| h.data -= 32),
    ("data cut at a page border", "offset", |h| h.cut = Some(4096 * 1000)),
    ("cut within the metadata", "tokenizer.ggml", |h| h.cut = Some(60_000)),
    ("cut within the tensor list", "tensor", |h| h.cut = Some(h.bytes().len() as u64 - 100)),
    ("split part without the others", "file name", |h| {
        h.add("split.no", U32, 0u32.to_le_bytes().into());
        h.add("split.count", U32, 3u32.to_le_bytes().into());
    }),
    ("split part 2 under the name of a whole model", "split.no", |h| {
        h.add("split.no", U32, 1u32.to_le_bytes().into());
        h.add("split.count", U32, 2u32.to_le_bytes().into());
    }),
    ("split into 2^32 - 1 parts", "split.count", |h| h.add("split.count", U32, u32::MAX.to_le_bytes().into())),
    ("split count as a string", "split.count", |h| h.add("split.count", STRING, bytes_of_string(b"2"))),
];

/// Valid GGUF files that hold no usable model.
const MODEL: &[Case] = &[
    ("no architecture", "general.architecture", |h| h.remove("general.architecture")),
    ("architecture as a number", "general.architecture", |h| h.set("general.architecture", U32, vec![1, 0, 0, 0])),
    ("no block count", "block_count", |h| h.remove("qwen35moe.block_count")),
    ("block count 0", "block_count", |h| h.set_u32("block_count", 0)),
    ("block count 2^32 - 1", "block_count", |h| h.set_u32("block_count", u32::MAX)),
    ("block count as a string", "block_count", |h| h.set("qwen35moe.block_count", STRING, bytes_of_string(b"5"))),
    ("more used experts than experts", "expert_used_count", |h| h.set_u32("expert_used_count", 9)),
    ("no used experts", "expert_used_count", |h| h.set_u32("expert_used_count", 0)),
    ("more experts than the tensors hold", "blk.0", |h| h.set_u32("expert_count", 16)),
    ("another width", "token_embd", |h| h.set_u32("embedding_length", 512)),
    ("width 0", "embedding_length", |h| h.set_u32("embedding_length", 0)),
    ("more heads than the tensors hold", Q, |h| h.set_u32("attention.head_count", 8)),
    ("no KV heads", "head_count_kv", |h| h.set_u32("attention.head_count_kv", 0)),
    ("KV heads that do not divide the heads", "head_count_kv", |h| h.set_u32("attention.head_count_kv", 3)),
    ("value width unlike key width", "value_length", |h| h.set_u32("attention.value_length", 32)),
    ("rope over more than the head", "rope.dimension_count", |h| h.set_u32("rope.dimension_count", 128)),
    ("rope sections that do not add up", "rope.dimension_sections", |h| {
        let sections = [9i32, 9, 9, 0].iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>();
        h.set("qwen35moe.rope.dimension_sections", ARRAY, array_of(I32, 4, &sections));
    }),
    ("rope base of NaN", "rope.freq_base", |h| h.set("qwen35moe.rope.freq_base", F32, f32::NAN.to_le_bytes().into())),
    ("epsilon of minus one", "layer_norm_rms_epsilon", |h| {
        h.set("qwen35moe.attention.layer_norm_rms_epsilon", F32, (-1f32).to_le_bytes().into());
    }),
    ("value heads that are no multiple of the key heads", "time_step_rank", |h| h.set_u32("ssm.time_step_rank", 7)),
    ("inner size that does not divide", "inner_size", |h| h.set_u32("ssm.inner_size", 511)),
    ("conv kernel of 4,000", "conv_kernel", |h| h.set_u32("ssm.conv_kernel", 4000)),
    ("layer kinds for two layers only", "recurrent_layers", |h| {
        h.set("qwen35moe.attention.recurrent_layers", ARRAY, array_of(BOOL, 2, &[1, 0]));
    }),
    ("layer kinds the tensors contradict", "blk.3", |h| {
        h.set("qwen35moe.attention.recurrent_layers", ARRAY, array_of(BOOL, 5, &[1; 5]));
    }),
    ("no embedding", "token_embd.weight", |h| h.remove_tensor("token_embd.weight")),
    ("embedding of three dimensions", "token_embd.weight", |h| {
        (h.tensor("token_embd.weight").n_dims, h.tensor("token_embd.weight").dims) = (3, vec![256, 3072, 2]);
    }),
    ("a missing tensor in layer 1", "blk.1.ssm_a", |h| h.remove_tensor("blk.1.ssm_a")),
    ("a missing expert tensor", "blk.2.ffn_down_exps.weight", |h| h.remove_tensor("blk.2.ffn_down_exps.weight")),
    ("a missing norm", "output_norm.weight", |h| h.remove_tensor("output_norm.weight")),
    ("a matrix of another shape", Q, |h| h.tensor(Q).dims = vec![512, 256]),
    ("a norm of another width", "blk.0.attn_norm.weight", |h| h.tensor("blk.0.attn_norm.weight").dims = vec![128]),
    ("a context of 0", "context_length", |h| h.set_u32("context_length", 0)),
];

/// Runs one command on a file and checks how it fails.
fn fails_well(args: &[&str], path: &Path, field: &str, what: &str) {
    let out = Limited::strata(args);
    let command = args[0];
    let name = path.file_name().unwrap().to_str().unwrap();
    assert_eq!(out.code, Some(2), "{what}: {command} ended with {:?}: {}", out.code, out.stderr);
    let errors: Vec<_> = out.stderr.lines().filter(|l| l.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{what}: {command}: one error, not {:?}", out.stderr);
    assert!(out.stderr.contains(name), "{what}: {command} does not name the file: {}", out.stderr);
    assert!(out.stderr.contains(field), "{what}: {command} does not name '{field}': {}", out.stderr);
    assert!(!out.stderr.contains("panicked"), "{what}: {command}: {}", out.stderr);
    out.assert_small_and_quick(what);
}

/// Breaks the bundled model in every way of a list and runs the commands on each.
fn check(cases: &[Case]) {
    let dir = tempfile::tempdir().unwrap();
    let good = Header::of_the_bundled_model();
    for (i, (what, field, break_it)) in cases.iter().enumerate() {
        let path: PathBuf = dir.path().join(format!("broken{i}.gguf"));
        let mut header = good.clone();
        break_it(&mut header);
        header.write(&path);
        for args in COMMANDS {
            let args: Vec<&str> = args.iter().map(|a| if *a == "FILE" { path.to_str().unwrap() } else { a }).collect();
            fails_well(&args, &path, field, what);
        }
        std::fs::remove_file(&path).unwrap();
    }
}

/// The commands that read model files; FILE stands for the file.
const COMMANDS: &[&[&str]] =
    &[&["inspect", "FILE"], &["run", "-m", "FILE", "--raw", "-p", "x", "-n", "1", "-t", "1", "--vision", "no"]];

#[test]
fn the_unbroken_header_is_a_good_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("good.gguf");
    Header::of_the_bundled_model().write(&path);
    for args in COMMANDS {
        let args: Vec<&str> = args.iter().map(|a| if *a == "FILE" { path.to_str().unwrap() } else { a }).collect();
        let out = Limited::strata(&args);
        assert_eq!(out.code, Some(0), "{}", out.stderr);
    }
}

#[test]
fn files_that_are_no_valid_gguf_are_refused() {
    assert!(FORMAT.len() + MODEL.len() >= 60);
    check(FORMAT);
}

#[test]
fn models_whose_geometry_does_not_add_up_are_refused() {
    check(MODEL);
}

#[test]
fn a_header_that_promises_gigabytes_costs_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("huge.gguf");
    let mut header = Header::of_the_bundled_model();
    header.add("x", ARRAY, array_of(STRING, 1 << 36, &[]));
    header.data = 1 << 40;
    header.write(&path);
    fails_well(&["inspect", path.to_str().unwrap()], &path, "'x'", "a sparse terabyte");
}
