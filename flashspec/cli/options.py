"""What the commands share: the application, the screen, and each option once, with its help."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tomllib
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.markup import escape

from flashspec.core import SamplingParams, Verification
from flashspec.errors import OptionError

app = typer.Typer(
    help="Lossless speculative decoding: the same text, sooner.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
screen = Console(stderr=True, highlight=False)
DEFAULTS = SamplingParams()
KEY = "FLASHSPEC_API_KEY"
MODELS = (  # options that say how models are loaded, in every command that loads some
    "backend", "draft_backend", "draft_dtype", "draft_vocab", "draft_width", "threads", "gpu_layers", "device", "dtype"
)  # fmt: skip
ENGINE = {"model", "draft", "drafter", "num_speculative_tokens", *MODELS}
SAMPLING = {field.name for field in dataclasses.fields(SamplingParams)} - {  # without what no command has
    "logit_bias", "grammar", "allowed_tokens", "bad_tokens", "min_tokens",
}  # fmt: skip
WHOLE = {"draft_vocab", "draft_width", "threads", "gpu_layers", "top_k", "seed", "max_tokens", "logprobs"}
NUMBERS = {field.name for field in dataclasses.fields(SamplingParams) if field.type == "float"}
LISTS = {"num_speculative_tokens", "temperature", "draft_width"}  # of bench, which takes texts with commas for them


# One option, one line: the commands share these.
Model = Annotated[str | None, typer.Option(help="Hub name, folder or .gguf file. Without it: SmolLM2-135M-Instruct.")]
DraftModel = Annotated[
    str | None,
    typer.Option("--draft", help="A small model, whose tokenizer may be another; or a folder of heads."),
]
DrafterName = Annotated[
    str | None,
    typer.Option(
        "--drafter", metavar="auto|none|ngram|suffix|model|translated|hybrid|medusa|eagle3",
        help="auto: hybrid with --draft, else suffix.", show_default=False,
    ),
]  # fmt: skip
Backend = Annotated[
    str, typer.Option(metavar="auto|torch|llamacpp|vllm", help="llamacpp runs a .gguf as it is; vllm starts one.")
]
Url = Annotated[
    str | None, typer.Option("--url", help="Attach to a running vLLM or flashspec server instead of loading a model.")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar=KEY, help="Of that server.")]
DraftBackend = Annotated[
    str, typer.Option(metavar="auto|torch|llamacpp", help="auto: llama.cpp for a .gguf on a CPU, where installed.")
]
DraftDtype = Annotated[str | None, typer.Option(help="Of the draft model: int8 or int4 too, on a CPU.")]
DraftVocab = Annotated[int | None, typer.Option(help="The draft model guesses the N most frequent tokens only.")]
DraftWidth = Annotated[int | None, typer.Option(help="Guesses tried at each place: 1 drafts chains, more trees.")]
Threads = Annotated[int | None, typer.Option(min=1, help="Of llama.cpp. Default: torch's number.")]
GpuLayers = Annotated[int, typer.Option(help="Layers that llama.cpp keeps on a GPU; -1: all.")]
DraftLength = Annotated[
    str,
    typer.Option("--num-speculative-tokens", metavar="auto|N", help="auto: by measurement. N: up to N."),
]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float, typer.Option()]
TopK = Annotated[int, typer.Option(help="0: all.")]
MinP = Annotated[float, typer.Option()]
RepetitionPenalty = Annotated[float, typer.Option()]
PresencePenalty = Annotated[float, typer.Option()]
FrequencyPenalty = Annotated[float, typer.Option()]
Seed = Annotated[int | None, typer.Option(help="The same text again, whatever the drafter.")]
MaxTokens = Annotated[int, typer.Option()]
Stop = Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")]
Rule = Annotated[Verification, typer.Option(help="auto: coupled where there is a seed, else rejection.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")]
Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")]
Pack = Annotated[bool, typer.Option("--pack/--no-pack", help="Faster linear layers (CPU, float32).")]
SelfTest = Annotated[bool, typer.Option("--self-test", help="Compare rolled-back logits with plain ones first.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with a model.")]
Stats = Annotated[bool, typer.Option("--stats", help="End with acceptance, speed and where the time went.")]
ColorTokens = Annotated[bool, typer.Option("--color-tokens", help="Accepted, recovered and bonus tokens in colours.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say which dtype, device and model was chosen.")]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config", callback=lambda context, value: read_config(context, value), is_eager=True,
        help="A flashspec.toml, as flashspec tune writes it. Flags win over it.",
    ),
]  # fmt: skip
System = Annotated[str | None, typer.Option(help="System message.")]


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A spinner on stderr that shows the present stage; a line for each where stderr is no terminal."""
    with screen.status("starting") as status:  # torch and Transformers take seconds to import

        def say(line: str) -> None:
            status.update(escape(line))
            if not screen.is_terminal:
                screen.print(escape(line), style="dim", soft_wrap=True)

        yield say


