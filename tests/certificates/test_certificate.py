"""Certificates: what they say, what they keep to themselves, and what is refused."""

import hashlib
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
import safetensors
import yaml

from expunge.accounting.guarantee import guarantee
from expunge.certificates.certificate import Certificate, certify, parse
from expunge.certificates.hashing import write_safetensors
from expunge.certificates.identifiers import read_ids
from expunge.certificates.record import RunRecord, Trace
from expunge.certificates.schema import (
    SCHEMA_PATH,
    CertificateWire,
    FinitePrecisionWire,
    build_schema,
)
from expunge.certificates.signing import generate_key_pair
from expunge.certificates.verification import verify
from expunge.errors import CertificateError, InputError, UnlearningError
from expunge.recipes import Execution, OutputPerturbation
from handmade import (
    GRADIENT,
    MODEL,
    NONCE,
    OUTPUT,
    RECIPES,
    SALT,
    WEIGHTS,
    hash_of,
    make_record,
    make_run,
    make_trace,
)

SEEDED = {"source": "seeded", "generator": "AES-256-CTR", "releasable": False, "seed": 3}


# --- what a certificate says


@pytest.mark.parametrize("compared_to", ["retrained", "centre"])
@pytest.mark.parametrize("name", RECIPES)
def test_certificate_states_the_guarantee_and_verifies(name, compared_to, tmp_path) -> None:
    record = make_record(RECIPES[name])
    certificate = certify(record, delta=1e-5, compared_to=compared_to)
    expected = guarantee(
        record.recipe, delta=1e-5, compared_to=compared_to, execution=record.execution
    )
    assert (certificate.epsilon, certificate.mu) == (expected.epsilon, expected.mu)
    assert certificate.survival_bound == expected.survival_bound
    assert certificate.retrained.epsilon == expected.retrained.epsilon
    assert certificate.method == record.recipe
    assert certificate.execution == record.execution
    assert certificate.releasable
    certificate.save(tmp_path / "certificate.json")
    record.save(tmp_path / "record.json")
    write_safetensors(tmp_path / "model.safetensors", WEIGHTS, certificate.safetensors_metadata())
    found = verify(tmp_path / "certificate.json", record=tmp_path / "record.json")
    assert found == certificate == Certificate.load(tmp_path / "certificate.json")


def test_certificate_is_a_pure_function_of_the_record() -> None:
    one, two = (certify(make_record(), delta=1e-5).to_bytes() for _ in range(2))
    assert one == two


def test_certificate_golden() -> None:
    """The wording and the layout belong to schema version 2: a change here is a new version."""
    plain = certify(make_record(OUTPUT), delta=1e-5).model_dump(mode="json")
    numbers = ("epsilon", "mu", "retrained", "centre", "survival_bound", "finite_precision")
    rest = {k: v for k, v in plain.items() if k not in (*numbers, "digest")}
    assert (
        hashlib.sha256(rfc8785.dumps(rest)).hexdigest()
        == "2117572e6b6692f7bec87a2282d4e109912a12b019deb152e92f9b1250e4e40c"
    )


def test_finite_precision_cost_is_shown() -> None:
    execution = Execution(rounding=1e-4, tail_delta=1e-8)
    shown = certify(make_record(execution=execution), delta=1e-5).finite_precision
    ideal = guarantee(GRADIENT, delta=1e-5).epsilon
    assert shown.ideal_epsilon == ideal
    assert shown.epsilon_cost > 1e-4
    assert (
        shown.epsilon_cost == guarantee(GRADIENT, delta=1e-5, execution=execution).epsilon - ideal
    )


def test_nothing_that_no_noise_covers_is_published() -> None:
    """The trace, the old weights' hash and the salts would each tell the starts apart."""
    record = make_record(OUTPUT)
    text = certify(record, delta=1e-5).to_bytes().decode()
    assert record.weights_before not in text
    assert SALT not in text
    assert NONCE not in text
    for column in ("gradient_norm", "clip_factor", "model_norm", "noise_norm", "nonfinite"):
        assert column not in text
        for value in getattr(record.trace, column):
            assert value in (0.0, False) or repr(value) not in text
    assert "seed" not in certify(make_record(noise=SEEDED), delta=1e-5).noise.model_dump()


def test_the_record_is_bound_but_blinded() -> None:
    one = certify(make_record(), delta=1e-5)
    assert certify(make_record(nonce="9" * 64), delta=1e-5).record != one.record
    assert certify(make_record(weights_before="9" * 64), delta=1e-5).record != one.record


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": SEEDED}, "seed"),
        ({"grid": 0.0}, "grid"),
    ],
)
def test_not_for_release(changes, words, tmp_path) -> None:
    path, certificate = make_run(tmp_path, **changes)
    assert not certificate.releasable
    assert "Not for release" in certificate.warnings[0]
    assert words in certificate.warnings[0]
    assert certificate.warnings[0] in certificate.statement()
    assert certificate.warnings[0] in certificate.model_card()
    assert verify(path) == certificate


