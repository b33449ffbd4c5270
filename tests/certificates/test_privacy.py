"""Every field of a certificate, and why it says nothing about forgotten data that no noise covers.

A new field fails here until its reason is listed (THEORY, section 7, the closed world).
"""

import types
from typing import Union, get_args, get_origin

from expunge.certificates.certificate import Certificate
from expunge.certificates.fields import Model

RECIPE = "a function of the recipe, which is chosen without the forget data"
PUBLIC = "public by itself: software, machine, architecture or a public tensor"
NOISY = "a function of weights that are already noisy, or of retained data alone"
REQUEST = "how many people and samples the request named, which a certificate may say"
SALTED = "a hash blinded by a secret of 256 bits"
OPERATOR = "what the operator chose or what happened to the machine, not to the data"
DERIVED = "derived from the other fields"
NULL = "null in every certificate"

REASONS = {
    "schema_version": DERIVED, "epsilon": RECIPE, "delta": OPERATOR, "mu": RECIPE,
    "compared_to": OPERATOR, "theorem": RECIPE, "survival_bound": RECIPE,
    "retrained.epsilon": RECIPE, "retrained.delta": OPERATOR, "retrained.mu": RECIPE,
    "centre.epsilon": RECIPE, "centre.delta": OPERATOR, "centre.mu": RECIPE,
    "grid": RECIPE, "execution": RECIPE, "releasable": DERIVED,
    "warnings": DERIVED, "scope.covered": DERIVED, "scope.not_covered": DERIVED,
    "scope.operator": DERIVED, "scope.void_if": DERIVED, "recipe": RECIPE,
    "parameters": PUBLIC, "seed": OPERATOR, "start": OPERATOR, "origin": OPERATOR,
    "noise.source": OPERATOR, "noise.generator": PUBLIC, "noise.keys": OPERATOR,
    "code.build": SALTED, "code.data": SALTED, "code.train": SALTED, "code.loss": SALTED,
    "weights.old": "the parent's release, published already; null without a parent",
    "weights.noisy": NOISY, "weights.after": NOISY, "weights.start": PUBLIC,
    "weights.published.names": PUBLIC, "weights.published.hash": PUBLIC,
    "weights.published.compared": OPERATOR, "weights.adapter.hash": NOISY,
    "weights.adapter.base": PUBLIC, "weights.files": "configuration, as public as the code",
    "forget.root": SALTED, "forget.count": REQUEST,
    "forget.samples": REQUEST, "forget.salt": NULL, "forget.leaves": NULL,
    "retained.root": SALTED, "retained.count": NOISY,
    "retained.samples": NOISY, "retained.salt": NULL, "retained.leaves": NULL,
    "training.function": "of the library; the operator's own is not named",
    "training.options": OPERATOR, "training.examples": NOISY, "training.validation": NOISY,
    "buffers": PUBLIC, "missing": PUBLIC, "unchanged": OPERATOR,
    "statistics.features": PUBLIC, "statistics.numbers": PUBLIC, "statistics.model": OPERATOR,
    "statistics.samples": NOISY, "statistics.digest": NOISY, "sharding.seed": PUBLIC,
    "sharding.combination": OPERATOR, "sharding.samples": NOISY, "sharding.hashes": NOISY,
    "sharding.digest": NOISY,
    "sharding.trained_from": "where the request's people lie; the scope says so",
    "applied.note": OPERATOR, "applied.before": NOISY, "applied.after": NOISY,
    "resumed": OPERATOR, "environment.versions": PUBLIC, "environment.device": PUBLIC,
    "environment.dtype": PUBLIC, "environment.threads": PUBLIC, "environment.processes": PUBLIC,
    "environment.deterministic": PUBLIC, "created": "one time, to the second; no duration",
    "parent": "a published certificate", "record": SALTED, "digest": DERIVED,
    "signature.algorithm": PUBLIC, "signature.public_key": PUBLIC, "signature.value": DERIVED,
}  # fmt: skip


def list_fields(kind: type[Model], at: str = "") -> set[str]:
    found = set()
    for name, info in kind.model_fields.items():
        parts = [info.annotation]
        while any(get_origin(part) in (Union, types.UnionType, tuple) for part in parts):
            parts = [inner for part in parts for inner in get_args(part) or (part,)]
        models = [part for part in parts if isinstance(part, type) and issubclass(part, Model)]
        found |= list_fields(models[0], f"{at}{name}.") if models else {at + name}
    return found


def test_every_field_has_its_reason() -> None:
    assert list_fields(Certificate) == set(REASONS)
