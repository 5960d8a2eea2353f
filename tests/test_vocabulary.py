"""Tokens as bytes, and one tokenizer's ids beside another's: nothing of a text is lost, and little is encoded twice."""

from __future__ import annotations

import functools
import json
import random
import unicodedata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flashspec.vocabulary import LONG, Retokeniser, Translation, Vocabulary, continuation, token_bytes

MODELS = Path.home() / ".cache" / "flashspec-models"
STORY = (
    "The keeper wrote down the weather every evening, and then the keeper slept until the morning.\n"
    "def add(a, b):\n    return a + b\n\n\tdone  twice   thrice\n"
    "天空是蓝色的，因为空气散射蓝光。天空为什么是蓝色的？ naïve café 🙂 1234\n"
)
TEXTS = st.lists(
    st.one_of(
        st.sampled_from(["\n", "\t", " ", "  ", "the", " keeper", "é", "e\u0301", "天空", "🙂", "👩\u200d👩", "\x00"]),
        st.characters(exclude_categories=["Cs"], exclude_characters="▁"),  # which SentencePiece takes for a space
    ),
    min_size=1,
    max_size=40,
).map("".join)


@functools.cache
def byte_level(size: int = 420, *, prefix: bool = False) -> PreTrainedTokenizerFast:
    """GPT-2's kind."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|turn|>"],
                                  show_progress=False)  # fmt: skip
    made.train_from_iterator([STORY] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", additional_special_tokens=["<|turn|>"])


@functools.cache
def sentence_piece(size: int = 220) -> PreTrainedTokenizerFast:
    """Llama's kind: ▁ for a space, one put before the text, bytes for what it does not know."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")  # for tokens of one word
    trainer = trainers.BpeTrainer(vocab_size=size, limit_alphabet=60, show_progress=False)
    made.train_from_iterator([line + "\n" for line in STORY.split("\n")], trainer)
    described = json.loads(made.to_str())
    words = [word for word in sorted(described["model"]["vocab"], key=described["model"]["vocab"].get) if word != "\n"]
    merges = [pair for pair in described["model"]["merges"] if "\n" not in "".join(pair)]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [word for word in words if "\n" not in word]
    vocab = {name: token for token, name in enumerate(names)}
    model = models.BPE(vocab=vocab, merges=[tuple(pair) for pair in merges], byte_fallback=True, unk_token="<unk>",
                       fuse_unk=True)  # fmt: skip
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def letters(alphabet: str, *merges: str, end: str | None = None) -> PreTrainedTokenizerFast:
    """Every letter is a token, and so is every merge, a word of two tokens, in their order; ``end`` comes last."""
    names = [*alphabet, *merges]
    pairs = [
        (word[:at], word[at:])
        for word in merges
        for at in range(1, len(word))
        if word[:at] in names and word[at:] in names
    ]
    made = Tokenizer(models.BPE(vocab={name: token for token, name in enumerate(names)}, merges=pairs))
    made.decoder = decoders.Fuse()
    if end is not None:
        made.add_special_tokens([end])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=end)


def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer, 10**6)


@functools.cache
def own(kind: str) -> Vocabulary:
    return vocabulary({"bytes": byte_level, "pieces": sentence_piece}[kind]())


@functools.cache
def real(name: str) -> Vocabulary:
    if not (MODELS / name / "tokenizer.json").exists():
        pytest.skip(f"{name} is not here")
    return vocabulary(AutoTokenizer.from_pretrained(MODELS / name))


# bytes


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_the_bytes_of_the_tokens_are_the_text(kind: str, text: str) -> None:
    lead = b" " if kind == "pieces" else b""
    assert own(kind).text_bytes(own(kind).encode(text)) == lead + text.encode()
    assert own(kind).text_bytes(own(kind).encode_inside(text)) == text.encode()


@pytest.mark.parametrize("name", ["smollm2", "qwen-coder-0.5b", "gemma3-270m"])
def test_real_tokenizers(name: str) -> None:
    words = real(name)
    controls = {word.content for word in words.tokenizer.added_tokens_decoder.values() if word.special}

    @settings(max_examples=60, deadline=None)
    @given(text=TEXTS)
    def check(text: str) -> None:
        # Qwen's composes; SmolLM2's has no token for some bytes, and leaves them out
        normal = text if words.tokenizer.backend_tokenizer.normalizer is None else unicodedata.normalize("NFC", text)
        known = [byte for byte in normal.encode() if bytes([byte]) in words.ids]
        assert words.text_bytes(words.encode(text)) == bytes(known)

    check()
    assert len(STORY.encode()) == len(words.text_bytes(words.encode(STORY)))
    assert all(words.piece(words.tokenizer.convert_tokens_to_ids(control)) is None for control in controls)
    assert not words.adds_space


