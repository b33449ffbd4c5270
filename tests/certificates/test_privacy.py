"""Every field of a certificate, and why it says nothing about forgotten data that no noise covers.

A new field fails here until its reason is listed (THEORY, section 7, the closed world).
"""

import types
from typing import Union, get_args, get_origin

import pytest

from expunge.certificates.certificate import certify
from expunge.certificates.record import Statistics
from expunge.certificates.schema import CertificateWire, Wire
from expunge.recipes import ConvexHeadRecipe, Execution, GroupDPSGD
from handmade import GRADIENT, make_record, make_trace

RECIPE = "a function of the recipe, which is chosen without the forget data"
PUBLIC = "public by itself: software, machine, architecture or a public tensor"
NOISY = "a function of weights that are already noisy, or of retained data alone"
REQUEST = "how many people and samples the request named, which a certificate may say"
SALTED = "a hash blinded by a secret of 256 bits"
OPERATOR = "what the operator chose or what happened to the machine, not to the data"
DERIVED = "derived from the other fields"

REASONS = {
    "schema_version": DERIVED, "epsilon": RECIPE, "delta": OPERATOR, "mu": RECIPE,
    "compared_to": OPERATOR, "theorem": RECIPE, "survival_bound": RECIPE, "releases": OPERATOR,
    "retrained.epsilon": RECIPE, "retrained.delta": OPERATOR, "retrained.mu": RECIPE,
    "centre.epsilon": RECIPE, "centre.delta": OPERATOR, "centre.mu": RECIPE,
    "finite_precision.grid": RECIPE, "finite_precision.rounding": RECIPE,
    "finite_precision.tail_delta": RECIPE, "finite_precision.ideal_epsilon": RECIPE,
    "finite_precision.epsilon_cost": RECIPE, "releasable": DERIVED, "warnings": DERIVED,
    "scope.covered": DERIVED, "scope.not_covered": DERIVED, "scope.assumptions": DERIVED,
    "scope.void_if": DERIVED, "recipe.*": RECIPE, "schedule.steps": RECIPE,
    "schedule.learning_rate": RECIPE, "schedule.noise_std": RECIPE, "parameters": PUBLIC,
    "start": OPERATOR, "initialisation": OPERATOR, "problem.kind": OPERATOR,
    "problem.feature_clip": OPERATOR, "problem.features": PUBLIC, "problem.classes": PUBLIC,
    "noise.source": OPERATOR, "noise.generator": PUBLIC, "noise.keys": OPERATOR,
    "weights.before": "the parent's release, published already; null without a parent",
    "weights.noisy": NOISY, "weights.after": NOISY, "weights.centre": PUBLIC,
    "weights.origin.kind": OPERATOR, "weights.origin.seed": OPERATOR,
    "weights.origin.drawn": OPERATOR, "weights.frozen": PUBLIC, "weights.frozen_names": PUBLIC,
    "weights.public.names": PUBLIC,
    "weights.public.compared": OPERATOR, "weights.public.source": OPERATOR,
    "weights.public.hash": PUBLIC, "weights.adapter.hash": NOISY, "weights.adapter.base": PUBLIC,
    "weights.adapter.config": "written from the live configuration, as public as the code",
    "data.forget.algorithm": PUBLIC, "data.forget.root": SALTED,
    "data.forget.count": REQUEST, "data.forget.samples": REQUEST, "data.retain.algorithm": PUBLIC,
    "data.retain.root": SALTED, "data.retain.count": NOISY, "data.retain.samples": NOISY,
    "data.checked": OPERATOR, "buffers.policy": OPERATOR, "buffers.names": PUBLIC,
    "finetune.optimizer": OPERATOR, "finetune.epochs": OPERATOR, "finetune.steps": NOISY,
    "finetune.learning_rate": OPERATOR, "finetune.batch_size": OPERATOR,
    "finetune.schedule": OPERATOR, "finetune.gradient_evaluations": NOISY,
    "finetune.data.algorithm": PUBLIC, "finetune.data.root": SALTED,
    "finetune.data.count": NOISY, "finetune.data.samples": NOISY, "finetune.checked": OPERATOR,
    "gradient_evaluations": "retained data; null where others show in it (DP-SGD, warm starts)",
    "resumed": OPERATOR, "device": PUBLIC, "dtype": PUBLIC, "versions": PUBLIC,
    "created": "the time of the last step, to the second; no duration",
    "parent": "a published certificate", "record": SALTED, "digest": DERIVED,
    "signature.algorithm": PUBLIC, "signature.public_key": PUBLIC, "signature.value": DERIVED,
    "accepted_unchecked": OPERATOR, "statistics.features": PUBLIC, "statistics.head": OPERATOR,
    "statistics.samples": NOISY, "statistics.digest": NOISY,
    "shards.seed": PUBLIC, "shards.combination": OPERATOR, "shards.training": OPERATOR,
    "shards.deterministic": OPERATOR, "shards.build": PUBLIC, "shards.samples": NOISY,
    "shards.hashes": NOISY, "shards.digest": NOISY, "shards.distilled": OPERATOR,
    "shards.trained_from": "where the request's identifiers lie; the scope says so",
}  # fmt: skip


