"""The benchmark's order, its rows, what it keeps when it is interrupted, and what tune makes of it."""

from __future__ import annotations

import io
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Ran
from rich.console import Console
from test_cli import models

from flashspec.bench import BenchOptions, run as bench_run, tune
from flashspec.bench.methods import PLAIN, Method, Run
from flashspec.bench.prompts import Task
from flashspec.bench.rows import Condition, rows_of
from flashspec.bench.run import RUNS, measured
from flashspec.core import SpecStats
from flashspec.costs import CostCurve
from flashspec.errors import OptionError

__all__ = ["models"]  # a fixture
Call = Callable[..., Ran]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{i}", "task": "数数", "prompt": f"{i} 1 2 3 1 2 3 1 2"} for i in range(3)]
    file.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    return file


@pytest.fixture
def run(models: Path, monkeypatch: pytest.MonkeyPatch, flashspec_command: Call) -> Call:
    """``flashspec`` in the folder of the models."""
    monkeypatch.chdir(models)
    return flashspec_command


def last_json(ran: Ran) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(ran.out.splitlines()[-1])
    return found


@pytest.mark.parametrize(("words", "chosen"), [([], "suffix"), (["--draft", "draft"], "hybrid")])
def test_auto_stands_for_a_drafter(run: Call, prompts: Path, words: list[str], chosen: str) -> None:
    ran = run(
        "bench", "--model", "target", *words, "--drafters", "auto", "--prompts", str(prompts), "--max-tokens", "4"
    )
    assert ran.code == 0, ran.err
    assert [row["drafter"] for row in last_json(ran)["rows"]] == [PLAIN, chosen]


