//! Original model checkpoints: a folder of safetensors shards with `config.json`, an index file, or a single shard.
//!
//! The header of a shard is parsed by our own code rather than by the crate `safetensors`: that one keeps the last of two
//! tensors with the same name and does not say which tensor an offset error is about. A test checks the two against each
//! other on good files.
//!
//! Shards are memory-mapped and only their headers are read on opening. Lengths and offsets are checked against the file
//! before anything is allocated. This module knows nothing of what the tensors mean.

mod dtype;
mod error;
mod index;
mod shard;

pub use dtype::Dtype;
pub use error::CheckpointError;

use bytes::Bytes;
use shard::Shard;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// The name of the index file in a folder.
pub const INDEX_NAME: &str = "model.safetensors.index.json";

/// One tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct StTensor {
    /// The name, e.g. `model.language_model.layers.0.input_layernorm.weight`.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Sizes, row-major: the last one varies fastest. Empty for a single number.
    pub shape: Vec<usize>,
    /// Which shard holds it, an index for [`Checkpoint::shard_path`].
    pub shard: usize,
    /// Where its data starts and ends in the shard, in bytes from the start of the file.
    range: (usize, usize),
}

impl StTensor {
    /// The number of elements.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes of data.
    pub fn bytes(&self) -> usize {
        self.range.1 - self.range.0
    }

    /// The shape as people write it, e.g. `[256, 2048]`.
    pub fn shape_text(&self) -> String {
        format!("{:?}", self.shape)
    }
}

/// An opened checkpoint.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    folder: PathBuf,
    config: Option<serde_json::Value>,
    shards: Vec<Shard>,
    tensors: Vec<StTensor>,
    by_name: HashMap<String, usize>,
    /// Tensors the index lists in shards that are not there, with the name of the shard.
    absent: BTreeMap<String, String>,
    /// Bytes of all tensors by the index.
    indexed_bytes: Option<u64>,
}

