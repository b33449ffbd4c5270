"""``build()``, called: a fresh module under a public seed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from expunge.errors import ExpungeError, InputError, describe_error
from expunge.networks.randomness import seeded
from expunge.networks.tensors import list_trainable, read_extra_state, unwrap

_BUILT: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()  # and their extra state


def call_build(
    build: Callable[[], Any], seed: int = 0, device: torch.device | str | None = None
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
        raise InputError(f"build is {kind}; it must be a function that returns a fresh nn.Module")
    try:
        with seeded(seed):
            model = build()
    except ExpungeError:
        raise
    except Exception as error:
        raise InputError(f"build() failed: {describe_error(error, own=1)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"build() returned a {type(model).__name__}; it must be an nn.Module")
    inner, trainable = unwrap(model), list_trainable(model)
    again = "it must make a new one at every call"
    if inner in _BUILT:
        raise InputError(f"build() returned one and the same module twice; {again}")
    _BUILT[inner] = repr(read_extra_state(model))
    if not trainable:
        valid = "one that has a parameter with requires_grad"
        raise InputError(f"build() returned a module with nothing to train; it must be {valid}")
    for name, p in trainable.items():
        if p.grad is not None:
            used = f"trained before: {name} has a gradient"
            raise InputError(f"build() returned a module that was {used}; {again}")
    try:
        return model if device is None else model.to(device)
    except (RuntimeError, AssertionError) as error:
        valid = f"one that torch has here ({describe_error(error, own=1)})"
        raise InputError.of("device", str(device), valid) from None


def check_extra_state(module: nn.Module) -> None:
    """Warn where training changed what ``get_extra_state`` gives: a release does not hold it."""
    built = _BUILT.get(unwrap(module), "{}")
    if built != "{}" and repr(found := read_extra_state(module)) != built:
        warnings.warn(
            f"training changed {next(iter(found))} (get_extra_state), which a release does not "
            "hold: load_model gives build()'s again; keep it in a registered buffer",
            stacklevel=3,
        )
