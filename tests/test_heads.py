"""Heads on disk: every layout comes back as the network it describes, and a bad file as one readable line."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flashspec.errors import ModelError
from flashspec.heads import files
from flashspec.heads.eagle import EagleConfig, EagleHead, rotated
from flashspec.heads.files import Facts, read_eagle, read_medusa, write_eagle, write_medusa
from flashspec.heads.kind import kind_of
from flashspec.heads.medusa import MedusaHeads

D, VOCAB, LAYERS = 8, 12, 10  # of the target
SIZES = {"hidden_size": D, "vocab_size": VOCAB}
Tensors = dict[str, Tensor]


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "Köpfe 头"
    place.mkdir()
    return place


def put(folder: Path, name: str, content: Any) -> None:
    if name.endswith(".json"):
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    elif name.endswith(".safetensors"):
        save_file(content, folder / name)
    else:
        torch.save(content, folder / name)


def refused(read: Callable[[], object], *words: str) -> None:
    """A ModelError of one line that names the folder, these words and a next step."""
    with pytest.raises(ModelError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    assert "Köpfe 头" in message
    assert "; " in message
    for word in words:
        assert word in message


# Medusa: plain weights, what they compute, and the layouts they are published in


def plain(num_heads: int = 3, num_layers: int = 1, rows: int = VOCAB, bias: bool = True) -> list[dict[str, Any]]:
    return [
        {
            "blocks": [(random(D, D), random(D) if bias else torch.zeros(D)) for _ in range(num_layers)],
            "output": random(rows, D),
        }
        for _ in range(num_heads)
    ]


def expected(heads: list[dict[str, Any]], hidden: Tensor) -> Tensor:
    logits = []
    for head in heads:
        state = hidden
        for weight, bias in head["blocks"]:
            state = state + silu(linear(state, weight, bias))
        logits.append(linear(state, head["output"]))
    return torch.stack(logits)


def published(heads: list[dict[str, Any]], prefix: str = "") -> Tensors:
    """FasterDecoding's names."""
    tensors = {}
    for i, head in enumerate(heads):
        for j, (weight, bias) in enumerate(head["blocks"]):
            tensors |= {f"{prefix}{i}.{j}.linear.weight": weight, f"{prefix}{i}.{j}.linear.bias": bias}
        tensors[f"{prefix}{i}.{len(head['blocks'])}.weight"] = head["output"]
    return tensors


def converted(heads: list[dict[str, Any]], bias: bool = True) -> Tensors:
    """vLLM's names."""
    tensors = {}
    for i, head in enumerate(heads):
        for j, (weight, shift) in enumerate(head["blocks"]):
            tensors[f"blocks.{i}.layers.{j}.weight"] = weight
            if bias:
                tensors[f"blocks.{i}.layers.{j}.bias"] = shift
        tensors[f"lm_heads.{i}.weight"] = head["output"]
    return tensors


