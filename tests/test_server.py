"""``flashspec serve`` as a real process, judged by the official client, plain sockets, schemathesis and Prometheus."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
import torch
from conftest import ToyTarget
from hypothesis import HealthCheck, given, settings as examples
from pydantic import BaseModel
from server_process import (
    LIMIT,
    Answer,
    Ask,
    Reply,
    Server,
    check_stream,
    check_whole,
    create,
    free_port,
    make_tiny,
    truth,
    wait_for,
)
from test_deploy import COUNTERS, SERIES

import flashspec
from flashspec import grammar
from flashspec.core import EMPTY, Constraint, Draft, SamplingParams, Score, Sequence
from flashspec.engine import LocalEngine
from flashspec.errors import MemoryLimitError
from flashspec.grammar import GrammarCompiler
from flashspec.metrics import Metrics
from flashspec.server import gate
from flashspec.server.app import Service, Settings, create_app
from flashspec.server.gate import Gate
from flashspec.server.protocol import ChatRequest
from flashspec.server.tools import Calls
from flashspec.server.worker import Job, Worker
from flashspec.text import Encoded

EOS = 2

LONG = 3000  # tokens that take far longer than any test waits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    return make_tiny(tmp_path_factory.mktemp("server") / "tiny", smollm2_path)


@pytest.fixture(scope="module")
def engine(folder: Path) -> LocalEngine:
    """The same model in this process, one token at a time."""
    return flashspec.load(folder, drafter="none", num_speculative_tokens=0, threads=1)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with Server(folder.parent, "--drafter", "suffix", "--log-format", "json", model=folder) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Server]:
    """Without a drafter, with a key and a name, with prompts in its log, for requests of at most three seconds."""
    options = ("--drafter", "none", "--request-timeout", "3", "--log-prompts", "--log-format", "json")
    more = ("--served-model-name", "org/名前", "--cors-origin", "http://page.example", "--max-body", "0.25")
    with Server(folder.parent, *options, *more, model=folder, key=None, env={"FLASHSPEC_API_KEY": "key-1"}) as plain:
        plain.key, plain.model = "key-1", "org/名前"
        yield plain


@pytest.fixture(scope="module")
def narrow(folder: Path) -> Iterator[Server]:
    """One at a time, one waiting."""
    options = ("--drafter", "suffix", "--max-batch", "1", "--max-waiting", "1")
    with Server(folder.parent, *options, model=folder) as narrow:
        yield narrow


# tokens


def asks(engine: LocalEngine) -> list[Ask]:
    """Requests of every kind."""
    signs = dict.fromkeys(engine.tokenizer.encode("世界，你好 🎉🇨🇭 é"), 14.0)
    turns = [{"role": "system", "content": "Sei knapp."}, {"role": "user", "content": "数到十 🎉 one two"}]
    round_ = engine.generate("one two three", SamplingParams(max_tokens=40)).tokens
    after = engine.generate(round_[:32], SamplingParams(max_tokens=30))  # what is drafted and accepted all the way
    at = len(engine.tokenizer.decode(after.tokens[:8]))
    inside, later = after.text[at - 2 : at + 3], after.text[at + 7 : at + 16]
    return [
        Ask("The quick brown fox", {"max_tokens": 40}),
        Ask(turns, {"max_tokens": 40}),
        Ask("The quick brown fox", {"max_tokens": 24, "temperature": 1.0, "seed": 7}, n=2),
        Ask(turns, {"max_tokens": 20, "temperature": 1.1, "seed": 7, "top_p": 0.98}, n=3),
        Ask(round_[:32], {"max_tokens": 60, "stop": (inside,)}),
        Ask(round_[:32], {"max_tokens": 40, "stop": ("\ufffe", later, inside[1:])}),
        Ask("a b c", {"max_tokens": 24, "logit_bias": {5000: 30.0, 5001: 29.5, 228: -100.0}}),
        Ask("你好，世界 🎉", {"max_tokens": 40, "temperature": 1.0, "seed": 3, "logit_bias": signs}),
        Ask(turns, {"max_tokens": 24, "presence_penalty": 1.5, "frequency_penalty": 1.0}),
        Ask("x y z", {"max_tokens": 24, "repetition_penalty": 1.7, "temperature": 0.5, "seed": 1}),
        Ask("x y z", {"max_tokens": 24, "min_p": 0.05, "temperature": 1.2, "seed": 2}),
        Ask("x y z", {"max_tokens": 24, "top_k": 3, "temperature": 2.0, "seed": -4}, n=2),
        Ask("one two three", {"max_tokens": 16, "logprobs": 3}),
        Ask(turns, {"max_tokens": 16, "temperature": 1.0, "seed": 10**12, "logprobs": 2}),
        Ask([17, 1000, 49151, 228], {"max_tokens": 20}),
        Ask("end", {"max_tokens": 30, "logit_bias": {EOS: 100.0}}),
        Ask("end", {"max_tokens": 20, "logit_bias": {EOS: 100.0}, "min_tokens": 6}),
        Ask("end", {"max_tokens": 12, "logit_bias": {EOS: 11.0}, "temperature": 1.0, "seed": 5, "ignore_eos": True}),
    ]


@pytest.fixture(scope="module")
def known(engine: LocalEngine) -> list[tuple[Ask, list[Answer]]]:
    """Each request with what the engine makes of it."""
    return [(ask, truth(engine, ask)) for ask in asks(engine)]


def test_the_requests_are_worth_asking(known: list[tuple[Ask, list[Answer]]]) -> None:
    reasons = [answer.finish_reason for _, answers in known for answer in answers]
    assert {"stop", "length"} == set(reasons)
    stopped = [(ask, answers[0]) for ask, answers in known if "stop" in ask.sampling]
    assert all(answer.finish_reason == "stop" and 5 < len(answer.tokens) < 40 for _, answer in stopped)
    assert all(len({tuple(answer.tokens) for answer in answers}) == ask.n for ask, answers in known)
    assert any(0x3000 < ord(sign) < 0xFFF0 for _, answers in known for answer in answers for sign in answer.text)


def test_alone_and_whole(client: openai.OpenAI, server: Server, known: list[tuple[Ask, list[Answer]]]) -> None:
    accepted = server.value("spec_decode_num_accepted_tokens_total")
    for ask, answers in known:
        check_whole(client, ask, server.model, answers)
    assert server.value("spec_decode_num_accepted_tokens_total") > accepted + 50


def test_alone_and_streamed(client: openai.OpenAI, server: Server, known: list[tuple[Ask, list[Answer]]]) -> None:
    cut = []
    for ask, answers in known:
        chunks = check_stream(client, ask, server.model, answers)
        if "stop" in ask.sampling:
            cut.append([chunk.model_extra["speculation"]["kinds"] for chunk in chunks if chunk.model_extra][-1])
    assert any("accepted" in kinds for kinds in cut), "no stop string lay inside an accepted run"


def test_all_at_once(client: openai.OpenAI, server: Server, known: list[tuple[Ask, list[Answer]]]) -> None:
    def check(number: int) -> None:
        ask, answers = known[number % len(known)]
        (check_stream if number % 2 else check_whole)(client, ask, server.model, answers)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, range(len(known) + 3)))


def test_a_drafter_changes_nothing(
    client: openai.OpenAI, server: Server, plain: Server, known: list[tuple[Ask, list[Answer]]]
) -> None:
    for ask, answers in known[:5]:
        check_stream(plain.client(), ask, plain.model, answers)
        for said in ({"drafter": "none"}, {"num_speculative_tokens": 1}, {"enabled": False}):
            check_stream(client, Ask(ask.prompt, ask.sampling, ask.n, said), server.model, answers)


def test_logprobs_are_the_engines(
    client: openai.OpenAI, server: Server, engine: LocalEngine, known: list[tuple[Ask, list[Answer]]]
) -> None:
    for ask, (right,) in ((ask, answers) for ask, answers in known if "logprobs" in ask.sampling):
        spelled = [engine.tokenizer.decode([entry.token]) for entry in right.logprobs]
        tops = [[value for _, value in entry.top] for entry in right.logprobs]
        values = [entry.logprob for entry in right.logprobs]
        got = create(client, ask, server.model).choices[0].logprobs
        if ask.is_chat:
            chunks = check_stream(client, ask, server.model, [right])
            streamed = [each for chunk in chunks for c in chunk.choices if c.logprobs for each in c.logprobs.content]
            for entries in (got.content, streamed):
                assert [entry.token for entry in entries] == spelled
                assert [entry.logprob for entry in entries] == pytest.approx(values, abs=1e-4)
                for entry, top in zip(entries, tops, strict=True):
                    assert [each.logprob for each in entry.top_logprobs] == pytest.approx(top, abs=1e-4)
                    assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
        else:
            assert got.tokens == spelled
            assert got.token_logprobs == pytest.approx(values, abs=1e-4)
            assert [sorted(top.values(), reverse=True) for top in got.top_logprobs] == [
                pytest.approx(top, abs=1e-4) for top in tops
            ]
            assert got.text_offset == [0, *itertools.accumulate(map(len, spelled))][:-1]


def test_a_prediction_is_accepted_and_changes_nothing(
    client: openai.OpenAI, server: Server, engine: LocalEngine
) -> None:
    turns = [{"role": "user", "content": "something that nobody has asked before"}]
    ask = Ask(turns, {"max_tokens": 40, "temperature": 1.0, "seed": 11}, speculative={"include_metrics": True})
    right = truth(engine, ask)
    without = check_whole(client, ask, server.model, right)
    predicted = create(client, ask, server.model, prediction={"type": "content", "content": right[0].text})
    assert predicted.choices[0].message.content == right[0].text
    counts = [got.model_extra["metrics"]["speculative_decoding"] for got in (without, predicted)]
    told = predicted.usage.completion_tokens_details
    assert told.accepted_prediction_tokens == counts[1]["num_accepted_tokens"]
    assert told.rejected_prediction_tokens == counts[1]["num_draft_tokens"] - counts[1]["num_accepted_tokens"]
    assert without.usage.completion_tokens_details is None
    *_, last = create(client, ask, server.model, prediction={"type": "content", "content": right[0].text}, stream=True,
                      stream_options={"include_usage": True})  # fmt: skip
    assert last.usage.completion_tokens_details.accepted_prediction_tokens >= 5
    # the first answer is remembered as well, so that both may help
    assert counts[1]["num_accepted_tokens"] >= counts[0]["num_accepted_tokens"] + 5


@pytest.mark.parametrize(
    "tiny", [{"top_p": 5e-324}, {"top_p": 1e-60, "top_k": 5}, {"temperature": 5e-324}, {"min_p": 1}, {"top_k": 1}]
)
def test_the_smallest_numbers_leave_the_likeliest_token(server: Server, tiny: dict[str, Any]) -> None:
    best = server.complete("a b").json["choices"][0]["text"]
    reply = server.complete("a b", **({"temperature": 1.0} | tiny))

    assert reply.status == 200, reply
    assert reply.json["choices"][0]["text"] == best


# the API


def test_chunks_of_a_stream(client: openai.OpenAI, server: Server) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    usage = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=server.model, messages=messages, max_completion_tokens=6, n=2, stream=True, stream_options=usage
        )
    )
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all("usage" in chunk.model_fields_set for chunk in chunks), "null, not absent"
    last = chunks[-1]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    for index in range(2):
        deltas = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert [choice.delta.role for choice in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert [choice.finish_reason for choice in deltas] == [None] * (len(deltas) - 1) + ["length"]
    plain = list(client.completions.create(model=server.model, prompt="hi", max_tokens=3, stream=True))
    assert {chunk.object for chunk in plain} == {"text_completion"}
    assert plain[-1].choices[0].finish_reason == "length"
    assert all(chunk.usage is None and "usage" not in chunk.model_fields_set for chunk in plain)


def test_a_stream_says_so_in_its_headers(server: Server) -> None:
    connection = server.connect()
    body = {"model": server.model, "prompt": "hi", "max_tokens": 2, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    assert response.getheader("content-type") == "text/event-stream; charset=utf-8"
    assert response.getheader("cache-control") == "no-cache"
    assert response.getheader("x-request-id")
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_models(client: openai.OpenAI, server: Server, plain: Server) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    found = client.models.retrieve("tiny")
    assert (found.object, found.owned_by) == ("model", "flashspec")
    assert found.model_extra is not None
    assert found.model_extra["max_model_len"] == 4096
    assert found.model_extra["drafters"] == ["none", "suffix"]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
    assert [model.id for model in plain.client().models.list()] == ["org/名前"]
    quoted = "/v1/models/" + urllib.parse.quote("org/名前")
    assert plain.request("GET", quoted).json["id"] == "org/名前"


def test_prompts_of_completions(client: openai.OpenAI, server: Server, engine: LocalEngine) -> None:
    texts = ["one two", "你好 🎉"]
    right = [truth(engine, Ask(text, {"max_tokens": 6}))[0].text for text in texts]
    ids = [engine.tokenizer.encode(text) for text in texts]
    for prompts in (texts, ids):
        got = client.completions.create(model=server.model, prompt=prompts, max_tokens=6, temperature=0, n=1)
        assert [choice.text for choice in got.choices] == right
        assert got.usage is not None
        assert got.usage.prompt_tokens == sum(map(len, ids))
    echoed = client.completions.create(model=server.model, prompt=texts, max_tokens=6, temperature=0, echo=True)
    assert [choice.text for choice in echoed.choices] == [a + b for a, b in zip(texts, right, strict=True)]
    streamed = client.completions.create(
        model=server.model, prompt=texts, max_tokens=6, temperature=0, echo=True, stream=True
    )
    found = {0: "", 1: ""}
    for chunk in streamed:
        for choice in chunk.choices:
            found[choice.index] += choice.text
    assert list(found.values()) == [choice.text for choice in echoed.choices]
    two = client.completions.create(model=server.model, prompt=texts, max_tokens=4, n=2, seed=1)
    assert [choice.index for choice in two.choices] == [0, 1, 2, 3]
    assert client.completions.create(model=server.model, prompt="a").usage.completion_tokens == 16  # type: ignore[union-attr]


class Weather(BaseModel):
    is_sunny: bool
    sky: Literal["clear", "grey"]


class Trip(BaseModel):
    days: list[Weather]
    how: Literal["train", "boat"]


def test_response_formats(client: openai.OpenAI, server: Server) -> None:
    messages: Any = [{"role": "user", "content": "the weather, please"}]
    ends = {str(EOS): 100.0}  # the tiny model would go on forever
    for seed in range(3):
        got = client.chat.completions.parse(
            model=server.model, messages=messages, response_format=Trip, max_tokens=400, seed=seed, temperature=1
        )
        assert isinstance(got.choices[0].message.parsed, Trip), got
        assert got.choices[0].finish_reason == "stop"
    braces: dict[str, int] = {str(EOS): 100}
    said = client.chat.completions.create(
        model=server.model, messages=messages, response_format={"type": "json_object"}, logit_bias=braces,
        max_tokens=300, stop=None, frequency_penalty=2,
    )  # fmt: skip
    text = said.choices[0].message.content or ""
    if said.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    assert text.lstrip().startswith("{")
    schema = {"name": "x", "schema": {"enum": ["Grüße", "世界"]}, "strict": True}
    for stream in (False, True):
        form: Any = {"type": "json_schema", "json_schema": schema}
        reply = server.chat(response_format=form, stream=stream, logit_bias=ends, max_tokens=30)
        assert reply.status == 200
        content = reply.body.decode()
        if not stream:
            assert json.loads(json.loads(content)["choices"][0]["message"]["content"]) in ("Grüße", "世界")
    three = server.chat(response_format=form, n=3, logit_bias=ends, max_tokens=30, temperature=1, seed=1).json
    assert {json.loads(choice["message"]["content"]) for choice in three["choices"]} <= {"Grüße", "世界"}
    assert server.chat(response_format={"type": "text"}).status == 200
    assert server.chat(response_format={"type": "json_schema"}).error["param"] == "response_format"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": schema}}


TOOLS = [tool("get_weather", city={"enum": ["Zürich", "東京"]}, now={"type": "boolean"}), tool("stop_it")]
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "what is it like?"}]


def test_tools_are_called_as_their_schemas_say(client: openai.OpenAI, server: Server) -> None:
    named = {"type": "function", "function": {"name": "stop_it"}}
    for seed, choice in enumerate(["required", "required", named]):
        ask: dict[str, Any] = {
            "model": server.model, "messages": ASKED, "tools": TOOLS, "tool_choice": choice, "seed": seed,
            "temperature": 1, "max_tokens": 200,
        }  # fmt: skip
        whole = client.chat.completions.create(**ask).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        assert whole.message.tool_calls is not None
        (call,) = whole.message.tool_calls
        assert call.id.startswith("call_")
        arguments = json.loads(call.function.arguments)
        if choice == named:
            assert (call.function.name, arguments) == ("stop_it", {})
        elif call.function.name == "get_weather":
            assert arguments["city"] in ("Zürich", "東京")
            assert isinstance(arguments["now"], bool)
        with client.chat.completions.stream(**ask) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        (same,) = streamed.message.tool_calls or []
        assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)


def test_tools_that_are_not_called_leave_the_text_alone(client: openai.OpenAI, server: Server) -> None:
    ask: dict[str, Any] = {"model": server.model, "messages": ASKED, "max_tokens": 12, "temperature": 0}
    without = client.chat.completions.create(**ask)
    none = client.chat.completions.create(**ask, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message == without.choices[0].message
    auto = client.chat.completions.create(**ask, tools=TOOLS)
    assert auto.choices[0].finish_reason == "length"
    assert auto.choices[0].message.content
    assert auto.choices[0].message.tool_calls is None
    assert auto.usage.prompt_tokens > without.usage.prompt_tokens + 20, "the model was not told of its tools"  # type: ignore[union-attr]
    streamed = client.chat.completions.create(**ask, tools=TOOLS, stream=True)
    text = "".join(choice.delta.content or "" for chunk in streamed for choice in chunk.choices)
    assert text == auto.choices[0].message.content


def test_tools_are_told_of_whatever_the_user_says(client: openai.OpenAI, server: Server) -> None:
    def size(text: str) -> int:
        messages: Any = [{"role": "user", "content": text}]
        tools: Any = [tool("search")]
        got = client.chat.completions.create(model=server.model, messages=messages, tools=tools, max_tokens=1)
        return int(got.usage.prompt_tokens)  # type: ignore[union-attr]

    assert abs(size("please search it") - size("please find it")) <= 2


def test_tools_of_nested_models(client: openai.OpenAI, server: Server) -> None:
    tools: Any = [openai.pydantic_function_tool(Trip)]
    assert "$defs" in tools[0]["function"]["parameters"]
    messages: Any = ASKED
    got = client.chat.completions.parse(
        model=server.model, messages=messages, tools=tools, tool_choice="required", max_tokens=500, seed=1
    )
    (call,) = got.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Trip)


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>junk\n</tool_call>",
        "<tool_call>junk\n</tool_call>\nmore",
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": [], "arguments": {}}\n</tool_call>',  # BUG: TypeError, a list is not hashable
        '<tool_call>\n{"name": "f", "arguments": 2}\n</tool_call>',
        "<tool_call>[]\n</tool_call> x",
        "<tool_call>" + "[" * 10_000 + "\n</tool_call>",  # BUG: RecursionError
        "<tool_call>\n",
    ],
)
def test_what_only_looks_like_a_call_is_text(text: str) -> None:
    for size in (len(text), 1, 5):
        calls = Calls(frozenset({"f"}))
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        shown = "".join(calls.push(piece)[0] for piece in pieces) + calls.push("", is_last=True)[0]
        assert shown == text
        assert not calls.found


def test_calls_are_taken_out_of_text_in_any_pieces() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call> é"}}\n</tool_call>'
    text = f"before < <tool {call}\nbetween{call} after <tool_c"
    texts = set()
    for size in range(1, len(text), 3):
        calls = Calls(frozenset({"f"}))
        shown, found = "", []
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        for number, piece in enumerate(pieces):
            more, complete = calls.push(piece, is_last=number == len(pieces) - 1)
            shown += more
            found += complete
        texts.add(shown)
        assert [json.loads(each["function"]["arguments"]) for each in found] == [{"a": "</tool_call> é"}] * 2
        assert [each["index"] for each in found] == [0, 1]
    assert texts == {"before < <tool between after <tool_c"}


def test_a_call_behind_what_only_looked_like_one() -> None:
    calls = Calls(frozenset({"f"}))
    shown, found = calls.push('a <tool_call>b <tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', is_last=True)

    assert (shown, len(found)) == ("a <tool_call>b ", 1)


def test_a_conversation_with_tools_in_it(client: openai.OpenAI, server: Server) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "東京"}'}}
    turns: Any = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "weather?", "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    ask: dict[str, Any] = {"model": server.model, "max_tokens": 12, "temperature": 0}
    got = client.chat.completions.create(**ask, messages=turns, tools=TOOLS)  # type: ignore[arg-type]
    again = [*turns, got.choices[0].message.model_dump(), {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(**ask, messages=again).choices[0].message.content
    other = json.loads(json.dumps(turns).replace("get_weather", "another_name_of_it"))
    sizes = [client.chat.completions.create(**ask, messages=each).usage.prompt_tokens for each in (turns, other)]
    assert sizes[0] != sizes[1], "what the assistant called is not in the prompt"
    system = [{"role": "system", "content": "Be brief."}, *turns[1:]]
    texts = [
        client.chat.completions.create(**ask, messages=each).choices[0].message.content for each in (turns, system)
    ]
    assert texts[0] == texts[1]


def test_speculation_can_be_steered(server: Server) -> None:
    def counts(**said: Any) -> Any:
        reply = server.complete("a b c d a b c d", max_tokens=40, speculative={"include_metrics": True, **said})
        assert reply.status == 200, reply
        return reply.json["metrics"]["speculative_decoding"]

    assert counts()["num_accepted_tokens"] > 0
    for said in ({"enabled": False}, {"num_speculative_tokens": 0}, {"drafter": "none"}):
        none = counts(**said)
        assert none["num_draft_tokens"] == none["num_drafts"] == 0
    two = counts(num_speculative_tokens=2, drafter="suffix")
    assert two["num_drafts"] > 0
    assert two["num_draft_tokens"] <= 2 * two["num_drafts"]
    assert len(two["num_accepted_tokens_per_pos"]) <= 2
    for said in ({"drafter": "model"}, {"drafter": ""}, {"num_speculative_tokens": -1}, {"depth": 3}):
        assert server.complete(speculative=said).error["type"] == "invalid_request_error"


def test_metrics_of_a_request_agree_with_its_tokens(client: openai.OpenAI, server: Server) -> None:
    said = {"speculative": {"include_metrics": True, "include_tokens": True}, "ignore_eos": True}
    started = time.perf_counter()
    chunks = list(
        client.completions.create(
            model=server.model, prompt="e f g h e f", max_tokens=50, temperature=0, n=2, stream=True, extra_body=said
        )
    )
    elapsed = 1000 * (time.perf_counter() - started)
    *told, last = [chunk.model_extra or {} for chunk in chunks]
    steps = [each["speculation"] for each in told if "speculation" in each]
    drafts = [step["draft"] for step in steps if step["draft"]]
    counts = last["metrics"]["speculative_decoding"]
    assert sum(len(step["tokens"]) for step in steps) == 100
    assert counts["num_drafts"] == len(drafts)
    assert counts["num_draft_tokens"] == sum(map(len, drafts))
    accepted = [sum(node["accepted"] for node in draft) for draft in drafts]
    assert counts["num_accepted_tokens"] == sum(accepted) == sum(step["kinds"].count("accepted") for step in steps) > 10
    assert counts["num_accepted_tokens_per_pos"] == [
        sum(count > at for count in accepted) for at in range(max(map(len, drafts)))
    ]
    assert counts["draft_acceptance_rate"] == pytest.approx(sum(accepted) / sum(map(len, drafts)))
    assert counts["mean_acceptance_length"] == pytest.approx(1 + sum(accepted) / len(drafts))
    times = last["metrics"]
    assert 0 < times["time_to_first_token_ms"] < elapsed
    assert 0 < times["generation_time_ms"] < elapsed
    assert 0 <= times["queue_time_ms"] <= times["time_to_first_token_ms"]
    assert times["tokens_per_second"] == pytest.approx(98 / times["generation_time_ms"] * 1000, rel=0.01)


def test_a_second_turn_reuses_the_first(client: openai.OpenAI, server: Server) -> None:
    turns: list[Any] = [{"role": "user", "content": "a long story " * 30}]
    first = client.chat.completions.create(model=server.model, messages=turns, max_tokens=20, temperature=0)
    reply = first.choices[0].message.content
    turns += [{"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]
    second = client.chat.completions.create(model=server.model, messages=turns, max_tokens=5, temperature=0)
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert first.usage.prompt_tokens - 10 <= cached < second.usage.prompt_tokens


# errors


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "a", "max_tokens": 2, **more}


def turns(content: Any = "a", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 2, **more}


def form(schema: Any) -> dict[str, Any]:
    return turns(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def nested(depth: int) -> Any:
    found: Any = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}, "required": ["a"]}
    return found


LONE = b"a\\ud800b"
BAD: dict[str, tuple[Any, int, str | None]] = {
    "an unknown parameter": (body(foo=1), 400, "unknown_parameter"),
    "an unknown parameter inside": (turns(stream_options={"x": 1}), 400, "unknown_parameter"),
    "functions, which are gone": (turns(functions=[]), 400, "unknown_parameter"),
    "a text for a number": (body(temperature="1"), 400, "invalid_value"),
    "a number for a bool": (body(stream=1), 400, "invalid_value"),
    "a bool for a number": (body(n=True), 400, "invalid_value"),
    "a float for a whole": (body(max_tokens=1.5), 400, "invalid_value"),
    "no tokens": (body(max_tokens=0), 400, "invalid_value"),
    "too hot": (body(temperature=101), 400, "invalid_value"),
    "top_p": (body(top_p=0), 400, "invalid_value"),
    "penalty": (body(presence_penalty=3), 400, "invalid_value"),
    "min above max": (body(min_tokens=3), 400, "invalid_value"),
    "bias of no token": (body(logit_bias={"99999": 1}), 400, "invalid_value"),
    "bias of a word": (body(logit_bias={"a": 1}), 400, "invalid_value"),
    "too much bias": (body(logit_bias={"5": 1000}), 400, "invalid_value"),
    "an unknown model": (body(model="gpt-5"), 404, "model_not_found"),
    "no prompt": ({"model": "tiny"}, 400, "invalid_value"),
    "an empty prompt": (body(prompt=""), 400, "invalid_value"),
    "no prompts": (body(prompt=[]), 400, "invalid_value"),
    "an empty prompt of two": (body(prompt=["a", ""]), 400, "invalid_value"),
    "mixed prompts": (body(prompt=["a", [1]]), 400, "invalid_value"),
    "ids outside": (body(prompt=[49152]), 400, "invalid_value"),
    "negative ids": (body(prompt=[[5], [-1]]), 400, "invalid_value"),
    "no messages": ({"model": "tiny", "messages": []}, 400, "invalid_value"),
    "an unknown role": ({"model": "tiny", "messages": [{"role": "god", "content": "a"}]}, 400, "invalid_value"),
    "an image": (turns([{"type": "image_url", "image_url": {"url": "x"}}]), 400, None),
    "a prompt that is too long": (body(prompt=[5] * 4096), 400, "context_length_exceeded"),
    "a conversation that is too long": (turns("a b " * 4000), 400, "context_length_exceeded"),
    "not JSON": (b"{nope", 400, "invalid_json"),
    "nothing": (b"", 400, None),
    "null": (b"null", 400, "invalid_value"),
    "a list": (b"[1]", 400, "invalid_value"),
    "bad UTF-8": (b'{"model": "tiny", "prompt": "\xff\xfe"}', 400, None),
    "NaN": (b'{"model": "tiny", "prompt": "a", "temperature": NaN}', 400, "invalid_value"),
    "infinity": (b'{"model": "tiny", "prompt": "a", "temperature": 1e999}', 400, "invalid_value"),
    "NaN inside": (b'{"model": "tiny", "prompt": "a", "logit_bias": {"5": NaN}}', 400, "invalid_value"),
    "deep objects": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400, None),
    "deep lists": (b"[" * 10_000, 400, None),
    "half deep": (b'{"model": "tiny", "prompt":' + b"[" * 900 + b"]" * 900 + b"}", 400, "invalid_value"),
    "a number of 5000 digits": (b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, None),
    "a bias of 5000 digits": (body(logit_bias={"9" * 5000: 1}), 400, "invalid_value"),
    "half a character": (b'{"model": "tiny", "prompt": "' + LONE + b'"}', 400, "invalid_value"),
    "half a character said": (
        b'{"model": "tiny", "messages": [{"role": "user", "content": "' + LONE + b'"}]}', 400, "invalid_value"
    ),
    "half a character in a tool": (
        b'{"model": "tiny", "messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": '
        b'{"name": "f", "description": "' + LONE + b'"}}]}', 400, "invalid_value"
    ),
    "half a character in a name": (b'{"' + LONE + b'": 1, "model": "tiny", "prompt": "a"}', 400, None),
    "half a model": (b'{"model": "' + LONE + b'", "prompt": "a"}', 404, "model_not_found"),
    "17 choices": (body(n=17), 400, "invalid_value"),
    "a million choices": (body(n=10**6), 400, "invalid_value"),
    "17 stops": (body(stop=["a"] * 17), 400, "invalid_value"),
    "100000 stops": (body(stop=["a"] * 100_000), 400, "invalid_value"),
    "an empty stop": (body(stop=["a", ""]), 400, "invalid_value"),
    "best of": (body(best_of=3), 400, "unsupported"),
    "a suffix": (body(suffix="x"), 400, "unsupported"),
    "echo with logprobs": (body(echo=True, logprobs=1), 400, "unsupported"),
    "top_logprobs alone": (turns(top_logprobs=2), 400, "invalid_value"),
    "21 top_logprobs": (turns(logprobs=True, top_logprobs=21), 400, "invalid_value"),
    "a choice of no tools": (turns(tool_choice="required"), 400, "invalid_value"),
    "another tool": (
        turns(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}}), 400, "invalid_value"
    ),
    "a tool's name": (turns(tools=[tool("two words")]), 400, "invalid_value"),
    "129 tools": (turns(tools=[tool(f"f{i}") for i in range(129)]), 400, "invalid_value"),
    "tools and a format": (turns(tools=TOOLS, response_format={"type": "json_object"}), 400, "invalid"),
    "a schema of an unknown type": (form({"type": "quux"}), 400, "invalid_value"),
    "a schema of nothing": (form({"type": "string", "minLength": 5, "maxLength": 2}), 400, "invalid_value"),
    "a schema that turns in circles": (form({"$ref": "#"}), 400, "invalid_value"),
    "a schema from elsewhere": (form({"$ref": "http://example.com/x"}), 400, "invalid_value"),
    "a schema that is a bad pattern": (form({"type": "string", "pattern": "("}), 400, "invalid_value"),
    "a schema of primes": (form({"type": "integer", "multipleOf": 1_000_003}), 400, "invalid_value"),
    "a deep schema": (form(nested(400)), 400, "invalid_value"),
    "a large schema": (form({"enum": [f"{i:09}" for i in range(5000)]}), 400, "invalid_value"),
    "a deep tool": (turns(tools=[tool("f", a=nested(400))]), 400, "invalid_value"),
}  # fmt: skip


# what a client of an API must not be told of: our language and our libraries
PYTHON = re.compile(
    r"None|True\b|False\b|\b(dict|dictionary|list|tuple|str|int|bool|Union)\b|<class|Input |Error\b|codec|\('"
)
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "x", "format": "wav"}}
FILE = {"type": "file", "file": {"file_id": "x"}}
FUNCTION = {"name": "f", "arguments": {}}
WRONG: list[tuple[dict[str, Any], str, str]] = [  # the field, and a part of what is said of it
    (body(temperature="1"), "temperature", 'temperature is "1"; it must be a number'),
    (body(temperature={"a": None}), "temperature", 'is {"a": null}; it must be a number'),
    (body(temperature=True), "temperature", "is true; it must be a number"),
    (body(temperature=float("nan")), "temperature", "is NaN; it must be at most 100"),
    (body(temperature=-float("inf")), "temperature", "it must be at least 0"),
    (body(temperature=10**400), "temperature", "...; it must be a number"),
    (body(top_p=0), "top_p", "top_p is 0; it must be above 0"),
    (body(n=1.5), "n", "must be a whole number"),
    (body(max_tokens=2**40), "max_tokens", "must be at most 2147483648"),
    (body(stream="yes"), "stream", 'is "yes"; it must be true or false'),
    (body(stop=5), "stop", "must be a string or an array"),
    (body(stop=["a", None]), "stop[1]", "is null; it must be a string"),
    (body(stop=["a", ""]), "stop[1]", "of at least 1 character"),
    (body(stop=["a"] * 17), "stop", "has 17 entries; it may have 16 at most"),
    (body(logit_bias=[1]), "logit_bias", "must be an object"),
    (body(logit_bias={"a": 1}), "logit_bias", 'has the key "a"'),
    (body(logit_bias={"5": None}), "logit_bias.5", "is null; it must be a number"),
    (body(logit_bias={"99999": 1}), "logit_bias", "token id 99999"),
    (body(allowed_token_ids=[]), "allowed_token_ids", "has 0 entries; it must have 1 at least"),
    (body(allowed_token_ids=[99999]), "allowed_token_ids", "allowed_token_ids names token id 99999"),
    (body(min_tokens=3), "min_tokens", "min_tokens is 3, above max_tokens, which is 2"),
    (body(prompt=None), "prompt", "is null; it must be a string or an array"),
    (body(prompt=["a", [1]]), "prompt[1]", "is [1]"),
    (body(prompt=""), "prompt", "empty"),
    (body(prompt=[-1]), "prompt", "token id -1"),
    (body(prompt="a\ud800b"), "prompt", "half a character"),
    (body(prompt=[5] * 4096), "prompt", "4096 tokens"),
    (body(model="gpt-5"), "model", 'the model "gpt-5" does not exist; this server has "tiny"'),
    (body(model=5), "model", "must be a string"),
    (body(foo=None), "foo", "not a parameter"),
    (body(**{"a[b]": 1}), "a[b]", "a[b] is not a parameter"),
    (body(**{"x" * 500: 1}), "x" * 80, "not a parameter"),
    (body(stream_options={"include_usage": True}), "stream_options", "add stream: true"),
    (body(stream_options=5), "stream_options", "must be an object"),
    (body(speculative={"drafter": "x"}), "speculative.drafter", "loaded here are none"),
    (body(speculative={"enabled": None}), "speculative.enabled", "is null; it must be true or false"),
    (body(prediction={"type": "content", "content": "a\ud800b"}), "prediction", "half a character"),
    (body(prediction={"type": "content", "content": [IMAGE]}), "prediction.content[0].type", "reads text only"),
    ({"model": "tiny"}, "prompt", "is missing"),
    (turns([IMAGE]), "messages[0].content[0].type", 'is "image_url"; this model reads text only'),
    (turns([{"type": "text", "text": "a"}, AUDIO]), "messages[0].content[1].type", "this model reads text only"),
    (turns([FILE]), "messages[0].content[0].type", "this model reads text only"),
    (turns([{"type": "text", "text": None}]), "messages[0].content[0].text", "is null; it must be a string"),
    (turns([{"type": None, "text": "a"}]), "messages[0].content[0].type", 'is null; it must be "text"'),
    (turns(["a"]), "messages[0].content[0]", "must be an object"),
    (turns(5), "messages[0].content", "must be a string or an array"),
    (turns("a\ud800b"), "messages", "half a character"),
    (turns("a b " * 4000), "messages", "tokens"),
    (turns() | {"messages": []}, "messages", "has 0 entries"),
    (turns() | {"messages": "hi"}, "messages", "must be an array"),
    (turns() | {"messages": [None]}, "messages[0]", "must be an object"),
    (turns() | {"messages": [{"role": "god"}]}, "messages[0].role", 'must be "system", "developer", "user"'),
    (turns() | {"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio", "must be null"),
    (
        turns() | {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": FUNCTION}]}]},
        "messages[0].tool_calls[0].function.arguments", "is {}; it must be a string",
    ),
    (turns(top_logprobs=2), "top_logprobs", "needs logprobs to be true"),
    (turns(response_format="json"), "response_format", "must be an object"),
    (turns(response_format={"type": "xml"}), "response_format.type", 'must be "text", "json_object" or "json_schema"'),
    (form({"type": "quux"}), "response_format", "quux"),
    (form({"enum": ["a\ud800b"]}), "response_format", "half a character"),
    (form({"type": "integer"}) | {"ignore_eos": True}, "ignore_eos", "ignore_eos is true"),
    (turns(tools=[{"type": "web_search"}]), "tools[0].type", 'must be "function"'),
    (turns(tools=[tool("f"), tool("g", a={"type": "quux"})]), "tools[1].function.parameters", "Invalid type: quux"),
    (turns(tools=TOOLS, tool_choice="maybe"), "tool_choice", '"none", "auto" or "required" or an object'),
    (turns(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x"}}), "tool_choice", '"x"'),
    (turns(tools=TOOLS, tool_choice={"type": "allowed_tools"}), "tool_choice.type", 'must be "function"'),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "param", "told"), WRONG, ids=[f"{at}-{each[1]}" for at, each in enumerate(WRONG)])
def test_errors_name_the_field_in_words_of_the_api(
    engine: LocalEngine, sent: dict[str, Any], param: str, told: str
) -> None:
    error = refused(engine, sent)
    assert error["param"] == param
    assert told in error["message"]
    assert not PYTHON.search(error["message"]), error


def refused(engine: LocalEngine, sent: dict[str, Any]) -> dict[str, Any]:
    path = "/v1/chat/completions" if "messages" in sent else "/v1/completions"
    app = create_app(Service(engine, Settings(model_name="tiny")))
    data = json.dumps(sent).encode()
    return asyncio.run(asgi(app, path, [{"type": "http.request", "body": data}])).error


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{{ raise_exception('no god in here') }}", "the chat template refuses these messages (no god in here)"),
        ("{{ messages[0].content.items() }}", "the chat template refuses these messages; change their roles or order"),
    ],
)
def test_templates_refuse_in_their_own_words(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch, template: str, told: str
) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", template)
    error = refused(engine, turns())
    assert (error["param"], error["message"]) == ("messages", told)


def test_tools_that_are_too_much_together(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_CHARACTERS", 800)
    error = refused(engine, turns(tools=[tool(f"f{i}") for i in range(9)]))
    assert error["param"] == "tools"
    assert "taken together" in error["message"]


@pytest.mark.parametrize("name", BAD)
def test_errors_are_openais(server: Server, name: str) -> None:
    sent, status, code = BAD[name]
    text = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
    path = "/v1/chat/completions" if b'"messages"' in text else "/v1/completions"
    before = server.log.count("Traceback")
    reply = server.request("POST", path, sent)
    assert reply.status == status, reply
    assert reply.error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    if code is not None:
        assert reply.error["code"] == code
    assert not PYTHON.search(reply.error["message"]), reply.error
    assert len(reply.body) < 3000
    assert server.log.count("Traceback") == before


def test_patterns_of_a_thousand_million_are_answered_or_refused_at_once(server: Server) -> None:
    started = time.monotonic()
    for pattern in ("((a{1,1000}){1,1000}){1,1000}", "(a|aa)*b" * 50, "(.*.*)*x", "a{0,1000000000}"):
        reply = server.request("POST", "/v1/chat/completions", form({"type": "string", "pattern": pattern}))
        assert reply.status in (200, 400)
        if reply.status == 400:
            assert reply.error["code"] == "invalid_value"
    assert time.monotonic() - started < 20


def test_limits_are_named(server: Server) -> None:
    for more, param, limit in (
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"n": 17}, "n", "16"),
        ({"temperature": 101}, "temperature", "100"),
    ):
        told = server.complete(**more).error
        assert told["param"] == param
        assert limit in told["message"]


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="tiny", prompt="a", extra_body={"foo": 1})
    assert (bad.value.code, bad.value.param, bad.value.type) == ("unknown_parameter", "foo", "invalid_request_error")
    assert bad.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="x", prompt="a")


def test_it_serves_on_after_errors(
    client: openai.OpenAI, server: Server, known: list[tuple[Ask, list[Answer]]]
) -> None:
    for ask, answers in known[:3]:
        check_whole(client, ask, server.model, answers)
    assert server.load() == (0, 0)


def test_paths_methods_and_types(server: Server) -> None:
    assert server.get("/v1/nothing").error["type"] == "not_found_error"
    assert server.get("/nothing").status == 404
    for method, path in (("GET", "/v1/chat/completions"), ("DELETE", "/v1/models"), ("PUT", "/v1/completions")):
        reply = server.request(method, path, b"{}" if method == "PUT" else None)
        assert reply.status == 405
        assert reply.error["type"] == "invalid_request_error"
        assert reply.headers["allow"]
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        reply = server.request("POST", "/v1/completions", json.dumps(body()).encode(), {"Content-Type": kind})
        assert reply.status in (400, 415), kind
        assert reply.error
    assert server.raw(b"\x00\x01\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_bodies_over_the_limit(server: Server, plain: Server) -> None:
    for each, size in ((server, 5 << 20), (plain, 1 << 20)):
        for length in (True, False):
            text = json.dumps(body(prompt="a " * (size // 2))).encode()
            parts: Any = text if length else (text[at : at + 60_000] for at in range(0, len(text), 60_000))
            # a client that sends all of it before it reads must get the answer, too
            connection = each.connect()
            connection.request("POST", "/v1/completions", parts, each._headers(None), encode_chunked=not length)
            response = connection.getresponse()
            reply = Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
            connection.close()
            assert reply.status == 413
            assert reply.error["code"] == "request_too_large"
            assert "--max-body" in reply.error["message"]
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999\r\n\r\n"
    assert server.raw(head, seconds=5).startswith(b"HTTP/1.1 413")
    assert server.complete().status == 200


def test_many_prompts_are_refused_before_they_are_read(server: Server) -> None:
    started = time.monotonic()
    reply = server.request("POST", "/v1/completions", body(prompt=[[5]] * 100_000, n=16))
    assert reply.status in (400, 429)
    assert reply.error
    assert time.monotonic() - started < 5


def test_keys(plain: Server) -> None:
    asked = {"model": plain.model, "prompt": "a", "max_tokens": 1}
    wrong = ["", "Bearer ", "Bearer key-2", "key-1", "Bearer key-1é", "Basic key-1", "Bearer key-1 key-1"]
    for value in wrong:
        for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/v1/nothing")):
            sent = asked if method == "POST" else None
            reply = plain.request(method, path, sent, {"Authorization": value})
            assert reply.status == 401
            assert reply.error["type"] == "authentication_error"
            assert reply.error["code"] == "invalid_api_key"
            assert "key-1" not in reply.error["message"]
            assert reply.headers["www-authenticate"] == "Bearer"
    assert plain.request("POST", "/v1/completions", asked).status == 200
    for path in ("/health", "/ready", "/metrics", "/", "/openapi.json"):
        assert plain.request("GET", path, headers={"Authorization": ""}).status == 200
    with pytest.raises(openai.AuthenticationError):
        plain.client(api_key="key-2").models.list()


def test_pages_of_one_origin_may_ask(plain: Server) -> None:
    ask = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST", "Authorization": ""}
    allowed = plain.request(
        "OPTIONS", "/v1/completions", headers=ask | {"Access-Control-Request-Headers": "authorization"}
    )
    assert allowed.status == 200
    assert allowed.headers["access-control-allow-origin"] == "http://page.example"
    other = plain.request("OPTIONS", "/v1/completions", headers=ask | {"Origin": "http://other.example"})
    assert other.status == 400
    refused = plain.request("GET", "/v1/models", headers={"Origin": "http://page.example", "Authorization": ""})
    assert refused.status == 401
    assert refused.headers.get("access-control-allow-origin") == "http://page.example", "the page cannot read why"


def test_names_of_requests(server: Server) -> None:
    assert server.get("/health", **{"X-Request-ID": "my-id_1.2"}).headers["x-request-id"] == "my-id_1.2"
    for bad in ("a b", "a" * 65, "é", "<x>", ""):
        assert re.fullmatch(r"[0-9a-f]{32}", server.get("/health", **{"X-Request-ID": bad}).headers["x-request-id"])
    failed = server.request("POST", "/v1/completions", b"{", {"X-Request-ID": "bad-one"})
    assert failed.headers["x-request-id"] == "bad-one"


# life


def gone(server: Server, *, seconds: float = 3.0) -> float:
    return wait_for(lambda: server.load() == (0, 0), "rows are still in use", seconds=seconds)


def test_a_client_that_leaves_frees_its_rows(server: Server) -> None:
    for number in (1, 3):
        stream = server.open("leaving", max_tokens=LONG, n=number, temperature=1, seed=1)
        assert stream.first()
        wait_for(lambda number=number: server.load()[0] == number, "they do not run")
        stream.close()
        gone(server)
    tokens = server.value("generation_tokens_total")
    time.sleep(0.3)
    assert server.value("generation_tokens_total") == tokens


def test_a_client_that_leaves_before_its_answer_frees_its_row(server: Server) -> None:
    for path, more in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", {"messages": ASKED})):
        connection = server.connect()
        ask = {"model": server.model, "max_tokens": LONG, "seed": 2, "ignore_eos": True, **more}
        connection.request("POST", path, json.dumps(ask), {"Content-Type": "application/json"})
        wait_for(lambda: server.load()[0] == 1, "it does not run")
        connection.close()
        gone(server)


def test_a_full_queue(narrow: Server, engine: LocalEngine) -> None:
    long, short = Ask("first", {"max_tokens": 300, "ignore_eos": True}), Ask("second", {"max_tokens": 20})
    right = truth(engine, long)[0], truth(engine, short)[0]
    first = narrow.open("first", max_tokens=300)
    text = first.first()["choices"][0]["text"]
    with ThreadPoolExecutor(1) as pool:
        second = pool.submit(narrow.complete, "second", max_tokens=20)
        wait_for(lambda: narrow.load() == (1, 1), "the second does not wait")
        refused = narrow.complete("third")
        assert narrow.load() == (1, 1), "the first ended too early for this test to mean anything"
        assert refused.status == 429
        assert refused.error["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        with pytest.raises(openai.RateLimitError):
            narrow.client().completions.create(model=narrow.model, prompt="third")
        text += "".join(choice["text"] for event in first for choice in event["choices"])
        assert first.ended_well
        assert text == right[0].text
        assert second.result().json["choices"][0]["text"] == right[1].text
    first.close()
    assert narrow.complete("third").status == 200
    assert narrow.value("requests_total", status="429") == 2


def test_who_leaves_while_waiting(narrow: Server) -> None:
    first = narrow.open("first", max_tokens=LONG)
    first.first()
    for stream in (True, False):
        waiting = narrow.open("second", stream=stream)
        wait_for(lambda: narrow.load() == (1, 1), "it does not wait")
        waiting.close()
        wait_for(lambda: narrow.load() == (1, 0), "it is still waiting", seconds=2)
    first.close()
    gone(narrow)


def test_what_can_never_fit_is_not_told_to_try_again(narrow: Server) -> None:
    reply = narrow.complete(n=3)
    assert reply.status == 400, reply
    assert narrow.complete(["a", "b", "c"]).status == 400
    assert narrow.complete(n=2).status == 200


def test_time_is_up(plain: Server) -> None:
    started = time.monotonic()
    late = plain.complete("slow", max_tokens=4000, n=4, seed=1, temperature=1, ignore_eos=True)
    assert late.status == 504
    assert late.error["code"] == "timeout"
    assert 2.9 < time.monotonic() - started < 5
    gone(plain)
    started = time.monotonic()
    stream = plain.open("slow", max_tokens=4000, n=4, seed=1, temperature=1)
    *_, last = stream
    assert last["error"]["code"] == "timeout"
    assert 2.9 < time.monotonic() - started < 5
    gone(plain)
    with pytest.raises(openai.APIError, match="longer than 3 seconds"):
        for _ in plain.client().completions.create(
            model=plain.model, prompt="slow", max_tokens=4000, n=4, stream=True, extra_body={"ignore_eos": True}
        ):
            pass


def test_sigterm_finishes_what_runs(folder: Path, engine: LocalEngine) -> None:
    ask = Ask("what runs", {"max_tokens": 400, "temperature": 1.0, "seed": 5, "ignore_eos": True})
    right = truth(engine, ask)[0].text
    with Server(folder.parent, "--drafter", "suffix", "--log-format", "json", model=folder) as server:
        streams = [server.open("what runs", max_tokens=400, temperature=1, seed=5) for _ in range(3)]
        texts = [stream.first()["choices"][0]["text"] for stream in streams]
        server.terminate()
        wait_for(lambda: server.get("/ready").status == 503, "it does not drain")
        time.sleep(0.3)  # refusals go on for as long as something runs
        assert server.load() == (3, 0)
        refused = server.complete()
        assert refused.status == 503
        assert refused.error["code"] == "shutting_down"
        assert refused.headers["retry-after"]
        assert server.get("/health").status == 200
        for number, stream in enumerate(streams):
            texts[number] += "".join(choice["text"] for event in stream for choice in event["choices"])
            assert stream.ended_well
            stream.close()
        assert texts == [right] * 3
        assert server.process.wait(10) == 0
        assert "Traceback" not in server.log


def test_a_second_sigterm_ends_at_once(folder: Path) -> None:
    with Server(folder.parent, "--drafter", "none", model=folder) as server:
        stream = server.open("for long", max_tokens=LONG)
        stream.first()
        server.terminate()
        wait_for(lambda: server.get("/ready").status == 503, "it does not drain")
        assert server.process.poll() is None
        server.terminate()
        assert server.process.wait(3) == 130
        stream.close()


def ended(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flashspec.cli", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False, env=env)


def test_a_taken_port_is_told_before_anything_is_loaded(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ended("--port", str(port), "--model", str(folder))
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(port) in done.stderr
    assert "--port" in done.stderr
    assert not done.stdout


def test_an_empty_key_is_no_key(folder: Path) -> None:
    """An unset secret must not open the server."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = ("--port", str(taken.getsockname()[1]), "--model", str(folder))
        done = ended(*words, env=os.environ | {"FLASHSPEC_API_KEY": ""})
    assert done.returncode == 2

    assert "FLASHSPEC_API_KEY" in done.stderr


