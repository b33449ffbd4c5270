"""Training before the request and fine-tuning after the noise: SGD, one-cycle, batches in memory.

Nothing here is certified by itself. Fine-tuning on retained data after the last noise is
post-processing, so it costs nothing, provided that it starts from what the record says, sees
nothing of what was forgotten and draws from a seed that anyone may know: ``fine_tune`` checks it.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge.certificates.identifiers import Commitment, commit, opens, read_names
from expunge.certificates.record import FineTuning, Run, RunRecord
from expunge.errors import InputError, UnlearningError
from expunge.processes.agreement import check_step
from expunge.processes.group import Processes, is_sharded
from expunge.processes.weights import hash_weights, list_tensors, to_local
from expunge.progress import show_progress
from expunge.training.batches import Augment, Batches, Cycle, count_samples, move_batch
from expunge.training.compiled import Compile, CompiledLoss, plan_loss, warn_uncompiled
from expunge.training.losses import LossFunction, compute_loss
from expunge.training.optimizers import Optimizing, Scheduled, Sgd
from expunge.training.randomness import draw_apart, seed_random, seeded_random, untouched_random
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

    ``diverged`` is the first step, from 0, whose loss was not finite; ``note`` says why the steps
    were not ``compiled``, if that was considered.
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
    diverged: int | None = None


def summarise_losses(losses: Sequence[Tensor], length: int) -> tuple[tuple[float, ...], int | None]:
    """The mean loss of each pass of ``length`` steps, and the first step that was not finite.

    >>> summarise_losses([torch.tensor(1.0), torch.tensor(3.0), torch.tensor(torch.nan)], 2)
    ((2.0, nan), 2)
    """
    if len(losses) == 0:
        return (), None
    table = torch.stack(list(losses))
    wrong = torch.nonzero(~torch.isfinite(table)).flatten().tolist()
    return tuple(float(part.mean()) for part in table.split(length)), next(iter(wrong), None)


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
    processes: Processes | None = None,
) -> TrainingLog:
    """Train the module's trainable parameters in place, in the train or eval mode it is in.

    ``data`` is in memory (``inputs`` and ``targets``; then ``batch_size``, ``augment`` and
    ``prepare`` apply, and the order comes from ``generator`` or ``seed``) or any loader.
    ``optimizer(parameters)`` makes another torch optimizer than SGD; the schedule then scales its
    own learning rates. ``epochs`` may be a fraction. Dropout draws from ``seed`` too; the global
    random state is untouched. ``on_pass(passes, mean loss)`` is called after every pass through
    the data, when the module holds that pass's parameters.

    ``compile`` has the loss of data in memory compiled; the result is the same up to rounding.
    "auto" does so for long runs of large networks (:mod:`expunge.training.compiled`). Several
    ``processes`` each take their share of every batch and average their gradients.

    >>> model = nn.Linear(2, 2)
    >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> log = train(model, batches, epochs=3, learning_rate=0.5)
    >>> log.steps, log.losses[0] > log.losses[-1]
    (3, True)
    """
    check_numbers(epochs, learning_rate, batch_size, weight_decay, momentum)
    processes = processes or Processes()
    loader = _make_loader(data, batch_size, augment, prepare, generator, seed)
    length = _count_batches(loader)
    steps = math.ceil(epochs * length - 1e-9)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UnlearningError("the model has no trainable parameter; there is nothing to train")
    optimizing: Optimizing = (
        Sgd(parameters, learning_rate, momentum, weight_decay)
        if optimizer is None
        else Scheduled(optimizer(parameters))
    )
    planned = plan_loss(compile if processes.alone else False, model, loader, loss_fn, steps)
    cycle, device, sharded = (
        Cycle(Shares(loader, processes)),
        parameters[0].device,
        is_sharded(model),
    )
    losses, evaluations = list[Tensor](), 0
    with untouched_random():
        seed_random(seed)
        optimizing.clear()
        for t in show_progress(range(steps), steps, "training", progress and processes.leads):
            share = cycle.take()
            batch = move_batch(share.batch, device)
            with _work_apart(processes, seed, t):
                if isinstance(planned, CompiledLoss):
                    loss = planned(batch)
                else:
                    loss = compute_loss(model, batch, loss_fn)
                scale = share.weight * (processes.size if sharded else 1)
                (loss if scale == 1 else loss * scale).backward()
            if not (sharded or processes.alone):
                _average(parameters, processes)
            optimizing.step(schedule_factor(schedule, t, steps))
            losses.append(loss.detach())
            evaluations += share.total
            if on_pass is not None and ((t + 1) % length == 0 or t + 1 == steps):
                passed = t // length * length
                on_pass(t // length + 1, float(torch.stack(losses[passed:]).mean()))
    note = planned.note if isinstance(planned, CompiledLoss) else planned
    if isinstance(planned, CompiledLoss) and note and compile is True:
        warn_uncompiled(note)
    given = getattr(loader, "batch_size", None)
    means, diverged = summarise_losses(losses, length)
    return TrainingLog(
        optimizer=optimizing.describe(),
        epochs=float(epochs),
        steps=steps,
        learning_rate=float(learning_rate),
        batch_size=given if isinstance(given, int) else math.ceil(evaluations / max(steps, 1)),
        schedule=schedule,
        gradient_evaluations=evaluations,
        losses=means,
        compiled=isinstance(planned, CompiledLoss) and not note,
        note=note,
        diverged=diverged,
    )


@contextlib.contextmanager
def _work_apart(processes: Processes, seed: int, step: int) -> Generator[None]:
    """Of several processes each draws its own dropout, and hears if another is gone."""
    if processes.alone:
        yield
        return
    text = f"expunge/training {seed} {step} {processes.rank}"
    with draw_apart(text), processes.listening("training"):
        yield


def _average(parameters: list[nn.Parameter], processes: Processes) -> None:
    """Gradients of shares, scaled already, as the gradient of the batch, on every process."""
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for p, g in zip(parameters, processes.add_up(zeros), strict=True):
        p.grad = g.to(p.dtype)


def fine_tune(
    run: Run,
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
    seed: int = 0,
    compile: Compile = "auto",
    on_pass: OnPass | None = None,
    ids: Iterable[str | int] | None = None,
    forget_ids: Iterable[str | int] | None = None,
    progress: bool = False,
    processes: Processes | None = None,
) -> Run:
    """Train a copy of ``run.model`` on retained data and write it into the record.

    The options are those of :func:`train`; order and dropout follow from ``seed``, a loader's own
    generator too. A model that is not what the record says is refused. ``ids`` identify the data
    (default: ``data.ids``); they are committed to, and must not meet what the run forgot
    (``run.forgotten``, and ``forget_ids`` beside it). A sharded model is trained in place; of
    several ``processes`` every one returns the same run.

    >>> from expunge import OutputPerturbation
    >>> from expunge.noisy.run import unlearn
    >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> run = unlearn(nn.Linear(2, 2), batches, OutputPerturbation(start_clip=1.0, noise_std=4.0))
    >>> tuned = fine_tune(run, batches, epochs=2, learning_rate=0.1)
    >>> tuned.record.finetune.optimizer, tuned.record.finetune.steps
    ('SGD', 2)
    """
    tuning = begin_fine_tuning(run, data, ids, forget_ids, processes or Processes())
    with seeded_random(seed, data):
        log = train(
            tuning.model,
            data,
            epochs=epochs,
            learning_rate=learning_rate,
            batch_size=batch_size,
            weight_decay=weight_decay,
            momentum=momentum,
            schedule=schedule,
            optimizer=optimizer,
            augment=augment,
            prepare=prepare,
            loss_fn=loss_fn,
            seed=seed,
            compile=compile,
            on_pass=on_pass,
            progress=progress,
            processes=tuning.processes,
        )
    return tuning.end(log)


@dataclass(frozen=True, eq=False)
class Tuning:
    """A fine-tuning that was allowed to begin; ``fixed`` are hashes of what must not change."""

    run: Run
    model: nn.Module
    processes: Processes
    data: Commitment | None
    checked: bool
    forgotten: frozenset[str] | None
    fixed: dict[str, str]

    def end(self, log: TrainingLog) -> Run:
        """The run with its tuned model; refused if that is not finite, or not what was allowed."""
        check_trained(self.model, log, "fine-tuning")
        found = _hash_fixed(self.model, self.run.record, self.processes)
        changed = sorted(name for name in self.fixed if found.get(name) != self.fixed[name])
        if changed:
            raise UnlearningError(
                f"{', '.join(changed[:3])} changed during fine-tuning but is public or frozen; "
                "freeze the module that writes it (requires_grad, eval mode)"
            )
        after = hash_weights(list_tensors(self.model), self.processes)
        check_step(self.processes, {"step": f"{log.steps} of fine-tuning", "parameters": after})
        finetune = describe_training(log, self.data, self.checked)
        record = replace(self.run.record, finetune=finetune, weights_after=after)
        return Run(self.model, self.processes.share(record), self.forgotten)


def begin_fine_tuning(
    run: Run,
    data: object,
    ids: Iterable[str | int] | None = None,
    forget_ids: Iterable[str | int] | None = None,
    processes: Processes | None = None,
) -> Tuning:
    """Refuse a run that is not what its record says, and data that hold what it forgot."""
    record, processes = run.record, processes or Processes()
    if record.finetune is not None:
        raise InputError("this run was fine-tuned already; fine-tune the run that unlearn returned")
    if hash_weights(list_tensors(run.model), processes) != record.weights_after:
        raise UnlearningError(
            "run.model is not what the record says: a weight or buffer was changed or replaced "
            "after the run; fine-tune the run that unlearn returned"
        )
    public = record.public
    if (
        public is not None
        and hash_weights(_select(run.model, public.names), processes) != public.hash
    ):
        raise UnlearningError(
            "a public tensor of run.model is not what the record says; fine-tune the run that "
            "unlearn returned"
        )
    forgotten = run.forgotten
    if forget_ids is not None:
        given = frozenset(read_request(forget_ids) or ())
        if forgotten is None and record.forget is not None and not opens(record.forget, given):
            raise InputError("forget_ids is not the set that the record commits to")
        forgotten = given | (forgotten or frozenset())
    names = read_retained(data, ids, forgotten)
    model = run.model if is_sharded(run.model) else copy.deepcopy(run.model)
    return Tuning(
        run=run,
        model=model,
        processes=processes,
        data=None if names is None else commit(names),
        checked=None not in (names, forgotten, count_samples(data)),
        forgotten=forgotten,
        fixed=_hash_fixed(model, record, processes),
    )


def read_request(forget_ids: Iterable[str | int] | None) -> tuple[str, ...] | None:
    """The identifiers to forget, None where they are not known; a request names someone."""
    names = read_names(forget_ids)
    if names is not None and not names:
        raise InputError.of("forget_ids", [], "one identifier or more")
    return names


def read_retained(
    data: object, ids: Iterable[str | int] | None, forgotten: Iterable[str] | None
) -> tuple[str, ...] | None:
    """The identifiers of retained data (default: ``data.ids``), one for each sample.

    None where they are not known; refused where one of them is forgotten.

    >>> read_retained([torch.zeros(2, 1)], ["a", "b"], ["b"])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: retain_ids holds 'b', which is forgotten (1 in all); ...
    """
    names = read_names(getattr(data, "ids", None) if ids is None else ids)
    if names is None:
        return None
    count = count_samples(data)
    if count is not None and len(names) != count:
        raise InputError.of("number of retain_ids", len(names), f"{count}, one for each example")
    both = set(names).intersection(forgotten or ())
    if both:
        raise InputError(
            f"retain_ids holds {min(both)!r}, which is forgotten ({len(both)} in all); "
            "the retained data must not hold what is forgotten"
        )
    return names


def check_trained(model: nn.Module, log: TrainingLog, doing: str) -> None:
    """Refuse a model that training drove out of the numbers."""
    for name, tensor in list_tensors(model).items():
        own = to_local(tensor)
        if own.is_floating_point() and not bool(torch.isfinite(own).all()):
            step = log.steps - 1 if log.diverged is None else log.diverged
            length = max(int(log.steps / max(log.epochs, 1e-9) + 1e-9), 1)
            raise UnlearningError(
                f"{name} is not finite after {doing}: training diverged at batch "
                f"{step % length + 1} of epoch {step // length + 1}; lower the learning rate"
            )


def describe_training(log: TrainingLog, data: Commitment | None, checked: bool) -> FineTuning:
    """A training on retained data as a record keeps it, with a commitment to its identifiers."""
    kept: dict[str, Any] = {f.name: getattr(log, f.name) for f in fields(TrainingLog)[:7]}
    return FineTuning(**kept, data=data, checked=checked)


def _select(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    every = dict(model.named_parameters(remove_duplicate=False))
    held = every | dict(model.named_buffers(remove_duplicate=False))
    return {name: held[name].detach() for name in names if name in held}


def _hash_fixed(model: nn.Module, record: RunRecord, processes: Processes) -> dict[str, str]:
    """Hashes of all that fine-tuning must leave alone: what is public, frozen, or a buffer that is
    not a statistic made anew."""
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    fixed |= {name for name, _ in model.named_buffers()}
    fixed -= set(record.buffer_names if record.buffers == "reset" else ())
    fixed |= set(() if record.public is None else record.public.names)
    chosen = _select(model, sorted(fixed))
    return {name: hash_weights({name: tensor}, processes) for name, tensor in chosen.items()}


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
