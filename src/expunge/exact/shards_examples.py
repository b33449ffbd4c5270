"""Which slice an example belongs to, what a state remembers of it, and in which order it is used.

    h(name) = SHA-256("expunge/shards-1" ‖ SHA-256(seed) ‖ name)
    shard = ⌊h[0:8] · S / 2^64⌋        slice = ⌊h[8:16] · R / 2^64⌋

never by position, so removing one example moves no other, and all examples of a person lie
together. Inside a slice the order is by h(name), then by content. Of an example the state has a
keyed hash of (names, content) and keyed hashes of the names: no identifier, no position, no order
of arrival; the examples themselves only where ``keep_examples`` asks for it.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, cast

import numpy as np

from expunge.certificates.hashes import read_bytes
from expunge.data.data import Data
from expunge.data.examples import read_one, select
from expunge.display import is_visible
from expunge.errors import InputError
from expunge.states import State

Place = tuple[int, int]
TRAINING, VALIDATION = 0, 1


@dataclass(frozen=True)
class Assignment:
    """S ``shards`` of R ``slices`` each, by the public string ``seed``.

    >>> assignment = Assignment(shards=8, slices=4, seed="a public string")
    >>> assignment.find_place(assignment.hash("user-42"))
    (3, 1)
    """

    shards: int
    slices: int
    seed: str

    def __post_init__(self) -> None:
        for name in ("shards", "slices"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 4096:
                raise InputError.of(name, value, "a whole number from 1 to 4096")
        if type(self.seed) is not str or not self.seed.strip() or not is_visible(self.seed):
            raise InputError.of("seed", self.seed, "a public string, written down beforehand")

    def hash(self, name: str | bytes) -> bytes:
        """h: the public hash of a name, or of the content of an example that is nobody's."""
        public = hashlib.sha256(self.seed.encode()).digest()
        text = name.encode("utf-8", "surrogatepass") if isinstance(name, str) else b"\0" + name
        return hashlib.sha256(b"expunge/shards-1\0" + public + text).digest()

    def find_place(self, hashed: bytes) -> Place:
        """(shard, slice), both from 0."""
        first, second = int.from_bytes(hashed[:8], "big"), int.from_bytes(hashed[8:16], "big")
        return first * self.shards >> 64, second * self.slices >> 64

    def list_places(self, shard: int | None = None) -> list[Place]:
        """All slices in order, or those of one shard."""
        shards = range(self.shards) if shard is None else (shard,)
        return [(k, j) for k in shards for j in range(self.slices)]


class Row(NamedTuple):
    """What a state remembers of an example: its role, a keyed hash of names and content, keyed
    hashes of the names."""

    role: int
    key: bytes
    owners: tuple[bytes, ...]


class Found(NamedTuple):
    """An example that is at hand: its row, where it stands in its order, and in the data."""

    row: Row
    order: bytes
    at: int


Index = dict[Place, dict[bytes, Found]]


def index_examples(
    data: Data, assignment: Assignment, state: State, shards: Collection[int] | None = None
) -> Index:
    """The examples of ``data`` by slice and key; of ``shards`` alone, where they are given."""
    if data.stream or (data.validation is not None and data.validation.stream):
        raise InputError("data is a stream; shards look examples up: give a list or a Dataset")
    index, hash_name, key_name = Index(), cache(assignment.hash), cache(state.name)
    for role, part in ((TRAINING, data), (VALIDATION, data.validation)):
        hash_content = hash_example if part is None else _make_hasher(part)
        for at, owners in enumerate(() if part is None or part.ids is None else part.ids):
            whose = sorted(map(hash_name, owners))
            if whose and shards and assignment.find_place(whose[0])[0] not in shards:
                continue
            content = hash_content(at)
            first = whose[0] if whose else assignment.hash(content)
            place = assignment.find_place(first)
            if shards and place[0] not in shards:
                continue
            key = state.hash(b"".join([bytes([role]), content, *whose]), b"example")
            row = Row(role, key, tuple(sorted(map(key_name, owners))))
            order = b"".join([first, content, *whose])
            index.setdefault(place, {}).setdefault(key, Found(row, order, at))
    return index


def select_examples(data: Data, found: Iterable[Found]) -> Data:
    """These examples in their one order, of the kind they were, without anybody's name."""
    ordered = sorted(found, key=lambda one: one.order)
    training = [one.at for one in ordered if one.row.role == TRAINING]
    validation, beside = [one.at for one in ordered if one.row.role == VALIDATION], None
    if data.validation is not None and validation:
        beside = select(data.validation.examples, data.validation.kind, validation)
    return Data(select(data.examples, data.kind, training), validation=beside, collate=data.collate)


def read_example(data: Data, at: int) -> Any:
    """One example; the row of a frame as a dictionary."""
    found = read_one(data.examples, data.kind, at)
    return found.to_dict() if data.kind == "frame" else found


