"""Which of two drafters guesses at a step, and how far: two controllers behind one.

A step's worth is what it emits less what its seconds would bring otherwise: tokens - rate * seconds, with the rate at
which this text has been coming (maximising it at each step maximises tokens a second in the long run; the
renewal-reward theorem). The quick drafter's guesses are free and known before the slow one is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass

from flashspec.controller import MAX_TOKENS, Controller, Times
from flashspec.core import EMPTY, Draft, Sequence
from flashspec.costs import CostCurve

DECAY = 0.9  # of what a text's rate was, for each step


@dataclass(slots=True)
class _Pace:
    """How fast a text has been coming, by the costs its steps should have had."""

    tokens: float = 0.0
    seconds: float = 0.0
    rate: float = 0.0  # tokens a second of the whole batch, if all rows were like this one; of plain decoding at least

    def observe(self, tokens: int, seconds: float) -> None:
        self.tokens = DECAY * self.tokens + tokens
        self.seconds = DECAY * self.seconds + seconds


class HybridController:
    """The draft lengths of a ``HybridDrafter``; also its rule.

    Args:
        cost: of the target's forward.
        draft_cost: of the slow drafter's draft model.
        quick_name: the quick drafter's; its drafts carry it.
        max_tokens: the longest draft.
    """

    def __init__(
        self,
        cost: CostCurve,
        draft_cost: CostCurve | None = None,
        *,
        quick_name: str = "suffix",
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.quick = Controller(cost, max_tokens=max_tokens)
        self.slow = Controller(cost, draft_cost, max_tokens=max_tokens)
        self.max_tokens = max_tokens
        self.quick_name = quick_name
        self._paces: dict[str, _Pace] = {}
        self._slow_budgets: dict[str, int] = {}  # of this step
        self._rows = 1

    def budgets(self, seqs: Seq[Sequence], limits: Seq[int], backlogs: Seq[int]) -> list[int]:
        """What the quick drafter may try: anything, since its guesses are weighed one by one."""
        slow = self.slow.budgets(seqs, limits, backlogs)
        self._slow_budgets = {seq.id: budget for seq, budget in zip(seqs, slow, strict=True)}
        plain = len(seqs) / self.slow.costs.step(1, len(seqs))
        self._rows = len(seqs)
        for seq in seqs:
            pace = self._paces.setdefault(seq.id, _Pace())
            pace.rate = max(pace.tokens / pace.seconds * self._rows if pace.seconds else 0.0, plain)
            self.quick.aim(seq, pace.rate, rows=self._rows)
        return [min(limit, self.max_tokens) for limit in limits]

    def slow_budgets(self, seqs: Seq[Sequence], drafts: Seq[Draft], limits: Seq[int]) -> list[int]:
        """See ``drafters.hybrid.HybridRule``."""
        found = []
        for seq, draft in zip(seqs, drafts, strict=True):
            budget = self._slow_budgets.get(seq.id, 0)
            if budget and len(draft) and self._is_better(seq, draft, budget):
                self.slow.withdraw(seq)
                budget = self._slow_budgets[seq.id] = 0
            found.append(budget)
        return found

    def worth(self, seq: Sequence, confidences: Seq[float | None]) -> bool:
        return self.quick.worth(seq, confidences)

    def reason(self, seq: Sequence) -> str:
        return self.slow.reason(seq)

    def explain(self) -> str:
        return f"draft model: {self.slow.explain()}\n{self.quick_name}: {self.quick.explain()}"

    def observe(
        self,
        seq: Sequence,
        budget: int,
        draft: Draft,
        num_accepted: int,
        *,
        sureness: Callable[[], float] | None = None,
    ) -> None:
        slow = self._slow_budgets.get(seq.id, 0) if budget else 0
        self.slow.observe(seq, slow, draft if slow else EMPTY, num_accepted if slow else 0, sureness=sureness)
        if not slow:
            self.quick.observe(seq, budget, draft, num_accepted)
        seconds = self.slow.costs.step(1 + len(draft)) + (self.slow.costs.draft(len(draft)) if slow else 0.0)
        self._paces.setdefault(seq.id, _Pace()).observe(1 + num_accepted, seconds)

    def observe_times(self, drafts: Seq[Draft], budgets: Seq[int], backlogs: Seq[int], times: Times) -> None:
        slow = [
            0 if draft.drafter == self.quick_name else budget for draft, budget in zip(drafts, budgets, strict=True)
        ]
        self.slow.observe_times(drafts, slow, backlogs, times)
        self.quick.observe_times(drafts, [] if any(slow) else budgets, [0], times)

    def forget(self, seq: Sequence) -> None:
        self.quick.forget(seq)
        self.slow.forget(seq)
        self._paces.pop(seq.id, None)
        self._slow_budgets.pop(seq.id, None)

    def _is_better(self, seq: Sequence, draft: Draft, slow_budget: int) -> bool:
        rate = self._paces[seq.id].rate
        quick = self.quick.advantage_of_draft(seq, draft, rate=rate, rows=self._rows)
        return quick >= self.slow.advantage_of_length(seq, slow_budget, rate=rate, rows=self._rows)
