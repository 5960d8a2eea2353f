"""Medusa heads on the toy target: heads that know the future, heads that know nothing, and whose state they read."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ScriptedDrafter, ToyTarget, chi_square, dense_p, plain_loop, sequence
from test_growth import LAWS, Wary, check_law, plain_tree
from torch import Tensor

from flashspec.choice import HeadsController
from flashspec.controller import StepCosts
from flashspec.core import EMPTY, Draft, SamplingParams, Score, Sequence, Verdict
from flashspec.costs import CostCurve
from flashspec.drafters.growth import Vocabulary, guesses
from flashspec.drafters.medusa import MedusaDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import OptionError
from flashspec.heads.medusa import MedusaHeads
from flashspec.train.objectives import Batch, MedusaObjective
from flashspec.tree import paths

VOCAB, HEADS, EOS = 12, 3, 7
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5, 6, 5]]
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "logit_bias": {3: 1.0}}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, penalties": PENALTIES,
    "coupled": {"temperature": 1.0, "seed": 3},
    "coupled, penalties and cuts": {"temperature": 1.2, "seed": 4, "top_k": 7, "top_p": 0.9, **PENALTIES},
}


class Seer(ToyTarget):
    """Its hidden state tells what greedy decoding brings after the next token: one-hot, one after the other."""

    def _score(self, seq: Sequence, draft: Draft, hidden: bool) -> Score:
        logits = super()._score(seq, draft, hidden).logits
        contexts = [seq.tokens, *([*seq.tokens, *(draft.tokens[i] for i in path)] for path in paths(draft.parents))]
        return Score(logits, torch.stack([self._future(context) for context in contexts]))

    def _future(self, context: Seq[int]) -> Tensor:
        tokens = plain_loop(self.logits, context, SamplingParams(max_tokens=HEADS + 1))[1:]
        return torch.eye(self.vocab_size)[tokens].flatten()


def seeing_heads() -> MedusaHeads:
    """Head i reads the i-th of what a Seer tells."""
    heads = MedusaHeads(HEADS * VOCAB, VOCAB, num_heads=HEADS).requires_grad_(False)
    for parameter in heads.blocks.parameters():
        parameter.zero_()
    for output, rows in zip(heads.outputs.parameters(), torch.eye(HEADS * VOCAB).chunk(HEADS), strict=True):
        output.copy_(30 * rows)
    return heads


def random_heads(size: int = VOCAB, *, num_heads: int = HEADS, num_layers: int = 1, few: bool = False) -> MedusaHeads:
    """For a target that shows its logits as its state."""
    torch.manual_seed(size)
    tokens = torch.arange(0, size, 2) if few else None
    return MedusaHeads(size, size, num_heads=num_heads, num_layers=num_layers, tokens=tokens).requires_grad_(False)


def plain_logits(heads: MedusaHeads, index: int, state: np.ndarray) -> np.ndarray:
    """h + SiLU(W h + b), then the output layer. [N]"""
    h = state.astype(np.float64)
    for block in heads.blocks[index]:  # type: ignore[attr-defined]
        x = block.weight.double().numpy() @ h + block.bias.double().numpy()
        h = h + x / (1 + np.exp(-x))
    found: np.ndarray = list(heads.outputs.parameters())[index].double().numpy() @ h
    return found


# the heads


@pytest.mark.parametrize("num_layers", [1, 2])
def test_heads_are_residual_blocks_and_an_output_layer(num_layers: int) -> None:
    heads, state = random_heads(num_layers=num_layers), torch.randn(5, VOCAB)
    found = heads(state)
    assert found.shape == (HEADS, 5, VOCAB)
    for i in range(HEADS):
        for row in range(5):
            expected = plain_logits(heads, i, state[row].numpy())
            np.testing.assert_allclose(found[i, row].numpy(), expected, atol=1e-5)
    assert torch.equal(heads(state, 2), found[:2])


@pytest.mark.parametrize("few", [False, True])
def test_new_heads_say_what_the_target_says_next(few: bool) -> None:
    heads, embedding, state = random_heads(few=few), torch.randn(VOCAB, VOCAB), torch.randn(VOCAB)
    heads.start_from(embedding)
    expected = embedding @ state
    for logits in heads(state):
        torch.testing.assert_close(logits, expected if heads.tokens is None else expected[heads.tokens])


# heads that know, heads that do not


@pytest.mark.parametrize("k", [1, 2, 3, 9])
def test_heads_that_see_the_future_are_always_right(k: int) -> None:
    target: Any = Seer(VOCAB)
    engine = LocalEngine(target, MedusaDrafter(seeing_heads(), width=1), num_speculative_tokens=k)
    results = engine.generate(PROMPTS, SamplingParams(max_tokens=30))
    assert [result.tokens for result in results] == [
        plain_loop(target.logits, prompt, SamplingParams(max_tokens=30)) for prompt in PROMPTS
    ]
    stats = engine.stats()
    assert stats.acceptance_rate == 1
    assert max(map(int, stats.draft_lengths)) == min(k, HEADS)
    assert results[0].stats.num_steps == 1 + -(-29 // (min(k, HEADS) + 1))


@pytest.mark.parametrize("width", [2, 5])
def test_in_a_tree_too_the_likeliest_path_is_theirs(width: int) -> None:
    target: Any = Seer(VOCAB)
    engine = LocalEngine(target, MedusaDrafter(seeing_heads(), width=width), num_speculative_tokens=8)
    engine.generate(PROMPTS, SamplingParams(max_tokens=30))
    assert engine.stats().acceptance_by_position == [1, 1, 1]
    assert set(engine.stats().draft_lengths) >= {"0", "8"}, "the rest of the budget went to other guesses"


@pytest.mark.parametrize("siblings", ["auto", "top", "drawn"])
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_that_know_nothing_change_nothing(kind: str, width: int, siblings: Any) -> None:
    """Alone, in a batch, and with a draft vocabulary; an end of sequence among the guesses."""
    target: Any = ToyTarget(VOCAB, eos=[EOS])
    each = [SamplingParams(max_tokens=count, **KINDS[kind]) for count in (20, 9, 14)]
    expected = [plain_loop(target.logits, *one, eos=[EOS]) for one in zip(PROMPTS, each, strict=True)]
    for k, few in ((1, False), (4, True), (9, False)):
        drafter = MedusaDrafter(random_heads(few=few), width=width, siblings=siblings)
        engine = LocalEngine(target, drafter, num_speculative_tokens=k)
        assert [result.tokens for result in engine.generate(PROMPTS, each)] == expected
        assert engine.generate(PROMPTS[0], each[0]).tokens == expected[0]
        assert engine.stats().num_drafts > 5


@pytest.mark.parametrize("options", [{"temperature": 1.0}, {"temperature": 1.0, "seed": 1}])
@pytest.mark.parametrize("trouble", ["nothing allowed", "all banned", "nan"])
def test_heads_without_a_possible_guess_cost_speed_only(trouble: str, options: dict[str, Any]) -> None:
    target: Any = ToyTarget(VOCAB)
    heads = random_heads(few=True)
    bans: dict[str, Any] = {
        "nothing allowed": {"allowed_tokens": (1, 3)},
        "all banned": {"bad_tokens": tuple(range(0, VOCAB, 2))},
    }
    if trouble == "nan":
        next(heads.outputs.parameters()).fill_(torch.nan)
    params = SamplingParams(max_tokens=6, **bans.get(trouble, {}), **options)
    results = LocalEngine(target, MedusaDrafter(heads)).generate(PROMPTS, params)
    assert all(len(result.tokens) == 6 for result in results)


# whose state is read


class Mixed(MedusaDrafter):
    """Drafts from heads and, at some steps, scripted trees or nothing, so that all kinds of verdicts come about."""

    def __init__(self, heads: MedusaHeads, plans: list[list[int]]) -> None:
        super().__init__(heads, width=2)
        self.plans, self.rng, self.kinds = plans, random.Random(1), Counter[str]()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        drafts = super().propose(seqs, budgets)
        return [self.rng.choice([draft, EMPTY, self._right(seq)]) for seq, draft in zip(seqs, drafts, strict=True)]

    def _right(self, seq: Sequence) -> Draft:
        """The right path behind wrong nodes, so that node numbers and depths differ."""
        plan = next(plan for plan in self.plans if plan[: len(seq)] == seq.tokens)
        a, b = [*plan[len(seq) :], 0, 0][:2]
        return Draft([(a + 1) % VOCAB, a, 0, b, (b + 1) % VOCAB], [-1, -1, 0, 1, 1])

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], scores: Seq[Score]) -> None:
        super().observe(seqs, drafts, verdicts, scores)
        for draft, verdict in zip(drafts, verdicts, strict=True):
            self.kinds[f"{bool(len(draft))} {len(verdict.accepted)} {verdict.is_bonus}"] += 1


def test_the_state_is_the_one_that_chose_the_last_token() -> None:
    """After accepted, recovered and bonus tokens and after steps without a draft: a toy's state is its logits."""
    target: Any = ToyTarget(VOCAB, memory=3)
    params = SamplingParams(max_tokens=40)
    drafter = Mixed(random_heads(), [[*p, *plain_loop(target.logits, p, params)] for p in PROMPTS])
    engine = LocalEngine(target, drafter, num_speculative_tokens=5)
    names = [engine.add(prompt, params) for prompt in PROMPTS]
    seqs = [engine._requests[name].seq for name in names]
    while engine.has_work:
        engine.step()
        for seq in seqs:
            if not seq.is_finished:
                expected = torch.from_numpy(target.logits(seq.tokens[:-1]))
                assert torch.equal(drafter._states[seq.id], expected)
    assert {"False 0 True", "True 0 False", "True 2 True"} <= set(drafter.kinds)
    assert not drafter._states


