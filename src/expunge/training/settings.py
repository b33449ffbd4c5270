"""How a model is trained: the options that every training has, checked once, and the optimizer."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Required, TypedDict, TypeVar, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge.errors import InputError
from expunge.training.batches import Augment, Batches
from expunge.training.holding import find_held, is_array
from expunge.training.losses import LossFunction

ScheduleName = Literal["constant", "one-cycle"]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OptimizerName = Literal["sgd", "adam", "adamw"]
Prepare = Callable[[Tensor], Tensor]
Compile = bool | Literal["auto"]
F = TypeVar("F", bound=Callable[..., Any])

# The linear one-cycle schedule: (part of the steps, part of the peak), straight lines in between.
_ONE_CYCLE = ((0.0, 1 / 25), (0.3, 1.0), (0.85, 1 / 25), (1.0, 1 / 25e4))


class SharedOptions(TypedDict, total=False):
    """The options that runs trained together have in common; :class:`Settings` explains them."""

    epochs: Required[float]
    batch_size: int
    momentum: float
    schedule: ScheduleName
    augment: Augment | None
    prepare: Prepare | None
    loss_fn: LossFunction | None
    compile: Compile


class Options(SharedOptions, total=False):
    """The options of a training; :class:`Settings` explains them."""

    learning_rate: Required[float]
    weight_decay: float
    optimizer: MakeOptimizer | OptimizerName | None
    seed: int
    features: str | None


@runtime_checkable
class InMemory(Protocol):
    """Samples in memory: :class:`expunge.tasks.samples.Samples`, or anything with both tensors."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...


@dataclass(frozen=True)
class Settings:
    """The options of a training.

    ``epochs`` may be a fraction. ``optimizer`` is "sgd", "adam" or "adamw", or a function of the
    parameters that makes a torch optimizer; the schedule then scales its own learning rates.
    ``batch_size``, ``augment(inputs, generator)``
    and ``prepare(inputs)`` are for data in memory. ``seed`` draws their order, and dropout.
    ``compile`` has the loss of data in memory compiled, "auto" where that pays
    (:mod:`expunge.training.compiled`). ``features`` names a frozen module whose output is computed
    once per sample (:mod:`expunge.training.cached`).

    >>> Settings(epochs=2, learning_rate=-1.0)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: learning_rate is -1.0; it must be a finite number >= 0
    """

    epochs: float
    learning_rate: float
    batch_size: int = 128
    weight_decay: float = 0.0
    momentum: float = 0.0
    schedule: ScheduleName = "constant"
    optimizer: MakeOptimizer | OptimizerName | None = None
    augment: Augment | None = None
    prepare: Prepare | None = None
    loss_fn: LossFunction | None = cross_entropy
    seed: int = 0
    compile: Compile = "auto"
    features: str | None = None

    def __post_init__(self) -> None:
        for name in ("epochs", "learning_rate", "weight_decay", "momentum"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError.of(name, getattr(self, name), "a finite number >= 0")
        if self.batch_size != int(self.batch_size) or self.batch_size < 1:
            raise InputError.of("batch_size", self.batch_size, "a whole number >= 1")
        check_choice(self.optimizer, self.momentum)
        if not isinstance(self.compile, bool) and self.compile != "auto":
            raise InputError.of("compile", self.compile, "True, False or 'auto'")

    def make_loader(
        self, data: InMemory | Iterable[Any], generator: torch.Generator | None = None
    ) -> Iterable[Any]:
        """Batches of data in memory, in the order of ``generator`` or the seed; a loader itself."""
        if isinstance(data, Iterable) or not isinstance(data, InMemory):  # pyright: ignore[reportUnnecessaryIsInstance]
            if self.augment is not None or self.prepare is not None:
                raise InputError("augment and prepare are for samples in memory; data is a loader")
            return data
        return self.make_batches(data, generator)

    def make_batches(self, data: InMemory, generator: torch.Generator | None = None) -> Batches:
        """The batches of data in memory, from the start."""
        return Batches(
            data.inputs,
            data.targets,
            batch_size=self.batch_size,
            generator=generator or torch.Generator().manual_seed(self.seed),
            augment=self.augment,
            prepare=self.prepare,
        )

    def make_optimizer(self, model: nn.Module) -> Scheduled:
        """The optimizer of the trainable parameters of ``model``."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        rate, decay = self.learning_rate, self.weight_decay
        return make_optimizer(self.optimizer, parameters, rate, self.momentum, decay)

    def count_steps(self, length: int) -> int:
        """Steps of ``epochs`` passes through ``length`` batches."""
        return math.ceil(self.epochs * length - 1e-9)


def check_choice(optimizer: object, momentum: float) -> None:
    """Refuse an optimizer that is none, and momentum where it would be left out.

    >>> check_choice("lion", 0.0)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: optimizer is 'lion'; it must be 'sgd', 'adam', 'adamw' or a ...
    """
    if optimizer is None or optimizer == "sgd":
        return
    if optimizer not in ("adam", "adamw"):
        if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
            shown = optimizer if isinstance(optimizer, str) else type(optimizer).__name__
            valid = "'sgd', 'adam', 'adamw' or a function of the parameters that makes one"
            raise InputError.of("optimizer", shown, valid)
    elif momentum > 0:
        raise InputError.of("momentum", momentum, f"0 with optimizer={optimizer!r}")


def make_optimizer(
    optimizer: MakeOptimizer | OptimizerName | None,
    parameters: list[nn.Parameter],
    learning_rate: float,
    momentum: float,
    weight_decay: float,
) -> Scheduled:
    """The optimizer of these parameters; a function's own is made anew and holds nothing else."""
    given: Any = {"lr": learning_rate, "weight_decay": weight_decay}
    match optimizer:
        case None | "sgd":
            return Scheduled(torch.optim.SGD(parameters, momentum=momentum, **given))
        case "adam":
            return Scheduled(torch.optim.Adam(parameters, **given))
        case "adamw":
            return Scheduled(torch.optim.AdamW(parameters, **given))
        case _:
            before = [p.detach().clone() for p in parameters]
            made = check_optimizer(optimizer(parameters), parameters)
            if not all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True)):
                raise InputError(
                    "optimizer() changes the parameters; it must leave them as they are"
                )
            return Scheduled(made)


