"""What each recipe guarantees: hand-computed values, limits, extremes and other libraries."""

from __future__ import annotations

import math
from functools import partial

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting import pld, rdp

from expunge.accounting import gaussian
from expunge.accounting.guarantee import guarantee, log_delta, mu
from expunge.errors import InputError
from expunge.recipes import (
    Execution,
    GradientClipping,
    LinearModel,
    ModelClipping,
    OutputPerturbation,
    Retraining,
    Sharding,
)

close = partial(pytest.approx, rel=1e-10)


def clip_gradients(**changes) -> GradientClipping:
    base = {
        "start_clip": 1.5, "grad_clip": 2.0, "learning_rate": 0.02, "weight_decay": 5.0,
        "steps": 4, "noise_std": 0.5,
    }  # fmt: skip
    return GradientClipping(**base | changes)


def clip_models(**changes) -> ModelClipping:
    base = {
        "model_clip": 0.5, "learning_rate": 0.1, "weight_decay": 0.0, "noise_std": 0.5, "steps": 6
    }  # fmt: skip
    return ModelClipping(**base | changes)


class TestOutputPerturbation:
    def test_distance_over_noise(self) -> None:
        recipe = OutputPerturbation(start_clip=3.0, noise_std=4.0)
        assert mu(recipe) == close(1.5)
        assert mu(recipe, compared_to="centre") == close(0.75)
        assert guarantee(recipe, epsilon=1.0).delta == close(gaussian.delta(1.0, 1.5))
        assert guarantee(recipe, epsilon=0.0).survival_bound == close(math.erf(0.75 / math.sqrt(8)))

    @pytest.mark.parametrize(("clip", "sigma", "value"), [(0, 0, 0), (0, 1, 0), (1, 0, math.inf)])
    def test_without_distance_or_noise(self, clip, sigma, value) -> None:
        assert mu(OutputPerturbation(start_clip=clip, noise_std=sigma)) == value

    def test_nothing_is_certified_without_a_clip(self) -> None:
        found = guarantee(OutputPerturbation(start_clip=math.inf, noise_std=1.0), delta=1e-5)
        assert (found.epsilon, found.mu, found.survival_bound) == (math.inf, math.inf, 1.0)

    @pytest.mark.parametrize("noise", [0.7, 2.0, 30.0])
    def test_dp_accounting_agrees(self, noise: float) -> None:
        """Their privacy loss distribution up to its grid; their Rényi bound from above."""
        recipe = OutputPerturbation(start_clip=0.5, noise_std=noise)
        event = dp_accounting.GaussianDpEvent(noise)
        losses = pld.PLDAccountant(value_discretization_interval=1e-3).compose(event)
        renyi = rdp.RdpAccountant().compose(event)
        for epsilon in (0.0, 0.1, 1.0, 3.0):
            ours = guarantee(recipe, epsilon=epsilon).delta
            assert ours == pytest.approx(losses.get_delta(epsilon), rel=1e-3, abs=1e-12)
            assert ours <= renyi.get_delta(epsilon) * (1 + 1e-9) + 1e-300
        ours = guarantee(recipe, delta=1e-5).epsilon
        assert ours == pytest.approx(dp_accounting.get_epsilon_gaussian(noise, 1e-5), rel=1e-6)
        assert ours <= renyi.get_epsilon(1e-5)


