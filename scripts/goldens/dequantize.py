"""Writes crates/kernels/src/format/golden/dequantize.txt: hashes of what gguf-py 0.19 dequantizes noise to.

usage: python scripts/goldens/dequantize.py > crates/kernels/src/format/golden/dequantize.txt
The bytes are those of the test in crates/kernels/src/format/dequantize.rs: a linear congruential generator, with the
top exponent bit of every half (or float) cleared.
"""
import gguf
import numpy as np

HALVES = {"F32": [3], "F16": [1], "BF16": [1], "Q8_0": [1], "Q4_K": [1, 3], "Q5_K": [1, 3], "Q6_K": [209]}


def noise(n):
    state, out = 12345, bytearray()
    for _ in range(n):
        state = (state * 1664525 + 1013904223) % 2**32
        out.append(state >> 24)
    return np.frombuffer(bytes(out), dtype=np.uint8).copy()


def fnv(data):
    h = 0xCBF29CE484222325
    for byte in data:
        h = ((h ^ byte) * 0x100000001B3) % 2**64
    return h


print("# type, blocks, FNV-1a of the weights' bits, bits of the first weights (gguf-py; scripts/goldens/dequantize.py)")
for name, at in HALVES.items():
    ty = gguf.GGMLQuantizationType[name]
    size, block_bytes = gguf.GGML_QUANT_SIZES[ty]
    blocks = 600 if size == 1 else 24
    src = noise(blocks * block_bytes).reshape(blocks, block_bytes)
    for i in at:
        src[:, i] &= 0xBF
    if name == "F32":
        out = src.reshape(-1).view(np.float32)
    elif name == "F16":
        out = src.reshape(-1).view(np.float16).astype(np.float32)
    else:
        out = gguf.quants.dequantize(src, ty).astype(np.float32).reshape(-1)
    assert out.size == blocks * size
    bits = out.view(np.uint32)
    print(name, blocks, f"{fnv(bits.tobytes()):016x}", *(f"{b:08x}" for b in bits[:6]))
