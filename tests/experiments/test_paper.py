"""The paper's formulas where they are sound, and their refusal where they are not."""

from __future__ import annotations

import itertools
import math

import dp_accounting
import pytest
from dp_accounting import rdp
from mpmath import mp

import paper
from engine import make_batches, make_mlp
from expunge import (
    GradientClipping,
    ModelClipping,
    OutputPerturbation,
    SeededNoise,
    certify,
    guarantee,
    unlearn,
)
from expunge.accounting import gaussian
from expunge.accounting.dpsgd import group_log_delta
from expunge.errors import InputError
from expunge.recipes import GroupDPSGD, NoisyDescent, Retraining, RewindToDelete

DELTAS = (1e-12, 1e-5, 0.01, 0.5)


def theta(epsilon: float, mu: float) -> float:
    """θ_ε(μ) with 60 digits: an oracle that shares nothing with the module under test."""
    with mp.workdps(60):
        e, m = mp.mpf(epsilon), mp.mpf(mu)
        return float(mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m))


@pytest.mark.parametrize("delta", DELTAS)
def test_theorem_1_without_decay_is_refused_exactly_where_it_is_false(delta: float) -> None:
    """One step and no gradient: μ = 2ε/(3 sqrt(log(1/δ))), so the oracle decides."""
    recipe = GradientClipping(3.0, 0.0, 0.1, 0.0, 1, 0.0)
    outcomes: set[bool] = set()
    for share in (0.05, 0.3, 0.6, 0.9, 1.2, 1.5, 2.0, 2.6, 2.99):
        epsilon = share * math.log(1 / delta)
        sound = theta(epsilon, 2 * epsilon / (3 * math.sqrt(math.log(1 / delta)))) <= delta
        outcomes.add(sound)
        if sound:
            sigma = paper.theorem_1_noise_std(recipe, epsilon=epsilon, delta=delta)
            assert theta(epsilon, 6.0 / sigma) <= delta
        else:
            with pytest.raises(paper.DomainError, match="not sound"):
                paper.theorem_1_noise_std(recipe, epsilon=epsilon, delta=delta)
    assert outcomes == ({True} if delta == 0.5 else {True, False})


@pytest.mark.parametrize("delta", DELTAS)
def test_theorem_1_with_decay_is_sound_in_all_of_its_printed_domain(delta: float) -> None:
    for decay, steps, share in itertools.product((0.51, 0.75, 0.99), (1, 2, 30), (0.01, 1, 2.99)):
        recipe = GradientClipping(1.0, 2.0, 0.1, decay / 0.1, steps, 0.0)
        epsilon = share * math.log(1 / delta)
        sigma = paper.theorem_1_noise_std(recipe, epsilon=epsilon, delta=delta)
        rho = 1 - decay
        distance = 2 * rho**steps + 0.4 * (1 - rho**steps) / decay
        mu = distance / (sigma * math.sqrt((1 - rho ** (2 * steps)) / (1 - rho**2)))
        assert theta(epsilon, mu) <= delta


def test_theorem_1_refuses_what_it_does_not_cover() -> None:
    def noise(recipe: GradientClipping, epsilon: float = 1.0) -> float:
        return paper.theorem_1_noise_std(recipe, epsilon=epsilon, delta=1e-5)

    with pytest.raises(paper.DomainError, match=r"below 3 log\(1/delta\) = 34\.5388"):
        noise(GradientClipping(1.0, 0.0, 0.1, 0.0, 1, 0.0), epsilon=35.0)
    with pytest.raises(
        paper.DomainError, match=r"learning_rate \* weight_decay is 0\.1; .* above 1/2"
    ):
        noise(GradientClipping(1.0, 1.0, 0.1, 1.0, 1, 0.0))
    with pytest.raises(paper.DomainError, match="learning_rate is a schedule"):
        noise(GradientClipping(1.0, 1.0, (0.1, 0.2), 0.0, 2, 0.0))
    with pytest.raises(paper.DomainError, match="neither start_noise_std nor model_clip"):
        noise(GradientClipping(1.0, 1.0, 0.1, 0.0, 1, 0.0, start_noise_std=1.0))
    with pytest.raises(paper.DomainError, match="neither start_noise_std nor model_clip"):
        noise(GradientClipping(1.0, 1.0, 0.1, 0.0, 1, 0.0, model_clip=1.0))


