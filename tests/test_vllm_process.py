"""A server's life, as a child of ours: whatever happens to it or to us, it is said, and nothing is left over."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from server_process import free_port
from vllm_process import (
    NGRAM,
    STANDIN,
    is_alive,
    needs_vllm,
    none_alive,
    nothing_left,
    real,
    running,
    seen,
    server_pid,
    standin,
    told_pids,
    wait_until,
)

from flashspec.errors import EngineStartError, OptionError
from flashspec.vllm import process as module
from flashspec.vllm.process import ServerProcess, is_healthy

pytestmark = pytest.mark.usefixtures(nothing_left.__name__)
SLACK = 2.0  # seconds beyond the grace in which all must be gone
# A user of ours: starts a server, says so, and waits; with "fork" a copy of it holds the same pipe.
USER = """
import os, sys, time
from pathlib import Path
from flashspec.vllm.process import ServerProcess
port, log, how, *words = sys.argv[1:]
process = ServerProcess(words, url=f"http://127.0.0.1:{port}", log=Path(log), grace=1.0, ready_seconds=300.0)
process.start()
if how == "fork" and os.fork() == 0:
    os.write(1, f"copy pid={os.getpid()}\\n".encode())
    time.sleep(60)
os.write(1, b"ready\\n")  # in one piece: the copy writes to the same pipe
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POLL", 0.05)


def group_of(log: Path) -> list[int]:
    """All in the sessions of those whose ids a log tells: what must not be left over."""
    sessions = set(told_pids(log))
    words = ["ps", "-e", "-o", "pid=", "-o", "sess=", "-o", "stat="]
    rows = [
        line.split() for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    return [int(pid) for pid, session, state in rows if int(session) in sessions and not state.startswith("Z")]


# how it starts


def test_it_is_ready_when_start_returns_and_gone_when_stop_does(tmp_path: Path) -> None:
    process = standin(tmp_path, *NGRAM)
    assert process.poll() is None
    process.start()
    assert is_healthy(process.url)
    assert process.poll() is None
    (pid,) = told_pids(process.log)
    assert os.getsid(pid) not in (os.getsid(0), os.getsid(os.getppid()))  # a terminal's Ctrl-C does not reach it
    assert process.stop() == 0
    assert none_alive([pid])
    assert not is_healthy(process.url)
    assert process.stop() is None  # as often as one likes
    assert process.poll() is None


def test_progress_is_told_while_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOLD_EVERY", 0.3)
    process, lines = standin(tmp_path, fault="slow-ready"), []
    process.start(lines.append)
    process.kill()
    assert len(lines) >= 3
    assert all(re.match(r"starting python\S*: \d+ s \(log: .*\.log\)$", line) for line in lines)
    assert str(process.log) in lines[0]


def test_the_environment_is_ours_and_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_FAULT", "exit2")
    with running(standin(tmp_path, fault="")) as process:
        assert seen(process.url) == []
    monkeypatch.setenv("VLLM_API_KEY", "k")
    with running(standin(tmp_path)) as process, pytest.raises(urllib.error.HTTPError, match="401") as told:
        urllib.request.urlopen(f"{process.url}/v1/models", timeout=5)
    told.value.close()


def test_its_time_is_limited(tmp_path: Path) -> None:
    process = standin(tmp_path, fault="never-ready", ready_seconds=0.6)
    started = time.monotonic()
    with pytest.raises(
        EngineStartError, match=r"(?s)was not ready after 1 s; its log is .*standin pid=.*--ready-timeout"
    ):
        process.start()
    assert time.monotonic() - started < 0.6 + process.grace + SLACK
    assert none_alive(told_pids(process.log))


def test_a_wrong_flag_is_told(tmp_path: Path) -> None:
    process = standin(tmp_path, fault="exit2")
    with pytest.raises(EngineStartError) as told:
        process.start()
    assert re.search(r"ended with status 2 after \d s; its log is ", str(told.value))
    assert str(process.log) in str(told.value)
    assert "unrecognized arguments: --nope" in str(told.value)
    assert "cause" not in str(told.value)


def test_the_cause_is_found_far_above_the_last_lines(tmp_path: Path) -> None:
    process = standin(tmp_path, fault="exit1-traceback")
    with pytest.raises(EngineStartError, match="ended with status 1") as told:
        process.start()
    lines = str(told.value).splitlines()
    assert lines[1] == "cause: ValueError: the weights are made of cheese"
    assert lines[-1] == "(EngineCore pid=1) INFO line 39 of the end"
    assert len(lines) == 2 + module.LAST_LINES
    assert "Traceback" in process.log.read_text(encoding="utf-8")  # all of it is kept


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = standin(tmp_path, port=port)
        with pytest.raises(OptionError, match=rf"port {port} of 127.0.0.1 is taken .*; choose another --port"):
            process.start()
    assert not process.log.exists()  # nothing was started


def test_another_server_on_its_port_is_not_taken_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_port", lambda host, port: None)  # it has come after the check
    with running(standin(tmp_path)) as other:
        late = standin(tmp_path, port=int(other.url.rpartition(":")[2]), log=tmp_path / "late.log", fault="slow-ready")
        monkeypatch.setattr(module, "is_healthy", lambda url: late.poll() is not None)
        with pytest.raises(EngineStartError, match="Address already in use"):
            late.start()


def test_no_such_program(tmp_path: Path) -> None:
    process = ServerProcess([str(tmp_path / "vllm"), "serve"], url="http://127.0.0.1:9", log=tmp_path / "log")
    with pytest.raises(OptionError, match=r"there is no program .*vllm; install it"):
        process.start()


def test_a_log_of_its_own_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tempfile, "tempdir", str(tmp_path))
    with running(standin(tmp_path, log=None)) as process:
        pass
    assert process.log.parent == tmp_path
    assert "standin pid=" in process.log.read_text(encoding="utf-8")


