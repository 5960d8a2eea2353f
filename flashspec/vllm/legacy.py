"""Commands of older tutorials, turned into today's."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise

from flashspec.errors import OptionError
from flashspec.vllm.command import KEY, NEWEST, OWN, Command, Facts, Version, facts_of, flag_name, name

MODULES = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server")
WHOLE = {  # old flag -> today's key, for numbers
    "--num-speculative-tokens": "num_speculative_tokens",
    "--ngram-prompt-lookup-max": "prompt_lookup_max",
    "--ngram-prompt-lookup-min": "prompt_lookup_min",
    "--speculative-draft-tensor-parallel-size": "draft_tensor_parallel_size",
    "-spec-draft-tp": "draft_tensor_parallel_size",
    "--speculative-max-model-len": "max_model_len",
    "--speculative-disable-by-batch-size": "disable_by_batch_size",
}
TEXTS = {"--speculative-model": "model", "--speculative-model-quantization": "quantization"}
DROPPED = {  # old flag -> whether a value follows, and why it is gone
    "--use-v2-block-manager": (False, "there is one block manager only"),
    "--speculative-disable-mqa-scorer": (False, "there is one way of scoring only"),
    "--num-lookahead-slots": (True, "it follows from the number of speculative tokens"),
    "--typical-acceptance-sampler-posterior-threshold": (True, "typical acceptance is gone"),
    "--typical-acceptance-sampler-posterior-alpha": (True, "typical acceptance is gone"),
}
OPTIONAL = "--disable-logprobs-during-spec-decoding"  # alone, or with True or False
ACCEPTANCE = "--spec-decoding-acceptance-method"
SAMPLERS = {
    "rejection_sampler": "it is what vLLM does anyway",
    "typical_acceptance_sampler": "it changed the output; vLLM now verifies exactly",
}
OLD_KEYS = {  # keys that --speculative-config had once
    "acceptance_method": "vLLM now verifies exactly, always",
    "posterior_threshold": "typical acceptance is gone",
    "posterior_alpha": "typical acceptance is gone",
    "disable_mqa_scorer": "there is one way of scoring only",
    "disable_logprobs": "logprobs are computed where a request asks for them",
}
NO_ENGINE_CHOICE = (0, 11, 1)
NO_OLD_ENGINE = (0, 10, 0)  # which alone ran MLP speculators
CONFIG = ("--speculative-config", "-sc")
NEW_FLAGS = {  # of speculation, and the release that each came with
    "--spec-method": (0, 22, 0), "--spec-model": (0, 22, 0), "--spec-tokens": (0, 22, 0),
    "--specialize-active-lora": (0, 16, 0), "--speculative-config": (0, 9, 0),
}  # fmt: skip
SPECULATION = re.compile(r"--?(spec|num-spec|ngram|typical-acc)")  # how its flags begin
GONE: dict[str, tuple[Version, bool, str]] = {  # others: the release without, whether a value follows, why
    "--device": ((0, 10, 0), True, "vLLM finds it out"),
    "--enable-reasoning": ((0, 10, 0), False, "--reasoning-parser is enough"),
    "--num-scheduler-steps": ((0, 10, 1), True, "there is one scheduler only"),
    "--disable-async-output-proc": ((0, 11, 0), False, "there is one way of output only"),
    "--max-seq-len-to-capture": ((0, 11, 0), True, "graphs go by batch size, not by length"),
    "--preemption-mode": ((0, 11, 0), True, "what was preempted is recomputed, always"),
    "--scheduler-delay-factor": ((0, 11, 0), True, "prompts are read in chunks between the steps"),
    "--disable-log-requests": ((0, 17, 0), False, "requests are logged only with --enable-log-requests"),
    "--swap-space": ((0, 18, 0), True, "what was preempted is recomputed, not swapped"),
    "--disable-frontend-multiprocessing": ((0, 19, 0), False, "there is one front end only"),
}
RENAMED: dict[str, tuple[Version, str]] = {
    "--guided-decoding-backend": ((0, 11, 0), "--structured-outputs-config.backend"),
    "--override-pooler-config": ((0, 12, 0), "--pooler-config"),
    "--cuda-graph-sizes": ((0, 13, 0), "--cudagraph-capture-sizes"),
}
REFUSED: dict[str, tuple[Version, str]] = {  # what nothing can be put for without asking
    "--rope-scaling": ((0, 11, 1), """--hf-overrides '{"rope_parameters": {...}}'"""),
    "--rope-theta": ((0, 11, 1), """--hf-overrides '{"rope_parameters": {...}}'"""),
    "--task": ((0, 13, 0), "--runner and --convert, and nothing for generate"),
}
KNOWN = OWN | {  # today's that one meets, to say which are not known here
    "--aggregate-engine-logging", "--allowed-origins", "--api-server-count", "--attention-backend", "--block-size",
    "--chat-template", "--compilation-config", "-cc", "--config", "--cpu-offload-gb", "--default-chat-template-kwargs",
    "--disable-custom-all-reduce", "--disable-log-stats", "--disable-sliding-window", "--download-dir", "-ep",
    "--enable-auto-tool-choice", "--enable-chunked-prefill", "--enable-expert-parallel", "--enable-log-requests",
    "--enable-lora", "--enable-prefix-caching", "--enforce-eager", "--generation-config", "--hf-overrides",
    "--hf-token", "--kv-cache-dtype", "--kv-cache-memory-bytes", "--kv-transfer-config", "--limit-mm-per-prompt",
    "--load-format", "--lora-modules", "--max-logprobs", "--max-loras", "--max-lora-rank", "--max-num-batched-tokens",
    "--mm-processor-kwargs", "--num-gpu-blocks-override", "--override-generation-config", "--reasoning-parser",
    "--response-role", "--revision", "--root-path", "--scheduling-policy", "--seed", "--ssl-certfile", "--ssl-keyfile",
    "--structured-outputs-config", "--tokenizer", "--tokenizer-mode", "--tool-call-parser", "--trust-remote-code",
    "--uvicorn-log-level", "--pooler-config", "--cudagraph-capture-sizes", "--runner", "--convert",
}  # fmt: skip
KEYS: dict[Version, str] = {  # of --speculative-config, by the release that they came with
    (0, 9, 0): "acceptance_method code_revision disable_by_batch_size disable_log_stats disable_logprobs "
    "disable_mqa_scorer draft_model_config draft_parallel_config draft_tensor_parallel_size enable_chunked_prefill "
    "max_model_len method model num_speculative_tokens posterior_alpha posterior_threshold prompt_lookup_max "
    "prompt_lookup_min quantization revision speculative_token_tree",
    (0, 11, 0): "disable_padded_drafter_batch enforce_eager",
    (0, 11, 1): "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_max_tree_depth "
    "suffix_decoding_min_token_prob",
    (0, 16, 0): "parallel_drafting",
    (0, 17, 0): "draft_load_config use_local_argmax_reduction",
    (0, 18, 0): "rejection_sample_method",
    (0, 19, 0): "moe_backend synthetic_acceptance_rate",
    (0, 20, 0): "synthetic_acceptance_length synthetic_acceptance_rates",
    (0, 21, 0): "attention_backend draft_sample_method",
    (0, 24, 0): "num_speculative_tokens_per_batch_size",
    (0, 25, 0): "use_heterogeneous_vocab",
    (0, 26, 0): "kv_cache_dtype",
    (0, 28, 0): "dspark_draft_topk enable_adaptive_verification",
    (0, 29, 0): "index_share_for_mtp_iteration",
    (0, 30, 0): "disable_eagle_block_drop",
}
ENDED: dict[str, Version] = {  # keys that nothing takes the place of by itself, and the release without
    "disable_log_stats": (0, 11, 1), "enable_chunked_prefill": (0, 11, 1), "speculative_token_tree": (0, 21, 0),
    "synthetic_acceptance_rate": (0, 20, 0),
}  # fmt: skip
METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "medusa", "ngram_gpu", "dflash", "dspark",
           "custom_class", "extract_hidden_states", "mlp_speculator")  # fmt: skip


@dataclass
class _Found:
    """What has been read so far."""

    version: Version
    words: list[str] = field(default_factory=list)  # all that stays
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    old: dict[str, object] = field(default_factory=dict)  # today's keys, from old flags
    given: dict[str, str] = field(default_factory=dict)  # how these were given, until it is said what they became
    unknown: list[str] = field(default_factory=list)
    config: str | None = None  # --speculative-config, as given
    place: int | None = None  # where in words it belongs
    model: str | None = None


def translate(words: Seq[str], version: Version) -> Command:
    """A command of any age as a command for this release; what it says already in today's way stays as it is.

    Raises:
        OptionError: not a vLLM server's command, a flag without its value, or flags that contradict each other.
    """
    found = _Found(version)
    rest = _past_program(list(words), found)
    while rest:
        _take(rest, found)
    if found.model is None:
        raise OptionError("the command names no model; give one after vllm serve, or with --model")
    if version >= NO_ENGINE_CHOICE and found.env.pop("VLLM_USE_V1", None) is not None:
        found.notes.append("VLLM_USE_V1 is left out: there is one engine only")
    config = _config(found, version)
    if found.unknown:
        found.notes.append(f"not known here and passed on as it is: {', '.join(map(_guessed, found.unknown))}")
    if config is not None:
        found.words[found.place : found.place] = ["--speculative-config", config]
    return Command(("vllm", "serve", found.model, *found.words), found.env, tuple(found.notes))


def _past_program(words: list[str], found: _Found) -> list[str]:
    """The words behind the program, its environment taken in."""
    while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0], re.DOTALL):
        key, _, value = words.pop(0).partition("=")
        found.env[key] = value
    program = words[0].rsplit("/", 1)[-1] if words else ""
    if program == "vllm" and words[1:2] == ["serve"]:
        rest = words[2:]
        if rest and not rest[0].startswith("-"):
            found.model = rest.pop(0)
        return rest
    if re.fullmatch(r"python[\d.]*", program) and words[1:2] == ["-m"] and words[2:3] and words[2] in MODULES:
        found.notes.append(f"{program} -m {words[2]} -> vllm serve")
        return words[3:]
    raise OptionError(
        f"{' '.join(words[:3])!r} starts no vLLM server; it begins with vllm serve, or python -m {MODULES[0]}"
    )


def _take(rest: list[str], found: _Found) -> None:
    """Move one flag with its value from ``rest`` to where it belongs."""
    word = rest.pop(0)
    flag = flag_name(word) or ""
    _, joined, value = word.partition("=")
    inline = value if joined else None
    if flag in WHOLE or flag in TEXTS:
        text = _value(flag, inline, rest)
        key = WHOLE.get(flag) or TEXTS[flag]
        found.given.setdefault(key, f"{flag} {text}")
        _keep(key, _whole(flag, text) if flag in WHOLE else text, found)
    elif flag in DROPPED or flag in (OPTIONAL, ACCEPTANCE):
        _drop(flag, inline, rest, found)
    elif flag == "--model":
        _name_model(_value(flag, inline, rest), found)
    elif flag == "--api-key":
        _hide_key(inline, rest, word, found)
    elif flag in CONFIG and "." not in word.split("=")[0]:
        if found.config is not None:
            raise OptionError("--speculative-config is given twice; leave one of them out")
        found.config, found.place = _value(flag, inline, rest), len(found.words)
    elif flag in GONE and found.version >= GONE[flag][0]:
        if GONE[flag][1]:
            _value(flag, inline, rest)
        found.notes.append(f"{flag} is left out: {GONE[flag][2]}")
    else:
        found.words.append(_judged(flag, word, found))


def _judged(flag: str, word: str, found: _Found) -> str:
    """A word that stays, under today's name; what is to be known of it is noted.

    Raises:
        OptionError: a flag for speculation that no known release has, or not this one.
    """
    version, here = found.version, f"vLLM {name(found.version)}"
    if flag in RENAMED and version >= RENAMED[flag][0]:
        found.notes.append(f"{flag} -> {RENAMED[flag][1]}")
        return RENAMED[flag][1] + word[len(flag) :]
    if flag in REFUSED and version >= REFUSED[flag][0]:
        found.notes.append(f"{flag} is passed on, and {here} refuses it; today's is {REFUSED[flag][1]}")
    elif flag in CONFIG:
        _check_key(re.split(r"[.=+]", word)[1], found)
    elif not any(new.startswith(flag) and version >= since for new, since in NEW_FLAGS.items()) and (
        SPECULATION.match(flag) and version <= NEWEST
    ):
        since = NEW_FLAGS.get(flag)
        more = f"from {name(since)} on; use --speculative-config" if since else _hint(flag, _flags())
        raise OptionError(f"{flag} is no flag of {here}, which refuses it: {more}")
    elif flag and flag not in {*KNOWN, *NEW_FLAGS, *GONE, *RENAMED, *REFUSED}:
        found.unknown.append(flag)
    return word


def _flags() -> list[str]:
    return [*WHOLE, *TEXTS, *DROPPED, OPTIONAL, ACCEPTANCE, *NEW_FLAGS, *KNOWN]


def _hint(word: str, known: Seq[str]) -> str:
    """What may have been meant."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else "leave it out, or look it up in vLLM's documentation"


