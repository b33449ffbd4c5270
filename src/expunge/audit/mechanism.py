"""The mechanism audit: worst cases, run many times, and what they prove of what is certified.

``unlearn`` is run on a few worst cases, and must release what its equation gives, bit for bit
(``trials``). The equation is then attacked: adversaries choose starts and retained data, statistics
score what is released (``attacks``), exact intervals turn counts into bounds (``bounds``). A pilot
of every adversary trains the statistics by its first half and chooses among them by the second; all
other trials are fresh. The audit of a run also verifies its certificate.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from expunge.accounting.guarantee import guarantee, log_delta
from expunge.accounting.precision import choose_precision, list_levels
from expunge.audit.attacks import Adversary, Array, Statistic, fit_statistics, list_adversaries
from expunge.audit.bounds import Audit, Claim, Threshold, choose_thresholds, share
from expunge.audit.trials import SIZE, choose_noise, compare_engine, release_rows
from expunge.certificates.verification import verify
from expunge.errors import InputError
from expunge.files import write_atomic
from expunge.progress import open_bar
from expunge.recipes import Execution, NoisyRecipe, to_dict

BLOCK = 1 << 15
PILOT = 40_000  # and a fifth of the trials where their number is given
CLEAR = 0.2  # of the claim must be proved by the pilot before an attack is preferred to the first
LEAST, MOST = 2000, 2**29  # trials

Worlds = tuple[Array, Array]  # what is released in world 0, and in world 1


def audit_mechanism(
    recipe: NoisyRecipe,
    *,
    delta: float,
    claims: Sequence[Claim] | None = None,
    trials: int | None = None,
    seconds: float = 60.0,
    confidence: float = 0.999,
    seed: int | None = None,
    progress: bool = False,
    problems: Sequence[str] = (),
) -> Audit:
    """Attack the engine with this recipe; ``claims`` are what to refute (default: our own).

    Runs ``trials`` trials, or as many as ``seconds`` allow. Without a ``seed`` the noise is the
    operating system's, as in a run for release. ``problems`` were found before.

    >>> from expunge.recipes import OutputPerturbation
    >>> recipe = OutputPerturbation(start_clip=1.0, noise_std=1.0)
    >>> audit = audit_mechanism(recipe, delta=1e-5, trials=20_000, seed=0)
    >>> 1.8 < audit.proved("mu") <= 2.0, audit.contradicts
    (True, False)
    """
    started, alpha = time.monotonic(), share(confidence)
    if not any(sigma > 0 for sigma in list_levels(recipe)):
        raise InputError.of("noise_std", 0.0, "above 0: without noise there is nothing to audit")
    claims = make_claims(recipe, delta) if claims is None else claims
    if math.inf in (claim.value for claim in claims if claim.kind == "epsilon"):
        raise InputError("the recipe certifies no finite epsilon: there is nothing to audit")
    adversaries = list_adversaries(recipe)
    pilot = max(PILOT * 16 // max(len(list_levels(recipe)), 16), LEAST // 2)
    if trials is not None:
        if not LEAST <= trials <= MOST:
            raise InputError.of("trials", trials, f"{LEAST} to {MOST}")
        pilot = trials // (5 * len(adversaries))
    if not seconds > 0:
        raise InputError.of("seconds", seconds, "a number above 0")
    differs = compare_engine(adversaries, delta, seed, seconds / 5)

    attempts, pilots, pace = list[_Attempt](), pilot * len(adversaries), 0.0
    for place, adversary in enumerate(adversaries):
        begun, blocks = time.monotonic(), list(_run(adversary, pilot, seed, place << 20))
        pace = (time.monotonic() - begun) / pilot
        attempts += _attack(adversary, blocks, claims, confidence)
    best = max(attempts, key=lambda attempt: attempt.merit)
    best = best if best.merit > CLEAR else attempts[0]
    remaining = started + seconds - time.monotonic()
    fresh = int(remaining / pace) if trials is None else trials - pilots
    fresh = min(max(fresh, pilots), MOST)
    counts = np.zeros((len(best.thresholds), 4), np.int64)
    with open_bar(fresh, "auditing", progress) as update:
        for worlds in _run(best.adversary, fresh, seed, len(adversaries) << 20):
            scores = [best.statistic.score(world) for world in worlds]
            counts += [threshold.count(*scores) for threshold in best.thresholds]
            update(int(counts[0, 1] + counts[0, 3]))
    proved = [
        replace(found.claim, proved=max(float(found.claim.bound(row, alpha)), 0.0))
        for found, row in zip(best.thresholds, counts, strict=True)
    ]
    return Audit(
        method=recipe.method,
        recipe=to_dict(recipe),
        claims=tuple(proved),
        epsilon_ceiling=max(float(proved[0].bound((0, *[fresh // 2] * 3), alpha)), 0.0),
        confidence=confidence,
        trials=fresh + pilots,
        seconds=time.monotonic() - started,
        attack=f"{best.adversary}; {best.statistic}",
        seed=seed,
        problems=(*differs, *problems),
    )


def make_claims(
    recipe: NoisyRecipe, delta: float, execution: Execution | None = None
) -> tuple[Claim, ...]:
    """What we certify for this recipe: on the audit's tiny module, unless ``execution`` says more.

    >>> from expunge.recipes import OutputPerturbation
    >>> epsilon, mu, *deltas = make_claims(OutputPerturbation(start_clip=1.0, noise_std=4.0), 1e-5)
    >>> round(mu.value, 9), len(deltas)
    (0.5, 3)
    """
    if execution is None:
        execution = Execution(rounding=choose_precision(recipe, SIZE).rounding)
    found = guarantee(recipe, delta=delta, execution=execution)
    top = found.epsilon if math.isfinite(found.epsilon) else 1.0
    allowed = ((at, log_delta(recipe, at, execution=execution)) for at in (0.0, top / 4, top / 2))
    return (
        Claim("epsilon", found.epsilon, delta),
        Claim("mu", math.inf if found.mu is None else found.mu),
        *(Claim("delta", math.exp(value), at) for at, value in allowed),
    )


@dataclass(frozen=True)
class _Attempt:
    """An adversary, a statistic, the thresholds for ε, μ and δ, and the best of their merits."""

    adversary: Adversary
    statistic: Statistic
    thresholds: tuple[Threshold, ...]
    merit: float


def _attack(
    adversary: Adversary, blocks: list[Worlds], claims: Sequence[Claim], confidence: float
) -> Iterator[_Attempt]:
    """The first half of a pilot trains statistics, the second chooses; first what theory would."""
    zero, one = map(np.concatenate, zip(*blocks, strict=True))
    half = len(zero) // 2
    for statistic in fit_statistics(adversary, zero[:half], one[:half]):
        scores = statistic.score(zero[half:]), statistic.score(one[half:])
        found = choose_thresholds(*scores, claims, confidence)
        yield _Attempt(adversary, statistic, found, max(threshold.merit for threshold in found))


def _run(adversary: Adversary, trials: int, seed: int | None, first: int) -> Iterator[Worlds]:
    for place, done in enumerate(range(0, trials, BLOCK)):
        rows = np.arange(min(BLOCK, trials - done))
        points = release_rows(adversary, rows, choose_noise(seed, first + place))
        yield points[1::2], points[::2]


def audit_run(folder: str | Path, **options: Any) -> Audit:
    """Audit the engine with a release's recipe, and the release's own certificate and record.

    Lower bounds are compared with what the recipe certifies, compared to retraining; whether
    ``certificate.json`` says the same is verified. ``options`` are those of
    :func:`audit_mechanism`: trials, seconds, confidence, seed, progress. Writes ``audit.json``.
    """
    place = Path(folder)
    checked = verify(place, strict=False)
    c, recipe = checked.certificate, checked.certificate.recipe
    if not isinstance(recipe, NoisyRecipe):
        raise InputError(
            f"method is {recipe.method!r}: it adds no noise, so there is nothing to attack; "
            "expunge replay runs it again"
        )
    claims = make_claims(recipe, c.delta, c.execution)
    found = audit_mechanism(
        recipe, delta=c.delta, claims=claims, problems=checked.problems, **options
    )
    text = json.dumps(found.to_dict(), ensure_ascii=False, allow_nan=False, indent=1)
    write_atomic(place / "audit.json", (text + "\n").encode(), private=True)
    return found
