"""Which sequences run in this step, and how many draft tokens each may spend."""

from __future__ import annotations

from collections import deque

from flashspec.controller import AUTO
from flashspec.core import Sequence, Status
from flashspec.errors import OptionError

MOST_DRAFT_TOKENS = 256


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
    """First come, first served, up to ``max_batch`` at once; a sequence joins and leaves between steps."""

    def __init__(self, *, max_batch: int, num_speculative_tokens: int, max_length: int) -> None:
        if max_batch < 1:
            raise OptionError(f"max_batch is {max_batch}; it must be at least 1")
        check_draft_length(num_speculative_tokens)
        self.max_batch = max_batch
        self.num_speculative_tokens = num_speculative_tokens
        self.max_length = max_length
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> tuple[list[Sequence], list[int]]:
        """The sequences of this step and their budgets in draft tokens."""
        while self.waiting and len(self.running) < self.max_batch:
            seq = self.waiting.popleft()
            seq.status = Status.RUNNING
            self.running.append(seq)
        return list(self.running), [self.budget(seq) for seq in self.running]

    def budget(self, seq: Sequence) -> int:
        """Draft tokens that could still be emitted: a step emits one token of the target's own as well.

        None before the first token, so that drafting does not delay it.
        """
        if seq.num_output_tokens == 0:
            return 0
        left = min(seq.sampling.max_tokens - seq.num_output_tokens, self.max_length - len(seq))
        return max(min(self.num_speculative_tokens, left - 1), 0)

    def remove(self, seq: Sequence) -> None:
        """A finished or aborted sequence leaves; one that is not here is no error."""
        seq.status = Status.FINISHED
        if seq in self.running:
            self.running.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
