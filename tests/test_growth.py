"""Guesses and trees against plain references, and the law of the output by every way in which chance can fall."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence as Seq
from functools import cache
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from conftest import ToyTarget, chi_square, dense_p, sequence
from torch import Tensor

from flashspec import verify as verifying
from flashspec.core import ROOT, Draft, SamplingParams, Sequence
from flashspec.drafters import growth as growing
from flashspec.drafters.growth import SHAPE, Growth, Guess, Vocabulary, guesses, shape_for
from flashspec.sampling import distribution, exponential_noise
from flashspec.tree import best_chain, best_first, paths
from flashspec.verify import verify

T = TypeVar("T")
Path = tuple[int, ...]  # drafted tokens from the root on
Rows = Callable[[Path], Tensor]  # what a drafter says after a path, [N]

SIZE, EOS = 9, 6
FEW = torch.tensor([0, 2, 3, 4, 6, 8])  # a draft vocabulary
PROMPT, OUTPUT = [1, 2, 2], [4, 4, 7]
ABOVE: list[Path] = [(), (4,), (7, 3), (3, 3, 1)]
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "all cuts": {"temperature": 1.2, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    "repetition": {"repetition_penalty": 1.8},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.9},
    "bias": {"logit_bias": {2: 3.0, 8: -4.0, 1: 2.0}},
    "bans": {"bad_tokens": (0, 3), "allowed_tokens": (0, 1, 2, 4, 6)},
    "min_tokens": {"min_tokens": 5, "logit_bias": {EOS: 9.0}},
    "penalties and cuts": {"top_k": 5, "top_p": 0.95, "repetition_penalty": 1.5, "frequency_penalty": 0.6},
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top": {"verification": "rejection"},
    "coupled": {"seed": 11},
}


def text(kind: str, mode: str, **options: Any) -> Sequence:
    params = SamplingParams(**{"temperature": 1.0, **PARAMS[kind], **MODES[mode], **options})
    seq = sequence([*PROMPT, *OUTPUT], params, num_prompt_tokens=len(PROMPT), eos=[EOS])
    seq.rng = random.Random(0)
    return seq


def some_logits(count: int, size: int = SIZE) -> Tensor:
    return torch.from_numpy(np.random.default_rng(count).standard_normal((count, size)).astype(np.float32)) * 2


def spread(row: Tensor, tokens: Tensor | None, size: int = SIZE) -> np.ndarray:
    """Over all ids; those that cannot be guessed are impossible."""
    wide = np.full(size, -np.inf, np.float32)
    wide[slice(None) if tokens is None else tokens.numpy()] = row.numpy()
    return wide


def plain_q(row: np.ndarray, seq: Sequence, path: Path) -> np.ndarray:
    """What the parameters mean after a drafted path. Greedy guesses are as sure as their plain probability. [vocab]"""
    params, history = seq.sampling, [*seq.tokens, *path]
    if params.is_greedy:
        params = dataclasses.replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    return dense_p(row, params, history, history[seq.num_prompt_tokens :], sorted(seq.eos_tokens))


def plain_order(q: np.ndarray, seq: Sequence, position: int) -> list[int]:
    """Possible tokens, the first guess first."""
    score = q
    if seq.sampling.verification_rule == "coupled" and not seq.sampling.is_greedy:
        score = q / exponential_noise(seq.seed, seq.choice, position, torch.arange(len(q))).numpy()
    return [token for token in np.argsort(-score).tolist() if q[token] > 0]


# guesses


@pytest.mark.parametrize("tokens", [None, FEW], ids=["all", "few"])
@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("mode", MODES)
def test_guesses_are_the_likeliest_under_the_parameters_and_the_path(
    mode: str, kind: str, tokens: Tensor | None
) -> None:
    """Penalties, bans and noise see the drafted tokens above."""
    seq = text(kind, mode)
    logits = some_logits(len(ABOVE), SIZE if tokens is None else len(tokens))
    for count in (1, 3, SIZE + 1):
        found = guesses(logits, Vocabulary(SIZE, tokens), seq, ABOVE, count, is_drawn=False)
        for row, path, each in zip(logits, ABOVE, found, strict=True):
            q = plain_q(spread(row, tokens), seq, path)
            assert [guess.token for guess in each] == plain_order(q, seq, len(seq) + len(path))[:count]
            assert all(guess.probs is None for guess in each)
            sure = [guess.confidence for guess in each]
            if mode == "coupled":
                assert sure == sorted(sure, reverse=True)
                assert 0 < sure[-1] <= sum(sure) <= 1 + 1e-6
            else:
                assert sure == pytest.approx([q[guess.token] for guess in each], abs=1e-6)


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("mode", [*MODES, "drawn"])
def test_a_draft_vocabulary_is_the_whole_one_with_the_rest_impossible(mode: str, kind: str) -> None:
    narrow = some_logits(len(ABOVE), len(FEW))
    wide = torch.stack([torch.from_numpy(spread(row, FEW)) for row in narrow])

    def made(logits: Tensor, vocabulary: Vocabulary) -> list[list[Guess]]:
        seq = text(kind, "top" if mode == "drawn" else mode)
        seq.rng = random.Random(2)
        return guesses(logits, vocabulary, seq, ABOVE, 3, is_drawn=mode == "drawn")

    assert torch.equal(Vocabulary(SIZE, FEW).spread(narrow), wide)
    for few, all_ids in zip(made(narrow, Vocabulary(SIZE, FEW)), made(wide, Vocabulary(SIZE)), strict=True):
        assert [guess.token for guess in few] == [guess.token for guess in all_ids]
        for one, other in zip(few, all_ids, strict=True):
            assert one.confidence == pytest.approx(other.confidence, abs=1e-6)
            assert (one.probs is None) == (other.probs is None) == (mode != "drawn")
            if one.probs is not None and other.probs is not None:
                torch.testing.assert_close(one.probs, other.probs)


@pytest.mark.parametrize("tokens", [None, FEW], ids=["all", "few"])
@pytest.mark.parametrize("kind", PARAMS)
def test_a_drawn_sibling_says_what_it_was_drawn_from(kind: str, tokens: Tensor | None) -> None:
    """q without the siblings before it; where q is used up, there are no more."""
    seq, count = text(kind, "top"), 4
    logits = some_logits(len(ABOVE), SIZE if tokens is None else len(tokens))
    for seed in range(5):
        seq.rng = random.Random(seed)
        found = guesses(logits, Vocabulary(SIZE, tokens), seq, ABOVE, count, is_drawn=True)
        for row, path, each in zip(logits, ABOVE, found, strict=True):
            left = plain_q(spread(row, tokens), seq, path)
            assert len(each) == min(count, np.count_nonzero(left))
            assert each[0].confidence == pytest.approx(left.max(), abs=1e-6)
            for guess in each:
                assert guess.probs is not None
                np.testing.assert_allclose(guess.probs.numpy(), left / left.sum(), rtol=0, atol=1e-6)
                assert float(guess.probs.sum()) == pytest.approx(1, abs=1e-6)
                assert left[guess.token] > 0
                left[guess.token] = 0


def test_one_possible_token_is_drawn_once() -> None:
    (found,) = guesses(some_logits(1), Vocabulary(SIZE), text("plain", "top", top_k=1), [()], 3, is_drawn=True)
    assert [guess.token for guess in found] == [int(some_logits(1).argmax())]
    assert found[0].probs is not None
    assert found[0].probs[found[0].token] == 1


@pytest.mark.parametrize("kind", ["plain", "top_k"])
def test_siblings_are_drawn_in_turn_without_replacement(kind: str) -> None:
    """Pairs come as often as q(a) q(b) / (1 - q(a))."""
    seq, row = text(kind, "top"), some_logits(1)
    seq.rng = random.Random(5)
    q = plain_q(row[0].numpy(), seq, ())
    counts = np.zeros((SIZE, SIZE))
    for _ in range(1500):
        (pair,) = guesses(row, Vocabulary(SIZE), seq, [()], 2, is_drawn=True)
        counts[pair[0].token, pair[1].token] += 1
    p = np.outer(q, q) / (1 - q)[:, None]
    np.fill_diagonal(p, 0)
    likely = p.ravel() > 0.004  # Pearson's test wants a few expected counts a cell: the rare ones become one cell
    cells = [np.append(each.ravel()[likely], each.ravel()[~likely].sum()) for each in (counts, p)]
    assert chi_square(*cells) < 1


# trees


def rows_of(salt: int, size: int = SIZE, scale: float = 2.0) -> Rows:
    """A drafter's logits, a function of the whole path."""
    toy = ToyTarget(size, memory=99, salt=salt, scale=scale)
    return lambda path: torch.from_numpy(toy.logits([size, *path]))


