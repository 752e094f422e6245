//! Any layer count and file layout the metadata gives; what does not add up is refused with the key or tensor named.

use super::edited::Edited;
use super::{load, read, read_mtp, sample_tokens};
use strata_core::gguf::{Array, GgufFile, Value};
use strata_core::model::{LayerKind, LoadOptions, Model, ModelConfig};
use strata_kernels::format::TensorType;

const RECURRENT: &str = "qwen35moe.attention.recurrent_layers";
const BLOCKS: &str = "qwen35moe.block_count";
const NEXTN: &str = "qwen35moe.nextn_predict_layers";

/// Bits of the trunk's logits over some text, and of the MTP head's where there is one.
fn text_bits(file: &GgufFile) -> (Vec<u32>, Option<Vec<u32>>) {
    let model = load(file, 2);
    let tokens = sample_tokens(40);
    let mut state = model.new_state(64).expect("a state");
    let (logits, hidden) = read(&model, &mut state, &tokens, 16);
    let bits = |values: Vec<f32>| values.into_iter().map(f32::to_bits).collect();
    let mtp = model.has_mtp().then(|| bits(read_mtp(&model, &mut state, &tokens, &hidden, 16).0));
    (bits(logits), mtp)
}

fn layers(edited: &mut Edited, blocks: u32, head: bool, recurrent: Option<Vec<bool>>) {
    edited.metadata.set(BLOCKS, Value::U32(blocks));
    edited.metadata.remove(NEXTN);
    if head {
        edited.metadata.set(NEXTN, Value::U32(1));
    }
    edited.metadata.remove(RECURRENT);
    if let Some(recurrent) = recurrent {
        edited.metadata.set(RECURRENT, Value::Array(Array::Bool(recurrent)));
    }
}

/// A model whose trunk layers are the given layers of the bundled model.
fn stacked(trunk: &[usize], head: bool, by_array: bool) -> Edited {
    let mut edited = Edited::bundled();
    let blocks: Vec<_> = (0..5).map(|block| edited.take_block(block)).collect();
    for (block, &source) in trunk.iter().enumerate() {
        edited.add_block(block, &blocks[source]);
    }
    if head {
        edited.add_block(trunk.len(), &blocks[4]);
    }
    let mut recurrent: Vec<bool> = trunk.iter().map(|&source| source != 3).collect();
    if head {
        recurrent.push(false);
    }
    layers(&mut edited, (trunk.len() + usize::from(head)) as u32, head, by_array.then_some(recurrent));
    edited
}

#[test]
fn the_heads_index_says_nothing_about_layer_kinds() {
    // Heads at index 3, 4, 5 and 7: (n + 1) % 4 is 0, 1, 2 and 0.
    for trunk in [&[0, 1, 2][..], &[0, 1, 2, 3], &[0, 1, 2, 3, 0], &[0, 1, 2, 3, 2, 1, 0]] {
        let (expected, head) = text_bits(&stacked(trunk, true, true).file());
        for (with_head, by_array) in [(true, false), (false, true), (false, false)] {
            let file = stacked(trunk, with_head, by_array).file();
            let config = ModelConfig::from_gguf(&file).expect("a configuration");
            assert_eq!((config.trunk_layers, config.mtp_layers), (trunk.len(), usize::from(with_head)));
            assert_eq!(config.layers_of(LayerKind::Attention), trunk.iter().filter(|&&layer| layer == 3).count());
            let (trunk_bits, head_bits) = text_bits(&file);
            assert!(trunk_bits == expected, "{trunk:?}, head {with_head}, array {by_array}");
            assert!(!with_head || head_bits == head, "{trunk:?}: the head's logits");
        }
    }
}

#[test]
fn kinds_may_come_in_any_order() {
    let trunk = [3, 0, 3, 1];
    let file = stacked(&trunk, true, true).file();
    use LayerKind::{Attention, DeltaNet};
    let config = ModelConfig::from_gguf(&file).expect("a configuration");
    assert_eq!(config.layer_kinds, [Attention, DeltaNet, Attention, DeltaNet]);
    let (with, _) = text_bits(&file);
    let (without, _) = text_bits(&stacked(&trunk, false, true).file());
    assert!(with == without);
}

