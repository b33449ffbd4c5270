"""Losses compiled by torch.compile, for training: forward and backward as one piece of code each.

Compiling takes half a minute on two cores the first time, and saves a third of a larger network's
step (a small one is faster as it is, or with others of its kind: :mod:`expunge.training.many`). So
``compile="auto"`` compiles a run of P parameters and batches of B whose arithmetic takes a minute,

    steps · 6 P B / 10¹¹ s⁻¹ ≥ 60 s.

That depends on the run alone, never on the clock, so that a run is compiled on every machine or on
none. The first gradient is computed both ways: if it differs by more than 0.1 %, or anything cannot
be compiled, the run goes on uncompiled and says why. Nothing here touches a certified step.
"""

from __future__ import annotations

import copy
import os
import shutil
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from expunge.training.batches import Batches
from expunge.training.losses import LossFunction, compute_loss
from expunge.training.randomness import untouched_random
from expunge.training.settings import Settings

PAYS_AFTER, CLOSE = 60.0, 1e-3
_COMPILERS = ("g++", "c++", "clang++", "cl")


class CompiledLoss:
    """``compute_loss`` for whole batches; ``note`` says why not, as soon as it does not work."""

    def __init__(self, model: nn.Module, loss_fn: LossFunction | None, size: int) -> None:
        self.model, self.loss_fn, self.size = model, loss_fn, size
        self.note, self._called = "", False
        self._compiled = make_compiled(compute_loss)

    def __call__(self, batch: Any) -> Tensor:
        """The loss of one batch, to be differentiated."""
        if not self._called and not self.note:
            self.note = self._compare(batch)
        if self.note or len(batch[1]) < self.size:
            return compute_loss(self.model, batch, self.loss_fn)
        first, self._called = not self._called, True
        try:
            with allow_compiling() if first else nullcontext():
                return self._compiled(self.model, batch, self.loss_fn)
        except Exception as error:  # uncompiled, the batch that is at fault says what is wrong
            self.note = explain(error)
            return compute_loss(self.model, batch, self.loss_fn)

    def _compare(self, batch: Any) -> str:
        """Why the compiled gradient of a copy is not the uncompiled one; nothing if it is."""
        found: list[list[Tensor]] = []
        try:
            for compute in (compute_loss, self._compiled):
                model, given = copy.deepcopy((self.model, batch))
                model.zero_grad()
                with untouched_random(), allow_compiling():
                    loss = compute(model, given, self.loss_fn)
                    loss.backward()
                gradients = [p.grad for p in model.parameters() if p.grad is not None]
                found.append([loss.detach(), *gradients])
        except Exception as error:  # whatever cannot be compiled runs uncompiled
            return explain(error)
        same = len(found[0]) == len(found[1]) and all(map(is_close, *found))
        return "" if same else "compiled and uncompiled gradients differ"


def plan_loss(how: Settings, model: nn.Module, loader: object, steps: int) -> CompiledLoss | str:
    """A compiled loss, or why there is none; a warning if it was asked for.

    >>> data = Batches(torch.zeros(8, 2), torch.zeros(8).long(), batch_size=4)
    >>> plan_loss(Settings(epochs=1, learning_rate=0.1, loss_fn=None), nn.Linear(2, 2), data, 10)
    'the model computes its own loss'
    """
    if how.compile is False or steps == 0:
        return ""
    if type(loader) is not Batches:
        note = "the data is not in memory"
    elif not (note := find_obstacle(how, model, loader)):
        size = sum(p.numel() for p in model.parameters())
        if how.compile is True or 6 * size * loader.batch_size * steps / 1e11 >= PAYS_AFTER:
            return CompiledLoss(model, how.loss_fn, loader.batch_size)
        note = f"{steps} steps with {size} parameters do not pay for compiling"
    if how.compile is True:
        warn_uncompiled(note)
    return note


def warn_uncompiled(note: str) -> None:
    """Say that what was asked for did not happen, and why."""
    warnings.warn(f"training is not compiled: {note}", RuntimeWarning, stacklevel=3)


def find_obstacle(how: Settings, model: nn.Module, batches: Batches) -> str:
    """Why this model on these batches cannot be compiled; nothing if nothing is known."""
    if how.loss_fn is None:
        return "the model computes its own loss"
    if len(batches.inputs) < batches.batch_size:
        return "there is no whole batch"
    if len({t.device for t in (*model.parameters(), batches.inputs, batches.targets)}) > 1:
        return "data and model are on different devices"
    if batches.inputs.is_cpu and find_compiler() is None:
        return "there is no C++ compiler; install g++ or clang++, or set CXX"
    return ""


def find_compiler() -> str | None:
    """The C++ compiler that torch would use."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else _COMPILERS)), None)


def make_compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """The function captured whole, with random numbers drawn as they are uncompiled."""
    options = {"fallback_random": True} | options
    return torch.compile(function, fullgraph=True, dynamic=False, options=options)


@contextmanager
def allow_compiling() -> Generator[None]:
    """For a first call: torch by itself stops after eight kinds of model, and warns of trifles."""
    import torch._dynamo

    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=200):
        warnings.simplefilter("ignore")
        yield


def explain(error: Exception) -> str:
    """One line of what torch says, its explanation if it has one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")]
    return f"{type(error).__name__}: {(told or lines or [''])[0]}"[:200]


def is_close(expected: Tensor, found: Tensor) -> bool:
    """‖found - expected‖ ≤ 0.1 % of ‖expected‖; NaN for NaN.

    >>> is_close(torch.ones(2), torch.ones(2) + 1e-4), is_close(torch.ones(2), torch.ones(2) + 0.01)
    (True, False)
    """
    a, b = expected.detach().double(), found.detach().double()
    if not bool(torch.isfinite(a).all()):
        return torch.equal(a.isfinite(), b.isfinite())
    return float((b - a).norm()) <= CLOSE * float(a.norm()) + torch.finfo(expected.dtype).eps
