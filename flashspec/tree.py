"""Draft geometry from ``parents`` alone: depths, paths, children. A chain is a tree with one child per node."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from flashspec.core import ROOT, Draft


def depths(parents: Seq[int]) -> list[int]:
    """Number of draft nodes above each node: 0 for a child of the last committed token."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent == ROOT else found[parent] + 1)
    return found


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


def prefix(draft: Draft, length: int) -> Draft:
    """The first ``length`` nodes, which is a tree again since ``parents[i] < i``."""
    if len(draft) <= length:
        return draft
    probs = None if draft.probs is None else draft.probs[:length]
    confidences = None if draft.confidences is None else draft.confidences[:length]
    return Draft(draft.tokens[:length], draft.parents[:length], probs, draft.drafter, confidences)
