"""``distribution`` against the plainest float64 reading of SamplingParams; random numbers to tokens, exactly."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence as Seq
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import chi_square, dense_p, sequence
from hypothesis import given, settings, strategies as st

from flashspec import sampling
from flashspec.core import EMPTY, ROOT, Draft, SamplingParams, Sequence
from flashspec.errors import ModelError, OptionError
from flashspec.sampling import NUCLEUS_START, Distribution, coupled_token, distribution, draw, exponential_noise
from flashspec.tree import paths

VOCAB = 9
JUST_UNDER_1 = math.nextafter(1.0, 0.0)
PROPERTY = settings(derandomize=True, database=None, deadline=None, max_examples=250)


def reference(logits: np.ndarray, seq: Sequence, draft: Draft) -> np.ndarray:
    """dense_p of the context and of every node, each with the tokens on its own path. [n + 1, vocab]"""
    eos = sorted(seq.eos_tokens)
    rows = []
    for row, path in enumerate([[], *paths(draft.parents)]):
        extra = [draft.tokens[node] for node in path]
        rows.append(dense_p(logits[row], seq.sampling, seq.tokens + extra, seq.output + extra, eos))
    return np.stack(rows)


def assert_same(p: Distribution, expected: np.ndarray) -> None:
    """Equal up to float32; impossible tokens are exactly impossible."""
    dense = p.dense().numpy()
    np.testing.assert_allclose(dense, expected, rtol=2e-4, atol=1e-6)
    assert ((dense > 0) | (expected < 1e-30)).all(), "a possible token was cut"
    assert (dense[expected == 0] == 0).all(), "a token that was cut is possible"


def normal_logits(seed: int, rows: int, vocab: int = VOCAB, scale: float = 2.0) -> torch.Tensor:
    return torch.from_numpy((np.random.default_rng(seed).standard_normal((rows, vocab)) * scale).astype(np.float32))


TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def sampling_params(draw: st.DrawFn, keeper: int) -> SamplingParams:
    """Any combination of fields; ``keeper`` is never banned, so that something is left."""
    others = st.sets(TOKENS.filter(lambda token: token != keeper), max_size=4)
    allowed = draw(st.none() | others.map(lambda some: (*some, keeper)))
    return SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7])),
        top_p=draw(st.sampled_from([1.0, 0.97, 0.8, 0.5, 0.01])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, VOCAB, 50])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7, 3.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.6, -0.6])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.45, -0.3])),
        logit_bias=draw(st.dictionaries(TOKENS, st.sampled_from([-4.1, 0.7, 5.3]), max_size=3)),
        bad_tokens=tuple(draw(others)),
        allowed_tokens=allowed,
        min_tokens=draw(st.integers(0, 6)),
    )


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 6) -> Draft:
    parents = [draw(st.integers(ROOT, node - 1)) for node in range(draw(st.integers(0, max_nodes)))]
    return Draft([draw(TOKENS) for _ in parents], parents)


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, Sequence, Draft]:
    keeper = draw(TOKENS)
    params = draw(sampling_params(keeper))
    prompt, output = draw(st.lists(TOKENS, min_size=1, max_size=4)), draw(st.lists(TOKENS, max_size=4))
    eos = draw(st.sets(TOKENS.filter(lambda token: token != keeper), max_size=2))
    draft = draw(trees())
    seq = sequence([*prompt, *output], params, num_prompt_tokens=len(prompt), eos=sorted(eos))
    logits = normal_logits(draw(st.integers(0, 2**32)), len(draft) + 1, scale=draw(st.sampled_from([0.3, 2.0, 8.0])))
    return logits, seq, draft


# distribution


@pytest.mark.parametrize("start", [2, NUCLEUS_START])
@PROPERTY
@given(case=cases())
def test_every_row_is_what_the_parameters_mean_at_its_own_history(
    start: int, case: tuple[torch.Tensor, Sequence, Draft]
) -> None:
    logits, seq, draft = case
    before = logits.clone()
    with mock.patch.object(sampling, "NUCLEUS_START", start):
        p = distribution(logits, seq, draft)
    assert torch.equal(logits, before), "the model's logits were changed"
    expected = reference(logits.numpy(), seq, draft)
    assert_same(p, expected)
    assert p.greedy_tokens() == expected.argmax(-1).tolist()


@settings(PROPERTY, max_examples=80)
@given(case=cases())
def test_rows_and_probabilities_read_the_same_as_the_dense_table(case: tuple[torch.Tensor, Sequence, Draft]) -> None:
    logits, seq, draft = case
    p = distribution(logits, seq, draft)
    dense = p.dense()
    assert dense.shape == (len(draft) + 1, VOCAB)
    rows, tokens = zip(*[(row, token) for row in range(len(dense)) for token in range(VOCAB)], strict=True)
    assert p.prob(rows, tokens) == dense.flatten().tolist()
    for number in range(len(dense)):
        probs, ids = p.row(number)
        held = dict(zip(range(VOCAB) if ids is None else ids.tolist(), probs.tolist(), strict=True))
        assert held == {token: dense[number, token].item() for token in held}
        assert sum(held.values()) == pytest.approx(1, abs=1e-6)


def test_no_question_has_no_answer() -> None:
    assert distribution(normal_logits(0, 1), sequence([1], SamplingParams(temperature=1.0)), EMPTY).prob([], []) == []


def test_a_frequency_penalty_grows_along_the_path_and_not_across_branches() -> None:
    """Token 3 twice in the output, then down one branch; the other branch holds 5."""
    params = SamplingParams(temperature=1.0, frequency_penalty=0.5)
    seq = sequence([0, 3, 3], params, num_prompt_tokens=1)
    draft = Draft([3, 5, 3], [ROOT, ROOT, 0])
    p = distribution(torch.zeros(4, VOCAB), seq, draft).dense()
    ratio = (p[:, 3] / p[:, 8]).log().tolist()  # token 8 was never used
    assert ratio == pytest.approx([-1.0, -1.5, -1.0, -2.0], abs=1e-5)
    assert (p[:, 5] / p[:, 8]).log().tolist() == pytest.approx([0.0, 0.0, -0.5, 0.0], abs=1e-5)


def test_presence_and_frequency_ignore_the_prompt_and_repetition_does_not() -> None:
    seq = sequence([2], SamplingParams(temperature=1.0, presence_penalty=2.0, frequency_penalty=2.0))
    assert_same(distribution(torch.ones(1, VOCAB), seq, EMPTY), np.full((1, VOCAB), 1 / VOCAB))
    seq = sequence([2], SamplingParams(temperature=1.0, repetition_penalty=2.0))
    p = distribution(torch.ones(1, VOCAB), seq, EMPTY).dense()[0]
    assert math.log(p[0] / p[2]) == pytest.approx(0.5, abs=1e-5)


def test_penalties_count_from_the_first_token_where_there_is_no_prompt() -> None:
    seq = sequence([2, 2], SamplingParams(temperature=1.0, presence_penalty=0.7), num_prompt_tokens=0)
    logits = normal_logits(1, 1)
    assert_same(distribution(logits, seq, EMPTY), reference(logits.numpy(), seq, EMPTY))


def test_the_end_is_banned_until_a_nodes_own_depth_reaches_min_tokens() -> None:
    params = SamplingParams(temperature=1.0, min_tokens=3)
    seq = sequence([0, 1], params, num_prompt_tokens=1, eos=[4, 6])  # one output token so far
    draft = Draft([2, 2, 3, 2], [ROOT, 0, ROOT, 1])  # depths 0, 1, 0, 2
    p = distribution(torch.zeros(5, VOCAB), seq, draft).dense()
    assert (p[:, [4, 6]] > 0).all(1).tolist() == [False, False, True, False, True]
    assert (p[:, [4, 6]] == 0).all(1).tolist() == [True, True, False, True, False]


@pytest.mark.parametrize("top_p", [0.04, 0.4, 0.6, 0.97])
def test_a_nucleus_wider_than_the_first_look_is_found_whole(top_p: float) -> None:
    """A flat row beside a peaked one: 240, 2,400, 3,600 and 5,820 of 6,000 tokens, against 512 and 4,096 looked at."""
    vocab = 6000
    flat = np.random.default_rng(5).permutation(np.linspace(0, 0.01, vocab))
    peaked = np.random.default_rng(6).standard_normal(vocab) * 4
    logits = np.stack([flat, peaked]).astype(np.float32)
    top_p += 0.4 / vocab  # well inside a token's share, so that rounding cannot move the edge
    seq = sequence([1], SamplingParams(temperature=1.0, top_p=top_p))
    p = distribution(torch.from_numpy(logits), seq, Draft.chain([0]))
    expected = reference(logits, seq, Draft.chain([0]))
    assert (expected[0] > 0).sum() == pytest.approx(top_p * vocab, rel=0.01)
    assert (p.dense().numpy() > 0).sum(1).tolist() == (expected > 0).sum(1).tolist()
    assert_same(p, expected)


@pytest.mark.parametrize("cut", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-38, 1e-46, 5e-324])
def test_a_tiny_temperature_is_the_argmax(temperature: float, cut: dict[str, Any]) -> None:
    logits = normal_logits(2, 3, scale=500.0)
    seq = sequence([1], SamplingParams(temperature=temperature, **cut))
    p = distribution(logits, seq, Draft.chain([0, 0]))
    assert torch.equal(p.dense(), torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float())


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.0, "top_k": 2}]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(options: dict[str, Any], bad: float) -> None:
    for row, token in ((0, 0), (1, 5)):
        logits = normal_logits(3, 2)
        logits[row, token] = bad
        with pytest.raises(ModelError, match=f"not finite.*{bad}.*float32"):
            distribution(logits, sequence([1], SamplingParams(**options)), Draft.chain([0]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_left_is_refused_and_a_single_minus_inf_is_not(temperature: float) -> None:
    logits = normal_logits(4, 1)
    logits[0, 3] = -math.inf
    seq = sequence([1], SamplingParams(temperature=temperature))
    assert_same(distribution(logits, seq, EMPTY), reference(logits.numpy(), seq, EMPTY))
    only_bad = sequence([1], SamplingParams(temperature=temperature, allowed_tokens=(3,)))
    with pytest.raises(ModelError, match="allowed_tokens"):
        distribution(logits, only_bad, EMPTY)


def test_the_lowest_id_wins_a_greedy_tie() -> None:
    logits = torch.tensor([[0.0, 7.0, 7.0, 1.0]])
    assert distribution(logits, sequence([1]), EMPTY).greedy_tokens() == [1]


# draw


@st.composite
def weights_and_uniform(draw: st.DrawFn) -> tuple[list[int], int]:
    weights = draw(st.lists(st.integers(0, 40) | st.just(0), min_size=1, max_size=8).filter(any))
    return weights, draw(st.integers(0, 2**20 - 1))


@PROPERTY
@given(weights_and_uniform())
def test_draw_is_the_inverse_distribution_function(case: tuple[list[int], int]) -> None:
    """Whole weights and u = j / 2**20: every product and sum is exact, so the edges are too."""
    weights, j = case
    cdf = np.cumsum(weights)
    expected = next(i for i, total in enumerate(cdf) if int(total) << 20 > int(cdf[-1]) * j)
    probs = torch.tensor(weights, dtype=torch.float32)
    assert draw(probs, None, j / 2**20) == expected
    ids = torch.arange(100, 100 + len(weights)).flip(0)
    assert draw(probs, ids, j / 2**20) == int(ids[expected])


@PROPERTY
@given(
    st.lists(st.just(0.0) | st.floats(2.0**-100, 1.0, width=32), min_size=1, max_size=8).filter(any),
    st.sampled_from([0.0, 5e-324, 0.5, 1 - 2.0**-40, JUST_UNDER_1]) | st.floats(0, JUST_UNDER_1),
)
def test_an_impossible_token_is_never_drawn(weights: list[float], uniform: float) -> None:
    token = draw(torch.tensor(weights), None, uniform)
    assert weights[token] > 0


@pytest.mark.parametrize(
    ("weights", "first", "last"),
    [
        ([1.0], 0, 0),
        ([0.0, 0.0, 0.25, 0.0, 0.75, 0.0], 2, 4),
        ([1e-30, 1.0, 1e-30], 0, 1),  # the last is there, but u has only 53 bits
        ([0.1] * 10 + [0.0], 0, 9),
    ],
)
def test_the_ends_of_the_unit_interval(weights: list[float], first: int, last: int) -> None:
    assert draw(torch.tensor(weights), None, 0.0) == first
    assert draw(torch.tensor(weights), None, JUST_UNDER_1) == last


@pytest.mark.parametrize("token", [0, 1, 65_537, 131_070, 131_071])
def test_a_large_vocabulary_is_drawn_from_in_double_precision(token: int) -> None:
    """A step of the distribution function is 2**-17 wide; float32 would round into the next one."""
    assert draw(torch.ones(2**17), None, (token + 0.0001) / 2**17) == token
    assert draw(torch.ones(2**17), None, (token + 0.9999) / 2**17) == token


# exponential_noise, coupled_token


def splitmix_noise(seed: int, choice: int, position: int, token: int) -> float:
    """The same generator in Python's whole numbers."""
    key = hashlib.blake2b(f"{seed}/{choice}/{position}".encode(), digest_size=8).digest()
    bits = (token * 0x9E3779B97F4A7C15 + int.from_bytes(key, "little")) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    bits ^= bits >> 31
    return -math.log1p(-((bits >> 11) + 0.5) * 2.0**-53)