def config(**changed: Any) -> dict[str, Any]:
    return {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"} | changed


def vllm_config(**changed: Any) -> dict[str, Any]:
    return {"model_type": "medusa", "num_heads": 3, "num_hidden_layers": 1, **SIZES} | changed


def check_medusa(read: MedusaHeads, heads: list[dict[str, Any]]) -> None:
    hidden = random(5, D)
    assert (read.num_heads, read.num_layers) == (len(heads), len(heads[0]["blocks"]))
    assert (read.hidden_size, read.vocab_size) == (D, VOCAB)
    assert torch.equal(read(hidden), expected(heads, hidden))
    assert all(value.dtype is torch.float32 for value in read.parameters())
    assert all(value.device.type == "cpu" for value in read.state_dict().values())


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("prefix", ["", "medusa_head."])
@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_reads_fasterdecoding(folder: Path, name: str, prefix: str, num_layers: int) -> None:
    heads = plain(5, num_layers)
    put(folder, name, published(heads, prefix))
    put(folder, "config.json", config(medusa_num_heads=2, medusa_num_layers=num_layers))  # understated, as published
    read, facts = read_medusa(folder, **SIZES)
    check_medusa(read, heads)
    assert read.tokens is None
    assert facts == Facts("lmsys/vicuna-7b-v1.3", [], None, False)


def test_blocks_that_shared_a_module_are_read_under_each_name(folder: Path) -> None:
    heads = plain(2, 2)
    for head in heads:
        head["blocks"][1] = head["blocks"][0]
    put(folder, "medusa_lm_head.pt", published(heads))
    put(folder, "config.json", config(medusa_num_layers=2))
    check_medusa(read_medusa(folder, **SIZES)[0], heads)


def test_safetensors_go_before_the_pickle(folder: Path) -> None:
    heads = plain()
    put(folder, "medusa_lm_head.safetensors", published(heads))
    put(folder, "medusa_lm_head.pt", published(plain()))
    check_medusa(read_medusa(folder, **SIZES)[0], heads)


def test_an_old_pickle_in_half_precision(folder: Path) -> None:
    heads = plain()
    for head in heads:
        head["output"] = head["output"].bfloat16().float()
        head["blocks"] = [(weight.half().float(), bias.half().float()) for weight, bias in head["blocks"]]
    tensors = {name: value.half() if "linear" in name else value.bfloat16() for name, value in published(heads).items()}
    torch.save(tensors, folder / "medusa_lm_head.pt", _use_new_zipfile_serialization=False)
    check_medusa(read_medusa(folder, **SIZES)[0], heads)


def test_the_weights_are_copies(folder: Path) -> None:
    heads = plain()
    put(folder, "medusa_lm_head.safetensors", published(heads))
    read = read_medusa(folder, **SIZES)[0]
    file = folder / "medusa_lm_head.safetensors"
    with file.open("r+b") as stream:  # in place: a mapping of the file would see it
        stream.write(bytes(file.stat().st_size))
    check_medusa(read, heads)


def test_rows_beyond_the_vocabulary_are_cut(folder: Path) -> None:
    heads = plain(rows=VOCAB + 4)
    put(folder, "medusa_lm_head.pt", published(heads))
    for head in heads:
        head["output"] = head["output"][:VOCAB]
    check_medusa(read_medusa(folder, **SIZES)[0], heads)


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_only_the_heads_of_a_whole_model_are_read(folder: Path, suffix: str) -> None:
    heads = plain()
    tensors = published(heads, "medusa_head.")
    stem, ending = ("model", "safetensors") if suffix == "safetensors" else ("pytorch_model", "bin")
    shards = [f"{stem}-0000{i}-of-00003.{ending}" for i in (1, 2, 3)]
    names = sorted(tensors)
    parts = [{}, {name: tensors[name] for name in names[:4]}, {name: tensors[name] for name in names[4:]}]
    parts[2]["model.norm.weight"] = random(D + 1)
    (folder / shards[0]).write_bytes(b"base weights that nobody should look at")
    for shard, part in list(zip(shards, parts, strict=True))[1:]:
        put(folder, shard, part)
    where = {name: shard for shard, part in zip(shards, parts, strict=True) for name in part}
    where["model.layers.0.mlp.up_proj.weight"] = where["model.embed_tokens.weight"] = shards[0]
    put(folder, f"{stem}.{ending}.index.json", {"metadata": {}, "weight_map": where})
    put(folder, "config.json", config(architectures=["MedusaLlamaForCausalLM"]))
    read, facts = read_medusa(folder, **SIZES)
    check_medusa(read, heads)
    assert facts.is_medusa2
    (folder / shards[1]).unlink()
    refused(lambda: read_medusa(folder, **SIZES), shards[1])


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_heads_beside_base_weights_are_medusa_2(folder: Path, name: str) -> None:
    put(folder, "medusa_lm_head.pt", published(plain()))
    assert not read_medusa(folder, **SIZES)[1].is_medusa2
    put(folder, name, {"model.embed_tokens.weight": random(VOCAB, D)})
    assert read_medusa(folder, **SIZES)[1].is_medusa2


@pytest.mark.parametrize(
    ("name", "base", "ours", "is_medusa2"),
    [
        ("medusa-1.0-zephyr-7b-beta", "HuggingFaceH4/zephyr-7b-beta", {}, True),
        ("Medusa-1.0-zephyr-7b-beta/snapshots/0a1b", "HuggingFaceH4/zephyr-7b-beta", {}, True),
        ("medusa-v1.5-7b", None, {}, True),
        ("heads", "lmsys/vicuna-7b-v1.5", {}, True),
        ("heads", "lmsys/vicuna-7b-v1.5", {"accuracies": [0.5, 0.25, 0.125]}, False),
        ("medusa-vicuna-7b-v1.3", "lmsys/vicuna-7b-v1.3", {}, False),
        ("v1.5/heads", None, {}, False),
    ],
)
def test_medusa_2_is_told_by_its_name(
    folder: Path, name: str, base: str | None, ours: dict[str, Any], is_medusa2: bool
) -> None:
    place = folder / name
    place.mkdir(parents=True)
    put(place, "medusa_lm_head.pt", published(plain()))
    put(place, "config.json", config(base_model_name_or_path=base) | ours)
    facts = read_medusa(place, **SIZES)[1]
    assert facts.is_medusa2 is is_medusa2
    assert facts.base == base


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_reads_vllm(folder: Path, name: str, num_layers: int) -> None:
    heads = plain(4, num_layers)
    put(folder, name, converted(heads))
    put(folder, "config.json", vllm_config(medusa_fc_bias=True))
    read, facts = read_medusa(folder, **SIZES)
    check_medusa(read, heads)
    assert facts == Facts(None, [], None, False)


def test_a_token_map_in_any_order_and_no_biases(folder: Path) -> None:
    heads = plain(rows=4, bias=False)
    ids = torch.tensor([7, 2, 11, 3])
    put(folder, "model.safetensors", converted(heads, bias=False) | {"token_map": ids})
    put(folder, "config.json", vllm_config(truncated_vocab_size=4, medusa_fc_bias=False))
    for head in heads:
        head["output"] = head["output"][[1, 3, 0, 2]]
    read = read_medusa(folder, **SIZES)[0]
    check_medusa(read, heads)
    assert read.tokens is not None
    assert read.tokens.tolist() == [2, 3, 7, 11]


def test_a_token_map_picks_from_all_rows(folder: Path) -> None:
    heads = plain()
    put(folder, "model.safetensors", converted(heads) | {"token_map": torch.tensor([9, 0], dtype=torch.int32)})
    for head in heads:
        head["output"] = head["output"][[0, 9]]
    read = read_medusa(folder, **SIZES)[0]
    check_medusa(read, heads)
    assert read.tokens is not None
    assert (read.tokens.tolist(), read.tokens.dtype) == ([0, 9], torch.int64)


@pytest.mark.parametrize("name", ["lm_head.weight", "lm_heads.0.weight"])
def test_one_output_layer_for_all(folder: Path, name: str) -> None:
    heads = plain(rows=3)
    tensors = {key: value for key, value in converted(heads).items() if not key.startswith("lm_heads.")}
    tensors |= {name: heads[0]["output"], "token_map": torch.tensor([5, 4, 1])}
    put(folder, "model.safetensors", tensors)
    put(folder, "config.json", vllm_config(original_lm_head=True))
    output = heads[0]["output"][[2, 1, 0]]
    for head in heads:
        head["output"] = output
    check_medusa(read_medusa(folder, **SIZES)[0], heads)


class Evil:
    """Unpickling it makes a file."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.proof),))


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("layout", ["zipped", "old", "no torch"])
def test_code_in_a_pickle_is_refused_and_not_run(folder: Path, tmp_path: Path, name: str, layout: str) -> None:
    proof = tmp_path / "ran"
    tensors = published(plain()) | {"0.0.linear.weight": Evil(proof)}
    if layout == "no torch":
        (folder / name).write_bytes(pickle.dumps(tensors))
    else:
        torch.save(tensors, folder / name, _use_new_zipfile_serialization=layout == "zipped")
    refused(lambda: read_medusa(folder, **SIZES), name, "code", "safetensors")
    assert not proof.exists()


def with_changed(**changes: Any) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        changed = {name: changes.get(name.replace(".", "_"), value) for name, value in tensors.items()}
        return {name: value for name, value in changed.items() if value is not None}

    return change


def nan_at_the_end(*shape: int) -> Tensor:
    value = random(*shape)
    value.view(-1)[-1] = torch.nan
    return value


BAD_MEDUSA: dict[str, tuple[Callable[[Tensors], Tensors], list[str]]] = {
    "no heads": (lambda tensors: {"model.norm.weight": random(D)}, ["no Medusa heads"]),
    "no tensors": (lambda tensors: {}, ["no Medusa heads"]),
    "no block": (with_changed(blocks_1_layers_0_weight=None), ["lack blocks.1.0.weight"]),
    "no bias": (with_changed(blocks_2_layers_0_bias=None), ["lack blocks.2.0.bias"]),
    "no output": (with_changed(lm_heads_1_weight=None), ["lack outputs.1.weight"]),
    "hidden size": (lambda tensors: {n: v[..., : D - 2] for n, v in tensors.items()}, ["hidden size of 6", f"has {D}"]),
    "vocabulary": (with_changed(lm_heads_2_weight=random(9, D)), ["vocabulary of 9", f"has {VOCAB}"]),
    "output bias": (lambda tensors: tensors | {"lm_heads.1.bias": random(VOCAB)}, ["outputs.1.bias", "no place"]),
    "shape": (with_changed(blocks_0_layers_0_weight=random(D, D + 1)), ["blocks.0.0.weight", "[8, 9]", "[8, 8]"]),
    "NaN": (with_changed(blocks_0_layers_0_bias=nan_at_the_end(D)), ["blocks.0.0.bias", "NaN"]),
    "infinity": (with_changed(lm_heads_0_weight=torch.full((VOCAB, D), torch.inf)), ["outputs.0.weight", "infinity"]),
    "too large": (with_changed(lm_heads_0_weight=torch.ones(VOCAB, D).double() * 1e300), ["outputs.0.weight"]),
    "int8": (with_changed(blocks_1_layers_0_weight=torch.ones(D, D, dtype=torch.int8)), ["int8", "float16"]),
    "float8": (
        with_changed(blocks_1_layers_0_weight=torch.ones(D, D).to(torch.float8_e4m3fn)),
        ["float8", "float16"],
    ),
    "ids too large": (lambda tensors: tensors | {"token_map": torch.tensor([0, VOCAB])}, ["token_map", "12"]),
    "ids too small": (lambda tensors: tensors | {"token_map": torch.tensor([-1, 3])}, ["token_map", "-1"]),
    "ids twice": (lambda tensors: tensors | {"token_map": torch.tensor([3, 3])}, ["token_map", "twice"]),
    "ids in float": (lambda tensors: tensors | {"token_map": torch.tensor([3.0, 1.0])}, ["token_map", "float32"]),
    "no ids": (lambda tensors: tensors | {"token_map": torch.zeros(0, dtype=torch.int64)}, ["token_map", "[0]"]),
    "ids in rows": (lambda tensors: tensors | {"token_map": torch.tensor([[1]])}, ["token_map", "[1, 1]"]),
    "ids without rows": (
        lambda tensors: with_changed(lm_heads_0_weight=random(3, D))(tensors) | {"token_map": torch.tensor([3, 8])},
        ["outputs.0.weight", "3 rows", "2 ids"],
    ),
}


@pytest.mark.parametrize("case", BAD_MEDUSA)
def test_bad_medusa_heads_are_refused_by_name(folder: Path, case: str) -> None:
    change, words = BAD_MEDUSA[case]
    put(folder, "model.safetensors", {n: v.contiguous() for n, v in change(converted(plain())).items()})
    put(folder, "config.json", vllm_config())
    refused(lambda: read_medusa(folder, **SIZES), *words)


def test_heads_for_another_model_are_refused_with_its_name(folder: Path) -> None:
    put(folder, "medusa_lm_head.pt", published(plain()))
    put(folder, "config.json", config())
    refused(lambda: read_medusa(folder, hidden_size=4, vocab_size=VOCAB), "lmsys/vicuna-7b-v1.3", "hidden size of 8")
    refused(lambda: read_medusa(folder, hidden_size=D, vocab_size=99), "lmsys/vicuna-7b-v1.3", "vocabulary of 12", "99")


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt", "pytorch_model.bin"])
@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_half_a_file_is_refused(folder: Path, name: str, share: float) -> None:
    put(folder, name, published(plain()))
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: int(len(whole) * share)])
    refused(lambda: read_medusa(folder, **SIZES), name, "cannot be read")


def test_other_files_are_refused(folder: Path) -> None:
    file = folder / "medusa_lm_head.pt"
    file.write_text("<html>not found</html>")
    refused(lambda: read_medusa(folder, **SIZES), file.name)
    torch.save([random(2)], file)
    refused(lambda: read_medusa(folder, **SIZES), file.name)
    torch.save({"state": {"0.1.weight": random(2)}, 3: random(1)}, file)
    refused(lambda: read_medusa(folder, **SIZES), "no Medusa heads")
    torch.save({"0.1.weight": 3}, file)
    refused(lambda: read_medusa(folder, **SIZES), "no Medusa heads")
    file.unlink()
    refused(lambda: read_medusa(folder, **SIZES), "medusa_lm_head.safetensors", "medusa_lm_head.pt")
    refused(lambda: read_medusa(folder / "nowhere", **SIZES), "nowhere")


@pytest.mark.parametrize("text", ["{", "[]", "3", "\ufeff{}", "[" * 100_000, "\x00"])
def test_a_bad_config_is_refused(folder: Path, text: str) -> None:
    put(folder, "medusa_lm_head.pt", published(plain()))
    put(folder, "model.safetensors", eagle_tensors())
    (folder / "config.json").write_text(text, encoding="utf-8")
    refused(lambda: read_medusa(folder, **SIZES), "config.json")
    refused(lambda: eagle(folder), "config.json")
    (folder / "config.json").write_bytes(b"\xff")
    refused(lambda: read_medusa(folder, **SIZES), "config.json")


@pytest.mark.parametrize("index", [[], {"weight_map": []}, {"weight_map": {"medusa_head.0.1.weight": "/etc/passwd"}}])
def test_a_bad_index_is_refused(folder: Path, index: Any) -> None:
    put(folder, "model.safetensors.index.json", index)
    refused(lambda: read_medusa(folder, **SIZES))


def test_an_index_reads_nothing_outside_its_folder(folder: Path) -> None:
    put(folder.parent, "model.safetensors", published(plain(), "medusa_head."))
    put(folder, "model.safetensors.index.json", {"weight_map": {"medusa_head.0.1.weight": "../model.safetensors"}})
    refused(lambda: read_medusa(folder, **SIZES), "model.safetensors")


def ours(tokens: list[int] | None = None, num_layers: int = 1) -> MedusaHeads:
    ids = None if tokens is None else torch.tensor(tokens)
    heads = MedusaHeads(D, VOCAB, num_heads=3, num_layers=num_layers, tokens=ids)
    return heads.requires_grad_(True)


@pytest.mark.parametrize("tokens", [None, [1, 4, 11]])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_our_medusa_heads_come_back(folder: Path, tokens: list[int] | None, num_layers: int) -> None:
    heads, place = ours(tokens, num_layers), folder / "new" / "here"
    write_medusa(heads, place, base="a/модель", accuracies=[0.5, 0.25, 1], expected_length=2.5)
    read, facts = read_medusa(place, **SIZES)
    assert read.state_dict().keys() == heads.state_dict().keys()
    assert all(torch.equal(value, heads.state_dict()[name]) for name, value in read.state_dict().items())
    hidden = random(4, D)
    assert torch.equal(read(hidden), heads(hidden))
    assert facts == Facts("a/модель", [0.5, 0.25, 1.0], 2.5, False)
    written = {"config.json", "medusa_lm_head.safetensors"} | ({"medusa_lm_head.pt"} if tokens is None else set())
    assert {file.name for file in place.iterdir()} == written
    assert kind_of(place) == "medusa"


def test_our_heads_are_fasterdecodings_for_others(folder: Path) -> None:
    heads = ours(num_layers=2)
    write_medusa(heads, folder, base="base", accuracies=[], expected_length=None)
    tensors = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    names = {f"{i}.{j}.linear.{part}" for i in range(3) for j in range(2) for part in ("weight", "bias")}
    assert tensors.keys() == names | {f"{i}.2.weight" for i in range(3)}
    assert load_file(folder / "medusa_lm_head.safetensors").keys() == tensors.keys()
    for i in range(3):
        assert torch.equal(tensors[f"{i}.1.linear.bias"], heads.blocks[i][1].bias)  # type: ignore[index]
        assert torch.equal(tensors[f"{i}.2.weight"], heads.outputs[i].weight)  # type: ignore[arg-type]
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert written == config(medusa_num_layers=2, base_model_name_or_path="base") | {
        "hidden_size": D, "vocab_size": VOCAB, "truncated_vocab_size": VOCAB, "accuracies": [], "expected_length": None,
    }  # fmt: skip


def test_a_pickle_of_other_heads_does_not_stay(folder: Path) -> None:
    write_medusa(ours(), folder, base="base", accuracies=[], expected_length=None)
    write_medusa(ours([2, 3]), folder, base="base", accuracies=[], expected_length=None)
    assert not (folder / "medusa_lm_head.pt").exists()
    assert json.loads((folder / "config.json").read_text())["truncated_vocab_size"] == 2


def test_outputs_in_one_tensor_or_turned_are_written(folder: Path) -> None:
    heads = ours()
    heads.outputs[1].weight = heads.outputs[0].weight
    heads.outputs[2].weight = torch.nn.Parameter(random(D, VOCAB).T)
    write_medusa(heads, folder, base="base", accuracies=[], expected_length=None)
    read = read_medusa(folder, **SIZES)[0].state_dict()
    assert all(torch.equal(value, heads.state_dict()[name]) for name, value in read.items())


def test_whoever_reads_the_old_file_keeps_it(folder: Path) -> None:
    file = folder / "medusa_lm_head.safetensors"
    write_medusa(ours(), folder, base="base", accuracies=[], expected_length=None)
    old = file.read_bytes()
    with file.open("rb") as stream:
        write_medusa(ours(), folder, base="base", accuracies=[], expected_length=None)
        assert stream.read() == old != file.read_bytes()


def test_a_failed_write_leaves_the_old_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = ours()
    write_medusa(heads, folder, base="base", accuracies=[], expected_length=None)

    def full(tensors: Tensors, file: Path) -> None:
        Path(file).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    before = {file.name for file in folder.iterdir()}
    with pytest.raises(ModelError, match=r"cannot write .*medusa_lm_head\.safetensors.*No space left.*make room"):
        write_medusa(ours(), folder, base="base", accuracies=[], expected_length=None)
    assert {file.name for file in folder.iterdir()} == before
    assert torch.equal(read_medusa(folder, **SIZES)[0].outputs[0].weight, heads.outputs[0].weight)  # type: ignore[arg-type]


def test_a_file_is_no_folder_to_write_to(folder: Path) -> None:
    (folder / "taken").write_text("")
    with pytest.raises(ModelError, match="cannot write"):
        write_medusa(ours(), folder / "taken", base="base", accuracies=[], expected_length=None)


NO_RATES = ["high", 0.5, [0.5, 2.0], [0.5, None], [0.5, float("nan")], {"0": 0.5}, None]
NO_LENGTHS = ["long", [2.0], -1.0, float("nan"), float("inf"), {}, None]


@pytest.mark.parametrize(("rates", "length"), list(zip(NO_RATES, NO_LENGTHS, strict=True)))
def test_accuracies_that_are_none_are_left_out(folder: Path, rates: Any, length: Any) -> None:
    put(folder, "medusa_lm_head.pt", published(plain()))
    put(folder, "config.json", config(accuracies=rates, expected_length=length, base_model_name_or_path=3))
    assert read_medusa(folder, **SIZES)[1] == Facts(None, [], None, False)


# EAGLE-3


def layer_config(**changed: Any) -> dict[str, Any]:
    layer = {"hidden_size": D, "intermediate_size": 10, "num_attention_heads": 4, "num_key_value_heads": 2}
    return layer | {"head_dim": 6, "rms_norm_eps": 1e-5, "vocab_size": VOCAB, "max_position_embeddings": 64} | changed


def eagle_config(**changed: Any) -> dict[str, Any]:
    return layer_config(architectures=["LlamaForCausalLMEagle3"], model_type="llama", draft_vocab_size=5) | changed


def speculators_config(**changed: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer_config(model_type="llama"),
        "draft_vocab_size": 5,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 5, 9],
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "meta-llama/Llama-3.1-8B"}},
    } | changed


def eagle_tensors(layer: str = "midlayer", width: int = D, **more: Tensor) -> Tensors:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (D, 3 * width),
        "norm.weight": (D,),
        "lm_head.weight": (5, D),
        f"{layer}.hidden_norm.weight": (D,),
        f"{layer}.input_layernorm.weight": (D,),
        f"{layer}.post_attention_layernorm.weight": (D,),
        f"{layer}.self_attn.q_proj.weight": (24, 2 * D),
        f"{layer}.self_attn.k_proj.weight": (12, 2 * D),
        f"{layer}.self_attn.v_proj.weight": (12, 2 * D),
        f"{layer}.self_attn.o_proj.weight": (D, 24),
        f"{layer}.mlp.gate_proj.weight": (10, D),
        f"{layer}.mlp.up_proj.weight": (10, D),
        f"{layer}.mlp.down_proj.weight": (D, 10),
    }
    mapped = {"d2t": torch.tensor([1, 1, 3, 4, 7]), "t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    return {name: random(*shape) for name, shape in shapes.items()} | mapped | more


EMBEDDING = torch.arange(VOCAB * D).view(VOCAB, D).float()
NO_EMBEDDING = object()


def eagle(folder: Path, embedding: Any = EMBEDDING, **changed: Any) -> tuple[EagleHead, Facts]:
    given = None if embedding is NO_EMBEDDING else embedding
    return read_eagle(folder, **SIZES | {"num_layers": LAYERS} | changed, input_embedding=given)


def put_eagle(folder: Path, tensors: Tensors, settings: dict[str, Any], name: str = "model.safetensors") -> None:
    put(folder, name, tensors)
    put(folder, "config.json", settings)


def check_eagle(head: EagleHead, tensors: Tensors, layer: str = "midlayer") -> None:
    """Every tensor of the file is where it belongs, and none is left over."""
    state = head.state_dict()
    renamed = {name.replace(layer, "midlayer"): value for name, value in tensors.items() if name not in ("d2t", "t2d")}
    renamed.setdefault("embed_tokens.weight", EMBEDDING)
    assert state.keys() == renamed.keys() | {"tokens"}
    for name, value in renamed.items():
        assert torch.equal(state[name], value), name
        assert state[name].dtype is torch.float32
    assert all(value.device.type == "cpu" for value in (*head.parameters(), *head.buffers()))


def outcome(head: EagleHead) -> list[Tensor]:
    """What each part of a head makes of the same numbers."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(1, 3, head.fc.in_features, generator=generator)
    hidden = head.fuse(features)
    residual, (q, k, v) = head.midlayer.begin(head.embed_tokens(torch.tensor([[1, 5, VOCAB - 1]])), hidden)
    cos, sin = head.positions(hidden, torch.tensor([[3, 4, 40]]))
    output = head.midlayer.finish(residual, rotated(q, cos, sin))
    return [hidden, residual, q, k, v, cos, sin, output, head.logits(output), head.fed_back(output)]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_reads_the_published_eagle(folder: Path, name: str) -> None:
    tensors = eagle_tensors() | {"midlayer.self_attn.rotary_emb.inv_freq": random(2)}
    put_eagle(folder, tensors, eagle_config(), name)
    head, facts = eagle(folder)
    del tensors["midlayer.self_attn.rotary_emb.inv_freq"]
    check_eagle(head, tensors)
    assert head.tokens.tolist() == [1, 2, 5, 7, 11]  # d2t is what to add
    made = head.config
    assert (made.feature_layers, made.draft_vocab_size, made.target_hidden_size) == ((2, 5, 7), 5, D)
    assert (made.norm_before_residual, made.norm_before_fc, made.norm_output) == (False, False, False)
    assert (made.layer.vocab_size, made.layer.num_hidden_layers, made.layer.rms_norm_eps) == (VOCAB, 1, 1e-5)
    assert made.layer.head_dim == 6
    assert made.extra["architectures"] == ["LlamaForCausalLMEagle3"]
    assert facts == Facts(None, [], None, False)


def test_reads_speculators(folder: Path) -> None:
    tensors = eagle_tensors("layers.0")
    put_eagle(folder, tensors | {"verifier_lm_head.weight": random(5, D)}, speculators_config())
    head, facts = eagle(folder)
    check_eagle(head, tensors, "layers.0")
    assert head.tokens.tolist() == [1, 2, 5, 7, 11]
    assert head.config.feature_layers == (1, 5, 9)
    assert head.config.norm_before_residual
    assert facts == Facts("meta-llama/Llama-3.1-8B", [], None, False)


def test_the_layer_is_the_same_in_both_layouts(folder: Path) -> None:
    tensors = eagle_tensors()
    put_eagle(folder, tensors, eagle_config(norm_before_residual=True))
    one = outcome(eagle(folder)[0])
    renamed = {name.replace("midlayer", "layers.0"): value for name, value in tensors.items()}
    put_eagle(folder, renamed, speculators_config())
    for a, b in zip(one, outcome(eagle(folder)[0]), strict=True):
        assert torch.equal(a, b)


def test_shards_of_an_eagle_head(folder: Path) -> None:
    tensors = eagle_tensors()
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2])):
        put(folder, f"part{number}.safetensors", {name: tensors[name] for name in part})
    where = {name: f"part{number % 2}.safetensors" for number, name in enumerate(names)}
    put(folder, "model.safetensors.index.json", {"weight_map": where})
    put(folder, "config.json", eagle_config())
    check_eagle(eagle(folder)[0], tensors)


