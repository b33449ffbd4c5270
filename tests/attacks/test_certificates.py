"""Attempts to get a false certificate past ``certify`` and ``verify``: each of them must fail."""

import json
import os
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import rfc8785

import expunge
from expunge.certificates.certificate import Certificate, certify, derive, parse
from expunge.certificates.hashing import INDEX, hash_weights, write_safetensors
from expunge.certificates.identifiers import commit, commit_disjoint
from expunge.certificates.record import PublicTensors, RunRecord
from expunge.certificates.signing import generate_key_pair, read_public_key
from expunge.certificates.verification import verify
from expunge.certificates.wording import derive_scope
from expunge.errors import CertificateError, InputError, UnlearningError, VerificationError
from expunge.recipes import GradientClipping
from handmade import (
    GRADIENT,
    MODEL,
    OUTPUT,
    SALT,
    WEIGHTS,
    hash_of,
    make_record,
    make_run,
    make_trace,
)


def write(folder, certificate: Certificate):
    certificate.save(folder / "certificate.json")
    write_safetensors(folder / "model.safetensors", WEIGHTS, certificate.safetensors_metadata())
    return folder / "certificate.json"


def rewrite(certificate: Certificate, **changes: Any) -> Certificate:
    """What a careful forger writes: the changed certificate with its digest made right again."""
    draft = parse(rfc8785.dumps(certificate.model_dump(mode="json") | changes))
    return draft.model_copy(update={"digest": draft.compute_digest()})


# --- the certificate against its record


def test_forty_times_the_noise_of_the_record(tmp_path) -> None:
    """Consistent in itself, and sealed with the hash of a record that says otherwise."""
    record = make_record()
    record.save(tmp_path / "record.json")
    louder = replace(GRADIENT, noise_std=40 * GRADIENT.noise_std)
    forged = certify(make_record(louder, trace=make_trace(louder)), delta=1e-5)
    path = write(tmp_path, rewrite(forged, record=record.digest()))
    verify(path)
    with pytest.raises(VerificationError) as caught:
        verify(path, record=tmp_path / "record.json")
    for named in ("recipe.noise_std is 8", "epsilon is", "retrained.epsilon is", "schedule is"):
        assert named in str(caught.value)


def test_a_smaller_epsilon_than_the_recipe_gives(tmp_path) -> None:
    loud = replace(OUTPUT, noise_std=0.012)
    path, certificate = make_run(tmp_path, loud)
    assert certificate.epsilon > 5
    bound = {"epsilon": 0.5, "delta": 1e-5, "mu": certificate.mu}
    write(tmp_path, rewrite(certificate, epsilon=0.5, retrained=bound))
    with pytest.raises(VerificationError, match=r"retrained.epsilon is 0.5, which is too small"):
        verify(path)
    with pytest.raises(VerificationError, match=r"epsilon is 0.5, but the record gives"):
        verify(path, record=tmp_path / "record.json")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"device": "cuda"}, "device is 'cuda'"),
        ({"gradient_evaluations": 1}, "gradient_evaluations is 1"),
        ({"initialisation": "torch 7"}, "initialisation is 'torch 7'"),
        ({"versions": {}}, "versions"),
        ({"created": "2025-11-15T23:00:00+00:00"}, "created is"),
    ],
)
def test_any_field_that_the_record_does_not_give(change, named, tmp_path) -> None:
    path, certificate = make_run(tmp_path)
    write(tmp_path, rewrite(certificate, **change))
    verify(path)
    with pytest.raises(VerificationError, match=named):
        verify(path, record=tmp_path / "record.json")


def test_a_fine_tuning_that_is_not_told(tmp_path) -> None:
    """Other epochs than the record's need the record; none at all cannot have changed weights."""
    path, certificate = make_run(tmp_path)
    assert certificate.finetune is not None
    told = certificate.finetune.model_dump(mode="json")
    write(tmp_path, rewrite(certificate, finetune=told | {"epochs": 9.0}))
    verify(path)
    with pytest.raises(VerificationError, match=r"finetune.epochs is 9"):
        verify(path, record=tmp_path / "record.json")
    forged = rewrite(certificate, finetune=None)
    scope = derive_scope(forged).model_dump(mode="json")
    write(tmp_path, rewrite(forged, scope=scope))
    for record, named in ((None, "no fine-tuning is recorded"), ("record.json", "finetune.epochs")):
        with pytest.raises(VerificationError, match=named):
            verify(path, record=record and tmp_path / record)


