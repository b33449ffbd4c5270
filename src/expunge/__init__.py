"""Certified machine unlearning: people ask to be forgotten, and their data leave a trained model.

Three words: ``build()`` returns a fresh network, ``Data`` says whose examples are, ``train`` trains
in place. Importing this package imports nothing heavy: each name is loaded when it is first used.

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
    from expunge.accounting.planning import plan
    from expunge.certificates.certificate import Certificate
    from expunge.certificates.record import Record
    from expunge.certificates.release import Release
    from expunge.certificates.verification import verify
    from expunge.data.data import Data
    from expunge.errors import (
        CalibrationError,
        CertificateError,
        ExpungeError,
        InputError,
        RunError,
        UnlearningError,
        VerificationError,
    )
    from expunge.exact.check import check
    from expunge.exact.replay import replay
    from expunge.exact.retrain import retrain
    from expunge.exact.shards import Shards
    from expunge.jobs.opening import load_model, open_state
    from expunge.jobs.run import run_job
    from expunge.linear_model.features import Features
    from expunge.noisy.noise import SeededNoise, SystemNoise
    from expunge.noisy.unlearn import unlearn
    from expunge.recipes import (
        GradientClipping,
        ModelClipping,
        OutputPerturbation,
        Retraining,
    )
    from expunge.training.evaluation import evaluate
    from expunge.training.training import Training

__version__ = "0.1.0"

_PLACES = {
    "accounting.calibration": ("calibrate",),
    "accounting.guarantee": ("guarantee",),
    "accounting.planning": ("plan",),
    "certificates.certificate": ("Certificate",),
    "certificates.record": ("Record",),
    "certificates.release": ("Release",),
    "certificates.verification": ("verify",),
    "data.data": ("Data",),
    "errors": (
        "CalibrationError",
        "CertificateError",
        "ExpungeError",
        "InputError",
        "RunError",
        "UnlearningError",
        "VerificationError",
    ),
    "exact.check": ("check",),
    "exact.replay": ("replay",),
    "exact.retrain": ("retrain",),
    "exact.shards": ("Shards",),
    "jobs.opening": ("load_model", "open_state"),
    "jobs.run": ("run_job",),
    "linear_model.features": ("Features",),
    "noisy.noise": ("SeededNoise", "SystemNoise"),
    "noisy.unlearn": ("unlearn",),
    "recipes": ("GradientClipping", "ModelClipping", "OutputPerturbation", "Retraining"),
    "training.evaluation": ("evaluate",),
    "training.training": ("Training",),
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names}

__all__ = [
    "CalibrationError",
    "Certificate",
    "CertificateError",
    "Data",
    "ExpungeError",
    "Features",
    "GradientClipping",
    "InputError",
    "ModelClipping",
    "OutputPerturbation",
    "Record",
    "Release",
    "Retraining",
    "RunError",
    "SeededNoise",
    "Shards",
    "SystemNoise",
    "Training",
    "UnlearningError",
    "VerificationError",
    "calibrate",
    "check",
    "evaluate",
    "guarantee",
    "load_model",
    "open_state",
    "plan",
    "replay",
    "retrain",
    "run_job",
    "unlearn",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'expunge' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"expunge.{_PLACE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
