"""Two drafters for one text: against scripted drafters, brute force, plain decoding and a virtual clock."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ScriptedDrafter, ToyTarget, chi_square, dense_p, plain_loop, sequence
from transformers import LlamaConfig, LlamaForCausalLM

from flashspec import choice, loader
from flashspec.backends.hf import HFTarget
from flashspec.bench.methods import pairs_of
from flashspec.choice import HeadsController, HybridController, QuickController
from flashspec.controller import MAX_TOKENS, PROBE_SHARE, Controller, StepCosts, Times
from flashspec.core import EMPTY, FIRST_TOKEN, LAST_TOKEN, Draft, Drafter, SamplingParams, Score, Sequence, Verdict
from flashspec.costs import CostCurve
from flashspec.drafters.eagle import EagleDrafter
from flashspec.drafters.hybrid import HybridDrafter
from flashspec.drafters.medusa import MedusaDrafter
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.suffix import SuffixDrafter
from flashspec.engine import AnyController, LocalEngine
from flashspec.errors import MemoryLimitError, ModelError, OptionError
from flashspec.heads.eagle import EagleConfig, EagleHead
from flashspec.heads.files import write_eagle, write_medusa
from flashspec.heads.medusa import MedusaHeads
from flashspec.pretrained import Loaded

# a target whose steps cost by the block of tokens, as the kernels' do, and draft models beside it, in seconds
TARGET = CostCurve(
    ((1, .139), (4, .139), (5, .152), (6, .163), (8, .225), (12, .302), (17, .400), (32, .70), (64, 1.13)),
    ((1, .139), (4, .139), (8, .208), (16, .371)),
)  # fmt: skip
CHEAP = CostCurve(((1, 0.0057), (4, 0.0066), (16, 0.014), (64, 0.043), (192, 0.12)))
MIDDLE = CostCurve(((1, 0.028), (4, 0.029), (64, 0.06), (192, 0.13)))
DEAR = CostCurve(((1, 0.057), (4, 0.066), (16, 0.14), (64, 0.43), (192, 1.2)))
RUINOUS = CostCurve(((1, 0.2), (192, 3.0)))  # one guess costs more than a plain step
TOY = CostCurve(((1, 1.0), (17, 2.6)))
TOY_DRAFT = CostCurve(((1, 0.1), (64, 1.0)))


def linear(extra: float) -> CostCurve:
    """A step of one token takes a second, each further token ``extra``; a batch is as cheap as a row."""
    return CostCurve(((1, 1.0), (64, 1.0 + 63 * extra)))


def text(name: str = "s", *, prompt: int = 8, output: int = 1, most: int = 9999) -> Sequence:
    return sequence([0] * (prompt + output), SamplingParams(max_tokens=most), num_prompt_tokens=prompt, name=name)


# the drafter, without a controller


class Parrot(Drafter):
    """One token, again and again, as sure as was said for each sequence; remembers what it was asked and told."""

    def __init__(self, name: str, token: int, sure: dict[str, float] | None = None, *, unread: int = 0) -> None:
        self.name, self.token, self.sure, self.unread = name, token, sure or {}, unread
        self.asked: list[list[int]] = []
        self.observed: list[list[Draft]] = []
        self.forgotten: list[str] = []

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        self.asked.append(list(budgets))
        return [self._draft(self.sure.get(seq.id), budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _draft(self, sure: float | None, budget: int) -> Draft:
        confidences = None if sure is None else [sure] * budget
        return Draft.chain([self.token] * budget, drafter=self.name, confidences=confidences)

    def backlog(self, seq: Sequence) -> int:
        return self.unread

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], scores: Seq[Score]) -> None:
        self.observed.append(list(drafts))

    def forget(self, seq: Sequence) -> None:
        self.forgotten.append(seq.id)


def pair(**sure: float) -> tuple[HybridDrafter, Parrot, Parrot]:
    quick, slow = Parrot("quick", 1, sure), Parrot("slow", 2, unread=7)
    return HybridDrafter(quick, slow), quick, slow


def test_a_sure_quick_draft_is_taken_and_the_slow_drafter_not_called() -> None:
    hybrid, quick, slow = pair(a=0.95, b=0.9)
    drafts = hybrid.propose([text("a"), text("b")], [3, 2])
    assert [(draft.drafter, draft.tokens) for draft in drafts] == [("quick", [1] * 3), ("quick", [1] * 2)]
    assert (quick.asked, slow.asked) == ([[3, 2]], [])


def test_an_unsure_one_gives_way_to_the_slow_drafters() -> None:
    hybrid, quick, slow = pair(a=0.2)
    assert hybrid.propose([text("a")], [3])[0].tokens == [2] * 3
    assert (quick.asked, slow.asked) == ([[3]], [[3]])


def test_guesses_that_come_without_confidences_are_not_sure() -> None:
    hybrid, _, slow = pair()
    assert hybrid.propose([text("a")], [3])[0].drafter == "slow"
    assert slow.asked == [[3]]


def test_each_sequence_of_a_batch_has_the_drafter_that_suits_it() -> None:
    hybrid, _, slow = pair(sure=0.95, unsure=0.1, neither=0.1)
    drafts = hybrid.propose([text("unsure"), text("sure"), text("neither")], [4, 3, 0])
    assert [draft.tokens for draft in drafts] == [[2] * 4, [1] * 3, []]
    assert slow.asked == [[4, 0, 0]], "a sequence with a sure guess is not drafted for twice"


def test_both_see_what_became_of_the_drafts_and_who_is_gone() -> None:
    hybrid, quick, slow = pair()
    quick.unread, seq = 3, text("a")
    hybrid.observe([seq], [EMPTY], [Verdict([], 0, True)], [Score(torch.zeros(1, 4))])
    hybrid.forget(seq)
    assert quick.observed == slow.observed == [[EMPTY]]
    assert quick.forgotten == slow.forgotten == ["a"]
    assert hybrid.backlog(seq) == 7, "only the slow one reads"


@pytest.mark.parametrize(("quick_needs", "slow_needs"), [*itertools.product([False, True], repeat=2)])
def test_hidden_states_are_there_for_whoever_needs_them(quick_needs: bool, slow_needs: bool) -> None:
    _, quick, slow = pair()
    quick.needs_hidden, slow.needs_hidden = quick_needs, slow_needs
    assert HybridDrafter(quick, slow).needs_hidden is (quick_needs or slow_needs)


def test_each_drafter_has_the_rule_that_is_its_own() -> None:
    hybrid, quick, slow = pair()
    both = HybridController(TOY, TOY_DRAFT)
    hybrid.rule = both
    assert (hybrid.rule, quick.rule, slow.rule) == (both, both.quick, both.slow)
    one = Controller(TOY)
    hybrid.rule = one
    assert quick.rule is slow.rule is one
    assert hybrid.propose([text("a")], [2])[0].drafter == "slow", "the hybrid rule before it must not live on"
    hybrid.rule = None
    assert quick.rule is slow.rule is None


@pytest.mark.parametrize(
    ("left", "drafters", "calls"),
    [([0, 0], ["quick", "quick"], []), ([0, 2], ["quick", "slow"], [[0, 2]])],
)
def test_the_slow_drafter_is_called_for_what_the_rule_leaves_it(
    left: list[int], drafters: list[str], calls: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A HybridRule's word counts, whatever the confidences."""
    hybrid, _, slow = pair(a=0.1, b=0.99)
    rule = hybrid.rule = HybridController(TOY, TOY_DRAFT)
    seen = []

    def slow_budgets(*args: Any) -> list[int]:
        seen.append(args)
        return left

    monkeypatch.setattr(rule, "slow_budgets", slow_budgets)
    seqs = [text("a"), text("b")]
    drafts = hybrid.propose(seqs, [3, 3])
    assert [draft.drafter for draft in drafts] == drafters
    assert slow.asked == calls
    ((asked, quick_drafts, limits),) = seen
    assert (asked, [len(draft) for draft in quick_drafts], limits) == (seqs, [3, 3], [3, 3])


