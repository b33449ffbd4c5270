"""One hash for a set of named tensors, in memory or in a safetensors file, without torch.

With H = SHA-256, each tensor has a leaf and the set has a root:

    leaf = H(length of header as 8 bytes ‖ header ‖ little-endian data)
    header = JSON ["expunge/tensor-1", name, dtype, shape]
    root = H("expunge/tensors-1\0" ‖ count as 8 bytes ‖ leaves in ascending order)

Tensors are numpy arrays or torch tensors, on any device; dtype names are those of safetensors.
Every byte of a file is pinned: its header must be as we write it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from expunge.display import clean
from expunge.errors import CertificateError, InputError
from expunge.files import open_regular, refuse_twice, write_atomic

# Bytes per element, in the order in which safetensors files keep their tensors (last one first).
DTYPES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4,
    "C64": 8, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
_NAMES: Mapping[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "int16": "I16", "uint16": "U16",
    "float16": "F16", "bfloat16": "BF16", "int32": "I32", "uint32": "U32", "float32": "F32",
    "complex64": "C64", "float64": "F64", "int64": "I64", "uint64": "U64",
}  # fmt: skip
MAX_HEADER_BYTES = 100_000_000
_CHUNK = 1 << 20
Tensor = Any  # a numpy array or a torch tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, but its data; ``offset`` is counted from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def length(self) -> int:
        return DTYPES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The header of a safetensors file, and the bytes it was read from."""

    entries: tuple[Entry, ...]
    metadata: Mapping[str, str] | None
    header: bytes


def hash_tensors(tensors: Mapping[str, Tensor]) -> str:
    """The hash of named tensors; neither their order nor their device matters.

    >>> w, b = np.zeros((1, 2), np.float32), np.ones(3)
    >>> hash_tensors({"w": w, "b": b}) == hash_tensors({"b": b, "w": w})
    True
    >>> hash_tensors({"w": w}) == hash_tensors({"w": w.T})
    False
    """
    return combine_leaves(hash_tensor(tensor, name) for name, tensor in tensors.items())


def hash_tensor(tensor: Tensor, name: str = "") -> bytes:
    """The leaf of one tensor; without a name, of its content alone."""
    entry = describe_tensor(name, tensor)
    return _hash_leaf(entry, [read_bytes(tensor)])


def combine_leaves(leaves: Iterable[bytes]) -> str:
    """The root over all leaves, in hexadecimal.

    >>> combine_leaves([b"b" * 32, b"a" * 32]) == combine_leaves([b"a" * 32, b"b" * 32])
    True
    """
    ordered = sorted(leaves)
    header = b"expunge/tensors-1\0" + len(ordered).to_bytes(8, "little")
    return hashlib.sha256(header + b"".join(ordered)).hexdigest()


def is_tensor(value: object) -> bool:
    """Whether this is a numpy array or a torch tensor; torch is not loaded to find out."""
    return isinstance(value, np.ndarray | np.generic) or (
        "torch" in sys.modules and isinstance(value, cast(Any, sys.modules["torch"]).Tensor)
    )


def describe_tensor(name: str, tensor: Tensor) -> Entry:
    """Name, dtype and shape of a tensor as a file states them.

    >>> describe_tensor("w", np.zeros((2, 3), np.float32))
    Entry(name='w', dtype='F32', shape=(2, 3), offset=0)
    """
    if not is_tensor(tensor):
        raise InputError.of(f"tensor {name}", tensor, "a numpy array or a torch tensor")
    dtype = str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch.")
    if dtype not in _NAMES:
        raise InputError.of(f"dtype of {name}", dtype, "one of " + ", ".join(_NAMES))
    return Entry(name, _NAMES[dtype], tuple(int(n) for n in tensor.shape))


