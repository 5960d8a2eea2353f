"""``flashspec train``: heads for a model, from prompts."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from flashspec.cli.options import Device, Dtype, Model, Verbose, app, screen, set_up_logging

if TYPE_CHECKING:
    from flashspec.train.run import TrainOptions

heads_app = typer.Typer(help="Train heads that draft for a model.", no_args_is_help=True)
app.add_typer(heads_app, name="train")

Data = Annotated[
    Path,
    typer.Option(help="A .jsonl file (messages, prompt or text in each line), or a folder of such and text files."),
]
Out = Annotated[Path, typer.Option(help="Folder for the heads.")]
Epochs = Annotated[int, typer.Option()]
LearningRate = Annotated[float, typer.Option("--lr", help="The highest; it falls in a cosine.")]
BatchSize = Annotated[int, typer.Option(help="Texts in a step.")]
SeqLen = Annotated[int, typer.Option(help="Tokens of a text; longer ones are cut up.")]
VocabTop = Annotated[int | None, typer.Option(help="Guess the N most frequent tokens only: smaller, faster heads.")]
AsIs = Annotated[bool, typer.Option("--as-is", help="Learn from the data's own answers, not from the model's.")]
MaxTokens = Annotated[int, typer.Option(help="Of each answer of the model.")]
Temperature = Annotated[float, typer.Option(help="Of every other answer; the rest is greedy.")]
Limit = Annotated[int | None, typer.Option(min=1, help="So many texts of the data.")]
Cache = Annotated[Path | None, typer.Option(help="Folder for answers and hidden states. Default: our cache folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the training that was interrupted in --out.")]
Seed = Annotated[int, typer.Option()]


@heads_app.command()
def medusa(
    data: Data,
    out: Out,
    model: Model = None,
    heads: Annotated[int, typer.Option(help="How many; head i guesses the token i + 1 places after the next.")] = 4,
    layers: Annotated[int, typer.Option(help="Residual blocks of each head.")] = 1,
    vocab_top: VocabTop = None,
    epochs: Epochs = 4,
    lr: LearningRate = 3e-3,
    batch_size: BatchSize = 4,
    seq_len: SeqLen = 512,
    as_is: AsIs = False,
    max_tokens: MaxTokens = 192,
    temperature: Temperature = 0.7,
    limit: Limit = None,
    cache: Cache = None,
    resume: Resume = False,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    verbose: Verbose = False,
) -> None:
    """Medusa heads: several tokens ahead, all from the model's last hidden state."""
    set_up_logging(verbose)
    from flashspec.train.fit import Plan
    from flashspec.train.run import TrainOptions

    options = TrainOptions(
        kind="medusa", model=model, data=data, out=out, num_heads=heads, num_layers=layers, vocab_top=vocab_top,
        plan=Plan(epochs, lr, batch_size, seq_len, seed), limit=limit, as_is=as_is, max_tokens=max_tokens,
        temperature=temperature, cache=cache, resume=resume, device=device, dtype=dtype,
    )  # fmt: skip
    _run(options)


@heads_app.command()
def eagle3(
    data: Data,
    out: Out,
    model: Model = None,
    steps: Annotated[int, typer.Option(help="Tokens ahead that it practises, reading its own output.")] = 4,
    vocab_top: VocabTop = None,
    epochs: Epochs = 4,
    lr: LearningRate = 1e-3,
    batch_size: BatchSize = 4,
    seq_len: SeqLen = 512,
    as_is: AsIs = False,
    max_tokens: MaxTokens = 192,
    temperature: Temperature = 0.7,
    limit: Limit = None,
    cache: Cache = None,
    resume: Resume = False,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    verbose: Verbose = False,
) -> None:
    """An EAGLE-3 head: one layer that reads the model's inner states, and its own further ahead."""
    set_up_logging(verbose)
    from flashspec.train.fit import Plan
    from flashspec.train.run import TrainOptions

    options = TrainOptions(
        kind="eagle3", model=model, data=data, out=out, num_heads=steps, vocab_top=vocab_top,
        plan=Plan(epochs, lr, batch_size, seq_len, seed), limit=limit, as_is=as_is, max_tokens=max_tokens,
        temperature=temperature, cache=cache, resume=resume, device=device, dtype=dtype,
    )  # fmt: skip
    _run(options)


def _run(options: TrainOptions) -> None:
    """Train with a bar for each stage; Ctrl-C ends the step at hand, saves and leaves, a second one leaves at once."""
    from flashspec.train.fit import Stopped
    from flashspec.train.run import Report, described, train

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True) as progress, _interruptible() as stopped:
        bars: dict[str, TaskID] = {}

        def say(report: Report) -> None:
            if stopped and report.stage != "training":  # what is done of other stages is on disk already
                raise Stopped
            if report.stage not in bars:
                for bar in bars.values():
                    progress.stop_task(bar)
                bars[report.stage] = progress.add_task(escape(report.stage), total=None)
                if not screen.is_terminal:
                    screen.print(escape(report.stage), style="dim", soft_wrap=True)
            progress.update(bars[report.stage], completed=report.done, total=report.total or None)
            if report.line is not None:
                progress.console.print(escape(report.line), soft_wrap=True)

        try:
            counts = train(options, say, is_stopped=lambda: bool(stopped))
        except Stopped:
            screen.print(
                f"stopped; go on with the same command and --resume ({escape(str(options.out))})", soft_wrap=True
            )
            raise typer.Exit(130) from None
    print(described(counts))
    print(f"heads in {options.out}; use them with --draft {options.out}")


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """A list that is not empty once Ctrl-C was pressed; pressed again, it interrupts as ever."""
    seen: list[int] = []
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