# lossless


@pytest.fixture
def frozen_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs stay those that were given: toys take no time worth measuring."""
    monkeypatch.setattr(StepCosts, "observe", lambda *args, **kwargs: None)
    monkeypatch.setattr(StepCosts, "observe_draft", lambda *args, **kwargs: None)


class Sayer(Drafter):
    """Claims to be all but certain of ``guess(tokens)``; asks its rule as the real drafters do."""

    def __init__(self, name: str, guess: Callable[[list[int]], int], *, is_slow: bool = False) -> None:
        self.name, self.guess, self.is_slow = name, guess, is_slow

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._draft(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def _draft(self, seq: Sequence, budget: int) -> Draft:
        tokens = list(seq.tokens)
        while len(tokens) - len(seq) < budget and self._goes_on(seq, len(tokens) - len(seq)):
            tokens.append(self.guess(tokens))
        guessed = tokens[len(seq) :]
        if self.rule is not None and not self.is_slow:
            guessed = guessed[: self.rule.length(seq, [0.99] * len(guessed))]
        return Draft.chain(guessed, drafter=self.name, confidences=[0.99] * len(guessed))

    def _goes_on(self, seq: Sequence, count: int) -> bool:
        is_asked = self.is_slow and count > 0 and self.rule is not None
        return not is_asked or self.rule.worth(seq, [*[0.99] * count, None])  # type: ignore[union-attr]


class Counting(HybridDrafter):
    """Counts the drafts that it hands out, by drafter."""

    def __init__(self, quick: Drafter, slow: Drafter) -> None:
        super().__init__(quick, slow)
        self.drafts: Counter[str] = Counter()

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        drafts = super().propose(seqs, budgets)
        self.drafts.update(draft.drafter for draft in drafts if len(draft))
        return drafts


def wrong(target: ToyTarget) -> Callable[[list[int]], int]:
    """The least likely token."""
    return lambda tokens: int(target.logits(tokens).argmin())


def right(target: ToyTarget) -> Callable[[list[int]], int]:
    return lambda tokens: int(target.logits(tokens).argmax())


def hybrids(target: ToyTarget, size: int) -> dict[str, Counting]:
    """Drafters that are honest, half right, or liars."""
    stranger = ToyTarget(size, scale=4.0, salt=9, memory=target.memory)
    twin = ToyTarget(size, scale=target.scale, salt=target.salt, memory=target.memory)

    def model(draft: ToyTarget) -> ModelDrafter:
        return ModelDrafter(draft, vocab_size=size)

    liar, lying_model = Sayer("suffix", wrong(target)), Sayer("liar", wrong(target), is_slow=True)
    return {
        "twin": Counting(SuffixDrafter(), model(twin)),
        "stranger": Counting(SuffixDrafter(), model(stranger)),
        "quick liar": Counting(liar, model(twin)),
        "slow liar": Counting(SuffixDrafter(), lying_model),
        "liars": Counting(liar, lying_model),
        "knowing liar": Counting(Sayer("suffix", right(target)), lying_model),
    }


KINDS = ("twin", "stranger", "quick liar", "slow liar", "liars", "knowing liar")
PROMPTS = [[1, 2, 3], [5, 5, 5, 5, 5, 5], [7], [4, 9, 4, 9, 4]]


def controlled(target: ToyTarget, drafter: Drafter) -> LocalEngine:
    return LocalEngine(target, drafter, num_speculative_tokens=HybridController(TOY, TOY_DRAFT))


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_plain_decodings_whoever_drafts(kind: str, params: dict[str, Any], frozen_costs: None) -> None:
    target = ToyTarget(scale=4.0)
    drafter = hybrids(target, 12)[kind]
    engine = controlled(target, drafter)
    each = [SamplingParams(max_tokens=count, **params) for count in (60, 7, 33, 90)]
    expected = [plain_loop(target.logits, *one) for one in zip(PROMPTS, each, strict=True)]
    for _ in range(2):  # it goes on learning
        assert [engine.generate(*one).tokens for one in zip(PROMPTS, each, strict=True)] == expected
        assert [result.tokens for result in engine.generate(PROMPTS, each)] == expected
    assert set(drafter.drafts) == {drafter.quick.name, drafter.slow.name}, "both must have been at work"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_length_is_exact_too(kind: str) -> None:
    target, params = ToyTarget(scale=4.0), SamplingParams(max_tokens=40, temperature=0.7, seed=5)
    engine = LocalEngine(target, hybrids(target, 12)[kind], num_speculative_tokens=4)
    expected = [plain_loop(target.logits, prompt, params) for prompt in PROMPTS]
    assert [result.tokens for result in engine.generate(PROMPTS, params)] == expected


def distribution_of_three(target: ToyTarget, prompt: Seq[int]) -> np.ndarray:
    """Of the second to fourth tokens after a prompt, for a target that looks at the last one only. [V, V, V]"""
    params, size = SamplingParams(temperature=1.0), target.vocab_size
    rows = np.stack([dense_p(target.logits([token]), params, [], []) for token in range(size)])
    return np.asarray(np.einsum("s,sa,ab,bc->abc", rows[prompt[-1]], rows, rows, rows))


@pytest.mark.parametrize("kind", ["stranger", "liars"])
def test_sampled_output_follows_the_target(kind: str, frozen_costs: None) -> None:
    """Rejection sampling, both drafters at work, the controller and its stopping rules: chi-square."""
    params, prompt, rounds = SamplingParams(temperature=1.0, max_tokens=4), [1, 2, 3, 4, 0, 1], 4000
    target = ToyTarget(5, memory=1, scale=1.2)
    drafter = hybrids(target, 5)[kind]
    engine = controlled(target, drafter)
    counts = Counter(tuple(engine.generate(prompt, params).tokens[1:4]) for _ in range(rounds))
    assert min(drafter.drafts[name] for name in (drafter.quick.name, drafter.slow.name)) > rounds / 50, drafter.drafts
    observed = np.zeros((5, 5, 5))
    for tokens, count in counts.items():
        observed[tokens] = count
    assert chi_square(observed.ravel(), distribution_of_three(target, prompt).ravel()) < 1


# the draft lengths of guesses that cost nothing


def stepped(rng: random.Random) -> CostCurve:
    """Plateaus and cliffs, never falling."""
    widths = sorted(rng.sample(range(2, MAX_TOKENS + 2), 6))
    seconds = list(itertools.accumulate(rng.choice([0.0, 0.02, 0.3, 1.0]) for _ in widths))
    return CostCurve(((1, 1.0), *((width, 1.0 + more) for width, more in zip(widths, seconds, strict=True))))


def asked(controller: QuickController, seq: Sequence, confidences: Seq[float]) -> int:
    """A step's choice for one sequence alone."""
    controller.budgets([seq], [MAX_TOKENS], [0])
    return controller.length(seq, confidences)


