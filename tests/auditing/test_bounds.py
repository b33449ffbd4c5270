"""The audit's statistics: exact intervals, bounds that hold and are not vacuous, learned scores."""

import math

import numpy as np
import pytest
from scipy import special, stats

from expunge import OutputPerturbation
from expunge.accounting.guarantee import guarantee, log_delta
from expunge.auditing.attacks import fit_residue, score
from expunge.auditing.bounds import (
    Claim,
    Counts,
    Threshold,
    apply_thresholds,
    bound_above,
    bound_below,
    choose_thresholds,
    fewest_runs,
    lower_delta,
    lower_epsilon,
    lower_mu,
)

DELTA = 1e-5


@pytest.mark.parametrize(("k", "n"), [(0, 40), (1, 40), (17, 40), (39, 40), (40, 40), (3, 10**6)])
@pytest.mark.parametrize("alpha", [0.2, 1e-3, 1e-7])
def test_intervals_are_what_clopper_and_pearson_define(k, n, alpha):
    low, high = bound_below(k, n, alpha), bound_above(k, n, alpha)
    assert low <= k / n <= high
    if k > 0:
        assert stats.binom.sf(k - 1, n, low) == pytest.approx(alpha, rel=1e-8)
    else:
        assert low == 0
    if k < n:
        assert stats.binom.cdf(k, n, high) == pytest.approx(alpha, rel=1e-8)
    else:
        assert high == 1


@pytest.mark.parametrize("alpha", [0.1, 0.01])
def test_intervals_cover_by_exact_enumeration(alpha):
    n = 25
    k = np.arange(n + 1)
    low, high = bound_below(k, n, alpha), bound_above(k, n, alpha)
    least = 1.0
    for p in np.linspace(0.001, 0.999, 333):
        mass = stats.binom.pmf(k, n, p)
        assert mass[low > p].sum() <= alpha
        assert mass[high < p].sum() <= alpha
        least = min(least, 1 - mass[high < p].sum())
    assert least < 1 - 0.9 * alpha  # no wider than it must be


def counts_of(mu, threshold, n):
    return Counts(n * special.ndtr(-threshold), n, n * special.ndtr(mu - threshold), n)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_bounds_tend_to_the_truth_from_below(mu):
    found = [lower_mu(counts_of(mu, mu / 2, n), 1e-3) for n in (1e3, 1e5, 1e7, 1e13)]
    assert found == sorted(found)
    assert 0.999 * mu < found[-1] < mu
    epsilon = 1.5 * mu
    best = mu / 2 + epsilon / mu  # where the likelihood ratio is e^ε
    delta = math.exp(log_delta(OutputPerturbation(mu / 2, 1.0), epsilon))
    many = counts_of(mu, best, 1e14)
    assert lower_delta(many, epsilon, 1e-3) == pytest.approx(delta, rel=1e-3)
    assert lower_delta(many, epsilon, 1e-3) < delta
    assert lower_epsilon(many, delta, 1e-3) == pytest.approx(epsilon, rel=1e-3)
    assert lower_epsilon(many, delta, 1e-3) < epsilon


def test_a_test_and_its_complement_bound_the_same_mu():
    counts = Counts(20, 1000, 700, 900)
    back = counts.exchange()
    assert (back.false, back.negatives, back.true, back.positives) == (200, 900, 980, 1000)
    assert lower_mu(back, 0.01) == pytest.approx(lower_mu(counts, 0.01), rel=1e-9)
    assert lower_epsilon(back, 0.0, 0.01) != pytest.approx(lower_epsilon(counts, 0.0, 0.01))


def test_chosen_thresholds_keep_the_confidence_and_are_not_vacuous():
    """300 audits of a known Gaussian pair at 90 %: few may exceed it, and none may say nothing."""
    rng, mu, n = np.random.default_rng(5), 1.0, 1000
    curve = ((0.0, 2 * float(special.ndtr(mu / 2)) - 1),)
    claim = Claim(guarantee(OutputPerturbation(0.5, 1.0), delta=0.01).epsilon, 0.01, mu, curve)
    exceeded, found = 0, []
    for _ in range(300):
        pilot, fresh = rng.normal(0, 1, (2, 2, n))
        pilot[1] += mu
        fresh[1] += mu
        choice = choose_thresholds(*pilot, claim, 0.9)
        tests = choice.mu, choice.epsilon, choice.delta
        bounds = apply_thresholds(choice, tuple(t.count(*fresh) for t in tests), claim, 0.9)
        found.append(bounds.mu)
        exceeded += bounds.mu > mu or bounds.epsilon > claim.epsilon or bounds.delta > curve[0][1]
    assert stats.binom.sf(exceeded - 1, 300, 0.1) > 1e-4
    assert np.median(found) > 0.75 * mu


def test_a_wrong_claim_is_refuted_by_the_same_choice():
    rng = np.random.default_rng(6)
    zero, one = rng.normal(0, 1, 20_000), rng.normal(1.25, 1, 20_000)
    claim = Claim(4.4, DELTA, 1.0, ((0.0, 0.383),))
    choice = choose_thresholds(zero[:4000], one[:4000], claim, 0.999)
    tests = choice.mu, choice.epsilon, choice.delta
    counts = tuple(t.count(zero[4000:], one[4000:]) for t in tests)
    assert apply_thresholds(choice, counts, claim, 0.999).mu > 1.0


def test_threshold_counts_both_ways_round():
    zero, one = np.array([0.0, 1.0, 2.0]), np.array([1.0, 2.0])
    assert Threshold(1.0).count(zero, one) == Counts(2, 3, 2, 2)
    assert Threshold(1.0, exchanged=True).count(zero, one) == Counts(0, 2, 1, 3)


def test_residues_see_coarse_noise_and_are_blind_to_fine_noise():
    rng = np.random.default_rng(7)
    noise = rng.normal(0, 1, (2, 8000, 1))
    for rounded, sees in ((noise, False), (noise.astype(np.float16).astype(float), True)):
        zero, one = rounded[0] + 0.1, rounded[1] - 0.1
        fitted = fit_residue(zero[:4000], one[:4000], (1.0,), 2.0**-14)
        gap = score(fitted, one[4000:]).mean() - score(fitted, zero[4000:]).mean()
        assert bool(gap > 1.0) is sees


def test_fewest_runs_is_where_a_perfect_test_begins_to_prove_something():
    for confidence in (0.9, 0.999, 0.999999):
        alpha, n = (1 - confidence) / 3, fewest_runs(confidence)
        assert lower_mu(Counts(0, n, n, n), alpha) > 0
        assert lower_mu(Counts(0, n - 2, n - 2, n - 2), alpha) == 0