class TestGradientClipping:
    def test_one_step_by_hand(self) -> None:
        one = clip_gradients(steps=1)
        assert mu(one) == close((0.9 * 3 + 0.08) / 0.5)
        assert mu(one, compared_to="centre") == close((0.9 * 1.5 + 0.08) / 0.5)
        no_gradient = clip_gradients(steps=1, grad_clip=0.0)
        assert mu(no_gradient) == close(0.9 * 3 / 0.5)

    def test_start_noise_alone_and_with_steps(self) -> None:
        """One more step in front: V gains (ρ^T σ0)²."""
        recipe = clip_gradients(start_noise_std=2.0, steps=2)
        W = 0.81 * 3 + 0.08 * 1.9
        V = 0.81**2 * 4 + 0.25 * (1 + 0.81)
        assert mu(recipe) == close(min(1.5, W / math.sqrt(V)))
        assert mu(clip_gradients(start_noise_std=2.0, noise_std=0.0)) == close(1.5)
        assert mu(clip_gradients(noise_std=0.0)) == math.inf

    @pytest.mark.parametrize("start_noise", [0.0, 0.7])
    @pytest.mark.parametrize("clip", [None, 0.3, 50.0])
    @pytest.mark.parametrize("decay", [0.0, 5.0])
    def test_constant_numbers_and_constant_lists_agree(self, start_noise, clip, decay) -> None:
        base = {"start_noise_std": start_noise, "model_clip": clip, "weight_decay": decay}
        numbers = clip_gradients(steps=30, **base)
        lists = clip_gradients(steps=30, learning_rate=[0.02] * 30, noise_std=[0.5] * 30, **base)
        mixed = clip_gradients(steps=30, noise_std=[0.5] * 30, **base)
        assert mu(numbers) == close(mu(lists), rel=1e-11)
        assert mu(numbers) == close(mu(mixed), rel=1e-11)

    @pytest.mark.parametrize("seed", range(25))
    def test_restarts_against_all_pairs(self, seed: int) -> None:
        """Every projection may start the argument anew at 2R, every step may end it: O(T²)."""
        rng = np.random.default_rng(seed)
        T = int(rng.integers(1, 25))
        gamma, sigma = rng.uniform(0, 0.05, T), rng.uniform(0, 1, T) * (rng.random(T) < 0.8)
        C1, decay, R, D, start = rng.uniform([0, 0, 0.01, 0.1, 0], [5, 15, 3, 8, 1])
        rho, s = 1 - gamma * decay, 2 * gamma * C1
        best = D / start
        starts = [(0, D, start**2)] + [(t + 1, 2 * R, sigma[t] ** 2) for t in range(T)]
        for first, W, V in starts:
            best = min(best, W / math.sqrt(V) if V > 0 else math.inf)
            for t in range(first, T):
                W, V = rho[t] * W + s[t], rho[t] ** 2 * V + sigma[t] ** 2
                best = min(best, W / math.sqrt(V) if V > 0 else math.inf)
        recipe = GradientClipping(
            start_clip=D / 2, grad_clip=C1, learning_rate=gamma, weight_decay=decay, steps=T,
            noise_std=sigma, start_noise_std=start, model_clip=R,
        )  # fmt: skip
        assert mu(recipe) == close(best)

    def test_projection_to_the_centre_forgets_everything(self) -> None:
        assert mu(clip_gradients(model_clip=0.0)) == 0
        assert mu(clip_gradients(start_clip=0.0)) == 0
        assert guarantee(clip_gradients(start_clip=0.0), delta=1e-9).epsilon == 0

    def test_unbounded_gradients_leave_only_start_noise_and_projections(self) -> None:
        assert mu(clip_gradients(grad_clip=math.inf)) == math.inf
        assert mu(clip_gradients(grad_clip=math.inf, start_noise_std=6.0)) == close(0.5)
        assert mu(clip_gradients(grad_clip=math.inf, model_clip=0.2)) == close(0.8)

    def test_decay_next_to_one(self) -> None:
        """ρ = 1 - γλ is rounded up; so near to 1 that floats cannot say what is left: refused."""
        rate, decay = 0.1, 10 * (1 - 1.5e-6)
        exact = (1 - mpmath.mpf(rate) * mpmath.mpf(decay)) * 3 / mpmath.mpf(0.5)
        ours = mu(clip_gradients(learning_rate=rate, weight_decay=decay, grad_clip=0.0, steps=1))
        assert exact <= ours <= exact * (1 + 1e-9)
        with pytest.raises(InputError, match="by at least 1e-06"):
            clip_gradients(learning_rate=rate, weight_decay=9.999999999999998)


class TestModelClipping:
    def test_start_noise_is_the_first_factor(self) -> None:
        recipe = clip_models(steps=1, start_clip=2.0, start_noise_std=3.0)
        first = float(gaussian.delta(0.5, 4 / 3))
        expected = first * float(gaussian.delta(math.log1p(math.expm1(0.5) / first), 2.0))
        assert guarantee(recipe, epsilon=0.5).delta == close(expected, rel=1e-9)
        without = clip_models(steps=1, start_clip=2.0)
        assert log_delta(without, 0.5) == log_delta(clip_models(steps=1), 0.5)

    def test_compared_to_the_centre_the_first_step_is_half_as_far(self) -> None:
        first = float(gaussian.delta(1.0, 1.0))
        second = first * float(gaussian.delta(math.log1p(math.expm1(1.0) / first), 2.0))
        found = guarantee(clip_models(steps=2), epsilon=1.0, compared_to="centre")
        assert found.delta == close(second, rel=1e-9)
        assert found.centre is not None
        assert found.centre.delta == found.delta < found.retrained.delta
        survival = math.erf(1 / math.sqrt(8)) * math.erf(2 / math.sqrt(8)) ** 8
        nine = clip_models(steps=9)
        assert guarantee(nine, epsilon=0.0).survival_bound == close(survival, rel=1e-9)

    def test_schedules(self) -> None:
        varied = clip_models(noise_std=[0.5] * 6, learning_rate=[0.1] * 6)
        assert log_delta(varied, 1.0) == log_delta(clip_models(), 1.0)
        silent = clip_models(noise_std=[0.5, 0.0, 0.5, 0.0, 0.0, 0.5])
        assert log_delta(silent, 1.0) == close(log_delta(clip_models(steps=3), 1.0))
        assert log_delta(clip_models(noise_std=0.0), 1.0) == 0
        assert log_delta(clip_models(model_clip=0.0), 1.0) == -math.inf
        assert log_delta(clip_models(model_clip=math.inf), 1.0) == 0

    def test_as_many_steps_as_there_are(self) -> None:
        assert log_delta(clip_models(steps=10_000), 1.0) < -5000
        assert log_delta(clip_models(steps=10_000, model_clip=100.0), 1.0) == pytest.approx(0)


