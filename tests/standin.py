"""A stand-in for ``vllm serve``: the same API, metrics and ways to fail, without a model, in a fraction of a second.

    python tests/standin.py serve MODEL --port 8000 --speculative-config '{"method": "ngram", ...}'

What it says is a function of the prompt, the seed and nothing else. ``STANDIN_FAULT`` names what goes wrong, with
commas between; a request whose prompt has such a name in square brackets brings it about for itself. ``/seen`` tells
what has been asked for, and what became of it. It knows the standard library and vLLM 0.32's formats.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FAULTS = {name for name in os.environ.get("STANDIN_FAULT", "").split(",") if name}
STEP = float(os.environ.get("STANDIN_STEP", "0.002"))  # seconds between two chunks
SLOW = 0.1  # seconds more, for a request that is to be slow
BEFORE_FAULT = 3  # chunks
EOS, VOCAB = 2, 500
BOUNDS = ("0.01", "0.1", "1.0", "+Inf")
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds",
)  # fmt: skip
REFUSED = "The min_p and logit_bias sampling parameters are not yet supported with speculative decoding."


# what it says


def piece(token: int) -> str:
    """A token's text; every seventh is the first half of a character, whose text comes with the next token."""
    if token == EOS or token % 7 == 0:
        return ""
    return f" é{token}" if token % 5 == 0 else f" w{token}"


def prompt_ids(body: dict[str, Any]) -> list[int]:
    """Bytes of the text, or the ids that were sent."""
    if "messages" in body:
        text = "".join(f"<{turn['role']}>{turn['content']}" for turn in body["messages"])
        return list(text.encode())
    prompt = body["prompt"]
    return list(prompt.encode()) if isinstance(prompt, str) else list(prompt)


def output(body: dict[str, Any]) -> tuple[list[int], str]:
    """The tokens of an answer, and why it ends there; stop strings aside."""
    seed = body.get("seed", random.random()) if body.get("temperature", 1.0) else 0
    rng = random.Random(f"{prompt_ids(body)} {seed}")
    most = body.get("max_tokens") or body.get("max_completion_tokens") or 16
    end = max(rng.randrange(10, 40), body.get("min_tokens") or 0)
    tokens = [rng.randrange(3, VOCAB) for _ in range(most)]
    if not body.get("ignore_eos") and end < most:
        return [*tokens[:end], EOS], "stop"
    return tokens, "length"


def steps(tokens: list[int], k: int) -> list[int]:
    """How many guesses are accepted in each step; without speculation none."""
    rng, left, found = random.Random(str(tokens)), len(tokens), []
    while left > 0:
        found.append(min(rng.randrange(k + 1), left - 1))
        left -= found[-1] + 1
    return found


def logprobs_of(token: int, count: int) -> list[tuple[int, float]]:
    """As vLLM lists them: the token itself, then the likeliest. It is the third likeliest, where there are so many."""
    others = [(token + 1, -0.5), (token + 2, -0.75), (token, -1.0), *((token + i, -float(i)) for i in range(3, 20))]
    return [(token, -1.0), *(other for other in others[:count] if other[0] != token)]


# its metrics


class Metrics:
    def __init__(self, model: str, k: int) -> None:
        self.model, self.k, self.lock = model, k, threading.Lock()
        self.counts: dict[str, float] = {}
        self.times: dict[str, list[float]] = {name: [] for name in HISTOGRAMS}
        self.running = 0

    def add(self, name: str, value: float = 1) -> None:
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + value

    def run(self, more: int) -> None:
        with self.lock:
            self.running += more

    def page(self) -> str:
        with self.lock:
            lines = []
            for name in ("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"):
                lines += self._counter(name, {"": self.counts.get(name, 0)})
            reasons = {f',finished_reason="{name}"': self.counts.get(name, 0) for name in ("stop", "length", "abort")}
            lines += self._counter("request_success", reasons)
            if self.k:
                for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
                    lines += self._counter(f"spec_decode_{name}", {"": self.counts.get(name, 0)})
                by_position = {f',position="{i}"': self.counts.get(f"pos{i}", 0) for i in range(self.k)}
                lines += self._counter("spec_decode_num_accepted_tokens_per_pos", by_position)
            gauges = {"num_requests_running": self.running, "num_requests_waiting": 0, "kv_cache_usage_perc": 0.25}
            for name, value in gauges.items():
                lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{self._labels()} {float(value)}"]
            for name, times in self.times.items():
                lines += self._histogram(name, times)
            steps = [0.0] * int(self.counts.get("steps", 0))
            return "\n".join([*lines, *self._histogram("iteration_tokens_total", steps), ""])

    def _labels(self, more: str = "") -> str:
        return f'{{engine="0",model_name="{self.model}"{more}}}'

    def _counter(self, name: str, values: dict[str, float]) -> list[str]:
        found = [f"vllm:{name}_total{self._labels(more)} {float(value)}" for more, value in values.items()]
        return [f"# HELP vllm:{name}_total Of the stand-in.", f"# TYPE vllm:{name}_total counter", *found]

    def _histogram(self, name: str, times: list[float]) -> list[str]:
        counts = [(bound, sum(value <= float(bound) for value in times)) for bound in BOUNDS]
        quoted = [(f',le="{bound}"', count) for bound, count in counts]
        found = [f"vllm:{name}_bucket{self._labels(more)} {float(count)}" for more, count in quoted]
        found += [f"vllm:{name}_count{self._labels()} {len(times)}.0", f"vllm:{name}_sum{self._labels()} {sum(times)}"]
        return [f"# TYPE vllm:{name} histogram", *found]


