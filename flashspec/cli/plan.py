"""plan: will drafting help, and does it fit? By formula, from configs, or by measurement where weights are at hand."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flashspec.cli.options import (
    DEFAULTS,
    Device,
    DraftModel,
    Dtype,
    MaxTokens,
    Pack,
    Temperature,
    TrustRemoteCode,
    Verbose,
    app,
    progress,
    set_up_logging,
)
from flashspec.cli.plan_facts import CONTEXT, NGRAMS_ARE_FREE, Place, Question, Say, measured, on_gpus
from flashspec.core import SamplingParams
from flashspec.errors import OptionError
from flashspec.planner import Plan, batch_reason, gib, make_plan, open_plan, verdict
from flashspec.planner.gpus import LONGEST as ON_GPUS, MOST, Load, load_reasons, load_verdict
from flashspec.planner.memory import MemoryPlan, Setup, WayOut, memory_plan, ways_out
from flashspec.planner.speed import LONGEST, Outlook, by_formula, check_acceptance, check_cost_ratio, check_k

MOST_SERVED = 256  # what serve takes for --max-batch
SHOWN = (1, 2, 3, 4, 5, 6, 8, 12, 16)  # k in the table
SAME_COST = (
    "Scoring k + 1 tokens costs the target what one costs. A GPU that serves few sequences comes near to that; a CPU "
    "and large batches do not, which only measuring (--model) shows."
)


@dataclass(slots=True)
class Answer:
    """What is printed."""

    outlook: Outlook
    is_open: bool = False  # nothing is known of the acceptance
    memory: MemoryPlan | None = None
    ways_out: list[WayOut] = field(default_factory=list)
    by_batch: dict[int, tuple[int, float]] = field(default_factory=dict)
    acceptance: dict[str, Any] | None = None  # as measured
    is_measured: bool = False
    assumed: list[str] = field(default_factory=list)
    load: Load | None = None  # with --gpus


@app.command()
def plan(
    acceptance: Annotated[float | None, typer.Option(help="Chance that a guess is accepted, 0 to 1.")] = None,
    cost_ratio: Annotated[float | None, typer.Option(help="A draft step in plain decode steps; n-grams: 0.")] = None,
    num_speculative_tokens: Annotated[int | None, typer.Option(help="Default: the best.", show_default=False)] = None,
    batch: Annotated[int | None, typer.Option(help="Sequences that run at once. Default: 1.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Another name for --batch.")] = None,
    gpus: Annotated[
        str | None, typer.Option(help="Such as 2xH100: plan for these, by formula; none is needed.")
    ] = None,
    context: Annotated[int | None, typer.Option(help=f"Tokens of prompt and output. Default: {CONTEXT}.")] = None,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    model: Annotated[str | None, typer.Option(help="Hub name, folder (config.json is enough) or .gguf file.")] = None,
    draft: DraftModel = None,
    temperature: Temperature = DEFAULTS.temperature,
    device: Device = None,
    dtype: Dtype = None,
    pack: Pack = True,
    memory: Annotated[float | None, typer.Option(help="GiB: plan as if so much were free (on each GPU).")] = None,
    measure: Annotated[
        bool | None, typer.Option("--measure/--no-measure", help="Default: where weights are at hand.")
    ] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help="JSON lines to measure on; may be repeated.")] = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of tables.")] = False,
    verbose: Verbose = False,
) -> None:
    """Say whether drafting will help and whether it fits, with reasons, before anything is installed."""
    set_up_logging(verbose)
    question = Question(
        acceptance=acceptance, cost_ratio=cost_ratio, k=num_speculative_tokens, batch=_rows(batch, concurrency),
        context=context, max_tokens=max_tokens, model=model, draft=draft, temperature=temperature, device=device,
        dtype=dtype, pack=pack, memory=memory, measure=measure, prompts=prompts or [],
        trust_remote_code=trust_remote_code, gpus=gpus,
    )  # fmt: skip
    check(question)
    with progress() as say:
        answer = answered(question, say)
    made = planned(question, answer)
    if as_json:
        print(json.dumps(as_dict(question, answer, made), ensure_ascii=False))
    else:
        show(question, answer, made)


def _rows(batch: int | None, concurrency: int | None) -> int:
    if batch is not None and concurrency is not None and batch != concurrency:
        raise OptionError(f"batch is {batch} and concurrency is {concurrency}, two names for the same number; give one")
    return next((rows for rows in (batch, concurrency) if rows is not None), 1)


def check(question: Question) -> None:
    """Raise OptionError for what needs no model to be seen wrong."""
    if question.acceptance is not None:
        check_acceptance(question.acceptance)
    if question.cost_ratio is not None:
        check_cost_ratio(question.cost_ratio)
    if question.k is not None:
        check_k(question.k)
    if question.batch < 1:
        raise OptionError(f"batch is {question.batch}; it must be at least 1, the number of sequences that run at once")
    if question.context is not None and question.context < 2:
        raise OptionError(f"context is {question.context}; it must be at least 2 tokens: one of prompt, one of output")
    if question.memory is not None and not 0 < question.memory < math.inf:
        raise OptionError(f"memory is {question.memory:g}; it must be a number of GiB above 0, such as 24")
    SamplingParams(temperature=question.temperature, max_tokens=question.max_tokens)
    if question.gpus is not None:
        _check_gpus(question)
    if question.model is None:
        _check_formula(question)


def _check_gpus(question: Question) -> None:
    """What does not go with GPUs that are not here."""
    if question.model is None:
        raise OptionError(f"--gpus {question.gpus} needs --model, whose config.json says what there is to compute")
    if question.measure or question.prompts:
        raise OptionError("--gpus plans by formula and measures nothing; leave out --measure and --prompts, or --gpus")
    if question.device is not None:
        raise OptionError(f"--device {question.device} is of this machine and --gpus {question.gpus} is not; give one")
    if question.dtype == "float32":
        raise OptionError("dtype is 'float32', and the speed of --gpus is known for bfloat16 and float16; give one")
    if question.batch > MOST:
        raise OptionError(f"batch is {question.batch}; with --gpus it is at most {MOST}: plan for each replica's share")


def _check_formula(question: Question) -> None:
    """Without a model there must be numbers."""
    if question.draft is not None:
        raise OptionError(f"--draft {question.draft} is given without --model; name the model that it drafts for")
    if question.measure or question.prompts:
        raise OptionError("there is nothing to measure without a model; give --model, and --draft for a draft model")
    if question.acceptance is None and question.cost_ratio is None:
        raise OptionError(
            "nothing to plan with; give --acceptance and --cost-ratio (0.7 and 0.05, say), or --model and, for a draft "
            "model, --draft"
        )
    if question.cost_ratio is None:
        raise OptionError(
            "--acceptance needs --cost-ratio: a draft step in plain decode steps (0.05 for a draft model of a "
            "twentieth of the size, 0 for n-grams); or give --model"
        )


# answers


def answered(question: Question, say: Say) -> Answer:
    """By formula; with a model from its config; by measurement where that can be done."""
    longest = max(LONGEST, question.k or 0)
    if question.model is None:
        answer = Answer(by_formula(question.acceptance or 0.0, question.cost_ratio or 0.0, longest=longest))
        answer.is_open = question.acceptance is None
        answer.assumed.append(SAME_COST)
        return answer
    if question.gpus is not None:
        there = on_gpus(question, say)
        return Answer(
            there.outlook, is_open=question.acceptance is None, memory=there.memory, assumed=there.assumed,
            load=there.load,
        )  # fmt: skip
    place = Place(question)
    setup, assumed = place.setup(say)
    answer = Answer(by_formula(0.0, 0.0), assumed=assumed)
    answer.memory = memory_plan(setup, available=place.available)
    if not answer.memory.fits:
        answer.ways_out = ways_out(setup, available=place.available, can_halve=place.can_halve)
    obstacle = place.obstacle(answer.memory)
    if question.measure and obstacle:
        raise OptionError(f"cannot measure: {obstacle}; leave --measure out to plan from the config alone")
    if question.measure or (question.measure is None and not obstacle):
        found = measured(question, say)
        answer.outlook, answer.acceptance, answer.is_measured = found.outlook, found.acceptance, True
        answer.by_batch = found.by_batch
        answer.assumed += found.assumed
        return answer
    if question.measure is None:
        answer.assumed.append(f"Nothing was measured: {obstacle}.")
    cost_ratio = _assumed_cost_ratio(question, setup, answer.assumed)
    answer.outlook = by_formula(question.acceptance or 0.0, cost_ratio, longest=longest)
    answer.is_open = question.acceptance is None
    answer.assumed.append(SAME_COST)
    return answer


def _assumed_cost_ratio(question: Question, setup: Setup, assumed: list[str]) -> float:
    if question.cost_ratio is not None:
        return question.cost_ratio
    if setup.draft is None:
        assumed.append(NGRAMS_ARE_FREE)
        return 0.0
    ratio = setup.draft.weights / setup.target.weights
    assumed.append(f"A draft step costs {ratio:.3f} plain steps: the ratio of the weights, which each step reads once.")
    return ratio


def planned(question: Question, answer: Answer) -> Plan:
    """The plan; why goes on with what else the numbers say."""
    make = open_plan if answer.is_open else make_plan
    made = make(answer.outlook, drafter=question.drafter, k=question.k, rows=question.batch, memory=answer.memory)
    if answer.by_batch:
        made.why.append(batch_reason(answer.by_batch))
    if answer.load is not None:
        made.why.extend([*load_reasons(answer.load), f"To serve it: {_serve(question, answer.load)}"])
    return made


def _serve(question: Question, load: Load) -> str:
    """The command that serves this plan with vLLM."""
    assert question.model is not None
    words = ["flashspec", "serve", "--backend", "vllm", "--model", question.model]
    drafts = load.schedule is None or any(k for _, _, k in load.schedule)
    if not drafts:
        words += ["--drafter", "none"]
    elif question.draft is not None:
        words += ["--draft", question.draft]
    else:
        words += ["--drafter", "ngram"]
    if drafts and load.schedule is not None:
        words += ["--schedule", json.dumps(load.schedule)]
    elif drafts and question.k is not None:
        words += ["--num-speculative-tokens", str(question.k)]
    if question.dtype is not None:
        words += ["--dtype", question.dtype]
    rows = min(question.batch, MOST_SERVED)
    return shlex.join([*words, "--tensor-parallel", str(load.gpus.count), "--max-batch", str(rows)])


# output


def as_dict(question: Question, answer: Answer, made: Plan) -> dict[str, Any]:
    """What --json prints; sizes in bytes, costs in plain decode steps."""
    memory = answer.memory
    derived = {"total": memory.total, "needed": memory.needed, "fits": memory.fits} if memory is not None else {}
    return {
        "verdict": _verdict(answer, made),
        "plan": {
            **dataclasses.asdict(made),
            "memory": {**dataclasses.asdict(memory), **derived} if memory is not None else None,
        },
        "table": [_row(answer, k, question.batch) for k in _shown(answer, made)],
        "by_batch": [
            {"batch": rows, "num_speculative_tokens": k, "speedup": speedup}
            for rows, (k, speedup) in answer.by_batch.items()
        ],
        "ways_out": [dataclasses.asdict(way) for way in answer.ways_out],
        "is_measured": answer.is_measured,
        "measured_acceptance": answer.acceptance,
        "assumed": answer.assumed,
        "gpus": _load_dict(question, answer.load) if answer.load is not None else None,
    }


def _load_dict(question: Question, load: Load) -> dict[str, Any]:
    """All of it by formula; the memory of each GPU is the plan's."""
    return {
        "source": "formula",
        "gpu": dataclasses.asdict(load.gpus.gpu),
        "count": load.gpus.count,
        "concurrency": question.batch,
        "context": load.context,
        "plain_step_seconds": load.plain_step,
        "sequences_that_fit": load.fitting,
        "gpus_that_fit": load.needed,
        "crossover": load.crossover,
        "schedule": load.schedule,
        "serve": _serve(question, load),
    }


