"""Names to objects: the one place where a string is turned into an engine or a drafter."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from flashspec import costs
from flashspec.choice import HeadsController, HybridController, QuickController
from flashspec.controller import AUTO, Controller
from flashspec.core import Drafter, Sequence, Target
from flashspec.costs import CostCurve
from flashspec.drafters.eagle import EagleDrafter
from flashspec.drafters.growth import checked_width
from flashspec.drafters.hybrid import HybridDrafter
from flashspec.drafters.medusa import MedusaDrafter
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.ngram import NGramDrafter
from flashspec.drafters.suffix import PastOutputs, SuffixDrafter
from flashspec.drafters.translated import TranslatedDrafter
from flashspec.engine import READ_SECONDS, AnyController, LocalEngine
from flashspec.errors import MemoryLimitError, OptionError, VocabularyError
from flashspec.heads.eagle import EagleHead
from flashspec.heads.kind import kind_of
from flashspec.heads.medusa import MedusaHeads
from flashspec.pretrained import Loaded, free_memory, load_model
from flashspec.scheduler import check_draft_length
from flashspec.trained import Heads, load_heads
from flashspec.weights import Progress, cache_folder

logger = logging.getLogger("flashspec")
AUTO_SHARE = 0.6  # of free memory, for keys and values
GROWING = 2  # a cache and the larger one that it is copied into
FEWEST_CELLS = 512

READ = {
    "model": "a draft model",
    "medusa": "a folder of Medusa heads",
    "eagle3": "a folder with an EAGLE-3 head",
    "any": "a draft model or a folder of heads",
}


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """How a drafter is made."""

    make: Callable[[Loaded, Any], Drafter | None]  # of the target and of what it reads
    reads: Literal["nothing", "model", "medusa", "eagle3", "any"] = "nothing"  # what --draft has to be
    drafts_trees: bool = False  # of a width that can be chosen
    controller: Callable[[CostCurve, CostCurve | None], AnyController] = Controller

    @property
    def needs_draft(self) -> bool:
        return self.reads != "nothing"


def _same_vocabulary(target: Loaded, draft: Loaded | None) -> Drafter:
    assert draft is not None
    check_vocabularies(target, draft)
    return ModelDrafter(draft.target, vocab_size=target.target.vocab_size)


def _translated(target: Loaded, draft: Loaded | None) -> TranslatedDrafter:
    assert draft is not None
    return TranslatedDrafter(
        draft.target,
        tokenizer=draft.tokenizer,
        served_tokenizer=target.tokenizer,
        vocab_size=target.target.vocab_size,
        eos_tokens=target.target.eos_tokens,
    )


def _medusa(target: Loaded, heads: Heads) -> MedusaDrafter:
    assert isinstance(heads.network, MedusaHeads)
    return MedusaDrafter(heads.network)


def _eagle(target: Loaded, heads: Heads) -> EagleDrafter:
    assert isinstance(heads.network, EagleHead)
    return EagleDrafter(heads.network, max_length=heads.max_length)


def draft_model(target: Loaded, draft: Loaded | None) -> Drafter:
    """A draft model's drafter, whatever its tokenizer."""
    try:
        return _same_vocabulary(target, draft)
    except VocabularyError:
        return _translated(target, draft)


def guesser(target: Loaded, draft: Loaded | Heads) -> Drafter:
    """The drafter of what ``--draft`` named, whatever that is."""
    if isinstance(draft, Loaded):
        return draft_model(target, draft)
    return _medusa(target, draft) if draft.kind == "medusa" else _eagle(target, draft)


DRAFTERS: dict[str, DrafterKind] = {
    "none": DrafterKind(lambda target, draft: None),
    "ngram": DrafterKind(lambda target, draft: NGramDrafter(), controller=QuickController),
    "suffix": DrafterKind(lambda target, draft: SuffixDrafter(), controller=QuickController),
    "model": DrafterKind(_same_vocabulary, reads="model", drafts_trees=True),
    "translated": DrafterKind(_translated, reads="model"),
    "hybrid": DrafterKind(
        lambda target, draft: HybridDrafter(SuffixDrafter(), guesser(target, draft)),
        reads="any",
        drafts_trees=True,
        controller=HybridController,
    ),
    "medusa": DrafterKind(_medusa, reads="medusa", drafts_trees=True, controller=HeadsController),
    "eagle3": DrafterKind(_eagle, reads="eagle3", drafts_trees=True),
}


