//! Reader and writer against each other, against hand-made bytes, and against another reader.

use super::*;
use crate::output::OutputError;
use bytes::Bytes;
use std::path::Path;
use strata_kernels::format::TensorType;

fn every_type() -> Metadata {
    let mut m = Metadata::new("test");
    m.set("general.architecture", Value::String("test".into()));
    m.set("u8", Value::U8(200));
    m.set("i8", Value::I8(-3));
    m.set("u16", Value::U16(60_000));
    m.set("i16", Value::I16(-30_000));
    m.set("u32", Value::U32(4_000_000_000));
    m.set("i32", Value::I32(-7));
    m.set("u64", Value::U64(u64::MAX));
    m.set("i64", Value::I64(i64::MIN));
    m.set("f32", Value::F32(1.5e-6));
    m.set("f64", Value::F64(std::f64::consts::PI));
    m.set("bool", Value::Bool(true));
    m.set("string", Value::String("héllo\0\n".into()));
    m.set("strings", Value::Array(Array::String(vec!["".into(), "Ġa".into()])));
    m.set("empty", Value::Array(Array::F64(vec![])));
    m.set("bools", Value::Array(Array::Bool(vec![true, false])));
    m.set("i32s", Value::Array(Array::I32(vec![1, -2, 3])));
    m.set("f32s", Value::Array(Array::F32(vec![0.5, -0.0])));
    let inner = Array::Array(vec![Array::U8(vec![1, 2]), Array::String(vec!["x".into()])]);
    m.set("nested", Value::Array(Array::Array(vec![inner, Array::I64(vec![])])));
    m
}

fn decl(name: &str, dims: &[u64], ty: TensorType) -> TensorDecl {
    TensorDecl { name: name.into(), dims: dims.into(), ty }
}

fn some_tensors() -> Vec<TensorDecl> {
    vec![
        decl("a.weight", &[256, 3], TensorType::Q4_K),
        decl("b.bias", &[5], TensorType::F32),
        decl("c.weight", &[32, 2, 4], TensorType::Q8_0),
        decl("d.weight", &[7, 3], TensorType::BF16),
    ]
}

fn data_of(t: &TensorDecl) -> Vec<u8> {
    let seed = t.name.as_bytes()[0] as usize;
    (0..t.size().unwrap() as usize).map(|i| (i * 31 + seed) as u8).collect()
}

fn write(path: &Path, metadata: &Metadata, options: &WriterOptions) -> Result<Vec<std::path::PathBuf>, GgufError> {
    let mut w = GgufWriter::create(path, metadata, some_tensors(), options)?;
    for t in some_tensors() {
        let data = data_of(&t);
        let (a, b) = data.split_at(data.len() / 3);
        w.write(&t.name, a)?;
        w.write(&t.name, b)?;
    }
    w.finish()
}

fn check_content(f: &GgufFile) {
    assert_eq!(f.tensors().len(), 4);
    for t in some_tensors() {
        let info = f.tensor(&t.name).unwrap();
        assert_eq!((&info.dims, info.ty), (&t.dims, t.ty));
        assert_eq!(info.offset % f.alignment(), 0);
        assert_eq!(f.data(info), data_of(&t), "{}", t.name);
    }
}

#[test]
fn what_is_written_is_read_back_with_its_types_and_order() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    for alignment in [None, Some(8), Some(64), Some(4096), Some(24)] {
        let mut m = every_type();
        if let Some(a) = alignment {
            m.set("general.alignment", Value::U32(a));
        }
        write(&path, &m, &WriterOptions { force: true, ..Default::default() }).unwrap();
        let f = GgufFile::open(&path).unwrap();
        assert_eq!(f.version(), 3);
        assert_eq!(f.alignment(), alignment.unwrap_or(32) as u64);
        assert_eq!(f.metadata().iter().collect::<Vec<_>>(), m.iter().collect::<Vec<_>>());
        check_content(&f);

        let bytes = std::fs::read(&path).unwrap();
        check_content(&GgufFile::from_bytes("in memory", bytes.into()).unwrap());
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn version_2_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write(&path, &every_type(), &WriterOptions::default()).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[4] = 2;
    let f = GgufFile::from_bytes("v2", bytes.into()).unwrap();
    assert_eq!(f.version(), 2);
    check_content(&f);
}

#[test]
fn a_split_model_is_one_model_whichever_part_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("Qwen3.6.gguf");
    let options = WriterOptions { split_max_size: Some(1500), ..Default::default() };
    let mut m = every_type();
    m.set("split.count", Value::U16(9));
    let paths = write(&path, &m, &options).unwrap();
    assert!(paths.len() > 1, "{paths:?}");
    assert_eq!(paths[0].file_name().unwrap().to_str().unwrap(), format!("Qwen3.6-00001-of-{:05}.gguf", paths.len()));
    for p in &paths {
        let f = GgufFile::open(p).unwrap();
        assert_eq!(f.paths(), paths);
        assert_eq!(f.metadata().u32("u32").unwrap(), 4_000_000_000);
        check_content(&f);
    }
    std::fs::remove_file(&paths[1]).unwrap();
    let error = GgufFile::open(&paths[0]).err().unwrap().to_string();
    assert!(error.contains("-00002-of-") && error.contains("cannot open"), "{error}");
    std::fs::copy(&paths[0], &paths[1]).unwrap();
    let error = GgufFile::open(&paths[0]).err().unwrap().to_string();
    assert!(error.contains("split.no"), "{error}");
    let error = GgufFile::from_bytes("part", std::fs::read(&paths[0]).unwrap().into()).err().unwrap().to_string();
    assert!(error.contains("one part of"), "{error}");
}