def test_noise_is_splitmix64_in_wrapping_arithmetic() -> None:
    tokens = [0, 1, 2, 511, 151_935, 2**31 - 1]
    for key in ((0, 0, 0), (2**63 - 1, 3, 9), (-5, 0, 10**6)):
        noise = exponential_noise(*key, torch.tensor(tokens)).tolist()
        assert noise == pytest.approx([splitmix_noise(*key, token) for token in tokens], rel=1e-13)


@PROPERTY
@given(st.lists(st.integers(0, 199), min_size=1, max_size=20), st.integers(0, 2**63), st.integers(0, 9))
def test_noise_depends_on_the_token_and_not_on_who_else_asks(tokens: list[int], seed: int, position: int) -> None:
    whole = exponential_noise(seed, 1, position, torch.arange(200))
    assert torch.equal(exponential_noise(seed, 1, position, torch.tensor(tokens)), whole[torch.tensor(tokens)])


def test_noise_differs_in_every_part_of_its_key() -> None:
    tokens = torch.arange(500)
    noise = [exponential_noise(*key, tokens) for key in ((7, 0, 3), (8, 0, 3), (7, 1, 3), (7, 0, 4), (7, 3, 0))]
    for i, one in enumerate(noise):
        for other in noise[:i]:
            assert (one != other).all()
            assert abs(np.corrcoef(one, other)[0, 1]) < 4 / math.sqrt(500)


