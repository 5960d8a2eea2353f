"""What stands in front of a vLLM that listens on a private port: gate, page, metrics and end are our own server's.

It knows HTTP, the one field of our API that vLLM does not have, and when its process lives; the rest of the API is
vLLM's. Whatever vLLM does, a request ends with its answer or with an error: vLLM itself would give those that it cuts
off a status of 200 and the finish reason "abort".
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal
from urllib.parse import urlsplit

import uvicorn
from pydantic import ValidationError
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, Response

from flashspec.errors import FlashSpecError
from flashspec.server.exported import Exported
from flashspec.server.gate import App, Gate, Receive, Scope, Send, encoded
from flashspec.server.protocol import ApiError, Speculative, invalid, shown
from flashspec.server.replies import EVENT_STREAM, POLICY, Json, as_api_error, event, gone
from flashspec.server.run import BACKLOG, ENDED_AT_ONCE, _Server
from flashspec.server.upstream import Answer, Headers, UpstreamError, exchange, passed
from flashspec.vllm.process import Progress, ServerProcess

State = Literal["starting", "ok", "restarting", "shutting down"]
POLL = 0.2  # seconds between two looks at the process
LOST_SECONDS = 0.6  # until the status of a process that has ended must be known
SAMPLE = 10.0  # seconds between two looks at its metrics and health
BACKOFF, MOST_BACKOFF = 1.0, 30.0  # seconds before the first restart, doubled for each that follows at once
STEADY = 600.0  # seconds after which a restart is forgotten
RETRY = {"Retry-After": "5"}
# what is made anew for each connection; Origin, because which web pages may ask is decided here
NOT_SENT = frozenset({b"host", b"content-length", b"expect", b"origin", b"x-request-id"})
NOT_RETURNED = frozenset({b"date", b"x-request-id"})
CUT_OFF = b'"finish_reason":"abort"'  # with these quotes it cannot be part of a text
logger = logging.getLogger("flashspec.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxySettings:
    """How a server treats its clients, and its vLLM."""

    model_name: str
    api_key: str | None = None
    request_timeout: float = 600.0  # seconds, vLLM's queue included
    max_body: int = 4 << 20  # bytes
    cors_origins: tuple[str, ...] = ()
    restarts: int = 3  # in a row


class Proxy:
    """An ASGI application in front of a vLLM, and the vLLM's life.

    Args:
        process: not started yet.
        settings: see there.
    """

    def __init__(self, process: ServerProcess, settings: ProxySettings) -> None:
        self.process, self.settings = process, settings
        where = urlsplit(process.url)
        self.address = where.hostname or "127.0.0.1", where.port or 80
        self.state: State = "starting"
        self.num_running = 0
        self.exported = Exported(settings.model_name)
        self.speculates = any(word.startswith(("--speculative-config", "-sc", "--spec-")) for word in process.words)
        self._page = resources.files("flashspec.server").joinpath("page.html").read_text(encoding="utf-8")
        self._app: App = Gate(
            self._route, api_key=settings.api_key, max_body=settings.max_body,
            observe_status=self.exported.observe_status,
        )  # fmt: skip
        if settings.cors_origins:  # outermost, or a web page could not read why it was refused
            self._app = CORSMiddleware(
                self._app, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    # vLLM's life

    async def keep(self, progress: Progress | None = None) -> str:
        """Start vLLM, and again when it dies; why there is no sense in going on.

        Raises:
            EngineStartError, OptionError: it did not start the first time.
        """
        await asyncio.to_thread(self.process.start, progress)
        failures = 0
        while True:
            self.state, began = "ok", time.monotonic()
            logger.info("%s serves %s", self.process.url, self.settings.model_name)
            cause = f"vLLM ended with status {await self._end()}:\n{self.process.last_lines()}"
            failures = 0 if time.monotonic() - began > STEADY else failures
            self.state = "restarting"
            while True:
                logger.error("%s", cause)
                if failures >= self.settings.restarts:
                    return cause
                await asyncio.sleep(min(BACKOFF * 2**failures, MOST_BACKOFF))
                failures += 1
                logger.info("restart %d of %d", failures, self.settings.restarts)
                try:
                    await asyncio.to_thread(self.process.start, progress)
                    break
                except FlashSpecError as error:
                    cause = str(error)

    async def _end(self) -> int:
        """Wait until the process ends, and keep an eye on its counters; its exit status."""
        self.exported.forget()
        looked = -SAMPLE
        while (status := self.process.poll()) is None:
            if time.monotonic() >= looked + SAMPLE:
                looked = time.monotonic()
                if (text := await self._metrics()) is not None:
                    self.exported.observe(text)
            await asyncio.sleep(POLL)
        return status

    async def drain(self) -> None:
        """Take nothing new, let vLLM finish what runs, and end it."""
        self.state = "shutting down"
        while self.num_running:
            await asyncio.sleep(POLL / 4)
        await asyncio.to_thread(self.process.stop)

    # requests

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith("/v1/"):
            await self._relay(scope, receive, send)
            return
        routes: dict[str, Callable[[], Awaitable[Response]]] = {
            "/": self._playground, "/health": self._health, "/ready": self._ready, "/metrics": self._prometheus,
        }  # fmt: skip
        if path not in routes:
            raise ApiError(404, f"there is no {path[:80]}", code="not_found")
        if scope["method"] not in ("GET", "HEAD"):
            raise ApiError(405, f"{path} can only be read", headers={"Allow": "GET, HEAD"})
        await (await routes[path]())(scope, receive, send)

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.admit()
        body = (await receive())["body"] if scope["method"] in ("POST", "PUT", "PATCH") else None  # the gate has it all
        relay = _Relay(self, scope, send, None if body is None else self.translated(body))
        self.num_running += 1
        try:
            await relay.run(receive)
        finally:
            self.num_running -= 1

    def admit(self) -> None:
        """Raise ApiError where there is no vLLM to ask."""
        if self.state == "shutting down":
            raise ApiError(503, "the server is shutting down; ask another", code="shutting_down", headers=RETRY)
        if self.state != "ok":
            raise self.lost(f"vLLM is {self.state}")

    def lost(self, what: str) -> ApiError:
        return ApiError(503, f"{what}; try again in a while", code="engine_lost", headers=RETRY)

    def translated(self, body: bytes) -> bytes:
        """A request without our own field, which vLLM would ignore.

        Raises:
            ApiError: it asks for something that only our own engine can do.
        """
        if b'"speculative"' not in body:
            return body
        try:
            request = json.loads(body)
        except (ValueError, RecursionError):
            return body  # vLLM says what is wrong with it
        if not isinstance(request, dict) or "speculative" not in request:
            return body
        if (asked := request.pop("speculative")) is not None:
            self._check(asked)
        return encoded(request)

    def _check(self, asked: Any) -> None:
        try:
            told = Speculative.model_validate(asked)
        except ValidationError as error:
            raise invalid(error.errors(), within="speculative") from None
        is_off = not told.enabled or told.drafter == "none" or told.num_speculative_tokens == 0
        if is_off and not self.speculates:
            return
        how = "leave it out, or ask a server that was started in another way"
        if is_off:
            name, why, how = "enabled", "vLLM drafts for all requests or for none", "ask one with --drafter none"
        elif told.drafter is not None:
            name, why = "drafter", f"vLLM's drafter is chosen when it starts, so {shown(told.drafter)} cannot be"
        elif told.num_speculative_tokens is not None:
            name, why = "num_speculative_tokens", "vLLM's draft length is chosen when it starts"
        else:
            return
        raise ApiError(400, f"speculative.{name}: {why}; {how}", param=f"speculative.{name}", code="unsupported")

    # our own pages

    async def _playground(self) -> Response:
        return HTMLResponse(
            self._page, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        )

    async def _health(self) -> Response:
        """Whether this process does its work, be it to restart vLLM: a supervisor should leave it alone."""
        return Json({"status": self.state})

    async def _ready(self) -> Response:
        """Whether requests are answered."""
        is_ready = self.state == "ok" and await self._get("/health") is not None
        state = "vLLM does not answer" if self.state == "ok" and not is_ready else self.state
        return Json({"status": state}, 200 if is_ready else 503)

    async def _prometheus(self) -> Response:
        text = await self._metrics()
        return Response(self.exported.page(text), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _metrics(self) -> str | None:
        body = await self._get("/metrics")
        return None if body is None else body.decode("utf-8", "replace")

    async def _get(self, path: str) -> bytes | None:
        """What vLLM itself has there; None where it does not answer, or with an error."""
        try:
            async with asyncio.timeout(SAMPLE / 2), exchange(*self.address, "GET", path.encode()) as answer:
                body = await answer.whole()
                return body if answer.status == 200 else None
        except (UpstreamError, TimeoutError):
            return None


class _Relay:
    """One request on its way to vLLM, and its answer on the way back."""

    def __init__(self, proxy: Proxy, scope: Scope, send: Send, body: bytes | None) -> None:
        self.proxy, self.scope, self.send, self.body = proxy, scope, send, body
        self.is_stream = self.has_begun = False

    async def run(self, receive: Receive) -> None:
        """Until it is answered, its time is up, or the client has left, which ends it in vLLM, too."""
        limit = self.proxy.settings.request_timeout
        answering = asyncio.ensure_future(self._answer())
        leaving = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED, timeout=limit)
            if answering.done():
                answering.result()
            elif not leaving.done():
                answering.cancel()
                await asyncio.wait((answering,))
                await self._fail(ApiError(504, f"the request took longer than {limit:g} seconds", code="timeout"))
        except UpstreamError as error:
            await self._fail(await self._lost(error))
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self) -> None:
        target = self.scope["raw_path"] + (b"?" + query if (query := self.scope["query_string"]) else b"")
        headers = passed(self.scope["headers"], without=NOT_SENT)
        headers.append((b"x-request-id", self.scope["state"]["request_id"].encode()))
        async with exchange(*self.proxy.address, self.scope["method"], target, headers, self.body) as answer:
            kind = answer.header(b"content-type")
            self.is_stream = kind.startswith(EVENT_STREAM.split(";")[0].encode())
            if self.is_stream:
                await self._stream(answer)
            elif kind.startswith(b"application/json"):
                await self._whole(answer)
            else:
                await self._begin(answer)
                async for part in answer:
                    await self._more(part)
            await self.send({"type": "http.response.body", "body": b""})

    async def _stream(self, answer: Answer) -> None:
        """Event by event: half a one would hide the error that may come instead of the rest."""
        await self._begin(answer, [(b"x-accel-buffering", b"no")])  # or proxies keep the tokens to themselves
        rest = b""
        async for part in answer:
            rest += part
            end = rest.rfind(b"\n\n") + 2
            if end >= 2:
                self._check(rest[:end])
                await self._more(rest[:end])
                rest = rest[end:]
        await self._more(rest)

    async def _whole(self, answer: Answer) -> None:
        body = await answer.whole()
        self._check(body)
        await self._begin(answer)
        await self._more(body)

    def _check(self, body: bytes) -> None:
        if CUT_OFF in body:
            raise UpstreamError("vLLM has cut it off")

    async def _begin(self, answer: Answer, more: Headers | None = None) -> None:
        self.has_begun = True
        headers = [*passed(answer.headers, without=NOT_RETURNED), *(more or [])]
        await self.send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def _more(self, part: bytes) -> None:
        await self.send({"type": "http.response.body", "body": part, "more_body": True})

    async def _lost(self, error: UpstreamError) -> ApiError:
        until = time.monotonic() + LOST_SECONDS
        while time.monotonic() < until:  # that it has ended is known a moment later
            if (status := self.proxy.process.poll()) is not None:
                return self.proxy.lost(f"vLLM ended with status {status}")
            await asyncio.sleep(POLL / 4)
        return self.proxy.lost(f"vLLM was lost ({error})")

    async def _fail(self, error: ApiError) -> None:
        """As a stream's last event where the status is out already, else as a status of its own."""
        if not self.has_begun:
            raise error
        if self.is_stream:
            await self._more(event(as_api_error(error).body()))
            await self.send({"type": "http.response.body", "body": b""})


