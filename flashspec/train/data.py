"""What heads learn from: texts that the target itself wrote, and its hidden states over them, each computed once.

Both are kept in a folder and go on where they were left. It knows files and the engine; it does not know heads.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flashspec.core import Prompt, SamplingParams
from flashspec.engine import LocalEngine
from flashspec.errors import OptionError, PromptError
from flashspec.text import Tokenizer, encode, rendered

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
PIECE = 4000  # characters of a plain text that make one document
PLAIN_PROMPT = 64  # tokens of a plain text that the target goes on from
ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
ANSWERS = ("answer", "completion", "response", "output")
BATCH_TOKENS = 4096  # of a forward that computes hidden states
MOST_LIKELY = 64  # tokens that sampled answers choose from
MOST_FLOAT16 = 65504.0

Report = Callable[[int, int], None]  # done, all


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and what follows it in the file; None where the file has prompts only."""

    prompt: Prompt
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """Tokens of which those from ``start`` on are what the heads learn to foresee."""

    tokens: list[int]
    start: int


# reading


def read_examples(path: Path) -> list[Example]:
    """Of a ``.jsonl`` file (one object a line), a text file, or every such file of a folder.

    An object has ``messages`` (or ``conversations``, as ShareGPT writes them), or a ``prompt`` with, if it likes, an
    ``answer``, or a ``text``.

    Raises:
        OptionError: no such file, nothing in it, or a line that is none of these.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix in (".jsonl", *TEXT_SUFFIXES) and file.is_file())
    elif path.is_file():
        files = [path]
    else:
        raise OptionError(f"no data at {path}; name a .jsonl file or a folder of .jsonl and text files")
    examples = [example for file in files for example in _read_file(file)]
    if not examples:
        kinds = ", ".join((".jsonl", *TEXT_SUFFIXES))
        raise OptionError(f"{path} holds no text to learn from; it may be a file or a folder of {kinds}")
    return examples


def _read_file(file: Path) -> Iterator[Example]:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"cannot read {file}: {error}; it must be text in UTF-8") from error
    if file.suffix != ".jsonl":
        pieces = (text[at : at + PIECE] for at in range(0, len(text), PIECE))
        yield from (Example(piece) for piece in pieces if piece.strip())
        return
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines: U+2028 is a character like any other
        if line.strip():
            yield _example(line, f"{file}, line {number}")


def _example(line: str, where: str) -> Example:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{where} is not JSON ({error}); give one object a line") from error
    found = None
    if isinstance(row, dict):
        found = _conversation(row) or _prompt_and_answer(row)
    if found is None:
        raise OptionError(f'{where} has no "messages", "prompt" or "text": {line.strip()!r:.80}')
    try:
        json.dumps([found.prompt, found.answer], ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can spell half a character
        raise OptionError(f"{where} is not Unicode text ({error}); leave it out") from error
    return found


def _conversation(row: dict[str, Any]) -> Example | None:
    turns = row.get("messages") or row.get("conversations")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, dict) for turn in turns):
        return None
    messages = []
    for turn in turns:
        role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
            return None
        messages.append({"role": ROLES[role], "content": content})
    while messages and messages[-1]["role"] == "assistant":
        answer = messages.pop()["content"]
        if messages and messages[-1]["role"] != "assistant":
            return Example(messages, answer)
    return Example(messages) if messages else None


def _prompt_and_answer(row: dict[str, Any]) -> Example | None:
    if isinstance(text := row.get("text"), str) and text.strip():
        return Example(text)
    if isinstance(prompt := row.get("prompt"), str) and prompt.strip():
        answer = next((row[name] for name in ANSWERS if isinstance(row.get(name), str)), None)
        return Example([{"role": "user", "content": prompt}], answer)
    return None


def encoded(tokenizer: Tokenizer, example: Example, *, vocab_size: int, max_length: int, regenerate: bool) -> Document:
    """The prompt alone where the target is to answer, else with the answer of the file; cut to ``max_length``.

    Raises:
        PromptError: no tokens, or a conversation for a model without a chat template.
    """
    prompt = example.prompt
    if isinstance(prompt, list) and not getattr(tokenizer, "chat_template", None):
        prompt = "\n\n".join(str(turn["content"]) for turn in prompt) + "\n\n"  # type: ignore[index]
    ids = encode(tokenizer, prompt, vocab_size=vocab_size)
    if isinstance(example.prompt, str):  # plain text
        start = max(min(PLAIN_PROMPT, len(ids) // 2, max_length), 1) if regenerate else 1
        return Document(ids[: start if regenerate else max_length], start)
    if regenerate:
        return Document(ids[:max_length], len(ids))
    if example.answer is None:
        raise PromptError("the data has prompts without answers; leave out --as-is, and the target answers them")
    shown = rendered(tokenizer, prompt) if isinstance(prompt, list) else prompt
    whole = tokenizer.encode(shown + example.answer, add_special_tokens=isinstance(prompt, str))
    tokens = encode(tokenizer, [int(token) for token in whole], vocab_size=vocab_size)
    return Document(tokens[:max_length], len(ids))


# what the target says


def answered(
    engine: LocalEngine,
    documents: Seq[Document],
    file: Path,
    *,
    max_tokens: int,
    max_length: int,
    temperature: float,
    report: Report,
) -> list[Document]:
    """Each document and the target's answer to it. They are appended to ``file`` as they come, in any order.

    Every other answer is greedy, since much of what is served is; the rest is sampled at ``temperature``.
    Seeded by number, so that what is answered after an interruption is what would have been answered without.
    """
    done = _read_answers(file)
    report(len(done), len(documents))
    waiting = [i for i, document in enumerate(documents) if i not in done and len(document.tokens) < max_length]
    waiting.reverse()
    running: dict[str, tuple[int, list[int]]] = {}
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" * (out.tell() > 0))  # behind a line that was cut
        while waiting or running:
            while waiting and len(running) < 2 * engine.scheduler.max_batch:
                number = waiting.pop()
                tokens = documents[number].tokens
                room = min(max_tokens, max_length - len(tokens))
                sampling = SamplingParams(
                    temperature=temperature * (number % 2), top_k=MOST_LIKELY, seed=number, max_tokens=room
                )
                running[engine.add(tokens, sampling)] = (number, list(tokens))
            for chunk in engine.step():
                number, tokens = running[chunk.request_id]
                tokens += chunk.tokens
                if chunk.finish_reason is None:
                    continue
                del running[chunk.request_id]
                if chunk.finish_reason != "abort":
                    done[number] = Document(tokens, len(documents[number].tokens))
                    out.write(json.dumps({"i": number, "start": done[number].start, "tokens": tokens}) + "\n")
                    out.flush()
                report(len(done), len(documents))
    return [done[i] for i in sorted(done)]


def _read_answers(file: Path) -> dict[int, Document]:
    found = {}
    for line in file.read_text(encoding="utf-8").split("\n") if file.is_file() else ():
        try:
            row = json.loads(line)
            found[row["i"]] = Document(row["tokens"], row["start"])
        except (ValueError, KeyError, TypeError):
            continue  # the line that was being written when it was stopped; it is written again
    return found


# hidden states


class Features:
    """Tokens, and hidden states of some layers at each of them, in files of a folder that are mapped, not read.

    Attributes:
        tokens: [all tokens] int64, document after document.
        bounds: of each document: first token, first token that is to be foreseen, end.
        digest: of the tokens.
    """

    def __init__(self, folder: Path, documents: Seq[Document], *, layers: Seq[int], width: int) -> None:
        self.layers, self.width = tuple(layers), width
        self.tokens = torch.tensor([token for document in documents for token in document.tokens])
        ends = list(itertools.accumulate(len(document.tokens) for document in documents))
        firsts = [end - len(document.tokens) for end, document in zip(ends, documents, strict=True)]
        starts = [first + document.start for first, document in zip(firsts, documents, strict=True)]
        self.bounds = list(zip(firsts, starts, ends, strict=True))
        self.digest = hashlib.sha256(self.tokens.numpy().tobytes()).hexdigest()[:16]
        self._files = {layer: folder / f"states-{self.digest}-{layer}.f16" for layer in layers}
        self._maps = {layer: self._mapped(layer) for layer in self.layers}

    def compute(self, hidden_states: Callable[[list[list[int]], Seq[int]], list[Tensor]], report: Report) -> None:
        """Fill in what is missing.

        Args:
            hidden_states: of some texts, at some layers: [tokens, layers * d] each.
        """
        missing = [layer for layer in self.layers if self._num_done(layer) < len(self.bounds)]
        done = min((self._num_done(layer) for layer in missing), default=len(self.bounds))
        while done < len(self.bounds):
            end = self._batch_end(done)
            texts = [self.tokens[first:last].tolist() for first, _, last in self.bounds[done:end]]
            for (first, _, last), states in zip(self.bounds[done:end], hidden_states(texts, missing), strict=True):
                halves = states.clamp(-MOST_FLOAT16, MOST_FLOAT16).cpu().numpy().astype(np.float16)
                for place, layer in enumerate(missing):
                    self._maps[layer][first:last] = halves[:, place * self.width : (place + 1) * self.width]
            done = end
            for layer in missing:
                self._maps[layer].flush()
                replace_text(self._mark(layer), str(done))
            report(done, len(self.bounds))

    def at(self, first: int, last: int, layers: Seq[int] | None = None) -> Tensor:
        """[last - first, layers * d] float16."""
        parts = [np.array(self._maps[layer][first:last]) for layer in layers or self.layers]
        return torch.cat([torch.from_numpy(part) for part in parts], -1)

    def _batch_end(self, start: int) -> int:
        """Documents from ``start`` on that make one forward; at least one."""
        end, longest = start, 0
        while end < len(self.bounds):
            longest = max(longest, self.bounds[end][2] - self.bounds[end][0])
            if end > start and longest * (end - start + 1) > BATCH_TOKENS:
                break
            end += 1
        return end

    def _mapped(self, layer: int) -> Any:
        file, shape = self._files[layer], (len(self.tokens), self.width)
        is_there = file.is_file() and file.stat().st_size == 2 * shape[0] * shape[1]
        if not is_there:
            self._mark(layer).unlink(missing_ok=True)
        return np.memmap(file, np.float16, "r+" if is_there else "w+", shape=shape)

    def _mark(self, layer: int) -> Path:
        return self._files[layer].with_suffix(".done")

    def _num_done(self, layer: int) -> int:
        """Documents whose states are there."""
        try:
            return int(self._mark(layer).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return 0


def replace_text(file: Path, text: str) -> None:
    """Write a file in one step: whoever reads it sees the old text or the new one."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(file)