@pytest.mark.parametrize("rows", [VOCAB, VOCAB + 3])
def test_an_own_embedding_is_used(folder: Path, rows: int) -> None:
    own = random(rows, D)
    put_eagle(folder, eagle_tensors() | {"embed_tokens.weight": own}, eagle_config(vocab_size=rows))
    for given in (EMBEDDING, NO_EMBEDDING):
        head = eagle(folder, given)[0]
        assert torch.equal(head.embed_tokens.weight, own[:VOCAB])
        assert head.config.layer.vocab_size == VOCAB


def test_the_targets_embedding_is_copied_into_float32(folder: Path) -> None:
    put_eagle(folder, eagle_tensors(), eagle_config())
    given = torch.nn.Embedding(VOCAB + 2, D).weight
    head = eagle(folder, given)[0]
    assert torch.equal(head.embed_tokens.weight, given[:VOCAB])
    assert head.embed_tokens.weight.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
    assert eagle(folder, given.bfloat16())[0].embed_tokens.weight.dtype is torch.float32


def test_a_target_of_another_width_than_the_head(folder: Path) -> None:
    own = random(VOCAB, D)
    put_eagle(folder, eagle_tensors(width=6) | {"embed_tokens.weight": own}, eagle_config(target_hidden_size=6))
    head = eagle(folder, random(VOCAB, 6), hidden_size=6)[0]
    assert head.config.target_hidden_size == 6
    assert head.fc.in_features == 18
    refused(lambda: eagle(folder), "hidden size of 6", f"has {D}")
    put_eagle(folder, eagle_tensors(width=6), eagle_config(target_hidden_size=6))
    refused(lambda: eagle(folder, random(VOCAB, 6), hidden_size=6), "embedding of width 8")
    refused(lambda: eagle(folder, NO_EMBEDDING, hidden_size=6), "embedding of width 8")