# an engine that fails


class Failing(ToyTarget):
    """Raises once, at the fourth token of the request whose prompt begins with 7."""

    def __init__(self, where: str, error: Exception, *, times: int = 1) -> None:
        super().__init__(memory=1)
        self.where, self.error, self.times = where, error, times

    def _raise(self, where: str, seq: Sequence) -> None:
        if where == self.where and self.times and seq.tokens[0] == 7 and seq.num_output_tokens >= 3:
            self.times -= 1
            raise self.error

    def score(self, seqs: Seq[Sequence], drafts: Seq[Draft], *, hidden: bool = False) -> list[Score]:
        for seq in seqs:
            self._raise("score", seq)
        scores = super().score(seqs, drafts, hidden=hidden)
        for seq, score in zip(seqs, scores, strict=True):
            if self.where == "nan" and seq.tokens[0] == 7 and seq.num_output_tokens >= 3:
                score.logits[:] = torch.nan
        return scores

    def keep(self, seq: Sequence, accepted: Seq[int]) -> None:
        self._raise("keep", seq)
        super().keep(seq, accepted)


@pytest.mark.parametrize("order", [(7, 3, 4), (3, 7, 4), (3, 4, 7)])
@pytest.mark.parametrize("where", ["score", "keep", "nan"])
def test_an_engine_that_raises_loses_no_other_requests_tokens(where: str, order: tuple[int, ...]) -> None:
    """Who is to blame for a failed forward pass cannot be told; for all else only the culprit fails."""
    lengths = {3: 12, 4: 4, 7: 12}  # one ends in the very step that fails
    right = {
        first: LocalEngine(ToyTarget(memory=1))
        .generate([first, 1, 2], SamplingParams(max_tokens=lengths[first]))
        .tokens
        for first in order
    }
    got: dict[str, list[int]] = {str(first): [] for first in order}
    ends: dict[str, Any] = {}

    def deliver(job: Job, chunk: Any) -> None:
        got[job.id] += chunk.tokens
        if chunk.finish_reason is not None:
            ends[job.id] = chunk.error or chunk.finish_reason

    async def main() -> None:
        worker = Worker(LocalEngine(Failing(where, RuntimeError("boom"))), Metrics(model_name="toy"))
        worker.start()
        jobs = [
            Job(str(first), Encoded([first, 1, 2], [first, 1, 2]), SamplingParams(max_tokens=lengths[first]))
            for first in order
        ]
        worker.submit(jobs, deliver)
        for _ in range(100):
            if len(ends) == 3:
                break
            await asyncio.sleep(0.02)
        assert not worker.engine.has_work
        assert not worker._jobs
        assert worker.is_alive
        worker.close()

    logging.disable()
    try:
        asyncio.run(main())
    finally:
        logging.disable(logging.NOTSET)
    assert set(ends) == set(got), "one was never told"
    failed = {name for name, end in ends.items() if isinstance(end, Exception)}
    assert len(failed) == 1
    for name in set(got) - failed:
        assert got[name] == right[int(name)]
    for name in failed:
        assert got[name] == right[int(name)][: len(got[name])]
    if where != "score":
        assert failed == {"7"}


