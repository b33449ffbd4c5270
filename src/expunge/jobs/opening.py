"""``open_state``: whatever can forget, by its folder or its job; torch only where it trains."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expunge.certificates.certificate import Certificate
from expunge.data.data import Data
from expunge.data.people import read_people
from expunge.errors import InputError
from expunge.files import check_free
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.learning import LOG, find_job, make_learner, reporting
from expunge.jobs.loading import explaining, importing_from
from expunge.jobs.request import load_data
from expunge.jobs.run import write_release
from expunge.jobs.tables import LearnJob
from expunge.manifests import read_kind
from expunge.states import State

if TYPE_CHECKING:
    from expunge.certificates.release import Release


def open_state(path: str | Path, data: Data | None = None) -> Any:
    """The state in a folder: ``kind``, ``holds(people)``, ``forget(people)``, ``release()``.

    Of shards ``data`` is where the rows are read from; without it, what the job loads that the
    state was learned by. The path of a job file for ``expunge unlearn`` opens what it would forget
    in: ``kind`` is "job", ``people`` and ``holds`` say whose examples it has.

    >>> open_state("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: path is '/nowhere'; it must be the folder of a state, or a job.toml
    """
    place = Path(path)
    if place.suffix == ".toml" and place.is_file():
        return OpenJob(place)
    match read_kind(place):
        case None:
            raise InputError.of("path", str(path), "the folder of a state, or a job.toml")
        case "linear-model":
            from expunge.linear_model import load

            return load(place)
        case _:
            return OpenShards(place, data)


def forget_in_state(state: str | Path, people: Iterable[Any], out: str | Path) -> Release:
    """Forget people in a state and write its next release to ``out``."""
    if read_kind(state) is None:
        valid = "the folder of a state; a job.toml forgets by expunge unlearn"
        raise InputError.of("STATE", str(state), valid)
    if Path(out).resolve().is_relative_to(Path(state).resolve()):
        raise InputError.of("--out", str(out), f"outside of the state {state}")
    target = check_free(out)
    found, names = open_state(state), read_people(people, "forget")
    if found.kind == "linear-model":  # shards warn themselves
        again = set(found.forgot(names)).difference(found.holds(names))
        if again:
            LOG.info("already forgotten: %d of %d", len(again), len(names))
    with reporting():
        release = found.forget(names)
    write_release(release, target)
    return release


def load_model(run: str | Path, build: Callable[[], Any] | None = None) -> Any:
    """The model of a release, ready to use; ``build()`` gives the module it was made from, of a
    linear model the published network, where it has one.

    >>> load_model("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.CertificateError: certificate /nowhere/certificate.json is not a file that can...
    """
    folder = Path(run)
    certificate = Certificate.load(folder / "certificate.json")
    if certificate.statistics is not None:
        from expunge.linear_model import load

        return load(folder, None if build is None else build())
    if build is None:
        raise InputError.of("build", build, "the function that returns a fresh module")
    if certificate.sharding is not None:
        from expunge.exact.shards_ensemble import load_ensemble

        return load_ensemble(folder, build)
    from expunge.networks.releases import load_model as load_network

    return load_network(folder, build)


@dataclass(frozen=True)
class OpenJob:
    """A job that can answer a request by running again."""

    path: Path
    kind: str = "job"

    @cached_property
    def people(self) -> tuple[str, ...]:
        """Everybody who has an example in the job's data."""
        made = read_job(self.path)
        with importing_from(made.folder):
            return tuple(sorted(load_data(made).everybody()))

    def holds(self, people: Iterable[Any]) -> list[str]:
        """Those of them who have examples."""
        there = set(self.people)
        return [name for name in read_people(people) if name in there]


@dataclass(frozen=True)
class OpenShards:
    """A state of shards, with the job it was learned by."""

    path: Path
    data: Data | None = None
    kind: str = "shards"

    @property
    def _state(self) -> State:
        return State.open(self.path, self.kind)

    @property
    def identity(self) -> str:
        """The same for every copy of this state, and for no other."""
        return self._state.identity

    @property
    def generation(self) -> int:
        """Another number, another state."""
        return self._state.generation

    def holds(self, people: Iterable[Any]) -> list[str]:
        """Those of them who have examples; neither the job nor the network is asked."""
        from expunge.exact.shards_slices import Slices

        return Slices.read(self._state).find_people(people)

    def forgot(self, people: Iterable[Any]) -> list[str]:
        """Those of them who were forgotten."""
        state = self._state
        return [name for name in dict.fromkeys(read_people(people)) if state.is_forgotten(name)]

    def forget(self, people: Iterable[Any]) -> Release:
        """Train again what these people touched, without them."""
        with self._opened() as (learner, made):
            return learner.forget(people, self.data or load_data(made))

    def release(self) -> Release:
        """The ensemble as it is, with its certificate."""
        with self._opened() as (learner, _):
            return learner.release()

    @contextmanager
    def _opened(self) -> Generator[tuple[Any, JobFile[LearnJob]]]:
        made = find_job(self.path)
        failed = "the request failed in the model, its data or its training"
        with importing_from(made.folder), explaining(failed):
            yield make_learner(made, self.path), made
