"""What ran, or will run, as frozen data: one class per method, validated where it is made.

Full words outside, the paper's letters inside (docs/notation.md):
start_clip C0 · grad_clip C1 · model_clip C2 · learning_rate γ · weight_decay λ · noise_std σ ·
start_noise_std σ0 · steps T. ``Π_C`` scales ``x - centre`` down to norm C; ``ξ ~ N(0, σ²I)``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from expunge.errors import InputError

Schedule = float | Sequence[float] | npt.NDArray[np.float64]
MAX_STEPS = 2**53


@dataclass(frozen=True)
class OutputPerturbation:
    """x = Π_{C0}(x̂) + ξ. One Gaussian, then any fine-tuning on retained data.

    >>> OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
    OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
    """

    start_clip: float
    noise_std: float

    def __post_init__(self) -> None:
        _radius(self, "start_clip")
        _nonnegative(self, "noise_std")


@dataclass(frozen=True)
class GradientClipping:
    """x_0 = Π_{C0}(x̂) + N(0, σ0²I);  x_{t+1} = x_t - γ_t (Π_{C1}(g_t) + λ (x_t - c)) + ξ_t.

    ``g_t`` is the minibatch gradient on retained data, ``c`` the public centre, 0 ≤ γ_t λ < 1.
    With ``model_clip = R`` each step also projects before its noise:
    ``x_{t+1} = Π_R(x_t - γ_t (…)) + ξ_t``. Learning rate and noise may be sequences of length T.

    >>> GradientClipping(start_clip=0.01, grad_clip=100.0, learning_rate=1e-4,
    ...                  weight_decay=10.0, steps=1, noise_std=0.02827).steps
    1
    """

    start_clip: float
    grad_clip: float
    learning_rate: Schedule
    weight_decay: float
    steps: int
    noise_std: Schedule
    start_noise_std: float = 0.0
    model_clip: float | None = None

    def __post_init__(self) -> None:
        _radius(self, "start_clip")
        _radius(self, "grad_clip")
        _nonnegative(self, "weight_decay")
        _steps(self, "steps")
        _schedule(self, "learning_rate")
        _schedule(self, "noise_std")
        _nonnegative(self, "start_noise_std")
        if self.model_clip is not None:
            _radius(self, "model_clip")
        largest = float(np.max(self.learning_rate)) * self.weight_decay
        if not largest < 1:
            raise InputError(
                f"learning_rate * weight_decay is {largest:g}; it must be below 1 at every step"
            )


@dataclass(frozen=True)
class ModelClipping:
    """x_0 = Π_{C0}(x̂) + N(0, σ0²I);  x_{t+1} = Π_{C2}(x_t - γ_t (g_t + λ (x_t - c))) + ξ_t.

    ``start_clip`` and ``start_noise_std`` are optional: without them x_0 is the old model itself.

    >>> ModelClipping(model_clip=0.5, learning_rate=1e-3, weight_decay=10.0, noise_std=0.5, steps=6)
    ModelClipping(model_clip=0.5, learning_rate=0.001, weight_decay=10.0, noise_std=0.5, steps=6,
                  start_clip=None, start_noise_std=0.0)
    """

    model_clip: float
    learning_rate: Schedule
    weight_decay: float
    noise_std: Schedule
    steps: int
    start_clip: float | None = None
    start_noise_std: float = 0.0

    def __post_init__(self) -> None:
        _radius(self, "model_clip")
        _nonnegative(self, "weight_decay")
        _steps(self, "steps")
        _schedule(self, "learning_rate")
        _schedule(self, "noise_std")
        _nonnegative(self, "start_noise_std")
        if self.start_clip is not None:
            _radius(self, "start_clip")
        elif self.start_noise_std > 0:
            raise InputError(
                f"start_noise_std is {self.start_noise_std!r} without a start_clip; "
                "give start_clip too, or leave start_noise_std at 0"
            )


@dataclass(frozen=True)
class Retraining:
    """Train again on the retained data from a start that never saw the old model: (0, 0)."""


@dataclass(frozen=True)
class GroupDPSGD:
    """DP-SGD on all data, Poisson sampled, and a forget set of ``group_size`` examples.

    Each step sums per-example gradients clipped to ``clip`` over a Poisson sample of rate
    ``sampling_rate`` and adds ``N(0, (noise_multiplier · clip)² I)``. Nothing is run on request.
    """

    clip: float
    noise_multiplier: float
    sampling_rate: float
    steps: int
    group_size: int

    def __post_init__(self) -> None:
        _positive(self, "clip")
        _nonnegative(self, "noise_multiplier")
        _nonnegative(self, "sampling_rate")
        if not 0 < self.sampling_rate <= 1:
            raise InputError.of("sampling_rate", self.sampling_rate, "in (0, 1]")
        _steps(self, "steps")
        _steps(self, "group_size")


@dataclass(frozen=True)
class NoisyDescent:
    """Langevin-style: T noisy full-batch steps on all data, then K on the retained data.

    ``x ← x - η ∇F(x) + N(0, σ²I)`` from a public start, with ``F = (1/n) Σ f_i + (m/2)‖x‖²``,
    ``‖∇f_i‖ ≤ G`` (``gradient_bound``), ``f_i`` ``L_f``-smooth (``smoothness``), ``m`` =
    ``strong_convexity``; the certifying algorithm runs all T + K steps on the retained data.
    ``group_size`` of ``examples`` are removed. The constants are assumptions: the guarantee holds
    where they do.
    """

    learning_rate: float
    noise_std: float
    train_steps: int
    steps: int
    gradient_bound: float
    smoothness: float
    strong_convexity: float
    examples: int
    group_size: int
    convex: bool = True

    def __post_init__(self) -> None:
        _positive(self, "learning_rate")
        _nonnegative(self, "noise_std")
        _steps(self, "train_steps")
        _steps(self, "steps")
        _smooth_problem(self)


@dataclass(frozen=True)
class RewindToDelete:
    """T noiseless full-batch steps on all data, rewind K, redo on retained data, one Gaussian.

    Symbols and assumptions as in :class:`NoisyDescent`.
    """

    learning_rate: float
    noise_std: float
    train_steps: int
    steps: int
    gradient_bound: float
    smoothness: float
    strong_convexity: float
    examples: int
    group_size: int
    convex: bool = True

    def __post_init__(self) -> None:
        _positive(self, "learning_rate")
        _nonnegative(self, "noise_std")
        _steps(self, "train_steps")
        _steps(self, "steps")
        if self.steps > self.train_steps:
            raise InputError.of("steps", self.steps, f"at most train_steps = {self.train_steps}")
        _smooth_problem(self)


Recipe = (
    OutputPerturbation
    | GradientClipping
    | ModelClipping
    | Retraining
    | GroupDPSGD
    | NoisyDescent
    | RewindToDelete
)

Method = Literal[
    "output-perturbation",
    "gradient-clipping",
    "model-clipping",
    "retraining",
    "group-dp-sgd",
    "noisy-descent",
    "rewind-to-delete",
]

METHODS: Mapping[str, type[Recipe]] = {
    "output-perturbation": OutputPerturbation,
    "gradient-clipping": GradientClipping,
    "model-clipping": ModelClipping,
    "retraining": Retraining,
    "group-dp-sgd": GroupDPSGD,
    "noisy-descent": NoisyDescent,
    "rewind-to-delete": RewindToDelete,
}


def method_name(recipe: Recipe) -> str:
    """The method's name on the command line and in files.

    >>> method_name(Retraining())
    'retraining'
    """
    return next(name for name, kind in METHODS.items() if type(recipe) is kind)


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data: ``{"method": …}`` and its fields by their API names.

    >>> to_dict(OutputPerturbation(start_clip=0.01, noise_std=0.5))
    {'method': 'output-perturbation', 'start_clip': 0.01, 'noise_std': 0.5}
    """
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(recipe).items()}
    return {"method": method_name(recipe)} | plain


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
    kind = METHODS[name]
    known = [field.name for field in fields(kind)]
    required = [f.name for f in fields(kind) if f.default is f.default_factory]
    unknown = [key for key in given if key not in known]
    if unknown:
        raise InputError(
            f"{name} has no parameter {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
        )
    missing = [key for key in required if key not in given]
    if missing:
        raise InputError(f"{name} needs {', '.join(missing)}")
    return kind(**given)


