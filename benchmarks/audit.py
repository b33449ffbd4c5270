"""Trials of the mechanism audit: stacks through the engine against a loop over ``unlearn``."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.timing import compare, measure
from expunge import GradientClipping, ModelClipping, SeededNoise, unlearn
from expunge.auditing.attacks import Instructions, Trials, list_adversaries
from expunge.auditing.trials import unlearn_stack

ROWS, PLAIN = 32_768, 20
RECIPES = {
    "one step of gradient clipping": GradientClipping(0.2, 1.0, 1.0, 0.4, 1, 1.0),
    "ten steps with projections": GradientClipping(
        0.2, 1.0, 0.1, 0.4, 10, 1.0, start_noise_std=0.5, model_clip=1.0
    ),
    "six steps of model clipping": ModelClipping(0.5, 1e-3, 10.0, 0.5, 6),
}


def run() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    return [compare_recipe(name, recipe) for name, recipe in RECIPES.items()]


def compare_recipe(name: str, recipe: GradientClipping | ModelClipping) -> dict[str, Any]:
    adversary = list_adversaries(recipe, "retrained")[0]
    starts, centre = adversary.start(ROWS), torch.zeros(3, dtype=torch.float64)
    data = Instructions(recipe.steps, centre)

    def stack() -> None:
        model = Trials(starts)
        unlearn_stack(model, data, recipe, loss_fn=adversary.loss, noise=SeededNoise(0))

    def plain() -> None:
        for row in range(PLAIN):
            model = Trials(starts[row : row + 1])
            unlearn(
                model, data, recipe, loss_fn=adversary.loss, noise=SeededNoise(row), centre="zero"
            )

    times = measure({"stack": stack, "plain": plain}, repeats=5)
    return compare(
        f"audit trials per second, {name}: stack / loop over unlearn",
        times,
        "plain",
        "stack",
        target=50.0,
        at_least=True,
        scale=ROWS / PLAIN,
    )
