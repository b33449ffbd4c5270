"""Linear models that forget bit for bit, with scikit-learn's names and habits (THEORY 10, 11)."""

from __future__ import annotations

from expunge.errors import InputError

try:
    import sklearn as _sklearn  # noqa: F401  # pyright: ignore[reportUnusedImport]
except ImportError:
    raise InputError(
        "expunge.linear_model needs scikit-learn; install expunge with the extra linear"
    ) from None

from expunge.linear_model.estimators import LogisticRegression, Ridge, RidgeClassifier
from expunge.linear_model.released import load, replay

__all__ = ["LogisticRegression", "Ridge", "RidgeClassifier", "load", "replay"]
