"""Weights as training tools save them: files, folders and checkpoints, and the names in them.

Recognised are safetensors and torch files, alone or with an index; folders of the Trainer and of
PEFT; a state_dict inside a checkpoint (Lightning and most loops); and names with what wrappers put
in front (``module.``, ``_orig_mod.``, an attribute such as ``model.``) or leave out (the adapter's
name). What was recognised is logged. Two possible readings are no reading, and a name that means
two tensors is refused: nothing is chosen, dropped or added in silence. Weights are data: no code in
a file is ever run.
"""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from expunge.errors import InputError
from expunge.processes.adapters import list_adapters, name_base

LOG = logging.getLogger("expunge")
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".ckpt")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_INSIDE = ("state_dict", "model", "module")


def find_file(path: Path, field: str) -> Path:
    """The file of weights that a path means: itself, or the only one of a checkpoint's folder.

    >>> find_file(Path("w.pt"), "model.weights")
    PosixPath('w.pt')
    """
    if not path.is_dir():
        return path
    found = [name for name in FILES if (path / name).is_file()]
    if len(found) == 1:
        return path / found[0]
    if found:
        raise InputError(
            f"{field} is {path}, which holds {' and '.join(found)}; name the one that is meant"
        )
    inner = [held.name for held in path.iterdir() if any((held / n).is_file() for n in FILES)]
    inner += [held.name for held in path.iterdir() if held.suffix in _SUFFIXES]
    advice = f"name one of {', '.join(sorted(inner))}" if inner else "name a file of weights"
    raise InputError(f"{field} is {path}, a folder that holds none of {', '.join(FILES)}; {advice}")


def read_weights(path: Path, field: str) -> dict[str, Tensor]:
    """The named tensors of a file or folder; a checkpoint's state_dict is found in it.

    >>> read_weights(Path("/nowhere/w.pt"), "model.weights")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: model.weights is /nowhere/w.pt, which cannot be read: [Errno 2] ...
    """
    file = find_file(path, field)
    if file != path:
        LOG.info("%s: %s of the folder %s", field, file.name, path)
    try:
        parts = {part: _load(part) for part in list_parts(file)}
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise InputError(
            f"{field} is {file}, which can be read only by running code"
            f"{f' of {named[1]}' if named else ''}; no code in a file of weights is run: save the "
            "tensors alone, torch.save(model.state_dict(), ...)"
        ) from None
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise InputError(f"{field} is {file}, which cannot be read: {reason}") from None
    if list(parts) == [file]:
        return _find_tensors(parts[file], file, field)
    found = dict[str, Tensor]()
    for part, loaded in parts.items():
        tensors = _find_tensors(loaded, part, field)
        if twice := found.keys() & tensors.keys():
            raise InputError(f"{field} is {file}, whose files hold {min(twice)} twice")
        found |= tensors
    listed = set(_read_map(file))
    if listed != found.keys():
        name = min(listed ^ found.keys())
        raise InputError(f"{field} is {file}, which does not list what its files hold: {name}")
    return found


def read_metadata(path: Path, field: str = "model.weights") -> Mapping[str, str]:
    """What a safetensors file, or the first file of an index, says about itself."""
    from safetensors import safe_open

    first = list_parts(find_file(path, field))[0]
    if first.suffix != ".safetensors":
        return {}
    with safe_open(first, "pt") as file:
        return file.metadata() or {}


def list_parts(path: Path) -> list[Path]:
    """The files of an index; a file itself is its only part."""
    if not path.name.endswith(".index.json"):
        return [path]
    return [path.with_name(Path(name).name) for name in sorted(set(_read_map(path).values()))]


def _read_map(path: Path) -> dict[str, str]:
    return json.loads(path.read_text("utf-8"))["weight_map"]


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return load_file(path)
    return torch.load(path, map_location="cpu", weights_only=True)


def _find_tensors(loaded: object, path: Path, field: str) -> dict[str, Tensor]:
    """The only mapping from names to tensors in what a file holds."""
    inside = _list_inside(loaded)
    if len(inside) > 1:
        raise InputError(
            f"{field} is {path}, which holds named tensors in {' and in '.join(map(repr, inside))};"
            " save the ones of the model alone"
        )
    if not inside:
        raise InputError(
            f"{field} is {path}; it must hold named tensors, as state_dict() gives them"
        )
    (place, found), *_ = inside.items()
    if place:
        LOG.info("%s: %r of the checkpoint %s", field, place, path.name)
    return found


