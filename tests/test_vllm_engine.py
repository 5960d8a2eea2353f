"""VllmEngine against the stand-in: results, counts and errors in our types, and nothing left running at the server."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import standin as says
from server_process import free_port
from vllm_process import (
    MODEL,
    NGRAM,
    TOLD,
    K,
    needs_vllm,
    nothing_left,
    num_running,
    real,
    running,
    seen,
    server_pid,
    standin,
    wait_until,
)

from flashspec.core import Chunk, Grammar, Prompt, SamplingParams, SpecStats
from flashspec.errors import EngineLostError, FlashSpecError, OptionError, PromptError
from flashspec.vllm.engine import VllmEngine, merge_told
from flashspec.vllm.process import ServerProcess
from flashspec.vllm.scrape import Snapshot

pytestmark = pytest.mark.usefixtures(nothing_left.__name__)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It drafts, and tells each request's counts."""
    with running(standin(tmp_path_factory.mktemp("server"), *NGRAM, *TOLD)) as process:
        yield process


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It drafts, and has counters only."""
    with running(standin(tmp_path_factory.mktemp("silent"), *NGRAM)) as process:
        yield process


@pytest.fixture
def engine(server: ServerProcess) -> VllmEngine:
    return VllmEngine(server.url)


def expected(prompt: Prompt, **sampling: Any) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason, straight from the stand-in's rules."""
    where = "messages" if isinstance(prompt, list) and isinstance(prompt[0], dict) else "prompt"
    tokens, reason = says.output({where: prompt, "temperature": 0, "max_tokens": 256} | sampling)
    return tokens, "".join(map(says.piece, tokens)), reason


def drafted(tokens: list[int]) -> SpecStats:
    """What the stand-in has counted for them."""
    accepted = says.steps(tokens, K)
    stats = SpecStats(len(accepted), K * len(accepted), sum(accepted))
    stats.num_accepted_tokens_per_pos = [sum(n > i for n in accepted) for i in range(max(accepted))]
    stats.num_emitted_tokens = len(tokens)
    return stats


def is_idle(process: ServerProcess) -> bool:
    return num_running(process.url) == 0


# results


@pytest.mark.parametrize("prompt", ["Why is the sky blue?", [5, 6, 700, 8], CHAT], ids=["text", "ids", "chat"])
def test_a_result_is_what_the_server_says(engine: VllmEngine, prompt: Any) -> None:
    tokens, text, reason = expected(prompt)
    assert reason == "stop"
    result = engine.generate(prompt)
    assert (result.tokens, result.text, result.finish_reason) == (tokens, text, "stop")
    assert len(result.kinds) == len(tokens)
    assert result.kinds.count("recovered") == len(says.steps(tokens, K))
    assert result.logprobs is None
    assert result.stats == drafted(tokens)


def test_a_text_and_its_ids_are_the_same_prompt(engine: VllmEngine) -> None:
    ids = list(b"the same")
    assert engine.generate("the same").tokens == engine.generate(ids).tokens == expected("the same")[0]


