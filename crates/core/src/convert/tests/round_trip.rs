//! An F32 file inverted by arithmetic of its own must give the source's bits back. Nothing here uses the conversion's
//! names or transforms: what a GGUF holds is written down again, from the model's definition.

use super::synthetic::*;
use crate::convert::{ConvertOptions, Progress, Recipe, convert_text_model};
use crate::gguf::{Array, GgufFile, Value};
use half::bf16;
use strata_kernels::format::dequantize;

fn to_gguf(source: &Synthetic) -> (tempfile::TempDir, GgufFile) {
    let folder = tempfile::tempdir().unwrap();
    source.write(folder.path());
    let out = folder.path().join("out.gguf");
    let options = ConvertOptions::new(Recipe::from_name("F32").unwrap());
    convert_text_model(folder.path(), &out, &options, Progress::SILENT).unwrap();
    let file = GgufFile::open(&out).unwrap();
    (folder, file)
}

fn values(file: &GgufFile, name: &str) -> Vec<f32> {
    let tensor = file.tensor(name).unwrap_or_else(|| panic!("no tensor {name}"));
    let mut out = vec![0.0; tensor.weights() as usize];
    dequantize(tensor.ty, &file.data(tensor), &mut out).unwrap();
    out
}

/// Where value head `key * 3 + within` of the source lies in a GGUF: its key head must be the head's number modulo 2.
const TILED: [usize; VALUE_HEADS] = [0, 2, 4, 1, 3, 5];

/// Undoes the order of value heads in runs of `width` values after `start`.
fn grouped(stored: &[f32], start: usize, width: usize) -> Vec<f32> {
    let mut out = stored[..start].to_vec();
    for head in 0..VALUE_HEADS {
        let at = start + TILED[head] * width;
        out.extend_from_slice(&stored[at..at + width]);
    }
    out
}

/// Undoes the order of value heads along the columns of a matrix.
fn grouped_columns(stored: &[f32], cols: usize, width: usize) -> Vec<f32> {
    stored.chunks(cols).flat_map(|row| grouped(row, 0, width)).collect()
}

/// Source values recovered from the GGUF, for every tensor of one layer of the source.
fn recovered_layer(file: &GgufFile, layer: usize, attention: bool) -> Vec<(&'static str, Vec<f32>)> {
    let get = |name: &str| values(file, &format!("blk.{layer}.{name}"));
    let less_one = |name: &str| get(name).into_iter().map(|x| x - 1.0).collect::<Vec<_>>();
    let mut out = vec![
        ("input_layernorm.weight", less_one("attn_norm.weight")),
        ("post_attention_layernorm.weight", less_one("post_attention_norm.weight")),
        ("mlp.gate.weight", get("ffn_gate_inp.weight")),
        ("mlp.shared_expert_gate.weight", get("ffn_gate_inp_shexp.weight")),
        ("mlp.shared_expert.gate_proj.weight", get("ffn_gate_shexp.weight")),
        ("mlp.shared_expert.up_proj.weight", get("ffn_up_shexp.weight")),
        ("mlp.shared_expert.down_proj.weight", get("ffn_down_shexp.weight")),
        ("mlp.experts.down_proj", get("ffn_down_exps.weight")),
    ];
    let (gate, up) = (get("ffn_gate_exps.weight"), get("ffn_up_exps.weight"));
    let of_expert = FF * HIDDEN;
    let fused = (0..EXPERTS).flat_map(|e| {
        let run = e * of_expert..(e + 1) * of_expert;
        gate[run.clone()].iter().chain(&up[run]).copied().collect::<Vec<_>>()
    });
    out.push(("mlp.experts.gate_up_proj", fused.collect()));
    if attention {
        out.extend([
            ("self_attn.q_proj.weight", get("attn_q.weight")),
            ("self_attn.k_proj.weight", get("attn_k.weight")),
            ("self_attn.v_proj.weight", get("attn_v.weight")),
            ("self_attn.o_proj.weight", get("attn_output.weight")),
            ("self_attn.q_norm.weight", less_one("attn_q_norm.weight")),
            ("self_attn.k_norm.weight", less_one("attn_k_norm.weight")),
        ]);
    } else {
        let keys = 2 * KEY_HEADS * KEY_HEAD_DIM;
        out.extend([
            (
                "linear_attn.in_proj_qkv.weight",
                grouped(&get("attn_qkv.weight"), keys * HIDDEN, VALUE_HEAD_DIM * HIDDEN),
            ),
            ("linear_attn.in_proj_z.weight", grouped(&get("attn_gate.weight"), 0, VALUE_HEAD_DIM * HIDDEN)),
            ("linear_attn.in_proj_b.weight", grouped(&get("ssm_beta.weight"), 0, HIDDEN)),
            ("linear_attn.in_proj_a.weight", grouped(&get("ssm_alpha.weight"), 0, HIDDEN)),
            ("linear_attn.conv1d.weight", grouped(&get("ssm_conv1d.weight"), keys * CONV, VALUE_HEAD_DIM * CONV)),
            ("linear_attn.dt_bias", grouped(&get("ssm_dt.bias"), 0, 1)),
            ("linear_attn.A_log", grouped(&get("ssm_a"), 0, 1).into_iter().map(|x| (-x).ln()).collect()),
            ("linear_attn.norm.weight", get("ssm_norm.weight")),
            (
                "linear_attn.out_proj.weight",
                grouped_columns(&get("ssm_out.weight"), VALUE_HEADS * VALUE_HEAD_DIM, VALUE_HEAD_DIM),
            ),
        ]);
    }
    out
}

