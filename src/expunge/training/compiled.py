"""Training with whole steps compiled: prepare, forward, backward and update in one function.

**What it costs and when it pays.** Compiling takes about half a minute on two cores the first time
and a few seconds once torch has the result in its cache on disk; it halves the time of a step or
better. So ``compile="auto"`` compiles when the uncompiled run is expected to take a minute or more,

    steps · (0.2 ms + 3 F / 10¹¹ s⁻¹) ≥ 60 s,

F being the operations of one forward pass over a batch. That depends on the run alone, never on
the clock, so that a run is compiled on every machine or on none. Steps that take under 2 ms are
compiled eight at a time, since entering compiled code costs as much as a small step.

**Never silently wrong.** Whenever something was compiled, the first steps run both ways from the
same state, and if any parameter moves differently (by more than 0.1 % of the move), or anything
cannot be captured whole, the run goes on uncompiled and says why. Order, augmentation and dropout
draw the same numbers either way.

``torch.compile`` as all of this package uses it: whole functions, once per process.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value  # pyright: ignore[reportPrivateImportUsage]

from expunge.errors import InputError
from expunge.training.batches import Batches
from expunge.training.losses import LossFunction, compute_loss
from expunge.training.optimizers import Sgd
from expunge.training.randomness import capture_random, restore_random, untouched_random

Compile = bool | Literal["auto"]
Prepare = Callable[[Tensor], Tensor]
Batch = tuple[Tensor, Tensor]

PAYS_AFTER = 60.0
STEP_OVERHEAD = 2e-4
OPERATIONS_PER_SECOND = 1e11
SHORT_STEP, UNROLLED = 2e-3, 8
CLOSE = 1e-3
_COMPILERS = ("g++", "c++", "clang++", "cl")


def plan_steps(
    compile: Compile,
    model: nn.Module,
    loader: object,
    optimizing: object,
    loss_fn: LossFunction | None,
    steps: int,
) -> CompiledSteps | str:
    """Compiled steps, or why there are none; a warning if they were asked for.

    >>> data = Batches(torch.zeros(8, 2), torch.zeros(8).long(), batch_size=4)
    >>> plan_steps("auto", nn.Linear(2, 2), data, None, None, 10)
    'only SGD is compiled'
    """
    check_compile(compile)
    if compile is False or steps == 0:
        return ""
    if not isinstance(optimizing, Sgd):
        note = "only SGD is compiled"
    elif not isinstance(loader, Batches) or type(loader) is not Batches:
        note = "the data is not in memory"
    elif loss_fn is None:
        note = "the model computes its own loss"
    elif not (note := find_obstacle(model, loader)):
        seconds = estimate_step(model, loader)
        if compile is True or (pays(steps, seconds) and loader.inputs.is_cpu):
            most = min(steps, len(loader.inputs) // loader.batch_size)
            unrolled = min(UNROLLED if seconds < SHORT_STEP else 1, most)
            return CompiledSteps(model, loader, optimizing, loss_fn, unrolled)
        note = f"{steps} steps of about {1e3 * seconds:.2g} ms do not pay for compiling"
    if compile is True:
        warn_uncompiled(note)
    return note


def check_compile(compile: Compile) -> None:
    """Refuse what is no answer to the question."""
    if not isinstance(compile, bool) and compile != "auto":
        raise InputError.of("compile", compile, "True, False or 'auto'")


def warn_uncompiled(note: str) -> None:
    """Say that what was asked for did not happen, and why."""
    warnings.warn(f"training is not compiled: {note}", RuntimeWarning, stacklevel=3)


def find_obstacle(model: nn.Module, batches: Batches | None) -> str:
    """Why this model on these batches cannot be compiled; nothing if nothing is known."""
    devices = {p.device for p in model.parameters()}
    if batches is not None:
        if len(batches.inputs) < batches.batch_size:
            return "there is no whole batch"
        devices |= {batches.inputs.device, batches.targets.device}
    if len(devices) > 1:
        return "data and model are on different devices"
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters()):  # pyright: ignore[reportPrivateUsage]
        return "a parameter has hooks"
    if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
        return "the model is compiled already"
    if devices == {torch.device("cpu")} and find_compiler() is None:
        return "there is no C++ compiler; install g++ or clang++, or set CXX"
    return ""


def find_compiler() -> str | None:
    """The C++ compiler that torch would use."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else _COMPILERS)), None)


