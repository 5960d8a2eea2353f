"""LocalEngine: draft, score, verify, commit, keep. Everything else reads its chunks."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any, overload

import torch

from flashspec.choice import HybridController, QuickController
from flashspec.controller import Controller, Times
from flashspec.core import (
    EMPTY,
    FIRST_TOKEN,
    LAST_TOKEN,
    Chunk,
    Draft,
    Drafter,
    FinishReason,
    Prompt,
    SamplingParams,
    Score,
    Sequence,
    SpecStats,
    Target,
    Timings,
    TokenKind,
    TokenLogprob,
    Verdict,
)
from flashspec.errors import FlashSpecError, OptionError, PromptError
from flashspec.sampling import distribution, largest_probability
from flashspec.scheduler import Scheduler
from flashspec.text import Encoded, TextStream, Tokenizer, encode
from flashspec.tree import best_chain, height, prefix
from flashspec.verify import verify

AnyController = Controller | QuickController | HybridController


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


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step sets out to do."""

    seqs: list[Sequence]
    budgets: list[int]  # draft tokens for each
    reasons: list[str]  # for a budget of 0
    backlogs: list[int]  # what the drafter had to read for each first
    has_prompt: bool  # its times are not those of a decode step


@dataclass(slots=True)
class _Request:
    seq: Sequence
    text: TextStream
    timings: Timings
    stats: SpecStats = field(default_factory=SpecStats)
    chunks: list[Chunk] = field(default_factory=list)  # not yet read, where ``stream`` is the reader
    is_streamed: bool = False
    error: FlashSpecError | None = None


class ChunkStream(Iterator[Chunk]):
    """The chunks of one request, in steps taken as they are asked for. Several may be read in turns.

    Closing it, or letting go of it, aborts what is left. It raises the error that ended its request, if one did.
    """

    def __init__(self, engine: LocalEngine, request: _Request) -> None:
        self.engine, self.request = engine, request
        request.is_streamed = True

    def __next__(self) -> Chunk:
        request = self.request
        while not request.chunks:
            if request.error is not None:
                raise request.error
            if request.seq.is_finished:
                raise StopIteration
            try:
                self.engine.step()
            except BaseException:
                self.close()
                raise
        return request.chunks.pop(0)

    def close(self) -> None:
        self.engine.abort(self.request.seq.id)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # at exit, what it would free may be gone already
            self.close()


