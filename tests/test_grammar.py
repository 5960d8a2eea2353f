"""Masks against a fresh parser that reads token by token; outputs against what the grammar says; both laws of drawing.

The tokenizer is SmolLM2's, the logits are random: an untrained model finds every hole that a mask leaves.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence as Seq
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import chi_square
from transformers import AutoTokenizer

from flashspec.core import EMPTY, Draft, Grammar, SamplingParams, Sequence
from flashspec.errors import OptionError
from flashspec.grammar import MAX_CHARACTERS, GrammarCompiler, Matcher, _source, json_object, json_schema
from flashspec.sampling import adjust, distribution
from flashspec.tree import paths
from flashspec.verify import verify

pytest.importorskip("llguidance")

VOCAB, SIZE = 49152, 49200  # the tokenizer's, and a model's that is padded
EOS = (0, 2)
FRUIT = ["苹果", "香蕉", "苹", "naïve 🙂"]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": FRUIT}, "minItems": 1, "maxItems": 3},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
UNION = {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"type": "array", "items": {"type": "integer"}}]}
CALLS = (  # a lazy lexeme: the parser decides late what it has read
    '%llguidance {}\nstart: called? tail\ncalled: head /[0-9]{1,3}/ "</f>"\n'
    'head[lazy]: TEXT "<f>"\ntail: TEXT\nTEXT: /(.|\\n){0,40}/\n'
)
GRAMMARS = {
    "enum": json_schema({"enum": FRUIT}),
    "person": json_schema(PERSON),
    "union": json_schema(UNION),
    "any": json_object(),
    "regex": Grammar("regex", r"[0-9]{1,3}(é|日本語)?"),
    "fixed": Grammar("regex", "the quick brown fox"),  # every token is forced
    "lark": Grammar("lark", 'start: "(" start ")" | "x"+'),
    "calls": Grammar("lark", CALLS),
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2_path)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, vocab_size=SIZE, eos_tokens=EOS)


class Plain:
    """The reference: for every path a fresh parser, which reads one token after the other."""

    def __init__(self, compiler: GrammarCompiler, grammar: Grammar) -> None:
        compiler.compile(grammar)
        self.tokenizer, self.source = compiler._vocabulary(), _source(grammar)

    def row(self, path: Seq[int]) -> np.ndarray:
        from llguidance import LLMatcher

        parser = LLMatcher(self.tokenizer, self.source)
        for token in path:
            if token in EOS or not self._mask(parser)[token]:
                return np.ones(SIZE, bool)
            assert parser.consume_token(token)
        return self._mask(parser)

    @staticmethod
    def _mask(parser: Any) -> np.ndarray:
        bits = parser.compute_bitmask()
        mask = np.array([bits[token // 8] >> token % 8 & 1 for token in range(SIZE)], bool)
        assert not parser.is_error()
        assert mask[list(EOS)].tolist() == [parser.is_accepting()] * len(EOS)
        return mask


def drawn(matcher: Matcher, rng: random.Random, length: int, start: Seq[int] = ()) -> list[int]:
    """A walk that the grammar allows, short tokens and long ones alike."""
    output = list(start)
    while len(output) < length and not (output and output[-1] in EOS):
        output.append(rng.choice(matcher.allowed(output, EMPTY)[0].nonzero().flatten().tolist()))
    return output


def guessed(matcher: Matcher, rng: random.Random, output: list[int]) -> Draft:
    """A tree of branches that the grammar allows, allows in part, or forbids; siblings come in any order."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(rng.randint(0, 7)):
        parent = rng.randrange(-1, len(tokens))
        path = output + [tokens[node] for node in (paths(parents)[parent] if parent >= 0 else [])]
        wild = rng.random() < 0.3
        tokens.append(rng.randrange(SIZE) if wild else drawn(matcher, rng, len(path) + 1, path)[-1])
        parents.append(parent)
    return Draft(tokens, parents)


