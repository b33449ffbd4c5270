"""The state of a run on disk, replaced in one rename, never half written.

It holds the vector as it stands, the trace so far, and where the data stood; never a noise key. A
step whose noise was drawn but whose state was not saved is simply done again with fresh noise:
that draw was never released. Like the old model, a checkpoint of an unfinished run is private.

It belongs to one run: the same model, recipe, data and request. Anything else cannot go on from it.

One process writes one safetensors file. Several write a folder: the vector goes into a new folder
inside it, every process writing its own part; when all of it is there, rank 0 replaces
``state.safetensors``, which holds everything else and so names that folder. A run killed at any
moment finds the old state or the new one. Every process must be able to reach the folder.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from expunge.errors import InputError, RunError
from expunge.noisy.sharded_vector import ShardedVector
from expunge.noisy.vector import CertifiedVector
from expunge.processes.group import Processes
from expunge.processes.weights import save_weights

FORMAT = "expunge-checkpoint-2"
STATE = "state.safetensors"
_VECTOR = "vector."


@dataclass(frozen=True)
class Checkpoint:
    """Where a run keeps its state, how many seconds lie between two saves, and whether it goes on
    from what is there.

    >>> Checkpoint("run.safetensors", resume=True).every
    30.0
    """

    path: str | Path
    every: float = 30.0
    resume: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))
        if not 0 <= self.every <= math.inf:
            raise InputError.of("checkpoint.every", self.every, "a number of seconds >= 0")

    @property
    def place(self) -> Path:
        return Path(self.path)


@dataclass(frozen=True)
class Progress:
    """How far a run has come: ``steps`` done, by ``noise_keys`` keys, over ``resumed`` resumes."""

    steps: int
    noise_keys: int
    resumed: int
    gradient_evaluations: int


def save_state(
    path: Path,
    processes: Processes,
    progress: Progress,
    identity: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    vector: CertifiedVector,
) -> None:
    """Write everything; the state before stays until the new one is complete."""
    if processes.alone:
        parts = {_VECTOR + name: t for name, t in vector.state().items()}
        with _writing(path):
            save_checkpoint(path, progress, identity, {**tensors, **parts})
        return
    name = _name(progress)
    with processes.together(), _writing(path):
        if processes.leads:
            path.mkdir(parents=True, exist_ok=True)
    if processes.share((path / name / ".metadata").exists()):
        return  # nothing was done since the last save
    with _writing(path), processes.listening("saving a checkpoint"):
        save(_list_parts(vector), checkpoint_id=str(path / name))
    with processes.together(), _writing(path):
        if processes.leads:
            save_checkpoint(path / STATE, progress, identity, tensors)
            _remove_others(path, name)


def load_state(
    path: Path, processes: Processes, identity: Mapping[str, Any], vector: CertifiedVector
) -> tuple[Progress, dict[str, Tensor]] | None:
    """What ``save_state`` wrote, if it is of this very run, read into the vector; None if nothing.

    The number of processes may be another one than before, as long as there are several.
    """
    file = path if processes.alone else path / STATE
    found: tuple[Progress, dict[str, Tensor]] | None = None
    with processes.together():
        if processes.leads:
            remove_leftovers(file)
            if file.exists():
                found = load_checkpoint(file, identity)
            if not processes.alone:
                _remove_others(path, None if found is None else _name(found[0]))
    found = processes.share(found)
    if found is None:
        return None
    progress, tensors = found
    if processes.alone:
        parts = {n.removeprefix(_VECTOR): t for n, t in tensors.items() if n.startswith(_VECTOR)}
        vector.load(parts)
        return found
    with processes.listening("reading a checkpoint"):
        try:
            load(_list_parts(vector), checkpoint_id=str(path / _name(progress)))
        except CheckpointException as error:
            raise InputError(f"checkpoint {path} cannot be read: {_find_cause(error)}") from None
    vector.load(vector.state())
    return found


@contextmanager
def _writing(path: Path) -> Generator[None]:
    """A state that cannot be written, on a full disk above all, is one sentence: try again."""
    try:
        yield
    except (OSError, CheckpointException) as error:
        cause = _find_cause(error)
        reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
        raise RunError(
            f"checkpoint {path} cannot be written: {reason}; the state saved before it is still "
            "there, and --resume goes on from it"
        ) from error


def _find_cause(error: BaseException) -> BaseException:
    """The first failure of any process."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()), (error, None))[0]
    return error


def save_checkpoint(
    path: Path, progress: Progress, identity: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write one file; the one before stays until it is complete."""
    about = {"format": FORMAT, "progress": asdict(progress), "identity": dict(identity)}
    save_weights(path, tensors, {"expunge": json.dumps(about, sort_keys=True)})


def load_checkpoint(path: Path, identity: Mapping[str, Any]) -> tuple[Progress, dict[str, Tensor]]:
    """Read what ``save_checkpoint`` wrote, if it is of this very run; else say what differs."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = cast(dict[str, str], file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        about = json.loads(metadata["expunge"])
        if about["format"] != FORMAT:
            raise InputError.of("checkpoint format", about["format"], repr(FORMAT))
        saved = cast(dict[str, Any], about["identity"])
        progress = Progress(**about["progress"])
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise InputError(f"checkpoint {path} cannot be read: {error}") from None
    given = json.loads(json.dumps(dict(identity)))
    for name in sorted(given.keys() | saved.keys()):
        if saved.get(name) != given.get(name):
            raise InputError(
                f"checkpoint {path} belongs to another run: its {name} is {saved.get(name)!r}, "
                f"here it is {given.get(name)!r}"
            )
    return progress, tensors


def remove_leftovers(path: Path) -> None:
    """Delete what a killed run left of half-written checkpoints: private, and of no use."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


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