def test_the_length_is_the_one_whose_gain_is_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Brute force, costs that rise in steps: a guess may not pay where five more do."""
    monkeypatch.setattr(choice, "MARGIN", 1.0)
    rng, lengths, waited = random.Random(0), Counter[int](), 0
    for _ in range(500):
        cost, sure = stepped(rng), [rng.uniform(0.3, 1.0) ** 0.3 for _ in range(rng.randint(1, MAX_TOKENS))]
        gains = [
            sum(math.prod(sure[: i + 1]) for i in range(n)) - (cost(n + 1) - cost(1)) / cost(1)
            for n in range(len(sure) + 1)
        ]
        best = max(range(len(gains)), key=lambda n: gains[n])
        length = asked(QuickController(cost), text(), sure)
        assert gains[length] == pytest.approx(gains[best], abs=1e-9)
        lengths[length] += 1
        waited += any(gains[n] < gains[n - 1] for n in range(1, length + 1))
    assert len(lengths) > 8
    assert waited > 50, "cases in which the first stop would have been wrong"


def test_nothing_is_drafted_where_nothing_pays() -> None:
    assert asked(QuickController(linear(1.0)), text(), [0.95] * 8) == 0
    assert asked(QuickController(linear(0.0)), text(), [0.05] * 8) == 8
    assert asked(QuickController(linear(0.1)), text(), []) == 0
    assert QuickController(linear(1.0)).length(text("unknown"), [0.1] * 3) == 3, "no plan, no opinion"


@pytest.mark.parametrize("extra", [0.3, 0.9, 3.0])
def test_a_class_found_wanting_is_tried_now_and_then(extra: float) -> None:
    controller, seq, steps = QuickController(linear(extra)), text(), 3000
    for _ in range(100):
        controller.observe(seq, 1, Draft.chain([0], confidences=[0.2]), 0)
    tried = 0
    for _ in range(steps):
        length = asked(controller, seq, [0.2])
        tried += length
        controller.observe(seq, 1, Draft.chain([0] * length, confidences=[0.2] * length), 0)
    assert 3 <= tried < steps / 8
    assert tried * extra <= 1.5 * PROBE_SHARE * steps


def taught(controller: QuickController, claimed: float, chance: float, steps: int, *, count: int = 4) -> Sequence:
    """A sequence whose guesses claimed one thing and did another."""
    rng, seq = random.Random(0), text()
    for _ in range(steps):
        controller.budgets([seq], [MAX_TOKENS], [0])
        hits = next((i for i in range(count) if rng.random() >= chance), count)
        controller.observe(seq, count, Draft.chain([0] * count, confidences=[claimed] * count), hits)
    return seq


def test_a_drafter_that_claims_too_much_is_soon_drafted_less() -> None:
    controller = QuickController(linear(0.5))
    assert asked(controller, text(), [0.9] * 8) > 2
    assert asked(controller, taught(controller, 0.9, 0.3, 60), [0.9] * 8) == 0


def test_a_drafter_that_claims_too_little_is_soon_drafted_more() -> None:
    controller = QuickController(linear(0.2))
    assert asked(controller, text(), [0.3] * 8) <= 1
    assert asked(controller, taught(controller, 0.3, 0.9, 60), [0.3] * 8) >= 3


def test_what_one_text_showed_is_known_of_the_next() -> None:
    controller = QuickController(linear(0.5))
    taught(controller, 0.9, 0.1, 100)
    assert asked(controller, text("next"), [0.9] * 8) == 0
    assert asked(controller, text("next"), [0.6] * 8) <= 1, "of other confidences little was learned"


@pytest.mark.parametrize("reads_tree", [False, True], ids=["length", "worth"])
def test_rows_that_draft_as_well_pay_their_share(reads_tree: bool) -> None:
    """The width is paid for by all rows, so that it is cheaper for each of several that use it."""
    prices = []
    for length in (0, 1):
        controller, seqs = QuickController(TARGET), [text(str(i)) for i in range(4)]
        for _ in range(60):
            controller.budgets(seqs, [MAX_TOKENS] * 4, [0] * 4)
            for seq in seqs[1:]:
                controller.observe(seq, 4, Draft.chain([0] * length, confidences=[0.9] * length), length)
        controller.budgets(seqs, [MAX_TOKENS] * 4, [0] * 4)
        if reads_tree:
            prices.append(int(controller.worth(seqs[0], [0.8])))
        else:
            prices.append(controller.length(seqs[0], [0.95] * 8))
    alone, beside_others = prices
    assert alone < beside_others


def test_budgets_are_what_fits() -> None:
    controller = QuickController(TOY, max_tokens=6)
    seqs = [text(name, output=output) for name, output in (("a", 3), ("b", 1), ("last", 9), ("first", 0))]
    assert controller.budgets(seqs, [16, 4, 0, 0], [0] * 4) == [6, 4, 0, 0]
    assert controller.reason(seqs[2]) == LAST_TOKEN
    assert controller.reason(seqs[3]) == FIRST_TOKEN
    assert controller.reason(text("unknown")) == ""


@pytest.mark.parametrize("make", [QuickController, HybridController])
def test_neither_the_first_nor_the_last_token_is_drafted(make: type[AnyController], frozen_costs: None) -> None:
    target = ToyTarget(scale=4.0)
    engine = LocalEngine(target, Sayer("suffix", right(target)), num_speculative_tokens=make(TOY))
    for count in (1, 2, 3):
        result = engine.generate([1, 2], SamplingParams(max_tokens=count))
        assert result.stats.no_draft.get(FIRST_TOKEN) == 1
        assert result.stats.no_draft.get(LAST_TOKEN, 0) == (count == 2)
        assert result.stats.num_drafts == (count == 3)


# which of the two drafts, on a virtual clock


@dataclass
class Told:
    """A text, and how well the drafters of a simulation know it."""

    tokens: list[int]  # prompt, then what plain decoding would emit
    num_prompt: int
    model: Callable[[int], tuple[float, float]]  # position -> chance that its guess is right, its confidence

    def sequence(self, name: str) -> Sequence:
        params = SamplingParams(max_tokens=len(self.tokens) - self.num_prompt)
        return Sequence(name, self.tokens[: self.num_prompt + 1], self.num_prompt, params)


class Knower(Drafter):
    """Right as often as ``known`` says of a position; a draft model if it has a cost, else a free guesser."""

    def __init__(
        self,
        name: str,
        known: Callable[[Told, int], tuple[float, float]],
        texts: dict[str, Told],
        cost: CostCurve | None = None,
    ) -> None:
        self.name, self.known, self.texts, self.cost = name, known, texts, cost
        self.seconds = 0.0  # spent so far
        self.num_asked = 0
        self._read: dict[str, int] = {}

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        found: list[list[tuple[int, float]]] = [[] for _ in seqs]
        live = [i for i, budget in enumerate(budgets) if budget]
        self.num_asked += len(live)
        for i in live:
            self._pay_reading(seqs[i])
        while live:
            self.seconds += self.cost(1, len(live)) if self.cost else 0.0
            for i in live:
                found[i].append(self._guess(seqs[i], len(found[i])))
            live = [i for i in live if len(found[i]) < budgets[i] and self._goes_on(seqs[i], found[i])]
        return [self._draft(seq, guesses) for seq, guesses in zip(seqs, found, strict=True)]

    def backlog(self, seq: Sequence) -> int:
        return len(seq) - self._read.get(seq.id, 0) if self.cost else 0

    def forget(self, seq: Sequence) -> None:
        self._read.pop(seq.id, None)

    def _pay_reading(self, seq: Sequence) -> None:
        if self.cost:
            self.seconds += self.cost(self.backlog(seq)) - self.cost(1)
            self._read[seq.id] = len(seq)

    def _guess(self, seq: Sequence, ahead: int) -> tuple[int, float]:
        told, at = self.texts[seq.id], len(seq) + ahead
        chance, confidence = self.known(told, at)
        is_right = random.Random(f"{self.name}/{seq.id}/{at}").random() < chance
        return told.tokens[at] if is_right else -1, confidence

    def _goes_on(self, seq: Sequence, guesses: list[tuple[int, float]]) -> bool:
        confidences = [confidence for _, confidence in guesses]
        return self.cost is None or self.rule is None or self.rule.worth(seq, [*confidences, None])

    def _draft(self, seq: Sequence, guesses: list[tuple[int, float]]) -> Draft:
        sure = [confidence for _, confidence in guesses]
        count = len(sure) if self.cost or self.rule is None else self.rule.length(seq, sure)
        tokens = [token for token, _ in guesses[:count]]
        return Draft.chain(tokens, drafter=self.name, confidences=sure[:count])


@dataclass
class Race:
    """One machine: a clock that counts what the parts of a step cost, and who drafted in which step."""

    controller: AnyController
    drafter: Drafter
    model: Knower | None = None  # the one whose seconds count
    seconds: float = 0.0
    num_tokens: int = 0
    used: list[str] = field(default_factory=list)  # of each row of each step, the drafter whose draft it was

    def run(self, texts: dict[str, Told], *, rows: int = 1) -> Race:
        """All texts, so many at a time."""
        self.drafter.rule = self.controller
        waiting = [told.sequence(name) for name, told in texts.items()]
        running: list[Sequence] = []
        while waiting or running:
            while waiting and len(running) < rows:
                running.append(waiting.pop(0))
            self._step(running, texts)
            for seq in [seq for seq in running if len(seq) == len(texts[seq.id].tokens)]:
                running.remove(seq)
                self.drafter.forget(seq)
                self.controller.forget(seq)
        return self

    def _step(self, seqs: list[Sequence], texts: dict[str, Told]) -> None:
        limits = [min(MAX_TOKENS, len(texts[seq.id].tokens) - len(seq) - 1) for seq in seqs]
        backlogs = [self.drafter.backlog(seq) for seq in seqs]
        budgets = self.controller.budgets(seqs, limits, backlogs)
        before = self.model.seconds if self.model else 0.0
        drafts = self.drafter.propose(seqs, budgets) if any(budgets) else [EMPTY] * len(seqs)
        drafting = self.model.seconds - before if self.model else 0.0
        forward = TARGET(1 + max(map(len, drafts)), len(seqs))
        self.seconds += drafting + forward
        for seq, budget, draft in zip(seqs, budgets, drafts, strict=True):
            assert len(draft) <= budget
            came = texts[seq.id].tokens[len(seq) : len(seq) + len(draft)]
            hits = next((i for i, token in enumerate(draft.tokens) if token != came[i]), len(draft))
            seq.tokens += texts[seq.id].tokens[len(seq) : len(seq) + hits + 1]
            self.num_tokens += hits + 1
            self.used.append(draft.drafter if len(draft) else "")
            self.controller.observe(seq, budget, draft, hits)
        self.controller.observe_times(drafts, budgets, backlogs, Times(drafting, forward, 0.0))

    @property
    def speed(self) -> float:
        """Tokens in the time of a plain step of one row."""
        return self.num_tokens * TARGET(1) / self.seconds


def of_model(told: Told, position: int) -> tuple[float, float]:
    return told.model(position)


def steady(chance: float, confidence: float) -> Callable[[Told, int], tuple[float, float]]:
    return lambda told, position: (chance, confidence)


def race(texts: dict[str, Told], cost: CostCurve, *, quick: Drafter | None = None, rows: int = 1) -> dict[str, Race]:
    """The same texts with both drafters, and with each alone."""
    model, alone = (Knower("model", of_model, texts, cost) for _ in range(2))
    both = HybridDrafter(quick or SuffixDrafter(), model)
    return {
        "hybrid": Race(HybridController(TARGET, cost), both, model).run(texts, rows=rows),
        "quick": Race(QuickController(TARGET), quick or SuffixDrafter()).run(texts, rows=rows),
        "slow": Race(Controller(TARGET, cost), alone, alone).run(texts, rows=rows),
    }


def repeating(rng: random.Random, count: int) -> list[int]:
    """A paragraph again and again, a word of it changed now and then."""
    block = [rng.randrange(1000) for _ in range(30)]
    return [rng.randrange(1000) if rng.random() < 0.03 else block[i % 30] for i in range(count)]


def fresh(rng: random.Random, count: int) -> list[int]:
    """Words of which the commoner ones come again, and what follows them does not."""
    return [min(int(rng.expovariate(0.02)), 999) for _ in range(count)]


PROMPT, OUTPUT, STRETCH = 40, 240, 60
Known = tuple[float, float]


def made(kind: str, seed: int) -> Told:
    """A text of one of four kinds."""
    rng = random.Random(f"{kind}/{seed}")
    count = PROMPT + OUTPUT
    if kind == "repeats":
        return Told(repeating(rng, count), PROMPT, lambda at: (0.6, 0.6))
    if kind == "known":
        return Told(fresh(rng, count), PROMPT, lambda at: (0.92, 0.9))
    if kind == "neither":
        return Told(fresh(rng, count), PROMPT, lambda at: (0.1, 0.3))
    pieces = [(fresh if i % 2 else repeating)(rng, STRETCH) for i in range(math.ceil(count / STRETCH))]
    return Told(
        list(itertools.chain(*pieces))[:count], PROMPT, lambda at: (0.92, 0.9) if (at // STRETCH) % 2 else (0.5, 0.6)
    )


def many(kind: str, count: int = 10) -> dict[str, Told]:
    return {f"{kind}{seed}": made(kind, seed) for seed in range(count)}


@pytest.mark.parametrize("cost", [CHEAP, MIDDLE, DEAR], ids=["cheap", "middle", "dear"])
@pytest.mark.parametrize("kind", ["repeats", "known", "switches", "neither"])
def test_two_drafters_are_as_fast_as_the_better_one(kind: str, cost: CostCurve) -> None:
    raced = race(many(kind), cost)
    speeds = {name: round(each.speed, 2) for name, each in raced.items()}
    assert raced["hybrid"].speed >= 0.95 * max(raced["quick"].speed, raced["slow"].speed), speeds
    assert raced["hybrid"].speed >= 0.98, "never slower than plain decoding"


@pytest.mark.parametrize("cost", [CHEAP, MIDDLE, DEAR], ids=["cheap", "middle", "dear"])
def test_they_are_faster_than_either_on_a_text_that_switches(cost: CostCurve) -> None:
    raced = race(many("switches"), cost)
    assert raced["hybrid"].speed > 1.05 * max(raced["quick"].speed, raced["slow"].speed)
    assert {"suffix", "model"} <= set(raced["hybrid"].used)


def against(quick: Known, slow: Known, cost: CostCurve, *, count: int = 1) -> tuple[Race, Knower]:
    """Fresh texts with two drafters that know so much of them, both made up."""
    texts = many("known", count)
    model = Knower("model", steady(*slow), texts, cost)
    both = HybridDrafter(Knower("suffix", steady(*quick), texts), model)
    return Race(HybridController(TARGET, cost), both, model).run(texts), model


@pytest.mark.parametrize("cost", [MIDDLE, DEAR], ids=["middle", "dear"])
def test_of_two_that_are_right_the_free_one_drafts(cost: CostCurve) -> None:
    both, _ = against((0.95, 0.95), (0.95, 0.95), cost, count=5)
    assert both.used.count("suffix") > 0.9 * len(both.used)


@pytest.mark.parametrize("cost", [CHEAP, MIDDLE], ids=["cheap", "middle"])
def test_a_quick_drafter_that_is_wrong_is_soon_passed_over(cost: CostCurve) -> None:
    """Within one text, whatever it goes on claiming."""
    both, _ = against((0.0, 0.95), (0.95, 0.95), cost)
    late = both.used[25:]
    assert late.count("model") > 0.9 * len(late)


@pytest.mark.parametrize("known", [0.95, 0.5], ids=["known", "half"])
def test_a_slow_drafter_that_costs_more_than_a_step_is_left_alone(known: float) -> None:
    """But for trials within their share of the time."""
    both, model = against((0.3, 0.3), (known, 0.9), RUINOUS, count=10)
    assert model.seconds <= 1.5 * PROBE_SHARE * both.seconds
    assert both.used.count("model") < len(both.used) / 50


@pytest.mark.parametrize("is_right", [True, False], ids=["right", "wrong"])
def test_a_quick_draft_that_was_not_used_teaches_all_the_same(is_right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slow one drafts at every step: what came tells what the quick one's guesses were worth."""
    controller, seq = HybridController(TARGET, CHEAP), text()
    monkeypatch.setattr(controller.slow, "advantage", lambda *args, **kwargs: math.inf)
    guess = Draft.chain([1] * 3, drafter="suffix", confidences=[0.6] * 3)
    controller.budgets([seq], [MAX_TOKENS], [0])
    before = controller.quick.expected(seq, guess)
    for _ in range(20):
        budgets = controller.budgets([seq], [MAX_TOKENS], [0])
        monkeypatch.setattr(controller.slow, "budgets", lambda *args: [3])
        if not controller.slow_budgets([seq], [guess], budgets)[0]:
            continue  # the first step's budget was not made up yet
        seq.tokens += [1, 1, 1] if is_right else [2, 2, 2]
        controller.observe(seq, MAX_TOKENS, Draft.chain([2] * 3, drafter="model"), 2)
    change = controller.quick.expected(seq, guess) - before
    assert change > 0.2 if is_right else change < -0.2


