"""An EAGLE-3 drafter on tiny Llamas: it keeps what a fresh one reads, and its trees are those of a plain head."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence as Seq
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from conftest import plain_loop, sequence
from test_growth import LAWS, Wary, check_law, plain_tree
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from flashspec.backends.hf import HFTarget
from flashspec.core import EMPTY, Draft, SamplingParams, Score, Sequence, Verdict
from flashspec.drafters import eagle
from flashspec.drafters.eagle import EagleDrafter
from flashspec.drafters.growth import Siblings, Vocabulary, guesses
from flashspec.engine import LocalEngine
from flashspec.errors import OptionError
from flashspec.heads.eagle import EagleConfig, EagleHead
from flashspec.train.objectives import Batch, EagleObjective
from flashspec.trained import _place
from flashspec.tree import paths

VOCAB, WIDTH, LENGTH, EOS = 61, 32, 128, 7
LAYERS = (1, 2, 3)  # whose inputs are read
PROMPTS = [[1, 2, 3], [5], [8, 9, 10, 11, 12, 13]]
FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output")
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.0}}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": PENALTIES,
    "coupled": {"temperature": 1.0, "seed": 3},
    "coupled, penalties and cuts": {"temperature": 1.2, "seed": 4, "top_k": 7, "top_p": 0.9, **PENALTIES},
}
TokenPath = tuple[int, ...]


def shape(vocab: int, width: int, layers: int, **options: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocab, hidden_size=width, intermediate_size=width + 16, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH, initializer_range=0.3,
        bos_token_id=None, **{"eos_token_id": EOS, **options},
    )  # fmt: skip


@cache
def served(vocab: int = VOCAB, width: int = WIDTH) -> Any:
    torch.manual_seed(0)
    return HFTarget(LlamaForCausalLM(shape(vocab, width, 4)).eval())


@cache
def made(*flags: str, vocab: int = VOCAB, width: int = WIDTH, few: int = 40) -> EagleHead:
    """A random head that guesses ``few`` of the tokens."""
    torch.manual_seed(1)
    variant: dict[str, Any] = dict.fromkeys(flags, True)
    config = EagleConfig(
        layer=shape(vocab, width, 1), draft_vocab_size=few, target_hidden_size=width, feature_layers=LAYERS, **variant
    )  # fmt: skip
    head = EagleHead(config, tokens=torch.tensor(sorted(random.Random(0).sample(range(vocab), few))))
    for parameter in head.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model = served(vocab, width).model
    head.start_from(model.model.embed_tokens.weight, model.lm_head.weight)
    return head.eval().requires_grad_(False)


def drafter_of(head: EagleHead | None = None, *, width: int = 1, siblings: Siblings = "top") -> EagleDrafter:
    return EagleDrafter(head or made(), max_length=LENGTH, width=width, siblings=siblings)


# references


def plain_head(head: EagleHead, hidden: Tensor, tokens: Seq[int]) -> Tensor:
    """Outputs [n, d] of states [n, d] and the tokens that follow them, from scratch and head by head."""
    layer, attention = head.midlayer, head.midlayer.self_attn
    normed = layer.hidden_norm(hidden)
    x = torch.cat([layer.input_layernorm(head.embed_tokens(torch.tensor(list(tokens)))), normed], -1)
    n, size, group = len(x), attention.head_dim, attention.num_heads // attention.num_kv_heads
    angles = torch.arange(n)[:, None] * 10000.0 ** (-torch.arange(0, size, 2) / size)
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(part: Tensor) -> Tensor:
        pairs = torch.complex(part[:, : size // 2], part[:, size // 2 :]) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    heads = []
    for i in range(attention.num_heads):
        j = i // group
        q = turned(attention.q_proj(x)[:, i * size : (i + 1) * size])
        k = turned(attention.k_proj(x)[:, j * size : (j + 1) * size])
        v = attention.v_proj(x)[:, j * size : (j + 1) * size]
        scores = (q @ k.T / size**0.5).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    out = (normed if layer.norm_before_residual else hidden) + attention.o_proj(torch.cat(heads, -1))
    found: Tensor = out + layer.mlp(layer.post_attention_layernorm(out))
    return found


def plain_row(head: EagleHead, tokens: Seq[int], path: TokenPath) -> Tensor:
    """Logits after drafted tokens, everything read anew: the target's states as far as there are, then its own."""
    states = served().hidden_states([list(tokens[:-1])], LAYERS)[0]
    hidden = head.fc(head.fc_norm(states))
    for count in range(len(path) + 1):
        output = plain_head(head, hidden, [*tokens[1:], *path[:count]])[-1:]
        hidden = torch.cat([hidden, head.norm(output) if head.config.norm_output else output])
    found: Tensor = head.lm_head(head.norm(output))
    return found


