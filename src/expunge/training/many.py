"""Several independent runs trained at once: one step moves all of them.

The parameters of all runs are stacked and the step is mapped over the stack (``torch.func.vmap``),
so that what a small network's step mostly costs, the calls around the arithmetic, is paid once for
all runs. Every run keeps its own start, order, augmentation and learning rate, and gives what
:func:`expunge.training.train` gives for its seed, up to rounding.

**When it pays.** For networks whose step takes under 2 ms; larger ones, convolutions above all, are
faster one after the other. The mapped step must be compiled, which takes ten seconds or more, so
``compile="auto"`` maps the runs when they would take half a minute in sequence by the model of
:mod:`expunge.training.compiled`, and else runs them in sequence. The first steps are run both ways and
compared: whatever cannot be mapped, dropout and batch statistics among it, or comes out
differently, runs in sequence.

Several runs fine-tuned at once, each with its own record.

What :func:`expunge.training.train.fine_tune` is to one run, for the seeds and arms of an experiment or
for many requests on one small network: all of them step together where that is faster
(:mod:`expunge.training.many`), and every run gets the result it would have got alone, up to rounding.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import vmap  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.functional import cross_entropy

from expunge.certificates.identifiers import Commitment, commit_disjoint
from expunge.certificates.record import Run
from expunge.errors import InputError
from expunge.training.batches import Augment, Batches
from expunge.training.compiled import (
    SHORT_STEP,
    Backend,
    Batch,
    Compile,
    allow_compiling,
    check_compile,
    differentiate,
    estimate_step,
    explain,
    find_obstacle,
    forbid_recompiling,
    is_close,
    make_compiled,
)
from expunge.training.losses import LossFunction, compute_loss
from expunge.training.optimizers import Sgd
from expunge.training.randomness import untouched_random
from expunge.training.train import (
    InMemory,
    ScheduleName,
    TrainingLog,
    check_numbers,
    schedule_factor,
    train,
    write_fine_tuning,
)

PAYS_AFTER = 30.0
COMPARED = 3


def train_many(
    models: Sequence[nn.Module],
    data: InMemory | Sequence[InMemory],
    *,
    seeds: Sequence[int],
    epochs: float,
    learning_rate: float | Sequence[float],
    batch_size: int = 128,
    weight_decay: float | Sequence[float] = 0.0,
    momentum: float = 0.0,
    schedule: ScheduleName = "constant",
    augment: Augment | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    loss_fn: LossFunction = cross_entropy,
    compile: Compile = "auto",
) -> list[TrainingLog]:
    """Train every model in place, run i with ``seeds[i]``, as ``train`` would one by one.

    ``data`` in memory is for all runs, or one set for each; so are the learning rate and the
    weight decay. With ``compile=False`` the runs go one after the other.

    >>> from types import SimpleNamespace
    >>> toy = SimpleNamespace(inputs=torch.eye(2), targets=torch.tensor([0, 1]))
    >>> logs = train_many([nn.Linear(2, 2) for _ in range(3)], toy, seeds=range(3), epochs=5,
    ...                   learning_rate=[0.1, 0.2, 0.5])
    >>> [(log.steps, log.learning_rate) for log in logs]
    [(5, 0.1), (5, 0.2), (5, 0.5)]
    """
    n = len(models)
    check_compile(compile)
    if n == 0 or len(seeds) != n:
        raise InputError.of("number of seeds", len(seeds), f"{n}, as many as models, at least 1")
    if len({id(model) for model in models}) != n:
        raise InputError("models holds the same module twice; every run needs its own")
    sets = cast(list[InMemory], _spread("data sets", data, isinstance(data, InMemory), n))
    rates = _spread("learning rates", learning_rate, isinstance(learning_rate, float | int), n)
    decays = _spread("weight decays", weight_decay, isinstance(weight_decay, float | int), n)
    for rate, decay in zip(rates, decays, strict=True):
        check_numbers(epochs, rate, batch_size, decay, momentum)
    shared = _Shared(epochs, batch_size, momentum, schedule, augment, prepare, loss_fn)
    each = zip(models, sets, seeds, rates, decays, strict=True)
    runs = [_Run(*given, shared) for given in each]
    note = _find_reason(compile, runs)
    if not note:
        with untouched_random():
            outcome = _train_together(runs)
        if not isinstance(outcome, str):
            return outcome
        note = outcome
    logs = [run.train(compile) for run in runs]
    return [replace(log, note=f"not together: {note}. {log.note}".strip()) for log in logs]


def _spread(name: str, given: Any, single: bool, count: int) -> list[Any]:
    values = [given] * count if single else list(given)
    if len(values) != count:
        raise InputError.of(f"number of {name}", len(values), f"1 or {count}, as many as models")
    return values


@dataclass(frozen=True)
class _Shared:
    """What all runs have in common."""

    epochs: float
    batch_size: int
    momentum: float
    schedule: ScheduleName
    augment: Augment | None
    prepare: Callable[[Tensor], Tensor] | None
    loss_fn: LossFunction


@dataclass(frozen=True)
class _Run:
    """One of the runs."""

    model: nn.Module
    data: InMemory
    seed: int
    learning_rate: float
    weight_decay: float
    shared: _Shared

    def train(self, compile: Compile) -> TrainingLog:
        """This run by itself."""
        return train(
            self.model,
            self.data,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            seed=self.seed,
            compile=compile,
            **vars(self.shared),
        )

    def make_batches(self) -> Batches:
        """The batches of this run from the start, as ``train`` makes them."""
        return Batches(
            self.data.inputs,
            self.data.targets,
            batch_size=self.shared.batch_size,
            generator=torch.Generator().manual_seed(self.seed),
            augment=self.shared.augment,
            prepare=self.shared.prepare,
        )

    def make_sgd(self, model: nn.Module) -> Sgd:
        """The optimizer of this run, for ``model``."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        return Sgd(parameters, self.learning_rate, self.shared.momentum, self.weight_decay)


