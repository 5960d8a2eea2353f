"""An Engine over the OpenAI API of a server that drafts and verifies by itself: vLLM, or another flashspec.

It knows that API's requests and streams; it does not know how the server was started. Results, counts and timings
come in the same types as LocalEngine's, as far as the server tells: which of a chunk's tokens were guesses it does not
say, so they are counted as if each chunk were one step.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urlsplit

from flashspec.core import Chunk, FinishReason, Prompt, SamplingParams, SpecStats, Timings, TokenKind, TokenLogprob
from flashspec.errors import EngineLostError, FlashSpecError, OptionError, PromptError
from flashspec.streams import ChunkStream, Streaming
from flashspec.vllm.scrape import Snapshot, difference, nobody

CONNECT_SECONDS = 10.0
SILENCE_SECONDS = 300.0  # without a byte, after which a server counts as hung
MOST_LOGPROBS = 20  # that OpenAI's API and vLLM, by itself, give of each token
NOT_SENT = ("verification",)  # of SamplingParams: what is the server's own affair
ALWAYS_SENT = (
    "temperature", "max_tokens", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "tool_calls": "stop", "repetition": "stop"}


@dataclass(slots=True)
class _Request:
    """One request on its way."""

    id: str
    sampling: SamplingParams
    path: str
    body: dict[str, Any]
    timings: Timings
    stats: SpecStats = field(default_factory=SpecStats)
    chunks: list[Chunk] = field(default_factory=list)  # not yet read, where ``chunks`` is the reader
    is_streamed: bool = False
    is_finished: bool = False  # its last chunk has been taken, or it was aborted
    error: FlashSpecError | None = None
    # written by its thread
    sock: socket.socket | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None  # in the server's words


class VllmEngine(Streaming):
    """Requests to a server, as many at once as it takes. Not thread-safe.

    Args:
        url: of the server, without ``/v1``.
        model: what it calls the model; None for the first that it names.
        api_key: if it asks for one.
        silence: seconds without a byte after which it counts as hung.

    Raises:
        EngineLostError: nobody answers there.
        OptionError: what answers is no such server, or it refuses the key.
    """

    controller = None  # the draft length is chosen by the server
    drafter = None

    def __init__(
        self, url: str, *, model: str | None = None, api_key: str | None = None, silence: float = SILENCE_SECONDS
    ) -> None:
        url = url if "://" in url or not url.strip() else f"http://{url}"
        self.url, self.api_key, self.silence = url.rstrip("/").removesuffix("/v1"), api_key, silence
        self._where = _address(self.url)
        named = _models(self.url, self._asked("GET", "/v1/models"))
        self.model = model or named[0]
        if self.model not in named:
            raise OptionError(f"{self.url} has no model {self.model!r}; it has {', '.join(named)}")
        self.why = f"drafting and verifying are done by the server at {self.url}"
        self._requests: dict[str, _Request] = {}
        self._events: queue.Queue[tuple[_Request, Chunk]] = queue.Queue()
        self._stats = SpecStats()
        self._tells = False  # each request's counts come with its answer
        self._before: Snapshot | None = None  # else: the counters when it was idle, and the requests since then
        self._since: list[_Request] = []
        self._is_chatty: bool | None = None

    # the Engine protocol

    def add(self, prompt: Prompt, sampling: SamplingParams | None = None) -> str:
        """Send a request; its id. What is wrong with it comes out when its chunks are read.

        Raises:
            OptionError: sampling parameters that the server's API does not have.
            PromptError: an empty prompt.
        """
        sampling = sampling or SamplingParams()
        if not prompt:
            raise PromptError("the prompt is empty; give at least one token")
        path, body = self._body(prompt, sampling)
        if not self._requests:
            self._since, self._before = [], None if self._tells else self._snapshot()
        request = _Request(uuid.uuid4().hex, sampling, path, body, Timings(arrival=time.perf_counter()))
        self._since.append(request)
        self._requests[request.id] = request
        threading.Thread(target=self._run, args=(request,), daemon=True).start()
        return request.id

    def step(self) -> list[Chunk]:
        """Wait for the next chunk, and take what else has come."""
        if not self._requests:
            return []
        events = [self._events.get()]
        with contextlib.suppress(queue.Empty):
            while True:
                events.append(self._events.get_nowait())
        return [chunk for request, chunk in events if self._take(request, chunk)]

    def abort(self, request_id: str) -> None:
        """Hang up, which ends the request at the server, too; an unknown one is no error."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            request.is_finished = True
            _hang_up(request)

    def stats(self) -> SpecStats:
        """Counts over all requests so far, as the server tells them."""
        return self._stats

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def speaks_chat(self) -> bool:
        """Whether the served model has a chat template."""
        if self._is_chatty is None:
            body = {"model": self.model, "messages": [{"role": "user", "content": "?"}], "max_tokens": 1}
            try:
                self._asked("POST", "/v1/chat/completions", body)
                self._is_chatty = True
            except OptionError:
                self._is_chatty = False
        return self._is_chatty

    # whole requests

    def chunks(self, request_id: str) -> ChunkStream:
        """The chunks of a request that was just added; closing the iterator aborts it."""
        return ChunkStream(self, self._requests[request_id])

    def progress(self, request_id: str) -> tuple[SpecStats, Timings]:
        """A request's counts and timings, live; the counts come with its end."""
        request = self._requests[request_id]
        return request.stats, request.timings

    # requests and their streams

    def _body(self, prompt: Prompt, sampling: SamplingParams) -> tuple[str, dict[str, Any]]:
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        body |= sampling_body(sampling)
        if isinstance(prompt, list) and isinstance(prompt[0], dict):
            if sampling.logprobs is not None:
                # vLLM counts the token itself, likely or not: one more, to have all of the likeliest
                more = 0 < sampling.logprobs < MOST_LOGPROBS
                body |= {"logprobs": True, "top_logprobs": sampling.logprobs + more}
            return "/v1/chat/completions", {**body, "messages": prompt, "return_token_ids": True}
        if sampling.logprobs is not None:
            body["logprobs"] = sampling.logprobs
        return "/v1/completions", {**body, "prompt": prompt, "return_token_ids": True}

    def _run(self, request: _Request) -> None:
        """In a thread of the request's own: read its stream and queue what comes."""
        try:
            with contextlib.closing(self._connection()) as connection, self._sent(request, connection) as response:
                for piece in _pieces(response):
                    if (chunk := self._chunk(request, piece)) is not None:
                        self._events.put((request, chunk))
            self._events.put((request, self._last(request)))
        except FlashSpecError as error:
            self._fail(request, error)
        except TimeoutError:
            self._fail(request, EngineLostError(f"{self.url} has said nothing for {self.silence:g} s; is it hung?"))
        except (OSError, http.client.HTTPException) as error:
            self._fail(request, EngineLostError(f"the connection to {self.url} was lost ({error or type(error)})"))
        except Exception as error:  # who waits for it must hear of it, whatever it is
            what = f"{type(error).__name__}: {error}"
            self._fail(request, EngineLostError(f"what {self.url} answers cannot be understood ({what})"))

    def _fail(self, request: _Request, error: FlashSpecError) -> None:
        self._events.put((request, Chunk(request.id, [], [], [], "abort", error=error)))

    def _sent(self, request: _Request, connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        request.sock = connection.sock
        if request.is_finished:  # aborted when there was nothing to hang up yet
            raise EngineLostError("the request was aborted")
        connection.request("POST", self._where.path + request.path, json.dumps(request.body).encode(), self._headers())
        response = connection.getresponse()
        if response.status != 200:
            raise _refusal(self.url, response.status, response.read())
        return response

    def _chunk(self, request: _Request, piece: dict[str, Any]) -> Chunk | None:
        """What an event adds."""
        if "error" in piece:
            raise EngineLostError(f"{self.url}: {_said(piece)}")
        request.usage = piece.get("usage") or request.usage
        request.metrics = piece.get("metrics") or request.metrics
        now, timings = time.perf_counter(), request.timings
        timings.started = timings.started or now
        chunks = [_of_choice(request, choice) for choice in piece.get("choices") or ()]
        chunk = next((chunk for chunk in chunks if chunk is not None), None)
        if chunk is not None:
            timings.first_token, timings.last_token = timings.first_token or now, now
        return chunk

    def _last(self, request: _Request) -> Chunk:
        """The end of a stream."""
        if request.reason is None:
            raise EngineLostError(f"the server at {self.url} ended in mid-stream; its log may say why")
        if request.reason not in REASONS:
            raise EngineLostError(f"the server at {self.url} cut the text off ({request.reason}); is it shutting down?")
        return Chunk(request.id, [], [], [], REASONS[request.reason])

    def _take(self, request: _Request, chunk: Chunk) -> bool:
        """Count a chunk and hand it to its reader; False for one that nobody waits for."""
        if self._requests.get(request.id) is not request:
            return False
        request.timings.num_output_tokens += len(chunk.tokens)
        if chunk.finish_reason is not None:
            request.is_finished, request.error = True, chunk.error  # type: ignore[assignment]
            self._requests.pop(request.id)
            self._count(request)
        if request.is_streamed:
            request.chunks.append(chunk)
        return True

    def _count(self, request: _Request) -> None:
        """A request has ended: its counts as the server tells them, else the difference of its counters."""
        timings, usage = request.timings, request.usage
        timings.num_output_tokens = usage.get("completion_tokens") or timings.num_output_tokens
        timings.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        told = request.metrics.get("speculative_decoding")
        self._tells = self._tells or bool(told)
        if told:
            merge_told(request.stats, told)
        request.stats.num_emitted_tokens = timings.num_output_tokens
        self._stats.merge(request.stats)
        if not self._requests and not self._tells and self._before and (after := self._snapshot()):
            self._attribute(difference(self._before, after))

    def _attribute(self, counts: SpecStats) -> None:
        """Counts of all requests since the engine was idle: one request's if it was alone, else of the engine only."""
        counts.num_emitted_tokens = 0  # which every answer tells
        if counts.num_drafts < 0:
            return  # the server was started anew in between
        self._stats.merge(counts)
        if len(self._since) == 1:
            self._since[0].stats.merge(counts)

    def _snapshot(self) -> Snapshot | None:
        with contextlib.suppress(FlashSpecError):
            return Snapshot.read(self.url)
        return None

    # HTTP

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._where.scheme == "https" else http.client.HTTPConnection
        connection = kind(str(self._where.hostname), self._where.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
        except OSError as error:
            raise nobody(self.url, error) from error
        connection.sock.settimeout(self.silence)
        return connection

    def _headers(self) -> dict[str, str]:
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return {"Content-Type": "application/json", **key}

    def _asked(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """A whole answer; raises what is wrong with it."""
        connection = self._connection()
        try:
            data = None if body is None else json.dumps(body).encode()
            connection.request(method, self._where.path + path, data, self._headers())
            response = connection.getresponse()
            text = response.read()
            if response.status != 200:
                raise _refusal(self.url, response.status, text)
            found: dict[str, Any] = json.loads(text)
            return found
        except FlashSpecError:
            raise
        except TimeoutError as error:
            raise EngineLostError(f"{self.url} has said nothing for {self.silence:g} s; is it hung?") from error
        except (OSError, http.client.HTTPException) as error:
            raise EngineLostError(f"the connection to {self.url} was lost ({error})") from error
        except ValueError as error:
            raise OptionError(f"{self.url}{path} is no OpenAI-compatible API ({error}); check the address") from error
        finally:
            connection.close()


def sampling_body(sampling: SamplingParams) -> dict[str, Any]:
    """SamplingParams as vLLM's API names them.

    Raises:
        OptionError: what that API does not have.
    """
    if sampling.bad_tokens:
        raise OptionError("bad_tokens cannot be sent to vLLM, which bans words, not ids; use logit_bias of -100")
    # always, for what is left out is as the model's generation_config.json says
    body = {name: getattr(sampling, name) for name in ALWAYS_SENT}
    neutral = SamplingParams()
    for name in ("seed", "min_tokens", "ignore_eos"):
        if (value := getattr(sampling, name)) != getattr(neutral, name):
            body[name] = value
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.allowed_tokens is not None:
        body["allowed_token_ids"] = list(sampling.allowed_tokens)
    if sampling.grammar is not None:
        if sampling.grammar.kind != "json_schema":
            raise OptionError(f"a {sampling.grammar.kind} grammar cannot be sent to vLLM; use a JSON schema")
        schema = {"name": "output", "schema": json.loads(sampling.grammar.text)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if sampling.logprobs is not None:
        body["return_tokens_as_token_ids"] = True
    return body


def merge_told(stats: SpecStats, told: dict[str, Any]) -> None:
    """Add what an answer's ``metrics.speculative_decoding`` says, in vLLM's words or ours."""
    drafts = told.get("num_spec_steps", told.get("num_drafts", 0)) or 0
    accepted = told.get("num_accepted_draft_tokens", told.get("num_accepted_tokens", 0)) or 0
    more = SpecStats(drafts, told.get("num_draft_tokens") or 0, accepted)
    histogram = told.get("acceptance_histogram")  # [i]: steps in which i guesses were accepted
    if histogram:
        most = max((i for i, count in enumerate(histogram) if count), default=0)
        more.num_accepted_tokens_per_pos = [sum(histogram[i + 1 :]) for i in range(most)]
    else:
        more.num_accepted_tokens_per_pos = list(told.get("num_accepted_tokens_per_pos") or [])
    stats.merge(more)


def _of_choice(request: _Request, choice: dict[str, Any]) -> Chunk | None:
    text = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    tokens = choice.get("token_ids") or []
    request.reason = choice.get("finish_reason") or request.reason
    if not text and not tokens:
        return None
    pieces = [text, *[""] * (len(tokens) - 1)]
    kinds: list[TokenKind] = [*["accepted"] * (len(pieces) - 1), "recovered"]  # type: ignore[list-item]
    return Chunk(request.id, list(tokens), pieces, kinds, None, _logprobs(request.sampling, choice.get("logprobs")))


def _logprobs(sampling: SamplingParams, told: dict[str, Any] | None) -> list[TokenLogprob] | None:
    """From either endpoint's format, with tokens named by their ids."""
    if sampling.logprobs is None or not told:
        return None
    count = sampling.logprobs
    if "content" in told:
        return [
            _logprob(
                entry["token"],
                entry["logprob"],
                [(top["token"], top["logprob"]) for top in entry["top_logprobs"]],
                count,
            )
            for entry in told["content"] or []
        ]
    tops = told.get("top_logprobs") or [None] * len(told["tokens"])
    return [
        _logprob(token, logprob, list((top or {}).items()), count)
        for token, logprob, top in zip(told["tokens"], told["token_logprobs"], tops, strict=True)
    ]


def _logprob(token: str, logprob: float, tops: list[tuple[str, float]], count: int) -> TokenLogprob:
    """The likeliest first; vLLM lists the token itself before them, and beyond their number."""
    likeliest = sorted(tops, key=lambda top: -top[1])[:count]
    return TokenLogprob(_id(token), logprob, [(_id(name), value) for name, value in likeliest])


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:")) if name.startswith("token_id:") else -1


def _pieces(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events of a stream, as JSON."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        yield json.loads(data)


def _refusal(url: str, status: int, text: bytes) -> FlashSpecError:
    """A server's no as an error of ours, in its words."""
    try:
        message = _said(json.loads(text))
    except ValueError:  # no API's words
        return OptionError(
            f"what answers at {url} is no OpenAI-compatible server ({status}, no JSON); check the address"
        )
    if status in (401, 403):
        return OptionError(f"{url} refuses the API key ({message}); give it with --api-key")
    if status == 404:
        return OptionError(f"{url}: {message} (404); check the address and the model's name")
    if status in (429, 503):
        return EngineLostError(f"{url} is busy or shutting down ({status}): {message}")
    kind = OptionError if status < 500 else EngineLostError
    return kind(f"{url}: {message} ({status})")


def _said(told: Any) -> str:
    """The message in an error's body, whoever wrote it."""
    error = told.get("error", told) if isinstance(told, dict) else told
    return str(error.get("message") or error if isinstance(error, dict) else error)[:1000]


def _hang_up(request: _Request) -> None:
    """Wake its thread, which closes the connection."""
    if request.sock is not None:
        with contextlib.suppress(OSError):  # it is closed already
            request.sock.shutdown(socket.SHUT_RDWR)


def _address(url: str) -> SplitResult:
    try:
        where = urlsplit(url)
        if where.scheme in ("http", "https") and where.hostname and where.port != 0:
            return where
    except ValueError:  # of a port that is none
        pass
    raise OptionError(f"the server's address is {url!r}; give one like http://127.0.0.1:8000")


def _models(url: str, answer: Any) -> list[str]:
    try:
        named = [str(entry["id"]) for entry in answer["data"]]
    except (TypeError, KeyError):
        named = []
    if not named:
        raise OptionError(f"{url}/v1/models names no model; is it a vLLM or FlashSpec server?")
    return named
