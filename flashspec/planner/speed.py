"""Will drafting help: expected tokens of a step over its cost in plain decode steps, by formula or by measurement.

It knows formulas and cost curves; it runs nothing.

Source of the formula: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.8; their gamma is k here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from flashspec.controller import MAX_TOKENS
from flashspec.core import SpecStats
from flashspec.costs import CostCurve
from flashspec.errors import OptionError
from flashspec.scheduler import MOST_DRAFT_TOKENS

LONGEST = MAX_TOKENS  # draft tokens that a search for the best k considers
NEAR = 0.995  # of the best speedup
FLAT = CostCurve(((1, 1.0),))  # scoring more tokens costs no more: a machine that mostly waits for its memory


def check_acceptance(acceptance: float) -> None:
    """Raise OptionError for what is no probability."""
    if not 0 <= acceptance <= 1:  # NaN is not, either
        raise OptionError(f"acceptance is {acceptance:g}; it must be from 0 to 1 (0.7: 7 of 10 guesses are accepted)")


def check_cost_ratio(cost_ratio: float) -> None:
    """Raise OptionError for a draft step that takes less than no time."""
    if not 0 <= cost_ratio < math.inf:
        raise OptionError(
            f"cost ratio is {cost_ratio:g}; it must be a number from 0 (0.05: a draft step takes a twentieth of a "
            "plain decode step; 0: n-grams)"
        )


def check_k(k: int, *, most: int = MOST_DRAFT_TOKENS) -> None:
    """Raise OptionError for a draft length outside its range."""
    if not 0 <= k <= most:
        raise OptionError(f"num_speculative_tokens is {k}; it must be a whole number from 0 to {most}")


def expected_tokens(acceptance: float, k: int) -> float:
    """Tokens of a step that drafts k: 1 + a + ... + a^k, as guess i counts only if the first i are all accepted."""
    check_acceptance(acceptance)
    check_k(k)
    return math.fsum(acceptance**i for i in range(k + 1))


def expected_speedup(acceptance: float, cost_ratio: float, k: int) -> float:
    """Over plain decoding, where scoring k + 1 tokens costs the target what one costs.

    Args:
        acceptance: chance that a guess is accepted, given that those before it were.
        cost_ratio: a draft step in units of a plain decode step.
    """
    check_cost_ratio(cost_ratio)
    return expected_tokens(acceptance, k) / (1 + k * cost_ratio)


def best_k(acceptance: float, cost_ratio: float, *, longest: int = LONGEST) -> int:
    """The draft length of the largest expected speedup, 0 included, or a shorter one that is as good as NEAR."""
    return _shortest([expected_speedup(acceptance, cost_ratio, k) for k in range(longest + 1)])


def _shortest(speedups: Seq[float]) -> int:
    """A longer draft for a gain that nobody sees only costs, where drafts fail or other requests wait."""
    enough = NEAR * max(speedups)
    return next(k for k, speedup in enumerate(speedups) if speedup >= enough)


def break_even_acceptance(cost_ratio: float, k: int) -> float | None:
    """The acceptance at which k draft tokens neither win nor lose; None if no acceptance pays for them."""
    check_cost_ratio(cost_ratio)
    check_k(k)
    return acceptance_for(1 + k * cost_ratio, [1.0] * k)


def acceptance_for(tokens: float, reach: Seq[float]) -> float | None:
    """The constant acceptance at which a step emits so many tokens on average; None where no acceptance does.

    Args:
        reach: [i]: chance that a step drafts more than i guesses.
    """

    def emitted(acceptance: float) -> float:
        return 1 + math.fsum(chance * acceptance**i for i, chance in enumerate(reach, start=1))

    low, high = 0.0, 1.0
    if emitted(low) >= tokens or emitted(high) < tokens:
        return low if emitted(low) >= tokens else None
    while (middle := (low + high) / 2) not in (low, high):  # until they are neighbours
        low, high = (middle, high) if emitted(middle) < tokens else (low, middle)
    return high


# speed by measurement


@dataclass(frozen=True, slots=True)
class Step:
    """A speculative step; its times in units of a plain decode step."""

    tokens: float  # emitted for each sequence, on average
    draft: float
    verify: float
    sampling: float

    @property
    def cost(self) -> float:
        return self.draft + self.verify + self.sampling

    @property
    def speedup(self) -> float:
        return self.tokens / self.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """How far guesses hold and what steps cost; times in seconds, or in any other unit."""

    survival: tuple[float, ...]  # [i]: chance that a step accepts more than i guesses
    reach: tuple[float, ...]  # [i]: chance that a step drafts more than i guesses
    target: CostCurve
    draft: CostCurve | None = None  # the draft model's
    draft_extra: float = 0.0  # for each draft token, beyond the draft model's forward
    sampling: float = 0.0  # for each position scored

    @property
    def longest(self) -> int:
        return len(self.survival)

    def step(self, k: int, *, rows: int = 1) -> Step:
        """A step that drafts up to k tokens for each of some rows, which are padded to the longest draft.

        Raises:
            OptionError: k is beyond what was measured.
        """
        check_k(k, most=self.longest)
        longer = [1.0, *(1 - (1 - reach) ** rows for reach in self.reach[:k]), 0.0]  # [i]: some draft has i or more
        forward = sum((longer[i] - longer[i + 1]) * self.target(i + 1, rows) for i in range(k + 1))
        model = self.draft(1, rows) if self.draft is not None else 0.0
        drafted = sum(self.reach[:k])  # tokens of each row
        drafting = sum(longer[1:]) * model + rows * drafted * self.draft_extra
        unit = self.target(1, rows) + rows * self.sampling
        sampling = rows * (1 + drafted) * self.sampling
        return Step(1 + sum(self.survival[:k]), drafting / unit, forward / unit, sampling / unit)

    def best_k(self, *, rows: int = 1) -> int:
        """The draft length of the largest speedup, 0 included, or a shorter one that is as good as NEAR."""
        return _shortest([self.step(k, rows=rows).speedup for k in range(self.longest + 1)])

    def acceptance(self, k: int) -> float | None:
        """The constant acceptance that emits as many tokens as drafts of up to k do."""
        return acceptance_for(self.step(k).tokens, self.reach[:k])

    def break_even_acceptance(self, k: int, *, rows: int = 1) -> float | None:
        """See the function of this name; at these costs, and with drafts as frequent and long as these."""
        return acceptance_for(self.step(k, rows=rows).cost, self.reach[:k])

    def by_batch(self, batches: Seq[int]) -> dict[int, tuple[int, float]]:
        """Rows -> the best k and its speedup. Many rows fill the machine, and then every draft token costs."""
        best = {rows: self.best_k(rows=rows) for rows in batches}
        return {rows: (k, self.step(k, rows=rows).speedup) for rows, k in best.items()}


def constant(
    acceptance: float, target: CostCurve = FLAT, *, draft: CostCurve | None = None, longest: int = LONGEST
) -> Outlook:
    """Every guess is as likely to hold as every other, and drafts are as long as they may be."""
    check_acceptance(acceptance)
    check_k(longest)
    survival = tuple(acceptance**i for i in range(1, longest + 1))
    return Outlook(survival=survival, reach=(1.0,) * longest, target=target, draft=draft)


def by_formula(acceptance: float, cost_ratio: float, *, longest: int = LONGEST) -> Outlook:
    """The outlook whose steps have ``expected_speedup``."""
    check_cost_ratio(cost_ratio)
    draft = CostCurve(((1, cost_ratio),)) if cost_ratio else None
    return constant(acceptance, draft=draft, longest=longest)


def observed(stats: SpecStats, longest: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Survival and reach of an Outlook, from a run whose drafts had at most ``longest`` tokens.

    Over the steps that were allowed to draft, those near the end of an output included, whose drafts are cut short.
    """
    steps = max(stats.num_draftable_steps, 1)
    accepted = [*stats.num_accepted_tokens_per_pos, *[0] * longest][:longest]
    drafted = [sum(n for length, n in stats.draft_lengths.items() if int(length) > i) for i in range(longest)]
    return tuple(n / steps for n in accepted), tuple(n / steps for n in drafted)
