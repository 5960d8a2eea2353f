"""The decode kernels against torch in double precision, at every shape that they take, and where they must not run."""

from __future__ import annotations

import logging
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_hf import build, decode_kernels
from torch import Tensor, nn

from flashspec.backends import decode, hf
from flashspec.backends.decode import MOST_QUERIES, MOST_WIDTH, DecodeKernels, usable
from flashspec.backends.lean import make_lean, rotate

LOWEST = torch.finfo(torch.float32).min


@pytest.fixture(scope="module", autouse=True)
def kernels() -> DecodeKernels:
    found = decode_kernels()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def exact_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[rows, m, heads, d] in double precision, softmax written out."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scale + mask.double()[..., : key.shape[2]]
    return (torch.softmax(scores, -1) @ value).transpose(1, 2)


@st.composite
def attentions(draw: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows, kv_heads = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    m = draw(st.integers(1, 40))
    group = draw(st.integers(1, MOST_QUERIES))
    d, width = 8 * draw(st.integers(1, MOST_WIDTH // 8)), draw(st.integers(1, 200))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    size = draw(st.sampled_from([0.1, 1.0, 30.0]))  # 30: weights that underflow

    def random(*shape: int) -> Tensor:
        return size * torch.randn(*shape, generator=generator)

    query = random(rows, m, kv_heads * group, d).transpose(1, 2)  # as a projection leaves it
    key, value = (random(rows, kv_heads, width + 7, d)[:, :, :width] for _ in range(2))  # as a cache leaves them
    mask = torch.zeros(draw(st.sampled_from([1, rows])), 1, m, width + draw(st.integers(0, 2)))
    mask.masked_fill_(torch.rand(mask.shape, generator=generator) < draw(st.sampled_from([0.0, 0.5, 0.98])), LOWEST)
    for row in mask.view(-1, mask.shape[-1]):
        row[draw(st.integers(0, width - 1))] = 0
    return query, key, value, mask


@settings(max_examples=150, deadline=None)
@given(attentions())
def test_attention(case: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    query, key, value, mask = case
    kernels = decode_kernels()
    assert kernels is not None
    assert kernels.can_attend(*case)
    found = kernels.attention(query, key, value, mask, query.shape[-1] ** -0.5)
    expected = exact_attention(query, key, value, mask, query.shape[-1] ** -0.5)
    assert found.shape == expected.shape
    assert found.is_contiguous()
    scores = float(query.abs().max() * key.abs().max()) * query.shape[-1] ** 0.5  # rounding grows with what is added up
    assert float((found - expected).abs().max()) <= 1e-6 * max(scores, 1) * float(value.abs().max())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.integers(1, 7), st.integers(0, 99))
def test_packed_rows_are_those_of_each_alone(counts: list[int], group: int, seed: int) -> None:
    kernels = decode_kernels()
    assert kernels is not None
    generator = torch.Generator().manual_seed(seed)
    starts = [0, *accumulate(counts)]
    query = torch.randn(1, starts[-1], 2 * group, 16, generator=generator).transpose(1, 2)
    key, value = (torch.randn(len(counts), 2, 50, 16, generator=generator) for _ in range(2))
    mask = torch.zeros(1, 1, starts[-1], 50)
    mask.masked_fill_(torch.rand(mask.shape, generator=generator) < 0.5, LOWEST)[..., 7] = 0
    found = kernels.attention(query, key, value, mask, 0.25, starts)
    assert found.shape == (1, starts[-1], 2 * group, 16)
    for row, (start, end) in enumerate(pairwise(starts)):
        own = key[row : row + 1], value[row : row + 1], mask[:, :, start:end]
        assert torch.equal(found[:, start:end], kernels.attention(query[:, :, start:end], *own, 0.25))


def test_what_nobody_sees_is_not_read(kernels: DecodeKernels) -> None:
    """Behind a row's last key lies whatever was there before: not a number, say."""
    query, key, value = (torch.randn(2, 2, n, 16) for n in (1, 90, 90))
    mask = torch.full((2, 1, 1, 90), LOWEST)
    mask[0, ..., 3:70] = mask[1, ..., :20] = 0
    expected = exact_attention(query, key, value, mask, 0.25)
    for store in (key, value):
        store[0, :, 70:] = store[0, :, :3] = store[1, :, 20:] = float("nan")
    assert torch.allclose(kernels.attention(query, key, value, mask, 0.25).double(), expected, atol=1e-6)


def test_a_head_is_the_same_alone_and_in_a_batch(kernels: DecodeKernels) -> None:
    """Bit for bit: each row is one task, whoever else is there."""
    query, key, value = torch.randn(4, 6, 3, 32), torch.randn(4, 2, 150, 32), torch.randn(4, 2, 150, 32)
    mask = torch.zeros(4, 1, 3, 150)
    mask[2, ..., 40:] = LOWEST
    together = kernels.attention(query, key, value, mask, 0.2)
    for row in range(4):
        part = slice(row, row + 1)
        assert torch.equal(kernels.attention(query[part], key[part], value[part], mask[part], 0.2), together[part])
    short = kernels.attention(query[2:3], key[2:3, :, :40], value[2:3, :, :40], mask[2:3, ..., :40], 0.2)
    assert torch.equal(short, together[2:3])


def test_what_the_attention_kernel_leaves_to_torch(kernels: DecodeKernels) -> None:
    def can(query: Tensor, width: int = 9, mask: Tensor | None = None, store: Tensor | None = None) -> bool:
        key = torch.randn(1, 2, width, query.shape[-1]) if store is None else store
        mask = torch.zeros(1, 1, query.shape[2], width) if mask is None else mask
        return kernels.can_attend(query, key, key, mask)

    assert can(torch.randn(1, 2 * MOST_QUERIES, 3, MOST_WIDTH))
    assert not can(torch.randn(1, 2 * (MOST_QUERIES + 1), 1, 16))
    assert not can(torch.randn(1, 2, 1, MOST_WIDTH + 8))
    assert not can(torch.randn(1, 2, 1, 20))
    assert not can(torch.randn(1, 2, 1, 16).bfloat16())
    assert not can(torch.randn(1, 2, 1, 16), mask=torch.ones(1, 1, 1, 9, dtype=torch.bool))
    assert not can(torch.randn(1, 2, 1, 16), mask=torch.zeros(1, 1, 1, 8))
    assert not can(torch.randn(1, 2, 1, 16), store=torch.randn(1, 2, 16, 9).transpose(2, 3))


@pytest.mark.parametrize("shape", [(8,), (1, 1, 576), (3, 5, 64), (70, 512), (0, 16)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_norms(kernels: DecodeKernels, shape: tuple[int, ...], size: float) -> None:
    x, weight = size * torch.randn(shape), torch.randn(shape[-1])
    expected = nn.functional.rms_norm(x.double(), shape[-1:], weight.double(), 1e-5)
    assert torch.allclose(kernels.rms_norm(x, weight, 1e-5).double(), expected, rtol=1e-5, atol=1e-6)


def test_gates(kernels: DecodeKernels) -> None:
    x = torch.randn(3, 70, 512) * torch.logspace(-3, 3, 512)
    x[0, 0, :8] = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e30, -1e30, 3e38, -3e38])
    gate, up = x.double().chunk(2, -1)
    expected = (nn.functional.silu(gate) * up).float()  # infinite where float32 is
    assert torch.allclose(kernels.gated(x), expected, rtol=1e-5, atol=1e-30)
    assert kernels.gated(torch.full((1, 16), float("nan"))).isnan().all()


@pytest.mark.parametrize("shared", [False, True], ids=["positions by row", "one position for all rows"])
@pytest.mark.parametrize("d", [16, 64, 128])
def test_rotations(kernels: DecodeKernels, shared: bool, d: int) -> None:
    x, angles = torch.randn(3, 5, 7, d), torch.randn(1 if shared else 3, 5, d // 2)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    expected = x.clone()
    expected[:, :, :4] = rotate(x[:, :, :4].transpose(1, 2), cos, sin).transpose(1, 2)
    kernels.rotate(x, 4, cos, sin)
    assert torch.allclose(x, expected, atol=1e-6)
    assert torch.equal(x[:, :, 4:], expected[:, :, 4:])


def test_gradients_and_gaps_are_for_torch(kernels: DecodeKernels) -> None:
    x = torch.randn(4, 32)
    assert not usable(x)
    with torch.no_grad():
        assert usable(x)
        assert not any(map(usable, (x.T, torch.randn(4, 30), x.double())))
    model = build("llama")
    make_lean(model, kernels)
    hf.use_grouped_attention(model, kernels)
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    assert float(model.get_input_embeddings().weight.grad.abs().sum()) > 0


def test_wrong_numbers_are_noticed(
    kernels: DecodeKernels, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    decode.compiled.cache_clear()
    monkeypatch.setattr(DecodeKernels, "gated", lambda self, x: x.chunk(2, -1)[0])
    with caplog.at_level(logging.WARNING, logger="flashspec"):
        assert decode.compiled(tmp_path) is None
    assert "compute wrong numbers" in caplog.text


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert decode.compiled(tmp_path) is None
