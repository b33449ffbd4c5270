"""Convex heads: the residual is what was measured, and sequences use only what they may."""

import json
import math
from collections import deque
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from expunge.accounting import gaussian
from expunge.accounting.guarantee import guarantee
from expunge.certificates.certificate import certify
from expunge.certificates.second_accountant import recompute_mu
from expunge.errors import InputError, UnlearningError
from expunge.forgettable import convex
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.losses import LOSSES, evaluate
from expunge.forgettable.ridge import one_thread
from expunge.forgettable.solver import Objective, Recycled, Solution, solve
from expunge.noisy.noise import SeededNoise
from expunge.recipes import ConvexHeadRecipe, Execution
from expunge.reports.page import render_report

KEY = bytes(32)


def make_data(rows: int = 90, seed: int = 0):
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % 3
    x = rng.normal(size=(rows, 6))
    x[np.arange(rows), y] += 1.5
    return x, y, [f"user-{i}" for i in range(rows)]


def make_head(state: Path | None = None, **given) -> ConvexHead:
    settings = {"classes": 3, "weight_decay": 1e-3, "tolerance": 1e-9} | given
    return ConvexHead(Features(bits=6, lift=4, seed="c"), **settings, state=state, key=KEY)


def make_objective(loss: str, rows: int = 60, seed: int = 0, width: int = 5) -> Objective:
    rng = np.random.default_rng(seed)
    phi = rng.integers(-31, 32, (rows, width)).astype(np.float32)
    t = np.eye(3, dtype=int)[np.arange(rows) % 3]
    gram = (phi.T @ phi).astype(float)
    blocks = [(phi[:25], t[:25]), (phi[25:], t[25:])]
    return Objective(loss, 1e-3, 18.0 * math.sqrt(width), blocks, gram)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_and_curvature_are_derivatives(loss: str) -> None:
    objective = make_objective(loss)
    rng = np.random.default_rng(1)
    W, D = rng.normal(size=(2, 5, 3))
    step = 1e-5
    value, g, _, states = objective.evaluate(W)
    ahead, behind = objective.evaluate(W + step * D), objective.evaluate(W - step * D)
    assert (ahead[0] - behind[0]) / (2 * step) == pytest.approx(np.vdot(g, D), rel=1e-6)
    curved = (ahead[1] - behind[1]) / (2 * step)
    assert np.allclose(objective.curve(states, D), curved, rtol=2e-3, atol=1e-5)
    assert value > 0


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("scale", [0.1, 3.0, 20.0])
def test_the_margin_covers_rounding(loss: str, scale: float) -> None:
    """The bound is above the exact norm, in 50 digits, and above the float's own error."""
    W = np.random.default_rng(2).normal(size=(5, 3)) * (
        min(scale, 3.0) if loss == "poisson" else scale
    )
    check_margin(make_objective(loss), W)


@pytest.mark.parametrize("loss", LOSSES)
def test_the_margin_covers_rounding_near_the_solution(loss: str) -> None:
    """Where it is used: the norm is that of the rounding itself."""
    objective = make_objective(loss, rows=300, width=40)
    W = solve(objective, np.zeros((40, 3)), 1e-11).weights
    margin = check_margin(objective, W)
    assert margin < 1e-11


def check_margin(objective: Objective, W: np.ndarray) -> float:
    _, g, bound, _ = objective.evaluate(W)
    exact = gradient_in_digits(objective, W)
    norm = mpmath.sqrt(sum(v * v for v in exact))
    error = mpmath.sqrt(
        sum((v - mpmath.mpf(float(f))) ** 2 for v, f in zip(exact, g.ravel(), strict=True))
    )
    margin = bound - float(np.linalg.norm(g))
    assert norm <= bound
    assert error <= margin
    assert margin < 1e-9 * max(1.0, float(norm))
    return margin


