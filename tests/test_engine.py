"""LocalEngine on the toy target: the tokens of the plain loop, whoever guesses, however far, alone or in a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence as Seq

import numpy as np
import pytest
import torch
from conftest import ScriptedDrafter, ToyTarget, chi_square, dense_p, plain_loop

from flashspec.core import Draft, Drafter, SamplingParams
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.ngram import NGramDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import FlashSpecError, OptionError, PromptError
from flashspec.streams import Result

VOCAB = 12


class Letters:
    """A tokenizer whose token i is the letter at i; it has what TextStream and encode ask for."""

    chat_template = None
    alphabet = "abcdefghijkl"

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [self.alphabet.index(letter) for letter in text]

    def decode(self, tokens: Seq[int], **options: object) -> str:
        return "".join(self.alphabet[token] for token in tokens)


def right(target: ToyTarget, params: SamplingParams) -> Callable[[list[int], int], list[int]]:
    """Guesses exactly what greedy decoding gives."""
    return lambda tokens, budget: plain_loop(target.logits, tokens, SamplingParams(max_tokens=max(budget, 1)), eos=())[
        :budget
    ]


def wrong(target: ToyTarget) -> Callable[[list[int], int], list[int]]:
    def guess(tokens: list[int], budget: int) -> list[int]:
        return [int(target.logits(tokens).argmin())] * budget

    return guess


def tree(tokens: list[int], budget: int) -> Draft:
    """Branches everywhere, over tokens that depend on the context."""
    parents = [-1, -1, 0, 0, 1, 2, 2, 5][:budget]
    guesses = [(tokens[-1] + 1 + i) % VOCAB for i in range(len(parents))]
    return Draft(guesses, parents, drafter="tree")


DRAFTERS: dict[str, Callable[[ToyTarget], Drafter | None]] = {
    "none": lambda target: None,
    "ngram": lambda target: NGramDrafter(min_n=1, max_n=3),
    "model": lambda target: ModelDrafter(ToyTarget(VOCAB, salt=target.salt, scale=1.5), vocab_size=VOCAB),
    "other model": lambda target: ModelDrafter(ToyTarget(VOCAB, salt=99), vocab_size=VOCAB),
    "small vocabulary": lambda target: ModelDrafter(ToyTarget(VOCAB - 3, salt=3), vocab_size=VOCAB),
    "padded vocabulary": lambda target: ModelDrafter(ToyTarget(VOCAB + 4, salt=3), vocab_size=VOCAB),
    "short context": lambda target: ModelDrafter(ToyTarget(VOCAB, max_length=14), vocab_size=VOCAB),
    "always right": lambda target: ScriptedDrafter(right(target, SamplingParams())),
    "always wrong": lambda target: ScriptedDrafter(wrong(target)),
    "over budget": lambda target: ScriptedDrafter(lambda tokens, budget: right(target, SamplingParams())(tokens, 20)),
    "placeholder ids": lambda target: ScriptedDrafter(lambda tokens, budget: [1, -1, VOCAB + 7, 2]),
    "tree": lambda target: ScriptedDrafter(tree),
}
PARAMS = {
    "greedy": SamplingParams(max_tokens=17),
    "seeded": SamplingParams(max_tokens=17, temperature=1.0, seed=5),
    "seeded filters": SamplingParams(max_tokens=17, temperature=0.8, top_k=6, top_p=0.9, min_p=0.02, seed=2),
    "seeded penalties": SamplingParams(
        max_tokens=17, temperature=1.1, seed=9, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2,
        logit_bias={3: 1.5}, bad_tokens=(1,), allowed_tokens=tuple(range(10)), min_tokens=9,
    ),
    "greedy penalties": SamplingParams(max_tokens=17, repetition_penalty=1.5, frequency_penalty=0.7, min_tokens=5),
}  # fmt: skip
PROMPTS = [[1, 2, 3], [4], [5, 6, 5, 6, 5, 6, 5], [0, 1, 2, 0, 1, 2, 0, 1]]


def engine_of(target: ToyTarget, drafter: str, k: int, **options: object) -> LocalEngine:
    made = DRAFTERS[drafter](target)
    return LocalEngine(target, made, num_speculative_tokens=k, tokenizer=Letters(), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("k", [1, 2, 5, 9])
def test_tokens_are_the_plain_loops(drafter: str, params: str, k: int) -> None:
    target = ToyTarget(VOCAB, eos=[7])
    sampling = PARAMS[params]
    expected = [plain_loop(target.logits, prompt, sampling, eos=[7]) for prompt in PROMPTS]
    engine = engine_of(target, drafter, k)
    alone = [engine.generate(prompt, sampling).tokens for prompt in PROMPTS]
    batch = [result.tokens for result in engine.generate(PROMPTS, sampling)]
    assert alone == expected
    assert batch == expected
    assert target.held == {}, "a finished sequence is still in the cache"


def test_always_right_needs_few_steps_and_always_wrong_one_a_token() -> None:
    target = ToyTarget(VOCAB)
    best = engine_of(target, "always right", 4).generate([1, 2], SamplingParams(max_tokens=21))
    assert (best.stats.num_steps, best.stats.acceptance_rate, best.stats.mean_acceptance_length) == (5, 1.0, 5.0)
    assert best.kinds[:6] == ["bonus", "accepted", "accepted", "accepted", "accepted", "bonus"]
    worst = engine_of(target, "always wrong", 4).generate([1, 2], SamplingParams(max_tokens=21))
    assert (worst.stats.num_steps, worst.stats.num_accepted_tokens) == (21, 0)
    assert worst.kinds[1:] == ["recovered"] * 19 + ["bonus"]  # with one token left there is nothing to draft
    assert best.tokens == worst.tokens


def test_ragged_batch_of_different_parameters_equals_each_alone() -> None:
    target = ToyTarget(VOCAB, eos=[7])
    sampling = list(PARAMS.values())
    prompts = [*PROMPTS, [9, 9]]
    engine = engine_of(target, "model", 4)
    found = [result.tokens for result in engine.generate(prompts, sampling)]
    assert found == [plain_loop(target.logits, p, s, eos=[7]) for p, s in zip(prompts, sampling, strict=True)]


def test_more_requests_than_rows_join_as_others_leave() -> None:
    target = ToyTarget(VOCAB, eos=[7])
    engine = engine_of(target, "ngram", 3, max_batch=2)
    prompts = [[i % VOCAB, (3 * i) % VOCAB] for i in range(9)]
    sampling = [SamplingParams(max_tokens=3 + i, temperature=1, seed=i) for i in range(9)]
    found = [result.tokens for result in engine.generate(prompts, sampling)]
    assert found == [plain_loop(target.logits, p, s, eos=[7]) for p, s in zip(prompts, sampling, strict=True)]


def test_choices_of_one_seed_differ_and_repeat() -> None:
    target = ToyTarget(VOCAB)
    engine = engine_of(target, "model", 3)
    sampling = SamplingParams(max_tokens=12, temperature=1, seed=4)
    texts = []
    for choice in (0, 1, 0):
        name = engine.add([1, 2], sampling, choice=choice)
        texts.append([token for chunk in engine.chunks(name) for token in chunk.tokens])
        assert texts[-1] == plain_loop(target.logits, [1, 2], sampling, choice=choice)
    assert texts[0] == texts[2] != texts[1]


# sampled without a seed: distributions


def joint(target: ToyTarget, prompt: list[int], params: SamplingParams, length: int) -> np.ndarray:
    """The exact distribution of the first ``length`` tokens, flattened."""
    p = np.zeros([target.vocab_size] * length)
    for tokens in itertools.product(range(target.vocab_size), repeat=length):
        probability = 1.0
        for i, token in enumerate(tokens):
            context = prompt + list(tokens[:i])
            probability *= dense_p(target.logits(context), params, context, tokens[:i])[token]
        p[tokens] = probability
    return p.reshape(-1)


@pytest.mark.parametrize("verification", ["rejection", "block", "coupled"])
@pytest.mark.parametrize(
    ("drafter", "others"), [("model", []), ("ngram", []), ("tree", []), ("model", [[3], [2, 2, 0, 1, 2]])]
)
def test_sampled_output_has_the_targets_distribution(verification: str, drafter: str, others: list[list[int]]) -> None:
    """Alone, and as one row of a ragged batch."""
    vocab, length, runs = 4, 4, 800
    target = ToyTarget(vocab, scale=1.0, salt=1)
    made: Drafter = ModelDrafter(ToyTarget(vocab, scale=1.0, salt=2), vocab_size=vocab)
    if drafter == "ngram":
        made = NGramDrafter(min_n=1, max_n=2)
    elif drafter == "tree":
        made = ScriptedDrafter(lambda tokens, budget: Draft([0, 2, 1, 3][:budget], [-1, -1, 0, 1][:budget]))
    engine = LocalEngine(target, made, num_speculative_tokens=3)
    shape = {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    counts = np.zeros([vocab] * length)
    for seed in range(runs):
        params = SamplingParams(max_tokens=length, seed=seed, verification=verification, **shape)  # type: ignore[arg-type]
        counts[tuple(engine.generate([[1, 0, 1], *others], params)[0].tokens)] += 1
    expected = joint(target, [1, 0, 1], SamplingParams(max_tokens=length, **shape), length)  # type: ignore[arg-type]
    likely = expected > 3 / runs  # Pearson's test wants a few expected counts a cell: the rare ones become one cell
    cells = np.append(counts.reshape(-1)[likely], counts.reshape(-1)[~likely].sum())
    assert chi_square(cells, np.append(expected[likely], expected[~likely].sum())) < 1


def test_unseeded_requests_differ_and_rejection_with_a_seed_repeats() -> None:
    engine = engine_of(ToyTarget(VOCAB, scale=0.5), "model", 3)
    free = SamplingParams(max_tokens=24, temperature=1)
    assert engine.generate([1], free).tokens != engine.generate([1], free).tokens
    fixed = SamplingParams(max_tokens=24, temperature=1, seed=3, verification="rejection")
    assert engine.generate([1], fixed).tokens == engine.generate([1], fixed).tokens


# endings


@pytest.mark.parametrize("k", [0, 1, 3, 8])
def test_eos_inside_an_accepted_run_ends_it_there(k: int) -> None:
    target = ToyTarget(VOCAB)
    sampling = SamplingParams(max_tokens=30)
    plain = plain_loop(target.logits, [1, 2], sampling)
    eos = plain[6]
    expected = plain[: plain.index(eos) + 1]
    target.eos_tokens = frozenset({eos, 11 if 11 not in plain[:6] else eos})
    result = engine_of(target, "always right", k).generate([1, 2], sampling)
    assert result.tokens == expected
    assert result.finish_reason == "stop"
    assert result.timings.num_output_tokens == result.stats.num_emitted_tokens == len(expected)
    ignoring = SamplingParams(max_tokens=30, ignore_eos=True)
    assert engine_of(target, "always right", k).generate([1, 2], ignoring).tokens == plain


@pytest.mark.parametrize("k", [0, 2, 8])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 10])
def test_max_tokens_inside_an_accepted_run(k: int, max_tokens: int) -> None:
    target = ToyTarget(VOCAB)
    result = engine_of(target, "always right", k).generate([1, 2], SamplingParams(max_tokens=max_tokens))
    assert result.tokens == plain_loop(target.logits, [1, 2], SamplingParams(max_tokens=max_tokens))
    assert result.finish_reason == "length"


@pytest.mark.parametrize("k", [0, 3, 8])
def test_context_limit_inside_an_accepted_run(k: int) -> None:
    target = ToyTarget(VOCAB, max_length=20)
    result = engine_of(target, "always right", k).generate([1, 2], SamplingParams(max_tokens=50))
    assert result.tokens == plain_loop(target.logits, [1, 2], SamplingParams(max_tokens=18))
    assert result.finish_reason == "length"


@pytest.mark.parametrize("k", [0, 1, 4, 8])
def test_stop_string_across_draft_boundaries(k: int) -> None:
    target = ToyTarget(VOCAB)
    letters = Letters()
    plain = plain_loop(target.logits, [1, 2], SamplingParams(max_tokens=40))
    text = letters.decode(plain)
    for start, width in itertools.product(range(12), (1, 2, 4)):
        stop = text[start : start + width]
        at = text.find(stop)
        sampling = SamplingParams(max_tokens=40, stop=(stop, "zz"))
        chunks = list(engine_of(target, "always right", k).stream("bc", sampling))
        assert "".join(chunk.text for chunk in chunks) == text[:at]
        assert [token for chunk in chunks for token in chunk.tokens] == plain[: at + width]
        assert chunks[-1].finish_reason == "stop"


def test_prompt_at_the_context_limit_is_refused_with_the_numbers() -> None:
    engine = engine_of(ToyTarget(VOCAB, max_length=6), "none", 0)
    assert engine.generate([1] * 5, SamplingParams(max_tokens=9)).finish_reason == "length"
    with pytest.raises(PromptError, match=r"6 tokens.*6 positions"):
        engine.generate([1] * 6)


# logprobs


@pytest.mark.parametrize("drafter", ["none", "model", "always right", "tree"])
def test_logprobs_are_the_plain_models(drafter: str) -> None:
    target = ToyTarget(VOCAB)
    sampling = SamplingParams(max_tokens=15, temperature=0.7, seed=1, logprobs=3, repetition_penalty=1.2)
    result = engine_of(target, drafter, 4).generate([1, 2], sampling)
    assert result.logprobs is not None
    assert [entry.token for entry in result.logprobs] == result.tokens
    for i, entry in enumerate(result.logprobs):
        logits = target.logits([1, 2, *result.tokens[:i]]).astype(np.float64)
        expected = logits - math.log(np.exp(logits).sum())
        assert entry.logprob == pytest.approx(expected[entry.token], abs=1e-5)
        order = np.argsort(-expected)[:3]
        assert [token for token, _ in entry.top] == order.tolist()
        assert [value for _, value in entry.top] == pytest.approx(expected[order].tolist(), abs=1e-5)


# several readers, aborts, failures


def test_streams_may_be_read_in_turns() -> None:
    target = ToyTarget(VOCAB)
    engine = engine_of(target, "ngram", 3)
    sampling = SamplingParams(max_tokens=12)
    first, second = engine.stream([1, 2], sampling), engine.stream([3], sampling)
    tokens: tuple[list[int], list[int]] = ([], [])
    for a, b in itertools.zip_longest(first, second):
        for taken, chunk in zip(tokens, (a, b), strict=True):
            taken.extend(chunk.tokens if chunk else [])
    assert tokens[0] == plain_loop(target.logits, [1, 2], sampling)
    assert tokens[1] == plain_loop(target.logits, [3], sampling)


def test_closing_a_stream_frees_its_rows() -> None:
    target, draft = ToyTarget(VOCAB), ToyTarget(VOCAB, salt=1)
    engine = LocalEngine(target, ModelDrafter(draft, vocab_size=VOCAB), num_speculative_tokens=3)
    stream = engine.stream([1, 2])
    next(stream), next(stream)
    assert target.held
    assert draft.held
    stream.close()
    assert target.held == draft.held == {}
    assert not engine.has_work


def test_abort_of_a_waiting_request_and_of_an_unknown_one() -> None:
    engine = engine_of(ToyTarget(VOCAB), "none", 0, max_batch=1)
    running, waiting = engine.add([1]), engine.add([2])
    engine.step()
    engine.abort(waiting)
    engine.abort("nobody")
    engine.abort(running)
    assert not engine.has_work
    assert engine.step() == []


def test_a_failing_step_leaves_the_engine_usable() -> None:
    target = ToyTarget(VOCAB)

    def fail(tokens: list[int], budget: int) -> list[int]:
        raise ValueError("a drafter's own bug")

    engine = LocalEngine(target, ScriptedDrafter(fail), num_speculative_tokens=2)
    with pytest.raises(ValueError, match="own bug"):
        engine.generate([[1], [2]])
    assert target.held == {}
    engine.drafter = None
    assert engine.generate([1], SamplingParams(max_tokens=5)).tokens == plain_loop(
        target.logits, [1], SamplingParams(max_tokens=5)
    )


def test_one_request_that_cannot_go_on_ends_alone() -> None:
    target = ToyTarget(VOCAB, eos=[7])
    engine = engine_of(target, "model", 3)
    impossible = SamplingParams(max_tokens=9, allowed_tokens=(7,), min_tokens=3)
    sampling = SamplingParams(max_tokens=12)
    good, bad = engine.stream([1, 2], sampling), engine.stream([3], impossible)
    tokens = [token for chunk in good for token in chunk.tokens]
    assert tokens == plain_loop(target.logits, [1, 2], sampling, eos=[7])
    assert next(bad).finish_reason == "abort"
    with pytest.raises(FlashSpecError, match="no token is left"):
        next(bad)
    with pytest.raises(FlashSpecError, match="no token is left"):
        engine.generate([3], impossible)
    assert target.held == {}
    assert not engine.has_work


def test_an_interrupted_commit_ends_one_request_and_repeats_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    target = ToyTarget(VOCAB)
    engine = engine_of(target, "ngram", 3)
    sampling = SamplingParams(max_tokens=12)
    streams = [engine.stream(prompt, sampling) for prompt in ([1], [2], [3])]
    commit = LocalEngine._commit
    calls = iter(range(1000))

    def interrupted(self: LocalEngine, *arguments: object) -> object:
        if next(calls) == 7:  # the third step's second sequence
            raise KeyboardInterrupt
        return commit(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(LocalEngine, "_commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(streams[1])
    for i in (0, 2):
        tokens = [token for chunk in streams[i] for token in chunk.tokens]
        assert tokens == plain_loop(target.logits, [i + 1], sampling)
    assert target.held == {}


def test_chunks_are_never_lost_silently() -> None:
    engine = engine_of(ToyTarget(VOCAB), "none", 0)
    first, second = engine.add([1], SamplingParams(max_tokens=3)), engine.add([2], SamplingParams(max_tokens=9))
    list(engine.chunks(first))
    for name in (first, second, "nobody"):
        with pytest.raises(OptionError, match=r"call chunks\(\) before the first step"):
            engine.chunks(name)
    engine.abort(second)


def test_a_stream_that_is_dropped_unread_is_aborted() -> None:
    engine = engine_of(ToyTarget(VOCAB), "none", 0)
    stream = engine.stream([1])
    assert engine.has_work
    del stream
    assert not engine.has_work


@pytest.mark.parametrize("parents", [[0], [-2], [-1, 1], [-1]])
def test_a_draft_that_is_no_tree_is_an_error(parents: list[int]) -> None:
    engine = LocalEngine(ToyTarget(VOCAB), ScriptedDrafter(lambda tokens, budget: Draft([1, 2], parents)))
    with pytest.raises(OptionError, match="parents"):
        engine.generate([1])


def test_a_draft_model_in_trouble_costs_speed_only() -> None:
    target, draft = ToyTarget(VOCAB), ToyTarget(VOCAB, salt=1)
    draft.logits = lambda context: np.full(VOCAB, np.nan, np.float32)  # type: ignore[method-assign]
    engine = LocalEngine(target, ModelDrafter(draft, vocab_size=VOCAB), num_speculative_tokens=3)
    sampling = SamplingParams(max_tokens=9)
    assert engine.generate([1, 2], sampling).tokens == plain_loop(target.logits, [1, 2], sampling)


def test_what_lies_behind_an_end_does_not_count_as_rejected() -> None:
    target = ToyTarget(VOCAB)
    plain = plain_loop(target.logits, [1, 2], SamplingParams(max_tokens=30))
    eos = plain[6]
    target.eos_tokens = frozenset({eos})
    result = engine_of(target, "always right", 8).generate([1, 2], SamplingParams(max_tokens=30))
    assert result.stats.num_draft_tokens == result.stats.num_accepted_tokens == plain.index(eos)


def test_sampled_draft_outside_the_vocabulary_is_an_error_not_a_bias() -> None:
    bad = Draft.chain([VOCAB], probs=torch.full((1, VOCAB + 1), 1 / (VOCAB + 1)), drafter="mine")
    engine = LocalEngine(ToyTarget(VOCAB), ScriptedDrafter(lambda tokens, budget: bad), num_speculative_tokens=2)
    with pytest.raises(OptionError, match="'mine'"):
        engine.generate([1])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "empty"), ([], "not"), ([[]], "empty"), ([VOCAB], "vocabulary of 12"), ([-1], "outside"), (3.5, "not"),
     ([1, "a"], "not"), (None, "not"), ([{"role": "user", "content": "a"}], "chat template")],
)  # fmt: skip
def test_bad_prompts(prompt: object, message: str) -> None:
    engine = engine_of(ToyTarget(VOCAB), "none", 0)
    with pytest.raises(PromptError, match=message):
        engine.generate(prompt)  # type: ignore[call-overload]
    assert not engine.has_work


def test_bad_options() -> None:
    target = ToyTarget(VOCAB)
    engine = engine_of(target, "none", 0)
    for params in (SamplingParams(bad_tokens=(VOCAB,)), SamplingParams(logit_bias={99: 1.0})):
        with pytest.raises(OptionError, match="vocabulary has 12"):
            engine.generate([1], params)
    with pytest.raises(OptionError, match="2 sampling parameters for 1"):
        engine.generate([[1]], [SamplingParams(), SamplingParams()])
    with pytest.raises(OptionError, match="max_batch"):
        engine_of(target, "none", 0, max_batch=0)
    with pytest.raises(OptionError, match="num_speculative_tokens is -1"):
        engine_of(target, "ngram", -1)
    with pytest.raises(FlashSpecError, match="tokenizer"):
        LocalEngine(target).generate("abc")


def test_timings_and_stats_add_up() -> None:
    engine = engine_of(ToyTarget(VOCAB), "model", 4)
    results: list[Result] = engine.generate(PROMPTS, SamplingParams(max_tokens=20))
    total = engine.stats()
    assert total.num_accepted_tokens == sum(result.stats.num_accepted_tokens for result in results)
    assert total.num_emitted_tokens == sum(len(result.tokens) for result in results) == 80
    assert sum(total.num_accepted_tokens_per_pos) == total.num_accepted_tokens
    for result in results:
        timings = result.timings
        assert 0 < timings.ttft <= timings.total
        assert timings.tpot == pytest.approx((timings.last_token - timings.first_token) / 19)
        assert timings.draft + timings.verify + timings.sample <= timings.total + 1e-3
