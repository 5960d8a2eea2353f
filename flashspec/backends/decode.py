"""What surrounds a decode step's large products, by a kernel: attention of few queries, norms, gates, rotations.

A small model's step, or a batch's, spends a third of its time there: a library's attention reads every row up to the
longest one's length, and its short operators cost more to call than to compute. The kernel (decode.c) is compiled once
with the system's C compiler; without one, Transformers' and torch's operators do the same.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence as Seq
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashspec.backends.half import compiled_library

logger = logging.getLogger("flashspec")

SOURCE = Path(__file__).with_name("decode.c")
LANES = 8  # numbers in a vector
MOST_QUERIES = 32  # of the heads that share one key/value head
MOST_WIDTH = 256  # of a head

_Strides = ctypes.c_int64 * 11


class DecodeKernels:
    """float32 on a CPU, without gradients. Who calls checks with ``can_*`` first."""

    def __init__(self, library: ctypes.CDLL) -> None:
        address, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
        self._attention = _function(library.attention, [address] * 7 + [size] * 6 + [number])
        self._rms_norm = _function(library.rms_norm, [address] * 3 + [size] * 2 + [number])
        self._gated = _function(library.gated, [address] * 2 + [size] * 2)
        self._rotate = _function(library.rotate, [address] * 3 + [size] * 9)

    def can_attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> bool:
        heads, d = query.shape[1], query.shape[3]
        return (
            heads // key.shape[1] <= MOST_QUERIES
            and d <= MOST_WIDTH
            and mask.shape[-1] >= key.shape[2]
            and all(_is_plain(x, d) for x in (query, key, value))
            and _is_plain(mask, LANES)
        )

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, starts: Seq[int] | None = None
    ) -> Tensor:
        """[rows, m, heads, d] from query [rows, heads, m, d], key and value [rows, kv_heads, width, d].

        Args:
            mask: additive, [rows, 1, m, width]; each query sees at least one key.
            starts: [rows + 1], where each row's tokens begin if all of them follow each other in one row: query is
                [1, heads, starts[-1], d] then, and mask and result likewise.
        """
        rows, kv_heads, width = key.shape[:3]
        _, heads, m, d = query.shape
        output = query.new_empty(query.shape[0], m, heads, d)
        mask = mask.expand(query.shape[0], 1, m, -1)
        strides = _Strides(
            *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], mask.stride(0), mask.stride(2)
        )  # fmt: skip
        self._attention(
            query.data_ptr(), key.data_ptr(), value.data_ptr(), mask.data_ptr(), output.data_ptr(), strides,
            None if starts is None else (ctypes.c_int64 * len(starts))(*starts),
            rows, kv_heads, heads // kv_heads, m, d, width, scale,
        )  # fmt: skip
        return output

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x * rsqrt(mean(x^2) + eps) * weight over the last dimension, x [..., d] without gaps."""
        y = torch.empty_like(x)
        d = x.shape[-1]
        self._rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), x.numel() // d, d, eps)
        return y

    def gated(self, x: Tensor) -> Tensor:
        """silu(gate) * up [..., d] of x [..., 2 d] without gaps, which holds one after the other."""
        d = x.shape[-1] // 2
        y = x.new_empty(*x.shape[:-1], d)
        self._gated(x.data_ptr(), y.data_ptr(), y.numel() // d, d)
        return y

    def rotate(self, x: Tensor, rotated: int, cos: Tensor, sin: Tensor) -> None:
        """Rotary positions for the first ``rotated`` heads of x [rows, m, heads, d], in place; as ``lean.rotate``.

        Args:
            cos, sin: [rows or 1, m, d], the last dimension without gaps.
        """
        rows, m, heads, d = x.shape
        cos, sin = cos.expand(rows, m, d), sin.expand(rows, m, d)
        self._rotate(
            x.data_ptr(), cos.data_ptr(), sin.data_ptr(), *cos.stride()[:2], *sin.stride()[:2],
            rows, m, heads, rotated, d,
        )  # fmt: skip


def _function(function: Any, arguments: list[Any]) -> Callable[..., None]:
    function.argtypes, function.restype = arguments, None
    found: Callable[..., None] = function
    return found


def _is_plain(x: Tensor, width: int) -> bool:
    """float32 in memory, the last dimension without gaps and whole vectors in ``width``."""
    return x.dtype is torch.float32 and x.device.type == "cpu" and x.stride(-1) == 1 and width % LANES == 0


def usable(*tensors: Tensor) -> bool:
    """Whether the norm and gate kernels may run on these: whole vectors, no gaps, nobody asks for gradients."""
    return not torch.is_grad_enabled() and all(x.is_contiguous() and _is_plain(x, x.shape[-1]) for x in tensors)


@cache  # it starts the compiler to ask its version, and checks the kernel's numbers
def compiled(folder: Path) -> DecodeKernels | None:
    """The kernels, from ``folder`` if they were compiled for this machine before; None where they cannot be had."""
    library = compiled_library(SOURCE, folder)
    if library is None:
        logger.info("attention, norms and gates are torch's, which takes longer")
        return None
    kernels = DecodeKernels(library)
    return kernels if _are_right(kernels) else None


@torch.inference_mode()
def _are_right(kernels: DecodeKernels) -> bool:
    """One small case of each against torch's, so that a miscompiled kernel is never used."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query, key, value, weight = random(2, 4, 3, 16), random(2, 2, 70, 16), random(2, 2, 70, 16), random(16)
    mask = torch.zeros(2, 1, 3, 70).masked_fill(random(2, 1, 3, 70) > 0, torch.finfo(torch.float32).min)
    mask[:, :, :, 0] = 0
    functional = nn.functional
    attended = functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 1), value.repeat_interleave(2, 1), attn_mask=mask, scale=0.3
    )
    gate, up = value.chunk(2, -1)
    pairs = [
        (kernels.attention(query, key, value, mask, 0.3), attended.transpose(1, 2)),
        (kernels.rms_norm(key, weight, 1e-5), functional.rms_norm(key, (16,), weight, 1e-5)),
        (kernels.gated(value), functional.silu(gate) * up),
    ]
    if all(torch.allclose(found, expected, atol=1e-4) for found, expected in pairs):
        return True
    logger.warning("the compiled decode kernels compute wrong numbers on this machine and are not used")
    return False
