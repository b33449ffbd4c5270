"""The old model, from anybody's checkpoint: named tensors of what ``build()``'s module trains.

A checkpoint is a module, a state_dict, what ``torch.load`` gave, a release, or a path: safetensors
and torch files, alone or with an index; folders of Hugging Face's Trainer and of PEFT; a Lightning
checkpoint. No code in a file is ever run. Names may have what wrappers put before them, be those of
tied tensors, or as PEFT's files have them. Only trainable names are read; whatever else is there
(optimizers, buffers, frozen tensors) stays there.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import pickle
import re
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from expunge.certificates.release import Release
from expunge.errors import InputError
from expunge.networks.adapters import list_base_names, list_file_names
from expunge.networks.tensors import (
    find_nonfinite,
    has_same_bits,
    list_aliases,
    list_published,
    list_tensors,
    list_trainable,
    name_first,
)

_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_DEPTH = 3  # of mappings in a checkpoint
# Plain values that people keep beside weights; reading them runs nobody's code.
_PLAIN: list[Any] = [
    argparse.Namespace, pathlib.PosixPath, np.dtype, np.ndarray,
    np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0],
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i1", "i4", "i8", "u1", "?")),
]  # fmt: skip

Named = dict[str, Tensor]
_WRAPPERS = re.compile(r"(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def read_old(
    old: object, module: nn.Module, *, key: str | None = None, strict: bool = True
) -> Named:
    """The old values of ``module``'s trainable parameters, by its own names, in its dtypes.

    ``key`` chooses where a checkpoint holds several sets of weights (``model`` and ``ema``). Names
    that ``old`` lacks or has in another shape are refused; with ``strict=False`` they are left out.

    >>> model = nn.Linear(1, 2)
    >>> old = {"model": {f"module.{n}": t for n, t in model.state_dict().items()}, "epoch": 3}
    >>> list(read_old(old, model))
    ['weight', 'bias']
    """
    own, names = list_trainable(module), list_aliases(module)
    short = {n: names[place] for n, place in list_file_names(module).items() if place in names}
    found = _match(old, own, short | names, "old", key)
    shapes = {n: tuple(t.shape) for n, t in found.items() if t.shape != own[n].shape}
    if not found:
        raise InputError(f"old has none of the names of build()'s module, {next(iter(own))} …")
    if not strict and len(shapes) == len(found):
        raise InputError(
            f"old fits build()'s module nowhere: {name_first(list(shapes))} have other shapes"
        )
    if strict and (missing := [name for name in own if name not in found]):
        raise InputError(
            f"old has no tensor for {name_first(missing)}; it must have every trainable parameter "
            "of build()'s module, or strict=False lets those start at the centre"
        )
    if strict and shapes:
        (name, shape), *_ = shapes.items()
        valid = f"{tuple(own[name].shape)}, or strict=False lets it start at the centre"
        raise InputError.of(f"the shape of {name} in old", shape, valid)
    kept = {name: found[name] for name in own if name in found and name not in shapes}
    for name, tensor in kept.items():
        if not tensor.is_floating_point() and not tensor.is_complex():
            raise InputError.of(f"{name} in old", tensor.dtype, "floating-point weights")
    if (wrong := find_nonfinite(kept)) is not None:
        raise InputError(f"{wrong} in old is not finite; weights must be finite numbers")
    return {name: t.to(own[name].device, own[name].dtype) for name, t in kept.items()}


def read_state(old: object, module: nn.Module, key: str | None = None) -> Named:
    """All tensors of ``module`` that ``old`` has, running statistics too: to measure the old model,
    and for nothing else."""
    own = list_tensors(module)
    found = _match(old, own, list_file_names(module) | {name: name for name in own}, "old", key)
    return {name: t for name, t in found.items() if t.shape == own[name].shape}


def compare_published(file: object, module: nn.Module) -> tuple[str, ...]:
    """The names of frozen tensors and buffers that are bit for bit those of a published file; one
    that differs is refused.

    >>> layer = nn.Linear(2, 2).requires_grad_(False)
    >>> compare_published(layer.state_dict(), layer)
    ('weight', 'bias')
    """
    own = list_published(module)
    names = list_base_names(own) | {name: name for name in own}
    found = _match(file, own, names, "published")
    tied = {_locate(own[n]): t for n, t in found.items()}  # a file may have one name of several
    for name, tensor in own.items():
        other = found.get(name, tied.get(_locate(tensor)))
        if other is None:
            valid = "it must have every frozen tensor and buffer of build()'s module"
            raise InputError(f"published has no tensor for {name}; {valid}")
        if not has_same_bits(other.to(tensor.dtype), tensor):
            valid = "a frozen tensor must be the published one"
            raise InputError(f"{name} of build()'s module is not the one in published; {valid}")
    return tuple(own)


def _locate(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.shape, *tensor.stride())


def _match(
    old: object,
    own: Mapping[str, Tensor],
    names: Mapping[str, str],
    field: str,
    key: str | None = None,
) -> Named:
    """The tensors of ``old`` by the module's names: under the prefix where most of them fit.

    ``names`` are the module's ``own``, by all that a file may have for them: those of tied tensors,
    of PEFT's files, of the base alone.
    """
    given = read_tensors(old, field)
    if isinstance(old, nn.Module):  # whose adapter may have another name
        given |= {n: given[place] for n, place in list_file_names(old).items()}
    readings: dict[str, list[tuple[str, str, Tensor]]] = {}
    for place, tensor in given.items():
        parts = _WRAPPERS.sub("", place).split(".")
        for k in range(len(parts)):
            if (rest := ".".join(parts[k:])) in names:
                readings.setdefault(".".join(parts[:k]), []).append((names[rest], place, tensor))
    if not readings:
        return {}
    chosen = _choose(readings, own)
    if key is not None:
        inside = {p: found for p, found in readings.items() if f"{p}.".startswith(f"{key}.")}
        inside = inside or {p: found for p, found in readings.items() if f".{key}." in f".{p}."}
        if not inside:
            places = [repr(prefix) for prefix in chosen if prefix]
            valid = f"one of {', '.join(places)}" if places else "left out"
            raise InputError.of(f"key of {field}", key, valid)
        chosen = _choose(inside, own)
    if len(chosen) > 1:
        places = " and in ".join(sorted(map(repr, chosen)))
        raise InputError(f"{field} has weights in {places} that fit; choose one by key=")
    kept: Named = {}
    for name, place, tensor in readings[chosen[0]]:
        before = kept.setdefault(name, tensor)
        if before is not tensor and not has_same_bits(before, tensor):
            raise InputError(
                f"{field} has two different tensors for {name}, one of them is {place}"
            )
    return kept


def _choose(
    readings: Mapping[str, list[tuple[str, str, Tensor]]], own: Mapping[str, Tensor]
) -> list[str]:
    """The prefixes under which most tensors have a name and its shape; of those that only read on
    from another (``model`` and ``model.teacher``), the shorter."""
    ranks = {
        prefix: (len({n for n, _, t in found if t.shape == own[n].shape}), len(found))
        for prefix, found in readings.items()
    }
    best = [prefix for prefix, rank in ranks.items() if rank == max(ranks.values())]
    return [p for p in best if not any(p != o and (not o or p.startswith(f"{o}.")) for o in best)]


def read_tensors(old: object, field: str = "old") -> Named:
    """All named tensors of ``old``; those of a checkpoint's inner mappings as ``model.NAME``.

    >>> list(read_tensors({"epoch": 3, "ema": {"weight": torch.ones(1)}}))
    ['ema.weight']
    """
    match old:
        case nn.Module():
            found = list_tensors(old)
        case Release():
            found = {name: torch.as_tensor(t) for name, t in old.tensors.items()}
        case str() | Path():
            parts = _read_path(Path(old), field)
            found = {name: t for part in parts for name, t in _flatten(part)}
        case Mapping():
            found = dict(_flatten(old))
        case _:
            valid = "a module, a state_dict or the path of a checkpoint"
            raise InputError(f"{field} is a {type(old).__name__}; it must be {valid}")
    if not found:
        raise InputError(f"{field} has no named tensors, as state_dict() gives them")
    # What several processes share out is read whole.
    whole = {
        n: cast(Any, t).full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()
    }
    return {name: tensor.detach() for name, tensor in whole.items()}


def _flatten(loaded: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if isinstance(loaded, Tensor) and prefix:
        yield prefix[:-1], loaded
    elif isinstance(loaded, Mapping) and depth <= _DEPTH:
        for name, part in cast(Mapping[Any, Any], loaded).items():
            if isinstance(name, str):
                yield from _flatten(part, f"{prefix}{name}.", depth + 1)


def find_file(path: Path, field: str = "old") -> Path:
    """The file of weights that a path means: itself, or that of a checkpoint's folder.

    Of safetensors and pickled weights in one folder the first are meant, as in transformers.

    >>> find_file(Path("w.pt"))
    PosixPath('w.pt')
    """
    if not path.is_dir():
        return path
    found = [name for name in _FILES if (path / name).is_file()]
    kinds = {name.startswith("adapter"): name for name in reversed(found)}
    if len(kinds) == 1:
        return path / found[0]
    inner = [
        p.name
        for p in path.iterdir()
        if p.suffix in _SUFFIXES or any((p / n).is_file() for n in _FILES)
    ]
    if kinds:
        why = f"which has {' and '.join(kinds.values())}; name the one that is meant"
    elif any(path.glob("*.distcp")):
        why = "a distributed checkpoint; make one file of it: python -m "
        why += "torch.distributed.checkpoint.format_utils dcp_to_torch"
    else:
        advice = f"name one of {', '.join(sorted(inner))}" if inner else "name a file of weights"
        why = f"a folder that has none of {', '.join(_FILES)}; {advice}"
    raise InputError(f"{field} is {path}, {why}")


def _read_path(path: Path, field: str) -> list[Any]:
    """What a file holds, or each file of an index."""
    file = find_file(path, field)
    try:
        if not file.name.endswith(".index.json"):
            return [_load(file)]
        places = json.loads(file.read_text("utf-8"))["weight_map"]
        return [_load(file.with_name(Path(name).name)) for name in sorted(set(places.values()))]
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise InputError(
            f"{field} is {file}, which can be read only by running code"
            f"{f' of {named[1]}' if named else ''}; no code in a file of weights is run: save the "
            "tensors alone, torch.save(model.state_dict(), …)"
        ) from None
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise InputError(f"{field} is {file}, which cannot be read: {reason}") from None


def _load(file: Path) -> Any:
    if file.suffix == ".safetensors":
        return load_file(file)
    with torch.serialization.safe_globals(_PLAIN):
        mapped = zipfile.is_zipfile(file)  # so that an optimizer's state is never read
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
