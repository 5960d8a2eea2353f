"""What heads are asked to learn: the target's own distributions, further ahead than it has read.

Labels are the target's ``MOST`` likeliest tokens at each place, worked out from its last hidden states; hits are
counted against the token that really came. It knows networks and batches; no files and no optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from flashspec.heads.eagle import EagleHead, rotated
from flashspec.heads.medusa import MedusaHeads

MOST = 16  # of the target's likeliest tokens at a place; what they leave out is rarely anything that can be guessed
DECAY = 0.8  # weight of each further guess in the loss, which helps only where those before it held
SHOWN = (1, 5)  # ranks up to which a guess counts as right


@dataclass(frozen=True, slots=True)
class Batch:
    """Some texts, padded on the right.

    Attributes:
        tokens: [rows, width] int64.
        states: [rows, width, layers * d] float32; the last layer's come last.
        starts: [rows] first token that is to be foreseen.
        lengths: [rows] tokens of each text.
    """

    tokens: Tensor
    states: Tensor
    starts: Tensor
    lengths: Tensor

    def foreseen(self, ahead: int) -> Tensor:
        """[rows, width] bool: places t that have seen the prompt, and whose token t + ahead was to be foreseen."""
        at = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (at >= self.starts[:, None] - 1) & (at + ahead < self.lengths[:, None])


@dataclass(frozen=True, slots=True)
class Guesses:
    """One guess of each place at one distance.

    Attributes:
        logits: [places, N].
        places: [places] of each in the flat [rows * width].
        ahead: tokens from a place to what is guessed there.
    """

    logits: Tensor
    places: Tensor
    ahead: int


class Objective(Protocol):
    """A network that learns."""

    layers: tuple[int, ...]  # of the target, whose inputs the network reads
    num_guesses: int
    tokens: Tensor | None  # ids of its vocabulary

    @property
    def network(self) -> nn.Module: ...

    def guesses(self, batch: Batch) -> Iterator[Guesses]:
        """Of every place that counts, nearest first."""
        ...


class MedusaObjective:
    """Head i reads the state at t and foresees the token at t + 2 + i."""

    def __init__(self, heads: MedusaHeads, *, layer: int) -> None:
        self._heads = heads
        self.layers: tuple[int, ...] = (layer,)
        self.num_guesses, self.tokens = heads.num_heads, heads.tokens

    @property
    def network(self) -> MedusaHeads:
        return self._heads

    def guesses(self, batch: Batch) -> Iterator[Guesses]:
        states = batch.states[..., -self.network.hidden_size :].flatten(0, 1)
        for i in range(self.num_guesses):
            places = batch.foreseen(i + 2).flatten().nonzero().squeeze(1)
            yield Guesses(self.network.head(i, states[places]), places, i + 2)


class EagleObjective:
    """Training-time test: the head reads the target's states, then, ``num_steps`` - 1 times, its own output.

    Step s from place t stands at t + s. It attends to what was read from the target up to t and to the steps before
    it from the same place, just as when it drafts.

    Source: Li et al., EAGLE-3 (arXiv 2503.01840), section 3.
    """

    def __init__(self, head: EagleHead, *, last_layer: int, num_steps: int) -> None:
        self._head, self.num_guesses = head, num_steps
        self.layers = (*head.config.feature_layers, last_layer)
        self.tokens: Tensor | None = head.tokens

    @property
    def network(self) -> EagleHead:
        return self._head

    def guesses(self, batch: Batch) -> Iterator[Guesses]:
        """Step 0 reads all of a text; the others, and all outputs, are for places that count only."""
        head, width = self._head, batch.tokens.shape[1]
        features = len(head.config.feature_layers) * head.config.target_hidden_size
        hidden = head.fuse(batch.states[..., :features])
        at = torch.arange(width, device=hidden.device)
        following = batch.tokens[:, (at + 1).clamp(max=width - 1)]
        residual, (q, k, v) = head.midlayer.begin(head.embed_tokens(following), hidden)
        cos, sin = head.positions(hidden, at.expand(len(hidden), -1))
        attention = _Attention(rotated(k, cos, sin), v, batch.foreseen(2))
        places = attention.places
        output = head.midlayer.finish(
            _at(residual.flatten(0, 1), places), attention(attention.queries(rotated(q, cos, sin)))
        )
        for step in range(self.num_guesses):
            if step:
                ahead = batch.tokens.flatten()[(places + 1 + step).clamp(max=batch.tokens.numel() - 1)]
                residual, (q, k, v) = head.midlayer.begin(head.embed_tokens(ahead)[None], head.fed_back(output))
                cos, sin = head.positions(residual, (places % width + step)[None])
                attention.add(rotated(k, cos, sin), v)
                output = head.midlayer.finish(residual, attention(rotated(q, cos, sin)))
            counted = batch.foreseen(step + 2).flatten()[places]
            yield Guesses(head.logits(output[0, counted]), places[counted], step + 2)


def _at(states: Tensor, places: Tensor) -> Tensor:
    """[1, places, d] of [all, d]."""
    return states[places][None]


class _Attention:
    """Each place's query over its text's first keys up to it, and over its own later ones.

    Args:
        keys: of all places of all texts, [rows, heads, width, head_dim]; values likewise.
        counted: [rows, width] bool, the places with queries.
    """

    def __init__(self, keys: Tensor, values: Tensor, counted: Tensor) -> None:
        self.keys, self.values = keys, values
        self.at = [row.nonzero().squeeze(1) for row in counted]
        self.places = counted.flatten().nonzero().squeeze(1)
        self.own: list[tuple[Tensor, Tensor]] = []  # [1, heads, places, head_dim] each

    def queries(self, q: Tensor) -> Tensor:
        """[1, heads, places, head_dim] of [rows, heads, width, head_dim]."""
        return torch.cat([q[row, :, at] for row, at in enumerate(self.at)], 1)[None]

    def add(self, keys: Tensor, values: Tensor) -> None:
        """What each place's next step holds, [1, heads, places, head_dim]."""
        self.own.append((keys, values))

    def __call__(self, query: Tensor) -> Tensor:
        """[1, heads, places, head_dim]."""
        groups = query.shape[1] // self.keys.shape[1]
        own = [(key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)) for key, value in self.own]
        found, start = [], 0
        for row, at in enumerate(self.at):
            mine = slice(start, start + len(at))
            start += len(at)
            later = [(key[0, :, mine], value[0, :, mine]) for key, value in own]
            found.append(_attended(query[0, :, mine], self.keys[row], self.values[row], at, later))
        return torch.cat(found, 1)[None]


