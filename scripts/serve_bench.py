"""Measure a server: clients at once with speculation on and off, a second turn, a rough crowd, its overhead.

    python scripts/serve_bench.py clients --url http://127.0.0.1:8000 --prompts ../shared/data/*.jsonl

Every number is of streamed requests over HTTP; the client is a bare socket reader, so that it takes little of the
machine that it measures. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Reply:
    """One streamed answer."""

    status: int = 0
    started: float = 0.0
    first: float = 0.0
    last: float = 0.0
    times: list[float] = field(default_factory=list)
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    error: dict[str, Any] | None = None

    @property
    def is_whole(self) -> bool:
        return self.status == 200 and self.error is None and self.finish_reason is not None


async def ask(
    url: str,
    body: dict[str, Any],
    *,
    leave_after: int | None = None,
    pause: float = 0.0,
    path: str = "chat/completions",
) -> Reply:
    """Send a request and read its stream.

    Args:
        leave_after: chunks after which the client goes away.
        pause: seconds between two reads, for a slow reader.
    """
    where = urlsplit(url)
    reply = Reply(started=time.perf_counter())
    reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=1 << 20)
    try:
        data = json.dumps({"stream": True, **body}).encode()
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        reply.status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                if reply.status != 200 and line.startswith(b"{"):
                    reply.error = json.loads(line)["error"]
                continue
            if line.strip() == b"data: [DONE]":
                break
            take(reply, json.loads(line[6:]))
            if leave_after is not None and len(reply.times) >= leave_after:
                break
            if pause:
                await asyncio.sleep(pause)
    finally:
        writer.close()
    return reply


def take(reply: Reply, piece: dict[str, Any]) -> None:
    if "error" in piece:
        reply.error = piece["error"]
        return
    reply.usage = piece.get("usage") or reply.usage
    reply.tokens += piece.get("speculation", {}).get("tokens", [])
    for choice in piece["choices"]:
        reply.text += choice.get("delta", choice).get("content", "") or choice.get("text", "") or ""
        reply.finish_reason = choice["finish_reason"] or reply.finish_reason
    if piece["choices"] and (reply.tokens or piece["choices"][0].get("delta", {}).get("content")):
        now = time.perf_counter()
        reply.first, reply.last = reply.first or now, now
        reply.times.append(now)


async def crowd(url: str, bodies: list[dict[str, Any]], clients: int) -> tuple[float, list[Reply]]:
    """Seconds and replies of ``clients`` that take the next body as soon as they have an answer."""
    left, replies = list(reversed(bodies)), []

    async def client() -> None:
        while left:
            replies.append(await ask(url, left.pop()))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return time.perf_counter() - started, replies


def conversations(files: list[Path], limit: int, skip: int = 0) -> list[list[dict[str, str]]]:
    """``limit`` prompts of each file behind the first ``skip``, one file after the other in turns."""
    found = []
    for file in files:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[skip : skip + limit]]
        found.append([row.get("messages") or [{"role": "user", "content": row["prompt"]}] for row in rows])
    return [messages for turn in zip(*found, strict=True) for messages in turn]


def body(options: argparse.Namespace, messages: Any, *, enabled: bool = True) -> dict[str, Any]:
    asked = {"model": options.model, "messages": messages, "temperature": options.temperature, "seed": 1}
    asked |= {"max_tokens": options.max_tokens, "stream_options": {"include_usage": True}}
    return {**asked, "speculative": {"enabled": enabled, "include_tokens": True}}


async def clients(options: argparse.Namespace) -> dict[str, Any]:
    """Aggregate tokens a second with speculation on and off, interleaved, at each number of clients."""
    prompts = conversations(options.prompts, options.limit)
    found: dict[str, Any] = {}
    for count in options.clients:
        asked = (prompts * (2 * count // len(prompts) + 1))[: max(2 * count, len(prompts))]
        rates: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * options.repeat):
            enabled = turn % 4 in (0, 3)  # on, off, off, on
            bodies = [body(options, messages, enabled=enabled) for messages in asked]
            seconds, replies = await crowd(options.url, bodies, count)
            assert all(reply.is_whole for reply in replies), [reply.error for reply in replies if not reply.is_whole]
            rates[enabled].append(sum(len(reply.tokens) for reply in replies) / seconds)
        on, off = (statistics.median(rates[enabled]) for enabled in (True, False))
        pairs = [a / b for a, b in zip(rates[True], rates[False], strict=True)]
        found[str(count)] = {"on": on, "off": off, "ratio": on / off, "pairs": pairs}
        print(f"{count:3} clients: {on:7.1f} tokens/s with speculation, {off:7.1f} without: {on / off:.2f} x "
              f"({', '.join(f'{pair:.2f}' for pair in pairs)})", flush=True)  # fmt: skip
    return found


@contextlib.contextmanager
def stopped(pids: list[int]) -> Iterator[None]:
    """Hold processes and all that they started: workers of an idle vLLM poll, and slow down who is measured."""
    table = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in table.splitlines()]
    held = list(pids)
    for parent in held:  # grows while it is walked
        held += [pid for pid, above in pairs if above == parent]
    try:
        for pid in held:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in reversed(held):
            os.kill(pid, signal.SIGCONT)


async def servers(options: argparse.Namespace) -> dict[str, Any]:
    """Aggregate tokens a second of several servers of one model, in turns, at each number of clients."""
    prompts = conversations(options.prompts, options.limit, options.skip)
    found: dict[str, Any] = {}
    texts: dict[str, dict[int, str]] = {url: {} for url in options.urls}
    pids = dict(zip(options.urls, options.pids, strict=True)) if options.pids else {}
    for count in options.clients:
        asked = (prompts * (2 * count // len(prompts) + 1))[: max(2 * count, len(prompts))]
        rates: dict[str, list[float]] = {url: [] for url in options.urls}
        for turn in range(options.repeat):
            for url in options.urls[:: 1 - 2 * (turn % 2)]:  # forwards, then backwards
                bodies = [body(options, messages) for messages in asked]
                for each in bodies:
                    del each["speculative"]  # ours alone
                with stopped([pid for other, pid in pids.items() if other != url]):
                    seconds, replies = await crowd(url, bodies, count)
                assert all(reply.is_whole for reply in replies), [r.error for r in replies if not r.is_whole]
                rates[url].append(sum(reply.usage["completion_tokens"] for reply in replies) / seconds)
                if count == 1:
                    texts[url] = dict(enumerate(reply.text for reply in replies))
        found[str(count)] = {url: statistics.median(rates[url]) for url in options.urls}
        print(f"{count:3} clients: " + ", ".join(f"{url} {statistics.median(rates[url]):.1f} tokens/s "
              f"({', '.join(f'{rate:.1f}' for rate in rates[url])})" for url in options.urls), flush=True)  # fmt: skip
    first = texts[options.urls[0]]
    for url in options.urls[1:]:
        same = sum(first[number] == text for number, text in texts[url].items())
        print(f"{url}: {same} of {len(first)} texts equal those of {options.urls[0]}")
    return found


async def turn(options: argparse.Namespace) -> dict[str, Any]:
    """Time to first token of a conversation's second turn against the same one cold."""
    text = "the river valley was quiet and its people kept long records of every harvest flood and winter"
    words = text.split(" ")
    ratios, shown = [], []
    for number in range(options.repeat):
        rng = random.Random(number + int(time.time()))
        history = " ".join(rng.choice(words) for _ in range(options.history))
        first = [{"role": "user", "content": f"{number}{rng.random()} {history}"}]
        cold = await ask(options.url, body(options, first))
        second = [*first, {"role": "assistant", "content": cold.text}, {"role": "user", "content": "And then?"}]
        warm = await ask(options.url, body(options, second))
        again = cold.first - cold.started, warm.first - warm.started
        cached = warm.usage["prompt_tokens_details"]["cached_tokens"]
        ratios.append(again[1] / again[0])
        shown.append((cold.usage["prompt_tokens"], cached, *again))
        print(f"{shown[-1][0]} tokens cold {again[0] * 1000:.0f} ms; second turn of {warm.usage['prompt_tokens']} "
              f"({cached} cached) {again[1] * 1000:.0f} ms: {ratios[-1]:.3f}", flush=True)  # fmt: skip
    return {"ratio": statistics.median(ratios), "turns": shown}


