"""Keys and values of finished sequences, for those that begin alike.

It knows token lists, opaque states and their size in bytes; what a state is, is its owner's affair. A model's states
are copies: whoever starts from one goes on in a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from flashspec.core import Sequence, Target
from flashspec.errors import MemoryLimitError, OptionError

FEWEST_TOKENS = 16  # a shorter prefix is read as fast as it is looked up


@dataclass(slots=True, eq=False)
class _Prefix:
    owner: object
    tokens: list[int]
    state: Any
    num_bytes: int


class PrefixStore:
    """States by the tokens they stand for; the least recently used go first. Not thread-safe.

    Args:
        max_bytes: of all states together; 0 keeps nothing.

    Raises:
        OptionError: a negative size.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise OptionError(f"the prefix store's size is {max_bytes} bytes; it must be at least 0")
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._held: list[_Prefix] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def put(self, owner: object, tokens: Seq[int], state: Any, num_bytes: int) -> None:
        """Keep a state that stands for ``tokens``. It takes the place of those that it continues."""
        mine = list(tokens)
        if len(mine) < FEWEST_TOKENS or num_bytes > self.max_bytes:
            return
        for held in [held for held in self._held if held.owner is owner]:
            if shared(held.tokens, mine) == len(held.tokens):
                self._drop(held)
        while self.num_bytes + num_bytes > self.max_bytes:
            self._drop(self._held[0])
        self._held.append(_Prefix(owner, mine, state, num_bytes))
        self.num_bytes += num_bytes

    def holds(self, owner: object, tokens: Seq[int]) -> bool:
        """Whether all of ``tokens`` is there already, as the beginning of something; that counts as use."""
        length, held = self._best(owner, tokens)
        if held is None or length < len(tokens):
            return False
        self._touch(held)
        return True

    def length(self, owner: object, tokens: Seq[int]) -> int:
        """Of the longest beginning of ``tokens`` that is held; 0 below ``FEWEST_TOKENS``."""
        return self._best(owner, tokens)[0]

    def find(self, owner: object, tokens: Seq[int]) -> tuple[int, Any]:
        """The length of the longest beginning that is held and a state that begins with it; (0, None) without."""
        length, held = self._best(owner, tokens)
        if held is None:
            return 0, None
        self._touch(held)
        return length, held.state

    def clear(self) -> None:
        self._held.clear()
        self.num_bytes = 0

    def _best(self, owner: object, tokens: Seq[int]) -> tuple[int, _Prefix | None]:
        best: tuple[int, _Prefix | None] = (FEWEST_TOKENS - 1, None)
        mine = list(tokens)
        for held in reversed(self._held):
            if held.owner is owner and (length := shared(held.tokens, mine)) > best[0]:
                best = (length, held)
        return best if best[1] is not None else (0, None)

    def _touch(self, held: _Prefix) -> None:
        self._held.remove(held)
        self._held.append(held)

    def _drop(self, held: _Prefix) -> None:
        self._held.remove(held)
        self.num_bytes -= held.num_bytes


def shared(a: list[int], b: list[int]) -> int:
    """How many tokens two lists have in common at their beginning."""
    low, high = 0, min(len(a), len(b))
    if a[:FEWEST_TOKENS] != b[:FEWEST_TOKENS]:  # most pairs
        high = min(high, FEWEST_TOKENS)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def keep(store: PrefixStore, target: Target, seq: Sequence, *, limit: int | None = None) -> None:
    """Keep what a model holds of a sequence, or of its first ``limit`` tokens, before it is forgotten."""
    tokens = seq.tokens[: target.cached_length(seq)][:limit]
    if len(tokens) >= FEWEST_TOKENS and store.max_bytes and not store.holds(target, tokens):
        try:
            state, num_bytes = target.save(seq, len(tokens))
        except MemoryLimitError:
            store.clear()  # room for those that run is worth more
            return
        store.put(target, tokens, state, num_bytes)


def available(store: PrefixStore, target: Target, seq: Sequence, running: Iterable[Sequence]) -> int:
    """Tokens that ``resume`` would find."""
    return max(_kept(store, target, seq), _running(target, seq, running)[0])


def resume(
    store: PrefixStore, target: Target, seq: Sequence, running: Iterable[Sequence], *, limit: int | None = None
) -> int:
    """Start a sequence from the keys and values of the longest beginning that a finished or running one has.

    Args:
        limit: use no more than so many tokens.

    Returns:
        the number of tokens that need not be read.
    """
    length, other = _running(target, seq, running)
    if other is None or _kept(store, target, seq) >= length:
        length, state = store.find(target, seq.tokens[:-1])
    else:
        state, _ = target.save(other, length)
    length = length if limit is None else min(length, limit)
    if length < FEWEST_TOKENS:
        return 0
    target.restore(seq, state, length)
    return length


def _kept(store: PrefixStore, target: Target, seq: Sequence) -> int:
    return store.length(target, seq.tokens[:-1])  # the logits after the last token need it fed


def _running(target: Target, seq: Sequence, running: Iterable[Sequence]) -> tuple[int, Sequence | None]:
    best: tuple[int, Sequence | None] = (FEWEST_TOKENS - 1, None)
    for other in running:
        if other is seq:
            continue
        length = min(shared(other.tokens, seq.tokens[:-1]), target.cached_length(other))
        if length > best[0]:
            best = (length, other)
    return best if best[1] is not None else (0, None)
