"""Examples kept for shards: which part each belongs to, by a hash, in files that have no past.

    name = SHA-256("expunge/shards-1" ‖ SHA-256(seed) ‖ identifier)
    shard = ⌊name[0:8] · S / 2^64⌋        slice = ⌊name[8:16] · R / 2^64⌋

never by position, so removing one example moves no other, and all examples of a person lie
together. A slice is a *set* of (name, input, target), in ascending order of name, then of content:
its file is a function of what it holds. The files hold people's data: a state folder is private.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch
from torch import Tensor

from expunge.errors import InputError

NAME_BYTES = 32
Place = tuple[int, int]


@dataclass(frozen=True)
class Assignment:
    """S ``shards`` of R ``slices`` each, by the public string ``seed``.

    >>> assignment = Assignment(shards=8, slices=4, seed="a public string")
    >>> assignment.find_place(assignment.name("user-42"))
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
        if type(self.seed) is not str or not self.seed:
            raise InputError.of("seed", self.seed, "a public string, written down beforehand")

    def name(self, identifier: str) -> bytes:
        """The hash that stands for an identifier."""
        public = hashlib.sha256(self.seed.encode("utf-8", "surrogatepass")).digest()
        text = identifier.encode("utf-8", "surrogatepass")
        return hashlib.sha256(b"expunge/shards-1\0" + public + text).digest()

    def find_place(self, name: bytes) -> Place:
        """(shard, slice) of a name, both from 0."""
        first, second = int.from_bytes(name[:8], "big"), int.from_bytes(name[8:16], "big")
        return first * self.shards >> 64, second * self.slices >> 64

    def find_places(self, names: Tensor) -> npt.NDArray[np.int64]:
        """:meth:`find_place` of every row of ``names`` [n, 32]: [n, 2].

        >>> assignment = Assignment(shards=8, slices=4, seed="a public string")
        >>> name = torch.frombuffer(bytearray(assignment.name("user-42")), dtype=torch.uint8)
        >>> assignment.find_places(name[None]).tolist()
        [[3, 1]]
        """
        words = _read_words(names)[:, :2]
        many = np.array([self.shards, self.slices], np.uint64)
        half = np.uint64(32)
        low = (words & np.uint64(2**32 - 1)) * many >> half
        return ((words >> half) * many + low >> half).astype(np.int64)

    def find_touched(self, ids: Iterable[str]) -> dict[int, int]:
        """{shard: the first slice that holds one of these identifiers}."""
        touched: dict[int, int] = {}
        for shard, part in (self.find_place(self.name(identifier)) for identifier in ids):
            touched[shard] = min(part, touched.get(shard, part))
        return touched


