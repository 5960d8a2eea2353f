"""Should speculation be on at some load, on GPUs that are not here: costs and memory by formula from data sheets.

A forward over n tokens is as slow as the slower of two things, reading the weights and multiplying by them, and has to
read the keys and values of its sequences besides (the roofline model: Williams, Waterman, Patterson 2009,
doi 10.1145/1498765.1498785). Nothing here is measured.
"""

from __future__ import annotations

import difflib
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flashspec.costs import CostCurve
from flashspec.errors import OptionError
from flashspec.planner import WORTH, Plan, gib, verdict
from flashspec.planner.memory import MemoryPlan, ModelSize, Setup
from flashspec.planner.speed import Outlook

Range = tuple[int, int, int]  # from so many sequences at once, to so many, draft tokens

# Assumed, for there is no data sheet of them. calculon's model of an A100 (github.com/calculon-ai/calculon,
# systems/a100_80g.json) has 75 to 90 % of the bandwidth for reads of 10 MB and more, and from 60 % of the FLOP/s for
# narrow matrices to 95 % for wide ones.
BANDWIDTH_SHARE = 0.8
FLOPS_SHARE = 0.6
OVERHEAD = 0.5e-3  # seconds of each forward, whatever its size: some hundred kernels that follow one another
MEMORY_SHARE = 0.9  # of a GPU; the rest is for CUDA, its graphs and fragments. vLLM takes 0.90 to 0.92 by default

MOST = 1024  # sequences at once; vLLM's own limit by default
LONGEST = 8  # draft tokens that are considered
NODE = 8  # GPUs that one machine usually has


@dataclass(frozen=True, slots=True)
class Gpu:
    """A data sheet's numbers."""

    name: str
    memory: int  # GiB; data sheets say GB and mean about that (drivers report up to 6 % less where there is ECC)
    bandwidth: float  # TB/s
    tflops: float  # dense (half of what is given "with sparsity"), bfloat16, sums in float32

    @property
    def chunk(self) -> int:
        """Tokens of prompts that vLLM reads at once by default (its engine/arg_utils.py, get_batch_defaults)."""
        if self.memory >= 160:
            return 16384
        return 8192 if self.memory >= 70 and not self.name.startswith("A100") else 2048