def kolmogorov(sample: Seq[float]) -> float:
    """sqrt(n) times the largest distance from the exponential distribution; above 1.95 one time in a thousand."""
    cdf = 1 - np.exp(-np.sort(np.asarray(sample)))
    steps = np.arange(len(cdf) + 1) / len(cdf)
    return float(max((cdf - steps[:-1]).max(), (steps[1:] - cdf).max()) * math.sqrt(len(cdf)))


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_noise_is_exponential_over_tokens_positions_and_choices(seed: int) -> None:
    one = torch.tensor([17])
    assert kolmogorov(exponential_noise(seed, 0, 5, torch.arange(20_000)).tolist()) < 1.95
    assert kolmogorov([float(exponential_noise(seed, 0, position, one)) for position in range(3000)]) < 1.95
    assert kolmogorov([float(exponential_noise(seed, choice, 5, one)) for choice in range(3000)]) < 1.95


P_ROW = np.array([0.0, 0.4, 0.05, 0.3, 0.0, 0.2, 0.05])


@pytest.mark.parametrize("seed", [1, 99])
def test_coupled_tokens_follow_p_and_neighbouring_positions_are_independent(seed: int) -> None:
    probs = torch.tensor(P_ROW, dtype=torch.float32)
    seq = sequence([0], SamplingParams(temperature=1.0, seed=seed))
    tokens = [coupled_token(probs, None, seq, position) for position in range(6000)]
    assert chi_square(np.bincount(tokens, minlength=7), P_ROW) < 1
    pairs = np.zeros((7, 7))
    np.add.at(pairs, (tokens[0::2], tokens[1::2]), 1)
    assert chi_square(pairs.ravel(), np.outer(P_ROW, P_ROW).ravel()) < 1


