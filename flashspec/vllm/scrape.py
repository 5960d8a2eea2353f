"""What a server's ``/metrics`` says of speculation and load, whether it is vLLM's or ours.

It knows Prometheus' text format and both servers' names for the same things; it does not know what is done with them.
"""

from __future__ import annotations

import math
import ssl
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http.client import HTTPException

from prometheus_client.parser import text_string_to_metric_families

from flashspec.core import SpecStats
from flashspec.errors import EngineLostError, OptionError

PREFIXES = ("vllm:", "flashspec:")
SPEC = "spec_decode_"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A server's metrics at one moment, without their prefix."""

    taken: float  # on time.monotonic()'s clock
    samples: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)
    prefix: str = ""

    @classmethod
    def of(cls, text: str, *, taken: float | None = None) -> Snapshot:
        """Parse what ``/metrics`` gave, but for what is not a number yet (NaN).

        Raises:
            OptionError: it is neither vLLM's nor ours.
        """
        by_prefix: dict[str, dict[str, list[tuple[dict[str, str], float]]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found = next((each for each in PREFIXES if sample.name.startswith(each)), None)
                    if found is not None:
                        samples = by_prefix.setdefault(found, {})
                        if math.isfinite(sample.value):
                            name = sample.name.removeprefix(found)
                            samples.setdefault(name, []).append((sample.labels, sample.value))
        except ValueError as error:
            raise OptionError(
                f"these are no Prometheus metrics ({str(error)[:80]}); give the address of a server"
            ) from error
        prefix = next((each for each in PREFIXES if each in by_prefix), None)  # our proxy has both, of the same things
        if prefix is None:
            raise OptionError("no metrics of vLLM or FlashSpec are there; give the address of one of their servers")
        return cls(time.monotonic() if taken is None else taken, by_prefix[prefix], prefix)

    @classmethod
    def read(cls, url: str, *, timeout: float = 5.0, api_key: str | None = None) -> Snapshot:
        """Ask a server.

        Raises:
            EngineLostError: nobody answers, or a proxy that finds nobody.
            OptionError: what answers has no such metrics.
        """
        address = f"{url.rstrip('/')}/metrics"
        try:
            request = urllib.request.Request(address)
            if api_key is not None:
                request.add_unredirected_header("Authorization", f"Bearer {api_key}")  # for this host alone
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            error.close()
            raise _refusal(address, error.code) from error
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise nobody(url, reason) from error
        return cls.of(text)

    def total(self, name: str, **labels: str) -> float | None:
        """The sum of a metric's samples with these labels; None where there is no such metric."""
        if name not in self.samples:
            return None
        wanted = labels.items()
        return sum(value for held, value in self.samples[name] if wanted <= held.items())

    def by_position(self) -> list[float]:
        """Accepted draft tokens by position."""
        found = self.samples.get(f"{SPEC}num_accepted_tokens_per_pos_total", [])
        counts: dict[int, float] = {}
        for labels, value in found:
            counts[int(labels["position"])] = counts.get(int(labels["position"]), 0.0) + value
        return [counts.get(i, 0.0) for i in range(max(counts, default=-1) + 1)]

    @property
    def speculates(self) -> bool:
        """Whether speculation is on: vLLM has its counters only then."""
        return f"{SPEC}num_drafts_total" in self.samples


def nobody(url: str, reason: object) -> EngineLostError:
    """What to say where no connection comes about."""
    if isinstance(reason, ssl.SSLError):
        return EngineLostError(f"{url} does not answer as https ({reason}); is it http:// there?")
    return EngineLostError(f"nothing answers at {url} ({reason}); is the server running there?")


def _refusal(address: str, status: int) -> EngineLostError | OptionError:
    """What a status other than 200 means."""
    if status >= 500:
        return EngineLostError(f"{address} answers {status}; is the server running, and ready?")
    if status in (401, 403):
        return OptionError(f"{address} answers {status}; give the key that it asks for with --api-key")
    return OptionError(f"{address} answers {status}; is it a vLLM or FlashSpec server?")


def difference(before: Snapshot, after: Snapshot) -> SpecStats:
    """What was drafted and accepted between two snapshots."""

    def more(name: str) -> int:
        return round((after.total(name) or 0.0) - (before.total(name) or 0.0))

    old, new = before.by_position(), after.by_position()
    old += [0.0] * (len(new) - len(old))
    stats = SpecStats(
        num_drafts=more(f"{SPEC}num_drafts_total"),
        num_draft_tokens=more(f"{SPEC}num_draft_tokens_total"),
        num_accepted_tokens=more(f"{SPEC}num_accepted_tokens_total"),
        num_emitted_tokens=more("generation_tokens_total"),
    )
    stats.num_accepted_tokens_per_pos = [round(b - a) for a, b in zip(old, new, strict=True)]
    while stats.num_accepted_tokens_per_pos and not stats.num_accepted_tokens_per_pos[-1]:
        stats.num_accepted_tokens_per_pos.pop()
    return stats
