"""What is wrong with the models by themselves: vocabularies, positions and masks, precision, memory.

It knows Targets and tokenizers; it does not know drafters.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence as Seq
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from flashspec.core import Draft, Sequence, Target
from flashspec.doctor.finding import Finding, judged
from flashspec.pretrained import Loaded
from flashspec.text import Tokenizer, has_chat_template

logger = logging.getLogger("flashspec")

ROUNDED = 1e-3  # standard deviations between logits that differ by float32 rounding; a correct cache shows 1e-5
HALF_ROUNDED = 0.5  # likewise in half precision: a correct cache shows 0.25 in bfloat16, a wrong position 1 and more
DRIFT = 0.05  # mean total variation of half precision: one token in twenty would be another; bfloat16 shows 0.02
NEAR_TIE = 0.5  # logits: rounding may swap two tokens closer than this, and bfloat16 cannot tell 22.0 from 22.05
LITTLE = 0.1  # share of memory that should stay free


# vocabularies


def check_vocabularies(target: Loaded, draft: Loaded | None) -> Finding:
    """Whether both tokenizers mean the same by the same id. Logits padded to another width are fine."""
    if draft is None:
        return Finding("vocabulary", "skipped", "no draft model is in use")
    mine, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    others = {id for _, id in mine.items() ^ theirs.items()}
    widths = f"logits {target.target.vocab_size} and {draft.target.vocab_size} wide"
    if not others:
        return Finding("vocabulary", "ok", f"{len(mine)} tokens with the same ids; {widths}")
    names = [
        next((repr(token) for token, id in vocab.items() if id == min(others)), "none") for vocab in (mine, theirs)
    ]
    return Finding(
        "vocabulary",
        "attention",
        f"{len(mine)} and {len(theirs)} tokens, {len(others)} ids differ; the first is id {min(others)}: "
        f"{names[0]} for the target, {names[1]} for the draft",
        "p(t)/q(t) would compare different tokens: use a draft model of the target's family, or --drafter ngram",
    )


def check_special_tokens(target: Loaded, draft: Loaded | None) -> Finding:
    """Whether both models end a text with the same token, and mark the turns of a conversation alike."""
    name = "special tokens"
    if draft is None:
        return Finding(name, "skipped", "no draft model is in use")
    mine, theirs = target.target.eos_tokens, draft.target.eos_tokens
    turns, other_turns = _turns(target.tokenizer), _turns(draft.tokenizer)
    ends = f"end of sequence {sorted(mine)} and {sorted(theirs)}"
    if mine and theirs and not mine & theirs:
        return Finding(
            name, "attention", ends, "the draft never guesses the end: use a draft of the same training stage"
        )
    if turns is None or other_turns is None:
        who = "neither" if turns is other_turns else "the target" if turns is not None else "the draft"
        return Finding(name, "ok", f"{ends}; {who} has a chat template")
    same = turns == other_turns
    evidence = f"{ends}; turns marked by {turns!r:.90}" + ("" if same else f" and {other_turns!r:.90}")
    return judged(name, same, evidence, "the draft learned other conversations: use a draft of the same family")


def _turns(tokenizer: Tokenizer) -> str | None:
    """What the chat template puts between turns; preambles, which may hold a date, do not count."""
    if not has_chat_template(tokenizer):
        return None
    turns = [("user", "first"), ("assistant", "second"), ("user", "third")]
    messages = [{"role": role, "content": f"({text})"} for role, text in turns]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates are programs of their authors and raise what they like
        logger.info("a chat template refuses the conversation it is asked for: %s", error)
        return None
    return text.partition("(first)")[2]


# positions and masks


@torch.inference_mode()
def check_positions(target: Target, tokens: list[int], *, name: str = "target positions") -> Finding:
    """Score a text in one go and in pieces, with rejected drafts between: the logits must be the same."""
    limit = ROUNDED if _dtype(target) is torch.float32 else HALF_ROUNDED
    worst = _differences(target, tokens[: target.max_length])
    evidence = f"scored in {len(worst)} pieces, logits differ by up to {max(worst):.1e} standard deviations"
    bad = next((number for number, difference in enumerate(worst, 1) if difference > limit), None)
    if bad is None:
        return Finding(name, "ok", evidence)
    return Finding(
        name,
        "attention",
        f"{evidence} from those of one forward, first in round {bad} (limit {limit:g})",
        "after a rejection, positions must go on from the accepted length, the mask must show every accepted token "
        "and no other, and the cache must hold no rejected one; check the model's own code, or its backend",
    )


def _differences(target: Target, tokens: list[int]) -> list[float]:
    """Of each round of two ragged rows: the largest difference from a forward that rolled nothing back.

    Each draft holds 0 to 2 tokens of the text, then two that are wrong; the last round follows a rewind. In standard
    deviations of the expected logits.
    """
    expected = _in_one_go(target, tokens)
    seqs = [Sequence(f"doctor {part}", tokens[: max(len(tokens) // part, 1)], 1) for part in (4, 6)]
    rounds = max((len(tokens) - len(seqs[0]) - 4) // 3, 1)
    found = []
    try:
        for turn in range(min(rounds, 8)):
            right = [(turn + row) % 3 for row in range(len(seqs))]
            found.append(_round(target, seqs, tokens, right, expected))
        for seq in seqs:
            target.rewind(seq, len(seq) // 2)
            del seq.tokens[len(seq) // 2 + 1 :]
        return [*found, _round(target, seqs, tokens, [1] * len(seqs), expected)]
    finally:
        for seq in seqs:
            target.forget(seq)


def _round(
    target: Target, seqs: list[Sequence], tokens: list[int], right: list[int], expected: Callable[[int], Tensor]
) -> float:
    drafts = []
    for seq, count in zip(seqs, right, strict=True):
        start = len(seq) + count
        wrong = [(token + 1) % target.vocab_size for token in tokens[start : start + 2]]
        drafts.append(Draft.chain([*tokens[len(seq) : start], *wrong]))
    found = []
    for seq, score, count in zip(seqs, target.score(seqs, drafts), right, strict=True):
        for row in range(count + 1):
            logits = expected(len(seq) + row)
            difference = float((score.logits[row] - logits).abs().max() / logits.std())
            found.append(difference if math.isfinite(difference) else math.inf)  # max() loses a nan
        seq.tokens.extend(tokens[len(seq) : len(seq) + count + 1])
        target.keep(seq, list(range(count)))
    return max(found)


def _in_one_go(target: Target, tokens: list[int]) -> Callable[[int], Tensor]:
    """Logits [vocab] after the first n tokens, from forwards without a cache where the target has them."""
    plain: Callable[[list[int]], Tensor] | None = getattr(target, "plain_logits", None)
    if plain is not None:
        return cache(lambda n: plain(tokens[:n]))
    seq = Sequence("doctor", tokens[:1], 1)
    rows = target.score([seq], [Draft.chain(tokens[1:])])[0].logits
    target.forget(seq)
    return lambda n: rows[n - 1]


def _dtype(target: Any) -> torch.dtype:
    dtype: torch.dtype = getattr(getattr(target, "model", None), "dtype", torch.float32)
    return dtype


# precision


@torch.no_grad()
def check_precision(target: Any, tokens: list[int]) -> Finding:
    """The target's distributions in its dtype against float32, with the same weights, at temperature 1."""
    name, model, dtype = "precision", getattr(target, "model", None), _dtype(target)
    if model is None or dtype is torch.float32:
        return Finding(name, "skipped", "the target computes in float32" if model is not None else "not a torch model")
    batch = torch.tensor([tokens[: target.max_length]], device=model.device)
    mine = model(input_ids=batch, use_cache=False).logits[0].float()
    with _upcast(model):
        exact = model(input_ids=batch, use_cache=False).logits[0].float()
    apart = (mine.softmax(-1) - exact.softmax(-1)).abs().sum(-1) / 2
    flipped = mine.argmax(-1) != exact.argmax(-1)
    first, second = exact.topk(2).values.unbind(-1)
    gap = float((first - second)[flipped].max()) if bool(flipped.any()) else 0.0
    evidence = (
        f"{str(dtype).removeprefix('torch.')} against float32 on {len(mine)} tokens: total variation "
        f"{apart.mean():.4f} on average, {apart.max():.4f} at most; {int(flipped.sum())} likeliest tokens flip"
    )
    evidence += f", where the two largest logits are up to {gap:.3f} apart" if gap else ""
    return judged(
        name,
        bool(apart.mean() <= DRIFT) and gap <= NEAR_TIE,
        f"{evidence} (limits {DRIFT:g} and {NEAR_TIE:g})",
        "verification is exact for the model as it computes, and that is not the model in float32: use --dtype "
        "float32, or bfloat16 where float16 overflows",
    )


