"""The nouns of speculative decoding and the three protocols that connect them.

It knows the shapes; it runs no tensor operation and knows no model, tokenizer or file.

Invariants, asserted in the tests:

1. A cache holds a prefix of ``seq.tokens``, never a rejected token; ``tokens[-1]`` is not yet in the target's
   cache when a step begins.
2. Catch-up: a model is fed ``tokens[cache_length:]``, whatever happened before.
3. Every step commits at least one token per running sequence.
4. What is committed depends only on p and the random numbers, never on which drafter guessed.
5. Penalties, bias and bans see ``context + path(node)``: history is a function of the node, not a variable.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from flashspec.errors import OptionError, PromptError

if TYPE_CHECKING:
    import torch

Verification = Literal["auto", "rejection", "block", "coupled"]
FinishReason = Literal["stop", "length", "abort"]
Prompt = str | list[dict[str, str]] | list[int]  # text, chat messages or token ids
ROOT = -1  # parent of a draft's first node: the last committed token
FIRST_TOKEN = "the first token"  # steps in which nothing could be drafted, by reason
LAST_TOKEN = "the last token"
SWITCHED_OFF = "the request asks for none"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output has to be: JSON of a schema, a text of a regular expression or of a Lark grammar."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What to sample from, when to stop and how to verify; one set for the target and the drafter alike.

    The order of application is: penalties, bias and bans, grammar, temperature, top-k, top-p, min-p (Transformers'
    order).

    Raises:
        OptionError: a value outside its range.
    """

    temperature: float = 0.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over the output
    frequency_penalty: float = 0.0  # over the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_tokens: tuple[int, ...] = ()
    allowed_tokens: tuple[int, ...] | None = None  # None: all
    min_tokens: int = 0  # no end-of-sequence token before so many
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: of the emitted token; n: the n likeliest as well
    verification: Verification = "auto"
    grammar: Grammar | None = None  # None: any text

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "bad_tokens", "allowed_tokens"):
            if isinstance(value := getattr(self, name), list | set | frozenset):
                object.__setattr__(self, name, tuple(value))
        check_sampling(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def verification_rule(self) -> Literal["rejection", "block", "coupled"]:
        """The rule that ``auto`` stands for: coupled where there is a seed to honour, else rejection."""
        if self.verification == "auto":
            return "rejection" if self.seed is None else "coupled"
        return self.verification

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "0 is greedy, 1 the model's own distribution"),
    "top_p": (0.0, 1.0, "1 keeps every token"),
    "min_p": (0.0, 1.0, "0 keeps every token"),
    "top_k": (0, 2**31, "0 keeps every token"),
    "repetition_penalty": (0.01, 100.0, "1 is none"),
    "presence_penalty": (-100.0, 100.0, "0 is none"),
    "frequency_penalty": (-100.0, 100.0, "0 is none"),
    "min_tokens": (0, 2**31, "0 is none"),
    "max_tokens": (1, 2**31, "the number of tokens to generate"),
}
_WHOLE = ("top_k", "min_tokens", "max_tokens")


def check_sampling(params: SamplingParams) -> None:
    """Raise OptionError for the first field outside its range."""
    for name, (low, high, hint) in _RANGES.items():
        value = getattr(params, name)
        kind = int if name in _WHOLE else (int, float)
        if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
            number = "a whole number" if name in _WHOLE else "a number"
            raise OptionError(f"{name} is {value!r}; it must be {number} from {low:g} to {high:g} ({hint})")
    if params.top_p == 0:
        raise OptionError("top_p is 0; it must be above 0 and at most 1 (use temperature 0 for greedy decoding)")
    if params.verification not in ("auto", "rejection", "block", "coupled"):
        raise OptionError(f"verification is {params.verification!r}; it must be auto, rejection, block or coupled")
    if params.min_tokens > params.max_tokens:
        raise OptionError(f"min_tokens is {params.min_tokens}, above max_tokens, which is {params.max_tokens}")
    if params.seed is not None and not _is_whole(params.seed):
        raise OptionError(f"seed is {params.seed!r}; it must be a whole number")
    if not isinstance(params.ignore_eos, bool):
        raise OptionError(f"ignore_eos is {params.ignore_eos!r}; it must be True or False")
    if params.grammar is not None and (params.ignore_eos or params.min_tokens):
        raise OptionError("a grammar says where the output ends: leave out ignore_eos and min_tokens, or the grammar")
    _check_tokens_and_text(params)