def schedule(value: Schedule, steps: int) -> npt.NDArray[np.float64]:
    """One value per step, as an array.

    >>> schedule(0.5, 3)
    array([0.5, 0.5, 0.5])
    """
    if isinstance(value, float | int):
        return np.full(steps, float(value))
    return np.asarray(value, dtype=np.float64)


def _set(recipe: object, field: str, value: object) -> None:
    object.__setattr__(recipe, field, value)


def _number(value: object) -> float | None:
    """A real number as float; None for anything else (booleans and strings included)."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        return None
    try:
        return float(cast(float, value))
    except OverflowError:
        return math.inf if cast(int, value) > 0 else -math.inf


def _refuse(field: str, given: object, valid: str) -> InputError:
    """The sentence, with numpy's numbers written as numbers."""
    return InputError.of(field, given.item() if isinstance(given, np.generic) else given, valid)


def _checked(recipe: object, field: str, valid: str, holds: Any) -> None:
    given = getattr(recipe, field)
    number = _number(given)
    if number is None or not holds(number):
        raise _refuse(field, given, valid)
    _set(recipe, field, number)


def _radius(recipe: object, field: str) -> None:
    """C ≥ 0; infinity means "not clipped" and certifies nothing."""
    _checked(recipe, field, "a number >= 0", lambda x: x >= 0)


