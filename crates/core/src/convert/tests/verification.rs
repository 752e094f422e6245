//! The comparison finds what is wrong, and nothing where all is right.

use super::{convert, tiny};
use crate::convert::{PlanOptions, Progress, Verdict, Verification, missing_head, verify};
use crate::gguf::{GgufFile, GgufWriter, Metadata, TensorDecl, Value, WriterOptions};
use std::path::Path;
use strata_kernels::format::{TensorType, quantize};

fn compare(file: &GgufFile) -> Verification {
    verify(file, &tiny(), &PlanOptions::default(), Progress::SILENT).unwrap()
}

#[test]
fn every_recipe_is_proved() {
    for recipe in ["F32", "F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_K_M", "Q5_K_M", "UD-Q4_K_XL"] {
        let (_folder, file, _) = convert(recipe, |_| {});
        let v = compare(&file);
        let bad: Vec<_> = v.tensors.iter().filter(|t| !t.verdict.is_good()).collect();
        assert!(bad.is_empty() && v.metadata.is_empty(), "{recipe}: {bad:?} {:?}", v.metadata);
        assert_eq!(v.tensors.len(), 96);
        let exact = v.tensors.iter().filter(|t| t.verdict == Verdict::Exact).count();
        match recipe {
            "F32" | "BF16" => {
                assert_eq!(exact, 96);
                assert!(v.tensors.iter().all(|t| t.max_error == 0.0), "the source is in bf16");
            }
            "F16" => assert_eq!(exact, 96),
            _ => assert!((40..96).contains(&exact), "{recipe}: {exact}"),
        }
    }
}

/// A copy of `file` with some tensors changed (`None` drops one) and other keys.
fn altered(
    file: &GgufFile,
    path: &Path,
    change_keys: impl FnOnce(&mut Metadata),
    change: impl Fn(&str, &mut TensorDecl, &mut Vec<u8>) -> bool,
) -> GgufFile {
    let mut keys = file.metadata().clone();
    change_keys(&mut keys);
    let tensors: Vec<_> = file
        .tensors()
        .iter()
        .filter_map(|t| {
            let mut decl = TensorDecl { name: t.name.clone(), dims: t.dims.clone(), ty: t.ty };
            let mut data = file.data(t).to_vec();
            change(&t.name, &mut decl, &mut data).then_some((decl, data))
        })
        .collect();
    let decls = tensors.iter().map(|(d, _)| d.clone()).collect();
    let options = WriterOptions { force: true, ..WriterOptions::default() };
    let mut writer = GgufWriter::create(path, &keys, decls, &options).unwrap();
    for (decl, data) in &tensors {
        writer.write(&decl.name, data).unwrap();
    }
    writer.finish().unwrap();
    GgufFile::open(path).unwrap()
}

/// The tensors that are not as they should be, with their verdicts.
fn bad(v: &Verification) -> Vec<(&str, Verdict)> {
    v.tensors.iter().filter(|t| !t.verdict.is_good()).map(|t| (t.name.as_str(), t.verdict)).collect()
}

#[test]
fn one_flipped_bit_is_found_in_any_tensor() {
    let (folder, file, _) = convert("Q4_K_M", |_| {});
    let path = folder.path().join("flipped.gguf");
    for target in [
        "token_embd.weight",
        "blk.0.attn_norm.weight",
        "blk.0.ssm_a",
        "blk.1.attn_qkv.weight",
        "blk.3.ffn_down_exps.weight",
        "blk.4.nextn.eh_proj.weight",
        "output.weight",
    ] {
        let flipped = altered(
            &file,
            &path,
            |_| {},
            |name, decl, data| {
                if name == target {
                    // In a float the lowest bit; in a block the top bit of the scale's exponent.
                    let block = decl.ty.block_bytes();
                    let at = match decl.ty {
                        TensorType::F32 => 4,
                        TensorType::Q6_K => 5 * block + 209,
                        _ => 5 * block + 1,
                    };
                    data[at] ^= if decl.ty == TensorType::F32 { 1 } else { 0x40 };
                }
                true
            },
        );
        assert_eq!(bad(&compare(&flipped)), [(target, Verdict::Off)]);
    }
}

