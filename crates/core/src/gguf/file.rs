//! An opened GGUF: one file, several split files, or bytes in memory, seen as one list of tensors.

use super::header::{self, Header};
use super::split::{MAX_PARTS, split_name, split_parts};
use super::{GgufError, Metadata};
use bytes::Bytes;
use memmap2::Mmap;
use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use strata_kernels::format::TensorType;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// The name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Sizes in ggml order: `dims[0]` varies fastest (the columns of a matrix). 1 to 4 entries, none zero; their product
    /// is below 2^63.
    pub dims: Vec<u64>,
    /// How the weights are stored.
    pub ty: TensorType,
    /// Which part of a split file holds the data, from 0.
    pub part: usize,
    /// Where the data starts in that part, in bytes from the start of the file.
    pub offset: u64,
    /// Bytes of data.
    pub size: u64,
}

impl TensorInfo {
    /// The number of weights.
    pub fn weights(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Weights per row.
    pub fn cols(&self) -> u64 {
        self.dims[0]
    }

    /// The number of rows: the product of all dimensions but the first.
    pub fn rows(&self) -> u64 {
        self.dims[1..].iter().product()
    }

    /// The shape as people write it, e.g. `2048 x 512 x 256`.
    pub fn shape(&self) -> String {
        self.dims.iter().map(|d| d.to_string()).collect::<Vec<_>>().join(" x ")
    }
}

/// An opened GGUF model. Opening reads only the header; tensor data stays in the memory map and is used in place.
pub struct GgufFile {
    name: String,
    paths: Vec<PathBuf>,
    parts: Vec<Bytes>,
    version: u32,
    alignment: u64,
    metadata: Metadata,
    tensors: Vec<TensorInfo>,
    index: HashMap<String, usize>,
}

impl GgufFile {
    /// Opens a file. Of a split file any part may be given; the others are found beside it by their names.
    ///
    /// The file must not be changed or cut short while it is open: its tensors are read through a memory map.
    pub fn open(path: &Path) -> Result<GgufFile, GgufError> {
        let first = match split_parts(path) {
            Some((prefix, part, count)) if part > 0 => split_name(&prefix, 0, count),
            _ => path.to_path_buf(),
        };
        let data = map(&first)?;
        let name = first.display().to_string();
        let head = header::parse(&name, &data, 0)?;
        let count = part_count(&name, &head)?;
        let mut file = GgufFile::assemble(name, vec![first.clone()], data, head);
        if count > 1 {
            file.open_rest(&first, count)?;
        }
        Ok(file)
    }

    /// Reads a GGUF that lies in memory, such as the bundled model. `name` stands for the file in messages. One part of a
    /// split file is refused.
    pub fn from_bytes(name: &str, data: Bytes) -> Result<GgufFile, GgufError> {
        let head = header::parse(name, &data, 0)?;
        let count = part_count(name, &head)?;
        if count > 1 {
            return Err(GgufError::Split {
                file: name.into(),
                field: "metadata key 'split.count'".into(),
                expected: "a whole model".into(),
                found: format!("one part of {count}"),
            });
        }
        Ok(GgufFile::assemble(name.to_string(), Vec::new(), data, head))
    }

    fn assemble(name: String, paths: Vec<PathBuf>, data: Bytes, head: Header) -> GgufFile {
        let index = head.tensors.iter().enumerate().map(|(i, t)| (t.name.clone(), i)).collect();
        GgufFile {
            name,
            paths,
            parts: vec![data],
            version: head.version,
            alignment: head.alignment,
            metadata: head.metadata,
            tensors: head.tensors,
            index,
        }
    }

