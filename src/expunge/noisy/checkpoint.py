"""The state of a run on disk: one safetensors file, replaced in one rename, never half written.

It holds the vector as it stands, the trace so far, and where the data stood; never a noise key. A
step whose noise was drawn but whose state was not saved is simply done again with fresh noise:
that draw was never released. Like the old model, a checkpoint of an unfinished run is private.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open
from torch import Tensor

from expunge.errors import InputError
from expunge.processes.weights import save_weights

FORMAT = "expunge-checkpoint-1"


@dataclass(frozen=True)
class Progress:
    """How far a run has come: ``steps`` done, by ``noise_keys`` keys, over ``resumed`` resumes."""

    steps: int
    noise_keys: int
    resumed: int
    gradient_evaluations: int


def save_checkpoint(
    path: Path, progress: Progress, identity: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Write everything; the file before stays until the new one is complete."""
    about = {"format": FORMAT, "progress": asdict(progress), "identity": dict(identity)}
    save_weights(path, tensors, {"expunge": json.dumps(about, sort_keys=True)})


def remove_leftovers(path: Path) -> None:
    """Delete what a killed run left of half-written checkpoints: private, and of no use."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        leftover.unlink(missing_ok=True)


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
    for name in given:
        if saved.get(name) != given[name]:
            raise InputError(
                f"checkpoint {path} belongs to another run: its {name} is {saved.get(name)!r}, "
                f"here it is {given[name]!r}"
            )
    return progress, tensors
