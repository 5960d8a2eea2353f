"""``flashspec serve`` as a process of its own, a tiny model for it, and its answers next to the engine's."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flashspec.core import SamplingParams, TokenLogprob
from flashspec.engine import LocalEngine

LIMIT = 60.0  # seconds that anything may take on a busy machine
CYCLE = 16
HIDDEN = 64
PEAK = 12.5  # the logit of the likely next token: about half of the probability
NOT_OPENAIS = {"top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"}


def make_tiny(folder: Path, tokenizer_path: Path, *, max_length: int = 4096) -> Path:
    """A random Llama with SmolLM2's tokenizer whose likely texts repeat, so that drafts are accepted and refused."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=HIDDEN, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=max_length, eos_token_id=2,
        bos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        embedding = torch.nn.functional.normalize(torch.randn(len(tokenizer), HIDDEN), dim=-1)
        model.model.embed_tokens.weight.copy_(embedding)
        tokens = torch.arange(len(tokenizer))
        following = tokens // CYCLE * CYCLE + (tokens + 1) % CYCLE  # rounds of 16 tokens
        model.lm_head.weight[following] = embedding * (PEAK / HIDDEN**0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class Reply:
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error that it must be, in OpenAI's format."""
        assert self.headers["content-type"].startswith("application/json"), self
        told = self.json
        assert set(told) == {"error"}, self
        assert set(told["error"]) == {"message", "type", "param", "code"}, self
        assert isinstance(told["error"]["message"], str), self
        assert told["error"]["message"], self
        assert isinstance(told["error"]["type"], str), self
        found: dict[str, Any] = told["error"]
        return found


class Server:
    """A server process with ``options``; it is ready when the block begins and dead when it ends."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        model: Path | None,
        key: str | None = None,
        speculate: int | None = 4,
        env: dict[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self.model = "SmolLM2-135M-Instruct" if model is None else model.name
        self.key = key
        self._opened: list[Any] = []  # clients and connections, to be closed with it
        self._log = folder / f"server-{self.port}.log"
        words = [sys.executable, "-m", "flashspec.cli", "serve", "--port", str(self.port), "--threads", "1", *options]
        words += [] if model is None else ["--model", str(model)]
        words += [] if speculate is None else ["--num-speculative-tokens", str(speculate)]
        words += [] if key is None else ["--api-key", key]
        with self._log.open("wb") as log:
            env = os.environ | {"OMP_NUM_THREADS": "1"} | (env or {})
            self.process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)

    def __enter__(self) -> Server:
        try:
            wait_for(self.is_ready, "the server is not ready", server=self)
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT)
        for each in self._opened:
            each.close()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.log
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.get("/ready").status == 200
        return False

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def records(self) -> list[dict[str, Any]]:
        """The lines of a JSON log, from where the server was ready."""
        lines = self.log.splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def client(self, **more: Any) -> openai.OpenAI:
        given = {"api_key": self.key or "-", "max_retries": 0, "timeout": LIMIT} | more
        self._opened.append(openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", **given))
        return self._opened[-1]

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)

    def request(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Reply:
        """One request; a body that is not bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection = self.connect()
        try:
            connection.request(method, path, data, self._headers(headers))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, headers=headers)

    def complete(self, prompt: Any = "hello", **more: Any) -> Reply:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0} | more
        return self.request("POST", "/v1/completions", body)

    def chat(self, text: str = "hello", **more: Any) -> Reply:
        messages = [{"role": "user", "content": text}]
        body = {"model": self.model, "messages": messages, "max_tokens": 8, "temperature": 0} | more
        return self.request("POST", "/v1/chat/completions", body)

    def open(self, prompt: Any = "hello", **more: Any) -> Stream:
        """A stream of a completion, of which nothing has been read yet."""
        body = {"model": self.model, "prompt": prompt, "stream": True, "temperature": 0, "ignore_eos": True} | more
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), self._headers(None))
        self._opened.append(Stream(connection))
        return self._opened[-1]

    def raw(self, data: bytes, *, seconds: float = LIMIT) -> bytes:
        """All that is answered to some bytes, until the server closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=seconds) as sock:
            sock.sendall(data)
            parts = []
            while part := sock.recv(65536):
                parts.append(part)
            return b"".join(parts)

    def metrics(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """Samples by name and labels, without those that all have."""
        text = self.get("/metrics").body.decode()
        found = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
                assert sample.labels["model_name"] == self.model
                found[sample.name, frozenset(labels.items())] = sample.value
        return found

    def value(self, name: str, **labels: str) -> float:
        return self.metrics().get((f"flashspec:{name}", frozenset(labels.items())), 0.0)

    def load(self) -> tuple[int, int]:
        """Requests that run and that wait."""
        found = self.metrics()
        running, waiting = (found[f"flashspec:num_requests_{name}", frozenset()] for name in ("running", "waiting"))
        return int(running), int(waiting)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def _headers(self, more: dict[str, str] | None) -> dict[str, str]:
        own = {"Content-Type": "application/json"}
        if self.key is not None:
            own["Authorization"] = f"Bearer {self.key}"
        return own | (more or {})


class Stream:
    """Server-sent events as they come."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self.connection = connection
        self._response: http.client.HTTPResponse | None = None
        self.ended_well = False

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._response is None:
            self._response = self.connection.getresponse()
        assert self._response.status == 200, self._response.read()
        while line := self._response.readline():
            data = line.strip().removeprefix(b"data: ")
            if data == b"[DONE]":
                self.ended_well = True
            elif data:
                yield json.loads(data)
        self.close()

    def first(self) -> dict[str, Any]:
        return next(iter(self))

    def close(self) -> None:
        """Leave, without a word."""
        if self._response is not None:
            self._response.close()
        self.connection.close()