def estimate_step(model: nn.Module, batches: Batches) -> float:
    """Seconds of one uncompiled step, by the model of this module's first lines.

    >>> data = Batches(torch.zeros(1000, 500), torch.zeros(1000).long(), batch_size=1000)
    >>> round(1e3 * estimate_step(nn.Linear(500, 1000), data), 1)
    30.2
    """
    size = min(2, len(batches.inputs))
    try:
        with untouched_random(), torch.no_grad():
            x = batches.inputs[:size].clone()
            operations = _count_operations(copy.deepcopy(model), batches.make_ready(x))
    except Exception:  # the uncompiled run will say what is wrong, if anything is
        operations = 0
    return STEP_OVERHEAD + 3 * operations * batches.batch_size / size / OPERATIONS_PER_SECOND


def pays(steps: int, seconds: float) -> bool:
    """Whether so many steps are long enough for compiling them."""
    return steps * seconds >= PAYS_AFTER


def _count_operations(model: nn.Module, x: Tensor) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        model(x)
    return counter.get_total_flops()


class CompiledSteps:
    """Steps of SGD over batches in memory, ``unrolled`` at a time where that works.

    ``note`` says why not, as soon as it does not; from there on every step runs uncompiled.
    """

    def __init__(
        self, model: nn.Module, batches: Batches, sgd: Sgd, loss_fn: LossFunction, unrolled: int
    ) -> None:
        self.model, self.batches, self.sgd, self.loss_fn = model, batches, sgd, loss_fn
        self.unrolled, self.note = unrolled, ""
        if sgd.momentum != 0:
            sgd.momenta = [torch.zeros_like(p) for p in sgd.parameters]
        names = {id(p): name for name, p in model.named_parameters()}
        self._names = [names[id(p)] for p in sgd.parameters]
        self._point = [p.detach() for p in sgd.parameters]
        self._settings = self._numbers([sgd.momentum, sgd.weight_decay])
        self._checked = self._unused = False

    def run(self, steps: int, factor: Callable[[int], float]) -> Iterator[tuple[Tensor, int]]:
        """All steps; yields the losses of one or several, and the examples that they saw."""
        n, size, t = len(self.batches.inputs), self.batches.batch_size, 0
        with contextlib.ExitStack() as settings:
            while t < steps:
                order, start = self.batches.draw_order(), 0
                while t < steps and start < len(self.batches) * size:
                    stop, first = start + self.unrolled * size, not self._checked
                    if self.note or stop > n or t + self.unrolled > steps:
                        batch = self.batches.fetch(order, start)
                        yield self._step(batch, factor(t)).reshape(1), len(batch[1])
                        t, start = t + 1, start + size
                        continue
                    factors = [factor(s) for s in range(t, t + self.unrolled)]
                    yield self._advance(order, start, factors), stop - start
                    t, start = t + self.unrolled, stop
                    if first:
                        settings.enter_context(forbid_recompiling())

    def _advance(self, order: Tensor | None, start: int, factors: Sequence[float]) -> Tensor:
        """The next ``unrolled`` steps."""
        batches = self.batches.fetch_several(order, start, len(factors))
        if not self._checked:
            self._checked = True
            return self._begin(batches, factors)
        try:
            return self._call(batches, factors)
        except Exception as error:  # torch refuses before it computes: nothing has moved
            self.note = explain(error)
            return self._take_steps(batches, factors)

    def _take_steps(self, batches: list[Batch], factors: Sequence[float]) -> Tensor:
        """Uncompiled steps."""
        return torch.stack([self._step(b, f) for b, f in zip(batches, factors, strict=True)])

    def _begin(self, batches: list[Batch], factors: Sequence[float]) -> Tensor:
        """The first steps, on copies of their batches; what was not compared before is compared
        with uncompiled steps from the same state, which then are the ones that count.
        """
        before = self._capture()
        try:
            with allow_compiling():
                found = self._call([(x.clone(), y) for x, y in batches], factors)
            if _COMPARED.covers():
                return found
        except Exception as error:  # whatever cannot be captured runs uncompiled
            self.note = explain(error)
            self._restore(before)
            return self._take_steps(batches, factors)
        compiled = self._capture()
        self._restore(before)
        losses = self._take_steps(batches, factors)
        self.note = self._compare(before, compiled, losses, found)
        if not self.note:
            _COMPARED.extend()
        return losses

    def _call(self, batches: list[Batch], factors: Sequence[float]) -> Tensor:
        rates = self._numbers([self.sgd.learning_rate * f for f in factors])
        momenta = self.sgd.momenta if self.sgd.momentum != 0 else []
        with torch.no_grad():
            return make_compiled(_take_compiled_steps)(
                self.model,
                self._names,
                self._point,
                momenta,
                batches,
                rates,
                self._settings,
                self.batches.prepare,
                self.loss_fn,
            )

    def _step(self, batch: Batch, factor: float) -> Tensor:
        x, y = batch
        loss = compute_loss(self.model, (self.batches.make_ready(x), y), self.loss_fn)
        loss.backward()
        self._unused = any(p.grad is None for p in self.sgd.parameters)
        self.sgd.step(factor)
        return loss.detach()

    def _compare(self, before: _State, compiled: _State, losses: Tensor, found: Tensor) -> str:
        """Why the compiled steps are not the uncompiled ones just taken; nothing if they are."""
        if self._unused:
            return "a parameter has no part in the loss"
        states = (before.tensors, self._capture().tensors, compiled.tensors)
        for old, new, other in zip(*states, strict=True):
            if not is_close(old, new, other):
                return "compiled and uncompiled steps differ"
        return "" if is_close(torch.zeros_like(losses), losses, found) else "losses differ"

    def _capture(self) -> _State:
        """Copies of all that a step may change."""
        held = [m for m in self.sgd.momenta if m is not None]
        tensors = [*self._point, *held, *self.model.buffers()]
        copies = [tensor.detach().clone() for tensor in tensors]
        numbers = [_list_numbers(module) for module in self.model.modules()]
        return _State(copies, numbers, capture_random(self.batches.generator))

    def _restore(self, state: _State) -> None:
        held = [m for m in self.sgd.momenta if m is not None]
        with torch.no_grad():
            tensors = [*self._point, *held, *self.model.buffers()]
            for tensor, value in zip(tensors, state.tensors, strict=True):
                tensor.copy_(value)
        for module, numbers in zip(self.model.modules(), state.numbers, strict=True):
            vars(module).update(numbers)
        restore_random(state.random, self.batches.generator)

    def _numbers(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.batches.inputs.device)