def gradient_in_digits(objective: Objective, W: np.ndarray) -> list:
    mpmath.mp.dps = 50
    p, q = W.shape
    w = [[mpmath.mpf(float(v)) for v in row] for row in W]
    unit, m = mpmath.mpf(objective.unit), mpmath.mpf(objective.weight_decay)
    total = [[mpmath.mpf(0)] * q for _ in range(p)]
    for phi, t in objective.blocks:
        for a, b in zip(phi.tolist(), t.tolist(), strict=True):
            z = [sum(int(a[j]) * w[j][k] for j in range(p)) / unit for k in range(q)]
            r = residual_in_digits(objective.loss, z, b)
            for j in range(p):
                for k in range(q):
                    total[j][k] += int(a[j]) * r[k]
    n = objective.rows
    return [total[j][k] / unit / n + m * w[j][k] for j in range(p) for k in range(q)]


def residual_in_digits(loss: str, z: list, t: list) -> list:
    match loss:
        case "softmax":
            total = sum(mpmath.exp(v) for v in z)
            return [mpmath.exp(v) / total - b for v, b in zip(z, t, strict=True)]
        case "logistic":
            return [1 / (1 + mpmath.exp(-v)) - b for v, b in zip(z, t, strict=True)]
        case "poisson":
            return [mpmath.exp(v) - b for v, b in zip(z, t, strict=True)]
        case _:
            signs = [2 * b - 1 for b in t]
            return [-2 * s * max(1 - s * v, 0) for v, s in zip(z, signs, strict=True)]


@pytest.mark.parametrize("loss", LOSSES)
def test_two_starts_end_within_twice_the_certified_distance(loss: str) -> None:
    """‖W - W*‖ ≤ τ/m for each of them."""
    far = np.random.default_rng(3).normal(size=(5, 3))
    tolerance = 1e-8
    a = solve(make_objective(loss), np.zeros((5, 3)), tolerance)
    b = solve(make_objective(loss), far, tolerance)
    assert a.reached
    assert b.reached
    assert max(a.bound, b.bound) <= tolerance
    assert np.linalg.norm(a.weights - b.weights) <= 2 * tolerance / 1e-3
    assert not np.array_equal(a.weights, b.weights)


@pytest.mark.parametrize("loss", LOSSES)
def test_at_zero_the_preconditioner_is_the_inverse(loss: str) -> None:
    """All rows bend alike there, so one conjugate gradient step is a Newton step."""
    objective = make_objective(loss)
    states = objective.evaluate(np.zeros((5, 3)))[3]
    D = np.random.default_rng(4).normal(size=(5, 3))
    D -= D.mean(axis=1, keepdims=True)
    back = objective.precondition(states)(objective.curve(states, D))
    assert np.allclose(back, D, rtol=1e-4, atol=1e-4)


def test_directions_are_recycled_exactly_and_not_without_end() -> None:
    rng = np.random.default_rng(5)
    root = rng.normal(size=(6, 6))
    H = root @ root.T + np.eye(6)
    kept = Recycled(deque(maxlen=2))
    first, second, third = np.linalg.eigh(H)[1][:, :3].T
    for s in (first, second, third):
        kept.add(s, H @ s, float(s @ H @ s))
    better = kept.improve(lambda R: R)
    assert np.allclose(better(H @ third), third)
    assert np.allclose(better(H @ second), second)
    assert np.allclose(better(H @ first), H @ first)


def test_the_number_of_cores_shows_in_no_bit(monkeypatch) -> None:
    found = []
    for cores in (1, 3):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        with one_thread():
            found.append(solve(make_objective("softmax", 900), np.zeros((5, 3)), 1e-9))
    assert found[0].half_passes == found[1].half_passes
    assert np.array_equal(found[0].weights, found[1].weights)


def test_a_tiny_weight_decay_is_solved_too() -> None:
    """Float32 curvature cannot tell it from zero; the gradient, in float64, can."""
    objective = make_objective("softmax")
    objective.weight_decay = 1e-9
    found = solve(objective, np.zeros((5, 3)), 1e-9)
    assert found.reached


def test_softmax_agrees_with_scikit_learn() -> None:
    from sklearn import linear_model

    x, y, ids = make_data()
    head = make_head(tolerance=1e-10)
    head.learn((x, y), ids)
    run = head.release()
    unit = head._memory.unit
    a = head.features.integers.expand(head.features.compute(x)).astype(float) / unit
    theirs = linear_model.LogisticRegression(
        C=1 / (90 * 1e-3), fit_intercept=False, tol=1e-10, max_iter=10_000
    ).fit(a, y)
    assert np.allclose(run.model.weight.numpy().T, theirs.coef_, atol=1e-5)


