"""One hash for a set of named tensors, in memory or in safetensors files, without torch.

With H = SHA-256, each tensor has a leaf and the set has a root:

    leaf = H(length of header as 8 bytes ‖ header ‖ little-endian data)
    header = JSON ["expunge/tensor-1", name, dtype, shape]
    root = H("expunge/tensors-1\0" ‖ count as 8 bytes ‖ leaves in ascending order)

Leaves may be computed anywhere and in any order, so one process and many that hold a part of the
tensors each give the same root, and so do one file and several with an index, as Hugging Face lays
them out. Every byte of the files is pinned: headers and index must be as we write them. Dtype names
are those of safetensors (F32, BF16, …).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from expunge.errors import CertificateError, InputError
from expunge.files import open_regular, read_limited, refuse_twice, write_atomic

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Bytes per element, in the order in which safetensors files keep their tensors (last one first).
DTYPES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
MOST_BYTES = 5_000_000_000
_MAX_INDEX = 100_000_000
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, but its data; ``offset`` is counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def length(self) -> int:
        return tensor_bytes(self.dtype, self.shape)


@dataclass(frozen=True)
class Layout:
    """The header of a safetensors file, and the bytes it was read from."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] | None
    header: bytes


def hash_leaf(name: str, dtype: str, shape: Sequence[int], data: Iterable[Buffer]) -> bytes:
    """The leaf of one tensor, from the chunks of its little-endian bytes.

    >>> hash_leaf("w", "F32", (2,), [bytes(8)]) == hash_leaf("w", "F32", (2,), [bytes(4), bytes(4)])
    True
    """
    header = json.dumps(["expunge/tensor-1", name, dtype, [int(n) for n in shape]])
    leaf = hashlib.sha256(len(header).to_bytes(8, "little") + header.encode("ascii"))
    length = 0
    for chunk in data:
        flat = _flat(chunk)
        leaf.update(flat)
        length += len(flat)
    expected = tensor_bytes(dtype, shape)
    if length != expected:
        raise InputError.of(f"bytes of {name}", length, f"{expected} for {dtype} {list(shape)}")
    return leaf.digest()


def combine_leaves(leaves: Iterable[bytes]) -> str:
    """The root over all leaves, in hexadecimal.

    >>> combine_leaves([b"b" * 32, b"a" * 32]) == combine_leaves([b"a" * 32, b"b" * 32])
    True
    """
    ordered = sorted(leaves)
    header = b"expunge/tensors-1\0" + len(ordered).to_bytes(8, "little")
    return hashlib.sha256(header + b"".join(ordered)).hexdigest()


def hash_tensors(entries: Iterable[tuple[str, str, Sequence[int], Buffer]]) -> str:
    """The hash of named tensors given as (name, dtype, shape, contiguous little-endian bytes).

    >>> w, b = ("w", "F32", (1, 2), bytes(8)), ("b", "BF16", (2,), bytes(4))
    >>> hash_tensors([w, b]) == hash_tensors([b, w])
    True
    """
    leaves: dict[str, bytes] = {}
    for name, dtype, shape, data in entries:
        if name in leaves:
            raise InputError.of("tensor name", name, "unique")
        leaves[name] = hash_leaf(name, dtype, shape, [data])
    return combine_leaves(leaves.values())


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """How many bytes a tensor takes.

    >>> tensor_bytes("BF16", (3, 5))
    30
    """
    if dtype not in DTYPES:
        raise InputError.of("dtype", dtype, "one of " + ", ".join(DTYPES))
    return DTYPES[dtype] * math.prod(int(n) for n in shape)


def hash_weights(path: str | Path) -> tuple[str, dict[str, Layout]]:
    """The hash of a safetensors file, or of all files of an index, and their layouts by file name.

    Files are streamed, malformed ones refused. Every tensor must be in the file that the index
    names, once, and nothing else may be there.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder, "m"), {"w": ("F32", (1, 2), bytes(8))})
    ...     found, _ = hash_weights(Path(folder, "m"))
    >>> found == hash_tensors([("w", "F32", (1, 2), bytes(8))])
    True
    """
    path = Path(path)
    if not path.name.endswith(".index.json"):
        leaves, layout = _hash_file(path)
        return combine_leaves(leaves), {path.name: layout}
    raw = read_limited(path, _MAX_INDEX, "weights index")
    places = _read_places(raw, path)
    layouts: dict[str, Layout] = {}
    leaves: list[bytes] = []
    for name in sorted(set(places.values())):
        if not name or Path(name).name != name:
            raise CertificateError(f"weights index {path} names {name!r}, a file elsewhere")
        found, layouts[name] = _hash_file(path.with_name(name))
        leaves += found
    listed = sorted((e.name, file) for file, layout in layouts.items() for e in layout.entries)
    if listed != sorted(places.items()):
        raise CertificateError(f"weights index {path} does not list what its files hold")
    if raw != serialise_index({name: layout.entries for name, layout in layouts.items()}):
        raise CertificateError(f"weights index {path} is not in canonical form")
    return combine_leaves(leaves), layouts


