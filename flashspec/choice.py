"""How far to draft where guesses cost nothing; and which of two drafters guesses at a step.

A step's worth is what it emits less what its seconds would bring otherwise: tokens - rate * seconds, with the rate at
which this text has been coming (maximising it at each step maximises tokens a second in the long run; the
renewal-reward theorem). A quick drafter's guesses are free, and known with their confidences before anything else is
decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

from flashspec.controller import (
    MAX_TOKENS,
    PROBE_EVERY,
    PROBE_SHARE,
    Calibration,
    Controller,
    OwnGuesses,
    StepCosts,
    Times,
)
from flashspec.core import EMPTY, FIRST_TOKEN, LAST_TOKEN, Draft, Sequence
from flashspec.costs import CostCurve
from flashspec.tree import prefix

MARGIN = 1.25  # a guess is to bring so much more than its time would: rates and costs are estimates
DECAY = 0.9  # of what a text has shown, for each step
QUICK_SPEEDUP = 1.3  # of the quick drafter over plain decoding, before any text was seen
MOST_SPEEDUP = 2.0  # that is remembered, so that another kind of text is soon seen as such
RIVAL = 1.3  # such a speedup makes it likely that a draft model is not needed
NEWEST = 0.8  # share of the newest text in what is expected of the next: work of one kind comes in a row
COUNTED = 0.6  # of what a quick draft promises where the slow drafter could guess: what looks best disappoints
KNOWN_AFTER = 3  # steps that say as much as earlier texts do
FIRST_GAIN = 0.5  # tokens that a step's guesses bring, before any were made
LONG_DECAY = 0.99  # of what all texts have gained
PATIENCE = 0.05  # tokens
SHARE = 0.5  # of the steps that have a draft, before any was seen


@dataclass(slots=True)
class _Pace:
    """How fast a text comes, by what its steps should have cost."""

    tokens: float = 0.0  # decayed
    seconds: float = 0.0

    def observe(self, tokens: int, seconds: float) -> None:
        self.tokens = DECAY * self.tokens + tokens
        self.seconds = DECAY * self.seconds + seconds

    @property
    def rate(self) -> float:
        """Tokens a second; 0 before anything is known."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True)
class _Text:
    """What is known of one sequence."""

    pace: _Pace = field(default_factory=_Pace)
    rate: float = 0.0  # tokens a second of the batch, if all its rows were like this one; at least plain decoding's
    drafting: float = SHARE  # of its recent steps that had a draft
    others: float = 0.0  # rows of the batch that are likely to draft beside it
    guesses: OwnGuesses = field(default_factory=OwnGuesses)
    reason: str = ""


