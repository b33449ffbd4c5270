"""Who of some people is held by a model, and who is marked as forgotten there.

What cannot be read is an error: it must never become the answer that somebody is not held.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expunge.errors import CertificateError, InputError
from expunge.ledger.models import Kind

if TYPE_CHECKING:
    from expunge.forgettable.folders import Folder
    from expunge.forgettable.slices import Assignment


@dataclass(frozen=True)
class Standing:
    """Those of the people asked about who are held, and who were forgotten here before;
    ``everybody`` is who is in the data of a job, asked about or not."""

    held: frozenset[str]
    forgotten: frozenset[str]
    everybody: frozenset[str] = frozenset()


def find_standing(kind: Kind, path: Path, people: Sequence[str]) -> Standing:
    """Look for people in a state, or in the data of a job."""
    if kind == "job":
        return _look_into_job(path, people)
    from expunge.forgettable.folders import holds_shards

    try:
        return (_look_into_shards if holds_shards(path) else _look_into_head)(path, people)
    except (OSError, ValueError, KeyError) as error:
        raise CertificateError(f"state {path} is damaged: {error}") from None


def find_similar(
    kind: Kind, path: Path, standing: Standing, people: Sequence[str]
) -> frozenset[str]:
    """Those of ``people``, none of whom is held, of whom another spelling is: a state is asked for
    the usual ones, since it knows nobody's name; a job knows all of its own."""
    if kind == "job":
        folded = {_fold(name) for name in standing.everybody}
        return frozenset(name for name in people if _fold(name) in folded)
    spelled = {other: name for name in people for other in _spell(name) if other != name}
    held = find_standing(kind, path, sorted(spelled)).held if spelled else frozenset[str]()
    return frozenset(name for name in people if held.intersection(_spell(name)))


def _fold(name: str) -> str:
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def _spell(name: str) -> set[str]:
    """Spellings of a name that people take for the same.

    >>> sorted(_spell("Ann"))
    ['ANN', 'Ann', 'ann']
    """
    plain = unicodedata.normalize("NFKC", name)
    return {form(text) for text in (name, plain) for form in (str, str.lower, str.upper, str.title)}


def _look_into_head(path: Path, people: Sequence[str]) -> Standing:
    from expunge.forgettable.memory import open_memory

    memory = open_memory(path)
    store = memory.store
    if store is None or len(store) != memory.sums.rows:
        raise CertificateError(
            f"state {path} is damaged: its rows are not as many as its sums count"
        )
    missing = set(store.take(people).missing)
    return Standing(
        frozenset(name for name in people if name not in missing),
        frozenset(name for name in people if memory.mark(name) in memory.forgotten),
    )


def _look_into_shards(path: Path, people: Sequence[str]) -> Standing:
    from expunge.forgettable.folders import Folder, read_shards_meta
    from expunge.forgettable.slices import Assignment

    settings = read_shards_meta(path / "meta.json")["settings"]
    assignment = Assignment(settings["shards"], settings["slices"], settings["seed"])
    folder, held = Folder(path), Counter[bytes]()
    if not (path / "rows").is_dir():
        raise CertificateError(f"state {path} is damaged: its rows are gone")
    names = {assignment.name(person): person for person in people}
    for shard, part in {assignment.find_place(mark) for mark in names}:
        folder.scan(assignment, shard, part)
        found = folder.read_slice(shard, part)
        if found is None:
            _check_empty(folder, assignment, settings, shard)
        else:
            held.update(found.read_names())
    gone = folder.read_forgotten()
    return Standing(
        frozenset(person for mark, person in names.items() if held[mark]),
        frozenset(person for mark, person in names.items() if mark in gone),
    )


def _check_empty(
    folder: Folder, assignment: Assignment, settings: Mapping[str, Any], shard: int
) -> None:
    """A slice that is not there was empty when its shard was trained, or its file was lost."""
    from expunge.forgettable.constituents import list_lineages, read_checkpoint

    parts = range(assignment.slices)
    files = [folder.path / folder.checkpoint_name(shard, part) for part in parts]
    digests = [folder.scan(assignment, shard, part).digest for part in parts]
    trained = read_checkpoint(files[-1], list_lineages(settings, shard, digests)[-1]) is not None
    if not trained and any(file.exists() for file in files):
        raise CertificateError(
            f"state {folder.path} has slices that its constituents were not trained on: release "
            "what was learned since, or restore the state as a whole"
        )


def _look_into_job(path: Path, people: Sequence[str]) -> Standing:
    from expunge.jobs.data import open_data
    from expunge.jobs.jobfile import read_job
    from expunge.jobs.lists import read_ids
    from expunge.jobs.loading import explaining, importing_from, load_function

    made = read_job(path)
    data = made.job.data
    if made.job.model.state is not None:
        valid = "left out: a state holds people itself, so register the state instead of the job"
        raise InputError.of("model.state", made.job.model.state, valid)
    with importing_from(made.folder):
        with explaining("data.load failed"):
            loaded = load_function("data.load", data.load, made.folder)()
        known = frozenset(map(str, open_data(loaded)[1]))
    gone = set[str]()
    for file in data.forgotten:
        gone.update(read_ids(made.locate(file), None if file.endswith(".txt") else data.column))
    return Standing(
        frozenset(name for name in people if name in known and name not in gone),
        frozenset(name for name in people if name in gone),
        known,
    )
