"""A folder of checkpoints: whose run it is, and one file that is replaced in one rename."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from expunge.errors import InputError, RunError
from expunge.files import write_atomic

FILE = "run.json"


def bind(folder: str | Path, identity: Mapping[str, str]) -> bool:
    """Make ``folder`` this run's, or refuse one that is another's, naming what differs; returns
    whether it has checkpoints to go on from."""
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    others = [one.name for one in path.parent.iterdir() if one.name != FILE]
    kept = sorted(name for name in others if not name.endswith(".tmp"))  # what is being written
    if not path.exists():
        if kept:
            raise InputError(
                f"resume is {folder}, which has {kept[0]} and no {FILE} to say whose that is; name "
                "an empty folder"
            )
        text = json.dumps(dict(identity), sort_keys=True, indent=1)
        write_atomic(path, text.encode(), private=True)
        return False
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        raise InputError(f"{path} cannot be read; remove {folder} to start anew") from None
    other = [name for name in identity if found.get(name) != identity[name]]
    if other:
        raise InputError(
            f"resume is {folder}, which belongs to a run with other {' and '.join(other)}; restore "
            "them, or name another folder"
        )
    return bool(kept)


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Replace what was saved before; like the old model, a checkpoint is private."""
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, buffer.getvalue(), private=True)
    except OSError as error:
        raise RunError(
            f"checkpoint {path} cannot be written: {error.strerror}; the one before is still there"
        ) from error


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    """What was saved, on the CPU; None if nothing was. No code in it is run."""
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).split("\n")[0]
        raise InputError(
            f"checkpoint {path} cannot be read: {reason}; remove it to start anew"
        ) from None
