"""The controller against acceptance whose best draft length is known, and against the promise of exactness."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from conftest import ToyTarget, chi_square, dense_p, plain_loop, sequence
from test_verify import WORLDS, Context, World, chain, check

from flashspec.choice import HeadsController, QuickController
from flashspec.controller import (
    ALL_DECAY,
    LEVELS,
    MAX_TOKENS,
    OWN_DECAY,
    PRIOR_DRAFTS,
    PRIOR_GUESSES,
    PRIOR_RATE,
    PROBE_EVERY,
    PROBE_SHARE,
    Calibration,
    Controller,
    OwnGuesses,
    Rates,
    StepCosts,
    Times,
    _Outlook,
)
from flashspec.core import EMPTY, FIRST_TOKEN, LAST_TOKEN, ROOT, Draft, SamplingParams, Sequence
from flashspec.costs import CostCurve
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.ngram import NGramDrafter
from flashspec.engine import LocalEngine
from flashspec.tree import best_first, paths

# seconds measured on two AVX2 cores: Qwen2.5-Coder-1.5B and its 0.5B (docs/log.md)
TARGET = CostCurve(
    ((1, .139), (4, .139), (5, .152), (6, .163), (8, .225), (12, .302), (17, .400), (32, .70), (64, 1.13)),
    ((1, .139), (4, .139), (8, .208), (16, .371)),
)  # fmt: skip
DRAFT = CostCurve(((1, 0.057), (4, 0.066), (16, 0.14), (64, 0.43)), ((1, 0.057), (4, 0.073), (8, 0.089), (16, 0.138)))
CHEAP = CostCurve(((1, 0.0057), (4, 0.0066), (16, 0.014), (64, 0.043)))
MIDDLE = CostCurve(((1, 0.028), (4, 0.029), (64, 0.06)))
Process = Callable[[int], tuple[float, float]]  # output position -> chance of acceptance, confidence


def steady(chance: float, confidence: float = 0.5) -> Process:
    return lambda position: (chance, confidence)


@dataclass
class World1:
    """One machine and one text: what a step takes, and how often guesses hold."""

    process: Process
    draft_cost: CostCurve | None = None
    seed: int = 0
    prompt: int = 40
    seconds: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)
    history: list[int] = field(default_factory=list)  # draft lengths in order

    def run(self, num_tokens: int, *, controller: Controller | None = None, k: int | None = None) -> float:
        """Seconds for so many tokens, with the controller or a fixed k."""
        rng = random.Random(self.seed)
        seq = Sequence(f"s{self.seed}", [0] * (self.prompt + 1), self.prompt, SamplingParams(max_tokens=num_tokens + 1))
        read = 0
        self.seconds = 0.0
        while (left := num_tokens + 1 - seq.num_output_tokens) > 0:
            limit = min(MAX_TOKENS, left - 1)
            backlog = len(seq) - read if self.draft_cost else 0
            budget = min(k, limit) if k is not None else controller.budgets([seq], [limit], [backlog])[0]  # type: ignore[union-attr]
            draft = self._draft(seq, budget, controller)
            if self.draft_cost and len(draft):
                self.seconds += self.draft_cost(1) * len(draft)
                self.seconds += self.draft_cost(backlog) - self.draft_cost(1) if backlog > 4 else 0.0
                read = len(seq)
            self.seconds += TARGET(len(draft) + 1)
            accepted = 0
            while accepted < len(draft) and rng.random() < self.process(seq.num_output_tokens + accepted)[0]:
                accepted += 1
            self.lengths[len(draft)] += 1
            self.history.append(len(draft))
            seq.tokens += [0] * min(accepted + 1, left)
            if controller is not None:
                controller.observe(seq, budget, draft, accepted)
        if controller is not None:
            controller.forget(seq)
        return self.seconds

    def _draft(self, seq: Sequence, budget: int, controller: Controller | None) -> Draft:
        confidences: list[float] = []
        while len(confidences) < budget:
            known = self.process(seq.num_output_tokens + len(confidences))[1]
            asked: list[float | None] = [*confidences, None if self.draft_cost else known]
            is_first_of_a_model = self.draft_cost is not None and not confidences
            if controller is not None and not is_first_of_a_model and not controller.worth(seq, asked):
                break
            confidences.append(known)
        return Draft.chain([0] * len(confidences), confidences=confidences)


def seconds(
    process: Process, draft_cost: CostCurve | None, *, requests: int, num_tokens: int = 63
) -> tuple[float, float, float]:
    """Of several requests: with one controller, with the best fixed k, and plain."""
    controller = Controller(TARGET, draft_cost)
    auto = sum(World1(process, draft_cost, seed).run(num_tokens, controller=controller) for seed in range(requests))
    fixed = [
        sum(World1(process, draft_cost, seed).run(num_tokens, k=k) for seed in range(requests))
        for k in (1, 2, 3, 4, 5, 8, 12, 16)
    ]
    return auto, min(fixed), requests * num_tokens * TARGET(1)


# the estimator


def test_positions_that_were_never_reached_count_for_nothing() -> None:
    """Acceptance .9, .5, .2 by position, drafts of random length: the naive accepted / drafted is far off."""
    rng, true = random.Random(0), [0.9, 0.5, 0.2]
    rates, drafted, accepted = Rates(decay=1.0), [0] * 3, [0] * 3
    for _ in range(20_000):
        length = rng.randint(1, 3)
        hits = 0
        while hits < length and rng.random() < true[hits]:
            hits += 1
        rates.observe(hits, length)
        for i in range(length):
            drafted[i] += 1
            accepted[i] += i < hits
    assert rates.estimate(3, [0.7] * 3) == pytest.approx(true, abs=0.02)
    assert accepted[2] / drafted[2] == pytest.approx(0.09, abs=0.02), "what ignoring the censoring would say"


def test_what_was_seen_long_ago_counts_less() -> None:
    rates = Rates(decay=0.95)
    for hits in [1] * 200 + [0] * 40:
        rates.observe(hits, 1)
    assert rates.estimate(1, [0.7])[0] < 0.35


def test_first_positions_tell_of_later_ones() -> None:
    """A text on which the first guess always holds is expected to do better at positions not tried yet."""
    good, bad = Rates(decay=1.0), Rates(decay=1.0)
    for _ in range(50):
        good.observe(1, 1)
        bad.observe(0, 1)
    prior = [0.7, 0.7, 0.7]
    assert all(rate > 0.9 for rate in good.estimate(3, prior))
    assert all(rate < 0.2 for rate in bad.estimate(3, prior))
    assert Rates(decay=1.0).estimate(3, prior) == pytest.approx(prior)


# the choice


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("draft_cost", [None, DRAFT, CHEAP])
def test_the_chosen_k_is_the_formulas(chance: float, draft_cost: CostCurve | None) -> None:
    """With plenty of observations: argmax of (1 + a + ... + a^k) / (cost(k + 1) + k c)."""
    controller = Controller(TARGET, draft_cost)
    rng, seq = random.Random(1), sequence([0] * 9, SamplingParams(max_tokens=10_000), num_prompt_tokens=8)
    for _ in range(1000):
        hits = 0
        while hits < MAX_TOKENS and rng.random() < chance:
            hits += 1
        controller.observe(seq, MAX_TOKENS, Draft.chain([0] * MAX_TOKENS), hits)

    def rate(k: int, a: float) -> float:
        draft = k * draft_cost(1) if draft_cost else 0.0
        return sum(a**i for i in range(k + 1)) / (TARGET(k + 1) + draft)

    k = controller.budgets([seq], [MAX_TOKENS], [0])[0]
    for _ in range(3 * PROBE_EVERY):  # a probe is not the choice
        k = min(k, controller.budgets([seq], [MAX_TOKENS], [0])[0])
    best = max(range(MAX_TOKENS + 1), key=lambda k: rate(k, chance))
    assert rate(k, chance) >= 0.93 * rate(best, chance), (k, best)


@pytest.mark.parametrize("chance", [0.05, 0.2, 0.4, 0.6, 0.8, 0.9, 0.98])
@pytest.mark.parametrize("draft_cost", [None, DRAFT, CHEAP])
def test_near_the_best_fixed_k_and_never_slower_than_plain(chance: float, draft_cost: CostCurve | None) -> None:
    auto, fixed, plain = seconds(steady(chance), draft_cost, requests=20)
    assert plain / auto >= 0.97
    assert min(fixed, plain) / auto >= 0.93, f"{plain / auto:.2f} x, the best fixed k {plain / fixed:.2f} x"


def test_confidence_beats_every_fixed_k() -> None:
    """Half of the guesses are sure and half are poor, and the drafter knows which."""

    def mixed(position: int) -> tuple[float, float]:
        return (0.97, 0.98) if (position // 8) % 2 else (0.15, 0.4)

    for draft_cost in (None, CHEAP, DRAFT):
        auto, fixed, _ = seconds(mixed, draft_cost, requests=10, num_tokens=200)
        assert fixed / auto > (0.95 if draft_cost is DRAFT else 1.05)


def test_it_turns_off() -> None:
    world = World1(steady(0.05), DRAFT)
    world.run(300, controller=Controller(TARGET, DRAFT))
    assert 0 < sum(length > 0 for length in world.history) < 20
    assert not any(world.history[40:])


@pytest.mark.parametrize("draft_cost", [None, CHEAP])
def test_it_comes_back(draft_cost: CostCurve | None) -> None:
    """Guesses fail for 300 tokens, then hold: within a hundred steps it drafts again, several tokens at a time."""
    expensive = CostCurve(((1, 0.1), (17, 1.7)))  # no free lunch: every scored token costs as much as a plain step

    def switch(position: int) -> tuple[float, float]:
        return (0.02, 0.5) if position < 300 else (0.98, 0.5)

    for cost in (TARGET, expensive) if draft_cost is None else (TARGET,):
        controller = Controller(cost, draft_cost)
        world = World1(switch, draft_cost)
        world.run(1500, controller=controller)
        if cost is expensive:
            assert sum(length > 0 for length in world.history[100:300]) < 20
            continue  # no k pays at such costs, whatever is accepted
        late = world.history[400:]
        assert np.mean(late) > 3, world.history


def test_a_probe_is_rare_and_its_price_is_bounded() -> None:
    """A draft model that has to read what it missed is not asked for more than a fiftieth of the time."""
    world = World1(steady(0.02), MIDDLE)
    took = world.run(2000, controller=Controller(TARGET, MIDDLE))
    assert 2000 * TARGET(1) / took > 0.97
    assert 2 <= sum(length > 0 for length in world.history[100:]) < 40


def test_reading_a_long_prompt_for_a_few_tokens_does_not_pay() -> None:
    controller = Controller(TARGET, DRAFT)
    seq = sequence([0] * 1001, SamplingParams(max_tokens=64), num_prompt_tokens=1000)
    assert controller.budgets([seq], [MAX_TOKENS], [1001]) == [0]
    assert "reading" in controller.reason(seq)
    short = sequence([0] * 41, SamplingParams(max_tokens=64), num_prompt_tokens=40, name="short")
    assert controller.budgets([short], [MAX_TOKENS], [41])[0] > 0


def looked_at(controller: Controller, name: str, sureness: float, *, prompt: int = 60) -> Sequence:
    """A sequence of six output tokens, of which the target was so sure."""
    seq = sequence([0] * (prompt + 6), SamplingParams(max_tokens=64), num_prompt_tokens=prompt, name=name)
    for _ in range(6):
        controller.observe(seq, 0, Draft.chain([]), 0, sureness=lambda: sureness)
    return seq


def test_a_draft_model_is_not_made_to_read_a_text_of_which_the_target_is_unsure() -> None:
    controller = Controller(TARGET, DRAFT)
    assert controller.budgets([looked_at(controller, "unsure", 0.2)], [MAX_TOKENS], [66]) == [0]
    assert controller.budgets([looked_at(controller, "sure", 0.95)], [MAX_TOKENS], [66])[0] > 0


def test_texts_of_one_kind_say_little_of_another_kind() -> None:
    """Guesses fail on texts of which the target is unsure; a sure text is tried all the same."""
    controller = Controller(TARGET, DRAFT)
    for i in range(5):
        seq = looked_at(controller, f"unsure{i}", 0.6)
        for _ in range(20):
            controller.observe(seq, 2, Draft.chain([0, 0]), 0)
    assert controller.budgets([looked_at(controller, "again", 0.6)], [MAX_TOKENS], [66]) == [0]
    assert controller.budgets([looked_at(controller, "sure", 0.95)], [MAX_TOKENS], [66])[0] > 0


def test_an_unsure_text_is_looked_at_before_it_is_read() -> None:
    controller = Controller(TARGET, DRAFT)
    seq = sequence([0] * 62, SamplingParams(max_tokens=64), num_prompt_tokens=60)
    controller.observe(seq, 0, Draft.chain([]), 0, sureness=lambda: 0.6)
    assert controller.budgets([seq], [MAX_TOKENS], [62]) == [0]
    assert controller.reason(seq) == "the text has only begun"


def test_in_a_batch_too_reading_has_to_pay() -> None:
    """Drafts for both rows would pay once their texts were read; for either alone they would not."""
    controller = Controller(TARGET, DRAFT)
    seqs = [looked_at(controller, name, 0.75, prompt=400) for name in ("a", "b")]
    assert controller.budgets(seqs, [MAX_TOKENS] * 2, [0, 0]) != [0, 0]
    assert controller.budgets(seqs, [MAX_TOKENS] * 2, [406, 406]) == [0, 0]


def test_the_choice_takes_little_time() -> None:
    """At a batch of 16 a step takes 370 ms here: the choice must stay within a hundredth."""
    controller = Controller(TARGET, DRAFT)
    seqs = [taught(controller, f"s{i}", 0.6) for i in range(16)]
    times = []
    for _ in range(20):
        started = time.perf_counter()
        controller.budgets(seqs, [MAX_TOKENS] * 16, [100] * 16)
        times.append(time.perf_counter() - started)
    assert min(times) < 0.0037


def test_reasons_for_no_draft() -> None:
    controller = Controller(TARGET)
    first = sequence([0] * 5, SamplingParams(max_tokens=8))
    assert controller.budgets([first], [0], [0]) == [0]
    assert controller.reason(first) == "the first token"
    last = sequence([0] * 12, SamplingParams(max_tokens=8), num_prompt_tokens=5, name="last")
    assert controller.budgets([last], [0], [0]) == [0]
    assert controller.reason(last) == "the last token"
    assert controller.reason(sequence([0], name="unknown")) == ""


# batches

STEEP = CostCurve(((1, 1.0), (8, 1.2), (16, 1.6), (64, 5.0)), ((1, 1.0), (4, 1.1), (8, 1.2)))


def test_a_padded_row_pays_for_the_width_and_a_packed_one_for_its_tokens() -> None:
    padded, packed = StepCosts(STEEP), StepCosts(replace(STEEP, is_ragged=True))
    assert padded.drafted(3, 8, 1) == pytest.approx(STEEP(4, 8))
    assert packed.drafted(3, 8, 1) == pytest.approx(STEEP(11 / 8, 8))
    assert packed.drafted(3, 8, 8) == padded.drafted(3, 8, 8)
    assert packed.drafted(0, 8, 3) == packed.step(1, 8)


def test_what_a_packed_step_took_is_told_by_its_tokens() -> None:
    costs = StepCosts(replace(STEEP, is_ragged=True))
    for _ in range(20):
        costs.observe([7, 0, 0, 0, 0, 0, 0, 1], forward=2 * STEEP(2, 8), settling=0.0)
    assert costs.drafted(8, 8, 1) == pytest.approx(2 * STEEP(2, 8))
    rng = random.Random(0)
    for _ in range(3000):
        costs.observe([rng.randrange(17) for _ in range(16)], forward=1.0, settling=0.0)
    assert len(costs._by_shape) < 100, "it is gone through at each step"


@pytest.mark.parametrize("is_ragged", [True, False])
def test_one_sure_row_of_many_drafts_where_it_does_not_widen_the_others(is_ragged: bool) -> None:
    controller = QuickController(replace(STEEP, is_ragged=is_ragged))
    seqs = [Sequence(f"s{i}", [0] * 20, 10, SamplingParams(max_tokens=90)) for i in range(8)]
    lengths = []
    for _ in range(30):
        controller.budgets(seqs, [8] * 8, [0] * 8)
        lengths.append(controller.length(seqs[0], [0.97] * 8))
        for seq in seqs:
            draft = Draft.chain([0] * lengths[-1], confidences=[0.97] * lengths[-1]) if seq is seqs[0] else EMPTY
            controller.observe(seq, 8, draft, len(draft))
            seq.tokens += [0] * (1 + len(draft))
    assert (lengths[-1] >= 5) is is_ragged
    assert (lengths[-1] == 0) is not is_ragged


def test_a_draft_model_guesses_for_the_rows_where_it_holds() -> None:
    """Four of eight rows: packed, their drafts cost what they hold; padded, the others' width as well."""
    good, bad = (_Outlook([rate**i for i in range(1, 9)], [1.0] * 8) for rate in (0.9, 0.05))
    packed, padded = (
        Controller(replace(STEEP, is_ragged=is_ragged), CostCurve(((1, 0.02), (8, 0.02))))._best([good] * 4 + [bad] * 4)
        for is_ragged in (True, False)
    )
    assert packed[1] == {0, 1, 2, 3}
    assert packed[0] > padded[0]
    assert packed[2] > padded[2]