async def load(options: argparse.Namespace) -> dict[str, Any]:
    """Good requests among cancelled, bad and slow ones; good ones are asked twice and must agree."""
    prompts = conversations(options.prompts, options.limit)
    rng = random.Random(0)
    gate = asyncio.Semaphore(options.clients[0])
    expected: dict[int, Reply] = {}
    for at, messages in enumerate(prompts):
        expected[at] = await ask(options.url, body(options, messages, enabled=False))
    counts = {"good": 0, "wrong": 0, "failed": 0, "cancelled": 0, "bad": 0, "slow": 0}
    gaps: list[float] = []

    async def one(number: int) -> None:
        at = rng.randrange(len(prompts))
        kind = rng.choices(("good", "cancelled", "bad", "slow"), (70, 12, 10, 8))[0]
        asked = body(options, prompts[at])
        async with gate:
            await asyncio.sleep(rng.random() * 0.05)
            if kind == "bad":
                asked |= rng.choice([{"temperature": -1}, {"nonsense": 1}, {"model": "nobody"}, {"messages": []}])
                reply = await ask(options.url, asked)
                counts["bad" if reply.status in (400, 404) else "failed"] += 1
                return
            leave = rng.randrange(1, 8) if kind == "cancelled" else None
            reply = await ask(options.url, asked, leave_after=leave, pause=0.2 if kind == "slow" else 0.0)
        if kind == "cancelled":
            counts[kind] += 1
        elif not reply.is_whole:
            counts["failed"] += 1
            print("failed:", reply.status, reply.error)
        else:
            counts[kind if reply.tokens == expected[at].tokens else "wrong"] += 1
            if kind == "good":
                gaps.extend(b - a for a, b in zip(reply.times, reply.times[1:], strict=False))

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(options.requests)))
    gaps.sort()
    p50, p99 = gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)]
    seconds = time.perf_counter() - started
    print(f"{options.requests} requests of {options.clients[0]} clients in {seconds:.0f} s: {counts}; between chunks "
          f"p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms, most {gaps[-1] * 1000:.0f} ms")  # fmt: skip
    return {**counts, "seconds": seconds, "p50": p50, "p99": p99, "most": gaps[-1]}


