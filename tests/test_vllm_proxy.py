"""Our server in front of the stand-in for vLLM: its answers, our gate and metrics, and an end for every request."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import pytest
import standin as says
import test_deploy
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from server_process import Server, free_port
from vllm_process import (
    MODEL,
    NGRAM,
    TOLD,
    K,
    is_alive,
    needs_vllm,
    none_alive,
    nothing_left,
    num_running,
    real,
    seen,
    server_pid,
    standin,
    wait_until,
)

from flashspec.errors import EngineStartError
from flashspec.server import proxy as module
from flashspec.server.exported import Exported
from flashspec.server.proxy import Proxy, ProxySettings, serve_proxy
from flashspec.server.run import bound
from flashspec.server.upstream import UpstreamError, exchange
from flashspec.vllm import process as process_module
from flashspec.vllm.process import ServerProcess

pytestmark = pytest.mark.usefixtures(nothing_left.__name__)
LIMIT = 20.0
# What the command does, with the stand-in in place of vLLM.
MAIN = """
import json, sys
from pathlib import Path
from flashspec.errors import FlashSpecError
from flashspec.server.proxy import ProxySettings, serve_proxy
from flashspec.server.run import bound, set_up_log
from flashspec.vllm.process import ServerProcess
port, url, log, *words = sys.argv[1:]
set_up_log("json", verbose=False)
process = ServerProcess(words, url=url, log=Path(log), grace=1.0, ready_seconds=300.0)
try:
    sys.exit(serve_proxy(process, ProxySettings(model_name="m"), bound("127.0.0.1", int(port)), progress=print))
except FlashSpecError as error:
    sys.exit(str(error))
