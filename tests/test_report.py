"""The report: numbers that parse back, text that stays text, and a page that a browser shows without complaint."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from flashspec.errors import OptionError
from flashspec.report import check_report, html, markdown, write_report

NASTY = '翻译 <b>&"x"|'
TASKS = {"humaneval_edit": 0.96, "gsm8k": 0.75, NASTY: 0.55}  # acceptance of one token
KS = (1, 2, 3, 5, 8, "auto")
CHROMIUM = Path("/usr/bin/chromium")
TITLES = [
    "Speedup by task",
    "Speedup over draft length",
    "Acceptance by position",
    "Speedup over batch size",
    "Cost of a forward: cost(n) / cost(1)",
]


def row(task: str, drafter: str, k: int | str | None, batch: int, speedup: float | None, **more: Any) -> dict[str, Any]:
    tpot = 0.22 / (speedup or 1)
    return {
        "task": task, "drafter": drafter, "draft": "/models/draft-0.5b" if drafter == "model" else None,
        "num_speculative_tokens": k, "batch": batch, "temperature": 0.0, "num_runs": 4,
        "tokens_per_second": batch / tpot, "ttft": 1.5, "tpot": tpot, "total": 1.5 + 64 * tpot,
        "spread": {"tpot": [tpot * 0.9, tpot * 1.2], "tokens_per_second": [batch / tpot / 1.2, batch / tpot / 0.9]},
        "mean_acceptance_length": None, "acceptance_rate": None, "acceptance_by_position": None,
        "speedup": speedup, "speedup_spread": speedup and [speedup * 0.9, speedup * 1.1],
        "speedup_hf": speedup and speedup * 0.9, "speedup_e2e": speedup and speedup * 0.8, "predicted_speedup": None,
        "greedy_equal": True, "differences": [], "time_shares": None, "peak_memory": 7 * 2**30, "draft_lengths": None,
    } | more  # fmt: skip


def speculative(task: str, drafter: str, k: int | str, batch: int) -> dict[str, Any]:
    rate, cost = TASKS[task], {"ngram": 0.01, "model": 0.15}[drafter]
    length = 4 if k == "auto" else int(k)
    rates = [rate * 0.98**at for at in range(length)]
    tokens = 1 + sum(math.prod(rates[: at + 1]) for at in range(length))
    speedup = tokens / ((1 + 0.08 * length * batch) + cost * length)
    return row(
        task, drafter, k, batch, speedup, mean_acceptance_length=tokens, acceptance_rate=(tokens - 1) / length,
        acceptance_by_position=rates, predicted_speedup=speedup * 1.07,
        time_shares={"draft": 0.2, "verify": 0.7, "sample": 0.05, "outside_forwards": 0.04},
        draft_lengths={"0": 1, str(length): 9},
    )  # fmt: skip


def example() -> dict[str, Any]:
    """Three tasks, two drafters over k and batch sizes, Transformers' methods without statistics."""
    rows = []
    for task in TASKS:
        for batch in (1, 2, 4):
            rows.append(row(task, "none", None, batch, 1.0))
            rows += [speculative(task, drafter, k, batch) for drafter in ("ngram", "model") for k in KS]
        for name, speedup in (("hf_generate", 1.0), ("hf_prompt_lookup", 1.6), ("hf_assisted", 0.8)):
            rows.append(row(task, name, None, 1, speedup, peak_memory=None, spread=None, speedup_spread=None))
    gap = {"prompt": NASTY, "position": 7, "gap": 2e-6, "is_tie": True}
    rows[4] |= {"greedy_equal": False, "differences": [gap]}
    return {
        "schema": 1,
        "complete": True,
        "provenance": {
            "command": "flashspec bench --draft '<i>0.5b</i>' --prompts 'a|b.jsonl'\n  --report out",
            "date": "2026-12-01T10:00:00+00:00", "commit": "5f12e4f", "model": "Qwen2.5-1.5B <script>", "draft": None,
            "machine": {"cpu": "Xeon <b>", "cores": 2, "threads": 2, "gpu": None, "python": "3.11.7"},
            "options": {"max_tokens": 64, "dtype": None, "prompts": [Path("a|b.jsonl").name]},
        },
        "costs": {
            "target": {
                "widths": [[n, 0.2 + 0.02 * n] for n in (1, 2, 4, 8, 17)], "rows": [[1, 0.22], [2, 0.23], [4, 0.27]]
            },
            "draft": {"widths": [[1, 0.04], [2, 0.045], [4, 0.05], [16, 0.07], [64, 0.2]], "rows": []},
        },
        "rows": rows,
    }  # fmt: skip


