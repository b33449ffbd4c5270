"""Coefficients: scikit-learn's, and the same bits everywhere."""

import functools
import hashlib
import os
import subprocess
import sys

import mpmath
import numpy as np
import pytest
import sklearn.linear_model as theirs
from sklearn import datasets
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from expunge.linear_model import LogisticRegression, Ridge, RidgeClassifier
from expunge.linear_model.numbers import FixedPoint
from expunge.linear_model.sums import TARGETS, add_rows
from expunge.linear_model.system import Residual, compute_moments, make_system, round_whole

TABLES = ["iris", "wine", "breast_cancer", "digits"]


def load(name: str):
    return getattr(datasets, f"load_{name}")(return_X_y=True)


def assert_close(found: np.ndarray, truth: np.ndarray, relative: float) -> None:
    __tracebackhide__ = True
    assert np.abs(found - truth).max() <= relative * np.abs(truth).max()


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("alpha", [1e-3, 1.0, 100.0])
def test_ridge_is_scikit_learns(alpha: float, intercept: bool) -> None:
    X, y = load("diabetes")
    Y = np.stack([y, -2 * y + X[:, 0]], axis=1)
    ours = Ridge(alpha, fit_intercept=intercept).fit(X, Y)
    other = theirs.Ridge(alpha, fit_intercept=intercept).fit(X, Y)
    np.testing.assert_allclose(ours.coef_, other.coef_, rtol=1e-6)
    np.testing.assert_allclose(ours.intercept_, other.intercept_, rtol=1e-9)
    np.testing.assert_allclose(ours.predict(X), other.predict(X), rtol=1e-9)
    flat = Ridge(alpha, fit_intercept=intercept).fit(X, y)
    assert flat.coef_.shape == (10,)
    assert np.array_equal(flat.coef_, ours.coef_[0])


@pytest.mark.parametrize("name", TABLES)
def test_ridge_classifier_is_scikit_learns(name: str) -> None:
    X, y = load(name)
    ours, other = RidgeClassifier(2.0).fit(X, y), theirs.RidgeClassifier(2.0).fit(X, y)
    assert_close(ours.coef_, other.coef_, 1e-9)
    assert_close(ours.intercept_, other.intercept_, 1e-9)
    assert np.array_equal(ours.predict(X), other.predict(X))


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_columns_of_very_different_scales(shift: float) -> None:
    rng = np.random.default_rng(0)
    scales = 10.0 ** np.arange(-6, 7)
    X = (rng.normal(size=(300, 13)) + shift) * scales
    y = X @ (rng.normal(size=13) / scales) + rng.normal(size=300)
    model = Ridge(1.0).fit(X, y)
    np.testing.assert_allclose(model.coef_, theirs.Ridge(1.0).fit(X, y).coef_, rtol=1e-6)
    assert model._find_solution().proven
    other = theirs.Ridge(1.0).fit(X, y)
    assert model.score(X, y) == pytest.approx(other.score(X, y), rel=1e-9)


def test_ridge_against_sixty_digits() -> None:
    rng = np.random.default_rng(1)
    X, y = rng.integers(-9, 9, (30, 4)).astype(float), rng.integers(-9, 9, 30).astype(float)
    model = Ridge(0.5).fit(X, y)
    with mpmath.workdps(60):
        A = mpmath.matrix((X - X.mean(0)).T @ (X - X.mean(0))) + mpmath.eye(4) / 2
        exact = mpmath.lu_solve(A, mpmath.matrix((X - X.mean(0)).T @ (y - y.mean())))
    np.testing.assert_allclose(model.coef_, [float(v) for v in exact], rtol=1e-11)


def test_standardising_from_the_sums() -> None:
    X, y = load("breast_cancer")
    scaled = StandardScaler().fit_transform(X)
    ours = RidgeClassifier(3.0, standardise=True).fit(X, y)
    other = theirs.RidgeClassifier(3.0).fit(scaled, y)
    np.testing.assert_allclose(ours.coef_ * X.std(axis=0), other.coef_, rtol=1e-6)
    logistic = LogisticRegression(0.1, standardise=True, tol=1e-8).fit(X, y)
    reference = theirs.LogisticRegression(C=0.1, tol=1e-10, max_iter=10_000).fit(scaled, y)
    assert_close(logistic.coef_ * X.std(axis=0), reference.coef_, 1e-4)
    constant = np.column_stack([X, np.full(len(X), 7.0)])
    assert RidgeClassifier(standardise=True).fit(constant, y).coef_[-1] == 0


