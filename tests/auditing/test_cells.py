"""Bits of a long vector: fair where the engine is, and every kind of defect a bit can show."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from defects import stop_after_first_chunk, write_sign
from expunge import GradientClipping, ModelClipping, OutputPerturbation
from expunge.auditing.attacks import fit_bit, score
from expunge.auditing.cells import BITS, COLUMNS, _Law, examine_cells, take_last_steps
from expunge.noisy.noise import NoiseStream

torch.set_num_threads(1)
RECIPES = [
    OutputPerturbation(1.0, 0.8),
    GradientClipping(50.0, 1.0, 0.5, 0.3, 4, [0.5, 0.1, 0.2, 0.3]),
    GradientClipping(50.0, 1.0, 0.1, 1.0, 1, 0.2, 0.3),
    GradientClipping(90.0, 1.0, 0.1, 1.0, 3, 0.1, model_clip=80.0),
    ModelClipping(1.0, 0.1, 1.0, 0.8, 3),
    ModelClipping(50.0, 0.0, 1.0, 0.8, 2, start_clip=60.0, start_noise_std=1.0),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_engine_as_it_is_keeps_the_law(recipe):
    found = examine_cells(recipe, seed=5, runs=10)
    assert found.p_value > 1e-4, found.oddest


@pytest.mark.parametrize("mean", [0.0, 0.3])
def test_the_law_of_a_bit_is_that_of_a_rounded_gaussian(mean):
    law = _Law(0.25, mean * 2.0**20, 2.0**20)
    rng = np.random.default_rng(0)
    cells = np.rint(rng.normal(-mean * 2.0**20, 2.0**20, 200_000))
    rates = law.read(0.25 * cells).mean(axis=0)
    expected = np.array([law.chance(column, -1) for column in range(COLUMNS)])
    spread = np.sqrt(expected * (1 - expected) / len(cells)) + 1e-12
    assert np.all(np.abs(rates - expected) < 5 * spread)
    assert law.chance(BITS - 1, -1) == pytest.approx(stats.norm.cdf(mean), abs=1e-6)
    assert law.chance(3, 1) == 0.5
    assert law.name(BITS) == f"bit {law.first} of the magnitude"
    wide = _Law(0.25, mean * 2.0**20, 1.02 * 2.0**20)
    others = np.array([wide.chance(column, -1) for column in range(BITS, COLUMNS)])
    assert np.max(np.abs(others - expected[BITS:])) > 0.004


@pytest.mark.parametrize("defect", [write_sign(1), write_sign(69_999), stop_after_first_chunk])
def test_defects_are_seen_wherever_they_are(defect, monkeypatch):
    defect(monkeypatch)
    found = examine_cells(RECIPES[0], seed=5)
    assert found.p_value < 1e-9
    assert "bit" in found.oddest


@pytest.mark.parametrize("factor", [0.98, 1.02])
@pytest.mark.parametrize("recipe", RECIPES[:5:2])
def test_a_deviation_that_is_a_little_off_is_seen(recipe, factor, monkeypatch):
    def draw(self, out, *, step, position, std, draw=NoiseStream.draw):
        draw(self, out, step=step, position=position, std=factor * std)

    monkeypatch.setattr(NoiseStream, "draw", draw)
    assert examine_cells(recipe, seed=5, runs=32).p_value < 1e-9


def test_the_last_steps_are_the_recipes():
    last = take_last_steps(RECIPES[1])
    assert (last.steps, last.noise_std) == (2, (0.2, 0.3))
    assert take_last_steps(RECIPES[3]).steps == 1
    assert take_last_steps(RECIPES[2]).start_noise_std == 0.3
    assert take_last_steps(RECIPES[5]).start_noise_std == 0.0
    silent = GradientClipping(1.0, 1.0, 0.1, 0.0, 2, [1.0, 0.0])
    assert examine_cells(silent) is None


def test_a_bit_that_tells_worlds_apart_is_found_and_scored():
    rng = np.random.default_rng(1)
    zero, one = (np.rint(rng.normal(0, 1e6, (400, 3))) for _ in range(2))
    zero[:, 2] -= 64 * (np.floor(zero[:, 2] / 64) % 2)
    one[:, 2] += 64 * (1 - np.floor(one[:, 2] / 64) % 2)
    bit = fit_bit(zero * 0.5, one * 0.5, 0.5)
    assert (bit.coordinate, bit.place, bit.sign) == (2, 6, 1)
    assert set(score(bit, one * 0.5)) == {1.0}
    assert set(score(bit, zero * 0.5)) == {0.0}
    assert math.isclose(score(fit_bit(one, zero, 1.0), zero).mean(), 0.0)
