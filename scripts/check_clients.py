#!/usr/bin/env python3
"""Runs the official OpenAI and Anthropic clients against a strata server.

    pip install openai anthropic
    strata serve --port 8080 &
    python scripts/check_clients.py http://127.0.0.1:8080

Checks: chat, streaming (equal to the whole answer), log-probabilities, n, seeds, stop strings, JSON schema, reasoning,
tools round trip (forced call, result, answer), responses API, completions, cancellation, token counts, errors.
The model may be tiny: what is checked is the protocol, never the sense of an answer.
"""
import json
import sys
import time

import anthropic
import openai

BASE = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
KEY = sys.argv[2] if len(sys.argv) > 2 else "none"
ai = openai.OpenAI(base_url=f"{BASE}/v1", api_key=KEY, max_retries=0, timeout=120)
claude = anthropic.Anthropic(base_url=BASE, api_key=KEY, max_retries=0, timeout=120)
GREEDY = {"temperature": 0, "seed": 1}
NO_THINKING = {"enable_thinking": False}
ASK = [{"role": "user", "content": "Tell me a short story about a fox."}]
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
           "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a city",
                                         "parameters": WEATHER}}
checks = []


def check(function):
    checks.append(function)
    return function


@check
def models():
    assert len(ai.models.list().data) == 1


