"""The mechanism audit: run the engine on its worst cases, many times, and see what comes through.

Every trial is a run of the engine on a tiny module (``trials`` says which of its functions run).
Adversaries choose starts and retained data, statistics score what is released (``attacks``), exact
intervals turn counts into bounds (``bounds``). A fifth of the runs is a pilot, shared out among the
adversaries: half of it trains the statistics, the other half chooses among them. All other runs are
fresh. The audit of a run also looks at every bit of a long vector (``cells``), and at whether the
certificate follows from itself and from its record.
"""

from __future__ import annotations

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
from expunge.accounting.guarantee import guarantee, log_delta
from expunge.accounting.precision import NoisyRecipe, choose_precision, list_levels
from expunge.auditing.attacks import (
    DIRECTION,
    Adversary,
    Instructions,
    Projection,
    Statistic,
    Trials,
    describe,
    find_reach,
    fit_bit,
    fit_projection,
    fit_residue,
    list_adversaries,
    replaces_first_step,
    score,
)
from expunge.auditing.bounds import (
    Audit,
    Choice,
    Claim,
    Counts,
    RunCheck,
    add_problems,
    apply_thresholds,
    choose_thresholds,
    fewest_runs,
    foresee_mu,
    largest_epsilon,
    list_refuted,
    write_verdict,
)
from expunge.auditing.cells import examine_cells
from expunge.auditing.trials import unlearn_stack
from expunge.certificates.certificate import Certificate
from expunge.certificates.record import RunRecord
from expunge.certificates.verification import find_differences
from expunge.errors import InputError
from expunge.files import to_plain, write_atomic
from expunge.noisy.noise import Noise, SeededNoise, SystemNoise
from expunge.progress import show_progress
from expunge.recipes import ComparedTo, Execution, ModelClipping, OutputPerturbation, schedule

Array = npt.NDArray[np.float64]
BLOCK = 1 << 15
PILOT_SHARE = 0.2
LEAST_PILOT = 400
CLEAR = 0.2  # of the claim must be proved by the pilot before an attack is preferred to the first
MOST_TRIALS, MOST_ASKED = 20_000_000, 2**29
IMPROBABLE = 1e-9
SEEDS = 2**30
_CENTRE = (0.3, -0.2, 0.1)