def overhead(options: argparse.Namespace) -> dict[str, Any]:
    """One client of a server against the bare engine, in turns, in one process; the client is a process of its own."""
    import flashspec
    from flashspec.server.app import Service, Settings
    from flashspec.server.run import bound, serve

    engine = flashspec.load(drafter=options.drafter, max_batch=16)
    sock = bound("127.0.0.1", 0)
    options.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    service = Service(engine, Settings(model_name=options.model))
    done: dict[str, Any] = {}

    def measure() -> None:
        prompts = conversations(options.prompts, options.limit)
        params = flashspec.SamplingParams(max_tokens=options.max_tokens)
        rows = []
        for at, messages in enumerate(prompts * options.repeat):
            line = json.dumps(body(options, messages))
            seconds: dict[str, float] = {}
            for which in ("bare", "served")[:: 1 if at % 2 else -1]:
                started = time.perf_counter()
                if which == "bare":
                    result = engine.generate(messages, params)
                    seconds[which], count = time.perf_counter() - started, len(result.tokens)
                else:
                    command = [sys.executable, __file__, "one", "--url", options.url]
                    told = subprocess.run(command, input=line, capture_output=True, text=True, check=True).stdout
                    seconds[which], served = json.loads(told)
            assert count == served, "other texts"
            rows.append((count, seconds["bare"], seconds["served"]))
        done["ratio"] = statistics.median(served / bare for _, bare, served in rows)
        done["total"] = sum(row[2] for row in rows) / sum(row[1] for row in rows)
        done["rows"] = rows
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=measure, daemon=True).start()
    serve(service, sock)
    print(f"served / bare: median {done['ratio']:.3f}, all {done['total']:.3f} of {len(done['rows'])} requests")
    return done


def one(options: argparse.Namespace) -> None:
    """Ask what stdin says, and tell how long it took from the connection on."""
    asked = json.loads(sys.stdin.read())
    reply = asyncio.run(ask(options.url, asked))
    print(json.dumps([reply.last - reply.started, len(reply.tokens)]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("clients", "servers", "turn", "load", "overhead", "one"))
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--urls", nargs="+", default=[], help="of servers")
    parser.add_argument("--pids", type=int, nargs="+", default=[], help="of the same servers: the others are held")
    parser.add_argument("--model", default="SmolLM2-135M-Instruct")
    parser.add_argument("--prompts", type=Path, nargs="+", default=[])
    parser.add_argument("--limit", type=int, default=4, help="prompts of each file")
    parser.add_argument("--skip", type=int, default=0, help="of servers: prompts of each file that they have seen")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--requests", type=int, default=500, help="of load")
    parser.add_argument("--history", type=int, default=1000, help="words of turn's first message")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--drafter", default="none", help="of overhead, which loads the model itself")
    options = parser.parse_args()
    if options.what == "one":
        one(options)
        return
    if options.what == "overhead":
        print(json.dumps({"overhead": overhead(options)}))
        return
    result = asyncio.run({"clients": clients, "servers": servers, "turn": turn, "load": load}[options.what](options))
    print(json.dumps({options.what: result}))


if __name__ == "__main__":
    main()
