"""Each rule is exact: by enumeration of every draft and every branch, and by counting what really comes out.

The rules are written a second time here, in plain float64, as leaves: a chance, the random numbers that lead there and
the verdict. The leaves' chances must add up to the target's distribution (the rule is exact), and ``verify`` must come
to each leaf's verdict with numbers just inside the edges of its branch (the code is the rule).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from conftest import ToyTarget, Uniforms, chi_square, dense_p, plain_loop, sequence

from flashspec.core import EMPTY, ROOT, Draft, SamplingParams, Sequence, Verdict
from flashspec.sampling import Distribution, coupled_token, distribution, draw
from flashspec.tree import children, paths, prefix
from flashspec.verify import residual, verify

Context = tuple[int, ...]  # the tokens drafted above a node
Shape = Callable[[Context], int]  # how many children are drafted after a context
EDGE = 1e-9
JUST_UNDER_1 = math.nextafter(1.0, 0.0)


# Small worlds


@cache
def random_row(key: tuple[int, ...], zeros: bool) -> np.ndarray:
    """[3] float64; with zeros, two rows of three lack a symbol or two."""
    rng = np.random.default_rng(key)
    row = rng.dirichlet(np.ones(3))
    if zeros:
        row[rng.permutation(3)[: rng.integers(0, 3)]] = 0
    return row / row.sum()


@dataclass(frozen=True)
class World:
    """A target and a draft model over three symbols, each a function of the context."""

    salt: int
    zero_p: bool = False
    zero_q: bool = False

    def p(self, context: Context) -> np.ndarray:
        return random_row((self.salt, 1, *(token + 1 for token in context)), self.zero_p)

    def q(self, context: Context) -> np.ndarray:
        return random_row((self.salt, 2, *(token + 1 for token in context)), self.zero_q)


class Toy(World):
    """The example of the block verification paper: two symbols, no context."""

    def p(self, context: Context) -> np.ndarray:
        return np.array([1 / 3, 2 / 3])

    def q(self, context: Context) -> np.ndarray:
        return np.array([2 / 3, 1 / 3])


WORLDS = [World(salt, zero_p, zero_q) for salt, (zero_p, zero_q) in enumerate(product([False, True], repeat=2))]
WORLDS += [World(10), World(11, True, True)]


def joint(world: World, length: int, context: Context = ()) -> np.ndarray:
    """The target's distribution of the next ``length`` tokens. [V] * length"""
    if length == 0:
        return np.ones(())
    p = world.p(context)
    return np.stack([p[token] * joint(world, length - 1, (*context, token)) for token in range(len(p))])


def contexts(draft: Draft) -> list[Context]:
    """Of every row: the root, then every node."""
    return [(), *(tuple(draft.tokens[node] for node in path) for path in paths(draft.parents))]


def columns(row: np.ndarray, sparse: bool) -> np.ndarray:
    """The order of the tokens in a row: likeliest first, as top-k leaves them, or as they are."""
    return np.argsort(-row) if sparse else np.arange(len(row))


def table(world: World, draft: Draft, sparse: bool) -> Distribution:
    """p at every row in float64; sparse rows lack the tokens that no row can emit."""
    rows = np.stack([world.p(context) for context in contexts(draft)])
    if not sparse:
        return Distribution(torch.from_numpy(rows), None, rows.shape[1])
    width = int((rows > 0).sum(1).max())
    ids = np.stack([columns(row, sparse) for row in rows])[:, :width]
    return Distribution(torch.from_numpy(np.take_along_axis(rows, ids, 1)), torch.from_numpy(ids), rows.shape[1])


# Every draft


def chain(length: int, stop: Callable[[Context], bool] = lambda context: False) -> Shape:
    return lambda context: int(len(context) < length and not stop(context))


def tree(*widths: int) -> Shape:
    return lambda context: widths[len(context)] if len(context) < len(widths) else 0


