"""The streamed text is the decoded text, and a stop string cuts it where it first appears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flashspec.errors import PromptError
from flashspec.text import TextStream, encode

REPLACEMENT = "\ufffd"
QUICK = settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])

CJK = ["你好", "汉字", "𠮷", "世界"]
JOINED = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪", "e\u0301", "n\u0303o", "ก็", "\u200b", "\ufeff"]
RIGHT_TO_LEFT = ["مرحبا", "ﷺ", "\u202eab"]
CONTROLS = ["\x00", "\x1b[0m", "\x7f", "\r\n", "\t"]
WORDS = ["  ", " ", "the", " the", "stop", "aaa", "ab", "naïve", "∑", "'s", ".", "1234"]
SCRIPTS = st.sampled_from(CJK + JOINED + RIGHT_TO_LEFT + CONTROLS + WORDS)
CHARACTERS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT), max_size=3)
TEXTS = st.lists(SCRIPTS | CHARACTERS, max_size=10).map("".join)
REPETITIVE = st.text("ab 你👩", min_size=1, max_size=24)


def byte_pairs(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    """A tokenizer of the SentencePiece kind: words begin with a mark, unknown characters become bytes."""
    letters = "abcdefghijklmnopqrstuvwxyz.,!?'0123456789"
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = [*special, "▁", *letters, "th", "▁th", "▁the", "▁a", "▁▁", "in", "ing", "é", "你"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("▁", "a"), ("▁", "▁"), ("i", "n"), ("in", "g")]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoder
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def llama_like() -> PreTrainedTokenizerFast:
    strip = decoders.Strip(" ", 1, 0)
    return byte_pairs(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]))


def metaspace_like() -> PreTrainedTokenizerFast:
    return byte_pairs(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")]))


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module", params=["smollm2", "llama", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    if request.param == "smollm2":
        return request.getfixturevalue("smollm2")
    return llama_like() if request.param == "llama" else metaspace_like()


def decode(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def certain(tokenizer: Any, tokens: list[int]) -> str:
    """The decoding of the longest beginning that does not end in an incomplete character."""
    texts = (decode(tokenizer, tokens[:count]) for count in range(len(tokens), -1, -1))
    return next(text for text in texts if not text.endswith(REPLACEMENT))


def cut(text: str, stop: tuple[str, ...]) -> str | None:
    """The text before the first occurrence of any stop string; None if there is none."""
    found = [text.index(string) for string in stop if string in text]
    return text[: min(found)] if found else None


def held(text: str, stop: tuple[str, ...]) -> int:
    """How much of the end may become a stop string: the longest proper beginning of one."""
    return max((n for string in stop for n in range(len(string)) if text.endswith(string[:n])), default=0)


def stream(tokenizer: Any, tokens: list[int], stop: tuple[str, ...] = ()) -> tuple[list[str], str, bool]:
    text = TextStream(tokenizer, stop)
    pieces = [text.push(token) for token in tokens]
    return pieces, text.finish(), text.is_stopped


# pieces add up


@given(text=TEXTS)
@QUICK
def test_pieces_add_up_and_come_as_soon_as_they_are_certain(tokenizer: Any, text: str) -> None:
    tokens = tokenizer.encode(text)
    pieces, rest, _ = stream(tokenizer, tokens)
    for count in range(len(tokens) + 1):
        assert "".join(pieces[:count]) == certain(tokenizer, tokens[:count])
    assert "".join(pieces) + rest == decode(tokenizer, tokens)


@given(text=TEXTS, share=st.floats(0, 1))
@QUICK
def test_a_cut_character_appears_only_at_the_end(tokenizer: Any, text: str, share: float) -> None:
    tokens = tokenizer.encode(text)
    assume(REPLACEMENT not in decode(tokenizer, tokens))  # SmolLM2 has no tokens for some bytes, and drops them
    tokens = tokens[: round(share * len(tokens))]
    pieces, rest, _ = stream(tokenizer, tokens)
    assert "".join(pieces) == certain(tokenizer, tokens)
    assert REPLACEMENT not in "".join(pieces)
    assert REPLACEMENT not in rest.rstrip(REPLACEMENT)


@given(data=st.data())
@QUICK
def test_pieces_add_up_for_random_ids_and_junk_bytes(smollm2: Any, data: st.DataObject) -> None:
    junk = [token for token in range(600) if REPLACEMENT in smollm2.decode([token])]
    assert len(junk) > 100
    ids = st.sampled_from(junk) | st.integers(0, len(smollm2) - 1) | st.sampled_from(smollm2.all_special_ids)
    tokens = data.draw(st.lists(ids, max_size=12))
    pieces, rest, _ = stream(smollm2, tokens)
    assert "".join(pieces) + rest == decode(smollm2, tokens)


@given(data=st.data())
@QUICK
@pytest.mark.parametrize("make", [llama_like, metaspace_like])
def test_pieces_add_up_for_random_pieces_with_marks(make: Any, data: st.DataObject) -> None:
    tokenizer = make()
    first = tokenizer.convert_tokens_to_ids("▁")  # all before are special or bytes, whose junk is not additive
    ids = st.integers(first, len(tokenizer) - 1) | st.sampled_from([1, 2, first])
    tokens = data.draw(st.lists(ids, max_size=10))
    pieces, rest, _ = stream(tokenizer, tokens)
    assert "".join(pieces) + rest == decode(tokenizer, tokens)


def test_leading_spaces_survive_special_tokens_in_between() -> None:
    tokenizer = llama_like()
    tokens = [tokenizer.convert_tokens_to_ids(piece) for piece in ("▁the", "</s>", "▁a", "</s>", "</s>", "▁", "▁the")]
    assert stream(tokenizer, tokens)[0] == ["the", "", " a", "", "", " ", " the"]


def test_a_character_of_three_tokens_comes_with_the_third() -> None:
    tokenizer = llama_like()
    tokens = tokenizer.encode("好a", add_special_tokens=False)
    assert stream(tokenizer, tokens) == (["", "", "", "好", "a"], "", False)
    assert stream(tokenizer, tokens[:3]) == (["", "", ""], REPLACEMENT * 2, False)


def test_no_tokenizer_no_text() -> None:
    assert stream(None, [1, 2, 3], ("a",)) == (["", "", ""], "", False)


# stop strings


@st.composite
def stops(draw: st.DrawFn, text: str) -> tuple[str, ...]:
    """Parts of the text, some of them overlapping or inside each other, and some that almost occur."""
    found = []
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, max(len(text) - 1, 0)))
        part = text[start : start + draw(st.integers(1, 6))]
        found.append(part + draw(st.sampled_from(["", "", "a", "!"])) or "a")
    return tuple(found)


def expected_text(tokenizer: Any, tokens: list[int], stop: tuple[str, ...]) -> str:
    """Decode after each token; the first time that a stop string is there, cut before the first of them."""
    for count in range(len(tokens)):
        text = decode(tokenizer, tokens[:count])
        if not text.endswith(REPLACEMENT) and (before := cut(text, stop)) is not None:
            return before
    before = cut(decode(tokenizer, tokens), stop)
    return decode(tokenizer, tokens) if before is None else before


@given(data=st.data(), text=TEXTS | REPETITIVE)
@QUICK
def test_one_stop_string_cuts_the_full_text(tokenizer: Any, data: st.DataObject, text: str) -> None:
    tokens = tokenizer.encode(text)
    full = decode(tokenizer, tokens)
    stop = data.draw(stops(full))[:1]
    pieces, rest, is_stopped = stream(tokenizer, tokens, stop)
    assert "".join(pieces) + rest == full.split(stop[0])[0]
    assert is_stopped == (stop[0] in full)


@given(data=st.data(), text=TEXTS | REPETITIVE)
@QUICK
def test_several_stop_strings_cut_at_the_first(tokenizer: Any, data: st.DataObject, text: str) -> None:
    tokens = tokenizer.encode(text)
    stop = data.draw(stops(decode(tokenizer, tokens)))
    pieces, rest, is_stopped = stream(tokenizer, tokens, stop)
    assert "".join(pieces) + rest == expected_text(tokenizer, tokens, stop)
    assert is_stopped == any(string in decode(tokenizer, tokens) for string in stop)


@given(data=st.data(), text=REPETITIVE)
@QUICK
def test_only_a_possible_beginning_is_held_back(tokenizer: Any, data: st.DataObject, text: str) -> None:
    tokens = tokenizer.encode(text)
    stop = data.draw(stops(decode(tokenizer, tokens)))
    pieces, _, _ = stream(tokenizer, tokens, stop)
    for count in range(len(tokens) + 1):
        text_now = certain(tokenizer, tokens[:count])
        if cut(text_now, stop) is not None:
            break
        assert "".join(pieces[:count]) == text_now[: len(text_now) - held(text_now, stop)]


class OneLetter:
    """A token is a character."""

    def decode(self, tokens: list[int], **options: object) -> str:
        return "".join(chr(token) for token in tokens)


def letters(text: str, *stop: str) -> tuple[list[str], str, bool]:
    return stream(OneLetter(), [ord(letter) for letter in text], stop)


def test_a_beginning_that_is_not_completed_is_released() -> None:
    assert letters("ENx", "END") == (["", "", "ENx"], "", False)
    assert letters("EENDx", "END") == (["", "E", "", "", ""], "", True)
    assert letters("aEN", "END") == (["a", "", ""], "EN", False)


def test_stop_strings_that_overlap() -> None:
    assert letters("aabaac", "aabaaa", "baac") == (["", "", "", "", "", "aa"], "", True)
    assert letters("xabc", "abcd", "bc") == (["x", "", "", "a"], "", True)  # the first to be complete ends the text
    assert letters("aaab", "aab") == (["", "", "a", ""], "", True)


@given(text=TEXTS)
@QUICK
def test_nothing_comes_after_a_stop_string(smollm2: Any, text: str) -> None:
    text_stream = TextStream(smollm2, ("<stop>",))
    tokens = smollm2.encode(f"{text}<stop>")
    assert "".join(text_stream.push(token) for token in tokens) == decode(smollm2, tokens).removesuffix("<stop>")
    assert text_stream.is_stopped
    assert [text_stream.push(token) for token in tokens] == [""] * len(tokens)
    assert text_stream.finish() == ""


# prompts


def test_text_is_encoded_with_the_tokenizers_special_tokens(smollm2: Any) -> None:
    assert encode(smollm2, "Hello, 世界", vocab_size=49152) == smollm2.encode("Hello, 世界")
    llama = llama_like()
    assert encode(llama, "the a", vocab_size=len(llama)) == [1, *llama.convert_tokens_to_ids(["▁the", "▁a"])]


def test_messages_go_through_the_template(smollm2: Any) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert smollm2.decode(encode(smollm2, messages, vocab_size=49152)) == text


def test_a_template_with_bos_gets_one_bos() -> None:
    llama = llama_like()
    llama.chat_template = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
    ids = encode(llama, [{"role": "user", "content": "the"}], vocab_size=len(llama))
    assert ids == llama.encode("<s>the", add_special_tokens=False)
    assert ids.count(1) == 1


def test_ids_stay_as_they_are(smollm2: Any) -> None:
    assert encode(smollm2, [0, 5, 49151], vocab_size=49152) == [0, 5, 49151]
    assert encode(None, [3, 3, 1], vocab_size=4) == [3, 3, 1]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        (None, "a prompt is a text, a list of chat messages or .*, not None"),
        (5, "not 5"),
        (b"text", "not b'text'"),
        ({"role": "user", "content": "x"}, "a list of chat messages"),
        ([1, "a"], "not \\[1, 'a'\\]"),
        ([True], "not \\[True\\]"),
        ([1.0], "not \\[1.0\\]"),
        (["text"], "not \\['text'\\]"),
        ([1, 49152], "token id 49152 is outside the model's vocabulary of 49152"),
        ([-1], "token id -1 is outside"),
        ([{}], "needs a role and a content"),
        ([{"role": "user"}], "needs a role and a content"),
        ([{"role": "user", "content": "x"}, 5], "needs a role and a content"),
        ([{"role": "user", "content": 5}], "the chat template refuses these messages"),
        ([{"role": None, "content": "x"}], "the chat template refuses these messages"),
        ("a\ud800b", "not valid Unicode text"),
        ([{"role": "user", "content": "\udfff"}], "not valid Unicode text"),
    ],
)
def test_bad_prompts(smollm2: Any, prompt: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        encode(smollm2, prompt, vocab_size=49152)


def test_text_outside_the_models_vocabulary(smollm2: Any) -> None:
    with pytest.raises(PromptError, match="outside the model's vocabulary of 100"):
        encode(smollm2, "Hello", vocab_size=100)


def test_no_template_and_no_tokenizer() -> None:
    with pytest.raises(PromptError, match="no chat template"):
        encode(llama_like(), [{"role": "user", "content": "x"}], vocab_size=300)
    with pytest.raises(PromptError, match="no chat template"):
        encode(None, [{"role": "user", "content": "x"}], vocab_size=300)
    with pytest.raises(PromptError, match="no tokenizer"):
        encode(None, "text", vocab_size=300)
