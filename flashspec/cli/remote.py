"""What the commands do with --backend vllm, --url and old vLLM command lines."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from flashspec.cli.options import app, screen
from flashspec.controller import AUTO
from flashspec.errors import OptionError
from flashspec.vllm.command import NEWEST, Options, Version, name, shell
from flashspec.vllm.legacy import translate as translated

if TYPE_CHECKING:
    from flashspec.vllm.engine import VllmEngine

READY_SECONDS = 900.0
THEIRS = {  # what is settled where the model is loaded
    "num_speculative_tokens": AUTO, "device": None, "dtype": None, "trust_remote_code": False, "verification": AUTO,
}  # fmt: skip
OURS = {  # options that only mean something where we run the model: name -> what is at its default
    "draft_backend": AUTO, "draft_dtype": None, "draft_vocab": None, "draft_width": None, "threads": None,
    "gpu_layers": 0, "pack": True, "self_test": False,
}  # fmt: skip


def remote_engine(
    model: str | None, *, url: str | None, api_key: str | None, say: Callable[[str], None], options: dict[str, Any]
) -> VllmEngine:
    """An engine over a running server, or over a vLLM that is started for it.

    Raises:
        OptionError: an option that this cannot honour.
        EngineStartError, EngineLostError: it does not come up, or does not answer.
    """
    from flashspec.vllm.engine import VllmEngine
    from flashspec.vllm.launch import engine_of

    if url is None:
        return engine_of(vllm_options(model, options), say, ready_seconds=READY_SECONDS)
    if options.get("draft") or options.get("drafter") not in (None, AUTO):
        raise OptionError("with --url the server has its drafter already; leave out --draft and --drafter")
    for option, neutral in {**OURS, **THEIRS}.items():
        if options.get(option, neutral) != neutral:
            raise OptionError(f"{_flag(option)} is the server's own choice with --url; leave it out")
    say(f"asking {url}")
    return VllmEngine(url, model=model, api_key=api_key)


def vllm_options(model: str | None, given: dict[str, Any], **more: Any) -> Options:
    """Our options as ``vllm.command``'s; raises OptionError for those that vLLM has no counterpart of."""
    from flashspec.vllm.launch import options_of

    for option, neutral in OURS.items():
        if given.get(option, neutral) != neutral:
            raise OptionError(f"{_flag(option)} is of the local engine; leave it out with --backend vllm")
    names = ("draft", "drafter", "num_speculative_tokens", "dtype", "trust_remote_code", "verification")
    return options_of(model, **{option: given[option] for option in names if option in given}, **more)


def check_vllm_only(backend: str, given: dict[str, Any]) -> None:
    """Raise OptionError for vLLM's options beside another backend."""
    asked = [option for option, value in given.items() if value is True or value not in (None, False, 1, ())]
    if asked and backend != "vllm":
        raise OptionError(f"{_flag(asked[0])} is vLLM's; add --backend vllm, or leave it out")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def parsed_schedule(text: str | None) -> tuple[tuple[int, int, int], ...]:
    """[[from, to, k], ...] as JSON; raises OptionError for anything else."""
    if text is None:
        return ()
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError):
        rows = None
    is_sound = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == 3 and all(type(number) is int for number in row) for row in rows
    )
    if not is_sound:
        raise OptionError(
            f"schedule is {text!r}; it must be rows of a first batch size, a last one and a number of guesses, such as "
            "'[[1, 4, 5], [5, 64, 0]]'; flashspec plan prints one"
        )
    return tuple((first, last, k) for first, last, k in rows)


def print_plan(options: Options) -> None:
    """The command that would be run, after what is to be known of it."""
    from flashspec.vllm.command import multi_node
    from flashspec.vllm.launch import planned, prepared

    made = planned(options, lambda line: None)
    for note in made.notes:
        screen.print(escape(note), style="dim", soft_wrap=True)
    print("\n".join(multi_node(prepared(options, lambda line: None)) if options.nodes > 1 else [shell(made)]))


def serve_vllm(options: Options, settings: dict[str, Any], *, ready_seconds: float) -> int:
    """Serve by a vLLM on a private port behind ours; the exit status.

    Raises:
        OptionError: the port is taken, there is no vLLM, or it does not have what was asked for.
        EngineStartError: it did not come up.
    """
    from flashspec.server.proxy import ProxySettings, serve_proxy
    from flashspec.server.run import bound
    from flashspec.vllm.launch import inner_process

    sock = bound(options.host or "127.0.0.1", 8000 if options.port is None else options.port)
    logger = logging.getLogger("flashspec.server")
    process, named = inner_process(options, logger.info, ready_seconds=ready_seconds)
    logger.info("vLLM's log is %s; serving %s on port %s", process.log, named, sock.getsockname()[1])
    return serve_proxy(process, ProxySettings(model_name=named, **settings), sock, progress=logger.info)


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []})
def translate(
    context: typer.Context,
    words: Annotated[list[str] | None, typer.Argument(help="An older vLLM command line.", show_default=False)] = None,
) -> None:
    """Turn a vLLM command line of an older tutorial into today's."""
    said = list(words or [])
    if said in ([], ["--help"], ["-h"]):
        screen.print(escape(context.get_help()), soft_wrap=True)
        raise typer.Exit(0 if said else 2)
    version, missing = _version()
    made = translated(_split(said[0]) if len(said) == 1 else said, version)
    for note in (*missing, *(made.notes or ["nothing in it is of old vLLM: it stays as it is"])):
        screen.print(escape(note), style="dim", soft_wrap=True)
    print(shell(made))


def _split(line: str) -> list[str]:
    """The words of a quoted command, pasted with its continued lines and perhaps a prompt before it."""
    try:
        return shlex.split(re.sub(r"\\\s*\n", " ", line).strip().removeprefix("$ "))
    except ValueError as error:
        raise OptionError(f"cannot read {line!r} as a command ({error}); close its quotes") from error


def _version() -> tuple[Version, list[str]]:
    """The vLLM that a command is for, and what to say where there is none."""
    from flashspec.vllm.launch import WHERE, executable, installed_version

    try:
        return installed_version(executable()), []
    except OptionError as error:
        why = str(error) if os.environ.get(WHERE) else "no vLLM is installed here"
        return NEWEST, [f"{why}; this is for vLLM {name(NEWEST)}"]
