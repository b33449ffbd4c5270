"""Small softmax-regression problems and runs that the tests of full-batch descent share."""

import torch

from expunge import SeededNoise
from expunge.accounting.precision import softmax_constants
from expunge.accounting.theorems import bound_expansion
from expunge.baselines.descent import SoftmaxRegression, descend, forget
from expunge.recipes import NoisyDescent, RewindToDelete
from expunge.training.batches import Batches

torch.set_num_threads(1)
KINDS = [NoisyDescent, RewindToDelete]
N, K, D, C = 40, 4, 5, 3


def make_recipe(kind, *, feature_clip=1.0, **changes):
    given = {
        "learning_rate": 0.7,
        "noise_std": 0.05,
        "train_steps": 30,
        "steps": 10,
        "strong_convexity": 0.1,
        "examples": N,
        "group_size": K,
    }
    return kind(**(given | softmax_constants(feature_clip) | changes))


def make_data(seed, count=N, features=D, classes=C, scale=3.0):
    g = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(count, features, generator=g, dtype=torch.float64)
    y = torch.randint(0, classes, (count,), generator=g)
    return Batches(x, y, batch_size=count, ids=[f"s{i}" for i in range(count)])


def drop(data, count):
    """The data without its first ``count`` examples."""
    return Batches(
        data.inputs[count:], data.targets[count:], batch_size=len(data.ids), ids=data.ids[count:]
    )


def model(feature_clip=1.0, features=D, classes=C):
    return SoftmaxRegression(features, classes, feature_clip=feature_clip)


def go(recipe, data, retained, seed=0, start=None, **options):
    start = model() if start is None else start
    trained = descend(start, data, recipe, noise=SeededNoise(seed), **options)
    return forget(trained, retained, noise=SeededNoise(seed), **options)


def bound_distance(recipe, rounding):
    """How far two coupled runs can be: z ← c z + s, the theorem's own recursion in plain floats."""
    c, shift = bound_expansion(recipe)
    early = recipe.train_steps - recipe.steps * isinstance(recipe, RewindToDelete)
    z = 0.0
    for t in range(early + recipe.steps):
        z = c * z + rounding + (shift if t < early else 0.0)
    return z
