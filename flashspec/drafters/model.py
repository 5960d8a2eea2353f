"""A small model of the same vocabulary guesses, token by token, with the request's own sampling parameters.

It drives any Target, so every backend's models can draft for every other's. It keeps a shadow of each sequence: the
committed tokens and its guesses beyond them; what the target rejected is rewound, never recomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashspec.core import EMPTY, Draft, Drafter, Sequence, Target
from flashspec.errors import ModelError
from flashspec.sampling import Distribution, coupled_token, distribution, draw, largest_probability

logger = logging.getLogger("flashspec")


@dataclass(slots=True)
class _Shadow:
    sequence: Sequence
    num_committed: int = 0  # tokens known to be the real sequence's
    probs: list[Tensor] = field(default_factory=list)  # of this round's guesses, [vocab] each
    confidences: list[float] = field(default_factory=list)


class ModelDrafter(Drafter):
    """Chains from a draft model.

    Args:
        target: the draft model.
        vocab_size: the served model's; padded vocabularies of sibling models differ.
    """

    name = "model"

    def __init__(self, target: Target, *, vocab_size: int) -> None:
        self.target = target
        self.vocab_size = vocab_size
        self._shadows: dict[str, _Shadow] = {}

    @property
    def forward_seconds(self) -> float:
        return self.target.forward_seconds

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Catch up with the committed tokens, then one batched forward for each draft position."""
        room = [self.target.max_length - len(seq) for seq in seqs]  # a draft model may have fewer positions
        lengths = [max(min(budget, space), 0) for budget, space in zip(budgets, room, strict=True)]
        shadows = {i: self._catch_up(seq) for i, seq in enumerate(seqs) if lengths[i] > 0}
        live = list(shadows)
        while live:
            batch = [shadows[i].sequence for i in live]
            scores = self.target.score(batch, [EMPTY] * len(batch))
            guessed = [i for i, score in zip(live, scores, strict=True) if self._guess(shadows[i], score.logits)]
            live = [i for i in guessed if self._goes_on(shadows[i], lengths[i])]
        return [self._draft(shadows.get(i)) for i in range(len(seqs))]

    def backlog(self, seq: Sequence) -> int:
        """Committed tokens that the draft model has not seen."""
        shadow = self._shadows.get(seq.id)
        return len(seq) - (shadow.num_committed if shadow is not None else 0)

    def forget(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq.id, None)
        if shadow is not None:
            self.target.forget(shadow.sequence)

    def _catch_up(self, seq: Sequence) -> _Shadow:
        shadow = self._shadows.get(seq.id)
        if shadow is None:
            copy = Sequence(seq.id, [], seq.num_prompt_tokens, seq.sampling, seq.choice, eos_tokens=seq.eos_tokens)
            copy.seed, copy.rng = seq.seed, seq.rng  # one stream of random numbers, each used once
            shadow = self._shadows[seq.id] = _Shadow(copy)
        mine, true = shadow.sequence.tokens, seq.tokens
        common = shadow.num_committed
        while common < min(len(mine), len(true)) and mine[common] == true[common]:
            common += 1
        self.target.rewind(shadow.sequence, min(common, len(true) - 1))
        mine[common:] = true[common:]
        shadow.num_committed = len(true)
        shadow.probs.clear()
        shadow.confidences.clear()
        return shadow

    def _guess(self, shadow: _Shadow, logits: Tensor) -> bool:
        """Append one guess; False where the draft model has none: its trouble must not become the request's."""
        seq = shadow.sequence
        self.target.keep(seq, [])
        try:
            q = distribution(fitted(logits, self.vocab_size), seq, EMPTY)
        except ModelError as error:
            logger.warning("the draft model cannot guess here, so nothing is drafted: %s", error)
            return False
        if self.rule is not None:
            shadow.confidences.append(_confidence(logits, q, seq))
        if seq.sampling.is_greedy:
            token = q.greedy_tokens()[0]
        elif seq.sampling.verification_rule == "coupled":
            token = coupled_token(*q.row(0), seq, len(seq))
        else:
            token = self._sampled(shadow, q)
        seq.tokens.append(token)
        return True

    def _sampled(self, shadow: _Shadow, q: Distribution) -> int:
        token = draw(*q.row(0), shadow.sequence.rng.random())
        shadow.probs.append(q.dense()[0])
        return token

    def _goes_on(self, shadow: _Shadow, length: int) -> bool:
        seq = shadow.sequence  # of the request's own id
        # the last guess is in the draft whatever it is; that nothing can follow it is a fact of the prefix
        if len(seq) - shadow.num_committed >= length or seq.tokens[-1] in seq.eos_tokens:
            return False
        return self.rule is None or self.rule.worth(seq, [*shadow.confidences, None])

    def _draft(self, shadow: _Shadow | None) -> Draft:
        if shadow is None:
            return EMPTY
        probs = torch.stack(shadow.probs) if shadow.probs else None
        tokens = shadow.sequence.tokens[shadow.num_committed :]
        return Draft.chain(tokens, probs=probs, drafter=self.name, confidences=list(shadow.confidences) or None)


def _confidence(logits: Tensor, q: Distribution, seq: Sequence) -> float:
    """The largest probability: of q, or, where q is one-hot, of the draft model's own distribution."""
    if not seq.sampling.is_greedy:
        return float(q.probs.max())
    return largest_probability(logits[-1])


def fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """[1, vocab_size]: padding entries cut off, or missing ones impossible."""
    missing = vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
