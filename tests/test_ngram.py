"""The index finds what a scan of the whole context finds, at a cost that does not grow with it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from conftest import sequence
from hypothesis import given, settings, strategies as st

from flashspec.core import Draft
from flashspec.drafters.ngram import NGramDrafter, NGramIndex
from flashspec.errors import OptionError

QUICK = settings(max_examples=300, deadline=None, derandomize=True)
TOKENS = st.integers(1, 4).flatmap(lambda size: st.lists(st.integers(0, size), max_size=40))
SIZES = st.tuples(st.integers(1, 5), st.integers(0, 4)).map(lambda pair: (pair[0], pair[0] + pair[1]))


def scan(tokens: list[int], min_n: int, max_n: int, count: int) -> list[int]:
    """Longest suffix first, latest occurrence with a successor; what is copied may be copied again."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                grown = list(tokens)
                for at in range(end, end + count):
                    grown.append(grown[at])
                return grown[len(tokens) :]
    return []


def index_of(tokens: list[int], min_n: int, max_n: int) -> NGramIndex:
    index = NGramIndex(min_n=min_n, max_n=max_n)
    index.extend(tokens)
    return index


# the index


@given(tokens=TOKENS, sizes=SIZES, count=st.integers(0, 60))
@QUICK
def test_the_index_finds_what_a_scan_finds(tokens: list[int], sizes: tuple[int, int], count: int) -> None:
    assert index_of(tokens, *sizes).continuation(count) == scan(tokens, *sizes, count)


@given(tokens=TOKENS, sizes=SIZES, cuts=st.lists(st.integers(0, 40), max_size=6))
@QUICK
def test_tokens_may_arrive_in_any_portions(tokens: list[int], sizes: tuple[int, int], cuts: list[int]) -> None:
    index = NGramIndex(min_n=sizes[0], max_n=sizes[1])
    edges = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for start, end in itertools.pairwise(edges):
        index.extend(tokens[start:end])
        assert index.continuation(9) == scan(tokens[:end], *sizes, 9)
    assert index.tokens == tokens


