"""Prompt files become tasks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashspec.core import Prompt
from flashspec.errors import PromptError
from flashspec.pretrained import Loaded
from flashspec.text import Encoded, encode


@dataclass(frozen=True, slots=True)
class Task:
    """``name`` is unique within a run."""

    name: str
    prompts: list[tuple[str, list[int]]]  # (id, token ids)

    def group(self, number: int, size: int) -> list[list[int]]:
        """``size`` prompts from the ``number``-th on, starting over at the end."""
        return [self.prompts[(number + i) % len(self.prompts)][1] for i in range(size)]


def read_prompts(path: Path, limit: int) -> list[dict[str, Any]]:
    """The first ``limit`` lines of a JSON-lines file of ``messages`` or ``prompt``.

    Raises:
        PromptError: with file, line and what is missing.
    """
    try:
        # not splitlines: JSON texts may hold other line separators
        lines = list(enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1))
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"cannot read prompts from {path}: {error}; give an existing JSON-lines file") from error
    rows = []
    for number, line in [(number, line) for number, line in lines if line.strip()][:limit]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise PromptError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict) or not ("messages" in row or "prompt" in row):
            raise PromptError(f"{path}, line {number} has neither messages nor prompt")
        rows.append(row)
    if not rows:
        raise PromptError(f"{path} holds no prompts; give one JSON object a line")
    return rows


def prompt_of(row: dict[str, Any]) -> Prompt:
    """What a line of a prompt file asks."""
    prompt: Prompt = row["messages"] if "messages" in row else row["prompt"]
    return prompt


def tasks_of(texts: dict[Path, list[dict[str, Any]]], loaded: Loaded, *, max_tokens: int) -> list[Task]:
    """One task a file, with names that differ.

    Raises:
        PromptError: a prompt that cannot be encoded, or is too long for the model.
    """
    tasks: list[Task] = []
    for path, rows in texts.items():
        name = str(rows[0].get("task", path.stem))
        if name in {task.name for task in tasks}:
            name = f"{name} ({len(tasks) + 1})"
        tasks.append(Task(name, _encoded(path, rows, loaded, max_tokens)))
    return tasks


def _encoded(path: Path, rows: list[dict[str, Any]], loaded: Loaded, max_tokens: int) -> list[tuple[str, list[int]]]:
    prompts: list[tuple[str, list[int]]] = []
    for number, row in enumerate(rows):
        name = str(row.get("id", number))
        try:
            prompt = prompt_of(row)
            ids = Encoded(encode(loaded.tokenizer, prompt, vocab_size=loaded.target.vocab_size), prompt)
        except PromptError as error:
            raise PromptError(f"{path}, prompt {name}: {error}") from error
        if len(ids) + max_tokens > loaded.target.max_length:
            raise PromptError(
                f"{path}, prompt {name}: {len(ids)} tokens and {max_tokens} to generate exceed the model's "
                f"{loaded.target.max_length} positions; lower --max-tokens or leave the prompt out"
            )
        prompts.append((name, ids))
    return prompts
