"""``build()``, called: a fresh module under a public seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from expunge.errors import ExpungeError, InputError, describe_error
from expunge.networks.randomness import seeded
from expunge.networks.tensors import check_state, list_trainable, unwrap

_BUILT: WeakSet[nn.Module] = WeakSet()


def call_build(
    build: Callable[[], Any],
    seed: int = 0,
    field: str = "build",
    device: torch.device | str | None = None,
) -> nn.Module:
    """The module that ``build()`` returns under ``seed``, on ``device`` if there is one; the
    caller's generators stay as they are.

    One object twice is a slip: it would keep what the run before made of it. So is one that has
    gradients, because it was trained.

    >>> model = nn.Linear(1, 1)
    >>> call_build(lambda: model) is model
    True
    >>> call_build(lambda: model)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: build() returned one and the same module twice; it must make a new
    one at every call
    """
    if isinstance(build, nn.Module) or not callable(build):
        kind = f"a {type(build).__name__}"
        raise InputError(f"{field} is {kind}; it must be a function that returns a fresh nn.Module")
    try:
        with seeded(seed):
            model = build()
    except ExpungeError:
        raise
    except Exception as error:
        raise InputError(f"{field}() failed: {describe_error(error, own=1)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{field}() returned a {type(model).__name__}; it must be an nn.Module")
    inner = unwrap(model)
    if inner in _BUILT:
        again = "returned one and the same module twice; it must make a new one at every call"
        raise InputError(f"{field}() {again}")
    _BUILT.add(inner)
    trainable = list_trainable(model)
    check_state(model)
    if not trainable:
        valid = "one that has a parameter with requires_grad"
        raise InputError(f"{field}() returned a module with nothing to train; it must be {valid}")
    used = next((name for name, p in trainable.items() if p.grad is not None), None)
    if used is not None:
        raise InputError(
            f"{field}() returned a module that was trained before: {used} has a gradient; it must "
            "make a new one at every call"
        )
    try:
        return model if device is None else model.to(device)
    except (RuntimeError, AssertionError) as error:
        valid = f"one that torch has here ({describe_error(error, own=1)})"
        raise InputError.of("device", str(device), valid) from None
