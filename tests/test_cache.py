"""SlotCache against a list of tokens per row, and its masks against their definition."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from flashspec import cache as cache_module
from flashspec.cache import Feed, SlotCache, additive_mask
from flashspec.core import EMPTY, Draft
from flashspec.errors import MemoryLimitError
from flashspec.tree import depths, paths, prefix

CPU = torch.device("cpu")
LAYERS, HEADS, WIDTH = 2, 2, 3
QUICK = settings(max_examples=250, deadline=None, derandomize=True)


def written(ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values that say which token, layer, head and channel they belong to. [rows, heads, m, width]"""
    marks = torch.arange(HEADS * WIDTH).reshape(1, HEADS, 1, WIDTH) / 16
    keys = ids[:, None, :, None] + marks + 1000 * layer
    return keys.float(), -keys.float()


def forward(cache: SlotCache, feeds: Seq[Feed]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """What a model does in a forward; like ``HFTarget``, counts the unseen tokens as held afterwards."""
    prepared = cache.prepare(feeds, device=CPU)
    found = []
    for layer in range(LAYERS):
        keys, values = cache.update(*written(prepared["input_ids"], layer), layer)
        assert torch.equal(values, -keys)
        found.append(keys)
    for feed in feeds:
        cache.lengths[feed.row] += len(feed.unseen)
    return prepared, found


def assert_holds(keys: Seq[Tensor], tokens: Seq[int]) -> None:
    """``keys`` [heads, slots, width] of every layer begin with the keys of ``tokens``."""
    for layer, found in enumerate(keys):
        expected = written(torch.tensor([list(tokens)]), layer)[0][0]
        assert torch.equal(found[:, : len(tokens)], expected)


def held(cache: SlotCache, row: int) -> list[Tensor]:
    return [store[row] for store in cache.keys if store is not None]


def new_cache(max_length: int = 64, rounding: int = 1) -> SlotCache:
    return SlotCache(num_layers=LAYERS, max_length=max_length, rounding=rounding)


def random_tree(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(-1, node) for node in range(n)]


# contents


class Mirror:
    """The same operations on a cache and on lists of tokens."""

    def __init__(self, rng: random.Random, *, max_length: int, rounding: int) -> None:
        self.rng = rng
        self.cache = new_cache(max_length, rounding)
        self.rows: list[list[int]] = []
        self.next_token = 1

    def tokens(self, count: int) -> list[int]:
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def open(self) -> None:
        assert self.cache.open_row() == len(self.rows)
        self.rows.append([])

    def close(self) -> None:
        row = self.rng.randrange(len(self.rows))
        last = len(self.rows) - 1
        assert self.cache.close_row(row) == (last if row != last else None)
        self.rows[row] = self.rows[last]
        self.rows.pop()

    def rewind(self) -> None:
        row = self.rng.randrange(len(self.rows))
        length = self.rng.randint(0, len(self.rows[row]))
        self.rows[row] = self.rows[row][:length]
        self.cache.lengths[row] = length

    def feed(self, row: int) -> Feed | None:
        room = self.cache.max_length - len(self.rows[row])
        if room == 0:
            return None
        unseen = self.rng.randint(1, min(room, 9))
        draft = self.rng.randint(0, min(room - unseen, 7))
        parents = random_tree(self.rng, draft) if self.rng.random() < 0.6 else list(range(-1, draft - 1))
        return Feed(row, self.tokens(unseen), Draft(self.tokens(draft), parents))

    def score_and_keep(self) -> None:
        chosen = sorted(self.rng.sample(range(len(self.rows)), self.rng.randint(1, len(self.rows))))
        feeds = [feed for row in chosen if (feed := self.feed(row)) is not None]
        if not feeds:
            return
        _, keys = forward(self.cache, feeds)
        for index, feed in enumerate(feeds):
            self.rows[feed.row] += feed.unseen
            assert_holds([layer[index] for layer in keys], self.rows[feed.row] + feed.draft.tokens)
        for feed in self.rng.sample(feeds, len(feeds)):
            path = self.rng.choice([[], *paths(feed.draft.parents)])
            self.cache.keep(feed.row, len(self.rows[feed.row]), path)
            self.rows[feed.row] += [feed.draft.tokens[node] for node in path]

    def check(self) -> None:
        assert self.cache.lengths == [len(tokens) for tokens in self.rows]
        assert self.cache.get_seq_length() == max(map(len, self.rows), default=0)
        assert self.cache.capacity <= self.cache.max_length
        for row, tokens in enumerate(self.rows):
            if tokens:
                assert_holds(held(self.cache, row), tokens)


@pytest.mark.parametrize("rounding", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_any_course_of_events(monkeypatch: pytest.MonkeyPatch, seed: int, rounding: int) -> None:
    monkeypatch.setattr(cache_module, "BUCKET", 8)
    rng = random.Random(seed)
    mirror = Mirror(rng, max_length=50, rounding=rounding)
    for _ in range(60):
        events = [mirror.open] if len(mirror.rows) < 5 else []
        if mirror.rows:
            events += [mirror.score_and_keep] * 5 + [mirror.rewind, mirror.close]
        rng.choice(events)()
        mirror.check()


def test_ragged_rows_land_in_their_own_slots() -> None:
    cache = new_cache()
    for _ in range(3):
        cache.open_row()
    forward(cache, [Feed(0, [1, 2, 3], EMPTY), Feed(1, [4], EMPTY), Feed(2, [5, 6], EMPTY)])
    prepared, keys = forward(cache, [Feed(0, [7], EMPTY), Feed(2, [8, 9], Draft.chain([10]))])
    assert prepared["input_ids"].tolist() == [[0, 0, 7], [8, 9, 10]]
    assert prepared["position_ids"].tolist() == [[0, 0, 3], [2, 3, 4]]
    assert [layer.shape for layer in keys] == [(2, HEADS, 5, WIDTH)] * LAYERS
    for row, tokens in enumerate(([1, 2, 3, 7], [4], [5, 6, 8, 9, 10])):
        assert_holds(held(cache, row), tokens)


def test_ordinary_decoding_of_rows_of_different_lengths() -> None:
    cache = new_cache()
    for row, tokens in enumerate(([1, 2, 3], [11], [21, 22])):
        cache.open_row()
        forward(cache, [Feed(row, tokens, EMPTY)])
    for step in range(4, 7):
        forward(cache, [Feed(row, [10 * row + step], EMPTY) for row in range(3)])
    for row, tokens in enumerate(([1, 2, 3, 4, 5, 6], [11, 14, 15, 16], [21, 22, 24, 25, 26])):
        assert_holds(held(cache, row), tokens)


def test_the_last_row_moves_into_the_place_of_a_closed_one() -> None:
    cache = new_cache()
    for row in range(3):
        cache.open_row()
        forward(cache, [Feed(row, list(range(10 * row + 1, 10 * row + 3 + row)), EMPTY)])
    assert cache.close_row(0) == 2
    assert cache.lengths == [4, 3]
    assert_holds(held(cache, 0), [21, 22, 23, 24])
    assert_holds(held(cache, 1), [11, 12, 13])
    assert cache.close_row(1) is None
    assert cache.open_row() == 1
    assert cache.lengths == [4, 0]
    assert cache.close_row(1) is None
    assert cache.close_row(0) is None
    assert cache.get_seq_length() == 0


def test_a_row_may_be_closed_before_another_was_ever_fed() -> None:
    cache = new_cache()
    cache.open_row()
    forward(cache, [Feed(0, [1, 2], EMPTY)])
    cache.open_row()
    assert cache.close_row(0) == 1
    assert cache.lengths == [0]
    forward(cache, [Feed(0, [5, 6, 7], EMPTY)])
    assert_holds(held(cache, 0), [5, 6, 7])


def test_a_path_through_a_tree_is_gathered() -> None:
    cache = new_cache()
    cache.open_row()
    tree = Draft([11, 12, 13, 14, 15, 16], [-1, -1, 1, 0, 2, 4])
    prepared, _ = forward(cache, [Feed(0, [1, 2], tree)])
    assert prepared["position_ids"].tolist() == [[0, 1, 2, 2, 3, 3, 4, 5]]
    cache.keep(0, 2, [1, 2, 4])
    assert cache.lengths == [5]
    assert_holds(held(cache, 0), [1, 2, 12, 13, 15])
    forward(cache, [Feed(0, [20], Draft.chain([21, 22, 23]))])
    cache.keep(0, 6, [0, 1])
    assert_holds(held(cache, 0), [1, 2, 12, 13, 15, 20, 21, 22])
    assert cache.lengths == [8]


def test_nothing_accepted_keeps_the_context_only() -> None:
    cache = new_cache()
    cache.open_row()
    forward(cache, [Feed(0, [1, 2], Draft([11, 12], [-1, -1]))])
    cache.keep(0, 2, [])
    _, keys = forward(cache, [Feed(0, [3], EMPTY)])
    assert [layer.shape[2] for layer in keys] == [3, 3]
    assert_holds([layer[0] for layer in keys], [1, 2, 3])


# room


def test_room_grows_in_buckets_and_never_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "BUCKET", 16)
    cache = new_cache(max_length=100)
    cache.open_row()
    capacities = []
    for token in range(1, 101):
        forward(cache, [Feed(0, [token], EMPTY)])
        assert_holds(held(cache, 0), range(1, token + 1))
        capacities.append(cache.capacity)
    assert sorted(set(capacities)) == [16, 32, 48, 72, 100]
    assert all(capacity >= length for length, capacity in enumerate(capacities, 1))
    assert cache.num_bytes == 2 * LAYERS * HEADS * (100 + 1) * WIDTH * 4


def test_new_rows_keep_what_others_hold() -> None:
    cache = new_cache()
    for row in range(6):
        assert cache.open_row() == row
        forward(cache, [Feed(row, [10 * row + 1, 10 * row + 2], EMPTY)])
        for other in range(row + 1):
            assert_holds(held(cache, other), [10 * other + 1, 10 * other + 2])


@pytest.mark.parametrize(("max_length", "rounding"), [(100, 64), (64, 64), (50, 8), (7, 16)])
def test_rounded_widths_stay_within_the_limit(max_length: int, rounding: int) -> None:
    cache = new_cache(max_length, rounding)
    cache.open_row()
    for token in range(1, max_length + 1):
        _, keys = forward(cache, [Feed(0, [token], EMPTY)])
        width = min(-(-token // rounding) * rounding, max_length)
        assert keys[0].shape[2] == width
        assert cache.get_mask_sizes(1) == (width, 0)
        assert cache.capacity <= max_length
    assert_holds(held(cache, 0), range(1, max_length + 1))


def test_no_memory_is_a_readable_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    cache = new_cache()
    cache.open_row()
    cache.prepare([Feed(0, [1], EMPTY)], device=CPU)
    monkeypatch.setattr(Tensor, "new_zeros", refuse)
    with pytest.raises(MemoryLimitError, match=r"1 sequences of up to 64 tokens .*; run fewer sequences at once"):
        cache.update(*written(torch.tensor([[1]]), 0), 0)


def test_contents_survive_a_growth_that_found_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "BUCKET", 4)
    cache = new_cache()
    for row in range(4):
        cache.open_row()
        forward(cache, [Feed(row, [10 * row + 1, 10 * row + 2], EMPTY)])
    new_zeros, calls = Tensor.new_zeros, iter([True, True, True])

    def short_of_memory(like: Tensor, *arguments: object) -> Tensor:
        if next(calls, False):
            return new_zeros(like, *arguments)
        raise RuntimeError("can't allocate memory")

    cache.open_row()
    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "new_zeros", short_of_memory)
        with pytest.raises(MemoryLimitError):
            cache.prepare([Feed(4, [41], EMPTY)], device=CPU)
    cache.close_row(4)
    forward(cache, [Feed(1, [13, 14, 15], EMPTY)])
    for row, tokens in enumerate(([1, 2], [11, 12, 13, 14, 15], [21, 22], [31, 32])):
        assert_holds(held(cache, row), tokens)


# masks


def visible_slots(length: int, feed: Feed, query: int, window: int | None) -> set[int]:
    """By definition: slots of the context and the unseen tokens up to the query, or a node's own path."""
    base = length + len(feed.unseen)
    positions = list(range(base)) + [base + depth for depth in depths(feed.draft.parents)]
    own = length + query
    node = own - base
    seen = range(own + 1) if node < 0 else [*range(base), *(base + at for at in paths(feed.draft.parents)[node])]
    return {slot for slot in seen if window is None or positions[own] - positions[slot] < window}


def assert_mask(lengths: list[int], feeds: list[Feed], mask: Tensor, window: int | None) -> None:
    lowest = torch.finfo(mask.dtype).min
    m = max(len(feed) for feed in feeds)
    assert mask.shape[:3] == (len(feeds), 1, m)
    for index, feed in enumerate(feeds):
        pad = m - len(feed)
        for at in range(m):
            row = mask[index, 0, at].tolist()
            assert set(row) <= {0.0, lowest}
            seen = {slot for slot, value in enumerate(row) if value == 0}
            assert seen  # an empty softmax row would be NaN, and padding has rows too
            if at >= pad:
                assert seen == visible_slots(lengths[feed.row], feed, at - pad, window)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[Feed]]:
    rng = random.Random(draw(st.integers(0, 2**32)))
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    rows = draw(st.sets(st.sampled_from(range(len(lengths))), min_size=1))
    kinds = draw(st.sampled_from(["empty", "chains", "trees", "mixed"]))
    feeds = []
    for row in sorted(rows):
        n = 0 if kinds == "empty" or rng.random() < 0.2 else rng.randint(1, 7)
        is_chain = kinds == "chains" or (kinds == "mixed" and rng.random() < 0.5)
        parents = list(range(-1, n - 1)) if is_chain else random_tree(rng, n)
        feeds.append(Feed(row, [1] * rng.randint(1, 6), Draft([2] * n, parents)))
    return lengths, feeds