def taught(controller: Controller, name: str, chance: float) -> Sequence:
    """A sequence that has shown this acceptance."""
    rng, seq = random.Random(name), sequence([0] * 9, SamplingParams(max_tokens=999), num_prompt_tokens=8, name=name)
    for _ in range(60):
        hits = 0
        while hits < 8 and rng.random() < chance:
            hits += 1
        controller.observe(seq, 8, Draft.chain([0] * 8), hits)
    return seq


def test_k_shrinks_to_0_as_the_batch_fills() -> None:
    chosen = []
    for rows in (1, 2, 4, 8, 16):
        controller = Controller(TARGET)
        seqs = [taught(controller, f"s{i}", 0.7) for i in range(rows)]
        chosen.append(max(controller.budgets(seqs, [MAX_TOKENS] * rows, [0] * rows)))
    assert chosen == sorted(chosen, reverse=True)
    assert chosen[0] >= 3
    assert chosen[-1] == 0


def test_draft_slots_go_where_they_pay() -> None:
    """With a draft model, each row that drafts costs: the rows whose guesses hold get the slots."""
    controller = Controller(TARGET, CostCurve(DRAFT.widths, ((1, 0.057), (4, 0.228))))
    bad, good = taught(controller, "bad", 0.02), taught(controller, "good", 0.97)
    assert controller.budgets([bad, good], [MAX_TOKENS] * 2, [0] * 2)[0] == 0
    assert controller.budgets([good, bad], [MAX_TOKENS] * 2, [0] * 2)[0] > 0


