//! Which tensors a model of a given geometry needs: the converter's name rules, laid over a file.

use strata_core::convert::names::{self, Part, Rule};
use strata_core::convert::{HfConfig, Mixer};
use strata_core::gguf::{GgufFile, TensorInfo};
use strata_core::model::{LayerKind, ModelConfig};

/// One tensor the model needs.
pub struct Expected {
    /// Its name in a GGUF.
    pub name: String,
    /// Its sizes in a GGUF, first varies fastest.
    pub dims: Vec<u64>,
    /// Trunk, MTP head or vision encoder.
    pub part: Part,
    /// Names it may have in a checkpoint, the usual one first.
    pub hf_names: Vec<String>,
    /// Its shape in a checkpoint (row-major).
    pub hf_shape: Vec<u64>,
    /// The name of expert 0's own tensor, where a checkpoint may hold one per expert.
    pub hf_first_expert: Vec<String>,
    /// A file without it still runs.
    pub optional: bool,
}

/// How a file holds an expected tensor.
pub enum Held<'a> {
    /// Under its own name and with its shape.
    AsExpected(&'a TensorInfo),
    /// Gate and up experts in one tensor.
    Fused(&'a TensorInfo),
    /// Under its own name, with another shape.
    WrongShape(&'a TensorInfo),
    /// Not at all.
    Missing,
}

/// The geometry in the converter's words, so that its rules can be asked.
pub fn rules_config(c: &ModelConfig, tied_head: bool) -> HfConfig {
    let mixer = |kind: &LayerKind| match kind {
        LayerKind::Attention => Mixer::Attention,
        LayerKind::DeltaNet => Mixer::DeltaNet,
    };
    let delta = |take: fn(&strata_core::model::DeltaConfig) -> usize| c.delta.as_ref().map_or(1, take) as u64;
    HfConfig {
        hidden: c.hidden as u64,
        layers: c.layer_kinds.iter().map(mixer).collect(),
        full_attention_interval: 4,
        mtp_layers: Some(c.mtp_layers as u64),
        heads: c.attention.heads as u64,
        kv_heads: c.attention.kv_heads as u64,
        head_dim: c.attention.head_dim as u64,
        key_heads: delta(|d| d.key_heads),
        value_heads: delta(|d| d.value_heads),
        key_head_dim: delta(|d| d.key_dim),
        value_head_dim: delta(|d| d.value_dim),
        conv_kernel: delta(|d| d.conv_width),
        experts: c.moe.experts as u64,
        experts_used: c.moe.used as u64,
        expert_ff: c.moe.ff as u64,
        shared_expert_ff: c.moe.shared_ff as u64,
        vocab: c.vocab as u64,
        tied_head,
        context: c.context as u64,
        norm_eps: c.norm_eps,
        rope_base: c.rope.base,
        rope_dim: c.rope.dims as u64,
        rope_sections: c.rope.sections.map(|s| s as i32),
        rope_scaling: None,
        vision: None,
    }
}

/// Everything the trunk needs.
pub fn trunk(config: &HfConfig) -> Vec<Expected> {
    let mut all = Vec::new();
    for rule in names::trunk_globals(config) {
        let prefixes: &[&str] =
            if rule.gguf == "output.weight" { &names::HEAD_PREFIXES } else { &names::TRUNK_PREFIXES };
        all.push(expected(&rule, String::new(), prefixes, "", Part::Trunk));
    }
    for (i, mixer) in config.layers.iter().enumerate() {
        for rule in names::layer(config, *mixer) {
            all.push(expected(
                &rule,
                format!("blk.{i}."),
                &names::TRUNK_PREFIXES,
                &format!("layers.{i}."),
                Part::Trunk,
            ));
        }
    }
    all
}

/// Everything an MTP head of `layers` layers needs when it follows `trunk_layers` trunk layers.
pub fn mtp(config: &HfConfig, trunk_layers: u64, layers: u64) -> Vec<Expected> {
    let mut all = Vec::new();
    for m in 0..layers {
        let block = format!("blk.{}.", trunk_layers + m);
        for rule in names::layer(config, Mixer::Attention) {
            all.push(expected(&rule, block.clone(), &names::MTP_PREFIXES, &format!("layers.{m}."), Part::Mtp));
        }
        if m == 0 {
            for rule in names::mtp_extra(config) {
                all.push(expected(&rule, block.clone(), &names::MTP_PREFIXES, "", Part::Mtp));
            }
        }
    }
    all
}

fn expected(rule: &Rule, block: String, prefixes: &[&str], layer: &str, part: Part) -> Expected {
    let hf_names =
        prefixes.iter().flat_map(|p| rule.hf.iter().map(move |hf| format!("{p}{layer}{hf}"))).collect::<Vec<_>>();
    let expert = |pattern: &String| {
        prefixes.iter().map(|p| format!("{p}{layer}{}", pattern.replace("{}", "0"))).collect::<Vec<_>>()
    };
    Expected {
        name: format!("{block}{}", rule.gguf),
        dims: rule.dims.clone(),
        part,
        hf_names,
        hf_shape: rule.shape.clone(),
        hf_first_expert: rule.per_expert.as_ref().map(expert).unwrap_or_default(),
        // Without a norm of its own the head uses the trunk's.
        optional: rule.optional || rule.gguf == "nextn.shared_head_norm.weight",
    }
}

/// How `file` holds `expected`.
pub fn held<'a>(file: &'a GgufFile, expected: &Expected) -> Held<'a> {
    if let Some(t) = file.tensor(&expected.name) {
        let same = trimmed(&t.dims) == trimmed(&expected.dims);
        return if same { Held::AsExpected(t) } else { Held::WrongShape(t) };
    }
    for half in ["ffn_gate_exps.weight", "ffn_up_exps.weight"] {
        if let Some(block) = expected.name.strip_suffix(half)
            && let Some(t) = file.tensor(&format!("{block}ffn_gate_up_exps.weight"))
        {
            let mut both = expected.dims.clone();
            both[1] *= 2;
            return if trimmed(&t.dims) == trimmed(&both) { Held::Fused(t) } else { Held::WrongShape(t) };
        }
    }
    Held::Missing
}

/// `[n]` and `[n, 1]` are the same vector.
pub fn trimmed(dims: &[u64]) -> &[u64] {
    let len = dims.iter().rposition(|d| *d != 1).map_or(1, |last| last + 1);
    &dims[..len.min(dims.len())]
}

/// Everything the vision encoder needs, where the configuration describes one.
pub fn vision(config: &HfConfig) -> Vec<Expected> {
    let rules = config.vision.as_ref().map(names::vision).unwrap_or_default();
    rules.iter().map(|r| expected(r, String::new(), &names::VISION_PREFIXES, "", Part::Vision)).collect()
}