def observed(drafter: MedusaDrafter, target: ToyTarget, seq: Sequence) -> None:
    """As after a step that committed the sequence's last token."""
    state = torch.from_numpy(target.logits(seq.tokens[:-1]))
    drafter.observe([seq], [EMPTY], [Verdict([], seq.tokens[-1], True)], [Score(state[None], state[None])])


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3])
def test_the_tree_is_made_of_the_heads_guesses(width: int, kind: str, few: bool) -> None:
    """Head by head, from the definition of a head; a batch and a sequence of which nothing is known beside it."""
    target, heads = ToyTarget(VOCAB), random_heads(few=few)
    drafter = MedusaDrafter(heads, width=width, siblings="top")
    params = SamplingParams(**KINDS[kind])
    seqs = [sequence([*p, 8, 9], params, num_prompt_tokens=len(p), name=str(p), eos=[EOS]) for p in PROMPTS]
    for seq in seqs:
        observed(drafter, target, seq)
    budgets = [5, 0, 9]
    drafts = drafter.propose([*seqs, sequence([1, 2], params, name="new")], [*budgets, 4])
    assert drafts[1] == drafts[3] == EMPTY
    vocabulary = Vocabulary(VOCAB, heads.tokens)
    for seq, budget, draft in zip(seqs, budgets, drafts, strict=False):
        state = target.logits(seq.tokens[:-1])
        rows = [torch.from_numpy(plain_logits(heads, i, state)).float() for i in range(HEADS)]

        def guess(path: tuple[int, ...], seq: Sequence = seq, rows: list[Tensor] = rows) -> Any:
            return guesses(rows[len(path)][None], vocabulary, seq, [path], width, is_drawn=False)[0]

        expected = plain_tree(guess, budget=budget, width=width, depth=HEADS, eos=[EOS])
        found = [tuple(draft.tokens[node] for node in path) for path in paths(draft.parents)]
        assert found == list(expected)
        assert draft.drafter == ("medusa" if len(draft) else "none")
        (again,) = drafter.propose([seq], [budget])
        assert (again.tokens, again.parents) == (draft.tokens, draft.parents), "alone as in a batch, and once more"
        assert again.confidences == pytest.approx(draft.confidences)


