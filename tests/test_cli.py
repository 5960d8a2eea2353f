"""The command line on a tiny random model with a real tokenizer: output, statistics, and every kind of bad input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Ran
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> Path:
    """``target`` and ``draft`` of one vocabulary, ``other`` of another."""
    root = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path)
    for seed, name in enumerate(("target", "draft", "other")):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, eos_token_id=2, bos_token_id=1,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(root / name)
        if name == "other":
            tokenizer.add_tokens(["<|mine|>"])
        tokenizer.save_pretrained(root / name)
    return root


@pytest.fixture
def run(models: Path, monkeypatch: pytest.MonkeyPatch, flashspec_command: Run) -> Run:
    """``flashspec`` in the folder of the models."""
    monkeypatch.chdir(models)
    return flashspec_command


def test_generate_streams_the_text_of_the_json(run: Run) -> None:
    words = (
        "generate",
        "数到十: one two",
        "--model",
        "target",
        "--max-tokens",
        "20",
        "--seed",
        "1",
        "--temperature",
        "1",
    )
    plain = run(*words, "--drafter", "none")
    report = json.loads(run(*words, "--draft", "draft", "--json").out)
    assert plain.code == 0
    assert plain.out == report["text"] + "\n"
    assert len(report["tokens"]) == len(report["kinds"]) == 20
    assert report["finish_reason"] == "length"
    assert set(report["timings"]) >= {"ttft", "tpot", "tokens_per_second", "draft", "verify", "sample"}


def test_stats_colours_and_sources_of_the_prompt(run: Run, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Grüße, 世界", encoding="utf-8")
    words = ("--model", "target", "--max-tokens", "8", "--raw")
    from_file = run("generate", "--file", str(prompt), *words)
    from_stdin = run("generate", *words, stdin="Grüße, 世界")
    from_dash = run("generate", "-", *words, stdin="Grüße, 世界")
    from_word = run("generate", "Grüße, 世界", *words, "--stats", "--color-tokens")
    assert from_file.out == from_stdin.out == from_dash.out == from_word.out
    for word in ("acceptance rate", "mean acceptance length", "TTFT", "TPOT", "tokens/s", "draft", "verify", "sample"):
        assert word in from_word.err


def test_stop_strings_and_logprobs(run: Run) -> None:
    words = ("generate", "a b c", "--model", "target", "--max-tokens", "30", "--json")
    whole = json.loads(run(*words, "--logprobs", "2").out)
    assert [entry["token"] for entry in whole["logprobs"]] == whole["tokens"]
    assert all(len(entry["top"]) == 2 for entry in whole["logprobs"])
    stop = whole["text"][10:14]
    cut = json.loads(run(*words, "--stop", stop).out)
    assert cut["text"] == whole["text"][: whole["text"].find(stop)]
    assert cut["finish_reason"] == "stop"


def test_chat_keeps_the_conversation(run: Run) -> None:
    ran = run(
        "chat", "--model", "target", "--max-tokens", "5", "--stats", stdin="hello\n\n/clear\n你好\n/exit\nnever read\n"
    )
    assert ran.code == 0
    assert ran.err.count("acceptance rate") == 2


def test_chat_survives_a_conversation_longer_than_the_context(run: Run) -> None:
    ran = run("chat", "--model", "target", "--max-tokens", "5", stdin=f"{'word ' * 300}\nhello\n")
    assert ran.code == 0
    assert "256 positions" in ran.err
    assert len(ran.out.strip()) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "hi", "--model", "nowhere"], "no model 'nowhere'"),
        (["generate", "hi", "--model", "."], "no config.json"),
        (["generate", "hi", "--model", "missing.gguf"], "no file missing.gguf"),
        (["generate", "hi", "--model", "target", "--top-p", "2"], "top_p is 2.0"),
        (["generate", "hi", "--model", "target", "--temperature", "nan"], "temperature is nan"),
        (["generate", "hi", "--model", "target", "--max-tokens", "0"], "max_tokens is 0"),
        (["generate", "", "--model", "target"], "prompt is empty"),
        (["generate", "--model", "target"], "prompt is empty"),
        (["generate", "x " * 400, "--model", "target"], "256 positions"),
        (["generate", "hi", "--model", "target", "--drafter", "model"], "needs a draft model"),
        (["generate", "hi", "--model", "target", "--draft", "other", "--drafter", "model"], "another vocabulary"),
        (["generate", "hi", "--model", "target", "--draft", "nowhere"], "no model 'nowhere'"),
        (["generate", "hi", "--model", "target", "--num-speculative-tokens", "-3"], "num_speculative_tokens is -3"),
        (["generate", "hi", "--model", "target", "--device", "banana"], "device is 'banana'"),
        (["generate", "hi", "--model", "target", "--dtype", "int3"], "dtype is 'int3'"),
        (["generate", "--file", "nowhere.txt"], "cannot read the prompt"),
        (["generate", "hi", "--drafter", "psychic"], "psychic"),
        (["generate", "hi", "--model", "target", "--raw", "--system", "be kind"], "--system"),
        (["generate", "hi", "--model", "n" * 300 + "/x"], "cannot read or convert"),
        (["generate", "hi", "--model", "~nosuchuser/x"], "cannot read or convert"),
        (["bench", "--prompts", "target/config.json", "--max-tokens", "0"], "max_tokens is 0"),
        (["bench", "--prompts", "target/config.json", "--num-speculative-tokens", "999"], "999"),
        (["bench", "--prompts", "nowhere.jsonl"], "cannot read prompts"),
        (["bench", "--prompts", "target/config.json", "--drafters", "none,psychic"], "psychic"),
    ],
)
def test_bad_input_is_one_clear_message_and_exit_code_2(run: Run, words: list[str], message: str) -> None:
    ran = run(*words)
    assert ran.code == 2
    assert message in ran.err.replace("\n", " ")
    assert "Traceback" not in ran.err
    assert ran.out == ""


def test_unreadable_weights(run: Run, models: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in (models / "target").iterdir():
        (broken / file.name).write_bytes(file.read_bytes()[: 200 if file.suffix == ".safetensors" else None])
    ran = run("generate", "hi", "--model", str(broken))
    assert ran.code == 2
    assert "cannot load" in ran.err
    assert "Traceback" not in ran.err


def test_bench_table_and_json_line(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "echo.jsonl"
    rows = [
        {"id": "a", "task": "echo", "messages": [{"role": "user", "content": "one two one two"}]},
        {"prompt": "x y x"},
    ]
    prompts.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    ran = run("bench", "--model", "target", "--draft", "draft", "--drafters", "ngram,model", "--prompts", str(prompts),
              "--max-tokens", "8", "--hf")  # fmt: skip
    assert ran.code == 0, ran.err
    report = json.loads(ran.out.splitlines()[-1])
    assert report["command"].startswith("flashspec bench")
    assert report["machine"]["threads"] == torch.get_num_threads()
    names = [row["drafter"] for row in report["rows"]]
    assert names == ["none", "ngram", "model", "hf_generate", "hf_prompt_lookup", "hf_assisted"]
    keys = {
        "task", "num_speculative_tokens", "batch", "temperature", "tokens_per_second", "ttft", "tpot", "speedup",
        "mean_acceptance_length", "acceptance_rate", "speedup_hf", "speedup_e2e", "greedy_equal",
    }  # fmt: skip
    for row in report["rows"]:
        assert keys <= set(row)
        assert row["greedy_equal"] is (None if row["drafter"] == "hf_generate" else True)
        assert row["tpot"] > 0
    assert report["rows"][0]["speedup"] == 1.0
    assert any("│ ngram" in line for line in ran.out.splitlines())


def test_bench_keeps_tasks_and_prompts_of_one_name_apart(run: Run, tmp_path: Path) -> None:
    for name, prompt in (("a", "one two"), ("b", "x\u2028y\x85z")):
        rows = [{"id": "same", "task": "same", "prompt": prompt}, {"id": "same", "prompt": prompt * 2}]
        (tmp_path / name).write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8-sig")
    ran = run("bench", "--model", "target", "--drafters", "ngram", "--max-tokens", "4",
              "--prompts", str(tmp_path / "a"), "--prompts", str(tmp_path / "b"))  # fmt: skip
    assert ran.code == 0, ran.err
    rows = json.loads(ran.out.splitlines()[-1])["rows"]
    assert [row["drafter"] for row in rows] == ["none", "ngram"] * 2
    assert len({row["ttft"] for row in rows}) == 4


def test_bench_refuses_a_prompt_that_does_not_fit_before_it_measures(run: Run, tmp_path: Path) -> None:
    (tmp_path / "long").write_text(json.dumps({"id": "p7", "prompt": "word " * 250}), encoding="utf-8")
    ran = run("bench", "--model", "target", "--prompts", str(tmp_path / "long"))
    assert ran.code == 2
    assert "p7" in ran.err
    assert "256 positions" in ran.err


def test_text_and_spinner_do_not_mix_on_a_terminal(models: Path, tmp_path: Path) -> None:
    """stdout to a file, stderr on a terminal: the file holds all the text."""
    words = [sys.executable, "-m", "flashspec.cli", "generate", "a [b] c", "--model", str(models / "target"),
             "--max-tokens", "12"]  # fmt: skip
    master, slave = os.openpty()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=slave, stdin=subprocess.DEVNULL, env=environment)
        os.close(slave)
        with contextlib.suppress(OSError):  # the terminal is gone when the process is
            while os.read(master, 4096):
                pass
        os.close(master)
        assert process.wait() == 0
    plain = subprocess.run([*words, "--json"], capture_output=True, check=True, text=True, env=environment)
    assert (tmp_path / "out").read_text(encoding="utf-8") == json.loads(plain.stdout)["text"] + "\n"


@pytest.mark.parametrize("line", ["not json", "[1]", '{"id": 3}'])
def test_bench_names_the_bad_line(run: Run, tmp_path: Path, line: str) -> None:
    prompts = tmp_path / "bad.jsonl"
    prompts.write_text('{"prompt": "fine"}\n' + line, encoding="utf-8")
    ran = run("bench", "--model", "target", "--prompts", str(prompts))
    assert ran.code == 2
    assert "line 2" in ran.err


def test_ctrl_c_keeps_what_was_generated(models: Path) -> None:
    words = [sys.executable, "-m", "flashspec.cli", "generate", "hi", "--model", str(models / "target"), "--json",
             "--max-tokens", "240", "--ignore-eos", "--drafter", "none"]  # fmt: skip
    slow = "import time, flashspec.backends.hf as hf; old = hf.HFTarget.score\n" \
           "def score(*a, **k): time.sleep(0.1); return old(*a, **k)\n" \
           "hf.HFTarget.score = score\nimport sys; from flashspec import cli; cli.main()"  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", slow, *words[3:]], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if "packing" in line:
                break
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    report = json.loads(out)
    assert report["finish_reason"] == "abort"
    assert 0 < len(report["tokens"]) < 240
