"""Training: what is read, what heads are asked for, how they learn; and heads that speed up a tiny target of their own.

That target sings: it knows six songs of eight letters by heart, so that what comes next can be foreseen.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import random
import re
import shutil
import signal
from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from conftest import Ran, ToyTarget, plain_loop
from safetensors.torch import load_file
from test_hf import build
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor

import flashspec
from flashspec.backends.hf import HFTarget, use_grouped_attention
from flashspec.core import Draft, Drafter, SamplingParams
from flashspec.drafters.eagle import EagleDrafter
from flashspec.drafters.hybrid import HybridDrafter
from flashspec.drafters.medusa import MedusaDrafter
from flashspec.engine import LocalEngine
from flashspec.errors import FlashSpecError, OptionError, PromptError
from flashspec.heads.eagle import EagleConfig, EagleHead
from flashspec.heads.files import read_medusa
from flashspec.heads.medusa import MedusaHeads
from flashspec.train import data, fit
from flashspec.train.data import Document, Example, Features, answered, encoded, read_examples
from flashspec.train.fit import Plan, Progress, Stopped, Trainer
from flashspec.train.objectives import (
    Batch,
    Counts,
    EagleObjective,
    MedusaObjective,
    Objective,
    Teacher,
    count,
    loss_of,
)
from flashspec.train.run import Report, TrainOptions, train
from flashspec.tree import paths

KINDS = ["medusa", "eagle3"]

# what is read


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in zip(itertools.cycle(["user", "assistant"]), contents)]


def shared(*contents: str) -> list[dict[str, str]]:
    return [{"from": role, "value": text} for role, text in zip(itertools.cycle(["human", "gpt"]), contents)]


SYSTEM = {"role": "system", "content": "be brief"}
ROWS: list[tuple[dict[str, Any], Example]] = [
    ({"messages": turns("q", "a")}, Example(turns("q"), "a")),
    ({"messages": turns("q")}, Example(turns("q"))),
    ({"messages": [SYSTEM, *turns("q", "a", "r", "b")]}, Example([SYSTEM, *turns("q", "a", "r")], "b")),
    ({"messages": [*turns("q", "a"), {"role": "assistant", "content": "more"}]}, Example(turns("q"), "a")),
    ({"conversations": shared("q", "a")}, Example(turns("q"), "a")),
    ({"conversations": [{"from": "system", "value": "be brief"}, *shared("q")]}, Example([SYSTEM, *turns("q")])),
    ({"messages": [], "prompt": "q"}, Example(turns("q"))),
    ({"prompt": "q"}, Example(turns("q"))),
    *(
        ({"prompt": "q", name: "a", "n": 1}, Example(turns("q"), "a"))
        for name in ("answer", "completion", "response", "output")
    ),
    ({"prompt": "q", "answer": None}, Example(turns("q"))),
    ({"text": "plain"}, Example("plain")),
    ({"text": "一\u2028二\u0085三 🙂"}, Example("一\u2028二\u0085三 🙂")),
]


def write(file: Path, *rows: dict[str, Any], ascii_only: bool = False) -> Path:
    lines = [json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")
    return file


@pytest.mark.parametrize("ascii_only", [False, True])
def test_every_kind_of_row_is_read(tmp_path: Path, ascii_only: bool) -> None:
    file = write(tmp_path / "data.jsonl", *(row for row, _ in ROWS), ascii_only=ascii_only)
    assert read_examples(file) == [example for _, example in ROWS]


def test_a_mark_at_the_start_and_windows_line_ends_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n  {"text": "two"}')
    (tmp_path / "more.txt").write_bytes(b"\xef\xbb\xbfthree\r\n")
    assert read_examples(tmp_path) == [Example("one"), Example("two"), Example("three\n")]


def test_a_folder_is_read_in_order_and_long_texts_in_pieces(tmp_path: Path) -> None:
    (tmp_path / "b" / "folder.md").mkdir(parents=True)
    (tmp_path / "b" / "folder.md" / "note.md").write_text("nested", encoding="utf-8")
    write(tmp_path / "c.jsonl", {"text": "row"})
    text = "é" * data.PIECE + " " * data.PIECE + "end"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "blank.py").write_text(" \n", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\xff")
    assert read_examples(tmp_path) == [Example(text) for text in ("é" * data.PIECE, "end", "nested", "row")]


BAD_ROWS = {
    "no JSON": ("{", "is not JSON"),
    "two objects": ('{"text": "a"} {"text": "b"}', "is not JSON"),
    "deep": ("[" * 100_000, "is not JSON"),
    "half a character": (r'{"prompt": "\ud83d"}', "is not Unicode text"),
    "half a character of an answer": (r'{"messages": [{"role": "user", "content": "a\udc00"}]}', "is not Unicode text"),
    "list": ('["text"]', 'has no "messages", "prompt" or "text"'),
    "number": ("3", 'has no "messages"'),
    "other keys": ('{"question": "q"}', 'has no "messages".*question'),
    "empty text": ('{"text": " "}', 'has no "messages"'),
    "text of another type": ('{"text": 3, "prompt": ["q"]}', 'has no "messages"'),
    "other role": ('{"messages": [{"role": "tool", "content": "a"}]}', 'has no "messages".*tool'),
    "role of another type": ('{"messages": [{"role": ["user"], "content": "a"}]}', 'has no "messages"'),
    "turn of another type": ('{"messages": ["a"]}', 'has no "messages"'),
    "content of another type": ('{"messages": [{"role": "user", "content": [1]}]}', 'has no "messages"'),
    "answer only": ('{"messages": [{"role": "assistant", "content": "a"}]}', 'has no "messages"'),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, kind: str) -> None:
    row, message = BAD_ROWS[kind]
    (tmp_path / "data.jsonl").write_text(f'{{"text": "fine\u2028"}}\n\n{row}\n', encoding="utf-8")
    with pytest.raises(OptionError, match=rf"data\.jsonl, line 3 {message}"):
        read_examples(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"", r"a\.jsonl holds no text to learn from"),
        ("a.txt", b" \n", r"a\.txt holds no text to learn from"),
        ("a.jsonl", b'{"text": "\xff"}', r"cannot read .*a\.jsonl.*must be text in UTF-8"),
        ("a.txt", b"\xff", r"cannot read .*a\.txt.*must be text in UTF-8"),
        ("a.jsonl", None, r"no data at .*a\.jsonl; name a \.jsonl file or a folder"),
    ],
)
def test_files_without_text(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(OptionError, match=message):
        read_examples(tmp_path / name)


def test_a_folder_without_texts(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\xff")
    with pytest.raises(OptionError, match=r"holds no text to learn from; it may be .* of \.jsonl, \.txt"):
        read_examples(tmp_path)


# tokens


class Letters:
    """A tokenizer with a token for each character, and 1 before a text."""

    def __init__(self, *, has_template: bool = True) -> None:
        self.chat_template = "there is one" if has_template else None

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **options: bool) -> str:
        assert options == {"tokenize": False, "add_generation_prompt": True}
        return "".join(f"{turn['role'][0]}:{turn['content']};" for turn in messages) + "a:"


def document(
    example: Example, *, regenerate: bool, has_template: bool = True, max_length: int = 200, vocab_size: int = 256
) -> tuple[str, int]:
    """Text and start of what is encoded; a token 1 shows as ^."""
    found = encoded(
        Letters(has_template=has_template), example,
        vocab_size=vocab_size, max_length=max_length, regenerate=regenerate,
    )  # fmt: skip
    return "".join(chr(token) for token in found.tokens).replace("\x01", "^"), found.start


def test_conversations_are_written_by_the_template() -> None:
    example = Example(turns("q", "a", "r"), "b")
    assert document(example, regenerate=True) == ("u:q;a:a;u:r;a:", 14)
    assert document(example, regenerate=False) == ("u:q;a:a;u:r;a:b", 14)


def test_conversations_are_plain_text_without_a_template() -> None:
    example = Example(turns("q", "a", "r"), "b")
    assert document(example, regenerate=True, has_template=False) == ("^q\n\na\n\nr\n\n", 10)
    assert document(example, regenerate=False, has_template=False) == ("^q\n\na\n\nr\n\nb", 10)


def test_the_target_goes_on_from_half_of_a_plain_text_and_not_more_than_its_beginning() -> None:
    assert document(Example("abcdefg"), regenerate=True) == ("^abc", 4)
    assert document(Example("x" * 190), regenerate=True) == ("^" + "x" * (data.PLAIN_PROMPT - 1), data.PLAIN_PROMPT)
    assert document(Example("abcdefg"), regenerate=False) == ("^abcdefg", 1)


def test_a_text_of_one_token_is_a_prompt() -> None:
    found = encoded(Letters(), Example(turns("")), vocab_size=256, max_length=9, regenerate=True)
    assert found.tokens
    assert document(Example(""), regenerate=True) == ("^", 1)


def test_what_is_too_long_is_cut() -> None:
    assert document(Example(turns("question"), "answer"), regenerate=True, max_length=6)[0] == "u:ques"
    assert document(Example(turns("q"), "answer"), regenerate=False, max_length=9) == ("u:q;a:ans", 6)
    assert document(Example("abcdefg"), regenerate=False, max_length=5) == ("^abcd", 1)
    assert document(Example("abcdefg"), regenerate=True, max_length=3) == ("^ab", 3)


def test_prompts_without_answers_cannot_be_learned_as_they_are() -> None:
    with pytest.raises(PromptError, match="prompts without answers; leave out --as-is"):
        document(Example(turns("q")), regenerate=False)


@pytest.mark.parametrize(
    ("example", "regenerate"),
    [
        (Example("x{"), True),
        (Example("x{"), False),
        (Example(turns("{"), "a"), True),
        (Example(turns("{"), "a"), False),
        (Example(turns("q"), "{"), False),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(example: Example, regenerate: bool) -> None:
    with pytest.raises(PromptError, match="token id 123 is outside the model's vocabulary of 123"):
        document(example, regenerate=regenerate, vocab_size=123)


# what the target says


DOCUMENTS = [Document([1 + i % 7, 2, 3 + i % 4][: 1 + i % 3], 1 + i % 3) for i in range(11)]
LENGTH = 14  # tokens of the longest text


class Singer:
    """Answers ``DOCUMENTS`` with a toy target that sometimes ends a text; counts what it is asked."""

    def __init__(self, file: Path, *, max_batch: int = 3) -> None:
        self.file = file
        self.engine = LocalEngine(ToyTarget(eos=[11]), num_speculative_tokens=0, max_batch=max_batch)
        self.asked: list[list[int]] = []
        self.reports: list[tuple[int, int]] = []
        self.add, self.engine.add = self.engine.add, self._add  # type: ignore[method-assign]

    def _add(self, prompt: list[int], *rest: Any) -> str:
        self.asked.append(list(prompt))
        return self.add(prompt, *rest)

    def answers(self, documents: Seq[Document] = DOCUMENTS, *, stop_after: int | None = None) -> list[Document]:
        def report(done: int, total: int) -> None:
            self.reports.append((done, total))
            if done == stop_after:
                raise Stopped

        return answered(
            self.engine, documents, self.file, max_tokens=12, max_length=LENGTH, temperature=1.0, report=report
        )


def plain_answer(number: int) -> Document:
    prompt = DOCUMENTS[number].tokens
    sampling = SamplingParams(
        temperature=float(number % 2), top_k=data.MOST_LIKELY, seed=number, max_tokens=min(12, LENGTH - len(prompt))
    )
    return Document(prompt + plain_loop(ToyTarget().logits, prompt, sampling, eos=[11]), len(prompt))


@pytest.mark.parametrize("max_batch", [1, 3, 16])
def test_even_prompts_are_answered_greedily_and_odd_ones_by_sampling(tmp_path: Path, max_batch: int) -> None:
    singer = Singer(tmp_path / "answers", max_batch=max_batch)
    found = singer.answers()
    assert found == [plain_answer(i) for i in range(len(DOCUMENTS))]
    assert len({len(answer.tokens) for answer in found}) > 2, "some answers end by themselves"
    assert singer.reports == [(done, 11) for done in range(12)]


@pytest.mark.parametrize("cut", [0, 1, 9])
def test_answers_go_on_after_an_interruption(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "answers"
    whole = Singer(tmp_path / "other").answers()
    with pytest.raises(Stopped):
        Singer(file).answers(stop_after=5)
    file.write_bytes(file.read_bytes()[: -cut or None])
    again = Singer(file, max_batch=2)
    assert again.answers() == whole
    assert len(again.asked) == 6 + (cut > 1)
    third = Singer(file)
    assert third.answers() == whole
    assert third.asked == []


def test_prompts_without_room_for_an_answer_are_left_out(tmp_path: Path) -> None:
    found = Singer(tmp_path / "answers").answers([DOCUMENTS[0], Document([3] * LENGTH, LENGTH), DOCUMENTS[2]])
    assert found == [plain_answer(0), plain_answer(2)]


def test_an_aborted_answer_is_not_kept(tmp_path: Path) -> None:
    singer = Singer(tmp_path / "answers")
    target = singer.engine.target
    assert isinstance(target, ToyTarget)
    sane = target.logits
    target.logits = lambda context: sane(context) * (math.nan if context[:2] == [3, 2] else 1)  # type: ignore
    wanted = [plain_answer(i) for i in range(len(DOCUMENTS)) if DOCUMENTS[i].tokens[:2] != [3, 2]]
    assert singer.answers() == wanted
    assert len(wanted) < len(DOCUMENTS)


# hidden states

VOCAB = 61
MIDDLE, LAST = (1, 3), 4


@functools.cache
def target() -> HFTarget:
    """A random Llama with grouped queries, in which everything matters."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config).eval().requires_grad_(False)
    shaken(model)
    use_grouped_attention(model)
    return HFTarget(model)


