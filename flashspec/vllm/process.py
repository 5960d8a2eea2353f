"""A server process: started, waited for, watched, and ended with all of its children.

It knows processes, ports and logs; it does not know vLLM's options or API, but for its health endpoint.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from pathlib import Path
from urllib.parse import urlsplit

from flashspec.errors import EngineStartError, OptionError
from flashspec.vllm import guard

Progress = Callable[[str], None]
GRACE = 15.0  # seconds between SIGTERM and SIGKILL
POLL = 0.5
TOLD_EVERY = 5.0  # seconds between two lines of progress
LAST_LINES = 12
MOST_LOG = 4 << 20  # bytes of a log that are searched for a cause
CAUSE = re.compile(r"^(?:.*\b)?(\w*(?:Error|Exception))\b: .+")


class ServerProcess:
    """One server of our own.

    Args:
        words: the command.
        env: variables on top of ours.
        url: where it will answer.
        log: what it writes; a file of its own in the temporary folder if None, kept.
        ready_seconds: until its health endpoint has to answer.
        grace: seconds that it may take to finish after SIGTERM.
    """

    def __init__(
        self,
        words: Seq[str],
        *,
        url: str,
        env: Mapping[str, str] | None = None,
        log: Path | None = None,
        ready_seconds: float = 900.0,
        grace: float = GRACE,
    ) -> None:
        self.words, self.url, self.env = list(words), url.rstrip("/"), dict(env or {})
        self.ready_seconds, self.grace = ready_seconds, grace
        if log is None:
            handle, name = tempfile.mkstemp(prefix="flashspec-vllm-", suffix=".log")
            os.close(handle)
            log = Path(name)
        self.log = log
        self._log_start = 0  # where the log of the run at hand begins
        self._is_wanted = False
        self._guard: subprocess.Popen[bytes] | None = None

    def start(self, progress: Progress | None = None) -> None:
        """Start it and return when it is ready. One that has ended is started again.

        Raises:
            OptionError: its port is taken, or there is no such program.
            EngineStartError: it ended or was not ready in time, or somebody stopped it; with the cause from its log.
        """
        self.stop()
        self._is_wanted = True
        if shutil.which(self.words[0]) is None:
            raise OptionError(f"there is no program {self.words[0]}; install it, or give the path to it")
        where = urlsplit(self.url)
        check_port(where.hostname or "127.0.0.1", where.port or 80)
        self._launch()
        try:
            self._wait(progress or (lambda line: None))
        except BaseException:
            self.stop()
            raise

    def poll(self) -> int | None:
        """Its exit status; None while it runs or before it was started."""
        return None if self._guard is None else self._guard.poll()

    def stop(self) -> int | None:
        """End it and everything that it has started, in ``grace`` seconds; its exit status."""
        self._is_wanted = False
        return self._end(guard.STOP, self.grace + 10)

    def kill(self) -> int | None:
        """The same at once, also while somebody waits in ``stop``."""
        self._is_wanted = False
        return self._end(guard.KILL, 10)

    def _end(self, word: bytes, seconds: float) -> int | None:
        child = self._guard
        if child is None or child.stdin is None:
            return None
        with contextlib.suppress(OSError, ValueError):  # it has ended, or somebody else has closed it
            child.stdin.write(word)
            child.stdin.flush()
        try:
            return child.wait(seconds)
        except subprocess.TimeoutExpired:  # something that not even SIGKILL ends
            child.kill()
            return None
        finally:
            with contextlib.suppress(OSError):
                child.stdin.close()
            if self._guard is child:
                self._guard = None

    def last_lines(self, count: int = LAST_LINES) -> str:
        """The end of its log, and before it the first error, which engines name far above the last line."""
        lines = self._lines()
        cause = next((line.strip() for line in lines if CAUSE.match(line)), None)
        end = [line.rstrip() for line in lines if line.strip()][-count:]
        is_shown = any(line.strip() == cause for line in end)
        return "\n".join([*([f"cause: {cause}"] if cause and not is_shown else []), *end])

    def _lines(self) -> list[str]:
        """The log of the run at hand, of a long one its end."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            log.seek(max(self._log_start, self.log.stat().st_size - MOST_LOG))
            return log.read().decode("utf-8", "replace").splitlines()

    def _launch(self) -> None:
        # without our package and without PYTHON*: it needs neither
        words = [sys.executable, "-I", guard.__file__, str(self.grace), *self.words]
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._guard = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, env={**os.environ, **self.env},
                start_new_session=True,
            )  # fmt: skip

    def _wait(self, progress: Progress) -> None:
        started, told = time.monotonic(), -TOLD_EVERY
        while True:
            is_ready = is_healthy(self.url)  # asked before: once it has ended somebody else may answer there
            seconds = time.monotonic() - started
            if not self._is_wanted:
                raise EngineStartError(f"{self.words[0]} was stopped before it was ready, after {seconds:.0f} s")
            if (status := self.poll()) is not None:
                raise EngineStartError(
                    f"{self.words[0]} ended with status {status} after {seconds:.0f} s; its log is {self.log}:\n"
                    f"{self.last_lines()}"
                )
            if is_ready:
                return
            if seconds > self.ready_seconds:
                raise EngineStartError(
                    f"{self.words[0]} was not ready after {self.ready_seconds:.0f} s; its log is {self.log}:\n"
                    f"{self.last_lines()}\ngive it more time with --ready-timeout"
                )
            if seconds >= told + TOLD_EVERY:
                told = seconds
                progress(f"starting {Path(self.words[0]).name}: {seconds:.0f} s (log: {self.log})")
            time.sleep(POLL)


def check_port(host: str, port: int) -> None:
    """Raise OptionError where somebody else listens."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError as error:
            raise OptionError(f"port {port} of {host} is taken ({error}); choose another --port") from error


def is_healthy(url: str, *, timeout: float = 2.0) -> bool:
    """Whether a server's health endpoint says so."""
    where = urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname or "127.0.0.1", where.port, timeout=timeout)
    try:
        connection.request("GET", f"{where.path.rstrip('/')}/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
