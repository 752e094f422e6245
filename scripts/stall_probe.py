#!/usr/bin/env python3
"""What decoding slots see while a long prompt is read, or a picture encoded, beside them: the longest pause between two tokens.

    strata serve --port 8080 --parallel 4 --ctx-size 8192 --prefill 256 &
    python scripts/stall_probe.py http://127.0.0.1:8080 [--prompt-tokens 2500] [--streams 2]
    python scripts/stall_probe.py http://127.0.0.1:8080 --picture photo.jpg

Starts streams, lets them run, then sends one long prompt or picture beside them. The bound is one chunk's time plus one window:
the longest chunk is the one the server reports for that request, the window is the longest pause while nothing was read.
Pauses are told twice: as the clients saw them, and as the server measured them (its `strata:longest_pause_seconds`, which
counts from its start: use a fresh server). Ends with 1 if a pause went past the bound. Only the standard library is used.
"""
import argparse
import base64
import json
import sys
import threading
import time
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080")
parser.add_argument("--prompt-tokens", type=int, default=2500)
parser.add_argument("--picture", help="send this picture instead of a long prompt")
parser.add_argument("--streams", type=int, default=2)
parser.add_argument("--json", action="store_true")
args = parser.parse_args()


def post(path, body, stream=False):
    request = urllib.request.Request(args.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    reply = urllib.request.urlopen(request, timeout=600)
    return reply if stream else json.load(reply)


def longest_pause_of_server():
    text = urllib.request.urlopen(args.url + "/metrics", timeout=60).read().decode()
    return next(float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                if line.startswith("strata:longest_pause_seconds"))


stop = threading.Event()
times = [[] for _ in range(args.streams)]


def decode(index):
    body = {"prompt": [100 + index, 200, 300], "max_tokens": 100000, "ignore_eos": True, "stream": True,
            "temperature": 1, "seed": index, "logprobs": 0}
    # A small context fills up: then the stream starts anew, and what lies between two streams is no pause.
    while not stop.is_set():
        times[index].append(None)
        with post("/v1/completions", body, stream=True) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    times[index].append(time.monotonic())
                if stop.is_set():
                    return


def longest(low, high):
    # A pause that begins or ends inside the span counts whole.
    return max((b - a for t in times for a, b in zip(t, t[1:]) if a and b and b > low and a < high), default=0.0)


if args.picture:
    with open(args.picture, "rb") as file:
        url = "data:image/any;base64," + base64.b64encode(file.read()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": content}]}
else:
    prompt = [(7 * i) % 1000 + 100 for i in range(args.prompt_tokens)]
    path, body = "/v1/completions", {"prompt": prompt}
body.update(max_tokens=1, cache_prompt=False, temperature=0)

threads = [threading.Thread(target=decode, args=(i,), daemon=True) for i in range(args.streams)]
for thread in threads:
    thread.start()
while not all(len(t) > 10 for t in times):
    time.sleep(0.05)
settled = time.monotonic()
time.sleep(3)
server_before = longest_pause_of_server()
begin = time.monotonic()
reply = post(path, body)
end = time.monotonic()
time.sleep(0.3)
server_after = longest_pause_of_server()
stop.set()

timings = reply["timings"]
chunk, window = timings["longest_chunk_ms"] / 1e3, longest(settled, begin)
during = longest(begin, end)
# The server's number only tells the longest since its start: unchanged means no longer than before.
server = server_after if server_after > server_before else min(server_before, during)
result = {"streams": args.streams, "rows": timings["prompt_n"], "took_s": end - begin, "reading_s": timings["prompt_ms"] / 1e3,
          "longest_window_before_s": window, "longest_chunk_s": chunk, "bound_s": chunk + window,
          "longest_pause_s": during, "longest_pause_server_s": server, "within": server <= chunk + window}
if args.json:
    print(json.dumps(result))
else:
    what = args.picture or "a long prompt"
    print(f"{args.streams} streams; {what}: {timings['prompt_n']} rows, {end - begin:.2f} s in all, {result['reading_s']:.2f} s reading")
    print(f"bound: longest chunk {chunk * 1e3:.0f} ms + longest window {window * 1e3:.0f} ms = {result['bound_s'] * 1e3:.0f} ms")
    print(f"longest pause: {server * 1e3:.0f} ms in the server, {during * 1e3:.0f} ms at the clients: "
          f"{'within the bound' if result['within'] else 'PAST THE BOUND'}")
sys.exit(0 if result["within"] else 1)
