//! What happens to the values of a tensor between a checkpoint and a GGUF: rows and columns in another order, and an
//! elementwise function computed in f32.
//!
//! A transform is described, not performed: it says which source row an output row comes from, so that any range of
//! rows can be produced on its own, by any thread, without holding the tensor.

use super::names::Part;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use strata_kernels::format::TensorType;

/// A function applied to every value, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elementwise {
    /// The value as it is.
    Copy,
    /// `1 + x`: zero-centred norm weights.
    PlusOne,
    /// `-exp(x)`: the delta net's decay from its logarithm.
    NegExp,
}

impl Elementwise {
    /// The function's value.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Elementwise::Copy => x,
            Elementwise::PlusOne => x + 1.0,
            // In f64 and rounded once: the same bits on every machine.
            Elementwise::NegExp => -f64::from(x).exp() as f32,
        }
    }
}

/// Value heads in groups per key head, brought into tiled order: output head `j` is head
/// `(j % key_heads) * per_key + j / key_heads` of the source, so that afterwards head `j` uses key head `j % key_heads`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueHeads {
    /// Rows (or columns) before the first value head; they stay.
    pub start: u64,
    /// Rows (or columns) of a head.
    pub width: u64,
    /// Key heads.
    pub key_heads: u64,
    /// Value heads per key head.
    pub per_key: u64,
}

impl ValueHeads {
    /// The source row (or column) of output row `r`.
    pub fn source(&self, r: u64) -> u64 {
        let Some(v) = r.checked_sub(self.start) else { return r };
        let (head, within) = (v / self.width, v % self.width);
        let source_head = (head % self.key_heads) * self.per_key + head / self.key_heads;
        self.start + source_head * self.width + within
    }
}

/// Where output rows come from. Rows are runs of `dims[0]` values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowMap {
    /// Row `r` is source row `r`.
    Same,
    /// Value heads reordered.
    ValueHeads(ValueHeads),
    /// Rows `offset .. offset + rows` of every `stride` source rows (one half of a fused tensor).
    Slices {
        /// Rows taken at a time.
        rows: u64,
        /// Source rows from one run to the next.
        stride: u64,
        /// First source row of the first run.
        offset: u64,
    },
    /// Several source tensors of this many rows, one after the other.
    Stacked {
        /// Rows of each source.
        rows: u64,
    },
}

impl RowMap {
    /// Which source tensor and which of its rows output row `r` is.
    pub fn source(&self, r: u64) -> (usize, u64) {
        match *self {
            RowMap::Same => (0, r),
            RowMap::ValueHeads(heads) => (0, heads.source(r)),
            RowMap::Slices { rows, stride, offset } => (0, r / rows * stride + offset + r % rows),
            RowMap::Stacked { rows } => ((r / rows) as usize, r % rows),
        }
    }
}

/// All that is done to one tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transform {
    /// Where rows come from.
    pub rows: RowMap,
    /// Columns reordered, where they are.
    pub columns: Option<ValueHeads>,
    /// The function applied.
    pub elementwise: Elementwise,
}

impl Transform {
    /// Nothing but a new name.
    pub const fn plain() -> Transform {
        Transform { rows: RowMap::Same, columns: None, elementwise: Elementwise::Copy }
    }

    /// In words, for the report.
    pub fn describe(&self) -> String {
        let mut words = Vec::new();
        match self.rows {
            RowMap::Same => {}
            RowMap::ValueHeads(h) if h.per_key == 1 => {}
            RowMap::ValueHeads(_) => words.push("value heads reordered"),
            RowMap::Slices { offset: 0, .. } => words.push("first part of a fused tensor"),
            RowMap::Slices { .. } => words.push("second part of a fused tensor"),
            RowMap::Stacked { .. } => words.push("experts stacked"),
        }
        if self.columns.is_some_and(|h| h.per_key > 1) {
            words.push("value heads reordered");
        }
        match self.elementwise {
            Elementwise::Copy => {}
            Elementwise::PlusOne => words.push("+1"),
            Elementwise::NegExp => words.push("-exp"),
        }
        if words.is_empty() { "copied".to_string() } else { words.join(", ") }
    }
}

/// A plain float type of a checkpoint tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Float {
    /// 32 bits.
    F32,
    /// IEEE half.
    F16,
    /// The upper half of an f32.
    BF16,
}

impl Float {
    /// The plain float that a GGUF type is, if it is one.
    pub fn of(ty: TensorType) -> Option<Float> {
        match ty {
            TensorType::F32 => Some(Float::F32),
            TensorType::F16 => Some(Float::F16),
            TensorType::BF16 => Some(Float::BF16),
            _ => None,
        }
    }

    /// Bytes per value.
    pub fn bytes(self) -> usize {
        if self == Float::F32 { 4 } else { 2 }
    }