@pytest.mark.parametrize("eos", [(), (3,)], ids=["length", "end of sequence"])
def test_guesses_that_were_right_are_never_learned_as_wrong(
    eos: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, frozen_costs: None
) -> None:
    """The quick drafter is always right and never used; drafts go on behind a text's end."""
    target = ToyTarget(scale=4.0, eos=eos)
    engine = controlled(target, HybridDrafter(Sayer("suffix", right(target)), Sayer("m", right(target), is_slow=True)))
    assert isinstance(engine.controller, HybridController)
    monkeypatch.setattr(engine.controller.slow, "advantage", lambda *args, **kwargs: math.inf)
    learned = []
    monkeypatch.setattr(
        engine.controller.quick._calibration,
        "observe",
        lambda own, draft, held: learned.append((len(draft), len(held))),
    )
    for first in range(12):
        assert engine.generate([1, first], SamplingParams(max_tokens=30)).tokens
    assert len(learned) > 12
    assert all(held == count for count, held in learned), learned


def test_a_probe_that_gave_way_is_due_again() -> None:
    controller, seq = HybridController(TARGET, CHEAP), text()
    for _ in range(60):
        controller.slow.observe(seq, 4, Draft.chain([0] * 4, confidences=[0.5] * 4), 0)
    sure = Draft.chain([1] * 3, drafter="suffix", confidences=[0.97] * 3)
    given, left = [], []
    for _ in range(80):
        budgets = controller.budgets([seq], [MAX_TOKENS], [0])
        given.append(controller._slow_budgets[seq.id])
        left += controller.slow_budgets([seq], [sure], budgets)
        seq.tokens += [1] * 4
        controller.observe(seq, MAX_TOKENS, sure, 3)
    first = given.index(1)
    assert not any(left), "a sure draft is better than a trial"
    assert all(given[first:]), "it was withdrawn each time"
    controller.budgets([seq], [MAX_TOKENS], [0])
    assert controller.slow_budgets([seq], [EMPTY], [MAX_TOKENS]) == [1], "nothing else is there: now it is made"
    controller.observe(seq, MAX_TOKENS, Draft.chain([9], drafter="model"), 0)
    controller.budgets([seq], [MAX_TOKENS], [0])
    assert controller.slow_budgets([seq], [EMPTY], [MAX_TOKENS]) == [0], "and then not for a while"


