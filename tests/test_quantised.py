"""Cheaper draft models: what 8 and 4 bits explain, a head of fewer tokens, and that outputs stay the target's."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from test_hf import VOCAB, build, some_tokens
from torch import Tensor, nn

from flashspec import loader
from flashspec.backends import half, hf, quantised as cheap
from flashspec.backends.half import HalfLinear, Kernel
from flashspec.backends.quantised import CutHead, QuantisedLinear, compiled, cut_head, frequent_tokens, quantise_linears
from flashspec.core import SamplingParams
from flashspec.drafters.model import ModelDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import OptionError

TEXT = """The city council met on Tuesday to discuss the new bridge over the river. Several residents said that the old
one was too narrow for the traffic of today, and that the repairs of last year had not lasted through the winter.

def mean(numbers: list[float]) -> float:
    if not numbers:
        raise ValueError("no numbers")
    return sum(numbers) / len(numbers)

Water boils at one hundred degrees Celsius at sea level. On a mountain the pressure of the air is lower, so it boils at
a lower temperature, and food takes longer to cook. Question: why does a pressure cooker save time? Answer: it keeps the
steam in, so that the pressure and with it the temperature of the boiling water rise, and the food cooks faster."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    found = compiled(tmp_path_factory.mktemp("kernels"))
    assert found is not None
    return found


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# products


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 7), (39, 5), (7, 1), (576, 33), (1100, 4)])
def test_codes_are_the_nearest(bits: int, size_in: int, size_out: int, kernel: Kernel) -> None:
    weight = random(size_out, size_in)
    layer = QuantisedLinear(weight, None, bits, kernel)
    step = layer.scales.float().repeat_interleave(32, 1)[:, :size_in]
    # half a step, and what rounding a scale or an offset to bfloat16 takes from the ends of a group's range
    ends = weight.abs().max() / 256
    assert bool(((layer.widened(0, size_out) - weight).abs() <= step / 2 + ends).all())
    levels = weight.abs().max() * 2 / (254 if bits == 8 else 15)
    assert float(step.max()) < 1.01 * float(levels)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 7, 9, 48, 49, 70])
@pytest.mark.parametrize(("size_in", "size_out"), [(64, 7), (39, 5), (7, 1), (576, 33), (1100, 4)])
def test_products_are_those_of_the_widened_weights(
    bits: int, rows: int, size_in: int, size_out: int, kernel: Kernel
) -> None:
    x = random(rows, size_in, seed=rows)
    for bias in (None, random(size_out, seed=3)):
        layer = QuantisedLinear(random(size_out, size_in), bias, bits, kernel)
        exact = nn.functional.linear(x, layer.widened(0, size_out).clone(), bias)
        found = layer(x)
        assert found.dtype is torch.float32
        # x is rounded to 1/65534 of its row's range
        assert found.shape == exact.shape
        assert bool(((found - exact).abs() < 1e-4 * size_in**0.5 * float(x.abs().max())).all())


def test_a_hidden_state_with_a_few_huge_entries(kernel: Kernel) -> None:
    weight, x = random(64, 576), random(3, 576)
    x[0, 5] = 1000.0  # 8 bits would round everything else to zero; other rows have their own scale
    exact = x @ weight.T
    without = x.clone()
    without[0, 5] = 0
    layer = QuantisedLinear(weight, None, 8, kernel)
    huge = 1000 * layer.widened(0, 64)[:, 5]
    assert float((layer(x)[0] - huge - (without @ weight.T)[0]).std() / (without @ weight.T)[0].std()) < 0.05
    assert float((layer(x) - exact)[1:].std() / exact[1:].std()) < 0.01


@pytest.mark.parametrize("bits", [8, 4])
def test_shapes_strides_and_zeros(bits: int, kernel: Kernel) -> None:
    weight = random(6, 32)
    weight[2] = 0
    layer = QuantisedLinear(weight, None, bits, kernel)
    x = random(2, 64, 3).transpose(1, 2)[:, :, ::2]  # [2, 3, 32], not contiguous
    assert torch.equal(layer(x), layer(x.contiguous()))
    assert bool((layer(x)[..., 2] == 0).all())
    assert bool((layer(torch.zeros(1, 32)) == 0).all())
    assert layer(torch.randn(0, 32)).shape == (0, 6)


