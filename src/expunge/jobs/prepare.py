"""A job made ready to run: model, data, loss, start and recipe, all checked, nothing written."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.baselines.retraining import DrawnStart, Initialise, PublicStart, start_afresh
from expunge.certificates.certificate import Certificate
from expunge.certificates.identifiers import opens
from expunge.certificates.record import RunRecord
from expunge.certificates.signing import sign_bytes
from expunge.errors import CertificateError, InputError, UnlearningError
from expunge.jobs.checkpoints import find_file, match_names, read_metadata, read_weights
from expunge.jobs.data import Split, Splits, make_loader, split_data
from expunge.jobs.jobfile import JobFile
from expunge.jobs.lists import read_ids
from expunge.jobs.loading import (
    build_model,
    explaining,
    load_function,
    put_weights,
)
from expunge.jobs.methods import Settled, choose_route, find_public_weights, settle
from expunge.jobs.tables import EXACT, CentreTable
from expunge.noisy.centre import PublicCentre, choose_scale, find_centre
from expunge.noisy.fresh import PUBLIC_SEED, Initialisation, find_fixed, take_weights
from expunge.noisy.model import (
    CertifiedModel,
    Public,
    copy_model,
    list_uncertified,
    reset_statistics,
)
from expunge.processes.adapters import check_adapters
from expunge.processes.weights import hash_weights, list_tensors
from expunge.training.batches import move_batch
from expunge.training.losses import LossFunction, compute_loss, find_loss
from expunge.training.randomness import seeded_random, untouched_random

LOG = logging.getLogger("expunge")
_REDRAW = (
    "draw it from torch's global generator, or restart from public weights "
    "(method.name = 'restart', [centre] weights)"
)


@dataclass(frozen=True, eq=False)
class Prepared:
    """Everything a run needs. ``parameters`` counts the certified ones; ``needed_bytes`` is what a
    run may write: two checkpoints (the old one stays until the new one is complete) and the model.
    ``start`` is where retraining begins, with the hash ``start_hash``; a noisy run has none.
    ``frozen``: the model is a frozen, public network with a head at its end.
    """

    model: nn.Module
    start: Initialise | None
    centre: PublicCentre | None
    public: Public | None
    splits: Splits
    loss_fn: LossFunction
    settled: Settled
    parent: Certificate | None
    callback: Callable[[dict[str, Any]], object] | None
    parameters: int
    needed_bytes: int
    start_hash: str | None = None
    frozen: bool = False


def prepare(made: JobFile) -> Prepared:
    """Import, build, load and check all that a job names. Call inside ``importing_from``."""
    job = made.job
    functions = _import_functions(made)
    forget, earlier = read_ids(made.locate(job.data.forget), job.data.column), _read_earlier(made)
    with explaining("data.load failed"):
        splits = split_data(functions["data.load"](), forget, itertools.chain(*earlier))
    model = build_model(functions["model.build"])
    check_adapters(model)
    public = _find_public(made, model)
    kept = put_weights(
        model, read_weights(made.locate(job.model.weights), "model.weights"), "model.weights"
    )
    if kept:
        LOG.info("%d frozen tensors are not in model.weights and stay as built", len(kept))
    if job.model.device is not None:
        with explaining(f"model.device is {job.model.device!r}, which cannot be used"):
            model.to(job.model.device)
    loss_fn, exact = _find_loss(made, splits.retain), choose_route(job) in EXACT
    _check_earlier(made, splits, earlier)
    policy = "reset" if exact else job.model.buffers
    copied = copy_model(model, buffers=policy, public=public)
    centre = None if exact else _find_centre(made, copied, functions["model.build"])
    scale = None if centre is None else choose_scale(centre.tensors)
    start = _find_start(made, copied, functions["model.build"]) if exact else None
    if start is not None:
        reset_statistics(copied)
        start_afresh(model, copied, start)
    held = hash_weights(list_tensors(copied.model)) if exact else None
    _try_batch(copied.model, splits.retain, loss_fn, min(job.method.batch_size, 2))
    parent = _read_parent(made, model)
    if job.output.sign is not None:
        sign_bytes(b"", made.locate(job.output.sign))
    return Prepared(
        model=model,
        start=start,
        centre=centre,
        public=public,
        splits=splits,
        loss_fn=loss_fn,
        settled=settle(job.method, job.target, copied.size, scale),
        parent=parent,
        callback=functions.get("output.callback"),
        parameters=copied.size,
        needed_bytes=24 * copied.size + sum(t.nbytes for t in list_tensors(model).values()),
        start_hash=held,
        frozen=public is not None and _ends_in_head(model),
    )


def _ends_in_head(model: nn.Module) -> bool:
    """Whether all that is frozen comes before all that is trained; an adapter lies in between.

    >>> _ends_in_head(nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2)))
    True
    """
    trained = [p.requires_grad for p in model.parameters()]
    return trained == sorted(trained) and not all(trained)


def _find_start(made: JobFile, copied: CertifiedModel, build: Callable[[], Any]) -> Initialise:
    """Where retraining begins: what ``build()`` draws under the public seed, or public weights.

    ``build()`` is called again: what differs from call to call, or is the same under another seed,
    is drawn from no public seed. Of public weights, what they have not is as ``build()`` draws it:
    a new head on a public network.
    """
    seed, drawn = made.job.method.seed or 0, list[nn.Module]()
    for number in (seed, seed, seed + 1):
        with seeded_random(number):
            drawn.append(build_model(build))
    fresh, again, other = (dict(m.named_parameters(remove_duplicate=False)) for m in drawn)
    for name, p in fresh.items():
        if name not in again or not torch.equal(p, again[name]):
            raise InputError(
                f"model.build draws another {name} when it is called again under seed {seed}; it "
                "must draw from torch's global generator alone, so that anyone can draw it again"
            )
    file = find_public_weights(made.job)
    if choose_route(made.job) == "retraining" or file is None:
        _check_drawn(copied.certified, fresh, other)
        weights = take_weights(copied.certified, lambda: drawn[0], "model.build", _REDRAW)
        return DrawnStart(weights)
    found = _read_public(made, file, "centre.weights")
    found = match_names(copied.model, found, "centre.weights")
    names = dict[int, list[str]]()
    for name, p in copied.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    groups = [names[id(p)] for p in copied.certified.values()]
    lacking = [group[0] for group in groups if not found.keys() & set(group)]
    if len(lacking) == len(groups):
        raise InputError(
            f"centre.weights is {file!r}, which has none of the model's trainable parameters, such "
            f"as {lacking[0]}"
        )
    told = Path(file).name
    _check_drawn(lacking, fresh, other)
    if lacking:
        told += f" (without {', '.join(lacking[:3])}{' …' if len(lacking) > 3 else ''}: as built)"
    return PublicStart(found | {name: fresh[name].detach() for name in lacking}, told)


def _check_drawn(
    names: Iterable[str], fresh: Mapping[str, Tensor], other: Mapping[str, Tensor]
) -> None:
    """Refuse what is the same under every seed, constants aside: it came from somewhere else."""
    known = [n for n in names if n in fresh and n in other and len(fresh[n].unique()) > 1]
    if fixed := find_fixed({n: fresh[n] for n in known}, {n: other[n] for n in known}):
        raise InputError(
            f"model.build gives the same {fixed[0]} under every seed, or one that is alike, so the "
            f"old model could be in it; {_REDRAW}"
        )


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
    if not isinstance(given, str):
        return given
    path = find_file(made.locate(given), "model.public")
    tensors = _read_public(made, given, "model.public")
    named = match_names(model, tensors, "model.public")
    return path if path.suffix == ".safetensors" and named.keys() == tensors.keys() else named


def _read_public(made: JobFile, file: str, field: str) -> dict[str, Tensor]:
    """Weights that never saw the data: the release of a run did, since it was trained on them."""
    path = made.locate(file)
    found = read_weights(path, field)
    if "expunge.certificate" in read_metadata(path, field):
        raise InputError(
            f"{field} is {file!r}, the release of an earlier request: it was trained on the data "
            "that were kept then, and who is to be forgotten now may be among them; name weights "
            "from before the data arrived"
        )
    return found


def _find_centre(made: JobFile, copied: CertifiedModel, build: Callable[[], Any]) -> PublicCentre:
    """What ``build()`` draws under the public seed, unless the job names another centre."""
    table = made.job.centre or CentreTable.model_validate({})
    if table.weights is not None:
        found = _read_public(made, table.weights, "centre.weights")
        return find_centre(copied, match_names(copied.model, found, "centre.weights"))
    if table.kind == "zero":
        return find_centre(copied, "zero")
    seed = PUBLIC_SEED if table.seed is None else table.seed
    start = Initialisation(seed, functools.partial(build_model, build))
    try:
        return find_centre(copied, start)
    except UnlearningError as error:
        raise InputError(
            f"model.build cannot give a fresh centre: {error}; or name public weights in "
            "[centre] weights, or say [centre] kind = 'zero'"
        ) from None


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
