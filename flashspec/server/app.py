"""The API: FastAPI routes over a Service.

It knows HTTP and OpenAI's API; it does not know models. The official ``openai`` client is the judge of what it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse, Response

import flashspec
from flashspec.core import Chunk
from flashspec.errors import FlashSpecError
from flashspec.metrics import Metrics
from flashspec.server.answers import ChatFormat, Choice, Format, TextFormat, metrics, speculation, usage
from flashspec.server.gate import Gate
from flashspec.server.protocol import ApiError, ChatRequest, CompletionRequest, Speculative, invalid, shown
from flashspec.server.replies import POLICY, EventStream, Json, as_api_error, event, gone
from flashspec.server.service import Prepared, Service, Settings
from flashspec.server.worker import Job

__all__ = ["Service", "Settings", "create_app"]
READING_SECONDS = 60.0  # that a client may take beyond a request's time to read its answer


def create_app(service: Service) -> FastAPI:
    """The application, whose lifespan starts and ends the service's worker."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.worker.close()

    app = FastAPI(
        title="FlashSpec", version=flashspec.__version__, description="Lossless speculative decoding, OpenAI's API.",
        lifespan=lifespan, docs_url=None, redoc_url=None, default_response_class=Json,
    )  # fmt: skip
    settings = service.settings
    app.add_middleware(
        Gate, api_key=settings.api_key, max_body=settings.max_body, observe_status=service.metrics.observe_status
    )
    if settings.cors_origins:  # outermost, or a web page could not read why it was refused
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    _add_handlers(app)
    _add_api(app, service)
    _add_others(app, service)
    return app


