//! The model's tensors by name: shapes checked against the configuration, matrices used in place from the memory map.
//!
//! Tensor names live here and nowhere else in the model.

use super::config::{LayerKind, ModelConfig};
use super::error::ModelError;
use crate::gguf::GgufFile;
use strata_kernels::device::{AttentionWeights, DeltaWeights, ExpertGateUp, MoeWeights};
use strata_kernels::format::{self, TensorType};
use strata_kernels::{Device, Matrix};

/// Names of GGUF tensors.
pub mod names {
    /// Embedding table.
    pub const EMBEDDING: &str = "token_embd.weight";
    /// Norm after the last trunk layer.
    pub const OUTPUT_NORM: &str = "output_norm.weight";
    /// The head; files without it use the embedding table.
    pub const OUTPUT: &str = "output.weight";
    /// Norm before the mixer of a block.
    pub const ATTN_NORM: &str = "attn_norm.weight";
    /// Norm before the experts of a block.
    pub const POST_ATTENTION_NORM: &str = "post_attention_norm.weight";
    /// Decay of a delta-net layer; a block that has it is one.
    pub const SSM_A: &str = "ssm_a";
    /// Projection of the MTP head's two inputs.
    pub const NEXTN_EH_PROJ: &str = "nextn.eh_proj.weight";

    /// The full name of a block's tensor.
    pub fn block(block: usize, tensor: &str) -> String {
        format!("blk.{block}.{tensor}")
    }
}

/// A gated attention mixer.
pub struct AttentionLayer<D: Device> {
    /// `[heads * 2 head_dim x hidden]`, per head the query's rows, then the gate's.
    pub q: D::Weight,
    /// `[kv_heads * head_dim x hidden]`
    pub k: D::Weight,
    /// `[kv_heads * head_dim x hidden]`
    pub v: D::Weight,
    /// `[hidden x heads * head_dim]`
    pub output: D::Weight,
    /// Norms of queries and keys.
    pub small: AttentionWeights<D>,
}

/// A gated delta-net mixer.
pub struct DeltaLayer<D: Device> {
    /// `[conv_channels x hidden]`
    pub qkv: D::Weight,
    /// `[value_heads * value_dim x hidden]`
    pub gate: D::Weight,
    /// `[value_heads x hidden]`
    pub beta: D::Weight,
    /// `[value_heads x hidden]`
    pub alpha: D::Weight,
    /// `[hidden x value_heads * value_dim]`
    pub output: D::Weight,
    /// Convolution, decay and norm.
    pub small: DeltaWeights<D>,
}

/// How a layer mixes rows.
pub enum Mixer<D: Device> {
    /// Gated attention.
    Attention(AttentionLayer<D>),
    /// Gated delta net.
    DeltaNet(DeltaLayer<D>),
}

/// One layer.
pub struct Layer<D: Device> {
    /// `[hidden]`
    pub attn_norm: D::Vector,
    /// Attention or delta net.
    pub mixer: Mixer<D>,
    /// `[hidden]`
    pub post_norm: D::Vector,
    /// Experts.
    pub moe: MoeWeights<D>,
}

/// The MTP head.
pub struct MtpHead<D: Device> {
    /// `[hidden x 2 hidden]`, input: normed embedding, normed hidden.
    pub eh_proj: D::Weight,
    /// `[hidden]`
    pub embedding_norm: D::Vector,
    /// `[hidden]`
    pub hidden_norm: D::Vector,
    /// The attention layer.
    pub layer: Layer<D>,
    /// `[hidden]`; `output_norm` where the file has none.
    pub head_norm: D::Vector,
    /// `[vocab x hidden]`, where the head has its own.
    pub head: Option<D::Weight>,
    /// `[vocab x hidden]`, where the head has its own.
    pub embedding: Option<D::Weight>,
}