def audit_mechanism(
    recipe: NoisyRecipe,
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
    if seed is not None and not 0 <= seed < SEEDS:
        raise InputError.of("seed", seed, f"a whole number from 0 to {SEEDS - 1}")
    adversaries = list_adversaries(recipe, compared_to, (0.0, min(claim.epsilon, 2.0)))
    pilots = len(adversaries)
    budget = _plan_trials(recipe, adversaries, trials, seconds, confidence, seed)
    pilot = max(LEAST_PILOT, math.ceil(PILOT_SHARE * budget / pilots))
    attempts = [
        _try(adversary, claim, confidence, _run(adversary, pilot, seed, place << 20))
        for place, adversary in enumerate(adversaries)
    ]
    best = _prefer(attempts)
    deadline = None if trials is not None else started + seconds
    counts, fresh = _count(best, budget - pilots * pilot, seed, pilots << 20, deadline, progress)
    bounds = apply_thresholds(best.choice, counts, claim, confidence)
    allowed = dict(claim.curve)[bounds.probe]
    refuted = list_refuted(bounds, claim, allowed)
    mu = claim.mu
    return Audit(
        method=recipes.method_name(recipe),
        recipe=recipes.to_dict(recipe),
        compared_to=compared_to,
        epsilon_lower=bounds.epsilon,
        epsilon_certified=claim.epsilon,
        delta=claim.delta,
        mu_lower=bounds.mu,
        mu_estimate=bounds.mu_estimate,
        mu_certified=mu,
        epsilon_probe=bounds.probe,
        delta_lower=bounds.delta,
        delta_certified=allowed,
        confidence=confidence,
        trials=fresh + pilots * pilot,
        pilot_trials=pilots * pilot,
        seconds=time.monotonic() - started,
        epsilon_ceiling=largest_epsilon(fresh // 2, claim.delta, confidence),
        resolution=foresee_mu(mu, fresh // 2, confidence) / mu if mu else None,
        attack=f"{best.adversary.describe()}; {describe(best.statistic)}",
        noise="system" if seed is None else "seeded",
        seed=seed,
        contradicts=bool(refuted),
        verdict=write_verdict(refuted, bounds, claim, confidence),
    )


def make_claim(
    recipe: NoisyRecipe,
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


def _has_no_reference(recipe: NoisyRecipe, compared_to: ComparedTo) -> bool:
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


def _plan_trials(
    recipe: NoisyRecipe,
    adversaries: list[Adversary],
    trials: int | None,
    seconds: float,
    confidence: float,
    seed: int | None,
) -> int:
    """``trials``, or what fits into the time left after a few runs have been timed."""
    least = len(adversaries) * LEAST_PILOT + 2 * fewest_runs(confidence)
    if trials is not None:
        if not least <= trials <= MOST_ASKED:
            raise InputError.of(
                "trials", trials, f"{least} to {MOST_ASKED} for a confidence of {confidence}"
            )
        return trials
    began, each = time.monotonic(), math.inf
    for size in (1024, _size_block(recipe)):
        before = time.monotonic()
        if before - began < 0.02 * seconds:
            _run(adversaries[0], size, seed, (1 << 22) - 1)
            each = (time.monotonic() - before) / size
    left = 0.9 * seconds - (time.monotonic() - began)
    return int(min(max(left / each, least), MOST_TRIALS))


def _size_block(recipe: NoisyRecipe) -> int:
    """Runs at once: about as much work in a block whatever the number of steps."""
    return max(BLOCK * 64 // max(64, len(list_levels(recipe))), 1024)


def _run(adversary: Adversary, trials: int, seed: int | None, first: int) -> tuple[Array, Array]:
    """What is released, around the centre: (world 0, world 1)."""
    parts = list(_run_blocks(adversary, trials, seed, first))
    zero, one = zip(*parts, strict=True)
    return np.concatenate(zero), np.concatenate(one)


def _run_blocks(
    adversary: Adversary, trials: int, seed: int | None, first: int
) -> Iterator[tuple[Array, Array]]:
    recipe = adversary.recipe
    centre = torch.tensor(_CENTRE, dtype=torch.float64) * find_reach(recipe)
    steps = 0 if isinstance(recipe, OutputPerturbation) else recipe.steps
    block = _size_block(recipe)
    for place, start in enumerate(range(0, trials, block)):
        rows = min(block, trials - start)
        model = Trials(adversary.start(rows) + centre)
        public = {"weight": centre[:2].expand(rows, 2), "bias": centre[2:].expand(rows, 1)}
        released = unlearn_stack(
            model,
            Instructions(steps, centre),
            recipe,
            loss_fn=adversary.loss,
            noise=_choose_noise(seed, first + place),
            centre=public,
        )
        with torch.no_grad():
            points = released(centre).numpy()
        yield points[1::2], points[::2]


def _choose_noise(seed: int | None, place: int) -> Noise:
    return SystemNoise() if seed is None else SeededNoise((seed << 23) + place)


def _try(
    adversary: Adversary, claim: Claim, confidence: float, pilot: tuple[Array, Array]
) -> _Attempt:
    """Train every statistic on one half of the pilot, choose on the other."""
    zero, one = pilot
    half = len(zero) // 2
    found: list[_Attempt] = []
    for statistic in _fit(adversary, zero[:half], one[:half]):
        scores = score(statistic, zero[half:]), score(statistic, one[half:])
        choice = choose_thresholds(*scores, claim, confidence)
        found.append(_Attempt(adversary, statistic, choice))
    return _prefer(found)


def _prefer(attempts: list[_Attempt]) -> _Attempt:
    """The first, which theory would choose, unless another one clearly does better."""
    best = max(attempts, key=lambda attempt: attempt.choice.merit)
    return best if best.choice.merit > CLEAR else attempts[0]


def _fit(adversary: Adversary, zero: Array, one: Array) -> Iterator[Statistic]:
    yield Projection(DIRECTION)
    yield fit_projection(zero, one)
    for axis in np.eye(len(DIRECTION)).tolist():
        yield Projection(tuple(axis))
    yield fit_bit(zero, one, choose_precision(adversary.recipe, len(DIRECTION)).grid)
    if adversary.kind == "lattice":
        yield fit_residue(zero, one, DIRECTION, adversary.period)
    sigma = next(s for s in reversed(list_levels(adversary.recipe)) if s > 0)
    for unit in dict.fromkeys((sigma, math.ldexp(1.0, math.frexp(sigma)[1]))):
        for bits in (8, 14):
            yield fit_residue(zero, one, (1.0, 0.0, 0.0), math.ldexp(unit, -bits))


def _count(
    attempt: _Attempt,
    trials: int,
    seed: int | None,
    first: int,
    deadline: float | None,
    progress: bool,
) -> tuple[tuple[Counts, Counts, Counts], int]:
    """Fresh runs, counted block by block: how often each test rejects, and how many ran."""
    tests = (attempt.choice.mu, attempt.choice.epsilon, attempt.choice.delta)
    sums, done = np.zeros((3, 4), np.int64), 0
    blocks = _run_blocks(attempt.adversary, trials, seed, first)
    block = _size_block(attempt.adversary.recipe)
    shown = show_progress(range(0, trials, block), trials, "auditing", progress)
    for _, (zero, one) in zip(shown, blocks, strict=False):
        scores = score(attempt.statistic, zero), score(attempt.statistic, one)
        for row, test in enumerate(tests):
            c = test.count(*scores)
            sums[row] += (c.false, c.negatives, c.true, c.positives)
        done += len(zero) + len(one)
        if deadline is not None and time.monotonic() > deadline:
            break
    mu, epsilon, delta = (Counts(*(int(n) for n in row)) for row in sums)
    return (mu, epsilon, delta), done


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
    if not isinstance(recipe, NoisyRecipe):
        raise InputError.of(
            "method",
            recipes.method_name(recipe),
            "gradient-clipping, model-clipping or output-perturbation: it adds no noise to audit",
        )
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
    found = add_problems(found, RunCheck(chance, cells, tuple(problems)))
    text = json.dumps(to_plain(found), ensure_ascii=False, allow_nan=False, indent=1)
    write_atomic(folder / "audit.json", (text + "\n").encode())
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
