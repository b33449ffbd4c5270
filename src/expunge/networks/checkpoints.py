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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
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
_DEPTH = 3
# Plain values that people keep beside weights; reading them runs nobody's code.
_PLAIN: list[Any] = [
    argparse.Namespace, pathlib.PosixPath, np.dtype, np.ndarray,
    np.float64(0).__reduce__()[0], np.zeros(1).__reduce__()[0],
    *(type(np.dtype(kind)) for kind in ("f2", "f4", "f8", "i1", "i4", "i8", "u1", "?")),
]  # fmt: skip

Named = dict[str, Tensor]
_ADVICE = "choose one by key="
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def read_old(
    old: object,
    module: nn.Module,
    *,
    key: str | None = None,
    strict: bool = True,
    field: str = "old",
) -> dict[str, Tensor]:
    """The old values of ``module``'s trainable parameters, by its own names, in its dtypes.

    ``key`` chooses where a checkpoint holds several sets of weights (``model`` and ``ema``). Names
    that ``old`` lacks or has in another shape are refused; with ``strict=False`` they are left out.

    >>> model = nn.Linear(1, 2)
    >>> old = {"model": {f"module.{n}": t for n, t in model.state_dict().items()}, "epoch": 3}
    >>> list(read_old(old, model))
    ['weight', 'bias']
    """
    own = list_trainable(module)
    wanted = {name: tuple(p.shape) for name, p in own.items()}
    names = {alias: name for name, every in list_aliases(module).items() for alias in every}
    short = {n: names[place] for n, place in list_file_names(module).items() if place in names}
    found = _match(_read_sets(old, field), wanted, short | names, key, field)
    if not found:
        raise InputError(f"{field} has none of the names of build()'s module, {next(iter(own))} …")
    shapes = {n: tuple(t.shape) for n, t in found.items() if tuple(t.shape) != wanted[n]}
    missing = [name for name in wanted if name not in found]
    if strict and missing:
        first = f"{missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        raise InputError(
            f"{field} has no tensor for {first}; it must have every trainable parameter of "
            "build()'s module, or strict=False lets those start at the centre"
        )
    if strict and shapes:
        name = next(iter(shapes))
        valid = f"{wanted[name]}, or strict=False lets it start at the centre"
        raise InputError.of(f"the shape of {name} in {field}", shapes[name], valid)
    for name, tensor in found.items():
        if not tensor.is_floating_point() and not tensor.is_complex():
            raise InputError.of(f"{name} in {field}", tensor.dtype, "floating-point weights")
    kept = {name: t for name, t in found.items() if name not in shapes}
    if not kept:
        raise InputError(f"{field} fits build()'s module nowhere: no tensor has its name and shape")
    if (wrong := find_nonfinite(kept)) is not None:
        raise InputError(f"{wrong} in {field} is not finite; weights must be finite numbers")
    return {n: kept[n].to(own[n].device, own[n].dtype) for n in own if n in kept}


def compare_published(
    file: object, module: nn.Module, *, key: str | None = None, field: str = "published"
) -> tuple[str, ...]:
    """The names of frozen tensors and buffers that are bit for bit those of a published file; one
    that differs is refused.

    >>> layer = nn.Linear(2, 2).requires_grad_(False)
    >>> compare_published(layer.state_dict(), layer)
    ('weight', 'bias')
    """
    own = list_published(module)
    wanted = {name: tuple(t.shape) for name, t in own.items()}
    names = list_base_names(own) | {name: name for name in own}
    found = _match(_read_sets(file, field), wanted, names, key, field)
    tied: dict[tuple[int, ...], Tensor] = {_locate(own[n]): t for n, t in found.items()}
    for name, tensor in own.items():
        other = found.get(name, tied.get(_locate(tensor)))
        if other is None:
            valid = "it must have every frozen tensor and buffer of build()'s module"
            raise InputError(f"{field} has no tensor for {name}; {valid}")
        if not has_same_bits(other.to(tensor.dtype), tensor):
            valid = "a frozen tensor must be the published one"
            raise InputError(f"{name} of build()'s module is not the one in {field}; {valid}")
    return tuple(own)


def _locate(tensor: Tensor) -> tuple[int, ...]:
    return (tensor.data_ptr(), *tensor.shape, *tensor.stride())


def read_tensors(path: str | Path, key: str | None = None, field: str = "file") -> Named:
    """The named tensors of a file or folder; ``key`` chooses where there are several sets."""
    sets = _choose_sets(_read_sets(Path(path), field), key, field)
    if len(sets) > 1:
        raise InputError(f"{field} is {path}, which has weights in {_quote(sets)}; {_ADVICE}")
    return next(iter(sets.values()))


def _match(
    sets: dict[str, Named],
    wanted: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    key: str | None,
    field: str,
) -> Named:
    """The tensors by the module's names: of the set, and without the prefix, that fit best.

    ``names`` are the module's own, by all that a file may have for them: those of tied tensors, of
    PEFT's files, of the base alone.
    """
    readings: dict[tuple[str, str], list[tuple[str, str, Tensor]]] = {}
    for place, tensors in _choose_sets(sets, key, field).items():
        for given, tensor in tensors.items():
            for prefix, rest in _split(given if given in names else _strip(given)):
                if rest in names:
                    found = (names[rest], given, tensor)
                    readings.setdefault((place, prefix), []).append(found)
    fits = {
        at: len({n for n, _, t in found if tuple(t.shape) == wanted[n]})
        for at, found in readings.items()
    }
    most = max(fits.values(), default=0)
    best = [at for at in fits if fits[at] == most and (most or not at[1])]
    # Names that need no reading are no question.
    chosen = [at for at in best if not at[1] or (at[0], "") not in best]
    if len(chosen) > 1:
        places = sorted(f"{place}.{prefix}".strip(".") for place, prefix in chosen)
        raise InputError(f"{field} has weights in {_quote(places)} that fit; {_ADVICE}")
    kept: Named = {}
    for name, given, tensor in readings[chosen[0]] if chosen else ():
        before = kept.setdefault(name, tensor)
        if before is not tensor and not has_same_bits(before, tensor):
            raise InputError(
                f"{field} has two different tensors for {name}, one of them is {given}"
            )
    return kept


