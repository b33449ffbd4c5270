"""What an object holds: all that its code could read without being given it.

Whatever the garbage collector can follow (attributes, slots, containers, iterators, closures,
bound objects), weak references, and what functions and classes of the user's own read among their
module's globals. Modules, and the code of Python and of installed packages, are not entered.
"""

from __future__ import annotations

import copy
import ctypes
import dis
import gc
import io
import math
import mmap
import random
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from expunge.errors import UnlearningError

LIMIT, LONG = 200_000, 1000
_PLAIN = (str, bytes, bool, int, float, complex, type(None), CodeType, torch.dtype)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_BUFFERS = (bytearray, memoryview, array, ctypes.Array, io.BytesIO, mmap.mmap)
_STORAGES = (torch.UntypedStorage, torch.TypedStorage, torch.futures.Future)
_ARRAYS = (Tensor, np.ndarray, Node, *_STORAGES, *_BUFFERS)


def find_held(thing: object, *, code: bool = True, limit: float = LIMIT) -> Iterator[object]:
    """``thing`` and what it holds, the nearest first, each once; ``limit`` objects at most.

    The items of containers with more than ``LONG`` come last: samples hide nothing beside them.
    Without ``code`` no function or class is entered, and no gradient looked at.

    >>> def outer(x):
    ...     return lambda y: [x, y]
    >>> [item for item in find_held({"key": [outer(torch.ones(2))]}) if isinstance(item, Tensor)]
    [tensor([1., 1.])]
    """
    seen, waiting, last = dict[int, object](), deque([thing]), deque[object]()
    while (waiting or last) and len(seen) < limit:
        item = (waiting or last).popleft()
        if _is_plain(item, code) or id(item) in seen:
            continue
        seen[id(item)] = item  # held here, so that its id stays its own
        yield item
        items = list(_list_items(item))
        (last if len(items) > LONG else waiting).extend(items)
        own = set(map(id, items))
        waiting.extend(part for part in _list_parts(item, code) if id(part) not in own)


def is_array(item: object) -> bool:
    """Whether numbers lie in it: a tensor, an array, a storage, a buffer, a graph of tensors.

    >>> is_array(torch.ones(2).untyped_storage()), is_array(array("f", [1])), is_array([1.0])
    (True, True, False)
    """
    if type(item) in (bytearray, array) and not item:
        return False
    return issubclass(type(item), _ARRAYS) or isinstance(item, Tensor)  # a weak proxy of one too


def _is_plain(item: object, code: bool) -> bool:
    """By its type, not by what it says of itself: a subclass of ``str`` may hold anything."""
    kind = type(item)
    if kind in _PLAIN or issubclass(kind, ModuleType):
        return True
    return not code and (issubclass(kind, type) or kind is FunctionType)


def _list_items(item: object) -> Iterator[object]:
    """By their own hand: to look runs no code of a subclass."""
    if issubclass(type(item), dict):
        yield from dict.keys(cast(dict[object, object], item))
        yield from dict.values(cast(dict[object, object], item))
    for kind in _CONTAINERS:
        if issubclass(type(item), kind):
            yield from kind.__iter__(cast(Any, item))


def _list_parts(item: object, code: bool) -> Iterator[object]:
    kind = type(item)
    if kind in (dict, *_CONTAINERS):
        return
    if issubclass(kind, type):
        known = cast(type, item)
        if not _is_installed(known):
            yield from (*vars(known).values(), *known.__bases__)
    elif kind is FunctionType:
        yield from _list_read(cast(FunctionType, item))
        yield vars(item)
    elif issubclass(kind, Tensor):
        yield vars(item)
        if code and cast(Tensor, item).is_leaf:  # a copy has no gradients
            yield cast(Tensor, item).grad
    elif issubclass(kind, np.random.Generator):
        yield cast(np.random.Generator, item).bit_generator
    elif issubclass(kind, weakref.ref):
        yield weakref.ref.__call__(cast(Any, item))
    else:
        yield kind
        yield from gc.get_referents(item)
        if kind is ContextVar:
            yield cast(ContextVar[object], item).get(None)


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


def copy_module(model: nn.Module) -> nn.Module:
    """A copy that holds parameters and buffers, each in memory of its own and without a gradient,
    and no other tensor: one that is hidden is refused.

    >>> copied = copy_module(nn.Linear(2, 1))
    >>> copied.hidden = [torch.ones(3)]
    >>> copy_module(copied)
    Traceback (most recent call last):
    ...
    expunge.errors.UnlearningError: the model holds a tensor or array of shape (3,) in an object ...
    """
    held = [*model.parameters(), *model.buffers()]
    _refuse_hidden(find_held(model, code=False, limit=math.inf), set(map(id, held)))
    memo: dict[int, Any] = {}
    try:
        copied = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError) as error:
        raise UnlearningError(f"the model cannot be copied: {error}") from error
    if copied is model:
        raise UnlearningError("the model copies to itself; its __deepcopy__ must make a new one")
    held = [*copied.parameters(), *copied.buffers()]
    made = (value for value in memo.values() if not isinstance(value, torch.UntypedStorage))
    _refuse_hidden(made, {*map(id, held), *(id(t.grad) for t in held)})
    for tensor in held:
        tensor.grad = None
        if not is_lazy(tensor) and not _has_own_memory(tensor):
            tensor.data = tensor.data.clone()
    return copied


def _refuse_hidden(items: Iterator[object], known: set[int]) -> None:
    for value in items:
        if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
            raise UnlearningError(
                "the model holds a random.Random, whose state an earlier training may have left; "
                "draw from the global generators of torch, NumPy or Python"
            )
        if is_array(value) and id(value) not in known:
            shape = getattr(value, "shape", None)
            told = f"tensor or array of shape {tuple(shape)}" if shape else type(value).__name__
            raise UnlearningError(
                f"the model holds a {told} in an object that is neither parameter nor buffer: no "
                "noise covers it; make it a buffer, or delete it"
            )


def _has_own_memory(tensor: Tensor) -> bool:
    """Whether nothing lies beside it, or under it, in what it is a view of."""
    if tensor.layout is not torch.strided:
        return True
    dense = tensor.is_contiguous() or any(
        tensor.dim() == d and tensor.is_contiguous(memory_format=m)
        for d, m in ((4, torch.channels_last), (5, torch.channels_last_3d))
    )
    return dense and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
