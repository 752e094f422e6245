//! Writes a planned GGUF: chunks of tensors are transformed and encoded by all cores and written in file order.
//!
//! Memory stays bounded whatever the size of the model: the sources are memory maps, and no more than a few chunks of
//! about half a million weights per core exist at a time. Chunks are cut at fixed places (whole rows, never across two
//! experts), so the file is the same whatever the number of threads.

use super::ConvertError;
use super::imatrix::ColumnImportance;
use super::transform::{Float, Planned, RowMap, SourceTensor};
use crate::gguf::{GgufWriter, Metadata, TensorDecl, WriterOptions};
use bytes::Bytes;
use rayon::prelude::*;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use strata_kernels::format::quantize;

/// Weights encoded at a time.
const CHUNK_WEIGHTS: usize = 1 << 19;
/// Chunks in flight per core.
const CHUNKS_PER_THREAD: usize = 4;

/// Where the caller hears how far the work is, and may stop it.
#[derive(Clone, Copy)]
pub struct Progress<'a> {
    /// Called with the number of bytes done since the last call.
    pub advance: &'a (dyn Fn(u64) + Sync),
    /// Asked between chunks.
    pub stopped: &'a (dyn Fn() -> bool + Sync),
}

impl Progress<'_> {
    /// Tells nobody and never stops.
    pub const SILENT: Progress<'static> = Progress { advance: &|_| {}, stopped: &|| false };
}

/// One tensor to be written.
pub struct Output {
    /// Name, sizes and type.
    pub decl: TensorDecl,
    /// Where its bytes come from.
    pub content: Content,
}

/// Where the bytes of a tensor come from.
pub enum Content {
    /// Bytes of another GGUF, as they are.
    Bytes(Bytes),
    /// Transformed and encoded from a checkpoint.
    Convert {
        /// The transform.
        planned: Planned,
        /// The checkpoint's tensors.
        sources: Vec<SourceTensor>,
        /// Importance of the columns, where an importance matrix has it.
        importance: Option<ColumnImportance>,
    },
}

/// A run of rows of one tensor.
#[derive(Clone, Copy)]
struct Chunk {
    tensor: usize,
    first_row: usize,
    rows: usize,
}

/// Writes the file (or files) and returns their paths. Nothing appears under the final name unless all went well.
///
/// # Errors
/// When a weight does not fit its type, the disk refuses, or the caller stopped.
pub fn write(
    path: &Path,
    metadata: &Metadata,
    outputs: &[Output],
    options: &WriterOptions,
    progress: Progress,
) -> Result<Vec<PathBuf>, ConvertError> {
    let decls = outputs.iter().map(|o| o.decl.clone()).collect();
    let mut writer = GgufWriter::create(path, metadata, decls, options)?;
    let chunks: Vec<Chunk> = outputs.iter().enumerate().flat_map(|(i, o)| chunks_of(i, o)).collect();
    let wave = rayon::current_num_threads() * CHUNKS_PER_THREAD;
    // The writing thread works while the next chunks are encoded.
    std::thread::scope(|scope| {
        let (sender, receiver) = mpsc::sync_channel::<Vec<(usize, Bytes)>>(1);
        let writing = scope.spawn(move || -> Result<GgufWriter, ConvertError> {
            for (tensor, bytes) in receiver.into_iter().flatten() {
                writer.write(&outputs[tensor].decl.name, &bytes)?;
                (progress.advance)(bytes.len() as u64);
            }
            Ok(writer)
        });
        let mut result = Ok(());
        for chunks in chunks.chunks(wave) {
            if (progress.stopped)() {
                result = Err(ConvertError::Interrupted { written: Vec::new() });
                break;
            }
            let encoded: Result<Vec<_>, ConvertError> =
                chunks.par_iter().map(|c| Ok((c.tensor, encode(&outputs[c.tensor], *c)?))).collect();
            match encoded {
                // A closed channel means that writing failed; its error is fetched below.
                Ok(encoded) => {
                    if sender.send(encoded).is_err() {
                        break;
                    }
                }
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
        }
        drop(sender);
        let written = writing.join().unwrap_or(Err(ConvertError::Interrupted { written: Vec::new() }));
        result.and(written)?.finish().map_err(ConvertError::from)
    })
}

/// Cuts a tensor into chunks of whole rows that never hold rows of two experts.
fn chunks_of(tensor: usize, output: &Output) -> Vec<Chunk> {
    let dims = &output.decl.dims;
    let cols = dims[0] as usize;
    let rows = dims[1..].iter().product::<u64>() as usize;
    if let Content::Bytes(_) = output.content {
        return vec![Chunk { tensor, first_row: 0, rows }];
    }
    let per_matrix = dims.get(1).map_or(1, |d| *d as usize);
    row_runs(rows, per_matrix, cols).map(|(first_row, rows)| Chunk { tensor, first_row, rows }).collect()
}

/// Runs of rows `(first, count)` of about [`CHUNK_WEIGHTS`], none across the border of two matrices.
pub(super) fn row_runs(rows: usize, per_matrix: usize, cols: usize) -> impl Iterator<Item = (usize, usize)> {
    let step = (CHUNK_WEIGHTS / cols.max(1)).clamp(1, per_matrix.max(1));
    let per_matrix = per_matrix.max(1);
    (0..rows.div_ceil(per_matrix)).flat_map(move |m| {
        let (start, end) = (m * per_matrix, ((m + 1) * per_matrix).min(rows));
        (start..end).step_by(step).map(move |first| (first, step.min(end - first)))
    })
}

/// The encoded bytes of a chunk.
fn encode(output: &Output, chunk: Chunk) -> Result<Bytes, ConvertError> {
    let (planned, sources, importance) = match &output.content {
        Content::Bytes(bytes) => return Ok(bytes.clone()),
        Content::Convert { planned, sources, importance } => (planned, sources, importance),
    };
    let (ty, cols) = (output.decl.ty, planned.cols());
    if let Some(float) = Float::of(ty).filter(|f| planned.is_byte_copy(*f, sources)) {
        return Ok(copy_rows(planned, sources, float, chunk));
    }
    let mut values = vec![0.0; chunk.rows * cols];
    planned.read_rows(sources, chunk.first_row, &mut values);
    let per_matrix = output.decl.dims.get(1).map_or(1, |d| *d as usize);
    let weights = importance.as_ref().and_then(|all| all.get(chunk.first_row / per_matrix)?.as_deref());
    let format = |source| ConvertError::Format { tensor: output.decl.name.clone(), ty: ty.name(), source };
    let row_bytes = output.decl.size().unwrap_or(0) as usize / planned.rows().max(1);
    let mut bytes = vec![0; row_bytes * chunk.rows];
    quantize(ty, &values, weights, cols, &mut bytes).map_err(format)?;
    Ok(bytes.into())
}

/// Rows as they are stored; a view where they lie in one piece.
fn copy_rows(planned: &Planned, sources: &[SourceTensor], float: Float, chunk: Chunk) -> Bytes {
    let row = planned.cols() * float.bytes();
    match planned.transform.rows {
        RowMap::Same => sources[0].data.slice(chunk.first_row * row..(chunk.first_row + chunk.rows) * row),
        _ => {
            let mut bytes = Vec::with_capacity(chunk.rows * row);
            for r in chunk.first_row..chunk.first_row + chunk.rows {
                bytes.extend_from_slice(planned.row_bytes(sources, r).1);
            }
            bytes.into()
        }
    }
}