def drafts(
    world: World,
    shape: Shape,
    *,
    distinct: bool = False,
    tokens: Seq[int] = (),
    parents: Seq[int] = (),
    rows: Seq[np.ndarray] = (),
) -> Iterator[tuple[float, Draft]]:
    """Every draft of a shape and its chance: siblings drawn from q independently, or without replacement."""
    draft = Draft(list(tokens), list(parents))
    for node, context in zip(range(ROOT, len(tokens)), contexts(draft), strict=True):
        siblings = [tokens[child] for child in children(parents).get(node, [])]
        if len(siblings) < shape(context):
            q = world.q(context).copy()
            q[siblings if distinct else []] = 0
            q /= q.sum()
            for token in np.flatnonzero(q).tolist():
                longer = ([*tokens, token], [*parents, node], [*rows, q])
                for chance, full in drafts(
                    world, shape, distinct=distinct, tokens=longer[0], parents=longer[1], rows=longer[2]
                ):
                    yield q[token] * chance, full
            return
    yield 1.0, Draft(draft.tokens, draft.parents, torch.from_numpy(np.stack(rows)) if rows else None)


# Every branch of a rule


@dataclass(frozen=True)
class Leaf:
    chance: float
    uniforms: list[float]  # numbers that lead here, in the order in which they are used
    verdict: Verdict


def inside(threshold: float) -> float:
    return threshold * (1 - EDGE)


def outside(threshold: float) -> float:
    return threshold + (1 - threshold) * EDGE if threshold > 0 else 0.0  # even u = 0 does not pass a threshold of 0


def steps(weights: np.ndarray, order: Seq[int]) -> Iterator[tuple[int, float, float]]:
    """Token, half its chance, a number near either end of its step of the inverse distribution function."""
    start = 0.0
    for token in map(int, order):
        if weights[token] > 0:
            yield token, weights[token] / 2, start + weights[token] * EDGE
            yield token, weights[token] / 2, start + weights[token] * (1 - EDGE)
        start += weights[token]


def leaves_of_draw(before: Leaf, weights: np.ndarray, sparse_row: np.ndarray | None, is_bonus: bool) -> Iterator[Leaf]:
    order = range(len(weights)) if sparse_row is None else columns(sparse_row, True)
    for token, half, uniform in steps(weights, order):
        verdict = Verdict(before.verdict.accepted, token, is_bonus)
        yield Leaf(before.chance * half, [*before.uniforms, uniform], verdict)


def positive_part(weights: np.ndarray, q: np.ndarray) -> np.ndarray:
    rest = np.maximum(weights - q, 0)
    return rest / rest.sum()


START = Leaf(1.0, [], Verdict([], -1, False))


def rejection_leaves(world: World, draft: Draft, sparse: bool, at: Leaf = START) -> Iterator[Leaf]:
    """Token by token, sibling by sibling: accept with min(1, p(x)/q(x)), else go on with the residual."""
    node = at.verdict.accepted[-1] if at.verdict.accepted else ROOT
    p = weights = world.p(contexts(draft)[node + 1])
    below = children(draft.parents).get(node, [])
    chance, uniforms = at.chance, at.uniforms
    for child in below:
        q, token = draft.probs[child].numpy(), draft.tokens[child]
        accept = min(1.0, weights[token] / q[token])
        if accept > 0:
            verdict = Verdict([*at.verdict.accepted, child], -1, False)
            further = Leaf(chance * accept, [*uniforms, inside(accept)], verdict)
            yield from rejection_leaves(world, draft, sparse, further)
        if accept == 1:
            return
        chance, uniforms = chance * (1 - accept), [*uniforms, outside(accept)]
        weights = positive_part(weights, q)
    end = Leaf(chance, uniforms, at.verdict)
    yield from leaves_of_draw(end, weights, p if sparse else None, is_bonus=not below)


def walk_leaves(world: World, draft: Draft, sparse: bool, at: Leaf = START) -> Iterator[Leaf]:
    """Draw from p; descend while a child holds the token."""
    node = at.verdict.accepted[-1] if at.verdict.accepted else ROOT
    p = world.p(contexts(draft)[node + 1])
    below = {draft.tokens[child]: child for child in children(draft.parents).get(node, [])}
    for leaf in leaves_of_draw(at, p, p if sparse else None, is_bonus=not below):
        child = below.get(leaf.verdict.next_token)
        if child is None:
            yield leaf
        else:
            verdict = Verdict([*at.verdict.accepted, child], -1, False)
            yield from walk_leaves(world, draft, sparse, Leaf(leaf.chance, leaf.uniforms, verdict))


