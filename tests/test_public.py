"""What README, its translation and the examples show: every block runs, and both languages say the same."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import pytest

import flashspec
from flashspec import cli
from flashspec.weights import default_model

ROOT = Path(flashspec.__file__).parent.parent
READMES = ["README.md", "README.zh-CN.md"]
SHOWING_COMMANDS = ["README.md", "docs/measuring.md", "docs/drafters.md"]
REPLACED = {"--model", "--draft"}  # models that tests do not have: the default one stands in


def blocks(readme: str, language: str) -> list[str]:
    text = (ROOT / readme).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    lines = [line for name in SHOWING_COMMANDS for block in blocks(name, "sh") for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line.startswith("flashspec ")))


def table(readme: str) -> list[list[str]]:
    rows = [line for line in (ROOT / readme).read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return [row for row in cells if any(re.search(r"\d", cell) for cell in row)]


@pytest.mark.parametrize("readme", [*READMES, "docs/drafters.md"])
def test_python_blocks_run(readme: str, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for block in blocks(readme, "python"):
        exec(compile(block, readme, "exec"), {})
    assert len(capsys.readouterr().out) > 20


@pytest.mark.parametrize("command", commands())
def test_commands_run(
    command: str, smollm2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the default model in place of named ones, and short answers."""
    words = shlex.split(command)
    for flag in REPLACED & set(words):
        is_gguf = words[words.index(flag) + 1].endswith(".gguf")
        words[words.index(flag) + 1] = str(default_model() if is_gguf else smollm2_path)
    for flag, value in (("--max-tokens", "6"), ("--limit", "1")):
        if flag in words:
            words[words.index(flag) + 1] = value
    monkeypatch.chdir(tmp_path)
    if "--config" in words:
        Path("flashspec.toml").write_text('drafter = "ngram"', encoding="utf-8")
    for word in words:
        if word.endswith(".jsonl"):
            Path(word).write_text(json.dumps({"prompt": "1 2 3 1 2 3"}), encoding="utf-8")
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