@pytest.mark.parametrize("ratio", [0.5, 2.0, 3.9])
@pytest.mark.parametrize("start", [None, (0.5, 1.0)])
def test_theorem_2_steps_are_the_fewest_of_the_weak_recursion(
    ratio: float, start: tuple[float, float] | None
) -> None:
    C0, sigma_0 = start if start else (None, 0.0)
    first = theta(1.0, 2 * C0 / sigma_0) if C0 else 1.0
    recipe = ModelClipping(1.0, 0.1, 0.0, 2 / ratio, 1, C0, sigma_0)
    steps = paper.theorem_2_steps(recipe, epsilon=1.0, delta=1e-9)
    factor = theta(1.0, ratio)
    assert first * factor**steps <= 1e-9 < first * factor ** (steps - 1)
    strong = guarantee(ModelClipping(1.0, 0.1, 0.0, 2 / ratio, steps, C0, sigma_0), epsilon=1.0)
    assert strong.delta <= 1e-9


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.01])
def test_theorem_2_corrected_is_sound_by_its_own_weak_recursion(delta: float) -> None:
    for epsilon, steps, sigma_0 in itertools.product((0.01, 0.5, 1.0), (1, 2, 20), (0.0, 1.5)):
        recipe = ModelClipping(2.0, 0.1, 0.0, 0.0, steps, 1.0, sigma_0)
        sigma = paper.theorem_2_noise_std(recipe, epsilon=epsilon, delta=delta, algebra="corrected")
        first = theta(epsilon, 2.0 / sigma_0) if sigma_0 else 1.0
        assert first * theta(epsilon, 4.0 / sigma) ** steps <= delta


def test_theorem_2_closed_form_refuses_what_it_does_not_cover() -> None:
    recipe = ModelClipping(1.0, 0.1, 0.0, 0.0, 1, 1.0, 20.0)
    with pytest.raises(paper.DomainError, match=r"epsilon is 1\.5; it must be at most 1"):
        paper.theorem_2_noise_std(recipe, epsilon=1.5, delta=1e-5)
    with pytest.raises(paper.DomainError, match=r"start_noise_std is 20\.0; .* negative"):
        paper.theorem_2_noise_std(recipe, epsilon=1.0, delta=1e-5, algebra="corrected")
    with pytest.raises(paper.DomainError, match=r"noise_std is 0\.0"):
        paper.theorem_2_steps(recipe, epsilon=1.0, delta=1e-5)
    with pytest.raises(InputError, match="algebra is 'new'"):
        paper.theorem_2_noise_std(recipe, epsilon=1.0, delta=1e-5, algebra="new")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("delta", [*DELTAS, 0.99])
@pytest.mark.parametrize("epsilon", [1e-3, 0.3, 1.0])
def test_classical_noise_is_sound_and_never_less_than_exact(epsilon: float, delta: float) -> None:
    sigma = paper.classical_noise_std(distance=2.0, epsilon=epsilon, delta=delta)
    assert theta(epsilon, 2.0 / sigma) <= delta
    assert sigma >= 2.0 / float(gaussian.mu(epsilon, delta))


def test_classical_noise_is_refused_beyond_epsilon_1_where_it_becomes_false() -> None:
    with pytest.raises(paper.DomainError, match=r"epsilon is 10\.0; it must be at most 1"):
        paper.classical_noise_std(distance=1.0, epsilon=10.0, delta=1e-5)
    sigma = paper.classical_noise_std(distance=1.0, epsilon=10.0, delta=1e-5, enforce_domain=False)
    assert guarantee(OutputPerturbation(0.5, sigma), epsilon=10.0).delta > 2e-5


