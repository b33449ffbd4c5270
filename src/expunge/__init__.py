"""Certified machine unlearning for neural networks.

>>> import expunge
>>> recipe = expunge.OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
>>> round(expunge.guarantee(recipe, delta=1e-5).epsilon, 4)
1.0
"""

from expunge.accounting import Bound, Execution, Guarantee, guarantee
from expunge.errors import (
    CalibrationError,
    CertificateError,
    DomainError,
    ExpungeError,
    InputError,
    UnlearningError,
    VerificationError,
)
from expunge.recipes import (
    GradientClipping,
    GroupDPSGD,
    ModelClipping,
    NoisyDescent,
    OutputPerturbation,
    Retraining,
    RewindToDelete,
)
