"""The stand-in for vLLM as a process, the real one where FLASHSPEC_VLLM names it, and who is still alive."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from server_process import free_port

from flashspec.vllm.process import ServerProcess

STANDIN = str(Path(__file__).with_name("standin.py"))
MODEL = "m"
K = 4
NGRAM = ("--speculative-config", json.dumps({"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 4}))
TOLD = ("--per-request-spec-decode-metrics", "summary")
_NAMED = os.environ.get("FLASHSPEC_VLLM")
REAL = str(Path(_NAMED, "bin", "vllm")) if _NAMED and Path(_NAMED).is_dir() else _NAMED  # its folder, or itself
REAL_MODEL = Path.home() / ".cache" / "flashspec-models" / "smollm2"
REAL_ENV = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
_made: list[ServerProcess] = []
needs_vllm = pytest.mark.skipif(REAL is None, reason="FLASHSPEC_VLLM names no vllm")


def standin(
    folder: Path, *options: str, fault: str = "", env: dict[str, str] | None = None, port: int = 0, **more: Any
) -> ServerProcess:
    """Not started yet."""
    port = port or free_port()
    words = [sys.executable, "-S", STANDIN, "serve", MODEL, "--host", "127.0.0.1", "--port", str(port), *options]
    given: dict[str, Any] = {"log": folder / f"standin-{port}.log", "ready_seconds": 30.0, "grace": 2.0} | more
    return _kept(
        ServerProcess(words, url=f"http://127.0.0.1:{port}", env={"STANDIN_FAULT": fault} | (env or {}), **given)
    )


def real(folder: Path, *options: str, **more: Any) -> ServerProcess:
    port = free_port()
    words = [
        str(REAL), "serve", str(REAL_MODEL), "--host", "127.0.0.1", "--port", str(port), "--served-model-name", MODEL,
        "--max-model-len", "1024", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4", *options,
    ]  # fmt: skip
    given: dict[str, Any] = {"log": folder / f"vllm-{port}.log", "ready_seconds": 300.0} | more
    return _kept(ServerProcess(words, url=f"http://127.0.0.1:{port}", env=REAL_ENV, **given))


def _kept(process: ServerProcess) -> ServerProcess:
    _made.append(process)
    return process


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """A failed test's servers do not disturb the next one."""
    count = len(_made)
    yield
    while len(_made) > count:
        _made.pop().kill()


@contextmanager
def running(process: ServerProcess) -> Iterator[ServerProcess]:
    process.start()
    try:
        yield process
    finally:
        process.kill()


def server_pid(process: ServerProcess) -> int:
    """The newest one's."""
    found = re.findall(r"standin pid=(\d+)", process.log.read_text(encoding="utf-8"))
    return int(found[-1])


def told_pids(log: Path) -> list[int]:
    """Of everything that has said so in a log."""
    return [int(pid) for pid in re.findall(r"pid=(\d+)", log.read_text(encoding="utf-8", errors="replace"))]


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state != "Z"


def wait_until(condition: Callable[[], Any], *, seconds: float = 20.0) -> float:
    """Until it is true; the seconds it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, "it did not happen in time"
        time.sleep(0.02)
    return time.monotonic() - started


def none_alive(pids: list[int]) -> bool:
    return not any(map(is_alive, pids))


def seen(url: str) -> list[dict[str, Any]]:
    """The requests that a stand-in has got, oldest first."""
    with urllib.request.urlopen(f"{url}/seen", timeout=10) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read())
        return found


def num_running(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
        assert found is not None
        return float(found[1])
