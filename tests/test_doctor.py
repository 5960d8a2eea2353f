"""doctor finds each planted fault by its name, and is silent on a sound pair."""

from __future__ import annotations

import copy
import json
import locale
from collections.abc import Callable, Sequence as Seq
from dataclasses import astuple, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers as tf
from conftest import Ran, ToyTarget
from test_hf import build

from flashspec import cache, loader, pretrained
from flashspec.backends import hf
from flashspec.backends.hf import HFTarget
from flashspec.core import Draft, Drafter, SamplingParams, Sequence, SpecStats
from flashspec.costs import CostCurve
from flashspec.doctor import Case, Finding, drafts, examine, models, speed
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.ngram import NGramDrafter
from flashspec.errors import MemoryLimitError, PromptError
from flashspec.sampling import Distribution

FLAT = CostCurve(((1, 0.1), (17, 0.13)), ((1, 0.1), (8, 0.12)))  # a forward bound by memory: width is nearly free
STEEP = CostCurve(((1, 0.1), (17, 1.7)))  # one bound by arithmetic: each token costs as much as the first
QUICK = CostCurve(((1, 0.004),))
SAMPLED = SamplingParams(temperature=0.7, max_tokens=48)
TOKENS = [(7 * i * i + i) % 131 for i in range(60)]


class NearTarget(ToyTarget):
    """A draft model that nearly agrees: ``noise`` is added to the logits, which are made ``sharper``."""

    noise, sharper = 0.2, 1.0

    def logits(self, context: Seq[int]) -> np.ndarray:
        seed = hash((1, *context[-self.memory :])) % 2**32
        noise = np.random.default_rng(seed).standard_normal(self.vocab_size)
        return (super().logits(context) * self.sharper + self.noise * noise).astype(np.float32)


def tokenizer(
    *, size: int = 12, template: Callable[[list[dict[str, str]]], str] | None = None, **more: int
) -> SimpleNamespace:
    """Every character is a token."""
    return SimpleNamespace(
        get_vocab=lambda: {f"t{i}": i for i in range(size)} | more,
        encode=lambda text, add_special_tokens: [ord(letter) % size for letter in text],
        chat_template=template and "a template",
        apply_chat_template=lambda messages, **options: template(messages) if template else "",
    )


def toys(
    draft: type[ToyTarget] = NearTarget, drafter: type[ModelDrafter] = ModelDrafter, *, salt: int = 0, **case: Any
) -> Case:
    """A pair of toys and what they cost."""
    target, small = ToyTarget(), draft(salt=salt)
    case = {"sampling": SAMPLED, "cost": FLAT, "draft_cost": QUICK, "batch": 4, **case}
    return Case(
        target=loader.Loaded("target", target, tokenizer()),
        draft=loader.Loaded("draft", small, tokenizer()),
        drafter=drafter(small, vocab_size=target.vocab_size),
        **case,
    )


def named(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


def ill(findings: list[Finding]) -> set[str]:
    assert all(bool(finding.remedy) == (finding.status == "attention") for finding in findings)
    return {finding.name for finding in findings if finding.status == "attention"}


# a sound pair


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(max_tokens=48),
        SAMPLED,
        replace(SAMPLED, temperature=1.2, top_p=0.9),
        replace(SAMPLED, temperature=1.2, top_k=4, seed=1),
        replace(SAMPLED, verification="block", repetition_penalty=1.1),
    ],
)
def test_silent_on_a_sound_pair(sampling: SamplingParams) -> None:
    findings = examine(toys(sampling=sampling))
    assert ill(findings) == set()
    skipped = {finding.name for finding in findings if finding.status == "skipped"}
    assert skipped <= {"precision", "draft probabilities"}
    assert len({finding.name for finding in findings}) == len(findings) == 12


def test_other_drafters_are_not_judged_as_models() -> None:
    case = replace(toys(), draft=None, draft_cost=None)
    findings = examine(replace(case, drafter=NGramDrafter()))
    assert ill(findings) <= {"acceptance", "speed", "batch"}  # a random toy repeats nothing
    for name in ("vocabulary", "special tokens", "draft positions", "sampling", "draft probabilities"):
        assert named(findings, name).status == "skipped"
        assert named(findings, name).evidence
    none = examine(replace(case, drafter=None))
    assert {finding.name for finding in none if finding.status == "skipped"} >= set(drafts.CHECKS)