def hash_constituents(path: str | Path) -> dict[int, str]:
    """The hash of each constituent k of an ensemble's file, from its tensors constituents.k.name.

    A tensor of another name is refused.
    """
    leaves: dict[int, list[bytes]] = {}
    with open_regular(Path(path), "weights") as file:
        for e in _read_layout(file, path).entries:
            parts = e.name.split(".", 2)
            data = _chunks(file, e.length, path)
            if len(parts) < 3 or parts[0] != "constituents" or not parts[1].isdecimal():
                raise CertificateError(f"weights {path}: {e.name!r} belongs to no constituent")
            leaves.setdefault(int(parts[1]), []).append(hash_leaf(parts[2], e.dtype, e.shape, data))
    return {k: combine_leaves(found) for k, found in leaves.items()}


def hash_contents(path: str | Path) -> dict[str, str]:
    """The hash of every tensor of a file or index without its name, by its name."""
    files = [Path(path)]
    if files[0].name.endswith(".index.json"):
        places = _read_places(read_limited(path, _MAX_INDEX, "weights index"), path)
        files = [files[0].with_name(name) for name in sorted(set(places.values()))]
    found: dict[str, str] = {}
    for place in files:
        with open_regular(place, "weights") as file:
            for e in _read_layout(file, place).entries:
                data = _chunks(file, e.length, place)
                found[e.name] = hash_leaf("", e.dtype, e.shape, data).hex()
    return found


def _hash_file(path: Path) -> tuple[list[bytes], Layout]:
    with open_regular(path, "weights") as file:
        layout = _read_layout(file, path)
        leaves = [
            hash_leaf(e.name, e.dtype, e.shape, _chunks(file, e.length, path))
            for e in layout.entries
        ]
    return leaves, layout


def _read_layout(file: BufferedReader, path: str | Path) -> Layout:
    """Parse and check a safetensors header: every byte of the file must belong to one tensor."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CertificateError(f"weights {path} are not a complete safetensors file")
    header = file.read(length)
    entries: list[Entry] = []
    offset = 0
    data, metadata = _parse_header(header, path)
    for name, info in data.items():
        entry = _parse_entry(name, info, path)
        if entry.offset != offset:
            raise CertificateError(f"weights {path}: {name!r} does not start where the last ended")
        offset += entry.length
        entries.append(entry)
    if 8 + length + offset != size:
        raise CertificateError(
            f"weights {path} have {size} bytes; their header describes {8 + length + offset}"
        )
    return Layout(entries=tuple(entries), metadata=metadata, header=header)


def serialise_header(entries: Iterable[Entry], metadata: Mapping[str, str] | None) -> bytes:
    """The one way we write a header: compact JSON, metadata first and sorted, padded to 8 bytes.

    >>> serialise_header([Entry("w", "F32", (2,))], None)
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    """
    plain: dict[str, Any] = {}
    if metadata is not None:
        plain["__metadata__"] = dict(sorted(metadata.items()))
    for e in entries:
        offsets = [e.offset, e.offset + e.length]
        plain[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": offsets}
    try:
        text = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    except UnicodeEncodeError as error:
        raise InputError.of("tensor name", error.object[error.start], "text in Unicode") from None
    return text + b" " * (-len(text) % 8)


def write_safetensors(
    path: str | Path,
    tensors: Mapping[str, tuple[str, Sequence[int], Buffer]],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write name → (dtype, shape, little-endian bytes) as a safetensors file, atomically.

    The tensors keep the order safetensors itself uses: widest dtype first, then by name.
    """
    for name, (dtype, shape, data) in tensors.items():
        length, expected = memoryview(data).nbytes, tensor_bytes(dtype, shape)
        if name == "__metadata__":
            raise InputError.of("tensor name", name, "another name: this one is reserved")
        if length != expected:
            raise InputError.of(f"bytes of {name}", length, f"{expected} for {dtype} {list(shape)}")
    entries = _order(Entry(n, d, tuple(map(int, s))) for n, (d, s, _) in tensors.items())
    _write_file(Path(path), entries, lambda entry: [tensors[entry.name][2]], metadata)


def _write_file(
    path: Path,
    tensors: Sequence[Entry],
    read: Callable[[Entry], Iterable[Buffer]],
    metadata: Mapping[str, str] | None,
) -> tuple[Entry, ...]:
    """Write the tensors one after the other, without gaps; returns where they are."""
    offsets = itertools.accumulate((tensor.length for tensor in tensors), initial=0)
    entries = tuple(replace(t, offset=at) for t, at in zip(tensors, offsets, strict=False))
    header = serialise_header(entries, metadata)
    if len(header) > MAX_HEADER_BYTES:
        raise InputError.of("header size", len(header), f"at most {MAX_HEADER_BYTES} bytes")
    data = (_flat(part) for entry in entries for part in read(entry))
    write_atomic(path, itertools.chain((len(header).to_bytes(8, "little"), header), data))
    return entries