def _guessed(flag: str) -> str:
    close = difflib.get_close_matches(flag, sorted(_flags()), n=1, cutoff=0.85)
    return f"{flag} (did you mean {close[0]}?)" if close else flag


def _value(flag: str, inline: str | None, rest: list[str]) -> str:
    value = inline if inline is not None else rest.pop(0) if rest and not rest[0].startswith("--") else ""
    if not value:
        raise OptionError(f"{flag} has no value; give one, or leave the flag out")
    return value


def _whole(flag: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= len(text) <= 9 or int(text) < 1:
        raise OptionError(f"{flag} is {text!r}; it must be a whole number from 1 on")
    return int(text)


def _keep(key: str, value: object, found: _Found) -> None:
    """Note a key for the JSON, at the place of the first old flag."""
    if found.old.get(key, value) != value:
        raise OptionError(f"{key} is given twice, as {found.old[key]!r} and {value!r}; leave one of them out")
    found.old[key] = value
    if found.place is None:
        found.place = len(found.words)


def _drop(flag: str, inline: str | None, rest: list[str], found: _Found) -> None:
    if flag == ACCEPTANCE:
        sampler = _value(flag, inline, rest)
        if sampler not in SAMPLERS:
            raise OptionError(f"{flag} is {sampler!r}; it was one of {', '.join(SAMPLERS)}")
        found.notes.append(f"{flag} {sampler} is left out: {SAMPLERS[sampler]}")
        return
    if flag == OPTIONAL:
        if inline is None and rest and rest[0].lower() in ("true", "false"):
            rest.pop(0)
        found.notes.append(f"{flag} is left out: {OLD_KEYS['disable_logprobs']}")
        return
    wants_value, reason = DROPPED[flag]
    if wants_value:
        _value(flag, inline, rest)
    found.notes.append(f"{flag} is left out: {reason}")


def _name_model(model: str, found: _Found) -> None:
    if found.model is not None and found.model != model:
        raise OptionError(f"the command names two models, {found.model!r} and {model!r}; leave one of them out")
    found.notes.append(f"--model {model} -> vllm serve {model}")
    found.model = model


def _hide_key(inline: str | None, rest: list[str], word: str, found: _Found) -> None:
    """One key goes into the environment, where process lists do not show it; several stay."""
    keys = [inline] if inline is not None else []
    while inline is None and rest and not rest[0].startswith("-"):
        keys.append(rest.pop(0))
    if not keys or not all(keys):
        raise OptionError("--api-key has no value; give one, or leave the flag out")
    if len(keys) > 1:
        found.words += [word, *keys]
        return
    found.env[KEY] = keys[0]
    found.notes.append(f"--api-key -> {KEY} in the environment, which process lists do not show")


# --- the JSON ---


def _config(found: _Found, version: Version) -> str | None:
    """``--speculative-config`` for this release; its own words where nothing is to be changed."""
    facts, given = facts_of(version), _given(found.config)
    if not found.old and given is None:
        return None
    new = [word for word in found.words if (flag_name(word) or "").startswith(("--spec-", *CONFIG))]
    if found.old and new:
        raise OptionError(f"{next(iter(found.given.values()))} is of old vLLM and {new[0]} of today's; keep one way")
    config = dict(given or {})
    for key, value in found.old.items():
        if config.get(key, value) != value:
            raise OptionError(f"{key} is {config[key]!r} in --speculative-config; {found.given[key]} differs: keep one")
        config[key] = value
    _rename(config, found, facts, version)
    for key in config:
        _check_key(key, found)
    _check_method(config, found, facts)
    if found.old:
        _check_old(config, found)
    for key, old in found.given.items():
        found.notes.append(f"{old} -> {json.dumps({key: config[key]})[1:-1]} in --speculative-config")
    return found.config if config == given else json.dumps(config)


def _check_key(key: str, found: _Found) -> None:
    """Raise OptionError for a key that vLLM refuses; of a newer vLLM nobody knows."""
    version, known = found.version, [word for since, words in KEYS.items() if since <= found.version
                                     for word in words.split()]  # fmt: skip
    plain = key.replace("-", "_")  # as vLLM reads it
    ended = ENDED.get(plain)
    if plain in known and (ended is None or version < ended):
        return
    since = [since for since, words in KEYS.items() if plain in words.split()]
    reason = f"it ended with {name(ended)}; leave it out" if ended and version >= ended else (
        f"it came with {name(since[0])}; leave it out or upgrade vLLM" if since else _hint(plain, known)
    )  # fmt: skip
    if version > NEWEST and not since:
        found.notes.append(f"{key!r} in --speculative-config is not known here and passed on: {reason}")
    else:
        raise OptionError(f"{key!r} in --speculative-config is refused by vLLM {name(version)}: {reason}")


def _check_method(config: dict[str, object], found: _Found, facts: Facts) -> None:
    """Say what this release will not run."""
    method, model, version = config.get("method"), config.get("model"), found.version
    is_mlp = method == "mlp_speculator" or (isinstance(model, str) and re.fullmatch(r"ibm-.*/.*-accelerator", model))
    if is_mlp and version >= NO_OLD_ENGINE:
        raise OptionError(
            f"{model!r} is an MLP speculator, which vLLM {name(version)} does not run (no release since "
            f"{name(NO_OLD_ENGINE)}); use an EAGLE-3 head, a small model, or [ngram]"
        )
    if method is None and not facts.draft_model:
        found.notes.append(f"vLLM {name(version)} refuses plain draft models, as all from 0.10 to 0.14 do; upgrade it")
    if isinstance(method, str) and method not in METHODS and not method.endswith("_mtp"):
        found.notes.append(f"the method {method!r} is not known here and passed on: {_hint(method, METHODS)}")
    if method in (None, "draft_model") and facts.draft_model and version >= NO_OLD_ENGINE:
        _check_size(config, found)


def _check_size(config: dict[str, object], found: _Found) -> None:
    size, target = config.get("draft_tensor_parallel_size"), _target_size(found.words)
    if size not in (None, target):
        found.notes.append(
            f"draft_tensor_parallel_size is {size} beside the target's {target}: vLLM {name(found.version)} refuses "
            "that for a plain draft model; leave it out, unless the draft is a head (EAGLE, Medusa)"
        )


def _target_size(words: Seq[str]) -> int:
    """The target's tensor parallel size; 1 where it is not given."""
    for word, following in pairwise([*words, ""]):
        if flag_name(word) in ("--tensor-parallel-size", "-tp"):
            text = word.partition("=")[2] or following
            return int(text) if text.isascii() and text.isdigit() else 1
    return 1


def _given(text: str | None) -> dict[str, object] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--speculative-config is {text!r}, which is no JSON ({error}); quote it with ''") from error
    if not isinstance(value, dict):
        raise OptionError(
            f'--speculative-config is {text!r}; it must be a JSON object, as in \'{{"method": "ngram"}}\''
        )
    return value


def _rename(config: dict[str, object], found: _Found, facts: Facts, version: Version) -> None:
    """Change what this release does not read any more."""
    for key in [key for key in config if key in OLD_KEYS]:
        del config[key]
        found.notes.append(f"{key} is left out of --speculative-config: {OLD_KEYS[key]}")
    if config.get("model") in ("[ngram]", "ngram") or config.get("method") == "[ngram]":
        config.pop("model", None)
        rest = {key: value for key, value in config.items() if key != "method"}
        config.clear()
        config |= {"method": "ngram", **rest}
        old = found.given.pop("model", "[ngram]")
        found.notes.append(f'{old} -> "method": "ngram" in --speculative-config')
    if "disable_by_batch_size" in config and not facts.disable_by_batch_size:
        _schedule(config, found, facts, version)


def _schedule(config: dict[str, object], found: _Found, facts: Facts, version: Version) -> None:
    """No guesses from a batch size on, by a schedule where there is one."""
    size, k = config.pop("disable_by_batch_size"), config.get("num_speculative_tokens")
    old = found.given.pop("disable_by_batch_size", f"disable_by_batch_size {size}")
    if not isinstance(size, int) or isinstance(size, bool) or size < 2:
        raise OptionError(f"disable_by_batch_size is {size!r}; it must be a whole number from 2 on")
    if facts.schedule and isinstance(k, int) and "num_speculative_tokens_per_batch_size" not in config:
        ranges = config["num_speculative_tokens_per_batch_size"] = [[1, size - 1, k], [size, size, 0]]
        found.notes.append(
            f'{old} -> "num_speculative_tokens_per_batch_size": {ranges} in --speculative-config: '
            f"no drafts from batch size {size} on"
        )
    else:
        found.notes.append(
            f"{old} is left out: vLLM {name(version)} has nothing for it (a schedule from 0.24 on, "
            "beside num_speculative_tokens)"
        )


def _check_old(config: dict[str, object], found: _Found) -> None:
    """What old vLLM asked for and today's does."""
    if "model" not in config and "method" not in config:
        raise OptionError(
            f"{', '.join(found.given.values()) or 'speculation'} without a speculative model; add --speculative-model, "
            "or [ngram] as one"
        )
    if config.get("method") == "ngram":
        if "prompt_lookup_max" not in config:
            raise OptionError("[ngram] without --ngram-prompt-lookup-max; add it, 4 for example")
        if "prompt_lookup_min" not in config:
            config["prompt_lookup_min"] = 1
            found.notes.append("\"prompt_lookup_min\": 1 is added: old vLLM's default; today's is prompt_lookup_max")
        low, high = config["prompt_lookup_min"], config["prompt_lookup_max"]
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise OptionError(f"prompt_lookup_min is {low}, above prompt_lookup_max, which is {high}; lower it")
    if "num_speculative_tokens" not in config:
        raise OptionError("speculation without --num-speculative-tokens; add it, 5 for example")
