"""What happened between two looks at a server's metrics, and the rules of thumb for what to change.

It knows what the numbers mean; it asks nobody and prints nothing.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # it needs prometheus-client, which is an extra
    from flashspec.vllm.scrape import Snapshot

Group = tuple[str, str]  # engine and model: what starts and ends as one
Level = Literal["attention", "note", "ok"]

LOW_ACCEPTANCE = 0.5  # of draft tokens
FULL_CACHE = 0.8
SOME_RUNNING, MANY_RUNNING = 8, 16  # requests at once: where drafting often stops to pay, where it mostly has
RARE = 0.2  # of drafts that are accepted up to a position
SLOW = 1.0  # system efficiency
GROWTH = 2  # requests by which a queue must have grown
FEWEST = 50  # draft tokens that a judgement needs
SAME_LENGTH = 0.9  # mean over longest draft: from here on they are taken to be of one length
MOST_POSITIONS = 1024
RECENT = 60.0  # seconds that are judged

SPEC = "spec_decode_"
DRAFTS, DRAFTED, ACCEPTED = (f"{SPEC}num_{what}_total" for what in ("drafts", "draft_tokens", "accepted_tokens"))
BY_POSITION = f"{SPEC}num_accepted_tokens_per_pos_total"
TOKENS = "generation_tokens_total"
TTFT = ("time_to_first_token_seconds",)
TPOT = ("request_time_per_output_token_seconds", "time_per_output_token_seconds")  # vLLM's name, ours
QUERIES = ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total")  # the second: before vLLM 0.10
HITS = ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total")
CACHE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
GROWING = (DRAFTS, DRAFTED, ACCEPTED, BY_POSITION, TOKENS, *QUERIES, *HITS,
           *(f"{name}_{part}" for name in (*TTFT, *TPOT) for part in ("sum", "count")))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What a server did in some seconds, and how it stands at their end; None: it does not tell.

    Counts are sums over its engines and models. Of shares it is the fullest cache, the lowest efficiency, and the mean
    draft length.
    """

    server: Literal["vLLM", "FlashSpec"]
    models: tuple[str, ...] = ()
    num_engines: int = 1
    speculates: bool = True  # speculation is on
    seconds: float = 0.0
    restarts: int = 0  # of engines
    tokens: float | None = None
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    accepted_by_position: tuple[float, ...] = ()
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    ttft_sum: float | None = None
    ttft_count: float | None = None
    tpot_sum: float | None = None
    tpot_count: float | None = None
    running: float | None = None
    waiting: float | None = None
    waiting_before: float | None = None
    cache_usage: float | None = None  # 0 to 1
    efficiency: float | None = None  # speed against plain decoding: FlashSpec measures it
    draft_length: float | None = None  # chosen by FlashSpec

    @property
    def acceptance(self) -> float | None:
        return _ratio(self.accepted, self.drafted)

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens of a step that had a draft, the target's own included."""
        ratio = _ratio(self.accepted, self.drafts)
        return None if ratio is None else 1 + ratio

    @property
    def mean_draft_length(self) -> float | None:
        return _ratio(self.drafted, self.drafts)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Share of drafts that were accepted up to here and whose token here was, from the first position on."""
        return [count / self.drafts for count in self.accepted_by_position] if self.drafts else []

    @property
    def tokens_per_second(self) -> float | None:
        return _ratio(self.tokens, self.seconds)

    @property
    def draft_tokens_per_second(self) -> float | None:
        return _ratio(self.drafted, self.seconds)

    @property
    def prefix_hit_rate(self) -> float | None:
        return _ratio(self.prefix_hits, self.prefix_queries)

    @property
    def ttft(self) -> float | None:
        """Mean seconds to the first token, of requests that got it."""
        return _ratio(self.ttft_sum, self.ttft_count)

    @property
    def tpot(self) -> float | None:
        """Mean seconds per token after the first, of requests that ended."""
        return _ratio(self.tpot_sum, self.tpot_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A rule of thumb that has something to say: the number, what it is held against, and what to change."""

    name: str
    level: Level
    evidence: str
    remedy: str = ""
    number: float | None = None
    threshold: float | None = None