@given(
    batch=batches(),
    window=st.sampled_from([None, None, 1, 1, 2, 2, 3, 4, 6, 9]),
    rounding=st.sampled_from([1, 4, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
@QUICK
def test_masks_are_what_the_definition_says(
    batch: tuple[list[int], list[Feed]], window: int | None, rounding: int, dtype: torch.dtype
) -> None:
    lengths, feeds = batch
    cache = new_cache(max_length=64, rounding=rounding)
    cache.lengths = list(lengths)
    prepared = cache.prepare(feeds, device=CPU)
    mask = additive_mask(prepared, window=window, dtype=dtype)
    assert mask.dtype is dtype
    assert mask.shape[3] % rounding == 0
    assert_mask(lengths, feeds, mask, window)


@given(batch=batches())
@QUICK
def test_positions_are_depths(batch: tuple[list[int], list[Feed]]) -> None:
    lengths, feeds = batch
    cache = new_cache()
    cache.lengths = list(lengths)
    prepared = cache.prepare(feeds, device=CPU)
    for index, feed in enumerate(feeds):
        start = lengths[feed.row] + len(feed.unseen)
        expected = [*range(lengths[feed.row], start), *(start + depth for depth in depths(feed.draft.parents))]
        assert prepared["position_ids"][index].tolist()[-len(feed) :] == expected
        assert prepared["input_ids"][index].tolist()[-len(feed) :] == feed.unseen + feed.draft.tokens


def test_a_small_tree_behind_a_window_by_hand() -> None:
    cache = new_cache()
    cache.lengths = [3]
    prepared = cache.prepare([Feed(0, [9], Draft([1, 2, 3], [-1, -1, 1]))], device=CPU)
    full = (additive_mask(prepared, window=None, dtype=torch.float32)[0, 0] == 0).int().tolist()
    assert full == [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1, 1]]
    window = (additive_mask(prepared, window=3, dtype=torch.float32)[0, 0] == 0).int().tolist()
    assert window == [[0, 1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 0, 0], [0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 1, 0, 1, 1]]
    window = (additive_mask(prepared, window=1, dtype=torch.float32)[0, 0] == 0).int().tolist()
    assert window == [[0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 0, 0, 1]]


# a tree that is fed in parts


class Reader:
    """One layer of attention whose queries, keys and values are functions of token and position. [heads, WIDTH]"""

    def __init__(self) -> None:
        self.cache = SlotCache(num_layers=1, max_length=64)

    def states(self, ids: Tensor, positions: Tensor, kind: int) -> Tensor:
        """[rows, heads, m, width]"""
        marks = torch.arange(1, HEADS * WIDTH + 1).reshape(1, HEADS, 1, WIDTH)
        return torch.sin(marks * (ids + 0.3 * kind)[:, None, :, None] + positions[:, None, :, None] * (kind + 1.0))

    def read(self, feeds: Seq[Feed]) -> list[Tensor]:
        """What each token of each feed attends to, [heads, len(feed), width]."""
        prepared = self.cache.prepare(feeds, device=CPU)
        where = prepared["input_ids"], prepared["position_ids"]
        query, key, value = (self.states(*where, kind) for kind in range(3))
        keys, values = self.cache.update(key, value, 0)
        mask = additive_mask(prepared, window=None, dtype=torch.float32)
        found = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
        for feed in feeds:
            self.cache.lengths[feed.row] += len(feed.unseen)
        return [each[:, -len(feed) :] for each, feed in zip(found, feeds, strict=True)]


def readers(rng: random.Random, count: int) -> tuple[Reader, Reader]:
    """Two that hold the same rows of unequal lengths."""
    found = Reader(), Reader()
    for row in range(count):
        tokens = rng.choices(range(50), k=rng.randint(1, 9))
        for reader in found:
            assert reader.cache.open_row() == row
            reader.read([Feed(row, tokens, EMPTY)])
    return found


@pytest.mark.parametrize("seed", range(25))
def test_a_tree_may_be_fed_in_parts(seed: int) -> None:
    """In ragged batches of which rows drop out: the same attention, keys and values as from the whole tree at once."""
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    whole, parts = readers(rng, count)
    trees = []
    for _ in range(count):
        n = rng.randint(1, 9)
        parents = list(range(-1, n - 1)) if rng.random() < 0.3 else random_tree(rng, n)
        trees.append(Draft(rng.choices(range(50), k=n), parents))
    expected = whole.read([Feed(row, [], tree) for row, tree in enumerate(trees)])
    found: list[list[Tensor]] = [[] for _ in trees]
    stored = [0] * count
    while live := [row for row in range(count) if stored[row] < len(trees[row])]:
        until = {row: rng.randint(stored[row] + 1, len(trees[row])) for row in live}
        feeds = [Feed(row, [], prefix(trees[row], until[row]), stored[row]) for row in live]
        assert [len(feed) for feed in feeds] == [until[row] - stored[row] for row in live]
        for row, output in zip(live, parts.read(feeds), strict=True):
            found[row].append(output)
            stored[row] = until[row]
    for row, tree in enumerate(trees):
        torch.testing.assert_close(torch.cat(found[row], 1), expected[row])
        used = whole.cache.lengths[row] + len(tree)
        for mine, theirs in (
            (parts.cache.keys[0], whole.cache.keys[0]),
            (parts.cache.values[0], whole.cache.values[0]),
        ):
            assert mine is not None
            assert theirs is not None
            assert torch.equal(mine[row, :, :used], theirs[row, :, :used])
    assert parts.cache.lengths == whole.cache.lengths, "nodes are never counted as held"


@given(batch=batches(), window=st.sampled_from([None, 1, 2, 3, 6]), rounding=st.sampled_from([1, 4, 16]))
@QUICK
def test_masks_and_positions_of_the_last_part_are_those_of_the_whole(
    batch: tuple[list[int], list[Feed]], window: int | None, rounding: int
) -> None:
    lengths, feeds = batch
    cache, rng = new_cache(rounding=rounding), random.Random(len(feeds))
    cache.lengths = list(lengths)
    trees = [feed.draft if len(feed.draft) else Draft.chain([2]) for feed in feeds]
    stored = [rng.randrange(len(tree)) for tree in trees]
    parts = [Feed(feed.row, [], tree, count) for feed, tree, count in zip(feeds, trees, stored, strict=True)]
    prepared = cache.prepare(parts, device=CPU)
    mask = additive_mask(prepared, window=window, dtype=torch.float32)
    m = max(map(len, parts))
    for index, part in enumerate(parts):
        positions = prepared["position_ids"][index].tolist()[m - len(part) :]
        assert positions == [lengths[part.row] + depth for depth in depths(part.draft.parents)[part.num_stored :]]
        for at in range(len(part)):
            seen = {slot for slot, value in enumerate(mask[index, 0, m - len(part) + at].tolist()) if value == 0}
            assert seen == visible_slots(
                lengths[part.row], Feed(part.row, [], part.draft), part.num_stored + at, window
            )
