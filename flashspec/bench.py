"""Measure drafters against plain decoding, and against Transformers' own ways, interleaved in one run.

Every prompt goes through every method before the next prompt, in an order that rotates, so that a machine that
slows down slows all of them. Speedups are medians of ratios between runs on the same prompt.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flashspec.core import SamplingParams, SpecStats
from flashspec.engine import LocalEngine
from flashspec.errors import PromptError
from flashspec.loader import DRAFTERS, Loaded, choose_drafter, load_model, load_plain
from flashspec.scheduler import check_draft_length
from flashspec.text import encode

PLAIN = "none"
HF_PLAIN = "hf_generate"
TABLE_WIDTH = 132
# two logits closer than this, in standard deviations of all logits, are a tie in that precision
TIES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What ``flashspec bench`` was asked for."""

    prompts: list[Path]
    model: str | None = None
    draft: str | None = None
    drafters: list[str] = field(default_factory=lambda: [PLAIN, "ngram"])
    num_speculative_tokens: int | None = None
    limit: int = 4
    max_tokens: int = 64
    temperature: float = 0.0
    hf: bool = False
    device: str | None = None
    dtype: str | None = None
    pack: bool = True
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class Task:
    name: str
    prompts: list[tuple[str, list[int]]]  # (id, token ids)


@dataclass(frozen=True, slots=True)
class Run:
    """One prompt through one method."""

    tokens: list[int]
    ttft: float
    tpot: float
    total: float
    stats: SpecStats | None = None
    split: dict[str, float] | None = None  # seconds in draft, verify, sample, and outside the models' forwards

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.total


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    num_speculative_tokens: int | None
    run: Callable[[list[int], SamplingParams], Run]


def run_bench(options: BenchOptions, screen: Console) -> list[dict[str, Any]]:
    """Measure, print a table and the last line of JSON; the rows.

    Raises:
        FlashSpecError: unreadable prompts, unknown drafters, models that do not load.
    """
    names = list(dict.fromkeys([PLAIN, *options.drafters]))
    for name in names:
        choose_drafter(name, has_draft=options.draft is not None)
    _sampling(options, 0)
    check_draft_length(options.num_speculative_tokens or 0)
    texts = {path: read_prompts(path, options.limit) for path in options.prompts}
    with screen.status("loading") as status:
        loaded, methods = _methods(options, names, lambda line: status.update(escape(line)))
    tasks = [_task(path, rows, loaded, options) for path, rows in texts.items()]
    runs = _measure(tasks, methods, options, screen)
    rows = [_row(task, method, runs, options, loaded) for task in tasks for method in methods]
    paper = Console(highlight=False)
    paper.width = max(paper.width, TABLE_WIDTH)  # a cut table is worth less than a wrapped one
    paper.print(_table(rows, options))
    for row in rows:
        for difference in row["differences"]:
            paper.print(_difference_line(row, difference), soft_wrap=True)
    print(json.dumps({"command": shlex.join(["flashspec", *sys.argv[1:]]), "machine": machine(), "rows": rows}))
    return rows


# prompts


