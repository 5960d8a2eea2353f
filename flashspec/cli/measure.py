"""bench: numbers instead of promises."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flashspec.cli.options import (
    DEFAULTS,
    Device,
    DraftLength,
    DraftModel,
    Dtype,
    MaxTokens,
    Model,
    Pack,
    Temperature,
    TrustRemoteCode,
    Verbose,
    app,
    screen,
    set_up_logging,
)


@app.command()
def bench(
    prompts: Annotated[list[Path], typer.Option(help="JSON lines with messages or prompt; may be repeated.")],
    model: Model = None,
    draft: DraftModel = None,
    drafters: Annotated[str, typer.Option(help="Comma-separated; none is always measured.")] = "none,ngram",
    num_speculative_tokens: DraftLength = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts of each file.")] = 4,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = DEFAULTS.temperature,
    hf: Annotated[bool, typer.Option("--hf", help="Measure Transformers' own ways in the same run.")] = False,
    device: Device = None,
    dtype: Dtype = None,
    pack: Pack = True,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Verbose = False,
) -> None:
    """Measure drafters against plain decoding in one interleaved run. The last line of stdout is JSON."""
    from flashspec.bench import BenchOptions, run_bench

    set_up_logging(verbose)
    options = BenchOptions(
        model=model, draft=draft, drafters=[name.strip() for name in drafters.split(",") if name.strip()],
        num_speculative_tokens=num_speculative_tokens, prompts=prompts, limit=limit, max_tokens=max_tokens,
        temperature=temperature, hf=hf, device=device, dtype=dtype, pack=pack, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    run_bench(options, screen)