def test_a_log_is_continued_and_only_its_last_run_is_told(tmp_path: Path) -> None:
    log = tmp_path / "both.log"
    with pytest.raises(EngineStartError, match="cheese"):
        standin(tmp_path, fault="exit1-traceback", log=log).start()
    with pytest.raises(EngineStartError, match="--nope") as told:
        standin(tmp_path, fault="exit2", log=log).start()
    assert "cheese" not in str(told.value)
    assert "cheese" in log.read_text(encoding="utf-8")


def test_stopping_it_while_it_starts(tmp_path: Path) -> None:
    process, raised = standin(tmp_path, fault="never-ready"), []

    def start() -> None:
        with pytest.raises(EngineStartError, match="stopped before it was ready") as told:
            process.start()
        raised.append(told.value)

    thread = threading.Thread(target=start)
    thread.start()
    wait_until(lambda: process.log.exists() and told_pids(process.log))
    process.stop()
    thread.join(5)
    assert raised
    assert none_alive(told_pids(process.log))


# how it ends


def test_stop_ends_grandchildren_that_ignore_sigterm(tmp_path: Path) -> None:
    process = standin(tmp_path, fault="spawn-children", grace=0.5)
    process.start()
    wait_until(lambda: len(told_pids(process.log)) == 2)
    pids = group_of(process.log)
    assert len(pids) == 3  # the server, a shell and what that has started
    started = time.monotonic()
    process.stop()
    assert 0.5 <= time.monotonic() - started < 0.5 + SLACK
    assert none_alive(pids)


def test_a_server_that_ignores_sigterm_is_killed_after_the_grace(tmp_path: Path) -> None:
    process = standin(tmp_path, fault="ignore-sigterm", grace=0.5)
    process.start()
    started = time.monotonic()
    assert process.stop() == 128 + signal.SIGKILL
    assert 0.5 <= time.monotonic() - started < 0.5 + SLACK


def test_kill_does_not_wait_even_for_somebody_who_stops_it(tmp_path: Path) -> None:
    process = standin(tmp_path, fault="ignore-sigterm", grace=60.0)
    process.start()
    stopping = threading.Thread(target=process.stop)
    stopping.start()
    time.sleep(0.3)
    started = time.monotonic()
    process.kill()
    stopping.join(5)
    assert time.monotonic() - started < SLACK
    assert none_alive(told_pids(process.log))


