"""The mechanism audit: run the engine on its worst cases, many times, and see what comes through.

Every trial is a run of the engine on a tiny module (``trials`` says which of its functions run).
Adversaries choose starts and retained data, statistics score what is released (``attacks``), exact
intervals turn counts into bounds (``bounds``). A fifth of the runs is a pilot, shared out among the
adversaries: half of it trains the statistics, the other half chooses among them. All other runs are
fresh. The audit of a run also looks at every bit of a long vector (``cells``), and at whether the
certificate follows from itself and from its record.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from scipy import special

from expunge import recipes
from expunge.accounting.guarantee import guarantee, is_exact, log_delta
from expunge.accounting.precision import choose_precision, list_levels
from expunge.auditing import attacks, bounds
from expunge.auditing.attacks import DIRECTION, Adversary, Audited, Statistic, replaces_first_step
from expunge.auditing.bounds import Audit, Choice, Claim, Counts, RunCheck
from expunge.auditing.cells import examine_cells
from expunge.auditing.trials import check_seed, choose_noise, unlearn_stack
from expunge.certificates.certificate import Certificate
from expunge.certificates.record import RunRecord
from expunge.certificates.verification import find_differences
from expunge.errors import InputError
from expunge.files import to_plain, write_atomic
from expunge.noisy.noise import Noise
from expunge.noisy.solutions import release_solution
from expunge.progress import Bar
from expunge.recipes import (
    ComparedTo,
    ConvexHeadRecipe,
    Execution,
    ModelClipping,
    OutputPerturbation,
    schedule,
)

Array = npt.NDArray[np.float64]
BLOCK, LEAST_BLOCK = 1 << 15, 1 << 10
PILOT_SHARE = 0.2
LEAST_PILOT = 400
CLEAR = 0.2  # of the claim must be proved by the pilot before an attack is preferred to the first
MOST_TRIALS, MOST_ASKED = 20_000_000, 2**29
IMPROBABLE = 1e-9
_CENTRE = (0.3, -0.2, 0.1)


def audit_mechanism(
    recipe: Audited,
    *,
    delta: float,
    compared_to: ComparedTo = "retrained",
    claim: Claim | None = None,
    trials: int | None = None,
    seconds: float = 60.0,
    confidence: float = 0.999,
    seed: int | None = None,
    progress: bool = False,
) -> Audit:
    """Attack the engine with this recipe; ``claim`` is what to refute (default: our own).

    Runs ``trials`` trials, or as many as ``seconds`` allow. Without a ``seed`` the noise is the
    operating system's, as in a run for release.

    >>> recipe = OutputPerturbation(start_clip=1.0, noise_std=1.0)
    >>> audit = audit_mechanism(recipe, delta=1e-5, trials=20_000, seed=0)
    >>> 1.8 < audit.mu_lower <= audit.mu_certified, audit.contradicts
    (True, False)
    """
    started = time.monotonic()
    claim = claim or make_claim(recipe, delta, compared_to)
    if not any(sigma > 0 for sigma in list_levels(recipe)):
        raise InputError.of("noise_std", 0.0, "above 0: without noise there is nothing to audit")
    if not math.isfinite(claim.epsilon):
        raise InputError("the recipe certifies no finite epsilon: there is nothing to audit")
    if _has_no_reference(recipe, compared_to):
        raise InputError.of(
            "learning_rate",
            0.0,
            "above 0 at the first step, to compare a noisy start to the centre",
        )
    if not seconds > 0:
        raise InputError.of("seconds", seconds, "a number above 0")
    check_seed(seed)
    adversaries = attacks.list_adversaries(recipe, compared_to, (0.0, min(claim.epsilon, 2.0)))
    least = len(adversaries) * LEAST_PILOT + 2 * bounds.fewest_runs(confidence)
    if trials is not None and not least <= trials <= MOST_ASKED:
        valid = f"{least} to {MOST_ASKED} for a confidence of {confidence}"
        raise InputError.of("trials", trials, valid)
    most, time_left = (MOST_TRIALS, seconds) if trials is None else (trials, math.inf)
    best, pilots = _run_pilots(adversaries, claim, confidence, seed, most, time_left)
    left, pace = started + time_left - time.monotonic(), (time.monotonic() - started) / pilots
    blocks = _run(best.adversary, most - pilots, seed, len(adversaries) << 20, started + time_left)
    counts = _count(best, blocks, int(min(most - pilots, left / pace)), progress)
    fresh = counts[0].negatives + counts[0].positives
    proved = bounds.apply_thresholds(best.choice, counts, claim, confidence)
    allowed = dict(claim.curve)[proved.probe]
    contradicts, verdict = bounds.write_verdict(proved, claim, allowed, confidence)
    silent = Counts(0, fresh // 2, fresh // 2, fresh // 2)
    ceiling = bounds.lower_epsilon(silent, claim.delta, bounds.share(confidence))
    mu = claim.mu
    return Audit(
        method=recipes.method_name(recipe),
        recipe=recipes.to_dict(recipe),
        compared_to=compared_to,
        epsilon_lower=proved.epsilon,
        epsilon_certified=claim.epsilon,
        delta=claim.delta,
        mu_lower=proved.mu,
        mu_estimate=proved.mu_estimate,
        mu_certified=mu,
        epsilon_probe=proved.probe,
        delta_lower=proved.delta,
        delta_certified=allowed,
        confidence=confidence,
        trials=fresh + pilots,
        pilot_trials=pilots,
        seconds=time.monotonic() - started,
        epsilon_ceiling=float(ceiling),
        resolution=bounds.foresee_mu(mu, fresh // 2, confidence) / mu if mu else None,
        attack=f"{best.adversary.describe()}; {attacks.describe(best.statistic)}",
        noise="system" if seed is None else "seeded",
        seed=seed,
        contradicts=contradicts,
        verdict=verdict,
    )


def make_claim(
    recipe: Audited,
    delta: float,
    compared_to: ComparedTo = "retrained",
    execution: Execution | None = None,
) -> Claim:
    """What we certify for this recipe: on the audit's tiny module, unless ``execution`` says more.

    >>> claim = make_claim(OutputPerturbation(start_clip=1.0, noise_std=4.0), 1e-5)
    >>> round(claim.mu, 9), len(claim.curve)
    (0.5, 4)
    """
    if isinstance(recipe, ModelClipping) and replaces_first_step(recipe, compared_to):
        recipe = replace(recipe, start_clip=None, start_noise_std=0.0)
    if execution is None:
        execution = Execution(rounding=choose_precision(recipe, len(DIRECTION)).rounding)
    found = guarantee(recipe, delta=delta, compared_to=compared_to, execution=execution)
    top = found.epsilon if math.isfinite(found.epsilon) else 1.0
    curve = tuple(
        (e, math.exp(log_delta(recipe, e, compared_to=compared_to, execution=execution)))
        for e in dict.fromkeys((0.0, top / 4, top / 2, 3 * top / 4))
    )
    return Claim(found.epsilon, delta, found.mu, curve)


def _has_no_reference(recipe: Audited, compared_to: ComparedTo) -> bool:
    """Without a learning rate no gradient can bring a noisy start to the centre."""
    if not isinstance(recipe, ModelClipping) or not replaces_first_step(recipe, compared_to):
        return False
    still = float(schedule(recipe.learning_rate, recipe.steps)[0]) == 0
    return still and recipe.start_noise_std > 0


@dataclass(frozen=True)
class _Attempt:
    """An adversary, the statistic that did best on its pilot, and that statistic's thresholds."""

    adversary: Adversary
    statistic: Statistic
    choice: Choice


