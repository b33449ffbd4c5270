"""What an object holds: all that its code could read without being given it.

Attributes, slots, containers, closures, defaults, bound objects, and what functions and classes of
the user's own read among their module's globals. Modules, and the code of Python and of installed
packages, are not entered.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

LIMIT, LONG = 200_000, 1000
_PLAIN = (str, bytes, int, float, complex, type(None), ModuleType, CodeType, torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, deque)


def find_held(thing: object) -> Iterator[object]:
    """``thing`` and what it holds, the nearest first, each once; ``LIMIT`` objects at most.

    The items of containers with more than ``LONG`` come last: samples hide nothing beside them.

    >>> def outer(x):
    ...     return lambda y: [x, y]
    >>> [item for item in find_held({"key": [outer(torch.ones(2))]}) if isinstance(item, Tensor)]
    [tensor([1., 1.])]
    """
    seen, waiting, last = dict[int, object](), deque([thing]), deque[object]()
    while (waiting or last) and len(seen) < LIMIT:
        item = (waiting or last).popleft()
        if isinstance(item, _PLAIN) or id(item) in seen:
            continue
        seen[id(item)] = item  # held here, so that its id stays its own
        yield item
        if not isinstance(item, Tensor | np.ndarray):
            items = list(_list_items(item))
            (last if len(items) > LONG else waiting).extend(items)
            waiting.extend(_list_parts(item))


def _list_items(item: object) -> Iterator[object]:
    if isinstance(item, dict):
        yield from dict.keys(cast(dict[object, object], item))
        yield from dict.values(cast(dict[object, object], item))
    for kind in _CONTAINERS:  # by their own hand: to look runs no code of a subclass
        if isinstance(item, kind):
            yield from kind.__iter__(cast(Any, item))


def _list_parts(item: object) -> Iterator[object]:
    if type(item) in (dict, *_CONTAINERS):
        return
    match item:
        case type():
            if not _is_installed(item):
                yield from (*vars(item).values(), *item.__bases__)
        case FunctionType():
            yield from _list_read(item)
            yield vars(item)
        case BuiltinFunctionType():
            yield item.__self__
        case np.random.Generator():
            yield item.bit_generator
        case _:
            yield type(item)
            yield getattr(item, "__dict__", None)
            for kind in type(item).__mro__:  # slots, and the parts of a method or partial
                for member in vars(kind).values():
                    if isinstance(member, MemberDescriptorType):
                        yield _get(member, item)


def _get(member: MemberDescriptorType, item: object) -> object:
    try:
        return member.__get__(item)
    except AttributeError:  # a slot that was not filled
        return None


def _list_read(function: FunctionType) -> Iterator[object]:
    """The cells, the defaults and the globals that a function reads."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a cell that was not filled
            continue
    yield from (function.__defaults__, function.__kwdefaults__)
    if not _is_installed(function):
        yield from (function.__globals__.get(name) for name in _list_globals(function.__code__))


def _list_globals(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _list_globals(constant)


def _is_installed(code: FunctionType | type) -> bool:
    root = str(code.__module__).partition(".")[0]
    file = cast(object, getattr(sys.modules.get(root), "__file__", None))
    return root == "expunge" or root in sys.stdlib_module_names or "site-packages" in str(file)