Call = Callable[..., Awaitable[Reply]]


def in_process(target: ToyTarget, use: Callable[[Call, Service], Awaitable[None]], **settings: Any) -> None:
    """``use`` an application over an engine in this process, without a socket."""

    async def main() -> None:
        service = Service(LocalEngine(target, tokenizer=None), Settings(model_name="toy", **settings))
        app = create_app(service)

        async def call(path: str = "/v1/completions", **more: Any) -> Reply:
            data = json.dumps({"model": "toy", "max_tokens": 8, "temperature": 0, **more}).encode()
            return await asgi(app, path, [{"type": "http.request", "body": data}])

        service.worker.start()
        try:
            await use(call, service)
        finally:
            service.worker.close()

    logging.disable()
    try:
        asyncio.run(main())
    finally:
        logging.disable(logging.NOTSET)


async def asgi(app: Any, path: str, messages: list[dict[str, Any]]) -> Reply:
    """One POST; after its messages the client stays and says nothing."""
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "server": ("a", 1),
        "client": ("b", 2), "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), LIMIT)
    headers = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return Reply(sent[0]["status"], headers, b"".join(message.get("body", b"") for message in sent[1:]))


@pytest.mark.parametrize(
    ("where", "error", "status", "code"),
    [
        ("keep", RuntimeError("a secret path"), 500, "internal_error"),
        ("score", MemoryLimitError("no room for 7 more"), 503, "out_of_memory"),
        ("nan", None, 500, "model_error"),
    ],
)
def test_failures_of_the_engine_as_answers(where: str, error: Any, status: int, code: str) -> None:
    async def use(call: Call, service: Service) -> None:
        failed, well = await asyncio.gather(call(prompt=[7, 1]), call(prompt=[3, 1]))
        if where == "score":  # the newest makes room
            failed, well = sorted((failed, well), key=lambda reply: -reply.status)
        assert well.status == 200, well
        assert failed.status == status, failed
        assert failed.error["code"] == code
        assert failed.error["type"] == "server_error"
        assert "secret" not in failed.error["message"]
        assert not PYTHON.search(failed.error["message"])
        assert ("retry-after" in failed.headers) == (status == 503)
        assert (await call(prompt=[3, 1])).status == 200
        assert not service.worker._jobs
        if where == "keep":
            service.engine.target.times = 1  # type: ignore[attr-defined]
            stream = (await call(prompt=[7, 1], stream=True)).body
            assert json.loads(stream.strip().split(b"\n\n")[-1].removeprefix(b"data: "))["error"]["code"] == code

    in_process(Failing(where, error), use)


