"""The tensors of a module by name, and as the bytes that are hashed and saved.

A release is written from a module's parameters and persistent buffers, never from what the module
says about itself: :func:`list_tensors` reads them, and refuses a module that says more.

Of a sharded model nobody holds all weights. One tensor at a time goes to one process, row by row as
the ranks hold it: the leaf of the hash tree is computed, or the file written, from the parts as
they arrive. The memory this takes is one part. For hashing, as many tensors as there are processes
are on their way at once, each to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from expunge.certificates.hashing import (
    Entry,
    combine_leaves,
    hash_leaf,
    hash_tensors,
    plan_files,
    write_files,
    write_safetensors,
)
from expunge.errors import InputError, UnlearningError
from expunge.processes.group import Processes

_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


_OWN_WORDS = ("state_dict", "_save_to_state_dict", "get_extra_state")

SAME, MANY = 1e-3, 64


def is_multiple(
    old: Iterable[Tensor], new: Iterable[Tensor], processes: Processes | None = None
) -> bool:
    """Whether ``new`` is so near to a multiple of ``old`` that it must have come from there.

    min over s of ‖x - s c‖ ≤ 1e-3 ‖x‖, in float64; for one or two numbers, which have few
    directions, with s = 1.

    >>> x = torch.tensor([1.0, -2.0, 3.0])
    >>> is_multiple([x], [-2 * x]), is_multiple([x], [x.flip(0)]), is_multiple([x], [0 * x])
    (True, False, False)
    """
    xx = xc = cc = size = 0.0
    for x, c in zip(old, new, strict=True):
        x, c = x.detach().double(), c.detach().double().to(x.device)
        xx, xc, cc = xx + float((x * x).sum()), xc + float((x * c).sum()), cc + float((c * c).sum())
        size += x.numel()
    if processes is not None:
        xx, xc, cc, size = processes.sum([xx, xc, cc, size])
    rest = xx - 2 * xc + cc if size < 3 else xx - (xc * xc / cc if cc > 0 else 0.0)
    return xx > 0 and rest <= SAME**2 * xx


def find_copied(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> str:
    """Words for what of ``new`` must have come from ``old``, by the same names; nothing if nothing.

    All of it together may be a multiple of the old one; or tensors with half of the numbers; or
    one tensor is the old one bit for bit, cast or not, which training would have changed. Tensors
    whose numbers are all equal, and those of one or two numbers, have nothing to tell.

    >>> old = {"a": torch.arange(9.0), "b": torch.arange(4.0) + 1}
    >>> find_copied(old, {"a": torch.arange(9.0).flip(0), "b": old["b"] * 1.001})
    ''
    >>> find_copied(old, {"a": torch.arange(9.0).flip(0), "b": old["b"].clone()})
    'b is bit for bit that of'
    >>> find_copied(old, {"a": -2 * old["a"], "b": torch.ones(4)})
    'a is that of'
    """
    if is_multiple(old.values(), [new[name] for name in old]):
        return "it is"
    telling = [name for name, tensor in old.items() if len(tensor.unique()) > 1]
    telling = [name for name in telling if old[name].numel() > 2]
    same = [name for name in telling if _is_same(old[name], new[name])]
    if same:
        return f"{shorten(same)} {'is' if len(same) == 1 else 'are'} bit for bit that of"
    near = [name for name in telling if is_multiple([old[name]], [new[name]])]
    if 2 * sum(old[n].numel() for n in near) >= sum(t.numel() for t in old.values()):
        return f"{shorten(near)} {'is' if len(near) == 1 else 'are'} that of" if near else ""
    return ""


def _is_same(old: Tensor, new: Tensor) -> bool:
    """Equal, in the new one's precision; of many numbers, equal in half of it: a copy cast there
    and back."""
    kinds = (torch.float16, torch.bfloat16) if old.numel() >= MANY else ()
    new = new.to(old.device)
    return any(torch.equal(old.to(kind), new.to(kind)) for kind in (new.dtype, *kinds))


def shorten(names: Sequence[str]) -> str:
    """The first three names, and how many more there are.

    >>> shorten("abcde")
    'a, b, c and 2 more'
    """
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def check_module(model: object, field: str = "model") -> None:
    """Refuse what is not a torch module, a state_dict above all.

    >>> check_module({"weight": torch.ones(2)})
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: model is a dict; it must be an nn.Module with its weights loaded
    """
    if not isinstance(model, nn.Module):
        kind = "an nn.Module with its weights loaded" if isinstance(model, Mapping) else "a module"
        raise InputError(f"{field} is a {type(model).__name__}; it must be {kind}")


def move_model(model: nn.Module, device: torch.device | str) -> None:
    """The module on a device, if there is one.

    >>> move_model(nn.Linear(1, 1), "abacus")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: device is 'abacus'; it must be one that torch can use here (...
    """
    try:
        model.to(device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        shown = device if isinstance(device, str) else str(device)
        valid = f"one that torch can use here ({reason})"
        raise InputError.of("device", shown, valid) from None


def find_nonfinite(tensors: Mapping[str, Tensor], public: Collection[str] = ()) -> str | None:
    """The name of a tensor that must not be released: NaN in it, or infinity that is not public.

    >>> mask = torch.tensor([0.0, -torch.inf])
    >>> find_nonfinite({"mask": mask}, {"mask"}), find_nonfinite({"mask": mask})
    (None, 'mask')
    """
    for name, tensor in tensors.items():
        own = to_local(tensor.detach())
        if own.is_floating_point() or own.is_complex():
            fine = ~torch.isnan(own) if name in public else torch.isfinite(own)
            if not bool(fine.all()):
                return name
    return None


def refuse_copies(public: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> None:
    """Refuse tensors declared public that have the bits of trained ones; constants are nobody's.

    >>> refuse_copies({"zero": torch.zeros(3)}, {"w": torch.zeros(3)})
    >>> refuse_copies({"teacher": torch.arange(3.0)}, {"w": torch.arange(3.0)})
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: public declares teacher, whose values are those of w, which was ...
    """
    for name, held in public.items():
        own = to_local(held.detach())
        if own.numel() < 3 or not bool((own != own.flatten()[0]).any()):
            continue
        for other, p in trained.items():
            bits = to_local(p.detach())
            if (own.shape, own.dtype) == (bits.shape, bits.dtype) and torch.equal(own, bits):
                raise InputError(
                    f"public declares {name}, whose values are those of {other}, which was "
                    "trained: no noise covers a copy; put the public values back, or train it"
                )


def list_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by the names, and in the order, of ``state_dict``.

    Tied ones are under each of their names. What a module adds to its state_dict by hooks, extra
    state or overridden methods, and tensors and arrays it holds as plain attributes, are neither
    certified nor declared public: such a module is refused by name.

    >>> list(list_tensors(nn.BatchNorm1d(2)))
    ['weight', 'bias', 'running_mean', 'running_var', 'num_batches_tracked']
    >>> layer = nn.Linear(2, 2)
    >>> layer.old = torch.ones(2)
    >>> list_tensors(layer)
    Traceback (most recent call last):
    ...
    expunge.errors.UnlearningError: old of the model is a plain tensor or array: ...
    """
    check_module(model)
    if isinstance(model, torch.jit.ScriptModule):
        raise UnlearningError("the model is compiled to TorchScript; give the module it came from")
    known = {id(t) for t in (*model.parameters(), *model.buffers())}
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        _check_words(path, module)
        for name, value in vars(module).items():
            if name not in ("_parameters", "_buffers") and _holds_tensor(value, known):
                raise UnlearningError(
                    f"{name} of {_say(path)} is a plain tensor or array: no noise covers it; make "
                    "it a buffer (register_buffer) and declare it public, or delete it"
                )
        skipped = module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
        held = cast(dict[str, Tensor | None], module._parameters | module._buffers)  # pyright: ignore[reportPrivateUsage]
        for name, tensor in held.items():
            if tensor is not None and name not in skipped:
                found[check_name(f"{path}.{name}" if path else name)] = tensor.detach()
    return found


def check_name(name: str) -> str:
    """The name of a tensor, which a file must be able to hold."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        raise UnlearningError(
            f"the tensor name {name!r} is not valid Unicode; it must be to be written to a file"
        ) from None
    return name


def _check_words(path: str, module: nn.Module) -> None:
    """Refuse a module whose ``state_dict`` would hold more than its parameters and buffers."""
    own = [
        word
        for word in _OWN_WORDS
        if word in vars(module) or getattr(type(module), word) is not getattr(nn.Module, word)
    ]
    held: Any = module
    hooks = (*held._state_dict_hooks.values(), *held._state_dict_pre_hooks.values())
    if not all(hook.__module__.startswith("torch.distributed.") for hook in hooks):
        own.append("a hook of its state_dict")
    if own:
        raise UnlearningError(
            f"{_say(path)} ({type(module).__name__}) has {own[0]} of its own, so its state_dict "
            "may hold more than its parameters and buffers; only those can be certified"
        )


def _holds_tensor(value: object, known: set[int]) -> bool:
    """Whether a plain attribute is or holds a tensor or array that is not among the known."""
    match value:
        case Tensor() | np.ndarray():
            return id(value) not in known
        case dict():
            held = cast(dict[object, object], value)
            return any(_holds_tensor(item, known) for item in held.values())
        case list() | tuple() | set() | frozenset():
            items = cast(list[object], value)
            return any(_holds_tensor(item, known) for item in items)
        case _:
            return False


def _say(path: str) -> str:
    return f"module {path}" if path else "the model"


def hash_weights(tensors: Mapping[str, Tensor], processes: Processes | None = None) -> str:
    """The hash of a state_dict: the same one that ``verify`` computes from the saved file.

    Of sharded tensors every one of ``processes`` holds its rows, and all must call it.

    >>> a, b = torch.zeros(2), torch.ones(3)
    >>> hash_weights({"a": a, "b": b}) == hash_weights({"b": b, "a": a})
    True
    """
    if processes is not None and any(isinstance(t, DTensor) for t in tensors.values()):
        return hash_together(tensors, processes)
    return hash_tensors(
        (name, dtype, shape, data) for name, (dtype, shape, data) in _encode(tensors)
    )


def save_weights(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a state_dict as a safetensors file, atomically; tied tensors under each name."""
    write_safetensors(path, dict(_encode(tensors)), metadata)


def name_dtype(name: str, tensor: Tensor) -> str:
    """The safetensors name of a tensor's dtype; a tensor that has none is refused by name.

    >>> name_dtype("w", torch.zeros(2))
    'F32'
    """
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
        raise UnlearningError(
            f"tensor {name} is {tensor.dtype}, {tensor.layout}; "
            "only dense tensors of a dtype that safetensors holds can be hashed and saved"
        )
    return _NAMES[tensor.dtype]


def has_same_bits(one: Tensor, two: Tensor) -> bool:
    """The same shape, dtype and bytes, wherever they lie; of what is sharded, of the rows here.

    >>> has_same_bits(torch.zeros(2), -torch.zeros(2)), has_same_bits(torch.ones(2), torch.ones(2))
    (False, True)
    """
    a, b = (to_local(tensor.detach()) for tensor in (one, two))
    if a.shape != b.shape or a.dtype is not b.dtype:
        return False
    flat = [tensor.cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*flat)


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _encode(
    tensors: Mapping[str, Tensor],
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], memoryview]]]:
    for name, tensor in tensors.items():
        dtype = name_dtype(name, tensor)
        yield name, (dtype, tuple(tensor.shape), view_bytes(tensor))