impl Checkpoint {
    /// Opens a folder, an index file (`*.safetensors.index.json`) or a single `.safetensors` file.
    ///
    /// Shards that the index names but that are not there are no error here, so that the head can be taken from the one
    /// shard that holds it: see [`Checkpoint::missing_shards`]. The files must not be changed while they are open: they
    /// are read through memory maps.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        let meta = std::fs::metadata(path).map_err(|e| CheckpointError::io(path, "open it", e))?;
        let (folder, index, files) = if meta.is_dir() {
            let index = path.join(INDEX_NAME);
            if index.symlink_metadata().is_ok() {
                (path.to_path_buf(), Some(index), vec![])
            } else {
                (path.to_path_buf(), None, shard::files_in(path)?)
            }
        } else {
            let folder = match path.parent() {
                Some(p) if !p.as_os_str().is_empty() => p.to_path_buf(),
                _ => PathBuf::from("."),
            };
            if path.extension().is_some_and(|e| e == "json") {
                (folder, Some(path.to_path_buf()), vec![])
            } else {
                (folder, None, vec![path.to_path_buf()])
            }
        };
        let mut checkpoint = Checkpoint {
            path: path.to_path_buf(),
            config: index::read_config(&folder)?,
            folder,
            shards: Vec::new(),
            tensors: Vec::new(),
            by_name: HashMap::new(),
            absent: BTreeMap::new(),
            indexed_bytes: None,
        };
        match index {
            Some(index) => checkpoint.open_index(&index)?,
            None => {
                for file in files {
                    checkpoint.open_shard(&file)?;
                }
            }
        }
        Ok(checkpoint)
    }

    /// Opens the shards an index names and checks both against each other.
    fn open_index(&mut self, path: &Path) -> Result<(), CheckpointError> {
        let (index, bytes) = index::read_index(path)?;
        self.indexed_bytes = bytes;
        let mut shards: BTreeMap<&str, bool> = BTreeMap::new();
        for shard in index.values() {
            shards.entry(shard).or_insert(false);
        }
        for (shard, there) in shards.iter_mut() {
            let file = self.folder.join(shard);
            *there = file.symlink_metadata().is_ok();
            if *there {
                self.open_shard(&file)?;
            }
        }
        for (name, shard) in &index {
            if !shards[shard.as_str()] {
                self.absent.insert(name.clone(), shard.clone());
                continue;
            }
            let found = match self.tensor(name) {
                None => "no such tensor in it".to_string(),
                Some(t) if self.shards[t.shard].path != self.folder.join(shard) => {
                    format!("it in {}", self.shards[t.shard].path.display())
                }
                Some(_) => continue,
            };
            return Err(CheckpointError::malformed(
                path,
                format!("weight_map entry '{name}'"),
                format!("it in '{shard}'"),
                found,
            ));
        }
        if let Some(t) = self.tensors.iter().find(|t| !index.contains_key(&t.name)) {
            let expected = format!("the index {} to list it", path.display());
            let file = &self.shards[t.shard].path;
            return Err(CheckpointError::malformed(
                file,
                format!("tensor '{}'", t.name),
                expected,
                "it is not listed".into(),
            ));
        }
        Ok(())
    }

    fn open_shard(&mut self, path: &Path) -> Result<(), CheckpointError> {
        let (shard, tensors) = Shard::open(path, self.shards.len())?;
        for t in tensors {
            if let Some(&other) = self.by_name.get(&t.name) {
                let other = self.shards[self.tensors[other].shard].path.display().to_string();
                let field = format!("tensor '{}'", t.name);
                return Err(CheckpointError::malformed(
                    path,
                    field,
                    "each tensor in one shard".into(),
                    format!("it also in {other}"),
                ));
            }
            self.by_name.insert(t.name.clone(), self.tensors.len());
            self.tensors.push(t);
        }
        self.shards.push(shard);
        Ok(())
    }

    /// The path as it was given, for messages.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder that holds the shards, `config.json` and the tokenizer files.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The content of `config.json`, where there is one.
    pub fn config(&self) -> Option<&serde_json::Value> {
        self.config.as_ref()
    }

    /// The tensors of all shards that are there, in the order of their data, shard after shard.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = &StTensor> {
        self.tensors.iter()
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&StTensor> {
        self.by_name.get(name).map(|&i| &self.tensors[i])
    }

    /// The data of a tensor of this checkpoint: little-endian, row-major, a view into the map. It may start at any
    /// address. Fails when `t` does not lie in this checkpoint.
    pub fn data(&self, t: &StTensor) -> Result<Bytes, CheckpointError> {
        let shard = self.shards.get(t.shard).filter(|s| t.range.0 <= t.range.1 && t.range.1 <= s.data.len());
        shard.map(|s| s.data.slice(t.range.0..t.range.1)).ok_or_else(|| {
            let field = format!("tensor '{}'", t.name);
            CheckpointError::malformed(&self.path, field, "a tensor of this checkpoint".into(), "another one's".into())
        })
    }

    /// The files that hold tensors.
    pub fn shard_path(&self, shard: usize) -> &Path {
        &self.shards[shard].path
    }

    /// How many shards are there.
    pub fn shard_count(&self) -> usize {
        self.shards.len()
    }

    /// Shards the index names that are not there, with the number of tensors in each.
    pub fn missing_shards(&self) -> BTreeMap<&str, usize> {
        let mut missing = BTreeMap::new();
        for shard in self.absent.values() {
            *missing.entry(shard.as_str()).or_insert(0) += 1;
        }
        missing
    }

    /// Tensors known only by name, because the shard that holds them is not there: name and shard.
    pub fn absent_tensors(&self) -> impl Iterator<Item = (&str, &str)> {
        self.absent.iter().map(|(n, s)| (n.as_str(), s.as_str()))
    }

    /// Bytes of all tensors, as the index says them.
    pub fn indexed_bytes(&self) -> Option<u64> {
        self.indexed_bytes
    }

    /// Whether this is a single shard that was opened by itself and whose name (`model-00002-of-00005.safetensors`) says that
    /// there are others.
    pub fn one_of_several(&self) -> bool {
        let count = |stem: &str| stem.rsplit_once("-of-")?.1.parse::<u64>().ok();
        let by_itself = self.path.extension().is_some_and(|e| e == "safetensors");
        by_itself && self.path.file_stem().and_then(|stem| count(stem.to_str()?)).is_some_and(|count| count > 1)
    }

    /// Bytes of all shards that are there.
    pub fn total_bytes(&self) -> u64 {
        self.shards.iter().map(|s| s.data.len() as u64).sum()
    }
}

#[cfg(test)]
mod tests;