def test_a_stream_comes_in_the_servers_pieces(engine: VllmEngine) -> None:
    tokens, text, _ = expected("stream", max_tokens=20, ignore_eos=True)
    chunks = list(engine.stream("stream", SamplingParams(max_tokens=20, ignore_eos=True)))
    assert [token for chunk in chunks for token in chunk.tokens] == tokens
    assert "".join(chunk.text for chunk in chunks) == text
    assert [len(chunk.tokens) for chunk in chunks[:-1]] == [n + 1 for n in says.steps(tokens, K)]
    assert all(len(chunk.tokens) == len(chunk.pieces) == len(chunk.kinds) for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_many_at_once_keep_their_order(engine: VllmEngine) -> None:
    prompts = [f"prompt {i}" for i in range(24)]
    results = engine.generate(prompts, [SamplingParams(max_tokens=4 + i) for i in range(24)])
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        tokens, text, reason = expected(prompt, max_tokens=4 + i)
        assert (result.tokens, result.text, result.finish_reason) == (tokens, text, reason)
    total = SpecStats()
    for result in results:
        total.merge(result.stats)
    assert engine.stats() == total
    assert not engine.has_work


def test_lists_are_answered_by_lists(engine: VllmEngine) -> None:
    assert engine.generate([]) == []
    assert [result.tokens for result in engine.generate(["one"])] == [expected("one")[0]]
    assert [result.tokens for result in engine.generate([CHAT, CHAT])] == [expected(CHAT)[0]] * 2
    assert [result.tokens for result in engine.generate([[1, 2], [3]])] == [expected([1, 2])[0], expected([3])[0]]
    with pytest.raises(OptionError, match="2 sampling parameters for 1 prompts"):
        engine.generate(["one"], [LONG, LONG])


def test_streams_may_be_read_in_turns(engine: VllmEngine) -> None:
    prompts = ["one", "two", "three"]
    streams = [engine.stream(prompt) for prompt in prompts]
    got: list[list[int]] = [[] for _ in prompts]
    left = set(range(3))
    while left:
        for i in sorted(left):
            chunk = next(streams[i], None)
            if chunk is None:
                left.discard(i)
            else:
                got[i] += chunk.tokens
    assert got == [expected(prompt)[0] for prompt in prompts]


def test_steps_give_all_requests_chunks(engine: VllmEngine) -> None:
    names = {engine.add(prompt): expected(prompt) for prompt in ("a", "b", "c")}
    chunks: dict[str, list[Chunk]] = {name: [] for name in names}
    while engine.has_work:
        for chunk in engine.step():
            chunks[chunk.request_id].append(chunk)
    for name, (tokens, text, reason) in names.items():
        assert [token for chunk in chunks[name] for token in chunk.tokens] == tokens
        assert "".join(chunk.text for chunk in chunks[name]) == text
        assert chunks[name][-1].finish_reason == reason
    assert engine.step() == []


def test_a_slow_reader_loses_nothing(engine: VllmEngine) -> None:
    """All has come and the server has hung up long before it is read."""
    stream = engine.stream("slow reader", SamplingParams(max_tokens=12, ignore_eos=True))
    got = []
    for chunk in stream:
        got.append(chunk)
        time.sleep(0.1)
    assert [token for chunk in got for token in chunk.tokens] == expected(
        "slow reader", max_tokens=12, ignore_eos=True
    )[0]
    assert got[-1].finish_reason == "length"


def test_timings(engine: VllmEngine) -> None:
    began = time.perf_counter()
    name = engine.add("timings", LONG)
    stats, timings = engine.progress(name)
    for _ in engine.chunks(name):
        time.sleep(0.01)  # what the reader takes is not the server's
    ended = time.perf_counter()
    assert began <= timings.arrival < timings.started <= timings.first_token < timings.last_token < ended
    assert timings.num_output_tokens == 200
    assert 0 < timings.ttft < timings.total < ended - began
    assert timings.tokens_per_second > 200 / (ended - began)
    assert stats == drafted(expected("timings", max_tokens=200, ignore_eos=True)[0])


# counts where a request does not tell its own


def test_counters_stand_in_for_one_requests_counts(silent: ServerProcess) -> None:
    engine = VllmEngine(silent.url)
    for prompt in ("first", "second"):
        assert engine.generate(prompt).stats == drafted(expected(prompt)[0])


def test_counters_are_the_engines_where_several_run(silent: ServerProcess) -> None:
    engine = VllmEngine(silent.url)
    prompts = [f"several {i}" for i in range(6)]
    results = engine.generate(prompts)
    total = SpecStats()
    for prompt in prompts:
        total.merge(drafted(expected(prompt)[0]))
    assert engine.stats() == total
    assert all(result.stats.num_drafts == 0 for result in results)  # whose they are cannot be known
    assert [result.stats.num_emitted_tokens for result in results] == [len(result.tokens) for result in results]


def test_a_server_that_does_not_draft(tmp_path: Path) -> None:
    with running(standin(tmp_path)) as process:
        engine = VllmEngine(process.url)
        result = engine.generate("plain")
    assert result.tokens == expected("plain")[0]
    assert result.stats == SpecStats(num_emitted_tokens=len(result.tokens))


# sampling parameters


@pytest.mark.parametrize("prompt", ["log", CHAT], ids=["text", "chat"])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 20])
def test_logprobs_are_the_likeliest_first(engine: VllmEngine, prompt: Any, count: int) -> None:
    result = engine.generate(prompt, SamplingParams(max_tokens=9, logprobs=count))
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == result.tokens == expected(prompt, max_tokens=9)[0]
    for entry in result.logprobs:
        right = sorted([(entry.token, -1.0), *says.logprobs_of(entry.token, 20)[1:]], key=lambda pair: -pair[1])
        assert entry.logprob == -1.0
        assert entry.top == right[: min(count, len(right))]


