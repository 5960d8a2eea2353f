"""What is measured, in which order, and how it is kept so that an interruption loses nothing."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flashspec.bench.methods import (
    PLAIN,
    Curves,
    Method,
    Run,
    engine_methods,
    hf_methods,
    llamacpp_methods,
    pairs_of,
    remote_run,
)
from flashspec.bench.prompts import Task, read_prompts, tasks_of
from flashspec.bench.rows import Condition, difference_line, rows_of, table
from flashspec.controller import AUTO
from flashspec.core import SamplingParams
from flashspec.costs import CostCurve
from flashspec.errors import OptionError
from flashspec.loader import DRAFTERS, cost_curve, draft_curve, heads_read
from flashspec.machine import machine
from flashspec.pretrained import Loaded, backend_of, load_model, load_plain
from flashspec.report import check_report, write_report
from flashspec.scheduler import check_draft_length
from flashspec.trained import Heads, load_heads
from flashspec.weights import gguf_file

RUNS = "runs.jsonl"  # in the report's folder
TABLE_WIDTH = 140


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What ``flashspec bench`` was asked for."""

    prompts: list[Path]
    model: str | None = None
    drafts: list[str] = field(default_factory=list)
    drafters: list[str] = field(default_factory=lambda: [PLAIN, "ngram"])
    num_speculative_tokens: list[int | str] = field(default_factory=lambda: [AUTO])
    batch: list[int] = field(default_factory=lambda: [1])
    temperature: list[float] = field(default_factory=lambda: [0.0])
    repeat: int = 1
    limit: int = 4
    max_tokens: int = 64
    ignore_eos: bool = False
    hf: bool = False
    backend: str = AUTO
    draft_backend: str = AUTO
    draft_dtype: str | None = None
    draft_vocab: int | None = None
    draft_width: list[int | None] = field(default_factory=lambda: [None])
    threads: int | None = None
    gpu_layers: int = 0
    device: str | None = None
    dtype: str | None = None
    pack: bool = True
    trust_remote_code: bool = False
    url: list[str] = field(default_factory=list)  # of running servers, measured beside
    api_key: str | None = field(default=None, repr=False)
    ready_seconds: float = 900.0  # until a vLLM of our own has to answer
    report: Path | None = None

    @property
    def conditions(self) -> list[Condition]:
        return [Condition(batch, temperature) for temperature in self.temperature for batch in self.batch]


@dataclass(frozen=True, slots=True)
class Unit:
    """One run of one method: the smallest thing that is kept."""

    task: Task
    method: Method
    condition: Condition
    number: int  # which of the task's prompts, or groups of them
    repetition: int

    @property
    def key(self) -> str:
        names = (self.task.name, self.method.label, self.condition.batch, self.condition.temperature)
        return json.dumps([*names, self.number, self.repetition], ensure_ascii=False)


def run_bench(options: BenchOptions, screen: Console) -> list[dict[str, Any]]:
    """Measure, print a table and the last line of JSON, write the report; the rows.

    Raises:
        FlashSpecError: unreadable prompts, unknown drafters, models that do not load.
    """
    results = measured(options, screen)
    paper = Console(highlight=False)
    paper.width = max(paper.width, TABLE_WIDTH)  # a cut table is worth less than a wrapped one
    paper.print(table(results["rows"], max_tokens=options.max_tokens))
    for row in results["rows"]:
        for difference in row["differences"]:
            paper.print(difference_line(row, difference), soft_wrap=True)
    if options.report is not None:
        for file in write_report(results, options.report):
            screen.print(f"written: {escape(str(file))}", soft_wrap=True)
    provenance = results["provenance"]
    print(json.dumps({"command": provenance["command"], "machine": provenance["machine"], "rows": results["rows"]}))
    if not results["complete"]:
        raise KeyboardInterrupt
    return list(results["rows"])


def measured(options: BenchOptions, screen: Console) -> dict[str, Any]:
    """The results, as ``report`` describes them; incomplete ones after Ctrl-C."""
    check_options(options)
    if options.report is not None:
        check_report(options.report)
    texts = {path: read_prompts(path, options.limit) for path in options.prompts}
    with Journal(options) as journal:
        with screen.status("loading") as status:
            loaded, methods, curves = load_methods(options, lambda line: status.update(escape(line)))
        tasks = tasks_of(texts, loaded, max_tokens=options.max_tokens)
        units = _units(tasks, methods, options)
        complete = _measure(units, journal, options, screen)
    rows = rows_of(tasks, methods, options.conditions, journal.runs, loaded, curves)
    return {
        "schema": 1,
        "complete": complete,
        "provenance": journal.provenance,
        "costs": {
            "target": {"widths": curves[None].widths, "rows": curves[None].rows} if None in curves else None,
            "draft": next(({"widths": c.widths, "rows": c.rows} for name, c in curves.items() if name), None),
            "drafts": {name: curve(1) for name, curve in curves.items() if name},  # seconds a token
        },
        "rows": rows,
    }


