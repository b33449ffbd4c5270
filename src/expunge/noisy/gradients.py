"""The gradients of a certified run from a compiled function, where that pays.

The certificate rests on what happens to a gradient (its clip, the noise), never on how it was
computed, so compiling it changes no guarantee. Only steps of 2 ms or more are compiled by
themselves: entering compiled code for one small step costs as much as it saves. A gradient on the
first batch is computed both ways and compared, as in :mod:`expunge.training.compiled`, but at a point that
has nothing to do with the model: model clipping needs every step to be a function of x_t alone, so
that which of two roundings a run uses must not be something that the old model decided. Batches of
another shape than the first, such as the last of a pass, are not compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from expunge.training.batches import Batches
from expunge.training.compiled import (
    SHORT_STEP,
    CheckedCode,
    Compile,
    allow_compiling,
    check_compile,
    differentiate,
    estimate_step,
    explain,
    find_obstacle,
    is_close,
    make_compiled,
    pays,
)
from expunge.training.losses import LossFunction
from expunge.training.randomness import capture_random, restore_random

Compute = Callable[[Any], list[Tensor]]


_COMPARED = CheckedCode()


def plan_gradients(
    compile: Compile,
    model: nn.Module,
    names: Sequence[str],
    loader: object,
    loss_fn: LossFunction | None,
    steps: int,
    compute: Compute,
) -> CompiledGradients | None:
    """Compiled gradients of the named parameters, or None; ``compute`` is the uncompiled way.

    "auto" compiles batches in memory when ``steps`` of them would take a minute.

    >>> plan_gradients("auto", nn.Linear(2, 2), ["weight", "bias"], [], None, 10, lambda _: [])
    """
    check_compile(compile)
    if compile is False or steps == 0:
        return None
    batches = loader if isinstance(loader, Batches) else None
    if loss_fn is None:
        note = "the model computes its own loss"
    elif not (note := find_obstacle(model, batches)) and (
        compile is True or _pays(model, batches, steps)
    ):
        return CompiledGradients(model, names, loss_fn, compute)
    if note and compile is True:
        warnings.warn(f"gradients are not compiled: {note}", RuntimeWarning, stacklevel=4)
    return None


def _pays(model: nn.Module, batches: Batches | None, steps: int) -> bool:
    if batches is None or not batches.inputs.is_cpu:
        return False
    seconds = estimate_step(model, batches)
    return seconds >= SHORT_STEP and pays(steps, seconds)


class CompiledGradients:
    """Gradients of batches (inputs, targets); ``note`` says why they are not compiled after all."""

    def __init__(
        self, model: nn.Module, names: Sequence[str], loss_fn: LossFunction, compute: Compute
    ) -> None:
        self.note = ""
        self._model, self._names, self._loss_fn, self._compute = model, names, loss_fn, compute
        parameters = dict(model.named_parameters())
        self._point = [parameters[name].detach() for name in names]
        self._kind: list[Any] | None = None

    def compute(self, batch: Any) -> list[Tensor]:
        """The gradient at the model's present parameters."""
        kind = _describe(batch)
        if self.note or kind is None or self._kind not in (None, kind):
            return self._compute(batch)
        if self._kind is None:
            self._kind = kind
            return self._begin(batch)
        try:
            return self._call(batch)
        except Exception as error:  # torch refuses before it computes
            self.note = explain(error)
            return self._compute(batch)

    def _begin(self, batch: Any) -> list[Tensor]:
        """The first gradient; compiled code that was not compared before is compared here."""
        before = capture_random()
        try:
            with allow_compiling():
                found = self._call(batch)
        except Exception as error:  # whatever cannot be captured runs uncompiled
            self.note = explain(error)
            restore_random(before)
            return self._compute(batch)
        if _COMPARED.covers():
            return found
        after = capture_random()
        restore_random(before)
        if not self._compare(batch, before):
            self.note = "compiled and uncompiled gradients differ"
            return self._compute(batch)
        _COMPARED.extend()
        restore_random(after)
        return found

    def _compare(self, batch: Any, random: dict[str, Tensor]) -> bool:
        """Both gradients at N(0, 0.1² I) of a fixed seed; the random state stays where it was."""
        held = [p.clone() for p in self._point]
        generator = torch.Generator().manual_seed(0)
        for p in self._point:
            p.copy_(0.1 * torch.randn(p.shape, generator=generator))
        try:
            gradients = self._compute(batch)
            restore_random(random)
            pairs = zip(gradients, self._call(batch), strict=True)
            return all(is_close(torch.zeros_like(g), g, other) for g, other in pairs)
        finally:
            restore_random(random)
            for p, value in zip(self._point, held, strict=True):
                p.copy_(value)

    def _call(self, batch: Any) -> list[Tensor]:
        step = make_compiled(differentiate)
        with torch.no_grad():
            gradients, _ = step(self._model, self._names, self._point, *batch, self._loss_fn)
        return gradients


def _describe(batch: Any) -> list[Any] | None:
    """Shapes and types of a pair of tensors; None for any other batch."""
    if not isinstance(batch, tuple | list):
        return None
    items = cast(Sequence[object], batch)
    if len(items) != 2 or not all(isinstance(item, Tensor) for item in items):
        return None
    tensors = cast(Sequence[Tensor], batch)
    return [(t.shape, t.dtype, t.device) for t in tensors]
