"""From p and a draft to a verdict: which nodes are accepted, and the token of the target's own after them.

Three rules, all exact, all over trees with a chain as the special case. p is a ``Distribution`` with row 0 at the
context and row i + 1 after node i. This module does not know where p came from or who guessed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashspec.core import ROOT, Draft, Sequence, Verdict
from flashspec.sampling import Distribution, coupled_token, draw
from flashspec.tree import children


def verify(p: Distribution, draft: Draft, seq: Sequence) -> Verdict:
    """The verdict on one sequence's draft, by the rule its sampling parameters ask for.

    Greedy p is one-hot, where every rule comes to the same: accept while equal.
    """
    if seq.sampling.is_greedy:
        tokens = p.greedy_tokens()
        return walk(draft, lambda row, depth: tokens[row])
    rule = seq.sampling.verification_rule
    if rule == "coupled":
        return walk(draft, lambda row, depth: coupled_token(*p.row(row), seq, len(seq) + depth))
    if rule == "block" and draft.probs is not None and draft.is_chain:
        return block(p, draft, seq)
    return rejection(p, draft, seq)


def walk(draft: Draft, choose: Callable[[int, int], int]) -> Verdict:
    """The target chooses (``choose(row, depth)``); descend while a child holds what it chose.

    For deterministic children this is, in law, rejection sampling with the residual: the chance of descending is
    the children's summed p.
    """
    below = children(draft.parents)
    accepted: list[int] = []
    node = ROOT
    while True:
        token = choose(node + 1, len(accepted))
        match = [child for child in below.get(node, ()) if draft.tokens[child] == token]
        if not match:
            return Verdict(accepted, token, is_bonus=node not in below)
        node = match[0]
        accepted.append(node)


def rejection(p: Distribution, draft: Draft, seq: Sequence) -> Verdict:
    """Accept x with min(1, p(x)/q(x)); after each rejected sibling p becomes the residual max(p - q, 0).

    Source: Leviathan et al. 2023 and Chen et al. 2023 for chains; SpecInfer (Miao et al. 2024) for siblings, with q
    of each child given its earlier siblings.
    """
    if draft.probs is None:  # one-hot q: the same in law, without a number drawn for each node
        return walk(draft, lambda row, depth: draw(*p.row(row), seq.rng.random()))
    below = children(draft.parents)
    first_p = p.prob([parent + 1 for parent in draft.parents], draft.tokens)
    q = _drawn_probs(draft)
    accepted: list[int] = []
    node = ROOT
    while node in below:
        weights, ids = p.row(node + 1)
        for nth, child in enumerate(below[node]):
            weight = first_p[child] if nth == 0 else _weight(weights, ids, draft.tokens[child])
            if seq.rng.random() * q[child] < weight:
                accepted.append(child)
                node = child
                break
            weights = residual(weights, ids, draft.probs[child])
        else:
            return Verdict(accepted, draw(weights, ids, seq.rng.random()), is_bonus=False)
    return Verdict(accepted, draw(*p.row(node + 1), seq.rng.random()), is_bonus=True)


def block(p: Distribution, draft: Draft, seq: Sequence) -> Verdict:
    """Block verification of a chain: the longest prefix that passes, even past an earlier failure.

    P_0 = 1; P_i = min(1, P_{i-1} p(x_i)/q(x_i)); for i < n, Z_i = sum max(P_i p - q, 0) at prefix i and
    h_i = Z_i / (Z_i + 1 - P_i); h_n = P_n. tau is the LARGEST i with u_i <= h_i; then a draw from
    max(P_tau p - q, 0), or the bonus.

    Source: Sun et al., Block Verification Accelerates Speculative Decoding, ICLR 2025 (arXiv 2403.10444).
    """
    assert draft.probs is not None
    n = len(draft)
    p_tokens, q_tokens = p.prob(list(range(n)), draft.tokens), _drawn_probs(draft)
    tau, best, running = 0, 1.0, 1.0
    for i in range(1, n + 1):
        running = min(1.0, running * p_tokens[i - 1] / q_tokens[i - 1]) if q_tokens[i - 1] > 0 else 0.0
        if i < n:
            weights, ids = p.row(i)
            excess = float(_excess(weights * running, ids, draft.probs[i]).sum(dtype=torch.float64))
            slack = excess + (1 - running)
            chance = excess / slack if slack > 0 else 1.0
        else:
            chance = running
        if seq.rng.random() <= chance and chance > 0:
            tau, best = i, running
    accepted = list(range(tau))
    weights, ids = p.row(tau)
    if tau < n:
        weights = residual(weights * best, ids, draft.probs[tau])
    return Verdict(accepted, draw(weights, ids, seq.rng.random()), is_bonus=tau == n)


def residual(weights: Tensor, ids: Tensor | None, q: Tensor) -> Tensor:
    """max(p - q, 0), normalised, on p's support [support]; p itself where nothing is left, equal up to rounding.

    Args:
        weights: p, or P_tau p for block verification. [support]
        q: the draft's distribution over the vocabulary. [vocab]
    """
    rest = _excess(weights, ids, q)
    mass = rest.sum()
    return rest / mass if float(mass) > 0 else weights


def _excess(weights: Tensor, ids: Tensor | None, q: Tensor) -> Tensor:
    return (weights - (q if ids is None else q[ids])).clamp_(min=0)


def _weight(weights: Tensor, ids: Tensor | None, token: int) -> float:
    return float(weights[token] if ids is None else (weights * (ids == token)).sum())


def _drawn_probs(draft: Draft) -> list[float]:
    """q(x_i) of every node, in one transfer to the host."""
    assert draft.probs is not None
    index = torch.tensor(draft.tokens, device=draft.probs.device)
    return draft.probs.gather(1, index[:, None]).squeeze(1).tolist()
