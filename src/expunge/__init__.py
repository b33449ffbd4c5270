"""Certified machine unlearning for neural networks.

What ran is data (a recipe, a record); what it guarantees follows by a pure function; certificate,
report and audit are views of the two. Importing this package imports nothing heavy: each name is
loaded when it is first touched, torch only by the names that train.

>>> import expunge
>>> recipe = expunge.OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
>>> round(expunge.guarantee(recipe, delta=1e-5).epsilon, 4)
1.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from expunge.accounting.calibration import calibrate
    from expunge.accounting.guarantee import guarantee
    from expunge.accounting.planning import Candidate, Plan, plan
    from expunge.auditing.bounds import Audit
    from expunge.auditing.mechanism import audit_mechanism, audit_run
    from expunge.baselines.dpsgd import train_dpsgd
    from expunge.baselines.retraining import GaussianInitialisation, retrain
    from expunge.certificates.certificate import Certificate, certify
    from expunge.certificates.identifiers import commit, opens
    from expunge.certificates.record import Run, RunRecord
    from expunge.certificates.verification import verify, verify_chain
    from expunge.errors import (
        CalibrationError,
        CertificateError,
        ExpungeError,
        InputError,
        RunError,
        UnlearningError,
        VerificationError,
    )
    from expunge.forgettable.convex import ConvexHead
    from expunge.forgettable.features import Features
    from expunge.forgettable.loading import load, load_model
    from expunge.forgettable.shards import Shards
    from expunge.forgettable.statistics import StatisticsHead
    from expunge.forgettable.tangent import TangentFeatures
    from expunge.jobs.directory import write_run
    from expunge.jobs.many import Outcome, run_many
    from expunge.ledger.ledger import Ledger
    from expunge.noisy.centre import find_scale
    from expunge.noisy.checkpoint import Checkpoint
    from expunge.noisy.fresh import Initialisation
    from expunge.noisy.noise import SeededNoise, SystemNoise
    from expunge.noisy.run import unlearn
    from expunge.recipes import (
        Bound,
        ConvexHeadRecipe,
        ExactStatistics,
        Execution,
        GradientClipping,
        GroupDPSGD,
        Guarantee,
        ModelClipping,
        NoisyDescent,
        OutputPerturbation,
        Retraining,
        RewindToDelete,
        ShardedTraining,
    )
    from expunge.training.batches import Batches
    from expunge.training.evaluation import Evaluation, evaluate
    from expunge.training.many import fine_tune_many, train_many
    from expunge.training.train import TrainingLog, fine_tune, train

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Batches",
    "Bound",
    "CalibrationError",
    "Candidate",
    "Certificate",
    "CertificateError",
    "Checkpoint",
    "ConvexHead",
    "ConvexHeadRecipe",
    "Evaluation",
    "ExactStatistics",
    "Execution",
    "ExpungeError",
    "Features",
    "GaussianInitialisation",
    "GradientClipping",
    "GroupDPSGD",
    "Guarantee",
    "Initialisation",
    "InputError",
    "Ledger",
    "ModelClipping",
    "NoisyDescent",
    "Outcome",
    "OutputPerturbation",
    "Plan",
    "Retraining",
    "RewindToDelete",
    "Run",
    "RunError",
    "RunRecord",
    "SeededNoise",
    "ShardedTraining",
    "Shards",
    "StatisticsHead",
    "SystemNoise",
    "TangentFeatures",
    "TrainingLog",
    "UnlearningError",
    "VerificationError",
    "audit_mechanism",
    "audit_run",
    "calibrate",
    "certify",
    "commit",
    "evaluate",
    "find_scale",
    "fine_tune",
    "fine_tune_many",
    "guarantee",
    "load",
    "load_model",
    "opens",
    "plan",
    "retrain",
    "run_many",
    "train",
    "train_dpsgd",
    "train_many",
    "unlearn",
    "verify",
    "verify_chain",
    "write_run",
]

_HOMES = {
    "accounting.calibration": ("calibrate",),
    "accounting.guarantee": ("guarantee",),
    "accounting.planning": ("Candidate", "Plan", "plan"),
    "auditing.bounds": ("Audit",),
    "auditing.mechanism": ("audit_mechanism", "audit_run"),
    "baselines.dpsgd": ("train_dpsgd",),
    "baselines.retraining": ("GaussianInitialisation", "retrain"),
    "certificates.certificate": ("Certificate", "certify"),
    "certificates.identifiers": ("commit", "opens"),
    "certificates.record": ("Run", "RunRecord"),
    "certificates.verification": ("verify", "verify_chain"),
    "errors": (
        "CalibrationError",
        "CertificateError",
        "ExpungeError",
        "InputError",
        "RunError",
        "UnlearningError",
        "VerificationError",
    ),
    "forgettable.convex": ("ConvexHead",),
    "forgettable.features": ("Features",),
    "forgettable.loading": ("load", "load_model"),
    "forgettable.shards": ("Shards",),
    "forgettable.statistics": ("StatisticsHead",),
    "forgettable.tangent": ("TangentFeatures",),
    "jobs.directory": ("write_run",),
    "jobs.many": ("Outcome", "run_many"),
    "ledger.ledger": ("Ledger",),
    "noisy.centre": ("find_scale",),
    "noisy.checkpoint": ("Checkpoint",),
    "noisy.fresh": ("Initialisation",),
    "noisy.noise": ("SeededNoise", "SystemNoise"),
    "noisy.run": ("unlearn",),
    "recipes": (
        "Bound",
        "ConvexHeadRecipe",
        "ExactStatistics",
        "Execution",
        "GradientClipping",
        "GroupDPSGD",
        "Guarantee",
        "ModelClipping",
        "NoisyDescent",
        "OutputPerturbation",
        "Retraining",
        "RewindToDelete",
        "ShardedTraining",
    ),
    "training.batches": ("Batches",),
    "training.evaluation": ("Evaluation", "evaluate"),
    "training.many": ("fine_tune_many", "train_many"),
    "training.train": ("TrainingLog", "fine_tune", "train"),
}


def __getattr__(name: str) -> Any:
    if name == "tasks":
        return importlib.import_module("expunge.tasks")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(_import(home), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'expunge' has no attribute {name!r}")


def _import(home: str) -> Any:
    try:
        return importlib.import_module(f"expunge.{home}")
    except ModuleNotFoundError as error:
        if error.name != "sqlalchemy":
            raise
        said = "expunge.Ledger needs SQLAlchemy; pip install 'expunge[ledger]'"
        raise ModuleNotFoundError(said, name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
