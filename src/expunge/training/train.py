"""Training before the request and fine-tuning after the noise: SGD, one-cycle, batches in memory.

Nothing here is certified by itself. Fine-tuning on retained data after the last noise is
post-processing, so it costs nothing; ``fine_tune`` writes it into the record.

Fine-tuning and measuring by all processes of a run, each on its share of every batch.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge.certificates.identifiers import Commitment, commit_disjoint
from expunge.certificates.record import FineTuning, Run
from expunge.errors import InputError, UnlearningError
from expunge.processes.agreement import check_step
from expunge.processes.group import Processes, is_sharded
from expunge.processes.weights import hash_together, hash_weights
from expunge.progress import show_progress
from expunge.training.batches import Augment, Batches, Cycle, count_examples, move_batch
from expunge.training.compiled import Compile, CompiledSteps, plan_steps, warn_uncompiled
from expunge.training.losses import LossFunction, compute_loss
from expunge.training.optimizers import Optimizing, Scheduled, Sgd
from expunge.training.randomness import draw_apart, untouched_random
from expunge.training.shares import Shares

ScheduleName = Literal["constant", "one-cycle"]
OnPass = Callable[[int, float], object]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

# The linear one-cycle schedule: (part of the steps, part of the peak), straight lines in between.
_ONE_CYCLE = ((0.0, 1 / 25), (0.3, 1.0), (0.85, 1 / 25), (1.0, 1 / 25e4))


@runtime_checkable
class InMemory(Protocol):
    """Samples in memory: :class:`expunge.tasks.samples.Samples`, or anything with both tensors."""

    @property
    def inputs(self) -> Tensor: ...

    @property
    def targets(self) -> Tensor: ...


@dataclass(frozen=True)
class TrainingLog:
    """What ran: ``losses`` is the mean training loss of each pass through the data.

    ``note`` says why the steps were not ``compiled``, if that was considered.
    """

    optimizer: str
    epochs: float
    steps: int
    learning_rate: float
    batch_size: int
    schedule: str
    gradient_evaluations: int
    losses: tuple[float, ...]
    compiled: bool = False
    note: str = ""


def train(
    model: nn.Module,
    data: InMemory | Iterable[Any],
    *,
    epochs: float,
    learning_rate: float,
    batch_size: int = 128,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    schedule: ScheduleName = "constant",
    optimizer: MakeOptimizer | None = None,
    augment: Augment | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    loss_fn: LossFunction | None = cross_entropy,
    generator: torch.Generator | None = None,
    seed: int = 0,
    compile: Compile = "auto",
    on_pass: OnPass | None = None,
    progress: bool = False,
) -> TrainingLog:
    """Train the module's trainable parameters in place, in the train or eval mode it is in.

    ``data`` is in memory (``inputs`` and ``targets``; then ``batch_size``, ``augment`` and
    ``prepare`` apply, and the order comes from ``generator`` or ``seed``) or any loader.
    ``optimizer(parameters)`` makes another torch optimizer than SGD; the schedule then scales its
    own learning rates. ``epochs`` may be a fraction. Dropout draws from ``seed`` too; the global
    random state is untouched. ``on_pass(passes, mean loss)`` is called after every pass through
    the data, when the module holds that pass's parameters.

    ``compile`` has whole steps compiled, for SGD on data in memory; the result is the same up to
    rounding. "auto" does so when the run would take more than a minute without
    (:mod:`expunge.training.compiled` has the model and the checks); what cannot be compiled runs as it is.

    >>> model = nn.Linear(2, 2)
    >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> log = train(model, batches, epochs=3, learning_rate=0.5)
    >>> log.steps, log.losses[0] > log.losses[-1]
    (3, True)
    """
    check_numbers(epochs, learning_rate, batch_size, weight_decay, momentum)
    loader = _make_loader(data, batch_size, augment, prepare, generator, seed)
    length = _count_batches(loader)
    steps = math.ceil(epochs * length - 1e-9)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UnlearningError("the model has no trainable parameter; there is nothing to train")
    optimizing = (
        Sgd(parameters, learning_rate, momentum, weight_decay)
        if optimizer is None
        else Scheduled(optimizer(parameters))
    )
    planned = plan_steps(compile, model, loader, optimizing, loss_fn, steps)
    factor = functools.partial(schedule_factor, schedule, steps=steps)
    with untouched_random():
        torch.manual_seed(seed)
        optimizing.clear()
        if isinstance(planned, CompiledSteps):
            running = planned.run(steps, factor)
        else:
            running = _run_steps(model, Cycle(loader), optimizing, loss_fn, steps, factor)
        evaluations, losses = _gather_losses(running, length, steps, progress, on_pass)
    note = planned.note if isinstance(planned, CompiledSteps) else planned
    if isinstance(planned, CompiledSteps) and note and compile is True:
        warn_uncompiled(note)
    given = getattr(loader, "batch_size", None)
    return TrainingLog(
        optimizer=optimizing.describe(),
        epochs=float(epochs),
        steps=steps,
        learning_rate=float(learning_rate),
        batch_size=given if isinstance(given, int) else math.ceil(evaluations / max(steps, 1)),
        schedule=schedule,
        gradient_evaluations=evaluations,
        losses=losses,
        compiled=isinstance(planned, CompiledSteps) and not note,
        note=note,
    )


def _run_steps(
    model: nn.Module,
    cycle: Cycle,
    optimizing: Optimizing,
    loss_fn: LossFunction | None,
    steps: int,
    factor: Callable[[int], float],
) -> Iterator[tuple[Tensor, int]]:
    """The steps themselves; yields the loss of each, and the examples it saw."""
    device = optimizing.parameters[0].device
    for t in range(steps):
        batch = cycle.take()
        loss = compute_loss(model, move_batch(batch, device), loss_fn)
        loss.backward()
        optimizing.step(factor(t))
        yield loss.detach(), count_examples(batch)


def _gather_losses(
    running: Iterable[tuple[Tensor, int]],
    length: int,
    steps: int,
    progress: bool,
    on_pass: OnPass | None,
) -> tuple[int, tuple[float, ...]]:
    """Run it all; returns the examples seen, and the mean loss of each pass."""
    ticks = show_progress(range(steps), steps, "training", progress)
    held, losses, evaluations = list[Tensor](), list[float](), 0
    done = passed = 0
    for loss, examples in running:
        evaluations += examples
        held.append(loss)
        done, passed = done + loss.numel(), passed + loss.numel()
        for _ in itertools.islice(ticks, loss.numel()):
            pass
        if passed == length or done == steps:
            losses.append(float(torch.cat([part.reshape(-1) for part in held]).mean()))
            held, passed = [], 0
            if on_pass is not None:
                on_pass(len(losses), losses[-1])
    return evaluations, tuple(losses)


def fine_tune(
    run: Run,
    data: InMemory | Iterable[Any],
    *,
    ids: Iterable[str | int] | None = None,
    forget_ids: Iterable[str | int] | None = None,
    **options: Any,
) -> Run:
    """Train a copy of ``run.model`` on retained data and write it into the record.

    ``options`` are those of :func:`train`. ``ids`` identify the data (default: ``data.ids``); they
    are committed to, and must not meet ``forget_ids`` when both are known.

    >>> from expunge import OutputPerturbation
    >>> from expunge.noisy.run import unlearn
    >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> run = unlearn(nn.Linear(2, 2), batches, OutputPerturbation(start_clip=1.0, noise_std=4.0))
    >>> tuned = fine_tune(run, batches, epochs=2, learning_rate=0.1)
    >>> tuned.record.finetune.optimizer, tuned.record.finetune.steps
    ('SGD', 2)
    """
    if run.record.finetune is not None:
        raise InputError("this run was fine-tuned already; fine-tune the run that unlearn returned")
    known = getattr(data, "ids", None) if ids is None else ids
    _, committed = commit_disjoint(forget_ids, known)
    model = copy.deepcopy(run.model)
    return write_fine_tuning(run, model, train(model, data, **options), committed)


def write_fine_tuning(run: Run, model: nn.Module, log: TrainingLog, data: Commitment | None) -> Run:
    """The run with ``model`` in place of its own, and in the record how it was fine-tuned."""
    finetune = FineTuning(
        optimizer=log.optimizer,
        epochs=log.epochs,
        steps=log.steps,
        learning_rate=log.learning_rate,
        batch_size=log.batch_size,
        schedule=log.schedule,
        gradient_evaluations=log.gradient_evaluations,
        data=data,
    )
    after = hash_weights(model.state_dict())
    return Run(model, replace(run.record, finetune=finetune, weights_after=after))


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


def _make_loader(
    data: InMemory | Iterable[Any],
    batch_size: int,
    augment: Augment | None,
    prepare: Callable[[Tensor], Tensor] | None,
    generator: torch.Generator | None,
    seed: int,
) -> Iterable[Any]:
    if isinstance(data, Batches) or not isinstance(data, InMemory):
        if augment is not None or prepare is not None:
            raise InputError("augment and prepare are for samples in memory; data is a loader")
        return data
    generator = torch.Generator().manual_seed(seed) if generator is None else generator
    return Batches(
        data.inputs,
        data.targets,
        batch_size=batch_size,
        generator=generator,
        augment=augment,
        prepare=prepare,
    )


def _count_batches(loader: Iterable[Any]) -> int:
    try:
        length = len(cast(Any, loader))
    except TypeError:
        raise InputError("data has no length; give a loader or list that has one") from None
    if length == 0:
        raise InputError("data is empty; it must yield at least one batch")
    return length


def check_numbers(
    epochs: float, learning_rate: float, batch_size: int, weight_decay: float, momentum: float
) -> None:
    """Refuse settings that no training can have."""
    numbers = {
        "epochs": epochs,
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "momentum": momentum,
    }
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise InputError.of(name, value, "a finite number >= 0")
    if batch_size != int(batch_size) or batch_size < 1:
        raise InputError.of("batch_size", batch_size, "a whole number >= 1")


def fine_tune_together(
    run: Run,
    loader: Any,
    processes: Processes,
    *,
    ids: Iterable[str | int] | None,
    forget_ids: Iterable[str | int] | None,
    epochs: float,
    learning_rate: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    schedule: ScheduleName = "constant",
    optimizer: MakeOptimizer | None = None,
    loss_fn: LossFunction,
    seed: int = 0,
    progress: bool = False,
) -> Run:
    """``fine_tune`` by all processes: the same steps, on gradients averaged over the processes.

    A sharded model is trained in place, any other in a copy. Every process returns the same run.
    """
    if run.record.finetune is not None:
        raise InputError("this run was fine-tuned already; fine-tune the run that unlearn returned")
    check_numbers(epochs, learning_rate, loader.batch_size, weight_decay, momentum)
    _, data = commit_disjoint(forget_ids, ids)
    sharded = is_sharded(run.model)
    model = run.model if sharded else copy.deepcopy(run.model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizing = (
        Sgd(parameters, learning_rate, momentum, weight_decay)
        if optimizer is None
        else Scheduled(optimizer(parameters))
    )
    shares = Shares(loader, processes)
    steps = math.ceil(epochs * len(shares) - 1e-9)
    cycle, device, evaluations = Cycle(shares), parameters[0].device, 0
    optimizing.clear()
    with untouched_random():
        torch.manual_seed(seed)
        for t in show_progress(range(steps), steps, "training", progress and processes.leads):
            share = cycle.take()
            scale = share.weight * (processes.size if sharded else 1)
            text = f"expunge/fine-tuning {seed} {t} {processes.rank}"
            with draw_apart(text), processes.listening("fine-tuning"):
                loss = compute_loss(model, move_batch(share.batch, device), loss_fn)
                (loss * scale).backward()
            if not sharded:
                _average(parameters, processes)
            optimizing.step(schedule_factor(schedule, t, steps))
            evaluations += share.total
    finetune = FineTuning(
        optimizer=optimizing.describe(),
        epochs=float(epochs),
        steps=steps,
        learning_rate=float(learning_rate),
        batch_size=loader.batch_size,
        schedule=schedule,
        gradient_evaluations=evaluations,
        data=data,
    )
    state = model.state_dict()
    after = hash_together(state, processes) if sharded else hash_weights(state)
    check_step(processes, {"step": f"{steps} of fine-tuning", "parameters": after})
    record = replace(run.record, finetune=finetune, weights_after=after)
    return Run(model, processes.share(record))


def _average(parameters: list[nn.Parameter], processes: Processes) -> None:
    """Gradients of shares, scaled already, as the gradient of the batch, on every process."""
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for p, g in zip(parameters, processes.add_up(zeros), strict=True):
        p.grad = g.to(p.dtype)


def describe_training(log: TrainingLog, ids: Any, forget_ids: Any = None) -> FineTuning:
    """A training on retained data as a record keeps it, with a commitment to its identifiers."""
    _, committed = commit_disjoint(forget_ids, ids)
    return FineTuning(
        optimizer=log.optimizer,
        epochs=log.epochs,
        steps=log.steps,
        learning_rate=log.learning_rate,
        batch_size=log.batch_size,
        schedule=log.schedule,
        gradient_evaluations=log.gradient_evaluations,
        data=committed,
    )
