"""A job made ready to run: its model, data, loss and recipe, all checked, nothing written.

A dry run stops here, and tells recipe, cost, and what the certificate would say.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from expunge.accounting.guarantee import guarantee_to_dict
from expunge.certificates.certificate import Certificate
from expunge.certificates.identifiers import opens
from expunge.certificates.record import RunRecord
from expunge.certificates.signing import sign_bytes
from expunge.errors import CertificateError, InputError
from expunge.jobs.data import Split, Splits, make_loader, read_ids, split_data
from expunge.jobs.directory import check_output
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.loading import (
    build_model,
    explaining,
    importing_from,
    load_function,
    match_names,
    put_weights,
    read_metadata,
    read_weights,
)
from expunge.jobs.methods import Settled, settle
from expunge.noisy.model import Public, copy_model, list_uncertified
from expunge.noisy.noise import SeededNoise
from expunge.processes.weights import hash_weights, list_tensors
from expunge.recipes import OutputPerturbation
from expunge.training.batches import move_batch
from expunge.training.losses import LossFunction, compute_loss, find_loss
from expunge.training.randomness import untouched_random

LOG = logging.getLogger("expunge")
MOST_DRAWN = 1_000_000


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything a run needs. ``parameters`` counts the certified ones; ``needed_bytes`` is what a
    run may write: two checkpoints (the old one stays until the new one is complete) and the model.
    """

    model: nn.Module
    centre: dict[str, Tensor] | None
    public: Public | None
    splits: Splits
    loss_fn: LossFunction
    settled: Settled
    parent: Certificate | None
    callback: Callable[[dict[str, Any]], object] | None
    parameters: int
    needed_bytes: int


def prepare(made: JobFile) -> Prepared:
    """Import, build, load and check all that a job names. Call inside ``importing_from``."""
    job = made.job
    functions = _import_functions(made)
    forget, earlier = read_ids(made.locate(job.data.forget), job.data.column), _read_earlier(made)
    with explaining("data.load failed"):
        splits = split_data(functions["data.load"](), forget, itertools.chain(*earlier))
    model = build_model(functions["model.build"])
    public = _find_public(made, model)
    kept = put_weights(
        model, read_weights(made.locate(job.model.weights), "model.weights"), "model.weights"
    )
    if kept:
        LOG.info("%d frozen tensors are not in model.weights and stay as built", len(kept))
    if job.model.device is not None:
        with explaining(f"model.device is {job.model.device!r}, which cannot be used"):
            model.to(job.model.device)
    centre = None
    if job.centre is not None:
        found = read_weights(made.locate(job.centre.weights), "centre.weights")
        centre = match_names(model, found)
    loss_fn = _find_loss(made, splits.retain)
    _check_earlier(made, splits, earlier)
    copied = copy_model(model, centre, buffers=job.model.buffers, public=public)
    _try_batch(copied.model, splits.retain, loss_fn, min(job.method.batch_size, 2))
    parent = _read_parent(made, model)
    if job.output.sign is not None:
        sign_bytes(b"", made.locate(job.output.sign))
    return Prepared(
        model=model,
        centre=centre,
        public=public,
        splits=splits,
        loss_fn=loss_fn,
        settled=settle(job.method, job.target, copied.size),
        parent=parent,
        callback=functions.get("output.callback"),
        parameters=copied.size,
        needed_bytes=16 * copied.size + sum(t.nbytes for t in list_tensors(model).values()),
    )


@dataclass(frozen=True)
class Preview:
    """``gradient_evaluations`` counts examples in the noisy steps; ``seconds`` is an estimate from
    timing one gradient and one draw of noise on this machine."""

    directory: Path
    settled: Settled
    parameters: int
    retain: int
    forget: int
    steps: int
    gradient_evaluations: int
    finetune_gradient_evaluations: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """One flat object, as ``--json`` prints it."""
        plain = {name: value for name, value in vars(self).items() if name != "settled"}
        plain |= {"directory": str(self.directory), "calibrated": self.settled.calibrated}
        return plain | guarantee_to_dict(self.settled.recipe, self.settled.guarantee)


def preview_job(path: str | Path, *, out: str | Path | None = None) -> Preview:
    """Read, build and check everything, time a step, and write nothing.

    >>> preview_job("/nowhere/job.toml")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: job file /nowhere/job.toml cannot be read: No such file or directory
    """
    made = read_job(path)
    target = made.find_target(out)
    check_output(target, resume=False)
    with importing_from(made.folder):
        ready = prepare(made)
        check_output(target, False, ready.needed_bytes)
        with explaining("a step cannot be timed"):
            gradient, noise = _time_step(made, ready)
    kept, recipe = len(ready.splits.retain), ready.settled.recipe
    batch = min(made.job.method.batch_size, kept)
    steps = 0 if isinstance(recipe, OutputPerturbation) else recipe.steps
    tuning = 0 if made.job.finetune is None else math.ceil(made.job.finetune.epochs * kept)
    seconds = (steps * batch + tuning) / batch * gradient + max(steps, 1) * noise
    return Preview(
        directory=target,
        settled=ready.settled,
        parameters=ready.parameters,
        retain=kept,
        forget=len(ready.splits.forget),
        steps=steps,
        gradient_evaluations=steps * batch,
        finetune_gradient_evaluations=tuning,
        seconds=seconds * (2 if made.job.evaluation.control else 1),
    )


