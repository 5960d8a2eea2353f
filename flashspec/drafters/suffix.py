"""Suffix drafting: what most often followed the longest repeated end of the text is likely to follow it again.

Three texts are searched: the request's own, a predicted output if one was handed in, and past outputs of the same
namespace if there is one. The candidate with the most expected accepted tokens is drafted.

Source: drafting from an automaton is SAM-Decoding's idea (Hu et al. 2024, arXiv 2411.10666).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, field

from flashspec.core import Draft, Drafter, Sequence
from flashspec.drafters.automaton import (
    MARGIN,
    NO_GUESS,
    ROOT,
    SEPARATOR,
    Cursor,
    SuffixAutomaton,
    grow,
    most,
    rounded_up,
)
from flashspec.errors import OptionError

LONGEST_MIN_MATCH = 64
FEWEST_TOKENS = 16  # that a store may be told to hold


@dataclass(slots=True)
class _Store:
    """A namespace's outputs. An automaton cannot forget its beginning, so the older half is one to be dropped whole."""

    new: SuffixAutomaton = field(default_factory=lambda: SuffixAutomaton([SEPARATOR]))
    old: SuffixAutomaton | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.new) + (len(self.old) if self.old is not None else 0)


class PastOutputs:
    """Outputs of finished requests, by namespace; nothing crosses from one namespace to another.

    It holds output tokens only, never a prompt's. Within a namespace the oldest outputs go first, and of the
    namespaces the one that was not used for longest. One store may serve several drafters. Not thread-safe.

    Args:
        max_tokens: held in all namespaces together, separators included; of one output, at most half as many. About
            300 bytes of memory each.

    Raises:
        OptionError: ``max_tokens`` out of range.
    """

    def __init__(self, *, max_tokens: int = 100_000) -> None:
        if type(max_tokens) is not int or max_tokens < FEWEST_TOKENS:
            raise OptionError(f"max_tokens is {max_tokens!r}; a whole number of at least {FEWEST_TOKENS}")
        self.max_tokens = max_tokens
        self._stores: dict[str, _Store] = {}  # the least recently used first

    @property
    def num_tokens(self) -> int:
        """Tokens held, separators included."""
        return sum(store.num_tokens for store in self._stores.values())

    def add(self, namespace: str, tokens: Seq[int]) -> None:
        """Store an output, and drop what no longer fits. An empty one is no output."""
        half = self.max_tokens // 2
        output = [*tokens[: half - 2], SEPARATOR]
        if len(output) == 1:
            return
        store = self._stores.pop(namespace, None) or _Store()
        if len(store.new) + len(output) > half:
            store.old, store.new = store.new, SuffixAutomaton([SEPARATOR])
        store.new.extend(output)
        self._stores[namespace] = store
        self._evict()

    def texts(self, namespace: str) -> list[SuffixAutomaton]:
        """What is held for a namespace, newer outputs first. Asking for it is using it."""
        store = self._stores.pop(namespace, None)
        if store is None:
            return []
        self._stores[namespace] = store
        return [store.new] if store.old is None else [store.new, store.old]

    def _evict(self) -> None:
        """One namespace alone always fits: each of its halves has at most half of the tokens."""
        held = self.num_tokens
        while held > self.max_tokens:
            name, store = next(iter(self._stores.items()))
            held -= len(store.new if store.old is None else store.old)
            if store.old is None:
                del self._stores[name]
            store.old = None


@dataclass(slots=True)
class _Reader:
    """A request's output, matched against a text of outputs as it grows."""

    text: SuffixAutomaton
    cursor: Cursor
    num_read: int = 0

    @classmethod
    def at_start(cls, text: SuffixAutomaton) -> _Reader:
        """Behind a separator: an output that begins as another did is matched from its first token."""
        return cls(text, text.advance((ROOT, 0), SEPARATOR))

    def read(self, seq: Sequence) -> None:
        for token in seq.tokens[seq.num_prompt_tokens + self.num_read :]:
            self.cursor = self.text.advance(self.cursor, token)
            self.num_read += 1

    def min_match(self, min_match: int) -> int:
        """An output that has not left the text since its beginning may follow it however short it is."""
        return 1 if self.cursor[1] > self.num_read else min_match


@dataclass(slots=True)
class _Request:
    """What is known of one running request."""

    seq: Sequence
    namespace: str | None
    predicted: _Reader | None
    text: SuffixAutomaton = field(default_factory=SuffixAutomaton)  # prompt and output
    past: list[_Reader] = field(default_factory=list)

    def is_of(self, seq: Sequence) -> bool:
        """Whether the sequence is this one, only longer; another may have been given the same id."""
        known = self.text.tokens
        return self.seq is seq and seq.tokens[len(known) - 1 : len(known)] == known[-1:]

    def read(self, past: list[SuffixAutomaton]) -> None:
        """Catch up with the sequence in every text."""
        self.text.extend(self.seq.tokens[len(self.text) :])
        if [reader.text for reader in self.past] != past:
            known = {id(reader.text): reader for reader in self.past}
            self.past = [known.get(id(text)) or _Reader.at_start(text) for text in past]
        for reader in self.others():
            reader.read(self.seq)

    def others(self) -> list[_Reader]:
        return self.past if self.predicted is None else [self.predicted, *self.past]

    def candidates(self, min_match: int) -> Iterator[tuple[SuffixAutomaton, Cursor]]:
        """Text and match, in the order in which the first of equals is taken."""
        for match in self.text.matches(self.text.repeated(), min_match):
            yield self.text, match
        for reader in self.others():
            for match in reader.text.matches(reader.cursor, reader.min_match(min_match)):
                yield reader.text, match