def test_own_prompts_are_cut_to_fit_and_none_fits_nowhere() -> None:
    case = toys(sampling=replace(SAMPLED, max_tokens=50))
    case.target.target.max_length = 80
    assert named(examine(case), "acceptance").status == "ok"
    with pytest.raises(PromptError, match="max_tokens is 80"):
        examine(replace(case, sampling=replace(SAMPLED, max_tokens=80)))


# what the drafter draws


class Greedy(ModelDrafter):
    """Ignores the temperature."""

    def _sampled(self, shadow: Any, q: Distribution) -> int:
        return q.greedy_tokens()[0]


class Cold(ModelDrafter):
    """Draws at its own, lower temperature, and says so."""

    def _sampled(self, shadow: Any, q: Distribution) -> int:
        probs = q.dense() ** 4
        return super()._sampled(shadow, Distribution(probs / probs.sum(), None, q.vocab_size))


class Liar(ModelDrafter):
    """Takes the likeliest token and claims to have drawn it from q."""

    def _sampled(self, shadow: Any, q: Distribution) -> int:
        super()._sampled(shadow, q)
        return q.greedy_tokens()[0]


class Impossible(ModelDrafter):
    """Now and then a token that q does not hold."""

    def _sampled(self, shadow: Any, q: Distribution) -> int:
        token = super()._sampled(shadow, q)
        return int(q.dense()[0].argmin()) if len(shadow.sequence) % 20 == 0 else token


class Unseeded(ModelDrafter):
    """Draws with noise of its own where the request's seed gives it."""

    def _guess(self, shadow: Any, logits: torch.Tensor) -> bool:
        seed, shadow.sequence.seed = shadow.sequence.seed, 99
        guessed = super()._guess(shadow, logits)
        shadow.sequence.seed = seed
        return guessed


class Late(ModelDrafter):
    """Guesses from the context without its last token."""

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        late = [Sequence(seq.id, seq.tokens[:-1], seq.num_prompt_tokens, seq.sampling) for seq in seqs]
        return super().propose(late, budgets)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_draft_that_ignores_temperature(rule: Any) -> None:
    finding = named(examine(toys(drafter=Greedy, sampling=replace(SAMPLED, verification=rule))), "sampling")
    assert finding.status == "attention"
    assert "ignores temperature 0.7" in finding.evidence
    assert "could be" in finding.evidence


def test_the_cost_of_ignoring_temperature() -> None:
    """What could be is what an honest drafter of the same model gets."""
    case = toys(drafter=Greedy, sampling=replace(SAMPLED, temperature=1.5, max_tokens=150))
    evidence = named(examine(case), "sampling").evidence
    now, could = (
        float(part.rsplit(" ", 1)[-1]) for part in (evidence.split(" of 5 ")[0], evidence.split(" could be")[0])
    )
    honest = drafts.measure(ToyTarget(), ModelDrafter(NearTarget(), vocab_size=12), [[1, 2, 3]], case.sampling)
    assert now < 1 < could
    share = float(evidence.split("(")[-1].split("%")[0]) / 100
    assert share == pytest.approx(now / (now + 1), rel=0.1)  # nearly each round ends with a rejection
    assert could == pytest.approx(honest.stats.mean_acceptance_length - 1, rel=0.15)


def test_a_draft_that_draws_at_another_temperature() -> None:
    findings = examine(toys(drafter=Cold))
    assert "sampling" in ill(findings)
    assert "draft probabilities" not in ill(findings)  # it is honest about it
    assert "total variation" in named(findings, "sampling").evidence


def test_a_sampled_draft_of_a_greedy_request() -> None:
    class Warm(ModelDrafter):
        def _guess(self, shadow: Any, logits: torch.Tensor) -> bool:
            return super()._guess(shadow, logits + torch.randn(logits.shape, generator=self.generator) * 3)

        generator = torch.Generator().manual_seed(0)

    assert "likeliest" in named(examine(toys(drafter=Warm, sampling=SamplingParams())), "sampling").evidence
    assert "sampling" in ill(examine(toys(drafter=Warm, sampling=SamplingParams())))


def test_a_draft_with_noise_of_its_own() -> None:
    findings = examine(toys(drafter=Unseeded, sampling=replace(SAMPLED, seed=1)))
    assert "the seed" in named(findings, "sampling").evidence
    assert "sampling" in ill(findings)