@pytest.mark.parametrize("name", GRAMMARS)
def test_masks_are_those_of_a_fresh_parser_whoever_asks_and_in_whatever_order(
    compiler: GrammarCompiler, name: str
) -> None:
    rng = random.Random(name)
    plain, helper, matcher = (
        Plain(compiler, GRAMMARS[name]), compiler.compile(GRAMMARS[name]), compiler.compile(GRAMMARS[name]),
    )  # fmt: skip
    questions = []
    for _ in range(6):
        output = drawn(helper, rng, rng.randint(0, 14))
        output = output[: rng.randint(0, len(output))]
        if rng.random() < 0.2:
            output.append(rng.randrange(VOCAB))  # a drafter's guess that was not masked
        questions.append((output, guessed(helper, rng, [token for token in output if token not in EOS])))
    expected = []
    for output, draft in questions:
        below = [[draft.tokens[node] for node in path] for path in paths(draft.parents)]
        expected.append(np.stack([plain.row(output + path) for path in [[], *below]]))
    for number in [rng.randrange(len(questions)) for _ in range(30)]:
        output, draft = questions[number]
        rows = matcher.allowed(tuple(output), draft)
        assert rows.dtype == torch.bool
        assert rows.any(-1).all()
        if not np.array_equal(rows.numpy(), expected[number]):
            # a token that the mask forbids, but another spelling of a forced text: the parser goes on
            assert expected[number].all()
            assert not set(EOS) & set(output)
    assert not matcher.allowed([], EMPTY)[0, VOCAB:].any(), "ids that no token has"


def test_a_chain_is_masked_like_its_prefixes(compiler: GrammarCompiler) -> None:
    matcher, rng = compiler.compile(GRAMMARS["person"]), random.Random(1)
    output = drawn(matcher, rng, 30)
    for start in range(0, len(output), 3):
        rows = matcher.allowed(output[:start], Draft.chain(output[start : start + 6]))
        for row, mask in enumerate(rows):
            assert torch.equal(mask, matcher.allowed(output[: start + row], EMPTY)[0])


def test_below_a_forbidden_node_every_token_stands_and_its_siblings_are_untouched(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar("regex", "[ab]{2}c"))
    a, b, c = (compiler._vocabulary().tokenize_str(text)[0] for text in "abc")
    rows = matcher.allowed([a], Draft([c, a, b, c, c], [-1, 0, -1, 2, 3]))
    assert rows[1].all()
    assert rows[2].all(), "below a forbidden node"
    assert rows[3].nonzero().flatten().tolist() == [c]
    assert rows[4].nonzero().flatten().tolist() == [*EOS]
    assert rows[5].all(), "after the grammar's end"
    assert matcher.allowed([c], EMPTY).all()
    assert matcher.allowed([a, SIZE + 5], EMPTY).shape == (1, SIZE), "an id out of range ends nothing"
    assert matcher.allowed([a, b], EMPTY)[0].nonzero().flatten().tolist() == [c]


