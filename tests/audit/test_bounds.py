"""The audit's statistics: exact intervals, bounds that hold and are not vacuous, learned scores."""

import math

import numpy as np
import pytest
from scipy import special, stats

from expunge import OutputPerturbation
from expunge.accounting.guarantee import guarantee, log_delta
from expunge.audit.attacks import fit_residue
from expunge.audit.bounds import Claim, bound_rate, choose_thresholds, exchange, share


@pytest.mark.parametrize(("k", "n"), [(0, 40), (1, 40), (17, 40), (39, 40), (40, 40), (3, 10**6)])
@pytest.mark.parametrize("alpha", [0.2, 1e-3, 1e-7])
def test_intervals_are_what_clopper_and_pearson_define(k, n, alpha):
    low, high = bound_rate(k, n, alpha)
    assert low <= k / n <= high
    assert stats.binom.sf(k - 1, n, low) == pytest.approx(alpha if k > 0 else 1, rel=1e-8)
    assert stats.binom.cdf(k, n, high) == pytest.approx(alpha if k < n else 1, rel=1e-8)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
def test_bounds_tend_to_the_truth_from_below(mu):
    def count(threshold, n):
        return n * special.ndtr(-threshold), n, n * special.ndtr(mu - threshold), n

    found = [float(Claim("mu", mu).bound(count(mu / 2, n), 1e-3)) for n in (1e3, 1e5, 1e7, 1e13)]
    assert found == sorted(found)
    assert 0.999 * mu < found[-1] < mu
    epsilon = 1.5 * mu
    delta = math.exp(log_delta(OutputPerturbation(mu / 2, 1.0), epsilon))
    many = count(mu / 2 + epsilon / mu, 1e14)  # where the likelihood ratio is e^ε
    for claim in (Claim("delta", delta, epsilon), Claim("epsilon", epsilon, delta)):
        assert 0.999 * claim.value < claim.bound(many, 1e-3) < claim.value


def test_a_test_and_its_complement_bound_the_same_mu():
    counts = np.array([20, 1000, 700, 900])
    mu, epsilon = Claim("mu", 1.0), Claim("epsilon", 1.0)
    assert mu.bound(exchange(counts), 0.01) == pytest.approx(mu.bound(counts, 0.01), rel=1e-9)
    assert epsilon.bound(exchange(counts), 0.01) != pytest.approx(epsilon.bound(counts, 0.01))


def test_chosen_thresholds_keep_the_confidence_and_are_not_vacuous():
    """100 audits of a Gaussian pair at 90 %: few may exceed its numbers, and none say nothing."""
    rng, mu, n = np.random.default_rng(5), 1.0, 1000
    epsilon = guarantee(OutputPerturbation(0.5, 1.0), delta=0.01).epsilon
    claims = [Claim("epsilon", epsilon, 0.01), Claim("mu", mu)]
    claims.append(Claim("delta", 2 * float(special.ndtr(mu / 2)) - 1, 0.0))
    exceeded, found = 0, []
    for _ in range(100):
        pilot, fresh = rng.normal(0, 1, (2, 2, n))
        pilot[1] += mu
        fresh[1] += mu
        chosen = choose_thresholds(*pilot, claims, 0.9)
        proved = [t.claim.bound(t.count(*fresh), share(0.9)) for t in chosen]
        found.append(proved[1])
        exceeded += any(p > c.value for p, c in zip(proved, claims, strict=True))
    assert stats.binom.sf(exceeded - 1, 100, 0.1) > 1e-4
    assert np.median(found) > 0.75 * mu


def test_a_threshold_counts_both_ways_round():
    zero, one = np.array([0.0, 1.0, 2.0]), np.array([1.0, 2.0])
    (found,) = choose_thresholds(zero, one, [Claim("mu", 1.0)], 0.9)
    for exchanged in (False, True):
        test = type(found)(found.claim, 1.0, exchanged, 0.0)
        assert test.count(zero, one).tolist() == ([0, 2, 1, 3] if exchanged else [2, 3, 2, 2])


def test_residues_see_coarse_noise_and_are_blind_to_fine_noise():
    noise = np.random.default_rng(7).normal(0, 1, (2, 8000, 1))
    for rounded, sees in ((noise, False), (noise.astype(np.float16).astype(float), True)):
        zero, one = rounded[0] + 0.1, rounded[1] - 0.1
        fitted = fit_residue(zero[:4000], one[:4000], (1.0,), 2.0**-14)
        gap = fitted.score(one[4000:]).mean() - fitted.score(zero[4000:]).mean()
        assert bool(gap > 1.0) is sees