def shaken(network: torch.nn.Module) -> None:
    """Norms and biases that are not 1 and 0."""
    for parameter in network.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)


def some_texts(count: int, *, longest: int, seed: int = 0, vocab: int = VOCAB) -> list[Document]:
    rng = random.Random(seed)
    texts = [rng.choices(range(vocab), k=rng.randint(5, longest)) for _ in range(count)]
    return [Document(text, rng.randint(1, len(text) - 3)) for text in texts]


class Reader:
    """The target's hidden states, and which texts they were asked of."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.texts: list[list[int]] = []
        self.stop_after = stop_after

    def __call__(self, texts: list[list[int]], layers: Seq[int]) -> list[Tensor]:
        if self.stop_after is not None and len(self.texts) >= self.stop_after:
            raise Stopped
        self.texts += texts
        return target().hidden_states(texts, layers)


TEXTS = some_texts(9, longest=20)


def features(folder: Path, layers: Seq[int] = (*MIDDLE, LAST), texts: Seq[Document] = TEXTS) -> Features:
    return Features(folder, texts, layers=layers, width=32)


def computed(found: Features, reader: Reader) -> Features:
    found.compute(reader, lambda done, total: None)
    return found


@pytest.fixture
def _small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "BATCH_TOKENS", 40)


def assert_are_the_targets(found: Features, layers: Seq[int]) -> None:
    for text, (first, _, last) in zip(TEXTS, found.bounds, strict=True):
        with torch.inference_mode():
            output = target().model(torch.tensor([text.tokens]), output_hidden_states=True)
        wanted = torch.cat([output.hidden_states[layer][0] for layer in layers], -1)
        states = found.at(first, last, layers)
        assert states.dtype is torch.float16
        torch.testing.assert_close(states.float(), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("_small_batches")
def test_states_are_those_of_each_text_alone(tmp_path: Path) -> None:
    reader, reports = Reader(), list[tuple[int, int]]()
    found = features(tmp_path)
    found.compute(reader, lambda done, total: reports.append((done, total)))
    assert found.tokens.tolist() == [token for text in TEXTS for token in text.tokens]
    starts = [start - first for first, start, _ in found.bounds]
    assert starts == [text.start for text in TEXTS]
    assert reader.texts == [text.tokens for text in TEXTS]
    assert len(reports) > 3
    assert reports[-1] == (9, 9)
    assert_are_the_targets(found, (*MIDDLE, LAST))
    assert_are_the_targets(found, (LAST, 1))


def test_texts_of_one_length_need_no_padding(tmp_path: Path) -> None:
    texts = [Document([i, i + 1, i + 2, 4], 1) for i in range(3)]
    found = computed(features(tmp_path, texts=texts), Reader())
    alone = torch.cat([target().hidden_states([text.tokens], (*MIDDLE, LAST))[0] for text in texts])
    torch.testing.assert_close(found.at(0, 12).float(), alone, rtol=2e-3, atol=2e-3)


@pytest.mark.usefixtures("_small_batches")
def test_states_are_computed_once_also_after_an_interruption(tmp_path: Path) -> None:
    first, second = Reader(stop_after=4), Reader()
    with pytest.raises(Stopped):
        computed(features(tmp_path), first)
    found = computed(features(tmp_path), second)
    assert first.texts + second.texts == [text.tokens for text in TEXTS]
    assert_are_the_targets(found, (*MIDDLE, LAST))
    third = Reader()
    assert_are_the_targets(computed(features(tmp_path), third), (*MIDDLE, LAST))
    assert third.texts == []


@pytest.mark.usefixtures("_small_batches")
def test_another_set_of_layers_computes_what_is_missing(tmp_path: Path) -> None:
    computed(features(tmp_path, (LAST,)), Reader())
    asked: list[tuple[int, ...]] = []

    def read(texts: list[list[int]], layers: Seq[int]) -> list[Tensor]:
        asked.append(tuple(layers))
        return target().hidden_states(texts, layers)

    found = features(tmp_path, (1, 3, LAST))
    found.compute(read, lambda done, total: None)
    assert set(asked) == {(1, 3)}
    assert_are_the_targets(found, (1, 3, LAST))


@pytest.mark.parametrize("damage", ["cut", "gone", "mark gone", "mark spoiled"])
def test_damaged_files_are_computed_anew(tmp_path: Path, damage: str) -> None:
    computed(features(tmp_path), Reader())
    file = next(tmp_path.glob("*-3.f16"))
    mark = file.with_suffix(".done")
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-2])
    elif damage == "gone":
        file.unlink()
    elif damage == "mark gone":
        mark.unlink()
    else:
        mark.write_text("nine", encoding="utf-8")
    reader = Reader()
    assert_are_the_targets(computed(features(tmp_path), reader), (*MIDDLE, LAST))
    assert reader.texts == [text.tokens for text in TEXTS]


def test_other_texts_have_files_of_their_own(tmp_path: Path) -> None:
    computed(features(tmp_path, texts=TEXTS[::-1]), Reader())
    reader = Reader()
    assert_are_the_targets(computed(features(tmp_path), reader), (*MIDDLE, LAST))
    assert len(reader.texts) == len(TEXTS)


def test_states_beyond_half_precision_become_its_largest_number(tmp_path: Path) -> None:
    def huge(texts: list[list[int]], layers: Seq[int]) -> list[Tensor]:
        return [torch.tensor([-1e9, 1e9]).repeat(len(text), 16) for text in texts]

    found = Features(tmp_path, TEXTS, layers=(0,), width=32)
    found.compute(huge, lambda done, total: None)
    assert found.at(3, 4).tolist() == [[-data.MOST_FLOAT16, data.MOST_FLOAT16] * 16]


# what heads are asked for


def batch_of(texts: Seq[Document], layers: Seq[int]) -> Batch:
    """The target's states, and garbage in what is padding."""
    width = max(len(text.tokens) for text in texts)
    tokens, states = torch.full((len(texts), width), 7), torch.full((len(texts), width, 32 * len(layers)), 9.0)
    for row, text in enumerate(texts):
        tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
        states[row, : len(text.tokens)] = target().hidden_states([text.tokens], layers)[0]
    return Batch(
        tokens, states, torch.tensor([text.start for text in texts]), torch.tensor([len(text.tokens) for text in texts])
    )


