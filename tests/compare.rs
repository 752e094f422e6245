//! `strata parity`, `kl-compare` and `perplexity` on the bundled model: a model equals itself, planted faults are found
//! where they were planted, and the figures are llama.cpp's.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use strata_core::convert::{ConvertOptions, Progress, Recipe, convert_text_model};
use strata_core::gguf::{self, GgufFile, GgufWriter, Metadata, TensorDecl, WriterOptions};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn strata(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_strata")).args(args).env_remove("STRATA_MODEL").output().unwrap()
}

fn json(args: &[&str]) -> (Value, i32) {
    let output = strata(args);
    let report = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(&output.stderr)));
    (report, output.status.code().unwrap())
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The bundled model with some tensors' bytes and metadata changed, written to `folder`.
fn altered(
    folder: &Path,
    name: &str,
    mut tensor: impl FnMut(&GgufFile, &gguf::TensorInfo) -> Option<Vec<u8>>,
    metadata: impl FnOnce(&mut Metadata),
) -> PathBuf {
    let file = GgufFile::open(&golden("tiny.gguf")).unwrap();
    let mut changed = file.metadata().clone();
    metadata(&mut changed);
    let path = folder.join(name);
    let declared = file.tensors().iter().map(|t| TensorDecl { name: t.name.clone(), dims: t.dims.clone(), ty: t.ty });
    let mut writer = GgufWriter::create(&path, &changed, declared.collect(), &WriterOptions::default()).unwrap();
    for info in file.tensors() {
        let bytes = tensor(&file, info).unwrap_or_else(|| file.data(info).to_vec());
        writer.write(&info.name, &bytes).unwrap();
    }
    writer.finish().unwrap();
    path
}

fn bytes_of(file: &GgufFile, name: &str) -> Vec<u8> {
    file.data(file.tensor(name).unwrap()).to_vec()
}

/// The stage where a trace against the bundled model first differs, and what is said about its tensors.
fn first_difference(faulty: &Path) -> (String, Vec<Value>, i32) {
    let reference = golden("tiny.gguf");
    let (report, code) = json(&[
        "parity",
        "-m",
        text(faulty),
        "--against",
        text(&reference),
        "--trace",
        "--json",
        "-n",
        "16",
        "-t",
        "1",
    ]);
    let trace = &report["trace"];
    let first =
        trace["first"].as_u64().map(|first| trace["stages"][first as usize]["name"].as_str().unwrap().to_owned());
    (first.unwrap_or_default(), trace["tensors"].as_array().unwrap().clone(), code)
}

#[test]
fn a_model_equals_itself() {
    let (model, corpus) = (golden("tiny.gguf"), golden("compare/text.txt"));
    let (model, corpus) = (text(&model), text(&corpus));
    let (report, code) =
        json(&["kl-compare", "-m", model, "--against", model, "-f", corpus, "-c", "64", "--chunks", "3", "--json"]);
    assert_eq!(code, 0);
    for (figure, value) in
        [("kl_mean", 0.0), ("kl_max", 0.0), ("same_top", 100.0), ("log_perplexity_ratio", 0.0), ("positions", 93.0)]
    {
        assert_eq!(report["figures"][figure], value, "{figure}");
    }
    let (report, code) = json(&[
        "parity",
        "-m",
        model,
        "--against",
        model,
        "--against-threads",
        "1",
        "--max-difference",
        "0",
        "-n",
        "8",
        "--trace",
        "--json",
    ]);
    assert_eq!(
        (code, &report["figures"]["largest_difference"], &report["trace"]["first"]),
        (0, &0.into(), &Value::Null)
    );
}

