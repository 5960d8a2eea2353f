"""One HTTP request to a server behind this one, on a connection of its own; its answer is read as it comes.

It knows HTTP, by h11, which comes with uvicorn; it does not know what is asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence as Seq

import h11

CONNECT_SECONDS = 5.0
READ_BYTES = 65536
Headers = list[tuple[bytes, bytes]]
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
    b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip


class UpstreamError(Exception):
    """Nobody answers there, or the connection was lost before the answer was whole."""


class Answer:
    """Its status and headers; iterating gives its body, piece by piece."""

    def __init__(self, connection: h11.Connection, reader: asyncio.StreamReader) -> None:
        self._connection, self._reader = connection, reader
        self.status, self.headers = 0, Headers()

    async def begin(self) -> None:
        event = await self._next()
        while not isinstance(event, h11.Response):  # "100 Continue" and its like come first
            event = await self._next()
        self.status, self.headers = event.status_code, list(event.headers)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while isinstance(event := await self._next(), h11.Data):
            yield bytes(event.data)

    def header(self, name: bytes) -> bytes:
        return next((value for key, value in self.headers if key == name), b"")

    async def whole(self) -> bytes:
        return b"".join([part async for part in self])

    async def _next(self) -> h11.Event | type[h11.PAUSED]:
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                self._connection.receive_data(await self._reader.read(READ_BYTES))
        except OSError as error:
            raise UpstreamError(f"the connection was lost ({_why(error)})") from error
        except h11.RemoteProtocolError as error:
            raise UpstreamError(f"the connection was lost ({error})") from error
        return event  # type: ignore[return-value]  # it is not NEED_DATA


@contextlib.asynccontextmanager
async def exchange(
    host: str, port: int, method: str, target: bytes, headers: Headers | None = None, body: bytes | None = None
) -> AsyncIterator[Answer]:
    """Send a request; its answer has begun. Leaving the block hangs up.

    Raises:
        UpstreamError: see there; from reading the answer, too.
    """
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        raise UpstreamError(f"nobody answers ({_why(error)})") from error
    try:
        connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=READ_BYTES)
        writer.write(_spoken(connection, method, target, f"{host}:{port}".encode(), headers or [], body))
        with contextlib.suppress(OSError):  # it may answer, and hang up, before it has read everything
            await writer.drain()
        answer = Answer(connection, reader)
        await answer.begin()
        yield answer
    finally:
        writer.transport.abort()  # at once: the server ends what nobody waits for


def _why(error: OSError) -> str:
    """In the system's words: Python's name our private address, and clients are told of it."""
    return os.strerror(error.errno) if error.errno else "it took too long"


def passed(headers: Seq[tuple[bytes, bytes]], *, without: frozenset[bytes]) -> Headers:
    """Those that concern both ends, not only one connection."""
    named = {
        part.strip().lower() for key, value in headers if key.lower() == b"connection" for part in value.split(b",")
    }
    left_out = HOP_BY_HOP | without | named
    return [(key, value) for key, value in headers if key.lower() not in left_out]


def _spoken(
    connection: h11.Connection, method: str, target: bytes, host: bytes, headers: Headers, body: bytes | None
) -> bytes:
    own = [(b"host", host), (b"connection", b"close")]
    if body is not None:
        own.append((b"content-length", str(len(body)).encode()))
    events: list[h11.Event] = [h11.Request(method=method, target=target, headers=[*own, *headers])]
    events += [h11.Data(data=body)] if body else []
    return b"".join(connection.send(event) or b"" for event in [*events, h11.EndOfMessage()])
