"""Our configuration as vLLM's: tables against recorded names of its releases, and against the real one where it is."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from flashspec.errors import OptionError
from flashspec.vllm import launch
from flashspec.vllm.command import (
    NEWEST,
    VERSIONS,
    Command,
    Facts,
    Options,
    command,
    facts_of,
    flag_name,
    multi_node,
    name,
    shell,
    speculative_config,
    version_of,
)
from flashspec.vllm.legacy import (
    ENDED,
    GONE,
    KEYS,
    KNOWN,
    METHODS,
    NEW_FLAGS,
    OLD_KEYS,
    REFUSED,
    RENAMED,
    translate,
)

DATA = json.loads((Path(__file__).parent / "data" / "vllm" / "names.json").read_text(encoding="utf-8"))
RELEASES = DATA["releases"]
OLD = ["python", "-m", "vllm.entrypoints.openai.api_server", "--model", "M"]
MODELS = Path.home() / ".cache" / "flashspec-models"


def numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part.removeprefix("post")) for part in release.split("."))


def recorded(kind: str, release: str) -> set[str]:
    """The names that a release has."""
    return {
        name
        for name, ranges in DATA[kind].items()
        if any(numbers(first) <= numbers(release) <= numbers(last) for first, last in ranges)
    }


def configs(words: tuple[str, ...]) -> dict[str, Any]:
    """The JSON among words; {} where there is none."""
    return json.loads(words[words.index("--speculative-config") + 1]) if "--speculative-config" in words else {}


def check_names(words: tuple[str, ...], release: str) -> None:
    """Every flag, key and value of a list is one that the release has."""
    flags = {flag for word in words[3:] if (flag := flag_name(word))}
    assert flags <= recorded("flags", release)
    config = configs(words)
    assert set(config) <= recorded("speculative_config", release)
    for key in ("method", "rejection_sample_method", "draft_sample_method"):
        assert key not in config or config[key] in recorded(key, release)


# --- the speculative configuration, exactly ---

PLAN = ((1, 4, 5), (5, 16, 2), (17, 64, 0))
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any] | None]] = {
    "none": ({"drafter": "none"}, "0.32.0", None),
    "ngram": (
        {"drafter": "ngram"}, "0.32.0",
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 2},
    ),
    "ngram, old": (
        {"drafter": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 8, "prompt_lookup_max": 9}, "0.9.2",
        {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 9, "prompt_lookup_min": 8},
    ),
    "auto without a draft": ({}, "0.32.0", {"method": "suffix", "num_speculative_tokens": 5}),
    "auto where suffix is unknown": (
        {}, "0.10.2",
        {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 2},
    ),
    "suffix": ({"drafter": "suffix", "num_speculative_tokens": 24}, "0.11.2",
               {"method": "suffix", "num_speculative_tokens": 24}),
    "model": ({"drafter": "model", "draft": "D"}, "0.32.0",
              {"method": "draft_model", "model": "D", "num_speculative_tokens": 4}),
    "model, split": (
        {"drafter": "model", "draft": "D", "tensor_parallel": 2, "draft_tensor_parallel": 2}, "0.15.1",
        {"method": "draft_model", "model": "D", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 2},
    ),
    "hybrid": ({"drafter": "hybrid", "draft": "D"}, "0.32.0",
               {"method": "draft_model", "model": "D", "num_speculative_tokens": 4}),
    "hybrid of heads": ({"drafter": "hybrid", "draft": "H", "draft_kind": "eagle3"}, "0.32.0",
                        {"method": "eagle3", "model": "H", "num_speculative_tokens": 3}),
    "auto of medusa heads": ({"draft": "H", "draft_kind": "medusa"}, "0.32.0",
                             {"method": "medusa", "model": "H", "num_speculative_tokens": 3}),
    "eagle3, draft on one rank": (
        {"drafter": "eagle3", "draft": "H", "tensor_parallel": 4, "draft_tensor_parallel": 1}, "0.28.0",
        {"method": "eagle3", "model": "H", "num_speculative_tokens": 3, "draft_tensor_parallel_size": 1},
    ),
    "mtp": ({"drafter": "mtp"}, "0.32.0", {"method": "mtp", "num_speculative_tokens": 1}),
    "mtp of another model": ({"drafter": "mtp", "draft": "D", "num_speculative_tokens": 2}, "0.24.0",
                             {"method": "mtp", "model": "D", "num_speculative_tokens": 2}),
    "translated": (
        {"drafter": "translated", "draft": "D"}, "0.25.1",
        {"method": "draft_model", "model": "D", "num_speculative_tokens": 4, "use_heterogeneous_vocab": True},
    ),
    "translated, sampled": (
        {"draft": "D", "heterogeneous": True, "probabilistic_drafts": True}, "0.32.0",
        {"method": "draft_model", "model": "D", "num_speculative_tokens": 4, "use_heterogeneous_vocab": True},
    ),
    "sampled": (
        {"drafter": "model", "draft": "D", "probabilistic_drafts": True}, "0.32.0",
        {"method": "draft_model", "model": "D", "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"},
    ),
    "sampled, by its first name": (
        {"drafter": "model", "draft": "D", "probabilistic_drafts": True}, "0.21.0",
        {"method": "draft_model", "model": "D", "num_speculative_tokens": 4, "draft_sample_method": "gumbel"},
    ),
    "sampled, too old": (
        {"drafter": "model", "draft": "D", "probabilistic_drafts": True}, "0.20.2",
        {"method": "draft_model", "model": "D", "num_speculative_tokens": 4},
    ),
    "block": (
        {"drafter": "eagle3", "draft": "H", "verification": "block"}, "0.25.1",
        {"method": "eagle3", "model": "H", "num_speculative_tokens": 3, "rejection_sample_method": "block"},
    ),
    "block, not with this method": (
        {"drafter": "model", "draft": "D", "verification": "block"}, "0.30.0",
        {"method": "draft_model", "model": "D", "num_speculative_tokens": 4},
    ),
    "coupled": ({"drafter": "suffix", "verification": "coupled"}, "0.32.0",
                {"method": "suffix", "num_speculative_tokens": 5}),
    "schedule": (
        {"drafter": "suffix", "schedule": PLAN}, "0.32.0",
        {"method": "suffix", "num_speculative_tokens": 5,
         "num_speculative_tokens_per_batch_size": [[1, 4, 5], [5, 16, 2], [17, 64, 0]]},
    ),
    "schedule, cut": (
        {"drafter": "suffix", "schedule": PLAN, "num_speculative_tokens": 2}, "0.24.0",
        {"method": "suffix", "num_speculative_tokens": 2,
         "num_speculative_tokens_per_batch_size": [[1, 16, 2], [17, 64, 0]]},
    ),
    "schedule of one length": ({"drafter": "suffix", "schedule": ((1, 4, 3), (5, 16, 3))}, "0.32.0",
                               {"method": "suffix", "num_speculative_tokens": 3}),
    "schedule of nothing": ({"drafter": "suffix", "schedule": ((1, 64, 0),)}, "0.32.0", None),
    "schedule, too old": ({"drafter": "suffix", "schedule": PLAN}, "0.23.0",
                          {"method": "suffix", "num_speculative_tokens": 5}),
    "schedule with replicas": ({"drafter": "suffix", "schedule": PLAN, "data_parallel": 2}, "0.32.0",
                               {"method": "suffix", "num_speculative_tokens": 5}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_speculative_config_is_exactly_this(name: str) -> None:
    chosen, release, expected = CASES[name]
    options = Options(model="M", **chosen)
    assert speculative_config(options, version_of(release)) == expected
    made = command(options, version_of(release))
    assert configs(made.words) == (expected or {})
    check_names(made.words, release)


@pytest.mark.parametrize("release", RELEASES)
def test_every_name_exists_in_every_release(release: str) -> None:
    version = version_of(release)
    all_flags = Options(
        model="M", drafter="none", tensor_parallel=2, pipeline_parallel=3, data_parallel=4, distributed_executor="ray",
        gpu_memory_utilization=0.5, max_model_len=99, max_batch=3, dtype="float32", quantization="awq", host="::",
        port=1, api_key="k", served_model_name="n", trust_remote_code=True, enforce_eager=True,
    )  # fmt: skip
    check_names(command(all_flags, version).words, release)
    for method in ("ngram", "suffix", "model", "translated", "eagle3", "medusa", "mtp"):
        for rule in ("auto", "block"):
            draft = None if method in ("ngram", "suffix", "mtp") else "D"
            kind: Any = method if method in ("eagle3", "medusa") else None
            options = Options(
                model="M", drafter=method, draft=draft, draft_kind=kind, verification=rule, schedule=PLAN,
                probabilistic_drafts=True,
            )  # fmt: skip
            try:
                made = command(options, version)
            except OptionError as error:
                assert f"vLLM {name(version)} " in str(error)  # noqa: PT017
                continue
            check_names(made.words, release)


def test_facts_follow_the_recorded_names() -> None:
    """What the table says of a release is what its sources name, first release by first release."""
    for release in RELEASES:
        facts, version = facts_of(version_of(release)), numbers(release)
        keys, methods = recorded("speculative_config", release), recorded("method", release)
        assert facts.suffix == ("suffix" in methods), release
        assert facts.eagle3 == ("eagle3" in methods), release
        assert facts.mtp == ("mtp" in methods), release
        assert facts.schedule == ("num_speculative_tokens_per_batch_size" in keys), release
        assert facts.other_vocabulary == ("use_heterogeneous_vocab" in keys), release
        assert bool(facts.block) == ("block" in recorded("rejection_sample_method", release)), release
        assert {facts.sampled_drafts or "greedy", "greedy"} == recorded("draft_sample_method", release) | {"greedy"}
        assert facts.request_metrics == ("--per-request-spec-decode-metrics" in recorded("flags", release)), version


def test_argv_is_exactly_this() -> None:
    options = Options(
        model="org/M", draft="D", num_speculative_tokens=3, tensor_parallel=2, gpu_memory_utilization=0.9,
        max_model_len=4096, max_batch=64, dtype="bfloat16", host="127.0.0.1", port=8001, served_model_name="m",
        api_key="secret", extra=("--enable-prefix-caching",),
    )  # fmt: skip
    made = command(options, NEWEST, executable="/opt/vllm")
    assert made.words == (
        "/opt/vllm", "serve", "org/M", "--host", "127.0.0.1", "--port", "8001", "--served-model-name", "m",
        "--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64", "--gpu-memory-utilization", "0.9",
        "--tensor-parallel-size", "2",
        "--speculative-config", '{"method": "draft_model", "model": "D", "num_speculative_tokens": 3}',
        "--per-request-spec-decode-metrics", "summary", "--enable-prefix-caching",
    )  # fmt: skip
    assert made.env == {"VLLM_API_KEY": "secret"}
    assert "secret" not in shell(made) + repr(made) + repr(options) + " ".join(made.notes)
    assert shell(made).startswith('VLLM_API_KEY="${VLLM_API_KEY:?}" /opt/vllm serve org/M ')


def test_metrics_of_requests_only_with_speculation() -> None:
    words = command(Options(model="M", drafter="none"), NEWEST).words
    assert words == ("vllm", "serve", "M")
    assert "--per-request-spec-decode-metrics" not in command(Options(model="M"), (0, 28, 0)).words


NOTES = [
    ({"drafter": "ngram"}, "0.32.0", "40875"),
    ({"drafter": "suffix"}, "0.32.0", "arctic-inference"),
    ({"drafter": "suffix"}, "0.32.0", "num_speculative_tokens is 5"),
    ({"drafter": "suffix"}, "0.32.0", "min_p or logit_bias by an error 400"),
    ({"drafter": "suffix"}, "0.16.0", "min_tokens, min_p or logit_bias by an error 400"),
    ({"drafter": "suffix"}, "0.13.0", "does not apply"),
    ({"drafter": "ngram"}, "0.10.2", "not known"),
    ({"drafter": "ngram"}, "0.10.2", "does not draft for requests with penalties"),
    ({"drafter": "ngram"}, "0.28.0", "for each of them from 0.29 on"),
    ({"drafter": "medusa", "draft": "H"}, "0.32.0", "own layout"),
    ({"drafter": "hybrid", "draft": "D"}, "0.32.0", "no hybrid drafter"),
    ({"drafter": "suffix", "verification": "coupled"}, "0.32.0", "no coupled verification"),
    ({"drafter": "suffix", "verification": "block"}, "0.32.0", "does not verify blocks with suffix"),
    ({"drafter": "suffix", "verification": "block"}, "0.24.0", "some methods from 0.25 on"),
    ({"drafter": "ngram", "verification": "block"}, "0.32.0", "model runner V2"),
    ({"drafter": "suffix", "schedule": PLAN}, "0.23.0", "from 0.24 on: the most guesses"),
    ({"drafter": "suffix", "schedule": PLAN, "data_parallel": 2}, "0.32.0", "data parallelism"),
    ({"drafter": "suffix", "schedule": ((1, 9, 0),)}, "0.32.0", "drafts nothing at any batch size"),
    ({"drafter": "mtp"}, "0.32.0", "published with such layers"),
    ({"drafter": "translated", "draft": "D", "probabilistic_drafts": True}, "0.32.0", "with another tokenizer"),
    ({"drafter": "model", "draft": "D", "probabilistic_drafts": True}, "0.20.2", "from 0.21 on it can sample"),
    ({"drafter": "none"}, "0.32.0", "without speculation"),
    ({"drafter": "none"}, "0.34.1", "newer than what is known"),
    ({"drafter": "none", "nodes": 2, "tensor_parallel": 2}, "0.32.0", "start Ray"),
]


@pytest.mark.parametrize(("chosen", "release", "said"), NOTES)
def test_notes_say_what_is_missing(chosen: dict[str, Any], release: str, said: str) -> None:
    assert said in "\n".join(command(Options(model="M", **chosen), version_of(release)).notes)


@pytest.mark.parametrize(
    ("chosen", "release", "said"),
    [
        ({"drafter": "model", "draft": "D"}, "0.14.1", "only from 0.15 on"),
        ({"drafter": "eagle3", "draft": "H"}, "0.9.0.1", "only from 0.9.1 on"),
        ({"drafter": "suffix"}, "0.11.0", "only from 0.11.1 on"),
        ({"drafter": "mtp"}, "0.10.2", "only from 0.11 on"),
        ({"drafter": "translated", "draft": "D"}, "0.24.0", "only from 0.25 on"),
        ({"drafter": "model"}, "0.32.0", "needs a draft; name it"),
        ({"drafter": "hybrid"}, "0.32.0", "needs a draft; name it"),
        ({"drafter": "eagle3", "draft": "D", "draft_kind": "model"}, "0.32.0", "kind eagle3"),
        (
            {"drafter": "model", "draft": "D", "tensor_parallel": 2, "draft_tensor_parallel": 1},
            "0.32.0",
            "leave it out",
        ),
        ({"drafter": "none"}, "0.8.5", "older than 0.9.0"),
    ],
)
def test_what_a_release_cannot_do(chosen: dict[str, Any], release: str, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        command(Options(model="M", **chosen), version_of(release))


@pytest.mark.parametrize(
    "chosen",
    [
        {"drafter": "eagle"}, {"draft_kind": "x"}, {"verification": "typical"}, {"dtype": "int8"}, {"model": ""},
        {"model": "--help"}, {"num_speculative_tokens": 0}, {"num_speculative_tokens": "many"},
        {"num_speculative_tokens": True}, {"tensor_parallel": 0}, {"tensor_parallel": 1.5}, {"port": 70000},
        {"gpu_memory_utilization": 0}, {"gpu_memory_utilization": 1.1}, {"gpu_memory_utilization": float("nan")},
        {"gpu_memory_utilization": "0.9"}, {"max_model_len": 1}, {"max_batch": 0}, {"prompt_lookup_min": 7},
        {"draft_tensor_parallel": 2}, {"distributed_executor": "uni"}, {"nodes": 2}, {"api_key": ""},
        {"nodes": 2, "tensor_parallel": 2, "distributed_executor": "mp"},
        {"nodes": 2, "tensor_parallel": 2, "data_parallel": 2}, {"draft": "a\0b"}, {"extra": ("--api-key=k",)},
        {"extra": ("--api_key", "k")}, {"extra": ("-sc", "{}")}, {"extra": ("--speculative-config.method", "ngram")},
        {"extra": ("--max_num_seqs=3",)}, {"schedule": ((2, 4, 1),)}, {"schedule": ((1, 4, 1), (4, 5, 0))},
        {"schedule": ((1, 0, 1),)}, {"schedule": ((1, 2, -1),)}, {"schedule": ((1, 2),)}, {"schedule": ((1, 2.0, 1),)},
    ],
)  # fmt: skip
def test_options_are_checked(chosen: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"it must|;|begins|NUL"):
        Options(**{"model": "M", **chosen})


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.32.0+cpu\n", (0, 32, 0)), ("vllm 0.9.0.1", (0, 9, 0)), ("0.11.2.post2", (0, 11, 2)), ("v0.25", (0, 25, 0)),
        ("INFO 11-30 01:24:12 [x.py:126] hello\nW1130 17:08:20.354000 18301 triton.py:53] x\n0.32.0+cpu", (0, 32, 0)),
        ("0.19.2rc1.dev205+g07351e088", (0, 19, 2)), ("vllm==0.31.0", (0, 31, 0)), ("1.0.0", (1, 0, 0)),
    ],
)  # fmt: skip
def test_version_of(text: str, version: tuple[int, int, int]) -> None:
    assert version_of(text) == version


@pytest.mark.parametrize("text", ["", "vllm: command not found", "11-30 01:24:12", "Python 3", "٠.٣.٢"])
def test_no_version(text: str) -> None:
    with pytest.raises(OptionError, match="names no vLLM version"):
        version_of(text)


def test_table_ascends() -> None:
    assert [row.since for row in VERSIONS] == sorted({row.since for row in VERSIONS})
    assert {field.name for field in fields(Facts)} > {"block", "schedule"}


def test_multi_node() -> None:
    options = Options(model="M", drafter="ngram", tensor_parallel=4, pipeline_parallel=2, nodes=2, api_key="secret")
    lines = multi_node(options)
    typed = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert typed[0][1:4] == ["ray", "start", "--head"]
    assert typed[1][1:3] == ["ray", "start"]
    assert "--address=HEAD:6379" in typed[1]
    assert typed[2][2:] == list(command(options, NEWEST).words)
    assert "--distributed-executor-backend" in typed[2]
    assert "4 GPUs" in lines[0]
    assert "secret" not in "\n".join(lines)
    with pytest.raises(OptionError, match="nodes to 2"):
        multi_node(Options(model="M"))


# --- one line to paste ---

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@given(words=st.lists(texts, min_size=1), env=st.dictionaries(st.from_regex(r"[A-Z_]{1,8}", fullmatch=True), texts))
def test_shell_gives_the_words_back(words: list[str], env: dict[str, str]) -> None:
    parts = shlex.split(shell(Command(tuple(words), env)))
    assert parts[len(env) :] == words
    assert parts[: len(env)] == [f"{key}={value}" for key, value in env.items()]


@settings(max_examples=20, deadline=None)
@given(words=st.lists(texts.filter(bool), max_size=4), key=texts)
def test_a_shell_gives_the_words_back_and_wants_the_key(words: list[str], key: str) -> None:
    line = shell(Command(("printf", "%s\\0", *words), {"VLLM_API_KEY": key}))
    clean = {name: value for name, value in os.environ.items() if name != "VLLM_API_KEY"}
    assert subprocess.run(["sh", "-c", line], env=clean, capture_output=True, check=False).returncode
    done = subprocess.run(["sh", "-c", line], env=clean | {"VLLM_API_KEY": "set"}, capture_output=True, check=True)
    assert done.stdout == "".join(f"{word}\0" for word in words or [""]).encode()


# --- older tutorials ---

DRAFT = ["--speculative-model", "D", "--num-speculative-tokens", "5"]
NGRAM = ["--speculative-model", "[ngram]", "--num-speculative-tokens", "5", "--ngram-prompt-lookup-max", "4"]
NGRAM_NOW = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 1}'
LEGACY: list[tuple[list[str], list[str], str]] = [
    (OLD, [], "python -m vllm.entrypoints.openai.api_server -> vllm serve"),
    (["vllm", "serve", "--model=M"], [], "--model M -> vllm serve M"),
    (OLD + DRAFT, ["--speculative-config", '{"model": "D", "num_speculative_tokens": 5}'],
     '--speculative-model D -> "model": "D" in --speculative-config\n'
     '--num-speculative-tokens 5 -> "num_speculative_tokens": 5 in --speculative-config'),
    (["vllm", "serve", "M", *NGRAM], ["--speculative-config", NGRAM_NOW],
     '--speculative-model [ngram] -> "method": "ngram" in --speculative-config'),
    (
        ["vllm", "serve", "M", "-tp", "1", "--speculative_model=[ngram]", "--num_speculative_tokens=5", "--seed", "42",
         "--ngram_prompt_lookup_max", "4", "--use-v2-block-manager", "--port", "9001"],
        ["-tp", "1", "--speculative-config", NGRAM_NOW, "--seed", "42", "--port", "9001"],
        '"prompt_lookup_min": 1 is added',
    ),
    (["vllm", "serve", "M", *NGRAM, "--ngram-prompt-lookup-min", "2"],
     ["--speculative-config", NGRAM_NOW.replace("1}", "2}")],
     '--ngram-prompt-lookup-min 2 -> "prompt_lookup_min": 2'),
    (["vllm", "serve", "M", *DRAFT, "--speculative-draft-tensor-parallel-size", "1", "--speculative-max-model-len=99"],
     ["--speculative-config",
      '{"model": "D", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1, "max_model_len": 99}'],
     '--speculative-max-model-len 99 -> "max_model_len": 99'),
    (["vllm", "serve", "M", *DRAFT, "--speculative-model-quantization", "awq"],
     ["--speculative-config", '{"model": "D", "num_speculative_tokens": 5, "quantization": "awq"}'],
     '--speculative-model-quantization awq -> "quantization": "awq"'),
    (["vllm", "serve", "M", *DRAFT, "--speculative-disable-by-batch-size", "8"],
     ["--speculative-config", '{"model": "D", "num_speculative_tokens": 5, '
      '"num_speculative_tokens_per_batch_size": [[1, 7, 5], [8, 8, 0]]}'],
     '--speculative-disable-by-batch-size 8 -> "num_speculative_tokens_per_batch_size": [[1, 7, 5], [8, 8, 0]]'),
    (["vllm", "serve", "M", *DRAFT, "--spec-decoding-acceptance-method", "typical_acceptance_sampler",
      "--typical-acceptance-sampler-posterior-alpha", "0.3"],
     ["--speculative-config", '{"model": "D", "num_speculative_tokens": 5}'], "changed the output"),
    (["vllm", "serve", "M", *DRAFT, "--spec-decoding-acceptance-method=rejection_sampler"],
     ["--speculative-config", '{"model": "D", "num_speculative_tokens": 5}'], "does anyway"),
    (["vllm", "serve", "M", "--disable-logprobs-during-spec-decoding", "False", "--max-logprobs", "3"],
     ["--max-logprobs", "3"], "logprobs are computed"),
    (["vllm", "serve", "M", "--num-lookahead-slots=4", "--speculative-disable-mqa-scorer"], [], "is left out"),
    (["vllm", "serve", "M", "-sc", NGRAM_NOW, "--x"], ["--speculative-config", NGRAM_NOW, "--x"],
     "not known here and passed on as it is: --x"),
    (["vllm", "serve", "M", '--speculative-config={"method":"ngram"}'],
     ["--speculative-config", '{"method":"ngram"}'], ""),
    (["vllm", "serve", "M", "--speculative-config", '{"model": "D"}', "--num-speculative-tokens", "2"],
     ["--speculative-config", '{"model": "D", "num_speculative_tokens": 2}'], "--num-speculative-tokens 2 -> "),
    (["vllm", "serve", "M", "--speculative-config", '{"model": "[ngram]", "num_speculative_tokens": 2}'],
     ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'], '-> "method": "ngram"'),
    (["vllm", "serve", "M", "--speculative-config", '{"model": "D", "acceptance_method": "x", "disable_logprobs": 1}'],
     ["--speculative-config", '{"model": "D"}'], "acceptance_method is left out"),
    (["vllm", "serve", "M", "--speculative-config.method", "ngram", "--spec-tokens=3"],
     ["--speculative-config.method", "ngram", "--spec-tokens=3"], ""),
    (["VLLM_USE_V1=0", "/opt/bin/python3.11", *OLD[1:]], [], "VLLM_USE_V1 is left out"),
    (["vllm", "serve", "M", "--api-key", "k"], [], "VLLM_API_KEY"),
    (["vllm", "serve", "M", "--api-key", "k", "l"], ["--api-key", "k", "l"], ""),
    (["vllm", "serve", "M", *DRAFT, "--speculative-draft-tensor-parallel-size=1", "-tp", "4"],
     ["--speculative-config", '{"model": "D", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}',
      "-tp", "4"],
     "is 1 beside the target's 4: vLLM 0.32.0 refuses that"),
    (["vllm", "serve", "M", "--device", "cuda", "--swap-space=16", "--disable-log-requests", "--seed", "1"],
     ["--seed", "1"], "--device is left out: vLLM finds it out\n--swap-space is left out"),
    (["vllm", "serve", "M", "--guided_decoding_backend=xgrammar"], ["--structured-outputs-config.backend=xgrammar"],
     "--guided-decoding-backend -> --structured-outputs-config.backend"),
    (["vllm", "serve", "M", "--task", "generate"], ["--task", "generate"], "is passed on, and vLLM 0.32.0 refuses it"),
    (["vllm", "serve", "M", "--tensor-paralel-size=2"], ["--tensor-paralel-size=2"],
     "not known here and passed on as it is: --tensor-paralel-size (did you mean --tensor-parallel-size?)"),
    (["vllm", "serve", "M", "-sc", '{"method": "medsa", "model": "D"}'],
     ["--speculative-config", '{"method": "medsa", "model": "D"}'], "passed on: did you mean medusa?"),
]  # fmt: skip


REFUSED_BY_THE_REAL_ONE = {"--x", "--task", "--tensor-paralel-size=2"}


@pytest.mark.parametrize(("words", "flags", "said"), LEGACY)
def test_old_commands(words: list[str], flags: list[str], said: str) -> None:
    made = translate(words, NEWEST)
    assert made.words == ("vllm", "serve", "M", *flags)
    assert said in "\n".join(made.notes)
    assert said or not made.notes
    assert set(configs(made.words)) <= recorded("speculative_config", "0.32.0")
    again = translate(made.words, NEWEST)
    assert again.words == made.words
    assert not any("->" in note or "left out" in note for note in again.notes)


def test_old_commands_keep_their_environment() -> None:
    made = translate(["CUDA_VISIBLE_DEVICES=0,1", "VLLM_USE_V1=0", *OLD, "--api-key=k"], (0, 9, 2))
    assert made.env == {"CUDA_VISIBLE_DEVICES": "0,1", "VLLM_USE_V1": "0", "VLLM_API_KEY": "k"}
    assert shell(made) == 'CUDA_VISIBLE_DEVICES=0,1 VLLM_USE_V1=0 VLLM_API_KEY="${VLLM_API_KEY:?}" vllm serve M'


def test_old_commands_for_old_releases() -> None:
    words = ["vllm", "serve", "M", *DRAFT, "--speculative-disable-by-batch-size", "8"]
    assert configs(translate(words, (0, 9, 2)).words)["disable_by_batch_size"] == 8
    for version in ((0, 12, 0), (0, 23, 0)):
        made = translate(words, version)
        assert configs(made.words) == {"model": "D", "num_speculative_tokens": 5}
        assert "is left out" in "\n".join(made.notes)
    assert "refuses plain draft models" in "\n".join(translate(words, (0, 12, 0)).notes)


@pytest.mark.parametrize(
    "words",
    [
        [], ["ls"], ["vllm"], ["vllm", "bench"], ["python", "x.py"], ["python", "-m"], ["vllm", "serve"],
        ["vllm", "serve", "--port", "1"], ["vllm", "serve", "M", "--model", "N"], ["vllm", "serve", "--model"],
        ["vllm", "serve", "M", "--speculative-model"], ["vllm", "serve", "M", "--speculative-model", "--x"],
        ["vllm", "serve", "M", "--speculative-model="], ["vllm", "serve", "M", "--num-speculative-tokens", "5"],
        ["vllm", "serve", "M", "--num-speculative-tokens", "five"], ["vllm", "serve", "M", *NGRAM[:-2]],
        ["vllm", "serve", "M", *NGRAM, "--ngram-prompt-lookup-min", "5"], ["vllm", "serve", "M", *DRAFT[:2]],
        ["vllm", "serve", "M", *DRAFT, "--num-speculative-tokens", "6"],
        ["vllm", "serve", "M", *NGRAM, "--spec-tokens=3"],
        ["vllm", "serve", "M", "--speculative-config", "{"], ["vllm", "serve", "M", "--speculative-config", "[]"],
        ["vllm", "serve", "M", "--speculative-config"], ["vllm", "serve", "M", "--speculative-config", "[" * 99999],
        ["vllm", "serve", "M", "-sc", "{}", "-sc", "{}"], ["vllm", "serve", "M", "--api-key"],
        ["vllm", "serve", "M", "-sc", '{"model": "E"}', *DRAFT],
        ["vllm", "serve", "M", "-sc", '{"disable_by_batch_size": 1}'],
        ["vllm", "serve", "M", *DRAFT, "--spec-decoding-acceptance-method", "x"],
        ["vllm", "serve", "M", *DRAFT, "--speculative-disable-by-batch-size", "1"],
    ],
)  # fmt: skip
def test_malformed_old_commands(words: list[str]) -> None:
    with pytest.raises(OptionError):
        translate(words, NEWEST)


@pytest.mark.parametrize(
    ("words", "version", "message"),
    [
        (["--speculative-modle", "D"], NEWEST, "--speculative-modle is no flag of vLLM .*mean --speculative-model"),
        (["--ngram-prompt-lookup-mx=4"], NEWEST, "mean --ngram-prompt-lookup-max"),
        (["--num-speculative-token=4"], (0, 9, 0), "mean --num-speculative-tokens"),
        (["--spec-tokens", "3"], (0, 21, 0), "from 0.22.0 on; use --speculative-config"),
        (["-sc", '{"num_speculative_tokns": 5}'], NEWEST, "'num_speculative_tokns' .* mean num_speculative_tokens"),
        (["-sc", '{"model": "D", "tensor_parallel_size": 2}'], NEWEST, "mean draft_tensor_parallel_size"),
        (["--speculative-config.methd", "ngram"], NEWEST, "mean method"),
        (["-sc", '{"use_heterogeneous_vocab": true}'], (0, 24, 0), "came with 0.25.0; leave it out or upgrade"),
        (["-sc", '{"speculative_token_tree": "x"}'], NEWEST, "ended with 0.21.0; leave it out"),
        (["--speculative-model", "ibm-fms/x-accelerator"], NEWEST, "MLP speculator, which vLLM 0.32.0 does not run"),
        ([*DRAFT, "--spec-model", "E"], NEWEST, "--speculative-model D is of old vLLM and --spec-model of today's"),
        (["--num-speculative-tokens", "5"], NEWEST, "^--num-speculative-tokens 5 without a speculative model"),
    ],
)  # fmt: skip
def test_what_vllm_refuses_is_refused_here(words: list[str], version: tuple[int, int, int], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        translate(["vllm", "serve", "M", *words], version)


def test_a_newer_vllm_may_know_more() -> None:
    words = ["vllm", "serve", "M", "--spec-new", "1", "-sc", '{"newer": 1}']
    made = translate(words, (0, 33, 0))
    assert made.words == ("vllm", "serve", "M", "--spec-new", "1", "--speculative-config", '{"newer": 1}')
    assert [note.split(":")[0].split(" (")[0] for note in made.notes] == [
        "'newer' in --speculative-config is not known here and passed on", "not known here and passed on as it is",
    ]  # fmt: skip


def test_tables_of_old_flags_and_keys_are_what_was_recorded() -> None:
    for release in RELEASES:
        version = version_of(release)
        flags, keys = recorded("flags", release), recorded("speculative_config", release)
        for flag, since in {flag: row[0] for table in (GONE, RENAMED, REFUSED) for flag, row in table.items()}.items():
            assert (flag in flags) == (version < since), (flag, release)
        assert all(new in flags for since, new in RENAMED.values() if version >= since and "." not in new)
        assert {flag for flag, since in NEW_FLAGS.items() if version >= since} == {
            flag for flag in flags if flag.startswith("--spec")
        }
        mine = {key for since, words in KEYS.items() if version >= since for key in words.split()}
        mine -= {key for key, since in ENDED.items() if version >= since}
        internal = {"target_model_config", "target_parallel_config", "tensor_parallel_size"}
        assert keys - internal <= mine, release
        assert mine - keys <= {*OLD_KEYS, "disable_by_batch_size"}, release
    assert recorded("flags", "0.32.0") | {"--model"} >= KNOWN
    assert recorded("method", "0.32.0") >= set(METHODS)


OLD_FLAGS = [
    "--speculative-model", "--num-speculative-tokens", "--ngram-prompt-lookup-max", "--speculative_config",
    "--use-v2-block-manager", "--speculative-disable-by-batch-size", "--api-key", "--model", "--port", "[ngram]", "D",
    "4", "2", "--spec-decoding-acceptance-method", "rejection_sampler", '{"model": "ngram"}', "--x=y", "-tp",
    "--speculative-model=[ngram]", "--num-speculative-tokens=5", "--ngram_prompt_lookup_max=3", "A=b",
]  # fmt: skip


@settings(max_examples=500)
@given(
    words=st.lists(st.sampled_from(OLD_FLAGS) | texts, max_size=12),
    start=st.sampled_from([["vllm", "serve", "M"], OLD]),
    version=st.sampled_from([row.since for row in VERSIONS]),
)
def test_translation_is_idempotent(words: list[str], start: list[str], version: tuple[int, int, int]) -> None:
    try:
        made = translate([*start, *words], version)
    except OptionError:
        return
    assert translate(made.words, version).words == made.words


@given(
    drafter=st.sampled_from(["none", "ngram", "model", "eagle3", "auto"]), k=st.integers(1, 9), port=st.integers(1, 9),
    version=st.sampled_from([row.since for row in VERSIONS]), extra=st.lists(st.sampled_from(["--a", "b", "--c=d"])),
)  # fmt: skip
def test_todays_commands_stay_as_they_are(
    drafter: str, k: int, port: int, version: tuple[int, int, int], extra: list[str]
) -> None:
    options = Options(
        model="M", draft="D" if drafter != "none" else None, drafter=drafter, num_speculative_tokens=k, port=port,
        schedule=PLAN, extra=tuple(extra),
    )  # fmt: skip
    try:
        made = command(options, version)
    except OptionError:
        return
    assert translate(made.words, version).words == made.words


# --- the real one ---

PYTHON = Path(os.environ.get("FLASHSPEC_VLLM", "/nonexistent")) / "bin" / "python"
SCRIPT = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup as lookup

parser = FlexibleArgumentParser()
ServeSubcommand().subparser_init(parser.add_subparsers(dest="command"))
for case in json.load(sys.stdin):
    try:
        args = parser.parse_args(case["words"][1:])
        result = {"model": args.model_tag, "json": args.speculative_config}
        args.model = args.model_tag  # as vllm serve does
        if case["build"]:
            built = AsyncEngineArgs.from_cli_args(args).create_engine_config().speculative_config
            if built is not None:
                keys = ["method", *json.loads(case["keys"])]
                result["built"] = {key: getattr(built, key) for key in keys}
                if ranges := built.num_speculative_tokens_per_batch_size:
                    result["lookup"] = lookup(ranges, 70, built.num_speculative_tokens)
    except (Exception, SystemExit) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    print("RESULT" + json.dumps(result), flush=True)
"""


