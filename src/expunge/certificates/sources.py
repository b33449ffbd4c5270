"""The source of the operator's code as text, and its salted hash.

``read_source`` follows a function into what it names of its own module and into the plain values
and tensors it captures, so that a changed helper, option or class weight changes the hash. Code of
installed packages is named, not read: their versions are in the record. It finds slips (another
``train`` at a resume, at a replay); it does not search for lies.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import CodeType
from typing import Any, cast

from expunge.certificates.hashes import hash_bytes, hash_tensor, is_tensor

_CHANGES = frozenset(("append", "extend", "insert", "add", "update", "pop", "clear", "setdefault"))
_NOTES = frozenset(("deprecation_warnings",))  # what a tokenizer of transformers has warned of
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def hash_source(function: Any, salt: str) -> str:
    """SHA-256 of salt and source: a filter's source may quote a name, so it is never bare.

    >>> one, two = (hash_source(lambda x: x + n, "00" * 32) for n in (1, 1))
    >>> one == two
    True
    """
    return hash_bytes([b"expunge/source-1", bytes.fromhex(salt), read_source(function).encode()])


def read_source(function: Any) -> str:
    """The source text of a function, partial, class or object, and of what it captures.

    >>> print(read_source(functools.partial(max, 3)))
    functools.partial
    builtins.max
    [3]
    {}
    """
    return _describe(function, {}, deep=True)


def _describe(value: Any, seen: dict[int, object], deep: bool = False) -> str:
    """Plain values and tensors by value; code by its source, once; other objects by their class,
    and if ``deep`` by their attributes too."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if is_tensor(value):
        return f"tensor {hash_tensor(value).hex()}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_describe(item, seen) for item in cast(list[Any], value))}]"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_describe(item, seen) for item in cast(set[Any], value)))}}}"
    if isinstance(value, Mapping):
        items = cast(Mapping[Any, Any], value).items()
        return f"{{{', '.join(f'{key!r}: {_describe(item, seen)}' for key, item in items)}}}"
    code = inspect.isfunction(value) or inspect.isclass(value)
    opaque = inspect.ismodule(value) or inspect.isbuiltin(value) or (code and _is_installed(value))
    if id(value) in seen or opaque or not (code or callable(value) or deep):
        return _name(value)
    seen[id(value)] = value
    lines = [_name(value)]
    if isinstance(value, functools.partial):
        lines += [_describe(part, seen) for part in (value.func, value.args, value.keywords)]
    elif inspect.ismethod(value):
        lines.append(_describe(value.__self__, seen, deep=True))
    elif inspect.isclass(value):
        lines += [_read_text(value), *(_describe(base, seen) for base in value.__bases__)]
    elif inspect.isfunction(value):
        wrapped = inspect.unwrap(value)
        lines.append(_read_text(wrapped))
        for name, item in _list_captured(wrapped):
            own = getattr(item, "__module__", None) == wrapped.__module__
            lines.append(f"{name} = {_describe(item, seen, deep=own)}")
    else:
        written = _NOTES | _list_written(type(value))
        state = cast(dict[str, Any], getattr(value, "__dict__", {}))
        state = {name: item for name, item in state.items() if name not in written}
        lines.append(_describe(type(value), seen))
        lines += [f"{name} = {_describe(item, seen)}" for name, item in sorted(state.items())]
    return "\n".join(lines)


def _list_written(kind: type) -> set[str]:
    """Attributes that an object changes when it is called (a history, a counter): no part of the
    code either. What other methods set, such as options, is."""
    own: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        own |= {} if _is_installed(base) else vars(base)
    written, seen, left = set[str](), set[str](), ["__call__", "forward"]
    while left:
        name = left.pop()
        method = own.get(name)
        if name in seen or not inspect.isfunction(method):
            continue
        seen.add(name)
        steps = list(dis.get_instructions(method))
        for place, step in enumerate(steps):
            if step.opname == "STORE_ATTR":
                written.add(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                left.append(step.argval)
                after = steps[place + 1 : place + 4]
                if any(s.argval in _CHANGES or s.opname == "STORE_SUBSCR" for s in after):
                    written.add(step.argval)
    return written


def _list_captured(function: Any) -> list[tuple[str, Any]]:
    """Defaults, and what a function's code or a function in it reads of its surroundings.

    What it also writes to (a counter, a list of losses) is no part of the code.
    """
    codes, read, written = [cast(CodeType, function.__code__)], set[str](), set[str]()
    while codes:
        code = codes.pop()
        steps = list(dis.get_instructions(code))
        for place, step in enumerate(steps):
            if step.opname in ("STORE_GLOBAL", "STORE_DEREF"):
                written.add(step.argval)
            if step.opname in ("LOAD_GLOBAL", "LOAD_DEREF"):
                read.add(step.argval)
                if any(later.argval in _CHANGES for later in steps[place + 1 : place + 4]):
                    written.add(step.argval)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]
    around = dict(function.__globals__)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that is not set yet
            around[name] = cell.cell_contents
    found = {name: around.get(name) for name in read - written}
    found = {name: value for name, value in found.items() if value is not None}
    found["its defaults"] = [function.__defaults__, function.__kwdefaults__]
    return sorted(found.items())


def _read_text(value: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(value)).strip()
    except (OSError, TypeError):  # written at a prompt: its code stands for it
        code = getattr(value, "__code__", None)
        return "no source" if code is None else f"{code.co_code.hex()} {code.co_names}"


def _name(value: Any) -> str:
    module = getattr(value, "__module__", None) or "builtins"
    return f"{module}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def _is_installed(value: Any) -> bool:
    """Whether this is code of Python or of an installed package."""
    module = sys.modules.get(str(getattr(value, "__module__", "builtins")))
    if module is None or module.__name__ == "__main__":
        return False
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] == "expunge":
        return True
    packages = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return bool(packages) or file.startswith(sysconfig.get_path("stdlib"))