#[test]
fn a_worse_quantizer_does_not_pass() {
    let (folder, file, _) = convert("F32", |_| {});
    let path = folder.path().join("worse.gguf");
    // Weights scaled by a few per cent before quantizing: every block is plausible, every weight is a little off.
    let worse = altered(
        &file,
        &path,
        |_| {},
        |name, decl, data| {
            if name == "blk.0.ffn_up_exps.weight" {
                let values: Vec<f32> =
                    data.chunks(4).map(|b| 1.08 * f32::from_le_bytes(b.try_into().unwrap())).collect();
                decl.ty = TensorType::Q4_K;
                *data = vec![0; decl.ty.row_bytes(values.len()).unwrap()];
                quantize(decl.ty, &values, None, decl.dims[0] as usize, data).unwrap();
            }
            true
        },
    );
    assert_eq!(bad(&compare(&worse)), [("blk.0.ffn_up_exps.weight", Verdict::Off)]);
}

#[test]
fn heads_in_grouped_order_do_not_pass() {
    let (folder, file, _) = convert("BF16", |_| {});
    let path = folder.path().join("grouped.gguf");
    let grouped = altered(
        &file,
        &path,
        |_| {},
        |name, _, data| {
            if name == "blk.0.ssm_dt.bias" {
                // 4 key heads of 2 value heads: swaps the second and third head.
                data[4..12].rotate_left(4);
            }
            true
        },
    );
    assert_eq!(bad(&compare(&grouped)), [("blk.0.ssm_dt.bias", Verdict::Off)]);
}

#[test]
fn what_is_on_one_side_only_is_listed() {
    let (folder, file, _) = convert("BF16", |_| {});
    let path = folder.path().join("sides.gguf");
    let other = altered(
        &file,
        &path,
        |_| {},
        |name, decl, data| {
            match name {
                "blk.2.ssm_out.weight" => return false,
                "blk.0.attn_norm.weight" => decl.name = "blk.0.attn_norm_2.weight".to_string(),
                "blk.3.attn_q.weight" => {
                    decl.dims[1] /= 2;
                    data.truncate(data.len() / 2);
                }
                _ => {}
            }
            true
        },
    );
    let v = compare(&other);
    let mut found = bad(&v);
    found.sort_by_key(|f| f.0);
    assert_eq!(
        found,
        [
            ("blk.0.attn_norm.weight", Verdict::Missing),
            ("blk.0.attn_norm_2.weight", Verdict::Extra),
            ("blk.2.ssm_out.weight", Verdict::Missing),
            ("blk.3.attn_q.weight", Verdict::WrongShape),
        ]
    );
    assert_eq!(missing_head(&v), 0);
}

#[test]
fn a_missing_head_is_called_that() {
    let (_folder, file, _) = convert("BF16", |o| o.plan.no_mtp = true);
    let v = compare(&file);
    assert_eq!(missing_head(&v), 20);
    assert!(v.metadata.iter().any(|m| m.contains("nextn_predict_layers")), "{:?}", v.metadata);
    // Left out on purpose, it is not missed.
    let options = PlanOptions { no_mtp: true, ..PlanOptions::default() };
    assert!(verify(&file, &tiny(), &options, Progress::SILENT).unwrap().is_good());
}

#[test]
fn metadata_is_compared_too() {
    let (folder, file, _) = convert("BF16", |_| {});
    let path = folder.path().join("keys.gguf");
    let keys = |m: &mut Metadata| {
        m.set("qwen35moe.rope.freq_base", Value::F32(10_000.0));
        // Another width of the same number is no difference.
        m.set("qwen35moe.expert_count", Value::U64(8));
    };
    let v = compare(&altered(&file, &path, keys, |_, _, _| true));
    assert_eq!(v.metadata.len(), 1);
    assert!(v.metadata[0].contains("rope.freq_base"), "{:?}", v.metadata);
    assert!(!v.is_good());
}
