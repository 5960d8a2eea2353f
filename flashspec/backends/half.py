"""float32 linear layers whose weights are stored in bfloat16, where that loses nothing.

Most checkpoints are bfloat16. Computing with them in float32 on a CPU, one reads zeros half of the time; this reads the
halves that count. The kernel (half_linear.c) is compiled once with the system's C compiler; without one, layers stay
as they are.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

logger = logging.getLogger("flashspec")

SOURCE = Path(__file__).with_name("half_linear.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fPIC")
MOST_ROWS = 48  # more rows of input are bound by arithmetic, for which MKL is better
WIDENED_NUMBERS = 4 << 20  # weights widened at a time for MKL: what the caches hold

Kernel = Callable[..., None]


class HalfLinear(nn.Module):
    """y = x W^T + b in float32, W [out, in] in bfloat16."""

    weight: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, kernel: Kernel) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight, persistent=False)
        self.bias = bias
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        if rows > MOST_ROWS:
            return self._widened(x)
        y = x.new_empty(*x.shape[:-1], self.out_features)
        x = x.contiguous()
        scratch = torch.empty_like(x)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        self.kernel(
            x.data_ptr(), scratch.data_ptr(), self.weight.data_ptr(), bias, y.data_ptr(),
            rows, self.in_features, self.out_features,
        )  # fmt: skip
        return y

    def _widened(self, x: Tensor) -> Tensor:
        size = max(WIDENED_NUMBERS // self.in_features, 1)
        buffer = shared_buffer(size * self.in_features, threading.get_ident())
        product = library_product()
        parts = []
        for start in range(0, self.out_features, size):
            half = self.weight[start : start + size]
            wide = buffer[: half.numel()].view_as(half).copy_(half)
            parts.append(product(x, wide, None if self.bias is None else self.bias[start : start + size]))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


@lru_cache(maxsize=1)
@torch.inference_mode()
def library_product() -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """x W^T + b of many rows by MKL or by oneDNN, whichever is faster here: MKL holds back on others' processors."""
    by_mkl, by_dnn = nn.functional.linear, partial(_by_dnn, torch.ops.mkldnn)
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return by_mkl
    x, weight = torch.ones(128, 512), torch.ones(2048, 512)
    seconds: dict[Any, list[float]] = {by_mkl: [], by_dnn: []}
    for _ in range(7):
        for product, seen in seconds.items():
            started = time.perf_counter()
            product(x, weight, None)
            seen.append(time.perf_counter() - started)
    best: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    best = min(seconds, key=lambda product: statistics.median(seconds[product]))
    return best


def _by_dnn(operators: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = operators._linear_pointwise(x, weight, bias, "none", [], "")
    return y


@lru_cache(maxsize=64)
def shared_buffer(numbers: int, thread: int) -> Tensor:
    """[numbers] float32, one for each thread. Reused, because fresh memory is paid for page by page."""
    with torch.inference_mode(False):  # a tensor made in inference mode cannot be written to outside of it
        return torch.empty(numbers)


def halved(weight: Tensor) -> Tensor | None:
    """The float32 weight in bfloat16, or None if that would change it."""
    half = weight.detach().to(torch.bfloat16).contiguous()
    return half if torch.equal(half.float(), weight) else None


def compiled(folder: Path) -> Kernel | None:
    """The kernel, from ``folder`` if it was compiled for this machine before; None where it cannot be had."""
    library = compiled_library(SOURCE, folder)
    if library is None:
        logger.info("bfloat16 weights are widened to float32, which takes twice the memory")
        return None
    kernel: Kernel = library.half_linear
    kernel.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3  # type: ignore[attr-defined]
    kernel.restype = None  # type: ignore[attr-defined]
    return kernel if _is_right(kernel) else None


def compiled_library(source: Path, folder: Path) -> ctypes.CDLL | None:
    """A C file as a library, from ``folder`` if it was compiled here before; None where it cannot be had."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        logger.info("no C compiler here, so there is no %s", source.stem)
        return None
    try:
        library = folder / f"{source.stem}-{_fingerprint(compiler, source)}.so"
        if not library.is_file():
            _compile(compiler, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        logger.info("%s is not available (%s)", source.stem, error)
        return None


def _compile(compiler: str, source: Path, library: Path) -> None:
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        compiled_object, linked = f"{folder}/kernel.o", f"{folder}/kernel.so"
        run = partial(subprocess.run, check=True, capture_output=True, timeout=120)
        run([compiler, *FLAGS, "-fopenmp", "-c", str(source), "-o", compiled_object])
        # linked without -fopenmp: a second OpenMP runtime beside torch's would fight it for the cores
        run([compiler, "-shared", compiled_object, "-o", linked])
        os.replace(linked, library)


def _fingerprint(compiler: str, source: Path) -> str:
    """What the compiled code depends on: source, flags, compiler, processor."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=30).stdout
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        processor = "".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
    except OSError:
        processor = platform.processor()
    text = f"{source.read_text(encoding='utf-8')}{FLAGS}{version!r}{processor}{platform.machine()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_right(kernel: Kernel) -> bool:
    """One small product against torch's, so that a miscompiled kernel is never used."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 39, generator=generator).to(torch.bfloat16)
    x = torch.randn(5, 39, generator=generator)
    bias = torch.randn(7, generator=generator)
    found = HalfLinear(weight, bias, kernel)(x)
    if torch.allclose(found, nn.functional.linear(x, weight.float(), bias), atol=1e-4):
        return True
    logger.warning("the compiled bfloat16 kernel computes wrong numbers on this machine and is not used")
    return False
