//! How the tensors of two files differ: which, where first, and whether in a way that has a name, such as rows in another
//! order or a norm without its offset.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde::Serialize;
use strata_kernels::format::dequantize;

use super::CompareError;
use crate::gguf::{GgufFile, TensorInfo};

/// Largest tensor looked at value by value, in values; of larger ones only the start is.
const MOST_VALUES: u64 = 64 << 20;
/// A difference up to this share of the tensor's root mean square is what another storage format makes.
const ROUNDING: f64 = 0.2;

/// In what way a tensor differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum TensorFinding {
    /// Only one of the files has it.
    Missing {
        /// Whether the reference is the one without it.
        in_reference: bool,
    },
    /// Another shape.
    Shape {
        /// The reference's dimensions.
        reference: Vec<u64>,
        /// The tested file's dimensions.
        tested: Vec<u64>,
    },
    /// Every value is off by the same number: a norm stored without (or with twice) its 1.
    Offset {
        /// tested - reference
        by: f64,
    },
    /// The same rows in another order.
    RowsReordered,
    /// The same columns in another order.
    ColumnsReordered,
    /// It holds what the reference keeps in another tensor.
    HoldsOther {
        /// That tensor.
        name: String,
    },
    /// Values differ.
    Values {
        /// How many.
        count: u64,
        /// The first and last one that does, as indices into the tensor.
        first: u64,
        /// See `first`.
        last: u64,
        /// Storage format of the tested tensor, and which of its blocks the first value lies in.
        block: String,
    },
    /// Values differ as far as another storage format makes them.
    Rounding,
}

/// A tensor that differs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TensorDifference {
    /// Its name.
    pub name: String,
    /// Root mean square of the difference over that of the reference.
    pub relative: f64,
    /// In what way.
    pub finding: TensorFinding,
}

impl std::fmt::Display for TensorDifference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: ", self.name)?;
        match &self.finding {
            TensorFinding::Missing { in_reference: true } => f.write_str("not in the reference"),
            TensorFinding::Missing { in_reference: false } => f.write_str("missing"),
            TensorFinding::Shape { reference, tested } => write!(f, "shape {tested:?} instead of {reference:?}"),
            TensorFinding::Offset { by } => write!(f, "every value is off by {by:+.4}"),
            TensorFinding::RowsReordered => f.write_str("the same rows in another order"),
            TensorFinding::ColumnsReordered => f.write_str("the same columns in another order"),
            TensorFinding::HoldsOther { name } => write!(f, "holds the reference's {name}"),
            TensorFinding::Values { count, first, last, block } => {
                write!(f, "{count} values differ, from {first} to {last} ({block}), by {:.3} relative", self.relative)
            }
            TensorFinding::Rounding => write!(f, "differs by {:.4} relative, as storage formats do", self.relative),
        }
    }
}

/// The tensors of `tested` whose name starts with `prefix` and that differ from `reference`, most telling first.
///
/// # Errors
/// [`CompareError::Input`] for a format that cannot be read.
pub fn compare_tensors(
    reference: &GgufFile,
    tested: &GgufFile,
    prefix: &str,
) -> Result<Vec<TensorDifference>, CompareError> {
    let mut found = Vec::new();
    let names = |file: &GgufFile| -> Vec<String> {
        file.tensors().iter().filter(|tensor| tensor.name.starts_with(prefix)).map(|t| t.name.clone()).collect()
    };
    for name in names(tested) {
        if reference.tensor(&name).is_none() {
            let finding = TensorFinding::Missing { in_reference: true };
            found.push(TensorDifference { name, relative: 1.0, finding });
        }
    }
    let mut values: HashMap<u64, String> = HashMap::new();
    let mut pairs = Vec::new();
    for name in names(reference) {
        let Some(a) = reference.tensor(&name) else { continue };
        let Some(b) = tested.tensor(&name) else {
            let finding = TensorFinding::Missing { in_reference: false };
            found.push(TensorDifference { name, relative: 1.0, finding });
            continue;
        };
        let dims = |tensor: &TensorInfo| -> Vec<u64> { tensor.dims.iter().copied().filter(|&n| n != 1).collect() };
        if dims(a) != dims(b) {
            let finding = TensorFinding::Shape { reference: a.dims.clone(), tested: b.dims.clone() };
            found.push(TensorDifference { name, relative: 1.0, finding });
            continue;
        }
        let left = read(reference, a)?;
        values.insert(hash(&left), name.clone());
        if a.ty == b.ty && reference.data(a) == tested.data(b) {
            continue;
        }
        pairs.push(name);
    }
    for name in pairs {
        let (Some(a), Some(b)) = (reference.tensor(&name), tested.tensor(&name)) else { continue };
        let (left, right) = (read(reference, a)?, read(tested, b)?);
        if left == right {
            continue;
        }
        let relative = relative_difference(&left, &right);
        let columns = a.dims.first().copied().unwrap_or(1) as usize;
        let finding = if let Some(other) = values.get(&hash(&right)).filter(|other| **other != name) {
            TensorFinding::HoldsOther { name: other.clone() }
        } else if let Some(by) = constant_offset(&left, &right) {
            TensorFinding::Offset { by }
        } else if same_rows(&left, &right, columns) {
            TensorFinding::RowsReordered
        } else if same_columns(&left, &right, columns) {
            TensorFinding::ColumnsReordered
        } else if a.ty != b.ty && relative <= ROUNDING {
            TensorFinding::Rounding
        } else {
            let differs = |i: &usize| left[*i] != right[*i];
            let all = 0..left.len();
            let (first, last) = (all.clone().find(differs).unwrap_or(0), all.clone().rev().find(differs).unwrap_or(0));
            TensorFinding::Values {
                count: all.filter(differs).count() as u64,
                first: first as u64,
                last: last as u64,
                block: format!("{} block {}", b.ty.name(), first / b.ty.block_size()),
            }
        };
        found.push(TensorDifference { name, relative, finding });
    }
    found.sort_by(|a, b| {
        let rank = |d: &TensorDifference| matches!(d.finding, TensorFinding::Rounding);
        rank(a).cmp(&rank(b)).then(b.relative.total_cmp(&a.relative))
    });
    Ok(found)
}

