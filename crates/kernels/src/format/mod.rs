//! Storage formats of tensors: every ggml type by name, number and size; quantize and dequantize for those strata
//! computes with.
//!
//! The table of types is [`tensor_type`]; the byte layout of the block formats strata reads is [`blocks`], and nowhere
//! else.

pub mod blocks;
mod dequantize;
mod quantize;
mod quantize_asymmetric;
mod quantize_fit;
mod quantize_symmetric;
mod tensor_type;

pub use dequantize::dequantize;
pub use quantize::quantize;
pub use tensor_type::TensorType;

/// Why a buffer cannot be read or written as blocks of a type.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// The type is known by size only.
    #[error("{} is not a type strata computes with (it does F32, F16, BF16, Q8_0, Q4_K, Q5_K, Q6_K)", .0.name())]
    NotComputable(TensorType),
    /// The number of weights is not a whole number of blocks.
    #[error("{} rows need a multiple of {} weights, found {found}", .ty.name(), .ty.block_size())]
    NotWholeBlocks {
        /// The type asked for.
        ty: TensorType,
        /// Weights (or weights per row) given.
        found: usize,
    },
    /// The byte buffer and the weight buffer do not belong together.
    #[error("{weights} weights of {} take {expected} bytes, found {found}", .ty.name())]
    Length {
        /// The type asked for.
        ty: TensorType,
        /// Weights given.
        weights: usize,
        /// Bytes those weights take.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// A weight cannot be stored: not finite, or too large for `F16`.
    #[error("weight {index} is {value}, which {} cannot store", .ty.name())]
    NotRepresentable {
        /// The type asked for.
        ty: TensorType,
        /// Which weight of the call.
        index: usize,
        /// Its value, as text (so that NaN compares equal).
        value: String,
    },
    /// Importance weights must be one per column.
    #[error("importance weights: expected {expected} (one per column), found {found}")]
    Importance {
        /// Columns of the tensor.
        expected: usize,
        /// Importance values given.
        found: usize,
    },
}