def _find_reason(compile: Compile, runs: list[_Run]) -> str:
    """Why the runs are not mapped together; nothing if they are."""
    if compile is False:
        return "compile=False"
    batches, model = runs[0].make_batches(), runs[0].model
    if note := _find_difference(runs) or find_obstacle(model, batches):
        return note
    seconds = estimate_step(model, batches)
    if seconds >= SHORT_STEP:
        return f"steps of about {1e3 * seconds:.2g} ms are as fast one by one"
    total = seconds * _count_steps(runs[0]) * len(runs)
    if compile == "auto" and total < PAYS_AFTER:
        return f"{total:.2g} s in all do not pay for compiling"
    return ""


def _count_steps(run: _Run) -> int:
    return math.ceil(run.shared.epochs * len(run.make_batches()) - 1e-9)


def _find_difference(runs: list[_Run]) -> str:
    """Why these runs cannot share one graph; nothing if they can as far as is known."""
    first, *others = runs
    if not others:
        return "there is one run"
    if _count_steps(first) == 0:
        return "there is no step"
    if any(run.data.inputs.shape != first.data.inputs.shape for run in others):
        return "the data sets are of different shapes"
    if not any(p.requires_grad for p in first.model.parameters()):
        return "there is nothing to train"
    described = [_describe(run.model) for run in runs]
    if any(description != described[0] for description in described):
        return "the models are of different kinds"
    for run in others:
        if note := find_obstacle(run.model, run.make_batches()):
            return note
        pairs = zip(_list_fixed(first.model), _list_fixed(run.model), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return "the models differ in what is not trained"
    return ""


def _describe(model: nn.Module) -> list[Any]:
    modules = [(type(module), module.training) for module in model.modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [*modules, *[(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]]


def _list_fixed(model: nn.Module) -> list[Tensor]:
    return [*[p for p in model.parameters() if not p.requires_grad], *model.buffers()]


def _train_together(runs: list[_Run], backend: Backend = "inductor") -> list[TrainingLog] | str:
    """The logs of all runs, or why they cannot be mapped; then no model has moved."""
    joint = _Joint(runs, backend)
    try:
        note = joint.compare()
        with forbid_recompiling():
            return note or joint.run()
    except Exception as error:  # in sequence, the run that is at fault says what is wrong
        return explain(error)


class _Joint:
    """The stacked runs and their steps."""

    def __init__(self, runs: list[_Run], backend: Backend) -> None:
        self.runs, self.backend, self.shared = runs, backend, runs[0].shared
        self.steps, self.device = _count_steps(runs[0]), runs[0].data.inputs.device
        self.factor = functools.partial(schedule_factor, self.shared.schedule, steps=self.steps)
        self.model = copy.deepcopy(runs[0].model)
        parameters = [dict(run.model.named_parameters()) for run in runs]
        self.names = [name for name, p in parameters[0].items() if p.requires_grad]
        self.stacks = [torch.stack([p[name].detach() for p in parameters]) for name in self.names]
        self.rates = self._make_column([run.learning_rate for run in runs])
        self.decays = self._make_column([run.weight_decay for run in runs])

    def compare(self) -> str:
        """Run the first steps both ways; why the results differ, nothing if they do not."""
        batches = [run.make_batches() for run in self.runs]
        orders = [b.draw_order() for b in batches]
        size = self.shared.batch_size
        starts = range(0, len(batches[0].inputs) - size + 1, size)[: min(COMPARED, self.steps)]
        fetched = [
            [b.fetch(order, start) for b, order in zip(batches, orders, strict=True)]
            for start in starts
        ]
        stacks, momenta = [stack.clone() for stack in self.stacks], self._make_momenta()
        with allow_compiling():
            for t, row in enumerate(fetched):
                self._step(stacks, momenta, _stack(row), t)
        for r, run in enumerate(self.runs):
            model = copy.deepcopy(run.model)
            sgd = run.make_sgd(model)
            for t, row in enumerate(fetched):
                batch = batches[r].make_ready(row[r][0]), row[r][1]
                compute_loss(model, batch, self.shared.loss_fn).backward()
                if any(p.grad is None for p in sgd.parameters):
                    return "a parameter has no part in the loss"
                sgd.step(self.factor(t))
            for k, p in enumerate(sgd.parameters):
                if not is_close(self.stacks[k][r], p.detach(), stacks[k][r]):
                    return "mapped and plain steps differ"
        return ""

    def run(self) -> list[TrainingLog]:
        """All steps from the start; then the models get their parameters."""
        batches = [run.make_batches() for run in self.runs]
        n, size, length = len(batches[0].inputs), self.shared.batch_size, len(batches[0])
        momenta, losses, seen = self._make_momenta(), list[Tensor](), 0
        orders: list[Tensor | None] = []
        for t in range(self.steps):
            start = t % length * size
            if start == 0:
                orders = [b.draw_order() for b in batches]
            losses.append(self._step(self.stacks, momenta, _fetch(batches, orders, start), t))
            seen += min(size, n - start)
        with torch.no_grad():
            for r, run in enumerate(self.runs):
                parameters = dict(run.model.named_parameters())
                for name, stack in zip(self.names, self.stacks, strict=True):
                    parameters[name].copy_(stack[r])
        table = torch.stack(losses)
        return [
            TrainingLog(
                optimizer=run.make_sgd(run.model).describe(),
                epochs=float(self.shared.epochs),
                steps=self.steps,
                learning_rate=float(run.learning_rate),
                batch_size=size,
                schedule=self.shared.schedule,
                gradient_evaluations=seen,
                losses=tuple(float(part.mean()) for part in table[:, r].split(length)),
                compiled=True,
                note=f"together with {len(self.runs) - 1} others",
            )
            for r, run in enumerate(self.runs)
        ]

    def _step(self, stacks: list[Tensor], momenta: list[Tensor], batch: Batch, t: int) -> Tensor:
        """Step t of all runs; a batch that is not whole is not worth a second compilation."""
        whole = batch[1].shape[1] == self.shared.batch_size
        step = make_compiled(_take_joint_step, self.backend) if whole else _take_joint_step
        with torch.no_grad():
            return step(
                self.model,
                self.names,
                stacks,
                momenta,
                batch,
                self.rates * self.factor(t),
                self.decays,
                self.shared.momentum,
                self.shared.prepare,
                self.shared.loss_fn,
            )

    def _make_momenta(self) -> list[Tensor]:
        return [torch.zeros_like(s) for s in self.stacks] if self.shared.momentum != 0 else []

    def _make_column(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.device)


def _take_joint_step(
    model: nn.Module,
    names: list[str],
    stacks: list[Tensor],
    momenta: list[Tensor],
    batch: Batch,
    rates: Tensor,
    decays: Tensor,
    momentum: float,
    prepare: Callable[[Tensor], Tensor] | None,
    loss_fn: LossFunction,
) -> Tensor:
    """``Sgd.step`` for all runs at once; returns the losses."""

    def measure(x: list[Tensor], inputs: Tensor, targets: Tensor) -> tuple[list[Tensor], Tensor]:
        ready = inputs if prepare is None else prepare(inputs)
        return differentiate(model, names, x, ready, targets, loss_fn)

    g, losses = vmap(measure)(stacks, *batch)
    g = [a + _match(decays, x) * x for a, x in zip(g, stacks, strict=True)]
    if len(momenta) > 0:
        g = [v.copy_(momentum * v + a) for a, v in zip(g, momenta, strict=True)]
    for x, v in zip(stacks, g, strict=True):
        x.copy_(x - _match(rates, x) * v)
    return losses


def _match(column: Tensor, stack: Tensor) -> Tensor:
    """One number per run, shaped and rounded to go with a stack of tensors."""
    return column.to(stack.dtype).reshape(-1, *[1] * (stack.ndim - 1))


def _fetch(batches: list[Batches], orders: list[Tensor | None], start: int) -> Batch:
    """The batches of all runs, stacked; one gather if they are of the same data."""
    first = batches[0]
    same = all(b.inputs is first.inputs and b.targets is first.targets for b in batches)
    if first.augment is not None or not same:
        return _stack([b.fetch(order, start) for b, order in zip(batches, orders, strict=True)])
    stop = start + first.batch_size
    chosen = torch.stack([cast(Tensor, order)[start:stop] for order in orders])
    inputs = first.inputs.index_select(0, chosen.reshape(-1))
    targets = first.targets.index_select(0, chosen.reshape(-1))
    return inputs.unflatten(0, chosen.shape), targets.unflatten(0, chosen.shape)


def _stack(batches: Sequence[Batch]) -> Batch:
    return torch.stack([x for x, _ in batches]), torch.stack([y for _, y in batches])


def fine_tune_many(
    runs: Sequence[Run],
    data: InMemory | Sequence[InMemory],
    *,
    seeds: Sequence[int],
    forget_ids: Sequence[Iterable[str | int] | None] | None = None,
    **options: Any,
) -> list[Run]:
    """Train a copy of every run's model on retained data and write it into the run's record.

    ``data`` is for all runs, or one set for each; ``options`` are those of
    :func:`expunge.training.many.train_many`. The identifiers of each set are committed to, and must
    not meet the run's ``forget_ids`` when both are known. Runs that share a set share the
    commitment to it.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from expunge import OutputPerturbation
    >>> from expunge.noisy.run import unlearn
    >>> toy = SimpleNamespace(inputs=torch.eye(2), targets=torch.tensor([0, 1]))
    >>> recipe = OutputPerturbation(start_clip=1.0, noise_std=4.0)
    >>> runs = [unlearn(torch.nn.Linear(2, 2), [], recipe) for _ in range(2)]
    >>> tuned = fine_tune_many(runs, toy, seeds=[0, 1], epochs=3, learning_rate=0.1)
    >>> [run.record.finetune.steps for run in tuned]
    [3, 3]
    """
    if any(run.record.finetune is not None for run in runs):
        raise InputError("a run was fine-tuned already; fine-tune the runs that unlearn returned")
    sets = [data] * len(runs) if isinstance(data, InMemory) else list(data)
    known = [None] * len(runs) if forget_ids is None else list(forget_ids)
    for name, given in (("data sets", sets), ("forget_ids", known)):
        if len(given) != len(runs):
            raise InputError.of(f"number of {name}", len(given), f"{len(runs)}, as many as runs")
    retained = _commit_each(known, sets)
    models = [copy.deepcopy(run.model) for run in runs]
    logs = train_many(models, sets, seeds=seeds, **options)
    each = zip(runs, models, logs, retained, strict=True)
    return [write_fine_tuning(*given) for given in each]


def _commit_each(
    forgotten: Sequence[Iterable[str | int] | None], sets: Sequence[InMemory]
) -> list[Commitment | None]:
    """A commitment to the identifiers of each set; one for a set that is given several times."""
    found: dict[int, Commitment | None] = {}
    for ids, data in zip(forgotten, sets, strict=True):
        if ids is not None or id(data) not in found:
            found[id(data)] = commit_disjoint(ids, getattr(data, "ids", None))[1]
    return [found[id(data)] for data in sets]