def test_a_later_record_under_a_certificate_of_version_1(tmp_path) -> None:
    """Version 1 knows nothing of what is checked: it is no way around it."""
    record = make_record()
    record.save(tmp_path / "record.json")
    old = derive(
        record, delta=1e-5, compared_to="retrained", parent=None, releases=1,
        accept_unchecked=False, version=1,
    )  # fmt: skip
    path = write(tmp_path, old)
    with pytest.raises(VerificationError, match="later version"):
        verify(path, record=tmp_path / "record.json")
    assert "of version 1" in verify(path).statement()


def test_fields_of_another_version_are_refused() -> None:
    plain = certify(make_record(), delta=1e-5).model_dump(mode="json")
    with pytest.raises(CertificateError, match="belongs to version 2"):
        parse(rfc8785.dumps(plain | {"schema_version": 1}))
    del plain["accepted_unchecked"]
    with pytest.raises(CertificateError, match="accepted_unchecked is missing"):
        parse(rfc8785.dumps(plain))


# --- what was not checked


@pytest.mark.parametrize(
    "changes",
    [
        {"checked": False},
        {"checked": False, "forget": None, "retain": None},
        {"finetune": replace(make_record().finetune, checked=False)},
    ],
)
def test_unchecked_data_are_not_releasable(changes, tmp_path) -> None:
    record = make_record(**changes)
    record.save(tmp_path / "record.json")
    refused = certify(record, delta=1e-5)
    assert not refused.releasable
    assert any("not checked" in warning for warning in refused.warnings)
    assert not any("used retained data only" in sentence for sentence in refused.scope.covered)
    accepted = certify(record, delta=1e-5, accept_unchecked=True)
    assert accepted.releasable
    assert accepted.accepted_unchecked
    assert "accepted by the operator" in accepted.statement()
    verify(write(tmp_path, accepted), record=tmp_path / "record.json")
    with pytest.raises(VerificationError, match="warnings is"):
        verify(write(tmp_path, rewrite(refused, accepted_unchecked=True)))
    with pytest.raises(VerificationError, match=r"releasable is True"):
        verify(write(tmp_path, rewrite(refused, releasable=True, warnings=[])))


def test_accepting_what_was_checked_says_nothing() -> None:
    one = certify(make_record(), delta=1e-5, accept_unchecked=True)
    assert one == certify(make_record(), delta=1e-5)


@pytest.mark.parametrize("compared", [True, False])
def test_public_tensors_are_named_and_said_to_be_compared_or_not(compared, tmp_path) -> None:
    public = PublicTensors(("embed.weight", "bn.mean"), compared, "base.safetensors", "e" * 64)
    path, certificate = make_run(tmp_path, public=public)
    assert certificate.weights.public.names == ("embed.weight", "bn.mean")
    text = certificate.statement()
    assert "embed.weight, bn.mean" in text
    assert ("compared bit for bit with base.safetensors" in text) == compared
    assert ("declared public by the operator, not compared" in text) == (not compared)
    claimed = json.loads(certificate.to_bytes())["weights"]
    claimed["public"]["compared"] = not compared
    forged = rewrite(certificate, weights=claimed)
    write(tmp_path, rewrite(forged, scope=derive_scope(forged).model_dump(mode="json")))
    with pytest.raises(VerificationError, match=r"weights.public.compared is"):
        verify(path, record=tmp_path / "record.json")


def test_a_chain_keeps_what_was_declared_public(tmp_path) -> None:
    declared = PublicTensors(("w",), False, "names", "e" * 64)
    parent = certify(make_record(public=declared), delta=1e-5)
    fitting = {"weights_before": parent.weights.after}
    with pytest.raises(UnlearningError, match="the frozen part is"):
        certify(
            make_record(**fitting, public=replace(declared, hash="d" * 64)),
            delta=1e-5, parent=parent,
        )  # fmt: skip
    for public in (declared, replace(declared, compared=True, hash="d" * 64)):
        assert certify(make_record(**fitting, public=public), delta=1e-5, parent=parent).parent


# --- numbers that say nothing


