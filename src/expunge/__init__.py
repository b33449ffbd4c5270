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
    from expunge.accounting import Bound, Execution, Guarantee, guarantee
    from expunge.auditing import Audit
    from expunge.baselines import GaussianInitialisation, retrain
    from expunge.batching import Batches
    from expunge.calibration import calibrate
    from expunge.certificate import Certificate, certify
    from expunge.directory import write_run
    from expunge.dpsgd import train_dpsgd
    from expunge.ensembles import train_many
    from expunge.errors import (
        CalibrationError,
        CertificateError,
        DomainError,
        ExpungeError,
        InputError,
        UnlearningError,
        VerificationError,
    )
    from expunge.finetuning import fine_tune_many
    from expunge.manyruns import Outcome, run_many
    from expunge.mechanism import audit_mechanism, audit_run
    from expunge.noise import SeededNoise, SystemNoise
    from expunge.planning import Candidate, Plan, plan
    from expunge.recipes import (
        GradientClipping,
        GroupDPSGD,
        ModelClipping,
        NoisyDescent,
        OutputPerturbation,
        Retraining,
        RewindToDelete,
    )
    from expunge.record import RunRecord, commit, opens
    from expunge.training import Evaluation, TrainingLog, evaluate, fine_tune, train
    from expunge.unlearning import Run, unlearn
    from expunge.verification import verify, verify_chain

__version__ = "0.1.0"

__all__ = [
    "Audit",
    "Batches",
    "Bound",
    "CalibrationError",
    "Candidate",
    "Certificate",
    "CertificateError",
    "DomainError",
    "Evaluation",
    "Execution",
    "ExpungeError",
    "GaussianInitialisation",
    "GradientClipping",
    "GroupDPSGD",
    "Guarantee",
    "InputError",
    "ModelClipping",
    "NoisyDescent",
    "Outcome",
    "OutputPerturbation",
    "Plan",
    "Retraining",
    "RewindToDelete",
    "Run",
    "RunRecord",
    "SeededNoise",
    "SystemNoise",
    "TrainingLog",
    "UnlearningError",
    "VerificationError",
    "audit_mechanism",
    "audit_run",
    "calibrate",
    "certify",
    "commit",
    "evaluate",
    "fine_tune",
    "fine_tune_many",
    "guarantee",
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
    "accounting": ("Bound", "Execution", "Guarantee", "guarantee"),
    "auditing": ("Audit",),
    "baselines": ("GaussianInitialisation", "retrain"),
    "batching": ("Batches",),
    "calibration": ("calibrate",),
    "certificate": ("Certificate", "certify"),
    "directory": ("write_run",),
    "dpsgd": ("train_dpsgd",),
    "ensembles": ("train_many",),
    "errors": (
        "CalibrationError",
        "CertificateError",
        "DomainError",
        "ExpungeError",
        "InputError",
        "UnlearningError",
        "VerificationError",
    ),
    "finetuning": ("fine_tune_many",),
    "manyruns": ("Outcome", "run_many"),
    "mechanism": ("audit_mechanism", "audit_run"),
    "noise": ("SeededNoise", "SystemNoise"),
    "planning": ("Candidate", "Plan", "plan"),
    "recipes": (
        "GradientClipping",
        "GroupDPSGD",
        "ModelClipping",
        "NoisyDescent",
        "OutputPerturbation",
        "Retraining",
        "RewindToDelete",
    ),
    "record": ("RunRecord", "commit", "opens"),
    "training": ("Evaluation", "TrainingLog", "evaluate", "fine_tune", "train"),
    "unlearning": ("Run", "unlearn"),
    "verification": ("verify", "verify_chain"),
}


def __getattr__(name: str) -> Any:
    if name == "tasks":
        return importlib.import_module("expunge.tasks")
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"expunge.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'expunge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