def shown(tokens: Seq[int]) -> Score:
    """What the target shows of a text whose last token it has not read."""
    features = served().hidden_states([list(tokens[:-1])], LAYERS)[0]
    return Score(torch.zeros(1, VOCAB), None, features)


def observed(drafter: EagleDrafter, seq: Sequence) -> None:
    """The whole text at once."""
    drafter.observe([seq], [EMPTY], [Verdict([], seq.tokens[-1], True)], [shown(seq.tokens)])


def fresh_draft(drafter: EagleDrafter, seq: Sequence, budget: int) -> Draft:
    """Of a new drafter that was shown the text at once."""
    other = EagleDrafter(drafter.head, max_length=LENGTH, width=drafter.width, siblings=drafter.siblings)
    copy = sequence(seq.tokens, seq.sampling, num_prompt_tokens=seq.num_prompt_tokens, name="copy")
    observed(other, copy)
    return other.propose([copy], [budget])[0]


def assert_same(draft: Draft, other: Draft) -> None:
    assert (draft.tokens, draft.parents) == (other.tokens, other.parents)
    assert draft.confidences == pytest.approx(other.confidences, abs=1e-4)


# against a plain head


@pytest.mark.parametrize("flags", [(), *((flag,) for flag in FLAGS), FLAGS], ids=str)
@pytest.mark.parametrize("width", [1, 3])
def test_a_tree_is_the_plain_heads(width: int, flags: tuple[str, ...]) -> None:
    """Each path read from scratch, by every way to sample; ragged rows and one that drafts nothing beside them."""
    head = made(*flags)
    drafter, budgets = drafter_of(head, width=width), [6, 0, 5, 9]
    seqs = [
        sequence([*PROMPTS[i % 3], 14, i], SamplingParams(**KINDS[kind]), num_prompt_tokens=2, name=kind, eos=[EOS])
        for i, kind in enumerate(KINDS)
    ]
    for seq in seqs:
        observed(drafter, seq)
    vocabulary = Vocabulary(VOCAB, head.tokens)
    for seq, budget, draft in zip(seqs, budgets, drafter.propose(seqs, budgets), strict=True):

        def guess(path: TokenPath, seq: Sequence = seq) -> Any:
            row = plain_row(head, seq.tokens, path)
            return guesses(row, vocabulary, seq, [path], width, is_drawn=False)[0]

        expected = plain_tree(guess, budget=budget, width=width, depth=99, eos=[EOS])
        found = [tuple(draft.tokens[node] for node in path) for path in paths(draft.parents)]
        assert found == list(expected)
        assert draft.drafter == ("eagle3" if budget else "none")
        for path, confidence in zip(found, draft.confidences or [], strict=True):
            last = next(each for each in guess(path[:-1]) if each.token == path[-1])
            assert confidence == pytest.approx(last.confidence, abs=1e-4)


