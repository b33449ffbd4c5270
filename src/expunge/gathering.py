"""The weights of a sharded model, hashed and saved without anybody holding all of them.

One tensor at a time goes to one process, row by row as the ranks hold it: the leaf of the hash tree
is computed, or the file written, from the parts as they arrive. The memory this takes is one part.
For hashing, as many tensors as there are processes are on their way at once, each to its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from expunge.hashing import combine_leaves, hash_leaf
from expunge.processes import Processes
from expunge.shardfiles import Described, plan_files, write_files
from expunge.shards import locate_rows
from expunge.weights import name_dtype, view_bytes


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
        Described(name, name_dtype(name, tensor), tuple(tensor.shape))
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