/// What llama-perplexity measures on the same files and text (`scripts/make_compare_goldens.py`).
#[test]
fn perplexity_and_divergence_are_llama_cpps() {
    /// The bound for the mean KL divergence of a quantized file.
    const KL_TOLERANCE: f64 = 0.05;
    /// Both sides quantize activations and round in another order.
    const PERPLEXITY_TOLERANCE: f64 = 0.01;
    let folder = tempfile::tempdir().unwrap();
    let convert = |name: &str| {
        let path = folder.path().join(format!("{name}.gguf"));
        let options = ConvertOptions::new(Recipe::from_name(name).unwrap());
        convert_text_model(&golden("tiny-hf"), &path, &options, Progress::SILENT).unwrap();
        path
    };
    let expected: Value =
        serde_json::from_slice(&std::fs::read(golden("compare/llama_perplexity.json")).unwrap()).unwrap();
    let (reference, corpus) = (convert("F32"), golden("compare/text.txt"));
    for (name, model) in [("Q8_0", convert("Q8_0")), ("Q4_K_M", convert("Q4_K_M"))] {
        let args = [
            "kl-compare",
            "-m",
            text(&model),
            "--against",
            text(&reference),
            "-f",
            text(&corpus),
            "-c",
            "128",
            "--json",
        ];
        let (report, code) = json(&args);
        assert_eq!(code, 0);
        for (figure, tolerance) in [("kl_mean", KL_TOLERANCE), ("perplexity", PERPLEXITY_TOLERANCE)] {
            let (found, expected) =
                (report["figures"][figure].as_f64().unwrap(), expected[name][figure].as_f64().unwrap());
            assert!((found / expected - 1.0).abs() < tolerance, "{name} {figure}: {found}, llama.cpp {expected}");
        }
        let exact = report["figures"]["reference_perplexity"].as_f64().unwrap();
        assert!((exact / expected["F32"]["perplexity"].as_f64().unwrap() - 1.0).abs() < 1e-4, "{exact}");
    }
}

#[test]
fn perplexity_only_is_the_perplexity() {
    let (model, corpus) = (golden("tiny.gguf"), golden("compare/text.txt"));
    let size = ["-m", text(&model), "-f", text(&corpus), "-c", "48", "--chunks", "2", "--json"];
    let (alone, code) = json(&[&["perplexity"], &size[..]].concat());
    let (other, _) = json(&[&["kl-compare", "--perplexity-only"], &size[..]].concat());
    assert_eq!((code, &other["figures"]), (0, &alone["figures"]));
    assert_eq!(alone["figures"]["positions"], 46);
}

/// Written by `llama-perplexity -c 16 -b 16 --chunks 1 --kl-divergence-base` on the F32 conversion of the bundled checkpoint.
#[test]
fn log_probabilities_saved_by_llama_cpp_are_read() {
    let base = golden("compare/llama_base.bin");
    let (report, code) = json(&["kl-compare", "-m", text(&golden("tiny.gguf")), "--against", text(&base), "--json"]);
    assert_eq!(code, 0);
    let figures = &report["figures"];
    assert_eq!(figures["positions"], 7);
    // What llama-perplexity itself makes of this file and the bundled model: KL 0.00573, perplexity 3372.78, ln ratio 0.36027.
    let close = |name: &str, expected: f64, tolerance: f64| {
        let found = figures[name].as_f64().unwrap();
        assert!((found / expected - 1.0).abs() < tolerance, "{name}: {found}, llama.cpp {expected}");
    };
    close("kl_mean", 0.00573, 0.1);
    close("reference_perplexity", 3372.7794 * (-0.36027f64).exp(), 1e-3);
}