def wait_for(condition: Any, what: str, *, seconds: float = LIMIT, server: Server | None = None) -> float:
    """Until it is true; the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what}\n{'' if server is None else server.log[-3000:]}"
        time.sleep(0.03)
    return time.monotonic() - started


# the same request for the server and for the engine


@dataclass(frozen=True)
class Ask:
    """A request in the engine's words. A text is completed, messages are answered."""

    prompt: str | list[int] | list[dict[str, str]]
    sampling: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    speculative: dict[str, Any] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], dict)

    def spoken(self, model: str) -> dict[str, Any]:
        """Arguments of the official client."""
        given = {"temperature": 0.0} | self.sampling
        more = {name: given.pop(name) for name in NOT_OPENAIS & set(given)}
        if "logit_bias" in given:
            given["logit_bias"] = {str(token): bias for token, bias in given["logit_bias"].items()}
        if "logprobs" in given and self.is_chat:
            given["top_logprobs"], given["logprobs"] = given["logprobs"], True
        where = "messages" if self.is_chat else "prompt"
        more["speculative"] = self.speculative
        return {"model": model, where: self.prompt, "n": self.n, **given, "extra_body": more}


@dataclass
class Answer:
    """What became of a request's choice."""

    text: str = ""
    finish_reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


def truth(engine: LocalEngine, ask: Ask) -> list[Answer]:
    """What the engine says, choice by choice."""
    answers = []
    for choice in range(ask.n):
        answer = Answer()
        name = engine.add(ask.prompt, SamplingParams(**ask.sampling), choice=choice)
        for chunk in engine.chunks(name):
            answer.text += chunk.text
            answer.tokens += chunk.tokens
            answer.logprobs += chunk.logprobs or []
            answer.finish_reason = chunk.finish_reason
        answers.append(answer)
    return answers


def create(client: openai.OpenAI, ask: Ask, model: str, **more: Any) -> Any:
    where = client.chat.completions if ask.is_chat else client.completions
    return where.create(**(ask.spoken(model) | more))


def check_whole(client: openai.OpenAI, ask: Ask, model: str, expected: Seq[Answer]) -> Any:
    """Ask for all at once and compare; the client's object."""
    got = create(client, ask, model)
    assert [choice.index for choice in got.choices] == list(range(ask.n))
    for choice, right in zip(got.choices, expected, strict=True):
        assert (choice.message.content if ask.is_chat else choice.text) == right.text
        assert choice.finish_reason == right.finish_reason
    assert got.usage.completion_tokens == sum(len(right.tokens) for right in expected)
    assert got.usage.total_tokens == got.usage.prompt_tokens + got.usage.completion_tokens
    return got


def check_stream(client: openai.OpenAI, ask: Ask, model: str, expected: Seq[Answer]) -> list[Any]:
    """Ask for a stream with its tokens and compare; the client's chunks."""
    more = ask.spoken(model)["extra_body"]
    more["speculative"] = more["speculative"] | {"include_tokens": True}
    chunks = list(create(client, ask, model, stream=True, extra_body=more))
    answers = [Answer() for _ in range(ask.n)]
    for chunk in chunks:
        for choice in chunk.choices:
            answer = answers[choice.index]
            answer.text += (choice.delta.content if ask.is_chat else choice.text) or ""
            assert answer.finish_reason is None or not choice.finish_reason
            answer.finish_reason = choice.finish_reason or answer.finish_reason
        told = (chunk.model_extra or {}).get("speculation")
        if told is not None:
            answers[told["index"]].tokens += told["tokens"]
            assert len(told["tokens"]) == len(told["kinds"]) == len(told["pieces"]) >= 1
    for answer, right in zip(answers, expected, strict=True):
        assert answer.tokens == right.tokens
        assert answer.text == right.text
        assert answer.finish_reason == right.finish_reason
    return chunks
