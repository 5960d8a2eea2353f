"""flashspec watch: what two looks at a server's metrics mean, and the loop around them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from threading import Thread
from typing import Any

import pytest
from conftest import Ran, ToyTarget
from hypothesis import given, settings, strategies as st
from rich.console import Console

import flashspec.cli.watch as command
from flashspec.core import SamplingParams
from flashspec.drafters.ngram import NGramDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import EngineLostError, OptionError
from flashspec.metrics import Metrics
from flashspec.vllm.scrape import Snapshot
from flashspec.vllm.watch import History, Verdict, View, as_dict, joined, lifetime, verdicts, view

Run = Callable[..., Ran]

# vLLM 0.32.0 on a CPU, after the same 4 requests each: sums of what it said.
NGRAM = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 36.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7960016160979931e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 180.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 148.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 33.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="2"} 29.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="3"} 28.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="4"} 28.0
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 259.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 0.0
vllm:generation_tokens_total{engine="0",model_name="m"} 278.0
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 5.042767286300659
# TYPE vllm:request_time_per_output_token_seconds histogram
vllm:request_time_per_output_token_seconds_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:request_time_per_output_token_seconds_count{engine="0",model_name="m"} 4.0
vllm:request_time_per_output_token_seconds_sum{engine="0",model_name="m"} 0.22907942147656107
python_info{implementation="CPython",major="3",minor="11",patchlevel="7",version="3.11.7"} 1.0
"""
PLAIN = """\
vllm:num_requests_running{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.0
vllm:generation_tokens_total{engine="0",model_name="m"} 278.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 1.6952650547027588
"""
SUFFIX_POSITIONS = [21, 17, 16, 15, 14, 13, 13, 12, 12, 12, 11, 10, 0, 0, 0, 0]
NAMES = {
    "tokens": "generation_tokens_total",
    "drafts": "spec_decode_num_drafts_total",
    "drafted": "spec_decode_num_draft_tokens_total",
    "accepted": "spec_decode_num_accepted_tokens_total",
    "running": "num_requests_running",
    "waiting": "num_requests_waiting",
    "cache": "kv_cache_usage_perc",
    "efficiency": "spec_decode_system_efficiency",
    "draft_length": "spec_decode_draft_length",
    "queries": "prefix_cache_queries_total",
    "hits": "prefix_cache_hits_total",
    "created": "generation_tokens_created",
}
POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


def page(*, of: str = "vllm", engine: str = "0", model: str = "m", positions: Any = (), **values: float) -> str:
    """A server's metrics with these values, by the names above."""
    labels = f'engine="{engine}",model_name="{model}"'
    lines = [f"{of}:{NAMES[name]}{{{labels}}} {value}" for name, value in values.items()]
    lines += [f'{of}:{POSITION}{{{labels},position="{at}"}} {value}' for at, value in enumerate(positions)]
    return "\n".join(lines) + "\n"


def seen(before: str, after: str, seconds: float = 2.0) -> View:
    return view(Snapshot.of(before, taken=10.0), Snapshot.of(after, taken=10.0 + seconds))


def judged(**changes: Any) -> dict[str, Verdict]:
    """Verdicts on a server that is well but for the changes, by name."""
    well = View(server="vLLM", seconds=10.0, tokens=400, drafts=100, drafted=400, accepted=300,
                accepted_by_position=(90, 80, 70, 60), running=1, waiting=0, waiting_before=0,
                cache_usage=0.1)  # fmt: skip
    return {verdict.name: verdict for verdict in verdicts(dataclasses.replace(well, **changes))}


# --- views ---


def test_what_a_real_vllm_says() -> None:
    now = lifetime(Snapshot.of(NGRAM))
    assert (now.server, now.models, now.num_engines, now.speculates) == ("vLLM", ("m",), 1, True)
    assert now.acceptance == pytest.approx(148 / 180)
    assert now.mean_acceptance_length == pytest.approx(1 + 148 / 36)
    assert now.mean_draft_length == 5
    assert now.acceptance_by_position == pytest.approx([33 / 36, 30 / 36, 29 / 36, 28 / 36, 28 / 36])
    assert now.ttft == pytest.approx(5.042767286300659 / 4)
    assert now.tpot == pytest.approx(0.22907942147656107 / 4)
    assert now.prefix_hit_rate == 0
    assert (now.running, now.waiting, now.cache_usage) == (0, 0, 0)
    assert now.tokens_per_second is None  # nobody knows since when
    assert now.efficiency is now.draft_length is None


