"""A run directory: model, record, certificate, metrics and report, all there or none.

The hidden folder beside the output that holds an unfinished run: its state, and a lock.

What is in it is private: a checkpoint of the noisy steps is not covered by any certificate.

What makes two jobs the same job: their tables, and the bytes of the files that they name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from expunge.certificates.certificate import Certificate
from expunge.certificates.record import RunRecord
from expunge.errors import InputError, UnlearningError
from expunge.files import hold_lock, to_plain, write_atomic
from expunge.jobs.jobfile import FILE_KEYS, JobFile
from expunge.processes.stopping import Stopped
from expunge.reports.page import write_report

if TYPE_CHECKING:
    from torch import nn

FILES = ("model.safetensors", "record.json", "certificate.json", "metrics.json", "report.html")


def check_free(directory: str | Path) -> Path:
    """The directory as a path, if a run may be written there; nothing is ever overwritten.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as empty:
    ...     check_free(empty) == Path(empty)
    True
    """
    path = Path(directory)
    if path.is_dir() and any(path.iterdir()):
        raise InputError(
            f"output directory {path} already holds files; name another one or remove it first"
        )
    if path.exists() and not path.is_dir():
        raise InputError(f"output directory {path} is a file; name a directory")
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise InputError(f"output directory {path} cannot be made: {parent} is a file")
    return path


def write_run(
    directory: str | Path,
    *,
    model: nn.Module,
    record: RunRecord,
    certificate: Certificate,
    metrics: Mapping[str, Any] | None = None,
    save: Callable[[Path, Mapping[str, str]], object] | None = None,
) -> Path:
    """Write a complete run directory: a hidden sibling first, then one rename.

    The weights file repeats the certificate's main facts in its metadata, so that file and
    certificate name each other. ``save(folder, metadata)`` writes weights that are not in this
    process, and vouches that they are the certificate's.
    """
    from expunge.processes.weights import hash_weights, save_weights

    target = check_free(directory)
    weights = model.state_dict() if save is None else {}
    if save is None and hash_weights(weights) != certificate.weights.after:
        raise UnlearningError(
            "these are not the weights the certificate is about; certify after the last change"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    draft.mkdir()
    try:
        if save is None:
            save_weights(draft / "model.safetensors", weights, certificate.safetensors_metadata())
        else:
            save(draft, certificate.safetensors_metadata())
        record.save(draft / "record.json")
        certificate.save(draft / "certificate.json")
        text = json.dumps(to_plain(metrics or {}), ensure_ascii=False, allow_nan=False, indent=1)
        write_atomic(draft / "metrics.json", (text + "\n").encode())
        write_report(draft)
        draft.replace(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


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


# What says where and how a run is done, and nothing about what comes out.
CIRCUMSTANCES = {
    "data": {"workers"},
    "output": {"dir", "title", "checkpoint_seconds", "tensorboard", "callback"},
}


def hash_job(made: JobFile, known: dict[Path, str] | None = None) -> str:
    """One hash of a job: all keys that change what comes out, and the content of weights and lists.

    The code that the job names and the data that it loads are not in it. The hash of a short list
    can be guessed from it, so it belongs to files that stay with the operator. ``known`` remembers
    the hashes of files that several jobs share.
    """
    known = {} if known is None else known
    tables = made.job.model_dump(mode="json", exclude=cast(Any, CIRCUMSTANCES))
    files = dict[str, str]()
    for table, key in FILE_KEYS:
        given = cast(dict[str, Any], tables.get(table) or {}).get(key)
        if given is None or (table, key) == ("output", "sign"):
            continue
        for name in cast(list[str], given if isinstance(given, list) else [given]):
            path = made.locate(name)
            if path not in known:
                known[path] = _hash_file(path)
            files[name] = known[path]
    text = json.dumps({"tables": tables, "files": files}, sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _hash_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
