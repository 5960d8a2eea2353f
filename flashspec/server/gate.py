"""What every request passes: a name for it, the key, the size and the pace of its body, its line in the log.

It knows ASGI; it does not know the API. Whatever goes wrong behind it ends as an error in OpenAI's format.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from flashspec.server.protocol import ApiError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

BODY_SECONDS = 30.0  # a client that takes longer to send its request is slow on purpose
DISCARDED = 16  # times the limit of a body that is read and thrown away
GOOD_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
logger = logging.getLogger("flashspec.server")


def encoded(body: Any) -> bytes:
    """JSON, whatever lone surrogates a client has sent."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


class Gate:
    """ASGI middleware around the API.

    Args:
        app: what lies behind.
        api_key: asked of everything under /v1; None asks nothing.
        max_body: bytes.
        observe_status: called with the status of each request to the API.
    """

    def __init__(self, app: App, *, api_key: str | None, max_body: int, observe_status: Callable[[int], None]) -> None:
        self.app, self.api_key, self.max_body, self.observe_status = app, api_key, max_body, observe_status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if GOOD_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=name, log={})
        reply = _Reply(send, name)
        started = time.perf_counter()
        try:
            self._check_key(scope, headers)
            body = await self._body(receive, headers) if scope["method"] in ("POST", "PUT", "PATCH") else None
            self._check_kind(scope, headers)
            await self.app(scope, receive if body is None else _replayed(body, receive), reply.send)
        except ApiError as error:
            await reply.fail(error)
        except _GoneError:
            reply.status = 499
        except Exception:
            logger.exception("request %s failed", name)
            await reply.fail(ApiError(500, "internal error; the server's log has it", code="internal_error"))
        finally:
            self._log(scope, reply.status or 499, time.perf_counter() - started)

    def _check_key(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        if self.api_key is None or not scope["path"].startswith("/v1") or scope["method"] == "OPTIONS":
            return
        given = headers.get(b"authorization", b"")
        if not hmac.compare_digest(given, b"Bearer " + self.api_key.encode()):
            what = "no API key was given" if not given else "the API key is not the server's"
            raise ApiError(
                401, f"{what}; send it as Authorization: Bearer KEY", code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )  # fmt: skip

    def _check_kind(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        """Other kinds are what web pages may send anywhere without asking, and what curl sends unless it is told."""
        if scope["method"] != "POST" or not scope["path"].startswith("/v1"):
            return
        kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
        if not (kind.startswith(b"application/") and kind.endswith((b"/json", b"+json"))):
            said = kind.decode("latin-1")[:80] or "missing"
            raise ApiError(
                400, f"the content type is {said}; send Content-Type: application/json", code="invalid_content_type"
            )

    async def _body(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        """The whole body, before anything is done with it."""
        too_large = ApiError(
            413, f"the body is larger than {self.max_body} bytes; shorten it, or raise --max-body",
            code="request_too_large", headers={"Connection": "close"},
        )  # fmt: skip
        declared = headers.get(b"content-length", b"0")
        length = int(declared) if declared.isdigit() else 0
        # one that waits to be told has sent nothing; what is much too long is not worth waiting for
        if length > self.max_body and (b"expect" in headers or length > DISCARDED * self.max_body):
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _GoneError
                    part = message.get("body", b"")
                    size += len(part)
                    # a client that is still sending would not see the answer: read on, but keep nothing
                    parts.append(part)
                    if size > self.max_body:
                        parts.clear()
                    if size > DISCARDED * self.max_body or (size > self.max_body and not message.get("more_body")):
                        raise too_large
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise ApiError(
                408, f"the body did not arrive within {BODY_SECONDS:.0f} seconds", code="timeout",
                headers={"Connection": "close"},
            ) from None  # fmt: skip

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        path: str = scope["path"]
        is_api = path.startswith("/v1")
        if is_api:
            self.observe_status(status)
        state = scope["state"]
        fields = {
            "request_id": state["request_id"], "method": scope["method"], "path": path[:200], "status": status,
            "seconds": round(seconds, 4), **state["log"],
        }  # fmt: skip
        logger.log(logging.INFO if is_api else logging.DEBUG, "request", extra={"fields": fields})


class _GoneError(Exception):
    """The client left before its request was whole."""


class _Reply:
    """The answer on its way: its status, and a header with the request's name."""

    def __init__(self, send: Send, name: str) -> None:
        self._send, self._name = send, name
        self.status: int | None = None

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (b"x-request-id", self._name.encode())]
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        if self.status is not None:  # it has begun: all that can be done is to end it
            return
        body = encoded(error.body())
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(name.lower().encode(), value.encode()) for name, value in error.headers.items()]
        await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})


def _replayed(body: bytes, receive: Receive) -> Receive:
    """A ``receive`` that gives a body that was read before, then waits for the client to leave."""
    parts = [body]

    async def again() -> Message:
        if parts:
            return {"type": "http.request", "body": parts.pop(), "more_body": False}
        return await receive()

    return again
