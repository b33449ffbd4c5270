"""The subject of a run: a copy of the model, sorted into what is certified and what is public.

What a module carries beside its parameters, and which of it may enter a certified run.

BatchNorm's running statistics are functions of the data the model was trained on: carried over,
they would hand the forget data past the noise. A buffer is let through when it is *public*: it
belongs to a normalisation that is frozen (no trainable parameter, ``eval`` mode), it holds no
floating-point numbers (masks, position indices), or the caller names it. Statistics can be
*reset*: set to their initial value before the first step, and re-estimated on retained data after
the last noise. Anything else is refused.

What every record says beside the method: the module it ran on, the machine and the versions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from expunge.certificates.record import list_versions
from expunge.errors import InputError, UnlearningError
from expunge.processes.group import is_sharded, reshard
from expunge.processes.weights import hash_weights

Centre = Mapping[str, Tensor]


@dataclass(frozen=True)
class Subject:
    """``certified``: trainable parameters, tied ones once; ``centre``: the public point by the same
    names, None for zero; ``frozen``: names of the tensors that are public and stay as they are."""

    model: nn.Module
    certified: dict[str, nn.Parameter]
    centre: dict[str, Tensor] | None
    frozen: tuple[str, ...]
    buffers: BufferPlan

    @property
    def device(self) -> torch.device:
        return next(iter(self.certified.values())).device

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.certified.values())

    @property
    def dtype(self) -> str:
        kinds = sorted({str(p.dtype).removeprefix("torch.") for p in self.certified.values()})
        return "+".join(kinds)


def copy_subject(
    model: nn.Module,
    centre: Centre | None,
    *,
    buffers: BufferMode = "refuse",
    public_buffers: Iterable[str] = (),
    device: torch.device | str | None = None,
) -> Subject:
    """Copy ``model`` and check that it can be certified; a sharded one is taken as it is.

    >>> subject = copy_subject(nn.Linear(2, 1), None)
    >>> list(subject.certified), subject.size, subject.frozen
    (['weight', 'bias'], 3, ())
    """
    plan = plan_buffers(model, buffers, public_buffers)
    sharded = is_sharded(model)
    if sharded:
        reshard(model)
    if sharded and device is not None:
        raise InputError.of("device", str(device), "left out: a sharded model stays where it is")
    if sharded:
        copied = model
    else:
        _check_parameters(model)
        try:
            copied = copy.deepcopy(model)
        except (RuntimeError, TypeError) as error:
            raise UnlearningError(f"the model cannot be copied: {error}") from error
    copied.zero_grad(set_to_none=True)
    if device is not None:
        copied.to(device)
    certified = {name: p for name, p in copied.named_parameters() if p.requires_grad}
    if not certified:
        raise UnlearningError("the model has no trainable parameter; there is nothing to certify")
    for p in () if sharded else certified.values():
        p.data = p.data.contiguous()
    devices = sorted({str(p.device) for p in certified.values()})
    if len(devices) > 1:
        raise UnlearningError(
            f"the trainable parameters are on {', '.join(devices)}; they must be on one device"
        )
    if devices[0].startswith("mps"):
        raise UnlearningError("the grid needs float64, which mps does not have; pass device='cpu'")
    frozen = [name for name, p in copied.named_parameters() if not p.requires_grad]
    return Subject(
        model=copied,
        certified=certified,
        centre=None if centre is None else match_centre(copied, certified, centre),
        frozen=(*frozen, *plan.public),
        buffers=plan,
    )


def match_centre(
    model: nn.Module, certified: Mapping[str, Tensor], centre: Centre
) -> dict[str, Tensor]:
    """The centre's tensors by the certified names, on the parameters' device.

    Tied weights may come under any of their names; entries for frozen parameters and buffers are
    ignored; anything missing, unknown or of another shape is refused by name.
    """
    aliases: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(p), []).append(name)
    known = {name for names in aliases.values() for name in names} | set(model.state_dict())
    unknown = [name for name in centre if name not in known and name not in list_buffers(model)]
    if unknown:
        raise InputError.of("centre key", unknown[0], "the name of a parameter of the model")
    matched: dict[str, Tensor] = {}
    for name, p in certified.items():
        found = [alias for alias in aliases[id(p)] if alias in centre]
        if not found:
            raise InputError(f"centre has no {name}; it must have every trainable parameter")
        tensor = centre[found[0]]
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise InputError(f"centre[{found[0]!r}] holds values that are not finite real numbers")
        for alias in found:
            if centre[alias].shape != p.shape:
                raise InputError.of(
                    f"centre[{alias!r}].shape", tuple(centre[alias].shape), f"{tuple(p.shape)}"
                )
            if not torch.equal(centre[alias], tensor):
                raise InputError(
                    f"centre has different values for the tied weights {found[0]} and {alias}"
                )
        matched[name] = tensor.detach().to(p.device)
    return matched


def select_tensors(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """Parameters and buffers by name."""
    everything = dict(model.named_parameters()) | list_buffers(model)
    return {name: everything[name].detach() for name in names}


def check_unchanged(original: nn.Module, subject: Subject) -> None:
    """Refuse a public tensor that the steps changed: it remembers what the noise was to hide."""
    before = select_tensors(original, subject.frozen)
    for name, tensor in select_tensors(subject.model, subject.frozen).items():
        if not torch.equal(before[name].to(tensor.device), tensor):
            raise UnlearningError(
                f"{name} was declared public but changed during the noisy steps, so it carries "
                "what the noise hides; freeze the module that writes it, or replace it"
            )


def check_frozen(before: str | None, after: str | None) -> None:
    """The same for a model that was changed in place, by the hash of its public tensors."""
    if before != after:
        raise UnlearningError(
            "a tensor that was declared public changed during the noisy steps, so it carries what "
            "the noise hides; freeze the module that writes it, or replace it"
        )


def check_finite(certified: Mapping[str, Tensor]) -> None:
    """Refuse a model whose trainable parameters, or its shards here, are not all finite."""
    for name, p in certified.items():
        held: Any = p.detach()
        if not bool(torch.isfinite(held.to_local() if hasattr(held, "to_local") else held).all()):
            raise UnlearningError(f"parameter {name} holds values that are not finite")


def _check_memory(model: nn.Module) -> None:
    """No memory under two names of which one is trained: a copy gives each memory of its own.

    The noise would then be drawn twice; and what is not trained is taken for public, so that old
    weights would stay in it.
    """
    named = [(name, p, p.requires_grad) for name, p in model.named_parameters()]
    named += [(name, tensor, False) for name, tensor in model.named_buffers()]
    spans: list[tuple[int, int, str, bool]] = []
    for name, t, trained in named:
        if t.layout is torch.strided and t.numel() > 0 and t.data_ptr() != 0:
            last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
            end = t.data_ptr() + (last + 1) * t.element_size()
            spans.append((t.data_ptr(), end, name, trained))
    furthest = {True: (0, ""), False: (0, "")}
    for start, end, name, trained in sorted(spans):
        for other in (True, False) if trained else (True,):
            reached, first = furthest[other]
            if start < reached:
                raise UnlearningError(
                    f"{first} and {name} share memory but are not the same parameter; tie them by "
                    "assigning one parameter to both modules, or give each memory of its own"
                )
        furthest[trained] = max(furthest[trained], (end, name))


def _check_parameters(model: nn.Module) -> None:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, p in trainable:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise UnlearningError(f"parameter {name} has no shape yet; run the model once first")
        if p.is_complex():
            raise UnlearningError(f"parameter {name} is complex; only real ones can be certified")
        if p.layout is not torch.strided:
            raise UnlearningError(f"parameter {name} is not dense; only dense ones are certified")
    if not any(p.numel() > 0 for _, p in trainable):
        raise UnlearningError(
            "the model has no trainable parameter; at least one must have requires_grad=True"
        )
    _check_memory(model)


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


def describe_subject(subject: Subject) -> dict[str, Any]:
    """The fields of a :class:`~expunge.certificates.record.RunRecord` that follow from the module that ran."""
    public, plan = select_tensors(subject.model, subject.frozen), subject.buffers
    return {
        "parameters": subject.size,
        "device": str(subject.device),
        "dtype": subject.dtype,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "frozen": hash_weights(public) if public else None,
        "frozen_names": subject.frozen,
        "buffers": "reset" if plan.reset else "frozen" if plan.public else "none",
        "buffer_names": plan.reset or plan.public,
        "versions": list_versions(),
    }
