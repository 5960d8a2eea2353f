"""Results as a Markdown text and as one HTML page: no scripts, nothing loaded from elsewhere, every text escaped."""

from __future__ import annotations

import re
from html import escape
from typing import Any

from flashspec.report.plots import Plot, plots, svg, swatch
from flashspec.report.rows import INCOMPLETE, MEASURED, Data, differences, facts, options, table, verdict

CSS = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2128; --soft: #57606a; --line: #d5dae1;
  --mark: #0063a0; --warn: #fff2d6; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b2129; --text: #e4e8ee; --soft: #9da7b3;
  --line: #363e49; --mark: #79bdf0; --warn: #453510; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 16px/1.55 system-ui, sans-serif; }
header, main { max-width: 1100px; margin: 0 auto; padding: 0 16px; overflow-wrap: anywhere; }
header { padding-top: 28px; }
h1 { font-size: 1.55rem; line-height: 1.25; margin: 0 0 12px; }
h2 { font-size: 1.2rem; margin: 40px 0 8px; }
h3 { font-size: .95rem; margin: 0 0 2px; color: #1c2128; }
.verdict { font-size: 1.12rem; border-left: 4px solid var(--mark); padding: 2px 0 2px 14px; margin: 0 0 20px; }
.warning { background: var(--warn); padding: 10px 14px; border-radius: 8px; }
.caption { color: var(--soft); max-width: 78ch; margin: 0 0 12px; }
pre { padding: 12px; margin: 0 0 16px; white-space: pre-wrap; font-size: .85rem; user-select: all; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 2px 16px; margin: 12px 0;
  font-size: .9rem; }
dt { color: var(--soft); }
dd { margin: 0; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 400px), 1fr)); gap: 16px;
  align-items: start; }
