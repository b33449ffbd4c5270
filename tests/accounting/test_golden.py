"""The 60-digit values of tests/data/golden.json, every entry of every section."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mpmath
import numpy as np
import pytest

from expunge import GradientClipping, ModelClipping, guarantee
from expunge.accounting import gaussian
from expunge.accounting.guarantee import log_delta
from expunge.accounting.theorems import iterate, mix

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text())


def close_above(ours: float, exact: str, relative: float = 1e-9) -> bool:
    """Not below the exact value, and at most ``relative`` above it."""
    value, ours_ = mpmath.mpf(exact), mpmath.mpf(float(ours))
    return value <= ours_ <= value * (1 + relative)


def test_sections() -> None:
    assert {key: len(rows) for key, rows in GOLDEN.items() if isinstance(rows, list)} == {
        "delta": 14, "epsilon": 8, "mu": 7, "contraction": 7, "iteration": 6,
    }  # fmt: skip


@pytest.mark.parametrize("row", GOLDEN["delta"], ids=str)
def test_delta(row: dict) -> None:
    exact = mpmath.mpf(row["delta"])
    with mpmath.workdps(40):
        log_exact = float(mpmath.log(exact))
    ours = float(gaussian.log_delta(row["epsilon"], row["mu"]))
    assert 0 <= ours - log_exact <= 1e-9 + 1e-14 * abs(log_exact)
    if exact > 1e-300:
        assert close_above(gaussian.delta(row["epsilon"], row["mu"]), row["delta"])
    else:
        assert 0 < gaussian.delta(row["epsilon"], row["mu"]) < 1e-300


@pytest.mark.parametrize("row", GOLDEN["epsilon"], ids=str)
def test_epsilon(row: dict) -> None:
    assert close_above(gaussian.epsilon(row["mu"], row["delta"]), row["epsilon"])


@pytest.mark.parametrize("row", GOLDEN["mu"], ids=str)
def test_mu(row: dict) -> None:
    exact = mpmath.mpf(row["mu"])
    ours = mpmath.mpf(float(gaussian.mu(row["epsilon"], row["delta"])))
    assert exact * (1 - mpmath.mpf("1e-9")) <= ours <= exact


@pytest.mark.parametrize("row", GOLDEN["contraction"], ids=lambda row: f"ratio {row['ratio']}")
def test_contraction(row: dict) -> None:
    """Every intermediate δ_t of the mixing recursion, alone and through the recipe."""
    assert len(row["delta"]) == row["steps"]
    for steps, exact in enumerate(row["delta"], start=1):
        ratios = np.full(steps, float(row["ratio"]))
        assert close_above(math.exp(mix(0.0, row["epsilon"], ratios)), exact)
        recipe = ModelClipping(
            model_clip=row["ratio"] / 2, learning_rate=0.1, weight_decay=0.0, noise_std=1.0,
            steps=steps,
        )  # fmt: skip
        assert close_above(guarantee(recipe, epsilon=row["epsilon"]).delta, exact)
        assert math.isclose(log_delta(recipe, row["epsilon"]), math.log(float(exact)), rel_tol=1e-9)


@pytest.mark.parametrize(
    "row", GOLDEN["iteration"], ids=lambda row: f"{len(row['noise_std'])} steps"
)
def test_iteration(row: dict) -> None:
    gamma, sigma = np.array(row["learning_rate"]), np.array(row["noise_std"])
    D, C1 = row["start_distance"], row["grad_clip"]
    assert close_above(iterate(gamma * row["weight_decay"], 2 * gamma * C1, sigma, D), row["mu"])
    recipe = GradientClipping(
        start_clip=D / 2, grad_clip=C1, learning_rate=gamma, weight_decay=row["weight_decay"],
        steps=len(gamma), noise_std=sigma,
    )  # fmt: skip
    assert close_above(guarantee(recipe, delta=1e-5).mu, row["mu"])
