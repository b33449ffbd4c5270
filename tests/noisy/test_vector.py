"""The certified vector: exact bounds in rational arithmetic, chunks, dtypes, saturation."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mpmath import MPContext

from expunge.accounting.precision import LARGEST_CELL
from expunge.noisy import vector as vector_module
from expunge.noisy.noise import SeededNoise
from expunge.noisy.vector import GridVector, Update, clip_factor

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)
RADII = st.floats(min_value=1e-30, max_value=1e30)


def square(values) -> Fraction:
    """The exact sum of squares of floats."""
    return sum((Fraction(float(v)) ** 2 for v in values), Fraction(0))


def build(values, grid=2.0**-20, centre=None, seed=0):
    parameters = [torch.tensor(values, dtype=torch.float32)]
    return GridVector(parameters, centre, grid, SeededNoise(seed).begin())


def cells(vector: GridVector) -> list[int]:
    k = vector.cells.tolist()
    assert all(value == int(value) for value in k)
    return [int(value) for value in k]


@settings(max_examples=300)
@given(values=st.lists(FINITE, min_size=1, max_size=40), bound=RADII)
def test_clipped_norm_never_exceeds_the_bound(values, bound):
    g = [torch.tensor(values, dtype=torch.float32)]
    norm = build([0.0] * len(values)).gradient_norm(g)
    factor = clip_factor(norm, bound, len(values))
    assert Fraction(factor) ** 2 * square(g[0]) <= Fraction(bound) ** 2
    assert 0 <= factor <= 1
    if norm <= 0.999 * bound:
        assert factor == 1
    else:
        assert factor * norm >= 0.999 * min(norm, bound)


@pytest.mark.parametrize("d", [1000, 100_000])
@pytest.mark.parametrize("kind", ["huge", "tiny", "denormal", "one large", "spread"])
def test_clipped_norm_of_long_adversarial_gradients(kind, d):
    rng = np.random.default_rng(d)
    g = {
        "huge": lambda: rng.uniform(-3.4e38, 3.4e38, d),
        "tiny": lambda: rng.uniform(-1e-37, 1e-37, d),
        "denormal": lambda: rng.integers(-9, 9, d) * 2.0**-149,
        "one large": lambda: np.r_[1.0, np.full(d - 1, 2.0**-27)],
        "spread": lambda: np.exp(rng.uniform(-80, 80, d)),
    }[kind]().astype(np.float32)
    vector = build([0.0] * d)
    norm = vector.gradient_norm([torch.from_numpy(g)])
    assert math.isfinite(norm)
    factor = clip_factor(norm, 0.75 * norm, d)
    bound = Fraction(0.75 * norm)
    assert Fraction(factor) ** 2 * square(g) <= bound**2
    assert factor == pytest.approx(0.75, rel=1e-9)


@settings(max_examples=200)
@given(values=st.lists(FINITE, min_size=1, max_size=30), radius=st.floats(1e-6, 1e6))
def test_start_lies_in_the_ball_exactly(values, radius):
    vector = build(values, grid=2.0**-30)
    vector.start(radius)
    k = cells(vector)
    assert sum(c * c for c in k) * Fraction(2.0**-30) ** 2 <= Fraction(radius) ** 2
    assert all(abs(c) <= LARGEST_CELL for c in k)


@settings(max_examples=200)
@given(
    values=st.lists(FINITE, min_size=2, max_size=30),
    radius=st.floats(1e-6, 1e6),
    rate=st.floats(1e-6, 1e6),
)
def test_projected_step_lies_in_the_ball_exactly(values, radius, rate):
    vector = build(values, grid=2.0**-30)
    vector.start(1.0)
    g = [torch.tensor(values[::-1], dtype=torch.float32)]
    vector.step(g, Update(rate, 0.0, 1.0, radius, 0.0, 1))
    assert sum(c * c for c in cells(vector)) * Fraction(2.0**-30) ** 2 <= Fraction(radius) ** 2


@settings(max_examples=100)
@given(values=st.lists(FINITE, min_size=1, max_size=30), rate=st.floats(1e-6, 10), clip=RADII)
def test_clipped_step_moves_no_farther_than_its_sensitivity(values, rate, clip):
    """From the centre: ‖k g‖ ≤ γ C1 + (1/2 + e) g √d, in exact arithmetic."""
    grid = 2.0**-20
    vector = build([0.0] * len(values), grid=grid)
    vector.start(1.0)
    g = [torch.tensor(values, dtype=torch.float32)]
    factor = clip_factor(vector.gradient_norm(g), clip, len(values))
    vector.step(g, Update(rate, 0.0, factor, math.inf, 0.0, 1))
    moved = Fraction(grid) ** 2 * sum(c * c for c in cells(vector))
    reach = Fraction(rate) * Fraction(clip)
    half = Fraction(501, 1000) * Fraction(grid) * Fraction(math.sqrt(len(values)) * (1 + 1e-15))
    assert moved <= (reach + half) ** 2


def test_norm_that_is_not_finite_drops_the_gradient():
    vector = build([3.0, 4.0])
    vector.start(math.inf)
    for bad in (math.nan, math.inf):
        g = [torch.tensor([bad, 1.0])]
        factor = clip_factor(vector.gradient_norm(g), 1.0, 2)
        assert factor == 0
        vector.step(g, Update(0.1, 0.0, factor, math.inf, 0.0, 1))
        assert vector.parameters[0].tolist() == [3.0, 4.0]


def test_start_projects_around_the_centre():
    centre = [torch.tensor([1.0, 1.0])]
    vector = build([4.0, 5.0], centre=centre)
    assert vector.start(1.0) == pytest.approx(5.0)
    assert vector.parameters[0].tolist() == pytest.approx([1.6, 1.8], abs=1e-5)
    vector.start(0.0)
    assert torch.equal(vector.parameters[0], centre[0])


def test_parameters_are_centre_plus_grid_times_cells():
    torch.manual_seed(0)
    centre = [torch.randn(50)]
    vector = build([0.5] * 50, centre=centre)
    vector.start(2.0)
    vector.step([torch.randn(50)], Update(0.1, 1.0, 0.5, math.inf, 0.25, 1))
    exact = centre[0].double() + 2.0**-20 * vector.cells
    assert torch.equal(vector.parameters[0], exact.float())


@pytest.mark.parametrize("radius", [math.inf, 0.7])
def test_result_does_not_depend_on_the_chunks(monkeypatch, radius):
    shapes = [(3, 5), (7,), (1,), (40, 2), (0,), (11,)]
    results = []
    for chunk in (1 << 16, 16, 5, 1):
        monkeypatch.setattr(vector_module, "CHUNK", chunk)
        generator = torch.Generator().manual_seed(1)
        parameters = [torch.randn(s, generator=generator) for s in shapes]
        centre = [torch.randn(s, generator=generator) for s in shapes]
        gradients = [torch.randn(s, generator=generator) for s in shapes]
        size = sum(p.numel() for p in parameters)
        vector = GridVector(parameters, centre, 2.0**-20, SeededNoise(3).begin())
        vector.start(0.5)
        for t in (1, 2):
            norm = vector.gradient_norm(gradients)
            factor = clip_factor(norm, 1.0, size)
            vector.step(gradients, Update(0.1, 0.5, factor, radius, 9e5 * 2.0**-20, t))
        results.append(torch.cat([p.reshape(-1) for p in parameters]))
    for other in results[1:]:
        # Norms are summed in another order, which may move a cell or two.
        assert torch.allclose(results[0], other, atol=3 * 2.0**-20, rtol=0)


def test_low_and_mixed_precision_parameters_are_rounded_copies():
    parameters = [torch.randn(40).bfloat16(), torch.randn(9), torch.randn(5).half()]
    vector = GridVector(parameters, None, 2.0**-20, SeededNoise(0).begin())
    vector.start(1.0)
    for t in range(50):  # each step moves less than a bfloat16 near 1 can show
        g = [torch.full_like(p, 1e-3) for p in parameters]
        vector.gradient_norm(g)
        vector.step(g, Update(1.0, 0.0, 1.0, math.inf, 0.25, t + 1))
    exact = vector.cells * 2.0**-20
    assert torch.equal(parameters[0], exact[:40].bfloat16())
    assert torch.equal(parameters[1], exact[40:49].float())
    assert torch.equal(parameters[2], exact[49:].half())


def test_coordinates_saturate():
    vector = build([1e30, -1e30, 1.0])
    vector.start(math.inf)
    k = cells(vector)
    assert k == [int(LARGEST_CELL), -int(LARGEST_CELL), 2**20]
    vector.step([torch.tensor([-3e38, 0.0, 0.0])], Update(1.0, 0.0, 1.0, math.inf, 0.0, 1))
    assert cells(vector) == k


def test_overflowing_model_step_falls_back_to_the_centre():
    vector = build([1.0, 2.0], grid=2.0**-500)
    vector.start(1e-140)
    vector.step([torch.tensor([3e38, 1.0])], Update(1e150, 0.0, 1.0, 1.0, 0.0, 1))
    assert vector.parameters[0].tolist() == [0.0, 0.0]


def test_old_tensors_enter_without_touching_the_parameters_given():
    fresh, old = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 3.0], dtype=torch.float16)
    vector = GridVector([fresh], [fresh.clone()], 2.0**-20, SeededNoise(0).begin())
    assert vector.start(1.0, [old]) == 3.0
    assert fresh.tolist() == pytest.approx([1.0, 1.0], abs=1e-5)
    assert old.tolist() == [1.0, 3.0]


@pytest.mark.parametrize("radius", [math.inf, 0.7])
def test_a_step_is_the_equation_in_60_digits(radius):
    """k ← round(Π(ρ k - (γ/g) clip · g)) + noise, against mpmath, cell by cell."""
    mp = MPContext()
    mp.dps = 60
    grid, gamma, decay, size = 2.0**-20, 0.1, 0.5, 200
    rng = np.random.default_rng(0)
    g, start = rng.normal(size=size), rng.normal(size=size)
    vector = build(start.tolist(), grid=grid)
    vector.start(1.0)
    before = [mp.mpf(k) for k in cells(vector)]
    gradient = [torch.tensor(g, dtype=torch.float32)]
    clip = clip_factor(vector.gradient_norm(gradient), 1.0, size)
    norms = vector.step(gradient, Update(gamma, decay, clip, radius, 0.25, 3))
    drawn = np.empty(size)
    SeededNoise(0).begin().draw(drawn, step=3, position=0, std=0.25 / grid)
    moved = [
        (1 - mp.mpf(gamma) * decay) * k - mp.mpf(gamma) * clip / grid * mp.mpf(x)
        for k, x in zip(before, gradient[0].tolist(), strict=True)
    ]
    norm = mp.sqrt(sum(y * y for y in moved)) * grid
    factor = min(mp.mpf(1), mp.mpf(radius) / norm)
    for k, y, noise in zip(cells(vector), moved, drawn.tolist(), strict=True):
        # Rounded to the nearest; a projected vector is rounded towards the centre.
        assert abs(k - noise - factor * y) <= (0.5 if radius == math.inf else 1) + 1e-6
    assert norms.model == pytest.approx(float(min(norm, mp.mpf(radius))), rel=1e-5)
    assert norms.noise == pytest.approx(float(np.linalg.norm(drawn)) * grid)
