"""The life of a head by commands: a job is learned into a state, and releases follow from it.

A release is the end of a sequence that may be cut short anywhere: ``pending.json`` says whom a
request removes before they are gone, and which certificate is about to be written before it is;
it is removed when the release is complete. So the same command again goes on, names the same people
and samples, and is chained to the last certificate that was *written*. What is in a state is
private.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from expunge.accounting.guarantee import check_delta
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.identifiers import commit
from expunge.certificates.record import Run
from expunge.errors import CertificateError, ExpungeError, InputError, RunError
from expunge.files import hold_lock, read_limited, write_atomic
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.loading import Head, load
from expunge.forgettable.memory import open_memory
from expunge.forgettable.statistics import Compute, StatisticsHead
from expunge.forgettable.tangent import TangentFeatures
from expunge.jobs.data import find_tensors, open_data
from expunge.jobs.directory import FULL, check_free, write_run
from expunge.jobs.jobfile import HeadJobFile, read_head_job
from expunge.jobs.loading import (
    build_model,
    explaining,
    importing_from,
    load_function,
    put_weights,
    read_weights,
)
from expunge.jobs.tables import StatisticsTable

if TYPE_CHECKING:
    from expunge.jobs.many import Pool

MOST_PENDING = 1_000_000_000


@dataclass(frozen=True)
class Released:
    """A release that was written, and what there is to say about it."""

    directory: Path
    certificate: Certificate
    examples: int
    said: tuple[str, ...] = ()
    test: float | None = None


@dataclass(frozen=True)
class Learned:
    """``new`` examples were added; the state holds ``examples`` of ``people``."""

    state: Path
    method: str
    new: int
    examples: int
    people: int
    digest: str
    said: tuple[str, ...] = ()
    release: Released | None = None


def learn_job(
    path: str | Path,
    *,
    out: str | Path | None = None,
    release: str | Path | None = None,
    pool: Pool | None = None,
    progress: bool = False,
) -> Learned:
    """Learn a job's examples into its state: all of those that are not held yet, or none.

    With ``release`` the head of everything that is held is written there, with its certificate.
    With ``pool`` features and sums are computed on Ray.

    >>> learn_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    made = read_head_job(path)
    state, said = made.find_state(out), list[str]()
    with importing_from(made.folder), _working(state):
        network = _build_network(made)
        head = _make_head(made, network, state, progress)
        with explaining("data.load failed"):
            loaded = load_function("data.load", made.job.data.load, made.folder)()
        train, ids, test, collate = open_data(loaded)
        if collate is not None:
            raise InputError("data.load returned 'collate'; a head takes samples one by one")
        with _listening(said), explaining("the network cannot be run on the data", FULL):
            compute = None if pool is None else _spread(pool, len(ids))
            new = head.learn(find_tensors(train) or train, ids, compute)
    memory = open_memory(state)
    learned = Learned(
        state,
        made.job.method.name,
        new,
        len(head),
        memory.count_people(),
        head.digest(),
        tuple(said),
    )
    if release is None:
        return learned
    with importing_from(made.folder):
        return replace(learned, release=release_state(state, release, network=network, test=test))


def release_state(
    state: str | Path,
    out: str | Path,
    ids: Sequence[str] = (),
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    network: nn.Module | None = None,
    test: Any = None,
) -> Released:
    """Forget ``ids``, if any, and write the next release with its certificate to ``out``."""
    folder, target, said = Path(state), Path(out).absolute(), list[str]()
    head = load(folder, network)
    if epsilon is not None and not isinstance(head, ConvexHead):
        raise InputError.of("--epsilon", epsilon, "left out: this head forgets exactly")
    check_delta(delta)
    with _working(folder):
        done = _recover(folder)
        memory, last = open_memory(folder), folder / "certificate.json"
        pending = _Pending.read(folder).keep({mark.hex() for mark in memory.forgotten})
        counts = {mark.hex(): rows for mark, rows in memory.count_rows(ids).items()}
        if done is not None and (done.out, set(done.named)) == (str(target), set(counts)):
            written = Certificate.load(last)
            if written.statistics is not None and written.statistics.digest == head.digest():
                return Released(Path(out), written, len(head), ("it was written before",))
        check_free(target)
        parent = Certificate.load(last) if last.exists() else None
        people = {mark: rows or pending.people.get(mark, 0) for mark, rows in counts.items()}
        asked = replace(pending, people=pending.people | people, named=list(counts))
        asked.write(folder)
        try:
            with _listening(said):
                run = _forget(head, ids, epsilon, delta)
        except ExpungeError:
            pending.write(folder)
            raise
        record = replace(
            run.record,
            forget=commit(ids, samples=sum(people.values())) if ids else None,
            weights_before=run.record.weights_before if parent is None else parent.weights.after,
        )
        certificate = certify(record, delta=delta, parent=parent)
        replace(asked, out=str(target), certificate=certificate.sha256).write(folder)
        try:
            write_run(target, model=run.model, record=record, certificate=certificate)
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
    found.keep(found.people.keys() - (found.named if written else ())).write(state)
    return found if written else None


def _forget(head: Head, ids: Sequence[str], epsilon: float | None, delta: float) -> Run:
    if not ids:
        return head.release()
    if epsilon is not None and isinstance(head, ConvexHead):
        return head.forget(ids, epsilon=epsilon, delta=delta)
    return head.forget(ids)


def _build_network(made: HeadJobFile) -> nn.Module | None:
    """The public network with its weights, on its device, in eval mode."""
    model = made.job.model
    if model.build is None:
        return None
    network = build_model(load_function("model.build", model.build, made.folder))
    if model.weights is not None:
        tensors = read_weights(made.locate(model.weights), "model.weights")
        put_weights(network, tensors, "model.weights")
    if model.device is not None:
        with explaining(f"model.device is {model.device!r}, which cannot be used"):
            network.to(model.device)
    return network.eval()


def _make_head(made: HeadJobFile, network: nn.Module | None, state: Path, progress: bool) -> Head:
    job = made.job
    given: dict[str, Any] = job.features.model_dump(exclude={"tangent", "parameters"})
    given |= {"progress": progress}
    own: dict[str, Any] = job.method.model_dump(exclude={"name"}) | {"state": state}
    try:
        if network is not None and job.features.tangent is not None:
            names = job.features.parameters
            features = TangentFeatures(network, job.features.tangent, parameters=names, **given)
        else:
            features = Features(network, **given)
        kind = StatisticsHead if isinstance(job.method, StatisticsTable) else ConvexHead
        return kind(features, **own)
    except InputError as error:
        raise InputError(f"{made.path}: {error}") from None


def _spread(pool: Pool, count: int) -> Compute:
    from expunge.jobs.spread import compute_on_ray

    return partial(compute_on_ray, pool=pool, count=count)


def _score(model: nn.Module, test: Any) -> float | None:
    """The accuracy on the test set, where targets are classes."""
    pair = None if test is None else find_tensors(test)
    if pair is None or pair[1].is_floating_point():
        return None
    return float((model(pair[0]).argmax(1).cpu() == pair[1].cpu()).double().mean())


@contextmanager
def _working(state: Path) -> Generator[None]:
    """One command at a time works on a state that is there."""
    taken = f"another process is working on {state}; try again when it is done"
    with hold_lock(state / "working", taken) if (state / "meta.json").exists() else nullcontext():
        yield


@contextmanager
def _listening(said: list[str]) -> Generator[None]:
    """Warnings as sentences for the caller."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always", UserWarning)
        yield
    said += [str(warning.message) for warning in heard]