def test_preparing_is_under_the_requests_time_and_holds_up_nobody_else() -> None:
    """A thread that makes a grammar cannot be ended; who waits for it can."""
    is_free = threading.Event()

    async def use(call: Call, service: Service) -> None:
        compiled, slow = service.engine.compile, [True]

        def compile(sampling: SamplingParams) -> Constraint | None:
            if slow.pop() if slow else False:
                is_free.wait(LIMIT)
            return compiled(sampling)

        service.engine.compile = compile  # type: ignore[method-assign]
        late, well = await asyncio.gather(call(prompt=[7, 1]), call(prompt=[3, 1]))
        is_free.set()
        assert (well.status, late.status) == (200, 504), (well, late)
        assert late.error["code"] == "timeout"
        assert late.error["message"] == "the request took longer than 2 seconds; ask for less"
        assert (await call(prompt=[7, 1])).status == 200
        assert not service.worker._jobs

    in_process(ToyTarget(memory=1), use, request_timeout=2.0)


def test_a_grammar_is_compiled_once_a_request(engine: LocalEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Constraint] = []
    compiled = GrammarCompiler.compile
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *given: made.append(compiled(*given)) or made[-1])
    service = Service(engine, Settings(model_name="tiny"))
    body = ChatRequest.model_validate(form({"enum": [12, 34]}) | {"n": 3})
    jobs = asyncio.run(service.prepared(body, "x")).jobs
    assert len(made) == 1
    first, *others = (job.constraint for job in jobs)
    one, three = engine.tokenizer.encode("1")[0], engine.tokenizer.encode("3")[0]
    assert first is not None
    first.allowed([one], EMPTY)
    for other in others:  # each is where its own output is
        assert other is not None
        assert not torch.equal(other.allowed([three], EMPTY), first.allowed([one], EMPTY))
        assert torch.equal(other.allowed([one], EMPTY), first.allowed([one], EMPTY))