#[test]
fn an_existing_output_is_kept_without_force() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, "precious").unwrap();
    let error = write(&path, &every_type(), &WriterOptions::default()).unwrap_err();
    assert!(matches!(error, GgufError::Output(OutputError::Exists { .. })), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");

    // It appears while the model is being written.
    std::fs::remove_file(&path).unwrap();
    let mut w = GgufWriter::create(&path, &every_type(), vec![], &WriterOptions::default()).unwrap();
    assert!(w.write("a", &[]).is_err());
    std::fs::write(&path, "precious").unwrap();
    assert!(matches!(w.finish(), Err(GgufError::Output(OutputError::Exists { .. }))));
    assert_eq!(std::fs::read(&path).unwrap(), b"precious");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn an_unfinished_output_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut w = GgufWriter::create(&path, &every_type(), some_tensors(), &WriterOptions::default()).unwrap();
    w.write("a.weight", &data_of(&some_tensors()[0])).unwrap();
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "it is written beside its final name");
    assert!(!path.exists());
    let error = w.finish().unwrap_err().to_string();
    assert!(error.contains("0 of the 20 bytes of 'b.bias'"), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn data_out_of_order_or_too_long_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut w = GgufWriter::create(&path, &every_type(), some_tensors(), &WriterOptions::default()).unwrap();
    assert!(w.write("b.bias", &[0; 4]).unwrap_err().to_string().contains("'a.weight' is due"));
    assert!(w.write("a.weight", &[0; 433]).unwrap_err().to_string().contains("takes 432 bytes"));
    let bad = [
        vec![decl("a", &[100], TensorType::Q4_K)],
        vec![decl("a", &[1], TensorType::F32), decl("a", &[1], TensorType::F32)],
        vec![decl("a", &[], TensorType::F32)],
        vec![decl("a", &[u64::MAX, 2], TensorType::F32)],
    ];
    for tensors in bad {
        let error = GgufWriter::create(&path, &every_type(), tensors, &WriterOptions::default()).err().unwrap();
        assert!(matches!(error, GgufError::Write { .. }), "{error}");
    }
}

#[test]
fn a_model_larger_than_the_disk_is_refused_before_writing() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = vec![decl("a", &[1 << 50], TensorType::F32)];
    let path = dir.path().join("m.gguf");
    let error = GgufWriter::create(&path, &every_type(), tensors, &WriterOptions::default()).err().unwrap();
    assert!(matches!(error, GgufError::NoSpace { needed, .. } if needed > 1 << 52), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn getters_name_key_expected_and_found() {
    let m = every_type();
    assert_eq!(m.u32("u8").unwrap(), 200);
    assert_eq!(m.u64("u64").unwrap(), u64::MAX);
    assert_eq!(m.f32("u16").unwrap(), 60_000.0);
    assert_eq!(m.i32_array("i32s").unwrap(), [1, -2, 3]);
    assert_eq!(m.u32_opt("absent").unwrap(), None);
    assert_eq!(m.strings("strings").unwrap()[1], "Ġa");
    let error = |e: Result<u32, GgufError>| e.unwrap_err().to_string();
    assert_eq!(error(m.u32("i32")), "test: metadata key 'i32': expected an integer (u32), found i32 -7");
    assert_eq!(error(m.u32("absent")), "test: metadata key 'absent' is missing (expected an integer (u32))");
    assert!(error(m.u32("strings")).ends_with("found array of 2 string"));
    assert!(m.u32_array("i32s").unwrap_err().to_string().contains("'i32s'"));
}

#[test]
fn every_truncation_is_an_error_that_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    write(&path, &every_type(), &WriterOptions::default()).unwrap();
    let bytes = Bytes::from(std::fs::read(&path).unwrap());
    // The last tensor is 42 bytes and padded to 64.
    for len in 0..bytes.len() - 22 {
        let error =
            GgufFile::from_bytes("cut.gguf", bytes.slice(..len)).err().unwrap_or_else(|| panic!("{len} is read"));
        assert!(error.to_string().starts_with("cut.gguf: "), "{error}");
    }
}

/// What `gguf-rs` 0.1.8 can read: no nested arrays; its sizes of BF16 are wrong.
#[test]
fn another_reader_sees_the_same_model() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let mut metadata = every_type();
    metadata.remove("nested");
    write(&path, &metadata, &WriterOptions::default()).unwrap();
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/tiny.gguf");
    for path in [path, bundled] {
        let ours = GgufFile::open(&path).unwrap();
        let theirs = gguf_rs::get_gguf_container(path.to_str().unwrap()).unwrap().decode().unwrap();
        assert_eq!(theirs.num_tensor() as usize, ours.tensors().len());
        assert_eq!(theirs.num_kv() as usize, ours.metadata().len());
        for (a, b) in ours.tensors().iter().zip(theirs.tensors()) {
            assert_eq!((&a.name, a.ty.ggml_id(), &a.dims), (&b.name, b.kind, &b.shape));
            assert_eq!(a.offset, theirs.data_offset() + b.offset, "{}", a.name);
            if a.ty != TensorType::BF16 {
                assert_eq!(a.size, b.size, "{}", a.name);
            }
        }
        for (key, value) in ours.metadata().iter() {
            let other = &theirs.metadata()[key];
            match value {
                Value::String(s) => assert_eq!(other.as_str(), Some(s.as_str()), "{key}"),
                Value::F32(v) => assert_eq!(other.as_f64().unwrap() as f32, *v, "{key}"),
                Value::I64(v) => assert_eq!(other.as_i64(), Some(*v), "{key}"),
                Value::U32(v) => assert_eq!(other.as_u64(), Some(*v as u64), "{key}"),
                _ => {}
            }
        }
    }
}