def _check_tokens_and_text(params: SamplingParams) -> None:
    if not isinstance(params.stop, tuple) or any(not isinstance(text, str) or not text for text in params.stop):
        raise OptionError(f"stop is {params.stop!r}; each stop string must be a text of at least one character")
    for name in ("bad_tokens", "allowed_tokens"):
        ids = getattr(params, name)
        is_absent = ids is None and name == "allowed_tokens"
        if not is_absent and not (isinstance(ids, tuple) and all(map(_is_whole, ids))):
            raise OptionError(f"{name} is {ids!r:.80}; it must be a list of token ids, which are whole numbers")
    if params.allowed_tokens is not None and not set(params.allowed_tokens) - set(params.bad_tokens):
        raise OptionError(
            f"allowed_tokens is {params.allowed_tokens!r:.80} and leaves no token to choose from; allow at least one "
            "that is not in bad_tokens"
        )
    if params.logprobs is not None and not (_is_whole(params.logprobs) and 0 <= params.logprobs <= 100):
        raise OptionError(f"logprobs is {params.logprobs!r}; it must be from 0 to 100, or None for none")
    if not isinstance(params.logit_bias, Mapping):
        raise OptionError(f"logit_bias is {params.logit_bias!r:.80}; it must map token ids to numbers")
    for token, bias in params.logit_bias.items():
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        if not _is_whole(token) or not is_number or not -1e4 <= bias <= 1e4:
            raise OptionError(f"logit_bias has {token!r}: {bias!r}; it maps token ids to numbers from -10000 to 10000")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class Constraint(Protocol):
    """Which tokens a grammar lets through: a function of the output so far, whoever asks and in whatever order."""

    def allowed(self, output: Seq[int], draft: Draft) -> torch.Tensor:
        """[n + 1, vocab] bool: row 0 after ``output``, row i + 1 after node i; all True where no token can stand."""
        ...


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens. The only owner of tokens; ``engine.commit`` is their only writer."""

    id: str
    tokens: list[int]  # prompt, then output
    num_prompt_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    choice: int = 0  # which of several choices of one request; part of the noise key
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    eos_tokens: frozenset[int] = frozenset()
    prompt: Prompt | None = None  # as it was given: a drafter with another tokenizer reads it in its own way
    constraint: Constraint | None = None  # of the sampling parameters' grammar
    drafter: str | None = None  # which of the engine's drafters may guess for it; None: any
    num_speculative_tokens: int | None = None  # its own longest draft; None: the engine's
    seed: int = field(init=False)  # the user's, or one drawn here: coupled sampling needs one
    rng: random.Random = field(init=False)  # for rejection and block verification: every number is used once

    def __post_init__(self) -> None:
        given = self.sampling.seed
        self.seed = random.SystemRandom().getrandbits(63) if given is None else given
        self.rng = random.Random(f"{self.seed}/{self.choice}")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def output(self) -> list[int]:
        return self.tokens[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclass(frozen=True, slots=True)
class Draft:
    """A guess: a tree of tokens below the last committed token. A chain has parents [-1, 0, 1, ...].

    ``probs[i]`` ([vocab], float32) is the distribution that node i was really drawn from, given its earlier
    siblings; None means deterministic (q is one-hot).
    """

    tokens: list[int]  # [n]
    parents: list[int]  # [n], parents[i] < i
    probs: torch.Tensor | None = None  # [n, vocab]
    drafter: str = "none"
    confidences: list[float] | None = None  # [n], 0 to 1: how sure the drafter is, before it knows what it draws

    @classmethod
    def chain(
        cls,
        tokens: Seq[int],
        *,
        probs: torch.Tensor | None = None,
        drafter: str = "none",
        confidences: list[float] | None = None,
    ) -> Draft:
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), probs, drafter, confidences)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))


EMPTY = Draft([], [])
READING = Draft([], [], drafter="reading")  # no draft yet: the text is being read, which says nothing of guesses


def check_positions(seq: Sequence, draft: Draft, *, limit: int) -> None:
    """Raise PromptError where a sequence and its draft exceed a model's ``limit`` positions."""
    if len(seq) + len(draft) > limit:
        raise PromptError(
            f"{len(seq)} tokens and {len(draft)} draft tokens exceed the model's {limit} positions; "
            "shorten the prompt or ask for fewer tokens"
        )


@dataclass(frozen=True, slots=True)
class Score:
    """Row 0 follows the context, row i + 1 follows node i."""

    logits: torch.Tensor  # [n + 1, vocab] float32
    hidden: torch.Tensor | None = None  # [n + 1, d], what the output embedding read
    features: torch.Tensor | None = None  # [fed, layers * d], what went into some layers: every token fed, nodes last;
    # in the model's own dtype, since a whole prompt's may wait for a drafter to read them