def test_rates_are_of_the_interval() -> None:
    before = page(tokens=100, drafts=10, drafted=40, accepted=20, positions=[9, 8, 3], queries=50, hits=10)
    after = page(tokens=190, drafts=30, drafted=120, accepted=80, positions=[27, 25, 18, 10], queries=70, hits=25)
    now = seen(before, after, 3.0)
    assert now.tokens_per_second == 30
    assert now.draft_tokens_per_second == pytest.approx(80 / 3)
    assert now.acceptance == 60 / 80
    assert now.mean_acceptance_length == 4
    assert now.acceptance_by_position == [18 / 20, 17 / 20, 15 / 20, 10 / 20]
    assert now.prefix_hit_rate == 15 / 20


def test_what_is_not_told_is_none_and_nan_is_not_told() -> None:
    now = seen(page(tokens=1), "vllm:generation_tokens_total NaN\nvllm:kv_cache_usage_perc NaN\nvllm:x +Inf\n")
    told = dataclasses.asdict(now)
    for name in ("server", "models", "num_engines", "speculates", "seconds", "restarts", "accepted_by_position"):
        del told[name]
    assert set(told.values()) == {None}
    assert {as_dict(now)[name] for name in ("acceptance", "ttft", "tpot", "tokens_per_second")} == {None}
    mixed = page(tokens=5) + page(tokens=float("nan"), engine="1") + page(cache=0.3, engine="2")
    assert seen(page(tokens=1), mixed).tokens == 4
    assert seen(page(tokens=1), mixed).cache_usage == 0.3


def test_engines_and_models_are_summed() -> None:
    before = page(tokens=10, running=1, cache=0.2) + page(tokens=100, running=2, cache=0.9, engine="1", model="n")
    after = page(tokens=20, running=3, cache=0.3) + page(tokens=150, running=4, cache=0.7, engine="1", model="n")
    now = seen(before, after)
    assert (now.tokens, now.running, now.cache_usage) == (60, 7, 0.7)  # the fullest cache, not 100 %
    assert (now.models, now.num_engines) == (("m", "n"), 2)


def test_an_engine_that_restarts_counts_from_0_and_the_others_go_on() -> None:
    before = page(tokens=1000, drafts=5, drafted=45, accepted=40) + page(tokens=500, engine="1")
    after = page(tokens=30, drafts=10, drafted=50, accepted=39) + page(tokens=510, engine="1")
    now = seen(before, after)
    assert (now.tokens, now.drafts, now.drafted, now.accepted) == (40, 10, 50, 39)  # not 5 drafted, 39 accepted
    assert now.restarts == 1
    assert judged(restarts=2)["restart"].number == 2


def test_a_restart_is_seen_though_the_counter_is_higher() -> None:
    now = seen(page(tokens=10, created=1.0), page(tokens=50, created=2.0))
    assert (now.tokens, now.restarts) == (50, 1)
    assert seen(page(tokens=10, created=1.0), page(tokens=50, created=1.0)).tokens == 40


def test_counters_that_were_not_there_count_from_0() -> None:
    now = seen(page(tokens=10), page(tokens=20) + page(tokens=7, engine="1", positions=[3]))
    assert (now.tokens, now.restarts, now.accepted_by_position) == (17, 0, (3,))


def test_odd_positions_are_left_out() -> None:
    odd = "".join(f'vllm:{POSITION}{{position="{at}"}} 1\n' for at in ("0", "-1", "x", "99999999999"))
    assert lifetime(Snapshot.of(odd)).accepted_by_position == (1,)


def test_older_names() -> None:
    now = lifetime(Snapshot.of("vllm:gpu_cache_usage_perc 0.5\nvllm:time_per_output_token_seconds_sum 3\n"
                               "vllm:time_per_output_token_seconds_count 6\n"))  # fmt: skip
    assert (now.cache_usage, now.tpot) == (0.5, 0.5)


