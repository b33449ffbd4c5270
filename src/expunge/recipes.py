"""What ran, or will run, and what it guarantees, as frozen data: one class per method.

Full words outside, the paper's letters inside (docs/theory.md):
start_clip C0 · grad_clip C1 · model_clip C2 · learning_rate γ · weight_decay λ · noise_std σ ·
start_noise_std σ0 · steps T. ``Π_C`` scales ``x - centre`` down to norm C; ``ξ ~ N(0, σ²I)``.

A class has its method's name on the command line and in files, and the theorem that it rests on. A
field is described once, by its name in ``FIELDS``. Validation here, the certificate's wire format,
options and job keys are all made from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, ClassVar, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from expunge.display import Shown, round_up, tabulate
from expunge.errors import InputError

Schedule = float | Sequence[float] | npt.NDArray[np.float64]
Kind = Literal[
    "radius", "nonnegative", "positive", "fraction", "whole", "schedule", "epsilon", "delta"
]
ComparedTo = Literal["retrained", "centre"]
# A guarantee is verified step by step in 50 digits; a step of model clipping takes longest.
MAX_STEPS, MAX_MIXING_STEPS = 1_000_000, 10_000
# Nearer to 1, floats no longer say how much 1 - γλ leaves of the old model.
LEAST_CONTRACTION = 1e-6
MAX_EPSILON = 709.0  # beyond it e^ε is not a finite float and the statement says nothing


# What a field may be, and what it means in one sentence. A radius is a number ≥ 0, infinity for
# "not clipped"; a schedule is a finite number ≥ 0, or ``steps`` of them.
FIELDS: Mapping[str, tuple[Kind, str]] = {
    "start_clip": ("radius", "Radius the old model is clipped to before any noise, C0."),
    "grad_clip": ("radius", "Radius each gradient is clipped to, C1."),
    "model_clip": ("radius", "Radius the model is clipped to before each noise, C2."),
    "learning_rate": ("schedule", "Learning rate of the noisy steps, γ."),
    "weight_decay": ("nonnegative", "Pull towards the centre in the noisy steps, λ."),
    "steps": ("whole", "Number of noisy steps, T."),
    "noise_std": ("schedule", "Noise added to each coordinate, in each step, σ."),
    "start_noise_std": ("nonnegative", "Noise added to the clipped old model, σ0."),
    "shards": ("whole", "Number of networks, S."),
    "slices": ("whole", "Number of slices of each network's data, R."),
}


class _Validated:
    """Checks every field by its description, then the fields together."""

    def __post_init__(self) -> None:
        recipe = cast("Recipe", self)
        for f in sorted(fields(recipe), key=lambda f: FIELDS[f.name][0] == "schedule"):
            given, kind = getattr(recipe, f.name), FIELDS[f.name][0]
            if given is not None or f.default is not None:
                steps = getattr(recipe, "steps", None)  # without steps there are no schedules
                kind = "nonnegative" if kind == "schedule" and steps is None else kind
                object.__setattr__(recipe, f.name, check_value(kind, f.name, given, steps or 1))
        _check_together(recipe)


@dataclass(frozen=True)
class OutputPerturbation(_Validated):
    """x = Π_{C0}(x̂) + ξ. One Gaussian, then any training on retained data.

    >>> OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
    OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
    """

    method: ClassVar[str] = "output-perturbation"
    theorem: ClassVar[str] = "exact Gaussian mechanism (Balle & Wang 2018, Theorem 8)"

    start_clip: float
    noise_std: float


@dataclass(frozen=True)
class GradientClipping(_Validated):
    """x_0 = Π_{C0}(x̂) + N(0, σ0²I);  x_{t+1} = x_t - γ_t (Π_{C1}(g_t) + λ (x_t - c)) + ξ_t.

    ``g_t`` is the minibatch gradient on retained data, ``c`` the public centre, 0 ≤ γ_t λ < 1.
    With ``model_clip = R`` each step also projects before its noise:
    ``x_{t+1} = Π_R(x_t - γ_t (…)) + ξ_t``. Learning rate and noise may be sequences of length T.

    >>> GradientClipping(start_clip=0.01, grad_clip=100.0, learning_rate=1e-4,
    ...                  weight_decay=10.0, steps=1, noise_std=0.02827).steps
    1
    """

    method: ClassVar[str] = "gradient-clipping"
    theorem: ClassVar[str] = "shifted interpolation, exact GDP (Bok, Su & Altschuler 2024)"

    start_clip: float
    grad_clip: float
    learning_rate: Schedule
    weight_decay: float
    steps: int
    noise_std: Schedule
    start_noise_std: float = 0.0
    model_clip: float | None = None


@dataclass(frozen=True)
class ModelClipping(_Validated):
    """x_0 = Π_{C0}(x̂) + N(0, σ0²I);  x_{t+1} = Π_{C2}(x_t - γ_t (g_t + λ (x_t - c))) + ξ_t.

    ``start_clip`` and ``start_noise_std`` are optional: without them x_0 is the old model itself.

    >>> ModelClipping(model_clip=0.5, learning_rate=1e-3, weight_decay=10.0, noise_std=0.5, steps=6)
    ModelClipping(model_clip=0.5, learning_rate=0.001, weight_decay=10.0, noise_std=0.5, steps=6,
                  start_clip=None, start_noise_std=0.0)
    """

    method: ClassVar[str] = "model-clipping"
    theorem: ClassVar[str] = "amplification by mixing (Balle et al. 2019, Theorem 1)"

    model_clip: float
    learning_rate: Schedule
    weight_decay: float
    noise_std: Schedule
    steps: int
    start_clip: float | None = None
    start_noise_std: float = 0.0


@dataclass(frozen=True)
class Retraining(_Validated):
    """Train again on the retained data from a public start: (0, 0)."""

    method: ClassVar[str] = "retraining"
    theorem: ClassVar[str] = "retraining never uses the old model"


@dataclass(frozen=True)
class LinearModel(_Validated):
    """A linear model solved again from what is stored of the retained rows: (0, 0)."""

    method: ClassVar[str] = "linear-model"
    theorem: ClassVar[str] = "solved again from retained rows alone"


@dataclass(frozen=True)
class Sharding(_Validated):
    """An ensemble of networks that never see each other's data (THEORY, section 12): (0, 0).

    >>> Sharding(shards=8, slices=4)
    Sharding(shards=8, slices=4)
    """

    method: ClassVar[str] = "shards"
    theorem: ClassVar[str] = "every constituent is trained on retained data alone"

    shards: int
    slices: int


NoisyRecipe = OutputPerturbation | GradientClipping | ModelClipping
ExactRecipe = Retraining | LinearModel | Sharding
Recipe = NoisyRecipe | ExactRecipe

METHODS: Mapping[str, type[Recipe]] = {kind.method: kind for kind in get_args(Recipe)}


def is_exact(recipe: Recipe) -> bool:
    """Whether the release is a function of public things and retained data alone: (0, 0).

    >>> is_exact(Retraining()), is_exact(OutputPerturbation(start_clip=1.0, noise_std=4.0))
    (True, False)
    """
    return isinstance(recipe, ExactRecipe)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data: ``{"method": …}`` and its fields by their API names.

    >>> to_dict(OutputPerturbation(start_clip=0.01, noise_std=0.5))
    {'method': 'output-perturbation', 'start_clip': 0.01, 'noise_std': 0.5}
    """
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(recipe).items()}
    return {"method": recipe.method} | plain


