"""watch: what a vLLM or FlashSpec server does now, from its /metrics, and what to change. It needs no models."""

from __future__ import annotations

import contextlib
import json
import locale
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from flashspec.cli.options import app
from flashspec.errors import EngineLostError, OptionError
from flashspec.vllm.watch import History, Verdict, View, as_dict, lifetime, verdicts, view

if TYPE_CHECKING:
    from flashspec.vllm.scrape import Snapshot

    Show = Callable[["Watcher", bool], None]  # the second: whether there is something new

BARS = ("▁▂▃▄▅▆▇█", "_.:-=+*#")  # the second where the terminal is not UTF-8's
MARKS = {"attention": ("!", "!", "bold yellow"), "note": ("·", "-", "cyan"), "ok": ("✓", "+", "green")}
SHORTEST, LONGEST = 0.1, 3600.0  # seconds
DASH = "-"  # what the server does not tell


@app.command()
def watch(
    url: Annotated[str, typer.Argument(help="The server, such as http://127.0.0.1:8000.", show_default=False)],
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="A JSON object an interval.")] = False,
    api_key: Annotated[
        str | None, typer.Option(help="For a proxy that asks for one; the servers' /metrics does not.")
    ] = None,
) -> None:
    """Watch a vLLM or FlashSpec server: acceptance, speed, load, and what to change. Ctrl-C ends it."""
    watcher = Watcher(_address(url), _reader(_address(url), api_key))
    _check(interval, api_key)
    paper = Console(highlight=False)
    with contextlib.suppress(KeyboardInterrupt):
        if once:
            _once(watcher, interval, as_json, paper)
        elif as_json:
            _go_on(watcher, interval, lambda watcher, is_new: _print_json(watcher) if is_new else None)
        elif paper.is_terminal:
            with Live(console=paper, auto_refresh=False) as live:
                _go_on(watcher, interval, lambda watcher, _: live.update(screenful(watcher), refresh=True))
        else:
            _go_on(watcher, interval, Lines(paper))


def _check(interval: float, api_key: str | None) -> None:
    if not SHORTEST <= interval <= LONGEST:
        raise OptionError(f"interval is {interval:g}; it must be from {SHORTEST:g} to {LONGEST:g} seconds")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise OptionError("the API key is empty or has characters that a header cannot hold; give it as it was issued")


def _address(url: str) -> str:
    """Where the server is: without /metrics and /v1, which people paste too.

    Raises:
        OptionError: not an address.
    """
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        _ = parts.port  # raises ValueError where it is no number
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and "@" not in parts.netloc
    except ValueError:
        is_sound = False
    if not is_sound or parts.query or not text.isascii() or any(not char.isprintable() or char == " " for char in text):
        raise OptionError(f"{url!r} is not a server's address; give one such as http://127.0.0.1:8000")
    path = parts.path.rstrip("/").removesuffix("/metrics").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


def _reader(address: str, api_key: str | None) -> Callable[[], Snapshot]:
    try:
        from flashspec.vllm.scrape import Snapshot
    except ImportError as error:
        raise OptionError(
            f"watching needs prometheus-client ({error}); pip install 'flashspec-decoding[serve]'"
        ) from error
    return lambda: Snapshot.read(address, api_key=api_key)


# --- looking ---


@dataclass(slots=True)
class Watcher:
    """A server, and what was seen of it."""

    address: str
    read: Callable[[], Snapshot]
    history: History = field(default_factory=History)
    snapshot: Snapshot | None = None
    lost: str = ""  # why it does not answer now
    lost_since: float = 0.0

    def look(self) -> bool:
        """Whether there is something new: another interval, or a server that does not answer.

        Raises:
            OptionError: what answers has never been a vLLM or FlashSpec server.
        """
        try:
            after = self.read()
        except (EngineLostError, OptionError) as error:
            if isinstance(error, OptionError) and self.snapshot is None:
                raise
            self.lost_since = self.lost_since if self.lost else time.monotonic()
            self.lost = str(error)
            return True
        before, self.snapshot, self.lost = self.snapshot, after, ""
        if before is not None:
            self.history.add(view(before, after))
        return before is not None

    @property
    def now(self) -> View | None:
        """The last interval, or what can be said after one look."""
        if self.history.last is None and self.snapshot is not None:
            return view(self.snapshot, self.snapshot)
        return self.history.last

    @property
    def verdicts(self) -> list[Verdict]:
        recent = self.history.recent
        return [] if recent is None or self.lost else verdicts(recent)


def _once(watcher: Watcher, interval: float, as_json: bool, paper: Console) -> None:
    """Two looks; a server that does not answer is an error."""
    for looks in range(2):
        if looks:
            time.sleep(interval)
        watcher.look()
        if watcher.lost:
            raise EngineLostError(watcher.lost)
    if as_json:
        _print_json(watcher)
    else:
        paper.print(screenful(watcher))