def test_a_mixed_batch_says_nothing_wrong_of_the_slow_drafters_cost() -> None:
    """One row has 16 quick guesses, the other two slow ones: two forwards of the draft model, not sixteen."""
    controller = HybridController(TARGET, MIDDLE)
    quick, slow = (Draft.chain([0] * count, drafter=name) for count, name in ((16, "suffix"), (2, "model")))
    before = controller.slow.costs.draft(2)
    times = Times(drafting=2 * MIDDLE(1), forward=TARGET(17, 2), settling=0.0)
    controller.observe_times([quick, slow], [16, 2], [0, 1], times)
    assert controller.slow.costs.draft(2) == pytest.approx(before)


# in a batch


@pytest.mark.parametrize("kind", ["repeats", "known", "switches", "neither"])
@pytest.mark.parametrize("cost", [CHEAP, MIDDLE, DEAR], ids=["cheap", "middle", "dear"])
def test_in_a_batch_too_they_are_as_fast_as_the_better_one(kind: str, cost: CostCurve) -> None:
    """Two rows: at four of this target's, hardly any draft pays."""
    raced = race(many(kind, 12), cost, rows=2)
    speeds = {name: round(each.speed, 2) for name, each in raced.items()}
    assert raced["hybrid"].speed >= 0.9 * max(raced["quick"].speed, raced["slow"].speed), speeds