def test_group_lemma_is_never_below_the_sharp_factor() -> None:
    for epsilon, k in itertools.product((1e-3, 0.1, 1.0), (1, 2, 10)):
        group_epsilon, group_delta = paper.group_privacy(epsilon=epsilon, delta=1e-9, group_size=k)
        assert group_epsilon == pytest.approx(k * epsilon)
        assert group_delta >= 1e-9 * math.exp(paper.log_group_factor(k * epsilon, k))
    with pytest.raises(paper.DomainError, match="must be below 1"):
        paper.group_privacy(epsilon=1.0, delta=1e-5, group_size=100)
    printed = paper.group_privacy(epsilon=1.0, delta=1e-5, group_size=100, enforce_domain=False)
    assert printed == pytest.approx((100.0, 100 * math.exp(100) * 1e-5))
    assert paper.group_privacy(epsilon=100.0, delta=0.5, group_size=100, enforce_domain=False) == (
        10_000.0,
        math.inf,
    )


def test_group_noise_errs_to_more_noise_than_its_own_lemma_needs() -> None:
    for epsilon, k in ((1.0, 1), (1.0, 50), (50.0, 225)):
        sigma = paper.group_noise_std(clip=2.0, group_size=k, epsilon=epsilon, delta=1e-5)
        assert theta(epsilon, 2.0 * k / sigma) <= 1e-5
        one = epsilon / k
        by_lemma = paper.classical_noise_std(
            distance=2.0, epsilon=one, delta=1e-5 / (k * math.exp(epsilon))
        )
        assert sigma >= by_lemma * (1 - 1e-12)
    with pytest.raises(paper.DomainError, match="at most group_size = 2"):
        paper.group_noise_std(clip=1.0, group_size=2, epsilon=3.0, delta=1e-5)


@pytest.mark.parametrize("mu", [0.01, 0.3, 2**0.5, 5.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
def test_sound_renyi_conversion_lies_above_the_exact_value(mu: float, delta: float) -> None:
    renyi = paper.epsilon_from_renyi(mu, delta)
    assert theta(renyi, mu) <= delta
    accountant = rdp.RdpAccountant().compose(dp_accounting.GaussianDpEvent(1 / mu))
    assert renyi <= accountant.get_epsilon(delta) * (1 + 1e-6)  # fewer orders there
    if delta <= 1e-5:  # not vacuous either; for large δ the Rényi route is several times looser
        assert renyi < 1.6 * float(gaussian.epsilon(mu, delta))


def test_rules_of_the_tables_are_sound_only_for_a_huge_delta() -> None:
    recipe = GradientClipping(0.01, 100.0, 1e-4, 10.0, 1, 0.0)
    assert paper.tables_noise_std(recipe, epsilon=1.0, delta=0.287) == pytest.approx(0.02827, 1e-4)
    with pytest.raises(paper.DomainError, match=r"certifies delta = 0\.2862"):
        paper.tables_noise_std(recipe, epsilon=1.0, delta=0.286)
    assert paper.tables_epsilon(renyi_epsilon=1.0, delta=0.5) >= 0
    with pytest.raises(paper.DomainError, match="conversion of the paper's tables is not sound"):
        paper.tables_epsilon(renyi_epsilon=1.0, delta=1e-5)


def test_renyi_divergence_is_linear_in_the_order_and_infinite_without_noise() -> None:
    recipe = GradientClipping(1.0, 0.5, 0.1, 1.0, 4, 0.3)
    one = paper.renyi_divergence(recipe, order=1.0)
    assert paper.renyi_divergence(recipe, order=7.0) == pytest.approx(7 * one)
    mu = guarantee(recipe, delta=1e-5).mu
    assert mu is not None
    assert one >= mu**2 / 2 * (1 - 1e-12)
    quiet = GradientClipping(1.0, 0.5, 0.1, 1.0, 4, 0.0)
    assert paper.renyi_divergence(quiet, order=1.0) == math.inf
    assert paper.renyi_divergence(GradientClipping(0, 0, 0.1, 1.0, 4, 0.0), order=1.0) == 0.0
    with pytest.raises(InputError, match=r"order is 0\.5"):
        paper.renyi_divergence(recipe, order=0.5)
    with pytest.raises(InputError, match="products is 'new'"):
        paper.renyi_divergence(recipe, order=2.0, products="new")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, 710.0])