def test_a_row_that_would_draft_alone_pays_for_all() -> None:
    """Width 2 costs a batch of 4 two thirds of a step; rows that seldom have a guess do not share that."""
    for chance, is_worth in ((0.1, False), (1.0, True)):
        controller = Controller(TARGET)
        seqs = [sequence([0] * 9, SamplingParams(max_tokens=999), num_prompt_tokens=8, name=str(i)) for i in range(4)]
        rng = random.Random(0)
        for _ in range(100):
            for seq in seqs:
                has_guess = rng.random() < chance
                draft = Draft.chain([0] * has_guess, confidences=[0.99] * has_guess)
                controller.observe(seq, 1, draft, int(has_guess and rng.random() < 0.9))
        controller.budgets(seqs, [1] * 4, [0] * 4)
        assert controller.worth(seqs[0], [0.99]) is is_worth


def test_a_budget_is_never_above_its_limit() -> None:
    controller = Controller(TARGET)
    seqs = [taught(controller, f"s{i}", 0.99) for i in range(3)]
    for limits in ([0, 1, 16], [3, 0, 0], [0, 0, 0]):
        budgets = controller.budgets(seqs, limits, [0] * 3)
        assert all(budget <= limit for budget, limit in zip(budgets, limits, strict=True))


# stopping within a draft