class LocalEngine:
    """Speculative decoding of any Target with any Drafter, in one process. Not thread-safe.

    Args:
        target: the model served.
        drafter: None for ordinary decoding.
        tokenizer: None if prompts are token ids only; then there are no texts and no stop strings.
        num_speculative_tokens: the longest draft, 0 is ordinary decoding; or a Controller, which chooses at each step
            (a QuickController for guesses that cost nothing, a HybridController for a HybridDrafter).
        max_batch: sequences that run at once; the others wait.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        num_speculative_tokens: int | AnyController = 5,
        max_batch: int = 16,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.why = ""  # how this drafter came to be chosen, where ``load`` chose it
        self.controller: AnyController | None = None
        if isinstance(num_speculative_tokens, Controller | QuickController | HybridController):
            self.controller, num_speculative_tokens = num_speculative_tokens, num_speculative_tokens.max_tokens
        self.scheduler = Scheduler(
            max_batch=max_batch,
            num_speculative_tokens=num_speculative_tokens if drafter is not None else 0,
            max_length=target.max_length,
        )
        self._inner: dict[str, Any] = {}  # what the drafter wants to see of the target
        if drafter is not None:
            drafter.rule = self.controller
            self._inner = _wanted(target, drafter)
        self._requests: dict[str, _Request] = {}
        self._stats = SpecStats()

    # the Engine protocol

    def add(
        self, prompt: Prompt, sampling: SamplingParams | None = None, *, request_id: str | None = None, choice: int = 0
    ) -> str:
        """Queue a request; its id.

        Raises:
            PromptError: empty, unreadable, or as long as the model's context.
            OptionError: the sampling parameters ask for what this model does not have.
        """
        sampling = sampling or SamplingParams()
        ids = encode(self.tokenizer, prompt, vocab_size=self.target.vocab_size)
        if len(ids) >= self.target.max_length:
            raise PromptError(
                f"the prompt has {len(ids)} tokens; with at least one to generate it must stay under the model's "
                f"{self.target.max_length} positions; shorten it"
            )
        self._check(sampling)
        name = request_id or uuid.uuid4().hex
        if name in self._requests:
            raise OptionError(f"request id {name!r} is already running; choose another")
        eos = frozenset() if sampling.ignore_eos else self.target.eos_tokens
        given = prompt.prompt if isinstance(prompt, Encoded) else prompt
        seq = Sequence(name, ids, len(ids), sampling, choice, eos_tokens=eos, prompt=given)
        timings = Timings(arrival=time.perf_counter())
        self._requests[name] = _Request(seq, TextStream(self.tokenizer, sampling.stop), timings)
        self.scheduler.add(seq)
        return name

    def step(self) -> list[Chunk]:
        """Advance every running sequence by at least one token.

        A request that cannot go on (its logits are not finite, say) ends alone, with ``abort``; its reader gets the
        error.
        """
        seqs, limits = self.scheduler.schedule()
        if not seqs:
            return []
        started = time.perf_counter()
        work = self._plan(seqs, limits)
        drafts = self._propose(seqs, work.budgets)
        drafted = time.perf_counter()
        scores = self.target.score(seqs, drafts, **self._inner)
        scored = time.perf_counter()
        chunks: list[Chunk] = []
        try:
            verdicts = [self._settle(*each, chunks) for each in zip(seqs, drafts, scores, strict=True)]
            if self.drafter is not None:
                self.drafter.observe(seqs, drafts, verdicts, scores)
            times = (started, drafted, scored, time.perf_counter())
            self._record(seqs, chunks, times)
            self._learn(work, drafts, verdicts, scores, times)
        except BaseException:
            for seq in seqs[len(chunks) :]:  # they will be scored again
                self.target.rewind(seq, len(seq) - 1)
            raise
        finally:
            self._drop_finished(seqs)
        return chunks

    def abort(self, request_id: str) -> None:
        """End a request now and free its rows; an unknown one is no error."""
        request = self._requests.get(request_id)
        if request is not None:
            request.seq.finish_reason = "abort"
            self.scheduler.remove(request.seq)
            self._drop_finished([request.seq])

    def stats(self) -> SpecStats:
        """Counts over all requests so far."""
        return self._stats

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    # whole requests

    def stream(self, prompt: Prompt, sampling: SamplingParams | None = None) -> ChunkStream:
        """Chunks of one request as they come. Several streams may be read in turns; closing one aborts it."""
        return self.chunks(self.add(prompt, sampling))

    def chunks(self, request_id: str) -> ChunkStream:
        """The chunks of a request that was just added; closing the iterator aborts it.

        Raises:
            OptionError: no such request, or some of its chunks have already been given to ``step``'s caller.
        """
        request = self._requests.get(request_id)
        if request is None or (request.seq.num_output_tokens and not request.is_streamed):
            raise OptionError(f"request {request_id!r} is not waiting to be read; call chunks() before the first step")
        return ChunkStream(self, request)

    def progress(self, request_id: str) -> tuple[SpecStats, Timings]:
        """A request's counts and timings, live: they go on changing while it runs."""
        request = self._requests[request_id]
        return request.stats, request.timings

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
        is_list = isinstance(prompts, list | tuple) and len(prompts) > 0
        if isinstance(prompts, str) or (is_list and isinstance(prompts[0], dict | int)):
            return self._finish_all([prompts], [sampling])[0]  # type: ignore[list-item]
        if not is_list:
            raise PromptError(
                f"a prompt is a text, a list of chat messages or a list of token ids, not {prompts!r:.80}"
            )
        each = [sampling] * len(prompts) if sampling is None or isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(prompts):
            raise OptionError(f"{len(each)} sampling parameters for {len(prompts)} prompts; give one, or one for each")
        return self._finish_all(list(prompts), each)  # type: ignore[arg-type]

    def _finish_all(self, prompts: list[Prompt], sampling: list[SamplingParams | None]) -> list[Result]:
        streams: list[ChunkStream] = []
        try:
            for prompt, params in zip(prompts, sampling, strict=True):
                streams.append(self.stream(prompt, params))
            return [_result(stream.request, list(stream)) for stream in streams]
        finally:
            for stream in streams:
                stream.close()

    # parts of a step

    def _plan(self, seqs: list[Sequence], limits: list[int]) -> _Work:
        """The draft lengths of this step, and what is remembered of it for the controller."""
        has_prompt = any(seq.num_output_tokens == 0 for seq in seqs)
        if self.controller is None or self.drafter is None:
            reasons = [LAST_TOKEN if seq.num_output_tokens else FIRST_TOKEN for seq in seqs]
            if self.drafter is None:
                reasons = ["there is no drafter"] * len(seqs)
            return _Work(seqs, limits, reasons, [0] * len(seqs), has_prompt)
        backlogs = [self.drafter.backlog(seq) for seq in seqs]
        budgets = self.controller.budgets(seqs, limits, backlogs)
        return _Work(seqs, budgets, [self.controller.reason(seq) for seq in seqs], backlogs, has_prompt)

    def _learn(
        self,
        work: _Work,
        drafts: list[Draft],
        verdicts: list[Verdict],
        scores: list[Score],
        times: tuple[float, float, float, float],
    ) -> None:
        steps = zip(work.seqs, work.budgets, work.reasons, drafts, verdicts, scores, strict=True)
        for seq, budget, reason, draft, verdict, score in steps:
            for stats in (self._requests[seq.id].stats, self._stats):
                stats.record_step(len(draft), "the drafter had no guess worth trying" if budget else reason)
            if self.controller is not None:
                sureness = partial(largest_probability, score.logits[0], seq.sampling.temperature)
                nodes = verdict.accepted
                self.controller.observe(seq, budget, draft, len(nodes), accepted=nodes, sureness=sureness)
        if self.controller is None or work.has_prompt:
            return
        started, drafted, scored, now = times
        seconds = Times(drafting=drafted - started, forward=scored - drafted, settling=now - scored)
        self.controller.observe_times(drafts, work.budgets, work.backlogs, seconds)

    def _propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        if self.drafter is None or not any(budgets):
            return [EMPTY] * len(seqs)
        drafts = self.drafter.propose(seqs, budgets)
        return [self._checked(draft, budget) for draft, budget in zip(drafts, budgets, strict=True)]

    def _checked(self, draft: Draft, budget: int) -> Draft:
        """A draft of at most ``budget`` nodes of real tokens. Neither cut looks at a random draw, so neither biases."""
        draft = prefix(draft, budget)
        if len(draft.parents) != len(draft) or any(not -1 <= p < i for i, p in enumerate(draft.parents)):
            raise OptionError(
                f"drafter {draft.drafter!r} gave {len(draft)} tokens with parents {draft.parents!r:.80}; each parent "
                "must be -1 or an earlier node"
            )
        if not self.target.supports_trees:
            draft = best_chain(draft)
        size = self.target.vocab_size
        bad = next((i for i, token in enumerate(draft.tokens) if not 0 <= token < size), None)
        if draft.probs is not None and (bad is not None or draft.probs.shape != (len(draft), size)):
            raise OptionError(
                f"drafter {draft.drafter!r} gave {len(draft)} tokens with probabilities of shape "
                f"{list(draft.probs.shape)}; the target needs [{len(draft)}, {size}] and token ids below {size}"
            )
        return draft if bad is None else prefix(draft, bad)

    def _settle(self, seq: Sequence, draft: Draft, score: Score, chunks: list[Chunk]) -> Verdict:
        """One sequence's verdict, committed, kept and delivered before the next one is looked at."""
        try:
            with torch.inference_mode():
                verdict = verify(distribution(score.logits, seq, draft), draft, seq)
            chunk = self._commit(seq, draft, verdict, score)
        except FlashSpecError as error:
            self._requests[seq.id].error = error
            verdict, chunk = Verdict([], seq.tokens[-1], False), Chunk(seq.id, [], [], [], "abort")
        except BaseException:  # an interrupt, or a bug of the tokenizer's: this request cannot be trusted any more
            self.abort(seq.id)
            raise
        self.target.keep(seq, verdict.accepted[: len(chunk.tokens)])
        self._count(seq, draft, verdict, chunk)
        self._deliver(chunk)
        chunks.append(chunk)
        return verdict

    def _commit(self, seq: Sequence, draft: Draft, verdict: Verdict, score: Score) -> Chunk:
        """Append the verdict's tokens up to the first that ends the sequence; the only writer of ``seq.tokens``."""
        request = self._requests[seq.id]
        last: TokenKind = "bonus" if verdict.is_bonus else "recovered"
        chunk = Chunk(seq.id, [], [], [], None, None if seq.sampling.logprobs is None else [])
        row = 0
        for node in [*verdict.accepted, None]:
            token = verdict.next_token if node is None else draft.tokens[node]
            seq.tokens.append(token)
            chunk.tokens.append(token)
            chunk.kinds.append(last if node is None else "accepted")
            chunk.pieces.append(request.text.push(token))
            if chunk.logprobs is not None:
                chunk.logprobs.append(logprob(score.logits[row], token, seq.sampling.logprobs or 0))
            seq.finish_reason = self._end(seq, token, request.text)
            if seq.finish_reason is not None:
                chunk.pieces[-1] += request.text.finish()
                break
            row = 0 if node is None else node + 1
        return chunk if seq.finish_reason is None else _finished(chunk, seq.finish_reason)

    def _end(self, seq: Sequence, token: int, text: TextStream) -> FinishReason | None:
        if token in seq.eos_tokens or text.is_stopped:
            return "stop"
        if seq.num_output_tokens >= seq.sampling.max_tokens or len(seq) >= self.target.max_length:
            return "length"
        return None

    def _deliver(self, chunk: Chunk) -> None:
        request = self._requests[chunk.request_id]
        if request.is_streamed:
            request.chunks.append(chunk)
        if chunk.finish_reason is not None:
            request.seq.finish_reason = chunk.finish_reason
            self.scheduler.remove(request.seq)

    def _count(self, seq: Sequence, draft: Draft, verdict: Verdict, chunk: Chunk) -> None:
        num_accepted = chunk.kinds.count("accepted")
        is_cut = len(chunk.tokens) <= len(verdict.accepted)  # what lies behind an end was never up for acceptance
        for stats in (self._requests[seq.id].stats, self._stats):
            stats.num_emitted_tokens += len(chunk.tokens)
            if len(draft):
                longest = num_accepted if is_cut else height(draft.parents)
                stats.record(num_accepted if is_cut else len(draft), num_accepted, height=longest)

    def _record(self, seqs: list[Sequence], chunks: list[Chunk], times: tuple[float, float, float, float]) -> None:
        started, drafted, scored, now = times
        for seq, chunk in zip(seqs, chunks, strict=True):
            timings = self._requests[seq.id].timings
            if chunk.tokens:
                timings.first_token = timings.first_token or now
                timings.last_token = now
            timings.num_output_tokens = seq.num_output_tokens
            timings.draft += drafted - started
            timings.verify += scored - drafted
            timings.sample += now - scored

    def _drop_finished(self, seqs: Seq[Sequence]) -> None:
        for seq in seqs:
            if seq.is_finished and self._requests.pop(seq.id, None) is not None:
                self.target.forget(seq)
                if self.drafter is not None:
                    self.drafter.forget(seq)
                if self.controller is not None:
                    self.controller.forget(seq)

    def _check(self, sampling: SamplingParams) -> None:
        size = self.target.vocab_size
        named = {"logit_bias": sampling.logit_bias, "bad_tokens": sampling.bad_tokens}
        named["allowed_tokens"] = sampling.allowed_tokens or ()
        for name, tokens in named.items():
            if bad := [token for token in tokens if not 0 <= token < size]:
                raise OptionError(f"{name} names token id {bad[0]}; the model's vocabulary has {size}")
        if sampling.stop and self.tokenizer is None:
            raise OptionError("stop strings need a tokenizer, and this engine has none; use token ids")