def eagle_head(*flags: str, tokens: Tensor | None, kv_heads: int = 2, seed: int = 5) -> EagleHead:
    torch.manual_seed(seed)
    layer = tf.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=128,
    )  # fmt: skip
    size = VOCAB if tokens is None else len(tokens)
    made = EagleConfig(
        layer=layer, draft_vocab_size=size, target_hidden_size=32, feature_layers=MIDDLE,
        **dict.fromkeys(flags, True),
    )  # fmt: skip
    head = EagleHead(made, tokens=tokens)
    model = target().model
    head.start_from(model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    shaken(head)
    return head.eval()


def medusa_heads(num_heads: int = 3, *, tokens: Tensor | None = None, num_layers: int = 2) -> MedusaHeads:
    torch.manual_seed(6)
    heads = MedusaHeads(32, VOCAB, num_heads=num_heads, num_layers=num_layers, tokens=tokens)
    heads.start_from(target().model.get_output_embeddings().weight)
    for parameter in heads.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return heads


SOME = torch.tensor(sorted(random.Random(0).sample(range(VOCAB), 40)))


def drafts_of(drafter: Drafter, num_speculative_tokens: int) -> list[tuple[list[int], Draft]]:
    """Of real decoding, with what was written before each of them."""
    seen: list[tuple[list[int], Draft]] = []
    propose = drafter.propose

    def record(seqs: Any, budgets: Any) -> list[Draft]:
        drafts = propose(seqs, budgets)
        seen.extend((list(seq.tokens), draft) for seq, draft in zip(seqs, drafts, strict=True) if len(draft))
        return drafts

    drafter.propose = record  # type: ignore[method-assign]
    engine = LocalEngine(target(), drafter, num_speculative_tokens=num_speculative_tokens)
    engine.generate([[1, 2, 3], [5], [7, 8, 9, 10]], SamplingParams(max_tokens=12))
    assert len(seen) > 9
    return seen


def assert_guesses_what_was_drafted(objective: Objective, seen: list[tuple[list[int], Draft]]) -> None:
    """Each node of each draft, as the objective sees it once the path to the node is the text."""
    ids = list(range(VOCAB)) if objective.tokens is None else objective.tokens.tolist()
    for tokens, draft in seen:
        assert draft.confidences is not None
        nodes = paths(draft.parents)
        texts = [Document([*tokens, *(draft.tokens[node] for node in path)], 1) for path in nodes]
        batch = batch_of(texts, objective.layers)
        with torch.no_grad():
            found = list(objective.guesses(batch))
        for row, path in enumerate(nodes):
            guesses = found[len(path) - 1]
            at = guesses.places.tolist().index(row * batch.tokens.shape[1] + len(tokens) - 2)
            assert guesses.ahead == len(path) + 1
            chances = guesses.logits[at].softmax(-1)
            assert float(chances[ids.index(draft.tokens[row])]) == pytest.approx(draft.confidences[row], abs=2e-5)
            if draft.is_chain:
                assert ids[int(chances.argmax())] == draft.tokens[row]


FLAGS = ["norm_before_fc", "norm_output", "norm_before_residual"]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(
    ("flags", "tokens", "kv_heads"),
    [([], None, 4), ([FLAGS[0]], SOME, 2), ([FLAGS[1]], SOME, 1), ([FLAGS[2]], None, 2), (FLAGS, SOME, 4)],
)
def test_eagle_learns_what_it_drafts(flags: list[str], tokens: Tensor | None, kv_heads: int, width: int) -> None:
    head = eagle_head(*flags, tokens=tokens, kv_heads=kv_heads)
    seen = drafts_of(EagleDrafter(head, max_length=128, width=width), 3 + width)
    assert all(draft.is_chain for _, draft in seen) == (width == 1)
    assert_guesses_what_was_drafted(EagleObjective(head, last_layer=LAST, num_steps=3 + width), seen)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("tokens", [None, SOME], ids=["all", "some"])
def test_medusa_learns_what_it_drafts(tokens: Tensor | None, width: int) -> None:
    heads = medusa_heads(tokens=tokens)
    seen = drafts_of(MedusaDrafter(heads, width=width), 4 * width)
    assert_guesses_what_was_drafted(MedusaObjective(heads, layer=LAST), seen)


LEARNED = [*some_texts(6, longest=12, seed=3), Document([1, 2, 3, 4, 5, 6], 3), Document([9, 8, 7, 6], 1)]


def plainly_foreseen(ahead: int) -> set[tuple[int, int]]:
    """(text, place) from which a token is guessed that lies behind the one that the target itself gives."""
    return {
        (row, place)
        for row, text in enumerate(LEARNED)
        for place in range(len(text.tokens))
        if place + 1 >= text.start and place + ahead < len(text.tokens)
    }


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_asked_for_neither_in_the_prompt_nor_beyond_the_end(kind: str) -> None:
    made = objective(kind)
    batch = batch_of(LEARNED, made.layers)
    width = batch.tokens.shape[1]
    for step, guesses in enumerate(made.guesses(batch)):
        assert guesses.ahead == step + 2
        assert {divmod(place, width) for place in guesses.places.tolist()} == plainly_foreseen(step + 2)
        assert len(guesses.logits) == len(guesses.places)
        assert batch.foreseen(guesses.ahead).flatten().nonzero().squeeze(1).tolist() == guesses.places.tolist()


def objective(kind: str, tokens: Tensor | None = SOME) -> Objective:
    if kind == "medusa":
        return MedusaObjective(medusa_heads(tokens=tokens), layer=LAST)
    return EagleObjective(eagle_head(FLAGS[0], tokens=tokens), last_layer=LAST, num_steps=3)


def teacher(tokens: Tensor | None = SOME) -> Teacher:
    return Teacher(target().model.get_output_embeddings().weight, tokens)


@pytest.mark.parametrize("tokens", [None, SOME], ids=["all", "some"])
def test_the_teacher_says_what_the_target_says(tokens: Tensor | None) -> None:
    batch = batch_of(LEARNED, (1, LAST))
    probs, numbers, row = teacher(tokens).likeliest(batch)
    ids = torch.arange(VOCAB) if tokens is None else tokens
    seen = 0
    for number, place in sorted(plainly_foreseen(1)):
        logits = target().plain_logits(LEARNED[number].tokens[: place + 1])[ids]
        order = logits.argsort(descending=True)[:16]
        at = int(row[number * batch.tokens.shape[1] + place])
        assert numbers[at].tolist() == order.tolist()
        torch.testing.assert_close(probs[at], logits[order].softmax(-1), rtol=1e-3, atol=1e-5)
        seen += 1
    assert len(probs) == seen
    assert int((row >= 0).sum()) == seen


def logits_by_place(made: Objective, batch: Batch) -> list[dict[tuple[int, int], Tensor]]:
    width = batch.tokens.shape[1]
    with torch.no_grad():
        return [
            {divmod(place, width): row for place, row in zip(guesses.places.tolist(), guesses.logits, strict=True)}
            for guesses in made.guesses(batch)
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_cross_entropy_with_the_target_weighted_by_distance(kind: str) -> None:
    made = objective(kind)
    batch = batch_of(LEARNED, made.layers)
    total = weights = 0.0
    for step, rows in enumerate(logits_by_place(made, batch)):
        losses = []
        for (number, place), logits in rows.items():
            truth = target().plain_logits(LEARNED[number].tokens[: place + step + 2])[SOME]
            order = truth.argsort(descending=True)[:16]
            losses.append(-float((truth[order].softmax(-1) * logits.log_softmax(-1)[order]).sum()))
        total += 0.8**step * sum(losses) / len(losses)
        weights += 0.8**step
    assert loss_of(made, teacher(), batch).item() == pytest.approx(total / weights, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_reads_nothing_that_heads_could_not_have_seen(kind: str) -> None:
    made = objective(kind)
    batch = batch_of(LEARNED, made.layers)
    batch.states.requires_grad_()
    loss_of(made, teacher(), batch).backward()
    assert batch.states.grad is not None
    features = batch.states.grad[..., : 32 * max(len(made.layers) - 1, 1)].abs().sum(-1)
    for number, text in enumerate(LEARNED):
        first = text.start - 1 if kind == "medusa" else 0  # EAGLE attends to the prompt
        read = features[number].nonzero().squeeze(1).tolist()
        assert read == list(range(first, len(text.tokens) - 2))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind: str) -> None:
    made = objective(kind)
    short = replace_padding(batch_of(LEARNED, made.layers), 7, 9.0)
    other = replace_padding(short, 11, -30.0)
    assert loss_of(made, teacher(), short).item() == loss_of(made, teacher(), other).item()


def replace_padding(batch: Batch, token: int, state: float) -> Batch:
    """Three more columns, and what is padding filled with these."""
    tokens = torch.nn.functional.pad(batch.tokens, (0, 3))[:, : 12 + 3]
    states = torch.nn.functional.pad(batch.states, (0, 0, 0, 3))[:, : 12 + 3]
    is_padding = torch.arange(tokens.shape[1]) >= batch.lengths[:, None]
    return Batch(
        tokens.masked_fill(is_padding, token), states.masked_fill(is_padding[..., None], state), batch.starts,
        batch.lengths,
    )  # fmt: skip


def test_the_loss_falls_to_the_entropy_and_not_below() -> None:
    """Texts whose state never changes: heads that are the target's output layer foresee all there is to foresee."""
    torch.manual_seed(0)
    weight, states = torch.randn(12, 8), torch.randn(5, 1, 8).expand(5, 9, 8)
    batch = Batch(torch.randint(12, (5, 9)), states, torch.tensor([1, 2, 3, 1, 4]), torch.tensor([9, 8, 9, 5, 7]))
    heads = MedusaHeads(8, 12, num_heads=2)
    heads.start_from(weight)
    made, target_side = MedusaObjective(heads, layer=0), Teacher(weight, None)
    p = (states[:, 0] @ weight.T).softmax(-1)
    entropies = -(p * p.log()).sum(-1)
    means = []
    for ahead in (2, 3):
        places = batch.foreseen(ahead).sum(1)
        means.append(float((entropies * places).sum() / places.sum()))
    entropy = (means[0] + 0.8 * means[1]) / 1.8
    assert loss_of(made, target_side, batch).item() == pytest.approx(entropy, abs=1e-5)
    for parameter in heads.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    losses = []
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.03, weight_decay=0.0)
    for _ in range(150):
        loss = loss_of(made, target_side, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() - entropy)
    assert losses[0] > 0.3
    assert min(losses) > -1e-5
    assert losses[-1] < 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [None, SOME], ids=["all", "some"])
