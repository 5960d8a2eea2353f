"""A server's life: its socket, its log, and how it ends.

The first SIGTERM or SIGINT drains: what runs is finished, nothing new is taken, exit code 0. A second one ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import uvicorn

from flashspec.errors import OptionError

if TYPE_CHECKING:
    from flashspec.server.service import Service

BACKLOG = 2048
ENDED_AT_ONCE = 130  # exit code after a second signal
logger = logging.getLogger("flashspec.server")


def bound(host: str, port: int) -> socket.socket:
    """A socket of its own, before a model is loaded for nothing.

    Raises:
        OptionError: the address is taken or not this machine's.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.socket(family=family)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)  # now, or another server could still take the port; who comes early waits
    except (OSError, OverflowError) as error:
        raise OptionError(f"cannot listen on {host}:{port} ({error}); choose another --host or --port") from error
    return sock


def serve(service: Service, sock: socket.socket) -> None:
    """Answer on a bound socket until a signal comes."""
    from flashspec.server.app import create_app  # brings torch, and the proxy, which is run from here, has none

    config = uvicorn.Config(
        create_app(service), log_config=None, access_log=False, backlog=BACKLOG, timeout_keep_alive=30, ws="none",
        server_header=False,
    )  # fmt: skip
    server = _Server(config)
    asyncio.run(_until_drained(service, server, sock))


class _Server(uvicorn.Server):
    """uvicorn's, with signals left to us: its own end the process with the signal's code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _until_drained(service: Service, server: _Server, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, signals.put_nowait, each)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    ending = asyncio.ensure_future(_end(service, server, signals))
    await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    await serving
    ending.cancel()


async def _end(service: Service, server: _Server, signals: asyncio.Queue[signal.Signals]) -> None:
    name = (await signals.get()).name
    logger.info("%s: finishing what runs; again to end at once", name)
    draining = asyncio.ensure_future(_drain(service, server))
    again = asyncio.ensure_future(signals.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    if again.done():
        logger.warning("%s again: ending at once", again.result().name)
        logging.shutdown()
        os._exit(ENDED_AT_ONCE)
    await again  # uvicorn waits for answers that are still being sent; a second signal must reach us there, too
    os._exit(ENDED_AT_ONCE)


async def _drain(service: Service, server: _Server) -> None:
    await service.worker.drain()
    server.should_exit = True


# the log


class JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    """The same for eyes."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_shown(value)}" for name, value in getattr(record, "fields", {}).items())
        text = f"{self.formatTime(record, '%H:%M:%S')} {record.levelname:7} {record.getMessage()} {fields}".rstrip()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def _shown(value: object) -> str:
    """A client's words must not look like lines of ours."""
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


def set_up_log(kind: Literal["text", "json"], *, verbose: bool) -> None:
    """Lines on stderr; prompts are in none of them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("flashspec").setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
