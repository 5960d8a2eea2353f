"""Ways to generate that a benchmark compares: this engine with a drafter and a draft length, and Transformers'."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from flashspec.controller import AUTO
from flashspec.core import SamplingParams, SpecStats
from flashspec.costs import CostCurve
from flashspec.engine import LocalEngine
from flashspec.loader import DRAFTERS, choose_drafter, fits, shaped
from flashspec.pretrained import Loaded
from flashspec.streams import Result
from flashspec.trained import Heads
from flashspec.vllm.engine import VllmEngine

PLAIN = "none"
HF_PLAIN = "hf_generate"
Curves = Mapping[str | None, CostCurve]  # of the target (None) and of each draft model by name


@dataclass(frozen=True, slots=True)
class Run:
    """Some prompts, at once, through one method."""

    tokens: list[list[int]]  # of each prompt
    ttft: float  # seconds, median over the prompts
    tpot: float
    total: float  # seconds until the last one ended
    stats: SpecStats = field(default_factory=SpecStats)
    split: dict[str, float] | None = None  # seconds in draft, verify, sample, and outside the models' forwards
    peak_memory: int | None = None  # bytes, of the process or the GPU

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    @property
    def tokens_per_second(self) -> float:
        """Of all prompts together, prefill included."""
        return self.num_tokens / self.total

    @classmethod
    def from_dict(cls, held: dict[str, Any]) -> Run:
        return cls(**{**held, "stats": SpecStats(**held["stats"])})

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True, slots=True)
class Method:
    """``run`` takes the prompts' token ids and one set of sampling parameters."""

    drafter: str
    num_speculative_tokens: int | str | None  # None: up to the method
    run: Callable[[list[list[int]], SamplingParams], Run]
    draft: str | None = None  # the draft model's name
    max_batch: int = 1 << 20

    @property
    def label(self) -> str:
        length = "" if self.num_speculative_tokens in (None, 0) else f" k={self.num_speculative_tokens}"
        return f"{self.drafter}{f' {self.draft}' if self.draft else ''}{length}"


def pairs_of(drafters: Seq[str], drafts: Seq[str]) -> list[tuple[str, str | None]]:
    """Drafters by name, plain decoding first, each with each of the drafts that it reads; ``auto`` is one of them.

    Raises:
        OptionError: an unknown drafter, or one that reads none of the drafts.
    """
    found: list[tuple[str, str | None]] = [(PLAIN, None)]
    for name in drafters:
        if name == AUTO:
            found += [(choose_drafter(AUTO, draft=draft)[1], draft) for draft in drafts] or [("suffix", None)]
            continue
        able = [draft for draft in drafts if name in DRAFTERS and fits(DRAFTERS[name], draft)]
        kind, _ = choose_drafter(name, draft=next(iter([*able, *drafts]), None))
        assert kind is not None
        found += [(name, draft) for draft in able] if kind.needs_draft else [(name, None)]
    return list(dict.fromkeys(found))


def engine_methods(
    pairs: Seq[tuple[str, str | None]],
    lengths: Seq[int | str],
    loaded: Loaded,
    drafts: Mapping[str, Loaded | Heads],
    curves: Curves,
    *,
    max_batch: int,
    widths: Seq[int | None] = (None,),
) -> list[Method]:
    """Each drafter with its draft, each draft length and, where it drafts trees, each width of these.

    Args:
        curves: costs of the target and of each draft, for ``auto``.
    """
    methods = []
    for name, path in pairs:
        kind = DRAFTERS[name]
        wide = widths if kind.drafts_trees else [None]
        for length, width in itertools.product(lengths if name != PLAIN else [0], wide):
            if name != PLAIN and length == 0:
                continue
            drafter = shaped(kind.make(loaded, drafts[path] if path is not None else None), width)
            own = drafts[path].name if path is not None else None
            limit = int(length) if length != AUTO else kind.controller(curves[None], curves[own] if own else None)
            engine = LocalEngine(
                loaded.target, drafter, tokenizer=loaded.tokenizer, num_speculative_tokens=limit, max_batch=max_batch
            )
            label = name if width is None else f"{name} w={width}"
            methods.append(Method(label, length, _engine_run(engine), own))
    return methods


def _engine_run(engine: LocalEngine) -> Callable[[list[list[int]], SamplingParams], Run]:
    models: list[Any] = [engine.target]
    models += [engine.drafter] if hasattr(engine.drafter, "forward_seconds") else []

    def run(prompts: list[list[int]], sampling: SamplingParams) -> Run:
        _forget_peak()
        inside = sum(model.forward_seconds for model in models)
        started = time.perf_counter()
        results = engine.generate(prompts, sampling)
        total = time.perf_counter() - started
        inside = sum(model.forward_seconds for model in models) - inside
        return _engine_result(results, total, total - inside)

    return run


def remote_run(engine: VllmEngine) -> Callable[[list[list[int]], SamplingParams], Run]:
    """The same through a server, whose memory and inner times are not known here."""

    def run(prompts: list[list[int]], sampling: SamplingParams) -> Run:
        started = time.perf_counter()
        results = engine.generate(prompts, dataclasses.replace(sampling, verification="auto"))
        total = time.perf_counter() - started
        return dataclasses.replace(_engine_result(results, total, 0.0), split=None, peak_memory=None)

    return run


