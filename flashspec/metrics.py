"""What Prometheus sees: acceptance, speed against plain decoding, latencies and load.

It knows the engine's counts and reports; it does not know HTTP. Every name stands in ``docs/serving.md`` with what to
do about it, and in ``deploy/``, which alerts on them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from flashspec.core import SpecStats, Timings

if TYPE_CHECKING:  # vLLM's proxy has no engine, and torch takes seconds to import
    from flashspec.engine import LocalEngine, StepReport

PREFIX = "flashspec"
WINDOW = 60.0  # seconds that rates are over
FEWEST_STEPS = 20  # decode steps without a draft before their time is known
QUICK = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
LONG = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0)
disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody asks for
EFFICIENCY_DOC = "Speed over the last minute against plain decoding of the same batch; 1 is as fast"


@dataclass(slots=True)
class Window:
    """Sums over the last ``seconds``."""

    seconds: float = WINDOW
    sums: list[float] = field(default_factory=list)
    _held: deque[tuple[float, tuple[float, ...]]] = field(default_factory=deque)

    _lock: threading.Lock = field(default_factory=threading.Lock)  # written by one thread, read by another

    def add(self, *values: float, now: float | None = None) -> None:
        now = time.monotonic() if now is None else now
        with self._lock:
            self._held.append((now, values))
            self.sums = [old + new for old, new in zip(self.sums or [0.0] * len(values), values, strict=True)]
            self._expire(now)

    def ratio(self, now: float | None = None) -> float | None:
        """First over second sum; None where nothing happened."""
        with self._lock:
            self._expire(time.monotonic() if now is None else now)
            return self.sums[0] / self.sums[1] if self._held and self.sums[1] > 0 else None

    def _expire(self, now: float) -> None:
        while self._held and self._held[0][0] < now - self.seconds:
            self.sums = [total - old for total, old in zip(self.sums, self._held.popleft()[1], strict=True)]


class Efficiency:
    """Speed against plain decoding, measured: what the tokens of decode steps would have taken one at a time.

    The time of a plain step is that of steps of as many rows without a draft, once there were some; until then what
    the cost curve says, if there is one.
    """

    def __init__(self, plain_seconds: Callable[[int], float] | None = None) -> None:
        self._plain_seconds = plain_seconds
        self._seen: dict[int, tuple[int, float]] = {}  # rows -> steps, mean seconds
        self._window = Window()

    def observe(self, report: StepReport) -> None:
        if not report.is_decode:
            return
        rows = report.num_rows
        if report.num_draft_tokens == 0:
            count, mean = self._seen.get(rows, (0, 0.0))
            self._seen[rows] = count + 1, mean + (report.seconds - mean) / min(count + 1, 200)
        if (plain := self.plain(rows)) is not None:
            self._window.add(report.num_tokens / rows * plain, report.seconds)

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain step; None while nothing is known."""
        count, mean = self._seen.get(rows, (0, 0.0))
        if count >= FEWEST_STEPS or self._plain_seconds is None:
            return mean if count else None
        return self._plain_seconds(rows)

    def value(self) -> float | None:
        return self._window.ratio()


