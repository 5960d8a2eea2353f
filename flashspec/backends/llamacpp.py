"""GGUF models as Targets, run by llama.cpp through llama-cpp-python's low-level interface.

It knows llama.cpp's batches, sequence ids and memory. It does not know sampling, tokenizers or drafts' origins.

A sequence is a llama.cpp sequence id; its draft is decoded after it in the same batch, and a rejected tail is removed
from memory by position. A tree gives every leaf a sequence id of its own, which shares the context's cells: a node
carries the ids of the leaves below it, so that it sees its ancestors and nothing else.
"""

from __future__ import annotations

import ctypes
import logging
import time
import weakref
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashspec.core import EMPTY, Draft, Score, Sequence, check_positions
from flashspec.errors import MemoryLimitError, ModelError, OptionError, UnsupportedModelError
from flashspec.tree import depths, paths

logger = logging.getLogger("flashspec")

CHUNK = 512  # tokens of one llama_decode
FIRST_CELLS = 1024  # of the key/value memory, all sequences together; it is doubled when they are used up
FIRST_IDS = 24  # sequence ids: rows, and leaves of trees
MOST_IDS = 256  # llama.cpp's own limit
_KEPT: list[Any] = []  # what llama.cpp has bare pointers to


def llama_cpp() -> Any:
    """The binding's module, with llama.cpp's own log turned to ours.

    Raises:
        OptionError: it is not installed.
    """
    try:
        return _binding()
    except ImportError as error:
        raise OptionError(
            f"a GGUF file run by llama.cpp needs llama-cpp-python, which is not installed ({error}); "
            "pip install 'flashspec-decoding[llamacpp]', or leave out --backend llamacpp"
        ) from error


@cache
def _binding() -> Any:
    from llama_cpp import llama_cpp as binding

    @binding.llama_log_callback  # type: ignore[untyped-decorator]
    def log(level: int, text: bytes, data: object) -> None:
        logger.debug("llama.cpp: %s", text.decode(errors="replace").rstrip())

    _KEPT.append(log)
    binding.llama_log_set(log, None)
    binding.llama_backend_init()
    return binding


@dataclass(slots=True)
class _Row:
    """One sequence in llama.cpp's memory."""

    id: int
    length: int = 0  # tokens of the sequence in memory, before the draft of the last score
    leaves: dict[int, int] = field(default_factory=dict)  # node -> an id whose path holds it, for the last tree
    has_lost_tree: bool = False  # what is accepted of it will be caught up with, like any unseen token


