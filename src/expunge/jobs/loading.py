"""What a job names, loaded: functions as ``module:function``, and weights into a module.

Importing runs the code that the job names, as ``python`` would.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from expunge.errors import ExpungeError, InputError, describe_error
from expunge.jobs.checkpoints import match_names

_INSTALLED = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}


@contextmanager
def importing_from(folder: Path) -> Generator[None]:
    """Let modules beside the job file be imported, and after them those of the working folder.

    They are forgotten at the end: the next job may have others so named. No byte code is written: a
    full disk would leave it broken, for every later run to find.
    """
    folders = (folder.absolute(), Path.cwd())
    before, places, plain = set(sys.modules), list(sys.path), sys.dont_write_bytecode
    sys.path[:0] = [str(place) for place in folders]
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:], sys.dont_write_bytecode = places, plain
        for name in set(sys.modules) - before:
            module = sys.modules[name]
            held = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
            file = next((place for place in held if place), None)
            if file is not None and _owns(folders, name, file):
                del sys.modules[name]


def _owns(folders: Iterable[Path], name: str, file: str) -> bool:
    """Whether a module is one of the job's: in its folders, and not an installed package."""
    if name.partition(".")[0] == "expunge" or "site-packages" in file:
        return False
    if any(Path(file).is_relative_to(place) for place in _INSTALLED):
        return False
    return any(Path(file).is_relative_to(folder) for folder in folders)


def load_function(field: str, place: str, folder: Path) -> Callable[..., Any]:
    """The function that ``place`` names: ``module:function`` or ``path/to/file.py:function``.

    >>> load_function("model.build", "math:gcd", Path("."))(12, 18)
    6
    >>> load_function("model.build", "math:gdc", Path("."))
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: model.build is 'math:gdc'; math has no function gdc
    """
    home, _, name = place.rpartition(":")
    with explaining(f"{field} is {place!r}, which cannot be imported"):
        is_file = home.endswith(".py")
        module = _import_file(folder / home) if is_file else importlib.import_module(home)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{field} is {place!r}; {home} has no function {name}")
    return function


@contextmanager
def explaining(what: str, passing: Collection[int] = ()) -> Generator[None]:
    """Turn what somebody's code raises into one sentence that says what and where.

    System errors whose number is in ``passing`` are left as they are.
    """
    try:
        yield
    except ExpungeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno in passing:
            raise
        raise InputError(f"{what}: {describe_error(error)}") from error


def build_model(build: Callable[[], Any], field: str = "model.build") -> nn.Module:
    """What the job's function builds, if it is a module."""
    with explaining(f"{field} failed"):
        model = build()
    if not isinstance(model, nn.Module):
        raise InputError(f"{field} returned a {type(model).__name__}; it must return an nn.Module")
    return model


def put_weights(model: nn.Module, tensors: Mapping[str, Tensor], field: str) -> tuple[str, ...]:
    """Copy weights into the module; returns the names of frozen tensors that stay as they were.

    Every trainable parameter must be given, tied ones under any of their names. Frozen parameters
    and buffers may be left out: an adapter's file needs no base model.
    """
    own = model.state_dict(keep_vars=True)
    given = match_names(model, tensors, field)
    unknown = [name for name in given if name not in own]
    if unknown:
        raise InputError(
            f"{field} has the tensor {unknown[0]}, which the model has not ({len(unknown)} in all)"
        )
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise InputError.of(
                f"{field}: the shape of {name}", tuple(tensor.shape), f"{tuple(own[name].shape)}"
            )
    present = dict[int, str]()
    for name, tensor in given.items():
        first = present.setdefault(id(own[name]), name)
        if first != name and not torch.equal(tensor, given[first]):
            raise InputError(
                f"{field} has different values for the tied weights {first} and {name}"
            )
    missing = [name for name, tensor in own.items() if id(tensor) not in present]
    trainable = [name for name in missing if own[name].requires_grad]
    if trainable:
        raise InputError(
            f"{field} has no tensor {trainable[0]}; it must have every trainable parameter "
            f"({len(trainable)} missing)"
        )
    model.load_state_dict(given, strict=False)
    return tuple(missing)


def _import_file(path: Path) -> ModuleType:
    """A file as a module of its own name, so that two files of the same name do not meet."""
    name = f"expunge_job_{path.stem}_{sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
