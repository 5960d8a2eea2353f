"""Commands of older tutorials, turned into today's."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from flashspec.errors import OptionError
from flashspec.vllm.command import KEY, Command, Facts, Version, facts_of, flag_name, name

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
CONFIG = ("--speculative-config", "-sc")


@dataclass
class _Found:
    """What has been read so far."""

    words: list[str] = field(default_factory=list)  # all that stays
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    old: dict[str, object] = field(default_factory=dict)  # today's keys, from old flags
    config: str | None = None  # --speculative-config, as given
    place: int | None = None  # where in words it belongs
    model: str | None = None


def translate(words: Seq[str], version: Version) -> Command:
    """A command of any age as a command for this release; what it says already in today's way stays as it is.

    Raises:
        OptionError: not a vLLM server's command, a flag without its value, or flags that contradict each other.
    """
    found = _Found()
    rest = _past_program(list(words), found)
    while rest:
        _take(rest, found)
    if found.model is None:
        raise OptionError("the command names no model; give one after vllm serve, or with --model")
    if version >= NO_ENGINE_CHOICE and found.env.pop("VLLM_USE_V1", None) is not None:
        found.notes.append("VLLM_USE_V1 is left out: there is one engine only")
    config = _config(found, version)
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
        found.notes.append(f"{program} -m {words[2]} is vllm serve today")
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
        _keep(WHOLE.get(flag) or TEXTS[flag], _whole(flag, text) if flag in WHOLE else text, found)
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
    else:
        found.words.append(word)


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
    found.notes.append("--model is the word after vllm serve today")
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
    found.notes.append(f"--api-key is read from {KEY}, which process lists do not show")


# --- the JSON ---


def _config(found: _Found, version: Version) -> str | None:
    """``--speculative-config`` for this release; its own words where nothing is to be changed."""
    facts, given = facts_of(version), _given(found.config)
    if not found.old and given is None:
        return None
    if found.old and any((flag_name(word) or "").startswith(("--spec-", *CONFIG)) for word in found.words):
        raise OptionError("old and new flags for speculation are mixed; keep one --speculative-config")
    config = dict(given or {})
    for key, value in found.old.items():
        if config.get(key, value) != value:
            raise OptionError(
                f"{key} is {config[key]!r} in --speculative-config and {value!r} in an old flag; keep one"
            )
        config[key] = value
    _rename(config, found, facts, version)
    if not facts.draft_model and "method" not in config:
        found.notes.append(f"vLLM {name(version)} refuses plain draft models, as all from 0.10 to 0.14 do; upgrade it")
    if found.old:
        _check_old(config, found)
        found.notes.append(f"the old flags for speculation ({', '.join(found.old)}) are --speculative-config today")
    return found.config if config == given else json.dumps(config)


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
        found.notes.append("the speculative model [ngram] is the method ngram today")
    if "disable_by_batch_size" in config and not facts.disable_by_batch_size:
        _schedule(config, found, facts, version)


def _schedule(config: dict[str, object], found: _Found, facts: Facts, version: Version) -> None:
    """No guesses from a batch size on, by a schedule where there is one."""
    size, k = config.pop("disable_by_batch_size"), config.get("num_speculative_tokens")
    if not isinstance(size, int) or isinstance(size, bool) or size < 2:
        raise OptionError(f"disable_by_batch_size is {size!r}; it must be a whole number from 2 on")
    if facts.schedule and isinstance(k, int) and "num_speculative_tokens_per_batch_size" not in config:
        config["num_speculative_tokens_per_batch_size"] = [[1, size - 1, k], [size, size, 0]]
        found.notes.append(f"no speculation from batch size {size} on is a schedule by batch size today")
    else:
        found.notes.append(
            f"no speculation from batch size {size} on is left out: vLLM {name(version)} "
            "has nothing for it (a schedule from 0.24 on, beside num_speculative_tokens)"
        )


def _check_old(config: dict[str, object], found: _Found) -> None:
    """What old vLLM asked for and today's does."""
    if "model" not in config and "method" not in config:
        raise OptionError(
            f"{', '.join(found.old)} without a speculative model; add --speculative-model, or [ngram] as one"
        )
    if config.get("method") == "ngram":
        if "prompt_lookup_max" not in config:
            raise OptionError("[ngram] without --ngram-prompt-lookup-max; add it, 4 for example")
        if "prompt_lookup_min" not in config:
            config["prompt_lookup_min"] = 1
            found.notes.append("prompt_lookup_min is 1, as it was by itself; today's would be prompt_lookup_max")
        low, high = config["prompt_lookup_min"], config["prompt_lookup_max"]
        if isinstance(low, int) and isinstance(high, int) and low > high:
            raise OptionError(f"prompt_lookup_min is {low}, above prompt_lookup_max, which is {high}; lower it")
    if "num_speculative_tokens" not in config:
        raise OptionError("speculation without --num-speculative-tokens; add it, 5 for example")
