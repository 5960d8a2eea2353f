"""Formulas against numbers worked out by hand, and the memory plan against models that are really loaded."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from hypothesis import given, strategies as st
from torch.profiler import ProfilerActivity, profile

from flashspec import loader
from flashspec.backends import hf
from flashspec.cli.plan_facts import Place, Question
from flashspec.core import EMPTY, Draft, SamplingParams, Sequence, SpecStats
from flashspec.costs import CostCurve
from flashspec.drafters.model import ModelDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import OptionError
from flashspec.planner import batch_reason, make_plan, open_plan, verdict
from flashspec.planner.memory import (
    MemoryPlan,
    ModelSize,
    Setup,
    _cache,
    _decoding,
    _reading,
    memory_plan,
    model_size,
    ways_out,
)
from flashspec.planner.speed import (
    FLAT,
    NEAR,
    Outlook,
    Step,
    best_k,
    break_even_acceptance,
    by_formula,
    constant,
    expected_speedup,
    expected_tokens,
    observed,
)
from flashspec.weights import default_model

rates = st.floats(0, 1)
ratios = st.just(0.0) | st.floats(1e-3, 3)
lengths = st.integers(0, 20)

# speed by formula


def tokens_by_enumeration(acceptance: float, k: int) -> float:
    """Over every pattern of accepted and rejected guesses: those before the first rejection, and one more."""
    total = 0.0
    for pattern in itertools.product((True, False), repeat=k):
        chance = 1.0
        for is_accepted in pattern:
            chance *= acceptance if is_accepted else 1 - acceptance
        total += chance * (1 + next((i for i, is_accepted in enumerate(pattern) if not is_accepted), k))
    return total


@pytest.mark.parametrize("k", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_expected_tokens_are_those_of_every_pattern(acceptance: float, k: int) -> None:
    assert expected_tokens(acceptance, k) == pytest.approx(tokens_by_enumeration(acceptance, k))


def test_the_table_of_the_tutorial_is_not_of_its_formula() -> None:
    """A well-known tutorial prints other speedups for a = 0.7 and c = 0.05 than its own formula gives.

    For k = 3, 1 + 0.7 + 0.49 + 0.343 = 2.533 tokens over 1 + 3 x 0.05 = 1.15 plain steps are 2.20, and it prints 2.07.
    It is not that it means other numbers by the letters: its first entry, 1.70 / 1.05 = 1.62, is right, and there is no
    acceptance and no cost ratio at all that give its five entries.
    """
    ours = {1: 1.62, 3: 2.20, 5: 2.35, 8: 2.28, 12: 2.06}
    theirs = {1: 1.62, 3: 2.07, 5: 2.18, 8: 2.13, 12: 1.96}
    for k, speedup in ours.items():
        assert expected_speedup(0.7, 0.05, k) == pytest.approx(speedup, abs=0.005)
        assert expected_speedup(0.7, 0.05, k) == pytest.approx(tokens_by_enumeration(0.7, k) / (1 + 0.05 * k))

    def fits(table: dict[int, float], acceptance: float, cost_ratio: float) -> bool:
        return all(abs(expected_speedup(acceptance, cost_ratio, k) - value) < 0.02 for k, value in table.items())

    pairs = [(a / 200, c / 400) for a in range(201) for c in range(101)]
    assert (0.7, 0.05) in [pair for pair in pairs if fits(ours, *pair)]
    assert not [pair for pair in pairs if fits(theirs, *pair)]


def test_best_k() -> None:
    assert best_k(0.7, 0.05) == 5  # 2.3529; k = 6 has 2.3529 as well, and costs more where guesses fail
    assert best_k(0.2, 0.3) == 0
    assert best_k(1.0, 0.05, longest=7) == 7
    assert best_k(0.0, 0.0) == 0


@given(rates, ratios, lengths)
def test_no_k_is_better_by_more_than_one_sees(acceptance: float, cost_ratio: float, longest: int) -> None:
    chosen = best_k(acceptance, cost_ratio, longest=longest)
    speedups = [expected_speedup(acceptance, cost_ratio, k) for k in range(longest + 1)]
    assert speedups[chosen] >= NEAR * max(speedups)
    assert all(speedup < NEAR * max(speedups) for speedup in speedups[:chosen])


@given(st.floats(1e-6, 1), st.integers(1, 20))
def test_at_break_even_nothing_is_won_or_lost(cost_ratio: float, k: int) -> None:
    acceptance = break_even_acceptance(cost_ratio, k)
    assert acceptance is not None
    assert expected_speedup(acceptance, cost_ratio, k) == pytest.approx(1)
    assert expected_speedup(acceptance * 0.99, cost_ratio, k) < 1
    if acceptance < 0.99:
        assert expected_speedup(acceptance * 1.01, cost_ratio, k) > 1


@given(rates, st.integers(1, 20))
def test_break_even_inverts_the_formula(acceptance: float, k: int) -> None:
    ratio = (expected_tokens(acceptance, k) - 1) / k
    found = break_even_acceptance(ratio, k)
    assert found is not None
    assert expected_tokens(found, k) == pytest.approx(expected_tokens(acceptance, k))


def test_break_even_at_the_ends() -> None:
    assert break_even_acceptance(0.05, 1) == pytest.approx(0.05)
    assert break_even_acceptance(0.0, 5) == 0
    assert break_even_acceptance(0.5, 0) == 0
    assert break_even_acceptance(1.0, 5) == 1
    assert break_even_acceptance(1.01, 5) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1.01, 0.1, 3), r"acceptance is 1\.01; it must be from 0 to 1"),
        ((-0.1, 0.1, 3), r"acceptance is -0\.1; it must"),
        ((float("nan"), 0.1, 3), "acceptance is nan; it must"),
        ((0.5, -0.1, 3), r"cost ratio is -0\.1; it must be a number from 0"),
        ((0.5, float("inf"), 3), "cost ratio is inf; it must"),
        ((0.5, 0.1, -1), "num_speculative_tokens is -1; it must be a whole number from 0 to 256"),
        ((0.5, 0.1, 257), "num_speculative_tokens is 257; it must"),
    ],
)
def test_what_is_outside_its_range(arguments: tuple[float, float, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        expected_speedup(*arguments)


# speed by measurement

CURVE = CostCurve(((1, 0.1), (2, 0.12), (4, 0.13), (8, 0.20), (64, 2.0)), ((1, 0.1), (4, 0.11)))
DRAFT = CostCurve(((1, 0.02),), ((1, 0.02), (4, 0.03)))
OUTLOOK = Outlook(
    survival=(0.6, 0.3, 0.2), reach=(0.9, 0.5, 0.4), target=CURVE, draft=DRAFT, draft_extra=0.001, sampling=0.004
)


def test_a_step_in_units_of_a_plain_one() -> None:
    assert Step(3.4, 0.4, 0.9, 0.1).speedup == pytest.approx(2.43, abs=0.005)


@given(rates, ratios, lengths)
def test_the_formula_is_an_outlook_like_any_other(acceptance: float, cost_ratio: float, k: int) -> None:
    outlook = by_formula(acceptance, cost_ratio, longest=20)
    assert outlook.step(k).speedup == pytest.approx(expected_speedup(acceptance, cost_ratio, k))
    assert outlook.step(k, rows=7).speedup == pytest.approx(outlook.step(k).speedup)
    assert outlook.break_even_acceptance(k) == pytest.approx(break_even_acceptance(cost_ratio, k))
    assert outlook.acceptance(k) == pytest.approx(acceptance, abs=1e-4) or expected_tokens(acceptance, k) < 1.0001


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_a_step_is_the_mean_over_all_lengths_of_drafts(k: int, rows: int) -> None:
    """Each row has a draft of length l with probability reach[l - 1] - reach[l]; the longest one is paid for."""
    reach = [1.0, *OUTLOOK.reach[:k], 0.0]
    verify = draft = sampling = 0.0
    for drafted in itertools.product(range(k + 1), repeat=rows):
        chance = 1.0
        for length in drafted:
            chance *= reach[length] - reach[length + 1]
        verify += chance * CURVE(max(drafted) + 1, rows)
        draft += chance * (max(drafted) * DRAFT(1, rows) + sum(drafted) * 0.001)
        sampling += chance * (rows + sum(drafted)) * 0.004
    plain = CURVE(1, rows) + rows * 0.004
    step = OUTLOOK.step(k, rows=rows)
    assert step.tokens == pytest.approx(1 + sum(OUTLOOK.survival[:k]))
    assert (step.verify, step.draft, step.sampling) == pytest.approx((verify / plain, draft / plain, sampling / plain))
    assert k or step.speedup == pytest.approx(1)


def test_beyond_what_was_measured() -> None:
    with pytest.raises(OptionError, match="num_speculative_tokens is 4; it must be a whole number from 0 to 3"):
        OUTLOOK.step(4)


def test_rows_fill_the_machine() -> None:
    """A cost of 1 up to 8 tokens and proportional beyond: alone 8 tokens are free, 16 rows leave room for none."""
    machine = CostCurve(((1, 1.0), (8, 1.0), (800, 100.0)), ((1, 1.0), (8, 1.0), (32, 4.0)))
    by_batch = constant(0.8, machine).by_batch([1, 2, 4, 16])
    assert [k for k, _ in by_batch.values()] == [7, 3, 1, 0]
    assert by_batch[4] == (1, pytest.approx(1.8))
    assert by_batch[16] == (0, 1.0)
    assert "1.80 x with 4 (k = 1), 1.00 x with 16 (k = 0); from 16 on drafting does not pay." in batch_reason(by_batch)
    assert batch_reason({1: (0, 1.0), 2: (0, 1.0)}) == ("Drafting pays for no number of sequences at once from 1 to 2.")


def test_what_a_run_says_of_survival_and_reach() -> None:
    stats = SpecStats()
    stats.record_step(0, "the first token")
    for length, accepted in ((3, 3), (3, 1), (0, 0), (1, 1)):
        stats.record_step(length, "no guess")
        if length:
            stats.record(length, accepted)
    stats.record_step(0, "the last token")
    survival, reach = observed(stats, 4)
    assert survival == (3 / 4, 1 / 4, 1 / 4, 0)
    assert reach == (3 / 4, 2 / 4, 2 / 4, 0)
    assert observed(SpecStats(), 2) == ((0, 0), (0, 0))


# plans and their reasons


def test_a_plan_that_pays() -> None:
    plan = make_plan(by_formula(0.7, 0.05), drafter="model")
    assert (plan.drafter, plan.num_speculative_tokens) == ("model", 5)
    assert plan.expected_speedup == pytest.approx(2.35, abs=0.005)
    assert verdict(plan, []) == "Yes: about 2.35 x with k = 5 (model)."
    assert plan.why == [
        "With k = 5 a step emits 2.94 tokens and costs 1.25 plain steps (draft 0.25, verify 1.00, sampling 0.00): "
        "2.35 x.",
        "k = 5 pays from an acceptance of 20% on; here it is 70%.",
    ]


def test_a_plan_for_a_given_k_names_a_better_one() -> None:
    plan = make_plan(by_formula(0.7, 0.05), drafter="model", k=1)
    assert plan.num_speculative_tokens == 1
    assert plan.why[-1] == "k = 5 would be better: 2.35 x."
    assert "were not considered" in make_plan(by_formula(1, 0.05), drafter="model").why[-1]


def test_a_plan_that_does_not_pay() -> None:
    plan = make_plan(by_formula(0.2, 0.3), drafter="model")
    assert (plan.drafter, plan.num_speculative_tokens, plan.expected_speedup) == ("none", 0, 1.0)
    assert verdict(plan, []) == "No: drafting does not pay here."
    assert "0.92 x" in plan.why[0]
    assert plan.why[1] == "k = 1 pays from an acceptance of 30% on; here it is 20%."
    assert plan.why[2] == "Only 20% of first guesses hold: even drafts that cost nothing would win 1.25 x."
    assert "no acceptance pays for k = 2" in make_plan(by_formula(0.9, 1.2), drafter="model", k=2).why[1]


def test_a_gain_of_a_few_percent_is_no_yes() -> None:
    plan = make_plan(by_formula(0.7, 0.6), drafter="model")
    assert verdict(plan, []) == "Hardly: about 1.06 x with k = 1 (model)."


def test_an_acceptance_of_30_percent_is_no_reason_where_drafts_are_free() -> None:
    plan = make_plan(by_formula(0.3, 0.0), drafter="ngram")
    assert verdict(plan, []).startswith("Yes: about 1.4")
    assert "costs next to nothing, so that every accepted guess is a gain" in plan.why[1]
    assert not any("first guesses" in reason for reason in plan.why)


def test_reasons_of_a_drafter_that_seldom_has_a_guess() -> None:
    seldom = Outlook(survival=(0.1, 0.1), reach=(0.2, 0.2), target=FLAT)
    assert "The drafter has a guess in 20% of the steps; in the others nothing is won." in (
        make_plan(seldom, drafter="ngram").why
    )
    never = Outlook(survival=(0.0,), reach=(0.0,), target=FLAT)
    assert make_plan(never, drafter="ngram").why == ["The drafter had no guess at all."]


def test_a_plan_without_an_acceptance() -> None:
    plan = open_plan(by_formula(0, 0.2), drafter="model", k=3)
    assert plan.expected_speedup is None
    assert verdict(plan, []) == "It depends: k = 3 pays from an acceptance of 39% on."


# memory: against models that are really loaded

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, Callable[[int], Any]] = {
    "llama": lambda vocab: tf.LlamaConfig(**SHAPE, vocab_size=vocab),
    "llama_tied": lambda vocab: tf.LlamaConfig(**SHAPE, vocab_size=vocab, tie_word_embeddings=True),
    "llama_tiny": lambda vocab: tf.LlamaConfig(
        **SHAPE | {"hidden_size": 16}, vocab_size=vocab, tie_word_embeddings=True
    ),
    "qwen2": lambda vocab: tf.Qwen2Config(**SHAPE, vocab_size=vocab),
    "gemma3": lambda vocab: tf.Gemma3TextConfig(
        **SHAPE, vocab_size=vocab, head_dim=16, sliding_window=64, layer_types=KINDS
    ),
    "gpt2": lambda vocab: tf.GPT2Config(
        vocab_size=vocab, n_embd=32, n_layer=3, n_head=4, n_positions=2048, bos_token_id=1, eos_token_id=2
    ),
}
PROMPT, OUTPUT, ROWS = 700, 100, 3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Callable[[str, str], Path]:
    """The folder of a tiny model of a family, saved in a dtype. All output layers but llama_tiny's get packed."""
    root = tmp_path_factory.mktemp("models")

    def saved(family: str, dtype: str) -> Path:
        folder = root / f"{family}-{dtype}"
        if not folder.exists():
            torch.manual_seed(0)
            model = tf.AutoModelForCausalLM.from_config(FAMILIES[family](49152), dtype=getattr(torch, dtype))
            model.save_pretrained(folder)
            for file in smollm2_path.glob("token*"):
                shutil.copy(file, folder)
        return folder

    return saved