def test_delta_and_epsilon_against_the_number_of_samples() -> None:
    people = commit([f"u{n}" for n in range(1390)], SALT)
    record = make_record(retain=people)
    n = 1392
    for delta, releasable, words in (
        (0.5, False, f"delta is above 1/{n}"),
        (1.01 / n, False, f"delta is above 1/{n}"),
        (0.99 / n, True, f"Delta is above 1/{10 * n}"),
        (0.09 / n, True, None),
    ):
        found = certify(record, delta=delta)
        assert found.releasable == releasable
        assert (words is None and not found.warnings) or words in found.warnings[0]
    many = make_record(retain=replace(people, samples=10**6))
    assert not certify(many, delta=0.99 / n).releasable
    loud = certify(make_record(replace(OUTPUT, noise_std=0.008)), delta=1e-5)
    assert loud.epsilon > 10
    assert any("Epsilon is above 10" in warning for warning in loud.warnings)


def test_releases_are_an_argument_and_never_fewer_than_the_record_says() -> None:
    execution = make_record().execution
    one, four = (certify(make_record(), delta=1e-5, releases=n) for n in (1, 4))
    assert four.mu == pytest.approx(2 * one.mu, rel=1e-12)
    told = make_record(execution=replace(execution, releases=4))
    assert certify(told, delta=1e-5, releases=2).releases == 4
    with pytest.raises(InputError, match="releases"):
        certify(make_record(), delta=1e-5, releases=0)


def test_a_product_next_to_one() -> None:
    for product in (1 - 1e-10, 1 - 1e-7, 1.0):
        with pytest.raises(InputError, match=r"learning_rate \* weight_decay"):
            replace(GRADIENT, learning_rate=product / 8, weight_decay=8.0)


def test_the_nearest_product_that_is_accepted_verifies(tmp_path) -> None:
    recipe = GradientClipping(
        start_clip=5.0, grad_clip=0.0, learning_rate=(1 - 1.1e-6) / 8, weight_decay=8.0, steps=1,
        noise_std=1e-5,
    )  # fmt: skip
    still = replace(make_trace(recipe), gradient_norm=[0.0])
    path, certificate = make_run(tmp_path, recipe, trace=still)
    assert verify(path, record=tmp_path / "record.json") == certificate


# --- identifiers


def test_names_that_differ_only_in_normalisation() -> None:
    with pytest.raises(InputError, match="in forget_ids too"):
        commit_disjoint(["Jose\u0301"], ["Jos\u00e9", "x"])
    with pytest.raises(InputError, match="forget_ids"):
        commit_disjoint([], ["x"])


# --- keys and times