def test_a_body_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.1)
    statuses: list[int] = []

    async def never(*_: object) -> None:
        raise AssertionError("half a body has been passed on")

    async def main() -> None:
        app = Gate(never, api_key=None, max_body=100, observe_status=statuses.append)
        half = {"type": "http.request", "body": b'{"a":', "more_body": True}
        reply = await asgi(app, "/v1/completions", [half])
        assert reply.status == 408
        assert reply.error["code"] == "timeout"
        left = await_gone(app, [half, {"type": "http.disconnect"}])
        await asyncio.wait_for(left, LIMIT)

    async def await_gone(app: Any, messages: list[dict[str, Any]]) -> None:
        with pytest.raises(IndexError):  # nothing is sent to who has left
            await asgi(app, "/v1/completions", messages)

    asyncio.run(main())
    assert statuses == [408, 499]


# the log


def test_the_log_is_json_and_keeps_secrets(server: Server, plain: Server) -> None:
    secret = "Ottokar's treasure 🎉"
    asked = {"prompt": secret, "max_tokens": 3, "user": 'ann "\n', "temperature": 0}
    for each in (server, plain):
        reply = each.request("POST", "/v1/completions", {"model": each.model, **asked}, {"X-Request-ID": "logged-1"})
        assert reply.status == 200
        wait_for(lambda each=each: any(r.get("request_id") == "logged-1" for r in each.records), "it is not logged")
        (line,) = [record for record in each.records if record.get("request_id") == "logged-1"]
        assert (line["status"], line["method"], line["path"]) == (200, "POST", "/v1/completions")
        assert (line["prompt_tokens"], line["completion_tokens"]) == (reply.json["usage"]["prompt_tokens"], 3)
        assert line["answer_id"] == reply.json["id"]
        assert line["user"] == 'ann "\n'
        assert line["seconds"] > 0
    assert secret not in server.log
    assert "Ottokar" not in server.log
    assert secret in plain.log
    assert "key-1" not in plain.log
    failed = server.request("POST", "/v1/completions", b"{", {"X-Request-ID": "logged-2"})
    assert failed.status == 400
    wait_for(lambda: "logged-2" in server.log, "it is not logged")
    assert [record["status"] for record in server.records if record.get("request_id") == "logged-2"] == [400]
    lines = server.log.splitlines()
    assert [line for line in lines if not line.startswith("{")] == [], "every line is JSON"