#[test]
fn the_heads_tensors_decide_where_the_block_count_leaves_doubt() {
    let (expected, head) = text_bits(&Edited::bundled().file());
    // The head is there, but block_count does not count it.
    let mut edited = Edited::bundled();
    layers(&mut edited, 4, true, None);
    assert!(text_bits(&edited.file()) == (expected.clone(), head.clone()), "block_count without the head");
    // Nothing but the tensors tells of the head.
    layers(&mut edited, 5, false, None);
    assert!(text_bits(&edited.file()) == (expected.clone(), head), "no nextn_predict_layers");
    // The head is promised, and a converter lost it.
    let mut edited = Edited::bundled();
    edited.take_block(4);
    for blocks in [4, 5] {
        layers(&mut edited, blocks, true, None);
        let config = ModelConfig::from_gguf(&edited.file()).expect("a configuration");
        assert_eq!((config.trunk_layers, config.mtp_layers, config.mtp_layers_promised), (4, 0, 1));
        assert!(text_bits(&edited.file()).0 == expected, "a lost head, block_count {blocks}");
    }
}

#[test]
fn what_is_left_of_a_head_is_no_layer_of_the_trunk() {
    let (expected, _) = text_bits(&Edited::bundled().file());
    // Without its first tensor, and without any that makes it a head: the layer is left, where the trunk has a delta net.
    for gone in [&["eh_proj"][..], &["eh_proj", "enorm", "hnorm", "shared_head_norm"]] {
        let mut edited = Edited::bundled();
        gone.iter().for_each(|tensor| drop(edited.remove(&format!("blk.4.nextn.{tensor}.weight"))));
        layers(&mut edited, 5, true, None);
        let file = edited.file();
        let config = ModelConfig::from_gguf(&file).expect("a configuration");
        assert_eq!((config.trunk_layers, config.mtp_layers, config.mtp_layers_promised), (4, 1, 1), "{gone:?}");
        let error = Model::load(&file, &LoadOptions::default()).err().expect("is refused").to_string();
        assert!(error.contains("blk.4.nextn.eh_proj.weight"), "{error}");
        let options = LoadOptions { threads: 1, use_mtp: false, ..LoadOptions::default() };
        let model = Model::load(&file, &options).expect("loads without the head");
        let (logits, _) = read(&model, &mut model.new_state(64).expect("a state"), &sample_tokens(40), 40);
        assert!(logits.into_iter().map(f32::to_bits).eq(expected.iter().copied()), "{gone:?}");
    }
    // A key that says another number of layers than the tensors show.
    let mut edited = Edited::bundled();
    let block = edited.take_block(4);
    edited.take_block(2);
    edited.add_block(2, &block);
    layers(&mut edited, 5, true, None);
    let error = ModelConfig::from_gguf(&edited.file()).unwrap_err().to_string();
    assert!(error.contains(NEXTN) && error.contains("block 2"), "{error}");
}

#[test]
fn a_head_can_be_left_out_and_an_incomplete_one_is_named() {
    let mut edited = Edited::bundled();
    let (expected, _) = text_bits(&edited.file());
    edited.remove("blk.4.nextn.enorm.weight");
    let file = edited.file();
    let error = Model::load(&file, &LoadOptions::default()).err().expect("is refused").to_string();
    assert!(error.contains("blk.4.nextn.enorm.weight"), "{error}");
    let options = LoadOptions { threads: 1, use_mtp: false, ..LoadOptions::default() };
    let model = Model::load(&file, &options).expect("loads without the head");
    assert!(!model.has_mtp());
    let mut state = model.new_state(64).expect("a state");
    let (logits, _) = read(&model, &mut state, &sample_tokens(40), 40);
    assert!(logits.into_iter().map(f32::to_bits).eq(expected));
}

#[test]
fn fused_and_split_experts_give_the_same_bits() {
    let mut edited = Edited::bundled();
    let expected = text_bits(&edited.file());
    for block in 0..5 {
        let (gate, gate_data) = edited.remove(&format!("blk.{block}.ffn_gate_exps.weight"));
        let (up, up_data) = edited.remove(&format!("blk.{block}.ffn_up_exps.weight"));
        assert_eq!(gate.ty, up.ty);
        let experts = gate.dims[2] as usize;
        let size = gate_data.len() / experts;
        let parts =
            (0..experts).flat_map(|e| [&gate_data[e * size..(e + 1) * size], &up_data[e * size..(e + 1) * size]]);
        let data: Vec<u8> = parts.flatten().copied().collect();
        let mut fused = gate.clone();
        fused.name = format!("blk.{block}.ffn_gate_up_exps.weight");
        fused.dims[1] *= 2;
        edited.tensors.push((fused, data.into()));
    }
    assert!(text_bits(&edited.file()) == expected);
}

