"""What a job names, loaded: ``build``, the data, ``train``, the loss, and who leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import expunge
from expunge.certificates.hashes import hash_tensors
from expunge.certificates.release import check_releases
from expunge.data.data import Data
from expunge.data.people import read_people
from expunge.errors import InputError, collecting
from expunge.jobs.jobfile import JobFile, refuse_mistakes
from expunge.jobs.lists import read_list
from expunge.jobs.loading import explaining
from expunge.jobs.options import find_loss
from expunge.jobs.tables import OWN_LOSS, Job, NoisyTable, TrainingTable, UnlearnJob

Function = Callable[..., Any]


@dataclass(frozen=True)
class Request:
    """A job's three words, and the people who leave. ``loss`` is in a mapping: None is a loss too
    (the model returns its own), and absent is the default of whoever is given none. ``options``
    are those that ``check``, ``retrain`` and ``unlearn`` have in common, ``batches`` those of noisy
    steps."""

    build: Function
    data: Data
    people: tuple[str, ...]
    loss: dict[str, Any]
    old: Path | None
    options: dict[str, Any]
    batches: dict[str, Any]


def load_request(
    made: JobFile[UnlearnJob],
    forget: Iterable[Any] | None = None,
    before: Iterable[str] = (),
) -> Request:
    """Everything that the job names; ``forget`` takes the place of its list, and problems found
    ``before`` are named with those that are found here. Call inside
    :func:`expunge.jobs.loading.importing_from`."""
    job, problems, found, train = made.job, list[str](), dict[str, Any](), None
    with collecting(problems):
        given = read_request_list(made) if forget is None else read_people(forget, "forget")
        found["people"] = tuple(given)
    with collecting(problems):
        found["build"] = made.load("model.build")
    with collecting(problems):
        found["loss"], train = load_training(made, job.training)
    with collecting(problems):
        found["data"] = load_data(made)
    if problems:
        refuse_mistakes(made.path, [*before, *problems])
    options = {
        "forget": found["people"],
        "train": train,
        "seed": 0 if job.training is None else job.training.seed,
        "parent": made.find(job.method.parent),
        "published": made.find(job.model.published),
        "key": job.model.key,
        "unchanged": job.model.unchanged,
    }
    batches = dict(found["loss"])
    if isinstance(job.method, NoisyTable):
        from torch.nn.functional import cross_entropy

        batches = {"loss": cross_entropy, "batch_size": job.method.batch_size} | batches
    return Request(**found, old=made.find(job.model.old), options=options, batches=batches)


def check_second(made: JobFile[UnlearnJob], request: Request, target: Path) -> None:
    """A second noisy run of one old model is refused before it runs, not where it is written."""
    method, model = made.job.method, made.job.model
    if not isinstance(method, NoisyTable) or request.old is None or method.parent is not None:
        return
    from expunge.networks.building import call_build
    from expunge.networks.checkpoints import read_old

    module = call_build(request.build)
    found = read_old(request.old, module, key=model.key, strict=model.strict)
    check_releases(target, hash_tensors(found), method.releases)


def read_request_list(made: JobFile[UnlearnJob]) -> list[str]:
    return read_list(made.locate(made.job.data.forget), made.job.data.column)


def load_data(made: JobFile[Job]) -> Data:
    load = made.load("data.load")
    with explaining("data.load failed"):
        data = load()
    if not isinstance(data, Data):
        kind = type(data).__name__
        raise InputError(f"data.load returned a {kind}; it must return an expunge.Data")
    if not data.stream and len(data) == 0:
        raise InputError("data.load returned no examples; it must return at least 1")
    data.source = load
    return data


def load_training(
    made: JobFile[Job], table: TrainingTable | None
) -> tuple[dict[str, Any], Function | None]:
    """The loss, if one is named, and the function that trains, if there is one."""
    loss = dict[str, Any]()
    if table is None:
        return loss, None
    if table.loss is not None and ":" in table.loss:
        loss["loss"] = made.load("training.loss")
    elif table.loss is not None:
        loss["loss"] = None if table.loss == OWN_LOSS else find_loss(table.loss)
    if table.function is not None:
        return loss, made.load("training.function")
    if not table.options:
        return loss, None
    return loss, expunge.Training(**table.options, progress=True, **loss)
