//! The coarse operations a device offers to the forward pass.
//!
//! Each op is as large as a backend may want to fuse: attention over a cache with its norms, rope and gate, a delta-net step
//! with its convolution and norm, a whole mixture of experts. The CPU implementation is [`crate::cpu::CpuDevice`]; its scalar
//! code is the readable reference of every op.
//!
//! **Contract**: what an op writes for a row depends only on that row's inputs and on its slot's cache or state, bit for bit:
//! not on the other rows of the call, on how the rows were cut into calls, nor on the number of threads.

use crate::Matrix;
use crate::format::TensorType;
use std::io;

/// Widest convolution of a delta-net layer.
pub const MAX_CONV_WIDTH: usize = 64;

/// What a device can refuse.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum DeviceError {
    /// The device has no kernels for this storage format.
    #[error(
        "stored as {found}, which this device cannot compute with (F32, F16, BF16, Q8_0, Q4_K, Q5_K and Q6_K work)"
    )]
    Format {
        /// The format's name.
        found: &'static str,
    },
    /// A matrix whose bytes do not match its dimensions.
    #[error("{rows} x {cols} weights as {format} need {expected} bytes, found {found}")]
    Size {
        /// The format's name.
        format: &'static str,
        /// Stored rows.
        rows: usize,
        /// Weights per row.
        cols: usize,
        /// Bytes the dimensions ask for; 0 when the dimensions themselves are impossible.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
}

/// How keys and values are kept in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KvType {
    /// Half precision; values beyond its range are held at its largest.
    #[default]
    F16,
    /// Single precision.
    F32,
}

impl KvType {
    /// Bytes of one value.
    pub fn bytes(self) -> usize {
        match self {
            KvType::F16 => 2,
            KvType::F32 => 4,
        }
    }
}

/// Consecutive rows of a call that belong to one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotRows {
    /// Index into the caches or states given to the op.
    pub slot: usize,
    /// First row of the call that is this slot's.
    pub first: usize,
    /// How many rows.
    pub count: usize,
    /// Rows the slot's cache held before: the cache index of the first row.
    pub held: usize,
    /// Whether recurrent state stays uncommitted (see [`Device::delta_commit`]).
    pub verify: bool,
}

/// Geometry of a gated attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionShape {
    /// Query heads, a multiple of `kv_heads`.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Width of a query, key and value head.
    pub head_dim: usize,
    /// Leading dims of a head that rope turns, even and at most `head_dim`.
    pub rotary_dims: usize,
    /// Epsilon of the query and key norms.
    pub norm_eps: f32,
}

/// Geometry of a gated delta-net layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaShape {
    /// Key (and query) heads.
    pub key_heads: usize,
    /// Value heads, a multiple of `key_heads`; value head `i` uses key head `i % key_heads`.
    pub value_heads: usize,
    /// Width of a key head.
    pub key_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
    /// Taps of the causal convolution, 2 to [`MAX_CONV_WIDTH`]; the state holds `conv_width - 1` rows.
    pub conv_width: usize,
    /// Epsilon of the output norm.
    pub norm_eps: f32,
}

impl DeltaShape {
    /// Channels of the convolution: queries, keys and values.
    pub fn conv_channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }

    /// Values of the matrix state: `value_heads x key_dim x value_dim`.
    pub fn state_len(&self) -> usize {
        self.value_heads * self.key_dim * self.value_dim
    }

    /// Values of the convolution state: `(conv_width - 1) x conv_channels`.
    pub fn conv_len(&self) -> usize {
        (self.conv_width - 1) * self.conv_channels()
    }
}

/// Geometry of a mixture of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Experts to choose from.
    pub experts: usize,
    /// Experts chosen per row.
    pub used: usize,
    /// Inner width of an expert.
    pub ff: usize,
    /// Inner width of the shared expert.
    pub shared_ff: usize,
}

/// Small tensors of a gated attention layer.
pub struct AttentionWeights<D: Device> {
    /// `[head_dim]`
    pub q_norm: D::Vector,
    /// `[head_dim]`
    pub k_norm: D::Vector,
}

/// Small tensors of a delta-net layer.
pub struct DeltaWeights<D: Device> {
    /// `[conv_width x conv_channels]`, oldest tap first (the file's tensor transposed).
    pub conv: D::Vector,
    /// `[value_heads]`
    pub dt_bias: D::Vector,
    /// `[value_heads]`, `-exp(A_log)`.
    pub a: D::Vector,
    /// `[value_dim]`
    pub norm: D::Vector,
}

/// Gate and up projections of all experts.
pub enum ExpertGateUp<D: Device> {
    /// Two tensors of `experts * ff x hidden`.
    Split {
        /// Gate projections.
        gate: D::Weight,
        /// Up projections.
        up: D::Weight,
    },
    /// One tensor of `experts * 2 ff x hidden`, an expert's gate rows first.
    Fused(D::Weight),
}