def serve_proxy(
    process: ServerProcess, settings: ProxySettings, sock: socket.socket, *, progress: Progress | None = None
) -> int:
    """Answer on a bound socket until a signal comes or vLLM cannot be kept alive; an exit code.

    The first SIGTERM or SIGINT drains, a second one ends both servers at once.

    Raises:
        EngineStartError, OptionError: vLLM did not start.
    """
    proxy = Proxy(process, settings)
    config = uvicorn.Config(
        proxy, log_config=None, access_log=False, backlog=BACKLOG, timeout_keep_alive=30, ws="none", lifespan="off",
        server_header=False,
    )  # fmt: skip
    return asyncio.run(_until_ended(proxy, _Server(config), sock, progress))


async def _until_ended(proxy: Proxy, server: uvicorn.Server, sock: socket.socket, progress: Progress | None) -> int:
    loop = asyncio.get_running_loop()
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, signals.put_nowait, each)
    serving = asyncio.ensure_future(server.serve(sockets=[sock]))
    keeping = asyncio.ensure_future(proxy.keep(progress))
    told = asyncio.ensure_future(signals.get())
    await asyncio.wait((serving, keeping, told), return_when=asyncio.FIRST_COMPLETED)
    try:
        if not told.done():
            return 1 if keeping.done() and keeping.result() else 0
        logger.info("%s: finishing what runs; again to end at once", told.result().name)
        keeping.cancel()
        await _unless_again(_drain(proxy, server, serving), proxy, signals)
        return 0
    finally:
        told.cancel()
        keeping.cancel()
        proxy.process.kill()
        server.should_exit = True
        await serving


async def _drain(proxy: Proxy, server: uvicorn.Server, serving: asyncio.Future[None]) -> None:
    await proxy.drain()
    server.should_exit = True
    await serving  # answers that are still being sent


async def _unless_again(
    ending: Coroutine[Any, Any, None], proxy: Proxy, signals: asyncio.Queue[signal.Signals]
) -> None:
    """Wait for the end, or end at once when a second signal comes."""
    waiting, again = asyncio.ensure_future(ending), asyncio.ensure_future(signals.get())
    await asyncio.wait((waiting, again), return_when=asyncio.FIRST_COMPLETED)
    if again.done():
        logger.warning("%s again: ending at once", again.result().name)
        proxy.process.kill()
        logging.shutdown()
        os._exit(ENDED_AT_ONCE)
    again.cancel()
    waiting.result()