def test_lone_bytes_and_control_tokens() -> None:
    for words in (own("bytes"), own("pieces")):
        assert {words.pieces[words.ids[bytes([byte])]] for byte in range(256)} == {bytes([i]) for i in range(256)}
        assert [words.piece(token) for token in words.tokenizer.all_special_ids] == [None] * len(
            words.tokenizer.all_special_ids
        )
        assert words.piece(-1) is words.piece(10**6) is None
    assert (own("bytes").adds_space, own("pieces").adds_space) == (False, True)
    assert (own("bytes").opening, own("pieces").opening) == ([], [1])


def test_of_twins_the_one_that_is_written() -> None:
    words = own("pieces")
    twins = [token for token, piece in enumerate(words.pieces) if piece == b"e"]
    assert len(twins) == 2  # <0x65> and e
    assert words.ids[b"e"] == max(twins) == words.encode_inside("e")[0]


def test_added_text_is_text_and_unused_ids_are_none() -> None:
    made = byte_level.__wrapped__()
    made.add_tokens([AddedToken("<tool 1>", special=False), AddedToken("<|control|>", special=True)])
    names = made.get_vocab()
    pieces = token_bytes(made)
    assert pieces[names["<tool 1>"]] == b"<tool 1>"
    assert pieces[names["<|control|>"]] is None
    fake = SimpleNamespace(get_vocab=lambda: {"a": 0, "b": 3}, decode=lambda ids, **_: "ab"[ids[0] // 3])
    assert token_bytes(fake) == [b"a", None, None, b"b"]


def test_a_space_before_the_first_word_is_known_by_what_the_tokenizer_does() -> None:
    words = vocabulary(byte_level(prefix=True))
    assert words.adds_space
    for text in ("the keeper", " keeper", "\n", "天空", ", and"):
        assert words.text_bytes(words.encode_inside(text)) == text.encode()
    pieces = sentence_piece.__wrapped__()
    backend = pieces.backend_tokenizer
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    assert vocabulary(pieces).text_bytes(vocabulary(pieces).encode("the 天空")) == " the 天空".encode()


def test_a_decoder_that_does_not_keep_its_word_is_not_believed() -> None:
    made = letters("abc", "ab")
    made.backend_tokenizer.decoder = decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()])
    assert token_bytes(made) == [b"a", b"b", b"c", b"ab"]
    made = byte_level.__wrapped__()
    assert token_bytes(made)[made.get_vocab()["Ġthe"]] == b" the"
    lying = SimpleNamespace(backend_tokenizer=made.backend_tokenizer, get_vocab=made.get_vocab, encode=made.encode,
                            decode=lambda ids, **_: made.decode(ids).upper())  # fmt: skip
    assert token_bytes(lying)[made.get_vocab()["Ġthe"]] == b" THE"


# what two have in common


def test_a_vocabulary_has_itself_in_common() -> None:
    made = byte_level()
    found = Translation.between(made, 10**6, made, 10**6, target_eos=frozenset({0}), draft_eos=frozenset({0}))
    assert found.coverage == 1
    assert torch.equal(found.target_ids, found.draft_ids)
    assert (found.end, found.own[0]) == (0, 0)
    assert 1 not in found.own  # <|turn|>
    assert found.num_texts == len(found.own) - 1 == len(made) - 2


def test_pairs_have_equal_bytes_one_to_one() -> None:
    found = Translation.between(byte_level(), 400, sentence_piece(), 450)
    pairs = list(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True))
    assert len(pairs) == len(dict(pairs)) == len({draft for _, draft in pairs}) >= 256
    for target, draft in pairs:
        assert target < 400
        assert draft < 450
        assert found.served.pieces[target] == found.draft.pieces[draft] is not None
    assert 0 < found.coverage < 1
    assert found.end is None


def test_logits_go_where_their_tokens_are() -> None:
    found = Translation.between(letters("abcd"), 6, letters("dxa", "da"), 5)
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    none = -torch.inf
    assert found.over_served(logits).tolist() == [[3, none, none, 1, none, none], [3, none, none, 5, none, none]]
    assert found.coverage == 0.5
    empty = Translation.between(letters("ab"), 2, letters("xy"), 2)
    assert empty.over_served(torch.ones(1, 2)).tolist() == [[none, none]]


def test_the_end_is_the_one_the_tokenizer_means() -> None:
    served, draft = byte_level(), sentence_piece()
    ends: dict[str, Any] = {"target_eos": frozenset({1, 0}), "draft_eos": frozenset({2, 1})}
    found = Translation.between(served, 10**6, draft, 10**6, **ends)
    assert (found.end, found.own[0]) == (0, 2)
    found = Translation.between(served, 10**6, draft, 10**6, target_eos=frozenset({1}), draft_eos=frozenset({2}))
    assert (found.end, found.own[1]) == (1, 2)


# a text that grows


