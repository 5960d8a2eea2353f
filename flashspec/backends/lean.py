"""Llama-like models with fewer calls for a token: small models on a CPU wait for Python longer than for memory.

The same arithmetic in another grouping, by kernels (decode.py) where there are any; logits differ by rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from flashspec.backends.decode import LANES, DecodeKernels, usable

FAMILIES = ("Llama", "Qwen2", "Mistral")  # one formula each for norm, attention and MLP; their classes are checked


class LeanNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight in one call."""

    def __init__(self, norm: Any, kernels: DecodeKernels | None) -> None:
        super().__init__()
        self.weight, self.eps, self.shape = norm.weight, norm.variance_epsilon, tuple(norm.weight.shape)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels is not None and usable(x):
            return self.kernels.rms_norm(x, self.weight, self.eps)
        return nn.functional.rms_norm(x, self.shape, self.weight, self.eps)


class LeanAttention(nn.Module):
    """Attention with one projection for queries, keys and values, and one rotation for queries and keys."""

    config: Any
    head_dim: int

    def __init__(self, attention: Any, kernels: DecodeKernels | None) -> None:
        super().__init__()
        self.kernels = kernels
        # what attention functions and caches read
        for name in ("config", "layer_idx", "head_dim", "num_key_value_groups", "scaling", "is_causal"):
            setattr(self, name, getattr(attention, name))
        self.sliding_window = getattr(attention, "sliding_window", getattr(self.config, "sliding_window", None))
        self.qkv_proj = joined([attention.q_proj, attention.k_proj, attention.v_proj])
        self.o_proj = attention.o_proj
        self.heads = attention.q_proj.out_features // self.head_dim
        self.rotated = self.heads + attention.k_proj.out_features // self.head_dim

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        rows, m, _ = hidden_states.shape
        states = self.qkv_proj(hidden_states).view(rows, m, -1, self.head_dim)
        if self.kernels is not None and usable(states, *position_embeddings) and self.head_dim % (2 * LANES) == 0:
            self.kernels.rotate(states, self.rotated, *position_embeddings)
            states = states.transpose(1, 2)
            rotated = states[:, : self.rotated]
        else:
            states = states.transpose(1, 2)
            rotated = rotate(states[:, : self.rotated], *position_embeddings)
        query, key, value = rotated[:, : self.heads], rotated[:, self.heads :], states[:, self.rotated :]
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling,
            sliding_window=self.sliding_window, **kwargs,
        )  # fmt: skip
        return self.o_proj(output.reshape(rows, m, -1)), weights


class LeanMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with one projection for gate and up."""

    def __init__(self, mlp: Any, kernels: DecodeKernels | None) -> None:
        super().__init__()
        self.kernels = kernels if isinstance(mlp.act_fn, nn.SiLU | SiLUActivation) else None
        self.gate_up_proj = joined([mlp.gate_proj, mlp.up_proj])
        self.down_proj, self.act_fn = mlp.down_proj, mlp.act_fn

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        gate, up = both.chunk(2, -1)
        if self.kernels is not None and usable(both) and gate.shape[-1] % LANES == 0:
            inner = self.kernels.gated(both)
        else:
            inner = self.act_fn(gate) * up
        output: Tensor = self.down_proj(inner)
        return output


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions for x [rows, heads, m, d], with cos and sin [rows, m, d] of two equal halves."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None, :, :half]
    y = x * cos
    y[..., :half].addcmul_(x[..., half:], sin, value=-1)
    y[..., half:].addcmul_(x[..., :half], sin)
    return y


@torch.no_grad()
def joined(layers: list[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are theirs, one after the other. Theirs are freed with them."""
    weight = torch.cat([layer.weight for layer in layers])
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=layers[0].bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if layers[0].bias is not None:
        layer.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]), requires_grad=False)
    return layer


def make_lean(model: nn.Module, kernels: DecodeKernels | None = None) -> dict[str, int]:
    """Replace norms, attentions and MLPs of a Llama, Qwen2 or Mistral model, in place; other modules stay.

    Before layers are packed or quantised, which then find the joined ones. For inference only.

    Returns:
        how many modules of each kind were replaced.
    """
    counts: dict[str, int] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            lean = _lean(child, kernels)
            if lean is not None:
                setattr(parent, name, lean)
                kind = type(lean).__name__
                counts[kind] = counts.get(kind, 0) + 1
    return counts


def _lean(module: nn.Module, kernels: DecodeKernels | None) -> nn.Module | None:
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    for family in FAMILIES:
        if kind.__name__ == f"{family}RMSNorm":
            return LeanNorm(module, kernels)
        plain = all(type(child) is nn.Linear for name, child in module.named_children() if name.endswith("_proj"))
        if kind.__name__ == f"{family}Attention" and plain:
            return LeanAttention(module, kernels)
        if kind.__name__ == f"{family}MLP" and plain:
            return LeanMLP(module, kernels)
    return None
