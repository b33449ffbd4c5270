"""The recipe of a noisy run: the operator's own, or planned around what ``build()`` gives.

It follows from the target, the number of parameters and the public start, never from trained
weights. So every certificate may state it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from expunge.accounting.guarantee import guarantee
from expunge.accounting.planning import plan
from expunge.accounting.precision import choose_precision
from expunge.errors import CalibrationError, InputError
from expunge.recipes import MAX_EPSILON, ComparedTo, Execution, NoisyRecipe

FRACTION = 0.1  # of the smallest layer of the start: noise that no layer notices


def choose_scale(tensors: Mapping[str, Tensor]) -> float | None:
    """The noise that may be left in each weight: a tenth of the smallest layer, √(Σ x_i² / n).

    Tensors of zeros (biases, the B of a LoRA adapter) have no scale of their own, and take what the
    others allow. None if all are zeros.

    >>> choose_scale({"weight": torch.full((2, 2), 0.5), "bias": torch.zeros(2)})
    0.05
    """
    norms = ((float(torch.linalg.vector_norm(t.detach())), t.numel()) for t in tensors.values())
    scales = [norm / size**0.5 for norm, size in norms if norm > 0]
    return FRACTION * min(scales) if scales else None


def choose_recipe(
    recipe: NoisyRecipe | Callable[[int], NoisyRecipe] | None,
    start: Mapping[str, Tensor],
    *,
    epsilon: float | None,
    delta: float,
    method: str = "gradient-clipping",
    compared_to: ComparedTo = "retrained",
    releases: int = 1,
) -> tuple[NoisyRecipe, Execution, float]:
    """The recipe, what running it on a grid adds to the account, and that grid.

    >>> chosen, _, grid = choose_recipe(None, {"w": torch.ones(100)}, epsilon=1.0, delta=1e-5)
    >>> guarantee(chosen, delta=1e-5).epsilon <= 1.0, chosen.steps
    (True, 10)
    """
    size = sum(t.numel() for t in start.values())
    if recipe is None:
        if epsilon is None:
            raise InputError("recipe and epsilon are both left out; one of them must be given")
        if releases != 1:
            valid = "1 without a recipe: a plan is of one release"
            raise InputError.of("releases", releases, valid)
        made = plan(
            epsilon=epsilon, delta=delta, parameters=size, scale=choose_scale(start),
            compared_to=compared_to,
        )  # fmt: skip
        found = {candidate.method: candidate.recipe for candidate in made.candidates}
        noisy = [name for name, chosen in found.items() if isinstance(chosen, NoisyRecipe)]
        if method not in noisy:
            raise InputError.of("method", method, f"one of {', '.join(noisy)}")
        recipe = cast(NoisyRecipe, found[method])
    elif not isinstance(recipe, NoisyRecipe) and callable(recipe):
        recipe = recipe(size)
    if not isinstance(recipe, NoisyRecipe):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of(
            "recipe", recipe, "GradientClipping, ModelClipping or OutputPerturbation"
        )
    precision = choose_precision(recipe, size)
    if precision.grid == 0:
        raise InputError("noise_std is 0; a run without noise certifies nothing: use retrain")
    execution = Execution(rounding=precision.rounding, releases=releases)
    found = guarantee(recipe, delta=delta, compared_to=compared_to, execution=execution)
    if not max(found.retrained.epsilon, found.centre.epsilon) <= MAX_EPSILON:
        raise CalibrationError(
            f"recipe gives epsilon = {found.epsilon:.6g} at delta = {delta:g}, which certifies "
            "nothing; it needs more noise or smaller clips (expunge.calibrate finds them)"
        )
    if epsilon is not None and not found.epsilon <= epsilon:
        raise CalibrationError(
            f"recipe gives epsilon = {found.epsilon:.6g} at delta = {delta:g}, and epsilon is "
            f"{epsilon:g}; it needs more noise or smaller clips (expunge.calibrate finds them)"
        )
    return recipe, execution, precision.grid
