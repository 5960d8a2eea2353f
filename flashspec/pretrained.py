"""Names to models: weights, tokenizer, device and dtype. The one place that knows which runtime runs what."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from flashspec.errors import FlashSpecError, MemoryLimitError, ModelError, OptionError
from flashspec.machine import machine
from flashspec.text import Tokenizer
from flashspec.weights import (
    EMBEDDED_NAME,
    Progress,
    cache_folder,
    check_hub,
    first_line,
    gguf_file,
    source_of,
    tokenizer_folder,
)

logger = logging.getLogger("flashspec")

TESTED_FAMILIES = frozenset({"gemma3_text", "gpt2", "llama", "mistral", "phi", "phi3", "qwen2", "qwen3"})
BACKENDS = ("auto", "torch", "llamacpp")
BITS = {"int8": 8, "int4": 4}  # draft models' dtypes
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can score, its tokenizer, and what to call it."""

    name: str
    target: Any  # backends.hf.HFTarget or backends.llamacpp.LlamaTarget
    tokenizer: Tokenizer
    identity: dict[str, Any] = field(default_factory=dict)  # what its forwards' times depend on


def load_model(
    model: str | os.PathLike[str] | None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    backend: str = "auto",
    threads: int | None = None,
    gpu_layers: int = 0,
    vocab: int | None = None,
    pack: bool = True,
    trust_remote_code: bool = False,
    self_test: bool = False,
    is_draft: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """A model with its tokenizer. See ``loader.load``.

    Args:
        dtype: for a draft model ``"int8"`` and ``"int4"`` too.
        vocab: of a draft model, so many of the most frequent tokens are guessed; None for all.
    """
    say = progress or (lambda line: None)
    name = EMBEDDED_NAME if model is None else str(model)
    place = _device(device)
    cheaper = _Cheaper(_bits(dtype, place, is_draft=is_draft), vocab)
    if backend_of(model, backend, is_draft=is_draft, device=place, needs_torch=cheaper != _Cheaper()) == "llamacpp":
        return _llamacpp(name, model, threads, gpu_layers, say)
    if is_draft and rounds_to_int8(dtype, place, pack=pack):
        cheaper = replace(cheaper, bits=8)  # measured: 0.6 of the time of bfloat16 weights, 99 % of the guesses
    precision = dtype_of(None if cheaper.bits else dtype, place)
    source = source_of(model, say)
    check_hub(source, say=say)
    say(f"loading {name}")
    network, tokenizer = _pretrained(name, source, place, precision, trust_remote_code)
    from flashspec.backends import hf  # Transformers takes seconds to import; errors above should not wait for it

    hf.check_runnable(network)
    layers = _prepared(name, network, tokenizer, cheaper, pack=pack, is_draft=is_draft, say=say)
    target = hf.HFTarget(network)
    family = network.config.model_type
    if self_test or family not in TESTED_FAMILIES:
        difference = hf.self_test(target)
        say(f"self-test of {name} ({family}): logits after rollback differ by {difference:.1e} standard deviations")
    logger.info("%s: %s on %s", name, str(network.dtype).removeprefix("torch."), place)
    identity = {
        "model": source,
        "config": hashlib.sha256(network.config.to_json_string().encode()).hexdigest(),
        "weights": sum(parameter.nbytes for parameter in network.parameters()),
        "dtype": str(network.dtype),
        "device": str(place),
        "layers": layers,
        "attention": network.config._attn_implementation,
        **machine(),
    }
    return Loaded(name, target, tokenizer, identity)


@dataclass(frozen=True, slots=True)
class _Cheaper:
    """What makes a draft model cheaper, and its guesses a little worse."""

    bits: int | None = None  # of its weights
    vocab: int | None = None  # tokens it can guess


def _bits(dtype: str | None, device: torch.device, *, is_draft: bool) -> int | None:
    if dtype not in BITS:
        return None
    if not is_draft:
        raise OptionError(
            f"dtype is {dtype!r}: rounding the served model's weights would change what it says; give --draft-dtype "
            f"{dtype} for the draft model, or serve a quantised .gguf with --backend llamacpp"
        )
    if device.type != "cpu":
        raise OptionError(f"draft dtype {dtype!r} is for CPUs, and the device is {device}; use bfloat16 or float16")
    return BITS[dtype]


def _prepared(
    name: str, network: Any, tokenizer: Tokenizer, cheaper: _Cheaper, *, pack: bool, is_draft: bool, say: Progress
) -> dict[str, int]:
    """Layers replaced in place by cheaper ones; how many of each kind."""
    from flashspec.backends import decode, half, hf
    from flashspec.backends.lean import make_lean

    layers: dict[str, int] = {}
    kernels = None
    is_float32 = network.device.type == "cpu" and network.dtype is torch.float32
    if pack and is_float32:  # the same arithmetic with fewer calls and larger layers, which are read faster
        kernels = decode.compiled(cache_folder() / "kernels")
        layers |= make_lean(network, kernels)
    if cheaper != _Cheaper():
        say(f"making {name} cheaper")
        layers |= _cheapened(network, tokenizer, cheaper)
    if pack and is_float32:
        say(f"packing {name}'s linear layers")
        # a draft model scores a token at a time, which oneDNN's layout does not help
        limits: dict[str, Any] = {"at_least": sys.maxsize} if is_draft else {"pays": cache(packing_pays)}
        layers |= hf.pack_linears(network, kernel=half.compiled(cache_folder() / "kernels"), **limits)
        logger.info("%s: linear layers in %s", name, layers)
    hf.use_grouped_attention(network, kernels)
    return layers


def _cheapened(network: Any, tokenizer: Tokenizer, cheaper: _Cheaper) -> dict[str, int]:
    from flashspec.backends.quantised import cut_head, frequent_tokens, quantise_linears

    layers: dict[str, int] = {}
    if cheaper.vocab is not None:
        size = network.config.get_text_config(decoder=True).vocab_size
        cut_head(network, frequent_tokens(tokenizer, cheaper.vocab, size))
        layers["vocab"] = cheaper.vocab
    if cheaper.bits is not None:
        layers |= quantise_linears(network, cheaper.bits, kernel=quantising_kernel(cache_folder() / "kernels"))
    return layers


def rounds_to_int8(dtype: str | None, device: torch.device, *, pack: bool) -> bool:
    """Whether a draft model's linear layers are rounded to int8, where nothing else was asked for."""
    return pack and dtype is None and device.type == "cpu" and quantising_kernel(cache_folder() / "kernels") is not None


@cache  # it starts the compiler to ask its version, and checks the kernel's numbers
def quantising_kernel(folder: Path) -> Any:
    from flashspec.backends.quantised import compiled

    return compiled(folder)


# llama.cpp


def backend_of(
    model: str | os.PathLike[str] | None,
    backend: str,
    *,
    is_draft: bool = False,
    device: torch.device | None = None,
    needs_torch: bool = False,
) -> str:
    """``"torch"`` or ``"llamacpp"``.

    ``auto`` runs a GGUF draft model on a CPU with llama.cpp where that is installed. A served model's numbers are not
    changed by what happens to be installed: there, llama.cpp has to be asked for.

    Raises:
        OptionError: an unknown backend, or one that cannot run this model.
    """
    if backend not in BACKENDS:
        raise OptionError(f"backend is {backend!r}; it must be one of {', '.join(BACKENDS)}")
    is_gguf = model is None or Path(model).suffix == ".gguf"
    if backend == "llamacpp" and not is_gguf:
        raise OptionError(f"llama.cpp runs .gguf files, and {str(model)!r} is none; leave out --backend llamacpp")
    if backend == "llamacpp" and needs_torch:
        raise OptionError("--draft-dtype and --draft-vocab are for torch, and a .gguf is quantised already; give one")
    if backend != "auto":
        return backend
    is_cpu = device is None or device.type == "cpu"
    is_better = is_draft and is_gguf and is_cpu and not needs_torch and has_llamacpp()
    return "llamacpp" if is_better else "torch"


def has_llamacpp() -> bool:
    return importlib.util.find_spec("llama_cpp") is not None


def _llamacpp(
    name: str, model: str | os.PathLike[str] | None, threads: int | None, gpu_layers: int, say: Progress
) -> Loaded:
    from flashspec.backends.llamacpp import LlamaTarget, llama_cpp

    version = llama_cpp().llama_version().decode()
    path = gguf_file(model)
    tokenizer = _gguf_tokenizer(name, path, say)
    _check_free(name, path.stat().st_size, "as it is in the file")
    say(f"loading {name} with llama.cpp")
    target = LlamaTarget(path, threads=threads, gpu_layers=gpu_layers)
    identity = {
        "model": str(path.resolve()),
        "size": path.stat().st_size,
        "changed": path.stat().st_mtime_ns,
        "llama.cpp": version,
        "gpu_layers": gpu_layers,
        **machine(),
        "threads": target.threads,
    }
    return Loaded(name, target, tokenizer, identity)


def _gguf_tokenizer(name: str, path: Path, say: Progress) -> Tokenizer:
    from transformers import AutoTokenizer

    with readable_errors(name):
        return AutoTokenizer.from_pretrained(tokenizer_folder(path, say))


def load_plain(
    model: str | os.PathLike[str] | None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> Any:
    """The same weights as a stock Transformers model, for the benchmark's baselines."""
    say = progress or (lambda line: None)
    name = EMBEDDED_NAME if model is None else str(model)
    place = _device(device)
    precision = dtype_of(dtype, place)
    say(f"loading {name} for Transformers' own generate")
    source = source_of(model, say)
    check_hub(source, say=say)
    return _pretrained(name, source, place, precision, trust_remote_code)[0]


# device, dtype, weights


def _device(device: str | None) -> torch.device:
    name = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(name)
        if place.type == "meta":
            raise RuntimeError("a device without data")
    except RuntimeError as error:
        raise OptionError(f"device is {name!r}; it must be cpu, cuda or cuda:N") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"device is {name!r}, and this machine has {torch.cuda.device_count()} CUDA devices; use --device cpu"
        )
    return place


def dtype_of(dtype: str | None, device: torch.device) -> torch.dtype | str:
    """What to load in: a torch dtype, or ``"auto"`` for the model's own."""
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")
    if device.type != "cpu":
        return "auto" if dtype is None else DTYPES[dtype]
    if dtype in (None, "float32"):
        return torch.float32
    if dtype == "bfloat16" and cpu_has_bfloat16():
        return torch.bfloat16
    logger.warning(
        "computing in float32 instead of %s: this CPU has no instructions for it, and without them scoring n draft "
        "tokens costs n times as much as one",
        dtype,
    )
    return torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 in hardware (AVX512-BF16 or AMX)."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, check, lambda: False)() for check in checks)


def _pretrained(
    name: str, source: str, device: torch.device, dtype: torch.dtype | str, trust_remote_code: bool
) -> tuple[Any, Tokenizer]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from flashspec.backends.hf import layer_windows

    with readable_errors(name):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        layer_windows(config)  # refuse before reading gigabytes
        _check_memory(name, Path(source), dtype, device)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
        network, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True
        )
        if report["missing_keys"]:
            raise ModelError(
                f"cannot load {name!r}: its weights lack {sorted(report['missing_keys'])[0]}; copy it anew"
            )
        return network.eval().to(device), tokenizer