def path_of(growth: Growth, node: int) -> Path:
    return tuple(growth.tokens[each] for each in growth.path(node))


def grown(growth: Growth, rows: Rows) -> Draft:
    while growth.frontier:
        growth.expand(torch.stack([rows(path_of(growth, node)) for node in growth.frontier]))
    return growth.draft("mine")


def token_paths(draft: Draft) -> list[Path]:
    return [tuple(draft.tokens[node] for node in path) for path in paths(draft.parents)]


def plain_tree(
    guess: Callable[[Path], Seq[Guess]], *, budget: int, width: int, depth: int, eos: Seq[int] = ()
) -> dict[Path, float]:
    """The best paths: of each depth the likeliest few that have not ended are followed by their likeliest few."""
    found: dict[Path, float] = {}
    level: dict[Path, float] = {(): 1.0}
    for _ in range(min(budget, depth)):
        new = {(*path, each.token): chance * each.confidence for path, chance in level.items() for each in guess(path)}
        found |= new
        live = sorted((path for path in new if path[-1] not in eos), key=lambda path: -new[path])
        level = {path: new[path] for path in live[:width]}
    best = sorted(found, key=lambda path: -found[path])[:budget]
    return {path: found[path] for path in best}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_tree_holds_the_best_of_the_followed_paths(width: int, mode: str) -> None:
    for seed in range(12):
        rng = random.Random(seed)
        budget, depth, rows = rng.randint(1, 12), rng.randint(1, 6), rows_of(seed)
        seq = text(rng.choice(list(PARAMS)), mode)
        draft = grown(Growth(seq, budget, Vocabulary(SIZE), width, most_deep=depth), rows)

        def guess(path: Path, seq: Sequence = seq, rows: Rows = rows) -> list[Guess]:
            return guesses(rows(path)[None], Vocabulary(SIZE), seq, [path], width, is_drawn=False)[0]

        expected = plain_tree(guess, budget=budget, width=width, depth=depth, eos=[EOS])
        assert token_paths(draft) == list(expected)
        assert draft.probs is None
        assert draft.drafter == "mine"
        assert draft.confidences is not None
        for path, confidence in zip(token_paths(draft), draft.confidences, strict=True):
            last = next(each for each in guess(path[:-1]) if each.token == path[-1])
            assert confidence == pytest.approx(last.confidence)
        assert width > 1 or draft.is_chain


