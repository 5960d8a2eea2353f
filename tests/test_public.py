"""What README, its translation and the examples show: every block runs, and both languages say the same."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from server_process import Server
from transformers import LlamaConfig

import flashspec
from flashspec import cli
from flashspec.heads.eagle import EagleConfig, EagleHead
from flashspec.heads.files import write_eagle, write_medusa
from flashspec.heads.medusa import MedusaHeads
from flashspec.weights import default_model

ROOT = Path(flashspec.__file__).parent.parent
READMES = ["README.md", "README.zh-CN.md"]
SHOWING_COMMANDS = [
    "README.md",
    "docs/measuring.md",
    "docs/drafters.md",
    "docs/heads.md",
    "docs/serving.md",
    "docs/vllm.md",
]
REPLACED = {"--model", "--draft"}  # models that tests do not have: the default one stands in


def blocks(readme: str, language: str) -> list[str]:
    text = (ROOT / readme).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for name in SHOWING_COMMANDS for block in blocks(name, "sh") for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("flashspec ")))


def write_heads(folder: Path) -> None:
    """Heads for the default model that guess next to nothing."""
    tokens, base = torch.arange(64), "SmolLM2-135M-Instruct"
    facts: dict[str, Any] = {"base": base, "accuracies": [0.0], "expected_length": 1.0}
    if folder.name == "medusa":
        write_medusa(MedusaHeads(576, 49152, num_heads=2, tokens=tokens), folder, **facts)
    else:
        layer = LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=64, num_attention_heads=9)
        config = EagleConfig(layer=layer, draft_vocab_size=64, target_hidden_size=576, feature_layers=(2, 15, 27))
        write_eagle(EagleHead(config, tokens=tokens), folder, max_position_embeddings=8192, **facts)


def table(readme: str) -> list[list[str]]:
    rows = [line for line in (ROOT / readme).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [row for row in cells if any(re.search(r"\d", cell) for cell in row)]


@pytest.mark.parametrize("readme", [*READMES, "docs/drafters.md"])
def test_python_blocks_run(readme: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(readme, "python"):
        exec(compile(block, readme, "exec"), {})
    assert len(capsys.readouterr().out) > 20


def test_the_block_for_openais_client_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = blocks("docs/serving.md", "python")
    with Server(tmp_path, model=None, speculate=3) as server:
        exec(compile(block.replace(":8000/", f":{server.port}/"), "docs/serving.md", "exec"), {})
    assert "num_drafts" in capsys.readouterr().out


@pytest.mark.parametrize("command", commands())
def test_commands_run(
    command: str, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the default model in place of named ones, and short answers."""
    words = shlex.split(command)
    monkeypatch.chdir(tmp_path)
    for word in {word for word in words if word.startswith("heads/")}:
        write_heads(tmp_path / word)
    for flag in REPLACED & set(words) if not any(word.startswith("heads/") for word in words) else ():
        is_gguf = words[words.index(flag) + 1].endswith(".gguf")
        words[words.index(flag) + 1] = str(default_model() if is_gguf else smollm2_path)
    shortened = {"--max-tokens": "8", "--epochs": "1"} if words[1] == "train" else {"--max-tokens": "6", "--limit": "1"}
    for flag, value in shortened.items():
        if flag in words:
            words[words.index(flag) + 1] = value
    if "--config" in words:
        Path("flashspec.toml").write_text('drafter = "ngram"', encoding="utf-8")
    for word in words:
        if word.endswith(".jsonl"):
            lines = [json.dumps({"prompt": f"{i} 2 3 {i} 2 3"}) for i in range(24 if words[1] == "train" else 1)]
            Path(word).write_text("\n".join(lines), encoding="utf-8")
    if words[1] == "serve":
        at = words.index("--port")
        with Server(tmp_path, *words[2:at], *words[at + 2 :], model=None, speculate=3) as server:
            assert server.get("/ready").json == {"status": "ok"}
        return
    monkeypatch.setattr(sys, "argv", words)
    typed = iter(["hello", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    output = capfd.readouterr()
    allowed = (None, 0, 1) if words[1] == "doctor" else (None, 0)  # 1: it has found something, which is no failure
    assert ended.value.code in allowed, output.err
    assert output.out.strip()


def test_make_has_the_readmes_targets() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    lines = [line for block in blocks("README.md", "sh") for line in block.splitlines()]
    wanted = [line.split()[1] for line in lines if line.startswith("make ")]
    assert wanted == ["demo", "test"]
    assert set(wanted) <= set(targets)


def test_both_languages_have_the_same_blocks_and_numbers() -> None:
    assert blocks("README.zh-CN.md", "sh") == blocks("README.md", "sh")
    english, chinese = table("README.md"), table("README.zh-CN.md")
    assert [[cell for cell in row if re.search(r"\d", cell)] for row in english] == [
        [cell for cell in row if re.search(r"\d", cell)] for row in chinese
    ]
    assert len(english) >= 4


@pytest.mark.parametrize("readme", READMES)
def test_readme_is_short_and_its_links_and_files_exist(readme: str) -> None:
    text = (ROOT / readme).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (ROOT / link).exists(), link
    for name in re.findall(r"^  (\w+\.py)", blocks(readme, "text")[0], re.MULTILINE):
        assert (ROOT / "flashspec" / name).exists(), name


def test_file_tree_is_complete() -> None:
    tree = blocks("README.md", "text")[0]
    for file in (ROOT / "flashspec").rglob("*.py"):
        assert file.name.startswith("__") or file.name in tree, f"{file.name} is missing in the README's file tree"


def test_own_drafter_runs_and_is_short(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = ROOT / "examples" / "own_drafter.py"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 40
    runpy.run_path(str(example), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    first, again = (float(line.rsplit(" ", 1)[1]) for line in lines[:2])
    assert again > first, "what was seen once must be guessed better the second time"


def test_public_names() -> None:
    for name in flashspec.__all__:
        assert getattr(flashspec, name) is not None
    assert issubclass(flashspec.FlashSpecError, Exception)
    with pytest.raises(AttributeError, match="nothing_like_it"):
        _ = flashspec.nothing_like_it
