"""The mechanism audit: worst cases, the engine itself in a stack, sound bounds, E1, E6, E7."""

import math

import numpy as np
import pytest
import torch
from scipy import special

import paper
from defects import repeat_noise
from expunge import GradientClipping, InputError, ModelClipping, OutputPerturbation, calibrate
from expunge.accounting.guarantee import guarantee, log_delta
from expunge.accounting.precision import choose_precision
from expunge.auditing.attacks import (
    Instructions,
    Trials,
    list_adversaries,
    replaces_first_step,
)
from expunge.auditing.bounds import Claim
from expunge.auditing.mechanism import audit_mechanism, make_claim
from expunge.auditing.trials import unlearn_stack
from expunge.noisy.noise import NoiseStream, SeededNoise
from expunge.noisy.run import unlearn
from expunge.recipes import schedule
from random_recipes import audit_place

torch.set_num_threads(1)
DELTA = 1e-5


def mixing_delta(recipe, epsilon, compared_to, splits):
    """δ that the splits attain: a - e^ε b after the last step, with the best last threshold."""
    C2, T = recipe.model_clip, recipe.steps
    sigma = schedule(recipe.noise_std, T)
    if compared_to == "centre":
        components = [[(1.0, C2)], [(1.0, 0.0)]]
        first = 1
    else:
        high = recipe.start_clip if recipe.start_noise_std > 0 else math.inf
        components, first = None, 0
        starts = [[(1.0, high)], [(1.0, -high)]]
    for t in range(first, T):
        if components is None:
            law, spread = starts, recipe.start_noise_std
        else:
            law, spread = components, sigma[t - 1]
        above = [
            sum(w * (special.ndtr((m - splits[t]) / spread) if spread > 0 else m > 0) for w, m in c)
            for c in law
        ]
        components = [[(a, C2), (1 - a, -C2)] for a in above]
    x = np.linspace(-12 * sigma[-1] - C2, 12 * sigma[-1] + C2, 400_001)
    tails = [sum(w * special.ndtr((m - x) / sigma[-1]) for w, m in c) for c in components]
    return float(np.max(tails[0] - math.exp(epsilon) * tails[1]))


@pytest.mark.parametrize("epsilon", [0.0, 0.7])
@pytest.mark.parametrize("compared_to", ["retrained", "centre"])
@pytest.mark.parametrize(
    "recipe",
    [
        ModelClipping(0.5, 1e-3, 10.0, 0.5, 6),
        ModelClipping(1.0, 0.1, 1.0, [1.0, 0.7, 2.0], 3),
        ModelClipping(1.0, 0.1, 1.0, 0.8, 2, start_clip=0.5, start_noise_std=1.0),
    ],
)
def test_the_splits_attain_the_mixing_bound(recipe, compared_to, epsilon):
    (*_, adversary) = [
        a for a in list_adversaries(recipe, compared_to, (epsilon,)) if a.kind == "push"
    ]
    if replaces_first_step(recipe, compared_to):
        recipe = ModelClipping(
            recipe.model_clip, recipe.learning_rate, 1.0, recipe.noise_std, recipe.steps
        )
    attained = mixing_delta(recipe, epsilon, compared_to, adversary.splits)
    proved = math.exp(log_delta(recipe, epsilon, compared_to=compared_to))
    assert attained == pytest.approx(proved, rel=1e-6)
    assert attained <= proved * (1 + 1e-12)


# The stack is the engine


def shift(patch, row, size=3):
    """From here on noise is that of one row of a stack: the same stream, further on."""

    def draw(self, out, *, step, position, std, draw=NoiseStream.draw):
        draw(self, out, step=step, position=position + row * size, std=std)

    patch.setattr(NoiseStream, "draw", draw)


STACKED = [
    OutputPerturbation(1.0, 0.7),
    GradientClipping(1.0, 2.0, 0.1, 3.0, 4, 0.5),
    GradientClipping(0.5, 2.0, [0.1, 0.3, 0.2], 1.0, 3, [0.5, 1.0, 0.3], 0.3, model_clip=0.6),
    ModelClipping(1.0, 0.1, 1.0, 0.8, 3),
    ModelClipping(1.0, 0.1, 1.0, 0.8, 2, start_clip=0.5, start_noise_std=1.0),
]