    /// Opens parts 1.. of a split file and adds their tensors.
    fn open_rest(&mut self, first: &Path, count: usize) -> Result<(), GgufError> {
        let split = |file: &str, field: &str, expected: String, found: String| GgufError::Split {
            file: file.to_string(),
            field: field.to_string(),
            expected,
            found,
        };
        let key = |key: &str| format!("metadata key '{key}'");
        let prefix = match split_parts(first) {
            Some((prefix, 0, named)) if named == count => prefix,
            _ => {
                let expected = format!("a name that ends in -00001-of-{count:05}.gguf (it is part 1 of {count})");
                return Err(split(&self.name, "file name", expected, "another name".into()));
            }
        };
        for part in 1..count {
            let path = split_name(&prefix, part, count);
            let name = path.display().to_string();
            let data = map(&path)?;
            let head = header::parse(&name, &data, part)?;
            let theirs = head.metadata.u32_opt("split.count")?.unwrap_or(0) as usize;
            if theirs != count {
                return Err(split(&name, &key("split.count"), count.to_string(), theirs.to_string()));
            }
            let no = head.metadata.u32_opt("split.no")?.unwrap_or(0) as usize;
            if no != part {
                return Err(split(&name, &key("split.no"), part.to_string(), no.to_string()));
            }
            for t in head.tensors {
                if let Some(&other) = self.index.get(&t.name) {
                    let other = self.paths[self.tensors[other].part].display().to_string();
                    let field = format!("tensor '{}'", t.name.escape_debug());
                    return Err(split(&name, &field, "each tensor in one part".into(), format!("it also in {other}")));
                }
                self.index.insert(t.name.clone(), self.tensors.len());
                self.tensors.push(t);
            }
            self.paths.push(path);
            self.parts.push(data);
        }
        if let Some(total) = self.metadata.u64_opt("split.tensors.count")?
            && total != self.tensors.len() as u64
        {
            let found = format!("{} in all parts", self.tensors.len());
            return Err(split(&self.name, &key("split.tensors.count"), format!("{total} tensors"), found));
        }
        Ok(())
    }

    /// The name for messages: the path as it was opened (the first part of a split file).
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The metadata (that of the first part of a split file).
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// All tensors, in file order, part after part.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.index.get(name).map(|&i| &self.tensors[i])
    }

    /// The data of a tensor of this file: a view into the map, no copy. It may start at any address.
    ///
    /// # Panics
    /// When `t` is not a tensor of this file.
    pub fn data(&self, t: &TensorInfo) -> Bytes {
        self.parts[t.part].slice(t.offset as usize..(t.offset + t.size) as usize)
    }

    /// The whole bytes of each part.
    pub fn parts(&self) -> &[Bytes] {
        &self.parts
    }

    /// Bytes of all parts together.
    pub fn total_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.len() as u64).sum()
    }

    /// The files, in order of the parts; empty for a model in memory.
    pub fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    /// The version of the format, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The alignment of tensor data in bytes.
    pub fn alignment(&self) -> u64 {
        self.alignment
    }

    /// Asks the kernel to start reading the tensor data into the page cache. Returns at once; without effect on a model in
    /// memory. (Huge pages are of no use here: the kernel does not back maps of ordinary file systems with them.)
    pub fn prefetch(&self) {
        if self.paths.is_empty() {
            return;
        }
        for part in &self.parts {
            // SAFETY: the range is a whole live mapping that starts at a page border; MADV_WILLNEED only reads ahead
            // and changes no byte of it.
            unsafe { libc::madvise(part.as_ptr() as *mut libc::c_void, part.len(), libc::MADV_WILLNEED) };
        }
    }
}

/// How many parts the model has by its first part's metadata, and that this is the first part.
fn part_count(name: &str, head: &Header) -> Result<usize, GgufError> {
    let split = |key: &str, expected: String, found: String| GgufError::Split {
        file: name.to_string(),
        field: format!("metadata key '{key}'"),
        expected,
        found,
    };
    let count = head.metadata.u32_opt("split.count")?.unwrap_or(1).max(1) as usize;
    if count > MAX_PARTS {
        return Err(split("split.count", format!("at most {MAX_PARTS}"), count.to_string()));
    }
    let no = head.metadata.u32_opt("split.no")?.unwrap_or(0);
    if count > 1 && no != 0 {
        return Err(split("split.no", "0, as this is the first part by its name".into(), no.to_string()));
    }
    Ok(count)
}

/// Maps a file read-only.
fn map(path: &Path) -> Result<Bytes, GgufError> {
    let io = |action| move |source| GgufError::Io { path: path.to_path_buf(), action, source };
    // Asked before opening: opening a pipe would wait for its writer.
    let meta = std::fs::metadata(path).map_err(io("open the file"))?;
    if !meta.is_file() {
        let kind = if meta.is_dir() { "it is a folder" } else { "it is not a regular file" };
        return Err(io("read it as a GGUF")(std::io::Error::other(kind)));
    }
    let file = File::open(path).map_err(io("open the file"))?;
    if meta.len() == 0 {
        return Ok(Bytes::new());
    }
    // SAFETY: the map is read-only and private to the returned Bytes. As with every memory-mapped model file, another
    // process that cuts the file short while it is open makes reads fail (SIGBUS); `open` documents that.
    let map = unsafe { Mmap::map(&file) }.map_err(io("map the file into memory"))?;
    Ok(Bytes::from_owner(map))
}