# what is left of a request


def held(engine: LocalEngine) -> dict[str, list[str]]:
    """The ids in every dictionary of the controllers and drafters."""
    controller, drafter = engine.controller, engine.drafter
    assert isinstance(controller, HybridController)
    assert isinstance(drafter, HybridDrafter)
    owners = (controller, controller.quick, controller.slow, drafter, drafter.quick, drafter.slow)
    return {
        f"{type(owner).__name__}.{name}": list(value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, dict)
    }


def test_a_finished_request_leaves_nothing_nor_does_an_aborted_one(frozen_costs: None) -> None:
    target = ToyTarget(scale=4.0)
    draft = ToyTarget(scale=4.0)
    engine = controlled(target, HybridDrafter(SuffixDrafter(), ModelDrafter(draft, vocab_size=12)))
    ids = [engine.add(prompt, SamplingParams(max_tokens=40)) for prompt in PROMPTS]
    for _ in range(6):
        engine.step()
    full = {name for name, known in held(engine).items() if ids[0] in known}
    assert {"HybridController._passed_over", "QuickController._texts", "Controller._states"} <= full
    assert {"SuffixDrafter._requests", "ModelDrafter._shadows"} <= full
    engine.abort(ids[0])
    assert not any(ids[0] in known for known in held(engine).values())
    while engine.has_work:
        engine.step()
    assert not any(held(engine).values())
    assert not target.held
    assert not draft.held


def test_a_request_that_never_ran_may_be_forgotten() -> None:
    controller = HybridController(TOY, TOY_DRAFT)
    controller.forget(text("unknown"))
    HybridDrafter(SuffixDrafter(), ModelDrafter(ToyTarget(), vocab_size=12)).forget(text("unknown"))


# by name


@pytest.mark.parametrize("auto", [None, "auto"])
@pytest.mark.parametrize(("draft", "name"), [("owner/small", "hybrid"), (None, "suffix")])
def test_auto_is_hybrid_where_there_is_a_draft_model(auto: str | None, draft: str | None, name: str) -> None:
    kind, chosen = loader.choose_drafter(auto, draft=draft)
    assert chosen == name
    assert kind is loader.DRAFTERS[name]


def test_a_drafter_is_chosen_by_its_name() -> None:
    for name, kind in loader.DRAFTERS.items():
        assert loader.choose_drafter(name, draft="owner/small") == (kind, name), "what lies on a hub may be anything"
    own = Parrot("mine", 1)
    assert loader.choose_drafter(own) == (None, "mine")
    for name, what in (("model", "a draft model"), ("hybrid", "a draft model or a folder of heads")):
        with pytest.raises(OptionError, match=f"drafter '{name}' needs {what}; name it with --draft, or use --drafter"):
            loader.choose_drafter(name)
    for unknown in ("hibrid", 3):
        with pytest.raises(OptionError, match=f"drafter is {unknown!r}; it must be auto"):
            loader.choose_drafter(unknown, draft="owner/small")  # type: ignore[arg-type]