def test_no_map_is_the_identity_for_a_whole_vocabulary_only(folder: Path) -> None:
    tensors = eagle_tensors() | {"lm_head.weight": random(VOCAB, D)}
    del tensors["d2t"], tensors["t2d"]
    for size in (VOCAB, None):
        put_eagle(folder, tensors, eagle_config(draft_vocab_size=size))
        assert eagle(folder)[0].tokens.tolist() == list(range(VOCAB))
    put_eagle(folder, tensors | {"lm_head.weight": random(5, D)}, eagle_config())
    refused(lambda: eagle(folder), "d2t")


@pytest.mark.parametrize("key", ["input_norm.weight", "fc_norm.weight"])
@pytest.mark.parametrize("nested", [False, True])
def test_the_variants(folder: Path, key: str, nested: bool) -> None:
    tensors = eagle_tensors()
    put_eagle(folder, tensors, eagle_config())
    stock = outcome(eagle(folder)[0])
    put_eagle(folder, tensors, eagle_config(norm_before_residual=True))
    residual = outcome(eagle(folder)[0])
    assert torch.equal(residual[0], stock[0])
    assert not torch.equal(residual[1], stock[1])
    put_eagle(folder, tensors, eagle_config(norm_output=True))
    normed = outcome(eagle(folder)[0])
    assert torch.equal(normed[7], stock[7])
    assert torch.equal(normed[9], eagle(folder)[0].norm(stock[7]))
    assert not torch.equal(normed[9], stock[9])
    flag = {"norm_before_fc": True}
    put_eagle(folder, tensors | {key: random(3 * D)}, eagle_config(**{"eagle_config": flag} if nested else flag))
    head = eagle(folder)[0]
    features = random(2, 3 * D)
    scale = load_file(folder / "model.safetensors")[key]
    root = features.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    torch.testing.assert_close(head.fuse(features), linear(features * root * scale, tensors["fc.weight"]))