GPUS = {
    gpu.name: gpu
    for gpu in (
        # nvidia.com: a10-datasheet.pdf
        Gpu("A10", 24, 0.600, 125),
        # nvidia.com: nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf; the 80 GB one on PCIe has 1.935 TB/s
        Gpu("A100-40", 40, 1.555, 312),
        Gpu("A100-80", 80, 2.039, 312),
        # nvidia.com: L4 and L40S data sheets, 242 and 733 TFLOP/s with sparsity
        Gpu("L4", 24, 0.300, 121),
        Gpu("L40S", 48, 0.864, 362),
        # nvidia.com/en-us/data-center/h100, 1979 and 1513 TFLOP/s with sparsity; product brief PB-11133 for PCIe
        Gpu("H100-SXM", 80, 3.35, 989),
        Gpu("H100-PCIe", 80, 2.0, 756),
        # nvidia.com/en-us/data-center/h200
        Gpu("H200", 141, 4.8, 989),
        # HGX and DGX B200, an eighth of each: 1440 GB, 64 TB/s, 36 PFLOP/s with sparsity
        Gpu("B200", 180, 8.0, 2250),
        # NVIDIA Ampere GA102 whitepaper V2, appendix A; Ada GPU architecture whitepaper, appendix A
        Gpu("RTX3090", 24, 0.936, 71),
        Gpu("RTX4090", 24, 1.008, 165),
        # amd.com: Instinct MI300X data sheet
        Gpu("MI300X", 192, 5.3, 1307),
    )
}
OTHERWISE = {  # other names in use; the larger or more common of two where a name is short
    "a100": "A100-80", "a10040gb": "A100-40", "a100sxm440gb": "A100-40", "a100pcie40gb": "A100-40",
    "a10080gb": "A100-80", "a100sxm480gb": "A100-80", "h100": "H100-SXM", "h10080gb": "H100-SXM",
    "h100sxm5": "H100-SXM", "h10080gbhbm3": "H100-SXM", "h200sxm": "H200", "b200sxm": "B200", "3090": "RTX3090",
    "4090": "RTX4090",
}  # fmt: skip
MAKERS = r"^(nvidia|amd|geforce|instinct|tesla)+"


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of a kind that share one model: tensor parallelism."""

    gpu: Gpu
    count: int

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu.name}"


def parse_gpus(text: str) -> Gpus:
    """``2xH100``, ``H100``.

    Raises:
        OptionError: an unknown name, or no number from 1 to 1024.
    """
    found = re.fullmatch(r"(?:(-?\d{1,9})\s*[x*×]\s*)?(\S.*?)", text.strip(), re.IGNORECASE | re.ASCII)
    count, name = (int(found[1] or 1), found[2]) if found else (1, "")
    plain = re.sub(MAKERS, "", _letters(name))
    by_letters = {_letters(known): known for known in GPUS} | OTHERWISE
    if plain not in by_letters:
        near = difflib.get_close_matches(plain, by_letters, n=1, cutoff=0.7)
        meant = f" (do you mean {by_letters[near[0]]}?)" if near else ""
        raise OptionError(
            f"gpus is {text!r}{meant}; give a number and a name, such as 2xH100-SXM; names are {', '.join(GPUS)}"
        )
    if not 1 <= count <= 1024:
        raise OptionError(f"gpus is {text!r}; the number of GPUs must be from 1 to 1024, as in 2x{by_letters[plain]}")
    return Gpus(GPUS[by_letters[plain]], count)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def can_share(size: ModelSize, count: int) -> bool:
    """Attention heads can be given to so many GPUs in equal numbers; a key-value head may be on several of them."""
    return size.heads % count == 0 and (size.kv_heads % count == 0 or count % size.kv_heads == 0)


def check_sharing(size: ModelSize, gpus: Gpus, name: str) -> None:
    """Raise OptionError for a number of GPUs that a model cannot be divided by. vLLM divides draft models likewise."""
    if can_share(size, gpus.count):
        return
    able = [str(count) for count in range(1, size.heads + 1) if can_share(size, count)]
    raise OptionError(
        f"gpus is {gpus}, and {name} has {size.heads} attention heads ({size.kv_heads} of keys and values), which "
        f"{gpus.count} GPUs cannot share evenly; use {', '.join(able)}"
    )


# cost


def roofline(size: ModelSize, gpus: Gpus, *, context: int) -> CostCurve:
    """Seconds of a forward over rows of ``context`` tokens each, exact at whole numbers of tokens.

    max(weights / bandwidth, 2 x parameters x tokens / FLOP/s) + rows x keys and values / bandwidth + OVERHEAD, with the
    shares of bandwidth and FLOP/s above, each GPU doing its part.
    """
    gpu, count = gpus.gpu, gpus.count
    bandwidth = BANDWIDTH_SHARE * gpu.bandwidth * 1e12
    weights = size.weights / count / bandwidth
    token = 2 * size.numbers / count / (FLOPS_SHARE * gpu.tflops * 1e12)
    row = _cache(size, count, context) / bandwidth
    knee = int(weights / token)  # up to so many tokens the weights take longer
    at = sorted({1, *(n for n in (knee, knee + 1, knee + 2) if n > 0)})
    forward = [(n, max(weights, token * n) + OVERHEAD) for n in at]
    return CostCurve(
        tuple((n, seconds + row) for n, seconds in forward), tuple((n, seconds + n * row) for n, seconds in forward)
    )


def _cache(size: ModelSize, count: int, context: int) -> float:
    """Bytes of one sequence's keys and values on each GPU."""
    return min(context, size.max_length) * size.cache_numbers * size.itemsize / min(count, size.kv_heads)


# memory


def gpu_memory(setup: Setup, gpus: Gpus, *, available: int) -> MemoryPlan:
    """Of each GPU, all sequences at their longest, keys and values in pages as vLLM has them."""
    target, draft, count = setup.target, setup.draft, gpus.count
    tokens = setup.batch * (setup.num_speculative_tokens + 1)
    logits = 4 * tokens * target.vocab_size * (2 if draft is None else 3)  # and probabilities, of both models
    return MemoryPlan(
        weights=target.weights // count,
        draft_weights=draft.weights // count if draft is not None else 0,
        kv_cache=int(setup.batch * _cache(target, count, setup.context)),
        draft_kv_cache=int(setup.batch * _cache(draft, count, setup.context)) if draft is not None else 0,
        workspace=gpus.gpu.chunk * target.token_numbers * target.itemsize + logits,
        loading=0,  # nothing is stored otherwise than it is loaded
        available=available,
    )


def sequences_that_fit(setup: Setup, gpus: Gpus, *, available: int) -> int:
    """How many at once, at most MOST."""

    def is_too_much(rows: int) -> bool:
        return not gpu_memory(replace(setup, batch=rows), gpus, available=available).fits

    return bisect_left(range(1, MOST + 1), True, key=is_too_much)


def gpus_that_fit(setup: Setup, gpus: Gpus, *, available: int) -> int | None:
    """The smallest number of these GPUs that hold all sequences; None if there is none."""
    models = [setup.target] if setup.draft is None else [setup.target, setup.draft]
    for count in range(1, min(model.heads for model in models) + 1):
        if not all(can_share(model, count) for model in models):
            continue
        if gpu_memory(setup, Gpus(gpus.gpu, count), available=available).fits:
            return count
    return None


