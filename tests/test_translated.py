"""A draft model of another tokenizer: the plain loop's tokens and the target's distribution, well translated or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ToyTarget, chi_square, plain_loop, sequence
from test_engine import PARAMS, PROMPTS, joint
from test_vocabulary import MODELS, byte_level, letters, sentence_piece
from transformers import AutoModelForCausalLM, AutoTokenizer

from flashspec.backends.hf import HFTarget
from flashspec.core import Draft, Prompt, SamplingParams, Sequence, Target
from flashspec.drafters.translated import TranslatedDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import OptionError
from flashspec.text import encode
from flashspec.vocabulary import Translation

SERVED = "abcdefghijkl"
METHODS = ("tokens", "text")
DRAFT = ("xlkjihgfedc", "cd", "de", "ijk", "jk")  # no a and b, an x, and words of several letters

Spoil = Callable[[Translation], Translation]


class Reader(ToyTarget):
    """Remembers what it was fed: for each sequence all tokens of each call."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.fed: list[list[int]] = []

    def _score(self, seq: Sequence, draft: Draft, hidden: bool) -> Any:
        self.fed.append(list(seq.tokens))
        return super()._score(seq, draft, hidden)


class Same(ToyTarget):
    """The served toy under other ids: draft id i is served id ``order[i]``."""

    def __init__(self, served: ToyTarget, order: Seq[int], **options: Any) -> None:
        super().__init__(served.vocab_size, **options)
        self.served, self.order = served, list(order)

    def logits(self, context: Seq[int]) -> np.ndarray:
        return self.served.logits([self.order[token] for token in context])[self.order]


def drafter_of(draft: Target, tokenizer: Any = None, *, served: Any = None, **options: Any) -> TranslatedDrafter:
    served = served or letters(SERVED)
    options = {"vocab_size": len(served), **options}
    return TranslatedDrafter(draft, tokenizer=tokenizer or letters(*DRAFT), served_tokenizer=served, **options)


def shuffled(right: Translation) -> Translation:
    return replace(right, target_ids=right.target_ids.roll(3))


def two_to_one(right: Translation) -> Translation:
    return replace(right, draft_ids=right.draft_ids.clone().fill_(2))


def one_from_two(right: Translation) -> Translation:
    return replace(right, target_ids=right.target_ids // 2 * 2)


def nothing(right: Translation) -> Translation:
    return replace(right, target_ids=right.target_ids[:0], draft_ids=right.draft_ids[:0])


MAPS: dict[str, Spoil] = {
    "right": lambda right: right, "shuffled": shuffled, "two to one": two_to_one, "one from two": one_from_two,
    "nothing": nothing,
}  # fmt: skip


# exactness


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spoil", MAPS)
def test_tokens_are_the_plain_loops(spoil: str, method: Any, params: str) -> None:
    target = ToyTarget(12, eos=[7])
    expected = [plain_loop(target.logits, prompt, PARAMS[params], eos=[7]) for prompt in PROMPTS]
    for k, max_length in ((1, 512), (4, 512), (9, 14)):
        draft = ToyTarget(18, salt=2, eos=[4], max_length=max_length)
        drafter = drafter_of(draft, eos_tokens=frozenset({7}), method=method)
        drafter.translation = MAPS[spoil](drafter.translation)
        engine = LocalEngine(target, drafter, num_speculative_tokens=k, tokenizer=letters(SERVED))
        assert [engine.generate(prompt, PARAMS[params]).tokens for prompt in PROMPTS] == expected
        assert [result.tokens for result in engine.generate(PROMPTS, PARAMS[params])] == expected
        assert draft.held == target.held == {}
        if spoil != "nothing" and params != "seeded filters":
            assert engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("served", "draft"), [("bytes", "pieces"), ("pieces", "bytes")])