    /// Decodes `bytes` to `out` (as many values as `out` has).
    pub fn decode(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Float::F32 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                    *o = f32::from_le_bytes(*b);
                }
            }
            Float::BF16 => {
                for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *o = bf16::from_le_bytes(*b).to_f32();
                }
            }
            Float::F16 => {
                // The slice conversion uses F16C where the CPU has it; the bytes may lie at an odd address.
                let mut halves = [f16::ZERO; 64];
                for (o, b) in out.chunks_mut(64).zip(bytes.chunks(128)) {
                    for (half, b) in halves.iter_mut().zip(b.as_chunks::<2>().0) {
                        *half = f16::from_le_bytes(*b);
                    }
                    halves[..o.len()].convert_to_f32_slice(o);
                }
            }
        }
    }
}

/// A tensor of the checkpoint ready to be read.
#[derive(Clone)]
pub struct SourceTensor {
    /// How values are stored.
    pub float: Float,
    /// The values, row-major.
    pub data: bytes::Bytes,
}

/// One tensor of the GGUF and how it comes about.
#[derive(Clone, Debug)]
pub struct Planned {
    /// Name in the GGUF.
    pub name: String,
    /// Sizes, first varies fastest.
    pub dims: Vec<u64>,
    /// Names of the source tensors.
    pub sources: Vec<String>,
    /// What happens to the values.
    pub transform: Transform,
    /// Which part of the model it is of.
    pub part: Part,
}

impl Planned {
    /// Values per row.
    pub fn cols(&self) -> usize {
        self.dims[0] as usize
    }

    /// Rows of all matrices together.
    pub fn rows(&self) -> usize {
        self.dims[1..].iter().product::<u64>() as usize
    }

    /// Values in all.
    pub fn weights(&self) -> u64 {
        self.dims.iter().product()
    }

    /// Whether rows can be copied as bytes into a file that stores `float` values.
    pub fn is_byte_copy(&self, float: Float, sources: &[SourceTensor]) -> bool {
        self.transform.columns.is_none()
            && self.transform.elementwise == Elementwise::Copy
            && sources.iter().all(|s| s.float == float)
    }

    /// The bytes of source row of output row `r`.
    pub fn row_bytes<'a>(&self, sources: &'a [SourceTensor], r: usize) -> (Float, &'a [u8]) {
        let (tensor, row) = self.transform.rows.source(r as u64);
        let source = &sources[tensor];
        let len = self.cols() * source.float.bytes();
        (source.float, &source.data[row as usize * len..][..len])
    }

    /// Writes rows `first ..` of the tensor, as many as `out` holds, as f32.
    pub fn read_rows(&self, sources: &[SourceTensor], first: usize, out: &mut [f32]) {
        let cols = self.cols();
        let mut source_order = vec![0.0; if self.transform.columns.is_some() { cols } else { 0 }];
        for (i, row) in out.chunks_mut(cols).enumerate() {
            let (float, bytes) = self.row_bytes(sources, first + i);
            match self.transform.columns {
                None => float.decode(bytes, row),
                Some(heads) => {
                    float.decode(bytes, &mut source_order);
                    for (c, x) in row.iter_mut().enumerate() {
                        *x = source_order[heads.source(c as u64) as usize];
                    }
                }
            }
            if self.transform.elementwise != Elementwise::Copy {
                row.iter_mut().for_each(|x| *x = self.transform.elementwise.apply(*x));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_heads_go_from_grouped_to_tiled_order() {
        // 2 key heads with 3 value heads each: grouped [a0 a1 a2 b0 b1 b2] becomes tiled [a0 b0 a1 b1 a2 b2].
        let heads = ValueHeads { start: 1, width: 2, key_heads: 2, per_key: 3 };
        let order: Vec<u64> = (0..13).map(|r| heads.source(r)).collect();
        assert_eq!(order, [0, 1, 2, 7, 8, 3, 4, 9, 10, 5, 6, 11, 12]);
    }

    #[test]
    fn fused_tensors_are_split_by_runs_of_rows() {
        let up = RowMap::Slices { rows: 2, stride: 4, offset: 2 };
        assert_eq!((0..6).map(|r| up.source(r).1).collect::<Vec<_>>(), [2, 3, 6, 7, 10, 11]);
        assert_eq!(RowMap::Stacked { rows: 2 }.source(5), (2, 1));
    }

    #[test]
    fn plus_one_is_computed_in_f32() {
        // bf16 would round 1 + 2^-8 to 1.
        let x = bf16::from_f32(2f32.powi(-8));
        let planned = Planned {
            name: "blk.0.attn_norm.weight".into(),
            dims: vec![1],
            sources: vec!["a".into()],
            transform: Transform { elementwise: Elementwise::PlusOne, ..Transform::plain() },
            part: Part::Trunk,
        };
        let source = SourceTensor { float: Float::BF16, data: bytes::Bytes::copy_from_slice(&x.to_le_bytes()) };
        let mut out = [0.0];
        planned.read_rows(&[source], 0, &mut out);
        assert_eq!(out, [1.0 + 2f32.powi(-8)]);
    }
}