@pytest.mark.parametrize(("budget", "depth", "rounds"), [(3, 9, 3), (9, 4, 4), (1, 1, 1)])
@pytest.mark.parametrize("drawn", [False, True], ids=["top", "drawn"])
def test_no_level_is_asked_for_that_could_not_be_drafted(budget: int, depth: int, rounds: int, drawn: bool) -> None:
    asked: list[Path] = []

    def rows(path: Path) -> Tensor:
        asked.append(path)
        return rows_of(1)(path)

    seq = text("plain", "top")
    seq.eos_tokens = frozenset()
    draft = grown(Growth(seq, budget, Vocabulary(SIZE), 1, is_drawn=drawn, most_deep=depth), rows)
    assert len(asked) == rounds == len(draft)


def ranks_of(parents: Seq[int]) -> set[Path]:
    """Each node by the ranks among their siblings of the nodes from the root to it."""
    rank = [list(parents[:node]).count(parent) for node, parent in enumerate(parents)]
    return {tuple(rank[node] for node in path) for path in paths(parents)}


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize(("budget", "depth"), [(1, 5), (4, 2), (7, 9), (12, 3), (16, 16)])
def test_the_shape_of_a_drawn_tree_is_fixed_before(width: int, budget: int, depth: int) -> None:
    chances, kept = SHAPE
    levels = [[chance * kept**at for chance in chances[:width]] for at in range(min(budget, depth))]
    shape = ranks_of(best_first(levels, budget)[0])
    for seed in range(3):
        seq = text("plain", "top")
        seq.eos_tokens = frozenset()
        growth = Growth(seq, budget, Vocabulary(SIZE), width, is_drawn=True, most_deep=depth)
        draft = grown(growth, rows_of(seed, scale=0.5 + 2 * seed))
        assert ranks_of(draft.parents) == shape
        assert draft.probs is not None
        assert draft.probs.shape == (len(shape), SIZE)


