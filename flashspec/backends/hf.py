"""Transformers models as Targets: one forward over ragged rows, rolled back by length.

It knows Transformers' calling conventions and which layers can be rolled back. It does not know sampling,
tokenizers or drafts' origins.
"""

from __future__ import annotations

import inspect
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence as Seq
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from flashspec.backends.decode import DecodeKernels
from flashspec.backends.half import HalfLinear, Kernel, halved
from flashspec.cache import Feed, SlotCache, additive_mask
from flashspec.core import EMPTY, Draft, Score, Sequence, check_positions
from flashspec.errors import MemoryLimitError, UnsupportedModelError
from flashspec.tree import paths

logger = logging.getLogger("flashspec")

# a name with "flash" in it makes Transformers look for a FlashAttention build
GROUPED_ATTENTION, KERNEL_ATTENTION = "grouped_sdpa", "grouped_kernel"
PREFILL_CHUNK = 512  # tokens of a prompt in one forward
LONG = 32  # a row with more unseen tokens than this runs alone where rows are padded
PACK_BYTES = 4 << 20  # from here on oneDNN's layout is faster on every machine that was tried (docs/log.md)
ASK_BYTES = 256 << 10  # from here on it depends on the machine
TRIED_BYTES = 64 << 20  # of weights, so that they come from memory and not from a cache
PACK_ROWS = 16  # the number of rows oneDNN lays the weight out for; any other number still runs
OWN_KEYS = 3  # times as many keys as new tokens: in a causal mask half of them are seen, which the kernel skips
GROUPED_ROWS = 64  # up to so many queries, grouped-query attention packs a group's heads into query rows


