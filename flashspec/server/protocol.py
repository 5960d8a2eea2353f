"""What requests may say, in OpenAI's words and ours, and what that asks of the engine.

It knows the API's fields and SamplingParams; it does not know HTTP or how requests are run. A field that is not
listed here is refused: silently ignoring it would give another answer than the one asked for.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flashspec.core import SamplingParams
from flashspec.errors import OptionError
from flashspec.grammar import json_object, json_schema

MOST_CHOICES = 16
MOST_STOPS = 16


class ApiError(Exception):
    """What a client is told, in OpenAI's format."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class FunctionCall(_Strict):
    name: str
    arguments: str


class ToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Strict):
    """A turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None  # as our own answers have them
    audio: None = None
    function_call: None = None

    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class StreamOptions(_Strict):
    include_usage: bool = False


class Speculative(_Strict):
    """Our own: how a request is speculated for, and what is told of it."""

    enabled: bool = True
    num_speculative_tokens: Annotated[int, Field(ge=0, le=256)] | None = None
    drafter: str | None = None
    include_metrics: bool = False  # counts and rates of this request
    include_tokens: bool = False  # with streams: each token's kind, and the drafts


class JsonSchema(_Strict):
    name: str
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = {}
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(_Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] = {}
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class NamedFunction(_Strict):
    name: str


class NamedTool(_Strict):
    type: Literal["function"]
    function: NamedFunction


class Prediction(_Strict):
    type: Literal["content"]
    content: str | list[TextPart]

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Request(_Strict):
    """What both endpoints share."""

    model: str | None = None  # a server has one; if it is named, it has to be that
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    user: str | None = None  # named in the log
    # not OpenAI's, but of other servers
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = None  # 0 or -1: all
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=2**31)] | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    return_token_ids: bool | None = None  # beside the text
    return_tokens_as_token_ids: bool | None = None  # in log probabilities: token_id:N
    speculative: Speculative | None = None

    def sampling(self, *, max_tokens: int, **more: Any) -> SamplingParams:
        """The engine's parameters. Without a temperature it is 1, as with OpenAI."""
        given: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": _token_ids(self.logit_bias),
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "seed": self.seed,
            "min_tokens": self.min_tokens,
            "ignore_eos": self.ignore_eos,
            "allowed_tokens": self.allowed_token_ids,
            **more,
        }
        return SamplingParams(max_tokens=max_tokens, **{k: v for k, v in given.items() if v is not None})

    @property
    def has_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(_Request):
    """``/v1/chat/completions``"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None

    def num_logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs", code="invalid_value")
        return (self.top_logprobs or 0) if self.logprobs else None

    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Request):
    """``/v1/completions``"""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    prediction: Prediction | None = None  # OpenAI has it for conversations only

    def prompts(self) -> list[str | list[int]]:
        """One for each text or list of ids."""
        prompt: Any = self.prompt
        if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not prompt:
            raise ApiError(400, "prompt is an empty list; give at least one text", param="prompt", code="invalid_value")
        return list(prompt)

    def check(self) -> None:
        """Raise ApiError for what OpenAI's API has and this one does not."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError(400, f"best_of is {self.best_of}; only n is supported", param="best_of", code="unsupported")
        if self.suffix:
            raise ApiError(400, "suffix is not supported; leave it out", param="suffix", code="unsupported")
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported", param="echo", code="unsupported")


def grammar_of(format: ResponseFormat | None) -> Any:
    """The grammar that a response format asks for; None for any text."""
    if format is None or format.type == "text":
        return None
    if format.type == "json_object":
        return json_object()
    if format.json_schema is None:
        raise ApiError(
            400, "response_format json_schema needs a json_schema", param="response_format", code="invalid_value"
        )
    return json_schema(format.json_schema.schema_)


def _token_ids(bias: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): value for token, value in (bias or {}).items()}
    except ValueError as error:
        raise OptionError(f"logit_bias maps token ids to numbers: {error}") from error
