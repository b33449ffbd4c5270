"""Torch tensors as the bytes that are hashed and saved: the bridge from modules to hashing.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from expunge.errors import UnlearningError
from expunge.hashing import hash_tensors, write_safetensors

_NAMES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64", torch.uint16: "U16", torch.uint32: "U32",
    torch.uint64: "U64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip


def hash_weights(tensors: Mapping[str, Tensor]) -> str:
    """The hash of a state_dict: the same one that ``verify`` computes from the saved file.

    >>> a, b = torch.zeros(2), torch.ones(3)
    >>> hash_weights({"a": a, "b": b}) == hash_weights({"b": b, "a": a})
    True
    """
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


def view_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, in order."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _encode(
    tensors: Mapping[str, Tensor],
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], memoryview]]]:
    for name, tensor in tensors.items():
        dtype = name_dtype(name, tensor)
        yield name, (dtype, tuple(tensor.shape), view_bytes(tensor))
