"""A run directory: model, record, certificate, metrics and report, all there or none."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expunge.certificate import Certificate
from expunge.errors import InputError, UnlearningError
from expunge.files import write_atomic
from expunge.record import RunRecord
from expunge.rendering import to_plain
from expunge.reporting import write_report

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
    from expunge.weights import hash_weights, save_weights

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
