"""Heads for a loaded target: read, checked against it, made cheap on a CPU.

It knows heads' folders and loaded models; how heads draft is in ``drafters``.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flashspec.errors import OptionError
from flashspec.heads.eagle import EagleHead
from flashspec.heads.files import Facts, read_eagle, read_medusa
from flashspec.heads.medusa import MedusaHeads
from flashspec.pretrained import BITS, DTYPES, Loaded, quantising_kernel, readable_errors, rounds_to_int8
from flashspec.weights import Progress, cache_folder

logger = logging.getLogger("flashspec")


@dataclass(frozen=True, slots=True)
class Heads:
    """Heads that fit a target."""

    name: str
    kind: str  # "medusa" or "eagle3"
    network: MedusaHeads | EagleHead
    facts: Facts
    max_length: int  # positions of the target


def load_heads(
    folder: str | os.PathLike[str],
    kind: str,
    loaded: Loaded,
    *,
    dtype: str | None = None,
    pack: bool = True,
    progress: Progress | None = None,
) -> Heads:
    """Read heads for a target.

    Args:
        folder: or the name of a hub's repository.
        kind: ``"medusa"`` or ``"eagle3"``.
        dtype: of their weights, ``"int8"`` and ``"int4"`` too on a CPU; None for int8 on a CPU, else the target's.

    Raises:
        OptionError: the target shows no hidden states, or a dtype that does not go with the device.
        ModelError: what the folder holds is broken, or was made for another model.
    """
    if progress is not None:
        progress(f"loading heads from {folder}")
    target = loaded.target
    if not target.has_hidden:
        raise OptionError(
            f"heads read the model's hidden states, which {type(target).__name__} does not show; leave out --backend "
            "llamacpp"
        )
    config = target.model.config.get_text_config(decoder=True)
    name, folder = str(folder), _local(folder)
    network: MedusaHeads | EagleHead
    if kind == "medusa":
        network, facts = read_medusa(folder, hidden_size=config.hidden_size, vocab_size=target.vocab_size)
    else:
        embedding = target.model.get_input_embeddings().weight.detach()
        network, facts = read_eagle(
            folder, hidden_size=config.hidden_size, vocab_size=target.vocab_size,
            num_layers=config.num_hidden_layers, input_embedding=embedding,
        )  # fmt: skip
        _share_embedding(network, embedding)
    _warn(name, facts, loaded)
    _place(network.eval().requires_grad_(False), target.model.device, target.model.dtype, dtype, pack=pack)
    return Heads(name, kind, network, facts, target.max_length)


def _share_embedding(head: EagleHead, embedding: torch.Tensor) -> None:
    """Where the head's embedding is the target's, let it be the same memory: it may be gigabytes."""
    own = head.embed_tokens.weight
    few = slice(0, own.shape[0], max(own.shape[0] // 64, 1))
    if own.shape == embedding[: len(own)].shape and torch.equal(own[few], embedding[: len(own)][few].to(own)):
        head.embed_tokens.weight = torch.nn.Parameter(embedding[: len(own)], requires_grad=False)


def _local(folder: str | os.PathLike[str]) -> Path:
    """The folder itself, or that of a hub's repository once it is downloaded."""
    path = Path(folder)
    if path.is_dir():
        return path
    from huggingface_hub import snapshot_download

    with readable_errors(str(folder)):
        return Path(snapshot_download(str(folder), allow_patterns=["*.json", "*.safetensors", "*.bin", "*.pt"]))


def _warn(folder: str, facts: Facts, loaded: Loaded) -> None:
    """Of heads that may have been trained for another base. They stay exact; they only guess badly."""
    if facts.is_medusa2:
        logger.warning(
            "the heads in %s were trained together with the weights of their own base (Medusa-2, %s): on another model "
            "they guess badly; serve the base they came with",
            folder, facts.base or "unnamed",
        )  # fmt: skip
    elif facts.base and _short(facts.base) != _short(loaded.name):
        logger.warning(
            "the heads in %s were trained for %s, and the model is %s; if that is another model, they guess badly",
            folder, facts.base, loaded.name,
        )  # fmt: skip


def _short(name: str) -> str:
    return Path(name).name.removesuffix(".gguf").lower()


def _place(
    network: MedusaHeads | EagleHead, device: torch.device, target_dtype: torch.dtype, dtype: str | None, *, pack: bool
) -> None:
    """On the target's device; on a CPU with rounded weights, since all of a head's are read for one guess."""
    bits = 8 if rounds_to_int8(dtype, device, pack=pack) else BITS.get(dtype or "")
    if device.type != "cpu":
        if bits is not None:
            raise OptionError(f"draft dtype {dtype!r} is for CPUs, and the device is {device}; use bfloat16 or float16")
        network.to(device, DTYPES.get(dtype or "", target_dtype))
        if isinstance(network, EagleHead):  # rounded frequencies would turn far positions by whole circles
            network.rotary = LlamaRotaryEmbedding(network.config.layer).to(device)
        return
    if dtype not in (None, *BITS, *DTYPES):
        raise OptionError(f"dtype is {dtype!r}; it must be one of {', '.join((*DTYPES, *BITS))}")
    network.float()  # half precision saves no time for single rows here
    if bits is not None:
        from flashspec.backends.quantised import quantise_linears

        quantise_linears(network, bits, kernel=quantising_kernel(cache_folder() / "kernels"))