def test_lengths_batches_and_temperatures(run: Call, prompts: Path) -> None:
    ran = run("bench", "--model", "target", "--draft", "draft", "--drafters", "ngram,model", "--prompts", str(prompts),
              "--num-speculative-tokens", "2,auto", "--batch", "1,2", "--temperature", "0,0.8", "--repeat", "2",
              "--max-tokens", "6", "--ignore-eos")  # fmt: skip
    assert ran.code == 0, ran.err
    rows = last_json(ran)["rows"]
    settings = [("none", 0), ("ngram", 2), ("ngram", "auto"), ("model", 2), ("model", "auto")]
    expected = [(batch, heat, *setting) for heat in (0.0, 0.8) for batch in (1, 2) for setting in settings]
    names = ("batch", "temperature", "drafter", "num_speculative_tokens")
    assert [tuple(row[name] for name in names) for row in rows] == expected
    for row in rows:
        assert row["num_runs"] == (6 if row["batch"] == 1 else 4)  # 3 prompts, or 2 groups of 2, twice
        assert row["tokens_per_second"] > 0
        if row["temperature"] == 0 and row["drafter"] != PLAIN:
            assert row["greedy_equal"] or all(each["is_tie"] for each in row["differences"])
        if row["batch"] == 1:
            assert row["predicted_speedup"] > 0
    assert all(len(row["draft_lengths"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch", "0"], "batch is 0"),
        (["--batch", "two"], "'two'"),
        (["--batch", ","], "batch is empty"),
        (["--temperature", "-1"], "temperature is -1"),
        (["--num-speculative-tokens", "1,many"], "'many'"),
        (["--repeat", "0"], "repeat is 0"),
        (["--report", "config.json/below"], "config.json"),
        (["--drafters", "model"], "--draft"),
    ],
)
def test_bad_input(run: Call, prompts: Path, models: Path, words: list[str], message: str) -> None:
    (models / "config.json").write_text("{}", encoding="utf-8")
    ran = run("bench", "--model", "target", "--prompts", str(prompts), *words)
    assert ran.code == 2
    assert message in ran.err.replace("\n", "")
    assert "Traceback" not in ran.err


# interrupted and resumed


def options(prompts: Path, folder: Path, **others: Any) -> BenchOptions:
    return BenchOptions(**{"prompts": [prompts], "model": "target", "max_tokens": 5, "report": folder, **others})


class Interrupting:
    """Stands in for ``_engine_run``: real runs, but Ctrl-C at the n-th."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
        self.calls, self.after = 0, after
        real = bench_run.Journal.add

        def add(journal: bench_run.Journal, key: str, result: Run) -> None:
            if self.calls == self.after:
                raise KeyboardInterrupt
            self.calls += 1
            real(journal, key, result)

        monkeypatch.setattr(bench_run.Journal, "add", add)


def quiet() -> Console:
    return Console(file=io.StringIO())


def test_an_interrupted_run_keeps_what_it_measured_and_goes_on(
    models: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    folder = tmp_path / "out"
    with monkeypatch.context() as patch:
        Interrupting(patch, after=3)
        first = measured(options(prompts, folder), quiet())
    assert first["complete"] is False
    assert sum(row["num_runs"] for row in first["rows"]) == 3
    kept = (folder / RUNS).read_text(encoding="utf-8").splitlines()[1:]
    assert len(kept) == 3

    with (folder / RUNS).open("a", encoding="utf-8") as file:
        file.write('{"key": "torn off in the mid')  # as after kill -9
    with monkeypatch.context() as patch:
        counter = Interrupting(patch, after=10**6)
        second = measured(options(prompts, folder), quiet())
    assert second["complete"] is True
    assert counter.calls == 3, "3 prompts, 2 methods: 3 runs were left"
    lines = (folder / RUNS).read_text(encoding="utf-8").splitlines()
    assert lines[1:4] == kept, "what was measured is as it was"
    assert len({json.loads(line)["key"] for line in lines[1:]}) == 6
    assert second["provenance"]["date"] == first["provenance"]["date"]

    with monkeypatch.context() as patch:
        counter = Interrupting(patch, after=0)
        assert measured(options(prompts, folder), quiet())["rows"] == second["rows"]


@pytest.mark.parametrize(("change", "name"), [({"max_tokens": 4}, "max_tokens"), ({"repeat": 2}, "repeat")])
def test_other_options_do_not_mix_with_what_is_there(
    models: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], name: str
) -> None:
    monkeypatch.chdir(models)
    measured(options(prompts, tmp_path / "out"), quiet())
    before = (tmp_path / "out" / RUNS).read_bytes()
    with pytest.raises(OptionError, match=f"another {name}"):
        measured(options(prompts, tmp_path / "out", **change), quiet())
    assert (tmp_path / "out" / RUNS).read_bytes() == before


def test_a_file_that_is_no_journal_is_left_alone(
    models: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    (tmp_path / RUNS).write_text("my own notes\n", encoding="utf-8")
    with pytest.raises(OptionError, match="not a file of runs"):
        measured(options(prompts, tmp_path), quiet())
    assert (tmp_path / RUNS).read_text(encoding="utf-8") == "my own notes\n"


def test_ctrl_c_ends_with_the_report_of_what_was_measured(
    run: Call, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Interrupting(monkeypatch, after=4)
    ran = run("bench", "--model", "target", "--prompts", str(prompts), "--max-tokens", "5", "--report",
              str(tmp_path / "out"))  # fmt: skip
    assert ran.code == 130
    assert len(last_json(ran)["rows"]) == 2
    assert json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))["complete"] is False


# rows by hand


def a_run(
    tpot: float, *, tokens: int = 11, lengths: dict[str, int] | None = None, stats: SpecStats | None = None
) -> Run:
    stats = stats or SpecStats(draft_lengths=lengths or {"0": tokens})
    return Run([[1] * tokens], 0.5, tpot, 0.5 + tpot * (tokens - 1), stats)


def test_speedups_are_medians_of_ratios_and_the_prediction_is_the_formula() -> None:
    task = Task("t", [("a", [1, 2]), ("b", [3])])
    plain, auto = Method(PLAIN, 0, None), Method("ngram", 3, None)  # type: ignore[arg-type]
    stats = SpecStats(num_drafts=2, num_draft_tokens=6, num_accepted_tokens=4, draft_lengths={"0": 5, "3": 2},
                      num_accepted_tokens_per_pos=[2, 1, 1], num_reached_per_pos=[2, 2, 1])  # fmt: skip
    runs = {
        json.dumps(["t", method.label, 1, 0.0, number, 0]): result
        for number in (0, 1)
        for method, result in (
            (plain, a_run(0.2 * (number + 1))),
            (auto, a_run(0.1, stats=stats)),
        )
    }
    curve = CostCurve(((1, 1.0), (4, 1.5)))
    rows = rows_of([task], [plain, auto], [Condition(1, 0.0)], runs, None, {None: curve})  # type: ignore[arg-type]
    row = rows[1]
    assert row["speedup"] == pytest.approx((2 + 4) / 2)
    assert row["speedup_spread"] == pytest.approx([2, 4])
    assert row["mean_acceptance_length"] == 3
    assert row["acceptance_by_position"] == [1.0, 0.5, 1.0]
    # ten tokens after the first: plain 10 steps; here 4 plain ones (the first of the 5 reads the prompt), 2 of cost 1.5
    assert row["predicted_speedup"] == pytest.approx(10 / (4 + 2 * 1.5))
    assert rows[0]["predicted_speedup"] == pytest.approx(10 / 10)


# tune and --config


def test_tune_writes_what_generate_chat_and_bench_take(run: Call, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "flashspec.toml"
    ran = run("tune", "--model", "target", "--draft", "draft", "--prompts", str(prompts), "--max-tokens", "6",
              "--num-speculative-tokens", "2,auto", "--out", str(out))  # fmt: skip
    assert ran.code == 0, ran.err
    chosen = last_json(ran)["chosen"]
    assert len(last_json(ran)["settings"]) == 5
    text = out.read_text(encoding="utf-8")
    config = tomllib.loads(text)
    assert config["drafter"] == chosen["drafter"]
    assert config["num_speculative_tokens"] == chosen["num_speculative_tokens"]
    assert Path(config["model"]).is_absolute()
    again = run("tune", "--model", "target", "--prompts", str(prompts), "--out", str(out))
    assert again.code == 2
    assert "--force" in again.err
    lines = [line for line in text.splitlines() if not line.startswith(("drafter", "draft =", "num"))]
    out.write_text("\n".join([*lines, 'drafter = "model"', 'draft = "draft"']), encoding="utf-8")
    for words in (["generate", "hi", "--stats"], ["bench", "--prompts", str(prompts)]):
        words += ["--max-tokens", "4"]
        used = run(*words, "--config", str(out))
        assert used.code == 0, used.err
    assert [row["drafter"] for row in last_json(used)["rows"]] == ["none", "model"]


def test_flags_win_over_the_configuration(run: Call, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text(
        'model = "target"\nmax_tokens = 3\ndrafter = "none"\ntemperature = 0.5\nseed = 1\n', encoding="utf-8"
    )
    assert len(json.loads(run("generate", "hi", "--config", str(config), "--json", "--ignore-eos").out)["tokens"]) == 3
    ran = run("generate", "hi", "--config", str(config), "--json", "--ignore-eos", "--max-tokens", "5")
    assert len(json.loads(ran.out)["tokens"]) == 5


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model = ", "cannot read"),
        ('modell = "x"', "'modell'"),
        ("[draft]\nname = 1", "[draft]"),
        (None, "cannot read"),
    ],
)
def test_a_bad_configuration_is_named(run: Call, tmp_path: Path, text: str | None, message: str) -> None:
    config = tmp_path / "c.toml"
    if text is not None:
        config.write_text(text, encoding="utf-8")
    ran = run("generate", "hi", "--config", str(config))
    assert ran.code == 2
    assert message in ran.err.replace("\n", "")


def entry(drafter: str, length: int | str, speed: float) -> dict[str, Any]:
    return {"drafter": drafter, "draft": None, "num_speculative_tokens": length, "speedup": speed, "speedup_e2e": speed}


def test_the_fastest_is_chosen_and_auto_if_it_is_near() -> None:
    plain, fixed = entry("none", 0, 1.0), entry("ngram", 8, 1.5)
    assert tune.best([fixed, entry("ngram", "auto", 1.47), plain])["num_speculative_tokens"] == "auto"
    assert tune.best([fixed, entry("ngram", "auto", 1.3), plain]) == fixed
    assert tune.best([plain, entry("ngram", "auto", 0.9)]) == plain


def test_names_of_any_kind_survive_the_configuration(tmp_path: Path) -> None:
    name = '模型"\\\n\x7f#'
    text = tune.config_text(
        {**entry("model", 4, 1.5), "draft": name}, [], BenchOptions(prompts=[Path("p")], model=name)
    )
    assert tomllib.loads(text)["model"] == name
    assert tomllib.loads(text)["draft"] == name
