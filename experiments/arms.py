"""The arms of every comparison, and the recipe of each: what is printed, what is certified.

=====================  ====================  =====================================================
method                 version               what
=====================  ====================  =====================================================
retrain                own                   the network's own initialisation
retrain                initialisation        the one that the arms around it are pulled towards
retrain                gaussian              N(0, s² I), s what remains of gradient clipping's noise
output-perturbation    printed               the paper's row as it stands
gradient-clipping      printed               (its true ε is beside its results)
model-clipping         printed
  … each of the three  certified             all radii rescaled by one factor, with the same noise,
                                             so that the labelled ε is true
  … each of the three  initialisation        certified too, around a fresh initialisation, as
                                             expunge.plan says
  … each of the three  centre                the printed run started at the centre: it never sees
                                             the old model
dp-sgd                 certified             DP-SGD with group privacy from the start
=====================  ====================  =====================================================
"""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from expunge import GradientClipping, ModelClipping, OutputPerturbation, calibrate, guarantee, plan

PRINTED = Path(__file__).parent.parent / "tests" / "data"
DELTA = 1e-5
Noisy = OutputPerturbation | GradientClipping | ModelClipping
Method = Literal["retrain", "output-perturbation", "gradient-clipping", "model-clipping", "dp-sgd"]
Version = Literal["own", "gaussian", "printed", "certified", "centre", "initialisation"]
RECIPES: dict[str, type[Noisy]] = {
    "output-perturbation": OutputPerturbation,
    "gradient-clipping": GradientClipping,
    "model-clipping": ModelClipping,
}
RADII = ("start_clip", "grad_clip", "model_clip")


@dataclass(frozen=True, order=True)
class Arm:
    """One line of a figure. ``table`` names the rows of the paper that it follows.

    >>> Arm("gradient-clipping", "printed").name
    'gradient-clipping, printed'
    """

    method: Method
    version: Version
    epsilon: float = 1.0
    table: str = ""

    @property
    def name(self) -> str:
        target = "" if self.epsilon == 1.0 else f", ε = {self.epsilon:g}"
        return f"{self.method}, {self.version}{target}"

    @property
    def fields(self) -> dict[str, Any]:
        """The fields by which the runs of an arm are found."""
        return {"method": self.method, "version": self.version, "epsilon": self.epsilon}


RETRAIN, GAUSSIAN = Arm("retrain", "own"), Arm("retrain", "gaussian")


def list_arms(methods: tuple[Method, ...], epsilon: float = 1.0, table: str = "") -> list[Arm]:
    """The three versions of every method.

    >>> [arm.version for arm in list_arms(("model-clipping",))]
    ['printed', 'certified', 'centre']
    """
    versions: tuple[Version, ...] = ("printed", "certified", "centre")
    return [Arm(method, version, epsilon, table) for method in methods for version in versions]


def read_row(table: str, budget: float, epsilon: float) -> dict[str, Any]:
    """The paper's row for this budget; between its budgets, that of the one below.

    >>> read_row("gradient_clipping_mnist", 1, 1.0)["noise_std"]
    0.02827
    """
    rows = [row for row in read_table(PRINTED / f"{table}.csv") if row["epsilon"] == epsilon]
    rows.sort(key=lambda row: row["epochs"])
    fitting = [row for row in rows if row["epochs"] <= budget] or rows[:1]
    return {k: v for k, v in fitting[-1].items() if k not in ("epsilon", "epochs")}


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows of one of the paper's tables, as printed."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: int(v) if k == "steps" else float(v) for k, v in row.items()} for row in rows]


@functools.cache
def make_recipe(arm: Arm, task: str, budget: float, parameters: int) -> Noisy:
    """The recipe of an arm that adds noise.

    >>> make_recipe(Arm("output-perturbation", "printed"), "mnist", 1, 3985).noise_std
    0.096896
    """
    kind = RECIPES[arm.method]
    table = arm.table or f"{arm.method.replace('-', '_')}_{task}"
    printed = kind(**read_row(table, budget, arm.epsilon))
    return (
        certify_radii(printed, arm.epsilon, parameters) if arm.version == "certified" else printed
    )


@functools.cache
def plan_recipe(arm: Arm, parameters: int, scale: float) -> Noisy:
    """The recipe of a plan that leaves noise of this scale, true at the labelled ε."""
    made = plan(epsilon=arm.epsilon, delta=DELTA, parameters=parameters, scale=scale)
    found = next(c.recipe for c in made.candidates if c.method == arm.method)
    assert isinstance(found, Noisy)
    return found


def certify_radii(recipe: Noisy, epsilon: float, parameters: int) -> Noisy:
    """The recipe with all radii times the largest factor for which (ε, δ) is true.

    >>> printed = make_recipe(Arm("gradient-clipping", "printed"), "mnist", 1, 3985)
    >>> true = certify_radii(printed, 1.0, 3985)
    >>> round(printed.grad_clip / true.grad_clip, 2), true.noise_std == printed.noise_std
    (5.28, True)
    """

    def scale(factor: float) -> Noisy:
        radii = {name: getattr(recipe, name, None) for name in RADII}
        scaled = {name: r * factor for name, r in radii.items() if r is not None}
        return replace(recipe, **scaled)

    return calibrate(
        scale, epsilon=epsilon, delta=DELTA, find="largest", start=1.0, parameters=parameters
    )


def measure_noise(recipe: Noisy) -> float:
    """The standard deviation of the noise that is left when the run ends.

        s² = σ² Σ_{k<T} ρ^{2k},  ρ = 1 - γλ   (clips and gradients apart)

    >>> measure_noise(OutputPerturbation(start_clip=1.0, noise_std=3.0))
    3.0
    """
    sigma = float(recipe.noise_std)
    if isinstance(recipe, OutputPerturbation):
        return sigma
    rho = 1 - float(recipe.learning_rate) * recipe.weight_decay
    return sigma * math.sqrt(sum(rho ** (2 * k) for k in range(recipe.steps)))


@functools.cache
def find_epsilon(recipe: Noisy) -> float:
    """The ε that is true of a recipe at δ = 1e-5."""
    return guarantee(recipe, delta=DELTA).epsilon