class Words:
    """A tokenizer as far as a loader and prompts of token ids need one."""

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(12)}

    def decode(self, tokens: Seq[int], **options: bool) -> str:
        return " ".join(map(str, tokens))


def toy_model(name: str, **identity: Any) -> Loaded:
    return Loaded(name, ToyTarget(), Words(), identity)


@pytest.mark.parametrize(
    ("identity", "runtime"), [({"llama.cpp": "1.0"}, "llama.cpp"), ({"torch": "2.8"}, "torch")], ids=["gguf", "torch"]
)
def test_the_reason_names_the_draft_model_and_what_runs_it(identity: dict[str, Any], runtime: str) -> None:
    reason = loader.reason_for("hybrid", pair()[0], toy_model("tiny-draft", **identity))
    assert "drafter hybrid" in reason
    assert "tiny-draft" in reason
    assert f"({runtime})" in reason
    assert "own tokenizer" not in reason
    assert "no draft model" in loader.reason_for("suffix", SuffixDrafter(), None)


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """``load`` gets toys; ``is_full`` says whether memory is too small for a draft model."""
    state = {"is_full": False}

    def fake(model: str, *, is_draft: bool = False, **options: Any) -> Loaded:
        if is_draft and state["is_full"]:
            raise MemoryLimitError("the draft model needs 9 GB; 1 GB is free")
        return toy_model(model, torch="2.8")

    monkeypatch.setattr(loader, "load_model", fake)
    monkeypatch.setattr(loader, "cost_curve", lambda *args, is_draft=False, **kwargs: TOY_DRAFT if is_draft else TOY)
    return state


@pytest.mark.parametrize("auto", [None, "auto"])
def test_auto_loads_both_drafters(auto: str | None, models: dict[str, bool]) -> None:
    engine = loader.load("big", draft="small", drafter=auto)
    assert isinstance(engine.drafter, HybridDrafter)
    assert isinstance(engine.controller, HybridController)
    assert engine.controller.slow.costs.draft_model is TOY_DRAFT
    assert "small (torch)" in engine.why
    assert engine.generate([1, 2], SamplingParams(max_tokens=9)).tokens == plain_loop(
        ToyTarget().logits, [1, 2], SamplingParams(max_tokens=9)
    )


@pytest.mark.parametrize("auto", [None, "auto"])
def test_a_draft_model_that_does_not_fit_is_done_without(
    auto: str | None, models: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    models["is_full"] = True
    with caplog.at_level(logging.WARNING, logger="flashspec"):
        engine = loader.load("big", draft="small", drafter=auto)
    assert "the draft model needs 9 GB" in caplog.text
    assert isinstance(engine.drafter, SuffixDrafter)
    assert isinstance(engine.controller, QuickController)
    assert "drafter suffix" in engine.why


def test_a_drafter_of_the_users_own_gets_the_controller_of_its_kind(models: dict[str, bool]) -> None:
    assert isinstance(loader.load("big", drafter=SuffixDrafter(min_match=2)).controller, QuickController)
    assert isinstance(loader.load("big", drafter=ScriptedDrafter(lambda tokens, budget: [])).controller, Controller)


@pytest.mark.parametrize("name", ["hybrid", "model", "translated"])
def test_a_drafter_that_was_asked_for_is_not_replaced(name: str, models: dict[str, bool]) -> None:
    models["is_full"] = True
    with pytest.raises(MemoryLimitError, match="9 GB"):
        loader.load("big", draft="small", drafter=name)


def test_a_draft_model_that_nobody_uses_is_said_to_be_left_out(
    models: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="flashspec"):
        engine = loader.load("big", draft="small", drafter="suffix")
    assert "small is not loaded: drafter is 'suffix'; leave that out for one that reads it" in caplog.text
    assert engine.why == "drafter suffix, as asked"


# heads by name

SIZE, LAYERS = 12, 4
Folders = dict[str, str]


@functools.cache
def network() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=16, intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    """A draft model, Medusa heads and an EAGLE-3 head for one target, and Medusa heads for a wider one."""
    torch.manual_seed(1)
    facts: dict[str, Any] = {"base": "big", "accuracies": [0.5], "expected_length": 1.5}
    network().config.save_pretrained(tmp_path / "model")
    write_medusa(MedusaHeads(16, SIZE, num_heads=2), tmp_path / "medusa", **facts)
    write_medusa(MedusaHeads(24, SIZE, num_heads=2), tmp_path / "wide", **facts)
    config = EagleConfig(layer=network().config, draft_vocab_size=SIZE, target_hidden_size=16, feature_layers=(1, 2, 3))
    write_eagle(EagleHead(config), tmp_path / "eagle3", max_position_embeddings=64, **facts)
    return {name: str(tmp_path / name) for name in ("model", "medusa", "wide", "eagle3")}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    """``load`` gets a tiny Llama, whose steps cost what was made up."""
    fake = lambda model, **options: Loaded(model, HFTarget(network()), Words(), {"torch": "2.8"})  # noqa: E731
    monkeypatch.setattr(loader, "load_model", fake)
    monkeypatch.setattr(loader, "cost_curve", lambda *args, is_draft=False, **kwargs: TOY_DRAFT if is_draft else TOY)


@pytest.mark.parametrize("auto", [None, "auto"])
@pytest.mark.parametrize("held", ["model", "medusa", "eagle3"])
def test_auto_is_hybrid_whatever_guesses_beside_the_text(held: str, auto: str | None, folders: Folders) -> None:
    kind, name = loader.choose_drafter(auto, draft=folders[held])
    assert name == "hybrid"
    assert loader.heads_read(loader.DRAFTERS["hybrid"], folders[held]) == (None if held == "model" else held)
    assert kind is loader.DRAFTERS["hybrid"]


WHAT = {"model": "a draft model", "medusa": "a folder of Medusa heads", "eagle3": "a folder with an EAGLE-3 head"}


@pytest.mark.parametrize("held", WHAT)
@pytest.mark.parametrize("asked", ["model", "translated", "medusa", "eagle3"])
def test_a_drafter_that_reads_something_else_is_refused_in_a_line(asked: str, held: str, folders: Folders) -> None:
    needs = "model" if asked == "translated" else asked
    if needs == held:
        assert loader.choose_drafter(asked, draft=folders[held]) == (loader.DRAFTERS[asked], asked)
        return
    with pytest.raises(OptionError) as caught:
        loader.choose_drafter(asked, draft=folders[held])
    assert str(caught.value) == (
        f"drafter {asked!r} needs {WHAT[needs]}, and {folders[held]!r} is {WHAT[held]}; "
        "leave out --drafter, or name another with --draft"
    )


@pytest.mark.parametrize("asked", ["medusa", "eagle3"])
def test_heads_have_to_be_named(asked: str) -> None:
    with pytest.raises(OptionError, match=f"^drafter '{asked}' needs {WHAT[asked]}; name it with --draft, or use "):
        loader.choose_drafter(asked)


def test_a_benchmark_has_each_drafter_with_each_draft_that_it_reads(folders: Folders) -> None:
    model, medusa, eagle3 = (folders[name] for name in WHAT)
    drafts = [medusa, model, eagle3]
    for names, pairs in (
        (["model", "medusa", "eagle3"], [("model", model), ("medusa", medusa), ("eagle3", eagle3)]),
        (["hybrid"], [("hybrid", medusa), ("hybrid", model), ("hybrid", eagle3)]),
        (["auto", "hybrid"], [("hybrid", medusa), ("hybrid", model), ("hybrid", eagle3)]),
        (["suffix", "none", "ngram"], [("suffix", None), ("ngram", None)]),
    ):
        assert pairs_of(names, drafts) == [("none", None), *pairs]
    assert pairs_of(["auto"], []) == [("none", None), ("suffix", None)]
    assert pairs_of(["medusa"], [medusa, folders["wide"]])[1:] == [("medusa", medusa), ("medusa", folders["wide"])]
    assert pairs_of(["medusa"], ["owner/name", medusa])[1:] == [("medusa", "owner/name"), ("medusa", medusa)]


@pytest.mark.parametrize(
    ("names", "held", "message"),
    [
        (
            ["medusa"],
            ["eagle3", "model"],
            "drafter 'medusa' needs a folder of Medusa heads, and .*eagle3' is a folder w",
        ),
        (["model"], ["medusa"], "drafter 'model' needs a draft model, and .*medusa' is a folder of Medusa heads"),
        (["suffix", "eagle3"], [], "drafter 'eagle3' needs a folder with an EAGLE-3 head; name it with --draft"),
        (["medusae"], ["medusa"], "drafter is 'medusae'; it must be auto or one of"),
    ],
)
def test_a_benchmark_refuses_a_drafter_that_reads_none_of_the_drafts(
    names: list[str], held: list[str], message: str, folders: Folders
) -> None:
    with pytest.raises(OptionError, match=message):
        pairs_of(names, [folders[name] for name in held])


def plain(params: SamplingParams) -> list[list[int]]:
    def logits(context: Seq[int]) -> np.ndarray:
        found: np.ndarray = HFTarget(network()).plain_logits(list(context)).numpy()
        return found

    return [plain_loop(logits, prompt, params) for prompt in PROMPTS]


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("length", [4, "auto"])
@pytest.mark.parametrize(("asked", "held", "made", "controller"), [
    ("medusa", "medusa", MedusaDrafter, HeadsController), ("eagle3", "eagle3", EagleDrafter, Controller),
    ("auto", "medusa", MedusaDrafter, HybridController), ("auto", "eagle3", EagleDrafter, HybridController),
])  # fmt: skip
def test_heads_are_loaded_by_name(
    asked: str, held: str, made: type[Drafter], controller: type[Any], length: int | str, folders: Folders
) -> None:
    """And the text stays the target's own, alone and in a batch."""
    engine = loader.load(
        "big", draft=folders[held], drafter=asked, num_speculative_tokens=length, draft_dtype="float32", draft_width=2
    )
    slow: Any = getattr(engine.drafter, "slow", engine.drafter)
    assert slow.width == 2
    assert type(slow) is made
    assert isinstance(engine.drafter, HybridDrafter) == (asked == "auto")
    assert type(engine.controller) is (controller if length == "auto" else type(None))
    assert held in engine.why.lower()
    for params in (SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, temperature=0.9, seed=2)):
        results = engine.generate(PROMPTS, params)
        assert [result.tokens for result in results] == plain(params)
    assert engine.stats().num_drafts > 5 or length == "auto"


