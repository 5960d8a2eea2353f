"""An EAGLE-3 head as a drafter: it reads the target's inner states as it goes, and its own where there are none yet.

It keeps keys and values of what it has read, one pair (states of token t, token t + 1) for each token; those of
guesses are forgotten at the end of a round and read again from the target's own states, which alone are true.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flashspec.cache import Feed, SlotCache, additive_mask
from flashspec.core import EMPTY, Draft, Drafter, Score, Sequence, Verdict
from flashspec.drafters.growth import Growth, Siblings, Vocabulary, checked_width, shape_for
from flashspec.heads.eagle import EagleHead, rotated
from flashspec.prefixes import shared

READ_CHUNK = 512  # pairs read in one forward


@dataclass(slots=True, eq=False)
class _Row:
    """What is held of one sequence."""

    seq: Sequence
    pending: list[Tensor] = field(default_factory=list)  # features [m, layers * d] that were not read yet
    num_known: int = 0  # tokens whose features came, read or not
    num_read: int = 0
    known: list[Tensor] = field(default_factory=list)  # all features, where others may want to start from them
    output: Tensor | None = None  # [d] of the last pair read
    is_lost: bool = False  # features are missing: nothing can be drafted for it any more


@dataclass(slots=True)
class _Round:
    """One sequence's tree and what the head made of its nodes."""

    row: _Row
    growth: Growth
    outputs: dict[int, Tensor] = field(default_factory=dict)  # node -> [d]