def read_prompts(path: Path, limit: int) -> list[dict[str, Any]]:
    """The first ``limit`` lines of a JSON-lines file of ``messages`` or ``prompt``.

    Raises:
        PromptError: with file, line and what is missing.
    """
    try:
        # not splitlines: JSON texts may hold other line separators
        lines = list(enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read prompts from {path}: {error}; give an existing JSON-lines file") from error
    rows = []
    for number, line in [(number, line) for number, line in lines if line.strip()][:limit]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not ("messages" in row or "prompt" in row):
            raise PromptError(f"{path}, line {number} has neither messages nor prompt")
        rows.append(row)
    if not rows:
        raise PromptError(f"{path} holds no prompts; give one JSON object a line")
    return rows


def _task(path: Path, rows: list[dict[str, Any]], loaded: Loaded, options: BenchOptions) -> Task:
    prompts = []
    for number, row in enumerate(rows):
        prompt = row["messages"] if "messages" in row else row["prompt"]
        name = str(row.get("id", number))
        try:
            ids = encode(loaded.tokenizer, prompt, vocab_size=loaded.target.vocab_size)
        except PromptError as error:
            raise PromptError(f"{path}, prompt {name}: {error}") from error
        if len(ids) + options.max_tokens > loaded.target.max_length:
            raise PromptError(
                f"{path}, prompt {name}: {len(ids)} tokens and {options.max_tokens} to generate exceed the model's "
                f"{loaded.target.max_length} positions; lower --max-tokens or leave the prompt out"
            )
        prompts.append((name, ids))
    return Task(str(rows[0].get("task", path.stem)), prompts)


# methods


def _methods(options: BenchOptions, names: list[str], say: Callable[[str], None]) -> tuple[Loaded, list[Method]]:
    device, dtype, trust = options.device, options.dtype, options.trust_remote_code
    stock = partial(load_plain, device=device, dtype=dtype, trust_remote_code=trust, progress=say)
    ready = partial(load_model, device=device, dtype=dtype, trust_remote_code=trust, progress=say, pack=options.pack)
    needs_draft = any(DRAFTERS[name].needs_draft for name in names)
    methods: list[Method] = []
    if options.hf:  # before packing takes the memory that a second copy needs while it is made
        methods = hf_methods(stock(options.model), stock(options.draft) if needs_draft else None)
    loaded = ready(options.model)
    small = ready(options.draft, is_draft=True) if needs_draft else None
    ours = []
    for name in names:
        count = DRAFTERS[name].num_speculative_tokens
        if options.num_speculative_tokens is not None and name != PLAIN:
            count = options.num_speculative_tokens
        drafter = DRAFTERS[name].make(loaded, small)
        engine = LocalEngine(loaded.target, drafter, tokenizer=loaded.tokenizer, num_speculative_tokens=count)
        ours.append(Method(name, count, _engine_run(engine)))
    return loaded, ours + methods


def _engine_run(engine: LocalEngine) -> Callable[[list[int], SamplingParams], Run]:
    draft_target = getattr(engine.drafter, "target", None)

    def forwards() -> float:
        return engine.target.forward_seconds + (draft_target.forward_seconds if draft_target else 0.0)

    def run(prompt: list[int], sampling: SamplingParams) -> Run:
        before = forwards()
        result = engine.generate(prompt, sampling)
        timings = result.timings
        split = {name: getattr(timings, name) for name in ("draft", "verify", "sample")}
        split["outside_forwards"] = timings.total - (forwards() - before)
        return Run(result.tokens, timings.ttft, timings.tpot, timings.total, result.stats, split)

    return run


def hf_methods(plain: Any, draft: Any | None) -> list[Method]:
    """Transformers' generate, assisted generation and prompt lookup, with their own defaults for drafting.

    A model's generation config would fill in what ours leaves open, penalties for one: it is set aside.
    """
    from transformers import GenerationConfig
    from transformers.utils import logging as transformers_logging

    from flashspec.backends.hf import eos_tokens

    transformers_logging.set_verbosity_error()  # generate warns of its own assistant's options
    for model in (plain, draft):
        if model is not None:
            eos = sorted(eos_tokens(model)) or None
            model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[0] if eos else 0)
    methods = [
        Method(HF_PLAIN, None, _hf_run(plain)),
        Method("hf_prompt_lookup", 10, _hf_run(plain, prompt_lookup_num_tokens=10)),
    ]
    if draft is not None:
        methods.append(Method("hf_assisted", None, _hf_run(plain, assistant=draft)))
    return methods


class _FirstToken:
    """A Transformers streamer that notes when the first new tokens came, and how many they were."""

    def __init__(self) -> None:
        self.calls = 0
        self.first = 0.0
        self.num_first = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call is the prompt
            self.first = time.perf_counter()
            self.num_first = value.numel()

    def end(self) -> None:
        return None


def _hf_run(
    model: Any, *, assistant: Any | None = None, prompt_lookup_num_tokens: int | None = None
) -> Callable[[list[int], SamplingParams], Run]:
    from transformers import GenerationConfig

    def run(prompt: list[int], sampling: SamplingParams) -> Run:
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=not sampling.is_greedy,
            temperature=sampling.temperature if not sampling.is_greedy else None,
            top_k=0 if not sampling.is_greedy else None,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
            eos_token_id=model.generation_config.eos_token_id,
            pad_token_id=model.generation_config.pad_token_id,
        )
        streamer = _FirstToken()
        ids = torch.tensor([prompt], device=model.device)
        torch.manual_seed(sampling.seed or 0)
        started = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            streamer=streamer,
            assistant_model=assistant,
        )
        ended = time.perf_counter()
        tokens = output[0, len(prompt) :].tolist()
        later = len(tokens) - streamer.num_first  # an assisted first step brings several at once
        tpot = (ended - streamer.first) / later if later else 0.0
        return Run(tokens, streamer.first - started, tpot, ended - started)

    return run


# measuring

Runs = dict[tuple[int, str, int], Run]  # (id() of the task, method, prompt's number): names may repeat


def _measure(tasks: list[Task], methods: list[Method], options: BenchOptions, screen: Console) -> Runs:
    runs: Runs = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    total = len(methods) * (1 + sum(len(task.prompts) for task in tasks))
    # redrawn between runs, not by a thread during them
    with Progress(*columns, console=screen, transient=True, auto_refresh=False) as progress:
        bar = progress.add_task("warming up", total=total)
        for method in methods:
            method.run(tasks[0].prompts[0][1], SamplingParams(max_tokens=min(8, options.max_tokens)))
            progress.advance(bar)
        turn = 0
        for task in tasks:
            for number, (_, prompt) in enumerate(task.prompts):
                sampling = _sampling(options, turn)
                for method in _rotated(methods, turn):
                    progress.update(bar, description=f"{task.name}, {method.name}")
                    progress.refresh()
                    runs[id(task), method.name, number] = method.run(prompt, sampling)
                    progress.advance(bar)
                turn += 1
    return runs


def _sampling(options: BenchOptions, seed: int) -> SamplingParams:
    """A seed for repeatability, but the rule that users get without one."""
    return SamplingParams(
        temperature=options.temperature, max_tokens=options.max_tokens, seed=seed, verification="rejection"
    )