class QuickController:
    """The draft lengths of a drafter whose guesses cost nothing and come with confidences.

    Args:
        cost: of the target's forward.
        draft_cost: not used; made like the other controllers.
        max_tokens: the longest draft.
    """

    def __init__(self, cost: CostCurve, draft_cost: CostCurve | None = None, *, max_tokens: int = MAX_TOKENS) -> None:
        self.costs = StepCosts(cost)
        self.max_tokens = max_tokens
        self._calibration = Calibration()
        self._texts: dict[str, _Text] = {}
        self._rows = 1
        self._last: _Text | None = None

    # before drafting

    def budgets(self, seqs: Seq[Sequence], limits: Seq[int], backlogs: Seq[int]) -> list[int]:
        """Anything that fits: the guesses are weighed when they are there."""
        self._rows = len(seqs)
        plain = self._rows / self.costs.step(1, self._rows)
        texts = [self._texts.setdefault(seq.id, _Text()) for seq in seqs]
        drafting = sum(text.drafting for text in texts)
        for text, seq in zip(texts, seqs, strict=True):
            text.rate = max(text.pace.rate * self._rows, plain)
            text.others = drafting - text.drafting
            text.reason = LAST_TOKEN if seq.num_output_tokens else FIRST_TOKEN
        return [max(min(limit, self.max_tokens), 0) for limit in limits]

    def length(self, seq: Sequence, confidences: Seq[float], parents: Seq[int] | None = None) -> int:
        """See ``core.StoppingRule``: the length whose gain is largest, not the first at which it stops rising.

        Costs rise in steps, so that one more guess may not pay where five more do.
        """
        text = self._texts.get(seq.id)
        if text is None or not confidences:
            return len(confidences)
        best, most = 0, 0.0
        for n, expected in enumerate(accumulate(self._calibration.chances(text.guesses, confidences, parents)), 1):
            if (gain := expected - MARGIN * self._price(text, n)) > most:
                best, most = n, gain
        if best == 0:
            plain, price = self.costs.step(1, self._rows) / self._rows, self._price(text, 1) / text.rate
            return int(self._calibration.is_to_be_tried(confidences[0], price=price, plain=plain))
        return best

    def worth(self, seq: Sequence, confidences: Seq[float | None]) -> bool:
        """See ``core.StoppingRule``; asked for the nodes of a tree, each by its own path."""
        text = self._texts.get(seq.id)
        if text is None:
            return True
        chance = self._calibration.chances(text.guesses, confidences)[-1]
        return chance >= self._price(text, len(confidences)) - self._price(text, len(confidences) - 1)

    def advantage(self, seq: Sequence, draft: Draft) -> float:
        """Tokens that a draft at hand is expected to bring, less what its width would bring in the same time."""
        return self.expected(seq, draft) - self._price(self._texts[seq.id], len(draft))

    def expected(self, seq: Sequence, draft: Draft) -> float:
        """Accepted tokens of a draft at hand."""
        confidences: Seq[float | None] = draft.confidences or [None] * len(draft)
        return sum(self._calibration.chances(self._texts[seq.id].guesses, confidences, draft.parents))

    def rate(self, seq: Sequence) -> float:
        """Tokens a second at which the batch would come if all its rows were like this one."""
        return self._texts[seq.id].rate

    def reason(self, seq: Sequence) -> str:
        text = self._texts.get(seq.id)
        return text.reason if text is not None else ""

    def explain(self) -> str:
        """What it goes by at present."""
        plain = self.costs.step(1)
        widths = ", ".join(f"{n} tokens {self.costs.step(n) / plain:.2f}" for n in (2, 4, 8, 16))
        text = self._last or _Text()
        shown = ", ".join(
            f"{confidence:.0%} sure {self._calibration.chance(text.guesses, confidence):.0%}"
            for confidence in (0.35, 0.65, 0.85, 0.95)
        )
        return f"expected: of guesses {shown} hold; a forward of {widths} plain steps"

    # afterwards

    def observe(
        self,
        seq: Sequence,
        budget: int,
        draft: Draft,
        num_accepted: int,
        *,
        accepted: Seq[int] | None = None,
        sureness: Callable[[], float] | None = None,
    ) -> None:
        """What became of a draft; an empty one for a budget is news as well."""
        if budget == 0:
            return
        text = self._last = self._texts.setdefault(seq.id, _Text())
        self._calibration.observe(text.guesses, draft, range(num_accepted) if accepted is None else accepted)
        self.pace(seq, draft, 1 + num_accepted, self.costs.step(1 + len(draft), self._rows))

    def observe_unused(self, seq: Sequence, draft: Draft, *, since: int) -> None:
        """What would have become of a draft that was not scored: what the sequence has from ``since`` on tells.

        Learning from used drafts only would be learning from those that looked best, which disappoint.
        """
        came = seq.tokens[since:]
        known = prefix(draft, len(came))
        held = next((i for i, token in enumerate(known.tokens) if token != came[i]), len(known))
        self._calibration.observe(self._texts.setdefault(seq.id, _Text()).guesses, known, range(held))

    def pace(self, seq: Sequence, draft: Draft, tokens: int, seconds: float) -> None:
        """What a step with a draft, whoever made it, brought, and what it should have cost."""
        text = self._texts.setdefault(seq.id, _Text())
        text.drafting += (1 - DECAY) * ((len(draft) > 0) - text.drafting)
        text.pace.observe(tokens, seconds)

    def observe_times(self, drafts: Seq[Draft], budgets: Seq[int], backlogs: Seq[int], times: Times) -> None:
        self.costs.observe(list(map(len, drafts)), forward=times.forward, settling=times.settling)

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)

    def _price(self, text: _Text, n: int) -> float:
        """Tokens that would come in the time that n guesses add to a step, of which other rows pay their share."""
        drafting = 1 + text.others
        wider = self.costs.drafted(n, self._rows, drafting) - self.costs.step(1, self._rows)
        return text.rate * wider / drafting


@dataclass(slots=True)
class _Gain:
    """Whether a text's guesses have been worth what making them costs."""

    tokens: float  # accepted, less what the time of scoring them would have brought; a decayed mean
    num_idle: int = 0  # steps without a guess
    wait: int = PROBE_EVERY


