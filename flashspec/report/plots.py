"""The plots, each as some panels of SVG text; matplotlib is imported here only, and when it is needed.

Headings, captions and legends are the page's HTML, where the browser has the fonts for any language and wraps lines.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from html import escape
from typing import Any

from flashspec.errors import OptionError
from flashspec.report.rows import Data, Row, best, best_by, method, spread

NUM_PANELS = 12  # of one plot; more are not looked at
NUM_BARS = 14  # in one panel
WIDTH = 4.8  # inches of a panel: its text is readable at 330 CSS pixels and not huge at 520
GREY = "#6b6b6b"
# Okabe and Ito's colours without the yellow, faint on white; the numbers of looks share no factor but 2
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
HATCHES = ("", "///", "xx", "--", "\\\\\\", "++")
SETTINGS = {
    "svg.fonttype": "none",  # text stays text: the browser has the fonts
    "svg.hashsalt": "flashspec",  # the same results give the same page
    "text.parse_math": False,  # a name may hold dollars
    "font.size": 9.5,
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib; the page names a font of its own
    "hatch.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.markersize": 5,
}
Draw = Callable[[Any], None]  # on matplotlib's Axes
Panel = tuple[str, str, Draw]  # heading, what a screen reader says, drawing


@dataclass(frozen=True, slots=True)
class Plot:
    title: str
    caption: str
    panels: list[Panel] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)  # of its lines, for the legend


def plots(data: Data) -> list[Plot]:
    """Those with something to compare."""
    made = (_by_task(data), _over_k(data), _by_position(data), _over_batch(data), _costs(data))
    return [_cut(plot) for plot in made if plot.panels]


def _cut(plot: Plot) -> Plot:
    num = len(plot.panels)
    if num <= NUM_PANELS:
        return plot
    caption = f"{plot.caption} These are the first {NUM_PANELS} of {num} panels; the table has the rest."
    return Plot(plot.title, caption, plot.panels[:NUM_PANELS], plot.labels)


def check_matplotlib() -> None:
    """Raises OptionError where it is not installed."""
    try:
        import matplotlib.style  # noqa: F401
    except ImportError as error:
        raise OptionError(
            f"plots need matplotlib ({error}); install it with pip install 'flashspec-decoding[report]'"
        ) from error


def svg(draw: Draw, *, prefix: str, label: str = "", size: tuple[float, float] = (WIDTH, 2.7)) -> str:
    """One ``<svg>`` element for a page that holds others.

    Args:
        prefix: goes before every id, which matplotlib numbers from 1 in each figure.
        label: for screen readers; without one the picture is decoration.
        size: inches; ``draw`` may change the figure's height.
    """
    check_matplotlib()
    from matplotlib import rc_context, style
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with style.context("default"), rc_context(SETTINGS), warnings.catch_warnings():
        # sizes are estimated with a font that may lack a name's letters; the browser's has them
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = Figure(figsize=size, layout="constrained")
        draw(figure.add_subplot())
        FigureCanvasSVG(figure).print_svg(buffer, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = buffer.getvalue()
    said = f'role="img" aria-label="{escape(label)}"' if label else 'aria-hidden="true"'
    text = text[text.index("<svg") :].replace("<svg", f"<svg {said}", 1)
    return re.sub("<[^>]+>", lambda tag: re.sub(r'( id="|url\(#|href="#)', rf"\1{prefix}-", tag[0]), text)


def swatch(number: int, *, prefix: str) -> str:
    """The look of a line, for a legend."""

    def draw(axes: Any) -> None:
        axes.set_axis_off()
        axes.plot([0, 1, 2], [0, 0, 0], **_look(number), markevery=[1])

    return svg(draw, prefix=prefix, size=(0.5, 0.2))


def _look(number: int) -> dict[str, Any]:
    return {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}


def _shown(text: str, limit: int) -> str:
    text = "".join(c if c.isprintable() else " " for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _ticks(axes: Any, ticks: dict[int, str], place: Callable[[float], float] = float) -> None:
    """Labels at measured values only, without those that would touch the next one; ``place`` is the axis's scale."""
    at = sorted(ticks, reverse=True)
    kept = at[:1]
    for x in at[1:]:
        if place(kept[-1]) - place(x) > 0.045 * (place(at[0]) - place(at[-1])):
            kept.append(x)
    axes.set_xticks(kept, [ticks[x] for x in kept])
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)


# speedup by task