def planned(folder: Path, **changes: Any) -> tuple[Setup, MemoryPlan, list[str]]:
    """As the command plans it, with the folder as target and as draft model."""
    question = Question(
        acceptance=None, cost_ratio=None, k=3, batch=ROWS, context=PROMPT + OUTPUT, max_tokens=OUTPUT,
        model=str(folder), draft=str(folder), temperature=0.0, device="cpu", dtype=None, pack=True, memory=None,
        measure=False, prompts=[], trust_remote_code=False,
    )  # fmt: skip
    setup, assumed = Place(replace(question, **changes)).setup(lambda line: None)
    return setup, memory_plan(setup), assumed


def weight_bytes(model: torch.nn.Module) -> int:
    """Of everything a loaded model holds, packed weights included; what two modules share, once."""
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    packed = [module.packed for module in model.modules() if isinstance(module, hf.PackedLinear)]
    return sum(tensor.numel() * tensor.element_size() for tensor in (*held.values(), *packed))


def run(target: Any, draft: Any) -> None:
    """Prompts and outputs of the planned lengths, all at once, with drafts."""
    drafter = ModelDrafter(draft, vocab_size=target.vocab_size)
    engine = LocalEngine(target, drafter, num_speculative_tokens=3, max_batch=ROWS)
    prompts = [random.Random(row).choices(range(10, 1000), k=PROMPT) for row in range(ROWS)]
    engine.generate(prompts, SamplingParams(max_tokens=OUTPUT, ignore_eos=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_is_what_a_loaded_model_takes(folders: Callable[[str, str], Path], family: str, dtype: str) -> None:
    folder = folders(family, dtype)
    _, plan, assumed = planned(folder)
    target = loader.load_model(folder, device="cpu").target
    draft = loader.load_model(folder, device="cpu", is_draft=True).target
    kinds = {type(module).__name__ for module in target.model.modules()}
    assert any("bfloat16 by its config" in line for line in assumed) == ("HalfLinear" in kinds)
    run(target, draft)
    assert plan.weights == weight_bytes(target.model)  # 2 % would do, and hide a bias that is not counted
    assert plan.draft_weights == weight_bytes(draft.model)
    assert plan.kv_cache == target._cache.num_bytes
    assert plan.draft_kv_cache == draft._cache.num_bytes


def test_the_plan_of_a_model_that_is_not_packed(folders: Callable[[str, str], Path]) -> None:
    folder = folders("llama_tied", "bfloat16")
    _, plan, _ = planned(folder, pack=False)
    loaded = loader.load_model(folder, device="cpu", pack=False).target
    assert plan.weights == plan.loading - plan.draft_weights == weight_bytes(loaded.model)


def test_the_plan_of_smollm2(smollm2_path: Path) -> None:
    _, plan, _ = planned(smollm2_path, draft=None, context=300, max_tokens=20, batch=1)
    target = loader.load_model(smollm2_path, device="cpu").target
    seq = Sequence("s", list(range(10, 290)), 280)
    target.score([seq], [EMPTY])
    assert plan.weights == pytest.approx(weight_bytes(target.model), rel=0.02)
    assert plan.kv_cache == pytest.approx(target._cache.num_bytes, rel=0.02)
    assert plan.draft_weights == plan.draft_kv_cache == 0


def test_a_gguf_file_is_planned_by_its_header(smollm2_path: Path) -> None:
    whole, header = (planned(path, draft=None)[1] for path in (smollm2_path, default_model()))
    assert header.weights == pytest.approx(whole.weights, rel=0.02)
    assert header.kv_cache == whole.kv_cache


def test_other_devices_and_dtypes(folders: Callable[[str, str], Path]) -> None:
    """On a GPU nothing is packed: two bytes for each parameter, and for each key and value."""
    folder = folders("llama", "float32")
    model = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    setup, plan, _ = planned(folder, device="cuda:3", memory=8.0, dtype="bfloat16")
    assert plan.weights == plan.draft_weights == weight_bytes(model)
    assert setup.target.scratch == 0
    assert plan.kv_cache == 2 * (3 * 2 * 8 * 2) * ROWS * (1152 + 1)
    assert plan.loading == plan.weights + plan.draft_weights
    wide, wide_plan, _ = planned(folders("llama_tied", "bfloat16"), device="cuda", memory=8.0, dtype="float32")
    assert wide_plan.weights == wide.target.loading
    assert wide.target.in_half().weights == pytest.approx(wide_plan.weights / 2, rel=0.02)


# memory: parts and ways out

SIZE = ModelSize(
    weights=1000, loading=2000, scratch=0, itemsize=4, numbers=500, cache_numbers=2, repeated_numbers=0,
    token_numbers=1, mask_bytes=0, masking_bytes=0, has_all_logits=False, heads=4, kv_heads=2,
    max_length=4096, vocab_size=10,
)  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "context", "device", "slots"),
    [
        (10, 1000, "cpu", (1153, 769)),  # 256, 512, 768, 1152
        (999, 1000, "cpu", (1025, 513)),  # chunks of 512
        (1600, 1700, "cpu", (2305, 1537)),  # 512, 1024, 1536, and by half of it
        (10, 4096, "cpu", (4097, 3889)),  # no more than the model has positions
        (10, 9000, "cpu", (4097, 3889)),
        (10, 257, "cpu", (257, 0)),  # the last token is never fed
        (10, 257, "cuda", (257, 0)),
        (1, 2, "cpu", (257, 0)),
    ],
)
def test_slots_of_a_cache_that_grows(prompt: int, context: int, device: str, slots: tuple[int, int]) -> None:
    setup = Setup(target=SIZE, batch=3, context=context, max_tokens=context - prompt, device=device)
    assert setup.prompt == prompt
    assert _cache(SIZE, setup) == tuple(count * 3 * 2 * 4 for count in slots)


