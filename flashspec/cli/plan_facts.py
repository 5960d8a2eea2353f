"""What plan finds out about models: their sizes from configs, costs and acceptance by measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashspec.core import Prompt, SamplingParams
from flashspec.errors import OptionError
from flashspec.planner import gpus as load
from flashspec.planner.memory import MemoryPlan, ModelSize, Setup, model_size
from flashspec.planner.speed import LONGEST, Outlook, constant, observed
from flashspec.text import as_conversation

if TYPE_CHECKING:
    import torch

    from flashspec.costs import CostCurve
    from flashspec.pretrained import Loaded

CONTEXT = 2048  # tokens, where the model has so many
DRAFTED = 8  # the longest draft of a measurement, unless a longer one is asked for
GENERATED = 48  # tokens for each prompt of a measurement
BATCHES = (1, 2, 4, 8, 16)
LIMIT = 4  # prompts of each file
NGRAMS_ARE_FREE = "The drafter is n-grams, which cost next to nothing; give --draft for a draft model."
SAMPLES = (  # for want of the user's own: an edit that repeats its input, a sum, an open question
    "Rename the variable x to total and repeat the whole function:\n\ndef add(items):\n    x = 0\n"
    "    for item in items:\n        x = x + item\n    return x\n",
    "A ticket costs 12 euros, and children pay half. What do two adults and three children pay? Think step by step.",
    "Why do cities by the sea have milder winters than cities far from it?",
)
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the command was asked."""

    acceptance: float | None
    cost_ratio: float | None
    k: int | None
    batch: int
    context: int | None
    max_tokens: int
    model: str | None
    draft: str | None
    temperature: float
    device: str | None
    dtype: str | None
    pack: bool
    memory: float | None  # GiB
    measure: bool | None
    prompts: list[Path]
    trust_remote_code: bool
    gpus: str | None = None  # that are not here

    @property
    def drafter(self) -> str:
        has_model = self.draft is not None if self.model is not None else (self.cost_ratio or 0) > 0
        return "model" if has_model else "ngram"