def test_stop_strings_cut_the_text(engine: VllmEngine) -> None:
    _, text, _ = expected("stop here", ignore_eos=True)
    stop = text.split()[6]
    result = engine.generate("stop here", SamplingParams(stop=("never", stop), ignore_eos=True))
    assert result.finish_reason == "stop"
    assert result.text == text[: text.index(stop)]


def test_seeds(engine: VllmEngine) -> None:
    def tokens(seed: int | None) -> list[int]:
        return engine.generate("dice", SamplingParams(temperature=1.0, seed=seed)).tokens

    assert tokens(1) == tokens(1) == expected("dice", temperature=1.0, seed=1)[0]
    assert tokens(2) == expected("dice", temperature=1.0, seed=2)[0] != tokens(1)
    assert tokens(None) != tokens(None)


SENT: dict[str, tuple[Any, str, Any]] = {  # field: its value, the API's name, what is sent
    "temperature": (0.5, "temperature", 0.5),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (7, "top_k", 7),
    "min_p": (0.1, "min_p", 0.1),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (0.25, "frequency_penalty", 0.25),
    "logit_bias": ({5: -100.0, 6: 2.0}, "logit_bias", {"5": -100.0, "6": 2.0}),
    "allowed_tokens": ((5, 6), "allowed_token_ids", [5, 6]),
    "min_tokens": (3, "min_tokens", 3),
    "max_tokens": (11, "max_tokens", 11),
    "stop": (("a", "b"), "stop", ["a", "b"]),
    "seed": (0, "seed", 0),
    "ignore_eos": (True, "ignore_eos", True),
    "logprobs": (3, "logprobs", 3),
    "grammar": (
        Grammar("json_schema", '{"type": "object"}'), "response_format",
        {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}},
    ),
}  # fmt: skip
REFUSED: dict[str, Any] = {"bad_tokens": (5,), "grammar": Grammar("regex", "a*")}
NOT_SENT = {"verification"}  # the server's own affair: all of them are exact


def test_every_sampling_parameter_is_sent_or_refused() -> None:
    assert SENT.keys() | REFUSED.keys() | NOT_SENT == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("field", SENT)
def test_a_sampling_parameter_arrives(tmp_path: Path, server: ServerProcess, field: str) -> None:
    value, name, sent = SENT[field]
    engine = VllmEngine(server.url)
    with contextlib.suppress(OptionError):  # some are not for servers that draft
        engine.generate(f"arrives {field}", SamplingParams(**{field: value}))
    body = seen(server.url)[-1]["body"]
    assert body["prompt"] == f"arrives {field}"
    assert body[name] == sent


@pytest.mark.parametrize("field", REFUSED)
def test_a_sampling_parameter_is_refused(engine: VllmEngine, field: str) -> None:
    with pytest.raises(OptionError, match="cannot be sent to vLLM"):
        engine.add("x", SamplingParams(**{field: REFUSED[field]}))
    assert not engine.has_work


def test_neutral_values_are_sent(engine: VllmEngine, server: ServerProcess) -> None:
    """Where they are left out vLLM takes what the model's generation_config.json says."""
    engine.generate("neutral")
    body = seen(server.url)[-1]["body"]
    neutral = {
        "temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "max_tokens": 256,
    }  # fmt: skip
    assert neutral.items() <= body.items()
    assert not {"seed", "logit_bias", "stop", "logprobs", "response_format", "allowed_token_ids"} & body.keys()


# what can be wrong


def test_an_empty_prompt(engine: VllmEngine) -> None:
    for prompt in ("", []):
        with pytest.raises(PromptError, match="empty"):
            engine.add(prompt)


@pytest.mark.parametrize("sampling", [{"min_p": 0.1}, {"logit_bias": {1: 1.0}}], ids=["min_p", "logit_bias"])
def test_what_vllm_refuses_is_told_in_its_words(engine: VllmEngine, sampling: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"not yet supported with speculative decoding\. \(400\)"):
        engine.generate("x", SamplingParams(**sampling))
    assert engine.generate("x").tokens == expected("x")[0]  # and the engine goes on