/// All weights.
pub struct Weights<D: Device> {
    /// `[vocab x hidden]`
    pub embedding: D::Weight,
    /// Trunk layers.
    pub layers: Vec<Layer<D>>,
    /// `[hidden]`
    pub output_norm: D::Vector,
    /// `[vocab x hidden]`
    pub output: D::Weight,
    /// The MTP head, when the file has one and it was asked for.
    pub mtp: Option<MtpHead<D>>,
    /// What was loaded, in bytes.
    pub sizes: WeightSizes,
}

/// Bytes of weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightSizes {
    /// Weights used in place.
    pub mapped: u64,
    /// Small tensors held as f32.
    pub small: u64,
    /// Trunk and head weights that one decode row reads.
    pub per_token: u64,
    /// Weights that one draft row of the MTP head reads, its vocabulary head included.
    pub per_draft: u64,
    /// The vocabulary head's part of them.
    pub draft_head: u64,
}

struct Loader<'a, D: Device> {
    file: &'a GgufFile,
    device: &'a D,
    config: &'a ModelConfig,
    mapped: u64,
    small: u64,
    /// Bytes one row reads of the weights loaded so far.
    per_row: u64,
    /// Bytes of the MTP layer's own vocabulary head.
    own_head: u64,
}

impl<D: Device> Weights<D> {
    /// Finds and checks every tensor. `use_mtp` false leaves the head out.
    pub fn load(file: &GgufFile, device: &D, config: &ModelConfig, use_mtp: bool) -> Result<Self, ModelError> {
        let mut loader = Loader { file, device, config, mapped: 0, small: 0, per_row: 0, own_head: 0 };
        let (hidden, vocab) = (config.hidden, config.vocab);
        let embedding = loader.matrix(names::EMBEDDING, vocab, hidden)?;
        loader.per_row = loader.mapped / vocab as u64;
        let kinds = config.layer_kinds.iter().enumerate();
        let layers = kinds.map(|(block, &kind)| loader.layer(block, kind)).collect::<Result<Vec<_>, _>>()?;
        let output_norm = loader.vector(names::OUTPUT_NORM, hidden)?;
        let output_name = if file.tensor(names::OUTPUT).is_some() { names::OUTPUT } else { names::EMBEDDING };
        let before = loader.per_row;
        let output = loader.matrix(output_name, vocab, hidden)?;
        let head_bytes = loader.per_row - before;
        let per_token = loader.per_row;
        let mtp = if use_mtp && config.mtp_layers > 0 { Some(loader.mtp()?) } else { None };
        let (per_draft, draft_head) = match &mtp {
            Some(_) if loader.own_head > 0 => (loader.per_row - per_token, loader.own_head),
            Some(_) => (loader.per_row - per_token + head_bytes, head_bytes),
            None => (0, 0),
        };
        let sizes = WeightSizes { mapped: loader.mapped, small: loader.small, per_token, per_draft, draft_head };
        Ok(Weights { embedding, layers, output_norm, output, mtp, sizes })
    }
}

fn without_trailing_ones(dims: &[u64]) -> &[u64] {
    let len = dims.iter().rposition(|&dim| dim != 1).map_or(1, |last| last + 1);
    &dims[..len.min(dims.len())]
}