def test_counts_are_those_of_a_plain_loop(kind: str, tokens: Tensor | None) -> None:
    made = objective(kind, tokens)
    ids = list(range(VOCAB)) if tokens is None else tokens.tolist()
    texts = [said(text, made) for text in some_texts(12, longest=14, seed=4)]
    batches = [batch_of(texts[:7], made.layers), batch_of(texts[7:], made.layers)]
    found = Counts.empty(3)
    tried, hits, unbroken, whole = [0] * 3, [[0, 0] for _ in range(3)], [0] * 3, [0] * 3
    for batch, some in zip(batches, (texts[:7], texts[7:]), strict=True):
        count(made, teacher(tokens), batch, found)
        rows = logits_by_place(made, batch)
        for number, place in rows[0]:
            is_unbroken = True
            for step, row in enumerate(rows):
                if (number, place) not in row:
                    continue
                came = some[number].tokens[place + step + 2]
                best = [ids[i] for i in row[number, place].argsort(descending=True).tolist()]
                tried[step] += 1
                hits[step][0] += came == best[0]
                hits[step][1] += came in best[:5]
                is_unbroken = is_unbroken and came == best[0]
                unbroken[step] += is_unbroken
                whole[step] += 1
    assert (found.tried, found.hits, found.unbroken, found.whole) == (tried, hits, unbroken, whole)
    assert found.accuracies == [[hit / tried[step] for hit in hits[step]] for step in range(3)]
    assert found.expected_length == 1 + sum(held / n for held, n in zip(unbroken, whole, strict=True))
    assert 0 < unbroken[2] < unbroken[1] < unbroken[0] < whole[0]
    assert unbroken[1] < hits[1][0] < hits[1][1]


def said(text: Document, made: Objective) -> Document:
    """The text with most of its tokens replaced by what the head guesses there, three from a place."""
    ids = torch.arange(VOCAB) if made.tokens is None else made.tokens
    tokens, rng = list(text.tokens), random.Random(len(text.tokens))
    for place, step in itertools.product(range(text.start - 1, len(tokens), 3), range(3)):
        if place + step + 2 < len(tokens) and rng.random() < 0.7:
            rows = logits_by_place(made, batch_of([Document(tokens, text.start)], made.layers))
            tokens[place + step + 2] = int(ids[rows[step][0, place].argmax()])
    return Document(tokens, text.start)


def test_nothing_tried_is_nothing_expected() -> None:
    assert Counts.empty(2).expected_length == 1
    assert Counts.empty(2).accuracies == [[0.0, 0.0], [0.0, 0.0]]


# how they learn

