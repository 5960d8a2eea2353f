"""Heads on disk: the published layouts and our own, to networks and back. It knows files; not drafting, not training.

Medusa heads as FasterDecoding publishes and vLLM converts them; ours are FasterDecoding's with a ``token_map``, the ids
of the output rows. EAGLE-3 heads as SafeAILab and speculators publish them; ``d2t`` is what a row's id is further on.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flashspec.errors import ModelError
from flashspec.heads.eagle import EagleConfig, EagleHead
from flashspec.heads.kind import MEDUSA_FILES, Folder
from flashspec.heads.medusa import MedusaHeads

Config = dict[str, Any]
Tensors = dict[str, Tensor]

MODEL_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
RENAMED = (  # what files call our networks' tensors, and what these do
    (re.compile(r"^medusa_heads?\."), ""),
    (re.compile(r"^(\d+)\.(\d+)\.linear\."), r"blocks.\1.\2."),
    (re.compile(r"^(\d+)\.\d+\."), r"outputs.\1."),
    (re.compile(r"^blocks\.(\d+)\.layers\."), r"blocks.\1."),  # this and the next: vLLM's
    (re.compile(r"^lm_heads\."), "outputs."),
    (re.compile(r"^layers\.0\."), "midlayer."),  # this and the next: speculators'
    (re.compile(r"^input_norm\."), "fc_norm."),
)
MEDUSA_NAME = re.compile(r"(?:blocks\.\d+\.\d+|outputs\.\d+)\.(?:weight|bias)|lm_head\.weight|token_map")
MEDUSA2_PATH = re.compile(r"(?:medusa-1\.0|v1\.5)[^/\\]*(?:[/\\]snapshots[/\\][^/\\]+)?$", re.IGNORECASE)
LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act"),
    *("rms_norm_eps", "attention_bias", "mlp_bias", "max_position_embeddings"),
)
FEATURE_LAYERS = "eagle_aux_hidden_state_layer_ids"
FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output")
OTHER_HEADS = "name heads that were trained for this target"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the files say of heads besides their weights."""

    base: str | None  # the model that they were trained for
    accuracies: list[float]  # ours only: how often each head's first guess was right, in [0, 1]
    expected_length: float | None  # ours only: tokens per step
    is_medusa2: bool = False  # trained together with a model of their own, so they guess worse for the stock one


def read_medusa(folder: Folder, *, hidden_size: int, vocab_size: int) -> tuple[MedusaHeads, Facts]:
    """Heads in float32 for a target of these sizes. ModelError: other sizes, or files that cannot be read."""
    place = Path(folder)
    tensors = _weights(place, MEDUSA_FILES + MODEL_FILES, lambda name: MEDUSA_NAME.fullmatch(name) is not None)
    source = _Source(place, _config(place), tensors)
    tokens = source.ids("token_map", tensors["token_map"], vocab_size) if "token_map" in tensors else None
    num_heads, num_layers = _complete_medusa(source, hidden_size)
    for i in range(num_heads):
        tensors[f"outputs.{i}.weight"] = _rows(source, f"outputs.{i}.weight", tokens, hidden_size, vocab_size)
    tokens = None if tokens is None else tokens.sort().values
    with torch.device("meta"):  # numbers of its own would be drawn for nothing
        heads = MedusaHeads(hidden_size, vocab_size, num_heads=num_heads, num_layers=num_layers, tokens=tokens)
    _fill(heads, source, tokens)
    return heads, source.facts(is_medusa2=_is_medusa2(source))


def read_eagle(
    folder: Folder, *, hidden_size: int, vocab_size: int, num_layers: int, input_embedding: Tensor | None
) -> tuple[EagleHead, Facts]:
    """A head in float32; without an input embedding of its own, with a copy of the target's. ModelError likewise."""
    place = Path(folder)
    source = _Source(place, _config(place), _weights(place, MODEL_FILES, lambda name: True))
    if not source.config:
        raise source.refusal("there is no config.json")
    head = _empty_eagle(source, _feature_layers(source, num_layers), vocab_size)
    if head.config.target_hidden_size != hidden_size:
        raise source.is_for("a hidden size", head.config.target_hidden_size, hidden_size)
    source.tensors["embed_tokens.weight"] = _embedding(source, head, vocab_size, input_embedding)
    size = head.config.draft_vocab_size
    is_whole = size == vocab_size and "d2t" not in source.tensors
    offsets = torch.zeros(size, dtype=torch.int64) if is_whole else source.get("d2t", size)
    _fill(head, source, source.ids("d2t", offsets + torch.arange(size), vocab_size))
    head.rotary = LlamaRotaryEmbedding(head.config.layer)
    return head, source.facts()


