#!/usr/bin/env python3
"""Mixed random load on a strata server: every answer must equal its solo answer, memory must stay flat.

    strata serve --port 8080 --parallel 8 --ctx-size 4096 --cache-ram 64 --quiet &
    python scripts/soak_server.py http://127.0.0.1:8080 --minutes 30 --clients 12

A pool of requests (chats with and without thinking, completions, seeds, stop strings, penalties, JSON schemas, tools, long
prompts, several turns) is answered one by one first, without drafts and without held state. Then clients send random
ones of them at once, streamed or not, through all dialects that fit; some hang up in the middle, some send nonsense.
Only the standard library is used.
"""
import argparse
import http.client
import json
import random
import sys
import threading
import time
import urllib.parse

parser = argparse.ArgumentParser()
parser.add_argument("url", nargs="?", default="http://127.0.0.1:8080")
parser.add_argument("--minutes", type=float, default=30)
parser.add_argument("--clients", type=int, default=12)
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--growth-mib", type=float, default=8, help="growth of memory after warming up that is allowed (or 2 %%)")
parser.add_argument("--json", action="store_true")
args = parser.parse_args()
where = urllib.parse.urlparse(args.url)


def connect():
    return http.client.HTTPConnection(where.hostname, where.port, timeout=300)


def send(path, body):
    connection = connect()
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, data, {"content-type": "application/json"})
    return connection, connection.getresponse()


def ask(path, body):
    connection, reply = send(path, body)
    data = reply.read()
    connection.close()
    return reply.status, json.loads(data)


def pick(reply):
    """What must be equal: the whole of the first choice."""
    choice = reply["choices"][0]
    if "text" in choice:
        return choice["text"], "", "[]", choice["finish_reason"]
    message = choice["message"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or []]
    return message["content"] or "", message.get("reasoning_content", ""), json.dumps(calls), choice["finish_reason"]


def ask_streamed(path, body, leave_after=None):
    connection, reply = send(path, {**body, "stream": True})
    if reply.status != 200:
        data = json.loads(reply.read())
        connection.close()
        return reply.status, data
    text, thought, calls, reason = "", "", [], None
    for count, line in enumerate(reply):
        if leave_after is not None and count > leave_after:
            connection.close()
            return 200, None
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            connection.close()
            return 500, event
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            if "text" in choice:
                text += choice["text"]
                continue
            delta = choice["delta"]
            text += delta.get("content") or ""
            thought += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"].get("arguments", "")
    connection.close()
    return 200, (text, thought, json.dumps([tuple(c) for c in calls]), reason)


WORDS = ("the fox river stone old house green light winter bread song road friend night window story garden small "
         "Katze Straße naïve 東京 emoji 🦊 function return import list print number error value").split()