class HeadsController(QuickController):
    """Likewise where all guesses of a step together cost a little: heads on the target's state.

    Args:
        cost: of the target's forward.
        draft_cost: of the heads', all guesses of a sequence at once.
        max_tokens: the largest draft.
    """

    def __init__(self, cost: CostCurve, draft_cost: CostCurve | None = None, *, max_tokens: int = MAX_TOKENS) -> None:
        super().__init__(cost, max_tokens=max_tokens)
        self._seconds = draft_cost(1) if draft_cost is not None else 0.0  # of drafting, for one sequence
        self._gains: dict[str, _Gain] = {}
        self._typical = FIRST_GAIN  # what texts have gained lately

    def budgets(self, seqs: Seq[Sequence], limits: Seq[int], backlogs: Seq[int]) -> list[int]:
        budgets = super().budgets(seqs, limits, backlogs)
        return [self._budget(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def observe(
        self,
        seq: Sequence,
        budget: int,
        draft: Draft,
        num_accepted: int,
        *,
        accepted: Seq[int] | None = None,
        sureness: Callable[[], float] | None = None,
    ) -> None:
        super().observe(seq, budget, draft, num_accepted, accepted=accepted)
        if budget:
            gain = self._gains.setdefault(seq.id, _Gain(self._typical))
            new = num_accepted - self._price(self._texts[seq.id], len(draft))
            gain.tokens += (1 - DECAY) * (new - gain.tokens)
            self._typical += (1 - LONG_DECAY) * (new - self._typical)
            gain.num_idle = 0

    def observe_times(self, drafts: Seq[Draft], budgets: Seq[int], backlogs: Seq[int], times: Times) -> None:
        super().observe_times(drafts, budgets, backlogs, times)
        if asked := sum(budget > 0 for budget in budgets):
            self._seconds += (1 - DECAY) * (times.drafting / asked - self._seconds)

    def explain(self) -> str:
        share = self._seconds / self.costs.step(1)
        return f"{super().explain()}; drafting {share:.2f}, which has to come in again"

    def forget(self, seq: Sequence) -> None:
        super().forget(seq)
        self._gains.pop(seq.id, None)

    def _budget(self, seq: Sequence, budget: int) -> int:
        """0 while guessing has not been worth its time, but for a try now and then."""
        gain, text = self._gains.setdefault(seq.id, _Gain(self._typical)), self._texts[seq.id]
        price = text.rate * self._seconds
        if budget == 0 or gain.tokens > price:
            gain.wait = PROBE_EVERY
            return budget
        gain.num_idle += 1
        earned = PROBE_SHARE * gain.num_idle * self.costs.step(1, self._rows)
        if gain.num_idle >= gain.wait and self._seconds <= earned:
            gain.wait = min(2 * gain.wait, 32 * PROBE_EVERY)
            gain.tokens = max(gain.tokens, price - PATIENCE)  # one good try is enough to go on with
            return budget
        text.reason = "guesses hold too rarely for what they cost"
        return 0


class HybridController:
    """The draft lengths of a ``HybridDrafter``; also its rule.

    Args:
        cost: of the target's forward.
        draft_cost: of the slow drafter's draft model.
        quick_name: the quick drafter's; its drafts carry it.
        max_tokens: the longest draft.
    """

    def __init__(
        self,
        cost: CostCurve,
        draft_cost: CostCurve | None = None,
        *,
        quick_name: str = "suffix",
        max_tokens: int = MAX_TOKENS,
    ) -> None:
        self.quick = QuickController(cost, max_tokens=max_tokens)
        self.slow = Controller(cost, draft_cost, max_tokens=max_tokens)
        self.max_tokens = max_tokens
        self.quick_name = quick_name
        self.costs = self.slow.costs
        self._rows = 1
        self._slow_budgets: dict[str, int] = {}  # of this step
        self._lengths: dict[str, int] = {}  # of the sequences, when this step began
        self._passed_over: dict[str, Draft] = {}  # quick drafts that gave way to slow ones
        self._others: dict[str, _Pace] = {}  # how a text would come without the slow drafter
        self._quick_speedup = QUICK_SPEEDUP  # over plain decoding, of the last few texts

    def budgets(self, seqs: Seq[Sequence], limits: Seq[int], backlogs: Seq[int]) -> list[int]:
        """What the quick drafter may try. What is left to the slow one is decided when its guesses are there."""
        budgets = self.quick.budgets(seqs, limits, backlogs)
        self._rows = len(seqs)
        for seq in seqs:
            others = self._others.setdefault(seq.id, self._typical())
            self.slow.compare(seq, others.rate * len(seqs), has_rival=self._quick_speedup > RIVAL)
        slow = self.slow.budgets(seqs, limits, backlogs)
        self._slow_budgets = {seq.id: budget for seq, budget in zip(seqs, slow, strict=True)}
        self._lengths = {seq.id: len(seq) for seq in seqs}
        return budgets

    def slow_budgets(self, seqs: Seq[Sequence], drafts: Seq[Draft], limits: Seq[int]) -> list[int]:
        """See ``drafters.hybrid.HybridRule``."""
        for seq, draft in zip(seqs, drafts, strict=True):
            if seq.drafter == self.quick_name and self._slow_budgets.get(seq.id, 0):
                self.slow.withdraw(seq)
                self._slow_budgets[seq.id] = 0
            budget = self._slow_budgets.get(seq.id, 0)
            if budget and len(draft) and self._is_better(seq, draft, budget, rows=len(seqs)):
                self.slow.withdraw(seq)
                self._slow_budgets[seq.id] = 0
            self._passed_over[seq.id] = draft
        return [self._slow_budgets.get(seq.id, 0) for seq in seqs]

    def worth(self, seq: Sequence, confidences: Seq[float | None]) -> bool:
        return self.quick.worth(seq, confidences)

    def length(self, seq: Sequence, confidences: Seq[float], parents: Seq[int] | None = None) -> int:
        return self.quick.length(seq, confidences, parents)

    def reason(self, seq: Sequence) -> str:
        return self.slow.reason(seq)

    def explain(self) -> str:
        return f"{self.slow.explain()}\n{self.quick_name}, {self.quick.explain()}"

    def observe(
        self,
        seq: Sequence,
        budget: int,
        draft: Draft,
        num_accepted: int,
        *,
        accepted: Seq[int] | None = None,
        sureness: Callable[[], float] | None = None,
    ) -> None:
        slow = self._slow_budgets.get(seq.id, 0) if budget else 0
        if slow:
            self.slow.observe(seq, slow, draft, num_accepted, accepted=accepted, sureness=sureness)
            seconds = self._step(len(draft)) + self.slow.costs.draft(len(draft), self._rows)
            self.quick.pace(seq, draft, 1 + num_accepted, seconds)
            self.quick.observe_unused(seq, self._passed_over.get(seq.id, EMPTY), since=self._lengths[seq.id])
            tokens, seconds = 1, self._step(0)  # plain decoding, had it not been asked
        else:
            self.slow.observe(seq, 0, EMPTY, 0, sureness=sureness)
            self.quick.observe(seq, budget, draft, num_accepted, accepted=accepted)
            tokens, seconds = 1 + num_accepted, self._step(len(draft))
        self._others.setdefault(seq.id, self._typical()).observe(tokens, seconds)

    def observe_times(self, drafts: Seq[Draft], budgets: Seq[int], backlogs: Seq[int], times: Times) -> None:
        slow = [
            0 if draft.drafter == self.quick_name else budget for draft, budget in zip(drafts, budgets, strict=True)
        ]
        drafted = max((len(draft) for draft, budget in zip(drafts, slow, strict=True) if budget), default=0)
        self.slow.observe_times(drafts, slow, backlogs, times, drafted=drafted)
        self.quick.observe_times(drafts, budgets, backlogs, times)

    def forget(self, seq: Sequence) -> None:
        self.quick.forget(seq)
        self.slow.forget(seq)
        for held in (self._slow_budgets, self._lengths, self._passed_over):
            held.pop(seq.id, None)
        others = self._others.pop(seq.id, None)
        if others is not None and seq.num_output_tokens > KNOWN_AFTER:
            speedup = min(others.rate * self._step(0), MOST_SPEEDUP)
            self._quick_speedup += NEWEST * (speedup - self._quick_speedup)

    def _step(self, drafted: int) -> float:
        """Seconds of a step, if all rows of the batch were like this one."""
        return self.slow.costs.step(1 + drafted, self._rows)

    def _typical(self) -> _Pace:
        """What the last few texts make one expect of a new one, worth some steps of its own."""
        return _Pace(KNOWN_AFTER * self._quick_speedup, KNOWN_AFTER * self._step(0))

    def _is_better(self, seq: Sequence, draft: Draft, slow_budget: int, *, rows: int) -> bool:
        """Whether a quick draft is worth more, though the slow drafter has to read what comes of it later."""
        rate, expected = self.quick.rate(seq), self.quick.expected(seq, draft)
        later = rate * self.slow.costs.catching_up(1 + expected)
        quick = self.quick.advantage(seq, draft) - (1 - COUNTED) * expected - later
        return quick >= self.slow.advantage(seq, slow_budget, rate=rate, rows=rows)
