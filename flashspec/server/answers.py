"""Chunks to OpenAI's objects: texts, log probabilities, calls, usage, and our counts of speculation.

It knows the API's answers; it does not know HTTP or the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import flashspec
from flashspec.core import Chunk, SpecStats, TokenLogprob
from flashspec.server.tools import Calls
from flashspec.server.worker import Job
from flashspec.text import Tokenizer
from flashspec.vocabulary import token_bytes

FINGERPRINT = f"flashspec-{flashspec.__version__}"


class Spelling:
    """Tokens as text and bytes, for log probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._bytes: list[bytes | None] | None = None

    def named(self, token: int) -> tuple[str, list[int]]:
        """By its id, as vLLM does it for who asks."""
        return f"token_id:{token}", self(token)[1]

    def __call__(self, token: int) -> tuple[str, list[int]]:
        if self._bytes is None:
            self._bytes = token_bytes(self.tokenizer)
        data = self._bytes[token] if token < len(self._bytes) else None
        if data is None:
            text = str(self.tokenizer.decode([token]))
            return text, list(text.encode("utf-8", "replace"))
        return data.decode("utf-8", "replace"), list(data)


@dataclass(slots=True)
class Choice:
    """One of a request's answers as it grows."""

    index: int
    job: Job
    echo: str = ""  # the prompt, where it is to be repeated
    calls: Calls | None = None  # where the model may call tools
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_characters: int = 0
    finish_reason: str | None = None

    def take(self, chunk: Chunk) -> tuple[str, list[dict[str, Any]]]:
        """Add a chunk; the text to show and the calls that are complete with it."""
        is_last = chunk.finish_reason is not None
        text, calls = chunk.text, list[dict[str, Any]]()
        if self.calls is not None:
            text, calls = self.calls.push(text, is_last=is_last)
        self.texts.append(text)
        self.tokens += chunk.tokens
        self.logprobs += chunk.logprobs or []
        if is_last:
            is_called = self.calls is not None and self.calls.found and chunk.finish_reason == "stop"
            self.finish_reason = "tool_calls" if is_called else chunk.finish_reason
        return text, calls


class Format:
    """What chat and plain completions have in common.

    Args:
        id: of the answer.
        model: its name, as served.
        spelling: tokens as text and bytes, in log probabilities.
        has_ids: whether token ids are told.
    """

    kind = ""

    def __init__(
        self, *, id: str, model: str, spelling: Callable[[int], tuple[str, list[int]]], has_ids: bool = False
    ) -> None:
        self.id, self.model, self.spelling, self.has_ids = id, model, spelling, has_ids
        self.created = int(time.time())

    def whole(self, choices: list[Choice]) -> dict[str, Any]:
        ids = [{"token_ids": choice.tokens} if self.has_ids else {} for choice in choices]
        each = [{**self._choice(choice), **more} for choice, more in zip(choices, ids, strict=True)]
        return {**self._head(self.kind), "choices": each}

    def piece(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(f"{self.kind}.chunk" if self.kind == "chat.completion" else self.kind), "choices": choices}

    def first(self, choice: Choice) -> dict[str, Any] | None:
        """What opens a choice's stream."""
        raise NotImplementedError

    def delta(self, choice: Choice, chunk: Chunk, text: str, calls: list[dict[str, Any]]) -> dict[str, Any] | None:
        """What a chunk adds to a choice's stream; None for nothing."""
        raise NotImplementedError

    def _choice(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }  # fmt: skip


class ChatFormat(Format):
    kind = "chat.completion"

    def first(self, choice: Choice) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def delta(self, choice: Choice, chunk: Chunk, text: str, calls: list[dict[str, Any]]) -> dict[str, Any] | None:
        delta: dict[str, Any] = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = calls
        if not delta and not chunk.logprobs and choice.finish_reason is None and not self.has_ids:
            return None
        ids = {"token_ids": chunk.tokens} if self.has_ids else {}
        logprobs = self._logprobs(chunk.logprobs)
        head = {"index": choice.index, "delta": delta, "logprobs": logprobs}
        return {**head, "finish_reason": choice.finish_reason, **ids}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = "".join(choice.texts)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls is not None and choice.calls.found:
            calls = [{name: call[name] for name in ("id", "type", "function")} for call in choice.calls.found]
            message |= {"content": text.strip() or None, "tool_calls": calls}
        has_logprobs = choice.job.sampling.logprobs is not None
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs) if has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenLogprob) -> dict[str, Any]:
        top = [self._spelled(token, logprob) for token, logprob in entry.top]
        return {**self._spelled(entry.token, entry.logprob), "top_logprobs": top}

    def _spelled(self, token: int, logprob: float) -> dict[str, Any]:
        text, data = self.spelling(token)
        return {"token": text, "logprob": logprob, "bytes": data}