@dataclass(slots=True)
class History:
    """Everything that was seen of a server: the last interval, the last minute, and all of it."""

    last: View | None = None
    whole: View | None = None
    rates: deque[float | None] = field(default_factory=lambda: deque(maxlen=56))  # tokens/s by interval
    _recent: deque[View] = field(default_factory=deque)

    def add(self, new: View) -> None:
        self.last = new
        self.whole = new if self.whole is None else joined(self.whole, new)
        self.rates.append(new.tokens_per_second)
        self._recent.append(new)
        while len(self._recent) > 1 and sum(view.seconds for view in self._recent) > RECENT:
            self._recent.popleft()

    @property
    def recent(self) -> View | None:
        """What verdicts are about: one interval says too little, all of it is of long ago."""
        found: View | None = None
        for each in self._recent:
            found = each if found is None else joined(found, each)
        return found


def view(before: Snapshot, after: Snapshot) -> View:
    """What happened between two snapshots of one server.

    A counter that fell, or that was created anew, is one of an engine that restarted: it has counted from 0.
    """
    grown = _Growth(before, after)
    counts = {"tokens": (TOKENS,), "drafts": (DRAFTS,), "drafted": (DRAFTED,), "accepted": (ACCEPTED,),
              "prefix_queries": QUERIES, "prefix_hits": HITS}  # fmt: skip
    times = {f"{short}_{part}": tuple(f"{name}_{part}" for name in names)
             for short, names in (("ttft", TTFT), ("tpot", TPOT)) for part in ("sum", "count")}  # fmt: skip
    groups = {_group(labels) for labels, _ in after.samples.get(TOKENS, ())}
    return View(
        server="FlashSpec" if after.prefix == "flashspec:" else "vLLM",
        models=tuple(sorted({model for _, model in groups} - {""})),
        num_engines=max(len(groups), 1),
        speculates=_speculates(after),
        seconds=max(after.taken - before.taken, 0.0),
        restarts=len(grown.restarted),
        accepted_by_position=grown.by_position(),
        running=_gauge(after, ("num_requests_running",), sum),
        waiting=_gauge(after, ("num_requests_waiting",), sum),
        waiting_before=_gauge(before, ("num_requests_waiting",), sum),
        cache_usage=_gauge(after, CACHE, max),
        efficiency=_gauge(after, (f"{SPEC}system_efficiency",), min),
        draft_length=_gauge(after, (f"{SPEC}draft_length",), fmean),
        **{name: grown.total(names) for name, names in (counts | times).items()},
    )


def lifetime(after: Snapshot) -> View:
    """What happened since the server started; it does not say how long ago that was."""
    return view(dataclasses.replace(after, samples={}), after)


def joined(old: View, new: View) -> View:
    """Two views, the second right after the first, as one."""
    summed = ("seconds", "restarts", "tokens", "drafts", "drafted", "accepted", "prefix_queries", "prefix_hits",
              "ttft_sum", "ttft_count", "tpot_sum", "tpot_count")  # fmt: skip
    length = max(len(old.accepted_by_position), len(new.accepted_by_position))
    padded = [(*each.accepted_by_position, *[0.0] * length)[:length] for each in (old, new)]
    changes: dict[str, Any] = {name: _plus(getattr(old, name), getattr(new, name)) for name in summed}
    changes["accepted_by_position"] = tuple(a + b for a, b in zip(*padded, strict=True))
    changes["waiting_before"] = old.waiting_before
    return dataclasses.replace(new, **changes)


def as_dict(view: View) -> dict[str, Any]:
    """Rates and means, by name; None: the server does not tell, or nothing happened."""
    names = ("seconds", "restarts", "tokens", "tokens_per_second", "draft_tokens_per_second", "drafts", "drafted",
             "accepted", "acceptance", "mean_acceptance_length", "mean_draft_length", "acceptance_by_position",
             "prefix_hit_rate", "ttft", "tpot")  # fmt: skip
    return {name: getattr(view, name) for name in names}