def test_statement_never_rounds_a_bound_down() -> None:
    certificate = certify(make_record(), delta=1e-5)
    text = certificate.statement()
    shown = float(re.search(r"epsilon = ([\d.]+),", text)[1])
    assert certificate.epsilon <= shown < certificate.epsilon * 1.00001
    factor = float(re.search(r"at most ([\d.]+) times", text)[1])
    assert math.exp(certificate.epsilon) <= factor < math.exp(certificate.epsilon) * 1.00001
    chance = float(re.search(r"At most ([\d.]+) %", text)[1])
    assert 100 * certificate.survival_bound <= chance < 101 * certificate.survival_bound
    for sentence in (*certificate.scope.covered, *certificate.scope.not_covered):
        assert sentence in text


def test_scope_follows_the_run() -> None:
    plain = certify(make_record(finetune=None, weights_noisy=hash_of(WEIGHTS)), delta=1e-5)
    assert not any("fine-tuning" in sentence for sentence in plain.scope.covered)
    rich = certify(
        make_record(
            start="centre", buffers="reset", buffer_names=("bn.mean",), frozen="f" * 64,
            frozen_names=("embed",), execution=Execution(rounding=1e-6, releases=3),
        ),
        delta=1e-5,
    )  # fmt: skip
    words = " ".join((*rich.scope.covered, *rich.scope.not_covered))
    for expected in ("never used the old model", "estimated again", "All 3", "1 frozen tensors"):
        assert expected in words


def test_model_card_is_yaml_and_markdown() -> None:
    certificate = certify(make_record(), delta=1e-5)
    _, front, body = certificate.model_card().split("---\n", 2)
    facts = yaml.safe_load(front)["certified_unlearning"]
    assert facts["epsilon"] == certificate.epsilon
    assert facts["delta"] == 1e-5
    assert facts["certificate"] == certificate.digest
    assert "## Certified unlearning" in body


def test_weights_metadata_is_readable_by_safetensors(tmp_path) -> None:
    _, certificate = make_run(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == certificate.safetensors_metadata()
    assert all(isinstance(value, str) for value in certificate.safetensors_metadata().values())


# --- the published schema


def test_published_schema_is_the_models() -> None:
    assert json.loads(SCHEMA_PATH.read_text(encoding="utf-8")) == build_schema()


def violations(schema: Any, value: Any, root: Any, at: str = "$") -> list[str]:
    """A small JSON Schema checker for the keywords the published schema uses."""
    if "$ref" in schema:
        return violations(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root, at)
    branches = schema.get("anyOf") or schema.get("oneOf")
    if branches and all(violations(branch, value, root, at) for branch in branches):
        return [f"{at}: no branch fits"]
    kinds = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    found = []
    match schema.get("type"):
        case "number" if not is_number:
            found.append(f"{at}: not a number")
        case "integer" if not (is_number and value == int(value)):
            found.append(f"{at}: not an integer")
        case str(kind) if kind in kinds and not isinstance(value, kinds[kind]):
            return [f"{at}: not {kind}"]
    checks = {
        "minimum": lambda limit: value >= limit,
        "maximum": lambda limit: value <= limit,
        "exclusiveMinimum": lambda limit: value > limit,
        "exclusiveMaximum": lambda limit: value < limit,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "const": lambda constant: value == constant,
        "enum": lambda values: value in values,
    }
    found += [
        f"{at}: {k}" for k, c in checks.items() if not found and k in schema and not c(schema[k])
    ]
    if isinstance(value, dict):
        known = schema.get("properties", {})
        extra = schema.get("additionalProperties", True)
        found += [
            f"{at}: {name} is missing" for name in schema.get("required", []) if name not in value
        ]
        for name, item in value.items():
            if name in known:
                found += violations(known[name], item, root, f"{at}.{name}")
            elif extra is False:
                found.append(f"{at}: {name} is unknown")
            elif isinstance(extra, dict):
                found += violations(extra, item, root, f"{at}.{name}")
    if isinstance(value, list) and "items" in schema:
        for place, item in enumerate(value):
            found += violations(schema["items"], item, root, f"{at}[{place}]")
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_real_certificates_satisfy_the_published_schema(name) -> None:
    schema = json.loads(SCHEMA_PATH.read_text(encoding="utf-8"))
    certificate = certify(make_record(RECIPES[name]), delta=1e-5).sign(generate_key_pair()[0])
    plain = json.loads(certificate.to_bytes())
    assert violations(schema, plain, schema) == []
    for broken in (
        {"epsilon": -1}, {"delta": 0}, {"surprise": 1}, {"digest": "x"}, {"releases": 0},
        {"recipe": {"method": "retraining", "steps": 1}}, {"releasable": 1}, {"schedule": {}},
    ):  # fmt: skip
        assert violations(schema, plain | broken, schema), broken
        with pytest.raises(CertificateError):
            parse(rfc8785.dumps(plain | broken))


# --- what cannot be certified


def trace_with(**columns: Any) -> Trace:
    return replace(make_trace(GRADIENT), **columns)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trace": make_trace(replace(GRADIENT, steps=4))}, "the trace has 4 steps"),
        ({"trace": trace_with(learning_rate=[0.01] * 4 + [0.02])}, "learning_rate .* step 4"),
        ({"trace": trace_with(noise_std=[0.19] * 5)}, "noise_std .* step 0 and 4 more"),
        ({"trace": trace_with(clip_factor=[0.5] * 5)}, "longer than grad_clip"),
        ({"trace": trace_with(noise_norm=[0.9, 0.91, 4.0, 0.92, 0.93])}, "too long .* step 2"),
        ({"trace": trace_with(noise_norm=[0.9] * 5)}, "used again"),
        ({"noise": {"source": "none", "releasable": False}}, "draws noise"),
        ({"noise": SEEDED | {"releasable": True}}, "noise.releasable"),
        ({"resumed": 1}, "noise_keys is 1"),
        ({"parameters": 0}, "nothing was certified"),
        ({"execution": Execution(rounding=1e-12)}, "execution.rounding"),
        ({"centre": "b" * 64}, "the centre is the old model"),
        ({"start": "fresh"}, "starts from a model or from the centre"),
        ({"frozen": "a" * 64}, "frozen_names"),
        ({"buffers": "reset"}, "buffers is 'reset'"),
        ({"finetune": None}, "no fine-tuning is recorded"),
        ({"created": "yesterday"}, "created is 'yesterday'"),
        ({"created": "2025-11-15T22:00:00"}, "in UTC"),
        ({"parent": "a" * 64}, "must be given to check the chain"),
    ],
)
def test_contradictions_are_refused(changes, sentence) -> None:
    with pytest.raises(UnlearningError, match=sentence):
        certify(make_record(**changes), delta=1e-5)


