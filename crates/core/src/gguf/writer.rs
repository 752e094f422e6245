//! Writes a GGUF: metadata and tensor list first, then the data of the tensors streamed in that order.
//!
//! The file appears under its name only when it is complete; until then it is a temporary file in the same folder, which
//! is removed when the writer is dropped (see [`crate::output`]).

use super::split::{MAX_PARTS, split_name};
use super::{GgufError, Metadata, Value, encode, header};
use crate::output::{self, Existing, OutputError, OutputFile};
use std::collections::HashSet;
use std::path::{Path, PathBuf};
use strata_kernels::format::TensorType;

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorDecl {
    /// The name, e.g. `blk.0.attn_q.weight`.
    pub name: String,
    /// Sizes in ggml order: `dims[0]` varies fastest.
    pub dims: Vec<u64>,
    /// How the weights are stored.
    pub ty: TensorType,
}

impl TensorDecl {
    /// Bytes of data; `None` when the rows do not consist of whole blocks or the size overflows.
    pub fn size(&self) -> Option<u64> {
        let row = self.ty.row_bytes(usize::try_from(*self.dims.first()?).ok()?)? as u64;
        self.dims[1..].iter().try_fold(row, |size, d| size.checked_mul(*d))
    }
}

/// How a file is written.
#[derive(Clone, Debug, Default)]
pub struct WriterOptions {
    /// Replaces existing files.
    pub force: bool,
    /// Splits the model into files of at most this many bytes (a single larger tensor still gets a file of its own).
    pub split_max_size: Option<u64>,
    /// Files that no output may replace, `force` or not: what the model is made from.
    pub inputs: Vec<PathBuf>,
}

/// Writes one GGUF model. `create`, then `write` for every declared tensor in order, then `finish`.
pub struct GgufWriter {
    parts: Vec<Part>,
    tensors: Vec<TensorDecl>,
    sizes: Vec<u64>,
    /// Which part holds each tensor.
    part_of: Vec<usize>,
    alignment: u64,
    force: bool,
    /// The tensor whose data comes next, and how much of it is there.
    current: usize,
    written: u64,
}

/// One output file. It is opened when its first byte is due.
struct Part {
    path: PathBuf,
    header: Vec<u8>,
    size: u64,
    state: PartState,
}

enum PartState {
    Waiting,
    Open(OutputFile),
    Complete(OutputFile),
}

impl GgufWriter {
    /// Plans the file or files, and checks everything that can be checked before a byte is written: that the tensors
    /// are valid and named once, that no output exists (unless `force`), and that the disk has room for all of it.
    ///
    /// The alignment is that of the metadata's `general.alignment`, 32 where absent. `split.*` keys of the metadata are
    /// not carried over; a split output gets its own.
    pub fn create(
        path: &Path,
        metadata: &Metadata,
        tensors: Vec<TensorDecl>,
        options: &WriterOptions,
    ) -> Result<GgufWriter, GgufError> {
        let refuse = |what: String| GgufError::Write { path: path.to_path_buf(), what };
        if path.file_name().is_none() {
            return Err(refuse("the output needs a file name".into()));
        }
        let mut metadata = metadata.clone();
        for key in ["split.no", "split.count", "split.tensors.count"] {
            metadata.remove(key);
        }
        let alignment = header::alignment(&metadata)?;
        let mut names = HashSet::new();
        let mut sizes = Vec::new();
        for t in &tensors {
            if !names.insert(t.name.as_str()) {
                return Err(refuse(format!("tensor '{}' is declared twice", t.name)));
            }
            if t.dims.is_empty() || t.dims.len() > header::MAX_DIMS as usize || t.dims.contains(&0) {
                return Err(refuse(format!("tensor '{}' has the invalid shape {:?}", t.name, t.dims)));
            }
            sizes.push(t.size().ok_or_else(|| {
                refuse(format!("tensor '{}' of shape {:?} cannot be stored as {}", t.name, t.dims, t.ty.name()))
            })?);
        }

        let part_of = assign_parts(&metadata, &tensors, &sizes, alignment, options.split_max_size);
        let count = part_of.last().map_or(1, |p| p + 1);
        if count > MAX_PARTS {
            return Err(refuse(format!("it would take {count} files, more than {MAX_PARTS}; raise the split size")));
        }
        let mut parts = Vec::new();
        for part in 0..count {
            let of_part = |i: &usize| part_of[*i] == part;
            let mut metadata = if part == 0 { metadata.clone() } else { part_metadata(&metadata) };
            if count > 1 {
                metadata.set("split.no", Value::U16(part as u16));
                metadata.set("split.tensors.count", Value::I32(tensors.len() as i32));
                metadata.set("split.count", Value::U16(count as u16));
            }
            let mut offsets = Vec::new();
            let mut end = 0u64;
            for i in (0..tensors.len()).filter(of_part) {
                offsets.push(end);
                end += sizes[i].next_multiple_of(alignment);
            }
            let listed: Vec<_> = (0..tensors.len()).filter(of_part).map(|i| tensors[i].clone()).collect();
            let mut header = encode::header(&metadata, &listed, &offsets);
            header.resize(header.len().next_multiple_of(alignment as usize), 0);
            let path = if count == 1 { path.to_path_buf() } else { split_name(&without_gguf(path), part, count) };
            if !options.force && path.symlink_metadata().is_ok() {
                return Err(OutputError::Exists { path }.into());
            }
            let size = header.len() as u64 + end;
            parts.push(Part { path, header, size, state: PartState::Waiting });
        }
        let paths: Vec<&Path> = parts.iter().map(|p| p.path.as_path()).collect();
        let inputs: Vec<&Path> = options.inputs.iter().map(PathBuf::as_path).collect();
        output::check_places(&paths, &inputs)?;
        check_space(path, parts.iter().map(|p| p.size).sum())?;
        let force = options.force;
        let mut writer = GgufWriter { parts, tensors, sizes, part_of, alignment, force, current: 0, written: 0 };
        writer.open(0)?;
        Ok(writer)
    }