@pytest.mark.parametrize("seed", [None, 3])
def test_any_bytes_may_come(method: Any, served: str, draft: str, seed: int | None) -> None:
    """A random target writes parts of characters, broken ones and control tokens."""
    kinds = {"bytes": byte_level(), "pieces": sentence_piece()}
    target = ToyTarget(len(kinds[served]), salt=5, scale=1.0)
    reader = Reader(len(kinds[draft]), salt=6, eos=[2])
    drafter = drafter_of(reader, kinds[draft], served=kinds[served], method=method)
    engine = LocalEngine(target, drafter, tokenizer=kinds[served], num_speculative_tokens=4)
    sampling = SamplingParams(max_tokens=120, temperature=0 if seed is None else 1.2, seed=seed)
    for prompt in ("The keeper ", "天空", [0, 1, 300]):
        ids = encode(kinds[served], prompt, vocab_size=target.vocab_size)
        assert engine.generate(prompt, sampling).tokens == plain_loop(target.logits, ids, sampling)
    assert engine.stats().num_draft_tokens > 100


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("spoil", "verification"), [*((spoil, "rejection") for spoil in MAPS), ("right", "block")])
def test_sampled_output_has_the_targets_distribution(spoil: str, method: Any, verification: Any) -> None:
    length, runs = 4, 800
    target, draft = ToyTarget(4, scale=1.0, salt=1), ToyTarget(5, scale=1.0, salt=2)
    drafter = drafter_of(draft, letters("xcba", "ab"), served=letters("abcd"), method=method)
    drafter.translation = MAPS[spoil](drafter.translation)
    engine = LocalEngine(target, drafter, num_speculative_tokens=3)
    shape: dict[str, Any] = {"temperature": 1.2, "top_p": 0.95, "repetition_penalty": 1.2, "frequency_penalty": 0.3}
    counts = np.zeros([4] * length)
    for seed in range(runs):
        params = SamplingParams(max_tokens=length, seed=seed, verification=verification, **shape)
        counts[tuple(engine.generate([1, 0, 1], params).tokens)] += 1
    expected = joint(target, [1, 0, 1], SamplingParams(max_tokens=length, **shape), length)
    likely = expected > 3 / runs
    cells = np.append(counts.reshape(-1)[likely], counts.reshape(-1)[~likely].sum())
    assert chi_square(cells, np.append(expected[likely], expected[~likely].sum())) < 1


# acceptance


SAMPLED = {
    "rejection": SamplingParams(max_tokens=24, temperature=1.1, top_p=0.9, seed=1, verification="rejection"),
    "block": SamplingParams(max_tokens=24, temperature=1.0, repetition_penalty=1.2, seed=1, verification="block"),
}


@pytest.mark.parametrize("params", [*PARAMS, *SAMPLED])
def test_the_same_function_under_other_ids_is_always_right(params: str) -> None:
    """Penalties, filters, noise and q are the target's own, in its ids."""
    order = [3, 8, 0, 11, 5, 1, 9, 2, 7, 10, 4, 6]
    target = ToyTarget(12)
    drafter = drafter_of(Same(target, order), letters("".join(SERVED[i] for i in order)))
    engine = LocalEngine(target, drafter, num_speculative_tokens=4)
    for prompt in PROMPTS:
        engine.generate(prompt, (PARAMS | SAMPLED)[params])
    assert engine.stats().num_draft_tokens > 30
    assert engine.stats().acceptance_rate > 0.999
    assert drafter.method == "tokens"


def test_greedy_text_of_the_same_function_is_always_right() -> None:
    order = list(range(11, -1, -1))
    target = ToyTarget(12)
    drafter = drafter_of(Same(target, order), letters(SERVED[::-1]), method="text")
    engine = LocalEngine(target, drafter, num_speculative_tokens=4)
    result = engine.generate([1, 2], SamplingParams(max_tokens=21))
    assert (result.stats.acceptance_rate, result.stats.num_steps) == (1.0, 5)


@pytest.mark.parametrize(("params", "is_written"), [
    ({}, True), ({"temperature": 1.0}, False), ({"repetition_penalty": 1.2}, False), ({"logit_bias": {1: 2.0}}, False),
])  # fmt: skip
def test_greedy_requests_without_penalties_are_drafted_as_text(params: dict[str, Any], is_written: bool) -> None:
    """Text is deterministic and knows no penalties; tokens are drawn from q, with the request's own parameters."""
    drafter = drafter_of(ToyTarget(15))
    engine = LocalEngine(ToyTarget(12), drafter, num_speculative_tokens=3)
    seen: list[bool] = []
    write = drafter._write
    drafter._write = lambda shadow, logits: seen.append(True) or write(shadow, logits)  # type: ignore[method-assign, func-returns-value]
    engine.generate([1, 2], SamplingParams(max_tokens=8, **params))
    assert bool(seen) == is_written


