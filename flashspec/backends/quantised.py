"""Cheaper draft models on a CPU: linear layers in 8 or 4 bits, and a head for frequent tokens only.

For draft models alone: what they compute changes a little, which costs accepted tokens and never a wrong one. The
kernel (quantised_linear.c) is compiled once with the system's C compiler.
"""

from __future__ import annotations

import ctypes
import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence as Seq
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flashspec.backends.half import MOST_ROWS, WIDENED_NUMBERS, HalfLinear, Kernel, compiled_library, shared_buffer
from flashspec.backends.hf import linear_weight
from flashspec.errors import OptionError

logger = logging.getLogger("flashspec")

SOURCE = Path(__file__).with_name("quantised_linear.c")
BITS = (8, 4)
GROUP = 32  # weights that share a scale; the kernel's number
BLOCK = 16  # groups whose offsets the kernel reads at a time
FEWEST = 256  # tokens of a cut head: every text can be spelled in single bytes


class QuantisedLinear(nn.Module):
    """y = x W^T + b in float32, W [out, in] in groups of 32 of one scale, as ``quantised`` makes them."""

    codes: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int, kernel: Kernel) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits = bits
        parts = [
            quantised(part, bits) for part in torch.split(weight.detach(), max(WIDENED_NUMBERS // self.in_features, 1))
        ]
        codes, scales, offsets = zip(*parts, strict=True)
        self.register_buffer("codes", torch.cat(codes), persistent=False)
        self.register_buffer("scales", torch.cat(scales), persistent=False)
        self.offsets = torch.cat(offsets) if bits == 4 else None
        self.bias = bias
        self.kernel = kernel
        self.groups = self.scales.shape[1]
        # for each row: its scale, its groups' sums, and its entries in 16 bits
        self._scratch = 1 + -(-self.groups // BLOCK) * BLOCK + self.groups * GROUP // 2

    def forward(self, x: Tensor) -> Tensor:
        rows = x.numel() // self.in_features
        y = x.new_empty(*x.shape[:-1], self.out_features)
        if rows > MOST_ROWS:
            return self._widened(x, y)
        x = x.contiguous()
        scratch = x.new_empty(rows * self._scratch)
        self.kernel(
            x.data_ptr(), scratch.data_ptr(), self.codes.data_ptr(), self.scales.data_ptr(), _address(self.offsets),
            _address(self.bias), y.data_ptr(), rows, self.in_features, self.out_features, self.groups, self.bits,
        )  # fmt: skip
        return y

    def widened(self, start: int, end: int) -> Tensor:
        """Rows of the weight in float32, [end - start, in]; overwritten by the next call in the same thread."""
        width = self.groups * GROUP
        wide = shared_buffer(max(WIDENED_NUMBERS // width, 1) * width, threading.get_ident())[: (end - start) * width]
        wide = wide.view(end - start, self.groups, GROUP)
        codes, scales = self.codes[start:end], self.scales[start:end, :, None]
        if self.offsets is None:
            wide.copy_(codes.view_as(wide)).mul_(scales)
        else:
            packed = codes.view(end - start, self.groups, GROUP // 2)
            wide[..., : GROUP // 2] = packed & 15
            wide[..., GROUP // 2 :] = (packed >> 4) & 15
            wide.mul_(scales).add_(self.offsets[start:end, : self.groups, None])
        return wide.view(end - start, width)[:, : self.in_features]

    def _widened(self, x: Tensor, y: Tensor) -> Tensor:
        size = max(WIDENED_NUMBERS // (self.groups * GROUP), 1)
        for start in range(0, self.out_features, size):
            end = min(start + size, self.out_features)
            bias = None if self.bias is None else self.bias[start:end]
            y[..., start:end] = nn.functional.linear(x, self.widened(start, end), bias)
        return y


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def quantised(weight: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [out, bytes] int8, scales [out, groups] and offsets [out, 16 * ceil(groups / 16)] bfloat16.

    w = scale * code in 8 bits, scale * code + offset in 4: sixteen levels are too few to waste some on a symmetric
    range. Scales are rounded before codes are chosen, so that their rounding costs nothing.
    """
    out, size = weight.shape
    groups = num_groups(size)
    w = nn.functional.pad(weight, (0, groups * GROUP - size)).view(out, groups, GROUP)
    lowest, highest = w.amin(2), w.amax(2)
    offsets = torch.zeros(out, -(-groups // BLOCK) * BLOCK, dtype=torch.bfloat16)
    if bits == 8:
        scales = _scales(torch.maximum(-lowest, highest) / 127)
        codes = (w / scales[..., None].float()).round_().clamp_(-127, 127).to(torch.int8)
        return codes.view(out, -1), scales, offsets
    offsets[:, :groups] = lowest
    shifted = w - offsets[:, :groups, None].float()
    scales = _scales(shifted.amax(2).clamp(min=0) / 15)
    codes = (shifted / scales[..., None].float()).round_().clamp_(0, 15).to(torch.int8)
    return (codes[..., : GROUP // 2] | codes[..., GROUP // 2 :] << 4).view(out, -1), scales, offsets


def num_groups(size: int) -> int:
    """Groups of a row of ``size`` weights: the kernel takes them in pairs."""
    return 2 * -(-size // (2 * GROUP))


def _scales(wanted: Tensor) -> Tensor:
    """In bfloat16; 1 for groups of zeros."""
    scales = wanted.bfloat16()
    return scales.masked_fill_(scales == 0, 1)


def quantise_linears(model: nn.Module, bits: int, *, kernel: Kernel | None = None) -> dict[str, int]:
    """Replace a draft model's float32 linear layers, in place, by ones of 8 or 4 bits.

    In 4 bits the output embedding keeps 8: it alone decides between close tokens, and loses the most.

    Args:
        kernel: of ``compiled``; None to compile one now, which takes a second or two.

    Returns:
        how many layers of each kind there are now.

    Raises:
        OptionError: other bits, no kernel, or no layer to replace.
    """
    if bits not in BITS:
        raise OptionError(f"a draft model is quantised to 8 or 4 bits, not {bits!r}; use 8")
    kernel = kernel or _compiled_now()
    if kernel is None:
        raise OptionError(
            f"{bits}-bit draft models need a C compiler, and there is none here that works; install one (cc, or name "
            "it in CC), or leave the draft model as it is"
        )
    counts: dict[str, int] = {}
    find_head = getattr(model, "get_output_embeddings", lambda: None)
    head = find_head()
    heads = set() if head is None else set(head.modules())
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if (weight := linear_weight(child)) is not None:
                used = 8 if child in heads else bits
                setattr(parent, name, QuantisedLinear(weight, getattr(child, "bias", None), used, kernel))
                counts[f"int{used}"] = counts.get(f"int{used}", 0) + 1
    if not counts:
        raise OptionError(_nothing_to_quantise(model, bits))
    return counts


def _nothing_to_quantise(model: nn.Module, bits: int) -> str:
    found = sorted({f"{p.dtype} on {p.device.type}".removeprefix("torch.") for p in model.parameters()})
    return (
        f"there is no kernel for a {bits}-bit draft model here: it takes plain linear layers in float32 on cpu, and "
        f"this model has {', '.join(found) or 'none'}; load it on the CPU in float32, without packing"
    )


# the kernel


def compiled(folder: Path) -> Kernel | None:
    """The kernel, from ``folder`` if it was compiled for this machine before; None where it cannot be had."""
    library = compiled_library(SOURCE, folder)
    if library is None:
        return None
    kernel: Kernel = library.quantised_linear
    kernel.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int64] * 5  # type: ignore[attr-defined]
    kernel.restype = None  # type: ignore[attr-defined]
    return kernel if _is_right(kernel) else None


def _compiled_now() -> Kernel | None:
    with tempfile.TemporaryDirectory() as folder:  # a library that is loaded needs its file no longer
        return compiled(Path(folder))


@torch.no_grad()
def _is_right(kernel: Kernel) -> bool:
    """Small products against torch's with the same weights, so that a miscompiled kernel is never used."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(7, 139, generator=generator), torch.randn(5, 139, generator=generator)
    bias = torch.randn(7, generator=generator)
    for bits in BITS:
        layer = QuantisedLinear(weight, bias, bits, kernel)
        if not torch.allclose(layer(x), nn.functional.linear(x, layer.widened(0, 7), bias), atol=5e-3):
            logger.warning("the compiled kernel for quantised draft models computes wrong numbers and is not used")
            return False
    return True


@torch.no_grad()
def fast_bits(kernel: Kernel | None, half_kernel: Kernel | None) -> tuple[int, ...]:
    """The bits whose kernel beats the bfloat16 one (plain float32 where there is none) for one token, measured here.

    Takes 0.2 s, on eight million weights: a large layer of a small model.
    """
    if kernel is None:
        return ()
    weight = torch.full((8192, 1024), 0.5)
    plain = (
        HalfLinear(weight.bfloat16(), None, half_kernel)
        if half_kernel
        else partial(nn.functional.linear, weight=weight)
    )
    layers = {bits: QuantisedLinear(weight, None, bits, kernel) for bits in BITS}
    x = torch.ones(1, 1024)
    best = dict.fromkeys([0, *BITS], float("inf"))
    for _ in range(5):
        for bits, layer in ({0: plain} | layers).items():
            best[bits] = min(best[bits], _seconds(partial(layer, x)))
    return tuple(bits for bits in BITS if best[bits] < best[0])


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


# a smaller head (FR-Spec, arXiv 2502.14856)


class CutHead(nn.Module):
    """Logits [.., vocab] of an output embedding of which only the rows of some tokens are kept; -inf elsewhere."""

    ids: Tensor

    def __init__(self, kept: nn.Linear, ids: Tensor, vocab_size: int) -> None:
        super().__init__()
        self.kept = kept
        self.vocab_size = vocab_size
        self.register_buffer("ids", ids, persistent=False)
        # frequent tokens are the first ones and a few at the end: a copy of the first is far cheaper than a scatter
        self.num_first = int((ids == torch.arange(len(ids), device=ids.device)).sum())

    def forward(self, x: Tensor) -> Tensor:
        found = self.kept(x)
        logits: Tensor = found.new_full((*found.shape[:-1], self.vocab_size), float("-inf"))
        logits[..., : self.num_first] = found[..., : self.num_first]
        logits[..., self.ids[self.num_first :]] = found[..., self.num_first :]
        return logits


def cut_head(model: Any, keep: Seq[int] | Tensor) -> None:
    """Let a draft model guess the tokens ``keep`` only: its output embedding is replaced, in place, by a CutHead.

    Its q is 0 elsewhere, so that verification stays exact. A tied input embedding stays whole. Before
    ``quantise_linears`` or ``pack_linears``, which then replace the smaller layer. A model that soft-caps its logits
    (Gemma 2) makes -cap of -inf, which is exact as well.

    Raises:
        OptionError: ``keep`` is empty, repeats a token or names one the model lacks; or the output embedding is no
            plain linear layer.
    """
    head = model.get_output_embeddings()
    parents = [(parent, name) for parent in model.modules() for name, child in parent.named_children() if child is head]
    if type(head) is not nn.Linear or not parents:
        raise OptionError(
            f"the head of {type(model).__name__} is {type(head).__name__}, and only a plain linear layer can be cut; "
            "cut it before layers are packed or quantised, and once"
        )
    ids = _checked_ids(keep, head.out_features).to(head.weight.device)
    kept = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
    kept.weight = nn.Parameter(head.weight.detach()[ids], requires_grad=False)
    if head.bias is not None:
        kept.bias = nn.Parameter(head.bias.detach()[ids], requires_grad=False)
    for parent, name in parents:
        setattr(parent, name, CutHead(kept, ids, head.out_features))


def _checked_ids(keep: Seq[int] | Tensor, vocab_size: int) -> Tensor:
    ids = torch.as_tensor(keep, dtype=torch.long).sort().values
    if not len(ids):
        raise OptionError("a cut head keeps no token; keep at least one")
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise OptionError(f"a cut head keeps token {int(outside[0])}; the model's are 0 to {vocab_size - 1}")
    repeated = ids[1:][ids[1:] == ids[:-1]]
    if len(repeated):
        raise OptionError(f"a cut head keeps token {int(repeated[0])} twice; name each once")
    return ids


def frequent_tokens(tokenizer: Any, count: int, vocab_size: int) -> list[int]:
    """The ``count`` tokens to keep in a cut head, in order; more where bytes and special tokens alone are more.

    Ids of a BPE vocabulary are in the order of merging, the most frequent pair first, so the lowest are kept. Single
    bytes and special tokens are kept wherever they stand; so are SentencePiece's single characters, which it puts last.

    Args:
        vocab_size: the model's, in tokens; tokenizers and models may differ in padding.

    Raises:
        OptionError: ``count`` outside 256 to ``vocab_size``.
    """
    if not FEWEST <= count <= vocab_size:
        raise OptionError(f"a cut head of {count} tokens; keep from {FEWEST} (all bytes) to {vocab_size} (all tokens)")
    always = {token for text, token in tokenizer.get_vocab().items() if _is_byte(text)}
    always |= {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    always = {token for token in always if 0 <= token < vocab_size}
    lowest = (token for token in range(vocab_size) if token not in always)
    return sorted([*always, *(token for token, _ in zip(lowest, range(count - len(always)), strict=False))])


def _is_byte(text: str) -> bool:
    """One byte: a character of GPT-2's byte alphabet (below U+0144) or Latin-1, a SentencePiece space or <0x0A>."""
    if len(text) == 1:
        return ord(text) < 0x144 or text == "\u2581"
    return re.fullmatch("<0x[0-9A-F]{2}>", text) is not None