def set_up_logging(verbose: bool) -> None:
    handler = RichHandler(console=screen, show_time=False, show_path=False, markup=False)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format="%(message)s", force=True)
    logging.getLogger("flashspec").setLevel(logging.INFO if verbose else logging.WARNING)


def draft_length(text: str) -> int | str:
    """The number in ``text``, or the text where it is none, for the loader to judge."""
    return int(text) if text.isascii() and text.strip().lstrip("-").isdigit() else text


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Make a file's values the command's defaults.

    Raises:
        OptionError: not TOML, a name that no command has, or a value that the option does not take.
    """
    if file is None:
        return None
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise OptionError(
            f"cannot read the configuration {file}: {error}; it must be TOML in UTF-8, as flashspec tune writes it"
        ) from error
    known = {*ENGINE, *SAMPLING}
    if unknown := sorted(set(values) - known):
        raise OptionError(f"{file} sets {unknown[0]!r}, which is not an option; known are {', '.join(sorted(known))}")
    options = {parameter.name: parameter for parameter in context.command.params}
    for name, value in values.items():
        _check_kind(file, name, value, is_bench="drafters" in options)
    if "drafters" in options and "drafter" in values:
        values["drafters"] = values.pop("drafter")
    for name in set(values) & set(options):
        if getattr(options[name], "multiple", False) and not isinstance(values[name], list):
            values[name] = [values[name]]
        try:
            options[name].process_value(context, values[name])
        except typer.BadParameter as error:  # a limit, which Typer would say without the file
            raise OptionError(
                f"{file} sets {name} = {_shown(values[name])}; {error.message.removeprefix('Value error, ')}"
            ) from error
    context.default_map = {**(context.default_map or {}), **{k: v for k, v in values.items() if k in options}}
    return file


def _check_kind(file: Path, name: str, value: object, *, is_bench: bool) -> None:
    """Raise OptionError for a value of another type: Typer would make a text of a number and a number of true."""
    kinds, wanted = _kind(name)
    if is_bench and name in LISTS:
        kinds, wanted = (*kinds, str), f"{wanted}, or a text of several with commas"
    is_list = isinstance(value, list) and (name == "stop" or (is_bench and name == "draft"))
    for each in value if isinstance(value, list) and is_list else [value]:
        lengths = each.split(",") if isinstance(each, str) and name == "num_speculative_tokens" else []
        if type(each) not in kinds or any(draft_length(part) == part != "auto" for part in map(str.strip, lengths)):
            given = f"to a table [{name}]" if isinstance(each, dict) else f"= {_shown(each)}"
            raise OptionError(f"{file} sets {name} {given}; it must be {wanted}")


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, date) else repr(value)


def _kind(name: str) -> tuple[tuple[type, ...], str]:
    """Types of an option's value in a file, and how they are called."""
    if name in WHOLE:
        return (int,), "a whole number"
    if name in NUMBERS:
        return (int, float), "a number"
    if name == "ignore_eos":
        return (bool,), "true or false"
    if name == "num_speculative_tokens":
        return (int, str), 'a whole number or "auto"'
    return (str,), "a text in quotes" + (", or a list of such" if name == "stop" else "")