@contextlib.contextmanager
def readable_errors(name: str) -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    hub_logger = logging.getLogger("huggingface_hub")
    levels = transformers_logging.get_verbosity(), hub_logger.level
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    hub_logger.setLevel(logging.ERROR)  # it warns of each of its five retries
    try:
        yield
    except FlashSpecError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise MemoryLimitError(f"no memory for the weights of {name}; use a smaller model or half precision") from error
    except Exception as error:  # from_pretrained raises a dozen kinds for unreadable files
        raise ModelError(
            f"cannot load {name!r}: {first_line(error)}; name a folder with a whole Transformers model, a .gguf file, "
            "or a model on a hub that this machine reaches"
        ) from error
    finally:
        transformers_logging.set_verbosity(levels[0])
        hub_logger.setLevel(levels[1])


def _check_memory(name: str, folder: Path, dtype: torch.dtype | str, device: torch.device) -> None:
    """On a CPU the kernel kills what does not fit, so ask before."""
    if device.type != "cpu" or not isinstance(dtype, torch.dtype):
        return
    from safetensors import safe_open

    numbers = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            numbers += sum(math.prod(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    _check_free(name, numbers * dtype.itemsize, f"in {dtype}")


def packing_pays(out: int, into: int) -> bool:
    """Whether to lay a weight of this shape out for oneDNN: tried on this machine once, and kept beside its costs."""
    from flashspec.backends import hf

    digest = hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()
    file = cache_folder() / "costs" / f"layouts-{digest[:16]}.json"
    known: dict[str, bool] = {}
    with contextlib.suppress(OSError, ValueError):
        known = dict(json.loads(file.read_text(encoding="utf-8")))
    name = f"{out}x{into}"
    if not isinstance(known.get(name), bool):
        known[name] = hf.packing_pays(out, into)
        with contextlib.suppress(OSError):  # it only saves a moment
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(known), encoding="utf-8")
            part.replace(file)
    return known[name]


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken there now."""
    import psutil

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def _check_free(name: str, needed: int, how: str) -> None:
    free = free_memory(torch.device("cpu"))
    if needed > free:
        raise MemoryLimitError(
            f"{name} needs {needed / 2**30:.1f} GiB for its weights {how}, and {free / 2**30:.1f} GiB are free; "
            "use a smaller model or free some memory"
        )
