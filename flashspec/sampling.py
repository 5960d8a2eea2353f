"""Logits, history and SamplingParams become the distribution p; random numbers become tokens.

The target's rows and the draft model's rows go through the same ``distribution``, node by node, in float32.
It does not know what is done with p: that is ``verify``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from flashspec.core import Draft, SamplingParams, Sequence
from flashspec.errors import ModelError
from flashspec.tree import depths, paths

NUCLEUS_START = 512  # ids looked at first for top-p; eight times as many while the nucleus is larger


@dataclass(frozen=True, slots=True)
class Distribution:
    """Rows of probabilities on their support: greedy needs one id a row, top-k needs k, neither the vocabulary."""

    probs: Tensor  # [rows, support] float32; 0 where a row's support is smaller
    ids: Tensor | None  # [rows, support] token ids; None: the whole vocabulary in order
    vocab_size: int

    def row(self, row: int) -> tuple[Tensor, Tensor | None]:
        """probs [support] and ids [support] of one row."""
        return self.probs[row], None if self.ids is None else self.ids[row]

    def prob(self, rows: Seq[int], tokens: Seq[int]) -> list[float]:
        """The probability of ``tokens[i]`` in row ``rows[i]``, in one transfer to the host."""
        if not tokens:
            return []
        device = self.probs.device
        row, token = torch.tensor(rows, device=device), torch.tensor(tokens, device=device)
        if self.ids is None:
            return self.probs[row, token].tolist()
        return (self.probs[row] * (self.ids[row] == token[:, None])).sum(-1).tolist()

    def dense(self) -> Tensor:
        """[rows, vocab] float32."""
        if self.ids is None:
            return self.probs
        # add, not assign: a greedy or padded row may name an id twice, once with probability 0
        return self.probs.new_zeros(len(self.probs), self.vocab_size).scatter_add_(1, self.ids, self.probs)

    def greedy_tokens(self) -> list[int]:
        """The likeliest token of each row; for temperature 0 the only one."""
        best = self.probs.argmax(-1, keepdim=True)
        return (best if self.ids is None else self.ids.gather(1, best)).squeeze(1).tolist()


def distribution(logits: Tensor, seq: Sequence, draft: Draft) -> Distribution:
    """What the user asked to sample from, at the context (row 0) and after every node (row i + 1).

    Args:
        logits: [n + 1, vocab] float32.
    """
    params = seq.sampling
    logits = adjust(logits, seq, draft)
    if params.is_greedy:
        best, ids = logits.max(-1, keepdim=True)
        _check_finite(best)
        return Distribution(torch.ones_like(best), ids, logits.shape[-1])
    return filtered(logits, params)


def largest_probability(logits: Tensor, temperature: float = 0.0) -> float:
    """Of softmax(logits [vocab] / temperature); greedy decoding counts as temperature 1. A measure of sureness."""
    row = logits / temperature if temperature not in (0.0, 1.0) else logits
    return float((row.max() - torch.logsumexp(row, -1)).exp())


def changes_logits(params: SamplingParams) -> bool:
    """Whether ``adjust`` may have something to do."""
    named = params.logit_bias or params.bad_tokens or params.allowed_tokens is not None or params.grammar is not None
    return bool(named or params.has_penalties or params.min_tokens)


def adjust(logits: Tensor, seq: Sequence, draft: Draft) -> Tensor:
    """Bias, bans, penalties and grammar, each row with its own history; the input is left alone."""
    params = seq.sampling
    if not changes_logits(params):
        return logits
    banned = set(params.bad_tokens)
    short = [seq.num_output_tokens < params.min_tokens]
    short += [seq.num_output_tokens + depth + 1 < params.min_tokens for depth in depths(draft.parents)]
    logits = logits.clone()
    vocab, device = logits.shape[-1], logits.device
    if params.has_penalties:
        logits = penalised(logits, seq, draft)
    if bias := {token: value for token, value in params.logit_bias.items() if 0 <= token < vocab}:
        logits[:, list(bias)] += torch.tensor(list(bias.values()), dtype=logits.dtype, device=device)
    if params.allowed_tokens is not None:
        mask = torch.ones(vocab, dtype=torch.bool, device=device)
        mask[[token for token in params.allowed_tokens if 0 <= token < vocab]] = False
        logits.masked_fill_(mask, -torch.inf)
    if bans := [token for token in banned if 0 <= token < vocab]:
        logits[:, bans] = -torch.inf
    if any(short) and (eos := [token for token in sorted(seq.eos_tokens) if token < vocab]):
        rows = torch.tensor([row for row, is_short in enumerate(short) if is_short], device=device)
        logits[rows[:, None], torch.tensor(eos, device=device)] = -torch.inf
    if seq.constraint is not None:
        logits.masked_fill_(~seq.constraint.allowed(seq.output, draft).to(device), -torch.inf)
    return logits


def penalised(logits: Tensor, seq: Sequence, draft: Draft) -> Tensor:
    """Repetition (prompt and output), presence and frequency (output) penalties, each row with its own history.

    Changes ``logits`` in place, and only at the few tokens that have occurred.
    """
    params, device = seq.sampling, logits.device
    output, tokens = Counter(seq.output), sorted({*seq.tokens, *draft.tokens})
    column = {token: index for index, token in enumerate(tokens)}
    counts = torch.tensor([output[token] for token in tokens], device=device).repeat(len(logits), 1)
    for row, path in enumerate(paths(draft.parents)):
        for node in path:
            counts[row + 1, column[draft.tokens[node]]] += 1
    ids = torch.tensor(tokens, device=device)
    values = logits[:, ids]
    if params.repetition_penalty != 1:
        prompt = set(seq.tokens[: seq.num_prompt_tokens])
        seen = (counts > 0) | torch.tensor([token in prompt for token in tokens], device=device)
        penalty = params.repetition_penalty
        values = torch.where(seen, torch.where(values > 0, values / penalty, values * penalty), values)
    logits[:, ids] = values - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    return logits


def filtered(logits: Tensor, params: SamplingParams) -> Distribution:
    """Temperature, top-k, top-p, min-p, renormalised: on the kept support where there is a cut, else dense."""
    vocab = logits.shape[-1]
    best = logits.max(-1, keepdim=True).values
    _check_finite(best)
    scaled = (logits - best) / max(params.temperature, 1e-30)  # at most 0, and 1e-30 is above float32's smallest
    ids: Tensor | None = None
    if 0 < params.top_k < vocab:
        scaled, ids = scaled.topk(params.top_k)
        probs = torch.softmax(scaled, -1)
    elif params.top_p < 1:
        probs, ids = _likeliest(scaled, params.top_p)
    else:
        probs = torch.softmax(scaled, -1)
    keep = probs >= params.min_p * probs.max(-1, keepdim=True).values
    if params.top_p < 1:  # rows are sorted here; the token that crosses top_p stays
        keep &= probs.cumsum(-1) - probs < max(params.top_p, 1e-30)  # a smaller number is 0 in float32
    probs = torch.where(keep, probs, 0.0)
    if ids is not None:
        width = int(keep.sum(-1).max())
        probs, ids = probs[:, :width], ids[:, :width]
    return Distribution(probs / probs.sum(-1, keepdim=True), ids, vocab)


def _likeliest(scaled: Tensor, mass: float) -> tuple[Tensor, Tensor]:
    """The likeliest tokens of each row, sorted, enough of them to hold ``mass``; probabilities over the vocabulary.

    Sorting a vocabulary of 150,000 takes longer than everything else in a step: look at a few hundred first.
    """
    vocab = scaled.shape[-1]
    total = scaled.logsumexp(-1, keepdim=True)
    count = min(NUCLEUS_START, vocab)
    while True:
        top, ids = scaled.topk(count)
        probs = (top - total).exp()
        if count == vocab or bool((probs.sum(-1) >= mass).all()):
            return probs, ids
        count = min(count * 8, vocab)


def _check_finite(best: Tensor) -> None:
    if not bool(best.isfinite().all()):
        raise ModelError(
            f"the model's logits are not finite (largest: {best.flatten().tolist()}): no token is left to choose; load "
            "it in float32, or relax allowed_tokens, bad_tokens, logit_bias and min_tokens"
        )


# Random numbers to tokens


def draw(probs: Tensor, ids: Tensor | None, uniform: float) -> int:
    """The token at ``uniform`` in [0, 1) of the inverse distribution function of weights ``probs`` [support]."""
    cdf = probs.double().cumsum(0)
    index = torch.searchsorted(cdf, cdf[-1] * uniform, right=True)
    # a product rounded up to the total must not step past the last token that can be drawn
    index = torch.minimum(index, torch.searchsorted(cdf, cdf[-1]))
    return int(index if ids is None else ids[index])


def coupled_token(probs: Tensor, ids: Tensor | None, seq: Sequence, position: int) -> int:
    """argmax(log p + g(seed, choice, position, token)): the same noise for whoever draws at this position.

    Source: the Gumbel-max trick with shared randomness (Daliri et al., arXiv 2408.07978). As argmin of
    exponential / p, which keeps its precision where it matters, near 0.
    """
    tokens = torch.arange(len(probs), device=probs.device) if ids is None else ids
    best = (exponential_noise(seq.seed, seq.choice, position, tokens) / probs).argmin()  # p = 0 gives +inf
    return int(tokens[best])


def exponential_noise(seed: int, choice: int, position: int, tokens: Tensor) -> Tensor:
    """Exponential variates [support] (float64) that are a pure function of (seed, choice, position, token).

    Source: SplitMix64's finaliser (Steele, Lea, Flood 2014) as a counter-based generator, in int64 arithmetic that
    wraps, so that every device gives the same bits.
    """
    digest = hashlib.blake2b(f"{seed}/{choice}/{position}".encode(), digest_size=8).digest()
    bits = tokens * _int64(0x9E3779B97F4A7C15) + int.from_bytes(digest, "little", signed=True)
    bits = (bits ^ _shift(bits, 30)) * _int64(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _int64(0x94D049BB133111EB)
    bits = bits ^ _shift(bits, 31)
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52  # inside (0, 1): 52 bits and a half are exact
    return -torch.log1p(-uniform)


def _int64(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def _shift(bits: Tensor, count: int) -> Tensor:
    """Logical right shift; torch's is arithmetic."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
