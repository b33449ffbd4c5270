"""The audit of heads built to forget: two points at the distance τ/m; (0, 0) has nothing random."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import expunge
import expunge.auditing.cells
import expunge.auditing.mechanism
from expunge.accounting.calibration import calibrate
from expunge.auditing.cells import examine_cells
from expunge.auditing.mechanism import audit_mechanism
from expunge.cli.main import main
from expunge.noisy.solutions import release_solution
from expunge.recipes import ConvexHeadRecipe

DELTA = 1e-5
RECIPE = calibrate(
    lambda s: ConvexHeadRecipe(weight_decay=1e-5, tolerance=1e-9, noise_std=s),
    epsilon=8.0,
    delta=DELTA,
    parameters=3,
)


def halve(weights, recipe, noise):
    return release_solution(weights, replace(recipe, noise_std=recipe.noise_std / 2), noise)


def spare_some(weights, recipe, noise):
    """No noise on the last tenth."""
    found = release_solution(weights, recipe, noise)
    found.weights[-len(weights) // 10 :] = weights[-len(weights) // 10 :]
    return found


def test_the_bound_is_near_what_is_certified() -> None:
    found = audit_mechanism(RECIPE, delta=DELTA, trials=60_000, seed=0)
    assert 0.93 * found.mu_certified < found.mu_lower <= found.mu_certified
    assert abs(found.mu_estimate / found.mu_certified - 1) < 0.03
    assert not found.contradicts
    assert found.attack.startswith("two solutions at the distance tolerance / weight_decay")


def test_at_epsilon_one_too() -> None:
    recipe = calibrate(
        lambda s: replace(RECIPE, noise_std=s), epsilon=1.0, delta=DELTA, parameters=3
    )
    found = audit_mechanism(recipe, delta=DELTA, trials=600_000, seed=1)
    assert not found.contradicts
    assert 0.85 * found.mu_certified < found.mu_lower <= found.mu_certified


def test_half_the_noise_is_refuted(monkeypatch) -> None:
    monkeypatch.setattr(expunge.auditing.mechanism, "release_solution", halve)
    found = audit_mechanism(RECIPE, delta=DELTA, trials=20_000, seed=0)
    assert found.contradicts
    assert found.mu_lower > 1.5 * found.mu_certified


@pytest.mark.parametrize("defect", [halve, spare_some])
def test_every_bit_of_a_long_head_is_of_the_noise(monkeypatch, defect) -> None:
    assert examine_cells(RECIPE, seed=0, runs=8).p_value > 1e-6
    monkeypatch.setattr(expunge.auditing.cells, "release_solution", defect)
    assert examine_cells(RECIPE, seed=0, runs=8).p_value < 1e-9


def release(folder: Path, kind: str, **budget) -> Path:
    from expunge.jobs.directory import write_run

    rng = np.random.default_rng(0)
    make = expunge.StatisticsHead if kind == "statistics" else expunge.ConvexHead
    head = make(expunge.Features(), classes=3)
    head.learn((rng.normal(size=(60, 5)), np.arange(60) % 3), [f"user-{i}" for i in range(60)])
    run = head.forget(["user-1"], **budget)
    certificate = expunge.certify(run.record, delta=DELTA)
    write_run(folder, model=run.model, record=run.record, certificate=certificate)
    return folder


def call(monkeypatch, capsys, *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["expunge", "audit", *map(str, words)])
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0), *capsys.readouterr()
    return 0, *capsys.readouterr()


def test_the_command_audits_a_noisy_release(tmp_path: Path, monkeypatch, capsys) -> None:
    few = partial(examine_cells, runs=4)
    monkeypatch.setattr(expunge.auditing.mechanism, "examine_cells", few)
    folder = release(tmp_path / "r", "convex", epsilon=8.0, delta=DELTA)
    words = folder, "--trials", 30_000, "--seed", 1, "--json"
    code, told, _ = call(monkeypatch, capsys, *words)
    found = json.loads(told)
    assert (code, found["contradicts"], found["method"]) == (0, False, "convex-head")
    assert 0.9 * found["mu_certified"] < found["mu_lower"] <= found["mu_certified"]
    assert found["run"]["problems"] == []
    assert 1e-9 < found["run"]["noise_p_value"] <= 1
    assert json.loads((folder / "audit.json").read_text())["mu_lower"] == found["mu_lower"]
    monkeypatch.setattr(expunge.auditing.mechanism, "release_solution", halve)
    assert call(monkeypatch, capsys, *words)[0] == 1


@pytest.mark.parametrize("kind", ["statistics", "convex"])
def test_of_an_exact_release_nothing_is_random(tmp_path: Path, kind, monkeypatch, capsys) -> None:
    folder = release(tmp_path / "r", kind)
    code, _, error = call(monkeypatch, capsys, folder)
    assert code == 2
    assert "it adds no noise, so there is nothing to audit" in error
    assert not (folder / "audit.json").exists()
