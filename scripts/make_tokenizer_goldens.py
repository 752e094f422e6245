#!/usr/bin/env python3
"""Makes tests/golden/text/tokenizer.json: token ids of a corpus of awkward texts.

    python make_tokenizer_goldens.py HF_FOLDER GGUF LLAMA_SERVER OUT

The ids come from the `tokenizers` library (0.23.3 was used) on the folder's tokenizer.json. `as_text` has the special
tokens taken out of the library's tokenizer, so that their spelling is text. Ids of llama.cpp's server (b11434 was used)
are recorded where they differ: it does not bring text to NFC.
"""
import json
import subprocess
import sys
import time
import unicodedata
import urllib.request

from tokenizers import Tokenizer

folder, gguf, server, out = sys.argv[1:]
full = json.load(open(f"{folder}/tokenizer.json"))
specials = [t["content"] for t in full["added_tokens"]]
parse = Tokenizer.from_str(json.dumps(full))
as_text = Tokenizer.from_str(json.dumps(full | {"added_tokens": []}))

nfc_sources = ["Å ê ñ ü é", "한국어 조선말", "क़ ख़ ज़", "ἄλφα", "ﷺ ﬁ ① Ⅷ", "Ṩ ẛ̣", "x́̂y"]
corpus = [
    "", "Hello, world!", "The quick brown fox jumps over the lazy dog.", "it's we're I'LL they've DON'T o'clock ''s",
    # combining marks
    "हिन्दी में लिखा हुआ पाठ, जिसमें मात्राएँ हैं।", "क्षत्रिय ज्ञानी श्रीमान्", "ภาษาไทยไม่มีช่องว่างระหว่างคำ น้ำ ก็", "เด็กๆ กำลังเล่นอยู่",
    "اَلْعَرَبِيَّةُ لُغَةٌ جَمِيلَةٌ", "مرحبا بالعالم ـــ ١٢٣", "תּוֹרָה שָׁלוֹם", "ெதமிழ் எழுத்து", "မြန်မာစာ", "ខ្មែរ", "བོད་སྐད་", "e\u0301\u0301\u0301 \u0301leading",
    # scripts without blanks
    "你好，世界！今天天气怎么样？", "日本語のテキストとカタカナ。１２３", "한국어 텍스트입니다", "中文english混合123文本", "ᠮᠣᠩᠭᠣᠯ", "𠜎𠜱𝒜𝓫",
    # emoji
    "👨‍👩‍👧‍👦 family 👩🏽‍💻 ❤️‍🔥 🏳️‍🌈", "🇩🇪🇫🇷🇯🇵", "😀😃😄😁", "1️⃣2️⃣ ™️ ©", "a😀b 😀 c",
    # line ends and blanks
    "one\r\ntwo\r\n\r\nthree\rfour\n", "\n\n\n", "\r\n\r\n", " ", "  ", "   x", "x   ", "a  b   c    d", "\t\ttabs\t and  blanks \t\n  next", "trail \n", " \n \n x", "a\u00a0b\u3000c\u2003d\u200be\u0085f\u2028g",
    "    if x:\n        return  y  # comment\n\n\n    else:\n", " " * 300 + "x", "\n" * 70 + " \n" * 20, "x" + " " * 65 + "\n",
    # digits
    "0 1 12 123 1234 12345678901234567890", "3.14159e-10 0x1F 1_000_000 ½ ² Ⅷ ٣ ३", "2026-11-30T06:16:00Z", "v1.2.3-rc4",
    # code
    "fn main() {\n    println!(\"{}\", vec![1, 2, 3].iter().map(|x| x * 2).sum::<i32>());\n}\n", "def f(x: int) -> str:\n\treturn f'{x!r:>10}'\n",
    "<div class=\"a\">&amp;</div>", "SELECT * FROM t WHERE a='b' AND c<>'d';", "{\"a\": [1, 2.5, null, true], \"b\": \"\\u00e9\\n\"}", "#include <stdio.h>\n/* ... */ //!!!", "a+=b;c->d;e<=f;g!=h;i&&j||k",
    "____----====....,,,,;;;;::::", "`~!@#$%^&*()-_=+[{]}\\|;:'\",<.>/?", "https://example.org/a/b?c=d&e=f#g", "user.name+tag@example.com",
    # controls and oddities
    "\u0000\u0001\u007f\u0080", "\ufeffBOM", "\ufffd\ufffe", "a\u200db\u200cc", "soft\u00adhyphen", "ſ 's 'ſ ß ẞ İı",
    "\ue000\U00100000 private", "z" * 500, "ab" * 300, "é" * 200,
    # special tokens in text
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", "<|im_start|><|im_start|>", "<|im_start <|im_end| <|endoftext>", "a<|endoftext|>b", "<|endoftext|><|endoftext|> <|endoftext|>\n",
    "<tool_call>\n<function=f>\n</function>\n</tool_call>", "<<|im_end|>>", "e\u0301<|im_end|>e\u0301",
] + [f"before{s}after {s}\n{s}" for s in specials] + [unicodedata.normalize(f, s) for s in nfc_sources for f in ("NFC", "NFD", "NFKD")]

proc = subprocess.Popen([server, "-m", gguf, "--port", "18931", "-c", "512", "-t", "1", "--no-warmup"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def llama(text, special):
    body = json.dumps({"content": text, "add_special": False, "parse_special": special}).encode()
    request = urllib.request.Request("http://127.0.0.1:18931/tokenize", body, {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=20))["tokens"]


try:
    for _ in range(100):
        try:
            llama("x", True)
            break
        except OSError:
            time.sleep(0.3)
    rows = []
    differ = 0
    for text in corpus:
        row = {"text": text, "parse": parse.encode(text, add_special_tokens=False).ids}
        text_ids = as_text.encode(text, add_special_tokens=False).ids
        if text_ids != row["parse"]:
            row["as_text"] = text_ids
        if "\0" not in text and (ids := llama(text, True)) != row["parse"]:
            row["llama_cpp"] = ids
            differ += 1
        rows.append(row)
finally:
    proc.terminate()
with open(out, "w") as file:
    file.write("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")
print(len(rows), "texts,", differ, "with other ids in llama.cpp")