def _nonnegative(recipe: object, field: str) -> None:
    _checked(recipe, field, "a finite number >= 0", lambda x: 0 <= x < math.inf)


def _positive(recipe: object, field: str) -> None:
    _checked(recipe, field, "a finite number > 0", lambda x: 0 < x < math.inf)


def _steps(recipe: object, field: str) -> None:
    given = getattr(recipe, field)
    number = _number(given)
    if number is None or not (1 <= number < math.inf and number == math.floor(number)):
        raise _refuse(field, given, "a whole number >= 1")
    if number > MAX_STEPS:
        raise _refuse(field, given, f"at most {MAX_STEPS}")
    _set(recipe, field, int(number))


def _schedule(recipe: Any, field: str) -> None:
    """A finite number ≥ 0, or a sequence of ``steps`` of them (kept as a tuple)."""
    given = getattr(recipe, field)
    if _number(given) is not None:
        return _nonnegative(recipe, field)
    values = _as_array(given)
    if values is None and isinstance(given, list | tuple):
        elements = cast(Sequence[object], given)
        index = next((i for i, x in enumerate(elements) if _number(x) is None), 0)
        raise _refuse(f"{field}[{index}]", elements[index], "a finite number >= 0")
    if values is None:
        raise _refuse(field, given, f"a finite number >= 0, or {recipe.steps} of them")
    if values.ndim != 1:
        raise InputError(
            f"{field} has the shape {values.shape}; it must be a plain list of numbers"
        )
    if len(values) != recipe.steps:
        raise InputError(
            f"{field} has {values.size} values; it must have one per step: {recipe.steps}"
        )
    bad = np.flatnonzero(~((values >= 0) & np.isfinite(values)))
    if len(bad):
        index = int(bad[0])
        raise InputError.of(f"{field}[{index}]", float(values[index]), "a finite number >= 0")
    return _set(recipe, field, tuple(values.tolist()))