def test_after_the_end_only_end_of_sequence_and_after_that_anything(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.compile(GRAMMARS["union"])
    done = tokenizer.encode("[1,2]")
    for eos in EOS:
        rows = matcher.allowed(done, Draft([eos, 30, 30], [-1, 0, -1]))
        assert rows[0].nonzero().flatten().tolist() == [*EOS]
        assert rows[1:].all()
        assert matcher.allowed([*done, eos], EMPTY).all()
        assert matcher.is_complete([*done, eos])
    assert not matcher.is_complete(done[:-1])
    assert not matcher.is_complete([*done[:-1], EOS[0], done[-1]])
    assert not matcher.is_complete([*done, done[-1]])
    assert not matcher.is_complete([])
    assert matcher.is_complete(done)
    open_end = compiler.compile(Grammar("regex", "x*"))
    assert open_end.is_complete([])
    assert open_end.allowed([], EMPTY)[0, list(EOS)].all()


def test_an_end_of_sequence_token_that_is_text_never_stands_for_it(tokenizer: Any) -> None:
    (dot,) = tokenizer.encode(".")
    matcher = GrammarCompiler(tokenizer, vocab_size=VOCAB, eos_tokens=[dot]).compile(Grammar("regex", "[.x]{2}"))
    (x,) = tokenizer.encode("x")
    assert not matcher.allowed([], EMPTY)[0, dot]
    assert matcher.allowed([], EMPTY)[0, x]
    assert matcher.allowed([x, x], EMPTY)[0].nonzero().flatten().tolist() == [dot]


def test_a_dead_end_ends_the_output_and_leaves_the_matcher_well(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.compile(Grammar("lark", 'start: "a" dead | "b" "7"\ndead: dead "d"'))
    a, b, c = (tokenizer.encode(text)[0] for text in "ab7")
    for _ in range(2):
        rows = matcher.allowed([], Draft([a, c, b, c], [-1, 0, -1, 2]))
        assert rows[0].nonzero().flatten().tolist() == [a, b]
        assert rows[1].nonzero().flatten().tolist() == [*EOS]
        assert rows[2].all()
        assert rows[3].nonzero().flatten().tolist() == [c]
        assert rows[4].nonzero().flatten().tolist() == [*EOS]
        assert not matcher.is_complete([a])
        assert matcher.is_complete([b, c])


def test_a_parser_that_gives_up_ends_the_output(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.compile(Grammar("lark", 'start: (("a" | "b")* "c"?){10000000}'))
    rng, helper, output = random.Random(0), compiler.compile(Grammar("regex", "[abc]*")), list[int]()
    while not matcher._now.is_error():
        output = drawn(helper, rng, len(output) + 1, output)
        assert len(output) < 500
        if output[-1] in EOS:
            del output[-1]
        matcher.allowed(output[:-1], Draft.chain(output[-1:]))
    for rows in (matcher.allowed(output, EMPTY), matcher.allowed(output[:-1], Draft.chain(output[-1:]))[1:]):
        assert rows[0].nonzero().flatten().tolist() == [*EOS]
    assert not matcher.is_complete(output)


# outputs


def is_person(value: Any) -> bool:
    keys_fit = set(value) <= set(PERSON["properties"]) and {"name", "age", "tags"} <= set(value)  # type: ignore[arg-type]
    is_point = "at" not in value or isinstance(value["at"]["x"], int | float)
    tags = value["tags"]
    return keys_fit and is_point and 0 <= value["age"] <= 150 and len(value["name"]) <= 8 and set(tags) <= {*FRUIT}


def is_union(value: Any) -> bool:
    return value is None or isinstance(value, bool) or all(type(item) is int for item in value)


def json_of(check: Callable[[Any], bool]) -> Callable[[str], bool]:
    return lambda text: check(json.loads(text))


CHECKS = {
    "enum": json_of(lambda value: value in FRUIT),
    "person": json_of(is_person),
    "union": json_of(is_union),
    "any": json_of(lambda value: isinstance(value, dict)),
    "regex": lambda text: re.fullmatch(GRAMMARS["regex"].text, text, re.ASCII) is not None,
    "fixed": lambda text: text == "the quick brown fox",
    "lark": lambda text: re.fullmatch(r"\(*x+\)*", text) is not None and text.count("(") == text.count(")"),
    "calls": lambda text: "<f>" not in text or re.search(r"<f>[0-9]{1,3}</f>", text) is not None,
}


class Toy:
    """A target whose logits follow from the last two tokens; it likes what closes and ends."""

    def __init__(self, tokenizer: Any, salt: int) -> None:
        self.salt = salt
        self.bias = torch.zeros(SIZE)
        for text in ('"', "]", "}", '"}', '"]', "x", "1", "<", "f", "[]", ",", ":"):
            self.bias[tokenizer.encode(text)[0]] = 5.0
        self.bias[list(EOS)] = 7.0

    def logits(self, context: Seq[int], draft: Draft) -> torch.Tensor:
        rows = []
        for path in [[], *paths(draft.parents)]:
            tail = [*context, *(draft.tokens[node] for node in path)][-2:]
            noise = torch.Generator().manual_seed(hash((self.salt, *tail)) % 2**31)
            rows.append(torch.randn(SIZE, generator=noise) * 2 + self.bias)
        return torch.stack(rows)


def request(matcher: Matcher, grammar: Grammar, **options: Any) -> Sequence:
    params = SamplingParams(grammar=grammar, **options)
    seq = Sequence("s", [5, 6, 7], 3, params, eos_tokens=frozenset(EOS))
    seq.constraint = matcher
    return seq


def generated(target: Toy, seq: Sequence, guess: Callable[[Sequence], Draft], length: int = 120) -> list[int]:
    """The engine's loop: p of the context and the draft, a verdict, its tokens."""
    while seq.num_output_tokens < length and not set(EOS) & set(seq.output):
        draft = guess(seq)
        verdict = verify(distribution(target.logits(seq.tokens, draft), seq, draft), draft, seq)
        for token in [*(draft.tokens[node] for node in verdict.accepted), verdict.next_token]:
            seq.tokens.append(token)
            if token in EOS:
                break
    return seq.output[:length]


@pytest.mark.parametrize("name", GRAMMARS)
def test_what_is_sampled_satisfies_the_grammar(compiler: GrammarCompiler, tokenizer: Any, name: str) -> None:
    matcher, texts = compiler.compile(GRAMMARS[name]), set()
    for seed in range(8):
        seq = request(matcher, GRAMMARS[name], temperature=1.0, seed=seed)
        output = generated(Toy(tokenizer, seed), seq, lambda seq: EMPTY, 200)
        if output[-1] not in EOS:
            continue  # a text that may go on for ever
        text = tokenizer.decode(output[:-1], clean_up_tokenization_spaces=False)
        assert CHECKS[name](text), text
        assert matcher.is_complete(output)
        texts.add(text)
    assert len(texts) >= (1 if name == "fixed" else 2), "nothing came to an end"


def test_every_chinese_word_can_be_spelt(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher, found, stack = compiler.compile(GRAMMARS["enum"]), set(), [[]]
    while stack:
        output: list[int] = stack.pop()
        for token in matcher.allowed(output, EMPTY)[0].nonzero().flatten().tolist():
            if token in EOS:
                found.add(json.loads(tokenizer.decode(output, clean_up_tokenization_spaces=False)))
            else:
                stack.append([*output, token])
    assert found == {*FRUIT}


def test_white_space_in_json_is_bounded(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.compile(json_schema({"type": "array", "items": {"type": "integer"}}))
    for text in ("[1, 2]", "[\n" + " " * 20 + "1\n,2 ]"):
        assert matcher.is_complete(tokenizer.encode(text)), text
    for text in ("[\n\n1]", "[" + " " * 21 + "1]", "[ \n1]", "[\t1]", "[1]\n", " [1]"):
        assert not matcher.is_complete(tokenizer.encode(text)), text


# speculation changes nothing


def drafter(matcher: Matcher, target: Toy, kind: str, rng: random.Random) -> Callable[[Sequence], Draft]:
    """Guesses of three kinds: good ones by the target itself, ones that ignore the grammar, and both in a tree."""

    def greedy(seq: Sequence, count: int) -> list[int]:
        tokens: list[int] = []
        for _ in range(count):
            context = [*seq.output, *tokens]
            allowed = matcher.allowed(context, EMPTY)[0]  # asks out of turn, with its own guesses in the output
            logits = target.logits([*seq.tokens, *tokens], EMPTY)[0].masked_fill(~allowed, -torch.inf)
            tokens.append(int(logits.argmax()))
        return tokens

    def guess(seq: Sequence) -> Draft:
        if kind == "good":
            return Draft.chain(greedy(seq, 4))
        if kind == "wild":
            return Draft.chain([rng.randrange(SIZE) for _ in range(3)])
        good = greedy(seq, 3)
        return Draft([rng.randrange(VOCAB), *good, rng.randrange(VOCAB)], [-1, -1, 1, 2, 1])

    return guess


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 20, "seed": 4}])
@pytest.mark.parametrize("name", ["person", "any", "regex", "calls"])
def test_greedy_and_seeded_tokens_are_the_same_with_any_draft(
    compiler: GrammarCompiler, tokenizer: Any, name: str, options: dict[str, Any]
) -> None:
    target, matcher = Toy(tokenizer, 9), compiler.compile(GRAMMARS[name])
    plain = generated(target, request(matcher, GRAMMARS[name], **options), lambda seq: EMPTY, 40)
    for kind in ("good", "wild", "tree"):
        seq = request(matcher, GRAMMARS[name], **options)
        assert generated(target, seq, drafter(matcher, target, kind, random.Random(1)), 40) == plain, kind


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rejection_draws_from_the_masked_distribution(compiler: GrammarCompiler, tokenizer: Any, rule: str) -> None:
    grammar = Grammar("regex", "[abc][xy]?")
    matcher, target = compiler.compile(grammar), Toy(tokenizer, 5)
    ids = torch.tensor([*EOS, *(tokenizer.encode(text)[0] for text in "abcxy")])
    flat = torch.zeros(SIZE)  # the drafter's own idea, half of it forbidden
    flat[ids] = torch.tensor([0.1, 0.1, 0.2, 0.1, 0.2, 0.2, 0.1])
    exact: dict[tuple[int, ...], float] = {}
    stack: list[tuple[list[int], float]] = [([], 1.0)]
    while stack:
        output, mass = stack.pop()
        if output and output[-1] in EOS:
            exact[tuple(output)] = mass
            continue
        row = target.logits([5, 6, 7, *output], EMPTY)[0] * 0.3
        p = row.masked_fill(~matcher.allowed(output, EMPTY)[0], -torch.inf).double().softmax(0)
        stack += [([*output, token], mass * float(p[token])) for token in p.nonzero().flatten().tolist()]
    counts = dict.fromkeys(exact, 0)
    rng, noise = random.Random(0), torch.Generator().manual_seed(0)
    cached = {}
    for number in range(1500):
        seq = request(matcher, grammar, temperature=1.0, top_k=12, verification=rule)  # more than are allowed anywhere
        seq.rng = random.Random(number)
        while not seq.output or seq.output[-1] not in EOS:
            tokens = torch.multinomial(flat, rng.randint(1, 2), replacement=True, generator=noise).tolist()
            draft = Draft.chain(tokens, probs=flat.expand(len(tokens), -1))
            key = (*seq.output, -1, *tokens)
            if key not in cached:
                cached[key] = distribution(target.logits(seq.tokens, draft) * 0.3, seq, draft)
            verdict = verify(cached[key], draft, seq)
            for token in [*(tokens[node] for node in verdict.accepted), verdict.next_token]:
                seq.tokens.append(token)
                if token in EOS:
                    break
        counts[tuple(seq.output)] += 1
    assert chi_square(np.array(list(counts.values())), np.array(list(exact.values()))) < 1


def test_masked_logits_are_never_all_infinite(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(GRAMMARS["person"])
    seq, draft = request(matcher, GRAMMARS["person"]), Draft([3, 4, 5, 6], [-1, 0, -1, 2])
    logits = adjust(torch.zeros(5, SIZE), seq, draft)
    assert logits.max(-1).values.isfinite().all()


# errors


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", "{"), "Expecting"),
        (Grammar("json_schema", "[1]"), "object"),
        (Grammar("json_schema", "false"), "Unsatisfiable"),
        (Grammar("json_schema", '{"type": "foo"}'), "foo"),
        (Grammar("json_schema", '{"$ref": "#/nowhere"}'), "nowhere"),
        (Grammar("json_schema", '{"minimum": 1e999}'), "grammar"),
        (Grammar("json_schema", "[" * 100_000), "recursion"),
        (Grammar("json_schema", '{"$ref": "#"}'), "NoExtension"),
        (Grammar("regex", "("), "unclosed"),
        (Grammar("regex", "(?=a)b"), "look-around"),
        (Grammar("regex", "\ud800"), "surrogates"),
        (Grammar("regex", "((" * 300 + "é" * 400), "\u2026|\\.\\.\\."),
        (Grammar("lark", "start: nothing"), "nothing"),
        (Grammar("lark", "start: start"), "NoExtension"),
        (Grammar("regex", "a" * (MAX_CHARACTERS + 1)), "60001 characters"),
        (Grammar("lark", 'start: "a"' + "\n" * 501), "lines"),
        (
            Grammar("lark", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(14)) + "R14: /a*/"),
            "too big",
        ),
        (json_schema({"type": "integer", "multipleOf": 999_983}), "multipleOf"),
        (json_schema({"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991.0}]}), "multipleOf"),
        (Grammar("gbnf", "root ::= x"), "must be json_schema, regex or lark"),  # type: ignore[arg-type]
    ],
)
def test_an_invalid_grammar_is_one_short_line(compiler: GrammarCompiler, grammar: Grammar, words: str) -> None:
    with pytest.raises(OptionError, match=words) as caught:
        compiler.compile(grammar)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 480
    assert grammar.kind in message
    assert "correct or simplify it" in message
    message.encode()


def test_a_true_schema_is_any_value_and_one_that_is_not_json_is_refused(
    compiler: GrammarCompiler, tokenizer: Any
) -> None:
    assert compiler.compile(Grammar("json_schema", "true")).is_complete(tokenizer.encode("[null]"))
    with pytest.raises(OptionError, match="not JSON serializable"):
        json_schema({"enum": [object()]})


def chain(count: int, line: str) -> str:
    return "".join(line.format(i, i + 1) for i in range(count))


ITEMS, CLOSE = '{"items":', "}"
HOSTILE = {
    "repeated": Grammar("regex", "((a{1000}){1000}){1000}"),
    "optional": Grammar("regex", "(a?){5000}a{5000}"),
    "stars": Grammar("regex", "a*" * 20_000),
    "parentheses": Grammar("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "groups": Grammar("lark", "start: " + "(" * 25_000 + '"a"' + ")" * 25_000),
    "rules": Grammar("lark", "start: r0\n" + chain(3000, "r{}: r{}\n") + 'r3000: "a"'),
    "doubled": Grammar("lark", "start: R0\n" + "".join(f"R{i}: R{i + 1} R{i + 1}\n" for i in range(20)) + "R20: /a*/"),
    "both": Grammar("lark", "start: A\nA: " + " & ".join(f"/(.*[a-m].{{{i}}})/" for i in range(1, 12))),
    "nested": Grammar("json_schema", ITEMS * 3000 + "{}" + "}" * 3000),
    "references": Grammar(
        "json_schema",
        "{"
        + "".join(f'"{i}":{ITEMS * 55}{{"$ref":"#/{i + 1}"}}{CLOSE * 55},' for i in range(80))
        + '"80":{},"$ref":"#/0"}',
    ),
    "items": json_schema({"type": "array", "minItems": 10**9}),
    "ambiguous": Grammar("lark", 'start: start start start | "a" | '),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_grammar_ends_within_seconds(compiler: GrammarCompiler, name: str) -> None:
    began = time.process_time()
    with contextlib.suppress(OptionError):
        drawn(compiler.compile(HOSTILE[name]), random.Random(0), 12)
    assert time.process_time() - began < 20


def test_ordinary_multiples_are_no_harm(compiler: GrammarCompiler, tokenizer: Any) -> None:
    matcher = compiler.compile(json_schema({"items": {"type": "number", "multipleOf": 0.01}, "type": "array"}))
    assert matcher.is_complete(tokenizer.encode("[0.25, 1]"))
    compiler.compile(json_schema({"type": "integer", "multipleOf": 100_000_000}))


def test_what_a_compiler_cannot_work_with(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OptionError, match="no tokenizer; grammars need a fast one"):
        GrammarCompiler(None, vocab_size=SIZE, eos_tokens=EOS).compile(json_object())
    slow = SimpleNamespace(is_fast=False)
    with pytest.raises(OptionError, match="SimpleNamespace; grammars need a fast one"):
        GrammarCompiler(slow, vocab_size=SIZE, eos_tokens=EOS).compile(json_object())
    with pytest.raises(OptionError, match="no end-of-sequence token"):
        GrammarCompiler(tokenizer, vocab_size=SIZE, eos_tokens=[SIZE]).compile(json_object())
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(OptionError, match=r"pip install 'flashspec-decoding\[serve\]'"):
        GrammarCompiler(tokenizer, vocab_size=SIZE, eos_tokens=EOS).compile(json_object())


def test_threads_share_one_vocabulary(tokenizer: Any) -> None:
    compiler = GrammarCompiler(tokenizer, vocab_size=VOCAB - 100, eos_tokens=EOS)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda: found.append((compiler.compile(json_object()), compiler._read)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(read) for _, read in found}) == 1
    assert threading.stack_size() == 0
    assert found[0][0].allowed([], EMPTY).shape == (1, VOCAB - 100), "a model with fewer ids than the tokenizer"