def load(
    model: str | os.PathLike[str] | None = None,
    *,
    draft: str | os.PathLike[str] | None = None,
    drafter: str | Drafter | None = AUTO,
    num_speculative_tokens: int | str = AUTO,
    backend: str = "auto",
    draft_backend: str = "auto",
    draft_dtype: str | None = None,
    draft_vocab: int | None = None,
    draft_width: int | None = None,
    threads: int | None = None,
    gpu_layers: int = 0,
    device: str | None = None,
    dtype: str | None = None,
    pack: bool = True,
    max_batch: int = 16,
    max_length: int | None = None,
    cache_memory: int | str | None = None,
    prefix_memory: int = 0,
    past_outputs: int = 0,
    read_seconds: float = READ_SECONDS,
    self_test: bool = False,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> LocalEngine:
    """An engine for a model and a way to draft for it.

    Args:
        model: a hub name, a folder or a ``.gguf`` file; None for the embedded SmolLM2-135M-Instruct.
        draft: a small model, named likewise, whose tokenizer may be another; or a folder of Medusa or EAGLE-3 heads.
        drafter: ``"none"``, ``"ngram"``, ``"suffix"``, ``"model"``, ``"translated"``, ``"hybrid"``, ``"medusa"``,
            ``"eagle3"`` or a Drafter of your own; ``"auto"`` is ``"hybrid"`` where there is a ``draft`` that fits into
            memory, else ``"suffix"``.
        num_speculative_tokens: ``"auto"`` chooses the draft length at each step, 0 included, from measured costs (which
            takes seconds the first time) and running acceptance; a number is the longest draft.
        backend: ``"torch"``, or ``"llamacpp"`` for a ``.gguf``; ``"auto"`` is torch.
        draft_backend: likewise; ``"auto"`` runs a ``.gguf`` with llama.cpp where that is installed.
        draft_dtype: a draft model's own dtype, ``"int8"`` or ``"int4"`` on a CPU too; None for int8 on a CPU, else as
            ``dtype``.
        draft_vocab: a draft model guesses so many of the most frequent tokens only.
        draft_width: guesses that a draft model or heads try at each place: 1 drafts chains, more draft trees; None for
            what was found to pay.
        threads: of llama.cpp; None for torch's number.
        gpu_layers: layers that llama.cpp keeps on a GPU, -1 for all.
        device: ``"cpu"``, ``"cuda"``, ...; None for CUDA where there is one.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``; None for float32 on a CPU, else the model's own.
        pack: replace linear layers by ones that cost less for a few tokens (CPU, float32; the same numbers).
        max_batch: sequences that run at once.
        max_length: positions of a sequence, if less than the model has.
        cache_memory: bytes for the keys and values of running sequences, a draft model's included; ``"auto"`` for a
            share of what is free once the models are loaded; None for no limit. Where they run short the newest
            sequences wait.
        prefix_memory: bytes for keys and values of finished sequences, from which others that begin alike start.
        past_outputs: tokens of finished requests' outputs that suffix drafts may come from, about 300 bytes each.
        read_seconds: how long running sequences may be held up by a step that reads prompts.
        self_test: compare rolled-back logits with plain forwards before the first request.
        trust_remote_code: run model code that comes with the weights.
        progress: called with a line of text at each stage.

    Raises:
        FlashSpecError: with what was wrong, the limit and the next step.
    """
    kind, name = choose_drafter(drafter, draft=draft)
    check_draft_length(num_speculative_tokens, or_auto=True)
    make = partial(
        load_model,
        device=device,
        pack=pack,
        threads=threads,
        gpu_layers=gpu_layers,
        trust_remote_code=trust_remote_code,
        self_test=self_test,
        progress=progress,
    )
    loaded = make(model, dtype=dtype, backend=backend)
    small: Loaded | Heads | None = None
    is_auto = drafter in (None, AUTO)
    if kind is not None and kind.needs_draft:
        assert draft is not None
        try:
            heads = heads_read(kind, draft)
            if heads is None:
                small = make(draft, is_draft=True, dtype=draft_dtype or dtype, backend=draft_backend, vocab=draft_vocab)
            else:
                small = load_heads(draft, heads, loaded, dtype=draft_dtype, pack=pack, progress=progress)
        except MemoryLimitError as error:
            if not is_auto:
                raise
            logger.warning("drafting from the text alone: %s", error)
            kind, name = choose_drafter(AUTO)
    elif draft is not None:
        logger.warning("%s is not loaded: drafter is %r; leave that out for one that reads it", draft, name)
    made = shaped(kind.make(loaded, small), draft_width) if kind is not None else drafter
    assert made is None or not isinstance(made, str)
    if kind is not None:
        remember_outputs(made, past_outputs)
    length: int | AnyController = 0
    if made is not None and num_speculative_tokens == AUTO:
        like = kind or DRAFTERS.get(name, DRAFTERS["none"])  # a user's own may be one of ours, with other options
        length = _controller(like, loaded, made, small, max_rows=max_batch, progress=progress)
    elif made is not None:
        length = int(num_speculative_tokens)
    engine = LocalEngine(
        loaded.target,
        made,
        tokenizer=loaded.tokenizer,
        num_speculative_tokens=length,
        max_batch=max_batch,
        max_length=max_length,
        max_cells=max_cells(loaded, small, cache_memory),
        prefix_bytes=prefix_memory,
        read_seconds=read_seconds,
    )
    engine.why = reason_for(name, made, small) if is_auto else f"drafter {name}, as asked"
    logger.info("%s", engine.why)
    return engine


def remember_outputs(drafter: Drafter | None, max_tokens: int) -> None:
    """Let suffix drafts come from other requests' outputs, too."""
    drafter = getattr(drafter, "quick", drafter)
    if max_tokens and isinstance(drafter, SuffixDrafter):
        drafter.namespace, drafter.past_outputs = "all requests", PastOutputs(max_tokens=max_tokens)


def max_cells(target: Loaded, draft: Loaded | Heads | None, memory: int | str | None) -> int | None:
    """Tokens whose keys and values fit into ``memory``, while a cache that grows is copied into a larger one.

    Raises:
        OptionError: not enough for anything.
    """
    if memory is None:
        return None
    models = [target.target] + ([draft.target] if isinstance(draft, Loaded) else [])
    size = memory if isinstance(memory, int) else int(AUTO_SHARE * free_memory(device_of(target.target)))
    cells = size // (GROWING * sum(map(bytes_per_token, models)))
    if cells < FEWEST_CELLS:
        raise OptionError(
            f"{size / 2**20:.0f} MiB for keys and values are enough for {cells} tokens, and {FEWEST_CELLS} are the "
            "least; raise --cache-memory or use a smaller model"
        )
    return cells


def device_of(target: Target) -> torch.device:
    """Where its keys and values are."""
    return getattr(getattr(target, "model", None), "device", torch.device("cpu"))


def bytes_per_token(target: Target) -> int:
    """Of a model's keys and values, as it keeps them."""
    seq = Sequence("size", [0] * 17, 17)
    try:
        target.read(seq, 16)
        return max(target.save(seq, 16)[1] // 16, 1)
    finally:
        target.forget(seq)


def _controller(
    kind: DrafterKind,
    loaded: Loaded,
    drafter: Drafter,
    draft: Loaded | Heads | None,
    *,
    max_rows: int,
    progress: Progress | None,
) -> AnyController:
    cost = cost_curve(loaded, max_rows=max_rows, progress=progress)
    return kind.controller(cost, draft_curve(drafter, draft, max_rows=max_rows, progress=progress))


def draft_curve(
    drafter: Drafter | None, draft: Loaded | Heads | None, *, max_rows: int = 1, progress: Progress | None = None
) -> CostCurve | None:
    """Seconds of a draft model's or of heads' forwards; None where there are none."""
    drafter = getattr(drafter, "slow", drafter)
    if isinstance(drafter, MedusaDrafter | EagleDrafter):
        return costs.of_calls(drafter.dry_run, costs.DRAFT_WIDTHS if isinstance(drafter, EagleDrafter) else (1, 8))
    if isinstance(draft, Loaded):
        return cost_curve(draft, max_rows=max_rows, is_draft=True, progress=progress)
    return None


def cost_curve(
    loaded: Loaded, *, max_rows: int = 1, is_draft: bool = False, progress: Progress | None = None
) -> CostCurve:
    """Seconds of a model's forwards on this machine, measured once and kept in the cache folder."""
    widths = costs.DRAFT_WIDTHS if is_draft else costs.WIDTHS if max_rows == 1 else costs.BATCHED_WIDTHS

    def begin() -> None:
        if progress is not None:
            progress(f"measuring what a step of {loaded.name} costs (kept for the next time)")

    folder = cache_folder() / "costs"
    return costs.measured(loaded.target, loaded.identity, folder, max_rows=max_rows, widths=widths, begin=begin)


def choose_drafter(
    drafter: str | Drafter | None, *, draft: str | os.PathLike[str] | None = None
) -> tuple[DrafterKind | None, str]:
    """The row of DRAFTERS (None for a Drafter object) and the drafter's name.

    Args:
        draft: a draft model or a folder of heads, as the user named it.

    Raises:
        OptionError: an unknown name, or a drafter that needs another ``draft``.
    """
    if drafter is None or (isinstance(drafter, str) and drafter == AUTO):
        drafter = "suffix" if draft is None else "hybrid"
    if not isinstance(drafter, str):
        if not callable(getattr(drafter, "propose", None)):
            raise OptionError(
                f"drafter is {drafter!r}; it must be auto, one of {', '.join(DRAFTERS)} or a flashspec.Drafter"
            )
        return None, drafter.name
    if drafter not in DRAFTERS:
        raise OptionError(f"drafter is {drafter!r}; it must be auto or one of {', '.join(DRAFTERS)}")
    kind = DRAFTERS[drafter]
    if kind.needs_draft and draft is None:
        raise OptionError(
            f"drafter {drafter!r} needs {READ[kind.reads]}; name it with --draft, or use --drafter suffix"
        )
    if kind.needs_draft and draft is not None and not fits(kind, draft):
        raise OptionError(
            f"drafter {drafter!r} needs {READ[kind.reads]}, and {str(draft)!r} is {READ[kind_of(draft) or 'model']}; "
            "leave out --drafter, or name another with --draft"
        )
    return kind, drafter


def shaped(drafter: Drafter | None, width: int | None) -> Drafter | None:
    """The drafter, told how wide its trees are to be.

    Raises:
        OptionError: a width out of range, or a drafter whose width cannot be chosen.
    """
    if width is None:
        return drafter
    if isinstance(drafter, HybridDrafter):
        shaped(drafter.slow, width)
        return drafter
    if not hasattr(drafter, "width") or isinstance(drafter, TranslatedDrafter):
        trees = ", ".join(name for name, kind in DRAFTERS.items() if kind.drafts_trees)
        raise OptionError(f"draft_width is {width}, and this drafter has none to choose; leave it out, or use {trees}")
    drafter.width = checked_width(width)  # type: ignore[union-attr]
    return drafter


def fits(kind: DrafterKind, draft: str | os.PathLike[str]) -> bool:
    """Whether a drafter reads what the user named; what lies on a hub may be anything."""
    found = kind_of(draft)
    return kind.reads in ("any", found or "model") or (found is None and not Path(draft).exists())


def heads_read(kind: DrafterKind, draft: str | os.PathLike[str]) -> str | None:
    """The kind of heads that a drafter reads there; None for a model."""
    if kind.reads in ("medusa", "eagle3"):
        return kind.reads
    return kind_of(draft) if kind.reads == "any" else None


def reason_for(name: str, drafter: Drafter | None, draft: Loaded | Heads | None) -> str:
    """What ``auto`` chose and why, in a line."""
    if draft is None:
        return f"drafter {name}: no draft model was given, so guesses come from the text itself"
    slow = getattr(drafter, "slow", drafter)
    how = f"{draft.name} through its own tokenizer" if isinstance(slow, TranslatedDrafter) else draft.name
    if isinstance(draft, Heads):
        runtime = {"medusa": "Medusa heads", "eagle3": "an EAGLE-3 head"}[draft.kind]
    else:
        runtime = "llama.cpp" if "llama.cpp" in draft.identity else "torch"
    return f"drafter {name}: guesses from the text where it repeats itself, from {how} ({runtime}) where it does not"


def check_vocabularies(target: Loaded, draft: Loaded) -> None:
    """Raise VocabularyError unless both tokenizers mean the same by the same id; padded sizes may differ."""
    mine, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    different = sorted(mine.items() ^ theirs.items(), key=lambda pair: pair[1])
    if different:
        token, at = different[0]
        raise VocabularyError(
            f"{draft.name} has another vocabulary than {target.name}: {len(mine)} and {len(theirs)} tokens, the first "
            f"difference is id {at} ({token!r}); use --drafter hybrid or translated, which read it through its own "
            "tokenizer, or a draft model of the same family"
        )