@pytest.mark.parametrize("recipe", STACKED)
def test_a_row_of_the_stack_is_bit_for_bit_a_run_of_unlearn(recipe, monkeypatch):
    rows = 12
    centre = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    steps = getattr(recipe, "steps", 0)
    for adversary in list_adversaries(recipe, "retrained"):
        starts = adversary.start(rows) + centre

        def public(n):
            return {"weight": centre[:2].expand(n, 2), "bias": centre[2:].expand(n, 1)}

        given = {"retain_loader": Instructions(steps, centre), "recipe": recipe}
        given |= {"loss_fn": adversary.loss, "noise": SeededNoise(3)}
        stack = unlearn_stack(Trials(starts), centre=public(rows), **given)
        for row in (0, 1, 2, 3, 8, 11):  # the adversary treats these as it treats row 0 of 1
            with monkeypatch.context() as patch:
                shift(patch, row)
                run = unlearn(Trials(starts[row : row + 1]), centre=public(1), **given)
            for name, value in run.model.state_dict().items():
                assert torch.equal(value[0], stack.state_dict()[name][row]), (name, row)
        assert run.record.execution.rounding == choose_precision(recipe, 3).rounding


def test_the_stack_refuses_what_it_cannot_run():
    model = Trials(torch.zeros(4, 3, dtype=torch.float64))
    with pytest.raises(InputError, match="without noise"):
        unlearn_stack(model, [], OutputPerturbation(1.0, 0.0), loss_fn=max, noise=SeededNoise(0))
    model.bias = torch.nn.Parameter(torch.zeros(5, 1))
    with pytest.raises(InputError, match="first dimension of every parameter"):
        unlearn_stack(model, [], OutputPerturbation(1.0, 1.0), loss_fn=max, noise=SeededNoise(0))


# Sound over everything, sharp where theory is


@pytest.mark.parametrize("place", range(20))
def test_no_lower_bound_exceeds_its_certificate(place):
    recipe, found, mu = audit_place(place, 60_000, single=300_000)
    assert not found.contradicts, found.verdict
    assert found.epsilon_lower <= found.epsilon_certified
    assert found.delta_lower <= found.delta_certified
    if mu is not None:
        assert found.mu_lower <= mu
    if getattr(recipe, "steps", 1) == 1:
        assert found.mu_lower >= 0.9 * mu
        assert found.epsilon_lower > 0


# What the published code claimed


def test_e1_the_audit_refutes_the_tables_conversion():
    recipe = GradientClipping(0.01, 100.0, 1e-4, 10.0, 1, 0.0)
    sigma = paper.tables_noise_std(recipe, epsilon=1.0, delta=DELTA, enforce_domain=False)
    claimed = paper.tables_epsilon(renyi_epsilon=1.0, delta=DELTA, enforce_domain=False)
    printed = GradientClipping(0.01, 100.0, 1e-4, 10.0, 1, sigma)
    found = audit_mechanism(printed, delta=DELTA, trials=40_000, seed=1)
    assert claimed == pytest.approx(1.0036, abs=1e-4)
    assert found.epsilon_lower > 2 * claimed
    assert not found.contradicts  # of what we certify for it, 6.57


def test_e6_the_audit_refutes_the_factor_four():
    C0, C1, gamma, T = 0.01, 10.0, 1e-4, 10
    sigma = (2 * C0 + 2 * C1 * gamma * T) / math.sqrt(4 * T)
    found = audit_mechanism(
        GradientClipping(C0, C1, gamma, 0.0, T, sigma), delta=DELTA, trials=40_000, seed=2
    )
    assert found.epsilon_lower > 1.0
    assert not found.contradicts  # of the 9.997 that it really gives


def test_e6_the_factor_alone_is_refuted_where_one_step_is_tight():
    """μ = 2 was run and √2 was meant: the audit sees the difference, not only the conversion."""
    C0, C1, gamma = 0.01, 10.0, 1e-4
    sigma = (2 * C0 + 2 * C1 * gamma) / math.sqrt(4)
    recipe = GradientClipping(C0, C1, gamma, 0.0, 1, sigma)
    meant = Claim(6.573, DELTA, math.sqrt(2), ((0.0, 2 * float(special.ndtr(0.7072)) - 1),))
    found = audit_mechanism(recipe, delta=DELTA, claim=meant, trials=40_000, seed=3)
    assert found.contradicts
    assert found.mu_lower > math.sqrt(2)


