//! What conversion does not take, and how it says so.

use super::synthetic::Synthetic;
use crate::convert::{ConvertError, ConvertOptions, Pattern, Progress, Recipe, convert_text_model};
use serde_json::json;

/// Converts and returns the error; checks that nothing was left behind.
fn refused(source: &Synthetic, change: impl FnOnce(&mut ConvertOptions)) -> ConvertError {
    let folder = tempfile::tempdir().unwrap();
    source.write(folder.path());
    let out_folder = tempfile::tempdir().unwrap();
    let mut options = ConvertOptions::new(Recipe::from_name("BF16").unwrap());
    change(&mut options);
    let error = convert_text_model(folder.path(), &out_folder.path().join("out.gguf"), &options, Progress::SILENT)
        .expect_err("it must be refused");
    assert_eq!(std::fs::read_dir(out_folder.path()).unwrap().count(), 0, "no file is left behind");
    error
}

fn accepted(source: &Synthetic, change: impl FnOnce(&mut ConvertOptions)) -> crate::convert::ConvertReport {
    let folder = tempfile::tempdir().unwrap();
    source.write(folder.path());
    let mut options = ConvertOptions::new(Recipe::from_name("BF16").unwrap());
    change(&mut options);
    convert_text_model(folder.path(), &folder.path().join("out.gguf"), &options, Progress::SILENT).unwrap()
}

#[test]
fn a_promised_head_that_is_not_there_is_an_error_unless_it_is_not_wanted() {
    let mut source = Synthetic::new();
    source.tensors.retain(|name, _| !name.starts_with("mtp."));
    let error = refused(&source, |_| {});
    assert!(matches!(error, ConvertError::PromisedHeadMissing { promised: 1, .. }), "{error}");
    assert_eq!(accepted(&source, |o| o.plan.no_mtp = true).mtp_layers, 0);
}

#[test]
fn half_a_head_is_an_error() {
    let mut source = Synthetic::new();
    source.tensors.remove("mtp.fc.weight");
    let error = refused(&source, |_| {}).to_string();
    assert!(error.contains("mtp.fc.weight"), "{error}");
    source.config["text_config"]["mtp_num_hidden_layers"] = json!(2);
    let error = refused(&source, |_| {});
    assert!(matches!(error, ConvertError::MtpLayers { promised: 2, found: 1, .. }), "{error}");
}

#[test]
fn norms_that_carry_the_one_already_are_refused_with_the_evidence() {
    for part in ["model.language_model.", "mtp."] {
        let mut source = Synthetic::new();
        for (name, (_, values)) in &mut source.tensors {
            if name.starts_with(part) && name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight")
                || name.starts_with(part) && name.contains("layernorm")
                || name.starts_with(part) && name.contains("pre_fc_norm")
            {
                values.iter_mut().for_each(|v| *v += 1.0);
            }
        }
        let error = refused(&source, |_| {});
        assert!(matches!(error, ConvertError::NormsNotZeroCentred { .. }), "{error}");
        assert!(error.to_string().contains("layernorm.weight' has mean"), "{error}");
        accepted(&source, |o| o.plan.assume_zero_centred_norms = true);
    }
}

#[test]
fn other_architectures_are_refused_by_name() {
    let mut source = Synthetic::new();
    source.config["architectures"] = json!(["Qwen3_5ForConditionalGeneration"]);
    let error = refused(&source, |_| {}).to_string();
    assert!(error.contains("Qwen3_5ForConditionalGeneration") && error.contains("dense sibling"), "{error}");
    source.config["architectures"] = json!(["LlamaForCausalLM"]);
    assert!(!refused(&source, |_| {}).to_string().contains("dense"));
}

#[test]
fn tensors_without_a_rule_are_refused_unless_skipped() {
    let mut source = Synthetic::new();
    source.add("model.language_model.layers.1.linear_attn.surprise", &[4]);
    let error = refused(&source, |_| {}).to_string();
    assert!(error.contains("linear_attn.surprise"), "{error}");
    let report = accepted(&source, |o| o.plan.skip = vec![Pattern::new("surprise").unwrap()]);
    assert_eq!(report.left_out.len(), 1);
}

#[test]
fn missing_and_misshapen_tensors_are_named() {
    let mut source = Synthetic::new();
    source.tensors.remove("model.language_model.layers.2.mlp.gate.weight");
    assert!(refused(&source, |_| {}).to_string().contains("layers.2.mlp.gate.weight"));
    source.add("model.language_model.layers.2.mlp.gate.weight", &[3, 65]);
    let error = refused(&source, |_| {}).to_string();
    assert!(error.contains("expected the shape [3, 64], found [3, 65]"), "{error}");
}

#[test]
fn configs_that_contradict_themselves_are_refused() {
    type Change = (&'static str, serde_json::Value, &'static str);
    let changes: [Change; 8] = [
        ("linear_num_value_heads", json!(5), "a multiple of linear_num_key_heads (2)"),
        ("hidden_size", json!("64"), "an integer from 1"),
        ("num_hidden_layers", json!(0), "an integer from 1"),
        ("num_hidden_layers", json!(1_000_000), "an integer from 1"),
        ("num_experts", json!(null), "a positive integer, found nothing"),
        ("layer_types", json!(["linear_attention"]), "4 entries"),
        ("layer_types", json!(["a", "b", "c", "d"]), "'linear_attention' and 'full_attention'"),
        ("attention_bias", json!(true), "no attention biases"),
    ];
    for (key, value, expected) in changes {
        let mut source = Synthetic::new();
        source.config["text_config"][key] = value;
        let error = refused(&source, |_| {}).to_string();
        assert!(error.contains(key) && error.contains(expected), "{key}: {error}");
    }
}

#[test]
fn tokenizers_that_cannot_be_carried_over_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    Synthetic::new().write(folder.path());
    let path = folder.path().join("tokenizer.json");
    let good: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let out = folder.path().join("out.gguf");
    let options = ConvertOptions::new(Recipe::from_name("BF16").unwrap());
    let error = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut json = good.clone();
        change(&mut json);
        std::fs::write(&path, json.to_string()).unwrap();
        convert_text_model(folder.path(), &out, &options, Progress::SILENT).unwrap_err().to_string()
    };
    assert!(error(&|j| j["model"]["type"] = json!("Unigram")).contains("no BPE"));
    assert!(error(&|j| j["model"]["vocab"]["zz"] = json!(40)).contains("only 40 rows"));
    assert!(error(&|j| j["model"]["vocab"]["zz"] = json!(3)).contains("both have the number 3"));
    assert!(error(&|j| j["model"]["merges"] = json!([["a"]])).contains("no pair of strings"));
    let split = |j: &mut serde_json::Value| j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("\\s+");
    assert!(error(&split).contains("no GGUF name is known"));
    std::fs::remove_file(&path).unwrap();
    let missing = convert_text_model(folder.path(), &out, &options, Progress::SILENT).unwrap_err().to_string();
    assert!(missing.contains("tokenizer.json") && !out.exists(), "{missing}");
}
