"""What was measured during a job, as ``metrics.json`` has it (:mod:`expunge.metrics`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from expunge.certificate import Certificate
from expunge.jobtables import Job
from expunge.metrics import CENTRE, RETRAINING
from expunge.record import RunRecord

SETS = ("retain", "forget", "test")
MOST_POINTS = 200


def summarise(
    job: Job,
    record: RunRecord,
    certificate: Certificate,
    *,
    stages: Sequence[dict[str, Any]],
    losses: Sequence[float],
    counts: tuple[int, int],
    seconds: float,
) -> dict[str, Any]:
    """``stages`` as measured, without an arm for the run itself; ``counts``: kept and forgotten."""
    method, (kept, forgotten) = certificate.recipe.method, counts
    noisy = record.gradient_evaluations
    tuned = 0 if record.finetune is None else record.finetune.gradient_evaluations
    epochs = None if job.finetune is None else job.finetune.epochs
    arms = [
        {
            "arm": method,
            "epsilon": certificate.epsilon,
            "delta": certificate.delta,
            "gradient_evaluations": noisy + tuned,
            **_find_last(stages, None),
        }
    ]
    if job.evaluation.control:
        facts = {"epsilon": 0.0, "delta": 0.0, "gradient_evaluations": noisy + tuned}
        arms.append({"arm": CENTRE, **facts, **_find_last(stages, CENTRE)})
    if job.evaluation.retraining_epochs is not None:
        again = round(job.evaluation.retraining_epochs * kept)
        facts = {"epsilon": 0.0, "delta": 0.0, "gradient_evaluations": again}
        arms.append({"arm": RETRAINING, **facts})
    return {
        "title": job.output.title,
        "task": f"{job.model.build} on {job.data.load}",
        "stages": [{"arm": method, **row} for row in stages],
        "curves": draw_losses(losses, epochs or 0.0),
        "arms": arms if len(arms) > 1 else [],
        "cost": {
            "seconds": round(seconds, 3),
            "samples kept": kept,
            "samples forgotten": forgotten,
            "gradient evaluations, noisy steps": noisy,
            "gradient evaluations, fine-tuning": tuned,
        },
    }


def draw_losses(losses: Sequence[float], epochs: float) -> list[dict[str, Any]]:
    """The loss of fine-tuning by epoch, as at most 200 means of neighbouring steps.

    >>> draw_losses([3.0, 1.0], 1.0)[0]["x"], draw_losses([3.0] * 400, 1.0)[0]["x"][-1]
    ([0.5, 1.0], 1.0)
    """
    if not losses:
        return []
    width = -(-len(losses) // MOST_POINTS)
    groups = [losses[i : i + width] for i in range(0, len(losses), width)]
    ends = [min((i + 1) * width, len(losses)) for i in range(len(groups))]
    return [
        {
            "name": "fine-tuning",
            "x": [end / len(losses) * epochs for end in ends],
            "y": [sum(group) / len(group) for group in groups],
            "x_label": "epoch",
            "y_label": "training loss",
        }
    ]


def _find_last(stages: Sequence[dict[str, Any]], arm: str | None) -> dict[str, Any]:
    """The accuracies of an arm's last stage."""
    last = [row for row in stages if row.get("arm") == arm][-1]
    return {name: last.get(name) for name in SETS}
