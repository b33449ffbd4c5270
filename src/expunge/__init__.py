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
    from expunge.accounting.calibration import calibrate as calibrate
    from expunge.accounting.guarantee import guarantee as guarantee
    from expunge.accounting.planning import plan as plan
    from expunge.certificates.certificate import Certificate as Certificate
    from expunge.certificates.record import Record as Record
    from expunge.certificates.release import Release as Release
    from expunge.certificates.verification import verify as verify
    from expunge.data.data import Data as Data
    from expunge.errors import CalibrationError as CalibrationError
    from expunge.errors import CertificateError as CertificateError
    from expunge.errors import ExpungeError as ExpungeError
    from expunge.errors import InputError as InputError
    from expunge.errors import RunError as RunError
    from expunge.errors import UnlearningError as UnlearningError
    from expunge.errors import VerificationError as VerificationError
    from expunge.exact.check import check as check
    from expunge.exact.replay import replay as replay
    from expunge.exact.retrain import retrain as retrain
    from expunge.exact.shards import Shards as Shards
    from expunge.jobs.opening import load_model as load_model
    from expunge.jobs.opening import open_state as open_state
    from expunge.jobs.run import run_job as run_job
    from expunge.linear_model.features import Features as Features
    from expunge.noisy.noise import SeededNoise as SeededNoise
    from expunge.noisy.noise import SystemNoise as SystemNoise
    from expunge.noisy.unlearn import unlearn as unlearn
    from expunge.recipes import GradientClipping as GradientClipping
    from expunge.recipes import ModelClipping as ModelClipping
    from expunge.recipes import OutputPerturbation as OutputPerturbation
    from expunge.recipes import Retraining as Retraining
    from expunge.training.evaluation import evaluate as evaluate
    from expunge.training.training import Training as Training

__version__ = "0.1.0"

_PLACES = {
    "accounting.calibration": "calibrate",
    "accounting.guarantee": "guarantee",
    "accounting.planning": "plan",
    "certificates.certificate": "Certificate",
    "certificates.record": "Record",
    "certificates.release": "Release",
    "certificates.verification": "verify",
    "data.data": "Data",
    "errors": (
        "CalibrationError CertificateError ExpungeError InputError RunError UnlearningError "
        "VerificationError"
    ),
    "exact.check": "check",
    "exact.replay": "replay",
    "exact.retrain": "retrain",
    "exact.shards": "Shards",
    "jobs.opening": "load_model open_state",
    "jobs.run": "run_job",
    "linear_model.features": "Features",
    "noisy.noise": "SeededNoise SystemNoise",
    "noisy.unlearn": "unlearn",
    "recipes": "GradientClipping ModelClipping OutputPerturbation Retraining",
    "training.evaluation": "evaluate",
    "training.training": "Training",
}
_PLACE_OF = {name: place for place, names in _PLACES.items() for name in names.split()}
__all__ = sorted(_PLACE_OF)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'expunge' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"expunge.{_PLACE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