@dataclass(frozen=True, eq=False)
class Examples:
    """Some examples in their one order: ``names`` [n, 32], ``inputs`` and ``targets`` [n, …]."""

    names: Tensor
    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def take(self, places: Sequence[int] | Tensor) -> Examples:
        """The examples at these positions."""
        at = torch.as_tensor(places, dtype=torch.int64)
        return Examples(self.names[at], self.inputs[at], self.targets[at])

    def read_names(self) -> list[bytes]:
        """The name of every example."""
        return [bytes(row) for row in self.names.numpy()]

    def read_content(self, index: int) -> bytes:
        """Input and target of one example as bytes."""
        return b"".join(_to_bytes(tensor[index]) for tensor in (self.inputs, self.targets))

    def to_bytes(self) -> bytes:
        """The file of a slice; nothing for none."""
        if len(self) == 0:
            return b""
        tensors = {"names": self.names, "inputs": self.inputs, "targets": self.targets}
        return safetensors.torch.save({k: t.contiguous() for k, t in tensors.items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Examples:
        """What ``to_bytes`` wrote."""
        found = safetensors.torch.load(data)
        return cls(found["names"], found["inputs"], found["targets"])


def _read_words(names: Tensor) -> npt.NDArray[np.uint64]:
    """Names as four 64-bit words each, in the order of their bytes."""
    rows = names.contiguous().numpy().reshape(-1, NAME_BYTES)
    return rows.view(">u8").astype(np.uint64)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def read_examples(assignment: Assignment, data: Any, ids: Sequence[str]) -> Examples:
    """Examples from (inputs, targets), from an object that has them, or a data set of pairs.

    >>> data = torch.eye(2), torch.tensor([0, 1])
    >>> found = read_examples(Assignment(2, 2, "s"), data, ["a", "b"])
    >>> len(found), found.names.shape
    (2, torch.Size([2, 32]))
    """
    if hasattr(data, "inputs") and hasattr(data, "targets"):
        data = (data.inputs, data.targets)
    if not isinstance(data, tuple | list):
        pairs = [data[i] for i in range(len(data))]
        columns = ([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        data = tuple(torch.stack([torch.as_tensor(x) for x in column]) for column in columns)
    if len(data) != 2 or len(data[0]) != len(data[1]):
        raise InputError("data must be (inputs, targets) of one length, or a Dataset of such pairs")
    inputs, targets = (torch.as_tensor(part).detach().cpu().contiguous() for part in data)
    if len(ids) != len(inputs):
        raise InputError.of("ids", len(ids), f"one identifier per example: {len(inputs)}")
    for what, given in (("inputs", inputs), ("targets", targets)):
        finite = torch.isfinite(given.reshape(len(given), -1)).all(dim=1)
        if not bool(finite.all()):
            row = int(torch.nonzero(~finite)[0])
            raise InputError(f"{what} of row {row} are not finite; every number must be")
    known = {identifier: assignment.name(identifier) for identifier in set(ids)}
    raw = bytearray(b"".join(known[identifier] for identifier in ids))
    names = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return Examples(names.reshape(-1, NAME_BYTES), inputs, targets)


def arrange(examples: Examples) -> Examples:
    """A set of examples in its one order: ascending by name, then by content, each once."""
    first = _read_words(examples.names)[:, 0]
    if bool((first[1:] > first[:-1]).all()):
        return examples
    names = examples.read_names()
    order: list[int] = []
    for _, group in groupby(sorted(range(len(names)), key=names.__getitem__), names.__getitem__):
        same = list(group)
        if len(same) > 1:
            contents = {examples.read_content(place): place for place in reversed(same)}
            same = [contents[content] for content in sorted(contents)]
        order += same
    return examples.take(order)


def join(parts: Iterable[Examples]) -> Examples:
    """Examples of several slices, one after the other."""
    given = [part for part in parts if len(part)]
    if not given:
        empty = torch.empty(0, dtype=torch.uint8)
        return Examples(empty.reshape(0, NAME_BYTES), empty, empty)
    return Examples(
        torch.cat([part.names for part in given]),
        torch.cat([part.inputs for part in given]),
        torch.cat([part.targets for part in given]),
    )


def split(assignment: Assignment, examples: Examples) -> Mapping[Place, Examples]:
    """The examples by their place."""
    places = assignment.find_places(examples.names)
    cells = places[:, 0] * assignment.slices + places[:, 1]
    order = np.argsort(cells, kind="stable")
    ends = np.flatnonzero(np.diff(cells[order])) + 1
    found = [part for part in np.split(order, ends) if len(part)]
    return {
        (int(places[part[0], 0]), int(places[part[0], 1])): examples.take(torch.from_numpy(part))
        for part in found
    }


def add(held: Examples | None, new: Examples) -> Examples:
    """The union of two sets; their inputs and targets must be of one shape and dtype."""
    if held is None:
        return arrange(new)
    for what in ("inputs", "targets"):
        ours, theirs = getattr(held, what), getattr(new, what)
        if ours.shape[1:] != theirs.shape[1:] or ours.dtype != theirs.dtype:
            raise InputError.of(
                what,
                (tuple(theirs.shape[1:]), str(theirs.dtype)),
                f"{tuple(ours.shape[1:])} of {ours.dtype}, as those learned before",
            )
    return arrange(join([held, new]))


def remove(held: Examples, names: set[bytes]) -> Examples:
    """The examples whose name is not among these."""
    return held.take([at for at, name in enumerate(held.read_names()) if name not in names])
