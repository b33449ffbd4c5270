"""What a job names, loaded: functions as ``module:function`` and weights from files.

Importing runs the code that the job names, as ``python`` would. Weights are data: no code in a
weights file is ever run.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from expunge.errors import ExpungeError, InputError, describe_error

_INSTALLED = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
_NESTED = ("state_dict", "model_state_dict", "model")


class _PlainLoader(SourceFileLoader):
    """Compiles a file each time: no byte code is read or written, so none can be found broken."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


class _JobFinder:
    """Finds modules as Python does, and loads those of some folders from their source alone."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target)
        if found is None or type(found.loader) is not SourceFileLoader:
            return None
        if not self.owns(name, found.origin):
            return None
        found.loader = _PlainLoader(name, found.loader.path)
        return found

    def owns(self, name: str, file: str | None) -> bool:
        """Whether a module is one of the job's: in its folders, and not an installed package."""
        if file is None or name.partition(".")[0] == "expunge":
            return False
        if "site-packages" in file or any(Path(file).is_relative_to(p) for p in _INSTALLED):
            return False
        return any(Path(file).is_relative_to(folder) for folder in self.folders)


@contextmanager
def importing_from(folder: Path) -> Generator[None]:
    """Let modules beside the job file be imported, and after them those of the working folder.

    They are forgotten at the end: the next job may have others so named.
    """
    finder = _JobFinder((folder.absolute(), Path.cwd()))
    before, places = set(sys.modules), list(sys.path)
    sys.path[:0] = [str(place) for place in finder.folders]
    sys.meta_path.insert(sys.meta_path.index(PathFinder), cast(Any, finder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = places
        sys.meta_path.remove(cast(Any, finder))
        for name in set(sys.modules) - before:
            module = sys.modules[name]
            held = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
            if finder.owns(name, next((place for place in held if place), None)):
                del sys.modules[name]


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


def read_weights(path: Path, field: str) -> dict[str, Tensor]:
    """The named tensors of a safetensors or torch file; a checkpoint's state dict is found in it.

    >>> read_weights(Path("/nowhere/w.pt"), "model.weights")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: model.weights is /nowhere/w.pt, which cannot be read: [Errno 2] ...
    """
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            loaded: Any = load_file(path)
        elif path.name.endswith(".index.json"):
            from safetensors.torch import load_file

            files = sorted(set(json.loads(path.read_text("utf-8"))["weight_map"].values()))
            parts = [load_file(path.with_name(Path(name).name)) for name in files]
            loaded = {name: tensor for part in parts for name, tensor in part.items()}
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise InputError(f"{field} is {path}, which cannot be read: {reason}") from None
    if isinstance(loaded, Mapping):
        given = cast(Mapping[Any, Any], loaded)
        nested = [given[key] for key in _NESTED if isinstance(given.get(key), Mapping)]
        tensors = dict(cast(Mapping[str, Any], nested[0] if nested else given))
        if tensors and all(isinstance(value, Tensor) for value in tensors.values()):
            return tensors
    raise InputError(f"{field} is {path}; it must hold named tensors, as state_dict() gives them")


def read_metadata(path: Path) -> Mapping[str, str]:
    """What a safetensors file, or the first file of an index, says about itself."""
    from safetensors import safe_open

    if path.name.endswith(".index.json"):
        files: Iterable[str] = json.loads(path.read_text("utf-8"))["weight_map"].values()
        path = path.with_name(Path(min(files)).name)
    if path.suffix != ".safetensors":
        return {}
    with safe_open(path, "pt") as file:
        return file.metadata() or {}


def put_weights(model: nn.Module, tensors: Mapping[str, Tensor], field: str) -> tuple[str, ...]:
    """Copy weights into the module; returns the names of frozen tensors that stay as they were.

    Every trainable parameter must be given, tied ones under any of their names. Frozen parameters
    and buffers may be left out: an adapter's file needs no base model.
    """
    own = model.state_dict(keep_vars=True)
    given = match_names(model, tensors)
    unknown = [name for name in given if name not in own]
    if unknown:
        raise InputError(
            f"{field} has the tensor {unknown[0]}, which the model has not"
            + (f" ({len(unknown)} such in all)" if len(unknown) > 1 else "")
        )
    for name, tensor in given.items():
        if tensor.shape != own[name].shape:
            raise InputError.of(
                f"{field}: the shape of {name}", tuple(tensor.shape), f"{tuple(own[name].shape)}"
            )
    present = {id(own[name]) for name in given}
    missing = [name for name, tensor in own.items() if id(tensor) not in present]
    trainable = [name for name in missing if own[name].requires_grad]
    if trainable:
        raise InputError(
            f"{field} has no tensor {trainable[0]}; it must have every trainable parameter"
            + (f" ({len(trainable)} are missing)" if len(trainable) > 1 else "")
        )
    model.load_state_dict(given, strict=False)
    return tuple(missing)


def match_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by the module's own names: PEFT leaves an adapter's name out of its files."""
    adapters = cast(Mapping[str, Any], getattr(model, "peft_config", None) or {})
    own = model.state_dict()
    short = {
        name.replace(f".{adapter}.", "."): name
        for name in own
        for adapter in adapters
        if f".{adapter}." in name
    }
    return {name if name in own else short.get(name, name): t for name, t in tensors.items()}


def _import_file(path: Path) -> ModuleType:
    """A file as a module of its own name, so that two files of the same name do not meet."""
    name = f"expunge_job_{path.stem}_{sha256(str(path.resolve()).encode()).hexdigest()[:12]}"
    loader = _PlainLoader(name, str(path))
    found = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert found is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
