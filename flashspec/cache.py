"""SlotCache: keys and values with a length per row, under a stock Transformers model.

Every layer holds [rows, kv_heads, capacity + 1, head_dim]. A forward feeds each row any number of new tokens,
right-aligned; ``update`` scatters their keys and values to the row's own slots (padding goes to the last slot, which
nothing attends to) and returns the rows in use up to the current width. What a query may see is said by an additive
mask built here from lengths and draft geometry, so rolling back is setting a length.

Names that change between Transformers versions stay in this file and in ``backends/hf.py``.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from flashspec.core import Draft
from flashspec.errors import MemoryLimitError
from flashspec.tree import depths, paths

BUCKET = 256  # capacity grows in whole buckets, and by half of what there is
RELEASE_BYTES = 64 << 20  # more storage than this is given back when no row is left


@dataclass(frozen=True, slots=True)
class Feed:
    """What one row is fed in a forward: its unseen tokens, then its draft's nodes."""

    row: int
    unseen: list[int]
    draft: Draft
    num_stored: int = 0  # nodes whose keys and values are there already, from the last forward; then nothing is unseen

    def __len__(self) -> int:
        return len(self.unseen) + len(self.draft) - self.num_stored


class SlotCache(Cache):  # type: ignore[misc]
    """Per-row lengths over all layers of one model.

    Args:
        num_layers: attention layers of the model.
        max_length: positions the model has; capacity never exceeds it.
        rounding: the width of what attention reads is rounded up to a multiple of this; 1 on a CPU, more where
            static shapes pay.
    """

    is_compileable = False

    def __init__(self, *, num_layers: int, max_length: int, rounding: int = 1) -> None:
        super().__init__(layers=[])
        self.max_length = max_length
        self.max_cells: int | None = None  # rows times capacity from which on no spare room is taken
        self.expected_rows = 0  # that will be open together: room for them is taken at once, and no more
        self.rounding = rounding
        self.capacity = 0
        self.lengths: list[int] = []  # one per row in use; rows are always 0 .. len - 1
        self.keys: list[Tensor | None] = [None] * num_layers
        self.values: list[Tensor | None] = [None] * num_layers
        self._allocated_rows = 0
        self._width = 0
        self._rows: slice | Tensor = slice(0, 0)
        self._slots: Tensor | slice = slice(0, 0)
        self._rows_index = torch.empty(0, dtype=torch.long)  # of scattered tokens

    # rows

    def open_row(self) -> int:
        """A new empty row."""
        self.lengths.append(0)
        return len(self.lengths) - 1

    @torch.inference_mode()
    def close_row(self, row: int) -> int | None:
        """Free a row; the last row moves into its place. Returns the row that moved, if one did."""
        last = len(self.lengths) - 1
        if row != last:
            length = self.lengths[row] = self.lengths[last]
            for store in self._stores() if length else ():  # a row that was never fed may lie beyond the storage
                store[row, :, :length] = store[last, :, :length]
        self.lengths.pop()
        if not self.lengths and self.num_bytes > RELEASE_BYTES:  # one long request must not hold its memory for ever
            self.keys = [None] * len(self.keys)
            self.values = [None] * len(self.values)
            self._allocated_rows = self.capacity = 0
        return last if row != last else None

    @torch.inference_mode()
    def save(self, row: int, length: int) -> list[Tensor]:
        """A copy of a row's first ``length`` tokens, [kv_heads, length, head_dim] of each layer: keys, then values."""
        return [store[row, :, :length].clone() for store in self._stores()]

    @torch.inference_mode()
    def restore(self, row: int, saved: Seq[Tensor], length: int) -> None:
        """Let an empty row begin with the first ``length`` tokens of what was saved."""
        self._reserve(len(self.lengths), length)
        for stores, states in ((self.keys, saved[: len(self.keys)]), (self.values, saved[len(self.keys) :])):
            for layer, state in enumerate(states):
                store = stores[layer]
                if store is None:
                    store = stores[layer] = self._allocate(state[None], self._allocated_rows, self.capacity)
                store[row, :, :length] = state[:, :length]
        self.lengths[row] = length

    @torch.inference_mode()
    def keep(self, row: int, base: int, accepted: Seq[int]) -> None:
        """Set a row to ``base`` tokens and the accepted nodes, whose slots begin at ``base``."""
        if list(accepted) != list(range(len(accepted))):
            for store in self._stores():
                source = torch.tensor([base + node for node in accepted], device=store.device)
                store[row, :, base : base + len(accepted)] = store[row].index_select(1, source)
        self.lengths[row] = base + len(accepted)

    # a forward

    def prepare(self, feeds: Seq[Feed], *, device: torch.device, packed: bool = False) -> dict[str, Tensor]:
        """Make room for a forward over ``feeds`` (rows ascending) and say where its tokens go.

        Args:
            packed: the rows' tokens one after the other in one row of the forward, without padding; who attends has to
                know which are whose.

        Returns:
            input_ids and position_ids [rows, m], and ``visible`` [rows, 1, m, width] bool with ``key_positions``
            [rows, 1, width], from which ``additive_mask`` makes the masks. Packed, with the tokens T of all rows:
            [1, T], [1, 1, T, width] and [1, 1 or T, width].
        """
        m = max(len(feed) for feed in feeds)
        used = max(self.lengths[feed.row] + len(feed.unseen) + len(feed.draft) for feed in feeds)
        self._width = max(used, min(-(-used // self.rounding) * self.rounding, self.max_length))
        self._reserve(len(self.lengths), self._width)
        ids: list[list[int]] = []
        positions: list[list[int]] = []
        slots: list[list[int]] = []
        for feed in feeds:
            base, pad, stored = self.lengths[feed.row], 0 if packed else m - len(feed), feed.num_stored
            start = base + len(feed.unseen)
            ids.append([0] * pad + feed.unseen + feed.draft.tokens[stored:])
            below = [start + depth for depth in depths(feed.draft.parents)[stored:]]
            positions.append([0] * pad + list(range(base, start)) + below)
            slots.append([self.capacity] * pad + list(range(base + stored, base + stored + len(feed))))
        owners = [[index] for index in range(len(feeds))]  # by row, or by token
        if packed:
            owners = [[index for index, row in enumerate(slots) for _ in row]]
            ids, positions, slots = ([list(chain.from_iterable(rows))] for rows in (ids, positions, slots))
        self._address([feed.row for feed in feeds], owners, slots, device)
        places = torch.arange(self._width, device=device)
        # padding sees slot 0, so that no row of the softmax is empty
        seen_up_to = torch.tensor(
            [[slot if slot < self.capacity else 0 for slot in row] for row in slots], device=device
        )
        visible = places <= seen_up_to[:, :, None]
        key_positions = places.expand(len(ids), 1, -1)
        trees = [(index, feed) for index, feed in enumerate(feeds) if not feed.draft.is_chain]
        if trees:
            own_positions = places.repeat(len(feeds), 1)
            parts = torch.split(visible[0], [len(feed) for feed in feeds]) if packed else visible.unbind()
            for index, feed in trees:
                self._show_tree(feed, parts[index], own_positions[index])
            key_positions = own_positions[torch.tensor(owners, device=device)]
        return {
            "input_ids": torch.tensor(ids, device=device),
            "position_ids": torch.tensor(positions, device=device),
            "visible": visible[:, None],
            "key_positions": key_positions,
        }

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Called by the model: store [rows, kv_heads, m, head_dim], return [rows, kv_heads, width, head_dim].

        Of a packed forward it stores [1, kv_heads, T, head_dim] and returns the same.
        """
        keys = self._write(self.keys, layer_idx, key_states)
        values = self._write(self.values, layer_idx, value_states)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths, default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._width, 0

    @property
    def num_bytes(self) -> int:
        return sum(store.numel() * store.element_size() for store in self._stores())

    # storage

    def _stores(self) -> list[Tensor]:
        return [store for store in (*self.keys, *self.values) if store is not None]

    def _reserve(self, rows: int, width: int) -> None:
        if rows <= self._allocated_rows and width <= self.capacity:
            return
        generous = max(-(-width // BUCKET) * BUCKET, self.capacity * 3 // 2)
        capacity = self.capacity if width <= self.capacity else max(width, min(generous, self.max_length))
        spare_rows = self._allocated_rows
        if rows > spare_rows:
            spare_rows = self.expected_rows if self.expected_rows > rows else max(rows, 2 * spare_rows)
        if self.max_cells is not None and spare_rows * capacity > self.max_cells:
            spare_rows = rows  # those that are in use
            capacity = max(width, *self.lengths, min(generous, self.max_cells // rows, self.max_length))
        try:
            self._grow(spare_rows, capacity)
        except MemoryLimitError:  # what is needed may fit where what is convenient does not
            self._grow(max(rows, self._allocated_rows), max(width, self.capacity))

    def _grow(self, rows: int, capacity: int) -> None:
        keys, values = (
            [None if store is None else self._grown(store, rows, capacity) for store in stores]
            for stores in (self.keys, self.values)
        )
        self.keys, self.values = keys, values
        self._allocated_rows, self.capacity = rows, capacity

    def _grown(self, store: Tensor, rows: int, capacity: int) -> Tensor:
        grown = self._allocate(store, rows, capacity)
        kept, width = min(rows, self._allocated_rows), min(capacity, self.capacity)
        grown[:kept, :, :width] = store[:kept, :, :width]
        return grown

    def _allocate(self, like: Tensor, rows: int, capacity: int) -> Tensor:
        shape = (rows, like.shape[1], capacity + 1, like.shape[3])
        try:
            return like.new_zeros(shape)
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            needed = 2 * len(self.keys) * like[:1, :, :1].numel() * like.element_size() * rows * (capacity + 1)
            raise MemoryLimitError(
                f"no memory for the keys and values of {rows} sequences of up to {capacity} tokens "
                f"({needed / 2**30:.1f} GiB); run fewer sequences at once or shorten the context"
            ) from error

    def _address(self, rows: list[int], owners: list[list[int]], slots: list[list[int]], device: torch.device) -> None:
        """Where the tokens of a forward go: its token [i][j] to ``slots[i][j]`` of the row that it belongs to.

        Args:
            rows: of the feeds.
            owners: places in ``rows``, [rows, 1] or, where all tokens are packed into one row, [1, T].
        """
        in_order = rows == list(range(rows[0], rows[0] + len(rows)))
        self._rows = slice(rows[0], rows[0] + len(rows)) if in_order else torch.tensor(rows, device=device)
        same = len(slots) == len(rows) and all(row == slots[0] for row in slots) and self.capacity not in slots[0]
        if in_order and same:  # one row, or rows in step: a plain copy is cheaper than a scatter
            self._slots = slice(slots[0][0], slots[0][-1] + 1)
        else:
            self._rows_index = torch.tensor([[rows[index] for index in row] for row in owners], device=device)
            self._slots = torch.tensor(slots, device=device)

    def _write(self, stores: list[Tensor | None], layer: int, states: Tensor) -> Tensor:
        store = stores[layer]
        if store is None:
            store = stores[layer] = self._allocate(states, self._allocated_rows, self.capacity)
        if isinstance(self._slots, slice):
            store[self._rows, :, self._slots] = states
        else:
            store[self._rows_index, :, self._slots] = states.transpose(1, 2)
        return store[self._rows, :, : self._width]

    def _show_tree(self, feed: Feed, visible: Tensor, key_positions: Tensor) -> None:
        """Nodes see the context, their ancestors and themselves, whichever slots lie between."""
        base = self.lengths[feed.row] + len(feed.unseen)
        new, m = len(feed.draft) - feed.num_stored, len(visible)
        visible[m - new :, base:] = False
        for place, path in enumerate(paths(feed.draft.parents)[feed.num_stored :], m - new):
            visible[place, [base + ancestor for ancestor in path]] = True
        below = torch.tensor(depths(feed.draft.parents), device=key_positions.device)
        key_positions[base : base + len(feed.draft)] = base + below


def additive_mask(prepared: dict[str, Tensor], *, window: int | None, dtype: torch.dtype) -> Tensor:
    """[rows, 1, m, width]: 0 where a query may look, the dtype's lowest number elsewhere.

    Additive, never boolean: Transformers' eager attention adds the mask, and would add True as 1.

    Args:
        window: sliding window in tokens; None for full attention.
    """
    visible = prepared["visible"]
    if window is not None:
        distance = prepared["position_ids"][:, :, None] - prepared["key_positions"]
        visible = visible & (distance < window)[:, None]
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, torch.finfo(dtype).min)
