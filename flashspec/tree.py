"""Draft geometry from ``parents`` alone: depths, paths, children. A chain is a tree with one child per node."""

from __future__ import annotations

import heapq
from collections.abc import Sequence as Seq

from flashspec.core import ROOT, Draft


def depths(parents: Seq[int]) -> list[int]:
    """Number of draft nodes above each node: 0 for a child of the last committed token."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return found


def height(parents: Seq[int]) -> int:
    """Nodes on the longest path; what a chain's length is."""
    return max(depths(parents), default=-1) + 1


def paths(parents: Seq[int]) -> list[list[int]]:
    """The nodes from the root to each node, itself included."""
    found: list[list[int]] = []
    for node, parent in enumerate(parents):
        found.append([*(found[parent] if parent != ROOT else []), node])
    return found


def children(parents: Seq[int]) -> dict[int, list[int]]:
    """Node (ROOT included) -> its children in draft order."""
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


def best_first(levels: Seq[Seq[float]], budget: int) -> tuple[list[int], list[int]]:
    """The tree of at most ``budget`` nodes that is expected to have most of them accepted.

    Args:
        levels: chances of the candidates at each depth, likeliest first, whatever stands above them.

    Returns:
        parents, and each node's number among the candidates of its depth; the likeliest path first.
    """
    parents: list[int] = []
    ranks: list[int] = []
    # less its chance, order of finding, depth, rank, parent, the chance of the parent
    heap = [(-levels[0][0], 0, 0, 0, ROOT, 1.0)] if levels and levels[0] else []
    found = 0
    while heap and len(parents) < budget:
        chance, _, depth, rank, parent, above = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        if rank + 1 < len(levels[depth]):
            found += 1
            heapq.heappush(heap, (-above * levels[depth][rank + 1], found, depth, rank + 1, parent, above))
        if depth + 1 < len(levels) and levels[depth + 1]:
            found += 1
            heapq.heappush(heap, (chance * levels[depth + 1][0], found, depth + 1, 0, node, -chance))
    return parents, ranks


def best_chain(draft: Draft) -> Draft:
    """The path along each node's first child, for who cannot score trees. Drafters put the likeliest child first.

    Where siblings were drawn the first one was drawn from the whole distribution, so that its q stays true.
    """
    if draft.is_chain:
        return draft
    below = children(draft.parents)
    nodes: list[int] = []
    while first := below.get(nodes[-1] if nodes else ROOT):
        nodes.append(first[0])
    probs = None if draft.probs is None else draft.probs[nodes]
    confidences = None if draft.confidences is None else [draft.confidences[node] for node in nodes]
    return Draft.chain(
        [draft.tokens[node] for node in nodes], probs=probs, drafter=draft.drafter, confidences=confidences
    )


def prefix(draft: Draft, length: int) -> Draft:
    """The first ``length`` nodes, which is a tree again since ``parents[i] < i``."""
    if len(draft) <= length:
        return draft
    probs = None if draft.probs is None else draft.probs[:length]
    confidences = None if draft.confidences is None else draft.confidences[:length]
    return Draft(draft.tokens[:length], draft.parents[:length], probs, draft.drafter, confidences)