def test_the_longest_match_comes_first_then_the_latest() -> None:
    assert index_of([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1, 3).continuation(2) == [7, 2]  # 1 2 3 beats the later 2 3
    assert index_of([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], 1, 2).continuation(2) == [8, 1]
    assert index_of([5, 1, 5, 2, 5], 1, 4).continuation(3) == [2, 5, 2]


def test_the_context_does_not_match_its_own_end() -> None:
    assert index_of([1, 2, 3], 1, 3).continuation(5) == []
    assert index_of([4], 1, 1).continuation(5) == []
    assert index_of([], 1, 1).continuation(5) == []


@pytest.mark.parametrize("period", [1, 2, 3, 5])
def test_a_loop_goes_on_for_as_long_as_it_is_asked_to(period: int) -> None:
    loop = list(range(10, 10 + period)) * 12
    assert index_of(loop[: 6 * period], 2, 4).continuation(6 * period) == loop[6 * period :]


# the drafter


@given(tokens=TOKENS, sizes=SIZES, budget=st.integers(0, 12), eos=st.sets(st.integers(0, 4), max_size=2))
@QUICK
def test_drafts_are_chains_within_the_budget_and_end_at_eos(
    tokens: list[int], sizes: tuple[int, int], budget: int, eos: set[int]
) -> None:
    drafter = NGramDrafter(min_n=sizes[0], max_n=sizes[1])
    expected = scan(tokens, *sizes, budget)
    ends = [at for at, token in enumerate(expected) if token in eos]
    expected = expected[: ends[0] + 1] if ends else expected
    draft = drafter.propose([sequence(tokens, eos=list(eos))], [budget])[0]
    assert draft == Draft(expected, list(range(-1, len(expected) - 1)), None, "ngram")


def test_eos_is_the_last_token_of_a_draft() -> None:
    seq = sequence([1, 2, 3, 9, 4, 1, 2], eos=[9])
    assert NGramDrafter().propose([seq], [8])[0].tokens == [3, 9]


@pytest.mark.parametrize("tokens", [[], [1], [1, 1], [1, 2], [1, 2, 1]])
def test_short_prompts_have_empty_drafts(tokens: list[int]) -> None:
    assert NGramDrafter(min_n=2, max_n=4).propose([sequence(tokens)], [5]) == [Draft([], [], None, "ngram")]


def test_a_budget_of_nothing_still_learns() -> None:
    drafter, seq = NGramDrafter(), sequence([1, 2, 3])
    assert drafter.propose([seq], [0])[0].tokens == []
    seq.tokens += [1, 2]
    assert drafter.propose([seq], [-1])[0].tokens == []
    assert drafter.propose([seq], [2])[0].tokens == [3, 1]


def test_sequences_do_not_learn_from_each_other() -> None:
    drafter = NGramDrafter()
    seqs = [sequence([1, 2, 3, 1, 2], name="a"), sequence([1, 2], name="b"), sequence([1, 2, 5, 1, 2], name="c")]
    assert [draft.tokens for draft in drafter.propose(seqs, [1, 4, 2])] == [[3], [], [5, 1]]
    seqs[1].tokens += [8, 1, 2]
    assert [draft.tokens for draft in drafter.propose(seqs[::-1], [3, 2, 1])] == [[5, 1, 2], [8, 1], [3]]


def test_a_forgotten_sequence_leaves_nothing() -> None:
    drafter = NGramDrafter()
    first = sequence([1, 2, 3, 1, 2])
    drafter.propose([first], [3])
    drafter.forget(first)
    drafter.forget(sequence([1], name="unknown"))
    assert drafter.propose([sequence([7, 8, 1, 2, 6, 1, 2])], [1])[0].tokens == [6]
    drafter.forget(first)
    assert drafter.propose([sequence([1, 2])], [3])[0].tokens == []


@pytest.mark.parametrize(
    ("min_n", "max_n"), [(0, 4), (-1, 2), (3, 2), (1, 65), (65, 65), (2.5, 4), ("2", 4), (1, None), (True, 2)]
)
def test_options_out_of_range(min_n: Any, max_n: Any) -> None:
    with pytest.raises(OptionError, match=rf"min_n is {min_n!r}, max_n is {max_n!r}; .* 1 <= min_n"):
        NGramDrafter(min_n=min_n, max_n=max_n)


def test_options_in_range() -> None:
    tokens = list(range(70)) * 2
    for sizes in ((1, 1), (1, 64), (64, 64)):
        draft = NGramDrafter(min_n=sizes[0], max_n=sizes[1]).propose([sequence(tokens)], [3])[0]
        assert draft.tokens == [0, 1, 2]


# cost


class Counted(list[int]):
    """Counts the elements that are read."""

    num_reads = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        self.num_reads += len(found) if isinstance(key, slice) else 1
        return found

    def __iter__(self) -> Iterator[int]:
        self.num_reads += len(self)
        return super().__iter__()


def cost_of_a_token(context: int) -> tuple[int, int, int]:
    """Elements read of the sequence and of the index, and lines run, for one more token after ``context`` others."""
    drafter, seq = NGramDrafter(), sequence([])
    seq.tokens = Counted(n * n % 97 for n in range(context))
    drafter.propose([seq], [8])
    index = next(iter(drafter._indices.values()))
    index.tokens = Counted(index.tokens)
    seq.tokens.num_reads = 0
    seq.tokens.append(context * context % 97)
    lines = lines_run(lambda: drafter.propose([seq], [8]))
    return seq.tokens.num_reads, index.tokens.num_reads, lines


def lines_run(call: Any) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_the_cost_of_a_token_does_not_grow_with_the_context() -> None:
    base = 97 * 4
    costs = [cost_of_a_token(base * factor) for factor in (1, 4, 32)]
    assert costs[0] == costs[1] == costs[2]
    assert 0 < costs[0][0] <= 2
    assert 0 < costs[0][1] < 60
