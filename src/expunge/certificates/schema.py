"""The certificate's wire format as strict, closed, frozen models, and the JSON Schema they give.

``docs/certificate_format.md`` explains every field. A radius that does not clip is written "inf".
A field with a default came with version 2: a certificate of version 2 has all of them, one of
version 1 none. ``certificate-2.json`` is made by ``python -m expunge.certificates.schema`` and
tested equal to these classes; ``certificate-1.json`` is kept as it was published. Fields that came
later still (:data:`LATER`) are left out where they say nothing, so that certificates of before them
stay what they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Union

from pydantic import BaseModel, ConfigDict, Field, create_model, with_config
from typing_extensions import TypedDict

from expunge.recipes import METHODS, Kind, Recipe, describe_fields

SCHEMA_VERSION = 2
SCHEMA_PATH = Path(__file__).parent / "certificate-2.json"
LATER = ("origin", "adapter")

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Real = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, le=2**53 - 1)]
Radius = Real | Literal["inf"]
Steps = Real | tuple[Real, ...]
ComparedTo = Literal["retrained", "centre"]


_CLOSED = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class Wire(BaseModel):
    """What every part has in common: nothing unknown, nothing coerced, nothing changed later."""

    model_config = _CLOSED | ConfigDict(
        frozen=True, json_schema_serialization_defaults_required=True
    )


class RecipeWire(Wire):
    method: str


_FIELDS: dict[Kind, Any] = {
    "radius": Radius,
    "nonnegative": Real,
    "positive": Annotated[float, Field(gt=0)],
    "fraction": Annotated[float, Field(gt=0, le=1)],
    "whole": Positive,
    "flag": bool,
    "schedule": Steps,
}


def _describe_recipe(method: str, kind: type[Recipe]) -> type[RecipeWire]:
    """The wire format of one method, from the description of its fields."""
    given = {
        p.name: (_FIELDS[p.kind] | None if p.optional else _FIELDS[p.kind], ...)
        for p in describe_fields(kind)
    }
    name = f"{kind.__name__}Wire"
    fields: dict[str, Any] = {"method": (Literal[method], ...)} | given
    return create_model(name, __base__=RecipeWire, **fields)


if TYPE_CHECKING:
    AnyRecipeWire = RecipeWire
else:
    AnyRecipeWire = Annotated[
        Union[tuple(_describe_recipe(*item) for item in METHODS.items())],  # noqa: UP007
        Field(discriminator="method"),
    ]


class ProblemWire(Wire):
    """Where the constants of full-batch descent come from: computed, or stated by the user."""

    kind: Literal["softmax-regression", "stated"]
    feature_clip: Annotated[float, Field(gt=0)] | None
    features: Positive | None
    classes: Positive | None


class BoundWire(Wire):
    """One (ε, δ) statement; ``mu`` is null where no μ is known."""

    epsilon: Real
    delta: Real
    mu: Real | None


class FinitePrecisionWire(Wire):
    """What running on a real machine adds, and what it costs against exact arithmetic."""

    grid: Real
    rounding: Real
    tail_delta: Real
    ideal_epsilon: Real
    epsilon_cost: Real


class StepsWire(Wire):
    """``steps`` consecutive noisy steps with the same learning rate and noise."""

    steps: Positive
    learning_rate: Real
    noise_std: Real


class NoiseWire(Wire):
    source: Literal["system", "seeded", "none"]
    generator: str | None
    keys: Count


class PublicWire(Wire):
    """The released tensors that are not certified: compared with ``source``, or only declared."""

    names: tuple[str, ...]
    compared: bool
    source: str
    hash: Digest


class OriginWire(Wire):
    """What the public centre is: a fresh initialisation has its seed, and how it was drawn."""

    kind: Literal["initialisation", "zero", "public weights"]
    seed: str | None
    drawn: Literal["reset_parameters of every module", "built by a factory"] | None


class AdapterWire(Wire):
    """The release as an adapter alone, the base it belongs on, and its configuration."""

    hash: Digest
    base: Digest
    config: Digest


class WeightsWire(Wire):
    """Tree hashes of named tensors. ``before`` is null unless a parent certificate names it."""

    before: Digest | None
    noisy: Digest
    after: Digest
    centre: Digest | None
    frozen: Digest | None
    frozen_names: tuple[str, ...]
    public: PublicWire | None = None
    origin: OriginWire | None = None
    adapter: AdapterWire | None = None


def name_centre(weights: WeightsWire) -> str:
    """What clips and weight decay pulled towards, in words."""
    if weights.origin is not None and weights.origin.kind == "initialisation":
        return (
            f"a fresh initialisation, {weights.centre}, which saw no data: seed "
            f"{weights.origin.seed!r}, {weights.origin.drawn}"
        )
    known = weights.centre is not None
    return f"public weights, {weights.centre}, given by the operator" if known else "zero"


class CommitmentWire(Wire):
    """A commitment to a set of identifiers; its salt stays in the record."""

    algorithm: Literal["sha256-salted-set-1", "sha256-salted-set-2"]
    root: Digest
    count: Count
    samples: Count | None = None


class DataWire(Wire):
    """``checked``: both sets of identifiers were known, as many as data, and are disjoint."""

    forget: CommitmentWire | None
    retain: CommitmentWire | None
    checked: bool = False


@with_config(_CLOSED)
class FeaturesWire(TypedDict):
    """A public map to whole numbers; a tangent map has the last two keys too."""

    format: Literal["expunge-features-1"]
    network: Digest | None
    code: Digest | None
    bits: Annotated[int, Field(ge=4, le=12)]
    lift: Count
    seed: str
    evaluation: Literal["by construction", "tested"]
    tangent: NotRequired[Positive]
    parameters: NotRequired[str]


@with_config(_CLOSED)
class HeadWire(TypedDict):
    """What was solved: a ridge regression has its regularisation, one of numbers their scale."""

    loss: Literal["squared", "softmax", "logistic", "squared-hinge", "poisson"]
    outputs: Positive
    classification: bool
    regularisation: NotRequired[Annotated[float, Field(gt=0)]]
    target_scale: NotRequired[Annotated[float, Field(gt=0)]]


class StatisticsWire(Wire):
    """What a head built to forget was computed from: public features, exact sums of rows."""

    features: FeaturesWire
    head: HeadWire
    samples: Count
    digest: Digest


class ShardingWire(Wire):
    """The constituents of an ensemble, shard by shard."""

    seed: str
    combination: Literal["probabilities", "logits", "votes"]
    training: dict[str, str | int | float]
    deterministic: bool
    build: Digest
    samples: tuple[Count, ...]
    hashes: tuple[Digest, ...]
    trained_from: tuple[Count, ...]
    digest: Digest
    distilled: bool


class BuffersWire(Wire):
    policy: Literal["none", "frozen", "reset"]
    names: tuple[str, ...]


class FineTuningWire(Wire):
    optimizer: str
    epochs: Real
    steps: Count
    learning_rate: Real
    batch_size: Count
    schedule: str
    gradient_evaluations: Count
    data: CommitmentWire | None
    checked: bool = False


class ScopeWire(Wire):
    """Plain sentences, derived from the other fields."""

    covered: tuple[str, ...]
    not_covered: tuple[str, ...]
    assumptions: tuple[str, ...]
    void_if: tuple[str, ...]


class SignatureWire(Wire):
    """Ed25519 over the canonical bytes of the certificate without this field."""

    algorithm: Literal["Ed25519"]
    public_key: Digest
    value: Annotated[str, Field(pattern="^[0-9a-f]{128}$")]


class CertificateWire(Wire):
    """A certificate of unlearning."""

    schema_version: Literal[1, 2]
    epsilon: Real
    delta: Annotated[float, Field(gt=0, lt=1)]
    mu: Real | None
    compared_to: ComparedTo
    theorem: str
    retrained: BoundWire
    centre: BoundWire | None
    survival_bound: Annotated[float, Field(ge=0, le=1)]
    finite_precision: FinitePrecisionWire
    releases: Positive
    releasable: bool
    warnings: tuple[str, ...]
    scope: ScopeWire
    recipe: AnyRecipeWire
    schedule: tuple[StepsWire, ...]
    parameters: Positive
    start: Literal["model", "centre", "fresh"]
    initialisation: str | None
    problem: ProblemWire | None
    noise: NoiseWire
    weights: WeightsWire
    data: DataWire
    buffers: BuffersWire
    finetune: FineTuningWire | None
    gradient_evaluations: Count | None
    resumed: Count
    device: str
    dtype: str
    versions: dict[str, str]
    created: str
    parent: Digest | None
    record: Digest
    digest: Digest
    signature: SignatureWire | None
    accepted_unchecked: bool = False
    statistics: StatisticsWire | None = None
    shards: ShardingWire | None = None


def find_misplaced(part: Wire, version: int) -> list[str]:
    """Fields of version 2 in a certificate of version 1, or missing in one of version 2."""
    found: list[str] = []
    for name, info in type(part).model_fields.items():
        given, value = name in part.model_fields_set, getattr(part, name)
        if name in LATER and version > 1:
            found += [f"{name} is null; it is left out then"] if given and value is None else []
        elif not info.is_required() and given != (version > 1):
            found.append(f"{name} {'belongs to version 2' if given else 'is missing'}")
        if isinstance(value, Wire):
            found += find_misplaced(value, version)
    return found


def keep_version_1(part: Wire) -> dict[str, Any]:
    """Plain data without the fields that came with version 2."""
    plain = part.model_dump(mode="json")
    for name, info in type(part).model_fields.items():
        if isinstance(value := getattr(part, name), Wire):
            plain[name] = keep_version_1(value)
        if not info.is_required():
            del plain[name]
    return plain


def build_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a certificate.

    >>> build_schema()["title"]
    'Certificate of unlearning'
    """
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:expunge:certificate:{SCHEMA_VERSION}",
    }
    schema = CertificateWire.model_json_schema(mode="serialization")
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION, "type": "integer"}
    for part in schema["$defs"].values():
        part["required"] = [name for name in part.get("required", []) if name not in LATER]
    return head | schema | {"title": "Certificate of unlearning"}


def main() -> None:
    """Write the schema file that ships with the package."""
    text = json.dumps(build_schema(), indent=2, sort_keys=True) + "\n"
    SCHEMA_PATH.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
