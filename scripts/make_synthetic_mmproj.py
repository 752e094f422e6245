#!/usr/bin/env python3
"""Writes a vision encoder of the real model's geometry with random weights, for measuring speed.

Needs numpy and gguf (PyPI). The rows' width is free, so that a small text model can be put beside it.

usage: make_synthetic_mmproj.py OUT.gguf [--width 256] [--type f16|f32|bf16|q8_0] [--layers 27]
"""

import argparse

import gguf
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--type", default="f16", choices=["f16", "f32", "bf16", "q8_0"])
parser.add_argument("--layers", type=int, default=27)
args = parser.parse_args()

HIDDEN, FF, HEADS, PATCH, SIDE, MERGED = 1152, 4304, 16, 16, 48, 4 * 1152
TYPES = {"f16": "F16", "f32": "F32", "bf16": "BF16", "q8_0": "Q8_0"}
KIND = gguf.GGMLQuantizationType[TYPES[args.type]]
rng = np.random.default_rng(1)
w = gguf.GGUFWriter(args.out, "clip")
w.add_type("mmproj")
w.add_file_type(gguf.LlamaFileType[{"f16": "MOSTLY_F16", "f32": "ALL_F32", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}[args.type]])
w.add_bool("clip.has_vision_encoder", True)
w.add_uint32("clip.vision.projection_dim", args.width)
w.add_uint32("clip.vision.image_size", SIDE * PATCH)
w.add_uint32("clip.vision.patch_size", PATCH)
w.add_uint32("clip.vision.embedding_length", HIDDEN)
w.add_uint32("clip.vision.feed_forward_length", FF)
w.add_uint32("clip.vision.block_count", args.layers)
w.add_uint32("clip.vision.attention.head_count", HEADS)
w.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
w.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
w.add_string("clip.projector_type", "qwen3vl_merger")
w.add_bool("clip.use_gelu", True)
w.add_uint32("clip.vision.spatial_merge_size", 2)
w.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
w.add_array("clip.vision.is_deepstack_layers", [False] * args.layers)


made = {}


def random_matrix(outputs, inputs):
    """One per shape: the values do not matter for the speed."""
    if (outputs, inputs) not in made:
        made[outputs, inputs] = (rng.random((outputs, inputs), dtype=np.float32) - 0.5) * (12 / inputs) ** 0.5
    return made[outputs, inputs]


def matrix(name, outputs, inputs):
    values = random_matrix(outputs, inputs)
    kind = KIND if inputs % 32 == 0 or KIND != gguf.GGMLQuantizationType.Q8_0 else gguf.GGMLQuantizationType.F16
    if kind == gguf.GGMLQuantizationType.F32:
        w.add_tensor(name, values)
    elif kind == gguf.GGMLQuantizationType.F16:
        w.add_tensor(name, values.astype(np.float16))
    else:
        w.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def vector(name, n, around=0.0):
    w.add_tensor(name, (around + 0.02 * rng.standard_normal(n)).astype(np.float32))


def norm(name):
    vector(f"{name}.weight", HIDDEN, 1.0)
    vector(f"{name}.bias", HIDDEN)


for i in range(args.layers):
    b = f"v.blk.{i}"
    norm(f"{b}.ln1")
    norm(f"{b}.ln2")
    for part, outputs, inputs in (
        ("attn_qkv", 3 * HIDDEN, HIDDEN), ("attn_out", HIDDEN, HIDDEN), ("ffn_up", FF, HIDDEN), ("ffn_down", HIDDEN, FF),
    ):
        matrix(f"{b}.{part}.weight", outputs, inputs)
        vector(f"{b}.{part}.bias", outputs)
norm("v.post_ln")
matrix("mm.0.weight", MERGED, MERGED)
vector("mm.0.bias", MERGED)
matrix("mm.2.weight", args.width, MERGED)
vector("mm.2.bias", args.width)
for name in ("v.patch_embd.weight", "v.patch_embd.weight.1"):
    w.add_tensor(name, (rng.standard_normal((HIDDEN, 3, PATCH, PATCH), dtype=np.float32) * 0.02).astype(np.float16))
vector("v.patch_embd.bias", HIDDEN)
w.add_tensor("v.position_embd.weight", (0.02 * rng.standard_normal((SIDE * SIDE, HIDDEN))).astype(np.float32))
w.write_header_to_file()
w.write_kv_data_to_file()
w.write_tensors_to_file()
w.close()
