"""Two tokenizers over one text: what they have in common, and the ids of one beside those of the other.

Everything is compared as raw bytes. Spellings differ (``Ġ`` and ``▁`` for a space, ``Ċ`` and ``<0x0A>`` for a line
break), and texts lose the tokens that are parts of a character. It knows tokenizers; it does not know models.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flashspec.text import REPLACEMENT, Tokenizer

ANCHORS = ("\n", "|", "x", "1")  # texts that the next piece seldom grows together with
SAMPLES = ("Hello world", " two  spaces,\n\ttabs", "naïve 中文 🙂")
LONG, KEPT, TRIES = 96, 32, 8  # characters encoded again at most, and at least; places tried for a boundary
CONTEXT = 8  # committed tokens encoded again before a guessed text


# the bytes of a token


def token_bytes(tokenizer: Tokenizer) -> list[bytes | None]:
    """The raw bytes of every id; None for control tokens and for ids that no token has.

    A lone byte or a part of a character is as good as any other. What the decoder's description promises is checked
    on samples; a tokenizer of another kind is asked to decode each id alone, and parts of characters are None there.
    """
    vocab: dict[str, int] = tokenizer.get_vocab()
    added = {} if (known := getattr(tokenizer, "added_tokens_decoder", None)) is None else known
    control = {*getattr(tokenizer, "all_special_ids", ()), *(token for token, word in added.items() if word.special)}
    names: dict[int, str] = {token: name for name, token in vocab.items() if token not in control}
    if (spelling := _spelling(tokenizer)) is not None:
        pieces = {token: spelling(name) for token, name in names.items()}
        if _agrees(tokenizer, pieces):
            return _listed(pieces, vocab)
    texts = {token: _decoded(tokenizer, [token]) for token in names}
    return _listed({token: text.encode() for token, text in texts.items() if REPLACEMENT not in text}, vocab)


def _listed(pieces: dict[int, bytes], vocab: dict[str, int]) -> list[bytes | None]:
    return [pieces.get(token) or None for token in range(max(vocab.values(), default=-1) + 1)]


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def _agrees(tokenizer: Tokenizer, pieces: dict[int, bytes]) -> bool:
    for text in SAMPLES:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        found = b"".join(pieces.get(token, b"") for token in tokens)
        decoded = _decoded(tokenizer, tokens).encode()
        if found not in (decoded, b" " + decoded):  # some decoders drop the space that was put before the text
            return False
    return True


def _spelling(tokenizer: Tokenizer) -> Callable[[str], bytes] | None:
    """How token names stand for bytes, by the tokenizer's decoder; None for a kind we do not know."""
    steps = _decoder_steps(tokenizer)
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return _byte_level
    spaces = [step["replacement"] for step in steps if step["type"] == "Metaspace"]
    spaces += [step["pattern"].get("String") for step in steps if step["type"] == "Replace" and step["content"] == " "]
    if len(spaces) != 1 or not spaces[0] or not kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return None
    return lambda name: _sentence_piece(name, spaces[0], has_bytes="ByteFallback" in kinds)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The decoder of a fast tokenizer as Tokenizers describes it; nothing for others."""
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if decoder is None:
        return []
    try:
        described = json.loads(decoder.__getstate__())
    except Exception:  # a decoder written in Python cannot be described
        return []
    return [*described["decoders"]] if described["type"] == "Sequence" else [described]


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable Latin-1 stands for itself, the other bytes for the characters from 256 on, in order."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


ALPHABET = _alphabet()


def _byte_level(name: str) -> bytes:
    try:
        return bytes([ALPHABET[letter] for letter in name])
    except KeyError:  # as the decoder does with a word of other letters
        return name.encode()


def _sentence_piece(name: str, space: str, *, has_bytes: bool) -> bytes:
    if has_bytes and re.fullmatch("<0x[0-9A-F]{2}>", name):
        return bytes([int(name[3:5], 16)])
    return name.replace(space, " ").encode()


# one tokenizer


class Vocabulary:
    """A tokenizer's tokens as bytes, and the ids of text in the middle of a text.

    Args:
        size: of the model's vocabulary; ids from there on cannot be fed to it.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.tokenizer = tokenizer
        self.pieces = token_bytes(tokenizer)[:size]
        alone = self.encode("a")
        self.adds_space = self.text_bytes(alone) == b" a"  # a dummy prefix before the first word
        self.opening = _before(alone, self.encode("a", add_special_tokens=True))  # control tokens that open a text
        anchors = {anchor: self.encode(anchor) for anchor in ANCHORS}
        self._anchors = {text: ids for text, ids in anchors.items() if self.text_bytes(ids) == b" " + text.encode()}
        self.ids = self._ids()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return [int(token) for token in self.tokenizer.encode(text, add_special_tokens=add_special_tokens)]

    def encode_inside(self, text: str) -> list[int]:
        """The ids of a text that goes on from another: without the space that some tokenizers put before a first."""
        for anchor, ids in self._anchors.items() if self.adds_space else ():
            found = self.encode(anchor + text)
            if found[: len(ids)] == ids:  # the anchor did not grow together with the text
                return found[len(ids) :]
        return self.encode(text)

    def piece(self, token: int) -> bytes | None:
        """The raw bytes of a token; None if it stands for no text."""
        return self.pieces[token] if 0 <= token < len(self.pieces) else None

    def text_bytes(self, tokens: Iterable[int]) -> bytes:
        """The text of tokens, control tokens left out."""
        return b"".join(self.piece(token) or b"" for token in tokens)

    def spell(self, data: bytes) -> list[int] | None:
        """Ids of bytes that need not be whole characters, the longest tokens first; None if it lacks some of them."""
        found: list[int] = []
        while data:
            size = next((size for size in range(len(data), 0, -1) if data[:size] in self.ids), 0)
            if size == 0:
                return None
            found.append(self.ids[data[:size]])
            data = data[size:]
        return found

    def _ids(self) -> dict[bytes, int]:
        """Of several ids for the same bytes the one that the tokenizer writes, else the lowest."""
        found: defaultdict[bytes, list[int]] = defaultdict(list)
        for token, piece in enumerate(self.pieces):
            if piece is not None:
                found[piece].append(token)
        return {piece: twins[0] if len(twins) == 1 else self._written(piece, twins) for piece, twins in found.items()}

    def _written(self, piece: bytes, twins: list[int]) -> int:
        written = self.encode_inside(piece.decode(errors="replace"))
        return written[0] if len(written) == 1 and written[0] in twins else twins[0]