def test_nodes_of_a_drawn_tree_say_what_they_were_drawn_from() -> None:
    seq, rows = text("penalties and cuts", "top"), rows_of(3)
    draft = grown(Growth(seq, 12, Vocabulary(SIZE), 3, is_drawn=True, most_deep=4), rows)
    assert draft.probs is not None
    assert len(set(draft.parents)) < len(draft) - 2, "there are siblings"
    for node, (path, probs) in enumerate(zip(token_paths(draft), draft.probs, strict=True)):
        q = plain_q(rows(path[:-1]).numpy(), seq, path[:-1])
        q[[draft.tokens[at] for at in range(node) if draft.parents[at] == draft.parents[node]]] = 0
        np.testing.assert_allclose(probs.numpy(), q / q.sum(), rtol=0, atol=1e-6)
        assert probs[draft.tokens[node]] > 0


@pytest.mark.parametrize(("options", "drawn"), [
    ({"temperature": 1.0}, True), ({"temperature": 1.0, "seed": 1}, False), ({"temperature": 0.0}, False),
    ({"temperature": 1.0, "seed": 1, "verification": "rejection"}, True),
    ({"temperature": 1.0, "verification": "block"}, True),
])  # fmt: skip
def test_guesses_are_drawn_where_that_makes_a_difference(options: dict[str, Any], drawn: bool) -> None:
    seq = sequence([1], SamplingParams(**options))
    draft = grown(Growth(seq, 5, Vocabulary(SIZE), 2, is_drawn=True), rows_of(1))
    assert (draft.probs is not None) == drawn


@pytest.mark.parametrize(("siblings", "width", "drawn"), [
    ("auto", 1, True), ("auto", 2, False), ("drawn", 1, True), ("drawn", 3, True), ("top", 1, False), ("top", 3, False),
])  # fmt: skip
def test_alone_a_guess_is_drawn_and_of_several_the_likeliest_are_taken(siblings: Any, width: int, drawn: bool) -> None:
    assert shape_for(sequence([1], SamplingParams(temperature=1.0)), width, siblings) == (width, drawn)


@pytest.mark.parametrize(("options", "shape"), [
    ({}, (3, False)), ({"temperature": 1.0, "seed": 1}, (3, False)), ({"temperature": 1.0}, (1, True)),
])  # fmt: skip
def test_trees_where_the_choice_is_no_matter_of_chance_and_drawn_chains_elsewhere(
    options: dict[str, Any], shape: tuple[int, bool]
) -> None:
    assert shape_for(sequence([1], SamplingParams(**options)), None, "auto") == shape


