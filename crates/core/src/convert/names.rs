//! Tensor names: what a Hugging Face tensor is called in a GGUF, and what is done to it on the way.
//!
//! The rules are tables of `(Hugging Face name, GGUF name, shape, transform)` per kind of layer. Everything that knows a
//! tensor by name during conversion, grafting, verification and comparison asks here.

use super::config::{HfConfig, Mixer, VisionConfig};
use super::transform::{Elementwise, RowMap, Transform, ValueHeads};

/// Which part of the model a tensor belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Part {
    /// The main layers, embedding and head.
    Trunk,
    /// The MTP head.
    Mtp,
    /// The vision encoder.
    Vision,
}

/// What a tensor does, as far as the choice of its type depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// Token embedding.
    Embedding,
    /// Output head.
    Head,
    /// Expert gate or up matrices.
    ExpertIn,
    /// Expert down matrices.
    ExpertOut,
    /// The shared expert's down matrix.
    SharedOut,
    /// The value projection of an attention layer, or the fused projection of a delta net layer.
    Value,
    /// The key projection of an attention layer.
    Key,
    /// The output projection of an attention layer.
    AttentionOut,
    /// The delta net's decay and beta projections.
    DeltaGate,
    /// Any other matrix of a layer.
    Dense,
    /// Norms, biases, the router and other tensors that stay F32.
    Small,
}

/// One rule: a tensor of the Hugging Face side and the one it becomes.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Name on the Hugging Face side, without the layer's prefix. Several names: alternatives, in order of preference.
    pub hf: Vec<String>,
    /// Name in the GGUF, without the layer's prefix.
    pub gguf: String,
    /// Shape on the Hugging Face side (row-major).
    pub shape: Vec<u64>,
    /// Sizes in the GGUF (first varies fastest).
    pub dims: Vec<u64>,
    /// What happens to the values.
    pub transform: Transform,
    /// Whether a checkpoint may lack it.
    pub optional: bool,
    /// The Hugging Face side may have one tensor per expert instead, of this name with `{}` for the expert.
    pub per_expert: Option<String>,
}

impl Rule {
    fn new(hf: &str, gguf: &str, shape: &[u64]) -> Rule {
        Rule {
            hf: vec![hf.to_string()],
            gguf: gguf.to_string(),
            shape: shape.to_vec(),
            dims: shape.iter().rev().copied().collect(),
            transform: Transform::plain(),
            optional: false,
            per_expert: None,
        }
    }

    /// A zero-centred norm: stored with the 1 added.
    fn norm(hf: &str, gguf: &str, width: u64) -> Rule {
        Rule::new(hf, gguf, &[width]).elementwise(Elementwise::PlusOne)
    }

    fn elementwise(mut self, op: Elementwise) -> Rule {
        self.transform.elementwise = op;
        self
    }

    fn rows(mut self, rows: RowMap) -> Rule {
        self.transform.rows = rows;
        self
    }

    fn columns(mut self, heads: ValueHeads) -> Rule {
        self.transform.columns = Some(heads);
        self
    }

    fn dims(mut self, dims: &[u64]) -> Rule {
        self.dims = dims.to_vec();
        self
    }

    fn optional(mut self) -> Rule {
        self.optional = true;
        self
    }

    fn or_per_expert(mut self, name: &str) -> Rule {
        // Older folders give the fused tensor a '.weight'.
        self.hf.push(format!("{}.weight", self.hf[0]));
        self.per_expert = Some(name.to_string());
        self
    }
}

/// Tensors outside the layers.
pub fn trunk_globals(c: &HfConfig) -> Vec<Rule> {
    let mut rules = vec![
        Rule::new("embed_tokens.weight", "token_embd.weight", &[c.vocab, c.hidden]),
        Rule::norm("norm.weight", "output_norm.weight", c.hidden),
    ];
    if !c.tied_head {
        rules.push(Rule::new("lm_head.weight", "output.weight", &[c.vocab, c.hidden]));
    }
    rules
}