# whole models


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2"])
def test_every_linear_layer_is_replaced(family: str, kernel: Kernel) -> None:
    model = build(family)
    names = {name for name, layer in model.named_modules() if hf.linear_weight(layer) is not None}
    weights = {name: value.clone() for name, value in model.state_dict().items() if "embed" in name}
    counts = quantise_linears(model, 8, kernel=kernel)
    assert counts == {"int8": len(names)}
    assert {name for name, layer in model.named_modules() if isinstance(layer, QuantisedLinear)} == names
    ids = torch.tensor([some_tokens(20)])
    with torch.inference_mode():
        found, expected = model(ids).logits, build(family)(ids).logits
    assert float((found - expected).std() / expected.std()) < 0.05
    for name, value in weights.items():
        assert torch.equal(model.state_dict()[name], value)


def test_four_bits_leave_the_head_eight(kernel: Kernel) -> None:
    model = build("llama")
    cut_head(model, list(range(40)))
    layers = 7 * 3
    assert quantise_linears(model, 4, kernel=kernel) == {"int4": layers, "int8": 1}
    assert model.lm_head.kept.bits == 8
    assert model.model.layers[0].mlp.up_proj.bits == 4


@pytest.mark.parametrize(("bits", "agreement"), [(8, 0.97), (4, 0.6)])
def test_agreement_on_a_real_model(bits: int, agreement: float, kernel: Kernel, smollm2_path: Path) -> None:
    loaded = loader.load_model(smollm2_path, pack=False)
    model, ids = loaded.target.model, torch.tensor([loaded.tokenizer.encode(TEXT)])
    with torch.inference_mode():
        expected = model(ids, use_cache=False).logits[0].argmax(-1)
        quantise_linears(model, bits, kernel=kernel)
        found = model(ids, use_cache=False).logits[0].argmax(-1)
    share = float((found == expected).float().mean())
    print(f"{bits} bits: {share:.3f} of {len(expected)}")
    assert share > agreement


# what cannot be had


def test_what_cannot_be_quantised(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="8 or 4 bits, not 2; use 8"):
        quantise_linears(build("llama"), 2, kernel=kernel)
    with pytest.raises(OptionError, match="bfloat16 on cpu; load it on the CPU in float32"):
        quantise_linears(build("llama").bfloat16(), 8, kernel=kernel)
    with pytest.raises(OptionError, match="on meta"):
        quantise_linears(build("llama").to("meta"), 8, kernel=kernel)
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(OptionError, match="need a C compiler"):
        quantise_linears(build("llama"), 8)
    assert compiled(Path("nowhere")) is None
    assert cheap.fast_bits(None, None) == ()


