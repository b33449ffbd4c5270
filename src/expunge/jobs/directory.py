"""A run directory: model, record, certificate, metrics and report, all there or none.

Until all of it is there, the run lives in a hidden folder beside it, with its state and a lock.
What is in that folder is private: a checkpoint of the noisy steps is not covered by any
certificate. What makes two jobs the same job is here too: their tables, and the bytes of the files
that they name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from expunge.certificates.certificate import Certificate
from expunge.certificates.record import Adapter, RunRecord
from expunge.errors import CertificateError, InputError, RunError, UnlearningError
from expunge.files import hold_lock, read_limited, synced_together, to_plain, write_atomic
from expunge.jobs.jobfile import JobFile, list_files
from expunge.processes.stopping import Stopped
from expunge.reports.page import write_report

if TYPE_CHECKING:
    from torch import nn

    from expunge.processes.group import Processes

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
SPARE_BYTES, MAX_METRICS = 16_000_000, 10_000_000
# What says where and how a run is done, and nothing about what comes out.
WHERE = {"data": {"workers"}, "output": {"dir", "title", "checkpoint_seconds", "callback"}}
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
    home = _find_home(path)
    if not home.is_dir():
        raise InputError(f"output directory {path} cannot be made: {home} is a file")
    if not os.access(home, os.W_OK | os.X_OK):
        raise InputError(f"output directory {path} cannot be made: {home} cannot be written")
    return path


def _find_home(path: Path) -> Path:
    """The nearest folder above that is there."""
    return next(place for place in path.absolute().parents if place.exists())


def write_run(
    directory: str | Path,
    *,
    model: nn.Module,
    record: RunRecord,
    certificate: Certificate,
    metrics: Mapping[str, Any] | None = None,
    processes: Processes | None = None,
) -> Path:
    """Write a complete run directory: a hidden sibling first, then one rename.

    The file of weights holds the parameters and persistent buffers of the module, which must be
    those that the certificate is about, and nothing else. It repeats the certificate's main facts
    in its metadata, so that file and certificate name each other. A certified adapter of PEFT is
    also written alone, to ``adapter/``, as PEFT reads it, with the certificate. With ``processes``
    all of them must call this; rank 0 writes, and the others hand it their parts of a sharded
    model.
    """
    from expunge.processes.group import find_processes, is_sharded
    from expunge.processes.weights import (
        find_nonfinite,
        hash_weights,
        list_tensors,
        save_together,
        save_weights,
    )

    group = find_processes(processes or False)
    target, tensors, sharded = Path(directory), list_tensors(model), is_sharded(model)
    facts = certificate.safetensors_metadata()
    found = hash_weights(tensors, group)
    public = certificate.weights.public
    with group.together():
        wrong = find_nonfinite(tensors, () if public is None else public.names)
        if wrong is not None:
            raise UnlearningError(f"{wrong} holds values that are not finite; nothing is released")
        if found != certificate.weights.after:
            raise UnlearningError(
                "these are not the weights the certificate is about; certify after the last change"
            )
        if group.leads:
            check_free(target)
    with group.together():
        if not group.leads:
            if sharded:
                save_together(None, tensors, facts, group)
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
        draft.mkdir()
        try:
            with synced_together(draft):
                if sharded:
                    save_together(draft, tensors, facts, group)
                else:
                    save_weights(draft / "model.safetensors", tensors, facts)
                if certificate.weights.adapter is not None:
                    _write_adapter(draft / "adapter", model, certificate)
                record.save(draft / "record.json")
                certificate.save(draft / "certificate.json")
                plain = to_plain(metrics or {})
                text = json.dumps(plain, ensure_ascii=False, allow_nan=False, indent=1)
                write_atomic(draft / "metrics.json", (text + "\n").encode(), private=True)
                write_report(draft)
            draft.replace(target)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
    return target


def _write_adapter(folder: Path, model: nn.Module, certificate: Certificate) -> None:
    """The adapter as PEFT's files, which must be those that the certificate is about."""
    from expunge.processes.adapters import find_adapter
    from expunge.processes.weights import save_weights

    public, told = certificate.weights.public, certificate.weights.adapter
    found = find_adapter(model, () if public is None else public.names)
    if found is None or told is None or found.describe() != Adapter(**told.model_dump()):
        raise UnlearningError("the model's adapter is not the one that the certificate is about")
    folder.mkdir()
    save_weights(
        folder / "adapter_model.safetensors", found.tensors, certificate.safetensors_metadata()
    )
    write_atomic(folder / "adapter_config.json", found.config)
    certificate.save(folder / "certificate.json")


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
    home = _find_home(target)
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
            raise RunError(
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


def hash_job(made: JobFile) -> str:
    """One hash of a job: all keys that change what comes out, and the content of weights and lists.

    The code that the job names and the data that it loads are not in it. The hash of a short list
    can be guessed from it, so it belongs to files that stay with the operator.
    """
    from expunge.jobs.checkpoints import find_file, list_parts

    tables = made.job.model_dump(mode="json", exclude=cast(Any, WHERE))
    files = {
        f"{name} {part.name}": _hash_file(part)
        for key, name in list_files(made.job)
        if key != ("output", "sign")
        for part in list_parts(find_file(made.locate(name), ".".join(key)))
    }
    text = json.dumps({"tables": tables, "files": files}, sort_keys=True)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _hash_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def is_finished(made: JobFile, target: Path) -> bool:
    """Whether ``target`` holds a complete run of this very job.

    A job that torchrun restarts may have been complete before one of its processes died.
    """
    complete = (target / "certificate.json").is_file()
    return complete and read_metrics(target).get("job") == hash_job(made)


def read_metrics(target: Path) -> dict[str, Any]:
    """What was measured in a run; nothing where that cannot be read."""
    try:
        return json.loads(read_limited(target / "metrics.json", MAX_METRICS, "metrics"))
    except (CertificateError, ValueError):
        return {}