@pytest.mark.parametrize("method", METHODS)
def test_an_end_of_sequence_is_drafted_as_the_targets(method: Any) -> None:
    served, own = letters(SERVED, end="<end>"), letters(SERVED[::-1], end="</s>")
    order = [*range(11, -1, -1), 12]
    ended = 0
    for salt in range(12):
        target = ToyTarget(13, salt=salt, eos=[12])
        draft = Same(target, order, eos=[12])
        drafter = drafter_of(draft, own, served=served, eos_tokens=target.eos_tokens, method=method)
        engine = LocalEngine(target, drafter, num_speculative_tokens=4)
        result = engine.generate([1, 2], SamplingParams(max_tokens=30))
        assert result.tokens == plain_loop(target.logits, [1, 2], SamplingParams(max_tokens=30), eos=[12])
        assert result.stats.acceptance_rate == 1
        ended += result.kinds[-1] == "accepted" and result.finish_reason == "stop"
        going = SamplingParams(max_tokens=30, ignore_eos=True)
        assert engine.generate([1, 2], going).tokens == plain_loop(target.logits, [1, 2], going)
    assert ended >= 3


def test_noise_and_penalties_go_by_served_positions() -> None:
    """A control token in the prompt is none of the draft model's."""
    target = ToyTarget(13)
    draft = Same(target, [*range(11, -1, -1), 12])
    engine = LocalEngine(target, drafter_of(draft, letters(SERVED[::-1]), served=letters(SERVED, end="<end>")))
    params = SamplingParams(max_tokens=24, temperature=1, seed=1, frequency_penalty=0.3, bad_tokens=(12,))
    assert engine.generate([12, 1, 2], params).stats.acceptance_rate == 1


def test_only_common_tokens_are_drafted_and_q_is_over_them() -> None:
    drafter = drafter_of(ToyTarget(15, salt=1))
    params = SamplingParams(temperature=1.0, seed=1, verification="rejection")
    draft = drafter.propose([sequence([6, 5], params)], [5])[0]
    assert draft.probs is not None
    assert draft.probs.shape == (5, 12)
    assert torch.allclose(draft.probs.sum(-1), torch.ones(5))
    assert draft.probs[:, :2].sum() == 0  # a and b
    assert draft.probs[:, 2:].min() > 0
    own = torch.from_numpy(drafter.target.logits([6, 7]))  # type: ignore[attr-defined]
    common = torch.tensor([drafter.translation.own[token] for token in range(2, 12)])
    assert torch.allclose(draft.probs[0, 2:], own[common].softmax(-1))
    assert drafter.propose([sequence([3, 4], params, name="t")], [0])[0].tokens == []


# what the draft model reads


def read(prompt: Prompt, *, template: str | None = None, tokens: int = 12, method: Any = "tokens") -> Reader:
    """What a SentencePiece draft model of a byte-level target was fed."""
    served, own = byte_level.__wrapped__(), sentence_piece.__wrapped__()
    served.chat_template = "{% for m in messages %}<|turn|>{{ m.content }}{% endfor %}"
    own.chat_template = template
    before = own.backend_tokenizer.to_str()
    target, reader = ToyTarget(len(served), salt=3), Reader(len(own))
    engine = LocalEngine(target, drafter_of(reader, own, served=served, method=method), tokenizer=served)
    # with whole words to write, what was read before stays as it is
    words = [token for token, piece in enumerate(engine.drafter.translation.served.pieces)  # type: ignore[union-attr]
             if piece and piece.startswith(b" ") and piece.isascii()]  # fmt: skip
    params = SamplingParams(max_tokens=tokens, allowed_tokens=tuple(words))
    result = engine.generate(prompt, params)  # type: ignore[call-overload]
    assert result.tokens == plain_loop(target.logits, encode(served, prompt, vocab_size=len(served)), params)
    assert own.backend_tokenizer.to_str() == before
    assert own.decode(reader.fed[-1]).count("<s>") == 1
    return reader


CHAT: list[dict[str, str]] = [
    {"role": "system", "content": "the keeper"}, {"role": "user", "content": "wrote\nthe weather"},
]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_prompts_are_read_in_the_drafts_own_way(method: Any) -> None:
    own = sentence_piece()
    text = "The keeper wrote down 天空"
    expected = own.encode(text)
    assert expected[0] == 1
    reader = read(text, method=method)
    assert reader.fed[0][: len(expected)] == expected
    assert all(fed[: len(expected)] == expected and fed.count(1) == 1 for fed in reader.fed)
    assert reader.num_scored_tokens < len(reader.fed[-1]) + 3 * len(reader.fed)  # what it has read it keeps
    ids = [1, *byte_level().encode(text), 0]  # control tokens before and behind
    assert read(ids, method=method).fed[0][: len(expected)] == expected
    template = "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}>"
    rendered = own.encode("<s>[system]the keeper</s>[user]wrote\nthe weather</s>>", add_special_tokens=False)
    assert (rendered.count(1), rendered.count(2)) == (1, 2)
    assert read(CHAT, template=template, method=method).fed[0][: len(rendered)] == rendered
    plain = own.encode("the keeper\nwrote\nthe weather\n")
    assert read(CHAT, method=method).fed[0][: len(plain)] == plain
    refusing = "{{ raise_exception('no system') }}"
    assert read(CHAT, template=refusing, method=method).fed[0][: len(plain)] == plain


