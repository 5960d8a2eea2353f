"""A toy target whose distribution is known exactly, and the plain loops that everything is compared with."""

from __future__ import annotations

import io
import json
import math
import random
import sys
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashspec import cli
from flashspec.core import EMPTY, Draft, Drafter, SamplingParams, Score, Sequence
from flashspec.errors import ModelError
from flashspec.sampling import exponential_noise
from flashspec.tree import paths
from flashspec.weights import converted, default_model

torch.set_num_threads(1)  # tiny models: more threads only wait for each other
Logits = Callable[[Seq[int]], np.ndarray]  # context -> [vocab] float32


class ToyTarget:
    """Logits are a pure function of the last ``memory`` tokens; the cache is a list that is checked at every call."""

    supports_trees = True
    has_hidden = True

    def __init__(
        self,
        vocab_size: int = 12,
        *,
        memory: int = 2,
        scale: float = 2.0,
        salt: int = 0,
        eos: Seq[int] = (),
        max_length: int = 512,
    ) -> None:
        self.vocab_size, self.memory, self.scale, self.salt = vocab_size, memory, scale, salt
        self.eos_tokens = frozenset(eos)
        self.max_length = max_length
        self.forward_seconds = 0.0
        self.held: dict[str, list[int]] = {}  # sequence id -> the tokens whose keys a real cache would hold
        self.num_scored_tokens = 0
        self._last: dict[str, tuple[Sequence, Draft]] = {}

    def logits(self, context: Seq[int]) -> np.ndarray:
        seed = hash((self.salt, *context[-self.memory :])) % 2**32
        return (np.random.default_rng(seed).standard_normal(self.vocab_size) * self.scale).astype(np.float32)

    def score(self, seqs: Seq[Sequence], drafts: Seq[Draft], *, hidden: bool = False) -> list[Score]:
        return [self._score(seq, draft, hidden) for seq, draft in zip(seqs, drafts, strict=True)]

    def _score(self, seq: Sequence, draft: Draft, hidden: bool) -> Score:
        held = self.held.setdefault(seq.id, [])
        assert held == seq.tokens[: len(held)], "the cache holds something else than a prefix of the sequence"
        assert len(held) < len(seq.tokens), "the last token is already in the cache"
        assert len(seq.tokens) + len(draft) <= self.max_length, "scored past the model's positions"
        self.num_scored_tokens += len(seq.tokens) - len(held) + len(draft)
        self.held[seq.id] = list(seq.tokens)
        self._last[seq.id] = (seq, draft)
        contexts = [seq.tokens] + [seq.tokens + [draft.tokens[i] for i in path] for path in paths(draft.parents)]
        rows = torch.from_numpy(np.stack([self.logits(context) for context in contexts]))
        return Score(rows, rows.clone() if hidden else None)

    def keep(self, seq: Sequence, accepted: Seq[int]) -> None:
        _, draft = self._last[seq.id]
        self.held[seq.id] = self.held[seq.id] + [draft.tokens[i] for i in accepted]
        assert self.held[seq.id] == seq.tokens[: len(self.held[seq.id])], "kept tokens were not committed"

    def rewind(self, seq: Sequence, length: int) -> None:
        if seq.id in self.held:
            self.held[seq.id] = self.held[seq.id][:length]

    def forget(self, seq: Sequence) -> None:
        self.held.pop(seq.id, None)
        self._last.pop(seq.id, None)

    def cached_length(self, seq: Sequence) -> int:
        return len(self.held.get(seq.id, ()))

    def read(self, seq: Sequence, count: int, *, features: Seq[int] = ()) -> None:
        held = self.held.setdefault(seq.id, [])
        assert held == seq.tokens[: len(held)], "the cache holds something else than a prefix of the sequence"
        assert 0 < count < len(seq.tokens) - len(held), "nothing is left to score"
        self.num_scored_tokens += count
        self.held[seq.id] = seq.tokens[: len(held) + count]

    def save(self, seq: Sequence, length: int) -> tuple[list[int], int]:
        held = self.held[seq.id][:length]
        assert len(held) == length, "more was saved than there is"
        return held, 4 * length

    def restore(self, seq: Sequence, state: list[int], length: int) -> None:
        assert not self.held.get(seq.id), "a sequence that has been read already"
        assert state[:length] == seq.tokens[:length], "keys and values of another text"
        assert length < len(seq.tokens), "nothing is left to score"
        self.held[seq.id] = state[:length]


