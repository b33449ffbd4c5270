"""The state of a run of several processes on disk: ``torch.distributed.checkpoint`` and a pointer.

A checkpoint is a folder. The vector goes into a new folder inside it, every process writing its own
part; when all of it is there, rank 0 replaces ``state.safetensors``, which holds everything else
and so names that folder, in one rename. A run killed at any moment finds the old state or the new
one. Every process must be able to reach the folder. It never holds a noise key, and is private.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from expunge.checkpoint import Progress, load_checkpoint, remove_leftovers, save_checkpoint
from expunge.errors import InputError
from expunge.processes import Processes
from expunge.shards import ShardedVector
from expunge.vector import CertifiedVector

STATE = "state.safetensors"


def save_state(
    path: Path,
    processes: Processes,
    progress: Progress,
    identity: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    vector: CertifiedVector,
) -> None:
    """Write everything; the state before stays until the new one is complete."""
    name = _name(progress)
    if processes.leads:
        path.mkdir(parents=True, exist_ok=True)
    if processes.share((path / name / ".metadata").exists()):
        return  # nothing was done since the last save
    with processes.listening("saving a checkpoint"):
        save(_list_parts(vector), checkpoint_id=str(path / name))
    if processes.leads:
        save_checkpoint(path / STATE, progress, identity, tensors)
        _remove_others(path, name)


def load_state(
    path: Path, processes: Processes, identity: Mapping[str, Any], vector: CertifiedVector
) -> tuple[Progress, dict[str, Tensor]] | None:
    """What ``save_state`` wrote, if it is of this very run, read into the vector; None if nothing.

    The number of processes may be another one than before.
    """
    found: tuple[Progress, dict[str, Tensor]] | None = None
    with processes.together():
        if processes.leads and path.is_dir():
            remove_leftovers(path / STATE)
            if (path / STATE).exists():
                found = load_checkpoint(path / STATE, identity)
            _remove_others(path, None if found is None else _name(found[0]))
    found = processes.share(found)
    if found is None:
        return None
    parts = _list_parts(vector)
    with processes.listening("reading a checkpoint"):
        try:
            load(parts, checkpoint_id=str(path / _name(found[0])))
        except CheckpointException as error:
            first = next(iter(error.failures.values()), (error, None))
            raise InputError(f"checkpoint {path} cannot be read: {first[0]}") from None
    vector.load(vector.state())
    return found


def _list_parts(vector: CertifiedVector) -> dict[str, Any]:
    """The vector by name; what is loaded goes into its own memory."""
    if isinstance(vector, ShardedVector):
        return {f"cells.{name}": tensor for name, tensor in vector.state_shards().items()}
    return dict(vector.state())


def _name(progress: Progress) -> str:
    return f"step-{progress.steps}-key-{progress.noise_keys}"


def _remove_others(path: Path, name: str | None) -> None:
    for other in path.glob("step-*"):
        if other.name != name:
            shutil.rmtree(other, ignore_errors=True)
