"""What is wrong with the guesses: a drafter is watched at work, through the engine that serves requests.

It knows drafters, the engine and SamplingParams; it does not know what anything costs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from flashspec.core import Draft, Drafter, SamplingParams, Score, Sequence, SpecStats, Target, Verdict
from flashspec.doctor.finding import Finding, judged
from flashspec.drafters.model import fitted
from flashspec.engine import LocalEngine
from flashspec.sampling import coupled_token, distribution

DRAFT_LENGTH = 5  # of the measured drafts
SEED = 20240501  # of requests without one, so that the same examination finds the same
SAME = 0.02  # total variation up to which two computations of one distribution are the same, half precision included
OTHERS = 0.1  # share of guesses that rounding may turn into others, where two tokens are close
SURPRISE = 5.0  # standard errors: one sound drafter in a million is further off
IMPOSSIBLE = 1e-7  # a token that its own distribution gives less was not drawn from it
CHECKS = ("sampling", "draft probabilities", "acceptance", "temperature", "speed", "batch")  # what needs drafts
ENOUGH = 20  # draft tokens, from which on a rate means something
LOW_ACCEPTANCE = 0.3  # of the draft tokens reached: below, drafts rarely pay, whatever they cost
HOT = 0.8  # the temperature above which drafts are said to stop paying
COOLING = 0.1  # acceptance lost to temperature that is worth a word


# a measured run


@dataclass(frozen=True, slots=True)
class Node:
    """One drafted token: what became of it, and how it compares with what the draft model itself would draw."""

    is_reached: bool  # all before it were accepted
    is_accepted: bool
    possible: float | None  # its chance under the draft model's own distribution, by the request's parameters
    distance: float | None  # total variation between that distribution and the q that the drafter gives
    is_own: bool | None  # a guess without a free draw: whether the draft model would have made it
    drawn: tuple[float, float, float] | None  # q of the token; mean and variance of log q over q


@dataclass(slots=True)
class Run:
    """What a drafter guessed for a few requests, and what became of it."""

    stats: SpecStats = field(default_factory=SpecStats)
    nodes: list[Node] = field(default_factory=list)
    drafter: str = ""


def measure(
    target: Target,
    drafter: Drafter,
    prompts: Seq[list[int]],
    sampling: SamplingParams,
    *,
    model: Target | None = None,
) -> Run:
    """Generate with drafts of ``DRAFT_LENGTH``, by the engine that serves requests, and look at every draft.

    Args:
        model: the draft model, for what the drafter ought to have drawn from.
    """
    witness = Witness(drafter, model, target.vocab_size)
    engine = LocalEngine(target, witness, num_speculative_tokens=DRAFT_LENGTH, max_batch=1)
    seed = SEED if sampling.seed is None else sampling.seed
    for number, prompt in enumerate(prompts):  # a stream of random numbers each, and the rule that was asked for
        rule = sampling.verification_rule
        engine.generate(prompt, replace(sampling, seed=seed + number, verification=rule))
    witness.run.stats = engine.stats()
    return witness.run


class Witness(Drafter):
    """Hands on to a drafter, and writes down what it drafts and what becomes of it. Chains only."""

    def __init__(self, drafter: Drafter, model: Target | None, vocab_size: int) -> None:
        self.drafter, self.model, self.vocab_size = drafter, model, vocab_size
        self.name, self.needs_hidden, self.feature_layers = drafter.name, drafter.needs_hidden, drafter.feature_layers
        self.run = Run(drafter=drafter.name)
        self._before: dict[str, Sequence] = {}  # as they were when the drafts were made

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        for seq in seqs:
            known = self._before.setdefault(seq.id, _copy(seq))
            known.tokens = list(seq.tokens)
        return self.drafter.propose(seqs, budgets)

    def observe(self, seqs: Seq[Sequence], drafts: Seq[Draft], verdicts: Seq[Verdict], scores: Seq[Score]) -> None:
        for seq, draft, verdict, score in zip(seqs, drafts, verdicts, scores, strict=True):
            if len(draft) and draft.is_chain:
                self._look(self._before[seq.id], draft, len(verdict.accepted), score)
        self.drafter.observe(seqs, drafts, verdicts, scores)

    def forget(self, seq: Sequence) -> None:
        known = self._before.pop(seq.id, None)
        if known is not None and self.model is not None:
            self.model.forget(known)
        self.drafter.forget(seq)

    @torch.inference_mode()
    def _look(self, seq: Sequence, draft: Draft, num_accepted: int, score: Score) -> None:
        p, own = distribution(score.logits, seq, draft).dense(), self._own(seq, draft)
        is_free = not seq.sampling.is_greedy and seq.sampling.verification_rule != "coupled"
        for i, token in enumerate(draft.tokens):
            q = None if draft.probs is None else draft.probs[i]
            mine = None if own is None else own[i]
            self.run.nodes.append(
                Node(
                    is_reached=i <= num_accepted,
                    is_accepted=i < num_accepted,
                    possible=None if mine is None else float(torch.minimum(p[i], mine).sum()),
                    distance=None if mine is None or q is None else float((q - mine).abs().sum() / 2),
                    is_own=None if mine is None or is_free else token == _chosen_by(mine, seq, len(seq) + i),
                    drawn=None if q is None or not is_free else _moments(q, token),
                )
            )

    def _own(self, seq: Sequence, draft: Draft) -> Tensor | None:
        """[n + 1, vocab]: the draft model's own distributions along the draft, under the request's parameters."""
        if self.model is None or len(seq) + len(draft) > self.model.max_length:
            return None
        logits = self.model.score([seq], [draft])[0].logits
        self.model.keep(seq, [])
        return distribution(fitted(logits, self.vocab_size), seq, draft).dense()


def _copy(seq: Sequence) -> Sequence:
    """A sequence of the same request under another id, for a model that may know the first."""
    copy = Sequence(f"doctor {seq.id}", [], seq.num_prompt_tokens, seq.sampling, seq.choice, eos_tokens=seq.eos_tokens)
    copy.seed = seq.seed
    return copy


def _chosen_by(q: Tensor, seq: Sequence, position: int) -> int:
    """The token of q [vocab] that a request without a free draw takes."""
    return int(q.argmax()) if seq.sampling.is_greedy else coupled_token(q, None, seq, position)


def _moments(q: Tensor, token: int) -> tuple[float, float, float]:
    """q of the token; mean and variance of log q, over q [vocab]."""
    weights = q.double()
    logs = weights.clamp(min=1e-300).log()
    mean = float((weights * logs).sum())
    return float(q[token]), mean, max(float((weights * logs**2).sum()) - mean**2, 0.0)


# what the run shows


def check_sampling(seen: Run, sampling: SamplingParams, *, has_model: bool) -> Finding:
    """Whether the drafter guesses as the draft model would under the request's own parameters, and what it costs."""
    nodes = [node for node in seen.nodes if node.possible is not None]
    if not has_model or not nodes:
        return Finding("sampling", "skipped", f"drafter {seen.drafter} asked no draft model")
    is_sound, evidence = _as_asked(nodes, sampling)
    return judged(
        "sampling",
        is_sound,
        evidence if is_sound else f"{evidence}; {_cost_of(nodes, seen.stats)}",
        "give the draft the target's own context, temperature, top_k, top_p and penalties",
    )


