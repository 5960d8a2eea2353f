"""LocalEngine: draft, score, verify, commit, keep. Everything else reads its chunks."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from flashspec.choice import HybridController, QuickController
from flashspec.controller import Controller, Times
from flashspec.core import (
    EMPTY,
    FIRST_TOKEN,
    LAST_TOKEN,
    SWITCHED_OFF,
    Chunk,
    Constraint,
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
from flashspec.costs import is_ragged
from flashspec.errors import FlashSpecError, MemoryLimitError, OptionError, PromptError
from flashspec.grammar import GrammarCompiler
from flashspec.prefixes import FEWEST_TOKENS, PrefixStore, available, keep, resume, shared
from flashspec.sampling import distribution, largest_probability
from flashspec.scheduler import Scheduler, check_draft_length
from flashspec.streams import ChunkStream, Streaming
from flashspec.text import Encoded, TextStream, Tokenizer, encode, has_chat_template
from flashspec.tree import best_chain, height, prefix
from flashspec.verify import verify

logger = logging.getLogger("flashspec")

PIECE = 512  # tokens of prompts read in one step where nothing else waits
FIRST_PIECE, LEAST_PIECE = 128, 32  # where something does: before it is known what reading takes; at least
READ_SECONDS = 0.2
FEW = 8  # unseen tokens that any decode step may have

AnyController = Controller | QuickController | HybridController


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step did, for who watches."""

    seconds: float
    num_rows: int  # sequences that got tokens
    num_tokens: int  # emitted
    num_draft_tokens: int
    is_decode: bool  # no prompt was read, so that its time is that of ordinary decoding


