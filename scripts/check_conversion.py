#!/usr/bin/env python3
"""Compares `strata convert` with llama.cpp's own converter and quantizer on one Hugging Face folder.

Needs the packages numpy and gguf, a llama.cpp tree (with build/bin), and a Python with torch and transformers for its
converter. Prints Markdown; exit code 1 when something does not hold.

  files    key set, tensor names, shapes and (unquantized) bits of strata's files against convert_hf_to_gguf.py's
  quants   RMSE, largest error and speed (CPU time, one thread) per tensor and type against ggml_quantize_chunk
  speed    strata convert against llama-quantize on the whole folder
  kl       KL divergence from the F32 file over a text, of strata's files and of llama-quantize's

usage: check_conversion.py HF_DIR --llama-cpp DIR --strata BIN [--rows BIN] [--python PYTHON] [--text FILE] [files] [quants] [speed] [kl]
"""
import argparse
import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType, quants

# Keys whose values may differ: names come from the folder's name by different rules.
MAY_DIFFER = {"general.name", "general.basename", "general.finetune", "general.version", "general.organization"}
# Shapes that mean the same: [n] and [n, 1].
SAME_SHAPE = {"ffn_gate_inp_shexp.weight"}
failures = []


def check(good, text):
    if not good:
        failures.append(text)
        print(f"- DIFFERENT: {text}")


def run(*command, **kw):
    return subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True, **kw)


def field(reader, key):
    return reader.fields[key].contents()


def files(a, work):
    print("## Files against llama.cpp's converter\n")
    for kind, extra in [("f32", []), ("f16", []), ("bf16", []), ("q8_0", []), ("f16", ["--mmproj"])]:
        theirs, ours = work / f"theirs-{kind}{len(extra)}.gguf", work / f"ours-{kind}{len(extra)}.gguf"
        run(a.python, a.llama_cpp / "convert_hf_to_gguf.py", a.hf, "--outtype", kind, "--outfile", theirs, *extra)
        if extra:
            run(a.strata, "convert", a.hf, "--mmproj", ours, "--mmproj-type", kind)
        else:
            run(a.strata, "convert", a.hf, "-o", ours, "--type", kind)
        t, o = gguf.GGUFReader(theirs), gguf.GGUFReader(ours)
        keys_t, keys_o = set(t.fields), set(o.fields)
        name = f"{kind} {' '.join(extra)}".strip()
        check(keys_t - MAY_DIFFER == keys_o - MAY_DIFFER, f"{name}: keys {sorted(keys_t ^ keys_o)}")
        for key in sorted((keys_t & keys_o) - MAY_DIFFER):
            if key not in ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"):
                same = field(t, key) == field(o, key) and t.fields[key].types == o.fields[key].types
                check(same, f"{name}: {key}: theirs {str(field(t, key))[:60]}, ours {str(field(o, key))[:60]}")
        tensors_t, tensors_o = {x.name: x for x in t.tensors}, {x.name: x for x in o.tensors}
        check(tensors_t.keys() == tensors_o.keys(), f"{name}: tensors {sorted(tensors_t.keys() ^ tensors_o.keys())}")
        bits = exp_ulp = 0
        for n in tensors_t.keys() & tensors_o.keys():
            x, y = tensors_t[n], tensors_o[n]
            shape = [list(map(int, z.shape)) for z in (x, y)]
            if n.split(".", 2)[-1] in SAME_SHAPE:
                shape = [[d for d in s if d != 1] for s in shape]
            check(shape[0] == shape[1], f"{name}: {n}: shapes {shape}")
            check(x.tensor_type == y.tensor_type, f"{name}: {n}: {x.tensor_type.name} and {y.tensor_type.name}")
            if n.endswith(".ssm_a"):
                # torch's exp is not correctly rounded; ours is.
                d = np.abs(x.data.view(np.int32).ravel() - y.data.view(np.int32).ravel()).max()
                exp_ulp = max(exp_ulp, int(d))
                check(d <= 1, f"{name}: {n}: {d} units in the last place apart")
            elif x.data.tobytes() == y.data.tobytes():
                bits += 1
            else:
                # Q8_0 rounds to the stored scale here and to the unrounded one there.
                check(x.tensor_type == GGMLQuantizationType.Q8_0, f"{name}: {n}: the bits differ")
        print(f"- {name}: {len(keys_o)} keys, {len(tensors_o)} tensors, {bits} of them with the same bits; "
              f"`-exp` within {exp_ulp} unit(s) in the last place")
    print()


