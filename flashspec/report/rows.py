"""What the pages and the plots say about the rows: labels, selections, columns and sentences, all plain text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
PLAIN = "none"
NUM_NAMED = 6  # tasks in the verdict
NUM_DIFFERENCES = 20  # listed; results.json has all


def finite(value: Any) -> Any:
    """A copy with None for every number that JSON does not have."""
    if isinstance(value, dict):
        return {name: finite(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Data:
    """Results with a ``label`` in every row; plots and verdict take the rows of the first temperature."""

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = finite(results)
        self.provenance: dict[str, Any] = self.results.get("provenance") or {}
        self.rows: list[Row] = self.results.get("rows") or []
        self._label()
        self.temperature = self.rows[0].get("temperature") if self.rows else None
        plotted = [row for row in self.rows if row.get("temperature") == self.temperature]
        self.batch = min((row["batch"] for row in plotted if row.get("batch")), default=None)
        self.measured = [row for row in plotted if row.get("drafter") != PLAIN]
        self.numbers = {label: n for n, label in enumerate(dict.fromkeys(row["label"] for row in self.measured))}

    def _label(self) -> None:
        """The drafter's name, with the draft model's where it comes with several."""
        pairs = {(row.get("drafter"), row.get("draft")) for row in self.rows}
        names = [drafter for drafter, _ in pairs]
        for row in self.rows:
            drafter, draft = row.get("drafter"), str(row.get("draft")).rstrip("/").rsplit("/", 1)[-1]
            row["label"] = f"{drafter} {draft}" if names.count(drafter) > 1 else str(drafter)

    @property
    def at_temperature(self) -> str:
        return "an unknown temperature" if self.temperature is None else f"temperature {self.temperature:g}"

    @property
    def conditions(self) -> str:
        return f"batch {self.batch or '?'} and {self.at_temperature}"

    def by_task(self, *, all_batches: bool = False) -> dict[str, dict[str, list[Row]]]:
        """Task -> label -> rows, in the order of the results, at the smallest batch."""
        tasks: dict[str, dict[str, list[Row]]] = {}
        for row in self.measured:
            if all_batches or row.get("batch") == self.batch:
                tasks.setdefault(str(row.get("task")), {}).setdefault(row["label"], []).append(row)
        return tasks


def best(rows: Iterable[Row]) -> Row | None:
    """The row with the largest speedup, if any has one."""
    return max((row for row in rows if row.get("speedup") is not None), key=lambda row: row["speedup"], default=None)


def best_by(rows: list[Row], key: str) -> dict[Any, Row]:
    """Value of ``key`` -> the best of its rows; values without a speedup are left out."""
    values = dict.fromkeys(row[key] for row in rows if row.get(key) is not None)
    found = {value: best(row for row in rows if row.get(key) == value) for value in values}
    return {value: row for value, row in found.items() if row}


def spread(row: Row) -> tuple[float, float]:
    """Range of the row's speedup; the speedup itself where it is not known."""
    low, high = row.get("speedup_spread") or (None, None)
    value = row["speedup"]
    return min(value, value if low is None else low), max(value, value if high is None else high)


def method(row: Row) -> str:
    k = row.get("num_speculative_tokens")
    return row["label"] if k is None else f"{row['label']} k={k}"


# the table


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    text: Callable[[Row], str]
    meaning: str = ""
    is_number: bool = True  # aligned to the right


def _text(key: str) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else str(row[key])


