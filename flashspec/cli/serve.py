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
    KEY,
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
from flashspec.cli.remote import check_vllm_only, parsed_schedule, print_plan, serve_vllm, vllm_options
from flashspec.controller import AUTO
from flashspec.errors import OptionError

GIB = 2**30


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
    past_outputs: Annotated[
        int, typer.Option(min=0, help="Tokens of finished answers that suffix drafts may come from; 0 for none.")
    ] = 100_000,
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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="vLLM: print the command and end.")] = False,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="vLLM: GPUs that share each layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="vLLM: groups of layers.")] = 1,
    data_parallel: Annotated[int, typer.Option(min=1, help="vLLM: copies of the model.")] = 1,
    draft_tensor_parallel: Annotated[int | None, typer.Option(min=1, help="vLLM: of the draft model.")] = None,
    distributed_executor: Annotated[str | None, typer.Option(metavar="mp|ray", help="vLLM.")] = None,
    nodes: Annotated[int, typer.Option(min=1, help="vLLM: machines, joined by Ray.")] = 1,
    gpu_memory_utilization: Annotated[float | None, typer.Option(help="vLLM: share of the GPU's memory.")] = None,
    quantization: Annotated[str | None, typer.Option(help="vLLM: awq, gptq, fp8, ...")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="vLLM: draft length by batch size, as plan prints it: [[1, 4, 5], [5, 64, 0]].")
    ] = None,
    vllm_arg: Annotated[list[str] | None, typer.Option(help="vLLM: a word passed on as it is; repeatable.")] = None,
    ready_timeout: Annotated[float, typer.Option(min=1, help="vLLM: seconds until it has to answer.")] = 900.0,
    restarts: Annotated[int, typer.Option(min=0, help="vLLM: times it is started again where it dies.")] = 3,
    verbose: Verbose = False,
) -> None:
    """Serve a model: OpenAI's API under /v1, a page at /, Prometheus at /metrics. SIGTERM finishes what runs."""
    vllm = {
        "tensor_parallel": tensor_parallel, "pipeline_parallel": pipeline_parallel, "data_parallel": data_parallel,
        "draft_tensor_parallel": draft_tensor_parallel, "distributed_executor": distributed_executor, "nodes": nodes,
        "gpu_memory_utilization": gpu_memory_utilization, "quantization": quantization,
        "schedule": parsed_schedule(schedule), "extra": tuple(vllm_arg or ()),
    }  # fmt: skip
    check_vllm_only(backend, {**vllm, "dry_run": dry_run})
    try:
        from flashspec.server.run import bound, serve as run, set_up_log

        if backend == "vllm":  # in front of it there is no engine, and torch takes seconds to import
            from flashspec.server import proxy  # noqa: F401
        else:
            from flashspec.server.app import Service, Settings
    except ImportError as error:
        raise OptionError(
            f"serving needs FastAPI, uvicorn, prometheus-client and llguidance ({error}); "
            "pip install 'flashspec-decoding[serve]'"
        ) from error
    set_up_log(_checked_format(log_format), verbose=verbose)
    if (os.environ.get(KEY) if api_key is None else api_key) == "":
        raise OptionError(f"the API key is empty; give one, or unset {KEY}")
    if backend == "vllm":
        options = vllm_options(
            model,
            {
                "draft": draft, "drafter": drafter, "dtype": dtype, "trust_remote_code": trust_remote_code,
                "num_speculative_tokens": draft_length(num_speculative_tokens), "draft_backend": draft_backend,
                "draft_dtype": draft_dtype, "draft_vocab": draft_vocab, "draft_width": draft_width, "threads": threads,
                "gpu_layers": gpu_layers, "pack": pack, "self_test": self_test,
            },
            served_model_name=served_model_name, max_model_len=max_length, max_batch=max_batch,
            host=host, port=port, api_key=api_key, **vllm,
        )  # fmt: skip
        if dry_run:
            print_plan(options)
            return
        treatment = {
            "api_key": api_key, "request_timeout": request_timeout, "max_body": int(max_body * 2**20),
            "cors_origins": tuple(cors_origin or ()), "restarts": restarts,
        }  # fmt: skip
        raise SystemExit(serve_vllm(options, treatment, ready_seconds=ready_timeout))
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
            prefix_memory=int(prefix_memory * GIB), past_outputs=past_outputs, read_seconds=read_seconds,
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
    from flashspec.weights import EMBEDDED_NAME

    if model is None:
        return EMBEDDED_NAME
    return model.rstrip("/").rsplit("/", 1)[-1] if "/" in model else model
