"""One engine behind the API: requests to jobs, and jobs to chunks.

It knows the API's requests and the worker; it does not know HTTP or what answers look like.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from flashspec.core import Chunk, Constraint, Grammar, Prompt, SamplingParams
from flashspec.errors import OptionError, PromptError
from flashspec.grammar import json_object, json_schema
from flashspec.metrics import Metrics
from flashspec.server.answers import Choice, Spelling
from flashspec.server.protocol import (
    ApiError,
    ChatRequest,
    CompletionRequest,
    Message,
    ResponseFormat,
    Speculative,
    Tool,
    about,
    check_characters,
    shown,
)
from flashspec.server.tools import Calls, chosen, explained, grammar, written
from flashspec.server.worker import Job, Worker
from flashspec.text import Encoded, Tokenizer, encode, has_chat_template, rendered, text_ids

if TYPE_CHECKING:
    from flashspec.engine import LocalEngine

SHORT = 16  # OpenAI's default for plain completions
LOOKING_SECONDS = 2.0  # for which of many tools is at fault: others wait for the thread
PREPARING = 2  # threads that turn prompts into tokens and schemas into grammars


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
class Prepared:
    """A request in the engine's terms."""

    jobs: list[Job]
    choices: list[Choice]
    deadline: float  # on the event loop's clock


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

    async def prepared(self, body: ChatRequest | CompletionRequest, name: str) -> Prepared:
        """Tokens and grammars, worked out beside the event loop. The request's time begins here.

        Raises:
            ApiError, FlashSpecError: what is wrong with the request, or that its time is up.
        """
        deadline = asyncio.get_running_loop().time() + self.settings.request_timeout
        if body.model not in (None, self.settings.model_name):
            raise ApiError(
                404, f"the model {shown(body.model)} does not exist; this server has {shown(self.settings.model_name)}",
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
        try:
            async with asyncio.timeout_at(deadline):  # a thread cannot be ended: what it makes is thrown away
                jobs, choices = await anyio.to_thread.run_sync(
                    self._made, body, name, limiter=self._preparing, abandon_on_cancel=True
                )
        except TimeoutError:
            raise self._late() from None
        return Prepared(jobs, choices, deadline)

    def _late(self) -> ApiError:
        seconds = f"{self.settings.request_timeout:g} seconds"
        return ApiError(504, f"the request took longer than {seconds}; ask for less", code="timeout")

    def _made(self, body: ChatRequest | CompletionRequest, name: str) -> tuple[list[Job], list[Choice]]:
        return self._chat(body, name) if isinstance(body, ChatRequest) else self._completion(body, name)

    def _chat(self, body: ChatRequest, name: str) -> tuple[list[Job], list[Choice]]:
        tools = chosen(body)
        prompt = self._conversation(body.messages, tools)
        asked = self._grammar(body, tools)
        if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
            raise ApiError(
                400, f"max_tokens is {body.max_tokens}, max_completion_tokens {body.max_completion_tokens}; give one",
                param="max_tokens", code="invalid_value",
            )  # fmt: skip
        if tools and body.response_format is not None and body.response_format.type != "text":
            raise ApiError(
                400, "tools and response_format cannot be combined; leave one out", param="response_format",
                code="invalid",
            )  # fmt: skip
        more = {"logprobs": body.num_logprobs(), "grammar": asked}
        sampling = body.sampling(max_tokens=body.limit() or self.engine.max_length - len(prompt), **more)
        return self._jobs(body, name, [prompt], sampling, tools=tools)

    def _grammar(self, body: ChatRequest, tools: list[Tool]) -> Grammar | None:
        asked = grammar(body, tools) if tools else grammar_of(body.response_format)
        for name in ("ignore_eos", "min_tokens"):
            if asked is not None and (value := getattr(body, name)):
                what = "tools say" if tools else "response_format says"
                raise ApiError(
                    400, f"{name} is {shown(value)}, but {what} where the answer ends; leave one out", param=name,
                    code="invalid_value",
                )  # fmt: skip
        return asked

    def _completion(self, body: CompletionRequest, name: str) -> tuple[list[Job], list[Choice]]:
        body.check()
        prompts = [self._checked(self._encoded(prompt, "prompt"), "prompt") for prompt in body.prompts()]
        sampling = body.sampling(max_tokens=body.max_tokens or SHORT, logprobs=body.logprobs)
        jobs, choices = self._jobs(body, name, prompts, sampling)
        if body.echo:
            for choice in choices:
                choice.echo = str(self.tokenizer.decode(choice.job.prompt, skip_special_tokens=True))
        return jobs, choices

    def _jobs(
        self,
        body: ChatRequest | CompletionRequest,
        name: str,
        prompts: list[Encoded],
        sampling: SamplingParams,
        *,
        tools: list[Tool] | None = None,
    ) -> tuple[list[Job], list[Choice]]:
        said, predicted = body.speculative or Speculative(), body.prediction
        guess = None if predicted is None else self._encoded(predicted.text() or " ", "prediction")
        drafter = said.drafter if said.enabled else "none"
        with about():
            self.engine.check(sampling, drafter=drafter)
        constraint = self._compiled(sampling, tools or [])  # once: it may take seconds
        jobs = [
            Job(
                f"{name}-{number}-{choice}", prompt, sampling, choice, predicted=guess,
                num_speculative_tokens=said.num_speculative_tokens, drafter=drafter,
                constraint=copy(constraint),  # each its own: it remembers where it is
            )
            for number, prompt in enumerate(prompts) for choice in range(body.n or 1)
        ]  # fmt: skip
        calls = partial(Calls, frozenset(tool.function.name for tool in tools or ()))
        now = time.perf_counter()
        for job in jobs:
            job.timings.arrival = now
        return jobs, [Choice(i, job, calls=calls() if tools else None) for i, job in enumerate(jobs)]

    def _conversation(self, messages: list[Message], tools: list[Tool]) -> Encoded:
        if not has_chat_template(self.tokenizer):
            raise ApiError(
                400, "this model has no chat template; use /v1/completions", param="messages", code="no_chat_template"
            )
        knows_calls = "tool_calls" in str(self.tokenizer.chat_template)
        turns = [_turn(message, knows_calls=knows_calls) for message in messages]
        plain = self._rendered(turns, "messages")
        if not tools:
            return self._encoded_text(plain, turns)
        text = self._rendered(turns, "tools", tools=[tool.model_dump(exclude_none=True) for tool in tools])
        if text != plain:
            return self._encoded_text(text, text)
        turns = [{"role": "system", "content": explained(tools)}, *turns]
        return self._encoded_text(self._rendered(turns, "tools"), turns)

    def _rendered(self, turns: list[dict[str, Any]], param: str, *, tools: list[dict[str, Any]] | None = None) -> str:
        try:
            text = rendered(self.tokenizer, turns, tools=tools)
        except PromptError as error:
            is_its_own = type(error.__cause__).__name__ == "TemplateError"  # its author's words; all others are Jinja's
            told = str(error) if is_its_own else "the chat template refuses these messages; change their roles or order"
            raise ApiError(400, told, param=param, code="invalid_value") from error
        check_characters(text, param)
        return text

    def _encoded_text(self, text: str, prompt: Prompt) -> Encoded:
        """Of a conversation that was rendered; ``prompt`` is what a drafter with another tokenizer reads."""
        ids = text_ids(self.tokenizer, text, add_special_tokens=False)
        return self._checked(Encoded(ids, prompt), "messages")

    def _encoded(self, prompt: str | list[int], param: str) -> Encoded:
        if isinstance(prompt, str):
            check_characters(prompt, param)
        with about(param):
            return Encoded(encode(self.tokenizer, prompt, vocab_size=self.engine.target.vocab_size), prompt)

    def _compiled(self, sampling: SamplingParams, tools: list[Tool]) -> Constraint | None:
        """Raise ApiError for the first tool whose schema is at fault, else for all of them or the response format."""
        try:
            return self.engine.compile(sampling)
        except OptionError:
            until = time.monotonic() + LOOKING_SECONDS
            for number, tool in enumerate(tools):
                if time.monotonic() > until:
                    break
                with about(f"tools[{number}].function.parameters"):
                    self.engine.compile(SamplingParams(grammar=json_schema(tool.function.parameters)))
            if not tools:
                with about("response_format"):
                    raise
            raise ApiError(
                400, "the tools' schemas, taken together, are too complex; simplify them, or send fewer tools",
                param="tools", code="invalid_value",
            ) from None  # fmt: skip

    def _checked(self, prompt: Encoded, param: str) -> Encoded:
        if len(prompt) >= self.engine.max_length:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens; with at least one to generate it must stay under this server's "
                f"{self.engine.max_length}; shorten it",
                param=param,
                code="context_length_exceeded",
            )
        return prompt

    # jobs to chunks

    async def chunks(self, prepared: Prepared) -> AsyncIterator[tuple[Choice, Chunk]]:
        """Each choice's chunks as they come, until all have ended. Leaving early frees their rows.

        Raises:
            ApiError: time is up.
            FlashSpecError: what ended one of them.
        """
        queue: asyncio.Queue[tuple[Job, Chunk]] = asyncio.Queue()
        loop, deadline = asyncio.get_running_loop(), prepared.deadline
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
            raise self._late() from None
        finally:
            self.worker.cancel(jobs)


def _turn(message: Message, *, knows_calls: bool) -> dict[str, Any]:
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


def grammar_of(format: ResponseFormat | None) -> Grammar | None:
    """The grammar that a response format asks for; None for any text."""
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return json_object()
    if format.json_schema is None:
        raise ApiError(
            400, "response_format.json_schema is missing; add it", param="response_format", code="invalid_value"
        )
    with about("response_format"):
        return json_schema(format.json_schema.schema_)
