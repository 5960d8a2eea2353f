"""Which drafter, draft model and draft length to use, by measurement on the user's own prompts; kept in a file."""

from __future__ import annotations

import datetime
import json
import statistics
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashspec.bench.methods import PLAIN
from flashspec.bench.run import BenchOptions, measured
from flashspec.controller import AUTO
from flashspec.errors import OptionError
from flashspec.report import write_report

NEAR = 0.97  # ``auto`` is taken if it comes this near to the best: it adapts to what was not measured


def run_tune(options: BenchOptions, out: Path, screen: Console, *, force: bool = False) -> dict[str, Any]:
    """Measure, say which setting to use, and write it to ``out``; the chosen row.

    Raises:
        OptionError: ``out`` exists and ``force`` is not set, or it cannot be written.
    """
    if out.exists() and not force:
        raise OptionError(f"{out} exists; give --force to replace it, or another name with --out")
    drafters = [PLAIN, "suffix", *([AUTO] if options.drafts else [])]
    results = measured(replace(options, drafters=drafters), screen)
    if options.report is not None:
        write_report(results, options.report)
    if not results["complete"]:
        raise KeyboardInterrupt
    settings = summarised(results["rows"], results["costs"])
    chosen = best(settings)
    paper = Console(highlight=False)
    paper.print(_table(settings))
    paper.print(escape(verdict(chosen)), soft_wrap=True)
    _write(out, config_text(chosen, settings, options))
    paper.print(escape(f"written: {out} (use it with --config {out})"), soft_wrap=True)
    print(json.dumps({"chosen": chosen, "settings": settings}, ensure_ascii=False))
    return chosen


def summarised(rows: Seq[dict[str, Any]], costs: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a setting, over all tasks: geometric means of speedups, means of acceptance; best first."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["drafter"], row["draft"], row["num_speculative_tokens"]), []).append(row)
    found = []
    for (drafter, draft, length), mine in groups.items():
        rates = [row["acceptance_rate"] for row in mine if row["acceptance_rate"] is not None]
        lengths = [row["mean_acceptance_length"] for row in mine if row["mean_acceptance_length"] is not None]
        found.append({
            "drafter": drafter,
            "draft": draft,
            "num_speculative_tokens": length,
            "acceptance_rate": statistics.mean(rates) if rates else None,
            "mean_acceptance_length": statistics.mean(lengths) if lengths else None,
            "draft_cost": costs["drafts"][draft] / costs["target"]["widths"][0][1] if draft else None,
            "tokens_per_second": statistics.mean(row["tokens_per_second"] for row in mine),
            "speedup": _mean_ratio([row["speedup"] for row in mine]),
            "speedup_e2e": _mean_ratio([row["speedup_e2e"] for row in mine]),
        })  # fmt: skip
    return sorted(found, key=lambda each: -(each["speedup_e2e"] or 0))


def best(settings: Seq[dict[str, Any]]) -> dict[str, Any]:
    """The fastest whole requests; ``auto`` where it is near to that."""
    first = settings[0]
    adaptive = [each for each in settings if each["num_speculative_tokens"] == AUTO]
    if adaptive and (adaptive[0]["speedup_e2e"] or 0) >= NEAR * max(first["speedup_e2e"] or 0, 1.0):
        return adaptive[0]
    return first


def verdict(chosen: dict[str, Any]) -> str:
    """One sentence."""
    if chosen["drafter"] == PLAIN:
        return "Use no drafter: none of them was faster than plain decoding on these prompts."
    name = f"drafter {chosen['drafter']}" + (f" with {chosen['draft']}" if chosen["draft"] else "")
    return (
        f"Use {name} and num_speculative_tokens {chosen['num_speculative_tokens']}: {chosen['speedup']:.2f} x plain "
        f"decoding by time per token, {chosen['speedup_e2e']:.2f} x for whole requests."
    )


def config_text(chosen: dict[str, Any], settings: Seq[dict[str, Any]], options: BenchOptions) -> str:
    """A flashspec.toml: the setting, and in comments what it rests on."""
    values = {
        "model": _place(options.model),
        "draft": _place(chosen["draft"]),
        "drafter": chosen["drafter"],
        "num_speculative_tokens": chosen["num_speculative_tokens"],
        "device": options.device,
        "dtype": options.dtype,
    }
    day = datetime.date.today().isoformat()
    lines = [f"# flashspec tune, {day}, {', '.join(path.name for path in options.prompts)}", f"# {verdict(chosen)}"]
    for each in settings:
        name = " ".join(filter(None, (each["drafter"], each["draft"], f"k={each['num_speculative_tokens']}")))
        lines.append(f"# {each['speedup_e2e'] or 0:.2f} x  {name}")
    lines = ["".join(char if char.isprintable() else "?" for char in line) for line in lines]
    lines += [f"{key} = {_toml(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _place(name: str | None) -> str | None:
    """A file or folder as an absolute path, so that the configuration works from anywhere; a hub name as it is."""
    if name is None or not Path(name).expanduser().exists():
        return name
    return str(Path(name).expanduser().resolve())


def _toml(value: str | int) -> str:
    # JSON's strings are TOML's but for DEL, which JSON leaves as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _write(out: Path, text: str) -> None:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"cannot write {out}: {error}; name another file with --out") from error


def _mean_ratio(values: Seq[float | None]) -> float | None:
    known = [value for value in values if value]
    return statistics.geometric_mean(known) if known else None


def _table(settings: Seq[dict[str, Any]]) -> Table:
    table = Table(title="means over tasks, fastest first; speedups against plain decoding")
    for name in ("drafter", "k", "accepted", "length", "draft cost", "tok/s", "speedup", "end to end"):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for each in settings:
        numbers = [
            (each["acceptance_rate"], ".0%"), (each["mean_acceptance_length"], ".2f"), (each["draft_cost"], ".2f"),
            (each["tokens_per_second"], ".2f"), (each["speedup"], ".2f"), (each["speedup_e2e"], ".2f"),
        ]  # fmt: skip
        name = each["drafter"] + (f" {each['draft']}" if each["draft"] else "")
        cells = ["" if value is None else format(value, form) for value, form in numbers]
        table.add_row(escape(name), str(each["num_speculative_tokens"]), *cells)
    return table