def test_several_penalties_are_chosen_by_cross_validation() -> None:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(60, 20))
    y = X[:, 0] + 3 * rng.normal(size=60)
    alphas = [0.01, 1.0, 100.0, 1e4]
    model = Ridge(alphas).fit(X, y)
    Xc, yc = X - X.mean(0), y - y.mean()
    scores = []
    for alpha in alphas:
        H = Xc @ np.linalg.solve(Xc.T @ Xc + alpha * np.eye(20), Xc.T)
        scores.append(np.square(yc - H @ yc).sum() / (1 - (np.trace(H) + 1) / 60) ** 2)
    assert model.alpha_ == alphas[int(np.argmin(scores))]
    np.testing.assert_allclose(model.coef_, theirs.Ridge(model.alpha_).fit(X, y).coef_, rtol=1e-8)
    assert Ridge([1.0, 3.0]).fit(X, np.zeros(60)).alpha_ == 3.0  # a tie: the largest


def test_no_penalty_and_more_columns_than_rows() -> None:
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(10, 30)), rng.normal(size=10)
    model = Ridge(0.0).fit(X, y)
    assert not model._find_solution().proven
    np.testing.assert_allclose(model.predict(X), y, atol=1e-6)
    assert Ridge(1e-6).fit(X, y)._find_solution().proven


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("intercept", [True, False])
def test_logistic_regression_is_scikit_learns(name: str, intercept: bool) -> None:
    X, y = load(name)
    X = X / np.abs(X).max(axis=0).clip(1)
    ours = LogisticRegression(0.5, tol=1e-8, fit_intercept=intercept).fit(X, y)
    other = theirs.LogisticRegression(
        C=0.5, tol=1e-9, fit_intercept=intercept, max_iter=10_000, solver="newton-cg"
    ).fit(X, y)
    assert_close(ours.coef_, other.coef_, 1e-4)
    np.testing.assert_allclose(ours.predict_proba(X), other.predict_proba(X), atol=1e-5)
    assert np.array_equal(ours.predict(X), other.predict(X))


def test_not_converged_is_said() -> None:
    X, y = load("wine")
    with pytest.warns(Warning, match="max_iter"):
        LogisticRegression(tol=1e-12, max_iter=2).fit(X, y)


def test_the_order_of_rows_does_not_show() -> None:
    X, y = load("digits")
    order = np.random.default_rng(0).permutation(len(X))
    one, two = LogisticRegression().fit(X, y), LogisticRegression().fit(X[order], y[order])
    assert np.array_equal(one.coef_, two.coef_)
    assert np.array_equal(one.intercept_, two.intercept_)


SAME = """
import hashlib, numpy as np
from expunge.linear_model import Ridge, RidgeClassifier
from expunge.linear_model.numbers import RowScaled
from expunge.linear_model.sums import add_rows, encode_labels
from expunge.linear_model.system import compute_moments
from expunge.linear_model.ridge import solve_ridge
rng = np.random.Generator(np.random.PCG64(0))
found = hashlib.sha256()
def whole(*shape): return rng.integers(-2**20, 2**20, shape) * 2.0**-18  # the same everywhere
X = whole(300, 40) * 2.0 ** np.arange(-20, 20)
for model in (Ridge(0.1), Ridge([0.1, 10.0]), Ridge(0.1, standardise=True)):
    found.update(model.fit(X, whole(300, 2)).coef_.tobytes())
    found.update(model.intercept_.tobytes())
numbers = RowScaled((450,))
q = rng.integers(-127, 128, (2000, 450)).astype(np.int8)
sums = add_rows(numbers, q, encode_labels((q[:, 0] // 60).tolist()), tuple(range(-3, 3)))
solved = solve_ridge(compute_moments(sums, numbers, tuple(range(-3, 3)), True), [10.0], False)
assert solved.proven
found.update(solved.weights.tobytes() + solved.intercept.tobytes())
print(found.hexdigest())
"""


