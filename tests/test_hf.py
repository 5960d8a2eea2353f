"""HFTarget against plain forwards, family by family; what is refused."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import sequence
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from flashspec import loader
from flashspec.backends import decode, hf
from flashspec.backends.decode import DecodeKernels
from flashspec.backends.hf import HFTarget, PackedLinear
from flashspec.cache import SlotCache
from flashspec.core import EMPTY, Draft, Sequence
from flashspec.errors import PromptError, UnsupportedModelError
from flashspec.tree import paths

VOCAB = 131
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CONFIGS: dict[str, Callable[[], tf.PreTrainedConfig]] = {
    "llama": lambda: tf.LlamaConfig(**SHAPE),
    "qwen2": lambda: tf.Qwen2Config(**SHAPE),
    "qwen2_windows": lambda: tf.Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=1),
    "qwen3": lambda: tf.Qwen3Config(**SHAPE, head_dim=8),
    "mistral": lambda: tf.MistralConfig(**SHAPE, sliding_window=8),
    "gemma3": lambda: tf.Gemma3TextConfig(**SHAPE, **GEMMA, layer_types=KINDS),
    "gpt2": lambda: tf.GPT2Config(**GPT2, bos_token_id=0, eos_token_id=1),
    "phi": lambda: tf.PhiConfig(**SHAPE),
    "phi3": lambda: tf.Phi3Config(**SHAPE),
    "phi3_window": lambda: tf.Phi3Config(**SHAPE, sliding_window=8),
    "phi3_long": lambda: tf.Phi3Config(**SHAPE, rope_parameters=LONG_ROPE, original_max_position_embeddings=32),
}
FAMILIES = [name for name in CONFIGS if name != "phi3_long"]


def build(family: str, attention: str = "sdpa") -> tf.PreTrainedModel:
    """A random model whose attention, norms and biases all matter."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation=attention).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model


reference = functools.cache(build)


@functools.cache
def served(family: str) -> tf.PreTrainedModel:
    """As ``load_model`` prepares it on a CPU."""
    model = build(family)
    hf.pack_linears(model, at_least=0)
    hf.use_grouped_attention(model, decode_kernels())
    return model


@functools.cache
def decode_kernels() -> DecodeKernels | None:
    """None where there is no C compiler."""
    with tempfile.TemporaryDirectory() as folder:  # a library that is loaded needs its file no longer
        return decode.compiled(Path(folder))


@functools.cache
def plain(family: str, tokens: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Logits and last hidden state after the last token: a fresh forward of an untouched model."""
    with torch.inference_mode():
        ids = torch.tensor([tokens])
        output = reference(family)(input_ids=ids, use_cache=False, output_hidden_states=True)
    return output.logits[0, -1], output.hidden_states[-1][0, -1]


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype is torch.float32
    assert float((found - expected).abs().max()) < 1e-4 * float(expected.std())


class Checked:
    """A target whose every score is compared with plain forwards."""

    def __init__(self, family: str, model: tf.PreTrainedModel | None = None) -> None:
        self.family = family
        self.target = HFTarget(model or served(family))

    def score(self, seqs: Seq[Sequence], drafts: Seq[Draft], *, hidden: bool = False) -> None:
        scores = self.target.score(seqs, drafts, hidden=hidden)
        for seq, draft, score in zip(seqs, drafts, scores, strict=True):
            contexts = [(*seq.tokens, *(draft.tokens[node] for node in path)) for path in [[], *paths(draft.parents)]]
            assert_close(score.logits, torch.stack([plain(self.family, context)[0] for context in contexts]))
            if hidden:
                assert score.hidden is not None
                assert_close(score.hidden, torch.stack([plain(self.family, context)[1] for context in contexts]))
            else:
                assert score.hidden is None

    def commit(self, seq: Sequence, draft: Draft, accepted: Seq[int], *tokens: int) -> None:
        """As the engine does: the accepted path, then tokens of the target's own."""
        held = len(seq) + len(accepted)
        self.target.keep(seq, accepted)
        seq.tokens += [draft.tokens[node] for node in accepted]
        assert self.target.cached_length(seq) == held == len(seq)
        seq.tokens += tokens


def some_tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB), k=count)