#[test]
fn saved_log_probabilities_come_back_as_they_were() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("base.bin");
    let (model, corpus) = (golden("tiny.gguf"), golden("compare/text.txt"));
    let (model, corpus) = (text(&model), text(&corpus));
    let size = ["-c", "32", "--chunks", "4"];
    assert!(
        strata(&[&["perplexity", "-m", model, "-f", corpus, "--save", text(&saved)], &size[..]].concat())
            .status
            .success()
    );
    let (report, code) = json(&[
        "kl-compare",
        "-m",
        model,
        "--against",
        text(&saved),
        "--noise",
        model,
        "--threshold",
        "2e-4",
        "--json",
    ]);
    assert_eq!(code, 0);
    assert_eq!(report["figures"]["same_top"], 100);
    /// Sixteen bits over at most 16 nats.
    const HALF_A_STEP: f64 = 16.0 / 65535.0 / 2.0;
    assert!(report["figures"]["kl_max"].as_f64().unwrap().abs() < HALF_A_STEP);
    assert_eq!(report["figures"]["kl_mean"], report["figures"]["noise_kl_mean"]);

    let bytes = std::fs::read(&saved).unwrap();
    for (name, broken) in [
        ("cut", bytes[..bytes.len() - 100].to_vec()),
        ("empty", Vec::new()),
        ("huge", [&b"_logits_"[..], &[0xff; 12]].concat()),
        ("token", [&bytes[..20], &[0xff; 4], &bytes[24..]].concat()),
        ("nan", [&bytes[..20 + 4 * 128], &f32::NAN.to_le_bytes(), &bytes[24 + 4 * 128..]].concat()),
    ] {
        let path = folder.path().join(name);
        std::fs::write(&path, broken).unwrap();
        let output = strata(&["kl-compare", "-m", model, "--against", text(&path)]);
        assert_eq!(output.status.code(), Some(2), "{name}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn a_threshold_that_is_passed_gives_exit_code_3_and_figures_agree() {
    let folder = tempfile::tempdir().unwrap();
    let faulty = altered(
        folder.path(),
        "norm.gguf",
        |file, t| (t.name == "blk.3.attn_norm.weight").then(|| unshifted(file, &t.name)),
        |_| {},
    );
    let (model, corpus, plot) = (golden("tiny.gguf"), golden("compare/text.txt"), folder.path().join("kl.svg"));
    let args = [
        "kl-compare",
        "-m",
        text(&faulty),
        "--against",
        text(&model),
        "-f",
        text(&corpus),
        "-c",
        "64",
        "--chunks",
        "2",
        "--threshold",
        "0.001",
    ];
    let (report, code) = json(&[&args[..], &["--json", "--plot", text(&plot)]].concat());
    assert_eq!(code, 3);
    let svg = std::fs::read_to_string(&plot).unwrap();
    assert!(svg.starts_with("<svg") && svg.matches("<circle").count() == 62);

    let csv = strata(&[&args[..], &["--csv"]].concat());
    let table = strata(&args);
    let (csv, table) = (String::from_utf8(csv.stdout).unwrap(), String::from_utf8(table.stdout).unwrap());
    let figures = report["figures"].as_object().unwrap();
    assert_eq!(csv.lines().count(), figures.len() + 1);
    for ((line, shown), (name, value)) in csv.lines().skip(1).zip(table.lines().skip(1)).zip(figures) {
        assert_eq!(line, format!("{name},{value}"));
        let value = value.to_string();
        assert!(shown.split_whitespace().any(|word| word == value), "{shown} lacks {value}");
    }
}

/// A norm as a checkpoint stores it: without the 1 that GGUF files add.
fn unshifted(file: &GgufFile, name: &str) -> Vec<u8> {
    assert_eq!(file.tensor(name).unwrap().ty.name(), "F32");
    let values = bytes_of(file, name);
    values.chunks_exact(4).flat_map(|b| (f32::from_le_bytes([b[0], b[1], b[2], b[3]]) - 1.0).to_le_bytes()).collect()
}

#[test]
fn a_norm_that_was_not_shifted_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let faulty = altered(
        folder.path(),
        "m.gguf",
        |file, t| (t.name == "blk.2.post_attention_norm.weight").then(|| unshifted(file, &t.name)),
        |_| {},
    );
    let (stage, tensors, code) = first_difference(&faulty);
    assert_eq!((stage.as_str(), code), ("layer 2 (delta net + experts)", 3));
    assert_eq!(tensors.len(), 1);
    assert_eq!(
        (&tensors[0]["name"], &tensors[0]["finding"]["kind"]),
        (&"blk.2.post_attention_norm.weight".into(), &"offset".into())
    );
    assert!((tensors[0]["finding"]["by"].as_f64().unwrap() + 1.0).abs() < 1e-3);
}

/// Value heads as a checkpoint groups them, where GGUF files interleave them: another order of the same rows.
#[test]
fn value_heads_in_another_order_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let reorder = |file: &GgufFile, name: &str| {
        let bytes = bytes_of(file, name);
        let (heads, keys) = (8, 4);
        let head = bytes.len() / heads;
        (0..heads)
            .flat_map(|i| bytes[(i % keys * heads / keys + i / keys) * head..][..head].to_vec())
            .collect::<Vec<u8>>()
    };
    let moved = [
        "blk.1.attn_gate.weight",
        "blk.1.ssm_alpha.weight",
        "blk.1.ssm_beta.weight",
        "blk.1.ssm_a",
        "blk.1.ssm_dt.bias",
    ];
    let faulty = altered(
        folder.path(),
        "m.gguf",
        |file, t| moved.contains(&t.name.as_str()).then(|| reorder(file, &t.name)),
        |_| {},
    );
    let (stage, tensors, code) = first_difference(&faulty);
    assert_eq!((stage.as_str(), code), ("layer 1 (delta net + experts)", 3));
    let mut names: Vec<_> = tensors.iter().map(|t| t["name"].as_str().unwrap()).collect();
    names.sort_unstable();
    let mut expected = moved;
    expected.sort_unstable();
    assert_eq!(names, expected);
    assert!(tensors.iter().all(|t| t["finding"]["kind"] == "rows_reordered"), "{tensors:?}");
}