def test_a_guess_is_drafted_if_its_gain_exceeds_its_cost() -> None:
    controller = Controller(TARGET, DRAFT)
    seq = taught(controller, "s", 0.8)
    controller.budgets([seq], [MAX_TOKENS], [0])
    for confidence, chance in ((0.2, 0.1), (0.999, 0.99)):
        for _ in range(300):
            hits = int(random.Random(repr((confidence, _))).random() < chance)
            controller.observe(seq, 1, Draft.chain([0], confidences=[confidence]), hits)
    controller.budgets([seq], [MAX_TOKENS], [0])
    assert controller.worth(seq, [0.999, None])
    assert not controller.worth(seq, [0.2, None])
    assert not controller.worth(seq, [0.999] * 3 + [0.2, None])


def test_a_class_of_guesses_once_found_wanting_is_tried_again() -> None:
    controller = Controller(TARGET)
    seq = taught(controller, "s", 0.9)
    for _ in range(300):
        controller.observe(seq, 1, Draft.chain([0], confidences=[0.2]), 0)
        controller.observe(seq, 1, Draft.chain([0], confidences=[0.999]), 1)
    controller.budgets([seq], [MAX_TOKENS], [0])
    for extra, every in ((0.5, PROBE_EVERY), (2.0, 2.0 / PROBE_SHARE)):  # of a step, for one more token
        controller.costs.target = CostCurve(((1, 0.1), (2, 0.1 + 0.1 * extra)))
        answers = [controller.worth(seq, [0.2]) for _ in range(8 * PROBE_EVERY)]
        assert sum(answers) == int(len(answers) / every)


