#!/usr/bin/env python3
"""Makes tests/golden/vision: small pictures, and what the reference makes of them.

Reference: transformers' Qwen2-VL image processor (Pillow backend) and its Qwen3.5-MoE vision model in f32, on the
checkpoint in tests/golden/tiny-hf. Made with Python 3.12, torch 2.11, transformers 5.24, Pillow 13.0, numpy.

usage: make_vision_goldens.py REPOSITORY [CHECKPOINT]

Writes
  pictures/*         the pictures (png, jpg, webp, gif, bmp)
  expected.json      per picture: source size, resized size, note of an animation; rows as numbers (see below)
  pixels.bin         per picture, the resized RGB bytes thinned: every 7th byte
  sizes.csv          1,000 random sizes: width,height,factor,min_pixels,max_pixels,to_width,to_height (0,0: refused)

Rows are stored as every row's values at 8 columns, and for every row its product with 4 fixed sign vectors, so that a
change of any value of any row shows. The sign of column c in vector v is the top bit of a 32-bit hash of (v, c).
"""

import io
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageOps, ImageFilter

COLUMNS = 8
VECTORS = 4
MAX_TOKENS, MIN_TOKENS = 64, 4


def sign(v, c):
    h = (v * 0x9E3779B1 + c * 0x85EBCA6B + 0x1234567) & 0xFFFFFFFF
    h ^= h >> 15
    h = (h * 0x2C1B3C6D) & 0xFFFFFFFF
    h ^= h >> 12
    h = (h * 0x297A2D39) & 0xFFFFFFFF
    return -1.0 if h >> 31 else 1.0


