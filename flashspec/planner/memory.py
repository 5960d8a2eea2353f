"""Does it fit: weights, keys and values, and what is needed for a moment, counted from configs alone.

It builds models whose tensors have shapes and no data; it loads no weights and computes nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHORTEST = 256  # tokens of a context that are worth having


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """What a model takes: bytes, and numbers of ``itemsize`` bytes."""

    weights: int  # bytes, once loaded
    loading: int  # bytes while it loads; a CPU's linear layers are stored in fewer, or packed, only afterwards
    scratch: int  # bytes of the buffers that bfloat16 layers are widened into
    itemsize: int  # of what it computes in
    numbers: int  # parameters, tied ones once
    cache_numbers: int  # keys and values of a token, all layers
    repeated_numbers: int  # keys and values of a token that a long forward repeats for grouped queries, one layer
    token_numbers: int  # intermediate results for each token of a forward, one layer
    mask_bytes: int  # for each pair of a query and a key
    masking_bytes: int  # likewise, only while the masks are made
    has_all_logits: bool  # the model cannot skip the logits of a prompt
    heads: int  # of attention
    kv_heads: int
    max_length: int
    vocab_size: int

    def in_half(self) -> ModelSize:
        """The same model in a dtype of two bytes."""
        return replace(self, weights=2 * self.numbers, loading=2 * self.numbers, scratch=0, itemsize=2)

    def half_as_large(self) -> ModelSize:
        """A model of the same vocabulary that is half as large in every way."""
        names = ("weights", "loading", "scratch", "numbers", "cache_numbers", "repeated_numbers", "token_numbers")
        return replace(self, **{name: getattr(self, name) // 2 for name in names})


def model_size(
    config: Any,
    *,
    dtype: torch.dtype,
    packs: bool = False,
    halves: bool = False,
    is_draft: bool = False,
    is_int8: bool = False,
    trust_remote_code: bool = False,
) -> ModelSize:
    """Counted on a model of this Transformers config whose tensors have shapes and no data.

    Args:
        dtype: to compute in.
        packs: the loader will replace linear layers (``backends.hf.pack_linears``; CPU, float32).
        halves: the checkpoint is bfloat16 and there is a kernel, so that they are stored in bfloat16.
        is_draft: they are not packed for oneDNN.
        is_int8: a draft model's are stored in int8 (``backends.quantised``).

    Raises:
        UnsupportedModelError: layers that cannot be rolled back.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from flashspec.backends import hf

    windows, text = hf.layer_windows(config), config.get_text_config(decoder=True)
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    replaced = _replaced(network, all_linears=halves or is_int8, is_draft=is_draft) if packs else set()
    loaded = {id(tensor): tensor.nbytes for module in network.modules() for tensor in _own(module)}  # tied ones once
    kept = {id(tensor) for module in network.modules() for tensor in _own(module, is_replaced=module in replaced)}
    return ModelSize(
        weights=sum(loaded[tensor] for tensor in kept) + sum(_stored(m, halves, is_int8) for m in replaced),
        loading=sum(loaded.values()),
        scratch=_scratch(replaced) if halves or is_int8 else 0,
        itemsize=dtype.itemsize,
        numbers=sum(parameter.numel() for parameter in network.parameters()),
        mask_bytes=1 + len(set(windows)) * dtype.itemsize,  # what is visible, and a mask for each kind of layer
        masking_bytes=10 if any(windows) else 1,  # distances, what is within the window, what is not visible
        has_all_logits="logits_to_keep" not in inspect.signature(network.forward).parameters,
        max_length=hf._positions(text),
        vocab_size=text.vocab_size,
        **_shapes(text, num_layers=len(windows)),
    )


def _stored(linear: Any, halves: bool, is_int8: bool) -> int:
    """Bytes of a linear layer's weight once it is replaced."""
    from flashspec.backends.quantised import GROUP, num_groups

    if not is_int8:
        return int(linear.weight.numel()) * (2 if halves else 4)
    width = int(getattr(linear, "in_features", linear.weight.shape[0]))
    return int(linear.weight.numel()) // width * num_groups(width) * (GROUP + 2)  # a code each, a scale in two bytes