def test_what_is_known_of_a_sequence_is_forgotten() -> None:
    target, drafter, seq = ToyTarget(VOCAB), MedusaDrafter(random_heads()), sequence([1, 2], name="a")
    observed(drafter, target, seq)
    assert len(drafter.propose([seq], [3])[0]) == 3
    drafter.forget(seq)
    drafter.forget(sequence([1], name="unknown"))
    assert drafter.propose([seq], [3]) == [EMPTY]
    drafter.dry_run(4)
    assert not drafter._states


def test_an_aborted_request_leaves_no_state() -> None:
    target: Any = ToyTarget(VOCAB)
    drafter = MedusaDrafter(random_heads())
    engine = LocalEngine(target, drafter, num_speculative_tokens=3)
    names = [engine.add(prompt, SamplingParams(max_tokens=30)) for prompt in PROMPTS]
    for _ in range(3):
        engine.step()
    assert set(drafter._states) == set(names)
    engine.abort(names[1])
    assert set(drafter._states) == {names[0], names[2]}


@pytest.mark.parametrize("width", [0, 17, -1, 1.0, True, "3"])
def test_widths_out_of_range(width: Any) -> None:
    with pytest.raises(OptionError, match=r"width is .*; a whole number from 1 \(a chain\) to 16"):
        MedusaDrafter(random_heads(), width=width)