def by_speedup(row: dict[str, Any]) -> float:
    return float(row["speedup"])


def fastest(task: str, drafter: str) -> dict[str, Any]:
    rows = [row for row in example()["rows"] if (row["task"], row["drafter"], row["batch"]) == (task, drafter, 1)]
    return max(rows, key=by_speedup)


def small(*keep: str, batches: tuple[int, ...] = (1,), ks: tuple[Any, ...] = (5, None)) -> dict[str, Any]:
    """The example with some drafters, batch sizes and draft lengths of its first task, without costs."""
    rows = [row for row in example()["rows"] if row["task"] == "humaneval_edit" and row["drafter"] in ("none", *keep)]
    kept = [row for row in rows if row["batch"] in batches and row["num_speculative_tokens"] in ks]
    return example() | {"costs": None, "rows": kept}


class Page(HTMLParser):
    """What the tests look at; parsing fails where tags do not nest."""

    VOID = frozenset({"meta", "br", "path", "use", "rect", "circle", "line"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # (tag, name, value)
        self.rows: list[list[str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in {"meta", "br"}:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in {"td", "th"}:
            self.rows[-1].append("")
        self.texts.setdefault(tag, []).append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self.open[-1:]:
            self.texts[tag][-1] += data
            if tag in {"td", "th"}:
                self.rows[-1][-1] += data

    def values(self, name: str) -> list[str]:
        return [value for _, key, value in self.attributes if key == name]


def markdown_rows(text: str) -> list[list[str]]:
    """The cells of the table, as Markdown shows them; the rule under the head is left out."""
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    cells = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]
    shown = [[unescape(re.sub(r"\\([\\`*_\[\]|])", r"\1", cell.strip())) for cell in row] for row in cells]
    return shown[:1] + shown[2:]


def check_table(shown: list[list[str]], rows: list[dict[str, Any]]) -> None:
    head, body = shown[0], [dict(zip(shown[0], cells, strict=True)) for cells in shown[1:]]
    assert len(head) == len(set(head))
    for cells, row in zip(body, rows, strict=True):
        k = "" if row["num_speculative_tokens"] is None else str(row["num_speculative_tokens"])
        assert (cells["task"], cells["drafter"], cells["k"]) == (row["task"], row["drafter"], k)
        assert int(cells["batch"]) == row["batch"]
        for title, value, digits in (
            ("tok/s", row["tokens_per_second"], 2),
            ("TTFT s", row["ttft"], 3),
            ("TPOT ms", row["tpot"] * 1000, 1),
            ("speedup", row["speedup"], 2),
            ("predicted", row["predicted_speedup"], 2),
            ("length", row["mean_acceptance_length"], 2),
            ("peak GiB", row["peak_memory"] and row["peak_memory"] / 2**30, 2),
        ):
            if value is None:
                assert cells[title] == ""
            else:
                assert float(cells[title]) == pytest.approx(value, abs=0.5001 * 10**-digits)
        if row["acceptance_rate"] is not None:
            assert float(cells["accepted"].removesuffix("%")) / 100 == pytest.approx(row["acceptance_rate"], abs=6e-4)
        assert cells["equal"] == ("yes" if row["greedy_equal"] else "no")


@pytest.fixture(scope="module")
def text() -> str:
    return html(example())


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_tables_hold_the_rows(page: Page) -> None:
    check_table(page.rows, example()["rows"])
    check_table(markdown_rows(markdown(example())), example()["rows"])


def test_all_plots_with_every_task(page: Page) -> None:
    assert [title.strip() for title in page.texts["h2"]][:5] == TITLES
    says = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    for title in ("Speedup over draft length", "Acceptance by position", "Speedup over batch size"):
        assert [say for say in says if say.startswith(title)] == [f"{title}, {task}" for task in TASKS]
    assert sum(say.startswith("Speedup by task") for say in says) == 2
    assert sum(say.startswith("cost of") for say in says) == 2


def test_bars_say_the_best_speedups(page: Page) -> None:
    texts = page.texts["text"]
    for task in TASKS:
        assert task in texts
        for drafter in ("ngram", "model", "hf_assisted"):
            winner = fastest(task, drafter)
            assert f"{winner['speedup']:.2f}×" in texts
            k = winner["num_speculative_tokens"]
            assert (drafter if k is None else f"{drafter} k={k}") in texts
    assert "auto" in texts


def test_verdict_names_the_best_of_each_task(page: Page) -> None:
    verdict = next(text for text in page.texts["p"] if text.startswith("Best"))
    for task in TASKS:
        winner = max((fastest(task, name) for name in ("ngram", "model", "hf_prompt_lookup")), key=by_speedup)
        assert f"{winner['speedup']:.2f}× on {task} ({winner['drafter']}" in verdict
    assert re.sub(r"\\(.)", r"\1", unescape(markdown(example()))).count(verdict) == 1


def test_nothing_is_loaded_and_nothing_runs(page: Page, text: str) -> None:
    assert not {"script", "link", "img", "iframe", "b", "i"} & set(page.texts)
    assert all(value.startswith("#") for name in ("href", "xlink:href", "src") for value in page.values(name))
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    # names of XML dialects are no addresses
    assert not re.search(r"(https?:)?//\w", re.sub(r' xmlns(:xlink)?="[^"]*"', "", text))
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_identifiers_do_not_clash(page: Page, text: str) -> None:
    names = page.values("id")
    assert len(names) == len(set(names))
    used = re.findall(r'(?:url\(|href=")#([^)"]+)', text)
    assert used
    assert set(used) <= set(names)


def test_same_results_give_the_same_page(text: str) -> None:
    assert html(example()) == text


def test_markdown_shows_text_as_it_is() -> None:
    report = markdown(example())
    assert "<" not in report.replace("'<i>0.5b</i>'", "")  # the command is a code block, verbatim
    assert "    flashspec bench --draft '<i>0.5b</i>' --prompts 'a|b.jsonl'\n" in report
    odd = example() | {"rows": [row("a\\|b\n`c` *d* _e_ [f] g_h", "none", None, 1, None)]}
    assert markdown_rows(markdown(odd))[1][0] == "a\\|b `c` *d* _e_ [f] g_h"
    assert r"| a\\\|b \`c\` \*d\* \_e\_ \[f\] g_h |" in markdown(odd)


def test_differences_and_provenance_are_listed(page: Page) -> None:
    assert f"humaneval_edit, ngram k=5, batch 1: prompt {NASTY} parts at token 7" in page.texts["li"][-1]
    assert page.texts["li"][-1].endswith("2.0e-06 standard deviations apart: a tie in this precision")
    assert page.texts["pre"] == [example()["provenance"]["command"]]
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert (facts["commit"], facts["cpu"], facts["cores"]) == ("5f12e4f", "Xeon <b>", "2")
    assert "gpu" not in facts


@pytest.mark.parametrize(
    ("results", "titles"),
    [
        (small("ngram"), [TITLES[2]]),
        (small("ngram", "model"), [TITLES[0], TITLES[2]]),
        (small("ngram", ks=(1, None)), []),
        (small("ngram", ks=(1, "auto", None)), [TITLES[2]]),
        (small("ngram", ks=(1, 2, None)), [TITLES[1], TITLES[2]]),
        (small("ngram", batches=(2, 4), ks=(1, None)), [TITLES[3]]),
        (small("hf_generate"), []),
    ],
)
def test_plots_without_a_comparison_are_left_out(results: dict[str, Any], titles: list[str]) -> None:
    page = Page(html(results))
    assert page.texts["h2"][: page.texts["h2"].index("All results")] == titles
    assert page.values("aria-label").count("All results") == 1


def holes() -> Iterator[dict[str, Any]]:
    """The example without some of it: every field of a row in turn, then whole parts."""
    for key in example()["rows"][1]:
        results = small("ngram", "model", batches=(1, 2), ks=(1, 5, "auto", None))
        for number, line in enumerate(results["rows"]):
            line[key] = None
            if number % 2:
                del line[key]
        yield results
    for key in example():
        yield {name: value for name, value in small("ngram").items() if name != key}
    yield {}
    yield {"rows": [{}], "provenance": {"machine": None}, "costs": {"target": None, "draft": {}}}
    odd = {"speedup": math.inf, "ttft": math.nan, "acceptance_by_position": [None, 0.5]}
    yield {"rows": [row("t", "ngram", 2, 1, 1.5) | odd, row("t", "model", 2, 1, 1.5, speedup_spread=[None, 2])]}
    yield example() | {"rows": []}


def test_missing_values() -> None:
    for results in holes():
        Page(html(results))
        markdown(results)


def test_an_interrupted_run_says_so(text: str) -> None:
    cut = small("ngram") | {"complete": False}
    assert "interrupted" in html(cut)
    assert "interrupted" in markdown(cut)
    assert "interrupted" not in text
    assert "interrupted" not in markdown(example())


def test_plots_show_the_first_temperature() -> None:
    cold = small("ngram", "model", ks=(1, 2, 5, None))["rows"]
    rows = cold + [{**row, "temperature": 0.7, "speedup": 3 * row["speedup"]} for row in cold]
    one, both = html(example() | {"rows": cold}), html(example() | {"rows": rows})
    assert re.findall("<svg.*?</svg>", both, re.DOTALL) == re.findall("<svg.*?</svg>", one, re.DOTALL)
    assert "at batch 1 and temperature 0:" in both
    assert [cells[5] for cells in Page(both).rows[1:]] == ["0"] * len(cold) + ["0.7"] * len(cold)


def test_a_slowdown_is_no_success() -> None:
    slow = example() | {"rows": [row("t", "ngram", 5, 1, 0.9)]}
    assert "0.90× on t (ngram k=5, nothing was faster)" in html(slow)


def test_hundreds_of_rows() -> None:
    rows = [
        {**line, "task": f"{line['task']} {copy}"}
        for copy in range(6)
        for line in example()["rows"]
        if line["batch"] == 1
    ]
    assert len(rows) > 250
    text = html(example() | {"rows": rows})
    page = Page(text)
    check_table(page.rows, rows)
    assert "first 12 of 18 panels" in text
    assert "on 12 more tasks" in text


def test_drafters_with_several_draft_models_are_told_apart() -> None:
    results = small("model", ks=(1, 2, None))
    results["rows"] += [{**line, "draft": "org/big-3b"} for line in results["rows"] if line["drafter"] == "model"]
    assert {"model draft-0.5b", "model big-3b"} <= {item.strip() for item in Page(html(results)).texts["li"]}


def test_files(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "报告"
    results = small("ngram", "model")
    results["rows"][0] |= {"ttft": math.nan, "task": "\ud800"}
    for _ in range(2):  # the second replaces
        paths = write_report(results, folder)
    assert sorted(folder.iterdir()) == sorted(paths)
    assert [path.name for path in paths] == ["results.json", "report.md", "report.html"]
    read = json.loads(paths[0].read_text(encoding="utf-8"), parse_constant=pytest.fail)
    assert read["rows"][1:] == results["rows"][1:]
    assert read["rows"][0] == results["rows"][0] | {"ttft": None}
    assert math.isnan(results["rows"][0]["ttft"])  # not changed under the caller's hands


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for call in (check_report, lambda folder: write_report(small("ngram"), folder)):
        with pytest.raises(OptionError, match=r"cannot write .*file.*give --report a folder"):
            call(tmp_path / "file")
    check_report(tmp_path / "fine")
    assert list((tmp_path / "fine").iterdir()) == []


def test_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for call in (check_report, lambda folder: write_report(small("ngram"), folder)):
        with pytest.raises(OptionError, match=r"pip install 'flashspec-decoding\[report\]'"):
            call(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"results.json", "report.md"}  # what was measured is not lost


def test_in_a_browser(text: str, tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    path = tmp_path / "report.html"
    path.write_text(text, encoding="utf-8")
    with playwright.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"], headless=True)
        complaints: list[str] = []
        requests: list[str] = []
        for width, scheme in ((360, "light"), (1200, "dark")):
            tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
            tab.on("console", lambda message: complaints.append(message.text))
            tab.on("pageerror", lambda error: complaints.append(str(error)))
            tab.on("request", lambda request: requests.append(request.url))
            tab.goto(path.as_uri())
            sizes = [svg.bounding_box() for svg in tab.locator("svg").all() if svg.is_visible()]
            assert len(sizes) == text.count("<svg")
            assert all(size["width"] > 20 and size["height"] > 10 for size in sizes)
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.locator(".scroll").evaluate("e => e.scrollWidth > e.clientWidth")  # the table scrolls inside
            background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (max(map(int, re.findall(r"\d+", background))) < 60) == (scheme == "dark")
        browser.close()
    assert complaints == []
    assert set(requests) == {path.as_uri()}