class ScriptedDrafter(Drafter):
    """Drafts what ``guess(tokens, budget)`` returns: a list of tokens, or a whole Draft."""

    name = "scripted"

    def __init__(self, guess: Callable[[list[int], int], list[int] | Draft]) -> None:
        self.guess = guess
        self.forgotten: list[str] = []

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        drafts = [self.guess(list(seq.tokens), budget) for seq, budget in zip(seqs, budgets, strict=True)]
        return [draft if isinstance(draft, Draft) else Draft.chain(draft, drafter=self.name) for draft in drafts]

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq.id)


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> dict[str, Any]:
        """The JSON object that is all of stdout."""
        assert self.code == 0, self.err
        found: dict[str, Any] = json.loads(self.out)
        return found


@pytest.fixture
def flashspec_command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs ``flashspec`` in this process, with Rich writing where it is captured."""
    monkeypatch.setattr(cli.screen, "_file", None)
    monkeypatch.setattr(cli.screen, "width", 200)

    def call(*words: str, stdin: str = "") -> Ran:
        monkeypatch.setattr(sys, "argv", ["flashspec", *words])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        try:
            cli.main()
            code = 0
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Ran(code, *capfd.readouterr())

    return call


def dense_p(
    logits: np.ndarray, params: SamplingParams, history: Seq[int], output: Seq[int], eos: Seq[int] = ()
) -> np.ndarray:
    """What SamplingParams mean, written for one position in float64 and in the plainest way. [vocab]"""
    x = logits.astype(np.float64).copy()
    for token in set(history):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
    for token, bias in params.logit_bias.items():
        x[token] += bias
    if params.allowed_tokens is not None:
        x[[token for token in range(len(x)) if token not in params.allowed_tokens]] = -math.inf
    x[list(params.bad_tokens)] = -math.inf
    if len(output) < params.min_tokens:
        x[list(eos)] = -math.inf
    if params.temperature == 0:
        return (np.arange(len(x)) == x.argmax()).astype(np.float64)
    x = (x - x.max()) / params.temperature
    p = np.exp(x) / np.exp(x).sum()
    order = np.argsort(-p, kind="stable")
    if params.top_k:
        p[order[params.top_k :]] = 0
        p /= p.sum()
    if params.top_p < 1:
        before = np.concatenate([[0], np.cumsum(p[order])[:-1]])
        p[order[before >= params.top_p]] = 0
        p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    return p / p.sum()


def plain_loop(
    logits: Logits, prompt: Seq[int], params: SamplingParams, *, choice: int = 0, eos: Seq[int] = ()
) -> list[int]:
    """Ordinary decoding, one token at a time: argmax, or keyed sampling where there is a seed."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < params.max_tokens:
        output = tokens[len(prompt) :]
        p = dense_p(logits(tokens), params, tokens, output, [] if params.ignore_eos else eos)
        if params.temperature == 0:
            token = int(p.argmax())
        else:
            assert params.seed is not None, "only seeded sampling has one right answer"
            noise = exponential_noise(params.seed, choice, len(tokens), torch.arange(len(p))).numpy()
            with np.errstate(divide="ignore"):
                token = int((noise / p).argmin())
        tokens.append(token)
        if token in eos and not params.ignore_eos:
            break
    return tokens[len(prompt) :]


def sequence(
    tokens: Seq[int],
    params: SamplingParams | None = None,
    *,
    num_prompt_tokens: int | None = None,
    eos: Seq[int] = (),
    name: str = "s",
) -> Sequence:
    count = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
    return Sequence(name, list(tokens), count, params or SamplingParams(), eos_tokens=frozenset(eos))


class Uniforms(random.Random):
    """A generator that plays back given numbers: for enumerating every branch of a verification rule."""

    def __init__(self, numbers: Seq[float]) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    """Pearson's statistic divided by its 99.9 % quantile (Wilson-Hilferty): above 1 is a failure.

    Cells of which fewer than five are expected count as one, and where that is still too few, with the next larger one:
    a single count in a cell of 0.01 would fail by itself.
    """
    expected = p * counts.sum()
    assert counts[p == 0].sum() == 0, "a token of probability 0 was drawn"
    order = np.argsort(expected)
    few = max(int(np.searchsorted(expected[order].cumsum(), 5.0)) + 1, int((expected < 5).sum()))
    starts = [0, *range(few, len(order))]
    seen, expected = np.add.reduceat(counts[order], starts), np.add.reduceat(expected[order], starts)
    df = len(starts) - 1
    if df == 0:
        return 0.0
    statistic = float(((seen - expected) ** 2 / expected).sum())
    quantile = df * (1 - 2 / (9 * df) + 3.0902 * math.sqrt(2 / (9 * df))) ** 3
    return statistic / quantile


@pytest.fixture
def toy() -> ToyTarget:
    return ToyTarget()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The folder of the one real model, converted once from the GGUF file in the pip package."""
    try:
        return converted(default_model(), lambda line: None)
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not installed ({error})")


__all__ = [
    "EMPTY", "Ran", "ScriptedDrafter", "ToyTarget", "Uniforms", "chi_square", "dense_p", "plain_loop", "sequence",
]  # fmt: skip
