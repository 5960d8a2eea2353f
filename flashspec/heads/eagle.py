"""An EAGLE-3 head: one decoder layer that reads the target's inner states and its own, and guesses token by token.

At position t it reads the states of token t (the inputs of three of the target's layers) and token t + 1, and guesses
token t + 2; beyond what the target has seen, its own output stands for the states. It knows the network and its
layouts on disk; who drafts with it is elsewhere.

Source: Li et al., EAGLE-3 (arXiv 2503.01840); layout of the published weights: SafeAILab/EAGLE.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig:
    """What an EAGLE-3 head is made of."""

    layer: LlamaConfig  # of the head's one layer; its vocab_size is the target's
    draft_vocab_size: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]  # of the target; what goes into these layers is what the head reads
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False  # whether its own output is normalised before it is read again
    extra: dict[str, Any] = field(default_factory=dict)  # what else stood in the file


class EagleAttention(nn.Module):
    """Projections over [embedding, state], both normalised; who attends to what is the caller's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        bias, width = bool(getattr(config, "attention_bias", False)), 2 * config.hidden_size
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [rows, heads, m, head_dim] of x [rows, m, 2 d], not yet rotated."""
        rows, m, _ = x.shape
        q, k, v = (proj(x).view(rows, m, -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class EagleLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        layer = config.layer
        self.hidden_norm = LlamaRMSNorm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.self_attn = EagleAttention(layer)
        self.mlp = LlamaMLP(layer)
        self.norm_before_residual = config.norm_before_residual

    def begin(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The residual [rows, m, d], and queries, keys and values."""
        normed = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embedded), normed], -1)
        return normed if self.norm_before_residual else hidden, self.self_attn.project(x)

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [rows, m, d] from what attention found, [rows, heads, m, head_dim]."""
        rows, _, m, _ = attended.shape
        hidden = residual + self.self_attn.o_proj(attended.transpose(1, 2).reshape(rows, m, -1))
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class EagleHead(nn.Module):
    """fc -> one layer -> norm -> output layer over the draft vocabulary.

    Args:
        config: its make.
        tokens: the target's ids of its draft vocabulary, [draft_vocab_size]; None: the first ones.
    """

    tokens: Tensor

    def __init__(self, config: EagleConfig, *, tokens: Tensor | None = None) -> None:
        super().__init__()
        self.config = config
        layer = config.layer
        width = len(config.feature_layers) * config.target_hidden_size
        self.fc_norm = LlamaRMSNorm(width, eps=layer.rms_norm_eps) if config.norm_before_fc else nn.Identity()
        self.fc = nn.Linear(width, layer.hidden_size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = LlamaRMSNorm(layer.hidden_size, eps=layer.rms_norm_eps)
        self.lm_head = nn.Linear(layer.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(layer.vocab_size, layer.hidden_size)
        self.rotary = LlamaRotaryEmbedding(layer)
        self.register_buffer("tokens", torch.arange(config.draft_vocab_size) if tokens is None else tokens)

    @property
    def dtype(self) -> torch.dtype:
        """Of the states it reads."""
        return self.embed_tokens.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    def fuse(self, features: Tensor) -> Tensor:
        """States [..., d] of the target's features [..., layers * target_hidden_size]."""
        fused: Tensor = self.fc(self.fc_norm(features.to(self.dtype)))
        return fused

    def positions(self, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, m, head_dim] for position ids [rows, m]."""
        cos, sin = self.rotary(hidden, position_ids)
        return cos, sin

    def logits(self, output: Tensor) -> Tensor:
        """[..., draft_vocab_size] of the layer's output [..., d]."""
        logits: Tensor = self.lm_head(self.norm(output))
        return logits

    def fed_back(self, output: Tensor) -> Tensor:
        """What stands for the target's states at the next position."""
        return self.norm(output) if self.config.norm_output else output

    @torch.no_grad()
    def start_from(self, input_embedding: Tensor, output_embedding: Tensor) -> None:
        """Read tokens and guess as the target does."""
        self.embed_tokens.weight.copy_(input_embedding)
        self.lm_head.weight.copy_(output_embedding[self.tokens])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [rows, heads, m, head_dim] turned by positions cos and sin [rows, m, head_dim], two equal halves."""
    half = x.shape[-1] // 2
    turned = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos[:, None] + turned * sin[:, None]