_ERROR = {"type": "object", "required": ["message", "type"], "properties": {"message": {"type": "string"}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {
        "description": text,
        "content": {"application/json": {"schema": {"type": "object", "properties": {"error": _ERROR}}}},
    }
    for status, text in {
        400: "Bad request", 401: "No or a wrong API key", 404: "No such model", 408: "The body came too slowly",
        413: "The body is too large", 429: "The queue is full", 500: "Internal error",
        503: "Shutting down, or out of memory", 504: "It took too long",
    }.items()
}  # fmt: skip
_ERRORS[200] = {"description": "OK", "content": {"application/json": {}, "text/event-stream": {}}}


def _add_handlers(app: FastAPI) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        told = as_api_error(error)
        return Json(told.body(), told.status, told.headers)

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        told = invalid([{**each, "loc": each["loc"][1:]} for each in error.errors()])  # all begin with "body"
        return Json(told.body(), told.status)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, str(error.detail), code=None)
        if error.status_code == 400:  # FastAPI's for anything that its parser did not expect
            text = "the body is not JSON in UTF-8, is nested too deeply, or has a number of thousands of digits"
            told = ApiError(400, f"{text}; correct it", code="invalid_json")
        return Json(told.body(), told.status, dict(error.headers or {}))

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(FlashSpecError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def _add_api(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=_ERRORS)
    async def chat(body: ChatRequest, request: Request) -> Response:
        return await _answer(service, body, request, "chatcmpl", ChatFormat)

    @app.post("/v1/completions", responses=_ERRORS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _answer(service, body, request, "cmpl", TextFormat)

    def described() -> dict[str, Any]:
        return {
            "id": service.settings.model_name, "object": "model", "created": service.created, "owned_by": "flashspec",
            "max_model_len": service.engine.max_length, "drafters": ["none", *service.engine.drafters],
        }  # fmt: skip

    @app.get("/v1/models", responses={401: _ERRORS[401]})
    async def models() -> Response:
        return Json({"object": "list", "data": [described()]})

    @app.get("/v1/models/{model:path}", responses={code: _ERRORS[code] for code in (401, 404)})
    async def model(model: str) -> Response:
        if model != service.settings.model_name:
            told = f"the model {shown(model)} does not exist; /v1/models has its name"
            raise ApiError(404, told, param="model", code="model_not_found")
        return Json(described())


async def _answer(
    service: Service, body: ChatRequest | CompletionRequest, request: Request, prefix: str, kind: type[Format]
) -> Response:
    name = f"{prefix}-{uuid.uuid4().hex}"
    log = request.scope["state"]["log"]
    log["answer_id"] = name
    if body.user is not None:
        log["user"] = body.user[:64]
    if service.settings.log_prompts:
        log["prompt"] = body.model_dump(include={"messages", "prompt"}, exclude_none=True)
    prepared = await service.prepared(body, name)
    spelling = service.spelling.named if body.return_tokens_as_token_ids else service.spelling
    format = kind(id=name, model=service.settings.model_name, spelling=spelling, has_ids=bool(body.return_token_ids))
    chunks = service.chunks(prepared)
    leaving = asyncio.ensure_future(gone(request.receive))
    if body.stream:
        first = await _first(chunks, leaving)
        if first is None:
            return Response(status_code=499)
        events = _events(service, body, prepared, format, first, chunks, log)
        # one that reads nothing for longer than it may take to write everything is let go
        return EventStream(events, seconds=service.settings.request_timeout + READING_SECONDS)
    collecting = asyncio.ensure_future(_collected(chunks))
    done, _ = await asyncio.wait((collecting, leaving), return_when=asyncio.FIRST_COMPLETED)
    leaving.cancel()
    if collecting not in done:
        collecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await collecting
        return Response(status_code=499)
    collecting.result()
    _note(log, prepared.jobs)
    answer = {**format.whole(prepared.choices), "usage": usage(prepared.jobs)}
    if body.speculative is not None and body.speculative.include_metrics:
        answer["metrics"] = metrics(prepared.jobs)
    return Json(answer)


async def _collected(chunks: AsyncIterator[tuple[Choice, Chunk]]) -> None:
    async with contextlib.aclosing(chunks) as each:  # type: ignore[type-var]
        async for choice, chunk in each:
            choice.take(chunk)


async def _first(
    chunks: AsyncIterator[tuple[Choice, Chunk]], leaving: asyncio.Future[None]
) -> tuple[Choice, Chunk] | None:
    """The first chunk, so that what fails before it gets a status of its own; None if the client has left."""
    waiting = asyncio.ensure_future(anext(chunks))
    try:
        done, _ = await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        if not waiting.done():
            waiting.cancel()
    if waiting in done:
        return waiting.result()
    with contextlib.suppress(asyncio.CancelledError):
        await waiting
    await chunks.aclose()  # type: ignore[attr-defined]
    return None


async def _events(
    service: Service,
    body: ChatRequest | CompletionRequest,
    prepared: Prepared,
    format: Format,
    first: tuple[Choice, Chunk],
    chunks: AsyncIterator[tuple[Choice, Chunk]],
    log: dict[str, Any],
) -> AsyncIterator[bytes]:
    """The stream of a request; an error in its middle is its last event."""
    said = body.speculative or Speculative()
    last_sent: dict[int, float] = {}
    try:
        async with contextlib.aclosing(chunks) as rest:  # type: ignore[type-var]
            for choice in prepared.choices:
                if (opening := format.first(choice)) is not None:
                    yield event(_with_usage(body, format.piece([opening])))
            item: tuple[Choice, Chunk] | None = first
            while item is not None:
                choice, chunk = item
                text, calls = choice.take(chunk)
                delta = format.delta(choice, chunk, text, calls)
                if delta is not None or said.include_tokens:
                    piece = _with_usage(body, format.piece([delta] if delta is not None else []))
                    if said.include_tokens:
                        piece["speculation"] = {"index": choice.index, **speculation(chunk, service.spelling)}
                    _observe_gap(service.metrics, last_sent, choice.index)
                    yield event(piece)
                item = await anext(rest, None)
        last = {**format.piece([]), "usage": usage(prepared.jobs)}
        if said.include_metrics:
            last["metrics"] = metrics(prepared.jobs)
        if body.has_usage or said.include_metrics:
            yield event(last)
        yield event(b"[DONE]")
    except Exception as error:  # the status is out already
        yield event(as_api_error(error).body())
    finally:
        _note(log, prepared.jobs)


def _with_usage(body: ChatRequest | CompletionRequest, piece: dict[str, Any]) -> dict[str, Any]:
    """With include_usage OpenAI's chunks all have the field, null but for the last."""
    return {**piece, "usage": None} if body.has_usage else piece


def _observe_gap(metrics: Metrics, last_sent: dict[int, float], index: int) -> None:
    now = time.perf_counter()
    if index in last_sent:
        metrics.between.observe(now - last_sent[index])
    last_sent[index] = now


def _note(log: dict[str, Any], jobs: list[Job]) -> None:
    """What the request's line in the log says of it."""
    told = usage(jobs)
    log.update(
        prompt_tokens=told["prompt_tokens"], completion_tokens=told["completion_tokens"],
        cached_tokens=told["prompt_tokens_details"]["cached_tokens"], ttft=round(jobs[0].timings.ttft, 4),
        num_draft_tokens=sum(job.stats.num_draft_tokens for job in jobs),
        num_accepted_tokens=sum(job.stats.num_accepted_tokens for job in jobs),
    )  # fmt: skip


def _add_others(app: FastAPI, service: Service) -> None:
    page = resources.files("flashspec.server").joinpath("page.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def playground() -> Response:
        headers = {"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"}
        return HTMLResponse(page, headers=headers)

    @app.get("/health", responses={503: {"description": "The engine has died"}})
    async def health() -> Response:
        is_alive = service.worker.is_alive
        return Json({"status": "ok" if is_alive else "the engine has died"}, 200 if is_alive else 503)

    @app.get("/ready", responses={503: {"description": "Shutting down"}})
    async def ready() -> Response:
        is_ready = service.worker.is_alive and not service.worker.is_draining
        return Json({"status": "ok" if is_ready else "shutting down"}, 200 if is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        text = service.metrics.page(service.engine, num_waiting=service.worker.num_waiting)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