def write_medusa(
    heads: MedusaHeads, folder: Folder, *, base: str, accuracies: Sequence[float], expected_length: float | None
) -> None:
    """Heads as safetensors, and as FasterDecoding's ``.pt`` where they guess all tokens. ModelError: no room."""
    tensors = {}
    for name, value in heads.state_dict().items():
        stored = re.sub(r"^blocks\.(\d+)\.(\d+)", r"\1.\2.linear", name)
        stored = re.sub(r"^outputs\.(\d+)", rf"\1.{heads.num_layers}", stored)
        tensors["token_map" if name == "tokens" else stored] = value
    size = heads.vocab_size if heads.tokens is None else len(heads.tokens)
    config = {"medusa_num_heads": heads.num_heads, "medusa_num_layers": heads.num_layers}
    config |= {"hidden_size": heads.hidden_size, "vocab_size": heads.vocab_size, "truncated_vocab_size": size}
    _put(Path(folder), MEDUSA_FILES[0], tensors)
    if heads.tokens is None:
        _put(Path(folder), MEDUSA_FILES[1], tensors)
    else:
        Path(folder, MEDUSA_FILES[1]).unlink(missing_ok=True)  # an earlier one would be other heads
    about = {"base_model_name_or_path": base, "accuracies": list(accuracies), "expected_length": expected_length}
    _put(Path(folder), "config.json", config | about)


def write_eagle(
    head: EagleHead,
    folder: Folder,
    *,
    base: str,
    accuracies: Sequence[float],
    expected_length: float | None,
    max_position_embeddings: int,
    keep_embedding: bool = False,
) -> None:
    """A head in SafeAILab's layout, without the embedding where the target's is meant. ModelError: no room."""
    made, layer, ids = head.config, head.config.layer, head.tokens.cpu()
    left_out = {"tokens"} if keep_embedding else {"tokens", "embed_tokens.weight"}
    state = {name: value for name, value in head.state_dict().items() if name not in left_out}
    tensors = {name.replace("fc_norm", "input_norm"): value for name, value in state.items()}
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    rope = dict(layer.rope_parameters)
    config: Config = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "tie_word_embeddings": False}
    config |= {name: getattr(layer, name) for name in ("vocab_size", "num_hidden_layers", *LAYER_FIELDS)}
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None if rope["rope_type"] == "default" else rope}
    config |= {name: getattr(made, name) for name in ("draft_vocab_size", "target_hidden_size", *FLAGS)}
    config |= {FEATURE_LAYERS: list(made.feature_layers), "max_position_embeddings": max_position_embeddings}
    about = {"base_model_name_or_path": base, "accuracies": list(accuracies), "expected_length": expected_length}
    _put(Path(folder), MODEL_FILES[0], tensors)
    _put(Path(folder), "config.json", config | about)


def _complete_medusa(source: _Source, hidden_size: int) -> tuple[int, int]:
    """Heads and residual blocks of each, by the weights: published configs understate them. Adds what is implied."""
    tensors, numbers = source.tensors, [list(map(int, re.findall(r"\d+", name))) for name in source.tensors]
    num_heads = max((found[0] + 1 for found in numbers if found), default=0)
    num_layers = max((found[1] + 1 for found in numbers if len(found) == 2), default=0)
    if num_heads == 0:
        raise source.refusal("its weights hold no Medusa heads", "name a folder with medusa_lm_head.pt")
    if source.config.get("original_lm_head"):
        shared = source.get("lm_head.weight" if "lm_head.weight" in tensors else "outputs.0.weight")
        tensors |= {f"outputs.{i}.weight": shared for i in range(num_heads)}
    if not any(name.endswith(".bias") for name in tensors):
        zeros = torch.zeros(hidden_size)
        tensors |= {f"blocks.{i}.{j}.bias": zeros for i in range(num_heads) for j in range(num_layers)}
    return num_heads, num_layers


def _rows(source: _Source, name: str, tokens: Tensor | None, hidden_size: int, vocab_size: int) -> Tensor:
    """An output layer's rows by ascending id, [N, hidden_size]."""
    weight = source.get(name)
    rows, width = weight.shape if weight.dim() == 2 else (0, 0)
    if width != hidden_size:
        raise source.is_for("a hidden size", width, hidden_size)
    if tokens is None and rows < vocab_size:
        raise source.is_for("a vocabulary", rows, vocab_size)
    if tokens is None:
        return weight[:vocab_size]  # what is beyond is padding
    if rows != len(tokens) and rows <= int(tokens.max()):
        raise source.refusal(f"{name} has {rows} rows for the {len(tokens)} ids of token_map")
    # as in vLLM, all of the target's rows may be there, and the map picks some
    return weight[tokens.argsort() if rows == len(tokens) else tokens.sort().values]