def test_a_text_log_has_one_line_a_request(narrow: Server) -> None:
    narrow.request("GET", "/v1/a%0Aforged%0Dline")
    narrow.complete(user="ann\nforged line\x1b[31m")
    time.sleep(0.1)
    assert not any(line.startswith("forged") for line in narrow.log.splitlines())
    assert "\x1b" not in narrow.log


# schemathesis


def test_schemathesis_finds_no_hole(server: Server) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{server.port}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/chat/completions", "/v1/completions", "/v1/models"}
    statuses, before = set(), server.log.count("Traceback")
    for operation in operations:
        modes = [schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE]
        for mode in modes[: 2 if operation.path.endswith("completions") else 1]:

            @given(case=operation.as_strategy(generation_mode=mode))
            @examples(
                max_examples=25, deadline=None, database=None, derandomize=True,
                suppress_health_check=list(HealthCheck),
            )  # fmt: skip
            def attack(case: Any) -> None:
                if isinstance(case.body, dict):  # else nearly all would end at the model's name
                    case.body |= {"max_tokens": 2, "max_completion_tokens": 1} if "messages" in case.body else {}
                    case.body |= {"max_tokens": 2} if isinstance(case.body.get("max_tokens", 1), int) else {}
                    case.body |= {"model": server.model} if isinstance(case.body.get("model"), str) else {}
                    case.body |= {"min_tokens": 0} if isinstance(case.body.get("min_tokens"), int) else {}
                response = case.call(timeout=LIMIT)
                statuses.add(response.status_code)
                headers = {name.lower(): values[0] for name, values in response.headers.items()}
                reply = Reply(response.status_code, headers, response.content)
                assert reply.status < 500 or reply.status == 503, (case.body, reply)
                if reply.status >= 400:
                    assert reply.error

            attack()
    assert {200, 400} <= statuses
    assert server.log.count("Traceback") == before


