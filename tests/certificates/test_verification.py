"""Verification: tampering, unusable input, signatures and chains of requests."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest
import rfc8785

from expunge.certificates.certificate import Certificate, certify, parse
from expunge.certificates.hashing import write_safetensors
from expunge.certificates.signing import generate_key_pair
from expunge.certificates.verification import verify, verify_chain
from expunge.errors import CertificateError, InputError, UnlearningError, VerificationError
from handmade import (
    GRADIENT,
    WEIGHTS,
    hash_of,
    make_record,
    make_run,
    make_trace,
)


def rewrite(certificate: Certificate, **changes: Any) -> Certificate:
    """What a careful forger writes: the changed certificate with its digest made right again."""
    plain = certificate.model_dump(mode="json") | changes
    draft = parse(rfc8785.dumps(plain))
    return draft.model_copy(update={"digest": draft.compute_digest()})


def forge(folder, certificate: Certificate, **changes: Any):
    """The forged certificate beside weights whose metadata was forged to match."""
    forged = rewrite(certificate, **changes)
    forged.save(folder / "certificate.json")
    write_safetensors(folder / "model.safetensors", WEIGHTS, forged.safetensors_metadata())
    return folder / "certificate.json"


# --- tampering, by a forger who repairs the digest and the weights' metadata


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda c: {"epsilon": c["epsilon"] * 0.999}, "epsilon is"),
        (lambda c: {"delta": c["delta"] / 2}, "delta"),
        (lambda c: {"mu": 0.1}, "mu is"),
        (lambda c: {"compared_to": "centre"}, "epsilon is"),
        (lambda c: {"theorem": "trust me"}, "theorem"),
        (
            lambda c: {
                "epsilon": 0.5, "retrained": {**c["retrained"], "epsilon": 0.5},
                "finite_precision": {**c["finite_precision"], "epsilon_cost": 0},
            },
            r"retrained.epsilon is 0.5, which is too small",
        ),
        (
            lambda c: {
                "epsilon": 9.5, "retrained": {**c["retrained"], "epsilon": 9.5},
            },
            r"retrained.epsilon is 9.5, which is not what the run gives",
        ),
        (lambda c: {"centre": {**c["centre"], "epsilon": 0.1}}, "centre.epsilon is 0.1"),
        (lambda c: {"centre": {**c["centre"], "mu": 0.1}}, "centre.mu is 0.1"),
        (lambda c: {"centre": None}, "centre is missing"),
        (lambda c: {"survival_bound": 0.01}, "survival_bound is 0.01"),
        (lambda c: {"recipe": {**c["recipe"], "noise_std": 0.3}}, "schedule is"),
        (lambda c: {"recipe": {**c["recipe"], "steps": 4}}, "schedule is"),
        (
            lambda c: {
                "recipe": {**c["recipe"], "noise_std": 0.3},
                "schedule": [{**c["schedule"][0], "noise_std": 0.3}],
            },
            "not what the run gives",
        ),
        (
            lambda c: {
                "recipe": {**c["recipe"], "start_clip": 0.06},
            },
            "retrained.epsilon is .* too small",
        ),
        (lambda c: {"schedule": [{**c["schedule"][0], "steps": 4}]}, "schedule is"),
        (lambda c: {"schedule": []}, "schedule is"),
        (
            lambda c: {"finite_precision": {**c["finite_precision"], "rounding": 0}},
            "its grid costs at least",
        ),
        (
            lambda c: {"finite_precision": {**c["finite_precision"], "tail_delta": 1e-7}},
            "retrained.epsilon is .* too small",
        ),
        (
            lambda c: {"finite_precision": {**c["finite_precision"], "ideal_epsilon": 0.1}},
            "ideal_epsilon is 0.1",
        ),
        (lambda c: {"releases": 2}, "retrained.epsilon is .* too small"),
        (lambda c: {"releasable": False}, "releasable is False"),
        (lambda c: {"warnings": ["all is well"]}, "warnings is"),
        (lambda c: {"noise": {**c["noise"], "source": "seeded"}}, "releasable is True"),
        (lambda c: {"noise": {**c["noise"], "keys": 2}}, "noise.keys is 2"),
        (lambda c: {"scope": {**c["scope"], "not_covered": []}}, "scope is"),
        (lambda c: {"weights": {**c["weights"], "after": "0" * 64}}, "weights.after is 0000"),
        (lambda c: {"weights": {**c["weights"], "before": "0" * 64}}, "weights.before"),
        (lambda c: {"created": "never"}, "created is 'never'"),
        (lambda c: {"parent": "0" * 64}, "weights.before"),
    ],
)  # fmt: skip
def test_forgeries_are_named(change, named, tmp_path) -> None:
    _, certificate = make_run(tmp_path)
    path = forge(tmp_path, certificate, **change(certificate.model_dump(mode="json")))
    with pytest.raises(VerificationError, match=named):
        verify(path)


@pytest.mark.parametrize(
    "change",
    [
        {"device": "cuda"}, {"dtype": "bfloat16"}, {"gradient_evaluations": 1}, {"versions": {}},
        {"data": {"forget": None, "retain": None, "checked": True}}, {"finetune": None},
        {"record": "1" * 64}, {"parameters": 19}, {"start": "centre"}, {"resumed": 1},
    ],
)  # fmt: skip
def test_facts_that_nothing_recomputes_are_held_by_digest_and_signature(change, tmp_path) -> None:
    private, public = generate_key_pair()
    _, certificate = make_run(tmp_path)
    signed = certificate.sign(private)
    plain = signed.model_dump(mode="json")
    (tmp_path / "certificate.json").write_bytes(rfc8785.dumps(plain | change))
    with pytest.raises(VerificationError, match=r"digest is .*signature does not match"):
        verify(tmp_path / "certificate.json", public_key=public)
    path = forge(tmp_path, signed, **change)
    with pytest.raises(VerificationError, match="signature does not match"):
        verify(path)


def test_every_difference_is_named_at_once(tmp_path) -> None:
    path, certificate = make_run(tmp_path)
    plain = certificate.model_dump(mode="json")
    plain |= {"theorem": "x", "survival_bound": 0.5, "releasable": False}
    path.write_bytes(json.dumps(plain).encode())
    tensors = WEIGHTS | {"body.bias": ("F32", (3,), bytes(12))}
    write_safetensors(tmp_path / "model.safetensors", tensors, {"format": "np"})
    with pytest.raises(VerificationError) as caught:
        verify(path)
    for named in (
        "canonical form", "digest is", "theorem is", "survival_bound is 0.5", "releasable is",
        "weights.after is", "metadata of",
    ):  # fmt: skip
        assert named in str(caught.value)
    assert caught.value.exit_code == 1


def test_the_record_is_checked_when_given(tmp_path) -> None:
    path, _ = make_run(tmp_path)
    other = make_record(gradient_evaluations=1)
    other.save(tmp_path / "other.json")
    with pytest.raises(VerificationError, match="but the record's hash is"):
        verify(path, record=tmp_path / "other.json")
    make_record(trace=make_trace(replace(GRADIENT, steps=4))).save(tmp_path / "short.json")
    with pytest.raises(VerificationError, match=r"record: .* the trace has 4 steps"):
        verify(path, record=tmp_path / "short.json")


def test_weights_saved_by_safetensors_itself_hold(tmp_path) -> None:
    path, certificate = make_run(tmp_path)
    for metadata in (None, {"format": "pt"}):
        write_safetensors(tmp_path / "plain.safetensors", WEIGHTS, metadata)
        assert verify(path, tmp_path / "plain.safetensors") == certificate
    write_safetensors(tmp_path / "plain.safetensors", WEIGHTS, {"format": "pt", "note": "hi"})
    with pytest.raises(VerificationError, match="metadata"):
        verify(path, tmp_path / "plain.safetensors")


# --- unusable input


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "must be JSON"),
        (b"\x89PNG", "must be JSON"),
        (b"[1]", "JSON object"),
        (b"{" * 100_000, "must be JSON"),
        (b'{"schema_version":3}', "schema_version is 3; this version of expunge reads 1 and 2"),
        (b'{"schema_version":true}', "schema_version is True"),
        (b'{"schema_version":1}', "epsilon is not usable"),
        (b'{"schema_version":2}', "epsilon is not usable"),
    ],
)
def test_unusable_certificates(content, sentence, tmp_path) -> None:
    path, _ = make_run(tmp_path)
    path.write_bytes(content)
    with pytest.raises(CertificateError, match=sentence) as caught:
        verify(path)
    assert caught.value.exit_code == 2
    with pytest.raises(CertificateError, match=sentence):
        Certificate.load(path)


def test_a_certificate_over_the_limit_is_refused(tmp_path) -> None:
    path, _ = make_run(tmp_path)
    with path.open("ab") as file:
        file.truncate(100_000_001)
    with pytest.raises(CertificateError, match="larger than 100,000,000 bytes"):
        verify(path)


def test_missing_and_truncated_weights_are_unusable(tmp_path) -> None:
    path, _ = make_run(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(CertificateError, match="their header describes"):
        verify(path)
    weights.unlink()
    with pytest.raises(CertificateError, match=r"weights .* is not a file"):
        verify(path)
    with pytest.raises(CertificateError, match=r"certificate .* is not a file"):
        verify(tmp_path / "none.json")


def test_a_recipe_that_cannot_run_is_unusable() -> None:
    certificate = certify(make_record(), delta=1e-5)
    plain = certificate.model_dump(mode="json")
    with pytest.raises(CertificateError, match="learning_rate"):
        parse(rfc8785.dumps(plain | {"recipe": plain["recipe"] | {"learning_rate": 1.0}}))
    with pytest.raises(CertificateError, match="canonical"):
        Certificate.from_bytes(json.dumps(plain).encode())


# --- signatures


def test_signature(tmp_path) -> None:
    private, public = generate_key_pair()
    _, other = generate_key_pair()
    path, certificate = make_run(tmp_path)
    with pytest.raises(VerificationError, match="not signed"):
        verify(path, public_key=public)
    (tmp_path / "key.pem").write_bytes(private)
    signed = certificate.sign(tmp_path / "key.pem")
    assert signed == certificate.sign(private)
    signed.save(path)
    assert verify(path) == verify(path, public_key=public) == signed
    (tmp_path / "public.pem").write_bytes(public)
    assert verify(path, public_key=tmp_path / "public.pem") == signed
    with pytest.raises(VerificationError, match="it is signed by the key"):
        verify(path, public_key=other)
    assert signed.digest == certificate.digest
    assert signed.sha256 != certificate.sha256


def test_a_signature_of_something_else_does_not_hold(tmp_path) -> None:
    private, public = generate_key_pair()
    path, certificate = make_run(tmp_path)
    other = certify(make_record(gradient_evaluations=1), delta=1e-5).sign(private)
    certificate.model_copy(update={"signature": other.signature}).save(path)
    with pytest.raises(VerificationError, match="signature does not match"):
        verify(path, public_key=public)


@pytest.mark.parametrize("key", [b"", b"-----BEGIN PRIVATE KEY-----\nAAAA\n", b"\0" * 40])
def test_bad_keys_are_named(key, tmp_path) -> None:
    path, certificate = make_run(tmp_path)
    with pytest.raises(InputError, match="private key"):
        certificate.sign(key)
    certificate.sign(generate_key_pair()[0]).save(path)
    with pytest.raises(InputError, match="public key"):
        verify(path, public_key=key)


# --- sequences of requests


def make_chain(tmp_path, **changes: Any) -> list:
    paths, parent, before = [], None, "b" * 64
    for place in range(3):
        folder = tmp_path / str(place)
        folder.mkdir()
        tensors = WEIGHTS | {"steps": ("I64", (), place.to_bytes(8, "little"))}
        record = make_record(weights_before=before, weights_after=hash_of(tensors), **changes)
        certificate = certify(record, delta=1e-5, parent=parent)
        certificate.save(folder / "certificate.json")
        metadata = certificate.safetensors_metadata()
        write_safetensors(folder / "model.safetensors", tensors, metadata)
        paths.append(folder / "certificate.json")
        parent, before = certificate, record.weights_after
    return paths


def test_a_chain_of_requests(tmp_path) -> None:
    paths = make_chain(tmp_path)
    found = verify_chain(paths)
    assert found[1].parent == hashlib.sha256(paths[0].read_bytes()).hexdigest()
    assert found[2].weights.before == found[1].weights.after
    assert found[0].weights.before is None
    assert any("chained" in sentence for sentence in found[1].scope.covered)
    assert [c.epsilon for c in found] == [found[0].epsilon] * 3
    assert verify(paths[1], parent=paths[0]) == found[1]
    assert verify(paths[1].parent, parent=paths[0].parent) == found[1], "by their directories"
    assert verify_chain([path.parent for path in paths]) == found
    with pytest.raises(VerificationError, match="SHA-256 of the parent"):
        verify(paths[2], parent=paths[0])
    with pytest.raises(VerificationError, match="which was not given"):
        verify_chain(paths[1:])
    with pytest.raises(VerificationError, match="parent is None"):
        verify(paths[0], parent=paths[1])
    with pytest.raises(InputError, match="at least one"):
        verify_chain([])


def test_a_broken_parent_breaks_the_chain(tmp_path) -> None:
    paths = make_chain(tmp_path)
    forged = rewrite(Certificate.load(paths[0]), survival_bound=0.01)
    forged.save(paths[0])
    with pytest.raises(
        VerificationError, match=r"parent: survival_bound is .*SHA-256 of the parent"
    ):
        verify(paths[1], parent=paths[0])
    with pytest.raises(VerificationError, match="survival_bound"):
        verify_chain(paths)


def test_chains_that_do_not_fit_are_refused() -> None:
    parent = certify(make_record(), delta=1e-5)
    with pytest.raises(UnlearningError, match="the parent released"):
        certify(make_record(), delta=1e-5, parent=parent)
    fitting = {"weights_before": parent.weights.after}
    with pytest.raises(UnlearningError, match="SHA-256 of the parent"):
        certify(make_record(**fitting, parent="a" * 64), delta=1e-5, parent=parent)
    record = make_record(**fitting, frozen="a" * 64, frozen_names=("w",))
    with pytest.raises(UnlearningError, match="the frozen part is"):
        certify(record, delta=1e-5, parent=parent)
    with pytest.raises(UnlearningError, match="the centre is the old model itself"):
        certify(make_record(**fitting, centre=parent.weights.after), delta=1e-5, parent=parent)
    named = certify(make_record(**fitting, parent=parent.sha256), delta=1e-5, parent=parent)
    assert named.parent == parent.sha256


def test_releases_compose(tmp_path) -> None:
    """n releases of a μ-GDP run are √n μ-GDP together."""
    execution = make_record().execution
    one = certify(make_record(), delta=1e-5)
    path, four = make_run(tmp_path, execution=replace(execution, releases=4))
    assert four.mu == pytest.approx(2 * one.mu, rel=1e-12)
    assert four.releases == 4
    assert verify(path).epsilon > one.epsilon


def test_what_cannot_be_recomputed_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that breaks the second computation is a difference, never a traceback."""
    import expunge.certificates.verification as verification

    def overflow(*_: object) -> None:
        raise OverflowError("too large")

    monkeypatch.setattr(verification, "recompute", overflow)
    found = verification._check_numbers(certify(make_record(), delta=1e-5))
    assert len(found) == 1
    assert "cannot be recomputed" in found[0]