def _is_medusa2(source: _Source) -> bool:
    """Whether the heads were trained together with a model: its weights are there, or the name is known for it."""
    names: list[str] = []
    with contextlib.suppress(ModelError):
        _weights(source.folder, MODEL_FILES, lambda name: bool(names.append(name)))  # type: ignore[func-returns-value]
    paths = str(source.folder), str(source.config.get("base_model_name_or_path"))
    is_known = "accuracies" not in source.config and any(MEDUSA2_PATH.search(path) for path in paths)  # never ours
    return is_known or any(name.startswith(("model.", "transformer.", "gpt_neox.")) for name in names)


def _feature_layers(source: _Source, num_layers: int) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads."""
    ids, shift = source.config.get(FEATURE_LAYERS), 0
    if ids is None:  # SpecForge, SGLang and ModelOpt name the layers whose outputs are read
        ids, shift = _part(source.config, "eagle_config").get(FEATURE_LAYERS), 1
    if ids is None:
        ids, shift = [2, num_layers // 2, num_layers - 3], 0
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i + shift <= num_layers for i in ids):
        raise source.refusal(f"it reads layers {ids}, and the target has {num_layers}", OTHER_HEADS)
    return tuple(i + shift for i in ids)


def _empty_eagle(source: _Source, feature_layers: tuple[int, ...], vocab_size: int) -> EagleHead:
    """A head without weights."""
    config, fields = source.config, _part(source.config, "transformer_layer_config") or source.config
    rope = dict(_part(fields, "rope_scaling") or _part(fields, "rope_parameters"))
    rope = {"rope_type": rope.get("type", "default"), "rope_theta": fields.get("rope_theta") or 10000.0, **rope}
    given = {name: fields[name] for name in LAYER_FIELDS if fields.get(name) is not None}
    try:
        layer = LlamaConfig(**given, vocab_size=vocab_size, num_hidden_layers=1, rope_parameters=rope)
        made = EagleConfig(
            layer=layer,
            draft_vocab_size=config.get("draft_vocab_size") or vocab_size,
            target_hidden_size=config.get("target_hidden_size") or layer.hidden_size,
            feature_layers=feature_layers,
            extra={key: value for key, value in config.items() if key not in LAYER_FIELDS + FLAGS},
            **{name: bool(config.get(name) or _part(config, "eagle_config").get(name)) for name in FLAGS},
        )
        with torch.device("meta"):
            return EagleHead(made)
    except Exception as error:  # Transformers raises a dozen kinds for values that make no sense
        raise source.refusal(f"its config.json describes no layer of a Llama ({error!r})") from error


def _embedding(source: _Source, head: EagleHead, vocab_size: int, input_embedding: Tensor | None) -> Tensor:
    """The head's own embedding or the target's, [vocab_size, d]."""
    width, own = head.config.layer.hidden_size, source.tensors.get("embed_tokens.weight")
    fields = _part(source.config, "transformer_layer_config") or source.config
    rows = fields.get("vocab_size") if own is None else len(own)
    if isinstance(rows, int) and rows < vocab_size:
        raise source.is_for("a vocabulary", rows, vocab_size)
    own = input_embedding if own is None else own
    if own is None or own.shape[-1] != width:
        raise source.refusal(f"neither they nor the target have an input embedding of width {width}", OTHER_HEADS)
    return own[:vocab_size]


def _fill(network: MedusaHeads | EagleHead, source: _Source, tokens: Tensor | None) -> None:
    """Give a network without weights those of the files."""
    shapes = {name: value.shape for name, value in network.state_dict().items() if name != "tokens"}
    for name in sorted(source.tensors.keys() - shapes.keys()):
        if name.startswith(("outputs.", "midlayer.", "layers.", "fc")) and "rotary" not in name:
            raise source.refusal(f"it has {name}, for which this network has no place", "name heads without it")
    state = {name: source.floats(name, *shape) for name, shape in shapes.items()}
    network.load_state_dict(state if tokens is None else state | {"tokens": tokens}, assign=True)


@dataclass(frozen=True, slots=True)
class _Source:
    """What was read of a folder, and what to say of it."""

    folder: Path
    config: Config
    tensors: Tensors  # by our networks' names

    def refusal(self, what: str, step: str = "copy the folder anew") -> ModelError:
        return ModelError(f"cannot use the heads in {str(self.folder)!r}: {what}; {step}")

    def is_for(self, what: str, found: int, needed: int) -> ModelError:
        whose = self.facts().base or "what model, they do not say"
        return self.refusal(f"they are for {what} of {found} ({whose}), and the target has {needed}", OTHER_HEADS)

    def facts(self, *, is_medusa2: bool = False) -> Facts:
        config, verifier = self.config, _part(_part(self.config, "speculators_config"), "verifier")
        base = config.get("base_model_name_or_path") or verifier.get("name_or_path")
        rates, length = config.get("accuracies"), config.get("expected_length")
        rates = rates if isinstance(rates, list) else []
        is_measured = all(isinstance(rate, int | float) and 0 <= rate <= 1 for rate in rates)
        length = length if isinstance(length, int | float) and 0 <= length < math.inf else None
        return Facts(base if isinstance(base, str) else None, rates if is_measured else [], length, is_medusa2)

    def get(self, name: str, *shape: int) -> Tensor:
        """A tensor, of this shape where one is given."""
        if name not in self.tensors:
            raise self.refusal(f"its weights lack {name}")
        value = self.tensors[name]
        if shape and tuple(value.shape) != shape:
            raise self.refusal(f"{name} is {list(value.shape)}, and must be {list(shape)}")
        return value

    def floats(self, name: str, *shape: int) -> Tensor:
        """A copy in float32 that has nothing to do with the file any more."""
        value = self.get(name, *shape)
        if not value.is_floating_point() or value.element_size() == 1:
            raise self.refusal(f"{name} is stored as {value.dtype}", "name heads in float32, bfloat16 or float16")
        value = value.detach().to("cpu", torch.float32, copy=True)
        if not torch.stack(value.aminmax()).isfinite().all():  # without a mask as large as the weights
            raise self.refusal(f"{name} holds NaN or infinity", "train the heads anew")
        return value

    def ids(self, name: str, ids: Tensor, vocab_size: int) -> Tensor:
        """Token ids as they stand, [N] int64; two rows for one token would give it a wrong probability."""
        if ids.dim() != 1 or len(ids) == 0 or ids.is_floating_point() or ids.dtype is torch.bool:
            raise self.refusal(f"{name} is {list(ids.shape)} of {ids.dtype}, and must be a list of torch.int64")
        listed = ids.tolist()
        if min(listed) < 0 or max(listed) >= vocab_size:
            raise self.refusal(f"{name} leads to tokens {min(listed)} to {max(listed)} of {vocab_size}", OTHER_HEADS)
        if len(set(listed)) < len(listed):
            raise self.refusal(f"{name} leads to the same token twice")
        return ids.to(torch.int64, copy=True)


def _part(config: Config, name: str) -> Config:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _config(folder: Path, name: str = "config.json") -> Config:
    """An object from a file; empty where there is none."""
    if not os.path.isfile(folder / name):
        return {}
    with _readable(folder / name):
        value = json.loads((folder / name).read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__} instead of an object")
    return value


def _weights(folder: Path, candidates: Sequence[str], is_wanted: Callable[[str], bool]) -> Tensors:
    """Tensors by our networks' names, where these are wanted, of the first file that is there."""
    first = next((name for name in candidates if os.path.isfile(folder / name)), None)
    if first is None:
        raise _Source(folder, {}, {}).refusal(f"it has none of {', '.join(candidates)}", "name another folder")
    files = {first}
    if first.endswith(".json"):  # of shards: only those that hold something wanted
        shards = _part(_config(folder, first), "weight_map").items()
        files = {Path(str(shard)).name for name, shard in shards if is_wanted(_renamed(name))}
    tensors: Tensors = {}
    for file in sorted(files):
        with _readable(folder / file):
            tensors |= _tensors(folder / file, is_wanted)
    return tensors