def test_bad_epsilon_is_one_sentence(epsilon: float) -> None:
    with pytest.raises(InputError, match=r"epsilon is .*; it must be"):
        paper.classical_noise_std(distance=1.0, epsilon=epsilon, delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, math.nan])
def test_bad_delta_is_one_sentence(delta: float) -> None:
    with pytest.raises(InputError, match=r"delta is .*; it must be"):
        paper.group_noise_std(clip=1.0, group_size=1, epsilon=1.0, delta=delta)


def test_bad_sizes_are_one_sentence() -> None:
    with pytest.raises(InputError, match=r"distance is 0\.0; it must be"):
        paper.classical_noise_std(distance=0.0, epsilon=1.0, delta=1e-5)
    for group_size in (0, 1.5, math.nan):
        with pytest.raises(InputError, match=r"group_size is .*; it must be a whole number"):
            paper.group_privacy(epsilon=1.0, delta=1e-5, group_size=group_size)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"mu is -1\.0; it must be"):
        paper.epsilon_from_renyi(-1.0, 1e-5)
    with pytest.raises(InputError, match=r"learning_rate \* grad_clip is 0\.0"):
        paper.tables_steps(GradientClipping(1.0, 0.0, 0.1, 1.0, 1, 0.0))


# The other systems of the paper's comparison table. Linear losses with gradients +G for the
# forgotten and -G for the retained examples attain every inequality: the laws are known exactly.
PROBLEM = {
    "learning_rate": 0.3,
    "gradient_bound": 2.0,
    "smoothness": 0.0,
    "strong_convexity": 0.5,
    "examples": 50,
    "group_size": 5,
}


def descend(x: float, steps: int, *, retained_only: bool) -> float:
    eta, m, G = 0.3, 0.5, 2.0
    mean_gradient = -G if retained_only else -G + 2 * G * 5 / 50
    for _ in range(steps):
        x = x - eta * (mean_gradient + m * x)
    return x


@pytest.mark.parametrize(("T", "K"), [(1, 1), (20, 1), (3, 40)])
def test_noisy_descent_is_exact_on_linear_losses(T: int, K: int) -> None:
    sigma = 0.2
    on_all = descend(descend(0.0, T, retained_only=False), K, retained_only=True)
    on_retained = descend(0.0, T + K, retained_only=True)
    variance = sigma**2 * sum((1 - 0.3 * 0.5) ** (2 * j) for j in range(T + K))
    recipe = NoisyDescent(**PROBLEM, noise_std=sigma, train_steps=T, steps=K)  # pyright: ignore[reportArgumentType]
    exact = abs(on_all - on_retained) / math.sqrt(variance)
    certified = guarantee(recipe, delta=1e-5).mu
    assert certified is not None
    assert exact * (1 - 1e-12) <= certified <= exact * (1 + 1e-9)


@pytest.mark.parametrize(("T", "K"), [(2, 1), (20, 5), (30, 30)])
def test_rewind_to_delete_is_exact_on_linear_losses(T: int, K: int) -> None:
    sigma = 0.2
    checkpoint = descend(0.0, T - K, retained_only=False)
    distance = abs(descend(checkpoint, K, retained_only=True) - descend(0.0, T, retained_only=True))
    recipe = RewindToDelete(**PROBLEM, noise_std=sigma, train_steps=T, steps=K)  # pyright: ignore[reportArgumentType]
    certified = guarantee(recipe, delta=1e-5).mu
    assert certified is not None
    assert distance / sigma * (1 - 1e-12) <= certified <= distance / sigma * (1 + 1e-9)