def a_tree(seed: int, n: int = 6) -> Draft:
    rng = random.Random(seed)
    return Draft(some_tokens(n, seed), [rng.randrange(-1, node) for node in range(n)])


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def checked(family: str) -> Checked:
    return Checked(family)


@pytest.fixture
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "PREFILL_CHUNK", 7)
    monkeypatch.setattr(hf, "LONG", 5)


def input_shapes(model: tf.PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Filled with the shape of each forward's tokens."""
    shapes: list[tuple[int, ...]] = []
    forward = model.forward

    @functools.wraps(forward)
    def seen(**given: Any) -> Any:
        shapes.append(tuple(given["input_ids"].shape))
        return forward(**given)

    monkeypatch.setattr(model, "forward", seen)
    return shapes


# scores


@pytest.mark.usefixtures("_small_chunks")
def test_a_prompt_in_chunks(checked: Checked) -> None:
    for length in (1, 5, 6, 7, 8, 14, 15, 40):
        seq = sequence(some_tokens(length, length), name=str(length))
        checked.score([seq], [Draft.chain(some_tokens(length % 4))])
        assert checked.target.cached_length(seq) == length


def test_chains_with_rejected_and_accepted_tokens(checked: Checked) -> None:
    seq = sequence(some_tokens(20))
    for step, num_accepted in enumerate((0, 4, 2, 1, 0, 3)):
        draft = Draft.chain(some_tokens(4, step + 1))
        checked.score([seq], [draft])
        checked.commit(seq, draft, range(num_accepted), step + 5)
    checked.score([seq], [EMPTY])


def test_trees_and_every_path_through_them(checked: Checked) -> None:
    seq = sequence(some_tokens(11))
    tree = Draft(some_tokens(7, 1), [-1, -1, 1, 0, 2, 2, 4])
    for step, path in enumerate(([], [1, 2, 4, 6], [0, 3], [1, 2, 5], [1])):
        checked.score([seq], [tree])
        checked.commit(seq, tree, path, step + 40)
    checked.score([seq], [Draft.chain(some_tokens(3))])


def test_trees_deeper_than_a_window(checked: Checked) -> None:
    """Siblings lie between a node and its ancestors: slots are further apart than positions."""
    seq = sequence(some_tokens(11))
    checked.score([seq], [Draft(some_tokens(16, 1), [-1, -1, -1, 2, 3, 3, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14])])


def test_ragged_batches_with_different_numbers_of_unseen_tokens(checked: Checked) -> None:
    seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (3, 17, 9, 30)]
    checked.score(seqs, [EMPTY] * 4)
    for step in range(4):
        for row, seq in enumerate(seqs):
            checked.target.keep(seq, [])
            seq.tokens += some_tokens(1 + (row * 2 + step) % 6, step)
        drafts = [EMPTY, Draft.chain(some_tokens(5, step)), a_tree(step), Draft.chain([7])]
        checked.score(seqs, drafts[step:] + drafts[:step])
    for step in range(2):
        for seq in seqs:
            checked.commit(seq, EMPTY, [], step + 30)
        checked.score(seqs, [EMPTY] * 4)


def test_sequences_join_and_leave(checked: Checked) -> None:
    seqs = [sequence(some_tokens(5 + 4 * n, n), name=str(n)) for n in range(3)]
    for step in range(6):
        drafts = [a_tree(step + row) for row in range(len(seqs))]
        checked.score(seqs, drafts)
        for seq, draft in zip(seqs, drafts, strict=True):
            checked.commit(seq, draft, paths(draft.parents)[step % len(draft)], step + 9)
        checked.target.forget(seqs.pop(step % len(seqs)))
        assert [checked.target.cached_length(seq) for seq in seqs] == [len(seq) - 1 for seq in seqs]
        seqs.insert(step % 2, sequence(some_tokens(3 + 5 * step, step), name=f"new {step}"))
    checked.target.forget(sequence([1], name="unknown"))