def _before(inner: list[int], outer: list[int]) -> list[int]:
    """What precedes ``inner`` in ``outer``; nothing where it does not occur."""
    starts = range(len(outer) - len(inner) + 1)
    return next((outer[:at] for at in starts if outer[at : at + len(inner)] == inner), [])


# two tokenizers


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """The tokens that two vocabularies have in common, one to one. Control tokens are not compared: names lie.

    A wrong pair costs acceptance, never exactness: drafts are verified in the served vocabulary.
    """

    served: Vocabulary
    draft: Vocabulary
    vocab_size: int  # the served model's
    target_ids: Tensor  # [c] int64, in the served vocabulary
    draft_ids: Tensor  # [c] int64, in the draft's
    num_texts: int = 0  # of the c: those that are text
    end: int | None = None  # the served end-of-sequence token that the draft's stands for
    own: dict[int, int] = field(init=False)  # served id -> draft id

    def __post_init__(self) -> None:
        pairs = zip(self.target_ids.tolist(), self.draft_ids.tolist(), strict=True)
        object.__setattr__(self, "own", dict(pairs))

    @classmethod
    def between(
        cls,
        served_tokenizer: Tokenizer,
        vocab_size: int,
        draft_tokenizer: Tokenizer,
        draft_vocab_size: int,
        *,
        target_eos: frozenset[int] = frozenset(),
        draft_eos: frozenset[int] = frozenset(),
    ) -> Translation:
        """Tokens of equal bytes, and the end of a sequence where both models have one."""
        served = Vocabulary(served_tokenizer, vocab_size)
        draft = Vocabulary(draft_tokenizer, draft_vocab_size)
        pairs = {token: draft.ids[piece] for piece, token in served.ids.items() if piece in draft.ids}
        num_texts = len(pairs)
        end, own_end = _end(served, target_eos), _end(draft, draft_eos)
        if end is not None and own_end is not None and own_end not in pairs.values():
            pairs[end] = own_end
        columns = torch.tensor(sorted(pairs.items()), dtype=torch.long).reshape(-1, 2)
        return cls(served, draft, vocab_size, columns[:, 0].clone(), columns[:, 1].clone(), num_texts, end)

    @property
    def coverage(self) -> float:
        """The share of the served vocabulary's text tokens that the draft model has too."""
        return self.num_texts / max(sum(piece is not None for piece in self.served.pieces), 1)

    def over_served(self, logits: Tensor) -> Tensor:
        """The draft model's logits [n, its vocabulary] over the served one: [n, vocab_size], -inf where it has none."""
        empty = logits.new_full((len(logits), self.vocab_size), -torch.inf)
        return empty.index_copy_(1, self.target_ids, logits.index_select(1, self.draft_ids))

    def on(self, device: torch.device) -> Translation:
        """This, where the logits are."""
        if self.target_ids.device == device:
            return self
        return replace(self, target_ids=self.target_ids.to(device), draft_ids=self.draft_ids.to(device))