@contextlib.contextmanager
def _upcast(model: nn.Module) -> Iterator[None]:
    """Compute in float32, one layer's weights at a time: a whole copy would rarely fit beside the model."""

    def widen(own: dict[str, nn.Parameter], held: dict[str, Tensor]) -> None:
        for key, parameter in own.items():
            held[key] = parameter.data
            parameter.data = parameter.data.float()

    def restore(own: dict[str, nn.Parameter], held: dict[str, Tensor]) -> None:
        for key in list(held):
            own[key].data = held.pop(key)

    hooks = []
    for module in model.modules():
        if own := dict(module.named_parameters(recurse=False)):
            held: dict[str, Tensor] = {}
            hooks.append(module.register_forward_pre_hook(lambda m, args, own=own, held=held: widen(own, held)))
            after = lambda m, args, output, own=own, held=held: restore(own, held)  # noqa: E731
            hooks.append(module.register_forward_hook(after, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


# memory


def check_memory(targets: Seq[Any], batch: int) -> Finding:
    """Whether a tenth of the memory stays free, and the keys and values of full contexts fit."""
    models = [target.model for target in targets if getattr(target, "model", None) is not None]
    device = models[0].device if models else torch.device("cpu")
    free, total = _free_memory(device)
    weights = sum(parameter.nbytes for model in models for parameter in model.parameters())
    context = min((target.max_length for target in targets), default=0)
    needed = batch * context * sum(cache_bytes(model) for model in models)
    evidence = (
        f"weights {_gib(weights)}, peak {_gib(_peak_memory(device))}, free {_gib(free)} of {_gib(total)}; "
        f"keys and values of {batch} x {context} tokens take {_gib(needed)}"
    )
    remedy = "use a smaller draft, fewer requests at once, shorter contexts or half precision"
    return judged("memory", free >= LITTLE * total and needed <= free, evidence, remedy)


def cache_bytes(model: Any) -> int:
    """Bytes of keys and values that one token takes in all layers."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * heads * width * model.dtype.itemsize)


def _free_memory(device: torch.device) -> tuple[int, int]:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _peak_memory(device: torch.device) -> int:
    """Of the tensors on a GPU; of this process elsewhere, where the system says it, else what it holds now."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(ImportError):
        import resource
        import sys

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(psutil.Process().memory_info().rss)


def _gib(count: float) -> str:
    return f"{count / 2**30:.2f} GiB"
