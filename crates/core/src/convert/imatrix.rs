//! Importance matrices in llama.cpp's GGUF form: for every weight matrix the sum of the squared inputs of each column,
//! and how many rows were seen, per expert where there are experts.

use super::ConvertError;
use crate::gguf::{GgufFile, TensorInfo};
use std::collections::HashMap;
use std::path::Path;
use strata_kernels::format::{TensorType, dequantize};

/// An opened importance matrix.
pub struct Imatrix {
    file: String,
    entries: HashMap<String, Entry>,
    /// Chunks of text it was made from.
    pub chunks: u32,
    /// The texts it was made from.
    pub datasets: Vec<String>,
}

struct Entry {
    /// Mean squared input per column, matrix after matrix.
    means: Vec<f32>,
    /// Rows seen per matrix.
    counts: Vec<f32>,
}

/// Importance of the columns of one tensor: one vector per matrix (expert), `None` where no row was seen.
pub type ColumnImportance = Vec<Option<Vec<f32>>>;

impl Imatrix {
    /// Opens a file.
    ///
    /// # Errors
    /// When it is no GGUF, or no importance matrix.
    pub fn open(path: &Path) -> Result<Imatrix, ConvertError> {
        let gguf = GgufFile::open(path)?;
        let file = path.display().to_string();
        let wrong = |reason: String| ConvertError::Imatrix { file: file.clone(), reason };
        let kind = gguf.metadata().str_opt("general.type")?.unwrap_or("nothing");
        if kind != "imatrix" {
            return Err(wrong(format!("general.type: expected 'imatrix', found '{kind}'")));
        }
        let mut entries = HashMap::new();
        for sums in gguf.tensors() {
            let Some(name) = sums.name.strip_suffix(".in_sum2") else { continue };
            let counts_name = format!("{name}.counts");
            let counts = gguf
                .tensor(&counts_name)
                .ok_or_else(|| wrong(format!("it has '{}' but no '{counts_name}'", sums.name)))?;
            let (sums, counts) = (floats(&gguf, sums, &file)?, floats(&gguf, counts, &file)?);
            if counts.is_empty() || sums.len() % counts.len() != 0 {
                return Err(wrong(format!("'{name}': {} sums for {} counts", sums.len(), counts.len())));
            }
            let cols = sums.len() / counts.len();
            let mean = |(i, sum): (usize, &f32)| if counts[i / cols] > 0.0 { sum / counts[i / cols] } else { 0.0 };
            let means = sums.iter().enumerate().map(mean).collect();
            entries.insert(name.to_string(), Entry { means, counts });
        }
        let chunks = gguf.metadata().u32_opt("imatrix.chunk_count")?.unwrap_or(0);
        let datasets = gguf.metadata().strings_opt("imatrix.datasets")?.unwrap_or(&[]).to_vec();
        Ok(Imatrix { file, entries, chunks, datasets })
    }

    /// The file's name.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Matrices it has data for.
    pub fn entries(&self) -> usize {
        self.entries.len()
    }

    /// Importance for a tensor of `cols` columns and `matrices` matrices; `None` when the file does not know it.
    ///
    /// # Errors
    /// When the file has the tensor with other sizes, or numbers that are no importance.
    pub fn importance(
        &self,
        name: &str,
        cols: usize,
        matrices: usize,
    ) -> Result<Option<ColumnImportance>, ConvertError> {
        let Some(entry) = self.entries.get(name) else { return Ok(None) };
        let known = entry.counts.len();
        // One count for all experts: every expert saw every row.
        let means = entry.means.len() / cols.max(1);
        if entry.means.len() % cols.max(1) != 0 || !(means == matrices || means == 1) || known > means {
            return Err(ConvertError::Imatrix {
                file: self.file.clone(),
                reason: format!(
                    "'{name}': {} values for {known} matrices, where the tensor has {matrices} of {cols} columns",
                    entry.means.len()
                ),
            });
        }
        if entry.means.iter().any(|v| !(v.is_finite() && *v >= 0.0)) {
            let reason = format!("'{name}': a mean square is negative or not a number");
            return Err(ConvertError::Imatrix { file: self.file.clone(), reason });
        }
        let of_matrix = |m: usize| {
            let values = &entry.means[if means == 1 { 0 } else { m * cols }..][..cols];
            let seen = entry.counts[if known == 1 { 0 } else { m.min(known - 1) }] > 0.0;
            (seen && values.iter().any(|v| *v > 0.0)).then(|| values.to_vec())
        };
        Ok(Some((0..matrices).map(of_matrix).collect()))
    }
}

fn floats(gguf: &GgufFile, tensor: &TensorInfo, file: &str) -> Result<Vec<f32>, ConvertError> {
    let mut out = vec![0.0; tensor.weights() as usize];
    if tensor.ty != TensorType::F32 {
        return Err(ConvertError::Imatrix {
            file: file.to_string(),
            reason: format!("'{}': expected F32, found {}", tensor.name, tensor.ty.name()),
        });
    }
    dequantize(tensor.ty, &gguf.data(tensor), &mut out).map_err(|source| ConvertError::Format {
        tensor: tensor.name.clone(),
        ty: tensor.ty.name(),
        source,
    })?;
    Ok(out)
}
