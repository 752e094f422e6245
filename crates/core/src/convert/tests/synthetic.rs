//! Small checkpoints made up for tests: a geometry in which no two sizes are equal that could be mistaken for each other
//! (2 key heads, 6 value heads, heads of different widths), every tensor filled with its own numbers.

use half::bf16;
use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;

pub const HIDDEN: usize = 64;
pub const VOCAB: usize = 40;
pub const HEADS: usize = 2;
pub const KV_HEADS: usize = 1;
pub const HEAD_DIM: usize = 16;
pub const KEY_HEADS: usize = 2;
pub const VALUE_HEADS: usize = 6;
pub const KEY_HEAD_DIM: usize = 16;
pub const VALUE_HEAD_DIM: usize = 8;
pub const CONV: usize = 4;
pub const EXPERTS: usize = 3;
pub const FF: usize = 32;
pub const SHARED_FF: usize = 96;
pub const LAYERS: usize = 4;

/// A checkpoint: name to shape and values, which all are exact in bf16.
#[derive(Clone)]
pub struct Synthetic {
    pub tensors: BTreeMap<String, (Vec<usize>, Vec<f32>)>,
    pub config: Value,
}

impl Synthetic {
    /// A whole model with one MTP layer, the names as transformers writes them.
    pub fn new() -> Synthetic {
        let mut s = Synthetic { tensors: BTreeMap::new(), config: config() };
        let trunk = "model.language_model.";
        s.add(&format!("{trunk}embed_tokens.weight"), &[VOCAB, HIDDEN]);
        s.add(&format!("{trunk}norm.weight"), &[HIDDEN]);
        s.add("lm_head.weight", &[VOCAB, HIDDEN]);
        for layer in 0..LAYERS {
            s.add_layer(&format!("{trunk}layers.{layer}."), layer % 4 == 3);
        }
        s.add_layer("mtp.layers.0.", true);
        s.add("mtp.fc.weight", &[HIDDEN, 2 * HIDDEN]);
        for norm in ["norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"] {
            s.add(&format!("mtp.{norm}.weight"), &[HIDDEN]);
        }
        s
    }

    fn add_layer(&mut self, prefix: &str, attention: bool) {
        let key_dim = KEY_HEADS * KEY_HEAD_DIM;
        let value_dim = VALUE_HEADS * VALUE_HEAD_DIM;
        let channels = 2 * key_dim + value_dim;
        let mut add = |name: &str, shape: &[usize]| self.add(&format!("{prefix}{name}"), shape);
        add("input_layernorm.weight", &[HIDDEN]);
        add("post_attention_layernorm.weight", &[HIDDEN]);
        if attention {
            add("self_attn.q_proj.weight", &[2 * HEADS * HEAD_DIM, HIDDEN]);
            add("self_attn.k_proj.weight", &[KV_HEADS * HEAD_DIM, HIDDEN]);
            add("self_attn.v_proj.weight", &[KV_HEADS * HEAD_DIM, HIDDEN]);
            add("self_attn.o_proj.weight", &[HIDDEN, HEADS * HEAD_DIM]);
            add("self_attn.q_norm.weight", &[HEAD_DIM]);
            add("self_attn.k_norm.weight", &[HEAD_DIM]);
        } else {
            add("linear_attn.in_proj_qkv.weight", &[channels, HIDDEN]);
            add("linear_attn.in_proj_z.weight", &[value_dim, HIDDEN]);
            add("linear_attn.in_proj_b.weight", &[VALUE_HEADS, HIDDEN]);
            add("linear_attn.in_proj_a.weight", &[VALUE_HEADS, HIDDEN]);
            add("linear_attn.conv1d.weight", &[channels, 1, CONV]);
            add("linear_attn.dt_bias", &[VALUE_HEADS]);
            add("linear_attn.A_log", &[VALUE_HEADS]);
            add("linear_attn.norm.weight", &[VALUE_HEAD_DIM]);
            add("linear_attn.out_proj.weight", &[HIDDEN, value_dim]);
        }
        add("mlp.gate.weight", &[EXPERTS, HIDDEN]);
        add("mlp.experts.gate_up_proj", &[EXPERTS, 2 * FF, HIDDEN]);
        add("mlp.experts.down_proj", &[EXPERTS, HIDDEN, FF]);
        add("mlp.shared_expert_gate.weight", &[1, HIDDEN]);
        add("mlp.shared_expert.gate_proj.weight", &[SHARED_FF, HIDDEN]);
        add("mlp.shared_expert.up_proj.weight", &[SHARED_FF, HIDDEN]);
        add("mlp.shared_expert.down_proj.weight", &[HIDDEN, SHARED_FF]);
    }

