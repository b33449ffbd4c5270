"""The paper's comparison of certified unlearning systems, with numbers.

    python experiments/table_comparison.py            # results/table_comparison.md
    python experiments/table_comparison.py --smoke    # one seed, one k, to runs/smoke

Every method runs at the same (ε, δ) on one problem where all assumptions hold: L2-regularised
softmax regression on scikit-learn's digits, feature vectors clipped to norm 1, k examples to
forget. Noise is the standard deviation of one coordinate in one step; for DP-SGD of the sum of
clipped gradients divided by the expected batch size, at learning rate 1.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import expunge
from arms import Noisy
from descent import NoisyDescent, RewindToDelete, SoftmaxRegression, calibrate_descent, forget
from descent import softmax_constants as find_constants
from dpsgd import GroupDPSGD, calibrate_noise, train_privately
from expunge import GradientClipping, ModelClipping, OutputPerturbation, calibrate
from images import load_digits
from options import Options, drive
from paper import classical_noise_std
from summary import make_table, publish

EPSILON, DELTA = 1.0, 1e-5
B, M, RATE = 1.0, 0.01, 3.0
TRAIN_STEPS, STEPS, TUNE_STEPS = 300, 100, 10
EXAMPLES = 1300
GROUPS = (1, 13, 130)
START_CLIP, GRAD_CLIP, MODEL_CLIP = 0.1, 0.01, 0.1
LARGEST_NOISE = 1e6  # beyond it float64 has no digits left, and the run is refused
Recipe = Noisy | NoisyDescent | RewindToDelete | GroupDPSGD
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Row:
    """A method at (ε, δ) for k examples: what it assumes, what a request costs, its recipe."""

    method: str
    assumes: str
    request: str
    recipe: Recipe | None


def list_rows(k: int) -> Iterator[Row]:
    """Every method, calibrated to (ε, δ) for a forget set of k of the 1,300 examples."""
    problem: dict[str, Any] = find_constants(B) | {
        "learning_rate": RATE, "train_steps": TRAIN_STEPS, "steps": STEPS,
        "strong_convexity": M, "examples": EXAMPLES, "group_size": k,
    }  # fmt: skip
    smooth = problem | {"convex": False, "learning_rate": 0.3}
    nothing, convex = "nothing", "convex; G and L known; full-batch training"
    steps, again = f"{STEPS} noisy steps", f"{STEPS} steps, one noise"
    target: dict[str, Any] = {"epsilon": EPSILON, "delta": DELTA}
    rates: dict[str, Any] = {"learning_rate": 0.1, "weight_decay": 1.0, "steps": STEPS}
    yield Row("retraining", nothing, f"{TRAIN_STEPS} steps", None)
    classical = OutputPerturbation(
        START_CLIP, classical_noise_std(distance=2 * START_CLIP, **target)
    )
    exact = calibrate(lambda s: OutputPerturbation(START_CLIP, s), **target)
    yield Row("output perturbation, classical", nothing, "one noise", classical)
    yield Row("output perturbation, exact", nothing, "one noise", exact)
    clipped = calibrate(
        lambda s: GradientClipping(START_CLIP, GRAD_CLIP, noise_std=s, **rates), **target
    )
    yield Row("gradient clipping", nothing, steps, clipped)
    projected = calibrate(
        lambda s: ModelClipping(model_clip=MODEL_CLIP, noise_std=s, **rates), **target
    )
    yield Row("model clipping", nothing, steps, projected)
    noisy = calibrate_descent(lambda s: NoisyDescent(noise_std=s, **problem), **target)
    yield Row("noisy descent (Langevin)", convex + " with noise", steps, noisy)
    rewound = calibrate_descent(lambda s: RewindToDelete(noise_std=s, **problem), **target)
    yield Row("rewind-to-delete", convex, again, rewound)
    rewound = calibrate_descent(lambda s: RewindToDelete(noise_std=s, **smooth), **target)
    known = "G and L known; full-batch training (η = 0.3)"
    yield Row("rewind-to-delete, smooth only", known, again, rewound)
    private = calibrate_noise(lambda z: GroupDPSGD(B, z, 0.1, TRAIN_STEPS, k), **target)
    yield Row("DP-SGD, group privacy", "training by DP-SGD", "nothing", private)


def read_noise(recipe: Recipe | None) -> float:
    """σ of one step; for DP-SGD of the sum over the expected batch size."""
    match recipe:
        case None:
            return 0.0
        case GroupDPSGD():
            return recipe.noise_multiplier * recipe.clip / (recipe.sampling_rate * EXAMPLES)
        case _:
            return float(recipe.noise_std)  # pyright: ignore[reportArgumentType]


def tabulate_noise(columns: list[list[Row]]) -> str:
    """Every method at (ε, δ), for each size of the forget set."""
    lines = [
        [rows[0].method, rows[0].assumes, rows[0].request]
        + [format_noise(read_noise(row.recipe)) for row in rows]
        for rows in zip(*columns, strict=True)
    ]
    head = ["method", "assumes", "on request", *(f"σ, k = {k}" for k in GROUPS[: len(columns)])]
    return make_table(head, lines)


def tabulate_accuracy(columns: list[list[Row]], seeds: range) -> str:
    """Test accuracy of what is released, and after a few free steps more on retained data."""
    digits = load_digits()
    examples, test = (
        (part.inputs.double().div(8).sub(1).flatten(1), part.targets)
        for part in (digits.train, digits.test)
    )
    data = expunge.Data(examples, ids=digits.train.ids.tolist())
    old = make_net()
    descend(TRAIN_STEPS)(old, examples)
    cells: dict[str, list[str]] = {}

    def measure(model: nn.Module, kept: Pair) -> tuple[float, float]:
        before = expunge.evaluate(model, test).accuracy
        descend(TUNE_STEPS)(model, kept)
        return before or 0.0, expunge.evaluate(model, test).accuracy or 0.0

    for k, rows in zip(GROUPS, columns, strict=False):
        kept = (examples[0][k:], examples[1][k:])
        control = 100 * measure(make_net(), kept)[1]
        cells.setdefault("the public start itself (control)", []).append(f"– → {control:.1f}")
        for row in rows:
            if read_noise(row.recipe) > LARGEST_NOISE:
                cells.setdefault(row.method, []).append("–")
                continue
            found = [
                measure(release(row.recipe, old, data, k, seed), kept)
                for seed in (seeds if row.recipe is not None else seeds[:1])
            ]
            now, later = (100 * statistics.mean(column) for column in zip(*found, strict=True))
            cells.setdefault(row.method, []).append(f"{now:.1f} → {later:.1f}")
    head = ["method", *(f"k = {k}" for k in GROUPS[: len(columns)])]
    return make_table(head, [[name, *values] for name, values in cells.items()])


def release(
    recipe: Recipe | None, old: nn.Module, data: expunge.Data, k: int, seed: int
) -> nn.Module:
    """The model that each method releases; ``old`` is the old model of those that need one."""
    people = [name for names in (data.ids or ())[:k] for name in names]
    match recipe:
        case None:
            return expunge.retrain(make_net, data, forget=people, train=descend(TRAIN_STEPS)).model
        case NoisyDescent() | RewindToDelete():
            return forget(make_net(), *data.examples, k, recipe, seed)
        case GroupDPSGD():
            return train_privately(
                make_net(), data.examples, recipe, learning_rate=1.0, weight_decay=M, seed=seed
            )
        case _:
            return expunge.unlearn(
                old, make_net, data, forget=people, recipe=recipe, loss=cross_entropy,
                batch_size=EXAMPLES, noise=expunge.SeededNoise(seed), centre="zero", seed=seed,
            ).model  # fmt: skip


make_net = functools.partial(SoftmaxRegression, 64, 10, feature_clip=B)


def descend(steps: int) -> expunge.Training:
    """Full-batch descent on F."""
    return expunge.Training(epochs=steps, learning_rate=RATE, batch_size=EXAMPLES, weight_decay=M)


def format_noise(value: float) -> str:
    """Four digits, rounded up: printed noise must be enough.

    >>> format_noise(0.0746127), format_noise(3.2e18), format_noise(0.0)
    ('0.07462', '3.2e+18', '0')
    """
    if value == 0:
        return "0"
    digits_after = 3 - math.floor(math.log10(value))
    rounded = math.ceil(value * 10.0**digits_after - 1e-9) / 10.0**digits_after
    return f"{rounded:.4g}"


def show(_: str, options: Options) -> None:
    columns = [list(list_rows(k)) for k in (GROUPS[:1] if options.smoke else GROUPS)]
    accuracy = tabulate_accuracy(columns, range(1 if options.smoke else 5))
    text = f"{tabulate_noise(columns)}\n\n{accuracy}\n"
    publish(text, options.out / "table_comparison.md")


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("digits",), None, show, arguments)


if __name__ == "__main__":
    main()
