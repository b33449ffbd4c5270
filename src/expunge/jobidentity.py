"""What makes two jobs the same job: their tables, and the bytes of the files that they name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, cast

from expunge.errors import InputError
from expunge.jobfile import FILES, JobFile

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
    for table, key in FILES:
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
