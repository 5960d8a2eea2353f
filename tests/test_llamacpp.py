"""llama.cpp as a Target: its own numbers whatever is drafted, rolled back without a trace, in both roles.

One forward of up to 63 tokens gives the same bits as token by token; from 64 on llama.cpp computes otherwise, so
texts are kept short where bits are compared.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ScriptedDrafter, sequence
from hypothesis import given, settings, strategies as st

import flashspec
from flashspec import pretrained, weights
from flashspec.backends import llamacpp
from flashspec.backends.hf import HFTarget
from flashspec.core import EMPTY, Draft, Drafter, SamplingParams, Sequence
from flashspec.drafters.model import ModelDrafter
from flashspec.drafters.ngram import NGramDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import MemoryLimitError, ModelError, OptionError, PromptError, UnsupportedModelError
from flashspec.tree import paths
from flashspec.weights import default_model

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

TREE = Draft([1005, 2006, 3007, 4008, 5009, 6010], [-1, -1, 0, 0, 1, 3])
NOISE = 0.15  # mean, in standard deviations; a wrong token in the context moves logits by more than 0.4
CHAIN = Draft.chain([1511, 2512, 3513, 4514])
PROMPTS = ["Repeat: red green blue red green blue red", "天空为什么是蓝色的？", "def add(a, b):\n    return"]


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return default_model()
    except ModelError as error:
        pytest.skip(f"SmolLM2 is not installed ({error})")


@pytest.fixture
def target(file: Path, monkeypatch: pytest.MonkeyPatch) -> llamacpp.LlamaTarget:
    """One that soon has to move to a larger context."""
    monkeypatch.setattr(llamacpp, "FIRST_CELLS", 64)
    monkeypatch.setattr(llamacpp, "FIRST_IDS", 2)
    return llamacpp.LlamaTarget(file)


@pytest.fixture(scope="module")
def shared(file: Path) -> llamacpp.LlamaTarget:
    return llamacpp.LlamaTarget(file)


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Any:
    return pretrained.load_model(file, backend="llamacpp").tokenizer


def some(count: int, seed: int = 0) -> list[int]:
    return [random.Random(seed + i).randrange(1000, 9000) for i in range(count)]


def check(target: llamacpp.LlamaTarget, seqs: Seq[Sequence], drafts: Seq[Draft], *, within: float = 0.0) -> None:
    """Every row's logits are those of a decode of its context alone, to the bit.

    Args:
        within: standard deviations, where a kept tree has left its cells out of order: sums then round otherwise.
    """
    fresh = [
        (score.logits[row], seq.tokens + [draft.tokens[node] for node in path])
        for seq, draft, score in zip(seqs, drafts, target.score(seqs, drafts), strict=True)
        for row, path in enumerate([[], *paths(draft.parents)])
    ]
    for seq in seqs:
        target.keep(seq, [])
    for logits, context in fresh:
        expected = target.plain_logits(context)
        assert float((logits - expected).abs().mean() / expected.std()) <= within


def test_ragged_rows_trees_and_chains(target: llamacpp.LlamaTarget) -> None:
    seqs = [sequence(some(20), name="a"), sequence(some(3, 50), name="b"), sequence(some(9, 90), name="c")]
    check(target, seqs, [CHAIN, TREE, EMPTY])
    for seq in seqs:
        seq.tokens.append(123)
    check(target, seqs, [TREE, EMPTY, TREE])
    check(target, seqs[1:], [CHAIN, CHAIN])


@pytest.mark.parametrize(("draft", "accepted"), [(CHAIN, [0, 1]), (TREE, [0, 3, 5]), (TREE, [1, 4]), (TREE, [])])
def test_what_is_kept_is_the_accepted_path(target: llamacpp.LlamaTarget, draft: Draft, accepted: list[int]) -> None:
    seq, other = sequence(some(20), name="a"), sequence(some(6, 50), name="b")
    target.score([seq, other], [draft, TREE])
    target.keep(seq, accepted)
    target.keep(other, [1])
    seq.tokens += [draft.tokens[node] for node in accepted]
    other.tokens.append(TREE.tokens[1])
    assert target.cached_length(seq) == len(seq)
    for each in (seq, other):
        each.tokens.append(77)
    check(target, [seq, other], [TREE, CHAIN], within=NOISE)


def test_rewinding_and_going_on_elsewhere(target: llamacpp.LlamaTarget) -> None:
    seq = sequence(some(30))
    target.score([seq], [TREE])
    target.rewind(seq, 10)
    assert target.cached_length(seq) == 10
    seq.tokens[10:] = some(12, 400)
    check(target, [seq], [TREE])
    target.rewind(seq, 500)
    assert target.cached_length(seq) == len(seq)
    target.rewind(sequence([1], name="unknown"), 0)


def test_moving_to_a_larger_context_keeps_what_was_read(target: llamacpp.LlamaTarget) -> None:
    seqs = [sequence(some(30, 100 * i), name=str(i)) for i in range(4)]
    for seq in seqs:
        target.score([seq], [CHAIN])
        target.keep(seq, [0])
        seq.tokens += [CHAIN.tokens[0], 99]
    assert target._num_cells >= 128
    assert target._num_ids >= 4
    assert [target.cached_length(seq) for seq in seqs] == [31] * 4
    check(target, seqs[:1], [TREE])


def test_a_tree_lost_in_a_move_is_caught_up_with(target: llamacpp.LlamaTarget) -> None:
    seq, other = sequence(some(20), name="a"), sequence(some(60, 70), name="b")
    target.score([seq], [TREE])
    target.score([other], [EMPTY])  # moves, between a's score and its keep
    target.keep(seq, [0, 3])
    target.keep(other, [])
    seq.tokens += [TREE.tokens[0], TREE.tokens[3], 77]
    assert target.cached_length(seq) == 20
    check(target, [seq], [TREE])


def test_a_forgotten_sequence_leaves_nothing(target: llamacpp.LlamaTarget) -> None:
    seq = sequence(some(20))
    target.score([seq], [TREE])
    target.forget(seq)
    target.forget(seq)
    lib = target._lib
    assert all(lib.llama_memory_seq_pos_max(target._memory, id) == -1 for id in range(target._num_ids))
    assert target.cached_length(seq) == 0
    for i in range(100):  # ids and cells are used again
        each = sequence(some(20, i), name=f"{i}")
        target.score([each], [CHAIN])
        target.forget(each)
    assert target._num_cells <= 128


def test_sequences_of_one_name_are_kept_apart(shared: llamacpp.LlamaTarget) -> None:
    one, two = sequence(some(8), name="x"), sequence(some(8, 300), name="x")
    scores = shared.score([one, two], [EMPTY, EMPTY])
    assert not torch.equal(scores[0].logits, scores[1].logits)
    check(shared, [one, two], [TREE, CHAIN])
    for seq in (one, two):
        shared.forget(seq)


def test_scoring_the_same_context_again(shared: llamacpp.LlamaTarget) -> None:
    seq = sequence(some(12))
    first = shared.score([seq], [CHAIN])[0].logits
    again = shared.score([seq], [CHAIN])[0].logits
    assert torch.equal(first, again)
    shared.forget(seq)


# the engine on it


def drafters(target: llamacpp.LlamaTarget, file: Path) -> dict[str, Drafter]:
    rng = random.Random(0)
    return {
        "ngram": NGramDrafter(min_n=1),
        "model": ModelDrafter(llamacpp.LlamaTarget(file), vocab_size=target.vocab_size),
        "wrong": ScriptedDrafter(lambda tokens, budget: [rng.randrange(9000) for _ in range(budget)]),
        "tree": ScriptedDrafter(lambda tokens, budget: Draft(tokens[-3:], [-1, -1, 0]) if budget > 2 else []),
    }


@pytest.mark.parametrize("name", ["ngram", "model", "wrong", "tree"])
@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=24, temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=11),
], ids=["greedy", "seeded"])  # fmt: skip
def test_the_text_does_not_depend_on_the_drafter(
    shared: llamacpp.LlamaTarget, tokenizer: Any, file: Path, name: str, params: SamplingParams
) -> None:
    drafter = drafters(shared, file)[name]
    plain = LocalEngine(shared, None, tokenizer=tokenizer)
    spec = LocalEngine(shared, drafter, tokenizer=tokenizer, num_speculative_tokens=4)
    for prompt in PROMPTS:
        expected = plain.generate(prompt, params)
        found = spec.generate(prompt, params)
        if name == "tree" and found.tokens != expected.tokens:
            assert is_tie(shared, tokenizer.encode(prompt), found.tokens, expected.tokens)
            continue
        assert found.tokens == expected.tokens
        assert found.text == expected.text
    assert spec.stats().num_drafts > 0
    if name == "model":  # itself: everything is accepted
        assert spec.stats().acceptance_rate > 0.95


def is_tie(target: llamacpp.LlamaTarget, prompt: list[int], mine: list[int], other: list[int]) -> bool:
    """Kept trees leave cells out of order, which rounds sums otherwise: only a tie may be decided by that."""
    at = next(i for i, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b)
    logits = target.plain_logits(prompt + other[:at])
    return float((logits[other[at]] - logits[mine[at]]).abs() / logits.std()) < 0.2


def test_a_ragged_batch_that_comes_and_goes(shared: llamacpp.LlamaTarget, tokenizer: Any) -> None:
    lengths = [5, 12, 9]
    sampling = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    plain = LocalEngine(shared, None, tokenizer=tokenizer)
    expected = [plain.generate(prompt, each).tokens for prompt, each in zip(PROMPTS, sampling, strict=True)]
    spec = LocalEngine(shared, NGramDrafter(min_n=1), tokenizer=tokenizer, num_speculative_tokens=3, max_batch=2)
    assert [result.tokens for result in spec.generate(PROMPTS, sampling)] == expected
    assert not shared._rows


@pytest.fixture(scope="module")
def torch_target(smollm2_path: Path) -> HFTarget:
    return pretrained.load_model(smollm2_path).target  # type: ignore[no-any-return]


def test_torch_says_the_same_where_the_margin_is_clear(
    shared: llamacpp.LlamaTarget, torch_target: HFTarget, tokenizer: Any
) -> None:
    """The same weights: 8-bit activations move logits, and turn no clear decision."""
    text = "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is Rome. 一二三四五"
    tokens = tokenizer.encode(text)
    seq = sequence(tokens[:1])
    rows = [each.score([seq], [Draft.chain(tokens[1:])])[0].logits for each in (shared, torch_target)]
    for each in (shared, torch_target):
        each.forget(seq)
    mine, theirs = rows
    spread = float((mine - theirs).abs().max() / theirs.std())
    assert spread < 1.5
    top = theirs.topk(2).values
    clear = (top[:, 0] - top[:, 1]) / theirs.std(-1) > 0.5
    assert int(clear.sum()) > 6
    assert torch.equal(mine.argmax(-1)[clear], theirs.argmax(-1)[clear])


def test_it_drafts_for_torch_and_torch_for_it(
    shared: llamacpp.LlamaTarget, torch_target: HFTarget, tokenizer: Any
) -> None:
    params = SamplingParams(max_tokens=16)
    for served, draft in ((torch_target, shared), (shared, torch_target)):
        plain = LocalEngine(served, None, tokenizer=tokenizer)
        drafter = ModelDrafter(draft, vocab_size=served.vocab_size)
        spec = LocalEngine(served, drafter, tokenizer=tokenizer, num_speculative_tokens=3)
        assert spec.generate(PROMPTS[0], params).tokens == plain.generate(PROMPTS[0], params).tokens
        assert spec.stats().acceptance_rate > 0.6


# loading


def test_the_tokenizer_is_llama_cpps_own(shared: llamacpp.LlamaTarget, tokenizer: Any) -> None:
    assert len(tokenizer) == shared.vocab_size
    assert tokenizer.chat_template
    for text in (*PROMPTS, "  leading\n\n\ttabs 😀 naïve", "1234567 ΑΒΓ"):
        assert tokenizer.encode(text, add_special_tokens=False) == own_tokens(shared, text)


@given(st.text(min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_the_tokenizer_on_any_text(shared: llamacpp.LlamaTarget, tokenizer: Any, text: str) -> None:
    if "\x00" not in text and "<|" not in text:
        assert tokenizer.encode(text, add_special_tokens=False) == own_tokens(shared, text)


def own_tokens(target: llamacpp.LlamaTarget, text: str) -> list[int]:
    lib, data = target._lib, text.encode()
    vocab = lib.llama_model_get_vocab(target._model)
    room = (lib.llama_token * (len(data) + 8))()
    count = lib.llama_tokenize(vocab, data, len(data), room, len(room), False, False)
    return list(room[:count])


def test_end_tokens_include_the_chat_templates(shared: llamacpp.LlamaTarget, tokenizer: Any) -> None:
    assert tokenizer.eos_token_id in shared.eos_tokens
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in shared.eos_tokens


def test_loading_by_name(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSPEC_CACHE", str(tmp_path))
    engine = flashspec.load(file, backend="llamacpp", drafter="none")
    assert isinstance(engine.target, llamacpp.LlamaTarget)
    assert not (tmp_path / "models").exists(), "the weights were converted for nothing"


def test_a_gguf_draft_is_run_by_llama_cpp_and_a_target_by_torch(file: Path, smollm2_path: Path) -> None:
    assert pretrained.backend_of(file, "auto") == "torch"
    assert pretrained.backend_of(file, "auto", is_draft=True) == "llamacpp"
    assert pretrained.backend_of(None, "llamacpp") == "llamacpp"
    assert pretrained.backend_of(smollm2_path, "auto", is_draft=True) == "torch"
    assert pretrained.backend_of(file, "auto", is_draft=True, needs_torch=True) == "torch"
    assert pretrained.backend_of(file, "auto", is_draft=True, device=torch.device("cuda")) == "torch"
    assert pretrained.backend_of(file, "torch", is_draft=True) == "torch"


@pytest.mark.parametrize(("options", "message"), [
    ({"backend": "mlx"}, "backend is 'mlx'"),
    ({"model": "some/model", "backend": "llamacpp"}, "llama.cpp runs .gguf files"),
    ({"model": "nowhere.gguf", "backend": "llamacpp"}, "there is no file"),
    ({"model": "nowhere.gguf", "draft": "x.gguf", "draft_backend": "cuda"}, "there is no file"),
])  # fmt: skip
def test_what_cannot_be_loaded(options: dict[str, Any], message: str) -> None:
    with pytest.raises((OptionError, ModelError), match=message):
        flashspec.load(**options)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    llamacpp._binding.cache_clear()
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(OptionError, match=r"pip install 'flashspec-decoding\[llamacpp\]'"):
        llamacpp.LlamaTarget(file)
    monkeypatch.setattr(pretrained, "has_llamacpp", lambda: False)
    assert pretrained.backend_of(file, "auto", is_draft=True) == "torch"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_a_file_that_is_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        llamacpp.LlamaTarget(path)
    with pytest.raises(ModelError, match=r"broken\.gguf"):
        flashspec.load(path, backend="llamacpp", drafter="none")


@pytest.mark.parametrize("trait", ["llama_model_is_recurrent", "llama_model_is_hybrid", "llama_model_has_encoder"])
def test_models_that_cannot_roll_back_are_refused(file: Path, monkeypatch: pytest.MonkeyPatch, trait: str) -> None:
    monkeypatch.setattr(llamacpp.llama_cpp(), trait, lambda model: True)
    with pytest.raises(UnsupportedModelError, match="rolled back"):
        llamacpp.LlamaTarget(file)


def test_a_memory_that_forgets_nothing_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lib = llamacpp.llama_cpp()
    remove = lib.llama_memory_seq_rm
    monkeypatch.setattr(lib, "llama_memory_seq_rm", lambda m, i, a, b: a == -1 and remove(m, i, a, b))
    with pytest.raises(UnsupportedModelError, match="rolled back"):
        llamacpp.LlamaTarget(file)


def test_limits_are_named(target: llamacpp.LlamaTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "max_length", 16)
    with pytest.raises(PromptError, match="exceed the model's 16 positions"):
        target.score([sequence(some(14))], [CHAIN])
    monkeypatch.setattr(llamacpp, "MOST_IDS", 3)
    with pytest.raises(MemoryLimitError, match="at most 3"):
        target.score([sequence(some(3), name=str(i)) for i in range(2)], [TREE, TREE])


def test_a_prompt_of_several_chunks(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llamacpp, "CHUNK", 16)
    target, seq = llamacpp.LlamaTarget(file), sequence(some(50))
    check(target, [seq, sequence(some(20, 5), name="b")], [TREE, CHAIN])


@pytest.fixture(autouse=True)
def binding_again() -> Iterator[None]:
    yield
    llamacpp._binding.cache_clear()


def test_cached_tokenizer_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHSPEC_CACHE", str(tmp_path))
    folder = weights.tokenizer_folder(file, lambda line: None)
    monkeypatch.setattr(weights, "_extract_tokenizer", lambda gguf, folder: pytest.fail("read again"))
    assert weights.tokenizer_folder(file, lambda line: None) == folder