@dataclass(frozen=True)
class _State:
    tensors: list[Tensor]
    numbers: list[dict[str, Any]]
    random: dict[str, Tensor]


def _list_numbers(module: nn.Module) -> dict[str, Any]:
    """What a module may count or switch as it runs."""
    kinds = int | float | str | None
    return {name: value for name, value in vars(module).items() if isinstance(value, kinds)}


def is_close(old: Tensor, new: Tensor, found: Tensor) -> bool:
    """‖found - new‖ ≤ 0.1 % of ‖new - old‖, or within a few roundings of ‖new‖; NaN for NaN.

    >>> is_close(torch.zeros(2), torch.ones(2), torch.ones(2) + 1e-4)
    True
    >>> is_close(torch.zeros(2), torch.ones(2), torch.ones(2) + 1e-2)
    False
    """
    if not new.is_floating_point():
        return torch.equal(new, found)
    a, b, c = old.double(), new.double(), found.double()
    if not bool(torch.isfinite(b).all()):
        return torch.equal(b.isfinite(), c.isfinite())
    slack = 16 * torch.finfo(new.dtype).eps * float(b.norm())
    return float((c - b).norm()) <= CLOSE * float((b - a).norm()) + slack


def _take_compiled_steps(
    model: nn.Module,
    names: list[str],
    point: list[Tensor],
    momenta: list[Tensor],
    batches: list[Batch],
    rates: Tensor,
    settings: Tensor,
    prepare: Prepare | None,
    loss_fn: LossFunction,
) -> Tensor:
    """What is compiled: ``Sgd.step`` on each batch; returns the losses."""
    momentum, decay = settings[0], settings[1]
    x, v = list(point), list(momenta)
    losses: list[Tensor] = []
    for i, (inputs, targets) in enumerate(batches):
        ready = inputs if prepare is None else prepare(inputs)
        if ready.ndim == 4 and ready.is_cpu:
            ready = ready.contiguous(memory_format=torch.channels_last)
        g, loss = differentiate(model, names, x, ready, targets, loss_fn)
        g = [a + decay * b for a, b in zip(g, x, strict=True)]
        if len(v) > 0:
            g = v = [momentum * b + a for a, b in zip(g, v, strict=True)]
        x = [a - rates[i] * b for a, b in zip(x, g, strict=True)]
        losses.append(loss)
    for old, new in zip([*point, *momenta], [*x, *v], strict=True):
        old.copy_(new)
    return torch.stack(losses)


