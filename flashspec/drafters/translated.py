"""A small model of another vocabulary guesses, in its own ids, for a model that never sees them.

Two ways. ``tokens`` draws from the tokens that both have, with the request's own sampling parameters (TLI, Timor et
al., arXiv 2502.05202). ``text`` lets the draft model write greedily in its own tokens and reads what it wrote in the
served ones (SLEM, same source): any two tokenizers will do. Both are verified in the served vocabulary, so a wrong
translation costs acceptance, never exactness. The draft model reads conversations through its own chat template.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from flashspec.core import Sequence, Target
from flashspec.drafters.model import ModelDrafter, Shadow, empty_copy
from flashspec.errors import OptionError, PromptError
from flashspec.sampling import largest_probability
from flashspec.text import Tokenizer, has_chat_template, rendered
from flashspec.vocabulary import CONTEXT, Retokeniser, Translation, continuation

logger = logging.getLogger("flashspec")

Method = Literal["auto", "tokens", "text"]
LOW_COVERAGE = 0.2  # of the served text tokens: below, too much of the text cannot be guessed token by token
BYTES_A_TOKEN = 8  # drafted for a served token that still has no end


@dataclass(slots=True, kw_only=True)
class _Translated(Shadow):
    text: Retokeniser  # the committed text in the draft model's ids
    num_read: int = 0  # served tokens that are in ``text``
    num_settled: int = 0  # of the draft model's ids: they stay as they are
    written: bytes = b""  # by the draft model in this round
    sureness: list[tuple[int, float]] = field(default_factory=list)  # of each token written: where it begins, and q


class TranslatedDrafter(ModelDrafter):
    """Chains from a draft model that has a tokenizer of its own.

    Args:
        target: the draft model.
        tokenizer: the draft model's; left as it is.
        served_tokenizer: the served model's.
        vocab_size: the served model's.
        eos_tokens: the served model's; the draft's end of sequence stands for it.
        method: ``auto`` is ``tokens`` for requests that sample, unless the vocabularies have little in common, and
            ``text`` for greedy ones, where a token that only one of the vocabularies has is guessed too.

    Raises:
        OptionError: another method.
    """

    name = "translated"

    def __init__(
        self,
        target: Target,
        *,
        tokenizer: Tokenizer,
        served_tokenizer: Tokenizer,
        vocab_size: int,
        eos_tokens: frozenset[int] = frozenset(),
        method: Method = "auto",
    ) -> None:
        super().__init__(target, vocab_size=vocab_size)
        self.translation = Translation.between(
            served_tokenizer, vocab_size, tokenizer, target.vocab_size,
            target_eos=eos_tokens, draft_eos=target.eos_tokens,
        )  # fmt: skip
        if method not in ("auto", "tokens", "text"):
            raise OptionError(f"method is {method!r}; it must be auto, tokens or text")
        self._is_chosen = method != "auto"
        automatic: Method = "tokens" if self.translation.coverage >= LOW_COVERAGE else "text"
        self.method: Method = method if self._is_chosen else automatic

    # what ModelDrafter does with ids of its own

    def _new_shadow(self, seq: Sequence) -> _Translated:
        text, num_read = self._opened(seq)
        return _Translated(empty_copy(seq), empty_copy(seq), text=text, num_read=num_read)

    def _room(self, seq: Sequence) -> int:
        text = self._read(seq).text
        return self.target.max_length - len(text) if text.is_exact and len(text) else 0

    def _follow(self, shadow: Shadow, seq: Sequence) -> None:
        assert isinstance(shadow, _Translated)
        shadow.view.tokens[shadow.num_committed :] = seq.tokens[shadow.num_committed :]
        text = self._read(seq).text
        self._rewrite(shadow.sequence, shadow.num_settled, text.ids(shadow.num_settled))
        shadow.num_settled = text.num_settled
        shadow.written = b""
        shadow.sureness.clear()

    def _served(self, logits: Tensor) -> Tensor:
        self.translation = self.translation.on(logits.device)
        return self.translation.over_served(logits)

    def _append(self, shadow: Shadow, token: int) -> None:
        shadow.view.tokens.append(token)
        shadow.sequence.tokens.append(self.translation.own[token])

    def _guess(self, shadow: Shadow, logits: Tensor) -> bool:
        return self._write(shadow, logits) if self._writes(shadow) else super()._guess(shadow, logits)

    def _writes(self, shadow: Shadow) -> bool:
        """Whether it drafts text, which ignores penalties, biases and bans: those are of the served ids."""
        params = shadow.view.sampling
        is_plain = not (params.has_penalties or params.logit_bias or params.bad_tokens or params.allowed_tokens)
        is_plain = is_plain and params.grammar is None
        return self.method == "text" or (not self._is_chosen and params.is_greedy and is_plain)

    def _goes_on(self, shadow: Shadow, length: int) -> bool:
        if self._writes(shadow):
            assert isinstance(shadow, _Translated)
            del shadow.view.tokens[shadow.num_committed + length :], shadow.confidences[length:]
            is_full = len(shadow.sequence) >= self.target.max_length
            if is_full or len(shadow.sureness) >= BYTES_A_TOKEN * length:
                return False
        return super()._goes_on(shadow, length)

    # what the draft model reads

    def _read(self, seq: Sequence) -> _Translated:
        """The shadow, its text up to the last committed token."""
        shadow = self._shadow(seq)
        assert isinstance(shadow, _Translated)
        shadow.text.push(self.translation.served.text_bytes(seq.tokens[shadow.num_read :]))
        shadow.num_read = len(seq)
        return shadow

    def _opened(self, seq: Sequence) -> tuple[Retokeniser, int]:
        """A text that begins with the prompt, as the draft model would be given it, and the served tokens it holds."""
        draft, served, prompt = self.translation.draft, self.translation.served, seq.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            if (ids := self._conversation(prompt)) is not None:
                return Retokeniser(draft, ids, is_start=False), seq.num_prompt_tokens
            prompt = "".join(f"{message.get('content')}\n" for message in prompt if isinstance(message, dict))
        if isinstance(prompt, str):
            data = prompt.encode(errors="replace")
        else:
            data = served.text_bytes(seq.tokens[: seq.num_prompt_tokens])
            data = data.removeprefix(b" ") if served.adds_space else data
        text = Retokeniser(draft, draft.opening, is_start=True)
        text.push(data)
        return text, seq.num_prompt_tokens

    def _conversation(self, messages: object) -> list[int] | None:
        """Ids by the draft model's own chat template; None if it has none, or one that refuses these messages."""
        draft = self.translation.draft
        if not has_chat_template(draft.tokenizer):
            return None
        try:
            return draft.encode(rendered(draft.tokenizer, messages))  # a template writes its control tokens itself
        except PromptError as error:
            logger.warning("the draft model reads these messages as plain text: %s", error)
            return None

    # what the draft model writes

    def _write(self, shadow: Shadow, logits: Tensor) -> bool:
        """Append the draft model's likeliest token, and read all it wrote in served tokens; False at its end."""
        assert isinstance(shadow, _Translated)
        self.target.keep(shadow.sequence, [])
        best, token = logits[-1].max(-1)
        piece = self.translation.draft.piece(int(token))
        if not bool(best.isfinite()):
            return False
        if int(token) in self.target.eos_tokens:
            self._end(shadow, largest_probability(logits[-1]))
            return False
        if piece is None:  # another control token: what it means to the served model is not known
            return False
        shadow.sequence.tokens.append(int(token))
        shadow.sureness.append((len(shadow.written), largest_probability(logits[-1]) if self.rule is not None else 1.0))
        shadow.written += piece
        committed = shadow.view.tokens[max(shadow.num_committed - CONTEXT, 0) : shadow.num_committed]
        shadow.view.tokens[shadow.num_committed :] = continuation(self.translation.served, committed, shadow.written)
        shadow.confidences[:] = self._confidences(shadow) if self.rule is not None else []
        return True

    def _end(self, shadow: _Translated, sureness: float) -> None:
        """End the draft as the draft model ends its text, unless that is in the middle of a character."""
        served = self.translation.served
        is_whole = served.text_bytes(shadow.view.tokens[shadow.num_committed :]) == shadow.written
        if self.translation.end is not None and is_whole:
            shadow.view.tokens.append(self.translation.end)
            if self.rule is not None:
                shadow.confidences.append(sureness)

    def _confidences(self, shadow: _Translated) -> list[float]:
        """For each served token the product of q over the draft tokens that begin in it: a token counts once."""
        found, end = [], 0
        for token in shadow.view.tokens[shadow.num_committed :]:
            start, end = end, end + len(self.translation.served.piece(token) or b"")
            found.append(math.prod(sure for at, sure in shadow.sureness if start <= at < end))
        return found
