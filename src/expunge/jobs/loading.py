"""The functions that a job names, ``module:function`` or ``path/to/file.py:function``.

Importing runs the code that the job names, as ``python`` would.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from expunge.errors import ExpungeError, InputError, describe_error

_FILES = set[str]()  # names of modules that were imported from files
_INSTALLED = {sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")}


@contextmanager
def importing_from(folder: Path) -> Generator[None]:
    """Let modules beside the job file be imported, and after them those of the working folder.

    They are dropped at the end: the next job may have others of the same name. No byte code is
    written: a full disk would leave it broken, for every later run to find.
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
            if name in _FILES or _is_own(folders, sys.modules[name]):
                del sys.modules[name]
                _FILES.discard(name)


def _is_own(folders: Iterable[Path], module: ModuleType) -> bool:
    """Whether a module is one of the job's: in its folders, and not an installed package."""
    homes = getattr(module, "__path__", ())  # torch.classes makes a class of any name
    file = getattr(module, "__file__", None) or next(iter(homes if type(homes) is list else ()), "")
    if not isinstance(file, str) or "site-packages" in file or module.__name__ == "expunge":
        return False
    if any(Path(file).is_relative_to(place) for place in _INSTALLED):
        return False
    return any(Path(file).is_relative_to(folder) for folder in folders)


def load_function(field: str, place: str, folder: Path) -> Callable[..., Any]:
    """The function that ``place`` names.

    >>> load_function("model.build", "math:gcd", Path("."))(12, 18)
    6
    >>> load_function("model.build", "math:gdc", Path("."))
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: model.build is 'math:gdc'; math has no function gdc
    """
    home, _, name = place.rpartition(":")
    file = folder / Path(home).expanduser() if home.endswith(".py") else None
    if file is not None and not file.is_file():
        raise InputError(f"{field} is {place!r}; there is no such file in {folder}")
    with explaining(f"{field} is {place!r}, which cannot be imported"):
        module = importlib.import_module(home) if file is None else _import_file(file)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"{field} is {place!r}; {home} has no function {name}")
    return function


@contextmanager
def explaining(what: str) -> Generator[None]:
    """What somebody's code raises as one sentence that says what and where."""
    try:
        yield
    except ExpungeError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {describe_error(error, 1)}") from error


def _import_file(path: Path) -> ModuleType:
    """A file as the module that ``import`` would make of it; one that would hide another module
    of its name gets a name of its own."""
    name = path.stem
    loaded = getattr(sys.modules.get(name), "__file__", None)
    if name in sys.modules and (loaded is None or Path(loaded).resolve() != path.resolve()):
        name += "_" + sha256(str(path.resolve()).encode()).hexdigest()[:12]
    if name in sys.modules:
        return sys.modules[name]
    found: Any = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(found)
    _FILES.add(name)
    try:
        found.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