class TestExactMethods:
    @pytest.mark.parametrize("recipe", [Retraining(), LinearModel(), Sharding(8, 4)], ids=repr)
    def test_zero_and_zero_whatever_is_asked_and_however_it_ran(self, recipe) -> None:
        ran = Execution(tail_delta=1e-9, releases=3)
        for given in ({}, {"delta": 1e-300}, {"epsilon": 0.0}, {"epsilon": 3.0, "execution": ran}):
            found = guarantee(recipe, **given)
            assert (found.epsilon, found.delta, found.mu) == (0.0, 0.0, 0.0)
            assert found.survival_bound == 0
            assert found.retrained == found.centre
        assert mu(recipe, execution=ran) == 0
        assert log_delta(recipe, 0.0, execution=ran) == -math.inf

    def test_a_target_that_is_none_is_refused_here_too(self) -> None:
        with pytest.raises(InputError, match=r"delta is 2\.0"):
            guarantee(Retraining(), delta=2.0)


class TestExecution:
    @pytest.mark.parametrize("n", [1, 2, 9, 100])
    def test_releases_multiply_mu_by_their_root(self, n: int) -> None:
        for recipe in (OutputPerturbation(start_clip=1.0, noise_std=3.0), clip_gradients()):
            assert mu(recipe, execution=Execution(releases=n)) == close(math.sqrt(n) * mu(recipe))
        shared = log_delta(clip_models(), 3.0, execution=Execution(releases=n))
        together = math.log(n) + log_delta(clip_models(), 3.0 / n)
        assert shared == close(min(together, 0.0), rel=1e-9)

    def test_rounding_adds_to_each_step(self) -> None:
        coarse = Execution(rounding=0.04)
        assert mu(clip_gradients(), execution=coarse) == close(mu(clip_gradients(grad_clip=3.0)))
        lists = clip_gradients(noise_std=[0.5] * 4)
        assert mu(lists, execution=coarse) == close(mu(clip_gradients(), execution=coarse))

    def test_tail_is_added_on_both_sides(self) -> None:
        recipe, tail = OutputPerturbation(start_clip=1.0, noise_std=3.0), 1e-7
        plain = guarantee(recipe, epsilon=1.0).delta
        found = guarantee(recipe, epsilon=1.0, execution=Execution(tail_delta=tail, releases=1))
        assert found.delta == close(plain + (1 + math.e) * tail)
        solved = guarantee(recipe, delta=1e-5, execution=Execution(tail_delta=tail))
        assert solved.epsilon > guarantee(recipe, delta=1e-5).epsilon
        again = guarantee(recipe, epsilon=solved.epsilon, execution=Execution(tail_delta=tail))
        assert again.delta <= 1e-5
        hopeless = guarantee(recipe, delta=1e-5, execution=Execution(tail_delta=0.1))
        assert hopeless.epsilon == math.inf

    def test_refused(self) -> None:
        for given, sentence in (
            ({"rounding": -1.0}, "rounding is -1.0; it must be a finite number >= 0"),
            ({"rounding": math.nan}, "rounding is nan; it must be a finite number >= 0"),
            ({"rounding": "0"}, "rounding is '0'; it must be a finite number >= 0"),
            ({"tail_delta": 1.0}, "tail_delta is 1.0; it must be a number in [0, 1)"),
            ({"releases": 0}, "releases is 0; it must be a whole number >= 1"),
            ({"releases": 1.5}, "releases is 1.5; it must be a whole number >= 1"),
            ({"releases": math.nan}, "releases is nan; it must be a whole number >= 1"),
            ({"releases": True}, "releases is True; it must be a whole number >= 1"),
        ):
            with pytest.raises(InputError) as error:
                Execution(**given)
            assert str(error.value) == sentence


EITHER = "give either delta or epsilon: the other one is computed"
QUESTIONS = [
    ({}, EITHER), ({"delta": 0.1, "epsilon": 1.0}, EITHER),
    ({"delta": 0.1, "compared_to": "zero"},
     "compared_to is 'zero'; it must be 'retrained' or 'centre'"),
    *(({"delta": delta}, f"delta is {delta!r}; it must be a number in (0, 1)")
      for delta in (0, 1, -0.1, 2.0, math.nan, True, "0.1")),
    *(({"epsilon": epsilon},
       f"epsilon is {epsilon!r}; it must be a number in [0, 709] (e^epsilon must be finite)")
      for epsilon in (-1.0, 710.0, math.inf, math.nan, True, "1")),
]  # fmt: skip


@pytest.mark.parametrize(("given", "sentence"), QUESTIONS)
def test_questions_that_are_none(given, sentence) -> None:
    with pytest.raises(InputError) as error:
        guarantee(clip_gradients(), **given)
    assert str(error.value) == sentence
