"""The hidden folder beside the output that holds an unfinished run: its state, and a lock.

What is in it is private: a checkpoint of the noisy steps is not covered by any certificate.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from expunge.directory import check_free
from expunge.errors import InputError, UnlearningError
from expunge.files import hold_lock, write_atomic
from expunge.stopping import Stopped

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
SPARE_BYTES = 16_000_000


def workspace_of(target: Path) -> Path:
    """Where the unfinished run of an output directory lives.

    >>> workspace_of(Path("runs/first")).as_posix()
    'runs/.first.unfinished'
    """
    return target.with_name(f".{target.name}.unfinished")


def check_output(target: Path, resume: bool, needed: int = 0) -> None:
    """Refuse what can be known beforehand: a taken name, an unfinished run, too small a disk."""
    work = workspace_of(target)
    if resume and (target / "certificate.json").is_file():
        shutil.rmtree(work, ignore_errors=True)
        raise InputError(f"the run in {target} is complete; there is nothing to resume")
    check_free(target)
    if work.exists() and not resume:
        raise InputError(
            f"{work} holds an unfinished run; go on with --resume, or remove it to start anew"
        )
    if resume and not work.is_dir():
        raise InputError(f"there is no unfinished run in {work}; start without --resume")
    home = target.absolute().parent
    while not home.exists():
        home = home.parent
    free = shutil.disk_usage(home).free
    if free < needed + SPARE_BYTES:
        raise InputError(
            f"output directory {target} needs about {(needed + SPARE_BYTES) / 1e6:,.0f} MB and "
            f"{home} has {free / 1e6:,.0f} MB free; free some space or name another place"
        )


@contextmanager
def open_workspace(target: Path, resume: bool, identity: Mapping[str, Any]) -> Generator[Path]:
    """The folder of this run, locked; kept if the run stops, removed when it is complete.

    ``identity`` is what must be the same when the run goes on: the recipe and the data sets.
    """
    work = workspace_of(target)
    plain = json.loads(json.dumps(dict(identity)))
    try:
        if not resume:
            work.parent.mkdir(parents=True, exist_ok=True)
            work.mkdir(mode=0o700)
            write_atomic(work / "run.json", json.dumps(plain, indent=1).encode())
    except OSError as error:
        shutil.rmtree(work, ignore_errors=True)
        raise InputError(f"output directory {target} cannot be written: {error.strerror}") from None
    with hold_lock(work / "lock", f"another process is working on the run in {work}"):
        _check_identity(work, plain)
        try:
            yield work
        except Stopped as stop:
            stop.saved = True
            raise
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise UnlearningError(
                f"the run stopped because {error.filename or work} cannot be written: "
                f"{error.strerror}; its last checkpoint is kept, so make room and use --resume"
            ) from None
        shutil.rmtree(work)


def _check_identity(work: Path, given: Mapping[str, Any]) -> None:
    try:
        saved = json.loads((work / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{work} cannot be resumed; remove it to start anew") from None
    for name, value in given.items():
        if saved.get(name) != value:
            raise InputError(
                f"the unfinished run in {work} had another {name}; put the job back as it was, or "
                "remove that folder to start anew"
            )