def _go_on(watcher: Watcher, interval: float, show: Show) -> None:
    """Until Ctrl-C."""
    due = time.monotonic()
    while True:
        show(watcher, watcher.look())
        due = max(due + interval, time.monotonic())  # a slow answer delays the next look, no more
        time.sleep(due - time.monotonic() if due > time.monotonic() else 0.0)


# --- JSON and lines ---


def _print_json(watcher: Watcher) -> None:
    print(json.dumps(as_answer(watcher), ensure_ascii=False, allow_nan=False), flush=True)


def as_answer(watcher: Watcher) -> dict[str, Any]:
    """What --json prints: times in seconds, shares from 0 to 1."""
    head = {"time": round(time.time(), 3), "url": watcher.address, "up": not watcher.lost}
    now, whole, snapshot = watcher.history.last, watcher.history.whole, watcher.snapshot
    if watcher.lost or now is None or whole is None or snapshot is None:
        return {**head, "error": watcher.lost or None}
    gauges = ("running", "waiting", "cache_usage", "efficiency", "draft_length")
    names = ("name", "level", "number", "threshold", "evidence", "remedy")
    return {
        **head,
        "server": now.server,
        "models": list(now.models),
        "num_engines": now.num_engines,
        "speculates": now.speculates,
        **{name: getattr(now, name) for name in gauges},
        "last": as_dict(now),
        "whole": as_dict(whole),
        "since_start": as_dict(lifetime(snapshot)),
        "verdicts": [{name: getattr(verdict, name) for name in names} for verdict in watcher.verdicts],
    }


@dataclass(slots=True)
class Lines:
    """For a file or a pipe: a line an interval, and verdicts when others hold than before."""

    paper: Console
    _said: list[tuple[str, str]] = field(default_factory=list)
    _was_lost: bool = False

    def __call__(self, watcher: Watcher, is_new: bool) -> None:
        if watcher.lost and not self._was_lost:
            self._print(_stamped(f"{printable(watcher.lost)} Waiting for it."))
        elif is_new and watcher.now is not None and not watcher.lost:
            self._print(_stamped(one_line(watcher.now)))
            self._judge(watcher.verdicts)
        self._was_lost = bool(watcher.lost)

    def _judge(self, found: list[Verdict]) -> None:
        names: list[tuple[str, str]] = [(verdict.name, verdict.level) for verdict in found]
        if names != self._said:
            for verdict in found:
                self._print(f"  {_mark(verdict)[0]} {_sentence(verdict)}")
        self._said = names

    def _print(self, line: str) -> None:
        self.paper.print(Text(line), soft_wrap=True)
        self.paper.file.flush()


def _stamped(text: str) -> str:
    return f"{time.strftime('%H:%M:%S')} {text}"


def one_line(now: View) -> str:
    """What an interval was, without what the server does not tell."""
    parts = {
        "tokens/s": _rate(now.tokens_per_second),
        "draft tokens/s": _rate(now.draft_tokens_per_second),
        "acceptance": _share(now.acceptance),
        "mean acceptance length": _number(now.mean_acceptance_length),
        "TTFT": _time(now.ttft),
        "per token": _time(now.tpot),
        "running": _count(now.running),
        "waiting": _count(now.waiting),
        "KV cache": _share(now.cache_usage),
        "prefix hits": _share(now.prefix_hit_rate),
        "efficiency": _number(now.efficiency),
        "draft length": _number(now.draft_length),
    }
    return ", ".join(f"{name} {value}" for name, value in parts.items() if value != DASH)


# --- the screen ---


def screenful(watcher: Watcher) -> RenderableType:
    """All of it, for a terminal of 80 columns or more."""
    now = watcher.now
    if now is None or watcher.snapshot is None:
        return _status(watcher)
    parts: list[RenderableType] = [_status(watcher), _table(watcher, now), _load(now)]
    if recent := (watcher.history.recent or now).acceptance_by_position:
        parts.append(_positions(recent))
    if any(rate is not None for rate in watcher.history.rates):
        parts.append(_sparkline(list(watcher.history.rates)))
    parts += [Text(""), *map(_judgement, watcher.verdicts)]
    return Group(*parts)


def _status(watcher: Watcher) -> Text:
    now = watcher.now
    if watcher.lost:
        seconds = time.monotonic() - watcher.lost_since
        away = f"gone for {seconds:.0f} s: " if now is not None else ""
        return Text(f"{away}{printable(watcher.lost)} Waiting for it.", style="bold red")
    if now is None:
        return Text(f"asking {watcher.address}")
    engines = f", {now.num_engines} engines" if now.num_engines > 1 else ""
    return Text.assemble((f"{now.server}", "bold"), f" at {watcher.address}, {printable(_models(now))}{engines}")