FEATURES = {"format": "expunge-features-1", "network": None, "code": None, "bits": 8, "lift": 0,
            "seed": "", "evaluation": "by construction"}  # fmt: skip
HEAD = {"loss": "softmax", "outputs": 3, "classification": True}


def list_fields(kind: type[Wire], at: str = "") -> set[str]:
    found = set()
    for name, info in kind.model_fields.items():
        parts = [info.annotation]
        while any(get_origin(part) in (Union, types.UnionType, tuple) for part in parts):
            parts = [inner for part in parts for inner in get_args(part) or (part,)]
        wires = [part for part in parts if isinstance(part, type) and issubclass(part, Wire)]
        if name == "recipe":
            found.add("recipe.*")
        elif wires:
            found |= list_fields(wires[0], f"{at}{name}.")
        else:
            found.add(at + name)
    return found


def test_every_field_has_its_reason() -> None:
    assert list_fields(CertificateWire) == set(REASONS)


@pytest.mark.parametrize(
    "changes",
    [
        {"weights_before": "d" * 64},
        {"trace": make_trace(GRADIENT, 21)},
        {"nonce": "7" * 64},
    ],
)
def test_what_no_noise_covers_changes_only_the_blinded_hash(changes) -> None:
    one, other = certify(make_record(), delta=1e-5), certify(make_record(**changes), delta=1e-5)
    ours, theirs = one.model_dump(), other.model_dump()
    assert {name for name in ours if ours[name] != theirs[name]} == {"record", "digest"}


def test_passes_from_weights_that_saw_the_forgotten_are_not_published() -> None:
    """A solve from zero is a function of retained rows, and is told."""
    recipe = ConvexHeadRecipe(weight_decay=1e-5, tolerance=1e-9, noise_std=1e-3)
    noisy = {"finetune": None, "weights_noisy": make_record().weights_after, "grid": 2.0**-34,
             "execution": Execution(rounding=1e-8), "retain": None,
             "statistics": Statistics(FEATURES, HEAD, 10, "1" * 64)}  # fmt: skip
    one, other = (
        certify(make_record(recipe, gradient_evaluations=n, **noisy), delta=1e-5) for n in (99, 100)
    )
    assert one.gradient_evaluations is None
    ours, theirs = one.model_dump(), other.model_dump()
    assert {name for name in ours if ours[name] != theirs[name]} == {"record", "digest"}


def test_realised_poisson_samples_are_not_published() -> None:
    recipe = GroupDPSGD(clip=1.0, noise_multiplier=8.0, sampling_rate=0.1, steps=10, group_size=3)
    given = {"finetune": None, "weights_noisy": make_record().weights_after, "start": "fresh"}
    one, other = (
        certify(make_record(recipe, gradient_evaluations=n, **given), delta=1e-5) for n in (99, 100)
    )
    assert one.gradient_evaluations is None
    ours, theirs = one.model_dump(), other.model_dump()
    assert {name for name in ours if ours[name] != theirs[name]} == {"record", "digest"}