class TextFormat(Format):
    kind = "text_completion"

    def first(self, choice: Choice) -> dict[str, Any] | None:
        if not choice.echo:
            return None
        return {"index": choice.index, "text": choice.echo, "logprobs": None, "finish_reason": None}

    def delta(self, choice: Choice, chunk: Chunk, text: str, calls: list[dict[str, Any]]) -> dict[str, Any] | None:
        if not text and not chunk.logprobs and choice.finish_reason is None and not self.has_ids:
            return None
        ids = {"token_ids": chunk.tokens} if self.has_ids else {}
        logprobs = self._logprobs(choice, chunk.logprobs)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason, **ids}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        choice.num_characters = 0
        has_logprobs = choice.job.sampling.logprobs is not None
        return {
            "index": choice.index,
            "text": choice.echo + "".join(choice.texts),
            "logprobs": self._logprobs(choice, choice.logprobs) if has_logprobs else None,
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, choice: Choice, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        if entries is None:
            return None
        names, offsets = [self.spelling(entry.token)[0] for entry in entries], []
        for name in names:
            offsets.append(choice.num_characters)
            choice.num_characters += len(name)
        top = [{self.spelling(token)[0]: logprob for token, logprob in entry.top} for entry in entries]
        logprobs = [entry.logprob for entry in entries]
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def usage(jobs: list[Job]) -> dict[str, Any]:
    """Tokens of a request; prompts are counted once, however many choices there are.

    Where something was predicted, its drafts count as the prediction's: a drafter does not tell what it guesses from.
    """
    prompt = sum(len(job.prompt) for job in jobs if job.choice == 0)
    cached = sum(job.timings.num_cached_tokens for job in jobs if job.choice == 0)
    output = sum(job.timings.num_output_tokens for job in jobs)
    told: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if any(job.predicted is not None for job in jobs):
        stats = _stats(jobs)
        told["completion_tokens_details"] = {
            "accepted_prediction_tokens": stats.num_accepted_tokens,
            "rejected_prediction_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
        }
    return told


def _stats(jobs: list[Job]) -> SpecStats:
    stats = SpecStats()
    for job in jobs:
        stats.merge(job.stats)
    return stats


def metrics(jobs: list[Job]) -> dict[str, Any]:
    """Of a request: times in milliseconds and what speculation did."""
    stats, timings = _stats(jobs), [job.timings for job in jobs]
    first, last = min(t.first_token for t in timings), max(t.last_token for t in timings)
    tokens = sum(t.num_output_tokens for t in timings)
    decode = last - first
    return {
        "time_to_first_token_ms": 1000 * max(first - timings[0].arrival, 0.0),
        "generation_time_ms": 1000 * decode,
        "queue_time_ms": 1000 * timings[0].queued,
        "tokens_per_second": (tokens - len(jobs)) / decode if decode > 0 else None,
        "speculative_decoding": {
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.acceptance_rate,
            "acceptance_by_position": stats.acceptance_by_position,
            "num_accepted_tokens_per_pos": stats.num_accepted_tokens_per_pos,
            "draft_lengths": stats.draft_lengths,
            "no_draft": stats.no_draft,
        },
    }


def speculation(chunk: Chunk, spelling: Spelling) -> dict[str, Any]:
    """Where a chunk's tokens came from, and the draft that was tried."""
    accepted = set(chunk.accepted)
    nodes = zip(chunk.draft.tokens, chunk.draft.parents, strict=True)
    return {
        "tokens": chunk.tokens,
        "pieces": chunk.pieces,
        "kinds": chunk.kinds,
        "drafter": chunk.draft.drafter,
        "draft": [
            {"text": spelling(token)[0], "parent": parent, "accepted": node in accepted}
            for node, (token, parent) in enumerate(nodes)
        ],
    }
