#!/usr/bin/env python3
"""Writes tests/golden/reference_f32.safetensors: log-probabilities of the tiny model from transformers in f32.

The trunk is `Qwen3_5MoeForConditionalGeneration` on tests/golden/tiny-hf; the MTP head is transformers' own decoder layer with the
checkpoint's `mtp.*` tensors, fed (token of position t, post-norm hidden of t-1; zeros at t = 0) at t's own position.

Made with Python 3.12, torch 2.11.0 (CPU), transformers 5.24.0, safetensors 0.8:
    python3 scripts/make_reference_logits.py
Tensors: lengths [S] i32; tokens [P] i32 (sequences one after the other); trunk_ids / trunk_logprobs [P, 16];
mtp_ids / mtp_logprobs [P, 8]. The first half of each id row is the top of the distribution, the rest are pseudo-random ids.
"""
import json, pathlib
import numpy as np, torch
from safetensors.torch import load_file
from safetensors.numpy import save_file
from transformers import AutoTokenizer, Qwen3_5MoeForConditionalGeneration
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm

ROOT = pathlib.Path(__file__).resolve().parent.parent
HF = ROOT / "tests/golden/tiny-hf"
torch.manual_seed(0); torch.set_grad_enabled(False)
tok = AutoTokenizer.from_pretrained(HF)
model = Qwen3_5MoeForConditionalGeneration.from_pretrained(HF, dtype=torch.float32, attn_implementation="eager").eval()
text_cfg = model.config.text_config


def chat(user, answer):
    return f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n{answer}<|im_end|>\n"


story = ("Once upon a time there was a bright cow who lived near the barn. Noah kept a white knife in the barn. Bob was quiet that morning. "
         "Bob asked, \"Where did you get that knife?\" The cow fell asleep in the castle. They shared the potato and laughed. ")
texts = [
    chat("Tell me a story about a cow and a knife.", story),
    chat("Write a Python function that removes duplicates from a list.",
         "```python\ndef unique(items):\n    seen = []\n    for item in items:\n        if item not in seen:\n            seen.append(item)\n    return seen\n```"),
    chat("What is 67 + 18?", "67 + 18 = 85") + chat("And 12 * 3?", "12 * 3 = 36"),
    "import os\nimport sys\n\ndef main(argv):\n    for path in argv[1:]:\n        print(os.path.abspath(path), 0x1F, 3.14)\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich — naïve café, 你好，世界 🙂🇩🇪 नमस्ते.",
    "".join(story.replace("cow", animal) for animal in ("cow", "owl", "dog", "snake", "horse")),
    "a", "\n\n  \t x", "<|im_start|>system\nYou are terse.<|im_end|>\n" + chat("Hi", "Hello."),
]
rng = np.random.default_rng(7)
sequences = [tok(t, add_special_tokens=False)["input_ids"] for t in texts]
sequences.append(rng.integers(0, 6000, 200).tolist())  # not text at all: every embedding row and expert gets its turn

raw = {}
for part in sorted(HF.glob("*.safetensors")):
    raw |= {k: v.float() for k, v in load_file(part).items() if k.startswith("mtp.")}
head_cfg = type(text_cfg).from_dict(text_cfg.to_dict() | {"num_hidden_layers": 1, "layer_types": ["full_attention"]})
head_cfg._attn_implementation = "eager"
layer = Qwen3_5MoeDecoderLayer(head_cfg, 0).eval()
layer.load_state_dict({k[len("mtp.layers.0."):]: v for k, v in raw.items() if k.startswith("mtp.layers.0.")})


def norm(name):
    n = Qwen3_5MoeRMSNorm(text_cfg.hidden_size, eps=text_cfg.rms_norm_eps)
    n.load_state_dict({"weight": raw[name]})
    return n


enorm, hnorm, final = norm("mtp.pre_fc_norm_embedding.weight"), norm("mtp.pre_fc_norm_hidden.weight"), norm("mtp.norm.weight")
out = {k: [] for k in ("trunk_ids", "trunk_logprobs", "mtp_ids", "mtp_logprobs")}


def keep(kind, logits, width):
    lp = torch.log_softmax(logits.double(), -1).numpy()
    top = np.argsort(-lp, -1, kind="stable")[:, : width // 2]
    ids = np.concatenate([top, rng.integers(0, lp.shape[1], (len(lp), width // 2))], 1).astype(np.int32)
    out[kind + "_ids"].append(ids)
    out[kind + "_logprobs"].append(np.take_along_axis(lp, ids, 1).astype(np.float32))


for ids in sequences:
    x = torch.tensor([ids])
    h = model.model(input_ids=x).last_hidden_state
    keep("trunk", model.lm_head(h)[0], 16)
    e = model.model.language_model.embed_tokens(x)
    prev = torch.cat([torch.zeros_like(h[:, :1]), h[:, :-1]], 1)
    y = torch.cat([enorm(e), hnorm(prev)], -1) @ raw["mtp.fc.weight"].T
    pos = torch.arange(len(ids))[None]
    rope = model.model.language_model.rotary_emb(y, pos[None].expand(3, 1, -1))
    mask = torch.full((len(ids), len(ids)), float("-inf")).triu(1)[None, None]
    y = final(layer(y, position_embeddings=rope, attention_mask=mask, position_ids=pos))
    keep("mtp", model.lm_head(y)[0], 8)
tensors = {k: np.concatenate(v) for k, v in out.items()}
tensors["lengths"] = np.array([len(s) for s in sequences], np.int32)
tensors["tokens"] = np.concatenate([np.array(s, np.int32) for s in sequences])
save_file(tensors, ROOT / "tests/golden/reference_f32.safetensors")
print({k: v.shape for k, v in tensors.items()}, (ROOT / "tests/golden/reference_f32.safetensors").stat().st_size)