/// Tensors of one layer: mixer, norms and experts.
pub fn layer(c: &HfConfig, mixer: Mixer) -> Vec<Rule> {
    let mut rules = vec![Rule::norm("input_layernorm.weight", "attn_norm.weight", c.hidden)];
    rules.extend(match mixer {
        Mixer::Attention => attention(c),
        Mixer::DeltaNet => delta_net(c),
    });
    rules.push(Rule::norm("post_attention_layernorm.weight", "post_attention_norm.weight", c.hidden));
    rules.extend(mixture_of_experts(c));
    rules
}

fn attention(c: &HfConfig) -> Vec<Rule> {
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    vec![
        // Query and output gate of each head, one after the other.
        Rule::new("self_attn.q_proj.weight", "attn_q.weight", &[2 * q, c.hidden]),
        Rule::new("self_attn.k_proj.weight", "attn_k.weight", &[kv, c.hidden]),
        Rule::new("self_attn.v_proj.weight", "attn_v.weight", &[kv, c.hidden]),
        Rule::new("self_attn.o_proj.weight", "attn_output.weight", &[c.hidden, q]),
        Rule::norm("self_attn.q_norm.weight", "attn_q_norm.weight", c.head_dim),
        Rule::norm("self_attn.k_norm.weight", "attn_k_norm.weight", c.head_dim),
    ]
}

fn delta_net(c: &HfConfig) -> Vec<Rule> {
    let heads = |width| ValueHeads { start: 0, width, key_heads: c.key_heads, per_key: c.value_heads / c.key_heads };
    let after_keys = ValueHeads { start: 2 * c.key_dim(), ..heads(c.value_head_dim) };
    let channels = 2 * c.key_dim() + c.value_dim();
    vec![
        Rule::new("linear_attn.in_proj_qkv.weight", "attn_qkv.weight", &[channels, c.hidden])
            .rows(RowMap::ValueHeads(after_keys)),
        Rule::new("linear_attn.in_proj_z.weight", "attn_gate.weight", &[c.value_dim(), c.hidden])
            .rows(RowMap::ValueHeads(heads(c.value_head_dim))),
        Rule::new("linear_attn.in_proj_b.weight", "ssm_beta.weight", &[c.value_heads, c.hidden])
            .rows(RowMap::ValueHeads(heads(1))),
        Rule::new("linear_attn.in_proj_a.weight", "ssm_alpha.weight", &[c.value_heads, c.hidden])
            .rows(RowMap::ValueHeads(heads(1))),
        Rule::new("linear_attn.conv1d.weight", "ssm_conv1d.weight", &[channels, 1, c.conv_kernel])
            .rows(RowMap::ValueHeads(after_keys))
            .dims(&[c.conv_kernel, channels]),
        Rule::new("linear_attn.dt_bias", "ssm_dt.bias", &[c.value_heads]).columns(heads(1)),
        Rule::new("linear_attn.A_log", "ssm_a", &[c.value_heads]).columns(heads(1)).elementwise(Elementwise::NegExp),
        // The delta net's own norm is not zero-centred.
        Rule::new("linear_attn.norm.weight", "ssm_norm.weight", &[c.value_head_dim]),
        Rule::new("linear_attn.out_proj.weight", "ssm_out.weight", &[c.hidden, c.value_dim()])
            .columns(heads(c.value_head_dim)),
    ]
}

fn mixture_of_experts(c: &HfConfig) -> Vec<Rule> {
    let (e, h, ff, shared) = (c.experts, c.hidden, c.expert_ff, c.shared_expert_ff);
    let half = |offset| RowMap::Slices { rows: ff, stride: 2 * ff, offset };
    vec![
        Rule::new("mlp.gate.weight", "ffn_gate_inp.weight", &[e, h]),
        Rule::new("mlp.experts.gate_up_proj", "ffn_gate_exps.weight", &[e, 2 * ff, h])
            .dims(&[h, ff, e])
            .rows(half(0))
            .or_per_expert("mlp.experts.{}.gate_proj.weight"),
        Rule::new("mlp.experts.gate_up_proj", "ffn_up_exps.weight", &[e, 2 * ff, h])
            .dims(&[h, ff, e])
            .rows(half(ff))
            .or_per_expert("mlp.experts.{}.up_proj.weight"),
        Rule::new("mlp.experts.down_proj", "ffn_down_exps.weight", &[e, h, ff])
            .or_per_expert("mlp.experts.{}.down_proj.weight"),
        Rule::new("mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", &[1, h]).dims(&[h]),
        Rule::new("mlp.shared_expert.gate_proj.weight", "ffn_gate_shexp.weight", &[shared, h]),
        Rule::new("mlp.shared_expert.up_proj.weight", "ffn_up_shexp.weight", &[shared, h]),
        Rule::new("mlp.shared_expert.down_proj.weight", "ffn_down_shexp.weight", &[h, shared]),
    ]
}

