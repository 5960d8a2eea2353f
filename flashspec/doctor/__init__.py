"""The classic faults of speculative decoding, found by trying: each check gives its numbers, and a remedy if needed.

It loads nothing and prints nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial

from flashspec.core import Drafter, SamplingParams
from flashspec.costs import CostCurve
from flashspec.doctor import drafts, models, speed
from flashspec.doctor.finding import Finding
from flashspec.errors import FlashSpecError, PromptError
from flashspec.pretrained import Loaded
from flashspec.text import as_conversation, encode
from flashspec.weights import Progress

__all__ = ["Case", "Finding", "examine"]

TEXT = (
    "The keeper wrote down the weather every evening: wind from the north, rain before midnight, a sea that would not "
    "rest. In the morning she read it aloud, and nobody in the harbour ever asked how she knew. 第二天,风停了。"
)
PROMPTS: tuple[str, ...] = (
    "Explain in a few sentences why the sea is salty.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "Repeat this list twice: apple, pear, plum, apple, pear, plum, apple, pear, plum.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is examined: the models, the drafter made of them, a request, and what forwards cost here."""

    target: Loaded
    draft: Loaded | None = None  # None where the drafter has no model
    drafter: Drafter | None = None  # None if there is nothing to guess with, or a vocabulary that forbids it
    sampling: SamplingParams
    cost: CostCurve
    draft_cost: CostCurve | None = None
    prompts: Seq[list[int]] | None = None  # token ids; None for a few of our own
    batch: int = 1


def examine(case: Case, *, progress: Progress | None = None) -> list[Finding]:
    """All checks, in the order in which one fault explains the next.

    Raises:
        PromptError: the measurement leaves no room for a prompt.
    """
    say = progress or (lambda line: None)
    prompts = _prompts(case)
    say("comparing vocabularies, positions and precision")
    vocabulary = models.check_vocabularies(case.target, case.draft)
    findings = [vocabulary, models.check_special_tokens(case.target, case.draft)]
    findings += [_positions("target positions", case.target), _positions("draft positions", case.draft)]
    findings.append(_tried("precision", lambda: models.check_precision(case.target.target, _known(case.target))))
    if case.drafter is None or vocabulary.status == "attention":
        excuse = "there is no drafter" if vocabulary.status != "attention" else "the draft has another vocabulary"
        findings += [Finding(name, "skipped", excuse) for name in drafts.CHECKS]
    else:
        say("measuring acceptance")
        findings += _of_drafts(case, case.drafter, prompts)
    scorers = [loaded.target for loaded in (case.target, case.draft) if loaded is not None]
    return [*findings, models.check_memory(scorers, case.batch)]


def _of_drafts(case: Case, drafter: Drafter, prompts: Seq[list[int]]) -> list[Finding]:
    """The checks that watch the drafter at work."""
    model = case.draft.target if case.draft is not None else None
    watch = partial(drafts.measure, case.target.target, drafter, prompts, model=model)
    try:
        seen = cold = watch(case.sampling)
        if case.sampling.temperature > drafts.HOT:
            cold = watch(replace(case.sampling, temperature=0.0))
    except FlashSpecError as error:
        failed = Finding("acceptance", "attention", f"no draft could be verified: {error}", "mend that first")
        return [failed, *(Finding(name, "skipped", "see acceptance") for name in drafts.CHECKS if name != failed.name)]
    outlook = speed.outlook_of(seen.stats, case.cost, case.draft_cost)
    return [
        drafts.check_sampling(seen, case.sampling, has_model=model is not None),
        drafts.check_probabilities(seen),
        drafts.check_acceptance(seen.stats),
        drafts.check_temperature(seen.stats, cold.stats, case.sampling.temperature),
        speed.check_speed(seen.stats, outlook),
        speed.check_batch(seen.stats, outlook, case.batch),
    ]


def _positions(name: str, loaded: Loaded | None) -> Finding:
    if loaded is None:
        return Finding(name, "skipped", "no draft model is in use")
    return _tried(name, lambda: models.check_positions(loaded.target, _known(loaded), name=name))


def _tried(name: str, check: Callable[[], Finding]) -> Finding:
    """A check that a model does not survive is news, not the end."""
    try:
        return check()
    except (FlashSpecError, RuntimeError, IndexError) as error:
        return Finding(name, "attention", f"the check failed: {error}", "use another model, or report this to us")


def _known(loaded: Loaded) -> list[int]:
    """The tokens of a text that no model has trouble with."""
    return encode(loaded.tokenizer, TEXT, vocab_size=loaded.target.vocab_size)[: loaded.target.max_length - 4]


def _prompts(case: Case) -> list[list[int]]:
    """Token ids of the user's prompts, or of our own, cut to fit.

    Raises:
        PromptError: the measurement leaves no room for a prompt.
    """
    if case.prompts is not None:
        return list(case.prompts)
    tokenizer, model = case.target.tokenizer, case.target.target
    room = model.max_length - case.sampling.max_tokens
    if room < 1:
        raise PromptError(f"max_tokens is {case.sampling.max_tokens}; the model has {model.max_length} positions")
    own = [as_conversation(tokenizer, text) for text in PROMPTS]
    return [encode(tokenizer, prompt, vocab_size=model.vocab_size)[:room] for prompt in own]