def read_bytes(tensor: Tensor) -> memoryview:
    """The little-endian bytes of a tensor, row by row.

    >>> bytes(read_bytes(np.array([1, 2], np.int16)))
    b'\\x01\\x00\\x02\\x00'
    """
    if not isinstance(tensor, np.ndarray | np.generic):
        torch = cast(Any, sys.modules["torch"])
        flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        tensor = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
    array = np.ascontiguousarray(tensor)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return cast(Any, array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _hash_leaf(entry: Entry, data: Iterable[memoryview]) -> bytes:
    header = json.dumps(["expunge/tensor-1", entry.name, entry.dtype, list(entry.shape)])
    leaf = hashlib.sha256(len(header).to_bytes(8, "little") + header.encode("ascii"))
    for chunk in data:
        leaf.update(chunk)
    return leaf.digest()


def write_safetensors(
    path: str | Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors as a safetensors file, atomically, one tensor in memory at a time.

    They keep the order safetensors itself uses: widest dtype first, then by name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_safetensors(Path(folder, "m"), {"w": np.zeros(2)})
    ...     hash_file(Path(folder, "m"))[0] == hash_tensors({"w": np.zeros(2)})
    True
    """
    if "__metadata__" in tensors:
        raise InputError.of("tensor name", "__metadata__", "another name: this one is reserved")
    order = {dtype: -place for place, dtype in enumerate(DTYPES)}
    entries = [describe_tensor(name, tensor) for name, tensor in tensors.items()]
    entries.sort(key=lambda entry: (order[entry.dtype], entry.name))
    offsets = itertools.accumulate((entry.length for entry in entries), initial=0)
    entries = [replace(e, offset=at) for e, at in zip(entries, offsets, strict=False)]
    header = serialise_header(entries, metadata)
    if len(header) > MAX_HEADER_BYTES:
        raise InputError.of("header size", len(header), f"at most {MAX_HEADER_BYTES} bytes")
    data = (read_bytes(tensors[entry.name]) for entry in entries)
    write_atomic(path, itertools.chain((len(header).to_bytes(8, "little"), header), data))


def serialise_header(
    entries: Iterable[Entry], metadata: Mapping[str, str] | None, align: int = 64
) -> bytes:
    """The one way we write a header: compact JSON, metadata first and sorted, and spaces, so that
    data begin at a multiple of 64 bytes: a file mapped into memory computes as its copy does.

    >>> serialise_header([Entry("w", "F32", (2,))], None, align=8)
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
    return text + b" " * (-(8 + len(text)) % align)


def hash_file(path: str | Path) -> tuple[str, Layout]:
    """The hash of a safetensors file, which is streamed, and its layout; malformed ones refused."""
    leaves, layout = read_leaves(path)
    return combine_leaves(leaves.values()), layout


def hash_parts(path: str | Path, prefix: str) -> dict[str, str]:
    """The hash of every part k of a file whose tensors are named ``prefix.k.name``."""
    leaves, _ = read_leaves(path, lambda name: name.split(".", 2)[-1])
    parts: dict[str, list[bytes]] = {}
    for name, leaf in leaves.items():
        first, _, rest = name.partition(".")
        number, _, inner = rest.partition(".")
        if first != prefix or not inner:
            raise CertificateError(f"weights {path}: {name!r} belongs to no part {prefix}.k")
        parts.setdefault(number, []).append(leaf)
    return {number: combine_leaves(found) for number, found in parts.items()}


def read_leaves(
    path: str | Path, rename: Callable[[str], str] = str
) -> tuple[dict[str, bytes], Layout]:
    """The leaf of every tensor of a safetensors file, hashed under its name or another."""
    path = Path(path)
    with open_regular(path, "weights") as file:
        layout = _read_layout(file, path)
        leaves = {
            e.name: _hash_leaf(replace(e, name=rename(e.name)), _read_chunks(file, e.length, path))
            for e in layout.entries
        }
    return leaves, layout


class _Described(BaseModel):
    """What a header says of one tensor."""

    model_config = ConfigDict(extra="forbid", strict=True)
    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    data_offsets: tuple[int, int]


_HEADER = TypeAdapter(dict[str, _Described])
_METADATA = TypeAdapter(dict[str, str] | None, config=ConfigDict(strict=True))


def _read_layout(file: BufferedReader, path: Path) -> Layout:
    """Parse and check a safetensors header: every byte of the file must belong to one tensor."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CertificateError(f"weights {path} are not a complete safetensors file")
    header = file.read(length)
    try:
        plain = json.loads(header.decode("utf-8"), object_pairs_hook=refuse_twice)
        metadata = _METADATA.validate_python(plain.pop("__metadata__", None))
        described = _HEADER.validate_json(json.dumps(plain))
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        reason = clean(str(error))[:200]
        raise CertificateError(f"weights {path} have an unusable header: {reason}") from None
    entries: list[Entry] = []
    offset = 0
    for name, one in described.items():
        if one.dtype not in DTYPES:
            raise CertificateError(f"weights {path}: {name!r} is of the unknown kind {one.dtype!r}")
        entry = Entry(name, one.dtype, one.shape, offset)
        if one.data_offsets != (offset, offset + entry.length):
            raise CertificateError(f"weights {path}: {name!r} does not start where the last ended")
        offset += entry.length
        entries.append(entry)
    if 8 + length + offset != size:
        raise CertificateError(
            f"weights {path} have {size} bytes; their header describes {8 + length + offset}"
        )
    return Layout(entries=tuple(entries), metadata=metadata, header=header)


def _read_chunks(file: BufferedReader, length: int, path: Path) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(length, _CHUNK)))
    while length > 0:
        read = file.readinto(buffer[: min(length, _CHUNK)])
        if read == 0:
            raise CertificateError(f"weights {path} end before their header says")
        length -= read
        yield buffer[:read]


def hash_bytes(parts: Sequence[bytes]) -> str:
    """SHA-256 of the parts, each after its length, so that no two lists give one text.

    >>> hash_bytes([b"ab", b"c"]) == hash_bytes([b"a", b"bc"])
    False
    """
    return hashlib.sha256(
        b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    ).hexdigest()
