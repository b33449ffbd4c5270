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
    from expunge.calibration import calibrate
    from expunge.errors import (
        CalibrationError,
        CertificateError,
        DomainError,
        ExpungeError,
        InputError,
        UnlearningError,
        VerificationError,
    )
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

__version__ = "0.1.0"

__all__ = [
    "Bound",
    "CalibrationError",
    "Candidate",
    "CertificateError",
    "DomainError",
    "Execution",
    "ExpungeError",
    "GradientClipping",
    "GroupDPSGD",
    "Guarantee",
    "InputError",
    "ModelClipping",
    "NoisyDescent",
    "OutputPerturbation",
    "Plan",
    "Retraining",
    "RewindToDelete",
    "UnlearningError",
    "VerificationError",
    "calibrate",
    "guarantee",
    "plan",
]

_HOMES = {
    "accounting": ("Bound", "Execution", "Guarantee", "guarantee"),
    "calibration": ("calibrate",),
    "errors": (
        "CalibrationError",
        "CertificateError",
        "DomainError",
        "ExpungeError",
        "InputError",
        "UnlearningError",
        "VerificationError",
    ),
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
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            value = getattr(importlib.import_module(f"expunge.{home}"), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module 'expunge' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
