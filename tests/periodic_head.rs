//! A model made by hand whose text goes round in a circle and whose MTP head copies the trunk, from the hidden row alone: with the
//! right hidden row every draft is right at every depth, with any other (the row before, the one before the norm) none is.

mod common;

use std::sync::Arc;

use strata_core::engine::*;
use strata_core::gguf::{Array, GgufFile, GgufWriter, Metadata, TensorDecl, Value, WriterOptions};
use strata_core::model::{LoadOptions, Model};
use strata_kernels::format::TensorType;

/// Tokens in the circle; token t is followed by t + 1.
const CIRCLE: usize = 24;
const HIDDEN: usize = 64;
const FF: usize = 16;
const HEAD: usize = 16;
const TRUNK: usize = 2;

struct Builder {
    tensors: Vec<(TensorDecl, Vec<f32>)>,
}

impl Builder {
    fn add(&mut self, name: &str, dims: &[usize], values: Vec<f32>) {
        assert_eq!(values.len(), dims.iter().product::<usize>(), "{name}");
        let dims = dims.iter().map(|&dim| dim as u64).collect();
        self.tensors.push((TensorDecl { name: name.into(), dims, ty: TensorType::F32 }, values));
    }

    fn zeros(&mut self, name: &str, dims: &[usize]) {
        self.add(name, dims, vec![0.0; dims.iter().product()]);
    }

    fn ones(&mut self, name: &str, len: usize) {
        self.add(name, &[len], vec![1.0; len]);
    }

    /// A layer that adds nothing to the residual stream.
    fn silent_layer(&mut self, block: usize, attention: bool) {
        let name = |tensor: &str| format!("blk.{block}.{tensor}");
        self.ones(&name("attn_norm.weight"), HIDDEN);
        self.ones(&name("post_attention_norm.weight"), HIDDEN);
        if attention {
            self.zeros(&name("attn_q.weight"), &[HIDDEN, 2 * HEAD]);
            self.zeros(&name("attn_k.weight"), &[HIDDEN, HEAD]);
            self.zeros(&name("attn_v.weight"), &[HIDDEN, HEAD]);
            self.zeros(&name("attn_output.weight"), &[HEAD, HIDDEN]);
            self.ones(&name("attn_q_norm.weight"), HEAD);
            self.ones(&name("attn_k_norm.weight"), HEAD);
        } else {
            self.zeros(&name("attn_qkv.weight"), &[HIDDEN, 3 * HEAD]);
            self.zeros(&name("attn_gate.weight"), &[HIDDEN, HEAD]);
            self.zeros(&name("ssm_beta.weight"), &[HIDDEN, 1]);
            self.zeros(&name("ssm_alpha.weight"), &[HIDDEN, 1]);
            self.zeros(&name("ssm_out.weight"), &[HEAD, HIDDEN]);
            self.zeros(&name("ssm_conv1d.weight"), &[4, 3 * HEAD]);
            self.zeros(&name("ssm_dt.bias"), &[1]);
            self.add(&name("ssm_a"), &[1], vec![-1.0]);
            self.ones(&name("ssm_norm.weight"), HEAD);
        }
        self.zeros(&name("ffn_gate_inp.weight"), &[HIDDEN, 2]);
        self.zeros(&name("ffn_gate_exps.weight"), &[HIDDEN, FF, 2]);
        self.zeros(&name("ffn_up_exps.weight"), &[HIDDEN, FF, 2]);
        self.zeros(&name("ffn_down_exps.weight"), &[FF, HIDDEN, 2]);
        self.zeros(&name("ffn_gate_inp_shexp.weight"), &[HIDDEN]);
        self.zeros(&name("ffn_gate_shexp.weight"), &[HIDDEN, FF]);
        self.zeros(&name("ffn_up_shexp.weight"), &[HIDDEN, FF]);
        self.zeros(&name("ffn_down_shexp.weight"), &[FF, HIDDEN]);
    }
}

/// A matrix with these (row, column, value) entries.
fn sparse(rows: usize, cols: usize, entries: impl Iterator<Item = (usize, usize, f32)>) -> Vec<f32> {
    let mut values = vec![0.0; rows * cols];
    entries.for_each(|(row, col, value)| values[row * cols + col] = value);
    values
}

