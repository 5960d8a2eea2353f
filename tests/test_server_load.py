"""``flashspec serve`` under many clients at once, good, bad, slow and gone: exact answers, and nothing left behind."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from server_process import Answer, Ask, Server, Stream, make_tiny, truth, wait_for

import flashspec
from flashspec.engine import LocalEngine

NUM_CLIENTS, NUM_REQUESTS = 32, 120
KINDS = ["stream"] * 5 + ["whole"] * 4 + ["slow", "cancel", "cancel early", "bad", "bad"]
MOST_GROWTH = 256 << 20  # bytes, prefixes included
BAD: list[tuple[Any, int]] = [
    (b"{", 400),
    ({"temperature": -1}, 400),
    ({"foo": 1}, 400),
    ({"prompt": ""}, 400),
    ({"prompt": [5] * 5000}, 400),
    ({"model": "other"}, 404),
    ({"prompt": "a\ud800"}, 400),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    return make_tiny(tmp_path_factory.mktemp("load") / "tiny", smollm2_path)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    # rows for fewer than there are clients, and a small store of prefixes, so that both have to be fought for
    options = ("--drafter", "suffix", "--max-batch", "12", "--prefix-memory", "0.01")
    with Server(folder.parent, *options, model=folder) as server:
        yield server


@pytest.fixture(scope="module")
def known(folder: Path) -> list[tuple[Ask, list[Answer]]]:
    """What may be asked, with what the engine makes of it alone."""
    engine: LocalEngine = flashspec.load(folder, drafter="none", num_speculative_tokens=0, threads=1)
    asks = []
    for number in range(12):
        text = f"{'a long beginning that many share, ' * 12 if number % 3 == 0 else ''}number {number} 你好"
        sampling: dict[str, Any] = {"max_tokens": 12 + 3 * number, "ignore_eos": True}
        if number % 2:
            sampling |= {"temperature": 1.0, "seed": number, "top_p": 0.95}
        asks.append(Ask(text, sampling))
    return [(ask, truth(engine, ask)) for ask in asks]


class Clients:
    """Many of them; each call is one request of one of them."""

    def __init__(self, server: Server, known: list[tuple[Ask, list[Answer]]]) -> None:
        self.server, self.known = server, known
        self.gaps: list[float] = []

    def __call__(self, number: int) -> str:
        chance = random.Random(number)
        kind = chance.choice(KINDS)
        ask, (right,) = self.known[chance.randrange(len(self.known))]
        if kind == "bad":
            body, status = BAD[number % len(BAD)]
            sent = body if isinstance(body, bytes) else {"model": self.server.model, "prompt": "a", **body}
            reply = self.server.request("POST", "/v1/completions", sent)
            assert reply.status == status, reply
            assert reply.error
        elif kind == "whole":
            reply = self.server.complete(ask.prompt, **ask.sampling)
            assert reply.status == 200, reply
            assert reply.json["choices"][0]["text"] == right.text
            assert reply.json["usage"]["completion_tokens"] == len(right.tokens)
        else:
            stream = self.server.open(ask.prompt, **ask.sampling, speculative={"include_tokens": True})
            try:
                self._read(stream, kind, chance, right)
            finally:
                stream.close()
        return kind

    def _read(self, stream: Stream, kind: str, chance: random.Random, right: Answer) -> None:
        if kind == "cancel early":
            time.sleep(chance.random() * 0.3)
            return
        tokens: list[int] = []
        text, last = "", 0.0
        leaves_after = chance.randrange(1, 10) if kind == "cancel" else None
        for event in stream:
            assert "error" not in event, event
            text += "".join(choice["text"] for choice in event["choices"])
            tokens += event["speculation"]["tokens"] if "speculation" in event else []
            if leaves_after is not None and len(tokens) >= leaves_after:
                assert tokens == right.tokens[: len(tokens)]
                return
            if kind == "slow":
                time.sleep(0.1)
            elif last:
                self.gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
        assert stream.ended_well
        assert tokens == right.tokens
        assert text == right.text


def test_many_clients(server: Server, known: list[tuple[Ask, list[Answer]]]) -> None:
    clients, memory = Clients(server, known), psutil.Process(server.process.pid).memory_info
    for number in range(len(known)):  # what is set up once is there before memory is measured
        clients(1000 + number)
    before = memory().rss
    started = time.perf_counter()
    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        kinds = Counter(pool.map(clients, range(NUM_REQUESTS)))
    seconds = time.perf_counter() - started
    wait_for(lambda: server.load() == (0, 0), "rows are still in use", seconds=10)
    assert set(kinds) == set(KINDS)
    growth = memory().rss - before
    assert growth < MOST_GROWTH, f"{growth / 2**20:.0f} MiB"
    assert server.value("kv_cache_usage_perc") == 0
    assert server.value("prefix_cache_bytes") <= server.value("prefix_cache_max_bytes")
    assert server.value("requests_total", status="500") == 0
    assert "Traceback" not in server.log
    tokens = server.value("generation_tokens_total")
    time.sleep(0.5)
    assert server.value("generation_tokens_total") == tokens, "somebody who is gone is still being worked for"
    p99 = statistics.quantiles(clients.gaps, n=100)[98]
    middle = statistics.median(clients.gaps)
    print(
        f"\n{NUM_REQUESTS} requests of {NUM_CLIENTS} clients in {seconds:.1f} s {json.dumps(kinds)}; between chunks "
        f"p50 {1000 * middle:.0f} ms, p99 {1000 * p99:.0f} ms; memory {growth / 2**20:+.0f} MiB"
    )


def test_it_is_as_exact_afterwards(server: Server, known: list[tuple[Ask, list[Answer]]]) -> None:
    for ask, (right,) in known:
        assert server.complete(ask.prompt, **ask.sampling).json["choices"][0]["text"] == right.text
    server.terminate()
    assert server.process.wait(30) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_the_loops_thread_keeps_no_helpers_beside_the_engines() -> None:
    """With more OpenMP threads than cores each is put to sleep after every operation: a third of the speed."""
    code = (
        "import os, torch\n"
        "from flashspec.server.worker import let_helpers_go\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "before, x = count(), torch.ones(2000, 1000)\n"
        "x.exp(); during = count(); let_helpers_go(); after = count()\n"
        "assert float(x.exp().sum()) > 0\n"
        "print(during - before, after - before, count() - before)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "3"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    helpers, left, back = map(int, done.stdout.split())
    if helpers == 0:
        pytest.skip("this torch computes in one thread")
    assert left == 0
    assert back == helpers, "they come back where they are needed"
