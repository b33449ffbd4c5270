"""One network that answers as an ensemble does: post-processing of it on retained examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax

from expunge.forgettable.slices import Examples
from expunge.training.randomness import seeded_random
from expunge.training.train import TrainingLog, check_trained, train


def train_student(
    student: nn.Module, ensemble: nn.Module, held: Examples, options: Mapping[str, Any]
) -> TrainingLog:
    """Train ``student`` on the held examples towards the ensemble's probabilities."""
    prepare = options.get("prepare")
    given: dict[str, Any] = dict(options) | {"loss_fn": _diverge, "compile": False}
    with seeded_random(options.get("seed", 0), options):
        with torch.no_grad():
            batches = (held.inputs if prepare is None else prepare(held.inputs)).split(1024)
            answers = torch.cat([log_softmax(ensemble(x), dim=-1) for x in batches])
        log = train(student, replace(held, targets=answers), **given)
    check_trained(student, log, "distillation")
    return log


def _diverge(scores: Tensor, answers: Tensor) -> Tensor:
    """KL(ensemble ‖ student), averaged over examples."""
    return kl_div(log_softmax(scores, dim=-1), answers, reduction="batchmean", log_target=True)
