"""A text's suffixes with how often and where last they occurred, kept while the text grows; and what follows them.

Sources: the automaton is Blumer et al. 1985; frequencies as probabilities and their sum as a score are SuffixDecoding's
(Oliaro et al. 2024, arXiv 2411.04975).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence as Seq
from functools import lru_cache
from itertools import count as counter
from typing import NamedTuple

from flashspec.core import ROOT as NO_PARENT, Draft

ROOT = 0  # the state of the empty string; nothing leads to it, so as a child it means "none"
SEPARATOR = -1  # stands before, between and behind outputs; matched at their beginning, never drafted
NO_LABEL = -2  # the root's
MOST_LINKS = 24  # states that count one token; code has under ten, a loop as many as it has rounds
MOST_CANDIDATES = 4  # match lengths that are tried in each text
MOST_BRANCHES = 8  # children of one node of a tree
MIN_CHANCE = 0.1  # that all guesses up to here are accepted; a guess less likely is not drafted
DOUBT = 0.5  # occurrences of something else, imagined beside those seen; a longer match leaves less of it
SINGLE = 0.7  # of the confidence, where only one token agrees: that says less than the rest of the formula has it
MARGIN = 0.05  # a gain not worth the search
MANY = 1_000_000

Cursor = tuple[int, int]  # state of a matched string, and the string's length in tokens


def confidence(match_length: int, count: int, total: int) -> float:
    """The chance that what followed the last ``match_length`` tokens ``count`` times out of ``total`` follows again.

    Few occurrences and a short match mean little, so both are shrunk; near to what a 1.5B model did on seven tasks
    (docs/log.md). A controller learns the rest while running. It must not fall as ``match_length`` grows, nor
    as both counts do: ``most`` relies on that. In a long loop, where counts are lower bounds, count may exceed total.
    """
    seen = total if total > count else count
    sure = count / (seen + DOUBT / match_length) * match_length / (match_length + 1)
    return sure if match_length > 1 else SINGLE * sure


@lru_cache(maxsize=4096)
def most(match_length: int, budget: int) -> float:
    """The score that a match of this length cannot exceed, however often it occurred: a walk to be spared, perhaps."""
    score, chance = 0.0, 1.0
    for i in range(budget):
        chance *= confidence(match_length + i, MANY, MANY)
        score += chance
    return score


def rounded_up(match_length: int) -> int:
    """Few different values for long matches, so that the cache of ``most`` serves a loop that grows."""
    return match_length if match_length < 64 else 1 << match_length.bit_length()


class Guess(NamedTuple):
    """A chain of guesses."""

    score: float  # expected number of accepted tokens
    tokens: list[int]
    confidences: list[float]  # of each, given those before it


NO_GUESS = Guess(0.0, [], [])


class SuffixAutomaton:
    """Every substring of a text that grows, with how often and where last it occurred. O(1) a token, amortised.

    A state stands for the substrings that end at the same positions. Counts and latest ends are exact while a text's
    end has under ``MOST_LINKS`` different sets of end positions; past that (a long loop) the shortest substrings are
    not brought up to date, and their counts are lower bounds.

    Most states have one transition, so the first is kept in a list and only further ones cost a dict.
    """

    def __init__(self, tokens: Seq[int] = ()) -> None:
        self.tokens: list[int] = []
        self.last = ROOT  # the state of the whole text
        # by state
        self.link = [ROOT]  # the longest suffix that has more end positions
        self.length = [0]  # of its longest string
        self.count = [0]  # end positions
        self.latest = [0]  # the last of them: how many tokens of the text end with it
        self.label = [NO_LABEL]  # the token that its strings end with
        self.total = [0]  # occurrences that something follows
        self.heaviest = [ROOT]  # the child that most often follows, the latest of equals
        self.first = [ROOT]
        self.more: list[dict[int, int] | None] = [None]
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Seq[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.tokens.append(token)
            new = self._add_state(token, len(self.tokens))
            self._connect(new, token)
            self._record(token)
            self.last = new

    def child(self, state: int, token: int) -> int:
        """The state one token on; ROOT if the text has no such substring."""
        only = self.first[state]
        if self.label[only] == token:
            return only
        more = self.more[state]
        return ROOT if more is None else more.get(token, ROOT)

    def children(self, state: int) -> list[int]:
        """All that may be drafted, heaviest first, the latest of equals first."""
        found = [self.first[state], *(self.more[state] or {}).values()]
        drafted = (child for child in found if self.label[child] >= 0)
        return sorted(drafted, key=lambda child: (self.count[child], self.latest[child]), reverse=True)

    def _add_state(self, label: int, length: int, like: int = ROOT) -> int:
        self.label.append(label)
        self.length.append(length)
        is_copy = like != ROOT
        for values in (self.link, self.count, self.latest, self.total, self.heaviest, self.first):
            values.append(values[like] if is_copy else 0)
        more = self.more[like] if is_copy else None
        self.more.append(more.copy() if more else None)
        return len(self.label) - 1

    def _connect(self, new: int, token: int) -> None:
        """Transitions to the new state from every suffix that was never followed by its token."""
        at = self.last
        while not (child := self.child(at, token)):
            if not self.first[at]:
                self.first[at] = new
            elif (more := self.more[at]) is None:
                self.more[at] = {token: new}
            else:
                more[token] = new
            if at == ROOT:
                return
            at = self.link[at]
        self.link[new] = child if self.length[child] == self.length[at] + 1 else self._split(at, token, child)

    def _split(self, at: int, token: int, child: int) -> int:
        """The shorter strings of ``child`` have just occurred without the longer ones: a state of their own."""
        clone = self._add_state(token, self.length[at] + 1, like=child)
        self.link[child] = clone
        while self.child(at, token) == child:
            if self.first[at] == child:
                self.first[at] = clone
            else:
                self.more[at][token] = clone  # type: ignore[index]
            if self.heaviest[at] == child:
                self.heaviest[at] = clone
            if at == ROOT:
                break
            at = self.link[at]
        return clone

    def _record(self, token: int) -> None:
        """Count the token after each suffix of the text before it, and each suffix of the text that it ends."""
        count, heaviest, end = self.count, self.heaviest, len(self.tokens)
        at, counted = self.last, ROOT
        for _ in range(MOST_LINKS):
            child = self.child(at, token)
            if child != counted:  # strings with the same end positions follow one another
                count[child] += 1
                self.latest[child] = end
                counted = child
            self.total[at] += 1
            if count[child] >= count[heaviest[at]] and token != SEPARATOR:
                heaviest[at] = child
            if at == ROOT:
                return
            at = self.link[at]

    # matching

    def repeated(self) -> Cursor:
        """The longest end of the text that occurred before; of length 0 if none did."""
        state = self.link[self.last]
        return state, self.length[state]

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        """The longest end of another text that is a substring of this one, after one more token of that other text.

        A cursor may be older than the last ``extend``: it stays valid, though what has become possible by it is only
        found as more tokens come.
        """
        state, length = self.settle(cursor)
        while not (child := self.child(state, token)):
            if state == ROOT:
                return ROOT, 0
            state = self.link[state]
            length = self.length[state]
        return child, length + 1

    def settle(self, cursor: Cursor) -> Cursor:
        """The cursor after an ``extend`` that may have split its state."""
        state, length = cursor
        while state and length <= self.length[self.link[state]]:
            state = self.link[state]
        return state, length

    def matches(self, cursor: Cursor, min_match: int) -> Iterator[Cursor]:
        """The cursor's string and its ends that occur elsewhere too, none under ``min_match`` (at least 1) tokens."""
        state, length = self.settle(cursor)
        for _ in range(MOST_CANDIDATES):
            if length < min_match:
                return
            yield state, length
            state = self.link[state]
            length = self.length[state]

    # drafting

    def onward(self, cursor: Cursor) -> Cursor:
        """At the end of the text, where nothing follows: what its end repeats, so that a loop goes on."""
        return self.repeated() if cursor[0] == self.last else cursor

    def walk(self, match: Cursor, budget: int, eos_tokens: frozenset[int]) -> Guess:
        """The most frequent continuation, token by token, while it is likely enough to be reached."""
        heaviest, count, total, label = self.heaviest, self.count, self.total, self.label
        state, length = match
        tokens: list[int] = []
        confidences: list[float] = []
        score, chance = 0.0, 1.0
        for _ in range(budget):
            if not (child := heaviest[state]):
                if state != self.last or not (state := self.link[state]):
                    break
                child, length = heaviest[state], self.length[state]
            sure = confidence(length, count[child], total[state])
            chance *= sure
            if chance < MIN_CHANCE:
                break
            score += chance
            tokens.append(label[child])
            confidences.append(sure)
            if label[child] in eos_tokens:  # nothing can follow, so nothing behind it may count
                break
            state, length = child, length + 1
        return Guess(score, tokens, confidences)