def block_chances(world: World, draft: Draft) -> tuple[list[float], list[float]]:
    """P_0..P_n and h_1..h_n."""
    weights, chances = [1.0], []
    for i in range(1, len(draft) + 1):
        token, above = draft.tokens[i - 1], tuple(draft.tokens[: i - 1])
        weights.append(min(1.0, weights[-1] * world.p(above)[token] / world.q(above)[token]))
        if i == len(draft):
            chances.append(weights[i])
        elif weights[i] == 1:
            chances.append(1.0)
        else:
            here = tuple(draft.tokens[:i])
            excess = np.maximum(weights[i] * world.p(here) - world.q(here), 0).sum()
            chances.append(excess / (excess + 1 - weights[i]))
    return weights, chances


def block_leaves(world: World, draft: Draft, sparse: bool) -> Iterator[Leaf]:
    """Every pattern of n tests; the last one passed is where the accepted prefix ends."""
    weights, chances = block_chances(world, draft)
    for passed in product([True, False], repeat=len(draft)):
        chance = math.prod(h if ok else 1 - h for h, ok in zip(chances, passed, strict=True))
        if chance == 0:
            continue
        uniforms = [inside(h) if ok else outside(h) for h, ok in zip(chances, passed, strict=True)]
        tau = max((i + 1 for i, ok in enumerate(passed) if ok), default=0)
        p = rest = world.p(tuple(draft.tokens[:tau]))
        if tau < len(draft):
            rest = positive_part(weights[tau] * p, world.q(tuple(draft.tokens[:tau])))
        end = Leaf(chance, uniforms, Verdict(list(range(tau)), -1, False))
        yield from leaves_of_draw(end, rest, p if sparse else None, is_bonus=tau == len(draft))


Rule = Callable[[World, Draft, bool], Iterator[Leaf]]
LEAVES: dict[str, Rule] = {"rejection": rejection_leaves, "block": block_leaves, "walk": walk_leaves}


def replay(p: Distribution, draft: Draft, rule: str, uniforms: Seq[float]) -> Verdict:
    """The verdict with given random numbers; each is used, once."""
    seq = sequence([0], SamplingParams(temperature=1.0, verification=rule))
    seq.rng = Uniforms(uniforms)
    verdict = verify(p, draft, seq)
    assert seq.rng.numbers == [], "fewer random numbers were used than there are decisions"
    return verdict


def law(world: World, ways: Iterator[tuple[float, Draft]], rule: Rule, length: int) -> np.ndarray:
    """Of the first ``length`` tokens: what a verdict emits, then the target's own. [V] * length"""
    total = np.zeros([len(world.p(()))] * length)
    for chance, draft in ways:
        for leaf in rule(world, draft, False):
            emitted = (*(draft.tokens[node] for node in leaf.verdict.accepted), leaf.verdict.next_token)
            total[emitted] += chance * leaf.chance * joint(world, length - len(emitted), emitted)
    return total


def check(world: World, shape: Shape, name: str, *, distinct: bool = False, rule: str | None = None) -> None:
    """``verify`` is the rule ``name`` in every branch, and the rule gives the target's distribution."""
    ways = list(drafts(world, shape, distinct=distinct))
    for sparse in (False, True):
        for _, draft in ways:
            p = table(world, draft, sparse)
            # without a node there is nothing to reject or test: every rule is a draw from p
            for leaf in (LEAVES[name] if len(draft) else walk_leaves)(world, draft, sparse):
                assert replay(p, draft, rule or name, leaf.uniforms) == leaf.verdict, (draft, leaf)
    length = 1 + max(map(len, (context for _, draft in ways for context in contexts(draft))))
    np.testing.assert_allclose(law(world, iter(ways), LEAVES[name], length), joint(world, length), rtol=0, atol=1e-9)


