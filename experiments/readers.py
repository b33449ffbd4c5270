"""Readers of the official files: idx (MNIST), CIFAR's binary records and CIFAR's Python pickles.

Every reader checks what it reads and answers bad bytes with one sentence. Pickles are read without
running anything they name: the three NumPy names an array needs are replaced by stand-ins that
accept unsigned bytes only, and every other name is refused.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import pickle
import zlib
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from expunge.errors import InputError

Bytes = npt.NDArray[np.uint8]
PIXELS = 3 * 32 * 32


def read_idx(path: str | Path, checksum: str | None = None) -> Bytes:
    """The array of an idx file of unsigned bytes, gzipped or not.

    The header is ``00 00 08 ndim`` and ``ndim`` big-endian 32-bit sizes. ``checksum`` is that of
    the unpacked content, so that a file packed anew is the same file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "labels-idx1-ubyte"
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    ...     read_idx(path).tolist()
    [7, 2, 1]
    """
    data = read_bytes(path)
    packed = data[:2] == b"\x1f\x8b"
    stream = gzip.GzipFile(fileobj=io.BytesIO(data)) if packed else io.BytesIO(data)
    try:
        head = stream.read(4)
        if len(head) < 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4:
            raise InputError(
                f"{path} starts with {head.hex(' ')}; an idx file starts with 00 00 08"
            )
        head += stream.read(4 * head[3])
        shape = tuple(np.frombuffer(head, ">u4", offset=4).tolist())
        if len(head) != 4 + 4 * head[3]:
            raise InputError(f"{path} is truncated: it ends within its header")
        expected = math.prod(shape)
        body = stream.read(expected + 1)
    except (EOFError, OSError, zlib.error, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} is truncated or corrupted: {error}") from error
    if len(body) < expected:
        raise InputError(
            f"{path} is truncated: its header promises {expected} values, it holds {len(body)}"
        )
    if len(body) > expected:
        raise InputError(f"{path} is corrupted: it goes on after the {expected} values promised")
    if checksum is not None:
        check_digest(head + body, checksum, path)
    return np.frombuffer(body, np.uint8).reshape(shape)


def read_cifar_binary(
    path: str | Path, label_bytes: int, checksum: str | None = None
) -> tuple[Bytes, Bytes]:
    """(images [n, 3, 32, 32], labels [n]) of records ``label_bytes`` labels + 3072 pixels.

    CIFAR-10 has one label byte, CIFAR-100 two (coarse, fine); the last one is the label returned.
    """
    data = read_bytes(path)
    record = label_bytes + PIXELS
    if len(data) == 0 or len(data) % record:
        raise InputError(
            f"{path} has {len(data)} bytes; it must be a whole number of records of {record} bytes"
        )
    if checksum is not None:
        check_digest(data, checksum, path)
    rows = np.frombuffer(data, np.uint8).reshape(-1, record)
    images = np.ascontiguousarray(rows[:, label_bytes:]).reshape(-1, 3, 32, 32)
    return images, rows[:, label_bytes - 1].copy()


def read_cifar_pickle(
    path: str | Path, label_key: str, checksum: str | None = None
) -> tuple[Bytes, Bytes]:
    """(images [n, 3, 32, 32], labels [n]) of an official Python batch; nothing in it is run.

    ``label_key`` is ``labels`` for CIFAR-10 and ``fine_labels`` for CIFAR-100.
    """
    data = read_bytes(path)
    if checksum is not None:
        check_digest(data, checksum, path)
    batch = _unpickle(data, path)
    pixels, labels = batch.get("data"), batch.get(label_key)
    if not isinstance(pixels, _Array) or not isinstance(labels, list):
        raise InputError(f"{path} has the keys {sorted(batch)}; it must have data and {label_key}")
    images = pixels.value
    if images is None or images.ndim != 2 or images.shape[1] != PIXELS:
        raise InputError(f"{path} holds data of another shape than (n, {PIXELS})")
    numbers = cast(list[object], labels)
    if not all(type(number) is int and 0 <= number < 256 for number in numbers):
        raise InputError(f"{path} has a label that is not a whole number from 0 to 255")
    if len(numbers) != len(images):
        raise InputError(f"{path} has {len(images)} images and {len(numbers)} labels")
    return images.reshape(-1, 3, 32, 32), np.array(numbers, dtype=np.uint8)


def check_labels(labels: Bytes, classes: int, path: str | Path) -> None:
    """Refuse a label that none of the ``classes`` has."""
    if len(labels) and labels.max() >= classes:
        raise InputError(
            f"{path} has the label {labels.max()}; labels of {classes} classes are "
            f"0 to {classes - 1}"
        )


def check_digest(data: bytes, checksum: str, path: str | Path) -> None:
    """Refuse ``data`` whose digest is not ``checksum``, written ``sha256:…`` or ``md5:…``.

    >>> check_digest(b"a", "md5:0cc175b9c0f1b6a831c399e269772661", "a.bin")
    """
    name, _, expected = checksum.partition(":")
    actual = hashlib.new(name, data, usedforsecurity=False).hexdigest()
    if actual != expected:
        raise InputError(
            f"{path} is not the official file: its {name} is {actual}, the official one {expected}"
        )


def read_bytes(path: str | Path) -> bytes:
    """The bytes of a file that must be there."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise InputError(f"{path} cannot be read: {reason}") from error