# what to do at which load


def draft_lengths(outlook: Outlook, most: int) -> Iterator[int]:
    """The best k for 1, 2, ... sequences at once; 0 where the gain would not be noticed."""
    for rows in range(1, most + 1):
        k = outlook.best_k(rows=rows)
        yield k if outlook.step(k, rows=rows).speedup >= WORTH else 0


def schedule(lengths: list[int]) -> list[Range]:
    """Equal neighbours joined: how many draft tokens for how many sequences, as vLLM wants to have it."""
    ranges: list[Range] = []
    for rows, k in enumerate(lengths, start=1):
        if ranges and ranges[-1][2] == k:
            ranges[-1] = (ranges[-1][0], rows, k)
        else:
            ranges.append((rows, rows, k))
    return ranges


def crossover(lengths: list[int]) -> int | None:
    """The number of sequences at once from which on drafting no longer pays; None if it still does at the last."""
    pays = [rows for rows, k in enumerate(lengths, start=1) if k]
    first = max(pays, default=0) + 1
    return first if first <= len(lengths) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the formula says of a load. Without an acceptance there is no schedule and no crossover."""

    gpus: Gpus
    context: int
    plain_step: float  # seconds, of all sequences
    fitting: int  # sequences that fit at once
    needed: int | None  # GPUs on which all of them fit
    schedule: list[Range] | None = None
    crossover: int | None = None


def load_of(setup: Setup, gpus: Gpus, outlook: Outlook, *, available: int, is_open: bool) -> Load:
    """All of it, for as many sequences as the setup has, and drafts no longer than it has.

    Args:
        is_open: the acceptance is not known.
    """
    k = setup.num_speculative_tokens
    short = replace(outlook, survival=outlook.survival[:k], reach=outlook.reach[:k])
    lengths = [] if is_open else list(draft_lengths(short, MOST))
    return Load(
        gpus=gpus,
        context=setup.context,
        plain_step=outlook.target(1, setup.batch),
        fitting=sequences_that_fit(setup, gpus, available=available),
        needed=gpus_that_fit(setup, gpus, available=available),
        schedule=None if is_open else schedule(lengths[: setup.batch]),
        crossover=None if is_open else crossover(lengths),
    )


# sentences


def load_verdict(plan: Plan, load: Load) -> str:
    """The answer, and that it is not from a measurement."""
    memory, formula = plan.memory, "By formula, nothing measured. "
    if memory is None or memory.fits:
        return formula + verdict(plan, [], where=" on each GPU")
    needs = f"No: it needs {gib(memory.needed)} on each GPU and {gib(memory.available or 0)} are free"
    more = f"; all of them fit on {load.needed}x{load.gpus.gpu.name}" if load.needed is not None else ""
    return f"{formula}{needs}. {load.fitting} sequences of {load.context} tokens fit{more}."


def load_reasons(load: Load) -> list[str]:
    """What a change of the load would do."""
    most = "at least" if load.fitting == MOST else "at most"
    why = [f"By formula {most} {load.fitting} sequences of {load.context} tokens fit at once."]
    if load.schedule is None:
        return why
    if load.crossover is None:
        why.append(f"By formula drafting pays for any number of sequences at once up to {MOST}.")
    elif load.crossover == 1:
        why.append(f"By formula drafting pays for no number of sequences at once from 1 to {MOST}.")
    else:
        why.append(f"By formula drafting no longer pays from {load.crossover} sequences at once on.")
    ranges = [list(part) for part in load.schedule]
    why.append(f"By formula, draft tokens by sequences at once, [from, to, k]: {ranges}.")
    return why


def assumptions(gpus: Gpus) -> list[str]:
    """What the formula takes for granted."""
    gpu, count = gpus.gpu, gpus.count
    said = [
        "Nothing was measured. A forward takes max(weights / bandwidth, 2 x parameters x tokens / FLOP/s) + keys and "
        f"values / bandwidth + {OVERHEAD * 1e3:g} ms.",
        f"{gpu.name} by its data sheet: {gpu.memory} GiB, {gpu.bandwidth:g} TB/s, {gpu.tflops:g} TFLOP/s (bfloat16, "
        f"dense); of these {MEMORY_SHARE:.0%}, {BANDWIDTH_SHARE:.0%} and {FLOPS_SHARE:.0%} can be had.",
        "All sequences are at their longest. Reading prompts, scheduling and sampling are not counted.",
    ]
    if count > 1:
        said.append(f"The {count} GPUs share all work evenly; what they exchange after each layer is not counted.")
    if count > NODE:
        said.append(f"{count} GPUs are several machines as a rule, whose network is not counted.")
    return said