WIDTH, WORDS = 8, 40
CPU = torch.device("cpu")
PLAN = Plan(epochs=2, lr=0.01, batch_size=8, seq_len=16, seed=3)
LESSONS = some_texts(61, longest=40, seed=8, vocab=WORDS)


def made_up(texts: list[list[int]], layers: Seq[int]) -> list[Tensor]:
    """Stands for a target's hidden states: each token's, and a trace of those before it."""
    generator = torch.Generator().manual_seed(0)
    tables = torch.randn(5, WORDS, WIDTH, generator=generator)[list(layers)].transpose(0, 1).flatten(1)
    return [tables[text] + 0.5 * tables[text].cumsum(0) / len(text) for text in map(torch.tensor, texts)]


def little_eagle(num_steps: int) -> Objective:
    layer = tf.LlamaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64,
    )  # fmt: skip
    head = EagleHead(EagleConfig(layer=layer, draft_vocab_size=WORDS, target_hidden_size=WIDTH, feature_layers=(1, 2)))
    head.embed_tokens.requires_grad_(False)
    return EagleObjective(head, last_layer=4, num_steps=num_steps)


class Pupil:
    """A small network that learns from made-up states, and every batch that it was shown."""

    def __init__(
        self, folder: Path, kind: str = "medusa", *, plan: Plan = PLAN, lessons: Seq[Document] = LESSONS,
        init: int = 0, num_guesses: int = 3, num_layers: int = 1, tokens: Tensor | None = None,
    ) -> None:  # fmt: skip
        torch.manual_seed(init)
        made = little_eagle(num_guesses)
        if kind == "medusa":
            heads = MedusaHeads(WIDTH, WORDS, num_heads=num_guesses, num_layers=num_layers, tokens=tokens)
            made = MedusaObjective(heads, layer=4)
        learned = Features(folder, lessons, layers=made.layers, width=WIDTH)
        learned.compute(made_up, lambda done, total: None)
        weight = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(1))
        self.learned: list[Batch] = []
        self.tested: list[Batch] = []
        self.progress: list[Progress] = []
        self.rates: list[float] = []
        self.guesses, made.guesses = made.guesses, self._guesses  # type: ignore[method-assign]
        self.trainer = Trainer(
            made, Teacher(weight, made.tokens), learned, plan, checkpoint=folder / "checkpoint.pt", device=CPU
        )

    def _guesses(self, batch: Batch) -> Any:
        (self.learned if self.trainer.objective.network.training else self.tested).append(batch)
        return self.guesses(batch)

    def run(self, stop_after: int | None = None) -> Counts:
        def report(progress: Progress) -> None:
            self.progress.append(progress)
            if progress.counts is None:
                self.rates.append(self.trainer.optimizer.param_groups[0]["lr"])

        return self.trainer.run(report, is_stopped=lambda: self.trainer.step == stop_after)

    def stopped(self, after: int) -> Pupil:
        with pytest.raises(Stopped):
            self.run(after)
        return self

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.trainer.objective.network.state_dict().items()}

    @property
    def per_epoch(self) -> int:
        return self.trainer.num_steps // self.trainer.plan.epochs


def windows(documents: Seq[Document]) -> list[tuple[list[int], int]]:
    """The texts in pieces of 16 tokens that leave three to foresee, and where each begins to count."""
    pieces = [
        (text.tokens[at : at + 16], max(text.start - at, 1)) for text in documents for at in range(0, 40, 16)
    ]  # fmt: skip
    return sorted((tokens, start) for tokens, start in pieces if len(tokens) - start >= 3)


def shown(batches: Seq[Batch]) -> list[tuple[list[int], int]]:
    return [
        (tokens[:length].tolist(), int(start))
        for batch in batches
        for tokens, start, length in zip(batch.tokens, batch.starts, batch.lengths, strict=True)
    ]


HELD_OUT = LESSONS[:: fit.HELD_OUT]
TAUGHT = [text for i, text in enumerate(LESSONS) if i % fit.HELD_OUT]


def test_each_epoch_shows_every_window_once_and_in_another_order(tmp_path: Path) -> None:
    pupil, again, other = (Pupil(tmp_path, plan=replace(PLAN, seed=seed)) for seed in (3, 3, 4))
    for one in (pupil, again, other):
        one.run()
    epochs = [shown(pupil.learned[at : at + pupil.per_epoch]) for at in (0, pupil.per_epoch)]
    for epoch in epochs:
        assert sorted(epoch) == sorted((tokens, 1) for tokens, _ in windows(TAUGHT)), "prompts teach as well"
    assert epochs[0] != epochs[1]
    assert shown(again.learned) == shown(pupil.learned)
    assert shown(other.learned) != shown(pupil.learned)
    assert {len(batch.tokens) for batch in pupil.learned[: pupil.per_epoch - 1]} == {8}


def test_batches_hold_the_states_of_their_tokens(tmp_path: Path) -> None:
    pupil = Pupil(tmp_path, "eagle3")
    pupil.run()
    known = {tuple(text.tokens[at : at + 16]): (text.tokens, at) for text in LESSONS for at in range(0, 40, 16)}
    for batch in pupil.learned[:3]:
        for tokens, states, length in zip(batch.tokens, batch.states, batch.lengths, strict=True):
            text, at = known[tuple(tokens[:length].tolist())]
            alone = made_up([text], (1, 2, 4))[0][at : at + 16]
            torch.testing.assert_close(states[:length], alone, rtol=2e-3, atol=2e-3)


def test_texts_of_about_one_length_stand_together(tmp_path: Path) -> None:
    pupil = Pupil(tmp_path, plan=replace(PLAN, seq_len=40))
    pupil.run()
    batches = pupil.learned[: pupil.per_epoch]
    padding = sum(int((batch.tokens.shape[1] - batch.lengths).sum()) for batch in batches)
    assert padding < 0.2 * sum(int(batch.lengths.sum()) for batch in batches)


def test_held_out_texts_are_tested_and_never_learned(tmp_path: Path) -> None:
    changed = [
        Document(text.tokens[::-1], text.start) if i % fit.HELD_OUT == 0 else text for i, text in enumerate(LESSONS)
    ]
    pupil, other = Pupil(tmp_path), Pupil(tmp_path, lessons=changed)
    counts, other_counts = pupil.run(), other.run()
    assert sorted(shown(pupil.tested)) == sorted(2 * windows(HELD_OUT))
    held_out = [tokens for tokens, _ in windows(HELD_OUT)]
    assert not [tokens for tokens, _ in shown(pupil.learned) if tokens in held_out]
    assert_same_weights(pupil, other)
    assert counts.tried == other_counts.tried
    assert counts != other_counts


def assert_same_weights(one: Pupil, other: Pupil) -> None:
    assert one.weights.keys() == other.weights.keys()
    for name, value in one.weights.items():
        assert torch.equal(value, other.weights[name]), name


def test_the_rate_rises_in_a_line_and_falls_in_half_a_cosine(tmp_path: Path) -> None:
    pupil = Pupil(tmp_path, plan=replace(PLAN, epochs=6))
    pupil.run()
    steps = pupil.trainer.num_steps
    assert steps == 6 * math.ceil(len(windows(TAUGHT)) / 8) >= 50
    warm = int(0.04 * steps)
    rising = [0.01 * (step + 1) / warm for step in range(warm)]
    falling = [0.005 * (1 + math.cos(math.pi * step / (steps - warm))) for step in range(steps - warm)]
    assert warm >= 2
    assert pupil.rates == pytest.approx(rising + falling)


def test_what_is_said_while_it_learns(tmp_path: Path) -> None:
    pupil = Pupil(tmp_path)
    counts = pupil.run()
    steps = [progress for progress in pupil.progress if progress.counts is None]
    ends = [progress for progress in pupil.progress if progress.counts is not None]
    assert [progress.step for progress in steps] == list(range(1, pupil.trainer.num_steps + 1))
    assert [(end.epoch, end.step) for end in ends] == [(1, pupil.per_epoch), (2, 2 * pupil.per_epoch)]
    assert ends[-1].counts == counts
    assert sum(step.loss for step in steps[-5:]) < sum(step.loss for step in steps[:5])


@functools.cache
def uninterrupted(folder: Path, kind: str) -> Pupil:
    pupil = Pupil(folder, kind)
    pupil.run()
    pupil.trainer.checkpoint.unlink()
    return pupil


