"""Prompt lookup: what followed the same few tokens before will follow them again.

Source: the idea is Saxena's prompt lookup decoding (2023). The index is kept while tokens arrive, so a lookup
does not scan the context.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from flashspec.core import Draft, Drafter, Sequence
from flashspec.errors import OptionError

LONGEST = 32  # a longer match is no surer


class NGramIndex:
    """Latest end of every n-gram of min_n to max_n tokens that something follows. O(max_n - min_n + 1) a token."""

    def __init__(self, *, min_n: int, max_n: int) -> None:
        self.min_n, self.max_n = min_n, max_n
        self.tokens: list[int] = []
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(min_n, max_n + 1)]

    def extend(self, tokens: Seq[int]) -> None:
        """Append tokens. An n-gram is indexed when its successor arrives, so the context's own end never is."""
        for token in tokens:
            end = len(self.tokens)
            for ends, n in zip(self._ends, range(self.min_n, self.max_n + 1), strict=True):
                if n <= end:
                    ends[tuple(self.tokens[end - n : end])] = end
            self.tokens.append(token)

    def match(self) -> int | None:
        """Where the latest occurrence of the longest known suffix was followed by something; None if unknown."""
        for n in range(min(self.max_n, len(self.tokens)), self.min_n - 1, -1):
            end = self._ends[n - self.min_n].get(tuple(self.tokens[-n:]))
            if end is not None:
                return end
        return None

    def continuation(self, count: int) -> list[int]:
        """Up to ``count`` tokens that followed the match; a match near the end repeats itself, as loops do."""
        start = self.match()
        if start is None:
            return []
        period = len(self.tokens) - start
        return [self.tokens[start + i % period] for i in range(count)]

    def match_length(self) -> int:
        """Tokens before the match that agree with the end of the text, up to ``LONGEST``; 0 without a match."""
        start = self.match()
        if start is None:
            return 0
        n = 0
        while n < min(start, LONGEST) and self.tokens[start - 1 - n] == self.tokens[-1 - n]:
            n += 1
        return n


class NGramDrafter(Drafter):
    """Longest match first between ``min_n`` and ``max_n`` tokens, the most recent occurrence; nothing otherwise."""

    name = "ngram"

    def __init__(self, *, min_n: int = 2, max_n: int = 6) -> None:
        if type(min_n) is not int or type(max_n) is not int or not 1 <= min_n <= max_n <= 64:
            raise OptionError(f"min_n is {min_n!r}, max_n is {max_n!r}; whole numbers with 1 <= min_n <= max_n <= 64")
        self.min_n, self.max_n = min_n, max_n
        self._indices: dict[str, NGramIndex] = {}
        self._predictions: dict[str, list[int]] = {}

    def predict(self, seq_id: str, tokens: Seq[int]) -> None:
        """Look guesses up in an expected output as well: it is read as if it stood before the prompt."""
        self._predictions[seq_id] = list(tokens)
        self._indices.pop(seq_id, None)

    def propose(self, seqs: Seq[Sequence], budgets: Seq[int]) -> list[Draft]:
        return [self._draft(seq, budget) for seq, budget in zip(seqs, budgets, strict=True)]

    def forget(self, seq: Sequence) -> None:
        self._indices.pop(seq.id, None)
        self._predictions.pop(seq.id, None)

    def _draft(self, seq: Sequence, budget: int) -> Draft:
        index = self._indices.get(seq.id)
        if index is None:
            index = self._indices[seq.id] = NGramIndex(min_n=self.min_n, max_n=self.max_n)
            index.extend(self._predictions.get(seq.id, []))
        index.extend(seq.tokens[len(index.tokens) - len(self._predictions.get(seq.id, [])) :])
        tokens = until_eos(index.continuation(budget) if budget > 0 else [], seq.eos_tokens)
        if self.rule is None or not tokens:
            return Draft.chain(tokens, drafter=self.name)
        length = index.match_length()  # grows by one with each guess that holds
        confidences = [1 - 1 / (1 + length + i) for i in range(len(tokens))]
        worth = self.rule.length(seq, confidences)
        return Draft.chain(tokens[:worth], drafter=self.name, confidences=confidences[:worth])


def until_eos(tokens: list[int], eos_tokens: frozenset[int]) -> list[int]:
    """The tokens up to the first that ends a sequence, itself included: nothing can follow it."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in eos_tokens), len(tokens))
    return tokens[:end]
