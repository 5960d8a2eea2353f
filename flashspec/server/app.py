"""The API: FastAPI routes over a Worker.

It knows HTTP, OpenAI's API and the worker; it does not know models. The official ``openai`` client is the judge of
what it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import anyio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, PlainTextResponse, Response

import flashspec
from flashspec.core import Chunk, Prompt, SamplingParams
from flashspec.engine import LocalEngine
from flashspec.errors import FlashSpecError, MemoryLimitError, OptionError, PromptError
from flashspec.metrics import Metrics
from flashspec.server.answers import ChatFormat, Choice, Format, Spelling, TextFormat, metrics, speculation, usage
from flashspec.server.gate import Gate, Message, Receive, Scope, Send, encoded
from flashspec.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Message as Turn,
    Speculative,
    Tool,
    grammar_of,
)
from flashspec.server.tools import Calls, chosen, explained, grammar, written
from flashspec.server.worker import BusyError, DrainingError, EngineError, Job, Worker
from flashspec.text import Encoded, Tokenizer, encode, has_chat_template, rendered, text_ids

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
SHORT = 16  # OpenAI's default for plain completions
PREPARING = 2  # threads that turn prompts into tokens and schemas into grammars
READING_SECONDS = 60.0  # that a client may take beyond a request's time to read its answer
UNION_BRANCH = re.compile(r"\[|^(str|int|float|bool|dict|list|TextPart|NamedTool)$")  # in pydantic's locations
EVENT_STREAM = "text/event-stream; charset=utf-8"
logger = logging.getLogger("flashspec.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a server treats its clients."""

    model_name: str
    api_key: str | None = None
    max_waiting: int = 256
    request_timeout: float = 600.0  # seconds, queue included
    max_body: int = 4 << 20  # bytes
    cors_origins: tuple[str, ...] = ()
    log_prompts: bool = False


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A request in the engine's terms."""

    jobs: list[Job]
    choices: list[Choice]


class Service:
    """One engine behind the API."""

    def __init__(self, engine: LocalEngine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(model_name=settings.model_name)
        self.worker = Worker(engine, self.metrics, max_waiting=settings.max_waiting)
        self.tokenizer: Tokenizer = engine.tokenizer
        self.spelling = Spelling(engine.tokenizer)
        self.created = int(time.time())
        self._preparing: anyio.CapacityLimiter | None = None

    # requests to jobs

    async def prepared(self, body: ChatRequest | CompletionRequest, name: str) -> _Prepared:
        """Tokens and grammars, worked out beside the event loop.

        Raises:
            ApiError, FlashSpecError: what is wrong with the request.
        """
        if body.model not in (None, self.settings.model_name):
            raise ApiError(
                404, f"the model {body.model!r} does not exist; this server has {self.settings.model_name!r}",
                param="model", code="model_not_found",
            )  # fmt: skip
        if self._preparing is None:
            self._preparing = anyio.CapacityLimiter(PREPARING)
        if not body.stream and (body.stream_options is not None or (body.speculative or Speculative()).include_tokens):
            param = "stream_options" if body.stream_options is not None else "speculative.include_tokens"
            raise ApiError(400, f"{param} is for streams; add stream: true", param=param, code="invalid_value")
        count = (body.n or 1) * (len(body.prompts()) if isinstance(body, CompletionRequest) else 1)
        if count > self.worker.num_places:
            raise ApiError(
                400, f"the request asks for {count} answers, and this server works on {self.worker.num_places} at "
                "most; ask for fewer", param="n", code="invalid_value",
            )  # fmt: skip
        self.worker.check_room(count)
        return await anyio.to_thread.run_sync(self._made, body, name, limiter=self._preparing)

    def _made(self, body: ChatRequest | CompletionRequest, name: str) -> _Prepared:
        return self._chat(body, name) if isinstance(body, ChatRequest) else self._completion(body, name)

    def _chat(self, body: ChatRequest, name: str) -> _Prepared:
        tools = chosen(body)
        prompt = self._conversation(body.messages, tools)
        asked = grammar(body, tools) if tools else grammar_of(body.response_format)
        if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
            raise ApiError(
                400, f"max_tokens is {body.max_tokens}, max_completion_tokens {body.max_completion_tokens}; give one",
                param="max_tokens", code="invalid_value",
            )  # fmt: skip
        if tools and body.response_format is not None and body.response_format.type != "text":
            raise ApiError(400, "tools and response_format cannot be combined", param="response_format", code="invalid")
        more = {"logprobs": body.num_logprobs(), "grammar": asked}
        sampling = body.sampling(max_tokens=body.limit() or self.engine.max_length - len(prompt), **more)
        return self._jobs(body, name, [prompt], sampling, tools=tools)

    def _completion(self, body: CompletionRequest, name: str) -> _Prepared:
        body.check()
        prompts = [self._encoded(prompt) for prompt in body.prompts()]
        sampling = body.sampling(max_tokens=body.max_tokens or SHORT, logprobs=body.logprobs)
        prepared = self._jobs(body, name, prompts, sampling)
        if body.echo:
            for choice in prepared.choices:
                choice.echo = str(self.tokenizer.decode(choice.job.prompt, skip_special_tokens=True))
        return prepared

    def _jobs(
        self,
        body: ChatRequest | CompletionRequest,
        name: str,
        prompts: list[Encoded],
        sampling: SamplingParams,
        *,
        tools: list[Tool] | None = None,
    ) -> _Prepared:
        said, predicted = body.speculative or Speculative(), body.prediction
        guess = None if predicted is None else self._encoded(predicted.text() or " ", is_prompt=False)
        jobs = [
            Job(
                f"{name}-{number}-{choice}", prompt, sampling, choice, predicted=guess,
                num_speculative_tokens=said.num_speculative_tokens,
                drafter=said.drafter if said.enabled else "none",
                constraint=self.engine.compile(sampling),  # each its own: it remembers where it is
            )
            for number, prompt in enumerate(prompts) for choice in range(body.n or 1)
        ]  # fmt: skip
        calls = partial(Calls, frozenset(tool.function.name for tool in tools or ()))
        self.engine.check(sampling, drafter=jobs[0].drafter)
        now = time.perf_counter()
        for job in jobs:
            job.timings.arrival = now
        return _Prepared(jobs, [Choice(i, job, calls=calls() if tools else None) for i, job in enumerate(jobs)])

    def _conversation(self, messages: list[Turn], tools: list[Tool]) -> Encoded:
        if not has_chat_template(self.tokenizer):
            raise ApiError(
                400, "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
            )
        knows_calls = "tool_calls" in str(self.tokenizer.chat_template)
        turns = [_turn(message, knows_calls=knows_calls) for message in messages]
        plain = rendered(self.tokenizer, turns)
        if not tools:
            return self._encoded_text(plain, turns)
        text = rendered(self.tokenizer, turns, tools=[tool.model_dump(exclude_none=True) for tool in tools])
        if text != plain:
            return self._encoded_text(text, text)
        turns = [{"role": "system", "content": explained(tools)}, *turns]
        return self._encoded_text(rendered(self.tokenizer, turns), turns)

    def _encoded_text(self, text: str, prompt: Prompt) -> Encoded:
        """Of a conversation that was rendered; ``prompt`` is what a drafter with another tokenizer reads."""
        return self._checked(Encoded(text_ids(self.tokenizer, text, add_special_tokens=False), prompt))

    def _encoded(self, prompt: str | list[int], *, is_prompt: bool = True) -> Encoded:
        ids = encode(self.tokenizer, prompt, vocab_size=self.engine.target.vocab_size)
        return self._checked(Encoded(ids, prompt)) if is_prompt else Encoded(ids, prompt)

    def _checked(self, prompt: Encoded) -> Encoded:
        if len(prompt) >= self.engine.max_length:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens; with at least one to generate it must stay under this server's "
                f"{self.engine.max_length}; shorten it",
                code="context_length_exceeded",
            )
        return prompt

    # jobs to chunks

    async def chunks(self, prepared: _Prepared) -> AsyncIterator[tuple[Choice, Chunk]]:
        """Each choice's chunks as they come, until all have ended. Leaving early frees their rows.

        Raises:
            ApiError: time is up.
            FlashSpecError: what ended one of them.
        """
        queue: asyncio.Queue[tuple[Job, Chunk]] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.request_timeout
        choices = {choice.job.id: choice for choice in prepared.choices}
        jobs = prepared.jobs
        left = set(choices)
        try:
            self.worker.submit(jobs, lambda job, chunk: queue.put_nowait((job, chunk)))
            while left:
                if loop.time() > deadline:  # a reader so slow that there was always something to send
                    raise TimeoutError
                async with asyncio.timeout_at(deadline):
                    job, chunk = await queue.get()
                if chunk.error is not None:
                    raise chunk.error
                if chunk.finish_reason is not None:
                    left.discard(job.id)
                yield choices[job.id], chunk
        except TimeoutError:
            seconds = f"{self.settings.request_timeout:g} seconds"
            raise ApiError(504, f"the request took longer than {seconds}; ask for less", code="timeout") from None
        finally:
            self.worker.cancel(jobs)


