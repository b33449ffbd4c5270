"""Twenty recipes at random, over all methods and both comparisons, and their audits.

``python tests/helpers/random_recipes.py 1000000`` audits each a million times and prints a table.
"""

import sys

import numpy as np
import torch

from expunge import GradientClipping, ModelClipping, OutputPerturbation
from expunge.accounting.guarantee import guarantee
from expunge.auditing.mechanism import audit_mechanism
from expunge.recipes import method_name

DELTA = 1e-5


def draw_recipe(rng, place):
    """A recipe with mu between 0.5 and 4 where it has one; every third has a single step."""
    kind = ("output", "gradient", "gradient", "model")[place % 4]
    steps = 1 if place % 3 == 0 else int(rng.integers(2, 6))
    radius = float(10 ** rng.uniform(-3, 2))
    if kind == "model":
        sigma = radius / rng.uniform(0.3, 1.5)
        noisy = steps > 1 and rng.random() < 0.4
        start = {"start_clip": radius, "start_noise_std": sigma} if noisy else {}
        return ModelClipping(radius, 0.1, float(rng.uniform(0, 5)), sigma, steps, **start)
    goal = float(np.exp(rng.uniform(np.log(0.7), np.log(4.0))))
    if kind == "output":
        return OutputPerturbation(radius, 2 * radius / goal)
    decay = float(rng.choice([0.0, 1.0, 6.0]))
    rates = rng.uniform(0.02, 0.15, steps)
    options = {"grad_clip": float(radius * rng.uniform(0.1, 10)), "weight_decay": decay}
    options |= {"start_clip": radius, "steps": steps, "learning_rate": rates}
    shape = rng.uniform(0.5, 1.5, steps) if steps > 1 else np.ones(1)
    extra = {"model_clip": radius * float(rng.uniform(0.7, 2))} if rng.random() < 0.3 else {}
    sigma0 = radius if rng.random() < 0.3 and steps > 1 else 0.0

    def make(scale):
        return GradientClipping(
            noise_std=scale * shape, start_noise_std=scale * sigma0, **options, **extra
        )

    now = guarantee(make(1.0), delta=DELTA).mu
    return make(now / goal)


def audit_place(place, trials, single=None):
    """(recipe, audit, μ): μ is certified, or that of one step of model clipping, or None."""
    rng = np.random.default_rng(place)
    recipe = draw_recipe(rng, place)
    compared_to = "centre" if place % 5 == 4 else "retrained"
    one = getattr(recipe, "steps", 1) == 1
    found = audit_mechanism(
        recipe,
        delta=DELTA,
        compared_to=compared_to,
        trials=single if one and single else trials,
        seed=place,
    )
    mu = found.mu_certified
    if isinstance(recipe, ModelClipping) and one:
        mu = (2 if compared_to == "retrained" else 1) * recipe.model_clip / recipe.noise_std
    return recipe, found, mu


def print_table(trials):
    print("| method | steps | compared to | μ certified | μ at least | ε certified | ε at least |")
    print("|---|---|---|---|---|---|---|")
    for place in range(20):
        recipe, found, mu = audit_place(place, trials)
        claimed = "–" if mu is None else f"{mu:.4f}"
        print(
            f"| {method_name(recipe)} | {getattr(recipe, 'steps', 1)} | {found.compared_to} "
            f"| {claimed} | {found.mu_lower:.4f} "
            f"| {found.epsilon_certified:.3f} | {found.epsilon_lower:.3f} |",
            flush=True,
        )
        assert not found.contradicts, found.verdict


if __name__ == "__main__":
    torch.set_num_threads(1)
    print_table(int(sys.argv[1]))
