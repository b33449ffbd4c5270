"""Membership inference against forgotten examples: shadow runs, attacks, and what is allowed.

Shadow runs repeat the whole story (train, forget, release) with members drawn by fair coins; an
attack scores every candidate in every run, and a good one scores members higher. Two of them read
the log-odds s of a candidate's class. A threshold on the loss is one on s, as the cross-entropy is
log(1 + e^-s). U-LiRA (Hayes et al. 2024, after Carlini et al. 2022) compares each candidate with
itself: the likelihood ratio of s under the other runs that had it and the other runs that had not.
Coins are fair and independent, so a model that never depended on them gives both an AUC of 1/2.

Any two starts of a certified run are indistinguishable as the certificate says, so no attack on
what it releases has a curve above ``bound_roc``: 1 - β ≤ min over ε of e^ε α + δ(ε), and the same
for the complementary errors. For one candidate that is the guarantee; for an average over
candidates it follows because the bound is concave in α.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from scipy import special
from torch import Tensor, nn

from expunge.accounting.guarantee import log_delta, mu
from expunge.errors import CertificateError, InputError
from expunge.files import read_limited, to_plain, write_atomic
from expunge.progress import show_progress
from expunge.recipes import IDEAL, Execution, Recipe, method_name

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
GRID = 61
LIMIT = 50.0
MAX_BYTES = 100_000_000
ORIGINAL = "original"
FEWEST_SHADOWS = 4
_BATCH = 4096


@dataclass(frozen=True, eq=False)
class Signals:
    """``members[k, i]``: whether run k was trained on candidate i; ``odds[arm][k, i]``: the
    log-odds of its class in the model that the arm released."""

    members: Mask
    odds: Mapping[str, Array]


@dataclass(frozen=True)
class Attack:
    """How well one attack does; intervals are 95 % bootstrap intervals over runs and candidates.

    ``tpr_at_1_percent`` and ``tpr_at_01_percent`` are true-positive rates at false-positive rates
    of 1 % and 0.1 %; ``advantage`` is the largest difference of the two rates. ``roc`` has the
    true-positive rate at each of the ``Membership``'s false-positive rates.
    """

    auc: float
    auc_interval: tuple[float, float]
    tpr_at_1_percent: float
    tpr_at_01_percent: float
    advantage: float
    advantage_interval: tuple[float, float]
    roc: tuple[float, ...]


@dataclass(frozen=True)
class Membership:
    """The attacks on every arm, by arm and by attack, and what the certificate allows."""

    method: str
    shadows: int
    candidates: int
    negatives: int
    fpr: tuple[float, ...]
    tpr_allowed: tuple[float, ...]
    advantage_allowed: float
    attacks: Mapping[str, Mapping[str, Attack]]


def examine(
    signals: Signals,
    recipe: Recipe,
    *,
    execution: Execution = IDEAL,
    resamples: int = 200,
    seed: int = 0,
) -> Membership:
    """Every attack on every arm, beside the curve that ``recipe`` allows.

    >>> rng = np.random.default_rng(0)
    >>> members = rng.random((8, 50)) < 0.5
    >>> told = {"original": 3.0 * members + rng.normal(size=members.shape)}
    >>> from expunge import OutputPerturbation
    >>> found = examine(Signals(members, told), OutputPerturbation(1.0, 4.0))
    >>> found.attacks["original"]["u-lira"].auc > 0.9, round(found.advantage_allowed, 3)
    (True, 0.197)
    """
    members = signals.members
    if min(members.sum(), (~members).sum()) < 1:
        raise InputError("members has only one kind of candidate; both kinds are needed")
    negatives = int((~members).sum())
    fpr = np.geomspace(1 / max(negatives, 2), 1.0, GRID)
    rng = np.random.default_rng(seed)
    attacks = {
        arm: {
            name: measure_attack(scores, members, fpr, resamples, rng)
            for name, scores in (("loss", odds), ("u-lira", score_ratio(odds, members)))
        }
        for arm, odds in signals.odds.items()
    }
    return Membership(
        method=method_name(recipe),
        shadows=len(members),
        candidates=members.shape[1],
        negatives=negatives,
        fpr=tuple(fpr.tolist()),
        tpr_allowed=tuple(bound_roc(recipe, fpr, execution).tolist()),
        advantage_allowed=math.exp(log_delta(recipe, 0.0, execution=execution)),
        attacks=attacks,
    )


def score_ratio(odds: Array, members: Mask) -> Array:
    """log N(s; m₁, v₁) - log N(s; m₀, v₀) for every run and candidate, from the *other* runs.

    Means are the candidate's own, drawn towards its overall mean by one pseudo-run; variances are
    pooled over candidates, as is best with few runs.
    """
    s = np.clip(odds, -LIMIT, LIMIT)
    inside = members.astype(float)
    others = s.sum(axis=0) - s
    overall = others / max(len(s) - 1, 1)
    means: list[Array] = []
    variances: list[float] = []
    for weight in (1 - inside, inside):
        count = weight.sum(axis=0) - weight
        mean = ((weight * s).sum(axis=0) - weight * s + overall) / (count + 1)
        means.append(mean)
        spread = float(np.sum(weight * np.square(s - mean)) / max(weight.sum(), 1.0))
        variances.append(max(spread, 1e-12))
    return 0.5 * (
        np.square(s - means[0]) / variances[0]
        - np.square(s - means[1]) / variances[1]
        + math.log(variances[0] / variances[1])
    )


def measure_attack(
    scores: Array, members: Mask, fpr: Array, resamples: int, rng: np.random.Generator
) -> Attack:
    """AUC and advantage, each with its interval, true-positive rates, and the curve."""
    false, true = trace_roc(scores, members)
    auc, advantage = _summarise(false, true)
    draws = np.empty((resamples, 2))
    for row in draws:
        chosen = np.ix_(*(rng.integers(n, size=n) for n in scores.shape))
        row[:] = _summarise(*trace_roc(scores[chosen], members[chosen]))
    (low, least), (high, most) = np.quantile(draws, [0.025, 0.975], axis=0).tolist()
    one, tenth = _read_curve(false, true, np.array([0.01, 0.001])).tolist()
    roc = tuple(_read_curve(false, true, fpr).tolist())
    return Attack(auc, (low, high), one, tenth, advantage, (least, most), roc)


def trace_roc(scores: Array, members: Mask) -> tuple[Array, Array]:
    """(false-positive rates, true-positive rates) of every threshold, from (0, 0) to (1, 1).

    >>> trace_roc(np.array([[3.0, 2.0, 2.0, 1.0]]), np.array([[True, True, False, False]]))
    (array([0. , 0. , 0.5, 1. ]), array([0. , 0.5, 1. , 1. ]))
    """
    flat, inside = scores.reshape(-1), members.reshape(-1)
    order = np.argsort(-flat, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(flat[order])), len(flat) - 1)
    true = np.cumsum(inside[order])[ends]
    false = ends + 1 - true
    return (
        np.concatenate([[0.0], false / max(false[-1], 1)]),
        np.concatenate([[0.0], true / max(true[-1], 1)]),
    )


def bound_roc(recipe: Recipe, fpr: Array, execution: Execution = IDEAL) -> Array:
    """The largest true-positive rate that the certificate allows at each false-positive rate.

    Φ(Φ⁻¹(α) + μ) where the pair is μ-GDP; else the best of e^ε α + δ and 1 - e^-ε (1 - δ - α).

    >>> from expunge import OutputPerturbation
    >>> bound_roc(OutputPerturbation(1.0, 2.0), np.array([0.0, 0.1586552539, 1.0])).round(6)
    array([0. , 0.5, 1. ])
    """
    proved = mu(recipe, execution=execution)
    if proved is not None:
        return special.ndtr(special.ndtri(fpr) + proved)
    best = np.ones_like(fpr)
    for epsilon in np.concatenate([[0.0], np.geomspace(1e-3, 30.0, 80)]).tolist():
        delta = math.exp(log_delta(recipe, epsilon, execution=execution))
        best = np.minimum(best, math.exp(epsilon) * fpr + delta)
        best = np.minimum(best, 1 - math.exp(-epsilon) * (1 - delta - fpr))
    return np.clip(best, 0.0, 1.0)


def save_membership(found: Membership, directory: str | Path) -> Path:
    """Add it to ``audit.json`` as ``membership``: the report shows what is there."""
    folder = Path(directory)
    if not folder.is_dir():
        raise InputError.of("directory", str(directory), "a directory that exists")
    path = folder / "audit.json"
    audit: dict[str, Any] = {}
    if path.exists():
        try:
            audit = json.loads(read_limited(path, MAX_BYTES, "audit"))
        except ValueError:
            raise CertificateError(f"audit {path} is not JSON; remove it first") from None
    audit["membership"] = to_plain(found)
    text = json.dumps(audit, ensure_ascii=False, allow_nan=False, indent=1)
    write_atomic(path, (text + "\n").encode())
    return path


def _summarise(false: Array, true: Array) -> tuple[float, float]:
    """(area, advantage)."""
    area = np.sum(np.diff(false) * (true[1:] + true[:-1]) / 2)
    return float(area), float(np.max(true - false))


def _read_curve(false: Array, true: Array, fpr: Array) -> Array:
    """The best true-positive rate of a threshold with at most this false-positive rate."""
    return true[np.searchsorted(false, fpr * (1 + 1e-12), side="right") - 1]


@dataclass(frozen=True, eq=False)
class Shadow:
    """One run: ``original`` was trained on the retained data and on the candidates in ``members``.

    ``seed`` is for whatever the arms draw; it differs from run to run.
    """

    number: int
    seed: int
    members: Tensor
    original: nn.Module


def run_shadows(
    train: Callable[[Tensor, int], nn.Module],
    arms: Mapping[str, Callable[[Shadow], nn.Module]],
    inputs: Tensor,
    targets: Tensor,
    *,
    shadows: int = 16,
    seed: int = 0,
    progress: bool = False,
) -> Signals:
    """Train, run every arm, and read all candidates off each model, ``shadows`` times.

    ``train(members, seed)`` trains on the retained data and on the candidates where ``members`` is
    true. ``arms`` turn a shadow into a released model: ``"unlearned"`` by the run that is audited
    (its fine-tuning included), ``"retrained"`` and ``"centre"`` by the controls.

    >>> def train(members, seed):
    ...     model = nn.Linear(2, 2)
    ...     model.weight.data = torch.tensor([[0.0, 0.0], [float(members[0]), 0.0]])
    ...     return model
    >>> signals = run_shadows(train, {}, torch.eye(2), torch.tensor([1, 0]), shadows=6)
    >>> signals.members.shape, list(signals.odds)
    ((6, 2), ['original'])
    """
    if shadows < FEWEST_SHADOWS:
        raise InputError.of("shadows", shadows, f"at least {FEWEST_SHADOWS}")
    if ORIGINAL in arms:
        raise InputError.of("arms", ORIGINAL, "names other than 'original', which is always there")
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise InputError.of("number of targets", len(targets), f"{len(inputs)}, one per input")
    rng = np.random.default_rng(seed)
    members = rng.random((shadows, len(inputs))) < 0.5
    seeds = rng.integers(2**31, size=shadows).tolist()
    odds = {name: np.empty(members.shape) for name in (ORIGINAL, *arms)}
    for k in show_progress(range(shadows), shadows, "shadow runs", progress):
        chosen = torch.from_numpy(members[k])
        shadow = Shadow(k, seeds[k], chosen, train(chosen, seeds[k]))
        odds[ORIGINAL][k] = read_odds(shadow.original, inputs, targets)
        for name, arm in arms.items():
            odds[name][k] = read_odds(arm(shadow), inputs, targets)
    return Signals(members, odds)


def read_odds(model: nn.Module, inputs: Tensor, targets: Tensor) -> Array:
    """Log-odds of the true class, in ``eval`` mode.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> model.weight.data = torch.eye(2)
    >>> read_odds(model, torch.tensor([[3.0, 1.0]]), torch.tensor([0])).round(3).tolist()
    [2.0]
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    training = model.training
    try:
        model.eval()
        with torch.no_grad():
            rows = [
                _read_batch(model(x.to(device)), y.to(device))
                for x, y in zip(inputs.split(_BATCH), targets.split(_BATCH), strict=True)
            ]
    finally:
        model.train(training)
    return torch.cat(rows).numpy()


def _read_batch(output: Any, targets: Tensor) -> Tensor:
    logits = cast(object, getattr(output, "logits", output))
    valid = "logits: a row per example, a column per class, all finite"
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise InputError.of("the model's output", type(logits).__name__, valid)
    if logits.ndim != 2 or len(logits) != len(targets) or logits.shape[1] < 2:
        raise InputError.of("the shape of the model's output", tuple(logits.shape), valid)
    if not bool(torch.isfinite(logits).all()):
        raise InputError("the model's output is not finite; it must be " + valid)
    if targets.ndim != 1 or targets.is_floating_point() or int(targets.max()) >= logits.shape[1]:
        raise InputError("targets must be one class number per example, below the output's columns")
    z, own = logits.double(), targets[:, None].long()
    rest = z.scatter(1, own, -torch.inf).logsumexp(dim=1)
    return (z.gather(1, own)[:, 0] - rest).cpu()