def test_a_sequence_without_a_prompt_as_given_is_read_from_its_tokens() -> None:
    own, served = byte_level(), sentence_piece()
    reader = Reader(len(own))
    drafter = drafter_of(reader, own, served=served)
    tokens = served.encode("The keeper wrote")  # with <s>, and a space that is not the text's
    drafter.propose([sequence(tokens)], [1])
    assert reader.fed[0] == own.encode("The keeper wrote")
    # only control tokens: nothing to read
    assert drafter.propose([sequence([1], name="t")], [3])[0].tokens == []


def test_an_incomplete_character_is_read_as_its_bytes() -> None:
    served, own = byte_level(), sentence_piece()
    reader = Reader(len(own))
    drafter = drafter_of(reader, own, served=served)
    tokens = served.encode("🎈")  # which it never saw
    assert len(tokens) > 1
    drafter.propose([sequence(served.encode("the") + tokens[:-1])], [1])
    assert own.convert_ids_to_tokens(reader.fed[0][-3:]) == ["<0xF0>", "<0x9F>", "<0x8E>"]


@pytest.mark.parametrize("method", METHODS)
def test_backlog_and_forgetting(method: Any) -> None:
    drafter = drafter_of(ToyTarget(15), method=method)
    seq = sequence([3, 4, 5])
    assert drafter.backlog(seq) == 3
    drafter.propose([seq], [2])
    assert drafter.backlog(seq) == 0
    seq.tokens += [6, 7]
    assert drafter.backlog(seq) == 2
    drafter.forget(seq)
    assert drafter.backlog(seq) == 5
    assert drafter.target.held == drafter._shadows == {}  # type: ignore[attr-defined]


# text


def test_written_text_is_read_in_served_tokens() -> None:
    """The draft model writes bcde in three tokens; the served model has other breaks, and its own last token."""

    def scripted(*words: str) -> TranslatedDrafter:
        own = letters("abcdex", "de")
        draft = ToyTarget(len(own), eos=[5])
        script = own.convert_tokens_to_ids(list(words))
        draft.logits = lambda context: np.eye(7, dtype=np.float32)[script[len(context) - 1]] * 5  # type: ignore[method-assign]
        served = letters("abcde", "bc", "cd", end="<end>")
        return drafter_of(draft, own, served=served, method="text", eos_tokens=frozenset({7}))

    words = ["b", "c", "de", "x", "a"]
    assert scripted(*words).propose([sequence([0])], [3])[0].tokens == [5, 3, 4]  # bc d e
    assert scripted(*words).propose([sequence([0])], [2])[0].tokens == [5, 3]
    assert scripted("x").propose([sequence([0])], [4])[0].tokens == [7]  # its end is x
    assert scripted(*words).propose([sequence([0])], [4])[0].tokens == [5, 3, 4, 7]


class Three:
    """Worth it up to three guesses; remembers what it was told."""

    def __init__(self) -> None:
        self.told: list[list[float | None]] = []

    def worth(self, seq: Sequence, confidences: Seq[float | None]) -> bool:
        self.told.append(list(confidences))
        return len(confidences) <= 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("params", ["greedy", "seeded"])
def test_a_rule_is_asked_and_told_how_sure_the_draft_model_is(method: Any, params: str) -> None:
    drafter = drafter_of(ToyTarget(12, salt=1), letters(SERVED[::-1]), method=method)
    drafter.rule = rule = Three()
    draft = drafter.propose([sequence([3, 4], PARAMS[params])], [9])[0]
    assert len(draft) == 3
    assert draft.confidences is not None
    own = [torch.from_numpy(drafter.target.logits([11 - token for token in [3, 4, *draft.tokens[:i]]]))  # type: ignore[attr-defined]
           for i in range(3)]  # fmt: skip
    assert draft.confidences == pytest.approx([float(row.softmax(-1).max()) for row in own])
    assert rule.told == [[*draft.confidences[:i], None] for i in (1, 2, 3)]