# metrics


def test_metrics_have_their_names(server: Server) -> None:
    found: dict[str, set[str]] = {}
    for name, labels in server.metrics():
        found.setdefault(name.removeprefix("flashspec:"), set()).update(label for label, _ in labels)
    late = {"requests_total", "spec_decode_num_accepted_tokens_per_pos_total"}
    assert {name: labels for name, labels in SERIES.items() if name not in late} == {
        name: labels for name, labels in found.items() if name not in late
    }
    assert set(COUNTERS) <= set(found)
    assert all(found[name] == SERIES[name] for name in late)


def test_metrics_count_what_happened(server: Server) -> None:
    before = server.metrics()
    asked = {"max_tokens": 40, "n": 2, "speculative": {"include_metrics": True}, "ignore_eos": True}
    reply = server.complete("count this one", **asked)
    assert server.complete(foo=1).status == 400
    server.open("leaves", max_tokens=LONG).close()
    gone(server)
    after = server.metrics()

    def more(name: str, **labels: str) -> float:
        key = (f"flashspec:{name}", frozenset(labels.items()))
        return after.get(key, 0.0) - before.get(key, 0.0)

    told = reply.json["metrics"]["speculative_decoding"]
    usage = reply.json["usage"]
    assert more("requests_total", status="200") == 1
    assert more("requests_total", status="400") == 1
    assert more("request_success_total", finished_reason="length") == 2
    assert more("prompt_tokens_total") >= usage["prompt_tokens"]
    assert more("generation_tokens_total") == more("spec_decode_num_emitted_tokens_total") >= 80
    assert more("spec_decode_num_drafts_total") >= told["num_drafts"] > 0
    assert more("spec_decode_num_accepted_tokens_total") >= told["num_accepted_tokens"] > 0
    drafted, accepted = more("spec_decode_num_draft_tokens_total"), more("spec_decode_num_accepted_tokens_total")
    assert told["num_draft_tokens"] <= drafted
    by_position = [more("spec_decode_num_accepted_tokens_per_pos_total", position=str(at)) for at in range(4)]
    assert sum(by_position) == accepted
    assert by_position == sorted(by_position, reverse=True)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "time_per_output_token"):
        assert more(f"{name}_seconds_count") == 2
    assert more("steps_total") >= 20
    assert 0 < server.value("spec_decode_draft_acceptance_rate") <= 1
    assert server.value("spec_decode_system_efficiency") > 0
    assert server.value("num_requests_running_max") == 16
    assert server.value("num_requests_waiting_max") == 256
    assert server.value("prefix_cache_bytes") > 0
    assert 0 <= server.value("kv_cache_usage_perc") <= 1