def real_cases() -> dict[str, tuple[tuple[str, ...], bool]]:
    """Name -> (words, whether the configuration is built as well); else they are parsed only."""
    own, other = str(MODELS / "smollm2"), str(MODELS / "qwen-coder-0.5b")
    parsed = {name: (command(Options(model="M", **chosen), NEWEST).words, False)
              for name, (chosen, release, _) in CASES.items()}  # fmt: skip
    everything = Options(
        model="M", drafter="ngram", tensor_parallel=2, pipeline_parallel=2, nodes=2, gpu_memory_utilization=0.5,
        max_model_len=99, max_batch=3, dtype="float32", quantization="awq", host="::1", port=8001,
        served_model_name="n", trust_remote_code=True, enforce_eager=True,
    )  # fmt: skip
    parsed["everything"] = (command(everything, NEWEST).words, False)
    parsed |= {f"old {i}": (translate(words, NEWEST).words, False) for i, (words, _, _) in enumerate(LEGACY)
               if not REFUSED_BY_THE_REAL_ONE & {*words}}  # fmt: skip
    built: dict[str, dict[str, Any]] = {
        "none": {"drafter": "none"},
        "ngram": {"drafter": "ngram", "verification": "block"},
        "schedule": {"drafter": "ngram", "schedule": PLAN},
        "model": {"drafter": "model", "draft": own, "probabilistic_drafts": True, "verification": "block"},
        "model, schedule": {"drafter": "model", "draft": own, "schedule": PLAN},
        "eagle3": {"drafter": "eagle3", "draft": own},
        "suffix": {"drafter": "suffix"},
    }
    if Path(other).exists():
        built["translated"] = {"drafter": "translated", "draft": other, "probabilistic_drafts": True}
    common: dict[str, Any] = {
        "model": own,
        "dtype": "float32",
        "max_model_len": 512,
        "enforce_eager": True,
        "max_batch": 64,
    }
    return parsed | {
        f"built {name}": (command(Options(**common, **more), NEWEST).words, True) for name, more in built.items()
    }