class LlamaTarget:
    """A GGUF model.

    Args:
        path: the file.
        threads: of a decode; None for torch's number.
        gpu_layers: layers kept on a GPU, where llama.cpp was built for one; -1 for all.

    Raises:
        OptionError: llama-cpp-python is not installed.
        ModelError: not a GGUF file that llama.cpp reads.
        UnsupportedModelError: a model whose memory cannot be rolled back.
    """

    has_hidden = False
    supports_trees = True

    def __init__(self, path: Path, *, threads: int | None = None, gpu_layers: int = 0) -> None:
        self._lib = lib = llama_cpp()
        self.threads = threads or torch.get_num_threads()
        self._model = _load(lib, path, gpu_layers)
        weakref.finalize(self, lib.llama_model_free, self._model)
        vocab = lib.llama_model_get_vocab(self._model)
        self.name = path.name
        self.vocab_size: int = lib.llama_vocab_n_tokens(vocab)
        self.max_length: int = lib.llama_model_n_ctx_train(self._model)
        self.eos_tokens = frozenset(token for token in range(self.vocab_size) if lib.llama_vocab_is_eog(vocab, token))
        self.forward_seconds = 0.0
        self._rows: dict[Sequence, _Row] = {}  # by identity: engines may share a model and not their ids
        self._context: Any = None
        self._close: Callable[[], object] = lambda: None  # frees the context
        self._resize(cells=min(FIRST_CELLS, self.max_length), ids=FIRST_IDS)
        self._check_rollback()

    # the Target protocol

    def score(self, seqs: Seq[Sequence], drafts: Seq[Draft], *, hidden: bool = False) -> list[Score]:
        """See ``core.Target``. One llama_decode, or several where there are more than ``CHUNK`` tokens.

        Raises:
            PromptError: tokens and draft exceed the model's positions.
            MemoryLimitError: no memory for the keys and values.
        """
        for seq, draft in zip(seqs, drafts, strict=True):
            check_positions(seq, draft, limit=self.max_length)
        rows = [self._opened(seq) for seq in seqs]
        self._reserve(seqs, rows, drafts)
        entries: list[_Entry] = []
        for seq, row, draft in zip(seqs, rows, drafts, strict=True):
            entries += self._entries(seq, row, draft)
        logits = self._decode(entries)
        scores, start = [], 0
        for seq, row, draft in zip(seqs, rows, drafts, strict=True):
            row.length, row.has_lost_tree = len(seq), False
            scores.append(Score(logits[start : start + len(draft) + 1]))
            start += len(draft) + 1
        return scores

    def keep(self, seq: Sequence, accepted: Seq[int]) -> None:
        row = self._rows[seq]
        end = row.length + (0 if row.has_lost_tree else len(accepted))
        if row.leaves and accepted:
            self._lib.llama_memory_seq_cp(self._memory, row.leaves[accepted[-1]], row.id, row.length, end)
        self._drop_leaves(row)
        self._lib.llama_memory_seq_rm(self._memory, row.id, end, -1)
        row.length = end

    def rewind(self, seq: Sequence, length: int) -> None:
        row = self._rows.get(seq)
        if row is not None:
            self._drop_leaves(row)
            row.length = min(row.length, length)
            self._lib.llama_memory_seq_rm(self._memory, row.id, row.length, -1)

    def forget(self, seq: Sequence) -> None:
        row = self._rows.pop(seq, None)
        if row is not None:
            self._drop_leaves(row)
            self._lib.llama_memory_seq_rm(self._memory, row.id, -1, -1)

    def cached_length(self, seq: Sequence) -> int:
        row = self._rows.get(seq)
        return 0 if row is None else row.length

    def read(self, seq: Sequence, count: int, *, features: Seq[int] = ()) -> None:
        check_positions(seq, EMPTY, limit=self.max_length)
        row = self._opened(seq)
        unseen = seq.tokens[row.length :][: min(count, len(seq) - row.length - 1)]
        self._make_room(len(unseen))
        self._decode([_Entry(token, row.length + i, [row.id], False) for i, token in enumerate(unseen)])
        row.length += len(unseen)

    def save(self, seq: Sequence, length: int) -> tuple[Any, int]:
        row = self._rows[seq]
        self._drop_leaves(row)
        state = self._state(row.id)
        return (state, row.length), 0 if state is None else len(state)

    def restore(self, seq: Sequence, state: Any, length: int) -> None:
        data, held = state
        self.forget(seq)
        row = self._rows[seq] = _Row(self._new_id())
        self._make_room(held)  # all of it is written before its tail is cut off
        if not self._lib.llama_state_seq_set_data(self._context, data, len(data), row.id):
            self.forget(seq)
            raise MemoryLimitError(f"no room in llama.cpp's memory for {length} saved tokens; run fewer requests")
        self._lib.llama_memory_seq_rm(self._memory, row.id, length, -1)
        row.length = length

    def plain_logits(self, tokens: list[int]) -> Tensor:
        """Logits [vocab] after ``tokens``, from an empty memory: the reference for all the others."""
        seq = Sequence("plain", list(tokens), len(tokens))
        try:
            return self.score([seq], [EMPTY])[0].logits[0]
        finally:
            self.forget(seq)

    # what goes into a decode

    def _opened(self, seq: Sequence) -> _Row:
        row = self._rows.get(seq)
        if row is None:
            row = self._rows[seq] = _Row(self._new_id())
        self.rewind(seq, len(seq) - 1)  # the logits after the context need its last token fed
        return row

    def _new_id(self) -> int:
        used = {id for row in self._rows.values() for id in (row.id, *row.leaves.values())}
        return next(id for id in range(len(used) + 1) if id not in used)

    def _reserve(self, seqs: Seq[Sequence], rows: Seq[_Row], drafts: Seq[Draft]) -> None:
        """Cells and sequence ids for a score, before its trees branch: a branch could not be moved."""
        unseen = sum(len(seq) - row.length for seq, row in zip(seqs, rows, strict=True))
        leaves = sum(len(set(range(len(draft))) - set(draft.parents)) for draft in drafts if not draft.is_chain)
        self._make_room(unseen + sum(map(len, drafts)), leaves=leaves)

    def _make_room(self, new: int, *, leaves: int = 0) -> None:
        """For so many more cells and sequence ids than the rows have."""
        cells = sum(row.length for row in self._rows.values()) + new
        ids = max((row.id + 1 for row in self._rows.values()), default=0) + leaves
        if ids > MOST_IDS:
            raise MemoryLimitError(
                f"{len(self._rows)} requests and {leaves} draft branches need {ids} sequences in llama.cpp, which has "
                f"at most {MOST_IDS}; run fewer requests at once"
            )
        if cells > self._num_cells or ids > self._num_ids:
            for row in self._rows.values():
                row.has_lost_tree = bool(row.leaves)
                self._drop_leaves(row)
            larger = (
                max(2 * self._num_cells, -(-cells // CHUNK) * CHUNK) if cells > self._num_cells else self._num_cells
            )
            more = min(max(2 * self._num_ids, ids), MOST_IDS) if ids > self._num_ids else self._num_ids
            self._resize(cells=larger, ids=more)

    def _entries(self, seq: Sequence, row: _Row, draft: Draft) -> list[_Entry]:
        """The unseen tokens, of which the last is asked for its logits, then the draft's nodes."""
        ids = self._branch(row, draft)
        unseen = seq.tokens[row.length :]
        entries = [
            _Entry(token, row.length + i, [row.id, *sorted(set(row.leaves.values()))], i == len(unseen) - 1)
            for i, token in enumerate(unseen)
        ]
        for token, depth, node_ids in zip(draft.tokens, depths(draft.parents), ids, strict=True):
            entries.append(_Entry(token, len(seq) + depth, node_ids, True))
        return entries

    def _branch(self, row: _Row, draft: Draft) -> list[list[int]]:
        """The sequence ids of each node; a tree's leaves get new ones, which share the context's cells."""
        if draft.is_chain:
            return [[row.id]] * len(draft)
        parents = set(draft.parents)
        ids: list[list[int]] = [[] for _ in draft.tokens]
        for path in paths(draft.parents):
            if path[-1] in parents:
                continue
            leaf = row.leaves[path[-1]] = self._new_id()
            self._lib.llama_memory_seq_cp(self._memory, row.id, leaf, 0, -1)
            for node in path:
                row.leaves[node] = leaf
                ids[node].append(leaf)
        return ids

    def _drop_leaves(self, row: _Row) -> None:
        for leaf in set(row.leaves.values()):
            self._lib.llama_memory_seq_rm(self._memory, leaf, -1, -1)
        row.leaves = {}

    # decoding

    def _decode(self, entries: list[_Entry]) -> Tensor:
        """Logits [wanted, vocab] float32 of the entries that ask for them."""
        started = time.perf_counter()
        found = []
        for start in range(0, len(entries), CHUNK):
            part = entries[start : start + CHUNK]
            self._run(part)
            if count := sum(entry.wanted for entry in part):
                rows = np.ctypeslib.as_array(self._lib.llama_get_logits(self._context), (count, self.vocab_size))
                found.append(torch.from_numpy(rows.copy()))  # the next decode writes over them
        self.forward_seconds += time.perf_counter() - started
        return torch.cat(found) if len(found) > 1 else found[0] if found else torch.empty(0, self.vocab_size)

    def _run(self, entries: list[_Entry]) -> None:
        self._batch.fill(entries)
        status = self._lib.llama_decode(self._context, self._batch.handle)
        if status != 0:
            raise ModelError(
                f"llama.cpp could not decode {len(entries)} tokens of {self.name} (llama_decode returned {status}); "
                "run with --verbose for its log, with fewer sequences, or with another GGUF file"
            )

    @property
    def _memory(self) -> Any:
        return self._lib.llama_get_memory(self._context)

    # the context

    def _resize(self, *, cells: int, ids: int) -> None:
        """A context of so many cells and sequence ids, with what the old one held."""
        rows = list(self._rows.values()) if self._context is not None else []
        states = [(row, self._state(row.id)) for row in rows]
        context = self._new_context(cells, ids)  # before the old one goes: without memory that one stays
        self._close()
        self._context, self._num_cells, self._num_ids = context, cells, ids
        self._batch = _Batch(self._lib, ids)
        self._close = weakref.finalize(self, _free, self._lib, self._context, self._batch.handle)
        for row, state in states:
            if state is not None and not self._lib.llama_state_seq_set_data(context, state, len(state), row.id):
                logger.warning("a sequence's keys and values could not be moved; they are computed again")
                row.length = 0

    def _state(self, id: int) -> Any:
        """A sequence's keys and values as bytes; None for an empty one."""
        if self._lib.llama_memory_seq_pos_max(self._memory, id) < 0:
            return None
        size = self._lib.llama_state_seq_get_size(self._context, id)
        state = (ctypes.c_uint8 * size)()
        if self._lib.llama_state_seq_get_data(self._context, state, size, id) != size:
            raise ModelError(f"llama.cpp did not give the {size} bytes of a sequence's state of {self.name}")
        return state

    def _new_context(self, cells: int, ids: int) -> Any:
        lib, params = self._lib, self._lib.llama_context_default_params()
        params.n_ctx = cells
        params.n_batch = params.n_ubatch = max(CHUNK, ids)
        params.n_seq_max, params.kv_unified = ids, True  # one memory for all: branches share its cells
        params.n_threads = params.n_threads_batch = self.threads
        params.swa_full = True  # a pruned sliding window could not be rolled back
        params.no_perf = True
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise MemoryLimitError(
                f"llama.cpp has no memory for a context of {cells} tokens of {self.name}; run fewer "
                "sequences at once, shorten the context, or use a smaller model"
            )
        return context

    def _check_rollback(self) -> None:
        """A rejected draft must be forgotten without a trace: try it."""
        lib, seq = self._lib, Sequence("rollback", [0, 0, 0], 3)
        has_state = lib.llama_model_is_recurrent(self._model) or lib.llama_model_is_hybrid(self._model)
        if has_state or lib.llama_model_is_diffusion(self._model) or lib.llama_model_has_encoder(self._model):
            raise UnsupportedModelError(
                f"{self.name} is recurrent, hybrid, an encoder or a diffusion model, whose memory cannot be rolled "
                "back after a rejected draft; use a decoder with full or sliding-window attention only"
            )
        self.score([seq], [EMPTY])
        removed = lib.llama_memory_seq_rm(self._memory, self._rows[seq].id, 2, -1)
        self.forget(seq)
        if not removed:
            raise UnsupportedModelError(
                f"llama.cpp cannot remove the last tokens of {self.name} from its memory, so a rejected draft could "
                "not be rolled back; use another model"
            )


@dataclass(frozen=True, slots=True)
class _Entry:
    """One token of a llama.cpp batch."""

    token: int
    position: int
    ids: list[int]
    wanted: bool  # whether its logits are


class _Batch:
    """llama.cpp's batch structure, filled anew for each decode."""

    def __init__(self, lib: Any, num_ids: int) -> None:
        self.handle = lib.llama_batch_init(CHUNK, 0, num_ids)

    def fill(self, entries: list[_Entry]) -> None:
        batch = self.handle
        batch.n_tokens = len(entries)
        for i, entry in enumerate(entries):
            batch.token[i] = entry.token
            batch.pos[i] = entry.position
            batch.n_seq_id[i] = len(entry.ids)
            for j, id in enumerate(entry.ids):
                batch.seq_id[i][j] = id
            batch.logits[i] = entry.wanted


def _free(lib: Any, context: Any, batch: Any) -> None:
    lib.llama_batch_free(batch)
    lib.llama_free(context)


def _load(lib: Any, path: Path, gpu_layers: int) -> Any:
    if not path.is_file():
        raise ModelError(f"there is no file {path}; give the path of an existing .gguf file")
    params = lib.llama_model_default_params()
    params.n_gpu_layers = gpu_layers
    model = lib.llama_model_load_from_file(str(path).encode(), params)
    if not model:
        raise ModelError(
            f"llama.cpp cannot read {path}; is it a whole GGUF file, of a model that this llama.cpp knows? "
            "--verbose shows its log"
        )
    return model
