"""A small model of the same vocabulary guesses, token by token, with the request's own sampling parameters.

A chain, or a tree of its likeliest paths.

It drives any Target, so every backend's models can draft for every other's. It keeps a shadow of each sequence: the
committed tokens and its guesses beyond them; what the target rejected is rewound, never recomputed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashspec.core import EMPTY, READING, Draft, Drafter, Sequence, Target
from flashspec.drafters.growth import Growth, Siblings, Vocabulary, checked_width, shape_for
from flashspec.errors import ModelError
from flashspec.prefixes import available, keep, resume, shared
from flashspec.sampling import Distribution, coupled_token, distribution, draw, largest_probability

logger = logging.getLogger("flashspec")


@dataclass(slots=True)
class Shadow:
    """A sequence as the drafter knows it: the committed tokens, then this round's guesses."""

    sequence: Sequence  # what the draft model is fed, in its own ids
    view: Sequence  # the same in the served model's ids; one object where these are the same ids
    num_committed: int = 0  # tokens of ``view`` known to be the real sequence's
    probs: list[Tensor] = field(default_factory=list)  # of this round's guesses, [vocab] each
    confidences: list[float] = field(default_factory=list)


class ModelDrafter(Drafter):
    """Chains from a draft model. What a model of other ids does differently is in ``_room`` to ``_append``.

    Args:
        target: the draft model.
        vocab_size: the served model's; padded vocabularies of sibling models differ.
        width: nodes followed at each depth and guesses after each; 1 drafts chains.
        siblings: how guesses of a tree are chosen where the temperature is not 0, see ``growth``.

    Raises:
        OptionError: ``width`` out of range.
    """

    name = "model"

    def __init__(self, target: Target, *, vocab_size: int, width: int = 1, siblings: Siblings = "auto") -> None:
        self.target = target
        self.vocab_size = vocab_size
        self.width: int | None = checked_width(width)
        self.siblings = siblings
        self._shadows: dict[str, Shadow] = {}
        self._piece: int | None = None

    def expect(self, num_rows: int, piece: int | None) -> None:
        self._piece = piece
        if hasattr(self.target, "expected_rows"):
            self.target.expected_rows = num_rows

    @property
    def forward_seconds(self) -> float:
        return self.target.forward_seconds

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Catch up with the committed tokens, then one batched forward for each draft position."""
        pairs = zip(seqs, budgets, strict=True)
        lengths = [min(budget, self._room(seq)) if budget > 0 else 0 for seq, budget in pairs]
        shadows = {i: self._catch_up(seq) for i, seq in enumerate(seqs) if lengths[i] > 0}
        reading = {i for i, shadow in shadows.items() if self._reads(shadow.sequence)}
        for i in reading:
            shadows.pop(i)
        drafts = self._drafts(seqs, lengths, shadows)
        return [READING if i in reading else draft for i, draft in enumerate(drafts)]

    def _reads(self, seq: Sequence) -> bool:
        """Read a piece of a text that is too long to be read at once; False where there is no need to."""
        if self._piece is None or len(seq) - self.target.cached_length(seq) <= self._piece:
            return False
        self.target.read(seq, self._piece)
        return True

    def _drafts(self, seqs: Seq[Sequence], lengths: list[int], shadows: dict[int, Shadow]) -> list[Draft]:
        if self.width != 1 and self.target.supports_trees:
            trees = self._grown({i: (shadow, lengths[i]) for i, shadow in shadows.items()})
            return [trees.get(i, EMPTY) for i in range(len(seqs))]
        live = list(shadows)
        while live:
            batch = [shadows[i].sequence for i in live]
            scores = self.target.score(batch, [EMPTY] * len(batch))
            guessed = [i for i, score in zip(live, scores, strict=True) if self._guess(shadows[i], score.logits)]
            live = [i for i in guessed if self._goes_on(shadows[i], lengths[i])]
        return [self._draft(shadows.get(i)) for i in range(len(seqs))]

    def _grown(self, shadows: dict[int, tuple[Shadow, int]]) -> dict[int, Draft]:
        """A tree for each: one batched forward for each depth, over all that was followed so far."""
        vocabulary = Vocabulary(self.vocab_size)
        growths = {
            i: Growth(
                shadow.view, length, vocabulary, *shape_for(shadow.view, self.width, self.siblings), rule=self.rule
            )
            for i, (shadow, length) in shadows.items()
        }
        room = self.target.max_length
        while live := [
            i for i, growth in growths.items() if growth.frontier and len(growth.seq) + len(growth.followed) <= room
        ]:
            seqs = [shadows[i][0].sequence for i in live]
            scores = self.target.score(seqs, [growths[i].asked() for i in live])
            for i, seq, score in zip(live, seqs, scores, strict=True):
                self.target.keep(seq, [])
                self.target.rewind(seq, len(seq) - 1)  # the same context is scored again, with more below it
                growths[i].expand(self._served(score.logits[-len(growths[i].frontier) :]))
        return {i: growth.draft(self.name) for i, growth in growths.items()}

    def backlog(self, seq: Sequence) -> int:
        """Committed tokens that the draft model has not seen."""
        shadow = self._shadows.get(seq.id)
        if shadow is not None:
            return len(seq) - self._num_read(shadow)
        return len(seq) - (available(self.prefixes, self.target, seq, self._others()) if self.prefixes else 0)

    def forget(self, seq: Sequence) -> None:
        shadow = self._shadows.pop(seq.id, None)
        if shadow is not None:
            if self.prefixes is not None:  # its guesses are of no use to anybody else
                committed = shared(shadow.view.tokens, seq.tokens) if shadow.view is shadow.sequence else None
                keep(self.prefixes, self.target, shadow.sequence, limit=committed)
            self.target.forget(shadow.sequence)

    def _num_read(self, shadow: Shadow) -> int:
        """Tokens that need not be read before the next guess."""
        if shadow.view is shadow.sequence:  # what was taken in piecemeal may end before what is committed
            return min(shadow.num_committed, self.target.cached_length(shadow.sequence) + 1)
        return shadow.num_committed

    def _others(self) -> list[Sequence]:
        return [shadow.sequence for shadow in self._shadows.values()]

    def _catch_up(self, seq: Sequence) -> Shadow:
        shadow = self._shadow(seq)
        self._follow(shadow, seq)
        if self.prefixes is not None and not self.target.cached_length(shadow.sequence):
            resume(self.prefixes, self.target, shadow.sequence, self._others())
        shadow.num_committed = len(seq)
        shadow.probs.clear()
        shadow.confidences.clear()
        return shadow

    def _shadow(self, seq: Sequence) -> Shadow:
        if seq.id not in self._shadows:
            self._shadows[seq.id] = self._new_shadow(seq)
        return self._shadows[seq.id]

    def _room(self, seq: Sequence) -> int:
        """How many guesses fit: a draft model may have fewer positions."""
        return self.target.max_length - len(seq)

    def _new_shadow(self, seq: Sequence) -> Shadow:
        empty = empty_copy(seq)
        return Shadow(empty, empty)

    def _follow(self, shadow: Shadow, seq: Sequence) -> None:
        """Turn the shadow into the committed tokens, without what was guessed beyond them."""
        self._rewrite(shadow.sequence, shadow.num_committed, seq.tokens[shadow.num_committed :])

    def _rewrite(self, seq: Sequence, start: int, tokens: list[int]) -> None:
        """Let ``tokens`` follow the first ``start``; the draft model goes on from what they share with the old."""
        mine, common, end = seq.tokens, start, start + len(tokens)
        while common < min(len(mine), end) and mine[common] == tokens[common - start]:
            common += 1
        self.target.rewind(seq, min(common, end - 1))
        mine[common:] = tokens[common - start :]

    def _served(self, logits: Tensor) -> Tensor:
        """The draft model's logits [1, its vocabulary] over the served vocabulary, [1, vocab_size]."""
        return fitted(logits, self.vocab_size)

    def _append(self, shadow: Shadow, token: int) -> None:
        """Add a guess, a token of the served vocabulary."""
        shadow.sequence.tokens.append(token)

    def _guess(self, shadow: Shadow, logits: Tensor) -> bool:
        """Append one guess; False where the draft model has none: its trouble must not become the request's."""
        seq = shadow.view
        self.target.keep(shadow.sequence, [])
        try:
            logits = self._served(logits)
            q = distribution(logits, seq, EMPTY)
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
        self._append(shadow, token)
        return True

    def _sampled(self, shadow: Shadow, q: Distribution) -> int:
        token = draw(*q.row(0), shadow.view.rng.random())
        shadow.probs.append(q.dense()[0])
        return token

    def _goes_on(self, shadow: Shadow, length: int) -> bool:
        seq = shadow.view  # of the request's own id
        # the last guess is in the draft whatever it is; that nothing can follow it is a fact of the prefix
        if len(seq) - shadow.num_committed >= length or seq.tokens[-1] in seq.eos_tokens:
            return False
        return self.rule is None or self.rule.worth(seq, [*shadow.confidences, None])

    def _draft(self, shadow: Shadow | None) -> Draft:
        if shadow is None:
            return EMPTY
        probs = torch.stack(shadow.probs) if shadow.probs else None
        tokens = shadow.view.tokens[shadow.num_committed :]
        return Draft.chain(tokens, probs=probs, drafter=self.name, confidences=list(shadow.confidences) or None)


def empty_copy(seq: Sequence) -> Sequence:
    """The same request without its tokens."""
    copy = Sequence(seq.id, [], seq.num_prompt_tokens, seq.sampling, seq.choice, eos_tokens=seq.eos_tokens)
    copy.seed, copy.rng = seq.seed, seq.rng  # one stream of random numbers, each used once
    copy.constraint = seq.constraint
    return copy


def _confidence(logits: Tensor, q: Distribution, seq: Sequence) -> float:
    """The largest probability: of q, or, where q is one-hot, of the draft model's own distribution."""
    if not seq.sampling.is_greedy:
        return float(q.probs.max())
    return largest_probability(logits[-1])


def fitted(logits: Tensor, vocab_size: int) -> Tensor:
    """[1, vocab_size]: padding entries cut off, or missing ones impossible."""
    missing = vocab_size - logits.shape[-1]
    return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing else logits