def test_e7_repeated_noise_gives_the_start_away(monkeypatch):
    """Calibrated as it should be, (1, 1e-5): with one draw for all steps nothing is hidden."""
    recipe = calibrate(
        lambda sigma: GradientClipping(0.01, 100.0, 1e-4, 750.0, 6, sigma), epsilon=1.0, delta=DELTA
    )
    honest = audit_mechanism(recipe, delta=DELTA, trials=40_000, seed=4)
    repeat_noise(monkeypatch)
    found = audit_mechanism(recipe, delta=DELTA, trials=40_000, seed=4)
    assert not honest.contradicts
    assert honest.epsilon_lower < 1
    assert found.contradicts
    assert found.epsilon_lower > 4 > 1.0
    assert "lattice" in found.attack


def test_e7_as_published(monkeypatch):
    """The run of the MNIST table, with the noise that was printed and drawn once."""
    repeat_noise(monkeypatch)
    recipe = GradientClipping(0.01, 10.0, 1e-4, 750.0, 6, 0.007752)
    found = audit_mechanism(recipe, delta=DELTA, trials=60_000, seed=5)
    assert found.epsilon_lower > 1.0036


# Budgets, files, refusals


def test_a_time_budget_says_what_it_bought():
    recipe = OutputPerturbation(1.0, 4.0)
    short = audit_mechanism(recipe, delta=DELTA, seconds=0.2, seed=0)
    assert short.trials >= 428
    assert short.confidence == 0.999
    assert 0 <= short.resolution < 1
    assert short.epsilon_ceiling > 0
    few = audit_mechanism(recipe, delta=DELTA, trials=2_000, seed=0)
    more = audit_mechanism(recipe, delta=DELTA, trials=50_000, seed=0)
    assert few.resolution < more.resolution
    assert few.epsilon_ceiling < more.epsilon_ceiling


def test_a_seed_repeats_an_audit_and_the_system_does_not():
    recipe = OutputPerturbation(1.0, 1.0)
    one, two = (audit_mechanism(recipe, delta=DELTA, trials=3000, seed=9) for _ in range(2))
    assert one.mu_estimate == two.mu_estimate
    assert (one.noise, one.seed) == ("seeded", 9)
    others = {audit_mechanism(recipe, delta=DELTA, trials=3000).mu_estimate for _ in range(4)}
    assert len(others) > 1


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"trials": 100}, "trials is 100; it must be 428 to 536870912 for a confidence of 0.999"),
        ({"trials": 425, "confidence": 0.9999999}, "trials is 425; it must be 4"),
        ({"confidence": 1.0}, "confidence is 1.0; it must be"),
        ({"seconds": 0.0}, "seconds is 0.0; it must be"),
        ({"seed": -1}, "seed is -1; it must be"),
    ],
)
def test_unusable_options_are_refused(options, sentence):
    with pytest.raises(InputError, match=sentence):
        audit_mechanism(OutputPerturbation(1.0, 1.0), delta=DELTA, **options)


def test_noise_free_and_reference_free_recipes_are_refused():
    with pytest.raises(InputError, match="nothing to audit"):
        audit_mechanism(OutputPerturbation(1.0, 0.0), delta=DELTA, trials=2000)
    with pytest.raises(InputError, match="no finite epsilon"):
        audit_mechanism(OutputPerturbation(math.inf, 1.0), delta=DELTA, trials=2000)
    still = ModelClipping(1.0, 0.0, 0.0, 1.0, 2, start_clip=1.0, start_noise_std=1.0)
    with pytest.raises(InputError, match="to compare a noisy start to the centre"):
        audit_mechanism(still, delta=DELTA, compared_to="centre", trials=2000)
    assert audit_mechanism(still, delta=DELTA, trials=4000, seed=0).contradicts is False


@pytest.mark.parametrize("compared_to", ["retrained", "centre"])
@pytest.mark.parametrize(
    "recipe",
    [
        OutputPerturbation(0.0, 1.0),
        GradientClipping(0.0, 1.0, 0.1, 1.0, 3, 1.0),
        GradientClipping(1e-9, 0.0, 0.0, 0.0, 2, 1e-9),
        ModelClipping(0.0, 0.1, 1.0, 1.0, 2),
        ModelClipping(1e6, 0.1, 1.0, 1e6, 2, start_clip=0.0),
    ],
)
def test_degenerate_recipes_are_audited_too(recipe, compared_to):
    found = audit_mechanism(recipe, delta=DELTA, compared_to=compared_to, trials=4000, seed=0)
    assert not found.contradicts, found.verdict
    assert math.isfinite(found.epsilon_lower)


def test_the_claim_counts_finite_precision():
    recipe = GradientClipping(1.0, 1.0, 0.1, 1.0, 1, 1.0)
    assert make_claim(recipe, DELTA).mu > guarantee(recipe, delta=DELTA).mu