class _Array:
    """Stand-in for an array under reconstruction: unsigned bytes of a given shape, nothing else."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: Bytes | None = None

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        shape, _, fortran, raw = state[-4:]
        self.fill(raw, shape, "F" if fortran else "C")

    def fill(self, raw: object, shape: tuple[Any, ...], order: str) -> None:
        content = bytes(raw) if isinstance(raw, (bytes, bytearray)) else None
        if content is None or not all(type(size) is int and size >= 0 for size in shape):
            raise pickle.UnpicklingError("it holds an array that is not made of bytes")
        values = np.frombuffer(content, np.uint8)
        self.value = np.ascontiguousarray(values.reshape(shape, order="F" if order == "F" else "C"))


class _Dtype:
    """Stand-in for the dtype of unsigned bytes; its state says only the byte order."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class _BatchUnpickler(pickle.Unpickler):
    """Dicts, lists, texts, numbers and arrays of unsigned bytes; every other name is refused."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        match (module_name.replace("numpy._core", "numpy.core"), global_name):
            case ("numpy", "ndarray"):
                return "numpy.ndarray"
            case ("numpy", "dtype"):
                return self._make_dtype
            case ("numpy.core.multiarray", "_reconstruct"):
                return self._make_array
            case ("numpy.core.numeric", "_frombuffer"):
                return self._make_filled
            case ("_codecs", "encode"):
                return self._encode
            case _:
                raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}")

    def _make_dtype(self, code: object, *_: object) -> _Dtype:
        name = code.decode("latin1") if isinstance(code, bytes) else code
        if name not in ("u1", "|u1", "uint8"):
            raise pickle.UnpicklingError("it holds an array that is not made of bytes")
        return _Dtype()

    def _make_array(self, *_: object) -> _Array:
        return _Array()

    def _make_filled(self, raw: object, _: object, shape: tuple[Any, ...], order: str) -> _Array:
        array = _Array()
        array.fill(raw, shape, order)
        return array

    def _encode(self, text: object, encoding: object) -> bytes:
        if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
            raise pickle.UnpicklingError("it asks for a conversion other than latin1")
        return text.encode("latin1")


def _unpickle(data: bytes, path: str | Path) -> dict[str, object]:
    try:
        batch = _BatchUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:
        raise InputError(
            f"{path} is refused: {error}; only dicts, lists, texts, numbers and arrays of bytes "
            "are read from a pickle"
        ) from error
    if not isinstance(batch, dict):
        raise InputError(f"{path} holds a {type(batch).__name__}; it must hold a dict")
    pairs = cast(dict[object, object], batch)
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): value
        for key, value in pairs.items()
    }