@check
def chat_stream_equals_whole():
    args = dict(model="x", messages=ASK, max_tokens=40, **GREEDY, extra_body=NO_THINKING)
    whole = ai.chat.completions.create(**args)
    parts, usage, reason = "", None, None
    for chunk in ai.chat.completions.create(**args, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            parts += choice.delta.content or ""
            reason = choice.finish_reason or reason
    assert parts == whole.choices[0].message.content, (parts, whole.choices[0].message.content)
    assert reason == whole.choices[0].finish_reason
    assert usage.completion_tokens == whole.usage.completion_tokens > 0
    assert usage.prompt_tokens == whole.usage.prompt_tokens > 0
    assert whole.usage.prompt_tokens_details.cached_tokens >= 0


@check
def reasoning_is_apart():
    args = dict(model="x", messages=ASK, max_tokens=60, **GREEDY, reasoning_effort="high")
    whole = ai.chat.completions.create(**args, extra_body={"thinking_budget": 10})
    message = whole.choices[0].message
    streamed = {"reasoning_content": "", "content": ""}
    for chunk in ai.chat.completions.create(**args, stream=True, extra_body={"thinking_budget": 10}):
        for choice in chunk.choices:
            for key in streamed:
                streamed[key] += getattr(choice.delta, key, None) or ""
    assert "<think>" not in (message.content or "") and "</think>" not in (message.content or "")
    assert streamed["content"] == (message.content or "")
    assert streamed["reasoning_content"] == getattr(message, "reasoning_content", "")
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0


@check
def logprobs():
    whole = ai.chat.completions.create(model="x", messages=ASK, max_tokens=8, logprobs=True, top_logprobs=3, **GREEDY,
                                       extra_body=NO_THINKING)
    tokens = whole.choices[0].logprobs.content
    assert 0 < len(tokens) <= whole.usage.completion_tokens
    for token in tokens:
        assert len(token.top_logprobs) == 3 and token.logprob <= 0
        assert token.logprob == token.top_logprobs[0].logprob, "greedy takes the most likely token"


@check
def n_and_seeds():
    args = dict(model="x", messages=ASK, max_tokens=16, temperature=1.0, extra_body=NO_THINKING)
    three = ai.chat.completions.create(**args, n=3, seed=5)
    assert [c.index for c in three.choices] == [0, 1, 2]
    texts = [c.message.content for c in three.choices]
    again = [c.message.content for c in ai.chat.completions.create(**args, n=3, seed=5).choices]
    assert texts == again, "the same seed gives the same answers"
    single = ai.chat.completions.create(**args, seed=6).choices[0].message.content
    assert single == texts[1], "choice i is the answer of seed + i"


@check
def stop_strings():
    args = dict(model="x", messages=ASK, max_tokens=40, **GREEDY, extra_body=NO_THINKING)
    text = ai.chat.completions.create(**args).choices[0].message.content
    stop = text[len(text) // 2:len(text) // 2 + 3]
    cut = ai.chat.completions.create(**args, stop=[stop])
    assert cut.choices[0].message.content == text[:text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


@check
def json_schema():
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
                                               "age": {"type": "integer", "minimum": 0, "maximum": 150}},
              "required": ["name", "age"], "additionalProperties": False}
    whole = ai.chat.completions.create(
        model="x", messages=ASK, max_tokens=200, **GREEDY, extra_body=NO_THINKING,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": schema}})
    person = json.loads(whole.choices[0].message.content)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)


@check
def tools_round_trip():
    args = dict(model="x", tools=[TOOL], max_tokens=200, **GREEDY, extra_body=NO_THINKING)
    first = ai.chat.completions.create(messages=ASK, tool_choice="required", **args)
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls", choice
    call = choice.message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather" and isinstance(arguments["city"], str)
    name, streamed, ident = "", "", ""
    for chunk in ai.chat.completions.create(messages=ASK, tool_choice="required", stream=True, **args):
        for delta in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
            ident = ident or delta.id
            name += delta.function.name or ""
            streamed += delta.function.arguments or ""
    assert (name, streamed) == (call.function.name, call.function.arguments) and ident
    history = ASK + [choice.message.model_dump(exclude_none=True),
                     {"role": "tool", "tool_call_id": call.id, "content": "rain, 12 degrees"}]
    second = ai.chat.completions.create(messages=history, tool_choice="none", **args)
    assert second.choices[0].finish_reason in ("stop", "length") and not second.choices[0].message.tool_calls
    named = ai.chat.completions.create(
        messages=ASK, tool_choice={"type": "function", "function": {"name": "get_weather"}}, **args)
    assert [c.function.name for c in named.choices[0].message.tool_calls] == ["get_weather"]


@check
def completions():
    args = dict(model="x", prompt="Once upon a time", max_tokens=12, **GREEDY)
    whole = ai.completions.create(**args, logprobs=2)
    streamed = "".join(c.choices[0].text for c in ai.completions.create(**args, stream=True) if c.choices)
    assert streamed == whole.choices[0].text
    assert len(whole.choices[0].logprobs.tokens) <= whole.usage.completion_tokens
    two = ai.completions.create(**{**args, "prompt": ["Once upon a time", "The sun"]}, echo=True)
    assert two.choices[0].text == "Once upon a time" + whole.choices[0].text
    assert two.choices[1].text.startswith("The sun")


@check
def responses():
    args = dict(model="x", input="Say something.", max_output_tokens=30, temperature=0, reasoning={"effort": "none"})
    whole = ai.responses.create(**args)
    assert whole.output_text and whole.status in ("completed", "incomplete")
    text, final = "", None
    for event in ai.responses.create(**args, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert text == whole.output_text == final.output_text
    tool = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}
    called = ai.responses.create(**{**args, "max_output_tokens": 200}, tools=[tool], tool_choice="required")
    call = [item for item in called.output if item.type == "function_call"][0]
    json.loads(call.arguments)
    items = [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True),
             {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    assert ai.responses.create(**{**args, "input": items}).output


@check
def anthropic_messages():
    args = dict(model="x", max_tokens=40, messages=ASK, extra_body={"temperature": 0}, system="Be brief.")
    whole = claude.messages.create(**args)
    assert whole.content[0].type == "text" and whole.stop_reason in ("end_turn", "max_tokens")
    with claude.messages.stream(**args) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    count = claude.messages.count_tokens(model="x", messages=ASK, system="Be brief.").input_tokens
    assert count == whole.usage.input_tokens + whole.usage.cache_read_input_tokens


@check
def anthropic_thinking():
    whole = claude.messages.create(model="x", max_tokens=80, messages=ASK,
                                   thinking={"type": "enabled", "budget_tokens": 1024})
    assert whole.content[0].type == "thinking"
    again = ASK + [{"role": "assistant", "content": [b.model_dump() for b in whole.content]},
                   {"role": "user", "content": "And then?"}]
    assert claude.messages.create(model="x", max_tokens=8, messages=again).content


@check
def anthropic_tools():
    tool = {"name": "get_weather", "description": "Weather of a city", "input_schema": WEATHER}
    args = dict(model="x", max_tokens=200, messages=ASK, extra_body={"temperature": 0}, tools=[tool],
                tool_choice={"type": "any"})
    whole = claude.messages.create(**args)
    call = [b for b in whole.content if b.type == "tool_use"][0]
    assert whole.stop_reason == "tool_use" and isinstance(call.input["city"], str)
    with claude.messages.stream(**args) as stream:
        final = stream.get_final_message()
    assert [b for b in final.content if b.type == "tool_use"][0].input == call.input
    history = ASK + [{"role": "assistant", "content": [b.model_dump() for b in whole.content]},
                     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}]
    assert claude.messages.create(model="x", max_tokens=20, messages=history, tools=[tool]).content


@check
def anthropic_stop_sequence():
    args = dict(model="x", max_tokens=40, messages=ASK, extra_body={"temperature": 0})
    text = claude.messages.create(**args).content[0].text
    stop = text[len(text) // 2:len(text) // 2 + 3]
    cut = claude.messages.create(**args, stop_sequences=[stop])
    assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", stop)


@check
def cancellation():
    import urllib.request

    def running():
        request = urllib.request.Request(f"{BASE}/slots", headers={"authorization": f"Bearer {KEY}"})
        return sum(slot["is_processing"] for slot in json.load(urllib.request.urlopen(request)))

    before = running()
    stream = ai.chat.completions.create(model="x", messages=ASK, stream=True, max_tokens=4000,
                                        extra_body={"ignore_eos": True})
    for _, chunk in zip(range(4), stream):
        pass
    assert running() == before + 1
    stream.close()
    deadline = time.time() + 5
    while running() > before:
        assert time.time() < deadline, "the slot was not freed"
        time.sleep(0.02)


@check
def errors():
    def refused(kind, call, **args):
        try:
            call(**args)
        except kind as error:
            return error
        raise AssertionError("was not refused")

    error = refused(openai.BadRequestError, ai.chat.completions.create, model="x", messages=ASK, temperature=1000)
    assert error.body["param"] == "temperature", error.body
    refused(openai.BadRequestError, ai.chat.completions.create, model="x", messages=[])
    refused(openai.APIStatusError, ai.embeddings.create, model="x", input="a")
    error = refused(anthropic.BadRequestError, claude.messages.create, model="x", max_tokens=5, messages=[
        {"role": "user", "content": [{"type": "video"}]}])
    assert "content[0].type" in error.body["error"]["message"]
    long = [{"role": "user", "content": "word " * 300000}]
    error = refused(openai.BadRequestError, ai.chat.completions.create, model="x", messages=long)
    assert error.code == "context_length_exceeded"


failed = 0
for function in checks:
    start = time.time()
    try:
        function()
        print(f"ok    {function.__name__} ({time.time() - start:.1f} s)")
    except Exception as error:  # noqa: BLE001 - every check is reported
        failed += 1
        print(f"FAIL  {function.__name__}: {type(error).__name__}: {error}")
print(f"{len(checks) - failed} of {len(checks)} checks passed")
sys.exit(1 if failed else 0)
