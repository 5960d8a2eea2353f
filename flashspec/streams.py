"""Whole requests over an engine's steps: streams of chunks, and results.

It knows chunks and who waits for them; it does not know where they come from, so that every engine is read alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, overload

from flashspec.core import Chunk, FinishReason, Prompt, SamplingParams, SpecStats, Timings, TokenKind, TokenLogprob
from flashspec.errors import OptionError


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. ``tokens`` holds the end-of-sequence token if one was generated; ``text`` does not."""

    text: str
    tokens: list[int]
    finish_reason: FinishReason
    stats: SpecStats
    timings: Timings
    kinds: list[TokenKind]
    logprobs: list[TokenLogprob] | None = None


class Streamed(Protocol):
    """What an engine keeps of a request whose chunks somebody reads."""

    chunks: list[Chunk]  # not yet read
    is_streamed: bool
    stats: SpecStats
    timings: Timings

    @property
    def id(self) -> str: ...
    @property
    def sampling(self) -> SamplingParams: ...
    @property
    def is_finished(self) -> bool: ...
    @property
    def error(self) -> Exception | None: ...


class ChunkStream(Iterator[Chunk]):
    """The chunks of one request, in steps taken as they are asked for. Several may be read in turns.

    Closing it, or letting go of it, aborts what is left. It raises the error that ended its request, if one did.
    """

    def __init__(self, engine: Streaming, request: Streamed) -> None:
        self.engine, self.request = engine, request
        request.is_streamed = True

    def __next__(self) -> Chunk:
        request = self.request
        while not request.chunks:
            if request.error is not None:
                raise request.error
            if request.is_finished:
                raise StopIteration
            try:
                self.engine.step()
            except BaseException:
                self.close()
                raise
        return request.chunks.pop(0)

    def close(self) -> None:
        self.engine.abort(self.request.id)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at exit, what it would free may be gone already
            self.close()


class Streaming:
    """The part of an engine that reads its own chunks, for who wants texts. Subclasses have requests."""

    def step(self) -> list[Chunk]:
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        raise NotImplementedError

    def add(self, prompt: Prompt, sampling: SamplingParams | None = None) -> str:
        raise NotImplementedError

    def chunks(self, request_id: str) -> ChunkStream:
        raise NotImplementedError

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> ChunkStream:
        """Chunks of one request as they come. Several streams may be read in turns; closing one aborts it."""
        return self.chunks(self.add(prompt, sampling))

    @overload
    def generate(self, prompts: str, sampling: SamplingParams | None = None) -> Result: ...
    @overload
    def generate(self, prompts: list[dict[str, str]], sampling: SamplingParams | None = None) -> Result: ...
    @overload
    def generate(self, prompts: list[int], sampling: SamplingParams | None = None) -> Result: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[dict[str, str]]] | list[list[int]],
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[Result]: ...

    def generate(
        self, prompts: Prompt | Seq[Prompt], sampling: SamplingParams | Seq[SamplingParams] | None = None
    ) -> Result | list[Result]:
        """Finished results: one for a text, a conversation or a list of ids; a list for a list of those."""
        self._check_prompts(prompts)
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], dict | int)):
            return self._finish_all([prompts], [sampling])[0]  # type: ignore[list-item]
        each = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise OptionError(f"{len(each)} sampling parameters for {len(prompts)} prompts; give one, or one for each")
        return self._finish_all(list(prompts), each)  # type: ignore[arg-type]

    def _check_prompts(self, prompts: Any) -> None:
        """Raise PromptError for what is no prompt and no list of some."""

    def _finish_all(self, prompts: list[Prompt], sampling: list[SamplingParams | None]) -> list[Result]:
        streams: list[ChunkStream] = []
        try:
            for prompt, params in zip(prompts, sampling, strict=True):
                streams.append(self.stream(prompt, params))
            return [_result(stream.request, list(stream)) for stream in streams]
        finally:
            for stream in streams:
                stream.close()


def _result(request: Streamed, chunks: list[Chunk]) -> Result:
    logprobs = None
    if request.sampling.logprobs is not None:
        logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    return Result(
        text="".join(chunk.text for chunk in chunks),
        tokens=[token for chunk in chunks for token in chunk.tokens],
        finish_reason=(chunks[-1].finish_reason if chunks else None) or "abort",
        stats=request.stats,
        timings=request.timings,
        kinds=[kind for chunk in chunks for kind in chunk.kinds],
        logprobs=logprobs,
    )
