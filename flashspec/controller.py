"""How far to draft: what a step costs on this machine against how often guesses hold on this text.

G(k) = (1 + s_1 + ... + s_k) / (cost(k + 1) + draft(k)), s_i the chance that the first i guesses are all accepted;
G(0) = 1 / cost(1). The best k is chosen for every step, 0 included. Within a draft, a drafter that knows how sure
it is asks before each guess whether one more is worth its cost.

Lossless: the choice looks at earlier verdicts, at the clock and at confidences, which are functions of the prefix;
never at a token that was drawn and may then be left out.

Sources: G(k) is the goodput of SmartSpec (Liu et al. 2024, arXiv 2406.14066); stopping by confidence is as in
SpecDec++ (Huang et al. 2024, arXiv 2405.19715), with a calibration learned while running in place of a trained head.
"""

from __future__ import annotations

import math
import operator
import statistics
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

from flashspec.core import FIRST_TOKEN, LAST_TOKEN, READING, ROOT, Draft, Sequence
from flashspec.costs import CostCurve
from flashspec.tree import height

AUTO = "auto"
MAX_TOKENS = 16  # the longest draft that ``auto`` considers
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)
OWN_DECAY = 0.95  # of what a sequence has shown, for each further draft: texts change
ALL_DECAY = 0.99  # of what all sequences have shown
PRIOR_RATE = 0.7  # acceptance before anything was seen
SURENESS = (0.4, 0.55, 0.7, 0.8, 0.9)  # borders of the classes of texts, by how sure the target is of its own tokens
LOOK_EVERY = 8  # steps between two looks at things that change slowly, to keep a step's choice cheap
LOOK_FIRST = 5  # tokens of a text to be seen before a draft model is made to read it, unless it is sure
SURE_CLASS = 3
PRIOR_DRAFTS = 6.0  # what is known from elsewhere counts as much as so many drafts
PRIOR_GUESSES = 20.0  # what a confidence says of itself counts as much as so many guesses of its class
FADING = 0.9  # of what all have shown, for each request that drafted nothing: one day it is tried again
PROBE_EVERY = 32  # steps without a draft before one is tried again
PROBE_SHARE = 0.02  # of the time, at most, for such trials
TYPICAL_OUTPUT = 128  # tokens, until requests have ended and shown better
MARGIN = 1.05  # what a draft costs has to come in again with so much on top: costs are measured, not known
READING_MARGIN = 2.0  # what reading a text is to save, over its price: outputs end early, and guesses disappoint
SHAPE_PRIOR = 2.0  # forwards of a size that say as much as the median of all
READ_AT_ONCE = 1.0  # plain steps: less reading than that is done without weighing it
FREE_READING = 4  # tokens that a drafter catches up with in any case
LEVELS = (0.3, 0.5, 0.7, 0.78, 0.84, 0.88, 0.92, 0.96, 0.99)  # borders of the classes of confidence


class Rates:
    """Decayed counts by position. A draft that failed at i says nothing about the positions behind i."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.tried: list[float] = []
        self.hit: list[float] = []

    def observe(self, hits: int, limit: int, *, decay: float | None = None) -> None:
        """The first ``hits`` positions held, and the next one did not, unless it lies behind ``limit``."""
        self.fade(decay or self.decay)
        seen = min(hits + 1, limit)
        for counts in (self.tried, self.hit):
            counts.extend([0.0] * (seen - len(counts)))
        for i in range(seen):
            self.tried[i] += 1
            self.hit[i] += i < hits

    def fade(self, factor: float) -> None:
        """Let what was seen count less."""
        for counts in (self.tried, self.hit):
            counts[:] = [count * factor for count in counts]

    def estimate(self, count: int, prior: Seq[float]) -> list[float]:
        """The rate of each position, given that those before it held.

        ``prior`` gives the shape (how the rate changes from one position to the next), the counts give the level,
        so that what the first positions show is expected of the later ones too.
        """
        found: list[float] = []
        for i in range(count):
            expected = prior[i] if i == 0 else min(found[-1] * prior[i] / max(prior[i - 1], 1e-3), 1.0)
            tried, hit = (self.tried[i], self.hit[i]) if i < len(self.tried) else (0.0, 0.0)
            found.append(_shrunk(hit, tried, expected))
        return found


def _shrunk(hit: float, tried: float, prior: float, *, weight: float = PRIOR_DRAFTS) -> float:
    """hit / tried, leaning on ``prior`` while little was tried."""
    return (hit + weight * prior) / (tried + weight)


@dataclass(slots=True)
class _Level:
    """How often guesses of one kind (a class of confidence, say) were accepted; decayed counts."""

    tried: float = 0.0
    hit: float = 0.0
    num_refused: int = 0

    def observe(self, is_hit: bool, decay: float) -> None:
        self.tried = self.tried * decay + 1
        self.hit = self.hit * decay + is_hit

    def rate(self, prior: float) -> float:
        return _shrunk(self.hit, self.tried, prior)


@dataclass(slots=True)
class OwnGuesses:
    """How one text's guesses did, beside what their confidences promised."""

    reached: _Level = field(default_factory=_Level)  # wherever in a draft
    expected: float = 0.0  # hits among them, by their confidences