def test_biases_of_the_layer(folder: Path) -> None:
    sizes = {"q_proj": 24, "k_proj": 12, "v_proj": 12, "o_proj": D}
    biases = {f"midlayer.self_attn.{name}.bias": random(size) for name, size in sizes.items()}
    put_eagle(folder, eagle_tensors() | biases, eagle_config(attention_bias=True))
    check_eagle(eagle(folder)[0], load_file(folder / "model.safetensors"))
    put_eagle(folder, eagle_tensors() | biases, eagle_config())
    refused(lambda: eagle(folder), "midlayer.self_attn.k_proj.bias")


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
ROPES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"rope_type": "default", "rope_theta": 10000.0}),
    ({"rope_theta": None, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 10000.0}),
    ({"rope_theta": 500000.0, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 500000.0}),
    ({"rope_theta": 500000, "rope_scaling": LLAMA3}, {"rope_theta": 500000, **LLAMA3}),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
]


@pytest.mark.parametrize(("given", "meant"), ROPES)
@pytest.mark.parametrize("is_speculators", [False, True])
def test_positions_are_the_heads_own(
    folder: Path, given: dict[str, Any], meant: dict[str, Any], is_speculators: bool
) -> None:
    settings = eagle_config(**given)
    if is_speculators:
        settings = speculators_config(transformer_layer_config=layer_config(**given))
    put_eagle(folder, eagle_tensors(), settings)
    rotary = LlamaRotaryEmbedding(LlamaConfig(**layer_config(), rope_parameters=dict(meant)))
    head = eagle(folder)[0]
    assert torch.equal(head.rotary.inv_freq, rotary.inv_freq)
    ids = torch.tensor([[3, 60]])
    for mine, theirs in zip(head.positions(random(1, 2, D), ids), rotary(random(1, 2, D), ids), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({}, (2, 5, 7)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 5, LAYERS]}, (0, 5, LAYERS)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]}}, (2, 5, 7)),  # whose outputs are read
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, LAYERS - 1]}}, (0, LAYERS)),
        ({"eagle_config": {"use_aux_hidden_state": True}, "eagle_aux_hidden_state_layer_ids": None}, (2, 5, 7)),
    ],
)
def test_feature_layers(folder: Path, settings: dict[str, Any], layers: tuple[int, ...]) -> None:
    put_eagle(folder, eagle_tensors() | {"fc.weight": random(D, len(layers) * D)}, eagle_config(**settings))
    assert eagle(folder)[0].config.feature_layers == layers


