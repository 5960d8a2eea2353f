"""doctor: what is wrong, with numbers and a remedy. Findings go to stdout; the spinner goes to stderr."""

from __future__ import annotations

import dataclasses
import json
import locale
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from flashspec.cli.options import (
    DEFAULTS,
    Config,
    Device,
    DrafterName,
    DraftModel,
    Dtype,
    Model,
    Seed,
    Temperature,
    TopK,
    TopP,
    TrustRemoteCode,
    Verbose,
    app,
    progress,
    set_up_logging,
)
from flashspec.controller import AUTO
from flashspec.core import SamplingParams
from flashspec.errors import MemoryLimitError, VocabularyError

if TYPE_CHECKING:
    from flashspec.doctor import Case, Finding
    from flashspec.weights import Progress

MARKS = {"ok": ("✓", "+", "green"), "attention": ("!", "!", "bold yellow"), "skipped": ("–", "-", "dim")}
NUM_PROMPTS = 8  # of a file: enough for a rate


@app.command()
def doctor(
    config: Config = None,
    model: Model = None,
    draft: DraftModel = None,
    drafter: DrafterName = None,
    temperature: Temperature = DEFAULTS.temperature,
    top_p: TopP = DEFAULTS.top_p,
    top_k: TopK = DEFAULTS.top_k,
    seed: Seed = DEFAULTS.seed,
    batch: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 1,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with messages or prompt, to measure on.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Of each measured request.")] = 32,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of lines.")] = False,
    verbose: Verbose = False,
) -> None:
    """Find, name and explain what makes drafts slow or wrong. Exit code 0: sound, 1: something needs attention."""
    set_up_logging(verbose)
    sampling = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens)
    with progress() as say:
        from flashspec.doctor import Finding, examine

        try:
            case = _case(model, draft, drafter, sampling, batch, prompts, say,
                         device=device, dtype=dtype, trust_remote_code=trust_remote_code)  # fmt: skip
            findings = examine(case, progress=say)
        except MemoryLimitError as error:  # before there is anything else to examine
            evidence, _, remedy = str(error).rpartition("; ")
            findings = [Finding("memory", "attention", evidence, remedy)]
    sound = not any(finding.status == "attention" for finding in findings)
    if as_json:
        print(json.dumps({"sound": sound, "findings": [dataclasses.asdict(finding) for finding in findings]}))
    else:
        _show(findings)
    raise typer.Exit(0 if sound else 1)


def _case(
    model: str | None,
    draft: str | None,
    drafter: str | None,
    sampling: SamplingParams,
    batch: int,
    prompts: Path | None,
    say: Progress,
    *,
    device: str | None,
    dtype: str | None,
    trust_remote_code: bool,
) -> Case:
    """Models, drafter and costs, loaded as ``flashspec.load`` does; another vocabulary is no error here."""
    from flashspec.bench.prompts import read_prompts, tasks_of
    from flashspec.doctor import Case
    from flashspec.heads.kind import kind_of
    from flashspec.loader import choose_drafter, cost_curve, draft_curve, heads_read
    from flashspec.pretrained import Loaded, load_model
    from flashspec.trained import Heads, load_heads

    if drafter in (None, AUTO):  # what can be examined: "hybrid" is made of these
        drafter = "ngram" if draft is None else kind_of(draft) or "model"
    kind, _ = choose_drafter(drafter, draft=draft)
    assert kind is not None
    texts = {prompts: read_prompts(prompts, NUM_PROMPTS)} if prompts is not None else {}
    read = partial(load_model, device=device, dtype=dtype, trust_remote_code=trust_remote_code, progress=say)
    target = read(model)
    small: Loaded | Heads | None = None
    if draft is not None and kind.needs_draft:
        heads = heads_read(kind, draft)
        small = read(draft, is_draft=True) if heads is None else load_heads(draft, heads, target, progress=say)
    tasks = tasks_of(texts, target, max_tokens=sampling.max_tokens)
    try:
        guesser = kind.make(target, small)
    except VocabularyError:  # a finding
        guesser = None
    return Case(
        target=target,
        draft=small if isinstance(small, Loaded) else None,
        drafter=guesser,
        sampling=sampling,
        cost=cost_curve(target, max_rows=batch, progress=say),
        draft_cost=draft_curve(guesser, small, max_rows=batch, progress=say),
        prompts=[ids for task in tasks for _, ids in task.prompts] if tasks else None,
        batch=batch,
    )


def _show(findings: list[Finding]) -> None:
    """A line for each check, the remedy below those that need one, and a summary."""
    paper = Console(highlight=False, soft_wrap=True)
    can_mark = "utf" in locale.getencoding().lower()  # stdout says UTF-8 whatever the terminal shows
    for finding in findings:
        fancy, plain, style = MARKS[finding.status]
        head = Text(fancy if can_mark else plain, style=style)
        paper.print(Text.assemble(head, f" {finding.name}: ", Text(finding.evidence)))
        if finding.status == "attention":
            paper.print(Text(f"  remedy: {finding.remedy}", style="yellow"))
    count = {status: sum(finding.status == status for finding in findings) for status in MARKS}
    ill = ", ".join(finding.name for finding in findings if finding.status == "attention")
    verdict = f"{count['attention']} of {len(findings)} checks need attention: {ill}" if ill else "sound"
    paper.print(Text(f"{verdict} ({count['ok']} passed, {count['skipped']} skipped)", style="bold"))
