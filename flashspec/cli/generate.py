"""generate and chat. Text goes to stdout as it comes; spinners, statistics and errors go to stderr."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from flashspec.cli.options import (
    DEFAULTS,
    ApiKey,
    Backend,
    ColorTokens,
    Config,
    Device,
    DraftBackend,
    DraftDtype,
    DrafterName,
    DraftLength,
    DraftModel,
    DraftVocab,
    DraftWidth,
    Dtype,
    FrequencyPenalty,
    GpuLayers,
    IgnoreEos,
    MaxTokens,
    MinP,
    Model,
    Pack,
    PresencePenalty,
    RepetitionPenalty,
    Rule,
    Seed,
    SelfTest,
    Stats,
    Stop,
    System,
    Temperature,
    Threads,
    TopK,
    TopP,
    TrustRemoteCode,
    Url,
    Verbose,
    app,
    draft_length,
    progress,
    screen,
    set_up_logging,
)
from flashspec.controller import AUTO
from flashspec.core import Chunk, Prompt, SamplingParams, SpecStats, Timings
from flashspec.errors import FlashSpecError, OptionError, PromptError
from flashspec.text import conversation

if TYPE_CHECKING:
    from flashspec.engine import AnyController, LocalEngine
    from flashspec.vllm.engine import VllmEngine

COLORS = {"accepted": "green", "recovered": "red", "bonus": "cyan"}


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Argument(help="- or nothing: read stdin.", show_default=False)] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,
    config: Config = None,
    model: Model = None,
    draft: DraftModel = None,
    drafter: DrafterName = None,
    num_speculative_tokens: DraftLength = AUTO,
    temperature: Temperature = DEFAULTS.temperature,
    top_p: TopP = DEFAULTS.top_p,
    top_k: TopK = DEFAULTS.top_k,
    min_p: MinP = DEFAULTS.min_p,
    repetition_penalty: RepetitionPenalty = DEFAULTS.repetition_penalty,
    presence_penalty: PresencePenalty = DEFAULTS.presence_penalty,
    frequency_penalty: FrequencyPenalty = DEFAULTS.frequency_penalty,
    seed: Seed = DEFAULTS.seed,
    max_tokens: MaxTokens = DEFAULTS.max_tokens,
    stop: Stop = None,
    ignore_eos: IgnoreEos = False,
    verification: Rule = DEFAULTS.verification,
    logprobs: Annotated[int | None, typer.Option(help="With --json: of each token and of so many others.")] = None,
    system: System = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    backend: Backend = AUTO,
    draft_backend: DraftBackend = AUTO,
    draft_dtype: DraftDtype = None,
    draft_vocab: DraftVocab = None,
    draft_width: DraftWidth = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    device: Device = None,
    dtype: Dtype = None,
    pack: Pack = True,
    self_test: SelfTest = False,
    trust_remote_code: TrustRemoteCode = False,
    url: Url = None,
    api_key: ApiKey = None,
    stats: Stats = False,
    color_tokens: ColorTokens = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of text.")] = False,
    verbose: Verbose = False,
) -> None:
    """Generate text. Instruction models get the prompt through their chat template (see --raw)."""
    set_up_logging(verbose)
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, seed=seed, max_tokens=max_tokens,
        stop=tuple(stop or ()), ignore_eos=ignore_eos, verification=verification, logprobs=logprobs,
    )  # fmt: skip
    if raw and system:
        raise OptionError("--system is part of a conversation, and --raw takes the prompt as it is; give one of them")
    text = _prompt(prompt, file)
    engine = _load(
        model, draft=draft, drafter=drafter, num_speculative_tokens=draft_length(num_speculative_tokens),
        backend=backend, draft_backend=draft_backend, draft_dtype=draft_dtype, draft_vocab=draft_vocab,
        draft_width=draft_width,
        threads=threads, gpu_layers=gpu_layers, device=device, dtype=dtype, pack=pack,
        self_test=self_test, trust_remote_code=trust_remote_code, verification=verification,
        url=url, api_key=api_key,
    )  # fmt: skip
    reply = _Reply(engine, color=color_tokens, quiet=as_json)
    with reply.interruptible():
        reply.run(text if raw else _conversation(engine, text, system), sampling)
    if as_json:
        print(json.dumps(reply.as_dict(), ensure_ascii=False))
    if reply.is_colored and screen.is_terminal:
        screen.print(" ".join(f"[{color}]{kind}[/]" for kind, color in COLORS.items()))
    if stats:
        if reply.stats.num_drafts or reply.stats.num_steps:  # a server that drafted nothing has no drafter to name
            screen.print(engine.why, style="dim", markup=False, soft_wrap=True)
        screen.print(stats_text(reply.stats, reply.timings, engine.controller), soft_wrap=True)
    if reply.was_interrupted:
        raise typer.Exit(130)


@app.command()
def chat(
    config: Config = None,
    model: Model = None,
    draft: DraftModel = None,
    drafter: DrafterName = None,
    num_speculative_tokens: DraftLength = AUTO,
    temperature: Temperature = DEFAULTS.temperature,
    top_p: TopP = DEFAULTS.top_p,
    top_k: TopK = DEFAULTS.top_k,
    min_p: MinP = DEFAULTS.min_p,
    repetition_penalty: RepetitionPenalty = DEFAULTS.repetition_penalty,
    seed: Seed = DEFAULTS.seed,
    max_tokens: MaxTokens = 512,
    system: System = None,
    backend: Backend = AUTO,
    draft_backend: DraftBackend = AUTO,
    draft_dtype: DraftDtype = None,
    draft_vocab: DraftVocab = None,
    draft_width: DraftWidth = None,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    device: Device = None,
    dtype: Dtype = None,
    pack: Pack = True,
    trust_remote_code: TrustRemoteCode = False,
    url: Url = None,
    api_key: ApiKey = None,
    stats: Stats = False,
    color_tokens: ColorTokens = False,
    verbose: Verbose = False,
) -> None:
    """A conversation in the terminal. /clear starts anew, /exit or Ctrl-D ends, Ctrl-C cuts a reply short."""
    set_up_logging(verbose)
    sampling = SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, repetition_penalty=repetition_penalty,
        seed=seed, max_tokens=max_tokens,
    )  # fmt: skip
    engine = _load(
        model, draft=draft, drafter=drafter, num_speculative_tokens=draft_length(num_speculative_tokens),
        backend=backend, draft_backend=draft_backend, draft_dtype=draft_dtype, draft_vocab=draft_vocab,
        draft_width=draft_width,
        threads=threads, gpu_layers=gpu_layers, device=device, dtype=dtype, pack=pack,
        trust_remote_code=trust_remote_code,
        url=url, api_key=api_key,
    )  # fmt: skip
    if not engine.speaks_chat:
        raise OptionError("this model has no chat template, so it cannot chat; use flashspec generate --raw")
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    for line in _lines():
        if line == "/clear":
            messages = list(start)
            continue
        reply = _Reply(engine, color=color_tokens)
        try:
            with reply.interruptible():
                reply.run([*messages, {"role": "user", "content": line}], sampling)
        except FlashSpecError as error:  # the conversation has outgrown the context or the memory: say so, keep it
            screen.print(f"[red]{escape(str(error))}[/] (/clear starts anew)", soft_wrap=True)
            continue
        messages += [{"role": "user", "content": line}, {"role": "assistant", "content": reply.text}]
        if stats:
            screen.print(stats_text(reply.stats, reply.timings, engine.controller), soft_wrap=True)


# pieces


class _Reply:
    """One streamed answer: shown as it comes, kept when it is interrupted."""

    def __init__(self, engine: LocalEngine | VllmEngine, *, color: bool = False, quiet: bool = False) -> None:
        self.engine, self.color, self.quiet = engine, color, quiet
        self.paper = Console(highlight=False, soft_wrap=True)
        self.chunks: list[Chunk] = []
        self.stats, self.timings = SpecStats(), Timings(arrival=0.0)
        self.was_interrupted = False

    @property
    def is_colored(self) -> bool:
        return self.color and not self.quiet and self.paper.is_terminal and not self.paper.no_color

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def run(self, prompt: Prompt, sampling: SamplingParams) -> None:
        name = self.engine.add(prompt, sampling)
        self.stats, self.timings = self.engine.progress(name)
        with contextlib.closing(self.engine.chunks(name)) as chunks:
            with screen.status("reading the prompt"):  # while it turns, stdout is Rich's: print nothing here
                first = next(chunks)
            self._take(first)
            for chunk in chunks:
                self._take(chunk)

    def _take(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        if self.quiet:
            return
        if not self.is_colored:
            print(chunk.text, end="", flush=True)
            return
        for piece, kind in zip(chunk.pieces, chunk.kinds, strict=True):
            self.paper.print(Text(piece, style=COLORS[kind]), end="")

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.was_interrupted = True
        if not self.quiet:
            print(flush=True)

    def as_dict(self) -> dict[str, Any]:
        chunks = self.chunks
        logprobs = [dataclasses.asdict(entry) for chunk in chunks for entry in chunk.logprobs or ()]
        is_ours = not hasattr(self.engine, "url")  # a server does not tell a token's kind, and counts drafts only
        return {
            "text": self.text,
            "tokens": [token for chunk in chunks for token in chunk.tokens],
            "kinds": [kind for chunk in chunks for kind in chunk.kinds] if is_ours else None,
            "finish_reason": chunks[-1].finish_reason or "abort" if chunks else "abort",
            "logprobs": logprobs or None,
            "stats": stats_dict(self.stats) if is_ours or self.stats.num_drafts else None,
            "timings": timings_dict(self.timings),
        }


def stats_dict(stats: SpecStats) -> dict[str, Any]:
    """The counts and what follows from them."""
    derived = {"acceptance_rate": stats.acceptance_rate, "mean_acceptance_length": stats.mean_acceptance_length}
    return {**dataclasses.asdict(stats), **derived}


def timings_dict(timings: Timings) -> dict[str, float]:
    """Seconds and rates."""
    names = ("ttft", "tpot", "total", "tokens_per_second", "num_output_tokens", "draft", "verify", "sample")
    return {name: getattr(timings, name) for name in names}


def stats_text(stats: SpecStats, timings: Timings, controller: AnyController | None) -> str:
    """The lines that --stats ends with."""
    if not timings.num_output_tokens:
        return "[dim]nothing was generated[/]"
    lines = [_acceptance_text(stats), _speed_text(stats, timings)]
    if spent := timings.draft + timings.verify + timings.sample:
        shares = (f"{name} {getattr(timings, name) / spent:.1%}" for name in ("draft", "verify", "sample"))
        lines.append(f"time: {', '.join(shares)}")
    if stats.num_steps:
        lines.append(_lengths_text(stats))
    if controller is not None:
        lines.append(controller.explain())
    return f"[dim]{chr(10).join(lines)}[/]"


def _acceptance_text(stats: SpecStats) -> str:
    if not stats.num_drafts:  # rates of nothing would read as bad ones
        return "nothing was drafted" if stats.num_steps else "the server tells of no drafts: it may have no drafter"
    return (
        f"acceptance rate {stats.acceptance_rate:.1%} ({stats.num_accepted_tokens} of {stats.num_draft_tokens} "
        f"draft tokens in {stats.num_drafts} drafts), mean acceptance length {stats.mean_acceptance_length:.2f}"
    )


def _speed_text(stats: SpecStats, timings: Timings) -> str:
    """Without steps where a server does not tell them, without a time per token where there is no second one."""
    count = timings.num_output_tokens
    tokens = f"{count} token{'s' if count != 1 else ''}" + (f" in {stats.num_steps} steps" if stats.num_steps else "")
    speed = f"{tokens}, {timings.tokens_per_second:.1f} tokens/s, TTFT {timings.ttft:.2f} s"
    return speed + (f", TPOT {timings.tpot * 1000:.0f} ms" if timings.tpot else "")


def _lengths_text(stats: SpecStats) -> str:
    """How long the drafts were, and why there were none."""
    lengths = sorted(((int(length), count) for length, count in stats.draft_lengths.items()), key=lambda pair: -pair[1])
    shown = ", ".join(f"{length} in {count} steps" for length, count in lengths[:6])
    reasons = sorted(stats.no_draft.items(), key=lambda pair: -pair[1])
    why = "; ".join(f"{count} x {reason}" for reason, count in reasons)
    return f"draft length: {shown}" + (f"\nno draft: {why}" if why else "")


def _load(
    model: str | None,
    *,
    url: str | None,
    api_key: str | None,
    verification: Rule = DEFAULTS.verification,
    **options: Any,
) -> LocalEngine | VllmEngine:
    with progress() as say:
        if url is not None or options["backend"] == "vllm":
            from flashspec.cli.remote import remote_engine

            given = {**options, "verification": verification}  # here it goes with each request
            return remote_engine(model, url=url, api_key=api_key, say=say, options=given)
        from flashspec.loader import load

        engine = load(model, progress=say, max_batch=1, **options)
    if screen.is_terminal and options["drafter"] in (None, AUTO):
        screen.print(engine.why, style="dim", markup=False, soft_wrap=True)
    return engine


def _prompt(prompt: str | None, file: Path | None) -> str:
    if prompt not in (None, "-") and file is not None:
        raise OptionError("a prompt and --file were both given; give one of them")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptError(
                f"cannot read the prompt from {file}: {error}; give an existing UTF-8 text file"
            ) from error
    elif prompt in (None, "-"):
        if sys.stdin is None:
            raise PromptError("there is no prompt and stdin is closed; give a text or --file FILE")
        if sys.stdin.isatty():
            screen.print("the prompt, then Ctrl-D:", style="dim")
        text = sys.stdin.read()
    else:
        text = str(prompt)
    if not text.strip():
        raise PromptError("the prompt is empty; give a text, --file FILE, or text on stdin")
    return text


def _conversation(engine: LocalEngine | VllmEngine, text: str, system: str | None) -> Prompt:
    if not engine.speaks_chat:
        if system:
            raise OptionError("--system needs a chat template, and this model has none")
        return text
    return conversation(text, system=system)


def _lines() -> Iterator[str]:
    """What the user types, until /exit or the end of input."""
    if sys.stdin is None:
        return
    with contextlib.suppress(ImportError):  # line editing and history for input, where the system has it
        import readline  # noqa: F401

    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            print()
            return
        if line == "/exit":
            return
        if line:
            yield line