@dataclass(slots=True)
class PrefixCounts:
    """Prompt tokens of requests that were begun, and those whose keys and values were there already."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Work:
    """What a step sets out to do."""

    seqs: list[Sequence]
    budgets: list[int]  # draft tokens for each
    reasons: list[str]  # for a budget of 0
    backlogs: list[int]  # what the drafter had to read for each first
    num_read: int  # tokens of prompts that its score reads
    has_prompt: bool  # its times are not those of a decode step


@dataclass(slots=True)
class _Request:
    seq: Sequence
    text: TextStream
    timings: Timings
    stats: SpecStats = field(default_factory=SpecStats)
    chunks: list[Chunk] = field(default_factory=list)  # not yet read, where ``stream`` is the reader
    is_streamed: bool = False
    is_begun: bool = False  # its text is being read, or was
    predicted: Seq[int] | None = None
    error: Exception | None = None

    @property
    def id(self) -> str:
        return self.seq.id

    @property
    def sampling(self) -> SamplingParams:
        return self.seq.sampling

    @property
    def is_finished(self) -> bool:
        return self.seq.is_finished


class LocalEngine(Streaming):
    """Speculative decoding of any Target with any Drafter, in one process. Not thread-safe.

    Args:
        target: the model served.
        drafter: None for ordinary decoding.
        tokenizer: None if prompts are token ids only; then there are no texts and no stop strings.
        num_speculative_tokens: the longest draft, 0 is ordinary decoding; or a Controller, which chooses at each step
            (a QuickController for guesses that cost nothing, a HybridController for a HybridDrafter).
        max_batch: sequences that run at once; the others wait.
        max_length: positions of a sequence, if less than the target has.
        max_cells: rows times positions of the target's cache; where they run short the newest sequences step back.
        prefix_bytes: of keys and values of finished sequences that are kept for those that begin alike.
        read_seconds: how long running sequences may be held up by a step that reads prompts.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        num_speculative_tokens: int | AnyController = 5,
        max_batch: int = 16,
        max_length: int | None = None,
        max_cells: int | None = None,
        prefix_bytes: int = 0,
        read_seconds: float = READ_SECONDS,
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
            max_length=min(target.max_length, max_length or target.max_length, max_cells or target.max_length),
            max_cells=max_cells,
        )
        if max_cells is not None and hasattr(target, "max_cells"):
            target.max_cells = max_cells
        self.prefixes = PrefixStore(prefix_bytes)
        self.prefix_counts = PrefixCounts()
        self.last_step: StepReport | None = None
        self.last_chunks: list[Chunk] = []  # of the last step, also where it ended in an exception
        self._read_seconds = read_seconds
        self._packs = is_ragged(target)
        self._token_seconds = 0.0  # to read a token of a prompt; 0 before any was read
        self._grammars: GrammarCompiler | None = None
        self._inner: dict[str, Any] = {}  # what the drafter wants to see of the target
        if drafter is not None:
            drafter.rule = self.controller
            drafter.prefixes = self.prefixes if prefix_bytes else None
            self._inner = _wanted(target, drafter)
        self._requests: dict[str, _Request] = {}
        self._stats = SpecStats()

    # the Engine protocol

    def add(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        choice: int = 0,
        num_speculative_tokens: int | None = None,
        drafter: str | None = None,
        predicted: Seq[int] | None = None,
        constraint: Constraint | None = None,
    ) -> str:
        """Queue a request; its id.

        Args:
            choice: which of several answers to one prompt.
            num_speculative_tokens: this request's longest draft, 0 for none; None for the engine's.
            drafter: one of ``drafters``, the only one that may guess for it, or "none"; None for any.
            predicted: tokens that the output is expected to be close to.
            constraint: of the sampling parameters' grammar, where it was compiled before (``compile``).

        Raises:
            PromptError: empty, unreadable, or as long as the model's context.
            OptionError: the parameters ask for what this model or this engine does not have.
        """
        sampling = sampling or SamplingParams()
        ids = encode(self.tokenizer, prompt, vocab_size=self.target.vocab_size)
        if len(ids) >= self.max_length:
            raise PromptError(
                f"the prompt has {len(ids)} tokens; with at least one to generate it must stay under the model's "
                f"{self.max_length} positions; shorten it"
            )
        self.check(sampling)
        drafter, num_speculative_tokens = self._own_drafting(drafter, num_speculative_tokens)
        name = request_id or uuid.uuid4().hex
        if name in self._requests:
            raise OptionError(f"request id {name!r} is already running; choose another")
        eos = frozenset() if sampling.ignore_eos else self.target.eos_tokens
        given = prompt.prompt if isinstance(prompt, Encoded) else prompt
        seq = Sequence(name, ids, len(ids), sampling, choice, eos_tokens=eos, prompt=given)
        seq.drafter, seq.num_speculative_tokens = drafter, num_speculative_tokens
        seq.constraint = constraint if constraint is not None or sampling.grammar is None else self.compile(sampling)
        if predicted is not None and self.drafter is not None:
            self.drafter.predict(name, predicted)
        timings = Timings(arrival=time.perf_counter())
        self._requests[name] = _Request(seq, TextStream(self.tokenizer, sampling.stop), timings, predicted=predicted)
        self.scheduler.add(seq)
        return name

    def step(self) -> list[Chunk]:
        """Advance every running sequence by at least one token.

        Prompts are read in pieces, so that a step without chunks is possible. A request that cannot go on (its
        logits are not finite, say) ends alone, with ``abort``; its reader gets the error. Where memory runs out that
        is the newest request.
        """
        self.last_chunks = []
        seqs, back = self.scheduler.schedule()
        for seq in back:
            self._step_back(seq)
        try:
            return self._step(seqs) if seqs else []
        except MemoryLimitError as error:
            return [*self.last_chunks, self._fail(seqs[-1], error)]

    def _step(self, running: list[Sequence]) -> list[Chunk]:
        started = time.perf_counter()
        chunks = self.last_chunks
        seqs, num_read, has_prompt, piece = self._ready(running)
        if not seqs:
            if piece is not None:
                self._read(*piece)
            return []
        begun = time.perf_counter()
        work = self._plan(seqs, num_read, has_prompt)
        drafts = self._propose(seqs, work.budgets)
        drafted = time.perf_counter()
        beside: dict[str, Any] = {} if piece is None else {"piece": piece}
        scores = self.target.score(seqs, drafts, **self._inner, **beside)
        scored = time.perf_counter()
        try:
            verdicts = [self._settle(*each, chunks) for each in zip(seqs, drafts, scores, strict=True)]
            if self.drafter is not None:
                self.drafter.observe(seqs, drafts, verdicts, scores)
            times = (begun, drafted, scored, time.perf_counter())
            self._record(seqs, chunks, times)
            self._learn(work, drafts, verdicts, scores, times)
            counts = len(seqs), sum(len(chunk.tokens) for chunk in chunks), sum(map(len, drafts))
            self.last_step = StepReport(times[-1] - started, *counts, not work.has_prompt)
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

    def compile(self, sampling: SamplingParams) -> Constraint | None:
        """The constraint of the sampling parameters' grammar; None without one.

        Raises:
            OptionError: a grammar that cannot be read, or a tokenizer that cannot be constrained.
        """
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            size, eos = self.target.vocab_size, self.target.eos_tokens
            self._grammars = GrammarCompiler(self.tokenizer, vocab_size=size, eos_tokens=eos)
        return self._grammars.compile(sampling.grammar)

    @property
    def max_length(self) -> int:
        """Positions of a sequence, prompt and output."""
        return self.scheduler.max_length

    @property
    def speaks_chat(self) -> bool:
        """Whether prompts may be conversations."""
        return has_chat_template(self.tokenizer)

    @property
    def drafters(self) -> list[str]:
        """Names that a request may choose from."""
        parts = [self.drafter, getattr(self.drafter, "quick", None), getattr(self.drafter, "slow", None)]
        return [part.name for part in parts if part is not None]

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    # whole requests

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

    def _check_prompts(self, prompts: Any) -> None:
        if not isinstance(prompts, str) and not (isinstance(prompts, list | tuple) and prompts):
            raise PromptError(
                f"a prompt is a text, a list of chat messages or a list of token ids, not {prompts!r:.80}"
            )

    # parts of a step

    def _ready(self, running: list[Sequence]) -> tuple[list[Sequence], int, bool, tuple[Sequence, int] | None]:
        """Which prompts are read in this step, and how far.

        Returns:
            the sequences whose next token can be had, tokens of prompts that are left to this step's score, whether any
            prompt is read in this step, and a sequence of which so many tokens are to be read beside the others.
        """
        unseen = {seq: len(seq) - self.target.cached_length(seq) for seq in running}
        is_alone = all(count > FEW for count in unseen.values())
        left = piece = PIECE if is_alone else self._piece()
        if self.drafter is not None:
            self.drafter.expect(len(running), None if len(running) == 1 else piece)
        if hasattr(self.target, "expected_rows"):
            self.target.expected_rows = len(running)
        ready, num_scored = [], 0
        part: tuple[Sequence, int] | None = None
        for seq in running:
            if not self._requests[seq.id].is_begun:
                if self._waits(seq, running):
                    continue
                unseen[seq] -= self._begin(seq, running)
            if unseen[seq] <= FEW:
                ready.append(seq)
            elif unseen[seq] <= left:
                left -= unseen[seq]
                num_scored += unseen[seq]
                ready.append(seq)
            elif left > 0:
                if self._packs:
                    part = seq, left
                else:
                    self._read(seq, left)
                left = 0
        return ready, num_scored, left < piece, part

    def _piece(self) -> int:
        """Tokens of prompts that may be read while others wait for their next token."""
        if not self._token_seconds:
            return FIRST_PIECE
        return min(max(int(self._read_seconds / self._token_seconds), LEAST_PIECE), PIECE)

    def _read(self, seq: Sequence, count: int) -> None:
        started = time.perf_counter()
        self.target.read(seq, count, **({"features": self._inner["features"]} if "features" in self._inner else {}))
        seconds = time.perf_counter() - started
        self._requests[seq.id].timings.verify += seconds
        self._observe_reading(seconds / count)

    def _observe_reading(self, seconds: float) -> None:
        self._token_seconds += (0.3 if self._token_seconds else 1.0) * (seconds - self._token_seconds)

    def _begin(self, seq: Sequence, running: list[Sequence]) -> int:
        """Start from the longest beginning that another one has; the number of tokens that need not be read."""
        request = self._requests[seq.id]
        request.is_begun = True
        is_new = not request.timings.started
        request.timings.started = request.timings.started or time.perf_counter()
        count = 0
        if self.prefixes.max_bytes:
            count = resume(self.prefixes, self.target, seq, running, limit=self._resumable(seq))
        if is_new:
            request.timings.num_cached_tokens = count
            self.prefix_counts.num_prompt_tokens += seq.num_prompt_tokens
            self.prefix_counts.num_cached_tokens += count
        return count

    def _resumable(self, seq: Sequence) -> int:
        tokens = seq.tokens[:-1]
        return len(tokens) if self.drafter is None else self.drafter.resumable(tokens)

    def _waits(self, seq: Sequence, running: list[Sequence]) -> bool:
        """Whether an older sequence is reading what this one begins with, too."""
        if not self.prefixes.max_bytes:
            return False
        held: int | None = None
        for other in running[: running.index(seq)]:
            if other.num_output_tokens and len(other) - self.target.cached_length(other) <= FEW:
                continue
            common = shared(other.tokens, seq.tokens[:-1])
            if common >= FEWEST_TOKENS and held is None:
                held = min(available(self.prefixes, self.target, seq, running), self._resumable(seq))
            if held is not None and common >= held + FEWEST_TOKENS:
                return True
        return False

    def _step_back(self, seq: Sequence) -> None:
        """Free a sequence's memory; what it has is read again when it is its turn."""
        self._requests[seq.id].is_begun = False
        self.target.forget(seq)
        if self.drafter is not None:
            self.drafter.forget(seq)
            if (predicted := self._requests[seq.id].predicted) is not None:
                self.drafter.predict(seq.id, predicted)

    def _fail(self, seq: Sequence, error: FlashSpecError) -> Chunk:
        logger.warning("request %s ends: %s", seq.id, error)
        self.prefixes.clear()
        chunk = Chunk(seq.id, [], [], [], "abort", error=error)
        if (request := self._requests.get(seq.id)) is not None:
            request.error = error
            self._deliver(chunk)
            self.abort(seq.id)
        return chunk

    def _plan(self, seqs: list[Sequence], num_read: int, has_prompt: bool) -> _Work:
        """The draft lengths of this step, and what is remembered of it for the controller."""
        limits = [self.scheduler.budget(seq) for seq in seqs]
        has_prompt = has_prompt or any(seq.num_output_tokens == 0 for seq in seqs)
        if self.controller is None or self.drafter is None:
            reasons = [self._reason(seq, LAST_TOKEN) for seq in seqs]
            if self.drafter is None:
                reasons = ["there is no drafter"] * len(seqs)
            return _Work(seqs, limits, reasons, [0] * len(seqs), num_read, has_prompt)
        backlogs = [self.drafter.backlog(seq) if limit else 0 for seq, limit in zip(seqs, limits, strict=True)]
        budgets = self.controller.budgets(seqs, limits, backlogs)
        reasons = [self._reason(seq, self.controller.reason(seq)) for seq in seqs]
        return _Work(seqs, budgets, reasons, backlogs, num_read, has_prompt)

    def _reason(self, seq: Sequence, other: str) -> str:
        if seq.num_output_tokens == 0:
            return FIRST_TOKEN
        return SWITCHED_OFF if seq.num_speculative_tokens == 0 else other

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
        started, drafted, scored, now = times
        if work.num_read and not any(seq.num_output_tokens > 1 for seq in work.seqs):
            self._observe_reading((scored - drafted) / work.num_read)
        if self.controller is None or work.has_prompt:
            return
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
            self.target.keep(seq, verdict.accepted[: len(chunk.tokens)])
        except Exception as error:  # not finite logits, or a bug of the tokenizer's: it cannot be trusted any more
            self._requests[seq.id].error = error
            verdict, chunk = Verdict([], seq.tokens[-1], False), Chunk(seq.id, [], [], [], "abort", error=error)
        except BaseException:  # an interrupt
            self.abort(seq.id)
            raise
        self._count(seq, draft, verdict, chunk)
        self._deliver(chunk)
        chunks.append(chunk)
        return verdict

    def _commit(self, seq: Sequence, draft: Draft, verdict: Verdict, score: Score) -> Chunk:
        """Append the verdict's tokens up to the first that ends the sequence; the only writer of ``seq.tokens``."""
        request = self._requests[seq.id]
        last: TokenKind = "bonus" if verdict.is_bonus else "recovered"
        guess = Draft(draft.tokens, draft.parents, None, draft.drafter, draft.confidences)
        chunk = Chunk(seq.id, [], [], [], None, None if seq.sampling.logprobs is None else [], guess, verdict.accepted)
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
        if seq.num_output_tokens >= seq.sampling.max_tokens or len(seq) >= self.max_length:
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
            if seq.is_finished and (request := self._requests.pop(seq.id, None)) is not None:
                if request.error is None:
                    keep(self.prefixes, self.target, seq)
                self.target.forget(seq)
                if self.drafter is not None:
                    self.drafter.forget(seq)
                if self.controller is not None:
                    self.controller.forget(seq)

    def _own_drafting(self, drafter: str | None, length: int | None) -> tuple[str | None, int | None]:
        """A request's own drafter and longest draft, checked."""
        if length is not None:
            check_draft_length(length)
        if drafter == "none" or drafter is None:
            return None, 0 if drafter == "none" else length
        if drafter not in self.drafters:
            raise OptionError(f"drafter is {drafter!r}; loaded here are {', '.join(['none', *self.drafters])}")
        return (None if self.drafter is None or drafter == self.drafter.name else drafter), length

    def check(self, sampling: SamplingParams, *, drafter: str | None = None) -> None:
        """Raise OptionError where a request asks for what this model or this engine does not have."""
        self._own_drafting(drafter, None)
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
    return replace(chunk, finish_reason=reason, accepted=chunk.accepted[: len(chunk.tokens)])
