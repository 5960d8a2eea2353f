"""flashspec plan, as it is typed: by formula, from configs alone, measured, and every kind of bad input."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import Ran
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from flashspec.cli import plan_facts
from flashspec.planner.speed import expected_speedup
from flashspec.vllm.command import Options

Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """``target``, ``draft`` (another model of its vocabulary), ``bare`` (a config.json alone) and ``broken``."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    for seed, name in enumerate(("target", "draft")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=16 * (2 - seed), intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, eos_token_id=2, bos_token_id=1,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for name, text in (("bare", (root / "target" / "config.json").read_text()), ("broken", "{")):
        (root / name).mkdir()
        (root / name / "config.json").write_text(text)
    (root / "mine.jsonl").write_text('{"prompt": "one two one two one two"}\n{"prompt": "a b a b a b a b"}\n')
    return root


@pytest.fixture
def run(models: Path, monkeypatch: pytest.MonkeyPatch, flashspec_command: Run) -> Run:
    """``flashspec plan`` in the folder of the models."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("FLASHSPEC_CACHE", str(models / "cache"))
    monkeypatch.setattr(plan_facts, "GENERATED", 12)
    monkeypatch.setattr(plan_facts, "BATCHES", (1, 2))
    return partial(flashspec_command, "plan")


def test_by_formula(run: Run) -> None:
    ran = run("--acceptance", "0.7", "--cost-ratio", "0.05")
    lines = ran.out.splitlines()
    assert lines[0] == "Yes: about 2.35 x with k = 5 (model)."
    assert "by formula" in lines[1]
    cells = [line.replace(" ", "").strip("│").split("│") for line in lines if line.startswith("│")]
    assert ["3", "2.53", "0.15", "1.00", "0.00", "2.20", "13%"] in cells
    assert "k = 5 pays from an acceptance of 20% on; here it is 70%." in ran.out
    assert "assumed: Scoring k + 1 tokens costs the target what one costs" in ran.out
    assert "Memory" not in ran.out


def test_json_has_the_same_numbers(run: Run) -> None:
    answer = run("--acceptance", "0.7", "--cost-ratio", "0.05", "--json").answer
    assert answer["plan"]["expected_speedup"] == pytest.approx(expected_speedup(0.7, 0.05, 5))
    assert answer["plan"]["num_speculative_tokens"] == 5
    assert answer["plan"]["memory"] is None
    for row in answer["table"]:
        k = row["num_speculative_tokens"]
        assert row["speedup"] == pytest.approx(expected_speedup(0.7, 0.05, k))
        assert expected_speedup(row["break_even_acceptance"], 0.05, k) == pytest.approx(1)


def test_a_given_k_and_an_n_gram_drafter(run: Run) -> None:
    answer = run("--acceptance", "0.5", "--cost-ratio", "0", "--num-speculative-tokens", "20", "--json").answer
    assert answer["plan"]["drafter"] == "ngram"
    assert answer["plan"]["num_speculative_tokens"] == 20
    assert [row["num_speculative_tokens"] for row in answer["table"]] == [1, 2, 3, 4, 5, 6, 8, 12, 16, 20]


def test_costs_alone_say_what_acceptance_it_takes(run: Run) -> None:
    ran = run("--cost-ratio", "0.2")
    assert ran.out.startswith("It depends: k = 1 pays from an acceptance of 20% on.")
    assert run("--cost-ratio", "0.2", "--json").answer["table"][0]["speedup"] is None


def test_a_config_alone(run: Run) -> None:
    ran = run("--model", "bare", "--draft", "draft", "--acceptance", "0.6")
    assert ran.out.startswith("Hardly: about ")
    assert "It takes " in ran.out.splitlines()[0]
    for name in ("target's weights", "draft model's weights", "keys and values", "workspace, at most", "together"):
        assert name in ran.out
    assert "assumed: Nothing was measured: bare has no weights." in ran.out
    assert "the ratio of the weights" in ran.out
    answer = run("--model", "bare", "--draft", "draft", "--acceptance", "0.6", "--json").answer
    memory = answer["plan"]["memory"]
    assert answer["table"][0]["draft"] == pytest.approx(memory["draft_weights"] / memory["weights"])
    assert not answer["is_measured"]


def test_a_config_alone_with_nothing_else_known(run: Run) -> None:
    assert "It depends: " in run("--model", "bare").out.splitlines()[0]
    assert "n-grams, which cost next to nothing" in run("--model", "bare").out


def test_too_little_memory_and_the_ways_out(run: Run) -> None:
    words = ("--model", "bare", "--draft", "draft", "--device", "cuda", "--batch", "64", "--acceptance", "0.9")
    needed = run(*words, "--memory", "80", "--json").answer["plan"]["memory"]["needed"]
    little = (needed - 1) / 2**30
    ran = run(*words, "--memory", repr(little))
    assert ran.out.startswith("No: it needs ")
    assert "it fits after the first way out below." in ran.out.splitlines()[0]
    answer = run(*words, "--memory", repr(little), "--json").answer
    assert [way["fits"] for way in answer["ways_out"]] == [True] * len(answer["ways_out"])
    assert answer["ways_out"][0]["change"] == "a context of 256 tokens"
    assert answer["ways_out"][0]["saved"] == needed - answer["ways_out"][0]["needed"]
    assert not answer["plan"]["memory"]["fits"]


def test_context_batch_and_output_change_the_memory(run: Run) -> None:
    def cache(*words: str) -> int:
        found: int = run("--model", "bare", "--no-measure", "--json", *words).answer["plan"]["memory"]["kv_cache"]
        return found

    slot = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head_dim, float32
    assert cache() == (512 + 1) * slot
    assert cache("--batch", "3") == 3 * (512 + 1) * slot
    assert cache("--context", "100", "--max-tokens", "20") == (256 + 1) * slot


def test_measured_with_a_draft_model(run: Run) -> None:
    words = ("--model", "target", "--draft", "target", "--json")
    answer = run(*words, "--dtype", "float32").answer
    assert answer["is_measured"]
    assert answer["measured_acceptance"]["acceptance_rate"] == 1  # it drafts for itself
    assert [row["num_speculative_tokens"] for row in answer["table"]] == [1, 2, 3, 4, 5, 6, 8]
    assert all(row["verify"] > 0 and row["draft"] > 0 for row in answer["table"])
    assert [row["batch"] for row in answer["by_batch"]] == [1, 2]
    assert "temperature 0 on 3 short built-in prompts" in answer["assumed"][-1]
    again = run(*words, "--batch", "3", "--acceptance", "0", "--prompts", "mine.jsonl").answer
    assert again["plan"]["drafter"] == "none"
    assert [row["batch"] for row in again["by_batch"]] == [1, 2, 3]
    assert again["measured_acceptance"] is None


def test_measured_with_n_grams_on_the_users_prompts(run: Run) -> None:
    ran = run("--model", "target", "--prompts", "mine.jsonl", "--num-speculative-tokens", "10", "--temperature", "0.5")
    assert ran.code == 0
    assert "measured, batch 1" in ran.out
    assert "The acceptance at temperature 0.5 on the prompts given." in ran.out
    answer = run("--model", "target", "--prompts", "mine.jsonl", "--json").answer
    assert answer["table"][-1]["draft"] < 0.5  # no second model


def test_a_given_cost_ratio_holds_at_measured_costs(run: Run) -> None:
    words = ("--model", "target", "--cost-ratio", "0.25", "--acceptance", "0.5", "--measure", "--json")
    for batch in ("1", "2"):
        rows = run(*words, "--batch", batch).answer["table"]
        assert [row["draft"] for row in rows] == pytest.approx([0.25 * row["num_speculative_tokens"] for row in rows])
    unmeasured = run(*(word for word in words if word != "--measure")).answer
    assert not unmeasured["is_measured"]
    assert "Nothing was measured: the acceptance and the cost ratio were given." in unmeasured["assumed"]


def test_what_does_not_fit_is_not_measured(run: Run) -> None:
    answer = run("--model", "target", "--memory", "0.001", "--json").answer
    assert "Nothing was measured: it would not fit." in answer["assumed"]
    assert answer["verdict"].startswith("No: it needs ")


def test_a_quantized_config_and_one_without_a_dtype(run: Run, models: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models / "bare", tmp_path / "odd"))
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))
    assumed = " ".join(run("--model", str(folder), "--json").answer["assumed"])
    assert "is quantized" in assumed
    assert "does not say which dtype its weights have" in assumed


ON_GPUS = ("--model", "target", "--draft", "draft", "--gpus", "2xH100", "--context", "256")


def test_for_gpus_that_are_not_here(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    ran = run(*ON_GPUS, "--concurrency", "32", "--acceptance", "0.9")
    assert ran.out.startswith("By formula, nothing measured. ")
    assert "on each GPU; 72.00 GiB are free." in ran.out.splitlines()[0]
    assert "By draft length, by formula, batch 32" in ran.out
    assert "Memory of each GPU, by formula" in ran.out
    assert "By formula at least 1024 sequences of 256 tokens fit at once." in ran.out
    assert "assumed: Nothing was measured. A forward takes max(weights / bandwidth," in ran.out
    assert "assumed: H100-SXM by its data sheet: 80 GiB, 3.35 TB/s, 989 TFLOP/s" in ran.out
    assert "To serve it: flashspec serve --backend vllm --model target" in ran.out
    first = [line.split("│")[1].strip() for line in ran.out.splitlines() if line.startswith("│")]
    assert first[:9] == [str(k) for k in range(9)]


def test_for_gpus_as_json(run: Run) -> None:
    words = (*ON_GPUS, "--cost-ratio", "0.05", "--acceptance", "0.9", "--json")
    answer = run(*words, "--concurrency", "32").answer
    assert answer == run(*words, "--batch", "32").answer == run(*words, "--batch", "32", "--concurrency", "32").answer
    gpus = answer["gpus"]
    assert (gpus["source"], gpus["count"], gpus["concurrency"], gpus["context"]) == ("formula", 2, 32, 256)
    assert gpus["gpu"] == {"name": "H100-SXM", "memory": 80, "bandwidth": 3.35, "tflops": 989}
    assert not answer["is_measured"]
    ranges = [tuple(part) for part in gpus["schedule"]]
    assert (ranges[0][0], ranges[-1][1]) == (1, 32)
    assert ranges[0][2] == answer["plan"]["num_speculative_tokens"] > 0  # so small a model is never busy computing
    assert Options(model="target", schedule=tuple(ranges)).schedule == tuple(ranges)
    assert shlex.split(gpus["serve"]) == [
        "flashspec", "serve", "--backend", "vllm", "--model", "target", "--draft", "draft", "--schedule",
        json.dumps(gpus["schedule"]), "--tensor-parallel", "2", "--max-batch", "32",
    ]  # fmt: skip
    memory = answer["plan"]["memory"]
    parameters = sum(tensor.numel() for tensor in LlamaForCausalLM.from_pretrained("target").parameters())
    assert memory["weights"] == pytest.approx(parameters, rel=1e-4)  # two bytes each, on two GPUs; and some buffers
    assert memory["kv_cache"] == 32 * 256 * (2 * 2 * 2 * 8) * 2 // 2
    assert run("--model", "bare", "--no-measure", "--json").answer["gpus"] is None


def test_for_gpus_where_nothing_pays_or_nothing_is_known(run: Run) -> None:
    words = (*ON_GPUS[:2], "--gpus", "L4", "--json")
    assert (
        "--drafter none --tensor-parallel 1 --max-batch 256"
        in (run(*words, "--acceptance", "0", "--batch", "1000").answer["gpus"]["serve"])
    )
    unknown = run(*words).answer
    assert unknown["verdict"].startswith("By formula, nothing measured. It depends: k = 1 ")
    assert (unknown["gpus"]["schedule"], unknown["gpus"]["crossover"]) == (None, None)
    assert "--drafter ngram --tensor-parallel 1" in unknown["gpus"]["serve"]
    assert unknown["table"][1]["break_even_acceptance"] is not None
    given = run(*words, "--num-speculative-tokens", "10", "--dtype", "float16").answer
    assert "--num-speculative-tokens 10 --dtype float16" in given["gpus"]["serve"]
    assert [row["num_speculative_tokens"] for row in given["table"]] == [*range(9), 10]


def test_for_gpus_that_are_too_few(run: Run) -> None:
    words = (*ON_GPUS[:2], "--gpus", "L4", "--batch", "64", "--memory", "0.05")
    ran = run(*words)
    assert ran.out.startswith("By formula, nothing measured. No: it needs ")
    assert "sequences of 512 tokens fit" in ran.out.splitlines()[0]


def test_what_the_formula_overcounts_is_said(run: Run, models: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models / "bare", tmp_path / "odd"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 8, "kv_lora_rank": 0}))
    assumed = " ".join(run("--model", str(folder), "--gpus", "L4", "--json").answer["assumed"])
    assert "is a mixture of experts and is counted as if each token needed all of them" in assumed
    assert "latent attention" not in assumed
    assert "mixture" not in " ".join(run("--model", str(folder), "--no-measure", "--json").answer["assumed"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to plan with; give --acceptance and --cost-ratio (0.7 and 0.05, say), or --model"),
        (["--acceptance", "0.7"], "--acceptance needs --cost-ratio"),
        (["--acceptance", "1.1", "--cost-ratio", "0"], "acceptance is 1.1; it must be from 0 to 1"),
        (["--acceptance", "nan", "--cost-ratio", "0"], "acceptance is nan; it must be from 0 to 1"),
        (["--acceptance", "0.7", "--cost-ratio", "-1"], "cost ratio is -1; it must be a number from 0"),
        (["--cost-ratio", "0", "--num-speculative-tokens", "257"], "num_speculative_tokens is 257; it must be"),
        (["--cost-ratio", "0", "--num-speculative-tokens", "-1"], "from 0 to 256"),
        (["--cost-ratio", "0", "--batch", "0"], "batch is 0; it must be at least 1"),
        (["--cost-ratio", "0", "--context", "1"], "context is 1; it must be at least 2 tokens"),
        (["--cost-ratio", "0", "--memory", "0"], "memory is 0; it must be a number of GiB above 0"),
        (["--cost-ratio", "0", "--max-tokens", "0"], "max_tokens is 0; it must be"),
        (["--cost-ratio", "0", "--temperature", "-1"], "temperature is -1.0; it must be"),
        (["--cost-ratio", "0", "--draft", "draft"], "--draft draft is given without --model"),
        (["--cost-ratio", "0", "--measure"], "there is nothing to measure without a model; give --model"),
        (["--cost-ratio", "0", "--prompts", "mine.jsonl"], "there is nothing to measure without a model"),
        (["--cost-ratio", "0", "--batch", "2", "--concurrency", "3"], "batch is 2 and concurrency is 3, two names for"),
        (["--cost-ratio", "0", "--concurrency", "0"], "batch is 0; it must be at least 1"),
        (["--cost-ratio", "0", "--gpus", "L4"], "--gpus L4 needs --model"),
        (["--model", "bare", "--gpus", "2xK80"], "gpus is '2xK80'; give a number and a name, such as 2xH100-SXM"),
        (["--model", "bare", "--gpus", "3xL4"], "bare has 4 attention heads (2 of keys and values), which 3 GPUs"),
        (["--model", "bare", "--gpus", "L4", "--measure"], "--gpus plans by formula and measures nothing"),
        (["--model", "bare", "--gpus", "L4", "--prompts", "mine.jsonl"], "--gpus plans by formula"),
        (["--model", "bare", "--gpus", "L4", "--device", "cuda"], "--device cuda is of this machine"),
        (["--model", "bare", "--gpus", "L4", "--dtype", "float32"], "is known for bfloat16 and float16; give one"),
        (["--model", "bare", "--gpus", "L4", "--batch", "1025"], "batch is 1025; with --gpus it is at most 1024"),
        (["--model", "bare", "--gpus", "L4", "--context", "513"], "context is 513, and bare has 512 positions"),
        (["--model", "nowhere"], "there is no model 'nowhere' here"),
        (["--model", "broken"], "cannot load 'broken': "),
        (["--model", "bare", "--measure"], "cannot measure: bare has no weights; leave --measure out"),
        (["--model", "target", "--draft", "bare", "--measure"], "cannot measure: bare has no weights"),
        (["--model", "bare", "--context", "513"], "context is 513, and bare has 512 positions; give at most so many"),
        (["--model", "bare", "--device", "tpu"], "device is 'tpu'; it must be cpu, cuda or cuda:N"),
        (["--model", "bare", "--device", "meta"], "device is 'meta'; it must be cpu, cuda or cuda:N"),
        (["--model", "bare", "--device", "cuda:77"], "give --memory GiB, or --device cpu"),
        (["--model", "bare", "--dtype", "int3"], "dtype is 'int3'; it must be one of float32"),
        (["--model", "target", "--prompts", "no.jsonl"], "cannot read prompts from no.jsonl"),
    ],
)
def test_bad_input_is_one_line_with_the_next_step(run: Run, words: list[str], message: str) -> None:
    ran = run(*words)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.strip().splitlines()) == 1
    assert ran.err.startswith("flashspec: ")
    assert message in ran.err
