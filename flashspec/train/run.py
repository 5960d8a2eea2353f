"""From a model and some texts to a folder of heads: answers, hidden states, training, the written folder.

Each stage goes on where an earlier run left it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import LlamaConfig

from flashspec.engine import LocalEngine
from flashspec.errors import FlashSpecError, OptionError
from flashspec.heads.eagle import EagleConfig, EagleHead
from flashspec.heads.files import write_eagle, write_medusa
from flashspec.heads.medusa import MedusaHeads
from flashspec.pretrained import Loaded, load_model
from flashspec.train.data import Document, Features, answered, encoded, read_examples, replace_text
from flashspec.train.fit import Plan, Progress, Trainer
from flashspec.train.objectives import SHOWN, Counts, EagleObjective, MedusaObjective, Objective, Teacher
from flashspec.weights import cache_folder

Kind = Literal["medusa", "eagle3"]
ANSWER_ROWS = 32  # texts that the target answers at once
EAGLE_VOCAB = 32_000  # of an EAGLE-3 head, at most, unless asked otherwise: as of the published ones
CHECKPOINT = "checkpoint.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """What to train, on what, and how long."""

    kind: Kind
    model: str | None
    data: Path
    out: Path
    num_heads: int = 4  # of Medusa; steps of EAGLE-3's training-time test
    num_layers: int = 1  # residual blocks of each Medusa head
    vocab_top: int | None = None  # guess the N most frequent tokens only
    plan: Plan = field(default_factory=Plan)
    limit: int | None = None  # texts of the data
    as_is: bool = False  # learn from the data's own answers
    max_tokens: int = 192  # of an answer
    temperature: float = 0.7  # of every other answer
    cache: Path | None = None
    resume: bool = False
    device: str | None = None
    dtype: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What is going on: a stage, and how much of it is done; a line to keep where there is one."""

    stage: str
    done: int = 0
    total: int = 0
    line: str | None = None


Say = Callable[[Report], None]


def train(options: TrainOptions, say: Say, *, is_stopped: Callable[[], bool] = lambda: False) -> Counts:
    """Train heads and write them to ``options.out``.

    Raises:
        FlashSpecError: with what was wrong, the limit and the next step.
        Stopped: ``is_stopped`` said so during training.
    """
    _check(options)
    # plain layers: the output embedding is read from them, and many rows at once gain nothing from packing
    loaded = load_model(
        options.model, device=options.device, dtype=options.dtype, pack=False, backend="torch",
        progress=lambda line: say(Report(line)),
    )  # fmt: skip
    size = _num_guessed(options, loaded.target.vocab_size)
    documents, folder = _documents(options, loaded, say)
    tokens = _frequent(documents, size, loaded.target.vocab_size)
    objective = _objective(options, loaded, tokens)
    features = _features(options, loaded, documents, folder, objective.layers, say)
    say(Report("training"))
    weight = loaded.target.model.get_output_embeddings().weight.detach().float()
    weight = weight[: loaded.target.vocab_size]
    trainer = Trainer(
        objective, Teacher(weight, objective.tokens), features, options.plan,
        checkpoint=options.out / CHECKPOINT, device=weight.device,
    )  # fmt: skip
    if options.resume and trainer.resume():
        say(Report("training", line=f"going on from step {trainer.step} of {trainer.num_steps}"))
    began, first = time.monotonic(), trainer.step
    counts = trainer.run(lambda progress: _say_progress(progress, say), is_stopped=is_stopped)
    facts = _facts(options, loaded, features, trainer, counts)
    facts["seconds"] = round(time.monotonic() - began)
    facts["seconds_of_steps"] = trainer.step - first
    _write(options, loaded, objective.network, counts, facts)
    (options.out / CHECKPOINT).unlink(missing_ok=True)
    return counts