# Exact by enumeration


@pytest.mark.parametrize("world", WORLDS, ids=str)
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_sampled_chain_gives_the_targets_distribution(rule: str, length: int, world: World) -> None:
    check(world, chain(length), rule)


STOPS: dict[str, Callable[[World, Context], bool]] = {
    "after symbol 0": lambda world, context: context[-1:] == (0,),
    "q is unsure": lambda world, context: world.q(context).max() < 0.6,
    "q was sure one token ago": lambda world, context: bool(context) and world.q(context[:-1]).max() > 0.7,
}


@pytest.mark.parametrize("world", [World(3), World(5, True, True)], ids=str)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_chain_may_stop_by_what_came_before(rule: str, stop: str, world: World) -> None:
    check(world, chain(3, lambda context: STOPS[stop](world, context)), rule)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_enumeration_sees_a_draft_cut_by_what_was_drawn(rule: str) -> None:
    """The well-known mistake: the last token is dropped if q(x) is low. It must not pass the check above."""
    world = World(3)
    ways = [
        (chance, prefix(draft, 1 if draft.probs[1][draft.tokens[1]] < 0.4 else 2))
        for chance, draft in drafts(world, chain(2))
    ]
    assert np.abs(law(world, iter(ways), LEAVES[rule], 3) - joint(world, 3)).max() > 0.01


TREES = {"two siblings": tree(2), "three siblings": tree(3), "two and one each": tree(2, 1), "one and two": tree(1, 2)}


@pytest.mark.parametrize("world", [World(0), World(1, zero_p=True), World(2, zero_q=True)], ids=str)
@pytest.mark.parametrize("shape", TREES)
def test_independent_siblings_give_the_targets_distribution(shape: str, world: World) -> None:
    check(world, TREES[shape], "rejection")


@pytest.mark.parametrize("world", [World(0), World(1, zero_p=True)], ids=str)
@pytest.mark.parametrize("shape", TREES)
def test_siblings_without_replacement_give_the_targets_distribution(shape: str, world: World) -> None:
    check(world, TREES[shape], "rejection", distinct=True)


@pytest.mark.parametrize("distinct", [False, True])
def test_a_tree_may_grow_by_what_came_before(distinct: bool) -> None:
    world = World(7)
    shape = lambda context: 0 if len(context) == 2 else 2 if world.q(context).max() < 0.6 else 1  # noqa: E731
    assert {shape(context) for context in [(), (0,), (1,), (2,)]} == {1, 2}
    check(world, shape, "rejection", distinct=distinct)


def test_block_verification_of_a_tree_is_rejection() -> None:
    check(World(0), tree(2, 1), "rejection", rule="block")


def likeliest(world: World, *widths: int) -> Draft:
    """The draft model's likeliest tokens, as many at each depth as ``widths`` says."""
    draft = Draft([], [])
    level: list[tuple[int, Context]] = [(ROOT, ())]
    for width in widths:
        below = [(node, c, int(t)) for node, c in level for t in np.argsort(-world.q(c))[:width]]
        level = [(len(draft) + i, (*c, token)) for i, (_, c, token) in enumerate(below)]
        draft = Draft(draft.tokens + [b[2] for b in below], draft.parents + [b[0] for b in below])
    return draft