/// Weights of a mixture of experts.
pub struct MoeWeights<D: Device> {
    /// `[experts x hidden]`
    pub router: D::Weight,
    /// Gate and up projections.
    pub gate_up: ExpertGateUp<D>,
    /// `[experts * hidden x ff]`
    pub down: D::Weight,
    /// `[1 x hidden]`, the gate of the shared expert.
    pub shared_router: D::Weight,
    /// `[shared_ff x hidden]`
    pub shared_gate: D::Weight,
    /// `[shared_ff x hidden]`
    pub shared_up: D::Weight,
    /// `[hidden x shared_ff]`
    pub shared_down: D::Weight,
}

/// One row to embed.
#[derive(Clone, Copy, Debug)]
pub enum EmbedRow<'a> {
    /// A row of the embedding table.
    Token(u32),
    /// Values given from outside (a picture row).
    Values(&'a [f32]),
}

/// A device that can run the model. Buffers hold `rows x width` f32 values, row after row; an op sizes its outputs.
pub trait Device: Send + Sync + Sized + 'static {
    /// A weight matrix where the device can use it.
    type Weight: Send + Sync;
    /// A small f32 tensor.
    type Vector: Send + Sync;
    /// A work buffer of f32 rows.
    type Buffer: Send + Default;
    /// Keys and values of one layer of one slot.
    type KvCache: Send + Sync;
    /// Convolution and matrix state of one delta-net layer of one slot, with the uncommitted rows of a verify window.
    type DeltaState: Send + Sync;
    /// Work space of the ops, kept from call to call.
    type Scratch: Send;

    /// Takes a weight matrix. Errors when the format has no kernels or the bytes do not match the dimensions.
    fn weight(&self, matrix: Matrix) -> Result<Self::Weight, DeviceError>;
    /// The first `rows` rows of a weight matrix, sharing its memory.
    fn weight_rows(&self, weight: &Self::Weight, rows: usize) -> Self::Weight;
    /// Takes a small f32 tensor.
    fn vector(&self, values: Vec<f32>) -> Self::Vector;
    /// Fresh work space.
    fn scratch(&self) -> Self::Scratch;

    /// Copies values to the device.
    fn upload(&self, values: &[f32], out: &mut Self::Buffer);
    /// Appends the device's values to `out`.
    fn download(&self, buffer: &Self::Buffer, out: &mut Vec<f32>);

    /// Rows of an embedding table (any format) or given values: `rows x cols of table`.
    fn embed(&self, table: &Self::Weight, rows: &[EmbedRow<'_>], out: &mut Self::Buffer);
    /// `out[i] = x[rows[i]]` with rows of `width` values.
    fn gather(&self, x: &Self::Buffer, width: usize, rows: &[usize], out: &mut Self::Buffer);
    /// `out[i] = a[i] ++ b[i]`, both with rows of `width` values.
    fn concat(&self, a: &Self::Buffer, b: &Self::Buffer, width: usize, out: &mut Self::Buffer);
    /// `out = x * rsqrt(mean(x^2) + eps) * weight` per row of the weight's length.
    fn rms_norm(&self, x: &Self::Buffer, weight: &Self::Vector, eps: f32, out: &mut Self::Buffer);
    /// `x += y`.
    fn add(&self, x: &mut Self::Buffer, y: &Self::Buffer);
    /// `out = x . weight^T` for several weights with the same input of `rows` rows.
    fn matmul(
        &self,
        scratch: &mut Self::Scratch,
        x: &Self::Buffer,
        rows: usize,
        weights: &mut [(&Self::Weight, &mut Self::Buffer)],
    );

    /// Gated causal attention: norms of queries and keys, rope, cache write, softmax over the slot's cache, gate.
    ///
    /// `q` is `rows x heads x [query | gate]`, `k` and `v` are `rows x kv_heads x head_dim`, `rope` is
    /// `rows x [cos | sin]` of `rotary_dims / 2` values each, `out` becomes `rows x heads x head_dim`.
    /// A row attends to the cache indices up to its own, `held + its number among the slot's rows`.
    fn attention(
        &self,
        scratch: &mut Self::Scratch,
        shape: &AttentionShape,
        weights: &AttentionWeights<Self>,
        input: AttentionInput<'_, Self>,
        slots: &[SlotRows],
        caches: &mut [&mut Self::KvCache],
        out: &mut Self::Buffer,
    );

    /// Gated delta net: convolution, SiLU, norms, recurrence, gated output norm.
    ///
    /// `qkv` is `rows x conv_channels`, `z` is `rows x value_heads x value_dim`, `beta` and `alpha` are `rows x value_heads`,
    /// `out` becomes `rows x value_heads x value_dim`. A slot with `verify` set leaves its state as it was and remembers its
    /// rows for [`Device::delta_commit`].
    fn delta_net(
        &self,
        scratch: &mut Self::Scratch,
        shape: &DeltaShape,
        weights: &DeltaWeights<Self>,
        input: DeltaInput<'_, Self>,
        slots: &[SlotRows],
        states: &mut [&mut Self::DeltaState],
        out: &mut Self::Buffer,
    );

    /// Commits the first `rows` rows of the verify window that a state remembers, as if only those had been read.
    fn delta_commit(&self, state: &mut Self::DeltaState, rows: usize);

    /// Mixture of experts with a gated shared expert, added to `residual`: `x` is `rows x hidden`, the normed input.
    /// Experts are chosen by router probability, ties by the lower index, and added in rank order.
    fn moe(
        &self,
        scratch: &mut Self::Scratch,
        shape: &MoeShape,
        weights: &MoeWeights<Self>,
        x: &Self::Buffer,
        rows: usize,
        residual: &mut Self::Buffer,
    );

    /// An empty cache; it grows with its rows.
    fn kv_cache(&self, shape: &AttentionShape, kv_type: KvType) -> Self::KvCache;
    /// Bytes a cache takes for `rows` rows, in the steps it grows by.
    fn kv_cache_bytes(&self, shape: &AttentionShape, kv_type: KvType, rows: usize) -> u64;
    /// Makes `to` equal to the first `rows` rows of `from`.
    fn kv_copy(&self, from: &Self::KvCache, rows: usize, to: &mut Self::KvCache);
    /// Gives the first `rows` rows as bytes, in an order that depends on nothing else.
    fn kv_export(&self, cache: &Self::KvCache, rows: usize, sink: Sink<'_>) -> io::Result<()>;
    /// Reads what [`Device::kv_export`] gave.
    fn kv_import(&self, cache: &mut Self::KvCache, rows: usize, source: &mut dyn io::Read) -> io::Result<()>;

    /// A state that has read nothing.
    fn delta_state(&self, shape: &DeltaShape) -> Self::DeltaState;
    /// Bytes of one state, with room for a verify window of `verify_rows` rows.
    fn delta_state_bytes(&self, shape: &DeltaShape, verify_rows: usize) -> u64;
    /// Back to having read nothing.
    fn delta_reset(&self, state: &mut Self::DeltaState);
    /// Makes `to` equal to `from`, uncommitted rows left out.
    fn delta_copy(&self, from: &Self::DeltaState, to: &mut Self::DeltaState);
    /// Gives the committed state as bytes.
    fn delta_export(&self, state: &Self::DeltaState, sink: Sink<'_>) -> io::Result<()>;
    /// Reads what [`Device::delta_export`] gave.
    fn delta_import(&self, state: &mut Self::DeltaState, source: &mut dyn io::Read) -> io::Result<()>;
}

/// Where exported bytes go.
pub type Sink<'a> = &'a mut dyn FnMut(&[u8]) -> io::Result<()>;

/// Rows of [`Device::attention`].
pub struct AttentionInput<'a, D: Device> {
    /// `rows x heads x [query | gate]`
    pub q: &'a D::Buffer,
    /// `rows x kv_heads x head_dim`
    pub k: &'a D::Buffer,
    /// `rows x kv_heads x head_dim`
    pub v: &'a D::Buffer,
    /// `rows x [cos | sin]`
    pub rope: &'a D::Buffer,
}

/// Rows of [`Device::delta_net`].
pub struct DeltaInput<'a, D: Device> {
    /// `rows x conv_channels`
    pub qkv: &'a D::Buffer,
    /// `rows x value_heads x value_dim`
    pub z: &'a D::Buffer,
    /// `rows x value_heads`
    pub beta: &'a D::Buffer,
    /// `rows x value_heads`
    pub alpha: &'a D::Buffer,
}

/// Checks that a matrix can be computed with and that its bytes match its dimensions.
pub fn check_matrix(matrix: &Matrix) -> Result<(), DeviceError> {
    let format = TensorType::name(matrix.ty);
    if !matrix.ty.computable() {
        return Err(DeviceError::Format { found: format });
    }
    let expected = matrix.ty.row_bytes(matrix.cols).and_then(|row| row.checked_mul(matrix.rows)).unwrap_or(0);
    if expected == 0 || expected != matrix.data.len() {
        let (rows, cols, found) = (matrix.rows, matrix.cols, matrix.data.len());
        return Err(DeviceError::Size { format, rows, cols, expected, found });
    }
    Ok(())
}