def _models(now: View) -> str:
    return f"model{'s' if len(now.models) > 1 else ''} {', '.join(now.models) or 'unnamed'}"


ROWS: dict[str, Callable[[View], str]] = {
    "tokens/s": lambda view: _rate(view.tokens_per_second),
    "draft tokens/s": lambda view: _rate(view.draft_tokens_per_second),
    "acceptance rate": lambda view: _share(view.acceptance),
    "mean acceptance length": lambda view: _number(view.mean_acceptance_length),
    "tokens a draft": lambda view: _number(view.mean_draft_length),
    "time to first token": lambda view: _time(view.ttft),
    "time per output token": lambda view: _time(view.tpot),
    "prefix cache hits": lambda view: _share(view.prefix_hit_rate),
}


def _table(watcher: Watcher, now: View) -> Table:
    """The last interval, all that was watched, and the server's life, side by side."""
    assert watcher.snapshot is not None
    views = [now, watcher.history.whole or now, lifetime(watcher.snapshot)]
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", min_width=24)
    for _ in views:
        table.add_column(justify="right", min_width=14)
    heads = (f"last {_seconds(now.seconds)}", f"watched {_seconds(views[1].seconds)}", "since start")
    table.add_row("", *(Text(head, style="dim") for head in heads))
    for name, cell in ROWS.items():
        cells = [cell(each) for each in views]
        if cells != [DASH] * len(cells):
            table.add_row(name, *cells)
    return table


def _load(now: View) -> Text:
    parts = {
        "running": _count(now.running),
        "waiting": _count(now.waiting),
        "KV cache": _share(now.cache_usage),
        "efficiency": DASH if now.efficiency is None else f"{_number(now.efficiency)} x",
        "draft length": _number(now.draft_length),
    }
    told = [(name, value) for name, value in parts.items() if value != DASH]
    pieces = [piece for name, value in told for piece in ((f"{name} ", "dim"), (f"{value}   ", "bold"))]
    return Text.assemble(*pieces)


def _positions(rates: list[float]) -> Text:
    """By position, from the first on."""
    cells = " ".join(f"{rate:.0%}" for rate in rates[:8]) + (" ..." if len(rates) > 8 else "")
    return Text.assemble(("accepted by position  ", "dim"), bars(rates[:16], top=1.0), "  ", cells)


def _sparkline(rates: list[float | None]) -> Text:
    known = [rate for rate in rates if rate is not None]
    drawn = bars(rates, top=max(known))
    return Text.assemble(("tokens/s  ", "dim"), (drawn, "cyan"), (f"  most {_rate(max(known))}", "dim"))


def bars(values: Iterable[float | None], *, top: float) -> str:
    """A character for each value; the highest bar is ``top``."""
    steps = BARS[not _can_draw()]
    return "".join(_bars(values, top, steps))


def _bars(values: Iterable[float | None], top: float, steps: str) -> Iterator[str]:
    for value in values:
        share = 0.0 if value is None or top <= 0 else min(max(value / top, 0.0), 1.0)
        yield " " if value is None else steps[round(share * (len(steps) - 1))]


def _can_draw() -> bool:
    return "utf" in locale.getencoding().lower()  # stdout says UTF-8 whatever the terminal shows


def _mark(verdict: Verdict) -> tuple[str, str]:
    """The character, the style."""
    fancy, plain, style = MARKS[verdict.level]
    return fancy if _can_draw() else plain, style


def _judgement(verdict: Verdict) -> RenderableType:
    mark, style = _mark(verdict)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(style=style, width=1)
    table.add_column()
    table.add_row(mark, Text(verdict.evidence))
    if verdict.remedy:
        table.add_row("", Text(verdict.remedy, style="yellow" if verdict.level == "attention" else "dim"))
    return table


def _sentence(verdict: Verdict) -> str:
    return f"{verdict.evidence}{f'; {verdict.remedy}' if verdict.remedy else ''}"


def printable(text: str) -> str:
    """What a server sent, without what would move the cursor."""
    return "".join(char if char.isprintable() else "?" for char in text)


# --- numbers ---


def _rate(value: float | None) -> str:
    return DASH if value is None else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _number(value: float | None) -> str:
    return DASH if value is None else f"{value:.2f}"


def _share(value: float | None) -> str:
    return DASH if value is None else f"{value:.0%}"


def _count(value: float | None) -> str:
    return DASH if value is None else f"{value:.0f}"


def _time(value: float | None) -> str:
    """Seconds, or milliseconds below one."""
    return DASH if value is None else f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 10 else f"{value:.0f} s" if value < 600 else f"{value / 60:.0f} min"
