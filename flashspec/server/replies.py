"""What goes back to a client: JSON, a stream of events, errors in OpenAI's words; and that a client has left.

It knows HTTP, which of our errors are whose fault, and no engine: the proxy in front of vLLM uses it, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import Any

from starlette.responses import Response

from flashspec.errors import FlashSpecError, MemoryLimitError, OptionError, PromptError
from flashspec.server.gate import Message, Receive, Scope, Send, encoded
from flashspec.server.protocol import ApiError
from flashspec.server.worker import BusyError, DrainingError, EngineError

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
EVENT_STREAM = "text/event-stream; charset=utf-8"
logger = logging.getLogger("flashspec.server")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error of ours."""
    text = str(error)
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BusyError):
        return ApiError(429, text, code="queue_full", headers={"Retry-After": str(error.retry_after)})
    if isinstance(error, DrainingError):
        return ApiError(503, text, code="shutting_down", headers={"Retry-After": "5"})
    if isinstance(error, MemoryLimitError):
        return ApiError(503, text, code="out_of_memory", headers={"Retry-After": "5"})
    if isinstance(error, PromptError | OptionError):
        return ApiError(400, text, code="invalid_value")
    if isinstance(error, FlashSpecError) and not isinstance(error, EngineError):
        return ApiError(500, text, code="model_error")
    logger.error("internal error", exc_info=error)
    return ApiError(500, text if isinstance(error, EngineError) else "internal error", code="internal_error")


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return encoded(content)


class EventStream(Response):
    """Server-sent events, until they end or the client leaves."""

    def __init__(self, events: AsyncIterator[bytes], *, seconds: float) -> None:
        # or proxies keep the tokens to themselves
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=EVENT_STREAM)
        del self.headers["content-length"]
        self.events, self.seconds = events, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED, timeout=self.seconds)
        finally:
            for task in (leaving, sending):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await sending

    async def _send(self, send: Send) -> None:
        async with contextlib.aclosing(self.events) as events:  # type: ignore[type-var]
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


async def gone(receive: Receive) -> None:
    """Return when the client has left."""
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


def event(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else encoded(body)) + b"\n\n"
