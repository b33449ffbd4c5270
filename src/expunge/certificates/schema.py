"""The certificate's wire format as strict, closed, frozen models, and the JSON Schema they give.

``docs/certificate_format.md`` explains every field. A radius that does not clip is written "inf".
The schema file is made by ``python -m expunge.certificates.schema`` and tested equal to these classes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
SCHEMA_PATH = Path(__file__).parent / "certificate-1.json"

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Real = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=0, lt=2**53)]
Positive = Annotated[int, Field(ge=1, le=2**53 - 1)]
Radius = Real | Literal["inf"]
Steps = Real | tuple[Real, ...]
ComparedTo = Literal["retrained", "centre"]


class Wire(BaseModel):
    """What every part has in common: nothing unknown, nothing coerced, nothing changed later."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class OutputPerturbationWire(Wire):
    method: Literal["output-perturbation"]
    start_clip: Radius
    noise_std: Real


class GradientClippingWire(Wire):
    method: Literal["gradient-clipping"]
    start_clip: Radius
    grad_clip: Radius
    learning_rate: Steps
    weight_decay: Real
    steps: Positive
    noise_std: Steps
    start_noise_std: Real
    model_clip: Radius | None


class ModelClippingWire(Wire):
    method: Literal["model-clipping"]
    model_clip: Radius
    learning_rate: Steps
    weight_decay: Real
    noise_std: Steps
    steps: Positive
    start_clip: Radius | None
    start_noise_std: Real


class RetrainingWire(Wire):
    method: Literal["retraining"]


class GroupDPSGDWire(Wire):
    method: Literal["group-dp-sgd"]
    clip: Annotated[float, Field(gt=0)]
    noise_multiplier: Real
    sampling_rate: Annotated[float, Field(gt=0, le=1)]
    steps: Positive
    group_size: Positive


class _FullBatchWire(Wire):
    """``gradient_bound``, ``smoothness`` and ``convex`` are what ``problem`` says they rest on."""

    learning_rate: Annotated[float, Field(gt=0)]
    noise_std: Real
    train_steps: Positive
    steps: Positive
    gradient_bound: Real
    smoothness: Real
    strong_convexity: Real
    examples: Positive
    group_size: Positive
    convex: bool


class NoisyDescentWire(_FullBatchWire):
    method: Literal["noisy-descent"]


class RewindToDeleteWire(_FullBatchWire):
    method: Literal["rewind-to-delete"]


RecipeWire = Annotated[
    OutputPerturbationWire
    | GradientClippingWire
    | ModelClippingWire
    | RetrainingWire
    | GroupDPSGDWire
    | NoisyDescentWire
    | RewindToDeleteWire,
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


class WeightsWire(Wire):
    """Tree hashes of named tensors. ``before`` is null unless a parent certificate names it."""

    before: Digest | None
    noisy: Digest
    after: Digest
    centre: Digest | None
    frozen: Digest | None
    frozen_names: tuple[str, ...]


class CommitmentWire(Wire):
    """A commitment to a set of identifiers; its salt stays in the record."""

    algorithm: Literal["sha256-salted-set-1"]
    root: Digest
    count: Count


class DataWire(Wire):
    forget: CommitmentWire | None
    retain: CommitmentWire | None


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
    """A certificate of unlearning, schema version 1."""

    schema_version: Literal[1]
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
    recipe: RecipeWire
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
    gradient_evaluations: Count
    resumed: Count
    device: str
    dtype: str
    versions: dict[str, str]
    created: str
    parent: Digest | None
    record: Digest
    digest: Digest
    signature: SignatureWire | None


def build_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a certificate.

    >>> build_schema()["title"]
    'Certificate of unlearning'
    """
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:expunge:certificate:1",
    }
    return head | CertificateWire.model_json_schema() | {"title": "Certificate of unlearning"}


def main() -> None:
    """Write the schema file that ships with the package."""
    text = json.dumps(build_schema(), indent=2, sort_keys=True) + "\n"
    SCHEMA_PATH.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