def _engine_result(results: list[Result], total: float, outside: float) -> Run:
    stats = SpecStats()
    for result in results:
        stats.merge(result.stats)
    longest = max(results, key=lambda result: result.timings.draft + result.timings.verify + result.timings.sample)
    split = {name: getattr(longest.timings, name) for name in ("draft", "verify", "sample")}
    return Run(
        tokens=[result.tokens for result in results],
        ttft=statistics.median(result.timings.ttft for result in results),
        tpot=statistics.median(result.timings.tpot for result in results),
        total=total,
        stats=stats,
        split={**split, "outside_forwards": outside},
        peak_memory=_peak(),
    )


def _forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def _peak() -> int:
    """Bytes: the GPU's since ``_forget_peak``, or what the process holds now (its peak cannot be reset)."""
    if torch.cuda.is_available() and torch.cuda.max_memory_allocated():
        return int(torch.cuda.max_memory_allocated())
    return int(psutil.Process().memory_info().rss)


# llama.cpp's own


def llamacpp_methods(path: Path, *, threads: int | None, gpu_layers: int) -> list[Method]:
    """llama-cpp-python's generate, and with its own prompt lookup, as its documentation sets that up."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = LlamaPromptLookupDecoding(max_ngram_size=2, num_pred_tokens=10)
    run = partial(_LlamaRun, path, threads=threads, gpu_layers=gpu_layers)
    return [
        Method("llamacpp_generate", None, run(), max_batch=1),
        Method("llamacpp_prompt_lookup", 10, run(draft_model=lookup), max_batch=1),
    ]


class _LlamaRun:
    """One llama_cpp.Llama, as large as the longest request so far: with a draft model it keeps all logits."""

    def __init__(self, path: Path, *, threads: int | None, gpu_layers: int, draft_model: Any = None) -> None:
        threads = threads or torch.get_num_threads()
        self.options = {
            "model_path": str(path), "n_threads": threads, "n_threads_batch": threads, "verbose": False,
            "n_gpu_layers": gpu_layers, "draft_model": draft_model,
        }  # fmt: skip
        self.model: Any = None

    def __call__(self, prompts: list[list[int]], sampling: SamplingParams) -> Run:
        prompt = prompts[0]
        self._make_room(len(prompt) + sampling.max_tokens + 16)
        self.model.reset()  # or it reuses the keys and values of the run before
        chosen = {"temp": sampling.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        times, tokens = [time.perf_counter()], list[int]()
        for token in self.model.generate(prompt, reset=True, **chosen):
            times.append(time.perf_counter())
            tokens.append(token)
            ended = self.model.token_eos() == token and not sampling.ignore_eos
            if ended or len(tokens) == sampling.max_tokens:
                break
        tpot = (times[-1] - times[1]) / max(len(tokens) - 1, 1)
        return Run([tokens], times[1] - times[0], tpot, times[-1] - times[0], peak_memory=_peak())

    def _make_room(self, needed: int) -> None:
        import llama_cpp

        if self.model is None or self.model.n_ctx() < needed:
            self.model = llama_cpp.Llama(n_ctx=-(-needed // 512) * 512, **self.options)


# Transformers' own


def hf_methods(plain: Any, draft: Any | None) -> list[Method]:
    """Transformers' generate, assisted generation and prompt lookup, with their own defaults for drafting.

    A model's generation config would fill in what ours leaves open, penalties for one: it is set aside.
    """
    from transformers import GenerationConfig
    from transformers.utils import logging as transformers_logging

    from flashspec.backends.hf import eos_tokens

    transformers_logging.set_verbosity_error()  # generate warns of its own assistant's options
    for model in (plain, draft):
        if model is not None:
            eos = sorted(eos_tokens(model)) or None
            model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=eos[0] if eos else 0)
    methods = [
        Method(HF_PLAIN, None, _hf_run(plain), max_batch=1),
        Method("hf_prompt_lookup", 10, _hf_run(plain, prompt_lookup_num_tokens=10), max_batch=1),
    ]
    if draft is not None:
        methods.append(Method("hf_assisted", None, _hf_run(plain, assistant=draft), max_batch=1))
    return methods


class _FirstToken:
    """A Transformers streamer that notes when the first new tokens came, and how many they were."""

    def __init__(self) -> None:
        self.calls = 0
        self.first = 0.0
        self.num_first = 0

    def put(self, value: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 2:  # the first call is the prompt
            self.first = time.perf_counter()
            self.num_first = value.numel()

    def end(self) -> None:
        return None


def _hf_run(
    model: Any, *, assistant: Any | None = None, prompt_lookup_num_tokens: int | None = None
) -> Callable[[list[list[int]], SamplingParams], Run]:
    from transformers import GenerationConfig

    def run(prompts: list[list[int]], sampling: SamplingParams) -> Run:
        _forget_peak()
        prompt = prompts[0]
        config = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=not sampling.is_greedy,
            temperature=sampling.temperature if not sampling.is_greedy else None,
            top_k=0 if not sampling.is_greedy else None,
            prompt_lookup_num_tokens=prompt_lookup_num_tokens,
            eos_token_id=None if sampling.ignore_eos else model.generation_config.eos_token_id,
            pad_token_id=model.generation_config.pad_token_id,
        )
        streamer = _FirstToken()
        ids = torch.tensor([prompt], device=model.device)
        torch.manual_seed(sampling.seed or 0)
        started = time.perf_counter()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            streamer=streamer,
            assistant_model=assistant,
        )
        ended = time.perf_counter()
        tokens = output[0, len(prompt) :].tolist()
        later = len(tokens) - streamer.num_first  # an assisted first step brings several at once
        tpot = (ended - streamer.first) / later if later else 0.0
        return Run([tokens], streamer.first - started, tpot, ended - started, peak_memory=_peak())

    return run