class Metrics:
    """One server's metrics, in a registry of their own.

    Args:
        model_name: label of all of them.
        engine_name: likewise: what runs the model, "local" or "vllm".
    """

    def __init__(self, *, model_name: str, engine_name: str = "local") -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": engine_name}
        spec, count, gauge, times = "spec_decode_", self._counter, self._gauge, self._histogram
        self.num_drafts = count(f"{spec}num_drafts", "Steps of a request that had a draft")
        self.num_draft_tokens = count(f"{spec}num_draft_tokens", "Draft tokens scored")
        self.num_accepted_tokens = count(f"{spec}num_accepted_tokens", "Draft tokens accepted")
        self.num_emitted_tokens = count(f"{spec}num_emitted_tokens", "Tokens emitted, the target's own included")
        self._per_pos = self._family(
            Counter, f"{spec}num_accepted_tokens_per_pos", "Accepted draft tokens by position", ("position",)
        )
        self.acceptance_rate = gauge(f"{spec}draft_acceptance_rate", "Accepted over draft tokens of the last minute")
        self.efficiency = gauge(f"{spec}system_efficiency", EFFICIENCY_DOC)
        self.draft_length = gauge(f"{spec}draft_length", "Draft tokens of a request and step, over the last minute")
        self.prompt_tokens = count("prompt_tokens", "Prompt tokens of requests that were begun")
        self.generation_tokens = count("generation_tokens", "Tokens generated")
        self.prefix_queries = count("prefix_cache_queries", "Prompt tokens that were looked up in the prefix cache")
        self.prefix_hits = count("prefix_cache_hits", "Prompt tokens that were found there")
        self.steps = count("steps", "Steps of the engine")
        self._requests = self._family(Counter, "requests", "API requests by HTTP status", ("status",))
        self._success = self._family(Counter, "request_success", "Finished requests by reason", ("finished_reason",))
        self.running = gauge("num_requests_running", "Requests that are being worked on")
        self.waiting = gauge("num_requests_waiting", "Requests in the queue")
        self.running_max = gauge("num_requests_running_max", "Requests that may run at once")
        self.waiting_max = gauge("num_requests_waiting_max", "Places in the queue; beyond them requests get a 429")
        self.cache_usage = gauge("kv_cache_usage_perc", "Share of the key/value cache in use, 0 to 1")
        self.prefix_bytes = gauge("prefix_cache_bytes", "Keys and values kept of finished requests")
        self.prefix_max_bytes = gauge("prefix_cache_max_bytes", "The most that may be kept")
        self.ttft = times("time_to_first_token_seconds", "From a request's arrival to its first token", LONG)
        self.tpot = times("time_per_output_token_seconds", "Per token after the first", QUICK)
        self.between = times("inter_chunk_seconds", "Between two pieces of a stream", QUICK)
        self.latency = times("e2e_request_latency_seconds", "From a request's arrival to its end", LONG)
        self.queue_time = times("request_queue_time_seconds", "From a request's arrival to its first step", LONG)
        self._window = Window()
        self._lengths, self._latencies = Window(), Window()
        self._seen = SpecStats()  # what has been counted
        self._prefixes = (0, 0)
        self._efficiency = Efficiency()
        for reason in ("stop", "length", "abort"):
            self._success.labels(**self._labels, finished_reason=reason)

    def watch(self, engine: LocalEngine, *, max_waiting: int) -> None:
        """Say what does not change, and where plain decoding's time is known from."""
        self.running_max.set(engine.scheduler.max_batch)
        self.waiting_max.set(max_waiting)
        self.prefix_max_bytes.set(engine.prefixes.max_bytes)
        if engine.controller is not None:
            costs = engine.controller.costs
            self._efficiency = Efficiency(lambda rows: costs.step(1, rows))

    def observe_step(self, engine: LocalEngine) -> None:
        """After each step, by who steps the engine."""
        self.steps.inc()
        self._count(engine.stats())
        if (report := engine.last_step) is not None:
            engine.last_step = None
            self._efficiency.observe(report)
            self._lengths.add(report.num_draft_tokens, report.num_rows)
        counts, (asked, found) = engine.prefix_counts, self._prefixes
        self.prefix_queries.inc(counts.num_prompt_tokens - asked)
        self.prompt_tokens.inc(counts.num_prompt_tokens - asked)
        self.prefix_hits.inc(counts.num_cached_tokens - found)
        self._prefixes = counts.num_prompt_tokens, counts.num_cached_tokens

    def observe_end(self, timings: Timings, finish_reason: str) -> None:
        """A choice of a request has ended."""
        self._success.labels(**self._labels, finished_reason=finish_reason).inc()
        if timings.first_token:
            self.ttft.observe(timings.ttft)
            self.latency.observe(timings.total)
            self._latencies.add(timings.total, 1)
        if timings.started:
            self.queue_time.observe(timings.queued)
        if timings.num_output_tokens > 1:
            self.tpot.observe(timings.tpot)

    def mean_latency(self) -> float:
        """Seconds of a request, over the last minute; 1 while none has ended."""
        return self._latencies.ratio() or 1.0

    def observe_status(self, status: int) -> None:
        self._requests.labels(**self._labels, status=str(status)).inc()

    def page(self, engine: LocalEngine, *, num_waiting: int) -> bytes:
        """The text that Prometheus reads."""
        scheduler = engine.scheduler
        self.running.set(len(scheduler.running))
        self.waiting.set(num_waiting)
        if scheduler.max_cells:
            self.cache_usage.set(min(scheduler.num_cells / scheduler.max_cells, 1.0))
        self.prefix_bytes.set(engine.prefixes.num_bytes)
        self.acceptance_rate.set(self._window.ratio() or 0.0)
        self.draft_length.set(self._lengths.ratio() or 0.0)
        self.efficiency.set(self._efficiency.value() or 1.0)
        return bytes(generate_latest(self.registry))

    # parts

    def _count(self, stats: SpecStats) -> None:
        seen = self._seen
        drafted = stats.num_draft_tokens - seen.num_draft_tokens
        accepted = stats.num_accepted_tokens - seen.num_accepted_tokens
        self.num_drafts.inc(stats.num_drafts - seen.num_drafts)
        self.num_draft_tokens.inc(drafted)
        self.num_accepted_tokens.inc(accepted)
        emitted = stats.num_emitted_tokens - seen.num_emitted_tokens
        self.num_emitted_tokens.inc(emitted)
        self.generation_tokens.inc(emitted)
        for position, count in enumerate(stats.num_accepted_tokens_per_pos):
            before = seen.num_accepted_tokens_per_pos
            if new := count - (before[position] if position < len(before) else 0):
                self._per_pos.labels(**self._labels, position=str(position)).inc(new)
        if drafted:
            self._window.add(accepted, drafted)
        self._seen = SpecStats(
            stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens,
            list(stats.num_accepted_tokens_per_pos), num_emitted_tokens=stats.num_emitted_tokens,
        )  # fmt: skip

    def _counter(self, name: str, doc: str) -> Counter:
        return self._family(Counter, name, doc).labels(**self._labels)

    def _gauge(self, name: str, doc: str) -> Gauge:
        return Gauge(f"{PREFIX}:{name}", doc, tuple(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, doc: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"{PREFIX}:{name}", doc, tuple(self._labels), registry=self.registry, buckets=buckets)
        return family.labels(**self._labels)

    def _family(self, kind: type[Counter], name: str, doc: str, more: tuple[str, ...] = ()) -> Counter:
        return kind(f"{PREFIX}:{name}", doc, (*self._labels, *more), registry=self.registry)
