//! A weight matrix as it lies in a file: rows of blocks, used in place.

use crate::format::TensorType;
use bytes::Bytes;

/// A matrix of `rows x cols` weights stored row by row in blocks of `ty`. A 3-D expert tensor is one `Matrix` with
/// `experts * rows` rows; expert `e` owns rows `e*rows .. (e+1)*rows`.
///
/// `data` may start at any address (a memory map or an embedded file): kernels use unaligned loads.
#[derive(Clone)]
pub struct Matrix {
    /// How the weights are stored.
    pub ty: TensorType,
    /// Output width (number of stored rows).
    pub rows: usize,
    /// Input width (weights per row), a multiple of the block size.
    pub cols: usize,
    /// `rows * ty.row_bytes(cols)` bytes.
    pub data: Bytes,
}