def _as_asked(nodes: list[Node], sampling: SamplingParams) -> tuple[bool, str]:
    own = [node.is_own for node in nodes if node.is_own is not None]
    distances = [node.distance for node in nodes if node.distance is not None]
    if own:
        share = own.count(False) / len(own)
        how = "the draft model's likeliest" if sampling.is_greedy else "what the draft model and the seed give"
        return share <= OTHERS, f"{share:.0%} of {len(own)} guesses are not {how} (limit {OTHERS:.0%})"
    if not distances:
        return False, f"the draft ignores temperature {sampling.temperature:g}: its guesses are not drawn"
    apart = statistics.mean(distances)
    what = "from what the draft model gives under the request's parameters"
    return apart <= SAME, f"q is {apart:.4f} in total variation {what} (limit {SAME:g})"


def _cost_of(nodes: list[Node], stats: SpecStats) -> str:
    """Accepted tokens a round, as they are and as they could be."""
    reached = [node for node in nodes if node.is_reached]
    now = statistics.mean(node.is_accepted for node in reached)
    could = statistics.mean(node.possible or 0.0 for node in reached)
    return (
        f"{stats.mean_acceptance_length - 1:.2f} of {DRAFT_LENGTH} tokens are accepted a round, and up to "
        f"{sum(could**i for i in range(1, DRAFT_LENGTH + 1)):.2f} could be ({now:.0%} and {could:.0%} of those reached)"
    )