def check_optimizer(
    optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The optimizer, if it is of these parameters and starts with nothing but its settings.

    A state may be there from the start (Adagrad's), if it is zero or a number of the settings.

    >>> x = nn.Parameter(torch.ones(3))
    >>> used = torch.optim.SGD([x], 0.1, momentum=0.9)
    >>> used.state[x]["momentum_buffer"] = torch.ones(3)
    >>> check_optimizer(used, [x])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: optimizer() returns an optimizer that holds a tensor ...
    """
    if not isinstance(optimizer, torch.optim.Optimizer):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of("optimizer()", type(optimizer).__name__, "a torch optimizer")
    own = sorted(id(p) for group in optimizer.param_groups for p in group["params"])
    if own != sorted(map(id, parameters)):
        raise InputError(
            "optimizer() returns an optimizer of other parameters than those it was given; it must "
            "hold each of them once and nothing else"
        )
    settings = [v for v in optimizer.defaults.values() if isinstance(v, Tensor | float | int)]
    numbers = {0.0, *(float(v) for v in settings if not isinstance(v, Tensor) or v.numel() == 1)}
    known = {*own, *(id(p.grad) for p in parameters)}
    for item in find_held(optimizer):
        if id(item) in known or not is_array(item):
            continue
        plain = isinstance(item, Tensor) or (isinstance(item, np.ndarray) and item.dtype != object)
        if not (plain and any(bool((cast(Any, item) == number).all()) for number in numbers)):
            raise InputError(
                "optimizer() returns an optimizer that holds a tensor of an earlier training; it "
                "must be made anew, its state empty or filled with a number of its settings"
            )
    return optimizer


def spell_out(options: Any) -> Callable[[F], F]:
    """Write the options one by one, with their defaults, into the signature that ``help`` shows.

    >>> @spell_out(Options)
    ... def train(model, **options): ...
    >>> str(inspect.signature(train))[:51]
    "(model, *, epochs: 'float', learning_rate: 'float',"
    """

    def write(function: F) -> F:
        given = inspect.signature(function)
        kept = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = options.__required_keys__ | options.__optional_keys__
        own = [p for p in inspect.signature(Settings).parameters.values() if p.name in names]
        kept += [p.replace(kind=p.KEYWORD_ONLY) for p in own]
        vars(function)["__signature__"] = given.replace(parameters=kept)
        return function

    return write


class Scheduled:
    """A torch optimizer whose learning rates a schedule scales.

    >>> x = nn.Parameter(torch.tensor([1.0]))
    >>> descent = Scheduled(torch.optim.SGD([x], 0.5, weight_decay=1.0))
    >>> (3 * x).backward()
    >>> descent.step(factor=0.5)
    >>> x.item(), x.grad, descent.describe()
    (0.0, None, 'SGD(weight_decay=1.0)')
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    @property
    def learning_rate(self) -> float:
        """That of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def clear(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, factor: float) -> None:
        """One step at ``factor`` times every learning rate; the gradients are used up."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self.clear()

    def describe(self) -> str:
        """The name and what is not zero among the usual settings."""
        group = self.optimizer.param_groups[0]
        names = ("momentum", "weight_decay", "betas")
        shown = [f"{name}={group[name]}" for name in names if group.get(name)]
        return type(self.optimizer).__name__ + (f"({', '.join(shown)})" if shown else "")


def schedule_factor(schedule: ScheduleName, step: int, steps: int) -> float:
    """The part of the peak learning rate at ``step`` of ``steps``.

    Linear one-cycle: from 1/25 up to 1 at 30 % of the steps, down to 1/25 at 85 %, then to nothing.

    >>> [round(schedule_factor("one-cycle", t, 10), 3) for t in (0, 3, 9)]
    [0.04, 1.0, 0.027]
    """
    if schedule == "constant":
        return 1.0
    if schedule != "one-cycle":
        raise InputError.of("schedule", schedule, "'constant' or 'one-cycle'")
    u = step / max(steps, 1)
    for (a, low), (b, high) in itertools.pairwise(_ONE_CYCLE):
        if u <= b:
            return low + (high - low) * (u - a) / (b - a)
    return _ONE_CYCLE[-1][1]