/* the plots are drawn for white paper, in the dark too */
.panel, .legend { background: #fff; color: #1c2128; border: 1px solid var(--line); border-radius: 8px; }
.panel { padding: 10px; min-width: 0; }
.panel svg { display: block; width: 100%; height: auto; }
.panel svg text { font-family: system-ui, sans-serif !important; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; padding: 6px 12px; margin: 0 0 12px; list-style: none;
  font-size: .88rem; }
.legend li { display: flex; align-items: center; gap: 6px; }
.legend svg { width: 44px; height: 18px; flex: none; }
@media (min-width: 900px) { .facts dl { grid-template-columns: repeat(2, max-content minmax(0, 1fr)); }
  .beside { display: grid; grid-template-columns: 1fr 1fr; gap: 0 24px; }
  .beside h2 { grid-column: 1 / -1; } .beside .words { grid-column: 2; grid-row: 2; }
  .beside .panels { display: block; } }
.scroll, pre { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.scroll { overflow: auto; max-height: 85vh; }
table { border-collapse: separate; border-spacing: 0; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; text-align: left; white-space: nowrap; border-bottom: 1px solid var(--line); }
th { position: sticky; top: 0; background: var(--card); }
td.name { max-width: 24em; overflow: hidden; text-overflow: ellipsis; }
.number { text-align: right; }
footer { height: 48px; }
"""


def markdown(results: dict[str, Any]) -> str:
    """Verdict, provenance, table and how it was measured; no plots."""
    data = Data(results)
    parts = [f"# {_md(_title(data))}"]
    parts += [f"**{INCOMPLETE}**"] if results.get("complete") is False else []
    parts += [_md(verdict(data)), "\n".join(f"    {line}" for line in _command(data).splitlines())]
    parts += ["\n".join(f"- {_md(name)}: {_md(value)}" for name, value in facts(data)), "## Results"]
    columns, cells = table(data.rows)
    rules = ["---:" if column.is_number else "---" for column in columns]
    lines = [[_md(column.title) for column in columns], rules, *([_md(cell) for cell in row] for row in cells)]
    parts += ["\n".join(f"| {' | '.join(line)} |" for line in lines)] if cells else ["No rows."]
    if found := differences(data):
        parts += ["## Where greedy tokens part", "\n".join(f"- {_md(line)}" for line in found)]
    parts += ["## How it was measured", MEASURED]
    parts += ["\n".join(f"- {_md(column.title)}: {_md(column.meaning)}" for column in columns if column.meaning)]
    parts += [f"Options: {_md(options(data))}"] if options(data) else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _md(text: str) -> str:
    """Text that Markdown shows as it is, in a table too."""
    return re.sub(r"([\\`*\[\]|]|(?<!\w)_|_(?!\w))", r"\\\1", escape(" ".join(text.split()), quote=False))


def _title(data: Data) -> str:
    return f"FlashSpec bench: {data.provenance.get('model') or 'unnamed model'}"


def _command(data: Data) -> str:
    return str(data.provenance.get("command") or "")


def html(results: dict[str, Any]) -> str:
    """The page.

    Raises:
        OptionError: matplotlib is not installed.
    """
    data = Data(results)
    warning = f'<p class="warning"><strong>{INCOMPLETE}</strong></p>' if results.get("complete") is False else ""
    sections = [_plot(plot, number, data.numbers) for number, plot in enumerate(plots(data))]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(_title(data))}</title>
<style>{CSS}</style>
</head>
<body>
<header>
<h1>{escape(_title(data))}</h1>
{warning}
<p class="verdict">{escape(verdict(data))}</p>
{f"<pre>{escape(_command(data))}</pre>" if _command(data) else ""}
<div class="facts">{_definitions(facts(data))}</div>
</header>
<main>
{"".join(sections)}
<section><h2>All results</h2>{_html_table(data)}</section>
{_differences(data)}
<section><h2>How it was measured</h2>
<p>{MEASURED}</p>
{_definitions([(column.title, column.meaning) for column in table(data.rows)[0] if column.meaning])}
{f"<p>Options: {escape(options(data))}</p>" if options(data) else ""}
</section>
</main>
<footer></footer>
</body>
</html>
"""


def _plot(plot: Plot, number: int, numbers: dict[str, int]) -> str:
    pictures = [
        f'<div class="panel">{f"<h3>{escape(heading)}</h3>" if heading else ""}'
        f"{svg(draw, prefix=f'p{number}-{place}', label=said)}</div>"
        for place, (heading, said, draw) in enumerate(plot.panels)
    ]
    items = [
        f"<li>{swatch(numbers[label], prefix=f's{number}-{place}')}{escape(label)}</li>"
        for place, label in enumerate(plot.labels)
    ]
    legend = f'<ul class="legend">{"".join(items)}</ul>' if items else ""
    beside = ' class="beside"' if len(pictures) == 1 else ""
    return f"""<section{beside}>
<h2>{escape(plot.title)}</h2>
<div class="words"><p class="caption">{escape(plot.caption)}</p>{legend}</div>
<div class="panels">{"".join(pictures)}</div>
</section>
"""


def _html_table(data: Data) -> str:
    columns, cells = table(data.rows)
    kinds = ["number" if column.is_number else "name" for column in columns]
    head = "".join(f'<th scope="col" class="{k}">{escape(c.title)}</th>' for k, c in zip(kinds, columns, strict=True))
    rows = [
        "".join(f'<td class="{kind}">{escape(cell)}</td>' for kind, cell in zip(kinds, row, strict=True))
        for row in cells
    ]
    if not rows:
        return "<p>No rows.</p>"
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    # focusable, so that it can be scrolled with the keyboard
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="All results">
<table><thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody></table></div>"""


def _differences(data: Data) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in differences(data))
    return f"<section><h2>Where greedy tokens part</h2><ul>{items}</ul></section>" if items else ""


def _definitions(pairs: list[tuple[str, str]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{escape(value)}</dd>' for name, value in pairs)}</dl>"