def _by_task(data: Data) -> Plot:
    groups = {task: [row for r in labels.values() if (row := best(r))] for task, labels in data.by_task().items()}
    groups = {task: rows for task, rows in groups.items() if rows}
    num_bars = sum(map(len, groups.values()))
    chunks: list[dict[str, list[Row]]] = [{}]
    for task, rows in groups.items():
        if sum(map(len, chunks[-1].values())) >= num_bars / math.ceil(num_bars / NUM_BARS):  # all about as high
            chunks.append({})
        chunks[-1][task] = rows
    limit = 1.18 * max((spread(row)[1] for rows in groups.values() for row in rows), default=1)
    draw = partial(_draw_bars, numbers=data.numbers, limit=max(limit, 1.1))
    panels: list[Panel] = [("", f"Speedup by task: {', '.join(chunk)}", partial(draw, chunk)) for chunk in chunks]
    caption = (
        f"Each method at the best draft length k that was measured, at {data.conditions}; longer is faster. Baseline: "
        "plain decoding of the same prompts, the line at 1; a bar that ends left of it is slower. The black line at a "
        "bar's end is the range over the prompts."
    )
    return Plot("Speedup by task", caption, panels if num_bars > 1 else [])


def _draw_bars(groups: dict[str, list[Row]], axes: Any, *, numbers: dict[str, int], limit: float) -> None:
    y, places = 0.0, {}
    for task, rows in groups.items():
        # the browser's font may be wider than the one that sizes are estimated with: the line is the name's alone
        axes.text(0, y, _shown(task, 40), weight="bold", va="center").set_in_layout(False)
        for row in rows:
            y += 1
            places[y] = method({**row, "label": _shown(row["label"], 24)})
            _draw_bar(axes, y, row, numbers[row["label"]])
        axes.plot((1, 1), (y - len(rows) + 0.4, y + 0.6), color=GREY, linewidth=1.2, zorder=3)
        y += 1.4
    axes.figure.set_figheight(0.5 + 0.22 * y)
    axes.set(ylim=(y - 0.7, -0.7), xlim=(0, limit), xlabel="speedup over plain decoding")
    axes.set_yticks(list(places), list(places.values()))
    axes.tick_params(axis="y", length=0)


def _draw_bar(axes: Any, y: float, row: Row, number: int) -> None:
    hatch = HATCHES[number % len(HATCHES)]
    axes.barh(y, row["speedup"], 0.8, color=_look(number)["color"], hatch=hatch, edgecolor="white", linewidth=0)
    axes.plot(spread(row), (y, y), color="black", linewidth=1.2, solid_capstyle="butt")
    end = (max(spread(row)[1], 1), y)  # not across the line at 1
    axes.annotate(f"{row['speedup']:.2f}×", end, (4, 0), textcoords="offset points", va="center", fontsize=8.5)


# one panel for each task, one line for each method


def _lines(
    data: Data, plot: Plot, line_of: Callable[[list[Row]], Any], draw: Callable[..., None], *, all_batches: bool = False
) -> Plot:
    """The plot with its panels: the tasks where a line that ``line_of`` makes of a method's rows has several points."""
    shown = set()
    for task, labels in data.by_task(all_batches=all_batches).items():
        lines = {label: line for label, rows in labels.items() if (line := line_of(rows))}
        if any(sum(x != "auto" for x in line) > 1 for line in lines.values()):
            shown |= set(lines)
            plot.panels.append((task, f"{plot.title}, {task}", partial(draw, lines, numbers=data.numbers)))
    plot.labels.extend(label for label in data.numbers if label in shown)
    return plot


def _over_k(data: Data) -> Plot:
    caption = (
        f"Solid: measured, with the range over the prompts, at {data.conditions}. Dashed with hollow markers, in the "
        "same colour: predicted from measured costs and acceptance. auto chooses k at every step. Baseline: plain "
        "decoding, the line at 1."
    )
    plot = Plot("Speedup over draft length", caption)
    return _lines(data, plot, partial(best_by, key="num_speculative_tokens"), _draw_over_k)


def _draw_over_k(lines: dict[str, dict[Any, Row]], axes: Any, *, numbers: dict[str, int]) -> None:
    ks = sorted({k for line in lines.values() for k in line if k != "auto"})
    auto = ks[-1] + max(1, round((ks[-1] - ks[0]) / 6))  # a place apart
    ticks = {k: str(k) for k in ks}
    for label, line in lines.items():
        _draw_line(axes, {k: row for k, row in line.items() if k != "auto"}, numbers[label])
        if "auto" in line:
            ticks[auto] = "auto"
            _draw_line(axes, {auto: line["auto"]}, numbers[label])
    _finish_speedups(axes, ticks, "draft length k")


def _over_batch(data: Data) -> Plot:
    caption = (
        f"Each method at its best k for each batch size, at {data.at_temperature}. Baseline: plain decoding "
        "of as large a batch, the line at 1; a line that falls to it shows where batching alone fills the machine."
    )
    plot = Plot("Speedup over batch size", caption)
    return _lines(data, plot, _batches, _draw_batches, all_batches=True)


def _batches(rows: list[Row]) -> dict[int, Row]:
    line = best_by(rows, "batch")
    return line if len(line) > 1 else {}  # Transformers' own methods are measured with one sequence


