"""How a draft tree grows: which guesses follow a node, which nodes are looked at next, which are drafted.

A drafter hands in logits for the nodes it was asked about; where they come from it does not matter here. At each depth
the likeliest few nodes are followed, each by its likeliest few guesses, and the best of all are drafted, so that a
chain is a tree of width 1.

Lossless: guesses that are the likeliest of the prefix's own distribution may be kept or dropped as one likes, since
nothing was drawn. Guesses that are drawn (siblings without replacement) grow in a shape that was fixed before.

Source: growing by cumulative probability is EAGLE-2's rule (Li et al. 2024, arXiv 2406.16858); guesses that share the
target's noise are the top k of log q + g (see ``sampling.coupled_token``).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from flashspec.core import EMPTY, ROOT, Draft, Sequence, StoppingRule
from flashspec.errors import ModelError, OptionError
from flashspec.sampling import adjust, changes_logits, draw, exponential_noise, filtered
from flashspec.tree import best_first, children

logger = logging.getLogger("flashspec")

Siblings = Literal["auto", "top", "drawn"]
WIDEST = 16  # guesses after a node
WIDTH = 3  # unless asked otherwise
SHAPE = ((0.6, 0.15, 0.08, 0.05), 0.9)  # chances by rank that fix the shape of a drawn tree, and what a level keeps


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a drafter can guess: of the target's ``size`` ids those of ``tokens`` [N], or all."""

    size: int
    tokens: Tensor | None = None

    def spread(self, logits: Tensor) -> Tensor:
        """Logits [m, N] over all of the target's ids, [m, size]; impossible where there is no guess."""
        if self.tokens is None:
            return logits
        wide = logits.new_full((len(logits), self.size), -torch.inf)
        wide[:, self.tokens] = logits
        return wide


@dataclass(frozen=True, slots=True)
class Guess:
    """A token that may follow a node."""

    token: int
    confidence: float  # that it does, were the drafter right
    probs: Tensor | None = None  # [size], where it was drawn: its distribution given the siblings before it


def guesses(
    logits: Tensor, vocabulary: Vocabulary, seq: Sequence, above: Seq[Seq[int]], count: int, *, is_drawn: bool
) -> list[list[Guess]]:
    """At most ``count`` guesses after each row, likeliest first, by the request's own sampling parameters.

    Args:
        logits: [m, N] float32.
        above: for each row, the drafted tokens it follows.
        is_drawn: draw siblings without replacement; else, take the likeliest ones.
    """
    tokens = vocabulary.tokens
    if changes_logits(seq.sampling):
        wide = vocabulary.spread(logits)
        rows = [adjust(row[None], _extended(seq, path), EMPTY) for row, path in zip(wide, above, strict=True)]
        logits, tokens = torch.cat(rows), None
    if seq.sampling.is_greedy:
        return _likeliest(torch.softmax(logits, -1), tokens, count)
    q = filtered(logits, seq.sampling)
    ids = q.ids if tokens is None or q.ids is None else tokens[q.ids]
    ids = tokens if q.ids is None else ids
    if seq.sampling.verification_rule == "coupled":
        return _coupled(q.probs, ids, seq, [len(seq) + len(path) for path in above], count)
    if is_drawn:
        wide_ids = ids if ids is None or ids.dim() == 2 else ids.expand(len(logits), -1)
        return [
            _drawn(probs, None if wide_ids is None else wide_ids[row], vocabulary.size, seq, count)
            for row, probs in enumerate(q.probs)
        ]
    return _likeliest(q.probs, ids, count)


def _extended(seq: Sequence, path: Seq[int]) -> Sequence:
    """The sequence with some drafted tokens behind it: what penalties and bans look at."""
    copy = Sequence(seq.id, [*seq.tokens, *path], seq.num_prompt_tokens, seq.sampling, seq.choice)
    copy.eos_tokens, copy.constraint = seq.eos_tokens, seq.constraint
    return copy


