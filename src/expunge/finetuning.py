"""Several runs fine-tuned at once, each with its own record.

What :func:`expunge.training.fine_tune` is to one run, for the seeds and arms of an experiment or
for many requests on one small network: all of them step together where that is faster
(:mod:`expunge.ensembles`), and every run gets the result it would have got alone, up to rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from expunge.ensembles import train_many
from expunge.errors import InputError
from expunge.record import Commitment
from expunge.training import InMemory, write_fine_tuning
from expunge.unlearning import Run, commit_disjoint


def fine_tune_many(
    runs: Sequence[Run],
    data: InMemory | Sequence[InMemory],
    *,
    seeds: Sequence[int],
    forget_ids: Sequence[Iterable[str | int] | None] | None = None,
    **options: Any,
) -> list[Run]:
    """Train a copy of every run's model on retained data and write it into the run's record.

    ``data`` is for all runs, or one set for each; ``options`` are those of
    :func:`expunge.ensembles.train_many`. The identifiers of each set are committed to, and must
    not meet the run's ``forget_ids`` when both are known. Runs that share a set share the
    commitment to it.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> from expunge import OutputPerturbation
    >>> from expunge.unlearning import unlearn
    >>> toy = SimpleNamespace(inputs=torch.eye(2), targets=torch.tensor([0, 1]))
    >>> recipe = OutputPerturbation(start_clip=1.0, noise_std=4.0)
    >>> runs = [unlearn(torch.nn.Linear(2, 2), [], recipe) for _ in range(2)]
    >>> tuned = fine_tune_many(runs, toy, seeds=[0, 1], epochs=3, learning_rate=0.1)
    >>> [run.record.finetune.steps for run in tuned]
    [3, 3]
    """
    if any(run.record.finetune is not None for run in runs):
        raise InputError("a run was fine-tuned already; fine-tune the runs that unlearn returned")
    sets = [data] * len(runs) if isinstance(data, InMemory) else list(data)
    known = [None] * len(runs) if forget_ids is None else list(forget_ids)
    for name, given in (("data sets", sets), ("forget_ids", known)):
        if len(given) != len(runs):
            raise InputError.of(f"number of {name}", len(given), f"{len(runs)}, as many as runs")
    retained = _commit_each(known, sets)
    models = [copy.deepcopy(run.model) for run in runs]
    logs = train_many(models, sets, seeds=seeds, **options)
    each = zip(runs, models, logs, retained, strict=True)
    return [write_fine_tuning(*given) for given in each]


def _commit_each(
    forgotten: Sequence[Iterable[str | int] | None], sets: Sequence[InMemory]
) -> list[Commitment | None]:
    """A commitment to the identifiers of each set; one for a set that is given several times."""
    found: dict[int, Commitment | None] = {}
    for ids, data in zip(forgotten, sets, strict=True):
        if ids is not None or id(data) not in found:
            found[id(data)] = commit_disjoint(ids, getattr(data, "ids", None))[1]
    return [found[id(data)] for data in sets]