def test_from_zero_is_a_function_of_the_retained_rows() -> None:
    x, y, ids = make_data()
    head, never = make_head(), make_head()
    head.learn((x, y), ids)
    head.release()
    run = head.forget(ids[:4])
    never.learn((x[4:][::-1], y[4:][::-1]), ids[4:][::-1])
    assert torch.equal(run.model.weight, never.release().model.weight)
    found = guarantee(run.record.recipe, delta=1e-5)
    assert (found.epsilon, found.mu) == (0.0, 0.0)


def test_noise_is_what_theory_says() -> None:
    recipe = ConvexHeadRecipe(weight_decay=1e-5, tolerance=1e-9, noise_std=3.7306e-4)
    found = guarantee(recipe, delta=1e-5)
    assert found.mu == pytest.approx(1e-9 / 1e-5 / 3.7306e-4, rel=1e-12)
    assert found.epsilon == pytest.approx(1.0, abs=1e-4)
    again = recompute_mu(recipe, "retrained", Execution())
    assert float(again) <= found.mu <= float(again) * (1 + 1e-12)
    rounded = Execution(rounding=1e-6)
    mu = guarantee(recipe, delta=1e-5, execution=rounded).mu
    assert mu == pytest.approx((1e-4 + 1e-6) / 3.7306e-4, rel=1e-12)
    assert float(recompute_mu(recipe, "retrained", rounded)) <= mu


def test_the_noisy_release_meets_its_budget() -> None:
    x, y, ids = make_data()
    head = make_head()
    head.learn((x, y), ids)
    exact = head.release().model.weight.numpy()
    run = head.forget(ids[:4], epsilon=1.0, delta=1e-5, noise=SeededNoise(0))
    recipe, record = run.record.recipe, run.record
    assert guarantee(recipe, delta=1e-5, execution=record.execution).epsilon <= 1.0
    sigma = 1e-9 / 1e-3 / float(gaussian.mu(1.0, 1e-5))
    assert sigma < recipe.noise_std < sigma * 1.001
    assert record.noise["source"] == "seeded"
    w = run.model.weight.numpy()
    assert np.array_equal(w, np.rint(w / record.grid) * record.grid)
    fresh = make_head()
    fresh.learn((x[4:], y[4:]), ids[4:])
    star = fresh.release().model.weight.numpy()
    moved = np.linalg.norm(w - star) / recipe.noise_std
    assert abs(moved - math.sqrt(w.size)) < 6
    assert np.linalg.norm(exact - star) > 100 * recipe.noise_std


def test_the_noise_is_normal_with_the_stated_scale() -> None:
    """Many releases of one request: mean 0, variance 1, and not of twice the scale."""
    x, y, ids = make_data(30)
    values = []
    for seed in range(40):
        head = make_head(weight_decay=1e-1)
        head.learn((x, y), ids)
        run = head.forget(ids[:2], epsilon=1.0, delta=1e-5, noise=SeededNoise(seed))
        values.append(run.model.weight.numpy().ravel() / run.record.recipe.noise_std)
    spread = np.std(np.array(values) - np.mean(values, axis=0), ddof=0) * math.sqrt(40 / 39)
    assert abs(spread - 1) < 0.1