fn metadata() -> Metadata {
    let mut metadata = Metadata::new("circle.gguf");
    metadata.set("general.architecture", Value::String("qwen35moe".into()));
    let mut set = |key: &str, value: u32| metadata.set(format!("qwen35moe.{key}"), Value::U32(value));
    for (key, value) in [
        ("block_count", TRUNK as u32 + 1),
        ("nextn_predict_layers", 1),
        ("full_attention_interval", 2),
        ("embedding_length", HIDDEN as u32),
        ("context_length", 4096),
        ("attention.head_count", 1),
        ("attention.head_count_kv", 1),
        ("attention.key_length", HEAD as u32),
        ("attention.value_length", HEAD as u32),
        ("rope.dimension_count", 8),
        ("ssm.group_count", 1),
        ("ssm.time_step_rank", 1),
        ("ssm.state_size", HEAD as u32),
        ("ssm.inner_size", HEAD as u32),
        ("ssm.conv_kernel", 4),
        ("expert_count", 2),
        ("expert_used_count", 1),
        ("expert_feed_forward_length", FF as u32),
        ("expert_shared_feed_forward_length", FF as u32),
    ] {
        set(key, value);
    }
    metadata.set("qwen35moe.rope.freq_base", Value::F32(10_000.0));
    metadata.set("qwen35moe.attention.layer_norm_rms_epsilon", Value::F32(1e-6));
    metadata.set("qwen35moe.rope.dimension_sections", Value::Array(Array::U32(vec![2, 1, 1, 0])));
    metadata
}

/// Dimensions 0..CIRCLE hold the token; the CIRCLE after them hold a decoy that the norm after the last layer removes.
fn circle_model() -> Arc<Model> {
    let mut builder = Builder { tensors: Vec::new() };
    let next = |token: usize, by: usize| (token + by) % CIRCLE;
    let tokens = || 0..CIRCLE;
    builder.add(
        "token_embd.weight",
        &[HIDDEN, CIRCLE],
        sparse(CIRCLE, HIDDEN, tokens().flat_map(|t| [(t, t, 1.0), (t, CIRCLE + t, 1.0)])),
    );
    let no_decoy: Vec<f32> = (0..HIDDEN).map(|dim| f32::from(u8::from(dim < CIRCLE))).collect();
    builder.add("output_norm.weight", &[HIDDEN], no_decoy.clone());
    builder.add(
        "output.weight",
        &[HIDDEN, CIRCLE],
        sparse(CIRCLE, HIDDEN, tokens().flat_map(|t| [(next(t, 1), t, 4.0), (next(t, 5), CIRCLE + t, 9.0)])),
    );
    builder.silent_layer(0, false);
    builder.silent_layer(1, true);
    builder.silent_layer(TRUNK, true);
    let name = |tensor: &str| format!("blk.{TRUNK}.nextn.{tensor}.weight");
    builder.ones(&name("enorm"), HIDDEN);
    builder.ones(&name("hnorm"), HIDDEN);
    builder.add(&name("shared_head_norm"), &[HIDDEN], no_decoy);
    // The embedding's half is left out; the hidden row's half moves on by one and brings a new decoy, and a decoy that should not be
    // there leads astray.
    let moves = tokens().flat_map(|t| {
        [(next(t, 1), HIDDEN + t, 1.0), (CIRCLE + next(t, 1), HIDDEN + t, 1.0), (next(t, 7), HIDDEN + CIRCLE + t, 3.0)]
    });
    builder.add(&name("eh_proj"), &[2 * HIDDEN, HIDDEN], sparse(HIDDEN, 2 * HIDDEN, moves));

    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("circle.gguf");
    let declared = builder.tensors.iter().map(|(tensor, _)| tensor.clone()).collect();
    let mut writer = GgufWriter::create(&path, &metadata(), declared, &WriterOptions::default()).unwrap();
    for (tensor, values) in &builder.tensors {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        writer.write(&tensor.name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    let file = GgufFile::open(&path).unwrap();
    Arc::new(Model::load(&file, &LoadOptions { threads: 1, ..LoadOptions::default() }).unwrap())
}

#[test]
fn every_draft_is_right_at_every_depth() {
    let model = circle_model();
    let prompt: Vec<u32> = (0..50).map(|row| row % CIRCLE as u32).collect();
    for depth in 1..=MAX_MTP_DEPTH {
        for (slots, prompt_chunk) in [(1, 512), (2, 7)] {
            let options = EngineOptions {
                slots,
                prompt_chunk,
                ctx: 512,
                mtp: MtpSetting::Depth(depth),
                ..EngineOptions::default()
            };
            let engine = Engine::start(model.clone(), common::tokenizer(), options).unwrap();
            let request =
                Request { prompt: Prompt::tokens(prompt.clone()), max_tokens: Some(100), ..Request::default() };
            // The second time the prompt is held.
            for _ in 0..2 {
                let (answer, stats) = common::ask(&engine, &request);
                assert!(
                    answer.ids.iter().enumerate().all(|(i, &id)| id as usize == (50 + i) % CIRCLE),
                    "{:?}",
                    answer.ids
                );
                assert_eq!(stats.accepted, stats.drafted, "depth {depth}: {:?}", stats.accepted_per_position);
                assert_eq!(stats.accepted_per_position.len(), depth);
                assert_eq!(stats.windows, 99usize.div_ceil(depth + 1), "depth {depth}");
            }
        }
    }
}