@pytest.mark.parametrize("ids", [[3, 5, LAYERS + 1], [-1, 5, 7], [1.0, 5, 7], ["1", 5, 7], [True, 5, 7], 3, "abc", {}])
@pytest.mark.parametrize("nested", [False, True])
def test_feature_layers_out_of_range(folder: Path, ids: Any, nested: bool) -> None:
    settings = {"eagle_aux_hidden_state_layer_ids": ids}
    if nested:
        ids = [i - 1 if type(i) is int else i for i in ids] if isinstance(ids, list) else ids
        settings = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    put_eagle(folder, eagle_tensors(), eagle_config(**settings))
    refused(lambda: eagle(folder), str(ids), f"has {LAYERS}")


def test_feature_layers_of_a_target_too_shallow(folder: Path) -> None:
    put_eagle(folder, eagle_tensors(), eagle_config())
    refused(lambda: eagle(folder, num_layers=2), "layers [2, 1, -1]", "has 2")


BAD_EAGLE: dict[str, tuple[Callable[[Tensors], Tensors], dict[str, Any], list[str]]] = {
    "no fc": (with_changed(fc_weight=None), {}, ["lack fc.weight"]),
    "no projection": (with_changed(midlayer_self_attn_k_proj_weight=None), {}, ["midlayer.self_attn.k_proj.weight"]),
    "no norm before fc": (with_changed(), {"norm_before_fc": True}, ["lack fc_norm.weight"]),
    "no output": (with_changed(lm_head_weight=None), {}, ["lack lm_head.weight"]),
    "four features": (with_changed(fc_weight=random(D, 4 * D)), {}, ["fc.weight", "[8, 32]", "[8, 24]"]),
    "NaN": (with_changed(norm_weight=nan_at_the_end(D)), {}, ["norm.weight", "NaN"]),
    "hidden size": (with_changed(), {"hidden_size": 16}, ["hidden size of 16", f"has {D}"]),
    "target's hidden size": (with_changed(), {"target_hidden_size": 4}, ["hidden size of 4", f"has {D}"]),
    "vocabulary": (with_changed(), {"vocab_size": 11}, ["vocabulary of 11", f"has {VOCAB}"]),
    "embedding": (lambda tensors: tensors | {"embed_tokens.weight": random(9, D)}, {}, ["vocabulary of 9"]),
    "narrow embedding": (lambda tensors: tensors | {"embed_tokens.weight": random(VOCAB, 4)}, {}, ["width 8"]),
    "ids too large": (with_changed(d2t=torch.tensor([0, 0, 0, 0, 8])), {}, ["d2t", "12"]),
    "ids too small": (with_changed(d2t=torch.tensor([-1, 0, 0, 0, 0])), {}, ["d2t", "-1"]),
    "ids twice": (with_changed(d2t=torch.tensor([1, 0, 0, 0, 0])), {}, ["d2t", "twice"]),
    "ids in float": (with_changed(d2t=torch.zeros(5)), {}, ["d2t", "float32"]),
    "fewer ids": (with_changed(d2t=torch.zeros(4, dtype=torch.int64)), {}, ["d2t", "[4]", "[5]"]),
    "more tokens than ids": (with_changed(), {"draft_vocab_size": 10**15}, ["d2t", "[5]"]),
    "query norm": (lambda tensors: tensors | {"midlayer.self_attn.q_norm.weight": random(6)}, {}, ["q_norm.weight"]),
    "norms of each feature": (lambda tensors: tensors | {"fc_norm.0.weight": random(D)}, {}, ["fc_norm.0.weight"]),
    "norm nobody asked for": (lambda tensors: tensors | {"input_norm.weight": random(3 * D)}, {}, ["fc_norm.weight"]),
    "two layers": (lambda tensors: tensors | {"layers.1.mlp.up_proj.weight": random(10, D)}, {}, ["layers.1."]),
    "int8": (with_changed(fc_weight=torch.ones(D, 3 * D, dtype=torch.int8)), {}, ["fc.weight", "int8"]),
    "size in words": (with_changed(), {"hidden_size": "eight"}, ["config.json", "hidden_size"]),
    "vocabulary in words": (with_changed(), {"draft_vocab_size": "five"}, ["config.json"]),
    "activation": (with_changed(), {"hidden_act": "nonsense"}, ["config.json", "nonsense"]),
    "no heads": (with_changed(), {"num_attention_heads": 0}, ["config.json"]),
    "rope": (with_changed(), {"rope_scaling": {"rope_type": "nonsense"}}, ["config.json", "nonsense"]),
    "theta": (with_changed(), {"rope_theta": "big"}, ["config.json"]),
    "another model's": (with_changed(), {"hidden_size": None, "head_dim": None}, ["hidden size of 4096"]),
}


