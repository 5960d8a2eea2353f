"""Which sequences run in this step, and how many draft tokens each may spend.

Memory is counted in cells, rows times the longest row, which is what a SlotCache takes. What a request may still grow
to is not set aside for it: where memory runs short the newest one steps back, keeps its tokens and reads them again
later.
"""

from __future__ import annotations

from collections import deque

from flashspec.controller import AUTO
from flashspec.core import Sequence, Status
from flashspec.errors import OptionError

MOST_DRAFT_TOKENS = 256
ROOM = 64  # tokens that a sequence must be able to grow by before it joins


def check_draft_length(num_speculative_tokens: int | str, *, or_auto: bool = False) -> None:
    """Raise OptionError for a draft length outside its range."""
    if or_auto and num_speculative_tokens == AUTO:
        return
    if type(num_speculative_tokens) is not int or not 0 <= num_speculative_tokens <= MOST_DRAFT_TOKENS:
        raise OptionError(
            f"num_speculative_tokens is {num_speculative_tokens!r}; it must be {f'{AUTO} or ' if or_auto else ''}a "
            f"whole number from 0 to {MOST_DRAFT_TOKENS}"
        )


class Scheduler:
    """First come, first served, up to ``max_batch`` at once; a sequence joins and leaves between steps.

    Args:
        max_length: of a sequence, prompt and output.
        max_cells: of all running ones; None for no limit. One that runs alone may always have ``max_length``.
    """

    def __init__(
        self, *, max_batch: int, num_speculative_tokens: int, max_length: int, max_cells: int | None = None
    ) -> None:
        if max_batch < 1:
            raise OptionError(f"max_batch is {max_batch}; it must be at least 1")
        check_draft_length(num_speculative_tokens)
        self.max_batch = max_batch
        self.num_speculative_tokens = num_speculative_tokens
        self.max_length = max_length
        self.max_cells = max_cells
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> tuple[list[Sequence], list[Sequence]]:
        """The sequences of this step, the oldest first, and those that have to step back for want of memory."""
        back = []
        while len(self.running) > 1 and not self._fits(self.running, self.num_speculative_tokens + 1):
            seq = self.running.pop()
            seq.status = Status.WAITING
            self.waiting.appendleft(seq)
            back.append(seq)
        while not back and self.waiting and len(self.running) < self.max_batch:
            room = self.num_speculative_tokens + ROOM
            if self.running and not self._fits([*self.running, self.waiting[0]], room):
                break
            seq = self.waiting.popleft()
            seq.status = Status.RUNNING
            self.running.append(seq)
        return list(self.running), back

    @property
    def num_cells(self) -> int:
        """In use by the running sequences."""
        return len(self.running) * max(map(len, self.running), default=0)

    def _fits(self, seqs: list[Sequence], room: int) -> bool:
        longest = min(max(map(len, seqs)) + room, self.max_length)
        return self.max_cells is None or len(seqs) * longest <= self.max_cells

    def budget(self, seq: Sequence) -> int:
        """Draft tokens that could still be emitted: a step emits one token of the target's own as well.

        None before the first token, so that drafting does not delay it.
        """
        if seq.num_output_tokens == 0:
            return 0
        left = min(seq.sampling.max_tokens - seq.num_output_tokens, self.max_length - len(seq))
        own = self.num_speculative_tokens if seq.num_speculative_tokens is None else seq.num_speculative_tokens
        return max(min(self.num_speculative_tokens, own, left - 1), 0)

    def remove(self, seq: Sequence) -> None:
        """A finished or aborted sequence leaves; one that is not here is no error."""
        seq.status = Status.FINISHED
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