@pytest.mark.parametrize("world", [World(0), World(1, zero_p=True), World(13, zero_p=True)], ids=str)
@pytest.mark.parametrize("widths", [(1,), (1, 1, 1), (2,), (3,), (2, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_deterministic_children_give_the_targets_distribution(rule: str, widths: tuple[int, ...], world: World) -> None:
    draft = likeliest(world, *widths)
    for sparse in (False, True):
        p = table(world, draft, sparse)
        for leaf in walk_leaves(world, draft, sparse):
            assert replay(p, draft, rule, leaf.uniforms) == leaf.verdict, leaf
    length = len(widths) + 1
    expected = joint(world, length)
    np.testing.assert_allclose(law(world, iter([(1.0, draft)]), walk_leaves, length), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("widths", [(1, 1), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("world", [World(0), World(1, zero_p=True)], ids=str)
def test_a_one_hot_q_that_is_written_out_gives_the_same(world: World, widths: tuple[int, ...]) -> None:
    bare = likeliest(world, *widths)
    draft = Draft(bare.tokens, bare.parents, torch.eye(3, dtype=torch.float64)[bare.tokens])
    for sparse in (False, True):
        p = table(world, draft, sparse)
        for leaf in rejection_leaves(world, draft, sparse):
            assert replay(p, draft, "rejection", leaf.uniforms) == leaf.verdict, leaf
    length = len(widths) + 1
    found = law(world, iter([(1.0, draft)]), rejection_leaves, length)
    np.testing.assert_allclose(found, joint(world, length), rtol=0, atol=1e-9)


# How many are accepted


def mean_accepted(world: World, rule: str, length: int) -> float:
    return sum(
        chance * leaf.chance * len(leaf.verdict.accepted)
        for chance, draft in drafts(world, chain(length))
        for leaf in LEAVES[rule](world, draft, False)
    )


@pytest.mark.parametrize("world", [*WORLDS, *map(World, range(20, 26))], ids=str)
def test_block_verification_accepts_no_fewer(world: World) -> None:
    assert mean_accepted(world, "block", 1) == pytest.approx(mean_accepted(world, "rejection", 1))
    for length in (2, 3):
        assert mean_accepted(world, "block", length) >= mean_accepted(world, "rejection", length) - 1e-12


def test_the_papers_example() -> None:
    """p = (1/3, 2/3), q = (2/3, 1/3), two tokens: 10/9 accepted token by token, 11/9 by block."""
    world = Toy(0)
    assert mean_accepted(world, "rejection", 2) == pytest.approx(10 / 9)
    assert mean_accepted(world, "block", 2) == pytest.approx(11 / 9)
    check(world, chain(2), "rejection")
    check(world, chain(2), "block")


# By counting, through ``distribution`` and in float32


class Pipeline:
    """A target and a draft model of four tokens whose p and q are computed once for every context of two tokens."""

    def __init__(self, params: SamplingParams, salt: int) -> None:
        self.target, self.model = ToyTarget(4, scale=1.3), ToyTarget(4, scale=1.3, salt=salt)
        self.seq = sequence([1, 2], params, num_prompt_tokens=1)
        parents = [ROOT] * 4 + [i for i in range(20) for _ in range(4)]
        whole = Draft([i % 4 for i in range(84)], parents)
        self.index = {context: row for row, context in enumerate(contexts(whole))}
        self.full_p, self.full_q = self.rows(self.target, whole), self.rows(self.model, whole)
        self.numpy = np.random.default_rng(7)

    def rows(self, model: ToyTarget, draft: Draft) -> Distribution:
        logits = np.stack([model.logits([*self.seq.tokens, *context]) for context in contexts(draft)])
        return distribution(torch.from_numpy(logits), self.seq, draft)

    def p(self, draft: Draft) -> Distribution:
        rows = [self.index[context] for context in contexts(draft)]
        ids = self.full_p.ids
        return Distribution(self.full_p.probs[rows], None if ids is None else ids[rows], 4)

    def expected(self, context: Context = ()) -> np.ndarray:
        """Of one token, from the plain reading of the parameters. [4]"""
        tokens = [*self.seq.tokens, *context]
        return dense_p(self.target.logits(tokens), self.seq.sampling, tokens, tokens[1:])

    def counts(self, propose: Callable[[Pipeline], Draft], rounds: int) -> np.ndarray:
        """How often each pair of first tokens came out. [4, 4]"""
        found = np.zeros((4, 4))
        for number in range(rounds):
            if self.seq.sampling.verification_rule == "coupled":
                self.seq.seed = number
            draft = propose(self)
            verdict = verify(self.p(draft), draft, self.seq)
            emitted = [*(draft.tokens[node] for node in verdict.accepted), verdict.next_token]
            if len(emitted) == 1:
                emitted.append(int(self.numpy.choice(4, p=self.expected((emitted[0],)))))
            found[emitted[0], emitted[1]] += 1
        return found


def sampled_chain(length: int) -> Callable[[Pipeline], Draft]:
    def propose(pipe: Pipeline) -> Draft:
        tokens: list[int] = []
        rows = []
        for _ in range(length):
            row = pipe.index[tuple(tokens)]
            rows.append(pipe.full_q.dense()[row])
            tokens.append(draw(*pipe.full_q.row(row), pipe.seq.rng.random()))
        return Draft.chain(tokens, probs=torch.stack(rows))

    return propose


def sampled_tree(*, distinct: bool) -> Callable[[Pipeline], Draft]:
    """Two siblings with a child each."""

    def propose(pipe: Pipeline) -> Draft:
        dense = pipe.full_q.dense()
        first = dense[0]
        one = draw(first, None, pipe.seq.rng.random())
        second = first.clone()
        if distinct:
            second[one] = 0
            second /= second.sum()
        two = draw(second, None, pipe.seq.rng.random())
        below = [dense[pipe.index[(token,)]] for token in (one, two)]
        leaves = [draw(row, None, pipe.seq.rng.random()) for row in below]
        return Draft([one, two, *leaves], [ROOT, ROOT, 0, 1], torch.stack([first, second, *below]))

    return propose


def likeliest_tree(pipe: Pipeline) -> Draft:
    """Two siblings; the first has two children, the second one."""

    def best(context: Context) -> list[int]:
        return pipe.full_q.dense()[pipe.index[context]].topk(2).indices.tolist()

    one, two = best(())
    return Draft([one, two, *best((one,)), best((two,))[0]], [ROOT, ROOT, 0, 0, 1])


def coupled_chain(pipe: Pipeline) -> Draft:
    """Drawn with the target's own noise."""
    tokens: list[int] = []
    for depth in range(2):
        tokens.append(coupled_token(*pipe.full_q.row(pipe.index[tuple(tokens)]), pipe.seq, len(pipe.seq) + depth))
    return Draft.chain(tokens)


WHOLE: dict[str, float] = {"temperature": 0.9, "presence_penalty": 0.5}  # every token is possible
CUT: dict[str, float] = {"temperature": 1.2, "top_k": 3, "top_p": 0.95, "frequency_penalty": 0.4}  # sparse rows


@pytest.mark.parametrize(("rule", "options", "salt", "propose"), [
    ("rejection", WHOLE, 9, sampled_chain(2)),
    ("rejection", CUT, 9, sampled_chain(1)),
    ("block", WHOLE, 52, sampled_chain(3)),  # a model for which P_tau in the residual matters
    ("block", CUT, 9, sampled_chain(2)),
    ("rejection", WHOLE, 9, sampled_tree(distinct=False)),
    ("rejection", CUT, 9, sampled_tree(distinct=False)),
    ("rejection", WHOLE, 9, sampled_tree(distinct=True)),
    ("rejection", CUT, 9, likeliest_tree),
    ("rejection", WHOLE, 9, lambda pipe: EMPTY),
    ("coupled", WHOLE, 9, coupled_chain),
    ("coupled", CUT, 9, likeliest_tree),
])  # fmt: skip
def test_the_first_two_tokens_follow_the_target(
    rule: str, options: dict[str, float], salt: int, propose: Callable[[Pipeline], Draft]
) -> None:
    pipe = Pipeline(SamplingParams(seed=2024, verification=rule, **options), salt)
    first = pipe.expected()
    pairs = np.stack([first[token] * pipe.expected((token,)) for token in range(4)])
    rounds = 5000 if rule == "block" else 4000
    assert chi_square(pipe.counts(propose, rounds).ravel(), pairs.ravel()) < 1


# Greedy and coupled: the draft does not show in the output

Guess = Callable[[list[int], list[int]], Draft]  # tokens so far, the tokens that plain decoding gives -> draft
VOCAB = 12


def mixed_tree(tokens: list[int], plan: list[int]) -> Draft:
    """The right path as the second child of the root and the first below it, among wrong ones."""
    a, b, c = plan[len(tokens) : len(tokens) + 3]
    wrong = [(token + 1) % VOCAB for token in (a, b, c)]
    return Draft([wrong[0], a, b, b, wrong[1], wrong[2], c], [ROOT, ROOT, 0, 1, 1, 3, 3])


def random_chain(tokens: list[int], plan: list[int]) -> Draft:
    """Tokens and q without sense; right about every other time."""
    rng = np.random.default_rng(len(tokens))
    right = plan[len(tokens) : len(tokens) + 5]
    guess = [token if rng.random() < 0.6 else int(rng.integers(VOCAB)) for token in right]
    return Draft.chain(guess, probs=torch.from_numpy(rng.dirichlet(np.ones(VOCAB), 5).astype(np.float32)))


GUESSES: dict[str, Guess] = {
    "none": lambda tokens, plan: EMPTY,
    "right": lambda tokens, plan: Draft.chain(plan[len(tokens) : len(tokens) + 4]),
    "wrong": lambda tokens, plan: Draft.chain([(token + 1) % VOCAB for token in plan[len(tokens) : len(tokens) + 4]]),
    "random": random_chain,
    "tree": mixed_tree,
    "copies": lambda tokens, plan: Draft([plan[len(tokens)]] * 3, [ROOT] * 3),
}
PENALTIES = {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2, "logit_bias": {3: 1.0}}
SETTINGS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=48),
    "greedy, penalties": SamplingParams(max_tokens=48, **PENALTIES),
    "greedy, block": SamplingParams(max_tokens=48, verification="block"),
    "greedy, rejection": SamplingParams(max_tokens=48, seed=3, verification="rejection"),
    "coupled": SamplingParams(max_tokens=48, temperature=1.0, seed=3),
    "coupled, penalties": SamplingParams(max_tokens=48, temperature=0.8, seed=4, **PENALTIES),
    "coupled, cut": SamplingParams(max_tokens=48, temperature=1.3, seed=5, top_k=6, top_p=0.9, **PENALTIES),
}


def decode(target: ToyTarget, seq: Sequence, plan: list[int], guess: Guess, num_tokens: int) -> list[Verdict]:
    """The engine's loop without the engine."""
    verdicts = []
    while seq.num_output_tokens < num_tokens:
        draft = guess(seq.tokens, plan)
        logits = target.score([seq], [draft])[0].logits
        verdicts.append(verify(distribution(logits, seq, draft), draft, seq))
        seq.tokens += [*(draft.tokens[node] for node in verdicts[-1].accepted), verdicts[-1].next_token]
        target.keep(seq, verdicts[-1].accepted)
    return verdicts


def decoded(setting: str, guess: str, choice: int = 0) -> tuple[list[int], list[int], list[Verdict]]:
    """The output, what plain decoding gives, the verdicts."""
    target, params, prompt = ToyTarget(VOCAB), SETTINGS[setting], [5, 1, 7]
    plan = [*prompt, *plain_loop(target.logits, prompt, params, choice=choice)]
    seq = Sequence("s", list(prompt), len(prompt), params, choice)
    verdicts = decode(target, seq, plan, GUESSES[guess], 38)
    return seq.output, plan[len(prompt) :][: seq.num_output_tokens], verdicts


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_greedy_and_coupled_output_is_plain_decodings_whatever_the_draft(setting: str, guess: str) -> None:
    output, plain, verdicts = decoded(setting, guess)
    assert output == plain
    if guess == "none":
        assert all(verdict.accepted == [] and verdict.is_bonus for verdict in verdicts)
    if guess == "right":
        assert all(verdict.accepted == [0, 1, 2, 3] and verdict.is_bonus for verdict in verdicts)
    if guess == "wrong":
        assert all(verdict.accepted == [] and not verdict.is_bonus for verdict in verdicts)
    if guess == "tree":  # the longest right path ends in a leaf
        assert all(verdict.accepted == [1, 3, 6] and verdict.is_bonus for verdict in verdicts)
    if guess == "copies":
        assert all(verdict.accepted == [0] and verdict.is_bonus for verdict in verdicts)


def test_the_choices_of_one_seeded_request_differ() -> None:
    outputs = []
    for choice in (0, 1, 2):
        output, plain, _ = decoded("coupled", "random", choice)
        assert output == plain
        outputs.append(output[:38])
    assert outputs[0] != outputs[1] != outputs[2] != outputs[0]


# Right, wrong and the edges, for the rules that draw

UNIFORMS = [0.0, 1e-12, 0.3, 0.999, JUST_UNDER_1]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("uniform", UNIFORMS)
def test_a_draft_from_p_itself_is_accepted_whole(rule: str, uniform: float) -> None:
    world = World(30)
    tokens = [1, 2, 0]
    p = table(world, Draft.chain(tokens), False)
    verdict = replay(p, Draft.chain(tokens, probs=p.probs[:3].clone()), rule, [uniform] * 4)
    last = p.probs[3].cumsum(0)
    assert verdict == Verdict([0, 1, 2], int((last > last[-1] * min(uniform, 1 - 1e-15)).int().argmax()), is_bonus=True)


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("uniform", UNIFORMS)
def test_an_impossible_draft_is_rejected_and_the_residual_drawn(rule: str, uniform: float) -> None:
    """Row 0: token 1 is impossible, and q takes all of token 0's share, so that only token 2 is left."""
    p = Distribution(torch.tensor([[0.4, 0.0, 0.6], [0.2, 0.5, 0.3], [1.0, 0.0, 0.0]]), None, 3)
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]])
    numbers = {"rejection": [uniform] * 2, "block": [uniform] * 3}[rule]
    assert replay(p, Draft.chain([1, 1], probs=probs), rule, numbers) == Verdict([], 2, is_bonus=False)


def test_a_residual_of_nothing_is_p_itself() -> None:
    p = torch.tensor([0.25, 0.0, 0.75])
    assert torch.equal(residual(p, None, p.clone()), p)
    assert torch.equal(residual(p[[2, 0]], torch.tensor([2, 0]), p), p[[2, 0]])
    assert torch.equal(residual(p * 0.5, None, p), p * 0.5)
    assert residual(p, None, torch.tensor([0.5, 0.0, 0.5])).tolist() == [0, 0, 1]


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize(("uniform", "token"), [(0.1, 0), (0.9, 1)])
def test_rounding_in_q_cannot_leave_nothing_to_draw_from(rule: str, uniform: float, token: int) -> None:
    """q adds up to a little more than 1: rejected by the last bit, with no residual anywhere."""
    p = Distribution(torch.tensor([[0.5, 0.5], [0.5, 0.5]]), None, 2)
    draft = Draft.chain([0], probs=torch.full((1, 2), 0.5 * (1 + 1e-6)))
    assert replay(p, draft, rule, [JUST_UNDER_1, uniform]) == Verdict([], token, is_bonus=False)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_cut_to_nothing_is_a_bonus_draw(rule: str) -> None:
    cut = prefix(Draft.chain([1, 2], probs=torch.full((2, 3), 1 / 3)), 0)
    p = Distribution(torch.tensor([[0.2, 0.5, 0.3]]), None, 3)
    assert replay(p, cut, rule, [0.6]) == Verdict([], 1, is_bonus=True)


def test_without_a_seed_auto_draws_and_with_one_it_is_keyed() -> None:
    p = Distribution(torch.tensor([[0.2, 0.5, 0.3]] * 2), None, 3)
    draft = Draft.chain([0], probs=torch.tensor([[0.9, 0.05, 0.05]]))
    assert replay(p, draft, "auto", [0.2, 0.1]) == Verdict([0], 0, is_bonus=True)
    seq = sequence([4, 4], SamplingParams(temperature=1.0, seed=8))
    seq.rng = Uniforms([])  # would fail if it were asked
    first, second = (coupled_token(*p.row(0), seq, position) for position in (2, 3))
    expected = Verdict([0], second, is_bonus=True) if first == 0 else Verdict([], first, is_bonus=False)
    assert verify(p, draft, seq) == expected