def _turn(message: Turn, *, knows_calls: bool) -> dict[str, Any]:
    """A message as templates know it: arguments as objects, no developers, calls as text where they know of none."""
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": message.text()}
    if message.tool_calls and not knows_calls:
        calls = (written(call.function.name, call.function.arguments) for call in message.tool_calls)
        turn["content"] = "\n".join([*filter(None, [turn["content"]]), *calls])
    elif message.tool_calls:
        turn["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call.function.name, "arguments": _object(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    return turn


def _object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


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
        told = _validation_error(error)
        return Json(told.body(), told.status)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, str(error.detail), code=None)
        if error.status_code == 400:  # FastAPI's for anything that its parser did not expect
            told = ApiError(400, "the body is not JSON in UTF-8, or it is nested too deeply", code="invalid_json")
        return Json(told.body(), told.status, dict(error.headers or {}))

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(FlashSpecError, on_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)


def _validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong, in a sentence."""
    first = min(error.errors(), key=_vagueness)
    where = ".".join(str(part) for part in first["loc"][1:] if not UNION_BRANCH.search(str(part)))
    if first["type"] == "extra_forbidden":
        return ApiError(
            400, f"{where} is not a parameter of this server; leave it out", param=where, code="unknown_parameter"
        )
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first.get('ctx', {}).get('error', '')}", code="invalid_json")
    given = "" if first["type"] == "missing" else f" (it is {first.get('input')!r:.80})"
    name = where or "the body"
    return ApiError(400, f"{name}: {first['msg']}{given}", param=where or None, code="invalid_value")


def _vagueness(found: Any) -> int:
    """Of a union's complaints, those of the branch that was meant say more than a wrong type."""
    if found["type"] == "extra_forbidden":
        return 0
    return 2 if found["type"].endswith("_type") or found["type"] == "literal_error" else 1


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
            raise ApiError(404, f"the model {model!r} does not exist", param="model", code="model_not_found")
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
    prepared: _Prepared,
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