@pytest.mark.parametrize("drawn", [False, True], ids=["top", "drawn"])
def test_what_was_asked_about_is_a_tree_whose_newest_nodes_come_last(drawn: bool) -> None:
    seq, rows = text("plain", "top"), rows_of(4)
    seq.eos_tokens = frozenset()
    growth, seen = Growth(seq, 14, Vocabulary(SIZE), 3, is_drawn=drawn), list[Path]()
    while growth.frontier:
        new = [path_of(growth, node) for node in growth.frontier]
        asked = growth.asked()
        if new != [()]:
            seen += new
            assert token_paths(asked) == seen
        growth.expand(torch.stack([rows(path) for path in new]))
    assert len(seen) > 4


@pytest.mark.parametrize("drawn", [False, True], ids=["top", "drawn"])
@pytest.mark.parametrize("width", [1, 3])
def test_nothing_follows_an_end(width: int, drawn: bool) -> None:
    ended = 0
    for seed in range(10):
        seq = text("plain", "top", logit_bias={EOS: 2.0})
        seq.rng = random.Random(seed)
        draft = grown(Growth(seq, 9, Vocabulary(SIZE), width, is_drawn=drawn), rows_of(seed))
        assert all(EOS not in path[:-1] for path in token_paths(draft))
        ended += EOS in draft.tokens
    assert ended > 2


# the rule


class Spy:
    """Remembers what it was asked; says so much."""

    def __init__(self, *, levels: int = 99, count: int = 99) -> None:
        self.levels, self.count = levels, count
        self.asked: list[list[float | None]] = []
        self.weighed: list[tuple[list[float], list[int] | None]] = []

    def worth(self, seq: Sequence, confidences: Seq[float | None]) -> bool:
        self.asked.append(list(confidences))
        return len(confidences) <= self.levels

    def length(self, seq: Sequence, confidences: Seq[float], parents: Seq[int] | None = None) -> int:
        self.weighed.append((list(confidences), None if parents is None else list(parents)))
        return self.count


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("width", [1, 3])
def test_each_further_level_is_asked_for_with_the_best_path_to_it(width: int, mode: str) -> None:
    rule, seq = Spy(levels=3), text("plain", mode)
    seq.eos_tokens = frozenset()
    growth = Growth(seq, 9, Vocabulary(SIZE), width, rule=rule)
    draft = grown(growth, rows_of(2))
    assert max(map(len, token_paths(draft))) == 3, "a fourth level was not worth it"
    for depth, confidences in enumerate(rule.asked, 1):
        level = [node for node in range(len(growth.tokens)) if len(growth.path(node)) == depth]
        best = max(level, key=lambda node: growth.chances[node])
        assert confidences == [*(growth.confidences[node] for node in growth.path(best)), None]
    assert len(rule.asked) == 3


def test_a_tree_of_the_likeliest_is_cut_to_the_rules_length() -> None:
    seq, rows = text("plain", "greedy"), rows_of(2)
    whole = grown(Growth(seq, 9, Vocabulary(SIZE), 3), rows)
    for count in (0, 1, 4, 9):
        rule = Spy(count=count)
        draft = grown(Growth(seq, 9, Vocabulary(SIZE), 3, rule=rule), rows)
        assert rule.weighed == [(whole.confidences, whole.parents)]
        assert (draft.tokens, draft.parents) == (whole.tokens[:count], whole.parents[:count])
        assert draft.confidences == (whole.confidences or [])[:count]


@pytest.mark.parametrize("width", [1, 3])
def test_what_was_drawn_stays(width: int) -> None:
    """Whether a drawn guess looks good says what was drawn: no rule is asked about it any more."""
    rule, seq = Spy(count=0), text("plain", "top")
    seq.eos_tokens = frozenset()
    draft = grown(Growth(seq, 8, Vocabulary(SIZE), width, is_drawn=True, rule=rule), rows_of(2))
    assert len(draft) == 8
    assert rule.weighed == []


def test_a_drawn_guess_is_not_what_the_rule_is_told_of() -> None:
    """Confidences are the same whichever token is drawn: known before."""
    told = set()
    for seed in range(20):
        rule, seq = Spy(levels=1), text("plain", "top")
        seq.rng = random.Random(seed)
        draft = grown(Growth(seq, 8, Vocabulary(SIZE), 3, is_drawn=True, rule=rule), rows_of(2))
        told.add((tuple(rule.asked[0]), len(draft)))
    assert len(told) == 1