def _end(vocabulary: Vocabulary, eos: frozenset[int]) -> int | None:
    """The end of sequence that stands for all: the tokenizer's own where the model stops there too."""
    own = getattr(vocabulary.tokenizer, "eos_token_id", None)
    return own if own in eos else min(eos, default=None)


# ids that follow a text


class Retokeniser:
    """A tokenizer's ids of a text that grows at its end.

    Only the last ``LONG`` characters are encoded again as it grows. What is before them is settled: the text breaks
    there, whichever side is encoded alone. An incomplete character is spelled by its bytes until it is whole.

    Args:
        head: ids that come first and stay: of control tokens, or of a rendered conversation.
        is_start: whether the text begins after ``head``; else it goes on from there.
    """

    def __init__(self, vocabulary: Vocabulary, head: Seq[int] = (), *, is_start: bool) -> None:
        self._vocabulary = vocabulary
        self._is_start = is_start
        self._settled = list(head)
        self._text = ""  # what is encoded again
        self._ids: list[int] = []  # of ``_text``
        self._rest: list[int] | None = []  # of an incomplete character; None if there are no such bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def __len__(self) -> int:
        return len(self._settled) + len(self._ids) + len(self._rest or ())

    @property
    def is_exact(self) -> bool:
        """Whether the ids are the whole text: an incomplete character may not be there."""
        return self._rest is not None

    def push(self, data: bytes) -> None:
        """Let the text go on with ``data``."""
        if new := self._decoder.decode(data):
            self._text += new
            self._ids = self._encode(self._text)
            self._settle()
        self._rest = self._vocabulary.spell(self._decoder.getstate()[0])

    @property
    def num_settled(self) -> int:
        """Ids that stay, whatever follows."""
        return len(self._settled)

    def ids(self, start: int = 0) -> list[int]:
        """All ids from ``start`` on, which is at most ``num_settled``."""
        return [*self._settled[start:], *self._ids, *(self._rest or ())]

    def _encode(self, text: str) -> list[int]:
        return self._vocabulary.encode(text) if self._is_start else self._vocabulary.encode_inside(text)

    def _settle(self) -> None:
        """Where much is encoded again, find a break near the end that the ids of both sides agree on."""
        if len(self._text) <= LONG:
            return
        cuts = _cuts(self._text)
        afters = (self._vocabulary.encode_inside(self._text[cut:]) for cut in cuts)
        cut, after = next(((c, a) for c, a in zip(cuts, afters, strict=True) if self._ids[-len(a) :] == a), (0, []))
        before = self._ids[: len(self._ids) - len(after)]
        if not after:  # a break all the same: the cost must not grow with the text
            cut = cuts[0]
            before, after = self._encode(self._text[:cut]), self._vocabulary.encode_inside(self._text[cut:])
        self._settled += before
        self._text, self._ids, self._is_start = self._text[cut:], after, False


def _cuts(text: str) -> list[int]:
    """Where a long text may break, best first: before a word, before a line, anywhere."""
    end = len(text) - KEPT
    words = [text.rfind(mark, end - KEPT, end) for mark in (" ", "\n")]
    return [cut for cut in (*words, *range(end, end - TRIES, -1)) if cut > 0]


def continuation(vocabulary: Vocabulary, tokens: Seq[int], data: bytes) -> list[int]:
    """The ids of the text ``data`` after ``tokens``, which stay as they are. An incomplete last character is left out.

    The text is encoded together with the last few tokens, for the breaks that it has in its place, or else alone.
    """
    context = _last_text(vocabulary, tokens[-CONTEXT:])
    together = _whole(vocabulary.text_bytes(context) + data)
    if together is not None:
        found = vocabulary.encode_inside(together)
        if found[: len(context)] == context:
            return found[len(context) :]
    size = next((i for i, byte in enumerate(data) if not _is_inside(byte)), len(data))
    rest = _whole(data[size:])
    begun = vocabulary.spell(data[:size])  # the end of a character that the tokens began
    return [] if begun is None or rest is None else [*begun, *vocabulary.encode_inside(rest)]


def _last_text(vocabulary: Vocabulary, tokens: Seq[int]) -> list[int]:
    """The tokens after the last control token, from the first that begins with a whole character."""
    pieces = [vocabulary.piece(token) for token in tokens]
    start = max((i + 1 for i, piece in enumerate(pieces) if piece is None), default=0)
    while start < len(tokens) and _is_inside((pieces[start] or b" ")[0]):
        start += 1
    return list(tokens[start:])


def _whole(data: bytes) -> str | None:
    """The text of the whole characters; None where the bytes are no text."""
    try:
        return codecs.getincrementaldecoder("utf-8")().decode(data)
    except UnicodeDecodeError:
        return None


def _is_inside(byte: int) -> bool:
    """Whether no character begins with it, in UTF-8."""
    return 0x80 <= byte < 0xC0