def differentiate(
    model: nn.Module,
    names: list[str],
    point: list[Tensor],
    inputs: Tensor,
    targets: Tensor,
    loss_fn: LossFunction,
) -> tuple[list[Tensor], Tensor]:
    """The gradient at ``point``, whose tensors stand in for the named parameters, and the loss."""

    def measure(x: list[Tensor]) -> Tensor:
        output = functional_call(model, dict(zip(names, x, strict=True)), (inputs,))
        return loss_fn(output, targets).reshape(())

    return cast(tuple[list[Tensor], Tensor], grad_and_value(measure)(point))


Backend = Literal["inductor", "aot_eager"]

KINDS = 200


@functools.cache
def make_compiled(
    function: Callable[..., Any], backend: Backend = "inductor"
) -> Callable[..., Any]:
    """The function captured whole, once per process; torch keeps one version per kind of model.

    "inductor" compiles what was captured, the calls between the kernels too, with random numbers
    drawn by the operations that draw them uncompiled; "aot_eager" runs it operation by operation,
    without autograd around it.
    """
    inductor = {"fallback_random": True, "cpp_wrapper": True}
    options: dict[str, Any] | None = inductor if backend == "inductor" else None
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend, options=options)


@contextlib.contextmanager
def allow_compiling() -> Generator[None]:
    """For a first call: torch by itself stops after eight kinds of model, and warns of trifles."""
    import torch._dynamo

    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=KINDS):
        warnings.simplefilter("ignore")
        yield


def forbid_recompiling() -> Any:
    """All chunks are alike: a second compilation means that the model changes as it runs."""
    import torch._dynamo

    return torch._dynamo.config.patch(error_on_recompile=True)


def explain(error: Exception) -> str:
    """One line of what torch says, its explanation if it has one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")]
    return f"{type(error).__name__}: {(told or lines or [''])[0]}"[:200]


class CheckedCode:
    """How much torch had compiled in this process when a check of it was last passed.

    A check of what is compiled need not be repeated by every run, only when there is more of it; a
    check that failed, or could not be made, is made again.
    """

    def __init__(self) -> None:
        self._count = 0

    def covers(self) -> bool:
        """Whether nothing was compiled since."""
        return 0 < self._count == count_compiled()

    def extend(self) -> None:
        """All that is compiled by now has passed."""
        self._count = count_compiled()


def count_compiled() -> int:
    """How many functions torch has captured in this process; 0 if it does not say."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


_COMPARED = CheckedCode()
