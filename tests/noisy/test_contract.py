"""What every method of the engine must keep, fed from one table."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn.functional import cross_entropy

from engine import NOISY, equal, flatten, make_batches, make_mlp, plain, train_by_hand
from expunge import OutputPerturbation, certify, guarantee
from expunge.accounting.precision import list_levels
from expunge.certificates.record import RunRecord
from expunge.noisy.noise import SeededNoise, SystemNoise
from expunge.noisy.run import unlearn
from expunge.processes.weights import hash_weights
from expunge.training.randomness import capture_random

torch.set_num_threads(1)
each_method = pytest.mark.parametrize("recipe", NOISY.values(), ids=NOISY.keys())


def go(recipe, model=None, batches=None, noise=None, **options):
    return unlearn(
        make_mlp() if model is None else model,
        make_batches() if batches is None else batches,
        recipe,
        loss_fn=cross_entropy,
        noise=SeededNoise(0) if noise is None else noise,
        **({"centre": "zero"} | options),
    )


@pytest.mark.parametrize("name", ["gradient-clipping", "model-clipping"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_without_clip_and_noise_it_is_sgd_bit_for_bit(name, weight_decay):
    model, batches = make_mlp(), make_batches()
    run = go(plain(11, 0.1, weight_decay)[name], model, batches)
    assert equal(run.model, train_by_hand(model, batches, 11, 0.1, weight_decay))
    assert run.record.grid == 0
    assert run.record.noise["source"] == "none"
    assert run.record.noise_keys == 0


@each_method
def test_same_seed_is_bit_equal_and_another_is_not(recipe):
    first, again, other = go(recipe), go(recipe), go(recipe, noise=SeededNoise(1))
    assert equal(first.model, again.model)
    assert first.record.trace == again.record.trace
    assert not equal(first.model, other.model)


@each_method
def test_system_noise_never_repeats(recipe):
    first, second = (go(recipe, noise=SystemNoise()) for _ in range(2))
    assert not equal(first.model, second.model)
    assert first.record.noise["releasable"]


@each_method
def test_consecutive_steps_draw_different_noise(recipe):
    states: list[torch.Tensor] = []
    zero = copy.deepcopy(make_mlp())
    for p in zero.parameters():
        p.detach().zero_()
    run = go(recipe, zero, on_step=lambda _, model: states.append(flatten(model)))
    moves = torch.stack([*states]).diff(dim=0) if len(states) > 1 else flatten(run.model)[None]
    for i in range(len(moves)):
        for j in range(i):
            correlation = float(torch.corrcoef(moves[[i, j]])[0, 1])
            assert abs(correlation) < 0.6  # 1 if one draw were used twice, here ± 0.08
    assert len(set(run.record.trace.noise_norm)) == len(run.record.trace)


@each_method
def test_model_and_global_random_state_are_untouched(recipe):
    model = make_mlp(dropout=0.5)
    before = copy.deepcopy(model)
    state = capture_random()
    go(recipe, model)
    assert equal(model, before)
    assert all(p.grad is None for p in model.parameters())
    after = capture_random()
    assert state.keys() == after.keys() >= {"torch", "numpy.keys", "python.words"}
    assert all(torch.equal(state[name], after[name]) for name in state)


@each_method
@pytest.mark.parametrize("training", [True, False])
def test_result_is_a_plain_module_in_the_same_mode(recipe, training):
    model = make_mlp().train(training)
    run = go(recipe, model)
    assert run.model is not model
    assert run.model.training is training
    fresh = make_mlp(seed=9)
    fresh.load_state_dict(run.model.state_dict())
    assert equal(fresh, run.model)
    assert all(p.requires_grad and p.grad is None for p in run.model.parameters())
    assert run.record.weights_after == hash_weights(fresh.state_dict())
    assert run.record.weights_before == hash_weights(model.state_dict())


@each_method
def test_record_and_certificate_round_trip(recipe, tmp_path):
    run = go(recipe, noise=SystemNoise(), forget_ids=["a"], retain_ids=["b", "c"] * 12)
    run.record.save(tmp_path / "record.json")
    assert RunRecord.load(tmp_path / "record.json") == run.record
    certificate = certify(run.record, delta=1e-5)
    ideal = guarantee(recipe, delta=1e-5).epsilon
    assert certificate.epsilon >= ideal
    assert certificate.epsilon <= ideal * 1.001


def noise_statistic(record, scale: float) -> float:
    """The two-sided p-value of Σ ‖ξ_t‖²/σ_t² ~ χ²(T d), if σ were ``scale`` times the recipe's."""
    trace, d = record.trace, record.parameters
    total = sum(
        (n / (scale * s)) ** 2 for n, s in zip(trace.noise_norm, trace.noise_std, strict=True)
    )
    law = stats.chi2(d * len(trace))
    return 2 * min(law.cdf(total), law.sf(total))


@each_method
def test_realised_noise_matches_its_sigma_and_no_other(recipe):
    record = go(recipe, noise=SeededNoise(5)).record
    assert noise_statistic(record, 1.0) > 1e-3
    if record.parameters * len(record.trace) > 300:
        assert noise_statistic(record, 1.2) < 1e-3
        assert noise_statistic(record, 1 / 1.2) < 1e-3


@each_method
def test_noise_in_the_weights_is_what_the_trace_says(recipe):
    """No gradient, no pull, start at the centre: what is released is the sum of the draws."""
    levels = [sigma for sigma in list_levels(recipe) if sigma > 0]
    model = make_mlp()
    for p in model.parameters():
        p.detach().zero_()

    def flat_loss(output, target):
        return output.sum() * 0.0

    still = recipe
    if not isinstance(recipe, OutputPerturbation):
        still = replace(recipe, weight_decay=0.0, model_clip=1e9)
    run = unlearn(
        model, make_batches(), still, loss_fn=flat_loss, noise=SeededNoise(2), centre="zero"
    )
    sigma = math.sqrt(sum(level**2 for level in levels))
    x = flatten(run.model).numpy() / sigma
    assert stats.kstest(x, "norm").pvalue > 1e-3
    assert stats.chi2(len(x)).sf(np.sum((x * 1.2) ** 2)) < 2e-2
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 0.3


@each_method
def test_start_at_the_centre_never_sees_the_old_model(recipe):
    centre = make_mlp(seed=4).state_dict()
    first = go(recipe, make_mlp(seed=1), centre=centre, start="centre")
    second = go(recipe, make_mlp(seed=2), centre=centre, start="centre")
    assert equal(first.model, second.model)
    assert first.record.start == "centre"
    assert first.record.recipe.start_clip == 0


@each_method
def test_huge_models_are_forgotten_up_to_the_clip(recipe):
    """x̂ and 10³⁰ x̂ start in the same direction at the same radius."""
    model, huge = make_mlp(), make_mlp()
    for p in huge.parameters():
        p.detach().mul_(1e30)
    a, b = go(recipe, model), go(recipe, huge)
    assert torch.isfinite(flatten(b.model)).all()
    if recipe.start_clip is not None:
        assert torch.allclose(flatten(a.model), flatten(b.model), atol=1e-4)


def test_more_steps_than_batches_cycle_and_are_counted():
    run = go(NOISY["gradient-clipping"], batches=make_batches(count=2, size=5))
    assert run.record.gradient_evaluations == 7 * 5
    assert len(run.record.trace) == 7
