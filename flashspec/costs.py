"""What a forward costs on this machine: measured once in seconds, kept on disk, asked thousands of times.

It knows Targets and the clock; it does not know drafts' origins or acceptance.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import random
import statistics
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashspec.core import Draft, Sequence, Target

logger = logging.getLogger("flashspec")

SCHEMA = 2  # of the files; one of another schema is foreign
CONTEXT = 128  # tokens before the ones that are timed; up to 1500 the ratios move by a few percent (docs/log.md)
REPEATS = 5
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 17)  # of a target: its own token and up to 16 draft tokens
BATCHED_WIDTHS = (*WIDTHS, 32, 64)  # many rows are many tokens
DRAFT_WIDTHS = (1, 2, 4, 16, 64, 192)  # of a draft model: one token at a time, and what it has to read before it can


@dataclass(frozen=True, slots=True)
class CostCurve:
    """Seconds of a forward over some rows of ``width`` tokens each.

    A function of the number of tokens, measured at some and linear between them (beyond the last one: along the last
    segment), and what having several rows adds to it.
    """

    widths: tuple[tuple[int, float], ...]  # (tokens in one row, seconds), ascending
    rows: tuple[tuple[int, float], ...] = ()  # (rows of one token, seconds), ascending
    is_ragged: bool = False  # rows of different widths cost what their tokens cost; else the widest sets the price

    def __call__(self, width: float, rows: int = 1) -> float:
        seconds = _line(self.widths, width * rows)
        if rows > 1 and self.rows:
            seconds += _line(self.rows, rows) - _line(self.widths, rows)
        return max(seconds, 1e-9)

    def ratio(self, width: float, rows: int = 1) -> float:
        """In units of a plain decode step of as many rows."""
        return self(width, rows) / self(1, rows)


def _line(points: Seq[tuple[int, float]], x: float) -> float:
    if len(points) == 1:
        return points[0][1]
    right = min(max(bisect_left([at for at, _ in points], x), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def measure(target: Target, *, max_rows: int = 1, widths: Seq[int] = WIDTHS, repeats: int = REPEATS) -> CostCurve:
    """Time a target's forwards: medians, interleaved, after a warm-up.

    Args:
        max_rows: the largest batch; rows of one token are timed at 1, 2, 4, ... up to it.
        widths: numbers of tokens in one row.
    """
    context = max(min(CONTEXT, target.max_length - max(widths) - 1), 1)
    usable = [width for width in widths if context + width <= target.max_length]
    counts = [1 << i for i in range(1, max_rows.bit_length()) if 1 << i < max_rows] + [max_rows] * (max_rows > 1)
    singles = _time(target, [(1, width) for width in usable], context, repeats)
    batched = _time(target, [(count, 1) for count in counts], context, repeats)
    return CostCurve(
        _rising((width, singles[1, width]) for width in usable),
        ((1, singles[1, 1]), *_rising((count, batched[count, 1]) for count in counts)) if counts else (),
        is_ragged=is_ragged(target),
    )


def is_ragged(target: Target) -> bool:
    """Whether its forwards put rows of different widths together without padding."""
    return bool(getattr(target, "packs_rows", False))


def of_calls(call: Callable[[int], object], widths: Seq[int], *, repeats: int = REPEATS) -> CostCurve:
    """Time ``call(width)`` for each width: medians, interleaved, after a warm-up."""
    seen: dict[int, list[float]] = {width: [] for width in widths}
    for turn in range(repeats + 1):
        for width in widths:
            started = time.perf_counter()
            call(width)
            if turn:
                seen[width].append(time.perf_counter() - started)
    return CostCurve(_rising((width, statistics.median(times)) for width, times in seen.items()))


def _time(target: Target, shapes: list[tuple[int, int]], context: int, repeats: int) -> dict[tuple[int, int], float]:
    """Median seconds of each (rows, tokens)."""
    if not shapes:
        return {}
    rng = random.Random(0)

    def some(count: int) -> list[int]:
        return [rng.randrange(target.vocab_size) for _ in range(count)]

    seqs = [Sequence(f"cost {i}", some(context), context) for i in range(max(rows for rows, _ in shapes))]
    seen: dict[tuple[int, int], list[float]] = {shape: [] for shape in shapes}
    try:
        for seq in seqs:
            target.score([seq], [Draft([], [])])
            target.keep(seq, [])
        for turn in range(repeats + 1):  # the first is the warm-up
            for rows, width in shapes:
                drafts = [Draft.chain(some(width - 1)) for _ in range(rows)]
                started = time.perf_counter()
                target.score(seqs[:rows], drafts)
                if turn:
                    seen[rows, width].append(time.perf_counter() - started)
                for seq in seqs[:rows]:
                    target.keep(seq, [])
    finally:
        for seq in seqs:
            target.forget(seq)
    return {shape: statistics.median(times) for shape, times in seen.items()}


def _rising(points: Iterable[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """More tokens never cost less: what a noisy clock says otherwise is averaged away (pool adjacent violators)."""
    blocks: list[tuple[list[int], float]] = []
    for at, seconds in points:
        blocks.append(([at], seconds))
        while len(blocks) > 1 and blocks[-2][1] > blocks[-1][1]:
            (first, a), (second, b) = blocks[-2:]
            mean = (a * len(first) + b * len(second)) / (len(first) + len(second))
            blocks[-2:] = [([*first, *second], mean)]
    return tuple((at, seconds) for ats, seconds in blocks for at in ats)


# on disk


def measured(
    target: Target,
    identity: dict[str, Any],
    folder: Path,
    *,
    max_rows: int = 1,
    widths: Seq[int] = WIDTHS,
    begin: Callable[[], object] = lambda: None,
) -> CostCurve:
    """The curve kept for this identity (model, dtype, device, threads, versions, ...), or a new one, kept.

    Args:
        begin: called before anything is measured.

    A file that cannot be read, or that holds another identity, is ignored with a warning and written anew.
    """
    identity = {**identity, "max_rows": max_rows, "widths": list(widths), "schema": SCHEMA}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    file = folder / f"{digest[:32]}.json"
    curve = _read(file, identity)
    if curve is None:
        begin()
        curve = measure(target, max_rows=max_rows, widths=widths)
        _write(file, identity, curve)
    return replace(curve, is_ragged=is_ragged(target))


def _read(file: Path, identity: dict[str, Any]) -> CostCurve | None:
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        if held["identity"] != identity:
            raise ValueError("it was measured for another model or machine")
        return CostCurve(_points(held["widths"], least=1), _points(held["rows"], least=0))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("ignoring the cost measurements in %s (%s); measuring again", file, error or type(error))
        return None


def _points(held: Any, *, least: int) -> tuple[tuple[int, float], ...]:
    points = tuple((int(at), float(seconds)) for at, seconds in held)
    ascending = all(a < b for (a, _), (b, _) in itertools.pairwise(points))
    if len(points) < least or not ascending or not all(at > 0 and 0 < seconds < 1e6 for at, seconds in points):
        raise ValueError("its numbers make no sense")
    return points


def _write(file: Path, identity: dict[str, Any], curve: CostCurve) -> None:
    part = file.with_suffix(f".{os.getpid()}.part")
    with suppress(OSError):  # it only saves seconds
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"identity": identity, "widths": curve.widths, "rows": curve.rows}))
        part.replace(file)
