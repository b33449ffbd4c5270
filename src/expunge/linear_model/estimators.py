"""Ridge, RidgeClassifier and LogisticRegression with scikit-learn's parameters and habits, that
forget bit for bit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d

from expunge.errors import InputError
from expunge.linear_model.base import Array, LinearModel
from expunge.linear_model.logistic import fit_logistic
from expunge.linear_model.numbers import RowScaled
from expunge.linear_model.released import MODELS
from expunge.linear_model.ridge import Solution, solve_ridge
from expunge.linear_model.rows import Change, Store
from expunge.linear_model.sums import TARGETS, Label, Labels, Sums, encode_labels, sort_labels
from expunge.linear_model.system import compute_moments

if TYPE_CHECKING:
    from expunge.linear_model.features import Features

Reals = npt.NDArray[np.float64]
_TABLE, _FEATURES = 1e-4, 1e-3  # tolerances of a gradient


@dataclass(eq=False, repr=False)
class Ridge(MultiOutputMixin, RegressorMixin, LinearModel):
    """Linear least squares with a penalty on the squared norm, as scikit-learn's ``Ridge``.

    ``alpha`` is the penalty, or several: generalised cross-validation of the sums chooses (then
    ``alpha_`` says which). ``standardise`` penalises as if columns had variance 1. ``features``
    is the public network that makes columns of X; without it X is a table. ``state`` is a folder
    for a life on disk; it is private.

    >>> rng = np.random.default_rng(0)
    >>> X = rng.normal(size=(40, 3)); y = X @ [1.0, 2.0, 3.0] + 4
    >>> ids = [f"user-{i}" for i in range(40)]
    >>> model = Ridge(alpha=1e-3).fit(X, y, ids=ids)
    >>> model.coef_.round(2), round(float(model.intercept_), 2)
    (array([1., 2., 3.]), 4.0)
    >>> release = model.forget(["user-7"])
    >>> model.digest() == Ridge(alpha=1e-3).fit(np.delete(X, 7, 0), np.delete(y, 7)).digest()
    True
    >>> release.certificate.epsilon, model.holds(["user-7", "user-8"])
    (0.0, ['user-8'])
    """

    alpha: float | Sequence[float] = 1.0
    _: KW_ONLY
    fit_intercept: bool = True
    standardise: bool = False
    features: Features | None = None
    state: str | Path | None = None

    def _read_targets(self, y: Any, fit: bool) -> tuple[Array, None]:
        values = np.asarray(y)
        if values.dtype.kind not in "iufb":
            values = values.astype(np.float64)
        flat = values.ndim == 1
        if self._facts.get("flat", flat) != flat:
            raise InputError.of("y", values.shape, "as flat as before")
        self._decide(flat=flat)
        return TARGETS.quantise(values.reshape(len(values), -1), "y"), None

    def _solve(self, store: Store, change: Change | None, sums: Sums) -> Solution:
        moments = compute_moments(sums, store.numbers, None, self.fit_intercept)
        return solve_ridge(moments, read_alphas(self.alpha), self.standardise)

    @property
    def coef_(self) -> Reals:
        """Weights of the columns: [columns], or [targets, columns] where y had two dimensions."""
        found = self._found.weights.T
        return found[0] if self._facts.get("flat") else found

    @property
    def intercept_(self) -> Any:
        """The constant of each target."""
        found = self._found.intercept
        return float(found[0]) if self._facts.get("flat") else found

    @property
    def alpha_(self) -> float:
        """The penalty that was chosen."""
        return self._found.alpha

    def predict(self, X: Any) -> Reals:
        """Targets of rows."""
        check_is_fitted(self)
        return self._expand(X) @ self.coef_.T + self.intercept_


class _Classifier(ClassifierMixin, LinearModel):
    classes: Sequence[Label] | None

    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        ids: Iterable[Any] | None = None,
        readmit: bool = False,
        classes: Sequence[Label] | None = None,
    ) -> Self:
        """Add rows, all or nothing; what is there already is not added again.

        ``classes`` declares the classes, as the parameter of the same name does.
        """
        if classes is not None:
            self._decide(declared=list(sort_labels(set(np.asarray(classes).tolist()))))
        return super().partial_fit(X, y, ids, readmit)

    def _read_targets(self, y: Any, fit: bool) -> tuple[Array, Labels]:
        given = column_or_1d(y, warn=True)
        check_classification_targets(given)
        letter = given.dtype.kind
        kind = {"i": "whole", "u": "whole", "U": "text", "O": "text"}.get(letter, letter)
        if (before := self._facts.get("labels", kind)) != kind:
            raise InputError.of("y", given.dtype, f"of the kind of the labels before: {before}")
        self._decide(labels=kind)
        labels = given.tolist()
        found = sort_labels(set(labels))
        if fit and len(found) == 1:
            raise InputError(f"y has only one class, {found[0]!r}; it needs two")
        declared = self._list_declared()
        if declared and (unknown := set(found).difference(declared)):
            raise InputError.of("y", sort_labels(unknown)[0], f"one of the classes {declared}")
        return encode_labels(labels), found

    def _list_declared(self) -> Labels:
        given = self.classes if self.classes is not None else self._facts.get("declared")
        if given is not None and np.ndim(given) != 1:
            raise InputError.of("classes", given, "None or a list of labels")
        return () if given is None else sort_labels(set(np.asarray(given).tolist()))

    def _list_labels(self, sums: Sums) -> Labels:
        """The classes: those that were declared, or those of the rows that are there."""
        return self._list_declared() or sums.labels or ()

    @property
    def classes_(self) -> Array:
        """The classes that were declared, or those that have rows."""
        return np.array(self._found.labels)

    @property
    def coef_(self) -> Reals:
        """Weights of the columns: [classes, columns], one row for two classes."""
        return self._found.weights.T

    @property
    def intercept_(self) -> Reals:
        """The constant of each class."""
        return self._found.intercept

    def decision_function(self, X: Any) -> Reals:
        """Scores: [rows, classes], or [rows] for two classes."""
        check_is_fitted(self)
        solved = self._found  # once: another process may change the state
        scores = self._expand(X) @ solved.weights + solved.intercept
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Array:
        """Labels of rows."""
        scores = self.decision_function(X)
        best = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return self.classes_[best]


@dataclass(eq=False, repr=False)
class RidgeClassifier(_Classifier):
    """Ridge regression on ±1 for every class, as scikit-learn's ``RidgeClassifier``.

    ``classes_`` are those of the rows that are there: with the last row of a class its name goes
    too. ``classes`` declares them in advance.

    >>> X, y = np.eye(4), ["a", "a", "b", "b"]
    >>> model = RidgeClassifier().fit(X, y, ids=["ann", "bob", "cem", "dee"])
    >>> model.predict(X).tolist()
    ['a', 'a', 'b', 'b']
    >>> model.forget(["ann"]).certificate.epsilon
    0.0
    """

    alpha: float | Sequence[float] = 1.0
    _: KW_ONLY
    fit_intercept: bool = True
    standardise: bool = False
    classes: Sequence[Label] | None = None
    features: Features | None = None
    state: str | Path | None = None
    alpha_ = Ridge.alpha_

    def _solve(self, store: Store, change: Change | None, sums: Sums) -> Solution:
        labels = self._list_labels(sums)
        moments = compute_moments(sums, store.numbers, labels, self.fit_intercept)
        found = solve_ridge(moments, read_alphas(self.alpha), self.standardise)
        return replace(found, labels=labels)

    @property
    def coef_(self) -> Reals:
        """Weights of the columns: [classes, columns], or [columns] for two classes."""
        found = self._found.weights.T
        return found[0] if len(found) == 1 else found


@dataclass(eq=False, repr=False)
class LogisticRegression(_Classifier):
    """Softmax regression with a penalty on the squared norm, as scikit-learn's.

    Solved again from the rows that remain by a deterministic solver, whose start and directions
    come from their sums. ``tol`` bounds the largest component of the gradient, in units in which
    columns have variance 1; None is 1e-4 for a table, and 1e-3 for features of a network, where no
    more accuracy is to be had.

    >>> X, y = np.eye(4), [True, True, False, False]
    >>> model = LogisticRegression(C=10.0).fit(X, y, ids=["ann", "bob", "cem", "dee"])
    >>> model.predict_proba(X).round(1).tolist()
    [[0.2, 0.8], [0.2, 0.8], [0.8, 0.2], [0.8, 0.2]]
    """

    C: float = 1.0
    _: KW_ONLY
    tol: float | None = None
    fit_intercept: bool = True
    max_iter: int = 500
    standardise: bool = False
    classes: Sequence[Label] | None = None
    features: Features | None = None
    state: str | Path | None = None

    def _solve(self, store: Store, change: Change | None, sums: Sums) -> Solution:
        tol = self.tol
        if tol is None:
            tol = _TABLE if self.features is None else _FEATURES
        for name, value in (("C", self.C), ("tol", tol)):
            if not 0 < value < math.inf:
                raise InputError.of(name, value, "a finite number > 0")
        present, labels = sums.labels or (), self._list_labels(sums)
        rows = store.read_ordered(change)
        features, unit = rows["features"], 1.0
        if isinstance(store.numbers, RowScaled):
            features, unit = store.numbers.lift_rows(features), 2.0**store.numbers.exponent
        codes = encode_labels(present)[:, 0]
        order = np.argsort(codes)
        classes = order[np.searchsorted(codes[order], rows["target"][:, 0])]
        moments = compute_moments(sums, store.numbers, present, self.fit_intercept)
        table = np.ascontiguousarray(features), classes, unit
        solved, left = fit_logistic(table, moments, self.C, tol, self.max_iter, self.standardise)
        if left > tol:
            warnings.warn(
                f"the gradient is {left:.1e} after {solved.iterations} evaluations, above tol = "
                f"{tol}; a larger max_iter gets nearer",
                ConvergenceWarning,
                stacklevel=3,
            )
        return solved.place(present, labels)

    @property
    def n_iter_(self) -> int:
        """How many gradients were evaluated."""
        return self._found.iterations

    def predict_proba(self, X: Any) -> Reals:
        """Probabilities of the classes: [rows, classes]."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        return softmax(scores, axis=1)

    def predict_log_proba(self, X: Any) -> Reals:
        """Logarithms of the probabilities of the classes."""
        return np.log(self.predict_proba(X))


def read_alphas(alpha: Any) -> tuple[float, ...]:
    """One penalty or several, checked."""
    try:
        given = np.asarray(alpha, np.float64)
    except (TypeError, ValueError):
        given = np.empty(0)
    if given.size == 0 or given.ndim > 1 or not ((given >= 0) & (given < np.inf)).all():
        raise InputError.of("alpha", alpha, "a finite number >= 0, or several")
    if given.ndim and given.min() <= 0:
        raise InputError.of("alpha", alpha, "numbers > 0, where there are several")
    return tuple(given.ravel().tolist())


MODELS.update({model.__name__: model for model in (Ridge, RidgeClassifier, LogisticRegression)})
