"""``train`` as people write it, and how a run calls it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from expunge.certificates.record import Environment
from expunge.data.data import Data
from expunge.errors import InputError
from expunge.networks.randomness import derive_seed, seeded
from expunge.networks.tensors import set_training_mode

Train = Callable[..., Any]
OFFERS = ("validation", "collate", "resume", "state", "device")


def check_train(train: object) -> None:
    """Refuse what cannot be called as ``train(model, examples, seed)``, before anything is trained.

    >>> check_train(lambda model: None)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: train takes (model); it must take (model, examples, seed)
    """
    if not callable(train):
        raise InputError.of("train", train, "a function train(model, examples, seed)")
    given, named = _arrange(train, (None, None, 0), dict.fromkeys(OFFERS))
    signature = inspect.signature(train)
    try:
        signature.bind(*given, **named)
    except TypeError:
        raise InputError(f"train takes {signature}; it must take (model, examples, seed)") from None


def run_training(train: Train, model: nn.Module, data: Data, seed: int, **offers: Any) -> nn.Module:
    """Train in place; returns the module that has the weights: the model, or its wrapper's own.

    In train mode, frozen parts in ``build()``'s own, under seeded generators. A function that names
    ``validation``, ``collate``, ``resume``, ``state`` or ``device`` is given it. Any value it
    returns that is no module is ignored.

    >>> def train(model, examples, seed, validation, device="auto"):
    ...     print(type(model).__name__, examples, seed, validation, device)
    >>> _ = run_training(train, nn.Identity(), Data([1], validation=Data([2])), 5)
    Identity [1] 5 [2] auto
    """
    validation = None if data.validation is None else data.validation.examples
    own = {"validation": validation, "collate": data.collate}
    every = dict.fromkeys(OFFERS) | own | offers
    given, named = _arrange(train, (model, data.examples, seed), every)
    set_training_mode(model)
    with seeded(derive_seed("train", seed)):
        result = train(*given, **named)
    return result if isinstance(result, nn.Module) else model


def _arrange(
    train: Train, given: tuple[Any, Any, int], offers: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Model, examples and seed by place, the seed only to who takes it; offers by name, where there
    is something to offer or the function has no value of its own."""
    parameters, kinds = inspect.signature(train).parameters, inspect.Parameter
    named = {
        name: value
        for name, value in offers.items()
        if name in parameters and (value is not None or parameters[name].default is kinds.empty)
    }
    if "seed" in parameters:
        return given[:2], named | {"seed": given[2]}
    left = [p.kind for p in parameters.values() if p.name not in offers]
    places = sum(kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD) for kind in left)
    return (given if kinds.VAR_POSITIONAL in left or places > 2 else given[:2]), named


def describe_environment(module: nn.Module) -> Environment:
    """What could make bits differ when it is run again."""
    first = next(module.parameters())
    together = torch.distributed.is_available() and torch.distributed.is_initialized()
    return Environment(
        device=first.device.type,
        dtype=str(first.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        deterministic=torch.are_deterministic_algorithms_enabled() or first.device.type == "cpu",
        processes=torch.distributed.get_world_size() if together else 1,
    )