fn read(file: &GgufFile, tensor: &TensorInfo) -> Result<Vec<f32>, CompareError> {
    let bad = |problem: String| CompareError::File { file: file.name().to_owned(), problem };
    let all: u64 = tensor.dims.iter().product();
    let columns = tensor.dims.first().copied().unwrap_or(1).max(1);
    let values = (all.min(MOST_VALUES) / columns * columns) as usize;
    let block = tensor.ty.block_size();
    let bytes = values / block * tensor.ty.block_bytes();
    let data = file.data(tensor);
    let source = data.get(..bytes).ok_or_else(|| bad(format!("{}: too short", tensor.name)))?;
    let mut out = vec![0.0; values / block * block];
    dequantize(tensor.ty, source, &mut out).map_err(|error| bad(format!("{}: {error}", tensor.name)))?;
    Ok(out)
}

fn hash(values: &[f32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    values.iter().for_each(|value| value.to_bits().hash(&mut hasher));
    hasher.finish()
}

fn relative_difference(reference: &[f32], tested: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = reference.iter().zip(tested).map(|(a, b)| square(a - b)).sum();
    let size: f64 = reference.iter().map(|&a| square(a)).sum();
    (difference / size.max(f64::MIN_POSITIVE)).sqrt()
}

fn constant_offset(reference: &[f32], tested: &[f32]) -> Option<f64> {
    let by = f64::from(tested.first()? - reference.first()?);
    let close = |(a, b): (&f32, &f32)| (f64::from(b - a) - by).abs() < 1e-3 * by.abs();
    (by.abs() > 1e-3 && reference.iter().zip(tested).all(close)).then_some(by)
}

fn same_rows(reference: &[f32], tested: &[f32], columns: usize) -> bool {
    let hashes = |values: &[f32]| -> Vec<u64> {
        let mut hashes: Vec<u64> = values.chunks(columns.max(1)).map(hash).collect();
        hashes.sort_unstable();
        hashes
    };
    // A vector is one row; its values are what can be in another order.
    if reference.len() <= columns {
        let sorted = |values: &[f32]| {
            let mut bits: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
            bits.sort_unstable();
            bits
        };
        return sorted(reference) == sorted(tested);
    }
    hashes(reference) == hashes(tested)
}

fn same_columns(reference: &[f32], tested: &[f32], columns: usize) -> bool {
    let rows = reference.len() / columns.max(1);
    let hashes = |values: &[f32]| -> Vec<u64> {
        let column = |c: usize| {
            let mut hasher = DefaultHasher::new();
            (0..rows).for_each(|r| values[r * columns + c].to_bits().hash(&mut hasher));
            hasher.finish()
        };
        let mut hashes: Vec<u64> = (0..columns).map(column).collect();
        hashes.sort_unstable();
        hashes
    };
    rows > 1 && hashes(reference) == hashes(tested)
}