def _rotated(methods: list[Method], turn: int) -> list[Method]:
    start = turn % len(methods)
    return methods[start:] + methods[:start]


def _row(task: Task, method: Method, runs: Runs, options: BenchOptions, loaded: Loaded) -> dict[str, Any]:
    def of(name: str) -> list[Run]:
        return [run for number in range(len(task.prompts)) if (run := runs.get((id(task), name, number)))]

    mine, plain, theirs = of(method.name), of(PLAIN), of(HF_PLAIN)
    reference = theirs or plain
    is_reference = method.name == (HF_PLAIN if theirs else PLAIN)
    differences = [] if options.temperature or is_reference else _differences(task, mine, reference, loaded)
    stats = SpecStats()
    for run in mine:
        stats.merge(run.stats or SpecStats())
    drafted = stats.num_drafts > 0
    return {
        "task": task.name,
        "drafter": method.name,
        "num_speculative_tokens": method.num_speculative_tokens,
        "batch": 1,
        "temperature": options.temperature,
        "tokens_per_second": statistics.median(run.tokens_per_second for run in mine),
        "ttft": statistics.median(run.ttft for run in mine),
        "tpot": statistics.median(run.tpot for run in mine),
        "mean_acceptance_length": stats.mean_acceptance_length if drafted else None,
        "acceptance_rate": stats.acceptance_rate if drafted else None,
        "speedup": _ratio(plain, mine, lambda run: run.tpot),
        "speedup_hf": _ratio(theirs, mine, lambda run: run.tpot),
        "speedup_e2e": _ratio(plain, mine, lambda run: 1 / run.tokens_per_second),
        "greedy_equal": None if options.temperature or is_reference else not differences,
        "differences": differences,
        "time_shares": _shares(mine),
    }


def _ratio(base: Seq[Run], mine: Seq[Run], value: Callable[[Run], float]) -> float | None:
    """Median over prompts of base / mine; runs of a single burst have no time per token."""
    pairs = [(value(a), value(b)) for a, b in zip(base, mine, strict=False)]
    ratios = [a / b for a, b in pairs if a > 0 and b > 0]
    return statistics.median(ratios) if ratios else None


def _shares(runs: Seq[Run]) -> dict[str, float] | None:
    splits = [run.split for run in runs if run.split is not None]
    if not splits:
        return None
    total = sum(run.total for run in runs)
    return {name: sum(split[name] for split in splits) / total for name in splits[0]}


def _differences(task: Task, mine: Seq[Run], reference: Seq[Run], loaded: Loaded) -> list[dict[str, Any]]:
    """Where greedy tokens part, with the distance of the two likeliest logits there in standard deviations."""
    found = []
    for (name, prompt), run, other in zip(task.prompts, mine, reference, strict=True):
        if run.tokens == other.tokens:
            continue
        pairs = enumerate(zip(run.tokens, other.tokens, strict=False))
        at = next((i for i, (a, b) in pairs if a != b), min(len(run.tokens), len(other.tokens)))
        logits = loaded.target.plain_logits(prompt + other.tokens[:at])
        first, second = logits.topk(2).values.tolist()
        gap = float((first - second) / logits.std())
        found.append({"prompt": name, "position": at, "gap": gap, "is_tie": gap < TIES[loaded.target.model.dtype]})
    return found


# reporting


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    import transformers

    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "system": platform.platform(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _table(rows: list[dict[str, Any]], options: BenchOptions) -> Table:
    table = Table(title=f"{options.max_tokens} tokens, temperature {options.temperature:g}, medians over prompts")
    for name in ("task", "drafter", "k", "tok/s", "TTFT s", "TPOT ms", "length", "accepted", "speedup", "vs HF",
                 "end to end", "overhead", "equal"):  # fmt: skip
        table.add_column(name, justify="left" if name in ("task", "drafter") else "right")
    for row in rows:
        shares = row["time_shares"]
        same = {True: "yes", False: "no", None: ""}[row["greedy_equal"]]
        table.add_row(
            row["task"], row["drafter"], _shown(row["num_speculative_tokens"], "d"),
            _shown(row["tokens_per_second"], ".2f"), _shown(row["ttft"], ".2f"), _shown(row["tpot"] * 1000, ".0f"),
            _shown(row["mean_acceptance_length"], ".2f"), _shown(row["acceptance_rate"], ".0%"),
            _shown(row["speedup"], ".2f"), _shown(row["speedup_hf"], ".2f"), _shown(row["speedup_e2e"], ".2f"),
            _shown(shares and shares["outside_forwards"], ".1%"), same,
        )  # fmt: skip
    return table


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _difference_line(row: dict[str, Any], difference: dict[str, Any]) -> str:
    verdict = "a tie in this precision" if difference["is_tie"] else "NOT a tie: please report it"
    return escape(
        f"{row['task']}, {row['drafter']}: prompt {difference['prompt']} parts at token {difference['position']}, "
        f"where the two largest logits are {difference['gap']:.1e} standard deviations apart: {verdict}"
    )
