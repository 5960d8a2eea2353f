"""Fewer calls, the same logits: lean models against untouched ones, through every path of HFTarget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import sequence
from test_hf import Checked, a_tree, assert_close, build, decode_kernels, plain, some_tokens
from torch import nn

from flashspec import loader
from flashspec.backends import hf, quantised
from flashspec.backends.lean import LeanAttention, LeanMLP, LeanNorm, make_lean, rotate
from flashspec.core import EMPTY, Draft

LEAN = ["llama", "qwen2", "qwen2_windows", "mistral"]
ALL = {"LeanNorm": 7, "LeanAttention": 3, "LeanMLP": 3}


@pytest.mark.parametrize("family", LEAN)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("by_kernel", [False, True])
def test_logits_are_those_of_the_plain_model(family: str, attention: str, by_kernel: bool) -> None:
    model = build(family, attention)
    assert make_lean(model, decode_kernels() if by_kernel else None) == ALL
    ids = torch.tensor([some_tokens(40), some_tokens(40, 1)])
    with torch.inference_mode():
        found, expected = model(ids).logits, build(family, attention)(ids).logits
        assert not torch.equal(found, build("llama")(ids).logits)
    assert_close(found, expected)


@pytest.mark.parametrize("family", LEAN)
@pytest.mark.parametrize("by_kernel", [False, True])
def test_ragged_rows_trees_and_rollback(family: str, by_kernel: bool) -> None:
    model = build(family)
    kernels = decode_kernels() if by_kernel else None
    make_lean(model, kernels)
    hf.pack_linears(model, at_least=0)
    hf.use_grouped_attention(model, kernels)
    checked = Checked(family, model)
    seqs = [sequence(some_tokens(30), name="a"), sequence(some_tokens(9, 1), name="b")]
    drafts = [a_tree(1), Draft.chain(some_tokens(4, 2))]
    checked.score(seqs, drafts, hidden=True)
    for seq, draft in zip(seqs, drafts, strict=True):
        checked.commit(seq, draft, [0], 7)
    checked.score(seqs, [EMPTY, a_tree(3)])


@pytest.mark.parametrize("family", ["gemma3", "gpt2", "phi", "phi3", "qwen3"])
def test_other_architectures_are_left_alone(family: str) -> None:
    """Qwen3 norms its queries and keys, Gemma adds 1 to the weights of its norms."""
    model = build(family)
    kinds = [type(module) for module in model.modules()]
    make_lean(model)
    assert [type(module) for module in model.modules()] == kinds
    assert not any(issubclass(kind, LeanNorm | LeanAttention | LeanMLP) for kind in kinds)


def test_memory_stays_the_same_and_layers_are_joined() -> None:
    model, before = build("qwen2"), build("qwen2")
    make_lean(model)
    count = [sum(parameter.numel() for parameter in m.parameters()) for m in (model, before)]
    assert count[0] == count[1]
    attention, old = model.model.layers[1].self_attn, before.model.layers[1].self_attn
    parts = [old.q_proj, old.k_proj, old.v_proj]
    assert torch.equal(attention.qkv_proj.weight, torch.cat([part.weight for part in parts]))
    assert torch.equal(attention.qkv_proj.bias, torch.cat([part.bias for part in parts]))


def test_layers_that_are_packed_already_are_not_joined() -> None:
    model = build("llama")
    hf.pack_linears(model, at_least=0)
    assert make_lean(model) == {"LeanNorm": 7}


def test_rotation() -> None:
    x, angles = torch.randn(2, 3, 5, 8), torch.randn(2, 5, 4)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    complex_x = torch.complex(x[..., :4], x[..., 4:]) * torch.exp(1j * angles)[:, None]
    assert torch.allclose(rotate(x, cos, sin), torch.cat([complex_x.real, complex_x.imag], -1), atol=1e-5)


def test_a_real_model(smollm2_path: Path) -> None:
    loaded = loader.load_model(smollm2_path, pack=False)
    tokens = loaded.tokenizer.encode("The quick brown fox jumps over the lazy dog. def main():\n    return")
    expected = loaded.target.plain_logits(tokens)
    assert make_lean(loaded.target.model, decode_kernels()) == {"LeanNorm": 61, "LeanAttention": 30, "LeanMLP": 30}
    hf.use_grouped_attention(loaded.target.model, decode_kernels())
    assert float((loaded.target.plain_logits(tokens) - expected).abs().max()) < 1e-4 * float(expected.abs().max())
    assert hf.self_test(loaded.target) < 1e-3


def test_lean_then_cut_then_quantised() -> None:
    if (kernel := quantised._compiled_now()) is None:
        pytest.skip("there is no C compiler")
    model, tokens = build("llama"), some_tokens(20)
    make_lean(model)
    quantised.cut_head(model, range(100))
    assert quantised.quantise_linears(model, 8, kernel=kernel) == {"int8": 4 * 3 + 1}
    assert not any(type(module) is nn.Linear for module in model.modules())
    with torch.inference_mode():
        found = model(torch.tensor([tokens])).logits[0, -1, :100]
    expected = plain("llama", tuple(tokens))[0][:100]
    assert float((found - expected).std() / expected.std()) < 0.05
