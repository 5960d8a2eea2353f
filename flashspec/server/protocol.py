"""What requests may say, in OpenAI's words and ours, what that asks of the engine, and what is wrong with one.

It knows the API's fields and SamplingParams; it does not know HTTP or how requests are run. A field that is not
listed here is refused: silently ignoring it would give another answer than the one asked for.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence as Seq
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from flashspec.core import SamplingParams
from flashspec.errors import OptionError, PromptError

MOST_CHOICES = 16
MOST_STOPS = 16
MOST_SHOWN = 80  # characters of a value that an error names
NAMES = {"drafter": "speculative.drafter", "allowed_tokens": "allowed_token_ids"}  # of the engine's options here
UNION_BRANCH = re.compile(r"\[|^(constrained-)?(str|int|float|bool|dict|list|TextPart|NamedTool)$")  # in a location
HALF = re.compile(r"[\ud800-\udfff]")
MUST = {  # what a value of JSON must be, by pydantic's name of the error
    "string_type": "a string", "int_type": "a whole number", "int_from_float": "a whole number",
    "float_type": "a number", "bool_type": "true or false", "list_type": "an array", "dict_type": "an object",
    "model_type": "an object", "model_attributes_type": "an object", "none_required": "null",
    "literal_error": "{expected}", "greater_than": "above {gt}", "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}", "string_pattern_mismatch": "a string that matches {pattern}",
    "string_too_short": "a string of at least {min_length} character",
}  # fmt: skip
SENTENCES = {
    "extra_forbidden": "{name} is not a parameter of this server; leave it out",
    "missing": "{name} is missing; add it",
    "too_long": "{name} has {actual_length} entries; it may have {max_length} at most",
    "too_short": "{name} has {actual_length} entries; it must have {min_length} at least",
    "string_unicode": "{name} has half a character in it (a lone surrogate); send whole ones",
    "json_invalid": "{name} is not JSON: {error} (character {at})",
}


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


def shown(value: Any) -> str:
    """A value as the client wrote it, as far as an error names it."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= MOST_SHOWN else text[: MOST_SHOWN - 3] + "..."


def invalid(errors: Seq[Any], *, within: str = "") -> ApiError:
    """What is wrong with a body, or with its field ``within``, in a sentence; ``errors`` are pydantic's."""
    first = min(errors, key=_vagueness)
    kind, param = first["type"], _path(first, within)
    code = {"extra_forbidden": "unknown_parameter", "json_invalid": "invalid_json"}.get(kind, "invalid_value")
    names = {"name": param or "the body", **_limits(first)}
    if kind == "json_invalid":
        names |= {"name": "the body", "at": first["loc"][-1]}
        param = ""
    if kind in SENTENCES:
        return ApiError(400, SENTENCES[kind].format(**names), param=param or None, code=code)
    told = f"{names['name']} is {shown(first['input'])}"
    if _is_tag(first) and any("TextPart" in str(part) for part in first["loc"]):
        return ApiError(400, f'{told}; this model reads text only: send parts of type "text"', param=param, code=code)
    alike = [error for error in errors if _path(error, within) == param and error["type"] in MUST]
    wanted = dict.fromkeys(MUST[error["type"]].format(**_limits(error)).replace("'", '"') for error in alike)
    must = " or ".join(wanted) or "what /openapi.json says"
    return ApiError(400, f"{told}; it must be {must}", param=param or None, code=code)


def _limits(error: Any) -> dict[str, Any]:
    """What was asked for, with 1 in place of 1.0."""
    given = error.get("ctx", {}).items()
    return {name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in given}


def _path(error: Any, within: str) -> str:
    """Where something stands, as OpenAI writes it: messages[0].role."""
    location: list[str | int] = [within, *error["loc"]]
    names = [part for part in location if not UNION_BRANCH.search(str(part))]
    if error["type"] == "extra_forbidden" and names[-1] != location[-1]:  # it may be called anything
        names.append(location[-1])
    return "".join(f"[{name}]" if isinstance(name, int) else f".{name:.{MOST_SHOWN}}" for name in names).lstrip(".")


def _vagueness(error: Any) -> tuple[int, int]:
    """Of a union's complaints, those of the branch that was meant and those deep inside say more than a wrong type."""
    if _is_tag(error):
        rank = 0
    elif error["type"] == "extra_forbidden":
        rank = 1
    else:
        rank = 3 if error["type"].endswith("_type") or error["type"] == "literal_error" else 2
    return rank, -len(error["loc"])


def _is_tag(error: Any) -> bool:
    """Whether something says of itself that it is of a kind that cannot stand there."""
    return error["type"] == "literal_error" and error["loc"][-1:] == ("type",) and isinstance(error["input"], str)


@contextlib.contextmanager
def about(param: str | None = None) -> Iterator[None]:
    """The engine's refusals as ours, of the field ``param``; without it, of the one that their first word names."""
    try:
        yield
    except (OptionError, PromptError) as error:
        text = str(error)
        if param is None:
            name, _, rest = text.partition(" ")
            param = NAMES.get(name, name)
            text = f"{param} {rest}"
        raise ApiError(400, text, param=param, code="invalid_value") from error


def check_characters(text: str, param: str) -> None:
    """Raise ApiError for the halves of characters that JSON lets through and tokenizers do not."""
    if HALF.search(text):
        raise ApiError(400, SENTENCES["string_unicode"].format(name=param), param=param, code="invalid_value")


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


_Stop = Annotated[str, Field(min_length=1)]


class _Request(_Strict):
    """What both endpoints share."""

    model: str | None = None  # a server has one; if it is named, it has to be that
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stop: _Stop | Annotated[list[_Stop], Field(max_length=MOST_STOPS)] | None = None
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
    allowed_token_ids: Annotated[list[int], Field(min_length=1)] | None = None
    return_token_ids: bool | None = None  # beside the text
    return_tokens_as_token_ids: bool | None = None  # in log probabilities: token_id:N
    speculative: Speculative | None = None

    def sampling(self, *, max_tokens: int, **more: Any) -> SamplingParams:
        """The engine's parameters. Without a temperature it is 1, as with OpenAI.

        Raises:
            ApiError: fields that do not go together.
        """
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
        with about():
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
            text = "prompt is an empty array; give at least one text"
            raise ApiError(400, text, param="prompt", code="invalid_value")
        return list(prompt)

    def check(self) -> None:
        """Raise ApiError for what OpenAI's API has and this one does not."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            text = f"best_of is {self.best_of}; only n is supported; leave it out"
            raise ApiError(400, text, param="best_of", code="unsupported")
        if self.suffix:
            raise ApiError(400, "suffix is not supported; leave it out", param="suffix", code="unsupported")
        if self.echo and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs is not supported; leave one out", param="echo", code="unsupported")


def _token_ids(bias: dict[str, float] | None) -> dict[int, float]:
    found: dict[int, float] = {}
    for token, value in (bias or {}).items():
        try:
            found[int(token)] = value
        except ValueError:
            raise ApiError(
                400, f"logit_bias has the key {shown(token)}; its keys must be token ids", param="logit_bias",
                code="invalid_value",
            ) from None  # fmt: skip
    return found
