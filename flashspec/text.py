"""Prompts to tokens, tokens to text as they come, and stop strings.

It knows tokenizers; it does not know models. Text is only ever emitted once it is certain: no half characters, no
beginning of a stop string that may still be completed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flashspec.core import Prompt
from flashspec.errors import PromptError

Tokenizer = Any  # transformers' PreTrainedTokenizerBase, whose methods are not typed
REPLACEMENT = "\ufffd"  # what a decoder puts in place of an incomplete character


class Encoded(list[int]):
    """Token ids that remember the text or messages they came from: a drafter may want to read those its own way."""

    def __init__(self, ids: Iterable[int], prompt: Prompt) -> None:
        super().__init__(ids)
        self.prompt = prompt


def encode(tokenizer: Tokenizer | None, prompt: Prompt, *, vocab_size: int) -> list[int]:
    """Token ids of a text, of chat messages (through the tokenizer's own template), or of ids as they are.

    Raises:
        PromptError: empty, of another type, no template, or ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        ids = text_ids(tokenizer, prompt, add_special_tokens=True)
    elif prompt and isinstance(prompt, list) and isinstance(prompt[0], dict):
        ids = text_ids(tokenizer, rendered(tokenizer, prompt), add_special_tokens=False)
    elif isinstance(prompt, list | tuple) and all(type(token) is int for token in prompt):
        ids = list(prompt)  # type: ignore[arg-type]
    else:
        raise PromptError(f"a prompt is a text, a list of chat messages or of token ids, not {prompt!r:.80}")
    if not ids:
        raise PromptError("the prompt is empty; give at least one token")
    if bad := [token for token in ids if not 0 <= token < vocab_size]:
        raise PromptError(f"token id {bad[0]} is outside the model's vocabulary of {vocab_size}")
    return ids


def has_chat_template(tokenizer: Tokenizer | None) -> bool:
    """Whether the model was taught conversations, and says how to write them."""
    return bool(getattr(tokenizer, "chat_template", None))


def conversation(text: str, *, system: str | None = None) -> Prompt:
    """A user's text as the first turn of a conversation."""
    start = [{"role": "system", "content": system}] if system else []
    return [*start, {"role": "user", "content": text}]


def as_conversation(tokenizer: Tokenizer | None, text: str) -> Prompt:
    """The same, or the text as it is where there is no chat template."""
    return conversation(text) if has_chat_template(tokenizer) else text


def text_ids(tokenizer: Tokenizer | None, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text; raises PromptError where it is none, or there is no tokenizer."""
    if tokenizer is None:
        raise PromptError("this engine has no tokenizer; give the prompt as token ids")
    try:
        ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    except (TypeError, UnicodeEncodeError) as error:
        raise PromptError(f"the prompt is not valid Unicode text ({error})") from error
    return [int(token) for token in ids]


def rendered(tokenizer: Tokenizer | None, messages: Any, *, tools: list[dict[str, Any]] | None = None) -> str:
    """A conversation in the model's own template, up to where the assistant speaks.

    Args:
        tools: functions that the model may call, for templates that tell it of them.

    Raises:
        PromptError: no template, or messages that it refuses.
    """
    if tokenizer is None or not has_chat_template(tokenizer):
        raise PromptError("this model's tokenizer has no chat template; give the prompt as plain text")
    if any(not isinstance(message, dict) or "role" not in message or "content" not in message for message in messages):
        raise PromptError(f"each chat message needs a role and a content: {messages!r:.120}")
    try:
        more = {} if tools is None else {"tools": tools}
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))
    except Exception as error:  # templates are programs of their authors and raise what they like
        raise PromptError(f"the chat template refuses these messages ({error})") from error


class TextStream:
    """The text of an output that grows by tokens.

    The pieces it returns add up to the decoding of all tokens at once, up to the first stop string.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...] = ()) -> None:
        self.is_stopped = False
        self._tokenizer = tokenizer
        self._stop = stop
        self._tokens: list[int] = []
        self._start = 0  # decoding begins here: some decoders treat the first token's space apart
        self._read = 0  # tokens before this are in the text
        self._start_text = ""  # of tokens[start:read]
        self._held = ""  # decoded, but perhaps the beginning of a stop string

    def push(self, token: int) -> str:
        """The text that is certain now; after a stop string, nothing more."""
        if self._tokenizer is None or self.is_stopped:
            return ""
        self._tokens.append(token)
        text = self._decode(self._tokens[self._start :])
        if text.endswith(REPLACEMENT) or len(text) < len(self._start_text):
            return ""
        return self._release(self._advance(text))

    def finish(self) -> str:
        """What was held back: no further token will come."""
        if self._tokenizer is None or self.is_stopped:
            return ""
        text = self._release(self._advance(self._decode(self._tokens[self._start :])))
        if not self.is_stopped:
            text, self._held = text + self._held, ""
        return text

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    def _advance(self, text: str) -> str:
        if text.startswith(self._start_text):
            new = text[len(self._start_text) :]
        else:  # byte-fallback decoders spoil a whole run of bytes for one that is incomplete
            new = self._decode(self._tokens[self._read :])
        if new:  # a window of special tokens alone would lose the next token's leading space
            self._start = self._read
        self._read = len(self._tokens)
        self._start_text = self._decode(self._tokens[self._start : self._read]) if new else text
        return new

    def _release(self, new: str) -> str:
        text = self._held + new
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        hold = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