@pytest.mark.usefixtures("served")
def test_heads_for_another_width_are_refused_with_the_numbers(folders: Folders) -> None:
    with pytest.raises(
        ModelError, match=r"wide'.* are for a hidden size of 24 \(big\), and the target has 16; name heads"
    ):
        loader.load("big", draft=folders["wide"], draft_dtype="float32", num_speculative_tokens=2)


@pytest.mark.usefixtures("served")
def test_heads_made_for_another_model_are_said_to_guess_badly(
    folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="flashspec"):
        for model in ("somewhere/BIG", "bigger"):
            loader.load(model, draft=folders["medusa"], draft_dtype="float32", num_speculative_tokens=2)
    (message,) = (record.getMessage() for record in caplog.records)
    assert "were trained for big, and the model is bigger" in message


@pytest.mark.usefixtures("served")
@pytest.mark.parametrize("asked", ["auto", "medusa", "eagle3", "hybrid"])
def test_heads_beside_a_target_without_hidden_states_are_refused(
    asked: str, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's show none."""
    monkeypatch.setattr(HFTarget, "has_hidden", False)
    folder = folders["eagle3" if asked == "eagle3" else "medusa"]
    with pytest.raises(
        OptionError, match=r"^heads read the model's hidden states, which HFTarget does not show; leave "
    ):
        loader.load("big", draft=folder, drafter=asked, num_speculative_tokens=2)


def test_llamacpp_shows_no_hidden_states() -> None:
    llamacpp = pytest.importorskip("flashspec.backends.llamacpp")
    assert llamacpp.LlamaTarget.has_hidden is False


@pytest.mark.parametrize("width", [0, 17, True])
@pytest.mark.parametrize("name", ["medusa", "hybrid"])
def test_widths_out_of_range_are_refused(name: str, width: int) -> None:
    drafter: Drafter = MedusaDrafter(MedusaHeads(16, SIZE))
    with pytest.raises(OptionError, match=r"width is .*; a whole number from 1 \(a chain\) to 16"):
        loader.shaped(HybridDrafter(SuffixDrafter(), drafter) if name == "hybrid" else drafter, width)


def test_a_width_is_for_drafters_of_trees() -> None:
    with pytest.raises(OptionError, match=r"draft_width is 2, and this drafter has none to choose; .*, or use model, "):
        loader.shaped(SuffixDrafter(), 2)
    drafter = MedusaDrafter(MedusaHeads(16, SIZE), width=3)
    assert loader.shaped(drafter, None) is drafter
    assert drafter.width == 3
    assert loader.shaped(None, None) is None