@pytest.mark.parametrize("seed", [None, 1])
def test_a_draft_of_another_context(seed: int | None) -> None:
    assert "sampling" in ill(examine(toys(drafter=Late, sampling=replace(SAMPLED, seed=seed))))


@pytest.mark.parametrize("liar", [Liar, Impossible])
def test_probabilities_that_were_not_drawn_from(liar: type[ModelDrafter]) -> None:
    sampling = replace(SAMPLED, temperature=1.0, top_k=6, max_tokens=200)
    finding = named(examine(toys(drafter=liar, sampling=sampling)), "draft probabilities")
    assert finding.status == "attention"
    assert ("0 of a probability" in finding.evidence) == (liar is Liar)


def test_a_broken_draft_is_a_finding() -> None:
    class Shapeless(Drafter):
        def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
            return [Draft.chain([1], probs=torch.ones(1, 5)) for _ in seqs]

    findings = examine(replace(toys(), drafter=Shapeless()))
    assert ill(findings) == {"acceptance"}
    assert "shape" in named(findings, "acceptance").evidence


# vocabularies


def loaded(*, width: int = 12, eos: Seq[int] = (), **vocabulary: Any) -> loader.Loaded:
    return loader.Loaded("m", ToyTarget(width, eos=eos), tokenizer(**vocabulary))


def chat(mark: str, date: str = "") -> Callable[[list[dict[str, str]]], str]:
    return lambda messages: date + "".join(f"<{mark} {turn['role']}>{turn['content']}</{mark}>" for turn in messages)


def test_vocabularies() -> None:
    mine = loaded()
    assert models.check_vocabularies(mine, loaded(width=16)).status == "ok"
    other = models.check_vocabularies(mine, loaded(extra=12))
    assert other.status == "attention"
    assert "12 and 13 tokens, 1 ids differ; the first is id 12: none for the target, 'extra'" in other.evidence
    assert models.check_vocabularies(mine, loaded(t3=4, t4=3)).status == "attention"


def test_nothing_is_measured_across_vocabularies() -> None:
    case = toys()
    assert case.draft is not None
    findings = examine(replace(case, draft=replace(case.draft, tokenizer=tokenizer(extra=12))))
    assert ill(findings) == {"vocabulary"}
    assert all(named(findings, name).status == "skipped" for name in drafts.CHECKS)


def test_ends_and_templates() -> None:
    plain = loaded(eos=[1])
    assert models.check_special_tokens(plain, loaded(eos=[1, 2])).status == "ok"
    assert models.check_special_tokens(plain, loaded(eos=[2])).status == "attention"
    mine = loaded(template=chat("s", "today is Monday"))
    assert models.check_special_tokens(mine, loaded(template=chat("s", "today is Friday"))).status == "ok"
    assert models.check_special_tokens(mine, loaded()).status == "ok"  # a base model; measurement has the last word
    other = models.check_special_tokens(mine, loaded(template=chat("turn")))
    assert other.status == "attention"
    assert "</turn>" in other.evidence


# positions and masks


def positions_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = cache.SlotCache.prepare

    def broken(self: cache.SlotCache, feeds: list[cache.Feed], **options: Any) -> dict[str, torch.Tensor]:
        prepared = prepare(self, feeds, **options)
        if self.lengths[0]:
            prepared["position_ids"] -= prepared["position_ids"].min()
        return prepared

    monkeypatch.setattr(cache.SlotCache, "prepare", broken)