def make_pool(rng):
    def words(n):
        return " ".join(rng.choice(WORDS) for _ in range(n))

    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 10}, "n": {"type": "integer"}},
              "required": ["name", "n"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {
        "type": "object", "properties": {"word": {"type": "string", "maxLength": 20}}, "required": ["word"]}}}
    pool = []
    for i in range(48):
        kind = i % 8
        turns = [{"role": "system", "content": words(6)}] if i % 3 else []
        turns.append({"role": "user", "content": words(rng.randint(3, 40))})
        if i % 4 == 1:
            turns += [{"role": "assistant", "content": words(20)}, {"role": "user", "content": words(8)}]
        body = {"messages": turns, "max_tokens": rng.randint(8, 60), "seed": i, "enable_thinking": i % 2 == 0}
        if kind == 0:
            body["temperature"] = 0
        elif kind == 1:
            body.update(temperature=0.9, top_k=40, min_p=0.02)
        elif kind == 2:
            body.update(temperature=1.1, repeat_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)
        elif kind == 3:
            body.update(temperature=0.7, stop=["e", "the "][: 1 + i % 2])
        elif kind == 4:
            body.update(temperature=0.8, max_tokens=120,
                        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
        elif kind == 5:
            body.update(temperature=0.8, tools=[tool], tool_choice=["auto", "required"][i // 8 % 2], max_tokens=100)
        elif kind == 6:
            body.update(temperature=1.0, logit_bias={"100": 2, "200": -5}, ignore_eos=True)
        else:
            pool.append(("/v1/completions", {"prompt": words(rng.choice([5, 50, 600])), "temperature": 0.8, "seed": i,
                                             "max_tokens": rng.randint(4, 40)}))
            continue
        pool.append(("/v1/chat/completions", body))
    return pool


BAD = [("/v1/chat/completions", b"{"), ("/v1/chat/completions", {"messages": []}),
       ("/v1/chat/completions", {"messages": [{"role": "user", "content": 3}]}),
       ("/v1/completions", {"prompt": "x", "temperature": -1}), ("/v1/completions", {"prompt": [[]]}),
       ("/v1/messages", {"messages": [{"role": "user", "content": "x"}]}), ("/v1/nothing", {}),
       ("/v1/completions", {"prompt": [1] * 200000})]


def metrics():
    connection = connect()
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if not line.startswith("#")}


def memory_mib():
    """Memory of the process less the evicted states it keeps on purpose (--cache-ram)."""
    now = metrics()
    return now["process_resident_memory_bytes"] / 2**20, now["strata:cache_ram_bytes"] / 2**20


rng = random.Random(args.seed)
pool = make_pool(rng)
solo = []
for path, body in pool:
    status, reply = ask(path, {**body, "cache_prompt": False, "speculative": False})
    assert status == 200, (status, reply, body)
    solo.append(pick(reply))
print(f"{len(pool)} solo answers", file=sys.stderr)

class Problems(list):
    def append(self, text):
        print(text[:2000], file=sys.stderr)
        super().append(text)


lock = threading.Lock()
counts = {"answers": 0, "equal": 0, "left": 0, "bad": 0, "busy": 0}
problems = Problems()
deadline = time.monotonic() + args.minutes * 60


def client(number):
    rng = random.Random(args.seed * 1000 + number)
    while time.monotonic() < deadline and len(problems) < 20:
        dice = rng.random()
        try:
            if dice < 0.06:
                path, body = rng.choice(BAD)
                connection, reply = send(path, body)
                reply.read()
                connection.close()
                with lock:
                    counts["bad"] += 1
                    if not 400 <= reply.status < 500:
                        problems.append(f"bad request to {path} gave {reply.status}")
                continue
            index = rng.randrange(len(pool))
            path, body = pool[index]
            if dice < 0.16:
                leave = rng.choice([0, 1, 5, 20])
                if leave == 0:
                    connection = connect()
                    connection.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
                    time.sleep(rng.random() * 0.2)
                    connection.close()
                else:
                    ask_streamed(path, body, leave)
                with lock:
                    counts["left"] += 1
                continue
            body = {**body, "cache_prompt": rng.random() < 0.9, "speculative": rng.random() < 0.8}
            if rng.random() < 0.5:
                status, got = ask_streamed(path, body)
            else:
                status, got = ask(path, body)
                got = pick(got) if status == 200 else got
            with lock:
                if status == 429:
                    counts["busy"] += 1
                elif status != 200:
                    problems.append(f"request {index}: status {status}: {got}")
                else:
                    counts["answers"] += 1
                    if got == solo[index]:
                        counts["equal"] += 1
                    else:
                        problems.append(f"request {index} {json.dumps(body)}: {got} is not {solo[index]}")
        except (OSError, http.client.HTTPException) as error:
            with lock:
                problems.append(f"{type(error).__name__}: {error}")


threads = [threading.Thread(target=client, args=(i,)) for i in range(args.clients)]
for thread in threads:
    thread.start()
memory = []
while any(t.is_alive() for t in threads):
    time.sleep(min(10, max(0.5, args.minutes * 60 / 60)))
    memory.append(memory_mib())
    resident, cached = memory[-1]
    print(f"{counts} memory {resident:.0f} MiB, {cached:.0f} of them evicted states; problems {len(problems)}", file=sys.stderr)
for thread in threads:
    thread.join()


def middle(values):
    return sorted(values)[len(values) // 2]


# The first third fills slots, checkpoints and caches. What grows after it, evicted states apart, is a leak: the middle third
# against the last one, so that single peaks do not count.
own = [resident - cached for resident, cached in memory]
third = max(1, len(own) // 3)
warm, end = middle(own[third:2 * third] or own), middle(own[-third:])
allowed = max(args.growth_mib, warm * 0.02)
mismatches = counts["answers"] - counts["equal"]
failures = len(problems) - mismatches
verdict = {"errors": failures == 0, "mismatches": mismatches == 0, "memory": end - warm <= allowed}
result = {**counts, "errors": failures, "mismatches": mismatches, "memory_start_mib": round(own[0]), "memory_warm_mib": round(warm),
          "memory_end_mib": round(end), "memory_allowed_growth_mib": round(allowed, 1),
          "cache_ram_mib": round(memory[-1][1]), "passed": all(verdict.values())}
if args.json:
    print(json.dumps(result))
else:
    word = {True: "ok", False: "FAILED"}
    print(f"answers    {counts['answers']} ({counts['left']} hung up, {counts['bad']} bad requests, {counts['busy']} told to come back)")
    print(f"errors     {failures}: {word[verdict['errors']]}")
    print(f"mismatches {mismatches} of {counts['answers']} against solo answers: {word[verdict['mismatches']]}")
    print(f"memory     {own[0]:.0f} MiB at first, {warm:.0f} warm (middle third), {end:.0f} at the end (last third); "
          f"growth {end - warm:+.1f}, allowed {allowed:.1f}: {word[verdict['memory']]}")
    print(f"           beside {memory[-1][1]:.0f} MiB of evicted states, which --cache-ram bounds")
    print("PASSED" if result["passed"] else "FAILED")
sys.exit(0 if result["passed"] else 1)