def _check(options: TrainOptions) -> None:
    plan = options.plan
    ranges: dict[str, tuple[float, float, float]] = {
        "--heads": (options.num_heads, 1, 16),
        "--layers": (options.num_layers, 1, 8),
        "--epochs": (plan.epochs, 1, 1000),
        "--batch-size": (plan.batch_size, 1, 4096),
        "--seq-len": (plan.seq_len, 16, 2**20),
        "--max-tokens": (options.max_tokens, 8, 2**20),
        "--temperature": (options.temperature, 0, 100),
        "--lr": (plan.lr, 1e-9, 1),
        "--seed": (plan.seed, 0, 2**32),
    }
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise OptionError(f"{name} is {value:g}; it must be from {low:g} to {high:g}")
    if options.out.exists() and not options.out.is_dir():
        raise OptionError(f"{options.out} is a file; name a folder for the heads with --out")
    if (options.out / "config.json").exists():
        raise OptionError(f"{options.out} holds a model already; name another folder with --out, or move it away")
    if (options.out / CHECKPOINT).exists() and not options.resume:
        raise OptionError(
            f"{options.out} holds a training that was interrupted; go on with --resume, or remove {CHECKPOINT} there"
        )


# the texts


def _documents(options: TrainOptions, loaded: Loaded, say: Say) -> tuple[list[Document], Path]:
    """What is learned from, and the folder in which it is kept."""
    say(Report("reading the data"))
    examples = read_examples(options.data)[: options.limit]
    length = min(options.plan.seq_len, loaded.target.max_length)
    room = length if options.as_is else max(length - options.max_tokens, length // 2)
    documents = [
        encoded(
            loaded.tokenizer, example, vocab_size=loaded.target.vocab_size, max_length=room,
            regenerate=not options.as_is,
        )
        for example in examples
    ]  # fmt: skip
    whole = [document for document in documents if document.start <= len(document.tokens)]
    if len(whole) < len(documents):  # the model would go on with the user's words instead of answering them
        left_out = f"{len(documents) - len(whole)} of {len(documents)} prompts have more than {room} tokens"
        say(Report("reading the data", line=f"{left_out}: left out (--seq-len and --max-tokens make room)"))
    documents = whole
    folder = _folder(options, loaded, documents)
    if not options.as_is:
        engine = LocalEngine(loaded.target, tokenizer=loaded.tokenizer, num_speculative_tokens=0, max_batch=ANSWER_ROWS)
        documents = answered(
            engine, documents, folder / "answers.jsonl",
            max_tokens=options.max_tokens, max_length=length, temperature=options.temperature,
            report=lambda done, total: say(Report("the model answers the prompts", done, total)),
        )  # fmt: skip
    documents = [document for document in documents if len(document.tokens) - document.start >= 3]
    if not documents:
        raise OptionError(f"{options.data} leaves no text of three tokens and more to learn from; give longer ones")
    return sorted(documents, key=lambda document: len(document.tokens)), folder  # batches of one length pad little


def _folder(options: TrainOptions, loaded: Loaded, documents: Seq[Document]) -> Path:
    facts = {
        "model": {name: loaded.identity[name] for name in ("model", "config", "weights", "dtype")},
        "documents": [(document.tokens, document.start) for document in documents],
        "as_is": options.as_is,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seq_len": options.plan.seq_len,
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    folder = (options.cache or cache_folder() / "train") / digest
    try:
        folder.mkdir(parents=True, exist_ok=True)
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"cannot write there: {error}; choose other folders with --out and --cache") from error
    return folder


def _num_guessed(options: TrainOptions, vocab_size: int) -> int | None:
    """How many tokens the network can guess; None for all."""
    wanted = options.vocab_top
    if wanted is None and options.kind == "eagle3":
        wanted = min(EAGLE_VOCAB, vocab_size)
    if wanted is not None and not 1 <= wanted <= vocab_size:
        raise OptionError(f"--vocab-top is {wanted}; it must be from 1 to the vocabulary's {vocab_size}")
    return wanted


def _frequent(documents: Seq[Document], wanted: int | None, vocab_size: int) -> Tensor | None:
    """Ids of the most frequent tokens, ascending; None for all. What is missing to N is filled with the lowest ids."""
    if wanted is None:
        return None
    seen = Counter(token for document in documents for token in document.tokens[document.start :])
    chosen = dict.fromkeys(token for token, _ in seen.most_common(wanted))
    fill = (token for token in range(vocab_size) if token not in chosen)
    return torch.tensor(
        sorted([*chosen, *(token for token, _ in zip(fill, range(wanted - len(chosen)), strict=False))])
    )


def _features(
    options: TrainOptions, loaded: Loaded, documents: Seq[Document], folder: Path, layers: Seq[int], say: Say
) -> Features:
    config = loaded.target.model.config.get_text_config(decoder=True)
    needed = 2 * sum(len(document.tokens) for document in documents) * len(layers) * config.hidden_size
    free = shutil.disk_usage(folder).free + sum(file.stat().st_size for file in folder.glob("*.f16"))
    if needed > free:
        raise FlashSpecError(
            f"the hidden states take {needed / 2**30:.1f} GiB, and {folder} has {free / 2**30:.1f} GiB free; use fewer "
            "texts (--limit) or another disk (--cache)"
        )
    features = Features(folder, documents, layers=layers, width=config.hidden_size)
    features.compute(
        loaded.target.hidden_states, lambda done, total: say(Report("the model reads the texts", done, total))
    )
    return features


# the network


def _objective(options: TrainOptions, loaded: Loaded, tokens: Tensor | None) -> Objective:
    model = loaded.target.model
    config = model.config.get_text_config(decoder=True)
    torch.manual_seed(options.plan.seed)
    output = model.get_output_embeddings().weight.detach().float()[: loaded.target.vocab_size]
    if options.kind == "medusa":
        heads = MedusaHeads(
            config.hidden_size, loaded.target.vocab_size,
            num_heads=options.num_heads, num_layers=options.num_layers, tokens=tokens,
        )  # fmt: skip
        heads.start_from(output.cpu())
        return MedusaObjective(heads.to(model.device), layer=config.num_hidden_layers)
    assert tokens is not None
    head = EagleHead(
        eagle_config(config, vocab_size=loaded.target.vocab_size, draft_vocab_size=len(tokens)), tokens=tokens
    )
    embedding = model.get_input_embeddings().weight.detach().float()[: loaded.target.vocab_size]
    head.start_from(embedding.cpu(), output.cpu())
    head.embed_tokens.requires_grad_(False)
    start_as_target(head, model)
    return EagleObjective(head.to(model.device), last_layer=config.num_hidden_layers, num_steps=options.num_heads)


@torch.no_grad()
def start_as_target(head: EagleHead, model: Any) -> None:
    """Begin as the target's last layer on its deepest state, reading embeddings as its first layer does.

    Where the target is built like a Llama; elsewhere the layer begins with random numbers.
    """
    layers, norm = getattr(model.base_model, "layers", None), getattr(model.base_model, "norm", None)
    if layers is None:
        return
    if norm is not None and getattr(norm, "weight", None) is not None and norm.weight.shape == head.norm.weight.shape:
        head.norm.weight.copy_(norm.weight)
    first, last = layers[0].state_dict(), layers[-1].state_dict()
    last["hidden_norm.weight"] = last.pop("input_layernorm.weight", torch.empty(0))
    last["input_layernorm.weight"] = first.get("input_layernorm.weight", torch.empty(0))
    state, width = head.midlayer.state_dict(), head.config.layer.hidden_size
    for name, value in state.items():
        if name.removesuffix(".weight").endswith(("q_proj", "k_proj", "v_proj")):
            for part, source in ((value[:, :width], first), (value[:, width:], last)):
                if name in source and source[name].shape == part.shape:
                    part.copy_(source[name])
        elif name in last and last[name].shape == value.shape:
            value.copy_(last[name])
    if head.fc.weight.shape[1] == len(head.config.feature_layers) * width:
        head.fc.weight.zero_()
        head.fc.weight[:, -width:].fill_diagonal_(1.0)


def eagle_config(config: Any, *, vocab_size: int, draft_vocab_size: int) -> EagleConfig:
    """A head as wide as a target of this Transformers config."""
    n = config.num_hidden_layers
    heads = config.num_attention_heads
    layer = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=1, num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-5),
        max_position_embeddings=getattr(config, "max_position_embeddings", 2048),
    )  # fmt: skip
    return EagleConfig(
        layer=layer, draft_vocab_size=draft_vocab_size, target_hidden_size=config.hidden_size,
        feature_layers=(min(2, n), n // 2, max(n - 3, 0)), norm_before_fc=True,
    )  # fmt: skip


# what is said and written


def _say_progress(progress: Progress, say: Say) -> None:
    line = None
    if progress.counts is not None:
        line = f"epoch {progress.epoch}: loss {progress.loss:.3f}; {described(progress.counts)}"
    say(Report("training", progress.step, progress.num_steps, line))


def described(counts: Counts) -> str:
    """Held-out accuracies and what they promise, in a line."""
    shown = ", ".join("/".join(f"{share:.0%}" for share in shares) for shares in counts.accuracies)
    ranks = "/".join(f"top-{rank}" for rank in SHOWN)
    return f"held-out {ranks} {shown}; expected mean acceptance length {counts.expected_length:.2f}"


def _facts(
    options: TrainOptions, loaded: Loaded, features: Features, trainer: Trainer, counts: Counts
) -> dict[str, Any]:
    return {
        "base": loaded.name,
        "kind": options.kind,
        "texts": len(features.bounds),
        "tokens": len(features.tokens),
        "answers": "of the data" if options.as_is else "of the model itself",
        "steps": trainer.num_steps,
        "epochs": options.plan.epochs,
        "lr": options.plan.lr,
        "batch_size": options.plan.batch_size,
        "vocabulary": loaded.target.vocab_size if trainer.objective.tokens is None else len(trainer.objective.tokens),
        "accuracies": counts.accuracies,
        "expected_length": counts.expected_length,
    }


def _write(options: TrainOptions, loaded: Loaded, network: Any, counts: Counts, facts: dict[str, Any]) -> None:
    network = network.cpu()
    shared: dict[str, Any] = {
        "base": loaded.name,
        "accuracies": [shares[0] for shares in counts.accuracies],
        "expected_length": counts.expected_length,
    }
    if options.kind == "medusa":
        write_medusa(network, options.out, **shared)
    else:
        write_eagle(network, options.out, max_position_embeddings=loaded.target.max_length, **shared)
    replace_text(options.out / "training.json", json.dumps(facts, indent=2, ensure_ascii=False) + "\n")
    replace_text(options.out / "README.md", "\n".join(_card(options, facts)) + "\n")


def _card(options: TrainOptions, facts: dict[str, Any]) -> Iterator[str]:
    name = {"medusa": "Medusa heads", "eagle3": "EAGLE-3 head"}[options.kind]
    yield f"# {name} for {facts['base']}\n"
    yield f"Trained with `flashspec train {options.kind}` on {facts['texts']} texts ({facts['tokens']} tokens), answers"
    yield f"{facts['answers']}; {facts['epochs']} epochs, {facts['steps']} steps, {facts['seconds']} s.\n"
    yield "| guess | " + " | ".join(f"top-{rank}" for rank in SHOWN) + " |"
    yield "| --- |" + " --- |" * len(SHOWN)
    for number, shares in enumerate(facts["accuracies"], 1):
        yield f"| {number} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"
    yield f"\nOn held-out texts, of which every other was sampled at temperature {options.temperature:g}: expected mean"
    yield f"acceptance length {facts['expected_length']:.2f} for a chain of {len(facts['accuracies'])}.\n"
    yield f"    flashspec generate --model {facts['base']} --draft {options.out}\n"
