"""Lower bounds on what a mechanism leaks, from how often a test tells two of its worlds apart.

A test rejects "world 0" on some event; α is how often it does so in world 0 (false positives) and
1 - β how often in world 1 (true positives). Every test must satisfy

    1 - β ≤ e^ε α + δ                        if the pair is (ε, δ)-indistinguishable,
    Φ⁻¹(1 - β) - Φ⁻¹(α) ≤ μ                  if it is μ-GDP (Dong, Roth & Su 2019),

so rates that are bounded from one side (Clopper & Pearson 1934, exact for any sample size) bound ε,
δ and μ from below. The test is chosen on a pilot and counted on fresh runs, so that the choice
costs no confidence. All bounds of an audit are true together: each of six one-sided rates gets an
equal share of 1 - confidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import special

from expunge.display import Shown, tabulate
from expunge.errors import InputError
from expunge.files import to_plain

Array = npt.NDArray[np.float64]
# (false positives, runs of world 0, true positives, runs of world 1), each a number or an array.
Counts = npt.NDArray[np.int64]
Kind = Literal["epsilon", "mu", "delta"]
KINDS: tuple[Kind, ...] = ("epsilon", "mu", "delta")


def bound_rate(successes: Any, trials: Any, alpha: float) -> tuple[Any, Any]:
    """The Clopper–Pearson bounds on a rate from below and above, each at confidence 1 - α.

    >>> low, high = bound_rate(10, 1000, 0.05)
    >>> round(float(low), 4), round(float(high), 4)
    (0.0054, 0.0169)
    """
    k, n = np.asarray(successes, float), np.asarray(trials, float)
    low = special.betaincinv(np.where(k > 0, k, 1.0), n - k + 1, alpha)
    high = special.betainccinv(k + 1, np.where(k < n, n - k, 1.0), alpha)
    return np.where(k > 0, low, 0.0), np.where(k < n, high, 1.0)


def exchange(counts: Counts) -> Counts:
    """Those of the complementary test, which rejects world 1.

    >>> exchange(np.array([20, 1000, 700, 900])).tolist()
    [200, 900, 980, 1000]
    """
    false, negatives, true, positives = counts
    return np.stack([positives - true, positives, negatives - false, negatives])


@dataclass(frozen=True)
class Claim:
    """One number that is claimed: ε at δ = ``at``, δ at ε = ``at``, or μ (infinite: none is).

    ``proved`` is the lower bound that was found.
    """

    kind: Kind
    value: float
    at: float = 0.0
    proved: float = 0.0

    def __str__(self) -> str:
        other = {"epsilon": "delta", "delta": "epsilon"}.get(self.kind)
        return f"{self.kind} at {other} = {self.at:.4g}" if other else self.kind

    def bound(self, counts: Any, alpha: float) -> Any:
        """What these counts prove of it, with both rates on the safe side; α is spent on two.

        >>> all_right = 0, 1000, 1000, 1000
        >>> round(float(Claim("epsilon", 1.0, 1e-5).bound(all_right, 0.001)), 3)
        4.876
        >>> round(float(Claim("mu", 1.0).bound(all_right, 0.001)), 3)
        4.858
        """
        false, negatives, true, positives = counts
        low, _ = bound_rate(true, positives, alpha / 2)
        _, high = bound_rate(false, negatives, alpha / 2)
        match self.kind:
            case "epsilon":
                return np.log(np.maximum(low - self.at, 1e-300)) - np.log(high)
            case "mu":
                return special.ndtri(low) - special.ndtri(high)
            case "delta":
                return low - math.exp(min(self.at, 700.0)) * high


@dataclass(frozen=True)
class Threshold:
    """Reject world 0 where the score is at least ``value``; exchanged, world 1 where it is not.

    ``merit`` says how near the pilot comes to refuting the claim (1: it just does).
    """

    claim: Claim
    value: float
    exchanged: bool
    merit: float

    def count(self, zero: Array, one: Array) -> Counts:
        """How often it rejects, by the scores of runs of the two worlds."""
        counts = _count(zero, one, np.array([self.value]))[:, 0]
        return exchange(counts) if self.exchanged else counts


def choose_thresholds(
    zero: Array, one: Array, claims: Sequence[Claim], confidence: float
) -> tuple[Threshold, ...]:
    """For each of ε, μ and δ the threshold with the strongest bound on the pilot itself.

    Its bounds, not its rates: a rate far out in a tail may be best by luck alone.

    >>> rng = np.random.default_rng(0)
    >>> zero, one = rng.normal(0, 1, 5000), rng.normal(2, 1, 5000)
    >>> (best,) = choose_thresholds(zero, one, [Claim("mu", 0.5)], 0.999)
    >>> 0.5 < best.value < 1.5, best.merit > 1
    (True, True)
    """
    # Quantiles of both worlds, dense in the tails.
    tail = np.geomspace(1 / (len(zero) + len(one)), 0.5, 100)
    levels = np.concatenate([tail, 1 - tail])
    quantiles = [np.quantile(scores, levels, method="lower") for scores in (zero, one)]
    thresholds = np.unique(np.concatenate(quantiles))
    counts, best = _count(zero, one, thresholds), dict[Kind, Threshold]()
    for claim in claims:
        ways = [claim.bound(c, share(confidence)) for c in (counts, exchange(counts))]
        way, place = np.unravel_index(int(np.argmax(ways)), np.shape(ways))
        merit = float(ways[way][place]) / max(claim.value, 1e-12)
        if claim.kind not in best or merit > best[claim.kind].merit:
            best[claim.kind] = Threshold(claim, float(thresholds[place]), bool(way), merit)
    return tuple(best[kind] for kind in KINDS if kind in best)


def _count(zero: Array, one: Array, thresholds: Array) -> Counts:
    above = [len(s) - np.searchsorted(np.sort(s), thresholds, side="left") for s in (zero, one)]
    runs = [np.full(len(thresholds), len(scores)) for scores in (zero, one)]
    return np.stack([above[0], runs[0], above[1], runs[1]])


def share(confidence: float) -> float:
    """The α of one bound of three, which is spent on two rates: (1 - confidence)/3.

    >>> round(share(0.999), 6)
    0.000333
    """
    if not 0.5 <= confidence < 1:
        raise InputError.of("confidence", confidence, "a number from 0.5 to below 1")
    return (1 - confidence) / len(KINDS)


@dataclass(frozen=True)
class Audit(Shown):
    """What the audit of a mechanism found: all of ``claims`` are bounded with ``confidence``.

    ``epsilon_ceiling`` is what as many trials would have proved of a mechanism without any noise.
    ``problems`` are sentences about what else does not hold.
    """

    method: str
    recipe: dict[str, Any]
    claims: tuple[Claim, ...]
    epsilon_ceiling: float
    confidence: float
    trials: int
    seconds: float
    attack: str
    seed: int | None
    problems: tuple[str, ...] = ()

    @property
    def refuted(self) -> list[str]:
        """The claims below what was proved, and all that does not hold besides, as sentences."""
        low = [claim for claim in self.claims if claim.proved > claim.value]
        return [f"{c} is at least {c.proved:.4g}, not {c.value:.4g}" for c in low] + [
            *self.problems
        ]

    @property
    def contradicts(self) -> bool:
        return bool(self.refuted)

    @property
    def verdict(self) -> str:
        """One sentence for people."""
        proved = [
            f"{claim} at least {claim.proved:.4g} of {claim.value:.4g}"
            for claim in self.claims
            if claim.kind != "delta" and math.isfinite(claim.value)
        ]
        said = f"No contradiction: the attacks prove {', '.join(proved)}"
        if self.contradicts:
            said = f"What was found contradicts the claim: {'; '.join(self.refuted)}"
        return f"{said}, with confidence {self.confidence:g}."

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the verdict."""
        return to_plain(self) | {"contradicts": self.contradicts, "verdict": self.verdict}

    def __str__(self) -> str:
        facts = {"method": self.method}
        for claim in self.claims:
            certified = f", certified {claim.value:.6g}" if math.isfinite(claim.value) else ""
            facts[str(claim)] = f"at least {claim.proved:.4g}{certified}"
        facts["attack"] = self.attack
        facts["bought"] = (
            f"{self.trials:,} trials in {self.seconds:.1f} s, confidence {self.confidence:g}: "
            f"could have proved epsilon up to {self.epsilon_ceiling:.4g}"
        )
        return tabulate(self.verdict, list(facts.items()))

    def proved(self, kind: Kind) -> float:
        """The lower bound on ε, μ or δ."""
        return next(claim.proved for claim in self.claims if claim.kind == kind)
