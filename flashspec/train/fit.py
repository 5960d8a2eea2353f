"""The training loop: batches in a fixed order, a cosine schedule, checkpoints that go on as if nothing had happened."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashspec.errors import OptionError
from flashspec.pretrained import cpu_has_bfloat16
from flashspec.train.data import Features
from flashspec.train.objectives import Batch, Counts, Objective, Teacher, count, loss_of
from flashspec.weights import first_line

HELD_OUT = 20  # of so many documents one is held out
WARM_UP = 0.04  # share of the steps
POOL = 16  # batches that are sorted by length together, so that little is padding
MOST_NORM = 1.0  # of a step's gradient
SAVE_EVERY = 200  # steps


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train; part of a checkpoint, since going on with another plan would be another training."""

    epochs: int = 3
    lr: float = 1e-3
    batch_size: int = 16  # texts
    seq_len: int = 512
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """What is said while training goes on."""

    step: int
    num_steps: int
    loss: float
    counts: Counts | None = None  # after an epoch, of the held-out texts
    epoch: int = 0


class Stopped(Exception):  # noqa: N818 - it is no error
    """Training was interrupted; the checkpoint holds the step it came to."""


class Trainer:
    """Fits one network.

    Args:
        objective: the network and what it learns.
        teacher: the target's side.
        features: what it learns from.
        checkpoint: file to go on from and to write.
    """

    def __init__(
        self,
        objective: Objective,
        teacher: Teacher,
        features: Features,
        plan: Plan,
        *,
        checkpoint: Path,
        device: torch.device,
    ) -> None:
        self.objective, self.teacher, self.features, self.plan = objective, teacher, features, plan
        self.checkpoint, self.device = checkpoint, device
        trained = [parameter for parameter in objective.network.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=plan.lr, betas=(0.9, 0.95), weight_decay=0.0)
        self.held_out, self.learned = _split(features, plan.seq_len)
        self.num_steps = plan.epochs * -(-len(self.learned) // plan.batch_size)
        self.step = 0
        self.half = _half(device)

    def run(self, report: Callable[[Progress], None], *, is_stopped: Callable[[], bool] = lambda: False) -> Counts:
        """Train to the end, and count the held-out texts.

        Raises:
            Stopped: ``is_stopped`` said so; what was learned is in the checkpoint.
        """
        counts = None
        per_epoch = self.num_steps // self.plan.epochs
        while self.step < self.num_steps:
            epoch, first = divmod(self.step, per_epoch)
            for batch in self._batches(self.learned, epoch=epoch, first=first):
                loss = self._learn(batch)
                self.step += 1
                report(Progress(self.step, self.num_steps, loss))
                if is_stopped():
                    self.save()
                    raise Stopped
                if self.step % SAVE_EVERY == 0:
                    self.save()
            counts = self.evaluate()
            report(Progress(self.step, self.num_steps, loss, counts, epoch + 1))
            self.save()
        return counts or self.evaluate()

    def evaluate(self) -> Counts:
        """Of the held-out texts."""
        counts = Counts.empty(self.objective.num_guesses)
        self.objective.network.eval()
        for batch in self._batches(self.held_out):
            with torch.no_grad(), self._autocast():
                count(self.objective, self.teacher, batch, counts)
        return counts

    def save(self) -> None:
        """Write the checkpoint in one step."""
        part = self.checkpoint.with_suffix(".part")
        state = {
            "training": self._facts(),
            "step": self.step,
            "network": self.objective.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        torch.save(state, part)
        part.replace(self.checkpoint)

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one.

        Raises:
            OptionError: it belongs to another training.
        """
        if not self.checkpoint.is_file():
            return False
        try:
            state = torch.load(self.checkpoint, weights_only=True, map_location=self.device)
            self._check(state["training"])
            self.objective.network.load_state_dict(state["network"])
            self.optimizer.load_state_dict(state["optimizer"])
        except OptionError:
            raise
        except Exception as error:  # torch.load raises what pickle, zipfile and state dicts raise
            raise OptionError(
                f"cannot go on from {self.checkpoint} ({first_line(error)}); remove it to start anew"
            ) from error
        self.step = int(state["step"])
        return True

    def _facts(self) -> dict[str, Any]:
        """What a checkpoint must have been made with: going on with anything else would be another training."""
        network = self.objective.network
        return {
            **asdict(self.plan),
            "texts": f"{len(self.features.bounds)} ({self.features.digest})",
            "network": type(network).__name__,
            "guesses": self.objective.num_guesses,
            "vocabulary": len(self.teacher.weight),
            "parameters": sum(parameter.numel() for parameter in network.parameters()),
        }

    def _check(self, theirs: dict[str, Any]) -> None:
        for name, mine in self._facts().items():
            if theirs[name] != mine:
                raise OptionError(
                    f"{self.checkpoint} is of a training with {name} {theirs[name]}, and this one has {mine}; give the "
                    "same options and data, or remove it to start anew"
                )

    def _learn(self, batch: Batch) -> float:
        self.objective.network.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.plan.lr * _schedule(self.step, self.num_steps)
        with self._autocast():
            loss = loss_of(self.objective, self.teacher, batch)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.objective.network.parameters(), MOST_NORM)
        self.optimizer.step()
        return float(loss.detach())

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.half is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.half)

    def _batches(
        self, windows: Seq[tuple[int, int, int]], *, epoch: int | None = None, first: int = 0
    ) -> Iterator[Batch]:
        """Of an epoch from batch ``first`` on, in that epoch's own order; in order without one."""
        order = list(range(len(windows)))
        if epoch is not None:
            order = _shuffled([end - begin for begin, _, end in windows], self.plan, epoch)
        size = self.plan.batch_size
        for at in range(first * size, len(order), size):
            yield self._batch([windows[i] for i in order[at : at + size]])

    def _batch(self, windows: Seq[tuple[int, int, int]]) -> Batch:
        width = max(end - begin for begin, _, end in windows)
        tokens = torch.zeros(len(windows), width, dtype=torch.int64)
        states = []
        for row, (begin, _, end) in enumerate(windows):
            tokens[row, : end - begin] = self.features.tokens[begin:end]
            found = self.features.at(begin, end, self.objective.layers).float()
            states.append(torch.nn.functional.pad(found, (0, 0, 0, width - (end - begin))))
        starts = torch.tensor([max(start - begin, 1) for begin, start, _ in windows])
        lengths = torch.tensor([end - begin for begin, _, end in windows])
        parts: tuple[Tensor, ...] = (tokens, torch.stack(states), starts, lengths)
        return Batch(*(part.to(self.device) for part in parts))


def _half(device: torch.device) -> torch.dtype | None:
    """The dtype of matrix products, where the device is quicker in it."""
    if device.type == "cpu":
        return torch.bfloat16 if cpu_has_bfloat16() else None
    return torch.bfloat16 if device.type != "cuda" or torch.cuda.is_bf16_supported() else None


def _split(features: Features, seq_len: int) -> tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]:
    """Windows of held-out and of learned documents: first token, first that is to be foreseen, end.

    Raises:
        OptionError: too few documents to hold some out.
    """
    held_out: list[tuple[int, int, int]] = []
    learned: list[tuple[int, int, int]] = []
    for number, (first, start, end) in enumerate(features.bounds):
        for at in range(first, end, seq_len):
            window = (at, max(start, at + 1), min(at + seq_len, end))
            if window[2] - window[1] < 3:
                continue
            if number % HELD_OUT == 0:
                held_out.append(window)
            else:  # labels are the target's own distributions, which it has on prompts too: more places to learn from
                learned.append((at, at + 1, window[2]))
    if not held_out or not learned:
        raise OptionError(
            f"{len(features.bounds)} documents are too few to learn from some and to test on others; give at least "
            f"{HELD_OUT}"
        )
    return held_out, learned


def _shuffled(lengths: Seq[int], plan: Plan, epoch: int) -> list[int]:
    """An epoch's order: at random, but texts of about one length side by side."""
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    pool = POOL * plan.batch_size
    for at in range(0, len(order), pool):
        order[at : at + pool] = sorted(order[at : at + pool], key=lambda i: lengths[i])
    groups = [order[at : at + plan.batch_size] for at in range(0, len(order), plan.batch_size)]
    last = groups.pop() if len(order) % plan.batch_size else []  # the short one stays last: steps are counted by size
    shuffled = [groups[i] for i in torch.randperm(len(groups), generator=generator).tolist()]
    return [i for group in [*shuffled, last] for i in group]


def _schedule(step: int, num_steps: int) -> float:
    """Share of the learning rate: up in a straight line, down in half a cosine."""
    warm = max(int(WARM_UP * num_steps), 1)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / max(num_steps - warm, 1)))