def _number(key: str, form: str, factor: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else format(row[key] * factor, form)


def _share(key: str) -> Callable[[Row], str]:
    return lambda row: _number(key, ".1%")(row.get("time_shares") or {})


def _range(pair: list[float] | None, form: str, factor: float = 1.0) -> str:
    return "–".join(format(value * factor, form) for value in pair) if pair and None not in pair else ""


def _tpot_range(row: Row) -> str:
    return _range((row.get("spread") or {}).get("tpot"), ".1f", 1000)


def _equal(row: Row) -> str:
    equal = row.get("greedy_equal")
    return "" if equal is None else "yes" if equal else "no"


SPEEDUP = "TPOT of plain decoding / TPOT, at the same task, batch and temperature: median of ratios on the same prompt"
EQUAL = "whether the greedy tokens were the baseline's (of Transformers' generate where it ran, else plain decoding)"
COLUMNS = (
    Column("task", _text("task"), is_number=False),
    Column("drafter", _text("drafter"), "none: plain decoding; hf_...: Transformers' own methods", is_number=False),
    Column("draft", _text("draft"), "the draft model", is_number=False),
    Column("k", _text("num_speculative_tokens"), "draft length, num_speculative_tokens; auto: chosen at every step"),
    Column("batch", _text("batch"), "sequences decoded together"),
    Column("temperature", _number("temperature", "g"), "0 is greedy"),
    Column("speedup", _number("speedup", ".2f"), SPEEDUP),
    Column("speedup spread", lambda row: _range(row.get("speedup_spread"), ".2f"), "smallest and largest ratio"),
    Column("predicted", _number("predicted_speedup", ".2f"), "speedup by the measured costs and acceptance"),
    Column("vs HF", _number("speedup_hf", ".2f"), "speedup over Transformers' generate"),
    Column("end to end", _number("speedup_e2e", ".2f"), "speedup over plain decoding in whole requests"),
    Column("equal", _equal, EQUAL),
    Column("tok/s", _number("tokens_per_second", ".2f"), "tokens of the whole batch a second"),
    Column("TTFT s", _number("ttft", ".3f"), "time to first token"),
    Column("TPOT ms", _number("tpot", ".1f", 1000), "time per output token: (last - first) / (n - 1)"),
    Column("TPOT quartiles", _tpot_range, "lower and upper, in milliseconds"),
    Column("total s", _number("total", ".2f"), "a whole request"),
    Column("length", _number("mean_acceptance_length", ".2f"), "tokens per verification, the target's own included"),
    Column("accepted", _number("acceptance_rate", ".1%"), "share of the drafted tokens"),
    Column("drafting", _share("draft"), "share of the time"),
    Column("verifying", _share("verify"), "share of the time"),
    Column("sampling", _share("sample"), "share of the time"),
    Column("outside forwards", _share("outside_forwards"), "share of the time in which no model ran"),
    Column("peak GiB", _number("peak_memory", ".2f", 2.0**-30), "memory"),
    Column("runs", _text("num_runs"), "that the medians are taken over"),
)  # fmt: skip


def table(rows: list[Row]) -> tuple[list[Column], list[list[str]]]:
    """The columns that hold anything, and every row's cells."""
    used = [column for column in COLUMNS if any(column.text(row) for row in rows)]
    return used, [[column.text(row) for column in used] for row in rows]


# sentences

INCOMPLETE = "This run was interrupted: what is missing below was not measured."
MEASURED = (
    "Within one run every prompt goes through every method before the next prompt, in an order that rotates, so that a "
    "machine that slows down slows all of them. Times are medians over runs, speedups medians of ratios on the same "
    "prompt. Speculation emits tokens in bursts, so the time per output token (TPOT) is compared."
)


def verdict(data: Data) -> str:
    """One sentence: the best method of every task, and how much faster it is."""
    rows = {task: [row for line in labels.values() for row in line] for task, labels in data.by_task().items()}
    winners = [(task, row) for task in rows if (row := best(rows[task]))]
    if not winners:
        return "No speedup was measured: that takes plain decoding and at least one drafter on the same task."
    parts = [
        f"{row['speedup']:.2f}× on {task} ({method(row)}{'' if row['speedup'] > 1 else ', nothing was faster'})"
        for task, row in winners[:NUM_NAMED]
    ]
    if rest := [row["speedup"] for _, row in winners[NUM_NAMED:]]:
        parts.append(f"{min(rest):.2f}× to {max(rest):.2f}× on {len(rest)} more tasks")
    return f"Best speedups over plain decoding at {data.conditions}: {', '.join(parts)}."


def facts(data: Data) -> list[tuple[str, str]]:
    """Where the numbers come from: (name, value)."""
    models = {name: data.provenance.get(name) for name in ("model", "draft", "date", "commit")}
    machine = data.provenance.get("machine") or {}
    return [(name, str(value)) for name, value in (models | machine).items() if value is not None]


def options(data: Data) -> str:
    given = data.provenance.get("options") or {}
    return ", ".join(f"{name} = {value}" for name, value in given.items() if value is not None)


def differences(data: Data) -> list[str]:
    """Where greedy tokens part from the baseline's, and whether the model was undecided there."""
    lines = [_difference(row, found) for row in data.rows for found in row.get("differences") or []]
    more = len(lines) - NUM_DIFFERENCES
    return lines if more <= 0 else [*lines[:NUM_DIFFERENCES], f"{more} more in results.json"]


def _difference(row: Row, found: dict[str, Any]) -> str:
    gap = found.get("gap")
    apart = "" if gap is None else f", where the two largest logits are {gap:.1e} standard deviations apart"
    end = "a tie in this precision" if found.get("is_tie") else "NOT a tie: please report it"
    where = f"prompt {found.get('prompt')} parts at token {found.get('position')}"
    return f"{row.get('task')}, {method(row)}, batch {row.get('batch')}: {where}{apart}: {end}"
