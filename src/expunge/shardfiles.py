"""Weights in several safetensors files and an index, as Hugging Face lays them out, without torch.

``model-00001-of-00003.safetensors`` … hold the tensors, ``model.safetensors.index.json`` says which
is where. The hash is that of the tensors, whatever files they are in: the leaves are the same, and
so is the root. Every byte is pinned, as in one file: each header and the index must be as we write
them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from expunge.errors import CertificateError
from expunge.files import read_limited, write_atomic
from expunge.hashing import (
    DTYPES,
    Entry,
    Layout,
    combine_leaves,
    hash_leaves,
    serialise_header,
    tensor_bytes,
)

if TYPE_CHECKING:
    from typing_extensions import Buffer

INDEX = "model.safetensors.index.json"
MOST_BYTES = 5_000_000_000
_MAX_INDEX = 100_000_000


@dataclass(frozen=True)
class Described:
    """A tensor that is to be written: all but its data."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def length(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


def plan_files(
    tensors: Sequence[Described], least: int, most_bytes: int = MOST_BYTES
) -> list[list[Described]]:
    """The tensors of each file: about equal, ``least`` files or more, none beyond ``most_bytes``
    unless one tensor is.

    >>> some = [Described(name, "F32", (10,)) for name in "abc"]
    >>> [[tensor.name for tensor in file] for file in plan_files(some, 2)]
    [['a', 'b'], ['c']]
    """
    total = sum(tensor.length for tensor in tensors)
    count = min(max(least, -(-total // most_bytes), 1), max(len(tensors), 1))
    limit = max(-(-total // count), 1)
    files: list[list[Described]] = [[]]
    held = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.name):
        if files[-1] and held + tensor.length / 2 > limit and len(files) < count:
            files.append([])
            held = 0
        files[-1].append(tensor)
        held += tensor.length
    return [_order(file) for file in files]


def write_files(
    folder: Path,
    files: Sequence[Sequence[Described]],
    read: Callable[[Described], Iterable[Buffer]],
    metadata: Mapping[str, str] | None,
) -> None:
    """Write the planned files, one tensor at a time as ``read`` gives it, then the index."""
    layouts: dict[str, tuple[Entry, ...]] = {}
    for number, tensors in enumerate(files, 1):
        name = name_file(number, len(files))
        entries: list[Entry] = []
        offset = 0
        for tensor in tensors:
            entries.append(Entry(tensor.name, tensor.dtype, tensor.shape, offset, tensor.length))
            offset += tensor.length
        header = serialise_header(entries, metadata)
        front = len(header).to_bytes(8, "little") + header
        write_atomic(folder / name, _stream(front, tensors, read))
        layouts[name] = tuple(entries)
    write_atomic(folder / INDEX, serialise_index(layouts))


def name_file(number: int, count: int) -> str:
    """The name of one of the files.

    >>> name_file(2, 3)
    'model-00002-of-00003.safetensors'
    """
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def serialise_index(layouts: Mapping[str, Sequence[Entry]]) -> bytes:
    """The one way we write an index: the total size, and the file of every tensor, by name.

    >>> json.loads(serialise_index({"a": [Entry("w", "F32", (2,), 0, 8)]}))
    {'metadata': {'total_size': 8}, 'weight_map': {'w': 'a'}}
    """
    places = {entry.name: file for file, entries in layouts.items() for entry in entries}
    total = sum(entry.length for entries in layouts.values() for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(index, ensure_ascii=False, indent=2) + "\n").encode()


def hash_index(path: str | Path) -> tuple[str, dict[str, Layout]]:
    """The hash of the tensors of all files of an index, and the files' layouts by name.

    Every tensor must be in the file that the index names, once, and nothing else may be there.
    """
    raw = read_limited(path, _MAX_INDEX, "weights index")
    places = _read_places(raw, path)
    layouts: dict[str, Layout] = {}
    leaves: list[bytes] = []
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CertificateError(f"weights index {path} names {name!r}, a file elsewhere")
        found, layouts[name] = hash_leaves(Path(path).with_name(name))
        leaves += found
    listed = sorted((e.name, file) for file, layout in layouts.items() for e in layout.entries)
    if listed != sorted(places.items()):
        raise CertificateError(f"weights index {path} does not list what its files hold")
    if raw != serialise_index({name: layout.entries for name, layout in layouts.items()}):
        raise CertificateError(f"weights index {path} is not in canonical form")
    return combine_leaves(leaves), layouts


def find_weights(certificate: Path) -> Path:
    """The weights beside a certificate: one file, or the index of several.

    >>> find_weights(Path("run/certificate.json")).name
    'model.safetensors'
    """
    whole, index = certificate.with_name("model.safetensors"), certificate.with_name(INDEX)
    return index if index.exists() and not whole.exists() else whole


def _order(tensors: Iterable[Described]) -> list[Described]:
    """As safetensors keeps them: widest dtype first, then by name."""
    order = {dtype: -place for place, dtype in enumerate(DTYPES)}
    return sorted(tensors, key=lambda tensor: (order[tensor.dtype], tensor.name))


def _stream(
    front: bytes, tensors: Sequence[Described], read: Callable[[Described], Iterable[Buffer]]
) -> Iterable[bytes | memoryview]:
    yield front
    for tensor in tensors:
        for part in read(tensor):
            view = memoryview(part)
            yield view.cast("B") if view.nbytes else b""


def _read_places(raw: bytes, path: str | Path) -> dict[str, str]:
    try:
        data: Any = json.loads(raw.decode("utf-8"))
        places = cast(dict[str, str], data["weight_map"])
        known = all(isinstance(k, str) and isinstance(v, str) for k, v in places.items())  # pyright: ignore[reportUnnecessaryIsInstance]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        known, places = False, {}
    if not known or not places:
        raise CertificateError(f"weights index {path} is not an index of safetensors files")
    return places
