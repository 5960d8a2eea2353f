"""The report of ``flashspec bench``: results as JSON, as Markdown, and as one self-contained HTML page with plots.

It knows the results below and nothing of how they were measured. Any value may be None or absent, any list empty;
times are seconds, lengths are tokens. ::

    {"schema": 1, "complete": bool,            # False: the run was interrupted, rows are missing
     "provenance": {"command", "date" (ISO), "commit", "model", "draft": str, "options": {name: value},
                    "machine": {"cpu", "cores", "threads", "gpu", "python", "torch", "flashspec", ...: value}},
     "costs": {"target" and "draft": {"widths": [[tokens of one row, seconds], ...],   # one forward
                                      "rows": [[rows of one token, seconds], ...]}},
     "rows": [{"task", "drafter" ("none" is plain decoding), "draft": str,
               "num_speculative_tokens": int or "auto", "batch": int, "temperature": float, "num_runs": int,
               "tokens_per_second" (of the whole batch), "ttft", "tpot", "total": float,       # medians over runs
               "spread": {"tpot" and "tokens_per_second": [lower, upper quartile]},
               "mean_acceptance_length", "acceptance_rate": float,
               "acceptance_by_position": [float, ...],     # of each position, given that those before were accepted
               "speedup" (of TPOT, against "none" at the same task, batch and temperature: median of ratios),
               "speedup_hf", "speedup_e2e" (whole requests), "predicted_speedup": float,
               "speedup_spread": [smallest, largest ratio],
               "greedy_equal": bool, "differences": [{"prompt", "position", "gap", "is_tie"}, ...],
               "time_shares": {"draft", "verify", "sample", "outside_forwards": float},
               "peak_memory": bytes, "draft_lengths": {"0": steps, "3": steps, ...}}, ...]}
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flashspec.errors import OptionError
from flashspec.report.pages import html, markdown
from flashspec.report.plots import check_matplotlib
from flashspec.report.rows import finite

__all__ = ["check_report", "html", "markdown", "write_report"]


def write_report(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``results.json``, ``report.md`` and ``report.html``, in this order: what was measured comes first.

    Raises:
        OptionError: a folder that cannot be written to; matplotlib is not installed (the first two are written).
    """
    texts = (("results.json", _json), ("report.md", markdown), ("report.html", html))
    return [_write(folder / name, text(results)) for name, text in texts]


def check_report(folder: Path) -> None:
    """Raise before the measuring what ``write_report`` would raise after it."""
    check_matplotlib()
    _write(folder / ".check", "").unlink()


def _json(results: dict[str, Any]) -> str:
    return json.dumps(finite(results), ensure_ascii=False, indent=1, default=str) + "\n"


def _write(path: Path, text: str) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            temporary.write_bytes(text.encode("utf-8", errors="backslashreplace"))  # lone surrogates
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error}; give --report a folder that can be written to") from error
    return path
