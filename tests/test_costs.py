"""The cost curve: its arithmetic, how it is measured, and the file it is kept in."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence as Seq
from pathlib import Path

import pytest
from conftest import ToyTarget

from flashspec import costs, loader
from flashspec.core import Draft, Score, Sequence
from flashspec.costs import CostCurve, measure, measured

IDENTITY = {"model": "toy", "threads": 2}


class TimedToy(ToyTarget):
    """Advances a clock of its own by what its forwards are said to take."""

    def __init__(self, seconds: Callable[[int, int], float], **options: int) -> None:
        super().__init__(**options)
        self.seconds = seconds
        self.now = 0.0
        self.num_forwards = 0

    def score(self, seqs: Seq[Sequence], drafts: Seq[Draft], *, hidden: bool = False) -> list[Score]:
        self.now += self.seconds(len(seqs), 1 + max(map(len, drafts)))
        self.num_forwards += 1
        # measuring scores the same context again and again, which a real target allows
        for seq in seqs:
            self.held[seq.id] = self.held.get(seq.id, [])[: len(seq) - 1]
        return super().score(seqs, drafts, hidden=hidden)


@pytest.fixture
def toy_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[TimedToy], None]:
    def use(target: TimedToy) -> None:
        monkeypatch.setattr(costs.time, "perf_counter", lambda: target.now)

    return use


def test_lines_between_and_beyond_the_points() -> None:
    curve = CostCurve(((1, 1.0), (4, 1.6), (8, 4.0)))
    assert [curve(n) for n in (1, 2, 4, 6, 8, 10)] == pytest.approx([1.0, 1.2, 1.6, 2.8, 4.0, 5.2])
    assert curve.ratio(4) == pytest.approx(1.6)
    assert CostCurve(((1, 2.0),))(7) == 2.0


def test_rows_cost_their_tokens_and_what_rows_add() -> None:
    curve = CostCurve(((1, 1.0), (4, 1.6), (8, 4.0)), ((1, 1.0), (4, 2.0)))
    assert curve(1, 4) == pytest.approx(2.0)
    assert curve(2, 4) == pytest.approx(4.0 + 0.4)
    assert curve.ratio(2, 4) == pytest.approx(2.2)
    assert CostCurve(((1, 1.0), (8, 4.5)))(2, 4) == pytest.approx(4.5), "without measured rows, tokens count"


def test_whether_rows_are_packed_is_the_targets_to_say(tmp_path: Path, toy_clock: Callable[[TimedToy], None]) -> None:
    """Also of a curve that was kept when they were not."""
    toy = TimedToy(lambda rows, width: 0.1)
    toy_clock(toy)
    assert not measured(toy, {}, tmp_path).is_ragged
    toy.packs_rows = True  # type: ignore[attr-defined]
    assert measured(toy, {}, tmp_path).is_ragged
    assert measure(toy).is_ragged


def test_measured_seconds_are_the_targets(toy_clock: Callable[[TimedToy], None]) -> None:
    toy = TimedToy(lambda rows, width: 0.1 + 0.01 * rows * width + 0.05 * (rows - 1))
    toy_clock(toy)
    curve = measure(toy, max_rows=6, widths=(1, 2, 4, 8))
    assert [curve(n) for n in (1, 2, 8)] == pytest.approx([0.11, 0.12, 0.18])
    assert [rows for rows, _ in curve.rows] == [1, 2, 4, 6]
    assert curve(1, 6) == pytest.approx(0.1 + 0.06 + 0.25)
    assert curve(3, 2) == pytest.approx(0.1 + 0.06 + 0.05)
    assert not toy.held, "the sequences it measured with are gone"


def test_one_slow_run_does_not_count_and_more_tokens_never_cost_less(toy_clock: Callable[[TimedToy], None]) -> None:
    turns = iter(range(10**6))
    toy = TimedToy(lambda rows, width: {1: 1.0, 2: 0.9, 3: 1.1}[width] + 50.0 * (next(turns) in (5, 6)))
    toy_clock(toy)
    assert [seconds for _, seconds in measure(toy, widths=(1, 2, 3)).widths] == pytest.approx([0.95, 0.95, 1.1])


def test_a_short_context_is_measured_as_far_as_it_goes(toy_clock: Callable[[TimedToy], None]) -> None:
    toy = TimedToy(lambda rows, width: width, max_length=6)
    toy_clock(toy)
    assert [n for n, _ in measure(toy).widths] == [1, 2, 3, 4, 5]


@pytest.fixture
def toy(toy_clock: Callable[[TimedToy], None]) -> TimedToy:
    found = TimedToy(lambda rows, width: 0.125 * width)  # sums without rounding
    toy_clock(found)
    return found


def only_file(folder: Path) -> Path:
    (file,) = folder.iterdir()
    return file


def test_the_kept_curve_is_used_again_for_the_same_machine_only(toy: TimedToy, tmp_path: Path) -> None:
    first = measured(toy, IDENTITY, tmp_path)
    count = toy.num_forwards
    assert measured(toy, IDENTITY, tmp_path) == first
    assert toy.num_forwards == count
    for other in ({**IDENTITY, "threads": 4}, {**IDENTITY, "torch": "9"}):
        before = toy.num_forwards
        measured(toy, other, tmp_path)
        assert toy.num_forwards > before
    before = toy.num_forwards
    measured(toy, IDENTITY, tmp_path, max_rows=4)
    assert toy.num_forwards > before
    assert len(list(tmp_path.iterdir())) == 4


BROKEN = ["", "{", "[]", "null", '{"identity": 3}', "\x00\xff", "[" * 100_000]


@pytest.mark.parametrize("content", BROKEN)
def test_a_corrupt_file_is_ignored_with_a_warning(
    toy: TimedToy, tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    curve = measured(toy, IDENTITY, tmp_path)
    file = only_file(tmp_path)
    file.write_text(content, encoding="latin-1")
    with caplog.at_level(logging.WARNING, "flashspec"):
        assert measured(toy, IDENTITY, tmp_path) == curve
    assert str(file) in caplog.text
    caplog.clear()
    measured(toy, IDENTITY, tmp_path)
    assert not caplog.text, "it was written anew"


@pytest.mark.parametrize(
    "change",
    [
        {"identity": {"model": "another"}},
        {"widths": []},
        {"widths": [[1, -1.0]]},
        {"widths": [[1, float("nan")]]},
        {"widths": [[2, 1.0], [1, 1.0]]},
        {"widths": "many"},
        {"rows": [[0, 1.0]]},
    ],
)
def test_a_foreign_or_senseless_file_is_ignored_with_a_warning(
    toy: TimedToy, tmp_path: Path, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    curve = measured(toy, IDENTITY, tmp_path)
    file = only_file(tmp_path)
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    with caplog.at_level(logging.WARNING, "flashspec"):
        assert measured(toy, IDENTITY, tmp_path) == curve
    assert "measuring again" in caplog.text


def test_a_folder_that_cannot_be_written_costs_time_only(toy: TimedToy, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    assert measured(toy, IDENTITY, tmp_path / "file" / "costs") == measure(toy)


def test_a_loaded_models_curve_depends_on_threads_and_versions(smollm2_path: Path) -> None:
    identity = loader.load_model(smollm2_path).identity
    assert {"model", "config", "dtype", "device", "cpu", "threads", "torch", "transformers"} <= set(identity)
    json.dumps(identity)