    /// The bytes of all files together.
    pub fn total_bytes(&self) -> u64 {
        self.parts.iter().map(|p| p.size).sum()
    }

    /// The files that will be there in the end.
    pub fn paths(&self) -> Vec<PathBuf> {
        self.parts.iter().map(|p| p.path.clone()).collect()
    }

    /// The tensor whose data is due.
    pub fn next_tensor(&self) -> Option<&TensorDecl> {
        self.tensors.get(self.current)
    }

    /// Appends data of tensor `name`, which must be the one that is due. A tensor may come in any number of pieces; the
    /// next one is due when all its bytes are there.
    pub fn write(&mut self, name: &str, data: &[u8]) -> Result<(), GgufError> {
        let refuse = |part: &Part, what: String| Err(GgufError::Write { path: part.path.clone(), what });
        let Some(due) = self.tensors.get(self.current) else {
            return refuse(&self.parts[self.parts.len() - 1], format!("data for '{name}' after the last tensor"));
        };
        let part = self.part_of[self.current];
        if due.name != name {
            return refuse(&self.parts[part], format!("data for '{name}' where '{}' is due", due.name));
        }
        let size = self.sizes[self.current];
        if self.written + data.len() as u64 > size {
            let got = self.written + data.len() as u64;
            return refuse(&self.parts[part], format!("'{name}' takes {size} bytes, but was given {got}"));
        }
        self.open(part)?;
        self.append(part, data)?;
        self.written += data.len() as u64;
        if self.written == size {
            let padding = size.next_multiple_of(self.alignment) - size;
            self.append(part, &vec![0; padding as usize])?;
            self.current += 1;
            self.written = 0;
            if self.part_of.get(self.current) != Some(&part) {
                self.complete(part)?;
            }
        }
        Ok(())
    }

    /// Completes the files and gives them their names. Returns their paths.
    pub fn finish(mut self) -> Result<Vec<PathBuf>, GgufError> {
        if let Some(due) = self.tensors.get(self.current) {
            let (path, size) = (self.parts[self.part_of[self.current]].path.clone(), self.sizes[self.current]);
            let what = format!("finished with {} of the {size} bytes of '{}'", self.written, due.name);
            return Err(GgufError::Write { path, what });
        }
        if self.tensors.is_empty() {
            self.complete(0)?;
        }
        let paths = self.paths();
        let existing = if self.force { Existing::Replace } else { Existing::Keep };
        for (i, part) in self.parts.into_iter().enumerate() {
            let PartState::Complete(file) = part.state else { continue };
            if let Err(error) = file.finish(existing) {
                // Some parts of a model are no model. Those that replaced others cannot be taken back.
                if existing == Existing::Keep {
                    paths[..i].iter().for_each(|path| drop(std::fs::remove_file(path)));
                }
                return Err(error.into());
            }
        }
        Ok(paths)
    }

