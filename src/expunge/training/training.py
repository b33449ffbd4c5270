"""``Training``: the built-in way to train, a callable like any other."""

from __future__ import annotations

import io
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

from expunge.errors import InputError, RunError, UnlearningError
from expunge.files import write_atomic
from expunge.networks.randomness import derive_seed, seed_all
from expunge.progress import show_progress
from expunge.training.batches import (
    Batches,
    Collate,
    Loader,
    check_batch_size,
    count_examples,
    map_tensors,
    move_batch,
)
from expunge.training.evaluation import evaluate
from expunge.training.losses import Loss, check_loss, compute_loss

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OptimizerName = Literal["sgd", "adam", "adamw"]
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
            given = getattr(self, name)
            if not isinstance(given, int | float) or not 0 <= given < math.inf:
                raise InputError.of(name, given, "a finite number >= 0")
        check_batch_size(self.batch_size)
        check_loss(self.loss)
        names = ("sgd", "adam", "adamw")
        if self.optimizer not in names and not callable(self.optimizer):
            raise InputError.of("optimizer", self.optimizer, f"one of {', '.join(names)}")
        if self.momentum and self.optimizer != "sgd":
            raise InputError.of("momentum", self.momentum, "0 unless the optimizer is sgd")
        if self.schedule not in SCHEDULES:
            raise InputError.of("schedule", self.schedule, f"one of {', '.join(SCHEDULES)}")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise InputError.of("clip_norm", self.clip_norm, "a number > 0")
        if self.patience is not None and self.patience < 1:
            raise InputError.of("patience", self.patience, "a whole number >= 1")

    def describe(self) -> dict[str, Any]:
        """The options as plain values, functions by name: what a record says of a training."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        del given["progress"]
        return {name: _name(value) for name, value in given.items() if value is not None}

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
                if resume is not None:
                    run.save(Path(resume) / CHECKPOINT, t + 1)
                if self.patience is not None and run.is_worse(validation, collate):
                    break
        run.restore_best()
        if state is not None:
            state["optimizer"] = run.optimizer.state_dict()

    def _make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        given: Any = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        match self.optimizer:
            case "sgd":
                return torch.optim.SGD(parameters, momentum=self.momentum, **given)
            case "adam":
                return torch.optim.Adam(parameters, **given)
            case "adamw":
                return torch.optim.AdamW(parameters, **given)
            case make:
                made = make(parameters)
        if not isinstance(made, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError.of("optimizer()", type(made).__name__, "a torch optimizer")
        return made


CHECKPOINT = "training.pt"


class _Run:
    """One training: where it stands, and its best weights so far."""

    def __init__(
        self,
        how: Training,
        model: nn.Module,
        parameters: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        steps: int,
    ) -> None:
        self.how, self.model, self.parameters = how, model, parameters
        self.optimizer, self.steps = optimizer, steps
        self.device = parameters[0].device
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.best: dict[str, Tensor] | None = None
        self.least, self.waited = math.inf, 0
        self.together = dist.is_available() and dist.is_initialized()

    def step(self, t: int, batch: Any) -> None:
        """One step of the optimizer on one batch."""
        factor = SCHEDULES[self.how.schedule](t / max(self.steps, 1))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.zero_grad(set_to_none=True)
        if self.together:
            self._share(batch)
        else:
            compute_loss(self.model, move_batch(batch, self.device), self.how.loss).backward()
        if self.how.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.how.clip_norm)
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]

    def _share(self, batch: Any) -> None:
        """Of several processes each takes every n-th example; gradients are those of the batch."""
        rank, size, total = dist.get_rank(), dist.get_world_size(), count_examples(batch)
        own = map_tensors(batch, lambda t: t[rank::size] if t.ndim and len(t) == total else t)
        share = count_examples(own) if total > rank else 0
        if share:
            loss = compute_loss(self.model, move_batch(own, self.device), self.how.loss)
            (loss * (share / total)).backward()
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)

    def is_worse(self, validation: Any, collate: Collate | None) -> bool:
        """Whether the loss on validation data has not fallen for ``patience`` epochs."""
        found = evaluate(self.model, validation, loss=self.how.loss, collate=collate)
        if found.loss < self.least:
            self.least, self.waited = found.loss, 0
            self.best = {name: t.detach().clone() for name, t in self.model.state_dict().items()}
        else:
            self.waited += 1
        return self.waited >= cast(int, self.how.patience)

    def restore_best(self) -> None:
        """The weights of the epoch that did best on validation data."""
        if self.best is not None:
            self.model.load_state_dict(self.best)

    def save(self, path: Path, done: int) -> None:
        """A checkpoint after an epoch; the one before stays until this one is complete."""
        kept = {
            "done": done,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
            "best": self.best,
            "least": self.least,
            "waited": self.waited,
        }
        buffer = io.BytesIO()
        torch.save(kept, buffer)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, buffer.getvalue(), private=True)
        except OSError as error:
            raise RunError(
                f"checkpoint {path} cannot be written: {error.strerror}; make room and resume"
            ) from error

    def load(self, path: Path) -> int:
        """Go on from a checkpoint, if there is one; returns how many steps are done."""
        if not path.exists():
            return 0
        try:
            kept = cast(Mapping[str, Any], torch.load(path, weights_only=True))
            self.model.load_state_dict(kept["model"])
            self.optimizer.load_state_dict(kept["optimizer"])
            torch.set_rng_state(kept["random"])
            self.best, self.least, self.waited = kept["best"], kept["least"], kept["waited"]
            return int(kept["done"])
        except Exception as error:
            raise InputError(
                f"checkpoint {path} cannot be read: {error}; remove it to start anew"
            ) from None


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


def _name(value: Any) -> Any:
    if isinstance(value, str | int | float):
        return value
    return getattr(value, "__qualname__", type(value).__name__)