def _likeliest(probs: Tensor, ids: Tensor | None, count: int) -> list[list[Guess]]:
    """Of probs [m, support], with ids [support] or [m, support]."""
    values, places = probs.topk(min(count, probs.shape[1]))
    found = places if ids is None else ids[places] if ids.dim() == 1 else ids.gather(1, places)
    rows = zip(found.tolist(), values.tolist(), strict=True)
    return [
        [Guess(token, value) for token, value in zip(tokens, chances, strict=True) if value > 0]
        for tokens, chances in rows
    ]


def _coupled(probs: Tensor, ids: Tensor | None, seq: Sequence, positions: Seq[int], count: int) -> list[list[Guess]]:
    """The top of log q + g, as q / exponential noise; how far ahead one is of the others is how sure it is."""
    tokens = torch.arange(probs.shape[1], device=probs.device) if ids is None else ids
    noises: dict[int, Tensor] = {}  # rows of one depth stand at one position, and mostly choose from the same tokens
    found = []
    for row, position in enumerate(positions):
        mine = tokens if tokens.dim() == 1 else tokens[row]
        if tokens.dim() == 2 or position not in noises:
            noises[position] = exponential_noise(seq.seed, seq.choice, position, mine)
        # squared: the target's probabilities differ by less than the noise does, so that the first is mostly its choice
        keyed = (probs[row] / noises[position]) ** 2
        found += _likeliest((keyed / keyed.sum())[None], mine, count)
    return found


def _drawn(probs: Tensor, ids: Tensor | None, size: int, seq: Sequence, count: int) -> list[Guess]:
    """Siblings without replacement from probs [support]. Their confidences are known before they are drawn."""
    found: list[Guess] = []
    left, rest = probs, 1.0
    for _ in range(count):
        total = left.sum()
        if float(total) <= 0:
            break
        left = left / total
        sureness = float(left.max()) * rest
        rest = max(rest - sureness, 0.0)
        token = draw(left, None, seq.rng.random())
        wide = left if ids is None else left.new_zeros(size).scatter_add_(0, ids, left)
        found.append(Guess(token if ids is None else int(ids[token]), sureness, wide))
        left = left.clone()
        left[token] = 0
    return found


