"""Medusa heads as a drafter: one state of the target, guesses for each of the next few tokens, a chain or a tree.

It knows heads and sequences' last states; the networks and their files are in ``heads``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from flashspec.core import EMPTY, Draft, Drafter, Score, Sequence, Verdict
from flashspec.drafters.growth import Growth, Siblings, Vocabulary, checked_width, shape_for
from flashspec.heads.medusa import MedusaHeads


class MedusaDrafter(Drafter):
    """Drafts from Medusa heads.

    Args:
        heads: on the target's device.
        width: guesses tried at each depth; 1 drafts chains; None for what was found to pay (``growth.shape_for``).
        siblings: how guesses are chosen where the temperature is not 0: ``"drawn"`` from the heads' distributions,
            ``"top"``, their likeliest ones, or ``"auto"``: drawn in a chain, top in a tree.

    Raises:
        OptionError: ``width`` out of range.
    """

    name = "medusa"
    needs_hidden = True

    def __init__(self, heads: MedusaHeads, *, width: int | None = None, siblings: Siblings = "auto") -> None:
        self.heads = heads
        self.width, self.siblings = checked_width(width), siblings
        self.vocabulary = Vocabulary(heads.vocab_size, heads.tokens)
        self.forward_seconds = 0.0  # inside the heads, so far
        self._states: dict[str, Tensor] = {}  # [d] where the target chose the last token of a sequence

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        live = [i for i, seq in enumerate(seqs) if budgets[i] > 0 and seq.id in self._states]
        drafts = [EMPTY] * len(seqs)
        if not live:
            return drafts
        states = torch.stack([self._states[seqs[i].id] for i in live]).to(self.heads.dtype)
        deepest = min(max(budgets[i] for i in live), self.heads.num_heads)
        started = time.perf_counter()
        logits = self.heads(states, deepest).float()  # [deepest, live, N]
        self.forward_seconds += time.perf_counter() - started
        for row, i in enumerate(live):
            width, drawn = shape_for(seqs[i], self.width, self.siblings)
            growth = Growth(seqs[i], budgets[i], self.vocabulary, width, drawn, self.heads.num_heads, self.rule)
            for depth in range(min(budgets[i], deepest)):
                if growth.frontier:
                    growth.expand(logits[depth, row].expand(len(growth.frontier), -1))
            drafts[i] = growth.draft(self.name)
        return drafts

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], scores: Seq[Score]) -> None:
        for seq, verdict, score in zip(seqs, verdicts, scores, strict=True):
            assert score.hidden is not None
            self._states[seq.id] = score.hidden[verdict.accepted[-1] + 1 if verdict.accepted else 0]

    def forget(self, seq: Sequence) -> None:
        self._states.pop(seq.id, None)

    @torch.inference_mode()
    def dry_run(self, width: int) -> None:
        """The heads' own work for ``width`` sequences, for whoever measures what it costs."""
        self.heads(torch.zeros(width, self.heads.hidden_size, device=self.heads.device, dtype=self.heads.dtype))