class SuffixDrafter(Drafter):
    """The likeliest continuation found in the request's text, its predicted output and its namespace's past outputs.

    Args:
        min_match: tokens that have to agree, 1 to 64.
        past_outputs: where finished outputs are kept; one of its own if there is a namespace and no store.
        namespace: whose outputs a request may see and adds to: one for all, or by request. None: nothing is stored.
        predicted: token ids that a request's output is expected to be close to, or None; see ``predict``.
        tree: draft a tree in place of a chain.

    Raises:
        OptionError: a value out of range, or a namespace that is not a text.
    """

    name = "suffix"

    def __init__(
        self,
        *,
        min_match: int = 1,
        past_outputs: PastOutputs | None = None,
        namespace: str | Callable[[Sequence], str | None] | None = None,
        predicted: Callable[[Sequence], Seq[int] | None] | None = None,
        tree: bool = False,
    ) -> None:
        if type(min_match) is not int or not 1 <= min_match <= LONGEST_MIN_MATCH:
            raise OptionError(f"min_match is {min_match!r}; a whole number from 1 to {LONGEST_MIN_MATCH}")
        self.min_match, self.tree = min_match, tree
        self.namespace = namespace if callable(namespace) else _checked_namespace(namespace)
        self.past_outputs = PastOutputs() if past_outputs is None and namespace is not None else past_outputs
        self.predicted = predicted
        self._predictions: dict[str, SuffixAutomaton] = {}
        self._requests: dict[str, _Request] = {}

    def predict(self, seq_id: str, tokens: Seq[int]) -> None:
        """Hand in what a request's output is expected to be close to, before it starts or while it runs.

        It takes the place of an earlier prediction and is kept until the request is forgotten.

        Raises:
            OptionError: something that is not a token id.
        """
        text = self._predictions[seq_id] = _text_of(tokens)
        if seq_id in self._requests:
            self._requests[seq_id].predicted = _Reader.at_start(text)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._draft(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def forget(self, seq: Sequence) -> None:
        """Drop a finished sequence's state; its output goes to its namespace, if it has one."""
        self._requests.pop(seq.id, None)
        self._predictions.pop(seq.id, None)
        if self.past_outputs is not None and (namespace := self._namespace_of(seq)) is not None:
            self.past_outputs.add(namespace, seq.output)

    def _draft(self, seq: Sequence, budget: int) -> Draft:
        request = self._request_of(seq)
        store, namespace = self.past_outputs, request.namespace
        request.read([] if store is None or namespace is None else store.texts(namespace))
        best, source = NO_GUESS, None
        for text, match in request.candidates(self.min_match):
            if best.score and most(rounded_up(match[1]), budget) <= best.score * (1 + MARGIN):
                continue
            guess = text.walk(match, budget, seq.eos_tokens)
            if guess.score > best.score:
                best, source = guess, (text, match)
        if source is not None and self.tree:
            return grow(*source, budget, seq.eos_tokens, lambda path: self._is_worth(seq, path), drafter=self.name)
        sure = best.confidences
        worth = len(sure) if self.rule is None else self.rule.length(seq, sure)
        return Draft.chain(best.tokens[:worth], drafter=self.name, confidences=sure[:worth])

    def _is_worth(self, seq: Sequence, confidences: Seq[float]) -> bool:
        return self.rule is None or self.rule.worth(seq, confidences)

    def _request_of(self, seq: Sequence) -> _Request:
        request = self._requests.get(seq.id)
        if request is None or not request.is_of(seq):
            text = self._predictions.get(seq.id)
            if text is None and self.predicted is not None and (tokens := self.predicted(seq)) is not None:
                text = _text_of(tokens)
            reader = None if text is None else _Reader.at_start(text)
            request = self._requests[seq.id] = _Request(seq, self._namespace_of(seq), reader)
        return request

    def _namespace_of(self, seq: Sequence) -> str | None:
        return _checked_namespace(self.namespace(seq)) if callable(self.namespace) else self.namespace


def _checked_namespace(namespace: object) -> str | None:
    if namespace is not None and (not isinstance(namespace, str) or not namespace):
        raise OptionError(f"namespace is {namespace!r:.80}; it must be a text of at least one character, or None")
    return namespace


def _text_of(predicted: Seq[int]) -> SuffixAutomaton:
    bad = next((token for token in predicted if type(token) is not int or token < 0), None)
    if bad is not None:
        raise OptionError(f"a predicted output has {bad!r:.80}; give the token ids, whole numbers from 0")
    return SuffixAutomaton([SEPARATOR, *predicted, SEPARATOR])