def from_dict(data: Mapping[str, Any]) -> Recipe:
    """The recipe that ``to_dict`` described; unknown or missing keys are refused by name.

    >>> from_dict({"method": "output-perturbation", "start_clip": 0.01, "noise_std": 0.5})
    OutputPerturbation(start_clip=0.01, noise_std=0.5)
    """
    if not isinstance(cast(object, data), Mapping):
        raise InputError.of("recipe", data, "a table of a method and its parameters")
    given = {str(key): value for key, value in data.items()}
    name = given.pop("method", None)
    if not isinstance(name, str) or name not in METHODS:
        raise InputError.of("method", name, "one of " + ", ".join(METHODS))
    names = [f.name for f in fields(METHODS[name])]
    if unknown := [key for key in given if key not in names]:
        raise InputError(
            f"{name} has no parameter {', '.join(unknown)}; it has {', '.join(names) or 'none'}"
        )
    if missing := [key for key in list_required(name) if key not in given]:
        raise InputError(f"{name} needs {', '.join(missing)}")
    return METHODS[name](**given)


def list_required(method: str) -> list[str]:
    """The parameters of a method that have no default.

    >>> list_required("output-perturbation")
    ['start_clip', 'noise_std']
    """
    return [f.name for f in fields(METHODS[method]) if f.default is MISSING]


def schedule(value: Schedule, steps: int) -> npt.NDArray[np.float64]:
    """One value per step, as an array.

    >>> schedule(0.5, 3)
    array([0.5, 0.5, 0.5])
    """
    if isinstance(value, float | int):
        return np.full(steps, float(value))
    return np.asarray(value, dtype=np.float64)


