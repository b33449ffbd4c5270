"""The paper's comparison of certified unlearning systems, with numbers: docs/comparison.md.

    python experiments/table_comparison.py            # measure, and write the tables into the docs
    python experiments/table_comparison.py --smoke    # the same code on a tenth of the work
    python experiments/table_comparison.py --check    # recompute the noise; exit 1 if docs differ

Every method runs at the same (ε, δ) on one problem where all assumptions hold: L2-regularised
softmax regression on scikit-learn's digits, feature vectors clipped to norm 1, k examples to
forget. Noise is the standard deviation of one coordinate in one step; for DP-SGD of the sum of
clipped gradients divided by the expected batch size, at learning rate 1.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from expunge import (
    Batches,
    GradientClipping,
    GroupDPSGD,
    ModelClipping,
    NoisyDescent,
    OutputPerturbation,
    RewindToDelete,
    SeededNoise,
    calibrate,
    evaluate,
    retrain,
    train,
    train_dpsgd,
    unlearn,
)
from expunge.accounting.precision import softmax_constants
from expunge.baselines.descent import SoftmaxRegression, descend, forget
from expunge.tasks import digits
from paper import calibrate_output

DOCS = Path(__file__).parent.parent / "docs" / "comparison.md"
EPSILON, DELTA = 1.0, 1e-5
B, M, RATE = 1.0, 0.01, 3.0
TRAIN_STEPS, STEPS, TUNE_STEPS = 300, 100, 10
EXAMPLES = 1300
GROUPS = (1, 13, 130)
START_CLIP, GRAD_CLIP, MODEL_CLIP = 0.1, 0.01, 0.1
LARGEST_NOISE = 1e6  # beyond it float64 has no digits left, and the run is refused
Recipe = (
    OutputPerturbation
    | GradientClipping
    | ModelClipping
    | NoisyDescent
    | RewindToDelete
    | GroupDPSGD
)


@dataclass(frozen=True)
class Row:
    """A method at (ε, δ) for k examples: what it assumes, what a request costs, its recipe."""

    method: str
    assumes: str
    request: str
    recipe: Recipe | None


def list_rows(k: int) -> Iterator[Row]:
    """Every method, calibrated to (ε, δ) for a forget set of k of the 1,300 examples."""
    problem = softmax_constants(B) | {
        "learning_rate": RATE,
        "train_steps": TRAIN_STEPS,
        "steps": STEPS,
        "strong_convexity": M,
        "examples": EXAMPLES,
        "group_size": k,
    }
    nothing, convex = "nothing", "convex; G and L known; full-batch training"
    steps = f"{STEPS} noisy steps"
    target: dict[str, Any] = {"epsilon": EPSILON, "delta": DELTA}
    clipped = {"start_clip": START_CLIP, "grad_clip": GRAD_CLIP, "learning_rate": 0.1}
    yield Row("retraining", nothing, f"{TRAIN_STEPS} steps", None)
    for kind in ("classical", "exact"):
        recipe = calibrate_output(START_CLIP, calibration=kind, **target)
        yield Row(f"output perturbation, {kind}", nothing, "one noise", recipe)
    yield Row(
        "gradient clipping",
        nothing,
        steps,
        calibrate(
            lambda s: GradientClipping(**clipped, weight_decay=1.0, steps=STEPS, noise_std=s),
            **target,
        ),
    )
    yield Row(
        "model clipping",
        nothing,
        steps,
        calibrate(
            lambda s: ModelClipping(
                model_clip=MODEL_CLIP, learning_rate=0.1, weight_decay=1.0, steps=STEPS, noise_std=s
            ),
            **target,
        ),
    )
    yield Row(
        "noisy descent (Langevin)",
        convex + " with noise",
        steps,
        calibrate(lambda s: NoisyDescent(noise_std=s, **problem), **target),
    )
    yield Row(
        "rewind-to-delete",
        convex,
        f"{STEPS} steps, one noise",
        calibrate(lambda s: RewindToDelete(noise_std=s, **problem), **target),
    )
    smooth = problem | {"convex": False, "learning_rate": 0.3}
    yield Row(
        "rewind-to-delete, smooth only",
        "G and L known; full-batch training (η = 0.3)",
        f"{STEPS} steps, one noise",
        calibrate(lambda s: RewindToDelete(noise_std=s, **smooth), **target),
    )
    yield Row(
        "DP-SGD, group privacy",
        "training by DP-SGD",
        "nothing",
        calibrate(
            lambda z: GroupDPSGD(
                clip=B,
                noise_multiplier=z,
                sampling_rate=0.1,
                steps=TRAIN_STEPS,
                group_size=k,
            ),
            relative=1e-6,
            **target,
        ),
    )


def read_noise(recipe: Recipe | None) -> float:
    """σ of one step; for DP-SGD of the sum over the expected batch size."""
    match recipe:
        case None:
            return 0.0
        case GroupDPSGD():
            return recipe.noise_multiplier * recipe.clip / (recipe.sampling_rate * EXAMPLES)
        case _:
            return float(recipe.noise_std)  # pyright: ignore[reportArgumentType]


def tabulate_noise() -> list[str]:
    """The first table: every method at (ε, δ), for each size of the forget set."""
    columns = [list(list_rows(k)) for k in GROUPS]
    head = ["method", "assumes", "on request", *(f"σ, k = {k}" for k in GROUPS)]
    lines = [write_line(head), write_line(["---"] * len(head))]
    for rows in zip(*columns, strict=True):
        first = rows[0]
        noise = [format_noise(read_noise(row.recipe)) for row in rows]
        lines.append(write_line([first.method, first.assumes, first.request, *noise]))
    return lines


def tabulate_accuracy(seeds: range, smoke: bool) -> list[str]:
    """The second table: test accuracy of what is released, and after a few free steps more."""
    task = digits.load()
    data = Batches(
        task.normalise(task.train.inputs).flatten(1), task.train.targets, batch_size=EXAMPLES
    )
    test = task.normalise(task.test.inputs).flatten(1)
    head = ["method", *(f"k = {k}" for k in GROUPS)]
    lines = [write_line(head), write_line(["---"] * len(head))]
    trained = retrain_from_zero(data, 30 if smoke else TRAIN_STEPS)
    cells: dict[str, list[str]] = {}
    control = "the public start itself (control)"
    for k in GROUPS[:1] if smoke else GROUPS:
        retained = Batches(data.inputs[k:], data.targets[k:], batch_size=EXAMPLES)
        model = retrain_from_zero(retained, TUNE_STEPS)
        later = 100 * evaluate(model, test, task.test.targets).accuracy
        cells.setdefault(control, []).append(f"– → {later:.1f}")
        for row in list_rows(k):
            if read_noise(row.recipe) > LARGEST_NOISE:
                cells.setdefault(row.method, []).append("–")
                continue
            found: list[tuple[float, float]] = []
            for seed in seeds if row.recipe is not None else seeds[:1]:
                model = release(row.recipe, trained, data, retained, SeededNoise(seed))
                before = evaluate(model, test, task.test.targets).accuracy
                train(model, retained, epochs=TUNE_STEPS, learning_rate=RATE, weight_decay=M)
                found.append((before, evaluate(model, test, task.test.targets).accuracy))
            now, later = (100 * statistics.mean(column) for column in zip(*found, strict=True))
            cells.setdefault(row.method, []).append(f"{now:.1f} → {later:.1f}")
    return lines + [write_line([name, *values]) for name, values in cells.items()]


def release(
    recipe: Recipe | None, trained: nn.Module, data: Batches, retained: Batches, noise: SeededNoise
) -> nn.Module:
    """The model that each method releases; ``trained`` is the old model of those that need one."""
    net = SoftmaxRegression(64, 10, feature_clip=B)
    match recipe:
        case None:
            return retrain_from_zero(retained, TRAIN_STEPS)
        case NoisyDescent() | RewindToDelete():
            return forget(descend(net, data, recipe, noise=noise), retained, noise=noise).model
        case GroupDPSGD():
            options: dict[str, Any] = {"learning_rate": 1.0, "weight_decay": M}
            return train_dpsgd(net, data, recipe, noise=noise, **options).model
        case _:
            return unlearn(
                trained, retained, recipe, loss_fn=cross_entropy, noise=noise, centre="zero"
            ).model


def retrain_from_zero(data: Batches, steps: int) -> nn.Module:
    """Full-batch descent on F from the public start."""
    net = SoftmaxRegression(64, 10, feature_clip=B)
    options: dict[str, Any] = {"learning_rate": RATE, "weight_decay": M}
    return retrain(net, data, epochs=steps, initialise=lambda: copy.deepcopy(net), **options).model


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


def write_line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def replace_table(text: str, name: str, lines: list[str]) -> str:
    """The document with the table between its two markers replaced."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{DOCS} has no place for the table {name}")
    return f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="one seed, one k, nothing written")
    parser.add_argument("--check", action="store_true", help="compare the noise with the document")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    noise = tabulate_noise()
    print("\n".join(noise), flush=True)
    text = DOCS.read_text(encoding="utf-8")
    if given.check:
        return int(replace_table(text, "noise", noise) != text)
    accuracy = tabulate_accuracy(range(1 if given.smoke else 5), given.smoke)
    print("\n".join(accuracy))
    if not given.smoke:
        text = replace_table(replace_table(text, "noise", noise), "accuracy", accuracy)
        DOCS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