@pytest.mark.parametrize("case", BAD_EAGLE)
def test_bad_eagle_heads_are_refused_by_name(folder: Path, case: str) -> None:
    change, settings, words = BAD_EAGLE[case]
    put_eagle(folder, change(eagle_tensors()), eagle_config(**settings))
    refused(lambda: eagle(folder), *words)


def test_an_eagle_head_without_config_or_weights(folder: Path) -> None:
    refused(lambda: eagle(folder), "pytorch_model.bin")
    put(folder, "model.safetensors", eagle_tensors())
    refused(lambda: eagle(folder), "config.json")


def test_code_and_half_files_of_eagle_heads(folder: Path, tmp_path: Path) -> None:
    put_eagle(folder, eagle_tensors() | {"fc.weight": Evil(tmp_path / "ran")}, eagle_config(), "pytorch_model.bin")
    refused(lambda: eagle(folder), "pytorch_model.bin", "code", "safetensors")
    assert not (tmp_path / "ran").exists()
    put_eagle(folder, eagle_tensors(), eagle_config())
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    refused(lambda: eagle(folder), "model.safetensors")


def our_eagle(**changed: Any) -> EagleHead:
    settings = {"draft_vocab_size": 4, "target_hidden_size": D, "feature_layers": (1, 4, 10)} | changed
    rope, more = dict(settings.pop("rope", ROPES[0][1])), settings.pop("more", {})
    layer = LlamaConfig(**layer_config(**more), num_hidden_layers=1, rope_parameters=rope)
    ids = torch.tensor([1, 2, 6, 11])
    head = EagleHead(EagleConfig(layer=layer, **settings), tokens=ids)
    for value in head.parameters():
        torch.nn.init.normal_(value)
    return head