/// Compares recovered values with the source's as bf16 bits; returns how many tensors were compared.
fn check(source: &Synthetic, prefix: &str, recovered: Vec<(&'static str, Vec<f32>)>) -> usize {
    let count = recovered.len();
    for (name, values) in recovered {
        let (_, expected) = &source.tensors[&format!("{prefix}{name}")];
        let bits = |v: &[f32]| v.iter().map(|x| bf16::from_f32(*x).to_bits()).collect::<Vec<_>>();
        assert!(bits(&values) == bits(expected), "{prefix}{name}");
    }
    count
}

fn check_all(source: &Synthetic, file: &GgufFile) {
    let trunk = "model.language_model.";
    let mut compared = 0;
    for layer in 0..LAYERS {
        let attention = layer % 4 == 3;
        compared += check(source, &format!("{trunk}layers.{layer}."), recovered_layer(file, layer, attention));
    }
    compared += check(source, "mtp.layers.0.", recovered_layer(file, LAYERS, true));
    let less_one = |name: &str| values(file, name).into_iter().map(|x| x - 1.0).collect::<Vec<_>>();
    compared += check(
        source,
        "mtp.",
        vec![
            ("fc.weight", values(file, "blk.4.nextn.eh_proj.weight")),
            ("norm.weight", less_one("blk.4.nextn.shared_head_norm.weight")),
            ("pre_fc_norm_embedding.weight", less_one("blk.4.nextn.enorm.weight")),
            ("pre_fc_norm_hidden.weight", less_one("blk.4.nextn.hnorm.weight")),
        ],
    );
    compared += check(
        source,
        trunk,
        vec![
            ("embed_tokens.weight", values(file, "token_embd.weight")),
            ("norm.weight", less_one("output_norm.weight")),
        ],
    );
    compared += check(source, "", vec![("lm_head.weight", values(file, "output.weight"))]);
    assert_eq!(compared, source.tensors.len(), "every tensor of the source is in the file");
}

#[test]
fn two_key_heads_and_six_value_heads_come_back_bit_for_bit() {
    let source = Synthetic::new();
    let (_folder, file) = to_gguf(&source);
    check_all(&source, &file);
}

#[test]
fn one_tensor_per_expert_gives_the_same_file() {
    let source = Synthetic::new();
    let (fused_folder, _) = to_gguf(&source);
    let (split_folder, file) = to_gguf(&source.clone().per_expert());
    check_all(&source, &file);
    let read = |f: &tempfile::TempDir| GgufFile::open(&f.path().join("out.gguf")).unwrap();
    let (a, b) = (read(&fused_folder), read(&split_folder));
    assert!(a.tensors().iter().all(|t| a.data(t) == b.data(b.tensor(&t.name).unwrap())));
}

#[test]
fn other_prefixes_are_the_same_model() {
    let source = Synthetic::new();
    let (_folder, file) = to_gguf(&source.clone().renamed(|n| match n.strip_prefix("mtp.") {
        Some(rest) => format!("model.mtp.{rest}"),
        None => n.replace("model.language_model.", "model."),
    }));
    check_all(&source, &file);
}

#[test]
fn a_head_nobody_promised_is_kept() {
    let mut source = Synthetic::new();
    source.config["text_config"].as_object_mut().unwrap().remove("mtp_num_hidden_layers");
    let (_folder, file) = to_gguf(&source);
    check_all(&source, &file);
    assert_eq!(file.metadata().u32("qwen35moe.nextn_predict_layers").unwrap(), 1);
}

#[test]
fn the_tokenizer_comes_along() {
    let (_folder, file) = to_gguf(&Synthetic::new());
    let m = file.metadata();
    let tokens = m.strings("tokenizer.ggml.tokens").unwrap();
    assert_eq!(tokens.len(), VOCAB);
    assert_eq!((tokens[0].as_str(), tokens[30].as_str(), tokens[39].as_str()), ("a", "<|endoftext|>", "[PAD39]"));
    let types = m.i32_array("tokenizer.ggml.token_type").unwrap();
    assert_eq!((types[0], types[30], types[32], types[39]), (1, 3, 4, 5));
    assert_eq!(m.strings("tokenizer.ggml.merges").unwrap(), ["a b"]);
    assert_eq!(m.str("tokenizer.ggml.pre").unwrap(), "qwen35");
    assert_eq!(m.u32("tokenizer.ggml.eos_token_id").unwrap(), 31);
    assert_eq!(m.u32("tokenizer.ggml.padding_token_id").unwrap(), 30);
    assert_eq!(m.bool_opt("tokenizer.ggml.add_bos_token").unwrap(), Some(false));
    assert_eq!(m.str("tokenizer.chat_template").unwrap(), "{{ messages }}");
    let recurrent = Value::Array(Array::Bool(vec![true, true, true, false, false]));
    assert_eq!(m.get("qwen35moe.attention.recurrent_layers"), Some(&recurrent));
}