def _list_inside(loaded: object, at: str = "") -> dict[str, dict[str, Tensor]]:
    """Mappings from text to tensors, by their place: the whole, its parts, theirs where usual."""
    if not isinstance(loaded, Mapping):
        return {}
    given = cast(Mapping[Any, Any], loaded)
    if given and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in given.items()):
        return {at: dict(cast(Mapping[str, Tensor], given))}
    found = dict[str, dict[str, Tensor]]()
    for name, part in given.items():
        if isinstance(name, str) and (not at or at in _INSIDE):
            found |= _list_inside(part, f"{at}.{name}" if at else name)
    return found


def match_names(
    model: nn.Module, tensors: Mapping[str, Tensor], field: str = "weights"
) -> dict[str, Tensor]:
    """The tensors by the module's own names; those of no reading keep their names.

    >>> layer = nn.Linear(1, 1)
    >>> wrapped = {f"_orig_mod.module.{name}": t for name, t in layer.state_dict().items()}
    >>> list(match_names(layer, wrapped))
    ['weight', 'bias']
    """
    own = model.state_dict().keys()
    short = _list_short(model, own)
    names, told = list(tensors), list[str]()

    def count(given: Iterable[str]) -> int:
        return sum(name in own or name in short for name in given)

    if count(names) < len(names):
        known = {segment for name in own for segment in name.split(".")}
        gone = [w for w in _WRAPPERS if w not in known]
        bare = [".".join(s for s in name.split(".") if s not in gone) for name in names]
        told += [f"{w}." for w in gone if any(w in name.split(".") for name in names)]
        names, taken = _drop_prefix(bare, count, field)
        told += taken
    named = [(name if name in own else _expand(name, short, field)) for name in names]
    if told:
        LOG.info("%s: names without %s", field, " and ".join(map(repr, told)))
    found = dict[str, Tensor]()
    for given, name, tensor in zip(tensors, named, tensors.values(), strict=True):
        if name in found:
            raise InputError(f"{field} has two tensors for {name}, the second is {given}")
        found[name] = tensor
    return found


def _drop_prefix(
    names: list[str], count: Callable[[list[str]], int], field: str
) -> tuple[list[str], list[str]]:
    """Names without what stands before all of them, as far as that makes most of them known."""
    told, left, best = list[str](), names, (names, list[str]())
    while count(left) < len(left):
        heads = sorted({name.partition(".")[0] for name in left})
        inner = {h: [n.partition(".")[2] for n in left if n.startswith(f"{h}.")] for h in heads}
        fits = [h for h in heads if inner[h] and count(inner[h]) == len(inner[h])]
        if fits and len(heads) > 1:
            raise InputError(
                f"{field} has tensors under {', '.join(map(repr, heads))}, and those under "
                f"{' and '.join(map(repr, fits))} fit the model; save the model's alone"
            )
        if len(heads) > 1 or len(inner[heads[0]]) < len(left):
            break
        told, left = [*told, f"{heads[0]}."], inner[heads[0]]
        if count(left) > count(best[0]):
            best = left, told
    return best


def _list_short(model: nn.Module, own: Iterable[str]) -> dict[str, list[str]]:
    """The module's names as they stand in files of PEFT and of the base alone.

    PEFT leaves the adapter's name out, and that of the wrapper around a module that is saved whole;
    a base model knows neither ``base_model.model.`` nor the wrappers around its layers.
    """
    adapters = list_adapters(model)
    found: dict[str, list[str]] = {}
    for name in own if adapters else ():
        shorter = {name_base(name)}
        for adapter in adapters:
            shorter.add(name.replace(f".modules_to_save.{adapter}.", "."))
            shorter.add(name.replace(f".{adapter}.", "."))
        for given in shorter - {name}:
            found.setdefault(given, []).append(name)
    return found


def _expand(name: str, short: Mapping[str, list[str]], field: str) -> str:
    meant = short.get(name, [name])
    if len(meant) > 1:
        raise InputError(f"{field} has the tensor {name}, which may be {' or '.join(meant)}")
    return meant[0]