def _run_pilots(
    adversaries: list[Adversary],
    claim: Claim,
    confidence: float,
    seed: int | None,
    most: int,
    seconds: float,
) -> tuple[_Attempt, int]:
    """The best attempt of all adversaries, and how many runs it took to find it: half of a pilot
    trains the statistics, the other half chooses among them."""
    share, runs = PILOT_SHARE / len(adversaries), 0
    found: list[_Attempt] = []
    for place, adversary in enumerate(adversaries):
        size, deadline = math.ceil(share * most), time.monotonic() + share * seconds
        blocks = _run(adversary, max(LEAST_PILOT, size), seed, place << 20, deadline)
        zero, one = map(np.concatenate, zip(*blocks, strict=True))
        half = len(zero) // 2
        tried: list[_Attempt] = []
        for statistic in _fit(adversary, zero[:half], one[:half]):
            scores = attacks.score(statistic, zero[half:]), attacks.score(statistic, one[half:])
            choice = bounds.choose_thresholds(*scores, claim, confidence)
            tried.append(_Attempt(adversary, statistic, choice))
        found.append(_prefer(tried))
        runs += len(zero) + len(one)
    return _prefer(found), runs


def _run(
    adversary: Adversary, trials: int, seed: int | None, first: int, deadline: float
) -> Iterator[tuple[Array, Array]]:
    """What is released, around the centre, block by block until the deadline: (world 0, world 1).

    About as much work in a block whatever the number of steps, and less at first in a hurry.
    """
    recipe = adversary.recipe
    centre = torch.tensor(_CENTRE, dtype=torch.float64) * attacks.find_reach(recipe)
    block = max(BLOCK * 64 // max(64, len(list_levels(recipe))), LEAST_BLOCK)
    done = 0
    for place in itertools.count(first):
        rows = min(block, trials - done)
        if math.isfinite(deadline):
            rows = min(rows, LEAST_BLOCK << min(place - first, 9))
        points = _release(adversary, rows, centre, choose_noise(seed, place))
        yield points[1::2], points[::2]
        done += rows
        if done == trials or time.monotonic() > deadline:
            return


def _release(adversary: Adversary, rows: int, centre: torch.Tensor, noise: Noise) -> Array:
    """What the code that releases makes of the adversary's starts."""
    recipe, starts = adversary.recipe, adversary.start(rows) + centre
    if isinstance(recipe, ConvexHeadRecipe):
        return release_solution(starts.numpy(), recipe, noise).weights - centre.numpy()
    steps = 0 if isinstance(recipe, OutputPerturbation) else recipe.steps
    released = unlearn_stack(
        attacks.Trials(starts),
        attacks.Instructions(steps, centre),
        recipe,
        loss_fn=adversary.loss,
        noise=noise,
        centre={"weight": centre[:2].expand(rows, 2), "bias": centre[2:].expand(rows, 1)},
    )
    with torch.no_grad():
        return released(centre).numpy()


def _prefer(attempts: list[_Attempt]) -> _Attempt:
    """The first, which theory would choose, unless another one clearly does better."""
    best = max(attempts, key=lambda attempt: attempt.choice.merit)
    return best if best.choice.merit > CLEAR else attempts[0]


def _fit(adversary: Adversary, zero: Array, one: Array) -> Iterator[Statistic]:
    yield attacks.Projection(DIRECTION)
    yield attacks.fit_projection(zero, one)
    for axis in np.eye(len(DIRECTION)).tolist():
        yield attacks.Projection(tuple(axis))
    yield attacks.fit_bit(zero, one, choose_precision(adversary.recipe, len(DIRECTION)).grid)
    if adversary.kind == "lattice":
        yield attacks.fit_residue(zero, one, DIRECTION, adversary.period)
    sigma = next(s for s in reversed(list_levels(adversary.recipe)) if s > 0)
    for unit in dict.fromkeys((sigma, math.ldexp(1.0, math.frexp(sigma)[1]))):
        for bits in (8, 14):
            yield attacks.fit_residue(zero, one, (1.0, 0.0, 0.0), math.ldexp(unit, -bits))


def _count(
    attempt: _Attempt, blocks: Iterator[tuple[Array, Array]], most: int, progress: bool
) -> tuple[Counts, Counts, Counts]:
    """How often each test, for μ, ε and δ, rejects in fresh runs."""
    tests = (attempt.choice.mu, attempt.choice.epsilon, attempt.choice.delta)
    sums = np.zeros((3, 4), np.int64)
    with Bar(most, "auditing", wanted=progress) as bar:
        for worlds in blocks:
            scores = [attacks.score(attempt.statistic, world) for world in worlds]
            sums += [dataclasses.astuple(test.count(*scores)) for test in tests]
            bar.update(int(sums[0, 1] + sums[0, 3]))
    mu, epsilon, delta = (Counts(*map(int, row)) for row in sums)
    return mu, epsilon, delta


def audit_run(
    directory: str | Path,
    *,
    trials: int | None = None,
    seconds: float = 60.0,
    confidence: float = 0.999,
    seed: int | None = None,
    progress: bool = False,
) -> Audit:
    """Audit the engine with a finished run's recipe, and the run's own certificate and record.

    Lower bounds are held against the ε that stands in ``certificate.json``. Whether that follows
    from the recipe, and all of the certificate from ``record.json`` where it is there, is derived
    again. Writes ``audit.json``.
    """
    folder = Path(directory)
    certificate = Certificate.load(folder / "certificate.json")
    recipe, delta, compared_to = certificate.method, certificate.delta, certificate.compared_to
    if is_exact(recipe):
        name = recipes.method_name(recipe)
        raise InputError(
            f"method is {name!r}: it adds no noise, so there is nothing to audit; expunge verify "
            "checks what it says, and the bits of a head with --store"
        )
    if not isinstance(recipe, Audited):
        valid = "gradient-clipping, model-clipping, output-perturbation or convex-head"
        raise InputError.of("method", recipes.method_name(recipe), valid)
    kept = folder / "record.json"
    problems = find_differences(folder / "certificate.json", kept if kept.exists() else None)
    claim = make_claim(recipe, delta, compared_to, certificate.execution)
    claim = replace(claim, epsilon=certificate.epsilon, mu=certificate.mu)
    cells = examine_cells(recipe, seed=seed, progress=progress)
    if cells is not None and cells.p_value < IMPROBABLE:
        problems.append(f"{cells.oddest} is not of the noise's law (p = {cells.p_value:.1e})")
    chance = None
    if kept.exists():
        chance = judge_noise(RunRecord.load(kept))
        if chance < IMPROBABLE:
            problems.append(f"its realised noise is not of its noise_std (p = {chance:.1e})")
    found = audit_mechanism(
        recipe,
        delta=delta,
        compared_to=compared_to,
        claim=claim,
        trials=trials,
        seconds=seconds,
        confidence=confidence,
        seed=seed,
        progress=progress,
    )
    found = replace(found, run=RunCheck(chance, cells, tuple(problems)))
    if problems:
        verdict = f"{found.verdict} The run does not hold: {'; '.join(problems)}."
        found = replace(found, contradicts=True, verdict=verdict)
    text = json.dumps(to_plain(found), ensure_ascii=False, allow_nan=False, indent=1)
    write_atomic(folder / "audit.json", (text + "\n").encode(), private=True)
    return found


def judge_noise(record: RunRecord) -> float:
    """How often honest noise is as long or as short as the trace says it was: Σ ‖ξ_t‖²/σ_t² is
    chi-squared with one degree of freedom per parameter and step."""
    sigma, norm = np.array(record.trace.noise_std), np.array(record.trace.noise_norm)
    noisy = sigma > 0
    freedom = record.parameters * int(np.count_nonzero(noisy))
    if freedom == 0:
        return 1.0
    square = float(np.sum(np.square(norm[noisy] / sigma[noisy])))
    tails = special.gammainc(freedom / 2, square / 2), special.gammaincc(freedom / 2, square / 2)
    return min(2 * float(min(tails)), 1.0)