def _replaced(network: Any, *, all_linears: bool, is_draft: bool) -> set[Any]:
    """The modules that ``pack_linears`` will replace. What is tied to one of them stays, beside its new weight."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from flashspec.backends.hf import PACK_BYTES

    linears = {module for module in network.modules() if type(module) in (nn.Linear, Conv1D)}
    if all_linears or is_draft:
        return linears if all_linears else set()
    return {module for module in linears if module.weight.nbytes >= PACK_BYTES}


def _own(module: Any, *, is_replaced: bool = False) -> list[torch.Tensor]:
    """A module's own parameters and buffers, without a weight that will be replaced."""
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [tensor for name, tensor in named if not (is_replaced and name == "weight")]


def _scratch(linears: set[Any]) -> int:
    """Bytes of ``half.HalfLinear``'s buffers, one for each size; Conv1D holds its weight transposed."""
    from flashspec.backends.half import WIDENED_NUMBERS

    widths = {int(getattr(linear, "in_features", linear.weight.shape[0])) for linear in linears}
    return 4 * sum({max(WIDENED_NUMBERS // width, 1) * width for width in widths})


def _shapes(config: Any, *, num_layers: int) -> dict[str, int]:
    """Heads and widths; configs with other names for them, such as GPT-2's, answer to these as well."""
    heads, hidden = config.num_attention_heads, config.hidden_size
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    keys = values = getattr(config, "head_dim", None) or hidden // heads
    if getattr(config, "kv_lora_rank", None):  # latent attention is cached expanded
        keys, values = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    wide = getattr(config, "intermediate_size", None) or 4 * hidden
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "cache_numbers": num_layers * kv_heads * (keys + values),
        "repeated_numbers": heads * (keys + values) if kv_heads < heads else 0,
        # the residual and what is added to it; then the MLP's, of which an activation written out makes several, or
        # attention's queries and keys before and after rotation, values and output
        "token_numbers": 3 * hidden + max(5 * wide, 3 * heads * keys + 2 * kv_heads * (keys + values)),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Models, and how they will be used."""

    target: ModelSize
    draft: ModelSize | None = None
    batch: int = 1  # sequences that run at once, added together
    context: int = 2048  # tokens of each at its end, prompt and output
    max_tokens: int = 256  # of them, output
    num_speculative_tokens: int = 4
    device: str = "cpu"

    @property
    def prompt(self) -> int:
        return max(self.context - self.max_tokens, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Bytes on the device."""

    weights: int
    draft_weights: int
    kv_cache: int
    draft_kv_cache: int
    workspace: int  # for a moment, at most: a prompt's activations, a step's logits, or a cache while it grows
    loading: int  # at the worst moment of loading, when there is no cache yet
    available: int | None = None  # None: not known

    @property
    def total(self) -> int:
        """While it runs."""
        return self.weights + self.draft_weights + self.kv_cache + self.draft_kv_cache + self.workspace

    @property
    def needed(self) -> int:
        return max(self.total, self.loading)

    @property
    def fits(self) -> bool:
        return self.available is None or self.needed <= self.available


def memory_plan(setup: Setup, *, available: int | None = None) -> MemoryPlan:
    """What a setup takes, all sequences at their longest."""
    target, draft = setup.target, setup.draft
    kv_cache, growing = _cache(target, setup)
    draft_kv_cache, draft_growing = _cache(draft, setup) if draft is not None else (0, 0)
    models = [target] if draft is None else [target, draft]
    reading = max(_reading(model, setup) for model in models)
    return MemoryPlan(
        weights=target.weights,
        draft_weights=draft.weights if draft is not None else 0,
        kv_cache=kv_cache,
        draft_kv_cache=draft_kv_cache,
        workspace=sum(model.scratch for model in models) + max(growing, draft_growing, reading, _decoding(setup)),
        loading=max(target.loading, target.weights + draft.loading if draft is not None else 0),
        available=available,
    )


def _cache(model: ModelSize, setup: Setup) -> tuple[int, int]:
    """Bytes of a SlotCache at the end, and of the smaller one that it replaced last, which it is copied from.

    Capacity grows in buckets and by halves; every layer has every slot, sliding window or not.
    """
    import torch

    from flashspec.backends.hf import PREFILL_CHUNK
    from flashspec.cache import Feed, SlotCache
    from flashspec.core import EMPTY

    cache = SlotCache(num_layers=1, max_length=model.max_length, rounding=1 if setup.device == "cpu" else 64)
    for _ in range(setup.batch):
        cache.open_row()
    sizes = [0, 0]

    def grow(width: int) -> None:
        cache.lengths[0] = width - 1
        cache.prepare([Feed(0, [0], EMPTY)], device=torch.device("meta"))
        if cache.capacity + 1 != sizes[-1]:
            sizes.append(cache.capacity + 1)

    last = max(min(setup.context, model.max_length) - 1, 1)  # the last token is never fed
    prompt = min(setup.prompt, last)
    for width in (*range(PREFILL_CHUNK, prompt, PREFILL_CHUNK), prompt):
        grow(width)
    while cache.capacity < last:  # the output, token by token
        grow(cache.capacity + 1)
    slot = setup.batch * model.cache_numbers * model.itemsize
    return sizes[-1] * slot, sizes[-2] * slot


def _reading(model: ModelSize, setup: Setup) -> int:
    """Bytes of the forward over a prompt's last chunk: one layer's results at a time, and the logits."""
    from flashspec.backends.hf import GROUPED_ROWS, PREFILL_CHUNK

    tokens = min(setup.prompt, PREFILL_CHUNK)
    repeated = setup.prompt * model.repeated_numbers if tokens > GROUPED_ROWS else 0
    logits = 4 * model.vocab_size * (tokens if model.has_all_logits else 1)
    inside = (tokens * model.token_numbers + repeated) * model.itemsize + logits
    pairs = tokens * setup.prompt
    return pairs * model.mask_bytes + max(inside, pairs * model.masking_bytes)


def _decoding(setup: Setup) -> int:
    """Bytes of a step: logits [rows, k + 1, vocab] in float32, p of one row after the other, q of all of them."""
    model, k = setup.target, setup.num_speculative_tokens
    tokens = setup.batch * (k + 1)
    logits = tokens * (4 + (model.itemsize if model.itemsize < 4 else 0)) + 3 * 4 * (k + 1)
    q = 4 * setup.batch * k if setup.draft is not None else 0
    inside = tokens * (model.token_numbers * model.itemsize + setup.context * model.mask_bytes)
    return inside + (logits + q) * model.vocab_size


@dataclass(frozen=True, slots=True)
class WayOut:
    """A change that saves memory; later ones come on top of it."""

    change: str
    saved: int  # bytes of what is needed
    needed: int  # bytes, with this change and those before it
    fits: bool


def ways_out(setup: Setup, *, available: int, can_halve: bool = True) -> list[WayOut]:
    """What saves memory, in the order in which to try it, without what would save nothing here.

    Args:
        available: bytes.
        can_halve: the device computes in half precision.
    """
    found: list[WayOut] = []
    before = memory_plan(setup, available=available)
    for change, smaller in _changes(setup, available=available, can_halve=can_halve):
        plan = memory_plan(smaller, available=available)
        if plan.needed < before.needed:
            found.append(WayOut(change, before.needed - plan.needed, plan.needed, plan.fits))
        before = plan
    if setup.draft is not None and setup.device != "cpu" and found:  # the draft model leaves the device either way
        found.append(replace(found[-1], change="instead of that, the draft model on the CPU, at a loss of speed"))
    return found


def _changes(setup: Setup, *, available: int, can_halve: bool) -> Iterator[tuple[str, Setup]]:
    """Each change, and the setup after it and all before it."""
    if (context := _shorter(setup, available=available)) < setup.context:
        setup = replace(setup, context=context, max_tokens=min(setup.max_tokens, context // 2))
        yield f"a context of {context} tokens", setup
    if setup.draft is not None:
        setup = replace(setup, draft=setup.draft.half_as_large())
        yield "a draft model half as large", setup
    if setup.num_speculative_tokens > 1:
        setup = replace(setup, num_speculative_tokens=setup.num_speculative_tokens // 2)
        yield f"up to {setup.num_speculative_tokens} speculative tokens", setup
    if can_halve and setup.target.itemsize > 2:
        draft = setup.draft.in_half() if setup.draft is not None else None
        setup = replace(setup, target=setup.target.in_half(), draft=draft)
        yield "half precision", setup
    if setup.draft is not None:
        yield "n-grams instead of a draft model", replace(setup, draft=None)


def _shorter(setup: Setup, *, available: int) -> int:
    """Half of the context, or a quarter if half does not fit; never below SHORTEST."""
    half, quarter = (max(setup.context // part, min(SHORTEST, setup.context)) for part in (2, 4))
    return half if memory_plan(replace(setup, context=half), available=available).fits else quarter