def tensors_of(folder):
    for path in sorted(Path(folder).glob("*.safetensors")):
        data = path.read_bytes()
        n, = struct.unpack("<Q", data[:8])
        for name, t in json.loads(data[8:8 + n]).items():
            if name != "__metadata__" and t["dtype"] == "BF16" and len(t["shape"]) >= 2 and t["shape"][-1] % 256 == 0:
                a, b = t["data_offsets"]
                raw = np.frombuffer(data[8 + n + a:8 + n + b], dtype=np.uint16).astype(np.uint32) << 16
                yield name, raw.view(np.float32).reshape(-1, t["shape"][-1])


def quant_table(a, work):
    print("## Quantizers against ggml's, per tensor\n")
    lib = ctypes.CDLL(str(a.llama_cpp / "build/bin/libggml-base.so"))
    lib.ggml_quantize_chunk.restype = ctypes.c_size_t
    lib.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p] + [ctypes.c_int64] * 3 + [ctypes.c_void_p]
    rng = np.random.default_rng(1)
    rows = [(n, x) for n, x in tensors_of(a.hf) if x.shape[0] >= 64]
    rows.append(("normal, 512 x 2048", (rng.standard_normal((512, 2048)) * 0.02).astype(np.float32)))
    rows.append(("Student t (4), 512 x 2048", (rng.standard_t(4, (512, 2048)) * 0.02).astype(np.float32)))
    rows.append(("positive, 256 x 2048", np.abs(rng.standard_normal((256, 2048)) * 0.02).astype(np.float32)))
    types = ["Q8_0", "Q4_K", "Q5_K", "Q6_K"]
    ratios = {t: [] for t in types}
    for name, x in rows:
        x = np.ascontiguousarray(x)
        x.tofile(work / "rows")
        out = run(a.rows, work / "rows", x.shape[1], work / "out", *types).stdout
        speeds = {line.split()[0]: float(line.split()[1]) for line in out.splitlines()}
        for t in types:
            ty = GGMLQuantizationType[t]
            ours = np.fromfile(work / f"out.{t}", dtype=np.uint8)
            theirs, best = np.empty_like(ours), float("inf")
            for _ in range(3 if x.size < 500_000 else 1):
                start = time.thread_time()
                lib.ggml_quantize_chunk(int(ty), x.ctypes.data, theirs.ctypes.data, 0, x.shape[0], x.shape[1], None)
                best = min(best, time.thread_time() - start)
            e = [quants.dequantize(q, ty).reshape(x.shape).astype(np.float64) - x for q in (ours, theirs)]
            rmse, largest = [np.sqrt((d**2).mean()) for d in e], [np.abs(d).max() for d in e]
            ratios[t].append((rmse[0] / rmse[1], largest[0] / largest[1], speeds[t] / (x.size / best / 1e6), name))
            check(rmse[0] <= rmse[1], f"{name} {t}: RMSE {rmse[0] / rmse[1]:.4f} x ggml's")
            check(largest[0] <= largest[1], f"{name} {t}: largest error {largest[0] / largest[1]:.4f} x ggml's")
            check(speeds[t] >= x.size / best / 1e6, f"{name} {t}: speed {speeds[t] / (x.size / best / 1e6):.2f} x ggml's")
    print(f"{len(rows)} tensors. Ratios strata / ggml: RMSE and largest error (lower is better), speed (higher is better).\n")
    print("| type | RMSE median | RMSE worst | largest error median | largest error worst | speed median | speed worst |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for t in types:
        r, m, s = (np.array([v[i] for v in ratios[t]]) for i in range(3))
        print(f"| {t} | {np.median(r):.4f} | {r.max():.4f} | {np.median(m):.4f} | {m.max():.4f} | {np.median(s):.1f} x | {s.min():.1f} x |")
    print()


def whole(a, work):
    print("## Whole files: strata convert and llama-quantize, CPU seconds (user and system), best of 3, interleaved\n")
    base = work / "base-f32.gguf"
    run(a.strata, "convert", a.hf, "-o", base, "--type", "F32", "--no-verify")
    threads = os.cpu_count()

    def cpu(*command):
        before = os.times()
        run(*command)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    print("| type | strata, s | llama-quantize, s | ratio |\n| --- | --- | --- | --- |")
    for ours, theirs in [("Q8_0", "Q8_0"), ("Q4_K", "Q4_K_S"), ("Q6_K", "Q6_K")]:
        best = [float("inf")] * 2
        for _ in range(3):
            strata = cpu(a.strata, "convert", a.hf, "-o", work / "o.gguf", "--type", ours, "--no-verify", "--force", "-t", threads)
            llama = cpu(a.llama_cpp / "build/bin/llama-quantize", base, work / "t.gguf", theirs, threads)
            best = [min(best[0], strata), min(best[1], llama)]
        print(f"| {ours} | {best[0]:.2f} | {best[1]:.2f} | {best[1] / best[0]:.1f} x |")
    print()


def divergence(a, work):
    print(f"## KL divergence from F32 over {a.text.name}, nats\n")
    base = work / "base-f32.gguf"
    run(a.strata, "convert", a.hf, "-o", base, "--type", "F32", "--no-verify", "--force")

    def kl(model):
        out = run(a.strata, "kl-compare", "-m", model, "--against", base, "-f", a.text, "-c", "128", "--json").stdout
        return json.loads(out)["figures"]["kl_mean"]

    print("| type | strata | llama-quantize |\n| --- | --- | --- |")
    for ours, theirs in [("Q4_K", ["--pure", "Q4_K_S"]), ("Q5_K", ["--pure", "Q5_K_S"]), ("Q6_K", ["--pure", "Q6_K"]),
                         ("Q4_K_M", ["Q4_K_M"]), ("Q5_K_M", ["Q5_K_M"])]:
        run(a.strata, "convert", a.hf, "-o", work / "o.gguf", "--type", ours, "--no-verify", "--force")
        *flags, name = theirs
        run(a.llama_cpp / "build/bin/llama-quantize", *flags, base, work / "t.gguf", name)
        strata, llama = kl(work / "o.gguf"), kl(work / "t.gguf")
        print(f"| {ours} | {strata:.4f} | {llama:.4f} |")
        # Two quantizers of one error differ by several per cent over a short text.
        check(strata < 1.1 * llama, f"{ours}: KL {strata}, llama-quantize {llama}")
    print()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("hf", type=Path)
    p.add_argument("--llama-cpp", type=Path, required=True)
    p.add_argument("--strata", type=Path, default=Path("target/release/strata"))
    p.add_argument("--rows", type=Path, default=Path("target/release/examples/quantize_rows"))
    p.add_argument("--python", default=sys.executable, help="the Python that runs convert_hf_to_gguf.py")
    p.add_argument("--text", type=Path, default=Path("tests/golden/compare/text.txt"))
    p.add_argument("parts", nargs="*", default=["files", "quants", "speed", "kl"])
    a = p.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as work:
        for part in a.parts:
            {"files": files, "quants": quant_table, "speed": whole, "kl": divergence}[part](a, Path(work))
    print("All holds." if not failures else f"{len(failures)} differences.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