COUNTERS = ["tokens", "drafts", "drafted", "accepted", "queries", "hits"]
VALUES = st.fixed_dictionaries({name: st.integers(0, 1000) for name in COUNTERS})
PAGES = st.lists(st.tuples(st.sampled_from("01"), VALUES, st.lists(st.integers(0, 99), max_size=4)), min_size=1)


@given(st.lists(PAGES, min_size=2, max_size=5), st.just(0.0) | st.floats(0.01, 100))
@settings(max_examples=60, deadline=None)
def test_nothing_is_ever_negative_and_views_add_up(pages: list[Any], seconds: float) -> None:
    texts = ["".join(page(engine=engine, positions=pos, **values) for engine, values, pos in each) for each in pages]
    snapshots = [Snapshot.of(text, taken=seconds * at) for at, text in enumerate(texts)]
    views = [view(a, b) for a, b in pairwise(snapshots)]
    history = History()
    for each in views:
        history.add(each)
    assert history.whole is not None
    for each in [*views, history.whole]:
        told = as_dict(each)
        assert all(rate >= 0 for rate in told.pop("acceptance_by_position"))
        assert all(value is None or value >= 0 for value in told.values())
        assert verdicts(each)
        json.dumps(told, allow_nan=False)
    assert history.whole.tokens == sum(each.tokens or 0 for each in views)


def test_joined_views() -> None:
    old = seen(page(tokens=0, waiting=3), page(tokens=10, waiting=5, positions=[2, 1]), 2.0)
    new = seen(page(tokens=10, waiting=5), page(tokens=40, waiting=9, positions=[4]), 4.0)
    both = joined(old, new)
    assert (both.tokens, both.seconds, both.accepted_by_position) == (40, 6, (6, 1))
    assert (both.waiting_before, both.waiting) == (3, 9)
    assert both.drafts is None


def test_verdicts_are_about_the_last_minute() -> None:
    history = History()
    for at in range(10):
        history.add(seen(page(tokens=at * 10), page(tokens=at * 10 + 10), 10.0))
    assert history.recent is not None
    assert history.recent.seconds == 60
    assert history.whole is not None
    assert (history.whole.seconds, history.whole.tokens) == (100, 100)
    assert list(history.rates) == [1.0] * 10
    history.add(seen(page(tokens=0), page(tokens=90), 90.0))  # longer than a minute is still the last interval
    assert history.recent.seconds == 90


# --- our own metrics ---


def test_a_flashspec_server() -> None:
    engine = LocalEngine(ToyTarget(), NGramDrafter(min_n=1), num_speculative_tokens=3)
    metrics = Metrics(model_name="toy")
    metrics.watch(engine, max_waiting=4)
    before = Snapshot.of(metrics.page(engine, num_waiting=1).decode(), taken=0.0)
    assert lifetime(before).speculates  # nobody knows better yet
    assert "speculation off" not in {verdict.name for verdict in verdicts(lifetime(before))}
    engine.add([1, 2, 1, 2, 1, 2], SamplingParams(max_tokens=40))
    tokens = 0
    while engine.has_work:
        engine.step()
        metrics.observe_step(engine)
    tokens = engine.stats().num_emitted_tokens
    now = view(before, Snapshot.of(metrics.page(engine, num_waiting=2).decode(), taken=4.0))
    assert (now.server, now.models, now.restarts, now.speculates) == ("FlashSpec", ("toy",), 0, True)
    assert now.tokens == tokens == 40
    assert (now.drafts, now.drafted) == (engine.stats().num_drafts, engine.stats().num_draft_tokens)
    assert now.drafted
    assert sum(now.accepted_by_position) == now.accepted == engine.stats().num_accepted_tokens
    assert (now.waiting, now.waiting_before, now.running) == (2, 1, 0)
    assert now.efficiency is not None
    assert now.draft_length is not None


def test_a_proxy_whose_vllm_restarts() -> None:
    """It tells of its requests only; nothing follows from that about speculation."""
    bare = 'flashspec:requests_total{model_name="m",engine="vllm",status="200"} 3.0\n'
    (verdict,) = verdicts(seen(bare, bare))
    assert (verdict.name, verdict.level) == ("no engine", "attention")
    assert "/ready" in str(verdict.remedy)


