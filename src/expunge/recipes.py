"""What ran, or will run, as frozen data: one class per method, validated where it is made.

Full words outside, the paper's letters inside (docs/notation.md):
start_clip C0 · grad_clip C1 · model_clip C2 · learning_rate γ · weight_decay λ · noise_std σ ·
start_noise_std σ0 · steps T. ``Π_C`` scales ``x - centre`` down to norm C; ``ξ ~ N(0, σ²I)``.

A field is described once, by ``field(metadata=_say(kind, meaning))``. :func:`describe_fields` reads
that: validation here, the certificate's wire format, options and job keys are all made from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from expunge.display import Sheet, round_up
from expunge.errors import InputError

Schedule = float | Sequence[float] | npt.NDArray[np.float64]
Kind = Literal["radius", "nonnegative", "positive", "fraction", "whole", "flag", "schedule"]
MAX_WHOLE = 2**53
# A guarantee is verified step by step in 50 digits; a step of model clipping takes longest.
MAX_STEPS, MAX_MIXING_STEPS = 1_000_000, 10_000
# Nearer to 1, floats no longer say how much 1 - γλ leaves of the old model.
LEAST_CONTRACTION = 1e-6


@dataclass(frozen=True)
class Parameter:
    """One field of a recipe: what it may be, and what it means in one sentence.

    ``kind`` is one of: radius (a number ≥ 0, infinity for "not clipped"), nonnegative and positive
    (finite numbers), fraction (in (0, 1]), whole (≥ 1), flag, schedule (a finite number ≥ 0, or
    ``steps`` of them). ``optional``: None is allowed. ``default`` is None where ``required``.
    """

    name: str
    kind: Kind
    meaning: str
    required: bool
    default: float | bool | None
    optional: bool


def describe_fields(method: type[Recipe] | str) -> tuple[Parameter, ...]:
    """The parameters of a method, in order, given its class or its name.

    >>> describe_fields("output-perturbation")[1].meaning
    'Noise added to each coordinate, σ.'
    >>> [p.name for p in describe_fields(GradientClipping) if not p.required]
    ['start_noise_std', 'model_clip']
    """
    return _describe(METHODS[method] if isinstance(method, str) else method)


@functools.cache
def _describe(kind: type[Recipe]) -> tuple[Parameter, ...]:
    found: list[Parameter] = []
    for f in fields(kind):
        required = f.default is f.default_factory
        default = None if required else cast(Any, f.default)
        optional = not required and default is None
        about = cast(Mapping[str, Any], f.metadata)
        found.append(
            Parameter(f.name, about["kind"], about["meaning"], required, default, optional)
        )
    return tuple(found)


def _say(kind: Kind, meaning: str) -> Mapping[str, str]:
    return MappingProxyType({"kind": kind, "meaning": meaning})


_START_CLIP = _say("radius", "Radius the old model is clipped to before any noise, C0.")
_MODEL_CLIP = _say("radius", "Radius the model is clipped to before each noise, C2.")
_LEARNING_RATE = _say("schedule", "Learning rate of the noisy steps, γ.")
_WEIGHT_DECAY = _say("nonnegative", "Pull towards the centre in the noisy steps, λ.")
_STEPS = _say("whole", "Number of noisy steps, T.")
_NOISE_STD = _say("schedule", "Noise added to each coordinate in each step, σ.")
_START_NOISE_STD = _say("nonnegative", "Noise added to the clipped old model, σ0.")
_ONE_NOISE = _say("nonnegative", "Noise added to each coordinate, σ.")
_GROUP_SIZE = _say("whole", "How many examples may be forgotten, k.")
_RATE = _say("positive", "Step size of full-batch descent, η.")
_TRAIN_STEPS = _say("whole", "Steps on all data, T.")
_RETAIN_STEPS = _say("whole", "Steps on the retained data, K.")
_GRADIENT_BOUND = _say("nonnegative", "Largest gradient norm of one example's loss, G.")
_SMOOTHNESS = _say("nonnegative", "Smoothness of one example's loss, L_f.")
_STRONG_CONVEXITY = _say("nonnegative", "Strength of the quadratic term of the objective, m.")
_EXAMPLES = _say("whole", "Number of training examples, n.")
_CONVEX = _say("flag", "Whether each example's loss is convex.")


class _Validated:
    """Checks every field by its description, then the fields together."""

    def __post_init__(self) -> None:
        recipe = cast("Recipe", self)
        described = describe_fields(type(recipe))
        for parameter in sorted(described, key=lambda p: p.kind == "schedule"):
            given = getattr(recipe, parameter.name)
            if given is not None or not parameter.optional:
                steps = getattr(recipe, "steps", 1)
                checked = check_value(parameter.kind, parameter.name, given, steps)
                object.__setattr__(recipe, parameter.name, checked)
        _check_together(recipe)


@dataclass(frozen=True)
class OutputPerturbation(_Validated):
    """x = Π_{C0}(x̂) + ξ. One Gaussian, then any fine-tuning on retained data.

    >>> OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
    OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
    """

    start_clip: float = field(metadata=_START_CLIP)
    noise_std: float = field(metadata=_ONE_NOISE)


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

    start_clip: float = field(metadata=_START_CLIP)
    grad_clip: float = field(metadata=_say("radius", "Radius each gradient is clipped to, C1."))
    learning_rate: Schedule = field(metadata=_LEARNING_RATE)
    weight_decay: float = field(metadata=_WEIGHT_DECAY)
    steps: int = field(metadata=_STEPS)
    noise_std: Schedule = field(metadata=_NOISE_STD)
    start_noise_std: float = field(default=0.0, metadata=_START_NOISE_STD)
    model_clip: float | None = field(default=None, metadata=_MODEL_CLIP)


@dataclass(frozen=True)
class ModelClipping(_Validated):
    """x_0 = Π_{C0}(x̂) + N(0, σ0²I);  x_{t+1} = Π_{C2}(x_t - γ_t (g_t + λ (x_t - c))) + ξ_t.

    ``start_clip`` and ``start_noise_std`` are optional: without them x_0 is the old model itself.

    >>> ModelClipping(model_clip=0.5, learning_rate=1e-3, weight_decay=10.0, noise_std=0.5, steps=6)
    ModelClipping(model_clip=0.5, learning_rate=0.001, weight_decay=10.0, noise_std=0.5, steps=6,
                  start_clip=None, start_noise_std=0.0)
    """

    model_clip: float = field(metadata=_MODEL_CLIP)
    learning_rate: Schedule = field(metadata=_LEARNING_RATE)
    weight_decay: float = field(metadata=_WEIGHT_DECAY)
    noise_std: Schedule = field(metadata=_NOISE_STD)
    steps: int = field(metadata=_STEPS)
    start_clip: float | None = field(default=None, metadata=_START_CLIP)
    start_noise_std: float = field(default=0.0, metadata=_START_NOISE_STD)


@dataclass(frozen=True)
class Retraining(_Validated):
    """Train again on the retained data from a start that never saw the old model: (0, 0)."""


@dataclass(frozen=True)
class GroupDPSGD(_Validated):
    """DP-SGD on all data, Poisson sampled, and a forget set of ``group_size`` examples.

    Each step sums per-example gradients clipped to ``clip`` over a Poisson sample of rate
    ``sampling_rate`` and adds ``N(0, (noise_multiplier · clip)² I)``. Nothing is run on request.
    """

    clip: float = field(metadata=_say("positive", "Norm each example's gradient is clipped to."))
    noise_multiplier: float = field(
        metadata=_say("nonnegative", "Noise of each step in units of the clip.")
    )
    sampling_rate: float = field(
        metadata=_say("fraction", "Probability of each example to be in a step's sample.")
    )
    steps: int = field(metadata=_say("whole", "Number of DP-SGD steps, T."))
    group_size: int = field(metadata=_GROUP_SIZE)


@dataclass(frozen=True)
class _FullBatch(_Validated):
    learning_rate: float = field(metadata=_RATE)
    noise_std: float = field(metadata=_ONE_NOISE)
    train_steps: int = field(metadata=_TRAIN_STEPS)
    steps: int = field(metadata=_RETAIN_STEPS)
    gradient_bound: float = field(metadata=_GRADIENT_BOUND)
    smoothness: float = field(metadata=_SMOOTHNESS)
    strong_convexity: float = field(metadata=_STRONG_CONVEXITY)
    examples: int = field(metadata=_EXAMPLES)
    group_size: int = field(metadata=_GROUP_SIZE)
    convex: bool = field(default=True, metadata=_CONVEX)


@dataclass(frozen=True)
class NoisyDescent(_FullBatch):
    """Langevin-style: T noisy full-batch steps on all data, then K on the retained data.

    ``x ← x - η ∇F(x) + N(0, σ²I)`` from a public start, with ``F = (1/n) Σ f_i + (m/2)‖x‖²``,
    ``‖∇f_i‖ ≤ G`` (``gradient_bound``), ``f_i`` ``L_f``-smooth (``smoothness``), ``m`` =
    ``strong_convexity``; the certifying algorithm runs all T + K steps on the retained data.
    ``group_size`` of ``examples`` are removed. The constants are assumptions: the guarantee holds
    where they do.
    """


@dataclass(frozen=True)
class RewindToDelete(_FullBatch):
    """T noiseless full-batch steps on all data, rewind K, redo on retained data, one Gaussian.

    Symbols and assumptions as in :class:`NoisyDescent`.
    """


@dataclass(frozen=True)
class ExactStatistics(_Validated):
    """Ridge regression from exact integer sums of public features (THEORY, section 10): (0, 0)."""


@dataclass(frozen=True)
class ConvexHeadRecipe(_Validated):
    """Strongly convex regression on public features (THEORY, section 11).

    ``F(w) = (1/n) Σ ℓ + (m/2)‖w‖²`` on retained rows. With ``noise_std = 0`` it was solved from
    zero, which is (0, 0). Otherwise from the old weights until ‖∇F(w)‖ ≤ τ, and ``w + ξ`` was
    released: ``‖w - w*‖ ≤ τ/m``, so μ = τ/(m σ).

    >>> ConvexHeadRecipe(weight_decay=1e-5, tolerance=1e-9, noise_std=3.73e-4).tolerance
    1e-09
    """

    weight_decay: float = field(
        metadata=_say("positive", "Strength of the ridge on all weights, m.")
    )
    tolerance: float = field(metadata=_say("positive", "Largest gradient norm at the solution, τ."))
    noise_std: float = field(default=0.0, metadata=_ONE_NOISE)


@dataclass(frozen=True)
class ShardedTraining(_Validated):
    """An ensemble of networks that never see each other's data (THEORY, section 12): (0, 0).

    >>> ShardedTraining(shards=8, slices=4)
    ShardedTraining(shards=8, slices=4)
    """

    shards: int = field(metadata=_say("whole", "Number of networks, S."))
    slices: int = field(metadata=_say("whole", "Number of slices of each network's data, R."))


NoisyRecipe = OutputPerturbation | GradientClipping | ModelClipping
DescentRecipe = NoisyDescent | RewindToDelete
HeadRecipe = ExactStatistics | ConvexHeadRecipe
Recipe = NoisyRecipe | Retraining | GroupDPSGD | DescentRecipe | HeadRecipe | ShardedTraining

METHODS: Mapping[str, type[Recipe]] = {
    "output-perturbation": OutputPerturbation,
    "gradient-clipping": GradientClipping,
    "model-clipping": ModelClipping,
    "retraining": Retraining,
    "group-dp-sgd": GroupDPSGD,
    "noisy-descent": NoisyDescent,
    "rewind-to-delete": RewindToDelete,
    "exact-statistics": ExactStatistics,
    "convex-head": ConvexHeadRecipe,
    "shards": ShardedTraining,
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
    known = [parameter.name for parameter in describe_fields(kind)]
    required = [parameter.name for parameter in describe_fields(kind) if parameter.required]
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


def list_restarts(steps: int) -> list[int]:
    """Where the argument for projected steps may restart: anywhere up to 1,024 steps, then evenly.

    Each gives a valid bound. Which ones are tried is part of the format: a claim must be met again.

    >>> list_restarts(5)
    [0, 1, 2, 3, 4]
    """
    count = min(steps, 1024, max(8, 10_000_000 // steps))
    return sorted({int(t) for t in np.linspace(0, steps - 1, count)})


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


def check_value(kind: Kind, field: str, given: Any, steps: int = 1) -> Any:
    """The value as it is kept, if it is of this kind; a schedule may have ``steps`` values.

    >>> check_value("nonnegative", "rounding", -1)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: rounding is -1; it must be a finite number >= 0
    """
    if kind == "schedule":
        return _check_schedule(field, given, steps)
    if kind == "flag":
        if not isinstance(given, bool):
            raise _refuse(field, given, "true or false")
        return given
    number, (valid, holds) = _number(given), _RANGES[kind]
    if number is None or not holds(number):
        raise _refuse(field, given, valid)
    if kind == "whole" and number > MAX_WHOLE:
        raise _refuse(field, given, f"at most {MAX_WHOLE}")
    return int(number) if kind == "whole" else number


def _check_schedule(field: str, given: Any, steps: int) -> float | tuple[float, ...]:
    """A finite number ≥ 0, or a sequence of ``steps`` of them (kept as a tuple)."""
    if _number(given) is not None:
        return check_value("nonnegative", field, given)
    values = _as_array(given)
    if values is None and isinstance(given, list | tuple):
        elements = cast(Sequence[object], given)
        index = next((i for i, x in enumerate(elements) if _number(x) is None), 0)
        raise _refuse(f"{field}[{index}]", elements[index], "a finite number >= 0")
    if values is None:
        raise _refuse(field, given, f"a finite number >= 0, or {steps} of them")
    if values.ndim != 1:
        raise InputError(
            f"{field} has the shape {values.shape}; it must be a plain list of numbers"
        )
    if len(values) != steps:
        raise InputError(f"{field} has {values.size} values; it must have one per step: {steps}")
    bad = np.flatnonzero(~((values >= 0) & np.isfinite(values)))
    if len(bad):
        index = int(bad[0])
        raise InputError.of(f"{field}[{index}]", float(values[index]), "a finite number >= 0")
    return tuple(values.tolist())


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


_RANGES: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "radius": ("a number >= 0", lambda x: x >= 0),
    "nonnegative": ("a finite number >= 0", lambda x: 0 <= x < math.inf),
    "positive": ("a finite number > 0", lambda x: 0 < x < math.inf),
    "fraction": ("in (0, 1]", lambda x: 0 < x <= 1),
    "whole": ("a whole number >= 1", lambda x: 1 <= x < math.inf and x == math.floor(x)),
}


def _check_together(recipe: Recipe) -> None:
    """What the fields of a recipe must be to each other, and how many steps can be verified."""
    for name in ("train_steps", "steps"):
        steps = getattr(recipe, name, 0)
        most = MAX_MIXING_STEPS if isinstance(recipe, ModelClipping) else MAX_STEPS
        if steps > most and not isinstance(recipe, GroupDPSGD):
            raise InputError.of(name, steps, f"at most {most}, to be verified")
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
        case RewindToDelete(steps=K, train_steps=T) if K > T:
            raise InputError.of("steps", K, f"at most train_steps = {T}")
        case NoisyDescent(group_size=k, examples=n) | RewindToDelete(group_size=k, examples=n):
            if k >= n:
                raise InputError.of("group_size", k, f"below examples = {n}")
        case _:
            pass


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

    def __str__(self) -> str:
        return self._summarise().to_text()

    def _repr_html_(self) -> str:
        return self._summarise().to_html()

    def _summarise(self) -> Sheet:
        bounds = {"retrained": self.retrained, "centre": self.centre}
        rows = [
            (name, *("–" if x is None else round_up(x) for x in (b.epsilon, b.delta, b.mu)))
            for name, b in bounds.items()
            if b is not None
        ]
        note = f"Theorem: {self.theorem}."
        if self.survival_bound is not None:
            note += (
                f" No event differs by more than {round_up(self.survival_bound, 4)} in probability "
                "from runs that never saw the forget set."
            )
        title = f"Guarantee, compared to {self.compared_to}"
        return Sheet(title, rows, names=("compared to", "epsilon", "delta", "mu"), note=note)


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
        if not (is_number(self.tail_delta) and 0 <= self.tail_delta < 1):
            raise InputError.of("tail_delta", self.tail_delta, "a number in [0, 1)")


IDEAL = Execution()


@dataclass(frozen=True)
class Problem:
    """What was trained. ``feature_clip`` B, ``features`` (the bias included) and ``classes`` are
    given for softmax regression, whose constants follow from them, and for nothing else.

    >>> Problem("softmax-regression", feature_clip=1.0, features=65, classes=10).size
    650
    """

    kind: Literal["softmax-regression", "stated"]
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
        clip = check_value("positive", "feature_clip", self.feature_clip)
        object.__setattr__(self, "feature_clip", clip)
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
