"""calibrate: never on the unsafe side, never far from the edge."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge import (
    CalibrationError,
    GradientClipping,
    InputError,
    ModelClipping,
    OutputPerturbation,
    calibrate,
    guarantee,
)
from expunge.accounting.precision import choose_precision
from expunge.accounting.solving import bracket
from expunge.recipes import Execution


def gradient(noise_std: float = 1.0, **changes: float) -> GradientClipping:
    fields = {
        "start_clip": 0.01, "grad_clip": 100.0, "learning_rate": 1e-4, "weight_decay": 10.0,
        "steps": 1,
    }  # fmt: skip
    return GradientClipping(**(fields | {"noise_std": noise_std} | changes))


def test_published_values() -> None:
    found = calibrate(lambda s: gradient(s), epsilon=1.0, delta=1e-5)
    assert found.noise_std == pytest.approx(0.14915, abs=5e-6)
    found = calibrate(lambda s: OutputPerturbation(0.01, s), epsilon=1.0, delta=1e-5)
    assert found.noise_std == pytest.approx(0.0746127, abs=1e-7)


@settings(max_examples=60)
@given(
    epsilon=st.floats(1e-3, 50),
    log_delta=st.floats(-40, -1),
    start_clip=st.floats(1e-6, 1e3),
    steps=st.integers(1, 200),
)
def test_smallest_noise_is_safe_and_tight(
    epsilon: float, log_delta: float, start_clip: float, steps: int
) -> None:
    delta = math.exp(log_delta)

    def make(s: float) -> GradientClipping:
        return gradient(s, start_clip=start_clip, steps=steps, grad_clip=start_clip)

    found = calibrate(make, epsilon=epsilon, delta=delta)
    assert guarantee(found, epsilon=epsilon).delta <= delta
    assert guarantee(found, delta=delta).epsilon <= epsilon
    assert guarantee(make(found.noise_std * (1 - 1e-9)), epsilon=epsilon).delta > delta


@settings(max_examples=40)
@given(epsilon=st.floats(0.01, 20), ratio=st.floats(0.05, 3.0))
def test_fewest_steps_are_not_one_too_many(epsilon: float, ratio: float) -> None:
    def make(n: float) -> ModelClipping:
        return ModelClipping(ratio / 2, 0.1, 0.0, 1.0, int(n))

    found = calibrate(make, epsilon=epsilon, delta=1e-5, find="fewest")
    assert guarantee(found, epsilon=epsilon).delta <= 1e-5
    if found.steps > 1:
        assert guarantee(make(found.steps - 1), epsilon=epsilon).delta > 1e-5


@pytest.mark.parametrize("compared_to", ["retrained", "centre"])
def test_largest_clip_is_safe_and_tight(compared_to: str) -> None:
    def make(clip: float) -> OutputPerturbation:
        return OutputPerturbation(clip, 0.5)

    found = calibrate(make, epsilon=2.0, delta=1e-6, compared_to=compared_to, find="largest")
    at = guarantee(found, epsilon=2.0, compared_to=compared_to)
    assert at.delta <= 1e-6
    wider = guarantee(make(found.start_clip * (1 + 1e-9)), epsilon=2.0, compared_to=compared_to)
    assert wider.delta > 1e-6


def test_centre_needs_half_the_noise_of_retrained() -> None:
    def make(s):
        return OutputPerturbation(1.0, s)

    one = calibrate(make, epsilon=1.0, delta=1e-5)
    other = calibrate(make, epsilon=1.0, delta=1e-5, compared_to="centre")
    assert one.noise_std == pytest.approx(2 * other.noise_std, rel=1e-9)


def test_real_execution_costs_noise() -> None:
    real = Execution(rounding=1e-3, tail_delta=1e-9, releases=4)
    ideal = calibrate(lambda s: gradient(s), epsilon=1.0, delta=1e-5)
    found = calibrate(lambda s: gradient(s), epsilon=1.0, delta=1e-5, execution=real)
    assert guarantee(found, delta=1e-5, execution=real).epsilon <= 1.0
    assert found.noise_std > 2 * ideal.noise_std


def test_a_real_run_of_that_many_parameters_meets_the_target() -> None:
    def make(s: float) -> GradientClipping:
        return gradient(s, steps=20, grad_clip=1.0, learning_rate=0.01)

    ideal = calibrate(make, epsilon=1.0, delta=1e-5)
    found = calibrate(make, epsilon=1.0, delta=1e-5, parameters=11_000_000)
    for recipe, meets in ((ideal, False), (found, True)):
        real = Execution(rounding=choose_precision(recipe, 11_000_000).rounding)
        assert (guarantee(recipe, delta=1e-5, execution=real).epsilon <= 1.0) == meets
    assert ideal.noise_std < found.noise_std < ideal.noise_std * 1.001


def test_parameters_may_be_a_model_whose_trainable_ones_are_counted() -> None:
    sizes = ((10**6, True), (10**9, False), (3, True))
    layers = [SimpleNamespace(numel=lambda n=n: n, requires_grad=trained) for n, trained in sizes]
    model = SimpleNamespace(parameters=lambda: iter(layers))
    given = {"epsilon": 1.0, "delta": 1e-5}
    found = calibrate(gradient, parameters=model, **given)
    assert found == calibrate(gradient, parameters=10**6 + 3, **given)
    assert found.noise_std > calibrate(gradient, **given).noise_std
    for wrong in (0, True, 2.5, "many"):
        with pytest.raises(InputError, match="a model, or a whole number"):
            calibrate(gradient, parameters=wrong, **given)


def test_a_schedule_is_scaled_as_a_whole() -> None:
    shape = np.geomspace(1, 4, 50)
    found = calibrate(
        lambda s: GradientClipping(0.1, 1.0, 0.01, 5.0, 50, shape * s), epsilon=1.0, delta=1e-5
    )
    assert found.noise_std[-1] == pytest.approx(4 * found.noise_std[0])
    assert guarantee(found, delta=1e-5).epsilon == pytest.approx(1.0, rel=1e-8)


def test_nothing_to_forget_needs_no_noise() -> None:
    found = calibrate(lambda s: OutputPerturbation(0.0, s), epsilon=1.0, delta=1e-5)
    assert found.noise_std == 0.0


def test_no_noise_allows_only_a_restart() -> None:
    found = calibrate(lambda c: OutputPerturbation(c, 0.0), epsilon=1.0, delta=1e-5, find="largest")
    assert found.start_clip == 0.0


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda n: gradient(0.01, steps=int(n), weight_decay=0.0), "without weight_decay"),
        (
            lambda n: gradient(0.01, steps=int(n), weight_decay=10.0),
            "2 \\* grad_clip / weight_decay",
        ),
        (lambda n: ModelClipping(20.0, 0.1, 0.0, 0.5, int(n)), "model_clip is so large"),
    ],
)
def test_impossible_targets_say_which_bound_forbids_them(make: object, reason: str) -> None:
    with pytest.raises(CalibrationError, match=reason):
        calibrate(make, epsilon=1.0, delta=1e-5, find="fewest")


def test_a_clip_that_limits_nothing_is_said() -> None:
    with pytest.raises(CalibrationError, match="not what limits"):
        calibrate(
            lambda c: GradientClipping(0.0, c, 0.1, 0.0, 1, 1.0), epsilon=1.0, delta=1e-5,
            find="largest",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 800.0}, "epsilon is 800.0; it must be a number in [0, 709]"),
        ({"epsilon": -1.0}, "epsilon is -1.0"),
        ({"epsilon": math.nan}, "epsilon is nan"),
        ({"delta": 0.0}, "delta is 0.0; it must be a number in (0, 1)"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"find": "best"}, "find is 'best'"),
        ({"start": 0.0}, "start is 0.0"),
    ],
)
def test_bad_targets_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError) as caught:
        calibrate(
            lambda s: OutputPerturbation(1.0, s), **({"epsilon": 1.0, "delta": 1e-5} | changes)
        )
    assert message in str(caught.value)


@pytest.mark.parametrize("start", [0.0, 5e-324, 1e-309, 1e308, math.inf])
@pytest.mark.parametrize("root", [0.0, 1e-200, 1.0, 1e200, math.inf])
def test_a_bracket_is_found_from_any_start(start: float, root: float) -> None:
    found = bracket(lambda x: 1.0 if x < root else 0.0, start, lowest=1e-250, highest=1e250)
    assert found is None if root == math.inf else found[0] <= root <= found[1] or found[0] == 1e-250