# the law of what comes out


class Branches:
    """Runs something once for every way in which its choices can fall."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, int]] = []  # which option of how many
        self.at, self.chance = 0, 1.0

    def choose(self, chances: Seq[float]) -> int:
        options = [i for i, chance in enumerate(chances) if chance > 0]
        if self.at == len(self.taken):
            self.taken.append((0, len(options)))
        option = options[self.taken[self.at][0]]
        self.at += 1
        self.chance *= chances[option]
        return option

    def runs(self, run: Callable[[], T]) -> Iterator[tuple[T, float]]:
        while True:
            self.at, self.chance = 0, 1.0
            yield run(), self.chance
            while self.taken and self.taken[-1][0] + 1 == self.taken[-1][1]:
                self.taken.pop()
            if not self.taken:
                return
            option, count = self.taken[-1]
            self.taken[-1] = (option + 1, count)


@dataclasses.dataclass
class Coin:
    """A uniform number that is only ever compared, once multiplied: both answers are branches."""

    branches: Branches
    factor: float = 1.0

    def __mul__(self, factor: float) -> Coin:
        return Coin(self.branches, factor)

    def __le__(self, limit: float) -> bool:
        chance = min(1.0, limit / self.factor)
        return self.branches.choose([chance, 1 - chance]) == 0

    __lt__ = __le__


class Fate:
    """In place of a sequence's generator, and of drawing with its numbers."""

    def __init__(self) -> None:
        self.branches = Branches()

    def random(self) -> Coin:
        return Coin(self.branches)

    def draw(self, probs: Tensor, ids: Tensor | None, uniform: Coin) -> int:
        weights = probs.double() / probs.double().sum()
        at = self.branches.choose(weights.tolist())
        return at if ids is None else int(ids[at])

    def runs(self, run: Callable[[], T]) -> Iterator[tuple[T, float]]:
        """Inside of other runs too."""
        outer = self.branches
        inner = Branches()

        def there() -> T:
            self.branches = inner
            try:
                return run()
            finally:
                self.branches = outer

        return inner.runs(there)


Logits = Callable[[Seq[int]], np.ndarray]


def joint(logits: Logits, seq: Sequence, context: Path, length: int) -> np.ndarray:
    """The target's distribution of the next ``length`` tokens after some. [V] * length"""
    if length == 0:
        return np.ones(())
    tokens = [*seq.tokens, *context]
    p = dense_p(logits(tokens), seq.sampling, tokens, tokens[seq.num_prompt_tokens :], sorted(seq.eos_tokens))
    return np.stack([
        p[token] * joint(logits, seq, (*context, token), length - 1) if p[token] else np.zeros([len(p)] * (length - 1))
        for token in range(len(p))
    ])  # fmt: skip


def check_law(
    monkeypatch: pytest.MonkeyPatch, propose: Callable[[], Draft], seq: Sequence, logits: Logits, *, length: int = 3
) -> set[tuple[int, ...]]:
    """What a step emits, then the target's own, is distributed as the target's own; the shapes of the drafts."""
    fate: Any = Fate()
    for module in (growing, verifying):
        monkeypatch.setattr(module, "draw", fate.draw)
    seq.rng = fate
    rest = cache(lambda context: joint(logits, seq, context, length - len(context)))
    expected = rest(())
    total, shapes = np.zeros_like(expected), set()
    for draft, chance in fate.runs(propose):
        contexts = [(), *token_paths(draft)]
        rows = torch.from_numpy(np.stack([logits([*seq.tokens, *context]) for context in contexts]))
        p = distribution(rows, seq, draft)
        shapes.add(tuple(draft.parents))
        for verdict, more in fate.runs(lambda draft=draft, p=p: verify(p, draft, seq)):
            emitted = (*(draft.tokens[node] for node in verdict.accepted), verdict.next_token)
            total[emitted] += chance * more * rest(emitted)
    assert total.sum() == pytest.approx(1, abs=1e-5)
    np.testing.assert_allclose(total, expected, rtol=0, atol=2e-6)
    return shapes


