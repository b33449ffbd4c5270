"""``Training``: the built-in way to train, a callable like any other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge.errors import InputError, UnlearningError
from expunge.networks.randomness import derive_seed, seed_all
from expunge.progress import show_progress
from expunge.recipes import check_value
from expunge.training.batches import Batches, Collate, Loader, move_batch, split_batch
from expunge.training.checkpoints import read_checkpoint, write_checkpoint
from expunge.training.evaluation import evaluate
from expunge.training.losses import Loss, check_loss, compute_loss

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OptimizerName = Literal["sgd", "adam", "adamw"]
OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip
ScheduleName = Literal["constant", "linear", "cosine", "one-cycle"]


@dataclass(frozen=True)
class Training:
    """Trains in place: ``Training(epochs=3, learning_rate=0.1)(model, examples, seed)``.

    ``epochs`` may be a fraction. ``optimizer`` is "sgd", "adam", "adamw", or a function of the
    parameters that makes one. ``schedule`` scales the learning rate over the steps. ``loss`` is
    ``loss(output, target)`` or ``loss(model, batch)``; where batches are mappings and none is given
    the model returns its own.
    ``clip_norm`` bounds the norm of a gradient. ``patience`` stops when the loss on validation data
    has not fallen for so many epochs, and restores the best weights. ``loader(examples, seed)``
    makes the batches of one epoch in a way of your own. Under ``torchrun`` the processes share each
    batch.

    >>> model = nn.Linear(2, 2)
    >>> Training(epochs=3, learning_rate=0.5)(model, (torch.eye(2), torch.tensor([0, 1])), seed=0)
    >>> Training(epochs=2, learning_rate=-1.0)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: learning_rate is -1.0; it must be a finite number >= 0
    """

    epochs: float
    learning_rate: float = 0.1
    batch_size: int = 128
    optimizer: OptimizerName | MakeOptimizer = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: ScheduleName = "constant"
    loss: Loss | None = cross_entropy
    clip_norm: float | None = None
    patience: int | None = None
    loader: Loader | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate", "momentum", "weight_decay"):
            check_value("nonnegative", name, getattr(self, name))
        check_value("whole", "batch_size", self.batch_size)
        check_loss(self.loss)
        if not callable(self.optimizer) and self.optimizer not in tuple(OPTIMIZERS):
            raise InputError.of("optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")
        if self.momentum and self.optimizer != "sgd":
            raise InputError.of("momentum", self.momentum, "0 unless the optimizer is sgd")
        if self.schedule not in SCHEDULES:
            raise InputError.of("schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        if self.clip_norm is not None:
            check_value("positive", "clip_norm", self.clip_norm)
        if self.patience is not None:
            check_value("whole", "patience", self.patience)

    def describe(self) -> dict[str, Any]:
        """The options as plain values, functions by name: what a record says of a training."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: value
            if isinstance(value, str | int | float)
            else getattr(value, "__qualname__", type(value).__name__)
            for name, value in given.items()
            if value is not None and name != "progress"
        }

    def __call__(
        self,
        model: nn.Module,
        examples: Any,
        seed: int = 0,
        validation: Any = None,
        collate: Collate | None = None,
        resume: str | Path | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        """Train the module's trainable parameters in place.

        ``resume`` is a folder for a checkpoint after every epoch, from which a killed training goes
        on. ``state`` is filled with the optimizer's state, and continued from if it has one.
        """
        if self.patience is not None and validation is None:
            raise InputError("patience is given without validation data; it needs Data.validation")
        seed_all(derive_seed("training", seed))
        batches = Batches(
            examples, batch_size=self.batch_size, seed=seed, collate=collate, loader=self.loader
        )
        parameters = [p for p in model.parameters() if p.requires_grad]
        if not parameters:
            raise UnlearningError("the model has no trainable parameter; there is nothing to train")
        length = len(batches)
        steps = math.ceil(self.epochs * length - 1e-9)
        run = _Run(self, model, parameters, self._make_optimizer(parameters), steps)
        if state is not None and "optimizer" in state:
            run.optimizer.load_state_dict(state["optimizer"])
        done = 0 if resume is None else run.load(Path(resume) / CHECKPOINT)
        stream = batches.repeat(done) if done < steps else iter(())
        for t in show_progress(range(done, steps), steps, "training", self.progress):
            run.step(t, next(stream))
            if (t + 1) % length == 0 or t + 1 == steps:
                run.share_buffers()
                if resume is not None:
                    run.save(Path(resume) / CHECKPOINT, t + 1)
                if self.patience is not None and run.is_worse(validation, collate):
                    break
        if run.best is not None:
            model.load_state_dict(run.best)
        if state is not None:
            state["optimizer"] = run.optimizer.state_dict()

    def _make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if callable(self.optimizer):
            return self.optimizer(parameters)
        given = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        momentum = {"momentum": self.momentum} if self.optimizer == "sgd" else {}
        return OPTIMIZERS[self.optimizer](parameters, **given, **momentum)


CHECKPOINT = "training.pt"


@dataclass
class _Run:
    """One training: where it stands, and its best weights so far."""

    how: Training
    model: nn.Module
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer
    steps: int
    best: dict[str, Tensor] | None = None
    least: float = math.inf
    waited: int = 0

    def __post_init__(self) -> None:
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        together = dist.is_available() and dist.is_initialized()
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)

    def step(self, t: int, batch: Any) -> None:
        """One step of the optimizer on one batch, which several processes share."""
        factor = SCHEDULES[self.how.schedule](t / max(self.steps, 1))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad(set_to_none=True)
        batch, share = split_batch(batch, self.rank, self.size)
        if batch is not None:
            loss = compute_loss(
                self.model, move_batch(batch, self.parameters[0].device), self.how.loss
            )
            (loss if share == 1 else loss * share).backward()
        for p in self.parameters if self.size > 1 else ():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        if self.how.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.how.clip_norm)
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]

    def share_buffers(self) -> None:
        """Running statistics are those of rank 0, as in torch's DistributedDataParallel."""
        for buffer in self.model.buffers() if self.size > 1 else ():
            if buffer.is_contiguous():  # else it is expanded, and nobody can write to it
                dist.broadcast(buffer, 0)

    def is_worse(self, validation: Any, collate: Collate | None) -> bool:
        """Whether the loss on validation data has not fallen for ``patience`` epochs."""
        found = evaluate(self.model, validation, loss=self.how.loss, collate=collate)
        if found.loss < self.least:
            self.least, self.waited = found.loss, 0
            self.best = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
        else:
            self.waited += 1
        return self.waited >= cast(int, self.how.patience)

    def save(self, path: Path, done: int) -> None:
        """A checkpoint after an epoch."""
        random, best = torch.get_rng_state(), (self.best, self.least, self.waited)
        own = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        if self.rank == 0:
            write_checkpoint(path, own | {"done": done, "random": random, "best": best})

    def load(self, path: Path) -> int:
        """Go on from a checkpoint, if there is one; returns how many steps are done."""
        kept = read_checkpoint(path)
        if kept is None:
            return 0
        self.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"])
        self.best, self.least, self.waited = kept["best"]
        return int(kept["done"])


def _climb(u: float) -> float:
    """Linear one-cycle: from 1/25 up to 1 at 30 %, down to 1/25 at 85 %, then to nothing."""
    points = ((0.0, 1 / 25), (0.3, 1.0), (0.85, 1 / 25), (1.0, 1 / 25e4))
    for (a, low), (b, high) in itertools.pairwise(points):
        if u <= b:
            return low + (high - low) * (u - a) / (b - a)
    return points[-1][1]


SCHEDULES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda u: 1.0,
    "linear": lambda u: 1.0 - u,
    "cosine": lambda u: (1.0 + math.cos(math.pi * u)) / 2,
    "one-cycle": _climb,
}