def scene(w, h, seed):
    """A picture with edges, a gradient and a little texture; compresses well."""
    rng = random.Random(seed)
    x, y = np.meshgrid(np.arange(w), np.arange(h))
    base = np.stack([x * 255 // max(1, w - 1), y * 255 // max(1, h - 1), (x + y) * 3 % 256], -1).astype(np.uint8)
    im = Image.fromarray(base // 16 * 16)
    d = ImageDraw.Draw(im)
    for _ in range(5):
        c = tuple(rng.randrange(256) for _ in range(3))
        x0, y0 = rng.randrange(w), rng.randrange(h)
        x1, y1 = x0 + rng.randrange(2, w + 2), y0 + rng.randrange(2, h + 2)
        d.ellipse([x0, y0, x1, y1], fill=c) if rng.random() < 0.5 else d.rectangle([x0, y0, x1, y1], fill=c)
    return im


def save(im, **kw):
    b = io.BytesIO()
    im.save(b, **kw)
    return b.getvalue()


def pictures():
    out = {}
    out["rgb.png"] = save(scene(100, 75, 1), format="PNG")
    out["large.png"] = save(scene(450, 300, 2), format="PNG", optimize=True)
    out["exact.png"] = save(scene(128, 96, 3), format="PNG")
    out["tiny-1x1.png"] = save(Image.new("RGB", (1, 1), (200, 30, 90)), format="PNG")
    out["thin.png"] = save(scene(200, 8, 4), format="PNG")
    rgba = scene(90, 60, 5).convert("RGBA")
    alpha = Image.fromarray((np.add.outer(np.arange(60) * 4, np.arange(90)) % 256).astype(np.uint8))
    rgba.putalpha(alpha)
    out["alpha.png"] = save(rgba, format="PNG")
    out["palette.png"] = save(scene(80, 64, 6).quantize(16), format="PNG")
    pal = scene(80, 64, 7).quantize(8)
    out["palette-transparent.png"] = save(pal, format="PNG", transparency=3)
    out["grey.png"] = save(scene(70, 90, 8).convert("L"), format="PNG")
    out["grey-alpha.png"] = save(scene(66, 50, 9).convert("LA"), format="PNG")
    grey16 = (np.add.outer(np.arange(48) * 997, np.arange(64) * 613) % 65536).astype(np.uint16)
    out["grey16.png"] = save(Image.fromarray(grey16), format="PNG")
    out["bilevel.png"] = save(scene(75, 75, 10).convert("1"), format="PNG")
    out["photo.jpg"] = save(scene(160, 120, 11).filter(ImageFilter.GaussianBlur(1)), format="JPEG", quality=90, subsampling=0)
    out["chroma.jpg"] = save(scene(120, 90, 12).filter(ImageFilter.GaussianBlur(2)), format="JPEG", quality=85)
    out["progressive.jpg"] = save(scene(96, 130, 13).convert("L"), format="JPEG", quality=90, progressive=True)
    out["cmyk.jpg"] = save(scene(96, 64, 14).convert("CMYK"), format="JPEG", quality=92)
    exif = Image.Exif()
    exif[0x0112] = 6
    out["turned.jpg"] = save(scene(110, 70, 15).convert("L"), format="JPEG", quality=92, exif=exif)
    exif[0x0112] = 5
    out["turned.png"] = save(scene(64, 40, 16), format="PNG", exif=exif)
    out["lossless.webp"] = save(scene(90, 110, 17), format="WEBP", lossless=True)
    out["lossy.webp"] = save(scene(100, 70, 18).filter(ImageFilter.GaussianBlur(1)), format="WEBP", quality=85)
    out["still.gif"] = save(scene(64, 64, 19).quantize(32), format="GIF")
    frames = [scene(60, 44, s).quantize(16) for s in (20, 21, 22)]
    out["moving.gif"] = save(frames[0], format="GIF", save_all=True, append_images=frames[1:], duration=100)
    frames = [scene(60, 44, s) for s in (23, 24)]
    out["moving.png"] = save(frames[0], format="PNG", save_all=True, append_images=frames[1:], duration=100)
    out["moving.webp"] = save(frames[0], format="WEBP", save_all=True, append_images=frames[1:], duration=100, lossless=True)
    out["rgb.bmp"] = save(scene(50, 40, 25).quantize(16), format="BMP")
    return out


def reference_rgb(data):
    """Decoded as strata promises: first frame, orientation applied, transparency over white, high byte of 16 bits."""
    im = Image.open(io.BytesIO(data))
    im.seek(0) if getattr(im, "n_frames", 1) > 1 else None
    im = ImageOps.exif_transpose(im)
    if im.mode.startswith("I"):
        im = Image.fromarray((np.asarray(im).astype(np.uint16) >> 8).astype(np.uint8))
    if im.mode in ("RGBA", "LA", "PA") or "transparency" in im.info:
        im = im.convert("RGBA")
        white = Image.new("RGB", im.size, (255, 255, 255))
        white.paste(im, mask=im.getchannel("A"))
        im = white
    return im.convert("RGB")


def main():
    repo = Path(sys.argv[1])
    checkpoint = sys.argv[2] if len(sys.argv) > 2 else str(repo / "tests/golden/tiny-hf")
    out = repo / "tests/golden/vision"
    (out / "pictures").mkdir(parents=True, exist_ok=True)
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize

    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    visual = model.model.visual.eval()
    cfg = visual.config
    factor = cfg.patch_size * cfg.spatial_merge_size
    pixels_of = lambda tokens: tokens * factor * factor
    processor = Qwen2VLImageProcessorPil.from_pretrained(
        checkpoint, size={"shortest_edge": pixels_of(MIN_TOKENS), "longest_edge": pixels_of(MAX_TOKENS)}
    )
    signs = torch.tensor([[sign(v, c) for c in range(cfg.out_hidden_size)] for v in range(VECTORS)], dtype=torch.float64)
    expected, thinned = [], bytearray()
    for name, data in pictures().items():
        (out / "pictures" / name).write_bytes(data)
        im = reference_rgb(data)
        with torch.no_grad():
            made = processor(images=[im], return_tensors="pt")
            t, gh, gw = made["image_grid_thw"][0].tolist()
            rows = visual(made["pixel_values"].float(), grid_thw=made["image_grid_thw"]).pooler_output
        h, w = smart_resize(im.height, im.width, factor, pixels_of(MIN_TOKENS), pixels_of(MAX_TOKENS))
        assert (gh * cfg.patch_size, gw * cfg.patch_size) == (h, w)
        resized = np.asarray(im.resize((w, h), Image.Resampling.BICUBIC))
        # The processor's own pixels, put back together, are Pillow's bytes.
        p = made["pixel_values"].reshape(gh // 2, gw // 2, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, 0]
        back = p.permute(0, 2, 5, 1, 3, 6, 4).reshape(h, w, 3)
        mean, std = torch.tensor(processor.image_mean), torch.tensor(processor.image_std)
        assert np.abs(((back * std + mean) * 255).numpy() - resized).max() < 1e-3, name
        thin = resized.reshape(-1)[::7].tobytes()
        thinned += thin
        width = rows.shape[1]
        columns = [(i * 37 + 5) % width for i in range(COLUMNS)]
        products = (rows.double() @ signs.T).float()
        number = lambda v: float("%.7g" % v)
        expected.append({
            "name": name,
            "source": [im.width, im.height],
            "size": [w, h],
            "animated": getattr(Image.open(io.BytesIO(data)), "n_frames", 1) > 1,
            "pixel_bytes": len(thin),
            "scale": number(rows.abs().max()),
            # At most 16 rows, evenly spread; the products of all rows are added up for the rest.
            "rows": list(range(0, rows.shape[0], max(1, rows.shape[0] // 16))),
            "values": [[number(rows[r, c]) for c in columns] for r in range(0, rows.shape[0], max(1, rows.shape[0] // 16))],
            "products": [[number(v) for v in products[r]] for r in range(rows.shape[0])],
        })
        print(f"{name:26} {im.width}x{im.height} -> {w}x{h}, {rows.shape[0]} rows, {len(data)} bytes")
    body = ",\n".join(json.dumps(e, separators=(",", ":")) for e in expected)
    (out / "expected.json").write_text("[\n" + body + "\n]\n")
    (out / "pixels.bin").write_bytes(thinned)

    rng = random.Random(7)
    lines = []
    for i in range(1000):
        kind = i % 4
        if kind == 0:
            w, h = rng.randrange(1, 5000), rng.randrange(1, 5000)
        elif kind == 1:
            w, h = rng.randrange(1, 100), rng.randrange(1, 20000)
        elif kind == 2:
            w, h = 16 * rng.randrange(1, 200), 16 * rng.randrange(1, 200)
        else:
            w, h = rng.randrange(1, 40), rng.randrange(1, 40)
        f = rng.choice([28, 32, 32, 32, 64])
        low = rng.choice([1, 4, 8, 64, 256]) * f * f
        high = max(low, rng.choice([16, 64, 300, 1024, 4096, 16384]) * f * f)
        try:
            to_h, to_w = smart_resize(h, w, f, low, high)
        except ValueError:
            to_h, to_w = 0, 0
        lines.append(f"{w},{h},{f},{low},{high},{to_w},{to_h}")
    (out / "sizes.csv").write_text("\n".join(lines) + "\n")


main()
