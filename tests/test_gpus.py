"""Planning for GPUs that are not here: names, the formula against sums worked out by hand, schedules and sentences."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from flashspec.costs import CostCurve
from flashspec.errors import OptionError
from flashspec.planner import make_plan
from flashspec.planner.gpus import (
    GPUS,
    MOST,
    NODE,
    OTHERWISE,
    Gpu,
    Gpus,
    assumptions,
    can_share,
    check_sharing,
    crossover,
    draft_lengths,
    gpu_memory,
    gpus_that_fit,
    load_of,
    load_reasons,
    load_verdict,
    parse_gpus,
    roofline,
    schedule,
    sequences_that_fit,
)
from flashspec.planner.memory import ModelSize, Setup
from flashspec.planner.speed import Outlook, constant
from flashspec.vllm.command import Options

GIB = 2**30
H100 = GPUS["H100-SXM"]


def size_of(numbers: int, cache_numbers: int) -> ModelSize:
    return ModelSize(
        weights=2 * numbers, loading=2 * numbers, scratch=0, itemsize=2, numbers=numbers, cache_numbers=cache_numbers,
        repeated_numbers=0, token_numbers=80_000, mask_bytes=0, masking_bytes=0, has_all_logits=False, heads=32,
        kv_heads=8, max_length=8192, vocab_size=128_256,
    )  # fmt: skip


EIGHT = size_of(8 * 10**9, 32 * 8 * 2 * 128)  # as Llama 3.1 8B: 128 KiB of keys and values for a token
ONE = size_of(10**9, 16 * 8 * 2 * 64)


def outlook_of(gpus: Gpus, acceptance: float = 0.7, *, context: int = 64, target: ModelSize = EIGHT) -> Outlook:
    curves = (roofline(size, gpus, context=context) for size in (target, ONE))
    return constant(acceptance, next(curves), draft=next(curves), longest=8)


# names


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("2xH100", "H100-SXM", 2),
        ("H100", "H100-SXM", 1),
        ("8 x h100 pcie", "H100-PCIe", 8),
        ("4XA100", "A100-80", 4),
        ("1*a100_40", "A100-40", 1),
        ("NVIDIA A100-SXM4-80GB", "A100-80", 1),
        ("NVIDIA GeForce RTX 4090", "RTX4090", 1),
        ("2x3090", "RTX3090", 2),
        ("AMD Instinct MI300X", "MI300X", 1),
        (" 1024xL4 ", "L4", 1024),
    ],
)
def test_names_as_people_and_drivers_write_them(text: str, name: str, count: int) -> None:
    assert parse_gpus(text) == Gpus(GPUS[name], count)
    assert parse_gpus(str(parse_gpus(text))) == parse_gpus(text)


def test_every_other_name_is_of_a_gpu_of_the_table() -> None:
    assert set(OTHERWISE.values()) <= set(GPUS)
    for name in GPUS:
        assert parse_gpus(f"3x{name}") == Gpus(GPUS[name], 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "gpus is ''; give a number and a name, such as 2xH100-SXM; names are A10, "),
        ("2", "gpus is '2'; give a number and a name"),
        ("2x", "gpus is '2x'; give a number and a name"),
        ("2xH1000", r"gpus is '2xH1000' \(do you mean H100-SXM\?\); give"),
        ("L40", r"do you mean L4"),
        ("0xH100", "gpus is '0xH100'; the number of GPUs must be from 1 to 1024, as in 2xH100-SXM"),
        ("-1xL4", "from 1 to 1024, as in 2xL4"),
        ("1025xL4", "from 1 to 1024"),
        ("9" * 5000 + "xL4", "give a number and a name"),
    ],
)
def test_other_names_and_numbers_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        parse_gpus(text)


@given(st.text())
def test_any_text_is_understood_or_refused(text: str) -> None:
    try:
        found = parse_gpus(text)
    except OptionError:
        return
    assert 1 <= found.count <= 1024


def test_numbers_of_gpus_that_share_heads() -> None:
    size = replace(EIGHT, heads=14, kv_heads=2)
    assert [count for count in range(1, 20) if can_share(size, count)] == [1, 2, 14]
    assert can_share(EIGHT, 16)  # two GPUs for each of eight key-value heads
    check_sharing(size, Gpus(H100, 2), "small")
    with pytest.raises(OptionError, match=r"gpus is 4xH100-SXM, and small has 14 attention heads .* use 1, 2, 14"):
        check_sharing(size, Gpus(H100, 4), "small")


# cost


def test_a_forward_worked_out_by_hand() -> None:
    """Llama 3.1 8B on an H100: 16 GB at 80 % of 3.35 TB/s; 16 GFLOP a token at 60 % of 989 TFLOP/s.

    16e9 / 2.68e12 = 5.970 ms; 16e9 / 593.4e12 = 26.96 us a token, so that the weights are slower up to 221 tokens; 1000
    tokens of 131072 bytes / 2.68e12 = 48.91 us for each sequence; and 0.5 ms.
    """
    curve = roofline(EIGHT, Gpus(H100, 1), context=1000)
    assert curve(1) == pytest.approx(5.970e-3 + 0.04891e-3 + 0.5e-3, rel=1e-4)
    assert curve(5) == curve(1)
    assert curve(5, 32) == pytest.approx(5.970e-3 + 32 * 0.04891e-3 + 0.5e-3, rel=1e-4)
    assert curve(5, 100) == pytest.approx(500 * 26.963e-6 + 100 * 0.04891e-3 + 0.5e-3, rel=1e-4)
    assert curve(221) == curve(1) < curve(222)
    assert curve(222) == pytest.approx(222 * 26.963e-6 + 0.04891e-3 + 0.5e-3, rel=1e-4)


def plainly(size: ModelSize, gpus: Gpus, context: int, tokens: int, rows: int) -> float:
    gpu, bandwidth = gpus.gpu, 0.8 * gpus.gpu.bandwidth * 1e12
    work = max(size.weights / bandwidth, 2 * size.numbers * tokens / (0.6 * gpu.tflops * 1e12)) / gpus.count
    cache = rows * context * size.cache_numbers * 2 / min(gpus.count, size.kv_heads) / bandwidth
    return work + cache + 0.5e-3


@given(
    st.sampled_from(list(GPUS.values())), st.sampled_from([1, 2, 8, 16]), st.integers(1, 8192), st.integers(1, 9),
    st.integers(1, 1024),
)  # fmt: skip
def test_the_curve_is_the_formula_at_every_number_of_tokens(
    gpu: Gpu, count: int, context: int, width: int, rows: int
) -> None:
    gpus = Gpus(gpu, count)
    expected = plainly(EIGHT, gpus, context, width * rows, rows)
    assert roofline(EIGHT, gpus, context=context)(width, rows) == pytest.approx(expected)


def test_a_gpu_that_computes_slower_than_it_reads() -> None:
    gpus = Gpus(Gpu("abacus", 1, 100, 0.001), 1)
    for tokens in (1, 2, 7):
        assert roofline(ONE, gpus, context=1)(tokens) == pytest.approx(plainly(ONE, gpus, 1, tokens, 1))


def test_a_speedup_worked_out_by_hand() -> None:
    """32 sequences of 1000 tokens, k = 2, a = 0.7: 2.19 tokens for two draft steps and one of 96 tokens, not 32."""
    outlook = outlook_of(Gpus(H100, 1), context=1000)
    plain = 5.970e-3 + 32 * 0.04891e-3 + 0.5e-3
    draft = 2e9 / 2.68e12 + 32 * 1000 * 32768 / 2.68e12 + 0.5e-3
    assert outlook.step(2, rows=32).speedup == pytest.approx(2.19 * plain / (2 * draft + plain), rel=1e-3)


# memory


def test_memory_of_each_gpu_worked_out_by_hand() -> None:
    setup = Setup(target=EIGHT, draft=ONE, batch=32, context=2048, num_speculative_tokens=4, device="cuda")
    plan = gpu_memory(setup, Gpus(H100, 2), available=72 * GIB)
    assert (plan.weights, plan.draft_weights) == (8 * 10**9, 10**9)
    assert plan.kv_cache == 32 * 2048 * 131072 // 2
    assert plan.draft_kv_cache == 32 * 2048 * 32768 // 2
    assert plan.workspace == 8192 * 80_000 * 2 + 3 * 4 * 32 * 5 * 128_256
    assert plan.fits
    many = gpu_memory(setup, Gpus(H100, 32), available=72 * GIB)
    assert many.kv_cache == 32 * 2048 * 131072 // 8  # eight key-value heads are no more than eight shares
    assert gpu_memory(replace(setup, draft=None), Gpus(H100, 2), available=1).draft_kv_cache == 0


def test_how_many_sequences_fit_and_on_how_many_gpus() -> None:
    setup = Setup(target=EIGHT, draft=ONE, batch=300, context=2048, device="cuda")
    for available in (16 * GIB, 24 * GIB, 72 * GIB, 2000 * GIB):
        found = sequences_that_fit(setup, Gpus(H100, 1), available=available)
        fits = [
            gpu_memory(replace(setup, batch=rows), Gpus(H100, 1), available=available).fits for rows in range(1, 1025)
        ]
        assert found == sum(fits)
    assert sequences_that_fit(setup, Gpus(H100, 1), available=16 * GIB) == 0
    assert sequences_that_fit(setup, Gpus(H100, 1), available=2000 * GIB) == MOST
    needed = gpus_that_fit(setup, Gpus(H100, 1), available=72 * GIB)
    assert needed == 2
    assert not gpu_memory(setup, Gpus(H100, 1), available=72 * GIB).fits
    assert gpu_memory(setup, Gpus(H100, 2), available=72 * GIB).fits
    assert gpus_that_fit(setup, Gpus(H100, 1), available=GIB) is None
    odd = replace(setup, draft=replace(ONE, heads=9, kv_heads=3))
    assert gpus_that_fit(odd, Gpus(H100, 1), available=72 * GIB) is None  # 32 and 9 heads share nothing but 1
    assert [GPUS[name].chunk for name in ("L4", "A100-80", "H200", "B200")] == [2048, 2048, 8192, 16384]


# what to do at which load


def crossover_of(outlook: Outlook) -> int:
    return crossover(list(draft_lengths(outlook, MOST))) or MOST + 1


def test_the_crossover_moves_up_with_what_makes_reading_the_bottleneck() -> None:
    base = crossover_of(outlook_of(Gpus(H100, 1)))
    assert 50 < base < 500
    slow = Gpus(replace(H100, bandwidth=H100.bandwidth / 2), 1)
    assert crossover_of(outlook_of(slow)) > base
    quick = Gpus(replace(H100, tflops=H100.tflops / 2), 1)
    assert crossover_of(outlook_of(quick)) < base
    assert crossover_of(outlook_of(Gpus(H100, 1), 0.9)) > base > crossover_of(outlook_of(Gpus(H100, 1), 0.4))
    assert crossover_of(outlook_of(Gpus(H100, 1), context=4096)) > base  # keys and values are read, too
    assert crossover_of(outlook_of(Gpus(H100, 1), 0.0)) == 1


def test_more_gpus_take_less_time_and_more_sequences() -> None:
    """Weights and work shrink alike: the knee stays where it is, and it is what does not shrink that wins."""
    setup = Setup(target=EIGHT, draft=ONE, batch=8, context=2048, device="cuda")
    plain, fitting = [], []
    for count in (1, 2, 4, 8):
        gpus = Gpus(H100, count)
        plain.append(roofline(EIGHT, gpus, context=2048)(1, 8))
        fitting.append(sequences_that_fit(setup, gpus, available=24 * GIB))
    assert plain == sorted(plain, reverse=True)
    assert fitting == sorted(fitting)
    assert len(set(fitting)) == 4
    one, eight = (outlook_of(Gpus(H100, count)) for count in (1, 8))
    assert eight.step(4).draft > one.step(4).draft  # draft steps are mostly what no GPU can shorten


def test_drafts_get_shorter_as_the_batch_grows() -> None:
    lengths = list(draft_lengths(outlook_of(Gpus(H100, 1)), 400))
    assert lengths[0] >= 2
    assert lengths[-1] == 0
    assert lengths == sorted(lengths, reverse=True)


def test_a_gain_that_nobody_would_notice_is_none() -> None:
    flat = CostCurve(((1, 1.0),))
    assert list(draft_lengths(constant(0.06, flat, longest=1), 2)) == [1, 1]
    assert list(draft_lengths(constant(0.04, flat, longest=1), 2)) == [0, 0]


@pytest.mark.parametrize(
    ("lengths", "ranges", "first"),
    [
        ([], [], None),
        ([0], [(1, 1, 0)], 1),
        ([3], [(1, 1, 3)], None),
        ([5, 5, 3, 3, 3, 0], [(1, 2, 5), (3, 5, 3), (6, 6, 0)], 6),
        ([2, 0, 2, 0, 0], [(1, 1, 2), (2, 2, 0), (3, 3, 2), (4, 5, 0)], 4),
    ],
)
def test_ranges_and_crossover(lengths: list[int], ranges: list[tuple[int, int, int]], first: int | None) -> None:
    assert schedule(lengths) == ranges
    assert crossover(lengths) == first


@given(st.sampled_from(list(GPUS.values())), st.floats(0, 1), st.integers(1, 80), st.integers(1, 4096))
def test_schedules_are_what_vllm_takes(gpu: Gpu, acceptance: float, rows: int, context: int) -> None:
    ranges = schedule(list(draft_lengths(outlook_of(Gpus(gpu, 1), acceptance, context=context), rows)))
    assert (ranges[0][0], ranges[-1][1]) == (1, rows)
    for before, after in itertools.pairwise(ranges):
        assert after[0] == before[1] + 1
        assert after[2] != before[2]
    assert Options(model="m", schedule=tuple(ranges)).schedule == tuple(ranges)


# sentences


def test_sentences_of_a_load() -> None:
    gpus = Gpus(H100, 1)
    setup = Setup(target=EIGHT, draft=ONE, batch=300, context=64, num_speculative_tokens=8, device="cuda")
    outlook = outlook_of(gpus)
    load = load_of(setup, gpus, outlook, available=72 * GIB, is_open=False)
    assert load.schedule is not None
    assert load.crossover is not None
    assert load.schedule[-1] == (load.crossover, 300, 0)
    why = load_reasons(load)
    assert all("By formula" in reason for reason in why)
    assert f"By formula drafting no longer pays from {load.crossover} sequences at once on." in why
    assert why[-1].endswith(f"[from, to, k]: {[list(part) for part in load.schedule]}.")
    assert "at least 1024 sequences" in load_reasons(replace(load, fitting=MOST))[0]
    assert "for any number of sequences at once up to 1024" in load_reasons(replace(load, crossover=None))[1]
    assert "for no number of sequences at once" in load_reasons(replace(load, crossover=1))[1]
    shorter = load_of(replace(setup, num_speculative_tokens=1), gpus, outlook, available=72 * GIB, is_open=False)
    assert {k for _, _, k in shorter.schedule or []} == {0, 1}
    unknown = load_of(setup, gpus, outlook, available=72 * GIB, is_open=True)
    assert (unknown.schedule, unknown.crossover) == (None, None)
    assert len(load_reasons(unknown)) == 1


def test_verdicts() -> None:
    gpus = Gpus(H100, 1)
    setup = Setup(target=EIGHT, draft=ONE, batch=300, context=2048, device="cuda")
    outlook = outlook_of(gpus, context=2048)
    load = load_of(setup, gpus, outlook, available=72 * GIB, is_open=True)
    memory = gpu_memory(setup, gpus, available=72 * GIB)
    said = load_verdict(make_plan(outlook, drafter="model", rows=300, memory=memory), load)
    assert said.startswith("By formula, nothing measured. No: it needs ")
    assert said.endswith(f"{load.fitting} sequences of 2048 tokens fit; all of them fit on 2xH100-SXM.")
    plan = make_plan(outlook, drafter="model", rows=300, memory=memory)
    assert load_verdict(plan, replace(load, needed=None)).endswith("sequences of 2048 tokens fit.")
    small = replace(plan, memory=gpu_memory(replace(setup, batch=1), gpus, available=72 * GIB))
    assert load_verdict(small, load).startswith("By formula, nothing measured. Yes: about ")
    assert load_verdict(small, load).endswith("of memory on each GPU; 72.00 GiB are free.")


def test_what_is_assumed_is_said() -> None:
    one, several, many = (assumptions(Gpus(H100, count)) for count in (1, 2, NODE + 1))
    assert "Nothing was measured." in one[0]
    assert "0.5 ms" in one[0]
    assert "80 GiB, 3.35 TB/s, 989 TFLOP/s (bfloat16, dense); of these 90%, 80% and 60% can be had." in one[1]
    assert [len(said) for said in (one, several, many)] == [3, 4, 5]
    assert "what they exchange after each layer is not counted" in several[3]


def test_a_curve_is_of_the_kind_that_measuring_gives() -> None:
    assert isinstance(roofline(ONE, Gpus(H100, 1), context=1), CostCurve)