def test_it_drafts_what_it_was_trained_to_say() -> None:
    """The guesses at each distance are the training objective's, which attends the way drafting does."""
    tokens, steps = random.Random(0).choices(range(VOCAB), k=14), 4
    for flags in ((), FLAGS):
        head = made(*flags)
        drafter = drafter_of(head)
        for place in range(8):
            seq = sequence(tokens[: place + 2], name=str(place))
            observed(drafter, seq)
            (draft,) = drafter.propose([seq], [steps])
            text = [*seq.tokens, *draft.tokens, 0]
            states = served().hidden_states([text], (*LAYERS, 4))[0]
            batch = Batch(torch.tensor([text]), states[None], torch.tensor([1]), torch.tensor([len(text)]))
            objective = EagleObjective(head, last_layer=4, num_steps=steps)
            for step, each in enumerate(itertools.islice(objective.guesses(batch), len(draft))):
                logits = each.logits[each.places.tolist().index(place)]
                assert int(head.tokens[logits.argmax()]) == draft.tokens[step]
                assert float(logits.softmax(-1).max()) == pytest.approx((draft.confidences or [])[step], abs=1e-4)


# what is kept


class Course:
    """Texts that grow by any path of their drafts, or by none; who drafts at a step is anyone's guess."""

    def __init__(self, seed: int, *, width: int) -> None:
        self.rng, self.drafter = random.Random(seed), drafter_of(width=width)
        self.target = HFTarget(served().model)
        self.seqs: list[Sequence] = []
        self.num_compared = self.num_accepted = 0

    def join(self) -> None:
        """A new text, perhaps by a name that was used before."""
        name = self.rng.choice([name for name in "abcdef" if name not in {seq.id for seq in self.seqs}])
        tokens = self.rng.choices(range(VOCAB), k=self.rng.choice([1, 2, 5, 19]))
        params = SamplingParams(max_tokens=999, **KINDS[self.rng.choice(list(KINDS))])
        self.seqs.append(sequence(tokens, params, name=name))

    def leave(self) -> None:
        seq = self.seqs.pop(self.rng.randrange(len(self.seqs)))
        self.drafter.forget(seq)
        self.target.forget(seq)

    def step(self) -> None:
        chosen = self.rng.sample(self.seqs, self.rng.randint(1, len(self.seqs)))  # the others wait
        budgets = [self.rng.choice([0, 1, 3, 7]) if seq.num_output_tokens else 0 for seq in chosen]
        if self.rng.random() < 0.3:
            budgets = [0] * len(chosen)
        drafts = self.drafter.propose(chosen, budgets)
        for seq, budget, draft in zip(chosen, budgets, drafts, strict=True):
            assert len(draft) <= budget
            if budget:
                assert_same(draft, fresh_draft(self.drafter, seq, budget))
                self.num_compared += 1
        scores = self.target.score(chosen, drafts, features=LAYERS)
        verdicts = [self._verdict(draft) for draft in drafts]
        for seq, draft, verdict in zip(chosen, drafts, verdicts, strict=True):
            seq.tokens += [*(draft.tokens[node] for node in verdict.accepted), verdict.next_token]
            self.target.keep(seq, verdict.accepted)
            self.num_accepted += len(verdict.accepted)
        self.drafter.observe(chosen, drafts, verdicts, scores)

    def _verdict(self, draft: Draft) -> Verdict:
        path = self.rng.choice([[], *paths(draft.parents)])
        return Verdict(path, self.rng.randrange(VOCAB), False)