@pytest.mark.parametrize(
    "recipe",
    [
        replace(GRADIENT, noise_std=0.0),
        replace(GRADIENT, start_clip=math.inf),
        replace(GRADIENT, grad_clip=math.inf),
        replace(MODEL, model_clip=math.inf),
        replace(MODEL, noise_std=0.0),
        replace(OUTPUT, noise_std=0.0),
        replace(OUTPUT, noise_std=1e-6),
    ],
)
def test_what_certifies_nothing_is_refused(recipe) -> None:
    with pytest.raises(UnlearningError, match="certifies nothing"):
        certify(make_record(recipe), delta=1e-5)


def test_a_tail_above_delta_is_refused() -> None:
    with pytest.raises(UnlearningError, match="certifies nothing"):
        certify(make_record(execution=Execution(rounding=1e-6, tail_delta=1e-4)), delta=1e-5)


def test_outside_the_clip_is_refused() -> None:
    trace = replace(make_trace(MODEL), model_norm=[0.6] * 6)
    with pytest.raises(UnlearningError, match="outside its clip"):
        certify(make_record(MODEL, trace=trace), delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1.0, math.nan])
def test_delta_is_checked(delta) -> None:
    with pytest.raises(InputError, match="delta"):
        certify(make_record(), delta=delta)


def test_noise_on_an_unclipped_start_still_certifies(tmp_path) -> None:
    """Infinite radii are written "inf"; the start noise alone carries this guarantee."""
    recipe = replace(GRADIENT, grad_clip=math.inf, start_noise_std=0.5)
    path, certificate = make_run(tmp_path, recipe)
    assert certificate.recipe.grad_clip == "inf"
    assert verify(path).epsilon == pytest.approx(
        guarantee(OutputPerturbation(0.05, 0.5), delta=1e-5).epsilon, rel=1e-9
    )


def test_a_real_record_file_is_all_a_later_certificate_needs(tmp_path) -> None:
    _, certificate = make_run(tmp_path)
    assert certify(RunRecord.load(tmp_path / "record.json"), delta=1e-5) == certificate


def test_every_field_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "certificate_format.md").read_text("utf-8")
    for name in (*CertificateWire.model_fields, *FinitePrecisionWire.model_fields):
        assert f"`{name}`" in text, name


def test_numbers_of_numpy_are_numbers() -> None:
    certificate = certify(make_record(), delta=1e-5, releases=np.int64(2))
    assert certificate == certify(make_record(), delta=1e-5, releases=2)
    json.dumps(certificate.safetensors_metadata())
    assert type(certificate.execution.releases) is int


def test_a_parent_is_a_certificate() -> None:
    with pytest.raises(InputError, match="parent is 'x'; it must be a Certificate"):
        certify(make_record(), delta=1e-5, parent="x")


@pytest.mark.parametrize("ids", [5, None, np.int64(5), np.array(5)])
def test_identifiers_are_a_list(ids: Any) -> None:
    with pytest.raises(InputError, match=r"ids is .*; it must be a list of identifiers"):
        read_ids(ids)