class HFTarget:
    """A decoder-only Transformers model.

    Args:
        model: in eval mode, on its device, in its dtype.

    Raises:
        UnsupportedModelError: a layer that cannot be rolled back.
    """

    has_hidden = True
    supports_trees = True

    def __init__(self, model: PreTrainedModel) -> None:
        windows = layer_windows(model.config)
        config = model.config.get_text_config(decoder=True)
        self.model = model
        self.vocab_size: int = config.vocab_size
        self.max_length: int = _positions(config)
        self.num_layers = len(windows)
        self.eos_tokens = eos_tokens(model)
        self.forward_seconds = 0.0
        self._windows = dict(zip(_layer_types(config, windows), windows, strict=True))
        parameters = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._can_skip_logits = "logits_to_keep" in parameters
        self.packs_rows = model.config._attn_implementation == KERNEL_ATTENTION  # a row pays for its own tokens only
        is_cuda = model.device.type == "cuda"
        self._cache = SlotCache(num_layers=len(windows), max_length=self.max_length, rounding=64 if is_cuda else 1)
        self._seqs: list[Sequence] = []  # row -> sequence, by identity: engines may share a model and not their ids
        self._bases: dict[Sequence, int] = {}  # tokens in the cache before the draft of the last score
        self._unread: dict[Sequence, list[Tensor]] = {}  # features of tokens taken in by ``read``

    # the Target protocol

    @torch.inference_mode()
    def score(
        self,
        seqs: Seq[Sequence],
        drafts: Seq[Draft],
        *,
        hidden: bool = False,
        features: Seq[int] = (),
        piece: tuple[Sequence, int] | None = None,
    ) -> list[Score]:
        """See ``core.Target``. One ragged forward, but for long prompts, which run alone and in chunks.

        Args:
            piece: a sequence that is not among these, and so many of its tokens, to be read beside them.

        Raises:
            PromptError: tokens and draft exceed the model's positions.
            MemoryLimitError: no memory for the keys and values.
        """
        feeds = [self._feed(seq, draft) for seq, draft in zip(seqs, drafts, strict=True)]
        found: dict[int, Score] = {}
        if piece is not None:
            feeds.append(self._piece(*piece))
        for group in self._groups(feeds):
            for index, score in zip(group, self._forward([feeds[i] for i in group], hidden, features), strict=True):
                found[index] = score
        if piece is not None and (inner := found[len(seqs)].features) is not None:
            self._unread.setdefault(piece[0], []).append(inner)
        for index, seq in enumerate(seqs):
            self._bases[seq] = self._cache.lengths[feeds[index].row]
        return [self._with_read(seq, found[index]) for index, seq in enumerate(seqs)]

    def _groups(self, feeds: list[Feed]) -> list[list[int]]:
        """Which feeds share a forward, rows ascending. Padding costs more than another forward beside a prompt."""
        room = PREFILL_CHUNK if self.packs_rows else 0
        together, alone = [], []
        for index in sorted(range(len(feeds)), key=lambda index: feeds[index].row):
            count = len(feeds[index].unseen)
            if count <= LONG or count <= room:
                together.append(index)
                room -= count if count > LONG else 0
            else:
                alone.append([index])
        return [together] * bool(together) + alone

    def _with_read(self, seq: Sequence, score: Score) -> Score:
        """The score with the features of what was read before."""
        if (parts := self._unread.pop(seq, None)) is None or score.features is None:
            return score
        return Score(score.logits, score.hidden, torch.cat([*parts, score.features]))

    def keep(self, seq: Sequence, accepted: Seq[int]) -> None:
        self._cache.keep(self._row(seq), self._bases[seq], accepted)

    def rewind(self, seq: Sequence, length: int) -> None:
        if seq in self._seqs:
            row = self._row(seq)
            self._cache.lengths[row] = min(self._cache.lengths[row], length)

    def forget(self, seq: Sequence) -> None:
        if seq not in self._seqs:
            return
        row = self._row(seq)
        if self._cache.close_row(row) is not None:
            self._seqs[row] = self._seqs[-1]
        self._seqs.pop()
        self._bases.pop(seq, None)
        self._unread.pop(seq, None)

    def cached_length(self, seq: Sequence) -> int:
        return self._cache.lengths[self._row(seq)] if seq in self._seqs else 0

    @torch.inference_mode()
    def read(self, seq: Sequence, count: int, *, features: Seq[int] = ()) -> None:
        feed = self._piece(seq, count)
        for start in range(0, len(feed), PREFILL_CHUNK):
            piece = feed.unseen[start : start + PREFILL_CHUNK]
            inner = self._run([Feed(feed.row, piece, EMPTY)], wanted=1, hidden=False, features=features)[2]
            if inner is not None:
                self._unread.setdefault(seq, []).append(inner[0])
            self._cache.lengths[feed.row] += len(piece)

    def save(self, seq: Sequence, length: int) -> tuple[list[Tensor], int]:
        try:
            state = self._cache.save(self._row(seq), length)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            raise MemoryLimitError(f"no memory to keep the keys and values of {length} tokens") from error
        return state, sum(part.nbytes for part in state)

    def restore(self, seq: Sequence, state: list[Tensor], length: int) -> None:
        self.forget(seq)
        row = self._cache.open_row()
        self._seqs.append(seq)
        try:
            self._cache.restore(row, state, length)
        except MemoryLimitError:
            self.forget(seq)
            raise
        self._bases[seq] = length

    @property
    def expected_rows(self) -> int:
        """Sequences that are known to run together, however they come."""
        return self._cache.expected_rows

    @expected_rows.setter
    def expected_rows(self, rows: int) -> None:
        self._cache.expected_rows = rows

    @property
    def max_cells(self) -> int | None:
        """Rows times positions from which on the cache takes no spare room; None for no such limit."""
        return self._cache.max_cells

    @max_cells.setter
    def max_cells(self, cells: int | None) -> None:
        self._cache.max_cells = cells

    @torch.inference_mode()
    def plain_logits(self, tokens: list[int]) -> Tensor:
        """Logits [vocab] after ``tokens`` by a forward without any cache: the reference for all the others."""
        output = self.model(input_ids=torch.tensor([tokens], device=self.model.device), use_cache=False)
        logits: Tensor = output.logits[0, -1, : self.vocab_size]
        return logits.float()

    @torch.inference_mode()
    def hidden_states(self, texts: Seq[list[int]], layers: Seq[int]) -> list[Tensor]:
        """Of whole texts, by a forward without a cache: what goes into layers ``layers``, [tokens, layers * d] each.

        The number of layers itself stands for what the output embedding reads.
        """
        longest = max(map(len, texts))
        ids = [text + [0] * (longest - len(text)) for text in texts]
        mask = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
        device = self.model.device
        output = self.model.base_model(
            input_ids=torch.tensor(ids, device=device), attention_mask=torch.tensor(mask, device=device),
            output_hidden_states=list(layers), use_cache=False,
        )  # fmt: skip
        states = torch.cat([output.hidden_states[layer] for layer in layers], -1).float()
        return [states[row, : len(text)] for row, text in enumerate(texts)]

    # forwards

    def _row(self, seq: Sequence) -> int:
        return self._seqs.index(seq)

    def _feed(self, seq: Sequence, draft: Draft) -> Feed:
        check_positions(seq, draft, limit=self.max_length)
        if seq not in self._seqs:
            self._cache.open_row()
            self._seqs.append(seq)
        row = self._row(seq)
        # scoring the same context again is allowed: the row of logits after it needs its last token fed
        self._cache.lengths[row] = min(self._cache.lengths[row], len(seq) - 1)
        return Feed(row, seq.tokens[self._cache.lengths[row] :], draft)

    def _piece(self, seq: Sequence, count: int) -> Feed:
        """The next so many tokens without a draft; the last one is left for the score that wants its logits."""
        rest = self._feed(seq, EMPTY)
        return Feed(rest.row, rest.unseen[: min(count, len(rest.unseen) - 1)], EMPTY)

    def _forward(self, feeds: list[Feed], hidden: bool, features: Seq[int]) -> list[Score]:
        read: list[Tensor] = []  # features of the chunks before
        if len(feeds) == 1:
            feeds = [self._prefill(feeds[0], features, read)]
        wanted = [1 + len(feed.draft) for feed in feeds]
        sizes = [len(feed) for feed in feeds]
        packed = self.packs_rows and len(set(sizes)) > 1
        places = _last_places(sizes, wanted) if packed else max(wanted)
        output = self._run(feeds, wanted=places, hidden=hidden, features=features)
        logits, states, inner = (
            None if part is None else _by_row(part, counts, packed=packed)
            for part, counts in zip(output, (wanted, wanted, sizes), strict=True)
        )
        assert logits is not None
        scores = []
        for index, feed in enumerate(feeds):
            found = torch.cat([*read, inner[index]]) if inner is not None else None
            scores.append(Score(logits[index], None if states is None else states[index], found))
            self._cache.lengths[feed.row] += len(feed.unseen)
        return scores

    def _prefill(self, feed: Feed, features: Seq[int], read: list[Tensor]) -> Feed:
        """Run all but the last chunk of a long prompt, adding its features to ``read``; what is left to feed."""
        unseen = feed.unseen
        while len(unseen) > PREFILL_CHUNK:
            chunk = Feed(feed.row, unseen[:PREFILL_CHUNK], EMPTY)
            inner = self._run([chunk], wanted=1, hidden=False, features=features)[2]
            read += [] if inner is None else [inner[0]]
            self._cache.lengths[feed.row] += PREFILL_CHUNK
            unseen = unseen[PREFILL_CHUNK:]
        return Feed(feed.row, unseen, feed.draft)

    def _run(
        self, feeds: list[Feed], *, wanted: int | list[int], hidden: bool, features: Seq[int] = ()
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Logits [rows, wanted, vocab] float32, hidden states [rows, wanted, d], features [rows, m, layers * d].

        Args:
            wanted: the last so many places of each row; or a list of places, then the rows are packed into one.
        """
        device, dtype = self.model.device, self.model.dtype
        packed = not isinstance(wanted, int)
        prepared = self._cache.prepare(feeds, device=device, packed=packed)
        masks = {kind: additive_mask(prepared, window=window, dtype=dtype) for kind, window in self._windows.items()}
        places = torch.tensor(wanted, device=device) if packed else slice(-wanted, None)  # type: ignore[operator]
        arguments: dict[str, Any] = {
            "input_ids": prepared["input_ids"],
            "position_ids": prepared["position_ids"],
            "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
            self._cache_name: self._cache,
            "use_cache": True,
            "output_hidden_states": [*features, *[self.num_layers] * hidden] or False,
        }
        if self._can_skip_logits:
            arguments["logits_to_keep"] = places if packed else wanted
        started = time.perf_counter()
        _packing.starts = [0, *accumulate(map(len, feeds))] if packed else None
        try:
            output = self.model(**arguments)
        except torch.OutOfMemoryError as error:
            raise MemoryLimitError(
                f"no memory left for a forward of {len(feeds)} sequences; run fewer at once, draft fewer tokens, "
                "shorten the context or use half precision"
            ) from error
        finally:
            _packing.starts = None
        if device.type == "cuda":  # or the time shows up where the result is first read
            torch.cuda.synchronize(device)
        self.forward_seconds += time.perf_counter() - started
        states = output.hidden_states[self.num_layers][:, places].float() if hidden else None
        inner = torch.cat([output.hidden_states[i] for i in features], -1) if features else None
        logits = output.logits if packed and self._can_skip_logits else output.logits[:, places]
        return logits[..., : self.vocab_size].float(), states, inner


def _last_places(sizes: Seq[int], counts: Seq[int]) -> list[int]:
    """Of each row the last so many, where the rows are packed into one."""
    ends = zip(accumulate(sizes), counts, strict=True)
    return [place for end, count in ends for place in range(end - count, end)]


def _by_row(part: Tensor, counts: Seq[int], *, packed: bool) -> list[Tensor]:
    """Each row's own of [rows, m, ...], which are its last so many, or of packed [1, T, ...]."""
    if packed:
        return list(torch.split(part[0], list(counts)))
    return [row[-count:] for row, count in zip(part, counts, strict=True)]


# which models


def _positions(config: PreTrainedConfig) -> int:
    """Positions up to which a key depends on nothing but its token's position."""
    limit = getattr(config, "max_position_embeddings", None) or 2**20
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        limit = min(limit, rope.get("original_max_position_embeddings") or limit)
    return int(limit)


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Each layer's sliding window in tokens, None for full attention.

    Raises:
        UnsupportedModelError: not a decoder, or a layer whose cache cannot be rolled back by length.
    """
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder; flashspec drives decoder-only models")
    try:
        layers = DynamicCache(config=config).layers
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{name} has layers that Transformers has no key/value cache for ({error})"
        ) from error
    windows: list[int | None] = []
    for layer in layers:
        if _kind(config, len(windows)) == "chunked_attention":
            raise UnsupportedModelError(
                f"{name} has layers of type chunked_attention, whose mask flashspec does not know"
            )
        if type(layer) is DynamicLayer:
            windows.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            windows.append(int(layer.sliding_window))
        else:
            raise UnsupportedModelError(
                f"{name} has layers of type {_kind(config, len(windows))} ({type(layer).__name__}), whose state cannot "
                "be rolled back after a rejected draft; use a model with full or sliding-window attention only"
            )
    if not windows:
        raise UnsupportedModelError(f"{name} has no attention layers with a key/value cache to roll back")
    return windows


def _kind(config: PreTrainedConfig, layer: int) -> str:
    kinds = getattr(config.get_text_config(decoder=True), "layer_types", None) or ["recurrent"]
    return str(kinds[min(layer, len(kinds) - 1)])


def _layer_types(config: PreTrainedConfig, windows: Iterable[int | None]) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["sliding_attention" if window else "full_attention" for window in windows]


def check_runnable(model: PreTrainedModel) -> None:
    """Raise UnsupportedModelError for what only the loaded model shows."""
    if getattr(model, "_is_stateful", False):
        raise UnsupportedModelError(
            f"{model.config.model_type} keeps a recurrent state, which cannot be rolled back after a rejected draft"
        )
    kind = getattr(model.generation_config, "cache_implementation", None)
    if kind == "quantized":
        raise UnsupportedModelError(
            "the model's generation config asks for a quantized cache, which re-quantises its history and so would "
            "change with rejected drafts; remove cache_implementation from generation_config.json"
        )


def eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    """All ids that end a sequence: the generation config's, as for Transformers' generate, else the model's own."""
    for config in (model.generation_config, model.config.get_text_config(decoder=True)):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return frozenset({ids} if isinstance(ids, int) else ids)
    return frozenset()


# speed on a CPU


class PackedLinear(nn.Module):
    """A linear layer whose weight lies in oneDNN's blocked layout, laid out once.

    Plain ``nn.Linear`` in float32 costs three times as much for 4 rows as for 1; this costs 1.5 times.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACK_ROWS)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y


def pack_linears(
    model: nn.Module,
    *,
    kernel: Kernel | None = None,
    at_least: int = PACK_BYTES,
    pays: Callable[[int, int], bool] | None = None,
) -> dict[str, int]:
    """Replace the model's float32 linear layers on a CPU by ones that cost less for a few rows.

    Args:
        kernel: for weights that bfloat16 holds exactly; None if there is none.
        at_least: bytes of weight from which any other layer is packed for oneDNN.
        pays: whether packing a smaller one of [out, in] is worth it on this machine (``packing_pays``).

    Returns:
        how many layers of each kind there are now.
    """
    counts = {"bfloat16": 0, "oneDNN": 0}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            weight = linear_weight(child)
            if weight is None:
                continue
            bias = getattr(child, "bias", None)
            if kernel is not None and (half := halved(weight)) is not None:
                setattr(parent, name, HalfLinear(half, bias, kernel))
                counts["bfloat16"] += 1
            elif (weight.nbytes >= at_least or _is_paying(weight, pays)) and _can_pack():
                setattr(parent, name, PackedLinear(weight, bias))
                counts["oneDNN"] += 1
    return counts


def _is_paying(weight: Tensor, pays: Callable[[int, int], bool] | None) -> bool:
    return pays is not None and weight.nbytes >= ASK_BYTES and _can_pack() and pays(*weight.shape)


@torch.inference_mode()
def packing_pays(out: int, into: int, *, repeats: int = 5) -> bool:
    """Whether a weight [out, into] in oneDNN's layout is read faster here, over one row and over four."""
    plain = [torch.ones(out, into) for _ in range(max(TRIED_BYTES // (4 * out * into), 2))]
    packed = [PackedLinear(weight, None) for weight in plain]
    seconds: dict[tuple[bool, int], list[float]] = {
        (is_packed, rows): [] for is_packed in (False, True) for rows in (1, 4)
    }
    for _ in range(repeats + 1):
        for (is_packed, rows), seen in seconds.items():
            x = torch.ones(rows, into)
            started = time.perf_counter()
            for weight, layer in zip(plain, packed, strict=True):
                layer(x) if is_packed else nn.functional.linear(x, weight)
            seen.append(time.perf_counter() - started)
    medians = {key: statistics.median(seen[1:]) for key, seen in seconds.items()}
    return medians[True, 1] + medians[True, 4] < medians[False, 1] + medians[False, 4]


@cache  # so that it is said once
def _can_pack() -> bool:
    if all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return True
    logger.warning("this torch has no oneDNN linear operator: linear layers stay as they are, and drafts cost more")
    return False


def linear_weight(module: nn.Module) -> Tensor | None:
    """[out, in] of a plain float32 linear layer (GPT-2's Conv1D included), else None."""
    kind = type(module)
    weight: Tensor | None = getattr(module, "weight", None)
    if weight is None or weight.dtype is not torch.float32 or weight.device.type != "cpu":
        return None
    if kind is nn.Linear:
        return weight
    return weight.T if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.") else None


_packing = threading.local()  # starts: where each row's tokens begin in the packed forward that this thread is in


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    kernels: DecodeKernels | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' SDPA attention: by the kernel where that is faster, and without repeating keys for a few queries.

    In a packed forward query is [1, heads, T, d] and the mask [1, 1, T, width], keys and values as ever.
    """
    starts = getattr(_packing, "starts", None)
    simple = attention_mask is not None and attention_mask.dim() == 4 and attention_mask.shape[1] == 1
    simple = simple and kwargs.get("position_bias") is None and not kwargs.get("softcap")
    if simple and kernels is not None and not torch.is_grad_enabled():
        assert attention_mask is not None
        is_suited = starts is not None or _is_suited(*query.shape[1:3], *key.shape[1:3])
        if is_suited and kernels.can_attend(query, key, value, attention_mask):
            scale = kwargs.get("scaling") or query.shape[-1] ** -0.5
            return kernels.attention(query, key, value, attention_mask, scale, starts), None
    if starts is None:
        return _sdpa(module, query, key, value, attention_mask, simple=simple, **kwargs), None
    assert attention_mask is not None
    parts = []
    for row, (start, end) in enumerate(pairwise(starts)):
        own = key[row : row + 1], value[row : row + 1], attention_mask[:, :, start:end]
        parts.append(_sdpa(module, query[:, :, start:end], *own, simple=simple, **kwargs))
    return torch.cat(parts, 1), None


def _is_suited(heads: int, m: int, kv_heads: int, width: int) -> bool:
    """Whether the kernel is faster: not for many queries over a long cache, which is a product of large matrices."""
    return heads * m <= GROUPED_ROWS * kv_heads or width <= OWN_KEYS * m


def _sdpa(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, simple: bool, **kwargs: Any
) -> Tensor:
    """[rows, m, heads, d]. Where ``simple``, [rows, heads, m, d] becomes [rows, kv_heads, group * m, d].

    The heads of a group share their keys, so they may as well be more queries of one head.
    """
    rows, heads, m, width = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    if mask is None or group == 1 or m > GROUPED_ROWS or not simple:
        output: Tensor = sdpa_attention_forward(module, query, key, value, mask, **kwargs)[0]
        return output
    mask = mask.expand(rows, group, m, -1).reshape(rows, 1, group * m, -1)
    packed = query.reshape(rows, kv_heads, group * m, width)
    output = nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    return output.reshape(rows, heads, m, -1).transpose(1, 2).contiguous()


def use_grouped_attention(model: PreTrainedModel, kernels: DecodeKernels | None = None) -> None:
    """Switch a model that would use SDPA to ``grouped_attention``."""
    if model.config._attn_implementation == "sdpa":
        name = GROUPED_ATTENTION if kernels is None else KERNEL_ATTENTION
        AttentionInterface.register(name, partial(grouped_attention, kernels=kernels))
        AttentionMaskInterface.register(name, sdpa_mask)
        model.set_attn_implementation(name)


# self-test


@torch.inference_mode()
def self_test(target: HFTarget) -> float:
    """Prefill, score garbage drafts, roll back, go on, in a ragged batch; compare with plain forwards.

    Returns:
        the largest difference in logits, in units of their standard deviation.

    Raises:
        UnsupportedModelError: the difference is larger than rounding explains, or the model cannot be run this way.
    """
    family = target.model.config.model_type
    try:
        worst = _rolled_back_difference(target)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, NotImplementedError) as error:
        raise UnsupportedModelError(
            f"{family} failed the self-test: it does not take ragged rows, positions and an additive mask ({error})"
        ) from error
    limit = 1e-3 if target.model.dtype is torch.float32 else 0.15
    if not worst < limit:
        raise UnsupportedModelError(
            f"{family} failed the self-test: after a rollback its logits differ by {worst:.3g} standard deviations "
            f"from a plain forward (limit {limit}); its cache or positions work in a way flashspec does not know"
        )
    return worst


def _rolled_back_difference(target: HFTarget) -> float:
    generator = torch.Generator().manual_seed(0)
    size = min(40, target.max_length - 10)
    garbage = torch.randint(target.vocab_size, (6,), generator=generator).tolist()
    tree, chain = Draft(garbage, [-1, -1, 0, 0, 1, 3]), Draft.chain(garbage[:4])
    seqs = []
    for number, length in enumerate((size, size // 3)):
        tokens = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
        seqs.append(Sequence(f"self-test {number}", tokens, length))
    worst = 0.0
    try:
        target.score(seqs, [chain, tree])
        for seq in seqs:
            target.keep(seq, [])
            seq.tokens.append(garbage[-1])
        for drafts in ([chain, tree], [tree, EMPTY]):
            for seq, draft, score in zip(seqs, drafts, target.score(seqs, drafts), strict=True):
                target.keep(seq, [])
                for row, path in enumerate([[], *paths(draft.parents)]):
                    context = seq.tokens + [draft.tokens[node] for node in path]
                    worst = max(worst, _difference(score.logits[row], target.plain_logits(context)))
    finally:
        for seq in seqs:
            target.forget(seq)
    return worst


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.std())
