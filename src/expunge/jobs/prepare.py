"""A job made ready to run: its model, data, loss and recipe, all checked, nothing written."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.certificates.certificate import Certificate
from expunge.certificates.identifiers import opens
from expunge.certificates.record import RunRecord
from expunge.certificates.signing import sign_bytes
from expunge.errors import CertificateError, InputError
from expunge.jobs.data import Part, Parts, make_loader, part_data, read_ids
from expunge.jobs.jobfile import JobFile
from expunge.jobs.loading import (
    build_model,
    explaining,
    load_function,
    match_names,
    put_weights,
    read_weights,
)
from expunge.jobs.methods import Settled, settle
from expunge.noisy.model import copy_subject
from expunge.processes.weights import hash_weights
from expunge.training.batches import move_batch
from expunge.training.losses import LossFunction, compute_loss, find_loss
from expunge.training.randomness import untouched_random

LOG = logging.getLogger("expunge")


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything a run needs. ``parameters`` counts the certified ones; ``needed_bytes`` is what a
    run may write: two checkpoints (the old one stays until the new one is complete) and the model.
    """

    model: nn.Module
    centre: dict[str, Tensor] | None
    parts: Parts
    loss_fn: LossFunction
    settled: Settled
    parent: Certificate | None
    callback: Callable[[dict[str, Any]], object] | None
    parameters: int
    needed_bytes: int


def prepare(made: JobFile) -> Prepared:
    """Import, build, load and check all that a job names. Call inside ``importing_from``."""
    job = made.job
    build, load, callback = _import_functions(made)
    with explaining("data.load failed"):
        loaded = load()
    parts = part_data(loaded, _read_forget(made), _read_forgotten(made))
    _check_earlier(made, parts)
    model = build_model(build)
    given = read_weights(made.locate(job.model.weights), "model.weights")
    kept = put_weights(model, given, "model.weights")
    if kept:
        LOG.info("%d frozen tensors are not in model.weights and stay as built", len(kept))
    if job.model.device is not None:
        with explaining(f"model.device is {job.model.device!r}, which cannot be used"):
            model.to(job.model.device)
    centre = _read_centre(made, model)
    loss_fn = _find_loss(made, parts.retain)
    subject = copy_subject(
        model, centre, buffers=job.model.buffers, public_buffers=job.model.public_buffers
    )
    _try_batch(subject.model, parts.retain, loss_fn, min(job.method.batch_size, 2))
    parent = _read_parent(made, model)
    if job.output.sign is not None:
        sign_bytes(b"", made.locate(job.output.sign))
    return Prepared(
        model=model,
        centre=centre,
        parts=parts,
        loss_fn=loss_fn,
        settled=settle(job, subject.size),
        parent=parent,
        callback=callback,
        parameters=subject.size,
        needed_bytes=16 * subject.size + sum(t.nbytes for t in model.state_dict().values()),
    )


def digest_ids(ids: Iterable[str]) -> str:
    """One hash for a set of identifiers, for files that are private anyway.

    >>> digest_ids(["b", "a"]) == digest_ids(["a", "b"])
    True
    """
    return hashlib.sha256("\0".join(sorted(ids)).encode("utf-8", "surrogatepass")).hexdigest()


def _import_functions(
    made: JobFile,
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[dict[str, Any]], object] | None]:
    """All functions of the job, or one error that names all that cannot be had."""
    job, errors = made.job, list[str]()
    found: dict[str, Callable[..., Any]] = {}
    places = {
        "model.build": job.model.build,
        "data.load": job.data.load,
        "output.callback": job.output.callback,
    }
    for field, place in places.items():
        if place is not None:
            try:
                found[field] = load_function(field, place, made.folder)
            except InputError as error:
                errors.append(str(error))
    if errors:
        raise InputError(f"{made.path}: " + "; ".join(errors))
    return found["model.build"], found["data.load"], found.get("output.callback")


def _read_forget(made: JobFile) -> list[str]:
    data = made.job.data
    return read_ids(made.locate(data.forget), data.column)


def _read_forgotten(made: JobFile) -> list[str]:
    """The identifiers of earlier requests."""
    return [name for names in _read_lists(made) for name in names]


def _read_lists(made: JobFile) -> list[list[str]]:
    data = made.job.data
    return [
        read_ids(made.locate(name), None if Path(name).suffix == ".txt" else data.column)
        for name in data.forgotten
    ]


def _check_earlier(made: JobFile, parts: Parts) -> None:
    """Earlier requests stay out of the retained data, as far as the parent's record can tell.

    The parent's retained set is this run's two sets together, unless data came or went since; its
    forget set must be among the lists.
    """
    parent = made.job.model.parent
    if parent is None:
        return
    path = made.locate(parent).with_name("record.json")
    if not path.is_file():
        LOG.warning("there is no %s: data.forgotten is taken on trust", path)
        return
    record = RunRecord.load(path)
    lists = _read_lists(made)
    if record.forget is not None and not any(opens(record.forget, set(n)) for n in lists):
        raise InputError(
            f"none of data.forgotten is the list that the parent {parent} forgot; name it, so that "
            "it stays out of the retained data"
        )
    now = (*parts.retain.ids, *parts.forget.ids)
    known = record.retain is not None and opens(record.retain, now)
    if not known and not made.job.data.changed:
        raise InputError(
            f"the data are not what the parent {parent} retained; name the lists of all earlier "
            "requests in data.forgotten, or set data.changed = true if samples came or went since"
        )


def _read_centre(made: JobFile, model: nn.Module) -> dict[str, Tensor] | None:
    centre = made.job.centre
    if centre is None:
        return None
    given = read_weights(made.locate(centre.weights), "centre.weights")
    found = match_names(model, given)
    old = dict(model.named_parameters())
    same = [name for name, p in old.items() if p.requires_grad and name in found]
    if same and all(torch.equal(found[name].to(old[name]), old[name]) for name in same):
        raise InputError(
            "centre.weights holds the trained weights themselves; the centre must be public and "
            "must never have seen the data to forget"
        )
    return found


def _find_loss(made: JobFile, retain: Part) -> LossFunction:
    name = made.job.model.loss
    with explaining("data.load: a sample of train cannot be read"):
        sample = retain.dataset[retain.positions[0]] if retain.tensors is None else None
    found = find_loss(name, sample)
    if found is None:
        return load_function("model.loss", name or "", made.folder)
    return found


def _try_batch(model: nn.Module, retain: Part, loss_fn: LossFunction, count: int) -> None:
    """One small batch through a copy of the model, so that a mismatch is found before any work."""
    device = next(p.device for p in model.parameters())
    what = "the model and its loss cannot be run on retained data"
    with explaining(what), untouched_random(), torch.no_grad():
        batch = next(iter(make_loader(retain.first(count), count)))
        model.eval()
        compute_loss(model, move_batch(batch, device), loss_fn)


def _read_parent(made: JobFile, model: nn.Module) -> Certificate | None:
    name = made.job.model.parent
    if name is None:
        return None
    try:
        parent = Certificate.load(made.locate(name))
    except CertificateError as error:
        raise InputError(f"model.parent is {name!r}, which cannot be used: {error}") from None
    if hash_weights(model.state_dict()) != parent.weights.after:
        raise InputError(
            f"model.parent is {name!r}, which is not the certificate of the weights in "
            f"{made.job.model.weights}"
        )
    return parent