def _verdict(answer: Answer, made: Plan) -> str:
    return load_verdict(made, answer.load) if answer.load is not None else verdict(made, answer.ways_out)


def _shown(answer: Answer, made: Plan) -> list[int]:
    ks = {*SHOWN} if answer.load is None else {*range(ON_GPUS + 1)}
    chosen = {made.num_speculative_tokens} - {0}
    return sorted(k for k in ks | chosen if k <= answer.outlook.longest)


def _row(answer: Answer, k: int, rows: int) -> dict[str, Any]:
    step = answer.outlook.step(k, rows=rows)
    return {
        "num_speculative_tokens": k,
        "tokens": None if answer.is_open else step.tokens,
        "draft": step.draft,
        "verify": step.verify,
        "sampling": step.sampling,
        "cost": step.cost,
        "speedup": None if answer.is_open else step.speedup,
        "break_even_acceptance": answer.outlook.break_even_acceptance(k, rows=rows),
    }


def show(question: Question, answer: Answer, made: Plan) -> None:
    """The verdict, then tables, then reasons."""
    paper = Console(highlight=False)
    paper.print(f"[bold]{escape(_verdict(answer, made))}[/]", soft_wrap=True)
    paper.print(_speed_table(question, answer, made))
    if answer.memory is not None:
        paper.print(_memory_table(answer.memory, "Memory" if answer.load is None else "Memory of each GPU, by formula"))
    if answer.ways_out:
        paper.print(_ways_table(answer.ways_out))
    for reason in made.why:
        paper.print(f"- {escape(reason)}", soft_wrap=True)
    for assumption in answer.assumed:
        paper.print(f"[dim]- assumed: {escape(assumption)}[/]", soft_wrap=True)