def _renamed(name: str) -> str:
    for pattern, ours in RENAMED:
        name = pattern.sub(ours, name)
    return name


def _tensors(file: Path, is_wanted: Callable[[str], bool]) -> Tensors:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as stored:
            names = stored.keys()
            return {ours: stored.get_tensor(name) for name in names if is_wanted(ours := _renamed(name))}
    with warnings.catch_warnings(action="ignore"):  # that it may not understand a foreign pickle, which it then refuses
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    tensors = {_renamed(str(name)): value for name, value in found.items() if isinstance(value, Tensor)}
    return {name: value for name, value in tensors.items() if is_wanted(name)}


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Say readably what is wrong with a file."""
    try:
        yield
    except pickle.UnpicklingError as error:
        what = f"{file.name} holds more than tensors, and reading it could run code"
        raise _Source(file.parent, {}, {}).refusal(what, "convert it to safetensors where it was made") from error
    except Exception as error:  # damaged files raise a dozen kinds
        raise _Source(file.parent, {}, {}).refusal(f"{file.name} cannot be read ({error!r})") from error


def _put(folder: Path, name: str, content: Config) -> None:
    """Write tensors or an object under another name first, so that nobody reads half a file."""
    temporary = folder / f".{name}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if name.endswith(".json"):
            temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        else:  # safetensors refuses tensors that share memory
            tensors = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in content.items()}
            torch.save(tensors, temporary) if name.endswith(".pt") else save_file(tensors, temporary)
        os.replace(temporary, folder / name)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"cannot write {str(folder / name)!r}: {error!r}; name another folder or make room") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