class EagleDrafter(Drafter):
    """Drafts from an EAGLE-3 head.

    Args:
        head: on the target's device.
        max_length: positions of the target.
        width: nodes followed at each depth and guesses after each; see ``MedusaDrafter``.
        siblings: see ``MedusaDrafter``.

    Raises:
        OptionError: ``width`` out of range.
    """

    name = "eagle3"

    def __init__(
        self, head: EagleHead, *, max_length: int, width: int | None = None, siblings: Siblings = "auto"
    ) -> None:
        self.head, self.max_length = head, max_length
        self.feature_layers = head.config.feature_layers
        self.width, self.siblings = checked_width(width), siblings
        self.vocabulary = Vocabulary(head.config.layer.vocab_size, head.tokens)
        self.forward_seconds = 0.0  # inside the layer, so far
        self._cache = SlotCache(num_layers=1, max_length=max_length + READ_CHUNK)
        self._rows: list[_Row] = []  # in the order of the cache's
        self._known: dict[str, _Row] = {}  # features came, but nothing was drafted yet

    # the Drafter protocol

    @torch.inference_mode()
    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        """Read what is new, then one batched forward for each depth."""
        rounds: dict[int, _Round] = {}
        for i, (seq, budget) in enumerate(zip(seqs, budgets, strict=True)):
            row = self._known.get(seq.id)
            budget = min(budget, self.max_length - len(seq))
            if row is not None and budget > 0 and not row.is_lost:
                width, drawn = shape_for(seq, self.width, self.siblings)
                growth = Growth(seq, budget, self.vocabulary, width, drawn, rule=self.rule)
                rounds[i] = _Round(row, growth)
        self._read([one.row for one in rounds.values()])
        live = list(rounds.values())
        for one in live:
            assert one.row.output is not None
            one.growth.expand(self.head.logits(one.row.output[None]).float())
        while live := [one for one in live if one.growth.frontier]:
            self._advance(live)
        return [rounds[i].growth.draft(self.name) if i in rounds else EMPTY for i in range(len(seqs))]

    def backlog(self, seq: Sequence) -> int:
        row = self._known.get(seq.id)
        return row.num_known - row.num_read if row is not None else 0

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], scores: Seq[Score]) -> None:
        """Take the features of what was accepted."""
        for seq, draft, verdict, score in zip(seqs, drafts, verdicts, scores, strict=True):
            assert score.features is not None
            unseen = len(score.features) - len(draft)
            row = self._known.get(seq.id) or self._opened(seq, len(seq) - len(verdict.accepted) - 1 - unseen)
            kept = [*range(unseen), *(unseen + node for node in verdict.accepted)]
            features = score.features if len(kept) == len(score.features) else score.features[kept]
            self._learn(row, features)
            if not seq.is_finished and row.num_known != len(seq) - 1:
                row.is_lost = True  # a step that failed, say, whose features never came

    def resumable(self, tokens: Seq[int]) -> int:
        """The target may skip what features are kept of: an EAGLE head reads a whole text, only faster."""
        return 0 if self.prefixes is None else self._kept(list(tokens))[0]

    def forget(self, seq: Sequence) -> None:
        row = self._known.pop(seq.id, None)
        if row is not None and row.known and not row.is_lost and self.prefixes is not None:
            tokens = seq.tokens[: row.num_known]
            if not self.prefixes.holds(self, tokens):
                self.prefixes.put(self, tokens, row.known, sum(part.nbytes for part in row.known))
        if row is None or row not in self._rows:
            return
        at = self._rows.index(row)
        if self._cache.close_row(at) is not None:
            self._rows[at] = self._rows[-1]
        self._rows.pop()

    @torch.inference_mode()
    def dry_run(self, width: int) -> None:
        """Read ``width`` pairs of nothing and guess once, for whoever measures what it costs."""
        seq = Sequence("dry run", [0] * (width + 1), width)
        row = self._known[seq.id] = _Row(seq, num_known=width)
        size = len(self.feature_layers) * self.head.config.target_hidden_size
        row.pending.append(torch.zeros(width, size, device=self.head.device))
        try:
            self._read([row])
            assert row.output is not None
            self.head.logits(row.output[None]).topk(self.width or 1)
        finally:
            self.forget(seq)

    # features

    def _opened(self, seq: Sequence, num_skipped: int) -> _Row:
        """A new row, with the features of tokens that the target did not have to read."""
        row = self._known[seq.id] = _Row(seq)
        if num_skipped > 0:
            length, features = self._kept(seq.tokens[:num_skipped])
            if length == num_skipped:
                self._learn(row, torch.cat(features)[:length])
        return row

    def _learn(self, row: _Row, features: Tensor) -> None:
        row.pending.append(features)
        row.num_known += len(features)
        if self.prefixes is not None:
            row.known.append(features)

    def _kept(self, tokens: list[int]) -> tuple[int, list[Tensor]]:
        """How far features of a text's beginning are there, of running or finished sequences, and the features."""
        assert self.prefixes is not None
        length, features = self.prefixes.find(self, tokens)
        for row in self._known.values():
            common = min(shared(row.seq.tokens, tokens), 0 if row.is_lost or not row.known else row.num_known)
            if common > length:
                length, features = common, row.known
        return length, features or []

    # forwards

    def _read(self, rows: Seq[_Row]) -> None:
        """Feed all pairs whose features are there, chunk by chunk, the sequences side by side."""
        for row in rows:
            if row not in self._rows:
                self._cache.open_row()
                self._rows.append(row)
        while waiting := [row for row in rows if row.num_read < row.num_known]:
            waiting.sort(key=self._rows.index)
            feeds, hidden = [], []
            for row in waiting:
                features = torch.cat(row.pending) if len(row.pending) > 1 else row.pending[0]
                now, later = features[:READ_CHUNK], features[READ_CHUNK:]
                row.pending = [later] if len(later) else []
                start = row.num_read + 1
                feeds.append(Feed(self._rows.index(row), row.seq.tokens[start : start + len(now)], EMPTY))
                hidden.append(self.head.fuse(now))
            for row, feed, output in zip(waiting, feeds, self._forward(feeds, hidden), strict=True):
                row.output = output[-1]
                row.num_read += len(feed)
                self._cache.lengths[feed.row] = row.num_read

    def _advance(self, live: Seq[_Round]) -> None:
        """Feed the newest nodes of each tree, and let them grow."""
        live = sorted(live, key=lambda one: self._rows.index(one.row))
        feeds, hidden = [], []
        for one in live:
            tree = one.growth.asked()
            feeds.append(Feed(self._rows.index(one.row), [], tree, len(tree) - len(one.growth.frontier)))
            above = [self._above(one, node) for node in one.growth.frontier]
            hidden.append(self.head.fed_back(torch.stack(above)))
        for one, output in zip(live, self._forward(feeds, hidden), strict=True):
            one.outputs |= dict(zip(one.growth.frontier, output, strict=True))
            one.growth.expand(self.head.logits(output).float())

    def _above(self, one: _Round, node: int) -> Tensor:
        """The output at a node's parent, which stands for the target's states there."""
        found = one.outputs.get(one.growth.parents[node], one.row.output)
        assert found is not None
        return found

    def _forward(self, feeds: list[Feed], hidden: list[Tensor]) -> list[Tensor]:
        """Outputs [m, d] of each feed's tokens, which go with ``hidden`` [m, d] each."""
        started = time.perf_counter()
        head, device = self.head, self.head.device
        prepared = self._cache.prepare(feeds, device=device)
        m = prepared["input_ids"].shape[1]
        states = torch.stack([nn.functional.pad(part, (0, 0, m - len(part), 0)) for part in hidden])
        residual, (q, k, v) = head.midlayer.begin(head.embed_tokens(prepared["input_ids"]), states)
        cos, sin = head.positions(states, prepared["position_ids"])
        keys, values = self._cache.update(rotated(k, cos, sin), v, 0)
        mask = additive_mask(prepared, window=None, dtype=states.dtype)
        groups = q.shape[1] // keys.shape[1]
        attended = nn.functional.scaled_dot_product_attention(
            rotated(q, cos, sin), keys, values, attn_mask=mask, enable_gqa=groups > 1
        )
        output = head.midlayer.finish(residual, attended)
        self.forward_seconds += time.perf_counter() - started
        return [output[row, m - len(part) :] for row, part in enumerate(hidden)]