class Place:
    """Where the models would run, and what is free there."""

    def __init__(self, question: Question) -> None:
        import torch

        from flashspec import pretrained

        self.question = question
        name = question.device or ("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(name)
        except RuntimeError as error:
            raise OptionError(f"device is {name!r}; it must be cpu, cuda or cuda:N") from error
        if device.type not in ("cpu", "cuda"):
            raise OptionError(f"device is {name!r}; it must be cpu, cuda or cuda:N")
        self.device = device
        self.is_here = device.type == "cpu" or (device.index or 0) < torch.cuda.device_count()
        self.dtype = pretrained.dtype_of(question.dtype, device)
        self.can_halve = device.type != "cpu" or pretrained.cpu_has_bfloat16()
        self.available = self._available()

    def _available(self) -> int:
        import torch

        from flashspec.pretrained import free_memory

        if self.question.memory is not None:
            return int(self.question.memory * 2**30)
        if self.device.type != "cpu" and not self.is_here:
            raise OptionError(
                f"device is {str(self.device)!r}, and this machine has {torch.cuda.device_count()} CUDA devices, so "
                "what is free there is not known; give --memory GiB, or --device cpu"
            )
        return free_memory(self.device)

    def setup(self, say: Say) -> tuple[Setup, list[str]]:
        """Both models by their configs, and what had to be assumed of them."""
        question, assumed = self.question, list[str]()
        assert question.model is not None
        target = self._size(question.model, say, assumed)
        draft = self._size(question.draft, say, assumed, is_draft=True) if question.draft is not None else None
        if question.context is not None and question.context > target.max_length:
            raise OptionError(
                f"context is {question.context}, and {question.model} has {target.max_length} positions; give at most "
                "so many"
            )
        setup = Setup(
            target=target,
            draft=draft,
            batch=question.batch,
            context=question.context or min(CONTEXT, target.max_length),
            max_tokens=question.max_tokens,
            num_speculative_tokens=DRAFTED if question.k is None else question.k,
            device=self.device.type,
        )
        assumed.append(
            f"{setup.batch} x {setup.prompt} tokens of prompt and {setup.context - setup.prompt} of output, "
            f"drafts of up to {setup.num_speculative_tokens}."
        )
        return setup, assumed

    def _size(self, model: str, say: Say, assumed: list[str], *, is_draft: bool = False) -> ModelSize:
        from flashspec import pretrained
        from flashspec.backends import half
        from flashspec.heads.kind import kind_of
        from flashspec.weights import cache_folder, gguf_file

        if is_draft and kind_of(model) is not None:
            raise OptionError(
                f"{model} holds heads, and plan knows draft models and n-grams only; leave out --draft, or measure the "
                f"heads with flashspec bench --draft {model} --drafters auto"
            )
        with pretrained.readable_errors(model):
            config = _config(model, say, trust_remote_code=self.question.trust_remote_code)
            stored = _stored_dtype(model, config, assumed)
            dtype = stored if isinstance(self.dtype, str) else self.dtype
            packs = self.device.type == "cpu" and dtype.itemsize == 4 and self.question.pack
            runtime = pretrained.backend_of(model, "auto", is_draft=is_draft, device=self.device)
            is_int8 = (
                is_draft
                and runtime == "torch"
                and pretrained.rounds_to_int8(self.question.dtype, self.device, pack=self.question.pack)
            )
            halves = packs and str(stored) == "torch.bfloat16" and not is_int8
            if is_int8:
                assumed.append(f"{model} is a draft model: on a CPU its linear layers are rounded to int8 once loaded.")
            if halves and half.compiled(cache_folder() / "kernels") is None:
                halves = False
            if halves:
                assumed.append(
                    f"{model} is bfloat16 by its config: on a CPU its linear layers stay so once loaded, at 2 bytes a "
                    "weight, and are computed with in float32."
                )
            if self.question.gpus is not None:
                assumed += _overcounted(model, config)
            if getattr(config, "quantization_config", None):
                assumed.append(f"{model} is quantized; its weights are counted as if they were {dtype}.")
            size = model_size(
                config, dtype=dtype, packs=packs, halves=halves, is_draft=is_draft, is_int8=is_int8,
                trust_remote_code=self.question.trust_remote_code,
            )  # fmt: skip
            if runtime == "torch":
                return size
            assumed.append(f"{model} is run by llama.cpp as it is in the file, with keys and values in float16.")
            stored_bytes = gguf_file(model).stat().st_size
            return dataclasses.replace(size, weights=stored_bytes, loading=stored_bytes, scratch=0, itemsize=2)

    def obstacle(self, memory: MemoryPlan) -> str | None:
        """Why nothing can be measured or, unless it was asked for, should be."""
        question = self.question
        models = [model for model in (question.model, question.draft) if model is not None]
        for model in models:
            if Path(model).is_dir() and not _has_weights(model):
                return f"{model} has no weights"
        if not self.is_here:
            return f"there is no {self.device} here"
        if question.measure:
            return None
        for model in models:
            if not _has_weights(model):
                return f"{model} is not a folder or file here, and --measure would download it"
        if question.acceptance is not None and question.cost_ratio is not None:
            return "the acceptance and the cost ratio were given"
        return None if memory.fits else "it would not fit"


def _config(model: str, say: Say, *, trust_remote_code: bool) -> Any:
    from flashspec.weights import check_hub, source_of

    check_hub(model, say=say)
    from transformers import AutoConfig

    path = Path(model).expanduser()
    if path.suffix == ".gguf" and path.is_file():  # its header is enough
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    return AutoConfig.from_pretrained(source_of(model, say), trust_remote_code=trust_remote_code)


def _stored_dtype(model: str, config: Any, assumed: list[str]) -> torch.dtype:
    """The checkpoint's, by its config; a GGUF file's numbers are exact in float32 only."""
    import torch

    if Path(model).suffix == ".gguf":
        return torch.float32
    named = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    stored = getattr(torch, named, None) if isinstance(named, str) else named
    if isinstance(stored, torch.dtype):
        return stored
    assumed.append(f"The config of {model} does not say which dtype its weights have: float32.")
    return torch.float32


def _has_weights(model: str) -> bool:
    path = Path(model).expanduser()
    return path.is_file() or any(next(path.glob(f"*.{kind}"), None) for kind in ("safetensors", "bin"))


# GPUs that are not here


@dataclass(frozen=True, slots=True)
class OnGpus:
    """What the formula says of them."""

    outlook: Outlook
    memory: MemoryPlan  # of each GPU
    load: load.Load
    assumed: list[str]


def on_gpus(question: Question, say: Say) -> OnGpus:
    """By formula, from configs and data sheets.

    Raises:
        OptionError: an unknown GPU, or a number of them that a model cannot be divided by.
    """
    assert question.gpus is not None
    assert question.model is not None
    gpus = load.parse_gpus(question.gpus)
    there = dataclasses.replace(
        question, device="cuda", dtype=question.dtype or "bfloat16",
        memory=question.memory or load.MEMORY_SHARE * gpus.gpu.memory,
    )  # fmt: skip
    place = Place(there)
    setup, assumed = place.setup(say)
    for size, name in ((setup.target, question.model), (setup.draft, question.draft)):
        if size is not None and name is not None:
            load.check_sharing(size, gpus, name)
    target = load.roofline(setup.target, gpus, context=setup.context)
    draft = _drafting(question, setup, target, gpus, assumed)
    longest = max(load.LONGEST, question.k or 0)
    outlook = constant(question.acceptance or 0.0, target, draft=draft, longest=longest)
    found = load.load_of(setup, gpus, outlook, available=place.available, is_open=question.acceptance is None)
    memory = load.gpu_memory(setup, gpus, available=place.available)
    return OnGpus(outlook, memory, found, [*load.assumptions(gpus), *assumed])


def _drafting(
    question: Question, setup: Setup, target: CostCurve, gpus: load.Gpus, assumed: list[str]
) -> CostCurve | None:
    """The cost of a draft step; None: nothing."""
    if question.cost_ratio is not None:
        return _scaled(target, question.cost_ratio)
    if setup.draft is not None:
        return load.roofline(setup.draft, gpus, context=setup.context)
    assumed.append(NGRAMS_ARE_FREE)
    return None


def _overcounted(model: str, config: Any) -> list[str]:
    """What is not known of a model's costs."""
    text, found = config.get_text_config(decoder=True), list[str]()
    if any(getattr(text, name, None) for name in ("num_local_experts", "num_experts", "n_routed_experts")):
        found.append(
            f"{model} is a mixture of experts and is counted as if each token needed all of them: plain steps with few "
            "sequences and large batches are cheaper than these numbers."
        )
    if getattr(text, "kv_lora_rank", None):
        found.append(f"{model} has latent attention; its keys and values are counted expanded, more than vLLM keeps.")
    return found


# measuring


@dataclass(frozen=True, slots=True)
class Findings:
    """What was measured."""

    outlook: Outlook
    by_batch: dict[int, tuple[int, float]]
    acceptance: dict[str, Any] | None  # None: it was given
    assumed: list[str]


def measured(question: Question, say: Say) -> Findings:
    """Load the models, time their forwards and, unless the acceptance is given, draft for some prompts."""
    from flashspec.loader import cost_curve
    from flashspec.pretrained import load_model

    texts = _texts(question)
    make = partial(
        load_model, device=question.device, dtype=question.dtype, pack=question.pack,
        trust_remote_code=question.trust_remote_code, progress=say,
    )  # fmt: skip
    target = make(question.model)
    small = make(question.draft, is_draft=True) if question.draft is not None else None
    batches = sorted({*BATCHES, question.batch})
    rows = batches[-1]
    cost = cost_curve(target, max_rows=rows, progress=say)
    if question.cost_ratio is not None:
        draft_cost = _scaled(cost, question.cost_ratio)
    else:
        draft_cost = cost_curve(small, max_rows=rows, is_draft=True, progress=say) if small is not None else None
    if question.acceptance is not None:
        longest = max(LONGEST, question.k or 0)
        outlook = constant(question.acceptance, cost, draft=draft_cost, longest=longest)
        return Findings(outlook, outlook.by_batch(batches), None, [])
    say(f"drafting for {len(texts)} prompts")
    outlook, seen = _drafted(question, target, small, texts)
    where = "the prompts given" if question.prompts else f"{len(texts)} short built-in prompts; --prompts takes yours"
    assumed = f"The acceptance at temperature {question.temperature:g} on {where}."
    outlook = dataclasses.replace(outlook, target=cost, draft=draft_cost)
    return Findings(outlook, outlook.by_batch(batches), seen, [assumed])


def _scaled(curve: CostCurve, ratio: float) -> CostCurve | None:
    """The cost of a draft step as a share of a plain step's, by number of rows."""
    if ratio == 0:
        return None
    return dataclasses.replace(
        curve,
        widths=((1, ratio * curve(1)),),
        rows=tuple((count, ratio * seconds) for count, seconds in curve.rows),
    )


def _texts(question: Question) -> list[Prompt]:
    from flashspec.bench.prompts import prompt_of, read_prompts

    if not question.prompts:
        return list(SAMPLES)
    rows = [row for file in question.prompts for row in read_prompts(file, LIMIT)]
    return [prompt_of(row) for row in rows]


def _drafted(
    question: Question, target: Loaded, small: Loaded | None, texts: list[Prompt]
) -> tuple[Outlook, dict[str, Any]]:
    """Run drafts of a fixed length, one prompt after the other. Curves of the outlook are for the caller to set."""
    from flashspec.engine import LocalEngine
    from flashspec.loader import DRAFTERS, draft_model
    from flashspec.planner.speed import FLAT

    longest = max(DRAFTED, question.k or 0)
    drafter = DRAFTERS["ngram"].make(target, None) if small is None else draft_model(target, small)
    engine = LocalEngine(target.target, drafter, tokenizer=target.tokenizer, num_speculative_tokens=longest)
    params = SamplingParams(temperature=question.temperature, max_tokens=GENERATED)
    model_before = getattr(drafter, "forward_seconds", 0.0)
    drafting = sampling = 0.0
    for text in texts:
        prompt = as_conversation(target.tokenizer, text) if isinstance(text, str) else text
        result = engine.generate(prompt, params)
        drafting, sampling = drafting + result.timings.draft, sampling + result.timings.sample
    stats = engine.stats()
    survival, reach = observed(stats, longest)
    drafting -= getattr(drafter, "forward_seconds", 0.0) - model_before
    outlook = Outlook(
        survival=survival,
        reach=reach,
        target=FLAT,
        draft_extra=max(drafting, 0.0) / max(stats.num_draft_tokens, 1),
        sampling=sampling / (stats.num_steps + stats.num_draft_tokens),
    )
    return outlook, {
        "acceptance_rate": stats.acceptance_rate,
        "mean_acceptance_length": stats.mean_acceptance_length,
        "acceptance_by_position": stats.acceptance_by_position,
        "num_drafts": stats.num_drafts,
        "num_steps": stats.num_steps,
    }