def test_a_flashspec_server_without_a_drafter() -> None:
    engine = LocalEngine(ToyTarget(), None)
    metrics = Metrics(model_name="toy")
    engine.add([1], SamplingParams(max_tokens=5))
    while engine.has_work:
        engine.step()
        metrics.observe_step(engine)
    now = lifetime(Snapshot.of(metrics.page(engine, num_waiting=0).decode()))
    assert not now.speculates
    (verdict,) = (verdict for verdict in verdicts(now) if verdict.name == "speculation off")
    assert "not one draft since the server started" in verdict.evidence


# --- verdicts ---


def test_nothing_to_complain_about() -> None:
    (verdict,) = judged().values()
    assert (verdict.name, verdict.level) == ("fine", "ok")
    assert verdict.evidence == (
        "nothing to complain about: acceptance 75% (at least 50%), KV cache 10% (at most 80%), 1 running "
        "(drafts: under 8), 0 waiting, not growing"
    )


@pytest.mark.parametrize(
    ("changes", "name", "number", "threshold", "evidence", "remedy"),
    [
        ({"accepted": 199}, "acceptance", 0.4975, 0.5, "50% of 400 draft tokens", "flashspec doctor"),
        ({"accepted": 100}, "acceptance", 0.25, 0.5, "25% of 400 draft tokens", "smaller num_speculative_tokens"),
        ({"accepted": 1, "server": "FlashSpec"}, "acceptance", 1 / 400, 0.5, "", "--num-speculative-tokens auto"),
        ({"cache_usage": 0.81}, "kv cache", 0.81, 0.8, "81% of the KV cache", "--gpu-memory-utilization"),
        ({"cache_usage": 1.0, "server": "FlashSpec"}, "kv cache", 1.0, 0.8, "over 80%", "--cache-memory"),
        ({"running": 8}, "many running", 8, 8, "8 requests run at once", "[[1, 7, 4], [8, 8, 0]]"),
        ({"running": 64}, "many running", 64, 8, "from 8 to 16 on", "--num-speculative-tokens auto goes to 0"),
        ({"waiting": 5, "waiting_before": 3}, "queue", 2, 2, "5 requests wait, 2 more than 10 s ago", "--max-num-seqs"),
        ({"efficiency": 0.99}, "efficiency", 0.99, 1, "0.99 x the speed of plain decoding", "--drafter none"),
        ({"accepted_by_position": (90, 80, 19, 9)}, "positions", 0.19, 0.2, "up to token 3", "tokens to 2 in"),
        ({"speculates": False, "drafts": None}, "speculation off", 0, 1, "only when it is on", "--speculative-config"),
        ({"drafts": 0, "drafted": 0}, "no drafts", 0, 1, "no draft among 400 tokens", ""),
        ({"restarts": 1}, "restart", 1, 0, "counters began anew 1 x", "by its own address"),
        ({"tokens": 0, "running": 0, "drafts": 0}, "idle", 0, 1, "no tokens in 10 s", ""),
    ],
)  # fmt: skip
def test_each_verdict(
    changes: dict[str, Any], name: str, number: float, threshold: float, evidence: str, remedy: str
) -> None:
    verdict = judged(**changes)[name]
    assert verdict.number == pytest.approx(number)
    assert verdict.threshold == threshold
    assert evidence in verdict.evidence
    assert remedy in verdict.remedy


@pytest.mark.parametrize(
    "changes",
    [
        {"accepted": 200},  # half
        {"drafts": 10, "drafted": 49, "accepted": 0, "accepted_by_position": ()},  # too few to say
        {"cache_usage": 0.8},
        {"running": 7},
        {"waiting": 4, "waiting_before": 3},
        {"waiting": 9, "waiting_before": 9},
        {"efficiency": 1.0},
        {"efficiency": 0.5, "drafts": 0},  # not by drafting
        {"accepted_by_position": (90, 80, 20, 20)},
        {"accepted_by_position": (19, 9, 9, 9)},  # no length helps
        {"accepted_by_position": (90, 80, 19, 9, 0)},  # of 4 tokens on average: not all had five
    ],
)
def test_what_is_within_its_limit_is_no_matter(changes: dict[str, Any]) -> None:
    assert {verdict.level for verdict in judged(**changes).values()} <= {"ok", "note"}
    assert set(judged(**changes)) <= {"fine", "no drafts"}