/// What the first MTP layer has besides a layer: names without `mtp.`, and without `blk.N.`.
pub fn mtp_extra(c: &HfConfig) -> Vec<Rule> {
    vec![
        Rule::new("fc.weight", "nextn.eh_proj.weight", &[c.hidden, 2 * c.hidden]),
        Rule::norm("pre_fc_norm_embedding.weight", "nextn.enorm.weight", c.hidden),
        Rule::norm("pre_fc_norm_hidden.weight", "nextn.hnorm.weight", c.hidden),
        Rule::norm("norm.weight", "nextn.shared_head_norm.weight", c.hidden),
        // Heads with an embedding or an output of their own (mtp_use_dedicated_embeddings).
        Rule::new("embed_tokens.weight", "nextn.embed_tokens.weight", &[c.vocab, c.hidden]).optional(),
        Rule::new("lm_head.weight", "nextn.shared_head_head.weight", &[c.vocab, c.hidden]).optional(),
    ]
}

/// The vision encoder, names without the `model.visual.` prefix.
pub fn vision(v: &VisionConfig) -> Vec<Rule> {
    let mut rules = Vec::new();
    let linear = |hf: &str, gguf: &str, out: u64, input: u64| {
        [
            Rule::new(&format!("{hf}.weight"), &format!("{gguf}.weight"), &[out, input]),
            Rule::new(&format!("{hf}.bias"), &format!("{gguf}.bias"), &[out]),
        ]
    };
    let layer_norm = |hf: &str, gguf: &str| {
        [
            Rule::new(&format!("{hf}.weight"), &format!("{gguf}.weight"), &[v.hidden]),
            Rule::new(&format!("{hf}.bias"), &format!("{gguf}.bias"), &[v.hidden]),
        ]
    };
    // One convolution per frame.
    for (frame, name) in [(0, "v.patch_embd.weight"), (1, "v.patch_embd.weight.1")] {
        rules.push(
            Rule::new("patch_embed.proj.weight", name, &[v.hidden, v.channels, v.temporal_patch, v.patch, v.patch])
                .dims(&[v.patch, v.patch, v.channels, v.hidden])
                .rows(RowMap::Slices { rows: v.patch, stride: v.temporal_patch * v.patch, offset: frame * v.patch }),
        );
    }
    rules.push(Rule::new("patch_embed.proj.bias", "v.patch_embd.bias", &[v.hidden]));
    rules.push(Rule::new("pos_embed.weight", "v.position_embd.weight", &[v.positions, v.hidden]));
    for block in 0..v.blocks {
        let (hf, gguf) = (format!("blocks.{block}"), format!("v.blk.{block}"));
        rules.extend(layer_norm(&format!("{hf}.norm1"), &format!("{gguf}.ln1")));
        rules.extend(layer_norm(&format!("{hf}.norm2"), &format!("{gguf}.ln2")));
        rules.extend(linear(&format!("{hf}.attn.qkv"), &format!("{gguf}.attn_qkv"), 3 * v.hidden, v.hidden));
        rules.extend(linear(&format!("{hf}.attn.proj"), &format!("{gguf}.attn_out"), v.hidden, v.hidden));
        rules.extend(linear(&format!("{hf}.mlp.linear_fc1"), &format!("{gguf}.ffn_up"), v.ff, v.hidden));
        rules.extend(linear(&format!("{hf}.mlp.linear_fc2"), &format!("{gguf}.ffn_down"), v.hidden, v.ff));
    }
    let merged = v.hidden * v.merge * v.merge;
    rules.extend(layer_norm("merger.norm", "v.post_ln"));
    rules.extend(linear("merger.linear_fc1", "mm.0", merged, merged));
    rules.extend(linear("merger.linear_fc2", "mm.2", v.out_hidden, merged));
    rules
}