def test_a_prompt_that_is_too_long(engine: VllmEngine) -> None:
    with pytest.raises(OptionError, match="maximum context length is 1024"):
        engine.generate([5] * 2000)


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_server(engine: VllmEngine, status: int) -> None:
    with pytest.raises(EngineLostError, match=rf"busy or shutting down \({status}\): The engine takes no more"):
        engine.generate(f"[{status}]")


def test_wrong_addresses(tmp_path: Path) -> None:
    with pytest.raises(EngineLostError, match=r"nothing answers at http://127\.0\.0\.1:\d+ .*is the server running"):
        VllmEngine(f"127.0.0.1:{free_port()}")
    for url in ("ftp://localhost", "http://", "http://localhost:99999", "http://localhost:x", ""):
        with pytest.raises(OptionError, match="give one like http://127"):
            VllmEngine(url)


def test_addresses_may_end_like_openais(server: ServerProcess) -> None:
    for url in (f"{server.url}/", f"{server.url}/v1", f"{server.url}/v1/"):
        assert VllmEngine(url).model == MODEL


@pytest.mark.parametrize("body", [b"hello", b"{}", b'{"data": []}', b'{"data": [1]}', b"[]", b'"x"'])
def test_another_kind_of_server(body: bytes) -> None:
    with tiny_server(answer(body)) as url, pytest.raises(OptionError, match=r"no OpenAI-compatible API|names no model"):
        VllmEngine(url)


def test_https_where_http_is_spoken() -> None:
    for read in (VllmEngine, Snapshot.read):
        with tiny_server(answer(b"{}")) as url, pytest.raises(EngineLostError, match="is it http:// there"):
            read(url.replace("http://", "https://"))


def test_something_that_does_not_speak_http() -> None:
    with tiny_server(b"SSH-2.0-OpenSSH\r\n\r\n") as url, pytest.raises(EngineLostError, match="was lost"):
        VllmEngine(url)


def test_keys(tmp_path: Path) -> None:
    with running(standin(tmp_path, env={"VLLM_API_KEY": "secret"})) as process:
        for key in (None, "wrong"):
            with pytest.raises(OptionError, match=r"refuses the API key \(Unauthorized\); give it with --api-key"):
                VllmEngine(process.url, api_key=key)
        engine = VllmEngine(process.url, api_key="secret")
        assert engine.generate("x").tokens == expected("x")[0]
        assert engine.speaks_chat


def test_a_wrong_model(server: ServerProcess) -> None:
    with pytest.raises(OptionError, match=r"has no model 'other'; it has m$"):
        VllmEngine(server.url, model="other")
    assert VllmEngine(server.url, model=MODEL).model == MODEL


def test_a_model_that_has_gone_since(engine: VllmEngine) -> None:
    engine.model = "gone"
    with pytest.raises(OptionError, match=r"The model `gone` does not exist\. \(404\)"):
        engine.generate("x")


def test_chat_templates_are_asked_for_once(engine: VllmEngine, server: ServerProcess) -> None:
    assert engine.speaks_chat
    count = len(seen(server.url))
    assert engine.speaks_chat
    assert len(seen(server.url)) == count


# what can go wrong on the way


def test_a_server_that_is_killed_in_mid_stream(tmp_path: Path) -> None:
    with running(standin(tmp_path, *NGRAM, env={"STANDIN_STEP": "0.02"})) as process:
        engine = VllmEngine(process.url)
        others = [engine.stream(f"other {i}", LONG) for i in range(3)]
        stream = engine.stream("[die-mid-stream]", LONG)
        got: list[int] = []
        with pytest.raises(EngineLostError, match=r"was lost|mid-stream"):
            got.extend(token for chunk in stream for token in chunk.tokens)
        assert got == expected("[die-mid-stream]", max_tokens=200, ignore_eos=True)[0][: len(got)]
        assert got
        for other in others:
            with pytest.raises(EngineLostError):
                list(other)
        assert not engine.has_work
        with pytest.raises(EngineLostError, match="nothing answers"):
            engine.generate("x")


def test_a_server_that_hangs(server: ServerProcess) -> None:
    engine = VllmEngine(server.url, silence=0.4)
    started = time.monotonic()
    with pytest.raises(EngineLostError, match=r"has said nothing for 0\.4 s; is it hung\?"):
        engine.generate("[hang-mid-stream]", LONG)
    assert time.monotonic() - started < 5
    wait_until(lambda: is_idle(server))


