"""The engine in a thread of its own, fed by and answering to an event loop.

It knows the engine and asyncio; it does not know HTTP. All work on the engine happens in its thread: the loop hands
in jobs and cancellations and gets chunks, all of one step in one call.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import threading
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flashspec.core import Chunk, Constraint, SamplingParams, SpecStats, Timings
from flashspec.errors import FlashSpecError
from flashspec.metrics import Metrics
from flashspec.text import Encoded

if TYPE_CHECKING:
    from flashspec.engine import LocalEngine

logger = logging.getLogger("flashspec.server")


class BusyError(FlashSpecError):
    """The queue is full."""

    def __init__(self, message: str, *, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DrainingError(FlashSpecError):
    """The server finishes what it has and takes nothing more."""


class EngineError(FlashSpecError):
    """A bug, ours or a library's: the request is lost, the server goes on."""


@dataclass(slots=True, eq=False)
class Job:
    """One choice of a request, on its way through the engine."""

    id: str
    prompt: Encoded
    sampling: SamplingParams
    choice: int = 0
    num_speculative_tokens: int | None = None
    drafter: str | None = None
    predicted: Seq[int] | None = None
    constraint: Constraint | None = None
    stats: SpecStats = field(default_factory=SpecStats)
    timings: Timings = field(default_factory=lambda: Timings(arrival=0.0))


Deliver = Callable[[Job, Chunk], None]


class Worker:
    """Runs an engine until it is closed.

    Args:
        engine: used by nobody else from now on.
        metrics: counted after each step.
        max_waiting: jobs beyond those that run; more are refused.
    """

    def __init__(self, engine: LocalEngine, metrics: Metrics, *, max_waiting: int = 256) -> None:
        self.engine, self.metrics, self.max_waiting = engine, metrics, max_waiting
        self.is_draining = False
        self._jobs: dict[str, tuple[Job, Deliver]] = {}  # of the loop
        self._new: list[Job] = []
        self._cancelled: list[str] = []
        self._wake = threading.Condition()
        self._is_closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._empty = asyncio.Event()
        self._empty.set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        metrics.watch(engine, max_waiting=max_waiting)

    # of the loop

    def start(self) -> None:
        """Begin, from inside the event loop that will be answered."""
        let_helpers_go()
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def num_waiting(self) -> int:
        return max(len(self._jobs) - len(self.engine.scheduler.running), 0)

    @property
    def num_places(self) -> int:
        """Jobs that may run or wait at once."""
        return self.engine.scheduler.max_batch + self.max_waiting

    def check_room(self, count: int = 1) -> None:
        """Raise BusyError or DrainingError where ``count`` jobs more cannot be taken."""
        if self.is_draining:
            raise DrainingError("the server is shutting down; ask another one, or later")
        if len(self._jobs) + count > self.num_places:
            raise BusyError(
                f"{len(self._jobs)} requests are running or waiting, and there are {self.num_places} places; try again "
                "later",
                retry_after=self._retry_after(),
            )

    def submit(self, jobs: Seq[Job], deliver: Deliver) -> None:
        """Queue the choices of one request; ``deliver`` is called in the loop with each chunk.

        Raises:
            BusyError: no room in the queue.
            DrainingError: it takes no more work.
        """
        self.check_room(len(jobs))
        for job in jobs:
            self._jobs[job.id] = (job, deliver)
        self._empty.clear()
        with self._wake:
            self._new += jobs
            self._wake.notify()

    def cancel(self, jobs: Seq[Job]) -> None:
        """Let go of jobs; those that have ended are no error."""
        gone = [job.id for job in jobs if self._jobs.pop(job.id, None) is not None]
        self._note_empty()
        if gone:
            with self._wake:
                self._cancelled += gone
                self._wake.notify()

    async def drain(self) -> None:
        """Take no more work and wait until all of it is done."""
        self.is_draining = True
        await self._empty.wait()

    def close(self) -> None:
        """End the thread after the present step; what is left is lost."""
        self.is_draining = True
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _retry_after(self) -> int:
        """Seconds until about half of what waits will have been begun."""
        seconds = self.metrics.mean_latency() * self.num_waiting / (2 * self.engine.scheduler.max_batch)
        return min(max(round(seconds), 1), 60)

    def _note_empty(self) -> None:
        if not self._jobs:
            self._empty.set()

    def _dispatch(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            job, deliver = self._jobs.get(chunk.request_id, (None, None))
            if job is None or deliver is None:
                continue
            if chunk.finish_reason is not None:
                self._jobs.pop(job.id, None)
                self.metrics.observe_end(job.timings, chunk.finish_reason)
            deliver(job, chunk)
        self._note_empty()

    # of the thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._new or self._cancelled or self._is_closed or self.engine.has_work):
                    self._wake.wait()
                if self._is_closed:
                    return
                new, self._new = self._new, []
                cancelled, self._cancelled = self._cancelled, []
            chunks = [chunk for job in new if job.id not in cancelled for chunk in self._add(job)]
            for name in cancelled:
                self.engine.abort(name)
            chunks += self._step()
            if chunks and self._loop is not None:
                try:
                    self._loop.call_soon_threadsafe(self._dispatch, chunks)
                except RuntimeError:  # the loop is gone, and everybody who would have listened
                    return

    def _add(self, job: Job) -> list[Chunk]:
        try:
            self.engine.add(
                job.prompt, job.sampling, request_id=job.id, choice=job.choice, drafter=job.drafter,
                num_speculative_tokens=job.num_speculative_tokens, predicted=job.predicted, constraint=job.constraint,
            )  # fmt: skip
            stats, timings = self.engine.progress(job.id)
            timings.arrival = job.timings.arrival or timings.arrival
            job.stats, job.timings = stats, timings
        except FlashSpecError as error:
            return [_failed(job.id, error)]
        except Exception:
            logger.exception("request %s could not be begun", job.id)
            return [_failed(job.id, EngineError("internal error; the server's log has it"))]
        return []

    def _step(self) -> list[Chunk]:
        try:
            chunks = self.engine.step()
        except Exception:  # whose fault it is cannot be told: the newest goes first
            logger.exception("a step failed")
            chunks, scheduler = list(self.engine.last_chunks), self.engine.scheduler
            if scheduler.running or scheduler.waiting:
                name = (scheduler.running or scheduler.waiting)[-1].id
                self.engine.abort(name)
                chunks.append(_failed(name, EngineError("internal error; the server's log has it")))
        self.metrics.observe_step(self.engine)
        return chunks


def let_helpers_go() -> None:
    """End the helper threads that OpenMP keeps for this one, which has computed so far and now only waits.

    The engine's thread has helpers of its own; with more of them than cores OpenMP lets each sleep as soon as an
    operation is done, and a forward of many short ones takes a third longer (docs/log.md).
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another runtime, or none
        ctypes.CDLL(None).omp_pause_resource_all(1)  # 1 is "soft": they come back where they are needed


def _failed(name: str, error: FlashSpecError) -> Chunk:
    return Chunk(name, [], [], [], "abort", error=error)