def _attended(query: Tensor, keys: Tensor, values: Tensor, at: Tensor, later: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[heads, places, head_dim] of one text: over first keys [kv_heads, width, head_dim] up to ``at``, and own ones."""
    end = int(at[-1]) + 1 if len(at) else 0
    groups = query.shape[0] // keys.shape[0]
    keys, values = (part[:, :end].repeat_interleave(groups, 0) for part in (keys, values))
    is_past = at[:, None] >= torch.arange(end, device=at.device)
    scale = query.shape[-1] ** -0.5
    scores = (query @ keys.transpose(1, 2)).mul(scale).masked_fill(~is_past, -torch.inf)
    own = [(query * key).sum(-1, keepdim=True) * scale for key, _ in later]
    weights = torch.cat([scores, *own], -1).float().softmax(-1).to(query.dtype)
    found: Tensor = weights[..., :end] @ values
    for step, (_, value) in enumerate(later):
        found = found + weights[..., end + step, None] * value
    return found


class Teacher:
    """The target's distributions at places of a batch, over the network's vocabulary.

    Args:
        output_embedding: of the target, [vocab, d].
        tokens: ids of the network's vocabulary, [N]; None for all.
    """

    def __init__(self, output_embedding: Tensor, tokens: Tensor | None) -> None:
        self.weight = output_embedding if tokens is None else output_embedding[tokens]
        self.index = torch.full((len(output_embedding),), -1, device=output_embedding.device)
        ids = torch.arange(len(output_embedding), device=output_embedding.device) if tokens is None else tokens
        self.index[ids] = torch.arange(len(ids), device=output_embedding.device)

    @torch.no_grad()
    def likeliest(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Probabilities and numbers [places, MOST] of the likeliest tokens; and each place's row, [rows * width]."""
        places = batch.foreseen(1).flatten().nonzero().squeeze(1)
        states = batch.states[..., -self.weight.shape[1] :].flatten(0, 1)[places]
        values, numbers = nn.functional.linear(states, self.weight).topk(min(MOST, len(self.weight)))
        row = places.new_full((batch.tokens.numel(),), -1)
        row[places] = torch.arange(len(places), device=places.device)
        return values.float().softmax(-1), numbers, row


@dataclass(slots=True)
class Counts:
    """How many guesses were right, up to each rank; and how many places had all their guesses right up to one."""

    tried: list[int]
    hits: list[list[int]]  # by rank of SHOWN
    unbroken: list[int]
    whole: list[int]  # places that have as many tokens to come

    @classmethod
    def empty(cls, num_guesses: int) -> Counts:
        return cls(
            [0] * num_guesses, [[0] * len(SHOWN) for _ in range(num_guesses)], [0] * num_guesses, [0] * num_guesses
        )

    @property
    def accuracies(self) -> list[list[float]]:
        """Of each guess, by rank of SHOWN."""
        return [[hit / max(n, 1) for hit in hits] for n, hits in zip(self.tried, self.hits, strict=True)]

    @property
    def expected_length(self) -> float:
        """Tokens of a step that drafts the likeliest guess of each distance: 1 + those that hold."""
        return 1 + sum(held / max(n, 1) for held, n in zip(self.unbroken, self.whole, strict=True))


def loss_of(objective: Objective, teacher: Teacher, batch: Batch) -> Tensor:
    """Cross entropy with the target's distributions, a mean over places, weighted by distance."""
    probs, numbers, row = teacher.likeliest(batch)
    losses, weights = [], 0.0
    for guesses in objective.guesses(batch):
        at = row[guesses.places + guesses.ahead - 1]
        logits = guesses.logits.float()
        expected = (logits.gather(1, numbers[at]) * probs[at]).sum(1)
        weight = DECAY ** (guesses.ahead - 2)
        losses.append(weight * (logits.logsumexp(1) - expected).sum() / max(len(at), 1))
        weights += weight
    return torch.stack(losses).sum() / weights


@torch.no_grad()
def count(objective: Objective, teacher: Teacher, batch: Batch, counts: Counts) -> None:
    """Add a batch to the counts."""
    tokens = teacher.index[batch.tokens.flatten()]
    unbroken = torch.ones(batch.tokens.numel(), dtype=torch.bool, device=tokens.device)
    for number, guesses in enumerate(objective.guesses(batch)):
        came = tokens[guesses.places + guesses.ahead]
        best = guesses.logits.topk(min(SHOWN[-1], guesses.logits.shape[1])).indices
        right = best == came[:, None]
        counts.tried[number] += len(came)
        for place, rank in enumerate(SHOWN):
            counts.hits[number][place] += int(right[:, :rank].any(1).sum())
        held = torch.zeros_like(unbroken)
        held[guesses.places] = right[:, 0]
        unbroken &= held
        counts.unbroken[number] += int(unbroken.sum())
        counts.whole[number] += len(came)