def test_a_target_that_shows_no_states_is_refused() -> None:
    target: Any = ToyTarget(VOCAB)
    target.has_hidden = False
    with pytest.raises(OptionError, match=r"'medusa' reads the model's hidden states, which ToyTarget does not show"):
        LocalEngine(target, MedusaDrafter(random_heads()))
    LocalEngine(target, ScriptedDrafter(lambda tokens, budget: []))


def test_they_draft_what_they_were_trained_to_say() -> None:
    """The first guess at each depth is the training objective's at that place and distance."""
    target, heads = ToyTarget(VOCAB), random_heads()
    objective, drafter = MedusaObjective(heads, layer=1), MedusaDrafter(heads, width=1)
    tokens = random.Random(0).choices(range(VOCAB), k=12)
    states = torch.from_numpy(np.stack([target.logits(tokens[: i + 1]) for i in range(12)]))
    batch = Batch(torch.tensor([tokens]), states[None], torch.tensor([1]), torch.tensor([12]))
    compared = 0
    for each in objective.guesses(batch):
        for place, logits in zip(each.places.tolist(), each.logits, strict=True):
            seq = sequence(tokens[: place + 2], name=str(place))
            observed(drafter, target, seq)
            draft = drafter.propose([seq], [HEADS])[0]
            assert draft.tokens[each.ahead - 2] == int(logits.argmax())
            assert draft.confidences is not None
            assert draft.confidences[each.ahead - 2] == pytest.approx(float(logits.softmax(-1).max()), abs=1e-6)
            compared += 1
    assert compared == 10 + 9 + 8


# sampling


@pytest.mark.parametrize("rule", [None, Wary(0.4)], ids=["no rule", "wary"])
@pytest.mark.parametrize("kind", LAWS)
@pytest.mark.parametrize(("width", "siblings"), [(1, "auto"), (2, "drawn"), (3, "drawn"), (3, "top")])
def test_a_step_leaves_the_targets_distribution(
    width: int, siblings: Any, kind: str, rule: Wary | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exactly: every draft that can be drawn, and every way to verify it."""
    target = ToyTarget(3, scale=1.2, salt=2)
    drafter = MedusaDrafter(random_heads(3, num_heads=2), width=width, siblings=siblings)
    drafter.rule = rule
    seq = sequence([1, 2, 0], SamplingParams(**LAWS[kind]), num_prompt_tokens=1, eos=[0])
    observed(drafter, target, seq)
    check_law(monkeypatch, lambda: drafter.propose([seq], [4])[0], seq, target.logits)


@pytest.mark.parametrize(("width", "siblings"), [(3, "drawn"), (3, "top")])
def test_sampled_output_follows_the_target_with_everything_on(
    width: int, siblings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole requests in batches, with a controller that learns from what was accepted: chi-square."""
    monkeypatch.setattr(StepCosts, "observe", lambda *args, **kwargs: None)
    size, rows, rounds = 4, 50, 20
    target: Any = ToyTarget(size, memory=1, scale=1.0)
    drafter = MedusaDrafter(random_heads(size), width=width, siblings=siblings)
    controller = HeadsController(CostCurve(((1, 1.0), (50, 1.0), (100, 1.04), (450, 1.3))))
    monkeypatch.setattr(controller, "observe_times", lambda *args: None)
    engine = LocalEngine(target, drafter, num_speculative_tokens=controller, max_batch=rows)
    counts = np.zeros((size, size, size))
    for turn in range(rounds):
        each = [
            SamplingParams(max_tokens=5, temperature=1.1, seed=rows * turn + row, verification="rejection")
            for row in range(rows)
        ]
        for result in engine.generate([[1, 2]] * rows, each):
            counts[tuple(result.tokens[1:4])] += 1
    assert engine.stats().num_accepted_tokens > rows * rounds / 4
    p = np.stack([dense_p(target.logits([token]), SamplingParams(temperature=1.1), [], []) for token in range(size)])
    expected = np.einsum("s,sa,ab,bc->abc", p[2], p, p, p)
    likely = expected > 3 / counts.sum()  # the rare ones become one cell
    cells = [np.append(each[likely], each[~likely].sum()) for each in (counts, expected)]
    assert chi_square(*cells) < 1