def test_a_server_that_never_answers() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as deaf,
        pytest.raises(EngineLostError, match="said nothing for"),
    ):
        VllmEngine(f"http://127.0.0.1:{deaf.getsockname()[1]}", silence=0.3)


def test_a_text_that_is_cut_off_is_no_answer(engine: VllmEngine) -> None:
    with pytest.raises(EngineLostError, match=r"cut the text off \(abort\)"):
        engine.generate("[abort]", LONG)
    assert engine.generate("x").tokens == expected("x")[0]


def test_sigterm_at_the_server_is_no_answer(tmp_path: Path) -> None:
    with running(standin(tmp_path, env={"STANDIN_STEP": "0.05"})) as process:
        stream = VllmEngine(process.url).stream("x", LONG)
        next(stream)
        os.kill(server_pid(process), signal.SIGTERM)
        with pytest.raises(EngineLostError, match=r"cut the text off \(abort\)"):
            list(stream)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([{"error": {"message": "EngineCore died", "code": 500}}], "EngineCore died"),
        ([{"error": "no dict"}], "no dict"),
        ([{"choices": [{"text": "a"}]}], "mid-stream"),
        (["{"], "cannot be understood"),
        ([{"choices": [5]}], "cannot be understood"),
        ([[]], "cannot be understood"),
    ],
)
def test_streams_that_are_not_right(server: ServerProcess, events: list[Any], message: str) -> None:
    lines = [f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events]
    with tiny_server(answer("".join(lines).encode(), "text/event-stream")) as url:
        engine = VllmEngine(server.url)
        engine.url, engine._where = url, urlsplit(url)
        with pytest.raises(EngineLostError, match=message):
            engine.generate("x")


# what nobody waits for


def test_abort_frees_the_servers_request(engine: VllmEngine, server: ServerProcess) -> None:
    name = engine.add("[slow] abort", LONG)
    wait_until(lambda: not is_idle(server))
    engine.abort(name)
    wait_until(lambda: is_idle(server))
    assert seen(server.url)[-1]["end"] == "gone"
    assert not engine.has_work
    engine.abort(name)  # twice is no error, nor is one that never was
    engine.abort("?")


def test_abort_in_the_middle_of_others(engine: VllmEngine, server: ServerProcess) -> None:
    names = [engine.add(f"middle {i}") for i in range(3)]
    engine.abort(names[1])
    results: dict[str, list[int]] = {}
    while engine.has_work:
        for chunk in engine.step():
            results.setdefault(chunk.request_id, []).extend(chunk.tokens)
    assert results == {names[i]: expected(f"middle {i}")[0] for i in (0, 2)}


def test_abort_at_once_however_far_it_has_come(engine: VllmEngine, server: ServerProcess) -> None:
    """Before it has connected, before it is sent, before it is answered."""
    for i in range(20):
        name = engine.add(f"[slow] at once {i}", LONG)
        time.sleep(i * 0.0005)
        engine.abort(name)
    wait_until(lambda: is_idle(server))
    assert engine.generate("x").tokens == expected("x")[0]
    ends = [entry["end"] for entry in seen(server.url) if "at once" in str(entry["body"].get("prompt"))]
    assert set(ends) <= {"gone"}


@pytest.mark.parametrize("how", ["close", "drop", "never read", "break"])
def test_streams_that_are_let_go_are_aborted(engine: VllmEngine, server: ServerProcess, how: str) -> None:
    stream: Any = engine.stream(f"{how} [slow]", LONG)
    if how != "never read":
        next(stream)
    wait_until(lambda: not is_idle(server))
    if how == "close":
        stream.close()
    elif how == "break":
        for _ in stream:
            break
    stream = None
    gc.collect()
    wait_until(lambda: is_idle(server))
    assert not engine.has_work


def test_what_was_begun_is_ended_when_another_prompt_is_refused(engine: VllmEngine, server: ServerProcess) -> None:
    with pytest.raises(OptionError, match="bad_tokens"):
        engine.generate(["[slow] fine", "refused"], [LONG, SamplingParams(bad_tokens=(1,))])
    assert not engine.has_work
    wait_until(lambda: is_idle(server))