def test_without_convexity_the_noise_of_rewinding_is_exponential_in_the_smoothness() -> None:
    def log_mu(smoothness: float) -> float:
        problem = PROBLEM | {"smoothness": smoothness, "convex": False}
        recipe = RewindToDelete(**problem, noise_std=1.0, train_steps=100, steps=50)  # pyright: ignore[reportArgumentType]
        found = guarantee(recipe, delta=1e-5).mu
        assert found is not None
        return math.log(found)

    growth = log_mu(3.0) - log_mu(1.0)
    assert growth > 90 * math.log((1 + 0.3 * 3.5) / (1 + 0.3 * 1.5))


def test_retraining_certifies_zero_and_zero() -> None:
    assert guarantee(Retraining(), delta=1e-5).epsilon == 0.0
    assert guarantee(Retraining(), epsilon=0.0).delta == 0.0


@pytest.mark.parametrize(("sigma", "steps"), [(3.0, 1), (10.0, 100)])
@pytest.mark.parametrize("delta", [1e-3, 1e-8, 1e-20])
def test_dp_sgd_on_full_batches_is_the_gaussian_mechanism(
    sigma: float, steps: int, delta: float
) -> None:
    mu = math.sqrt(steps) / sigma
    epsilon = float(gaussian.epsilon(mu, delta))
    certified = math.exp(group_log_delta(GroupDPSGD(1.0, sigma, 1.0, steps, 1), epsilon))
    assert theta(epsilon, mu) <= certified <= 12 * delta


@pytest.mark.parametrize("compared_to", ["retrained", "centre"])
def test_both_calibrations_meet_the_target_and_the_exact_one_is_tight(compared_to):
    found = {}
    for kind in ("exact", "classical"):
        recipe = paper.calibrate_output(
            0.3, epsilon=0.7, delta=1e-6, calibration=kind, compared_to=compared_to
        )
        found[kind] = recipe.noise_std
        assert guarantee(recipe, delta=1e-6, compared_to=compared_to).epsilon <= 0.7
    assert found["classical"] > 1.2 * found["exact"]
    exact = paper.calibrate_output(0.3, epsilon=0.7, delta=1e-6, compared_to=compared_to)
    tight = guarantee(exact, delta=1e-6, compared_to=compared_to).epsilon
    assert tight == pytest.approx(0.7, rel=1e-9)


def test_the_published_ratio_of_the_two():
    """THEORY section 5: 4.8448 D against 3.7306 D at (1, 1e-5)."""
    exact, classical = (
        paper.calibrate_output(0.5, epsilon=1.0, delta=1e-5, calibration=kind).noise_std
        for kind in ("exact", "classical")
    )
    assert exact == pytest.approx(3.7306, abs=1e-4)
    assert classical == pytest.approx(4.8448, abs=1e-4)


def test_classical_calibration_is_refused_above_one():
    with pytest.raises(paper.DomainError, match="at most 1 for the classical formula"):
        paper.calibrate_output(0.3, epsilon=1.5, delta=1e-6, calibration="classical")
    paper.calibrate_output(0.3, epsilon=1.5, delta=1e-6)


def test_calibrated_output_perturbation_runs():
    recipe = paper.calibrate_output(0.3, epsilon=1.0, delta=1e-5, calibration="classical")
    run = unlearn(make_mlp(), make_batches(), recipe, noise=SeededNoise(0), centre="zero")
    assert certify(run.record, delta=1e-5).epsilon <= 1.0
    assert run.model(make_batches(1)[0][0]).isfinite().all()


@pytest.mark.parametrize("change", [{"calibration": "wrong"}, {"compared_to": "old"}])
def test_bad_calibrations_are_refused(change):
    with pytest.raises(InputError):
        paper.calibrate_output(
            0.3, **({"epsilon": 0.5, "delta": 1e-5, "calibration": "classical"} | change)
        )
