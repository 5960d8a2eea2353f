"""float32 arithmetic on bfloat16 weights: the same numbers as the widened weights, and only where nothing is lost."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from flashspec.backends import half, hf
from flashspec.backends.half import HalfLinear, Kernel, compiled, halved


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    found = compiled(tmp_path_factory.mktemp("kernels"))
    assert found is not None
    return found


@pytest.mark.parametrize("rows", [*range(1, 14), 19, 48, 49, 70])
@pytest.mark.parametrize(("size_in", "size_out"), [(16, 6), (64, 7), (39, 5), (7, 1), (130, 64), (256, 33)])
def test_products_are_those_of_the_widened_weights(kernel: Kernel, rows: int, size_in: int, size_out: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(size_out, size_in, generator=generator).bfloat16()
    x = torch.randn(rows, size_in, generator=generator)
    for bias in (None, torch.randn(size_out, generator=generator)):
        exact = nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
        found = HalfLinear(weight, bias, kernel)(x)
        assert found.dtype is torch.float32
        assert float((found - exact).abs().max()) < 1e-5 * size_in**0.5


def test_shapes_and_strides_of_the_input(kernel: Kernel) -> None:
    weight = torch.randn(6, 32).bfloat16()
    layer = HalfLinear(weight, None, kernel)
    x = torch.randn(2, 64, 3).transpose(1, 2)[:, :, ::2]  # [2, 3, 32], not contiguous
    assert torch.allclose(layer(x), nn.functional.linear(x, weight.float()), atol=1e-5)
    assert layer(torch.randn(0, 32)).shape == (0, 6)


def test_a_prompt_in_and_out_of_inference_mode(kernel: Kernel) -> None:
    half.shared_buffer.cache_clear()
    layer, x = HalfLinear(torch.randn(6, 32).bfloat16(), None, kernel), torch.randn(70, 32)
    with torch.inference_mode():
        inside = layer(x)
    assert torch.equal(layer(x), inside)


def test_only_weights_that_bfloat16_holds_are_halved(kernel: Kernel) -> None:
    exact = torch.randn(8, 16).bfloat16().float()
    model = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 16), nn.Linear(16, 8))
    model[0].weight.data = exact.clone()
    model[2].weight.data = exact.clone()
    model[2].weight.data[3, 5] += 1e-6 * exact[3, 5].abs() + 1e-30
    assert halved(exact) is not None
    assert halved(model[2].weight) is None
    expected = model(torch.ones(3, 16))
    assert hf.pack_linears(model, kernel=kernel) == {"bfloat16": 1, "oneDNN": 0}
    assert [type(layer) for layer in model] == [HalfLinear, nn.Linear, nn.Linear]
    assert torch.allclose(model(torch.ones(3, 16)), expected, atol=1e-5)


def test_the_library_is_compiled_once(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled(tmp_path) is not None
    monkeypatch.setattr(half, "_compile", None)  # not called again
    assert compiled(tmp_path) is not None
    assert [file.suffix for file in tmp_path.iterdir()] == [".so"]


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_layers_stay_as_they_are(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    assert compiled(tmp_path) is None


def test_a_library_that_is_no_library(kernel: Kernel, tmp_path: Path) -> None:
    compiled(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    for file in (tmp_path / "good").iterdir():
        (tmp_path / "bad" / file.name).write_bytes(b"not a library")
    assert compiled(tmp_path / "bad") is None


def test_a_kernel_that_computes_wrong_numbers_is_not_used(kernel: Kernel, caplog: pytest.LogCaptureFixture) -> None:
    def zeros(x: int, scratch: int, weight: int, bias: int, y: int, rows: int, size_in: int, size_out: int) -> None:
        ctypes.memset(y, 0, 4 * rows * size_out)

    assert not half._is_right(zeros)
    assert "wrong numbers" in caplog.text