def test_rewinds(checked: Checked) -> None:
    first, second = sequence(some_tokens(25), name="a"), sequence(some_tokens(12, 1), name="b")
    checked.score([first, second], [a_tree(0), a_tree(1)])
    checked.commit(second, EMPTY, [], 19)
    for length, rest in ((24, [5]), (18, some_tokens(9, 2)), (6, [8, 9]), (0, [3]), (100, [4, 5])):
        checked.target.rewind(first, length)
        first.tokens[length:] = rest
        checked.score([first, second], [Draft.chain(some_tokens(2, length)), EMPTY])
        checked.target.keep(first, [])
        checked.commit(second, EMPTY, [], length + 20)
    checked.target.rewind(sequence([1], name="unknown"), 0)


def test_the_same_context_may_be_scored_again(checked: Checked) -> None:
    seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (1, 13)]
    for drafts in ([EMPTY, EMPTY], [a_tree(1), Draft.chain(some_tokens(3))], [EMPTY, a_tree(2)]):
        checked.score(seqs, drafts, hidden=True)
        for seq in seqs:
            checked.target.keep(seq, [])


def test_hidden_states_are_the_last_layers(checked: Checked) -> None:
    seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (4, 19)]
    checked.score(seqs, [Draft.chain(some_tokens(3)), a_tree(2)], hidden=True)


def random_event(checked: Checked, seqs: list[Sequence], rng: random.Random, step: int) -> None:
    if len(seqs) < 4 and rng.random() < 0.5:
        seqs.append(sequence(some_tokens(rng.randint(1, 30), step), name=f"s{step}"))
    chosen = rng.sample(seqs, rng.randint(1, len(seqs)))
    drafts = [rng.choice([EMPTY, Draft.chain(some_tokens(4, step)), a_tree(step, 5)]) for _ in chosen]
    checked.score(chosen, drafts, hidden=rng.random() < 0.3)
    for seq, draft in zip(chosen, drafts, strict=True):
        checked.commit(seq, draft, rng.choice([[], *paths(draft.parents)]), *some_tokens(rng.randint(1, 3), step))
        if rng.random() < 0.2:
            length = rng.randint(0, len(seq) - 1)
            checked.target.rewind(seq, length)
            seq.tokens[length:] = some_tokens(rng.randint(1, 4), step)
    if rng.random() < 0.2:
        gone = rng.choice(seqs)
        checked.target.forget(gone)
        seqs.remove(gone)


@pytest.mark.usefixtures("_small_chunks")
@pytest.mark.parametrize("make", [served, reference], ids=["served", "untouched"])
def test_any_course_of_events(family: str, make: Callable[[str], tf.PreTrainedModel]) -> None:
    checked, rng = Checked(family, make(family)), random.Random(family)
    seqs = [sequence(some_tokens(12), name="first")]
    for step in range(10):
        random_event(checked, seqs or [sequence([3], name=f"t{step}")], rng, step)


@pytest.mark.usefixtures("_small_chunks")
def test_wide_attention_that_is_rounded_up() -> None:
    checked = Checked("gemma3")
    checked.target._cache.rounding = 16
    seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (15, 33)]
    for step in range(3):
        checked.score(seqs, [a_tree(step), Draft.chain(some_tokens(3, step))])
        for seq in seqs:
            checked.commit(seq, EMPTY, [], step + 8)


def test_a_change_of_rope_is_refused_or_exact() -> None:
    """LongRoPE scales all positions anew past its original length: keys held from before are then of no use."""
    try:
        checked = Checked("phi3_long")
        for length in (30, 33, 40):
            seq = sequence(some_tokens(50)[:length])
            checked.score([seq], [EMPTY])
            checked.target.keep(seq, [])
    except (PromptError, UnsupportedModelError):
        pass