def test_release_never_returns_weights_without_noise(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = make_head(tmp_path / "a")
    head.learn((x, y), ids)
    head.release()
    run = head.forget(ids[:4], epsilon=1.0, delta=1e-5)
    assert torch.equal(head.release().model.weight, run.model.weight)
    assert torch.equal(make_head(tmp_path / "a").release().model.weight, run.model.weight)
    head.save(tmp_path / "b")
    kept = (tmp_path / "a/kept").read_bytes()
    assert kept == (tmp_path / "b/kept").read_bytes()
    assert run.model.weight.numpy().tobytes() in kept


def test_three_requests_and_an_addition(tmp_path: Path, monkeypatch) -> None:
    """THEORY, section 11: later runs use what was released, retained and added rows, fresh noise.

    Every start is a release or zero; every row and every preconditioner a solver sees is of what
    remains; and of weights without noise no byte is left, in memory or on disk.
    """
    solved: list[tuple[np.ndarray, np.ndarray]] = []
    seen: list[np.ndarray] = []
    real = convex.solve

    def watch(objective, start, tolerance):
        phi = np.concatenate([phi for phi, _ in objective.blocks]).astype(float)
        assert np.array_equal(objective.gram, phi.T @ phi)
        seen.append(phi)
        found = real(objective, start, tolerance)
        solved.append((start.copy(), found.weights.copy()))
        return found

    monkeypatch.setattr(convex, "solve", watch)
    x, y, ids = make_data()
    head = make_head(tmp_path / "a")
    head.learn((x[:80], y[:80]), ids[:80])
    zero = head.release()
    released = []
    for number in range(3):
        run = head.forget(ids[4 * number : 4 * number + 4], epsilon=1.0, delta=1e-5)
        released.append(run.model.weight.numpy())
        check_only_released_is_kept(head, tmp_path / "a", released[-1], solved)
        if number == 1:
            head.learn((x[80:], y[80:]), ids[80:])
    starts = [start for start, _ in solved]
    assert not starts[0].any()
    assert np.array_equal(starts[1], zero.model.weight.numpy())
    assert np.array_equal(starts[2], released[0])
    assert np.array_equal(starts[3], released[1])
    integers = head.features.integers.expand(head.features.compute(x))
    for phi, gone, known in zip(seen, (0, 4, 8, 12), (80, 80, 80, 90), strict=True):
        assert sorted(map(tuple, phi)) == sorted(map(tuple, integers[gone:known].astype(float)))
    head.learn((x[:1], y[:1]), ["late"])
    solved.clear()
    after = head.release()
    assert not solved[0][0].any()
    assert after.record.recipe.noise_std == 0
    assert not np.array_equal(after.model.weight.numpy(), released[-1])
    files = {path.name for path in (tmp_path / "a").iterdir()}
    assert files == {"forgotten", "journal", "kept", "key", "lock", "meta.json", "rows", "sums"}


def check_only_released_is_kept(head, folder: Path, released: np.ndarray, solved: list) -> None:
    assert np.array_equal(head.release().model.weight.numpy(), released)
    data = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert released.tobytes() in data
    for _, weights in solved:
        assert not any(row.tobytes() in data for row in weights)
    held = [value.weights for value in vars(head).values() if hasattr(value, "weights")]
    assert [np.array_equal(value, released) for value in held] == [True]


def test_the_certificate_names_no_weights_that_were_never_released() -> None:
    """Whoever was forgotten, what is published differs in commitments and in the noisy weights."""
    x, y, ids = make_data()
    published = []
    for gone in (ids[:4], ids[80:84]):
        others = {*ids[:4], *ids[80:84]} - set(gone)
        keep = [i for i, name in enumerate(ids) if name not in others]
        head = make_head()
        head.learn((x[keep], y[keep]), [ids[i] for i in keep])
        head.release()
        run = head.forget(gone, epsilon=1.0, delta=1e-5, noise=SeededNoise(0))
        plain = certify(run.record, delta=1e-5).model_dump(mode="json")
        assert plain["weights"]["before"] is None
        text = json.dumps(plain)
        for value in (plain["created"], plain["record"], plain["digest"], plain["weights"]["after"],
                      plain["data"]["forget"]["root"]):  # fmt: skip
            text = text.replace(value, "")
        assert run.record.weights_before not in text
        published.append(text)
    assert published[0] == published[1]


def test_the_report_tells_passes_from_zero_alone() -> None:
    """Those from the weights before depend on the forgotten: in no record, certificate or page."""
    x, y, ids = make_data()
    head = make_head()
    head.learn((x, y), ids)
    head.release()
    for budget in ({}, {"epsilon": 1.0, "delta": 1e-5}):
        run = head.forget([ids[len(budget)]], **budget)
        certificate = certify(run.record, delta=1e-5)
        page = render_report(run.record, certificate)
        counted = run.record.gradient_evaluations
        if budget:
            assert (counted, certificate.gradient_evaluations) == (0, None)
            assert "depends on what was forgotten, and no noise covers that" in page
        else:
            assert counted == certificate.gradient_evaluations == len(head) * head.half_passes // 2
            assert "the way that was taken" in page


def test_a_start_that_does_not_converge_is_replaced_by_zero(monkeypatch) -> None:
    """Nothing published tells; only the solve from zero may refuse."""
    x, y, ids = make_data()
    head = make_head()
    head.learn((x, y), ids)
    head.release()
    real = convex.solve

    def stuck(objective, start, tolerance):
        found = real(objective, start, tolerance)
        reached = not start.any()
        return Solution(found.weights, reached, found.bound, found.half_passes)

    monkeypatch.setattr(convex, "solve", stuck)
    run = head.forget(ids[:4], epsilon=1.0, delta=1e-5)
    assert run.record.recipe.noise_std > 0
    monkeypatch.setattr(convex, "solve", lambda o, s, t: Solution(np.zeros_like(s), False, 1.0, 2))
    digest = head.digest()
    with pytest.raises(UnlearningError, match="from zero the gradient stays"):
        head.forget(ids[4:5], epsilon=1.0, delta=1e-5)
    assert head.digest() == digest


def test_a_tolerance_below_rounding_is_refused() -> None:
    x, y, ids = make_data()
    head = make_head(tolerance=1e-17)
    head.learn((x, y), ids)
    with pytest.raises(UnlearningError, match="above the tolerance"):
        head.release()


def test_measure_counts_passes_of_each_start() -> None:
    x, y, ids = make_data()
    head = make_head()
    head.learn((x, y), ids)
    head.release()
    found = head.measure(ids[:1])
    assert set(found) == {"zero", "un-noised"}
    assert 0 < found["un-noised"] < found["zero"]
    head.forget(ids[:1], epsilon=1.0, delta=1e-5)
    assert set(head.measure(ids[1:2])) == {"zero", "released"}


def test_poisson_regression_of_counts() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 4))
    y = rng.poisson(np.exp(x[:, 0] / np.linalg.norm(x, axis=1)))
    head = ConvexHead(
        Features(bits=10), outputs=1, loss="poisson", weight_decay=1e-4, tolerance=1e-8, key=KEY
    )
    head.learn((x, y), list(range(300)))
    scores = head.release().model(torch.from_numpy(x)).numpy()[:, 0]
    assert np.corrcoef(scores, x[:, 0])[0, 1] > 0.8
    assert np.exp(scores).sum() == pytest.approx(y.sum(), rel=0.05)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": "absolute"}, "loss is 'absolute'; it must be one of softmax"),
        ({"weight_decay": 0.0}, "weight_decay is 0.0"),
        ({"tolerance": -1.0}, "tolerance is -1.0"),
        ({"loss": "poisson"}, "outputs for Poisson regression"),
    ],
)
def test_bad_settings(given, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make_head(**given)


def test_a_budget_is_both_numbers_and_a_known_noise() -> None:
    x, y, ids = make_data(12)
    head = make_head()
    head.learn((x, y), ids)
    with pytest.raises(InputError, match="give both epsilon and delta"):
        head.forget(ids[:1], epsilon=1.0)
    with pytest.raises(InputError, match="noise is"):
        head.forget(ids[:1], epsilon=1.0, delta=1e-5, noise=object())
    assert len(head) == 12


def test_values_of_losses_are_their_definitions() -> None:
    z, t = np.array([[0.3, -0.2, 2.0]]), np.array([[0.0, 1.0, 0.0]])
    assert evaluate("softmax", z, t)[0] == pytest.approx(math.log(np.exp(z).sum()) + 0.2)
    logistic = sum(math.log1p(math.exp(v)) for v in z[0]) + 0.2
    assert evaluate("logistic", z, t)[0] == pytest.approx(logistic)
    assert evaluate("squared-hinge", z, t)[0] == pytest.approx(1.3**2 + 1.2**2 + 3.0**2)
    assert evaluate("poisson", z, t)[0] == pytest.approx(np.exp(z).sum() + 0.2)