# --- reading snapshots ---


class _Growth:
    """By how much counters grew; those of engines that restarted did so from 0."""

    def __init__(self, before: Snapshot, after: Snapshot) -> None:
        self._before, self._after = before, after
        self.restarted = {
            _group(dict(labels))
            for name in after.samples
            if name in GROWING or name.endswith("_created")
            for labels, old, new in self._pairs(name)
            if old is not None and (new < old or (name.endswith("_created") and new != old))
        }

    def total(self, names: tuple[str, ...]) -> float | None:
        """Of the first of these names that the server has."""
        name = next((name for name in names if name in self._after.samples), None)
        return None if name is None else sum(more for _, more in self._grown(name))

    def by_position(self) -> tuple[float, ...]:
        counts: dict[int, float] = {}
        for labels, more in self._grown(BY_POSITION):
            position = labels.get("position", "")
            if position.isdecimal() and int(position) < MOST_POSITIONS:
                counts[int(position)] = counts.get(int(position), 0.0) + more
        return tuple(counts.get(i, 0.0) for i in range(max(counts, default=-1) + 1))

    def _grown(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        for labels, old, new in self._pairs(name):
            start = 0.0 if old is None or _group(dict(labels)) in self.restarted else old
            yield dict(labels), new - start

    def _pairs(self, name: str) -> Iterator[tuple[frozenset[tuple[str, str]], float | None, float]]:
        """Labels, value before, value after."""
        old, new = _series(self._before, name), _series(self._after, name)
        return ((labels, old.get(labels), value) for labels, value in new.items())


def _series(snapshot: Snapshot, name: str) -> dict[frozenset[tuple[str, str]], float]:
    found: dict[frozenset[tuple[str, str]], float] = {}
    for labels, value in snapshot.samples.get(name, ()):
        key = frozenset(labels.items())
        found[key] = found.get(key, 0.0) + value
    return found


def _group(labels: dict[str, str]) -> Group:
    return labels.get("engine", ""), labels.get("model_name", "")


def _gauge(snapshot: Snapshot, names: tuple[str, ...], of: Callable[[list[float]], float]) -> float | None:
    name = next((name for name in names if snapshot.samples.get(name)), None)
    return None if name is None else float(of([value for _, value in snapshot.samples[name]]))


def _speculates(after: Snapshot) -> bool:
    """Whether speculation is on: vLLM has its counters only then, ours stay at 0 otherwise."""
    never = after.prefix == "flashspec:" and not after.total(DRAFTS) and (after.total(TOKENS) or 0.0) > 0
    return after.speculates and not never


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _plus(old: float | None, new: float | None) -> float | None:
    return None if old is None and new is None else (old or 0) + (new or 0)


# --- rules of thumb ---


def verdicts(view: View) -> list[Verdict]:
    """What needs attention and what is worth a note, the worst first; at least one, which may say that all is well."""
    if view.server == "FlashSpec" and view.running is None and view.tokens is None:
        return [_engineless()]
    rules = (_efficiency, _acceptance, _cache, _queue, _running, _positions, _off, _undrafted, _restarted, _idle)
    found = [verdict for rule in rules if (verdict := rule(view)) is not None]
    if not any(verdict.level == "attention" or verdict.name in ("many running", "idle") for verdict in found):
        found.append(_content(view))
    return sorted(found, key=lambda verdict: ("attention", "note", "ok").index(verdict.level))


def _engineless() -> Verdict:
    return Verdict(
        name="no engine", level="attention", number=0, threshold=1,
        evidence="the server tells of no engine behind it, which starts, restarts or has ended",
        remedy="GET /ready says which of them, and its log why",
    )  # fmt: skip


def _efficiency(view: View) -> Verdict | None:
    if view.efficiency is None or not view.drafts or view.efficiency >= SLOW:
        return None
    return Verdict(
        name="efficiency", level="attention", number=view.efficiency, threshold=SLOW,
        evidence=f"drafting runs at {view.efficiency:.2f} x the speed of plain decoding, under {SLOW:g}",
        remedy="use --num-speculative-tokens auto; if it is, delete ~/.cache/flashspec/costs and restart, since costs "
        "are measured once; else --drafter none",
    )  # fmt: skip


def _acceptance(view: View) -> Verdict | None:
    if view.acceptance is None or (view.drafted or 0.0) < FEWEST or view.acceptance >= LOW_ACCEPTANCE:
        return None
    fewer = {
        "vLLM": "a smaller num_speculative_tokens in --speculative-config",
        "FlashSpec": "--num-speculative-tokens auto",
    }
    return Verdict(
        name="acceptance", level="attention", number=view.acceptance, threshold=LOW_ACCEPTANCE,
        evidence=f"{view.acceptance:.0%} of {view.drafted:.0f} draft tokens are accepted, under {LOW_ACCEPTANCE:.0%}",
        remedy=f"another drafter, or a draft model of the target's own family; {fewer[view.server]}; flashspec doctor "
        "finds a wrong template, vocabulary or precision",
    )  # fmt: skip


def _cache(view: View) -> Verdict | None:
    if view.cache_usage is None or view.cache_usage <= FULL_CACHE:
        return None
    remedies = {
        "vLLM": "fewer sequences (--max-num-seqs, --max-model-len) or more memory (--gpu-memory-utilization; on a CPU "
        "VLLM_CPU_KVCACHE_SPACE)",
        "FlashSpec": "fewer sequences (--max-batch, --max-length) or more memory (--cache-memory)",
    }
    return Verdict(
        name="kv cache", level="attention", number=view.cache_usage, threshold=FULL_CACHE,
        evidence=f"{view.cache_usage:.0%} of the KV cache is in use, over {FULL_CACHE:.0%}: requests will be put off",
        remedy=remedies[view.server],
    )  # fmt: skip


def _queue(view: View) -> Verdict | None:
    if view.waiting is None or view.waiting_before is None or view.waiting - view.waiting_before < GROWTH:
        return None
    grown = view.waiting - view.waiting_before
    batch = {"vLLM": "--max-num-seqs", "FlashSpec": "--max-batch"}[view.server]
    return Verdict(
        name="queue", level="attention", number=grown, threshold=GROWTH,
        evidence=f"{view.waiting:.0f} requests wait, {grown:.0f} more than {view.seconds:.0f} s ago ({GROWTH} or more "
        "is growth)",
        remedy=f"more arrive than are finished: more replicas or shorter outputs; {batch} if the cache has room",
    )  # fmt: skip


def _running(view: View) -> Verdict | None:
    if view.running is None or view.running < SOME_RUNNING or not view.drafts:
        return None
    pays = view.efficiency is not None and view.efficiency > SLOW  # measured, so the rule need not be right
    evidence = (
        f"{view.running:.0f} requests run at once; from {SOME_RUNNING} to {MANY_RUNNING} on drafts often cost more "
        "than they bring"
    )
    if pays:
        evidence += f", yet here they bring {view.efficiency:.2f} x as measured"
    return Verdict(
        name="many running", level="attention" if view.running >= MANY_RUNNING and not pays else "note",
        number=view.running, threshold=SOME_RUNNING, evidence=evidence,
        remedy=f"{_schedule(view)} FlashSpec: --num-speculative-tokens auto goes to 0 by itself; off: --drafter none",
    )  # fmt: skip


def _schedule(view: View) -> str:
    """vLLM's way to draft nothing in large batches, with this server's draft length where it is known."""
    k = max(len(view.accepted_by_position), 1) if view.server == "vLLM" else 4
    ranges = f"[[1, {SOME_RUNNING - 1}, {k}], [{SOME_RUNNING}, {SOME_RUNNING}, 0]]"
    return (
        f'vLLM from 0.24 on: "num_speculative_tokens_per_batch_size": {ranges} in --speculative-config; off: serve '
        "without it."
    )


def _positions(view: View) -> Verdict | None:
    """Only where drafts are of one length: of others nobody knows how many reached a position."""
    rates, length = view.acceptance_by_position, view.mean_draft_length or 0.0
    rare = next((i for i, rate in enumerate(rates) if rate < RARE), None)
    if not rare or (view.drafted or 0.0) < FEWEST or length < SAME_LENGTH * len(rates):
        return None
    where = {"vLLM": "in --speculative-config", "FlashSpec": "or set it to auto"}[view.server]
    return Verdict(
        name="positions", level="attention", number=rates[rare], threshold=RARE,
        evidence=f"{rates[rare]:.0%} of drafts hold up to token {rare + 1}, under {RARE:.0%}; they have {length:.1f}",
        remedy=f"lower num_speculative_tokens to {rare} {where}",
    )  # fmt: skip


def _off(view: View) -> Verdict | None:
    if view.speculates:
        return None
    evidence = {
        "vLLM": "speculation is off: there are no spec_decode counters, which vLLM has only when it is on",
        "FlashSpec": "speculation is off: not one draft since the server started, and there were tokens",
    }
    remedy = {
        "vLLM": 'serve with --speculative-config, for example \'{"method": "ngram", "num_speculative_tokens": 5, '
        '"prompt_lookup_min": 2, "prompt_lookup_max": 6}\'; flashspec plan says whether it will pay',
        "FlashSpec": "serve without --drafter none; with auto, drafts begin where they pay",
    }
    return Verdict(
        name="speculation off", level="note", number=0, threshold=1,
        evidence=evidence[view.server], remedy=remedy[view.server],
    )  # fmt: skip


def _undrafted(view: View) -> Verdict | None:
    if not view.speculates or view.drafts or not view.tokens or view.drafts is None:
        return None
    why = {
        "vLLM": "the drafter finds nothing to guess from, or a schedule says 0 at this batch size",
        "FlashSpec": "the draft length is 0 because the batch is full or guesses miss, or requests turn it off",
    }
    return Verdict(
        name="no drafts", level="note", number=0, threshold=1,
        evidence=f"no draft among {view.tokens:.0f} tokens, speculation being on: {why[view.server]}",
    )  # fmt: skip


def _restarted(view: View) -> Verdict | None:
    if not view.restarts:
        return None
    return Verdict(
        name="restart", level="note", number=view.restarts, threshold=0,
        evidence=f"counters began anew {view.restarts} x in {view.seconds:.0f} s: the server restarted",
        remedy="its log says why; if this goes on, several servers answer here in turn: watch each by its own address",
    )  # fmt: skip


def _idle(view: View) -> Verdict | None:
    if view.tokens is None or view.tokens or view.running or view.waiting:
        return None
    return Verdict(
        name="idle", level="note", number=0, threshold=1,
        evidence=f"no tokens in {view.seconds:.{0 if view.seconds >= 10 else 1}f} s: there is nothing to judge "
        "until requests come",
    )  # fmt: skip


def _content(view: View) -> Verdict:
    """What was looked at and found good, with what was not."""
    seen = []
    if view.acceptance is not None and (view.drafted or 0.0) >= FEWEST:
        seen.append(f"acceptance {view.acceptance:.0%} (at least {LOW_ACCEPTANCE:.0%})")
    elif view.drafted:
        seen.append(f"acceptance not judged yet ({view.drafted:.0f} of {FEWEST} draft tokens)")
    if view.efficiency is not None and view.drafts:
        seen.append(f"efficiency {view.efficiency:.2f} (at least {SLOW:g})")
    if view.cache_usage is not None:
        seen.append(f"KV cache {view.cache_usage:.0%} (at most {FULL_CACHE:.0%})")
    if view.running is not None:
        seen.append(f"{view.running:.0f} running (drafts: under {SOME_RUNNING})")
    if view.waiting is not None:
        seen.append(f"{view.waiting:.0f} waiting, not growing")
    return Verdict(
        name="fine", level="ok", evidence=": ".join(["nothing to complain about", *([", ".join(seen)] if seen else [])])
    )