def _strip(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _split(name: str) -> Iterator[tuple[str, str]]:
    """Every way to take a prefix from a name.

    >>> list(_split("model.0.bias"))
    [('', 'model.0.bias'), ('model.', '0.bias'), ('model.0.', 'bias')]
    """
    yield "", name
    for match in re.finditer(r"\.", name):
        yield name[: match.end()], name[match.end() :]


def _quote(names: Iterable[str]) -> str:
    return " and in ".join(map(repr, names))


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
    if kinds:
        both = " and ".join(kinds.values())
        raise InputError(f"{field} is {path}, which has {both}; name the one that is meant")
    if any(path.glob("*.distcp")):
        raise InputError(
            f"{field} is {path}, a distributed checkpoint; make one file of it: python -m "
            "torch.distributed.checkpoint.format_utils dcp_to_torch"
        )
    inner = [part.name for part in path.iterdir() if any((part / n).is_file() for n in _FILES)]
    inner += [part.name for part in path.iterdir() if part.suffix in _SUFFIXES]
    advice = f"name one of {', '.join(sorted(inner))}" if inner else "name a file of weights"
    raise InputError(f"{field} is {path}, a folder that has none of {', '.join(_FILES)}; {advice}")


def _list_parts(file: Path) -> list[Path]:
    """The files of an index; a file itself is its only part."""
    if not file.name.endswith(".index.json"):
        return [file]
    places = cast(Mapping[str, str], json.loads(file.read_text("utf-8"))["weight_map"])
    return [file.with_name(Path(name).name) for name in sorted(set(places.values()))]


def _read_sets(old: object, field: str) -> dict[str, Named]:
    """Every set of named tensors in ``old``, by its place ("" is the whole)."""
    match old:
        case nn.Module():
            tensors = _gather(list_tensors(old))
            return {"": tensors | {n: tensors[own] for n, own in list_file_names(old).items()}}
        case Release():
            return {"": {name: torch.as_tensor(t) for name, t in old.tensors.items()}}
        case Mapping():
            sets = dict(_list_sets(cast(Mapping[object, object], old)))
            if not sets:
                raise InputError(f"{field} has no named tensors, as state_dict() gives them")
            return sets
        case str() | Path():
            return _read_path(Path(old), field)
        case _:
            valid = "a module, a state_dict or the path of a checkpoint"
            raise InputError(f"{field} is a {type(old).__name__}; it must be {valid}")


def _read_path(path: Path, field: str) -> dict[str, Named]:
    file = find_file(path, field)
    try:
        parts = [_load(part) for part in _list_parts(file)]
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
    found: dict[str, Named] = {}
    for part in parts:
        for place, tensors in _list_sets(part):
            found.setdefault(place, {}).update(tensors)
    if not found:
        raise InputError(f"{field} is {file}; it must have named tensors, as state_dict() gives")
    return found


def _load(file: Path) -> Any:
    if file.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(file)
    with torch.serialization.safe_globals(_PLAIN):
        mapped = zipfile.is_zipfile(file)  # so that an optimizer's state is never read
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _list_sets(loaded: object, place: str = "", depth: int = 0) -> Iterator[tuple[str, Named]]:
    """Mappings from names to tensors, in a checkpoint's own places (``state_dict``, ``ema``, …)."""
    if not isinstance(loaded, Mapping) or depth > _DEPTH:
        return
    items = cast(Mapping[Any, Any], loaded).items()
    tensors = {n: t for n, t in items if isinstance(n, str) and isinstance(t, Tensor)}
    inner = [
        found
        for name, part in items
        if isinstance(name, str) and isinstance(part, Mapping)
        for found in _list_sets(part, f"{place}.{name}" if place else name, depth + 1)
    ]
    if tensors:
        yield place, _gather(tensors)
    yield from inner


def _gather(tensors: Mapping[str, Any]) -> Named:
    """Tensors that several processes share out, whole."""
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
    return {name: tensor.detach() for name, tensor in whole.items()}


def _choose_sets(sets: dict[str, Named], key: str | None, field: str) -> dict[str, Named]:
    """The sets at ``key``: a place in the checkpoint, or what stands before names there."""
    if key is None:
        return sets
    within = {p: t for p, t in sets.items() if f"{p}.".startswith(f"{key}.")}
    for place, tensors in {} if within else sets.items():
        for head in (f"{key}.", f"{key}.".removeprefix(f"{place}.")):
            chosen = {n.removeprefix(head): t for n, t in tensors.items() if n.startswith(head)}
            if chosen:
                within[place] = chosen
    if not within:
        places = [repr(place) for place in sets if place]
        valid = f"one of {', '.join(places)}" if places else "left out"
        raise InputError.of(f"key of {field}", key, valid)
    return within
