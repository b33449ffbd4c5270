"""The second computation of the guarantee agrees with the first, and is one."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.accounting.guarantee import guarantee, mu
from expunge.certificates.second_accountant import recompute
from expunge.recipes import Execution, GradientClipping, LinearModel, Recipe, Retraining, Sharding
from tests.accounting.test_properties import recipes

GRADIENT = GradientClipping(
    start_clip=1.0, grad_clip=0.5, learning_rate=0.1, weight_decay=1.0, steps=4, noise_std=0.7
)


@settings(max_examples=100)
@given(
    recipes,
    st.sampled_from(["retrained", "centre"]),
    st.sampled_from([0.0, 1e-4]),
    st.sampled_from([0.0, 1e-9]),
    st.sampled_from([1, 3]),
    st.sampled_from([1e-2, 1e-5, 1e-8]),
)
def test_two_computations_agree(recipe, side, rounding, tail, releases, delta) -> None:
    """The float accountant is never below 50 digits, and above by less than 1e-9."""
    execution = Execution(rounding=rounding, tail_delta=tail, releases=releases)
    claimed = guarantee(recipe, delta=delta, compared_to=side, execution=execution)
    exact_mu, delta_at = recompute(recipe, side, execution)
    if exact_mu is None:
        assert claimed.mu is None
    else:
        assert exact_mu <= claimed.mu * (1 + 1e-15)
        assert claimed.mu <= exact_mu * (1 + 1e-11)
    if math.isfinite(claimed.epsilon):
        assert delta_at(claimed.epsilon) <= delta
        assert claimed.epsilon < 1e-9 or delta_at(claimed.epsilon * (1 - 1e-9)) > delta
    survival = guarantee(recipe, epsilon=0.0, execution=execution).survival_bound
    truth = recompute(recipe, "centre", execution)[1](0)
    assert truth <= survival * (1 + 1e-15)
    assert survival <= truth * (1 + 1e-9) + 1e-300


def test_long_and_extreme_runs_agree() -> None:
    rates = [1e-3 * (1 - t / 3000) for t in range(3000)]
    slow = replace(GRADIENT, steps=3000, learning_rate=rates, noise_std=[0.1 + r for r in rates])
    cases = [
        slow, replace(slow, model_clip=0.2), replace(slow, model_clip=0.02),
        replace(GRADIENT, steps=10**5, weight_decay=1e-9),
        replace(GRADIENT, steps=10**5, weight_decay=0.0, start_noise_std=3.0),
        replace(GRADIENT, steps=1, model_clip=0.01),
    ]  # fmt: skip
    for recipe in cases:
        exact, _ = recompute(recipe, "retrained", Execution())
        assert exact * (1 - 1e-13) <= mu(recipe) <= exact * (1 + 1e-10)


@pytest.mark.parametrize("recipe", [Retraining(), LinearModel(), Sharding(2, 1)], ids=repr)
def test_exact_methods_have_zero_and_zero(recipe: Recipe) -> None:
    exact, delta_at = recompute(recipe, "retrained", Execution(tail_delta=1e-9))
    assert (exact, delta_at(0), delta_at(1.0)) == (0, 0, 0)


def test_a_wrong_recomputation_would_be_seen() -> None:
    """The agreement test is not a tautology: a 1e-6 change of any input shows."""
    exact, _ = recompute(GRADIENT, "retrained", Execution())
    for name in ("start_clip", "grad_clip", "learning_rate", "noise_std"):
        other = replace(GRADIENT, **{name: getattr(GRADIENT, name) * (1 + 1e-6)})
        changed, _ = recompute(other, "retrained", Execution())
        assert abs(changed / exact - 1) > 1e-8
