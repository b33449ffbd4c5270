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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

import numpy as np

from expunge.certificates.fields import Count, Model
from expunge.display import clean
from expunge.errors import CertificateError, InputError
from expunge.files import open_regular, refuse_twice, write_atomic

# torch's names as safetensors spells them, with the bytes of an element, in the order in which
# safetensors files keep their tensors (last one first).
_KINDS: Mapping[str, tuple[str, int]] = {
    "bool": ("BOOL", 1), "uint8": ("U8", 1), "int8": ("I8", 1), "float8_e5m2": ("F8_E5M2", 1),
    "float8_e4m3fn": ("F8_E4M3", 1), "float8_e8m0fnu": ("F8_E8M0", 1), "int16": ("I16", 2),
    "uint16": ("U16", 2), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int32": ("I32", 4),
    "uint32": ("U32", 4), "float32": ("F32", 4), "complex64": ("C64", 8), "float64": ("F64", 8),
    "int64": ("I64", 8), "uint64": ("U64", 8),
}  # fmt: skip
DTYPES: Mapping[str, int] = dict(_KINDS.values())
MAX_HEADER_BYTES = 100_000_000
_CHUNK = 1 << 20
Tensor = Any  # a numpy array or a torch tensor


class Entry(Model):
    """One tensor of a file, but its data."""

    name: str
    dtype: str
    shape: tuple[Count, ...]

    @property
    def length(self) -> int:
        return DTYPES[self.dtype] * math.prod(self.shape)


class Layout(Model):
    """The header of a safetensors file."""

    entries: tuple[Entry, ...]
    metadata: dict[str, str] | None


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
    return _hash_leaf(describe_tensor(name, tensor), [read_bytes(tensor)])


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
    Entry(name='w', dtype='F32', shape=(2, 3))
    """
    if not is_tensor(tensor):
        raise InputError.of(f"tensor {name}", tensor, "a numpy array or a torch tensor")
    dtype = str(getattr(tensor.dtype, "name", tensor.dtype)).removeprefix("torch.")
    if dtype not in _KINDS:
        raise InputError.of(f"dtype of {name}", dtype, "one of " + ", ".join(_KINDS))
    return Entry(name=name, dtype=_KINDS[dtype][0], shape=tuple(int(n) for n in tensor.shape))


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
    ...     hash_file(Path(folder, "m")) == hash_tensors({"w": np.zeros(2)})
    True
    """
    order = {dtype: -place for place, dtype in enumerate(DTYPES)}
    entries = [describe_tensor(name, tensor) for name, tensor in tensors.items()]
    entries.sort(key=lambda entry: (order[entry.dtype], entry.name))
    header = serialise_header(entries, metadata)
    data = (read_bytes(tensors[entry.name]) for entry in entries)
    write_atomic(path, itertools.chain((len(header).to_bytes(8, "little"), header), data))


def serialise_header(
    entries: Iterable[Entry], metadata: Mapping[str, str] | None, align: int = 64
) -> bytes:
    """The one way we write a header: compact JSON, metadata first and sorted, and spaces, so that
    data begin at a multiple of 64 bytes: a file mapped into memory computes as its copy does.

    >>> serialise_header([Entry(name="w", dtype="F32", shape=(2,))], None, align=8)
    b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}  '
    """
    plain: dict[str, Any] = {}
    if metadata is not None:
        plain["__metadata__"] = dict(sorted(metadata.items()))
    offset = 0
    for e in entries:
        ends = [offset, offset + e.length]
        plain[e.name] = {"dtype": e.dtype, "shape": list(e.shape), "data_offsets": ends}
        offset += e.length
    text = json.dumps(plain, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    return text + b" " * (-(8 + len(text)) % align)


def hash_file(path: str | Path) -> str:
    """The hash of a safetensors file, which is streamed; a malformed one is refused."""
    return combine_leaves(read_leaves(path)[0].values())


def read_leaves(path: str | Path) -> tuple[dict[str, bytes], Layout]:
    """The leaf of every tensor of a safetensors file, and its header."""
    with open_regular(path, "weights") as file:
        layout = _read_layout(file, path)
        leaves = {e.name: _hash_leaf(e, _read_chunks(file, e.length)) for e in layout.entries}
    return leaves, layout


def _read_layout(file: BufferedReader, path: str | Path) -> Layout:
    """What the header says, if it is as we write it (others align to 8) and describes the whole
    file: then every byte belongs to one tensor, and there is no second reading of it."""
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CertificateError(f"weights {path} are not a complete safetensors file")
    header = file.read(length)
    try:
        plain = json.loads(header, object_pairs_hook=refuse_twice)
        metadata = plain.pop("__metadata__", None)
        entries = tuple(
            Entry(name=name, dtype=one["dtype"], shape=tuple(one["shape"]))
            for name, one in plain.items()
        )
        layout = Layout(entries=entries, metadata=metadata)
        known = [serialise_header(entries, metadata, align) for align in (64, 8)]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        reason = clean(str(error))[:200]
        raise CertificateError(f"weights {path} have an unusable header: {reason}") from None
    if header not in known:
        raise CertificateError(f"the header of {path} is not in canonical form")
    described = 8 + length + sum(entry.length for entry in entries)
    if described != size:
        raise CertificateError(f"weights {path} have {size} bytes; their header says {described}")
    return layout


def _read_chunks(file: BufferedReader, length: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(length, _CHUNK)))
    while length > 0:
        read = file.readinto(buffer[: min(length, _CHUNK)])
        if read == 0:
            raise CertificateError("weights end before their header says")
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