#[test]
fn gate_and_up_that_changed_places_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let swap = |file: &GgufFile, name: &str| match name {
        "blk.0.ffn_gate_shexp.weight" => Some(bytes_of(file, "blk.0.ffn_up_shexp.weight")),
        "blk.0.ffn_up_shexp.weight" => Some(bytes_of(file, "blk.0.ffn_gate_shexp.weight")),
        _ => None,
    };
    let faulty = altered(folder.path(), "m.gguf", |file, t| swap(file, &t.name), |_| {});
    let (stage, tensors, _) = first_difference(&faulty);
    assert_eq!(stage, "layer 0 (delta net + experts)");
    assert_eq!(tensors.len(), 2);
    for tensor in &tensors {
        assert_eq!(tensor["finding"]["kind"], "holds_other", "{tensor}");
    }
}

#[test]
fn one_damaged_block_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let damage = |file: &GgufFile, name: &str| {
        let mut bytes = bytes_of(file, name);
        let block = file.tensor(name).unwrap().ty.block_bytes();
        bytes[5 * block..6 * block].iter_mut().for_each(|byte| *byte ^= 0x15);
        bytes
    };
    let name = "blk.3.attn_output.weight";
    let faulty = altered(folder.path(), "m.gguf", |file, t| (t.name == name).then(|| damage(file, name)), |_| {});
    let (stage, tensors, _) = first_difference(&faulty);
    assert_eq!(stage, "layer 3 (attention + experts)");
    assert_eq!(tensors.len(), 1);
    assert_eq!((&tensors[0]["name"], &tensors[0]["finding"]["kind"]), (&name.into(), &"values".into()));
    assert!(tensors[0]["finding"]["block"].as_str().unwrap().ends_with("block 5"), "{}", tensors[0]);
}

#[test]
fn another_chat_template_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let faulty = altered(
        folder.path(),
        "m.gguf",
        |_, _| None,
        |metadata| {
            let template = metadata
                .str("tokenizer.chat_template")
                .unwrap()
                .replace("<think>\\n' }}{{ '\\n</think>", "<think>' }}{{ '\\n</think>");
            assert_ne!(template, metadata.str("tokenizer.chat_template").unwrap());
            metadata.set("tokenizer.chat_template", gguf::Value::String(template));
        },
    );
    let reference = golden("tiny.gguf");
    let (report, code) =
        json(&["parity", "-m", text(&faulty), "--against", text(&reference), "-p", "Hello", "-n", "2", "--json"]);
    assert_eq!(code, 3);
    assert_eq!(report["cases"][0]["prompt"]["position"], 10);
    let output = strata(&["parity", "-m", text(&faulty), "--against", text(&reference), "-p", "Hello", "-n", "2"]);
    assert!(String::from_utf8_lossy(&output.stdout).contains("the prompts differ at token 10"));
}

/// The committed answers of llama.cpp, as a saved reference; near ties are passed with their gaps.
#[test]
fn a_saved_reference_of_llama_cpp_is_met() {
    let (report, code) = json(&[
        "parity",
        "-m",
        text(&golden("tiny.gguf")),
        "--reference",
        text(&golden("llama_greedy.json")),
        "--near-tie",
        "0.3",
        "--json",
    ]);
    assert_eq!(code, 0, "{}", report["figures"]);
    assert!(report["figures"]["steps"].as_u64().unwrap() >= 20 * 64);
    for case in report["cases"].as_array().unwrap() {
        for difference in case["differences"].as_array().unwrap() {
            assert!(difference["near_tie"] == true && difference["reference_gap"].as_f64().unwrap() <= 0.3);
        }
    }
}