impl<D: Device> Loader<'_, D> {
    fn file_name(&self) -> String {
        self.file.name().to_string()
    }

    fn find(&self, name: &str, needed_by: &str, dims: &[u64]) -> Result<Matrix, ModelError> {
        let tensor = self.file.tensor(name).ok_or_else(|| ModelError::MissingTensor {
            file: self.file_name(),
            tensor: name.to_string(),
            needed_by: needed_by.to_string(),
        })?;
        // [n] and [n, 1] are the same vector; converters write both.
        if without_trailing_ones(&tensor.dims) != without_trailing_ones(dims) {
            return Err(ModelError::TensorShape {
                file: self.file_name(),
                tensor: name.to_string(),
                expected: dims.to_vec(),
                found: tensor.dims.clone(),
            });
        }
        let cols = dims[0] as usize;
        let rows = dims[1..].iter().product::<u64>() as usize;
        Ok(Matrix { ty: tensor.ty, rows, cols, data: self.file.data(tensor) })
    }

    fn weight(&mut self, name: &str, matrix: Matrix) -> Result<D::Weight, ModelError> {
        self.mapped += matrix.data.len() as u64;
        self.device.weight(matrix).map_err(|source| ModelError::Weight { tensor: name.to_string(), source })
    }

    /// A matrix every row reads whole.
    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<D::Weight, ModelError> {
        let matrix = self.find(name, "a weight matrix", &[cols as u64, rows as u64])?;
        self.per_row += matrix.data.len() as u64;
        self.weight(name, matrix)
    }

    /// One matrix per expert.
    fn experts(&mut self, name: &str, rows: usize, cols: usize) -> Result<D::Weight, ModelError> {
        let moe = &self.config.moe;
        let dims = [cols as u64, rows as u64, moe.experts as u64];
        let matrix = self.find(name, "the experts", &dims)?;
        self.per_row += matrix.data.len() as u64 / moe.experts as u64 * moe.used as u64;
        self.weight(name, matrix)
    }

    fn values(&mut self, name: &str, needed_by: &str, dims: &[u64]) -> Result<Vec<f32>, ModelError> {
        let matrix = self.find(name, needed_by, dims)?;
        if !matches!(matrix.ty, TensorType::F32 | TensorType::F16 | TensorType::BF16) {
            return Err(ModelError::TensorType {
                file: self.file_name(),
                tensor: name.to_string(),
                expected: "F32, F16 or BF16",
                found: matrix.ty.name(),
            });
        }
        let mut values = vec![0.0; matrix.rows * matrix.cols];
        format::dequantize(matrix.ty, &matrix.data, &mut values).map_err(|_| ModelError::TensorShape {
            file: self.file_name(),
            tensor: name.to_string(),
            expected: dims.to_vec(),
            found: vec![matrix.data.len() as u64],
        })?;
        self.small += 4 * values.len() as u64;
        Ok(values)
    }

    fn vector(&mut self, name: &str, len: usize) -> Result<D::Vector, ModelError> {
        let values = self.values(name, "a norm or a small vector", &[len as u64])?;
        Ok(self.device.vector(values))
    }

    fn layer(&mut self, block: usize, kind: LayerKind) -> Result<Layer<D>, ModelError> {
        let hidden = self.config.hidden;
        let name = |tensor: &str| names::block(block, tensor);
        Ok(Layer {
            attn_norm: self.vector(&name(names::ATTN_NORM), hidden)?,
            mixer: match kind {
                LayerKind::Attention => Mixer::Attention(self.attention(block)?),
                LayerKind::DeltaNet => Mixer::DeltaNet(self.delta_net(block)?),
            },
            post_norm: self.vector(&name(names::POST_ATTENTION_NORM), hidden)?,
            moe: self.moe(block)?,
        })
    }

    fn attention(&mut self, block: usize) -> Result<AttentionLayer<D>, ModelError> {
        let config = self.config;
        let attention = config.attention;
        let (query_width, kv_width) = (attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim);
        let name = |tensor: &str| names::block(block, tensor);
        Ok(AttentionLayer {
            q: self.matrix(&name("attn_q.weight"), 2 * query_width, config.hidden)?,
            k: self.matrix(&name("attn_k.weight"), kv_width, config.hidden)?,
            v: self.matrix(&name("attn_v.weight"), kv_width, config.hidden)?,
            output: self.matrix(&name("attn_output.weight"), config.hidden, query_width)?,
            small: AttentionWeights {
                q_norm: self.vector(&name("attn_q_norm.weight"), attention.head_dim)?,
                k_norm: self.vector(&name("attn_k_norm.weight"), attention.head_dim)?,
            },
        })
    }

    fn delta_net(&mut self, block: usize) -> Result<DeltaLayer<D>, ModelError> {
        let hidden = self.config.hidden;
        let delta = self.config.delta.expect("a model with delta-net layers has their geometry");
        let values = delta.value_heads * delta.value_dim;
        let channels = 2 * delta.key_heads * delta.key_dim + values;
        let name = |tensor: &str| names::block(block, tensor);
        let taps = self.values(
            &name("ssm_conv1d.weight"),
            "the delta net's convolution",
            &[delta.conv_width as u64, channels as u64],
        )?;
        let conv = (0..delta.conv_width * channels)
            .map(|index| taps[index % channels * delta.conv_width + index / channels])
            .collect();
        Ok(DeltaLayer {
            qkv: self.matrix(&name("attn_qkv.weight"), channels, hidden)?,
            gate: self.matrix(&name("attn_gate.weight"), values, hidden)?,
            beta: self.matrix(&name("ssm_beta.weight"), delta.value_heads, hidden)?,
            alpha: self.matrix(&name("ssm_alpha.weight"), delta.value_heads, hidden)?,
            output: self.matrix(&name("ssm_out.weight"), hidden, values)?,
            small: DeltaWeights {
                conv: self.device.vector(conv),
                dt_bias: self.vector(&name("ssm_dt.bias"), delta.value_heads)?,
                a: self.vector(&name(names::SSM_A), delta.value_heads)?,
                norm: self.vector(&name("ssm_norm.weight"), delta.value_dim)?,
            },
        })
    }

    fn moe(&mut self, block: usize) -> Result<MoeWeights<D>, ModelError> {
        let hidden = self.config.hidden;
        let moe = self.config.moe;
        let name = |tensor: &str| names::block(block, tensor);
        let fused = name("ffn_gate_up_exps.weight");
        let gate_up = if self.file.tensor(&fused).is_some() {
            ExpertGateUp::Fused(self.experts(&fused, 2 * moe.ff, hidden)?)
        } else {
            ExpertGateUp::Split {
                gate: self.experts(&name("ffn_gate_exps.weight"), moe.ff, hidden)?,
                up: self.experts(&name("ffn_up_exps.weight"), moe.ff, hidden)?,
            }
        };
        Ok(MoeWeights {
            router: self.matrix(&name("ffn_gate_inp.weight"), moe.experts, hidden)?,
            gate_up,
            down: self.experts(&name("ffn_down_exps.weight"), hidden, moe.ff)?,
            shared_router: self.matrix(&name("ffn_gate_inp_shexp.weight"), 1, hidden)?,
            shared_gate: self.matrix(&name("ffn_gate_shexp.weight"), moe.shared_ff, hidden)?,
            shared_up: self.matrix(&name("ffn_up_shexp.weight"), moe.shared_ff, hidden)?,
            shared_down: self.matrix(&name("ffn_down_shexp.weight"), hidden, moe.shared_ff)?,
        })
    }

    fn mtp(&mut self) -> Result<MtpHead<D>, ModelError> {
        let (hidden, vocab) = (self.config.hidden, self.config.vocab);
        let block = self.config.trunk_layers;
        let name = |tensor: &str| names::block(block, tensor);
        let head_norm = name("nextn.shared_head_norm.weight");
        let head_norm = if self.file.tensor(&head_norm).is_some() { &head_norm } else { names::OUTPUT_NORM };
        Ok(MtpHead {
            eh_proj: self.matrix(&name(names::NEXTN_EH_PROJ), hidden, 2 * hidden)?,
            embedding_norm: self.vector(&name("nextn.enorm.weight"), hidden)?,
            hidden_norm: self.vector(&name("nextn.hnorm.weight"), hidden)?,
            layer: self.layer(block, LayerKind::Attention)?,
            head_norm: self.vector(head_norm, hidden)?,
            head: self.own_table(&name("nextn.shared_head_head.weight"), vocab, true)?,
            embedding: self.own_table(&name("nextn.embed_tokens.weight"), vocab, false)?,
        })
    }

    /// A vocabulary table of the MTP head, where the file has one.
    fn own_table(&mut self, name: &str, vocab: usize, read_whole: bool) -> Result<Option<D::Weight>, ModelError> {
        if self.file.tensor(name).is_none() {
            return Ok(None);
        }
        let before = self.per_row;
        let table = self.matrix(name, vocab, self.config.hidden)?;
        if read_whole {
            self.own_head = self.per_row - before;
        } else {
            self.per_row = before;
        }
        Ok(Some(table))
    }
}