def grown(retokeniser: Retokeniser, served: Vocabulary, tokens: list[int], seed: int) -> None:
    """Push in random steps; at each, the ids are the bytes so far, and what was settled has stayed."""
    words, steps, start, before = retokeniser._vocabulary, random.Random(seed), 0, list[int]()
    lead = b" " if words.adds_space else b""
    while start < len(tokens):
        step = steps.choice([1, 1, 2, 5])
        num_settled = retokeniser.num_settled
        retokeniser.push(served.text_bytes(tokens[start : start + step]))
        start += step
        found = retokeniser.ids()
        assert retokeniser.is_exact
        data = served.text_bytes(tokens[:start])
        assert words.text_bytes(found) == (lead if data.decode(errors="ignore") else b"") + data
        assert found[:num_settled] == before[:num_settled]
        assert retokeniser.ids(num_settled) == found[num_settled:]
        assert len(retokeniser) == len(found)
        before = found


@pytest.mark.parametrize("kinds", [("bytes", "pieces"), ("pieces", "bytes"), ("bytes", "bytes")])
@settings(max_examples=40, deadline=None)
@given(text=TEXTS, times=st.integers(1, 6), seed=st.integers(0, 99))
@example(text="天空🙂", times=40, seed=1)
@example(text=" " * 50, times=6, seed=1)
def test_retokenised_text_is_the_text(kinds: tuple[str, str], text: str, times: int, seed: int) -> None:
    served, words = own(kinds[0]), own(kinds[1])
    grown(Retokeniser(words, is_start=True), served, served.encode_inside(text * times), seed)


@pytest.mark.parametrize("kinds", [("bytes", "pieces"), ("pieces", "bytes")])
def test_retokenised_prose_is_what_the_tokenizer_writes(kinds: tuple[str, str]) -> None:
    served, words = own(kinds[0]), own(kinds[1])
    for seed, text in enumerate([STORY * 8] * 3 + ["天空是蓝色的因为空气" * 30, "thekeeperwrotethe" * 30]):
        retokeniser = Retokeniser(words, words.opening, is_start=True)
        tokens, steps = served.encode_inside(text), random.Random(seed)
        while tokens:
            step = steps.randint(1, 6)
            retokeniser.push(served.text_bytes(tokens[:step]))
            tokens = tokens[step:]
        assert retokeniser.ids() == words.encode(text, add_special_tokens=True)


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = vocabulary({"bytes": byte_level, "pieces": sentence_piece}[kind]())
    encode, lengths = words.encode, list[int]()

    def counted(text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    words.encode = counted  # type: ignore[method-assign]
    for text in (STORY * 30, "天空是蓝色的" * 400, " " * 3000, "x" * 3000):
        lengths.clear()
        retokeniser = Retokeniser(words, is_start=True)
        for letter in text:
            retokeniser.push(letter.encode())
        assert max(lengths) <= LONG + 2
        assert sum(lengths) <= 110 * len(text)
        assert retokeniser.num_settled > len(retokeniser) - LONG - 2


def test_characters_that_stay_incomplete_or_are_none() -> None:
    words = own("bytes")
    retokeniser = Retokeniser(words, is_start=True)
    retokeniser.push(b"a\xe5\xa4")
    assert words.text_bytes(retokeniser.ids()) == b"a\xe5\xa4"
    retokeniser.push(b"x")
    assert words.text_bytes(retokeniser.ids()) == "a\ufffdx".encode()
    poor = Retokeniser(vocabulary(letters("abc")), is_start=True)
    poor.push(b"a\xe5")
    assert not poor.is_exact
    assert poor.ids() == [0]
    poor.push(b"\xa4\xa9b")
    assert poor.is_exact  # it does not know the character, and reads on


@pytest.mark.parametrize("kind", ["bytes", "pieces"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS, seed=st.integers(0, 99))
def test_a_continuation_leaves_the_tokens_as_they_are(kind: str, text: str, seed: int) -> None:
    words, chance, data = own(kind), random.Random(seed), text.encode()
    at = chance.randint(0, len(data))
    tokens = words.spell(data[:at]) if seed % 2 else words.encode_inside(text)[: chance.randint(0, 9)]
    assert tokens is not None
    rest = data[len(words.text_bytes(tokens)) :]
    cut = rest[: chance.randint(0, len(rest))]
    found = continuation(words, tokens, cut)
    written = words.text_bytes(found)
    assert cut.startswith(written)
    assert len(cut) - len(written) <= 3
    assert (words.text_bytes(tokens) + written).decode(errors="ignore") == (words.text_bytes(tokens) + cut).decode(
        errors="ignore"
    )


def test_a_continuation_has_the_breaks_of_its_place() -> None:
    words = vocabulary(letters("abcde", "bc", "de", "cd"))
    a, bc, b, c = (words.ids[piece] for piece in (b"a", b"bc", b"b", b"c"))
    assert continuation(words, [a], b"bcde") == [bc, words.ids[b"de"]]
    assert continuation(words, [a, b], b"cde") == [c, words.ids[b"de"]]  # together it would be a bc de
    assert continuation(words, [], b"abc") == [a, bc]
    assert continuation(words, [99, b], b"a") == [a]  # a control token is no text
    assert continuation(words, [b], b"\xff") == []