@dataclass(slots=True)
class Growth:
    """One sequence's tree while it grows.

    Args:
        budget: nodes drafted at most.
        width: nodes followed at each depth, and guesses after each of them.
        is_drawn: draw guesses where the sampling parameters leave something to chance; width then says how many
            siblings the fixed shape may have.
        most_deep: nodes on a path at most.
    """

    seq: Sequence
    budget: int
    vocabulary: Vocabulary
    width: int = 1
    is_drawn: bool = False
    most_deep: int = sys.maxsize
    rule: StoppingRule | None = None
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)  # of the whole path
    frontier: list[int] = field(default_factory=lambda: [ROOT])  # nodes whose guesses are wanted next
    followed: list[int] = field(default_factory=list)  # nodes whose guesses were or are wanted, in that order
    _probs: list[Tensor] = field(default_factory=list)
    _shape: dict[int, list[int]] | None = None
    _places: dict[int, int] = field(default_factory=lambda: {ROOT: ROOT})  # node -> its place in the shape

    def __post_init__(self) -> None:
        rule = self.seq.sampling.verification_rule
        self.is_drawn = self.is_drawn and not self.seq.sampling.is_greedy and rule != "coupled"
        if self.is_drawn:
            ranks, kept = SHAPE
            depths = range(min(self.budget, self.most_deep))
            levels = [[chance * kept**depth for chance in ranks[: self.width]] for depth in depths]
            self._shape = children(best_first(levels, self.budget)[0])

    def path(self, node: int) -> list[int]:
        """Nodes from the root to this one; none for ROOT."""
        found: list[int] = []
        while node != ROOT:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def expand(self, logits: Tensor) -> None:
        """Logits [frontier, N] of the nodes asked about; then there is a new frontier, empty at the end."""
        above = [[self.tokens[node] for node in self.path(node)] for node in self.frontier]
        new: list[int] = []
        count = self.width
        if self._shape is not None:
            count = max(len(self._shape.get(self._places[node], ())) for node in self.frontier)
        try:
            found = guesses(logits, self.vocabulary, self.seq, above, count, is_drawn=self.is_drawn)
        except ModelError as error:  # nothing it may guess is possible: the drafter's trouble, not the request's
            logger.info("no guess is possible here, so no more is drafted: %s", error)
            found = [[] for _ in self.frontier]
        for node, row in zip(self.frontier, found, strict=True):
            places = self._shape.get(self._places[node], []) if self._shape is not None else range(len(row))
            for guess, place in zip(row, places, strict=False):
                new.append(self._add(node, guess, place))
        self.frontier = self._worth_following(new)
        self.followed += self.frontier

    def asked(self) -> Draft:
        """The followed nodes as a tree of their own; the frontier's come last."""
        place = {node: i for i, node in enumerate(self.followed)} | {ROOT: ROOT}
        return Draft(
            [self.tokens[node] for node in self.followed], [place[self.parents[node]] for node in self.followed]
        )

    def draft(self, name: str) -> Draft:
        """The best nodes, likeliest path first; a drawn tree as it is."""
        order = list(range(len(self.tokens)))
        if not self.is_drawn:
            order = sorted(order, key=lambda node: -self.chances[node])[: self.budget]  # stable: parents come first
        place = {node: i for i, node in enumerate(order)} | {ROOT: ROOT}
        parents = [place[self.parents[node]] for node in order]
        confidences = [self.confidences[node] for node in order]
        count = len(order)
        # what was drawn has to stay: whether it looks good is no longer a function of the prefix
        if self.rule is not None and self.width > 1 and not self.is_drawn:
            count = self.rule.length(self.seq, confidences, parents)
        probs = torch.stack(self._probs[:count]) if self._probs and count else None
        tokens = [self.tokens[node] for node in order]
        return Draft(tokens[:count], parents[:count], probs, name, confidences[:count])

    def _add(self, parent: int, guess: Guess, place: int) -> int:
        node = len(self.tokens)
        self.tokens.append(guess.token)
        self.parents.append(parent)
        self.confidences.append(guess.confidence)
        self.chances.append(guess.confidence * (self.chances[parent] if parent != ROOT else 1.0))
        if guess.probs is not None:
            self._probs.append(guess.probs)
        self._places[node] = place
        return node

    def _worth_following(self, new: Seq[int]) -> list[int]:
        """Nodes of the newest depth that are worth a look at what follows."""
        live = [node for node in new if self.tokens[node] not in self.seq.eos_tokens]
        if self._shape is not None:
            live = [node for node in live if self._shape.get(self._places[node])]
        else:
            live = sorted(live, key=lambda node: -self.chances[node])[: self.width]
        if not live or len(self.path(live[0])) >= min(self.budget, self.most_deep):
            return []
        if self.rule is not None:
            best = self.path(live[0])
            if not self.rule.worth(self.seq, [*(self.confidences[node] for node in best), None]):
                return []
        return live


def shape_for(seq: Sequence, width: int | None, siblings: Siblings) -> tuple[int, bool]:
    """The width of a sequence's tree, and whether its guesses are drawn.

    Where the width is left open, what was measured to pay with the same number of nodes: a tree of the likeliest
    guesses where the target's choice is no matter of chance, or of chance that is shared; else a chain that is drawn.
    """
    is_sure = seq.sampling.is_greedy or seq.sampling.verification_rule == "coupled"
    if width is None:
        width = WIDTH if is_sure or siblings == "top" else 1
    return width, siblings == "drawn" or (siblings == "auto" and width == 1)


def checked_width(width: int | None) -> int | None:
    """Raise OptionError for a width out of range; None leaves it open."""
    if width is None:
        return None
    if type(width) is not int or not 1 <= width <= WIDEST:
        raise OptionError(f"width is {width!r}; a whole number from 1 (a chain) to {WIDEST}")
    return width