/// Prefixes of the trunk's names, the usual one first.
pub const TRUNK_PREFIXES: [&str; 4] = ["model.language_model.", "model.", "language_model.model.", ""];
/// Where the head may lie.
pub const HEAD_PREFIXES: [&str; 4] = ["", "model.", "language_model.", "model.language_model."];
/// Prefixes of the MTP head's names.
pub const MTP_PREFIXES: [&str; 3] = ["mtp.", "model.mtp.", "model.language_model.mtp."];
/// Prefixes of the vision encoder's names.
pub const VISION_PREFIXES: [&str; 2] = ["model.visual.", "visual."];
/// Tensors that are computed, not learned.
pub const COMPUTED: [&str; 1] = ["rotary_emb.inv_freq"];

/// The part a Hugging Face tensor belongs to, by its name.
pub fn part_of_hf(name: &str) -> Part {
    if MTP_PREFIXES.iter().any(|p| name.starts_with(p)) {
        Part::Mtp
    } else if VISION_PREFIXES.iter().any(|p| name.starts_with(p)) {
        Part::Vision
    } else {
        Part::Trunk
    }
}

/// The layer number in a name such as `blk.12.attn_q.weight`.
pub fn layer_of(gguf_name: &str) -> Option<u64> {
    gguf_name.strip_prefix("blk.")?.split('.').next()?.parse().ok()
}

/// The class of a GGUF tensor, by its name and dimensions.
pub fn class_of(gguf_name: &str, dims: &[u64]) -> Class {
    let rest = match layer_of(gguf_name) {
        Some(_) => gguf_name.splitn(3, '.').nth(2).unwrap_or(""),
        None => gguf_name,
    };
    match rest {
        "token_embd.weight" | "nextn.embed_tokens.weight" => Class::Embedding,
        "output.weight" | "nextn.shared_head_head.weight" => Class::Head,
        "ffn_gate_exps.weight" | "ffn_up_exps.weight" | "ffn_gate_up_exps.weight" => Class::ExpertIn,
        "ffn_down_exps.weight" => Class::ExpertOut,
        "ffn_down_shexp.weight" => Class::SharedOut,
        "attn_v.weight" | "attn_qkv.weight" => Class::Value,
        "attn_k.weight" => Class::Key,
        "attn_output.weight" => Class::AttentionOut,
        "ssm_alpha.weight" | "ssm_beta.weight" => Class::DeltaGate,
        "ffn_gate_inp.weight" | "ffn_gate_inp_shexp.weight" | "ssm_conv1d.weight" | "v.position_embd.weight" => {
            Class::Small
        }
        _ if dims.len() < 2 || !rest.ends_with(".weight") && !rest.ends_with(".weight.1") => Class::Small,
        _ if rest.ends_with("norm.weight") => Class::Small,
        _ => Class::Dense,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_follow_the_name() {
        assert_eq!(class_of("blk.3.ffn_down_exps.weight", &[256, 256, 8]), Class::ExpertOut);
        assert_eq!(class_of("blk.40.nextn.eh_proj.weight", &[512, 256]), Class::Dense);
        assert_eq!(class_of("blk.0.ssm_a", &[8]), Class::Small);
        assert_eq!(class_of("blk.0.attn_norm.weight", &[256]), Class::Small);
        assert_eq!(class_of("blk.0.ffn_gate_inp_shexp.weight", &[256, 1]), Class::Small);
        assert_eq!(class_of("v.patch_embd.weight.1", &[16, 16, 3, 128]), Class::Dense);
        assert_eq!(class_of("output.weight", &[256, 6144]), Class::Head);
    }

    #[test]
    fn parts_and_layers_are_read_from_names() {
        assert_eq!(part_of_hf("model.mtp.fc.weight"), Part::Mtp);
        assert_eq!(part_of_hf("model.visual.pos_embed.weight"), Part::Vision);
        assert_eq!(part_of_hf("model.language_model.norm.weight"), Part::Trunk);
        assert_eq!(layer_of("blk.40.nextn.enorm.weight"), Some(40));
        assert_eq!(layer_of("output.weight"), None);
    }
}
