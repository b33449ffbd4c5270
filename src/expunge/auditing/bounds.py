"""Lower bounds on what a mechanism leaks, from how often a test tells two of its worlds apart.

A test rejects "world 0" on some event; α is how often it does so in world 0 (false positives) and
1 - β how often in world 1 (true positives). Every test must satisfy

    1 - β ≤ e^ε α + δ                        if the pair is (ε, δ)-indistinguishable,
    Φ⁻¹(1 - β) - Φ⁻¹(α) ≤ μ                  if it is μ-GDP (Dong, Roth & Su 2019),

so rates that are known from one side (Clopper & Pearson 1934, exact for any sample size) bound ε,
δ and μ from below. The test is chosen on a pilot and counted on fresh runs, so that the choice
costs no confidence. All bounds of an audit hold together: each of ``SHARES`` one-sided rates gets
an equal share of 1 - confidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from expunge.auditing.cells import CellCheck
from expunge.errors import InputError
from expunge.recipes import ComparedTo

Array = npt.NDArray[np.float64]
SHARES = 6
CANDIDATES = 400


@dataclass(frozen=True)
class RunCheck:
    """What a run's certificate, record and recipe showed beside the trials: how likely its realised
    noise is (None without a record), the bits of a long vector (None where the last step has no
    noise), and what does not hold."""

    noise_p_value: float | None
    cells: CellCheck | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """What the audit of a mechanism found. All lower bounds hold together with ``confidence``.

    ``epsilon_lower`` is at ``delta``; ``delta_lower`` is at ``epsilon_probe``, and
    ``delta_certified`` is what the claim allows there. ``epsilon_ceiling`` is the largest
    ``epsilon_lower`` that this many trials could have proved of a mechanism without any noise, and
    ``resolution`` the part of a μ as large as certified that they can be expected to prove.
    """

    method: str
    recipe: dict[str, Any]
    compared_to: ComparedTo
    epsilon_lower: float
    epsilon_certified: float
    delta: float
    mu_lower: float
    mu_estimate: float
    mu_certified: float | None
    epsilon_probe: float
    delta_lower: float
    delta_certified: float
    confidence: float
    trials: int
    pilot_trials: int
    seconds: float
    epsilon_ceiling: float
    resolution: float | None
    attack: str
    noise: str
    seed: int | None
    contradicts: bool
    verdict: str
    run: RunCheck | None = None


def bound_above(successes: Any, trials: Any, alpha: float) -> Any:
    """The Clopper–Pearson upper bound on a rate, at confidence 1 - α, one-sided.

    >>> round(float(bound_above(0, 1000, 0.05)), 6)
    0.002991
    """
    k, n = np.asarray(successes, float), np.asarray(trials, float)
    rest = np.maximum(n - k, 0.0)
    found = special.betainccinv(k + 1, np.where(rest > 0, rest, 1.0), alpha)
    return np.where(rest > 0, found, 1.0)[()]


def bound_below(successes: Any, trials: Any, alpha: float) -> Any:
    """The Clopper–Pearson lower bound on a rate, at confidence 1 - α, one-sided.

    >>> float(bound_below(0, 10, 0.05)), round(float(bound_below(10, 10, 0.05)), 6)
    (0.0, 0.741134)
    """
    k, n = np.asarray(successes, float), np.asarray(trials, float)
    found = special.betaincinv(np.where(k > 0, k, 1.0), n - k + 1, alpha)
    return np.where(k > 0, found, 0.0)[()]


@dataclass(frozen=True)
class Counts:
    """How often a test rejected world 0: ``false`` times in ``negatives`` runs of world 0, ``true``
    times in ``positives`` runs of world 1. Whole numbers, or arrays of them."""

    false: Any
    negatives: Any
    true: Any
    positives: Any

    def exchange(self) -> Counts:
        """The complementary test, which rejects world 1."""
        return Counts(
            self.positives - self.true, self.positives, self.negatives - self.false, self.negatives
        )


def lower_epsilon(counts: Counts, delta: float, alpha: float, least: float = 0.0) -> Any:
    """log((1 - β - δ)/α) with both rates on the safe side; at least ``least``, as all of these.

    >>> round(float(lower_epsilon(Counts(0, 1000, 1000, 1000), 1e-5, 0.001)), 3)
    4.876
    """
    low, high = _bound_rates(counts, alpha)
    return np.maximum(np.log(np.maximum(low - delta, 1e-300)) - np.log(high), least)


def lower_delta(counts: Counts, epsilon: float, alpha: float, least: float = 0.0) -> Any:
    """1 - β - e^ε α with both rates on the safe side.

    >>> round(float(lower_delta(Counts(0, 1000, 1000, 1000), 0.0, 0.001)), 3)
    0.985
    """
    low, high = _bound_rates(counts, alpha)
    return np.maximum(low - math.exp(min(epsilon, 700.0)) * high, least)


def lower_mu(counts: Counts, alpha: float, least: float = 0.0) -> Any:
    """Φ⁻¹(1 - β) - Φ⁻¹(α) with both rates on the safe side.

    >>> round(float(lower_mu(Counts(0, 1000, 1000, 1000), 0.001)), 3)
    4.858
    """
    low, high = _bound_rates(counts, alpha)
    return np.maximum(special.ndtri(low) - special.ndtri(high), least)


def estimate_mu(counts: Counts) -> float:
    """Φ⁻¹(1 - β) - Φ⁻¹(α) at the observed rates, kept off 0 and 1 by half a run.

    >>> round(estimate_mu(Counts(159, 1000, 841, 1000)), 2)
    1.99
    """
    false = (counts.false + 0.5) / (counts.negatives + 1)
    true = (counts.true + 0.5) / (counts.positives + 1)
    return float(special.ndtri(true) - special.ndtri(false))


@dataclass(frozen=True)
class Claim:
    """What is audited: ε at δ, μ where there is one, and δ at some other ε, ``((ε, δ), …)``."""

    epsilon: float
    delta: float
    mu: float | None
    curve: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Threshold:
    """Reject world 0 where the score is at least ``value``; exchanged, world 1 where it is not."""

    value: float
    exchanged: bool = False

    def count(self, zero: Array, one: Array) -> Counts:
        """How often it rejects, by the scores of runs of the two worlds."""
        counts = Counts(
            int(np.count_nonzero(zero >= self.value)),
            len(zero),
            int(np.count_nonzero(one >= self.value)),
            len(one),
        )
        return counts.exchange() if self.exchanged else counts


@dataclass(frozen=True)
class Choice:
    """The best test for each bound, ``probe`` the ε at which δ is bounded, and ``merit``: how near
    the pilot comes to refuting the claim (1: it just does)."""

    mu: Threshold
    epsilon: Threshold
    delta: Threshold
    probe: float
    merit: float


@dataclass(frozen=True)
class Bounds:
    """What the tests prove, all of it at once; ``delta`` is at ``probe``."""

    epsilon: float
    mu: float
    mu_estimate: float
    probe: float
    delta: float


def choose_thresholds(zero: Array, one: Array, claim: Claim, confidence: float) -> Choice:
    """The thresholds with the strongest bounds on the pilot itself.

    Its bounds, not its rates: a rate far out in a tail may be best by luck alone.

    >>> rng = np.random.default_rng(0)
    >>> claim = Claim(epsilon=1.0, delta=1e-5, mu=0.5, curve=((0.0, 0.2),))
    >>> zero, one = rng.normal(0, 1, 5000), rng.normal(2, 1, 5000)
    >>> choice = choose_thresholds(zero, one, claim, 0.999)
    >>> 0.5 < choice.mu.value < 1.5, choice.merit > 1
    (True, True)
    """
    known = {"alpha": share(confidence), "least": -math.inf}
    thresholds = _list_thresholds(zero, one)
    counts = _count_all(zero, one, thresholds)

    def choose(claimed: float, lower: Callable[..., Any], **at: float) -> tuple[float, Threshold]:
        """How much of the claim is found (below 0: how far off it is), and by which threshold."""
        found = np.stack([lower(way, **at, **known) for way in (counts, counts.exchange())])
        way, place = np.unravel_index(int(np.argmax(found)), found.shape)
        threshold = Threshold(float(thresholds[place]), exchanged=bool(way))
        return float(found[way, place]) / max(claimed, 1e-12), threshold

    mu = choose(claim.mu or 0.0, lower_mu)
    epsilon = choose(claim.epsilon, lower_epsilon, delta=claim.delta)
    deltas = {e: choose(allowed, lower_delta, epsilon=e) for e, allowed in claim.curve}
    probe = max(deltas, key=lambda e: deltas[e][0])
    delta = deltas[probe]
    claimed = [epsilon, delta] if claim.mu is None else [mu, epsilon, delta]
    return Choice(mu[1], epsilon[1], delta[1], probe, max(part for part, _ in claimed))


def apply_thresholds(
    choice: Choice, counts: tuple[Counts, Counts, Counts], claim: Claim, confidence: float
) -> Bounds:
    """The bounds from fresh counts of the three tests: for μ, for ε, for δ."""
    alpha = share(confidence)
    mu, epsilon, delta = counts
    return Bounds(
        epsilon=float(lower_epsilon(epsilon, claim.delta, alpha)),
        mu=float(lower_mu(mu, alpha)),
        mu_estimate=estimate_mu(mu),
        probe=choice.probe,
        delta=float(lower_delta(delta, choice.probe, alpha)),
    )


def share(confidence: float) -> float:
    """The α of one bound, which is spent on two rates: (1 - confidence)/3.

    >>> round(share(0.999), 6)
    0.000333
    """
    if not 0.5 <= confidence < 1:
        raise InputError.of("confidence", confidence, "a number from 0.5 to below 1")
    return 2 * (1 - confidence) / SHARES


def fewest_runs(confidence: float) -> int:
    """Runs of each world below which even a perfect test proves no μ above 0.

    >>> fewest_runs(0.999)
    14
    """
    return math.floor(math.log(share(confidence) / 2) / math.log(0.5)) + 2


def foresee_mu(mu: float, runs: int, confidence: float) -> float:
    """The lower bound to expect from ``runs`` runs of each world, if μ is exact and attained.

    >>> round(foresee_mu(0.268, 100_000, 0.999), 3)
    0.239
    """
    rate = float(special.ndtr(-mu / 2))
    counts = Counts(rate * runs, runs, (1 - rate) * runs, runs)
    return float(lower_mu(counts, share(confidence)))


def write_verdict(
    bounds: Bounds, claim: Claim, allowed: float, confidence: float
) -> tuple[bool, str]:
    """Whether the bounds refute the claim, and one sentence for people."""
    mu = math.inf if claim.mu is None else claim.mu
    refuted = [
        f"{name} is at least {found:.4g}, not {claimed:.4g}"
        for name, found, claimed in (
            ("epsilon", bounds.epsilon, claim.epsilon),
            ("mu", bounds.mu, mu),
            (f"delta at epsilon = {bounds.probe:.4g}", bounds.delta, allowed),
        )
        if found > claimed
    ]
    sure = f"with confidence {confidence:g}"
    if refuted:
        return True, f"The engine contradicts the claim: {'; '.join(refuted)}, {sure}."
    shown = f"epsilon at least {bounds.epsilon:.4g} of {claim.epsilon:.4g}"
    if claim.mu is not None:
        shown += f", mu at least {bounds.mu:.4g} of {claim.mu:.4g}"
    return False, f"No contradiction: the attacks prove {shown}, {sure}."


def list_facts(audit: Audit) -> list[str]:
    """The audit for people, line by line."""
    a, cells = audit, None if audit.run is None else audit.run.cells
    facts = {
        "method": f"{a.method}, compared to {a.compared_to}",
        "epsilon": f"at least {a.epsilon_lower:.4g}, certified {a.epsilon_certified:.6g} "
        f"at delta = {a.delta:g}",
    }
    if a.mu_certified is not None:
        facts["mu"] = (
            f"at least {a.mu_lower:.4g}, estimated {a.mu_estimate:.4g}, "
            f"certified {a.mu_certified:.6g}"
        )
    facts |= {
        "delta": f"at least {a.delta_lower:.4g}, certified {a.delta_certified:.4g} "
        f"at epsilon = {a.epsilon_probe:.4g}",
        "attack": a.attack,
        "bought": f"{a.trials:,} trials in {a.seconds:.1f} s, confidence {a.confidence:g}: "
        f"could have proved epsilon up to {a.epsilon_ceiling:.4g}"
        + ("" if a.resolution is None else f" and {100 * a.resolution:.0f} % of mu"),
    }
    if a.run is not None and a.run.noise_p_value is not None:
        facts["record"] = f"p-value of its noise {a.run.noise_p_value:.3g}"
    if cells is not None:
        facts["bits"] = (
            f"p-value {cells.p_value:.3g} of {cells.tests:,} counts in {cells.runs} runs of "
            f"{cells.parameters:,} parameters"
        )
    return [a.verdict, *(f"  {name:<12} {fact}" for name, fact in facts.items())]


def _bound_rates(counts: Counts, alpha: float) -> tuple[Any, Any]:
    """(the least true positives, the most false positives)."""
    low = bound_below(counts.true, counts.positives, alpha / 2)
    return low, bound_above(counts.false, counts.negatives, alpha / 2)


def _list_thresholds(zero: Array, one: Array) -> Array:
    """Quantiles of both worlds, dense in the tails."""
    tail = np.geomspace(1 / (len(zero) + len(one)), 0.5, CANDIDATES // 4)
    levels = np.concatenate([tail, 1 - tail])
    return np.unique(np.concatenate([np.quantile(s, levels, method="lower") for s in (zero, one)]))


def _count_all(zero: Array, one: Array, thresholds: Array) -> Counts:
    """The counts of every threshold."""

    def above(scores: Array) -> Any:
        return len(scores) - np.searchsorted(np.sort(scores), thresholds, side="left")

    return Counts(above(zero), len(zero), above(one), len(one))