def test_prometheus_scrapes_it(server: Server, tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("prometheus is not installed")
    server.complete()
    tokens = server.value("generation_tokens_total")
    job = {"job_name": "flashspec", "static_configs": [{"targets": [f"127.0.0.1:{server.port}"]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    port = free_port()
    words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([program, *words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    query = urllib.parse.urlencode({"query": "flashspec:generation_tokens_total"})
    found: list[Any] = []

    def scraped() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query?{query}", timeout=5) as response:
                found[:] = json.load(response)["data"]["result"]
        except OSError:
            return False
        return bool(found)

    try:
        wait_for(scraped, "nothing was scraped", seconds=15)
    finally:
        process.kill()
        process.wait()
    (one,) = found
    assert one["metric"]["model_name"] == server.model
    assert float(one["value"][1]) == tokens


# the default model


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Iterator[Server]:
    options = ("--drafter", "suffix", "--max-length", "1024")
    with Server(tmp_path_factory.mktemp("real"), *options, model=None) as real:
        yield real


def test_the_default_model(real: Server, smollm2_path: Path) -> None:
    client = real.client()
    turns = [{"role": "user", "content": "Name three colours, then repeat them: red, green, blue. 你好"}]
    engine = flashspec.load(None, drafter="none", num_speculative_tokens=0, threads=1)
    for sampling in ({"max_tokens": 24}, {"max_tokens": 16, "temperature": 1.0, "seed": 5}):
        ask = Ask(turns, sampling)
        right = truth(engine, ask)
        check_whole(client, ask, real.model, right)
        check_stream(client, ask, real.model, right)
    messages: Any = [{"role": "user", "content": "What is the weather in Tokyo?"}]
    tools: Any = TOOLS
    got = client.chat.completions.create(
        model=real.model, messages=messages, tools=tools, tool_choice="required", max_tokens=120, temperature=0
    )
    (call,) = got.choices[0].message.tool_calls or []
    assert got.choices[0].finish_reason == "tool_calls"
    assert call.function.name in ("get_weather", "stop_it")  # type: ignore[union-attr]


def test_ids_are_told_to_who_asks(server: Server) -> None:
    asked = {"temperature": 0, "max_tokens": 6, "return_token_ids": True, "return_tokens_as_token_ids": True}
    whole = server.complete("hello there", logprobs=1, **asked).json["choices"][0]
    assert whole["logprobs"]["tokens"] == [f"token_id:{token}" for token in whole["token_ids"]]
    assert len(whole["token_ids"]) == 6
    pieces = [piece["choices"][0] for piece in server.open("hello there", **asked) if piece.get("choices")]
    assert [token for piece in pieces for token in piece.get("token_ids", [])] == whole["token_ids"]
    allowed = server.complete("hello there", **{**asked, "allowed_token_ids": [5, 7]}).json["choices"][0]
    assert set(allowed["token_ids"]) <= {5, 7}


def test_the_model_may_be_left_out_and_json_has_to_say_so(server: Server) -> None:
    asked = {"prompt": "hello", "max_tokens": 2, "temperature": 0}
    assert server.request("POST", "/v1/completions", asked).status == 200
    data = json.dumps(asked).encode()
    refused = server.request("POST", "/v1/completions", data, {"Content-Type": "text/plain"})
    assert (refused.status, refused.error["code"]) == (400, "invalid_content_type")
    for more in ({"stream_options": {"include_usage": True}}, {"speculative": {"include_tokens": True}}):
        assert server.request("POST", "/v1/completions", {**asked, **more}).status == 400
    both = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "max_completion_tokens": 5}
    assert server.request("POST", "/v1/chat/completions", both).error["param"] == "max_tokens"
