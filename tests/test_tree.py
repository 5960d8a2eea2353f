"""Draft geometry against naive definitions: walk up the parents, scan the whole array."""

from __future__ import annotations

import torch
from hypothesis import given, settings, strategies as st

from flashspec.core import EMPTY, ROOT, Draft
from flashspec.tree import children, depths, paths, prefix

PROPERTY = settings(derandomize=True, database=None, deadline=None, max_examples=150)


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