#[test]
fn small_tensors_may_be_f16_or_bf16() {
    for ty in [TensorType::F16, TensorType::BF16] {
        let (mut narrow, mut wide) = (Edited::bundled(), Edited::bundled());
        let names: Vec<String> = narrow
            .tensors
            .iter()
            .filter(|(decl, _)| decl.ty == TensorType::F32)
            .map(|(decl, _)| decl.name.clone())
            .collect();
        assert!(names.len() > 40);
        for name in names {
            let (small, exact) = narrow.round(&name, ty);
            *narrow.get_mut(&name) = small;
            *wide.get_mut(&name) = exact;
        }
        assert!(text_bits(&narrow.file()) == text_bits(&wide.file()), "{ty:?}");
    }
}

#[test]
fn layouts_that_converters_vary_are_the_same_model() {
    let expected = text_bits(&Edited::bundled().file());
    let mut edited = Edited::bundled();
    for block in 0..5 {
        edited.get_mut(&format!("blk.{block}.ffn_gate_inp_shexp.weight")).0.dims = vec![256, 1];
    }
    let per_layer = |value| Value::Array(Array::U32(vec![0, 0, 0, value, value]));
    edited.metadata.set("qwen35moe.attention.head_count_kv", per_layer(2));
    // A head with tables of its own that equal the trunk's.
    for (own, shared) in [("nextn.shared_head_head", "output"), ("nextn.embed_tokens", "token_embd")] {
        let (mut decl, data) = edited.get(&format!("{shared}.weight")).clone();
        decl.name = format!("blk.4.{own}.weight");
        edited.tensors.push((decl, data));
    }
    assert!(text_bits(&edited.file()) == expected);

    // Without shared_head_norm the head takes the trunk's last norm.
    let mut edited = Edited::bundled();
    let norm = edited.get("output_norm.weight").1.clone();
    edited.get_mut("blk.4.nextn.shared_head_norm.weight").1 = norm;
    let with = text_bits(&edited.file());
    edited.remove("blk.4.nextn.shared_head_norm.weight");
    assert!(text_bits(&edited.file()) == with && with.1 != expected.1);

    // Without `output` the embedding table is the head.
    let mut edited = Edited::bundled();
    let (table, data) = edited.get("token_embd.weight").clone();
    *edited.get_mut("output.weight") = (strata_core::gguf::TensorDecl { name: "output.weight".into(), ..table }, data);
    let untied = text_bits(&edited.file());
    edited.remove("output.weight");
    assert!(text_bits(&edited.file()) == untied);
}

