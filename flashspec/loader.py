"""Names become objects: the one place where a string is turned into a model, a tokenizer or a drafter."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashspec import costs
from flashspec.controller import AUTO, Controller
from flashspec.core import Drafter
from flashspec.costs import CostCurve
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.ngram import NGramDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import FlashSpecError, MemoryLimitError, ModelError, OptionError, VocabularyError
from flashspec.machine import machine
from flashspec.scheduler import check_draft_length
from flashspec.text import Tokenizer
from flashspec.weights import EMBEDDED_NAME, Progress, cache_folder, first_line, source_of

logger = logging.getLogger("flashspec")

TESTED_FAMILIES = frozenset({"gemma3_text", "gpt2", "llama", "mistral", "phi", "phi3", "qwen2", "qwen3"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can score, its tokenizer, and what to call it."""

    name: str
    target: Any  # backends.hf.HFTarget
    tokenizer: Tokenizer
    identity: dict[str, Any] = field(default_factory=dict)  # what its forwards' times depend on


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """How a drafter is made."""

    make: Callable[[Loaded, Loaded | None], Drafter | None]
    needs_draft: bool = False


def _model_drafter(target: Loaded, draft: Loaded | None) -> Drafter:
    assert draft is not None
    check_vocabularies(target, draft)
    return ModelDrafter(draft.target, vocab_size=target.target.vocab_size)


DRAFTERS: dict[str, DrafterKind] = {
    "none": DrafterKind(lambda target, draft: None),
    "ngram": DrafterKind(lambda target, draft: NGramDrafter()),
    "model": DrafterKind(_model_drafter, needs_draft=True),
}


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    draft: str | os.PathLike[str] | None = None,
    drafter: str | Drafter | None = None,
    num_speculative_tokens: int | str = AUTO,
    device: str | None = None,
    dtype: str | None = None,
    pack: bool = True,
    max_batch: int = 16,
    self_test: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LocalEngine:
    """An engine for a model and a way to draft for it.

    Args:
        model: a hub name, a folder or a ``.gguf`` file; None for the embedded SmolLM2-135M-Instruct.
        draft: a small model of the same vocabulary, named likewise.
        drafter: ``"none"``, ``"ngram"``, ``"model"`` or a Drafter of your own; by default ``"model"`` where ``draft``
            is given, else ``"ngram"``.
        num_speculative_tokens: ``"auto"`` chooses the draft length at each step, 0 included, from measured costs (which
            takes seconds the first time) and running acceptance; a number is the longest draft.
        device: ``"cpu"``, ``"cuda"``, ...; None for CUDA where there is one.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None for float32 on a CPU, else the model's own.
        pack: replace linear layers by ones that cost less for a few tokens (CPU, float32; the same numbers).
        max_batch: sequences that run at once.
        self_test: compare rolled-back logits with plain forwards before the first request.
        trust_remote_code: run model code that comes with the weights.
        progress: called with a line of text at each stage.

    Raises:
        FlashSpecError: with what was wrong, the limit and the next step.
    """
    kind, name = choose_drafter(drafter, has_draft=draft is not None)
    check_draft_length(num_speculative_tokens, or_auto=True)
    make = partial(
        load_model,
        device=device,
        dtype=dtype,
        pack=pack,
        trust_remote_code=trust_remote_code,
        self_test=self_test,
        progress=progress,
    )
    loaded = make(model)
    small = None
    if kind is not None and kind.needs_draft:
        small = make(draft, is_draft=True)
    elif draft is not None:
        logger.warning("the draft model %s is not loaded: drafter is %r; use drafter='model' for it", draft, name)
    made = kind.make(loaded, small) if kind is not None else drafter
    assert made is None or not isinstance(made, str)
    length: int | Controller = 0
    if made is not None:
        length = (
            int(num_speculative_tokens)
            if num_speculative_tokens != AUTO
            else _controller(loaded, small, max_rows=max_batch, progress=progress)
        )
    return LocalEngine(
        loaded.target, made, tokenizer=loaded.tokenizer, num_speculative_tokens=length, max_batch=max_batch
    )


def _controller(loaded: Loaded, draft: Loaded | None, *, max_rows: int, progress: Progress | None) -> Controller:
    cost = cost_curve(loaded, max_rows=max_rows, progress=progress)
    drafting = cost_curve(draft, max_rows=max_rows, is_draft=True, progress=progress) if draft is not None else None
    return Controller(cost, drafting)