def test_a_sparse_row_gives_the_same_coupled_token() -> None:
    probs = torch.tensor(P_ROW, dtype=torch.float32)
    ids = torch.tensor([5, 3, 0, 1, 6, 2])  # any order; one impossible token kept, one left out
    seq = sequence([0], SamplingParams(temperature=1.0, seed=4))
    for position in range(300):
        assert coupled_token(probs[ids], ids, seq, position) == coupled_token(probs, None, seq, position)


def test_a_coupled_token_is_the_gumbel_argmax_with_the_sequences_key() -> None:
    row = np.random.default_rng(8).dirichlet(np.ones(30))
    for choice in (0, 2):
        seq = Sequence("s", [0], 1, SamplingParams(temperature=1.0, seed=11), choice)
        for position in range(100):
            gumbel = [-math.log(splitmix_noise(11, choice, position, token)) for token in range(30)]
            expected = int((np.log(row) + gumbel).argmax())
            assert coupled_token(torch.tensor(row, dtype=torch.float32), None, seq, position) == expected


# SamplingParams

OUTSIDE = [
    ("temperature", -0.001), ("temperature", 100.001), ("top_p", 0), ("top_p", -0.1), ("top_p", 1.0001),
    ("min_p", -0.0001), ("min_p", 1.0001), ("top_k", -1), ("top_k", 2**31 + 1), ("repetition_penalty", 0.0099),
    ("repetition_penalty", 0.0), ("repetition_penalty", 100.1), ("presence_penalty", -100.1),
    ("presence_penalty", 100.1), ("frequency_penalty", -100.1), ("frequency_penalty", 100.1), ("min_tokens", -1),
    ("max_tokens", 0), ("max_tokens", 2**31 + 1), ("logprobs", -1), ("logprobs", 101), ("verification", "exact"),
]  # fmt: skip
NUMBERS = ("temperature", "top_p", "min_p", "top_k", "repetition_penalty", "presence_penalty", "frequency_penalty",
           "min_tokens", "max_tokens", "logprobs", "seed")  # fmt: skip
