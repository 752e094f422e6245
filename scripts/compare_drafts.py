#!/usr/bin/env python3
"""Acceptance and speed of MTP drafts, strata against llama.cpp, on the same file and prompts.

    python3 scripts/compare_drafts.py --model tests/golden/tiny.gguf --llama-server PATH [--strata target/release/strata]
        [--depths 0,1,2,3,4] [--auto] [--tokens 64] [--threads 2] [--pairs 3] [--prompts FILE]

Starts one server of each kind per depth, one after the other, sends every prompt greedily and alone (`/v1/completions`), and prints per
depth: accepted / drafted, and tokens per second. Prompts
come from the committed goldens unless given (a JSON list of texts, or of objects with a `prompt`). Standard library only.
"""
import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def post(port, path, body):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as reply:
        return json.load(reply)


class Server:
    def __init__(self, command):
        self.port = free_port()
        self.process = subprocess.Popen(command + ["--port", str(self.port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"{command[0]} ended with {self.process.returncode}")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as reply:
                    if reply.status == 200:
                        return
            except OSError:
                pass
            time.sleep(0.1)
        sys.exit(f"{command[0]} did not become ready")

    def run(self, prompts, tokens):
        drafted = accepted = made = 0
        seconds = 0.0
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "cache_prompt": False}
            timings = post(self.port, "/v1/completions", body)["timings"]
            drafted += timings.get("draft_n", 0) or 0
            accepted += timings.get("draft_n_accepted", 0) or 0
            made += timings["predicted_n"]
            seconds += timings["predicted_ms"] / 1000
        return drafted, accepted, made / seconds

    def close(self):
        self.process.terminate()
        self.process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--strata", default="target/release/strata")
    parser.add_argument("--llama-server")
    parser.add_argument("--depths", default="0,1,2,3,4")
    parser.add_argument("--auto", action="store_true", help="measure strata's --mtp auto as well")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3, help="rounds over all prompts, interleaved")
    parser.add_argument("--prompts", default="tests/golden/llama_greedy.json")
    args = parser.parse_args()
    prompts = [p["prompt"] if isinstance(p, dict) else p for p in json.load(open(args.prompts, encoding="utf-8"))]

    def strata(mtp):
        return [args.strata, "serve", "-m", args.model, "-t", str(args.threads), "--parallel", "1", "--mtp", mtp, "--quiet", "--cache-ram", "0", "-c", "4096"]

    def llama(depth):
        command = [args.llama_server, "-m", args.model, "-t", str(args.threads), "-np", "1", "-c", "4096", "--no-webui"]
        return command + (["--spec-type", "draft-mtp", "--spec-draft-n-max", str(depth)] if depth else [])

    settings = [(d, str(d)) for d in map(int, args.depths.split(","))] + ([(None, "auto")] if args.auto else [])
    for depth, name in settings:
        servers = {"strata": Server(strata(name))}
        if args.llama_server and depth is not None:
            servers["llama.cpp"] = Server(llama(depth))
        runs = {side: [] for side in servers}
        for _ in range(args.pairs):
            for side, server in servers.items():
                runs[side].append(server.run(prompts, args.tokens))
        for side, server in servers.items():
            server.close()
            drafted, accepted, _ = runs[side][0]
            speeds = [run[2] for run in runs[side]]
            line = f"mtp {name:>4} {side:>9}: {statistics.median(speeds):8.1f} tok/s ({min(speeds):.1f} to {max(speeds):.1f})"
            if drafted:
                line += f", {accepted} of {drafted} accepted = {accepted / drafted:.1%}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
