"""plan: recipes that meet the target and say what they leave."""

import math

import numpy as np
import pytest

from expunge import InputError, guarantee, plan
from expunge.accounting.precision import choose_precision
from expunge.recipes import Execution


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (10.0, 1e-5)])
@pytest.mark.parametrize("compared_to", ["retrained", "centre"])
def test_every_candidate_meets_the_target(epsilon: float, delta: float, compared_to: str) -> None:
    found = plan(epsilon=epsilon, delta=delta, parameters=3_985, compared_to=compared_to)
    for candidate in found.candidates:
        real = Execution()
        if candidate.method != "retraining":
            real = Execution(rounding=choose_precision(candidate.recipe, 3_985).rounding)
        again = guarantee(candidate.recipe, delta=delta, compared_to=compared_to, execution=real)
        assert again.epsilon <= epsilon
        assert again == candidate.guarantee
        if candidate.method != "retraining":
            assert again.epsilon > 0.999 * epsilon, "the largest radius the target allows"


def test_noise_that_remains_has_the_wanted_scale() -> None:
    found = plan(epsilon=1.0, delta=1e-5, parameters=10_000, scale=0.05, steps=20)
    rng = np.random.default_rng(0)
    for candidate in found.candidates[:3]:
        assert candidate.noise_left == pytest.approx(0.05)
        assert candidate.expected_norm == pytest.approx(5.0)
    recipe = found.candidates[1].recipe
    x = np.zeros(10_000)
    for _ in range(recipe.steps):
        x += -recipe.learning_rate * recipe.weight_decay * x
        x += rng.normal(scale=recipe.noise_std, size=x.size)
    assert np.std(x) == pytest.approx(0.05, rel=0.03)


def test_the_bound_on_what_survives_is_the_centre_guarantee() -> None:
    found = plan(epsilon=1.0, delta=1e-5, parameters=20_042)
    output = found.candidates[0]
    mu_c = output.guarantee.centre.mu
    assert output.survival_bound == pytest.approx(math.erf(mu_c / 2 / math.sqrt(2)))
    assert found.restart_is_as_good
    assert "at most 8.2 % of runs" in found.advice


def test_a_weak_target_lets_the_old_model_matter_only_where_it_is_as_long_as_the_noise() -> None:
    few = plan(epsilon=20.0, delta=1e-5, parameters=4)
    assert not few.restart_is_as_good
    assert "it can matter" in few.advice
    for epsilon in (8.0, 100.0):
        many = plan(epsilon=epsilon, delta=1e-5, parameters=20_042)
        assert max(c.survival_bound for c in many.candidates) > 0.5
        longest = max(c.kept_norm / c.expected_norm for c in many.candidates[:3])
        assert f"at most {100 * longest:.3g} % as long as the noise" in many.advice
        assert many.restart_is_as_good
        assert "can matter" not in many.advice


def test_the_advice_says_plainly_what_noise_buys_and_names_the_way() -> None:
    for epsilon in (1.0, 8.0):
        advice = plan(epsilon=epsilon, delta=1e-5, parameters=20_042).advice
        assert advice.startswith("Noise buys nothing here")
        assert 'name = "retraining"' in advice
        assert "expunge.retrain" in advice
        assert "(0, 0)" in advice


@pytest.mark.parametrize("steps", [300, 6000])
def test_where_any_start_is_forgotten_the_radius_stays_sane(steps: int) -> None:
    given = {"epsilon": 1.0, "delta": 1e-5, "parameters": 20_042}
    found = plan(**given, steps=steps)
    recipe = found.candidates[1].recipe
    noise = found.candidates[1].expected_norm
    assert recipe.start_clip == pytest.approx(100 * noise)
    assert recipe.grad_clip > 0
    assert found.candidates[1].guarantee.epsilon > 0.999
    assert "any start is forgotten" in found.notes[-1]
    few = plan(**given, steps=10)
    assert few.candidates[1].recipe.start_clip < 1
    assert not any("any start" in note for note in few.notes)


def test_retraining_stands_beside_them_with_zero_and_zero() -> None:
    exact = plan(epsilon=1.0, delta=1e-5, parameters=100).candidates[-1]
    assert (exact.method, exact.survival_bound, exact.kept_norm) == ("retraining", 0.0, 0.0)
    assert (exact.guarantee.epsilon, exact.guarantee.delta) == (0.0, 0.0)


def test_default_scale_is_an_initialisation() -> None:
    found = plan(epsilon=1.0, delta=1e-5, parameters=10_000)
    assert found.scale == pytest.approx(1 / math.sqrt(100))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameters": 0}, "parameters is 0; it must be a model, or a whole number from 1 to"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"scale": -1.0}, "scale is -1.0"),
        ({"scale": math.inf}, "scale is inf"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be a finite number > 0"),
        ({"delta": 2.0}, "delta is 2.0"),
        ({"weight_decay": 100.0, "learning_rate": 0.1}, "it must be below 1"),
    ],
)
def test_bad_input(changes: dict[str, float], message: str) -> None:
    with pytest.raises(InputError) as caught:
        plan(**({"epsilon": 1.0, "delta": 1e-5, "parameters": 100} | changes))
    assert message in str(caught.value)