@dataclass(frozen=True, slots=True)
class Verdict:
    """The accepted nodes, root to leaf, then one token of the target's own."""

    accepted: list[int]
    next_token: int
    is_bonus: bool  # the whole path was accepted; else ``next_token`` is the recovered token


TokenKind = Literal["accepted", "recovered", "bonus"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms of the target's own probabilities: before penalties, temperature and filters."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)  # likeliest first


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step emits for one request. ``pieces[i]`` is the text that became certain with ``tokens[i]``."""

    request_id: str
    tokens: list[int]
    pieces: list[str]
    kinds: list[TokenKind]
    finish_reason: FinishReason | None = None
    logprobs: list[TokenLogprob] | None = None
    draft: Draft = EMPTY  # what was guessed in this step, without its probabilities
    accepted: list[int] = field(default_factory=list)  # its nodes that were
    error: Exception | None = None  # what ended the request

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(slots=True)
class SpecStats:
    """Counts over draft rounds; steps without a draft do not count."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_reached_per_pos: list[int] = field(default_factory=list)  # drafted there, and all before it accepted
    num_steps: int = 0
    num_emitted_tokens: int = 0
    draft_lengths: dict[str, int] = field(default_factory=dict)  # steps by length of their draft
    no_draft: dict[str, int] = field(default_factory=dict)  # steps without a draft by reason

    def record_step(self, draft_length: int, reason: str) -> None:
        """Count a step; ``reason`` says why it had no draft, if it had none."""
        self.num_steps += 1
        self.draft_lengths[str(draft_length)] = self.draft_lengths.get(str(draft_length), 0) + 1
        if draft_length == 0:
            self.no_draft[reason] = self.no_draft.get(reason, 0) + 1

    def record(self, num_draft_tokens: int, num_accepted: int, *, height: int | None = None) -> None:
        """Count a draft; ``height`` is its longest path where it is a tree."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted
        _count(self.num_accepted_tokens_per_pos, [1] * num_accepted)
        longest = num_draft_tokens if height is None else height
        _count(self.num_reached_per_pos, [1] * min(num_accepted + 1, longest))

    def merge(self, other: SpecStats) -> None:
        """Add the counts of ``other`` to these."""
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_steps", "num_emitted_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for counts, more in ((self.draft_lengths, other.draft_lengths), (self.no_draft, other.no_draft)):
            for key, count in more.items():
                counts[key] = counts.get(key, 0) + count
        _count(self.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos)
        _count(self.num_reached_per_pos, other.num_reached_per_pos)

    @property
    def num_draftable_steps(self) -> int:
        """Steps that had room for a draft."""
        return self.num_steps - self.no_draft.get(FIRST_TOKEN, 0) - self.no_draft.get(LAST_TOKEN, 0)

    @property
    def acceptance_by_position(self) -> list[float]:
        """The rate of each position, over the drafts in which all before it were accepted.

        Empty where a server has told how many were accepted, and not how many drafts came so far.
        """
        accepted = self.num_accepted_tokens_per_pos
        if len(accepted) > len(self.num_reached_per_pos):
            return []
        accepted = accepted + [0] * (len(self.num_reached_per_pos) - len(accepted))
        return [hit / tried for hit, tried in zip(accepted, self.num_reached_per_pos, strict=True)]

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted tokens; 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted / drafts, the bonus or recovered token included; 1 when nothing was drafted."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


def _count(counts: list[int], more: Seq[int]) -> None:
    """Add ``more`` to ``counts``, position by position."""
    counts.extend([0] * (len(more) - len(counts)))
    for position, count in enumerate(more):
        counts[position] += count


@dataclass(slots=True)
class Timings:
    """Seconds on ``time.perf_counter``'s clock, and seconds spent per part of the steps this request ran in."""

    arrival: float
    started: float = 0.0  # when it was first worked on
    first_token: float = 0.0
    last_token: float = 0.0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, whose keys and values were there already
    draft: float = 0.0
    verify: float = 0.0  # the target's forwards
    sample: float = 0.0  # distributions, verdicts, text, cache bookkeeping

    @property
    def queued(self) -> float:
        return max(self.started - self.arrival, 0.0)  # 0 before it has started

    @property
    def ttft(self) -> float:
        return max(self.first_token - self.arrival, 0.0)  # 0 before there is one

    @property
    def tpot(self) -> float:
        """Seconds per output token after the first; 0 when there is only one."""
        return (self.last_token - self.first_token) / max(self.num_output_tokens - 1, 1)

    @property
    def total(self) -> float:
        return max(self.last_token - self.arrival, 0.0)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over the whole time, prefill included."""
        return self.num_output_tokens / self.total if self.total > 0 else 0.0


class StoppingRule(Protocol):
    """Whether one more guess is worth its cost; the controller's answer to a drafter that asks."""

    def worth(self, seq: Sequence, confidences: Seq[float | None]) -> bool:
        """Whether to draft a guess, given the confidences of those before it and, last, its own.

        None: not known yet. Lossless as long as the confidences are functions of the prefix, never of a token drawn
        and then left out.
        """
        ...

    def length(self, seq: Sequence, confidences: Seq[float], parents: Seq[int] | None = None) -> int:
        """How many of some guesses that are there already to draft, from the first on.

        Args:
            parents: of each guess in a tree, likeliest paths first; None for a chain.
        """
        ...


class Drafter(Protocol):
    """A way to guess. Subclass it, give it a name and write ``propose``; the rest has defaults.

    A drafter may ignore the sampling parameters: the output stays exact, only slower.
    """

    name: str = "drafter"
    needs_hidden: bool = False  # whether ``observe`` wants ``Score.hidden``
    feature_layers: Seq[int] = ()  # of the target, of which ``observe`` wants ``Score.features``
    rule: StoppingRule | None = None  # set by an engine that chooses the draft length; asking it is optional
    prefixes: Any = None  # a PrefixStore, set by an engine that keeps what finished sequences have read

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """A draft of at most ``budgets[i]`` nodes for each sequence; an empty draft is ordinary decoding."""
        ...

    def backlog(self, seq: Sequence) -> int:
        """Tokens that it would have to read before it can guess for ``seq``; 0 where that costs nothing."""
        return 0

    def expect(self, num_rows: int, piece: int | None) -> None:
        """Hear before a step how many sequences run, and how many tokens of one may be read so as to stall no other.

        Args:
            piece: None for any number.
        """
        return

    def resumable(self, tokens: Seq[int]) -> int:
        """How many of a new sequence's first tokens the target may skip, so that the drafter still sees what it needs.

        Only a drafter that reads the target's features needs any.
        """
        return len(tokens)

    def predict(self, seq_id: str, tokens: Seq[int]) -> None:
        """Hear what a request's output is expected to be close to; a drafter may ignore it."""
        return

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], scores: Seq[Score]) -> None:
        """See what became of the drafts; ``seq.tokens`` already holds the committed tokens."""
        return

    def forget(self, seq: Sequence) -> None:
        """Drop all state of a finished sequence; an unknown one is no error."""
        return


