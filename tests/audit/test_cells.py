"""The noise of a long vector: fair where the engine is, and every kind of defect it can show."""

import pytest

from expunge import GradientClipping, ModelClipping, OutputPerturbation
from tests.audit.cells import examine_cells, take_last_step
from tests.audit.defects import scale_noise

pytestmark = pytest.mark.usefixtures("one_thread")
RECIPES = [
    OutputPerturbation(1.0, 0.8),
    GradientClipping(50.0, 1.0, 0.5, 0.3, 4, [0.5, 0.1, 0.2, 0.3]),
    GradientClipping(90.0, 1.0, 0.1, 1.0, 3, 0.1, 0.3, model_clip=80.0),
    ModelClipping(1.0, 0.1, 1.0, 0.8, 3),
    ModelClipping(50.0, 0.1, 30.0, 0.8, 2, start_clip=60.0, start_noise_std=1.0),
]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_engine_as_it_is_keeps_the_law(recipe):
    found = examine_cells(recipe, seed=5, runs=10)
    assert found.p_value > 1e-4, found.oddest


@pytest.mark.parametrize("factor", [0.98, 1.02])
@pytest.mark.parametrize("recipe", RECIPES[::2])
def test_a_deviation_that_is_a_little_off_is_seen(recipe, factor, monkeypatch):
    scale_noise(factor)(monkeypatch)
    assert examine_cells(recipe, seed=5, runs=6).p_value < 1e-9


def test_the_last_step_is_the_recipes():
    last, norm, sigma = take_last_step(RECIPES[1])
    assert (last.steps, last.noise_std, sigma) == (1, 0.3, 0.3)
    assert norm == pytest.approx(0.85 * 4 * 0.3)
    assert take_last_step(RECIPES[4])[1] == pytest.approx(-3.2)
    assert examine_cells(GradientClipping(1.0, 1.0, 0.1, 0.0, 2, [1.0, 0.0])) is None
