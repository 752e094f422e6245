#!/usr/bin/env python3
"""Makes tests/golden/vision/prompts: pictures with questions, and what llama.cpp answers on the tiny model.

For every case llama-server (llama.cpp b11434, CPU, f32 model, f32 cache) continues the prompt greedily; stored are the
token ids and, per generated token, the most likely tokens with their log-probabilities. The same is run with other
batch sizes and with flash attention; the largest mean KL divergence between two of its runs is stored as its floor.

usage: make_picture_prompt_goldens.py REPOSITORY LLAMA_SERVER TINY_F32.gguf MMPROJ_F32.gguf FONT.ttf
Needs Pillow 13.
"""

import base64
import io
import json
import math
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

TOP, TOKENS, PORT = 24, 12, 18431
repo, server, model, mmproj, font = sys.argv[1:6]
out = Path(repo) / "tests/golden/vision/prompts"
out.mkdir(parents=True, exist_ok=True)


def canvas(w, h, colour):
    im = Image.new("RGB", (w, h), colour)
    return im, ImageDraw.Draw(im)


def circle():
    im, d = canvas(128, 96, (240, 240, 240))
    d.ellipse([34, 18, 94, 78], fill=(210, 30, 30))
    return im


def square():
    im, d = canvas(160, 128, (250, 250, 250))
    d.rectangle([45, 29, 115, 99], fill=(40, 70, 210))
    return im


def triangle():
    im, d = canvas(128, 128, (255, 255, 255))
    d.polygon([(64, 20), (20, 104), (108, 104)], fill=(30, 150, 50))
    return im


def text(words, w, h, size):
    im, d = canvas(w, h, (255, 255, 255))
    d.text((12, (h - size) // 2 - 4), words, font=ImageFont.truetype(font, size), fill=(10, 10, 10))
    return im


def large():
    im, d = canvas(1056, 1024, (230, 230, 120))
    d.ellipse([100, 120, 500, 520], fill=(210, 30, 30))
    d.rectangle([560, 540, 960, 940], fill=(40, 70, 210))
    return im


pictures = {
    "circle.png": circle(), "square.png": square(), "triangle.png": triangle(),
    "word.png": text("HELLO", 192, 96, 44), "number.png": text("42", 128, 96, 52), "large.png": large(),
}
cases = [
    (["circle.png"], "What shape is in the picture?"),
    (["square.png"], "What is in the picture?"),
    (["triangle.png"], "What color is the triangle?"),
    (["word.png"], "What does the text say?"),
    (["number.png"], "What number is in the picture?"),
    (["circle.png", "triangle.png"], "What do you see?"),
    (["large.png"], "Describe the picture."),
]
data = {}
for name, im in pictures.items():
    b = io.BytesIO()
    im.quantize(32).save(b, format="PNG", optimize=True)
    data[name] = b.getvalue()
    (out / name).write_bytes(data[name])


def ask(names, question, marker):
    prompt = "<|im_start|>user\n" + marker * len(names) + question + "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    body = {
        "prompt": {"prompt_string": prompt, "multimodal_data": [base64.b64encode(data[n]).decode() for n in names]},
        "n_predict": TOKENS, "temperature": 0, "n_probs": TOP, "return_tokens": True, "cache_prompt": False,
        "ignore_eos": False, "samplers": ["temperature"],
    }
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        return json.load(urllib.request.urlopen(request, timeout=600))
    except urllib.error.HTTPError as e:
        sys.exit(e.read().decode())


def run(extra):
    process = subprocess.Popen(
        [server, "-m", model, "--mmproj", mmproj, "--port", str(PORT), "-t", "2", "-c", "4096", "-np", "1",
         "-ctk", "f32", "-ctv", "f32", "--no-warmup", *extra],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=2)
                break
            except OSError:
                time.sleep(1)
        props = json.load(urllib.request.urlopen(f"http://127.0.0.1:{PORT}/props"))
        marker = props.get("media_marker", "<__media__>")
        answers = []
        for names, question in cases:
            got = ask(names, question, marker)
            steps = [
                {"id": p["id"], "top": [[t["id"], t["logprob"]] for t in p["top_logprobs"]]}
                for p in got["completion_probabilities"]
            ]
            answers.append({"steps": steps, "text": got["content"], "prompt_rows": got["tokens_evaluated"]})
            print(extra, names, repr(got["content"]), got["tokens_evaluated"], flush=True)
        return answers
    finally:
        process.terminate()
        process.wait()


def divergence(a, b):
    """KL over the tokens both list, and the rest as one."""
    b = dict(b)
    listed = [(math.exp(lp), math.exp(b[i])) for i, lp in a if i in b]
    kl = sum(p * math.log(p / q) for p, q in listed)
    p, q = max(1e-12, 1 - sum(x for x, _ in listed)), max(1e-12, 1 - sum(x for _, x in listed))
    return kl + p * math.log(p / q)


reference = run(["-ub", "512", "-fa", "off"])
floor = 0.0
for extra in (["-ub", "16", "-b", "16", "-fa", "off"], ["-ub", "512", "-fa", "on"]):
    other = run(extra)
    for a, b in zip(reference, other):
        kls = []
        for s, t in zip(a["steps"], b["steps"]):
            kls.append(divergence(s["top"], t["top"]))
            if s["id"] != t["id"]:
                break
        mean = sum(kls) / len(kls)
        print(extra, "mean KL", mean)
        floor = max(floor, mean)

number = lambda v: float("%.7g" % v)
lines = []
for (names, question), a in zip(cases, reference):
    lines.append(json.dumps({
        "pictures": names, "question": question, "prompt_rows": a["prompt_rows"], "text": a["text"],
        "ids": [s["id"] for s in a["steps"]],
        "top": [[[i, number(lp)] for i, lp in s["top"]] for s in a["steps"]],
    }, separators=(",", ":"), ensure_ascii=False))
(out / "llama_cpp.json").write_text('{"floor":%.3e,"cases":[\n%s\n]}\n' % (floor, ",\n".join(lines)))
print("floor", floor)
