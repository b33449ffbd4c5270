"""``expunge plan --pilot``: what some numbers of shards and slices cost in accuracy.

A choice made by looking at people's data depends on them, and no retraining takes it back (THEORY,
section 12). So a pilot runs on examples that are never learned: ``data.pilot`` of the job names a
function that returns public ones, or those of people who were set apart. Whoever is in both is
refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from expunge.errors import InputError
from expunge.jobs.data import find_tensors, open_data
from expunge.jobs.jobfile import HeadJobFile
from expunge.jobs.loading import explaining, load_function
from expunge.jobs.shards import make_shards
from expunge.jobs.tables import ShardsJob
from expunge.progress import show_progress


@dataclass(frozen=True)
class Price:
    """Test accuracy on the pilot's examples, in per cent, with its standard error.

    One shard of one slice is the network trained whole, by the same code.
    """

    shards: int
    slices: int
    test: float
    error: float


@dataclass(frozen=True)
class Pilot:
    """What was measured on ``examples`` of the pilot; the job has ``of`` examples to learn."""

    examples: int
    of: int
    prices: tuple[Price, ...]


def run_pilot(
    made: HeadJobFile,
    job: ShardsJob,
    learned: list[str],
    sizes: Iterable[tuple[int, int]],
    progress: bool = False,
) -> Pilot:
    """Train on the pilot's examples, whole and in every size. Call inside ``importing_from``.

    ``learned`` are the identifiers of the examples that the job learns.
    """
    if job.data.pilot is None:
        raise InputError(
            "data.pilot is missing, which --pilot needs: name a function that returns examples "
            "like those of data.load, public or of people who are never learned; shards and "
            "slices that were chosen by people's data would depend on them for ever"
        )
    with explaining("data.pilot failed"):
        loaded = load_function("data.pilot", job.data.pilot, made.folder)()
    train, ids, test, _ = open_data(loaded, "data.pilot")
    both = sorted(set(ids).intersection(learned))
    if both:
        raise InputError(
            f"data.pilot returned {both[0]!r} ({len(both)} in all), which data.load returns too; "
            "a pilot must not see whom the job learns"
        )
    pair = None if test is None else find_tensors(test)
    if pair is None or pair[1].is_floating_point() or len(pair[1]) == 0:
        raise InputError("data.pilot must return 'test', two tensors of which one holds classes")
    wanted = list(dict.fromkeys([(1, 1), *sizes]))
    prices = [
        _measure(made, job, wanted[at], (find_tensors(train) or train, ids), pair)
        for at in show_progress(range(len(wanted)), len(wanted), "sizes", progress)
    ]
    return Pilot(len(ids), len(learned), tuple(prices))


def _measure(
    made: HeadJobFile,
    job: ShardsJob,
    size: tuple[int, int],
    learn: tuple[Any, list[str]],
    test: tuple[torch.Tensor, torch.Tensor],
) -> Price:
    shards, slices = size
    method = job.method.model_copy(update={"shards": shards, "slices": slices})
    with TemporaryDirectory(prefix="expunge-pilot-") as folder:
        state = Path(folder) / "state"
        ensemble = make_shards(made, job.model_copy(update={"method": method}), state)
        ensemble.learn(*learn)
        model = ensemble.release().model
    with torch.no_grad():
        right = float((model(test[0]).argmax(-1).cpu() == test[1].cpu()).double().mean())
    error = math.sqrt(right * (1 - right) / len(test[1]))
    return Price(shards, slices, round(100 * right, 3), round(100 * error, 3))
