"""Will drafting help, and does it fit? Answers before anything is installed.

``speed`` and ``memory`` have the numbers; here they become a plan and its reasons, in sentences that hold only where
the numbers say so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from flashspec.planner.memory import MemoryPlan, WayOut
from flashspec.planner.speed import Outlook

WORTH = 1.05  # a speedup below this is lost in what differs from run to run
SELDOM = 0.3  # acceptance of a first guess below which there is little to win


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to run, what to expect of it, and why."""

    drafter: str  # "model", "ngram", or "none" where drafting does not pay
    num_speculative_tokens: int
    expected_speedup: float | None  # over plain decoding; None where the acceptance is not known
    memory: MemoryPlan | None = None
    why: list[str] = field(default_factory=list)


def make_plan(
    outlook: Outlook, *, drafter: str, k: int | None = None, rows: int = 1, memory: MemoryPlan | None = None
) -> Plan:
    """The best draft length, or what is to be expected of the one given.

    Args:
        drafter: "model" or "ngram".
        rows: sequences that run at once.
    """
    best = outlook.best_k(rows=rows)
    chosen = best if k is None else k
    speedup = outlook.step(chosen, rows=rows).speedup
    why = _reasons(outlook, chosen, best, rows)
    if speedup < WORTH:
        return Plan(drafter="none", num_speculative_tokens=0, expected_speedup=1.0, memory=memory, why=why)
    return Plan(drafter=drafter, num_speculative_tokens=chosen, expected_speedup=speedup, memory=memory, why=why)


def open_plan(
    outlook: Outlook, *, drafter: str, k: int | None = None, rows: int = 1, memory: MemoryPlan | None = None
) -> Plan:
    """Where costs are known and the acceptance is not: from which acceptance on drafting pays."""
    chosen = 1 if k is None else k
    why = [_break_even(outlook, chosen, rows) + "."]
    return Plan(drafter=drafter, num_speculative_tokens=chosen, expected_speedup=None, memory=memory, why=why)


def _reasons(outlook: Outlook, k: int, best: int, rows: int) -> list[str]:
    shown = k or 1  # why not even one
    if not any(outlook.reach):
        return ["The drafter had no guess at all."]
    step = outlook.step(shown, rows=rows)
    parts = f"draft {step.draft:.2f}, verify {step.verify:.2f}, sampling {step.sampling:.2f}"
    why = [
        f"With k = {shown} a step emits {step.tokens:.2f} tokens and costs {step.cost:.2f} plain steps ({parts}): "
        f"{step.speedup:.2f} x.",
        f"{_break_even(outlook, shown, rows)}; here it is {outlook.acceptance(shown) or 0:.0%}.",
    ]
    if outlook.reach[0] < 1:
        why.append(f"The drafter has a guess in {outlook.reach[0]:.0%} of the steps; in the others nothing is won.")
    if (first := outlook.survival[0] / outlook.reach[0]) < SELDOM:
        most = 1 + sum(outlook.survival)
        why.append(f"Only {first:.0%} of first guesses hold: even drafts that cost nothing would win {most:.2f} x.")
    if best != k:
        why.append(f"k = {best} would be better: {outlook.step(best, rows=rows).speedup:.2f} x.")
    elif best == outlook.longest and best:
        why.append(f"Drafts longer than {best} were not considered, and may be better still.")
    return why


def _break_even(outlook: Outlook, k: int, rows: int) -> str:
    pays_from = outlook.break_even_acceptance(k, rows=rows)
    if pays_from is None:
        return f"At these costs no acceptance pays for k = {k}"
    if pays_from < 0.005:
        return f"k = {k} costs next to nothing, so that every accepted guess is a gain"
    return f"k = {k} pays from an acceptance of {pays_from:.0%} on"


def batch_reason(by_batch: dict[int, tuple[int, float]]) -> str:
    """What the number of sequences does to the gain, from ``Outlook.by_batch``."""
    pays = [rows for rows, (_, speedup) in by_batch.items() if speedup >= WORTH]
    if not pays:
        return f"Drafting pays for no number of sequences at once from {min(by_batch)} to {max(by_batch)}."
    gains = ", ".join(f"{speedup:.2f} x with {rows} (k = {k})" for rows, (k, speedup) in by_batch.items())
    lost = [rows for rows in by_batch if rows > max(pays)]
    return f"By sequences at once: {gains}" + (f"; from {min(lost)} on drafting does not pay." if lost else ".")


CLEAR_GAIN = 1.1  # less is within what a plan may be wrong by


def verdict(plan: Plan, ways_out: list[WayOut], *, where: str = "") -> str:
    """The answer in one sentence.

    Args:
        where: " on each GPU", of the memory.
    """
    memory = plan.memory
    if memory is not None and not memory.fits:
        needs = f"No: it needs {gib(memory.needed)} of memory and {gib(memory.available or 0)} are free"
        enough = next((number for number, way in enumerate(ways_out, start=1) if way.fits), None)
        if enough is None:
            return f"{needs}, and no way out below is enough: use a smaller model."
        return f"{needs}; it fits after {'the first way' if enough == 1 else f'the first {enough} ways'} out below."
    fits = f" It takes {gib(memory.needed)} of memory{where}" if memory is not None else ""
    if memory is not None:
        fits += "." if memory.available is None else f"; {gib(memory.available)} are free."
    if plan.expected_speedup is None:
        return f"It depends: {plan.why[0][0].lower()}{plan.why[0][1:]}{fits}"
    if plan.drafter == "none":
        return f"No: drafting does not pay here.{fits}"
    k = plan.num_speculative_tokens
    answer = "Yes" if plan.expected_speedup >= CLEAR_GAIN else "Hardly"
    return f"{answer}: about {plan.expected_speedup:.2f} x with k = {k} ({plan.drafter}).{fits}"


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
