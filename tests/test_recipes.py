"""Recipes: what is accepted, what is kept, and one clear sentence for everything else."""

from __future__ import annotations

import dataclasses
import math
from decimal import Decimal

import numpy as np
import pytest

from expunge import recipes
from expunge.errors import InputError

GOOD = {
    recipes.OutputPerturbation: {"start_clip": 0.01, "noise_std": 0.5},
    recipes.GradientClipping: {
        "start_clip": 0.01, "grad_clip": 1.0, "learning_rate": 0.01, "weight_decay": 10.0,
        "steps": 3, "noise_std": 0.1,
    },
    recipes.ModelClipping: {
        "model_clip": 0.5, "learning_rate": 0.01, "weight_decay": 10.0, "noise_std": 0.5,
        "steps": 6,
    },
    recipes.Retraining: {},
    recipes.LinearModel: {},
    recipes.Sharding: {"shards": 8, "slices": 4},
}  # fmt: skip
FINITE = "a finite number >= 0"


def make(kind, **changes):
    return kind(**GOOD[kind] | changes)


class TestAccepted:
    @pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
    def test_round_trip_through_plain_data(self, kind) -> None:
        recipe = make(kind)
        assert recipes.from_dict(recipes.to_dict(recipe)) == recipe
        assert recipes.METHODS[recipe.method] is kind
        assert hash(recipe) == hash(make(kind))

    def test_every_method_is_here(self) -> None:
        assert set(recipes.METHODS.values()) == set(GOOD)

    @pytest.mark.parametrize("kind", GOOD, ids=lambda kind: kind.__name__)
    def test_frozen(self, kind) -> None:
        for field in dataclasses.fields(kind):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(make(kind), field.name, 1.0)

    @pytest.mark.parametrize(
        "values", [[0.1, 0.2, 0.3], (0.1, 0.2, 0.3), np.array([0.1, 0.2, 0.3])], ids=type
    )
    def test_schedules_are_kept_as_tuples_of_floats(self, values) -> None:
        recipe = make(recipes.GradientClipping, noise_std=values, learning_rate=[0, 1e-3, 0.05])
        assert recipe.noise_std == (0.1, 0.2, 0.3)
        assert recipe.learning_rate == (0.0, 1e-3, 0.05)
        assert {type(x) for x in recipe.learning_rate + recipe.noise_std} == {float}
        assert recipes.from_dict(recipes.to_dict(recipe)) == recipe

    def test_numpy_and_whole_numbers_become_plain_ones(self) -> None:
        recipe = make(
            recipes.GradientClipping, steps=np.int64(3), noise_std=np.float32(0.5), start_clip=1
        )
        assert (type(recipe.steps), type(recipe.noise_std), type(recipe.start_clip)) == (
            int, float, float,
        )  # fmt: skip
        assert make(recipes.ModelClipping, steps=4.0).steps == 4

    def test_no_clip_is_infinity_and_zero_is_fine(self) -> None:
        make(recipes.GradientClipping, start_clip=math.inf, grad_clip=math.inf, model_clip=math.inf)
        make(
            recipes.GradientClipping, start_clip=0, grad_clip=0, noise_std=0, weight_decay=0,
            steps=10**6,
        )  # fmt: skip

    def test_schedule_as_array(self) -> None:
        np.testing.assert_array_equal(recipes.schedule(2, 3), [2.0, 2.0, 2.0])
        np.testing.assert_array_equal(recipes.schedule((1.0, 2.0), 2), [1.0, 2.0])


