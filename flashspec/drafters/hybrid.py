"""Two drafters for one text: guesses that cost nothing where they are sure, a draft model's where they are not.

It knows that one of the two is free and the other is not; which is better at a step is the engine's controller's to
say. A drafter that is not asked costs nothing: a draft model catches up later, in one forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from typing import Protocol, cast

from flashspec.core import EMPTY, Draft, Drafter, Score, Sequence, StoppingRule, Verdict
from flashspec.prefixes import PrefixStore

SURE = 0.7  # with a fixed draft length: mean confidence from which a free draft is taken


class HybridRule(StoppingRule, Protocol):
    """What an engine's controller says about two drafters."""

    quick: StoppingRule
    slow: StoppingRule

    def slow_budgets(self, seqs: Seq[Sequence], drafts: Seq[Draft], limits: Seq[int]) -> list[int]:
        """What the slow drafter may draft for each sequence, given the quick one's drafts; 0: the quick one's stays."""
        ...


class HybridDrafter(Drafter):
    """The better of two drafters at each step and for each sequence.

    Args:
        quick: costs next to nothing, knows how sure it is.
        slow: a draft model, say.
    """

    name = "hybrid"

    def __init__(self, quick: Drafter, slow: Drafter) -> None:
        self.quick, self.slow = quick, slow
        self.needs_hidden = quick.needs_hidden or slow.needs_hidden
        self.feature_layers = slow.feature_layers or quick.feature_layers
        self._rule: HybridRule | None = None

    @property
    def rule(self) -> StoppingRule | None:
        return self._rule

    @rule.setter
    def rule(self, rule: StoppingRule | None) -> None:
        """A HybridRule has one for each; any other is both drafters'."""
        self._rule = cast(HybridRule, rule) if hasattr(rule, "slow_budgets") else None
        self.quick.rule = rule if self._rule is None else self._rule.quick
        self.slow.rule = rule if self._rule is None else self._rule.slow

    @property
    def prefixes(self) -> PrefixStore | None:
        held: PrefixStore | None = self.slow.prefixes
        return held

    @prefixes.setter
    def prefixes(self, store: PrefixStore | None) -> None:
        self.quick.prefixes = self.slow.prefixes = store

    @property
    def forward_seconds(self) -> float:
        """Of the slow drafter's network, so far."""
        return float(getattr(self.slow, "forward_seconds", 0.0))

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        drafts = self.quick.propose(seqs, budgets)
        drafts = [EMPTY if seq.drafter == self.slow.name else draft for seq, draft in zip(seqs, drafts, strict=True)]
        if self._rule is not None:
            left = self._rule.slow_budgets(seqs, drafts, budgets)
        else:
            left = [0 if _is_sure(draft) else budget for draft, budget in zip(drafts, budgets, strict=True)]
        left = [0 if seq.drafter == self.quick.name else budget for seq, budget in zip(seqs, left, strict=True)]
        if not any(left):
            return drafts
        slower = self.slow.propose(seqs, left)
        return [slow if budget else quick for quick, slow, budget in zip(drafts, slower, left, strict=True)]

    def backlog(self, seq: Sequence) -> int:
        return self.slow.backlog(seq)

    def expect(self, num_rows: int, piece: int | None) -> None:
        self.quick.expect(num_rows, piece)
        self.slow.expect(num_rows, piece)

    def resumable(self, tokens: Seq[int]) -> int:
        return min(self.quick.resumable(tokens), self.slow.resumable(tokens))

    def predict(self, seq_id: str, tokens: Seq[int]) -> None:
        self.quick.predict(seq_id, tokens)
        self.slow.predict(seq_id, tokens)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], scores: Seq[Score]) -> None:
        self.quick.observe(seqs, drafts, verdicts, scores)
        self.slow.observe(seqs, drafts, verdicts, scores)

    def forget(self, seq: Sequence) -> None:
        self.quick.forget(seq)
        self.slow.forget(seq)


def _is_sure(draft: Draft) -> bool:
    confidences = draft.confidences or []
    return bool(confidences) and math.fsum(confidences) / len(confidences) >= SURE
