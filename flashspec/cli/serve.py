"""serve: an OpenAI-compatible server over one engine."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from typing import Annotated, Literal

import typer

from flashspec.cli.options import (
    Backend,
    Config,
    Device,
    DraftBackend,
    DraftDtype,
    DrafterName,
    DraftLength,
    DraftModel,
    DraftVocab,
    DraftWidth,
    Dtype,
    GpuLayers,
    Model,
    Pack,
    SelfTest,
    Threads,
    TrustRemoteCode,
    Verbose,
    app,
    draft_length,
    progress,
)
from flashspec.controller import AUTO
from flashspec.errors import OptionError

GIB = 2**30
KEY = "FLASHSPEC_API_KEY"
DEFAULT_NAME = "SmolLM2-135M-Instruct"


@app.command()
def serve(
    config: Config = None,
    model: Model = None,
    draft: DraftModel = None,
    drafter: DrafterName = None,
    num_speculative_tokens: DraftLength = AUTO,
    host: Annotated[str, typer.Option(help="0.0.0.0: any address of this machine.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="What clients call the model.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar=KEY, help="Asked of clients.")] = None,
    max_batch: Annotated[int, typer.Option(min=1, max=256, help="Requests that run at once.")] = 16,
    max_waiting: Annotated[int, typer.Option(min=0, help="Requests beyond these that wait; more get a 429.")] = 256,
    max_length: Annotated[int | None, typer.Option(min=2, help="Tokens of prompt and output.")] = None,
    request_timeout: Annotated[float, typer.Option(min=0.1, help="Seconds, time in the queue included.")] = 600.0,
    cache_memory: Annotated[
        float | None, typer.Option(min=0, help="GiB for keys and values of running requests. Default: of what is free.")
    ] = None,
    prefix_memory: Annotated[
        float, typer.Option(min=0, help="GiB for those of finished ones, for prompts that begin alike.")
    ] = 1.0,
    read_seconds: Annotated[
        float, typer.Option(min=0.001, help="How long streams may pause while a prompt is read.")
    ] = 0.2,
    max_body: Annotated[float, typer.Option(min=0.001, help="MiB of a request.")] = 4.0,
    cors_origin: Annotated[list[str] | None, typer.Option(help="A web page's address; may be repeated.")] = None,
    log_format: Annotated[str, typer.Option(metavar="text|json")] = "text",
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Write prompts into the log, too.")] = False,
    backend: Backend = AUTO,
    draft_backend: DraftBackend = AUTO,
    draft_dtype: DraftDtype = None,
    draft_vocab: DraftVocab = None,
    draft_width: DraftWidth = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    device: Device = None,
    dtype: Dtype = None,
    pack: Pack = True,
    self_test: SelfTest = False,
    trust_remote_code: TrustRemoteCode = False,
    verbose: Verbose = False,
) -> None:
    """Serve a model: OpenAI's API under /v1, a page at /, Prometheus at /metrics. SIGTERM finishes what runs."""
    try:
        from flashspec.server.app import Service, Settings
        from flashspec.server.run import bound, serve as run, set_up_log
    except ImportError as error:
        raise OptionError(
            f"serving needs FastAPI, uvicorn, prometheus-client and llguidance ({error}); "
            "pip install 'flashspec-decoding[serve]'"
        ) from error
    set_up_log(_checked_format(log_format), verbose=verbose)
    if (os.environ.get(KEY) if api_key is None else api_key) == "":
        raise OptionError("the API key is empty; give one, or unset FLASHSPEC_API_KEY")
    # until it serves there is nothing to finish; as process 1 of a container it would be deaf without a handler
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    sock = bound(host, port)
    logger = logging.getLogger("flashspec.server")
    if api_key is None and host not in ("127.0.0.1", "::1", "localhost"):
        logger.warning("anybody who can reach %s may use this server: set --api-key", host)
    with contextlib.nullcontext(logger.info) if log_format == "json" else progress() as say:
        from flashspec.loader import load

        engine = load(
            model, draft=draft, drafter=drafter, num_speculative_tokens=draft_length(num_speculative_tokens),
            max_batch=max_batch, max_length=max_length,
            cache_memory=AUTO if cache_memory is None else int(cache_memory * GIB),
            prefix_memory=int(prefix_memory * GIB), read_seconds=read_seconds,
            backend=backend, draft_backend=draft_backend, draft_dtype=draft_dtype, draft_vocab=draft_vocab,
            draft_width=draft_width,
            threads=threads, gpu_layers=gpu_layers, device=device, dtype=dtype, pack=pack,
            self_test=self_test, trust_remote_code=trust_remote_code, progress=say,
        )  # fmt: skip
    settings = Settings(
        model_name=served_model_name or _name(model), api_key=api_key, max_waiting=max_waiting,
        request_timeout=request_timeout, max_body=int(max_body * 2**20), cors_origins=tuple(cors_origin or ()),
        log_prompts=log_prompts,
    )  # fmt: skip
    where = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    logger.info(
        "serving %s at %s (%s; %d at once, %s tokens of keys and values)",
        settings.model_name, where, engine.why, max_batch, engine.scheduler.max_cells,
    )  # fmt: skip
    run(Service(engine, settings), sock)


def _checked_format(name: str) -> Literal["text", "json"]:
    if name == "text":
        return "text"
    if name == "json":
        return "json"
    raise OptionError(f"log_format is {name!r}; it must be text or json")


def _name(model: str | None) -> str:
    """What clients call the model: its hub name, or the last part of its path."""
    if model is None:
        return DEFAULT_NAME
    return model.rstrip("/").rsplit("/", 1)[-1] if "/" in model else model