@functools.cache
def run_elsewhere(kernel: str, threads: str) -> str:
    chosen = {"OMP_NUM_THREADS": threads} | ({"OPENBLAS_CORETYPE": kernel} if kernel else {})
    out = subprocess.run(
        [sys.executable, "-c", SAME], env=os.environ | chosen, capture_output=True, check=True
    )
    return out.stdout.decode()


@pytest.mark.parametrize("kernel", ["Haswell", "Nehalem", "Zen", "SkylakeX", "Prescott"])
def test_the_same_bits_with_another_blas(kernel: str) -> None:
    """Of kernels that this processor lacks OpenBLAS takes another one: no less a test."""
    assert run_elsewhere(kernel, "2") == run_elsewhere("", "1")


def test_rounding_knows_what_is_certain() -> None:
    shift = np.full((1, 3), 10).astype(object)  # a whole number is 1024 units
    W = np.array([[1024, 1536, -2560]], dtype=object)
    found, certain = round_whole(W, shift, np.full(3, 1e-3))
    assert not certain
    assert found.tolist() == [[1.0, 1.0, -2.0]]  # the ones nearer zero
    found, certain = round_whole(W + 102, shift, np.full(3, 1e-3))
    assert certain
    assert found.tolist() == [[1.0, 2.0, -2.0]]


def test_a_pipeline_with_a_public_step() -> None:
    from sklearn.preprocessing import FunctionTransformer

    X, y = load("wine")
    pipe = make_pipeline(FunctionTransformer(np.log1p), LogisticRegression(10.0))
    ids = [f"u{i}" for i in range(len(y))]
    pipe.fit(X, y, logisticregression__ids=ids)
    assert pipe.score(X, y) > 0.95
    assert pipe[-1].holds(["u3"]) == ["u3"]


def test_declared_categories_in_place_of_a_fitted_encoder() -> None:
    """An encoder whose categories are declared learns nothing: it is public."""
    import pandas
    from sklearn.compose import make_column_transformer
    from sklearn.preprocessing import OneHotEncoder

    frame = pandas.DataFrame({"age": np.arange(12.0), "job": ["cook", "nurse", "pilot"] * 4})
    encode = OneHotEncoder(categories=[["cook", "nurse", "pilot", "smith"]], sparse_output=False)
    columns = make_column_transformer((encode, ["job"]), remainder="passthrough")
    pipe = make_pipeline(columns, RidgeClassifier(standardise=True))
    ids = [f"u{i}" for i in range(12)]
    pipe.fit(frame, frame["job"] == "cook", ridgeclassifier__ids=ids)
    assert pipe.score(frame, frame["job"] == "cook") == 1
    pipe[-1].forget(ids[:1])
    never = make_pipeline(columns, RidgeClassifier(standardise=True))
    never.fit(frame[1:], frame["job"][1:] == "cook", ridgeclassifier__ids=ids[1:])
    assert np.array_equal(pipe[-1].coef_, never[-1].coef_)


def test_threads_do_not_show() -> None:
    script = (
        "import hashlib; from sklearn.datasets import load_digits;"
        "from expunge.linear_model import LogisticRegression as L;"
        "import os; os.cpu_count = lambda: {};"
        "print(hashlib.sha256(L().fit(*load_digits(return_X_y=True)).coef_.tobytes()).hexdigest())"
    )
    found = {
        subprocess.check_output(
            [sys.executable, "-c", script.format(n)], env=os.environ | {"OMP_NUM_THREADS": str(n)}
        )
        for n in (1, 3)
    }
    assert len(found) == 1
    assert len(found.pop().strip()) == hashlib.sha256().digest_size * 2


def test_nothing_is_warned_of_where_warnings_are_errors() -> None:
    LogisticRegression().fit(np.array([[0.0], [0.0], [1e7]]), [0, 1, 1])


def test_a_step_below_the_last_bit_changes_nothing():
    numbers, rng = FixedPoint(), np.random.default_rng(0)
    X = numbers.quantise(rng.normal(size=(9, 2)), "X")
    Y = TARGETS.quantise(rng.normal(size=(9, 1)), "y")
    moments = compute_moments(add_rows(numbers, X, Y, None), numbers, None, True)
    residual = Residual(moments, make_system(moments, 1.0, False))
    before = residual.read()
    residual.step(np.full((2, 1), 2.0**-300))
    assert (residual.read() == before).all()
    assert before.any()