class _Node(NamedTuple):
    """A node that a tree may get next; the likeliest compares smallest."""

    rank: float  # minus the chance that it and all above it are accepted
    order: int
    parent: int
    cursor: Cursor  # after its token
    path: tuple[float, ...]  # confidences from the root down to it


def grow(
    text: SuffixAutomaton,
    match: Cursor,
    budget: int,
    eos_tokens: frozenset[int],
    is_worth: Callable[[Seq[float]], bool],
    *,
    drafter: str,
) -> Draft:
    """The likeliest ``budget`` nodes below a match, best first.

    Args:
        is_worth: whether a node is to be drafted, from the confidences of its own path; what is below goes with it.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidences: list[float] = []
    order = counter()
    heap = list(_branches(text, match, NO_PARENT, (), 1.0, order))
    while heap and len(tokens) < budget:
        node = heapq.heappop(heap)
        if not is_worth(node.path):
            continue
        tokens.append(text.label[node.cursor[0]])
        parents.append(node.parent)
        confidences.append(node.path[-1])
        if tokens[-1] not in eos_tokens:
            for branch in _branches(text, node.cursor, len(tokens) - 1, node.path, -node.rank, order):
                heapq.heappush(heap, branch)
    return Draft(tokens, parents, drafter=drafter, confidences=confidences)


def _branches(
    text: SuffixAutomaton, at: Cursor, parent: int, path: tuple[float, ...], chance: float, order: Iterator[int]
) -> Iterator[_Node]:
    state, length = text.onward(at)
    for child in text.children(state)[:MOST_BRANCHES]:
        sure = confidence(length, text.count[child], text.total[state])
        if chance * sure >= MIN_CHANCE:
            yield _Node(-chance * sure, next(order), parent, (child, length + 1), (*path, sure))