def test_a_kernel_is_compiled_once_or_for_now(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    assert quantise_linears(model, 8)["int8"] == 22
    assert compiled(tmp_path) is not None
    monkeypatch.setattr(half, "_compile", None)  # not called again
    assert compiled(tmp_path) is not None
    (tmp_path / "bad").mkdir()
    for file in tmp_path.glob("*.so"):
        (tmp_path / "bad" / file.name).write_bytes(b"not a library")
    assert compiled(tmp_path / "bad") is None


def test_a_kernel_that_computes_wrong_numbers_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    def zeros(*arguments: int) -> None:
        ctypes.memset(arguments[6], 0, 4 * arguments[7] * arguments[9])

    assert not cheap._is_right(zeros)
    assert "wrong numbers" in caplog.text


def test_fast_bits_are_measured(kernel: Kernel, tmp_path: Path) -> None:
    def slow(*arguments: int) -> None:
        kernel(*arguments)
        if arguments[-1] == 4:
            for _ in range(100):
                kernel(*arguments)

    plain = half.compiled(tmp_path)
    assert 4 not in cheap.fast_bits(slow, plain)
    assert set(cheap.fast_bits(kernel, None)) <= {8, 4}


# a cut head


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3", "gpt2", "phi"])
@pytest.mark.parametrize("keep", [[*range(40), 99, VOCAB - 1], [130, 7, 64]])
def test_kept_logits_are_the_same_and_others_impossible(family: str, keep: list[int]) -> None:
    model = build(family)
    embedding = model.get_input_embeddings().weight.clone()
    cut_head(model, keep)
    ids = torch.tensor([some_tokens(9), some_tokens(9, 1)])
    with torch.inference_mode():
        found, expected = model(ids).logits, build(family)(ids).logits
    assert found.shape == expected.shape
    assert torch.allclose(found[..., keep], expected[..., keep], atol=1e-5)
    others = [token for token in range(VOCAB) if token not in keep]
    assert bool((found[..., others] == float("-inf")).all())
    assert torch.equal(model.get_input_embeddings().weight, embedding)


@pytest.mark.parametrize("packing", ["bfloat16", "oneDNN", "int8", "int4"])
def test_a_cut_head_is_packed_like_any_layer(packing: str, kernel: Kernel, tmp_path: Path) -> None:
    model, keep = build("llama"), [*range(20), 100]
    model.load_state_dict({name: value.bfloat16().float() for name, value in model.state_dict().items()})
    ids = torch.tensor([some_tokens(9)])
    with torch.inference_mode():
        expected = model(ids).logits
        cut_head(model, torch.tensor(keep))
        if packing.startswith("int"):
            quantise_linears(model, int(packing[3:]), kernel=kernel)
        else:
            hf.pack_linears(model, kernel=half.compiled(tmp_path) if packing == "bfloat16" else None, at_least=0)
        found = model(ids).logits
    kinds = {"bfloat16": HalfLinear, "oneDNN": hf.PackedLinear}
    assert type(model.lm_head) is CutHead
    assert type(model.lm_head.kept) is kinds.get(packing, QuantisedLinear)
    error = float((found - expected)[..., keep].std() / expected.std())
    assert error < {"int8": 0.05, "int4": 0.7}.get(packing, 1e-4)


def test_what_cannot_be_cut(kernel: Kernel) -> None:
    for keep, message in [
        ([], "no token"),
        ([5, VOCAB], f"token {VOCAB}; .* 0 to {VOCAB - 1}"),
        ([3, 9, 3], "3 twice"),
    ]:
        with pytest.raises(OptionError, match=message):
            cut_head(build("llama"), keep)
    model = build("llama")
    cut_head(model, [1, 2])
    with pytest.raises(OptionError, match="is CutHead, and only a plain linear layer can be cut"):
        cut_head(model, [1])


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=24, temperature=0, ignore_eos=True),
        SamplingParams(max_tokens=24, seed=5, temperature=1.0, ignore_eos=True),
    ],
)
def test_outputs_stay_the_target_s(sampling: SamplingParams, kernel: Kernel) -> None:
    def tokens(drafter: Any) -> list[int]:
        engine = LocalEngine(hf.HFTarget(build("llama")), drafter, num_speculative_tokens=4 if drafter else 0)
        return list(engine.generate([some_tokens(9)], sampling)[0].tokens)

    small = build("llama")
    cut_head(small, range(3, 90))
    quantise_linears(small, 4, kernel=kernel)
    assert tokens(ModelDrafter(hf.HFTarget(small), vocab_size=VOCAB)) == tokens(None)


# which tokens


class Words:
    """A tokenizer as ``frequent_tokens`` knows it."""

    def __init__(self, vocabulary: list[str], special: list[int], added: list[int]) -> None:
        self.vocabulary, self.all_special_ids, self.added = vocabulary, special, added

    def get_vocab(self) -> dict[str, int]:
        return {text: token for token, text in enumerate(self.vocabulary)}

    def get_added_vocab(self) -> dict[str, int]:
        return {self.vocabulary[token]: token for token in self.added}


def test_bytes_and_special_tokens_are_kept_wherever_they_are() -> None:
    words = [f"word{number}" for number in range(400)]
    last = ["<0x0A>", "<0x0a>", "e", "\u2581", "中", "<eos>", "<turn>"]
    tokenizer = Words(words + last, [405], [406])
    kept = frequent_tokens(tokenizer, 300, 407)
    assert kept == [*range(295), 400, 402, 403, 405, 406]
    assert frequent_tokens(tokenizer, 406, 406) == list(range(406))  # an id that the model lacks
    many = Words([f"<0x{number:02X}>" for number in range(256)] + ["<s>", "<t>"], [256], [257])
    assert frequent_tokens(many, 256, 258) == list(range(258))


@pytest.mark.parametrize("count", [255, 408, 0, -1])
def test_counts_outside_the_limits(count: int) -> None:
    with pytest.raises(OptionError, match=f"{count} tokens; keep from 256 .* to 407"):
        frequent_tokens(Words(["a"] * 407, [], []), count, 407)


def test_a_real_vocabulary(smollm2_path: Path) -> None:
    tokenizer = tf.AutoTokenizer.from_pretrained(smollm2_path)
    kept = frequent_tokens(tokenizer, 16384, 49152)
    assert len(kept) == 16384 == len(set(kept))
    assert tokenizer.eos_token_id in kept
    ids = tokenizer.encode(TEXT)
    assert sum(token in set(kept) for token in ids) / len(ids) > 0.93