def test_the_sureness_of_a_drafted_word_counts_once() -> None:
    own = letters("xcba", "ab")
    draft = ToyTarget(5)
    rows = np.array([[0, 0, 0, 0, 2], [0, 3, 0, 0, 0]], np.float32)
    draft.logits = lambda context: rows[(len(context) - 1) % 2]  # type: ignore[method-assign]
    drafter = drafter_of(draft, own, served=letters("abc", "bc"), method="text")
    drafter.rule = Three()
    found = drafter.propose([sequence([2])], [9])[0]
    sure = [float(torch.from_numpy(row).softmax(-1).max()) for row in rows]
    assert found.tokens[:2] == [0, 3]  # ab c: a bc
    assert found.confidences is not None
    assert found.confidences[:2] == pytest.approx(sure)
    again = drafter.propose([sequence([2, 0, 3])], [9])[0]
    assert again.confidences is not None
    assert again.confidences[:2] == pytest.approx(sure)


def test_what_is_written_for_a_token_is_bounded() -> None:
    def always(letter: int, **options: Any) -> Reader:
        reader = Reader(3, **options)
        reader.logits = lambda context: np.eye(3, dtype=np.float32)[letter]  # type: ignore[method-assign]
        return reader

    served = letters("ab", "aa", "aaaa")
    reader = always(0, max_length=6)  # no room for all the letters of five long tokens
    draft = drafter_of(reader, letters("abx"), served=served, method="text").propose([sequence([1])], [5])[0]
    assert draft.tokens == [3, 0]
    assert len(reader.fed[-1]) == 5
    seq = sequence([3, 3])  # eight letters
    assert drafter_of(always(0, max_length=6), letters("abx"), served=served).propose([seq], [3])[0].tokens == []
    reader = always(2)  # what has no served token at all
    draft = drafter_of(reader, letters("abx"), served=served, method="text").propose([sequence([1])], [2])[0]
    assert draft.tokens == []
    assert len(reader.fed) == 16


# choices and mistakes


def test_the_method_follows_from_what_is_common() -> None:
    assert drafter_of(ToyTarget(15)).method == "tokens"
    assert drafter_of(ToyTarget(4), letters("abxy")).method == "text"
    assert drafter_of(ToyTarget(4), letters("abxy"), method="tokens").method == "tokens"
    with pytest.raises(OptionError, match="method is 'words'; it must be auto, tokens or text"):
        drafter_of(ToyTarget(4), method="words")


def test_trouble_of_the_draft_model_costs_speed_only() -> None:
    target = ToyTarget(12)
    for method in METHODS:
        draft = ToyTarget(15)
        draft.logits = lambda context: np.full(15, np.nan, np.float32)  # type: ignore[method-assign]
        engine = LocalEngine(target, drafter_of(draft, letters(SERVED), method=method), num_speculative_tokens=3)
        sampling = SamplingParams(max_tokens=9)
        assert engine.generate([1, 2], sampling).tokens == plain_loop(target.logits, [1, 2], sampling)
        assert engine.stats().num_drafts == 0


# real models


QUESTIONS = [
    [{"role": "user", "content": "Write a short sentence about the sea."}],
    [{"role": "user", "content": "用中文解释为什么天空是蓝色的。"}],
]
SHORT = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def pair(smollm2_path: Path) -> tuple[HFTarget, Any, HFTarget, Any]:
    """Qwen and its tokenizer, SmolLM2 and its tokenizer."""
    path = MODELS / "qwen-coder-0.5b"
    if not (path / "model.safetensors").exists():
        pytest.skip(f"{path} is not here")
    made: list[Any] = []
    for folder in (path, smollm2_path):
        made.append(HFTarget(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()))
        made.append(AutoTokenizer.from_pretrained(folder))
    return made[0], made[1], made[2], made[3]


def test_smollm2_drafts_for_qwen(pair: tuple[HFTarget, Any, HFTarget, Any]) -> None:
    target, tokenizer, draft, own = pair
    plain = LocalEngine(target, tokenizer=tokenizer)
    expected = [plain.generate(prompt, SHORT).tokens for prompt in QUESTIONS]
    for method in METHODS:
        drafter = drafter_of(draft, own, served=tokenizer, vocab_size=target.vocab_size,
                             eos_tokens=target.eos_tokens, method=method)  # fmt: skip
        assert drafter.translation.end in target.eos_tokens
        assert 39_000 < drafter.translation.num_texts < 40_000
        engine = LocalEngine(target, drafter, tokenizer=tokenizer, num_speculative_tokens=4)
        found = [engine.generate(prompt, SHORT) for prompt in QUESTIONS]
        assert [result.tokens for result in found] == expected
        assert found[0].stats.acceptance_rate > 0.2