class Target(Protocol):
    """A model that scores. A draft model is a Target too."""

    vocab_size: int
    max_length: int  # positions
    eos_tokens: frozenset[int]
    supports_trees: bool
    has_hidden: bool
    forward_seconds: float  # total time inside forwards, for the time split

    def score(
        self, seqs: Seq[Sequence], drafts: Seq[Draft], *, hidden: bool = False, features: Seq[int] = ()
    ) -> list[Score]:
        """One forward over every unseen token and every draft node.

        Args:
            features: layers whose inputs are wanted; the number of layers stands for what the output embedding reads.
        """
        ...

    def keep(self, seq: Sequence, accepted: Seq[int]) -> None:
        """After ``score``: the cache holds the context and the accepted nodes, nothing else."""
        ...

    def rewind(self, seq: Sequence, length: int) -> None:
        """Forget all but the first ``length`` tokens; more than are held is no error."""
        ...

    def forget(self, seq: Sequence) -> None:
        """Free the sequence's row; an unknown one is no error."""
        ...

    # a sequence's cache in parts: long prompts are read in pieces, and prefixes are shared

    def cached_length(self, seq: Sequence) -> int:
        """Tokens of the sequence in the cache; 0 for an unknown one."""
        ...

    def read(self, seq: Sequence, count: int, *, features: Seq[int] = ()) -> None:
        """Take the next ``count`` unseen tokens into the cache; at least one has to be left for ``score``.

        Their features are part of the next score's.
        """
        ...

    def save(self, seq: Sequence, length: int) -> tuple[Any, int]:
        """A copy of the keys and values of the first ``length`` tokens, and its size in bytes."""
        ...

    def restore(self, seq: Sequence, state: Any, length: int) -> None:
        """Begin an unknown sequence with the first ``length`` tokens of a saved state."""
        ...


class Engine(Protocol):
    """What the CLI, the server and the benchmark talk to."""

    def add(self, prompt: Prompt, sampling: SamplingParams | None = None) -> str: ...

    def step(self) -> list[Chunk]: ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> SpecStats: ...