def test_suffix_drafts_of_many_lengths_are_not_cut_by_their_mean() -> None:
    """A real vLLM: from the 11th position on under 20 %, of drafts that have 3.8 tokens on average."""
    found = lifetime(Snapshot.of(page(tokens=278, drafts=58, drafted=219, accepted=166, positions=SUFFIX_POSITIONS)))
    assert found.acceptance_by_position[10] < 0.2
    assert [verdict.name for verdict in verdicts(found)] == ["fine"]


def test_levels_of_many_requests_and_the_worst_comes_first() -> None:
    assert judged(running=15)["many running"].level == "note"
    assert judged(running=16)["many running"].level == "attention"
    measured = judged(running=32, efficiency=1.3)["many running"]
    assert (measured.level, "yet here they bring 1.30 x" in measured.evidence) == ("note", True)
    assert "many running" not in judged(running=32, drafts=0)
    levels = [verdict.level for verdict in judged(running=8, efficiency=0.5, restarts=1).values()]
    assert levels == ["attention", "note", "note"]
    assert "fine" not in judged(cache_usage=0.9)


def test_a_plain_vllm() -> None:
    now = lifetime(Snapshot.of(PLAIN))
    assert not now.speculates
    assert [verdict.name for verdict in verdicts(now)] == ["speculation off", "fine"]


# --- reading ---