def test_too_many_tokens_for_the_models_positions() -> None:
    for family in ("llama", "gpt2"):
        checked = Checked(family)
        seq = sequence(some_tokens(125))
        checked.score([seq], [Draft.chain([5, 6, 7])])
        with pytest.raises(PromptError, match="125 tokens and 4 draft tokens exceed the model's 128 positions"):
            checked.target.score([seq], [Draft.chain([5, 6, 7, 8])])
        with pytest.raises(PromptError, match="129 tokens and 0 draft tokens"):
            checked.target.score([sequence(some_tokens(129), name="long")], [EMPTY])


def test_a_refused_batch_leaves_the_others_usable() -> None:
    checked = Checked("llama")
    first, second, third = (sequence(some_tokens(n, n), name=str(n)) for n in (5, 6, 200))
    checked.score([first], [EMPTY])
    with pytest.raises(PromptError):
        checked.target.score([second, third], [EMPTY, EMPTY])
    checked.target.forget(third)
    checked.target.forget(first)
    checked.score([second], [a_tree(1)])


def test_smollm2_writes_what_a_plain_loop_writes(smollm2_path: Path) -> None:
    loaded = loader.load_model(smollm2_path)
    model = tf.AutoModelForCausalLM.from_pretrained(smollm2_path, dtype=torch.float32).eval()
    seq = sequence(loaded.tokenizer.encode("The first ten prime numbers are 2, 3, 5,"))
    for step in range(8):
        with torch.inference_mode():
            expected = model(input_ids=torch.tensor([seq.tokens]), use_cache=False).logits[0, -1]
        draft = Draft([int(expected.argmax()), 100 + step, 200], [-1, -1, 0])
        score = loaded.target.score([seq], [draft])[0]
        assert_close(score.logits[0], expected)
        loaded.target.keep(seq, [0])
        seq.tokens += [draft.tokens[0], int(score.logits[1].argmax())]
    text = loaded.tokenizer.decode(seq.tokens)
    plain_ids = model.generate(torch.tensor([seq.tokens[:-16]]), max_new_tokens=16, do_sample=False)[0].tolist()
    assert text == loaded.tokenizer.decode(plain_ids)


# speed without difference


def test_packed_linears_compute_the_same() -> None:
    torch.manual_seed(0)
    for bias in (True, False):
        linear = nn.Linear(24, 40, bias=bias)
        packed = PackedLinear(linear.weight, linear.bias)
        assert (packed.in_features, packed.out_features) == (24, 40)
        for rows in (1, 2, 3, 8, 9, 33):
            x = torch.randn(2, rows, 24)
            torch.testing.assert_close(packed(x), linear(x))


def test_packing_replaces_every_linear_layer(family: str) -> None:
    model = served(family)
    assert not [module for module in model.modules() if type(module) is nn.Linear or type(module) is Conv1D]
    count = sum(isinstance(module, PackedLinear) for module in model.modules())
    assert count == sum(isinstance(module, nn.Linear | Conv1D) for module in reference(family).modules())
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([some_tokens(7)]), use_cache=False).logits[0, -1]
    assert_close(found, plain(family, tuple(some_tokens(7)))[0])


