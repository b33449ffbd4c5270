"""Constituents trained one after the other, by several processes, or by a function's workers.

A worker outlives a process that is killed, and would write checkpoints of slices that have changed
since. So workers hold the folder's ``training`` lock together, and slices change only while nobody
does (:meth:`Folder.changing`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pickle import PicklingError
from typing import Any

from expunge.errors import InputError, RunError
from expunge.forgettable.constituents import Plan, train_constituent
from expunge.forgettable.folders import Folder, hold_training
from expunge.progress import show_progress

Trained = tuple[int, int]
Workers = Callable[[Plan, Mapping[str, Any], Folder, Sequence[int]], Sequence[Trained]]


def train_all(
    plan: Plan,
    settings: Mapping[str, Any],
    folder: Folder,
    workers: int | Workers,
    progress: bool = False,
) -> dict[int, Trained]:
    """Make every checkpoint that is missing or stale.

    Returns {shard: (first stage that was trained, examples that went through training)}.
    """
    shards, call = range(plan.assignment.shards), (plan, settings, folder)
    try:
        if callable(workers):
            found = workers(*call, shards)
        elif workers == 1:
            shown = show_progress(shards, len(shards), "shards", progress)
            found = list[Trained]()
            for shard in shown:
                tested = any(first for first, _ in found)
                found.append(train_constituent(*call, shard, tested))
        else:
            with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
                waiting = [pool.submit(train_beside, *call, shard) for shard in shards]
                found = [task.result() for task in waiting]
    except OSError as error:
        raise RunError(
            f"{folder.path} could not be written ({error.strerror}); what was asked for "
            "is kept: call again"
        ) from None
    except (AttributeError, TypeError, PicklingError) as error:
        if "pickle" not in str(error):
            raise
        raise InputError.of(
            "workers", workers, "1 unless build and all functions can be imported by name"
        ) from None
    return {shard: told for shard, told in enumerate(found) if told[0]}


def train_beside(plan: Plan, settings: Mapping[str, Any], folder: Folder, shard: int) -> Trained:
    """What a worker process runs."""
    with hold_training(folder.path, changing=False):
        return train_constituent(plan, settings, folder, shard)