def list_restarts(steps: int) -> list[int]:
    """Where the argument for projected steps may restart: anywhere up to 1,024 steps, then evenly.

    Each gives a valid bound. Which ones are tried is part of the format: a claim must be met again.

    >>> list_restarts(5)
    [0, 1, 2, 3, 4]
    """
    count = min(steps, 1024, max(8, 10_000_000 // steps))
    return sorted({int(t) for t in np.linspace(0, steps - 1, count)})


_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "radius": ("a number >= 0", lambda x: x >= 0),
    "nonnegative": ("a finite number >= 0", lambda x: 0 <= x < math.inf),
    "positive": ("a finite number > 0", lambda x: 0 < x < math.inf),
    "fraction": ("a number in [0, 1)", lambda x: 0 <= x < 1),
    "delta": ("a number in (0, 1)", lambda x: 0 < x < 1),
    "epsilon": ("a number in [0, 709] (e^epsilon must be finite)", lambda x: 0 <= x <= MAX_EPSILON),
    "whole": ("a whole number >= 1", lambda x: 1 <= x <= 2**53 and x == math.floor(x)),
}


def check_value(kind: Kind, field: str, given: Any, steps: int = 1) -> Any:
    """The value as it is kept, if it is of this kind; a schedule may have ``steps`` values.

    >>> check_value("nonnegative", "rounding", -1)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: rounding is -1; it must be a finite number >= 0
    """
    if isinstance(given, np.generic):
        given = given.item()
    number = _read_number(given)
    if kind == "schedule" and number is None:
        return _check_schedule(field, given, steps)
    valid, is_valid = _RANGES["nonnegative" if kind == "schedule" else kind]
    if number is None or not is_valid(number):
        raise InputError.of(field, given, valid)
    return int(number) if kind == "whole" else number


def _check_schedule(field: str, given: Any, steps: int) -> tuple[float, ...]:
    """``steps`` finite numbers ≥ 0, kept as a tuple; the first bad one is named."""
    if isinstance(given, np.ndarray):
        given = cast(Any, given).tolist()
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Collection):
        raise InputError.of(field, given, f"a finite number >= 0, or {steps} of them")
    elements = enumerate(cast(Collection[object], given))
    values = tuple(check_value("nonnegative", f"{field}[{n}]", element) for n, element in elements)
    if len(values) != steps:
        raise InputError(f"{field} has {len(values)} values; it must have one per step: {steps}")
    return values


def _read_number(value: object) -> float | None:
    """A real number as float; None for anything else (booleans and strings included)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _check_together(recipe: Recipe) -> None:
    """What the fields of a recipe must be to each other, and how many steps can be verified."""
    most = MAX_MIXING_STEPS if isinstance(recipe, ModelClipping) else MAX_STEPS
    if (steps := getattr(recipe, "steps", 0)) > most:
        raise InputError.of("steps", steps, f"at most {most}, to be verified")
    match recipe:
        case GradientClipping(learning_rate=rates, weight_decay=decay):
            largest = float(np.max(rates)) * decay
            if not largest <= 1 - LEAST_CONTRACTION:
                raise InputError(
                    f"learning_rate * weight_decay is {largest:.12g}; it must be below 1 at every "
                    f"step, by at least {LEAST_CONTRACTION:g}"
                )
        case ModelClipping(start_clip=None, start_noise_std=noise) if noise > 0:
            raise InputError(
                f"start_noise_std is {noise!r} without a start_clip; "
                "give start_clip too, or leave start_noise_std at 0"
            )
        case _:
            pass


@dataclass(frozen=True)
class Execution:
    """What running a recipe on a real machine adds to the account.

    ``rounding``: what finite precision adds to each step's sensitivity (grid · √d), but where a
    step ends in a projection, which rounds towards the centre and adds nothing;
    ``tail_delta``: the total-variation distance of the noise that was drawn from the ideal one;
    ``releases``: how many noisy runs of the same old model were released (√n · μ together).
    """

    rounding: float = 0.0
    tail_delta: float = 0.0
    releases: int = 1

    def __post_init__(self) -> None:
        check_value("nonnegative", "rounding", self.rounding)
        object.__setattr__(self, "releases", check_value("whole", "releases", self.releases))
        check_value("fraction", "tail_delta", self.tail_delta)


IDEAL = Execution()


@dataclass(frozen=True)
class Bound:
    """One (ε, δ) statement; ``mu`` where the pair of laws is μ-GDP, None where no μ is proved."""

    epsilon: float
    delta: float
    mu: float | None


@dataclass(frozen=True)
class Guarantee(Shown):
    """What a recipe certifies, for both choices of the certifying algorithm.

    ``epsilon``, ``delta`` and ``mu`` are those of ``compared_to``; ``survival_bound`` is the
    largest difference in probability that *any* event about the released model can show between
    a run from the old model and one that never saw it (THEORY, section 6).
    """

    epsilon: float
    delta: float
    mu: float | None
    compared_to: ComparedTo
    theorem: str
    retrained: Bound
    centre: Bound
    survival_bound: float

    def __str__(self) -> str:
        rows = [
            (name, *("–" if x is None else round_up(x) for x in (b.epsilon, b.delta, b.mu)))
            for name, b in (("retrained", self.retrained), ("centre", self.centre))
        ]
        note = (
            f"Theorem: {self.theorem}. No event differs by more than "
            f"{round_up(self.survival_bound, 4)} in probability from runs that never saw the "
            "forget set."
        )
        title = f"Guarantee, compared to {self.compared_to}"
        return tabulate(title, rows, ("compared to", "epsilon", "delta", "mu"), note)