class Calibration:
    """What a drafter's confidences are worth: a rate for each class of them, leaning on the confidence itself."""

    def __init__(self) -> None:
        self._levels = [_Level() for _ in range(len(LEVELS) + 1)]
        self._total = _Level()

    def chance(self, own: OwnGuesses, confidence: float | None) -> float:
        """That a guess is accepted, given that those before it were."""
        if confidence is None:
            return own.reached.rate(self._total.rate(PRIOR_RATE))
        rate = self._rate(confidence)
        return min(rate * _shrunk(own.reached.hit, own.expected, 1.0), 1.0)

    def chances(self, own: OwnGuesses, confidences: Seq[float | None], parents: Seq[int] | None = None) -> list[float]:
        """That each guess and all above it are accepted; without ``parents``, the first, the first two, ..."""
        rates = [self.chance(own, confidence) for confidence in confidences]
        if parents is None:
            return _products(rates)
        found: list[float] = []
        for rate, parent in zip(rates, parents, strict=True):
            found.append(rate * (1.0 if parent == ROOT else found[parent]))
        return found

    def observe(self, own: OwnGuesses, draft: Draft, accepted: Seq[int]) -> None:
        """The nodes that were accepted, root to leaf. Of the others, only those beside them were looked at."""
        confidences = draft.confidences or [0.0] * len(draft)
        reached = {ROOT, *accepted}
        for node, (parent, confidence) in enumerate(zip(draft.parents, confidences, strict=True)):
            if parent not in reached:
                continue
            level = self._level(confidence)
            own.expected = OWN_DECAY * own.expected + self._rate(confidence)
            for each, decay in ((level, ALL_DECAY), (self._total, ALL_DECAY), (own.reached, OWN_DECAY)):
                each.observe(node in reached, decay)

    def is_to_be_tried(self, confidence: float, *, price: float, plain: float) -> bool:
        """Now and then for a class that was found wanting, or it would be so for good.

        Args:
            price: seconds that a guess costs.
            plain: seconds of the step that went by.
        """
        level = self._level(confidence)
        level.num_refused += 1
        if level.num_refused < PROBE_EVERY or price > PROBE_SHARE * level.num_refused * plain:
            return False
        level.num_refused = 0
        return True

    def _rate(self, confidence: float) -> float:
        level = self._level(confidence)
        return _shrunk(level.hit, level.tried, confidence, weight=PRIOR_GUESSES)

    def _level(self, confidence: float) -> _Level:
        return self._levels[bisect_right(LEVELS, confidence)]


