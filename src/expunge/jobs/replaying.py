"""``expunge replay``: an exact release made again from the job's code and data, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import expunge
from expunge.certificates.certificate import Certificate
from expunge.certificates.people import find_members
from expunge.certificates.record import Record, compare_versions
from expunge.certificates.release import check_record
from expunge.certificates.verification import verify
from expunge.data.data import Data
from expunge.errors import InputError, VerificationError
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.learning import load_network, make_learner, split_examples
from expunge.jobs.loading import explaining, importing_from
from expunge.jobs.request import load_data, load_training
from expunge.jobs.tables import NOISY, LearnJob, ShardsJob, UnlearnJob
from expunge.manifests import read_kind


def replay_job(folder: str | Path, path: str | Path) -> list[str]:
    """Facts about the replay; an error says what differs and what could make bits differ.

    Neither the old weights nor the list of the forgotten are read, and the rows of people who left
    need not exist any more.
    """
    place = Path(folder)
    if not (place / "certificate.json").is_file():
        raise InputError.of("DIR", str(folder), "the folder of a release")
    certificate, made = verify(place).certificate, read_job(path)
    name, asked = certificate.method, made.job.method.name
    if name in NOISY:
        raise InputError(
            f"{folder} is of {name}, whose noise nobody can draw again; verify it, or audit it"
        )
    if asked != name:
        raise InputError(f"{folder} is of {name}, and {path} of {asked}; name the job that made it")
    failed = "the replay failed in the model, its data or its training"
    with importing_from(made.folder), explaining(failed):
        data, notes = load_data(made), ()
        if isinstance(made.job, UnlearnJob):
            build = made.load("model.build")
            train: Any = load_training(made, made.job.training)[1]
            found = expunge.replay(place, build, data, train=train, device=made.job.model.device)
            differences, causes, notes = found.differences, found.causes, found.notes
        else:
            differences = _replay_learned(made.of(LearnJob), place, data)
            causes = compare_versions(certificate.environment.versions)
            causes.append("another processor, or code that draws on what no seed decides")
    if differences:
        said = "".join(f"\n  it may be: {cause}" for cause in causes)
        raise VerificationError(f"{folder} does not come out again: {'; '.join(differences)}{said}")
    shown = f"{certificate.retained.samples:,} examples of {certificate.retained.count:,} people"
    return [f"{name} on {shown}, in a fresh process", *notes]


def _replay_learned(made: JobFile[LearnJob], place: Path, data: Data) -> list[str]:
    """What differs in a model built to forget. Who left is in the record beside the release; where
    that was not handed over, in the state."""
    record, state = place / "record.json", made.locate(made.job.state.dir)
    gone = list[str]()
    if record.is_file():
        kept = Record.load(record)
        check_record(Certificate.load(place / "certificate.json"), kept, place)
        gone = [n for c in (*kept.earlier, kept.forget) for n in find_members(c, data.people)]
    elif read_kind(state) is not None:
        gone = list(make_learner(made, state).forgot(data.people))
    retained = data.drop(gone)
    if isinstance(made.job, ShardsJob):
        return make_learner(made, None).replay(retained, place)
    from expunge.linear_model import replay

    return replay(place, split_examples(retained), load_network(made))