def cost_curve(
    loaded: Loaded, *, max_rows: int = 1, is_draft: bool = False, progress: Progress | None = None
) -> CostCurve:
    """Seconds of a model's forwards on this machine, measured once and kept in the cache folder."""
    widths = costs.DRAFT_WIDTHS if is_draft else costs.WIDTHS if max_rows == 1 else costs.BATCHED_WIDTHS
    if progress is not None:
        progress(f"measuring what a step of {loaded.name} costs (kept for the next time)")
    return costs.measured(loaded.target, loaded.identity, cache_folder() / "costs", max_rows=max_rows, widths=widths)


def choose_drafter(drafter: str | Drafter | None, *, has_draft: bool) -> tuple[DrafterKind | None, str]:
    """The row of DRAFTERS (None for a Drafter object) and the drafter's name.

    Raises:
        OptionError: an unknown name, or a draft model needed and not given.
    """
    if drafter is None:
        drafter = "model" if has_draft else "ngram"
    if not isinstance(drafter, str):
        if not callable(getattr(drafter, "propose", None)):
            raise OptionError(f"drafter is {drafter!r}; it must be one of {', '.join(DRAFTERS)} or a flashspec.Drafter")
        return None, drafter.name
    if drafter not in DRAFTERS:
        raise OptionError(f"drafter is {drafter!r}; it must be one of {', '.join(DRAFTERS)}")
    if DRAFTERS[drafter].needs_draft and not has_draft:
        raise OptionError(f"drafter {drafter!r} needs a draft model; name one with --draft, or use --drafter ngram")
    return DRAFTERS[drafter], drafter


def load_model(
    model: str | os.PathLike[str] | None,
    *,
    device: str | None = None,
    dtype: str | None = None,
    pack: bool = True,
    trust_remote_code: bool = False,
    self_test: bool = False,
    is_draft: bool = False,
    progress: Progress | None = None,
) -> Loaded:
    """A model with its tokenizer. See ``load``."""
    say = progress or (lambda line: None)
    name = EMBEDDED_NAME if model is None else str(model)
    place = _device(device)
    precision = dtype_of(dtype, place)
    source = source_of(model, say)
    say(f"loading {name}")
    network, tokenizer = _pretrained(name, source, place, precision, trust_remote_code)
    from flashspec.backends import half, hf  # Transformers takes seconds to import; errors above should not wait for it

    hf.check_runnable(network)
    layers: dict[str, int] = {}
    if place.type == "cpu" and pack and network.dtype is torch.float32:
        say(f"packing {name}'s linear layers")
        # a draft model scores a token at a time, which oneDNN's layout does not help
        limits = {"at_least": sys.maxsize} if is_draft else {}
        layers = hf.pack_linears(network, kernel=half.compiled(cache_folder() / "kernels"), **limits)
        logger.info("%s: linear layers in %s", name, layers)
    hf.use_grouped_attention(network)
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
        **machine(),
    }
    return Loaded(name, target, tokenizer, identity)


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
    return _pretrained(name, source_of(model, say), place, precision, trust_remote_code)[0]


def check_vocabularies(target: Loaded, draft: Loaded) -> None:
    """Raise VocabularyError unless both tokenizers mean the same by the same id; padded sizes may differ."""
    mine, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    different = sorted(mine.items() ^ theirs.items(), key=lambda pair: pair[1])
    if different:
        token, at = different[0]
        raise VocabularyError(
            f"{draft.name} has another vocabulary than {target.name}: {len(mine)} and {len(theirs)} tokens, the first "
            f"difference is id {at} ({token!r}); use a draft model of the same family, or --drafter ngram"
        )


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
    import psutil
    from safetensors import safe_open

    numbers = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            numbers += sum(_numel(tensors.get_slice(key).get_shape()) for key in tensors.keys())  # noqa: SIM118
    needed, free = numbers * dtype.itemsize, psutil.virtual_memory().available
    if needed > free:
        raise MemoryLimitError(
            f"{name} needs {needed / 2**30:.1f} GiB for its weights in {dtype}, and {free / 2**30:.1f} GiB are free; "
            "use a smaller model or free some memory"
        )


def _numel(shape: list[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