def check_repeatable(data: Data) -> None:
    """Refuse a data set that gives another example when the same one is read again."""
    if len(data) and hash_example(read_example(data, 0)) != hash_example(read_example(data, 0)):
        raise InputError(
            "data gives another example when the first is read again; what is drawn at random "
            "(augmentation) belongs into train or collate"
        )


def hash_example(example: Any) -> bytes:
    return hashlib.sha256(encode(example, "an example")).digest()


def _make_hasher(data: Data) -> Callable[[int], bytes]:
    """:func:`hash_example` of the example at a place; of columns without reading it as one.

    The bytes of a row of arrays are those of the first row but for the numbers themselves.
    """
    columns = getattr(data.examples, "tensors", data.examples)
    parts = columns if isinstance(columns, tuple) else (columns,)
    numbers = [_view_rows(part) for part in parts] if data.kind == "columns" and len(data) else []
    if not numbers or any(rows is None for rows in numbers):
        return lambda at: hash_example(read_example(data, at))
    first = encode(read_example(data, 0), "an example")
    head = hashlib.sha256(first[: 8 + int.from_bytes(first[:8], "little")])

    def run(at: int) -> bytes:
        hashed = head.copy()
        for rows in numbers:
            hashed.update(rows[at])
        return hashed.digest()

    return run


def _view_rows(column: Any) -> Any:
    """The bytes of a column, row by row; None if it is no plain array."""
    try:
        plain: Any = column.detach().cpu().numpy() if hasattr(column, "detach") else column
    except (TypeError, RuntimeError):  # numbers that numpy does not know
        return None
    native = isinstance(plain, np.ndarray) and plain.dtype.isnative
    if not native or plain.dtype.kind not in "biufc":
        return None
    flat = np.ascontiguousarray(plain).reshape(len(plain), -1)
    return flat.view(np.uint8) if flat.size else np.empty((len(plain), 0), np.uint8)


def encode(value: Any, what: str) -> bytes:
    """Tensors, arrays, numbers, text, bytes, and tuples, lists and dictionaries of them as bytes:
    one way for one content, and no code is run when they are read.

    >>> decode(encode({"a": [1, 2.5, None], "b": ("text", b"bytes", True)}, "state"))
    {'a': [1, 2.5, None], 'b': ('text', b'bytes', True)}
    >>> decode(encode(np.array([1.0, 2.0], ">f4"), "big-endian"))
    array([1., 2.], dtype=float32)
    """
    arrays = list[bytes | memoryview]()  # their numbers follow the structure, which is JSON
    text = json.dumps(_to_json(value, what, arrays)).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *arrays])


def _to_json(value: Any, what: str, arrays: list[bytes | memoryview]) -> Any:
    torch: Any = sys.modules.get("torch")
    match value:
        case np.ndarray() | np.generic() if value.dtype.kind != "O":
            arrays.append(read_bytes(value))
            return ["array", value.dtype.newbyteorder("<").str, *value.shape]
        case _ if torch is not None and isinstance(value, torch.Tensor):
            arrays.append(read_bytes(value))
            return ["tensor", str(value.dtype).removeprefix("torch."), *value.shape]
        case None | bool() | int() | float() | str():
            return value
        case bytes():
            return ["bytes", value.hex()]
        case list() | tuple() | np.ndarray():
            items = [_to_json(item, what, arrays) for item in cast("list[Any]", value)]
            return ["tuple" if isinstance(value, tuple) else "list", *items]
        case Mapping():
            given = sorted(cast("Mapping[Any, Any]", value).items(), key=lambda kv: repr(kv[0]))
            return ["dict", *([_to_json(part, what, arrays) for part in pair] for pair in given)]
        case _:
            raise InputError(
                f"{what} has a {type(value).__name__}; it must be made of tensors, arrays, numbers,"
                " text, bytes, and tuples, lists and dictionaries of them"
            )


def decode(data: bytes | memoryview) -> Any:
    """What :func:`encode` was given; arrays are copies."""
    view = memoryview(data)
    start = 8 + int.from_bytes(view[:8], "little")
    return _from_json(json.loads(bytes(view[8:start])), io.BytesIO(view[start:]))


def _from_json(plain: Any, numbers: io.BytesIO) -> Any:
    if not isinstance(plain, list):
        return plain
    kind, *items = cast("list[Any]", plain)
    match kind:
        case "array":
            dtype, shape = np.dtype(items[0]), tuple(items[1:])
            raw = numbers.read(dtype.itemsize * math.prod(shape))
            return np.frombuffer(raw, dtype).reshape(shape)[()]
        case "tensor":
            import torch

            found = torch.empty(items[1:], dtype=getattr(torch, items[0]))
            raw = bytearray(numbers.read(found.nbytes))
            return torch.frombuffer(raw, dtype=found.dtype).reshape(found.shape) if raw else found
        case "bytes":
            return bytes.fromhex(items[0])
        case "dict":
            return {_from_json(k, numbers): _from_json(v, numbers) for k, v in items}
        case _:
            found = [_from_json(item, numbers) for item in items]
            return tuple(found) if kind == "tuple" else found