    /// Adds a tensor filled with numbers of its own: multiples of 2^-10 below 1/4, exact in bf16 and after adding 1.
    pub fn add(&mut self, name: &str, shape: &[usize]) {
        let seed = name.bytes().fold(7u64, |h, b| h.wrapping_mul(31).wrapping_add(u64::from(b)));
        let count: usize = shape.iter().product();
        let value = |i: usize| {
            let mixed = (seed ^ (i as u64)).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33;
            (mixed % 509) as f32 / 1024.0 - 254.0 / 1024.0
        };
        self.tensors.insert(name.to_string(), (shape.to_vec(), (0..count).map(value).collect()));
    }

    /// Every name through `rename`.
    pub fn renamed(mut self, rename: impl Fn(&str) -> String) -> Synthetic {
        self.tensors = std::mem::take(&mut self.tensors).into_iter().map(|(n, t)| (rename(&n), t)).collect();
        self
    }

    /// Fused experts as one tensor per expert, as older folders have them.
    pub fn per_expert(mut self) -> Synthetic {
        let fused: Vec<String> = self.tensors.keys().filter(|n| n.contains(".experts.")).cloned().collect();
        for name in fused {
            let (shape, values) = self.tensors.remove(&name).unwrap();
            let (prefix, kind) = name.split_once("experts.").unwrap();
            let size = shape[1] * shape[2];
            for e in 0..EXPERTS {
                let of_expert = &values[e * size..(e + 1) * size];
                let mut put = |part: &str, shape: Vec<usize>, values: &[f32]| {
                    let name = format!("{prefix}experts.{e}.{part}.weight");
                    self.tensors.insert(name, (shape, values.to_vec()));
                };
                if kind == "down_proj" {
                    put("down_proj", vec![HIDDEN, FF], of_expert);
                } else {
                    put("gate_proj", vec![FF, HIDDEN], &of_expert[..FF * HIDDEN]);
                    put("up_proj", vec![FF, HIDDEN], &of_expert[FF * HIDDEN..]);
                }
            }
        }
        self
    }

    /// Writes the folder, all tensors in bf16 in one shard.
    pub fn write(&self, folder: &Path) {
        let encoded: BTreeMap<&String, Vec<u8>> = self
            .tensors
            .iter()
            .map(|(name, (_, v))| (name, v.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect()))
            .collect();
        let views = self.tensors.iter().map(|(name, (shape, _))| {
            (name.as_str(), TensorView::new(Dtype::BF16, shape.clone(), &encoded[name]).unwrap())
        });
        serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
        std::fs::write(folder.join("config.json"), self.config.to_string()).unwrap();
        std::fs::write(folder.join("tokenizer.json"), tokenizer().to_string()).unwrap();
        let settings = json!({ "eos_token": "<|im_end|>", "pad_token": { "content": "<|endoftext|>" }, "chat_template": "{{ messages }}" });
        std::fs::write(folder.join("tokenizer_config.json"), settings.to_string()).unwrap();
    }
}

fn config() -> Value {
    json!({
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "tie_word_embeddings": false,
        "text_config": {
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "linear_num_key_heads": KEY_HEADS,
            "linear_num_value_heads": VALUE_HEADS,
            "linear_key_head_dim": KEY_HEAD_DIM,
            "linear_value_head_dim": VALUE_HEAD_DIM,
            "linear_conv_kernel_dim": CONV,
            "num_experts": EXPERTS,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": FF,
            "shared_expert_intermediate_size": SHARED_FF,
            "vocab_size": VOCAB,
            "max_position_embeddings": 1024,
            "rms_norm_eps": 1e-6,
            "mtp_num_hidden_layers": 1,
            "rope_parameters": { "rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0] },
        },
    })
}

fn tokenizer() -> Value {
    let vocab: serde_json::Map<String, Value> = ('a'..='z')
        .enumerate()
        .map(|(i, c)| (c.to_string(), json!(i)))
        .chain([("ab".to_string(), json!(26))])
        .collect();
    let added = |id: usize, content: &str, special: bool| json!({ "id": id, "content": content, "special": special, "normalized": false });
    let expression = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    json!({
        "added_tokens": [added(30, "<|endoftext|>", true), added(31, "<|im_end|>", true), added(32, "<think>", false)],
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [
            { "type": "Split", "pattern": { "Regex": expression }, "behavior": "Isolated", "invert": false },
            { "type": "ByteLevel", "add_prefix_space": false, "use_regex": false },
        ]},
        "post_processor": { "type": "ByteLevel" },
        "model": { "type": "BPE", "vocab": vocab, "merges": [["a", "b"]] },
    })
}
