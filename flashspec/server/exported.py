"""vLLM's metrics under our names, so that one dashboard and one set of alerts serve both engines.

It knows both servers' names for the same things; it does not know HTTP. Three of ours have no counterpart and are left
out: ``spec_decode_system_efficiency``, because a vLLM that drafts never takes plain steps to compare with,
``num_requests_running_max`` and ``num_requests_waiting_max``, which vLLM does not tell, and what is said of the prefix
cache's bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from flashspec.errors import FlashSpecError
from flashspec.metrics import PREFIX, Window
from flashspec.vllm.scrape import SPEC, Snapshot

ENGINE = "vllm"
COUNTERS = {  # ours, theirs, what it counts
    f"{SPEC}num_drafts": (f"{SPEC}num_drafts_total", "Steps of a request that had a draft"),
    f"{SPEC}num_draft_tokens": (f"{SPEC}num_draft_tokens_total", "Draft tokens scored"),
    f"{SPEC}num_accepted_tokens": (f"{SPEC}num_accepted_tokens_total", "Draft tokens accepted"),
    "prompt_tokens": ("prompt_tokens_total", "Prompt tokens of requests that were begun"),
    "generation_tokens": ("generation_tokens_total", "Tokens generated"),
    "prefix_cache_queries": ("prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache"),
    "prefix_cache_hits": ("prefix_cache_hits_total", "Prompt tokens that were found there"),
    f"{SPEC}num_emitted_tokens": ("generation_tokens_total", "Tokens emitted, the target's own included"),
    "steps": ("iteration_tokens_total_count", "Steps of the engine"),
}
LABELLED = {  # likewise, with the label that both have
    f"{SPEC}num_accepted_tokens_per_pos": ("position", "Accepted draft tokens by position"),
    "request_success": ("finished_reason", "Finished requests by reason"),
}
GAUGES = {
    "num_requests_running": "Requests that are being worked on",
    "num_requests_waiting": "Requests in the queue",
    "kv_cache_usage_perc": "Share of the key/value cache in use, 0 to 1",
}
HISTOGRAMS = {  # ours, theirs, what it measures
    "time_to_first_token_seconds": ("time_to_first_token_seconds", "From a request's arrival to its first token"),
    "time_per_output_token_seconds": ("request_time_per_output_token_seconds", "Per token after the first"),
    "inter_chunk_seconds": ("inter_token_latency_seconds", "Between two steps of a request"),
    "e2e_request_latency_seconds": ("e2e_request_latency_seconds", "From a request's arrival to its end"),
    "request_queue_time_seconds": ("request_queue_time_seconds", "From a request's arrival to its first step"),
}
DRAFTED, ACCEPTED = f"{SPEC}num_draft_tokens_total", f"{SPEC}num_accepted_tokens_total"
ROWS = "inter_token_latency_seconds_count"  # one for each step of a request after its first


class Exported:
    """What ``/metrics`` says of a vLLM.

    Args:
        model_name: label of all of ours.
    """

    def __init__(self, model_name: str) -> None:
        self._labels = {"model_name": model_name, "engine": ENGINE}
        self._registry = CollectorRegistry()
        self._requests = Counter(
            f"{PREFIX}:requests", "API requests by HTTP status", (*self._labels, "status"), registry=self._registry
        )
        self._rates, self._lengths = Window(), Window()
        self._seen: Snapshot | None = None

    def observe_status(self, status: int) -> None:
        self._requests.labels(**self._labels, status=str(status)).inc()

    def observe(self, text: str) -> Snapshot | None:
        """What vLLM's page says, and how it differs from the last one, for the rates over the last minute."""
        try:
            snapshot = Snapshot.of(text)
        except FlashSpecError:
            return None
        drafted, accepted, rows = (self._more(snapshot, name) for name in (DRAFTED, ACCEPTED, ROWS))
        self._seen = snapshot
        if drafted > 0:
            self._rates.add(accepted, drafted)
        if rows > 0:
            self._lengths.add(drafted, rows)
        return snapshot

    def forget(self) -> None:
        """It was started anew: its counters begin at 0."""
        self._seen = None

    def page(self, text: str | None) -> bytes:
        """The text that Prometheus reads: ours, then vLLM's own; without it while vLLM is not there."""
        snapshot = None if text is None else self.observe(text)
        own = bytes(generate_latest(self._registry))
        if text is None or snapshot is None:
            return own
        return own + bytes(generate_latest(_Families(list(self._families(snapshot))))) + text.encode()

    def _more(self, snapshot: Snapshot, name: str) -> float:
        """By how much a counter has grown; a server that is seen for the first time says nothing of the last minute."""
        if self._seen is None:
            return 0.0
        return max((snapshot.total(name) or 0.0) - (self._seen.total(name) or 0.0), 0.0)

    def _families(self, snapshot: Snapshot) -> Iterator[Metric]:
        yield from self._counters(snapshot)
        yield from self._gauges(snapshot)
        for ours, (theirs, doc) in HISTOGRAMS.items():
            if f"{theirs}_bucket" in snapshot.samples:
                histogram = HistogramMetricFamily(f"{PREFIX}:{ours}", doc, labels=tuple(self._labels))
                total = snapshot.total(f"{theirs}_sum") or 0.0
                histogram.add_metric(list(self._labels.values()), _buckets(snapshot, f"{theirs}_bucket"), total)
                yield histogram

    def _counters(self, snapshot: Snapshot) -> Iterator[Metric]:
        for ours, (theirs, doc) in COUNTERS.items():
            is_missing = ours.startswith(SPEC) and not snapshot.speculates
            if not is_missing and (total := snapshot.total(theirs)) is not None:
                counter = CounterMetricFamily(f"{PREFIX}:{ours}", doc, labels=tuple(self._labels))
                counter.add_metric(list(self._labels.values()), total)
                yield counter
        for ours, (label, doc) in LABELLED.items():
            counter = CounterMetricFamily(f"{PREFIX}:{ours}", doc, labels=(*self._labels, label))
            for value in dict.fromkeys(labels[label] for labels, _ in snapshot.samples.get(f"{ours}_total", ())):
                total = snapshot.total(f"{ours}_total", **{label: value})
                counter.add_metric([*self._labels.values(), value], total or 0.0)
            if counter.samples:
                yield counter

    def _gauges(self, snapshot: Snapshot) -> Iterator[Metric]:
        for ours, doc in GAUGES.items():
            if (total := snapshot.total(ours)) is not None:
                # shares of several engines are averaged, numbers of requests are added up
                value = total / len(snapshot.samples[ours]) if ours.endswith("_perc") else total
                yield self._gauge(ours, doc, value)
        if snapshot.speculates:
            rate, length = self._rates.ratio() or 0.0, self._lengths.ratio() or 0.0
            yield self._gauge(f"{SPEC}draft_acceptance_rate", "Accepted over draft tokens of the last minute", rate)
            yield self._gauge(f"{SPEC}draft_length", "Draft tokens of a request and step, over the last minute", length)

    def _gauge(self, name: str, doc: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(f"{PREFIX}:{name}", doc, labels=tuple(self._labels))
        gauge.add_metric(list(self._labels.values()), value)
        return gauge


@dataclass(frozen=True, slots=True)
class _Families:
    """Something that ``generate_latest`` reads like a registry."""

    families: list[Metric]

    def collect(self) -> list[Metric]:
        return self.families


def _buckets(snapshot: Snapshot, name: str) -> list[tuple[str, float]]:
    """Counts up to each bound, over all engines."""
    counts: dict[str, float] = {}
    for labels, value in snapshot.samples[name]:
        counts[labels["le"]] = counts.get(labels["le"], 0.0) + value
    return sorted(counts.items(), key=lambda entry: float(entry[0]))
