"""Runs become rows: medians, ratios to plain decoding on the same prompts, and what the costs predict."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from flashspec.bench.methods import HF_PLAIN, PLAIN, Curves, Method, Run
from flashspec.bench.prompts import Task
from flashspec.core import SpecStats
from flashspec.costs import CostCurve
from flashspec.pretrained import Loaded

# two logits closer than this, in standard deviations of all logits, are a tie in that precision
TIES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
QUANTISED_TIE = 0.2  # of llama.cpp, which rounds activations to 8 bits, not the same way for every number of tokens
PREDICTABLE = (PLAIN, "ngram", "suffix", "model")  # of which each draft token costs nothing, or one forward
Key = tuple[int, int]  # which prompt, which repetition


@dataclass(frozen=True, slots=True)
class Condition:
    """What the methods are compared under."""

    batch: int
    temperature: float


def rows_of(
    tasks: Seq[Task],
    methods: Seq[Method],
    conditions: Seq[Condition],
    runs: Mapping[str, Run],
    loaded: Loaded,
    curves: Curves,
) -> list[dict[str, Any]]:
    """A row for each task, condition and method that has runs."""
    found: dict[tuple[str, str, Condition], dict[Key, Run]] = {}
    for key, run in runs.items():
        task, label, batch, temperature, number, repetition = json.loads(key)
        found.setdefault((task, label, Condition(batch, temperature)), {})[number, repetition] = run
    rows = []
    for task in tasks:
        for condition in conditions:
            plain = found.get((task.name, PLAIN, condition), {})
            theirs = found.get((task.name, HF_PLAIN, condition), {})
            for method in methods:
                mine = found.get((task.name, method.label, condition), {})
                if mine:
                    row = _row(task, method, condition, mine, plain, theirs)
                    row["predicted_speedup"] = _predicted(task, method, condition, mine, curves)
                    row["differences"] = _compared(task, method, condition, mine, theirs or plain, loaded)
                    is_compared = not condition.temperature and mine is not (theirs or plain)
                    row["greedy_equal"] = not row["differences"] if is_compared else None
                    rows.append(row)
    return rows


def _row(
    task: Task,
    method: Method,
    condition: Condition,
    mine: dict[Key, Run],
    plain: dict[Key, Run],
    theirs: dict[Key, Run],
) -> dict[str, Any]:
    runs, stats = list(mine.values()), _stats(mine.values())
    drafted = stats.num_drafts > 0
    speedups = _ratios(plain, mine, lambda run: run.tpot)
    return {
        "task": task.name,
        "drafter": method.drafter,
        "draft": method.draft,
        "num_speculative_tokens": method.num_speculative_tokens,
        "batch": condition.batch,
        "temperature": condition.temperature,
        "num_runs": len(runs),
        **{name: _median(runs, name) for name in ("tokens_per_second", "ttft", "tpot", "total")},
        "spread": {name: _quartiles([getattr(run, name) for run in runs]) for name in ("tokens_per_second", "tpot")},
        "mean_acceptance_length": stats.mean_acceptance_length if drafted else None,
        "acceptance_rate": stats.acceptance_rate if drafted else None,
        "acceptance_by_position": stats.acceptance_by_position or None,
        "draft_lengths": stats.draft_lengths or None,
        "no_draft": stats.no_draft or None,
        "speedup": statistics.median(speedups) if speedups else None,
        "speedup_spread": [min(speedups), max(speedups)] if speedups else None,
        "speedup_hf": _middle(_ratios(theirs, mine, lambda run: run.tpot)),
        "speedup_e2e": _middle(_ratios(plain, mine, lambda run: 1 / run.tokens_per_second)),
        "time_shares": _shares(runs),
        "peak_memory": max((run.peak_memory for run in runs if run.peak_memory), default=None),
    }


def _stats(runs: Any) -> SpecStats:
    stats = SpecStats()
    for run in runs:
        stats.merge(run.stats)
    return stats


def _median(runs: Seq[Run], name: str) -> float:
    return statistics.median(float(getattr(run, name)) for run in runs)


def _middle(values: Seq[float]) -> float | None:
    return statistics.median(values) if values else None


def _quartiles(values: Seq[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def _ratios(base: dict[Key, Run], mine: dict[Key, Run], value: Callable[[Run], float]) -> list[float]:
    """base / mine on the same prompts; runs of a single burst have no time per token."""
    pairs = [(value(base[key]), value(mine[key])) for key in mine if key in base]
    return [a / b for a, b in pairs if a > 0 and b > 0]


def _shares(runs: Seq[Run]) -> dict[str, float] | None:
    splits = [run.split for run in runs if run.split is not None]
    if not splits:
        return None
    total = sum(run.total for run in runs)
    return {name: sum(split[name] for split in splits) / total for name in splits[0]}


# prediction


def _predicted(task: Task, method: Method, condition: Condition, mine: dict[Key, Run], curves: Curves) -> float | None:
    """Speedup from the measured draft lengths, acceptance and costs, if nothing but the forwards took time.

    Median over the prompts, as for the measured one. None where rows share a forward: its width is the longest
    draft's.
    """
    if condition.batch > 1 or method.drafter not in PREDICTABLE or None not in curves:
        return None
    cost, drafting = curves[None], curves[method.draft] if method.draft else None
    return _middle([
        _without_overhead(run, len(task.prompts[number][1]), cost, drafting) for (number, _), run in mine.items()
        if run.num_tokens > 1
    ])  # fmt: skip


def _without_overhead(run: Run, prompt: int, cost: CostCurve, drafting: CostCurve | None) -> float:
    """Tokens after the first, each a plain step, over scored positions, draft tokens and the reading of the prompt."""
    lengths = {int(length): count for length, count in run.stats.draft_lengths.items()}
    lengths[0] = lengths.get(0, 0) - 1  # the first step, which reads the prompt
    spent = sum(count * cost(length + 1) for length, count in lengths.items())
    if drafting is not None and run.stats.num_drafts:
        spent += sum(count * length for length, count in lengths.items()) * drafting(1)
        spent += drafting(prompt) - drafting(1)
    return cost(1) * (run.num_tokens - 1) / spent


# equality


def _compared(
    task: Task,
    method: Method,
    condition: Condition,
    mine: dict[Key, Run],
    reference: dict[Key, Run],
    loaded: Loaded,
) -> list[dict[str, Any]]:
    """Where greedy tokens part, with the distance of the two likeliest logits there in standard deviations."""
    if condition.temperature or mine is reference:
        return []
    found, seen = [], set()
    for (number, repetition), run in mine.items():
        other = reference.get((number, repetition))
        for i, (a, b) in enumerate(zip(run.tokens, other.tokens, strict=True)) if other else ():
            name, prompt = task.prompts[(number + i) % len(task.prompts)]
            if a != b and name not in seen:
                seen.add(name)
                found.append({"prompt": name, **_parting(prompt, a, b, loaded)})
    return found


def _parting(prompt: list[int], mine: list[int], other: list[int], loaded: Loaded) -> dict[str, Any]:
    pairs = enumerate(zip(mine, other, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(other)))
    logits = loaded.target.plain_logits(prompt + other[:at])
    first, second = logits.topk(2).values.tolist()
    gap = float((first - second) / logits.std())
    return {"position": at, "gap": gap, "is_tie": gap < _tie(loaded)}


def _tie(loaded: Loaded) -> float:
    network = getattr(loaded.target, "model", None)
    return QUANTISED_TIE if network is None else TIES[network.dtype]


def difference_line(row: dict[str, Any], difference: dict[str, Any]) -> str:
    """A parting of two greedy texts, for people."""
    verdict = "a tie in this precision" if difference["is_tie"] else "NOT a tie: please report it"
    return escape(
        f"{row['task']}, {row['drafter']}: prompt {difference['prompt']} parts at token {difference['position']}, "
        f"where the two largest logits are {difference['gap']:.1e} standard deviations apart: {verdict}"
    )


# table


def table(rows: Seq[dict[str, Any]], *, max_tokens: int) -> Table:
    """What bench and tune print."""
    found = Table(title=f"{max_tokens} tokens, medians over prompts; speedups against none, by TPOT")
    names = ["task", "drafter", "k", "batch", "temp", "tok/s", "TTFT s", "TPOT ms", "length", "accepted", "speedup",
             "predicted", "vs HF", "end to end", "overhead", "equal"]  # fmt: skip
    several = {"batch": len({row["batch"] for row in rows}) > 1, "temp": len({row["temperature"] for row in rows}) > 1}
    names = [name for name in names if several.get(name, True)]
    for name in names:
        found.add_column(name, justify="left" if name in ("task", "drafter") else "right")
    for row in rows:
        cells = _cells(row)
        found.add_row(*(escape(cells[name]) for name in names))
    return found


def _cells(row: dict[str, Any]) -> dict[str, str]:
    shares, length = row["time_shares"], row["num_speculative_tokens"]
    return {
        "task": row["task"],
        "drafter": row["drafter"] + (f" {row['draft']}" if row["draft"] else ""),
        "k": "" if length is None else str(length),
        "batch": str(row["batch"]),
        "temp": f"{row['temperature']:g}",
        "tok/s": _shown(row["tokens_per_second"], ".2f"),
        "TTFT s": _shown(row["ttft"], ".2f"),
        "TPOT ms": _shown(row["tpot"] * 1000, ".0f"),
        "length": _shown(row["mean_acceptance_length"], ".2f"),
        "accepted": _shown(row["acceptance_rate"], ".0%"),
        "speedup": _shown(row["speedup"], ".2f"),
        "predicted": _shown(row["predicted_speedup"], ".2f"),
        "vs HF": _shown(row["speedup_hf"], ".2f"),
        "end to end": _shown(row["speedup_e2e"], ".2f"),
        "overhead": _shown(shares and shares["outside_forwards"], ".1%"),
        "equal": {True: "yes", False: "no", None: ""}[row["greedy_equal"]],
    }


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