def _wanted(target: Target, drafter: Drafter) -> dict[str, Any]:
    """Arguments of ``target.score``, for a drafter that reads hidden states.

    Raises:
        OptionError: the target has none to show.
    """
    wanted: dict[str, Any] = {"hidden": True} if drafter.needs_hidden else {}
    if drafter.feature_layers:
        wanted["features"] = tuple(drafter.feature_layers)
    if wanted and not target.has_hidden:
        raise OptionError(
            f"drafter {drafter.name!r} reads the model's hidden states, which {type(target).__name__} does not show; "
            "run the model with torch (--backend torch), or use another drafter"
        )
    return wanted


def logprob(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    """log softmax of the target's own logits [vocab], and its ``count`` likeliest tokens."""
    logprobs = torch.log_softmax(logits, -1)
    values, ids = logprobs.topk(min(count, len(logprobs)))
    return TokenLogprob(token, float(logprobs[token]), list(zip(ids.tolist(), values.tolist(), strict=True)))


def _finished(chunk: Chunk, reason: FinishReason) -> Chunk:
    return Chunk(chunk.request_id, chunk.tokens, chunk.pieces, chunk.kinds, reason, chunk.logprobs)


def _result(request: _Request, chunks: list[Chunk]) -> Result:
    logprobs = None
    if request.seq.sampling.logprobs is not None:
        logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    return Result(
        text="".join(chunk.text for chunk in chunks),
        tokens=[token for chunk in chunks for token in chunk.tokens],
        finish_reason=request.seq.finish_reason or "abort",
        stats=request.stats,
        timings=request.timings,
        kinds=[kind for chunk in chunks for kind in chunk.kinds],
        logprobs=logprobs,
    )
