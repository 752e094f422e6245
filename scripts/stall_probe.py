#!/usr/bin/env python3
"""What decoding slots see while a long prompt is read: the longest pause between two tokens.

    strata serve --port 8080 --parallel 4 --ctx-size 8192 --prefill 256 &
    python scripts/stall_probe.py http://127.0.0.1:8080 [--prompt-tokens 2500] [--streams 2]

Starts streams, lets them run, then sends one long prompt beside them. Prints the longest pause before and during the
reading, and from the server's timings what one chunk and one window take. Only the standard library is used.
"""
import argparse
import json
import threading
import time
import urllib.request

parser = argparse.ArgumentParser()
parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080")
parser.add_argument("--prompt-tokens", type=int, default=2500)
parser.add_argument("--streams", type=int, default=2)
parser.add_argument("--prefill", type=int, default=256, help="the server's --prefill, for the expected bound")
parser.add_argument("--json", action="store_true")
args = parser.parse_args()


def post(body, stream=False):
    request = urllib.request.Request(f"{args.url}/v1/completions", json.dumps(body).encode(),
                                     {"content-type": "application/json"})
    reply = urllib.request.urlopen(request, timeout=600)
    return reply if stream else json.load(reply)


stop = threading.Event()
times = [[] for _ in range(args.streams)]


def decode(index):
    body = {"prompt": [100 + index, 200, 300], "max_tokens": 100000, "ignore_eos": True, "stream": True,
            "temperature": 1, "seed": index, "logprobs": 0}
    with post(body, stream=True) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                times[index].append(time.monotonic())
            if stop.is_set():
                return


threads = [threading.Thread(target=decode, args=(i,), daemon=True) for i in range(args.streams)]
for thread in threads:
    thread.start()
while not all(len(t) > 10 for t in times):
    time.sleep(0.05)
time.sleep(2)
begin = time.monotonic()
prompt = [(7 * i) % 1000 + 100 for i in range(args.prompt_tokens)]
reply = post({"prompt": prompt, "max_tokens": 1, "cache_prompt": False, "temperature": 0})
end = time.monotonic()
time.sleep(0.3)
stop.set()


def longest(low, high):
    # A pause that begins or ends inside the span counts whole.
    return max((b - a for t in times for a, b in zip(t, t[1:]) if b > low and a < high), default=0.0)


alone = post({"prompt": prompt, "max_tokens": 1, "cache_prompt": False, "temperature": 0})
chunk = alone["timings"]["prompt_ms"] / 1e3 * args.prefill / args.prompt_tokens
before, during = longest(0, begin - 0.2), longest(begin, end)
result = {"streams": args.streams, "prompt_tokens": args.prompt_tokens, "read_s": end - begin,
          "read_alone_s": alone["timings"]["prompt_ms"] / 1e3, "longest_pause_before_s": before,
          "longest_pause_during_s": during, "mean_chunk_s": chunk,
          "within_chunk_plus_window": during <= chunk * 1.5 + before}
if args.json:
    print(json.dumps(result))
else:
    print(f"{args.streams} streams, a prompt of {args.prompt_tokens} tokens read in {end - begin:.2f} s "
          f"({result['read_alone_s']:.2f} s alone)")
    print(f"longest pause before {before * 1e3:.0f} ms, during the reading {during * 1e3:.0f} ms; "
          f"a chunk of {args.prefill} takes {chunk * 1e3:.0f} ms on average")
