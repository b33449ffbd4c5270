"""Several independent runs trained or fine-tuned at once: one step moves all of them.

The parameters of all runs are stacked and the step is mapped over the stack (``torch.func.vmap``),
so that what a small network's step mostly costs, the calls around the arithmetic, is paid once for
all runs. Every run keeps its own start, order, augmentation and learning rate, and gives what
:func:`expunge.training.train.train` gives for its seed, up to rounding.

It pays for networks whose step takes under 2 ms; larger ones, convolutions above all, are faster
one after the other. The mapped step must be compiled, which takes ten seconds or more, so
``compile="auto"`` maps runs of 0.2 ms a step that would take half a minute in sequence. The first
step is taken both ways: whatever cannot be mapped, dropout and batch statistics among it, or comes
out differently, runs in sequence.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn
from torch.func import (  # pyright: ignore[reportPrivateImportUsage]
    functional_call,
    grad_and_value,
    vmap,
)

from expunge.certificates.record import Run
from expunge.errors import InputError
from expunge.training.batches import Batches, Cycle
from expunge.training.compiled import (
    allow_compiling,
    explain,
    find_obstacle,
    is_close,
    make_compiled,
)
from expunge.training.losses import LossFunction, check_loss, compute_loss
from expunge.training.randomness import untouched_random
from expunge.training.settings import (
    InMemory,
    Options,
    Settings,
    SharedOptions,
    schedule_factor,
    spell_out,
)
from expunge.training.train import TrainingLog, begin_fine_tuning, make_log, train

STEP, SHORT_STEP, PAYS_AFTER = 2e-4, 2e-3, 30.0


@spell_out(SharedOptions)
def train_many(
    models: Sequence[nn.Module],
    data: InMemory | Sequence[InMemory],
    *,
    seeds: Sequence[int],
    learning_rate: float | Sequence[float],
    weight_decay: float | Sequence[float] = 0.0,
    **options: Unpack[SharedOptions],
) -> list[TrainingLog]:
    """Train every model in place, run i with ``seeds[i]``, as ``train`` would one by one.

    ``data`` in memory is for all runs, or one set for each; so are the learning rate and the
    weight decay. The other options are those of ``train``, without ``optimizer``. With
    ``compile=False`` the runs go one after the other.

    >>> from types import SimpleNamespace
    >>> toy = SimpleNamespace(inputs=torch.eye(2), targets=torch.tensor([0, 1]))
    >>> logs = train_many([nn.Linear(2, 2) for _ in range(3)], toy, seeds=range(3), epochs=5,
    ...                   learning_rate=[0.1, 0.2, 0.5])
    >>> [(log.steps, log.learning_rate) for log in logs]
    [(5, 0.1), (5, 0.2), (5, 0.5)]
    """
    n = len(models)
    if n == 0 or len(seeds) != n:
        raise InputError.of("number of seeds", len(seeds), f"{n}, as many as models, at least 1")
    if len({id(model) for model in models}) != n:
        raise InputError("models holds the same module twice; every run needs its own")
    sets = _spread("data sets", data, isinstance(data, InMemory), n)
    rates = _spread("learning rates", learning_rate, isinstance(learning_rate, float | int), n)
    decays = _spread("weight decays", weight_decay, isinstance(weight_decay, float | int), n)
    own = [
        Options(seed=seed, learning_rate=rate, weight_decay=decay, **options)
        for seed, rate, decay in zip(seeds, rates, decays, strict=True)
    ]
    runs = [_Run(m, d, Settings(**how)) for m, d, how in zip(models, sets, own, strict=True)]
    outcome = _find_reason(runs) or _train_together(runs)
    if not isinstance(outcome, str):
        return outcome
    logs = [train(m, d, **how) for m, d, how in zip(models, sets, own, strict=True)]
    return [replace(log, note=f"not together: {outcome}. {log.note}".strip()) for log in logs]


@spell_out(SharedOptions)
def fine_tune_many(
    runs: Sequence[Run],
    data: InMemory | Sequence[InMemory],
    *,
    seeds: Sequence[int],
    learning_rate: float | Sequence[float],
    weight_decay: float | Sequence[float] = 0.0,
    **options: Unpack[SharedOptions],
) -> list[Run]:
    """``fine_tune`` for every run at once: the seeds and arms of an experiment, or many requests.

    ``data`` in memory is for all runs, or one set for each; so are the learning rate and the
    weight decay.

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
    check_loss(options.get("loss_fn"))
    sets = _spread("data sets", data, isinstance(data, InMemory), len(runs))
    begun = [begin_fine_tuning(run, own) for run, own in zip(runs, sets, strict=True)]
    logs = train_many(
        [each.model for each in begun],
        sets,
        seeds=seeds,
        learning_rate=learning_rate,
        weight_decay=weight_decay,
        **options,
    )
    return [each.end(log) for each, log in zip(begun, logs, strict=True)]