"""


class Front(Server):
    """Looks like a process of our own server to the tests; what serves is a thread of this process."""

    def __init__(self, process: ServerProcess, **settings: Any) -> None:
        self.vllm, self.model, self.key = process, MODEL, settings.get("api_key")
        self.port = free_port()
        self._opened: list[Any] = []
        self.proxy = Proxy(process, ProxySettings(model_name=MODEL, **settings))
        config = uvicorn.Config(self.proxy, log_config=None, access_log=False, ws="none", lifespan="off")
        self.server = uvicorn.Server(config)
        self.cause: str | None = None
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self.server.serve([bound("127.0.0.1", self.port)]))
        self._keeping = asyncio.ensure_future(self.proxy.keep())
        with contextlib.suppress(asyncio.CancelledError):
            self.cause = await self._keeping
        await serving

    def __enter__(self) -> Front:
        self.thread.start()
        wait_until(lambda: self.proxy.state == "ok")
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._opened:
            each.close()
        self.server.should_exit = True
        with contextlib.suppress(AttributeError):
            self._keeping.get_loop().call_soon_threadsafe(self._keeping.cancel)
        self.vllm.kill()
        self.thread.join(LIMIT)
        assert not self.thread.is_alive()

    def answers(self) -> bool:
        with contextlib.suppress(OSError, http.client.HTTPException):
            return bool(self.get("/health").status)
        return False

    def is_up(self) -> bool:
        return is_up(self)


class Program(Server):
    """The same as a process of its own, which gets signals."""

    def __init__(self, folder: Path, process: ServerProcess) -> None:
        self.vllm, self.model, self.key, self.port = process, MODEL, None, free_port()
        self._opened: list[Any] = []
        self._log = folder / "proxy.log"
        words = [sys.executable, "-c", MAIN, str(self.port), process.url, str(process.log), *process.words]
        with self._log.open("wb") as log:
            env = os.environ | process.env | {"OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(words, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=env)

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log
        return is_up(self)


def is_up(server: Server) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        return server.get("/ready").status == 200
    return False


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_module, "POLL", 0.05)
        patch.setattr(module, "POLL", 0.02)
        patch.setattr(module, "BACKOFF", 0.05)
        yield


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    with Front(standin(tmp_path_factory.mktemp("front"), *NGRAM, *TOLD)) as server:
        yield server


@contextlib.contextmanager
def fronted(
    folder: Path, *options: str, fault: str = "", env: dict[str, str] | None = None, **settings: Any
) -> Iterator[Front]:
    with Front(standin(folder, *options, fault=fault, env=env), **settings) as server:
        yield server


def direct(front: Front) -> openai.OpenAI:
    """A client of the stand-in itself."""
    front._opened.append(openai.OpenAI(base_url=f"{front.vllm.url}/v1", api_key=front.key or "-", max_retries=0))
    return front._opened[-1]


def events_of(body: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# what is passed on


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("is_chat", [False, True], ids=["text", "chat"])
def test_answers_are_vllms(front: Front, is_chat: bool, stream: bool) -> None:
    def ask(client: openai.OpenAI) -> Any:
        more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        more |= {"model": MODEL, "max_tokens": 30, "temperature": 0, "extra_body": {"return_token_ids": True}}
        if is_chat:
            got = client.chat.completions.create(messages=[{"role": "user", "content": "é?"}], **more)
        else:
            got = client.completions.create(prompt="é?", **more)
        return [chunk.model_dump() for chunk in got] if stream else got.model_dump()

    ours, theirs = ask(front.client()), ask(direct(front))
    assert ours == theirs
    last = ours[-1] if stream else ours
    assert last["usage"]["completion_tokens"] > 1
    assert last["metrics"]["speculative_decoding"]["num_spec_tokens"] == K


def test_streams_come_chunk_by_chunk(tmp_path: Path) -> None:
    with fronted(tmp_path, env={"STANDIN_STEP": "0.05"}) as front:
        times, count = [], 0
        for _ in front.open("pace", max_tokens=10):
            times.append(time.monotonic())
            count += 1
        assert count == 10
        gaps = [after - before for before, after in pairwise(times)]
        assert min(gaps) > 0.02  # none had waited for the next one
        assert sum(gaps) > 0.4


def test_many_at_once(front: Front) -> None:
    prompts = [f"client {i}" for i in range(30)]
    with ThreadPoolExecutor(30) as pool:
        texts = list(pool.map(lambda prompt: front.complete(prompt, max_tokens=30).json["choices"][0]["text"], prompts))
    for prompt, text in zip(prompts, texts, strict=True):
        tokens, _ = says.output({"prompt": prompt, "max_tokens": 30, "temperature": 0})
        assert text == "".join(map(says.piece, tokens))


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"model": "other"}, 404), ({"min_p": 0.1}, 400), ({"logit_bias": {"1": 1}}, 400),
        ({"prompt": "[429]"}, 429), ({"prompt": "[503]"}, 503), ({"prompt": [5] * 2000}, 400),
    ],
)  # fmt: skip
def test_errors_are_vllms(front: Front, body: dict[str, Any], status: int) -> None:
    data = json.dumps({"model": MODEL, "prompt": "x", "temperature": 0} | body)
    where = http.client.HTTPConnection(front.vllm.url.removeprefix("http://"), timeout=LIMIT)
    with contextlib.closing(where):
        where.request("POST", "/v1/completions", data)
        right = where.getresponse()
        reply = front.request("POST", "/v1/completions", data.encode())
        assert (reply.status, reply.body) == (right.status, right.read())
    assert reply.status == status
    assert reply.error["code"] == status


def test_bodies_that_are_not_json_are_vllms_affair(front: Front) -> None:
    for body in (b'{"speculative": ', b"[1]", b"", b"\xff"):
        assert front.request("POST", "/v1/completions", body).status == 400 or body == b"[1]"


def test_headers(front: Front) -> None:
    headers = {"X-Mine": "1", "Origin": "http://evil", "X-Request-Id": "name.1", "X-Hop": "2", "Connection": "x-hop"}
    reply = front.request("POST", "/v1/completions", {"model": MODEL, "prompt": "headers"}, headers)
    assert reply.headers["x-request-id"] == "name.1"
    assert reply.headers["x-standin"] == "yes"
    got = {name.lower(): value for name, value in seen(front.vllm.url)[-1]["headers"].items()}
    assert got["x-mine"] == "1"
    assert got["x-request-id"] == "name.1"
    assert not {"origin", "x-hop", "transfer-encoding"} & got.keys()
    assert front.open("headers").connection is not None
    stream = front.request("POST", "/v1/completions", {"model": MODEL, "prompt": "headers", "stream": True})
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.headers["x-accel-buffering"] == "no"
    assert "content-length" not in stream.headers


def test_models_and_other_paths(front: Front) -> None:
    assert front.get("/v1/models").json["data"][0]["owned_by"] == "vllm"
    assert front.get("/v1/nothing").json == {"detail": "Not Found"}  # vLLM's own
    assert front.get("/v2/models").error["code"] == "not_found"
    assert front.get("/seen").status == 404  # only its API is passed on
    assert front.request("POST", "/health", {}).status == 405


def test_the_page_is_ours(front: Front) -> None:
    reply = front.get("/")
    assert reply.status == 200
    assert b"FlashSpec" in reply.body
    assert "default-src 'none'" in reply.headers["content-security-policy"]


# our own field


def test_what_only_tells_is_left_out(front: Front) -> None:
    asked = {"include_tokens": True, "include_metrics": True, "enabled": True, "num_speculative_tokens": None}
    for told in (asked, None, {}):
        reply = front.complete("field é", speculative=told)
        assert reply.status == 200
        body = seen(front.vllm.url)[-1]["body"]
        assert body == {"model": MODEL, "prompt": "field é", "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize(
    ("asked", "name", "code"),
    [
        ({"enabled": False}, "enabled", "unsupported"),
        ({"drafter": "none"}, "enabled", "unsupported"),
        ({"num_speculative_tokens": 0}, "enabled", "unsupported"),
        ({"drafter": "ngram"}, "drafter", "unsupported"),
        ({"num_speculative_tokens": 3}, "num_speculative_tokens", "unsupported"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens", "invalid_value"),
        ({"nonsense": 1}, "nonsense", "unknown_parameter"),
        (5, None, "invalid_value"),
    ],
)
def test_what_cannot_be_honoured_is_refused(front: Front, asked: Any, name: str | None, code: str) -> None:
    count = len(seen(front.vllm.url))
    for error in (front.complete(speculative=asked), front.chat(speculative=asked)):
        assert error.status == 400
        assert error.error["code"] == code
        assert error.error["param"] == ("speculative" if name is None else f"speculative.{name}")
        assert error.error["message"].startswith(error.error["param"])
        assert "Input should" not in error.error["message"]
    assert len(seen(front.vllm.url)) == count


def test_clients_are_not_told_of_the_private_port() -> None:
    async def ask() -> None:
        async with exchange("127.0.0.1", free_port(), "GET", b"/"):
            pass

    with pytest.raises(UpstreamError, match=r"^nobody answers \(Connection refused\)$"):
        asyncio.run(ask())


def test_without_speculation_it_is_off_for_whoever_wants_that(tmp_path: Path) -> None:
    with fronted(tmp_path) as front:
        for asked in ({"enabled": False}, {"drafter": "none"}, {"num_speculative_tokens": 0}):
            assert front.complete(speculative=asked).status == 200
        assert front.complete(speculative={"drafter": "ngram"}).status == 400


# the gate


def test_keys(tmp_path: Path) -> None:
    with fronted(tmp_path, env={"VLLM_API_KEY": "secret"}, api_key="secret", max_body=2000) as front:
        assert front.complete().status == 200
        assert front.client().models.list().data[0].id == MODEL
        for key in (None, "wrong", "secre"):
            headers = {"Authorization": "" if key is None else f"Bearer {key}"}
            reply = front.request("GET", "/v1/models", headers=headers)
            assert reply.status == 401
            assert reply.error["code"] == "invalid_api_key"  # in our words: vLLM has not been asked
        assert front.request("GET", "/metrics", headers={"Authorization": ""}).status == 200
        assert front.complete("x" * 3000).status == 413


def test_web_pages(tmp_path: Path) -> None:
    with fronted(tmp_path, cors_origins=("http://mine",)) as front:
        asked = {"Origin": "http://mine", "Access-Control-Request-Method": "POST"}
        assert front.request("OPTIONS", "/v1/completions", headers=asked).status == 200
        assert front.get("/v1/models", Origin="http://mine").headers["access-control-allow-origin"] == "http://mine"
        assert "access-control-allow-origin" not in front.get("/v1/models", Origin="http://other").headers


# what nobody waits for, and what takes too long


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_frees_its_request(front: Front, stream: bool) -> None:
    connection = front.connect()
    body = {"model": MODEL, "prompt": "[slow] leaving", "stream": stream, "max_tokens": 500, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    if stream:
        assert connection.getresponse().read(10)
    wait_until(lambda: num_running(front.vllm.url) == 1)
    connection.close()
    wait_until(lambda: num_running(front.vllm.url) == 0)
    assert seen(front.vllm.url)[-1]["end"] == "gone"


def test_time_is_limited(tmp_path: Path) -> None:
    with fronted(tmp_path, *NGRAM, request_timeout=0.5) as front:
        reply = front.complete("[hang-mid-stream]", max_tokens=99, ignore_eos=True)
        assert reply.status == 504
        assert reply.error["code"] == "timeout"
        *texts, error = list(front.open("[hang-mid-stream]", max_tokens=99))
        assert len(texts) == says.BEFORE_FAULT
        assert error["error"]["code"] == "timeout"
        wait_until(lambda: num_running(front.vllm.url) == 0)


@pytest.mark.parametrize("fault", ["abort"])
def test_what_vllm_cuts_off_is_an_error(front: Front, fault: str) -> None:
    reply = front.complete(f"[{fault}]", max_tokens=99, ignore_eos=True)
    assert reply.status == 503
    assert reply.error["code"] == "engine_lost"
    stream = front.open(f"[{fault}]", max_tokens=99)
    *texts, error = list(stream)
    assert len(texts) == says.BEFORE_FAULT
    assert error["error"]["code"] == "engine_lost"
    assert not stream.ended_well
    text = 'say "finish_reason":"abort" aloud'  # in a text it is none
    assert front.complete(text).status == 200


# vLLM's life


def test_vllm_dies_and_is_started_again(tmp_path: Path) -> None:
    with fronted(tmp_path, *NGRAM) as front:
        assert front.get("/ready").status == 200
        first = server_pid(front.vllm)
        other = front.open("[slow] other", max_tokens=400)
        assert other.first()
        *texts, error = list(front.open("[die-mid-stream]", max_tokens=99))
        assert len(texts) == says.BEFORE_FAULT
        assert error["error"] == {
            "message": "vLLM ended with status 137; try again in a while", "type": "server_error", "param": None,
            "code": "engine_lost",
        }  # fmt: skip
        assert "error" in list(other)[-1]
        while front.proxy.state == "restarting":
            reply = front.complete()
            assert (reply.status, reply.headers.get("retry-after")) in ((503, "5"), (200, None))
            assert front.get("/health").status == 200  # to whom it may concern: leave this process alone
        wait_until(front.is_up)
        assert front.complete().status == 200
        assert server_pid(front.vllm) != first
        assert "flashspec:requests_total" in front.get("/metrics").body.decode()


def test_it_gives_up_with_the_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    process, port = standin(tmp_path, *NGRAM), free_port()
    codes: list[str] = []

    def fail() -> None:
        wait_until(lambda: "serves m" in caplog.text)
        process.env["STANDIN_FAULT"] = "exit1-traceback"
        os.kill(server_pid(process), signal.SIGKILL)

    thread = threading.Thread(target=fail)
    thread.start()
    settings = ProxySettings(model_name=MODEL, restarts=2)
    with caplog.at_level("INFO", logger="flashspec"):
        assert serve_proxy(process, settings, bound("127.0.0.1", port), progress=codes.append) == 1
    thread.join()
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert len(told) == 3
    assert "ended with status 137" in told[0]
    assert "cause: ValueError: the weights are made of cheese" in told[-1]
    assert "restart 2 of 2" in caplog.text


def test_a_vllm_that_does_not_start_is_not_tried_again(tmp_path: Path) -> None:
    process = standin(tmp_path, fault="exit2")
    with pytest.raises(EngineStartError, match=r"(?s)status 2.*--nope"):
        serve_proxy(process, ProxySettings(model_name=MODEL), bound("127.0.0.1", free_port()))
    assert process.log.read_text(encoding="utf-8").count("usage") == 1


def test_while_it_starts(tmp_path: Path) -> None:
    front = Front(standin(tmp_path, fault="slow-ready"))
    front.thread.start()
    try:
        wait_until(front.answers)
        assert front.get("/health").json == {"status": "starting"}
        assert front.get("/ready").status == 503
        assert front.complete().error["message"].startswith("vLLM is starting")
        assert "vllm:" not in front.get("/metrics").body.decode()
        wait_until(front.is_up)
        assert front.complete().status == 200
    finally:
        front.__exit__()


# signals


FAULTS = {"drain": "", "twice": "ignore-sigterm", "early": "never-ready", "kill": "spawn-children,ignore-sigterm"}


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Program]]:
    """One for each of the tests below: they take seconds to start, and do so beside the tests above."""
    folders = {name: tmp_path_factory.mktemp(name) for name in FAULTS}
    found = {
        name: Program(folders[name], standin(folders[name], *NGRAM, fault=fault)) for name, fault in FAULTS.items()
    }
    try:
        yield found
    finally:
        for each in found.values():
            each.__exit__()


def test_sigterm_finishes_what_runs(programs: dict[str, Program]) -> None:
    program = programs["drain"]
    wait_until(program.is_up, seconds=60)
    pid = server_pid(program.vllm)
    stream = program.open("[slow] drained", max_tokens=40)
    count = len(stream.first())
    program.terminate()
    wait_until(lambda: program.get("/ready").status == 503)
    assert program.complete().error["code"] == "shutting_down"
    rest = list(stream)
    assert stream.ended_well
    assert rest[-1]["choices"][0]["finish_reason"] == "length"
    assert count
    assert program.process.wait(LIMIT) == 0
    assert not is_alive(pid)


def test_a_second_signal_ends_both_at_once(programs: dict[str, Program]) -> None:
    program = programs["twice"]
    wait_until(program.is_up, seconds=60)
    pid = server_pid(program.vllm)
    stream = program.open("[slow] cut", max_tokens=400)
    assert stream.first()
    program.terminate()
    wait_until(lambda: "again to end at once" in program.log)
    started = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(LIMIT) == 130
    assert not is_alive(pid)
    assert time.monotonic() - started < 2


def test_sigterm_while_it_starts(programs: dict[str, Program]) -> None:
    program = programs["early"]
    wait_until(lambda: program.vllm.log.exists() and "pid=" in program.vllm.log.read_text(encoding="utf-8"), seconds=60)
    program.terminate()
    assert program.process.wait(LIMIT) == 0
    assert not is_alive(server_pid(program.vllm))


def test_kill_leaves_nothing(programs: dict[str, Program]) -> None:
    program = programs["kill"]
    wait_until(program.is_up, seconds=60)
    pids = [int(pid) for pid in re.findall(r"pid=(\d+)", program.vllm.log.read_text(encoding="utf-8"))]
    program.process.kill()
    assert wait_until(lambda: none_alive(pids)) < 1.0 + 2.0


# metrics


def test_metrics_are_vllms_under_our_names_and_its_own(front: Front) -> None:
    before = samples(front)
    chunks = [
        says.steps(says.output({"prompt": f"metrics {i}", "max_tokens": 30, "temperature": 0})[0], K) for i in range(3)
    ]
    for i in range(3):
        assert front.complete(f"metrics {i}", max_tokens=30).status == 200
    page = front.get("/metrics").body.decode()
    own = page[: page.index("vllm:")]
    assert 'engine="vllm"' in own
    after = samples(front)
    steps, accepted = sum(map(len, chunks)), sum(map(sum, chunks))

    def more(name: str) -> float:
        return after[f"flashspec:{name}"] - before.get(f"flashspec:{name}", 0.0)

    assert more("spec_decode_num_drafts_total") == more("steps_total") == steps
    assert more("spec_decode_num_draft_tokens_total") == K * steps
    assert more("spec_decode_num_accepted_tokens_total") == accepted
    assert more("spec_decode_num_accepted_tokens_per_pos_total") == accepted
    assert more("generation_tokens_total") == more("spec_decode_num_emitted_tokens_total") == accepted + steps
    assert more("request_success_total") == more("e2e_request_latency_seconds_count") == 3
    assert after["flashspec:kv_cache_usage_perc"] == 0.25
    assert after["flashspec:spec_decode_draft_acceptance_rate"] == pytest.approx(
        after["flashspec:spec_decode_num_accepted_tokens_total"]
        / after["flashspec:spec_decode_num_draft_tokens_total"],
        abs=0.2,
    )
    assert "flashspec:spec_decode_system_efficiency" not in after
    for name, value in after.items():
        if name.startswith("vllm:spec"):
            assert value == after[name.replace("vllm:", "flashspec:")]


def test_metrics_have_our_names_and_labels(front: Front) -> None:
    front.complete()
    for family in text_string_to_metric_families(front.get("/metrics").body.decode()):
        for sample in family.samples:
            if sample.name.startswith("flashspec:"):
                name = sample.name.removeprefix("flashspec:")
                assert set(sample.labels) - {"model_name", "engine"} == test_deploy.SERIES[name]
                assert (sample.labels["model_name"], sample.labels["engine"]) == (MODEL, "vllm")


def test_the_rate_is_of_the_last_minute() -> None:
    def page(drafted: int, accepted: int) -> str:
        name = 'vllm:spec_decode_num_{}_total{{engine="0",model_name="m"}} {}'
        lines = [
            name.format("drafts", 1),
            name.format("draft_tokens", drafted),
            name.format("accepted_tokens", accepted),
        ]
        return "\n".join([*lines, ""])

    def rate(text: str) -> float:
        found = re.search(
            r"^flashspec:spec_decode_draft_acceptance_rate\{.*\} (\S+)$", exported.page(text).decode(), re.M
        )
        assert found is not None
        return float(found[1])

    exported = Exported("m")
    assert rate(page(1000, 900)) == 0.0  # when that was is not known
    assert rate(page(1010, 905)) == 0.5
    exported.forget()  # started anew: its counters begin at 0 and are no difference
    assert rate(page(2000, 2000)) == 0.5
    assert rate(page(2010, 2010)) == 0.75


def test_metrics_of_several_engines_are_added_up() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{i}",model_name="m"}} {i + 1}.0\n'
        f'vllm:kv_cache_usage_perc{{engine="{i}",model_name="m"}} 0.{i + 1}\n'
        f'vllm:request_success_total{{engine="{i}",model_name="m",finished_reason="stop"}} {i + 1}.0\n'
        for i in range(3)
    )
    page = Exported("m").page(text).decode()
    assert page.endswith(text)
    assert 'flashspec:num_requests_running{engine="vllm",model_name="m"} 6.0' in page
    assert re.search(r'flashspec:kv_cache_usage_perc{engine="vllm",model_name="m"} 0\.(2|19999)', page)
    assert 'flashspec:request_success_total{engine="vllm",finished_reason="stop",model_name="m"} 6.0' in page


def samples(front: Front) -> dict[str, float]:
    """Sums of all samples by name."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(front.get("/metrics").body.decode()):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


# the same with the real one


@pytest.mark.vllm
@pytest.mark.timeout(900)
@needs_vllm
def test_vllm_through_the_proxy(tmp_path: Path) -> None:
    program = Program(tmp_path, real(tmp_path, *NGRAM, *TOLD))
    try:
        wait_until(program.is_up, seconds=300)
        client = program.client(timeout=120)
        asked: dict[str, Any] = {"model": MODEL, "prompt": "1, 2, 3, 4, 5,", "max_tokens": 24, "temperature": 0}
        whole = client.completions.create(**asked)
        assert (
            "".join(chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True))
            == whole.choices[0].text
        )
        assert "flashspec:spec_decode_num_drafts_total" in program.get("/metrics").body.decode()
        stream = program.open("Once upon a time", max_tokens=100)
        assert stream.first()
        program.terminate()
        rest = list(stream)
        assert rest[-1]["choices"][0]["finish_reason"] == "length"
        assert program.process.wait(60) == 0
    finally:
        program.__exit__()