def _speed_table(question: Question, answer: Answer, made: Plan) -> Table:
    source = "measured" if answer.is_measured else "by formula"
    title = f"By draft length, {source}, batch {question.batch}; costs in plain decode steps"
    table = Table(title=title, title_justify="left")
    for name in ("k", "tokens a step", "draft", "verify", "sampling", "speedup", "pays from acceptance"):
        table.add_column(name, justify="right")
    for row in (_row(answer, k, question.batch) for k in _shown(answer, made)):
        k, even = row["num_speculative_tokens"], row["break_even_acceptance"]
        tokens, speedup = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("tokens", "speedup"))
        costs = (f"{row[name]:.2f}" for name in ("draft", "verify", "sampling"))
        is_chosen = k == made.num_speculative_tokens and not answer.is_open
        table.add_row(
            str(k),
            tokens,
            *costs,
            speedup,
            "none" if even is None else f"{even:.0%}" if k else "-",
            style="bold" if is_chosen else "",
        )
    return table


def _memory_table(memory: MemoryPlan, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("what")
    table.add_column("size", justify="right")
    rows = {
        "target's weights": memory.weights,
        "draft model's weights": memory.draft_weights,
        "target's keys and values": memory.kv_cache,
        "draft model's keys and values": memory.draft_kv_cache,
        "workspace, at most": memory.workspace,
        "together": memory.total,
        "worst moment of loading": memory.loading,
    }
    for name, size in rows.items():
        if size:
            table.add_row(name, gib(size), style="bold" if name == "together" else "")
    if memory.available is not None:
        table.add_row("free", gib(memory.available))
    return table


def _ways_table(ways: list[WayOut]) -> Table:
    table = Table(title="Ways out, each on top of those before", title_justify="left")
    table.add_column("change")
    for name in ("saves", "then needed", "fits"):
        table.add_column(name, justify="right")
    for way in ways:
        table.add_row(way.change, gib(way.saved), gib(way.needed), "yes" if way.fits else "no")
    return table
