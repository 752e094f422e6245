//! The reader against the crate `safetensors` and against folders with shards missing. Broken files are the subject of
//! `tests/hostile_safetensors.rs`.

use super::*;
use safetensors::tensor::{Dtype as Theirs, SafeTensors, TensorView};

/// Writes a shard with the crate `safetensors`.
fn shard(path: &Path, tensors: &[(&str, Theirs, &[usize])]) {
    let sized: Vec<(&str, Vec<u8>, Theirs, &[usize])> = tensors
        .iter()
        .map(|(name, dtype, shape)| {
            let bytes = shape.iter().product::<usize>() * dtype.bitsize() / 8;
            (*name, (0..bytes).map(|i| (i * 7 + name.len()) as u8).collect(), *dtype, *shape)
        })
        .collect();
    let views = sized.iter().map(|(n, data, d, s)| (n.to_string(), TensorView::new(*d, s.to_vec(), data).unwrap()));
    safetensors::serialize_to_file(views, None, path).unwrap();
}

fn three_shards(folder: &Path) {
    shard(&folder.join("a.safetensors"), &[("x", Theirs::BF16, &[2, 3]), ("scalar", Theirs::F32, &[])]);
    shard(&folder.join("b.safetensors"), &[("y", Theirs::F32, &[4, 1, 5]), ("none", Theirs::I64, &[0, 7])]);
    shard(&folder.join("c.safetensors"), &[("mtp.fc.weight", Theirs::F16, &[8])]);
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": {
        "x": "a.safetensors", "scalar": "a.safetensors", "y": "b.safetensors", "none": "b.safetensors",
        "mtp.fc.weight": "c.safetensors"}});
    std::fs::write(folder.join(INDEX_NAME), index.to_string()).unwrap();
    std::fs::write(folder.join("config.json"), r#"{"model_type": "test"}"#).unwrap();
}

#[test]
fn the_safetensors_crate_reads_the_same() {
    let dir = tempfile::tempdir().unwrap();
    three_shards(dir.path());
    let ours = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(ours.tensors().len(), 5);
    assert_eq!(ours.config().unwrap()["model_type"], "test");
    let mut seen = 0;
    for s in 0..ours.shard_count() {
        let bytes = std::fs::read(ours.shard_path(s)).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
            let t = ours.tensor(&name).unwrap();
            assert_eq!((t.shard, t.shape.as_slice()), (s, view.shape()));
            assert_eq!(t.dtype.name(), format!("{:?}", view.dtype()));
            assert_eq!(ours.data(t).unwrap(), view.data());
            seen += 1;
        }
    }
    assert_eq!(seen, 5);
}

#[test]
fn a_folder_its_index_and_its_shards_can_be_opened() {
    let dir = tempfile::tempdir().unwrap();
    three_shards(dir.path());
    let from_index = Checkpoint::open(&dir.path().join(INDEX_NAME)).unwrap();
    assert_eq!(from_index.tensors().len(), 5);
    let one = Checkpoint::open(&dir.path().join("c.safetensors")).unwrap();
    assert_eq!(one.tensors().map(|t| t.name.as_str()).collect::<Vec<_>>(), ["mtp.fc.weight"]);
    assert!(one.config().is_some(), "the configuration beside it is read too");
    std::fs::remove_file(dir.path().join(INDEX_NAME)).unwrap();
    assert_eq!(Checkpoint::open(dir.path()).unwrap().tensors().len(), 5);
}

#[test]
fn missing_shards_are_known_by_name() {
    let dir = tempfile::tempdir().unwrap();
    three_shards(dir.path());
    std::fs::remove_file(dir.path().join("a.safetensors")).unwrap();
    std::fs::remove_file(dir.path().join("b.safetensors")).unwrap();
    let c = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(c.tensors().len(), 1);
    assert_eq!(c.missing_shards(), [("a.safetensors", 2), ("b.safetensors", 2)].into());
    assert_eq!(c.absent_tensors().find(|t| t.0 == "y"), Some(("y", "b.safetensors")));
}