/// Changes one thing, and what the error must name.
type Broken = (&'static str, fn(&mut Edited));

fn set(edited: &mut Edited, key: &str, value: Value) {
    edited.metadata.set(format!("qwen35moe.{key}"), value);
}

const BROKEN: &[Broken] = &[
    ("qwen35moe.expert_used_count` is 9, expected at most the 8 experts", |e| {
        set(e, "expert_used_count", Value::U32(9));
    }),
    ("expert_used_count` is 0", |e| set(e, "expert_used_count", Value::U32(0))),
    ("blk.0.ffn_gate_exps.weight", |e| set(e, "expert_count", Value::U32(16))),
    ("expert_feed_forward_length", |e| set(e, "expert_feed_forward_length", Value::U32(0))),
    ("blk.0.ffn_gate_shexp.weight", |e| set(e, "expert_shared_feed_forward_length", Value::U32(512))),
    ("general.architecture", |e| {
        e.metadata.remove("general.architecture");
    }),
    ("`llama` cannot be run", |e| e.metadata.set("general.architecture", Value::String("llama".into()))),
    ("block_count` is 0", |e| set(e, "block_count", Value::U32(0))),
    ("block_count", |e| set(e, "block_count", Value::String("five".into()))),
    ("embedding_length` is 0", |e| set(e, "embedding_length", Value::U32(0))),
    ("token_embd.weight", |e| set(e, "embedding_length", Value::U32(512))),
    ("context_length` is 4294967295", |e| set(e, "context_length", Value::U32(u32::MAX))),
    ("attention.head_count` is 0", |e| set(e, "attention.head_count", Value::U32(0))),
    ("head_count_kv` is 3, expected a divisor of the 4", |e| set(e, "attention.head_count_kv", Value::U32(3))),
    ("the same count for every layer", |e| {
        set(e, "attention.head_count_kv", Value::Array(Array::U32(vec![2, 4])));
    }),
    ("key_length` is 0", |e| set(e, "attention.key_length", Value::U32(0))),
    ("value_length` is 32, expected 64", |e| set(e, "attention.value_length", Value::U32(32))),
    ("layer_norm_rms_epsilon", |e| set(e, "attention.layer_norm_rms_epsilon", Value::F32(f32::NAN))),
    ("rope.dimension_count` is 66", |e| set(e, "rope.dimension_count", Value::U32(66))),
    ("rope.dimension_count` is 15", |e| set(e, "rope.dimension_count", Value::U32(15))),
    ("rope.freq_base` is 0", |e| set(e, "rope.freq_base", Value::F32(0.0))),
    ("sections that sum to 8 pairs", |e| {
        set(e, "rope.dimension_sections", Value::Array(Array::I32(vec![3, 3, 3, 0])));
    }),
    ("rope.dimension_sections", |e| set(e, "rope.dimension_sections", Value::Array(Array::I32(vec![-3, 3, 8])))),
    ("recurrent_layers` is 3, expected 4 entries", |e| {
        set(e, "attention.recurrent_layers", Value::Array(Array::Bool(vec![true; 3])));
    }),
    ("blk.3.ssm_conv1d.weight` is missing", |e| {
        set(e, "attention.recurrent_layers", Value::Array(Array::Bool(vec![true; 4])))
    }),
    ("full_attention_interval` is 0", |e| {
        e.metadata.remove(RECURRENT);
        set(e, "full_attention_interval", Value::U32(0));
    }),
    ("ssm.group_count` is 0", |e| set(e, "ssm.group_count", Value::U32(0))),
    ("time_step_rank` is 6, expected a multiple of the 4", |e| set(e, "ssm.time_step_rank", Value::U32(6))),
    ("inner_size` is 500, expected a multiple of the 8", |e| set(e, "ssm.inner_size", Value::U32(500))),
    ("conv_kernel` is 1", |e| set(e, "ssm.conv_kernel", Value::U32(1))),
    ("conv_kernel` is 99", |e| set(e, "ssm.conv_kernel", Value::U32(99))),
    ("blk.0.ssm_conv1d.weight", |e| set(e, "ssm.conv_kernel", Value::U32(3))),
    ("blk.0.attn_qkv.weight", |e| {
        e.remove("blk.0.attn_qkv.weight");
    }),
    ("blk.2.ssm_a` is missing", |e| {
        e.remove("blk.2.ssm_a");
    }),
    ("blk.1.ffn_down_exps.weight` is missing", |e| {
        e.remove("blk.1.ffn_down_exps.weight");
    }),
    ("token_embd.weight` is missing", |e| {
        e.remove("token_embd.weight");
    }),
    ("output_norm.weight` has dimensions [128, 2], expected [256]", |e| {
        e.get_mut("output_norm.weight").0.dims = vec![128, 2];
    }),
    ("blk.3.attn_q.weight` has dimensions [512, 256], expected [256, 512]", |e| {
        e.get_mut("blk.3.attn_q.weight").0.dims = vec![512, 256];
    }),
    ("blk.0.attn_norm.weight` is stored as Q8_0, expected F32, F16 or BF16", |e| {
        let data = vec![0; 8 * 34];
        let tensor = e.get_mut("blk.0.attn_norm.weight");
        tensor.0.ty = TensorType::Q8_0;
        tensor.1 = data.into();
    }),
    ("blk.0.attn_gate.weight`: stored as IQ4_NL", |e| {
        let tensor = e.get_mut("blk.0.attn_gate.weight");
        tensor.0.ty = TensorType::IQ4_NL;
        tensor.1 = vec![0; 256 * 512 / 32 * 18].into();
    }),
];

#[test]
fn geometry_that_does_not_add_up_is_refused_by_name() {
    let mut wrong = Vec::new();
    for (expected, change) in BROKEN {
        let mut edited = Edited::bundled();
        change(&mut edited);
        let result = Model::load(&edited.file(), &LoadOptions { threads: 1, ..LoadOptions::default() });
        match result.err().map(|error| error.to_string()) {
            None => wrong.push(format!("loads in spite of: {expected}")),
            Some(error) => {
                let named = error.contains("edited.gguf") || error.contains("tensor `");
                if !error.contains(expected) || !named {
                    wrong.push(format!("expected `{expected}` and a file or tensor in: {error}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
