"""What the clock says: whether drafts pay, alone and in a batch.

It knows cost curves and measured acceptance; it runs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashspec.controller import LENGTHS
from flashspec.core import SpecStats
from flashspec.costs import CostCurve
from flashspec.doctor.drafts import ENOUGH, acceptance, too_few
from flashspec.doctor.finding import Finding
from flashspec.planner import WORTH

CHEAP = 0.05  # the cost of a good draft model's token, in target steps
GOOD = 0.8  # the acceptance of a good draft model
PRIOR = 4.0  # reached draft tokens that the mean rate counts as, where a position was reached rarely


@dataclass(frozen=True, slots=True)
class Outlook:
    """What drafts would bring on this machine: measured acceptance, and costs in seconds."""

    rates: list[float]  # of each position, given that those before it were accepted
    share: float  # of steps that have a draft
    cost: CostCurve
    draft_cost: CostCurve | None

    def ratio(self, rows: int = 1) -> float:
        """c: a draft token in units of a target step, for each of some rows."""
        return self.draft_cost(1, rows) / self.cost(1, rows) if self.draft_cost else 0.0

    def best(self, *, rows: int = 1, ratio: float | None = None, rate: float | None = None) -> tuple[int, float]:
        """The best draft length and its speedup; (0, 1.0) where none pays.

        Speedup(k) = (1 + f (s_1 + ... + s_k)) / (1 - f + f (cost(k + 1) + k c)), s_i the chance that the first i
        tokens are accepted, f the share of steps that have a draft.

        Args:
            ratio, rate: in place of the measured c and acceptance.
        """
        c = self.ratio(rows) if ratio is None else ratio
        best = (0, 1.0)
        for k in LENGTHS:
            rates = self.rates[:k] if rate is None else [rate] * k
            gain = sum(math.prod(rates[:i]) for i in range(1, k + 1))
            seconds = 1 - self.share + self.share * (self.cost.ratio(k + 1, rows) + k * c)
            best = max(best, (k, (1 + self.share * gain) / seconds), key=lambda pair: pair[1])
        return best


def outlook_of(stats: SpecStats, cost: CostCurve, draft_cost: CostCurve | None) -> Outlook:
    """A position that was rarely reached leans on the mean of all; those never reached are it."""
    reached, accepted = (
        counts + [0] * (max(LENGTHS) - len(counts))
        for counts in (stats.num_reached_per_pos, stats.num_accepted_tokens_per_pos)
    )
    mean = acceptance(stats)
    rates = [(hit + PRIOR * mean) / (tried + PRIOR) for hit, tried in zip(accepted, reached, strict=True)]
    return Outlook(rates, stats.num_drafts / max(stats.num_draftable_steps, 1), cost, draft_cost)


def check_speed(stats: SpecStats, outlook: Outlook) -> Finding:
    """The expected speedup at the best draft length, and what stands in its way."""
    if stats.num_draft_tokens < ENOUGH:
        return too_few("speed", stats)
    k, speedup = outlook.best()
    evidence = (
        f"expected {speedup:.2f} x with {k} draft tokens; checking 5 tokens costs {outlook.cost.ratio(5):.2f} steps"
    )
    if outlook.draft_cost is not None:
        drafting, plain = outlook.draft_cost(1) * 1e3, outlook.cost(1) * 1e3
        evidence += f", a draft token {outlook.ratio():.2f} ({drafting:.3g} ms of {plain:.3g})"
    if speedup >= WORTH:
        return Finding("speed", "ok", evidence)
    cheaper, better = outlook.best(ratio=CHEAP)[1], outlook.best(ratio=CHEAP, rate=GOOD)[1]
    if outlook.ratio() > CHEAP and cheaper >= WORTH:
        cause = f"the draft is too slow or too large: at {CHEAP:g} of a step it would bring {cheaper:.2f} x"
        remedy = "use a smaller draft model, or --drafter ngram"
    elif better >= WORTH:
        cause = f"the draft guesses too badly: with {GOOD:.0%} of its tokens accepted it would bring {better:.2f} x"
        remedy = "use a draft of the same family and training, or another drafter for this kind of text"
    else:
        cause = f"checking several tokens costs too much here: even {GOOD:.0%} acceptance would bring {better:.2f} x"
        remedy = "use --drafter none, a larger target, or hardware whose forwards are bound by memory"
    return Finding("speed", "attention", f"{evidence}; {cause}", remedy)


def check_batch(stats: SpecStats, outlook: Outlook, batch: int) -> Finding:
    """Whether drafts still pay when a forward serves many requests."""
    if batch == 1:
        return Finding("batch", "skipped", "one request at a time (see --batch)")
    if stats.num_draft_tokens < ENOUGH:
        return too_few("batch", stats)
    k, speedup = outlook.best(rows=batch)
    if k:
        return Finding("batch", "ok", f"at batch {batch}: {k} draft tokens, expected {speedup:.2f} x")
    first = next(rows for rows in range(1, batch + 1) if not outlook.best(rows=rows)[0])
    return Finding(
        "batch",
        "attention",
        f"at batch {batch} no draft length pays, from batch {first} on: checking 2 tokens of each costs "
        f"{outlook.cost.ratio(2, batch):.2f} steps of one, and {outlook.cost.ratio(2):.2f} at batch 1",
        f"batching fills the machine already: speculate below batch {first}" if first > 1 else "see speed",
    )