@pytest.mark.vllm
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON.exists(), reason="FLASHSPEC_VLLM names no vLLM (scripts/setup_vllm_cpu)")
def test_the_real_vllm_understands_every_command() -> None:
    if not (MODELS / "smollm2").exists():
        pytest.skip("no SmolLM2 folder; examples/get_models.py makes one")
    cases = real_cases()
    sent = [
        {"words": words, "build": build, "keys": json.dumps(list(configs(words)))} for words, build in cases.values()
    ]
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [str(PYTHON), "-c", SCRIPT], input=json.dumps(sent), capture_output=True, text=True, env=env, timeout=550,
        check=False,
    )  # fmt: skip
    results = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert len(results) == len(cases), done.stderr[-2000:]
    for (case, (words, build)), result in zip(cases.items(), results, strict=True):
        if case == "built suffix" and "arctic" in result.get("error", "").lower():
            continue  # what the note on suffix says
        assert "error" not in result, (case, result)
        if "." not in "".join(words[3:4]):
            assert (result["json"] or {}) == configs(words), case
        assert result["model"] == words[2], case
        if build and configs(words):
            expected = configs(words)
            expected.pop("num_speculative_tokens_per_batch_size", None)
            assert {key: result["built"][key] for key in expected} == expected, case
    lookup = results[list(cases).index("built schedule")]["lookup"]
    assert lookup == [0] + [5] * 4 + [2] * 12 + [0] * 54


@pytest.mark.parametrize(
    ("folder", "dtype", "shown"),
    [("vllm-0.32.0+cpu", None, "float32"), ("vllm-0.32.0", None, "auto"), ("vllm-0.32.0+cpu", "bfloat16", "bfloat16")],
)
def test_on_a_cpu_the_dtype_is_the_local_engines(
    folder: str, dtype: str | None, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "bin" / "vllm"
    (tmp_path / "lib/python3.11/site-packages" / f"{folder}.dist-info").mkdir(parents=True)
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("FLASHSPEC_VLLM", str(tmp_path))
    made = launch.planned(launch.options_of("org/model", dtype=dtype), lambda line: None)
    assert made.words[made.words.index("--dtype") + 1] == shown
    assert any("for CPUs" in note for note in made.notes) is (shown == "float32")