def test_other_dtypes_are_not_packed() -> None:
    model = build("llama").bfloat16()
    assert hf.pack_linears(model, at_least=0)
    assert not [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("is_worth_it", [True, False])
def test_smaller_layers_are_packed_where_that_pays(is_worth_it: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "ASK_BYTES", 0)
    model, asked = build("llama"), []
    shapes = {tuple(module.weight.shape) for module in model.modules() if type(module) is nn.Linear}
    hf.pack_linears(model, pays=lambda *shape: asked.append(shape) or is_worth_it)
    assert set(asked) == shapes
    assert any(isinstance(module, PackedLinear) for module in model.modules()) == is_worth_it
    assert type(hf.packing_pays(64, 48, repeats=1)) is bool


@pytest.fixture
def _no_onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    hf._can_pack.cache_clear()
    yield
    hf._can_pack.cache_clear()


@pytest.mark.usefixtures("_no_onednn")
def test_no_operator_no_packing(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    assert hf.pack_linears(model, at_least=0) == {"bfloat16": 0, "oneDNN": 0}
    assert "no oneDNN linear operator" in caplog.text
    assert not [module for module in model.modules() if isinstance(module, PackedLinear)]


@pytest.mark.parametrize("rows", [64, 2])
def test_all_attention_functions_agree(family: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "GROUPED_ROWS", rows)
    grouped = build(family)
    hf.use_grouped_attention(grouped)
    assert grouped.config._attn_implementation == hf.GROUPED_ATTENTION
    by_kernel = build(family)
    hf.use_grouped_attention(by_kernel, decode_kernels())
    for model in (grouped, by_kernel, reference(family), build(family, "eager")):
        checked = Checked(family, model)
        seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (6, 21)]
        checked.score(seqs, [a_tree(3), Draft.chain(some_tokens(2))])
        for seq in seqs:
            checked.commit(seq, EMPTY, [], 77)
        checked.score(seqs, [EMPTY, a_tree(4)])


def test_rows_of_different_widths_are_packed_without_padding(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows pay for their own tokens: trees, rows with more queries than the kernel takes, hidden states, roll-backs."""
    if decode_kernels() is None:
        pytest.skip("there is no C compiler")
    checked = Checked(family)
    shapes = input_shapes(checked.target.model, monkeypatch)
    seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (21, 6, 13)]
    checked.score(seqs, [a_tree(3), EMPTY, Draft.chain(some_tokens(30))], hidden=True)
    for seq in seqs:
        checked.commit(seq, EMPTY, [], 77)
    tree = Draft(some_tokens(5, 4), [-1, 0, -1, 2, 2])
    checked.score(seqs, [EMPTY, tree, Draft.chain([9])], hidden=True)
    checked.commit(seqs[1], tree, [2, 4], 5)
    for seq in (seqs[0], seqs[2]):
        checked.commit(seq, EMPTY, [], 8)
    checked.score(seqs, [EMPTY] * 3)
    checked.score(seqs[1:], [EMPTY, a_tree(9, 24)])
    assert [rows for rows, _ in shapes] == [1, 1, 3, 1], "the same width needs no packing"
    assert shapes[:2] == [(1, 21 + 6 + 6 + 13 + 30), (1, 1 + 1 + 5 + 1 + 1)]


@pytest.mark.usefixtures("_small_chunks")
def test_prompts_share_a_forward_up_to_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 7 tokens, and 5 make a prompt; what a forward takes in memory is bounded."""
    if decode_kernels() is None:
        pytest.skip("there is no C compiler")
    checked = Checked("llama")
    shapes = input_shapes(checked.target.model, monkeypatch)
    seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (6, 3, 7, 2)]
    checked.score(seqs, [EMPTY] * 4)
    assert shapes == [(1, 6 + 3 + 2), (1, 7)]


def test_without_kernels_rows_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    hf.use_grouped_attention(model)
    checked = Checked("llama", model)
    shapes = input_shapes(model, monkeypatch)
    checked.score([sequence([5, 6, 7], name="a"), sequence([8], name="b")], [EMPTY, Draft.chain([3])])
    assert shapes == [(2, 3)]


def test_features_of_packed_rows() -> None:
    seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (9, 4)]
    drafts, layers = [a_tree(3), EMPTY], (0, 2, 3)
    found = HFTarget(served("llama")).score(seqs, drafts, features=layers)
    alone = [HFTarget(served("llama")).score([s], [d], features=layers)[0] for s, d in zip(seqs, drafts, strict=True)]
    for score, other in zip(found, alone, strict=True):
        assert score.features is not None
        assert score.features.shape == other.features.shape
        assert torch.allclose(score.features, other.features, atol=1e-4)