def _draw_batches(lines: dict[str, dict[int, Row]], axes: Any, *, numbers: dict[str, int]) -> None:
    for label, line in lines.items():
        _draw_line(axes, line, numbers[label], predicted=False)
    axes.set_xscale("log", base=2)
    axes.minorticks_off()
    ticks = {batch: str(batch) for line in lines.values() for batch in line}
    _finish_speedups(axes, ticks, "sequences in the batch", math.log2)


def _draw_line(axes: Any, line: dict[int, Row], number: int, *, predicted: bool = True) -> None:
    """Speedups over x with their spread; the predicted ones dashed."""
    look = _look(number)
    for x, row in line.items():
        axes.plot((x, x), spread(row), color=look["color"], linewidth=1)
    _points(axes, [(x, row["speedup"]) for x, row in line.items()], **look)
    if predicted:
        guesses = [(x, row.get("predicted_speedup")) for x, row in line.items()]
        _points(axes, guesses, **look, linestyle="--", linewidth=1, markerfacecolor="white")


def _points(axes: Any, points: Iterable[tuple[int, float | None]], **look: Any) -> None:
    found = sorted((x, y) for x, y in points if y is not None)
    axes.plot([x for x, _ in found], [y for _, y in found], **look)


def _finish_speedups(axes: Any, ticks: dict[int, str], xlabel: str, place: Callable[[float], float] = float) -> None:
    axes.axhline(1, color=GREY, linewidth=1.2, zorder=1)
    axes.set(xlabel=xlabel, ylabel="speedup")
    axes.set_ylim(bottom=0)
    _ticks(axes, ticks, place)


def _by_position(data: Data) -> Plot:
    caption = (
        "Of the draft tokens whose predecessors were all accepted, the share that was accepted too, by position in the "
        f"draft, at {data.conditions}, from each method's longest drafts. A line that stays high affords a larger k, "
        "one that falls wants a smaller one. Late positions are reached rarely and are noisy."
    )
    return _lines(data, Plot("Acceptance by position", caption), _rates, _draw_positions)


def _rates(rows: list[Row]) -> dict[int, float]:
    """Position from 1 on -> acceptance, of the row with the most positions."""
    longest: list[float | None] = max((row.get("acceptance_by_position") or [] for row in rows), key=len)
    return {at: rate for at, rate in enumerate(longest, 1) if rate is not None}


def _draw_positions(lines: dict[str, dict[int, float]], axes: Any, *, numbers: dict[str, int]) -> None:
    for label, line in lines.items():
        _points(axes, line.items(), **_look(numbers[label]))
    axes.set(xlabel="position in the draft", ylabel="accepted", ylim=(0, 1.05))
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    _ticks(axes, {at: str(at) for line in lines.values() for at in line})


# costs


def _costs(data: Data) -> Plot:
    """Target and draft model in plain decode steps of the target: the draft model's height is the formulas' c."""
    costs = data.results.get("costs") or {}

    def lines(key: str) -> dict[str, dict[int, float]]:
        found = {model: dict((costs.get(model) or {}).get(key) or []) for model in ("target", "draft")}
        end = max(found["target"], default=0)  # draft models are measured further, where nothing is to compare
        found["draft"] = {n: seconds for n, seconds in found["draft"].items() if n <= end}
        return {model: line for model, line in found.items() if line}

    unit = lines("widths").get("target", {}).get(1)
    caption = (
        f"Seconds of one forward, in units of a plain decode step of the target ({(unit or 0) * 1000:.3g} ms). The "
        "flatter the target's line, the more guesses a verification can afford. The dotted line is what as many plain "
        "steps take."
    )
    plot = Plot("Cost of a forward: cost(n) / cost(1)", caption)
    for heading, key in (("n tokens of one sequence", "widths"), ("n sequences, one token each", "rows")):
        if unit and any(len(line) > 1 for line in lines(key).values()):
            plot.panels.append((heading, f"cost of {heading}", partial(_draw_costs, lines(key), unit=unit)))
    return plot


def _draw_costs(lines: dict[str, dict[int, float]], axes: Any, *, unit: float) -> None:
    for number, (model, line) in enumerate(lines.items()):
        _points(axes, ((x, seconds / unit) for x, seconds in line.items()), **_look(number), label=model)
    xs = sorted({x for line in lines.values() for x in line})
    top = max(seconds for line in lines.values() for seconds in line.values()) / unit
    axes.plot((1, xs[-1]), (1, xs[-1]), ":", color=GREY, label="as many plain steps")
    axes.set(xlabel="n", ylabel="plain decode steps", ylim=(0, 1.25 * max(top, 1.6)))
    axes.legend(frameon=False)
    _ticks(axes, {x: str(x) for x in xs})
