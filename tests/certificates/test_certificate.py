"""Certificates: what they say, what they keep to themselves, and what is refused."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import rfc8785

from expunge.accounting.guarantee import guarantee
from expunge.certificates.certificate import Certificate, certify, check_clock
from expunge.certificates.people import commit
from expunge.certificates.record import Applied, Noise, Tensors, Trace, Weights
from expunge.certificates.signing import generate_key_pair
from expunge.certificates.verification import verify
from expunge.errors import CertificateError, InputError, UnlearningError
from expunge.recipes import Execution, GradientClipping, OutputPerturbation, Retraining
from tests.helpers.sample_releases import (
    CREATED,
    NOISY,
    NONCE,
    SALT,
    make_linear,
    make_noisy,
    make_record,
    make_release,
    make_shards,
    make_tensors,
    make_trace,
    save_release,
)

TENSORS = make_tensors()
KINDS = ["retraining", "linear-model", "shards", *NOISY]
GRADIENT = NOISY["gradient-clipping"]


def make(kind: str, **given: Any):
    match kind:
        case "retraining":
            return make_record(TENSORS, **given)
        case "linear-model":
            return make_linear(TENSORS, **given)
        case "shards":
            return make_shards(**given)[1]
        case _:
            return make_noisy(TENSORS, kind, **given)


# --- what a certificate says
@pytest.mark.parametrize("compared_to", ["retrained", "centre"])
@pytest.mark.parametrize("kind", KINDS)
def test_certificate_states_the_guarantee(kind, compared_to) -> None:
    record = make(kind)
    certificate = certify(record, compared_to=compared_to)
    expected = guarantee(
        record.recipe, delta=1e-5, compared_to=compared_to, execution=record.execution
    )
    assert (certificate.epsilon, certificate.mu) == (expected.epsilon, expected.mu)
    assert certificate.survival_bound == expected.survival_bound
    assert certificate.recipe == record.recipe
    assert certificate.execution == record.execution
    assert certificate.delta == (1e-5 if kind in NOISY else 0.0)
    assert certificate.releasable
    assert Certificate.from_bytes(certificate.to_bytes()) == certificate


def test_what_finite_precision_costs_is_in_the_numbers() -> None:
    execution = Execution(rounding=1e-4, tail_delta=1e-8)
    certificate = certify(make("gradient-clipping", execution=execution))
    assert certificate.epsilon > guarantee(GRADIENT, delta=1e-5).epsilon + 1e-4
    assert "rounding 0.0001, tail 1e-08; epsilon and delta include them" in str(certificate)


def test_the_operators_code_is_named_and_said_to_be_theirs() -> None:
    for kind in KINDS:
        words = certify(make(kind)).statement()
        assert "is the operator's. Its source, hashed with a secret salt: build 1111" in words
        for expected in ("scalers, vocabularies and encoders", "by looking at those who leave"):
            assert expected in words
    from expunge.certificates.record import Code

    assert "None of it has a source" in certify(make("retraining", code=Code())).statement()


def test_published_tensors_are_the_operators_word_or_compared() -> None:
    words = certify(make("retraining")).statement()
    assert "1 released tensors that are as build() gave them, published, says the operator" in words
    weights = make("retraining").weights
    seen = Tensors(names=("norm.count",), hash="c" * 64, compared="bert.safetensors")
    compared = weights.model_copy(update={"published": seen})
    words = certify(make("retraining", weights=compared)).statement()
    assert "compared bit for bit with bert.safetensors: norm.count" in words


def test_scope_follows_the_run() -> None:
    plain = certify(make("gradient-clipping"))
    assert "one vector, which was clipped and noised" in plain.statement()
    rich = make(
        "gradient-clipping", start="centre", origin="zero", buffers=("bn.mean",),
        missing=("head.weight",), unchanged=("embed",),
        applied=(Applied(note="int8", before="9" * 64, after=plain.weights.after),),
    )  # fmt: skip
    words = certify(rich, releases=3).statement()
    for expected in (
        "began at the public centre, zero, and never used the old model",
        "estimated again", "All 3 released runs", "never trained, says the operator: embed",
        "applied to the released tensors alone: int8", "by a function of the operator",
    ):  # fmt: skip
        assert expected in words
    assert "train_without_ann" not in words, "a function's name may quote somebody's"
    lacking = certify(make("gradient-clipping", missing=("head.weight",))).statement()
    assert "the old model lacks, and they began there: head.weight" in lacking


def test_shards_and_linear_models_say_what_they_are() -> None:
    words = certify(make("shards")).statement()
    assert "All 2 constituents, trained on 100 examples" in words
    assert certify(make("shards")).sharding.trained_from == ()
    secret = make("shards").environment.model_copy(update={"deterministic": False})
    assert "Gupta" in certify(make("shards", environment=secret)).statement()
    linear = certify(make("linear-model"))
    assert "every row became integers by itself" in linear.statement()
    stated = linear.statistics.model_copy(
        update={"features": {"network": "4" * 64, "evaluation": "tested"}}
    )
    tested = certify(make("linear-model", statistics=stated))
    assert "tested: others change no bit" in tested.statement()
    nobody = commit([], 0)
    assert certify(make("linear-model", forget=nobody)).forget.count == 0, "before any request"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise": Noise(source="seeded", generator="AES-256-CTR", keys=1)}, "seed"),
        ({"grid": 0.0}, "grid"),
        (
            {"retained": commit(["x"], 10**6), "training": None, "buffers": ("norm.running_mean",)},
            "delta is above",
        ),
    ],
)
def test_not_for_release(changes, words, tmp_path) -> None:
    release = save_release(tmp_path / "run", "gradient-clipping", **changes)
    certificate = release.certificate
    assert not certificate.releasable
    assert certificate.warnings[0].startswith("Not for release")
    assert words in certificate.warnings[0]
    assert certificate.warnings[0] in certificate.statement()
    assert certificate.warnings[0] in str(certificate)
    assert verify(tmp_path / "run").certificate == certificate


def test_other_warnings_are_for_the_reader() -> None:
    weak = replace(GRADIENT, noise_std=0.004)
    given = {"execution": Execution(rounding=1e-7), "trace": make_trace(weak, 15)}
    found = certify(make_noisy(TENSORS, recipe=weak, **given))
    assert found.warnings == ("Epsilon is above 10: the bound says little.",)
    assert found.releasable
    near = certify(make("gradient-clipping"), delta=1e-3)
    assert near.warnings == ("Delta is above 1/1050, a tenth of one over the number of samples.",)


def test_statement_never_rounds_a_bound_down() -> None:
    certificate = certify(make("gradient-clipping"))
    text = certificate.statement()
    shown = float(re.search(r"epsilon = ([\d.]+),", text)[1])
    assert certificate.epsilon <= shown < certificate.epsilon * 1.00001
    factor = float(re.search(r"at most ([\d.]+) times", text)[1])
    assert math.exp(certificate.epsilon) <= factor < math.exp(certificate.epsilon) * 1.00001
    chance = float(re.search(r"At most ([\d.]+) %", text)[1])
    assert 100 * certificate.survival_bound <= chance < 101 * certificate.survival_bound
    assert "exactly as likely" in certify(make("retraining")).statement()
    assert f"epsilon = {shown}" in str(certificate)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_no_certificate(kind) -> None:
    plain = json.loads(certify(make(kind)).sign(generate_key_pair()[0]).to_bytes())
    for broken in (
        {"epsilon": -1}, {"delta": 1}, {"surprise": 1}, {"digest": "x"}, {"execution": 0},
        {"recipe": {"method": "magic"}}, {"releasable": 1}, {"buffers": {}}, {"schema_version": 2},
        {"seed": "abc"}, {"seed": "7"},
    ):  # fmt: skip
        with pytest.raises(CertificateError, match=next(iter(broken))):
            Certificate.from_bytes(rfc8785.dumps(plain | broken))
    schema = Certificate.model_json_schema()
    assert set(schema["properties"]) == set(plain), "what docs/certificate_format.md points to"


# --- what cannot be certified; more of it in tests/attacks/test_edits.py
def trace_with(**columns: Any) -> Trace:
    return make_trace(GRADIENT, 15).model_copy(update=columns)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"trace": make_trace(replace(GRADIENT, steps=2, noise_std=0.02), 15)}, "has 2 steps"),
        ({"trace": None}, "the trace has 0 steps; the recipe has 3"),
        ({"trace": trace_with(learning_rate=(1e-4, 1e-4, 0.1))}, "learning_rate .* step 2"),
        ({"trace": trace_with(noise_std=(0.01, 0.01, 0.01))}, "noise_std .* step 0"),
        ({"trace": trace_with(noise_norm=(0.08, 0.1, 4.0))}, "too long .* step 2"),
        ({"trace": trace_with(noise_norm=(0.1,) * 3), "parameters": 17}, "used again"),
        ({"resumed": 1}, "noise.keys is 1"),
        ({"execution": Execution(rounding=1e-12)}, "rounding is 1e-12"),
        ({"retained": commit([], 0), "training": None}, "nothing was learned"),
        ({"weights": Weights(after="b" * 64, start="a" * 64, noisy="d" * 64, old="a" * 64)},
         "build.. gave the old model itself"),
        ({"parent": "a" * 64}, "must be given to check the chain"),
        ({"statistics": make_linear(TENSORS).statistics}, "statistics must be given exactly"),
        ({"sharding": make_shards()[1].sharding}, "sharding must be given exactly"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(changes, sentence) -> None:
    with pytest.raises(UnlearningError, match=sentence):
        certify(make("gradient-clipping", **changes))


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("retraining", {"training": None}, "training is missing"),
        ("retraining", {"missing": ("w",)}, "no old model was used"),
        ("shards", {"recipe": Retraining()}, "sharding must be given exactly"),
    ],
)
def test_contradictions_of_exact_runs_are_refused(kind, changes, sentence) -> None:
    record = make(kind).model_copy(update=changes)
    with pytest.raises(UnlearningError, match=sentence):
        certify(record)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hashes": ("1" * 64,)}, "must have 3 samples"),
        ({"trained_from": (0, 5, 0)}, "a slice from 1 to 4"),
        ({"hashes": ("1" * 64,) * 3}, "a shard without samples"),
    ],
)
def test_shards_that_do_not_fit_are_refused(changes, sentence) -> None:
    record = make("shards")
    stated = record.sharding.model_copy(update=changes)
    with pytest.raises(UnlearningError, match=sentence):
        certify(record.model_copy(update={"sharding": stated}))


@pytest.mark.parametrize(
    "recipe",
    [
        replace(GRADIENT, noise_std=0.0), replace(GRADIENT, start_clip=math.inf),
        replace(GRADIENT, grad_clip=math.inf), OutputPerturbation(start_clip=0.01, noise_std=1e-6),
    ],
)  # fmt: skip
def test_what_certifies_nothing_is_refused(recipe) -> None:
    with pytest.raises(UnlearningError, match="certifies nothing"):
        certify(make_noisy(TENSORS, recipe=recipe, trace=make_trace(recipe, 15)))


def test_a_tail_above_delta_and_a_wrong_delta_are_refused() -> None:
    with pytest.raises(UnlearningError, match="certifies nothing"):
        certify(make("gradient-clipping", execution=Execution(rounding=1e-6, tail_delta=1e-4)))
    for delta in (0.0, 1.0, -1.0, math.nan):
        with pytest.raises(InputError, match="delta"):
            certify(make("gradient-clipping"), delta=delta)


def test_noise_on_an_unclipped_start_still_certifies(tmp_path) -> None:
    """Infinite radii are written "inf"; the start noise alone carries this guarantee."""
    recipe = GradientClipping(
        start_clip=0.05, grad_clip=math.inf, learning_rate=1e-4, weight_decay=1.0, steps=2,
        noise_std=0.1, start_noise_std=0.5,
    )  # fmt: skip
    record = make_noisy(TENSORS, recipe=recipe, trace=make_trace(recipe, 15))
    release = make_release(record, TENSORS)
    release.save(tmp_path / "run")
    assert json.loads(release.certificate.to_bytes())["recipe"]["grad_clip"] == "inf"
    alone = guarantee(OutputPerturbation(0.05, 0.5), delta=1e-5).epsilon
    assert verify(tmp_path / "run").certificate.epsilon == pytest.approx(alone, rel=1e-6)


# --- clocks
def test_a_wrong_clock_is_refused_at_writing() -> None:
    first = certify(make("retraining"))
    later = {"parent": first.sha256, "created": "2026-11-16T22:00:00+00:00"}
    assert certify(make("retraining", **later), parent=first).parent == first.sha256
    assert check_clock(CREATED, first) == []
    for created, sentence in (
        ("2026-11-15T21:59:59+00:00", "before its parent"),
        ("2033-01-01T00:00:00+00:00", "more than 5 years after its parent .* is it right"),
    ):
        with pytest.raises(UnlearningError, match=sentence):
            certify(make("retraining", **(later | {"created": created})), parent=first)


# --- privacy: what stays in the record
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_that_no_noise_covers_is_published(kind) -> None:
    record = make(kind)
    text = certify(record).to_bytes().decode()
    for secret in (SALT, NONCE, "e" * 64, "train_without_ann", *record.forget.leaves):
        assert secret not in text
    columns = Trace.model_fields if record.trace is not None else ()
    for column in columns:
        if column not in ("learning_rate", "noise_std"):
            assert column not in text
            for value in getattr(record.trace, column):
                assert value in (0.0, 1.0, False) or repr(value) not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": make("gradient-clipping").weights.model_copy(update={"old": "7" * 64})},
        {"trace": trace_with(noise_norm=(0.07, 0.1, 0.12))}, {"nonce": "7" * 64},
        {"salt": "7" * 64}, {"earlier": (commit(["x"], 1),)},
        {"forget": commit(["ann", "bob"], 5, salt=SALT)},
    ],
)  # fmt: skip
def test_what_is_private_changes_only_the_blinded_hash(changes) -> None:
    one, other = (certify(make("gradient-clipping", **c)).model_dump() for c in ({}, changes))
    assert {name for name in one if one[name] != other[name]} == {"record", "digest"}