# lossless


def stopping(world: World, controller: Controller, seq: Sequence) -> Callable[[Context], bool]:
    """The controller's rule, asked as ModelDrafter asks it: with the largest q at each prefix."""

    def stop(context: Context) -> bool:
        confidences = [float(world.q(context[:i]).max()) for i in range(len(context))]
        return bool(context) and not controller.worth(seq, [*confidences, None])

    return stop


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("world", WORLDS[:4], ids=str)
def test_the_output_is_the_targets_by_enumeration_with_the_stopping_rule_on(rule: str, world: World) -> None:
    controller = Controller(TARGET, MIDDLE)
    seq = taught(controller, "s", 0.6)
    rng = random.Random(0)
    for _ in range(400):  # classes of confidence that differ, so that the rule really splits the prefixes
        confidence = rng.random()
        controller.observe(seq, 1, Draft.chain([0], confidences=[confidence]), int(rng.random() < confidence))
    controller.budgets([seq], [3], [0])
    stop = stopping(world, controller, seq)
    answers = {stop((a, b)) for a in range(3) for b in range(3)} | {stop((a,)) for a in range(3)}
    assert answers == {True, False} or world in WORLDS[2:4], "the rule must make a difference to be tested"
    check(world, chain(3, stop), rule)


@pytest.fixture
def frozen_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs stay those that were given: toys take no time worth measuring."""
    monkeypatch.setattr(StepCosts, "observe", lambda *args, **kwargs: None)
    monkeypatch.setattr(StepCosts, "observe_draft", lambda *args, **kwargs: None)


def controlled(target: ToyTarget, drafter: object, *, seed: int = 0) -> LocalEngine:
    make = QuickController if isinstance(drafter, NGramDrafter) else Controller
    controller = make(CostCurve(((1, 1.0), (17, 2.6))), CostCurve(((1, 0.1), (64, 1.0))))
    return LocalEngine(target, drafter, num_speculative_tokens=controller)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", ["ngram", "model", "stranger"])
def test_tokens_are_plain_decodings_whatever_the_controller_does(
    name: str, params: dict[str, float], frozen_costs: None
) -> None:
    target = ToyTarget(scale=4.0)
    draft = ToyTarget(scale=4.0, salt=0 if name == "model" else 9)
    drafter = NGramDrafter(min_n=1) if name == "ngram" else ModelDrafter(draft, vocab_size=12)
    engine = controlled(target, drafter)
    sampling = SamplingParams(max_tokens=60, **params)  # type: ignore[arg-type]
    prompts = [[1, 2, 3], [5, 5, 5, 5, 5, 5], [7]]
    expected = [plain_loop(target.logits, prompt, sampling) for prompt in prompts]
    for _ in range(3):  # it goes on learning
        assert [result.tokens for result in engine.generate(prompts, sampling)] == expected
    assert engine.stats().num_drafts > 0


def test_sampled_output_follows_the_target_with_everything_on(frozen_costs: None) -> None:
    """Rejection sampling, a draft model that is half right, the controller and its stopping rule: chi-square."""
    params = SamplingParams(temperature=1.0, max_tokens=4)
    target, draft = ToyTarget(5, memory=1, scale=1.2), ToyTarget(5, memory=1, scale=1.5, salt=1)
    engine = controlled(target, ModelDrafter(draft, vocab_size=5))
    rounds, prompt = 4000, [1]
    counts = Counter(tuple(engine.generate(prompt, params).tokens[1:4]) for _ in range(rounds))
    assert engine.stats().num_drafts > rounds / 4

    def following(context: Seq[int]) -> np.ndarray:
        return dense_p(target.logits(context), params, [], [])

    first = following(prompt)
    p = np.zeros((5, 5, 5))
    for start in range(5):
        for a in range(5):
            for b in range(5):
                chances = following([start])[a] * following([a])[b] * following([b])
                p[a, b] += first[start] * chances
    observed = np.zeros((5, 5, 5))
    for tokens, count in counts.items():
        observed[tokens] = count
    assert chi_square(observed.ravel(), p.ravel()) < 1


# trees


@dataclass
class PlainCalibration:
    """Every guess that was looked at, in order; each counts less by the number of those after it."""

    kinds: dict[int, list[bool]] = field(default_factory=lambda: defaultdict(list))  # hits by class of confidence
    own: list[tuple[bool, float]] = field(default_factory=list)  # of this text: a hit, and what was expected

    def kind(self, confidence: float) -> int:
        return sum(border <= confidence for border in LEVELS)

    def rate(self, confidence: float) -> float:
        seen = self.kinds[self.kind(confidence)]
        weights = [ALL_DECAY**age for age in reversed(range(len(seen)))]
        hits = sum(weight for weight, is_hit in zip(weights, seen, strict=True) if is_hit)
        return (hits + PRIOR_GUESSES * confidence) / (sum(weights) + PRIOR_GUESSES)

    def chance(self, confidence: float) -> float:
        weights = [OWN_DECAY**age for age in reversed(range(len(self.own)))]
        hits, expected = (sum(w * each[i] for w, each in zip(weights, self.own, strict=True)) for i in range(2))
        return min(self.rate(confidence) * (hits + PRIOR_DRAFTS) / (expected + PRIOR_DRAFTS), 1.0)

    def observe(self, draft: Draft, accepted: Seq[int]) -> None:
        for node, parent in enumerate(draft.parents):
            if parent == ROOT or parent in accepted:
                confidence = (draft.confidences or [])[node]
                self.own.append((node in accepted, self.rate(confidence)))
                self.kinds[self.kind(confidence)].append(node in accepted)


def random_tree(rng: random.Random) -> Draft:
    parents = [rng.randrange(ROOT, node) for node in range(rng.randint(1, 9))]
    confidences = [rng.choice([rng.random(), *LEVELS]) for _ in parents]
    return Draft([0] * len(parents), parents, None, "tree", confidences)


def test_what_confidences_are_worth_is_learned_from_the_nodes_that_were_looked_at() -> None:
    """Those below a node that was not accepted say nothing; a chance is that of the whole path."""
    rng, found, plain, own = random.Random(0), Calibration(), PlainCalibration(), OwnGuesses()
    for _ in range(120):
        draft = random_tree(rng)
        assert draft.confidences is not None
        chances = [plain.chance(confidence) for confidence in draft.confidences]
        expected = [math.prod(chances[node] for node in path) for path in paths(draft.parents)]
        assert found.chances(own, draft.confidences, draft.parents) == pytest.approx(expected)
        in_a_row = list(itertools.accumulate(chances, lambda a, b: a * b))
        assert found.chances(own, draft.confidences) == pytest.approx(in_a_row)
        accepted = rng.choice([[], *paths(draft.parents)])
        found.observe(own, draft, accepted)
        plain.observe(draft, accepted)
    assert len(plain.own) > 200


def test_a_chain_teaches_as_a_tree_without_siblings() -> None:
    ways = []
    for accepted in (range(2), [0, 1]):
        calibration, own = Calibration(), OwnGuesses()
        calibration.observe(own, Draft.chain([0] * 4, confidences=[0.9, 0.8, 0.6, 0.5]), accepted)
        ways.append(calibration.chances(own, [0.9, 0.6, None]))
    assert ways[0] == ways[1]
    assert ways[0][-1] / ways[0][-2] < PRIOR_RATE, "one of three, the fourth was not looked at"


def stepped(rng: random.Random) -> CostCurve:
    """Plateaus and cliffs, never falling."""
    widths = sorted(rng.sample(range(2, MAX_TOKENS + 2), 5))
    more = itertools.accumulate(rng.choice([0.0, 0.02, 0.3, 0.8]) for _ in widths)
    return CostCurve(((1, 1.0), *((width, 1.0 + seconds) for width, seconds in zip(widths, more, strict=True))))


def test_of_a_tree_that_is_there_the_length_that_gains_most_is_kept() -> None:
    """Brute force over lengths; costs rise in steps, so that one more node may not pay where five more do."""
    rng, lengths = random.Random(0), Counter[int]()
    for _ in range(300):
        cost, draft = stepped(rng), random_tree(rng)
        controller, seq = Controller(cost), sequence([0] * 9, SamplingParams(max_tokens=99), num_prompt_tokens=8)
        controller.budgets([seq], [MAX_TOKENS], [0])
        sure = draft.confidences or []
        chances = [math.prod(sure[node] for node in path) for path in paths(draft.parents)]
        rate = controller._states[seq.id].goal[0]
        gains = [sum(chances[:n]) - rate * (cost(n + 1) - cost(1)) for n in range(len(draft) + 1)]
        length = controller.length(seq, sure, draft.parents)
        assert gains[length] == pytest.approx(max(gains))
        lengths[length] += 1
    assert len(lengths) > 6
    assert Controller(TARGET).length(sequence([0], name="unknown"), [0.1] * 3, [-1, -1, 0]) == 3, "no plan, no opinion"


def test_a_probe_drafts_a_node_of_a_tree_in_any_case() -> None:
    controller = Controller(CostCurve(((1, 1.0), (17, 9.0))))
    seq = taught(controller, "s", 0.0)
    budgets = [controller.budgets([seq], [MAX_TOKENS], [0])[0] for _ in range(20 * PROBE_EVERY)]
    assert set(budgets) == {0, 1}
    while not controller.budgets([seq], [MAX_TOKENS], [0])[0]:
        pass
    assert controller.length(seq, [0.01, 0.01], [-1, -1]) == 1
    controller.observe(seq, 1, Draft.chain([0], confidences=[0.01]), 0)
    controller.budgets([seq], [MAX_TOKENS], [0])
    assert controller.length(seq, [0.01, 0.01], [-1, -1]) == 0


# heads: all guesses of a step together cost a little


@dataclass
class HeadsClock:
    """One machine, one text after the other, and heads of which each guess holds as often as ``holds`` says.

    A tree has three candidates at each of four depths; they say of themselves that they are ``sure``.
    """

    holds: Callable[[int], tuple[float, ...]]  # output position -> chance that the candidate of each rank is right
    heads: float = 0.1  # seconds of making all guesses
    cost: CostCurve = TARGET
    sure: tuple[float, ...] = (0.7, 0.15, 0.05)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    seconds: float = 0.0
    drafted: list[int] = field(default_factory=list)  # nodes at each step
    budgets: list[int] = field(default_factory=list)

    def run(self, num_tokens: int, controller: HeadsController, name: str = "s") -> None:
        seq = sequence([0] * 9, SamplingParams(max_tokens=num_tokens + 1), num_prompt_tokens=8, name=name)
        while (left := num_tokens + 1 - seq.num_output_tokens) > 0:
            (budget,) = controller.budgets([seq], [min(MAX_TOKENS, left - 1)], [0])
            draft = self._draft(seq, budget, controller)
            drafting, forward = self.heads * (budget > 0), self.cost(1 + len(draft))
            self.seconds += drafting + forward
            self.budgets.append(budget)
            self.drafted.append(len(draft))
            accepted = self._accepted(seq, draft)
            seq.tokens += [0] * (len(accepted) + 1)
            controller.observe(seq, budget, draft, len(accepted), accepted=accepted)
            controller.observe_times([draft], [budget], [0], Times(drafting, forward, 0.0))
        controller.forget(seq)

    def _draft(self, seq: Sequence, budget: int, controller: HeadsController) -> Draft:
        """As ``Growth`` makes one; a token is the rank of its candidate."""
        if not budget:
            return EMPTY
        parents, ranks = best_first([self.sure] * 4, budget)
        count = controller.length(seq, [self.sure[rank] for rank in ranks], parents)
        return Draft(ranks[:count], parents[:count], None, "heads", [self.sure[rank] for rank in ranks[:count]])

    def _accepted(self, seq: Sequence, draft: Draft) -> list[int]:
        path: list[int] = []
        while True:
            chances, drawn = self.holds(seq.num_output_tokens + len(path)), self.rng.random()
            rank = next((i for i, end in enumerate(itertools.accumulate(chances)) if drawn < end), -1)
            at = path[-1] if path else ROOT
            below = [node for node, parent in enumerate(draft.parents) if parent == at and draft.tokens[node] == rank]
            if not below:
                return path
            path += below


def always(*chances: float) -> Callable[[int], tuple[float, ...]]:
    return lambda position: chances


def heads_controller(heads: float, cost: CostCurve = TARGET) -> HeadsController:
    return HeadsController(cost, CostCurve(((1, heads), (8, heads))))


@pytest.mark.parametrize(
    "sure", [(0.7, 0.15, 0.05), (0.95, 0.03, 0.01), (0.3, 0.2, 0.1)], ids=["sure", "boast", "meek"]
)
@pytest.mark.parametrize("heads", [0.01, 0.05, 0.15])
def test_heads_that_never_know_cost_next_to_nothing(heads: float, sure: tuple[float, ...]) -> None:
    """In one long text, and in many short ones."""
    for requests, num_tokens in ((1, 3000), (40, 100)):
        clock, controller = HeadsClock(always(0.0), heads * TARGET(1), sure=sure), heads_controller(heads * TARGET(1))
        for number in range(requests):
            clock.run(num_tokens, controller, str(number))
        assert clock.seconds <= 1.03 * requests * num_tokens * TARGET(1)
        assert sum(budget > 0 for budget in clock.budgets[len(clock.budgets) // 2 :]) > 0, "it is tried now and then"


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_heads_draft_where_that_pays_and_only_there(chance: float) -> None:
    """Beside plain decoding and the best number of nodes that never changes."""
    heads, num_tokens = 0.1 * TARGET(1), 1500
    holds = always(chance, 0.4 * (1 - chance), 0.2 * (1 - chance))
    sure = holds(0)
    controller = heads_controller(heads)
    clock = HeadsClock(holds, heads, sure=sure)
    clock.run(num_tokens, controller)
    fixed = []
    for count in (1, 2, 3, 4, 6, 8, 11, 16):
        parents, ranks = best_first([sure] * 4, count)
        gain = sum(math.prod(sure[ranks[node]] for node in path) for path in paths(parents))
        fixed.append((TARGET(1 + count) + heads) / (1 + gain))
    assert clock.seconds <= 1.05 * num_tokens * min(TARGET(1), *fixed)


def test_heads_come_back_when_the_text_can_be_foreseen() -> None:
    controller = heads_controller(0.02)
    clock = HeadsClock(lambda position: (0.9, 0.05) if position > 400 else (0.0, 0.0), 0.02)
    clock.run(1600, controller)
    assert sum(clock.drafted[60:300]) < 40, "nothing to be had"
    assert np.mean(np.array(clock.drafted[-100:]) > 0) > 0.9
    assert 1600 * TARGET(1) / clock.seconds > 1.3


def test_cheap_width_is_used_for_more_nodes() -> None:
    means = []
    for extra in (0.0, 0.03, 0.2, 1.0):
        cost = CostCurve(((1, 0.1), (17, 0.1 * (1 + 16 * extra))))
        clock = HeadsClock(always(0.7, 0.15, 0.05), 0.002, cost=cost)
        clock.run(600, heads_controller(0.002, cost))
        means.append(np.mean(clock.drafted[50:-20]))
    assert means[0] > 12
    assert means == sorted(means, reverse=True)
    assert means[0] > means[1] > means[2] > means[3]
    assert means[3] < 0.5


def test_dear_heads_are_left_alone_where_cheap_ones_are_used() -> None:
    drafted = []
    for heads in (0.02, 0.9):
        clock = HeadsClock(always(0.5, 0.2, 0.1), heads * TARGET(1), sure=(0.5, 0.2, 0.1))
        clock.run(800, heads_controller(heads * TARGET(1)))
        drafted.append(np.mean([budget > 0 for budget in clock.budgets[100:]]))
    assert drafted[0] > 0.9
    assert drafted[1] < 0.1


def test_what_heads_take_is_learned() -> None:
    """They were measured as free, and take as long as a step."""
    controller = HeadsController(TARGET, None)
    clock = HeadsClock(always(0.4, 0.1, 0.05), TARGET(1), sure=(0.4, 0.1, 0.05))
    clock.run(2000, controller)
    assert clock.seconds <= 1.06 * 2000 * TARGET(1)
    assert np.mean([budget > 0 for budget in clock.budgets[500:]]) < 0.05


def test_in_a_batch_only_those_draft_whose_guesses_hold() -> None:
    controller = heads_controller(0.03, CostCurve(((1, 0.139), (64, 0.2))))
    good, bad = (
        sequence([0] * 10, SamplingParams(max_tokens=99), num_prompt_tokens=8, name=n) for n in ("good", "bad")
    )
    for _ in range(40):
        budgets = controller.budgets([good, bad], [4, 4], [0, 0])
        for seq, budget in zip((good, bad), budgets, strict=True):
            draft = Draft.chain([0] * budget, confidences=[0.8] * budget)
            controller.observe(seq, budget, draft, budget if seq is good else 0)
    assert controller.budgets([good, bad], [4, 4], [0, 0]) == [4, 0]
    assert controller.budgets([bad, good], [4, 4], [0, 0]) == [0, 4]


def test_budgets_of_heads_have_reasons_and_leave_nothing() -> None:
    controller = HeadsController(TARGET, CostCurve(((1, 0.002), (8, 0.002))), max_tokens=6)
    seqs = [sequence([0] * (8 + n), SamplingParams(max_tokens=99), num_prompt_tokens=8, name=str(n)) for n in range(4)]
    assert controller.budgets(seqs, [0, 9, 2, 0], [0] * 4) == [0, 6, 2, 0]
    assert [controller.reason(seqs[i]) for i in (0, 3)] == [FIRST_TOKEN, LAST_TOKEN]
    for _ in range(40):
        controller.observe(seqs[1], 6, Draft.chain([0], confidences=[0.5]), 0)
    assert controller.budgets(seqs, [0, 9, 2, 0], [0] * 4)[1] == 0
    assert controller.reason(seqs[1]) == "guesses hold too rarely for what they cost"
    for seq in [*seqs, sequence([0], name="unknown")]:
        controller.forget(seq)
    assert not controller._gains
    assert not controller._texts
