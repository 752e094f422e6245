#!/usr/bin/env python3
"""Acceptance and speed of MTP drafts, strata against itself without drafts and against llama.cpp, on the same file and prompts.

    python3 scripts/compare_drafts.py --model tests/golden/tiny.gguf [--llama-server PATH] [--strata target/release/strata]
        [--depths 0,1,2,3,4] [--auto] [--tokens 64] [--threads 2] [--rounds 3] [--prompts FILE] [--chat] [--ignore-eos]

Every prompt is sent greedily with one setting after the other, in turn, so that whatever else the machine does hits all alike. strata is
one server that gets the depth with each request (two processes of the same build can differ by a third on a shared machine); llama.cpp
takes its depth at the start, so there it is one server per depth. Prints per setting accepted / drafted, tokens per second, and the time
against the same side's own without drafts on the same prompt in the same round (whole, median and quartiles of those ratios). Prompts come from the committed
goldens unless given (a JSON list of texts, or of objects with a `prompt`); `--chat` sends them as user messages, for which
`scripts/draft_prompts.json` holds the kind of question the tiny model was trained on. Standard library only.
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

    def run(self, prompt, tokens, chat, extra):
        body = {**extra, "max_tokens": tokens, "temperature": 0, "cache_prompt": False}
        if chat:
            body |= {"messages": [{"role": "user", "content": prompt}], "chat_template_kwargs": {"enable_thinking": False}}
        else:
            body |= {"prompt": prompt}
        return post(self.port, "/v1/chat/completions" if chat else "/v1/completions", body)["timings"]

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
    parser.add_argument("--rounds", type=int, default=3, help="rounds over all prompts")
    parser.add_argument("--chat", action="store_true", help="send the prompts as user messages")
    parser.add_argument("--prompts", default="tests/golden/llama_greedy.json")
    parser.add_argument("--ignore-eos", action="store_true", help="write on to --tokens: acceptance without the drafts past an answer's end, which llama.cpp counts")
    args = parser.parse_args()
    prompts = [p["prompt"] if isinstance(p, dict) else p for p in json.load(open(args.prompts, encoding="utf-8"))]

    command = [args.strata, "serve", "-m", args.model, "-t", str(args.threads), "--parallel", "1", "--mtp", "auto", "--quiet", "--cache-ram", "0", "-c", "4096"]

    def llama(depth):
        command = [args.llama_server, "-m", args.model, "-t", str(args.threads), "-np", "1", "-c", "4096", "--no-webui"]
        return command + (["--spec-type", "draft-mtp", "--spec-draft-n-max", str(depth)] if depth else [])

    names = args.depths.split(",") + (["auto"] if args.auto else [])
    strata = Server(command)
    servers = {("strata", name): strata for name in names}
    if args.llama_server:
        servers |= {("llama.cpp", name): Server(llama(int(name))) for name in names if name != "auto"}
    runs = {key: [] for key in servers}
    extra = {key: {"ignore_eos": True} if args.ignore_eos else {} for key in servers}
    for side, name in servers:
        if side == "strata" and name != "auto":
            extra[side, name]["mtp"] = int(name)
    try:
        for turn in range(args.rounds + 1):
            for number, prompt in enumerate(prompts):
                order = list(servers)
                shift = (turn + number) % len(order)
                for key in order[shift:] + order[:shift]:
                    if args.llama_server:
                        # Threads that still poll after the last answer would take the next one's cores.
                        time.sleep(0.1)
                    timings = servers[key].run(prompt, args.tokens, args.chat, extra[key])
                    # The first round warms up: caches, page faults, and what `auto` learns.
                    if turn > 0:
                        runs[key].append(timings)
    finally:
        for server in set(servers.values()):
            server.close()
    for (side, name), timings in runs.items():
        seconds = [t["predicted_ms"] / 1000 for t in timings]
        made = [t["predicted_n"] for t in timings]
        line = f"{side:>9} mtp {name:>4}: {sum(made) / sum(seconds):8.1f} tok/s"
        drafted = sum(t.get("draft_n", 0) or 0 for t in timings)
        if drafted:
            accepted = sum(t.get("draft_n_accepted", 0) or 0 for t in timings)
            line += f", {accepted} of {drafted} accepted = {accepted / drafted:.1%}"
        plain = runs.get((side, "0"))
        if plain and name != "0":
            per_token = [t["predicted_ms"] / t["predicted_n"] for t in timings]
            base = [t["predicted_ms"] / t["predicted_n"] for t in plain]
            low, middle, high = statistics.quantiles([b / t for b, t in zip(base, per_token)], n=4)
            whole = sum(t["predicted_ms"] for t in plain) / sum(t["predicted_ms"] for t in timings) * sum(made) / sum(t["predicted_n"] for t in plain)
            line += f"; {whole:.3f} x without drafts, by prompt {middle:.3f} ({low:.3f} to {high:.3f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
