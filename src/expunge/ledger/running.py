"""One release of a model, on disk: of a state, or by a job made from the registered one.

Both are safe to repeat: what a killed worker left is completed, and a release that is there is not
written again.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import tomllib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from expunge.errors import UnlearningError
from expunge.files import write_atomic
from expunge.ledger.evidence import hash_file, is_written


@dataclass(frozen=True, eq=False)
class Finished:
    """A finished release, the SHA-256 of its certificate, whom it names by request, and the
    requests of people who are back in its model on purpose."""

    id: int
    number: int
    directory: Path
    certificate: str
    people: Mapping[int, str] = field(repr=False)
    readmitted: frozenset[int]


def release_again(state: Path, directory: Path, people: Sequence[str]) -> tuple[str, ...]:
    """Forget ``people`` in a state; what there is to say about it."""
    from expunge.jobs.releases import release_state

    if is_written(directory):
        return ()
    directory.parent.mkdir(parents=True, exist_ok=True)
    return release_state(state, directory, people).said


def run_again(
    job: Path, directory: Path, people: Sequence[str], earlier: Sequence[Finished]
) -> tuple[str, ...]:
    """Forget ``people`` by a job that starts from the last release and keeps all earlier out."""
    from expunge.jobs.directory import workspace_of
    from expunge.jobs.run import run_job

    if is_written(directory):
        return ()
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _made_job(job, directory, people, earlier) as path:
        run_job(path, out=directory, resume=workspace_of(directory).is_dir())
    return ()


@contextmanager
def _made_job(
    job: Path, directory: Path, people: Sequence[str], earlier: Sequence[Finished]
) -> Generator[Path]:
    """The job with these lists, in the folder of the other: its paths are relative to that.

    Lists name people, so they are their owner's alone, and gone when the run is over.
    """
    lists = directory.parent / f".{directory.name}.lists"
    shutil.rmtree(lists, ignore_errors=True)
    lists.mkdir(mode=0o700)
    path = job.with_name(f".{job.stem}.{directory.parent.name}.{directory.name}.toml")
    try:
        tables = tomllib.loads(job.read_text(encoding="utf-8-sig"))
        data, model = tables["data"], tables["model"]
        column: Any = data.get("column")
        named = [lists / ("0.txt" if column is None else "0.csv")]
        named += [lists / f"{number}.txt" for number in range(1, len(earlier) + 1)]
        lists_of = [people, *(sorted(set(one.people.values())) for one in earlier)]
        for file, names in zip(named, lists_of, strict=True):
            text = "\n".join(names) if file.suffix == ".txt" else _write_csv([str(column), *names])
            write_atomic(file, text.encode(), private=True)
        before = [str(job.parent / Path(name).expanduser()) for name in data.get("forgotten", [])]
        data |= {"forget": str(named[0]), "forgotten": [*before, *map(str, named[1:])]}
        if earlier:
            from expunge.certificates.hashing import find_weights

            parent = earlier[-1].directory / "certificate.json"
            if hash_file(parent) != earlier[-1].certificate:
                raise UnlearningError(f"{parent} is not the certificate that the ledger knows")
            model |= {"weights": str(find_weights(parent)), "parent": str(parent)}
        write_atomic(path, write_toml(tables).encode(), private=True)
        yield path
    finally:
        path.unlink(missing_ok=True)
        shutil.rmtree(lists, ignore_errors=True)


def _write_csv(column: list[str]) -> str:
    text = io.StringIO()
    csv.writer(text).writerows([value] for value in column)
    return text.getvalue()


def write_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of plain values as TOML.

    >>> print(write_toml({"data": {"forget": "f.txt", "workers": 0, "forgotten": ["a", "b"]}}))
    [data]
    forget = "f.txt"
    workers = 0
    forgotten = ["a", "b"]
    <BLANKLINE>
    """
    lines = list[str]()
    for name, table in tables.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"