def _spread(name: str, given: Any, single: bool, count: int) -> list[Any]:
    values = [given] * count if single else list(given)
    if len(values) != count:
        raise InputError.of(f"number of {name}", len(values), f"1 or {count}, as many as models")
    return values


@dataclass(frozen=True)
class _Run:
    """One of the runs."""

    model: nn.Module
    data: InMemory
    how: Settings

    def make_batches(self) -> Batches:
        """The batches of this run from the start, as ``train`` makes them."""
        return self.how.make_batches(self.data)


def _find_reason(runs: list[_Run]) -> str:
    """Why the runs are not mapped together; nothing if they are as far as is known."""
    (first, *others), how = runs, runs[0].how
    steps = how.count_steps(len(first.make_batches()))
    if how.compile is False:
        return "compile=False"
    if not others or steps == 0:
        return "there is one run" if steps > 0 else "there is no step"
    if any(run.data.inputs.shape != first.data.inputs.shape for run in others):
        return "the data sets are of different shapes"
    if any(_describe(run.model) != _describe(first.model) for run in others):
        return "the models are of different kinds"
    for run in runs:
        if note := find_obstacle(how, run.model, run.make_batches()):
            return note
        pairs = zip(_list_fixed(first.model), _list_fixed(run.model), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return "the models differ in what is not trained"
    size = sum(p.numel() for p in first.model.parameters())
    if how.compile == "auto" and 6 * size * how.batch_size / 1e11 >= SHORT_STEP:
        return f"steps with {size} parameters are as fast one by one"
    if how.compile == "auto" and STEP * steps * len(runs) < PAYS_AFTER:
        return f"{len(runs)} runs of {steps} steps do not pay for compiling"
    return ""


def _describe(model: nn.Module) -> list[Any]:
    modules = [(type(module), module.training) for module in model.modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return [*modules, *[(name, t.shape, t.dtype, t.requires_grad) for name, t in tensors]]


def _list_fixed(model: nn.Module) -> list[Tensor]:
    return [*[p for p in model.parameters() if not p.requires_grad], *model.buffers()]


def _train_together(runs: list[_Run]) -> list[TrainingLog] | str:
    """The logs of all runs, or why they cannot be mapped; then no model has moved."""
    try:
        with untouched_random():
            joint = _Joint(runs)
            return joint.compare() or joint.run()
    except Exception as error:  # in sequence, the run that is at fault says what is wrong
        return explain(error)


class _Joint:
    """The stacked runs and their steps."""

    def __init__(self, runs: list[_Run]) -> None:
        self.runs, self.how, self.length = runs, runs[0].how, len(runs[0].make_batches())
        self.steps, self.model = self.how.count_steps(self.length), copy.deepcopy(runs[0].model)
        parameters = [dict(run.model.named_parameters()) for run in runs]
        self.names = [name for name, p in parameters[0].items() if p.requires_grad]
        self.start = [torch.stack([p[name].detach() for p in parameters]) for name in self.names]
        self._compiled = make_compiled(_take_step, cpp_wrapper=True)

    def compare(self) -> str:
        """Take the first step both ways; why the results differ, nothing if they do not."""
        fetched = [next(iter(run.make_batches())) for run in self.runs]
        stacks = [stack.clone() for stack in self.start]
        with allow_compiling():
            self._step(stacks, self._make_momenta(), fetched, 0)
        for r, run in enumerate(self.runs):
            model = copy.deepcopy(run.model)
            parameters = [p for p in model.parameters() if p.requires_grad]
            compute_loss(model, fetched[r], self.how.loss_fn).backward()
            if any(p.grad is None for p in parameters):
                return "a parameter has no part in the loss"
            run.how.make_optimizer(model).step(schedule_factor(self.how.schedule, 0, self.steps))
            for start, stack, p in zip(self.start, stacks, parameters, strict=True):
                if not is_close(p.detach() - start[r], stack[r] - start[r]):
                    return "mapped and plain steps differ"
        return ""

    def run(self) -> list[TrainingLog]:
        """All steps from the start; then the models get their parameters."""
        cycles = [Cycle(run.make_batches()) for run in self.runs]
        momenta, losses, seen = self._make_momenta(), list[Tensor](), 0
        for t in range(self.steps):
            batches = [cycle.take() for cycle in cycles]
            losses.append(self._step(self.start, momenta, batches, t))
            seen += len(batches[0][1])
        for r, run in enumerate(self.runs):
            parameters = dict(run.model.named_parameters())
            with torch.no_grad():
                for name, stack in zip(self.names, self.start, strict=True):
                    parameters[name].copy_(stack[r])
        return [
            make_log(
                run.how,
                run.how.make_optimizer(run.model).describe(),
                [loss[r] for loss in losses],
                self.length,
                batch_size=run.how.batch_size,
                gradient_evaluations=seen,
                compiled=True,
                note=f"together with {len(self.runs) - 1} others",
            )
            for r, run in enumerate(self.runs)
        ]

    def _step(
        self, stacks: list[Tensor], momenta: list[Tensor], batches: Sequence[Any], t: int
    ) -> Tensor:
        """Step t of all runs; a batch that is not whole is not worth a second compilation."""
        assert self.how.loss_fn is not None
        x, y = (torch.stack(parts) for parts in zip(*batches, strict=True))
        factor = schedule_factor(self.how.schedule, t, self.steps)
        numbers = [(factor * r.how.learning_rate, r.how.weight_decay) for r in self.runs]
        rates, decays = torch.tensor(numbers, dtype=torch.float64, device=stacks[0].device).T
        settings = rates, decays, self.how.momentum, self.how.loss_fn
        step = self._compiled if y.shape[1] == self.how.batch_size else _take_step
        with torch.no_grad():
            return step(self.model, self.names, stacks, momenta, x, y, *settings)

    def _make_momenta(self) -> list[Tensor]:
        return [torch.zeros_like(s) for s in self.start] if self.how.momentum != 0 else []


def _take_step(
    model: nn.Module,
    names: list[str],
    stacks: list[Tensor],
    momenta: list[Tensor],
    x: Tensor,
    y: Tensor,
    rates: Tensor,
    decays: Tensor,
    momentum: float,
    loss_fn: LossFunction,
) -> Tensor:
    """v ← m v + g + λ x; x ← x - γ v for all runs at once; returns the losses."""

    def measure(point: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        output = functional_call(model, dict(zip(names, point, strict=True)), (inputs,))
        return loss_fn(output, targets).reshape(())

    g, losses = cast(Any, vmap(grad_and_value(measure))(stacks, x, y))
    g = [a + _match(decays, s) * s for a, s in zip(g, stacks, strict=True)]
    if len(momenta) > 0:
        g = [v.copy_(momentum * v + a) for a, v in zip(g, momenta, strict=True)]
    for s, v in zip(stacks, g, strict=True):
        s.copy_(s - _match(rates, s) * v)
    return losses


def _match(column: Tensor, stack: Tensor) -> Tensor:
    """One number per run, shaped and rounded to go with a stack of tensors."""
    return column.to(stack.dtype).reshape(-1, *[1] * (stack.ndim - 1))