def hash_together(tensors: Mapping[str, Tensor], processes: Processes) -> str:
    """``hash_weights`` of a state_dict whose tensors may be sharded; every process must call it."""
    items, leaves = list(tensors.items()), list[bytes]()
    for first in range(0, len(items), processes.size):
        window = items[first : first + processes.size]
        posted: list[Callable[[], None]] = []
        for owner, (_, tensor) in enumerate(window):
            posted += _post(tensor, owner, processes)
        if processes.rank < len(window):
            name, tensor = window[processes.rank]
            data = receive_parts(tensor, processes)
            leaves.append(hash_leaf(name, name_dtype(name, tensor), tuple(tensor.shape), data))
        for wait in posted:
            wait()
    return combine_leaves([leaf for told in processes.gather(leaves) for leaf in told])


def save_together(
    folder: Path | None,
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str],
    processes: Processes,
) -> None:
    """Rank 0 writes the files and their index into ``folder``; the others hand it their rows."""
    described = [
        Entry(name, name_dtype(name, tensor), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]
    files = plan_files(described, processes.size)
    if processes.leads:
        assert folder is not None
        write_files(folder, files, lambda d: receive_parts(tensors[d.name], processes), metadata)
        return
    for tensor in (tensors[described.name] for file in files for described in file):
        for wait in _post(tensor, 0, processes):
            wait()


def receive_parts(tensor: Tensor, processes: Processes) -> Iterator[memoryview]:
    """The bytes of a whole tensor on the process that the others post their parts of it to."""
    if not isinstance(tensor, DTensor):
        yield view_bytes(tensor)
        return
    own = tensor.to_local()
    for rank in range(processes.size):
        start, stop = locate_rows(tensor.shape[0], rank, processes.size)
        if rank == processes.rank:
            yield view_bytes(own)
        elif stop > start:
            part = torch.empty(
                (stop - start, *tensor.shape[1:]), dtype=own.dtype, device=own.device
            )
            processes.receive(part, rank)
            yield view_bytes(part)


def _post(tensor: Tensor, owner: int, processes: Processes) -> list[Callable[[], None]]:
    if owner == processes.rank or not isinstance(tensor, DTensor):
        return []
    own = tensor.to_local().detach().contiguous()
    return [processes.post(own, owner)] if own.numel() > 0 else []


def to_local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor; all of one that is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locate_rows(rows: int, rank: int, size: int) -> tuple[int, int]:
    """[start, stop) of a rank's rows: equal parts, the last ones shorter or empty.

    >>> [locate_rows(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    each = -(-rows // size)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def cut_rows(tensor: Tensor, like: Tensor, processes: Processes) -> Tensor:
    """This process's rows of a tensor that every process may hold whole, if ``like`` is sharded."""
    if isinstance(tensor, DTensor) or not isinstance(like, DTensor):
        return tensor
    start, stop = locate_rows(tensor.shape[0], processes.rank, processes.size)
    return tensor[start:stop].clone()