def _time_step(made: JobFile, ready: Prepared) -> tuple[float, float]:
    """Seconds of one minibatch gradient and of one draw of noise over all certified parameters."""
    job = made.job
    loader = make_loader(ready.splits.retain, job.method.batch_size, seed=0)
    copied = copy_model(ready.model, ready.centre, buffers=job.model.buffers, public=ready.public)
    gradient = math.inf
    with untouched_random():
        batch = move_batch(next(iter(loader)), copied.device)
        for _ in range(2):  # the first one is slow
            start = time.perf_counter()
            compute_loss(copied.model, batch, ready.loss_fn).backward()
            gradient = min(gradient, time.perf_counter() - start)
    drawn = np.empty(min(ready.parameters, MOST_DRAWN))
    start = time.perf_counter()
    SeededNoise(0).begin().draw(drawn, step=0, position=0, std=1e6)
    return gradient, (time.perf_counter() - start) * ready.parameters / len(drawn)


def _import_functions(made: JobFile) -> dict[str, Callable[..., Any]]:
    """All functions of the job by their keys, or one error that names all that cannot be had."""
    job, found, errors = made.job, dict[str, Callable[..., Any]](), list[str]()
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
    return found


def _read_earlier(made: JobFile) -> list[list[str]]:
    """The identifiers of each earlier request."""
    data = made.job.data
    return [
        read_ids(made.locate(name), None if Path(name).suffix == ".txt" else data.column)
        for name in data.forgotten
    ]


def _check_earlier(made: JobFile, splits: Splits, earlier: list[list[str]]) -> None:
    """Earlier requests stay out of the retained data, as the parent's record tells.

    Weights that a certificate was written for need it as their parent. The parent's forget set must
    be among the lists, and its retained set is this run's two sets together, unless data came or
    went since.
    """
    model = made.job.model
    if model.parent is None:
        if "expunge.certificate" in read_metadata(made.locate(model.weights)):
            raise InputError(
                f"model.weights is {model.weights!r}, which was unlearned itself; name its "
                "certificate in model.parent, and the lists of the earlier requests in "
                "data.forgotten, so that they stay forgotten"
            )
        return
    path = made.locate(model.parent).with_name("record.json")
    if not path.is_file():
        raise InputError(
            f"model.parent is {model.parent!r}, and there is no {path.name} beside it; only with "
            "the parent's record can data.forgotten be checked"
        )
    record = RunRecord.load(path)
    forgotten = record.forget
    if forgotten is not None and not any(opens(forgotten, names) for names in earlier):
        raise InputError(
            f"none of data.forgotten is the list that the parent {model.parent} forgot; name it, "
            "so that it stays out of the retained data"
        )
    now = {*splits.retain.ids, *splits.forget.ids}
    known = record.retain is not None and opens(record.retain, now)
    if not known and not made.job.data.changed:
        raise InputError(
            f"the data are not what the parent {model.parent} retained; name the lists of all "
            "earlier requests in data.forgotten, or set data.changed = true if samples came or "
            "went since"
        )


def _find_public(made: JobFile, model: nn.Module) -> Public | None:
    """What the tensors that are not certified are compared with, or their names.

    Call it with the model as built, before any weights are put into it.
    """
    given = made.job.model.public
    if given == "build":
        return {name: t.detach().clone() for name, t in list_uncertified(model).items()}
    if isinstance(given, str) and given.endswith(".safetensors"):
        return made.locate(given)
    return read_weights(made.locate(given), "model.public") if isinstance(given, str) else given


def _find_loss(made: JobFile, retain: Split) -> LossFunction:
    name = made.job.model.loss
    with explaining("data.load: a sample of train cannot be read"):
        sample = retain.dataset[retain.positions[0]] if retain.tensors is None else None
    return find_loss(name, sample) or load_function("model.loss", name or "", made.folder)


def _try_batch(model: nn.Module, retain: Split, loss_fn: LossFunction, count: int) -> None:
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
    if hash_weights(list_tensors(model)) != parent.weights.after:
        raise InputError(
            f"model.parent is {name!r}, which is not the certificate of the weights in "
            f"{made.job.model.weights}"
        )
    return parent