@pytest.mark.parametrize("features", [(), (0, 3)])
def test_a_piece_of_another_prompt_is_read_beside(family: str, features: tuple[int, ...]) -> None:
    checked, other = Checked(family), sequence(some_tokens(40, 5), name="other")
    seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (9, 4)]
    target = checked.target
    target.score(seqs, [a_tree(3), EMPTY], features=features, piece=(other, 17))
    assert target.cached_length(other) == 17
    for seq in seqs:
        checked.commit(seq, EMPTY, [], 77)
    target.score(seqs, [EMPTY, EMPTY], features=features, piece=(other, 99))
    assert target.cached_length(other) == 39, "the last token is left for its own score"
    for seq in seqs:
        checked.commit(seq, EMPTY, [], 7)
    scores = target.score([*seqs, other], [EMPTY, a_tree(2), EMPTY], features=features)
    assert_close(scores[2].logits[0], plain(family, tuple(other.tokens))[0])
    assert_close(scores[0].logits[0], plain(family, tuple(seqs[0].tokens))[0])
    if features:
        assert scores[2].features is not None
        alone = HFTarget(served(family)).score([other], [EMPTY], features=features)[0].features
        assert torch.allclose(scores[2].features, alone, atol=1e-3)


def test_a_forward_that_fails_leaves_no_packing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    target = HFTarget(served("llama"))
    seqs = [sequence(some_tokens(length, length), name=str(length)) for length in (9, 4)]
    with monkeypatch.context() as patched:
        patched.setattr(target.model, "forward", lambda **given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            target.score(seqs, [EMPTY, Draft.chain([5])])
    assert hf._packing.starts is None
    Checked("llama").score(seqs, [EMPTY, EMPTY])


def test_plain_forwards_stay_the_same_with_grouped_attention(family: str) -> None:
    """Without a mask from us, Transformers makes one: sliding windows included."""
    tokens = tuple(some_tokens(30))
    with torch.inference_mode():
        found = served(family)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    assert_close(found, plain(family, tokens)[0])


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_grouped_attention_by_definition(kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(kv_heads)
    query = torch.randn(2, 6, 5, 8, generator=generator)
    keys, values = (torch.randn(2, kv_heads, 11, 8, generator=generator) for _ in range(2))
    hidden = torch.rand(2, 1, 5, 11, generator=generator) < 0.4
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, torch.finfo(torch.float32).min)
    group = SimpleNamespace(num_key_value_groups=6 // kv_heads, is_causal=True)
    found, _ = hf.grouped_attention(group, query, keys, values, mask, scaling=0.3)
    every = torch.arange(6) // (6 // kv_heads)
    weights = (query @ keys[:, every].mT * 0.3 + mask).softmax(-1)
    torch.testing.assert_close(found, (weights @ values[:, every]).transpose(1, 2))


def test_grouped_attention_repeats_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    original = hf.sdpa_attention_forward
    monkeypatch.setattr(hf, "sdpa_attention_forward", lambda *a, **k: calls.append(a[1].shape[2]) or original(*a, **k))
    seq = sequence(some_tokens(100))
    model = build("llama")
    hf.use_grouped_attention(model)
    HFTarget(model).score([seq], [EMPTY])
    assert calls == [100] * 3  # long prompts pay for one copy, and gain from a causal kernel
    calls.clear()
    HFTarget(model).score([sequence(some_tokens(20))], [a_tree(1)])
    assert calls == []


# self-test


@pytest.mark.parametrize("make", [served, reference], ids=["served", "untouched"])
def test_the_self_test_passes(family: str, make: Callable[[str], tf.PreTrainedModel]) -> None:
    target = HFTarget(make(family))
    assert hf.self_test(target) < 1e-4
    assert target.cached_length(sequence([1], name="self-test")) == 0


def altered(family: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> HFTarget:
    """A target whose model sees other arguments than it is given."""
    model = build(family)
    forward = model.forward
    model.forward = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **change(kwargs)))
    return HFTarget(model)


def no_positions(arguments: dict[str, Any]) -> dict[str, Any]:
    return {**arguments, "position_ids": None}


def blind_to_masks(arguments: dict[str, Any]) -> dict[str, Any]:
    mask = arguments.get("attention_mask")
    return arguments if mask is None else {**arguments, "attention_mask": torch.zeros_like(mask)}


@pytest.mark.parametrize("change", [no_positions, blind_to_masks])
@pytest.mark.parametrize("broken", ["llama", "mistral", "gpt2", "phi"])
def test_the_self_test_fails_on_a_broken_model(broken: str, change: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="failed the self-test: after a rollback its logits differ by"):
        hf.self_test(altered(broken, change))


@pytest.mark.parametrize("windowed", ["mistral", "gemma3", "phi3_window"])
def test_the_self_test_fails_without_windows(windowed: str) -> None:
    target = HFTarget(build(windowed))
    target._windows = dict.fromkeys(target._windows)
    with pytest.raises(UnsupportedModelError, match="failed the self-test"):
        hf.self_test(target)


def test_the_self_test_fails_where_a_rejected_token_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def overwrite(self: SlotCache, row: int, base: int, accepted: Seq[int]) -> None:
        for store in self._stores():
            store[row, :, base - 1] = store[row, :, base]
        self.lengths[row] = base

    monkeypatch.setattr(SlotCache, "keep", overwrite)
    with pytest.raises(UnsupportedModelError, match="failed the self-test"):
        hf.self_test(HFTarget(build("llama")))


# which models


def test_windows_of_layers() -> None:
    assert hf.layer_windows(CONFIGS["llama"]()) == [None, None, None]
    assert hf.layer_windows(CONFIGS["mistral"]()) == [8, 8, 8]
    assert hf.layer_windows(CONFIGS["gemma3"]()) == [8, None, 8]
    assert hf.layer_windows(CONFIGS["qwen2_windows"]()) == [None, 8, 8]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (tf.MambaConfig, "mamba has layers of type linear_attention .* rolled back"),
        (tf.Qwen3NextConfig, "qwen3_next has layers of type linear_attention"),
        (tf.FalconH1Config, "falcon_h1 has layers of type hybrid"),
        (tf.Llama4TextConfig, "llama4_text has layers of type chunked_attention"),
        (tf.T5Config, "t5 is an encoder-decoder; flashspec drives decoder-only models"),
        (tf.BartConfig, "bart is an encoder-decoder"),
    ],
)
def test_models_that_cannot_be_rolled_back(config: Callable[[], tf.PreTrainedConfig], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        hf.layer_windows(config())


def stub(**generation: Any) -> Any:
    config = CONFIGS["llama"]()
    config.eos_token_id = generation.pop("own_eos", None)
    return SimpleNamespace(config=config, generation_config=SimpleNamespace(**generation))


def test_what_only_the_loaded_model_shows() -> None:
    hf.check_runnable(stub(cache_implementation=None))
    hf.check_runnable(stub())
    with pytest.raises(UnsupportedModelError, match=r"quantized cache, .* remove cache_implementation"):
        hf.check_runnable(stub(cache_implementation="quantized"))
    recurrent = stub()
    recurrent._is_stateful = True
    with pytest.raises(UnsupportedModelError, match="llama keeps a recurrent state"):
        hf.check_runnable(recurrent)


def test_eos_tokens_of_all_places() -> None:
    """The generation config's, as for Transformers' generate; the model's own where it has none."""
    assert hf.eos_tokens(stub(eos_token_id=[5, 6], own_eos=7)) == {5, 6}
    assert hf.eos_tokens(stub(eos_token_id=None, own_eos=[5, 9])) == {5, 9}
    assert hf.eos_tokens(stub(eos_token_id=None, own_eos=None)) == frozenset()
    assert hf.eos_tokens(stub(own_eos=0)) == {0}
