"""Draft geometry against naive definitions: walk up the parents, scan the whole array. Any tree through the engine."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ScriptedDrafter, ToyTarget, plain_loop
from hypothesis import given, settings, strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from flashspec.backends.hf import HFTarget
from flashspec.core import EMPTY, ROOT, Draft, SamplingParams, Score, Sequence, SpecStats, Verdict
from flashspec.drafters.model import ModelDrafter
from flashspec.engine import LocalEngine
from flashspec.tree import best_chain, best_first, children, depths, height, paths, prefix

PROPERTY = settings(derandomize=True, database=None, deadline=None, max_examples=150)
ENGINE = settings(PROPERTY, max_examples=60)


@st.composite
def parents_arrays(draw: st.DrawFn, max_nodes: int = 12) -> list[int]:
    """Any array with -1 <= parents[i] < i."""
    count = draw(st.integers(0, max_nodes))
    return [draw(st.integers(ROOT, node - 1)) for node in range(count)]


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    parents = draw(parents_arrays())
    tokens = draw(st.lists(st.integers(0, 4), min_size=len(parents), max_size=len(parents)))
    probs = torch.rand(len(parents), 5) if draw(st.booleans()) else None
    return Draft(tokens, parents, probs, draw(st.sampled_from(["ngram", "model"])))


def climb(parents: list[int], node: int) -> list[int]:
    """The nodes met on the way up, turned round."""
    met = []
    while node != ROOT:
        met.append(node)
        node = parents[node]
    return met[::-1]


@PROPERTY
@given(parents_arrays())
def test_depths_and_paths_are_the_way_up(parents: list[int]) -> None:
    ways = [climb(parents, node) for node in range(len(parents))]
    assert paths(parents) == ways
    assert depths(parents) == [len(way) - 1 for way in ways]


@PROPERTY
@given(parents_arrays())
def test_children_are_the_nodes_that_name_their_parent(parents: list[int]) -> None:
    nodes = range(len(parents))
    named = {parent: [node for node in nodes if parents[node] == parent] for parent in [ROOT, *nodes]}
    assert children(parents) == {parent: below for parent, below in named.items() if below}


@PROPERTY
@given(drafts(), st.integers(0, 14))
def test_prefix_keeps_the_first_nodes_whole(draft: Draft, length: int) -> None:
    cut = prefix(draft, length)
    assert (cut.tokens, cut.parents) == (draft.tokens[:length], draft.parents[:length])
    assert cut.drafter == draft.drafter
    assert paths(cut.parents) == paths(draft.parents)[:length]  # a tree again: no kept path loses a node
    if draft.probs is None:
        assert cut.probs is None
    else:
        assert cut.probs is not None
        assert torch.equal(cut.probs, draft.probs[:length])


@PROPERTY
@given(drafts())
def test_the_best_chain_follows_first_children(draft: Draft) -> None:
    nodes: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent == (nodes[-1] if nodes else ROOT):
            nodes.append(node)
    chain = best_chain(draft)
    assert chain.is_chain
    assert (chain.tokens, chain.drafter) == ([draft.tokens[node] for node in nodes], draft.drafter)
    assert (chain.probs is None) == (draft.probs is None)
    assert chain.probs is None or draft.probs is None or torch.equal(chain.probs, draft.probs[nodes])
    sure = Draft(draft.tokens, draft.parents, None, "x", [node / 20 for node in range(len(draft))])
    assert best_chain(sure).confidences == [node / 20 for node in nodes]


@PROPERTY
@given(parents_arrays())
def test_is_chain_means_one_path_through_every_node_in_order(parents: list[int]) -> None:
    nodes = list(range(len(parents)))
    assert Draft([0] * len(parents), parents).is_chain == (not nodes or climb(parents, nodes[-1]) == nodes)


@PROPERTY
@given(st.lists(st.integers(0, 9), max_size=12))
def test_chain_puts_each_token_below_the_one_before(tokens: list[int]) -> None:
    probs = torch.rand(len(tokens), 10)
    draft = Draft.chain(tuple(tokens), probs=probs, drafter="model")
    assert draft.tokens == tokens
    assert draft.probs is probs
    assert draft.drafter == "model"
    assert draft.is_chain
    assert len(draft) == len(tokens)
    assert [[draft.tokens[node] for node in path] for path in paths(draft.parents)] == [
        tokens[: end + 1] for end in range(len(tokens))
    ]


def test_one_tree_by_hand() -> None:
    """
      root
     0    1
    2 3    4
    5
    """
    parents = [ROOT, ROOT, 0, 0, 1, 2]
    assert depths(parents) == [0, 0, 1, 1, 1, 2]
    assert paths(parents) == [[0], [1], [0, 2], [0, 3], [1, 4], [0, 2, 5]]
    assert children(parents) == {ROOT: [0, 1], 0: [2, 3], 1: [4], 2: [5]}
    assert not Draft([7] * 6, parents).is_chain
    assert prefix(Draft([7] * 6, parents), 1) == Draft([7], [ROOT])


def test_the_empty_draft() -> None:
    assert Draft.chain([]) == EMPTY
    assert EMPTY.is_chain
    assert (depths([]), paths([]), children([])) == ([], [], {})


@PROPERTY
@given(parents_arrays())
def test_height_is_the_longest_way_up(parents: list[int]) -> None:
    assert height(parents) == max((len(climb(parents, node)) for node in range(len(parents))), default=0)


# the best tree of a size

Place = tuple[int, ...]  # a node by the ranks of the candidates from the root to it
Levels = list[list[float]]


@st.composite
def candidates(draw: st.DrawFn) -> Levels:
    """Chances at each depth, likeliest first, ties and impossible ones among them."""
    chance = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1))
    return [sorted(draw(st.lists(chance, max_size=3)), reverse=True) for _ in range(draw(st.integers(0, 4)))]


def worth(levels: Levels, place: Place) -> float:
    """The chance of a path."""
    return math.prod(levels[depth][rank] for depth, rank in enumerate(place))


def may_join(levels: Levels, tree: frozenset[Place], place: Place) -> bool:
    """Whether there is such a candidate, and its parent and the next likelier sibling are in the tree."""
    *above, rank = place
    exists = len(place) <= len(levels) and rank < len(levels[len(above)])
    return exists and (not above or tuple(above) in tree) and (rank == 0 or (*above, rank - 1) in tree)


def trees_of(levels: Levels, size: int) -> set[frozenset[Place]]:
    """All trees of so many nodes, or of as many as there are."""
    trees = {frozenset[Place]()}
    for _ in range(size):
        longer = {
            tree | {place}
            for tree in trees
            for above in [(), *tree]
            for rank in range(3)
            if (place := (*above, rank)) not in tree and may_join(levels, tree, place)
        }
        trees = longer or trees
    return trees


@PROPERTY
@given(candidates(), st.integers(0, 6))
def test_no_tree_of_its_size_is_expected_to_have_more_accepted(levels: Levels, budget: int) -> None:
    parents, ranks = best_first(levels, budget)
    places = [tuple(ranks[node] for node in climb(parents, at)) for at in range(len(parents))]
    assert frozenset(places) in trees_of(levels, budget)
    most = max(sum(worth(levels, place) for place in tree) for tree in trees_of(levels, budget))
    assert sum(worth(levels, place) for place in places) == pytest.approx(most, abs=1e-12)
    gains = [worth(levels, place) for place in places]
    assert gains == sorted(gains, reverse=True), "the likeliest path comes first"


# any tree through the whole engine

VOCAB = 12
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.3, "frequency_penalty": 0.2}
KINDS = {
    "greedy": SamplingParams(max_tokens=18),
    "greedy, penalties": SamplingParams(max_tokens=15, **PENALTIES, min_tokens=6),  # type: ignore[arg-type]
    "coupled": SamplingParams(max_tokens=16, temperature=1.0, seed=3),
    "coupled, cut": SamplingParams(max_tokens=13, temperature=1.2, seed=4, top_k=7, top_p=0.9, **PENALTIES),  # type: ignore[arg-type]
}


class Scribbler(ScriptedDrafter):
    """Trees of any shape: right tokens at some nodes, siblings that say the same, more nodes than were asked for."""

    def __init__(self, plans: list[list[int]], vocab_size: int, seed: int, most: int) -> None:
        super().__init__(self._tree)
        self.plans, self.vocab_size, self.most = plans, vocab_size, most
        self.rng = random.Random(seed)
        self.seen: list[tuple[Draft, Verdict]] = []

    def _tree(self, tokens: list[int], budget: int) -> Draft:
        plan = next(plan for plan in self.plans if plan[: len(tokens)] == tokens)
        right, deep = self.rng.choice([0.0, 0.5, 0.8, 1.0]), self.rng.choice([0.0, 0.7])
        parents = [
            node - 1 if self.rng.random() < deep else self.rng.randrange(ROOT, node)
            for node in range(self.rng.randint(0, self.most))
        ]
        return Draft([self._token(plan, len(tokens) + depth, right) for depth in depths(parents)], parents)

    def _token(self, plan: list[int], position: int, right: float) -> int:
        if position < len(plan) and self.rng.random() < right:
            return plan[position]
        return self.rng.randrange(min(self.vocab_size, 4))

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], scores: Seq[Score]) -> None:
        self.seen += zip(drafts, verdicts, strict=True)


@cache
def tiny_llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=7,
    )  # fmt: skip
    return HFTarget(LlamaForCausalLM(config).eval())


@cache
def toy_target() -> Any:
    return ToyTarget(VOCAB, eos=[7])


PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5, 6, 5, 9]]


@cache
def plain(is_real: bool, kind: str) -> list[list[int]]:
    """What the plain loop makes of each prompt."""
    target = tiny_llama() if is_real else toy_target()

    def logits(context: Seq[int]) -> np.ndarray:
        found: np.ndarray = target.plain_logits(context).numpy() if is_real else target.logits(context)
        return found

    return [plain_loop(logits, prompt, KINDS[kind], eos=[7]) for prompt in PROMPTS]


@pytest.mark.parametrize("is_real", [False, True], ids=["toy", "llama"])
def test_any_tree_leaves_the_plain_loops_tokens(is_real: bool) -> None:
    """In batches of unequal prompts and parameters, one after the other on one target."""
    target, kinds, lengths = tiny_llama() if is_real else toy_target(), Counter[str](), Counter[int]()

    @(ENGINE if not is_real else settings(ENGINE, max_examples=30))
    @given(
        seed=st.integers(0, 2**32), most=st.integers(1, 14), k=st.integers(1, 9),
        each=st.lists(st.sampled_from(list(KINDS)), min_size=3, max_size=3),
        rows=st.permutations(range(3)), max_batch=st.integers(1, 3),
    )  # fmt: skip
    def check(seed: int, most: int, k: int, each: list[str], rows: list[int], max_batch: int) -> None:
        expected = [plain(is_real, kind)[row] for kind, row in zip(each, rows, strict=True)]
        prompts = [PROMPTS[row] for row in rows]
        whole = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
        drafter = Scribbler(whole, target.vocab_size, seed, most)
        engine = LocalEngine(target, drafter, num_speculative_tokens=k, max_batch=max_batch)
        results = engine.generate(prompts, [KINDS[kind] for kind in each])
        assert [result.tokens for result in results] == expected
        kinds.update(kind for result in results for kind in result.kinds)
        lengths.update(len(verdict.accepted) for _, verdict in drafter.seen)

    check()
    assert min(kinds[kind] for kind in ("accepted", "recovered", "bonus")) > 50, kinds
    assert sum(count for length, count in lengths.items() if length > 2) > 20, "paths deep inside of trees"


def test_a_target_that_takes_no_trees_gets_chains() -> None:
    target: Any = ToyTarget(VOCAB, eos=[7])
    target.supports_trees = False
    params = KINDS["coupled"]
    plans = [[*prompt, *plan] for prompt, plan in zip(PROMPTS, plain(False, "coupled"), strict=True)]
    drafter = Scribbler(plans, VOCAB, seed=5, most=9)
    results = LocalEngine(target, drafter, num_speculative_tokens=9).generate(PROMPTS, params)
    assert [result.tokens for result in results] == plain(False, "coupled")
    assert all(draft.is_chain for draft, _ in drafter.seen)
    assert sum(len(verdict.accepted) > 1 for _, verdict in drafter.seen) > 2


# trees of a draft model


@cache
def stranger() -> Any:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.3,
    )  # fmt: skip
    return HFTarget(LlamaForCausalLM(config).eval())


@pytest.mark.parametrize(("width", "siblings"), [(2, "top"), (3, "top"), (3, "drawn")])
@pytest.mark.parametrize("is_itself", [False, True], ids=["stranger", "itself"])
@pytest.mark.parametrize("kind", KINDS)
def test_trees_of_a_draft_model_leave_the_plain_loops_tokens(
    kind: str, is_itself: bool, width: int, siblings: Any
) -> None:
    draft: Any = HFTarget(tiny_llama().model) if is_itself else stranger()
    drafter = ModelDrafter(draft, vocab_size=61, width=width, siblings=siblings)
    engine = LocalEngine(tiny_llama(), drafter, num_speculative_tokens=6)
    results = engine.generate(PROMPTS, KINDS[kind])
    assert [result.tokens for result in results] == plain(True, kind)
    if is_itself:
        assert engine.stats().acceptance_by_position[0] == 1, "its first guess is the target's own choice"


def test_trees_of_a_draft_model_end_with_its_positions() -> None:
    drafter = ModelDrafter(HFTarget(tiny_llama().model), vocab_size=61, width=4)
    engine = LocalEngine(tiny_llama(), drafter, num_speculative_tokens=12)
    result = engine.generate([[1] * 30], [SamplingParams(max_tokens=99, ignore_eos=True)])[0]
    assert result.finish_reason == "length"
    assert len(result.tokens) == 34


# statistics by depth


def test_a_tree_counts_by_its_height() -> None:
    """Six nodes on two paths of three, of which one, three and none were accepted."""
    stats = SpecStats()
    for num_accepted in (1, 3, 0):
        stats.record(6, num_accepted, height=3)
    assert (stats.num_accepted_tokens_per_pos, stats.num_reached_per_pos) == ([2, 1, 1], [3, 2, 1])
    assert stats.acceptance_by_position == [2 / 3, 1 / 2, 1]
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (4 / 18, 1 + 4 / 3)


def test_statistics_count_trees_by_depth() -> None:
    """Through the engine, against what the drafter saw of drafts and verdicts."""
    target, params = toy_target(), SamplingParams(max_tokens=40, ignore_eos=True)
    plans = [[*prompt, *plain_loop(target.logits, prompt, params)] for prompt in PROMPTS]
    drafter = Scribbler(plans, VOCAB, seed=1, most=8)
    engine = LocalEngine(target, drafter, num_speculative_tokens=8)
    engine.generate(PROMPTS, params)
    stats, seen = engine.stats(), [(draft, verdict.accepted) for draft, verdict in drafter.seen if len(draft)]
    longest = [max(len(climb(draft.parents, node)) for node in range(len(draft))) for draft, _ in seen]
    lengths = [len(accepted) for _, accepted in seen]
    most = max(lengths)
    assert most > 3
    assert stats.num_accepted_tokens_per_pos == [sum(n > depth for n in lengths) for depth in range(most)]
    for depth, count in enumerate(stats.num_reached_per_pos):
        assert count == sum(n >= depth and height > depth for n, height in zip(lengths, longest, strict=True))
    assert stats.num_drafts == len(seen)
    assert stats.num_draft_tokens == sum(len(draft) for draft, _ in seen)
    assert stats.num_accepted_tokens == sum(lengths)
    assert sum(stats.draft_lengths.values()) == stats.num_steps == len(drafter.seen)


def test_what_lies_behind_an_end_counts_nowhere_in_a_tree() -> None:
    """The end is the third node of the right path, and one more would have been accepted."""
    target: Any = ToyTarget(VOCAB)
    params = SamplingParams(max_tokens=8)
    plans = [[1, first, *plain_loop(target.logits, [1, first], params)] for first in range(VOCAB)]
    plan = next(plan for plan in plans if plan[5] not in plan[2:5])
    target.eos_tokens = frozenset({plan[5]})

    def tree(tokens: list[int], budget: int) -> Draft:
        right = plan[len(tokens) : len(tokens) + 4]
        wrong = [(token + 1) % VOCAB for token in right]
        return Draft([*right, *wrong], [ROOT, 0, 1, 2, ROOT, 0, 1, 2])

    stats = LocalEngine(target, ScriptedDrafter(tree), num_speculative_tokens=8).generate(plan[:2], params).stats
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_emitted_tokens) == (1, 3, 4)
    assert stats.num_accepted_tokens_per_pos == stats.num_reached_per_pos == [1, 1, 1]
