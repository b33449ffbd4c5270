"""What must hold for every recipe: more noise never hurts, larger clips never help, and so on."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from expunge.accounting import gaussian
from expunge.accounting.guarantee import guarantee, log_delta, mu
from expunge.recipes import Execution, GradientClipping, ModelClipping, OutputPerturbation, schedule

some = settings(max_examples=120, derandomize=True)
FACTORS = st.floats(1.0, 20.0)
SLACK = 1e-9


@st.composite
def gradient_recipes(draw) -> GradientClipping:
    steps = draw(st.integers(1, 6))
    positive, zero = st.floats(1e-3, 10), st.just(0.0)

    def series(values):
        return draw(st.one_of(values, st.lists(values, min_size=steps, max_size=steps)))

    return GradientClipping(
        start_clip=draw(positive), grad_clip=draw(st.one_of(positive, zero)),
        learning_rate=series(st.floats(0, 0.09)),
        weight_decay=draw(st.one_of(st.floats(0, 10), zero)), steps=steps,
        noise_std=series(st.floats(0.01, 5)),
        start_noise_std=draw(st.one_of(st.floats(0.01, 5), zero)),
        model_clip=draw(st.one_of(positive, st.none())),
    )  # fmt: skip


@st.composite
def model_recipes(draw) -> ModelClipping:
    steps = draw(st.integers(1, 5))
    noise = st.floats(0.3, 5)
    start = draw(st.one_of(st.none(), st.floats(0.01, 5)))
    return ModelClipping(
        model_clip=draw(st.floats(0.05, 5)), learning_rate=0.1, weight_decay=0.0,
        noise_std=draw(st.one_of(noise, st.lists(noise, min_size=steps, max_size=steps))),
        steps=steps, start_clip=start,
        start_noise_std=0.0 if start is None else draw(st.one_of(st.just(0.0), noise)),
    )  # fmt: skip


output_recipes = st.builds(
    OutputPerturbation, start_clip=st.floats(1e-3, 10), noise_std=st.floats(0.01, 10)
)
recipes = st.one_of(gradient_recipes(), model_recipes(), output_recipes)


def scaled(recipe, field: str, factor: float):
    value = getattr(recipe, field)
    changed = [x * factor for x in value] if isinstance(value, tuple) else value * factor
    return dataclasses.replace(recipe, **{field: changed})


def no_worse(better, worse, epsilon: float, compared_to: str = "retrained") -> bool:
    left = log_delta(better, epsilon, compared_to=compared_to)
    right = log_delta(worse, epsilon, compared_to=compared_to)
    return left <= right + SLACK * (1 + abs(right))


@some
@given(recipes, FACTORS, st.floats(0, 20), st.sampled_from(["retrained", "centre"]))
def test_more_noise_never_hurts(recipe, factor, epsilon, compared_to) -> None:
    assert no_worse(scaled(recipe, "noise_std", factor), recipe, epsilon, compared_to)
    if getattr(recipe, "start_noise_std", 0.0) > 0:
        assert no_worse(scaled(recipe, "start_noise_std", factor), recipe, epsilon, compared_to)


@some
@given(gradient_recipes(), FACTORS, st.floats(0, 20))
def test_more_decay_never_hurts(recipe, factor, epsilon) -> None:
    assume(np.max(recipe.learning_rate) * recipe.weight_decay * factor < 1)
    assert no_worse(scaled(recipe, "weight_decay", factor), recipe, epsilon)


def test_decay_that_is_too_small_to_see_changes_nothing() -> None:
    """The best prefix of 10,000 is τ = D/s = 100, with λ = 0 as with λ = 1e-18."""
    for decay in (0.0, 1e-18, 1e-12):
        recipe = GradientClipping(
            start_clip=1.0, grad_clip=0.1, learning_rate=0.1, weight_decay=decay, steps=10_000,
            noise_std=1.0,
        )  # fmt: skip
        assert mu(recipe) == pytest.approx(4 / math.sqrt(100), rel=1e-8)


@some
@given(recipes, FACTORS, st.floats(0, 20), st.sampled_from(["retrained", "centre"]))
def test_larger_clips_never_help(recipe, factor, epsilon, compared_to) -> None:
    for field in ("start_clip", "grad_clip", "model_clip"):
        if getattr(recipe, field, None):
            assert no_worse(recipe, scaled(recipe, field, factor), epsilon, compared_to)


@some
@given(st.one_of(gradient_recipes(), model_recipes()), st.floats(0, 20))
def test_a_prefix_is_never_better_than_the_whole(recipe, epsilon) -> None:
    assume(recipe.steps > 1)
    shorter = dataclasses.replace(
        recipe, steps=recipe.steps - 1, noise_std=schedule(recipe.noise_std, recipe.steps)[:-1],
        learning_rate=schedule(recipe.learning_rate, recipe.steps)[:-1],
    )  # fmt: skip
    assert no_worse(recipe, shorter, epsilon)


@some
@given(gradient_recipes(), st.floats(0, 1), st.data())
def test_splitting_a_step_s_noise_changes_nothing(recipe, share, data) -> None:
    """σ² = aσ² + (1-a)σ², with no gradient, decay or projection between the two."""
    at = data.draw(st.integers(0, recipe.steps - 1))
    sigma, gamma = (
        schedule(value, recipe.steps).tolist() for value in (recipe.noise_std, recipe.learning_rate)
    )
    parts = [sigma[at] * math.sqrt(share), sigma[at] * math.sqrt(1 - share)]
    plain = dataclasses.replace(recipe, model_clip=None)
    split = dataclasses.replace(
        plain, steps=recipe.steps + 1, noise_std=sigma[:at] + parts + sigma[at + 1 :],
        learning_rate=[*gamma[: at + 1], 0.0, *gamma[at + 1 :]],
    )  # fmt: skip
    assert mu(split) == pytest.approx(mu(plain), rel=1e-9)


@some
@given(recipes, st.floats(0, 30), st.sampled_from(["retrained", "centre"]))
@example(OutputPerturbation(start_clip=1.0, noise_std=1.0), 0.0, "retrained")
def test_epsilon_and_delta_are_each_other_s_inverse(recipe, epsilon, compared_to) -> None:
    found = guarantee(recipe, epsilon=epsilon, compared_to=compared_to)
    assert 0 < found.delta <= 1
    assume(1e-290 < found.delta < 1 - 1e-9)  # beyond, ε hangs on the last digits of δ
    back = guarantee(recipe, delta=found.delta, compared_to=compared_to)
    assert back.epsilon <= epsilon * (1 + 1e-6) + 1e-6
    if math.isfinite(back.epsilon) and back.epsilon <= 709:
        again = guarantee(recipe, epsilon=back.epsilon, compared_to=compared_to)
        assert again.delta <= found.delta


@some
@given(recipes, st.floats(1e-12, 0.5))
def test_the_centre_is_never_further_than_the_retrained_model(recipe, delta) -> None:
    found = guarantee(recipe, delta=delta)
    assert found.centre.epsilon <= found.retrained.epsilon * (1 + SLACK)
    assert found.survival_bound == guarantee(recipe, epsilon=0.0).survival_bound
    if found.centre.mu is not None:
        assert found.survival_bound == pytest.approx(gaussian.delta(0.0, found.centre.mu))


@some
@given(recipes, st.floats(0, 1), st.floats(1e-15, 1e-3), st.integers(2, 50), st.floats(0, 20))
def test_execution_only_ever_costs(recipe, rounding, tail, releases, epsilon) -> None:
    ideal = log_delta(recipe, epsilon)
    for execution in (
        Execution(rounding=rounding), Execution(tail_delta=tail), Execution(releases=releases),
        Execution(rounding, tail, releases),
    ):  # fmt: skip
        found = log_delta(recipe, epsilon, execution=execution)
        assert found >= ideal - 1e-5 - 1e-11 * abs(ideal)


@some
@given(gradient_recipes(), st.integers(-900, 900).map(lambda k: 2.0**k))
def test_only_ratios_count(recipe, scale) -> None:
    """All lengths in other units: the same guarantee, from 1e-271 to 1e271."""
    other = recipe
    for field in ("start_clip", "grad_clip", "noise_std", "start_noise_std", "model_clip"):
        if getattr(recipe, field):
            other = scaled(other, field, scale)
    assert mu(other) == pytest.approx(mu(recipe), rel=1e-9)


@pytest.mark.parametrize("clip", [5e-324, 1e-300, 1e-160, 1.0, 1e160, 1e300, 8e307])
@pytest.mark.parametrize("noise", [5e-324, 1e-300, 1e-160, 1.0, 1e160, 1e300, 8e307])
def test_no_size_makes_a_false_or_broken_statement(clip: float, noise: float) -> None:
    """One step of each method: μ = D/σ = 2·clip/noise, whatever the sizes; never 0, never nan."""
    true_log = math.log(clip) - math.log(noise) + math.log(2)
    for recipe in (
        OutputPerturbation(start_clip=clip, noise_std=noise),
        GradientClipping(
            start_clip=clip, grad_clip=0.0, learning_rate=0.1, weight_decay=0.0, steps=1,
            noise_std=noise,
        ),
        GradientClipping(
            start_clip=clip, grad_clip=0.0, learning_rate=0.1, weight_decay=0.0, steps=1,
            noise_std=[noise],
        ),
    ):  # fmt: skip
        value = mu(recipe)
        assert value > 0
        assert math.log(value) >= true_log - 1e-12
        if -680 < true_log < 680:
            assert math.log(value) <= true_log + 1e-12
        found = guarantee(recipe, epsilon=1.0)
        assert 0 < found.delta <= 1
        found = guarantee(recipe, delta=1e-5)
        assert found.epsilon >= 0
        assert found.delta == 1e-5
    mixed = ModelClipping(
        model_clip=clip, learning_rate=0.1, weight_decay=0.0, noise_std=noise, steps=2
    )
    assert -math.inf < log_delta(mixed, 1.0) <= 0
    assert guarantee(mixed, delta=1e-5).epsilon >= 0
