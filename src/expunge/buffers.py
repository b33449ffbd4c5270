"""What a module carries beside its parameters, and which of it may enter a certified run.

BatchNorm's running statistics are functions of the data the model was trained on: carried over,
they would hand the forget data past the noise. A buffer is let through when it is *public*: it
belongs to a normalisation that is frozen (no trainable parameter, ``eval`` mode), it holds no
floating-point numbers (masks, position indices), or the caller names it. Statistics can be
*reset*: set to their initial value before the first step, and re-estimated on retained data after
the last noise. Anything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from expunge.errors import InputError, UnlearningError

BufferMode = Literal["refuse", "reset"]


@dataclass(frozen=True)
class BufferPlan:
    """``public``: names of the buffers that stay as they are; ``reset``: those that are reset, and
    ``modules``: the modules that hold the latter."""

    public: tuple[str, ...]
    reset: tuple[str, ...]
    modules: tuple[str, ...]


def plan_buffers(model: nn.Module, mode: BufferMode, public: Iterable[str] = ()) -> BufferPlan:
    """Sort a module's buffers into public and reset ones; refuse the rest by name.

    >>> plan_buffers(nn.BatchNorm1d(2).eval().requires_grad_(False), "refuse").reset
    ()
    >>> plan_buffers(nn.Sequential(nn.BatchNorm1d(2)), "reset").modules
    ('0',)
    """
    if mode not in ("refuse", "reset"):
        raise InputError.of("buffers", mode, "'refuse' or 'reset'")
    named = list_buffers(model)
    declared = set(public)
    unknown = sorted(declared - named.keys())
    if unknown:
        raise InputError.of("public_buffers", unknown[0], "the name of a buffer of the model")
    kept, reset, modules, refused = list[str](), list[str](), list[str](), list[str]()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = [prefix + name for name, _ in module.named_buffers(recurse=False)]
        own = [name for name in own if name in named]
        if isinstance(module, _NormBase) and own:
            if mode == "reset" and not is_frozen(module):
                modules.append(path)
                reset += own
            elif is_frozen(module) or (declared.issuperset(own) and not module.training):
                kept += own
            else:
                refused += own
            continue
        for name in own:
            public_name = name in declared or not named[name].is_floating_point()
            (kept if public_name else refused).append(name)
    if refused:
        raise UnlearningError(_refusal(refused))
    return BufferPlan(tuple(kept), tuple(reset), tuple(modules))


def list_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Every buffer by name, shared ones once."""
    return dict(model.named_buffers())


def is_frozen(module: nn.Module) -> bool:
    """In ``eval`` mode and without a trainable parameter."""
    trainable = any(p.requires_grad for p in module.parameters(recurse=False))
    return not module.training and not trainable


def reset_statistics(model: nn.Module, plan: BufferPlan) -> None:
    """Running statistics as in a module that has seen nothing."""
    for path in plan.modules:
        cast(Any, model.get_submodule(path)).reset_running_stats()


def estimate_statistics(
    model: nn.Module, plan: BufferPlan, batches: Iterable[Any], forward: Callable[[Any], object]
) -> int:
    """Running statistics as the plain average over one pass of retained data; returns batches seen.

    ``forward(batch)`` runs the model, whose weights are already noisy: this is post-processing.
    """
    modules = [cast(Any, model.get_submodule(path)) for path in plan.modules]
    flags = {module: module.training for module in model.modules()}
    momenta = [module.momentum for module in modules]
    model.eval()
    seen = 0
    try:
        for module in modules:
            module.train()
            module.reset_running_stats()
            module.momentum = None
        with torch.no_grad():
            for batch in batches:
                forward(batch)
                seen += 1
    finally:
        for module, momentum in zip(modules, momenta, strict=True):
            module.momentum = momentum
        for module, flag in flags.items():
            module.training = flag
    return seen


def _refusal(names: list[str]) -> str:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    verb = "is a buffer" if len(names) == 1 else "are buffers"
    return (
        f"{listed} {verb} that the original training may have filled from the forget data, and no "
        "noise covers buffers; freeze the module that holds it (no trainable parameter, eval mode) "
        "if it is public, pass buffers='reset' for running statistics, name it in public_buffers "
        "if it is a public constant, or use GroupNorm or LayerNorm"
    )
