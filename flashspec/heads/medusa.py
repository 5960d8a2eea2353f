"""Medusa heads: guesses for the tokens after the next one, all from the target's last hidden state.

Head i (from 0) reads the state that the output embedding reads and guesses the token i + 2 places further; the target
itself gives the one between. It knows the weights and their layouts on disk; who drafts with them is elsewhere.

Source: Cai et al., Medusa, ICML 2024 (arXiv 2401.10774).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MedusaHeads(nn.Module):
    """K heads: h -> residual blocks h + SiLU(W h + b) -> output layer without a bias.

    Args:
        hidden_size: of the target, d.
        vocab_size: of the target.
        num_heads: K.
        num_layers: residual blocks of each head.
        tokens: ids that the heads can guess, ascending, [N]; None for all.
    """

    tokens: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        num_heads: int = 4,
        num_layers: int = 1,
        tokens: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.num_heads, self.num_layers = num_heads, num_layers
        size = vocab_size if tokens is None else len(tokens)
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers)) for _ in range(num_heads)
        )
        self.outputs = nn.ModuleList(nn.Linear(hidden_size, size, bias=False) for _ in range(num_heads))
        self.register_buffer("tokens", tokens)

    @property
    def dtype(self) -> torch.dtype:
        """Of the states it reads; float32 where its layers were replaced by rounded ones."""
        return next((parameter.dtype for parameter in self.parameters()), torch.float32)

    @property
    def device(self) -> torch.device:
        return next(tensor.device for tensor in (*self.parameters(), *self.buffers()))

    def forward(self, hidden: Tensor, count: int | None = None) -> Tensor:
        """Logits [count, ..., N] of the first ``count`` heads for states [..., d]."""
        return torch.stack([self.head(i, hidden) for i in range(self.num_heads if count is None else count)])

    def head(self, index: int, hidden: Tensor) -> Tensor:
        """Logits [..., N] of one head."""
        for block in self.blocks[index]:  # type: ignore[attr-defined]
            hidden = hidden + nn.functional.silu(block(hidden))
        logits: Tensor = self.outputs[index].forward(hidden)
        return logits

    @torch.no_grad()
    def start_from(self, output_embedding: Tensor) -> None:
        """Begin as the target's own output embedding [vocab, d]: blocks that add nothing, and its rows."""
        rows = output_embedding if self.tokens is None else output_embedding[self.tokens]
        for parameter in self.blocks.parameters():
            parameter.zero_()
        for parameter in self.outputs.parameters():
            parameter.copy_(rows)