def mask_off_by(step: int) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(prepared: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
            visible = prepared["visible"].roll(step, -1)
            visible[..., 0] = True
            return cache.additive_mask({**prepared, "visible": visible}, **options)

        monkeypatch.setattr(hf, "additive_mask", broken)

    return plant


def rejected_keys_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots are written once, so that what follows a rejection is not."""
    write = cache.SlotCache._write

    def broken(self: cache.SlotCache, stores: list[Any], layer: int, states: torch.Tensor) -> torch.Tensor:
        before = None if stores[layer] is None else stores[layer].clone()
        written = write(self, stores, layer, states)
        if before is None:
            return written
        stores[layer].copy_(torch.where((before != 0).any(-1, keepdim=True), before, stores[layer]))
        return stores[layer][self._rows, :, : self._width]

    monkeypatch.setattr(cache.SlotCache, "_write", broken)


FAULTS = [positions_start_again, mask_off_by(1), mask_off_by(-1), rejected_keys_stay]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_sound_positions(family: str) -> None:
    finding = models.check_positions(HFTarget(build(family)), TOKENS)
    assert finding.status == "ok"
    assert "9 pieces" in finding.evidence


@pytest.mark.parametrize("plant", FAULTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_positions_and_masks(monkeypatch: pytest.MonkeyPatch, plant: Callable[[Any], None], family: str) -> None:
    target = HFTarget(build(family))
    plant(monkeypatch)
    finding = models.check_positions(target, TOKENS, name="draft positions")
    assert (finding.name, finding.status) == ("draft positions", "attention")
    assert "first in round" in finding.evidence
    assert target._seqs == []


@pytest.mark.parametrize("plant", [None, *FAULTS])
def test_positions_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, smollm2_path: Path, plant: Callable[[Any], None] | None
) -> None:
    """Rounding is no fault, and does not hide one."""
    target, tokens = half_smollm2(smollm2_path)
    if plant is not None:
        plant(monkeypatch)
    assert models.check_positions(target, tokens).status == ("ok" if plant is None else "attention")


def test_faults_that_come_late() -> None:
    class Stale(ToyTarget):
        """From its third score on, a rejected token stays in what it looks at; it has no plain forward to ask."""

        def _score(self, seq: Sequence, draft: Draft, hidden: bool) -> Any:
            self.num_scores = getattr(self, "num_scores", 0) + 1
            self.salt = 0 if self.num_scores <= 5 else 1
            return super()._score(seq, draft, hidden)

    assert models.check_positions(ToyTarget(), [token % 12 for token in TOKENS]).status == "ok"
    finding = models.check_positions(Stale(), [token % 12 for token in TOKENS])
    assert finding.status == "attention"
    assert "first in round 3" in finding.evidence


def test_logits_that_are_no_numbers() -> None:
    class Sick(ToyTarget):
        def logits(self, context: Seq[int]) -> np.ndarray:
            return super().logits(context) * (np.nan if len(context) > 20 else 1)

    assert models.check_positions(Sick(), [token % 12 for token in TOKENS]).status == "attention"


def test_a_model_that_cannot_be_scored_is_a_finding() -> None:
    case = toys()

    def broken(seqs: Any, drafts: Any) -> Any:
        raise RuntimeError("size mismatch")

    case.target.target.score = broken
    finding = named(examine(replace(case, drafter=None)), "target positions")
    assert finding.status == "attention"
    assert "size mismatch" in finding.evidence


# precision


def half_smollm2(path: Path) -> tuple[HFTarget, list[int]]:
    model = tf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    tokens = tf.AutoTokenizer.from_pretrained(path).encode("The keeper wrote down the weather every evening. " * 4)
    return HFTarget(model), tokens


def test_half_precision_that_drifts() -> None:
    target = HFTarget(build("llama").to(torch.bfloat16))
    for parameter in target.model.parameters():
        parameter.data *= 3
    finding = models.check_precision(target, TOKENS)
    assert finding.status == "attention"
    assert "bfloat16" in finding.evidence
    assert "flip" in finding.evidence
    assert "apart" in finding.evidence


def test_half_precision_that_does_not(smollm2_path: Path) -> None:
    target, tokens = half_smollm2(smollm2_path)
    before = {name: parameter.clone() for name, parameter in target.model.named_parameters()}
    assert models.check_precision(target, tokens).status == "ok"
    for name, parameter in target.model.named_parameters():
        assert parameter.dtype is torch.bfloat16
        assert torch.equal(parameter, before[name])
    assert models.check_precision(HFTarget(build("llama")), TOKENS).status == "skipped"


@torch.no_grad()
def test_upcast_is_the_float32_copy() -> None:
    for family in ("llama", "gpt2", "gemma3"):
        model = build(family).to(torch.bfloat16)
        tokens = torch.tensor([TOKENS])
        expected = copy.deepcopy(model).float()(input_ids=tokens, use_cache=False).logits
        with models._upcast(model):
            assert torch.equal(model(input_ids=tokens, use_cache=False).logits, expected)
        assert model(input_ids=tokens, use_cache=False).logits.dtype is torch.bfloat16


# acceptance, speed, batch, temperature


def counts(rate: float, *, k: int = 5, rounds: int = 400) -> SpecStats:
    """What ``rounds`` drafts show where each token is accepted with ``rate``."""
    reached = [round(rounds * rate**i) for i in range(k + 1)]
    stats = SpecStats(rounds, rounds * k, sum(reached[1:]), reached[1:], reached[:-1], num_steps=rounds)
    assert drafts.acceptance(stats) == pytest.approx(rate, abs=0.01)
    return stats


def speed_of(rate: float, cost: CostCurve, draft_cost: CostCurve | None) -> Finding:
    return speed.check_speed(counts(rate), speed.outlook_of(counts(rate), cost, draft_cost))


def test_an_unrelated_draft() -> None:
    findings = examine(toys(ToyTarget, salt=5, sampling=SamplingParams(max_tokens=48)))
    assert {"acceptance", "speed"} <= ill(findings)
    assert "guesses too badly" in named(findings, "speed").evidence
    assert drafts.check_acceptance(counts(0.6)).status == "ok"
    assert drafts.check_acceptance(counts(0.25)).status == "attention"
    assert drafts.check_acceptance(SpecStats(3, 15, 9, [3, 2], [3, 3])).status == "skipped"


def test_speed_names_the_cause() -> None:
    assert speed_of(0.7, FLAT, QUICK).status == "ok"
    assert speed_of(0.7, FLAT, None).status == "ok"
    slow = speed_of(0.7, FLAT, CostCurve(((1, 0.07),)))
    assert "too slow" in slow.evidence
    assert "a draft token 0.70 (70 ms of 100)" in slow.evidence
    assert "guesses too badly" in speed_of(0.05, FLAT, QUICK).evidence
    assert "checking several tokens costs too much" in speed_of(0.7, STEEP, QUICK).evidence
    for finding in (slow, speed_of(0.05, FLAT, QUICK), speed_of(0.7, STEEP, QUICK)):
        assert finding.status == "attention"


def test_the_expected_speedup_is_the_formula() -> None:
    outlook = speed.Outlook([0.7] * 16, 1.0, CostCurve(((1, 0.1),)), CostCurve(((1, 0.005),)))
    k, speedup = outlook.best()
    assert k in (5, 6)
    assert speedup == pytest.approx(2.35, abs=0.01)
    halves = replace(outlook, share=0.5).best()[1]
    assert halves == pytest.approx(max((1 + 0.5 * sum(0.7**i for i in range(1, k + 1))) / (1 + 0.5 * k * 0.05)
                                       for k in range(1, 17)), abs=0.01)  # fmt: skip


def test_a_batch_too_large() -> None:
    cost = CostCurve(((1, 0.1), (8, 0.11), (128, 2.0)), ((1, 0.1), (8, 0.11), (32, 0.5)))
    outlook = speed.outlook_of(counts(0.7), cost, None)
    assert speed.check_batch(counts(0.7), outlook, 1).status == "skipped"
    assert speed.check_batch(counts(0.7), outlook, 2).status == "ok"
    finding = speed.check_batch(counts(0.7), outlook, 32)
    assert finding.status == "attention"
    first = int(finding.evidence.split("from batch ")[1].split()[0])
    assert speed.check_batch(counts(0.7), outlook, first).status == "attention"
    assert speed.check_batch(counts(0.7), outlook, first - 1).status == "ok"
    assert f"below batch {first}" in finding.remedy


def test_a_high_temperature() -> None:
    class Sharp(NearTarget):
        """Agrees on the likeliest token, and is too sure of it."""

        noise, sharper = 0.0, 8.0

    case = toys(Sharp, sampling=replace(SAMPLED, temperature=1.5))
    finding = named(examine(case), "temperature")
    assert finding.status == "attention"
    assert "at temperature 1.5, 100% at 0" in finding.evidence
    assert named(examine(replace(case, sampling=replace(SAMPLED, temperature=0.8))), "temperature").status == "ok"


# memory


def memory(monkeypatch: pytest.MonkeyPatch, *, free: float, total: float) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free, total=total))


def test_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [HFTarget(build("llama")), HFTarget(build("gpt2"))]
    sequence = Sequence("s", TOKENS[:1], 1)
    for target in targets:
        target.score([sequence], [Draft([], [])])
        stores = target._cache._stores()
        assert models.cache_bytes(target.model) == sum(store[0, :, 0].nbytes for store in stores)
        target.forget(sequence)
    needed = 128 * sum(models.cache_bytes(target.model) for target in targets)
    memory(monkeypatch, free=3 * needed, total=10 * needed)
    assert models.check_memory(targets, 3).status == "ok"
    assert models.check_memory(targets, 4).status == "attention"
    memory(monkeypatch, free=3 * needed, total=31 * needed)
    finding = models.check_memory(targets, 3)
    assert finding.status == "attention"
    assert "3 x 128 tokens" in finding.evidence
    assert "memory" in ill(examine(toys()))


# the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """A tiny ``target``, and ``other`` with a token more."""
    root = tmp_path_factory.mktemp("doctor")
    words = tf.AutoTokenizer.from_pretrained(smollm2_path)
    torch.manual_seed(0)
    model = tf.LlamaForCausalLM(tf.LlamaConfig(
        vocab_size=len(words) + 8, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=256, eos_token_id=2, bos_token_id=1,
    ))  # fmt: skip
    for name in ("target", "other"):
        if name == "other":
            words.add_tokens(["<|mine|>"])
        model.save_pretrained(root / name)
        words.save_pretrained(root / name)
    (root / "prompts.jsonl").write_text(json.dumps({"prompt": "one two three"}) + "\n", encoding="utf-8")
    return root


Doctor = Callable[..., tuple[int, str, str]]


@pytest.fixture
def doctor(folder: Path, monkeypatch: pytest.MonkeyPatch, flashspec_command: Callable[..., Ran]) -> Doctor:
    """``flashspec doctor`` in the folder of the models: exit code, stdout, stderr."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(loader, "cost_curve", lambda model, is_draft=False, **_: QUICK if is_draft else FLAT)
    return lambda *words: astuple(flashspec_command("doctor", *words))


def test_the_command_on_a_sound_pair(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--model", "target", "--draft", "target", "--max-tokens", "16", "--temperature", "0.7", "--batch", "2")
    code, out, err = doctor(*words)
    lines = out.splitlines()
    assert code == 0, out
    assert len(lines) == 13
    assert all(line[:2] in ("✓ ", "– ") for line in lines[:-1])
    assert lines[-1].startswith("sound (")
    assert "measuring acceptance" in err
    monkeypatch.setattr(locale, "getencoding", lambda: "cp1252")
    assert all(line[:2] in ("+ ", "- ") for line in doctor(*words)[1].splitlines()[:-1])


def test_the_command_names_what_is_wrong(doctor: Doctor) -> None:
    code, out, _ = doctor("--model", "target", "--draft", "other", "--max-tokens", "16")
    assert code == 1
    assert "! vocabulary: " in out
    assert "\n  remedy: " in out
    assert "1 of 12 checks need attention: vocabulary" in out.splitlines()[-1]


@pytest.mark.parametrize(("draft", "sound"), [("target", True), ("other", False)])
def test_json(doctor: Doctor, draft: str, sound: bool) -> None:
    code, out, _ = doctor("--model", "target", "--draft", draft, "--prompts", "prompts.jsonl", "--json")
    report = json.loads(out)
    assert code == 1 - sound
    assert report["sound"] is sound
    assert [finding["name"] for finding in report["findings"] if finding["status"] == "attention"] == (
        [] if sound else ["vocabulary"]
    )
    assert all(set(finding) == {"name", "status", "evidence", "remedy"} for finding in report["findings"])


def test_no_memory_for_the_weights_is_a_finding(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*words: Any, **options: Any) -> None:
        raise MemoryLimitError("target needs 9 GiB, and 1 GiB are free; use a smaller model")

    monkeypatch.setattr(pretrained, "load_model", broken)
    code, out, _ = doctor("--model", "target", "--json")
    assert code == 1
    assert json.loads(out)["findings"] == [
        {"name": "memory", "status": "attention", "evidence": "target needs 9 GiB, and 1 GiB are free",
         "remedy": "use a smaller model"}
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere"], "no model 'nowhere'"),
        (["--model", "target", "--drafter", "model"], "needs a draft model"),
        (["--model", "target", "--temperature", "-1"], "temperature is -1"),
        (["--model", "target", "--prompts", "nowhere.jsonl"], "cannot read prompts"),
        (["--model", "target", "--prompts", "prompts.jsonl", "--max-tokens", "255"], "256 positions"),
        (["--model", "target", "--max-tokens", "256"], "max_tokens is 256"),
    ],
)
def test_mistakes_are_one_message_and_exit_code_2(doctor: Doctor, words: list[str], message: str) -> None:
    code, out, err = doctor(*words)
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")
    assert "Traceback" not in err
