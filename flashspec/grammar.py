"""Grammars to token masks: which tokens may follow an output and every node of a draft.

It knows llguidance, which does the parsing, and tokenizers, whose bytes the grammar is about. It does not know models,
probabilities or who guessed. A ``Matcher`` holds no history: its parser is only a cache that is moved, by rollback,
to whatever output is asked about, so that target and draft model may ask in turns.
"""

from __future__ import annotations

import json
import math
import re
import threading
from bisect import bisect_left
from collections.abc import Collection, Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from flashspec.core import ROOT, Draft, Grammar
from flashspec.errors import OptionError
from flashspec.text import Tokenizer
from flashspec.tree import children

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from numpy.typing import NDArray

WHITESPACE = r"\n? {0,20}"  # between two tokens of JSON: small models run away with endless white space
# some grammars above these limits take llguidance minutes and gigabytes, or overflow its stack
MAX_CHARACTERS, MAX_LINES, MAX_MULTIPLE, INITIAL_FUEL = 60_000, 500, 10_000, 30_000
STACK, DETAIL = 256 << 20, 300  # bytes, used only where needed; characters


def json_object() -> Grammar:
    """Any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: dict[str, Any]) -> Grammar:
    """JSON of a schema; raises OptionError where that is not JSON itself."""
    try:
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal("json_schema", repr(schema), str(error)) from error


class GrammarCompiler:
    """Grammars for one tokenizer, which is read (about a second) when the first grammar comes. Thread-safe.

    Args:
        tokenizer: a fast one of Transformers.
        vocab_size: the model's; ids that the tokenizer lacks are never allowed.
        eos_tokens: what ends an output.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, vocab_size: int, eos_tokens: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_tokens = frozenset(token for token in eos_tokens if 0 <= token < vocab_size)
        self._tokenizer = tokenizer
        self._read: LLTokenizer | None = None
        self._lock = threading.Lock()

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher of its own for one request.

        Raises:
            OptionError: an invalid or too complex grammar, one that no output satisfies, a tokenizer that llguidance
                cannot read, no end-of-sequence token, or llguidance not installed.
        """
        with self._lock:  # stack_size is the whole process's
            tokenizer, before = self._vocabulary(), threading.stack_size(STACK)
            try:
                with ThreadPoolExecutor(1) as pool:  # llguidance recurses without a limit when it builds
                    start = pool.submit(_build, grammar, tokenizer).result()
            finally:
                threading.stack_size(before)
        return Matcher(start, vocab_size=self.vocab_size, eos_tokens=self.eos_tokens)

    def _vocabulary(self) -> LLTokenizer:
        if self._read is None:
            try:
                from llguidance.hf import from_tokenizer
            except ImportError as error:
                install = "pip install 'flashspec-decoding[serve]'"
                raise OptionError(f"grammars need llguidance, which is not installed; {install}") from error
            if not getattr(self._tokenizer, "is_fast", False):
                kind = type(self._tokenizer).__name__
                what = "this model has no tokenizer" if self._tokenizer is None else f"the tokenizer is {kind}"
                raise OptionError(f"{what}; grammars need a fast one, leave the grammar out")
            if not self.eos_tokens:
                raise OptionError(
                    "this model has no end-of-sequence token to end an output with; leave the grammar out"
                )
            size = max(self.vocab_size, len(self._tokenizer))  # type: ignore[arg-type]
            try:
                self._read = from_tokenizer(self._tokenizer, n_vocab=size, eos_token=sorted(self.eos_tokens))
            except Exception as error:  # what Rust makes of a tokenizer that it does not know
                detail = _one_line(str(error))
                raise OptionError(f"llguidance cannot read this tokenizer ({detail}); leave the grammar out") from error
        return self._read


class Matcher:
    """A grammar's ``Constraint``. Not thread-safe.

    Where the parser gives up in the middle (its limits, a dead end) only an end-of-sequence token is allowed;
    ``is_complete`` is False then.
    """

    def __init__(self, start: LLMatcher, *, vocab_size: int, eos_tokens: frozenset[int]) -> None:
        self._start, self._now = start, start.deep_copy()
        self._held: list[int] = []  # what ``_now`` has consumed; never an end-of-sequence token
        self._vocab_size, self._eos_tokens = vocab_size, eos_tokens
        self._eos_ids = sorted(eos_tokens)

    def __copy__(self) -> Matcher:
        """Another output's, without compiling the grammar again."""
        return Matcher(self._start, vocab_size=self._vocab_size, eos_tokens=self._eos_tokens)

    def allowed(self, output: Seq[int], draft: Draft) -> torch.Tensor:
        """[n + 1, vocab] bool: row 0 after ``output``, row i + 1 after node i; at least one token in each.

        All True after a token that the grammar forbids, and after an end-of-sequence token.
        """
        rows = np.ones((len(draft) + 1, self._vocab_size), np.bool_)
        if self._go(output):
            self._fill(rows[0])
            self._walk(rows, draft, len(output))
        return torch.from_numpy(rows)

    def is_complete(self, output: Seq[int]) -> bool:
        """Whether the output, up to its first end-of-sequence token, is all that the grammar asks for."""
        end = next((index for index, token in enumerate(output) if token in self._eos_tokens), len(output))
        return self._go(output[:end]) and self._now.is_accepting()

    def _walk(self, rows: NDArray[np.bool_], draft: Draft, length: int) -> None:
        below = children(draft.parents)
        stack = [(node, length) for node in reversed(below.get(ROOT, []))]
        while stack:
            node, above = stack.pop()
            token = draft.tokens[node]
            # the mask decides, not the parser, which would take other spellings of a text whose tokens are forced
            if token in self._eos_tokens or not rows[draft.parents[node] + 1, token]:
                continue
            self._rewind(above)
            self._consume([token])
            self._fill(rows[node + 1])
            stack += [(child, above + 1) for child in reversed(below.get(node, []))]

    def _go(self, output: Seq[int]) -> bool:
        """Move to where ``output`` ends; False if it is forbidden or has ended."""
        output = list(output)
        if not self._eos_tokens.isdisjoint(output):
            return False
        common = _common(self._held, output)
        self._rewind(common)
        return self._consume(output[common:])

    def _rewind(self, length: int) -> None:
        if self._now.is_error():  # for good
            self._now = self._start.deep_copy()
            self._now.try_consume_tokens(self._held[:length])
        elif length < len(self._held):
            self._now.rollback(len(self._held) - length)
        del self._held[length:]

    def _consume(self, tokens: list[int]) -> bool:
        """False where the grammar forbids one; what an error leaves is for ``_fill``."""
        taken = self._now.try_consume_tokens(tokens)  # leaves the parser well, unlike consume_tokens
        self._held += tokens[:taken]
        return taken == len(tokens) or self._now.is_error()

    def _fill(self, row: NDArray[np.bool_]) -> None:
        bits = np.frombuffer(self._now.compute_bitmask(), np.uint8)
        row[:] = np.unpackbits(bits, count=len(row), bitorder="little").view(np.bool_)
        row[self._eos_ids] = self._now.is_accepting()  # an end-of-sequence token may be text as well
        if not row.any():
            row[self._eos_ids] = True


