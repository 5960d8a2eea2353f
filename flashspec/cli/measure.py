"""bench and tune: numbers instead of promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from flashspec.cli.options import (
    DEFAULTS,
    ApiKey,
    Backend,
    Config,
    Device,
    DraftBackend,
    DraftDtype,
    DraftVocab,
    Dtype,
    GpuLayers,
    IgnoreEos,
    MaxTokens,
    Model,
    Pack,
    Threads,
    TrustRemoteCode,
    Verbose,
    app,
    draft_length,
    screen,
    set_up_logging,
)
from flashspec.controller import AUTO
from flashspec.errors import OptionError

if TYPE_CHECKING:
    from flashspec.bench import BenchOptions

Prompts = Annotated[list[Path], typer.Option(help="JSON lines with messages or prompt; may be repeated.")]
Limit = Annotated[int, typer.Option(min=1, help="Prompts of each file.")]
Repeat = Annotated[int, typer.Option(help="Times each prompt is run.")]
Report = Annotated[Path | None, typer.Option(help="A folder for JSON, Markdown and a page with plots; resumes there.")]
Number = TypeVar("Number")


@app.command()
def bench(
    prompts: Prompts,
    config: Config = None,
    model: Model = None,
    draft: Annotated[list[str] | None, typer.Option(help="A small model; repeatable.")] = None,
    drafters: Annotated[str, typer.Option(help="Comma-separated; none is always measured.")] = "none,ngram",
    num_speculative_tokens: Annotated[str, typer.Option(help="Comma-separated: 1,2,3,5,8,auto.")] = "auto",
    batch: Annotated[str, typer.Option(help="Comma-separated: requests at once.")] = "1",
    temperature: Annotated[str, typer.Option(help="Comma-separated; 0 is greedy.")] = f"{DEFAULTS.temperature:g}",
    repeat: Repeat = 1,
    limit: Limit = 4,
    max_tokens: MaxTokens = 64,
    ignore_eos: IgnoreEos = False,
    hf: Annotated[
        bool, typer.Option("--hf", help="Measure Transformers' own ways (llama.cpp's, for its models) too.")
    ] = False,
    report: Report = None,
    backend: Backend = AUTO,
    draft_backend: DraftBackend = AUTO,
    draft_dtype: DraftDtype = None,
    draft_vocab: DraftVocab = None,
    draft_width: Annotated[
        str | None, typer.Option(help="Comma-separated: guesses tried at each place; 1 drafts chains, more trees.")
    ] = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    device: Device = None,
    dtype: Dtype = None,
    pack: Pack = True,
    url: Annotated[list[str] | None, typer.Option(help="A running server to measure beside; repeatable.")] = None,
    api_key: ApiKey = None,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Verbose = False,
) -> None:
    """Measure drafters against plain decoding in one interleaved run. The last line of stdout is JSON.

    With --report, an interrupted run goes on where it was when the same command is given again.
    """
    set_up_logging(verbose)
    from flashspec.bench import run_bench

    options = _options(
        prompts=prompts, model=model, drafts=draft or [], drafters=_split(drafters, str, "drafters"),
        num_speculative_tokens=_split(num_speculative_tokens, draft_length, "num-speculative-tokens"),
        batch=_split(batch, int, "batch"), temperature=_split(temperature, float, "temperature"), repeat=repeat,
        limit=limit, max_tokens=max_tokens, ignore_eos=ignore_eos, hf=hf, report=report, backend=backend,
        draft_backend=draft_backend, draft_dtype=draft_dtype, draft_vocab=draft_vocab,
        draft_width=_split(draft_width, int, "draft-width") if draft_width is not None else [None], threads=threads,
        gpu_layers=gpu_layers, device=device, dtype=dtype,
        pack=pack, url=url or [], api_key=api_key, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    run_bench(options, screen)


@app.command()
def tune(
    prompts: Prompts,
    model: Model = None,
    draft: Annotated[list[str] | None, typer.Option(help="A small model to try; may be repeated.")] = None,
    num_speculative_tokens: Annotated[str, typer.Option(help="Comma-separated.")] = "2,4,8,auto",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = DEFAULTS.temperature,
    repeat: Repeat = 1,
    limit: Limit = 4,
    max_tokens: MaxTokens = 64,
    out: Annotated[Path, typer.Option(help="Where the configuration goes.")] = Path("flashspec.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace an existing configuration.")] = False,
    report: Report = None,
    backend: Backend = AUTO,
    draft_backend: DraftBackend = AUTO,
    draft_dtype: DraftDtype = None,
    draft_vocab: DraftVocab = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    device: Device = None,
    dtype: Dtype = None,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Verbose = False,
) -> None:
    """Find the drafter, draft model and draft length for your prompts; write flashspec.toml for --config."""
    set_up_logging(verbose)
    from flashspec.bench import run_tune

    options = _options(
        prompts=prompts, model=model, drafts=draft or [], temperature=[temperature], repeat=repeat, limit=limit,
        num_speculative_tokens=_split(num_speculative_tokens, draft_length, "num-speculative-tokens"),
        max_tokens=max_tokens, report=report, backend=backend, draft_backend=draft_backend, draft_dtype=draft_dtype,
        draft_vocab=draft_vocab, threads=threads, gpu_layers=gpu_layers, device=device,
        dtype=dtype, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    run_tune(options, out, screen, force=force)


def _options(**values: object) -> BenchOptions:
    from flashspec.bench import BenchOptions

    return BenchOptions(**values)  # type: ignore[arg-type]


def _split(text: str, kind: Callable[[str], Number], name: str) -> list[Number]:
    """The parts of a comma-separated list."""
    try:
        return [kind(part.strip()) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise OptionError(f"--{name} is {text!r}; it must be numbers separated by commas") from error