def _flat(data: Buffer) -> memoryview:
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def _chunks(file: BufferedReader, length: int, path: str | Path) -> Iterator[Buffer]:
    buffer = memoryview(bytearray(min(length, _CHUNK)))
    while length > 0:
        read = file.readinto(buffer[: min(length, _CHUNK)])
        if read == 0:
            raise CertificateError(f"weights {path} end before their header says")
        length -= read
        yield buffer[:read]


def _parse_header(
    header: bytes, path: str | Path
) -> tuple[Mapping[str, object], Mapping[str, str] | None]:
    try:
        parsed = json.loads(header.decode("utf-8"), object_pairs_hook=refuse_twice)
        json.dumps(parsed, ensure_ascii=False).encode("utf-8")  # a lone surrogate cannot be written
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"weights {path} have an unusable header: {error}") from None
    if not isinstance(parsed, dict):
        raise CertificateError(f"weights {path} have a header that is not a JSON object")
    data = cast(dict[str, object], parsed)
    metadata = data.pop("__metadata__", None)
    if metadata is None:
        return data, None
    pairs = cast(dict[object, object], metadata) if isinstance(metadata, dict) else {0: 0}
    if not all(isinstance(k, str) and isinstance(v, str) for k, v in pairs.items()):
        raise CertificateError(f"weights {path} have metadata that is not text by name")
    return data, cast(dict[str, str], pairs)


def _parse_entry(name: str, info: object, path: str | Path) -> Entry:
    match info:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            sizes = cast(list[object], shape)
            whole = all(type(n) is int and n >= 0 for n in sizes) and 0 <= start <= end
            if whole and dtype in DTYPES and len(cast(dict[str, object], info)) == 3:
                dimensions = tuple(cast(list[int], sizes))
                if tensor_bytes(dtype, dimensions) == end - start:
                    return Entry(name, dtype, dimensions, start)
        case _:
            pass
    raise CertificateError(f"weights {path} describe {name!r} in a way that cannot be read")


def plan_files(
    tensors: Sequence[Entry], least: int, most_bytes: int = MOST_BYTES
) -> list[list[Entry]]:
    """The tensors of each file: about equal, ``least`` files or more, none beyond ``most_bytes``
    unless one tensor is.

    >>> some = [Entry(name, "F32", (10,)) for name in "abc"]
    >>> [[tensor.name for tensor in file] for file in plan_files(some, 2)]
    [['a', 'b'], ['c']]
    """
    total = sum(tensor.length for tensor in tensors)
    count = min(max(least, -(-total // most_bytes), 1), max(len(tensors), 1))
    limit = max(-(-total // count), 1)
    files: list[list[Entry]] = [[]]
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
    files: Sequence[Sequence[Entry]],
    read: Callable[[Entry], Iterable[Buffer]],
    metadata: Mapping[str, str] | None,
) -> None:
    """Write the planned files, one tensor at a time as ``read`` gives it, then the index."""
    layouts: dict[str, tuple[Entry, ...]] = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        layouts[name] = _write_file(folder / name, tensors, read, metadata)
    write_atomic(folder / INDEX, serialise_index(layouts))


def serialise_index(layouts: Mapping[str, Sequence[Entry]]) -> bytes:
    """The one way we write an index: the total size, and the file of every tensor, by name.

    >>> json.loads(serialise_index({"a": [Entry("w", "F32", (2,))]}))
    {'metadata': {'total_size': 8}, 'weight_map': {'w': 'a'}}
    """
    places = {entry.name: file for file, entries in layouts.items() for entry in entries}
    total = sum(entry.length for entries in layouts.values() for entry in entries)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
    return (json.dumps(index, ensure_ascii=False, indent=2) + "\n").encode()


def find_weights(certificate: Path) -> Path:
    """The weights beside a certificate: one file, the index of several, or an adapter alone.

    >>> find_weights(Path("run/certificate.json")).name
    'model.safetensors'
    """
    whole = certificate.with_name("model.safetensors")
    others = (certificate.with_name(INDEX), certificate.with_name(ADAPTER))
    others += (certificate.with_name("adapter") / ADAPTER,)
    return whole if whole.exists() else next((o for o in others if o.exists()), whole)


def _order(tensors: Iterable[Entry]) -> list[Entry]:
    """As safetensors keeps them: widest dtype first, then by name."""
    order = {dtype: -place for place, dtype in enumerate(DTYPES)}
    return sorted(tensors, key=lambda tensor: (order[tensor.dtype], tensor.name))


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