    /// Opens a part and writes its header, where that has not been done.
    fn open(&mut self, part: usize) -> Result<(), GgufError> {
        let p = &mut self.parts[part];
        if let PartState::Waiting = p.state {
            p.state = PartState::Open(OutputFile::create(&p.path)?);
            let header = std::mem::take(&mut p.header);
            self.append(part, &header)?;
        }
        Ok(())
    }

    fn append(&mut self, part: usize, data: &[u8]) -> Result<(), GgufError> {
        if let PartState::Open(out) = &mut self.parts[part].state {
            out.append(data)?;
        }
        Ok(())
    }

    /// Brings a part that has all its bytes to disk.
    fn complete(&mut self, part: usize) -> Result<(), GgufError> {
        let p = &mut self.parts[part];
        if let PartState::Open(mut out) = std::mem::replace(&mut p.state, PartState::Waiting) {
            out.seal()?;
            p.state = PartState::Complete(out);
        }
        Ok(())
    }
}

/// The path without `.gguf`. Other dots belong to the name (`Qwen3.6`).
fn without_gguf(path: &Path) -> PathBuf {
    if path.extension().is_some_and(|e| e == "gguf") { path.with_extension("") } else { path.to_path_buf() }
}

/// The metadata that every part but the first repeats: only what is needed to read it.
fn part_metadata(metadata: &Metadata) -> Metadata {
    let mut own = Metadata::new(metadata.file());
    if let Some(alignment) = metadata.get("general.alignment") {
        own.set("general.alignment", alignment.clone());
    }
    own
}

/// Which part each tensor goes to: in order, a new part where the next tensor would make the file too large.
fn assign_parts(
    metadata: &Metadata,
    tensors: &[TensorDecl],
    sizes: &[u64],
    alignment: u64,
    max: Option<u64>,
) -> Vec<usize> {
    let Some(max) = max else { return vec![0; tensors.len()] };
    // The split keys and the padding after the header.
    let extra = 128 + alignment;
    let mut used = encode::header(metadata, &[], &[]).len() as u64 + extra;
    let empty_header = encode::header(&part_metadata(metadata), &[], &[]).len() as u64 + extra;
    let mut part = 0;
    let mut filled = false;
    let mut part_of = Vec::new();
    for (t, size) in tensors.iter().zip(sizes) {
        let bytes = size.next_multiple_of(alignment) + encode::tensor_entry_bytes(t);
        if filled && used + bytes > max {
            part += 1;
            used = empty_header;
        }
        used += bytes;
        filled = true;
        part_of.push(part);
    }
    part_of
}

/// Refuses when the file system that `path` will be on has less than `needed` bytes free.
fn check_space(path: &Path, needed: u64) -> Result<(), GgufError> {
    let folder = match path.parent() {
        Some(f) if !f.as_os_str().is_empty() => f,
        _ => Path::new("."),
    };
    let io = |source| GgufError::Io { path: folder.to_path_buf(), action: "find the output folder", source };
    if !std::fs::metadata(folder).map_err(io)?.is_dir() {
        return Err(io(std::io::Error::from(std::io::ErrorKind::NotADirectory)));
    }
    let free = free_bytes(folder).map_err(io)?;
    if needed > free {
        return Err(GgufError::NoSpace { path: path.to_path_buf(), needed, free });
    }
    Ok(())
}

/// Bytes that an ordinary user may still write in this folder.
fn free_bytes(folder: &Path) -> std::io::Result<u64> {
    use std::os::unix::ffi::OsStrExt;
    let name = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    // SAFETY: all-zero bytes are a valid statvfs, a plain C struct of integers.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: `name` is a NUL-terminated string and `stat` a live struct, both valid for the call.
    if unsafe { libc::statvfs(name.as_ptr(), &mut stat) } != 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(stat.f_bavail as u64 * stat.f_frsize as u64)
}