def peak(call: Callable[[], object]) -> int:
    """Bytes that the CPU's allocator gave out at most, beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = (event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return max(itertools.accumulate(changes, initial=0))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("prompt", [512, 1500])
def test_workspace_is_enough_and_not_far_too_much(family: str, prompt: int) -> None:
    wide = {"hidden_size": 256, "intermediate_size": 704, "head_dim": 64} if family != "gpt2" else {"n_embd": 256}
    config = FAMILIES[family](4000)
    for name, value in wide.items():
        setattr(config, name, value)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    hf.use_grouped_attention(model)
    target = hf.HFTarget(model)
    seq = Sequence("s", [7] * prompt, prompt)
    target.score([seq], [EMPTY])
    target.keep(seq, [])
    target.rewind(seq, (prompt - 1) // 512 * 512)
    setup = Setup(target=model_size(config, dtype=torch.float32), context=prompt + 8, max_tokens=8)
    if prompt % 512 == 0:
        reading = peak(lambda: target.score([seq], [EMPTY]))
        assert reading <= _reading(setup.target, setup) <= 2 * reading
    else:
        target.score([seq], [EMPTY])
    target.keep(seq, [])
    seq.tokens.append(7)
    target.score([seq], [EMPTY])  # the cache has grown
    decoding = peak(lambda: target.score([seq], [Draft.chain([7] * 4)]))
    assert decoding <= _decoding(setup)


def setup_with_everything(device: str = "cuda") -> Setup:
    size = replace(SIZE, weights=10**9, loading=10**9, numbers=25 * 10**7, cache_numbers=10**4, vocab_size=10**5)
    draft = replace(size, weights=10**8, loading=10**8, numbers=25 * 10**6, cache_numbers=10**3)
    return Setup(
        target=size, draft=draft, batch=64, context=1024, max_tokens=64, num_speculative_tokens=8, device=device
    )


CHANGES = [
    "a context of 256 tokens",
    "a draft model half as large",
    "up to 4 speculative tokens",
    "half precision",
    "n-grams instead of a draft model",
    "instead of that, the draft model on the CPU, at a loss of speed",
]


def test_ways_out_in_their_order() -> None:
    setup = setup_with_everything()
    ways = ways_out(setup, available=1)
    assert [way.change for way in ways] == CHANGES
    needed = memory_plan(setup).needed
    for way in ways[:-1]:  # each on top of those before
        assert way.saved == needed - way.needed > 0
        needed = way.needed
    assert (ways[-1].saved, ways[-1].needed) == (ways[-2].saved, ways[-2].needed)
    assert not any(way.fits for way in ways)


def test_ways_out_say_from_where_on_it_fits() -> None:
    setup = setup_with_everything()
    needed = [way.needed for way in ways_out(setup, available=1)]
    for number in range(1, 5):
        fits = [way.fits for way in ways_out(setup, available=needed[number])]
        assert fits == [False] * number + [True] * (6 - number)
    plan = make_plan(by_formula(0.7, 0.05), drafter="model", memory=memory_plan(setup, available=needed[1]))
    answer = verdict(plan, ways_out(setup, available=needed[1]))
    assert answer.startswith("No: it needs ")
    assert answer.endswith("; it fits after the first 2 ways out below.")
    assert "use a smaller model" in verdict(plan, ways_out(setup, available=1))


def test_a_context_is_not_cut_further_than_it_must_be() -> None:
    setup = setup_with_everything()
    half = memory_plan(replace(setup, context=512)).needed
    assert ways_out(setup, available=half)[0].change == "a context of 512 tokens"
    assert ways_out(setup, available=half - 1)[0].change == "a context of 256 tokens"
    assert "context" not in ways_out(replace(setup, context=200), available=1)[0].change


def test_ways_out_that_a_cpu_does_not_have() -> None:
    changes = [way.change for way in ways_out(setup_with_everything("cpu"), available=1, can_halve=False)]
    assert changes == [change for change in CHANGES if "half precision" not in change and "CPU" not in change]


def test_what_saves_nothing_is_no_way_out() -> None:
    setup = setup_with_everything()
    few = replace(setup, target=replace(setup.target, vocab_size=10))  # logits are not what takes the memory
    assert [way.change for way in ways_out(few, available=1)] == [*CHANGES[:2], *CHANGES[3:]]


def test_ways_out_without_a_draft_model() -> None:
    setup = replace(setup_with_everything(), draft=None)
    assert [way.change for way in ways_out(setup, available=1)] == [CHANGES[0], CHANGES[2], CHANGES[3]]


def test_what_fits() -> None:
    plan = MemoryPlan(weights=5, draft_weights=4, kv_cache=3, draft_kv_cache=2, workspace=1, loading=16, available=16)
    assert (plan.total, plan.needed, plan.fits) == (15, 16, True)
    assert not replace(plan, available=15).fits
    assert replace(plan, available=None).fits
    assert replace(plan, loading=0).needed == 15