def check_options(options: BenchOptions) -> None:
    """Raise OptionError for what cannot be measured, before anything is loaded."""
    pairs_of(options.drafters, options.drafts)
    for length in options.num_speculative_tokens:
        check_draft_length(length, or_auto=True)
    for name in ("batch", "temperature", "num_speculative_tokens"):
        if not getattr(options, name):
            raise OptionError(f"{name} is empty; give at least one number, or several separated by commas")
    if bad := [batch for batch in options.batch if not 1 <= batch <= 1024]:
        raise OptionError(f"batch is {bad[0]}; it must be from 1 to 1024")
    if not 1 <= options.repeat <= 1000:
        raise OptionError(f"repeat is {options.repeat}; it must be from 1 to 1000")
    for condition in options.conditions:
        _sampling(options, condition, 0)


def load_methods(options: BenchOptions, say: Callable[[str], None]) -> tuple[Loaded, list[Method], Curves]:
    """The served model, every method with its engine, and what forwards cost."""
    if options.backend == "vllm":
        return _vllm_methods(options, say)
    read = partial(
        load_model, device=options.device, trust_remote_code=options.trust_remote_code, progress=say,
        pack=options.pack, threads=options.threads, gpu_layers=options.gpu_layers,
    )  # fmt: skip
    pairs = pairs_of(options.drafters, options.drafts)
    used = list(dict.fromkeys(draft for _, draft in pairs if draft is not None))
    heads = {draft: found for name, draft in pairs if draft and (found := heads_read(DRAFTERS[name], draft))}
    models = [draft for draft in used if draft not in heads]
    theirs = their_methods(options, models, say) if options.hf else []
    loaded = read(options.model, dtype=options.dtype, backend=options.backend)
    drafts: dict[str, Loaded | Heads] = {
        draft: read(draft, is_draft=True, dtype=options.draft_dtype or options.dtype, backend=options.draft_backend,
                    vocab=options.draft_vocab)
        for draft in models
    }  # fmt: skip
    for draft, kind in heads.items():
        drafts[draft] = load_heads(draft, kind, loaded, dtype=options.draft_dtype, pack=options.pack, progress=say)
    lengths, largest = options.num_speculative_tokens, max(options.batch)
    curves: dict[str | None, CostCurve] = {None: cost_curve(loaded, max_rows=largest, progress=say)}
    for name, path in pairs:
        if path is not None:
            drafter = DRAFTERS[name].make(loaded, drafts[path]) if path in heads else None
            curve = draft_curve(drafter, drafts[path], max_rows=largest, progress=say)
            assert curve is not None
            curves[drafts[path].name] = curve
    ours = engine_methods(pairs, lengths, loaded, drafts, curves, max_batch=largest, widths=options.draft_width)
    return loaded, ours + theirs + _servers(options, say), curves


def _servers(options: BenchOptions, say: Callable[[str], None]) -> list[Method]:
    """Running servers as methods: they get the same token ids."""
    from flashspec.vllm.engine import VllmEngine

    methods = []
    for number, url in enumerate(options.url, start=1):
        say(f"asking {url}")
        engine = VllmEngine(url, api_key=options.api_key)
        methods.append(Method("server" if len(options.url) == 1 else f"server {number}", None, remote_run(engine)))
    return methods


def _vllm_methods(options: BenchOptions, say: Callable[[str], None]) -> tuple[Loaded, list[Method], Curves]:
    """A vLLM of its own for each drafter and draft length, all of them up at once; the model is loaded here, too, for
    its tokenizer and to say where greedy texts part."""
    from flashspec.vllm.launch import engine_of, options_of

    loaded = load_model(
        options.model, dtype=options.dtype, trust_remote_code=options.trust_remote_code, progress=say, pack=options.pack
    )
    methods = []
    for name, draft in pairs_of(options.drafters, options.drafts):
        for length in options.num_speculative_tokens if name != PLAIN else [0]:
            say(f"vLLM with {name}")
            asked = options_of(
                options.model, draft=draft, drafter=name, num_speculative_tokens=length or AUTO, dtype=options.dtype,
                trust_remote_code=options.trust_remote_code, max_batch=max(options.batch),
            )  # fmt: skip
            engine = engine_of(asked, say, ready_seconds=options.ready_seconds)
            methods.append(Method(name, length, remote_run(engine), Path(draft).name if draft else None))
    return loaded, methods, {}


def their_methods(options: BenchOptions, drafts: list[str], say: Callable[[str], None]) -> list[Method]:
    """What users have without us: of Transformers, or of llama.cpp where it runs the served model.

    Loaded before our layers are packed, which takes the memory that a second copy needs while it is made.
    """
    if backend_of(options.model, options.backend) == "llamacpp":
        return llamacpp_methods(gguf_file(options.model), threads=options.threads, gpu_layers=options.gpu_layers)
    stock = partial(
        load_plain, device=options.device, dtype=options.dtype, trust_remote_code=options.trust_remote_code,
        progress=say,
    )  # fmt: skip
    return hf_methods(stock(options.model), stock(drafts[0]) if drafts else None)