@dataclass(slots=True)
class _State:
    """What is known of one sequence."""

    accepted: Rates = field(default_factory=lambda: Rates(OWN_DECAY))  # acceptance, of what the rules let be drafted
    drafted: Rates = field(default_factory=lambda: Rates(OWN_DECAY))  # how far drafts go
    guesses: OwnGuesses = field(default_factory=OwnGuesses)
    num_idle: int = 0  # steps since the last draft
    idle_before: int = 0  # likewise, when the step was decided
    wait: int = PROBE_EVERY
    is_probing: bool = False
    reason: str = ""
    num_steps: int = 0
    refusal: str | None = None  # why reading the text does not pay, when that was last asked; None: it does
    asked_at: int = -LOOK_EVERY  # output tokens then
    sureness: float | None = None  # the target's largest probability, a decayed mean
    goal: tuple[float, int, float] = (0.0, 1, 1.0)  # tokens a second to beat, rows of the batch, rows likely to draft
    outlook: _Outlook | None = None  # of the step that is being decided
    reading: float = 0.0  # seconds, before a draft can be made in it
    has_rival: bool = False  # another drafter, of which the text's first tokens are likely to show that it is better
    other_rate: float = 0.0  # tokens a second of the batch that come without this drafter, where more than plain ones


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step's parts."""

    drafting: float
    forward: float
    settling: float


class StepCosts:
    """Seconds of the parts of a step: measured beforehand, corrected by what steps really take.

    Args:
        target: of the target's forward.
        draft: of the draft model's; None where a draft costs next to nothing.
    """

    def __init__(self, target: CostCurve, draft: CostCurve | None = None) -> None:
        self.target, self.draft_model = target, draft
        self.scale = 1.0  # seconds now over seconds when the curves were measured
        self.sampling = 0.0  # for each scored position
        self.extra = 0.0  # for each draft token, beyond the draft model's forward
        self._ratios: deque[float] = deque(maxlen=9)
        self._by_shape: dict[tuple[float, int], deque[float]] = {}  # likewise, of each width and number of rows
        self._scales: dict[tuple[float, int], float] = {}  # what follows from these: asked many times a step
        self._num_steps = self._num_drafts = 0

    def step(self, width: float, rows: int = 1) -> float:
        """Scoring and settling ``rows`` rows of ``width`` positions, on the mean where rows are packed."""
        return self.target(width, rows) * self._scale(*self._shape(width, rows)) + self.sampling * width * rows

    def drafted(self, n: float, rows: int, drafting: float) -> float:
        """A step in which ``drafting`` of the rows have n draft tokens; the others are padded or packed beside them."""
        return self.step(1 + n * drafting / rows if self.target.is_ragged else 1 + n, rows)

    def _shape(self, width: float, rows: int) -> tuple[float, int]:
        """What forwards are told apart by: packed ones by their tokens, of which many numbers come."""
        if not self.target.is_ragged:
            return width, rows
        tokens = round(width * rows)
        return (tokens if tokens < 32 else 8 * round(tokens / 8)), 1

    def _scale(self, width: float, rows: int) -> float:
        """What such a forward takes over what was measured: of all forwards seen, those of about this size most."""
        known = self._scales.get((width, rows))
        if known is None:
            known = self._scales[width, rows] = self._scale_of(width * rows)
        return known

    def _scale_of(self, tokens: float) -> float:
        weight, total = SHAPE_PRIOR, SHAPE_PRIOR * self.scale
        for (width, rows), seen in self._by_shape.items():
            near = len(seen) / (1 + (4 * math.log2(tokens / (width * rows))) ** 2)
            weight, total = weight + near, total + near * statistics.fmean(seen)
        return total / weight

    def draft(self, k: int, rows: int = 1) -> float:
        """Drafting k tokens for each of some rows."""
        model = self.draft_model(1, rows) * self.scale if self.draft_model and k else 0.0
        return max(model + self.extra, 0.0) * k

    def reading(self, tokens: int) -> float:
        """What a drafter has to read before it can guess."""
        return self.catching_up(tokens) if tokens > FREE_READING else 0.0

    def catching_up(self, tokens: float) -> float:
        """What reading so many tokens adds to a draft model's next forward."""
        if self.draft_model is None or tokens <= 1:
            return 0.0
        return (self.draft_model(tokens) - self.draft_model(1)) * self.scale

    def observe(self, drafts: Seq[int], *, forward: float, settling: float) -> None:
        """What a step took whose rows had so many draft tokens."""
        rows = len(drafts)
        width = 1 + (sum(drafts) / rows if self.target.is_ragged else max(drafts))
        ratio = forward / self.target(width, rows)
        self._ratios.append(ratio)
        self.scale = statistics.median(self._ratios)
        # a step that something else has disturbed tells nothing of its shape
        self._by_shape.setdefault(self._shape(width, rows), deque(maxlen=9)).append(min(ratio, 1.5 * self.scale))
        self._scales.clear()
        self._num_steps += 1
        self.sampling += max(0.1, 1 / self._num_steps) * (settling / (width * rows) - self.sampling)

    def observe_draft(self, k: int, rows: int, seconds: float) -> None:
        model = self.draft_model(1, rows) * self.scale if self.draft_model else 0.0
        self._num_drafts += 1
        self.extra += max(0.1, 1 / self._num_drafts) * (seconds / k - model - self.extra)