def _common(held: list[int], output: list[int]) -> int:
    """Length of the common prefix; by comparing slices, which is fast."""
    return bisect_left(range(min(len(held), len(output))), True, key=lambda n: held[: n + 1] != output[: n + 1])


def _build(grammar: Grammar, tokenizer: LLTokenizer) -> LLMatcher:
    from llguidance import LLMatcher, LLParserLimits

    try:
        text = _source(grammar)
    except (ValueError, RecursionError) as error:  # OptionError is a ValueError
        raise _refusal(grammar.kind, grammar.text, str(error)) from error
    limits = LLParserLimits(initial_lexer_fuel=INITIAL_FUEL, verbose_errors=False)
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds what no output satisfies, and what is too complex
    if matcher.is_error():
        raise _refusal(grammar.kind, grammar.text, matcher.get_error())
    return matcher


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's words."""
    from llguidance import LLMatcher

    text = grammar.text
    if grammar.kind == "json_schema":
        schema = json.loads(text)
        schema = {} if schema is True else {"enum": []} if schema is False else schema
        text = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))
    _check_size(text, lines=grammar.kind == "lark" and text.count("\n"))
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if grammar.kind == "lark":
        return LLMatcher.grammar_from_lark(text)
    raise ValueError("its kind must be json_schema, regex or lark")


def _check_size(text: str, *, lines: int) -> None:
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(text)} characters, of {MAX_CHARACTERS} at most")
    if any("\ud800" <= sign <= "\udfff" for sign in text):
        raise ValueError("it has half a character in it (lone surrogates)")
    if lines > MAX_LINES:
        raise ValueError(f"it has {lines} lines, of {MAX_LINES} at most")
    multiples = [Decimal(found) for found in re.findall(r'"multipleOf"\s*:\s*([0-9]+\.?[0-9]*)', text)]
    digits = ["".join(map(str, number.normalize().as_tuple().digits)) for number in multiples]
    if math.lcm(*map(int, digits)) > MAX_MULTIPLE:  # a state for every remainder
        raise ValueError(f"its multipleOf, taken together, are above the limit of {MAX_MULTIPLE}")


def _refusal(kind: str, text: str, detail: str) -> OptionError:
    shown = " ".join(text.split())
    return OptionError(f"the {kind} grammar {shown!r:.80} cannot be used: {_one_line(detail)}; correct or simplify it")


def _one_line(text: str) -> str:
    line = " ".join(text.replace("<non-verbose/>", "").split())
    return line if len(line) <= DETAIL else line[: DETAIL - 3] + "..."
