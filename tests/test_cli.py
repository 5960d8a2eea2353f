"""The command line on a tiny random model with a real tokenizer: output, statistics, and every kind of bad input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from conftest import Ran
from huggingface_hub import constants
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from vllm_process import running, standin

from flashspec.errors import ModelError
from flashspec.weights import check_hub

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
    drafting = ("--draft", "draft", "--drafter", "model", "--num-speculative-tokens", "3")
    from_word = run("generate", "Grüße, 世界", *words, *drafting, "--stats", "--color-tokens")
    assert from_file.out == from_stdin.out == from_dash.out == from_word.out
    for word in ("acceptance rate", "mean acceptance length", "TTFT", "TPOT", "tokens/s", "draft", "verify", "sample"):
        assert word in from_word.err
    assert "accepted recovered bonus" not in from_word.err  # a legend is for colours, and a pipe has none
    undrafted = run("generate", "hi", *words, "--stats", "--drafter", "none")
    assert "nothing was drafted" in undrafted.err
    assert "acceptance" not in undrafted.err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_colours_come_with_their_legend_on_a_terminal(models: Path, tmp_path: Path, is_terminal: bool) -> None:
    """stderr on a terminal, stdout there too or in a file."""
    words = [sys.executable, "-m", "flashspec.cli", "generate", "a b a b", "--model", str(models / "target"), "--raw",
             "--max-tokens", "6", "--color-tokens"]  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    master, slave = os.openpty()
    shown = b""
    with (tmp_path / "out").open("wb") as out:
        process = subprocess.Popen(
            words, stdout=slave if is_terminal else out, stderr=slave, stdin=subprocess.DEVNULL,
            env={**environment, "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"},
        )  # fmt: skip
        os.close(slave)
        with contextlib.suppress(OSError):  # the terminal is gone when the process is
            while some := os.read(master, 4096):
                shown += some
        os.close(master)
        assert process.wait() == 0, shown[-2000:].decode()
    assert (b"accepted" in shown) == is_terminal
    text = (tmp_path / "out").read_bytes()
    assert bool(text.strip()) == (not is_terminal)
    assert b"\x1b" not in text


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
    assert ran.err.count("tokens/s") == 2


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


BAD_VALUES = {
    "model = 5": "sets model = 5; it must be a text in quotes",
    'num_speculative_tokens = "many"': "sets num_speculative_tokens = 'many'; it must be a whole number or \"auto\"",
    "temperature = [1]": "sets temperature = [1]; it must be a number",
    "temperature = true": "sets temperature = true; it must be a number",
    "[temperature]": "sets temperature to a table [temperature]; it must be a number",
    "top_k = 1.5": "sets top_k = 1.5; it must be a whole number",
    'ignore_eos = "yes"': "sets ignore_eos = 'yes'; it must be true or false",
    'stop = ["a", 5]': "sets stop = 5; it must be a text in quotes, or a list of such",
    "seed = 2020-01-01": "sets seed = 2020-01-01; it must be a whole number",
    "threads = 0": "sets threads = 0; ",
    'verification = "maybe"': "sets verification = 'maybe'; 'maybe' is not one of 'auto'",
    "min_tokens = 3": "sets 'min_tokens', which is not an option",
    "x = " + "[" * 99999: "cannot read the configuration",
    'model = "gr\udcfc\udcdf"': "it must be TOML in UTF-8",
}


@pytest.mark.parametrize("text", BAD_VALUES)
def test_a_bad_value_in_a_configuration_is_one_line(run: Run, tmp_path: Path, text: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text(text, encoding="utf-8", errors="surrogateescape")
    ran = run("generate", "hi", "--config", str(config))
    assert ran.code == 2
    assert BAD_VALUES[text] in ran.err
    assert str(config) in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "text", ["", "\ufeffmax_tokens = 3", 'stop = "a"\nnum_speculative_tokens = "4"\ntemperature = 1']
)
def test_a_sound_configuration_is_taken(run: Run, tmp_path: Path, text: str) -> None:
    (tmp_path / "c.toml").write_text(text, encoding="utf-8")
    ran = run("generate", "hi", "--config", str(tmp_path / "c.toml"), "--model", "nowhere")
    assert "no model 'nowhere'" in ran.err


def test_bench_takes_lists_from_a_configuration(run: Run, tmp_path: Path) -> None:
    text = 'temperature = "0,0.5"\nnum_speculative_tokens = "1,auto"\ndraft = ["a"]\ndraft_width = 2\nmodel = "nowhere"'
    (tmp_path / "c.toml").write_text(text, encoding="utf-8")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "x"}', encoding="utf-8")
    assert "no model" in run("bench", "--config", str(tmp_path / "c.toml"), "--prompts", str(prompts)).err


# a hub that does not answer


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The hub's address and cache, for this test."""
    for name, value in (("HF_HUB_OFFLINE", False), ("ENDPOINT", "http://127.0.0.1:1"), ("HF_HUB_CACHE", str(tmp_path))):
        monkeypatch.setattr(constants, name, value)
    return constants


