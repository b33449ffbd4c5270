"""From a state to its next release, by a sequence that may be cut short anywhere.

``pending.json`` says whom a request removes before they are gone, and which certificate is about to
be written before it is; it is removed when the release is complete. So the same command again goes
on, names the same people and samples, and is chained to the last certificate that was *written*.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from expunge.accounting.guarantee import check_delta
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.identifiers import commit
from expunge.certificates.record import Run
from expunge.errors import CertificateError, ExpungeError, InputError, RunError
from expunge.files import hold_lock, read_limited, write_atomic
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.folders import holds_shards
from expunge.forgettable.loading import Head, load
from expunge.forgettable.memory import Memory, open_memory
from expunge.forgettable.shards import Shards
from expunge.jobs.data import find_tensors
from expunge.jobs.directory import check_free, write_run
from expunge.jobs.shards import Slices, open_shards

MOST_PENDING = 1_000_000_000
Learner = Head | Shards


class Counts(Protocol):
    """Who is held and who was forgotten, by marks."""

    @property
    def forgotten(self) -> set[bytes]: ...

    def count_rows(self, ids: Iterable[object]) -> dict[bytes, int]: ...

    def count_people(self) -> int: ...


@dataclass(frozen=True)
class Released:
    """A release that was written, and what there is to say about it."""

    directory: Path
    certificate: Certificate
    examples: int
    said: tuple[str, ...] = ()
    test: float | None = None


def release_state(
    state: str | Path,
    out: str | Path,
    ids: Sequence[str] = (),
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    network: nn.Module | None = None,
    test: Any = None,
    metrics: dict[str, Any] | None = None,
) -> Released:
    """Forget ``ids``, if any, and write the next release with its certificate to ``out``."""
    folder, target, said = Path(state), Path(out).absolute(), list[str]()
    check_delta(delta)
    if target.resolve().is_relative_to(folder.resolve()):
        raise InputError.of("--out", str(out), f"outside of the state {state}")
    with _opened(folder, network) as head, working(folder):
        if epsilon is not None and not isinstance(head, ConvexHead):
            raise InputError.of("--epsilon", epsilon, "left out: this forgets exactly")
        done = _recover(folder)
        held, last = find_counts(head, folder), folder / "certificate.json"
        pending = _Pending.read(folder).keep(_list_forgotten(held))
        counts = {mark.hex(): rows for mark, rows in held.count_rows(ids).items()}
        if done is not None and (done.out, set(done.named)) == (str(target), set(counts)):
            written = Certificate.load(last)
            if _find_digest(written) == head.digest():
                return Released(Path(out), written, len(head), ("it was written before",))
        check_free(target)
        parent = _read_parent(last, held)
        if parent is None and _list_forgotten(held) - pending.people.keys():
            said.append(
                "the certificate of the release before is gone; this one begins a new chain"
            )
        people = {mark: rows or pending.people.get(mark, 0) for mark, rows in counts.items()}
        asked = replace(pending, people=pending.people | people, named=list(counts))
        asked.write(folder)
        _go_back(folder)
        try:
            with listening(said):
                run = _forget(head, ids, epsilon, delta)
        except ExpungeError:
            asked.keep(_list_forgotten(find_counts(head, folder))).write(folder)
            raise
        record = replace(
            run.record,
            forget=commit(ids, samples=sum(people.values())) if ids else run.record.forget,
            weights_before=run.record.weights_before if parent is None else parent.weights.after,
        )
        certificate = certify(record, delta=delta, parent=parent)
        replace(asked, out=str(target), certificate=certificate.sha256).write(folder)
        try:
            made: dict[str, Any] = {"record": record, "certificate": certificate}
            write_run(target, model=run.model, metrics=metrics, **made)
        except OSError as error:
            raise RunError(
                f"{out} could not be written ({error.strerror}); nothing is lost: the same command "
                "again, with room or another --out, writes the release"
            ) from None
        _recover(folder)
    if left := len(pending.people.keys() - people.keys()):
        said.append(
            f"{left} people of an earlier request are named in no certificate, because its release "
            "was not written; name them again in the next list to have them named"
        )
    return Released(Path(out), certificate, len(head), tuple(said), _score(run.model, test))


@dataclass(frozen=True)
class _Pending:
    """Rows by mark of everybody whom a request removed and no written certificate names yet; those
    ``named`` by the ``certificate`` (its hash) that is about to be written to ``out``."""

    people: dict[str, int] = field(default_factory=dict[str, int])
    named: list[str] = field(default_factory=list[str])
    out: str | None = None
    certificate: str | None = None

    @classmethod
    def read(cls, state: Path) -> _Pending:
        path = state / "pending.json"
        if not path.exists():
            return cls()
        try:
            return cls(**json.loads(read_limited(path, MOST_PENDING, "state")))
        except (ValueError, TypeError) as error:
            raise CertificateError(f"{path} is damaged: {error}") from None

    def keep(self, marks: set[str]) -> _Pending:
        """Those of the people who are among ``marks``."""
        return _Pending({m: n for m, n in self.people.items() if m in marks})

    def write(self, state: Path) -> None:
        if self.people or self.certificate is not None:
            _write(state / "pending.json", json.dumps(asdict(self), sort_keys=True).encode())
        else:
            (state / "pending.json").unlink(missing_ok=True)


def _write(path: Path, data: bytes) -> None:
    try:
        write_atomic(path, data)
    except OSError as error:
        raise RunError(
            f"{path} could not be written ({error.strerror}); nothing is lost, run the same "
            "command again"
        ) from None


def _recover(state: Path) -> _Pending | None:
    """Remember a release that is complete as the last one; returns it, if there is one."""
    found = _Pending.read(state)
    if found.certificate is None or found.out is None:
        return None
    path = Path(found.out) / "certificate.json"
    data = path.read_bytes() if path.is_file() else b""
    written = hashlib.sha256(data).hexdigest() == found.certificate
    if written:
        _write(state / "certificate.json", data)
        if holds_shards(state):
            _write(state / "written", (state / "released").read_bytes())
    found.keep(found.people.keys() - (found.named if written else ())).write(state)
    return found if written else None


def find_counts(learner: Learner, state: Path) -> Counts:
    """Who is held in a state that is there."""
    return Slices(learner.plan, state) if isinstance(learner, Shards) else open_memory(state)


def _list_forgotten(held: Counts) -> set[str]:
    return {mark.hex() for mark in held.forgotten}


def _read_parent(path: Path, held: Counts) -> Certificate | None:
    """The last certificate, if there is one; not one that was edited or is of another state."""
    if not path.exists():
        return None
    found = Certificate.load(path)
    if found.digest != found.compute_digest():
        raise CertificateError(f"{path} was changed: its digest is not {found.digest}")
    if isinstance(held, Memory):
        if found.statistics is None or found.recipe.method != held.settings["head"]:
            raise CertificateError(f"{path} is not of this state: it is of another method")
        features = dict(held.describe()) | {"evaluation": held.evaluation}
        if found.statistics.features != features:
            raise CertificateError(f"{path} is not of this state: it has other features")
    return found


def _find_digest(certificate: Certificate) -> str | None:
    told = certificate.statistics or certificate.shards
    return None if told is None else told.digest


@contextmanager
def _opened(state: Path, network: nn.Module | None) -> Generator[Learner]:
    """The learner of a state; shards need the job that they were learned by."""
    if holds_shards(state):
        with open_shards(state) as ensemble:
            yield ensemble
    else:
        yield load(state, network)


def _go_back(state: Path) -> None:
    """What was released last is what was *written* last: shards say what they trained since."""
    written = state / "written"
    if written.exists():
        _write(state / "released", written.read_bytes())
    elif holds_shards(state):
        (state / "released").unlink(missing_ok=True)


def _forget(head: Learner, ids: Sequence[str], epsilon: float | None, delta: float) -> Run:
    if not ids:
        return head.release()
    if epsilon is not None and isinstance(head, ConvexHead):
        return head.forget(ids, epsilon=epsilon, delta=delta)
    return head.forget(ids)


def _score(model: nn.Module, test: Any) -> float | None:
    """The accuracy on the test set, where targets are classes."""
    pair = None if test is None else find_tensors(test)
    if pair is None or pair[1].is_floating_point():
        return None
    with torch.no_grad():
        return float((model(pair[0]).argmax(1).cpu() == pair[1].cpu()).double().mean())


@contextmanager
def working(state: Path) -> Generator[None]:
    """One command at a time works on a state that is there."""
    taken = f"another process is working on {state}; try again when it is done"
    with hold_lock(state / "working", taken) if (state / "meta.json").exists() else nullcontext():
        yield


@contextmanager
def listening(said: list[str]) -> Generator[None]:
    """Warnings as sentences for the caller."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        yield
    said += [str(warning.message) for warning in heard]