def test_hanging_up_where_a_server_closes_after_its_answer() -> None:
    """http.client forgets its socket where the answer says Connection: close."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    first = b'data: {"choices": [{"text": "a", "token_ids": [1]}]}\n\n'
    models = answer(b'{"data": [{"id": "m"}]}')
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(10)
        gone = threading.Event()

        def serve() -> None:
            for reply in (models, answer(b"", status=404), head + first):
                connection, _ = listening.accept()
                with connection:
                    connection.settimeout(10)
                    connection.recv(65536)
                    connection.sendall(reply)
                    if reply.startswith(head):
                        while connection.recv(65536):
                            pass
                        gone.set()

        thread = threading.Thread(target=serve)
        thread.start()
        engine = VllmEngine(f"http://127.0.0.1:{listening.getsockname()[1]}")
        stream = engine.stream("x")
        assert next(stream).tokens == [1]
        stream.close()
        assert gone.wait(5)
        thread.join(5)


# a server of a few bytes


def answer(body: bytes, kind: str = "application/json", *, status: int = 200) -> bytes:
    head = f"HTTP/1.1 {status} ?\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


@contextlib.contextmanager
def tiny_server(reply: bytes) -> Iterator[str]:
    """Says the same to everybody."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.05)
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = listening.accept()
                    with connection:
                        connection.settimeout(5)
                        connection.recv(65536)
                        connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            thread.join()


# the same with the real one


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    with running(real(tmp_path_factory.mktemp("vllm"), *NGRAM, *TOLD)) as process:
        yield VllmEngine(process.url)


@pytest.mark.vllm
@pytest.mark.timeout(600)
@needs_vllm
@pytest.mark.parametrize(
    "prompt", ["Count: 1, 2, 3, 4, 5, 6,", list(range(100, 120)), CHAT], ids=["text", "ids", "chat"]
)
def test_vllm_streams_what_it_says_whole(vllm: VllmEngine, prompt: Any) -> None:
    sampling = SamplingParams(max_tokens=24, logprobs=3)
    result = vllm.generate(prompt, sampling)
    path, body = vllm._body(prompt, sampling)
    whole = vllm._asked("POST", path, body | {"stream": False, "stream_options": None})
    (choice,) = whole["choices"]
    assert result.text == (choice["text"] if "text" in choice else choice["message"]["content"])
    assert result.tokens == choice["token_ids"]
    assert result.finish_reason == choice["finish_reason"]
    told = whole["metrics"]["speculative_decoding"]
    assert result.stats.num_drafts == told["num_spec_steps"]
    assert result.stats.num_accepted_tokens == told["num_accepted_draft_tokens"]
    assert sum(result.stats.num_accepted_tokens_per_pos) == result.stats.num_accepted_tokens
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == result.tokens
    for entry in result.logprobs:  # greedy: the token itself is the likeliest
        assert len(entry.top) == 3
        assert entry.top[0][0] == entry.token
        assert math.isclose(entry.top[0][1], entry.logprob)


@pytest.mark.vllm
@pytest.mark.timeout(600)
@needs_vllm
def test_vllm_frees_what_is_aborted(vllm: VllmEngine) -> None:
    stream = vllm.stream("Once upon a time", SamplingParams(max_tokens=900, ignore_eos=True))
    next(stream)
    assert num_running(vllm.url) == 1
    stream.close()
    wait_until(lambda: num_running(vllm.url) == 0)


@pytest.mark.vllm
@pytest.mark.timeout(600)
@needs_vllm
def test_vllm_refuses_in_words(vllm: VllmEngine) -> None:
    with pytest.raises(FlashSpecError, match="min_p and logit_bias"):
        vllm.generate("x", SamplingParams(min_p=0.1, temperature=1.0))  # greedy decoding has no use for it
    with pytest.raises(FlashSpecError, match="1024"):
        vllm.generate([5] * 2000)


def test_rates_by_position_are_left_out_where_a_server_does_not_tell_how_far_drafts_came() -> None:
    stats = SpecStats()
    told = {"num_spec_steps": 3, "num_draft_tokens": 15, "num_accepted_draft_tokens": 9}
    merge_told(stats, {**told, "acceptance_histogram": [0, 0, 1, 1, 1]})
    assert stats.num_accepted_tokens_per_pos == [3, 3, 2, 1]
    assert stats.acceptance_by_position == []
    stats.merge(SpecStats(1, 2, 1, [1], [1, 1]))  # and none of it in between
    assert stats.acceptance_by_position == []