@pytest.mark.parametrize("chunk", [3, 512])
@pytest.mark.parametrize("width", [1, 3])
def test_after_any_course_of_events_it_drafts_as_if_it_had_read_all_at_once(
    width: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of guesses never stay: accepted ones are read again from the target's own states."""
    monkeypatch.setattr(eagle, "READ_CHUNK", chunk)
    course = Course(width + chunk, width=width)
    for _ in range(60):
        events: list[Callable[[], None]] = [course.join] if len(course.seqs) < 4 else []
        if course.seqs:
            events += [course.step] * 6 + [course.leave] * (len(course.seqs) > 2)
        course.rng.choice(events)()
    assert course.num_compared > 25
    assert course.num_accepted > 25
    while course.seqs:
        course.leave()
    assert not course.drafter._known
    assert not course.drafter._rows
    assert course.drafter._cache.lengths == []


@pytest.mark.parametrize("length", [2, 4, 5, 9, 30])
def test_a_long_prompt_is_read_in_chunks(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seq = sequence(random.Random(length).choices(range(VOCAB), k=length))
    whole = fresh_draft(drafter_of(width=2), seq, 6)
    monkeypatch.setattr(eagle, "READ_CHUNK", 4)
    forwards = []
    forward = EagleDrafter._forward

    def counted(self: EagleDrafter, feeds: Any, hidden: Any) -> Any:
        forwards.append([len(feed.unseen) for feed in feeds])
        return forward(self, feeds, hidden)

    monkeypatch.setattr(EagleDrafter, "_forward", counted)
    assert_same(fresh_draft(drafter_of(width=2), seq, 6), whole)
    assert [row for (row,) in forwards if row] == [4] * ((length - 1) // 4) + [(length - 1) % 4] * (
        (length - 1) % 4 > 0
    )


def test_what_it_has_to_read_is_known() -> None:
    drafter, seq = drafter_of(), sequence([1, 2, 3, 4])
    assert drafter.backlog(seq) == 0
    observed(drafter, seq)
    assert drafter.backlog(seq) == 3
    drafter.propose([seq], [0])
    assert drafter.backlog(seq) == 3, "without a budget nothing is read"
    drafter.propose([seq], [2])
    assert drafter.backlog(seq) == 0


def test_a_step_that_failed_is_scored_again() -> None:
    """What it showed the first time was never seen, and is shown once more."""
    target, drafter = HFTarget(served().model), drafter_of(width=2)
    seq = sequence([1, 2, 3, 4], num_prompt_tokens=3)
    observed(drafter, seq)
    (draft,) = drafter.propose([seq], [4])
    target.score([seq], [draft], features=LAYERS)
    target.rewind(seq, len(seq) - 1)
    (score,) = target.score([seq], [draft], features=LAYERS)
    target.keep(seq, [0])
    seq.tokens += [draft.tokens[0], 9]
    drafter.observe([seq], [draft], [Verdict([0], 9, False)], [score])
    assert_same(drafter.propose([seq], [5])[0], fresh_draft(drafter, seq, 5))


def test_nothing_is_drafted_for_a_text_of_which_states_are_missing() -> None:
    """A step was not seen; texts beside it are drafted for as ever, and so is it by another name."""
    drafter = drafter_of()
    seqs = [sequence(prompt, name=str(prompt)) for prompt in ([1, 2, 3, 4], [5, 6, 7])]
    for seq in seqs:
        observed(drafter, seq)
    lost, other = seqs
    lost.tokens += [8, 9]
    last = shown(lost.tokens).features
    assert last is not None
    drafter.observe([lost], [EMPTY], [Verdict([], 9, True)], [Score(torch.zeros(1, VOCAB), None, last[-1:])])
    drafts = drafter.propose(seqs, [4, 4])
    assert drafts[0] == EMPTY
    assert_same(drafts[1], fresh_draft(drafter, other, 4))
    assert drafter.propose([sequence([1, 2], name="new")], [3]) == [EMPTY]
    drafter.forget(lost)
    observed(drafter, lost)
    assert_same(drafter.propose([lost], [4])[0], fresh_draft(drafter, lost, 4))


def test_an_interrupted_step_leaves_the_others_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text that was committed before the interruption has lost its states; those after it are scored again."""
    target, drafter, params = served(), drafter_of(width=2), SamplingParams(max_tokens=14)
    engine = LocalEngine(target, drafter, num_speculative_tokens=4)
    names = [engine.add(prompt, params) for prompt in PROMPTS]
    seqs = [engine._requests[name].seq for name in names]
    commit, calls = LocalEngine._commit, iter(range(1000))

    def interrupted(self: LocalEngine, *arguments: Any) -> Any:
        if next(calls) == 7:  # the third step's second sequence
            raise KeyboardInterrupt
        return commit(self, *arguments)

    monkeypatch.setattr(LocalEngine, "_commit", interrupted)
    engine.step(), engine.step()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.step()
    assert drafter.propose([seqs[0]], [3]) == [EMPTY]
    assert_same(drafter.propose([seqs[2]], [3])[0], fresh_draft(drafter, seqs[2], 3))
    while engine.has_work:
        engine.step()
    for i in (0, 2):
        assert seqs[i].output == plain("greedy", 14)[i]
    assert not drafter._known


def test_a_dry_run_changes_nothing() -> None:
    drafter, seq = drafter_of(width=2), sequence([1, 2, 3, 4, 5])
    observed(drafter, seq)
    (before,) = drafter.propose([seq], [5])
    for width in (1, 4, 40):
        drafter.dry_run(width)
    assert_same(drafter.propose([seq], [5])[0], before)
    assert list(drafter._known) == [seq.id]
    assert drafter._cache.lengths == [4]


def test_drafts_end_with_the_models_positions() -> None:
    drafter = drafter_of()
    for left in (0, 1, 3):
        seq = sequence([1] * (LENGTH - left), name=str(left))
        observed(drafter, seq)
        assert len(drafter.propose([seq], [9])[0]) == left


def test_a_target_that_shows_no_states_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HFTarget, "has_hidden", False)
    with pytest.raises(OptionError, match=r"'eagle3' reads the model's hidden states, which HFTarget does not show"):
        LocalEngine(served(), drafter_of())


@pytest.mark.parametrize("width", [0, 17, 1.0, True])
def test_widths_out_of_range(width: Any) -> None:
    with pytest.raises(OptionError, match=r"width is .*; a whole number from 1"):
        drafter_of(width=width)


# lossless


@cache
def plain(kind: str, count: int) -> list[list[int]]:
    """What the plain loop makes of the prompts."""
    params = SamplingParams(max_tokens=count, **KINDS[kind])

    def logits(context: Seq[int]) -> np.ndarray:
        found: np.ndarray = served().plain_logits(list(context)).numpy()
        return found

    return [plain_loop(logits, prompt, params, eos=[EOS]) for prompt in PROMPTS]


@pytest.mark.parametrize(("width", "siblings"), [(1, "drawn"), (1, "top"), (3, "drawn"), (3, "top")])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_plain_loops(kind: str, width: int, siblings: Siblings) -> None:
    engine = LocalEngine(served(), drafter_of(width=width, siblings=siblings), num_speculative_tokens=5)
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=14, **KINDS[kind]))
    assert [result.tokens for result in results] == plain(kind, 14)
    assert engine.stats().num_drafts > 10


@cache
def small_logits(context: tuple[int, ...]) -> np.ndarray:
    found: np.ndarray = served(4, 16).plain_logits(list(context)).numpy()
    return found


@pytest.mark.parametrize("kind", ["plain", "cut", "penalties"])
@pytest.mark.parametrize(("width", "siblings", "rule"), [
    (1, "auto", None), (2, "drawn", None), (2, "drawn", Wary(0.5)), (3, "top", Wary(0.3)),
])  # fmt: skip
def test_a_step_leaves_the_targets_distribution(
    width: int, siblings: Siblings, rule: Wary | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly, with three of four tokens to guess: every draft that can be drawn, and every way to verify it."""
    target, drafter = served(4, 16), drafter_of(made(vocab=4, width=16, few=3), width=width, siblings=siblings)
    drafter.rule = rule
    seq = sequence([1, 2, 0], SamplingParams(**LAWS[kind]), num_prompt_tokens=1)
    features = target.hidden_states([seq.tokens[:-1]], LAYERS)[0]
    drafter.observe([seq], [EMPTY], [Verdict([], 0, True)], [Score(torch.zeros(1, 4), None, features)])
    budget = 3 if siblings == "drawn" else 4
    check_law(
        monkeypatch,
        lambda: drafter.propose([seq], [budget])[0],
        seq,
        lambda context: small_logits(tuple(context)),
        length=budget + 1 if width == 1 else 4,
    )


def test_half_precision_leaves_the_positions_alone() -> None:
    layer = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_attention_heads=2)
    config = EagleConfig(layer=layer, draft_vocab_size=8, target_hidden_size=8, feature_layers=(0, 1, 2))
    head = EagleHead(config)
    exact = head.rotary.inv_freq.clone()
    _place(head, torch.device("meta"), torch.bfloat16, None, pack=False)
    assert head.dtype is torch.bfloat16
    assert head.rotary.inv_freq.dtype is exact.dtype is torch.float32