EAGLES: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    {"rope": {"rope_theta": 500000.0, **LLAMA3}},
    {"more": {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "num_key_value_heads": 1}},
    {"rope": {"rope_theta": 20000.0, "rope_type": "default"}, "feature_layers": (0, 3)},
]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("changed", EAGLES)
def test_our_eagle_head_comes_back(folder: Path, changed: dict[str, Any], keep: bool) -> None:
    head = our_eagle(**changed)
    about = {"base": "a/b", "accuracies": [0.75], "expected_length": 3.5, "max_position_embeddings": 512}
    write_eagle(head, folder, **about, keep_embedding=keep)
    read, facts = eagle(folder, NO_EMBEDDING if keep else head.embed_tokens.weight)
    assert read.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(value, head.state_dict()[name]) for name, value in read.state_dict().items())
    for a, b in zip(outcome(read), outcome(head), strict=True):
        assert torch.equal(a, b)
    assert read.config.feature_layers == head.config.feature_layers
    assert read.config.layer.max_position_embeddings == 512
    assert facts == Facts("a/b", [0.75], 3.5, False)
    assert {file.name for file in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert kind_of(folder) == "eagle3"


def test_our_eagle_head_is_the_published_layout_for_others(folder: Path) -> None:
    head = our_eagle(norm_before_fc=True)
    write_eagle(head, folder, base="b", accuracies=[], expected_length=None, max_position_embeddings=512)
    tensors = load_file(folder / "model.safetensors")
    names = {name for name in eagle_tensors() if name not in ("d2t", "t2d")}
    assert tensors.keys() == names | {"d2t", "t2d", "input_norm.weight"}
    assert tensors["d2t"].tolist() == [1, 1, 4, 8]
    assert tensors["d2t"].dtype is torch.int64
    assert tensors["t2d"].dtype is torch.bool
    assert tensors["t2d"].nonzero().view(-1).tolist() == [1, 2, 6, 11]
    assert len(tensors["t2d"]) == VOCAB
    written = json.loads((folder / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (written["rope_theta"], written["rope_scaling"]) == (10000.0, None)
    assert (written["vocab_size"], written["draft_vocab_size"]) == (VOCAB, 4)
    assert (written["num_hidden_layers"], written["max_position_embeddings"]) == (1, 512)


# What kind

KINDS: list[tuple[Any, str | None]] = [
    (config(), "medusa"),
    (vllm_config(), "medusa"),
    ({"architectures": ["MedusaModel"]}, "medusa"),
    ({"architectures": ["LlamaForCausalLM"], "medusa_num_heads": 5, "model_type": "llama"}, "medusa"),
    (eagle_config(), "eagle3"),
    ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, "eagle3"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "eagle3"),
    ({"architectures": ["Eagle3LlamaForCausalLM"]}, "eagle3"),
    (speculators_config(), "eagle3"),
    (speculators_config(architectures=None, draft_vocab_size=None), "eagle3"),
    (speculators_config(architectures=["DFlashDraftModel"], speculators_model_type="dflash"), None),
    ({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64}, None),
    ({"architectures": None}, None),
    ({"architectures": [3]}, None),
    ({"architectures": 3, "model_type": ["medusa"]}, None),
    ([], None),
    ("medusa", None),
]


@pytest.mark.parametrize(("content", "kind"), KINDS)
def test_kind_by_config(folder: Path, content: Any, kind: str | None) -> None:
    put(folder, "config.json", content)
    assert kind_of(folder) == kind
    assert kind_of(str(folder)) == kind


@pytest.mark.parametrize("name", ["medusa_lm_head.pt", "medusa_lm_head.safetensors"])
def test_kind_by_file(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"not even read")
    assert kind_of(folder) == "medusa"
    (folder / "config.json").write_text("{broken")
    assert kind_of(folder) == "medusa"
    put(folder, "config.json", {"model_type": "llama"})  # a model's folder that heads were put into
    assert kind_of(folder) is None


def test_kind_of_anything_else(folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")
    (folder / "deep").mkdir()
    (folder / "deep" / "config.json").write_text("[" * 100_000)
    (folder / "bytes").mkdir()
    (folder / "bytes" / "config.json").write_bytes(b"\xff\xfe")
    (folder / "folder" / "config.json").mkdir(parents=True)
    names: list[Any] = ["model.gguf", "nowhere", "deep", "bytes", "folder", "a" * 5000, "nul\0", "\udcff", ""]
    assert [kind_of(folder / name) for name in names] == [None] * len(names)
    assert kind_of("HuggingFaceTB/SmolLM2-135M-Instruct") is None
    assert kind_of("") is None
