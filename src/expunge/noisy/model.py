"""What of a model is certified, what is public, and what is put back before every step.

A release is the certified parameters, which come from the noisy vector, and tensors that say
nothing about the forget data. So every tensor that is not certified (frozen parameters; buffers of
any dtype, persistent or not) must be *public*: compared bit for bit with a public source, or
declared so by name. Only the running statistics of a normalisation may instead be *reset*: set to
their initial value before the first step, and estimated on retained data after the last noise.

A step must be a function of the vector, of retained data and of fresh randomness. Whatever else a
module holds is put back before each of them: tensors and attributes, whatever objects these are.
What lies outside the module, in global variables, classes and closures, is the operator's code.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, cast

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from expunge.certificates.record import PublicTensors, list_versions
from expunge.errors import InputError, UnlearningError
from expunge.processes.group import Processes, is_sharded, reshard
from expunge.processes.weights import (
    check_module,
    check_name,
    cut_rows,
    find_nonfinite,
    has_same_bits,
    hash_weights,
    list_tensors,
    move_model,
    name_dtype,
    refuse_copies,
    shorten,
    to_local,
)
from expunge.training.batches import move_batch
from expunge.training.holding import copy_module
from expunge.training.losses import LossFunction, compute_loss

Public = Mapping[str, Tensor] | nn.Module | str | Path | Iterable[str]
BufferMode = Literal["refuse", "reset"]
_TABLES = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True)
class CertifiedModel:
    """A model that can be certified: the copy that runs, and its tensors, sorted.

    ``certified``: trainable parameters, tied ones once; ``centre``: the public point by the same
    names, None for zero; ``public``: the other tensors, and why they are public; ``kept``: their
    values by name; ``reset``: the names of the normalisations whose statistics are reset.
    """

    model: nn.Module
    certified: dict[str, nn.Parameter]
    public: PublicTensors | None
    kept: dict[str, Tensor]
    reset: tuple[str, ...]
    centre: dict[str, Tensor] | None = None

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

    def take_gradients(self) -> list[Tensor]:
        """The gradients, one dense tensor per certified parameter; none is left behind."""
        found: list[Tensor] = []
        for p in self.certified.values():
            g, p.grad = torch.zeros_like(p) if p.grad is None else p.grad, None
            found.append(g if g.layout is torch.strided else g.to_dense())
        return found

    def show(self) -> nn.Module:
        """A copy to look at, which shares only what is frozen; a sharded model itself."""
        if is_sharded(self.model):
            return self.model
        shared = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        return copy.deepcopy(self.model, cast(dict[int, Any], shared))

    def describe(self) -> dict[str, Any]:
        """The fields of a record that follow from the module that ran."""
        buffers = [name for name, _ in self.model.named_buffers()]
        public = tuple(name for name in buffers if name in self.kept)
        reset = tuple(name for name in buffers if name not in self.kept)
        return {
            "parameters": self.size,
            "device": str(self.device),
            "dtype": self.dtype,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "public": self.public,
            "buffers": "reset" if reset else "frozen" if public else "none",
            "buffer_names": reset or public,
            "versions": list_versions(),
        }


def copy_model(
    model: nn.Module,
    *,
    public: Public | None = None,
    buffers: BufferMode = "refuse",
    device: torch.device | str | None = None,
    processes: Processes | None = None,
) -> CertifiedModel:
    """Copy ``model`` and check that it can be certified; a sharded one is taken as it is.

    ``public`` is where the tensors that are not certified come from: a state_dict, a module or a
    safetensors file, with which they are compared, or names and patterns that are declared public.

    >>> found = copy_model(nn.Linear(2, 1))
    >>> list(found.certified), found.size, found.public
    (['weight', 'bias'], 3, None)
    """
    check_module(model)
    processes = Processes() if processes is None else processes
    sharded = is_sharded(model)
    with processes.together():
        if sharded:
            reshard(model)
        _check_parameters(model, sharded)
        list_tensors(model)
        names, reset = sort_tensors(model, public, buffers)
        source, compared = _compare(model, names, public, processes)
        copied = model if sharded else copy_module(model)
        copied.zero_grad(set_to_none=True)
        if sharded and device is not None:
            raise InputError.of("device", str(device), "left out: a sharded model stays in place")
        if device is not None:
            move_model(copied, device)
        certified = {name: p for name, p in copied.named_parameters() if p.requires_grad}
        _check_devices(certified)
    for p in () if sharded else certified.values():
        p.data = p.data.contiguous()
    original = list_uncertified(model)
    kept = {name: original[name].detach() for name in names}
    if sharded:
        kept = {name: tensor.clone() for name, tensor in kept.items()}
    told = None
    if names:
        told = PublicTensors(tuple(names), compared, source, hash_weights(kept, processes))
    return CertifiedModel(copied, certified, told, kept, tuple(reset))


def list_uncertified(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and all buffers by name, tied ones once."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return cast(dict[str, Tensor], frozen) | dict(model.named_buffers())


def sort_tensors(
    model: nn.Module, public: Public | None, mode: BufferMode
) -> tuple[list[str], list[str]]:
    """The names of the tensors that are public, and of the modules that are reset.

    A normalisation is reset unless it is frozen (no trainable parameter, ``eval`` mode) and
    ``public`` speaks of it. Everything else that ``public`` does not speak of is refused by name.

    >>> sort_tensors(nn.Sequential(nn.BatchNorm1d(2)), None, "reset")
    ([], ['0'])
    """
    if mode not in ("refuse", "reset"):
        raise InputError.of("buffers", mode, "'refuse' or 'reset'")
    held = list_uncertified(model)
    covered = set[str]()
    if public is not None:
        covered = set(held) if is_source(public) else match_public(held, public)
    reset, gone = list[str](), set[str]()
    for path, module in model.named_modules() if mode == "reset" else ():
        prefix = f"{path}." if path else ""
        own = {prefix + name for name, _ in module.named_buffers(recurse=False)} & held.keys()
        if isinstance(module, _NormBase) and own and not (_is_frozen(module) and own <= covered):
            reset.append(path)
            gone |= own
    names = [name for name in held if name not in gone]
    refused = [name for name in names if name not in covered]
    if refused:
        raise UnlearningError(_refusal(refused))
    return names, reset


def check_source(model: nn.Module, public: Public | None, processes: Processes) -> None:
    """Refuse the old model as the source of its own public tensors: they would agree always.

    Where they are only declared public, refuse a bit for bit copy of what was trained among them.
    """
    if public is None:
        return
    if not is_source(public):
        certified = {name: p for name, p in model.named_parameters() if p.requires_grad}
        refuse_copies(list_uncertified(model), certified)
        return
    source, told = read_source(cast(Any, public))
    trained = [(p, source.get(name)) for name, p in model.named_parameters() if p.requires_grad]
    pairs = [(p, c) for p, c in trained if c is not None and c.shape == p.shape]
    if pairs and all(has_same_bits(p, cut_rows(c, p, processes)) for p, c in pairs):
        raise InputError(
            f"public ({told}) is the old model with its trained weights, so that comparing with "
            "it says nothing; it must be the public weights that training started from"
        )


def check_kept(certified: CertifiedModel, processes: Processes) -> None:
    """Refuse public tensors that were written to during the run: they are not the compared ones."""
    public = certified.public
    if public is not None and hash_weights(certified.kept, processes) != public.hash:
        raise UnlearningError(
            "tensors of the model that are public were changed during the run; nothing is certified"
        )


def check_unchanged(certified: CertifiedModel) -> None:
    """Refuse a public tensor that training changed: it remembers what nobody declared."""
    now = list_uncertified(certified.model)
    for name, tensor in certified.kept.items():
        if not has_same_bits(tensor, now[name]):
            raise UnlearningError(
                f"{name} was declared public but changed during training, so it carries what the "
                "certificate does not cover; freeze the module that writes it, or replace it"
            )


def check_finite(certified: Mapping[str, Tensor]) -> None:
    """Refuse a model whose trainable parameters, or its shards here, are not all finite."""
    for name, p in certified.items():
        if not bool(torch.isfinite(to_local(p.detach())).all()):
            raise UnlearningError(f"parameter {name} holds values that are not finite")


class HeldState:
    """What a model holds beside its certified parameters, as it was before the first step.

    All attributes of all its modules are copied at once, whatever they are; modules and their
    tensors stay themselves in the copy. Of a sharded model, whose attributes torch needs as they
    are, only numbers and text are put back.
    """

    def __init__(self, certified: CertifiedModel) -> None:
        sharded = is_sharded(certified.model)
        self._modules = {m: type(m) for m in certified.model.modules()}
        tensors = [*certified.model.parameters(), *certified.model.buffers()]
        self._fixed = {id(held): held for held in (*self._modules, *tensors)}
        self._flags = [] if sharded else [(t, t.requires_grad) for t in tensors]
        tables = ("_buffers", "_modules") if sharded else _TABLES
        self._tables = [(m, t, dict(vars(m)[t])) for m in self._modules for t in tables]
        holders: list[Any] = [*self._modules, *(() if sharded else tensors)]
        kinds = (bool, int, float, str) if sharded else (object,)
        self._known = [set(vars(holder)) for holder in holders]
        self._attributes = [
            (h, {n: v for n, v in vars(h).items() if n not in _TABLES and isinstance(v, kinds)})
            for h in holders
        ]
        self._attributes = self._copy()
        now, kept = list_uncertified(certified.model), certified.kept
        self._tensors = [
            (live.detach(), kept[name] if name in kept else live.detach().clone())
            for name, live in now.items()
        ]

    def put_back(self) -> None:
        """Everything as it was; no gradient and no hook of a tensor is left."""
        for (holder, values), known in zip(self._copy(), self._known, strict=True):
            attributes = vars(holder)
            for name in attributes.keys() - known:
                del attributes[name]
            attributes.update(values)
        for module, kind in self._modules.items():
            module.__class__ = kind
        for module, name, table in self._tables:
            vars(module)[name].clear()
            vars(module)[name].update(table)
        for tensor, trained in self._flags:
            tensor.requires_grad_(trained)
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                setattr(tensor, hooks, None)
        for module in self._modules:
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.grad = None
        with torch.no_grad():
            for live, held in self._tensors:
                to_local(live).copy_(to_local(held))

    def _copy(self) -> list[tuple[Any, dict[str, Any]]]:
        memo: dict[int, Any] = dict(self._fixed)
        return [(h, copy.deepcopy(values, memo)) for h, values in self._attributes]


def reset_statistics(certified: CertifiedModel) -> None:
    """Running statistics as in a module that has seen nothing.

    That they are is seen by resetting twice, from unlike values: a buffer that then differs keeps
    something of what was there, and is refused by name.
    """
    for path in certified.reset:
        module = cast(Any, certified.model.get_submodule(path))
        found: list[dict[str, Tensor]] = []
        for filling in (1, 0):
            for buffer in module.buffers(recurse=False):
                buffer.fill_(filling)
            module.reset_running_stats()
            found.append({name: b.clone() for name, b in module.named_buffers(recurse=False)})
        for name in found[0]:
            if not has_same_bits(found[0][name], found[1][name]):
                raise UnlearningError(
                    f"{path}.{name} is not reset by reset_running_stats of {type(module).__name__};"
                    " use a normalisation that resets all its buffers"
                )


def estimate_statistics(
    certified: CertifiedModel, loader: Iterable[Any], loss_fn: LossFunction | None
) -> dict[str, Tensor]:
    """Running statistics as the plain average over one pass of retained data, by name.

    The weights are already noisy: this is post-processing. The model is left in another state.
    """
    certified.model.eval()
    for path in certified.reset:
        module = cast(Any, certified.model.get_submodule(path))
        module.train()
        module.reset_running_stats()
        module.momentum = None
    seen = 0
    with torch.no_grad():
        for batch in loader:
            compute_loss(certified.model, move_batch(batch, certified.device), loss_fn)
            seen += 1
            _check_statistics(certified, seen)
    if seen == 0:
        raise UnlearningError("retain_loader yields no batches to re-estimate buffers on")
    found = list_uncertified(certified.model).items()
    return {name: tensor.clone() for name, tensor in found if name not in certified.kept}


def _check_statistics(certified: CertifiedModel, batch: int) -> None:
    """Refuse statistics that a sample of this batch drove out of the numbers."""
    for path in certified.reset:
        wrong = find_nonfinite(dict(certified.model.get_submodule(path).named_buffers()))
        if wrong is not None:
            raise UnlearningError(
                f"{wrong} of {path or 'the model'} is not finite after batch {batch} of the "
                "retained data; mend or leave out the sample in it that is not finite"
            )


def is_source(public: Public) -> bool:
    """Whether ``public`` holds tensors to compare with, rather than names."""
    return isinstance(public, Mapping | nn.Module | str | Path)


def match_public(held: Mapping[str, Tensor], public: Public) -> set[str]:
    """The names that the patterns declare; a pattern must declare something."""
    covered: set[str] = set()
    for pattern in cast(Iterable[object], public):
        found = {name for name in held if isinstance(pattern, str) and fnmatchcase(name, pattern)}
        if not found:
            raise InputError.of(
                "public", pattern, "the name of a frozen parameter or buffer, or a pattern of some"
            )
        covered |= found
    return covered


def _compare(
    model: nn.Module, names: Sequence[str], public: Public | None, processes: Processes
) -> tuple[str, bool]:
    """Where the public tensors come from, and whether they were compared; none may differ."""
    if public is None or not is_source(public):
        return "declared public by the operator", False
    source, told = read_source(cast(Any, public))
    held, aliases = list_uncertified(model), list_aliases(model)
    missing, differing = list[str](), list[str]()
    for name in names:
        found = [source[alias] for alias in aliases[id(held[name])] if alias in source]
        if not found:
            missing.append(name)
        for given in found:
            whole = held[name].shape == given.shape
            own = cut_rows(given, held[name], processes) if whole else given
            if not has_same_bits(held[name], own):
                differing.append(name)
                break
    if missing or differing:
        what = "is not in" if missing else "differs from"
        raise UnlearningError(
            f"{shorten(missing or differing)} {what} the public tensors ({told}); what is not "
            "certified must be public bit for bit: train it (requires_grad=True), put the public "
            "values back, or declare by name what is public for another reason"
        )
    return told, True


def read_source(
    public: Mapping[str, Tensor] | nn.Module | str | Path,
) -> tuple[Mapping[str, Tensor], str]:
    match public:
        case nn.Module():
            parameters = dict(public.named_parameters(remove_duplicate=False))
            buffers = dict(public.named_buffers(remove_duplicate=False))
            return parameters | buffers, f"a {type(public).__name__}"
        case str() | Path():
            try:
                return safetensors.torch.load_file(public), f"file {Path(public).name}"
            except (OSError, SafetensorError) as error:
                raise InputError(
                    f"public is {str(public)!r}, which cannot be read as a safetensors file "
                    f"({error}); names and patterns are given as a list"
                ) from None
        case _:
            for name, tensor in public.items():
                if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise InputError.of(f"public[{name!r}]", tensor, "a tensor")
            return public, "a state_dict"


def list_aliases(model: nn.Module) -> dict[int, list[str]]:
    """All names of every parameter and buffer, by identity."""
    aliases: dict[int, list[str]] = {}
    everything: list[tuple[str, Tensor]] = [*model.named_parameters(remove_duplicate=False)]
    for name, tensor in (*everything, *model.named_buffers(remove_duplicate=False)):
        aliases.setdefault(id(tensor), []).append(name)
    return aliases


def _check_parameters(model: nn.Module, sharded: bool) -> None:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, p in trainable:
        if isinstance(p, nn.parameter.UninitializedParameter):
            raise UnlearningError(f"parameter {name} has no shape yet; run the model once first")
        if type(p) is not nn.Parameter and not isinstance(p, DTensor):
            raise UnlearningError(
                f"parameter {name} is a {type(p).__name__}, which may write and copy itself in its "
                "own way; only plain parameters can be certified"
            )
        if not p.is_floating_point():
            raise UnlearningError(f"parameter {name} is {p.dtype}; only real ones can be certified")
        if p.is_meta:
            raise UnlearningError(f"parameter {name} has no values: it is on the device meta")
        if p.layout is not torch.strided:
            raise UnlearningError(f"parameter {name} is not dense; only dense ones are certified")
        name_dtype(name, p)
    for name, tensor in list_uncertified(model).items():
        name_dtype(check_name(name), tensor)
    if not any(p.numel() > 0 for _, p in trainable):
        raise UnlearningError(
            "the model has no trainable parameter; at least one must have requires_grad=True"
        )
    if not sharded:
        _check_memory(model)


def _check_devices(certified: Mapping[str, Tensor]) -> None:
    devices = sorted({str(p.device) for p in certified.values()})
    if len(devices) > 1:
        raise UnlearningError(
            f"the trainable parameters are on {', '.join(devices)}; they must be on one device"
        )
    if devices[0].startswith("mps"):
        raise UnlearningError("the grid needs float64, which mps does not have; pass device='cpu'")


def _check_memory(model: nn.Module) -> None:
    """No memory under two names of which one is trained: a copy gives each memory of its own.

    The noise would then be drawn twice; and old weights would stay in what is not trained.
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


def _is_frozen(module: nn.Module) -> bool:
    """In ``eval`` mode and without a trainable parameter."""
    trainable = any(p.requires_grad for p in module.parameters(recurse=False))
    return not module.training and not trainable


def _refusal(names: list[str]) -> str:
    verb = "is" if len(names) == 1 else "are"
    return (
        f"{shorten(names)} {verb} not certified: no noise covers frozen parameters and buffers, "
        "and the original training may have filled them from the forget data; pass public= (a "
        "state_dict, module or file of public weights to compare with, or names and patterns that "
        "you declare public), buffers='reset' for running statistics, or use GroupNorm or "
        "LayerNorm"
    )