class Server(ThreadingHTTPServer):
    """Answers GET /metrics with the next of its pages, the last again and again; a number is a status."""

    def __init__(self, *pages: str | int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages, self.asked, self.keys = list(pages), 0, []
        self.url = f"http://127.0.0.1:{self.server_port}"
        Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    keys: list[str | None]

    def end(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        page = self.server.pages[min(self.server.asked, len(self.server.pages) - 1)]
        self.server.asked += 1
        self.server.keys.append(self.headers["Authorization"])
        found = isinstance(page, str) and self.path == "/metrics"
        self.send_response(200 if found else page if isinstance(page, int) else 404)
        self.end_headers()
        self.wfile.write(page.encode() if found and isinstance(page, str) else b"")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*pages: str | int) -> Server:
        servers.append(Server(*pages))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


@pytest.fixture
def run(flashspec_command: Run) -> Run:
    return partial(flashspec_command, "watch")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes the loop wait for nothing, do something between looks, and get Ctrl-C after the last."""

    def after(*between: Callable[[], object] | None) -> None:
        left = list(between)

        def sleep(seconds: float) -> None:
            if not left:
                raise KeyboardInterrupt
            if (action := left.pop(0)) is not None:
                action()

        monkeypatch.setattr(command.time, "sleep", sleep)

    return after


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [(503, EngineLostError, "answers 503; is the server running, and ready"), (401, OptionError, "with --api-key"),
     (404, OptionError, "is it a vLLM or FlashSpec server")],
)  # fmt: skip
def test_statuses(serve: Callable[..., Server], status: int, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        Snapshot.read(serve(status).url)


def test_a_key_is_sent(serve: Callable[..., Server]) -> None:
    server = serve(NGRAM)
    Snapshot.read(server.url, api_key="key-1")
    Snapshot.read(server.url)
    assert server.keys == ["Bearer key-1", None]


# --- the command ---


def grown(at: int, **more: float) -> str:
    """A busy server's ``at``-th page: 10 tokens, 4 drafts of 4 with 2 accepted each."""
    return page(tokens=10 * at, drafts=4 * at, drafted=16 * at, accepted=8 * at, running=1, waiting=0, **more)


def test_once(run: Run, serve: Callable[..., Server]) -> None:
    ran = run(serve(grown(1), NGRAM).url, "--once", "--interval", "0.2")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("vLLM at http://127.0.0.1:")
    assert "acceptance rate                      85%             85%             82%" in ran.out
    assert "last 0.2 s" in ran.out
    assert "\x1b" not in ran.out
    assert "nothing to complain about" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_once_as_json(run: Run, serve: Callable[..., Server]) -> None:
    server = serve(grown(1), grown(11, cache=0.9))
    answer = run(f"{server.url}/metrics", "--once", "--json", "--interval", "0.1").answer
    assert (answer["up"], answer["server"], answer["models"], answer["url"]) == (True, "vLLM", ["m"], server.url)
    assert answer["last"]["acceptance"] == 0.5
    assert answer["last"]["mean_acceptance_length"] == 3
    assert 100 < answer["last"]["tokens_per_second"] <= 1000
    assert answer["since_start"]["tokens"] == 110
    assert answer["whole"] == answer["last"]
    assert answer["efficiency"] is None
    (verdict,) = answer["verdicts"]
    assert (verdict["name"], verdict["number"], verdict["threshold"]) == ("kv cache", 0.9, 0.8)
    assert "--max-num-seqs" in verdict["remedy"]
    assert server.asked == 2


def test_the_loop_without_a_terminal(run: Run, serve: Callable[..., Server], looks: Callable[..., None]) -> None:
    looks(None, None)
    ran = run(serve(grown(1), grown(2), grown(3), grown(4)).url)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert len(lines) == 3  # two intervals, and the verdict once
    assert all("acceptance 50%, mean acceptance length 3.00, running 1, waiting 0" in lines[at] for at in (0, 2))
    assert "nothing to complain about" in lines[1]


def test_the_loop_as_json(run: Run, serve: Callable[..., Server], looks: Callable[..., None]) -> None:
    looks(None, None)
    ran = run(serve(grown(1), grown(2), grown(4)).url, "--json")
    one, two = map(json.loads, ran.out.splitlines())
    assert [one["last"]["tokens"], two["last"]["tokens"], two["whole"]["tokens"]] == [10, 20, 30]
    assert two["whole"]["seconds"] == pytest.approx(one["last"]["seconds"] + two["last"]["seconds"])


def test_a_server_that_goes_away_and_comes_back(
    run: Run, serve: Callable[..., Server], looks: Callable[..., None]
) -> None:
    pages: tuple[str | int, ...] = (grown(5), grown(6), 503, 503, grown(2), grown(3))
    looks(*[None] * 5)
    ran = run(serve(*pages).url)
    lines = [line for line in ran.out.splitlines() if not line.startswith("  ")]
    assert ran.code == 0
    assert len(lines) == 4  # the second 503 says nothing new
    assert "answers 503; is the server running, and ready? Waiting for it." in lines[1]
    assert "counters began anew 1 x" in ran.out
    looks(*[None] * 5)
    answers = [json.loads(line) for line in run(serve(*pages).url, "--json").out.splitlines()]
    assert [answer["up"] for answer in answers] == [True, False, False, True, True]
    assert "503" in answers[1]["error"]
    assert [answers[at]["last"]["tokens"] for at in (0, 3, 4)] == [10, 20, 10]
    assert answers[4]["whole"]["restarts"] == 1


def test_what_was_a_server_once_is_waited_for(
    run: Run, serve: Callable[..., Server], looks: Callable[..., None]
) -> None:
    looks(*[None] * 4)
    ran = run(serve(grown(5), grown(6), 404, "<!doctype html>", grown(7)).url, "--json")
    assert (ran.code, ran.err) == (0, "")
    answers = [json.loads(line) for line in ran.out.splitlines()]
    assert [answer["up"] for answer in answers] == [True, False, False, True]
    assert "answers 404" in answers[1]["error"]
    assert answers[3]["whole"]["tokens"] == 20


def test_a_server_that_ends_and_one_that_is_not_there_yet(
    run: Run, serve: Callable[..., Server], looks: Callable[..., None]
) -> None:
    server = serve(grown(1), grown(2))
    looks(None, server.end, None)
    ran = run(server.url)
    assert ran.code == 0
    assert f"nothing answers at {server.url} (" in ran.out.splitlines()[-1]
    looks(None)
    ran = run(server.url)
    assert (ran.code, len(ran.out.splitlines())) == (0, 1)
    looks(None)
    assert [json.loads(line)["up"] for line in run(server.url, "--json").out.splitlines()] == [False, False]


def test_once_wants_an_answer_each_time(run: Run, serve: Callable[..., Server], looks: Callable[..., None]) -> None:
    server = serve(grown(1))
    looks(server.end)
    for _ in range(2):
        ran = run(server.url, "--once")
        assert (ran.code, ran.out) == (2, "")
        assert f"nothing answers at {server.url}" in ran.err
        looks()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ftp://x"], "'ftp://x' is not a server's address; give one such as http://127.0.0.1:8000"),
        (["http://"], "is not a server's address"),
        (["http://x:y"], "is not a server's address"),
        (["http://[x"], "is not a server's address"),
        (["http://me:word@x"], "is not a server's address"),
        (["http://x/a b"], "is not a server's address"),
        (["x", "--interval", "0.05"], "interval is 0.05; it must be from 0.1 to 3600 seconds"),
        (["x", "--interval", "nan"], "interval is nan; it must be"),
        (["x", "--api-key", "a\nb"], "the API key is empty or has characters that a header cannot hold"),
    ],
)
def test_bad_input_is_one_line_with_the_next_step(run: Run, words: list[str], message: str) -> None:
    ran = run(*words)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.strip().splitlines()) == 1
    assert message in ran.err