# order


def _units(tasks: list[Task], methods: list[Method], options: BenchOptions) -> list[Unit]:
    """Each prompt through all methods before the next one, in an order that rotates."""
    units, turn = [], 0
    for repetition in range(options.repeat):
        for condition in options.conditions:
            able = [method for method in methods if method.max_batch >= condition.batch]
            for task in tasks:
                for number in _starts(task, condition.batch):
                    units += [Unit(task, each, condition, number, repetition) for each in _rotated(able, turn)]
                    turn += 1
    return units


def _starts(task: Task, batch: int) -> range:
    """A batch takes that many prompts at once; one larger than the task repeats some."""
    return range(0, len(task.prompts), batch) if batch < len(task.prompts) else range(1)


def _rotated(methods: Seq[Method], turn: int) -> list[Method]:
    start = turn % len(methods)
    return [*methods[start:], *methods[:start]]


def _measure(units: list[Unit], journal: Journal, options: BenchOptions, screen: Console) -> bool:
    """Run what is not in the journal; whether that came to its end."""
    left = [unit for unit in units if unit.key not in journal.runs]
    if journal.is_resumed:
        screen.print(f"{len(units) - len(left)} of {len(units)} runs are there already; {len(left)} are left")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # redrawn between runs, not by a thread during them
    with Progress(*columns, console=screen, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("warming up", total=len(left))
        try:
            _warm_up(left, options)
            for unit in left:
                progress.update(bar, description=escape(f"{unit.task.name}, {unit.method.label}"))
                progress.refresh()
                prompts = unit.task.group(unit.number, unit.condition.batch)
                journal.add(unit.key, unit.method.run(prompts, _sampling(options, unit.condition, unit.number)))
                progress.advance(bar)
        except KeyboardInterrupt:
            return False
    return True


def _warm_up(units: list[Unit], options: BenchOptions) -> None:
    for unit in {unit.method.label: unit for unit in reversed(units)}.values():
        unit.method.run(unit.task.group(0, 1), SamplingParams(max_tokens=min(8, options.max_tokens)))


def _sampling(options: BenchOptions, condition: Condition, seed: int) -> SamplingParams:
    """A seed for repeatability, but the rule that users get without one."""
    return SamplingParams(
        temperature=condition.temperature,
        max_tokens=options.max_tokens,
        seed=seed,
        verification="rejection",
        ignore_eos=options.ignore_eos,
    )


# what is kept


class Journal:
    """Runs as they come, in the report's folder where there is one; a later call with the same options goes on.

    Raises:
        OptionError: the folder holds runs of other options, or cannot be written.
    """

    def __init__(self, options: BenchOptions) -> None:
        self.runs: dict[str, Run] = {}
        self.is_resumed = False
        self.provenance = _provenance(options)
        self._path = None if options.report is None else options.report / RUNS
        self._file: IO[str] | None = None

    def __enter__(self) -> Journal:
        if self._path is not None:
            try:
                self._open(self._path)
            except OSError as error:
                raise OptionError(f"cannot write to {self._path}: {error}; name another --report folder") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, key: str, run: Run) -> None:
        self.runs[key] = run
        self._write({"key": key, "run": run.as_dict()})

    def _open(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        whole = [line for line in lines[:-1] if line]  # the last one may be cut short
        if whole:
            self._resume(path, whole)
        self._file = path.open("w", encoding="utf-8")
        self._write({"provenance": self.provenance})
        for key, run in self.runs.items():
            self._write({"key": key, "run": run.as_dict()})

    def _resume(self, path: Path, lines: list[str]) -> None:
        try:
            held = json.loads(lines[0])["provenance"]
            runs = {row["key"]: Run.from_dict(row["run"]) for row in map(json.loads, lines[1:])}
        except (ValueError, KeyError, TypeError) as error:
            raise OptionError(f"{path} is not a file of runs ({error}); name another --report folder") from error
        mine = json.loads(json.dumps(self.provenance))
        for part in ("options", "machine"):
            if other := [name for name in mine[part] if held[part].get(name) != mine[part][name]]:
                was, now = held[part].get(other[0]), mine[part][other[0]]
                raise OptionError(
                    f"{path} holds runs with another {other[0]} ({was!r:.80}, now {now!r:.80}); name another --report "
                    "folder, or remove this one"
                )
        self.runs, self.is_resumed, self.provenance = runs, True, held

    def _write(self, row: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
            self._file.flush()


def _provenance(options: BenchOptions) -> dict[str, Any]:
    chosen = {
        key: [str(each) for each in value] if key == "prompts" else value
        for key, value in dataclasses.asdict(options).items()
        if key not in ("report", "api_key")
    }
    return {
        "command": shlex.join(["flashspec", *sys.argv[1:]]),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": _commit(),
        "model": options.model or "SmolLM2-135M-Instruct",
        "draft": ", ".join(options.drafts) or None,
        "machine": machine(),
        "options": chosen,
    }


def _commit() -> str | None:
    """Of the source this package was installed from; None outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