@pytest.mark.parametrize("words", [["generate", "hi"], ["plan"], ["doctor"]])
def test_a_hub_out_of_reach_is_said_at_once(run: Run, hub: Any, words: list[str]) -> None:
    began = time.monotonic()
    ran = run(*words, "--model", "some/model")
    assert time.monotonic() - began < 20
    assert ran.code == 2
    asking, failed = ran.err.splitlines()[-2:]
    assert "asking 127.0.0.1:1 for some/model" in asking
    assert "cannot fetch 'some/model' from 127.0.0.1:1: [Errno 111] Connection refused; give a folder" in failed


def test_a_silent_hub_is_not_waited_for(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr(hub, "HF_HUB_ETAG_TIMEOUT", 0.2)
        with pytest.raises(ModelError, match="HF_ENDPOINT"):
            check_hub("some/model", say=lambda line: None)


def test_a_slow_hub_is_waited_for_and_the_cache_stands_in(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            time.sleep(0.5)
            self.send_error(404)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    said: list[str] = []
    with HTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(hub, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        check_hub("some/model", None, "./x", "a.gguf", ".", say=said.append)  # a 404 is for Transformers to explain
        server.shutdown()
    assert len(said) == 1
    monkeypatch.setattr(hub, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: f"/cache/{file}")
    check_hub("some/model", say=said.append)
    assert said[-1].endswith("some/model is taken from the cache")
    assert hub.is_offline_mode()
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE is set"):
        check_hub("some/model", say=said.append)


# a server, and old commands for one


def test_statistics_of_a_server_that_drafts_nothing(run: Run, tmp_path: Path) -> None:
    with running(standin(tmp_path)) as server:
        words = ("generate", "hi", "--url", server.url.removeprefix("http://"), "--max-tokens", "4", "--stats")
        ran = run(*words, "--color-tokens")
        refused = run(*words, "--num-speculative-tokens", "3")
    assert ran.code == 0, ran.err
    assert "the server tells of no drafts" in ran.err
    assert "4 tokens, " in ran.err
    for word in ("0.0%", "0 of 0", "acceptance", "drafting and verifying", "recovered"):
        assert word not in ran.err
    assert "--num-speculative-tokens is the server's own choice" in refused.err


def test_vllm_options_are_refused_beside_another_backend(run: Run) -> None:
    assert "--dry-run is vLLM's" in run("serve", "--dry-run", "--model", "target").err


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("nonsense", "rows of a first batch size"), ("5", "rows of"), ("[[1, 4]]", "rows of"), ('{"a": 1}', "rows of"),
        ("[[1, 2, 1.5]]", "rows of"), ("[[1, 4, -2]]", "-2 guesses"), ("[[5, 4, 2]]", "from 1 on, ascend"),
    ],
)  # fmt: skip
def test_a_bad_schedule_says_what_it_should_be(run: Run, schedule: str, message: str) -> None:
    ran = run("serve", "--backend", "vllm", "--dry-run", "--schedule", schedule)
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_translate_reads_what_is_pasted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLASHSPEC_VLLM", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    pasted = run("translate", "$ vllm serve X \\\n  --speculative-model Y \\  \n  --num-speculative-tokens 5")
    assert pasted.out == """vllm serve X --speculative-config '{"model": "Y", "num_speculative_tokens": 5}'\n"""
    assert pasted.err.splitlines() == [
        "no vLLM is installed here; this is for vLLM 0.32.0",
        '--speculative-model Y -> "model": "Y" in --speculative-config',
        '--num-speculative-tokens 5 -> "num_speculative_tokens": 5 in --speculative-config',
    ]
    assert "it stays as it is" in run("translate", "vllm", "serve", "X").err
    broken = run("translate", "vllm serve X --speculative-config '{")
    assert (broken.code, broken.out) == (2, "")
    assert "close its quotes" in broken.err


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