class Controller:
    """The draft lengths of a step; also the drafter's StoppingRule.

    Args:
        cost: of the target's forward.
        draft_cost: of the draft model's, None if there is none.
        max_tokens: the longest draft.
    """

    def __init__(self, cost: CostCurve, draft_cost: CostCurve | None = None, *, max_tokens: int = MAX_TOKENS) -> None:
        self.costs = StepCosts(cost, draft_cost)
        self.max_tokens = max_tokens
        # by class of sureness: what texts of one kind have shown says little of another kind
        self._accepted = [Rates(ALL_DECAY) for _ in range(len(SURENESS) + 1)]
        self._drafted = [Rates(ALL_DECAY) for _ in range(len(SURENESS) + 1)]
        self._last_class = 0
        self._calibration = Calibration()
        self._states: dict[str, _State] = {}
        self._typical_output = float(TYPICAL_OUTPUT)

    # before drafting

    def budgets(self, seqs: Seq[Sequence], limits: Seq[int], backlogs: Seq[int]) -> list[int]:
        """The longest draft of each sequence.

        Args:
            limits: draft tokens that could still be emitted.
            backlogs: tokens that the drafter would have to read first.
        """
        rows = len(seqs)
        outlooks = [self._outlook(*each, rows) for each in zip(seqs, limits, backlogs, strict=True)]
        k, chosen, rate = self._best(outlooks)
        drafting = sum(outlooks[i].reach(1) for i in chosen)
        budgets = []
        for i, (seq, limit, backlog) in enumerate(zip(seqs, limits, backlogs, strict=True)):
            state = self._states[seq.id]
            if i in chosen:
                budget, state.wait, state.is_probing = min(k, limit), PROBE_EVERY, False
            else:
                budget = self._probe(state, limit, backlog, rows)
            # if this row drafts, the others that do share the cost of the width; those without a guess do not
            state.goal = (rate, rows, 1 + drafting - (outlooks[i].reach(1) if i in chosen else 0.0))
            state.idle_before = state.num_idle
            state.num_idle = 0 if budget else state.num_idle + (limit > 0)
            budgets.append(budget)
        return budgets

    def worth(self, seq: Sequence, confidences: Seq[float | None]) -> bool:
        """See ``core.StoppingRule``: the gain of one more guess against the rate at which tokens come otherwise."""
        state = self._states.get(seq.id)
        if state is None or (state.is_probing and len(confidences) == 1):
            return True
        chance = self._calibration.chances(state.guesses, confidences)[-1]
        rate, rows, drafting = state.goal
        n = len(confidences)
        wider = self.costs.drafted(n, rows, drafting) - self.costs.drafted(n - 1, rows, drafting)
        longer = self.costs.draft(n, round(drafting)) - self.costs.draft(n - 1, round(drafting))
        if chance >= rate * (wider + longer) / drafting:
            return True
        first = confidences[0]
        plain = self.costs.step(1, rows) / rows
        return (
            n == 1 and first is not None and self._calibration.is_to_be_tried(first, price=wider + longer, plain=plain)
        )

    def length(self, seq: Sequence, confidences: Seq[float], parents: Seq[int] | None = None) -> int:
        """See ``core.StoppingRule``. A tree's guesses are there already; their price is the wider forward."""
        if parents is None:
            worth = (self.worth(seq, confidences[: i + 1]) for i in range(len(confidences)))
            return next((i for i, is_worth in enumerate(worth) if not is_worth), len(confidences))
        state = self._states.get(seq.id)
        if state is None:
            return len(confidences)
        rate, rows, drafting = state.goal
        steps = [self.costs.drafted(n, rows, drafting) for n in range(len(confidences) + 1)]
        gains = accumulate(self._calibration.chances(state.guesses, confidences, parents), initial=0.0)
        worth_of = [gain - rate * (step - steps[0]) / drafting for gain, step in zip(gains, steps, strict=True)]
        return max(worth_of.index(max(worth_of)), int(state.is_probing))

    # beside another drafter

    def compare(self, seq: Sequence, rate: float, *, has_rival: bool) -> None:
        """Tokens a second of the batch that come without this drafter: reading a text has to pay beside that.

        Args:
            has_rival: texts like this one may not need it at all, which their first tokens will show.
        """
        state = self._states.setdefault(seq.id, _State())
        state.other_rate, state.has_rival = rate, has_rival

    def advantage(self, seq: Sequence, k: int, *, rate: float, rows: int) -> float:
        """Tokens that a draft of up to k is expected to bring, less what its seconds would bring at ``rate``."""
        state = self._states[seq.id]
        outlook = state.outlook or NOTHING
        drafting = max(state.goal[2], 1.0)
        steps = [self.costs.drafted(n, rows, drafting) for n in range(k + 1)]
        wider = self._seconds(k, [outlook], steps) - steps[0]
        return outlook.gain(k) - rate * (wider / drafting + state.reading)  # rows that draft share a width

    def withdraw(self, seq: Sequence) -> None:
        """The draft that ``budgets`` allowed is not made: another drafter had a better one."""
        state = self._states[seq.id]
        if state.is_probing:
            state.is_probing, state.num_idle = False, state.idle_before + 1  # what it has earned stays

    def reason(self, seq: Sequence) -> str:
        """Why the sequence's last budget was 0."""
        state = self._states.get(seq.id)
        return state.reason if state is not None else ""

    def explain(self) -> str:
        """What it goes by at present, over all sequences, in a sentence."""
        count, kind = self.max_tokens, self._last_class
        rates = self._accepted[kind].estimate(count, [PRIOR_RATE] * count)
        lengths = self._drafted[kind].estimate(count, [1.0] * count)
        k, _, rate = self._best([_Outlook(_products(rates), _products(lengths))])
        plain = self.costs.step(1)
        shown = ", ".join(f"{rate:.0%}" for rate in rates[: max(k, 2)])
        widths = ", ".join(f"{n} tokens {self.costs.step(n) / plain:.2f}" for n in sorted({2, 4, 8, k + 1} - {1}))
        return (
            f"expected: acceptance by position {shown}; a forward of {widths} plain steps, a draft token "
            f"{self.costs.draft(1) / plain:.2f}; so k = {k} pays best, {rate * plain:.2f} x plain decoding"
        )

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
        """What became of a draft; an empty one for a budget is news as well.

        Args:
            accepted: the nodes of a tree that were; None for the first ones of a chain.
            sureness: gives the target's largest probability at the context, if it is asked. Where the target is sure
                of its tokens, a smaller model is likely to guess them: what is expected of a draft model before it
                has guessed.
        """
        state = self._states.setdefault(seq.id, _State())
        if sureness is not None and (state.num_steps < LOOK_EVERY or state.num_steps % LOOK_EVERY == 0):
            new = sureness()
            state.sureness = new if state.sureness is None else 0.8 * state.sureness + 0.2 * new
        state.num_steps += 1
        if budget == 0 or draft.drafter == READING.drafter:
            return
        kind = self._last_class = _kind(state)
        decay = 0.5 if state.is_probing else None  # what was true before the break counts less
        state.accepted.observe(num_accepted, budget, decay=decay)
        state.drafted.observe(len(draft), budget, decay=decay)
        self._accepted[kind].observe(num_accepted, budget)
        self._drafted[kind].observe(len(draft), budget)
        if state.is_probing:
            state.wait = 0 if num_accepted else min(max(state.wait, PROBE_EVERY // 2) * 2, 32 * PROBE_EVERY)
        self._calibration.observe(state.guesses, draft, range(num_accepted) if accepted is None else accepted)

    def observe_times(
        self,
        drafts: Seq[Draft],
        budgets: Seq[int],
        backlogs: Seq[int],
        times: Times,
        *,
        drafted: int | None = None,
    ) -> None:
        """What a decode step took; one that read a prompt says nothing of the others.

        Args:
            drafted: the longest draft that the drafting time went into, where not all drafts were this drafter's.
        """
        asked = sum(budget > 0 for budget in budgets)
        self.costs.observe(list(map(len, drafts)), forward=times.forward, settling=times.settling)
        drafted = max(height(draft.parents) for draft in drafts) if drafted is None else drafted
        if drafted and asked and max(backlogs) <= FREE_READING:
            self.costs.observe_draft(drafted, asked, times.drafting)

    def forget(self, seq: Sequence) -> None:
        """Drop what is known of a finished sequence; what it taught about all of them stays."""
        state = self._states.pop(seq.id, None)
        if state is None or not seq.num_output_tokens:
            return
        self._typical_output += 0.3 * (seq.num_output_tokens - self._typical_output)
        if not state.drafted.tried:
            # it taught nothing, so what was learned ages, and one day such a text is tried again
            for rates in (self._accepted[_kind(state)], self._drafted[_kind(state)]):
                rates.fade(FADING)

    # parts of a choice

    def _outlook(self, seq: Sequence, limit: int, backlog: int, rows: int) -> _Outlook:
        """What drafts for a sequence would bring; nothing where drafting is not to be considered."""
        state = self._states.setdefault(seq.id, _State())
        state.outlook, state.reading = None, self.costs.reading(backlog)
        count = min(limit, self.max_tokens)
        if count <= 0:
            state.reason = LAST_TOKEN if seq.num_output_tokens else FIRST_TOKEN
            return NOTHING
        kind, prior = _kind(state), PRIOR_RATE if state.sureness is None else state.sureness
        rates = state.accepted.estimate(count, self._accepted[kind].estimate(count, [prior] * count))
        lengths = state.drafted.estimate(count, self._drafted[kind].estimate(count, [1.0] * count))
        outlook = state.outlook = _Outlook(_products(rates), _products(lengths))
        state.reason = "guesses hold too rarely for what they cost"
        if state.reading > READ_AT_ONCE * self.costs.step(1, rows):
            is_early = seq.num_output_tokens < LOOK_FIRST < seq.sampling.max_tokens / 4
            if is_early and (kind < SURE_CLASS or state.has_rival):
                state.reason = "the text has only begun"
                return NOTHING
            self._weigh_reading(seq, state, outlook, rows)
            if state.refusal is not None:
                state.reason = state.refusal
                return NOTHING
        return outlook

    def _weigh_reading(self, seq: Sequence, state: _State, outlook: _Outlook, rows: int) -> None:
        """Now and then: whether what drafts are likely to save until the end is more than the seconds of reading."""
        if seq.num_output_tokens < state.asked_at + LOOK_EVERY:
            return
        state.asked_at = seq.num_output_tokens
        _, chosen, rate = self._best([outlook] + [NOTHING] * (rows - 1))
        left = min(seq.sampling.max_tokens, self._typical_output) - seq.num_output_tokens
        plain = rows / self.costs.step(1, rows)
        rival = max(state.other_rate / plain, 1.0)
        # beside a rival it drafts in some of the steps: together they bring more than the better, less than the product
        saved = max(left, TYPICAL_OUTPUT / 8) * (rows / (plain * rival) - rows / (rate * math.sqrt(rival)))
        if saved > READING_MARGIN * state.reading:
            state.refusal = None
        elif chosen:
            state.refusal = "reading the text so far would cost the draft model more than it saves"
        else:
            state.refusal = state.reason

    def _best(self, outlooks: Seq[_Outlook]) -> tuple[int, set[int], float]:
        """The k, the sequences that draft and the tokens a second, all rows together.

        Where the rows of a forward are padded to the longest draft, width is paid for by all: so one k is chosen for
        the batch, and the sequences whose drafts bring most use it.
        """
        rows = len(outlooks)
        plain = self.costs.step(1, rows)
        best: tuple[int, set[int], float] = (0, set(), rows / plain)
        steps = [plain]
        for k in LENGTHS:
            gains = sorted(((o.gain(k), i) for i, o in enumerate(outlooks) if o.survival), reverse=True)
            if not gains or k > min(self.max_tokens, max(2 * best[0], 4)):  # it rises to one maximum, or never
                break
            steps += [self.costs.step(width + 1, rows) for width in range(len(steps), k + 1)]
            for count in _halvings(len(gains)):
                chosen = {i for _, i in gains[:count]}
                gain = sum(gain for gain, _ in gains[:count])
                seconds = self._of_batch(k, [outlooks[i] for i in chosen], steps, rows)
                rate = (rows + gain) / seconds
                if rate > best[2] and gain > MARGIN * rows * (seconds / plain - 1):
                    best = (k, chosen, rate)
        return best

    def _of_batch(self, k: int, outlooks: Seq[_Outlook], steps: Seq[float], rows: int) -> float:
        """Seconds of a step in which these draft."""
        if not self.costs.target.is_ragged:
            return self._seconds(k, outlooks, steps)
        tokens = sum(outlook.reach(length) for outlook in outlooks for length in range(1, k + 1))
        return self.costs.drafted(tokens, rows, 1) + self._drafting(k, outlooks)

    def _seconds(self, k: int, outlooks: Seq[_Outlook], steps: Seq[float]) -> float:
        """Of a step, by how long the longest of its drafts is likely to be."""
        seconds = below = 0.0
        for length in range(k + 1):
            no_longer = 1.0 if length == k else math.prod(1 - outlook.reach(length + 1) for outlook in outlooks)
            seconds += (no_longer - below) * steps[length]
            below = no_longer
        return seconds + self._drafting(k, outlooks)

    def _drafting(self, k: int, outlooks: Seq[_Outlook]) -> float:
        longest = sum(max(outlook.reach(length) for outlook in outlooks) for length in range(1, k + 1))
        return longest * self.costs.draft(1, len(outlooks))

    def _probe(self, state: _State, limit: int, backlog: int, rows: int) -> int:
        """One draft token now and then where drafting does not pay, so that it can come back."""
        plain = self.costs.step(1, rows)
        price = self.costs.reading(backlog) + self.costs.draft(1) + self.costs.drafted(1, rows, 1) - plain
        is_due = state.num_idle >= state.wait
        earned = PROBE_SHARE * state.num_idle * plain / rows  # all rows wait for one that probes
        state.is_probing = limit > 0 and is_due and (state.wait == 0 or price <= earned)
        return int(state.is_probing)


@dataclass(frozen=True, slots=True)
class _Outlook:
    """For one sequence: the chance that the first i guesses are accepted, and that a draft is i long."""

    survival: list[float]
    lengths: list[float]

    def gain(self, k: int) -> float:
        """Draft tokens that a draft of up to k is expected to bring."""
        return sum(self.survival[:k])

    def reach(self, length: int) -> float:
        return self.lengths[length - 1] if length <= len(self.lengths) else 0.0


NOTHING = _Outlook([], [])


def _kind(state: _State) -> int:
    """The class of a text; a sure one until the target has been seen."""
    return bisect_right(SURENESS, 0.8 if state.sureness is None else state.sureness)


def _products(rates: Seq[float]) -> list[float]:
    return list(accumulate(rates, operator.mul))


def _halvings(count: int) -> list[int]:
    """All of them, half of them, ... one."""
    found = []
    while count:
        found.append(count)
        count //= 2
    return found
