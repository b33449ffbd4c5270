"""The training of a job as its tables say: options, steps, and why it is the route."""

from __future__ import annotations

import math
from typing import Any

from expunge.jobs.data import Split, make_loader
from expunge.jobs.jobfile import JobFile
from expunge.jobs.methods import explain_route
from expunge.jobs.tables import FinetuneTable

TRAINING = "training.safetensors"


def list_options(table: FinetuneTable, seed: int) -> dict[str, Any]:
    """The options of :func:`expunge.train` that ``[finetune]`` names; the batches are a loader's.

    >>> table = FinetuneTable(epochs=2, learning_rate=0.1)
    >>> list_options(table, 3)["seed"], list_options(table, 3)["optimizer"]
    (3, 'sgd')
    """
    return table.model_dump(exclude={"batch_size"}) | {"seed": seed}


def count_training_steps(retain: Split, table: FinetuneTable) -> int:
    """The steps of the training of ``[finetune]``."""
    length = len(make_loader(retain, table.batch_size, seed=0))
    return math.ceil(table.epochs * length - 1e-9)


def tell_why(made: JobFile, frozen: bool) -> str:
    """Why the plan takes its route; of a frozen public network without a state, what would be
    better."""
    why = explain_route(made.job)
    if frozen and made.job.model.state is None:
        why += (
            " Its network is public and frozen: a head built to forget would answer requests in "
            "less than a second; expunge init DIR --head writes such a job."
        )
    return why