@pytest.mark.parametrize(
    "key",
    [
        "01" + "00" * 31, "00" * 32, "01" + "00" * 30 + "80", "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f", "ee" + "ff" * 30 + "7f", "ff" * 32,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa",
    ],
)  # fmt: skip
def test_keys_that_bind_nobody(key, tmp_path) -> None:
    """Under a key of small order, one signature fits many messages."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    path, certificate = make_run(tmp_path)
    value = "01" + "00" * 63
    signature = {"algorithm": "Ed25519", "public_key": key, "value": value}
    parse(rfc8785.dumps(certificate.model_dump(mode="json") | {"signature": signature})).save(path)
    with pytest.raises(VerificationError, match="signature does not match"):
        verify(path)
    point = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
    pem = point.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    with pytest.raises(InputError, match="public key"):
        read_public_key(pem)
    assert read_public_key(generate_key_pair()[1])


@pytest.mark.parametrize("time", ["9999-12-31T23:59:59+00:00", "2345-01-01T00:00:00+00:00"])
def test_times_far_ahead(time, tmp_path) -> None:
    with pytest.raises(UnlearningError, match="ten years ahead"):
        certify(make_record(created=time), delta=1e-5)
    path, certificate = make_run(tmp_path)
    write(tmp_path, rewrite(certificate, created=time))
    with pytest.raises(VerificationError, match="ten years ahead"):
        verify(path)


# --- files


@pytest.mark.parametrize("which", ["certificate", "weights", "record", "parent", "public_key"])
def test_a_pipe_is_refused_at_once(which, tmp_path) -> None:
    path, certificate = make_run(tmp_path)
    certificate.sign(generate_key_pair()[0]).save(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    given = {"certificate": path} | {which: pipe}
    with pytest.raises(CertificateError, match="not a regular file"):
        verify(**given)
    with pytest.raises(CertificateError, match="not a regular file"):
        verify(**(given | {which: "/dev/zero"}))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "x\0y", "nowhere"])
def test_an_index_that_names_no_file_beside_it(name, tmp_path) -> None:
    index = {"metadata": {"total_size": 8}, "weight_map": {"w": name}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CertificateError):
        hash_weights(tmp_path / INDEX)


def test_a_lone_surrogate_in_a_name(tmp_path) -> None:
    header = b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    (tmp_path / "m").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CertificateError, match="unusable header"):
        hash_weights(tmp_path / "m")
    with pytest.raises(InputError, match="tensor name"):
        write_safetensors(tmp_path / "n", {"a\ud800": ("F32", (2,), bytes(8))})
    plain = make_record().to_dict() | {"device": "\ud800"}
    with pytest.raises(CertificateError, match="not a usable record"):
        RunRecord.from_dict(plain).digest()


# --- JSON games


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"epsilon":', '"epsilon":0.1,"epsilon":', 1),
        lambda text: text.replace("{", "{ ", 1),
        lambda text: text.replace('"delta":0.00001', '"delta":1e-5'),
        lambda text: text.replace('"releases":1', '"releases":1.0'),
        lambda text: text.replace('"releasable":true', '"releasable":1'),
        lambda text: text.replace('"device":"cpu"', '"device":"c\\u0070u"'),
        lambda text: text.replace('"resumed":0', '"resumed":-0'),
        lambda text: text.replace('"survival_bound":', '"survival_bound":NaN,"x":'),
        lambda text: "\ufeff" + text,
        lambda text: text + "\n",
    ],
)
def test_another_spelling_of_the_same_certificate(change, tmp_path) -> None:
    path, _ = make_run(tmp_path, MODEL)
    text = path.read_text(encoding="utf-8")
    changed = change(text)
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    with pytest.raises((CertificateError, VerificationError)):
        verify(path)


def test_seeded_noise_is_never_releasable() -> None:
    seeded = {"source": "seeded", "generator": "AES-256-CTR", "releasable": False, "seed": 3}
    assert not certify(make_record(noise=seeded), delta=1e-5, accept_unchecked=True).releasable
    with pytest.raises(UnlearningError, match=r"noise.releasable"):
        certify(make_record(noise=seeded | {"releasable": True}), delta=1e-5)
    with pytest.raises(InputError, match=r"noise.source"):
        make_record(noise=seeded | {"source": "constant key"})


def test_weights_of_another_run(tmp_path) -> None:
    path, _ = make_run(tmp_path)
    tensors = WEIGHTS | {"steps": ("I64", (), (8).to_bytes(8, "little"))}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(VerificationError, match=hash_of(tensors)):
        verify(path)


@pytest.mark.parametrize(
    "name", ["p1\r", "\ufeffp1", "p1 ", "p1\u00a0", "p\u200b1", "p1\0", "", " ", "p\u202e1"]
)
def test_identifiers_that_differ_only_in_what_nobody_sees(name) -> None:
    with pytest.raises(InputError, match="visible text"):
        commit_disjoint([name], ["p1", "p2"])


def test_an_identifier_of_five_thousand_digits() -> None:
    with pytest.raises(InputError, match=r"2\*\*63"):
        commit_disjoint([10**5000], ["p1"])


@pytest.mark.parametrize(
    "character",
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u180b\u180f\u200f\u2060\u206f\u3164\ufe00\ufe0f\uffa0\ufff0"
    "\U0001bca0\U0001d173\U000e0001\U000e0061\U000e0fff",
)
def test_identifiers_with_characters_that_nobody_is_shown(character) -> None:
    with pytest.raises(InputError, match="visible text"):
        commit([f"p{character}1"])


# --- heads built to forget


@pytest.fixture
def head_runs():
    """Solved from zero, noisy, noisy again for people who are gone already; and of exact sums."""
    rng = np.random.default_rng(0)
    x, y, ids = rng.normal(size=(60, 5)), np.arange(60) % 3, [f"p{i}" for i in range(60)]
    ridge = expunge.StatisticsHead(expunge.Features(), classes=3)
    convex = expunge.ConvexHead(expunge.Features(), classes=3, weight_decay=1e-3)
    for head in (ridge, convex):
        head.learn((x, y), ids=ids)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="already forgotten")
        return {
            "exact": ridge.forget(["p0"]),
            "exact again": ridge.forget(["p0"]),
            "zero": convex.forget(["p0"]),
            "noisy": convex.forget(["p1"], epsilon=1.0, delta=1e-5),
            "noisy again": convex.forget(["p1"], epsilon=1.0, delta=1e-5),
        }


def test_a_request_about_people_who_are_gone_already(head_runs, tmp_path) -> None:
    for name in ("exact again", "noisy again"):
        run = head_runs[name]
        assert run.record.forget.samples == 0
        certificate = certify(run.record, delta=1e-5)
        folder = tmp_path / name
        expunge.write_run(folder, model=run.model, record=run.record, certificate=certificate)
        read = RunRecord.load(folder / "record.json")
        assert read.forget == run.record.forget
        verify(folder / "certificate.json", record=folder / "record.json")
        for file in ("record.json", "report.html"):
            assert (folder / file).stat().st_mode & 0o077 == 0


def test_delta_is_compared_with_all_rows_of_a_head(head_runs) -> None:
    record = head_runs["noisy"].record
    assert certify(record, delta=1e-5).releasable
    above = certify(record, delta=1 / 58.5)
    assert "delta is above 1/59, one over" in " ".join(above.warnings)
    assert not above.releasable


def test_what_voids_a_noisy_head(head_runs) -> None:
    found = {name: certify(run.record, delta=1e-5) for name, run in head_runs.items()}
    copied = "more noisy releases were made from one start (a copied state) than are counted here"
    assert [copied in found[name].scope.void_if for name in ("exact", "zero", "noisy")] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("head", "note", "p0 was a patient"),
        ("head", "loss", "p0"),
        ("head", "regularisation", "p0"),
        ("features", "note", "p0"),
        ("features", "evaluation", "by magic"),
        ("features", "format", "p0"),
        ("features", "network", "p0"),
        ("features", "code", None),
    ],
)
def test_text_in_the_description_of_a_head(head_runs, part, key, value) -> None:
    record, plain = head_runs["exact"].record, certify(head_runs["exact"].record, delta=1e-5)
    told = dict(getattr(record.statistics, part)) | {key: value}
    if value is None:
        del told[key]
    statistics = replace(record.statistics, **{part: told})
    with pytest.raises((CertificateError, UnlearningError)):
        certify(replace(record, statistics=statistics), delta=1e-5)
    wire = plain.model_dump(mode="json")
    wire["statistics"][part] = told
    with pytest.raises(CertificateError):
        parse(rfc8785.dumps(wire))


@pytest.mark.parametrize(
    ("name", "start"),
    [("exact", "model"), ("zero", "model"), ("zero", "centre"), ("noisy", "fresh")],
)
def test_a_head_that_started_elsewhere(head_runs, name, start) -> None:
    with pytest.raises(UnlearningError, match=f"start is '{start}'"):
        certify(replace(head_runs[name].record, start=start), delta=1e-5)


def test_a_ridge_beyond_all_noise() -> None:
    head = expunge.ConvexHead(expunge.Features(), classes=3, weight_decay=1e300)
    head.learn((np.eye(6), np.arange(6) % 3), ids=range(6))
    with pytest.raises(InputError, match="weight_decay is 1e"):
        head.forget([0], epsilon=1.0, delta=1e-5)
    assert len(head) == 6


def test_noise_for_nobody(head_runs, tmp_path) -> None:
    with pytest.raises(UnlearningError, match="forget is missing"):
        certify(replace(head_runs["noisy"].record, forget=None), delta=1e-5)


def test_a_noisy_head_that_is_released_again_names_the_same_people(tmp_path) -> None:
    rng = np.random.default_rng(0)
    head = expunge.ConvexHead(
        expunge.Features(), classes=3, weight_decay=1e-3, state=tmp_path / "state"
    )
    head.learn((rng.normal(size=(60, 5)), np.arange(60) % 3), ids=range(60))
    run = head.forget([1, 2], epsilon=1.0, delta=1e-5)
    again = expunge.load(tmp_path / "state").release()
    assert again.record.weights_after == run.record.weights_after
    assert (again.record.forget.count, again.record.forget.samples) == (2, 2)
    assert certify(again.record, delta=1e-5).releasable