#[test]
fn a_reference_saved_before_is_met_and_a_wrong_one_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("reference.json");
    let model = golden("tiny.gguf");
    assert!(
        strata(&[
            "parity",
            "-m",
            text(&model),
            "--save",
            text(&saved),
            "-n",
            "6",
            "-p",
            "Hello",
            "-p",
            "What is 3 + 4?"
        ])
        .status
        .success()
    );
    let (report, code) =
        json(&["parity", "-m", text(&model), "--reference", text(&saved), "--max-difference", "0", "--json"]);
    assert_eq!((code, &report["figures"]["steps"]), (0, &12.into()));

    // The third token replaced by the reference's fourth candidate, with candidates to match: a clear gap.
    let mut reference: Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    let wrong = reference[0]["top"][2][3][0].clone();
    reference[0]["tokens"][2] = wrong.clone();
    reference[0]["top"][2][0][0] = wrong;
    std::fs::write(&saved, reference.to_string()).unwrap();
    let (report, code) = json(&["parity", "-m", text(&model), "--reference", text(&saved), "--json"]);
    assert_eq!(code, 3);
    let difference = &report["cases"][0]["differences"][0];
    assert_eq!((&difference["step"], &difference["near_tie"]), (&2.into(), &false.into()));

    std::fs::write(&saved, "{}").unwrap();
    assert_eq!(strata(&["parity", "-m", text(&model), "--reference", text(&saved)]).status.code(), Some(2));
}

/// What a model says after the end of its answer means nothing: it is neither recorded nor compared.
#[test]
fn a_comparison_ends_with_the_answer() {
    const STEPS: usize = 200;
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("reference.json");
    let model = golden("tiny.gguf");
    let prompt = ["-p", "नमस्ते: what is 67 + 18?"];
    let parity = ["parity", "-m", text(&model)];
    let save = ["--save", text(&saved), "-n", &STEPS.to_string()];
    assert!(strata(&[&parity[..], &prompt, &save].concat()).status.success());
    let mut reference: Value = serde_json::from_slice(&std::fs::read(&saved).unwrap()).unwrap();
    let steps = reference[0]["tokens"].as_array().unwrap().len();
    assert!(steps < STEPS, "the bundled model ends its answers");

    let place = reference[0]["top"][0].clone();
    let other = place[3][0].clone();
    for (list, value) in [("tokens", other.clone()), ("top", serde_json::json!([[other, -0.001]]))] {
        reference[0][list].as_array_mut().unwrap().push(value);
    }
    std::fs::write(&saved, reference.to_string()).unwrap();
    let (report, code) = json(&[&parity[..], &["--reference", text(&saved), "--json"]].concat());
    assert_eq!((code, &report["figures"]["steps"]), (0, &steps.into()));

    // One clear mismatch within the answer: said in words that can be read.
    reference[0]["top"][0] = serde_json::json!([[other, -0.001]]);
    std::fs::write(&saved, reference.to_string()).unwrap();
    let output = strata(&[&parity[..], &["--reference", text(&saved)]].concat());
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(3));
    assert!(out.contains("\"नमस्ते: what is 67 + 18?\": mismatch at token 0"), "{out}");
    assert!(err.contains("differ clearly in 1 place\n"), "{err}");
}

#[test]
fn bounds_that_nothing_can_be_measured_by_are_refused() {
    let model = golden("tiny.gguf");
    let model = text(&model);
    let png = golden("vision/pictures/rgb.png");
    let commands: [&[&str]; 5] = [
        &["kl-compare", "-m", model, "--against", model, "--threshold"],
        &["parity", "-m", model, "--against", model, "--near-tie"],
        &["parity", "-m", model, "--against", model, "--max-difference"],
        &["parity", "-m", model, "--against", model, "--trace", "--trace-tolerance"],
        &["vision", text(&png), "--compare", "x", "--tolerance"],
    ];
    for command in commands {
        let (flag, before) = command.split_last().unwrap();
        for bound in ["nan", "inf", "-1", "-inf", "x"] {
            let output = strata(&[before, &[&format!("{flag}={bound}")]].concat());
            assert_eq!(output.status.code(), Some(2), "{command:?} {bound}");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(said.contains(flag) && said.contains("finite number"), "{said}");
        }
    }
}