def test_its_workers_do_not_outlive_it(tmp_path: Path) -> None:
    process = standin(tmp_path, fault="spawn-children")
    process.start()
    wait_until(lambda: len(told_pids(process.log)) == 2)
    pids = group_of(process.log)
    os.kill(server_pid(process), signal.SIGKILL)
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 128 + signal.SIGKILL
    assert none_alive(pids)
    process.stop()


@pytest.mark.parametrize("how", ["alone", "fork"])
def test_nothing_is_left_when_we_are_killed(tmp_path: Path, how: str) -> None:
    log, port = tmp_path / "log", free_port()
    words = [sys.executable, "-S", STANDIN, "serve", "m", "--port", str(port)]
    env = os.environ | {"STANDIN_FAULT": "spawn-children,ignore-sigterm"}
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(port), str(log), how, *words], stdout=subprocess.PIPE, env=env, text=True
    ) as user:
        assert user.stdout is not None
        said = [user.stdout.readline() for _ in range(1 if how == "alone" else 2)]
        assert "ready\n" in said
        wait_until(lambda: len(told_pids(log)) == 2)
        pids = group_of(log)
        assert len(pids) == 3
        user.kill()
        user.wait()
        assert wait_until(lambda: none_alive(pids)) < 1.0 + SLACK
        for line in said:
            if found := re.search(r"pid=(\d+)", line):
                os.kill(int(found[1]), signal.SIGKILL)


def test_it_can_be_started_again(tmp_path: Path) -> None:
    process = standin(tmp_path)
    with running(process):
        os.kill(server_pid(process), signal.SIGKILL)
        wait_until(lambda: process.poll() is not None)
        process.start()
        assert is_healthy(process.url)
        process.stop()
        process.start()
        assert is_healthy(process.url)
    assert len(told_pids(process.log)) == 3
    assert none_alive(told_pids(process.log))


# the same with the real one


@pytest.mark.vllm
@pytest.mark.timeout(600)
@needs_vllm
def test_vllm_is_ready_and_leaves_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    process = real(tmp_path, *NGRAM)
    process.start(lines.append)
    assert is_healthy(process.url)
    assert len(lines) >= 3
    pids = children_of(process)
    assert len(pids) >= 2  # the server and its engine
    process.stop()
    assert none_alive(pids)


@pytest.mark.vllm
@pytest.mark.timeout(600)
@needs_vllm
def test_vllm_does_not_outlive_us(tmp_path: Path) -> None:
    process = real(tmp_path)
    port, log = process.url.rpartition(":")[2], str(tmp_path / "log")
    words = [sys.executable, "-c", USER, port, log, "alone", *process.words]
    with subprocess.Popen(words, stdout=subprocess.PIPE, env=os.environ | process.env, text=True) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == "ready\n"
        pids = descendants(user.pid)
        assert len(pids) >= 3  # the guard, the server and its engine
        user.kill()
        user.wait()
        assert wait_until(lambda: none_alive(pids)) < 1.0 + 2 * SLACK


@pytest.mark.vllm
@pytest.mark.timeout(300)
@needs_vllm
@pytest.mark.parametrize(
    ("options", "status", "text"),
    [
        (["--nope"], 2, "unrecognized arguments: --nope"),
        (["--speculative-config", '{"method": "ngram"}'], 1, "num_speculative_tokens"),
    ],
    ids=["flag", "configuration"],
)
def test_vllm_says_what_is_wrong(tmp_path: Path, options: list[str], status: int, text: str) -> None:
    process = real(tmp_path, *options)
    with pytest.raises(EngineStartError, match=f"ended with status {status}") as told:
        process.start()
    assert text in str(told.value)


def children_of(process: ServerProcess) -> list[int]:
    assert process._guard is not None
    return descendants(process._guard.pid)


def descendants(pid: int) -> list[int]:
    """Of a process, whatever session they are in."""
    words = ["ps", "-e", "-o", "pid=", "-o", "ppid="]
    rows = [
        line.split() for line in subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    ]
    found, new = [], [pid]
    while new:
        new = [int(child) for child, parent in rows if int(parent) in new]
        found += new
    with contextlib.suppress(ValueError):
        found.remove(pid)
    return [each for each in found if is_alive(each)]