WHOLE = ("top_k", "min_tokens", "max_tokens", "logprobs", "seed")


@pytest.mark.parametrize(
    ("name", "value"),
    OUTSIDE
    + [(name, value) for name in NUMBERS for value in (math.nan, math.inf)]
    + [(name, value) for name in NUMBERS for value in (True, "0.5", [1])]
    + [(name, 1.5) for name in WHOLE],
)
def test_a_value_outside_its_range_is_named(name: str, value: object) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert (repr(value) if value != 0 else "0") in str(caught.value)


@pytest.mark.parametrize(("name", "value", "named"), [
    ("logit_bias", {1: math.nan}, "1: nan"),
    ("logit_bias", {1: 10_000.1}, "1: 10000.1"),
    ("logit_bias", {1: -10_001}, "1: -10001"),
    ("logit_bias", {"a": 1.0}, "'a': 1.0"),
    ("logit_bias", {1: "x"}, "1: 'x'"),
    ("logit_bias", {1: True}, "1: True"),
    ("logit_bias", {True: 1.0}, "True: 1.0"),
    ("logit_bias", [1], "[1]"),
    ("logit_bias", None, "None"),
    ("bad_tokens", ("a",), "'a'"),
    ("bad_tokens", (1.5,), "1.5"),
    ("bad_tokens", "12", "'12'"),
    ("bad_tokens", 5, "5"),
    ("allowed_tokens", ("a",), "'a'"),
    ("allowed_tokens", 5, "5"),
    ("allowed_tokens", (), "no token"),
    ("stop", "", "''"),
    ("stop", ("a", ""), "''"),
    ("stop", (5,), "5"),
    ("stop", 5, "5"),
])  # fmt: skip
def test_tokens_texts_and_biases_are_checked_too(name: str, value: object, named: str) -> None:
    with pytest.raises(OptionError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert named in str(caught.value)


def test_values_on_the_edge_of_their_range_are_taken() -> None:
    for name, value in (
        ("temperature", 0), ("temperature", 100), ("top_p", 1), ("top_p", 1e-9), ("min_p", 0), ("min_p", 1),
        ("top_k", 0), ("repetition_penalty", 0.01), ("presence_penalty", -100), ("frequency_penalty", 100),
        ("max_tokens", 1), ("logprobs", 0), ("logprobs", 100), ("logprobs", None), ("seed", 0), ("seed", -1),
        ("logit_bias", {0: 1e4}), ("allowed_tokens", (0,)), ("stop", ()),
    ):  # fmt: skip
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_fields_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(OptionError, match=r"min_tokens is 9.*max_tokens, which is 8"):
        SamplingParams(min_tokens=9, max_tokens=8)
    with pytest.raises(OptionError, match=r"allowed_tokens.*bad_tokens"):
        SamplingParams(allowed_tokens=(1, 2), bad_tokens=(2, 1, 3))


def test_a_plain_stop_string_is_one_stop_string_and_lists_become_tuples() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    params = SamplingParams(stop=["a", "bc"], bad_tokens=[1], allowed_tokens=[2])
    assert (params.stop, params.bad_tokens, params.allowed_tokens) == (("a", "bc"), (1,), (2,))


def test_auto_is_coupled_where_there_is_a_seed_to_honour() -> None:
    assert SamplingParams().verification_rule == "rejection"
    assert SamplingParams(seed=0).verification_rule == "coupled"
    for rule in ("rejection", "block", "coupled"):
        assert SamplingParams(seed=1, verification=rule).verification_rule == rule
        assert SamplingParams(verification=rule).verification_rule == rule