# its API


class ServerError(Exception):
    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


class GoneError(Exception):
    """The client has left."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.guarded(self.get)

    def do_POST(self) -> None:
        self.guarded(self.post)

    def guarded(self, work: Any) -> None:
        key = os.environ.get("VLLM_API_KEY")
        try:
            if key and self.path.startswith("/v1") and self.headers["Authorization"] != f"Bearer {key}":
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                self.answer(401, {"error": "Unauthorized"})
            else:
                work()
        except ServerError as error:
            self.answer(error.status, error.body)
        except (GoneError, OSError):
            self.close_connection = True

    def answer(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body, separators=(",", ":")).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Standin", "yes")
        self.end_headers()
        self.wfile.write(data)

    def get(self) -> None:
        server = self.server
        if self.path == "/health":
            self.answer(503 if "unhealthy" in FAULTS else 200, "")
        elif self.path == "/metrics":
            self.answer(200, server.metrics.page(), "text/plain; version=0.0.4; charset=utf-8")
        elif self.path == "/seen":
            self.answer(200, server.seen)
        elif self.path.startswith("/v1/models"):
            models = [
                {"id": name, "object": "model", "owned_by": "vllm", "max_model_len": 1024} for name in server.names
            ]
            self.answer(200, {"object": "list", "data": models})
        else:
            self.answer(404, {"detail": "Not Found"})

    def post(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"] or 0))
        try:
            body = json.loads(data)
        except ValueError as error:
            raise ServerError(400, f"JSON decode error: {error}") from error
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self.answer(404, {"detail": "Not Found"})
            return
        note = {"path": self.path, "body": body, "headers": dict(self.headers), "end": None}
        self.server.seen.append(note)
        self.server.check(body)
        answer = Output(self.server, body, is_chat="chat" in self.path)
        with self.server.counted():
            try:
                (self.stream if body.get("stream") else self.whole)(answer)
            except (GoneError, OSError):
                note["end"] = "gone"
                self.server.metrics.add("abort")
                raise
        note["end"] = answer.reason
        self.server.metrics.add(answer.reason)

    def whole(self, answer: Output) -> None:
        for _ in answer.steps(self.is_gone):
            pass
        self.answer(200, answer.whole())

    def stream(self, answer: Output) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if answer.is_chat:
            self.event(answer.opening())
        for chunk in answer.steps(self.is_gone):
            self.event(chunk)
        if (answer.body.get("stream_options") or {}).get("include_usage"):
            self.event(answer.last())
        self.event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def event(self, body: Any) -> None:
        data = f"data: {body if isinstance(body, str) else json.dumps(body, separators=(',', ':'))}\n\n".encode()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def is_gone(self) -> bool:
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)


class Output:
    """One answer, as it comes into being."""

    def __init__(self, server: Server, body: dict[str, Any], *, is_chat: bool) -> None:
        self.server, self.body, self.is_chat = server, body, is_chat
        self.tokens, self.reason = output(body)
        self.prompt = prompt_ids(body)
        self.accepted = steps(self.tokens, server.k)
        self.text, self.shown = "", 0
        self.id = "standin-1"

    def steps(self, is_gone: Any) -> Any:
        """Chunks of a stream, at the pace of a model; a client that leaves ends them."""
        began = last = time.perf_counter()
        for number, accepted in enumerate(self.accepted):
            self.fail(number, is_gone)
            if self.reason == "abort":
                yield self.chunk("", [], "abort")
                break
            time.sleep(STEP)
            if is_gone():
                raise GoneError
            now = time.perf_counter()
            self.count(accepted, now - last, is_first=number == 0)
            last = now
            chunk, is_last = self.step(accepted)
            yield chunk
            if is_last:
                break
        self.server.metrics.times["e2e_request_latency_seconds"].append(time.perf_counter() - began)

    def step(self, accepted: int) -> tuple[dict[str, Any], bool]:
        """The next chunk, and whether it is the last one."""
        tokens = self.tokens[self.shown : self.shown + accepted + 1]
        self.shown += len(tokens)
        old = self.text
        self.text += "".join(map(piece, tokens))
        is_last = self.shown == len(self.tokens)
        for stop in [self.body["stop"]] if isinstance(self.body.get("stop"), str) else self.body.get("stop") or []:
            if stop in self.text:
                self.text, self.reason, is_last = self.text.split(stop)[0], "stop", True
        self.tokens = self.tokens[: self.shown] if is_last else self.tokens
        return self.chunk(self.text[len(old) :], tokens, self.reason if is_last else None), is_last

    def fail(self, number: int, is_gone: Any) -> None:
        """What goes wrong in the middle."""
        if self.server.is_ending or (number == BEFORE_FAULT and self.has("abort")):
            self.tokens, self.reason = self.tokens[: self.shown], "abort"
        if number == BEFORE_FAULT and self.has("die-mid-stream"):
            os.kill(os.getpid(), signal.SIGKILL)
        pause = 1e6 if number == BEFORE_FAULT and self.has("hang-mid-stream") else SLOW if self.has("slow") else 0.0
        until = time.monotonic() + pause
        while time.monotonic() < until and not self.server.is_ending:
            time.sleep(0.01)
            if is_gone():
                raise GoneError

    def has(self, fault: str) -> bool:
        return fault in FAULTS or f"[{fault}]".encode() in bytes(token % 256 for token in self.prompt)

    def count(self, accepted: int, seconds: float, *, is_first: bool) -> None:
        metrics = self.server.metrics
        metrics.add("steps")
        metrics.add("generation_tokens", accepted + 1)
        metrics.times["time_to_first_token_seconds" if is_first else "inter_token_latency_seconds"].append(seconds)
        if is_first:
            metrics.add("prompt_tokens", len(self.prompt))
        if metrics.k:
            metrics.add("num_drafts")
            metrics.add("num_draft_tokens", metrics.k)
            metrics.add("num_accepted_tokens", accepted)
            for i in range(accepted):
                metrics.add(f"pos{i}")

    # the formats

    def opening(self) -> dict[str, Any]:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return self.envelope([choice], "chat.completion.chunk")

    def chunk(self, text: str, tokens: list[int], reason: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": self.logprobs(tokens), "finish_reason": reason}
        choice |= {"delta": {"content": text}} if self.is_chat else {"text": text}
        if self.body.get("return_token_ids"):
            choice["token_ids"] = tokens
        return self.envelope([choice], "chat.completion.chunk" if self.is_chat else "text_completion")

    def whole(self) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": self.logprobs(self.tokens), "finish_reason": self.reason}
        choice |= {"message": {"role": "assistant", "content": self.text}} if self.is_chat else {"text": self.text}
        return self.envelope([choice], "chat.completion" if self.is_chat else "text_completion") | self.counts()

    def last(self) -> dict[str, Any]:
        return self.envelope([], "chat.completion.chunk" if self.is_chat else "text_completion") | self.counts()

    def envelope(self, choices: list[Any], kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": 1, "model": self.body["model"], "choices": choices}

    def counts(self) -> dict[str, Any]:
        told = {"prompt_tokens": len(self.prompt), "completion_tokens": len(self.tokens)}
        found: dict[str, Any] = {"usage": {**told, "total_tokens": sum(told.values())}}
        if self.server.options.per_request_spec_decode_metrics:
            k, done = self.server.k, self.accepted
            histogram = [done.count(i) for i in range(k + 1)]
            found["metrics"] = {"speculative_decoding": {
                "mean_acceptance_length": 1 + sum(done) / len(done), "draft_acceptance_rate": sum(done) / len(done) / k,
                "acceptance_histogram": histogram, "num_spec_steps": len(done),
                "num_accepted_draft_tokens": sum(done), "num_draft_tokens": k * len(done), "num_spec_tokens": k,
            }}  # fmt: skip
        return found

    def logprobs(self, tokens: list[int]) -> dict[str, Any] | None:
        asked = self.body.get("logprobs")
        if asked is None or asked is False:
            return None
        count = self.body.get("top_logprobs") or 0 if self.is_chat else asked
        named = [[(self.name(token), value) for token, value in logprobs_of(token, count)] for token in tokens]
        if self.is_chat:
            entries = [
                {"token": tops[0][0], "logprob": tops[0][1],
                 "top_logprobs": [{"token": name, "logprob": value} for name, value in tops[:count]]}
                for tops in named
            ]  # fmt: skip
            return {"content": entries}
        return {
            "tokens": [tops[0][0] for tops in named], "token_logprobs": [tops[0][1] for tops in named],
            "top_logprobs": [dict(tops) for tops in named], "text_offset": [0] * len(tokens),
        }  # fmt: skip

    def name(self, token: int) -> str:
        return f"token_id:{token}" if self.body.get("return_tokens_as_token_ids") else piece(token)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.names = options.served_model_name or [options.model]
        self.k = int(json.loads(options.speculative_config or "{}").get("num_speculative_tokens", 0))
        self.metrics = Metrics(self.names[0], self.k)
        self.seen: list[dict[str, Any]] = []
        self.is_ending = False
        super().__init__((options.host, options.port), Handler)

    @contextlib.contextmanager
    def counted(self) -> Any:
        self.metrics.run(1)
        try:
            yield
        finally:
            self.metrics.run(-1)

    def check(self, body: dict[str, Any]) -> None:
        """Raise what vLLM answers to a request that it cannot serve."""
        if body.get("model") not in self.names:
            raise ServerError(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError", "model")
        prompt = prompt_ids(body)
        if self.k and (body.get("min_p") or body.get("logit_bias")):
            raise ServerError(400, REFUSED)
        if len(prompt) > 1024:
            raise ServerError(400, f"This model's maximum context length is 1024 tokens, not {len(prompt)}.")
        text = bytes(token % 256 for token in prompt)
        for status, kind in ((429, "TooManyRequestsError"), (503, "ServiceUnavailableError")):
            if str(status) in FAULTS or f"[{status}]".encode() in text:
                raise ServerError(status, "The engine takes no more requests.", kind)

    def end(self) -> None:
        """SIGTERM: cut off what runs, answer that, and stop."""
        self.is_ending = True
        threading.Thread(target=self._end).start()

    def _end(self) -> None:
        while self.metrics.running:
            time.sleep(0.01)
        time.sleep(0.02)
        self.shutdown()


# its life


def fail_at_start() -> None:
    if "exit2" in FAULTS:
        print("usage: vllm [-h]\nvllm: error: unrecognized arguments: --nope", file=sys.stderr)
        sys.exit(2)
    if "exit1-traceback" in FAULTS:
        try:
            raise ValueError("the weights are made of cheese")
        except ValueError:
            traceback.print_exc()
        print("\n".join(f"(EngineCore pid=1) INFO line {i} of the end" for i in range(40)), file=sys.stderr)
        sys.exit(1)


def spawn() -> None:
    """A worker that does not listen to SIGTERM, as a child of a child."""
    words = "trap '' TERM; sleep 1000 & echo worker pid=$!; wait"
    subprocess.Popen(["sh", "-c", words])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--speculative-config", "-sc")
    parser.add_argument("--per-request-spec-decode-metrics", choices=["summary", "detailed"])
    parser.add_argument("--max-model-len", "--max-num-seqs", "--dtype", type=str)
    parser.add_argument("--enforce-eager", action="store_true")
    options = parser.parse_args()
    fail_at_start()
    if options.per_request_spec_decode_metrics and not options.speculative_config:
        sys.exit("ValidationError: --per-request-spec-decode-metrics requires speculative decoding to be enabled")
    if "spawn-children" in FAULTS:
        spawn()
    print(f"standin pid={os.getpid()}", flush=True)
    while "never-ready" in FAULTS:
        time.sleep(0.05)
    if "slow-ready" in FAULTS:
        time.sleep(1.2)
    server = Server(options)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "ignore-sigterm" in FAULTS else lambda *_: server.end())
    server.serve_forever(poll_interval=0.02)


if __name__ == "__main__":
    main()