class Wary:
    """Goes on while guesses are sure, and drafts those of a tree that are."""

    def __init__(self, least: float) -> None:
        self.least = least

    def worth(self, seq: Sequence, confidences: Seq[float | None]) -> bool:
        return all(confidence > self.least for confidence in confidences if confidence is not None)

    def length(self, seq: Sequence, confidences: Seq[float], parents: Seq[int] | None = None) -> int:
        return sum(confidence > self.least / 2 for confidence in confidences)


LAWS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0.9},
    "cut": {"temperature": 1.3, "top_k": 2, "top_p": 0.95},
    "min_p": {"temperature": 1.6, "min_p": 0.25},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "bias": {"temperature": 1.1, "logit_bias": {0: 0.8}, "min_tokens": 3},
}


@pytest.mark.parametrize("rule", [None, Wary(0.5)], ids=["no rule", "wary"])
@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize(("width", "drawn"), [(1, True), (1, False), (2, True), (2, False), (3, True), (3, False)])
def test_a_step_leaves_the_targets_distribution(
    width: int, drawn: bool, kind: str, rule: Wary | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: every draft that can be drawn, and every way to verify it."""
    target, rows = ToyTarget(3, scale=1.2, salt=2), rows_of(7, size=3, scale=1.2)
    seq = sequence([1, 2], SamplingParams(**LAWS[kind]), num_prompt_tokens=1, eos=[0])

    def propose() -> Draft:
        growth = Growth(seq, 4 if width == 2 else 5, Vocabulary(3), width, drawn, most_deep=2, rule=rule)
        return grown(growth, rows)

    shapes = check_law(monkeypatch, propose, seq, target.logits)
    assert max(map(len, shapes)) > 1 or rule is not None
    if width > 1 and kind == "plain" and rule is None:
        assert any(parents.count(ROOT) > 1 for parents in shapes)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_the_first_path_of_a_drawn_tree_leaves_it_too(verification: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a target that takes no trees: later siblings are left out, whatever was drawn."""
    target, rows = ToyTarget(3, scale=1.2, salt=2), rows_of(7, size=3, scale=1.2)
    seq = sequence([1, 2], SamplingParams(temperature=1.0, verification=verification), num_prompt_tokens=1)
    made = lambda: best_chain(grown(Growth(seq, 5, Vocabulary(3), 3, True, most_deep=2), rows))  # noqa: E731
    assert check_law(monkeypatch, made, seq, target.logits) == {(-1, 0)}


def test_block_verification_of_a_drawn_chain_leaves_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    target, rows = ToyTarget(3, scale=1.2, salt=2), rows_of(7, size=3, scale=1.2)
    params = SamplingParams(temperature=1.0, verification="block")
    for rule in (None, Wary(0.5)):
        seq = sequence([1, 2], params, num_prompt_tokens=1, eos=[0])
        made = lambda: grown(Growth(seq, 3, Vocabulary(3), 1, True, rule=rule), rows)  # noqa: B023, E731
        check_law(monkeypatch, made, seq, target.logits, length=4)


def test_the_enumeration_sees_a_drawn_tree_cut_by_what_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """The well-known mistake: the rule that weighs likeliest guesses, asked about drawn ones by their own chances."""
    target, rows = ToyTarget(3, scale=1.2, salt=2), rows_of(7, size=3, scale=1.2)
    seq = sequence([1, 2], SamplingParams(temperature=1.0), num_prompt_tokens=1)

    def propose() -> Draft:
        draft = grown(Growth(seq, 2, Vocabulary(3), 1, True), rows)
        assert draft.probs is not None
        count = 2 if float(draft.probs[1, draft.tokens[1]]) > 0.4 else 1
        return Draft(draft.tokens[:count], draft.parents[:count], draft.probs[:count])

    with pytest.raises(AssertionError, match="Mismatch"):
        check_law(monkeypatch, propose, seq, target.logits)