# Values that are none, as they are shown, and where.
NUMBERS = [
    (np.float64(-2.5), "-2.5"), (np.int32(-2), "-2"), (-(10**400), str(-(10**400))),
    (Decimal("0.5"), "Decimal('0.5')"), (np.bool_(True), "True"), ([0.1], "[0.1]"),
]  # fmt: skip
ELEMENTS = [
    ([0.1, math.nan, 0.1], 1, "nan"), ([0.1, 0.1, -0.5], 2, "-0.5"),
    (np.array([math.inf, 0.1, 0.1]), 0, "inf"), ([0.1, True, 0.1], 1, "True"),
    ([0.1, 0.1, "0.1"], 2, "'0.1'"), ([None, 0.1, 0.1], 0, "None"),
    ([0.1, [0.1], 0.1], 1, "[0.1]"), (np.ones((3, 1)), 0, "[1.0]"), (np.ones(3, bool), 0, "True"),
]  # fmt: skip
RADII = [
    (recipes.OutputPerturbation, "start_clip"), (recipes.GradientClipping, "grad_clip"),
    (recipes.GradientClipping, "model_clip"), (recipes.ModelClipping, "model_clip"),
    (recipes.ModelClipping, "start_clip"),
]  # fmt: skip
COUNTS = [
    (recipes.GradientClipping, "steps"), (recipes.ModelClipping, "steps"),
    (recipes.Sharding, "shards"), (recipes.Sharding, "slices"),
]  # fmt: skip
DECAYS = [
    (0.1, 10.0, "1"), ([0.1, 0.3, 0.2], 5.0, "1.5"), (1e300, 1e300, "inf"),
    ((1 - 1e-10) / 8, 8.0, "0.9999999999"),
]  # fmt: skip
REFUSED = [
    *((recipes.OutputPerturbation, {"noise_std": value},
       f"noise_std is {value!r}; it must be {FINITE}")
      for value in (-1.0, math.nan, math.inf, -math.inf, True, "0.1", None, 1j)),
    *((recipes.GradientClipping, {"weight_decay": value},
       f"weight_decay is {shown}; it must be {FINITE}")
      for value, shown in NUMBERS),
    *((kind, {field: value}, f"{field} is {value!r}; it must be a number >= 0")
      for kind, field in RADII for value in (-0.1, math.nan, False, "1")),
    *((kind, {field: value}, f"{field} is {value!r}; it must be a whole number >= 1")
      for kind, field in COUNTS
      for value in (0, -1, 2.5, math.nan, math.inf, -math.inf, True, "3", None)),
    *((kind, {"steps": most + 1}, f"steps is {most + 1}; it must be at most {most}, to be verified")
      for kind, most in ((recipes.GradientClipping, 10**6), (recipes.ModelClipping, 10**4))),
    *((recipes.GradientClipping, {field: values},
       f"{field} has {count} values; it must have one per step: 3")
      for field in ("noise_std", "learning_rate")
      for values, count in (([], 0), ([0.1, 0.2], 2), (np.ones(4) / 100, 4))),
    *((recipes.GradientClipping, {"noise_std": values},
       f"noise_std[{index}] is {shown}; it must be {FINITE}") for values, index, shown in ELEMENTS),
    *((recipes.ModelClipping, {"learning_rate": value},
       f"learning_rate is {value!r}; it must be {FINITE}, or 6 of them")
      for value in ("0.1", b"0.1", None, {0.1: 1}, {0.1, 0.2, 0.3}, True, 1j)),
    *((recipes.GradientClipping, {"learning_rate": rate, "weight_decay": decay},
       f"learning_rate * weight_decay is {shown}; it must be below 1 at every step, "
       "by at least 1e-06") for rate, decay, shown in DECAYS),
    (recipes.ModelClipping, {"start_noise_std": 0.5},
     "start_noise_std is 0.5 without a start_clip; "
     "give start_clip too, or leave start_noise_std at 0"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "changes", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_refused(kind, changes, sentence) -> None:
    with pytest.raises(InputError) as error:
        make(kind, **changes)
    assert isinstance(error.value, ValueError)
    assert str(error.value) == sentence


def test_what_is_next_to_it_is_accepted() -> None:
    make(recipes.GradientClipping, steps=10**6)
    make(recipes.ModelClipping, steps=10**4)
    make(recipes.ModelClipping, start_noise_std=0.5, start_clip=1.0)
    for value in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="it must be a finite number > 0"):
            recipes.check_value("positive", "scale", value)


TABLES = [
    *(({"method": name}, f"method is {name!r}; it must be one of " + ", ".join(recipes.METHODS))
      for name in ("gradient", "", None, 3, [], {"a": 1})),
    ({}, "method is None; it must be one of " + ", ".join(recipes.METHODS)),
    ({"method": "output-perturbation", "start_clip": 1.0, "noise_std": 1.0, "sigma": 1, "clip": 2},
     "output-perturbation has no parameter sigma, clip; it has start_clip, noise_std"),
    ({"method": "retraining", "steps": 3}, "retraining has no parameter steps; it has none"),
    ({"method": "retraining", 3: 3}, "retraining has no parameter 3; it has none"),
    ({"method": "model-clipping", "steps": 3, "noise_std": 1.0},
     "model-clipping needs model_clip, learning_rate, weight_decay"),
    (recipes.to_dict(make(recipes.ModelClipping)) | {"steps": 0},
     "steps is 0; it must be a whole number >= 1"),
    *((data, f"recipe is {data!r}; it must be a table of a method and its parameters")
      for data in (3, "gradient-clipping", None, ["method"])),
]  # fmt: skip


@pytest.mark.parametrize(("data", "sentence"), TABLES)
def test_tables_that_are_no_recipe(data, sentence) -> None:
    with pytest.raises(InputError) as error:
        recipes.from_dict(data)
    assert str(error.value) == sentence