@pytest.fixture(params=[False, True], ids=["float32", "bfloat16"])
def school(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder of its own for each dtype of matrix products."""
    monkeypatch.setattr(fit, "cpu_has_bfloat16", lambda: request.param)
    folder = tmp_path_factory.getbasetemp() / f"school-{request.param}"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.parametrize("at", ["first", "end of an epoch", "start of an epoch", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_and_resumed_it_comes_to_the_same_weights(school: Path, kind: str, at: str) -> None:
    whole = uninterrupted(school, kind)
    per_epoch = whole.per_epoch
    step = {"first": 1, "end of an epoch": per_epoch, "start of an epoch": per_epoch + 1, "last": 2 * per_epoch}[at]
    first = Pupil(school, kind).stopped(step)
    second = Pupil(school, kind, init=99)
    assert second.trainer.resume()
    assert second.trainer.step == step
    assert_same_weights(second, first)
    counts = second.run()
    assert_same_weights(second, whole)
    assert counts == whole.progress[-1].counts
    assert shown(first.learned + second.learned) == shown(whole.learned)


def test_it_may_be_interrupted_at_every_step(tmp_path: Path) -> None:
    whole = uninterrupted(tmp_path, "medusa")
    for step in range(1, whole.trainer.num_steps + 1):
        pupil = Pupil(tmp_path, init=step)
        assert pupil.trainer.resume() == (step > 1)
        if step > 1:
            pupil.stopped(step)
        else:
            Pupil(tmp_path).stopped(step)
    last = Pupil(tmp_path)
    assert last.trainer.resume()
    assert last.run() == whole.progress[-1].counts
    assert_same_weights(last, whole)
    assert last.learned == []


def test_it_saves_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without being asked to: a machine may lose its power."""
    monkeypatch.setattr(fit, "SAVE_EVERY", 3)
    whole = uninterrupted(tmp_path, "medusa")
    pupil = Pupil(tmp_path)

    def lose_power(progress: Progress) -> None:
        if progress.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pupil.trainer.run(lose_power)
    again = Pupil(tmp_path)
    assert again.trainer.resume()
    assert again.trainer.step == 3
    again.run()
    assert_same_weights(again, whole)


def test_without_a_checkpoint_it_starts_anew(tmp_path: Path) -> None:
    pupil = Pupil(tmp_path)
    assert not pupil.trainer.resume()
    assert pupil.trainer.step == 0


OTHER_TEXTS = [Document([(token + 1) % WORDS for token in text.tokens], text.start) for text in LESSONS]
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": ({"plan": replace(PLAN, epochs=5)}, "is of a training with epochs 2, and this one has 5; give the same"),
    "lr": ({"plan": replace(PLAN, lr=0.02)}, "with lr 0.01, and this one has 0.02; give the same options and data"),
    "batch_size": ({"plan": replace(PLAN, batch_size=4)}, "with batch_size 8, and this one has 4"),
    "seq_len": ({"plan": replace(PLAN, seq_len=17)}, "with seq_len 16, and this one has 17"),
    "seed": ({"plan": replace(PLAN, seed=4)}, "with seed 3, and this one has 4; .* or remove it to start anew"),
    "texts": ({"lessons": OTHER_TEXTS}, "with texts .*, and this one has .*; give the same options and data"),
    "fewer texts": ({"lessons": LESSONS[:50]}, "with texts .*, and this one has"),
    "guesses": ({"num_guesses": 4}, "with guesses 3, and this one has 4"),
    "kind": ({"kind": "eagle3"}, "with network MedusaHeads, and this one has EagleHead"),
    "layers": ({"num_layers": 2}, "with parameters .*, and this one has"),
    "vocabulary": ({"tokens": torch.arange(9)}, "with vocabulary 40, and this one has 9"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_training_is_not_gone_on_with(tmp_path: Path, name: str) -> None:
    options, message = OTHERS[name]
    Pupil(tmp_path).stopped(2)
    pupil = Pupil(tmp_path, **options)
    before = pupil.weights
    with pytest.raises(OptionError, match=message):
        pupil.trainer.resume()
    assert all(torch.equal(value, before[key]) for key, value in pupil.weights.items())


def spoil(file: Path, how: str) -> None:
    if how == "cut":
        file.write_bytes(file.read_bytes()[:-200])
    elif how == "empty":
        file.write_bytes(b"")
    elif how == "other tensors":
        torch.save({"network": torch.zeros(3)}, file)
    else:
        torch.save([Plan()], file)


@pytest.mark.parametrize("how", ["cut", "empty", "other tensors", "code"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, how: str) -> None:
    pupil = Pupil(tmp_path).stopped(2)
    spoil(pupil.trainer.checkpoint, how)
    with pytest.raises(OptionError, match=r"cannot go on from .*checkpoint\.pt \(.+\); remove it to start anew"):
        Pupil(tmp_path).trainer.resume()


def test_too_few_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"1 documents are too few .* give at least 20"):
        Pupil(tmp_path, lessons=LESSONS[:1])
    short = [Document(text.tokens[: text.start + 2], text.start) for text in LESSONS]
    with pytest.raises(OptionError, match="61 documents are too few"):
        Pupil(tmp_path, lessons=short)


# a target that sings

LETTERS = "abcdefghijklmnopqrst"
SONGS = [random.Random(song).sample(LETTERS, 8) for song in range(6)]
NUM_ANSWERED = 20
EPOCHS = {"medusa": 25, "eagle3": 8}


def sung(song: int, start: int, length: int) -> str:
    return " ".join(SONGS[song][(start + i) % 8] for i in range(length))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``model``, ``prompts.jsonl`` with the beginnings of songs, and ``cache`` with what is computed of them once."""
    root = tmp_path_factory.mktemp("songs")
    words = ["<unk>", "<s>", "</s>", *LETTERS]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = tf.PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>",
        chat_template="<s>{% for turn in messages %} {{ turn['content'] }}{% endfor %}",
    )  # fmt: skip
    tokenizer.save_pretrained(root / "model")
    singer(tokenizer, len(words)).save_pretrained(root / "model")
    places = list(itertools.product(range(6), range(8), (3, 4)))
    random.Random(0).shuffle(places)
    rows = [{"prompt": sung(*place), "answer": sung(place[0], sum(place[1:]), 9)} for place in places]
    write(root / "prompts.jsonl", *rows)
    return root


def singer(tokenizer: Any, vocab_size: int) -> tf.LlamaForCausalLM:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = tf.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rng = random.Random(0)
    for _ in range(150):
        texts = ["<s> " + sung(rng.randrange(6), rng.randrange(8), 31) for _ in range(8)]
        ids = torch.tensor([tokenizer.encode(text) for text in texts])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.eval()


def options(home: Path, kind: str, out: Path, **others: Any) -> TrainOptions:
    standard: dict[str, Any] = {
        "model": str(home / "model"), "data": home / "prompts.jsonl", "cache": home / "cache", "out": out,
        "max_tokens": NUM_ANSWERED, "plan": Plan(epochs=EPOCHS[kind], lr=0.02, seq_len=32),
    }  # fmt: skip
    return TrainOptions(kind=kind, **standard | others)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=KINDS)
def heads(request: pytest.FixtureRequest, home: Path) -> tuple[Path, Counts]:
    """Trained on what the target itself sings."""
    out = home / request.param
    return out, train(options(home, request.param, out), lambda report: None)


def test_heads_foresee_what_can_be_foreseen(heads: tuple[Path, Counts]) -> None:
    _, counts = heads
    assert len(counts.accuracies) == 4
    assert min(first for first, _ in counts.accuracies) > 0.9
    assert counts.expected_length > 4.6
    assert min(counts.whole) >= 30


def test_a_real_decoding_is_as_fast_as_promised_and_says_the_same(home: Path, heads: tuple[Path, Counts]) -> None:
    out, counts = heads
    engine = flashspec.load(home / "model", draft=out, drafter=out.name, num_speculative_tokens=4)
    prompts = [[{"role": "user", "content": sung(song, song, 5)}] for song in range(6)]
    results = engine.generate(prompts, SamplingParams(max_tokens=26))  # type: ignore[arg-type]
    for song, result in enumerate(results):
        prompt = engine.tokenizer.encode("<s> " + sung(song, song, 5))
        assert result.tokens == plain_loop(plain_logits(engine), prompt, SamplingParams(max_tokens=26))
        assert result.text.split() == sung(song, song + 5, 26).split()
    assert engine.stats().mean_acceptance_length == pytest.approx(counts.expected_length, rel=0.05)


def test_the_folder_is_all_that_a_draft_needs_and_sampling_stays_the_same(
    home: Path, heads: tuple[Path, Counts]
) -> None:
    engine = flashspec.load(home / "model", draft=heads[0], num_speculative_tokens=4)
    assert isinstance(engine.drafter, HybridDrafter)
    assert engine.drafter.slow.name == heads[0].name
    sampling = SamplingParams(max_tokens=20, temperature=1.7, seed=5)
    found = engine.generate([[1, 3, 4], [1, 9]], sampling)  # type: ignore[arg-type]
    for prompt, result in zip(([1, 3, 4], [1, 9]), found, strict=True):
        assert result.tokens == plain_loop(plain_logits(engine), prompt, sampling, eos=[2])
    assert engine.stats().num_drafts > 5


def plain_logits(engine: LocalEngine) -> Callable[[Seq[int]], Any]:
    model = engine.target
    assert isinstance(model, HFTarget)
    return lambda tokens: model.plain_logits(list(tokens)).numpy()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gemma3", "gpt2", "phi"])
def test_targets_of_other_families_have_heads(home: Path, tmp_path: Path, family: str, kind: str) -> None:
    shutil.copytree(home / "model", tmp_path / "model")
    build(family).save_pretrained(tmp_path / "model")
    model = str(tmp_path / "model")
    plan = Plan(epochs=1, lr=0.001, batch_size=8, seq_len=32)
    given = options(home, kind, tmp_path / "heads", model=model, as_is=True, limit=30, plan=plan, cache=tmp_path)
    assert min(train(given, lambda report: None).tried) > 0
    engine = flashspec.load(model, draft=tmp_path / "heads", drafter=kind, num_speculative_tokens=3)
    result = engine.generate([3, 4, 5], SamplingParams(max_tokens=9, ignore_eos=True))
    assert result.tokens == plain_loop(plain_logits(engine), [3, 4, 5], SamplingParams(max_tokens=9))
    assert result.stats.num_drafts > 1


def test_a_short_training_promises_less_and_keeps_that_too(home: Path, tmp_path: Path) -> None:
    counts = train(
        options(home, "medusa", tmp_path / "heads", plan=Plan(epochs=8, lr=0.01, seq_len=32)), lambda report: None
    )
    assert 1.2 < counts.expected_length < 3.5
    engine = flashspec.load(home / "model", drafter="none", num_speculative_tokens=0)
    network, _ = read_medusa(tmp_path / "heads", hidden_size=32, vocab_size=23)
    chains = LocalEngine(engine.target, MedusaDrafter(network, width=1), num_speculative_tokens=4)
    prompts = [
        engine.tokenizer.encode("<s> " + sung(song, start, 5)) for song, start in itertools.product(range(6), range(8))
    ]
    chains.generate(prompts, SamplingParams(max_tokens=40))
    assert chains.stats().mean_acceptance_length == pytest.approx(counts.expected_length, rel=0.2)


def test_the_folder_says_how_good_the_heads_are(home: Path, heads: tuple[Path, Counts]) -> None:
    out, counts = heads
    facts = json.loads((out / "training.json").read_text(encoding="utf-8"))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    card = (out / "README.md").read_text(encoding="utf-8")
    assert facts["accuracies"] == counts.accuracies
    assert facts["expected_length"] == config["expected_length"] == counts.expected_length
    assert config["accuracies"] == [first for first, _ in counts.accuracies]
    assert facts["kind"] == out.name
    assert facts["base"] == str(home / "model")
    assert (facts["texts"], facts["vocabulary"], facts["epochs"]) == (96, 23, EPOCHS[out.name])
    assert facts["tokens"] == sum(1 + n + NUM_ANSWERED for n in (3, 4)) * 48
    assert facts["steps"] == facts["seconds_of_steps"] == EPOCHS[out.name] * math.ceil(91 / 16)
    rows = re.findall(r"^\| (\d) \| ([\d.]+)% \| ([\d.]+)% \|$", card, re.MULTILINE)
    assert rows == [
        (str(i), f"{100 * first:.1f}", f"{100 * fifth:.1f}") for i, (first, fifth) in enumerate(counts.accuracies, 1)
    ]
    assert f"expected mean\nacceptance length {counts.expected_length:.2f} for a chain of 4" in card
    assert f"on 96 texts ({facts['tokens']} tokens), answers\nof the model itself; {EPOCHS[out.name]} epochs" in card
    assert f"flashspec generate --model {home / 'model'} --draft {out}\n" in card
    files = {"config.json", "training.json", "README.md"}
    weights = {"medusa": {"medusa_lm_head.safetensors", "medusa_lm_head.pt"}, "eagle3": {"model.safetensors"}}
    assert {file.name for file in out.iterdir()} == files | weights[out.name]


# the command


@pytest.fixture
def command(home: Path, flashspec_command: Callable[..., Ran]) -> Callable[..., Ran]:
    """``flashspec train`` of few steps, with what the other tests have computed already."""

    def call(kind: str, out: Path, *words: str, **others: str) -> Ran:
        given = {
            "model": str(home / "model"), "data": str(home / "prompts.jsonl"), "cache": str(home / "cache"),
            "max-tokens": str(NUM_ANSWERED), "seq-len": "32", "epochs": "1", "batch-size": "16", "lr": "0.001",
            "out": str(out),
        }  # fmt: skip
        given |= {name.replace("_", "-"): value for name, value in others.items()}
        flags = itertools.chain.from_iterable((f"--{name}", value) for name, value in given.items())
        return flashspec_command("train", kind, *flags, *words)

    return call


Command = Callable[..., Ran]


def facts_of(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "training.json").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_trains_what_it_is_asked_for(command: Command, tmp_path: Path, kind: str) -> None:
    out, flag = tmp_path / "new" / "heads", {"medusa": "heads", "eagle3": "steps"}[kind]
    ran = command(kind, out, "--as-is", limit="40", vocab_top="12", batch_size="8", **{flag: "2"})
    assert ran.code == 0, ran.err
    facts = facts_of(out)
    assert facts["answers"] == "of the data"
    assert (facts["texts"], facts["vocabulary"], facts["steps"], len(facts["accuracies"])) == (40, 12, 5, 2)
    lines = ran.out.splitlines()
    shares = ", ".join(f"{first:.0%}/{fifth:.0%}" for first, fifth in facts["accuracies"])
    length = facts["expected_length"]
    assert lines[0] == f"held-out top-1/top-5 {shares}; expected mean acceptance length {length:.2f}"
    assert lines[1] == f"heads in {out}; use them with --draft {out}"
    for stage in ("reading the data", "the model reads the texts", "training", "epoch 1: loss "):
        assert stage in ran.err
    assert "answers the prompts" not in ran.err


def test_the_guessed_tokens_are_the_most_frequent_ones(command: Command, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b b b b c c c"}] * 20 + [{"prompt": "a a a", "answer": "d d d d"}]
    file = write(tmp_path / "data.jsonl", *rows)
    assert command("medusa", tmp_path / "two", "--as-is", data=str(file), vocab_top="2").code == 0
    assert command("medusa", tmp_path / "six", "--as-is", data=str(file), vocab_top="6").code == 0
    two, six = (
        load_file(tmp_path / name / "medusa_lm_head.safetensors")["token_map"].tolist() for name in ("two", "six")
    )
    assert two == [4, 5], "b and c"
    assert six == [0, 1, 2, 4, 5, 6], "b, c, d, and what comes first"


def test_answers_are_made_once_for_all_heads(
    command: Command, tmp_path: Path, heads: tuple[Path, Counts], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalEngine, "add", None)
    ran = command("medusa", tmp_path / "heads")
    assert ran.code == 0, ran.err
    assert facts_of(tmp_path / "heads")["answers"] == "of the model itself"


def test_prompts_that_leave_no_room_for_an_answer_are_left_out(command: Command, tmp_path: Path) -> None:
    prompts = [sung(song, 0, length) for song in range(6) for length in (3, 15, 4, 16, 6)]
    file = write(tmp_path / "data.jsonl", *({"prompt": prompt} for prompt in prompts))
    ran = command("medusa", tmp_path / "heads", data=str(file), cache=str(tmp_path))
    assert ran.code == 0, ran.err
    assert "6 of 30 prompts have more than 16 tokens: left out (--seq-len and --max-tokens make room)" in ran.err
    assert facts_of(tmp_path / "heads")["texts"] == 24


def interrupt(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, *, at: Seq[int]) -> None:
    """Press Ctrl-C when a function is called for the n-th time, counted from 1."""
    calls, real = itertools.count(1), getattr(place, name)

    def pressed(*args: Any, **options: Any) -> Any:
        if next(calls) in at:
            signal.raise_signal(signal.SIGINT)
        return real(*args, **options)

    monkeypatch.setattr(place, name, pressed)


@pytest.mark.parametrize("kind", KINDS)
def test_after_ctrl_c_the_same_command_with_resume_ends_with_the_same_weights(
    command: Command, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"medusa": "medusa_lm_head.safetensors", "eagle3": "model.safetensors"}[kind]
    assert command(kind, tmp_path / "whole", epochs="2").code == 0
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt(patch, fit, "loss_of", at=[8])
        stopped = command(kind, tmp_path / "heads", epochs="2")
    assert signal.getsignal(signal.SIGINT) is before
    assert stopped.code == 130
    assert f"stopped; go on with the same command and --resume ({tmp_path / 'heads'})" in stopped.err
    assert [file.name for file in (tmp_path / "heads").iterdir()] == ["checkpoint.pt"]
    refused = command(kind, tmp_path / "heads", epochs="2")
    assert refused.code == 2
    assert "holds a training that was interrupted; go on with --resume, or remove checkpoint.pt" in refused.err
    ran = command(kind, tmp_path / "heads", "--resume", epochs="2")
    assert ran.code == 0, ran.err
    assert "going on from step 8 of 12" in ran.err
    whole, resumed = (load_file(tmp_path / folder / name) for folder in ("whole", "heads"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(value, resumed[key]) for key, value in whole.items())
    mine, theirs = (facts_of(tmp_path / folder) for folder in ("whole", "heads"))
    assert mine["accuracies"] == theirs["accuracies"]
    assert (mine["seconds_of_steps"], theirs["seconds_of_steps"]) == (12, 4)
    assert not (tmp_path / "heads" / "checkpoint.pt").exists()


def test_ctrl_c_while_the_model_answers_loses_little(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = str(tmp_path / "cache")
    with monkeypatch.context() as patch:
        interrupt(patch, LocalEngine, "step", at=[NUM_ANSWERED + 2])
        stopped = command("medusa", tmp_path / "heads", cache=cache, limit="40")
    assert stopped.code == 130
    answers = next((tmp_path / "cache").rglob("answers.jsonl")).read_text(encoding="utf-8")
    assert len(answers.split()) > 20
    asked: list[Any] = []
    add = LocalEngine.add
    monkeypatch.setattr(LocalEngine, "add", lambda self, *rest: asked.append(rest) or add(self, *rest))
    ran = command("medusa", tmp_path / "heads", "--resume", cache=cache, limit="40")
    assert ran.code == 0, ran.err
    assert len(asked) == 7
    assert facts_of(tmp_path / "heads")["texts"] == 40


def test_a_second_ctrl_c_leaves_at_once(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def impatient(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it went on")

    monkeypatch.setattr(fit, "loss_of", impatient)
    ran = command("medusa", tmp_path / "heads")
    assert ran.code == 130
    assert list((tmp_path / "heads").iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("heads", "0", "--heads is 0; it must be from 1 to 16"),
        ("heads", "17", "--heads is 17"),
        ("layers", "9", "--layers is 9; it must be from 1 to 8"),
        ("epochs", "0", "--epochs is 0; it must be from 1 to 1000"),
        ("batch-size", "0", "--batch-size is 0; it must be from 1 to 4096"),
        ("seq-len", "15", "--seq-len is 15; it must be from 16 to"),
        ("max-tokens", "7", "--max-tokens is 7; it must be from 8 to"),
        ("temperature", "-1", "--temperature is -1; it must be from 0 to 100"),
        ("temperature", "nan", "--temperature is nan"),
        ("lr", "0", "--lr is 0; it must be from 1e-09 to 1"),
        ("lr", "2", "--lr is 2"),
        ("seed", "-1", "--seed is -1; it must be from 0 to"),
        ("seed", str(2**63), "--seed is"),
        ("limit", "0", "--limit"),
    ],
)
def test_numbers_out_of_range(command: Command, tmp_path: Path, flag: str, value: str, message: str) -> None:
    ran = command("medusa", tmp_path / "heads", model="no/model", **{flag: value})
    assert ran.code == 2
    assert message in ran.err
    assert not (tmp_path / "heads").exists()


@pytest.mark.parametrize("value", ["0", "24"])
def test_a_vocabulary_out_of_range_is_refused_before_the_model_answers(
    command: Command, tmp_path: Path, value: str
) -> None:
    ran = command("eagle3", tmp_path / "heads", vocab_top=value)
    assert ran.code == 2
    assert f"--vocab-top is {value}; it must be from 1 to the vocabulary's 23" in ran.err
    assert "reading the data" not in ran.err


def test_places_where_no_heads_can_be_written(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    for out, message in (
        (tmp_path / "file", "is a file; name a folder for the heads with --out"),
        (tmp_path / "model", "holds a model already; name another folder with --out"),
        (tmp_path / "file" / "heads", "cannot write there: .*choose other folders with --out and --cache"),
    ):
        for more in ([], ["--resume"]):
            ran = command("medusa", out, *more)
            assert ran.code == 2
            assert re.search(message, ran.err), ran.err
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
    assert (tmp_path / "model" / "config.json").read_text(encoding="utf-8") == "{}"


def test_other_options_do_not_go_on_with_a_training(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt(patch, fit, "loss_of", at=[2])
        assert command("medusa", tmp_path / "heads").code == 130
    ran = command("medusa", tmp_path / "heads", "--resume", lr="0.005")
    assert ran.code == 2
    assert "is of a training with lr 0.001, and this one has 0.005; give the same options and data" in ran.err


@pytest.mark.parametrize(
    ("rows", "words", "message"),
    [
        ([{"prompt": "a b c"}] * 30, ["--as-is"], "prompts without answers; leave out --as-is"),
        ([{"prompt": "a b c", "answer": "d e"}] * 30, ["--as-is"], "leaves no text of three tokens and more"),
        ([{"prompt": "a b c", "answer": "d e f g"}], ["--as-is"], "1 documents are too few .* give at least 20"),
        ([{"text": "a"}, {"question": "b"}], [], r"data\.jsonl, line 2 has no"),
        (None, [], r"no data at .*data\.jsonl"),
    ],
)
def test_data_that_nothing_can_be_learned_from(
    command: Command, tmp_path: Path, rows: list[dict[str, Any]] | None, words: list[str], message: str
) -> None:
    if rows is not None:
        write(tmp_path / "data.jsonl", *rows)
    ran = command("medusa", tmp_path / "heads", *words, data=str(tmp_path / "data.jsonl"))
    assert ran.code == 2
    assert re.search(message, ran.err), ran.err


def test_states_that_do_not_fit_on_the_disk_are_refused(home: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: tf.utils.generic.ModelOutput(free=1000))
    with pytest.raises(FlashSpecError, match=r"take 0\.0 GiB, and .* has 0\.0 GiB free; use fewer texts"):
        train(options(home, "medusa", tmp_path / "heads", as_is=True, cache=tmp_path / "cache"), lambda report: None)


def test_each_stage_is_said_with_how_much_is_done(home: Path, tmp_path: Path) -> None:
    reports: list[Report] = []
    plan, cache = Plan(epochs=2, seq_len=32), tmp_path / "cache"
    train(options(home, "eagle3", tmp_path / "heads", plan=plan, cache=cache, limit=24), reports.append)
    stages = list(dict.fromkeys(report.stage for report in reports))
    assert stages[-4:] == [
        "reading the data", "the model answers the prompts", "the model reads the texts", "training"
    ]  # fmt: skip
    steps = [report for report in reports if report.stage == "training" and report.total]
    assert [report.done for report in steps] == [1, 2, 2, 3, 4, 4]
    for stage in stages[-3:-1]:
        done = [report.done for report in reports if report.stage == stage]
        assert done == sorted(done)
        assert done[-1] == 24
        assert {report.total for report in reports if report.stage == stage} == {24}
    lines = [report.line for report in steps if report.line]
    assert [line.split(":")[0] for line in lines] == ["epoch 1", "epoch 2"]
