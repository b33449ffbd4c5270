"""What every record says beside the method: the module it ran on, the machine and the versions."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
from torch import Tensor

from expunge.record import FineTuning
from expunge.subject import Subject, select_tensors
from expunge.training import TrainingLog
from expunge.unlearning import commit_disjoint, list_versions
from expunge.weights import hash_weights

NO_NOISE = {"source": "none", "generator": None, "releasable": False, "seed": None}


def describe_subject(subject: Subject) -> dict[str, Any]:
    """The fields of a :class:`~expunge.record.RunRecord` that follow from the module that ran."""
    public, plan = select_tensors(subject.model, subject.frozen), subject.buffers
    return {
        "parameters": subject.size,
        "device": str(subject.device),
        "dtype": subject.dtype,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "frozen": hash_weights(public) if public else None,
        "frozen_names": subject.frozen,
        "buffers": "reset" if plan.reset else "frozen" if plan.public else "none",
        "buffer_names": plan.reset or plan.public,
        "versions": list_versions(),
    }


def describe_training(log: TrainingLog, ids: Any, forget_ids: Any = None) -> FineTuning:
    """A training on retained data as a record keeps it, with a commitment to its identifiers."""
    _, committed = commit_disjoint(forget_ids, ids)
    return FineTuning(
        optimizer=log.optimizer,
        epochs=log.epochs,
        steps=log.steps,
        learning_rate=log.learning_rate,
        batch_size=log.batch_size,
        schedule=log.schedule,
        gradient_evaluations=log.gradient_evaluations,
        data=committed,
    )


def read_names(ids: Any) -> tuple[str, ...] | None:
    """Identifiers as text, whatever holds them; None if there are none.

    >>> import torch
    >>> read_names(torch.arange(2)), read_names(np.array(["a"])), read_names(None)
    (('0', '1'), ('a',), None)
    """
    if ids is None:
        return None
    return tuple(map(str, ids.tolist() if isinstance(ids, np.ndarray | Tensor) else ids))
