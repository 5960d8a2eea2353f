"""Prompts to train heads on, made on a machine without data: from the Python packages at hand and the model itself.

    python scripts/training_prompts.py --model MODEL --count 3000 --out prompts.jsonl

Functions to complete and to edit come from installed packages, texts to summarise and to be asked about from their
documentation, German sentences from whatever German message catalogues lie under ``--folder``. Questions and word
problems are written by the model: it is given the beginning of a user's turn and goes on.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

from transformers.utils import logging

import flashspec
from flashspec import SamplingParams

KINDS = {"chat": 0.27, "complete": 0.18, "edit": 0.14, "summarise": 0.16, "ask": 0.08, "maths": 0.12, "translate": 0.05}
EDITS = (
    "Add type hints to this function. Answer with the whole function only.",
    "Rename every variable named `{name}` to `{other}`. Answer with the whole function only.",
    "Add a one-line comment above each step of this function and change nothing else.",
    "Fix what is wrong in this function, if anything, and answer with the whole function.",
)
OTHERS = ("value", "item", "element", "total", "result", "entry", "current")
ASKS = ("What is this text about?", "What does it say about {word}?", "Name the most important points.", "Why {word}?")
QUESTIONS = (
    "", "", "", "Write a", "Explain", "How can I", "What is the", "Give me", "Imagine", "Describe", "Compose", "Why do",
    "Could you", "Compare", "Write an email", "Tell me about", "List", "Design a", "Suppose", "Help me",
)  # fmt: skip
STORIES = (
    "has {n} apples and", "buys {n} books for ${m} each", "drives {n} miles", "earns ${m} an hour", "bakes {n} cakes",
    "reads {n} pages a day", "saves ${m} every week", "plants {n} trees in each of", "sells {n} tickets",
)  # fmt: skip
NAMES = ("Anna", "Ben", "Chen", "Dana", "Emil", "Fatima", "Georg", "Hana", "Ivan", "Julia", "Kofi", "Lena", "Mateo")


def functions(files: list[Path]) -> Iterator[tuple[str, str]]:
    """Head (signature and docstring) and whole source of documented functions, for ever."""
    while True:
        source = random.choice(files).read_text(encoding="utf-8", errors="ignore")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError):
            continue
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and ast.get_docstring(node)]
        for node in random.sample(nodes, min(2, len(nodes))):
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            whole = textwrap.dedent("\n".join(lines))
            head = textwrap.dedent("\n".join(lines[: (node.body[0].end_lineno or 0) - node.lineno + 1]))
            if 80 < len(head) < 700 and 150 < len(whole) < 1200:
                yield head, whole


def passages(files: list[Path]) -> Iterator[str]:
    """Prose of documentation, for ever."""
    while True:
        text = random.choice(files).read_text(encoding="utf-8", errors="ignore")
        parts = [part for part in re.split(r"\n\s*\n", text) if len(part) > 150 and _is_prose(part)]
        if parts:
            start = random.randrange(len(parts))
            words = " ".join(" ".join(parts[start : start + random.randint(1, 5)]).split())
            yield words[: random.randint(400, 2500)].rsplit(" ", 1)[0]


def _is_prose(text: str) -> bool:
    return sum(char.isalpha() or char == " " for char in text) > 0.9 * len(text)


def german(folders: list[Path]) -> list[str]:
    """Sentences of German message catalogues."""
    files = [file for folder in folders for file in folder.rglob("*.po") if "/de/" in file.as_posix()]
    found = [line for file in files for line in re.findall(r'^msgstr "(.+)"$', file.read_text("utf-8"), re.M)]
    return sorted({line for line in found if len(line) > 40})


def written(engine: flashspec.LocalEngine, starts: list[str]) -> list[str]:
    """Users' turns that begin in these ways, as the model goes on."""
    head = "<|im_start|>user\n"
    sampling = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=90, stop=("<|im_end|>", "\n\n"))
    results = engine.generate([head + start for start in starts], sampling)
    return [(start + result.text).strip() for start, result in zip(starts, results, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    logging.set_verbosity_error()
    roots = [Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib")), *options.folder]
    code = [file for root in roots for file in root.rglob("*.py") if "test" not in file.as_posix()]
    prose = [file for root in roots for kind in ("*.rst", "*.md", "METADATA", "topics.py") for file in root.rglob(kind)]
    counts = {kind: round(share * options.count) for kind, share in KINDS.items()}
    bodies, texts, sentences = functions(code), passages(prose), german(roots)
    engine = flashspec.load(options.model, drafter="none", max_batch=32)
    starts = [random.choice(QUESTIONS) for _ in range(counts["chat"])]
    stories = [
        f"{random.choice(NAMES)} {random.choice(STORIES).format(n=random.randint(3, 60), m=random.randint(2, 30))}"
        for _ in range(counts["maths"])
    ]
    prompts = written(engine, starts) + written(engine, stories)
    for _ in range(counts["complete"]):
        head, _ = next(bodies)
        prompts.append(f"Complete this Python function. Answer with the code only.\n\n```python\n{head}\n```")
    for _ in range(counts["edit"]):
        _, whole = next(bodies)
        names = re.findall(r"\b([a-z_]{1,12}) = ", whole) or ["x"]
        task = random.choice(EDITS).format(name=random.choice(names), other=random.choice(OTHERS))
        prompts.append(f"{task}\n\n```python\n{whole}\n```")
    prompts += [f"Summarize: {next(texts)}" for _ in range(counts["summarise"])]
    for _ in range(counts["ask"]):
        text = next(texts)
        prompts.append(f"{text}\n\n{random.choice(ASKS).format(word=random.choice(text.split()))}")
    chosen = random.sample(sentences, min(counts["translate"], len(sentences)))
    prompts += [f"Translate German to English: {line}" for line in chosen]
    prompts = [prompt for prompt in dict.fromkeys(prompts) if len(prompt) > 10]
    random.shuffle(prompts)
    with options.out.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            file.write(json.dumps({"messages": [{"role": "user", "content": prompt}]}, ensure_ascii=False) + "\n")
    print(f"{len(prompts)} prompts in {options.out}")


if __name__ == "__main__":
    main()