def _as_array(given: object) -> npt.NDArray[np.float64] | None:
    """A list or array of real numbers; None for anything else, and if one element is no number."""
    if isinstance(given, str | bytes | Mapping | Set) or not isinstance(given, Collection):
        if not isinstance(given, np.ndarray):
            return None
    elif any(isinstance(x, bool) for x in cast(Collection[object], given)):
        return None
    try:
        values = np.asarray(given)
    except (TypeError, ValueError):
        return None
    return values.astype(np.float64) if values.dtype.kind in "iuf" or values.size == 0 else None


def _smooth_problem(recipe: NoisyDescent | RewindToDelete) -> None:
    for field in ("gradient_bound", "smoothness", "strong_convexity"):
        _nonnegative(recipe, field)
    _steps(recipe, "examples")
    _steps(recipe, "group_size")
    if recipe.group_size >= recipe.examples:
        raise InputError.of("group_size", recipe.group_size, f"below examples = {recipe.examples}")
    if not isinstance(cast(object, recipe.convex), bool):
        raise InputError.of("convex", recipe.convex, "true or false")


ComparedTo = Literal["retrained", "centre"]


def is_number(value: object) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


@dataclass(frozen=True)
class Bound:
    """One (ε, δ) statement; ``mu`` where the pair of laws is μ-GDP, None where no μ is known."""

    epsilon: float
    delta: float
    mu: float | None


@dataclass(frozen=True)
class Guarantee:
    """What a recipe certifies, for both choices of the certifying algorithm.

    ``epsilon``, ``delta`` and ``mu`` are those of ``compared_to``; ``survival_bound`` is the
    largest difference in probability that *any* event about the released model can show between
    a run from the old model and one that never saw it (THEORY, section 6). ``centre`` and
    ``survival_bound`` are None for methods that do not start from the old model at all.
    """

    epsilon: float
    delta: float
    mu: float | None
    compared_to: ComparedTo
    theorem: str
    retrained: Bound
    centre: Bound | None
    survival_bound: float | None


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
        if not (is_number(self.rounding) and 0 <= self.rounding < math.inf):
            raise InputError.of("rounding", self.rounding, "a finite number >= 0")
        if not (is_number(self.tail_delta) and 0 <= self.tail_delta < 1):
            raise InputError.of("tail_delta", self.tail_delta, "a number in [0, 1)")
        if not (is_number(self.releases) and 1 <= self.releases == self.releases // 1):
            raise InputError.of("releases", self.releases, "a whole number >= 1")


IDEAL = Execution()

DescentRecipe = NoisyDescent | RewindToDelete
Kind = Literal["softmax-regression", "stated"]


@dataclass(frozen=True)
class Problem:
    """What was trained. ``feature_clip`` B, ``features`` (the bias included) and ``classes`` are
    given for softmax regression, whose constants follow from them, and for nothing else.

    >>> Problem("softmax-regression", feature_clip=1.0, features=65, classes=10).size
    650
    """

    kind: Kind
    feature_clip: float | None = None
    features: int | None = None
    classes: int | None = None

    def __post_init__(self) -> None:
        given = (self.feature_clip, self.features, self.classes)
        if self.kind == "stated":
            if given != (None, None, None):
                raise InputError("a problem with stated constants has no feature_clip, features …")
            return
        if self.kind != "softmax-regression":
            raise InputError.of("kind", self.kind, "'softmax-regression' or 'stated'")
        check_feature_clip(self.feature_clip)
        object.__setattr__(self, "feature_clip", float(self.feature_clip or 0.0))
        for name, value, least in (("features", self.features, 1), ("classes", self.classes, 2)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError.of(name, value, f"a whole number >= {least}")

    @property
    def size(self) -> int | None:
        """The number of parameters, where the problem fixes it."""
        if self.features is None or self.classes is None:
            return None
        return self.features * self.classes


STATED = Problem("stated")


def check_feature_clip(value: object) -> None:
    """B is a finite number > 0."""
    real = isinstance(value, float | int) and not isinstance(value, bool)
    if not (real and 0 < cast(float, value) < math.inf):
        raise InputError.of("feature_clip", value, "a finite number > 0")