def check_probabilities(seen: Run) -> Finding:
    """Whether the drafted tokens look drawn from the probabilities that come with them.

    The sum of log q(x) over its mean, in standard errors: under an honest drafter it is near normal. An error here
    changes what is generated, and not only how fast.
    """
    name, drawn = "draft probabilities", [node.drawn for node in seen.nodes if node.drawn is not None]
    if not drawn:
        return Finding(name, "skipped", f"drafter {seen.drafter} draws nothing freely here")
    credible = [(q, mean, variance) for q, mean, variance in drawn if q >= IMPOSSIBLE]
    impossible = len(drawn) - len(credible)
    excess = sum(math.log(q) - mean for q, mean, _ in credible)
    error = math.sqrt(sum(variance for _, _, variance in credible))
    score = excess / error if error > 1e-6 else 0.0
    return judged(
        name,
        not impossible and abs(score) <= SURPRISE,
        f"{len(drawn)} drafted tokens: {impossible} of a probability under {IMPOSSIBLE:g}; their log-likelihood is "
        f"{score:+.1f} standard errors from what q promises (limit {SURPRISE:g})",
        "the output is no longer the target's: Draft.probs[i] must be the distribution that node i was drawn from",
    )


def check_acceptance(stats: SpecStats) -> Finding:
    """How often a guess holds. Those behind a rejection do not count: they would make it a matter of length."""
    if stats.num_draft_tokens < ENOUGH:
        return too_few("acceptance", stats)
    by_position = ", ".join(f"{rate:.0%}" for rate in stats.acceptance_by_position)
    return judged(
        "acceptance",
        acceptance(stats) >= LOW_ACCEPTANCE,
        f"{acceptance(stats):.0%} of the {sum(stats.num_reached_per_pos)} draft tokens that were reached hold (by "
        f"position: {by_position}); {stats.acceptance_rate:.0%} of all {stats.num_draft_tokens}",
        f"under {LOW_ACCEPTANCE:.0%}: use a draft model of the same family and training, or --drafter ngram where the "
        "output repeats its input",
    )


def acceptance(stats: SpecStats) -> float:
    """Accepted / reached draft tokens: a in the formulas."""
    return stats.num_accepted_tokens / max(sum(stats.num_reached_per_pos), 1)


def too_few(name: str, stats: SpecStats) -> Finding:
    return Finding(name, "skipped", f"only {stats.num_draft_tokens} tokens were drafted, too few to judge by")


def check_temperature(hot: SpecStats, cold: SpecStats, temperature: float) -> Finding:
    """Above ``HOT``: the acceptance at the request's temperature against that of greedy decoding."""
    name = "temperature"
    if temperature <= HOT:
        return Finding(name, "ok", f"{temperature:g}, up to {HOT:g} is no trouble")
    if min(hot.num_draft_tokens, cold.num_draft_tokens) < ENOUGH:
        return too_few(name, hot)
    return judged(
        name,
        acceptance(cold) - acceptance(hot) <= COOLING,
        f"{acceptance(hot):.0%} of the draft tokens reached are accepted at temperature {temperature:g}, "
        f"{acceptance(cold):.0%} at 0",
        "the flatter the distributions, the less they agree: lower the temperature or top_p, or expect shorter drafts",
    )