def test_addresses() -> None:
    for typed in ("localhost:8000", "http://localhost:8000/", "localhost:8000/metrics", "http://localhost:8000/v1/"):
        assert command._address(typed) == "http://localhost:8000"
    assert command._address("https://[::1]:1/a/metrics") == "https://[::1]:1/a"


def test_what_is_no_such_server(run: Run, serve: Callable[..., Server]) -> None:
    for text, message in (("<!doctype html>", "are no Prometheus metrics"), ("up 1\n", "no metrics of vLLM or")):
        ran = run(serve(text).url)
        assert (ran.code, ran.out) == (2, "")
        assert message in ran.err


def test_without_prometheus_client(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashspec.vllm.scrape", None)
    ran = run("x", "--once")
    assert ran.code == 2
    assert "pip install 'flashspec-decoding[serve]'" in ran.err


# --- the screen ---


def shown(*texts: str, width: int = 80) -> str:
    pages = iter([Snapshot.of(text, taken=2.0 * at) for at, text in enumerate(texts)])
    watcher = command.Watcher("http://x:1", lambda: next(pages))
    for _ in texts:
        watcher.look()
    paper = Console(file=io.StringIO(), width=width, highlight=False)
    paper.print(command.screenful(watcher))
    return paper.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [80, 160])
def test_the_worst_fits(width: int) -> None:
    bad = partial(page, of="flashspec", running=64, cache=0.95, efficiency=0.5, draft_length=16, queries=9, hits=3)
    names = {"tokens": 10**7, "drafts": 10**6, "drafted": 16 * 10**6, "accepted": 10**5}
    texts = [
        bad(waiting=at, positions=[at * 1000] * 16, **{name: value * at for name, value in names.items()})
        for at in (0.0, 1, 9)
    ]
    text = shown(*texts, width=width)
    assert max(map(len, text.splitlines())) <= width
    for part in ("40,000,000", "▂█", "efficiency 0.50 x", "draft length 16.00", "accepted by position  ▁"):
        assert part in text
    assert text.count("\n! ") == 5  # all but positions, whose first is rare already
    assert "[[1, 7, 4]" in " ".join(text.split())  # no markup


def test_the_first_look_shows_what_there_is() -> None:
    text = shown(NGRAM)
    assert "running 0   waiting 0   KV cache 0%" in text
    assert "82%" in text


def test_without_utf_8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.locale, "getencoding", lambda: "ascii")
    text = shown(PLAIN, PLAIN, PLAIN.replace("278", "300"))
    assert text.isascii()
    assert "tokens/s  _#  most 11.0" in text


def test_names_cannot_move_the_cursor() -> None:
    assert "model ?[2J[red]" in shown(page(tokens=1, model="\x1b[2J[red]"))


PROGRAM = "import sys, flashspec.cli, flashspec.cli.watch; sys.argv[0] = 'flashspec'; flashspec.cli.main()"


def test_ctrl_c_in_a_terminal(serve: Callable[..., Server]) -> None:
    server = serve(*map(grown, range(1, 50)))
    main, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"}
    words = [sys.executable, "-c", PROGRAM, "watch", server.url, "--interval", "0.1"]
    process = subprocess.Popen(words, stdout=terminal, stderr=terminal, stdin=terminal, env=env)
    os.close(terminal)
    text = b""
    try:
        while text.count(b"watched") < 4:
            text += os.read(main, 65536)
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # EIO: the terminal's other end is closed
            while True:
                text += os.read(main, 65536)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
        os.close(main)
    assert b"tokens/s" in text
    assert text.rstrip().endswith(b"\x1b[?25h")  # the cursor is back
    assert b"Traceback" not in text
